"""Names with a `*`, which stand for all names that begin and end as they do. Purely synchronous.

The pattern with the most other characters wins, among equals that with the longer beginning. To look up a name costs
some lookups in dictionaries, however many patterns there are.
"""

from collections.abc import Iterable

from ichat.config.models import ANY_TEXT


class NamePatterns:
    """Some names, each with a single `*`."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._by_start: dict[str, dict[str, str]] = {}
        """The patterns by their beginnings, and then by their ends."""
        for pattern in patterns:
            start, _, end = pattern.partition(ANY_TEXT)
            self._by_start.setdefault(start, {})[end] = pattern
        self._starts = sorted({len(start) for start in self._by_start}, reverse=True)
        """How long their beginnings are."""
        self._ends = {
            start: sorted({len(end) for end in by_end}, reverse=True) for start, by_end in self._by_start.items()
        }
        """How long their ends are, for each beginning."""

    def __repr__(self) -> str:
        return f"<NamePatterns {sum(map(len, self._by_start.values()))}>"

    def find(self, name: str) -> str | None:
        """Return the pattern that matches a name; None if none does."""
        found, literals = None, -1
        for length in self._starts:
            start = name[:length]
            by_end = self._by_start.get(start) if length <= len(name) else None
            if by_end is None:
                continue
            for end_length in self._ends[start]:
                at = len(name) - end_length
                if at >= length and name[at:] in by_end:
                    if length + end_length > literals:
                        found, literals = by_end[name[at:]], length + end_length
                    break
        return found
