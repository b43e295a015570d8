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
    SHED_AFTER_S,
    SHED_EVERY,
    AcceptTurns,
    Peers,
    Shedding,
    stays_out,
)
from ichat.http.parties import ConnectionCounts

FULL = Peers(connections=0, requests=0, is_fewest=False)
"""By these, a process with more than a few connections has too many."""


class Hub:
    """Remembers what is watched, and how often that changed."""

    def __init__(self):
        self.ready = {}
        self.changes = []
        self.now = 0.0

    def update_clock(self):
        return self.now

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


def test_one_response_in_ten_ends_its_connection_after_a_second_of_many_requests():
    """Shedding begins when there were many requests for a second, and ends with them."""
    hub = Hub()
    shedding, many = Shedding(hub), 10 * 1.25 + MORE + 1

    def see(requests, now):
        hub.now = now
        shedding.see(requests, 10)

    def shed(now):
        hub.now = now
        return sum(shedding.sheds_next() for _ in range(5 * SHED_EVERY))

    see(many, 100.0)
    assert shed(100.0 + SHED_AFTER_S / 2) == 0
    see(many, 100.0 + SHED_AFTER_S / 2)
    assert shed(100.0 + SHED_AFTER_S) == 5
    see(many - 1, 101.0)
    assert shed(200.0) == 0
    see(many, 200.0)
    assert shed(200.0) == 0


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
