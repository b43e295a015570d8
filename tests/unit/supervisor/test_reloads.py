"""Reloads while the workers of the reload before are on their way: in the end the wanted workers run, and no others."""

import time

import pytest
from support.gateway_lives import World, config_of, live, spec_of

from ichat.config.replicas import Replicas
from ichat.observability.logs.lines import Line
from ichat.placement.learnt import MemoryLack

LIVES = 30


@pytest.fixture(name="begin")
def begin_fixture(nursery, monkeypatch):
    """Start a gateway with these workers, and wait until they are ready: `world = await begin(*specs)`."""

    async def begin(*specs):
        world = World(0, config_of(specs))
        world.failing, world.nursery = 0.0, nursery
        world.patch(monkeypatch)
        await world.start_gateway()
        await world.rest()
        return world

    return begin


async def test_a_worker_that_a_later_reload_wants_is_not_ended_by_an_earlier_one(autojump_clock, begin):
    """The earlier reload's new worker may become ready for the later one, beside the worker it was to replace."""
    old, new = spec_of("twin"), spec_of("twin", 1)
    world = await begin(old, old)
    world.load_s = {"twin-1": 30, "twin-2": 9, "twin-3": 1}
    world.reload(config_of([new, new]))
    await world.until(lambda states: "twin-1" not in states)
    states = world.states()
    assert states.pop("twin-2") in ("starting", "loading")
    assert states == {"twin-0": "ready", "twin-3": "ready"}
    world.reload(config_of([old, old]))
    await world.rest()
    assert world.states()["twin-0"] == "ready"


@pytest.mark.parametrize("other", ["cold", "failed"])
async def test_a_worker_that_waits_to_be_wanted_delays_no_restarts_of_copies(autojump_clock, begin, other):
    """The worker has another table of the same model: it is on demand, or has failed for good."""
    table = spec_of("a", **({"load": "on_demand"} if other == "cold" else {}))
    copies = [spec_of("a", version, replicas=Replicas(2, 2)) for version in (1, 2)]
    world = await begin(table, copies[0])
    if other == "failed":
        next(one for one in world.alive.values() if one.spec == table).end(64)
        await world.until(lambda states: other in states.values())
    world.reload(config_of([table, copies[1]]))
    await world.until(lambda _: [one.spec for one in world.alive.values()] == [copies[1]] * 2)
    await world.until(lambda states: sorted(states.values()) == sorted([other, "ready", "ready"]))


async def test_a_worker_on_its_way_is_started_anew_in_its_place(autojump_clock, begin):
    """It serves nothing yet, so nothing comes up beside it; the worker that serves goes when it is ready."""
    world = await begin(spec_of("a"))
    world.load_s = {"a-1": 9}
    world.reload(config_of([spec_of("a", 1)]))
    await world.until(lambda states: states.get("a-1") == "loading")
    world.reload(config_of([spec_of("a", 1)], python="/p2"))
    assert world.states().keys() == {"a-0", "a-1"}
    assert world.states()["a-0"] == "ready"
    await world.rest()
    assert world.states() == {"a-1": "ready"}


async def test_a_new_worker_may_have_the_id_of_a_new_worker_before_it(autojump_clock, begin):
    """The worker that the first of both has replaced is still ending then."""
    world = await begin(spec_of("a"), spec_of("a", 1))
    (slow,) = (one for one in world.alive.values() if one.worker_id == "a-0")
    slow.stop_s = 5
    world.load_s, world.stop_s = {"a-2": 1}, {"a-2": 0}
    world.reload(config_of([spec_of("a", 2), spec_of("a", 1)]))
    await world.until(lambda states: states["a-0"] == "draining")
    world.reload(config_of([spec_of("a", 1)]))
    await world.until(lambda states: "a-2" not in states)
    world.load_s = {"a-2": 9}
    world.reload(config_of([spec_of("a", 3)]))
    assert world.states()["a-0"] == "draining"
    await world.rest()
    assert world.states() == {"a-2": "ready"}


async def test_a_port_moves_to_another_worker(autojump_clock, begin):
    """Its new worker is never refused: the worker that had the port does not keep it until its successor is ready."""
    world = await begin(spec_of("a", port=7000), spec_of("b", port=7001))
    world.load_s = dict.fromkeys(["a-0", "a-1", "b-0", "b-1"], 30)
    world.reload(config_of([spec_of("a", port=7002), spec_of("b", port=7000), spec_of("c", port=7001)]))
    await world.until(lambda states: "failed" in states.values() or set(states.values()) == {"ready"})
    assert "failed" not in world.states().values()
    await world.rest()


async def test_a_follower_replaces_a_follower(autojump_clock, begin):
    """It is never ready for requests itself: it follows the leader of its group."""
    world = await begin(spec_of("a"))
    world.followers = {"a-0", "a-1"}
    await world.until(lambda states: states == {"a-0": "following"})
    world.reload(config_of([spec_of("a", 1)]))
    await world.until(lambda states: states == {"a-1": "following"})


def test_any_life_ends_well(monkeypatch):
    """After any reloads, crashes, launches and ends of the gateway, the wanted workers run, each with one record."""
    for seed in range(LIVES):
        with monkeypatch.context() as patches:
            live(seed, patches)


@pytest.mark.parametrize("is_ready", [False, True])
async def test_a_launch_that_ends_for_lack_of_memory_is_reported(autojump_clock, begin, is_ready):
    """Before it is ready; an engine that has worked before ran out of memory for another reason."""
    world, found = await begin(spec_of("a")), []
    world.gateway.supervisor._context.lacked.add(lambda *lack: found.append(lack))
    world.load_s = {"b-0": 1 if is_ready else 30}
    world.reload(config_of([spec_of("a"), spec_of("b")]))
    await world.until(lambda states: states.get("b-0") == ("ready" if is_ready else "loading"))
    (process,) = (one for one in world.alive.values() if one.worker_id == "b-0")
    world.gateway.logs.lines["b-0"] = [Line(1, time.time(), "torch.OutOfMemoryError: CUDA out of memory. Tried")]
    process.end(70)
    await world.until(lambda _: any(one.worker_id == "b-0" for one in world.alive.values()))
    assert found == ([] if is_ready else [(spec_of("b"), MemoryLack())])
