"""A request on its way through the gateway: its content, its limits, a lease on an endpoint, and attempts.

Another attempt follows only where no connection could be made, or the worker declined the request since its engine is
dead. No request goes to a second endpoint that a first endpoint may have worked on.
"""

import logging
from functools import partial

import attrs
import trio

from ichat import errors
from ichat.errors import ApiError
from ichat.fleet.model_list import near_models
from ichat.fleet.waiting import wait_lease
from ichat.http.heads import Headers
from ichat.http.keepalive import KeepAlive
from ichat.http.request import Request
from ichat.http.request_body import RequestBody
from ichat.http.server import Client, Taker
from ichat.observability.request_record import RESPONSE_PATH, RequestRecord, UsedTokens, label_of
from ichat.protocol.load_story import story_of
from ichat.proxy.attempt import Attempt
from ichat.proxy.context import GatewayContext
from ichat.proxy.engine_control import is_suspect
from ichat.proxy.forwarded_request import ForwardedRequest
from ichat.proxy.in_background import begin_in_background
from ichat.proxy.kept_responses import check_continued, kept_response
from ichat.proxy.model_request import ModelRequest, read_model_request
from ichat.proxy.prefix_truth import take_back
from ichat.proxy.records import client_address, shown_path
from ichat.proxy.refusals import WaitBound, load_comment, no_lease, over_limit
from ichat.proxy.shadow import is_copied
from ichat.proxy.targets import TargetWalk, continue_response, passed_over, reason_of, reason_of_refusal
from ichat.routing.availability import Full, Loadable, Refusal
from ichat.routing.endpoint import Endpoint
from ichat.routing.prefix_chain import chain_of
from ichat.routing.prompt_lengths import is_measurable
from ichat.routing.request import Lease, RoutingRequest
from ichat.security.auth import Caller
from ichat.security.grant import admit, grant_of
from ichat.security.rate_limits import QuotaRefusal

log = logging.getLogger(__name__)

_NOT_WORKED_ON = frozenset(("upstream_unreachable", "model_not_ready"))
"""Failures of an endpoint after which another endpoint may be asked."""


class Exchange:
    """A request, and the facts learnt about it on its way. Times are Trio's clock."""

    __slots__ = (
        "_attempt", "_bytes_in", "_client", "_context", "_is_waiting", "_model", "_only", "_request",
        "_usage", "_waits_for", "bytes_out", "caller", "error", "forwarded", "is_counted", "is_stream", "status",
    )  # fmt: skip

    def __init__(self, context: GatewayContext, request: Request, client: Client, caller: Caller) -> None:
        self._context = context
        self._request = request
        self._client = client
        self.forwarded = ForwardedRequest(context, request, client, caller, request.path, trio.current_time())
        """The facts that every attempt at it needs."""
        self._model = ""
        """The model that it asks for, once that has been read."""
        self._only: Endpoint | None = None
        """The only endpoint that can answer, if there is just one: it keeps the response that the request is about."""
        self._attempt: Attempt | None = None
        """The newest attempt."""
        self._is_waiting = False
        """Whether it waits in a queue."""
        self._waits_for: WaitBound | None = None
        """The bound of its newest wait, if that is for a load."""
        self.is_stream = False
        """Whether it asks for a stream."""
        self.is_counted = False
        """Whether it is a request to a model; see `RequestRecord`."""
        self._usage: UsedTokens | None = None
        """The tokens that it used."""
        self._bytes_in = len(request.body)
        self.bytes_out = 0
        """Of a response of the gateway's own."""
        self.caller = caller
        self.status = 500
        """Of the response; 499 if the client left, before or in the middle of it."""
        self.error = "internal_error"
        """The code of the error, if there was an error; of a bug, until there is a response."""

    def __repr__(self) -> str:
        return f"<Exchange {self._request.id.decode()} {self._model} {self.status}>"

    @property
    def is_answered(self) -> bool:
        """Whether a response has begun."""
        return self._attempt is not None and self._attempt.answered_at is not None

    @property
    def phase(self) -> str:
        """How far it has got: `begun`, `queued`, `connecting`, `waiting`, `first_token`, `streaming` or `plain`.

        `waiting` has been sent and has no answer yet. `first_token` has the head of a stream and nothing of its body.
        `plain` has the head of a response that is no stream.
        """
        if self._attempt is not None and self._attempt.asked_at is not None:
            return self._attempt.phase
        if self._is_waiting:
            return "queued"
        return "begun" if self._attempt is None else "connecting"

    async def forward(self) -> None:
        """Have the request answered by an endpoint of its model. Raises ApiError if nothing has been sent."""
        request, context = self._request, self._context
        asked = await read_model_request(request)
        self._model = asked.model
        name = context.aliases.name_for(self._model, context.registry.has)
        self._admit(name)
        try:
            self._prepare(asked, name)
        except ApiError:
            self.forwarded.grant.close(0, trio.current_time())
            raise
        del asked
        await self._forward_within_limits()

    def _admit(self, name: str = "") -> None:
        """Have the request count for its limits. Raises ApiError: 403, 429."""
        context, at, model = self._context, self.forwarded.started_at, self._model if name else ""
        grant = admit(context.auth, context.quotas, self.caller, at, model=model, name=name)
        if isinstance(grant, QuotaRefusal):
            raise over_limit(grant)
        self.forwarded.grant = grant

    def _prepare(self, asked: ModelRequest, name: str) -> None:
        """Decide which models or which endpoint the request goes to. Raises ApiError 404."""
        request, context, forwarded = self._request, self._context, self.forwarded
        forwarded.is_background = asked.is_background
        self.is_stream = asked.is_stream
        if asked.is_stream and context.timeouts.sse_keepalive_s:
            forwarded.keepalive = self._make_keepalive(context.timeouts.sse_keepalive_s)
        plan = None
        if name in context.aliases.by_name:
            session = request.by_name.get(context.session_header, b"")
            plan = context.aliases.plan(name, session, context.balancer.prospect)
        if asked.previous_response_id is not None and request.path.endswith(b"/responses"):
            plan, self._only = continue_response(context.registry, asked.previous_response_id, self._model, plan)
            if self._only is not None:
                check_continued(context, self.caller, asked.previous_response_id)
        forwarded.body = asked.body
        forwarded.is_suspect = not forwarded.grant.may_steer and is_suspect(asked.body.names, request.by_name)
        if plan is not None:
            forwarded.walk = TargetWalk(plan)
            self._model = plan.targets[0]

    async def forward_to_holder(self) -> None:
        """Have the request answered by the worker that keeps the response it names. Raises ApiError.

        The path is `/v1/responses/{id}`, and maybe more.
        """
        self.forwarded.path = RESPONSE_PATH
        self._model, self._only = kept_response(self._context, self._request, self.caller)
        self._admit()
        self.forwarded.body = RequestBody(self._request.body)
        await self._forward_within_limits()

    async def forward_to_control_plane(self, endpoint: Endpoint, internal: Headers, taker: Taker) -> None:
        """Have `taker` get the control plane's answer to these headers. Raises ApiError if nothing was sent."""
        self.forwarded.internal, self.forwarded.taker = internal, taker
        self.forwarded.body = RequestBody(self._request.body)
        self.forwarded.grant = grant_of(self._context.auth, self.caller)
        await self._try(endpoint, "")

    async def _forward_within_limits(self) -> None:
        forwarded = self.forwarded
        try:
            if forwarded.keepalive is not None:
                forwarded.keepalive.start()
            await (self._forward_with_failover() if forwarded.walk is None else self._forward_along(forwarded.walk))
        except ApiError as error:
            if forwarded.keepalive is None or not forwarded.keepalive.has_begun:
                raise
            self.error = error.code
            await self._client.end_with_event(error.event(forwarded.path))
        finally:
            if (keepalive := forwarded.keepalive) is not None:
                keepalive.stop()
                if keepalive.has_begun:
                    self.status = 200
            usage = self._usage = self._attempt.tokens_used(self._bytes_in) if self._attempt is not None else None
            forwarded.grant.close(0 if usage is None else usage.total, trio.current_time())

    def _make_keepalive(self, interval_s: float) -> KeepAlive | None:
        """Return the sender of comments; None for a client that can get no chunks. An error then ends the stream."""
        if self._request.version != b"1.1":
            return None
        return KeepAlive(self._context.pool.hub, self._client, self._request.id, interval_s)

    async def _forward_along(self, walk: TargetWalk) -> None:
        """Have the models of a plan asked in turn, until a model answers."""
        forwarded, request, alias = self.forwarded, self._request, walk.alias
        if alias.longer is not None and is_measurable(request.path, forwarded.body.names, request.body):
            forwarded.prompt_bytes = len(request.body)
        session = request.by_name.get(self._context.session_header, b"")
        forwarded.is_copied = alias.shadow is not None and is_copied(alias.name, alias.shadow, session)
        while True:
            self._model, forwarded.prefix = walk.model, None
            if walk.skips_too_long(self._context.registry, self._context.prompt_lengths, forwarded.prompt_bytes):
                continue
            forwarded.body = await walk.fit(forwarded.body)
            try:
                await self._forward_with_failover()
            except ApiError as error:
                failed = self._attempt.endpoint if self._attempt is not None else None
                may_repeat = trio.current_time() < forwarded.started_at + self._context.timeouts.first_byte_s
                if walk.advance(error, self._reason_of(error), failed, may_repeat=may_repeat):
                    continue
                if walk.is_told:
                    raise
                raise walk.error() from error
            else:
                return

    def _reason_of(self, error: ApiError) -> str:
        """Return the reason to go on after an error of the current model; empty if there is none."""
        attempt = self._attempt
        is_external = attempt is not None and attempt.endpoint.route is not None and attempt.answered_at is None
        return reason_of(error, is_external=is_external, rejected=0 if attempt is None else attempt.rejected)

    async def _forward_with_failover(self) -> None:
        request, forwarded, model = self._request, self.forwarded, self._model
        session = request.by_name.get(self._context.session_header, b"")
        routing = RoutingRequest(model, session, forwarded.grant.fairness_key, only=self._only)
        if not session and self._only is None:
            routing.make_prefix = partial(chain_of, request.path, forwarded.body.data, forwarded.body.names, model)
        if self.forwarded.walk is not None:
            routing = await self._fit(routing, self.forwarded.walk)
        while True:
            lease = await self._lease(routing)
            try:
                await self._try(lease.endpoint, routing.model)
            except ApiError as error:
                following = self._next_attempt(routing, lease.endpoint, error)
                if following is None:
                    raise
                routing = following
            else:
                return
            finally:
                lease.release()

    async def _fit(self, routing: RoutingRequest, walk: TargetWalk) -> RoutingRequest:
        """Return the request to route for the current model of a plan: not where it has failed, or after a pause."""
        routing = attrs.evolve(routing, skips_open=walk.skips_open)
        if walk.failed is not None:
            elsewhere = attrs.evolve(routing, excluded=(walk.failed,))
            if self._context.balancer.has_alternative(elsewhere):
                return elsewhere
            await trio.sleep(walk.pause_s)
        return routing

    def _next_attempt(self, routing: RoutingRequest, failed: Endpoint, error: ApiError) -> RoutingRequest | None:
        """Return the request to route next after an attempt has failed; None if there is nothing left to try."""
        if self._attempt is not None:
            self._attempt.release_body()
        if error.code not in _NOT_WORKED_ON:
            if error.code == errors.CONTEXT_LENGTH_EXCEEDED and self.forwarded.prefix is not None:
                take_back(self._context.balancer.prefixes, self.forwarded.prefix, failed)
            return None
        log.warning("%s", error.message)
        prefix = self.forwarded.prefix
        if prefix is not None:
            take_back(self._context.balancer.prefixes, prefix, failed)
        if error.code == "upstream_unreachable" and self._attempt is not None:
            failed.fail(trio.current_time())
            self._attempt.record_failure()
        routing = attrs.evolve(routing, excluded=(*routing.excluded, failed))
        if routing.only is not None or not self._context.balancer.has_alternative(routing):
            return None
        if self.forwarded.walk is not None:
            self.forwarded.walk.tries += 1
        return routing

    async def _try(self, endpoint: Endpoint, model: str) -> None:
        """Have the request answered by this endpoint, which serves `model`. Raises ApiError if nothing was sent."""
        attempt, late_usage = Attempt(self.forwarded, endpoint, model), self._context.late_usage
        self._attempt = attempt
        if self.forwarded.is_background:
            self.forwarded.ticket = begin_in_background(self._context, endpoint, self.forwarded.grant.key_name, model)
        try:
            await attempt.run()
        except ApiError:
            late_usage.forget(self.forwarded.ticket)
            raise
        finally:
            if attempt.answered_at is not None:
                self.status, self.error = attempt.status, attempt.error
                if attempt.status >= 400:
                    late_usage.forget(self.forwarded.ticket)

    def _refused(self, refusal: Refusal, bound: WaitBound | None = None) -> ApiError:
        """Return the error of a refusal; `bound` is that of the load that it waited for, if it did."""
        context, key, timeouts = self._context, self.caller.key, self._context.timeouts
        allowed = None if key is None else key.models
        known = partial(near_models, self._model, context.registry, context.aliases, allowed)
        bound = bound or WaitBound("queue_s", timeouts.queue_s)
        return no_lease(refusal, self._model, known, bound, trio.current_time())

    async def _lease(self, routing: RoutingRequest) -> Lease:
        """Lease an endpoint, waiting for it if need be. Raises ApiError: 404, 429, 503."""
        balancer = self._context.balancer
        lease = balancer.lease(routing)
        self.forwarded.prefix = routing.prefix
        if isinstance(lease, Lease):
            return lease
        if not isinstance(lease, Full | Loadable):
            raise self._refused(lease)
        timeouts, walk, waited_s = self._context.timeouts, self.forwarded.walk, self.forwarded.queued_s
        if walk is not None and walk.passes_over(reason := reason_of_refusal(lease)):
            raise passed_over(routing.model, reason)
        queue_s = max(0.0, timeouts.queue_s - (waited_s - self.forwarded.load_waited_s))
        since = trio.current_time()
        self._is_waiting, self._waits_for = True, None
        try:
            lease = await wait_lease(balancer, routing, queue_s, self._begin_load)
        finally:
            if self._waits_for is not None:
                self.forwarded.load_waited_s += trio.current_time() - since
                self._end_load()
            self.forwarded.queued_s += trio.current_time() - since
        self._is_waiting = False
        if not isinstance(lease, Lease):
            raise self._refused(lease, self._waits_for)
        return lease

    def _begin_load(self, load: Loadable) -> float:
        """Return how long it may wait for this load; a stream gets comments about that, at once and then again."""
        timeouts, forwarded = self._context.timeouts, self.forwarded
        bound = WaitBound("load_wait_s", timeouts.load_wait_s)
        if load.is_coming:
            bound = WaitBound("restart_wait_s", timeouts.restart_wait_s)
        self._waits_for = bound
        interval_s = timeouts.load_comment_s
        keepalive = forwarded.keepalive
        if self.is_stream and interval_s:
            keepalive = forwarded.keepalive = keepalive or self._make_keepalive(interval_s)
            if keepalive is not None:
                keepalive.announce(self._load_comment, min(interval_s, keepalive.interval_s or interval_s))
        return max(0.0, bound.seconds - forwarded.queued_s)

    def _end_load(self) -> None:
        """Go on with the comments of every stream, if there are any."""
        keepalive, interval_s = self.forwarded.keepalive, self._context.timeouts.sse_keepalive_s
        if keepalive is None:
            return
        keepalive.text, keepalive.interval_s = None, interval_s
        if interval_s:
            keepalive.start()
            return
        keepalive.stop()
        if not keepalive.has_begun:
            self.forwarded.keepalive = None

    def _load_comment(self) -> bytes:
        """Return the text of a comment while the model is loaded."""
        found, now = self._context.registry.availability(self._model), trio.current_time()
        story = self._context.registry.story(self._model, now)
        words = found.words(now) if isinstance(found, Loadable) else ""
        return load_comment(self._model, words if story is None else story_of(story))

    def record(self, phase: str) -> RequestRecord:
        """Return the facts of the request that has ended now; `phase` is how far it had got if it was cut off."""
        forwarded, request, caller, attempt = self.forwarded, self._request, self.caller, self._attempt
        trace = forwarded.trace
        record = RequestRecord(
            id=request.id.decode(),
            client=client_address(caller, self._client.peer),
            method=request.method.decode("latin-1"),
            path=shown_path(request.path),
            route=label_of(forwarded.path),
            key_name=caller.key_name,
            model=self._model,
            status=self.status,
            error=self.error,
            phase=phase,
            started_at=forwarded.started_at,
            ended_at=trio.current_time(),
            queued_s=forwarded.queued_s,
            bytes_in=self._bytes_in,
            bytes_out=self.bytes_out,
            usage=self._usage,
            trace_id="" if trace is None else trace.id,
            span=None if trace is None else trace.span,
            is_counted=self.is_counted,
            prefix=forwarded.prefix,
        )
        if attempt is not None:
            attempt.note_in(record)
        if forwarded.walk is not None:
            forwarded.walk.note_in(record)
        return record
