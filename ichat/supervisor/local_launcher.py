"""Starts workers as processes of the gateway's own machine, and finds those that an earlier gateway has left."""

import contextlib
import logging
import os
from collections.abc import Collection, Container, Mapping, Sequence

import attrs
import psutil
import trio

from ichat.config.process_marks import WORKER_VARIABLE, mark_of
from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.hardware.gpus import GpuReader, has_nvidia
from ichat.observability.logs.journal import JOURNAL
from ichat.observability.logs.pipes import OUTPUT
from ichat.observability.logs.store import LogStore
from ichat.placement.place import Wish
from ichat.placement.placeable_gpus import PlaceableGpu
from ichat.preflight.facts import Facts, KnownPythons, collect_facts, gpus_for, real_path_of
from ichat.preflight.placing import placeable, read_wish
from ichat.supervisor import processes
from ichat.supervisor.downloads import directory_for
from ichat.supervisor.kept import LAUNCHER, KeptDescriptors, Start
from ichat.supervisor.launch import command_of, devices_of, environment_of, python_of, token_of
from ichat.supervisor.launcher import Order
from ichat.supervisor.orphans import AdoptedProcess, marked_by, process_identity
from ichat.supervisor.state import SavedManagedWorker, StateDirectory
from ichat.supervisor.worker_process import ProcessPlace, SweepTimes, WorkerProcess

log = logging.getLogger(__name__)


FIND_S = 10.0
"""The limit on the search for processes of an earlier gateway."""


class LocalLauncher:
    """Starts workers on the gateway's own machine."""

    def __init__(
        self,
        state: StateDirectory,
        logs: LogStore,
        gpus: GpuReader,
        times: SweepTimes | None = None,
        *,
        kept: KeptDescriptors | None = None,
    ) -> None:
        """`kept` has the descriptors that outlive this process; None: all end with it."""
        self.logs = logs
        self._kept = kept or KeptDescriptors(is_shared=False)
        self._gpus = gpus
        self._state = state
        self._times = times or SweepTimes()
        self._pythons = KnownPythons()

    def __repr__(self) -> str:
        return f"<LocalLauncher {self._state.path}>"

    def socket_of(self, worker_id: str) -> str:
        """Return the unix socket by which the gateway reaches a worker."""
        return self._state.socket_of(worker_id)

    async def facts(self, config: Config, spec: ManagedWorkerConfig, limiter: trio.CapacityLimiter | None) -> Facts:
        """Return this machine's facts about a worker before its start. `limiter` bounds how many ask at once."""
        python, environment = python_of(config, spec), environment_of(config, spec, "")
        devices, located = devices_of(config, spec), await _located(config, spec)
        facts = await collect_facts(
            located, python, environment, devices, self._pythons, limiter=limiter, reader=self._gpus
        )
        return attrs.evolve(facts, real_path=real_path_of(spec.model_path))

    async def wish(self, config: Config, spec: ManagedWorkerConfig) -> Wish:
        """Return the wish of a worker with `gpus`, by its model's files here."""
        environment, python = environment_of(config, spec, ""), python_of(config, spec)
        wish = await trio.to_thread.run_sync(read_wish, await _located(config, spec), environment, python)
        if wish.circumstances is None:
            return wish
        return attrs.evolve(wish, circumstances=attrs.evolve(wish.circumstances, path=real_path_of(spec.model_path)))

    async def placeable(self, config: Config, spec: ManagedWorkerConfig) -> Sequence[PlaceableGpu] | None:
        """Return the GPUs that this machine has for such a worker; None if they are not known."""
        if spec.gpus == 0:
            return []
        devices, ours = devices_of(config, spec), self._state.mark_of("")

        def is_ours(pid: int) -> bool:
            return mark_of(pid, WORKER_VARIABLE).startswith(ours)

        gpus = await gpus_for(devices, self._gpus)
        return await trio.to_thread.run_sync(placeable, gpus, os.environ.get(devices), is_ours)

    async def start(self, order: Order) -> WorkerProcess:
        """Start a worker's first process. Raises OSError or ValueError where that cannot be."""
        worker_id, socket, control = order.worker_id, self.socket_of(order.worker_id), self._state.control_socket
        located = await _located(order.config, order.spec)
        command = command_of(order.config, located, worker_id, socket, control, has_gpus=has_nvidia())
        output, process = self.logs.begin(worker_id, is_kept=self._kept.is_shared), None
        try:
            process = await WorkerProcess.spawn(
                order, self._place(worker_id), command, token=token_of(order.config), output=output,
                gpus=self._gpus, times=self._times,
            )  # fmt: skip
            self._keep(worker_id, process)
            return process
        finally:
            os.close(output)
            if process is None:
                with trio.CancelScope(shield=True):
                    await self.logs.end(worker_id)

    def _place(self, worker_id: str) -> ProcessPlace:
        return ProcessPlace(self._state.mark_of(worker_id), self.socket_of(worker_id))

    def _keep(self, worker_id: str, process: WorkerProcess) -> None:
        """Have the descriptors of a new process outlive this process, if that can be."""
        start, found = (worker_id, process.identity), dict(self.logs.descriptors_of(worker_id))
        if process.launcher is not None:
            found[LAUNCHER] = process.launcher
        try:
            self._kept.keep(start, found)
        except OSError as error:
            log.error("worker %s cannot outlive this process: %s", worker_id, error.strerror or error)
        process.held.callback(self._kept.drop, start)

    async def find(self, started: Sequence[SavedManagedWorker]) -> Mapping[str, "FoundLocalProcess"]:
        """Return the processes of these workers that still run, by the workers' ids. Processes of others are killed.

        Their outputs are read on. There are no checkpoints between the last look at the processes and the return.
        """
        living = [one for one in started if _lives(one)]
        await self._end_unknown({one.worker_id for one in living})
        await self.read_on({(one.worker_id, one.stamp) for one in living})
        found: dict[str, FoundLocalProcess] = {}
        for one in filter(_lives, living):
            with contextlib.suppress(OSError):
                may_stay = LAUNCHER in self._kept.of((one.worker_id, one.stamp))
                found[one.worker_id] = FoundLocalProcess(one.worker_id, AdoptedProcess(one.pid), may_stay, self)
        return found

    async def _end_unknown(self, known: Collection[str]) -> None:
        """Kill processes that an earlier gateway with this state directory has left of workers other than these."""
        beginning = self._state.mark_of("")
        found: list[tuple[psutil.Process, str]] = []
        with trio.move_on_after(FIND_S):
            found = await trio.to_thread.run_sync(marked_by, beginning, abandon_on_cancel=True)
        for process, mark in found:
            if mark.removeprefix(beginning) not in known:
                log.warning("process %d is left of worker %s: it is killed", process.pid, mark.removeprefix(beginning))
                processes.kill([process])

    def adopt(self, worker_id: str, spec: ManagedWorkerConfig, adopted: AdoptedProcess) -> WorkerProcess:
        """Go on with a process that an earlier gateway has started."""
        process = WorkerProcess(worker_id, spec, adopted, self._place(worker_id), gpus=self._gpus, times=self._times)
        process.held.callback(self._kept.drop, (worker_id, process.identity))
        if not self.logs.is_piped(worker_id):
            self.logs.resume(worker_id)
        return process

    async def read_on(self, living: Container[Start]) -> None:
        """Read on the kept outputs of earlier starts; the outputs of starts that do not live are read to their end."""
        ids = {start[0] for start in self._kept.starts if start in living}
        for start in self._kept.starts:
            is_living = start in living
            if is_living or start[0] not in ids:
                await self._read_output(start)
            if not is_living:
                await self.logs.end(start[0])
                self._kept.drop(start)

    async def _read_output(self, start: Start) -> None:
        descriptors = self._kept.of(start)
        journal = descriptors.get(JOURNAL)
        if OUTPUT in descriptors:
            try:
                output = os.dup(descriptors[OUTPUT])
                await self.logs.go_on(start[0], output, None if journal is None else os.dup(journal))
            except (OSError, ValueError) as error:
                log.error("the output of worker %s cannot be read on: %s", start[0], error)


@attrs.frozen
class FoundLocalProcess:
    """A process on this machine that an earlier gateway has started, and that still runs."""

    worker_id: str
    process: AdoptedProcess
    may_stay: bool
    """Whether it has not seen that the gateway before was gone."""
    _launcher: LocalLauncher

    def adopt(self, config: Config, spec: ManagedWorkerConfig) -> WorkerProcess:
        """Go on with it; `spec` is the table that it was started with."""
        del config
        return self._launcher.adopt(self.worker_id, spec, self.process)


async def _located(config: Config, spec: ManagedWorkerConfig) -> ManagedWorkerConfig:
    """Return a worker's table with the directory of its model, if the gateway has downloaded that."""
    if spec.hub is None:
        return spec
    directory = await trio.to_thread.run_sync(directory_for, config, spec)
    return spec if directory is None else attrs.evolve(spec, model_path=directory)


def _lives(one: SavedManagedWorker) -> bool:
    with contextlib.suppress(OSError):
        return bool(one.stamp) and process_identity(one.pid) == one.stamp
    return False
