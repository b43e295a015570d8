"""The history: its ring, what it is made of, and its size."""

import json
import math

import pytest
import trio

from ichat.config.schema import Config, HistorySettings, Routing
from ichat.fleet.fleet import Fleet
from ichat.observability.history import History, ModelTraffic, percentile_ms
from ichat.observability.prometheus_families import Histogram
from ichat.protocol.messages import Heartbeat
from ichat.routing.balancer import Balancer


@pytest.fixture
def fleet():
    return Fleet({}, trio.current_time, max_in_flight=5)


class Counts:
    """What metrics would count of models."""

    in_flight = 3

    def __init__(self):
        self.by_model = {}

    def add(self, model, *first_bytes_s, errors=0, tokens=(0, 0)):
        before = self.by_model.get(model, ModelTraffic(model, 0, 0, 0, 0, Histogram((0.1, 1.0))))
        for value in first_bytes_s:
            before.first_byte.add(value)
        self.by_model[model] = before._replace(
            requests=before.requests + len(first_bytes_s) + errors,
            errors=before.errors + errors,
            input_tokens=before.input_tokens + tokens[0],
            output_tokens=before.output_tokens + tokens[1],
        )

    def traffic(self):
        return self.by_model.values()


def make(fleet, counts, seconds=15.0, **more):
    balancer = Balancer(fleet.directory.availability, trio.current_time, Routing())
    return History(
        HistorySettings(5.0, seconds),
        fleet.table,
        fleet.directory,
        balancer,
        traffic=counts,
        **more,
    )


def shown(history, workers=None):
    return json.loads("".join(history.parts(workers)))


async def test_a_sample_has_what_has_happened_since_the_one_before(fleet, nursery, autojump_clock):
    """Counts are differences, and percentiles are those of the requests of these seconds alone."""
    counts = Counts()
    counts.add("m", 0.05, 0.05)
    history, samples = make(fleet, counts), []
    history.sampled.add(samples.append)
    nursery.start_soon(history.sample_forever)
    await trio.sleep(5.1)
    counts.add("m", *[0.5] * 10, errors=1, tokens=(7, 8))
    await trio.sleep(5)
    columns = shown(history)["columns"]
    assert columns["requests"] == [0, 11]
    assert columns["errors"] == [0, 1]
    assert (columns["input_tokens"], columns["output_tokens"]) == ([0, 7], [0, 8])
    assert columns["ttft_p50_ms"] == [None, 550]
    assert columns["in_flight"] == [3, 3]
    assert shown(history)["models"]["m"]["requests"] == [None, 11]
    assert samples[1].describe()["models"]["m"]["output_tokens"] == 8


async def test_the_oldest_sample_makes_room(fleet, nursery, autojump_clock):
    """There are never more than the ring holds, oldest first; a model that is silent for so long is forgotten."""
    counts = Counts()
    history = make(fleet, counts)
    nursery.start_soon(history.sample_forever)
    await trio.sleep(0.1)
    for number in range(1, 6):
        counts.add("m", *[0.5] * number)
        await trio.sleep(5)
    assert shown(history)["columns"]["requests"] == [3, 4, 5]
    counts.by_model.clear()
    await trio.sleep(10)
    assert shown(history)["models"]["m"]["requests"] == [5, None, None]
    await trio.sleep(5)
    assert shown(history)["models"] == {}


async def test_the_history_is_bounded(fleet, nursery, autojump_clock):
    """Neither models nor workers beyond the bounds have series; all of them count in the totals."""
    counts = Counts()
    history = make(fleet, counts, models_max=2, workers_max=3)
    nursery.start_soon(history.sample_forever)
    await trio.sleep(0.1)
    for number in range(5):
        counts.add(f"m{number}", 0.5)
        heartbeat = Heartbeat(f"w{number}", "m", "h", 1, progress={"kv_use": 0.1 * number}, heartbeat_interval=60)
        fleet.registry.record_heartbeat(heartbeat)
    await trio.sleep(5)
    found = shown(history)
    assert len(found["models"]) == 2
    assert found["columns"]["requests"] == [5]
    assert found["columns"]["kv_use"] == [0.2]
    assert list(found["workers"]) == ["w0", "w1", "w2"]
    assert list(shown(history, ("w1",))["workers"]) == ["w1"]


async def test_other_settings_begin_anew(fleet, nursery, autojump_clock):
    """The same ones change nothing."""
    history = make(fleet, Counts())
    nursery.start_soon(history.sample_forever)
    await trio.sleep(5.1)
    history.reconfigure(Config(history=HistorySettings(5.0, 15.0)))
    assert len(shown(history)["columns"]["at"]) == 1
    history.reconfigure(Config(history=HistorySettings(1.0, 15.0)))
    assert shown(history)["columns"]["at"] == []


@pytest.mark.parametrize(
    ("values", "share", "told"),
    [([], 0.5, None), ([0.05] * 2, 0.5, 50), ([0.05] * 9 + [0.5], 0.95, 550), ([7.0], 0.5, 1000)],
)
def test_percentiles_are_within_their_bucket(values, share, told):
    """Values above the last bound count as that."""
    spread = Histogram((0.1, 1.0))
    for value in values:
        spread.add(value)
    found = percentile_ms(spread, share)
    assert math.isnan(found) if told is None else found == told
