"""A group is broken by its members alone, whoever else names it in a heartbeat."""

import itertools

import pytest

from ichat.fleet.fleet import Fleet
from ichat.fleet.groups import members_of
from ichat.fleet.worker_facts import WorkerEnd
from ichat.protocol.messages import Group, Heartbeat

INTERVAL_S = 10


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def claim(worker_id, rank, size=2, state="following", **more):
    group = Group("10.0.0.1:29500", rank, size)
    return Heartbeat(
        worker_id, "m", "10.0.0.9", 1, state=state, group=group, heartbeat_interval=INTERVAL_S, start_id="s", **more
    )


class Site:
    """A fleet with a group of two, which is well."""

    def __init__(self, managed=()):
        self.clock = Clock()
        self.fleet = Fleet({}, self.clock, 5)
        self.managed = [self.fleet.managed.expect(name, ["m"]) for name in managed]
        self.say(claim("leader", 0, state="ready"), claim("follower", 1))

    def say(self, *heartbeats):
        for one in heartbeats:
            self.fleet.registry.record_heartbeat(one)

    def members(self):
        named = [one for one in self.fleet.table if one.heartbeat and one.heartbeat.state != "gone"]
        return {one.id for one in members_of(named, self.clock.now)}

    def is_whole(self):
        return all(not self.fleet.table.lost(name) for name in ("leader", "follower"))


STRANGERS = [(7, 2), (1, 2), (0, 2), (2, 3), (1, 1), (2, 2), (1, 65536)]


@pytest.mark.parametrize("managed", [(), ("leader",), ("follower",), ("leader", "follower")])
@pytest.mark.parametrize(("rank", "size"), STRANGERS)
@pytest.mark.parametrize("end", ["gone", "failed", "silent", "started again"])
def test_a_stranger_breaks_no_group(managed, rank, size, end):
    """Another rank than a free one, or another size, makes no member: neither its good-bye nor its silence counts."""
    site = Site(managed)
    site.clock.now += 1
    site.say(claim("evil", rank, size))
    assert site.members() == {"leader", "follower"}
    match end:
        case "gone":
            site.say(claim("evil", rank, size, state="gone"))
        case "failed":
            site.say(claim("evil", rank, size, state="gone", failure="It broke."))
        case "started again":
            site.say(claim("evil", rank, size, pid=5))
        case _:
            site.clock.now += INTERVAL_S * 3 - 1
            site.say(claim("leader", 0, state="ready"), claim("follower", 1))
            site.clock.now += 5
    assert site.is_whole()
    assert site.fleet.table.state(site.fleet.table.get("leader")) == "ready"
    assert site.fleet.table.lost("evil") == []


@pytest.mark.parametrize("managed", [(), ("leader",), ("follower",), ("leader", "follower")])
def test_a_member_still_breaks_its_group(managed):
    """Whoever is in it: a gateway may have started one of the members, or all of them on its machine."""
    site = Site(managed)
    site.clock.now += 1
    if "follower" in managed:
        site.fleet.table.fail(site.fleet.table.get("follower"), WorkerEnd("ended", 0.0))
    else:
        site.say(claim("follower", 1, state="gone"))
    assert [one.worker_id for one in site.fleet.table.lost("leader")] == ["follower"]


def test_a_managed_worker_takes_its_rank_from_a_stranger_that_came_first():
    """The stranger is no member from then on."""
    clock = Clock()
    fleet = Fleet({}, clock, 5)
    fleet.registry.record_heartbeat(claim("evil", 1))
    fleet.managed.expect("leader", ["m"])
    fleet.managed.expect("follower", ["m"])
    clock.now += 1
    fleet.registry.record_heartbeat(claim("leader", 0, state="ready"))
    fleet.registry.record_heartbeat(claim("follower", 1))
    fleet.registry.record_heartbeat(claim("evil", 1, state="gone"))
    assert fleet.table.lost("leader") == fleet.table.lost("follower") == []


def test_a_group_that_was_started_again_is_one():
    """Its ranks are free once those of the run before are missed, though all came back within one heartbeat."""
    site = Site()
    site.clock.now += 1
    site.say(claim("leader-2", 0, state="ready"), claim("follower-2", 1))
    for _ in range(5):
        site.clock.now += INTERVAL_S - 1
        site.say(claim("leader-2", 0, state="ready"), claim("follower-2", 1))
    site.say(claim("follower-2", 1, state="gone"))
    assert "follower-2" in [one.worker_id for one in site.fleet.table.lost("leader-2")]


def test_membership_does_not_depend_on_the_order_of_the_table():
    """It is a function of who names the group, and since when."""
    site = Site(("follower",))
    for number, (rank, size) in enumerate(STRANGERS):
        site.clock.now += 0.1
        site.say(claim(f"evil-{number}", rank, size))
    workers = [one for one in site.fleet.table if one.heartbeat]
    expected = [one.id for one in members_of(workers, site.clock.now)]
    assert set(expected) == {"leader", "follower"}
    for order in itertools.islice(itertools.permutations(workers), 200):
        assert [one.id for one in members_of(order, site.clock.now)] == expected
