"""One worker that the gateway starts: launched, supervised, restarted, drained and removed."""

import logging
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence

import attrs
import trio

from ichat.config.schema import Config, ManagedWorkerConfig, Timeouts
from ichat.errors import EXIT_USAGE
from ichat.observability.logs.store import LogStore
from ichat.routing.registry import Registry
from ichat.routing.waiting import wait_changed, wait_idle
from ichat.routing.worker_record import State, WorkerEnd, WorkerRecord
from ichat.supervisor import processes
from ichat.supervisor.failure_causes import LINES_MAX as CAUSE_LINES_MAX
from ichat.supervisor.failure_causes import cause_of, describe_exit, oom_kills
from ichat.supervisor.launch import environment_of, python_of
from ichat.supervisor.orphans import AdoptedProcess
from ichat.supervisor.preflight import problems_of
from ichat.supervisor.preflight_facts import collect_facts
from ichat.supervisor.state import SavedManagedWorker, StateDirectory
from ichat.supervisor.worker_process import SweepTimes, WorkerProcess, wait_any

log = logging.getLogger(__name__)

_KILLED = ("SIGKILL", "exit code: -9")
_UP: frozenset[State] = frozenset(("ready", "following"))
_NOT_UP_YET: frozenset[State] = frozenset(("starting", "loading"))
_STUCK: frozenset[State] = frozenset(("unhealthy", "wedged"))


@attrs.define(eq=False)
class SupervisorContext:
    """What all managed workers share."""

    config: Config
    """The newest one."""
    registry: Registry
    log_store: LogStore
    state: StateDirectory
    workers: "Mapping[str, ManagedWorker]"
    """All of them in the order of their starts; the supervisor adds and removes them."""
    remember: Callable[[], None]
    """Called when there is something new that the next gateway should know."""
    times: SweepTimes = attrs.field(factory=SweepTimes)
    hurry: trio.Event = attrs.field(factory=trio.Event)
    """Set when nothing is waited for any more."""

    async def preflight(self, spec: ManagedWorkerConfig, others: Mapping[str, ManagedWorkerConfig]) -> Sequence[str]:
        """Return what would keep a worker from starting beside the others, each in a sentence."""
        python = python_of(self.config, spec)
        facts = await collect_facts(spec, python, environment_of(self.config, spec, ""))
        return problems_of(spec, python, others, facts)


@attrs.define
class RunProgress:
    """How one start of a worker goes, by the states it has been in."""

    began: float
    up_since: float | None = None
    stuck_since: float | None = None
    is_loading: bool = True
    is_wedged: bool = False

    def record(self, state: State, now: float, *, is_unheard: bool = False) -> None:
        """Note the state of the worker now; `is_unheard` says that an adopted one has not sent a heartbeat yet."""
        if state in _UP:
            self.up_since = now if self.up_since is None else self.up_since
        self.is_loading, self.is_wedged = state in _NOT_UP_YET, state == "wedged"
        if not (is_unheard or state in _STUCK):
            self.stuck_since = None
        elif self.stuck_since is None:
            self.stuck_since = now

    def deadlines(self, timeouts: Timeouts) -> tuple[float, float]:
        """Return when the worker is to be ended, unless its state changes: for loading, and for being stuck."""
        loading = self.began + timeouts.load_s if self.is_loading else math.inf
        stuck = math.inf if self.stuck_since is None or not timeouts.stuck_s else self.stuck_since + timeouts.stuck_s
        return loading, stuck

    def failure(self, timeouts: Timeouts, now: float) -> str:
        """Return why the worker is to be ended now, to be put after its name; "" while it may go on."""
        loading, stuck = self.deadlines(timeouts)
        if now >= loading:
            return f"was not ready within {timeouts.load_s:g} s"
        if now >= stuck:
            return f"was {'wedged' if self.is_wedged else 'silent'} for {timeouts.stuck_s:g} s"
        return ""


class ManagedWorker:
    """One managed worker, through all of its starts."""

    def __init__(
        self,
        worker_id: str,
        spec: ManagedWorkerConfig,
        context: SupervisorContext,
        *,
        is_launched: bool,
        adopted: AdoptedProcess | None = None,
    ) -> None:
        """`is_launched` says that it was launched over the API; `adopted` is a process of it that runs already."""
        self.id = worker_id
        self.spec = spec
        self.is_launched = is_launched
        self.is_leaving = False
        """Whether it is about to be removed."""
        self.replaces: ManagedWorker | None = None
        """The worker that serves its model until this one can."""
        self._context = context
        self._adopted = adopted
        self._process: WorkerProcess | None = None
        self._restart_requested = trio.Event()
        self._scope = trio.CancelScope()
        self._finished = trio.Event()
        self.record: WorkerRecord = context.registry.expect(
            worker_id, [spec.model_name], context.state.socket_of(worker_id)
        )
        self._describe()

    def __repr__(self) -> str:
        return f"<ManagedWorker {self.id}: process {self.pid}>"

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
            self.record, names=[self.spec.model_name], max_in_flight=self.spec.max_in_flight, settings=settings
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
        self.spec = spec
        self._describe()
        self._context.remember()

    def restart(self, spec: ManagedWorkerConfig) -> None:
        """Have it drained, ended and started anew with this table, however often it has failed."""
        self.update(spec)
        self._restart_requested.set()

    def begin_removal(self) -> None:
        """Stop sending requests to the worker: it is about to be removed."""
        self.is_leaving = True
        self._context.registry.drain(self.record)

    async def remove(self, drain_s: float) -> None:
        """Drain it for this time at most, end it and forget it; return when nothing of it is left."""
        registry = self._context.registry
        self.begin_removal()
        await self._drain(drain_s)
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
        registry, failures = self._context.registry, 0
        while True:
            if self.is_leaving:
                await trio.sleep_forever()
            end, was_well = await self._run_guarded()
            restart = self._context.config.restart
            failures = 1 if was_well else failures + 1
            if end is None:
                failures = 0
                registry.stopped(self.record)
            elif end.exit_code == EXIT_USAGE or failures >= restart.attempts_max:
                registry.fail(self.record, end)
                self._context.log_store.finish(self.id)
                log.error("worker %s %s; it is not started again", self.id, end)
                await self._restart_requested.wait()
            else:
                wait_s = min(restart.longest_s, restart.first_s * 2.0 ** (failures - 1))
                registry.fail(self.record, end, trio.current_time() + wait_s)
                log.error("worker %s %s; it is started again in %g s", self.id, end, wait_s)
                with trio.move_on_after(wait_s):
                    await self._restart_requested.wait()
            if self._restart_requested.is_set():
                self._restart_requested, failures = trio.Event(), 0
            registry.restart(self.record)

    async def _run_guarded(self) -> tuple[WorkerEnd | None, bool]:
        """Supervise one start of it; a bug in that counts as an end of this worker, and ends no other one."""
        try:
            return await self._run_once()
        except Exception as error:
            log.exception("a bug in supervising worker %s", self.id)
            if self._process is not None:
                with trio.CancelScope(shield=True):
                    await self._process.sweep([])
                self._process = None
            return WorkerEnd("could not be watched", time.time(), cause=repr(error)), False

    async def _run_once(self) -> tuple[WorkerEnd | None, bool]:
        """Start it and wait for its end. Return how it ended (None: as requested), and whether it was well before."""
        context = self._context
        if self._adopted is not None:
            adopted, self._adopted = self._adopted, None
            context.registry.set_piped(self.record, is_piped=False)
            context.log_store.resume(self.id)
            return await self._supervise(WorkerProcess(self.id, self.spec, adopted, context.state, context.times))
        await self._wait_for_room()
        problems = await context.preflight(self.spec, self._others())
        if problems or self._restart_requested.is_set():
            return self._not_started(" ".join(problems)) if problems else None, False
        try:
            process = await self._spawn()
        except (OSError, ValueError) as error:
            return self._not_started(str(error)), False
        return await self._supervise(process)

    def _not_started(self, cause: str) -> WorkerEnd:
        lines = self._context.log_store.last_lines(self.id, self._context.config.logs.last_lines_max)
        return WorkerEnd("cannot be started", time.time(), cause=cause, last_lines=lines)

    async def _wait_for_room(self) -> None:
        """Wait until the workers that are being ended have freed what this one needs."""
        while any(one.leaves_room_for(self) for one in self._context.workers.values() if one is not self):
            await wait_changed(self._context.registry)

    def _others(self) -> dict[str, ManagedWorkerConfig]:
        """Return the workers that hold what they need before this one does: those that run, or were there first."""
        workers = list(self._context.workers.values())
        earlier = workers[: workers.index(self)] if self in workers else workers
        holding = [one for one in workers if one.pid or (one in earlier and not one.has_failed)]
        return {one.id: one.holds for one in holding if one is not self}

    def leaves_room_for(self, other: "ManagedWorker") -> bool:
        """Return whether it is about to end, and holds something that the other one needs: a GPU or the port."""
        if not (self.pid and (self.is_leaving or self._restart_requested.is_set())):
            return False
        mine, others = self.holds.gpu_ids, other.spec.gpu_ids
        gpus = mine != [] and others != [] and (mine is None or others is None or set(mine) & set(others))
        return bool(gpus) or (other.spec.port != 0 and other.spec.port == self.holds.port)

    async def _spawn(self) -> WorkerProcess:
        """Start its first process. Raises OSError or ValueError where that cannot be."""
        context = self._context
        output = context.log_store.begin(self.id)
        context.registry.set_piped(self.record, is_piped=True)
        try:
            return await WorkerProcess.spawn(
                self.id, self.spec, context.config, context.state, output=output, times=context.times
            )
        except BaseException:
            with trio.CancelScope(shield=True):
                await context.log_store.end(self.id)
            raise
        finally:
            os.close(output)

    async def _supervise(self, process: WorkerProcess) -> tuple[WorkerEnd | None, bool]:
        """Wait until a process has ended or is to be ended, and then end all that stems from it."""
        context, self._process = self._context, process
        context.remember()
        ooms, why, was_well, is_cut = oom_kills(), "", False, True
        try:
            await processes.lower_session_priority(process.pid)
            why, was_well = await self._wait_for_end(process)
            is_cut = False
            if why:
                log.error("worker %s is ended: it %s", self.id, why)
            elif self._restart_requested.is_set():
                await self._drain(context.config.timeouts.drain_s)
            else:
                end = WorkerEnd(describe_exit(process.returncode), time.time())
                context.registry.fail(self.record, end, trio.current_time())
        except Exception:
            is_cut = False
            raise
        finally:
            is_cut = is_cut and not (self.is_leaving or self._restart_requested.is_set())
            with trio.CancelScope(shield=True):
                if is_cut and process.spec.on_gateway_exit == "keep" and not process.has_ended:
                    log.info("worker %s goes on without the gateway: the next one takes it over", self.id)
                else:
                    await process.end(context.config.timeouts.stop_s, context.hurry)
                    self._process = None
                await context.log_store.end(self.id)
                process.close()
                context.remember()
        return None if self._restart_requested.is_set() else self._end_of(process.returncode, why, ooms), was_well

    def _end_of(self, code: int | None, why: str, ooms: int | None) -> WorkerEnd:
        """Return what is known of its end; `why` is set where the gateway has ended it."""
        lines = self._context.log_store.last_lines(self.id, CAUSE_LINES_MAX)
        now = oom_kills()
        was_killed = code == -signal.SIGKILL or any(word in line for line in lines for word in _KILLED)
        oom_killed = bool(not why and was_killed and ooms is not None and now is not None and now > ooms)
        told = self.record.heartbeat.failure if self.record.heartbeat else ""
        return WorkerEnd(
            why or describe_exit(code),
            time.time(),
            exit_code=code if code is not None and code >= 0 else None,
            signal=describe_exit(code).rpartition(" ")[2] if code is not None and code < 0 else None,
            oom_killed=oom_killed,
            cause="" if why else cause_of(lines, code, oom_killed=oom_killed, told=told) or told,
            last_lines=lines[len(lines) - min(len(lines), self._context.config.logs.last_lines_max) :],
        )

    async def _wait_for_end(self, process: WorkerProcess) -> tuple[str, bool]:
        """Wait until it has ended, is to be restarted, or is to be ended. Return why, and whether it was well."""
        progress, why = RunProgress(trio.current_time()), ""

        async def fail() -> None:
            nonlocal why
            why = await self._wait_for_failure(progress, process)

        await wait_any(process.wait, self._restart_requested.wait, fail)
        well_s = self._context.config.restart.well_s
        return why, progress.up_since is not None and trio.current_time() - progress.up_since >= well_s

    async def _wait_for_failure(self, progress: RunProgress, process: WorkerProcess) -> str:
        """Wait until it has been loading or stuck for too long, and return which."""
        registry = self._context.registry
        while True:
            now, timeouts = trio.current_time(), self._context.config.timeouts
            is_unheard = process.is_adopted and self.record.heartbeat is None
            progress.record(registry.state(self.record), now, is_unheard=is_unheard)
            if why := progress.failure(timeouts, now):
                return why
            with trio.move_on_at(min(*progress.deadlines(timeouts), registry.state_until(self.record))):
                await wait_changed(registry)

    async def _drain(self, drain_s: float) -> None:
        """Send it no more requests, and wait until those it has are answered."""
        self._context.registry.drain(self.record)
        endpoint = self._context.registry.endpoint_of(self.record)
        if endpoint is not None:
            with trio.move_on_after(drain_s):
                await wait_any(lambda: wait_idle(endpoint), self._context.hurry.wait)
