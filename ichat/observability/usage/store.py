"""The ledger's file: SQLite, in the state directory. All of it blocks: a single thread calls, without overlaps.

A row is a minute of a series: a key, a model and an endpoint. Rows older than `usage.minute_days` are added
up to those of their hours, which begin at the hour's first minute. The writes of a process that is killed are kept
(WAL, `synchronous = NORMAL`); a power cut may cost the last seconds, and never the file. No other program can read it
while it is open.
"""

import contextlib
import logging
import os
import pathlib
import sqlite3
import time
from collections.abc import Generator, Mapping

import attrs

from ichat.observability.usage import queries
from ichat.observability.usage.rows import (
    MINUTES_A_DAY,
    MINUTES_A_HOUR,
    Groups,
    Marks,
    Series,
    Sums,
    UsageGroup,
)

log = logging.getLogger(__name__)

FILE = "usage.sqlite3"
OK = "ok"
"""Stands for a store that has everything."""
VERSION = 1
"""Of the tables: `PRAGMA user_version`."""
BUSY_S = 1.0
"""How long another program that has the file locked is waited for."""
QUERY_S = 20.0
"""The limit on a question."""
WAL_BYTES_MAX = 16 * 1024 * 1024
"""The size to which the log of writes is cut when it has been applied."""
GROUPS_MAX = 20_000
"""How many groups the answer to a question may have."""
DAMAGED_KEPT = 3
"""How many damaged files are kept aside."""
MARK_MINUTES = MINUTES_A_DAY
"""A mark that has not changed for this number of minutes is removed: its relay has ended, or has nothing unsettled."""
_STEPS = 100_000
"""Instructions of SQLite's machine between two looks at the time."""


class TooManyGroups(Exception):
    """The answer would have too many groups, or need longer than `QUERY_S`."""


@attrs.define(eq=False)
class Batch:
    """Rows on their way to the disk, and the marks that are true with them."""

    rows: Mapping[tuple[int, Series], Sums]
    marks: Marks = attrs.field(factory=dict[str, int])
    minute: int = 0
    """In which the marks were noted."""
    is_written: bool = False
    """Set by the thread, so that rows of a write that was not waited for are not written again."""


class UsageStore:
    """The file. Every method may raise `sqlite3.Error` or `OSError`."""

    def __init__(self, directory: str, *, groups_max: int = GROUPS_MAX, query_s: float = QUERY_S) -> None:
        """An answer has at most `groups_max` groups, after at most `query_s`."""
        self._groups_max = groups_max
        self._query_s = query_s
        self.path = os.path.join(directory, FILE)
        self._connection: sqlite3.Connection | None = None
        self._ids: dict[Series, int] = {}
        """The numbers of series, as far as they are known here."""

    def __repr__(self) -> str:
        return f"<UsageStore {self.path}>"

    def write(self, batch: Batch) -> None:
        """Add the rows to the file and note the marks, or change nothing."""
        if batch.is_written:
            return
        with self._mended() as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            new: dict[Series, int] = {}
            for (minute, series), sums in batch.rows.items():
                number = self._ids.get(series) or new.get(series)
                if number is None:
                    number = new[series] = _number_of(connection, series)
                values = (*(int(one) for one in sums[:-1]), round(sums[-1] * 1000))
                connection.execute(queries.UPSERT, (minute, number, *values))
            if batch.marks:
                connection.execute(queries.MARKS_TABLE)
                connection.executemany(queries.SET_MARK, [(*mark, batch.minute) for mark in batch.marks.items()])
        self._ids |= new
        batch.is_written = True

    def read(self, question: queries.UsageQuestion, groups_max: int | None = None) -> Groups:
        """Return the sums of each group, `groups_max` at most (None: the store's). Raises TooManyGroups."""
        groups_max = self._groups_max if groups_max is None else groups_max
        sql, values = queries.select(question, groups_max + 1)
        with self._mended() as connection, _bounded(connection, self._query_s):
            found = {
                UsageGroup(minute, key, model, endpoint): [*sums[:-1], sums[-1] / 1000]
                for minute, key, model, endpoint, *sums in connection.execute(sql, values)
            }
        if len(found) > groups_max:
            raise TooManyGroups
        return found

    def marks(self) -> Marks:
        """Return the marks of all relays."""
        with self._mended() as connection:
            return dict(connection.execute(queries.MARKS).fetchall()) if _has_marks(connection) else {}

    def tidy(self, now_minute: int, minute_days: float, keep_days: float) -> bool:
        """Add up an hour that is old enough, or else remove a day that is too old; return whether there was any.

        Old marks are removed, too.
        """
        with self._mended() as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            if _has_marks(connection):
                connection.execute(queries.DELETE_MARKS, (now_minute - MARK_MINUTES,))
            return self._add_up(connection, now_minute - int(minute_days * MINUTES_A_DAY)) or self._forget(
                connection, now_minute - int(keep_days * MINUTES_A_DAY)
            )

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _add_up(self, connection: sqlite3.Connection, before: int) -> bool:
        (done,) = connection.execute(queries.ADDED_UP).fetchone()
        found = connection.execute(queries.FIRST_BETWEEN, (done, before - before % MINUTES_A_HOUR)).fetchone()
        if found[0] is None:
            return False
        hour = found[0] - found[0] % MINUTES_A_HOUR
        span = (hour, hour + MINUTES_A_HOUR)
        rows = connection.execute(queries.SUMS_OF_HOUR, span).fetchall()
        connection.execute(queries.DELETE_BETWEEN, span)
        connection.executemany(queries.INSERT, ((hour, *row) for row in rows))
        connection.execute(queries.SET_ADDED_UP, (span[1],))
        return True

    def _forget(self, connection: sqlite3.Connection, before: int) -> bool:
        before -= before % MINUTES_A_DAY
        if not connection.execute(queries.DELETE_BETWEEN, (0, before)).rowcount:
            return False
        connection.execute(queries.DELETE_UNUSED_SERIES)
        self._ids.clear()
        return True

    @contextlib.contextmanager
    def _mended(self) -> Generator[sqlite3.Connection]:
        """Return the open file; a file that turns out to be damaged is put aside for the next call."""
        try:
            yield self._opened()
        except sqlite3.DatabaseError as error:
            self.close()  # so that the next call begins with the file of that time
            if type(error) is sqlite3.DatabaseError:  # beyond use; all other errors have classes of their own
                self._put_aside(str(error))
            raise

    def _opened(self) -> sqlite3.Connection:
        if self._connection is not None:
            if os.path.exists(self.path):
                return self._connection
            self.close()  # it was removed: further writes would be lost
        self._ids.clear()
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        self._connection = connection
        # Alone, SQLite needs no file of shared memory, which it could not make on a full disk: not even to read.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            self.close()
            self._put_aside(f"it is of version {version}, from a newer iChat")
            return self._opened()
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES_MAX}")
        if version < VERSION:
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                for statement in queries.TABLES:
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {VERSION}")
        return connection

    def _put_aside(self, why: str) -> None:
        """Rename the file, so that a new file can begin, and keep the newest `DAMAGED_KEPT` such files."""
        path = pathlib.Path(self.path)
        aside = path.with_name(f"{FILE}.damaged-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}")
        path.rename(aside)
        with contextlib.suppress(FileNotFoundError):
            pathlib.Path(f"{self.path}-wal").rename(f"{aside}-wal")
        log.error("%s could not be used (%s): it is %s now, and usage begins anew", path, why, aside.name)
        olds = sorted(one for one in path.parent.glob(f"{FILE}.damaged-*") if not one.name.endswith("-wal"))
        for old in olds[:-DAMAGED_KEPT]:
            old.unlink(missing_ok=True)
            pathlib.Path(f"{old}-wal").unlink(missing_ok=True)


def _number_of(connection: sqlite3.Connection, series: Series) -> int:
    connection.execute(queries.INSERT_SERIES, series)
    (number,) = connection.execute(queries.ID_OF_SERIES, series).fetchone()
    return number


def _has_marks(connection: sqlite3.Connection) -> bool:
    return connection.execute(queries.HAS_MARKS).fetchone() == (1,)


@contextlib.contextmanager
def _bounded(connection: sqlite3.Connection, seconds: float) -> Generator[None]:
    """Interrupt longer queries. Raises TooManyGroups then."""
    until = time.monotonic() + seconds
    connection.set_progress_handler(lambda: time.monotonic() > until, _STEPS)
    try:
        yield
    except sqlite3.OperationalError as error:
        if str(error) == "interrupted":
            raise TooManyGroups from error
        raise
    finally:
        connection.set_progress_handler(None, 0)
