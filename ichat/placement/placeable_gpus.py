"""The GPUs of a machine among which workers get their places: their kinds, and which of them are near each other."""

from collections.abc import Iterator, Sequence

from attrs import frozen


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
    node: int | None = None
    """The NUMA node that it is attached to."""
    island: int | None = None
    """The number of the GPUs that NVLink connects it with; None: with none."""

    @property
    def free_bytes(self) -> int | None:
        """The free memory now."""
        if self.memory_bytes is None or self.used_bytes is None:
            return None
        return max(0, self.memory_bytes - self.used_bytes)


def kinds_of(gpus: Sequence[PlaceableGpu]) -> dict[tuple[str, int | None], list[PlaceableGpu]]:
    """Return the GPUs of each kind, by its name and its memory."""
    found: dict[tuple[str, int | None], list[PlaceableGpu]] = {}
    for gpu in gpus:
        found.setdefault((gpu.kind, gpu.memory_bytes), []).append(gpu)
    return found


def near(members: Sequence[PlaceableGpu], count: int) -> Iterator[Sequence[int]]:
    """Yield groups of GPUs that are near each other, the nearest first.

    First those on the same NVLink island and NUMA node, then on the same island, then on the same node. Of several
    groups that are large enough, the smallest is first: larger groups stay whole.
    """
    for shared in ("island node", "island", "node") if count > 1 else ():
        groups: dict[tuple[int, ...], list[int]] = {}
        for gpu in members:
            place = tuple(getattr(gpu, name) for name in shared.split())
            if None not in place:
                groups.setdefault(place, []).append(gpu.number)
        yield from sorted(groups.values(), key=lambda numbers: (len(numbers), min(numbers)))
