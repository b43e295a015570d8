"""An exchange with an endpoint. Its outcome is a value, and a sink receives the response.

An endpoint that may have worked on a request does not get it again. The request is sent once more only if a kept
connection broke at once, without a byte of response.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import attrs
import trio

from ichat import errors
from ichat.errors import ApiError
from ichat.http.body_mover import ByteObserver, ChunkGapHistogram
from ichat.http.client_side import ClientSide
from ichat.http.failures import Declined, ResponseRejected, UpstreamError
from ichat.http.heads import ResponseHead
from ichat.http.json_body import Body
from ichat.http.keepalive import KeepAlive
from ichat.http.pool import Connection, Pool
from ichat.http.relay import Piece, Relay
from ichat.http.server import Taker
from ichat.protocol.messages import CODE_HEADER, WHY_HEADER, sentence
from ichat.proxy.refusals import Failure
from ichat.proxy.steps import ANSWERED, AttemptStep, Outcome, OutcomeKind, is_rejected
from ichat.proxy.token_usage import ReportedUsage, TokenUsage
from ichat.routing.endpoint import EndpointFacts

_TOO_LONG = errors.CONTEXT_LENGTH_EXCEEDED.encode()
KEPT_RACE_S = 1.0
"""How soon a kept connection breaks if its upstream was about to close it."""

_Begun = tuple[Connection, Relay, list[Piece]]
"""An exchange on a connection, and the part of the request that the upstream has not accepted yet."""


class BodySink(Protocol):
    """Receives a leg's response."""

    @property
    def taker(self) -> Taker:
        """The object to which the bytes are sent."""
        ...

    @property
    def version(self) -> bytes:
        """Its version of HTTP: before 1.1, there are no chunks."""
        ...

    def begin(self, head: ResponseHead, leg: "Leg", /) -> bytes:
        """Called with the endpoint's head; returns the bytes to send for it."""
        ...

    async def break_off(self, error: ApiError, *, may_report: bool) -> bool:
        """End a response that its endpoint did not finish, so that it does not seem whole.

        `may_report` says that an event can say so. Returns False if nothing was sent, so that the error still can be.
        """
        ...


class Nowhere:
    """Receives a response and drops it."""

    peer = "nowhere"
    version = b"1.1"

    @property
    def sock(self) -> "Nowhere":
        """The object to which a relay sends."""
        return self

    @property
    def taker(self) -> "Nowhere":
        """See `BodySink`."""
        return self

    def send(self, data: bytes | memoryview, /) -> int:
        """Drop some bytes, and return how many."""
        return len(data)

    send_some = send

    def not_sent(self, error: OSError, /) -> int:
        """Not reached: nothing is ever left unsent."""
        raise error

    def response_is_whole(self) -> None:
        """Note nothing: the response has ended."""

    async def send_all(self, data: bytes, /) -> None:
        """Drop these bytes."""

    def begin(self, _head: ResponseHead, _leg: "Leg", /) -> bytes:
        """Send nothing for a head."""
        return b""

    async def break_off(self, error: ApiError, *, may_report: bool) -> bool:
        """Return that nothing was sent."""
        del error, may_report
        return False


def _ignore(_leg: "Leg") -> None:
    """Learn nothing from a response that begins."""


@attrs.define(eq=False, repr=False)
class Leg:
    """An exchange with an endpoint, and the facts learnt about it. Times are Trio's clock."""

    pool: Pool
    endpoint: EndpointFacts
    step: AttemptStep
    sink: BodySink
    pieces: Sequence[Body]
    """The request, as the endpoint gets it; freed when a response begins."""
    method: bytes
    usage: TokenUsage | ReportedUsage | None = None
    """Reads the tokens that the response reports."""
    gaps: ChunkGapHistogram | None = None
    keepalive: KeepAlive | None = None
    heard: Callable[["Leg"], None] = _ignore
    """Called when a response begins that is passed on."""
    watch: Callable[[ByteObserver | None], ByteObserver] | None = None
    """Returns an observer of the body that also has the reader of tokens see it."""

    relay: Relay | None = None
    asked_at: float | None = None
    answered_at: float | None = None
    status: int = 0
    """Of the response, once it has begun."""
    error: str = ""
    """The code of the error, if the response did not go well."""
    is_stream: bool = False
    """Whether the response is a stream of events."""
    _begun: _Begun | None = None
    """The exchange that `begin` has begun."""
    _refused: int = 0
    """The status of a response that is not passed on."""
    _is_too_long: bool = False
    """Whether the endpoint has refused the request as too long, and another model may accept it."""

    def __repr__(self) -> str:
        return f"<Leg to {self.endpoint.id.decode()} {self.status}>"

    def begin(self, changed: Callable[[], None]) -> bool:
        """Begin the exchange on a kept connection, without a task; return whether all of the request was sent.

        If it was, `changed` is called once, and `end` is asked then. If it was not, or `end` returns False, `run`
        follows; `abandon`, if the request is cut off before.
        """
        connection = self.pool.acquire(self.endpoint.upstream)
        if connection is None:
            return False
        self._begun = _, relay, pieces = self._begin_on(connection)
        relay.begin(pieces, changed)
        return not pieces

    def end(self) -> bool:
        """End an exchange that `begin` has begun, and return whether the response is whole."""
        assert self._begun is not None
        connection, relay, _ = self._begun
        if not relay.end():
            return False
        self._begun = None
        if relay.reusable:
            self.pool.release(connection)
        else:
            self.pool.discard(connection)
        return True

    def abandon(self) -> None:
        """Break off an exchange that `begin` has begun. Harmless if there is none."""
        if self._begun is not None:
            connection, relay, _ = self._begun
            self._begun = None
            relay.abandon()
            self.pool.discard(connection)

    async def run(self) -> Outcome:
        """Have the endpoint answer the request, and return how that went.

        A kept connection may have been closed by the upstream just now, so that the request never got there: then it
        is sent once more, on a fresh connection. If that breaks later, or cannot be made, the request may have been
        worked on, and may be the reason: it goes nowhere else.
        """
        upstream, pool, earlier = self.endpoint.upstream, self.pool, None
        begun, self._begun = self._begun, None
        connection = pool.acquire(upstream) if begun is None else begun[0]
        while True:
            is_fresh = connection is None
            if connection is None:
                try:
                    connection = await pool.connect(upstream)
                except ApiError as error:
                    return self._unconnected(error, earlier)
            _, relay, pieces = begun or self._begin_on(connection)
            asked_at = self.asked_at or 0.0
            try:
                await relay.run(pieces)
            except UpstreamError as error:
                lost = error.with_traceback(None)
            else:
                if relay.reusable:
                    pool.release(connection)
                    connection = None
                return ANSWERED
            finally:
                if connection is not None:
                    pool.discard(connection)
            soon = trio.current_time() - asked_at < KEPT_RACE_S
            if is_fresh or lost.answered or lost.timed_out or not soon:
                return await self._failed(lost)
            earlier, connection, begun = lost, None, None

    def _unconnected(self, error: ApiError, earlier: UpstreamError | None) -> Outcome:
        """Return the outcome where no connection can be made; `earlier` says why a kept connection has broken."""
        if earlier is not None:
            name, why = self.endpoint.upstream.name, str(earlier)
            return self._outcome("broken", errors.upstream_failed(name, why), why)
        return self._outcome("unreachable" if error.code == "upstream_unreachable" else "unfit", error)

    def _begin_on(self, connection: Connection) -> _Begun:
        """Return an exchange on a connection; nothing of the request has been sent."""
        relay = self._relay_on(connection)
        self.asked_at = self.pool.hub.now  # the relay has just looked at the clock
        return connection, relay, [*self.pieces]

    def _relay_on(self, connection: Connection) -> Relay:
        """Return the relay of the request and its response on a connection."""
        step, reader = self.step, self.usage if isinstance(self.usage, TokenUsage) else None
        relay = self.relay = Relay(
            connection,
            ClientSide(self.sink.taker, self.sink.version, self.keepalive),
            method=self.method,
            on_head=self._on_head,
            first_byte_s=step.first_byte_s,
            stall_s=step.stall_s,
            usage=reader if self.watch is None else self.watch(reader),
            gaps=self.gaps,
        )
        if self.keepalive is not None:
            self.keepalive.follow(relay)
        return relay

    async def _failed(self, lost: UpstreamError) -> Outcome:
        """Return the outcome of a response that did not arrive whole, after what can be done for the client."""
        why, name = str(lost), self.endpoint.upstream.name
        if self._is_too_long:
            return self._outcome("too_long", errors.context_length_exceeded(self.step.model))
        if lost.declined:
            return self._outcome("declined", errors.declined(self.step.model, why), why)
        kind: OutcomeKind = "broken" if lost.retry is None else "rejected"
        error = errors.upstream_failed(name, why, retry=lost.retry)
        if lost.timed_out:
            kind, seconds = "late", self.step.stall_s if lost.answered else self.step.first_byte_s
            error = errors.upstream_timeout(name, seconds)
        if self.answered_at is not None and await self.sink.break_off(error, may_report=lost.can_report):
            self.error, kind = error.code, "cut"
        return self._outcome(kind, error, why)

    def _outcome(self, kind: OutcomeKind, error: ApiError | None = None, why: str = "") -> Outcome:
        return Outcome(
            kind,
            self.step.endpoint,
            None if error is None else Failure.of(error),
            why,
            status=self.status or self._refused,
            is_external=self.endpoint.route is not None,
            is_over=self.answered_at is not None,
        )

    def _on_head(self, head: ResponseHead) -> bytes:
        """Called with the endpoint's head: return the bytes to send for it.

        From here on the request is sent nowhere else. Raises ResponseRejected or Declined for a response that is not
        passed on.
        """
        names = head.by_name
        if self.step.passes_all:
            self.error = names.get(CODE_HEADER, b"").decode()
        else:
            self._check(head.status, names)
        self.status = head.status
        if head.status >= 400 and self.keepalive is not None and self.keepalive.has_begun:
            self.error = f"upstream_{head.status}"  # the client's status is 200
        self.answered_at = self.pool.hub.now
        self.is_stream = head.is_events
        self.pieces = ()
        if isinstance(self.usage, ReportedUsage):
            self.usage.begin(head)
        self.heard(self)
        return self.sink.begin(head, self)

    def _check(self, status: int, names: Mapping[bytes, bytes]) -> None:
        """Raise ResponseRejected or Declined for a response that is not passed on."""
        if status < 400:
            return
        endpoint, step = self.endpoint, self.step
        if status == 503 and endpoint.route is None:
            declined = errors.DECLINED.get(names.get(CODE_HEADER, b""))
            if declined is not None:
                why = sentence(names.get(WHY_HEADER, b"").decode("latin-1"))[: errors.WHY_CHARACTERS_MAX]
                raise Declined(f"{declined} ({why})" if why else declined)
        if status == 400 and step.has_longer and names.get(CODE_HEADER) == _TOO_LONG:
            self._is_too_long = True
            raise Declined("refuses it as too long")
        if status == 401 and endpoint.access is not None and endpoint.access.has_key:
            self._refused = status
            raise ResponseRejected("it does not accept the key that the gateway has for it")
        if endpoint.route is not None and is_rejected(status, step.rejects):
            self._refused = status
            raise ResponseRejected(f"it answered {status}")
