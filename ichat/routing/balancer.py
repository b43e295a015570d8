"""The decision which endpoint gets a request, and which requests wait. Purely synchronous.

A request that gets an endpoint has a lease on it. If all endpoints of its model are full, it waits in a queue. There
keys take turns (without keys, addresses), and the requests of a key are served first come, first served.
"""

import math
from collections.abc import Callable

from ichat.config.schema import Config, Routing
from ichat.listeners import Listeners
from ichat.routing.availability import (
    Availability,
    Draining,
    Full,
    Loadable,
    NotReady,
    Prospect,
    QueueTimeout,
    Ready,
    Refusal,
    Unknown,
)
from ichat.routing.choice import fit_for, has_choice, is_plainly_free, refusal_of, select
from ichat.routing.endpoint import Endpoint
from ichat.routing.policies import POLICIES, Policy, Rule
from ichat.routing.prefix_index import PrefixIndex
from ichat.routing.prefix_policy import PrefixAware
from ichat.routing.queue import Demand, FairQueue, Waiter
from ichat.routing.request import Lease, RoutingRequest

COMPARED_WAITERS_MAX = 8
"""At most this many waiters of a flow are compared, to find a prefix that the freed endpoint holds."""
PASSED_OVER_MAX = 8
"""At most this many times a waiter stays where it is while a waiter behind it is served for that reason."""


class Balancer:
    """Gives leases, and keeps a queue for each model if all its endpoints are full."""

    def __init__(self, find: Callable[[str], Availability], clock: Callable[[], float], settings: Routing) -> None:
        """`find` returns whether a model can be served now, and by which endpoints."""
        self._find = find
        self._clock = clock
        self.is_closed = False
        """Whether no request may wait any more."""
        self._settings = settings
        self.prefixes = PrefixIndex(clock, settings)
        """Which endpoints are believed to have which prefixes in their caches."""
        self._policy = self._make_policy()
        self._queues: dict[str, FairQueue] = {}
        self.retry_at = math.inf
        """When the next circuit that requests wait for can be tried."""
        self.retry_changed: Listeners[[]] = Listeners()
        """Called when `retry_at` has changed."""
        self.wanted: Listeners[[str]] = Listeners()
        """Called with the name of a model that must be loaded, when a request begins to wait for that."""

    def __repr__(self) -> str:
        return f"<Balancer {self.waiting} waiting>"

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return sum(map(len, self._queues.values()))

    def waiting_for(self, model: str) -> int:
        """Return how many requests wait for a model."""
        return len(self._queues.get(model, ()))

    def demand(self, *models: str) -> Demand:
        """Return how much these models are wanted: all names of a worker, for example."""
        queues = [queue for model in models if (queue := self._queues.get(model)) is not None]
        return Demand(sum(map(len, queues)), min((queue.oldest_since() for queue in queues), default=math.inf))

    def loadable(self, model: str) -> Loadable | None:
        """Return the load that a model's requests wait for; None: they wait for no load, or can be served now."""
        found = self._find(model)
        return found if isinstance(found, Loadable) else None

    def prospect(self, model: str) -> Prospect:
        """Return when a model can answer a new request: not by endpoints that all have just failed."""
        found = self._find(model)
        if isinstance(found, Loadable):
            return Prospect.LATER
        if not isinstance(found, Ready):
            return Prospect.NEVER
        now = self._clock()
        answers = any(one.avoid_until <= now and one.circuit.allows_request(now) for one in found.endpoints)
        return Prospect.NOW if answers else Prospect.NEVER

    def reconfigure(self, config: Config) -> None:
        """Choose by the policy and bounds of another configuration from the next request on."""
        before, self._settings = self._settings, config.routing
        self.prefixes.reconfigure(config.routing)
        if before.policy != self._settings.policy:
            self._policy = self._make_policy()

    def _make_policy(self) -> Policy:
        name = self._settings.policy
        return PrefixAware(self.prefixes) if name == "prefix_aware" else POLICIES[name]()

    def lease(self, request: RoutingRequest) -> Lease | Refusal:
        """Return a lease on an endpoint, or why there is none. The request can wait if that is Full or Loadable."""
        found, now = self._find_for(request), self._clock()
        decided = self._decide(found, request, self._policy, now)
        return self._begin(decided[0], request, now) if isinstance(decided, tuple) else decided

    def restore(self, endpoint: Endpoint, model: str) -> Lease:
        """Return a lease of a request that an earlier process has sent to an endpoint: no limit refuses it."""
        return self._begin(endpoint, RoutingRequest(model), self._clock())

    def rehearse(self, request: RoutingRequest) -> tuple[Endpoint, Rule] | Refusal:
        """Return what `lease` would lease now, and by which rule, or its refusal.

        This changes nothing but the request's own `prefix`.
        """
        found = self._find_for(request)
        return self._decide(found, request, self._policy.rehearsing(request), self._clock())

    def _find_for(self, request: RoutingRequest) -> Availability:
        """Return whether the request's model can be served, and have the request know its prefix if that counts."""
        found = self._find(request.model)
        if request.make_prefix is not None:
            if self._settings.policy == "prefix_aware" and has_choice(found):
                request.prefix = request.make_prefix()
            else:
                request.ignores_prefix = True
            request.make_prefix = None
        return found

    def _decide(
        self, found: Availability, request: RoutingRequest, policy: Policy, now: float
    ) -> tuple[Endpoint, Rule] | Refusal:
        if not isinstance(found, Ready):
            return found
        only = found.endpoints[0] if len(found.endpoints) == 1 else None
        if only is not None and is_plainly_free(only, request) and request.model not in self._queues:
            return only, "single"
        refusal = refusal_of(fit_for(request, found.endpoints), request, now)
        if refusal is not None:
            return refusal
        if request.model in self._queues:
            return Full(self.waiting_for(request.model))
        return select(found, request, policy, now) or Full()

    def has_alternative(self, request: RoutingRequest) -> bool:
        """Return whether an endpoint for the request that is not excluded would accept it now."""
        found, now = self._find(request.model), self._clock()
        return isinstance(found, Ready) and any(
            one not in request.excluded and one.circuit.allows_request(now) for one in found.endpoints
        )

    def wait(self, request: RoutingRequest, granted: Callable[[], None]) -> Waiter | Full | Draining:
        """Join the model's queue, and have `granted` called when there is a lease; `leave` in every case.

        A full queue evicts the newest request of its longest flow for a request of a shorter flow.
        """
        if self.is_closed:
            return Draining()
        queue = self._queues.get(request.model)
        waiting = len(queue) if queue is not None else 0
        if waiting >= self._settings.queue_max:
            evicted = queue.eviction_victim(request.fairness_key) if queue is not None else None
            if evicted is None:
                return Full(waiting)
            self._remove(evicted)
            evicted.is_evicted = True
            evicted.granted()
        waiter = Waiter(request, granted, self._clock(), waits_for_load=self.loadable(request.model) is not None)
        self._queues.setdefault(request.model, FairQueue()).add(waiter)
        self.dispatch_waiting()
        if waiter.waits_for_load:
            self.wanted(request.model)
        return waiter

    def close(self) -> None:
        """Let no request wait any more: the waiting requests are woken, without a lease."""
        self.is_closed = True
        for queue in list(self._queues.values()):
            for waiter in list(queue):
                self._remove(waiter)
                waiter.granted()

    def withdraw(self, waiter: Waiter) -> None:
        """Remove a waiter from its queue if it is still there; requests behind it may go on."""
        self._remove(waiter)
        self.dispatch_waiting()

    def _remove(self, waiter: Waiter) -> None:
        model = waiter.request.model
        queue = self._queues.get(model)
        if queue is not None:
            queue.remove(waiter)
            if not queue:
                del self._queues[model]

    def why_no_lease(self, waiter: Waiter) -> Refusal:
        """Return why a request got no lease: it has waited for too long, was evicted, or found the queue closed."""
        request = waiter.request
        if self.is_closed:
            return Draining()
        if waiter.refusal is not None:
            return waiter.refusal
        if waiter.is_evicted:
            return Full(self.waiting_for(request.model))
        found = self._find(request.model)
        if not isinstance(found, Ready):
            return found
        return refusal_of(found.endpoints, request, self._clock()) or QueueTimeout()

    def _end(self, endpoint: Endpoint, request: RoutingRequest, probe: int) -> None:
        """Count the end of a request that had a lease, and give its place to the next request."""
        endpoint.end_request()
        if probe:
            endpoint.circuit.end(probe)
        self.dispatch_waiting(endpoint)

    def dispatch_waiting(self, freed: Endpoint | None = None) -> None:
        """Lease free places to the requests next in turn; `freed` is where a request has ended."""
        if not self._queues and self.retry_at == math.inf:
            return
        retry_at = math.inf
        for model, queue in list(self._queues.items()):
            if freed is not None and not queue.is_served:
                continue
            found = self._find(model)
            queue.is_served = isinstance(found, Ready)
            if isinstance(found, Ready):
                retry_at = min(retry_at, self._serve(queue, found, freed))
            elif isinstance(found, NotReady | Unknown):
                self._refuse_waiting(queue, found)
        if retry_at != self.retry_at:
            self.retry_at = retry_at
            self.retry_changed()

    def _serve(self, queue: FairQueue, found: Ready, freed: Endpoint | None) -> float:
        """Lease free places to a queue's requests; return when those that are left can try a circuit; `inf`: never."""
        while self._serve_one(queue, found, freed):
            pass
        if not queue:
            return math.inf
        now = self._clock()
        circuits = (one.circuit for one in found.endpoints if one.circuit.open_until is not None)
        return min((circuit.retry_at(now) for circuit in circuits), default=math.inf)

    def _refuse_waiting(self, queue: FairQueue, found: NotReady | Unknown) -> None:
        """Refuse requests that nothing will serve any more: a load has failed, or its worker was removed."""
        for waiter in queue:
            if found.is_final if isinstance(found, NotReady) else waiter.waits_for_load:
                self._remove(waiter)
                waiter.refusal = found
                waiter.granted()

    def _serve_one(self, queue: FairQueue, found: Ready, freed: Endpoint | None) -> bool:
        """Lease an endpoint to the waiter next in turn; return whether that could be done."""
        now = self._clock()
        for eligible in queue.eligible():
            waiter = self._nearest(queue, eligible, freed) if freed is not None else eligible
            request = waiter.request
            waiter.lease = self._take(found, request, now)
            if waiter.lease is not None:
                if waiter is not eligible:
                    queue.pass_over(eligible, waiter)
                self._remove(waiter)
                queue.rotate(request.fairness_key)
                waiter.granted()
                return True
            if not request.is_restricted:
                return False
        return False

    def _nearest(self, queue: FairQueue, head: Waiter, freed: Endpoint) -> Waiter:
        """Return the next waiter of the flow in turn: its head, or a waiter behind it with the endpoint as its home."""
        if freed.in_flight >= freed.in_flight_max or head.request.is_restricted:
            return head
        for waiter in queue.first_of(head.request.fairness_key, COMPARED_WAITERS_MAX):
            if waiter.request.is_restricted:
                continue
            if self._policy.is_home(freed, waiter.request):
                return waiter
            if waiter.passed_over >= PASSED_OVER_MAX:
                break
        return head

    def _take(self, found: Ready, request: RoutingRequest, now: float) -> Lease | None:
        """Lease one of these endpoints to a request; None if it has to wait."""
        selected = select(found, request, self._policy, now)
        return self._begin(selected[0], request, now) if selected is not None else None

    def _begin(self, chosen: Endpoint, request: RoutingRequest, now: float) -> Lease:
        """Lease this endpoint to a request."""
        chosen.start_request()
        self._policy.on_start(chosen, request, now)
        circuit = chosen.circuit
        return Lease(chosen, request, self._end, 0 if circuit.open_until is None else circuit.begin(now))
