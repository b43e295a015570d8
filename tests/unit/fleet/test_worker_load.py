"""One load of a worker: the gateway's own phases, the worker's, and what is expected of them."""

import logging

import pytest

from ichat.fleet.fleet import Fleet
from ichat.fleet.views import summarize
from ichat.fleet.worker_facts import WorkerEnd
from ichat.protocol.messages import Heartbeat, LoadPhase

IMPORT, WEIGHTS = LoadPhase("importing vLLM", 4.0), LoadPhase("loading weights", 2.0, "1 of 2 shards")


class Site:
    """A fleet with a clock that is set."""

    def __init__(self, *, managed=True, on_demand=False):
        self.now = 1000.0
        self.fleet = Fleet({}, lambda: self.now, 10)
        self.managed = managed
        self.count = 0
        if managed:
            self.worker = self.fleet.managed.expect("w", ["m"])
            self.fleet.managed.configure(self.worker, names=["m"], max_in_flight=None, settings={}, on_demand=on_demand)

    def tell(self, state, *, start="", **more):
        beat = Heartbeat("w", "m", "127.0.0.1", 9, state=state, start_id=f"s{start}", heartbeat_interval=3600.0, **more)
        self.fleet.registry.record_heartbeat(beat)
        self.worker = self.fleet.table.get("w")

    def view(self):
        return summarize(self.fleet.table, self.worker)

    def phases(self, load=None):
        load = load or self.view().load
        return [(phase.name, phase.seconds, phase.expected_s) for phase in load.phases]

    def start(self, seconds, start=""):
        """Go through a start whose worker has two phases and then is ready."""
        self.fleet.managed.enter_load(self.worker, "checking")
        self.now += 0.5
        self.fleet.managed.enter_load(self.worker, "starting the process")
        self.now += 1.5 + seconds
        self.tell("loading", start=start, load=[LoadPhase("importing vLLM", seconds)])
        self.now += 2
        self.tell("ready", start=start, loaded=[LoadPhase("importing vLLM", seconds), LoadPhase("loading weights", 2)])


def test_a_start_from_its_first_second_to_its_last():
    """The seconds go on between two heartbeats, and all of them together are what the load took."""
    site = Site()
    assert site.view().load is None
    site.fleet.managed.enter_load(site.worker, "checking")
    site.now += 0.5
    assert site.phases() == [("checking", 0.5, None)]
    assert site.view().phase == "checking"
    site.fleet.managed.enter_load(site.worker, "starting the process")
    site.now += 5.5
    site.tell("starting", load=[IMPORT], phase="importing vLLM")
    assert site.phases() == [
        ("checking", 0.5, None),
        ("starting the process", 1.5, None),
        ("importing vLLM", 4.0, None),
    ]
    site.now += 3
    assert site.phases()[-1] == ("importing vLLM", 7.0, None)
    assert site.view().load.elapsed_s == 9
    site.tell("loading", load=[LoadPhase("importing vLLM", 5.0), WEIGHTS])
    assert site.view().load.phases[-1].detail == "1 of 2 shards"
    site.now += 1
    site.tell("ready", loaded=[LoadPhase("importing vLLM", 5.0), LoadPhase("loading weights", 3.0)])
    view = site.view()
    assert view.load is None
    assert site.phases(view.last_load)[2:] == [("importing vLLM", 5.0, None), ("loading weights", 3.0, None)]
    assert view.last_load.elapsed_s == pytest.approx(10)
    site.now += 100
    assert site.view().last_load == view.last_load, "it has ended"


def test_the_next_load_has_the_last_one_beside_it(caplog):
    """Each phase has what it took last time, the whole what it probably takes; the gateway logs one line when it is ready."""
    site = Site()
    with caplog.at_level(logging.INFO):
        site.start(6)
    assert (
        "worker w is ready after 10 s: starting the process 2 s, importing vLLM 6 s, loading weights 2 s" in caplog.text
    )
    site.fleet.managed.restart(site.worker)
    site.fleet.managed.enter_load(site.worker, "checking")
    view = site.view()
    assert (view.load.expected_s, view.ready_in_s) == (10, 10)
    assert site.phases() == [("checking", 0, 0.5)]
    assert view.last_load.elapsed_s == 10, "the one before is still known"
    site.now += 4
    site.tell("loading", start="2", load=[IMPORT])
    assert site.phases()[-1] == ("importing vLLM", 4.0, 6.0)
    assert site.fleet.directory.story("m", site.now).rest_s == 6
    assert site.fleet.directory.story("n", site.now) is None


def test_a_registered_worker_reports_its_load():
    """The gateway's phases are missing there. What such workers teach is apart from what managed ones do."""
    site = Site(managed=False)
    site.tell("loading", load=[IMPORT, WEIGHTS])
    site.now += 1
    assert site.phases() == [("importing vLLM", 4.0, None), ("loading weights", 3.0, None)]
    site.tell("ready", loaded=[IMPORT, LoadPhase("loading weights", 3.0)])
    assert site.view().last_load.elapsed_s == 7
    assert site.fleet.managed.times.expected("m", "start") is None
    site.tell("loading", start="2", load=[LoadPhase("importing vLLM", 1.0)])
    assert (site.phases(), site.view().ready_in_s) == ([("importing vLLM", 1.0, 4.0)], 6)


def test_a_worker_that_was_ready_before_reports_its_last_load():
    """After the gateway's restart, or where the worker was started first."""
    site = Site(managed=False)
    site.tell("ready", loaded=[IMPORT, WEIGHTS])
    assert site.view().last_load.elapsed_s == 6


def test_only_the_newest_heartbeats_load_is_kept():
    """Only what its newest heartbeat has counts towards the limits of what may be registered."""
    site = Site(managed=False)
    site.tell("loading", load=[IMPORT])
    site.tell("ready", loaded=[IMPORT, WEIGHTS])
    assert len(site.view().last_load.phases) == 2
    site.tell("ready")
    assert site.view().last_load is None


def test_a_load_counts_towards_what_may_be_registered():
    """Its phases, and while it goes on those of the last load beside them."""
    fleet = Fleet({}, lambda: 0.0, 10)
    sizes = []
    for number in range(3):
        phases = [LoadPhase("x" * 64, 1.0, "y" * 64)] * 64
        more = [{}, {"load": phases}, {"loaded": phases}][number]
        beat = Heartbeat("w", "m", "127.0.0.1", 9, state="loading", start_id="s", **more)
        fleet.registry.record_heartbeat(beat, "sender")
        sizes.append(fleet.registry._weights._all.bytes)
    assert sizes[1] - sizes[0] > 64 * 400
    assert sizes[2] - sizes[0] > 64 * 300


def test_a_silent_workers_load_is_not_shown():
    """Nobody knows whether it goes on: after three missed heartbeats, or since before the gateway's start."""
    site = Site()
    site.tell("loading", load=[IMPORT])
    site.now += 3600 * 3 + 1
    assert (site.view().state, site.view().load) == ("unhealthy", None)
    site = Site(managed=False)
    beat = Heartbeat("w", "m", "127.0.0.1", 9, state="loading", start_id="s", load=[IMPORT])
    site.fleet.registry.restore(beat, 5.0)
    site.worker = site.fleet.table.get("w")
    assert (site.view().state, site.view().load) == ("stale", None)
    site.tell("loading", load=[IMPORT])
    assert site.phases() == [("importing vLLM", 4.0, None)]


def test_a_worker_without_phases_has_one():
    """One of another version, or none of iChat's own: what it does since it was heard of is its phase."""
    site = Site(managed=False)
    site.tell("loading", phase="reading")
    site.now += 5
    site.tell("loading", phase="reading")
    site.now += 1
    assert site.phases() == [("reading", 6.0, None)]
    site.tell("ready")
    assert site.view().last_load.elapsed_s == 6


def test_a_wake_is_a_load():
    """It is told apart from starts, which take much longer."""
    site = Site(on_demand=True)
    site.start(6)
    for seconds in (1.0, 2.0):
        site.tell("asleep")
        assert site.view().load is None
        site.tell("waking")
        site.now += seconds
        assert site.phases()[0][:2] == ("waking up", seconds)
        site.tell("ready")
    assert site.view().last_load.elapsed_s == 2
    times = site.fleet.managed.times
    assert (times.expected("m", "wake"), times.expected("m", "start")) == (1.5, 10)


@pytest.mark.parametrize("end", ["fail", "cool", "drain"])
def test_a_load_that_does_not_end_well_teaches_nothing(end):
    """It is over, and the next one begins anew."""
    site = Site(on_demand=True)
    site.fleet.managed.enter_load(site.worker, "checking")
    site.tell("loading", load=[IMPORT])
    if end == "fail":
        site.fleet.table.fail(site.worker, WorkerEnd("ended", 0.0))
    elif end == "cool":
        site.fleet.managed.cool(site.worker)
    else:
        site.tell("draining")
    view = site.view()
    assert (view.load, view.last_load) == (None, None)
    assert site.fleet.managed.times.expected("m", "start") is None


def test_two_that_wait_for_room_do_not_wake_each_other():
    """A phase that goes on is no change: otherwise each would wake the other for ever."""
    site, calls = Site(), []
    site.fleet.managed.enter_load(site.worker, "waiting for room")
    site.fleet.table.changed.add(lambda: calls.append(1))
    site.fleet.managed.enter_load(site.worker, "waiting for room")
    assert not calls
    site.fleet.managed.enter_load(site.worker, "checking")
    assert calls
