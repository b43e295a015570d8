"""Copies follow the load of their engines: added where they are busy, ended when they are idle and have no request."""

import pytest
import trio
from support.gateway_lives import World, config_of, spec_of

from ichat.config.replicas import Replicas, Scale
from ichat.errors import ApiError
from ichat.placement.estimate import GIB
from ichat.placement.place import PlaceableGpu
from ichat.routing.request import RoutingRequest

SETTINGS = Scale(up_s=10, down_s=60)
BUSY, IDLE = {"running": 8.0}, {"running": 0.0}
"""A gateway of these tests sends a worker eight requests at once, at most."""


def scaled(low, high, version=0, **more):
    return spec_of("a", version, replicas=Replicas(low, high), scale=SETTINGS, **more)


@pytest.fixture(name="begin")
def begin_fixture(nursery, monkeypatch):
    """Start a gateway with these workers, and wait until they are ready: `world = await begin(*specs)`."""

    async def begin(*specs, gpus=0):
        world = World(0, config_of(specs))
        world.gpus = [PlaceableGpu(number, "H100", 80 * GIB) for number in range(gpus)]
        world.failing, world.has_bugs, world.nursery = 0.0, False, nursery
        world.load_s = world.stop_s = dict.fromkeys([f"a-{number}" for number in range(20)], 1)
        world.patch(monkeypatch)
        await world.start_gateway()
        await world.until(lambda states: set(states.values()) <= {"ready", "cold"})
        return world

    return begin


def view(world):
    return world.gateway.supervisor.scaler.view("a")


def values(world, name):
    (found,) = (one for one in world.gateway.supervisor.scaler.families() if one.name == name)
    return {tuple(sample.labels.values()): sample.value for sample in found.samples}


async def test_copies_follow_the_load(autojump_clock, begin):
    """Up while their engines are busy, to the most; back to the fewest when they are idle, in steps of the quiet time."""
    world = await begin(scaled(1, 3))
    await trio.sleep(100)
    assert [*world.states()] == ["a-0"]
    began_at, world.progress = trio.current_time(), BUSY
    await world.until(lambda states: len(states) == 2)
    assert trio.current_time() - began_at <= 10 + 2 * 5 + 5
    await world.until(lambda states: [*states.values()] == ["ready"] * 3)
    await trio.sleep(200)
    assert len(world.states()) == 3
    began_at, world.progress = trio.current_time(), IDLE
    await world.until(lambda states: len(states) == 2)
    assert trio.current_time() - began_at >= 60
    await world.until(lambda states: [*states] == ["a-0"])
    assert trio.current_time() - began_at >= 120
    await trio.sleep(300)
    assert world.states() == {"a-0": "ready"}
    assert (view(world).min, view(world).max, view(world).ready, view(world).load) == (1, 3, 1, 0.0)
    assert (view(world).reason, view(world).changed, view(world).changed_reason) == ("steady", "down", "idle")
    assert values(world, "ichat_replicas") == {("a", "ready"): 1}
    assert values(world, "ichat_replicas_wanted") == {("a",): 1}
    assert sum(values(world, "ichat_scale_decisions").values()) >= 4


async def test_a_copy_with_a_request_is_not_ended(autojump_clock, begin):
    """It gets no more requests, and ends after its last request, however long that lasts."""
    world = await begin(scaled(1, 2))
    world.progress = BUSY
    await world.until(lambda states: [*states.values()] == ["ready"] * 2)
    leases = [world.gateway.balancer.lease(RoutingRequest("a")) for _ in range(2)]
    assert {one.endpoint.id for one in leases} == {b"a-0", b"a-1"}
    world.progress = IDLE
    await world.until(lambda states: "draining" in states.values())
    (name,) = (name for name, state in world.states().items() if state == "draining")
    await trio.sleep(1000)
    assert world.states()[name] == "draining"
    others = [world.gateway.balancer.lease(RoutingRequest("a")) for _ in range(3)]
    assert name.encode() not in {one.endpoint.id for one in others}
    for one in [*leases, *others]:
        one.release()
    await world.until(lambda states: len(states) == 1)


async def test_a_drain_is_taken_back_if_the_load_rises(autojump_clock, begin):
    world = await begin(scaled(1, 2))
    world.progress = BUSY
    await world.until(lambda states: [*states.values()] == ["ready"] * 2)
    pids = {*world.alive}
    leases = [world.gateway.balancer.lease(RoutingRequest("a")) for _ in range(2)]
    world.progress = IDLE
    await world.until(lambda states: "draining" in states.values())
    world.progress = BUSY
    await world.until(lambda states: [*states.values()] == ["ready"] * 2)
    assert pids == {*world.alive}
    for one in leases:
        one.release()


async def test_silent_copies_change_nothing(autojump_clock, begin):
    """Neither more nor fewer copies, while a heartbeat is missing."""
    world = await begin(scaled(1, 3))
    world.progress = BUSY
    await world.until(lambda states: [*states.values()] == ["ready"] * 3)
    for one in world.alive.values():
        one.freeze()
    loads = []
    for _ in range(30):
        await trio.sleep(0.5)
        loads.append(view(world).load)
    assert None in loads
    await trio.sleep(500)
    assert len(world.states()) == 3
    assert view(world).changed == "up"
    for one in world.alive.values():
        one.thawed.set()


async def test_a_reload_keeps_the_number_within_its_bounds(autojump_clock, begin):
    world = await begin(scaled(1, 4))
    world.progress = BUSY
    await world.until(lambda states: [*states.values()] == ["ready"] * 3)
    pids = {*world.alive}
    world.reload(config_of([scaled(1, 5)]))
    await trio.sleep(1)
    assert pids <= {*world.alive}
    world.progress = {"running": 4.0}
    world.reload(config_of([scaled(2, 2)]))
    await world.until(lambda states: [*states.values()] == ["ready"] * 2)
    assert {*world.alive} < pids


async def test_a_copy_that_cannot_start_is_given_up(autojump_clock, begin):
    """The copies that serve stay, and no other copy is tried before the quiet time is over."""
    world = await begin(scaled(1, 3))
    world.failing = 1.0
    world.chance.choice = lambda words: 1 if 64 in words else words[0]
    world.progress = BUSY
    await world.until(lambda states: len(states) == 2)
    await world.until(lambda states: len(states) == 1)
    given_up_at = trio.current_time()
    assert view(world).changed_reason == "failing"
    await world.until(lambda states: len(states) == 2)
    assert trio.current_time() - given_up_at >= 60 - 5


async def test_a_fixed_number_is_left_alone(autojump_clock, begin):
    world = await begin(scaled(2, 2))
    world.progress = BUSY
    await trio.sleep(300)
    assert len(world.states()) == 2
    assert view(world) is None


@pytest.mark.parametrize("progress", [BUSY, IDLE])
async def test_a_copy_above_the_fewest_makes_room_for_a_cold_model(autojump_clock, begin, progress):
    """Busy or not, it ends for the first copy of another model; the last copy of a model and its requests stay."""
    world = await begin(
        scaled(1, 3, gpus=1, gpu_ids=None), spec_of("b", load="on_demand", gpus=1, gpu_ids=None), gpus=2
    )
    world.progress = BUSY
    await world.until(
        lambda states: [states[name] for name in states if name != "b-0"] == ["ready", "ready", "pending"]
    )
    lease = world.gateway.balancer.lease(RoutingRequest("a"))
    held = lease.endpoint.id.decode()
    world.progress = progress
    supervisor = world.gateway.supervisor
    plan = await supervisor.loader.preview("b")
    ((evicted, kind),) = [(one.worker_id, one.kind) for one in plan.evicts]
    assert (evicted != held, kind) == (True, "stop")
    with trio.fail_after(120):
        await supervisor.loader.load("b")
    found = world.states()
    assert (found["b-0"], found[held], len(world.alive)) == ("ready", "ready", 2)
    assert sorted(name for name, state in found.items() if state == "ready") == sorted(["b-0", held])
    assert supervisor.loader.counts.swaps == 1
    lease.release()
    await trio.sleep(300)
    assert world.states()["b-0"] == "ready"


async def test_the_fewest_copies_make_no_room(autojump_clock, begin):
    """A cold model waits for another model's room in vain if all copies there are needed."""
    world = await begin(
        scaled(2, 3, gpus=1, gpu_ids=None), spec_of("b", load="on_demand", gpus=1, gpu_ids=None), gpus=2
    )
    pids = {*world.alive}
    with pytest.raises(ApiError):
        await world.gateway.supervisor.loader.load("b")
    assert {*world.alive} == pids
