"""Workers of the configuration that an operator has stopped: they are listed, and have no process until `start`."""

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

import attrs

from ichat.config.load import read_worker
from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.errors import ApiError
from ichat.fleet.worker_record import WorkerRecord
from ichat.supervisor.context import SupervisorContext
from ichat.supervisor.managed_worker import ManagedWorker
from ichat.supervisor.reload_plan import Change, text_of
from ichat.supervisor.restarts import Restarts
from ichat.supervisor.state import SavedStoppedWorker, saved_table

log = logging.getLogger(__name__)

_STAYS = "an operator has stopped it, and nothing of it has changed, so it stays stopped; `start` starts it"


@attrs.frozen
class StoppedWorker:
    """A worker that an operator has stopped, or is stopping."""

    spec: ManagedWorkerConfig
    at: float
    """When, in seconds since 1970."""
    record: WorkerRecord | None = attrs.field(default=None, repr=False)
    """Of the stopped worker; None while its process ends."""


class StoppedWorkers:
    """The stopped workers by their ids, each with a record in the table of workers."""

    def __init__(self, context: SupervisorContext) -> None:
        self._context = context
        self._workers: dict[str, StoppedWorker] = {}

    def __repr__(self) -> str:
        return f"<StoppedWorkers {[*self._workers]}>"

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._workers

    def add(self, worker_id: str, spec: ManagedWorkerConfig, at: float) -> None:
        """Note that a worker is stopped at this time, in seconds since 1970; `show` it when its process has ended."""
        self._workers[worker_id] = StoppedWorker(spec, at)
        self._context.memory.save_soon()

    def show(self, worker_id: str) -> None:
        """Have the table of workers show a worker without a process, if it is stopped."""
        found = self._workers.get(worker_id)
        if found is None:
            return
        context, spec = self._context, found.spec
        record = context.managed.expect(worker_id, [spec.model_name])
        settings = context.shown_settings(worker_id, spec, is_launched=False)
        context.managed.configure(record, names=[spec.model_name], max_in_flight=spec.max_in_flight, settings=settings)
        context.managed.stop(record, found.at)
        self._workers[worker_id] = attrs.evolve(found, record=record)

    def remove(self, worker_id: str) -> ManagedWorkerConfig | None:
        """Forget that a worker is stopped; return its table, or None if it was not stopped."""
        found = self._workers.pop(worker_id, None)
        if found is None:
            return None
        if found.record is not None:
            self._context.table.remove(found.record)
        self._context.memory.save_soon()
        return found.spec

    def keep(self, changes: Sequence[Change]) -> None:
        """Forget all stopped workers but those that these changes leave stopped."""
        kept = {change.worker_id for change in changes if change.why == _STAYS}
        for worker_id in self._workers.keys() - kept:
            self.remove(worker_id)

    def changes(
        self, wanted: Sequence[ManagedWorkerConfig], running: Sequence[ManagedWorkerConfig]
    ) -> tuple[list[ManagedWorkerConfig], list[Change]]:
        """Return the wanted tables without those of stopped workers, and the changes of those, which are none."""
        specs = {worker_id: one.spec for worker_id, one in self._workers.items()}
        kept = stay_stopped(wanted, running, specs)
        left = Counter(text_of(specs[worker_id]) for worker_id in kept)
        others: list[ManagedWorkerConfig] = []
        for table in reversed(wanted):
            if left[text_of(table)]:
                left[text_of(table)] -= 1
            else:
                others.append(table)
        return others[::-1], [Change("keep", worker_id, specs[worker_id], _STAYS) for worker_id in kept]

    def saved(self) -> list[SavedStoppedWorker]:
        """Return the workers for the next gateway."""
        return [
            SavedStoppedWorker(worker_id, saved_table(one.spec), one.at) for worker_id, one in self._workers.items()
        ]

    def restore(self, saved: Sequence[SavedStoppedWorker], config: Config) -> None:
        """List the workers that were stopped when an earlier gateway ended; a table that is wrong now is left out."""
        for one in saved:
            try:
                self.add(one.worker_id, read_worker(one.spec, config), one.at)
                self.show(one.worker_id)
            except ApiError as error:
                log.warning("worker %s is not listed as stopped: %s", one.worker_id, error)


def stay_stopped(
    wanted: Sequence[ManagedWorkerConfig],
    running: Sequence[ManagedWorkerConfig],
    stopped: Mapping[str, ManagedWorkerConfig],
) -> list[str]:
    """Return the stopped workers with tables that are wanted and that no running worker has: they stay stopped."""
    free = Counter(map(text_of, wanted)) - Counter(map(text_of, running))
    found: list[str] = []
    for worker_id, spec in stopped.items():
        if free[text_of(spec)] > 0:
            free[text_of(spec)] -= 1
            found.append(worker_id)
    return found


class WorkerCommands:
    """Carries out operators' commands for single workers: stop, start, restart, drain and resume."""

    def __init__(
        self,
        workers: Mapping[str, ManagedWorker],
        stopped: StoppedWorkers,
        restarts: Restarts,
        *,
        start: Callable[[str, ManagedWorkerConfig], object],
        remove: Callable[[ManagedWorker, float], Awaitable[None]],
    ) -> None:
        """`workers` are all managed workers; `start` starts a worker of the configuration, `remove` ends a worker."""
        self._workers = workers
        self._stopped = stopped
        self._restarts = restarts
        self._start = start
        self._remove = remove

    def __repr__(self) -> str:
        return f"<WorkerCommands for {len(self._workers)} workers>"

    async def stop(self, worker: ManagedWorker, drain_s: float) -> bool:
        """Drain a worker and end it; return whether it is listed as stopped then, or forgotten.

        Launched workers are forgotten, and copies with a number that follows their load. Raises ApiError 503.
        """
        stays = not (worker.is_launched or _is_scaled(worker))
        if stays:
            self._stopped.add(worker.id, worker.spec, time.time())
        try:
            await self._remove(worker, drain_s)
        except ApiError:
            self._stopped.remove(worker.id)
            raise
        return stays

    def start(self, worker_id: str) -> None:
        """Start a stopped worker, or a worker that has failed, at once. Raises ApiError 404, 409."""
        spec = None if worker_id in self._workers else self._stopped.remove(worker_id)
        if spec is not None:
            self._start(worker_id, spec)
            return
        worker = self._worker(worker_id)
        if not worker.record.is_down:
            raise _conflict(f"Worker {worker_id} is not stopped: it has nothing to start.")
        worker.restart(worker.spec)

    def restart(self, worker_id: str, drain_s: float) -> None:
        """Have a worker's process drained and ended, and another process started. Raises ApiError 404, 409."""
        if worker_id in self._stopped:
            raise _conflict(f"Worker {worker_id} is stopped: start it.")
        worker = self._worker(worker_id)
        self._restarts.forget(worker_id)
        worker.restart(worker.spec)
        worker.life.want(drain_s=drain_s)

    def drain(self, worker_id: str) -> None:
        """Send a worker no new requests until `resume`. Raises ApiError 404, 409."""
        worker = self._worker(worker_id)
        if worker.is_on_demand:
            raise _conflict(f"Worker {worker_id} is loaded on demand: unload its model.")
        if _is_scaled(worker):
            raise _conflict(f"Worker {worker_id} is a copy, and copies are drained by their load: scale its model.")
        if worker.record.is_down:
            raise _conflict(f"Worker {worker_id} has no process: it gets no requests.")
        worker.life.want(takes_requests=False)

    def resume(self, worker_id: str) -> None:
        """Send a drained worker requests again. Raises ApiError 404, 409."""
        worker = self._worker(worker_id)
        if worker.life.wanted.takes_requests or worker.is_on_demand:
            raise _conflict(f"Worker {worker_id} is not drained.")
        worker.life.want(takes_requests=True)

    def _worker(self, worker_id: str) -> ManagedWorker:
        worker = self._workers.get(worker_id)
        if worker is None:
            raise ApiError(404, "not_found", f"This gateway has started no worker {worker_id}.")
        if worker.is_leaving:
            raise _conflict(f"Worker {worker_id} is being stopped.")
        return worker


def _is_scaled(worker: ManagedWorker) -> bool:
    """Return whether the number of a worker's copies follows their load."""
    return worker.spec.replicas.max > max(1, worker.spec.replicas.min)


def _conflict(message: str) -> ApiError:
    return ApiError(409, "conflict", message, retry=False)
