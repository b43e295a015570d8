"""What is believed to be cached where."""

import hashlib

from ichat.config.schema import Routing
from ichat.fleet.fleet import Fleet
from ichat.http.pool import Upstream
from ichat.protocol.messages import Heartbeat
from ichat.protocol.prefixes import BOUNDARIES
from ichat.routing.endpoint import Endpoint
from ichat.routing.prefix_chain import PrefixChain
from ichat.routing.prefix_index import HOLDERS_MAX, PrefixIndex


def endpoint(name):
    return Endpoint(Upstream(name, name, 1), name.encode(), 10)


def chain(*words):
    """Return the chain of a prompt that is made of these words, one for each boundary."""
    found, running = [], hashlib.sha1()
    for word in words:
        running.update(word.encode())
        found.append(running.digest()[:8])
    return PrefixChain(BOUNDARIES[len(words) - 1], found)


class World:
    def __init__(self, **settings):
        self.now = 1000.0
        self.index = PrefixIndex(lambda: self.now, Routing(**settings))

    def send(self, chain, endpoint):
        self.index.record(chain, self.index.match(chain), endpoint)

    def held(self, *words):
        return {one.id.decode(): length for one, length in self.index.match(chain(*words)).bytes_of.items()}


def test_an_endpoint_holds_the_prefixes_sent_to_it():
    """Each endpoint with as much as it got; what differs is not known."""
    world, a, b = World(), endpoint("a"), endpoint("b")
    world.send(chain("s", "x", "y"), a)
    world.send(chain("s", "z"), b)
    assert world.held("s", "x", "q") == {"a": 512, "b": 256}
    assert world.held("s", "x", "y", "more") == {"a": 768, "b": 256}
    assert world.held("other") == {}


def test_uses_count_where_prompts_part():
    """Not at what comes before, and not for a conversation that nobody shares."""
    world, a = World(), endpoint("a")
    for number in range(5):
        world.send(chain("s", f"user {number}"), a)
    world.send(chain("s", "user 0", "turn 1"), a)
    match = world.index.match(chain("s", "another"))
    assert (match.deepest, match.uses) == (256, 4)
    assert world.index.match(chain("s", "user 0", "turn 1", "turn 2")).uses == 0


def test_the_newest_holders_are_remembered():
    """No more than HOLDERS_MAX, each once."""
    world, ends = World(), [endpoint(str(number)) for number in range(HOLDERS_MAX + 2)]
    for end in [*ends, ends[-1]]:
        world.send(chain("s"), end)
    assert set(world.held("s")) == {str(number) for number in range(2, HOLDERS_MAX + 2)}


def test_a_start_takes_what_was_known_with_it():
    """Of the new start nothing is known, until it gets something."""
    world, a, b = World(), endpoint("a"), endpoint("b")
    world.send(chain("s", "x"), a)
    world.send(chain("s"), b)
    a.begin()
    assert world.held("s", "x") == {"b": 256}
    world.send(chain("s", "x"), a)
    assert world.held("s", "x") == {"a": 512, "b": 256}


def test_reports_correct_it():
    """What a worker says it has lost or has is believed, and nothing else changes."""
    world, a, b = World(), endpoint("a"), endpoint("b")
    long = chain("s", "x", "y")
    world.send(long, a)
    world.send(long, b)
    assert world.index.discard(long.digests[1:], a) == 2
    assert world.index.discard([*long.digests[1:], b"unknown!"], a) == 0
    assert world.held("s", "x", "y") == {"b": 768, "a": 256}
    world.index.add(chain("s", "x").digests, a)
    world.index.add(chain("new").digests, a)
    assert world.held("s", "x", "y") == {"b": 768, "a": 512}
    assert world.held("new") == {"a": 256}


def test_a_lost_prefix_can_be_held_again():
    """A prefix that nobody held any more, by a report, is known again where the next request with it goes."""
    world, a, b = World(), endpoint("a"), endpoint("b")
    world.send(chain("s", "x"), a)
    assert world.index.discard(chain("s", "x").digests, a) == 2
    assert world.held("s", "x") == {}
    world.send(chain("s", "x"), b)
    assert world.held("s", "x") == {"b": 512}


def test_an_unused_prefix_is_forgotten():
    """After the time that is configured; what is used in between stays."""
    world, a = World(prefix_ttl_s=100), endpoint("a")
    world.send(chain("used"), a)
    world.send(chain("left"), a)
    for _ in range(10):
        world.now += 30
        assert world.held("used") == {"a": 256}
    assert world.held("left") == {}
    world.now += 1000
    assert world.held("used") == {}


def test_there_is_a_bound():
    """However many prompts come, no more than the configured number of entries is kept, the newest among them."""
    world, a, most = World(prefix_entries_max=1000), endpoint("a"), 0
    for number in range(3000):
        world.send(chain(f"prompt {number}", "x"), a)
        most = max(most, len(world.index))
    assert 500 <= most <= 1001
    assert world.held("prompt 2999", "x") == {"a": 512}
    assert world.held("prompt 10") == {}


def test_ended_endpoints_leave_nothing():
    """Their numbers are free again after a while."""
    world = World(prefix_ttl_s=10)
    for _ in range(20):
        world.send(chain("s"), endpoint("a"))
        world.now += 20
    gone = endpoint("gone")
    world.send(chain("s"), gone)
    gone.begin()
    world.now += 20
    world.held("s")
    assert gone.holder not in world.index._numbers


def test_workers_that_come_and_go_leave_nothing():
    """Each with an id of its own: the index keeps none of their endpoints."""
    world = World(prefix_ttl_s=10)
    fleet = Fleet({}, lambda: world.now, 10)
    for number in range(20):
        fleet.registry.record_heartbeat(Heartbeat(f"w{number}", "m", "127.0.0.1", 1))
        world.send(chain("s"), fleet.directory.availability("m").endpoints[0])
        fleet.registry.record_heartbeat(Heartbeat(f"w{number}", "m", "127.0.0.1", 1, state="gone"))
        world.now += 20
    world.held("s")
    assert len(world.index._numbers) <= 1


def test_a_worker_that_sleeps_has_an_empty_cache():
    """From the heartbeat on that says so, nothing is believed of it; what others have stays."""
    world = World()
    fleet = Fleet({}, lambda: world.now, 10)
    for name in ("a", "b"):
        fleet.registry.record_heartbeat(Heartbeat(name, "m", "127.0.0.1", 1))
    sleeper, other = fleet.directory.availability("m").endpoints
    for one in (sleeper, other):
        world.send(chain("s"), one)
    assert world.held("s")
    fleet.registry.record_heartbeat(Heartbeat("a", "m", "127.0.0.1", 1, state="asleep"))
    assert set(world.held("s")) == {"b"}
