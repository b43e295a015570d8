"""The process of a managed worker: started, and ended so that nothing of it is left.

Its descendants are found by its session and by the tag in its environment, wherever their parents have gone.
"""

import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Sequence

import attrs
import psutil
import trio

from ichat.config.schema import ManagedWorkerConfig
from ichat.fleet.worker_facts import WorkerEnd
from ichat.hardware.gpus import GpuReader
from ichat.listeners import wait_any
from ichat.security.keys import hand_over
from ichat.security.redact import shown
from ichat.supervisor import processes
from ichat.supervisor.launch import environment_of
from ichat.supervisor.launcher import Order
from ichat.supervisor.orphans import AdoptedProcess, marked, process_identity

log = logging.getLogger(__name__)


@attrs.frozen
class SweepTimes:
    """The limits on waiting until ended processes are cleared away, and how often the system is asked, in seconds."""

    sweep_s: float = 5.0
    """The limit until killed processes have disappeared."""
    poll_s: float = 0.05
    gpu_free_s: float = 10.0
    """The limit until the driver has freed the memory of ended processes."""
    gpu_poll_s: float = 0.5


@attrs.frozen
class ProcessPlace:
    """The marks by which the processes of a worker are found on a machine."""

    mark: str
    """In the environment of each of them (`WORKER_VARIABLE`)."""
    socket: str = ""
    """The unix socket on which the worker listens, removed at its end; empty: none."""


class WorkerProcess:
    """The first process of a start of a worker, with everything that stems from it."""

    waits_for = ""
    is_unanswered = False
    had_no_place = False
    node_id = ""
    reported_end: WorkerEnd | None = None

    def __init__(
        self,
        worker_id: str,
        spec: ManagedWorkerConfig,
        process: trio.Process | AdoptedProcess,
        place: ProcessPlace,
        *,
        gpus: GpuReader,
        times: SweepTimes,
    ) -> None:
        """`spec` is the table that the process was started with."""
        self.spec = spec
        self.identity = ""
        """Identifies it among later processes with its pid; empty if that is not known."""
        self.is_adopted = isinstance(process, AdoptedProcess)
        self._worker_id = worker_id
        self._process = process
        self._place = place
        self._gpus = gpus
        self._times = times
        self.launcher: int | None = None
        """The gateway's end of a pipe; when it closes everywhere, the worker sees that its gateway is gone."""
        self.held = contextlib.ExitStack()
        """Closed with the gateway's handles of the process."""
        with contextlib.suppress(OSError):
            self.identity = process_identity(process.pid)

    def __repr__(self) -> str:
        return f"<WorkerProcess {self.pid}>"

    @classmethod
    async def spawn(
        cls,
        order: Order,
        place: ProcessPlace,
        command: Sequence[str],
        *,
        token: str,
        output: int,
        gpus: GpuReader,
        times: SweepTimes,
    ) -> "WorkerProcess":
        """Start a worker that writes to the descriptor `output`. Raises OSError or ValueError where that cannot be.

        `token` is that of its gateway, or the worker's own key; empty: there is none.
        """
        worker_id, spec, config = order.worker_id, order.spec, order.config
        log.info("starting worker %s: %s", worker_id, shown(command))
        watched = launcher = token_fd = None
        with contextlib.ExitStack() as held, contextlib.ExitStack() as given:
            if spec.on_gateway_exit != "keep":
                watched, launcher = os.pipe()
                given.callback(os.close, watched)
                held.callback(os.close, launcher)
            if token:
                token_fd = hand_over(token)
                given.callback(os.close, token_fd)
            process = await trio.lowlevel.open_process(
                command,
                env=environment_of(config, spec, place.mark, watched, token_fd),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=[fd for fd in (watched, token_fd) if fd is not None],
            )
            spawned = cls(worker_id, spec, process, place, gpus=gpus, times=times)
            spawned.launcher, spawned.held = launcher, held.pop_all()
            return spawned

    @property
    def pid(self) -> int:
        """Its process id, also that of its session."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, a signal's number if negative; None while it runs, and always for an adopted process."""
        return self._process.returncode

    @property
    def has_ended(self) -> bool:
        """Whether it has ended."""
        process = self._process
        return process.has_ended() if isinstance(process, AdoptedProcess) else process.returncode is not None

    async def wait_change(self) -> None:
        """Wait for a change of `waits_for`: there is none."""
        await trio.sleep_forever()

    async def lower_priority(self) -> None:
        """Have the gateway go first where both want the same processor."""
        await processes.lower_session_priority(self.pid)

    async def wait(self) -> None:
        """Wait until it has ended."""
        await self._process.wait()

    def close(self) -> None:
        """Release the gateway's handles of it."""
        self.held.close()
        if isinstance(self._process, AdoptedProcess):
            self._process.close()

    async def end(self, stop_s: float, hurry: trio.Event) -> None:
        """End it and every process that stems from it: by SIGTERM, and by SIGKILL after `stop_s` or once `hurry`."""
        family = await trio.to_thread.run_sync(processes.descendants, self.pid)
        pids = {self.pid, *(member.pid for member in family)}
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            with trio.move_on_after(stop_s):
                await wait_any(self.wait, hurry.wait)
        if not self.has_ended:
            log.warning("worker %s is killed: it did not end by itself", self._worker_id)
            family += await trio.to_thread.run_sync(processes.descendants, self.pid)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            with trio.move_on_after(self._times.sweep_s):
                await self.wait()
        left = await self.sweep(family)
        with contextlib.suppress(OSError):
            os.unlink(self._place.socket)
        await self._wait_for_gpus(pids)
        if left:
            log.error("processes of worker %s are still there: %s", self._worker_id, left)
        else:
            log.info("worker %s has ended, and nothing of it is left", self._worker_id)

    async def sweep(self, family: list[psutil.Process]) -> list[psutil.Process]:
        """Kill the remaining processes of an ended worker, resource trackers last; return those that do not end."""
        deadline = trio.current_time() + self._times.sweep_s

        def find() -> list[psutil.Process]:
            found = [*processes.session_members(self.pid), *marked(self._place.mark)]
            return list({one.pid: one for one in [*found, *filter(processes.is_alive, family)]}.values())

        while True:
            left = family
            with trio.move_on_after(self._times.sweep_s):  # /proc does not answer for a process that hangs in a driver
                left = await trio.to_thread.run_sync(find, abandon_on_cancel=True)
            overdue = trio.current_time() > deadline
            processes.kill(one for one in left if overdue or not processes.is_resource_tracker(one))
            if not left or overdue:
                return left
            await trio.sleep(self._times.poll_s)

    async def _wait_for_gpus(self, pids: set[int]) -> None:
        """Wait until the driver holds no memory of these processes any more."""
        if self.spec.gpu_ids == []:
            return
        with trio.move_on_after(self._times.gpu_free_s):
            while True:
                gpus = await self._gpus.find() or []
                if not any(process.pid in pids for gpu in gpus for process in gpu.processes):
                    return
                await trio.sleep(self._times.gpu_poll_s)
        log.error("worker %s has ended, and a GPU still holds memory of it", self._worker_id)
