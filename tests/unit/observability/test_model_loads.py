"""What is counted of loading models."""

from support.exposition import Shown, known, own

from ichat.observability.counts import LoadCounts
from ichat.observability.exposition import written
from ichat.observability.prometheus_families import families_of
from ichat.protocol.messages import parse_heartbeat


def shown(counts, is_loaded):
    parts = (part for family in counts.families(is_loaded) for part in families_of(family))
    return Shown("".join(written(parts)))


def test_loads_are_counted_by_why_and_how_they_ended():
    """Each result has its series, and only a load that made its model ready has a length."""
    counts = LoadCounts()
    counts.loaded("a", "request", "ready", 4.0)
    counts.loaded("a", "request", "ready", 2000.0)
    counts.loaded("a", "command", "failed")
    counts.swaps += 3
    now = shown(counts, {"a": True, "b": False})
    assert now.get("ichat_model_loads_total", model="a", reason="request", result="ready") == 2
    assert now.get("ichat_model_loads_total", model="a", reason="command", result="failed") == 1
    bounds = ("2.5", "5.0", "1800.0", "+Inf")
    assert [now.get("ichat_model_load_seconds_bucket", model="a", le=one) for one in bounds] == [0, 1, 1, 2]
    assert now.get("ichat_model_load_seconds_sum", model="a") == 2004
    assert now.get("ichat_swaps_total") == 3
    assert (now.get("ichat_model_loaded", model="a"), now.get("ichat_model_loaded", model="b")) == (1, 0)


async def test_whether_a_model_is_loaded_is_shown_of_on_demand_workers():
    """0 for one that is cold, 1 once one of its workers is ready, and nothing for models that are always loaded."""
    fleet, metrics = known("route", clock=lambda: 0.0)
    for worker_id, on_demand in (("a-0", True), ("b-0", True), ("c-0", False)):
        worker, names = fleet.managed.expect(worker_id, [worker_id[0]]), [worker_id[0]]
        fleet.managed.configure(worker, names=names, max_in_flight=None, settings={}, on_demand=on_demand)
    fleet.managed.cool(fleet.table.get("a-0"))
    for worker_id in ("b-0", "c-0"):
        beat = {"worker_id": worker_id, "model_name": worker_id[0], "host": "127.0.0.1", "port": 1}
        fleet.registry.record_heartbeat(parse_heartbeat(beat))
    now = own(metrics)
    loaded = {labels["model"]: now.get("ichat_model_loaded", **labels) for labels in now.labels("ichat_model_loaded")}
    assert loaded == {"a": 0, "b": 1}


async def test_a_scrape_shows_them_and_forgets_models_that_have_gone():
    """The series of a model end with it, so that models of launched workers leave nothing."""
    counts = LoadCounts()
    fleet, metrics = known("stays", "goes", loads=counts)
    for model in ("stays", "goes"):
        counts.loaded(model, "request", "ready", 1.0)
    assert len(own(metrics).labels("ichat_model_loads_total")) == 2
    fleet.directory.use_routes({"stays": ()})
    now = own(metrics)
    for name in ("ichat_model_loads_total", "ichat_model_load_seconds_count"):
        assert [labels["model"] for labels in now.labels(name)] == ["stays"]
