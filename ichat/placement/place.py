"""The place of a worker with `gpus`: which GPUs of this machine it gets, or why it gets none.

Pure functions of the wish, of the GPUs as the driver reports them, and of the claims of other workers. Claims count
from the decision on, so that two launches at the same moment see each other. A refusal rests on computed and on learnt
figures, never on assumed figures.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import attrs
from attrs import frozen

from ichat.config.checks import Gpus
from ichat.config.engine_args import USABLE
from ichat.placement.estimate import GIB, Estimate, estimate, refusal_of_sharing, tensor_sizes_of
from ichat.placement.learnt import LearntMemories, LearntMemory, LoadCircumstances
from ichat.placement.model_shape import ModelShape
from ichat.placement.settings import Settings
from ichat.placement.weights import WeightSums

EVERY_GPU = -1
"""Stands for all GPUs, or for those of which the numbers are not known."""
PLACES_MAX = 64
"""The most places of a worker that are compared."""
_ROUNDING = 1e-9

Held = Mapping[str, Mapping[int, float]]
"""The claims of other workers, by their ids: the share of each GPU, by its number. `inf`: it is theirs alone."""


@frozen
class PlaceableGpu:
    """A GPU of this machine; None: not known."""

    number: int
    """As nvidia-smi counts."""
    kind: str = ""
    memory_bytes: int | None = None
    used_bytes: int | None = None
    others_bytes: int = 0
    """Held by processes that are no workers of this gateway, as far as they are seen."""
    trouble: str = ""
    """Why it cannot be used, in a clause after its name; empty if it can."""

    @property
    def free_bytes(self) -> int | None:
        """The free memory now."""
        if self.memory_bytes is None or self.used_bytes is None:
            return None
        return max(0, self.memory_bytes - self.used_bytes)


@frozen
class ModelFigures:
    """The facts about a model and its engine that decide its memory."""

    shape: ModelShape
    weights: WeightSums
    settings: Settings

    def on(self, tensor: int, gpu_bytes: int | None, learnt: LearntMemory | None = None) -> Estimate:
        """Return the memory with this number of GPUs for each layer; `learnt` has figures of such a load."""
        return estimate(self.shape, self.weights, attrs.evolve(self.settings, tensor=tensor), gpu_bytes, learnt)


@frozen
class LeastMemory:
    """The memory on each GPU without which a worker cannot start."""

    bytes: int
    is_learnt: bool = False
    """Whether it is that of an earlier load; otherwise it is computed, or the operator has given it."""


@frozen
class Wish:
    """The wish of a worker for GPUs."""

    model: str
    """For sentences."""
    gpus: Gpus
    path: str = ""
    """The model's directory, or its name on the hub."""
    figures: ModelFigures | None = None
    """None: not known."""
    unknown: str = ""
    """Why they are not known."""
    memory_bytes: int | None = None
    """The memory that it needs on each GPU, if the operator says so."""
    stages: int = 1
    """The parts of the model beside the GPUs that share each layer."""
    before: Collection[int] = ()
    """The GPUs that it had last: it gets them again if they are free."""
    circumstances: LoadCircumstances | None = None
    """By which the figures of earlier loads are found; None: they are not known."""
    memories: LearntMemories = attrs.field(factory=LearntMemories)
    """The figures of earlier loads of all models."""
    there: Mapping[tuple[str, int | None], int] = attrs.field(factory=dict[tuple[str, int | None], int])
    """How many GPUs of each kind, with its memory, the machine has."""

    def need_on(self, count: int, gpu: PlaceableGpu) -> LeastMemory | None:
        """Return the least memory on each of this number of such GPUs, learnt where it can be; None: not known."""
        if self.memory_bytes is not None:
            return LeastMemory(self.memory_bytes)
        found = None if self.figures is None else self.figures.on(self._tensor(count), gpu.memory_bytes)
        sequence = 0 if found is None or found.fits_context else found.sequence_bytes
        learnt = self._learnt_on(count, gpu)
        if learnt is not None and learnt.certain_bytes is not None:
            return LeastMemory(learnt.certain_bytes + sequence, is_learnt=True)
        return None if found is None else LeastMemory(found.parts[0].bytes + sequence)

    def counts(self, gpu: PlaceableGpu) -> Sequence[int]:
        """Return the numbers of such GPUs to place it on: for "auto" the fewest that hold it, if any do.

        If the machine has not that many by all figures, the fewest count that hold it by computed and learnt figures.
        """
        if self.gpus != "auto":
            return [math.ceil(self.gpus)]
        if self.figures is None or gpu.memory_bytes is None:
            return []
        found = self._fewest(gpu, self._holds, math.inf)
        most = self.there.get((gpu.kind, gpu.memory_bytes), 0)
        if found is None or found > most:
            found = self._fewest(gpu, self._may_hold, most) or found
        return [] if found is None else [found]

    def _fewest(self, gpu: PlaceableGpu, holds: Callable[[int, PlaceableGpu], bool], most: float) -> int | None:
        """Return the fewest such GPUs that hold the model by a function, if these are at most `most`."""
        assert self.figures is not None
        counts = (size * self.stages for size in tensor_sizes_of(self.figures.shape))
        return next((count for count in counts if count <= most and holds(count, gpu)), None)

    def _tensor(self, count: int) -> int:
        return max(1, count // self.stages)

    def _learnt_on(self, count: int, gpu: PlaceableGpu) -> LearntMemory | None:
        if self.circumstances is None or gpu.memory_bytes is None:
            return None
        tensor, figures = self._tensor(count), self.figures
        weights = None if figures is None else figures.weights.on_gpu(tensor, figures.settings.pipeline)
        return self.circumstances.find(self.memories, tensor, weights, (gpu.kind, gpu.memory_bytes))

    def _holds(self, count: int, gpu: PlaceableGpu) -> bool:
        """Return whether this number of such GPUs holds the model, by all figures."""
        assert self.figures is not None
        return bool(self.figures.on(self._tensor(count), gpu.memory_bytes, self._learnt_on(count, gpu)).fits)

    def _may_hold(self, count: int, gpu: PlaceableGpu) -> bool:
        """Return the same by computed and learnt figures."""
        need = self.need_on(count, gpu)
        return need is None or need.bytes <= USABLE * (gpu.memory_bytes or 0)


@frozen
class Placement:
    """The GPUs of a worker."""

    gpu_ids: Sequence[int] = ()
    share: float = math.inf
    """Its share of a GPU; `inf`: the GPUs are its own."""


@frozen
class NoPlace:
    """There is no place for a worker now."""

    sentence: str
    """Why, for each GPU, and what would help."""


def place(wish: Wish, gpus: Sequence[PlaceableGpu] | None, held: Held) -> Placement | NoPlace:
    """Return the best place for a worker among the GPUs of this machine; `gpus` is None if they are not known."""
    if wish.gpus == 0:
        return Placement()
    if refusal := _refusal(wish, gpus):
        return NoPlace(refusal)
    wish = _seeing(wish, gpus)
    found = next(_choices(wish, gpus or (), held), None)
    return found or NoPlace(_why_none(wish, gpus or (), held))


def places(wish: Wish, gpus: Sequence[PlaceableGpu] | None, held: Held) -> list[Placement]:
    """Return the places that a worker could have, the best first, `PLACES_MAX` at most."""
    if wish.gpus == 0 or _refusal(wish, gpus):
        return []
    return list(itertools.islice(_choices(_seeing(wish, gpus), gpus or (), held), PLACES_MAX))


def _seeing(wish: Wish, gpus: Sequence[PlaceableGpu] | None) -> Wish:
    return attrs.evolve(wish, there=Counter((gpu.kind, gpu.memory_bytes) for gpu in gpus or ()))


def _refusal(wish: Wish, gpus: Sequence[PlaceableGpu] | None) -> str:
    """Return why a worker has no place even if all GPUs are free; "" if it may have a place."""
    if wish.gpus == "auto" and wish.figures is None:
        return f"The memory of {wish.path} is not known ({wish.unknown}): give gpus and gpu_memory_gib."
    if gpus is None:
        return "The GPUs of this machine are not known, since no NVIDIA driver reports them: give gpu_ids."
    if not gpus:
        return (
            "There is no GPU for gpus: no NVIDIA GPU answers on this machine; set gpus = 0 to use the processor, or"
            " name another vendor's GPUs by gpu_ids."
        )
    if isinstance(wish.gpus, int) and wish.figures is not None:
        settings = attrs.evolve(wish.figures.settings, tensor=max(1, wish.gpus // wish.stages))
        return refusal_of_sharing(wish.model, wish.figures.shape, settings)
    return ""


def _choices(wish: Wish, gpus: Sequence[PlaceableGpu], held: Held) -> Iterator[Placement]:
    """Yield the places of a worker, the best first."""
    usable = [gpu for gpu in gpus if not _why_not(wish, gpu, held)]
    if isinstance(wish.gpus, float):
        usable.sort(key=lambda gpu: _order_of_share(wish, gpu, held))
        yield from (Placement((gpu.number,), wish.gpus) for gpu in usable)
        return
    yield from _whole(wish, usable)


def _order_of_share(wish: Wish, gpu: PlaceableGpu, held: Held) -> tuple[bool, bool, float, int]:
    """Return the place of a GPU in the order of choice for a share: the fullest without other programs is first."""
    return gpu.number not in wish.before, _others_bytes(gpu, held) > 0, _free_share(gpu, held), gpu.number


def _whole(wish: Wish, usable: Sequence[PlaceableGpu]) -> Iterator[Placement]:
    groups = [
        (_order_of(wish, members, count), count, members)
        for members in _kinds_of(usable).values()
        for count in wish.counts(members[0])
    ]
    for _, count, members in sorted(groups, key=lambda group: group[0]):
        numbers = sorted((gpu.number for gpu in members), key=lambda number: (number not in wish.before, number))
        for chosen in itertools.combinations(numbers, count):
            yield Placement(tuple(sorted(chosen)))


def _order_of(wish: Wish, members: Sequence[PlaceableGpu], count: int) -> tuple[int, ...]:
    """Return the place of a kind of GPUs in the order of choice, for sorting.

    The fewest GPUs are first, then those that the worker had last, then the smallest that are known to be enough.
    """
    had = sum(gpu.number in wish.before for gpu in members)
    size = members[0].memory_bytes or 0
    size = size if size and wish.need_on(count, members[0]) is not None else 0
    return count, -had, size, min(gpu.number for gpu in members)


def _kinds_of(gpus: Sequence[PlaceableGpu]) -> dict[tuple[str, int | None], list[PlaceableGpu]]:
    found: dict[tuple[str, int | None], list[PlaceableGpu]] = {}
    for gpu in gpus:
        found.setdefault((gpu.kind, gpu.memory_bytes), []).append(gpu)
    return found


def _holders_of(gpu: PlaceableGpu, held: Held) -> dict[str, float]:
    """Return the shares of a GPU that workers have, by their ids."""
    shares = {name: claims.get(gpu.number, claims.get(EVERY_GPU)) for name, claims in held.items()}
    return {name: share for name, share in shares.items() if share is not None}


def _free_share(gpu: PlaceableGpu, held: Held) -> float:
    """Return the share of a GPU that no worker and no other process has."""
    total = sum(_holders_of(gpu, held).values())
    others = _others_bytes(gpu, held) / (USABLE * gpu.memory_bytes) if gpu.memory_bytes else 0.0
    return 1 - total - others


def _others_bytes(gpu: PlaceableGpu, held: Held) -> int:
    """Return the memory that other processes hold: as far as they are seen, and as the used memory shows."""
    shares = sum(_holders_of(gpu, held).values())
    if gpu.memory_bytes is None or gpu.used_bytes is None or math.isinf(shares):
        return gpu.others_bytes
    unexplained = gpu.used_bytes - math.ceil(USABLE * gpu.memory_bytes * shares)
    slack = (1 - USABLE) * gpu.memory_bytes
    return max(gpu.others_bytes, unexplained if unexplained > slack else 0)


def _why_not(wish: Wish, gpu: PlaceableGpu, held: Held) -> str:
    """Return why a GPU does not do for a worker, in a clause; "" if it does."""
    if gpu.trouble:
        return f"GPU {gpu.number} {gpu.trouble}"
    holders = _holders_of(gpu, held)
    if any(map(math.isinf, holders.values())):
        return f"GPU {gpu.number} is worker {' and '.join(holders)}'s"
    taken = _why_no_share(gpu, wish.gpus, held) if isinstance(wish.gpus, float) else _why_not_whole(gpu, held)
    return taken or _why_too_small(wish, gpu)


def _why_not_whole(gpu: PlaceableGpu, held: Held) -> str:
    if holders := _holders_of(gpu, held):
        return f"GPU {gpu.number} is shared by worker {' and '.join(holders)}"
    others = _others_bytes(gpu, held)
    if gpu.memory_bytes is not None and others > (1 - USABLE) * gpu.memory_bytes:
        return f"other processes hold {_gib(others)} GiB of GPU {gpu.number}"
    return ""


def _why_no_share(gpu: PlaceableGpu, share: float, held: Held) -> str:
    if gpu.memory_bytes is None:
        return f"GPU {gpu.number} does not report its memory"
    free, others = _free_share(gpu, held), _others_bytes(gpu, held)
    if share <= free + _ROUNDING:
        return ""
    names = " and ".join(_holders_of(gpu, held))
    left = f"{max(0.0, 100 * free):.0f} % of GPU {gpu.number} are left{f' besides worker {names}' if names else ''}"
    return f"{left}: other processes hold {_gib(others)} GiB" if others else left


def _why_too_small(wish: Wish, gpu: PlaceableGpu) -> str:
    size, share = gpu.memory_bytes, wish.gpus if isinstance(wish.gpus, float) else 1.0
    counts = wish.counts(gpu)
    if size is None:
        return ""
    if not counts:
        return f"GPU {gpu.number} has {_gib(size)} GiB, and no number of such GPUs holds the model"
    need, given = wish.need_on(counts[0], gpu), math.floor(USABLE * share * size)
    if need is None or need.bytes <= given:
        return ""
    source = ", as learnt from an earlier load" if need.is_learnt else ""
    return (
        f"GPU {gpu.number} gives {_gib(given)} of its {_gib(size)} GiB, and the model needs {_gib(need.bytes)}{source}"
    )


def _why_none(wish: Wish, gpus: Sequence[PlaceableGpu], held: Held) -> str:
    """Return why no place is free, with the reason for each GPU and the remedy."""
    reasons = {gpu.number: _why_not(wish, gpu, held) for gpu in gpus}
    free = [gpu for gpu in gpus if not reasons[gpu.number]]
    parts = [reason for reason in reasons.values() if reason]
    if free:
        listed = ", ".join(f"{gpu.number} ({gpu.kind or 'of unknown kind'})" for gpu in free)
        parts.insert(0, f"free {'is' if len(free) == 1 else 'are'} GPU {listed}")
    return f"{wish.model} needs {_needed(wish, gpus)}, which this machine has not free: {'; '.join(parts)}." + (
        f" {remedy}" if (remedy := _remedy(wish, gpus, held)) else ""
    )


def _needed(wish: Wish, gpus: Sequence[PlaceableGpu]) -> str:
    if isinstance(wish.gpus, float):
        return f"{100 * wish.gpus:g} % of a GPU"
    counts = {count for gpu in gpus for count in wish.counts(gpu)}
    if counts == {1}:
        return "a GPU of its own"
    return f"{' or '.join(map(str, sorted(counts))) or 'larger or more'} GPUs of the same kind"


def _remedy(wish: Wish, gpus: Sequence[PlaceableGpu], held: Held) -> str:
    """Return the workers that would have to go, or the smallest change of the table that would help; "" for none."""
    places = itertools.islice(_choices(wish, gpus, {}), PLACES_MAX)
    in_the_way = min((_holding(one.gpu_ids, held) for one in places), key=len, default=None)
    if in_the_way is None:
        return _change_that_helps(wish, gpus)
    who = " and ".join(in_the_way)
    return f"It gets a place once {f'worker {who} ends' if len(in_the_way) == 1 else f'workers {who} end'}."


def _holding(numbers: Sequence[int], held: Held) -> list[str]:
    """Return the ids of the workers that have any of these GPUs."""
    return [name for name, claims in held.items() if not claims.keys().isdisjoint((EVERY_GPU, *numbers))]


def _change_that_helps(wish: Wish, gpus: Sequence[PlaceableGpu]) -> str:
    if not isinstance(wish.gpus, int):
        return ""
    fitting = [gpu for gpu in gpus if not _why_not(wish, gpu, {})]
    most = max(map(len, _kinds_of(fitting).values()), default=0)
    if most:
        return f"This machine has at most {most} of the same kind: lower gpus."
    if wish.figures is None or wish.memory_bytes is not None:
        return ""
    enough = {count for gpu in gpus for count in attrs.evolve(wish, gpus="auto").counts(gpu)}
    return f"{min(enough)} such GPUs would do." if enough else ""


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"
