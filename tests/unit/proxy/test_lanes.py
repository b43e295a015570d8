"""The lanes of requests: what is counted between two readings, and what bounds it."""

import pytest
import trio
from unit.proxy.test_finished_requests import record

from ichat.observability.request_record import UsedTokens
from ichat.proxy import lanes
from ichat.proxy.lanes import LaneMeter
from ichat.proxy.requests_in_flight import RequestsInFlight


@pytest.fixture(autouse=True)
def virtual_time(autojump_clock):
    """Seconds pass at once."""


class Running:
    """A stream under way."""

    phase, is_stream = "streaming", True

    def __init__(self, number=0, chunks=0, **more):
        self.number, self.chunks, self.more = number, chunks, more

    def record(self, phase, now):
        return record(self.number, own_id=f"own-{self.number}", chunks=self.chunks, ended_at=now, **self.more)


@pytest.fixture
def requests():
    return RequestsInFlight()


@pytest.fixture
def sinks():
    return []


@pytest.fixture
def meter(requests, sinks):
    return LaneMeter(requests, sinks)


async def tokens_of(meter):
    return sum(one.tokens for one in (await meter.read()).lanes)


async def test_the_tokens_of_a_stream_are_counted_once(requests, meter):
    """Its pieces count while it runs, and its end adds only what the pieces were short of."""
    await meter.read()
    running = Running(chunks=3, started_at=trio.current_time())
    requests.requests[running] = False
    await trio.sleep(1)
    assert await tokens_of(meter) == 3
    running.chunks = 10
    await trio.sleep(2)
    found = await meter.read()
    assert found.seconds >= 2
    assert [(one.in_flight, one.ended, one.tokens) for one in found.lanes] == [(1, 0, 7)]
    del requests.requests[running]
    meter.ended(record(own_id="own-0", usage=UsedTokens(5, 12)))
    found = await meter.read()
    assert [(one.in_flight, one.ended, one.tokens) for one in found.lanes] == [(0, 1, 2)]
    assert (await meter.read()).lanes == []


async def test_the_past_of_a_stream_is_not_of_the_first_second(requests, meter):
    """A stream that ran before an operator looked brings only its later pieces."""
    running = Running(chunks=5000, started_at=trio.current_time() - 100)
    requests.requests[running] = False
    assert await tokens_of(meter) == 0
    running.chunks = 5001
    assert await tokens_of(meter) == 1


async def test_the_meter_gets_records_only_while_an_operator_looks(meter, sinks):
    """Neither before the first reading, nor after the last; it keeps nothing from then on."""
    assert sinks == []
    for _ in range(2):
        await meter.read()
        await meter.read()
        assert sinks == [meter]
        meter.ended(record(usage=UsedTokens(5, 12)))
        meter.stop()
        meter.stop()
        assert sinks == []
    assert (await meter.read()).lanes == []


@pytest.mark.parametrize("more", [{"worker": ""}, {"is_counted": False}])
async def test_a_request_that_reached_no_model_is_no_lane(meter, more):
    """A refused request, and a request to the control plane, go nowhere."""
    await meter.read()
    meter.ended(record(**more))
    assert (await meter.read()).lanes == []


async def test_lanes_are_bounded(meter):
    """There are at most so many, of names cut short; the requests of further lanes are counted."""
    await meter.read()
    for number in range(lanes.LANES_MAX + 3):
        meter.ended(record(alias=f"{number}" + "x" * 10_000))
    found = await meter.read()
    assert (len(found.lanes), found.left_out) == (lanes.LANES_MAX, 3)
    assert {len(one.name) for one in found.lanes} == {lanes.NAME_MAX}
