"""Accept connections in turns, from listening sockets that other processes may accept from as well.

The kernel keeps a list of the processes that wait for a socket, and wakes the first of them for a new connection
(EPOLLEXCLUSIVE). The list does not turn by itself: an idle process at its head would get every connection. So a process
that has accepted removes the socket from its epoll and adds it again, which puts it at the end of the list. Adding also
reports connections that wait already.
"""

import functools
import logging
import math
import select
import socket
from collections.abc import Callable

import attrs
import trio

from ichat.http.hub import Hub
from ichat.http.listeners import close_all
from ichat.http.parties import ConnectionCounts
from ichat.listeners import Listeners

log = logging.getLogger(__name__)

ACCEPT_RETRY_S = 0.1
ACCEPT_MAX = 16
"""Accept at most this many connections before other tasks run. Each brings a request.
With 64, a burst of new clients delayed all streams and first bytes by 64 requests."""
EVENTS = select.EPOLLIN | select.EPOLLEXCLUSIVE
"""Level-triggered. The kernel refuses to modify such an entry: it can only be removed and added."""
OUT_ABOVE = 1.125
SHED_ABOVE = 1.25
MORE = 8
"""This many more than a multiple of the mean are never too many: small numbers vary."""
EVEN_WITHIN = 0.06
"""Kept connections are even if no process has more than the mean by this part of it, and by more than a connection."""
SHED_MAX = 16
"""The most connections that a process ends between two comparisons: each costs its client another connection."""


@attrs.frozen
class Peers:
    """All processes that accept from the same sockets, this process included, as they were a moment ago."""

    connections: float
    """Of a process, on average."""
    requests: float
    """In flight in a process, on average."""
    is_fewest: bool
    """Whether no other process has fewer connections than this process."""


def stays_out(own: int, mean: float, *, is_fewest: bool) -> bool:
    """Return whether a process with `own` connections leaves new connections to its peers; the fewest never does."""
    return not is_fewest and own > mean * OUT_ABOVE + MORE


def surplus_of(own: int, mean: float) -> int:
    """Return how many of its kept connections a process should leave to its peers."""
    return max(0, math.ceil(own - mean - max(1.0, mean * EVEN_WITHIN)))


def surplus_of_requests(own: int, mean: float) -> int:
    """Return how many of its requests in flight a process should leave to its peers: few vary too much to count."""
    return math.ceil(own - mean) if own > mean * SHED_ABOVE + MORE else 0


@attrs.define(eq=False)
class Shedding:
    """Ends some kept connections while a process has too many of them, or too many requests.

    A proxy has few connections, which stay and may be heavy. If it opens several at once, they reach the same process.
    """

    _surplus: int = 0
    """By the last comparison."""
    left: int = 0
    """How many connections will end before the next comparison, each with a response."""

    def see(self, requests: int, connections: int, peers: Peers) -> None:
        """Compare the requests in flight and the connections with those of the peers.

        A surplus counts if the last comparison had a surplus, too: a burst may leave by itself.
        """
        surplus = max(surplus_of(connections, peers.connections), surplus_of_requests(requests, peers.requests))
        self._surplus, self.left = surplus, min(surplus, self._surplus, SHED_MAX)

    def sheds_next(self) -> bool:
        """Return whether the next response ends its connection."""
        if not self.left:
            return False
        self.left -= 1
        return True


@attrs.define(eq=False)
class AcceptTurns:
    """Accepts from the sockets of a port, while this process does not have too many connections."""

    _hub: Hub
    _accepted: Callable[[socket.socket, object], None]
    """Called by the hub with each connection and its address; it must not raise, see `Hub.watch`."""
    _counts: ConnectionCounts
    """Of this process."""
    _turns: dict[socket.socket, Callable[[int], None]] = attrs.field(factory=dict[socket.socket, Callable[[int], None]])
    """The hub calls such a function for each listening socket; empty before `run_forever` and after `retire`."""
    _peers: Peers | None = None
    _is_paused: bool = False
    """Whether it waits after an error."""
    is_out: bool = True
    """Whether the sockets are not watched: `update` may change that."""
    _failed: Listeners[[]] = attrs.field(factory=Listeners[[]])

    def __repr__(self) -> str:
        return f"<AcceptTurns of {len(self._turns)} sockets{' out' if self.is_out else ''}>"

    async def run_forever(self, listeners: list[socket.socket]) -> None:
        """Accept until cancelled; then close this process's descriptors of the sockets."""
        self._turns = {listener: functools.partial(self._turn, listener) for listener in listeners}
        try:
            self.update()
            while True:
                while not self._is_paused:
                    await self._failed.wait()
                await trio.sleep(ACCEPT_RETRY_S)
                self._is_paused = False
                self.update()
        finally:
            self.stop()
            close_all(listeners)

    def see(self, peers: Peers) -> None:
        """Compare with these peers from now on. Accept the connections that have woken a process which was stopped."""
        self._peers = peers
        self.update()
        if not self.is_out:
            self.try_now()

    def update(self) -> None:
        """Go out of the list of waiting processes, or back into it, by the numbers of connections."""
        if self._is_paused or self._has_enough():
            if not self.is_out:
                self._go_out()
                self.try_now()
        elif self.is_out and self._turns:
            self.is_out = False
            for listener, turn in self._turns.items():
                self._hub.watch(listener.fileno(), EVENTS, turn)

    def try_now(self) -> None:
        """Accept the connections that wait, `ACCEPT_MAX` of a socket at most.

        Some may have woken this process and no other.
        """
        for turn in list(self._turns.values()):
            turn(0)

    def give_way(self) -> None:
        """Leave the next connection to a peer, if any waits for it."""
        if not self.is_out:
            for listener in self._turns:
                self._to_the_end(listener)

    def retire(self) -> None:
        """Accept the connections that wait, and none after that: peers accept the rest."""
        self._go_out()
        self.try_now()
        self.stop()

    def stop(self) -> None:
        """Accept nothing from now on. Harmless where that was said before."""
        self._go_out()
        self._turns = {}

    def _has_enough(self) -> bool:
        peers = self._peers
        return peers is not None and stays_out(self._counts.total, peers.connections, is_fewest=peers.is_fewest)

    def _go_out(self) -> None:
        """Remove the sockets from the epoll, before they are closed: an entry outlives its descriptor."""
        self.is_out = True
        for listener in self._turns:
            self._hub.forget(listener.fileno())

    def _turn(self, listener: socket.socket, _events: int) -> None:
        accepted = 0
        while accepted < ACCEPT_MAX:
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                break
            except OSError as error:
                log.error("cannot accept: %s", error)
                self._pause()
                return
            accepted += 1
            self._accepted(sock, address)
        if accepted and not self.is_out:
            self._to_the_end(listener)

    def _to_the_end(self, listener: socket.socket) -> None:
        """Go to the end of the list of the processes that wait for this socket, or out of all lists."""
        if self._peers is not None and self._has_enough():
            self.update()
        else:
            fd = listener.fileno()
            self._hub.forget(fd)
            self._hub.watch(fd, EVENTS, self._turns[listener])

    def _pause(self) -> None:
        """Accept nothing for `ACCEPT_RETRY_S`: there may be no descriptor left."""
        self._go_out()
        self._is_paused = True
        self._failed()
