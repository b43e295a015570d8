"""The changes of workers' records by the processes that the gateway starts."""

from collections.abc import Mapping
from typing import Any

from ichat.fleet.load_times import WorkerLoads
from ichat.fleet.worker_facts import WorkerEnd
from ichat.fleet.worker_record import WorkerRecord
from ichat.fleet.worker_table import WorkerTable


class ManagedRecords:
    """Changes the records of managed workers as their processes change."""

    def __init__(self, table: WorkerTable, loads: WorkerLoads) -> None:
        self._table = table
        self._loads = loads
        self.times = loads.times
        """The durations of the last loads of managed workers."""

    def __repr__(self) -> str:
        return f"<ManagedRecords of {self._table!r}>"

    def expect(self, worker_id: str, names: list[str], unix_socket: str | None = None) -> WorkerRecord:
        """Add a worker that is being started here, before its first heartbeat."""
        worker = WorkerRecord(worker_id, managed=True, expected=names, unix_socket=unix_socket)
        worker.began_at = self._table.clock()
        self._table.enter(worker)
        self._table.record_change(worker)
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
        self._table.limit(worker)
        self._table.record_change(worker)

    def drain(self, worker: WorkerRecord, *, returns: bool = False) -> None:
        """Send a managed worker no more requests: it is about to be stopped, and started anew if it `returns`."""
        worker.is_drained, worker.returns = True, returns
        self._table.refresh(worker)
        self._table.changed()

    def resume(self, worker: WorkerRecord) -> None:
        """Send a managed worker requests again: it is not stopped after all."""
        worker.is_drained, worker.returns = False, False
        self._table.refresh(worker)
        self._table.changed()

    def cool(self, worker: WorkerRecord, end: WorkerEnd | None = None) -> None:
        """Record that a worker that is loaded on demand has no process now, and is loaded at the next request.

        `end` says how its process ended, if that was not asked for.
        """
        self._table.begin(worker)
        worker.absence, worker.ready_at, worker.end = "cold", None, end or worker.end
        self._table.record_change(worker)

    def stop(self, worker: WorkerRecord, at: float) -> None:
        """Record that an operator has stopped a worker, at this time in seconds since 1970."""
        worker.absence, worker.end = "stopped", WorkerEnd("was stopped by an operator", at)
        self._table.refresh(worker)
        self._table.record_change(worker)

    def expect_ready(self, worker: WorkerRecord, at: float | None) -> None:
        """Record when a worker that is being loaded will probably be ready; None: not known."""
        worker.ready_at = at

    def number(self, worker: WorkerRecord, copy: int, copies: int) -> None:
        """Set the number of a copy, and how many copies are wanted; 0: it is no copy."""
        if (worker.copy_number, worker.copies_wanted) != (copy, copies):
            worker.copy_number, worker.copies_wanted = copy, copies
            self._table.record_change(worker)

    def enter_load(self, worker: WorkerRecord, phase: str) -> None:
        """Record the gateway's own steps in starting a managed worker."""
        if self._loads.enter(worker, phase):
            self._table.changed()

    def note_load(self, worker: WorkerRecord, detail: str, left_s: float | None) -> None:
        """Record how far the gateway's own step in a worker's start is, and its probable rest in seconds."""
        if self._loads.note(worker, detail, left_s):
            self._table.changed()

    def lack(self, worker: WorkerRecord, why: str, *, is_unanswered: bool = False) -> None:
        """Record why a worker has no place to start at now; "": it has a place.

        `is_unanswered` says that the cluster that would start it does not answer.
        """
        if (worker.lacks, worker.is_unanswered) != (why, is_unanswered):
            worker.lacks, worker.is_unanswered = why, is_unanswered
            self._table.record_change(worker)

    def restart(self, worker: WorkerRecord) -> None:
        """Count another start of a managed worker, unless it was cold, and forget the facts of the start before."""
        worker.restarts += not worker.is_cold
        self._table.begin(worker)
        self._table.record_change(worker)

    def set_piped(self, worker: WorkerRecord, *, is_piped: bool) -> None:
        """Set whether the output of a managed worker arrives through a pipe of this gateway."""
        worker.is_piped = is_piped
        self._table.record_change(worker)
