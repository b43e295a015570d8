"""Policies: which of several endpoints that have room gets a request. The configuration names them."""

import copy
import itertools
import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from ichat.routing.availability import Ready
from ichat.routing.endpoint import Endpoint
from ichat.routing.request import RoutingRequest

COMPARED_MAX = 16
"""At most this many endpoints are compared for a request. Of more, it is as many neighbours in the list of all."""
Rule = Literal["only", "session", "single", "prefix", "spill", "least_loaded", "power_of_two", "round_robin", "random"]
"""Why an endpoint gets a request.

`only`: it keeps the response that the request continues. `session`: the session belongs there. `single`: no other can
take it. `prefix`: it holds the most of the prompt's beginning. `spill`: it holds less than another, and has less to do.
The others are policies; `least_loaded` is also that of `prefix_aware` where none holds anything.
"""


class Policy(Protocol):
    """Chooses endpoints, and is informed of each request that an endpoint gets."""

    rule: Rule
    """The rule of the newest choice."""

    def compared(self, found: Ready, request: RoutingRequest) -> Sequence[Endpoint]:
        """Return some of many endpoints, of which the request gets the best."""
        return _neighbours(found.endpoints, random.randrange(len(found.endpoints)))

    def choose(self, candidates: Sequence[Endpoint], request: RoutingRequest, now: float) -> Endpoint:
        """Return a candidate; there is always a candidate."""
        ...

    def rehearsing(self, request: RoutingRequest) -> "Policy":
        """Return a policy that now makes the same choices for a request, and changes nothing by them."""
        return self

    def is_home(self, endpoint: Endpoint, request: RoutingRequest) -> bool:
        """Return whether a request that waits is better off with this endpoint than with any other."""
        return False

    def on_start(self, endpoint: Endpoint, request: RoutingRequest, now: float) -> None:
        """Called when the endpoint gets the request, whether it was chosen or was the only candidate."""


class LeastLoaded(Policy):
    """The endpoint with the fewest requests, ties at random."""

    rule: Rule = "least_loaded"

    def choose(self, candidates: Sequence[Endpoint], request: RoutingRequest, now: float) -> Endpoint:
        """Return one of those with the fewest requests."""
        loads = [endpoint.load(now) for endpoint in candidates]
        fewest = min(loads)
        return random.choice([one for one, load in zip(candidates, loads, strict=True) if load == fewest])


class PowerOfTwo(LeastLoaded):
    """The less loaded of two at random: spreads well if several gateways share the workers."""

    rule = "power_of_two"

    def choose(self, candidates: Sequence[Endpoint], request: RoutingRequest, now: float) -> Endpoint:
        """Return the less loaded of two candidates."""
        return super().choose(random.sample(candidates, min(2, len(candidates))), request, now)


class RoundRobin(Policy):
    """The endpoint to which no request has gone for the longest time."""

    rule: Rule = "round_robin"

    def __init__(self) -> None:
        self._turns = itertools.count(1)
        self._look = -1
        self._newest: weakref.WeakKeyDictionary[Endpoint, int] = weakref.WeakKeyDictionary()

    def compared(self, found: Ready, request: RoutingRequest) -> Sequence[Endpoint]:
        """Return some of many endpoints, at each request from the next endpoint on."""
        self._look += 1
        return _neighbours(found.endpoints, self._look % len(found.endpoints))

    def choose(self, candidates: Sequence[Endpoint], request: RoutingRequest, now: float) -> Endpoint:
        """Return the candidate that had its turn longest ago, or never."""
        newest = self._newest
        return min(candidates, key=lambda endpoint: newest.get(endpoint, 0))

    def rehearsing(self, request: RoutingRequest) -> Policy:
        """Return a copy with a place of its own in the list of many endpoints."""
        return copy.copy(self)

    def on_start(self, endpoint: Endpoint, request: RoutingRequest, now: float) -> None:
        """Remember the endpoint's turn."""
        self._newest[endpoint] = next(self._turns)


class Random(Policy):
    """Any endpoint."""

    rule: Rule = "random"

    def choose(self, candidates: Sequence[Endpoint], request: RoutingRequest, now: float) -> Endpoint:
        """Return any of the candidates."""
        return random.choice(candidates)


POLICIES: Mapping[str, Callable[[], Policy]] = {
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "round_robin": RoundRobin,
    "random": Random,
}
"""By their names in the configuration (`config.schema.POLICY_NAMES`), which knows `prefix_aware` too."""


def _neighbours(endpoints: Sequence[Endpoint], start: int) -> Sequence[Endpoint]:
    found = endpoints[start : start + COMPARED_MAX]
    return found if len(found) == COMPARED_MAX else [*found, *endpoints[: COMPARED_MAX - len(found)]]
