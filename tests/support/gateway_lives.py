"""Lives of a gateway's supervisor in virtual time, at random: reloads, crashes, launches, and ends of the gateway.

The supervisor, the registry, the loader and the workers' lives are real. Processes are objects, which outlive gateways.
At the end of each life, nothing is broken any more: the wanted workers run, and nothing else.
"""

import collections
import contextlib
import itertools
import random
import signal

import trio
import trio.testing

from ichat.config.copies import each_copy
from ichat.config.replicas import Replicas
from ichat.config.schema import Config, EngineSettings, ManagedWorkerConfig, Restart, Routing, Timeouts
from ichat.errors import ApiError
from ichat.fleet.fleet import Fleet
from ichat.placement.place import Wish
from ichat.preflight.facts import Facts
from ichat.protocol.messages import Heartbeat
from ichat.routing.balancer import Balancer
from ichat.routing.request import Lease, RoutingRequest
from ichat.supervisor import supervisor as supervisor_module
from ichat.supervisor.reload_plan import text_of
from ichat.supervisor.state import SavedState
from ichat.supervisor.supervisor import Supervisor

BEAT_S = 5.0
TIMEOUTS = Timeouts(drain_s=5.0, stop_s=6.0, stuck_s=20.0, load_s=60.0, load_wait_s=60.0)
RESTART = Restart(first_s=0.2, longest_s=3.0, well_s=5.0, attempts_max=4)
TIMES_S = (0, 0.1, 0.5, 1, 2, 5, 9)
EVENTS = 14
WELL_S, QUIET_S, LOOK_S = 600.0, 40.0, 4.0
"""By when all must be well at the end, for how long it must stay so, and how often it is looked at."""


class Output:
    """The output of workers that write nothing, or what a test has them write: which of them are in the book."""

    def __init__(self):
        self.known, self.lines = set(), {}

    def path_of(self, worker_id):
        return ""

    def last_lines(self, worker_id, count):
        return [line.text for line in self.tail(worker_id, count)]

    def tail(self, worker_id, count):
        return self.lines.get(worker_id, [])[-count:]

    def expect(self, worker_id):
        self.known.add(worker_id)

    begin = expect

    def is_piped(self, worker_id):
        return False

    def resume(self, worker_id, start_id=None, *, is_managed=True):
        if is_managed:
            self.known.add(worker_id)

    def finish(self, worker_id):
        assert worker_id in self.known

    def forget(self, worker_id):
        self.known.remove(worker_id)

    async def end(self, worker_id):
        await trio.lowlevel.checkpoint()


class Process:
    """The process of a worker: it loads or fails, sends heartbeats, and ends in its own time when it is told to."""

    def __init__(self, world, worker_id, spec):
        self.worker_id, self.spec, self.pid = worker_id, spec, next(world.pids)
        self.state, self.returncode = "loading", None
        self.exit_code, self.load_s, self.stop_s = world.fate_of(worker_id)
        self.told, self.ended, self.thawed = trio.Event(), trio.Event(), trio.Event()
        self.thawed.set()
        self._world, self._scope = world, trio.CancelScope()
        world.alive[self.pid] = self
        world.nursery.start_soon(self._live)

    def __repr__(self):
        return f"process {self.pid} of {self.worker_id}, {self.state}"

    async def _live(self):
        with self._scope:
            self.beat("loading")
            await self._rest(self.load_s)
            if self.exit_code and not self.told.is_set():
                self.end(self.exit_code)
                return
            while not self.told.is_set():
                self.beat("following" if self.worker_id in self._world.followers else "ready")
                await self._rest(BEAT_S)
            self.beat("draining")
            await trio.sleep(self.stop_s)
            await self.thawed.wait()
            self.beat("gone")
            self.end(0)

    async def _rest(self, rest_s):
        with trio.move_on_after(rest_s):
            await self.told.wait()
        await self.thawed.wait()

    def beat(self, state):
        self.state = state
        record = self._world.gateway.fleet.table.get(self.worker_id)
        if self._world.gateway.is_there and record is not None and record.managed:  # others are refused
            beat = Heartbeat(self.worker_id, self.spec.model_name, "127.0.0.1", 9, state=state, start_id=str(self.pid),
                             pid=self.pid, heartbeat_interval=BEAT_S, progress=self._world.progress)  # fmt: skip
            self._world.gateway.fleet.registry.record_heartbeat(beat)

    def end(self, code):
        if self.returncode is None:
            self.returncode, self.state = code, "ended"
            self._scope.cancel()
            del self._world.alive[self.pid]
            self.ended.set()

    def send_signal(self, number):
        self.end(-9) if number == signal.SIGKILL else self.told.set()

    def freeze(self):
        self.thawed = trio.Event()


class Hold:
    """A gateway's hold on a process. That of a gateway that was killed does nothing."""

    def __init__(self, gateway, process, spec, *, is_adopted):
        self.spec, self.is_adopted, self.pid, self.identity = spec, is_adopted, process.pid, str(process.pid)
        self._gateway, self._process = gateway, process

    @property
    def returncode(self):
        return None if self.is_adopted else self._process.returncode

    @property
    def has_ended(self):
        return self._process.returncode is not None

    waits_for, had_no_place, reported_end = "", False, None

    async def wait_change(self):
        await trio.sleep_forever()

    async def lower_priority(self):
        await trio.lowlevel.checkpoint()

    async def wait(self):
        await self._process.ended.wait()

    async def end(self, stop_s, hurry):
        world = self._gateway.world
        if not self._gateway.is_there:
            return
        await world.pause()
        world.fail_by_a_bug()
        self._process.told.set()
        with trio.move_on_after(stop_s):
            await self._process.ended.wait()
        self._process.end(-9)
        await world.pause()

    async def sweep(self, family):
        if self._gateway.is_there:
            self._process.end(-9)

    def close(self):
        pass


class Found:
    """A process of an earlier gateway, for the next gateway."""

    may_stay = False

    def __init__(self, launcher, process):
        self._launcher, self._process = launcher, process

    def adopt(self, config, spec):
        self._launcher.logs.resume(self._process.worker_id)
        return Hold(self._launcher.gateway, self._process, spec, is_adopted=True)


class FakeLauncher:
    """Starts a gateway's processes, which are objects."""

    def __init__(self, gateway):
        self.logs, self.gateway = gateway.logs, gateway

    def socket_of(self, worker_id):
        return f"/sockets/{worker_id}"

    async def facts(self, config, spec, limiter):
        await self.gateway.world.pause()
        self.gateway.world.fail_by_a_bug()
        return Facts()

    async def wish(self, config, spec):
        await self.gateway.world.pause()
        return Wish(spec.model_name, spec.gpus)

    async def placeable(self, config, spec):
        await self.gateway.world.pause()
        return self.gateway.world.gpus

    async def start(self, order):
        world = self.gateway.world
        await world.pause()
        if world.chance.random() < world.failing:
            raise OSError("there are too many processes")
        if any(one.worker_id == order.worker_id for one in world.alive.values()):
            world.faults.append(f"two processes of {order.worker_id}")
        saved = {one.worker_id: one.launch for one in world.saved.started}
        if saved.get(order.worker_id) != order.number or order.number in world.launches:
            world.faults.append(f"launch {order.number} of {order.worker_id} is not saved, or not new")
        world.launches.add(order.number)
        self.logs.begin(order.worker_id)
        process = Process(world, order.worker_id, order.spec)
        return Hold(self.gateway, process, order.spec, is_adopted=False)

    async def find(self, started):
        alive, pids = self.gateway.world.alive, [one.pid for one in started]
        await self.gateway.world.pause()
        for process in [one for one in alive.values() if one.pid not in pids]:
            process.end(-9)
        return {alive[pid].worker_id: Found(self, alive[pid]) for pid in pids if pid in alive}


class State:
    """A gateway's state directory, in memory; the next gateway gets what the newest has saved."""

    path = control_socket = "/state"

    def __init__(self, gateway):
        self._gateway = gateway

    def socket_of(self, worker_id):
        return f"/sockets/{worker_id}"

    def mark_of(self, worker_id):
        return f"/state:{worker_id}"

    def load(self):
        return self._gateway.world.saved

    def save(self, known):
        if self._gateway.is_there:
            self._gateway.world.saved = known


class Gateway:
    """A gateway, from its start to its end."""

    def __init__(self, world):
        self.world = world
        self.is_there = True
        self.fleet = Fleet({}, trio.current_time, 8)
        self.balancer = Balancer(self.fleet.directory.availability, trio.current_time, Routing())
        self.fleet.table.changed.add(self.balancer.dispatch_waiting)
        self.logs = Output()
        self.supervisor = Supervisor(
            world.config, self.fleet, self.balancer, self.logs, State(self), launcher=FakeLauncher(self)
        )
        self.scope, self.ended = trio.CancelScope(), trio.Event()

    async def run(self, *, task_status):
        with self.scope:
            await self.supervisor.run(task_status=task_status)
        self.ended.set()

    @property
    def workers(self):
        return list(self.supervisor._workers.values())


class World:
    """A gateway and all that happens to it."""

    def __init__(self, seed, config=None):
        self.chance = random.Random(seed)
        self.pids = itertools.count(5_000_001)  # beyond those of the system
        self.alive, self.saved, self.launched, self.log = {}, SavedState(), set(), []
        self.launches, self.faults = set(), []
        """The numbers of all launches; what must never be, whatever a gateway makes of it."""
        self.failing = self.chance.choice([0.0, 0.0, 0.2])
        """The share of starts that fail."""
        self.has_bugs = self.chance.random() < 0.2
        """Whether code below the supervisor raises what it must not."""
        self.load_s, self.stop_s = {}, {}
        """How long the processes of these workers take to load and to end; those of others do as chance has it."""
        self.progress = {}
        """The load that every worker reports."""
        self.gpus = []
        """The GPUs for workers with `gpus`."""
        self.followers = set()
        """The workers that follow the leader of their group, once they are loaded."""
        self.config = config or self.any_config()
        self.gateway = self.nursery = None

    def say(self, text):
        """Note what happens, for a life that ends badly."""
        self.log.append(f"{trio.current_time():8.2f} {text}")

    async def pause(self):
        """Let others go first, sometimes."""
        for _ in range(self.chance.choice([1, 1, 1, 2, 5])):
            await trio.lowlevel.checkpoint()
        if self.chance.random() < 0.3:
            await trio.sleep(self.chance.choice([0, 0.01, 0.3, 1]))

    def fail_by_a_bug(self):
        """Raise what nothing expects, sometimes; but not in a gateway that is gone, which has nobody to be told."""
        if self.has_bugs and self.gateway.is_there and self.chance.random() < self.failing:
            raise RuntimeError("a planted bug")

    def fate_of(self, worker_id):
        """Return with which code a start ends (0: it loads), how long it loads, and how long it takes to end."""
        chance = self.chance
        code = chance.choice([1, 1, 64]) if chance.random() < self.failing else 0
        load_s, stop_s = chance.choice(TIMES_S), chance.choice(TIMES_S)
        return code, self.load_s.get(worker_id, load_s), self.stop_s.get(worker_id, stop_s)

    # Configurations.

    def any_spec(self, model, port=None):
        """Return any table of a worker of this model."""
        chance, version = self.chance, self.chance.randrange(4)
        more = {"load": "on_demand"} if chance.random() < 0.1 else {}
        more |= {"max_in_flight": chance.randrange(1, 3)} if chance.random() < 0.2 else {}
        more |= {"port": port} if port and chance.random() < 0.3 else {}
        more |= {"replicas": Replicas(2, 2)} if not more and chance.random() < 0.3 else {}
        return spec_of(model, version, on_gateway_exit="keep" if version % 2 else "stop", **more)

    def any_config(self):
        """Return any configuration, in which no worker is in another's way."""
        chance, specs = self.chance, []
        for model, counts in (("a", (2, 2, 2, 1, 3)), ("b", (0, 1, 1, 2)), ("c", (0, 0, 1))):
            spec = self.any_spec(model, 7000 + len(specs))
            for _ in range(chance.choice(counts)):
                specs.append(spec)
                if spec.port or chance.random() < 0.3:
                    spec = self.any_spec(model, 7000 + len(specs))
        if chance.random() < 0.3:
            chance.shuffle(specs)
        return config_of(specs, chance.choice(["/p1", "/p1", "/p1", "/p2"]))

    # Events.

    def reload(self, config, *, restart_failed=False):
        """Use another configuration, as a reload does."""
        supervisor = self.gateway.supervisor
        changes = supervisor.changes(config, restart_failed=restart_failed)
        self.say("reload: " + ", ".join(f"{one.action} {one.worker_id} {one.why} {one.gap}" for one in changes))
        supervisor.apply(config, changes)
        self.config = config
        self.gateway.fleet.reconfigure(config)

    async def _reload(self):
        config = self.chance.choice([self.first, self.any_config(), self.any_config(), self.config])
        self.reload(config, restart_failed=self.chance.random() < 0.2)

    async def _crash(self, process):
        process.end(-9)

    async def _tell(self, process):
        process.told.set()

    async def _freeze(self, process):
        process.freeze()
        await trio.sleep(self.chance.choice([0.5, 3, 30]))
        process.thawed.set()

    async def _launch(self):
        with contextlib.suppress(ApiError, RuntimeError):
            copies = await self.gateway.supervisor.launch(spec_of("a", 9))
            self.launched |= {one.id for one in copies}
            self.say(f"launched {copies}")

    async def _remove(self):
        workers = self.gateway.workers
        if workers:
            worker = self.chance.choice([one for one in workers if one.is_launched] or workers)
            self.launched.discard(worker.id)
            self.say(f"remove {worker.id}")
            with trio.move_on_after(self.chance.choice([0, 1, 100])), contextlib.suppress(ApiError):
                await self.gateway.supervisor.remove(worker, self.chance.choice([0, 2, 20]))

    async def _request(self):
        found = self.gateway.balancer.lease(RoutingRequest(self.chance.choice("ab")))
        if isinstance(found, Lease):
            await trio.sleep(self.chance.choice([1, 4, 20]))
            found.release()

    async def _scale(self):
        with contextlib.suppress(ApiError):
            count = self.chance.choice([1, 2, 3])
            scaled = self.gateway.supervisor.copies.scale(self.chance.choice("abc"), Replicas(count, count))
            self.say(f"{count} copies: {scaled}")

    async def _load(self):
        with contextlib.suppress(ApiError):
            await self.gateway.supervisor.loader.load(self.chance.choice("abc"))

    async def _unload(self):
        with contextlib.suppress(ApiError):
            await self.gateway.supervisor.loader.unload(self.chance.choice("abc"), 1)

    async def kill_gateway(self):
        """End the gateway without a word, and start the next."""
        self.say("kill -9 of the gateway")
        self.gateway.is_there = False
        for process in self.alive.values():
            if process.spec.on_gateway_exit == "stop":
                process.told.set()
        await self._next_gateway()

    async def stop_gateway(self):
        """End the gateway in good order, and start the next."""
        self.say("SIGTERM of the gateway")
        self.gateway.supervisor.stop()
        with trio.fail_after(100):
            await self.gateway.ended.wait()
        self.gateway.is_there = False
        await self._next_gateway()

    async def _next_gateway(self):
        self.gateway.scope.cancel()
        await self.gateway.ended.wait()
        await trio.sleep(self.chance.choice([0, 1, 5]))
        await self.start_gateway()
        self.launched = {one.id for one in self.gateway.workers if one.is_launched}
        self.say(f"a gateway with {self.gateway.workers}")

    async def start_gateway(self):
        """Start a gateway with the configuration of now."""
        self.gateway = Gateway(self)
        await self.nursery.start(self.gateway.run)

    async def _happen(self, event):
        """Begin an event; those that need a process get one."""
        if event in (self._crash, self._tell, self._freeze):
            if self.alive:
                process = self.chance.choice(list(self.alive.values()))
                self.say(f"{event.__name__} {process}")
                self.nursery.start_soon(event, process)
        elif event in (self._reload, self.kill_gateway, self.stop_gateway):
            await event()
        else:
            self.nursery.start_soon(event)

    async def live(self):
        """Live through some events, and come to rest where it is wanted."""
        self.first = self.config
        async with trio.open_nursery() as self.nursery:
            await self.start_gateway()
            events = [self._reload] * 8
            events += [self._crash, self._tell, self._freeze, self._launch, self._remove, self._request, self._load]
            events += [self._scale]
            events += self.chance.choice([[self._unload], [], [self.kill_gateway, self.stop_gateway]])
            for _ in range(EVENTS):
                await self._happen(self.chance.choice(events))
                await trio.sleep(self.chance.choice([0, 0, 0.1, 0.5, 1, 2, 3, 5, 12]))
            self.failing = 0.0
            for process in self.alive.values():
                process.exit_code = 0
            await trio.sleep(self.chance.choice([0, 2, 40]))
            self.reload(self.chance.choice([self.first, self.any_config()]), restart_failed=True)
            await self.rest()
            self.nursery.cancel_scope.cancel()

    # The end.

    def states(self):
        """Return the states of the workers by their ids, as operators see them."""
        return {one.id: self.gateway.fleet.table.state(one) for one in self.gateway.fleet.table}

    async def until(self, condition):
        """Wait until a function of the states returns true."""
        with trio.fail_after(WELL_S):
            while not condition(self.states()):
                await self.gateway.fleet.table.changed.wait()

    async def rest(self):
        """Wait until all is well, and stays so. Raises AssertionError."""
        until, well_since, wrong = trio.current_time() + WELL_S, None, ""
        while trio.current_time() < until:
            await trio.sleep(LOOK_S)
            wrong = self.wrong()
            well_since = None if wrong else well_since or trio.current_time()
            if not wrong and trio.current_time() >= well_since + QUIET_S:
                return
        raise AssertionError("\n".join([wrong, *map(repr, self.gateway.workers), *self.log]))

    def wrong(self):
        """Return what is not as it should be, in words."""
        if self.faults:
            return self.faults[0]
        workers, table, supervisor = self.gateway.workers, self.gateway.fleet.table, self.gateway.supervisor
        found = collections.Counter(text_of(one.spec) for one in workers if not one.is_launched)
        wanted = collections.Counter(text_of(one) for one in each_copy(supervisor._numbers.tables(self.config)))
        if found != wanted:
            return f"missing: {wanted - found}, surplus: {found - wanted}"
        if self.launched != (launched := {one.id for one in workers if one.is_launched}):
            return f"launched and not removed: {self.launched}, found: {launched}"
        if {*table} != {one.record for one in workers} or len(table) != len(workers):
            return f"the records are those of {[(one.id, one.managed) for one in table]}"
        for one in workers:
            states = ("ready", "cold") if one.is_on_demand else ("ready",)
            states += ("failed",) if one.is_launched else ()  # no reload starts it again
            if table.state(one.record) not in states:
                return f"{one.id} is {table.state(one.record)}"
        if {one.pid for one in workers if one.pid} != self.alive.keys():
            return f"the processes are {[*self.alive.values()]}"
        tasks = collections.Counter(task.name.rpartition(".")[2] for task in supervisor._nursery.child_tasks)
        if tasks["run"] != len(workers) or tasks["remove"] or supervisor._restarts.under_way():
            return f"the tasks are {tasks}, the restarts {supervisor._restarts.under_way()}"
        return "" if self.gateway.logs.known == {one.id for one in workers} else "the logs are of other workers"

    def patch(self, monkeypatch):
        """Have the supervisor ask these processes; its threads are calls at once, after which others may go first."""

        async def run_sync(function, *arguments, **_):
            await self.pause()
            try:
                return function(*arguments)
            finally:
                await trio.lowlevel.checkpoint()

        async def request_heartbeats(table, proof):
            await self.pause()
            for process in list(self.alive.values()):
                if process.thawed.is_set():
                    process.beat(process.state)

        monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)
        monkeypatch.setattr(supervisor_module, "request_heartbeats", request_heartbeats)


def spec_of(model, version=0, **more):
    """Return the table of a worker."""
    return ManagedWorkerConfig(model, "/m", backend="fake", backend_args={"v": version}, **{"gpu_ids": [], **more})


def config_of(specs, python="/p1"):
    """Return a configuration with these workers."""
    engines = {"fake": EngineSettings(python=python)}
    return Config(managed_workers=list(specs), engines=engines, timeouts=TIMEOUTS, restart=RESTART)


def live(seed, monkeypatch):
    """Live the life of this number: its events and their order are the same each time. Raises."""
    monkeypatch.setattr("trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING", True)
    monkeypatch.setattr("trio._core._run._r", random.Random(seed))
    world = World(seed)
    world.patch(monkeypatch)
    try:
        trio.run(world.live, clock=trio.testing.MockClock(autojump_threshold=0))
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
