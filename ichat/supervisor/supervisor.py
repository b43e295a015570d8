"""The workers that the gateway starts, including those of the gateway before it."""

import contextlib
import functools
import logging
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import attrs
import trio

from ichat import errors
from ichat.config.copies import each_copy
from ichat.config.load import read_worker
from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.errors import ApiError
from ichat.fleet.fleet import Fleet
from ichat.fleet.registered_servers import id_for
from ichat.fleet.worker_calls import request_heartbeats
from ichat.hardware.gpus import GpuReader, has_nvidia
from ichat.http.parties import party_of
from ichat.observability.logs.store import LogStore
from ichat.protocol.messages import parse_heartbeat
from ichat.routing.balancer import Balancer
from ichat.security.keys import digest_of
from ichat.security.redact import shown
from ichat.supervisor.books import Books, objection_to
from ichat.supervisor.context import SupervisorContext
from ichat.supervisor.copies import Copies, ReplicaNumbers
from ichat.supervisor.kept import KeptDescriptors
from ichat.supervisor.launch import command_of, token_of
from ichat.supervisor.launcher import FoundProcess, Launcher, RemoteLauncher
from ichat.supervisor.life import Actual, Changing, Clearing, NoProcess, Wanted
from ichat.supervisor.loader import Loader
from ichat.supervisor.local_launcher import LocalLauncher
from ichat.supervisor.managed_worker import Earlier, ManagedWorker, holders_before
from ichat.supervisor.memory import REMEMBER_S, WorkerMemory
from ichat.supervisor.memory_learner import MemoryLearner
from ichat.supervisor.reload_plan import Change, changes_of_workers
from ichat.supervisor.restarts import Restarts
from ichat.supervisor.scaler import Scaler
from ichat.supervisor.state import (
    HandedWorkers,
    SavedManagedWorker,
    StateDirectory,
)  # fmt: skip
from ichat.supervisor.stopped import StoppedWorkers, WorkerCommands

log = logging.getLogger(__name__)

TRIALS_MAX = 2
"""How many launches on trial are examined at once; a thread and an interpreter may need half a minute for each."""


class Supervisor:
    """Starts workers, ends them, and remembers them for the next gateway."""

    def __init__(
        self, config: Config, fleet: Fleet, balancer: Balancer, log_store: LogStore, state: StateDirectory,
        *, remember_s: float = REMEMBER_S, kept: KeptDescriptors | None = None, launcher: Launcher | None = None,
        clusters: Mapping[str, RemoteLauncher] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """`kept` has the descriptors of workers that outlive this process; None: all end with it.

        Workers are started by `launcher`, or else on this machine; `clusters` start those of other machines.
        """
        self._state = state
        self._registry = fleet.registry
        self._table = fleet.table
        self._load_times = fleet.managed.times
        self._is_stopping = False
        self._nursery: trio.Nursery | None = None
        self._trials = trio.CapacityLimiter(TRIALS_MAX)
        self._workers: dict[str, ManagedWorker] = {}
        self.gpus = GpuReader()
        """Reads the GPUs of this machine, for all of the gateway."""
        launcher = launcher or LocalLauncher(state, log_store, self.gpus, kept=kept)
        self._numbers = ReplicaNumbers()
        self._memory = memory = WorkerMemory(
            state, fleet, self._workers, self._token, self._numbers, remember_s=remember_s,
            stopped=lambda: self.stopped.saved(),  # noqa: PLW0108 it is made below
        )  # fmt: skip
        self._context = SupervisorContext(
            config, fleet.table, fleet.directory, fleet.managed, launcher, memory, gate=memory.gate, clusters=clusters
        )
        self.stopped = StoppedWorkers(self._context)
        """The workers that operators have stopped."""
        self._restarts = Restarts(self._context, self._workers, self._start_new, self._end_soon)
        self.copies = Copies(
            self._context, self._workers, self._numbers, self._restarts, start=self._start_new, remove=self._end_soon
        )
        """Changes the numbers of copies."""
        begin = functools.partial(self._start, is_launched=False)
        self.commands = WorkerCommands(self._workers, self.stopped, self._restarts, start=begin, remove=self.remove)
        """Stops, starts, restarts and drains single workers."""
        self._handed: HandedWorkers | None = None
        self.loader = Loader(self._context, balancer, self._workers, self.copies)
        """Loads and unloads the models that are loaded on demand."""
        self.scaler = Scaler(self._context, balancer, self._workers, self.copies, self.loader)
        """Adds and ends copies by the load."""
        self.learner = MemoryLearner(self._context, self._workers, state.path, self.gpus)
        """Learns from loads how much memory models need."""

    def __repr__(self) -> str:
        return f"<Supervisor {list(self._workers.values())}>"

    def hurry(self) -> None:
        """From now on kill workers rather than wait for them."""
        self._context.hurry.set()

    def _token(self) -> str:
        """Return a digest that distinguishes the workers' token from others without revealing it."""
        return digest_of(b"known " + token_of(self._context.config).encode()).hex()

    def stop(self) -> None:
        """Make `run` end every worker that must not outlive the gateway, and return."""
        self._is_stopping = True
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    @property
    def pids(self) -> dict[int, str]:
        """The first processes of the workers, with the workers' ids."""
        return {worker.pid: worker.id for worker in self._workers.values() if worker.pid}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Adopt an earlier gateway's workers, start the configured workers, and supervise all of them until stopped.

        `started` once every worker is known.
        """
        known = await trio.to_thread.run_sync(self._state.load)
        if self._handed is not None:
            known = attrs.evolve(known, started=[*self._handed.started], heard=[])
        self._memory.restore(known)
        self._load_times.restore(known.load_seconds, known.load_phases)
        self.stopped.restore(known.stopped, self._context.config)
        await self.learner.load()
        for heard in known.heard:
            with contextlib.suppress(ApiError):
                heartbeat = parse_heartbeat(heard.heartbeat)
                age_s, can_return = max(0.0, time.time() - heard.at), heard.token == self._token()
                sender = party_of(heartbeat.host)
                self._registry.restore(heartbeat, age_s, can_return=can_return, sender=sender)
                self._context.log_store.resume(heartbeat.worker_id, heartbeat.start_id, is_managed=False)
            await trio.lowlevel.checkpoint()
        found = await self._context.find(known.started)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._take_over(known.started, found)
            if self._handed is not None:
                self._handed.restore()
            self.apply(self._context.config, self.changes(self._context.config))
            self._table.changed.add(self._memory.changed)
            self._memory.save_soon()
            nursery.start_soon(self._memory.save_forever)
            nursery.start_soon(self.loader.run_forever)
            nursery.start_soon(self.learner.learn_forever)
            nursery.start_soon(self._restarts.run_forever)
            nursery.start_soon(self.scaler.run_forever)
            nursery.start_soon(request_heartbeats, self._table, self._context.proof)
            task_status.started()
            await trio.sleep_forever()
        if not self._context.is_handed_over:
            with trio.CancelScope(shield=True):
                await self._memory.save()

    def expect(self, handed: HandedWorkers) -> None:
        """Have `run` begin with the workers of another process of this gateway."""
        self._handed = handed

    @property
    def workers(self) -> Mapping[str, ManagedWorker]:
        """All managed workers, by their ids."""
        return self._workers

    def change_under_way(self) -> str:
        """Return in a sentence why the workers cannot be handed over now; "" if they can."""
        if restarting := self._restarts.under_way():
            return f"Worker {restarting[0]} is being replaced after a reload: try again later."
        for worker in self._workers.values():
            is_starting = worker.has_launch and not worker.has_process and not worker.record.lacks
            is_changing = isinstance(worker.life.actual, Changing | Clearing) or is_starting
            is_loading = worker.has_launch and worker.record.load is not None and not worker.record.lacks
            if is_changing or is_loading or worker.is_leaving:
                doing = "removed" if worker.is_leaving else "loaded" if is_loading else "started or ended"
                return f"Worker {worker.id} is being {doing}: try again later."
        return ""

    async def freeze(self) -> None:
        """Start, change and end nothing from now on, and save the state. Raises OSError if it cannot be saved."""
        self._context.gate.close()
        await self._memory.save()
        if self._memory.has_failed:
            raise OSError(f"{self._state.path} cannot be written")

    async def read_on(self) -> None:
        """Read the outputs of all workers again."""
        await self._context.launcher.read_on({(one.id, one.saved().stamp) for one in self._workers.values()})

    def thaw(self) -> None:
        """Go on."""
        self._context.gate.open()

    def hand_over(self) -> None:
        """Have `run` return, and leave all workers to another process."""
        self._context.is_handed_over = True
        self.stop()

    def _take_over(self, started: Sequence[SavedManagedWorker], found: Mapping[str, FoundProcess]) -> None:
        """Adopt the workers that an earlier gateway has left; those that have seen its end and obey it are restarted.

        A worker that was launched over the API and does not run is started again.
        """
        for one in started:
            try:
                spec = read_worker(one.spec, self._context.config)
            except ApiError as error:
                log.error("worker %s is not started again: %s", one.worker_id, error)
                spec = None
            process = found.get(one.worker_id)
            states = None if self._handed is None else self._handed.states.get(one.worker_id)
            if process is None:
                if spec is not None and (one.is_launched or states is not None):
                    earlier = Earlier(None, None if states is None else _without_process(states), one.launch)
                    self._start(one.worker_id, spec, is_launched=one.is_launched, earlier=earlier)
                continue
            placeholder = ManagedWorkerConfig(model_name=one.worker_id, model_path="")
            earlier = Earlier(process, states, one.launch, one.placed)
            worker = self._start(one.worker_id, spec or placeholder, is_launched=one.is_launched, earlier=earlier)
            if spec is None:
                self._remove_soon(worker, 0.0)
            elif spec.on_gateway_exit == "keep" or process.may_stay:
                where = f"process {one.pid}" if one.pid else f"launch {one.launch}"
                log.info("worker %s (%s) has outlived its gateway: adopted", one.worker_id, where)
            else:
                log.warning("worker %s (process %d) is still there, its gateway is not", one.worker_id, one.pid)
                worker.restart(spec)  # which makes it cold if it is loaded on demand

    def _start(
        self,
        worker_id: str,
        spec: ManagedWorkerConfig,
        *,
        is_launched: bool,
        earlier: Earlier | None = None,
    ) -> ManagedWorker:
        worker = self._workers[worker_id] = ManagedWorker(
            worker_id, spec, self._context, self._workers, is_launched=is_launched, earlier=earlier
        )
        self._memory.save_soon()
        self.loader.review()
        assert self._nursery is not None
        self._nursery.start_soon(worker.run)
        return worker

    def _start_new(self, spec: ManagedWorkerConfig, *, is_launched: bool = False) -> ManagedWorker:
        worker = self._start(self._new_id(spec), spec, is_launched=is_launched)
        self.copies.number()
        return worker

    def _end_soon(self, worker: ManagedWorker) -> None:
        self._remove_soon(worker, self._context.config.timeouts.drain_s)

    async def launch(self, spec: ManagedWorkerConfig) -> Sequence[ManagedWorker]:
        """Start the copies of a worker that the configuration does not have; an on-demand worker is cold at first.

        Raises ApiError: 409 where it could not start now, 503 where the gateway is about to end.
        """
        if problems := await self.objections_to(spec):
            raise ApiError(409, "cannot_start", " ".join(problems))
        if self._nursery is None or self._is_stopping:
            raise errors.draining()
        return [self._start_new(one, is_launched=True) for one in each_copy([spec])]

    async def objections_to(self, spec: ManagedWorkerConfig, *, is_trial: bool = False) -> Sequence[str]:
        """Return the obstacles to launching such a worker now, each in a sentence.

        Few trials are examined at once, however many are asked for: all else goes on meanwhile.
        """
        is_later = spec.load == "on_demand"
        others = dict(holders_before(None, {} if is_later else self._workers))
        table, lack = await objection_to(spec, Books(self._workers), self._context, is_later=is_later)
        for _ in range(spec.replicas.wanted - 1):
            others[id_for(spec.model_name, {*self._workers, *others})] = spec
        found = await self._context.preflight(table, others, self._trials if is_trial else None, is_later=is_later)
        return [lack, *found] if lack else found

    def command_of(self, spec: ManagedWorkerConfig) -> str:
        """Return the command with which such a worker would be launched, as a shell would read it, without secrets."""
        worker_id, state, config = self._new_id(spec), self._state, self._context.config
        socket, control = state.socket_of(worker_id), state.control_socket
        return shown(command_of(config, spec, worker_id, socket, control, has_gpus=has_nvidia()))

    async def remove(self, worker: ManagedWorker, drain_s: float) -> None:
        """Drain a worker, end it and forget it. It goes on if the caller is cancelled.

        Raises ApiError where the gateway is about to end.
        """
        if self._nursery is None or self._is_stopping:
            raise errors.draining()
        await self._remove_soon(worker, drain_s).wait()

    def _remove_soon(self, worker: ManagedWorker, drain_s: float) -> trio.Event:
        """Begin to remove a worker; the event is set when that is done."""
        done = trio.Event()

        async def remove() -> None:
            await worker.remove(drain_s)
            if self._workers.get(worker.id) is worker:
                del self._workers[worker.id]
                self.stopped.show(worker.id)
            self._memory.save_soon()
            self.loader.review()
            done.set()

        assert self._nursery is not None
        worker.begin_removal(drain_s)
        self.copies.number()
        self._nursery.start_soon(remove)
        return done

    def _new_id(self, spec: ManagedWorkerConfig) -> str:
        return id_for(spec.model_name, {*self._workers, *(worker.id for worker in self._table)})

    def changes(self, config: Config, *, restart_failed: bool = False) -> list[Change]:
        """Return the changes of the workers by this configuration; those that have failed may be started anew."""
        running = [self.copies.running(one) for one in self._workers.values() if not one.is_leaving]
        there = [one.spec for one in running if not one.is_launched]
        wanted, stopped = self.stopped.changes(self.copies.wanted(config), there)
        engines = self._context.config.engines, config.engines
        return [*changes_of_workers(running, wanted, *engines, restart_failed=restart_failed), *stopped]

    def apply(self, config: Config, changes: Sequence[Change]) -> None:
        """Begin to carry out the changes, waiting for none. Raises ApiError where the gateway is about to end."""
        if self._nursery is None or self._is_stopping:
            raise errors.draining()
        self._context.use(config)
        self._numbers.use(config)
        self.stopped.keep(changes)
        self.loader.review()
        for change in changes:
            worker = self._workers.get(change.worker_id)
            self._restarts.forget(change.worker_id)
            if change.action == "start" and change.spec is not None:
                self._start_new(change.spec)
            elif worker is None or change.action == "keep":
                continue
            elif change.action == "stop":
                self._end_soon(worker)
            elif change.spec is not None and change.action == "update":
                worker.update(change.spec)
            elif change.spec is not None and change.action == "restart":
                self._restarts.begin(worker, change)
        self.copies.number()


def _without_process(states: tuple[Wanted, Actual]) -> tuple[Wanted, NoProcess]:
    """Return the states of a worker without its process, if it had any."""
    wanted, actual = states
    if isinstance(actual, NoProcess):
        return wanted, actual
    return wanted, NoProcess(actual.run, "cold" if wanted.state == "cold" else "new", actual.failures)
