"""Who gets a request and who waits, without any event loop."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ichat.config.schema import POLICY_NAMES, Routing
from ichat.http.pool import Upstream
from ichat.routing.availability import Draining, Full, NotReady, QueueTimeout, Ready
from ichat.routing.balancer import Balancer
from ichat.routing.endpoint import Endpoint
from ichat.routing.policies import COMPARED_MAX, POLICIES
from ichat.routing.request import Lease, RoutingRequest
from ichat.routing.sessions import HashRing, home_of

M, N = RoutingRequest("m"), RoutingRequest("n")


def endpoint(name, in_flight_max=10):
    return Endpoint(Upstream(name, name, 1), name.encode(), in_flight_max)


class Serving(dict):
    """The endpoints of each model; without any it is not ready."""

    def __call__(self, model):
        if not self.get(model):
            return NotReady("no worker is there", 1)
        return Ready(self[model])


def balancer(policy="least_loaded", queue_max=10, **serving):
    return Balancer(Serving(serving), lambda: 1000.0, Routing(policy=policy, queue_max=queue_max))


def ids(leases):
    return collections.Counter(lease.endpoint.id.decode() for lease in leases)


def test_every_policy_of_the_configuration_exists():
    """The names that the configuration takes are those of the policies."""
    assert set(POLICY_NAMES) == {"prefix_aware", *POLICIES}
    for name in POLICY_NAMES:
        assert balancer(name, m=[endpoint("a"), endpoint("b")]).lease(M).endpoint.id in (b"a", b"b")


def test_the_least_loaded_gets_it():
    """Requests under way count from the moment of the choice until their release."""
    balance = balancer(m=[endpoint("a"), endpoint("b"), endpoint("c")])
    leases = [balance.lease(M) for _ in range(9)]
    assert ids(leases) == {"a": 3, "b": 3, "c": 3}
    for lease in leases:
        if lease.endpoint.id == b"b":
            lease.release()
    assert ids(balance.lease(M) for _ in range(3)) == {"b": 3}


def test_load_from_elsewhere_counts():
    """A worker that reports more than it was sent from here gets less."""
    a, b = endpoint("a"), endpoint("b")
    a.report(5, 1000.0)
    balance = balancer(m=[a, b])
    assert ids(balance.lease(M) for _ in range(5)) == {"b": 5}


def test_least_busy_ties_are_broken_at_random():
    """The first of equals is not always the same: several gateways would all hit it."""
    first = {balancer(m=[endpoint("a"), endpoint("b")]).lease(M).endpoint.id for _ in range(60)}
    assert first == {b"a", b"b"}


def test_round_robin_takes_turns():
    """Each in turn, whatever their loads; who comes later is next."""
    a, b, c = endpoint("a"), endpoint("b"), endpoint("c")
    a.report(5, 1000.0)
    serving = [a, b]
    balance = balancer("round_robin", m=serving)
    order = [balance.lease(M).endpoint.id for _ in range(4)]
    assert order in ([b"a", b"b"] * 2, [b"b", b"a"] * 2)
    serving.append(c)
    assert balance.lease(M).endpoint is c


def test_power_of_two_never_takes_the_most_loaded():
    """Of two at random the less loaded: with three, never the one that has most."""
    a, b, c = endpoint("a"), endpoint("b"), endpoint("c")
    c.report(1000, 1000.0)
    balance = balancer("power_of_two", m=[a, b, c])
    assert set(ids(balance.lease(M) for _ in range(20))) == {"a", "b"}


@pytest.mark.parametrize("policy", POLICY_NAMES)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.lists(st.integers(0, 30), max_size=60))
def test_no_endpoint_gets_more_than_its_bound(policy, bounds, steps):
    """Whatever the policy and the order of requests: bounds hold, and nobody waits while there is room."""
    endpoints = [endpoint(str(number), bound) for number, bound in enumerate(bounds)]
    balance = balancer(policy, queue_max=1000, m=endpoints)
    leases, waiting = [], []
    for step in steps:
        if step < 18:
            lease = balance.lease(M)
            if not isinstance(lease, Lease):
                waiting.append(balance.wait(M, lambda: None))
            else:
                leases.append(lease)
        elif step < 28 and leases:
            leases.pop(step % len(leases)).release()
        elif waiting:
            balance.withdraw(waiting.pop(step % len(waiting)))
        leases += [waiter.lease for waiter in waiting if waiter.lease]
        waiting = [waiter for waiter in waiting if not waiter.lease]
        assert all(one.in_flight <= one.in_flight_max for one in endpoints)
        assert sum(one.in_flight for one in endpoints) == len(leases)
        assert balance.waiting == len(waiting)
        assert not waiting or all(one.in_flight == one.in_flight_max for one in endpoints)


def test_first_come_first_served():
    """Room goes to who has waited longest; a newcomer does not overtake."""
    balance = balancer(m=[endpoint("a", 1)])
    lease = balance.lease(M)
    order = []
    waiters = [balance.wait(M, lambda name=name: order.append(name)) for name in "xyz"]
    balance.withdraw(waiters[1])
    assert balance.lease(M) == Full(2)
    lease.release()
    assert order == ["x"]
    waiters[0].lease.release()
    assert order == ["x", "z"]
    waiters[2].lease.release()
    assert isinstance(balance.lease(M), Lease)
    assert balance.waiting == 0


def test_a_lease_ends_once():
    """A second release changes nothing."""
    [one] = serving = [endpoint("a")]
    lease = balancer(m=serving).lease(M)
    lease.release()
    lease.release()
    assert one.in_flight == 0


def test_a_full_queue_refuses():
    """Beyond `queue_max` a request is refused."""
    balance = balancer(queue_max=1, m=[endpoint("a", 1)])
    balance.lease(M)
    balance.wait(M, lambda: None)
    assert balance.wait(M, lambda: None) == Full(1)


def test_a_queue_of_none_refuses_and_leaves_nothing():
    """With `queue_max = 0` nobody waits, and room that comes back is given out again."""
    balance = balancer(queue_max=0, m=[endpoint("a", 1)])
    lease = balance.lease(M)
    assert balance.wait(M, lambda: None) == Full()
    lease.release()
    assert isinstance(balance.lease(M), Lease)


def test_a_new_worker_serves_all_waiting_requests_it_has_room_for():
    """More room than one release gives: everybody for whom there is room goes on at once, per model."""
    serving = Serving(m=[endpoint("a", 1)], n=[endpoint("b", 1)])
    balance = Balancer(serving, lambda: 1000.0, Routing(policy="least_loaded", queue_max=10))
    balance.lease(M), balance.lease(N)
    waiters = [balance.wait(M, lambda: None) for _ in range(3)]
    other = balance.wait(N, lambda: None)
    serving["m"].append(endpoint("c", 2))
    balance.dispatch_waiting()
    assert [waiter.lease is not None for waiter in waiters] == [True, True, False]
    assert other.lease is None


def test_waiting_requests_outlive_a_moment_without_workers():
    """While nobody serves the model, its queue stands still; in vain means by then: nobody, or all full."""
    serving = Serving(m=[endpoint("a", 1)])
    balance = Balancer(serving, lambda: 1000.0, Routing(policy="least_loaded", queue_max=10))
    lease = balance.lease(M)
    waiter = balance.wait(M, lambda: None)
    assert balance.why_no_lease(waiter) == QueueTimeout()
    before = serving.pop("m")
    lease.release()
    assert waiter.lease is None
    assert balance.why_no_lease(waiter) == NotReady("no worker is there", 1)
    serving["m"] = before
    balance.dispatch_waiting()
    assert waiter.lease is not None


def test_a_tried_endpoint_is_not_chosen_again():
    """A second try goes elsewhere, and does not hold up those behind it in the queue."""
    a, b = endpoint("a", 1), endpoint("b", 1)
    balance = balancer(m=[a, b])
    first, second = balance.lease(M), balance.lease(M)
    waiter = balance.wait(RoutingRequest("m", excluded={first.endpoint}), lambda: None)
    behind = balance.wait(M, lambda: None)
    first.release()
    assert waiter.lease is None
    assert behind.lease.endpoint is first.endpoint
    second.release()
    assert waiter.lease.endpoint is second.endpoint
    assert balance.has_alternative(RoutingRequest("m", excluded={a}))
    assert not balance.has_alternative(RoutingRequest("m", excluded={a, b}))


@given(st.binary(min_size=1, max_size=20), st.integers(2, 6), st.data())
def test_a_session_stays_where_it_is(session, count, data):
    """The same session gets the same endpoint; when another one goes, it stays; when its own is full, it gets another."""
    endpoints = [endpoint(str(number), 2) for number in range(count)]
    balance = balancer(m=endpoints)
    home = balance.lease(RoutingRequest("m", session)).endpoint
    assert balance.lease(RoutingRequest("m", session)).endpoint is home
    assert balance.lease(RoutingRequest("m", session)).endpoint is not home
    gone = data.draw(st.sampled_from([one for one in endpoints if one is not home]))
    assert home_of(session, [one for one in endpoints if one is not gone]) is home


def test_sessions_are_spread():
    """Many sessions use every endpoint about as much."""
    endpoints = [endpoint(str(number)) for number in range(4)]
    homes = collections.Counter(home_of(b"session %d" % number, endpoints).id for number in range(2000))
    assert len(homes) == 4
    assert min(homes.values()) > 400


IDS = st.sets(st.integers(0, 60), min_size=1)


@given(IDS, IDS, IDS, st.binary(min_size=1, max_size=8))
def test_a_ring_finds_the_same_as_a_full_search(first, second, free, session):
    """Whoever comes and goes: of those that are free, the ring finds the same as a look at each of them."""
    every = [endpoint(str(number)) for number in range(61)]
    ring = HashRing([every[number] for number in first])
    for number in first - second:
        ring.remove(every[number])
    for number in second - first:
        ring.add(every[number])
    allowed = [every[number] for number in second & free]
    found = ring.home_of(session, allowed.__contains__)
    assert found is None or found is home_of(session, allowed)
    assert found is not None or len(allowed) < len(second), "where all are free, one is found"


def many(count=200, bound=1):
    return [endpoint(str(number), bound) for number in range(count)]


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("session", [b"", b"one"])
def test_the_last_room_of_many_is_found(policy, session):
    """Where only some of many endpoints are looked at, all of them are before a request has to wait."""
    balance = balancer(policy, m=many())
    leases = [balance.lease(RoutingRequest("m", session)) for _ in range(200)]
    assert len({lease.endpoint for lease in leases}) == 200
    assert balance.lease(RoutingRequest("m", session)) == Full()
    leases[77].release()
    assert balance.lease(M).endpoint is leases[77].endpoint


def test_each_of_many_in_turn():
    """`round_robin` is exact with many endpoints too."""
    balance = balancer("round_robin", m=many(200, 10))
    assert set(ids(balance.lease(M) for _ in range(600)).values()) == {3}


def test_many_are_loaded_evenly():
    """The least loaded of some neighbours: no endpoint gets many more than the others."""
    balance = balancer(m=many(200, 100))
    counts = ids(balance.lease(M) for _ in range(2000))
    assert len(counts) == 200
    assert max(counts.values()) <= 14


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_busy_endpoints_are_not_chosen_of_many(policy):
    """Excluded, avoided, or with an open circuit: others are there."""
    endpoints = many(200, 1000)
    well = endpoints[::4]
    for one in endpoints[1::4]:
        one.avoid_until = 1010.0
    for one in endpoints[2::4]:
        one.circuit.open_until = 1010.0
    balance = balancer(policy, m=endpoints)
    for number in range(300):
        request = RoutingRequest("m", b"%d" % number if number % 2 else b"", excluded=set(endpoints[3::4]))
        assert balance.lease(request).endpoint in well


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("session", [b"", b"one"])
def test_of_many_few_are_looked_at(policy, session, monkeypatch):
    """A request among 2000 endpoints asks as few of them for their circuits and loads as one among 100."""
    asked = []
    endpoints = many(2000, 10)
    balance = balancer(policy, m=endpoints)
    for one in endpoints:
        one.circuit.open_until = 0.0  # half open: it is asked
    monkeypatch.setattr(type(endpoints[0].circuit), "allows_request", lambda *_: asked.append(1) or True)
    monkeypatch.setattr(type(endpoints[0]), "load", lambda *_: asked.append(1) or 0)
    balance.lease(RoutingRequest("m", session))
    assert 0 < len(asked) <= 2 * COMPARED_MAX


def test_an_unreachable_endpoint_is_chosen_last():
    """For a while it is chosen only if there is no other; a report of its own ends that."""
    a, b = endpoint("a"), endpoint("b", 2)
    a.avoid_until = 1010.0
    balance = balancer(m=[a, b])
    assert ids(balance.lease(M) for _ in range(3)) == {"b": 2, "a": 1}
    a.report(0, 1000.0)
    assert balance.lease(M).endpoint is a


def test_a_blocked_retry_delays_no_other_request():
    """One who waits for the only endpoint that he has not tried holds up nobody."""
    a, b = endpoint("a"), endpoint("b", 1)
    balance = balancer(m=[a, b])
    b.in_flight = 1
    waiter = balance.wait(RoutingRequest("m", excluded={a}), lambda: None)
    assert waiter.lease is None
    assert balance.wait(M, lambda: None).lease.endpoint is a


def test_closing_wakes_every_waiting_request():
    """Who waits goes on without a lease, and nobody waits afterwards."""
    balance = balancer(m=[endpoint("a", 1)])
    lease = balance.lease(M)
    told = []
    waiter = balance.wait(M, lambda: told.append(1))
    balance.close()
    assert (told, waiter.lease, balance.waiting) == ([1], None, 0)
    assert balance.wait(M, lambda: None) == Draining()
    lease.release()
