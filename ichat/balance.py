"""Who gets a request, and who has to wait. Purely synchronous: what is decided is decided in one step.

A policy is a small function with a name in the configuration. A request that is given an endpoint has a lease on it;
where every endpoint of its model is full it waits in the model's queue, first come, first served.
"""

import hashlib
import math
import random
import urllib.parse
from collections.abc import Callable, Collection, Mapping, Sequence

import attrs

from ichat import errors
from ichat.config import Config
from ichat.errors import ApiError
from ichat.external import Route, read_route
from ichat.http.pool import Upstream

REPORT_S = 10.0
"""How long a worker's report of its load counts."""
AVOID_S = 10.0
"""How long an endpoint that could not be reached is asked only if there is no other."""
DRAIN_S_MAX = 3600.0
"""How long a request to stop a worker may give it to answer what it has."""
RETRY_AFTER_S = 2
"""What a client is told to wait that was refused since a queue was full, or waited in vain."""


@attrs.define(eq=False)
class Endpoint:
    """Somewhere that requests for a model can be sent to: a worker, or an external route."""

    upstream: Upstream
    id: bytes
    """What `x-ichat-worker` and the access log call it."""
    in_flight_max: int
    route: Route | None = None
    """What an external route changes in requests."""
    in_flight: int = 0
    """Requests under way that came through here: changed at once, so never stale."""
    elsewhere: int = 0
    """Requests that it works on besides those, by its newest report."""
    reported_at: float = -math.inf
    avoid_until: float = -math.inf
    """Until then it is chosen only if there is no other: it could not be reached."""
    turn: int = 0
    """When it was last chosen, counted in requests."""
    unreachable: bool = False
    """Whether a connection to it failed since it was last heard of."""
    timeouts: tuple[float, float] | None = None
    """Seconds until its first byte, and between two bytes, where they are not the configured ones."""

    def take(self, other: "Endpoint") -> None:
        """Become another one for later requests, with its certificates and keys, and keep the counts."""
        self.route = other.route
        if self.upstream.tls is not None:
            self.upstream = other.upstream

    def load(self, now: float) -> int:
        """Give how many requests it works on: a report counts while it is fresh."""
        return self.in_flight + (self.elsewhere if now - self.reported_at < REPORT_S else 0)

    def report(self, requests: int, now: float) -> None:
        """Take its own count of the requests that it works on, which corrects ours upwards. It can be reached."""
        self.elsewhere = max(0, requests - self.in_flight)
        self.reported_at = now
        self.unreachable = False
        self.avoid_until = -math.inf

    def fail(self, now: float) -> None:
        """Note that it could not be reached."""
        self.unreachable = True
        self.avoid_until = now + AVOID_S


def external_endpoints(config: Config) -> Mapping[str, Sequence[Endpoint]]:
    """Make the endpoints of the external routes, by model. Raises Exit 64 where a key is missing."""
    found: dict[str, list[Endpoint]] = {}
    for number, given in enumerate(config.external_routes):
        route, upstream = read_route(given, config, f"external_routes[{number}]")
        same = found.setdefault(given.model_name, [])
        id_ = f"external:{urllib.parse.quote(given.model_name)}" + (f"#{len(same) + 1}" if same else "")
        same.append(Endpoint(upstream, id_.encode(), given.max_in_flight or config.routing.max_in_flight, route))
    return found


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


def any_of(endpoints: Sequence[Endpoint], _now: float) -> Endpoint:
    """Choose any."""
    return random.choice(endpoints)


POLICIES: Mapping[str, Policy] = {
    "least_loaded": least_loaded,
    "power_of_two": power_of_two,
    "round_robin": round_robin,
    "random": any_of,
}


def same_for(session: bytes, endpoints: Sequence[Endpoint]) -> Endpoint:
    """Choose the same endpoint for the same session (rendezvous hashing).

    Where one comes or goes, only the sessions that it has or had move.
    """

    def weight(endpoint: Endpoint) -> bytes:
        return hashlib.blake2b(endpoint.id + b"\0" + session, digest_size=8).digest()

    return max(endpoints, key=weight)


class Lease:
    """One request's place at an endpoint."""

    def __init__(self, endpoint: Endpoint, balancer: "Balancer") -> None:
        self.endpoint = endpoint
        self._balancer: Balancer | None = balancer

    def release(self) -> None:
        """Say that the request has ended; harmless the second time."""
        balancer, self._balancer = self._balancer, None
        if balancer is not None:
            self.endpoint.in_flight -= 1
            balancer.advance()


@attrs.define(eq=False)
class Waiter:
    """One request in a queue."""

    model: str
    session: bytes
    tried: Collection[Endpoint]
    granted: Callable[[], None]
    """Called once, when `lease` is there."""
    lease: Lease | None = None


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
        self._queues: dict[str, dict[Waiter, None]] = {}
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

    def lease(self, model: str, session: bytes = b"", tried: Collection[Endpoint] = ()) -> Lease | None:
        """Give a place at an endpoint that has not been tried; None where all are full or others wait already.

        Raises ApiError where nobody serves the model now.
        """
        endpoints = self._find(model)
        if model in self._queues:
            return None
        return self._take(endpoints, session, tried)

    def others(self, model: str, tried: Collection[Endpoint]) -> bool:
        """Say whether anybody serves the model who has not been tried."""
        try:
            return any(endpoint not in tried for endpoint in self._find(model))
        except ApiError:
            return False

    def wait(
        self, model: str, granted: Callable[[], None], session: bytes = b"", tried: Collection[Endpoint] = ()
    ) -> Waiter:
        """Join the model's queue, to be told when there is a lease; `leave` in every case. Raises ApiError 429."""
        if self.is_closed:
            raise errors.draining()
        waiting = len(self._queues.get(model, ()))
        if waiting >= self._queue_max:
            raise errors.queue_full(model, waiting, RETRY_AFTER_S)
        waiter = Waiter(model, session, tried, granted)
        self._queues.setdefault(model, {})[waiter] = None
        self.advance()
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
        self.advance()

    def _remove(self, waiter: Waiter) -> None:
        queue = self._queues.get(waiter.model)
        if queue is not None:
            queue.pop(waiter, None)
            if not queue:
                del self._queues[waiter.model]

    def in_vain(self, model: str, waited_s: float) -> ApiError:
        """Give the error of a request that has waited in the model's queue for too long, or until it was closed."""
        if self.is_closed:
            return errors.draining()
        try:
            self._find(model)
        except ApiError as error:
            return error
        return errors.waited_in_vain(model, waited_s, RETRY_AFTER_S)

    def advance(self) -> None:
        """Give what has become free to those who wait longest."""
        for model, queue in list(self._queues.items()):
            try:
                endpoints = self._find(model)
            except ApiError:  # nobody serves it at the moment: who waits, waits on
                continue
            for waiter in list(queue):
                waiter.lease = self._take(endpoints, waiter.session, waiter.tried)
                if waiter.lease is not None:
                    self._remove(waiter)
                    waiter.granted()
                elif not waiter.tried:
                    break

    def _take(self, endpoints: Sequence[Endpoint], session: bytes, tried: Collection[Endpoint]) -> Lease | None:
        free = [one for one in endpoints if one.in_flight < one.in_flight_max and one not in tried]
        if not free:
            return None
        now = self._clock()
        if len(free) > 1:
            free = [one for one in free if one.avoid_until <= now] or free
        chosen = free[0] if len(free) == 1 else same_for(session, free) if session else self._choose(free, now)
        chosen.in_flight += 1
        self._turns += 1
        chosen.turn = self._turns
        return Lease(chosen, self)
