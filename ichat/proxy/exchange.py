"""A request on its way through the gateway: its steps are carried out, until it has ended.

The desk decides on each step by the outcome of the last. It knows the endpoints; here are the client and the body.
"""

from ichat.errors import ApiError
from ichat.http.heads import Headers
from ichat.http.keepalive import KeepAlive
from ichat.http.request import Request
from ichat.http.request_body import NO_BODY
from ichat.http.server import Client, Taker
from ichat.observability.access_log import shown_path
from ichat.observability.request_record import LABELS, OTHER, RESPONSE_PATH, RequestRecord
from ichat.protocol.messages import DROPPED_HEADER
from ichat.protocol.usage import usage_wanted
from ichat.proxy.client_sink import ClientSink
from ichat.proxy.context import GatewayContext
from ichat.proxy.copies import copy_of
from ichat.proxy.desk import Desk
from ichat.proxy.leg import Leg
from ichat.proxy.model_request import read_model_request
from ichat.proxy.progress import RequestProgress
from ichat.proxy.refusals import Failure
from ichat.proxy.steps import ANSWERED, AttemptStep, Outcome, Refuse, Step, Wait
from ichat.proxy.targets import body_for
from ichat.proxy.token_usage import ReportedUsage, usage_reader
from ichat.proxy.upstream_request import build_upstream_request, prepare_body
from ichat.routing.endpoint import Endpoint, EndpointFacts
from ichat.security.addresses import address_in
from ichat.security.auth import Caller

_USAGE_WANTED = usage_wanted("")


class Exchange:
    """A request that is answered by an upstream."""

    __slots__ = ("_context", "_is_suspect", "desk", "progress")

    def __init__(self, context: GatewayContext, request: Request, client: Client, caller: Caller) -> None:
        self._context = context
        hub = context.pool.hub
        self.progress = RequestProgress(hub, request, client, request.path, len(request.body))
        self.desk = Desk(context, caller, self.progress, hub.update_clock())
        self._is_suspect = False
        """Whether it may have members or headers that no worker gets from this caller."""

    def __repr__(self) -> str:
        return f"<Exchange {self.progress!r}>"

    @property
    def caller(self) -> Caller:
        """The sender."""
        return self.desk.caller

    @property
    def phase(self) -> str:
        """How far it has got: `queued`, or as `RequestProgress` says."""
        phase = self.progress.phase
        return "queued" if self.desk.is_waiting and phase in ("begun", "connecting") else phase

    @property
    def ids(self) -> tuple[bytes, bytes]:
        """See `InFlight`."""
        return self.progress.request.id, self.progress.request.own_id

    @property
    def is_stream(self) -> bool:
        """Whether it asks for a stream."""
        return self.progress.is_stream

    def cancel(self) -> None:
        """Cut it off."""
        self.progress.client.scope.cancel()

    async def forward(self) -> None:
        """Have the request answered by an endpoint of its model. Raises ApiError if nothing has been sent."""
        context, progress, request = self._context, self.progress, self.progress.request
        asked, body = await read_model_request(request, request.by_name.get(context.session_header, b""))
        progress.body, progress.is_stream, desk = body, asked.is_stream, self.desk
        try:
            step = desk.ask(asked)
            self._is_suspect = asked.is_suspect and not desk.grant.may_steer
            del asked, body  # the response may last an hour
            progress.comment_s = context.timeouts.sse_keepalive_s
            if progress.is_stream and progress.comment_s:
                progress.make_keepalive(progress.comment_s)
            await self._follow(step)
        finally:
            self._close()

    async def forward_to_holder(self) -> None:
        """Have the request answered by the worker that keeps the response it names. Raises ApiError.

        The path is `/v1/responses/{id}`, and maybe more.
        """
        progress = self.progress
        progress.read_plainly(RESPONSE_PATH)
        try:
            await self._follow(self.desk.ask_holder(progress.request.method, progress.request.path))
        finally:
            self._close()

    async def forward_to_control_plane(self, endpoint: Endpoint, internal: Headers, taker: Taker) -> None:
        """Have `taker` get the control plane's answer to these headers. Raises ApiError if nothing was sent."""
        progress = self.progress
        progress.read_plainly()
        self.desk.grant_plainly()
        first_byte_s, stall_s = endpoint.timeouts or self._context.endpoint_timeouts
        step = AttemptStep(
            "", "", request_head=tuple(internal), first_byte_s=first_byte_s, stall_s=stall_s, passes_all=True
        )
        sink = ClientSink(progress, taker, progress.request.version, [], is_control=True)
        leg = progress.leg = await self._leg_to(endpoint.facts, step, sink)
        try:
            outcome = await leg.run()
        finally:
            progress.note_end_of(leg)
        if outcome.failure is not None and outcome.kind != "cut":
            raise outcome.failure.error()

    def _close(self) -> None:
        """End the request's reservation within the limits, and count the tokens that it has used."""
        progress = self.progress
        if progress.usage is None:
            progress.count_tokens(self.desk.ticket)
        used = progress.usage
        self.desk.close(0 if used is None else used.input + used.output)

    # The loop.

    async def _follow(self, step: Step) -> None:
        """Carry out the steps of a request until it has ended. Raises ApiError if nothing has been sent.

        An error after the first comment of a stream is its last event. Comments may begin with a load, too.
        """
        progress = self.progress
        if progress.keepalive is not None:
            progress.keepalive.start()
        try:
            while True:
                if isinstance(step, AttemptStep):
                    step = await self._attempt(step)
                elif isinstance(step, Wait):
                    step = await self.desk.wait(step)
                elif isinstance(step, Refuse):
                    raise step.failure.error()
                else:
                    return
        except ApiError as error:
            if progress.keepalive is None or not progress.keepalive.has_begun:
                raise
            progress.failed(error)
            await progress.client.end_with_event(error.event(progress.path))
        finally:
            if progress.keepalive is not None:
                self._end_comments(progress.keepalive)

    def _end_comments(self, keepalive: KeepAlive) -> None:
        keepalive.stop()
        if keepalive.has_begun:
            self.progress.status = 200

    # An attempt.

    async def _attempt(self, step: AttemptStep) -> Step:
        """Send the request to the endpoint that was found, and its response to the client; return the next step."""
        progress, desk = self.progress, self.desk
        try:
            if step.edits != progress.edits:
                progress.edits = step.edits
                progress.body = await body_for(progress.body, step.edits, desk.route.name)
            endpoint, ready_at = desk.endpoint, None
            if self._context.settings.overhead_header and endpoint.id:
                ready_at = desk.started_at + desk.queued_s
            sink = ClientSink(progress, progress.client, progress.request.version, [*step.response_head], ready_at)
            leg = progress.leg = await self._leg_to(endpoint, step, sink)
            try:
                outcome = await leg.run()
            finally:
                progress.note_end_of(leg)
        except ApiError as error:
            return desk.end_attempt(step, Outcome("unfit", step.endpoint, Failure.of(error)))
        if outcome is not ANSWERED:
            return desk.end_attempt(step, outcome)
        progress.count_tokens(desk.ticket)
        return desk.end_answered(
            leg.status,
            progress.usage,
            tells_cached=leg.usage is not None and leg.usage.tells_cached,
            is_usage_lost=leg.is_stream and self._is_usage_lost(leg),
        )

    def _is_usage_lost(self, leg: Leg) -> bool:
        """Return whether a whole stream lacks the tokens that its engine reports."""
        usage, used = leg.usage, self.progress.usage
        return (
            (used is None or used.is_estimate)
            and isinstance(usage, ReportedUsage)
            and not usage.has_arrived
            and self.progress.path.endswith(b"/completions")
        )

    async def _leg_to(self, endpoint: EndpointFacts, step: AttemptStep, sink: ClientSink) -> Leg:
        """Return an exchange with an endpoint. Raises ApiError for a request that the endpoint must not get."""
        context, progress, request, grant = self._context, self.progress, self.progress.request, self.desk.grant
        body = progress.body
        if self._is_suspect or (endpoint.route is not None and endpoint.route.changes(body)):
            body, dropped = await prepare_body(request, body, endpoint, is_suspect=self._is_suspect)
            if dropped:
                context.drop_notices.log_dropped(grant.key_name, dropped)
                sink.added.insert(0, (DROPPED_HEADER, ", ".join(dropped).encode()))
        usage = None if step.passes_all else usage_reader(progress.path, reports_usage=endpoint.reports_usage)
        added, ticket, keepalive = step.request_head, self.desk.ticket, progress.keepalive
        if usage is not None and endpoint.reports_usage:
            added = (*added, usage_wanted(ticket) if ticket else _USAGE_WANTED)
        pieces = build_upstream_request(
            request,
            body.data,
            endpoint,
            grant=grant,
            added=added,
            reads_response=keepalive is not None or endpoint.route is not None,
        )
        gaps = context.gaps(step.model) if step.model else None
        trace = self.desk.trace
        watch = None if trace is None else trace.watch
        return Leg(
            context.pool, endpoint, step, sink, pieces, request.method, usage, gaps, keepalive, self._heard, watch
        )

    def _heard(self, leg: Leg) -> None:
        """Called when a response begins: from here on the request is sent nowhere else, and its body is freed."""
        context, progress, desk = self._context, self.progress, self.desk
        if leg.step.model:
            desk.heard(leg.status)
        if desk.is_copied and leg.status < 400 and desk.alias is not None:
            copy = copy_of(progress.request, progress.body, grant=desk.grant, is_suspect=self._is_suspect)
            context.shadows.start(copy, desk.alias, proof=context.auth.proof, timeouts=context.timeouts)
        progress.request.release_body()
        progress.body, progress.prefix_sums = NO_BODY, None

    # Its record.

    def record(self, phase: str, now: float) -> RequestRecord:
        """Return the facts of the request; `phase` is how far it had got if it was cut off."""
        desk, progress, request = self.desk, self.progress, self.progress.request
        leg, trace = progress.leg, desk.trace
        received = None if leg is None or leg.relay is None else leg.relay.body
        asked_at = None if leg is None else leg.asked_at
        return RequestRecord(
            id=request.id.decode(),
            client=client_address(desk.caller, progress.client.peer),
            method=request.method.decode("latin-1"),
            path=shown_path(request.path),
            route=LABELS.get(progress.path, OTHER),
            key_name=desk.caller.key_name,
            model=desk.model,
            status=progress.status,
            error=progress.error,
            phase=phase,
            started_at=desk.started_at,
            ended_at=now,
            queued_s=desk.queued_s,
            bytes_in=progress.bytes_in,
            bytes_out=progress.bytes_out if received is None else received.bytes_out,
            usage=progress.usage,
            trace_id="" if trace is None else trace.id,
            span=None if trace is None else trace.span,
            is_stream=leg is not None and leg.is_stream,
            is_counted=desk.is_counted,
            prefix=desk.prefix,
            worker=desk.worker,
            answered_at=None if leg is None else leg.answered_at,
            first_at=None if received is None else received.first_at,
            overhead_s=None if asked_at is None else asked_at - desk.started_at - desk.queued_s,
            chunks=0 if received is None else received.chunks,
            alias=desk.route.name,
            passed=desk.route.passed,
            own_id=request.own_id.decode(),
        )


def client_address(caller: Caller, peer: str) -> str:
    """Return the connection's address and port, or the address for which a trusted proxy asks."""
    own = peer.rpartition(":")[0] == caller.address or address_in(peer) == caller.address
    return peer if own else caller.address
