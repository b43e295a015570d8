"""A request that goes on after the attempts of an earlier owner: it is where that owner would have it."""

import random

import pytest

from ichat import errors
from ichat.config.models import REASONS
from ichat.http.pool import Upstream
from ichat.proxy.earlier_attempts import after_attempts
from ichat.proxy.model_request import Tried
from ichat.proxy.refusals import Failure
from ichat.proxy.steps import (
    BEGUN,
    AttemptStep,
    BodyEdits,
    Found,
    Lookup,
    Outcome,
    Refuse,
    RequestRoute,
    next_step,
    plain_start,
)
from ichat.routing.endpoint import Endpoint

NOW = 100.0
FAILURE = Failure.of(errors.upstream_failed("x", "it closed"))
EXTERNAL = {name: Endpoint(Upstream("", "", 0), name.encode(), 1, object()) for name in ("x1", "x2")}
LIVES = 600


def any_route(chance):
    if chance.random() < 0.3:
        return RequestRoute("a", queue_s=30.0, is_bound=chance.random() < 0.3)
    models = chance.sample("abcd", chance.randint(1, 4))
    goes_on = tuple(sorted(chance.sample(REASONS, chance.randint(2, len(REASONS)))))
    return RequestRoute(
        models[0], tuple(models[1:]), "n", goes_on, chance.choice(["", "l"]), chance.choice([0, 1, 2]), NOW + 1, 30.0,
        edits=BodyEdits(models[0]),
    )  # fmt: skip


def any_end(chance, step, endpoint):
    """Return the outcome of an attempt that wants a next step."""
    kinds = ["unreachable", "declined", "broken", "late", "unfit"]
    kinds += ["rejected"] * bool(step.rejects) * (endpoint in EXTERNAL) + ["too_long"] * step.has_longer
    kind = chance.choice(kinds)
    status = {"429": 429, "5xx": 503}[chance.choice(step.rejects)] if kind == "rejected" else 0
    is_over = kind in ("broken", "late") and chance.random() < 0.2
    return Outcome(kind, endpoint, FAILURE, status=status, is_external=endpoint in EXTERNAL, is_over=is_over)


def place_of(route, step):
    """Return what decides on the further way of a request."""
    if isinstance(step, Refuse):
        return "refused"
    return step.model, step.excluded, route.again, {*route.ahead, *route.later}, route.longer, step.edits


def walk(seed):
    """Walk a random way; after each attempt, yield it with the attempts until then.

    A model is passed over as busy before its first attempt only: later the attempts do not say so, and it has failed.
    """
    chance, tried = random.Random(seed), []
    route, step = start = next_step(any_route(chance), BEGUN, NOW)
    while isinstance(step, Lookup):
        unexcluded = [one for one in ("w1", "w2", "x1", "x2") if one not in step.excluded]
        if route.newest is not None and chance.random() < 0.4:
            route, step = next_step(route, Outcome("alone"), NOW)
            continue
        is_tried = route.newest is not None or route.again
        if "busy" in route.goes_on and route.has_more and not route.waits and not is_tried and chance.random() < 0.3:
            route, step = next_step(route, Outcome("full"), NOW)
            continue
        if not unexcluded:
            return
        route, step = next_step(route, Found(chance.choice(unexcluded)), NOW)
        assert isinstance(step, AttemptStep)
        outcome = any_end(chance, step, step.endpoint)
        tried.append(Tried(step.endpoint, step.model, "over" if outcome.is_over else outcome.kind))
        route, step = next_step(route, outcome, NOW)
        yield start, tried, (route, step)


def test_a_request_goes_on_where_the_earlier_owner_had_it():
    """Of any way: the model, the endpoints that it excludes, and the models left are those of the earlier owner."""
    lengths = set()
    for seed in range(LIVES):
        for start, tried, there in walk(seed):
            lengths.add(len(tried))
            found = after_attempts(*start, tried, EXTERNAL, NOW)
            assert place_of(*found) == place_of(*there), (seed, tried)
    assert {1, 2, 3, 4} <= lengths


@pytest.mark.parametrize("kind", ["broken", "late", "rejected", "unfit", "over", "what a later version says"])
def test_a_worker_may_have_worked_on_it(kind):
    """It is refused, at a model that its name does not lead to any more as well: nothing is generated twice."""
    for model in "m", "gone":
        _, step = after_attempts(*plain_start("m", 30.0), [Tried("w1", model, kind)], {}, NOW)
        assert isinstance(step, Refuse)
        assert step.failure.code == "upstream_failed"


def test_attempts_at_a_model_of_another_configuration_do_not_count():
    """Where none has worked on it, the request begins anew."""
    start = plain_start("m", 30.0)
    assert after_attempts(*start, [Tried("w1", "gone", "unreachable")], {}, NOW) == start
