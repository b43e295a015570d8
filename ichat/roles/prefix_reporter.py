"""The worker's reports to the gateway: which prefixes its engine's cache has lost, or holds; see `held_prefixes`."""

import logging

import httpx
import trio

from ichat.engines.held_prefixes import CacheChanges, HeldPrefixes
from ichat.roles.heartbeat_sender import HeartbeatSender

log = logging.getLogger(__name__)

PATH = "/v1/workers/prefixes"
REPORT_S = 0.5
"""The least time between two reports."""


class PrefixReporter:
    """Sends the reports of a single start of a worker to a gateway."""

    def __init__(self, sender: HeartbeatSender, held: HeldPrefixes, worker_id: str, start_id: str) -> None:
        """`sender` knows the way to the gateway, and whether it knows this worker."""
        self._sender = sender
        self._held = held
        self._names = {"worker_id": worker_id, "start_id": start_id}
        self._gateway_id = ""
        """The start of the gateway that has received the reports so far."""
        self._refused_at = -1
        """The number of accepted heartbeats when a report was refused: the next report follows another heartbeat."""

    async def report_forever(self) -> None:
        """Report changes, at most every `REPORT_S`, to a gateway that accepts this worker's heartbeats."""
        async with self._sender.client() as gateway:
            while True:
                await trio.sleep(REPORT_S)
                if self._sender.accepted in (0, self._refused_at):
                    continue
                if self._gateway_id != self._sender.gateway_id:
                    self._gateway_id = self._sender.gateway_id
                    if len(self._held):
                        self._held.report_all()
                if (changes := self._held.next_changes()) is not None:
                    await self._send(gateway, changes)

    async def _send(self, gateway: httpx.AsyncClient, changes: CacheChanges) -> None:
        """Send a report; if it fails, everything is reported again after the next heartbeat."""
        accepted = self._sender.accepted
        report = {
            **self._names,
            "cleared": changes.cleared,
            "have": [digest.hex() for digest in changes.have],
            "gone": [digest.hex() for digest in changes.gone],
        }
        try:
            response = await gateway.post(PATH, json=report)
            error = None if response.is_success else f"{response.status_code} {response.text[:300]}"
        except httpx.HTTPError as failure:
            error = str(failure) or type(failure).__name__
        if error is None:
            self._held.sent()
            return
        log.info("the gateway did not accept a report of prefixes: %s", error)
        self._refused_at = accepted
        self._held.report_all()
