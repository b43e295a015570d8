"""A request on its way through the gateway: its steps are carried out, until it has ended.

`steps.next_step` decides on each step by the outcome of the last. The desk knows the endpoints; here are the client
and the body.
"""

import trio

from ichat.errors import ApiError
from ichat.http.heads import Headers
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
from ichat.proxy.steps import AttemptStep, BodyEdits, Done, Lookup, Outcome, Refuse, RequestRoute, Wait, next_step
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
_BEGUN, _SEEMS_TOO_LONG = Outcome("begun"), Outcome("seems_too_long")
_NO_EDITS = BodyEdits()


class Exchange:
    """A request that is answered by an upstream."""

    __slots__ = ("_alias", "_context", "_desk", "_edits", "progress")

    def __init__(self, context: GatewayContext, request: Request, client: Client, caller: Caller) -> None:
        self._context = context
        self.progress = RequestProgress(request, client, caller, request.path, trio.current_time(), len(request.body))
        self._alias: Alias | None = None
        """The name that it asks for, if that stands for models."""
        self._edits = _NO_EDITS
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
            name = aliases.name_for(name, context.registry.has)
        self._admit(asked.model, name)
        try:
            route = self._route(asked, name)
            del asked  # the response may last an hour
            await self._follow_with_comments(route)
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
            await self._follow(self._plain_route())
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
        outcome = await self._exchange_with(endpoint, step, sink)
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
        progress.grant.close(0 if used is None else used.input + used.output, trio.current_time())

    # The route at the beginning.

    def _plain_route(self) -> RequestRoute:
        """Return the route to a single model."""
        return RequestRoute(
            self.progress.model, queue_s=self._context.timeouts.queue_s, is_bound=self._desk.only is not None
        )

    def _route(self, asked: ModelRequest, name: str) -> RequestRoute:
        """Return the models or the endpoint that the request may go to. Raises ApiError 404."""
        context, progress, request = self._context, self.progress, self.progress.request
        progress.is_background = asked.is_background
        progress.is_suspect = not progress.grant.may_steer and is_suspect(asked.body.names, request.by_name)
        if asked.is_stream and context.timeouts.sse_keepalive_s:
            progress.keepalive = make_keepalive(context, progress, context.timeouts.sse_keepalive_s)
        plan = None
        if name in context.aliases.by_name:
            plan = context.aliases.plan(name, self._desk.session, context.balancer.prospect)
        if asked.previous_response_id is not None and request.path.endswith(b"/responses"):
            plan, self._desk.only = continue_response(context.registry, asked.previous_response_id, asked.model, plan)
            if self._desk.only is not None:
                check_continued(context, progress.caller, asked.previous_response_id)
        if plan is None:
            return self._plain_route()
        alias = self._alias = plan.alias
        if alias.longer is not None and is_measurable(request.path, asked.body.names, request.body):
            progress.prompt_bytes = len(request.body)
        progress.is_copied = alias.shadow is not None and is_copied(alias.name, alias.shadow, self._desk.session)
        repeats_until = progress.started_at + context.timeouts.first_byte_s
        return route_along(
            plan,
            repeats_until=repeats_until,
            queue_s=context.timeouts.queue_s,
            is_bound=self._desk.only is not None,
        )

    # The loop.

    async def _follow_with_comments(self, route: RequestRoute) -> None:
        """Follow a route; an error after the first comment of a stream is its last event. A load has comments, too."""
        progress = self.progress
        try:
            if progress.keepalive is not None:
                progress.keepalive.start()
            await self._follow(route)
        except ApiError as error:
            if progress.keepalive is None or not progress.keepalive.has_begun:
                raise
            progress.error = error.code
            await progress.client.end_with_event(error.event(progress.path))
        finally:
            if progress.keepalive is not None:
                progress.keepalive.stop()
                if progress.keepalive.has_begun:
                    progress.status = 200

    async def _follow(self, route: RequestRoute) -> None:
        """Carry out the steps of a request until it has ended. Raises ApiError if nothing has been sent."""
        progress, outcome, hub = self.progress, _BEGUN, self._context.pool.hub
        while True:
            route, step = next_step(route, outcome, hub.now)
            progress.route, progress.model = route, route.model
            match step:
                case Lookup():
                    if step.edits == self._edits:
                        outcome = self._look_up(step)
                    else:
                        outcome = await self._edit_and_look_up(step)
                case AttemptStep():
                    outcome = await self._attempt(step)
                    if outcome.failure is None:  # then it is done
                        return
                case Done():
                    return
                case Wait():
                    outcome = await self._desk.wait(step)
                case Refuse():
                    raise step.failure.error()

    async def _edit_and_look_up(self, step: Lookup) -> Outcome:
        """Edit the body for a model, and find an endpoint of it. Raises ApiError 400 for a body that has no members."""
        if not self._seems_too_long(step):
            progress, self._edits = self.progress, step.edits
            progress.body = await body_for(progress.body, step.edits, progress.route.name)
        return self._look_up(step)

    def _look_up(self, step: Lookup) -> Outcome:
        """Find an endpoint of a model, if its prompt does not seem too long."""
        return _SEEMS_TOO_LONG if self._seems_too_long(step) else self._desk.look_up(step)

    def _seems_too_long(self, step: Lookup) -> bool:
        return bool(step.longer and self.progress.prompt_bytes) and self._desk.seems_too_long(step)

    # An attempt.

    async def _attempt(self, step: AttemptStep) -> Outcome:
        """Send the request to the endpoint that was found, and its response to the client."""
        context, progress, lease = self._context, self.progress, self._desk.lease
        assert lease is not None
        endpoint = lease.endpoint
        try:
            if progress.is_background:
                is_limited = context.quotas.bounds_tokens(progress.grant.key_name)
                progress.ticket = context.late_usage.begin(
                    endpoint, progress.grant.key_name, step.model, is_limited=is_limited
                )
            sink = ClientSink(
                progress, progress.client, progress.request.version, [*step.response_head],
                shows_overhead=bool(endpoint.id) and context.settings.overhead_header,
            )  # fmt: skip
            outcome = await self._exchange_with(endpoint, step, sink)
            if outcome.failure is None:
                progress.count_tokens()
                self._desk.learn(endpoint)
            else:
                self._desk.note_failure(endpoint, step, outcome)
        except ApiError as error:
            outcome = Outcome("unfit", step.endpoint, Failure.of(error))
        finally:
            self._desk.lease = None
            lease.release()
        if progress.ticket and (outcome.kind not in ("answered", "cut") or outcome.status >= 400):
            context.late_usage.forget(progress.ticket)
        return outcome

    async def _exchange_with(self, endpoint: Endpoint, step: AttemptStep, sink: ClientSink) -> Outcome:
        """Send the request to an endpoint. Raises ApiError for a request that it must not get."""
        context, progress, request = self._context, self.progress, self.progress.request
        body = progress.body
        if progress.is_suspect or endpoint.access is not None or endpoint.route is not None:
            body, dropped = await prepare_body(request, body, endpoint, is_suspect=progress.is_suspect)
            if dropped:
                context.drop_notices.log_dropped(progress.grant.key_name, dropped)
                sink.added.insert(0, (DROPPED_HEADER, ", ".join(dropped).encode()))
        usage = None if step.passes_all else usage_reader(progress.path, reports_usage=endpoint.reports_usage)
        added = step.request_head
        if usage is not None and endpoint.reports_usage:
            added = (*added, usage_wanted(progress.ticket) if progress.ticket else _USAGE_WANTED)
        pieces = build_upstream_request(
            request,
            body.data,
            endpoint,
            grant=progress.grant,
            proof=context.auth.proof,
            added=added,
            reads_response=progress.keepalive is not None or endpoint.route is not None,
        )
        leg = progress.leg = Leg(
            context.pool,
            endpoint,
            step,
            sink,
            pieces,
            request.method,
            usage,
            context.gaps(step.model) if step.model else None,
            progress.keepalive,
            self._heard,
        )
        del pieces, body
        try:
            return await leg.run()
        finally:
            del leg.sink, leg.heard  # they lead back to the leg, and the garbage collector must have nothing to do
            if leg.answered_at is not None:
                progress.status, progress.error = leg.status, leg.error

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
