"""How a relay has the owner answer a request: over the owner's inner socket, unchanged but for the client's address."""

from typing import Protocol

import attrs
import trio

from ichat import errors
from ichat.config.schema import DRAIN_S_MAX, Timeouts
from ichat.errors import ApiError
from ichat.http.framing import Chunked, UntilClose
from ichat.http.heads import HOP_BY_HOP, Headers, ResponseHead, request_head, response_head
from ichat.http.json_body import Body
from ichat.http.pool import Pool, Upstream
from ichat.http.request import Request
from ichat.http.server import Client
from ichat.listeners import Listeners
from ichat.protocol.messages import PEER_HEADER
from ichat.proxy.leg import Leg
from ichat.proxy.steps import AttemptStep
from ichat.proxy.upstream_request import JOINED_BYTES_MAX
from ichat.routing.endpoint import EndpointFacts

INNER_SOCKET = "inner"
"""The owner's socket in the state directory for requests that it answers itself."""
_SECONDS = DRAIN_S_MAX + 600.0
"""Until the first byte, and between two bytes: the owner has bounds of its own."""
_STEP = AttemptStep("", "", first_byte_s=_SECONDS, stall_s=_SECONDS, passes_all=True)
_MADE_ANEW = frozenset((b"content-length", b"transfer-encoding", b"expect", PEER_HEADER))
AGAIN_S = 0.1
"""Before a request is forwarded again that no owner has got."""
_READS = frozenset((b"GET", b"HEAD"))
_USUAL = frozenset((b"close", b"keep-alive"))
"""Values of `Connection` that say nothing about other headers: they are about the client's connection only."""


@attrs.define(eq=False)
class _PassingSink:
    """Sends the owner's response to the client as it is."""

    taker: Client
    version: bytes

    def begin(self, head: ResponseHead, _leg: Leg, /) -> bytes:
        """Return the client's head."""
        client = self.taker
        if isinstance(head.framing, UntilClose):
            client.begin_unframed()
        elif b"close" in head.by_name.get(b"connection", b"").lower():
            client.close_after_response()
        headers: Headers = [header for header in head.headers if header[0] not in HOP_BY_HOP]
        if not client.keep_alive:
            headers.append((b"connection", b"close"))
        if isinstance(head.framing, Chunked) and self.version == b"1.1":
            headers.append((b"transfer-encoding", b"chunked"))
        return response_head(head.status, headers, head.reason)

    async def break_off(self, error: ApiError, *, may_report: bool) -> bool:
        """End the connection if the client has a part of the response; see `BodySink`."""
        del error, may_report
        client = self.taker
        if client.head_sent:
            client.close_after_response()
        return client.head_sent


class OwnersAbsence(Protocol):
    """Whether there is an owner now; see `Ownerless`."""

    timeouts: Timeouts
    since: float | None
    changed: Listeners[[]]

    async def wait_until_back(self, deadline: float) -> None:
        """Wait until there is an owner, or until this time."""
        ...


class NewOwner:
    """The new process: it may need a moment until it answers; see `OwnersAbsence`."""

    def __init__(self, timeouts: Timeouts) -> None:
        self.timeouts = timeouts
        self.since: float | None = None
        self.changed: Listeners[[]] = Listeners()

    def __repr__(self) -> str:
        return "<NewOwner>"

    async def wait_until_back(self, deadline: float) -> None:
        """Do not wait: an attempt shows whether it is there."""


class InnerSocket:
    """The owner's inner socket, to which a relay forwards the requests that the owner answers itself."""

    def __init__(self, pool: Pool, path: str, ownerless: OwnersAbsence) -> None:
        self._pool = pool
        self._ownerless = ownerless
        self._endpoint = EndpointFacts(b"", Upstream("the gateway's own process", path, 0))

    def __repr__(self) -> str:
        return f"<InnerSocket {self._endpoint.upstream.host}>"

    async def forward(self, request: Request, client: Client) -> None:
        """Have the owner answer a request, or the next owner. Raises ApiError if nothing has been sent."""
        pieces = forwarded(request, client.peer)
        request.release_body()
        deadline = trio.current_time() + self._ownerless.timeouts.owner_wait_s
        while True:
            await self._ownerless.wait_until_back(deadline)
            leg = Leg(self._pool, self._endpoint, _STEP, _PassingSink(client, request.version), pieces, request.method)
            try:
                outcome = await leg.run()
            finally:
                del leg.sink
            if outcome.failure is None or outcome.kind == "cut":
                return
            with trio.move_on_after(AGAIN_S):
                await self._ownerless.changed.wait()
            is_lost = request.method in _READS and self._ownerless.since is not None
            if not (outcome.kind == "unreachable" or is_lost) or trio.current_time() >= deadline:
                raise errors.owner_away()


def forwarded(request: Request, peer: str) -> list[Body]:
    """Return the pieces of a request as the owner gets it."""
    headers = [
        (name, value)
        for name, value in request.headers
        if name not in _MADE_ANEW and not (name == b"connection" and value.lower() in _USUAL)
    ]
    headers.append((PEER_HEADER, peer.encode()))
    body = request.body
    if body or request.method in (b"POST", b"PUT", b"PATCH"):
        headers.append((b"content-length", b"%d" % len(body)))
    head = request_head(request.method, request.target, headers)
    if request.version != b"1.1":
        head = head.replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", 1)
    return [head + body] if len(body) <= JOINED_BYTES_MAX else [head, body]
