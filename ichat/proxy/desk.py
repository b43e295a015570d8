"""The side of a request that knows the endpoints: it finds them, waits for them, and notes how they did.

An engine that has just answered has the whole prompt in its cache. So a single wrong guess is no reason to send the
next request of the kind elsewhere. An engine that keeps nothing shows it by being wrong again and again.
"""

import logging
from bisect import bisect_right
from functools import partial

import attrs
import trio

from ichat.fleet.model_list import near_models
from ichat.fleet.waiting import wait_lease
from ichat.protocol.messages import WORKER_HEADER
from ichat.protocol.prefixes import BOUNDARIES, PREFIX_HEADER, chain_header
from ichat.proxy.context import GatewayContext
from ichat.proxy.progress import RequestProgress
from ichat.proxy.refusals import Failure, WaitBound, no_lease
from ichat.proxy.steps import (
    AttemptStep,
    Found,
    HeaderPairs,
    Lookup,
    Outcome,
    RequestRoute,
    Step,
    Wait,
    next_step,
)
from ichat.proxy.stream_comments import begin_load, end_load
from ichat.proxy.targets import reason_of_refusal, seems_too_long
from ichat.proxy.token_usage import ReportedUsage
from ichat.routing.availability import Full, Loadable, Refusal
from ichat.routing.circuit_breaker import FAILED_STATUSES
from ichat.routing.endpoint import Endpoint
from ichat.routing.prefix_chain import PrefixChain, chain_of
from ichat.routing.prefix_index import PrefixIndex
from ichat.routing.request import Lease, RoutingRequest

log = logging.getLogger(__name__)

WRONG_MAX = 8
"""After this many wrong matches of an endpoint in a row, stop recording the prefixes that it gets."""
_ALONE, _WAITED, _SEEMS_TOO_LONG = Outcome("alone"), Outcome("waited"), Outcome("seems_too_long")


class Desk:
    """Decides where a request goes: finds endpoints for it, and learns from their responses.

    It never sees the request's body, only sums of its prefix. `begin`, `go_on` and `wait` return the next step that is
    carried out elsewhere: an `AttemptStep`, a `Wait`, `Refuse` or `Done`.
    """

    __slots__ = ("_context", "_failed", "_progress", "_routing", "lease", "only", "session")

    def __init__(self, context: GatewayContext, progress: RequestProgress, session: bytes) -> None:
        """Requests of the same `session` go to the same endpoint; empty: it has none."""
        self._context = context
        self._progress = progress
        self.session = session
        self.only: Endpoint | None = None
        """The only endpoint that can answer, if there is just one of them: it keeps the response in question."""
        self.lease: Lease | None = None
        """The place at the endpoint that was found, until the attempt there has ended."""
        self._routing: RoutingRequest | None = None
        """The request as the balancer sees it, for the current model."""
        self._failed: dict[str, Endpoint] | None = None
        """The endpoints that were asked in vain, by their ids."""

    def __repr__(self) -> str:
        return f"<Desk of {self._progress!r}>"

    def begin(self, route: RequestRoute, step: Step) -> Step:
        """Return the step of a request that begins: `step` is its first, as its route has it."""
        progress = self._progress
        progress.route, progress.model = route, route.model
        while isinstance(step, Lookup):
            is_too_long = progress.prompt_bytes and step.longer and self._seems_too_long(step)
            outcome = _SEEMS_TOO_LONG if is_too_long else self._look_up(step)
            route, step = next_step(route, outcome, self._context.pool.hub.now)
            progress.route, progress.model = route, route.model
        return step

    def go_on(self, outcome: Outcome | Found) -> Step:
        """Return the next step of a request after an attempt or a wait."""
        return self.begin(*next_step(self._progress.route, outcome, self._context.pool.hub.now))

    async def wait(self, step: Wait) -> Step:
        """Wait for a while, or for a place at an endpoint, and return the next step."""
        if step.kind == "place":
            return self.go_on(await self._wait_for_place(step.seconds))
        await trio.sleep(step.seconds)
        return self.go_on(_WAITED)

    def _seems_too_long(self, step: Lookup) -> bool:
        """Return whether the prompt seems too long for a model, and not for the model for longer prompts."""
        directory, lengths = self._context.directory, self._context.prompt_lengths
        return seems_too_long(directory, lengths, step.model, step.longer, self._progress.prompt_bytes)

    def _look_up(self, step: Lookup) -> Outcome | Found:
        """Lease an endpoint that has a free place now."""
        context, progress, routing = self._context, self._progress, self._routing
        if routing is None or routing.model != step.model:
            routing = self._routing_for(step)
        if step.excluded or routing.excluded or routing.skips_open != step.skips_open:
            failed = self._failed or {}
            excluded = tuple(failed[one] for one in step.excluded)
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

    def _routing_for(self, step: Lookup) -> RoutingRequest:
        """Return the request as the balancer sees it for another model."""
        routing = RoutingRequest(step.model, self.session, self._progress.grant.fairness_key, only=self.only)
        if not self.session and self.only is None:
            routing.make_prefix = partial(_chain_for, self._progress, step)
        return routing

    async def _wait_for_place(self, queue_s: float) -> Outcome | Found:
        """Wait for a place at an endpoint, in queues for `queue_s` at most."""
        progress, routing, since = self._progress, self._routing, trio.current_time()
        assert routing is not None
        progress.is_waiting, progress.load_bound = True, None
        try:
            lease = await wait_lease(
                self._context.balancer, routing, queue_s, partial(begin_load, self._context, progress)
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

    def _found(self, lease: Lease) -> Found:
        """Return the endpoint that was found, and the headers that are known of it now."""
        context, progress, endpoint = self._context, self._progress, lease.endpoint
        self.lease = lease
        worker = progress.worker = endpoint.id.decode()
        prefix, settings, trace = progress.prefix, context.settings, progress.trace
        request_head = () if trace is None else tuple(trace.headers)
        if prefix is not None and endpoint.reports_prefixes:
            request_head = (*request_head, (PREFIX_HEADER, chain_header(prefix.length, prefix.digests)))
        response_head: HeaderPairs = ()
        if endpoint.id and settings.worker_header:
            response_head = ((WORKER_HEADER, endpoint.id),)
        if prefix is not None and settings.prefix_header:
            response_head = (*response_head, (PREFIX_HEADER, b"%d/%d" % (prefix.matched, prefix.length)))
        return Found(worker, *timeouts_of(context, endpoint), request_head, response_head)

    def _refused(self, refusal: Refusal, reason: str, bound: WaitBound | None = None) -> Outcome:
        """Return the outcome of a refusal; `bound` is that of the load that it waited for, if it did."""
        context, key, model = self._context, self._progress.caller.key, self._progress.model
        allowed = None if key is None else key.models
        known = partial(near_models, model, context.directory, context.aliases, allowed)
        bound = bound or WaitBound("queue_s", context.timeouts.queue_s)
        failure = Failure.of(no_lease(refusal, model, known, bound, trio.current_time()))
        return Outcome("refused", failure=failure, reason=reason)

    def note_failure(self, endpoint: Endpoint, step: AttemptStep, outcome: Outcome) -> None:
        """Record that an endpoint has not answered the request, or not to the end: later steps name it by its id."""
        kind, now, prefix = outcome.kind, trio.current_time(), self._progress.prefix
        if self._failed is None:
            self._failed = {}
        self._failed[step.endpoint] = endpoint
        _log_failure(endpoint, outcome)
        if kind in ("unreachable", "declined", "too_long") and prefix is not None:
            take_back(self._context.balancer.prefixes, prefix, endpoint)
        match kind:
            case "unreachable":
                endpoint.fail(now)
                record_failure(endpoint)
            case "declined":
                endpoint.fail(now, outcome.why)
            case "too_long":
                endpoint.circuit.record_success()
            case "rejected" if outcome.status in FAILED_STATUSES and not step.is_again:  # a request fails it only once
                record_failure(endpoint, answers=True)
            case "broken" | "late" | "cut" if outcome.status not in FAILED_STATUSES:  # else that was recorded
                record_failure(endpoint)
            case _:
                pass

    def learn(self, endpoint: Endpoint) -> None:
        """Record that a response has arrived whole, and learn from the tokens that the request has used."""
        context, progress, leg = self._context, self._progress, self._progress.leg
        if leg is None:
            return
        if endpoint.circuit.failures and leg.status not in FAILED_STATUSES:
            endpoint.circuit.record_success()
        usage, used, prefix = leg.usage, progress.usage, progress.prefix
        if usage is None or leg.status >= 400:
            return
        if used is None or used.is_estimate:
            if leg.is_stream and isinstance(usage, ReportedUsage) and not usage.has_arrived:
                _note_lost_usage(endpoint, progress.path)
            return
        if prefix is not None and used.input and usage.tells_cached:
            correct(context.balancer.prefixes, prefix, endpoint, used.input, used.cached)
        if progress.prompt_bytes:
            context.prompt_lengths.learn(progress.model, progress.prompt_bytes, used.input)


def timeouts_of(context: GatewayContext, endpoint: Endpoint) -> tuple[float, float]:
    """Return how long an endpoint may need until its first byte, and between two bytes, in seconds."""
    timeouts = context.timeouts
    return endpoint.timeouts or (timeouts.first_byte_s, timeouts.stream_stall_s)


def _chain_for(progress: RequestProgress, step: Lookup) -> PrefixChain | None:
    """Return the chain of a request for the model of a step; only its first model has the body read."""
    sums, edits = progress.prefix_sums or progress.read_prefix(), step.edits
    return None if sums is None else chain_of(sums, step.model, edits.set, edits.drop)


def held(matched: int, length: int, prompt_tokens: int, cached_tokens: int) -> int | None:
    """Return how many digests of a chain were in a cache, if that is far less than was expected; else None.

    `matched` of the prefix' `length` bytes were expected. Far less is less than half of that, and by a boundary: tokens
    are not bytes, and an engine keeps whole blocks of them.
    """
    told = length * min(cached_tokens, prompt_tokens) // max(1, prompt_tokens)
    count = bisect_right(BOUNDARIES, told)
    return count if told < matched / 2 and count < bisect_right(BOUNDARIES, matched) else None


def correct(index: PrefixIndex, chain: PrefixChain, endpoint: Endpoint, prompt_tokens: int, cached_tokens: int) -> None:
    """Compare the expectation with the report of a prompt's tokens."""
    if not chain.matched:
        return
    count = held(chain.matched, chain.length, prompt_tokens, cached_tokens)
    wrong = endpoint.holder.record_match(is_wrong=count is not None)
    if count is None:
        return
    chain.was_wrong = True
    if wrong >= WRONG_MAX:
        index.discard(chain.digests[count:], endpoint)


def take_back(index: PrefixIndex, chain: PrefixChain, endpoint: Endpoint) -> None:
    """Record that an endpoint has not worked on a request after all: only its earlier prefixes are believed there."""
    index.discard(chain.digests[bisect_right(BOUNDARIES, chain.matched) :], endpoint)


def record_failure(endpoint: Endpoint, *, answers: bool = False) -> None:
    """Record that an endpoint has failed with a request; `answers` says that there was a response."""
    circuit = endpoint.circuit
    if circuit.record_failure(trio.current_time(), answers=answers):
        log.warning("%s has failed %d times in a row: its circuit opens", endpoint.upstream.name, circuit.failures)


def _log_failure(endpoint: Endpoint, outcome: Outcome) -> None:
    kind, name = outcome.kind, endpoint.upstream.name
    if kind in ("unreachable", "declined") and outcome.failure is not None:
        log.warning("%s", outcome.failure.message)
    elif kind in ("broken", "late", "cut") or (kind == "rejected" and outcome.status == 401):
        log.warning("%s failed with this request: %s", name, outcome.why)


def _note_lost_usage(endpoint: Endpoint, path: bytes) -> None:
    """Log, once for each start of a worker, that a whole stream arrived without the tokens that it used."""
    if not endpoint.is_usage_lost and path.endswith(b"/completions") and endpoint.lose_usage():
        log.warning(
            "%s reports the tokens of each request, and a whole stream came without them: a proxy on the way may"
            " drop trailers. The tokens of its streams are only estimated",
            endpoint.upstream.name,
        )
