"""The worker's side of the beats: it tells the gateway everything, and hears what its group has lost."""

import contextlib
import json
import logging
import math
import socket
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, cast

import attrs
import httpx
import trio

from ichat.http.tls import client_context
from ichat.protocol import WORKER_HEADER, Heartbeat, Machine, PeerLoss

log = logging.getLogger(__name__)

BEAT_TIMEOUT_S = 5.0
BEAT_RETRY_S = 1.0
GOODBYE_S = 5.0
ASK_TIMES = 2
"""How often another member of the group is asked, after the gateway has not heard of it, before it counts as lost."""


def is_address(address: str) -> bool:
    """Say whether beats can be sent there: ``http://gw:4000``, https, or ``unix:/path``."""
    try:
        url = urllib.parse.urlsplit(address)
        if url.scheme == "unix":
            return bool(url.path)
        httpx.URL(address)
    except (ValueError, httpx.InvalidURL):
        return False
    return url.scheme in ("http", "https") and bool(url.hostname)


class HeartbeatSender:
    """Tells one gateway of one worker."""

    def __init__(
        self,
        address: str,
        *,
        ca_file: str | None,
        token: str = "",
        host: str,
        now: Callable[[], Heartbeat],
        lost: Callable[[str], None],
        orphan_after_s: float = math.inf,
    ) -> None:
        """`address` is a URL, or ``unix:/path``; `host` is where the worker listens, or how the gateway reaches it.

        `token` is what the gateway wants to see, "" for none. `now` gives the beat to send, and `lost` is called when
        another member of the group is gone. `orphan_after_s`
        is how long the worker stays without a gateway.
        """
        self._address = address
        self._ca_file = ca_file
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._host = host
        self._now = now
        self._lost = lost
        self._orphan_after_s = orphan_after_s
        self._changed = trio.Event()
        self._beating = trio.CancelScope()
        self._own_address = "127.0.0.1"
        self._gateway_id = ""
        """Which start of the gateway took the last beat, where it says that."""
        self._is_echo = False
        """Whether the next beat is sent only because the gateway was started anew."""
        self._away_since: float | None = None
        """When a beat was not taken for the first time since the last one that was."""
        self.orphaned = trio.Event()
        """Set when no beat was taken for `orphan_after_s`, from the first that was not."""
        self._told: Machine | None = None
        """What the gateway has been told of the machine."""
        self._silent: dict[str, int] = {}
        """How often in a row other members of the group have not answered."""

    def changed(self) -> None:
        """Beat now rather than at the next interval."""
        self._changed.set()

    async def send_forever(self) -> None:
        """Tell the gateway everything, at every change and interval; a gateway that is away is asked again soon."""
        reached = True
        with self._beating:
            async with self._gateway() as gateway:
                while True:
                    self._changed = trio.Event()
                    heartbeat = await self._send_now()
                    error = await self._send(gateway, heartbeat)
                    if error and reached:
                        log.warning("the gateway %s does not take beats: %s; trying again", self._address, error)
                    elif not error and not reached:
                        log.info("the gateway %s takes beats again", self._address)
                    reached = not error
                    self._look_for_orphan(reached=reached)
                    soon = not reached or self._silent
                    with trio.move_on_after(BEAT_RETRY_S if soon else heartbeat.heartbeat_interval):
                        await self._changed.wait()

    def _look_for_orphan(self, *, reached: bool) -> None:
        """Judge by beats that were sent: a machine that stood still has not lost its gateway by that."""
        if reached:
            self._away_since = None
            return
        now = trio.current_time()
        self._away_since = now if self._away_since is None else self._away_since
        if now - self._away_since >= self._orphan_after_s:
            self.orphaned.set()

    async def say_goodbye(self) -> None:
        """Tell the gateway that this worker is gone, if that can be done quickly; it beats no more."""
        self._beating.cancel()
        with trio.move_on_after(GOODBYE_S):
            async with self._gateway() as gateway:
                await self._send(gateway, attrs.evolve(await self._send_now(), state="gone"))

    def _gateway(self) -> httpx.AsyncClient:
        url = urllib.parse.urlsplit(self._address)
        if url.scheme == "unix":
            transport = httpx.AsyncHTTPTransport(uds=url.path)
            return httpx.AsyncClient(base_url="http://localhost", timeout=BEAT_TIMEOUT_S, transport=transport)
        context = client_context(self._ca_file) if url.scheme == "https" else False
        return httpx.AsyncClient(
            base_url=self._address, timeout=BEAT_TIMEOUT_S, trust_env=False, verify=context, headers=self._headers
        )

    async def _send(self, gateway: httpx.AsyncClient, heartbeat: Heartbeat) -> str | None:
        """Send one beat; give what went wrong."""
        try:
            response = await gateway.post("/v1/workers/heartbeat", json=attrs.asdict(heartbeat))
        except (httpx.HTTPError, ValueError) as error:
            return str(error) or type(error).__name__
        if not response.is_success:
            return f"{response.status_code} {response.text[:300]}"
        answer = _answer(response.content)
        self._told = None if answer.get("wants_machine") is True else heartbeat.machine or self._told
        self._meet(str(answer.get("gateway_id") or ""))
        found = _lost(answer) if heartbeat.state != "gone" else []
        self._silent = {lost.worker_id: self._silent.get(lost.worker_id, 0) for lost in found}
        for lost in found:
            await self._confirm_loss(lost)
        self._silent = {worker_id: count for worker_id, count in self._silent.items() if count}
        return None

    def _meet(self, gateway_id: str) -> None:
        """Beat again at once to a gateway that was started anew; not twice in a row, should two share the address."""
        is_new = bool(self._gateway_id and gateway_id and gateway_id != self._gateway_id)
        if is_new and not self._is_echo:
            log.info("the gateway %s was started anew", self._address)
            self.changed()
        self._is_echo = is_new and not self._is_echo
        self._gateway_id = gateway_id or self._gateway_id

    def warn_of_loopback(self) -> None:
        """Say so where the other members of a group may not reach this worker at the address that it has."""
        if self._host in ("127.0.0.1", "localhost", "::1"):
            log.warning(
                "the other members of the group can ask for this worker only from this machine: give --host 0.0.0.0,"
                " or --advertise-host, where they are on others"
            )

    async def _confirm_loss(self, lost: PeerLoss) -> None:
        """Take a loss for true that is certain; a member that was only silent is asked itself first."""
        if not lost.is_certain:
            count = 0 if await _answers(lost) else self._silent.get(lost.worker_id, 0) + 1
            self._silent[lost.worker_id] = count
            if count < ASK_TIMES:
                return
        self._lost(f"{lost.worker_id}, another member of its group, {lost.why}")

    async def _send_now(self) -> Heartbeat:
        """Give the beat to send: of the machine only what the gateway has not been told."""
        heartbeat = self._now()
        machine = None if heartbeat.machine == self._told else heartbeat.machine
        return attrs.evolve(heartbeat, host=await self._reachable(), machine=machine)

    async def _reachable(self) -> str:
        """Give the address at which the gateway reaches this worker: the one from which it would be reached itself."""
        if self._host not in ("", "0.0.0.0", "::"):
            return self._host
        url = urllib.parse.urlsplit(self._address)
        if url.scheme == "unix":
            return self._own_address
        with trio.move_on_after(BEAT_TIMEOUT_S), contextlib.suppress(OSError, UnicodeError):
            found = await trio.socket.getaddrinfo(url.hostname, url.port or 80, type=socket.SOCK_DGRAM)
            family, kind, _, _, there = found[0]
            with socket.socket(family, kind) as probe:
                probe.connect(there)
                self._own_address = probe.getsockname()[0]
        return self._own_address


def _answer(body: bytes) -> dict[str, Any]:
    """Parse a gateway's answer; empty for one of another kind."""
    with contextlib.suppress(ValueError, RecursionError):
        answer = json.loads(body)
        if isinstance(answer, dict):
            return cast("dict[str, Any]", answer)
    return {}


def _lost(answer: Mapping[str, Any]) -> list[PeerLoss]:
    """Read from the gateway's answer what the group has lost; a gateway of another kind says nothing of it."""
    with contextlib.suppress(TypeError, KeyError):
        found: list[dict[str, Any]] = answer.get("lost") or []
        return [PeerLoss(**{field.name: lost[field.name] for field in attrs.fields(PeerLoss)}) for lost in found]
    return []


async def _answers(lost: PeerLoss) -> bool:
    """Say whether it is still this worker that answers there; of an address that is none, nothing can be said."""
    host = f"[{lost.host}]" if ":" in lost.host else lost.host
    async with httpx.AsyncClient(timeout=BEAT_TIMEOUT_S, trust_env=False) as client:
        try:
            answer = await client.get(f"http://{host}:{lost.port}/health")
        except (httpx.InvalidURL, ValueError):
            return True
        except httpx.HTTPError:
            return False
    return answer.headers.get(WORKER_HEADER.decode()) == lost.worker_id
