"""The ledger's SQL: its tables, and the questions that can be asked of it."""

from collections.abc import Mapping, Sequence

import attrs

from ichat.config.package_data import read_text
from ichat.observability.usage.rows import MINUTE_S, MINUTES_A_DAY, MINUTES_A_HOUR

TABLES = read_text("ichat.observability.usage", "tables.sql").strip().split(";")[:-1]
"""The statements that make the tables."""
MARKS_TABLE = """CREATE TABLE IF NOT EXISTS marks (
    relay TEXT PRIMARY KEY, seq INTEGER NOT NULL, minute INTEGER NOT NULL
) WITHOUT ROWID"""
"""Made with the first mark. An earlier release ignores this table, so that the version of the file is the same."""
HAS_MARKS = "SELECT count(*) FROM sqlite_master WHERE name = 'marks'"
_COUNTED = ("requests", "errors", "input", "output", "cached", "estimated", "busy_ms")
_SUMS = ", ".join(f"sum({name})" for name in _COUNTED)
_NAMED_SUMS = ", ".join(f"sum({name}) AS {name}" for name in _COUNTED)
_MORE = ", ".join(f"{name} = {name} + excluded.{name}" for name in _COUNTED)
INSERT = "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
UPSERT = f"{INSERT} ON CONFLICT (minute, series) DO UPDATE SET {_MORE}"
INSERT_SERIES = "INSERT OR IGNORE INTO series (key, model, endpoint) VALUES (?, ?, ?)"
ID_OF_SERIES = "SELECT id FROM series WHERE key = ? AND model = ? AND endpoint = ?"
ADDED_UP = "SELECT until FROM added_up"
SET_ADDED_UP = "UPDATE added_up SET until = ?"
FIRST_BETWEEN = "SELECT min(minute) FROM usage WHERE minute >= ? AND minute < ?"
SUMS_OF_HOUR = f"SELECT series, {_SUMS} FROM usage WHERE minute >= ? AND minute < ? GROUP BY series"  # noqa: S608
DELETE_BETWEEN = "DELETE FROM usage WHERE minute >= ? AND minute < ?"
MARKS = "SELECT relay, seq FROM marks"
SET_MARK = "INSERT OR REPLACE INTO marks VALUES (?, ?, ?)"
DELETE_MARKS = "DELETE FROM marks WHERE minute < ?"
DELETE_UNUSED_SERIES = "DELETE FROM series WHERE id NOT IN (SELECT series FROM usage)"

SPANS: Mapping[str, int] = {"minute": 1, "hour": MINUTES_A_HOUR, "day": MINUTES_A_DAY, "month": MINUTES_A_DAY}
"""The minutes that are counted together. Months are put together from their days."""
NAMES = ("key", "model", "endpoint")
COLUMNS = (*NAMES, *SPANS)
"""The columns that usage can be shown by."""


@attrs.frozen
class UsageQuestion:
    """A question about usage. Times are seconds since 1970."""

    since: float
    until: float
    """The first moment that does not count."""
    by: Sequence[str]
    """Of COLUMNS, at most one of SPANS."""
    key: str | None = None
    """Only of this key; "" for requests without a key."""
    model: str | None = None

    @property
    def span(self) -> int:
        """The minutes that are counted together; 0: all."""
        return next((SPANS[one] for one in self.by if one in SPANS), 0)

    @property
    def names(self) -> Sequence[str]:
        """The names that are kept apart; models always are, since each has its price."""
        return [name for name in NAMES if name in self.by or name == "model"]

    @property
    def minutes(self) -> tuple[int, int]:
        """The first minute that counts, and the first that does not."""
        return int(self.since // MINUTE_S), int(-(-self.until // MINUTE_S))

    def wants(self, minute: int, key: str, model: str) -> bool:
        """Return whether a row counts."""
        first, end = self.minutes
        return first <= minute < end and self.key in (None, key) and self.model in (None, model)


def select(question: UsageQuestion, rows_max: int) -> tuple[str, Sequence[str | int]]:
    """Return the SQL of a question, and its values: of each group the minute, three names and the sums.

    Rows are added up by series before these get their names: that needs a third of the time.
    """
    where, values = ["minute >= ?", "minute < ?"], list[str | int](question.minutes)
    wanted = {name: getattr(question, name) for name in ("key", "model") if getattr(question, name) is not None}
    if wanted:
        names_are = " AND ".join(f"{name} = ?" for name in wanted)
        where.append(f"series IN (SELECT id FROM series WHERE {names_are})")  # noqa: S608
        values += wanted.values()
    span = question.span
    minute = f"minute - minute % {span}" if span else "0"
    names = [name if name in question.names else "''" for name in NAMES]
    by_series = f"SELECT {minute} AS at, series, {_NAMED_SUMS} FROM usage WHERE {' AND '.join(where)} GROUP BY 1, 2"  # noqa: S608
    sql = (
        f"SELECT {', '.join(['at', *names])}, {_SUMS}"  # noqa: S608
        f" FROM ({by_series}) AS added JOIN series ON series.id = added.series"
        f" GROUP BY 1, 2, 3, 4 LIMIT {rows_max}"
    )
    return sql, values
