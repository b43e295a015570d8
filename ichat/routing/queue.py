"""Queues that are fair: flows take turns, and each flow is served first come, first served."""

import itertools
import math
from collections.abc import Callable, Iterator

import attrs

from ichat.routing.availability import Refusal
from ichat.routing.request import Lease, RoutingRequest


@attrs.define(eq=False)
class Waiter:
    """A request in a queue."""

    request: RoutingRequest
    granted: Callable[[], None]
    """Called once, when there is a lease, or there will be none."""
    since: float = 0.0
    """When it began to wait, by the balancer's clock."""
    lease: Lease | None = None
    refusal: Refusal | None = None
    """Why there will be no lease, if that was found while it waited."""
    waits_for_load: bool = False
    """Whether it began to wait since nothing served its model, but could be loaded."""
    passed_over: int = 0
    """How often another request of its flow was served first, since the endpoint suited that request better."""
    is_evicted: bool = False
    """Whether it had to leave a full queue, in which its flow had the most requests."""


@attrs.frozen
class Demand:
    """How much a model is wanted."""

    waiting: int
    """Requests in its queue."""
    since: float
    """When the oldest of them began to wait; `inf` if there is none."""


class FairQueue:
    """The requests that wait for a model."""

    def __init__(self) -> None:
        self._flows: dict[str, dict[Waiter, None]] = {}
        self._count = 0
        self.is_served = True
        """Whether its model could be served at the last look: if not, no request that ends changes that."""

    def __repr__(self) -> str:
        return f"<FairQueue {self._count} of {len(self._flows)} flows>"

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Waiter]:
        """Return all waiters: flows in the order of their turns, each flow from its oldest waiter to its newest."""
        return iter([waiter for flow in self._flows.values() for waiter in flow])

    def add(self, waiter: Waiter) -> None:
        """Add a waiter at the end of its flow; a new flow has its turn after the others."""
        self._flows.setdefault(waiter.request.fairness_key, {})[waiter] = None
        self._count += 1

    def first_of(self, key: str, count: int) -> Iterator[Waiter]:
        """Return the oldest waiters of a flow, at most `count`."""
        return itertools.islice(self._flows.get(key, ()), count)

    def oldest_since(self) -> float:
        """Return when its oldest waiter began to wait."""
        return min((next(iter(flow)).since for flow in self._flows.values()), default=math.inf)

    def pass_over(self, head: Waiter, served: Waiter) -> None:
        """Count that a waiter of a flow is served before those from `head` on."""
        flow = self._flows[served.request.fairness_key]
        behind = itertools.dropwhile(lambda one: one is not head, flow)
        for waiter in itertools.takewhile(lambda one: one is not served, behind):
            waiter.passed_over += 1

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter, if it is there."""
        key = waiter.request.fairness_key
        flow = self._flows.get(key)
        if flow is not None and waiter in flow:
            del flow[waiter]
            self._count -= 1
            if not flow:
                del self._flows[key]

    def rotate(self, key: str) -> None:
        """Put a flow behind the others, since one of its waiters was served."""
        flow = self._flows.pop(key, None)
        if flow is not None:
            self._flows[key] = flow

    def eligible(self) -> Iterator[Waiter]:
        """Yield the waiters eligible for the next slot: the head of each flow, and those behind a restricted waiter."""
        for flow in list(self._flows.values()):
            for waiter in list(flow):
                yield waiter
                if not waiter.request.is_restricted:
                    break

    def eviction_victim(self, key: str) -> Waiter | None:
        """Return the waiter to evict for a new waiter of this flow: the newest of the longest flow, if longer."""
        longest = max(self._flows.values(), key=len, default=None)
        if longest is None or len(longest) <= len(self._flows.get(key, ())) + 1:
            return None
        return next(reversed(longest))
