"""A worker that the gateway starts: launched, supervised, restarted, drained and removed."""

import logging
import sys
import time
from collections.abc import Mapping, Sequence

import attrs
import trio
from attrs import frozen

from ichat.config.schema import ManagedWorkerConfig, Restart
from ichat.fleet.worker_facts import WorkerEnd
from ichat.fleet.worker_record import WorkerRecord
from ichat.listeners import wait_any
from ichat.preflight.claims import claims_of, do_share_gpu, do_share_port, without_gpus
from ichat.protocol.load_story import CHECKING, MAKING_ROOM
from ichat.supervisor.books import Booking, Books, find_place, is_placed_here
from ichat.supervisor.context import SupervisorContext
from ichat.supervisor.downloads import download_model
from ichat.supervisor.launcher import FoundProcess
from ichat.supervisor.life import Actual, Alive, NoProcess, Starting, Wanted
from ichat.supervisor.run_progress import RunResult
from ichat.supervisor.state import SavedManagedWorker, saved_table
from ichat.supervisor.swaps import Phase
from ichat.supervisor.worker_life import WorkerLife
from ichat.supervisor.worker_run import WorkerRun

log = logging.getLogger(__name__)


@frozen
class Earlier:
    """A worker as an earlier process of a gateway has left it."""

    process: FoundProcess | None = None
    """Its process, if it still runs."""
    states: tuple[Wanted, Actual] | None = None
    """Its wanted and its actual state, if that was another process of this gateway."""
    launch: int = 0
    """The number of its newest launch; 0: it had none."""
    placed: Sequence[int] | None = None
    """The GPUs that were chosen for its process; None: its table names them."""


class ManagedWorker:
    """A managed worker, through all of its starts. `life` decides; this class carries it out."""

    def __init__(
        self,
        worker_id: str,
        spec: ManagedWorkerConfig,
        context: SupervisorContext,
        workers: "Mapping[str, ManagedWorker]",
        *,
        is_launched: bool,
        earlier: Earlier | None = None,
    ) -> None:
        """`workers` are all managed workers in the order of their starts, with this worker as soon as it runs.

        `is_launched` says that it was launched over the API.
        """
        earlier = earlier or Earlier()
        self.id = worker_id
        self.spec = spec
        self.is_launched = is_launched
        self.launch = earlier.launch
        """The number of its newest launch; 0: it had none."""
        self._context = context
        self._workers = workers
        self._found = earlier.process
        self.booking: Booking | None = None
        """The GPUs that were chosen for its launch; None: it has none, or its table names them."""
        self.placed_last: Sequence[int] = earlier.placed or ()
        """The GPUs that were chosen for it last."""
        if earlier.placed is not None and earlier.process is not None:
            table = attrs.evolve(spec, gpu_ids=list(earlier.placed))
            self.booking = Booking(next(context.bookings), spec, table)
        self._finished = trio.Event()
        self.record: WorkerRecord = context.managed.expect(
            worker_id, [spec.model_name], context.launcher.socket_of(worker_id) if spec.on == "here" else None
        )
        states, is_running = earlier.states, earlier.process is not None
        is_cold = self.is_on_demand and states is None and not is_running
        if states is None:
            wanted = Wanted("cold" if is_cold else "loaded")
            states = wanted, Starting(0) if is_running else NoProcess(kind="cold" if is_cold else "new")
        self.life = WorkerLife(context.table, context.managed, self.record, *states)
        """Its wanted and its actual state. Operators, the loader and reloads change the wanted state."""
        self._describe()
        context.log_store.expect(self.id)
        if is_cold:
            context.managed.cool(self.record)

    def __repr__(self) -> str:
        return f"<ManagedWorker {self.id}: {self.life!r}, process {self.pid}>"

    def _describe(self) -> None:
        self._context.managed.configure(
            self.record,
            names=[self.spec.model_name],
            max_in_flight=self.spec.max_in_flight,
            settings=self._context.shown_settings(self.id, self.holds, is_launched=self.is_launched),
            on_demand=self.is_on_demand and not self.is_leaving,
        )

    @property
    def pid(self) -> int:
        """The first process of its newest start; 0 while there is none on this machine."""
        return self.life.process.pid if self.life.process is not None else 0

    @property
    def has_process(self) -> bool:
        """Whether it has a process here, or a launch on another machine."""
        return self.life.process is not None

    @property
    def holds(self) -> ManagedWorkerConfig:
        """The table that its process was started with, or will be."""
        if self.life.process is not None:
            return self.life.process.spec
        return self.booking.table if self.booking is not None else self.spec

    @property
    def occupies(self) -> ManagedWorkerConfig:
        """The table with the resources that it holds while it runs: a sleeping engine has freed its GPUs."""
        is_asleep = self.record.heartbeat is not None and self.record.heartbeat.state == "asleep"
        return without_gpus(self.holds) if is_asleep else self.holds

    @property
    def is_on_demand(self) -> bool:
        """Whether it has a process only while its model is wanted."""
        return self.spec.load == "on_demand"

    @property
    def is_leaving(self) -> bool:
        """Whether it is about to be removed."""
        return self.life.wanted.state == "gone"

    @property
    def has_launch(self) -> bool:
        """Whether a process is about to be started, runs, or is cleared away."""
        return isinstance(self.life.actual, Alive)

    @property
    def is_wanted(self) -> bool:
        """Whether a process is wanted; if not, it is cold, or about to be."""
        return self.life.wanted.state in ("loaded", "asleep")

    @property
    def phase(self) -> Phase:
        """How far it is on the way to serve its model, or to give its room back."""
        return self.life.phase

    def saved(self) -> SavedManagedWorker:
        """Return the record for the next gateway: the process, and the table that it was started with."""
        booking = self.booking
        spec, placed = (self.holds, None) if booking is None else (booking.wish, booking.table.gpu_ids)
        identity = self.life.process.identity if self.life.process is not None else ""
        is_launched = self.is_launched and not self.is_leaving
        return SavedManagedWorker(self.id, saved_table(spec), is_launched, self.pid, identity, self.launch, placed)

    def book(self, booking: Booking) -> None:
        """Have these GPUs from now on, until nothing of the launch is left."""
        self.booking, self.placed_last = booking, booking.table.gpu_ids or ()
        self._describe()

    def prefer(self, gpu_ids: Sequence[int]) -> None:
        """Get these GPUs at the next start if they are free."""
        self.placed_last = gpu_ids

    def _give_back(self) -> None:
        """Have no chosen GPUs any more: nothing is left of the launch, and the next launch has the newest table."""
        self.booking = None
        self._describe()

    # Commands: they change the wanted state.

    def update(self, spec: ManagedWorkerConfig) -> None:
        """Go on with a changed table, if all changes concern the gateway alone."""
        was_on_demand, self.spec = self.is_on_demand, spec
        self._describe()
        if self.is_on_demand and not was_on_demand and not self.has_process:
            self.life.unload()
        elif was_on_demand and not self.is_on_demand:
            is_new_run = isinstance(self.life.actual, NoProcess) or self.phase in ("asleep", "ending")
            self.life.load()
            if is_new_run:
                self.life.want_new_run()
        self._context.memory.save_soon()

    def restart(self, spec: ManagedWorkerConfig) -> None:
        """Have it ended, after a drain, and started anew with this table once it is wanted."""
        self.update(spec)
        if self.is_on_demand:
            self.life.forgive()
            self.life.unload()
        else:
            self.life.want_new_run()

    def begin_removal(self, drain_s: float) -> None:
        """Send it no more requests, and have it ended for good once it is drained for this time at most."""
        known_s = self.life.wanted.drain_s if self.is_leaving else None
        self.life.want("gone", drain_s=drain_s if known_s is None else min(drain_s, known_s))
        self._describe()

    async def remove(self, drain_s: float) -> None:
        """Drain it for this time at most, end it and forget it; return when nothing of it is left."""
        self.begin_removal(drain_s)
        await self._finished.wait()
        if self._context.table.get(self.id) is self.record:  # another removal of it may have been first
            self._context.table.break_group_of(self.record, "was stopped")
            self._context.table.remove(self.record)
            self._context.log_store.forget(self.id)

    # Its life.

    async def run(self) -> None:
        """Start it, and again after each end, until nothing is left of it after its removal, or this is cancelled."""
        try:
            if self._found is not None:
                await self._run_guarded()
            while (action := self.life.next_action()).kind != "leave":
                if not self._context.gate.is_open:
                    await self._context.gate.wait_open()
                elif action.kind == "start":
                    self.life.begin()
                    await self._run_guarded()
                elif action.kind == "cool":
                    self.life.cool()
                else:
                    await self.life.wait_changed(action.until)
        finally:
            self._finished.set()

    async def _run_guarded(self) -> None:
        """Supervise a start of it; a bug in that counts as an end of this worker, and ends no other worker."""
        try:
            result = await self._run_once()
        except Exception as error:
            log.exception("a bug in supervising worker %s", self.id)
            if self.life.process is not None:
                with trio.CancelScope(shield=True):
                    await self.life.process.sweep([])
                self.life.hold(None)
            result = RunResult(WorkerEnd("could not be watched", time.time(), cause=repr(error)))
        if result.lack is not None:
            self._context.lacked(self.holds, result.lack)
        self._give_back()
        is_final = self.life.end_run(result, self._restart_settings)
        if is_final:
            self._context.log_store.finish(self.id)

    @property
    def _restart_settings(self) -> Restart:
        """The settings of restarts; a worker that is one of several copies is restarted for ever."""
        settings = self._context.config.restart
        return attrs.evolve(settings, attempts_max=sys.maxsize) if self.spec.replicas.max > 1 else settings

    async def _run_once(self) -> RunResult:
        """Start it and wait for its end."""
        context = self._context
        if self._found is not None:
            found, self._found = self._found, None
            process = context.adopt(self.record, self.holds, found)
            return await WorkerRun(process, self.record, self.life, context).supervise()
        problems: Sequence[str] = ()

        async def check() -> None:
            nonlocal problems
            problems = await self._find_obstacles()
            if not problems:
                self.launch = context.memory.next_launch()
                await context.memory.save()
                problems = context.memory.objections_to(self.spec)

        await wait_any(check, self.life.wait_end)
        if problems or self.life.next_action().kind == "end":
            return context.not_started(self.record, " ".join(problems)) if problems else RunResult(None)
        try:
            process = await context.spawn(self.record, self.holds, self.launch)
        except (OSError, ValueError) as error:
            return context.not_started(self.record, str(error))
        return await WorkerRun(process, self.record, self.life, context).supervise()

    async def _find_obstacles(self) -> Sequence[str]:
        """Have its model and its place here; return why it cannot be started, each reason in a sentence."""
        context = self._context
        if lack := await download_model(self.record, self.spec, context):
            return [lack]
        while any(leaves_room_for(one, self) for one in self._workers.values() if one is not self):
            context.managed.enter_load(self.record, MAKING_ROOM)
            await context.table.changed.wait()
        context.managed.enter_load(self.record, CHECKING)
        if is_placed_here(self.spec) and (lack := await find_place(self, Books(self._workers), context)):
            return [lack]
        return await context.preflight(self.holds, holders_before(self, self._workers))


def holders_before(
    worker: ManagedWorker | None, workers: Mapping[str, ManagedWorker]
) -> Mapping[str, ManagedWorkerConfig]:
    """Return the tables of workers that have their resources before a worker does: they run, or were there first.

    None stands for a worker that is not there yet.
    """
    every = list(workers.values())
    earlier = every[: every.index(worker)] if worker in every else every
    holding = [
        one for one in every if one.has_process or (one in earlier and one.is_wanted and not one.record.has_failed)
    ]
    return {one.id: one.occupies for one in holding if one is not worker}


def leaves_room_for(one: ManagedWorker, other: ManagedWorker) -> bool:
    """Return whether a worker is about to end, and holds a GPU or the port that the other worker needs."""
    if not (one.has_process and one.life.must_end):
        return False
    held, needed = claims_of(one.holds, has_gpus=True), claims_of(other.spec, has_gpus=True)
    return do_share_gpu(held, needed) or do_share_port(held, needed)
