"""The shared parts of all managed workers' starts: the configuration, and the places for facts about workers."""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Protocol

import attrs
import trio

from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.fleet.managed_records import ManagedRecords
from ichat.fleet.model_directory import ModelDirectory
from ichat.fleet.worker_calls import SLEEP_S, change_engine
from ichat.fleet.worker_facts import WorkerEnd
from ichat.fleet.worker_record import WorkerRecord
from ichat.fleet.worker_table import WorkerTable
from ichat.listeners import Gate, Listeners
from ichat.observability.counts import LoadCounts
from ichat.observability.logs.store import LogStore
from ichat.placement.learnt import LearntMemories, MemoryLack
from ichat.preflight.learnt_file import with_learnt
from ichat.preflight.obstacles import obstacles_of
from ichat.protocol.load_story import STARTING
from ichat.security.keys import proof_of
from ichat.supervisor.last_words import LINES_MAX
from ichat.supervisor.launch import python_of, token_of
from ichat.supervisor.launcher import FoundProcess, LaunchedProcess, Launcher, Order, RemoteLauncher
from ichat.supervisor.run_progress import RunProgress, RunResult, end_of
from ichat.supervisor.state import SavedManagedWorker

NO_CLUSTER = "This gateway began without a Ray cluster: start it again with ray.address."
"""Why a worker on Ray cannot be started."""


class LaunchMemory(Protocol):
    """Saves the facts about workers for the next gateway."""

    def save_soon(self) -> None:
        """Save it, in a task."""
        ...

    async def save(self) -> None:
        """Save it now; an error is logged."""
        ...

    def next_launch(self) -> int:
        """Return the number of a new launch, higher than all before it."""
        ...

    def objections_to(self, spec: ManagedWorkerConfig) -> Sequence[str]:
        """Return why a worker must not be started now, each in a sentence."""
        ...


@attrs.define(eq=False)
class SupervisorContext:
    """The shared parts of all managed workers."""

    config: Config
    """The newest configuration."""
    table: WorkerTable
    directory: ModelDirectory
    managed: ManagedRecords
    launcher: Launcher
    """Starts the workers of this machine."""
    memory: LaunchMemory
    hurry: trio.Event = attrs.field(factory=trio.Event)
    """Set when nothing is waited for any more."""
    learnt: LearntMemories = attrs.field(factory=LearntMemories)
    """The memory of models at earlier loads (`memory_learner.py`)."""
    lacked: Listeners[[ManagedWorkerConfig, MemoryLack]] = attrs.field(factory=Listeners)
    """Called with a worker's table when a launch of it has ended for lack of GPU memory."""
    counts: LoadCounts = attrs.field(factory=LoadCounts)
    """Of loads and launches, for Prometheus."""
    gate: Gate = attrs.field(factory=Gate)
    """Closed while another process may get this gateway: nothing is started, ended or changed then."""
    clusters: Mapping[str, RemoteLauncher] = attrs.field(factory=dict[str, RemoteLauncher])
    """Start the workers of other machines, by `on` in the workers' tables."""
    bookings: Iterator[int] = attrs.field(factory=itertools.count)
    """The numbers of bookings of GPUs."""
    is_handed_over: bool = False
    """Whether another process has the workers now."""

    def use(self, config: Config) -> None:
        """Use another configuration from now on."""
        self.config = config

    @property
    def proof(self) -> bytes:
        """The proof to workers that their gateway asks; empty without a token."""
        token = token_of(self.config).encode()
        return proof_of(token) if token else b""

    @property
    def log_store(self) -> LogStore:
        """The output of the workers."""
        return self.launcher.logs

    def shown_settings(self, worker_id: str, spec: ManagedWorkerConfig, *, is_launched: bool) -> Mapping[str, object]:
        """Return the settings of a worker that operators see."""
        return {
            "on": spec.on,
            "backend": spec.backend,
            "model_path": spec.model_path,
            "gpus": spec.gpus,
            "gpu_ids": spec.gpu_ids,
            "on_gateway_exit": spec.on_gateway_exit,
            "origin": "api" if is_launched else "configuration",
            "log_file": self.log_store.path_of(worker_id),
        }

    async def preflight(
        self,
        spec: ManagedWorkerConfig,
        others: Mapping[str, ManagedWorkerConfig],
        limiter: trio.CapacityLimiter | None = None,
        *,
        is_later: bool = False,
    ) -> Sequence[str]:
        """Return the obstacles to a worker's start beside the others, each in a sentence.

        A worker on another machine is examined there. `is_later` leaves out resources that another worker may have now
        and will give back.
        """
        if spec.on != "here":
            return [] if spec.on in self.clusters else [NO_CLUSTER]
        facts = with_learnt(await self.launcher.facts(self.config, spec, limiter), spec, self.learnt)
        python = python_of(self.config, spec)
        return [one.sentence for one in obstacles_of(spec, python, others, facts, is_later=is_later)]

    async def spawn(self, worker: WorkerRecord, spec: ManagedWorkerConfig, launch: int) -> LaunchedProcess:
        """Start a worker's first process, as the launch of this number. Raises OSError or ValueError if it cannot."""
        order = Order(worker.id, launch, spec, self.config)
        if spec.on != "here":
            self.managed.set_piped(worker, is_piped=False)
            return await self.clusters[spec.on].start(order)
        self.managed.enter_load(worker, STARTING)
        self.managed.set_piped(worker, is_piped=True)
        return await self.launcher.start(order)

    async def find(self, started: Sequence[SavedManagedWorker]) -> Mapping[str, FoundProcess]:
        """Return the launches of these workers that have not ended; nothing else runs between a look and the return."""
        found: dict[str, FoundProcess] = {}
        for name, cluster in self.clusters.items():
            found.update(await cluster.find([one for one in started if one.spec.get("on") == name]))
        here = [one for one in started if one.spec.get("on", "here") == "here"]
        return {**found, **await self.launcher.find(here)}

    def adopt(self, worker: WorkerRecord, spec: ManagedWorkerConfig, found: FoundProcess) -> LaunchedProcess:
        """Go on with a process that an earlier gateway has started."""
        self.managed.set_piped(worker, is_piped=self.log_store.is_piped(worker.id))
        return found.adopt(self.config, spec)

    async def change_engine(self, worker: WorkerRecord, to: Literal["asleep", "ready"]) -> None:
        """Have a worker's engine free its memory, or allocate it again. Raises one of `client.FAILURES`."""
        within_s = SLEEP_S if to == "asleep" else self.config.timeouts.load_s
        await change_engine(self.table, worker, self.proof, to, within_s)

    def not_started(self, worker: WorkerRecord, cause: str) -> RunResult:
        """Return the result of a start that had no process."""
        lines = self.log_store.last_lines(worker.id, self.config.logs.last_lines_max)
        end = WorkerEnd("cannot be started", time.time(), cause=cause, last_lines=lines)
        return RunResult(end, was_started=False)

    def end_of(self, worker: WorkerRecord, process: LaunchedProcess, why: str, progress: RunProgress) -> WorkerEnd:
        """Return the known facts about the end of a process; `why` is set if the gateway has ended it."""
        if process.reported_end is not None and not why:
            return process.reported_end
        lines = self.log_store.tail(worker.id, LINES_MAX)
        told = worker.heartbeat.failure if worker.heartbeat else ""
        return end_of(process.returncode, why, progress, lines, told=told, lines_max=self.config.logs.last_lines_max)

    async def wait_for_failure(self, worker: WorkerRecord, process: LaunchedProcess, progress: RunProgress) -> str:
        """Wait until a worker has been loading or stuck for too long, and return which."""
        while True:
            now, timeouts = trio.current_time(), self.config.timeouts
            is_unheard = process.is_adopted and worker.heartbeat is None and not process.waits_for
            was_up = progress.up_since is not None
            progress.record(self.table.state(worker, sees_drain=False), now, is_unheard=is_unheard)
            if not (was_up or process.is_adopted) and progress.up_since is not None:
                self.counts.launched(process.spec.on, "ready", now - progress.launched_at)
            if why := progress.failure(timeouts, now):
                return why
            with trio.move_on_at(min(*progress.deadlines(timeouts), self.table.state_until(worker))):
                await self.table.changed.wait()
