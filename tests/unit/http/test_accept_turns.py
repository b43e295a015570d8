"""Accepting in turns: when a process accepts, when it leaves connections to others, and what ends kept connections."""

import errno
import select
import socket

import pytest
import trio
import trio.testing

from ichat.http.accept_turns import (
    ACCEPT_MAX,
    EVENTS,
    MORE,
    SHED_MAX,
    AcceptTurns,
    Peers,
    Shedding,
    stays_out,
    surplus_of,
    surplus_of_requests,
)
from ichat.http.parties import ConnectionCounts

FULL = Peers(connections=0, requests=0, is_fewest=False)
"""By these, a process with more than a few connections has too many."""
FEW = Peers(connections=10, requests=10, is_fewest=False)


class Hub:
    """Remembers what is watched, and how often that changed."""

    def __init__(self):
        self.ready = {}
        self.changes = []

    def watch(self, fd, events, ready):
        assert events == EVENTS == select.EPOLLIN | select.EPOLLEXCLUSIVE
        assert fd not in self.ready
        self.ready[fd] = ready
        self.changes.append("watch")

    def forget(self, fd):
        if self.ready.pop(fd, None) is not None:
            self.changes.append("forget")

    def serve(self):
        for ready in list(self.ready.values()):
            ready(select.EPOLLIN)


class Site:
    """A process that accepts from a listener."""

    def __init__(self, nursery):
        self.hub = Hub()
        self.accepted = []
        self.counts = ConnectionCounts()
        self.clients = []
        self.nursery = nursery
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.listener.setblocking(False)
        self.turns = AcceptTurns(self.hub, self.accept, self.counts)

    def accept(self, sock, address):
        assert address == sock.getpeername()
        self.accepted.append(sock)
        self.counts.begin("unix")

    async def run(self):
        self.nursery.start_soon(self.turns.run_forever, [self.listener])
        await trio.testing.wait_all_tasks_blocked()
        self.hub.changes.clear()

    def connect(self, number):
        self.clients += [socket.create_connection(self.listener.getsockname()) for _ in range(number)]


@pytest.fixture
async def site(nursery):
    found = Site(nursery)
    yield found
    for sock in (found.listener, *found.accepted, *found.clients):
        sock.close()


@pytest.mark.parametrize(
    ("own", "mean", "is_out"), [(8, 0, False), (9, 0, True), (120, 100, False), (121, 100, True), (1, 5000, False)]
)
def test_a_process_with_clearly_more_than_the_mean_stays_out(own, mean, is_out):
    """A process leaves new connections to others above 9/8 of the mean and a few, but never the one with the fewest."""
    assert stays_out(own, mean, is_fewest=False) is is_out
    assert not stays_out(own, mean, is_fewest=True)


@pytest.mark.parametrize(
    ("own", "mean", "surplus"),
    [(11, 32 / 3, 0), (12, 32 / 3, 1), (25, 32 / 3, 14), (1, 1 / 3, 0), (2, 2 / 3, 1), (2, 1, 0), (106, 100, 0),
     (107, 100, 1)],
)  # fmt: skip
def test_kept_connections_above_the_mean_are_a_surplus(own, mean, surplus):
    """More than a connection, and more than 6 % of the mean; connections that are even have none."""
    assert surplus_of(own, mean) == surplus


@pytest.mark.parametrize(("own", "mean", "surplus"), [(20, 10, 0), (21, 10, 11), (133, 100, 0), (134, 100, 34)])
def test_requests_clearly_above_the_mean_are_a_surplus(own, mean, surplus):
    """Few requests in flight are none, as their number varies."""
    assert surplus_of_requests(own, mean) == surplus


def test_a_lasting_surplus_ends_as_many_connections():
    """A surplus of two comparisons does, but not more connections than a bound; nothing ends in the meantime."""
    shedding = Shedding()

    def shed():
        return sum(shedding.sheds_next() for _ in range(5 * SHED_MAX))

    shedding.see(0, 20, FEW)
    assert shed() == 0
    shedding.see(0, 18, FEW)
    assert (shedding.left, shed(), shed()) == (7, 7, 0)
    shedding.see(0, 11, FEW)
    assert shed() == 0
    shedding.see(0, 100, FEW)
    shedding.see(0, 100, FEW)
    assert shed() == SHED_MAX
    shedding.see(0, 10, FEW)
    for requests in (30, 22):
        assert shed() == 0
        shedding.see(requests, 10, FEW)
    assert shed() == 12


async def test_a_turn_has_a_bound_and_ends_behind_the_others(site):
    """A burst is accepted in turns, and after each the socket is removed and added again; an empty turn changes nothing."""
    await site.run()
    site.connect(ACCEPT_MAX + 3)
    site.hub.serve()
    assert (len(site.accepted), site.hub.changes) == (ACCEPT_MAX, ["forget", "watch"])
    site.hub.serve()
    assert (len(site.accepted), site.hub.changes) == (ACCEPT_MAX + 3, ["forget", "watch"] * 2)
    site.hub.serve()
    assert site.hub.changes == ["forget", "watch"] * 2


async def test_giving_way_goes_behind_the_others(site):
    """The next connection is a peer's then; a process that is out stays out."""
    await site.run()
    site.turns.give_way()
    assert site.hub.changes == ["forget", "watch"]
    site.turns.stop()
    site.turns.give_way()
    assert site.hub.changes == ["forget", "watch", "forget"]


async def test_too_many_connections_keep_a_process_out_until_enough_have_ended(site):
    """A process goes out when it has too many connections, at once if it learns so, and comes back when they end."""
    await site.run()
    site.turns.see(FULL)
    site.connect(MORE + 1)
    site.hub.serve()
    assert (len(site.accepted), site.hub.ready) == (MORE + 1, {})
    site.accepted.pop().close()
    site.counts.end("unix")
    site.turns.update()
    assert list(site.hub.ready) == [site.listener.fileno()]
    site.connect(2)
    site.turns.see(Peers(100, 0, is_fewest=False))
    site.hub.serve()
    assert (len(site.accepted), bool(site.hub.ready)) == (MORE + 2, True)
    site.turns.see(FULL)
    assert not site.hub.ready
    site.turns.see(Peers(0, 0, is_fewest=True))
    assert site.hub.ready


async def test_going_out_forgets_no_connection_that_woke_only_this_process(site):
    """What waits when a process goes out is still accepted: no other process may know of it."""
    await site.run()
    site.connect(MORE + 1)
    site.hub.serve()
    site.connect(1)
    site.turns.see(FULL)
    assert (len(site.accepted), site.hub.ready) == (MORE + 2, {})


async def test_leaving_accepts_what_waits_and_nothing_after(site):
    """A process that leaves has removed the socket before anybody closes it."""
    await site.run()
    site.connect(2)
    site.turns.retire()
    assert (len(site.accepted), site.hub.ready) == (2, {})
    site.connect(1)
    site.turns.update()
    site.turns.try_now()
    site.turns.retire()
    assert (len(site.accepted), site.hub.ready) == (2, {})


class WithoutDescriptors:
    """A listener in a process that has no descriptor left, once."""

    def __init__(self, listener):
        self.listener = listener
        self.fileno = listener.fileno
        self.close = listener.close
        self.has_failed = False

    def accept(self):
        if not self.has_failed:
            self.has_failed = True
            raise OSError(errno.EMFILE, "Too many open files")
        return self.listener.accept()


async def test_an_error_pauses_accepting(site, autojump_clock):
    """Without descriptors nothing is accepted for a while, nor is the socket watched; then it goes on."""
    site.nursery.start_soon(site.turns.run_forever, [WithoutDescriptors(site.listener)])
    await trio.testing.wait_all_tasks_blocked()
    site.connect(1)
    site.hub.serve()
    assert (site.accepted, site.hub.ready) == ([], {})
    site.turns.update()
    assert not site.hub.ready
    await trio.sleep(1)
    site.hub.serve()
    assert len(site.accepted) == 1


async def test_a_connection_that_woke_only_a_stopped_process_is_accepted_at_the_next_comparison(site):
    """The kernel wakes no second process for it; a process that stays out leaves it to its peers."""
    await site.run()
    site.connect(1)
    site.turns.see(Peers(0, 0, is_fewest=False))
    assert (len(site.accepted), bool(site.hub.ready)) == (1, True)
    site.connect(MORE)
    site.hub.serve()
    assert not site.hub.ready
    site.connect(1)
    site.turns.see(FULL)
    assert len(site.accepted) == MORE + 1
