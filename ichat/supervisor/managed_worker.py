"""One worker that the gateway starts: launched, supervised, restarted, drained and removed."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Literal

import attrs
import trio

from ichat.config.schema import ManagedWorkerConfig
from ichat.errors import EXIT_USAGE
from ichat.routing.waiting import wait_changed, wait_idle
from ichat.routing.worker_record import WorkerEnd, WorkerRecord
from ichat.supervisor import processes
from ichat.supervisor.context import SupervisorContext
from ichat.supervisor.failure_causes import LINES_MAX as CAUSE_LINES_MAX
from ichat.supervisor.failure_causes import describe_exit, oom_kills
from ichat.supervisor.orphans import AdoptedProcess
from ichat.supervisor.run_progress import RunProgress, RunResult, end_of
from ichat.supervisor.state import SavedManagedWorker
from ichat.supervisor.swaps import Phase
from ichat.supervisor.worker_process import WorkerProcess, wait_any

log = logging.getLogger(__name__)


class ManagedWorker:
    """One managed worker, through all of its starts."""

    def __init__(
        self,
        worker_id: str,
        spec: ManagedWorkerConfig,
        context: SupervisorContext,
        workers: "Mapping[str, ManagedWorker]",
        *,
        is_launched: bool,
        adopted: AdoptedProcess | None = None,
    ) -> None:
        """`workers` are all of them in the order of their starts, this one included as soon as it runs.

        `is_launched` says that it was launched over the API; `adopted` is a process of it that runs already.
        """
        self.id = worker_id
        self.spec = spec
        self.is_launched = is_launched
        self.is_leaving = False
        """Whether it is about to be removed."""
        self.replaces: ManagedWorker | None = None
        """The worker that serves its model until this one can."""
        self._context = context
        self._workers = workers
        self._adopted = adopted
        self._process: WorkerProcess | None = None
        self._failures = 0
        """In a row."""
        self._end_requested = trio.Event()
        """Set when what runs, or waits after a failure, is to end."""
        self._wanted = trio.Event()
        """Set while it is to have a process."""
        self._drain_s: float | None = None
        """How long the requests of what is to end may take; None: the configured time."""
        self._is_ending = False
        self.transition: Literal["", "ending", "waking"] = ""
        """Whether its engine is being put to sleep or woken; `sleep_calls.py` sets this."""
        self.may_start_at = -math.inf
        """When it may be loaded again after it failed."""
        self._scope = trio.CancelScope()
        self._finished = trio.Event()
        self.record: WorkerRecord = context.registry.expect(
            worker_id, [spec.model_name], context.state.socket_of(worker_id)
        )
        self._describe()
        if adopted is not None or not self.is_on_demand:
            self._wanted.set()
        else:
            context.registry.cool(self.record)

    def __repr__(self) -> str:
        return f"<ManagedWorker {self.id}: {self.phase}, process {self.pid}>"

    def _describe(self) -> None:
        settings = {
            "backend": self.spec.backend,
            "model_path": self.spec.model_path,
            "gpu_ids": self.spec.gpu_ids,
            "on_gateway_exit": self.spec.on_gateway_exit,
            "origin": "api" if self.is_launched else "configuration",
            "log_file": self._context.log_store.path_of(self.id),
        }
        self._context.registry.configure(
            self.record,
            names=[self.spec.model_name],
            max_in_flight=self.spec.max_in_flight,
            settings=settings,
            on_demand=self.is_on_demand and not self.is_leaving,
        )

    @property
    def pid(self) -> int:
        """The first process of its newest start; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    @property
    def holds(self) -> ManagedWorkerConfig:
        """What its process was started with, or will be."""
        return self._process.spec if self._process is not None else self.spec

    @property
    def occupies(self) -> ManagedWorkerConfig:
        """What other workers cannot have while it runs: an engine that is asleep has given its GPUs back."""
        is_asleep = self.record.heartbeat is not None and self.record.heartbeat.state == "asleep"
        return attrs.evolve(self.holds, gpu_ids=[]) if is_asleep else self.holds

    @property
    def is_on_demand(self) -> bool:
        """Whether it has a process only while its model is wanted."""
        return self.spec.load == "on_demand"

    @property
    def is_wanted(self) -> bool:
        """Whether it is to have a process; if not, it is cold, or about to be."""
        return self._wanted.is_set()

    @property
    def phase(self) -> Phase:
        """How far it is on the way to serve its model, or to give its room back."""
        record = self.record
        if record.is_down or record.is_cold:
            return "down" if record.is_down else "cold"
        if self.is_leaving or self._is_ending or self._end_requested.is_set():
            return "ending"
        state = self._context.registry.state(record)
        if self.transition:
            return self.transition
        if state in ("asleep", "waking", "draining"):
            return state if state != "draining" or record.is_draining else "ending"  # that one ends by itself
        return "ready" if state in ("ready", "following") else "starting"

    @property
    def has_failed(self) -> bool:
        """Whether it has ended and will not be restarted by itself."""
        return self.record.is_down and self.record.retry_at is None

    def saved(self) -> SavedManagedWorker:
        """Return what the next gateway has to know of it: what runs, and what that was started with."""
        table = {key: value for key, value in attrs.asdict(self.holds).items() if value is not None}
        identity = self._process.identity if self._process is not None else ""
        return SavedManagedWorker(self.id, table, self.is_launched and not self.is_leaving, self.pid, identity)

    def update(self, spec: ManagedWorkerConfig) -> None:
        """Go on with a changed table whose changes concern the gateway alone."""
        was_on_demand, self.spec = self.is_on_demand, spec
        self._describe()
        if self.is_on_demand and not was_on_demand and not self.pid:
            self.unload()
        elif was_on_demand and not self.is_on_demand:
            self.load()
            if self.phase == "draining":
                self._context.registry.resume(self.record)
            elif self.phase == "asleep" or self.transition == "ending":
                self._end_requested.set()
        self._context.remember()

    def restart(self, spec: ManagedWorkerConfig) -> None:
        """Have it ended, after a drain, and started anew with this table once it is wanted."""
        self.update(spec)
        if self.is_on_demand:
            self.forget_failures()
            self.unload()
        else:
            self._end_requested.set()

    def load(self) -> None:
        """Have it started, if it has no process."""
        if not self.is_wanted:
            self._wanted.set()
            if self.record.is_cold:
                self._context.registry.restart(self.record)

    def unload(self, drain_s: float | None = None) -> None:
        """Have it drained for this time at most and ended, and started no more until `load`."""
        if self.is_wanted:
            self._unwant()
            self._drain_s = drain_s
            self._end_requested.set()
            self._context.registry.drain(self.record)

    def _unwant(self) -> None:
        """Let the next end be followed by no start, if it is loaded on demand."""
        if self.is_on_demand:
            self._wanted = trio.Event()

    def forget_failures(self) -> None:
        """Let a worker that is loaded on demand be loaded at once, however often it has failed."""
        self._failures, self.may_start_at = 0, -math.inf
        if self.record.is_down and self.is_on_demand:
            self._context.registry.cool(self.record)
            self._end_requested.set()

    def begin_removal(self) -> None:
        """Stop sending requests to the worker: it is about to be removed."""
        self.is_leaving = True
        self._describe()
        self._context.registry.drain(self.record)

    async def remove(self, drain_s: float) -> None:
        """Drain it for this time at most, end it and forget it; return when nothing of it is left."""
        registry = self._context.registry
        self.begin_removal()
        await self.drain(drain_s)
        self._scope.cancel()
        await self._finished.wait()
        registry.stopped(self.record)
        registry.remove(self.record)
        self._context.log_store.forget(self.id)

    async def run(self) -> None:
        """Start it, and again after each end, until it is removed or this is cancelled."""
        try:
            with self._scope:
                await self._restart_loop()
        finally:
            self._finished.set()

    async def _restart_loop(self) -> None:
        registry = self._context.registry
        while True:
            if self.is_leaving:
                await trio.sleep_forever()
            if self._adopted is None:
                await self._wait_wanted()
            result = await self._run_guarded()
            self._is_ending = False
            most = self._context.config.restart.attempts_max
            self._failures = result.count_failure(self._failures, most, is_on_demand=self.is_on_demand)
            if result.end is None:
                registry.stopped(self.record)
            else:
                await self._recover(result.end, was_up=result.was_up)
            if self._end_requested.is_set():
                self._end_requested, self._failures, self.may_start_at = trio.Event(), 0, -math.inf
            if self.is_wanted:
                registry.restart(self.record)

    async def _wait_wanted(self) -> None:
        """Be cold until it is wanted."""
        while not self.is_wanted:
            if not self.record.is_cold:
                self._context.registry.cool(self.record)
            await self._wanted.wait()
            self._end_requested, self._drain_s = trio.Event(), None

    async def _recover(self, end: WorkerEnd, *, was_up: bool) -> None:
        """Wait until it may be started again after an end by itself."""
        registry, restart = self._context.registry, self._context.config.restart
        is_final = end.exit_code == EXIT_USAGE or self._failures >= restart.attempts_max
        wait_s = math.inf if is_final else min(restart.longest_s, restart.first_s * 2.0 ** (self._failures - 1))
        self.may_start_at = trio.current_time() + wait_s
        self._unwant()
        again = "can be loaded" if self.is_on_demand else "is started"
        what = "is not started again" if is_final else f"{again} again in {wait_s:g} s"
        log.error("worker %s %s; it %s", self.id, end, what)
        if self.is_on_demand and was_up and not is_final:
            registry.cool(self.record, end)
            return
        registry.fail(self.record, end, None if is_final else self.may_start_at)
        if is_final:
            self._context.log_store.finish(self.id)
        with trio.move_on_after(wait_s):
            await wait_any(self._end_requested.wait, self._load_requested)

    async def _load_requested(self) -> None:
        """Wait until a worker that is not wanted is; one that is anyway waits for ever."""
        if self.is_wanted:
            await trio.sleep_forever()
        await self._wanted.wait()

    async def _run_guarded(self) -> RunResult:
        """Supervise one start of it; a bug in that counts as an end of this worker, and ends no other one."""
        try:
            return await self._run_once()
        except Exception as error:
            log.exception("a bug in supervising worker %s", self.id)
            if self._process is not None:
                with trio.CancelScope(shield=True):
                    await self._process.sweep([])
                self._process = None
            return RunResult(WorkerEnd("could not be watched", time.time(), cause=repr(error)))

    async def _run_once(self) -> RunResult:
        """Start it and wait for its end."""
        context = self._context
        if self._adopted is not None:
            adopted, self._adopted = self._adopted, None
            context.registry.set_piped(self.record, is_piped=False)
            context.log_store.resume(self.id)
            return await self._supervise(WorkerProcess(self.id, self.spec, adopted, context.state, context.times))
        problems: Sequence[str] = ()

        async def check() -> None:
            nonlocal problems
            await self._wait_for_room()
            problems = await context.preflight(self.spec, self._others())

        await wait_any(check, self._end_requested.wait)
        if problems or self._end_requested.is_set():
            return self._not_started(" ".join(problems)) if problems else RunResult(None)
        try:
            process = await context.spawn(self.record, self.spec)
        except (OSError, ValueError) as error:
            return self._not_started(str(error))
        return await self._supervise(process)

    def _not_started(self, cause: str) -> RunResult:
        lines = self._context.log_store.last_lines(self.id, self._context.config.logs.last_lines_max)
        return RunResult(WorkerEnd("cannot be started", time.time(), cause=cause, last_lines=lines), was_started=False)

    async def _wait_for_room(self) -> None:
        """Wait until the workers that are being ended have freed what this one needs."""
        while any(one.leaves_room_for(self) for one in self._workers.values() if one is not self):
            await wait_changed(self._context.registry)

    def _others(self) -> dict[str, ManagedWorkerConfig]:
        """Return the workers that hold what they need before this one does: those that run, or were there first."""
        workers = list(self._workers.values())
        earlier = workers[: workers.index(self)] if self in workers else workers
        holding = [one for one in workers if one.pid or (one in earlier and one.is_wanted and not one.has_failed)]
        return {one.id: one.occupies for one in holding if one is not self}

    def leaves_room_for(self, other: "ManagedWorker") -> bool:
        """Return whether it is about to end, and holds something that the other one needs: a GPU or the port."""
        if not (self.pid and (self.is_leaving or self._end_requested.is_set())):
            return False
        mine, others = self.holds.gpu_ids, other.spec.gpu_ids
        gpus = mine != [] and others != [] and (mine is None or others is None or set(mine) & set(others))
        return bool(gpus) or (bool(other.spec.port) and other.spec.port == self.holds.port)

    async def _supervise(self, process: WorkerProcess) -> RunResult:
        """Wait until a process has ended or is to be ended, and then end all that stems from it."""
        context, self._process = self._context, process
        context.remember()
        ooms, why, is_cut, up_s, progress = oom_kills(), "", True, -1.0, RunProgress(trio.current_time())
        try:
            await processes.lower_session_priority(process.pid)
            why = await self._wait_for_end(process, progress)
            is_cut, self._is_ending, up_s = False, True, progress.up_s(trio.current_time())
            if why:
                log.error("worker %s is ended: it %s", self.id, why)
            elif self._end_requested.is_set():
                await self.drain(context.config.timeouts.drain_s if self._drain_s is None else self._drain_s)
            elif not self.is_on_demand:
                end = WorkerEnd(describe_exit(process.returncode), time.time())
                context.registry.fail(self.record, end, trio.current_time())
            if self.is_on_demand:  # its requests wait until it is known what comes of it
                context.registry.drain(self.record)
        except Exception:
            is_cut = False
            raise
        finally:
            is_cut = is_cut and not (self.is_leaving or self._end_requested.is_set())
            with trio.CancelScope(shield=True):
                if is_cut and process.spec.on_gateway_exit == "keep" and not process.has_ended:
                    log.info("worker %s goes on without the gateway: the next one takes it over", self.id)
                else:
                    await process.end(context.config.timeouts.stop_s, context.hurry)
                    self._process = None
                await context.log_store.end(self.id)
                process.close()
                context.remember()
        end = None if self._end_requested.is_set() else self._end_of(process.returncode, why, ooms)
        return RunResult(end, progress.up_since is not None, up_s >= context.config.restart.well_s)

    def _end_of(self, code: int | None, why: str, ooms: int | None) -> WorkerEnd:
        """Return what is known of its end; `why` is set where the gateway has ended it."""
        lines = self._context.log_store.last_lines(self.id, CAUSE_LINES_MAX)
        told = self.record.heartbeat.failure if self.record.heartbeat else ""
        lines_max = self._context.config.logs.last_lines_max
        return end_of(code, why, lines, ooms=ooms, told=told, lines_max=lines_max)

    async def _wait_for_end(self, process: WorkerProcess, progress: RunProgress) -> str:
        """Wait until it has ended, or is to be ended. Return why, if the gateway says so by itself."""
        why = ""

        async def fail() -> None:
            nonlocal why
            why = await self._context.wait_for_failure(self.record, process, progress)

        await wait_any(process.wait, self._end_requested.wait, fail)
        return why

    async def drain(self, drain_s: float) -> None:
        """Send it no more requests, and wait until those it has are answered."""
        self._context.registry.drain(self.record)
        endpoint = self._context.registry.endpoint_of(self.record)
        if endpoint is not None:
            with trio.move_on_after(drain_s):
                await wait_any(lambda: wait_idle(endpoint), self._context.hurry.wait)
