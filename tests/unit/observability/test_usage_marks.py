"""The marks of relays in the ledger: each is on disk with the rows that it stands for, and not before them."""

import contextlib
import sqlite3

import pytest
import trio

from ichat.config.schema import Key, Limits
from ichat.config.usage import UsageSettings
from ichat.observability.request_record import RequestRecord, UsedTokens
from ichat.observability.usage.earlier_use import restore_windows
from ichat.observability.usage.ledger import OK, Ledger
from ichat.observability.usage.queries import UsageQuestion
from ichat.observability.usage.rows import no_sums
from ichat.observability.usage.store import MARK_MINUTES, Batch, UsageStore
from ichat.security.rate_limits import QuotaRefusal, Quotas

NOON = 1_700_000_000 // 60 * 60
LIMIT_S = 20.0
SERIES = ("a", "m", "w")


class Disk(UsageStore):
    """A store whose disk can be broken."""

    def __init__(self, directory):
        super().__init__(str(directory))
        self.is_broken = False
        self.writes = []

    def write(self, batch):
        if self.is_broken:
            raise OSError(28, "No space left on device")
        super().write(batch)
        self.writes.append(dict(batch.marks))


def record(key="a", usage=None):
    return RequestRecord(
        id="", client="", method="", path="", route="", key_name=key, model="m", status=200, error="", phase="",
        started_at=0.0, ended_at=1.0, queued_s=0.0, bytes_in=0, bytes_out=0, usage=usage, trace_id="", worker="w",
    )  # fmt: skip


def ledger_on(store, quotas=None, wall=lambda: NOON, **more):
    settings = UsageSettings(**{"flush_s": 0.05, **more})
    return Ledger(settings, store, {"m"}.__contains__, quotas or Quotas(Limits(), []), wall, retry_s=0.1)


@contextlib.asynccontextmanager
async def running(ledger):
    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(ledger.run)
            yield ledger
            nursery.cancel_scope.cancel()


async def until(condition):
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.005)


def followed(ledger, marks):
    """Return the marks that the ledger says are on disk, as it says so."""
    heard = []
    ledger.follow(lambda: dict(marks), lambda found: heard.append(dict(found)))
    return heard


async def test_a_mark_is_committed_with_its_rows_and_only_once(tmp_path):
    """The owner of the relays hears of it after the commit; a mark that did not change is not written again."""
    store, marks = Disk(tmp_path), {"r1": 1, "r2": 4}
    ledger = ledger_on(store)
    heard = followed(ledger, marks)
    async with running(ledger):
        ledger.ended(record())
        await until(lambda: heard)
        assert heard == [{"r1": 1, "r2": 4}]
        marks["r1"] = 2
        ledger.ended(record())
        await until(lambda: len(heard) == 2)
    assert heard == [{"r1": 1, "r2": 4}, {"r1": 2}]
    again = ledger_on(UsageStore(str(tmp_path)))
    followed(again, {})
    async with running(again):
        assert again.marks() == {"r1": 2, "r2": 4}


async def test_a_mark_waits_for_a_disk_that_cannot_be_written(tmp_path):
    """Nothing is settled meanwhile. Later the rows that failed are written first, without the newer mark."""
    store, marks = Disk(tmp_path), {"r": 1}
    ledger = ledger_on(store)
    heard = followed(ledger, marks)
    async with running(ledger):
        store.is_broken = True
        ledger.ended(record())
        await until(lambda: ledger.storage != OK)
        marks["r"] = 2
        ledger.ended(record())
        assert heard == []
        store.is_broken = False
        await until(lambda: ledger.storage == OK and not ledger.rows_pending)
    assert heard == [{"r": 1}, {"r": 2}]
    groups, _ = await ledger.read(UsageQuestion(0, 1e12, ()))
    assert [sums[0] for sums in groups.values()] == [2]


async def test_a_mark_never_falls(tmp_path):
    """An owner that has not met a relay's newest outcomes yet does not undo what an earlier owner noted."""
    store = UsageStore(str(tmp_path))
    store.write(Batch({}, {"r": 7}, NOON // 60))
    ledger = ledger_on(store)
    heard = followed(ledger, {"r": 3})
    async with running(ledger):
        assert ledger.marks() == {"r": 7}
        ledger.ended(record())
        await until(lambda: not ledger.rows_pending)
        assert store.marks() == {"r": 7}
    assert heard == []


async def test_marks_are_read_for_relays_that_are_found_later(tmp_path):
    """A gateway without relays of its own ends those of an earlier process: its ledger runs already."""
    store = UsageStore(str(tmp_path))
    store.write(Batch({}, {"r": 7}, NOON // 60))
    async with running(ledger_on(store)) as ledger:
        followed(ledger, {})
        assert ledger.marks() == {}
        await ledger.read_marks()
        assert ledger.marks() == {"r": 7}


def test_rows_and_marks_are_written_together_or_not_at_all(tmp_path):
    """A row that cannot be written leaves no mark behind, and a mark that cannot be written leaves no row."""
    store = UsageStore(str(tmp_path))
    store.write(Batch({(1, SERIES): no_sums()}, {"r": 1}))
    with pytest.raises(sqlite3.Error):
        store.write(Batch({(2, SERIES): no_sums()}, {"r": None}))
    with pytest.raises((sqlite3.Error, TypeError)):
        store.write(Batch({(2, ("a", None, "w")): no_sums()}, {"r": 2}))
    assert store.marks() == {"r": 1}
    assert len(store.read(UsageQuestion(0, 1e12, ("minute",)))) == 1


def test_old_marks_are_removed_and_a_file_without_marks_has_none(tmp_path):
    """The file of a gateway without relays gets no table for them."""
    store = UsageStore(str(tmp_path))
    store.write(Batch({(1, SERIES): no_sums()}))
    assert store.marks() == {}
    store.tidy(10, 2.0, 400.0)
    store.write(Batch({}, {"old": 1}, 5))
    store.write(Batch({}, {"new": 1}, 6))
    store.tidy(MARK_MINUTES + 6, 2.0, 400.0)
    assert store.marks() == {"new": 1}


# Limits of a minute, without relays.


async def test_limits_of_a_minute_count_the_rows_of_two_minutes_after_a_restart(tmp_path):
    """They are never exceeded by a restart; rows that are older than the last minute count no more."""
    store, at = UsageStore(str(tmp_path)), [NOON]
    async with running(ledger_on(store, wall=lambda: at[0])) as ledger:
        for minute, key in enumerate(("a", "a", "b", "a")):
            at[0] = NOON + 60 * minute
            ledger.ended(record(key, UsedTokens(5, 1)))
            await until(lambda: not ledger.rows_pending)
    quotas = Quotas(Limits(requests_per_minute=3), [Key("a", requests_per_minute=2), Key("b", tokens_per_minute=6)])
    async with running(ledger_on(store, quotas, wall=lambda: at[0] + 59)) as ledger:
        await restore_windows(ledger.read, quotas, lambda: at[0] + 59)
        now = trio.current_time()
        assert quotas.refusal("a", now) is None
        assert quotas.refusal("b", now).limit == "tokens_per_minute"
        quotas.acquire("a", now)
        assert isinstance(quotas.acquire("a", now), QuotaRefusal)
        assert quotas.refusal("", now).limit == "requests_per_minute"
        assert quotas.refusal("a", now + 61) is None


async def test_limits_of_a_minute_need_no_disk(tmp_path):
    """A file that cannot be read is reported, and the limits begin with nothing."""
    quotas = Quotas(Limits(requests_per_minute=1), [])
    (tmp_path / "usage.sqlite3").mkdir()
    ledger = ledger_on(UsageStore(str(tmp_path)), quotas)
    await restore_windows(ledger.read, quotas)
    assert quotas.refusal("", trio.current_time()) is None
    followed(ledger, {})
    async with running(ledger):
        assert ledger.marks() == {}
