"""The ledger: what is counted is on disk soon after, whatever happens to the disk, and is read with what is not yet."""

import calendar
import contextlib
import os
import sqlite3
import stat
import threading

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exposition import Shown

from ichat.config.schema import Config, Key, Limits, Security
from ichat.config.usage import Price, UsageSettings
from ichat.observability.exposition import written
from ichat.observability.prometheus_families import families_of
from ichat.observability.request_record import RequestRecord, UsedTokens
from ichat.observability.usage.ledger import OK, Ledger
from ichat.observability.usage.ledger import families_of as ledger_families
from ichat.observability.usage.queries import UsageQuestion
from ichat.observability.usage.report import csv_lines, report_of
from ichat.observability.usage.rows import minute_of, no_sums
from ichat.observability.usage.store import FILE, Batch, TooManyGroups, UsageStore
from ichat.security.rate_limits import Quotas

NOON = calendar.timegm((2026, 11, 23, 12, 0, 0))
LIMIT_S = 20.0
EVER = UsageQuestion(0, 1e10, ("key", "model", "endpoint"))


class Clock:
    """A wall clock that stands."""

    def __init__(self, at=NOON):
        self.at = at

    def __call__(self):
        return self.at


def record(key="a", model="m", worker="w1", status=200, usage=None, busy_s=2.0, queued_s=0.5):
    return RequestRecord(
        id="", client="", method="", path="", route="", key_name=key, model=model, status=status, error="", phase="",
        started_at=10.0, ended_at=10.0 + busy_s + queued_s, queued_s=queued_s, bytes_in=0, bytes_out=0, usage=usage,
        trace_id="", worker=worker,
    )  # fmt: skip


USED = UsedTokens(100, 20, 50)


def ledger_in(directory, clock=None, quotas=None, store=None, limit_groups_max=10**6, **more):
    chosen = UsageSettings(**{"flush_s": 0.05, **more})
    known = {"m", "n"}.__contains__
    store = store or UsageStore(str(directory))
    return Ledger(
        chosen, store, known, quotas or Quotas(Limits(), []), clock or Clock(),
        retry_s=0.1, limit_groups_max=limit_groups_max,
    )  # fmt: skip


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


async def rows_of(ledger, question=EVER):
    groups, _ = await ledger.read(question)
    return {(one.key, one.model, one.endpoint): sums for one, sums in groups.items()}


async def test_usage_is_in_the_answer_at_once_and_on_disk_soon(tmp_path):
    """Requests, errors, tokens in, out and cached, estimates apart, and seconds without the queue."""
    async with running(ledger_in(tmp_path)) as ledger:
        ledger.ended(record(usage=USED))
        ledger.ended(record(usage=UsedTokens(7, 3, 0, is_estimate=True), status=499))
        ledger.ended(record(status=500))
        ledger.ended(record(key="", worker="w2", usage=USED))
        expected = {("a", "m", "w1"): [3, 1, 107, 23, 50, 10, 6.0], ("", "m", "w2"): [1, 0, 100, 20, 50, 0, 2.0]}
        assert await rows_of(ledger) == expected
        await until(lambda: not ledger.rows_pending)
        assert await rows_of(ledger) == expected
        ledger.ended(record(usage=USED))
        assert (await rows_of(ledger))["a", "m", "w1"] == [4, 1, 207, 43, 100, 10, 8.0]
    assert ledger.rows_pending == 0
    assert stat.S_IMODE(os.stat(tmp_path / FILE).st_mode) == 0o600
    async with running(ledger_in(tmp_path)) as again:
        assert (await rows_of(again))["a", "m", "w1"] == [4, 1, 207, 43, 100, 10, 8.0]


async def test_models_that_clients_make_up_are_counted_as_none(tmp_path):
    """So a client's words fill no memory; a model that an endpoint was asked for is known."""
    async with running(ledger_in(tmp_path)) as ledger:
        for number in range(100):
            ledger.ended(record(model=f"made-up-{number}", worker="", status=404))
        ledger.ended(record(model="n", worker="", status=503))
        ledger.ended(record(model="adapter", worker="w1"))
        assert ledger.rows_pending <= 3
        found = await rows_of(ledger)
    assert {names: sums[0] for names, sums in found.items()} == {
        ("a", "", ""): 100, ("a", "n", ""): 1, ("a", "adapter", "w1"): 1,
    }  # fmt: skip


async def test_minutes_are_apart_and_grouped_as_asked(tmp_path):
    """By minute, hour, day and month; only of a key or a model; from and to."""
    clock = Clock()
    async with running(ledger_in(tmp_path, clock, minute_days=30.0)) as ledger:
        for after_s, model, key in (
            (0, "m", "a"),
            (59, "m", "a"),
            (60, "n", "a"),
            (3600, "m", "b"),
            (86400 * 10, "m", "a"),
        ):
            clock.at = NOON + after_s
            ledger.ended(record(key, model, usage=USED))
            await until(lambda: not ledger.rows_pending)

        async def shown(since=NOON, until_=NOON + 86400 * 30, by=("key",), **more):
            question = UsageQuestion(since, until_, by, **more)
            groups, _ = await ledger.read(question)
            report = report_of(question, groups, {"m": Price(input=1.0)})
            return [tuple(row[name] for name in (*by, "requests")) for row in report.rows]

        assert await shown(by=("minute",)) == [
            ("2026-11-23T12:00Z", 2), ("2026-11-23T12:01Z", 1), ("2026-11-23T13:00Z", 1), ("2026-12-03T12:00Z", 1),
        ]  # fmt: skip
        assert await shown(by=("hour", "model")) == [
            ("2026-11-23T12:00Z", "m", 2), ("2026-11-23T12:00Z", "n", 1), ("2026-11-23T13:00Z", "m", 1),
            ("2026-12-03T12:00Z", "m", 1),
        ]  # fmt: skip
        assert await shown(by=("day",)) == [("2026-11-23", 4), ("2026-12-03", 1)]
        assert await shown(by=("month", "key")) == [("2026-11", "a", 3), ("2026-11", "b", 1), ("2026-12", "a", 1)]
        assert await shown(by=("model",), key="a") == [("m", 3), ("n", 1)]
        assert await shown(by=("key",), model="n") == [("a", 1)]
        assert await shown(since=NOON + 60, until_=NOON + 3600) == [("a", 1)]
        assert await shown(by=(), since=NOON + 3600) == [(2,)]


async def test_costs_are_those_of_the_models(tmp_path):
    """A row without a model that has a price has none; a sum has that of the models that have one."""
    async with running(ledger_in(tmp_path)) as ledger:
        ledger.ended(record(usage=UsedTokens(1_000_000, 500_000, 400_000)))
        ledger.ended(record(key="b", model="n", usage=USED))
        groups, _ = await ledger.read(EVER)
    report = report_of(UsageQuestion(0, 1e10, ("key",)), groups, {"m": Price(input=1.0, output=2.0, cached=0.5)})
    assert [(row["key"], row["cost"]) for row in report.rows] == [("a", 1.8), ("b", None)]
    assert report.totals["cost"] == 1.8
    assert report_of(EVER, groups, {}).totals["cost"] is None
    lines = list(csv_lines(report))
    assert lines[0].strip().split(",")[:3] == ["key", "requests", "errors"]
    assert lines[1] == "a,1,0,1000000,500000,400000,0,2.0,1.8\r\n"
    assert lines[2].endswith(",2.0,\r\n")


async def test_limits_hold_over_restarts(tmp_path):
    """The ledger tells limits what was used in the month and the day, also those that a reload brings."""
    clock = Clock()
    async with running(ledger_in(tmp_path, clock)) as ledger:
        ledger.ended(record(usage=USED))
        clock.at += 86400
        ledger.ended(record(usage=USED, key="b"))
        await until(lambda: not ledger.rows_pending)
    quotas = Quotas(Limits(tokens_per_month=1000), [Key("a", tokens_per_day=5), Key("b")], {}, clock)
    async with running(ledger_in(tmp_path, clock, quotas)) as ledger:
        assert [one.used for one in quotas.standings("")] == [240]
        assert [one.used for one in quotas.standings("a")] == [120]
        ledger.ended(record(usage=USED, key="b"))
        quotas.spend("b", "m", 100, 20, 50)
        config = Config(
            limits=Limits(tokens_per_month=1000), usage=UsageSettings(flush_s=0.05),
            security=Security(keys=[Key("a", tokens_per_month=5), Key("b", tokens_per_month=5)]),
        )  # fmt: skip
        quotas.reconfigure(config)
        ledger.reconfigure(config)
        await until(lambda: not quotas.needs_sums)
        assert [one.used for one in quotas.standings("b")] == [240]
        assert [one.used for one in quotas.standings("")] == [360]


# A disk that fails.


class Disk(UsageStore):
    """A store whose disk can be broken, as a full one is, or held up."""

    def __init__(self, directory):
        super().__init__(directory)
        self.failure = None
        self.writes = 0

    def write(self, batch):
        self.writes += 1
        if self.failure is not None:
            raise self.failure
        super().write(batch)


def with_disk(directory, **more):
    disk = Disk(str(directory))
    return ledger_in(directory, store=disk, **more), disk


def shown_metrics(ledger):
    parts = (part for family in ledger_families(ledger) for part in families_of(family))
    return Shown("".join(written(parts)))


async def test_usage_waits_for_a_broken_disk(tmp_path, caplog):
    """It is said once, and once when it is over; the answer has everything all the while."""
    caplog.set_level("INFO", "ichat")
    ledger, disk = with_disk(tmp_path)
    disk.failure = sqlite3.OperationalError("database or disk is full")
    async with running(ledger):
        for number in range(5):
            ledger.ended(record(usage=USED))
            writes = disk.writes
            await until(lambda: disk.writes > writes)  # noqa: B023
            groups, storage = await ledger.read(EVER)
            assert [sums[0] for sums in groups.values()] == [number + 1]
        assert storage.endswith("cannot be written: database or disk is full")
        assert shown_metrics(ledger).get("ichat_usage_store_ok") == 0
        assert [one.levelname for one in caplog.records if "cannot be written" in one.message] == ["ERROR"]
        disk.failure = None
        await until(lambda: ledger.storage == OK and not ledger.rows_pending)
        assert shown_metrics(ledger).get("ichat_usage_store_ok") == 1
        assert len([one for one in caplog.records if "is written again" in one.message]) == 1
        assert (await rows_of(ledger))["a", "m", "w1"][0] == 5


async def test_memory_is_bounded_while_the_disk_is_broken(tmp_path):
    """Rows beyond the bound are lost and counted; those that are there go on counting."""
    ledger, disk = with_disk(tmp_path, pending_rows_max=10)
    disk.failure = OSError(28, "No space left on device")
    async with running(ledger):
        for number in range(30):
            ledger.ended(record(key=f"k{number % 15}", usage=USED))
        assert (ledger.rows_pending, ledger.rows_lost) == (10, 10)
        await until(lambda: disk.writes)
        ledger.ended(record(key="k20"))
        assert (ledger.rows_pending, ledger.rows_lost) == (10, 11)
        assert shown_metrics(ledger).get("ichat_usage_rows_lost_total") == 11
        disk.failure = None
        await until(lambda: ledger.storage == OK)
        assert sum(sums[0] for sums in (await rows_of(ledger)).values()) == 20


async def test_rows_whose_writer_was_not_waited_for_are_written_once(tmp_path):
    """The gateway's end cuts a write short that goes on in its thread; the last write finds it done."""
    ledger, disk = with_disk(tmp_path)
    begun, go_on = trio.Event(), [False]
    token = trio.lowlevel.current_trio_token()
    write = disk.write

    def slow(batch):
        if batch.rows and not go_on[0]:
            go_on[0] = True
            trio.from_thread.run_sync(begun.set, trio_token=token)
        write(batch)

    disk.write = slow
    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(ledger.run)
            ledger.ended(record(usage=USED))
            await begun.wait()
            nursery.cancel_scope.cancel()
    assert ledger.rows_pending == 0
    async with running(ledger_in(tmp_path)) as again:
        assert (await rows_of(again))["a", "m", "w1"][0] == 1


async def test_a_damaged_file_is_put_aside(tmp_path, caplog):
    """The gateway starts, counts anew, and keeps the damaged file; a sentence says so."""
    path = tmp_path / FILE
    path.write_bytes(b"this is no database, but somebody's notes\n" * 100)
    async with running(ledger_in(tmp_path, quotas=Quotas(Limits(tokens_per_day=5), []))) as ledger:
        ledger.ended(record(usage=USED))
        await until(lambda: ledger.storage == OK and not ledger.rows_pending)
        assert (await rows_of(ledger))["a", "m", "w1"][0] == 1
    (aside,) = tmp_path.glob(f"{FILE}.damaged-*")
    assert aside.read_bytes().startswith(b"this is no database")
    assert any("usage begins anew" in one.message for one in caplog.records)
    assert any("begin without the earlier usage" in one.message for one in caplog.records)


def test_a_file_that_breaks_while_it_is_used_is_put_aside(tmp_path):
    """A page that is overwritten under SQLite's hands: the next write goes to a new file."""
    store = UsageStore(str(tmp_path))
    rows = {(minute_of(NOON) + one, (f"k{one}", "m", "w")): [1, 0, 1, 1, 0, 0, 1.0] for one in range(2000)}
    store.write(Batch(rows))
    store.close()
    data = bytearray((tmp_path / FILE).read_bytes())
    for page in range(4096, len(data), 4096):
        data[page : page + 4096] = b"\xff" * 4096
    (tmp_path / FILE).write_bytes(data)
    batch = Batch({(minute_of(NOON), ("a", "m", "w")): [1, 0, 1, 1, 0, 0, 1.0]})
    with pytest.raises(sqlite3.DatabaseError):
        store.write(batch)
    assert not batch.is_written
    store.write(batch)
    assert [sums[0] for sums in store.read(EVER).values()] == [1]
    assert len([*tmp_path.glob(f"{FILE}.damaged-*")]) == 1


def test_a_newer_file_is_put_aside(tmp_path):
    """An older iChat changes nothing in what it does not know."""
    with contextlib.closing(sqlite3.connect(tmp_path / FILE)) as newer:
        newer.execute("PRAGMA user_version = 99")
        newer.execute("CREATE TABLE other (one)")
    store = UsageStore(str(tmp_path))
    store.write(Batch({}))
    assert store.read(EVER) == {}
    store.close()
    (aside,) = tmp_path.glob(f"{FILE}.damaged-*")
    with contextlib.closing(sqlite3.connect(aside)) as kept:
        assert kept.execute("SELECT count(*) FROM other").fetchone() == (0,)


async def test_a_directory_that_is_gone_stops_nothing(tmp_path, caplog):
    """The gateway starts and counts; the rows are written once the directory is there."""
    directory = tmp_path / "state"
    ledger = ledger_in(directory, quotas=Quotas(Limits(tokens_per_day=5), []))
    async with running(ledger):
        ledger.ended(record(usage=USED))
        assert ledger.storage != OK
        groups, storage = await ledger.read(EVER)
        assert [sums[0] for sums in groups.values()] == [1]
        assert "No such file or directory" in storage
        directory.mkdir()
    assert ledger.rows_pending == 0
    assert (directory / FILE).exists()


async def test_without_a_ledger_nothing_is_kept(tmp_path):
    """There is no file, and nothing runs."""
    ledger = ledger_in(tmp_path, enabled=False)
    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(ledger.run)
    assert os.listdir(tmp_path) == []
    assert not [*ledger_families(ledger)]


# What is old.


def test_old_minutes_become_hours_and_old_days_go(tmp_path):
    """The sums stay the same; series without a row are forgotten, and known again when they come back."""
    store, now = UsageStore(str(tmp_path)), minute_of(NOON)
    rows = {}
    for ago in (0, 30, 90, 2 * 1440, 3 * 1440, 3 * 1440 + 1, 3 * 1440 + 70, 500 * 1440):
        rows[now - ago, ("a", "m", "w")] = [1, 1, 2, 3, 1, 4, 0.25]
        rows[now - ago, ("old" if ago > 1440 else "b", "m", "w")] = [1, 0, 0, 0, 0, 0, 0.0]
    store.write(Batch(rows))
    before = store.read(attrs.evolve(EVER, since=NOON - 400 * 86400))
    while store.tidy(now, 2.0, 400.0):
        pass
    question = attrs.evolve(EVER, by=("minute", "key"))
    found = store.read(question)
    assert store.read(EVER) == before
    ages = sorted(now - one.minute for one in found if one.key == "a")
    assert ages == [0, 30, 90, 2 * 1440, 3 * 1440, 3 * 1440 + 60, 3 * 1440 + 120]
    assert all(one.minute % 60 == 0 for one in found if now - one.minute > 2 * 1440)
    while store.tidy(now + 900 * 1440, 2.0, 400.0):
        pass
    assert store.read(EVER) == {}
    store.write(Batch({(now, ("b", "m", "w")): no_sums()}))
    assert [one.key for one in store.read(EVER)] == ["b"]


@settings(max_examples=30)
@given(
    rows=st.dictionaries(
        st.tuples(st.integers(0, 6 * 1440), st.sampled_from("ab"), st.sampled_from("mn")),
        st.lists(st.integers(0, 1000), min_size=6, max_size=6),
        max_size=40,
    ),
    steps=st.integers(0, 5),
)
def test_sums_do_not_depend_on_where_rows_are(rows, steps, tmp_path_factory):
    """Written at once or in parts, added up or not: a question gets the same answer as from memory."""
    store = UsageStore(str(tmp_path_factory.mktemp("usage")))
    ledger = ledger_in("/nowhere")
    base = minute_of(NOON)
    made = {(base + at, (key, model, "w")): [*map(float, counts), 0.0] for (at, key, model), counts in rows.items()}
    parts = list(made.items())
    for start in range(0, len(parts), 7):
        store.write(Batch(dict(parts[start : start + 7])))
    for _ in range(steps):
        store.tidy(base + 6 * 1440, 3.0, 400.0)
    ledger._waiting = made
    for by in (("key",), ("model", "day"), ("key", "model", "month")):
        question = UsageQuestion(0, 1e10, by)
        groups = {}
        ledger._add_memory(question, groups)
        assert report_of(question, store.read(question), {}) == report_of(question, groups, {})
    store.close()


async def test_limits_know_a_month_of_many_keys(tmp_path):
    """An answer has few rows, limits are told of all keys and models; where even that fails, the gateway starts."""
    few = UsageStore(str(tmp_path), groups_max=3)
    ledger = ledger_in(tmp_path, store=few)
    async with running(ledger):
        for number in range(10):
            ledger.ended(record(key=f"k{number}", usage=USED))
        await until(lambda: not ledger.rows_pending)
    for most, tokens in ((10, 10 * USED.total), (9, 0)):
        quotas = Quotas(Limits(tokens_per_day=10**9), [])
        async with running(ledger_in(tmp_path, quotas=quotas, store=few, limit_groups_max=most)):
            [standing] = quotas.standings("")
            assert (standing.used, quotas.needs_sums) == (tokens, tokens == 0)


def test_an_answer_is_bounded(tmp_path):
    """One with too many rows is none, and neither is one that takes too long."""
    store = UsageStore(str(tmp_path))
    store.write(Batch({(one, ("a", "m", "w")): no_sums() for one in range(20_000)}))
    by_minute = attrs.evolve(EVER, by=("minute",))
    assert len(store.read(by_minute)) == 20_000
    assert len(store.read(EVER)) == 1
    store.close()
    for few in (UsageStore(str(tmp_path), groups_max=19_999), UsageStore(str(tmp_path), query_s=-1.0)):
        with pytest.raises(TooManyGroups):
            few.read(by_minute)
        few.close()


class SlowTidy(UsageStore):
    """Old rows are added up in two parts; the first waits for `goes_on`."""

    def __init__(self, directory):
        super().__init__(str(directory))
        self.begun, self.goes_on, self.parts = threading.Event(), threading.Event(), 0

    def tidy(self, now, minute_days, keep_days):
        self.parts += 1
        super().tidy(now, minute_days, keep_days)
        self.begun.set()
        assert self.goes_on.wait(LIMIT_S)
        return self.parts == 1


async def test_a_frozen_ledger_leaves_its_file_alone(tmp_path):
    """A freeze that comes while old rows are added up leaves the file to another process until the thaw."""
    store = SlowTidy(tmp_path)
    async with running(ledger_in(tmp_path, store=store)) as ledger, trio.open_nursery() as nursery:
        ledger.ended(record(usage=USED))
        await until(store.begun.is_set)
        nursery.start_soon(ledger.freeze)
        await until(lambda: not ledger.gate.is_open)
        await trio.testing.wait_all_tasks_blocked()
        store.goes_on.set()
        await until(lambda: not nursery.child_tasks)
        await trio.testing.wait_all_tasks_blocked()
        assert store.parts == 1
        other = UsageStore(str(tmp_path))
        assert await trio.to_thread.run_sync(other.read, EVER)
        other.close()
        ledger.gate.open()
