"""Who gets a request, and who has to wait. Purely synchronous: what is decided is decided in one step.

A policy is a small function with a name in the configuration. A request that is given an endpoint has a lease on it;
where every endpoint of its model is full it waits in the model's queue. There each key (or, without keys, each address)
has its turn, whoever came first; of one key's requests the first come is the first served.
"""

import hashlib
import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

import attrs

from ichat import errors
from ichat.errors import ApiError
from ichat.http.heads import Headers
from ichat.http.json_body import Body
from ichat.http.pool import Upstream
from ichat.http.request import Request
from ichat.routing.circuit_breaker import Circuit

REPORT_S = 10.0
"""How long a worker's report of its load counts."""
AVOID_S = 10.0
"""How long an endpoint that could not be reached is asked only if there is no other."""
RETRY_AFTER_S = 2
"""What a client is told to wait that was refused since a queue was full, or waited in vain."""


class RequestTransform(Protocol):
    """What an external route changes in requests on their way to its upstream."""

    @property
    def has_key(self) -> bool:
        """Whether the gateway has a key of its own for the upstream."""
        ...

    @property
    def health_path(self) -> str:
        """The path of its health check; empty: it has none."""
        ...

    async def rewrite(self, request: Request) -> Body:
        """Return the body for the upstream. Raises ApiError 400 or 404."""
        ...

    def headers_for(self, headers: Headers) -> Headers:
        """Return the headers for the upstream."""
        ...

    def target_for(self, target: bytes) -> bytes:
        """Return the request target to ask the upstream for."""
        ...


@attrs.define(eq=False)
class Endpoint:
    """Somewhere that requests for a model can be sent to: a worker, or an external route."""

    upstream: Upstream
    id: bytes
    """What `x-ichat-worker` and the access log call it."""
    in_flight_max: int
    route: RequestTransform | None = None
    """What an external route changes in requests."""
    in_flight: int = 0
    """Requests under way that came through here: changed at once, so never stale."""
    external_load: int = 0
    """Requests that it works on besides those, by its newest report."""
    reported_at: float = -math.inf
    avoid_until: float = -math.inf
    """Until then it is chosen only if there is no other: it could not be reached."""
    turn: int = 0
    """When it was last chosen, counted in requests."""
    unavailable_reason: str = ""
    """Why it gets no requests until it is heard of: no connection could be made, or it declined one."""
    probe_failures: int | None = None
    """Health checks in a row that failed; None: it is not asked (`health.py`)."""
    health_failure: str = ""
    """Why it gets no requests, since it fails them; empty: it does not."""
    timeouts: tuple[float, float] | None = None
    """Seconds until its first byte, and between two bytes, where they are not the configured ones."""
    circuit: Circuit = attrs.field(factory=Circuit)
    when_idle: set[Callable[[], None]] = attrs.field(factory=set[Callable[[], None]], init=False, repr=False)
    """Called when its last request in flight ends."""

    def reconfigure(self, other: "Endpoint") -> None:
        """Become another one for later requests, with its certificates and keys, and keep the counts."""
        self.route = other.route
        if self.upstream.tls is not None:
            self.upstream = other.upstream

    def end_request(self) -> None:
        """Count the end of a request that was sent there."""
        self.in_flight -= 1
        if not self.in_flight:
            for notify in list(self.when_idle):
                notify()

    def load(self, now: float) -> int:
        """Give how many requests it works on: a report counts while it is fresh."""
        return self.in_flight + (self.external_load if now - self.reported_at < REPORT_S else 0)

    def report(self, requests: int, now: float) -> None:
        """Take its own count of the requests that it works on, which corrects ours upwards. It can be reached."""
        self.external_load = max(0, requests - self.in_flight)
        self.reported_at = now
        self.unavailable_reason = ""
        self.avoid_until = -math.inf

    def fail(self, now: float, why: str = "cannot be reached") -> None:
        """Note that it could not be reached, or takes no requests for another reason."""
        self.unavailable_reason = why
        self.avoid_until = now + AVOID_S


Policy = Callable[[Sequence[Endpoint], float], Endpoint]
"""Chooses one of at least one endpoint that has room, at this time."""


def least_loaded(endpoints: Sequence[Endpoint], now: float) -> Endpoint:
    """Choose the endpoint with the fewest requests, ties at random."""
    fewest = min(endpoint.load(now) for endpoint in endpoints)
    return random.choice([endpoint for endpoint in endpoints if endpoint.load(now) == fewest])


def power_of_two(endpoints: Sequence[Endpoint], now: float) -> Endpoint:
    """Choose the less loaded of two at random: spreads well where several gateways share the workers."""
    return least_loaded(random.sample(endpoints, min(2, len(endpoints))), now)


def round_robin(endpoints: Sequence[Endpoint], _now: float) -> Endpoint:
    """Choose the endpoint that was chosen longest ago."""
    return min(endpoints, key=lambda endpoint: endpoint.turn)


def random_choice(endpoints: Sequence[Endpoint], _now: float) -> Endpoint:
    """Choose any."""
    return random.choice(endpoints)


POLICIES: Mapping[str, Policy] = {
    "least_loaded": least_loaded,
    "power_of_two": power_of_two,
    "round_robin": round_robin,
    "random": random_choice,
}


def rendezvous_hash(session: bytes, endpoints: Sequence[Endpoint]) -> Endpoint:
    """Choose the same endpoint for the same session (rendezvous hashing).

    Where one comes or goes, only the sessions that it has or had move.
    """

    def weight(endpoint: Endpoint) -> bytes:
        return hashlib.blake2b(endpoint.id + b"\0" + session, digest_size=8).digest()

    return max(endpoints, key=weight)


class Lease:
    """One request's place at an endpoint."""

    def __init__(self, endpoint: Endpoint, balancer: "Balancer", probe: int) -> None:
        self.endpoint = endpoint
        self._balancer: Balancer | None = balancer
        self._probe = probe

    def release(self) -> None:
        """Say that the request has ended; harmless the second time."""
        balancer, self._balancer = self._balancer, None
        if balancer is not None:
            self.endpoint.end_request()
            self.endpoint.circuit.end(self._probe)
            balancer.dispatch_waiting()


@attrs.define(eq=False)
class Waiter:
    """One request in a queue."""

    model: str
    fairness_key: str
    """Whose turn it takes."""
    session: bytes
    tried: Collection[Endpoint]
    granted: Callable[[], None]
    """Called once, when `lease` is there, or there will be none."""
    only: Endpoint | None = None
    """The one endpoint that can answer, where there is just one."""
    lease: Lease | None = None
    is_evicted: bool = False
    """Whether it had to leave a full queue, of which its flow had the most."""

    @property
    def is_choosy(self) -> bool:
        """Whether others behind it may be served where it cannot be."""
        return bool(self.tried) or self.only is not None


class FairQueue:
    """Who waits for one model: flows take turns."""

    def __init__(self) -> None:
        self._flows: dict[str, dict[Waiter, None]] = {}
        self._count = 0

    def __repr__(self) -> str:
        return f"<Queue {self._count} of {len(self._flows)} flows>"

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Waiter]:
        """Give all of them: flows in the order of their turns, each flow's from the first come to the last."""
        return iter([waiter for flow in self._flows.values() for waiter in flow])

    def add(self, waiter: Waiter) -> None:
        """Let one more wait, behind the others of its flow; a new flow has its turn after those that wait."""
        self._flows.setdefault(waiter.fairness_key, {})[waiter] = None
        self._count += 1

    def remove(self, waiter: Waiter) -> None:
        """Let one wait no longer; harmless where it does not."""
        flow = self._flows.get(waiter.fairness_key)
        if flow is not None and waiter in flow:
            del flow[waiter]
            self._count -= 1
            if not flow:
                del self._flows[waiter.fairness_key]

    def rotate(self, flow: str) -> None:
        """Put a flow behind the others, since one of it was served."""
        waiters = self._flows.pop(flow, None)
        if waiters is not None:
            self._flows[flow] = waiters

    def eligible(self) -> Iterator[Waiter]:
        """Give those whose turn it is now: the first of each flow, and those behind it that have been elsewhere."""
        for flow in list(self._flows.values()):
            for waiter in list(flow):
                yield waiter
                if not waiter.is_choosy:
                    break

    def eviction_victim(self, flow: str) -> Waiter | None:
        """Give who has to make room for a newcomer: the last of the flow with the most, if it has more than his."""
        longest = max(self._flows.values(), key=len, default=None)
        if longest is None or len(longest) <= len(self._flows.get(flow, ())) + 1:
            return None
        return next(reversed(longest))


def _restricted(endpoints: Sequence[Endpoint], only: Endpoint | None, model: str) -> Sequence[Endpoint]:
    """Return these endpoints, or of them the only one that can answer. Raises ApiError 503 where it is not there."""
    if only is None:
        return endpoints
    if only not in endpoints:
        why = f"{only.upstream.name}, which keeps the response, takes no requests at the moment"
        raise errors.model_not_ready(model, why, RETRY_AFTER_S)
    return [only]


class Balancer:
    """Gives out leases, and keeps a queue for each model whose endpoints are all full."""

    def __init__(
        self,
        find: Callable[[str], Sequence[Endpoint]],
        clock: Callable[[], float],
        *,
        policy: str,
        queue_max: int,
    ) -> None:
        """`find` gives the endpoints that can serve a model now, or raises ApiError (404, 503)."""
        self._find = find
        self._clock = clock
        self.is_closed = False
        """Whether nobody may wait any more."""
        self._choose = POLICIES[policy]
        self._queue_max = queue_max
        self._queues: dict[str, FairQueue] = {}
        self._turns = 0

    def __repr__(self) -> str:
        return f"<Balancer {self.waiting} waiting>"

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return sum(map(len, self._queues.values()))

    def waiting_for(self, model: str) -> int:
        """How many requests wait for a model."""
        return len(self._queues.get(model, ()))

    def set(self, policy: str, queue_max: int) -> None:
        """Choose by another policy, or with other bounds, from the next request on."""
        self._choose, self._queue_max = POLICIES[policy], queue_max

    def lease(
        self, model: str, session: bytes = b"", tried: Collection[Endpoint] = (), *, only: Endpoint | None = None
    ) -> Lease | None:
        """Give a place at an endpoint that has not been tried; None where all are full or others wait already.

        `only` is the one that can answer, where there is just one. Raises ApiError where nobody serves the model now.
        """
        endpoints = _restricted(self._find(model), only, model)
        self._check_circuits(model, endpoints, tried)
        if model in self._queues:
            return None
        return self._take(endpoints, session, tried)

    def has_alternative(self, model: str, tried: Collection[Endpoint]) -> bool:
        """Say whether anybody serves the model who has not been tried."""
        try:
            found, now = self._find(model), self._clock()
            return any(one not in tried and one.circuit.allows_request(now) for one in found)
        except ApiError:
            return False

    def _check_circuits(self, model: str, endpoints: Sequence[Endpoint], tried: Collection[Endpoint]) -> None:
        """Raise ApiError 503 where every endpoint that could be asked is left alone for a while."""
        now = self._clock()
        for one in endpoints:
            if (one.circuit.state(now) != "open" or one.circuit.answers) and one not in tried:
                return
        left = [one for one in endpoints if one not in tried]
        if not left:
            return
        waits = [(one.circuit.open_until or now) - now for one in left]
        reasons = "; ".join(
            f"{one.upstream.name} has failed with {one.circuit.failures} requests in a row, and is tried again in"
            f" {math.ceil(wait_s)} s"
            for one, wait_s in zip(left, waits, strict=True)
        )
        raise errors.model_not_ready(model, reasons, max(1, math.ceil(min(waits))), "circuit_breaker")

    def wait(
        self,
        model: str,
        granted: Callable[[], None],
        session: bytes = b"",
        tried: Collection[Endpoint] = (),
        *,
        fairness_key: str = "",
        only: Endpoint | None = None,
    ) -> Waiter:
        """Join the model's queue, to be told when there is a lease; `leave` in every case. Raises ApiError 429.

        A full queue has room for a flow of which fewer wait than of another one: the last of that one has to go.
        """
        if self.is_closed:
            raise errors.draining()
        queue = self._queues.get(model)
        waiting = len(queue) if queue is not None else 0
        if waiting >= self._queue_max:
            displaced = queue.eviction_victim(fairness_key) if queue is not None else None
            if displaced is None:
                raise errors.queue_full(model, waiting, RETRY_AFTER_S)
            self._remove(displaced)
            displaced.is_evicted = True
            displaced.granted()
        waiter = Waiter(model, fairness_key, session, tried, granted, only)
        self._queues.setdefault(model, FairQueue()).add(waiter)
        self.dispatch_waiting()
        return waiter

    def close(self) -> None:
        """Let nobody wait any more: those who do are told, without a lease."""
        self.is_closed = True
        for queue in list(self._queues.values()):
            for waiter in list(queue):
                self._remove(waiter)
                waiter.granted()

    def leave(self, waiter: Waiter) -> None:
        """Leave the queue, if it is still in it; who stood behind may go on."""
        self._remove(waiter)
        self.dispatch_waiting()

    def _remove(self, waiter: Waiter) -> None:
        queue = self._queues.get(waiter.model)
        if queue is not None:
            queue.remove(waiter)
            if not queue:
                del self._queues[waiter.model]

    def wait_error(self, waiter: Waiter, waited_s: float) -> ApiError:
        """Give the error of a request that has waited for too long, or until the queue was closed or it had to go."""
        model = waiter.model
        if self.is_closed:
            return errors.draining()
        if waiter.is_evicted:
            return errors.queue_full(model, self.waiting_for(model), RETRY_AFTER_S)
        try:
            self._check_circuits(model, self._find(model), waiter.tried)
        except ApiError as error:
            return error
        return errors.queue_timeout(model, waited_s, RETRY_AFTER_S)

    def dispatch_waiting(self) -> None:
        """Give what has become free to those whose turn it is."""
        for model, queue in list(self._queues.items()):
            try:
                endpoints = self._find(model)
            except ApiError:  # nobody serves it at the moment: who waits, waits on
                continue
            while self._serve_one(queue, endpoints):
                pass

    def _serve_one(self, queue: FairQueue, endpoints: Sequence[Endpoint]) -> bool:
        """Give one lease to somebody whose turn it is; say whether that could be done."""
        for waiter in queue.eligible():
            fit = endpoints if waiter.only is None else [one for one in endpoints if one is waiter.only]
            waiter.lease = self._take(fit, waiter.session, waiter.tried)
            if waiter.lease is not None:
                self._remove(waiter)
                queue.rotate(waiter.fairness_key)
                waiter.granted()
                return True
            if not waiter.is_choosy:
                return False
        return False

    def _take(self, endpoints: Sequence[Endpoint], session: bytes, tried: Collection[Endpoint]) -> Lease | None:
        now = self._clock()
        free = [one for one in endpoints if one.in_flight < one.in_flight_max and one not in tried]
        well = [one for one in free if one.circuit.allows_request(now)]
        if not well and any(one.circuit.allows_request(now) for one in endpoints if one not in tried):
            return None  # it is worth waiting for
        free = well or [one for one in free if one.circuit.answers]
        if not free:
            return None
        if len(free) > 1:
            free = [one for one in free if one.avoid_until <= now] or free
        chosen = free[0] if len(free) == 1 else rendezvous_hash(session, free) if session else self._choose(free, now)
        chosen.in_flight += 1
        self._turns += 1
        chosen.turn = self._turns
        return Lease(chosen, self, chosen.circuit.begin(now))
