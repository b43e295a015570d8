"""The side of a request that decides: its permission, its endpoints, and its waits."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import attrs
import trio

from ichat.errors import ApiError
from ichat.fleet.model_list import near_models
from ichat.fleet.waiting import LeaseWait, until_over
from ichat.http.pool import Upstream
from ichat.observability.request_record import UsedTokens
from ichat.observability.tracing import Trace
from ichat.protocol.messages import WORKER_HEADER
from ichat.protocol.prefixes import PREFIX_HEADER, chain_header
from ichat.proxy.attempt_lessons import correct, learn_failure, note_lost_usage, record_failure
from ichat.proxy.context import GatewayContext
from ichat.proxy.earlier_attempts import after_attempts, endpoints_of
from ichat.proxy.kept_responses import check_continued, continue_response, kept_response
from ichat.proxy.model_request import Asked, Asker, Tried
from ichat.proxy.refusals import Failure, WaitBound, load_comment_of, no_lease, over_limit
from ichat.proxy.shadow import is_copied
from ichat.proxy.steps import (
    BEGUN,
    AttemptStep,
    Done,
    Found,
    HeaderPairs,
    Lookup,
    Outcome,
    RequestRoute,
    Step,
    Wait,
    next_step,
    plain_start,
)
from ichat.proxy.targets import reason_of_refusal, route_along, seems_too_long
from ichat.routing.aliases import Alias
from ichat.routing.availability import Full, Loadable, Refusal
from ichat.routing.circuit_breaker import FAILED_STATUSES
from ichat.routing.endpoint import Endpoint, EndpointFacts
from ichat.routing.prefix_chain import PrefixChain, chain_for
from ichat.routing.request import Lease, RoutingRequest
from ichat.security.auth import Caller
from ichat.security.grant import NO_GRANT, admit, grant_of
from ichat.security.rate_limits import QuotaRefusal

_NO_ROUTE, _DONE = RequestRoute(""), Done()
_NONE: Mapping[str, Endpoint] = {}
_NOWHERE = EndpointFacts(b"", Upstream("", "", 0))
_ALONE, _WAITED, _SEEMS_TOO_LONG = Outcome("alone"), Outcome("waited"), Outcome("seems_too_long")


class Desk:
    """Decides about a request, and has all its facts but those of its bytes. Times are Trio's clock.

    It never sees the request's body, only sums of its prefix. `ask`, `end_attempt` and `wait` return the next step that
    is carried out elsewhere: an `AttemptStep`, a `Wait`, `Refuse` or `Done`. `close` ends it.
    """

    __slots__ = (
        "_asker", "_context", "_failed", "_load_waited_s", "_only", "_routing", "_session", "_waits_since", "alias",
        "caller", "endpoint", "grant", "is_background", "is_copied", "is_counted", "is_waiting", "lease",
        "load_bound", "model", "prefix", "prompt_bytes", "queued_s", "route", "started_at", "ticket", "trace", "worker",
    )  # fmt: skip

    def __init__(self, context: GatewayContext, caller: Caller, asker: Asker, started_at: float) -> None:
        self._context = context
        self._asker = asker
        self.caller = caller
        self.started_at = started_at
        self.is_counted = False
        """Whether it is a request to a model; see `RequestRecord`."""
        self.trace: Trace | None = None
        self.grant = NO_GRANT
        """Its permissions, once they are known."""
        self.model = ""
        """The model that it asks for now, once that has been read."""
        self.route = _NO_ROUTE
        """Its way through the models, once that has begun."""
        self.alias: Alias | None = None
        """The name that it asks for, if that stands for models."""
        self.is_copied = False
        """Whether it belongs to the share of requests that is copied to its name's shadow."""
        self.is_background = False
        """Whether its response is made after its end."""
        self.ticket = ""
        """Its worker reports the later usage under it; "" if there is none, or its upstream cannot report usage."""
        self.prompt_bytes = 0
        """The bytes of its body, if models learn from them how long prompts are; else 0."""
        self.prefix: PrefixChain | None = None
        """The beginning of its prompt, if its route may depend on that."""
        self.worker = ""
        """The id of the endpoint that was found last."""
        self.endpoint = _NOWHERE
        """The endpoint that was found last, as the side with the bytes sees it."""
        self.lease: Lease | None = None
        """The place at the endpoint that was found, until the attempt there has ended."""
        self.is_waiting = False
        """Whether it waits in a queue."""
        self._waits_since: float | None = None
        self.queued_s = 0.0
        self._load_waited_s = 0.0
        """How much of that its model was being loaded."""
        self.load_bound: WaitBound | None = None
        """The bound of its newest wait, if that is for a load."""
        self._session = b""
        self._only: Endpoint | None = None
        """The only endpoint that can answer, since it keeps the response in question; else None."""
        self._routing: RoutingRequest | None = None
        """The request as the balancer sees it, for the current model."""
        self._failed: Mapping[str, Endpoint] = _NONE
        """The endpoints that were asked in vain, by their ids."""

    def __repr__(self) -> str:
        return f"<Desk {self.model} {self.worker}>"

    @property
    def ignores_prefix(self) -> bool:
        """Whether its route did not depend on its prefix: it has a single endpoint, and asked for no alias."""
        return self.alias is None and self._routing is not None and self._routing.ignores_prefix

    def count(self, trace: Trace | None) -> None:
        """Count this as a request to a model, with its trace."""
        self.is_counted, self.trace = True, trace

    # Questions, which are answered by the next step.

    def ask(self, asked: Asked) -> Step:
        """Return the first step of a request for a model. Raises ApiError: 403, 404, 429."""
        context = self._context
        name, aliases = asked.model, context.aliases
        self.model, self._session, self.is_background = name, asked.session, asked.is_background
        if aliases.by_name:
            name = aliases.name_for(name, context.directory.has)
        self._admit(asked.model, name)
        plan = None
        if name in aliases.by_name:
            plan = aliases.plan(name, asked.session, context.balancer.prospect)
        if asked.previous_response_id is not None:
            plan, self._only = continue_response(
                context.directory, context.table, asked.previous_response_id, asked.model, plan
            )
            if self._only is not None:
                check_continued(context, self.caller, asked.previous_response_id)
        is_bound, queue_s = self._only is not None, context.timeouts.queue_s
        if plan is None:
            return self._begin(*plain_start(asked.model, queue_s, is_bound=is_bound), asked.tried)
        alias = self.alias = plan.alias
        if alias.longer is not None:
            self.prompt_bytes = self._asker.prompt_bytes()
        self.is_copied = alias.shadow is not None and is_copied(alias.name, alias.shadow, asked.session)
        repeats_until = self.started_at + context.timeouts.first_byte_s
        route = route_along(plan, repeats_until=repeats_until, queue_s=queue_s, is_bound=is_bound)
        return self._begin(*next_step(route, BEGUN, self.started_at), asked.tried)

    def ask_holder(self, method: bytes, path: bytes) -> Step:
        """Return the first step of a request about a response: to the worker that keeps it. Raises ApiError.

        The path is `/v1/responses/{id}`, and maybe more.
        """
        self.model, self._only = kept_response(self._context, method, path, self.caller)
        self._admit()
        return self._begin(*plain_start(self.model, self._context.timeouts.queue_s, is_bound=True))

    def grant_plainly(self) -> None:
        """Set the permissions of a request for the control plane: no limit counts there."""
        self.grant = grant_of(self._context.auth, self.caller)

    def close(self, tokens: int) -> None:
        """End the request's reservation within the limits, and count the tokens that it has used."""
        if self.lease is not None:
            self.lease.release()
        self.grant.close(tokens, self._context.pool.hub.update_clock())

    async def wait(self, step: Wait) -> Step:
        """Wait for a while, or for a place at an endpoint, and return the next step."""
        if step.kind != "place":
            await trio.sleep(step.seconds)
            return self.end_wait(None)
        woken = trio.Event()
        wait = self.begin_wait(step.seconds, woken.set)
        try:
            await until_over(wait, woken)
            return self.end_wait(wait)
        finally:
            self.leave_queue(wait)

    def begin_wait(self, queue_s: float, woken: Callable[[], None]) -> LeaseWait:
        """Wait for a place at an endpoint, in queues for `queue_s` at most; see `LeaseWait`. `leave_queue` follows."""
        routing = self._routing
        assert routing is not None
        self.is_waiting, self.load_bound, self._waits_since = True, None, trio.current_time()
        return LeaseWait(self._context.balancer, routing, queue_s, self._begin_load, woken)

    def end_wait(self, wait: LeaseWait | None) -> Step:
        """Return the next step after a wait for a place that is over; None: after a wait for a while."""
        if wait is None:
            return self._go_on(_WAITED)
        lease = wait.end()
        self.leave_queue(wait)
        self.is_waiting = False
        if isinstance(lease, Lease):
            return self._go_on(self._found(lease))
        return self._go_on(_refused(self, lease, reason_of_refusal(lease, has_waited=True), self.load_bound))

    def leave_queue(self, wait: LeaseWait) -> None:
        """End a wait, and count it. Harmless the second time."""
        wait.withdraw()
        if self._waits_since is None:
            return
        waited_s, self._waits_since = trio.current_time() - self._waits_since, None
        self.queued_s += waited_s
        if self.load_bound is not None:
            self._load_waited_s += waited_s
            self._asker.end_load()

    # An attempt.

    def heard(self, status: int) -> None:
        """Note that a response begins: from here on the request is sent nowhere else."""
        context, lease = self._context, self.lease
        assert lease is not None
        endpoint = lease.endpoint
        endpoint.see(context.pool.hub.now)
        if status in FAILED_STATUSES:
            record_failure(endpoint, answers=True)
        elif endpoint.circuit.open_until is not None and endpoint.circuit.record_response():
            context.balancer.dispatch_waiting()
        if self.trace is not None:
            self.trace.headers = ()

    def end_answered(self, status: int, used: UsedTokens | None, *, tells_cached: bool, is_usage_lost: bool) -> Step:
        """Learn from a whole response of this status, free the place, and return the end.

        `used` are the tokens that the request used, as the response says, or an estimate. `tells_cached` means that it
        says how many of them were in a cache, and `is_usage_lost` that a worker's report of them did not arrive.
        """
        lease, is_good = self.lease, status < 400
        assert lease is not None
        endpoint = lease.endpoint
        if endpoint.circuit.failures and status not in FAILED_STATUSES:
            endpoint.circuit.record_success()
        if is_usage_lost and is_good and not endpoint.is_usage_lost:
            note_lost_usage(endpoint)
        if is_good and used is not None and not used.is_estimate:
            if self.prefix is not None and self.prefix.matched and used.input and tells_cached:
                correct(self._context.balancer.prefixes, self.prefix, endpoint, used.input, used.cached)
            if self.prompt_bytes:
                self._context.prompt_lengths.learn(self.model, self.prompt_bytes, used.input)
        self.lease = None
        lease.release()
        if self.ticket and not is_good:
            self._context.late_usage.forget(self.ticket)
        return _DONE

    def end_attempt(self, step: AttemptStep, outcome: Outcome) -> Step:
        """Learn from an attempt without a whole response, free its place, and return the next step."""
        lease = self.lease
        assert lease is not None
        endpoint = lease.endpoint
        if outcome.kind != "unfit":
            self._failed = {**self._failed, step.endpoint: endpoint}
            learn_failure(self._context, endpoint, step, outcome, self.prefix)
        self.lease = None
        lease.release()
        if self.ticket and outcome.kind != "cut":
            self._context.late_usage.forget(self.ticket)
        return self._go_on(outcome)

    def _admit(self, model: str = "", name: str = "") -> None:
        """Have the request count for its limits. Raises ApiError: 403, 429."""
        context = self._context
        grant = admit(context.auth, context.quotas, self.caller, self.started_at, model=model, name=name)
        if isinstance(grant, QuotaRefusal):
            raise over_limit(grant)
        self.grant = grant

    def _begin(self, route: RequestRoute, step: Step, tried: Sequence[Tried] = ()) -> Step:
        """Follow a route from this step or after these attempts, until a step is carried out elsewhere; return it."""
        if tried:
            self._failed = endpoints_of(tried, self._context.endpoint_of)
            route, step = after_attempts(route, step, tried, self._failed, self._context.pool.hub.now)
        self.route, self.model = route, route.model
        while isinstance(step, Lookup):
            outcome = self._look_up(step)
            route, step = next_step(route, outcome, self._context.pool.hub.now)
            self.route, self.model = route, route.model
        return self._expect_usage(step) if self.is_background and isinstance(step, AttemptStep) else step

    def _expect_usage(self, step: AttemptStep) -> Step:
        """Return an attempt at a response in the background, or the next step if its tokens could not be counted."""
        lease, grant = self.lease, self.grant
        assert lease is not None
        try:
            self.ticket = self._context.late_usage.begin(
                lease.endpoint, grant.key_name, step.model, is_limited=grant.bounds_tokens
            )
        except ApiError as error:
            self.lease = None
            lease.release()
            return self._go_on(Outcome("unfit", step.endpoint, Failure.of(error)))
        return step

    def _go_on(self, outcome: Outcome | Found) -> Step:
        """Return the next step of a request after an attempt or a wait."""
        return self._begin(*next_step(self.route, outcome, self._context.pool.hub.now))

    def _look_up(self, step: Lookup) -> Outcome | Found:
        """Lease an endpoint that has a free place now."""
        context, routing, size = self._context, self._routing, self.prompt_bytes
        lengths = context.prompt_lengths
        if size and step.longer and seems_too_long(context.directory, lengths, step.model, step.longer, size):
            return _SEEMS_TOO_LONG
        if routing is None or routing.model != step.model:
            routing = _routing_for(self, step)
        if step.excluded or routing.excluded or routing.skips_open != step.skips_open:
            excluded = tuple(filter(None, map(self._failed.get, step.excluded)))
            routing = attrs.evolve(routing, excluded=excluded, skips_open=step.skips_open)
        self._routing = routing
        if step.excluded and not context.balancer.has_alternative(routing):
            return _ALONE
        lease = context.balancer.lease(routing)
        self.prefix = routing.prefix
        if isinstance(lease, Lease):
            return self._found(lease)
        if not isinstance(lease, Full | Loadable):
            return _refused(self, lease, reason_of_refusal(lease))
        waited_s = self.queued_s - self._load_waited_s
        if isinstance(lease, Full):
            return Outcome("full", waited_s=waited_s)
        return Outcome("starting" if lease.is_coming else "loadable", waited_s=waited_s)

    def _begin_load(self, load: Loadable) -> float:
        """Return how long the request may wait for this load; a stream gets comments about that."""
        context, timeouts = self._context, self._context.timeouts
        bound = self.load_bound = WaitBound.of_load(load, timeouts)
        if timeouts.load_comment_s:
            text = partial(load_comment_of, context.directory, self.model)
            self._asker.announce_load(text, timeouts.load_comment_s)
        return max(0.0, bound.seconds - self.queued_s)

    def _found(self, lease: Lease) -> Found:
        """Return the endpoint that was found, and the headers that are known of it now."""
        context, endpoint, prefix, trace = self._context, lease.endpoint, self.prefix, self.trace
        self.lease, self.endpoint = lease, endpoint.facts
        worker = self.worker = endpoint.id.decode()
        proof = endpoint.facts.proof_headers(context.auth.proof)
        request_head = proof if trace is None else (*trace.headers, *proof)
        if prefix is not None and endpoint.reports_prefixes:
            request_head = (*request_head, (PREFIX_HEADER, chain_header(prefix.length, prefix.digests)))
        response_head = _response_head(context, endpoint, prefix)
        return Found(worker, *(endpoint.timeouts or context.endpoint_timeouts), request_head, response_head)


def _response_head(context: GatewayContext, endpoint: Endpoint, prefix: PrefixChain | None) -> HeaderPairs:
    """Return the headers of a response that name its endpoint, and the part of the prefix that it should have."""
    settings, head = context.settings, ()
    if endpoint.id and settings.worker_header:
        head = ((WORKER_HEADER, endpoint.id),)
    if prefix is not None and settings.prefix_header:
        head = (*head, (PREFIX_HEADER, b"%d/%d" % (prefix.matched, prefix.length)))
    return head


def _refused(desk: Desk, refusal: Refusal, reason: str, bound: WaitBound | None = None) -> Outcome:
    """Return the outcome of a refusal; `bound` is that of the load that the request waited for, if it did."""
    context, key, model = desk._context, desk.caller.key, desk.model
    known = partial(near_models, model, context.directory, context.aliases, None if key is None else key.models)
    bound = bound or WaitBound("queue_s", context.timeouts.queue_s)
    failure = Failure.of(no_lease(refusal, model, known, bound, trio.current_time()))
    return Outcome("refused", failure=failure, reason=reason)


def _routing_for(desk: Desk, step: Lookup) -> RoutingRequest:
    """Return the request as the balancer sees it for another model."""
    routing = RoutingRequest(step.model, desk._session, desk.grant.fairness_key, only=desk._only)
    if not desk._session and desk._only is None:
        routing.make_prefix = partial(chain_for, desk._asker.read_prefix, step.model, step.edits.set, step.edits.drop)
    return routing
