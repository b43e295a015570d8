"""One worker that the gateway starts: launched, watched, healed, drained, and ended so that nothing of it is left."""

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

import attrs
import psutil
import trio

from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.errors import EXIT_USAGE
from ichat.hardware.gpus import find_gpus
from ichat.observability.logs.store import LogStore
from ichat.routing.registry import Registry
from ichat.routing.worker_record import WorkerEnd, WorkerRecord
from ichat.security.keys import hand_over
from ichat.security.redact import shown
from ichat.supervisor import processes
from ichat.supervisor.failure_causes import LINES_MAX as CAUSE_LINES_MAX
from ichat.supervisor.failure_causes import cause_of, describe_exit, oom_kills
from ichat.supervisor.launch import command_of, environment_of, python_of, token_of
from ichat.supervisor.orphans import AdoptedProcess, marked, process_identity
from ichat.supervisor.preflight import problems_of
from ichat.supervisor.preflight_facts import collect_facts
from ichat.supervisor.state import SavedManagedWorker, StateDirectory

log = logging.getLogger(__name__)

SWEEP_S = 5.0
"""How long killed processes may take to disappear."""
SWEEP_POLL_S = 0.05
DRAIN_POLL_S = 0.05
ROOM_POLL_S = 0.2
WATCH_S = 0.5
"""How often a worker that runs is looked at."""
GPU_FREE_S = 10.0
"""How long the driver may take to free the memory of processes that have ended."""
GPU_POLL_S = 0.5
_KILLED = ("SIGKILL", "exit code: -9")
_UP = frozenset(("ready", "following"))
_NOT_UP_YET = frozenset(("starting", "loading"))
_STUCK = frozenset(("unhealthy", "wedged"))


@attrs.define(eq=False)
class SupervisorContext:
    """What all managed workers have in common."""

    config: Config
    """The newest one."""
    registry: Registry
    logbook: LogStore
    state: StateDirectory
    remember: Callable[[], None]
    """Called when the next gateway should know of something."""
    hurry: trio.Event = attrs.field(factory=trio.Event)
    """Set when nothing is waited for any more."""
    workers: "dict[str, ManagedWorker]" = attrs.field(factory=dict[str, "ManagedWorker"])

    async def look(self, spec: ManagedWorkerConfig, others: Mapping[str, ManagedWorkerConfig]) -> Sequence[str]:
        """Give what would keep a worker from starting beside the others, each in a sentence."""
        python = python_of(self.config, spec)
        facts = await collect_facts(spec, python, environment_of(self.config, spec, ""))
        return problems_of(spec, python, others, facts)


class ManagedWorker:
    """One managed worker, through all of its starts."""

    def __init__(
        self,
        worker_id: str,
        spec: ManagedWorkerConfig,
        shared: SupervisorContext,
        *,
        is_launched: bool,
        adopted: AdoptedProcess | None = None,
    ) -> None:
        """`is_launched` says that it was asked for over the API; `adopted` is a process of it that runs already."""
        self.id = worker_id
        self.spec = spec
        self.is_launched = is_launched
        self.replaces: ManagedWorker | None = None
        """Another one that serves its model until this one can."""
        self._shared = shared
        self._adopted = adopted
        self._socket = shared.state.socket_of(worker_id)
        self._mark = shared.state.mark_of(worker_id)
        self._running = spec
        """What its newest process was started with."""
        self._is_leaving = False
        self._asked = trio.Event()
        self._scope = trio.CancelScope()
        self._gone = trio.Event()
        self._process: trio.Process | AdoptedProcess | None = None
        self._stamp = ""
        self.entry: WorkerRecord = shared.registry.expect(worker_id, [spec.model_name], self._socket)
        self._describe()

    def __repr__(self) -> str:
        return f"<Managed {self.id}: process {self.pid}>"

    def _describe(self) -> None:
        settings = {
            "backend": self.spec.backend,
            "model_path": self.spec.model_path,
            "gpu_ids": self.spec.gpu_ids,
            "on_gateway_exit": self.spec.on_gateway_exit,
            "origin": "api" if self.is_launched else "configuration",
            "log_file": self._shared.logbook.path_of(self.id),
        }
        self._shared.registry.configure(
            self.entry, names=[self.spec.model_name], max_in_flight=self.spec.max_in_flight, settings=settings
        )

    @property
    def pid(self) -> int:
        """The first process of its newest start; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    @property
    def holds(self) -> ManagedWorkerConfig:
        """What its process was started with, or will be."""
        return self._running if self.pid else self.spec

    @property
    def has_failed(self) -> bool:
        """Whether it is not started again by itself."""
        return self.entry.is_down and self.entry.retry_at is None

    @property
    def is_leaving(self) -> bool:
        """Whether it is about to be forgotten."""
        return self._is_leaving

    def started(self) -> SavedManagedWorker:
        """Give what the next gateway has to know of it: what runs, as it was started."""
        table = attrs.asdict(self.holds)
        table = {key: value for key, value in table.items() if value is not None}
        return SavedManagedWorker(self.id, table, self.is_launched and not self._is_leaving, self.pid, self._stamp)

    def update(self, spec: ManagedWorkerConfig) -> None:
        """Take a changed table whose changes concern the gateway alone."""
        self.spec = spec
        self._describe()
        self._shared.remember()

    def restart(self, spec: ManagedWorkerConfig) -> None:
        """Have it drained, ended, and started anew by this table, however often it has failed."""
        self.update(spec)
        self._asked.set()

    def leave(self) -> None:
        """Get no more requests: it is about to be removed."""
        self._is_leaving = True
        self._shared.registry.drain(self.entry)

    async def remove(self, drain_s: float) -> None:
        """Drain it for so long at most, end it, and forget it; returns when nothing of it is left."""
        self.leave()
        await self._drain(drain_s)
        self._scope.cancel()
        await self._gone.wait()
        self._shared.registry.stopped(self.entry)
        self._shared.registry.remove(self.entry)
        self._shared.logbook.forget(self.id)
        if self._shared.workers.get(self.id) is self:
            del self._shared.workers[self.id]
        self._shared.remember()

    async def run(self) -> None:
        """Start it, and again after each end, until it has failed for good, is removed, or this is cancelled."""
        try:
            with self._scope:
                await self._restart_loop()
        finally:
            self._gone.set()

    async def _restart_loop(self) -> None:
        registry, failures = self._shared.registry, 0
        while True:
            if self._is_leaving:
                await trio.sleep_forever()
            end, was_well = await self._run_guarded()
            restart = self._shared.config.restart
            failures = 1 if was_well else failures + 1
            if end is None:
                failures = 0
                registry.stopped(self.entry)
            elif end.exit_code == EXIT_USAGE or failures >= restart.attempts_max:
                registry.fail(self.entry, end)
                self._shared.logbook.finish(self.id)
                log.error("worker %s %s; it is not started again", self.id, end)
                await self._asked.wait()
            else:
                wait_s = min(restart.longest_s, restart.first_s * 2.0 ** (failures - 1))
                registry.fail(self.entry, end, trio.current_time() + wait_s)
                log.error("worker %s %s; it is started again in %g s", self.id, end, wait_s)
                with trio.move_on_after(wait_s):
                    await self._asked.wait()
            if self._asked.is_set():
                self._asked, failures = trio.Event(), 0
            registry.restart(self.entry)

    async def _run_guarded(self) -> tuple[WorkerEnd | None, bool]:
        """See one start of it through; a bug in that counts as an end of it, and ends no other worker."""
        try:
            return await self._run_once()
        except Exception as error:
            log.exception("a bug watching over worker %s", self.id)
            with trio.CancelScope(shield=True):
                await self._sweep(self.pid, [])
            self._process, self._stamp = None, ""
            return WorkerEnd("could not be watched", time.time(), cause=repr(error)), False

    async def _run_once(self) -> tuple[WorkerEnd | None, bool]:
        """Start it and see how that ends: how (None where it was asked to), and whether it was well before."""
        if self._adopted is not None:
            process, self._adopted = self._adopted, None
            self._shared.registry.set_piped(self.entry, is_piped=False)
            self._shared.logbook.resume(self.id)
            return await self._supervise_process(process)
        problems = await self._look()
        if problems or self._asked.is_set():
            return self._end_without_process(" ".join(problems)) if problems else None, False
        watched = ours = None
        try:
            try:
                if self.spec.on_gateway_exit != "keep":
                    watched, ours = os.pipe()
                process = await self._spawn(watched)
            except (OSError, ValueError) as error:
                return self._end_without_process(str(error)), False
            finally:
                if watched is not None:
                    os.close(watched)
            return await self._supervise_process(process)
        finally:
            if ours is not None:
                os.close(ours)

    def _end_without_process(self, cause: str) -> WorkerEnd:
        lines = self._shared.logbook.last_lines(self.id, self._shared.config.logs.last_lines_max)
        return WorkerEnd("cannot be started", time.time(), cause=cause, last_lines=lines)

    async def _look(self) -> Sequence[str]:
        """Give what would keep it from starting, once those that are being stopped have left room for it."""
        shared = self._shared
        while True:
            if not any(one.leaves_room_for(self) for one in shared.workers.values() if one is not self):
                break
            await trio.sleep(ROOM_POLL_S)
        return await self._shared.look(self.spec, self._others())

    def _others(self) -> dict[str, ManagedWorkerConfig]:
        """Give the workers that have what they need before this one gets it: those that run, or were there first."""
        workers = list(self._shared.workers.values())
        earlier = workers[: workers.index(self)] if self in workers else workers
        having = [one for one in workers if one.pid or (one in earlier and not one.has_failed)]
        return {one.id: one.holds for one in having if one is not self}

    def leaves_room_for(self, other: "ManagedWorker") -> bool:
        """Say whether it is about to end, and has something that the other one needs: a GPU or the port."""
        if not (self.pid and (self._is_leaving or self._asked.is_set())):
            return False
        mine, others = self._running.gpu_ids, other.spec.gpu_ids
        gpus = mine != [] and others != [] and (mine is None or others is None or set(mine) & set(others))
        return bool(gpus) or (other.spec.port != 0 and other.spec.port == self._running.port)

    async def _spawn(self, watched: int | None) -> trio.Process:
        """Start its first process. Raises OSError or ValueError where that cannot be."""
        shared = self._shared
        command = command_of(shared.config, self.spec, self.id, self._socket, shared.state.control_socket)
        log.info("starting worker %s: %s", self.id, shown(command))
        output = shared.logbook.begin(self.id)
        shared.registry.set_piped(self.entry, is_piped=True)
        token = token_of(shared.config)
        token_fd = hand_over(token) if token else None
        try:
            return await trio.lowlevel.open_process(
                command,
                env=environment_of(shared.config, self.spec, self._mark, watched, token_fd),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=[fd for fd in (watched, token_fd) if fd is not None],
            )
        except BaseException:
            with trio.CancelScope(shield=True):
                await shared.logbook.end(self.id)
            raise
        finally:
            os.close(output)
            if token_fd is not None:
                os.close(token_fd)

    async def _supervise_process(self, process: trio.Process | AdoptedProcess) -> tuple[WorkerEnd | None, bool]:
        """Watch over a process until it has ended or shall, and then end all of it."""
        shared = self._shared
        self._process, self._stamp, self._running = process, "", self.spec
        with contextlib.suppress(OSError):
            self._stamp = process_identity(process.pid)
        shared.remember()
        ooms, why, was_well, is_cut = oom_kills(), None, False, True
        try:
            await processes.lower_session_priority(process.pid)
            why, was_well = await self._watch(process)
            is_cut = False
            if not (self._asked.is_set() or why):
                code = process.returncode
                shared.registry.fail(self.entry, WorkerEnd(describe_exit(code), time.time()), trio.current_time())
            elif why:
                log.error("worker %s is ended: it %s", self.id, why)
            else:
                await self._drain(shared.config.timeouts.drain_s)
        except Exception:
            is_cut = False
            raise
        finally:
            is_cut = is_cut and not (self._is_leaving or self._asked.is_set())
            with trio.CancelScope(shield=True):
                if is_cut and self._running.on_gateway_exit == "keep" and not _has_ended(process):
                    log.info("worker %s goes on without the gateway: the next one takes it over", self.id)
                else:
                    await self._end(process)
                    self._process, self._stamp = None, ""
                await shared.logbook.end(self.id)
                if isinstance(process, AdoptedProcess):
                    process.close()
                shared.remember()
        return None if self._asked.is_set() else self._record(process.returncode, why, ooms), was_well

    def _record(self, code: int | None, why: str | None, ooms: int | None) -> WorkerEnd:
        """Put together what is known of its end."""
        lines = self._shared.logbook.last_lines(self.id, CAUSE_LINES_MAX)
        now = oom_kills()
        was_killed = code == -signal.SIGKILL or any(word in line for line in lines for word in _KILLED)
        oom_killed = bool(why is None and was_killed and ooms is not None and now is not None and now > ooms)
        told = self.entry.heartbeat.failure if self.entry.heartbeat else ""
        return WorkerEnd(
            why or describe_exit(code),
            time.time(),
            exit_code=code if code is not None and code >= 0 else None,
            signal=describe_exit(code).rpartition(" ")[2] if code is not None and code < 0 else None,
            oom_killed=oom_killed,
            cause="" if why else cause_of(lines, code, oom_killed=oom_killed, told=told) or told,
            last_lines=lines[len(lines) - min(len(lines), self._shared.config.logs.last_lines_max) :],
        )

    async def _watch(self, process: trio.Process | AdoptedProcess) -> tuple[str | None, bool]:
        """Wait until it has ended, or is to be restarted, or must be ended: give why, and whether it was well."""
        began = trio.current_time()
        up_since = stuck_since = None
        why = None

        async def ended() -> None:
            await process.wait()
            nursery.cancel_scope.cancel()

        async def asked() -> None:
            await self._asked.wait()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ended)
            nursery.start_soon(asked)
            while True:
                await trio.sleep(WATCH_S)
                now, timeouts = trio.current_time(), self._shared.config.timeouts
                state = self._shared.registry.state(self.entry)
                if state in _UP:
                    up_since = up_since or now
                is_stuck = state in _STUCK or (isinstance(process, AdoptedProcess) and self.entry.heartbeat is None)
                stuck_since = (stuck_since or now) if is_stuck else None
                if state in _NOT_UP_YET and now - began > timeouts.load_s:
                    why = f"was not ready within {timeouts.load_s:g} s"
                elif stuck_since and timeouts.stuck_s and now - stuck_since > timeouts.stuck_s:
                    why = f"was {'wedged' if state == 'wedged' else 'silent'} for {timeouts.stuck_s:g} s"
                if why:
                    nursery.cancel_scope.cancel()
        well_s = self._shared.config.restart.well_s
        return why, up_since is not None and trio.current_time() - up_since >= well_s

    async def _drain(self, drain_s: float) -> None:
        """Give it no more requests, and wait until those it has are answered."""
        self._shared.registry.drain(self.entry)
        endpoint = self.entry.endpoint
        with trio.move_on_after(drain_s):
            while True:
                if endpoint is None or not endpoint.in_flight or self._shared.hurry.is_set():
                    break
                await trio.sleep(DRAIN_POLL_S)

    async def _end(self, process: trio.Process | AdoptedProcess) -> None:
        """End it and every process that stems from it: asked first, killed after `timeouts.stop_s`."""
        pid, stop_s = process.pid, self._shared.config.timeouts.stop_s
        family = await trio.to_thread.run_sync(processes.descendants, pid)
        pids = {pid, *(member.pid for member in family)}
        if not _has_ended(process):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            await self._wait(process, stop_s)
        if not _has_ended(process):
            log.warning("worker %s is killed: it did not end by itself", self.id)
            family += await trio.to_thread.run_sync(processes.descendants, pid)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with trio.move_on_after(SWEEP_S):
                await process.wait()
        left = await self._sweep(pid, family)
        with contextlib.suppress(OSError):
            os.unlink(self._socket)
        await self._wait_for_gpus(pids)
        if left:
            log.error("processes of worker %s are still there: %s", self.id, left)
        else:
            log.info("worker %s has ended, and nothing of it is left", self.id)

    async def _sweep(self, session: int, family: list[psutil.Process]) -> list[psutil.Process]:
        """Kill what an ended worker has left; give what is still there after a while. Resource trackers come last."""
        deadline = trio.current_time() + SWEEP_S

        def look_round() -> list[psutil.Process]:
            found = [*processes.session_members(session), *marked(self._mark)]
            return list({one.pid: one for one in [*found, *filter(processes.is_alive, family)]}.values())

        while True:
            left = family
            with trio.move_on_after(SWEEP_S):  # /proc does not answer for a process that hangs in a driver
                left = await trio.to_thread.run_sync(look_round, abandon_on_cancel=True)
            overdue = trio.current_time() > deadline
            processes.kill(one for one in left if overdue or not processes.is_resource_tracker(one))
            if not left or overdue:
                return left
            await trio.sleep(SWEEP_POLL_S)

    async def _wait_for_gpus(self, pids: set[int]) -> None:
        """Wait until the driver holds nothing of these processes any more."""
        if self.spec.gpu_ids == []:
            return
        with trio.move_on_after(GPU_FREE_S):
            while True:
                gpus = await find_gpus() or []
                if not any(process.pid in pids for gpu in gpus for process in gpu.processes):
                    return
                await trio.sleep(GPU_POLL_S)
        log.error("worker %s has ended, and a GPU still holds memory of it", self.id)

    async def _wait(self, process: trio.Process | AdoptedProcess, wait_s: float) -> None:
        with trio.move_on_after(wait_s):
            async with trio.open_nursery() as nursery:

                async def cancel_in_a_hurry() -> None:
                    await self._shared.hurry.wait()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(cancel_in_a_hurry)
                await process.wait()
                nursery.cancel_scope.cancel()


def _has_ended(process: trio.Process | AdoptedProcess) -> bool:
    return process.has_ended() if isinstance(process, AdoptedProcess) else process.returncode is not None
