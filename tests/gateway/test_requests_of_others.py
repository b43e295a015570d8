"""Requests that an old process still has after a takeover: the new process counts them, until the old reports ends."""

import json

import attrs
import pytest
import trio
import trio.testing
from support.owner_rig import owner_of

from ichat.observability.request_record import RequestRecord
from ichat.protocol.usage import UsedTokens
from ichat.takeover.snapshot import SavedRequest
from ichat.takeover.under_way import RequestsHere, record_in, report_of

CONFIG = """
[limits]
max_in_flight = 9
tokens_per_minute = 1000
[[external_routes]]
model_name = "m"
api_base = "http://127.0.0.1:9/v1"
"""
RECORD = RequestRecord(
    id="r", client="1.2.3.4", method="POST", path="/v1/completions", route="/v1/completions", key_name="", model="m",
    status=200, error="", phase="", started_at=5.0, ended_at=7.0, queued_s=0.5, bytes_in=10, bytes_out=20,
    usage=UsedTokens(3, 4, 1), trace_id="t", span=object(), worker="external:m", answered_at=6.0, chunks=2,
    passed=[("n", "full")],
)  # fmt: skip


class Records(list):
    """A sink that keeps what it gets."""

    def ended(self, record):
        self.append(record)


class NewProcess(list):
    """The reports that have arrived; it has ended unless `is_there`."""

    is_there = True

    async def send(self, report):
        if self.is_there:
            self.append(json.loads(json.dumps(report)))
        return self.is_there


@pytest.fixture
async def owner(tmp_path):
    async with owner_of(tmp_path, CONFIG) as found:
        yield found


def counts_of(owner):
    """Return the places at the route, the requests in flight for the limits, and the tokens of the last minute."""
    [[route]] = owner.components.control.fleet.directory.external.values()
    [quota] = owner.components.control.quotas
    return route.in_flight, quota.in_flight, quota.tokens.sum(trio.current_time())


async def test_requests_of_the_old_process_have_places_until_it_reports_their_ends(owner):
    """A request may wait, get a place, and lose it; the tokens of its record count once for the limits of a minute."""
    others = owner.components.others
    others.restore([SavedRequest("a", "", "external:m", "m"), SavedRequest("b")])
    assert counts_of(owner) == (1, 2, 0)
    others.receive({"placed": {"id": "b", "key": "", "endpoint": "external:m", "model": "m"}})
    assert counts_of(owner) == (2, 2, 0)
    others.receive({"placed": {"id": "a", "key": "", "endpoint": "", "model": "m"}})
    assert counts_of(owner) == (1, 2, 0)
    owner.components.data.handler.use_sinks([records := Records()])
    others.receive({"record": report_of(RECORD, 8.0)})
    others.receive({"record": report_of(RECORD, 8.0), "is_spent": True})
    others.receive({"ended": "b"})
    others.receive({"ended": "b"})
    assert [one.usage for one in records] == [RECORD.usage] * 2
    assert counts_of(owner) == (0, 1, 7)


async def test_places_are_free_when_the_old_process_has_ended(owner):
    """It may have been killed: it has reported no end. Whoever waits for that goes on."""
    others = owner.components.others
    await others.wait_end()
    others.restore([SavedRequest("a", "", "external:m", "m")])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(others.wait_end)
        await trio.testing.wait_all_tasks_blocked()
        assert counts_of(owner) == (1, 1, 0)
        others.end()
    assert counts_of(owner) == (0, 0, 0)


@pytest.mark.parametrize("report", [{}, {"placed": {}}, {"placed": 7}, {"record": 7}, {"record": {"id": "a"}}])
async def test_a_damaged_report_changes_nothing(owner, report):
    """It is a log line at most."""
    owner.components.others.receive(report)
    assert counts_of(owner) == (0, 0, 0)


def test_a_record_survives_the_report():
    """Its times keep their ages by the clock of the new process; parts of its own process are left out."""
    found = record_in(json.loads(json.dumps(report_of(RECORD, 10.0))), 110.0)
    moved = {"started_at": 105.0, "ended_at": 107.0, "answered_at": 106.0, "span": None, "passed": (("n", "full"),)}
    assert attrs.asdict(found) == {**attrs.asdict(RECORD), **moved}


async def test_a_process_that_goes_on_counts_what_has_ended_in_the_freeze(owner):
    """Requests for no model count at once."""
    handler = owner.components.data.handler
    usual = handler.use_sinks([records := Records()])
    here = RequestsHere(handler, {})
    uncounted = attrs.evolve(RECORD, is_counted=False)
    here.hold()
    handler.record_earlier(RECORD)
    handler.record_earlier(uncounted)
    assert records == [uncounted]
    here.give_back()
    here.give_back()
    assert records == [uncounted, RECORD]
    handler.record_earlier(RECORD)
    assert records == [uncounted, RECORD, RECORD]
    handler.use_sinks(usual)


async def test_reports_have_what_the_snapshot_lacks(owner):
    """Tokens of requests that ended before the snapshot are in it. A report that cannot be sent is sent later."""
    handler, others, new = owner.components.data.handler, {"o": SavedRequest("o")}, NewProcess()
    here = RequestsHere(handler, others)
    here.hold()
    handler.record_earlier(RECORD)
    assert here.save() == [SavedRequest("o")]
    handler.record_earlier(RECORD)
    others.clear()
    others["p"] = placed = SavedRequest("p", "k", "e", "m")
    new.is_there = False
    assert not await here.report(new.send)
    new.is_there = True
    assert await here.report(new.send)
    assert [one["is_spent"] for one in new[:2]] == [True, False]
    assert new[2:] == [{"ended": "o"}, {"placed": attrs.asdict(placed)}]
    assert await here.report(new.send)
    assert len(new) == 4
