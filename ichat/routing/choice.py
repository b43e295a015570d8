"""Which of a model's endpoints a request gets, and why the others do not get it. Nothing here changes anything.

The balancer leases the chosen endpoint, and operators are shown the same decision (`fleet/explain.py`).
"""

import math
from collections.abc import Sequence

from ichat.routing.availability import Availability, Loadable, NotReady, Ready
from ichat.routing.endpoint import Endpoint
from ichat.routing.policies import COMPARED_MAX, Policy, Rule
from ichat.routing.request import RoutingRequest
from ichat.routing.sessions import home_of

RETRY_AFTER_S = 2
"""When it is worth asking again for an endpoint that is away, and for room in a full queue."""
_RING_ABOVE = 2
"""With more endpoints, a ring finds a session's endpoint faster than a look at each."""


def has_choice(found: Availability) -> bool:
    """Return whether a model has several endpoints.

    Endpoints that are not ready count: the endpoint that gets a prompt now still has it when the others are back.
    """
    if isinstance(found, Ready):
        return found.known > 1 or len(found.endpoints) > 1
    return isinstance(found, Loadable) and found.known > 1


def fit_for(request: RoutingRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
    """Return the endpoints that can answer a request at all."""
    if request.only is None:
        return endpoints
    return (request.only,) if request.only in endpoints else ()


def is_plainly_free(endpoint: Endpoint, request: RoutingRequest) -> bool:
    """Return whether a model's only endpoint can have the request, without a look at rare cases."""
    return (
        endpoint.in_flight < endpoint.in_flight_max
        and endpoint.circuit.open_until is None
        and not request.excluded
        and request.only is None
    )


def refusal_of(endpoints: Sequence[Endpoint], request: RoutingRequest, now: float) -> NotReady | None:
    """Return why none of the endpoints will accept the request soon, if so."""
    if not endpoints and request.only is not None:
        why = f"{request.only.upstream.name}, which keeps the response, takes no requests at the moment"
        return NotReady(why, RETRY_AFTER_S, told="the worker that keeps the response takes no requests")
    excluded, skips_open = request.excluded, request.skips_open
    for one in endpoints:
        if one not in excluded and one.circuit.is_worth_waiting(now, skips_open=skips_open):
            return None
    left = [one for one in endpoints if one not in excluded]
    if not left:
        return None
    rest_s = max(1, math.ceil(min(one.circuit.open_s(now) for one in left)))
    reasons = "; ".join(f"{one.upstream.name} {one.circuit.why_open(now)}" for one in left)
    told = f"its last requests have failed, and it is tried again in {rest_s} s"
    return NotReady(reasons, rest_s, "circuit_breaker", told=told)


def select(found: Ready, request: RoutingRequest, policy: Policy, now: float) -> tuple[Endpoint, Rule] | None:
    """Return which of these endpoints a request gets, and by which rule; None if it has to wait."""
    are_many = len(found.endpoints) > (_RING_ABOVE if request.session else COMPARED_MAX)
    chosen = _choose_of_many(found, request, policy, now) if are_many else None
    if chosen is None:
        choice = candidates(found.endpoints, request, now)
        if not choice:
            return None
        if len(choice) == 1:
            return choice[0], "single" if request.only is None else "only"
        if not request.session:
            return policy.choose(choice, request, now), policy.rule
        chosen = home_of(request.session, choice)
    return chosen, "session" if request.session else policy.rule


def _choose_of_many(found: Ready, request: RoutingRequest, policy: Policy, now: float) -> Endpoint | None:
    """Return an endpoint for a request without looking at all of many; None if those looked at are not free."""

    def is_free(one: Endpoint) -> bool:
        return (
            one.in_flight < one.in_flight_max
            and one.avoid_until <= now
            and (one.circuit.open_until is None or one.circuit.allows_request(now))
            and one not in request.excluded
        )

    if request.only is not None:
        return None
    if request.session:
        return found.home_of(request.session, is_free)
    free = [one for one in policy.compared(found, request) if is_free(one)]
    return policy.choose(free, request, now) if free else None


def candidates(endpoints: Sequence[Endpoint], request: RoutingRequest, now: float) -> Sequence[Endpoint]:
    """Return the endpoints to choose from: with room, and of those the best that there are.

    An endpoint with an open circuit that at least answers is only asked if no other endpoint is worth waiting for.
    """
    left = [one for one in fit_for(request, endpoints) if one not in request.excluded]
    allowed = [one for one in left if one.circuit.open_until is None or one.circuit.allows_request(now)]
    if not allowed and not request.skips_open:
        allowed = [one for one in left if one.circuit.answers]
    free = [one for one in allowed if one.in_flight < one.in_flight_max]
    if len(free) > 1:
        return [one for one in free if one.avoid_until <= now] or free
    return free


def why_not(endpoint: Endpoint, request: RoutingRequest, now: float) -> str:
    """Return in a few words, after its name, why an endpoint that is ready is not among the candidates."""
    if request.only is not None and endpoint is not request.only:
        return "does not keep the response that the request continues"
    if endpoint.in_flight >= endpoint.in_flight_max:
        return f"is full: it has {endpoint.in_flight} requests, and may have {endpoint.in_flight_max}"
    if not endpoint.circuit.allows_request(now):
        return endpoint.circuit.why_open(now)
    return "could not be reached, and is asked only if no other is there"
