"""The hub: a single epoll object for all sockets with events that must cost little.

A Trio task that waits for a socket costs a registration, a wake-up and a scheduling for every chunk. The hub waits once
for all sockets, where Trio would wait (`trio_wait.py`), and calls a plain function for each that is ready. Where Trio
does not allow that, it watches the hub as a single descriptor, and a task serves it. Registrations are persistent and
edge-triggered: a function is called when something new arrives, not again for bytes that it left unread (`rearm`).
"""

import logging
import select
from collections.abc import Callable
from typing import Protocol

import trio

from ichat.http import trio_wait
from ichat.listeners import Listeners

log = logging.getLogger(__name__)

HANG_UP = select.EPOLLRDHUP | select.EPOLLET
"""The peer closed its end, or the connection broke (errors are always reported as well)."""
READABLE = select.EPOLLIN | HANG_UP
ENDED = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
"""Among the events that a function is called with: nothing will follow the bytes that can be read now."""

READY_MAX = 256
"""Sockets handled before tasks get their turn."""
SWEEP_S = 0.5
"""How often deadlines are compared with the clock, and so the longest delay until an expiry is noticed."""


class Timed(Protocol):
    """Something with a deadline that moves too often for a timer of its own."""

    deadline: float
    """On Trio's clock."""

    def expire(self) -> None:
        """Called once, when the deadline has passed. It must not block, nor raise."""
        ...


class Hub:
    """Calls a plain function when a socket is ready, and expires entries that have passed their deadline."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._ready: dict[int, Callable[[int], None]] = {}
        self._timed: set[Timed] = set()
        self._timed_again: Listeners[[]] = Listeners()
        """Called when there is an entry with a deadline, after there was none."""
        self._in_task = False
        self._soon: list[Callable[[], None]] = []
        self._clock = trio.current_time
        self.now = 0.0
        """Trio's clock at the start of the newest batch of events or sweep: for functions that the hub calls.

        It stands still while nothing happens and nothing is timed; all else uses `update_clock`.
        """

    def __repr__(self) -> str:
        return f"<Hub {len(self._ready)} sockets, {len(self._timed)} timed{', in a task' if self._in_task else ''}>"

    def watch(self, fd: int, events: int, ready: Callable[[int], None]) -> None:
        """Call ``ready(events)`` whenever the socket is ready, until ``forget``.

        It must not block, nor raise, nor set the deadline of a scope; it may cancel a scope, set an event, or start a
        task.
        """
        self._epoll.register(fd, events)
        self._ready[fd] = ready

    def direct(self, fd: int, ready: Callable[[int], None]) -> None:
        """Call another function from now on; harmless for a socket that is not watched."""
        if fd in self._ready:
            self._ready[fd] = ready

    def rearm(self, fd: int, events: int) -> None:
        """Call, in a later turn, also for bytes that are already there; harmless for a socket that is not watched."""
        if fd in self._ready:
            self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Stop watching, before the descriptor is closed; harmless for a socket that is not watched."""
        if self._ready.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def time(self, timed: Timed) -> None:
        """Start comparing this deadline with the clock."""
        if not self._timed:
            self._timed_again()
        self._timed.add(timed)

    def untime(self, timed: Timed) -> None:
        """Stop comparing this deadline; harmless if that was not started."""
        self._timed.discard(timed)

    def update_clock(self) -> float:
        """Set `now` to Trio's clock, and return it: for code that runs later than the batch's start."""
        self.now = now = self._clock()
        return now

    def soon(self, send: Callable[[], None]) -> None:
        """Call a function once, after the events and tasks of this turn: it sends the data that they have gathered.

        It must not raise. It is called at once where this hub does not see the end of a turn.
        """
        if self._in_task:
            send()
        else:
            self._soon.append(send)

    async def run_forever(self) -> None:
        """Serve events for as long as anything uses this hub."""
        async with trio.open_nursery() as nursery:
            self._clock = trio.lowlevel.current_clock().current_time
            self.update_clock()
            nursery.start_soon(self._sweep_forever)
            await trio_wait.serve_forever(self)
            self._in_task = True
            self._send_gathered()
            while True:
                await trio.lowlevel.wait_readable(self._epoll.fileno())
                self.serve(0)

    def serve(self, wait_s: float) -> int:
        """Wait for events, at most `wait_s`, call the functions of `READY_MAX` at most, and return for how many."""
        if self._soon:
            self._send_gathered()
        events = self._epoll.poll(wait_s, READY_MAX)
        self.update_clock()
        find = self._ready.get
        for fd, flags in events:
            ready = find(fd)
            if ready is None:
                continue
            try:
                ready(flags)
            except Exception:
                log.exception("a bug moving bytes, in %r; this socket is no longer watched", ready)
                self.forget(fd)
        if self._soon:
            self._send_gathered()
        return len(events)

    def _send_gathered(self) -> None:
        gathered, self._soon = self._soon, []
        for send in gathered:
            send()

    async def _sweep_forever(self) -> None:
        while True:
            while not self._timed:
                await self._timed_again.wait()
            await trio.sleep(SWEEP_S)
            now = self.update_clock()
            for timed in [timed for timed in self._timed if timed.deadline < now]:
                self._timed.discard(timed)
                try:
                    timed.expire()
                except Exception:
                    log.exception("a bug at the deadline of %r; this deadline is no longer watched", timed)
