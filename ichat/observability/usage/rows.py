"""The rows of the ledger: names that are counted together, and their sums."""

from collections.abc import Iterable, Mapping, MutableMapping
from typing import NamedTuple

MINUTE_S = 60
MINUTES_A_HOUR = 60
MINUTES_A_DAY = 24 * MINUTES_A_HOUR

Series = tuple[str, str, str]
"""The name of a key, of a model, and the id of an endpoint; each is empty where there is none."""
Sums = list[float]
"""In this order: requests, errors, input, output and cached tokens, estimated tokens, and busy seconds."""
MinuteRows = MutableMapping[tuple[int, Series], Sums]
"""By the minute since 1970, and the series."""

Marks = Mapping[str, int]
"""By the identity of each relay: its newest outcome. This outcome and all before it are in the rows, or need no row."""

REQUESTS, INPUT, OUTPUT, CACHED, BUSY_S = 0, 2, 3, 4, 6
"""The places of some of the sums."""


class UsageGroup(NamedTuple):
    """The names that an answer of the store counts together."""

    minute: int
    """The first minute of its span; 0 if the time does not matter."""
    key: str
    model: str
    endpoint: str


Groups = dict[UsageGroup, Sums]


def no_sums() -> Sums:
    """Return the sums of nothing."""
    return [0, 0, 0, 0, 0, 0, 0.0]


def add_to(sums: Sums, more: Iterable[float]) -> None:
    """Add the sums of another row."""
    for index, count in enumerate(more):
        sums[index] += count


def group_rows(rows: Mapping[tuple[int, Series], Sums], span: int, names: Iterable[str], found: Groups) -> None:
    """Add rows to the groups that they belong to, as the store's SQL does: `names` has the columns that count."""
    has_key, has_model, has_endpoint = (name in set(names) for name in ("key", "model", "endpoint"))
    for (minute, (key, model, endpoint)), sums in rows.items():
        group = UsageGroup(
            minute - minute % span if span else 0,
            key if has_key else "",
            model if has_model else "",
            endpoint if has_endpoint else "",
        )
        add_to(found.setdefault(group, no_sums()), sums)


def minute_of(at: float) -> int:
    """Return the minute since 1970 of a time."""
    return int(at // MINUTE_S)
