"""Room for workers whose GPUs the gateway chooses: the place that costs least, then all of it with real lives."""

import attrs
import pytest
import trio

from ichat.placement.estimate import GIB
from ichat.placement.place import PlaceableGpu
from ichat.preflight.claims import Claims
from ichat.routing.queue import Demand
from ichat.supervisor.swaps import SwapAction, SwapCandidate, decide
from tests.unit.supervisor.test_books import Site
from tests.unit.supervisor.test_swaps import NOW, one


@pytest.fixture(autouse=True)
def in_virtual_time(autojump_clock):
    """Let no test wait for real."""


def alone(*numbers):
    return Claims(dict.fromkeys(numbers, float("inf")))


def held(candidate, claims):
    """Return a candidate with these claims; the simulation's own have conflicts in place of them."""
    names = [field.name for field in attrs.fields(SwapCandidate)]
    return SwapCandidate(**{**{name: getattr(candidate, name) for name in names}, "claims": claims})


def wanting(model, *places):
    return attrs.evolve(held(one(model), Claims()), places=places)


def actions_of(workers, **since):
    return decide(NOW, workers, {model: Demand(1, NOW - age_s) for model, age_s in since.items()}, ()).actions


def test_a_free_place_is_taken_before_an_eviction():
    """Of several free places the first is chosen; the start says which."""
    idle = held(one("b", "ready"), alone(0))
    assert actions_of([wanting("a", alone(0), alone(1), alone(2)), idle], a=1) == [
        SwapAction("start", "a-0", "request", alone(1))
    ]


def test_the_place_that_costs_least_is_freed():
    """A worker in use keeps its GPU where an idle worker can go."""
    busy, idle = held(one("b", "ready", requests=1), alone(0)), held(one("c", "ready"), alone(1))
    assert actions_of([busy, wanting("a", alone(0), alone(1)), idle], a=1) == [SwapAction("stop", "c-0", "room")]


def spare(model, phase, numbers, **more):
    return attrs.evolve(held(one(model, phase, **more), alone(*numbers)), is_spare=True)


def test_a_spare_copy_is_the_first_to_go():
    """Before an idle model of the same cost, also while it loads; it goes for good, and is never started or resumed."""
    idle, cold = held(one("b", "ready"), alone(0)), wanting("a", alone(0), alone(1))
    for copy in (spare("c", "ready", [1]), spare("c", "starting", [1]), spare("c", "draining", [1])):
        assert actions_of([idle, cold, copy], a=1) == [SwapAction("end", "c-0", "room")]
        assert actions_of([copy]) == []
        assert actions_of([copy], c=1) == []


def test_a_busy_spare_copy_has_its_time():
    """A free place and an idle model are preferred; without either it goes when it has had its time."""
    cold, busy = wanting("a", alone(0), alone(1)), spare("c", "ready", [1], requests=1)
    assert actions_of([cold, busy], a=1) == [SwapAction("start", "a-0", "request", alone(0))]
    assert actions_of([cold, busy, held(one("b", "ready"), alone(0))], a=1)[0].worker_id == "b-0"
    only = wanting("a", alone(1))
    assert actions_of([only, attrs.evolve(busy, ready_since=NOW - 1)], a=1) == []
    assert actions_of([only, attrs.evolve(busy, ready_since=NOW - 60)], a=1) == [SwapAction("end", "c-0", "room")]


def test_two_models_do_not_get_the_same_place():
    """A place is kept for the older waiter, also in the same decision, and while its start is under way."""
    workers = [wanting("a", alone(0), alone(1)), wanting("b", alone(0), alone(1))]
    assert actions_of(workers, a=1, b=2) == [
        SwapAction("start", "b-0", "request", alone(0)), SwapAction("start", "a-0", "request", alone(1)),
    ]  # fmt: skip
    starting = held(one("b", "starting"), alone(0))
    assert actions_of([workers[0], starting], a=1) == [SwapAction("start", "a-0", "request", alone(1))]
    assert actions_of([wanting("a", alone(0)), starting], a=1) == []


async def test_models_on_demand_alternate_on_the_gpus_that_are_there(autojump_clock, nursery, tmp_path):
    """Three models, two GPUs of which a worker has one for good: every request is answered, by one model at a time."""
    site = Site(nursery, tmp_path)
    permanent = site.start("p", gpus=1)
    await site.until(lambda: site.state(permanent) == "ready")
    for name in "abc":
        site.add(name, gpus=1, gpu_ids=None)
    crowded = []

    def watch():
        places = [tuple(process.spec.gpu_ids) for process in site.alive]
        crowded.extend(place for place in places if places.count(place) > 1)

    site.fleet.table.changed.add(watch)
    async with trio.open_nursery() as asking:
        for name in "abcab":
            asking.start_soon(site.answered, name, 1.0)
    await site.answered("c")
    assert crowded == []
    assert site.places()["p"] != site.places()["c"]
    assert site.loader.counts.swaps >= 2


async def test_shares_on_demand_stand_side_by_side(autojump_clock, nursery, tmp_path):
    """Models whose shares fit together are loaded on the same GPU, and nothing is evicted for them."""
    site = Site(nursery, tmp_path, count=1)
    for name in "abc":
        site.add(name, gpus=0.3, gpu_ids=None)
    for name in "abc":
        await site.answered(name)
    assert site.places() == {"a": [0], "b": [0], "c": [0]}
    assert site.loader.counts.swaps == 0


async def test_a_lost_gpu_is_no_place_for_a_load(autojump_clock, nursery, tmp_path):
    """The other GPU is emptied, though its worker was used last."""
    site = Site(nursery, tmp_path)
    for name in "abc":
        site.add(name, gpus=1, gpu_ids=None)
    await site.answered("a")
    await site.answered("b")
    assert sorted(site.places()) == ["a", "b"]
    lost = site.places()["a"][0]
    site.launcher.machine = [
        PlaceableGpu(n, "H100", 80 * GIB, trouble="does not answer" if n == lost else "") for n in range(2)
    ]
    await trio.sleep(10)
    await site.answered("c")
    assert site.places() == {"a": [lost], "c": [1 - lost]}
