"""What the fleet finds by its tables is what a look at every worker would find, at a cost that does not grow."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ichat.fleet.fleet import Fleet
from ichat.fleet.model_directory import REASONS_MAX
from ichat.fleet.worker_facts import WorkerEnd
from ichat.fleet.worker_record import WorkerRecord
from ichat.fleet.worker_table import Deadlines
from ichat.protocol.messages import Group, Heartbeat, ModelCard, response_tag
from ichat.routing.availability import Loadable, NotReady, Ready, Unknown
from ichat.routing.sessions import HashRing, home_of

WEDGED_AFTER_S = 25.0
MODELS = ("m", "n", "adapter")
IDS = ("a", "b", "c", "mine")


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def heartbeat(worker_id="w", model="m", state="ready", **more):
    return Heartbeat(worker_id, model, "127.0.0.1", 1, state=state, **{"heartbeat_interval": 10, **more})


_HEARTBEATS = st.builds(
    heartbeat,
    st.sampled_from(IDS),
    st.sampled_from(MODELS),
    st.sampled_from(["starting", "loading", "ready", "ready", "ready", "following", "draining", "gone"]),
    models=st.sampled_from([[], [], [ModelCard("m"), ModelCard("adapter")], [ModelCard("n")]]),
    model_names=st.sampled_from([[], ["m", "m"], ["n", "m"]]),
    group=st.sampled_from([None, None, Group("g", 0, 2), Group("g", 1, 2)]),
    start_id=st.sampled_from(["", "1", "2"]),
    failure=st.sampled_from(["", "", "The engine died"]),
    heartbeat_interval=st.sampled_from([1.0, 10.0, 100.0]),
    progress=st.sampled_from([{}, {"running": 1.0, "steps": 1.0}, {"running": 1.0, "steps": 2.0}]),
)
_STEPS = st.one_of(
    _HEARTBEATS,
    st.sampled_from([0.0, 0.5, 3.0, 3.5, 25.0, 31.0, 601.0, 3601.0]),
    st.tuples(st.sampled_from(["expect", "configure"]), st.sampled_from(MODELS)),
    st.tuples(
        st.sampled_from(
            ["restart", "drain", "resume", "cool", "remove", "fail", "unreachable", "reachable", "ill", "well"]
        ),
        st.sampled_from(IDS),
    ),
    st.sampled_from(["reauthenticate", "forget probes"]),
    st.tuples(st.just("restore"), _HEARTBEATS),
)


def take(fleet, clock, step):
    """Do one step of a history with a fleet."""
    match step:
        case Heartbeat():
            fleet.registry.record_heartbeat(step)
        case float():
            clock.now += step
        case ("restore", beat):
            fleet.registry.restore(beat, 20.0, can_return=True)
        case ("expect", name):
            fleet.managed.expect("mine", [name])
        case "reauthenticate":
            fleet.table.require_reauthentication()
        case "forget probes":
            fleet.probes.forget()
        case (what, name):
            worker = fleet.table.get("mine" if what == "configure" else name)
            if worker is not None:
                _change(fleet, clock, worker, what, name)


def _change(fleet, clock, worker, what, name):
    endpoint = fleet.table.endpoint_of(worker)
    match what:
        case "configure" if worker.managed:
            fleet.managed.configure(worker, names=[name, "n"], max_in_flight=None, settings={}, on_demand=name == "m")
        case "restart" if worker.managed:
            fleet.managed.restart(worker)
        case "drain" if worker.managed:
            fleet.managed.drain(worker)
        case "resume" if worker.managed:
            fleet.managed.resume(worker)
        case "cool" if worker.managed:
            fleet.managed.cool(worker)
        case "remove":
            fleet.table.remove(worker)
        case "fail":
            fleet.table.fail(worker, WorkerEnd("has ended", 0.0), clock.now + 4)
        case "unreachable" if endpoint is not None:
            endpoint.fail(clock.now)
        case "reachable" if endpoint is not None:
            endpoint.record_reachable()
        case "ill" if endpoint is not None:
            fleet.probes.record(endpoint, worker, "it is answered with 500", is_well=False, failures_max=1)
        case "well" if endpoint is not None:
            fleet.probes.record(endpoint, worker, "", is_well=True, failures_max=1)


def _group_id(worker):
    return worker.heartbeat.group.id if worker.heartbeat and worker.heartbeat.group else None


def assert_same_as_a_scan(fleet, clock):
    """Compare what the fleet finds with what a look at every worker finds."""
    workers = list(fleet.table)
    assert fleet.directory.names() == {name for worker in workers for name in worker.names}
    for name in MODELS:
        having = [worker for worker in workers if worker.serves(name)]
        endpoints = [(worker, fleet.table.endpoint_of(worker)) for worker in having]
        ready = {
            endpoint
            for worker, endpoint in endpoints
            if endpoint is not None and worker.state(clock.now, WEDGED_AFTER_S, endpoint.trouble) == "ready"
        }
        found = fleet.directory.availability(name)
        assert fleet.directory.has(name) == bool(having)
        loadable = any(worker.is_loadable(clock.now, fleet.table.state(worker)) for worker in having)
        assert isinstance(found, Ready if ready else Loadable if loadable else NotReady if having else Unknown)
        if isinstance(found, Ready):
            assert set(found.endpoints) == ready
            assert len(found.endpoints) == len(ready)
            if found.ring is None:  # made for the first session, and kept right from then on
                found.ring = HashRing(found.endpoints)
            for number in range(3):
                session = b"%d" % number
                assert found.ring.home_of(session, lambda _: True) is home_of(session, found.endpoints)
    for worker in workers:
        members = {one for one in workers if _group_id(worker) and _group_id(one) == _group_id(worker)}
        assert set(fleet.table.index.of_group(worker)) == members
        if worker.heartbeat:
            assert fleet.table.keeper(response_tag(worker.id, worker.heartbeat.start_id)) is worker


@settings(max_examples=300)
@given(st.lists(_STEPS, max_size=40))
def test_tables_say_what_a_look_at_every_worker_says(steps):
    """Whatever happens to workers, and whatever only time does: the same endpoints, names, groups and keepers."""
    clock = Clock()
    fleet = Fleet({}, clock, max_in_flight=5, wedged_after_s=WEDGED_AFTER_S)
    for step in steps:
        take(fleet, clock, step)
        assert_same_as_a_scan(fleet, clock)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60)), max_size=200))
def test_no_worker_is_handed_out_after_its_time(steps):
    """Each worker is handed out at its time or before, and the heap does not grow with what was set earlier and later."""
    workers, deadlines, times = [WorkerRecord(str(number), managed=False) for number in range(5)], Deadlines(), {}
    for now, (number, ahead) in enumerate(steps):
        deadlines.set(workers[number], now + ahead)
        times[workers[number]] = now + ahead
        due = {worker for worker, at in times.items() if at <= now}
        assert deadlines.next_at <= min(times.values())
        early = set(deadlines.pop(now))
        assert due <= early
        for worker in early - due:
            deadlines.set(worker, times[worker])
        for worker in due:
            del times[worker]
        assert len(deadlines._heap) <= 2 * len(workers) + 64


def known(count):
    """Return a fleet with so many ready workers of one model, and the clock."""
    clock = Clock()
    fleet = Fleet({}, clock, max_in_flight=5, wedged_after_s=WEDGED_AFTER_S)
    for number in range(count):
        fleet.registry.record_heartbeat(heartbeat(str(number)))
    return fleet, clock


@pytest.fixture
def states(monkeypatch):
    """Count how often the state of a worker is found out."""
    counted, state = itertools.count(), WorkerRecord.state

    def counting(*args, **options):
        next(counted)
        return state(*args, **options)

    monkeypatch.setattr(WorkerRecord, "state", counting)
    return counted


def test_a_request_and_a_heartbeat_look_at_no_other_worker(states):
    """With 1000 workers of one model a request finds the same list as before, and a heartbeat looks at its own worker."""
    fleet, clock = known(1000)
    told = []
    fleet.table.changed.add(lambda: told.append(1))
    found, before = fleet.directory.availability("m"), next(states)
    for number in range(100):
        clock.now += 0.1
        fleet.registry.record_heartbeat(heartbeat(str(number)))
        assert fleet.directory.availability("m") is found
        assert fleet.table.lost(str(number)) == []
    assert next(states) - before <= 2 * 100
    assert told == [], "nobody is told of heartbeats that change nothing"


def test_silence_of_one_looks_at_one(states):
    """Of 1000 workers those are looked at whose time has come, and the others serve on."""
    fleet, clock = known(1000)
    clock.now += 20
    for number in range(1, 1000):
        fleet.registry.record_heartbeat(heartbeat(str(number)))
    clock.now += 11
    assert len(fleet.directory.availability("m").endpoints) == 999
    before = next(states)
    clock.now += 1
    assert len(fleet.directory.availability("m").endpoints) == 999
    assert next(states) - before == 1


@pytest.mark.parametrize("is_another_token", [True, False])
def test_a_reload_finds_out_no_state_that_it_knows(states, is_another_token):
    """With 1000 workers neither another token nor the end of all health checks looks at each worker's state."""
    fleet, _ = known(1000)
    assert isinstance(fleet.directory.availability("m"), Ready)
    before = next(states)
    if is_another_token:
        fleet.table.require_reauthentication()
    else:
        fleet.probes.forget()
    assert next(states) - before == 1
    assert isinstance(fleet.directory.availability("m"), NotReady if is_another_token else Ready)


def test_an_error_names_a_few_of_many_workers():
    """The reason why a model of many workers has none that is ready stays readable."""
    fleet, clock = known(1000)
    clock.now += 31
    reasons = fleet.directory.availability("m").reasons.split("; ")
    assert len(reasons) == REASONS_MAX + 1
    assert reasons[-1] == f"{1000 - REASONS_MAX} more workers are not ready"
