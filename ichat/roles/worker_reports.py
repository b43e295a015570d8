"""The worker's reports to the gateway beside its state: tokens that were counted late, and its engine's prefixes."""

import logging
import threading
from collections.abc import Callable

import httpx
import trio

from ichat.engines.held_prefixes import CacheChanges, HeldPrefixes
from ichat.protocol.messages import Heartbeat
from ichat.protocol.usage import LATE_MAX, LateUsage, Usage
from ichat.roles.heartbeat_sender import HeartbeatSender

log = logging.getLogger(__name__)

WAITING_MAX = 10_000
"""The most usages that are kept for a gateway that does not answer; the oldest are dropped first."""
PREFIXES_PATH = "/v1/workers/prefixes"
REPORT_S = 0.5
"""The least time between two reports of prefixes."""


class LateUsages:
    """The tokens of responses that were made in the background, until the gateway knows them; the oldest first.

    Its methods may be called in any thread.
    """

    def __init__(self, changed: Callable[[], None], waiting_max: int = WAITING_MAX) -> None:
        """`changed` is called after each new usage. Beyond `waiting_max` the oldest is lost."""
        self._waiting_max = waiting_max
        self._changed = changed
        self._waiting: dict[str, LateUsage] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<LateUsages {len(self._waiting)} wait>"

    def add(self, ticket: str, usage: Usage) -> None:
        """Note the tokens that the request with this ticket used."""
        with self._lock:
            if len(self._waiting) >= self._waiting_max:
                del self._waiting[next(iter(self._waiting))]
                log.warning("the gateway accepts no heartbeats: the tokens of a response in the background are lost")
            self._waiting[ticket] = LateUsage(ticket, *usage)
        self._changed()

    def some(self) -> list[LateUsage]:
        """Return as many as a heartbeat can have."""
        with self._lock:
            return list(self._waiting.values())[:LATE_MAX]

    def forget(self, accepted: Heartbeat) -> bool:
        """Forget the usages in a heartbeat that the gateway has accepted; return whether there are more."""
        with self._lock:
            for one in accepted.late_usage:
                self._waiting.pop(one.ticket, None)
            return bool(self._waiting)


class PrefixReporter:
    """Sends a gateway the prefixes that the engine of a start of a worker has lost, or holds; see `held_prefixes`."""

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
            response = await gateway.post(PREFIXES_PATH, json=report)
            error = None if response.is_success else f"{response.status_code} {response.text[:300]}"
        except httpx.HTTPError as failure:
            error = str(failure) or type(failure).__name__
        if error is None:
            self._held.sent()
            return
        log.info("the gateway did not accept a report of prefixes: %s", error)
        self._refused_at = accepted
        self._held.report_all()
