"""The changes of workers' records by the processes that the gateway starts."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ichat.fleet.load_times import WorkerLoads
from ichat.fleet.model_directory import ModelDirectory
from ichat.fleet.worker_facts import WorkerEnd
from ichat.fleet.worker_record import WorkerRecord
from ichat.listeners import Listeners
from ichat.routing.endpoint import Endpoint


class ManagedRecords(ModelDirectory):
    """Workers and models, with records that change with the workers' processes."""

    def __init__(
        self,
        external: Mapping[str, Sequence[Endpoint]],
        clock: Callable[[], float],
        max_in_flight: int,
        wedged_after_s: float = math.inf,
    ) -> None:
        """`external` has the endpoints of each external model; `max_in_flight` is the default of a worker."""
        super().__init__(external, clock, wedged_after_s)
        self.max_in_flight = max_in_flight
        self.loads = WorkerLoads(clock)
        self.changed: Listeners[[]] = Listeners()
        """Called after every change, except changes by time alone."""
        self.version = 0
        """Grows with each change of which the state directory or a log follower must know."""

    def expect(self, worker_id: str, names: list[str], unix_socket: str | None = None) -> WorkerRecord:
        """Add a worker that is being started here, before its first heartbeat."""
        worker = WorkerRecord(worker_id, managed=True, expected=names, unix_socket=unix_socket)
        worker.began_at = self._clock()
        self._enter(worker)
        self._record_change(worker)
        return worker

    def configure(
        self,
        worker: WorkerRecord,
        *,
        names: list[str],
        max_in_flight: int | None,
        settings: Mapping[str, Any],
        on_demand: bool = False,
    ) -> None:
        """Set a managed worker's models, its number of concurrent requests, and the settings shown to operators.

        `on_demand` says that it has a process only while its model is wanted. Such a worker keeps its adapters' names.
        """
        if not on_demand or worker.expected[:1] != names[:1]:
            worker.expected = names
        worker.max_in_flight, worker.settings, worker.on_demand = max_in_flight, settings, on_demand
        self._set_concurrency(worker)
        self._record_change(worker)

    def drain(self, worker: WorkerRecord, *, returns: bool = False) -> None:
        """Send a managed worker no more requests: it is about to be stopped, and started anew if it `returns`."""
        worker.is_drained, worker.returns = True, worker.returns or returns
        self.refresh(worker)
        self.changed()

    def resume(self, worker: WorkerRecord) -> None:
        """Send a managed worker requests again: it is not stopped after all."""
        worker.is_drained = False
        self.refresh(worker)
        self.changed()

    def cool(self, worker: WorkerRecord, end: WorkerEnd | None = None) -> None:
        """Record that a worker that is loaded on demand has no process now, and is loaded at the next request.

        `end` says how its process ended, if that was not asked for.
        """
        self._begin(worker)
        worker.absence, worker.ready_at, worker.end = "cold", None, end or worker.end
        self._record_change(worker)

    def expect_ready(self, worker: WorkerRecord, at: float | None) -> None:
        """Record when a worker that is being loaded will probably be ready; None: not known."""
        worker.ready_at = at

    def enter_load(self, worker: WorkerRecord, phase: str) -> None:
        """Record the gateway's own steps in starting a managed worker."""
        if self.loads.enter(worker, phase):
            self.changed()

    def restart(self, worker: WorkerRecord) -> None:
        """Count another start of a managed worker, unless it was cold, and forget the facts of the start before."""
        worker.restarts += not worker.is_cold
        self._begin(worker)
        self._record_change(worker)

    def set_piped(self, worker: WorkerRecord, *, is_piped: bool) -> None:
        """Set whether the output of a managed worker arrives through a pipe of this gateway."""
        worker.is_piped = is_piped
        self._record_change(worker)

    def stopped(self, worker: WorkerRecord) -> None:
        """Record that a managed worker was ended on purpose."""
        self._break_group_of(worker, "was stopped")

    def fail(self, worker: WorkerRecord, end: WorkerEnd, retry_at: float | None = None) -> None:
        """Record how a worker ended by itself, and when it will be started again."""
        if not worker.is_down:
            self._break_group_of(worker, end.why)
        worker.end, worker.absence, worker.retry_at, worker.ready_at = end, "down", retry_at, None
        worker.load = None
        self._record_change(worker)

    def _begin(self, worker: WorkerRecord) -> None:
        """Forget the facts of an earlier start of a worker."""
        worker.begin()
        worker.began_at = self._clock() if worker.managed else None
        if (endpoint := self.endpoint_of(worker)) is not None:
            endpoint.begin()

    def _set_concurrency(self, worker: WorkerRecord) -> None:
        if (endpoint := self.endpoint_of(worker)) is not None and worker.heartbeat:
            endpoint.limit(worker.max_in_flight or worker.heartbeat.max_in_flight or self.max_in_flight)

    def _record_change(self, worker: WorkerRecord) -> None:
        """Record a change of a worker that the next gateway should know of."""
        self.refresh(worker)
        self.version += 1
        self.changed()
