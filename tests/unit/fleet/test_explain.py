"""What an operator is told of where a request would go is where it then goes."""

import functools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ichat.config.schema import POLICY_NAMES, Routing
from ichat.fleet.explain import explain
from ichat.fleet.fleet import Fleet
from ichat.http.pool import Upstream
from ichat.protocol.messages import Heartbeat
from ichat.routing.availability import Unknown
from ichat.routing.balancer import Balancer
from ichat.routing.endpoint import Endpoint
from ichat.routing.prefix_chain import chain_of, sums_of
from ichat.routing.request import Lease, RoutingRequest

MODEL = "m"


class Site:
    """A fleet with workers of one model, and a balancer for them, at a time that a test sets."""

    def __init__(self, count, policy, **settings):
        self.now = 1000.0
        self.settings = Routing(policy=policy, **settings)
        self.fleet = Fleet({}, lambda: self.now, 4)
        self.balancer = Balancer(self.fleet.directory.availability, lambda: self.now, self.settings)
        for number in range(count):
            self.beat(f"w-{number:02}")

    def beat(self, worker_id, state="ready", running=0):
        progress = {"running": running, "waiting": 0}
        self.fleet.registry.record_heartbeat(
            Heartbeat(worker_id, MODEL, "127.0.0.1", 1, state=state, progress=progress, heartbeat_interval=1e6)
        )

    def endpoint(self, worker_id):
        return self.fleet.table.endpoint_of(self.fleet.table.get(worker_id))

    def explain(self, request):
        return explain(self.fleet.directory, self.fleet.table, self.balancer, self.settings, request)

    def state(self):
        """Return all that a lease changes, as far as one that is not given may not change it."""
        index = self.balancer.prefixes
        endpoints = [self.fleet.table.endpoint_of(worker) for worker in self.fleet.table]
        seen = [(one.in_flight, one.circuit.probe, one.holder.lately(0, self.now)) for one in endpoints]
        return seen, dict(index._young), dict(index._old), len(self.balancer._queues)


def conversation(number, turns=4):
    """Return the chain of a request whose prompt begins as all others do."""
    body = json.dumps({"model": MODEL, "messages": ["s" * 1000, *[f"{number} {turn}" * 200 for turn in range(turns)]]})
    return chain_of(sums_of(b"/v1/chat/completions", body.encode(), ("model", "messages")), MODEL)


def of(view, worker_id):
    return next(one for one in view.candidates if one.worker_id == worker_id)


STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "session", "end", "fail", "drain", "wait", "report"]), st.integers(0, 7)),
    max_size=40,
)


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("count", [1, 3, 20])
@settings(max_examples=30)
@given(steps=STEPS, seed=st.integers(0, 99))
def test_an_explained_endpoint_is_the_next_lease(policy, count, steps, seed):
    """By every policy: the endpoint that is named, and the rule, are those of the lease that follows."""
    site, leases = Site(count, policy), []
    for step, number in steps:
        worker_id = f"w-{number % count:02}"
        if step in ("ask", "session"):
            request = RoutingRequest(MODEL, b"%d" % number if step == "session" else b"")
            if step == "ask":
                request.make_prefix = functools.partial(conversation, number)
                site.balancer.rehearse(request)
            before = site.state()
            random.seed(seed)
            view = site.explain(request)
            assert site.state() == before, "the question changes nothing"
            random.seed(seed)
            lease = site.balancer.lease(request)
            chosen = lease.endpoint.id.decode() if isinstance(lease, Lease) else None
            assert view.chosen == chosen, view
            assert [one.worker_id for one in view.candidates if one.chosen] == ([chosen] if chosen else [])
            if chosen is not None:
                leases.append(lease)
                assert view.reason is None
                assert of(view, chosen).why_not is None
                if view.prefix is not None and view.rule in ("prefix", "spill", "least_loaded"):
                    assert (view.prefix.matched, view.prefix.deepest) == (
                        request.prefix.matched,
                        request.prefix.deepest,
                    )
            else:
                assert view.reason
        elif step == "end" and leases:
            leases.pop(number % len(leases)).release()
        elif step == "fail":
            for _ in range(6):
                site.endpoint(worker_id).circuit.record_failure(site.now)
        elif step == "drain":
            site.beat(worker_id, "draining" if number % 2 else "ready")
        elif step == "wait":
            site.now += 7.0 * number
        else:
            site.beat(worker_id, running=number)


@given(loads=st.lists(st.integers(0, 3), min_size=2, max_size=8))
def test_a_choice_at_random_is_one_of_the_least(loads):
    """Of the least loaded any may be named, and none else."""
    site = Site(len(loads), "least_loaded")
    for number, load in enumerate(loads):
        site.beat(f"w-{number:02}", running=load)
    view = site.explain(RoutingRequest(MODEL))
    assert view.rule == "least_loaded"
    assert of(view, view.chosen).load == min(loads)


def test_a_prefix_is_followed_and_given_up():
    """The rule says whether a request follows its prefix, or goes elsewhere since there is too much to do."""
    site = Site(2, "prefix_aware", prefix_ttl_s=1e6)
    site.now += 1000.0
    view = site.explain(RoutingRequest(MODEL, prefix=conversation(1)))
    assert (view.rule, view.prefix.matched, view.prefix.deepest) == ("least_loaded", 0, 0)
    lease = site.balancer.lease(RoutingRequest(MODEL, prefix=conversation(1)))
    home = lease.endpoint.id.decode()
    view = site.explain(RoutingRequest(MODEL, prefix=conversation(1, turns=5)))
    assert (view.rule, view.chosen) == ("prefix", home)
    assert of(view, home).matched == view.prefix.matched == view.prefix.deepest > 1000
    assert view.prefix.length > view.prefix.matched
    site.endpoint(home).in_flight_max = 100
    site.beat(home, running=99)
    view = site.explain(RoutingRequest(MODEL, prefix=conversation(1, turns=5)))
    assert view.rule == "spill"
    assert view.chosen != home
    assert of(view, home).overloaded
    assert view.prefix.matched == 0 < view.prefix.deepest


def test_every_candidate_says_why_not():
    """Those that cannot get the request say so, whether they are ready or not."""
    site = Site(6, "least_loaded")
    site.endpoint("w-01").in_flight = 4
    for _ in range(6):
        site.endpoint("w-02").circuit.record_failure(site.now)
    site.beat("w-03", "draining")
    site.endpoint("w-04").fail(site.now)
    site.fleet.managed.expect("w-06", [MODEL])
    view = site.explain(RoutingRequest(MODEL))
    assert {one.worker_id: one.why_not for one in view.candidates} == {
        "w-00": None,
        "w-01": "is full: it has 4 requests, and may have 4",
        "w-02": "has failed with 6 requests in a row, and is tried again in 5 s",
        "w-03": "is draining",
        "w-04": "cannot be reached",
        "w-05": None,
        "w-06": "is starting",
    }
    assert of(view, "w-06").circuit is None
    assert of(view, "w-02").circuit.state == "open"


def test_explain_names_the_queue_if_all_are_full():
    """If all are full, the request would wait, as long as the queue has room."""
    site = Site(1, "least_loaded", queue_max=1)
    held = [site.balancer.lease(RoutingRequest(MODEL)) for _ in range(4)]
    assert site.explain(RoutingRequest(MODEL)).rule == "queued"
    site.balancer.wait(RoutingRequest(MODEL), lambda: None)
    view = site.explain(RoutingRequest(MODEL))
    assert (view.rule, view.waiting, view.chosen) == ("queue_full", 1, None)
    site.balancer.close()
    assert site.explain(RoutingRequest(MODEL)).rule == "draining"
    assert len(held) == 4


def test_explain_names_the_load_of_a_cold_model():
    """A request for a model that is not loaded waits for the load, and each worker says that it is cold or asleep."""
    site = Site(0, "least_loaded", queue_max=1)
    for worker_id in ("m-0", "m-1"):
        worker = site.fleet.managed.expect(worker_id, [MODEL])
        site.fleet.managed.configure(worker, names=[MODEL], max_in_flight=None, settings={}, on_demand=True)
        site.fleet.managed.cool(worker)
    site.fleet.managed.restart(site.fleet.table.get("m-1"))
    site.beat("m-1", "asleep")
    view = site.explain(RoutingRequest(MODEL))
    assert (view.rule, view.chosen) == ("loading", None)
    assert {one.worker_id: (one.state, one.why_not) for one in view.candidates} == {
        "m-0": ("cold", "is cold"),
        "m-1": ("asleep", "is asleep"),
    }
    site.balancer.wait(RoutingRequest(MODEL), lambda: None)
    assert site.explain(RoutingRequest(MODEL)).rule == "queue_full"


def test_unknown_and_unready_models_are_explained():
    """An unknown model is no explanation; one whose workers are all away is."""
    site = Site(1, "least_loaded")
    assert site.explain(RoutingRequest("other")) == Unknown()
    site.beat("w-00", "draining")
    view = site.explain(RoutingRequest(MODEL))
    assert (view.rule, view.reason) == ("not_ready", "worker w-00 is draining")


def test_external_routes_are_candidates():
    """A model of several external routes is explained by these."""
    routes = [Endpoint(Upstream(name, name, 1), name.encode(), 2) for name in ("external:m", "external:m#2")]
    fleet = Fleet({MODEL: routes}, lambda: 0.0, 4)
    settings = Routing(policy="round_robin")
    balancer = Balancer(fleet.directory.availability, lambda: 0.0, settings)
    for expected in ("external:m", "external:m#2", "external:m"):
        view = explain(fleet.directory, fleet.table, balancer, settings, RoutingRequest(MODEL))
        assert (view.rule, view.chosen) == ("round_robin", expected)
        balancer.lease(RoutingRequest(MODEL)).release()
    assert [one.state for one in view.candidates] == ["ready", "ready"]


def test_the_keeper_of_a_response_is_the_only_one():
    """A request that continues a response goes where that is kept."""
    site = Site(2, "least_loaded")
    view = site.explain(RoutingRequest(MODEL, only=site.endpoint("w-01")))
    assert (view.rule, view.chosen) == ("only", "w-01")
    assert of(view, "w-00").why_not == "does not keep the response that the request continues"
