"""The parts of a fleet together, without any event loop and with a clock of the test's."""

import re

import attrs
import pytest

from ichat.config.schema import CircuitBreaker, Config, Routing, Timeouts
from ichat.errors import ApiError
from ichat.fleet.fleet import Fleet
from ichat.fleet.views import describe, result_of
from ichat.fleet.worker_facts import WorkerEnd
from ichat.fleet.worker_table import WorkerTable
from ichat.http.pool import Upstream
from ichat.protocol.messages import Group, Heartbeat, Machine, MachineGpu, ModelCard, parse_heartbeat
from ichat.routing.availability import NotReady, Ready, Unknown
from ichat.routing.endpoint import Endpoint


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def fleet(clock):
    far = Endpoint(Upstream("far", "there", 80), b"external:far", 10)
    return Fleet({"far": [far]}, clock, max_in_flight=5)


def endpoints(fleet, model="m"):
    """Return the endpoints that can serve a model."""
    found = fleet.directory.availability(model)
    assert isinstance(found, Ready)
    return found.endpoints


def reasons(fleet, model="m"):
    """Return why a known model cannot be served now."""
    found = fleet.directory.availability(model)
    assert isinstance(found, NotReady)
    assert found.retry_after_s == 5
    return found.reasons


def serving(fleet, model="m"):
    """Return the ids of the endpoints that can serve a model."""
    return {endpoint.id.decode() for endpoint in endpoints(fleet, model)}


def heartbeat(worker_id="w", model="m", state="ready", **more):
    return Heartbeat(
        worker_id=worker_id, model_name=model, host="127.0.0.1", port=1, state=state, heartbeat_interval=10, **more
    )


def test_the_first_beat_registers(fleet):
    """The first beat is the registration, later ones update."""
    assert fleet.registry.record_heartbeat(heartbeat()).is_new
    assert not fleet.registry.record_heartbeat(heartbeat()).is_new
    assert serving(fleet) == {"w"}


def test_only_ready_workers_get_requests(fleet):
    """A known model without a ready worker is 503 with the reason, an unknown one 404 with the names there are."""
    fleet.registry.record_heartbeat(heartbeat(state="loading", phase="loading weights"))
    assert reasons(fleet, "m")
    assert reasons(fleet) == "worker w is loading weights"
    assert fleet.directory.availability("m").told == "it is being loaded"
    fleet.registry.record_heartbeat(heartbeat(state="loading", phase="importing vllm"))
    assert reasons(fleet) == "worker w is loading (importing vllm)"
    assert fleet.directory.availability("other") == Unknown()
    assert set(result_of(fleet.directory.model_steps())) == {"far"}


def test_silence_makes_unhealthy_by_the_clock_alone(fleet, clock):
    """Three missed beats take a worker out; the next one brings it back."""
    fleet.registry.record_heartbeat(heartbeat())
    clock.now += 30
    assert serving(fleet) == {"w"}
    clock.now += 0.1
    assert reasons(fleet, "m")
    assert fleet.table.get("w").state(clock.now) == "unhealthy"
    fleet.registry.record_heartbeat(heartbeat())
    assert serving(fleet) == {"w"}


def test_only_workers_that_get_requests_are_healthy(fleet, clock):
    """`status` sums up every state in one of two words: a follower is as well as its leader, who drains is not."""
    for state in ("starting", "loading", "ready", "following", "draining"):
        fleet.registry.record_heartbeat(heartbeat(state, state=state))
    status = {worker.id: describe(fleet.table, worker)["status"] for worker in fleet.table}
    assert {name for name, word in status.items() if word == "healthy"} == {"ready", "following"}
    assert set(status.values()) == {"healthy", "unhealthy"}
    clock.now += 31
    assert {describe(fleet.table, worker)["status"] for worker in fleet.table} == {"unhealthy"}
    assert describe(fleet.table, fleet.managed.expect("mine", ["m"]))["status"] == "unhealthy"


def test_arguments_have_two_names(fleet):
    """A worker may tell its arguments by either name and has them in both; `args` counts where it tells them twice."""
    said = {"worker_id": "w", "model_name": "m", "host": "127.0.0.1", "port": 1}
    old, new = {"max_model_len": 4096}, {"context_length": 8}
    for more, args in (({"backend_args": old}, old), ({"args": new}, new), ({"backend_args": old, "args": new}, new)):
        fleet.registry.record_heartbeat(parse_heartbeat({**said, **more}))
        described = describe(fleet.table, fleet.table.get("w"))
        assert (described["args"], described["backend_args"]) == (args, args)
    with pytest.raises(ApiError, match="backend_args: must be at most"):
        parse_heartbeat({**said, "backend_args": {"x": "y" * 300_000}})


def test_a_report_corrects_the_load_upwards(fleet):
    """What a worker says it works on counts where it is more than what came through here."""
    fleet.registry.record_heartbeat(heartbeat(progress={"running": 3.0, "waiting": 2.0, "kv_use": None}))
    [endpoint] = endpoints(fleet, "m")
    assert (endpoint.load(1000.0), endpoint.in_flight) == (5, 0)
    endpoint.in_flight = 4
    fleet.registry.record_heartbeat(heartbeat(progress={"running": 3.0, "waiting": 2.0}))
    assert endpoint.load(1000.0) == 5
    assert endpoint.load(1010.0) == 4, "a report counts while it is fresh"
    fleet.registry.record_heartbeat(heartbeat(progress={"running": None}))
    assert endpoint.load(1000.0) == 4


def test_a_worker_says_how_much_it_takes(fleet):
    """Its own bound counts, and the configuration's where it has none."""
    fleet.registry.record_heartbeat(heartbeat())
    [endpoint] = endpoints(fleet, "m")
    assert endpoint.in_flight_max == 5
    fleet.registry.record_heartbeat(heartbeat(max_in_flight=2))
    assert endpoint.in_flight_max == 2


def test_a_worker_that_moved_keeps_its_count(fleet):
    """Another address is another upstream for connections, but the same endpoint with the same requests under way."""
    fleet.registry.record_heartbeat(heartbeat())
    [endpoint] = endpoints(fleet, "m")
    upstream = endpoint.upstream
    endpoint.in_flight = 1
    fleet.registry.record_heartbeat(heartbeat())
    assert endpoint.upstream is upstream
    fleet.registry.record_heartbeat(
        Heartbeat(worker_id="w", model_name="m", host="127.0.0.2", port=1, heartbeat_interval=10)
    )
    assert endpoints(fleet, "m") == [endpoint]
    assert (endpoint.upstream.host, endpoint.in_flight) == ("127.0.0.2", 1)


def test_only_what_was_started_here_is_reached_by_a_unix_socket(fleet):
    """The path is the launcher's: a worker from elsewhere cannot make the gateway talk to a socket of this machine."""
    fleet.managed.expect("mine", ["m"], "/run/mine")
    fleet.registry.record_heartbeat(heartbeat("mine", unix_socket=True))
    fleet.registry.record_heartbeat(heartbeat("other", "n", unix_socket=True))
    assert [(one.upstream.host, one.upstream.port) for one in endpoints(fleet, "m")] == [("/run/mine", 0)]
    assert [(one.upstream.host, one.upstream.port) for one in endpoints(fleet, "n")] == [("127.0.0.1", 1)]


def test_a_beat_wakes_the_queues(fleet):
    """Whenever a worker may have become able to serve, queues are told."""
    told = []
    fleet.table.changed.add(lambda: told.append(1))
    fleet.registry.record_heartbeat(heartbeat(state="loading"))
    fleet.registry.record_heartbeat(heartbeat())
    assert told == [1, 1]
    fleet.table.endpoint_of(fleet.table.get("w")).fail(0.0)
    fleet.registry.record_heartbeat(heartbeat())
    assert told == [1, 1, 1], "it can be reached again"
    fleet.registry.record_heartbeat(heartbeat())
    assert told == [1, 1, 1], "nothing has changed"
    fleet.registry.record_heartbeat(heartbeat(max_in_flight=9))
    fleet.registry.record_heartbeat(heartbeat(max_in_flight=9, pid=7))
    assert told == [1] * 5, "it takes more, and has begun anew"


def test_a_good_bye_removes(fleet):
    """A worker that says good-bye is gone; one that is managed here stays in the list."""
    fleet.registry.record_heartbeat(heartbeat())
    fleet.registry.record_heartbeat(heartbeat(state="gone"))
    assert fleet.table.get("w") is None
    fleet.managed.expect("mine", ["m"])
    fleet.registry.record_heartbeat(heartbeat("mine"))
    fleet.registry.record_heartbeat(heartbeat("mine", state="gone"))
    assert reasons(fleet, "m")


def test_a_managed_worker_is_known_before_its_first_beat(fleet, clock):
    """Its model is not unknown but not ready; a failure is the reason that clients read."""
    worker = fleet.managed.expect("mine", ["m"])
    assert re.search("worker mine is starting", reasons(fleet))
    fleet.table.fail(worker, WorkerEnd("ended with exit code 64", 0.0))
    assert re.search("worker mine ended with exit code 64", reasons(fleet))
    assert describe(fleet.table, worker)["state"] == "failed"


def test_a_worker_that_is_silent_for_long_is_forgotten(fleet, clock):
    """The table does not grow for ever; what is managed here stays."""
    fleet.registry.record_heartbeat(heartbeat("old"))
    fleet.managed.expect("mine", ["m"])
    clock.now += 3601
    fleet.registry.record_heartbeat(heartbeat("new"))
    assert [worker.id for worker in fleet.table] == ["mine", "new"]


def test_an_unreachable_worker_waits_for_its_next_beat(fleet):
    """A connection that failed takes a worker out; a beat brings it back."""
    fleet.registry.record_heartbeat(heartbeat())
    fleet.table.endpoint_of(fleet.table.get("w")).fail(0.0)
    assert re.search("worker w cannot be reached", reasons(fleet))
    fleet.registry.record_heartbeat(heartbeat())
    assert serving(fleet) == {"w"}


def test_every_name_of_a_worker_routes(fleet):
    """A worker may serve under several names."""
    fleet.registry.record_heartbeat(heartbeat(model_names=["m", "alias"]))
    assert serving(fleet, "alias") == {"w"}
    assert set(result_of(fleet.directory.model_steps())) == {"m", "alias", "far"}


@pytest.mark.parametrize(
    "body",
    [
        None, [], 3, "x", {}, {"worker_id": "w"},
        {"worker_id": "", "model_name": "m", "host": "h", "port": 1},
        {"worker_id": "w", "model_name": "m", "host": "h", "port": 99999},
        {"worker_id": "w", "model_name": "m", "host": "h", "port": 1, "state": "dancing"},
        {"worker_id": "w\r\nset-cookie: evil=1", "model_name": "m", "host": "h", "port": 1},
        {"worker_id": "\ud800", "model_name": "m", "host": "h", "port": 1},
        {"worker_id": None, "model_name": "m", "host": "h", "port": 1},
        {"worker_id": "w", "model_name": "m\n", "host": "h", "port": 1},
        {"worker_id": "w", "model_name": "\ud800", "host": "h", "port": 1},
        {"worker_id": "w", "model_name": "m", "host": "h h", "port": 1},
        {"worker_id": "w", "model_name": "m", "host": "a..b", "port": 1},
        {"worker_id": "w", "model_name": "m", "host": "a" * 64, "port": 1},
        {"worker_id": "w", "model_name": "m", "host": "h", "port": 1, "progress": {"running": 1e308}},
        {"worker_id": "w", "model_name": "m", "host": "h", "port": 1, "args": {"a": "x" * 300_000}},
        {"worker_id": "w", "model_name": "m", "host": "h", "port": 1, "model_names": ["m"] * 300},
        {"worker_id": "w", "model_name": "m", "host": "h", "port": 1.0},
        {"worker_id": "w", "model_name": "m", "host": "h", "port": 1, "model_names": "abc"},
        {"worker_id": "w", "model_name": "m", "host": "h", "port": 1, "heartbeat_interval": float("nan")},
        {"worker_id": "w", "model_name": "m", "host": "h", "port": 1, "heartbeat_interval": float("inf")},
        {"worker_id": "w", "model_name": "m", "host": "h", "port": 1, "heartbeat_interval": 0},
        {"worker_id": "w", "model_name": "m", "host": "h", "port": 1, "models": [{"id": "\ud800"}]},
        {"worker_id": "w", "model_name": "m", "host": "h", "port": 1, "models": [{"id": "m", "root": "a\nb"}]},
        {"worker_id": "w", "model_name": "m", "host": "h", "port": 1, "models": ["m"]},
        {"worker_id": "w", "model_name": "m", "host": "h", "port": 1, "group": {"id": "g", "rank": -1, "size": 2}},
        {"worker_id": "w", "model_name": "m", "host": "h", "port": 1, "group": {"id": "g", "rank": 0, "size": 0}},
    ],
)  # fmt: skip
def test_a_body_that_is_no_beat_is_400(body):
    """A body that is not a beat is 400, with what is wrong with it."""
    with pytest.raises(ApiError) as caught:
        parse_heartbeat(body)
    assert caught.value.status == 400


def test_a_beat_from_elsewhere_needs_little():
    """Four keys are enough, and keys of newer versions are ignored."""
    found = parse_heartbeat({"worker_id": "w", "model_name": "m", "host": "h", "port": 1, "colour": "blue"})
    assert found.state == "ready"


def member(rank, state="ready", worker_id=None, pid=1, size=2):
    group = Group("10.0.0.1:29500", rank, size)
    return heartbeat(worker_id or f"node-{rank}", state=state, group=group, pid=pid)


def test_followers_get_no_requests(fleet):
    """A follower is known and well, but the leader of its group answers."""
    fleet.registry.record_heartbeat(member(0))
    fleet.registry.record_heartbeat(member(1, "following"))
    assert serving(fleet) == {"node-0"}
    assert fleet.table.lost("node-0") == []


def test_a_group_without_one_of_its_members_is_broken(fleet, clock):
    """A member that says good-bye takes the others with it, for certain; a new start of all of them is another group."""
    fleet.registry.record_heartbeat(member(0))
    fleet.registry.record_heartbeat(member(1, "following"))
    clock.now += 1
    fleet.registry.record_heartbeat(member(1, "gone"))
    assert [lost.is_certain for lost in fleet.table.lost("node-0")] == [True]
    assert fleet.table.get("node-0").state(clock.now) == "broken"
    assert re.search("worker node-0 lost node-1, which has ended", reasons(fleet))
    clock.now += 1
    fleet.registry.record_heartbeat(member(0, pid=2))
    fleet.registry.record_heartbeat(member(1, "following", pid=2))
    assert fleet.table.lost("node-0") == []
    assert serving(fleet) == {"node-0"}


def test_a_silent_member_is_only_suspected(fleet, clock):
    """The others are told whom to ask, and go on until they have; one that was silent before they came is none of theirs."""
    fleet.registry.record_heartbeat(member(1, "following", "old"))
    clock.now += 31
    fleet.registry.record_heartbeat(member(0))
    fleet.registry.record_heartbeat(member(1, "following"))
    assert fleet.table.lost("node-0") == []
    clock.now += 20
    fleet.registry.record_heartbeat(member(0))
    clock.now += 11
    [lost] = fleet.table.lost("node-0")
    assert (lost.worker_id, lost.port, lost.is_certain) == ("node-1", 1, False)
    assert serving(fleet) == {"node-0"}


def test_a_managed_member_that_fails_is_lost(fleet):
    """What the supervisor sees of a process counts for its group."""
    worker = fleet.managed.expect("node-1", ["m"])
    fleet.registry.record_heartbeat(member(0))
    fleet.registry.record_heartbeat(member(1, "following"))
    fleet.table.fail(worker, WorkerEnd("ended with exit code 70", 0.0))
    assert fleet.table.lost("node-0")[0].why == "ended with exit code 70"


def test_adapters_are_models(fleet):
    """What a beat says of each model is what the list of models has; of several workers, the shortest length holds."""
    models = [ModelCard("m", "/models/m", None, 4096), ModelCard("pirate", "/adapters/p", "m")]
    fleet.registry.record_heartbeat(heartbeat(models=models))
    fleet.registry.record_heartbeat(heartbeat("other", models=[ModelCard("m", "/models/m", None, 2048)]))
    found = {name: model for name, (model, _) in result_of(fleet.directory.model_steps()).items()}
    assert found["m"] == ModelCard("m", "/models/m", None, 2048)
    assert found["pirate"] == models[1]
    assert serving(fleet, "pirate") == {"w"}
    assert serving(fleet, "m") == {"w", "other"}


def test_a_member_that_was_started_again_breaks_the_old_group(fleet, clock):
    """The same id with another start is proof that the one before has ended, however quickly it came back."""
    fleet.registry.record_heartbeat(member(0))
    fleet.registry.record_heartbeat(member(1, "following"))
    clock.now += 2
    fleet.registry.record_heartbeat(member(1, "starting", pid=2))
    assert fleet.table.lost("node-0")[0].why == "was started again"
    assert fleet.table.lost("node-1") == []


def test_a_member_that_ends_right_after_another_came(fleet, clock):
    """It has not beaten since, and is missed all the same; a dead one shows as what it is."""
    fleet.registry.record_heartbeat(member(1, "following"))
    clock.now += 1
    fleet.registry.record_heartbeat(member(0))
    fleet.registry.record_heartbeat(member(1, "gone"))
    assert [lost.worker_id for lost in fleet.table.lost("node-0")] == ["node-1"]
    clock.now += 31
    assert fleet.table.get("node-0").state(clock.now) == "unhealthy"


def test_a_late_goodbye_does_not_break_the_new_group(fleet, clock):
    """The old leader drains while the new follower is there already: its end breaks nothing any more."""
    fleet.registry.record_heartbeat(member(0, worker_id="old"))
    clock.now += 1
    fleet.registry.record_heartbeat(member(0, "draining", worker_id="old"))
    clock.now += 11
    fleet.registry.record_heartbeat(member(1, "loading", worker_id="new"))
    clock.now += 1
    fleet.registry.record_heartbeat(member(0, "draining", worker_id="old"))
    fleet.registry.record_heartbeat(member(0, "gone", worker_id="old"))
    assert fleet.table.lost("new") == []


def test_every_silent_member_is_named(fleet, clock):
    """One that is cut off from the gateway alone does not hide another that is dead."""
    for rank in range(3):
        fleet.registry.record_heartbeat(member(rank, size=3))
    clock.now += 31
    fleet.registry.record_heartbeat(member(0, size=3))
    assert {lost.worker_id for lost in fleet.table.lost("node-0")} == {"node-1", "node-2"}


def test_an_unknown_members_goodbye_breaks_nothing(fleet):
    """Only who was known can be lost."""
    fleet.registry.record_heartbeat(member(0))
    fleet.registry.record_heartbeat(member(1, "gone"))
    assert fleet.table.lost("node-0") == []


def test_a_busy_engine_without_steps_is_wedged(clock):
    """Requests, and a count of steps that stands still: wedged after a while, and well again with the next step."""
    fleet = Fleet({}, clock, max_in_flight=5, wedged_after_s=60)

    def work(steps, running=2.0):
        fleet.registry.record_heartbeat(heartbeat(progress={"running": running, "waiting": 0.0, "steps": steps}))
        return fleet.table.state(fleet.table.get("w"))

    assert work(7.0) == "ready"
    for _ in range(6):
        clock.now += 10
        assert work(7.0) == "ready"
    clock.now += 1
    assert work(7.0) == "wedged"
    assert re.search("worker w has had requests for 61 s and made no step", reasons(fleet))
    assert work(8.0) == "ready"
    clock.now += 25
    assert work(8.0, running=0.0) == "ready", "idle"
    clock.now += 25
    assert work(8.0) == "ready", "it has had requests only since now"
    clock.now += 59
    assert fleet.table.state(fleet.table.get("w")) == "unhealthy", "silence is told from it"


@pytest.mark.parametrize("progress", [{}, {"running": 2.0, "steps": None}, {"running": 2.0, "tokens_out": None}])
def test_an_engine_that_counts_nothing_is_never_wedged(clock, progress):
    """Of an engine that does not say, nothing is concluded."""
    fleet = Fleet({}, clock, max_in_flight=5, wedged_after_s=1)
    for _ in range(3):
        fleet.registry.record_heartbeat(heartbeat(progress=progress))
        clock.now += 5
    assert fleet.table.state(fleet.table.get("w")) == "ready"


def test_a_restored_worker_is_stale_until_it_beats(fleet, clock):
    """Known from before: no requests yet, a reason for clients, and what is remembered of it again."""
    fleet.registry.restore(heartbeat("old"), 20.0)
    fleet.registry.restore(heartbeat("older"), 4000.0)
    assert [worker.id for worker in fleet.table] == ["old"]
    assert re.search("worker old has not been heard of since the gateway was started", reasons(fleet))
    assert [found.worker_id for found, _, _ in fleet.registry.snapshot()] == ["old"]
    fleet.registry.record_heartbeat(heartbeat("old"))
    assert serving(fleet) == {"old"}


def test_a_failure_is_kept_for_a_while(fleet, clock):
    """A good-bye with a reason: shown as failed, its model is known but not ready; another start makes it well."""
    fleet.registry.record_heartbeat(heartbeat())
    fleet.registry.record_heartbeat(heartbeat(state="gone", failure="The engine died: killed"))
    described = describe(fleet.table, fleet.table.get("w"))
    assert (described["state"], described["failure"], described["cause"]) == (
        "failed",
        "has failed",
        "The engine died: killed",
    )
    assert reasons(fleet, "m")
    fleet.registry.record_heartbeat(heartbeat(start_id="another"))
    assert serving(fleet) == {"w"}
    fleet.registry.record_heartbeat(heartbeat(state="gone", start_id="another", failure="The engine died: killed"))
    clock.now += 601
    fleet.registry.record_heartbeat(heartbeat("new"))
    assert [worker.id for worker in fleet.table] == ["new"]
    assert fleet.registry.snapshot() != []


def test_a_worker_that_is_down_says_when_it_is_back(fleet, clock):
    """Restarting: the reason and the seconds; failed: the reason alone; draining goes before what it says itself."""
    worker = fleet.managed.expect("mine", ["m"])
    fleet.table.fail(worker, WorkerEnd("was ended by signal SIGKILL", 0.0, cause="CUDA out of memory."), clock.now + 4)
    assert re.search("mine was ended by signal SIGKILL: CUDA out of memory; it is started again in 4 s", reasons(fleet))
    assert fleet.table.state(worker) == "restarting"
    assert describe(fleet.table, worker)["retry_in_s"] == 4
    fleet.managed.restart(worker)
    assert (fleet.table.state(worker), worker.restarts) == ("starting", 1)
    fleet.registry.record_heartbeat(heartbeat("mine"))
    fleet.managed.drain(worker)
    assert reasons(fleet, "m")
    assert fleet.table.state(worker) == "draining"


def test_a_late_good_bye_of_an_earlier_start_is_not_the_new_ones(fleet):
    """A rolling restart under one id: the old process' last beat comes after the new one's first."""
    fleet.registry.record_heartbeat(heartbeat(start_id="old"))
    fleet.registry.record_heartbeat(heartbeat(start_id="new"))
    fleet.registry.record_heartbeat(heartbeat(state="gone", start_id="old"))
    assert serving(fleet) == {"w"}


def test_arguments_that_are_nested_too_deep_are_refused():
    """What cannot be written down again is not taken."""
    args = {}
    for _ in range(100):
        args = {"deeper": [args]}
    with pytest.raises(ApiError, match="nested too deep"):
        parse_heartbeat({"worker_id": "w", "model_name": "m", "host": "h", "port": 1, "args": args})
    parse_heartbeat(
        {"worker_id": "w", "model_name": "m", "host": "h", "port": 1, "args": {"a": [{"b": [1, {"c": None}]}]}}
    )


@pytest.mark.parametrize(("changed", "looked_at"), [
    ({}, set()),
    ({"circuit_breaker": CircuitBreaker(failures_max=9)}, set()),
    ({"routing": Routing(max_in_flight=7)}, set()),
    ({"timeouts": Timeouts(wedged_after_s=3)}, {"busy"}),
])  # fmt: skip
def test_a_reload_looks_at_no_worker_that_it_cannot_change(fleet, clock, monkeypatch, changed, looked_at):
    """However many there are; what has changed is in force for each of them."""
    seen, refresh = set(), WorkerTable.refresh

    def refreshing(table, worker):
        seen.add(worker.id)
        refresh(table, worker)

    fleet.reconfigure(Config())
    for number in range(20):
        fleet.registry.record_heartbeat(heartbeat(f"w{number}"))
    fleet.registry.record_heartbeat(heartbeat("busy", progress={"running": 1, "steps": 5}))
    monkeypatch.setattr(WorkerTable, "refresh", refreshing)
    config = attrs.evolve(Config(), **changed)
    fleet.reconfigure(config)
    assert seen == looked_at
    for endpoint in endpoints(fleet):
        assert (endpoint.in_flight_max, endpoint.circuit.settings) == (
            config.routing.max_in_flight,
            config.circuit_breaker,
        )
    clock.now += 4
    fleet.registry.record_heartbeat(heartbeat("busy", progress={"running": 1, "steps": 5}))
    assert ("busy" in serving(fleet)) == ("timeouts" not in changed)


@pytest.mark.parametrize(
    ("settings", "beat", "where"),
    [
        ({"on": "here", "gpu_ids": [0, 1]}, True, "here:0,1"),
        ({"on": "here", "gpu_ids": None}, False, "here"),
        ({"on": "ray"}, False, "ray"),
        ({"on": "ray"}, True, "ray:gpu-7:2"),
    ],
)
def test_a_managed_worker_is_shown_with_its_place(fleet, settings, beat, where):
    """Its launcher, its node, and the GPUs that were chosen, or else that it holds memory of."""
    worker = fleet.managed.expect("w", ["m"], None)
    fleet.managed.configure(worker, names=["m"], max_in_flight=None, settings=settings, on_demand=False)
    if beat:
        gpus = [MachineGpu(number, held_bytes=held) for number, held in ((1, 0), (2, 5))]
        fleet.registry.record_heartbeat(heartbeat(machine=Machine("boot", "gpu-7", gpus=gpus)))
    assert describe(fleet.table, worker)["where"] == where


def test_a_worker_that_waits_for_gpus_or_joined_is_shown_with_its_place(fleet):
    """A waiting worker has none yet; a worker that was started elsewhere has the name or the address of its machine."""
    worker = fleet.managed.expect("w", ["m"], None)
    fleet.managed.configure(worker, names=["m"], max_in_flight=None, settings={"on": "ray"}, on_demand=False)
    fleet.managed.lack(worker, "2 GPUs are wanted.")
    assert describe(fleet.table, worker)["where"] == "ray:pending"
    fleet.registry.record_heartbeat(heartbeat("x"))
    assert describe(fleet.table, fleet.table.get("x"))["where"] == "127.0.0.1"
