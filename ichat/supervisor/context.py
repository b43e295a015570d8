"""What the starts of all managed workers share: the configuration, and where what is known of workers goes."""

import os
from collections.abc import Callable, Mapping, Sequence

import attrs
import trio

from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.observability.logs.store import LogStore
from ichat.routing.registry import Registry
from ichat.routing.waiting import wait_changed
from ichat.routing.worker_record import WorkerRecord
from ichat.supervisor.launch import environment_of, python_of
from ichat.supervisor.preflight import problems_of
from ichat.supervisor.preflight_facts import collect_facts
from ichat.supervisor.run_progress import RunProgress
from ichat.supervisor.state import StateDirectory
from ichat.supervisor.worker_process import SweepTimes, WorkerProcess


@attrs.define(eq=False)
class SupervisorContext:
    """What all managed workers share."""

    config: Config
    """The newest one."""
    registry: Registry
    log_store: LogStore
    state: StateDirectory
    remember: Callable[[], None]
    """Called when there is something new that the next gateway should know."""
    times: SweepTimes = attrs.field(factory=SweepTimes)
    hurry: trio.Event = attrs.field(factory=trio.Event)
    """Set when nothing is waited for any more."""

    async def preflight(
        self,
        spec: ManagedWorkerConfig,
        others: Mapping[str, ManagedWorkerConfig],
        limiter: trio.CapacityLimiter | None = None,
    ) -> Sequence[str]:
        """Return what would keep a worker from starting beside the others, each in a sentence."""
        python = python_of(self.config, spec)
        facts = await collect_facts(spec, python, environment_of(self.config, spec, ""), limiter=limiter)
        return problems_of(spec, python, others, facts)

    async def spawn(self, worker: WorkerRecord, spec: ManagedWorkerConfig) -> WorkerProcess:
        """Start a worker's first process. Raises OSError or ValueError where that cannot be."""
        output, process = self.log_store.begin(worker.id), None
        self.registry.set_piped(worker, is_piped=True)
        try:
            process = await WorkerProcess.spawn(
                worker.id, spec, self.config, self.state, output=output, times=self.times
            )
            return process
        finally:
            os.close(output)
            if process is None:
                with trio.CancelScope(shield=True):
                    await self.log_store.end(worker.id)

    async def wait_for_failure(self, worker: WorkerRecord, process: WorkerProcess, progress: RunProgress) -> str:
        """Wait until a worker has been loading or stuck for too long, and return which."""
        while True:
            now, timeouts = trio.current_time(), self.config.timeouts
            is_unheard = process.is_adopted and worker.heartbeat is None
            progress.record(self.registry.state(worker, sees_drain=False), now, is_unheard=is_unheard)
            if why := progress.failure(timeouts, now):
                return why
            with trio.move_on_at(min(*progress.deadlines(timeouts), self.registry.state_until(worker))):
                await wait_changed(self.registry)
