"""A process of a managed worker: put to sleep and woken as is wanted, watched, drained and ended."""

import logging
import math
import time
from functools import partial
from typing import Literal

import attrs
import trio

from ichat.fleet.worker_facts import WorkerEnd
from ichat.fleet.worker_record import WorkerRecord
from ichat.http import client
from ichat.listeners import wait_any
from ichat.protocol.load_story import STARTING
from ichat.supervisor.context import SupervisorContext
from ichat.supervisor.failure_causes import describe_exit
from ichat.supervisor.last_words import LINES_MAX
from ichat.supervisor.launcher import LaunchedProcess
from ichat.supervisor.life import Alive, Changing, Clearing, Serving, Sleeping
from ichat.supervisor.run_progress import RunProgress, RunResult, lack_of
from ichat.supervisor.worker_life import WorkerLife

log = logging.getLogger(__name__)


class WorkerRun:
    """A process of a worker, from its start to its end."""

    def __init__(
        self, process: LaunchedProcess, worker: WorkerRecord, life: WorkerLife, context: SupervisorContext
    ) -> None:
        self._process = process
        self._worker = worker
        self._life = life
        self._context = context

    def __repr__(self) -> str:
        return f"<WorkerRun of {self._worker.id}: {self._process!r}>"

    async def supervise(self) -> RunResult:
        """Wait until the process has ended or must end, and then end all that stems from it.

        If this is cancelled, a process that may outlive its gateway goes on.
        """
        context, process, worker, life = self._context, self._process, self._worker, self._life
        life.hold(process)
        context.memory.save_soon()
        why, is_watched, up_s, progress = "", True, -1.0, RunProgress(trio.current_time())
        try:
            await process.lower_priority()
            why = await self._wait_for_end(progress)
            is_watched, up_s = False, progress.up_s(trio.current_time())
            progress.end()
            if why:
                log.error("worker %s is ended: it %s", worker.id, why)
            elif life.must_end:
                await self._drain()
            elif not worker.on_demand:
                known = WorkerEnd(describe_exit(process.returncode), progress.ended_at or time.time())
                context.table.fail(worker, process.reported_end or known, trio.current_time())
            self._be(Clearing)
        finally:
            is_cancelled = trio.current_effective_deadline() == -math.inf
            is_cut = is_watched and is_cancelled and not life.must_end
            with trio.CancelScope(shield=True):
                if context.is_handed_over:
                    log.info("worker %s goes on with another process of this gateway", worker.id)
                elif is_cut and process.spec.on_gateway_exit == "keep" and not process.has_ended:
                    log.info("worker %s goes on without the gateway: the next gateway adopts it", worker.id)
                else:
                    await process.end(context.config.timeouts.stop_s, context.hurry)
                    life.hold(None)
                await context.log_store.end(worker.id)
                process.close()
                context.memory.save_soon()
        was_up = progress.up_since is not None
        was_well = process.had_no_place or up_s >= context.config.restart.well_s
        self._count(was_up=was_up, is_asked=life.must_end and not why)
        if life.must_end:
            return RunResult(None, was_up, was_well)
        end = context.end_of(worker, process, why, progress)
        is_unread = why or process.reported_end is not None
        lack = (
            None if is_unread else lack_of(process.returncode, progress, context.log_store.tail(worker.id, LINES_MAX))
        )
        return RunResult(end, was_up, was_well, lack=lack)

    def _count(self, *, was_up: bool, is_asked: bool) -> None:
        """Count a launch that has ended before the worker was ready."""
        process = self._process
        if not (was_up or process.is_adopted):
            result = "no_place" if process.had_no_place else "stopped" if is_asked else "failed"
            self._context.counts.launched(process.spec.on, result)

    def _be(self, kind: type[Clearing] | type[Serving] | type[Sleeping]) -> None:
        actual = self._life.actual
        assert isinstance(actual, Alive)
        self._life.be(kind(actual.run, actual.failures))

    async def _wait_for_end(self, progress: RunProgress) -> str:
        """Wait until the process has ended, or must end. Return the reason if the gateway gives it up."""
        why = ""

        async def fail() -> None:
            nonlocal why
            why = await self._context.wait_for_failure(self._worker, self._process, progress)

        shown = [partial(self._show_wait, progress)] if self._process.waits_for else []
        await wait_any(self._process.wait, self._change_as_wanted, fail, *shown)
        await self._context.gate.wait_open()
        return why

    async def _show_wait(self, progress: RunProgress) -> None:
        """Show why no process runs yet, until it runs: its load begins then."""
        process, managed = self._process, self._context.managed
        while why := process.waits_for:
            managed.lack(self._worker, why, is_unanswered=process.is_unanswered)
            await process.wait_change()
        managed.lack(self._worker, "")
        managed.enter_load(self._worker, STARTING)
        progress.begin(trio.current_time())
        await trio.sleep_forever()

    async def _change_as_wanted(self) -> None:
        """Put the engine to sleep and wake it as is wanted, until the process must end."""
        life = self._life
        while (action := life.next_action()).kind != "end":
            if not self._context.gate.is_open:
                await self._context.gate.wait_open()
            elif action.kind == "sleep":
                await self._change("asleep")
            elif action.kind == "wake":
                await self._change("ready")
            elif life.wanted.state == "asleep":  # it may have to become ready first
                await wait_any(life.wait_changed, self._context.table.changed.wait)
            else:
                await life.wait_changed()

    async def _change(self, to: Literal["asleep", "ready"]) -> None:
        """Put the engine to sleep or wake it, unless the process must end meanwhile."""
        life, context, worker, actual = self._life, self._context, self._worker, self._life.actual
        assert isinstance(actual, Alive)
        life.be(Changing(actual.run, actual.failures, to))
        outcome: list[Exception | None] = []

        async def call() -> None:
            try:
                if to == "asleep":
                    await self._drain()
                await context.change_engine(worker, to)
                outcome.append(None)
            except client.FAILURES as error:
                outcome.append(error)

        await wait_any(call, life.wait_end)
        if not outcome:
            return
        error = outcome[0]
        if error is None:
            self._be(Sleeping if to == "asleep" else Serving)
            return
        log.error("worker %s could not be %s: %s", worker.id, "woken" if to == "ready" else "put to sleep", error)
        life.fail_change(to)
        if to == "asleep":
            wanted = attrs.evolve(life.wanted, state="loaded") if life.wanted.state == "asleep" else life.wanted
            life.set(wanted, Serving(actual.run, actual.failures))
        else:  # the process ends, and a new process is started if that is still wanted
            life.want_new_run("cold" if worker.on_demand else "loaded", 0.0)

    async def _drain(self) -> None:
        """Wait until the worker's requests are answered, for the wanted time at most."""
        life, hurry, began_at = self._life, self._context.hurry, trio.current_time()
        endpoint = self._context.table.endpoint_of(self._worker)
        while endpoint is not None and endpoint.in_flight and not hurry.is_set():
            drain_s = life.wanted.drain_s
            until = began_at + (self._context.config.timeouts.drain_s if drain_s is None else drain_s)
            if trio.current_time() >= until:
                break
            with trio.move_on_at(until):
                await wait_any(endpoint.wait_idle, hurry.wait, life.wait_changed)
