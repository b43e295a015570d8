"""The workers that the gateway starts: their processes, from the launch to the proof that nothing of them is left."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence

import psutil
import trio

import ichat
from ichat import processes
from ichat.config import Config, ManagedWorker, engine_flags
from ichat.masking import shown
from ichat.registry import Registry

log = logging.getLogger(__name__)

SWEEP_S = 5.0
"""How long killed processes may take to disappear."""
SWEEP_POLL_S = 0.05
STDERR = 2
HEAD_BYTES_MORE = 8192
"""What the gateway may add to the head of a request."""


_SIGNALS = {int(number): number.name for number in signal.Signals}


class Supervisor:
    """Starts the configured workers and ends them."""

    def __init__(self, config: Config, registry: Registry, directory: str, control_socket: str) -> None:
        """`directory` is for the workers' unix sockets; they beat to the control socket."""
        self._config = config
        self._registry = registry
        self._directory = directory
        self._control_socket = control_socket
        self._hurry = trio.Event()

    def hurry(self) -> None:
        """Kill rather than wait, from now on."""
        self._hurry.set()

    async def run(self) -> None:
        """Start every managed worker and watch over it until cancelled; then end them all, together."""
        async with trio.open_nursery() as nursery:
            taken: set[str] = set()
            for number, worker in enumerate(self._config.managed_workers):
                worker_id = _id_for(worker.model_name, taken)
                taken.add(worker_id)
                nursery.start_soon(self._guard, worker_id, worker, os.path.join(self._directory, str(number)))

    async def _guard(self, worker_id: str, worker: ManagedWorker, unix_socket: str) -> None:
        """Watch over one worker; a bug in that must not end the others."""
        try:
            await self._watch(worker_id, worker, unix_socket)
        except Exception:
            log.exception("a bug watching over worker %s", worker_id)

    async def _watch(self, worker_id: str, worker: ManagedWorker, unix_socket: str) -> None:
        entry = self._registry.expect(worker_id, [worker.model_name], unix_socket)
        watched, ours = os.pipe()
        try:
            command = self._command(worker_id, worker, unix_socket)
            log.info("starting worker %s: %s", worker_id, shown(command))
            try:
                process = await trio.lowlevel.open_process(
                    command,
                    env=self._environment(worker, watched),
                    stdin=subprocess.DEVNULL,
                    stdout=STDERR,  # ours is for the access log
                    start_new_session=True,
                    pass_fds=(watched,),
                )
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                self._registry.fail(entry, f"could not be started: {command[0]}: {reason}")
                log.error("worker %s %s", worker_id, entry.failure)
                return
            finally:
                os.close(watched)
            try:
                await process.wait()
                self._registry.fail(entry, _how_it_ended(process.returncode))
                log.error("worker %s %s", worker_id, entry.failure)
            finally:
                with trio.CancelScope(shield=True):
                    await self._end(worker_id, process)
        finally:
            os.close(ours)

    async def _end(self, worker_id: str, process: trio.Process) -> None:
        """End a worker and every process that stems from it: asked first, killed after `timeouts.stop_s`."""
        family = processes.descendants(process.pid)
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            await self._wait(process, self._config.timeouts.stop_s)
        if process.returncode is None:
            log.warning("worker %s is killed: it did not end by itself", worker_id)
            process.kill()
            with trio.move_on_after(SWEEP_S):
                await process.wait()
        left = await self._sweep(process.pid, family)
        if left:
            log.error("processes of worker %s are still there: %s", worker_id, left)
        else:
            log.info("worker %s has ended, and nothing of it is left", worker_id)

    async def _sweep(self, session: int, family: list[psutil.Process]) -> list[psutil.Process]:
        """Kill what an ended worker has left; give what is still there after a while. Resource trackers come last."""
        deadline = trio.current_time() + SWEEP_S
        while True:
            left = [*processes.session_members(session), *(one for one in family if processes.is_alive(one))]
            overdue = trio.current_time() > deadline
            processes.kill(one for one in left if overdue or not processes.is_resource_tracker(one))
            if not left or overdue:
                return left
            await trio.sleep(SWEEP_POLL_S)

    async def _wait(self, process: trio.Process, wait_s: float) -> None:
        with trio.move_on_after(wait_s):
            async with trio.open_nursery() as nursery:

                async def cancel_in_a_hurry() -> None:
                    await self._hurry.wait()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(cancel_in_a_hurry)
                await process.wait()
                nursery.cancel_scope.cancel()

    def _command(self, worker_id: str, worker: ManagedWorker, unix_socket: str) -> list[str]:
        engine = self._config.engines.get(worker.backend)
        python = worker.python or (engine.python if engine else None) or sys.executable
        return [
            *_program(python),
            "worker",
            f"--backend={worker.backend}",
            f"--worker-id={worker_id}",
            f"--gateway-address=unix:{self._control_socket}",
            f"--heartbeat-interval={worker.heartbeat_interval:g}",
            f"--served-model-name={worker.model_name}",
            f"--host={worker.host}",
            f"--port={worker.port}",
            f"--unix-socket={unix_socket}",
            f"--max-in-flight={worker.max_in_flight or 0}",
            *self._bounds(),
            f"--drain-s={self._config.timeouts.stop_s / 2:g}",
            f"--stop-s={self._config.timeouts.stop_s / 3:g}",
            f"--model={worker.model_path}",
            *engine_flags(worker.backend_args),
        ]

    def _bounds(self) -> list[str]:
        """Give the gateway's own bounds as flags: what it lets through, its worker must not refuse."""
        limits, timeouts = self._config.limits, self._config.timeouts
        return [
            f"--head-bytes-max={limits.head_bytes_max + HEAD_BYTES_MORE}",
            f"--body-bytes-max={limits.body_bytes_max}",
            f"--connections-max={limits.connections_max}",
            f"--client-stall-s={timeouts.client_stall_s:g}",
        ]

    def _environment(self, worker: ManagedWorker, watched: int) -> Mapping[str, str]:
        environment = {**os.environ, processes.LAUNCHER_FD: str(watched), "PYTHONUNBUFFERED": "1"}
        if worker.gpu_ids is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, worker.gpu_ids))
        if not zipfile.is_zipfile(sys.argv[0]):
            source = os.path.dirname(os.path.dirname(os.path.abspath(ichat.__file__)))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        return {**environment, **worker.env}


def _program(python: str) -> Sequence[str]:
    """Give the command that runs iChat as this process was started: the same pyz, or the same source."""
    if zipfile.is_zipfile(sys.argv[0]):
        return [python, os.path.abspath(sys.argv[0])]
    return [python, "-m", "ichat"]


def _id_for(model_name: str, taken: set[str]) -> str:
    """Make a worker id of a model's name: readable, fit for a path, and the same at every start."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", model_name)[:100].strip("-") or "worker"
    number = 0
    while f"{slug}-{number}" in taken:
        number += 1
    return f"{slug}-{number}"


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by signal {_SIGNALS.get(-code, -code)}"
    return f"ended with exit code {code}"
