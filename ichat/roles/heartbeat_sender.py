"""The worker's side of heartbeats: it sends its state to the gateway, which answers with the losses of its group."""

import contextlib
import logging
import math
import socket
import urllib.parse
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast

import attrs
import httpx
import trio

from ichat.config.own_secret import find_secret
from ichat.http.tls import client_context
from ichat.listeners import Listeners
from ichat.protocol.json_text import object_in, to_json
from ichat.protocol.messages import (
    HEARTBEAT_INTERVAL_MAX_S,
    WORKER_HEADER,
    Heartbeat,
    Machine,
    PeerLoss,
    digest_of,
    registration_of,
    shortened,
)

log = logging.getLogger(__name__)

PATH = "/v1/workers/heartbeat"
HEARTBEAT_TIMEOUT_S = 5.0
HEARTBEAT_RETRY_S = 1.0
GOODBYE_TIMEOUT_S = 5.0
ASK_TIMES = 2
"""How often a member of the group that the gateway misses must fail to answer before it counts as lost."""
_JSON = {"content-type": "application/json"}
_NOT_KNOWN = (400, 404)
"""The answers to a short heartbeat of gateways that do not know the form, or the registration."""


def is_address(address: str) -> bool:
    """Return whether heartbeats can be sent there: ``http://gw:4000``, https, or ``unix:/path``."""
    try:
        url = urllib.parse.urlsplit(address)
        if url.scheme == "unix":
            return bool(url.path)
        httpx.URL(address)
    except (ValueError, httpx.InvalidURL):
        return False
    return url.scheme in ("http", "https") and bool(url.hostname)


class _OwnSecret(httpx.Auth):
    """Shows a gateway of this machine that the worker is its own user's, by the secret that such a gateway keeps."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._found: tuple[str, str] | None = None

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Send a request with the secret, if there is any, and once more if the gateway's secret has changed."""
        if not self._found:
            self._found = find_secret(self._address)
        response = yield self._with_secret(request)
        if response.status_code == 401:
            before, self._found = self._found, find_secret(self._address)
            if self._found and self._found != before:
                yield self._with_secret(request)

    def _with_secret(self, request: httpx.Request) -> httpx.Request:
        if self._found:
            secret, url = self._found
            request.headers["authorization"] = f"Bearer {secret}"
            if request.url.scheme == "http":  # with https the certificate identifies the gateway
                request.url = request.url.copy_with(host=httpx.URL(url).host)
        return request


class HeartbeatSender:
    """Sends the heartbeats of a worker to a gateway."""

    def __init__(
        self,
        address: str,
        *,
        ca_file: str | None,
        token: str = "",
        host: str,
        now: Callable[[], Heartbeat],
        lost: Callable[[str], None],
        accepted: Callable[[Heartbeat], bool] = lambda _: False,
        orphan_after_s: float = math.inf,
    ) -> None:
        """`address` is a URL, or ``unix:/path``; `host` is where the worker listens, or how the gateway reaches it.

        `token` is the gateway's, "" for none. `now` returns the heartbeat to send, and `lost` is called when another
        member of the group is lost. `accepted` is called with each heartbeat that was accepted, and returns
        whether there is more to be sent at once. `orphan_after_s` is how long the worker stays without a gateway.
        """
        self._address = address
        self._ca_file = ca_file
        self._token = token
        self._auth = None if token else _OwnSecret(address)
        self._host = host
        self._now = now
        self._lost = lost
        self._accepted = accepted
        self._orphan_after_s = orphan_after_s
        self._is_due = False
        """Whether a heartbeat is sent now rather than at the next interval."""
        self._woken: Listeners[[]] = Listeners()
        self._sending = trio.CancelScope()
        self._own_address = "127.0.0.1"
        self.accepted = 0
        """How many heartbeats the gateway has accepted."""
        self.gateway_id = ""
        """Identifies the gateway process that accepted the last heartbeat, if it says so."""
        self._is_repeat = False
        """Whether the next heartbeat is sent only because the gateway has restarted."""
        self._refused_since: float | None = None
        """When the first heartbeat failed since the last accepted heartbeat."""
        self._must_end = trio.Event()
        """Set when this worker must end: the gateway says so, or has accepted no heartbeat for `orphan_after_s`."""
        self._why = ""
        """Why, in a few words."""
        self._sent_machine: Machine | None = None
        """The machine as the gateway knows it."""
        self._registration: Heartbeat | None = None
        """The newest heartbeat without its status."""
        self._digest = ""
        """The digest of `_registration`."""
        self._registered = ""
        """The digest for which the gateway accepts short heartbeats; empty: for none."""
        self._interval_s = 0.0
        """The seconds between two heartbeats for which the gateway asks."""
        self._silent: dict[str, int] = {}
        """How often in a row each other member of the group has not answered."""

    def changed(self) -> None:
        """Send a heartbeat now rather than at the next interval."""
        self._is_due = True
        self._woken()

    async def ask_to_join(self) -> str:
        """Return why the gateway does not let this worker join; "" if it does, says nothing of that, or is not there.

        A heartbeat before the load asks for that, within HEARTBEAT_TIMEOUT_S.
        """
        with trio.move_on_after(HEARTBEAT_TIMEOUT_S):
            async with self.client() as gateway:
                try:
                    response = await self._post(gateway, await self._current())
                except (httpx.HTTPError, ValueError):
                    return ""
            if response.status_code not in (401, 403, 410):
                return ""
            error = cast("dict[str, Any]", object_in(response.content).get("error") or {})
            why = error.get("message") or response.text[:300]
            return f"The gateway {self._address} does not let this worker join ({response.status_code}): {why}"
        return ""

    async def send_forever(self) -> None:
        """Send a heartbeat at every change and interval, and soon again after a failure."""
        reached = True
        with self._sending:
            async with self.client() as gateway:
                while True:
                    self._is_due = False
                    heartbeat = await self._current()
                    error = await self._send(gateway, heartbeat)
                    if error and reached:
                        log.warning("the gateway %s accepts no heartbeats: %s; trying again", self._address, error)
                    elif not error and not reached:
                        log.info("the gateway %s accepts heartbeats again", self._address)
                    reached = not error
                    self._note_orphan(reached=reached)
                    soon = not reached or self._silent
                    interval_s = max(heartbeat.heartbeat_interval, self._interval_s)
                    with trio.move_on_after(HEARTBEAT_RETRY_S if soon else interval_s):
                        while not self._is_due:
                            await self._woken.wait()

    def _note_orphan(self, *, reached: bool) -> None:
        """Count only heartbeats that were sent: a machine that was suspended has not lost its gateway."""
        if reached:
            self._refused_since = None
            return
        now = trio.current_time()
        self._refused_since = now if self._refused_since is None else self._refused_since
        if now - self._refused_since >= self._orphan_after_s:
            self._end(f"the gateway has accepted no heartbeat for {self._orphan_after_s:g} s")

    def _end(self, why: str) -> None:
        """Have this worker end, for the first reason that there is."""
        self._why = self._why or why
        self._must_end.set()

    async def wait_for_end(self) -> str:
        """Wait until this worker must end; return why, in a few words."""
        await self._must_end.wait()
        return self._why

    async def send_goodbye(self) -> None:
        """Send the last heartbeat, if that can be done quickly: this worker is gone."""
        self._sending.cancel()
        with trio.move_on_after(GOODBYE_TIMEOUT_S):
            async with self.client() as gateway:
                await self._send(gateway, attrs.evolve(await self._current(), state="gone"))

    def client(self) -> httpx.AsyncClient:
        """Return a client for requests to the gateway's own routes."""
        return client_of(self._address, self._ca_file, self._token, self._auth)

    async def _send(self, gateway: httpx.AsyncClient, heartbeat: Heartbeat) -> str | None:
        """Send a heartbeat; return why it failed, or None."""
        try:
            response = await self._post(gateway, heartbeat)
        except (httpx.HTTPError, ValueError) as error:
            return str(error) or type(error).__name__
        if response.status_code == 410:
            self._end("the gateway has ended this launch of the worker")
        if not response.is_success:
            return f"{response.status_code} {response.text[:300]}"
        answer = object_in(response.content)
        self.accepted += 1
        if answer.get("ends") is True:
            self._end("the gateway has asked this worker to end")
        if self._accepted(heartbeat):
            self.changed()
        self._registered = heartbeat.registration if answer.get("accepts_short") is True else ""
        self._interval_s = _interval(answer)
        self._sent_machine = None if answer.get("wants_machine") is True else heartbeat.machine or self._sent_machine
        self._note_gateway(str(answer.get("gateway_id") or ""))
        found = _lost(answer) if heartbeat.state != "gone" else []
        self._silent = {lost.worker_id: self._silent.get(lost.worker_id, 0) for lost in found}
        for lost in found:
            await self._confirm_loss(lost)
        self._silent = {worker_id: count for worker_id, count in self._silent.items() if count}
        return None

    async def _post(self, gateway: httpx.AsyncClient, heartbeat: Heartbeat) -> httpx.Response:
        """Post a heartbeat, in its short form if the gateway knows the registration. Raises what httpx raises.

        A gateway that does not know it, or not the short form, may answer at the same address.
        """
        if self._registered and heartbeat.registration == self._registered:
            response = await gateway.post(PATH, content=to_json(shortened(heartbeat)), headers=_JSON)
            if response.status_code not in _NOT_KNOWN:
                return response
        self._registered = ""
        return await gateway.post(PATH, content=to_json(attrs.asdict(heartbeat)), headers=_JSON)

    def _note_gateway(self, gateway_id: str) -> None:
        """Send again at once to a gateway that has restarted, but not twice in a row: two may share the address."""
        is_new = bool(self.gateway_id and gateway_id and gateway_id != self.gateway_id)
        if is_new and not self._is_repeat:
            log.info("the gateway %s has restarted", self._address)
            self.changed()
        self._is_repeat = is_new and not self._is_repeat
        self.gateway_id = gateway_id or self.gateway_id

    def warn_of_loopback(self) -> None:
        """Log a warning if the other members of the group may not reach this worker at its address."""
        if self._host in ("127.0.0.1", "localhost", "::1"):
            log.warning(
                "the other members of the group reach this worker only from this machine: give --host 0.0.0.0,"
                " or --advertise-host, if they are on others"
            )

    async def _confirm_loss(self, lost: PeerLoss) -> None:
        """Report a loss that is certain; ask a member first if it was only silent."""
        if not lost.is_certain:
            count = 0 if await _answers(lost) else self._silent.get(lost.worker_id, 0) + 1
            self._silent[lost.worker_id] = count
            if count < ASK_TIMES:
                return
        self._lost(f"{lost.worker_id}, another member of its group, {lost.why}")

    async def _current(self) -> Heartbeat:
        """Return the heartbeat to send, with the machine only if the gateway does not know it yet."""
        heartbeat = attrs.evolve(self._now(), host=await self._reachable())
        registration = registration_of(heartbeat)
        if registration != self._registration:
            self._registration, self._digest = registration, digest_of(registration)
        machine = None if heartbeat.machine == self._sent_machine else heartbeat.machine
        return attrs.evolve(heartbeat, machine=machine, registration=self._digest)

    async def _reachable(self) -> str:
        """Return the worker's address for the gateway: the source address of its own packets to the gateway."""
        if self._host not in ("", "0.0.0.0", "::"):
            return self._host
        self._own_address = await local_address(self._address) or self._own_address
        return self._own_address


def client_of(address: str, ca_file: str | None, token: str = "", auth: httpx.Auth | None = None) -> httpx.AsyncClient:
    """Return a client for requests to the gateway's own routes at a URL, or ``unix:/path``; `token` is shown there."""
    url = urllib.parse.urlsplit(address)
    if url.scheme == "unix":
        transport = httpx.AsyncHTTPTransport(uds=url.path)
        return httpx.AsyncClient(base_url="http://localhost", timeout=HEARTBEAT_TIMEOUT_S, transport=transport)
    context = client_context(ca_file) if url.scheme == "https" else False
    return httpx.AsyncClient(
        base_url=address,
        timeout=HEARTBEAT_TIMEOUT_S,
        trust_env=False,
        verify=context,
        headers={"authorization": f"Bearer {token}"} if token else {},
        auth=auth,
    )


async def local_address(address: str) -> str:
    """Return this machine's address on the way to a gateway: loopback if it is here; "" where there is no way."""
    url = urllib.parse.urlsplit(address)
    if url.scheme == "unix":
        return "127.0.0.1"
    with trio.move_on_after(HEARTBEAT_TIMEOUT_S), contextlib.suppress(OSError, UnicodeError):
        found = await trio.socket.getaddrinfo(url.hostname, url.port or 80, type=socket.SOCK_DGRAM)
        family, kind, _, _, there = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    return ""


def _interval(answer: Mapping[str, Any]) -> float:
    """Return the seconds until the next heartbeat for which the gateway asks; 0 if it asks for nothing sensible."""
    asked = answer.get("heartbeat_interval")
    return float(asked) if isinstance(asked, int | float) and 0 <= asked <= HEARTBEAT_INTERVAL_MAX_S else 0.0


def _lost(answer: Mapping[str, Any]) -> list[PeerLoss]:
    """Return the workers that the group has lost, from the gateway's answer; none if it has another form."""
    with contextlib.suppress(TypeError, KeyError):
        found: list[dict[str, Any]] = answer.get("lost") or []
        return [PeerLoss(**{field.name: lost[field.name] for field in attrs.fields(PeerLoss)}) for lost in found]
    return []


async def _answers(lost: PeerLoss) -> bool:
    """Return whether this worker still answers at its address, or cannot be asked.

    A worker without a port cannot be asked: its gateway has started it, and reports its end with certainty.
    """
    if not lost.port:
        return True
    host = f"[{lost.host}]" if ":" in lost.host else lost.host
    async with httpx.AsyncClient(timeout=HEARTBEAT_TIMEOUT_S, trust_env=False) as client:
        try:
            url = f"http://{host}:{lost.port}/health"
            answer = await client.get(url, headers={WORKER_HEADER.decode(): lost.worker_id})
        except (httpx.InvalidURL, ValueError):
            return True
        except httpx.HTTPError:
            return False
    return answer.headers.get(WORKER_HEADER.decode()) == lost.worker_id
