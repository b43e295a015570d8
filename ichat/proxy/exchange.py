"""A request on its way through the gateway: its steps are carried out, until it has ended.

The desk decides on each step by the outcome of the last. It knows the endpoints; here are the client and the body.
"""

from ichat.errors import ApiError
from ichat.http.heads import Headers
from ichat.http.keepalive import KeepAlive
from ichat.http.request import Request
from ichat.http.request_body import NO_BODY, RequestBody
from ichat.http.server import Client, Taker
from ichat.observability.request_record import RESPONSE_PATH
from ichat.protocol.messages import DROPPED_HEADER
from ichat.protocol.usage import usage_wanted
from ichat.proxy.client_sink import ClientSink
from ichat.proxy.context import GatewayContext
from ichat.proxy.desk import Desk, record_failure, timeouts_of
from ichat.proxy.engine_control import is_suspect
from ichat.proxy.kept_responses import check_continued, continue_response, kept_response
from ichat.proxy.leg import Leg
from ichat.proxy.model_request import ModelRequest, read_model_request
from ichat.proxy.progress import RequestProgress
from ichat.proxy.refusals import Failure, over_limit
from ichat.proxy.shadow import copy_of, is_copied
from ichat.proxy.steps import (
    ANSWERED,
    BEGUN,
    NO_EDITS,
    AttemptStep,
    Outcome,
    Refuse,
    RequestRoute,
    Step,
    Wait,
    next_step,
    plain_start,
)
from ichat.proxy.stream_comments import make_keepalive
from ichat.proxy.targets import body_for, route_along
from ichat.proxy.token_usage import usage_reader
from ichat.proxy.upstream_request import build_upstream_request, prepare_body
from ichat.routing.aliases import Alias
from ichat.routing.circuit_breaker import FAILED_STATUSES
from ichat.routing.endpoint import Endpoint
from ichat.routing.prompt_lengths import is_measurable
from ichat.security.auth import Caller
from ichat.security.grant import admit, grant_of
from ichat.security.rate_limits import QuotaRefusal

_USAGE_WANTED = usage_wanted("")


class Exchange:
    """A request that is answered by an upstream."""

    __slots__ = ("_alias", "_context", "_desk", "_edits", "progress")

    def __init__(self, context: GatewayContext, request: Request, client: Client, caller: Caller) -> None:
        self._context = context
        now = context.pool.hub.update_clock()
        self.progress = RequestProgress(request, client, caller, request.path, now, len(request.body))
        self._alias: Alias | None = None
        """The name that it asks for, if that stands for models."""
        self._edits = NO_EDITS
        """Those that its body has now."""
        session = request.by_name.get(context.session_header, b"")
        self._desk = Desk(context, self.progress, session)

    def __repr__(self) -> str:
        return f"<Exchange {self.progress!r}>"

    async def forward(self) -> None:
        """Have the request answered by an endpoint of its model. Raises ApiError if nothing has been sent."""
        context, progress = self._context, self.progress
        asked = await read_model_request(progress.request)
        progress.model, progress.body, progress.is_stream = asked.model, asked.body, asked.is_stream
        name, aliases = asked.model, context.aliases
        if aliases.by_name:
            name = aliases.name_for(name, context.directory.has)
        self._admit(asked.model, name)
        try:
            route, step = self._begin(asked, name)
            del asked  # the response may last an hour
            await self._follow(self._desk.begin(route, step))
        finally:
            self._close_grant()

    async def forward_to_holder(self) -> None:
        """Have the request answered by the worker that keeps the response it names. Raises ApiError.

        The path is `/v1/responses/{id}`, and maybe more.
        """
        progress = self.progress
        progress.path, progress.body = RESPONSE_PATH, RequestBody(progress.request.body)
        progress.model, self._desk.only = kept_response(self._context, progress.request, progress.caller)
        self._admit()
        try:
            await self._follow(self._desk.begin(*self._plain_start()))
        finally:
            self._close_grant()

    async def forward_to_control_plane(self, endpoint: Endpoint, internal: Headers, taker: Taker) -> None:
        """Have `taker` get the control plane's answer to these headers. Raises ApiError if nothing was sent."""
        progress = self.progress
        progress.body = RequestBody(progress.request.body)
        progress.grant = grant_of(self._context.auth, progress.caller)
        first_byte_s, stall_s = timeouts_of(self._context, endpoint)
        step = AttemptStep(
            "", "", request_head=tuple(internal), first_byte_s=first_byte_s, stall_s=stall_s, passes_all=True
        )
        sink = ClientSink(progress, taker, progress.request.version, [], is_control=True)
        leg = progress.leg = await self._leg_to(endpoint, step, sink)
        try:
            outcome = await leg.run()
        finally:
            progress.note_end_of(leg)
        if outcome.failure is not None and outcome.kind != "cut":
            raise outcome.failure.error()

    def _admit(self, model: str = "", name: str = "") -> None:
        """Have the request count for its limits. Raises ApiError: 403, 429."""
        context, progress = self._context, self.progress
        grant = admit(context.auth, context.quotas, progress.caller, progress.started_at, model=model, name=name)
        if isinstance(grant, QuotaRefusal):
            raise over_limit(grant)
        progress.grant = grant

    def _close_grant(self) -> None:
        """End the request's reservation within the limits, and count the tokens that it has used."""
        progress = self.progress
        if progress.usage is None:
            progress.count_tokens()
        used = progress.usage
        now = self._context.pool.hub.update_clock()
        progress.grant.close(0 if used is None else used.input + used.output, now)

    # The route at the beginning.

    def _plain_start(self) -> tuple[RequestRoute, Step]:
        """Return the route to a single model, and its first step."""
        is_bound = self._desk.only is not None
        return plain_start(self.progress.model, self._context.timeouts.queue_s, is_bound=is_bound)

    def _begin(self, asked: ModelRequest, name: str) -> tuple[RequestRoute, Step]:
        """Return the models or the endpoint that the request may go to, and the first step. Raises ApiError 404."""
        context, progress, request = self._context, self.progress, self.progress.request
        progress.is_background = asked.is_background
        progress.is_suspect = not progress.grant.may_steer and is_suspect(asked.body.names, request.by_name)
        if asked.is_stream and context.timeouts.sse_keepalive_s:
            progress.keepalive = make_keepalive(context, progress, context.timeouts.sse_keepalive_s)
        plan = None
        if name in context.aliases.by_name:
            plan = context.aliases.plan(name, self._desk.session, context.balancer.prospect)
        if asked.previous_response_id is not None and request.path.endswith(b"/responses"):
            plan, self._desk.only = continue_response(
                context.directory, context.table, asked.previous_response_id, asked.model, plan
            )
            if self._desk.only is not None:
                check_continued(context, progress.caller, asked.previous_response_id)
        if plan is None:
            return self._plain_start()
        alias = self._alias = plan.alias
        if alias.longer is not None and is_measurable(request.path, asked.body.names, request.body):
            progress.prompt_bytes = len(request.body)
        progress.is_copied = alias.shadow is not None and is_copied(alias.name, alias.shadow, self._desk.session)
        repeats_until = progress.started_at + context.timeouts.first_byte_s
        is_bound, queue_s = self._desk.only is not None, context.timeouts.queue_s
        route = route_along(plan, repeats_until=repeats_until, queue_s=queue_s, is_bound=is_bound)
        return next_step(route, BEGUN, progress.started_at)

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
                    outcome = await self._attempt(step)
                    if outcome.failure is None:  # then it is done
                        return
                    step = self._desk.go_on(outcome)
                elif isinstance(step, Wait):
                    step = await self._desk.wait(step)
                elif isinstance(step, Refuse):
                    raise step.failure.error()
                else:
                    return
        except ApiError as error:
            if progress.keepalive is None or not progress.keepalive.has_begun:
                raise
            progress.error = error.code
            await progress.client.end_with_event(error.event(progress.path))
        finally:
            if progress.keepalive is not None:
                self._end_comments(progress.keepalive)

    def _end_comments(self, keepalive: KeepAlive) -> None:
        keepalive.stop()
        if keepalive.has_begun:
            self.progress.status = 200

    # An attempt.

    async def _attempt(self, step: AttemptStep) -> Outcome:
        """Send the request to the endpoint that was found, and its response to the client."""
        context, progress, desk, lease = self._context, self.progress, self._desk, self._desk.lease
        assert lease is not None
        endpoint = lease.endpoint
        try:
            if step.edits != self._edits:
                self._edits = step.edits
                progress.body = await body_for(progress.body, step.edits, progress.route.name)
            if progress.is_background:
                key = progress.grant.key_name
                is_limited = context.quotas.bounds_tokens(key)
                progress.ticket = context.late_usage.begin(endpoint, key, step.model, is_limited=is_limited)
            shows_overhead = context.settings.overhead_header and bool(endpoint.id)
            version, added = progress.request.version, [*step.response_head]
            sink = ClientSink(progress, progress.client, version, added, shows_overhead)
            leg = progress.leg = await self._leg_to(endpoint, step, sink)
            try:
                outcome = await leg.run()
            finally:
                progress.note_end_of(leg)
            if outcome is ANSWERED:
                progress.count_tokens()
                desk.learn(endpoint)
            else:
                desk.note_failure(endpoint, step, outcome)
        except ApiError as error:
            outcome = Outcome("unfit", step.endpoint, Failure.of(error))
        finally:
            desk.lease = None
            lease.release()
        if progress.ticket and (outcome.kind not in ("answered", "cut") or progress.status >= 400):
            context.late_usage.forget(progress.ticket)
        return outcome

    async def _leg_to(self, endpoint: Endpoint, step: AttemptStep, sink: ClientSink) -> Leg:
        """Return an exchange with an endpoint. Raises ApiError for a request that the endpoint must not get."""
        context, progress, request = self._context, self.progress, self.progress.request
        body = progress.body
        if progress.is_suspect or (endpoint.route is not None and endpoint.route.changes(body)):
            body, dropped = await prepare_body(request, body, endpoint, is_suspect=progress.is_suspect)
            if dropped:
                context.drop_notices.log_dropped(progress.grant.key_name, dropped)
                sink.added.insert(0, (DROPPED_HEADER, ", ".join(dropped).encode()))
        usage = None if step.passes_all else usage_reader(progress.path, reports_usage=endpoint.reports_usage)
        added = step.request_head
        if usage is not None and endpoint.reports_usage:
            added = (*added, usage_wanted(progress.ticket) if progress.ticket else _USAGE_WANTED)
        keepalive = progress.keepalive
        pieces = build_upstream_request(
            request,
            body.data,
            endpoint,
            grant=progress.grant,
            proof=context.auth.proof,
            added=added,
            reads_response=keepalive is not None or endpoint.route is not None,
        )
        gaps = context.gaps(step.model) if step.model else None
        return Leg(context.pool, endpoint, step, sink, pieces, request.method, usage, gaps, keepalive, self._heard)

    def _heard(self, leg: Leg) -> None:
        """Called when a response begins: from here on the request is sent nowhere else, and its body is freed."""
        context, progress = self._context, self.progress
        endpoint = leg.endpoint
        endpoint.see(context.pool.hub.now)
        if leg.status in FAILED_STATUSES:
            record_failure(endpoint, answers=True)
        elif endpoint.circuit.open_until is not None and endpoint.circuit.record_response():
            context.balancer.dispatch_waiting()
        if progress.is_copied and leg.status < 400 and self._alias is not None:
            context.shadows.start(copy_of(
                progress.request, progress.body, self._alias, grant=progress.grant,
                is_suspect=progress.is_suspect, proof=context.auth.proof, timeouts=context.timeouts,
            ))  # fmt: skip
        progress.request.release_body()
        progress.body, progress.prefix_sums = NO_BODY, None
        if progress.trace is not None:
            progress.trace.headers = ()
