"""The owner's side of decisions: requests at a relay, decided as those of this process are.

A request here has no body and no connection: `RemoteClient` and `RemoteLeg` have what the relay has told of them.
"""

import itertools
import logging
from collections.abc import Callable
from typing import Any, cast
from weakref import WeakKeyDictionary

import attrs
import trio

from ichat import errors
from ichat.errors import ApiError
from ichat.http.heads import Headers, RequestHead
from ichat.http.request import Request
from ichat.http.request_body import RequestBody
from ichat.observability.request_record import CLIENT_LEFT, ROUTES
from ichat.protocol.usage import usage_wanted
from ichat.proxy.context import GatewayContext
from ichat.proxy.desk import Desk, record_failure
from ichat.proxy.exchange import Exchange
from ichat.proxy.handler import Gateway
from ichat.proxy.model_request import ModelRequest
from ichat.proxy.progress import RequestProgress
from ichat.proxy.refusals import Failure
from ichat.proxy.steps import AttemptStep, Done, Outcome, Refuse, Step, Wait
from ichat.proxy.token_usage import ReportedUsage, usage_reader
from ichat.relays.endpoint_facts import facts_of
from ichat.relays.owner import RelayAtOwner, RelayDesk
from ichat.relays.values import (
    BACKGROUND,
    HEAD_ONLY,
    HIDES_KEYS,
    MAY_STEER,
    NEVER,
    STREAM,
    SUSPECT,
    TELLS_HEAD,
    UNKNOWN,
    Asked,
    Frame,
    HeadSeen,
    Note,
    Refused,
    SentOutcome,
    SentStep,
    TalkError,
    TrioClock,
    WaitsFor,
)
from ichat.routing.circuit_breaker import FAILED_STATUSES
from ichat.routing.endpoint import Endpoint
from ichat.routing.prefix_chain import PrefixSums
from ichat.routing.request import Lease
from ichat.security.auth import Caller

log = logging.getLogger(__name__)

_STEERING = ("priority",)
"""A member that steers engines, in the place of those that the relay has found."""


@attrs.define(eq=False)
class RemoteScope:
    """Cancels a request at its relay."""

    cancel: Callable[[], None]


@attrs.define(eq=False)
class RemoteClient:
    """A client at a relay, as far as decisions and records need it."""

    peer: str
    scope: RemoteScope
    _comment: Callable[[str], None]
    has_left: bool = False
    keep_alive = True

    def more_headers(self) -> Headers:
        """Return no headers: the relay writes heads."""
        return []

    def send_some(self, data: bytes) -> int:
        """Have the relay send the comment in these bytes."""
        text = data[data.rfind(b"\r\n: ") + 4 :].rstrip(b"\r\n")
        self._comment(text.decode())
        return len(data)

    def on_disconnect(self) -> None:
        """Do nothing: the relay notices that a client is slow."""


@attrs.frozen(eq=False)
class _RemoteBody:
    bytes_out: int
    chunks: int
    first_at: float | None


@attrs.frozen(eq=False)
class _RemoteRelay:
    body: _RemoteBody


@attrs.frozen(eq=False)
class _RemoteUsage:
    tells_cached: bool


@attrs.define(eq=False)
class RemoteLeg:
    """An exchange of a relay with an endpoint, as its outcome says."""

    asked_at: float | None
    answered_at: float | None = None
    status: int = 0
    error: str = ""
    is_stream: bool = False
    relay: _RemoteRelay | None = None
    usage: Any = None


@attrs.define(eq=False)
class RequestAtRelay:
    """A request at a relay, while this process decides on it."""

    number: int
    exchange: Exchange
    attempt: int = 0
    step: AttemptStep | None = None
    lease: Lease | None = None
    was_heard: bool = False
    is_admitted: bool = False
    """Whether it counts for limits."""
    wait: trio.CancelScope | None = None

    @property
    def progress(self) -> RequestProgress:
        """How far it has got."""
        return self.exchange.progress

    @property
    def desk(self) -> Desk:
        """The side that knows the endpoints."""
        return self.exchange.desk


class OwnerDesk(RelayDesk):
    """Decides on the requests of a relay."""

    def __init__(self, relay: RelayAtOwner, handler: Gateway, nursery: trio.Nursery, clock: TrioClock) -> None:
        """WaitsFor are tasks in the nursery."""
        self._relay = relay
        self._handler = handler
        self._context: GatewayContext = handler.context
        self._nursery = nursery
        self._clock = clock
        self._requests: dict[int, RequestAtRelay] = {}
        self._numbers = itertools.count(1)
        self._named: WeakKeyDictionary[Endpoint, tuple[int, tuple[object, ...]]] = WeakKeyDictionary()
        """The numbers of endpoints that the relay knows, each with what its facts were made of."""

    def __repr__(self) -> str:
        return f"<OwnerDesk {len(self._requests)} requests>"

    # Frames.

    def receives(self, frame: Frame) -> None:
        """Called with each frame about a request. Raises TalkError."""
        if isinstance(frame, Asked):
            if frame.bits & HEAD_ONLY:
                self._admit(frame)
            else:
                self._ask(frame)
        elif isinstance(frame, SentOutcome):
            self._end_attempt(frame)
        elif isinstance(frame, HeadSeen):
            one = self._requests.get(frame.number)
            if one is not None and one.lease is not None:
                self._hear(one, one.lease.endpoint, frame.status)
        elif isinstance(frame, Note) and frame.kind == "leave":
            one = self._requests.get(frame.number)
            if one is not None:
                self._leave(one)
            self._relay.send(Note("gone", frame.number))

        elif isinstance(frame, Note) and frame.kind == "told":
            self._note_told(frame.content.get("rows"))

    def _note_told(self, rows: Any) -> None:
        """Note how far requests have got with their endpoints. Raises TalkError."""
        try:
            for number, asked_at, answered_at, is_stream, status, bytes_out, chunks in rows:
                one = self._requests.get(number)
                if one is None or one.lease is None:
                    continue
                asked, answered = [None if at is None else self._clock.trio_of(at) for at in (asked_at, answered_at)]
                body = _RemoteBody(int(bytes_out), int(chunks), answered)
                leg = RemoteLeg(asked, answered, int(status), "", is_stream is True, _RemoteRelay(body))
                one.progress.leg = cast("Any", leg)
        except (TypeError, ValueError) as error:
            raise TalkError(f"What is told of requests is damaged: {error}.") from error

    def end(self) -> None:
        """Called when the relay has ended: so have its requests, and their places are free."""
        for one in [*self._requests.values()]:
            if one.lease is not None:
                one.lease.release()
                one.lease = None
            one.progress.ended(502, "relay_lost")
            self._finish(one, one.progress.phase)

    def _admit(self, asked: Asked) -> None:
        try:
            self._handler.authenticate(head_of(asked), asked.peer)
        except ApiError as error:
            self._refuse_early(asked, error)
        else:
            self._relay.send(Note("go", asked.number))

    def _refuse_early(self, asked: Asked, error: ApiError) -> None:
        """Refuse a request whose sender may not send it."""
        self._handler.refused(error, asked.id.encode(), asked.peer, head_of(asked))
        self._relay.send(Refused(asked.number, Refuse(Failure.of(error))))

    def _ask(self, asked: Asked) -> None:
        head = head_of(asked)
        try:
            caller = self._handler.authenticate(head, asked.peer)
        except ApiError as error:
            self._refuse_early(asked, error)
            return
        one = self._begin(asked, head, caller)
        try:
            step = self._first_step(one, asked)
        except ApiError as error:
            self._refuse(one, Failure.of(error))
            return
        one.is_admitted = True
        self._carry_out(one, step)

    def _begin(self, asked: Asked, head: RequestHead, caller: Caller) -> RequestAtRelay:
        number = asked.number
        own_id = head.by_name.get(b":own-id", asked.id.encode())
        request = Request(
            head.method, head.target, head.path, head.version, head.headers, b"", asked.id.encode(),
            keep_alive=True, own_id=own_id,
        )  # fmt: skip

        def cancel() -> None:
            self._relay.send(Note("cancel", number))

        def comment(text: str) -> None:
            self._relay.send(Note("hint", number, {"comment": text}))

        client: Any = RemoteClient(asked.peer, RemoteScope(cancel), comment)
        one = RequestAtRelay(number, Exchange(self._context, request, client, caller, asked.session))
        self._requests[number] = one
        progress = one.progress
        progress.started_at, progress.bytes_in = self._clock.trio_of(asked.at), asked.body_bytes
        self._handler.begin(progress, request, is_known=request.path in ROUTES)
        return one

    def _first_step(self, one: RequestAtRelay, asked: Asked) -> Step:
        """Return the first step of a request. Raises ApiError."""
        if not asked.model and asked.path.startswith(b"/v1/responses/"):
            return one.exchange.begin_at_holder()
        progress = one.progress
        names = _STEERING if asked.bits & SUSPECT else ()
        if asked.checksums:
            progress.prefix_sums = PrefixSums(asked.prefix_bytes, asked.checksums, dict(asked.before))
        model_request = ModelRequest(
            asked.model, RequestBody(b"", names), bool(asked.bits & STREAM), asked.previous_response_id or None,
            bool(asked.bits & BACKGROUND),
        )  # fmt: skip
        return one.exchange.begin(model_request, prompt_bytes=asked.prompt_bytes)

    # Steps.

    def _carry_out(self, one: RequestAtRelay, step: Step) -> None:
        """Send the relay a step, or have the request wait."""
        while isinstance(step, AttemptStep):
            try:
                self._send_step(one, step)
            except ApiError as error:
                self._release(one)
                step = one.desk.go_on(Outcome("unfit", step.endpoint, Failure.of(error)))
            else:
                return
        if isinstance(step, Wait):
            self._relay.send(WaitsFor(one.number, step))
            self._nursery.start_soon(self._wait, one, step)
        elif isinstance(step, Refuse):
            self._refuse(one, step.failure)
        elif isinstance(step, Done):
            self._finish(one)

    async def _wait(self, one: RequestAtRelay, step: Wait) -> None:
        following: Step = Done()
        with trio.CancelScope() as one.wait:
            following = await one.desk.wait(step)
        keepalive = one.progress.keepalive
        if keepalive is not None:
            keepalive.stop()
            one.progress.keepalive = None
        if one.wait.cancelled_caught or one.number not in self._requests:
            return
        one.wait = None
        self._carry_out(one, following)

    def _send_step(self, one: RequestAtRelay, step: AttemptStep) -> None:
        """Send the relay an attempt. Raises ApiError if the endpoint must not get the request."""
        context, progress, grant = self._context, one.progress, one.progress.grant
        one.lease, one.step, one.was_heard = one.desk.lease, step, False
        assert one.lease is not None
        endpoint, added = one.lease.endpoint, step.request_head
        if progress.is_background:
            is_limited = context.quotas.bounds_tokens(grant.key_name)
            progress.ticket = context.late_usage.begin(endpoint, grant.key_name, step.model, is_limited=is_limited)
        usage = usage_reader(progress.path, reports_usage=endpoint.reports_usage)
        if isinstance(usage, ReportedUsage):
            added = (*added, usage_wanted(progress.ticket))
        circuit = endpoint.circuit
        bits = MAY_STEER * grant.may_steer | HIDES_KEYS * grant.hides_keys
        if circuit.failures or circuit.open_until is not None:
            bits |= TELLS_HEAD
        address = b"%d" % self._name(endpoint)
        one.attempt += 1
        progress.leg = None
        self._relay.send(SentStep(
            one.number, one.attempt, step._replace(request_head=added), address, "", grant.key_name, bits,
            settings=self._relay.talk.settings, queued_s=progress.queued_s,
        ))  # fmt: skip

    def _name(self, endpoint: Endpoint) -> int:
        """Return the number by which the relay knows an endpoint, after it has got all facts of it."""
        proof = self._context.auth.proof if endpoint.access is None and endpoint.upstream.port else b""
        sign = endpoint.upstream, endpoint.access, endpoint.route, endpoint.reports_usage, proof
        known = self._named.get(endpoint)
        if known is None or known[1] != sign:
            number = known[0] if known is not None else next(self._numbers)
            known = self._named[endpoint] = (number, sign)
            self._relay.send(Note("endpoint", 0, {"at": number, **facts_of(endpoint, proof)}))
        return known[0]

    # Outcomes.

    def _end_attempt(self, sent: SentOutcome) -> None:
        one = self._requests.get(sent.number)
        if one is None or one.step is None or one.lease is None:
            return
        progress, outcome, endpoint, step = one.progress, sent.outcome, one.lease.endpoint, one.step
        self._note(one, sent)
        if sent.first_at != NEVER:
            self._hear(one, endpoint, progress.leg.status if progress.leg else 0)
        if outcome.kind == "answered":
            one.desk.learn(endpoint)
        elif outcome.kind not in ("left", "cancelled", "unfit"):
            one.desk.note_failure(endpoint, step, outcome)
        self._release(one)
        if progress.ticket and (outcome.kind not in ("answered", "cut") or progress.status >= 400):
            self._context.late_usage.forget(progress.ticket)
        if outcome.kind in ("left", "cancelled"):
            self._note_cut(one, was_cancelled=outcome.kind == "cancelled")
            self._finish(one, outcome.why or progress.phase)
        elif sent.wants_next:
            self._carry_out(one, one.desk.go_on(outcome))
        else:
            self._finish(one)

    def _note(self, one: RequestAtRelay, sent: SentOutcome) -> None:
        """Note what an outcome says of the exchange with the endpoint."""
        progress, trio_of = one.progress, self._clock.trio_of
        first = None if sent.first_at == NEVER else trio_of(sent.first_at)
        leg = RemoteLeg(None if sent.asked_at == NEVER else trio_of(sent.asked_at), first)
        if first is not None:
            leg.status, leg.error, leg.is_stream = sent.outcome.status, sent.error, sent.is_stream
            leg.relay = _RemoteRelay(_RemoteBody(sent.bytes_out, sent.chunks, first))
            progress.status, progress.error = leg.status, leg.error
        usage: Any = ReportedUsage() if sent.has_lost_usage else _RemoteUsage(sent.tells_cached)
        leg.usage = usage
        progress.leg, progress.usage = cast("Any", leg), sent.usage

    def _hear(self, one: RequestAtRelay, endpoint: Endpoint, status: int) -> None:
        """Note that a response has begun."""
        if one.was_heard:
            return
        one.was_heard = True
        endpoint.see(self._context.pool.hub.now)
        if status in FAILED_STATUSES:
            record_failure(endpoint, answers=True)
        elif endpoint.circuit.open_until is not None and endpoint.circuit.record_response():
            self._context.balancer.dispatch_waiting()

    def _release(self, one: RequestAtRelay) -> None:
        """Free the place at the endpoint."""
        lease, one.lease, one.desk.lease = one.lease, None, None
        if lease is not None:
            lease.release()

    # The end.

    def _refuse(self, one: RequestAtRelay, failure: Failure) -> None:
        progress = one.progress
        progress.ended(failure.status, failure.code)
        self._handler.count_refusal(failure.error(), progress)
        self._relay.send(Refused(one.number, Refuse(failure)))
        self._finish(one)

    def _leave(self, one: RequestAtRelay) -> None:
        """Note that the client has left while the request waited, or that an operator has cancelled it."""
        phase = one.progress.phase
        self._note_cut(one, was_cancelled=False)
        if one.wait is not None:
            one.wait.cancel()
        self._finish(one, phase)

    def _note_cut(self, one: RequestAtRelay, *, was_cancelled: bool) -> None:
        progress = one.progress
        if was_cancelled or self._handler.in_flight.requests.get(progress):
            error = errors.request_cancelled()
            progress.error = error.code
            if not progress.is_answered:
                progress.status = error.status
                self._handler.count_refusal(error, progress)
        else:
            cast("Any", progress.client).has_left = True
            progress.ended(CLIENT_LEFT, "client_left")

    def _finish(self, one: RequestAtRelay, phase: str = "") -> None:
        del self._requests[one.number]
        if one.progress.leg is not None:
            one.progress.leg.usage = None  # the relay has counted the tokens
        if one.is_admitted:
            one.exchange.close_grant()
        self._handler.finish(one.progress, phase)


def head_of(asked: Asked) -> RequestHead:
    """Return the head of a request, as far as decisions need it."""
    headers: Headers = []
    if asked.credential:
        headers.append((b"authorization", asked.credential))
    if asked.host:
        headers.append((b"host", asked.host))
    version = b"1.1"
    for header in asked.headers:
        if header[0] == b":version":
            version = header[1]
        else:
            headers.append(header)
    length = None if asked.body_bytes == UNKNOWN else asked.body_bytes if asked.bits & HEAD_ONLY else 0
    return RequestHead(asked.method, asked.path, version, headers, length)
