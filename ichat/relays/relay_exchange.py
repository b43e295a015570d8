"""A request for a model at its relay: it asks, carries out the steps of the owner, and reports their outcomes."""

import attrs
import trio

from ichat import errors
from ichat.errors import ApiError
from ichat.http.heads import RequestHead
from ichat.http.keepalive import KeepAlive
from ichat.http.pool import Pool
from ichat.http.request import Request
from ichat.http.request_body import NO_BODY, RequestBody
from ichat.http.server import Client
from ichat.observability.request_record import RESPONSE_PATH, ROUTES
from ichat.protocol.messages import DROPPED_HEADER, HOP_HEADER
from ichat.proxy.client_sink import ClientSink
from ichat.proxy.engine_control import DropNotices, is_suspect
from ichat.proxy.leg import Leg
from ichat.proxy.model_request import read_model_request
from ichat.proxy.progress import RequestProgress
from ichat.proxy.refusals import Failure
from ichat.proxy.requests_in_flight import RequestsInFlight
from ichat.proxy.steps import ANSWERED, NO_EDITS, Outcome
from ichat.proxy.targets import body_for
from ichat.proxy.token_usage import ReportedUsage, usage_reader
from ichat.proxy.upstream_request import build_upstream_request, prepare_body
from ichat.relays.frame_desk import Asking, FrameDesk
from ichat.relays.layouts import ENDS
from ichat.relays.settings import RelaySettings
from ichat.relays.values import (
    BACKGROUND,
    COMPLETE,
    HEAD_ONLY,
    HIDES_KEYS,
    MAY_STEER,
    NEVER,
    STREAM,
    SUSPECT,
    TELLS_HEAD,
    Asked,
    HeadSeen,
    MonotonicNs,
    Note,
    Refused,
    SentOutcome,
    SentStep,
    TrioClock,
    WaitsFor,
)
from ichat.routing.endpoint import Endpoint
from ichat.routing.prefix_chain import sums_of
from ichat.routing.prompt_lengths import is_measurable
from ichat.security.addresses import FORWARDED
from ichat.security.auth import CREDENTIALS, Caller
from ichat.security.grant import Grant

_NOBODY = Caller("anonymous", "", is_local=False)
"""Only the owner knows who sends a request."""
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
    clock: TrioClock
    settings: RelaySettings
    notices: DropNotices = attrs.field(factory=DropNotices)
    in_flight: RequestsInFlight = attrs.field(factory=RequestsInFlight)


def asked_of(
    number: int, request: Request | RequestHead, peer: str, *, session_header: bytes, at: MonotonicNs, bits: int
) -> Asked:
    """Return what the owner gets of a request's head."""
    names = request.by_name
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if not _JUDGED.isdisjoint(names) or len(names) < len(request.headers) or request.version != b"1.1":
        headers = tuple(header for header in request.headers if header[0] in _JUDGED and header != _USUAL_TYPE)
        repeated = [value for name, value in request.headers if name == b"authorization"][1:]
        headers += tuple((b"authorization", value) for value in repeated)
        if request.version != b"1.1":
            headers += ((b":version", request.version),)
    shown_id = request.id.decode() if isinstance(request, Request) else ""
    own_id = request.own_id.decode() if isinstance(request, Request) else ""
    if own_id != shown_id:
        headers += ((b":own-id", own_id.encode()),)
    return Asked(
        number, at, shown_id, "", request.target, request.method, peer, names.get(b"authorization", b""),
        names.get(b"host", b""), names.get(session_header, b"") if session_header else b"", bits, headers=headers,
    )  # fmt: skip


class RelayExchange:
    """A request for a model, answered as the owner says."""

    def __init__(self, parts: RelayParts, request: Request, client: Client) -> None:
        self._parts = parts
        now = parts.pool.hub.update_clock()
        self.progress = RequestProgress(request, client, _NOBODY, request.path, now, len(request.body))
        self._edits = NO_EDITS
        self._name = ""
        self._asking: Asking | None = None
        self._comment = b""

    def __repr__(self) -> str:
        return f"<RelayExchange {self.progress!r}>"

    async def forward(self) -> None:
        """Have the request answered. Raises ApiError if nothing has been sent."""
        parts, progress = self._parts, self.progress
        asked = await self._read()
        asking = self._asking = parts.desk.begin(
            asked, cancel=self._cancel, comment=self._send_comment, progress=progress
        )
        parts.in_flight.requests[progress] = False
        del asked
        try:
            await self._follow(asking)
        except trio.Cancelled:
            await parts.in_flight.end_if_cancelled(progress)  # noqa: ASYNC102 it has a shield with a bound
            raise
        finally:
            del parts.in_flight.requests[progress]
            parts.desk.end(asking)
            self._asking = None

    async def _read(self) -> Asked:
        """Return what the owner gets of the request. Raises ApiError if no upstream may get it."""
        parts, progress, request = self._parts, self.progress, self.progress.request
        number, at = parts.desk.new_number(), parts.clock.ns_of(progress.started_at)
        session_header = parts.settings.session_header.encode()
        head = asked_of(number, request, progress.client.peer, session_header=session_header, at=at, bits=COMPLETE)
        if request.path.startswith(b"/v1/responses/") and not (request.method == b"POST" and request.path in ROUTES):
            progress.path, progress.body = RESPONSE_PATH, RequestBody(request.body)
            return head._replace(body_bytes=len(request.body))
        try:
            asked = await read_model_request(request)
        except ApiError as error:
            await self._judge(head)
            body_bytes, own = progress.bytes_in, request.own_id.decode()
            content = {"status": error.status, "code": error.code, "limit": error.limit, "bytes": body_bytes, "id": own}
            parts.desk.send(Note("record", 0, {**content, **_head_of(request, progress.client.peer)}))
            raise
        progress.model, progress.body, progress.is_stream = asked.model, asked.body, asked.is_stream
        names = asked.body.names
        progress.is_suspect = is_suspect(names, request.by_name)
        if asked.is_stream and parts.settings.timeouts.sse_keepalive_s and request.version == b"1.1":
            interval_s = parts.settings.timeouts.sse_keepalive_s
            progress.keepalive = KeepAlive(parts.pool.hub, progress.client, request.id, interval_s)
        bits = COMPLETE | STREAM * asked.is_stream | BACKGROUND * asked.is_background | SUSPECT * progress.is_suspect
        prompt = len(request.body) if is_measurable(request.path, names, request.body) else 0
        sums = None if head.session else sums_of(request.path, asked.body.data, names)
        self._name = asked.model
        return head._replace(
            model=asked.model,
            bits=bits,
            body_bytes=progress.bytes_in,
            prompt_bytes=prompt,
            prefix_bytes=0 if sums is None else sums.length,
            checksums=() if sums is None else tuple(sums.checksums),
            before=() if sums is None else tuple(sums.before.items()),
            previous_response_id=asked.previous_response_id or "",
        )

    async def _judge(self, head: Asked) -> None:
        """Raise ApiError if the owner refuses the request for its head."""
        await admit(self._parts.desk, head._replace(bits=HEAD_ONLY))

    def _cancel(self) -> None:
        self._parts.in_flight.requests[self.progress] = True
        self.progress.client.scope.cancel()

    def _send_comment(self, text: bytes) -> None:
        """Send a comment of the owner's in a stream that waits."""
        progress = self.progress
        if progress.keepalive is None and progress.request.version == b"1.1":
            interval_s = self._parts.settings.timeouts.sse_keepalive_s
            progress.keepalive = KeepAlive(self._parts.pool.hub, progress.client, progress.request.id, interval_s)
        keepalive = progress.keepalive
        if keepalive is not None:
            interval_s = keepalive.interval_s or 3600.0
            keepalive.announce(lambda: text, interval_s)
            keepalive.text = None
            keepalive.interval_s = self._parts.settings.timeouts.sse_keepalive_s
            if keepalive.interval_s:
                keepalive.start()
            else:
                keepalive.stop()

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
        progress.queued_s, progress.worker, progress.usage = sent.queued_s, step.endpoint, None
        outcome, leg, phase = Outcome("broken", step.endpoint), None, ""
        dropped: tuple[str, ...] = ()
        try:
            endpoint, proof = parts.desk.endpoint(sent)
            if step.edits != self._edits:
                self._edits = step.edits
                progress.body = await body_for(progress.body, step.edits, self._name)
            sink = ClientSink(
                progress, progress.client, progress.request.version, [*step.response_head],
                parts.settings.overhead_header and bool(endpoint.id),
            )  # fmt: skip
            leg = progress.leg = await self._leg_to(endpoint, proof, sent, sink)
            try:
                outcome = await leg.run()
            finally:
                progress.note_end_of(leg)
            if outcome is ANSWERED:
                outcome = Outcome("answered", step.endpoint, status=leg.status)
        except ApiError as error:
            outcome = Outcome("unfit", step.endpoint, Failure.of(error))
        except trio.Cancelled:
            is_cancelled = parts.in_flight.requests.get(progress) and not progress.client.has_left
            phase = progress.phase
            outcome = Outcome("cancelled" if is_cancelled else "left", step.endpoint, why=phase, status=progress.status)
            raise
        finally:
            progress.count_tokens()
            self._report(sent, outcome, leg, dropped)
        return outcome.kind in ENDS

    def _report(self, sent: SentStep, outcome: Outcome, leg: Leg | None, dropped: tuple[str, ...]) -> None:
        """Report the outcome of an attempt."""
        parts, progress, clock = self._parts, self.progress, self._parts.clock
        usage = None if leg is None else leg.usage
        mover = None if leg is None or leg.relay is None else leg.relay.body
        is_whole_stream = outcome.kind == "answered" and leg is not None and leg.is_stream
        times = [
            NEVER if at is None else clock.ns_of(at)
            for at in ((leg.asked_at, leg.answered_at, mover.first_at if mover else None) if leg else (None,) * 3)
        ]
        parts.desk.report(SentOutcome(
            sent.number, sent.attempt, 0, outcome._replace(status=outcome.status or (leg.status if leg else 0)),
            outcome.kind not in ENDS, times[0], times[1], clock.ns_of(parts.pool.hub.update_clock()),
            0 if mover is None else mover.bytes_out, 0 if mover is None else mover.chunks, progress.usage,
            "" if leg is None else leg.error, dropped=dropped, is_stream=leg is not None and leg.is_stream,
            tells_cached=usage is not None and usage.tells_cached,
            has_lost_usage=is_whole_stream and isinstance(usage, ReportedUsage) and not usage.has_arrived,
        ))  # fmt: skip

    async def _leg_to(self, endpoint: Endpoint, proof: bytes, sent: SentStep, sink: ClientSink) -> Leg:
        """Return an exchange with an endpoint. Raises ApiError for a request that the endpoint must not get."""
        parts, progress, request, step = self._parts, self.progress, self.progress.request, sent.step
        body, may_steer = progress.body, bool(sent.bits & MAY_STEER)
        guards = progress.is_suspect and not may_steer
        if guards or (endpoint.route is not None and endpoint.route.changes(body)):
            body, dropped = await prepare_body(request, body, endpoint, is_suspect=guards)
            if dropped:
                parts.notices.log_dropped(sent.key, dropped)
                sink.added.insert(0, (DROPPED_HEADER, ", ".join(dropped).encode()))
        usage = usage_reader(progress.path, reports_usage=endpoint.reports_usage)
        keepalive = progress.keepalive
        pieces = build_upstream_request(
            request,
            body.data,
            endpoint,
            grant=Grant(sent.key, "", may_steer, bool(sent.bits & HIDES_KEYS)),
            proof=proof,
            added=step.request_head,
            reads_response=keepalive is not None or endpoint.route is not None,
        )

        def heard(leg: Leg) -> None:
            if sent.bits & TELLS_HEAD:
                parts.desk.send(HeadSeen(sent.number, leg.status))
            request.release_body()
            progress.body = NO_BODY

        return Leg(parts.pool, endpoint, step, sink, pieces, request.method, usage, None, keepalive, heard)


def _head_of(request: Request | RequestHead, peer: str) -> dict[str, object]:
    head = [part.decode("latin-1") for part in (request.method, request.target, request.version)]
    headers = [[part.decode("latin-1") for part in pair] for pair in request.headers if len(pair[1]) < 1024]
    return {"head": head, "headers": headers, "peer": peer}


async def admit(desk: FrameDesk, head: Asked) -> None:
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
