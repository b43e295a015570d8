"""The policy `prefix_aware`: a request goes where the beginning of its prompt is cached, unless that costs too much.

The decision is a pure function of the facts about each endpoint (`decide`). A prefix that many requests share spreads
as soon as an endpoint has more to do than another. A conversation is not shared and stays where it is.
"""

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ichat.routing.availability import Ready
from ichat.routing.endpoint import Endpoint
from ichat.routing.policies import LeastLoaded, Policy, Rule
from ichat.routing.prefix_chain import PrefixChain
from ichat.routing.prefix_index import Match, PrefixIndex
from ichat.routing.request import RoutingRequest

REQUEST_BYTES = 64
"""An additional request in progress weighs as much as this many bytes of a prompt that are computed once more."""
OVERLOAD = 1.5
OVERLOAD_REQUESTS_MIN, OVERLOAD_REQUESTS_MAX = 4, 64
"""An endpoint is overloaded with OVERLOAD times the average number of requests, and this many more than the average.

How many: a sixteenth of the most that it may have, within these bounds.
"""
WORK_REQUESTS, WORK_REQUESTS_MAX = 48, 4
"""Penalty for recent work, in requests: WORK_REQUESTS x (its recent requests - the fewest) / their average, at most
WORK_REQUESTS_MAX: a slow endpoint may well have got fewer. It sends new conversations to endpoints that had few
lately. If no endpoint holds anything, it decides only among the least loaded.
"""
PULL_BYTES, CALM = 1024, 2
"""The same in bytes, for each request of its recent average beyond CALM times the lowest recent average.

It counts as far as the endpoint has more to do at present, too. A conversation that moves goes on elsewhere, so it may
cost more where an endpoint has had far more to do for long. A returning endpoint thus gets its part of them.
An endpoint with a high load for a moment keeps its own.
"""
RAMP_S = 30.0
RAMP_REQUESTS = 2
"""An endpoint that has been ready for less than RAMP_S counts this many requests more."""


class Candidate(NamedTuple):
    """The facts about an endpoint on which the decision depends."""

    matched: int
    """The bytes of the request's prefix that it is believed to hold."""
    load: int
    """The requests in progress there."""
    in_flight_max: int = 4096
    work: float = 0.0
    """How many requests it got lately, the older the less."""
    average: float = 0.0
    """Its load of late, on average."""


def decide(candidates: Sequence[Candidate], uses: int) -> tuple[int, Rule]:
    """Return the place of the candidate that gets a request, and the rule; there must be a candidate.

    `uses` says how many requests went other ways where the deepest match ends: as many will gain by another holder.
    """
    matches, loads, _, works, averages = zip(*candidates, strict=True)
    deepest, least, most = max(matches), min(loads), max(loads)
    if not deepest:
        return _best(list(zip(loads, works, strict=True))), "least_loaded"
    fewest, calmest, count = min(works), min(averages), len(candidates)
    mean, price = sum(loads) / count, REQUEST_BYTES * (1 + uses)
    weight = WORK_REQUESTS * count / (sum(works) + count)
    is_even = most <= mean * OVERLOAD or most <= mean + OVERLOAD_REQUESTS_MIN
    costs: list[tuple[bool, float, int, float]] = []
    for one in candidates:
        matched, load, _, work, average = one
        cost = deepest - matched + min(WORK_REQUESTS_MAX, (work - fewest) * weight) * price
        if load > least:
            cost += (load - least) * price + max(0.0, min(load - least, average - CALM * calmest)) * PULL_BYTES
        costs.append((not is_even and is_overloaded(one, mean), cost, load, work))
    place = _best(costs)
    return place, "prefix" if matches[place] == deepest else "spill"


def _best(costs: list[tuple[float, ...]]) -> int:
    """Return the place of the least of them; of equals, any."""
    least = min(costs)
    if costs.count(least) == 1:
        return costs.index(least)
    return random.choice([place for place, cost in enumerate(costs) if cost == least])


def is_overloaded(candidate: Candidate, mean: float) -> bool:
    """Return whether an endpoint has too many requests above the average to get more."""
    more = max(OVERLOAD_REQUESTS_MIN, min(OVERLOAD_REQUESTS_MAX, candidate.in_flight_max // 16))
    return candidate.load > mean * OVERLOAD and candidate.load > mean + more


def overloaded_of(endpoints: Sequence[Endpoint], match: Match, now: float) -> Sequence[Endpoint]:
    """Return the endpoints, of these, that have too many requests to get more."""
    described = describe(endpoints, match, now)
    mean = sum(one.load for one in described) / max(1, len(described))
    return [one for one, seen in zip(endpoints, described, strict=True) if is_overloaded(seen, mean)]


class PrefixAware(LeastLoaded):
    """The endpoint that holds the beginning of the prompt, if it has not too much to do; else the least loaded."""

    def __init__(self, index: PrefixIndex, *, is_rehearsal: bool = False) -> None:
        """`is_rehearsal`: nothing is noted of the endpoints."""
        self._index = index
        self._is_rehearsal = is_rehearsal
        self._found: tuple[PrefixChain, Match] | None = None
        """The knowledge about the request that has just got its endpoint."""

    def compared(self, found: Ready, request: RoutingRequest) -> Sequence[Endpoint]:
        """Return some of many endpoints: neighbours, and those of any place that hold a part of the prefix."""
        some = super().compared(found, request)
        prefix = request.prefix
        if prefix is None:
            return some
        match = self._index.match(prefix)
        self._found = prefix, match
        return [*some, *(one for one in match.bytes_of if one in found and one not in some)]

    def choose(self, candidates: Sequence[Endpoint], request: RoutingRequest, now: float) -> Endpoint:
        """Return one of the candidates by `decide`; a request without a prefix goes to the least loaded."""
        prefix = request.prefix
        if prefix is None:
            self.rule = "least_loaded"
            return super().choose(candidates, request, now)
        match = self._match(prefix, now)
        self._found = prefix, match
        described = describe(candidates, match, now, is_noted=not self._is_rehearsal)
        place, self.rule = decide(described, match.uses)
        return candidates[place]

    def rehearsing(self, request: RoutingRequest) -> Policy:
        """Return a policy with an index of its own, that knows the same of the request's prefix."""
        return self if request.prefix is None else PrefixAware(self._index.part_of(request.prefix), is_rehearsal=True)

    def is_home(self, endpoint: Endpoint, request: RoutingRequest) -> bool:
        """Return whether no endpoint holds more of the request's prefix."""
        return request.prefix is not None and self._index.is_deepest(request.prefix, endpoint)

    def _match(self, prefix: PrefixChain, now: float) -> Match:
        """Return the knowledge about the chain of the request that gets its endpoint now; it is looked up once."""
        found, self._found = self._found, None
        return found[1] if found is not None and found[0] is prefix else self._index.match(prefix, now)

    def on_start(self, endpoint: Endpoint, request: RoutingRequest, now: float) -> None:
        """Note that the endpoint will have the request's prefix, so that the next request of the kind follows it."""
        prefix = request.prefix
        if prefix is not None:
            match = self._match(prefix, now)
            prefix.matched, prefix.deepest = match.bytes_of.get(endpoint, 0), match.deepest
            prefix.holders = len(match.bytes_of)
            self._index.record(prefix, match, endpoint)
            endpoint.holder.add_work(now)


def describe(endpoints: Iterable[Endpoint], match: Match, now: float, *, is_noted: bool = False) -> Sequence[Candidate]:
    """Return the facts about each endpoint on which the decision depends, for a request with this match.

    `is_noted` says that the observations of the endpoints will be remembered.
    """
    bytes_of, described = match.bytes_of, list[Candidate]()
    for one in endpoints:
        load = one.load(now)
        work, average = one.holder.lately(load, now, is_noted=is_noted)
        if now - one.ready_since < RAMP_S:
            load += RAMP_REQUESTS
        described.append(Candidate(bytes_of.get(one, 0), load, one.in_flight_max, work, average))
    return described
