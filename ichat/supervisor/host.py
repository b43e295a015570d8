"""The place of managed workers: a machine that reports its resources, starts their processes and keeps their output."""

import logging
import os
from collections.abc import Container
from typing import Protocol

import psutil
import trio

from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.hardware.gpus import GpuReader
from ichat.observability.logs.journal import JOURNAL
from ichat.observability.logs.pipes import OUTPUT
from ichat.observability.logs.store import LogStore
from ichat.preflight.facts import Facts, KnownPythons, collect_facts
from ichat.supervisor.kept import LAUNCHER, KeptDescriptors, Start
from ichat.supervisor.launch import devices_of, environment_of, python_of
from ichat.supervisor.orphans import AdoptedProcess
from ichat.supervisor.state import StateDirectory
from ichat.supervisor.worker_process import SweepTimes, WorkerProcess

log = logging.getLogger(__name__)


class HostProcess(Protocol):
    """The first process of a start of a worker, on any host."""

    spec: ManagedWorkerConfig
    identity: str
    is_adopted: bool

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    @property
    def returncode(self) -> int | None:
        """Its exit code, a signal's number if negative; None while it runs, or if it is not known."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether it has ended."""
        ...

    async def wait(self) -> None:
        """Wait until it has ended."""
        ...

    async def end(self, stop_s: float, hurry: trio.Event) -> None:
        """Signal it to end, kill it after `stop_s` or once `hurry`, and sweep what stems from it."""
        ...

    async def sweep(self, family: list[psutil.Process]) -> list[psutil.Process]:
        """Kill the remaining processes; return those that are still there after a while."""
        ...

    def close(self) -> None:
        """Release the gateway's handles of it."""
        ...


class Host(Protocol):
    """A machine on which workers run."""

    @property
    def logs(self) -> LogStore:
        """The output of its workers."""
        ...

    def socket_of(self, worker_id: str) -> str:
        """Return the unix socket by which the gateway reaches a worker."""
        ...

    async def facts(self, config: Config, spec: ManagedWorkerConfig, limiter: trio.CapacityLimiter | None) -> Facts:
        """Return the machine's facts about a worker before its start. `limiter` bounds how many ask at once."""
        ...

    async def spawn(self, config: Config, worker_id: str, spec: ManagedWorkerConfig) -> HostProcess:
        """Start a worker's first process. Raises OSError or ValueError where that cannot be."""
        ...

    def adopt(self, worker_id: str, spec: ManagedWorkerConfig, adopted: AdoptedProcess) -> HostProcess:
        """Go on with a process that an earlier gateway has started."""
        ...

    async def restore(self, living: Container[Start]) -> None:
        """Read on the kept outputs of earlier starts; the outputs of starts that do not live are read to their end."""
        ...

    def may_stay(self, start: Start) -> bool:
        """Return whether the process of a start has not seen that the gateway before was gone."""
        ...


class LocalHost:
    """The gateway's own machine."""

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
        return f"<LocalHost {self._state.path}>"

    def socket_of(self, worker_id: str) -> str:
        """Return the unix socket by which the gateway reaches a worker."""
        return self._state.socket_of(worker_id)

    async def facts(self, config: Config, spec: ManagedWorkerConfig, limiter: trio.CapacityLimiter | None) -> Facts:
        """Return this machine's facts about a worker before its start. `limiter` bounds how many ask at once."""
        python, environment = python_of(config, spec), environment_of(config, spec, "")
        devices = devices_of(config, spec)
        return await collect_facts(
            spec, python, environment, devices, self._pythons, limiter=limiter, reader=self._gpus
        )

    async def spawn(self, config: Config, worker_id: str, spec: ManagedWorkerConfig) -> WorkerProcess:
        """Start a worker's first process. Raises OSError or ValueError where that cannot be."""
        output, process = self.logs.begin(worker_id, is_kept=self._kept.is_shared), None
        try:
            process = await WorkerProcess.spawn(
                worker_id, spec, config, self._state, output=output, gpus=self._gpus, times=self._times
            )
            self._keep(worker_id, process)
            return process
        finally:
            os.close(output)
            if process is None:
                with trio.CancelScope(shield=True):
                    await self.logs.end(worker_id)

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

    def adopt(self, worker_id: str, spec: ManagedWorkerConfig, adopted: AdoptedProcess) -> WorkerProcess:
        """Go on with a process that an earlier gateway has started."""
        process = WorkerProcess(worker_id, spec, adopted, self._state, gpus=self._gpus, times=self._times)
        process.held.callback(self._kept.drop, (worker_id, process.identity))
        if not self.logs.is_piped(worker_id):
            self.logs.resume(worker_id)
        return process

    async def restore(self, living: Container[Start]) -> None:
        """Read on the kept outputs of earlier starts; the outputs of starts that do not live are read to their end."""
        ids = {start[0] for start in self._kept.starts if start in living}
        for start in self._kept.starts:
            is_living = start in living
            if is_living or start[0] not in ids:
                await self._read_on(start)
            if not is_living:
                await self.logs.end(start[0])
                self._kept.drop(start)

    async def _read_on(self, start: Start) -> None:
        descriptors = self._kept.of(start)
        journal = descriptors.get(JOURNAL)
        if OUTPUT in descriptors:
            try:
                output = os.dup(descriptors[OUTPUT])
                await self.logs.go_on(start[0], output, None if journal is None else os.dup(journal))
            except (OSError, ValueError) as error:
                log.error("the output of worker %s cannot be read on: %s", start[0], error)

    def may_stay(self, start: Start) -> bool:
        """Return whether the process of a start has not seen that the gateway before was gone."""
        return LAUNCHER in self._kept.of(start)
