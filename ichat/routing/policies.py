"""Policies: which of several endpoints that have room gets a request. The configuration names them."""

import hashlib
import itertools
import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ichat.routing.endpoint import Endpoint
from ichat.routing.request import RoutingRequest


class Policy(Protocol):
    """Chooses endpoints, and is told of each request that one of them gets."""

    def choose(self, candidates: Sequence[Endpoint], request: RoutingRequest, now: float) -> Endpoint:
        """Return one of the candidates, of which there is at least one."""
        ...

    def on_start(self, endpoint: Endpoint, request: RoutingRequest) -> None:
        """Called when the endpoint gets the request, whether it was chosen or was the only candidate."""

    def on_end(self, endpoint: Endpoint, request: RoutingRequest) -> None:
        """Called when that request has ended."""


class LeastLoaded(Policy):
    """The endpoint with the fewest requests, ties at random."""

    def choose(self, candidates: Sequence[Endpoint], request: RoutingRequest, now: float) -> Endpoint:
        """Return one of those with the fewest requests."""
        loads = [endpoint.load(now) for endpoint in candidates]
        fewest = min(loads)
        return random.choice([one for one, load in zip(candidates, loads, strict=True) if load == fewest])


class PowerOfTwo(LeastLoaded):
    """The less loaded of two at random: spreads well if several gateways share the workers."""

    def choose(self, candidates: Sequence[Endpoint], request: RoutingRequest, now: float) -> Endpoint:
        """Return the less loaded of two candidates."""
        return super().choose(random.sample(candidates, min(2, len(candidates))), request, now)


class RoundRobin(Policy):
    """The endpoint whose last request began longest ago."""

    def __init__(self) -> None:
        self._turns = itertools.count(1)
        self._newest: weakref.WeakKeyDictionary[Endpoint, int] = weakref.WeakKeyDictionary()

    def choose(self, candidates: Sequence[Endpoint], request: RoutingRequest, now: float) -> Endpoint:
        """Return the candidate that had its turn longest ago, or never."""
        newest = self._newest
        return min(candidates, key=lambda endpoint: newest.get(endpoint, 0))

    def on_start(self, endpoint: Endpoint, request: RoutingRequest) -> None:
        """Remember the endpoint's turn."""
        self._newest[endpoint] = next(self._turns)


class Random(Policy):
    """Any endpoint."""

    def choose(self, candidates: Sequence[Endpoint], request: RoutingRequest, now: float) -> Endpoint:
        """Return any of the candidates."""
        return random.choice(candidates)


POLICIES: Mapping[str, Callable[[], Policy]] = {
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "round_robin": RoundRobin,
    "random": Random,
}
"""By their names in the configuration (`config.schema.POLICY_NAMES`)."""


def rendezvous_hash(session: bytes, endpoints: Sequence[Endpoint]) -> Endpoint:
    """Return the same endpoint for the same session (rendezvous hashing).

    When an endpoint comes or goes, only the sessions that it gets or had move.
    """

    def weight(endpoint: Endpoint) -> bytes:
        return hashlib.blake2b(endpoint.id + b"\0" + session, digest_size=8).digest()

    return max(endpoints, key=weight)
