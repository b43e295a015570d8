"""The owner's side of decisions: the requests at a relay, decided as those of this process are."""

import itertools
import time
from collections.abc import Iterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import trio

from ichat import errors
from ichat.errors import ApiError
from ichat.http.heads import Headers, RequestHead
from ichat.observability.prometheus_families import Histogram
from ichat.observability.request_record import CLIENT_LEFT, ROUTES
from ichat.protocol.messages import PEER_HEADER
from ichat.proxy.desk import Desk
from ichat.proxy.handler import Gateway
from ichat.proxy.refusals import Failure
from ichat.proxy.shadow import CopyUnderWay
from ichat.proxy.steps import AttemptStep, Outcome, Refuse, Step, Wait
from ichat.relays.adoption import Trying
from ichat.relays.earlier_outcomes import NO_ASK, record_earlier
from ichat.relays.earlier_requests import EarlierPlaces, EarlierRequest
from ichat.relays.endpoint_facts import facts_of, step_with_keys
from ichat.relays.gaps import add_gaps
from ichat.relays.link import whole
from ichat.relays.relay_at_owner import RelayAtOwner, RelayDesk
from ichat.relays.request_at_relay import Report, RequestAtRelay, head_of
from ichat.relays.timers import Timers
from ichat.relays.values import (
    COPIES,
    HEAD_ONLY,
    HIDES_KEYS,
    IGNORES_PREFIX,
    IS_COPIED,
    MAY_STEER,
    TELLS_HEAD,
    Frame,
    FrameError,
    HeadSeen,
    Note,
    Refused,
    SentAsk,
    SentOutcome,
    SentStep,
    TalkError,
    TrioClock,
    WaitsFor,
)
from ichat.routing.endpoint import Endpoint, EndpointFacts
from ichat.security.rate_limits import NO_RESERVATION

_NO_COPY = Failure(503, "no_copy", "There is no place for this copy.")
_CANCELLED = Outcome("cancelled")

HEADS_MAX, SIGN_BYTES_MAX = 1024, 1024
"""How many heads of a relay are kept, and how much of a head may be in the name of each."""


class OwnerDesk(RelayDesk):
    """Decides on the requests of a relay."""

    def __init__(
        self,
        relay: RelayAtOwner,
        handler: Gateway,
        timers: Timers,
        clock: TrioClock,
        places: EarlierPlaces,
        *,
        decisions: Histogram,
    ) -> None:
        """`decisions` counts the seconds until the first answer to each whole request."""
        self._relay = relay
        self._decisions = decisions
        self._handler = handler
        self._context = handler.context
        self._timers = timers
        self._clock = clock
        self._places = places
        self._requests: dict[int, RequestAtRelay] = {}
        self._heads: dict[tuple[bytes, ...], RequestHead] = {}
        """The heads of usual requests, which are much alike."""
        self._copies: dict[int, CopyUnderWay] = {}
        """By the numbers of the copies."""
        self._earlier: dict[int, EarlierRequest] = {}
        """The requests that carry out a step of an earlier owner."""
        self._numbers = itertools.count(1)
        self._named: WeakKeyDictionary[Endpoint, tuple[bytes, EndpointFacts]] = WeakKeyDictionary()
        """The numbers of endpoints that the relay knows, each with the facts that it has got."""

    def __repr__(self) -> str:
        return f"<OwnerDesk {len(self._requests)} requests>"

    # Frames.

    def receives(self, frame: Frame) -> None:
        """Called with each frame about requests. Raises TalkError."""
        if isinstance(frame, SentAsk):
            self._ask(frame)
        elif isinstance(frame, SentOutcome):
            self._end_attempt(frame)
        elif isinstance(frame, HeadSeen):
            one = self._requests.get(frame.number)
            if one is not None:
                one.hear(frame.status)
        elif isinstance(frame, Note):
            self._receive_note(frame)

    def _receive_note(self, frame: Note) -> None:
        kind, content = frame.kind, frame.content
        if kind == "leave":
            one = self._requests.get(frame.number)
            if one is not None:
                phase = one.phase
                self._note_cut(one, was_cancelled=False)
                self._finish(one, phase)
            self._relay.send(Note("gone", frame.number))
        elif kind == "shadow":
            self._begin_copy(frame)
        elif kind == "told":
            self._note_reports(content.get("rows"))
        elif kind == "sums":
            add_gaps(content.get("gaps"), self._context.gaps)
        elif kind == "record":
            record_refusal(frame, self._handler)

    def _note_reports(self, rows: Any) -> None:
        """Note how far requests have got with their endpoints. Raises TalkError."""
        for number, report in _reports_in(rows, self._clock):
            one = self._requests.get(number)
            if number in self._earlier:
                self._earlier[number].told = report
            elif one is not None and one.desk.lease is not None:
                one.told = report

    def restore(self, trying: Trying, asked: SentAsk | None) -> None:
        """Called with each request that carries out a step of an earlier owner: it counts for its limits."""
        lease = self._places.lease(trying.endpoint, trying.model)
        reservation = NO_RESERVATION if asked is None else self._context.quotas.restore(trying.key)
        shown = asked or NO_ASK._replace(at=self._clock.ns_of(trio.current_time()))
        one = self._earlier[trying.number] = EarlierRequest(
            trying, shown, lease, reservation,
            cancel=partial(self._relay.send, Note("cancel", trying.number)),
            client=self._handler.client_of(head_of(shown), shown.peer), clock=self._clock,
        )  # fmt: skip
        if asked is not None:
            self._handler.in_flight.requests[one] = False

    def note_earlier(self, item: SentOutcome | Note, asked: SentAsk | None) -> None:
        """Called with each outcome that no ledger has. Raises TalkError."""
        record_earlier(item, asked, self._handler, self._clock)

    def end(self) -> None:
        """Called when the relay has ended: so have its requests, and their places are free."""
        for number in [*self._earlier]:
            one = self._pop_earlier(number, 0)
            if one is not None:
                record = one.record(one.phase, trio.current_time())
                record.status, record.error = 502, "relay_lost"
                self._handler.record_earlier(record)
        for one in [*self._requests.values()]:
            phase = one.phase
            one.ended(502, "relay_lost")
            self._finish(one, phase)
        while self._copies:
            _, copy = self._copies.popitem()
            self._context.shadows.end(copy, _CANCELLED, None)

    def _ask(self, asked: SentAsk) -> None:
        began_at = time.perf_counter()
        self._decide(asked)
        if not asked.bits & HEAD_ONLY:
            self._decisions.add(time.perf_counter() - began_at)

    def _decide(self, asked: SentAsk) -> None:
        head, handler = self._head_of(asked), self._handler
        try:
            caller = handler.authenticate(head, asked.peer)
        except ApiError as error:
            handler.refused(error, asked.id.encode(), asked.peer, head)
            self._relay.send(Refused(asked.number, Refuse(Failure.of(error))))
            return
        if asked.bits & HEAD_ONLY:
            self._relay.send(Note("go", asked.number))
            return
        one = self._requests[asked.number] = RequestAtRelay(asked, head, self._timers, self._relay.send, self._go_on)
        one.desk = Desk(self._context, caller, one, self._clock.trio_of(asked.at))
        handler.begin(one, one.desk, head.headers, head.path, is_known=head.path in ROUTES)
        try:
            step = one.first_step()
        except ApiError as error:
            self._refuse(one, Failure.of(error))
        else:
            self._carry_out(one, step)

    def _head_of(self, asked: SentAsk) -> RequestHead:
        """Return the head of a request, as far as decisions need it."""
        if asked.headers or asked.bits & HEAD_ONLY:
            return head_of(asked)
        sign = (asked.credential, asked.host, asked.method, asked.path)
        found = self._heads.get(sign)
        if found is not None or asked.path not in ROUTES or sum(map(len, sign)) > SIGN_BYTES_MAX:
            return found or head_of(asked)
        if len(self._heads) >= HEADS_MAX:
            self._heads.clear()
        head = self._heads[sign] = head_of(asked)
        return head

    # Steps.

    def _go_on(self, one: RequestAtRelay, step: Step) -> None:
        """Carry out the step after a wait; a relay that cannot get it ends."""
        try:
            self._carry_out(one, step)
        except (TalkError, FrameError) as error:
            self._relay.kill(str(error))

    def _carry_out(self, one: RequestAtRelay, step: Step) -> None:
        """Send the relay a step, or have the request wait."""
        if isinstance(step, AttemptStep):
            self._send_step(one, step)
        elif isinstance(step, Wait):
            self._relay.send(WaitsFor(one.asked.number, step))
            one.begin_wait(step)
        elif isinstance(step, Refuse):
            self._refuse(one, step.failure)
        else:
            self._finish(one)

    def _send_step(self, one: RequestAtRelay, step: AttemptStep) -> None:
        """Send the relay an attempt."""
        desk = one.desk
        lease, grant = desk.lease, desk.grant
        assert lease is not None
        endpoint, circuit = lease.endpoint, lease.endpoint.circuit
        bits = MAY_STEER * grant.may_steer | HIDES_KEYS * grant.hides_keys
        if desk.ignores_prefix:
            bits |= IGNORES_PREFIX
        if circuit.failures or circuit.open_until is not None:
            bits |= TELLS_HEAD
        if desk.is_copied:
            bits |= IS_COPIED
        one.step, one.was_heard, one.told = step, False, None
        one.attempt += 1
        sent = step_with_keys(step, desk.endpoint)
        self._relay.send(SentStep(
            one.asked.number, one.attempt, sent, self._name(endpoint, desk.endpoint), grant.key_name, bits,
            settings=self._relay.talk.settings, queued_s=desk.queued_s, ticket=desk.ticket,
        ))  # fmt: skip

    def _name(self, endpoint: Endpoint, facts: EndpointFacts) -> bytes:
        """Return the number by which the relay knows an endpoint, after it has got all facts of it."""
        known = self._named.get(endpoint)
        if known is None or known[1] is not facts:
            name = known[0] if known is not None else b"%d" % next(self._numbers)
            known = self._named[endpoint] = (name, facts)
            self._relay.send(Note("endpoint", 0, {"at": int(name), **facts_of(facts)}))
        return known[0]

    # Copies.

    def _begin_copy(self, frame: Note) -> None:
        """Find a place for the copy of a request, and send the step, or refuse it."""
        context, number, one = self._context, COPIES | frame.number, self._requests.get(frame.number)
        copy = None
        if one is not None and one.desk.alias is not None:
            copy = context.shadows.begin(
                one.desk.alias, whole(frame, "bytes"), one.desk.grant.fairness_key, proof=context.auth.proof,
                timeouts=context.timeouts, is_busy=frame.content.get("is_busy") is True,
            )  # fmt: skip
        if copy is None:
            self._relay.send(Refused(number, Refuse(_NO_COPY)))
            return
        self._copies[number] = copy
        endpoint, version = copy.lease.endpoint, self._relay.talk.settings
        name = self._name(endpoint, endpoint.facts)
        step = step_with_keys(copy.step, endpoint.facts)
        self._relay.send(SentStep(number, 1, step, name, settings=version))

    # Outcomes, and the end.

    def _end_attempt(self, sent: SentOutcome) -> None:
        if copy := self._copies.pop(sent.number, None):
            self._context.shadows.end(copy, sent.outcome, sent.usage)
            return
        one = self._requests.get(sent.number)
        if one is None or one.step is None or one.desk.lease is None:
            self._end_earlier(sent)
            return
        outcome, desk = sent.outcome, one.desk
        one.note(sent, self._clock)
        if outcome.kind in ("left", "cancelled"):
            self._note_cut(one, was_cancelled=outcome.kind == "cancelled")
            self._finish(one, outcome.why or one.phase)
            return
        if outcome.kind == "answered":
            step = desk.end_answered(
                outcome.status, sent.usage, tells_cached=sent.tells_cached, is_usage_lost=sent.has_lost_usage
            )
        else:
            step = desk.end_attempt(one.step, outcome)
        if sent.wants_next:
            self._carry_out(one, step)
        else:
            self._finish(one)

    def _end_earlier(self, sent: SentOutcome) -> None:
        """Record the end of a request that has carried out a step of an earlier owner."""
        one = self._pop_earlier(sent.number, 0 if sent.usage is None else sent.usage.total)
        if one is not None:
            self.note_earlier(sent, one.asked)

    def _pop_earlier(self, number: int, tokens: int) -> EarlierRequest | None:
        """Free the place of such a request, and return it, unless it is a copy."""
        one = self._earlier.pop(number, None)
        if one is None:
            return None
        one.release(tokens)
        self._handler.in_flight.requests.pop(one, None)
        return one if number < COPIES else None

    def _refuse(self, one: RequestAtRelay, failure: Failure) -> None:
        one.ended(failure.status, failure.code)
        self._handler.count_refusal(failure.limit or failure.code, one.desk.caller)
        self._relay.send(Refused(one.asked.number, Refuse(failure)))
        self._finish(one)

    def _note_cut(self, one: RequestAtRelay, *, was_cancelled: bool) -> None:
        """Note that the client has left, or that an operator has cancelled the request."""
        if was_cancelled or self._handler.in_flight.requests.get(one):
            one.failed(errors.request_cancelled())
            if not one.is_answered:
                self._handler.count_refusal(one.error, one.desk.caller)
        else:
            one.ended(CLIENT_LEFT, "client_left")

    def _finish(self, one: RequestAtRelay, phase: str = "") -> None:
        del self._requests[one.asked.number]
        one.end_waits()
        one.desk.close(0 if one.usage is None else one.usage.input + one.usage.output)
        self._handler.finish(one, phase)
        del one.desk  # which knows the request: 15 objects of each would wait for the collector of cycles


def _reports_in(rows: Any, clock: TrioClock) -> Iterator[tuple[int, Report]]:
    """Yield the reports about requests, with the requests' numbers. Raises TalkError."""
    try:
        for number, asked_at, answered_at, is_stream, status, bytes_out, chunks in rows:
            asked, answered = (None if at is None else clock.trio_of(at) for at in (asked_at, answered_at))
            sizes = int(status), int(bytes_out), int(chunks)
            yield int(number), Report(asked, answered, answered, is_stream is True, *sizes)
    except (TypeError, ValueError) as error:
        raise TalkError(f"The report about requests is damaged: {error}.") from error


def peer_of(head: RequestHead, peer: str) -> str:
    """Return the peer of a forwarded request: the relay names it, and only relays reach the inner socket."""
    return head.by_name.get(PEER_HEADER, peer.encode()).decode("latin-1")


def record_refusal(frame: Note, handler: Gateway) -> None:
    """Record a relay's refusal of bytes that were no request. Raises TalkError for a damaged frame."""
    content = frame.content
    try:
        status, code, limit = int(content["status"]), str(content["code"]), str(content["limit"])
        error = ApiError(status, code, "", limit=limit)
        handler.refused(error, str(content["id"]).encode(), str(content["peer"]), _head_in(content))
    except (KeyError, ValueError, TypeError, AttributeError) as broken:
        raise TalkError("A `record` is damaged.") from broken


def _head_in(content: Any) -> RequestHead | None:
    parts, pairs = content.get("head"), content.get("headers", [])
    if parts is None:
        return None
    method, target, version = (str(part).encode("latin-1") for part in parts)
    headers: Headers = [(str(name).encode("latin-1"), str(value).encode("latin-1")) for name, value in pairs]
    return RequestHead(method, target, version, headers, 0)
