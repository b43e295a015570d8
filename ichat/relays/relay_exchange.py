"""A request for a model at its relay: it asks, carries out the steps of the owner, and reports their outcomes."""

from functools import partial

import attrs
import trio

from ichat import errors
from ichat.errors import ApiError
from ichat.http.heads import RequestHead
from ichat.http.pool import Pool
from ichat.http.request import Request
from ichat.http.request_body import NO_BODY
from ichat.http.server import Client
from ichat.observability.request_record import RESPONSE_PATH, ROUTES
from ichat.protocol.messages import DROPPED_HEADER, HOP_HEADER
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
from ichat.relays.layouts import ENDS
from ichat.relays.settings import RelaySettings
from ichat.relays.values import (
    BACKGROUND,
    COMPLETE,
    HEAD_ONLY,
    HIDES_KEYS,
    IS_COPIED,
    MAY_STEER,
    STREAM,
    SUSPECT,
    TELLS_HEAD,
    HeadSeen,
    MonotonicNs,
    Note,
    Refused,
    SentAsk,
    SentOutcome,
    SentStep,
    TrioClock,
    WaitsFor,
)
from ichat.routing.endpoint import EndpointFacts
from ichat.security.addresses import FORWARDED
from ichat.security.auth import CREDENTIALS
from ichat.security.grant import Grant

_USAGE_WANTED = usage_wanted("")
_JUDGED = (
    CREDENTIALS - {b"authorization"}
    | FORWARDED
    | {b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest", b"content-encoding", b"content-type"}
    | {b"traceparent", b"tracestate", HOP_HEADER}
)
"""Headers that a decision may depend on, beside those that each ask has."""
_USUAL_TYPE = (b"content-type", b"application/json")


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
    gaps: GapsHere = attrs.field(factory=GapsHere)
    notices: DropNotices = attrs.field(factory=DropNotices)


def asked_of(
    number: int,
    request: Request | RequestHead,
    peer: str,
    *,
    bits: int,
    model: str = "",
    prompt_bytes: int = 0,
    prefix_bytes: int = 0,
    checksums: tuple[int, ...] = (),
    before: tuple[tuple[str, bytes], ...] = (),
    session_header: bytes,
    at: MonotonicNs,
    body_bytes: int = 0,
    previous: str = "",
) -> SentAsk:
    """Return the part of a request's head that the owner gets."""
    names = request.by_name
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if not _JUDGED.isdisjoint(names) or len(names) < len(request.headers) or request.version != b"1.1":
        headers = _judged_of(request)
    shown_id = ""
    if isinstance(request, Request):
        shown_id = request.id.decode()
        if request.own_id != request.id:
            headers += ((b":own-id", request.own_id),)
    session = names.get(session_header, b"") if session_header else b""
    return SentAsk(
        number, at, shown_id, model, request.target, request.method, peer, names.get(b"authorization", b""),
        names.get(b"host", b""), session, bits, 0, body_bytes, prompt_bytes, prefix_bytes, checksums, before, headers,
        previous,
    )  # fmt: skip


def _judged_of(request: Request | RequestHead) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers of a head that a decision may depend on, beside those that each ask has."""
    headers = tuple(header for header in request.headers if header[0] in _JUDGED and header != _USUAL_TYPE)
    headers += tuple([header for header in request.headers if header[0] == b"authorization"][1:])
    return headers if request.version == b"1.1" else (*headers, (b":version", request.version))


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

    def __repr__(self) -> str:
        return f"<RelayExchange {self.progress!r}>"

    async def forward(self) -> None:
        """Have the request answered. Raises ApiError if nothing has been sent."""
        parts, progress = self._parts, self.progress
        asked = await self._read()
        asking = parts.desk.begin(asked, cancel=self._cancel, comment=self._send_comment, progress=progress)
        del asked
        try:
            await self._follow(asking)
        except trio.Cancelled:
            if self._is_cancelled and not progress.client.has_left:
                await end_cancelled(progress, parts.desk.cancel_error())  # noqa: ASYNC102 it has a shield with a bound
            raise
        finally:
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
            return facts(bits=COMPLETE)
        try:
            asked, progress.body = await read_model_request(request, b"")
        except ApiError as error:
            await self._judge(facts(bits=HEAD_ONLY)._replace(body_bytes=0))
            body_bytes, own = progress.bytes_in, request.own_id.decode()
            content = {"status": error.status, "code": error.code, "limit": error.limit, "bytes": body_bytes, "id": own}
            parts.desk.send(Note("record", 0, {**content, **_head_of(request, progress.client.peer)}))
            raise
        self._is_suspect, progress.is_stream = asked.is_suspect, asked.is_stream
        progress.comment_s = parts.settings.timeouts.sse_keepalive_s
        if asked.is_stream and progress.comment_s:
            progress.make_keepalive(progress.comment_s)
        bits = COMPLETE | STREAM * asked.is_stream | BACKGROUND * asked.is_background | SUSPECT * asked.is_suspect
        self._name, sums = asked.model, None
        if not parts.session_header or parts.session_header not in request.by_name:
            sums = progress.read_prefix()
        facts = partial(
            facts, bits=bits, model=asked.model, prompt_bytes=progress.prompt_bytes(),
            previous=asked.previous_response_id or "",
        )  # fmt: skip
        if sums is None:
            return facts()
        before = tuple(sums.before.items())
        return facts(prefix_bytes=sums.length, checksums=tuple(sums.checksums), before=before)

    async def _judge(self, head: SentAsk) -> None:
        """Raise ApiError if the owner refuses the request for its head."""
        await admit(self._parts.desk, head)

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
            while True:
                frame = await asking.wait()
                if isinstance(frame, SentStep):
                    if await self._attempt(frame):
                        return
                elif isinstance(frame, Refused):
                    raise frame.refuse.failure.error()
                elif not isinstance(frame, WaitsFor):
                    raise errors.owner_away()
        except ApiError as error:
            if progress.keepalive is None or not progress.keepalive.has_begun:
                raise
            progress.error = error.code
            await progress.client.end_with_event(error.event(progress.path))
        finally:
            if progress.keepalive is not None:
                progress.keepalive.stop()

    async def _attempt(self, sent: SentStep) -> bool:
        """Carry out an attempt and report its outcome; return whether the request has ended."""
        parts, progress, step = self._parts, self.progress, sent.step
        progress.usage = None
        outcome, leg = Outcome("broken", step.endpoint), None
        try:
            endpoint, ready_at = parts.desk.endpoint(sent), None
            if step.edits != self._edits:
                self._edits = step.edits
                progress.body = await body_for(progress.body, step.edits, self._name)
            if parts.settings.overhead_header and endpoint.id:
                ready_at = self._started_at + sent.queued_s
            sink = ClientSink(progress, progress.client, progress.request.version, [*step.response_head], ready_at)
            leg = progress.leg = await self._leg_to(endpoint, sent, sink)
            try:
                outcome = await leg.run()
            finally:
                progress.note_end_of(leg)
            if outcome is ANSWERED:
                outcome = Outcome("answered", step.endpoint, status=leg.status)
        except ApiError as error:
            outcome = Outcome("unfit", step.endpoint, Failure.of(error))
        except trio.Cancelled:
            is_cancelled = self._is_cancelled and not progress.client.has_left
            kind, phase = "cancelled" if is_cancelled else "left", progress.phase
            outcome = Outcome(kind, step.endpoint, why=phase, status=progress.status)
            raise
        finally:
            progress.count_tokens(sent.ticket)
            self._report(sent, outcome, leg)
        return outcome.kind in ENDS

    def _report(self, sent: SentStep, outcome: Outcome, leg: Leg | None) -> None:
        """Report the outcome of an attempt."""
        parts, progress, clock = self._parts, self.progress, self._parts.clock
        wants_next, now = outcome.kind not in ENDS, clock.ns_of(parts.pool.hub.update_clock())
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

    async def _leg_to(self, endpoint: EndpointFacts, sent: SentStep, sink: ClientSink) -> Leg:
        """Return an exchange with an endpoint. Raises ApiError for a request that the endpoint must not get."""
        parts, progress, request, step = self._parts, self.progress, self.progress.request, sent.step
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


def _head_of(request: Request | RequestHead, peer: str) -> dict[str, object]:
    head = [part.decode("latin-1") for part in (request.method, request.target, request.version)]
    headers = [[part.decode("latin-1") for part in pair] for pair in request.headers if len(pair[1]) < 1024]
    return {"head": head, "headers": headers, "peer": peer}


async def admit(desk: FrameDesk, head: SentAsk) -> None:
    """Raise ApiError if the owner refuses a request for its head."""

    def ignore(_text: bytes) -> None:
        """Comment nothing: there is no stream."""

    asking = desk.begin(head, cancel=lambda: None, comment=ignore)
    try:
        frame = await asking.wait()
    finally:
        desk.end(asking)
    if isinstance(frame, Refused):
        raise frame.refuse.failure.error()
    if frame.kind != "go":
        raise errors.owner_away()
