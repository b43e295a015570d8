"""The policy `prefix_aware` in the balancer: in the queue, with retries, and of many endpoints."""

import hashlib

import pytest

from ichat.config.schema import Routing
from ichat.http.pool import Upstream
from ichat.protocol.prefixes import BOUNDARIES
from ichat.routing.availability import Ready
from ichat.routing.balancer import COMPARED_WAITERS_MAX, PASSED_OVER_MAX, Balancer
from ichat.routing.endpoint import Endpoint
from ichat.routing.prefix_chain import PrefixChain
from ichat.routing.request import Lease, RoutingRequest


def endpoint(name, in_flight_max=1):
    return Endpoint(Upstream(name, name, 1), name.encode(), in_flight_max)


def request(*words, **known):
    """Return a request with the prompt that is made of these words, one for each boundary; without any, a short one."""
    digests, running = [], hashlib.sha1()
    for word in words:
        running.update(word.encode())
        digests.append(running.digest()[:8])
    prefix = PrefixChain(BOUNDARIES[len(words) - 1], digests) if words else None
    return RoutingRequest("m", prefix=prefix, **known)


class World:
    """A balancer whose endpoints hold what they are told to."""

    def __init__(self, *endpoints):
        self.found = Ready(endpoints)
        self.balancer = Balancer(lambda model: self.found, lambda: 1000.0, Routing(policy="prefix_aware"))
        self.served = []

    def hold(self, endpoint, *words):
        self.balancer.prefixes.add(request(*words).prefix.digests, endpoint)

    def fill(self):
        """Return leases on all there is."""
        leases = []
        while isinstance(lease := self.balancer.lease(RoutingRequest("m")), Lease):
            leases.append(lease)
        return {lease.endpoint: lease for lease in leases}

    def wait(self, name, request):
        return self.balancer.wait(request, lambda: self.served.append(name))


def test_a_free_place_goes_to_a_request_whose_prefix_is_there():
    """Not to the first in the queue, and what is free elsewhere goes to the first as ever."""
    a, b = endpoint("a"), endpoint("b")
    world = World(a, b)
    world.hold(a, "s", "x")
    world.hold(b, "s", "y")
    leases = world.fill()
    first = world.wait("first", request("s", "x", "1"))
    second = world.wait("second", request("s", "y", "1"))
    third = world.wait("third", request("s", "x", "2"))
    leases[b].release()
    assert (second.lease.endpoint, first.passed_over, third.passed_over) == (b, 1, 0)
    leases[a].release()
    assert first.lease.endpoint is a
    second.lease.release()
    assert third.lease.endpoint is b, "nobody else waits: better there than nowhere"
    assert world.served == ["second", "first", "third"]


def test_a_waiter_is_passed_over_only_so_often():
    """Then it gets the next place, wherever that is; so does who follows it."""
    a, b = endpoint("a"), endpoint("b")
    world = World(a, b)
    world.hold(a, "s")
    world.hold(b, "t")
    lease = world.fill()[b]
    world.wait("first", request("s", "1"))
    world.wait("second", request())
    for number in range(PASSED_OVER_MAX + 4):
        waiter = world.wait(str(number), request("t", str(number)))
        lease.release()
        lease = waiter.lease or lease
        if waiter.lease is None:
            break
    assert world.served == [*map(str, range(PASSED_OVER_MAX)), "first"]


def test_few_waiters_are_looked_at():
    """Who is farther back in the queue has to wait, however well the place would suit him."""
    a, b = endpoint("a"), endpoint("b")
    world = World(a, b)
    world.hold(b, "t")
    leases = world.fill()
    for number in range(COMPARED_WAITERS_MAX):
        world.wait(str(number), request())
    world.wait("far", request("t", "1"))
    leases[b].release()
    assert world.served == ["0"]
    leases[a].release()
    assert world.served == ["0", "1"], "it is near enough now, but this is not its home"


def test_keys_take_turns_regardless_of_their_prefixes():
    """A place goes to the flow whose turn it is; who suits it best goes first within that flow alone."""
    a, b = endpoint("a"), endpoint("b")
    world = World(a, b)
    world.hold(b, "t")
    lease = world.fill()[b]
    world.wait("one 1", request("s", fairness_key="one"))
    world.wait("one 2", request("t", "1", fairness_key="one"))
    for number in (1, 2, 3):
        world.wait(f"two {number}", request("t", str(number), fairness_key="two"))
    for _ in range(4):
        lease.release()
        b.in_flight, lease = 1, _LeaseOf(world, b)
    assert world.served == ["one 2", "two 1", "one 1", "two 2"]


class _LeaseOf:
    """Ends the request that has just begun at an endpoint."""

    def __init__(self, world, endpoint):
        self.world, self.endpoint = world, endpoint

    def release(self):
        self.world.balancer._end(self.endpoint, RoutingRequest("m"), 0)


def test_a_retry_passes_over_no_other_request():
    """A retry waits for what it has not tried, and who is at home behind it is served meanwhile."""
    a, b = endpoint("a"), endpoint("b")
    world = World(a, b)
    world.hold(b, "t")
    leases = world.fill()
    retry = world.wait("retry", request("t", "1", excluded={b}))
    world.wait("other", request())
    world.wait("home", request("t", "2"))
    leases[b].release()
    assert (world.served, retry.passed_over) == (["home"], 0)
    leases[a].release()
    assert world.served == ["home", "retry"]
    assert retry.lease.endpoint is a


def test_without_prefixes_the_queue_costs_no_look(monkeypatch):
    """Who waits with a short prompt is not looked up, and first come, first served."""
    a, b = endpoint("a"), endpoint("b")
    world = World(a, b)
    leases = world.fill()
    monkeypatch.setattr(world.balancer.prefixes, "is_deepest", lambda *_: pytest.fail("it is looked up"))
    for number in range(3):
        world.wait(number, request())
    leases[b].release()
    leases[a].release()
    assert world.served == [0, 1]


def test_a_retry_goes_to_the_next_best_holder():
    """It keeps its prefix, and never returns to what has failed with it."""
    a, b, c = endpoint("a", 10), endpoint("b", 10), endpoint("c", 10)
    world = World(a, b, c)
    world.hold(a, "s", "x", "y")
    world.hold(b, "s", "x")
    asked = request("s", "x", "y", "z")
    assert world.balancer.lease(asked).endpoint is a
    again = RoutingRequest("m", prefix=asked.prefix, excluded={a})
    assert world.balancer.lease(again).endpoint is b
    assert (asked.prefix.matched, asked.prefix.deepest) == (512, 1024)


@pytest.mark.parametrize("count", [3, 40])
def test_an_unready_holder_is_not_chosen(count):
    """An endpoint that drains, or serves another model now, is a holder and no candidate, also of many."""
    endpoints = [endpoint(str(number), 1000) for number in range(count)]
    world = World(*endpoints[1:])
    world.hold(endpoints[0], "s", "x", "y")
    world.hold(endpoints[-1], "s")
    for _ in range(20):
        assert world.balancer.lease(request("s", "x", "y")).endpoint in world.found.endpoints


def test_the_holder_of_many_is_found():
    """Wherever it is in a long list, and the index is asked once for each request."""
    endpoints = [endpoint(str(number), 1000) for number in range(500)]
    world = World(*endpoints)
    world.hold(endpoints[321], "s", "x", "y")
    asked, match = [], world.balancer.prefixes.match
    world.balancer.prefixes.match = lambda chain: asked.append(chain) or match(chain)
    words = ["s", "x", "y"]
    for number in range(10):
        words.append(str(number))
        lease = world.balancer.lease(request(*words))
        assert lease.endpoint is endpoints[321]
        lease.release()
    assert len(asked) == 10
