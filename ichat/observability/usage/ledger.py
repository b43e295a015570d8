"""Usage by key and model: counted in memory by every request, written by a thread soon after, and read with both.

No request waits for the disk. Rows that cannot be written stay in memory, up to `usage.pending_rows_max`; beyond,
they are lost and counted.
"""

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import trio
from prometheus_client import Metric
from typing_extensions import TypeVarTuple, Unpack

from ichat.config.schema import Config
from ichat.config.usage import UsageSettings
from ichat.listeners import Gate, Listeners
from ichat.observability.prometheus_families import family
from ichat.observability.request_record import CLIENT_LEFT, RequestRecord, UsedTokens
from ichat.observability.usage.earlier_use import tokens_by_model
from ichat.observability.usage.queries import UsageQuestion
from ichat.observability.usage.rows import (
    MINUTE_S,
    Groups,
    Marks,
    MinuteRows,
    Series,
    Sums,
    add_to,
    group_rows,
    minute_of,
    no_sums,
)
from ichat.observability.usage.store import OK, Batch, TooManyGroups, UsageStore
from ichat.security.period_limits import day_start, month_start
from ichat.security.rate_limits import Quotas

log = logging.getLogger(__name__)

OPEN_S = 10.0
"""How long the gateway's start waits for the earlier usage."""
READ_S = 25.0
"""How long an answer waits for the disk; beyond, it has only the usage in memory."""
WRITE_S = 30.0
"""How long a write is waited for; a later write waits for it to end."""
RETRY_S = 5.0
"""How long after a failure the disk is tried again."""
LIMITS_S = 60.0
"""The pause after a question for the limits that ran out of time, before the next such question."""
LIMIT_GROUPS_MAX = 1_000_000
"""How many pairs of a key and a model the limits can get."""
CLOSE_S = 3.0
"""The limit on the last write at the gateway's end."""
TIDY_S = 3600.0
"""How often old rows are added up, and the oldest removed."""

_Args = TypeVarTuple("_Args")
_Answer = TypeVar("_Answer")


class Ledger:
    """The requests of this gateway and of those before it, by minute, key, model and endpoint."""

    def __init__(
        self,
        settings: UsageSettings,
        store: UsageStore,
        is_known: Callable[[str], bool],
        quotas: Quotas,
        wall: Callable[[], float] = time.time,
        *,
        retry_s: float = RETRY_S,
        limit_groups_max: int = LIMIT_GROUPS_MAX,
    ) -> None:
        """`is_known` distinguishes existing models from names that clients make up; `quotas` get the earlier usage."""
        self._retry_s = retry_s
        self._limit_groups_max = limit_groups_max
        self.enabled = settings.enabled
        self.rows_lost = 0
        self.storage = OK
        """`ok`, or in a sentence why the disk does not have everything."""
        self._settings = settings
        self._is_known = is_known
        self._quotas = quotas
        self._wall = wall
        self._store = store
        self._limiter = trio.CapacityLimiter(1)
        self._reading = trio.Lock()
        """Held by a reader, so that a write waits for a single reader at most."""
        self.gate = Gate()
        """Closed while another process may open the file."""
        self._lock = trio.Lock()
        """Held while rows go from the memory to the disk, and while both are read."""
        self._woken: Listeners[[]] = Listeners()
        """Called when there may be something to do."""
        self._newest_outcomes: Callable[[], Marks] | None = None
        self._committed: Callable[[Marks], None] = _ignore
        self._noted: dict[str, int] = {}
        """The marks that are on disk, or will be with the next write."""
        self._rows: dict[Series, Sums] = {}
        """Counted since the last write."""
        self._waiting: MinuteRows = {}
        self._waiting_marks: dict[str, int] = {}
        self._batch: Batch | None = None
        """The rows that are being written, or could not be."""
        self._retry_at = 0.0
        self._limits_at = 0.0
        self._tidied_at = 0.0

    def __repr__(self) -> str:
        return f"<Ledger {self._store.path}, {self.rows_pending} rows wait>"

    @property
    def rows_pending(self) -> int:
        """How many rows are in memory only."""
        return len(self._rows) + len(self._waiting) + (len(self._batch.rows) if self._batch is not None else 0)

    def ended(self, record: RequestRecord) -> None:
        """Count a request to a model that has ended; see `RecordSink`."""
        if not record.is_counted:
            return
        sums = self._rows.get((record.key_name, record.model, record.worker))
        if sums is None:
            sums = self._sums(record.key_name, record.model, record.worker)
        sums[0] += 1
        status = record.status
        if status >= 400 and status != CLIENT_LEFT:
            sums[1] += 1
        if record.usage is not None:
            _add_tokens(sums, record.usage)
        sums[6] += record.ended_at - record.started_at - record.queued_s

    def add_sums(
        self, key: str, model: str, worker: str, used: UsedTokens, *, requests: int = 0, errors: int = 0
    ) -> None:
        """Count tokens, and requests that were not counted before."""
        sums = self._sums(key, model, worker)
        sums[0] += requests
        sums[1] += errors
        _add_tokens(sums, used)

    def _sums(self, key: str, model: str, worker: str) -> Sums:
        """Return the sums to which a request is added."""
        sums = self._rows.get((key, model, worker))
        if sums is not None:
            return sums
        series = (key, model if worker or self._is_known(model) else "", worker)
        sums = self._rows.get(series)
        if sums is not None:
            return sums
        if self.rows_pending >= self._settings.pending_rows_max:
            self.rows_lost += 1
            return no_sums()
        sums = self._rows[series] = no_sums()
        self._woken()
        return sums

    def reconfigure(self, config: Config) -> None:
        """Use the settings of another configuration; whether there is a ledger stays as it is."""
        self._settings = config.usage
        self.wake()

    def wake(self) -> None:
        """Look soon whether the limits need the earlier usage."""
        self._woken()

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Pass the earlier usage to the limits, then write the counts, until cancelled and once more."""
        if not self.enabled:
            task_status.started()
            return
        with trio.move_on_after(OPEN_S) as opening:
            if self._newest_outcomes is not None:
                await self.read_marks()
            await self._tell_limits()
        if opening.cancelled_caught:
            log.error("%s is slow: limits for a day and a month do not know the earlier usage yet", self._store.path)
        task_status.started()
        try:
            while True:
                while self.storage == OK and not self.rows_pending and not self._may_tell_limits():
                    await self._woken.wait()
                await trio.sleep(self._settings.flush_s)
                await self.gate.wait_open()
                async with self._lock:
                    await self._flush()
                if self._may_tell_limits():
                    await self._tell_limits()
                await self._tidy()
        finally:
            await self._close()  # noqa: ASYNC102 it has a shield with a bound

    def follow(self, newest_outcomes: Callable[[], Marks], committed: Callable[[Marks], None]) -> None:
        """Write marks with the rows.

        `newest_outcomes` returns the newest outcome of each relay. All until then must have been counted here, or need
        no row. `committed` is called with marks that are on disk.
        """
        self._newest_outcomes, self._committed = newest_outcomes, committed

    def marks(self) -> Marks:
        """Return the marks on disk from the start of `run` on, and those that the next write has."""
        return self._noted

    async def read_marks(self) -> None:
        """Read the marks on disk: before relays of earlier owners report, if `follow` is called after `run`."""
        try:
            async with self._lock:
                self._noted |= await self._in_thread(self._store.marks)
        except (sqlite3.Error, OSError) as error:
            log.error("%s cannot be read (%s): it may count the last requests twice", self._store.path, _why(error))

    async def read(self, question: UsageQuestion) -> tuple[Groups, str]:
        """Return the usage until now, on disk and in memory, and `storage`. Raises TooManyGroups.

        No other task runs between the last look at the memory and the return.
        """
        [groups], storage = await self._read([question])
        return groups, storage

    async def _read(
        self, questions: Sequence[UsageQuestion], groups_max: int | None = None
    ) -> tuple[Sequence[Groups], str]:
        """Return the same of several questions at the same moment, at most `groups_max` each. Raises TooManyGroups.

        A single reader waits for the file at a time, so that a write waits for a single reader at most.
        """
        found: list[Groups] = []
        storage = f"{self._store.path} did not answer within {READ_S:g} s"
        with trio.move_on_after(READ_S):
            await self.gate.wait_open()
            async with self._reading, self._lock:
                try:
                    found = [await self._in_thread(self._store.read, one, groups_max) for one in questions]
                    storage = self.storage
                except (sqlite3.Error, OSError) as error:
                    storage = f"{self._store.path} cannot be read: {_why(error)}"
        found += [{} for _ in questions[len(found) :]]
        for question, groups in zip(questions, found, strict=True):
            self._add_memory(question, groups)
        return found, storage

    def _add_memory(self, question: UsageQuestion, groups: Groups) -> None:
        """Add the usage that is not on disk."""
        rows: MinuteRows = {(minute_of(self._wall()), series): sums for series, sums in self._rows.items()}
        unwritten = () if self._batch is None or self._batch.is_written else self._batch.rows.items()
        for part in (rows.items(), self._waiting.items(), unwritten):
            wanted = {at: sums for at, sums in part if question.wants(at[0], at[1][0], at[1][1])}
            group_rows(wanted, question.span, question.names, groups)

    def _may_tell_limits(self) -> bool:
        """Return whether the limits need the earlier usage, and it may be read."""
        return self._quotas.needs_sums and self.storage == OK and trio.current_time() >= self._limits_at

    async def _tell_limits(self) -> None:
        """Set the usage of this month if there are limits for a day or a month."""
        if not self._quotas.needs_sums:
            return
        now = self._wall()
        until, by = now + MINUTE_S, ("key", "model")
        questions = [UsageQuestion(since, until, by) for since in (month_start(now), day_start(now))]
        try:
            (month, today), storage = await self._read(questions, self._limit_groups_max)
        except TooManyGroups:
            log.error("%s cannot be added up in time: limits for a day and a month count from now", self._store.path)
            self._limits_at = trio.current_time() + LIMITS_S
            return
        if storage != OK:
            log.error("%s: limits for a day and a month begin without the earlier usage", storage)
            self._fail(storage)
            return
        self._quotas.set_sums(tokens_by_model(month, today))

    async def _flush(self, *, is_last: bool = False) -> None:
        """Write the counts; rows that cannot be written wait."""
        minute = minute_of(self._wall())
        rows, self._rows = self._rows, {}
        for series, sums in rows.items():
            add_to(self._waiting.setdefault((minute, series), no_sums()), sums)
        for relay, seq in () if self._newest_outcomes is None else self._newest_outcomes().items():
            if seq > self._noted.get(relay, 0):
                self._noted[relay] = self._waiting_marks[relay] = seq
        if trio.current_time() < self._retry_at and not is_last:
            return
        while self._batch is not None or self._waiting or self._waiting_marks or self.storage != OK:
            if not await self._write():
                return

    async def _write(self) -> bool:
        """Write the rows that could not be written before, or else what waits; return whether that was done."""
        if self._batch is None:
            self._batch = Batch(self._waiting, self._waiting_marks, minute_of(self._wall()))
            self._waiting, self._waiting_marks = {}, {}
        why = f"it had no result within {WRITE_S:g} s"
        with trio.move_on_after(WRITE_S):
            try:
                await self._in_thread(self._store.write, self._batch)
                why = ""
            except (sqlite3.Error, OSError) as error:
                why = _why(error)
        if why:
            self._fail(f"{self._store.path} cannot be written: {why}")
            return False
        marks, self._batch = self._batch.marks, None
        if marks:
            self._committed(marks)
        if self.storage != OK:
            log.info("%s is written again; %d requests are in no row", self._store.path, self.rows_lost)
            self.storage = OK
        return True

    def _fail(self, why: str) -> None:
        self._retry_at = trio.current_time() + self._retry_s
        if self.storage == OK:
            log.error("%s; %d rows of usage may wait in memory, requests go on", why, self._settings.pending_rows_max)
        self.storage = why

    async def _tidy(self) -> None:
        """Add up old rows, and remove the oldest, now and then."""
        now = self._wall()
        if self.storage != OK or abs(now - self._tidied_at) < TIDY_S:
            return
        self._tidied_at = now
        days = self._settings.minute_days, self._settings.keep_days
        try:
            is_more = True
            while is_more:
                async with self._lock:
                    if not self.gate.is_open:
                        return  # another process may have the file
                    is_more = await self._in_thread(self._store.tidy, minute_of(now), *days)
                    await self._flush()
        except (sqlite3.Error, OSError) as error:
            self._fail(f"{self._store.path} cannot be written: {_why(error)}")

    async def freeze(self) -> None:
        """Write everything, and leave the file to another process until `gate` is open. Raises OSError."""
        self.gate.close()
        if not self.enabled:
            return
        async with self._reading, self._lock:
            await self._flush(is_last=True)
            if self.storage != OK:
                raise OSError(self.storage)
            await self._in_thread(self._store.close)

    async def _close(self) -> None:
        if not self.gate.is_open:
            return
        with trio.move_on_after(CLOSE_S, shield=True):
            async with self._lock:
                await self._flush(is_last=True)
                await self._in_thread(self._store.close)
        if self.rows_pending:
            log.error("%d rows of usage could not be written before the end, and are lost", self.rows_pending)

    async def _in_thread(self, call: Callable[[Unpack[_Args]], _Answer], *args: Unpack[_Args]) -> _Answer:
        """Have the store called in its thread; a call that is not waited for any more still ends before the next."""
        await trio.lowlevel.checkpoint_if_cancelled()
        return await trio.to_thread.run_sync(call, *args, abandon_on_cancel=True, limiter=self._limiter)


def families_of(ledger: Ledger) -> Iterator[Metric]:
    """Return a ledger's families for Prometheus."""
    if not ledger.enabled:
        return
    yield family("ichat_usage_store_ok", ledger.storage == OK)
    yield family("ichat_usage_rows_pending", ledger.rows_pending)
    yield family("ichat_usage_rows_lost", ledger.rows_lost)


def _ignore(_marks: Marks) -> None:
    """Do nothing: there are no relays."""


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _add_tokens(sums: Sums, usage: UsedTokens) -> None:
    input_, output, cached, is_estimate = usage
    sums[2] += input_
    sums[3] += output
    sums[4] += cached
    if is_estimate:
        sums[5] += input_ + output
