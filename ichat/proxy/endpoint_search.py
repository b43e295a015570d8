"""The search for an endpoint: it asks the balancer, in steps that `steps.next_step` has decided on."""

from functools import partial

import attrs
import trio

from ichat.fleet.model_list import near_models
from ichat.fleet.waiting import wait_lease
from ichat.http.heads import Headers
from ichat.protocol.messages import WORKER_HEADER
from ichat.protocol.prefixes import PREFIX_HEADER, chain_header
from ichat.proxy.context import GatewayContext
from ichat.proxy.progress import RequestProgress
from ichat.proxy.refusals import Failure, WaitBound, no_lease
from ichat.proxy.steps import Lookup, Outcome, Wait
from ichat.proxy.stream_comments import begin_load, end_load
from ichat.proxy.targets import body_for, reason_of_refusal, seems_too_long
from ichat.routing.availability import Full, Loadable, Refusal
from ichat.routing.endpoint import Endpoint
from ichat.routing.prefix_chain import chain_of
from ichat.routing.request import Lease, RoutingRequest

_ALONE, _WAITED, _TOO_LONG = Outcome("alone"), Outcome("waited"), Outcome("seems_too_long")


@attrs.define(eq=False)
class EndpointSearch:
    """Finds endpoints for a request, and waits for them."""

    _context: GatewayContext
    _progress: RequestProgress
    session: bytes = b""
    """Requests of the same session go to the same endpoint; empty: it has none."""
    only: Endpoint | None = None
    """The only endpoint that can answer, if there is just one of them: it keeps the response in question."""
    lease: Lease | None = None
    """The place at the endpoint that was found, until the attempt there has ended."""
    _routing: RoutingRequest | None = None
    """The request as the balancer sees it, for the current model."""
    _failed: dict[str, Endpoint] = attrs.field(factory=dict[str, Endpoint], init=False)
    """The endpoints that were asked in vain, by their ids."""

    def note_failed(self, endpoint: Endpoint) -> None:
        """Remember an endpoint that has failed with the request: a later step names it by its id."""
        self._failed[endpoint.id.decode()] = endpoint

    async def look_up(self, step: Lookup) -> Outcome:
        """Lease an endpoint that has a free place now. Raises ApiError 400 for a body that cannot be edited."""
        context, progress, routing = self._context, self._progress, self._routing
        if step.longer and progress.prompt_bytes and seems_too_long(
            context.registry, context.prompt_lengths, step.model, step.longer, progress.prompt_bytes
        ):  # fmt: skip
            return _TOO_LONG
        if routing is None or routing.model != step.model:
            routing = await self._routing_for(step)
        if step.excluded or routing.excluded or routing.skips_open != step.skips_open:
            excluded = tuple(self._failed[one] for one in step.excluded)
            routing = attrs.evolve(routing, excluded=excluded, skips_open=step.skips_open)
        self._routing = routing
        if step.excluded and not context.balancer.has_alternative(routing):
            return _ALONE
        lease = context.balancer.lease(routing)
        progress.prefix = routing.prefix
        if isinstance(lease, Lease):
            return self._found(lease)
        if not isinstance(lease, Full | Loadable):
            return self._refused(lease, reason_of_refusal(lease))
        waited_s = progress.queued_s - progress.load_waited_s
        if isinstance(lease, Full):
            return Outcome("full", waited_s=waited_s)
        return Outcome("starting" if lease.is_coming else "loadable", waited_s=waited_s)

    async def _routing_for(self, step: Lookup) -> RoutingRequest:
        """Return the request as the balancer sees it for another model, and give it that model's body."""
        progress, model, path = self._progress, step.model, self._progress.request.path
        if progress.route.name:
            progress.body = await body_for(progress.body, step.edits, progress.route.name)
        routing = RoutingRequest(model, self.session, progress.grant.fairness_key, only=self.only)
        if not self.session and self.only is None:
            routing.make_prefix = partial(chain_of, path, progress.body.data, progress.body.names, model)
        return routing

    async def wait(self, step: Wait) -> Outcome:
        """Wait for a while, or for a place at an endpoint."""
        if step.kind == "pause":
            await trio.sleep(step.seconds)
            return _WAITED
        progress, routing, since = self._progress, self._routing, trio.current_time()
        assert routing is not None
        progress.is_waiting, progress.load_bound = True, None
        try:
            lease = await wait_lease(
                self._context.balancer, routing, step.seconds, partial(begin_load, self._context, progress)
            )
        finally:
            waited_s = trio.current_time() - since
            progress.queued_s += waited_s
            if progress.load_bound is not None:
                progress.load_waited_s += waited_s
                end_load(self._context, progress)
        progress.is_waiting = False
        if isinstance(lease, Lease):
            return self._found(lease)
        return self._refused(lease, reason_of_refusal(lease, has_waited=True), progress.load_bound)

    def _found(self, lease: Lease) -> Outcome:
        """Return the outcome of a search: the endpoint, and the headers that are known of it now."""
        context, progress, endpoint = self._context, self._progress, lease.endpoint
        self.lease = lease
        progress.worker = endpoint.id.decode()
        first_byte_s, stall_s = timeouts_of(self._context, endpoint)
        prefix, settings = progress.prefix, context.settings
        request_head = [] if progress.trace is None else [*progress.trace.headers]
        if prefix is not None and endpoint.reports_prefixes:
            request_head.append((PREFIX_HEADER, chain_header(prefix.length, prefix.digests)))
        response_head: Headers = []
        if endpoint.id and settings.worker_header:
            response_head.append((WORKER_HEADER, endpoint.id))
        if prefix is not None and settings.prefix_header:
            response_head.append((PREFIX_HEADER, b"%d/%d" % (prefix.matched, prefix.length)))
        return Outcome(
            "found",
            progress.worker,
            first_byte_s=first_byte_s,
            stall_s=stall_s,
            request_head=tuple(request_head),
            response_head=tuple(response_head),
        )

    def _refused(self, refusal: Refusal, reason: str, bound: WaitBound | None = None) -> Outcome:
        """Return the outcome of a refusal; `bound` is that of the load that it waited for, if it did."""
        context, key, model = self._context, self._progress.caller.key, self._progress.model
        allowed = None if key is None else key.models
        known = partial(near_models, model, context.registry, context.aliases, allowed)
        bound = bound or WaitBound("queue_s", context.timeouts.queue_s)
        failure = Failure.of(no_lease(refusal, model, known, bound, trio.current_time()))
        return Outcome("refused", failure=failure, reason=reason)


def timeouts_of(context: GatewayContext, endpoint: Endpoint) -> tuple[float, float]:
    """Return how long an endpoint may need until its first byte, and between two bytes, in seconds."""
    timeouts = context.timeouts
    return endpoint.timeouts or (timeouts.first_byte_s, timeouts.stream_stall_s)
