"""Room for on-demand workers on a cluster, which itself chooses the node: who goes while one waits. In virtual time."""

import math
from collections import Counter

import attrs
import pytest
import trio

from ichat.listeners import Listeners
from ichat.routing.availability import Loadable
from ichat.routing.queue import Demand
from ichat.supervisor.remote_rooms import CROWDED_S, LOOK_S, SETTLE_S, LeftRoom, left_after
from ichat.supervisor.remote_wait import RemoteLack, RemoteRoom, RemoteWait
from ichat.supervisor.swaps import SwapAction, SwapCandidate, decide
from tests.unit.supervisor.test_loader import END_S, LOAD_S, Process, Rig

NOW = 1000.0


def worker(model, phase="ready", requests=0, **more):
    idle_since = math.inf if requests else NOW - 50
    times = {"ready_since": NOW - 100, "idle_since": idle_since} if phase in ("ready", "draining") else {}
    return SwapCandidate(f"{model}-0", model, phase, requests, **{**times, **more})


def waiting(*rooms, evict_at=NOW, model="a", gpus=2, unplaced=9):
    found = [RemoteRoom(f"n{number}", lacks, held) for number, (lacks, held) in enumerate(rooms)]
    return worker(model, "starting", remote=RemoteWait(gpus, unplaced, evict_at, found))


def decided(*workers, **since):
    """Return the decision, where requests wait for models since so many seconds."""
    return decide(NOW, workers, {model: Demand(1, NOW - age_s) for model, age_s in since.items()}, ())


def stops(*models):
    return [SwapAction("stop", f"{model}-0", "room") for model in models]


def test_an_idle_worker_goes_for_a_wait_on_a_cluster():
    """Not before its time, for no model that no request waits for, and only as many as are needed."""
    held = waiting((2, {"b-0": 2, "c-0": 2}))
    idle, used = worker("b"), worker("c", idle_since=NOW - 10)
    assert decided(held, used, idle, a=9).actions == stops("b")
    assert decided(held, used, idle).actions == []
    early = decided(attrs.evolve(held, remote=attrs.evolve(held.remote, evict_at=NOW + 3)), idle, a=9)
    assert (early.actions, early.look_at) == ([], NOW + 3)
    both = waiting((4, {"b-0": 2, "c-0": 2}))
    assert decided(both, used, idle, a=9).actions == stops("b", "c")


def test_too_few_gpus_evict_nothing():
    """Neither do workers that load, or a worker in use that had less than its time."""
    held = waiting((4, {"b-0": 2, "c-0": 1}))
    assert decided(held, worker("b"), worker("c"), a=9).actions == []
    assert decided(waiting((2, {"b-0": 2})), worker("b", "starting"), a=9).actions == []
    busy = worker("b", requests=1, ready_since=NOW - 10)
    later = decided(waiting((2, {"b-0": 2})), busy, a=9)
    assert (later.actions, later.look_at) == ([], NOW + 20)


def test_the_node_that_costs_least_is_emptied():
    held = waiting((4, {"b-0": 2, "c-0": 2}), (4, {"d-0": 4}))
    idle = [worker(name) for name in "bcd"]
    assert decided(held, *idle, a=9).actions == stops("d")
    assert decided(held, *idle[:2], worker("d", requests=1), a=9).actions == stops("b", "c")


def test_a_busy_worker_is_drained_and_stays_so_until_it_goes():
    busy, held = worker("b", requests=1), waiting((2, {"b-0": 2}))
    assert decided(held, busy, a=9).actions == [SwapAction("drain", "b-0", "room")]
    drained = attrs.evolve(busy, phase="draining")
    for at in (NOW, NOW + 5):
        assert decided(attrs.evolve(held, remote=attrs.evolve(held.remote, evict_at=at)), drained, a=9).actions == []
    assert decided(drained).actions == [SwapAction("resume", "b-0", "room")]


def test_two_waiters_have_room_at_once():
    """Each has other workers go: neither the room that another leaves for the first, nor more than is unplaced."""
    rooms = (2, {"b-0": 2}), (2, {"c-0": 2})
    first, second = waiting(*rooms), waiting(*rooms, model="d")
    idle = [worker("b"), worker("c", idle_since=NOW - 10)]
    assert decided(second, first, *idle, a=9, d=8).actions == stops("b", "c")
    going = attrs.evolve(idle[0], phase="ending")
    assert decided(first, second, going, idle[1], a=9, d=8).actions == stops("c")
    alone = [waiting(*rooms, model=name, unplaced=1) for name in "ad"]
    assert decided(*alone, *idle, a=9, d=8).actions == stops("b")
    assert decided(*alone, going, idle[1], a=9, d=8).actions == []


def test_room_is_for_one_waiter():
    """What a node has free, or a large worker leaves, is the next waiter's only as far as the first leaves it."""
    idle = [worker(name) for name in "bc"]
    free = [waiting((0, {"b-0": 2, "c-0": 2}), model=name) for name in "ad"]
    assert decided(*free, *idle, a=9, d=8).actions == stops("b")
    large = [waiting((2, {"b-0": 4, "c-0": 4}), model=name) for name in "ad"]
    assert decided(*large, *idle, a=9, d=8).actions == stops("b")
    part = [waiting((1, {"b-0": 1, "c-0": 2}), model=name) for name in "ad"]
    assert decided(*part, *idle, a=9, d=8).actions == stops("b", "c")


def test_room_that_was_left_is_that_of_the_next_worker():
    """Until it is there, or for as long as the figures may be old."""
    left = left_after((), {"a-0": ("n1", 4.0), "b-0": ("n2", 2.0)}, {"b-0": ("n2", 2.0)}, 0.0)
    assert left == [LeftRoom("n1", 4.0, SETTLE_S)]
    assert left_after(left, {}, {}, SETTLE_S) == []
    assert left_after(left, {}, {"c-0": ("n1", 3.0)}, 1.0) == [LeftRoom("n1", 1.0, SETTLE_S)]
    assert left_after(left, {}, {"c-0": ("n1", 3.0), "d-0": ("n1", 2.0)}, 1.0) == []
    assert left_after(left, {}, {"c-0": ("n2", 4.0)}, 1.0) == left


class Cluster:
    """Nodes of four GPUs; `late_s` is how old its figures are, `start_s` the time from a place to the first process."""

    late_s, start_s = 0.0, 0.0

    def __init__(self, *nodes):
        self.free, self.demand, self.changed = dict.fromkeys(nodes, 4.0), Counter(), Listeners()
        self.shown = dict(self.free), Counter()

    def lacking(self, spec):
        free, demand = self.shown
        able = {name: spec.gpus - one for name, one in free.items() if spec.gpus <= 4}
        return RemoteLack(demand[spec.gpus], able) if demand[spec.gpus] else RemoteLack()

    async def show(self):
        seen = dict(self.free), self.demand.copy()
        await trio.sleep(self.late_s)
        self.shown = seen


class RemoteProcess(Process):
    """A launch on the cluster: it waits until a node has room."""

    def __init__(self, rig, record, spec):
        self.waits_for, self.changed = "It waits for GPUs.", Listeners()
        super().__init__(rig, record, spec)

    def heartbeat(self, state, **more):
        if self.node_id:
            super().heartbeat(state, **more)

    async def wait_change(self):
        await self.changed.wait()

    async def _load(self):
        cluster, gpus = self.rig.cluster, self.spec.gpus
        cluster.demand[gpus] += 1
        while not (able := [name for name, free in cluster.free.items() if free >= gpus]):
            self._show()
            await cluster.changed.wait()
        cluster.demand[gpus] -= 1
        if not self.has_ended:
            cluster.free[able[0]] -= gpus
            self._show()
            await trio.sleep(cluster.start_s)
            self.node_id, self.waits_for = able[0], ""
            self._tell()
            self.heartbeat("loading")
            await super()._load()

    def _show(self):
        self.rig.nursery.start_soon(self.rig.cluster.show)

    def _tell(self):
        self.changed()
        self.rig.fleet.table.changed()

    def kill(self, code=-9):
        if not self.has_ended and self.node_id:
            self.rig.cluster.free[self.node_id] += self.spec.gpus
            self._show()
            self.rig.cluster.changed()
        super().kill(code)


class RemoteRig(Rig):
    process_class = RemoteProcess

    def __init__(self, nursery, tmp_path, *nodes):
        super().__init__(nursery, tmp_path)
        self.cluster = self.context.clusters["ray"] = Cluster(*nodes)

    def add_elsewhere(self, name, gpus):
        return self.add(name, on="ray", gpus=gpus, gpu_ids=None)

    def loaded(self):
        return sorted(one.record.id for one in self.alive if one.node_id)


@pytest.fixture(autouse=True)
def in_virtual_time(autojump_clock):
    """Let no test wait for real."""


async def test_models_alternate_on_a_cluster(autojump_clock, nursery, tmp_path):
    """With room for two of three models each request is answered: the model that is idle longest goes, and only it."""
    rig = RemoteRig(nursery, tmp_path, "n1", "n2")
    for name in "abc":
        rig.add_elsewhere(name, 3)
    await rig.answered("a")
    await rig.answered("b")
    assert (rig.loaded(), rig.loader.counts.swaps) == (["a", "b"], 0)
    began_at = trio.current_time()
    await rig.answered("c")
    assert (rig.loaded(), rig.loader.counts.swaps) == (["b", "c"], 1)
    assert trio.current_time() - began_at < CROWDED_S + 2 * LOAD_S
    await rig.answered("a")
    assert (rig.loaded(), rig.loader.counts.swaps) == (["a", "c"], 2)


@pytest.mark.parametrize("late_s", [0.0, SETTLE_S - 5])
async def test_two_waiting_models_are_served_at_once(autojump_clock, nursery, tmp_path, late_s):
    """Also where the second begins to wait while a worker goes for the first; and the figures may be old."""
    rig = RemoteRig(nursery, tmp_path, "n1", "n2")
    rig.cluster.late_s, rig.cluster.start_s = late_s, 4.0
    for name in "abcd":
        rig.add_elsewhere(name, 4)
    await rig.answered("a")
    await rig.answered("b")
    await trio.sleep(60)
    began_at = trio.current_time()
    async with trio.open_nursery() as asking:
        asking.start_soon(rig.answered, "c")
        await trio.sleep(CROWDED_S - 1)
        asking.start_soon(rig.answered, "d")
    assert (rig.loaded(), rig.loader.counts.swaps) == (["c", "d"], 2)
    took_s = trio.current_time() - began_at
    assert took_s < 2 * (CROWDED_S + LOOK_S) + END_S + rig.cluster.start_s + LOAD_S + late_s


async def test_a_quick_answer_counts(autojump_clock, nursery, tmp_path):
    """A model is not taken for one that was loaded in vain where its request has ended before the loader looked."""
    rig = RemoteRig(nursery, tmp_path, "n1", "n2")
    for name in "abc":
        rig.add_elsewhere(name, 4)
    await rig.answered("a", work_s=5)
    await rig.answered("b")
    await trio.sleep(60)
    await rig.answered("c")
    assert rig.loaded() == ["b", "c"]


async def test_a_request_waits_with_a_worker_that_waits(autojump_clock, nursery, tmp_path):
    """Also a request that arrives meanwhile: the room is made for it."""
    rig = RemoteRig(nursery, tmp_path, "n1")
    rig.add_elsewhere("a", 4)
    rig.add_elsewhere("b", 4)
    await rig.answered("a")
    async with trio.open_nursery() as asking:
        asking.start_soon(rig.answered, "b")
        await rig.until(lambda: rig.fleet.table.state(rig.workers["b"].record) == "pending")
        asking.start_soon(rig.answered, "b")
    assert rig.loaded() == ["b"]


async def test_old_figures_evict_no_second_worker(autojump_clock, nursery, tmp_path):
    """The cluster has given the room away already, while its figures still say that there is none."""
    rig = RemoteRig(nursery, tmp_path, "n1", "n2")
    rig.cluster.late_s, rig.cluster.start_s = SETTLE_S - 5, 8.0
    for name in "abc":
        rig.add_elsewhere(name, 4)
    await rig.answered("a")
    await rig.answered("b")
    await trio.sleep(60)
    await rig.answered("c")
    await trio.sleep(60)
    assert (rig.loaded(), rig.loader.counts.swaps) == (["b", "c"], 1)


async def test_a_launch_with_a_place_evicts_nothing_while_it_begins(autojump_clock, nursery, tmp_path):
    """No node has free GPUs any more, and the launch has no process yet; the cluster waits for no room."""
    rig = RemoteRig(nursery, tmp_path, "n1", "n2")
    rig.cluster.start_s = 3 * CROWDED_S
    rig.add_elsewhere("a", 4)
    rig.add_elsewhere("b", 4)
    await rig.answered("a")
    await rig.answered("b")
    assert (rig.loaded(), rig.loader.counts.swaps) == (["a", "b"], 0)


async def test_a_worker_that_no_node_could_hold_evicts_nothing(autojump_clock, nursery, tmp_path):
    rig = RemoteRig(nursery, tmp_path, "n1")
    rig.add_elsewhere("a", 4)
    rig.add_elsewhere("b", 5)
    await rig.answered("a")
    assert isinstance(await rig.lease("b"), Loadable)
    assert (rig.loaded(), rig.loader.counts.swaps) == (["a"], 0)
