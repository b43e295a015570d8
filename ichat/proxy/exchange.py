"""One request on its way through the gateway: what it asks for, its limits, a lease on an endpoint, and attempts.

Another attempt follows only where no connection could be made, or the worker declined the request since its engine is
dead: no request goes to a second endpoint that a first one may have worked on.
"""

import logging
import math
from collections.abc import Iterable

import attrs
import trio

from ichat import errors
from ichat.errors import ApiError
from ichat.http.heads import Headers
from ichat.http.keepalive import KeepAlive
from ichat.http.request import Request
from ichat.http.server import Client, Taker
from ichat.observability.request_record import RESPONSE_PATH, RequestRecord, UsedTokens, label_of
from ichat.proxy.attempt import Attempt, end_with_error
from ichat.proxy.context import GatewayContext
from ichat.proxy.engine_control import is_suspect
from ichat.proxy.forwarded_request import ForwardedRequest
from ichat.proxy.kept_responses import check_continued, kept_response
from ichat.proxy.model_request import read_model_request
from ichat.proxy.prefix_truth import take_back
from ichat.proxy.records import client_address, shown_path
from ichat.proxy.refusals import WaitBound, no_lease, over_limit
from ichat.proxy.shadow import is_copied
from ichat.proxy.targets import SEEMS_TOO_LONG, TargetWalk, continue_response, passed_over, reason_of
from ichat.routing.availability import Full, Loadable, Ready, Refusal
from ichat.routing.endpoint import Endpoint
from ichat.routing.model_list import near_models
from ichat.routing.prefix_chain import chain_of
from ichat.routing.prompt_lengths import is_measurable
from ichat.routing.request import Lease, RoutingRequest
from ichat.routing.waiting import wait_lease
from ichat.security.auth import Caller
from ichat.security.rate_limits import QuotaRefusal

log = logging.getLogger(__name__)

_SHOWN_NAME_BYTES_MAX = 80
"""So much of a model's name is in a comment, which has at most `keepalive.COMMENT_BYTES_MAX`."""
_NOT_WORKED_ON = frozenset(("upstream_unreachable", "model_not_ready"))
"""Failures of an endpoint after which another one may be asked."""


class Exchange:
    """One request, and what becomes known of it on its way. Times are Trio's clock."""

    __slots__ = (
        "_attempt", "_bytes_in", "_client", "_context", "_is_waiting", "_model", "_only", "_request",
        "_usage", "_waits_for_load", "bytes_out", "caller", "error", "forwarded", "is_stream", "status",
    )  # fmt: skip

    def __init__(self, context: GatewayContext, request: Request, client: Client, caller: Caller) -> None:
        self._context = context
        self._request = request
        self._client = client
        self.forwarded = ForwardedRequest(context, request, client, caller, request.path, trio.current_time())
        """What every attempt at it has to know."""
        self._model = ""
        """The model that it asks for, once that has been read."""
        self._only: Endpoint | None = None
        """The one endpoint that can answer, if there is just one: it keeps the response that the request is about."""
        self._attempt: Attempt | None = None
        """The newest one."""
        self._is_waiting = False
        """Whether it waits in a queue."""
        self.is_stream = False
        """Whether it asks for a stream."""
        self._usage: UsedTokens | None = None
        """The tokens that it used."""
        self._bytes_in = len(request.body)
        self.bytes_out = 0
        """Of a response of the gateway's own."""
        self.caller = caller
        self.status = 500
        """Of the response; 499 if the client left, before or in the middle of it."""
        self.error = "internal_error"
        """The code of the error, if there was one; of a bug, until there is a response."""

    def __repr__(self) -> str:
        return f"<Exchange {self._request.id.decode()} {self._model} {self.status}>"

    @property
    def is_answered(self) -> bool:
        """Whether a response has begun."""
        return self._attempt is not None and self._attempt.answered_at is not None

    @property
    def phase(self) -> str:
        """How far it has come: `begun`, `queued`, `connecting`, `waiting`, `first_token`, `streaming` or `plain`.

        `waiting` has been sent and has no answer yet, `first_token` has the head of a stream and nothing of its body,
        `plain` has the head of a response that is no stream.
        """
        if self._attempt is not None and self._attempt.asked_at is not None:
            return self._attempt.phase
        if self._is_waiting:
            return "queued"
        return "begun" if self._attempt is None else "connecting"

    async def forward(self) -> None:
        """Have the request answered by an endpoint of its model. Raises ApiError if nothing has been sent."""
        request, context, caller = self._request, self._context, self.caller
        asked = await read_model_request(request)
        self._model = asked.model
        context.auth.check_model(caller, self._model)
        if asked.is_background and context.quotas.bounds_tokens(caller.key_name):
            raise errors.background_uncounted()
        self.is_stream = is_stream = asked.is_stream
        if is_stream and context.timeouts.sse_keepalive_s:
            self.forwarded.keepalive = self._make_keepalive(context.timeouts.sse_keepalive_s)
        plan = None
        if self._model in context.aliases.by_name:
            plan = context.aliases.plan(self._model, request.by_name.get(context.session_header, b""))
        if asked.previous_response_id is not None and request.path.endswith(b"/responses"):
            plan, self._only = continue_response(context.registry, asked.previous_response_id, self._model, plan)
            if self._only is not None:
                check_continued(context, caller, asked.previous_response_id)
        self.forwarded.names = asked.names
        self.forwarded.is_suspect = not context.auth.lets_steer(caller) and is_suspect(asked.names, request.by_name)
        if plan is not None:
            self.forwarded.walk = TargetWalk(plan)
            self._model = plan.targets[0]
        del asked
        await self._forward_within_limits()

    async def forward_to_holder(self) -> None:
        """Have the request answered by the worker that keeps the response it names. Raises ApiError.

        The path is `/v1/responses/{id}`, and maybe more.
        """
        self.forwarded.path = RESPONSE_PATH
        self._model, self._only = kept_response(self._context, self._request, self.caller)
        await self._forward_within_limits()

    async def forward_to_control_plane(self, endpoint: Endpoint, internal: Headers, taker: Taker) -> None:
        """Have `taker` get the control plane's answer to these headers. Raises ApiError if nothing was sent."""
        self.forwarded.internal, self.forwarded.taker = internal, taker
        await self._try(endpoint, "")

    async def _forward_within_limits(self) -> None:
        quotas, forwarded = self._context.quotas, self.forwarded
        reservation = quotas.acquire(self.caller.key_name, forwarded.started_at)
        if isinstance(reservation, QuotaRefusal):
            raise over_limit(reservation)
        try:
            if forwarded.keepalive is not None:
                forwarded.keepalive.start()
            await (self._forward_with_failover() if forwarded.walk is None else self._forward_along(forwarded.walk))
        except ApiError as error:
            if forwarded.keepalive is None or not forwarded.keepalive.has_begun:
                raise
            self.error = error.code
            await end_with_error(self._client, error.event(forwarded.path))
        finally:
            if forwarded.keepalive is not None:
                self._end_comments(forwarded.keepalive)
            usage = self._usage = self._attempt.tokens_used(self._bytes_in) if self._attempt is not None else None
            reservation.release(0 if usage is None else usage.total, trio.current_time())

    def _make_keepalive(self, interval_s: float) -> KeepAlive | None:
        """Return what sends comments so often; None for a client that can get no chunks.

        What fails after the first of them ends the stream, as an event.
        """
        if self._request.version != b"1.1":
            return None
        return KeepAlive(self._context.pool.hub, self._client, self._request.id, interval_s)

    def _end_comments(self, keepalive: KeepAlive) -> None:
        keepalive.stop()
        if keepalive.has_begun:
            self.status = 200

    async def _forward_along(self, walk: TargetWalk) -> None:
        """Have one model of a plan after the other asked, until one answers."""
        forwarded, request, alias = self.forwarded, self._request, walk.alias
        if alias.longer is not None and is_measurable(request.path, forwarded.names, request.body):
            forwarded.prompt_bytes = len(request.body)
        session = request.by_name.get(self._context.session_header, b"")
        forwarded.is_copied = alias.shadow is not None and is_copied(alias.name, alias.shadow, session)
        while True:
            self._model, forwarded.prefix = walk.model, None
            if walk.longer is not None and self._seems_too_long(walk.longer):
                walk.go_longer(walk.longer, SEEMS_TOO_LONG)
                continue
            request.body, forwarded.names = await walk.fit(request.body, request.by_name, forwarded.names)
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

    def _seems_too_long(self, longer: str) -> bool:
        """Return whether the prompt is clearly too long for the current model, by what was learnt of such prompts.

        That is only an estimate: it counts where the model for longer prompts is ready.
        """
        bytes_in, found = self.forwarded.prompt_bytes, self._context.registry.availability(self._model)
        if not bytes_in or not isinstance(found, Ready):
            return False
        if not isinstance(self._context.registry.availability(longer), Ready):
            return False
        return self._context.prompt_lengths.is_too_long(self._model, bytes_in, found.endpoints)

    def _reason_of(self, error: ApiError) -> str:
        """Return the reason to go on that an error of the current model is; empty if it is none."""
        attempt = self._attempt
        is_external = attempt is not None and attempt.endpoint.route is not None and attempt.answered_at is None
        return reason_of(error, is_external=is_external, rejected=0 if attempt is None else attempt.rejected)

    async def _forward_with_failover(self) -> None:
        session = self._request.by_name.get(self._context.session_header, b"")
        prefix = None
        if not session and self._only is None and self._context.balancer.wants_prefix(self._model):
            forwarded, request = self.forwarded, self._request
            prefix = forwarded.prefix = chain_of(request.path, request.body, forwarded.names, self._model)
        routing = RoutingRequest(self._model, session, self.caller.fairness_key, only=self._only, prefix=prefix)
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
        """Return what to route for the current model of a plan: not where it has failed, or after a pause."""
        routing = attrs.evolve(routing, skips_open=walk.skips_open)
        if walk.failed is not None:
            elsewhere = attrs.evolve(routing, excluded=(walk.failed,))
            if self._context.balancer.has_alternative(elsewhere):
                return elsewhere
            await trio.sleep(walk.pause_s)
        return routing

    def _next_attempt(self, routing: RoutingRequest, failed: Endpoint, error: ApiError) -> RoutingRequest | None:
        """Return what to route next after an attempt has failed; None if there is nothing left to try."""
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
        attempt = self._attempt = Attempt(self.forwarded, endpoint, model)
        try:
            await attempt.run()
        finally:
            if attempt.answered_at is not None:
                self.status, self.error = attempt.status, attempt.error

    def _refused(self, refusal: Refusal, *, waited_for_load: bool = False) -> ApiError:
        context, key, timeouts = self._context, self.caller.key, self._context.timeouts

        def known() -> Iterable[str]:
            allowed = None if key is None else key.models
            return near_models(self._model, context.registry, context.aliases, allowed)

        bound = WaitBound("queue_s", timeouts.queue_s)
        if waited_for_load:
            bound = WaitBound("load_wait_s", timeouts.load_wait_s)
        return no_lease(refusal, self._model, known, bound, trio.current_time())

    async def _lease(self, routing: RoutingRequest) -> Lease:
        """Lease an endpoint, waiting for one if need be. Raises ApiError: 404, 429, 503."""
        balancer = self._context.balancer
        lease = balancer.lease(routing)
        if isinstance(lease, Lease):
            return lease
        if not isinstance(lease, Full | Loadable):
            raise self._refused(lease)
        timeouts, walk, waited_s = self._context.timeouts, self.forwarded.walk, self.forwarded.queued_s
        if walk is not None and walk.passes_over(reason := "busy" if isinstance(lease, Full) else "loading"):
            raise passed_over(routing.model, reason)
        queue_s = max(0.0, timeouts.queue_s - (waited_s - self.forwarded.load_waited_s))
        load_wait_s = max(0.0, timeouts.load_wait_s - waited_s)
        since = trio.current_time()
        self._is_waiting, self._waits_for_load = True, False
        try:
            lease = await wait_lease(balancer, routing, queue_s, load_wait_s, self._begin_load)
        finally:
            self.forwarded.queued_s += trio.current_time() - since
            if self._waits_for_load:
                self.forwarded.load_waited_s += trio.current_time() - since
                self._end_load()
        self._is_waiting = False
        if not isinstance(lease, Lease):
            raise self._refused(lease, waited_for_load=self._waits_for_load)
        return lease

    def _begin_load(self) -> None:
        """Called when it begins to wait for its model to be loaded: a stream is told of that in comments."""
        self._waits_for_load = True
        timeouts, forwarded = self._context.timeouts, self.forwarded
        interval_s = timeouts.load_comment_s
        if not self.is_stream or not interval_s:
            return
        keepalive = forwarded.keepalive = forwarded.keepalive or self._make_keepalive(interval_s)
        if keepalive is None:
            return
        keepalive.interval_s = min(interval_s, keepalive.interval_s or interval_s)
        keepalive.text = self._load_comment
        keepalive.start()

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
        """Return what a comment says while the model is loaded."""
        found = self._context.registry.availability(self._model)
        words = f"loading {self._model.encode()[:_SHOWN_NAME_BYTES_MAX].decode(errors='ignore')}"
        if isinstance(found, Loadable) and found.ready_at is not None:
            rest_s = found.ready_at - trio.current_time()
            words += f", about {math.ceil(rest_s)} s left" if rest_s > 0 else ", which takes longer than usual"
        return words.encode()

    def record(self, phase: str) -> RequestRecord:
        """Return the facts of the request, which has ended now; `phase` is how far it had come if it was cut off."""
        forwarded, request, caller, attempt = self.forwarded, self._request, self.caller, self._attempt
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
            trace_id=forwarded.trace.id if forwarded.trace is not None else "",
            prefix=forwarded.prefix,
        )
        if attempt is not None:
            attempt.note_in(record)
        if forwarded.walk is not None:
            forwarded.walk.note_in(record)
        return record
