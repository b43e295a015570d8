"""The counts of launches: each counts once, by how it went. In virtual time."""

import pytest
from support.exposition import Shown, known, own

from ichat.observability.exposition import written
from ichat.observability.prometheus_families import families_of
from tests.unit.supervisor.test_loader import LOAD_S, Rig


@pytest.fixture(autouse=True)
def in_virtual_time(autojump_clock):
    """Let no test wait for real."""


async def test_launches_are_counted_by_how_they_went(autojump_clock, nursery, tmp_path):
    """A worker that ends after it was ready was launched well; an end before that is a failure, unless it was asked for."""
    rig = Rig(nursery, tmp_path)
    rig.failing.add("b")
    for name in "abc":
        rig.add(name)
    await rig.answered("a")
    rig.process("a").kill()
    await rig.lease("b")
    rig.workers["c"].life.load()
    await rig.until(lambda: rig.workers["c"].has_process)
    rig.workers["c"].life.unload()
    await rig.until(lambda: not rig.workers["c"].has_process)
    parts = (part for family in rig.loader.counts.families({}) for part in families_of(family))
    now = Shown("".join(written(parts)))
    counts = {found["result"]: now.get("ichat_launches_total", **found) for found in now.labels("ichat_launches_total")}
    assert counts == {"ready": 1, "failed": 1, "stopped": 1}
    assert LOAD_S <= now.get("ichat_launch_seconds_sum", launcher="here") < LOAD_S + 1
    assert now.get("ichat_launch_seconds_count", launcher="here") == 1


async def test_workers_that_wait_for_a_place_are_counted_by_their_launchers():
    fleet, metrics = known("m", clock=lambda: 0.0)
    for worker_id, on in (("a", "ray"), ("b", "ray"), ("c", "here")):
        worker = fleet.managed.expect(worker_id, ["m"], None)
        fleet.managed.configure(worker, names=["m"], max_in_flight=None, settings={"on": on}, on_demand=False)
    fleet.managed.lack(fleet.table.get("a"), "It waits for GPUs.")
    now = own(metrics)
    assert [now.get("ichat_pending_launches", launcher=one) for one in ("ray", "here")] == [1, 0]


@pytest.mark.parametrize(("has_others", "value"), [(None, None), (True, 1), (False, 0)])
async def test_a_cluster_is_shown_as_up_while_it_answers(has_others, value):
    """Without a cluster, and before it was asked, there is no such series."""
    _, metrics = known("m", clock=lambda: 0.0, has_others=has_others)
    assert own(metrics).get("ichat_ray_up") == value
