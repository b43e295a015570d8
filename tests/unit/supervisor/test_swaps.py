"""What goes to make room: each rule by an example, then all of them together on simulated machines."""

import math
import random

import attrs
import pytest

from ichat.preflight.claims import Claims
from ichat.routing.queue import Demand
from ichat.supervisor import swaps
from ichat.supervisor.swaps import PAUSE_S, Decision, SwapAction, SwapSet
from tests.support.swap_simulation import (
    LOAD_S,
    STOP_S,
    Apart,
    Client,
    Machine,
    SimulatedWorker,
    decide,
    evictions_for,
    machine_with,
)

NOW = 1000.0
GPUS = {f"m{number}": [number % 2] for number in range(7)} | {"m7": [0, 1], "m8": [0, 1]}
"""Nine models on two GPUs; two of them need both."""


def one(model, phase="cold", **keys):
    """Return a candidate with room of its own; one that is up was idle for long, or works as long as it has requests."""
    if phase in ("ready", "draining"):
        keys = {"ready_since": NOW - 100, "idle_since": math.inf if keys.get("requests") else NOW - 50} | keys
    return Apart(f"{model}-0", model, phase, **keys)


def together(*workers, port=()):
    """Return these workers with one GPU for all of them, and one port for those named."""
    ids = frozenset(worker.worker_id for worker in workers)
    ports = frozenset(f"{model}-0" for model in port)
    return [
        attrs.evolve(
            worker,
            conflicts=ids - {worker.worker_id},
            port_conflicts=ports - {worker.worker_id} if worker.worker_id in ports else frozenset(),
        )
        for worker in workers
    ]


def decided(workers, sets=(), look_at=math.inf, **since):
    """Return the actions as (kind, model, why), where requests wait for models since so many seconds."""
    demand = {model: Demand(1, NOW - age_s) for model, age_s in since.items()}
    decision = decide(NOW, workers, demand, sets)
    assert decision.look_at == look_at
    return [(action.kind, action.worker_id.partition("-")[0], action.why) for action in decision.actions]


# What is wanted.


def test_a_requested_worker_is_started_woken_or_retried():
    """A cold worker starts, one asleep is woken, one that failed is tried again when its time has come."""
    assert decided([one("a"), one("b"), one("c", "asleep"), one("d", "down", may_start_at=NOW)], a=1, c=1, d=1) == [
        ("start", "a", "request"), ("wake", "c", "request"), ("start", "d", "request"),
    ]  # fmt: skip
    assert decide(NOW, [one("a")], {"a": Demand(0, math.inf)}, ()) == Decision([], math.inf)
    assert decide(NOW, [one("a")], {"a": Demand(3, NOW)}, ()).actions == [SwapAction("start", "a-0", "request")]


@pytest.mark.parametrize("phase", ["starting", "waking", "ready"])
def test_one_worker_of_a_model_is_loaded(phase):
    """A second worker of the model stays cold while one is loaded, or soon will be."""
    second = attrs.evolve(one("a"), worker_id="a-1")
    assert decided([one("a", phase), second], a=1) == []
    assert decided([one("a"), second], a=1) == [("start", "a", "request")]


def test_of_two_workers_the_one_that_costs_least_is_loaded():
    """Free room before room that has to be made, a worker asleep before a cold one, one in use last."""
    [busy, first] = together(one("b", "ready", requests=1), one("a"))
    second = attrs.evolve(first, worker_id="a-1", conflicts=frozenset())
    assert decide(NOW, [busy, first, second], {"a": Demand(1, NOW)}, ()).actions == [
        SwapAction("start", "a-1", "request")
    ]
    asleep = attrs.evolve(second, worker_id="a-2", phase="asleep")
    assert decide(NOW, [busy, first, second, asleep], {"a": Demand(1, NOW)}, ()).actions == [
        SwapAction("wake", "a-2", "request")
    ]
    failed = attrs.evolve(second, worker_id="a-3", phase="down")
    assert decide(NOW, [failed, second], {"a": Demand(1, NOW)}, ()).actions == [SwapAction("start", "a-1", "request")]
    idle = attrs.evolve(one("c", "ready"), conflicts=frozenset({"a-1"}))
    assert decide(NOW, [busy, first, idle, second], {"a": Demand(1, NOW)}, ()).actions == [
        SwapAction("stop", "c-0", "room")
    ]


def test_a_failed_worker_waits_for_its_next_try():
    """It keeps no room from others meanwhile."""
    workers = together(one("a", "down", may_start_at=NOW + 5), one("b"))
    assert decided(workers, look_at=NOW + 5, a=9, b=1) == [("start", "b", "request")]
    assert decided([one("a", "down", may_start_at=math.inf)], a=9) == []
    assert decided([one("a", may_start_at=NOW + 5)], look_at=NOW + 5, a=9) == []


# Room.


def test_an_unused_worker_makes_room_after_a_pause():
    """No requests, no waiters, and PAUSE_S without any: then it goes, however short it was loaded."""
    idle = one("b", "ready", ready_since=NOW - 3, idle_since=NOW - PAUSE_S)
    assert decided(together(one("a"), idle), a=0) == [("stop", "b", "room")]
    soon = attrs.evolve(idle, idle_since=NOW - PAUSE_S + 0.5)
    assert decided(together(one("a"), soon), look_at=NOW + 0.5, a=50) == []


def test_a_worker_in_use_keeps_its_room_for_its_time():
    """Before `min_loaded_s` it stays, then it is drained, and evicted once its last request has ended."""
    busy = one("b", "ready", requests=2, ready_since=NOW - 29)
    assert decided(together(one("a"), busy), look_at=NOW + 1, a=50) == []
    busy = attrs.evolve(busy, ready_since=NOW - 30)
    assert decided(together(one("a"), busy), a=50) == [("drain", "b", "room")]
    draining = attrs.evolve(busy, phase="draining")
    assert decided(together(one("a"), draining), a=50, b=5) == []
    assert decided(together(one("a"), attrs.evolve(draining, requests=0)), a=50, b=5) == [("stop", "b", "room")]


def test_the_older_waiter_is_served_first():
    """A model whose own waiter came before is not drained; two that wait come in the order of their oldest waiters."""
    busy = one("b", "ready", requests=2)
    assert decided(together(one("a"), busy), a=5, b=6) == []
    assert decided(together(one("a"), busy), a=5, b=5) == []
    assert decided(together(one("a"), busy), a=6, b=5) == [("drain", "b", "room")]
    assert decided(together(one("a"), one("b"), one("c")), a=1, b=3, c=2) == [("start", "b", "request")]


@pytest.mark.parametrize("phase", ["starting", "waking", "ending"])
def test_loading_and_ending_workers_are_waited_for(phase):
    """A load goes on even if nobody waits for it any more, and what ends needs no second word."""
    assert decided(together(one("a"), one("b", phase)), a=50) == []


@pytest.mark.parametrize("phase", ["cold", "down"])
def test_a_worker_that_holds_nothing_is_not_evicted(phase):
    assert decided(together(one("a"), one("b", phase)), a=0) == [("start", "a", "request")]


def test_nothing_is_evicted_before_everything_can_go():
    """Otherwise the room of the first would stand empty until the last one's time has come."""
    [_, idle, busy] = together(one("a"), one("b", "ready"), one("c", "ready", requests=1, ready_since=NOW - 10))
    wanted = one("a", conflicts=frozenset({"b-0", "c-0"}))
    assert decided([wanted, idle, busy], look_at=NOW + 20, a=50) == []
    busy = attrs.evolve(busy, ready_since=NOW - 30)
    assert decided([wanted, idle, busy], a=50) == [("stop", "b", "room"), ("drain", "c", "room")]


def test_conflicts_hold_both_ways():
    """It does not matter which of two workers names the other."""
    first, second = one("a"), one("b", "ready", conflicts=frozenset({"a-0"}))
    assert decided([first, second], a=0) == [("stop", "b", "room")]
    assert decided([one("a", conflicts=frozenset({"gone-0"}))], a=0) == [("start", "a", "request")]


def test_shares_of_one_gpu_are_added_up():
    """Of three workers each two fit: the one that was idle for longer goes, the other one stays."""
    workers = [one("a"), one("b", "ready", idle_since=NOW - 60), one("c", "ready", idle_since=NOW - 70)]
    shared = [attrs.evolve(worker, claims=Claims({0: 0.4})) for worker in workers]
    decision = swaps.decide(NOW, shared, {"a": Demand(1, NOW)}, ())
    assert decision.actions == [SwapAction("stop", "c-0", "room")]
    small = [attrs.evolve(worker, claims=Claims({0: 0.3})) for worker in workers]
    assert swaps.decide(NOW, small, {"a": Demand(1, NOW)}, ()).actions == [SwapAction("start", "a-0", "request")]


# Reservations.


def test_room_for_an_older_request_is_kept():
    """A younger one neither starts in its room nor evicts for it, but may use other room."""
    busy = one("b", "ready", requests=1, ready_since=NOW - 10)
    wide = one("a", conflicts=frozenset({"b-0", "c-0"}))
    workers = [wide, busy, one("c"), one("d")]
    assert decided(workers, look_at=NOW + 20, a=9, c=8, d=7) == [("start", "d", "request")]
    assert decided(workers, a=8, c=9, d=7) == [("start", "c", "request"), ("start", "d", "request")]


def test_one_eviction_makes_room_for_two():
    """A worker on two GPUs that goes for the one on the first also goes for the one on the second."""
    wide = one("w", "ready", conflicts=frozenset({"a-0", "b-0"}))
    assert decided([one("a"), one("b"), wide], a=2, b=1) == [("stop", "w", "room")]
    assert decided([one("a"), one("b"), attrs.evolve(wide, phase="cold")], a=2, b=1) == [
        ("start", "a", "request"), ("start", "b", "request"),
    ]  # fmt: skip


def test_a_drain_whose_reason_has_gone_is_taken_back():
    """The other client left, or the room is no longer needed: the worker serves again, and is not evicted."""
    draining = one("b", "draining", requests=1)
    assert decided(together(one("a"), draining), b=1) == [("resume", "b", "room")]
    assert decided(together(one("a"), draining), a=1, b=9) == [("resume", "b", "room")]
    assert decided(together(one("a"), attrs.evolve(draining, requests=0))) == [("resume", "b", "room")]
    assert decided([draining, one("a", "starting", conflicts=frozenset({"b-0"}))], b=9) == [("resume", "b", "room")]


def test_a_drain_is_taken_back_before_a_second_worker_starts():
    """The model has a worker that only has to take requests again."""
    second = attrs.evolve(one("a"), worker_id="a-1")
    assert decided([one("a", "draining", requests=1), second], a=1) == [("resume", "a", "room")]


def test_a_model_that_is_drained_takes_its_turn_after():
    """Its new requests wait; what is younger than they are does not overtake them."""
    workers = together(one("a"), one("b", "draining", requests=1), one("c"))
    assert decided(workers, a=50, b=5, c=4) == []
    workers = together(one("a", "ready", requests=1), one("b"), one("c"))
    assert decided(workers, b=5, c=4) == [("drain", "a", "room")]
    workers = together(one("a", "ending"), one("b"), one("c"))
    assert decided(workers, a=6, b=5, c=4) == []


# Idle workers, and sleep.


@pytest.mark.parametrize("how", ["stop", "sleep"])
def test_an_idle_worker_is_unloaded(how):
    """After `idle_s` without a request, the way its table says; never with a request or a waiter, nor without idle_s."""
    idle = one("a", "ready", idle_s=60, idle_since=NOW - 60, when_idle=how)
    assert decided([idle]) == [(how, "a", "idle")]
    assert decided([attrs.evolve(idle, idle_since=NOW - 59)], look_at=NOW + 1) == []
    assert decided([idle], a=1) == []
    assert decided([attrs.evolve(idle, requests=1, idle_since=math.inf)]) == []
    assert decided([attrs.evolve(idle, idle_s=0)]) == []
    assert decided([attrs.evolve(idle, phase="asleep")]) == []
    assert decided(together(one("b"), idle), b=0) == [(how, "a", "room")]


def test_sleep_is_enough_where_only_the_gpus_are_needed():
    """Not where the port or a place in a swap set is."""
    sleeper = one("b", "ready", when_idle="sleep")
    assert decided(together(one("a"), sleeper), a=0) == [("sleep", "b", "room")]
    assert decided(together(one("a"), sleeper, port="ab"), a=0) == [("stop", "b", "room")]
    both = SwapSet(frozenset("ab"))
    assert decided(together(one("a"), sleeper), [both], a=0) == [("stop", "b", "room")]
    assert decided([one("a"), sleeper], [both], a=0) == [("stop", "b", "room")]


def test_a_sleeping_worker_keeps_its_port_and_its_place():
    """It holds no GPU, and may be stopped at any time, unless an older waiter is about to wake it."""
    asleep = one("b", "asleep")
    assert decided(together(one("a"), asleep), a=0) == [("start", "a", "request")]
    assert decided(together(one("a"), asleep, port="ab"), a=0) == [("stop", "b", "room")]
    both = SwapSet(frozenset("ab"))
    assert decided([one("a"), asleep], [both], a=0) == [("stop", "b", "room")]
    assert decided([one("a"), asleep], [both], a=1, b=2) == [("wake", "b", "request")]
    assert decided([one("a"), asleep], [both], a=2, b=1) == [("stop", "b", "room")]
    assert decided([asleep], [SwapSet(frozenset("b"))], b=2) == [("wake", "b", "request")]


# Swap sets.


def test_a_swap_set_holds_so_many():
    """A full one makes room for a member, and no more than is needed; other models have nothing to do with it."""
    workers = [one("a"), one("b", "ready"), one("c", "ready"), one("x", "ready")]
    assert decided(workers, [SwapSet(frozenset("abc"), 3)], a=0) == [("start", "a", "request")]
    assert decided(workers, [SwapSet(frozenset("abc"), 2)], a=0) == [("stop", "b", "room")]
    assert decided(workers, [SwapSet(frozenset("abc"), 1)], a=0) == [("stop", "b", "room"), ("stop", "c", "room")]
    assert decided(workers, [SwapSet(frozenset("bc"), 1)], a=0) == [("start", "a", "request")]


def test_of_a_swap_set_the_one_that_is_missed_least_goes():
    """One that sleeps, then one that was loaded in vain, then the one that is idle longest, then one in use."""
    workers = [
        one("a"),
        one("busy", "ready", requests=1),
        one("young", "ready", idle_since=NOW - 5),
        one("old", "ready", idle_since=NOW - 9),
        one("unused", "ready", ready_since=NOW - 2, idle_since=NOW - 2),
        one("asleep", "asleep"),
    ]
    for name in ("asleep", "unused", "old", "young"):
        swap_set = SwapSet(frozenset(worker.model for worker in workers), len(workers) - 1)
        assert decided(workers, [swap_set], a=0) == [("stop", name, "room")]
        workers = [worker for worker in workers if worker.model != name]
    swap_set = SwapSet(frozenset({"a", "busy"}))
    assert decided(workers, [swap_set], a=0) == [("drain", "busy", "room")]
    workers = [one("a"), one("missed", "ready", requests=1), one("busy", "ready", requests=9)]
    swap_set = SwapSet(frozenset({"a", "missed", "busy"}), 2)
    assert decided(workers, [swap_set], a=5, missed=1) == [("drain", "busy", "room")]


def test_of_a_swap_set_those_that_go_anyway_go_first():
    """One that is ending, one whose GPU is needed too, one that is being drained: no second one goes."""
    two = SwapSet(frozenset("abc"), 2)
    assert decided([one("a"), one("b", "ready"), one("c", "ending")], [two], a=0) == []
    [first, third] = together(one("a"), one("c", "ready", requests=1))
    assert decided([first, one("b", "ready"), third], [two], a=0) == [("drain", "c", "room")]
    workers = [one("a"), one("b", "ready", requests=1), one("c", "draining", requests=1)]
    assert decided(workers, [two], a=0) == []


def test_the_places_of_a_swap_set_are_reserved_too():
    """What an older waiter gets counts for those who come after."""
    sets = [SwapSet(frozenset("abc"), 2)]
    assert decided([one("a"), one("b"), one("c")], sets, a=3, b=2, c=1) == [
        ("start", "a", "request"), ("start", "b", "request"),
    ]  # fmt: skip
    busy = one("c", "ready", requests=1, ready_since=NOW - 10)
    assert decided([one("a"), one("b"), busy], sets, look_at=NOW + 20, a=3, b=2) == [("start", "a", "request")]


# What explain shows.


def test_a_preview_lists_what_a_load_would_evict():
    """The plan of a request that came now: nothing is done, and what is older goes first."""
    workers = together(one("a"), one("b", "ready", requests=1), one("c"))
    plan = evictions_for("a", NOW, workers, {}, ())
    assert plan.worker.worker_id == "a-0"
    assert [worker.worker_id for worker in plan.evicts] == ["b-0"]
    assert (plan.waits_for, plan.at, plan.older) == (["b-0"], NOW - 70, [])
    plan = evictions_for("a", NOW, workers, {"c": Demand(1, NOW - 1)}, ())
    assert (plan.waits_for, plan.at, plan.older) == (["c-0", "b-0"], math.inf, ["c-0"])
    plan = evictions_for("a", NOW, together(one("a"), one("b", "ready")), {"a": Demand(2, NOW - 9)}, ())
    assert plan.waits_for == []
    assert evictions_for("b", NOW, workers, {}, ()) is None
    assert evictions_for("unknown", NOW, workers, {}, ()) is None
    assert evictions_for("a", NOW, [one("a", "down", may_start_at=NOW + 1)], {}, ()) is None
    assert evictions_for("a", NOW, [one("a", "ending")], {}, ()).waits_for == ["a-0"]


# All of it together, in virtual time.


def run(machine, clients, until=math.inf, starts_within_s=0.0, rng=random):
    for client in clients:
        machine.at(rng.uniform(0, starts_within_s), client.go_on)
    machine.run(until)
    return clients


def test_twenty_first_requests_plan_one_start():
    machine = machine_with({"a": [0]})
    clients = run(machine, [Client(machine, ["a"]) for _ in range(20)])
    assert machine.count("start") == 1
    assert [client.answered for client in clients] == [1] * 20
    assert {one.wait_s for one in machine.waited} == {LOAD_S}


def test_clients_that_alternate_are_served_together():
    """4 clients x 40 requests, in turn for two models that cannot stand side by side: about one load for four of them."""
    machine = machine_with({"a": [0], "b": [0]})
    clients = run(machine, [Client(machine, ["ab", "ba"][number % 2] * 20) for number in range(4)])
    assert [client.answered for client in clients] == [40] * 4
    assert machine.count("start") <= 45
    assert machine.count("drain") == 0


def test_two_steady_clients_do_not_thrash():
    """Each model stays for its time: no more swaps than `min_loaded_s` allows, and about as many requests for each."""
    machine = machine_with({"a": [0], "b": [0]}, min_loaded_s=30.0)
    first, second = run(machine, [Client(machine, name * 10_000) for name in "ab"], until=1000.0)
    assert 20 <= machine.count("start") - 1 <= 1000 / 30
    assert 0.9 < first.answered / second.answered < 1.1


def test_a_drain_ends_when_the_client_that_wanted_the_room_leaves():
    """The worker serves on, those who came meanwhile are answered at once, and nothing is loaded again."""
    machine = machine_with({"a": [0], "b": [0]})
    answers = []
    machine.ask("a", answers.append, 100.0)
    machine.at(50.0, lambda: machine.at(60.0, machine.leave, machine.ask("b")))
    machine.at(55.0, machine.ask, "a", answers.append)
    machine.run()
    assert [kind for _, kind, _, _ in machine.log] == ["start", "drain", "resume"]
    assert answers == [True, True]
    assert [waited.wait_s for waited in machine.waited] == [LOAD_S, 5.0]


def test_a_load_without_waiting_requests_goes_on():
    """The next request for it finds it ready; one for another model takes its room after the pause."""
    machine = machine_with({"a": [0], "b": [0]})
    machine.at(1.0, machine.leave, machine.ask("a"))
    machine.at(2.0, machine.ask, "b")
    machine.run()
    assert [(time, kind, worker) for time, kind, worker, _ in machine.log] == [
        (0.0, "start", "a-0"), (LOAD_S + PAUSE_S, "stop", "a-0"), (LOAD_S + PAUSE_S + STOP_S, "start", "b-0"),
    ]  # fmt: skip


@pytest.mark.parametrize("loaded_max", [1, 2])
@pytest.mark.parametrize("how", ["stop", "sleep"])
def test_swap_sets_hold_under_load(loaded_max, how):
    """So many of the set at a time, checked at each step; models outside it are never evicted."""
    names = "abcdx"
    sets = [SwapSet(frozenset("abcd"), loaded_max)]
    machine = machine_with({name: [number] for number, name in enumerate(names)}, sets, when_idle=how)
    rng = random.Random(loaded_max)
    clients = run(machine, [Client(machine, rng.choices(names, k=50), lambda: rng.expovariate(1)) for _ in range(5)])
    assert [client.answered for client in clients] == [50] * 5
    assert machine.count("sleep") == 0
    assert [kind for _, kind, worker, _ in machine.log if worker == "x-0"] == ["start"]


def test_workers_that_sleep_wake_instead_of_starting():
    """Each is started once; then they take turns asleep, and one that wants the other's port stops it."""
    machine = machine_with({"a": [0], "b": [0]}, when_idle="sleep")
    (client,) = run(machine, [Client(machine, "ab" * 50)])
    assert client.answered == 100
    assert (machine.count("start"), machine.count("wake"), machine.count("stop")) == (2, 98, 0)
    ids = frozenset(("a-0", "b-0"))
    machine = Machine(
        [
            SimulatedWorker(f"{name}-0", name, ids - {f"{name}-0"}, ids - {f"{name}-0"}, when_idle="sleep")
            for name in "ab"
        ]
    )
    (client,) = run(machine, [Client(machine, "ab" * 5)])
    assert client.answered == 10
    assert (machine.count("start"), machine.count("sleep")) == (10, 0)


def test_loads_that_fail_are_tried_again_later():
    """Who waits is refused at once, the room is others' meanwhile, and after enough failures it is left alone."""
    machine = machine_with({"a": [0], "b": [0]})
    machine.workers["a-0"].failures_left = 2
    first, second = run(machine, [Client(machine, "a" * 8, lambda: 3.0), Client(machine, "b" * 8, lambda: 3.0)])
    assert (first.answered, first.refused, second.answered) == (6, 2, 8)
    starts = [time for time, kind, worker, _ in machine.log if kind == "start" and worker == "a-0"]
    assert len(starts) >= 3
    machine = machine_with({"a": [0]})
    machine.workers["a-0"].failures_left = 100
    (client,) = run(machine, [Client(machine, "a" * 8, lambda: 100.0)])
    assert (client.answered, client.refused, machine.count("start")) == (0, 5, 5)


@pytest.mark.parametrize("seed", range(10))
def test_nine_models_on_two_gpus_wait_no_longer_than_they_must(seed):
    """Each model that was wanted before has at most one turn: its time, the longest request, an end and a load."""
    rng = random.Random(seed)
    min_loaded_s, longest_s = rng.choice([0.0, 5.0, 30.0]), rng.choice([0.2, 3.0, 20.0])
    machine = machine_with(GPUS, min_loaded_s=min_loaded_s)
    clients = [
        Client(
            machine, rng.choices(list(GPUS), k=20), lambda: rng.expovariate(0.2), lambda: rng.uniform(0.1, longest_s)
        )
        for _ in range(12)
    ]
    run(machine, clients, starts_within_s=10.0, rng=rng)
    assert [client.answered for client in clients] == [20] * 12
    turn_s = min_loaded_s + PAUSE_S + longest_s + STOP_S + LOAD_S
    late = [one for one in machine.waited if one.wait_s > (one.older + 1) * turn_s + LOAD_S]
    assert not late


@pytest.mark.parametrize("seeds", range(20))
def test_no_demand_comes_to_a_deadlock(seeds):
    """Whatever the machine, the sets, the failures and the clients that leave: all who stay are answered or refused."""
    for seed in range(10 * seeds, 10 * seeds + 10):
        machine, clients = busy_machine(random.Random(seed))
        run(machine, clients)
        assert [client.answered + client.refused for client in clients] == [8] * len(clients), seed
        assert not any(machine.waiting.values()), seed
        assert machine.has_failed or not any(client.refused for client in clients), seed


def busy_machine(rng):
    """Return any machine, with clients that ask for its models; some more ask once and may leave before the answer."""
    machine = random_machine(rng)
    models = list(machine.waiting)
    clients = [
        Client(machine, rng.choices(models, k=8), lambda: rng.choice([0.0, 0.5, 5.0, 40.0]))
        for _ in range(rng.randint(1, 8))
    ]
    for _ in range(rng.randint(0, 10)):
        machine.at(rng.uniform(0, 100), machine.ask_for, rng.choice(models), rng.uniform(0, 60))
    return machine, clients


def random_machine(rng):
    """Return some models with one or two workers each, on up to three GPUs, with swap sets over them."""
    models = [f"m{number}" for number in range(rng.randint(1, 7))]
    needs = {
        f"{model}-{number}": set(rng.choices(range(3), k=rng.randint(0, 2)))
        for model in models
        for number in range(rng.randint(1, 2))
    }
    ports = {worker_id: rng.choice([0, 0, 0, 1, 2]) for worker_id in needs}
    workers = []
    for worker_id, gpus in needs.items():
        others = [other for other in needs if other != worker_id]
        port = frozenset(other for other in others if ports[worker_id] and ports[other] == ports[worker_id])
        workers.append(
            SimulatedWorker(
                worker_id,
                worker_id.partition("-")[0],
                conflicts=port | {other for other in others if needs[other] & gpus},
                port_conflicts=port,
                idle_s=rng.choice([0.0, 0.0, 3.0]),
                min_loaded_s=rng.choice([0.0, 10.0, 30.0]),
                when_idle=rng.choice(["stop", "sleep"]),
                failures_left=rng.choice([0, 0, 0, 1, 3]),
            )
        )
    sets = [
        SwapSet(frozenset(rng.sample(models, rng.randint(1, len(models)))), rng.randint(1, 3))
        for _ in range(rng.randint(0, 2))
    ]
    return Machine(workers, sets)
