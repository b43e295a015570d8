"""The attempts of a request under an earlier owner: the next owner has it go on after them."""

from collections.abc import Callable, Iterable, Mapping
from typing import cast

from ichat import errors
from ichat.proxy.model_request import Tried
from ichat.proxy.refusals import Failure
from ichat.proxy.steps import (
    NOT_WORKED_ON,
    TOO_LONG,
    Lookup,
    Outcome,
    OutcomeKind,
    Refuse,
    RequestRoute,
    Step,
    go_to,
    next_step,
)
from ichat.routing.endpoint import Endpoint

_KNOWN = frozenset(("unreachable", "declined", "rejected", "too_long", "late", "broken"))


def endpoints_of(tried: Iterable[Tried], endpoint_of: Callable[[str], Endpoint | None]) -> Mapping[str, Endpoint]:
    """Return the endpoints of attempts, by their ids, as far as `endpoint_of` knows them."""
    found = ((one.endpoint, endpoint_of(one.endpoint)) for one in tried)
    return {name: endpoint for name, endpoint in found if endpoint is not None}


def after_attempts(
    route: RequestRoute, step: Step, tried: Iterable[Tried], endpoints: Mapping[str, Endpoint], now: float
) -> tuple[RequestRoute, Step]:
    """Return how a request goes on after these attempts, and its route; `step` is the first step of its route.

    `endpoints` are those that are known, by their ids. An attempt that may have been worked on, at a model that the
    route does not lead to any more, is the last.
    """
    for one in tried:
        if not isinstance(step, Lookup):
            return route, step
        endpoint = endpoints.get(one.endpoint)
        outcome = _outcome_of(one, route, is_external=endpoint is not None and endpoint.route is not None)
        there = _route_at(route, one.model)
        if there is not None:
            route, step = next_step(there, outcome, now)
        elif one.kind not in NOT_WORKED_ON and outcome.failure is not None:
            return route, Refuse(outcome.failure)
    return route, step


def _route_at(route: RequestRoute, model: str) -> RequestRoute | None:
    """Return a route that has got as far as a model, past the models before it; None if it does not lead there."""
    if model == route.model:
        return route
    left, reason, newest = (route.model,), "busy", route.newest
    if newest is not None:  # no other endpoint of the current model was left: it is not returned to
        left, reason, failures = (), route.newest_reason, (*route.failures, (route.model, newest))
        route = route._replace(newest=None, newest_reason="", failures=failures)
    route = route._replace(failed="", tries=route.tries + 1)
    if model in route.ahead:
        place = route.ahead.index(model)
        later = (*route.later, *left, *route.ahead[:place])
        return go_to(route._replace(later=later, ahead=route.ahead[place + 1 :]), model, reason)
    if model in route.later:
        rest = (*route.later, *left, *route.ahead)[route.later.index(model) + 1 :]
        return go_to(route._replace(later=(), waits=True, ahead=rest), model, reason)
    if model == route.longer:
        return go_to(route._replace(ahead=(), later=()), model, TOO_LONG)
    return None


def _outcome_of(one: Tried, route: RequestRoute, *, is_external: bool) -> Outcome:
    """Return the outcome of an attempt, as far as its route depends on it."""
    why = "the gateway has started again meanwhile"
    is_untouched = one.kind in NOT_WORKED_ON
    error = (errors.upstream_unreachable if is_untouched else errors.upstream_failed)(one.endpoint, why)
    kind = cast("OutcomeKind", one.kind) if one.kind in _KNOWN else "broken"
    status = 429 if "429" in route.goes_on else 500  # of `rejected`: only such a response is
    return Outcome(
        kind, one.endpoint, Failure.of(error), why, status=status if kind == "rejected" else 0,
        is_external=is_external, is_over=one.kind not in _KNOWN,
    )  # fmt: skip
