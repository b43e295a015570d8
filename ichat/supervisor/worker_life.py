"""The only owner of a managed worker's two values: the wanted and the actual state."""

import logging
import math
from typing import Literal

import attrs
import trio

from ichat.config.schema import Restart
from ichat.fleet.managed_records import ManagedRecords
from ichat.fleet.worker_facts import WorkerEnd
from ichat.fleet.worker_record import WorkerRecord
from ichat.fleet.worker_table import WorkerTable
from ichat.listeners import Listeners
from ichat.supervisor import life
from ichat.supervisor.launcher import LaunchedProcess
from ichat.supervisor.life import Actual, Alive, LifeAction, NoProcess, Wanted
from ichat.supervisor.run_progress import RunResult
from ichat.supervisor.swaps import Phase

log = logging.getLogger(__name__)


class WorkerLife:
    """The wanted and the actual state of a worker, shown in its record at every change."""

    def __init__(
        self, table: WorkerTable, managed: ManagedRecords, record: WorkerRecord, wanted: Wanted, actual: Actual
    ) -> None:
        self._table = table
        self._managed = managed
        self._record = record
        self.wanted = wanted
        self.actual = actual
        self.process: LaunchedProcess | None = None
        """The process of the newest start, until nothing is left of it."""
        self.failed_change: Literal["", "asleep", "ready"] = ""
        """The change of the engine that has failed at this start."""
        self._changed: Listeners[[]] = Listeners()
        """Called at a change of either value."""

    def __repr__(self) -> str:
        return f"<WorkerLife {self.actual}, wanted {self.wanted}>"

    @property
    def must_end(self) -> bool:
        """Whether the process, if there is any, must end."""
        return isinstance(self.actual, Alive) and life.must_end(self.wanted, self.actual)

    @property
    def phase(self) -> Phase:
        """How far the worker is on the way to serve its model, or to give its room back."""
        self._observe()
        return life.phase_of(self.wanted, self.actual, self._table.state(self._record, sees_drain=False))

    @property
    def may_start_at(self) -> float:
        """The earliest time of the next start after a failure, in seconds of Trio's clock."""
        actual = self.actual
        return actual.may_start_at if isinstance(actual, NoProcess) and actual.run >= self.wanted.run else -math.inf

    def want(
        self,
        state: Literal["cold", "loaded", "asleep", "gone"] | None = None,
        *,
        takes_requests: bool | None = None,
        drain_s: float | None = None,
    ) -> None:
        """Change the wanted values, except those that are None. A worker that is leaving stays so."""
        self._observe()
        wanted = self.wanted
        if state is not None and wanted.state != "gone":
            wanted = attrs.evolve(wanted, state=state)
        if takes_requests is not None:
            wanted = attrs.evolve(wanted, takes_requests=takes_requests)
        if drain_s is not None:
            wanted = attrs.evolve(wanted, drain_s=drain_s)
        self.set(wanted, self.actual)

    def want_new_run(self, state: Literal["cold", "loaded"] = "loaded", drain_s: float | None = None) -> None:
        """Have the process end, after a drain for this time at most (None: the configured time)."""
        if self.wanted.state != "gone":
            self.set(Wanted(state, self.wanted.run + 1, drain_s), self.actual)

    def be(self, actual: Actual) -> None:
        """Note a new actual state."""
        self.set(self.wanted, actual)

    def set(self, wanted: Wanted, actual: Actual, end: WorkerEnd | None = None) -> None:
        """Go on with these values. Everything that shows them, or waits for them, hears of a change.

        `end` says how a process has ended by itself.
        """
        if wanted == self.wanted and actual == self.actual:
            return
        before, self.wanted, self.actual = self.actual, wanted, actual
        self._changed()
        self._show(before, end)

    def _show(self, before: Actual, end: WorkerEnd | None) -> None:
        """Have the record show the step from an earlier actual state to the present state."""
        table, managed, record, wanted, actual = self._table, self._managed, self._record, self.wanted, self.actual
        earlier, kind = life.absence_of(before), life.absence_of(actual)
        if isinstance(actual, NoProcess) and kind == "failed" and end is not None:
            table.fail(record, end, None if actual.may_start_at == math.inf else actual.may_start_at)
        elif kind == "cold" and earlier != "cold":
            managed.cool(record, end)
        elif kind == "stopped" and not earlier:
            table.break_group_of(record, "was stopped")
        elif earlier and not kind:
            managed.restart(record)
        is_drained = life.is_drained(wanted, actual, on_demand=record.on_demand)
        returns = life.does_return(wanted, actual)
        if is_drained is None or (is_drained, returns) == (record.is_drained, record.returns):
            table.changed()
        elif is_drained:
            managed.drain(record, returns=returns)
        else:
            managed.resume(record)

    def load(self) -> None:
        """Want the model loaded; a worker that was cold is shown as started at once."""
        self.want("loaded", takes_requests=True)
        if isinstance(self.actual, NoProcess) and self.actual.kind == "cold" and self.wanted.state == "loaded":
            self.be(attrs.evolve(self.actual, kind="new"))

    def unload(self, drain_s: float | None = None) -> None:
        """Want the process drained for this time at most and ended, and no other process until `load`."""
        if self.wanted.state in ("loaded", "asleep"):
            self.want_new_run("cold" if self._record.on_demand else "loaded", drain_s)

    def sleep(self) -> None:
        """Want the worker drained, and its engine asleep, though that may have failed before."""
        if self.phase in ("ready", "draining"):
            self.failed_change = ""
            self.want("asleep", takes_requests=True)

    @property
    def is_falling_asleep(self) -> bool:
        """Whether the engine is wanted to sleep and does not yet."""
        return self.wanted.state == "asleep" and self.phase == "ending"

    def fail_change(self, to: Literal["asleep", "ready"]) -> None:
        """Note that the engine has not gone to sleep, or has not woken."""
        self.failed_change = to

    def note_failed_change(self, to: str) -> None:
        """Note the change of the engine that has failed in another process of this gateway."""
        self.failed_change = "asleep" if to == "asleep" else "ready" if to == "ready" else ""

    def hold(self, process: LaunchedProcess | None) -> None:
        """Note the process of the newest start; None: nothing is left of it."""
        self.process = process

    def begin(self) -> None:
        """Note that a start begins."""
        assert isinstance(self.actual, NoProcess)
        self.failed_change = ""
        self.be(life.begun(self.wanted, self.actual))

    def cool(self) -> None:
        """Note that there is no process, and that none is wanted."""
        assert isinstance(self.actual, NoProcess)
        self.be(attrs.evolve(self.actual, kind="cold"))

    def forgive(self) -> None:
        """Forget the failures; a worker that is loaded on demand is cold then."""
        self.be(life.forgiven(self.actual))
        if isinstance(self.actual, NoProcess) and self.actual.kind == "failed" and self._record.on_demand:
            self.cool()

    def end_run(self, result: RunResult, settings: Restart) -> bool:
        """Note the end of a run; return whether no start follows before an operator or a reload asks for it."""
        record, now, before = self._record, trio.current_time(), self.actual
        assert isinstance(before, Alive)
        wanted, actual = life.ended(self.wanted, before, result, settings, now, on_demand=record.on_demand)
        is_final = actual.may_start_at == math.inf
        if actual.kind != "stopped":
            again = "can be loaded" if record.on_demand else "is started"
            what = "is not started again" if is_final else f"{again} again in {actual.may_start_at - now:g} s"
            log.error("worker %s %s; it %s", record.id, result.end, what)
        self.set(wanted, actual, result.end)
        return is_final

    def next_action(self) -> LifeAction:
        """Return what to do now."""
        self._observe()
        return life.next_action(self.wanted, self.actual, trio.current_time())

    def _observe(self) -> None:
        """Note the worker's report. Listeners have heard of that already, from the table of workers."""
        state = self._table.state(self._record, sees_drain=False)
        self.wanted, self.actual = life.observed(self.wanted, self.actual, state)

    async def wait_changed(self, until: float = math.inf) -> None:
        """Wait for a change of either value, until this time at most."""
        with trio.move_on_at(until):
            await self._changed.wait()

    async def wait_end(self) -> None:
        """Wait until the process must end."""
        while self.next_action().kind != "end":
            await self.wait_changed()
