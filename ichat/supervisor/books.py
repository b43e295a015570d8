"""The GPUs of this machine that managed workers have booked, and the search for the place of a worker with `gpus`.

Each launch has its claim from the decision on until nothing of it is left. Nothing else runs between the look at the
other claims and the booking, so two launches at the same moment see each other.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import trio
from attrs import evolve, frozen

from ichat.config.engine_args import has_share
from ichat.config.schema import ManagedWorkerConfig
from ichat.fleet.worker_record import WorkerRecord
from ichat.listeners import wait_any
from ichat.placement.place import Held, NoPlace, Placement, Wish, place, places
from ichat.placement.placeable_gpus import PlaceableGpu
from ichat.preflight.claims import Claims, claims_of, do_share_gpu
from ichat.preflight.placing import held_by, placed
from ichat.protocol.load_story import MAKING_ROOM
from ichat.supervisor.context import SupervisorContext
from ichat.supervisor.swaps import Phase

REREAD_S = 5.0
"""How often a worker without a place has the GPUs read again, in seconds: other programs may have ended."""


@frozen
class Booking:
    """The place of a launch."""

    number: int
    """Higher than those of earlier bookings."""
    wish: ManagedWorkerConfig
    """The worker's table."""
    table: ManagedWorkerConfig
    """The same with its GPUs."""


class BookedWorker(Protocol):
    """A managed worker, as the placement of others sees it."""

    spec: ManagedWorkerConfig
    record: WorkerRecord
    booking: Booking | None
    placed_last: Sequence[int]

    @property
    def holds(self) -> ManagedWorkerConfig:
        """Its table, with its GPUs if it has any."""
        ...

    @property
    def occupies(self) -> ManagedWorkerConfig:
        """The same, without GPUs while its engine sleeps."""
        ...

    @property
    def has_launch(self) -> bool:
        """Whether a process is about to be started, runs, or is cleared away."""
        ...

    @property
    def is_wanted(self) -> bool:
        """Whether a process is wanted."""
        ...

    @property
    def is_on_demand(self) -> bool:
        """Whether it has a process only while its model is wanted."""
        ...

    @property
    def phase(self) -> Phase:
        """How far it is on the way to serve its model."""
        ...

    def book(self, booking: Booking) -> None:
        """Have these GPUs from now on."""
        ...


@frozen
class Books:
    """The claims of the managed workers: a view of the workers, each of which has its own claim."""

    _workers: "Mapping[str, BookedWorker]"

    def beside(self, worker: "BookedWorker | None") -> Held:
        """Return the claims of all workers but this.

        A worker that names its GPUs has them also between two starts. A worker that is not loaded on demand keeps its
        GPUs while it sleeps.
        """
        tables: dict[str, ManagedWorkerConfig] = {}
        for name, one in self._workers.items():
            is_promised = one.is_wanted and not one.record.has_failed
            if one is not worker and (one.has_launch or is_promised):
                tables[name] = one.occupies if one.is_on_demand else one.holds
        return held_by(tables)

    def has_earlier_load(self, worker: "BookedWorker") -> bool:
        """Return whether a worker that booked the same GPU before this is still loading."""
        assert worker.booking is not None
        mine = claims_of(worker.holds, has_gpus=True)
        others = (one for one in self._workers.values() if one is not worker and one.booking is not None)
        return any(
            one.booking.number < worker.booking.number
            and one.phase in ("starting", "waking")
            and do_share_gpu(mine, claims_of(one.holds, has_gpus=True))
            for one in others
            if one.booking is not None
        )


def is_placed_here(spec: ManagedWorkerConfig) -> bool:
    """Return whether the gateway chooses the GPUs of a worker with this table."""
    return spec.gpus is not None and spec.on == "here"


async def find_place(worker: BookedWorker, books: Books, context: SupervisorContext) -> str:
    """Book the place of a worker with `gpus`, and return "". While there is none, the worker's record says why.

    For a worker that is loaded on demand nothing is waited for: the sentence is returned. Engines that share a GPU
    are loaded in turn, since each measures the memory that is free meanwhile.
    """
    spec = worker.spec
    wish = evolve(await _wish_of(spec, context), before=tuple(worker.placed_last))
    tried: object = None
    while True:
        gpus, until = await context.launcher.placeable(context.config, spec), trio.current_time() + REREAD_S
        while trio.current_time() < until:
            await context.gate.wait_open()
            held = books.beside(worker)
            if (seen := (gpus, held, context.learnt.number)) != tried:
                tried, found = seen, place(wish, gpus, held)
                if isinstance(found, Placement):
                    book(worker, wish, found, gpus, context)
                    return await _begin_share(worker, books, wish, found, context) if has_share(spec) else ""
                if worker.is_on_demand:
                    return found.sentence
                context.managed.lack(worker.record, found.sentence)
            with trio.move_on_at(until):
                await wait_any(context.table.changed.wait, context.learnt.changed.wait)


async def _wish_of(spec: ManagedWorkerConfig, context: SupervisorContext) -> Wish:
    """Return the wish of a worker with `gpus`, with the figures of earlier loads."""
    return evolve(await context.launcher.wish(context.config, spec), memories=context.learnt)


def book(
    worker: BookedWorker,
    wish: Wish,
    found: Placement,
    gpus: Sequence[PlaceableGpu] | None,
    context: SupervisorContext,
) -> None:
    """Have a worker get its place."""
    number = next(context.bookings) if worker.booking is None else worker.booking.number
    worker.book(Booking(number, worker.spec, placed(worker.spec, wish, found, gpus or ())))
    context.managed.lack(worker.record, "")


async def _begin_share(
    worker: BookedWorker, books: Books, wish: Wish, found: Placement, context: SupervisorContext
) -> str:
    """Wait for the loads of engines on the same GPU; the share is that of the memory which is free then."""
    while books.has_earlier_load(worker):
        context.managed.enter_load(worker.record, MAKING_ROOM)
        await context.table.changed.wait()
    if worker.spec.backend == "sglang":
        book(worker, wish, found, await context.launcher.placeable(context.config, worker.spec), context)
    return ""


async def objection_to(
    spec: ManagedWorkerConfig, books: Books, context: SupervisorContext, *, is_later: bool
) -> tuple[ManagedWorkerConfig, str]:
    """Return the table of a new worker with the place that it would get now, or else why it would get none.

    `is_later` leaves out GPUs that another worker may have now and will give back.
    """
    if not is_placed_here(spec):
        return spec, ""
    wish, gpus = await _wish_of(spec, context), await context.launcher.placeable(context.config, spec)
    found = place(wish, gpus, {} if is_later else books.beside(None))
    if isinstance(found, NoPlace):
        return spec, found.sentence
    return placed(spec, wish, found, gpus or ()), ""


class PossiblePlaces:
    """The places that workers with `gpus` could have if all others that are loaded on demand made room."""

    def __init__(self, workers: Mapping[str, BookedWorker], context: SupervisorContext) -> None:
        self._workers = workers
        self._context = context
        self._read: dict[str, tuple[ManagedWorkerConfig, Wish, Sequence[PlaceableGpu] | None, float]] = {}
        """By the workers' ids: the table, the wish, and the GPUs with the time until which they count."""

    def __repr__(self) -> str:
        return f"<PossiblePlaces {list(self._read)}>"

    async def read(self, wanted: Iterable[BookedWorker]) -> None:
        """Read the GPUs for these workers, unless they were read less than `REREAD_S` ago."""
        context, now = self._context, trio.current_time()
        due = [one for one in wanted if one.booking is None and not self._is_fresh(one, now)]
        for worker_id in self._read.keys() - self._workers.keys():
            del self._read[worker_id]
        for one in due:
            wish = await _wish_of(one.spec, context)
            gpus = await context.launcher.placeable(context.config, one.spec)
            self._read[one.record.id] = one.spec, wish, gpus, trio.current_time() + REREAD_S

    def is_unknown(self, worker: BookedWorker) -> bool:
        """Return whether a worker needs a place, and the GPUs were never read for its table."""
        known = self._read.get(worker.record.id)
        needs_place = bool(worker.spec.gpus) and is_placed_here(worker.spec) and worker.booking is None
        return needs_place and (known is None or known[0] is not worker.spec)

    def _is_fresh(self, worker: BookedWorker, now: float) -> bool:
        return not self.is_unknown(worker) and now < self._read[worker.record.id][3]

    def of(self, worker: BookedWorker, movable: Collection[str] = ()) -> Sequence[Claims]:
        """Return the claims of a worker at each of its places, by the newest reading; none without `gpus`.

        The workers with the ids in `movable` would make room as well.
        """
        known = self._read.get(worker.record.id)
        if not is_placed_here(worker.spec) or known is None or known[0] is not worker.spec:
            return ()
        _, wish, gpus, _ = known
        others = self._workers.items()
        permanent = {name: one for name, one in others if not (one.is_on_demand or name in movable)}
        unused = None if gpus is None else [evolve(gpu, used_bytes=None) for gpu in gpus]
        found = places(evolve(wish, before=tuple(worker.placed_last)), unused, Books(permanent).beside(worker))
        address = claims_of(worker.spec, has_gpus=True).address
        return [Claims(dict.fromkeys(one.gpu_ids, one.share), address) for one in found]
