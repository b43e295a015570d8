"""Restarts of workers that still serve: beside the new worker where there is room, copies in turn."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import attrs

from ichat.config.schema import ManagedWorkerConfig
from ichat.fleet.worker_record import HEALTHY
from ichat.listeners import Listeners
from ichat.supervisor.context import SupervisorContext
from ichat.supervisor.managed_worker import ManagedWorker
from ichat.supervisor.reload_plan import Change

log = logging.getLogger(__name__)


@attrs.frozen
class ModelCopy:
    """A copy of a model."""

    worker_id: str
    serves: bool
    waits: bool
    """Whether it waits to be restarted."""


def next_restart(copies: Sequence[ModelCopy]) -> str | None:
    """Return the copy of a model to restart now, so that at most one of the copies does not serve; None: none."""
    idle = [one.worker_id for one in copies if one.waits and not one.serves]
    if idle:
        return idle[0]
    return next((one.worker_id for one in copies if one.waits), None) if all(one.serves for one in copies) else None


class StartWorker(Protocol):
    """Starts a new worker."""

    def __call__(self, spec: ManagedWorkerConfig, *, is_launched: bool = False) -> ManagedWorker:
        """Start a worker with this table, launched over the API or not."""
        ...


class Restarts:
    """Restarts workers with other tables."""

    def __init__(
        self,
        context: SupervisorContext,
        workers: Mapping[str, ManagedWorker],
        start: StartWorker,
        remove: Callable[[ManagedWorker], object],
    ) -> None:
        """`start` starts a new worker, `remove` drains and ends a worker for good."""
        self._context = context
        self._workers = workers
        self._start = start
        self._remove = remove
        self._replaced: dict[str, ManagedWorker] = {}
        """The new worker that will replace a worker once it is ready, by the id of the worker that still serves."""
        self._waiting: dict[str, Change] = {}
        """The restarts of copies that wait until the other copies of their models serve, by the copies' ids."""
        self._woken: Listeners[[]] = Listeners()

    def __repr__(self) -> str:
        return f"<Restarts of {[*self._replaced, *self._waiting]}>"

    def new_id(self, worker_id: str) -> str:
        """Return the id of the new worker that will replace a worker; "" if none will."""
        return self._replaced[worker_id].id if worker_id in self._replaced else ""

    def serves(self, worker: ManagedWorker) -> bool:
        """Return whether a worker serves its model, or has done so since its newest start and may do so again."""
        record = worker.record
        return worker.is_wanted and not record.is_down and (record.was_ready or self._is_ready(worker))

    def under_way(self) -> Sequence[str]:
        """Return the ids of the workers that will be replaced or restarted."""
        return [*self._replaced, *self._waiting]

    def forget(self, worker_id: str) -> None:
        """Cancel the restart of a worker, if any is planned."""
        self._replaced.pop(worker_id, None)
        self._waiting.pop(worker_id, None)

    def begin(self, worker: ManagedWorker, change: Change) -> None:
        """Restart a worker, as soon as that may be done."""
        if change.rolls:
            self._waiting[worker.id] = change
            self._woken()
        else:
            self._restart(worker, change)

    async def run_forever(self) -> None:
        """Go on with the restarts at each change of a worker."""
        self._context.table.changed.add(self._woken)
        while True:
            self._end_replaced()
            self._restart_next()
            await self._woken.wait()

    def _restart(self, worker: ManagedWorker, change: Change) -> None:
        """Have another process with this table, in a new worker if the old worker may serve until that is ready."""
        spec = change.spec
        assert spec is not None
        if change.new_first and spec.load == "start" and self.serves(worker) and worker not in self._replaced.values():
            new = self._replaced[worker.id] = self._start(spec)
            log.info("worker %s will replace worker %s once it is ready", new.id, worker.id)
        else:
            worker.restart(spec)

    def _restart_next(self) -> None:
        """Restart the waiting copies that may be restarted now."""
        for model in {change.spec.model_name for change in self._waiting.values() if change.spec is not None}:
            copies = [
                ModelCopy(one.id, one.is_wanted and self._is_ready(one), one.id in self._waiting)
                for one in self._workers.values()
                if one.spec.model_name == model and not (one.is_launched or one.is_leaving) and self._counts(one)
            ]
            if (worker_id := next_restart(copies)) is not None:
                self._restart(self._workers[worker_id], self._waiting.pop(worker_id))
                self._woken()
        for worker_id in [*self._waiting]:
            if worker_id not in self._workers or self._workers[worker_id].is_leaving:
                del self._waiting[worker_id]

    def _counts(self, worker: ManagedWorker) -> bool:
        """Return whether the restarts of its model's copies wait for a worker: it will serve without a request."""
        return worker.id in self._waiting or (worker.is_wanted and not worker.record.has_failed)

    def _end_replaced(self) -> None:
        """End the workers with new workers that are ready, or will be loaded on demand, unless a reload keeps them."""
        for old_id, new in [*self._replaced.items()]:
            old = self._workers.get(old_id)
            if old is None or old.is_leaving or new.is_leaving:
                del self._replaced[old_id]
            elif not new.is_wanted or self._is_ready(new):
                del self._replaced[old_id]
                self._remove(old)

    def _is_ready(self, worker: ManagedWorker) -> bool:
        return self._context.table.state(worker.record) in HEALTHY
