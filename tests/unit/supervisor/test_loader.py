"""Loads on demand in virtual time: the real workers' lives and the real decisions, with processes that are objects."""

import contextlib
import itertools
import logging

import attrs
import pytest
import trio
import trio.testing

from ichat.config.schema import Config, ManagedWorkerConfig, Restart, Routing, SwapSetConfig, Timeouts
from ichat.errors import ApiError
from ichat.fleet.fleet import Fleet
from ichat.fleet.waiting import wait_lease
from ichat.hardware.gpus import GpuReader
from ichat.preflight.claims import claims_of
from ichat.protocol.messages import Heartbeat
from ichat.routing.balancer import Balancer
from ichat.routing.request import Lease, RoutingRequest
from ichat.supervisor import loader as loader_module
from ichat.supervisor.context import SupervisorContext
from ichat.supervisor.loader import Loader
from ichat.supervisor.local_launcher import LocalLauncher
from ichat.supervisor.managed_worker import ManagedWorker
from ichat.supervisor.state import StateDirectory

LOAD_S, END_S, SLEEP_S, WAKE_S = 20.0, 2.0, 3.0, 4.0
TIMEOUTS = Timeouts(load_wait_s=600, drain_s=30)
pids = itertools.count(1_000_001)


class LogStore:
    """The output of workers that write nothing."""

    def path_of(self, worker_id):
        return ""

    def last_lines(self, worker_id, count):
        return []

    tail = last_lines

    def expect(self, worker_id):
        pass

    def finish(self, worker_id):
        pass

    def forget(self, worker_id):
        pass

    async def end(self, worker_id):
        await trio.lowlevel.checkpoint()


class Process:
    """One start of a worker: loads for LOAD_S, or fails then."""

    is_adopted = False
    identity = ""

    def __init__(self, rig, record, spec):
        self.pid, self.spec, self.returncode = next(pids), spec, None
        self.rig, self.record, self.ended = rig, record, trio.Event()
        rig.alive.append(self)
        rig.starts.append((trio.current_time(), spec.model_name))
        self.heartbeat("loading")
        rig.nursery.start_soon(self._load)

    @property
    def has_ended(self):
        return self.ended.is_set()

    def heartbeat(self, state, **more):
        beat = Heartbeat(self.record.id, self.spec.model_name, "127.0.0.1", 9, state=state, start_id=str(self.pid),
                         pid=self.pid, heartbeat_interval=3600.0, can_sleep=True, **more)  # fmt: skip
        self.rig.fleet.registry.record_heartbeat(beat)

    async def _load(self):
        await trio.sleep(LOAD_S)
        if not self.has_ended:
            if self.spec.model_name in self.rig.failing:
                self.kill(70)
            else:
                self.heartbeat("ready")

    def kill(self, code=-9):
        if not self.has_ended:
            self.returncode = code
            self.ended.set()

    waits_for, node_id, had_no_place, reported_end, is_unanswered = "", "", False, None, False

    async def wait_change(self):
        await trio.sleep_forever()

    async def lower_priority(self):
        await trio.lowlevel.checkpoint()

    async def wait(self):
        await self.ended.wait()

    async def end(self, stop_s, hurry):
        await trio.sleep(END_S)
        self.kill(0)
        self.rig.alive.remove(self)

    async def sweep(self, family):
        self.rig.alive.remove(self)

    def close(self):
        pass


class Memory:
    """Saves nothing."""

    launches = 0

    def save_soon(self):
        pass

    async def save(self):
        await trio.lowlevel.checkpoint()

    def next_launch(self):
        self.launches += 1
        return self.launches

    def objections_to(self, spec):
        return ()


class Context(SupervisorContext):
    """Starts processes that are objects; nothing keeps them from starting."""

    rig: "Rig"

    async def preflight(self, spec, others):
        await trio.sleep(1)
        assert not [one for one in others.values() if one.port and one.port == spec.port]
        return self.rig.problems

    async def spawn(self, worker, spec, launch):
        await trio.lowlevel.checkpoint()
        return self.rig.process_class(self.rig, worker, spec)

    async def change_engine(self, worker, to):
        if to == "ready":
            self.rig.process(worker.id).heartbeat("waking")
        await self.rig.change(worker, to, WAKE_S if to == "ready" else SLEEP_S)


class NoCopies:
    """No model has copies."""

    def spare(self):
        return []


class Rig:
    """A fleet, a balancer, a loader and workers."""

    process_class = Process

    def __init__(self, nursery, tmp_path, sets=(), **restart):
        self.nursery = nursery
        self.alive, self.starts, self.failing, self.problems = [], [], set(), []
        self.refusals = {"asleep": [], "ready": []}
        self.fleet = Fleet({}, trio.current_time, 10)
        self.balancer = Balancer(self.fleet.directory.availability, trio.current_time, Routing())
        self.fleet.table.changed.add(self.balancer.dispatch_waiting)
        restart = Restart(**{"first_s": 5.0, "attempts_max": 3, **restart})
        config = Config(timeouts=TIMEOUTS, restart=restart, swap_sets=[SwapSetConfig(list(one)) for one in sets])
        state = StateDirectory(str(tmp_path), str(tmp_path))
        parts = self.fleet.table, self.fleet.directory, self.fleet.managed
        self.context = Context(config, *parts, LocalLauncher(state, LogStore(), GpuReader()), Memory())
        self.context.rig = self
        self.workers = {}
        self.loader = Loader(self.context, self.balancer, self.workers, NoCopies())
        nursery.start_soon(self.loader.run_forever)

    def add(self, name, **more):
        spec = ManagedWorkerConfig(name, "/m", load="on_demand", **{"min_loaded_s": 0.0, "gpu_ids": [], **more})
        worker = self.workers[name] = ManagedWorker(name, spec, self.context, self.workers, is_launched=False)
        self.nursery.start_soon(worker.run)
        self.loader.review()
        return worker

    async def lease(self, model):
        """Wait for a lease as a request does; return it, or the refusal."""
        request = RoutingRequest(model)
        found = self.balancer.lease(request)
        return found if isinstance(found, Lease) else await wait_lease(
            self.balancer, request, 30, lambda _: TIMEOUTS.load_wait_s
        )  # fmt: skip

    async def answered(self, model, work_s=0.0):
        lease = await self.lease(model)
        assert isinstance(lease, Lease), lease
        await trio.sleep(work_s)
        lease.release()

    async def until(self, condition, within_s=600):
        with trio.fail_after(within_s):
            while not condition():
                await trio.sleep(0.1)

    async def change(self, worker, state, within_s):
        """Have an engine sleep or wake, unless there is a refusal left."""
        process = self.process(worker.id)
        for _ in range(int(within_s)):
            await trio.sleep(1)
            if process.has_ended:
                raise ConnectionError("it has ended")
        if self.refusals[state]:
            raise self.refusals[state].pop()
        process.heartbeat(state)

    def process(self, name):
        found = [one for one in self.alive if one.record.id == name]
        if not found:
            raise ConnectionError("there is none")
        return found[0]

    async def try_command(self, command):
        """Try a command of which it does not matter what becomes."""
        with contextlib.suppress(ApiError):
            await command("a")


@pytest.fixture(autouse=True)
def in_virtual_time(autojump_clock):
    """Let no test wait for real."""


@pytest.fixture
def rig(nursery, tmp_path):
    def make(*sets, **restart):
        return Rig(nursery, tmp_path, sets, **restart)

    return make


async def test_twenty_waiters_are_served_by_one_start(autojump_clock, rig):
    """All wait for the one load, whose time is learnt, counted and told."""
    site = rig()
    worker = site.add("a")
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(site.answered, "a")
    assert (len(site.starts), worker.phase) == (1, "ready")
    assert site.loader.counts.loads == {("a", "request", "ready"): 1}
    assert site.fleet.managed.times.expected("a", "start") == pytest.approx(LOAD_S + 1, abs=0.5)
    worker.life.unload()
    await site.until(lambda: worker.phase == "cold")
    assert not site.alive
    async with trio.open_nursery() as nursery:
        nursery.start_soon(site.answered, "a")
        await trio.sleep(6)
        assert worker.record.ready_at - trio.current_time() == pytest.approx(LOAD_S - 5, abs=0.5)


async def test_alternating_requests_are_all_answered(autojump_clock, rig):
    """Of two models that need one GPU, no two processes are there at once, and nobody waits longer than its turn."""
    site = rig()
    site.add("a", gpu_ids=[0])
    site.add("b", gpu_ids=[0])
    crowded = []

    async def watch():
        while True:
            if len(site.alive) > 1:
                crowded.append(trio.current_time())
            await trio.sleep(0.5)

    async def ask(names):
        for name in names:
            await site.answered(name, 0.5)

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            async with trio.open_nursery() as asking:
                for number in range(4):
                    asking.start_soon(ask, "abab" if number % 2 else "baba")
            scope.cancel()
    assert not crowded
    assert site.loader.counts.swaps == len(site.starts) - 1 <= 8


async def test_a_model_in_use_stays_for_min_loaded_s(autojump_clock, rig):
    """Another model gets the room after `min_loaded_s`, and once the requests under way have ended."""
    site = rig("ab")
    site.add("a", min_loaded_s=30.0)
    site.add("b")
    await site.answered("a")
    ready_at = trio.current_time()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def ask_on():
                while True:
                    await site.answered("a", 1.5)

            nursery.start_soon(ask_on)
            nursery.start_soon(ask_on)
            await trio.sleep(0.7)
            await site.answered("b")
            scope.cancel()
    assert 30 < trio.current_time() - ready_at < 30 + 1.5 + END_S + LOAD_S + 3


async def test_an_engine_that_hangs_while_it_is_drained_is_ended(autojump_clock, rig):
    """Its worker goes on reporting a request of somebody else's, which the engine does not end."""
    site = rig()
    site.fleet.reconfigure(site.context.config)
    worker = site.add("a", gpu_ids=[0])
    site.add("b", gpu_ids=[0])
    lease = await site.lease("a")

    async def report_forever(process):
        while not process.has_ended:
            process.heartbeat("ready", progress={"running": 2, "steps": 3})
            await trio.sleep(5)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(report_forever, site.process("a"))
        nursery.start_soon(site.answered, "b")
        await site.until(lambda: worker.phase == "draining")
        lease.release()
    assert worker.phase != "draining"


async def test_a_worker_that_ends_by_itself_is_left_alone(autojump_clock, rig, caplog):
    """Somebody has told its process to end: nothing is decided about it meanwhile."""
    site = rig()
    worker = site.add("a")
    await site.answered("a")
    site.process("a").heartbeat("draining")
    caplog.set_level("INFO")
    await trio.sleep(5)
    assert worker.phase == "ending"
    assert "resume" not in caplog.text


async def test_a_queue_where_others_serve_the_model_loads_nothing(autojump_clock, rig):
    """Who waits for a place at a worker that is always there is no reason to start another one."""
    site = rig()
    spec = ManagedWorkerConfig("m", "/m", gpu_ids=[], max_in_flight=1)
    always = ManagedWorker("always", spec, site.context, site.workers, is_launched=False)
    site.nursery.start_soon(always.run)
    await site.until(lambda: site.fleet.table.state(always.record) == "ready")
    spare = site.add("m")
    lease = await site.lease("m")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(site.answered, "m")
        await trio.sleep(1)
        site.loader.review()
        await trio.sleep(5)
        assert (spare.phase, site.balancer.waiting_for("m")) == ("cold", 1)
        lease.release()


async def test_a_model_ends_idle_s_after_its_last_request(autojump_clock, rig):
    """Exactly `idle_s` after its last request, however many there were."""
    site = rig()
    worker = site.add("a", idle_s=60.0)
    for _ in range(5):
        await site.answered("a", 10)
        await trio.sleep(50)
    at = trio.current_time()
    await site.until(lambda: worker.phase == "ending")
    assert trio.current_time() - at == pytest.approx(10, abs=0.3)
    await site.until(lambda: worker.phase == "cold")
    assert not site.alive
    await site.answered("a")


async def test_a_failed_load_is_retried_when_requested_again(autojump_clock, rig):
    """All who wait get the cause at once; after `attempts_max` it has failed until a command forgets that."""
    site = rig()
    worker = site.add("a")
    site.failing.add("a")
    for attempt in range(3):
        found = []

        async def ask(found=found):
            found.append(await site.lease("a"))

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ask)
        assert [one.is_final for one in found] == [True] * 5
        assert len(site.starts) == attempt + 1
        if attempt < 2:
            await site.until(lambda: worker.phase == "cold")
    assert (worker.record.has_failed, site.alive) == (True, [])
    with pytest.raises(ApiError, match="exit code 70"):
        await site.loader.load("a")
    await trio.sleep(1)
    site.failing.clear()
    assert await site.loader.load("a") == "a"
    await trio.sleep(1)
    assert site.loader.counts.loads["a", "command", "ready"] == 1
    assert site.loader.counts.loads["a", "command", "failed"] == 1
    assert site.loader.counts.loads["a", "request", "failed"] == 3


async def test_a_refused_start_is_retried_without_failing_for_good(autojump_clock, rig):
    """A GPU that others fill is free again some time: such refusals alone never make it `failed`."""
    site = rig()
    worker = site.add("a")
    site.problems = ["GPU 0 is full."]
    for _ in range(7):
        assert (await site.lease("a")).is_final
        assert not worker.record.has_failed
        await site.until(lambda: worker.phase == "cold" or trio.current_time() >= worker.life.may_start_at)
    site.problems = []
    await site.answered("a")
    assert len(site.starts) == 1


async def test_a_load_goes_on_without_its_waiters(autojump_clock, rig):
    """The client has left; the model is there for the next one."""
    site = rig()
    worker = site.add("a")
    with trio.move_on_after(LOAD_S / 2):
        await site.lease("a")
    await site.until(lambda: worker.phase == "ready")
    assert len(site.starts) == 1


async def test_a_bug_in_a_decision_is_survived(autojump_clock, rig, monkeypatch, caplog):
    """It is logged, and the next decision is made."""
    site = rig()
    site.add("a")
    right, bugs = loader_module.decide, [ZeroDivisionError("a bug")] * 2

    def decide(*arguments):
        if bugs:
            raise bugs.pop()
        return right(*arguments)

    monkeypatch.setattr(loader_module, "decide", decide)
    site.loader.review()
    with caplog.at_level(logging.ERROR):
        await trio.sleep(1)
        site.loader.review()
        await trio.sleep(1)
        await site.answered("a")
    assert not bugs
    assert "a bug in deciding" in caplog.text


async def test_sleep_and_wake(autojump_clock, rig):
    """Where the room is a GPU, the engine sleeps and wakes; one that does not sleep ends, one that does not wake starts."""
    site = rig()
    first = site.add("a", gpu_ids=[0], when_idle="sleep")
    site.add("b", gpu_ids=[0], when_idle="sleep")
    await site.answered("a")
    await site.answered("b")
    assert first.phase == "asleep"
    await site.answered("a")
    assert (len(site.starts), site.fleet.managed.times.expected("a", "wake")) == (2, pytest.approx(WAKE_S, abs=0.2))
    site.refusals["asleep"].append(ValueError("it has requests"))
    await site.answered("b")
    assert first.phase == "cold"
    await site.answered("a")
    site.refusals["ready"].append(ValueError("out of memory"))
    await site.answered("b")  # it was asleep
    assert [name for _, name in site.starts] == ["a", "b", "a", "b"]
    assert site.loader.counts.loads["b", "request", "failed"] == 1


@pytest.mark.parametrize("named", [{"gpu_ids": [0]}, {"env": {"CUDA_VISIBLE_DEVICES": "0"}}])
async def test_a_sleeping_worker_holds_no_gpu(autojump_clock, rig, named):
    """Another worker on its GPU is not kept from starting by it, not even while it is cleared away."""
    site = rig()
    worker = site.add("a", **named)

    def occupied():
        return set(claims_of(worker.occupies, has_gpus=True).gpus)

    await site.loader.load("a")
    assert occupied() == {0}
    await site.loader.sleep("a")
    assert occupied() == set()
    site.process("a").kill()
    await site.until(lambda: worker.phase == "ending")
    assert occupied() == set()
    await site.until(lambda: worker.phase == "cold")
    assert occupied() == {0}


async def test_commands(autojump_clock, rig):
    """They say what they cannot do, and return when it is done."""
    site = rig()
    worker = site.add("a")
    site.fleet.registry.record_heartbeat(Heartbeat("w", "other", "127.0.0.1", 1))
    for command in (site.loader.load, site.loader.sleep, site.loader.wake):
        with pytest.raises(ApiError, match="does not exist") as missing:
            await command("nothing")
        assert missing.value.status == 404
        with pytest.raises(ApiError, match="no worker with load") as never:
            await command("other")
        assert never.value.status == 409
    for command in (site.loader.sleep, site.loader.wake):
        with pytest.raises(ApiError):
            await command("a")
    assert (await site.loader.preview("a")).worker_id == "a"
    silent = site.add("silent")
    await site.loader.load("silent")
    site.fleet.table.endpoint_of(silent.record).fail(trio.current_time())
    with pytest.raises(ApiError, match="cannot be reached"):
        await site.loader.load("silent")
    assert await site.loader.unload("silent", 0) == "silent"
    assert (await site.loader.load("a"), worker.phase) == ("a", "ready")
    assert (await site.loader.preview("a")) is None
    assert (await site.loader.sleep("a"), worker.phase) == ("a", "asleep")
    assert (await site.loader.wake("a"), worker.phase) == ("a", "ready")
    assert (await site.loader.unload("a", 5), worker.phase) == ("a", "cold")
    assert not site.alive
    async with trio.open_nursery() as nursery:
        nursery.start_soon(site.try_command, site.loader.load)
        await site.until(lambda: worker.phase == "starting")
        site.balancer.close()
        with pytest.raises(ApiError, match="shutting down"):
            await site.loader.load("a")


PHASES = ["cold", "starting", "loading", "ready", "draining", "ending", "asleep", "waking", "sleeping", "down"]
EVENTS = ["kill", "unload", "load", "restart", "remove", "start"]


async def bring(site, worker, phase):
    """Bring a worker into a phase."""
    if phase == "down":
        site.failing.add("a")
    if phase != "cold":
        site.nursery.start_soon(site.lease, "a")
        await site.until(lambda: worker.phase == "starting")
    if phase == "loading":
        await site.until(lambda: site.alive)
        await trio.sleep(LOAD_S / 2)
    if phase == "down":
        await site.until(lambda: worker.phase == "down")
        site.failing.clear()
    if phase in ("ready", "draining", "ending", "asleep", "waking", "sleeping"):
        await site.until(lambda: worker.phase == "ready")
    if phase == "draining":
        worker.life.want(takes_requests=False)
    elif phase == "ending":
        worker.life.unload(0)
        await trio.sleep(END_S / 2)
    elif phase in ("asleep", "waking", "sleeping"):
        site.nursery.start_soon(site.try_command, site.loader.sleep)
        await site.until(lambda: worker.life.is_falling_asleep)
        if phase != "sleeping":
            await site.until(lambda: worker.phase == "asleep")
        if phase == "waking":
            site.nursery.start_soon(site.lease, "a")
            await site.until(lambda: worker.phase == "waking")


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("phase", PHASES)
async def test_every_cut_in_every_phase(autojump_clock, rig, phase, event):
    """Whatever happens when: nothing waits for ever, nothing is left, and the model can be loaded afterwards."""
    site = rig(attempts_max=10)
    worker = site.add("a", when_idle="sleep")
    with trio.fail_after(TIMEOUTS.load_wait_s / 2):
        await bring(site, worker, phase)
        asked, got = trio.Event(), []

        async def ask():
            asked.set()
            lease = await site.lease("a")
            got.append(lease)
            if isinstance(lease, Lease):
                lease.release()

        if event in ("unload", "load", "restart", "remove", "start") and phase != "draining":
            site.nursery.start_soon(ask)
            await asked.wait()
        if event == "kill":
            for process in list(site.alive):
                process.kill()
        elif event == "unload":
            worker.life.unload(1)
        elif event == "load":
            worker.life.load()
        elif event == "restart":
            worker.restart(attrs.evolve(worker.spec, model_path="/n"))
        elif event == "start":
            worker.update(attrs.evolve(worker.spec, load="start"))
        else:
            await worker.remove(1)
            del site.workers["a"]
        if event == "remove":
            await site.until(lambda: got or phase == "draining")
            assert not site.alive
            return
        await site.until(lambda: got or event == "kill" or phase == "draining")
        await trio.sleep(60)
        await site.answered("a")
        assert (worker.phase, len(site.alive)) == ("ready", 1)
        await worker.remove(0)
        assert not site.alive


async def test_models_that_come_and_go_leave_nothing(autojump_clock, rig):
    """With a launched worker for each of many models, what the loader knows of them does not grow."""
    site = rig()
    for name in "abc":
        worker = site.add(name)
        assert await site.loader.load(name) == name
        await trio.sleep(1)
        await worker.remove(0)
        del site.workers[name]
        site.loader.review()
        await trio.sleep(1)
    assert not site.loader._commands
    assert not site.loader._watched


@pytest.mark.parametrize("phase", PHASES)
async def test_the_end_of_the_gateway_in_every_phase(autojump_clock, tmp_path, phase):
    """Those who wait are refused, and no process is left."""
    with trio.fail_after(TIMEOUTS.load_wait_s / 2):
        async with trio.open_nursery() as nursery:
            site, got = Rig(nursery, tmp_path), []
            worker = site.add("a", when_idle="sleep")
            await bring(site, worker, phase)
            async with trio.open_nursery() as asking:

                async def ask():
                    got.append(await site.lease("a"))

                asking.start_soon(ask)
                await trio.testing.wait_all_tasks_blocked()
                site.balancer.close()
            nursery.cancel_scope.cancel()
    assert got
    assert not site.alive
