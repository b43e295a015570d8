"""Copies of a worker: so many run as are wanted, each with its number, and a reload restarts one after the other."""

import pytest
import trio
from support.gateway_lives import World, config_of, live, spec_of

from ichat.config.copies import with_replicas
from ichat.config.replicas import Replicas
from ichat.errors import ApiError
from ichat.supervisor.restarts import ModelCopy, next_restart


def copies_of(model, count, version=0, **more):
    return spec_of(model, version, replicas=Replicas(count, count), **more)


@pytest.fixture(name="begin")
def begin_fixture(nursery, monkeypatch):
    """Start a gateway with these workers, and wait until they are ready: `world = await begin(*specs)`."""

    async def begin(*specs):
        world = World(0, config_of(specs))
        world.failing, world.has_bugs, world.nursery = 0.0, False, nursery
        world.patch(monkeypatch)
        await world.start_gateway()
        await world.rest()
        return world

    return begin


def ready(world):
    return {name for name, state in world.states().items() if state == "ready"}


def numbers(world):
    return {one.id: (one.record.copy_number, one.record.copies_wanted) for one in world.gateway.workers}


def scale(world, model, low, high=None):
    return world.gateway.supervisor.copies.scale(model, Replicas(low, low if high is None else high))


# The order of restarts.


@pytest.mark.parametrize(
    ("copies", "restarted"),
    [
        ("", None), ("s", None), ("sw", 0), ("sw sw", 0), ("s sw", 1),
        ("- sw", None), ("sw -", None), ("sw -w", 1), ("-w -w", 0), ("-w -", 0), ("s -", None),
    ],
)  # fmt: skip
def test_one_copy_at_a_time_is_restarted(copies, restarted):
    """A copy that serves nothing is always next; one that serves is, if all others serve (s: serves, w: waits)."""
    found = [ModelCopy(str(index), "s" in one, "w" in one) for index, one in enumerate(copies.split())]
    assert next_restart(found) == (None if restarted is None else str(restarted))


# Their lives.


async def test_a_table_has_its_number_of_copies(autojump_clock, begin):
    """Each has an id and a number of its own; a worker without `replicas` has none."""
    world = await begin(copies_of("a", 3), spec_of("b"))
    assert ready(world) == {"a-0", "a-1", "a-2", "b-0"}
    assert numbers(world) == {"a-0": (1, 3), "a-1": (2, 3), "a-2": (3, 3), "b-0": (0, 0)}


async def test_a_copy_that_dies_comes_back_and_the_others_serve(autojump_clock, begin):
    world = await begin(copies_of("a", 3))
    (victim,) = (one for one in world.alive.values() if one.worker_id == "a-1")
    victim.end(-9)
    await world.until(lambda states: states["a-1"] == "restarting")
    assert ready(world) == {"a-0", "a-2"}
    await world.until(lambda states: set(states.values()) == {"ready"})
    assert numbers(world)["a-1"] == (2, 3)


async def test_copies_are_restarted_for_ever(autojump_clock, begin):
    """A worker without copies fails for good after five ends in a row, a copy does not."""
    world = await begin(copies_of("a", 2), spec_of("b"))
    world.failing = 1.0
    world.chance.choice = lambda words: 1 if 64 in words else words[0]
    for one in [*world.alive.values()]:
        one.end(-9)
    await world.until(lambda states: states["b-0"] == "failed")
    for _ in range(100):
        await world.until(lambda states: states["a-0"] != "restarting")
        await world.until(lambda states: states["a-0"] == "restarting")
    world.failing = 0.0
    world.chance.choice = lambda words: words[0]
    await world.until(lambda states: states["a-0"] == states["a-1"] == "ready")


# Reloads.


async def test_a_changed_number_restarts_nothing(autojump_clock, begin):
    """More copies start beside those that run; of fewer, copies that serve nothing go first, then the youngest."""
    world = await begin(copies_of("a", 2))
    pids = {one.worker_id: one.pid for one in world.alive.values()}
    world.load_s = {"a-2": 50, "a-3": 1}
    world.reload(config_of([copies_of("a", 4)]))
    await world.until(lambda states: states.get("a-3") == "ready")
    world.reload(config_of([copies_of("a", 3)]))
    await world.rest()
    assert ready(world) == {"a-0", "a-1", "a-3"}
    assert numbers(world) == {"a-0": (1, 3), "a-1": (2, 3), "a-3": (3, 3)}
    world.reload(config_of([copies_of("a", 2)]))
    await world.rest()
    assert {one.worker_id: one.pid for one in world.alive.values()} == pids


@pytest.mark.parametrize("gpus", [[], None])
async def test_copies_are_restarted_one_after_the_other(autojump_clock, begin, gpus):
    """At least two of three serve all the while, where both processes find room at once, and where they do not."""
    world = await begin(copies_of("a", 3, gpu_ids=gpus))
    world.load_s = dict.fromkeys([f"a-{number}" for number in range(6)], 10)
    few = []
    world.gateway.fleet.table.changed.add(lambda: few.append(len(ready(world))))
    world.reload(config_of([copies_of("a", 3, version=1, gpu_ids=gpus)]))
    await world.rest()
    assert min(few) >= 2
    assert {one.spec.backend_args["v"] for one in world.alive.values()} == {1}
    assert [number for number, _ in sorted(numbers(world).values())] == [1, 2, 3]


async def test_a_table_that_cannot_be_loaded_costs_one_copy(autojump_clock, begin):
    """The others keep their table until the file is right again."""
    world = await begin(copies_of("a", 3, gpu_ids=None))
    world.load_s = {"a-0": 10_000}
    world.reload(config_of([copies_of("a", 3, version=1, gpu_ids=None)]))
    await world.until(lambda states: states["a-0"] == "loading")
    await trio.sleep(300)
    assert ready(world) == {"a-1", "a-2"}
    assert {one.worker_id: one.spec.backend_args["v"] for one in world.alive.values()} == {"a-0": 1, "a-1": 0, "a-2": 0}
    world.load_s = {}
    world.reload(config_of([copies_of("a", 3, version=2, gpu_ids=None)]))
    await world.rest()
    assert {one.spec.backend_args["v"] for one in world.alive.values()} == {2}


# Operators.


async def test_an_operator_changes_the_number(autojump_clock, begin):
    """A reload that names no other number keeps it, and a reload of a changed number ends it."""
    world = await begin(copies_of("a", 2), spec_of("b"))
    scaled = scale(world, "a", 3)
    assert (scaled.started, scaled.ending) == (["a-2"], [])
    await world.until(lambda states: states.get("a-2") == "ready")
    world.reload(config_of([copies_of("a", 2), spec_of("b", 1)]))
    await world.rest()
    assert len(ready(world)) == 4
    world.reload(config_of([copies_of("a", 1), spec_of("b", 1)]))
    await world.rest()
    assert "a-1" not in ready(world)
    world.reload(config_of([copies_of("a", 2), spec_of("b", 1)]))
    await world.rest()
    assert len(ready(world)) == 3
    scaled = scale(world, "b", 2)
    assert len(scaled.started) == 1
    await world.rest()
    assert len(ready(world)) == 4


@pytest.mark.parametrize("later", [[spec_of("a", port=7000)], [spec_of("a"), spec_of("a", 1)]])
async def test_a_table_that_rules_the_number_out_ends_it(autojump_clock, begin, later):
    """A reload may give the only table a port, or the model a second table: then the file's number counts."""
    world = await begin(spec_of("a"))
    scale(world, "a", 3)
    await world.rest()
    world.reload(config_of(later))
    await world.rest()
    assert len(ready(world)) == len(later)


async def test_the_next_gateway_keeps_the_number(autojump_clock, begin):
    world = await begin(copies_of("a", 1, on_gateway_exit="keep"))
    scale(world, "a", 3)
    await world.rest()
    pids = {*world.alive}
    await world.kill_gateway()
    await world.rest()
    assert ready(world) == {"a-0", "a-1", "a-2"}
    assert pids == {*world.alive}


async def test_launched_copies_have_numbers_too(autojump_clock, begin):
    """Another number is kept with them, for the next gateway as well."""
    world = await begin(spec_of("b"))
    launched = await world.gateway.supervisor.launch(copies_of("a", 2))
    assert [one.id for one in launched] == ["a-0", "a-1"]
    world.launched = {"a-0", "a-1"}
    await world.rest()
    assert scale(world, "a", 1).ending == ["a-1"]
    world.launched = {"a-0"}
    await world.rest()
    await world.stop_gateway()
    await world.rest()
    assert ready(world) == {"a-0", "b-0"}


async def test_no_copy_means_on_demand(autojump_clock, begin):
    """With a `min` of 0 the model is loaded on demand, and with 1 its worker runs again."""
    world = await begin(copies_of("a", 1))
    scale(world, "a", 0, 1)
    (worker,) = world.gateway.workers
    assert worker.is_on_demand
    assert ready(world) == {"a-0"}
    await world.gateway.supervisor.loader.unload("a", 0)
    await world.until(lambda states: states == {"a-0": "cold"})
    scale(world, "a", 1)
    await world.until(lambda states: states == {"a-0": "ready"})


@pytest.mark.parametrize(
    ("specs", "model", "count", "code", "words"),
    [
        ([spec_of("a")], "x", 1, "model_not_found", "x"),
        ([spec_of("a"), spec_of("a", 1)], "a", 1, "several_tables", "2 tables"),
        ([spec_of("a", port=7000)], "a", 2, "bad_request", "two copies cannot have the same port"),
    ],
)
async def test_a_number_that_cannot_be_is_refused(autojump_clock, begin, specs, model, count, code, words):
    world = await begin(*specs)
    before = {*world.states()}
    with pytest.raises(ApiError, match=words) as caught:
        scale(world, model, count)
    assert caught.value.code == code
    assert {*world.states()} == before


async def test_copies_on_their_way_to_another_table_keep_their_number(autojump_clock, begin):
    world = await begin(copies_of("a", 2))
    world.load_s = {"a-2": 10}
    world.reload(config_of([copies_of("a", 2, version=1)]))
    await world.until(lambda states: states.get("a-2") == "loading")
    with pytest.raises(ApiError, match="is being replaced after a reload"):
        scale(world, "a", 3)
    assert world.gateway.supervisor.change_under_way()
    await world.rest()
    assert not world.gateway.supervisor.change_under_way()


def test_a_number_of_copies_decides_about_the_load():
    """Nothing but a `min` of 0 loads a model on demand, and a table that said so itself keeps that."""
    assert with_replicas(spec_of("a"), Replicas(0, 1)).load == "on_demand"
    assert with_replicas(with_replicas(spec_of("a"), Replicas(0, 1)), Replicas(2, 2)).load == "start"
    assert with_replicas(spec_of("a", load="on_demand"), Replicas(1, 1)).load == "on_demand"


def test_a_life_with_copies_ends_well(monkeypatch):
    """After any reloads, crashes, changes of the number and ends of the gateway, the wanted copies run."""
    for seed in range(100, 110):
        with monkeypatch.context() as patches:
            live(seed, patches)
