"""An answer about usage: the ledger's groups become rows with names, times and costs, and a sum of all."""

import csv
import io
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from ichat.config.usage import Prices
from ichat.observability.usage.queries import SPANS, UsageQuestion
from ichat.observability.usage.rows import (
    BUSY_S,
    CACHED,
    INPUT,
    MINUTE_S,
    OUTPUT,
    Groups,
    Sums,
    UsageGroup,
    add_to,
    no_sums,
)

_FORMS: Mapping[str, str] = {
    "minute": "%Y-%m-%dT%H:%MZ",
    "hour": "%Y-%m-%dT%H:00Z",
    "day": "%Y-%m-%d",
    "month": "%Y-%m",
}
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")
"""The characters that begin a formula in a spreadsheet."""
COUNTED = (
    "requests", "errors", "input_tokens", "output_tokens", "cached_tokens", "estimated_tokens", "busy_s", "cost",
)  # fmt: skip
"""The columns of each row, after those that it is shown by."""


@frozen
class UsageReport:
    """The usage, in the groups of a question."""

    by: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    totals: Mapping[str, Any]


def report_of(question: UsageQuestion, groups: Groups, prices: Prices) -> UsageReport:
    """Return the rows of an answer, in the order of their groups."""
    shown: dict[tuple[str, ...], tuple[Sums, float | None]] = {}
    all_sums, all_cost = no_sums(), None
    for group, sums in groups.items():
        labels = tuple(_label(name, group) for name in question.by)
        price = prices.get(group.model)
        cost = None if price is None else price.cost_of(int(sums[INPUT]), int(sums[OUTPUT]), int(sums[CACHED]))
        of_row, cost_of_row = shown.get(labels) or (no_sums(), None)
        add_to(of_row, sums)
        shown[labels] = (of_row, _plus(cost_of_row, cost))
        add_to(all_sums, sums)
        all_cost = _plus(all_cost, cost)
    rows = [
        {**dict(zip(question.by, labels, strict=True)), **_counts(sums, cost)}
        for labels, (sums, cost) in sorted(shown.items())
    ]
    return UsageReport(question.by, rows, _counts(all_sums, all_cost))


def csv_lines(report: UsageReport) -> Iterator[str]:
    """Return the rows as lines of CSV (RFC 4180), the first line with the names of the columns.

    A text that a spreadsheet would read as a formula begins with an apostrophe.
    """
    columns = (*report.by, *COUNTED)
    yield _csv_line(columns)
    for row in report.rows:
        yield _csv_line([row[column] for column in columns])


def time_of(at: float) -> str:
    """Return a time as answers have it: RFC 3339, UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def _label(name: str, group: UsageGroup) -> str:
    if name in SPANS:
        return time.strftime(_FORMS[name], time.gmtime(group.minute * MINUTE_S))
    return str(getattr(group, name))


def _counts(sums: Sums, cost: float | None) -> dict[str, Any]:
    whole = dict(zip(COUNTED, map(int, sums[:BUSY_S]), strict=False))
    return {**whole, "busy_s": round(sums[BUSY_S], 3), "cost": None if cost is None else round(cost, 6)}


def _plus(cost: float | None, more: float | None) -> float | None:
    if cost is None or more is None:
        return more if cost is None else cost
    return cost + more


def _as_text(value: str) -> str:
    return f"'{value}" if value.startswith(_FORMULAS) else value


def _csv_line(values: Sequence[object]) -> str:
    line = io.StringIO()
    csv.writer(line).writerow([_as_text(value) if isinstance(value, str) else value for value in values])
    return line.getvalue()
