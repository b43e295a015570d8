"""Models that are loaded once somebody asks for them: who waits, for whom, and who is refused. No event loop."""

import functools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ichat.config.schema import Config, Routing, Timeouts
from ichat.fleet.fleet import Fleet
from ichat.fleet.model_directory import UNANSWERED
from ichat.fleet.responses import ResponseMissing, holder_of
from ichat.fleet.views import describe, result_of
from ichat.fleet.worker_facts import WorkerEnd
from ichat.protocol.messages import Heartbeat, ModelCard, response_tag
from ichat.routing.availability import Full, Loadable, NotReady, Ready, Unknown
from ichat.routing.balancer import Balancer
from ichat.routing.prefix_chain import PrefixChain
from ichat.routing.queue import Demand, Waiter
from ichat.routing.request import Lease, RoutingRequest

M = RoutingRequest("m")
FAILED = WorkerEnd("was ended by signal SIGKILL", 0.0, cause="The GPU has no memory left")


class Site:
    """A fleet with a balancer, as a gateway has them."""

    def __init__(self, policy="least_loaded", queue_max=100, restart_wait_s=0):
        self.now = 1000.0
        self.fleet = Fleet({}, lambda: self.now, max_in_flight=4)
        self.fleet.reconfigure(
            Config(routing=Routing(max_in_flight=4), timeouts=Timeouts(restart_wait_s=restart_wait_s))
        )
        self.balancer = Balancer(
            self.fleet.directory.availability, lambda: self.now, Routing(policy=policy, queue_max=queue_max)
        )
        self.fleet.table.changed.add(self.balancer.dispatch_waiting)
        self.wanted = []
        self.balancer.wanted.add(self.wanted.append)

    def add(self, worker_id="w", *, on_demand=True):
        """Add a managed worker of the model m; one loaded on demand is cold."""
        worker = self.fleet.managed.expect(worker_id, ["m"])
        settings = {"model_path": "/models/m", "backend": "fake"}
        self.fleet.managed.configure(worker, names=["m"], max_in_flight=None, settings=settings, on_demand=on_demand)
        if on_demand:
            self.fleet.managed.cool(worker)
        return worker

    def tell(self, state="ready", worker_id="w", **more):
        """Have a worker send a heartbeat."""
        self.fleet.registry.record_heartbeat(
            Heartbeat(worker_id, "m", "127.0.0.1", 1, state=state, heartbeat_interval=1e3, **more)
        )

    def found(self, model="m"):
        return self.fleet.directory.availability(model)

    def wait(self, request=M):
        """Have a request wait as an exchange does, and return its waiter."""
        lease = self.balancer.lease(request)
        assert isinstance(lease, Loadable | Full), lease
        self.now += 1
        waiter = self.balancer.wait(request, lambda: None)
        assert isinstance(waiter, Waiter), waiter
        return waiter


@pytest.fixture
def site():
    return Site()


def test_a_request_for_a_cold_model_waits(site):
    """It is no error, whoever loads models is told, and knows how many wait and since when."""
    site.add()
    assert site.found() == Loadable("worker w is cold", None, doing="about to start")
    assert site.balancer.demand("m") == Demand(0, math.inf)
    waiters = [site.wait(RoutingRequest("m", fairness_key=str(number % 2))) for number in range(4)]
    assert site.wanted == ["m"] * 4
    assert site.balancer.demand("m") == site.balancer.demand("other", "m") == Demand(4, 1001.0)
    site.balancer.withdraw(waiters[0])
    assert site.balancer.demand("m") == Demand(3, 1002.0)


def test_a_load_from_cold_to_ready(site):
    """In every state on the way requests wait; the heartbeat that says ready serves all for whom there is room."""
    worker = site.add()
    waiters = [site.wait() for _ in range(5)]
    site.fleet.managed.expect_ready(worker, 1030.0)
    site.fleet.managed.restart(worker)
    assert worker.restarts == 0, "the first start of a worker is no restart"
    assert site.found() == Loadable("worker w is starting", 1030.0, doing="starting")
    site.tell("loading", phase="loading weights")
    assert site.found() == Loadable("worker w is loading weights", 1030.0, doing="loading weights")
    assert not any(waiter.lease for waiter in waiters)
    site.tell("ready")
    assert isinstance(site.found(), Ready)
    assert [waiter.lease is not None for waiter in waiters] == [True] * 4 + [False]
    assert site.balancer.demand("m") == Demand(1, 1005.0)
    waiters[0].lease.release()
    assert waiters[4].lease is not None


def test_keys_take_turns_once_the_model_is_loaded(site):
    """Who has sent many requests while it was cold is not served before who has sent one."""
    worker, served = site.add(), []
    site.fleet.managed.configure(worker, names=["m"], max_in_flight=1, settings={}, on_demand=True)
    waiters = {}
    for name in ("greedy-1", "greedy-2", "greedy-3", "modest-1", "modest-2"):
        waiters[name] = site.wait(RoutingRequest("m", fairness_key=name[:6]))
    site.fleet.managed.restart(worker)
    site.tell()
    while waiters:
        [name] = [name for name, waiter in waiters.items() if waiter.lease is not None]
        served.append(name)
        waiters.pop(name).lease.release()
    assert served == ["greedy-1", "modest-1", "greedy-2", "modest-2", "greedy-3"]


@pytest.mark.parametrize("state", ["asleep", "waking", "draining", "starting", "loading"])
def test_a_worker_that_can_be_made_ready_is_waited_for(site, state):
    """It sleeps or wakes, or is drained for another one; a worker that is not loaded on demand is as it ever was."""
    site.add()
    site.fleet.managed.restart(site.fleet.table.get("w"))
    site.tell(state)
    doing = "about to start again" if state == "draining" else state
    assert site.found() == Loadable(f"worker w is {state}", None, doing=doing)
    other = Site()
    other.add(on_demand=False)
    other.tell(state)
    assert other.found() == NotReady(f"worker w is {state}", 5)


def test_a_drain_can_be_taken_back(site):
    """While a worker is drained, requests for it wait; when it need not go after all, they are served."""
    worker = site.add()
    site.fleet.managed.restart(worker)
    site.tell()
    site.fleet.managed.drain(worker)
    waiter = site.wait()
    assert site.wanted == ["m"]
    site.fleet.managed.resume(worker)
    assert waiter.lease is not None


def test_a_failed_load_refuses_its_waiting_requests(site):
    """Each with the cause, and the time of the next try; from then on the next one who asks waits again."""
    worker = site.add()
    waiters = [site.wait() for _ in range(20)]
    site.fleet.managed.restart(worker)
    site.fleet.managed.expect_ready(worker, site.now + 30)
    site.fleet.table.fail(worker, FAILED, site.now + 7.5)
    assert not site.balancer.waiting
    why = "worker w was ended by signal SIGKILL: The GPU has no memory left; it can be asked for again in 8 s"
    refusal = NotReady(why, 8, is_final=True)
    assert site.found() == refusal
    assert [site.balancer.why_no_lease(waiter) for waiter in waiters] == [refusal] * 20
    assert site.balancer.lease(M) == refusal
    site.now += 7.5
    assert isinstance(site.found(), Loadable)
    assert site.found().ready_at is None
    site.wanted.clear()
    site.wait()
    assert site.wanted == ["m"]


def test_a_worker_that_failed_for_good_is_not_waited_for(site):
    """Its requests are refused until somebody changes something."""
    worker = site.add()
    waiter = site.wait()
    site.fleet.managed.restart(worker)
    site.fleet.table.fail(worker, FAILED)
    refusal = NotReady("worker w was ended by signal SIGKILL: The GPU has no memory left", 5, is_final=True)
    assert site.balancer.why_no_lease(waiter) == site.balancer.lease(M) == refusal
    site.now += 1e6
    assert site.found() == refusal


def test_another_worker_of_the_model_is_waited_for(site):
    """The failure of one is not that of the model: a second one may be loaded, or is about to come by itself."""
    site.add("a")
    b = site.add("b")
    waiter = site.wait()
    site.fleet.managed.restart(b)
    site.fleet.table.fail(b, FAILED)
    assert isinstance(site.found(), Loadable)
    assert site.balancer.demand("m").waiting == 1
    site.fleet.table.remove(site.fleet.table.get("a"))
    assert isinstance(site.balancer.why_no_lease(waiter), NotReady)
    other = Site()
    one = other.add("a")
    other.add("b", on_demand=False)
    waiter = other.wait()
    other.fleet.table.fail(one, FAILED)
    assert isinstance(other.found(), NotReady)
    assert not other.found().is_final
    assert other.balancer.demand("m").waiting == 1
    other.tell("ready", "b")
    assert waiter.lease is not None


def test_a_wait_for_a_removed_worker_is_refused(site):
    """Nothing will come of it; who waits in the queue of another model may see its worker come again."""
    worker = site.add()
    waiter = site.wait()
    site.fleet.table.remove(worker)
    assert site.found() == site.balancer.why_no_lease(waiter) == Unknown()
    assert not site.balancer.waiting


def test_the_reason_is_that_of_the_moment(site):
    """What a waiter is told is why it was refused, whatever has become of the model until it looks."""
    worker = site.add()
    waiter = site.wait()
    site.fleet.table.fail(worker, FAILED, site.now + 5)
    site.fleet.managed.cool(worker)
    assert isinstance(site.balancer.why_no_lease(waiter), NotReady)


def test_an_expected_time_ends_with_its_load(site):
    """The time at which a worker will be ready is that of one load: the next one has another."""
    worker = site.add()
    site.fleet.managed.expect_ready(worker, 1010.0)
    assert site.found().rest_s(1000.5) == 10
    assert site.found().rest_s(1020.0) == 1
    site.fleet.managed.cool(worker)
    assert site.found().ready_at is None
    assert site.found().rest_s(1000.0) is None


def test_a_response_is_lost_with_the_process_that_kept_it(site):
    """After its worker went cold nobody has it, also not the next process; a worker that sleeps still has it."""
    worker = site.add()
    site.fleet.managed.restart(worker)
    site.tell(start_id="1")
    kept = f"resp_{response_tag('w', '1')}_{'0' * 32}"
    site.tell("asleep", start_id="1")
    assert holder_of(site.fleet.table, kept) is worker
    site.fleet.managed.cool(worker)
    assert isinstance(holder_of(site.fleet.table, kept), ResponseMissing)
    site.fleet.managed.restart(worker)
    assert isinstance(holder_of(site.fleet.table, kept), ResponseMissing)


def test_a_cold_model_is_listed_as_it_was_seen_last(site):
    """Before its first load by what is configured, then by what its process said; a failed one is not listed."""
    worker = site.add()
    assert result_of(site.fleet.directory.model_steps()) == {"m": (ModelCard("m", "/models/m"), "fake")}
    assert site.fleet.directory.is_loaded("m") is False
    site.fleet.managed.restart(worker)
    cards = [ModelCard("m", "/m", max_model_len=64), ModelCard("adapter", "/a", "m")]
    site.tell(models=cards, backend="fake")
    listed = {card.id: (card, "fake") for card in cards}
    assert result_of(site.fleet.directory.model_steps()) == listed
    assert site.fleet.directory.is_loaded("adapter") is True
    site.fleet.managed.cool(worker)
    assert result_of(site.fleet.directory.model_steps()) == listed
    assert site.fleet.directory.is_loaded("adapter") is False
    assert isinstance(site.found("adapter"), Loadable)
    site.fleet.table.fail(worker, FAILED)
    assert result_of(site.fleet.directory.model_steps()) == {}
    assert site.fleet.directory.is_loaded("other") is None


def test_adapters_are_known_while_their_model_is_loaded_again_and_ends(site):
    """The engine names them only while it is ready; who asks for one waits for the load, and is not told 404."""
    worker = site.add()
    cards = [ModelCard("m", "/m"), ModelCard("adapter", "/a", "m")]
    site.fleet.managed.restart(worker)
    site.tell(models=cards)
    site.tell("draining")
    site.fleet.managed.cool(worker)
    assert isinstance(site.found("adapter"), Loadable)
    site.fleet.managed.configure(worker, names=["m"], max_in_flight=None, settings={}, on_demand=True)
    site.wait(RoutingRequest("adapter"))
    site.fleet.managed.restart(worker)
    site.tell("loading")
    assert isinstance(site.found("adapter"), Loadable)
    assert site.balancer.demand("adapter").waiting == 1
    site.tell(models=cards[:1])
    assert isinstance(site.found("adapter"), Unknown)


def test_a_model_without_workers_loaded_on_demand_is_neither_loaded_nor_not(site):
    """Only models that may not be loaded are said to be."""
    site.add(on_demand=False)
    site.tell()
    assert site.fleet.directory.is_loaded("m") is None


def test_a_queue_of_a_cold_model_is_bounded(site):
    """It is the model's queue, with the same bound."""
    site = Site(queue_max=2)
    site.add()
    for _ in range(2):
        site.wait()
    assert isinstance(site.balancer.lease(M), Loadable)
    assert site.balancer.wait(M, lambda: None) == Full(2)


def test_the_first_prefix_is_noted_where_there_are_several_workers():
    """What a worker gets first after its load, it has when the other one is there too."""
    site = Site("prefix_aware")
    site.add("a")
    chain, asked = PrefixChain(1024, [b"12345678"]), RoutingRequest("m")
    for expected in (None, chain):
        asked.make_prefix = lambda: chain
        assert isinstance(site.balancer.lease(asked), Loadable)
        assert (asked.prefix, asked.make_prefix) == (expected, None)
        site.add("b")


def test_a_prefix_is_made_only_where_the_choice_depends_on_it():
    """The function holds the body, so the balancer forgets it in every case."""
    for policy in ("prefix_aware", "least_loaded"):
        site, made = Site(policy), []
        for name in ("a", "b"):
            site.add(name)
        asked = RoutingRequest("m")
        asked.make_prefix = lambda made=made: made.append(1)
        site.balancer.rehearse(asked)
        assert (made, asked.make_prefix) == ([1] if policy == "prefix_aware" else [], None)


def test_requests_of_other_models_pay_nothing_for_those_that_wait(site):
    """The end of a request at one worker is no reason to look at models that have to be loaded first."""
    site.add()
    site.fleet.registry.record_heartbeat(Heartbeat("x", "x", "127.0.0.1", 1, heartbeat_interval=1e3))
    asked, find = [], site.balancer._find
    site.balancer._find = lambda model: asked.append(model) or find(model)
    waiter = site.wait()
    asked.clear()
    site.balancer.lease(RoutingRequest("x")).release()
    assert asked == ["x"]
    site.fleet.managed.restart(site.fleet.table.get("w"))
    site.tell()
    assert waiter.lease is not None


def test_a_session_goes_to_the_worker_that_is_loaded(site):
    """A session has its home among those that are ready, as ever."""
    site.add("a")
    b = site.add("b")
    waiter = site.wait(RoutingRequest("m", b"session"))
    site.fleet.managed.restart(b)
    site.tell("ready", "b")
    assert waiter.lease.endpoint.id == b"b"
    assert isinstance(site.balancer.lease(RoutingRequest("m", b"session")), Lease)


def test_an_attempt_that_failed_waits_for_no_load(site):
    """Another attempt is for those that are ready: a model that has to be loaded first is no alternative."""
    site.add("a")
    site.fleet.managed.restart(site.add("b"))
    site.tell("ready", "b")
    lease = site.balancer.lease(M)
    assert not site.balancer.has_alternative(RoutingRequest("m", excluded=(lease.endpoint,)))
    site.fleet.managed.cool(site.fleet.table.get("b"))
    assert not site.balancer.has_alternative(RoutingRequest("m", excluded=(lease.endpoint,)))


_STEPS = st.one_of(
    st.sampled_from(["wait", "wait", "wait", "restart", "ready", "asleep", "drain", "resume", "cool", "fail", "later"]),
    st.tuples(st.sampled_from(["leave", "release"]), st.integers(0, 9)),
)


@given(st.lists(_STEPS, max_size=60))
def test_every_waiting_request_is_answered_exactly_once(steps):
    """Whatever becomes of the worker: who waits is told once, all are served while there is room, none after a failure."""
    site = Site()
    worker, waiting, leases = site.add(), [], []
    for step in steps:
        match step:
            case "wait":
                lease = site.balancer.lease(M)
                if isinstance(lease, Lease):
                    leases.append(lease)
                elif isinstance(lease, Loadable | Full):
                    calls = []
                    waiting.append((site.balancer.wait(M, functools.partial(calls.append, 1)), calls))
            case "restart" if not worker.is_down or site.now >= worker.retry_at:
                site.fleet.managed.restart(worker)
            case "ready" | "asleep" if not worker.is_down and not worker.is_cold:
                site.tell(step)
            case "drain":
                site.fleet.managed.drain(worker)
            case "resume":
                site.fleet.managed.resume(worker)
            case "cool":
                site.fleet.managed.cool(worker)
            case "fail":
                site.fleet.table.fail(worker, FAILED, site.now + 5)
            case "later":
                site.now += 5
            case ("leave", number) if waiting:
                waiter, _ = waiting.pop(number % len(waiting))
                site.balancer.withdraw(waiter)
            case ("release", number) if leases:
                leases.pop(number % len(leases)).release()
        for waiter, calls in list(waiting):
            assert len(calls) == ((waiter.lease or waiter.refusal) is not None)
            if calls:
                waiting.remove((waiter, calls))
                leases += [waiter.lease] if waiter.lease else []
        assert site.balancer.demand("m").waiting == len(waiting)
        found, endpoint = site.found(), site.fleet.table.endpoint_of(worker)
        assert not (waiting and isinstance(found, NotReady))
        assert not (waiting and isinstance(found, Ready) and endpoint.in_flight < endpoint.in_flight_max)
        assert (endpoint.in_flight if endpoint else 0) == len(leases)


def test_a_worker_that_is_started_again_is_waited_for():
    """From its end until it is ready, with the time that its last load took; whoever loads models has nothing to do."""
    site = Site(restart_wait_s=60)
    worker = site.add(on_demand=False)
    first = site.wait()
    assert site.found() == Loadable("worker w is starting", None, is_coming=True, doing="starting")
    site.tell("loading", phase="importing vllm")
    assert site.found().doing == "importing vllm"
    site.now = 1020.0
    site.tell()
    assert (first.lease is not None, worker.last_load.seconds) == (True, 19.0)
    site.fleet.table.fail(worker, FAILED, site.now + 5)
    found = site.found()
    assert (found.is_coming, found.ready_at, found.doing) == (True, 1044.0, "about to start again")
    second = site.wait()
    site.now = 1025.0
    site.fleet.managed.restart(worker)
    assert site.found().ready_at == 1044.0
    site.tell("loading")
    assert second.lease is None
    site.tell()
    assert second.lease is not None
    assert not site.balancer.waiting


def test_a_failed_start_refuses_its_waiting_requests():
    """At once and with the cause, until it is started again; a worker that has failed for good is not waited for."""
    site = Site(restart_wait_s=60)
    worker = site.add(on_demand=False)
    waiters = [site.wait() for _ in range(5)]
    site.fleet.table.fail(worker, FAILED, site.now + 5)
    assert not site.balancer.waiting
    refusals = [site.balancer.why_no_lease(waiter) for waiter in waiters]
    assert all(isinstance(one, NotReady) and "no memory left" in one.reasons for one in refusals), refusals
    assert isinstance(site.found(), NotReady)
    site.fleet.managed.restart(worker)
    site.wait()
    site.tell()
    site.fleet.table.fail(worker, FAILED)
    assert site.found().is_final


@pytest.mark.parametrize("on_demand", [False, True])
def test_a_start_whose_cluster_does_not_answer_refuses_its_waiting_requests(on_demand):
    """At once, until its cluster answers again; where another worker is on its way, they wait for that."""
    site = Site(restart_wait_s=60)
    worker = site.add(on_demand=on_demand)
    site.fleet.managed.restart(worker)
    waiter = site.wait()
    site.fleet.managed.lack(worker, "Ray does not answer.", is_unanswered=True)
    refusal = site.balancer.why_no_lease(waiter)
    assert (refusal.told, refusal.reasons) == (UNANSWERED, "worker w waits for GPUs: Ray does not answer")
    assert not site.balancer.waiting
    assert site.found() == refusal
    site.fleet.managed.restart(site.add("v", on_demand=on_demand))
    assert site.wait().refusal is None
    site.fleet.managed.lack(worker, "")
    assert isinstance(site.found(), Loadable)


@pytest.mark.parametrize(("restart_wait_s", "expected"), [(0, NotReady), (19, NotReady), (20, Loadable)])
def test_a_restart_that_takes_too_long_is_not_waited_for(restart_wait_s, expected):
    """A restart that takes longer than a request may wait for it is told at once, with the time that is left."""
    site = Site(restart_wait_s=restart_wait_s)
    worker = site.add(on_demand=False)
    site.tell("loading")
    site.now += 20
    site.tell()
    site.fleet.table.fail(worker, FAILED, site.now)
    site.fleet.managed.restart(worker)
    found = site.found()
    assert isinstance(found, expected)
    if restart_wait_s == 19:
        assert (found.retry_after_s, found.limit) == (20, "timeouts.restart_wait_s")
        site.now += 2
        assert isinstance(site.found(), Loadable), "it comes soon enough now"


@pytest.mark.parametrize(("returns", "expected"), [(True, Loadable), (False, NotReady)])
def test_a_drain_before_a_restart_is_waited_for(returns, expected):
    """One before a removal is not: nothing comes after it."""
    site = Site(restart_wait_s=60)
    worker = site.add(on_demand=False)
    site.tell()
    site.fleet.managed.drain(worker, returns=returns)
    assert isinstance(site.found(), expected)
    assert describe(site.fleet.table, worker)["coming"] == returns


def test_a_registered_worker_that_loads_is_waited_for():
    """Whoever started it: its heartbeats say that it is on its way. One that is silent is not."""
    site = Site(restart_wait_s=60)
    site.tell("loading")
    waiter = site.wait()
    site.tell()
    assert waiter.lease is not None
    site.now += 1e5
    assert isinstance(site.found(), NotReady)
