"""A request for a model at its relay: it asks, carries out the steps of the owner, and reports their outcomes."""

from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

import attrs
import trio

from ichat import errors
from ichat.errors import ApiError
from ichat.http.pool import Pool
from ichat.http.request import Request
from ichat.http.request_body import NO_BODY
from ichat.http.server import Client
from ichat.observability.request_record import RESPONSE_PATH, ROUTES
from ichat.protocol.messages import DROPPED_HEADER
from ichat.protocol.usage import usage_wanted
from ichat.proxy.client_sink import ClientSink, end_cancelled
from ichat.proxy.copies import copy_of
from ichat.proxy.engine_control import DropNotices
from ichat.proxy.leg import Leg
from ichat.proxy.model_request import read_model_request
from ichat.proxy.progress import RequestProgress
from ichat.proxy.refusals import Failure
from ichat.proxy.steps import ANSWERED, NO_EDITS, Outcome
from ichat.proxy.targets import body_for
from ichat.proxy.token_usage import ReportedUsage, usage_reader
from ichat.proxy.upstream_request import build_upstream_request, prepare_body
from ichat.relays.copies_at_relay import CopiesAtRelay
from ichat.relays.frame_desk import Asking, FrameDesk
from ichat.relays.gaps import GapsHere
from ichat.relays.relay_asks import admit, asked_of, refusal_note
from ichat.relays.request_frames import ENDS
from ichat.relays.settings import RelaySettings
from ichat.relays.values import (
    BACKGROUND,
    HEAD_ONLY,
    HIDES_KEYS,
    IGNORES_PREFIX,
    IS_COPIED,
    MAY_STEER,
    STREAM,
    SUSPECT,
    TELLS_HEAD,
    Frame,
    HeadSeen,
    Refused,
    SentAsk,
    SentOutcome,
    SentStep,
    TrioClock,
    WaitsFor,
)
from ichat.security.grant import Grant

NAMES_MAX = 10_000
"""Of models of which it is noted that their requests need no sums of prefixes."""
_USAGE_WANTED = usage_wanted("")
ResultT = TypeVar("ResultT")


@attrs.define(eq=False)
class RelayParts:
    """The objects that all exchanges of a relay share."""

    pool: Pool
    desk: FrameDesk
    copies: CopiesAtRelay
    clock: TrioClock
    settings: RelaySettings
    session_header: bytes = b""
    """The name of the header that names a session, as heads have it; empty: none does."""
    without_prefixes: set[str] = attrs.field(factory=set[str])
    """The names that need no sums of prefixes, as their newest steps say."""
    gaps: GapsHere = attrs.field(factory=GapsHere)
    notices: DropNotices = attrs.field(factory=DropNotices)

    def note_prefixes(self, name: str, bits: int) -> None:
        """Note by the bits of a step whether the next request for a name needs no sums of its prefix."""
        if not bits & IGNORES_PREFIX:
            self.without_prefixes.discard(name)
        elif len(self.without_prefixes) < NAMES_MAX:
            self.without_prefixes.add(name)


def at_once(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT | None:
    """Return the value of a coroutine that needs no wait; None: it was broken off where it would wait.

    All its exceptions are raised.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    return None


class _NothingYet:
    """A response of which nothing has arrived."""

    bytes_out = chunks = 0
    first_at: float | None = None


_NOTHING_YET = _NothingYet()


def _lacks_usage(leg: Leg) -> bool:
    """Return whether a whole stream lacks the tokens that its engine reports."""
    return leg.is_stream and isinstance(leg.usage, ReportedUsage) and not leg.usage.has_arrived


class RelayExchange:
    """A request for a model, answered as the owner says."""

    def __init__(self, parts: RelayParts, request: Request, client: Client) -> None:
        self._parts = parts
        self.progress = RequestProgress(parts.pool.hub, request, client, request.path, len(request.body))
        self._started_at = parts.pool.hub.update_clock()
        self._edits = NO_EDITS
        self._name = ""
        self._is_suspect = False
        self._is_cancelled = False
        self._is_over = False
        self._trying: SentStep | None = None
        """The attempt that the hub has begun without this request's task."""
        self._asking: Asking | None = None
        """Where the owner's answers arrive."""

    def __repr__(self) -> str:
        return f"<RelayExchange {self.progress!r}>"

    async def forward(self) -> None:
        """Have the request answered. Raises ApiError if nothing has been sent."""
        parts, progress = self._parts, self.progress
        asked = await self._read()
        try:
            asking = self._asking = parts.desk.begin(
                asked, cancel=self._cancel, comment=self._send_comment, progress=progress, begin=self._begin
            )
        except ApiError as error:
            self._record(error)
            raise
        del asked
        try:
            await self._follow(asking)
        except trio.Cancelled:
            if self._is_cancelled and not progress.client.has_left:
                await end_cancelled(progress, parts.desk.cancel_error())  # noqa: ASYNC102 it has a shield with a bound
            raise
        finally:
            self._asking = None
            parts.desk.end(asking)

    async def _read(self) -> SentAsk:
        """Return the ask for the owner. Raises ApiError if no upstream may get it."""
        parts, progress, request = self._parts, self.progress, self.progress.request
        number, at = parts.desk.new_number(), parts.clock.ns_of(self._started_at)
        facts = partial(
            asked_of, number, request, progress.client.peer, session_header=parts.session_header, at=at,
            body_bytes=progress.bytes_in,
        )  # fmt: skip
        if request.path.startswith(b"/v1/responses/") and not (request.method == b"POST" and request.path in ROUTES):
            progress.read_plainly(RESPONSE_PATH)
            return facts(bits=0)
        try:
            asked, progress.body = await read_model_request(request, b"")
        except ApiError as error:
            await admit(parts.desk, facts(bits=HEAD_ONLY)._replace(body_bytes=0))  # noqa: ASYNC120 then it has no answer
            self._record(error)
            raise
        self._is_suspect, progress.is_stream = asked.is_suspect, asked.is_stream
        progress.comment_s = parts.settings.timeouts.sse_keepalive_s
        if asked.is_stream and progress.comment_s:
            progress.make_keepalive(progress.comment_s)
        bits = STREAM * asked.is_stream | BACKGROUND * asked.is_background | SUSPECT * asked.is_suspect
        self._name, sums = asked.model, None
        if parts.settings.sends_prefixes and asked.model not in parts.without_prefixes:
            sums = None if parts.session_header in request.by_name else progress.read_prefix()
        prefix_bytes, checksums, before = 0, (), ()
        if sums is not None:
            prefix_bytes, checksums, before = sums.length, tuple(sums.checksums), tuple(sums.before.items())
        prompt_bytes = progress.prompt_bytes() if parts.settings.sends_prompt_bytes else 0
        return facts(
            bits=bits, model=asked.model, prompt_bytes=prompt_bytes, prefix_bytes=prefix_bytes, checksums=checksums,
            before=before, previous=asked.previous_response_id or "",
        )  # fmt: skip

    def _record(self, error: ApiError) -> None:
        """Have the owner count and log a refusal of the relay itself."""
        request, peer = self.progress.request, self.progress.client.peer
        self._parts.desk.send(refusal_note(error, request.own_id, peer, request))

    def _cancel(self) -> None:
        self._is_cancelled = True
        self.progress.client.scope.cancel()

    def _send_comment(self, text: bytes) -> None:
        """Send a comment of the owner's in a stream that waits."""
        progress = self.progress
        if progress.keepalive is None:
            progress.make_keepalive(progress.comment_s)
        keepalive = progress.keepalive
        if keepalive is not None:
            interval_s = keepalive.interval_s or 3600.0
            keepalive.announce(lambda: text, interval_s)
            keepalive.end_announcement(progress.comment_s)

    # The loop.

    async def _follow(self, asking: Asking) -> None:
        """Carry out the owner's steps until the request has ended. Raises ApiError if nothing has been sent."""
        progress = self.progress
        if progress.keepalive is not None:
            progress.keepalive.start()
        try:
            while not self._is_over:
                frame = await self._next(asking)
                if isinstance(frame, SentStep):
                    await self._attempt(frame)
                elif isinstance(frame, Refused):
                    raise frame.refuse.failure.error()
                elif not isinstance(frame, WaitsFor) and not self._is_over:
                    raise errors.owner_away()
        except ApiError as error:
            if progress.keepalive is None or not progress.keepalive.has_begun:
                raise
            progress.error = error.code
            await progress.client.end_with_event(error.event(progress.path))
        finally:
            if progress.keepalive is not None:
                progress.keepalive.stop()

    async def _next(self, asking: Asking) -> Frame | None:
        """Return the owner's next frame, or the step of an attempt that needs this task; None: the request is over."""
        try:
            frame = await asking.wait()
        except trio.Cancelled:
            trying, leg = self._trying, self.progress.leg
            if trying is not None and leg is not None:
                leg.abandon()
                self.progress.note_end_of(leg)
                self._report(trying, self._cut(trying), leg)
            raise
        return frame or self._trying

    def _begin(self, sent: SentStep) -> bool:
        """Begin an attempt in the hub's turn of its frame, without this request's task; return whether it has begun.

        The response may be moved, and the outcome reported, without the task too.
        """
        try:
            leg = at_once(self._make_leg(sent))
        except Exception:  # the task meets it as well
            return False
        if leg is None:
            return False
        self._trying, self.progress.leg = sent, leg
        if not leg.begin(self._changed) and self._asking is not None:
            self._asking.wake()
        return True

    def _changed(self) -> None:
        """Called in the hub's turn when the response is whole, or needs the task."""
        sent, leg, asking = self._trying, self.progress.leg, self._asking
        assert sent is not None
        assert leg is not None
        assert asking is not None
        try:
            if leg.end():
                self._trying = None
                self.progress.note_end_of(leg)
                self._report(sent, Outcome("answered", sent.step.endpoint, status=leg.status), leg)
        finally:
            if self._is_over:
                asking.end(self.progress.client)
            else:
                asking.wake()

    async def _attempt(self, sent: SentStep) -> None:
        """Carry out an attempt, or the rest of it, and report its outcome."""
        progress, step = self.progress, sent.step
        outcome, leg = Outcome("broken", step.endpoint), None
        try:
            if self._trying is None:
                progress.leg = await self._make_leg(sent)
            self._trying, leg = None, progress.leg
            assert leg is not None
            try:
                outcome = await leg.run()
            finally:
                progress.note_end_of(leg)
            if outcome is ANSWERED:
                outcome = Outcome("answered", step.endpoint, status=leg.status)
        except ApiError as error:
            outcome = Outcome("unfit", step.endpoint, Failure.of(error))
        except trio.Cancelled:
            outcome = self._cut(sent)
            raise
        finally:
            self._report(sent, outcome, leg)

    def _cut(self, sent: SentStep) -> Outcome:
        """Return the outcome of an attempt that was cut off."""
        progress = self.progress
        kind = "cancelled" if self._is_cancelled and not progress.client.has_left else "left"
        return Outcome(kind, sent.step.endpoint, why=progress.phase, status=progress.status)

    def _report(self, sent: SentStep, outcome: Outcome, leg: Leg | None) -> None:
        """Report the outcome of an attempt."""
        parts, progress, clock = self._parts, self.progress, self._parts.clock
        progress.usage = None
        progress.count_tokens(sent.ticket)
        wants_next, now = outcome.kind not in ENDS, clock.ns_of(parts.pool.hub.update_clock())
        if not wants_next:
            self._is_over = True
            if self._asking is not None:
                parts.desk.end(self._asking)
        if leg is None:
            seq = parts.desk.next_seq
            parts.desk.report(SentOutcome(sent.number, sent.attempt, seq, outcome, wants_next, ended_at=now))
            return
        usage, received = leg.usage, leg.relay.body if leg.relay is not None else _NOTHING_YET
        parts.desk.report(SentOutcome(
            sent.number, sent.attempt, parts.desk.next_seq,
            outcome if outcome.status else outcome._replace(status=leg.status),
            wants_next, clock.ns_of_event(leg.asked_at), clock.ns_of_event(leg.answered_at), now, received.bytes_out,
            received.chunks, progress.usage, leg.error, sent.key, sent.step.model, is_stream=leg.is_stream,
            tells_cached=usage is not None and usage.tells_cached, body_at=clock.ns_of_event(received.first_at),
            has_lost_usage=outcome.kind == "answered" and _lacks_usage(leg),
        ))  # fmt: skip

    async def _make_leg(self, sent: SentStep) -> Leg:
        """Return the exchange of an attempt. Raises ApiError for a request that the endpoint must not get."""
        parts, progress, request, step = self._parts, self.progress, self.progress.request, sent.step
        endpoint, ready_at = parts.desk.endpoint(sent), None
        if (self._name in parts.without_prefixes) != (sent.bits & IGNORES_PREFIX != 0):
            parts.note_prefixes(self._name, sent.bits)
        if step.edits != self._edits:
            progress.body = await body_for(progress.body, step.edits, self._name)
            self._edits = step.edits
        if parts.settings.overhead_header and endpoint.id:
            ready_at = self._started_at + sent.queued_s
        sink = ClientSink(progress, progress.client, request.version, [*step.response_head], ready_at)
        body, may_steer = progress.body, bool(sent.bits & MAY_STEER)
        guards = self._is_suspect and not may_steer
        if guards or (endpoint.route is not None and endpoint.route.changes(body)):
            body, dropped = await prepare_body(request, body, endpoint, is_suspect=guards)
            if dropped:
                parts.notices.log_dropped(sent.key, dropped)
                sink.added.insert(0, (DROPPED_HEADER, ", ".join(dropped).encode()))
        usage = usage_reader(progress.path, reports_usage=endpoint.reports_usage)
        added, keepalive = step.request_head, progress.keepalive
        if usage is not None and endpoint.reports_usage:
            added = (*added, usage_wanted(sent.ticket) if sent.ticket else _USAGE_WANTED)
        grant = Grant(sent.key, "", may_steer, bool(sent.bits & HIDES_KEYS))
        pieces = build_upstream_request(
            request,
            body.data,
            endpoint,
            grant=grant,
            added=added,
            reads_response=keepalive is not None or endpoint.route is not None,
        )

        def heard(leg: Leg) -> None:
            if sent.bits & TELLS_HEAD:
                parts.desk.send(HeadSeen(sent.number, leg.status))
            if sent.bits & IS_COPIED and leg.status < 400:
                parts.copies.start(sent.number, copy_of(request, progress.body, grant=grant, is_suspect=guards))
            request.release_body()
            progress.body, progress.prefix_sums = NO_BODY, None

        return Leg(
            parts.pool, endpoint, step, sink, pieces, request.method, usage, parts.gaps.of(step.model), keepalive, heard
        )
