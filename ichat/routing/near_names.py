"""Names that are near to another name, found among any number of them in a part of a millisecond. Purely synchronous.

An error names a few of the models that there are. To look at all of them for that would cost more than a request.
"""

import functools
import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence

from ichat.texts import NAMED_MAX

_LOOK = 12
"""How many names are looked at on each side of a place."""
_SKIPPED_MAX = 3 * _LOOK
"""How many of them may not be shown."""
_COMPARED_MAX = 48
"""Characters at each end that decide how near two names are."""
_AT_ONCE = 64
"""More changes than that are made by sorting all names again, which mostly are in order."""


class NearNames:
    """Some names, in the order of their beginnings and in that of their ends."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = set(names)
        self._changed = set(self._names)
        """Names added or removed since the last look."""
        self._placed = set[str]()
        """The names that have a place in the lists."""
        self._starts = list[str]()
        """The folded name, and what follows its last slash, each with the name itself behind a zero."""
        self._ends = list[str]()
        """The folded name, from its end to its beginning."""

    def __repr__(self) -> str:
        return f"<NearNames {len(self._names)}>"

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str) -> None:
        """Add a name."""
        self._names.add(name)
        self._changed.add(name)

    def discard(self, name: str) -> None:
        """Remove a name, if it is there."""
        self._names.discard(name)
        self._changed.add(name)

    def around(self, name: str, is_shown: Callable[[str], bool] = bool) -> set[str]:
        """Return some names that may be shown: those that begin or end as this name, and more until they are enough.

        Where there are more than `NAMED_MAX`, more than that are returned, unless most of them may not be shown.
        """
        self.settle()
        found = set[str]()
        for key in _starts_of(name):
            _look(self._starts, f"{key}\0", is_shown, found)
        for key in _ends_of(name):
            _look(self._ends, f"{key}\0", is_shown, found)
        if len(found) <= NAMED_MAX:
            found.update(_shown(self._starts[: 4 * NAMED_MAX], is_shown))
        return found

    def settle(self) -> None:
        """Put changed names into order: called after a change of many names, or by the next look."""
        new = (self._changed & self._names) - self._placed
        gone = (self._changed & self._placed) - self._names
        self._changed.clear()
        for entries, keys_of in ((self._starts, _starts_of), (self._ends, _ends_of)):
            _change(entries, [f"{key}\0{name}" for name in new for key in keys_of(name)], is_there=True)
            _change(entries, [f"{key}\0{name}" for name in gone for key in keys_of(name)], is_there=False)
        self._placed |= new
        self._placed -= gone


def nearest(name: str, candidates: Iterable[str], count: int = NAMED_MAX) -> list[str]:
    """Return `count` of the candidates, the nearest first; those that are equally near in alphabetical order."""
    folded = name.casefold()
    return heapq.nsmallest(count, candidates, key=lambda one: (-_nearness(folded, one.casefold()), one))


@functools.lru_cache(maxsize=64)
def near_names(names: frozenset[str]) -> NearNames:
    """Return the index of names that do not change, such as those of a key."""
    return NearNames(names)


def _starts_of(name: str) -> list[str]:
    folded = name.casefold()
    last = folded.rpartition("/")[2]
    return [folded] if last == folded else [folded, last]


def _ends_of(name: str) -> list[str]:
    return [name.casefold()[::-1]]


def _change(entries: list[str], changed: Sequence[str], *, is_there: bool) -> None:
    """Add entries to a list in order, or remove them; many at once need the time of a single look at the list."""
    if len(changed) > _AT_ONCE:
        gone = frozenset[str]() if is_there else frozenset(changed)
        entries[:] = [*entries, *changed] if is_there else [one for one in entries if one not in gone]
        entries.sort()
        return
    for entry in changed:
        if is_there:
            insort(entries, entry)
        else:
            del entries[bisect_left(entries, entry)]


def _look(entries: list[str], entry: str, is_shown: Callable[[str], bool], found: set[str]) -> None:
    """Add the names on both sides of where an entry would be."""
    at = bisect_left(entries, entry)
    for side in (entries[at : at + _SKIPPED_MAX], entries[max(0, at - _SKIPPED_MAX) : at][::-1]):
        for number, name in enumerate(_shown(side, is_shown), 1):
            found.add(name)
            if number == _LOOK:
                break


def _shown(entries: Iterable[str], is_shown: Callable[[str], bool]) -> Iterator[str]:
    return (name for entry in entries if is_shown(name := entry.partition("\0")[2]))


def _nearness(one: str, other: str) -> int:
    """Return how many characters two names have in common at their beginnings and at their ends."""
    last, other_last = one.rpartition("/")[2], other.rpartition("/")[2]
    start = max(_common(one, other), _common(last, other_last))
    return start + _common(last[::-1], other_last[::-1])


def _common(one: str, other: str) -> int:
    count = 0
    for left, right in zip(one[:_COMPARED_MAX], other[:_COMPARED_MAX], strict=False):
        if left != right:
            break
        count += 1
    return count
