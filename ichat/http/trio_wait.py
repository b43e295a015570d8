"""Waiting for sockets in the place where Trio waits.

Trio's epoll becomes an entry of ours. Where Trio would wait on its own, it waits on ours, and the events are served
there, without a task, until Trio has something to do. So an event costs an `epoll_wait`, and nothing of Trio's.

Trio has no public place for this: an instrument can wait before Trio does, but not instead. All use of its private
parts is in this module, and `private_parts` checks that they are as this module knows them.
"""

import collections
import logging
import select
from collections.abc import Callable
from typing import Any, Protocol

import attrs
import trio

log = logging.getLogger(__name__)


class TrioDiffersError(Exception):
    """This run of Trio cannot wait on another epoll; the text says why."""


@attrs.frozen
class PrivateParts:
    """Trio's private parts, of the current run."""

    runner: Any
    """Calls `io_manager.get_events(timeout)` for each wait."""
    io_manager: Any
    """Trio's own."""
    epoll: select.epoll
    """The epoll on which Trio waits."""
    runnable: "collections.deque[trio.lowlevel.Task]"
    """The tasks that get a turn next."""


class Events(Protocol):
    """An epoll, and the work for its events."""

    def watch(self, fd: int, events: int, ready: Callable[[int], None]) -> None:
        """Call ``ready(events)`` whenever the descriptor is ready, until ``forget``."""
        ...

    def forget(self, fd: int) -> None:
        """Stop watching the descriptor."""
        ...

    def serve(self, wait_s: float) -> int:
        """Wait for events, at most `wait_s`, serve a bounded number of them, and return how many."""
        ...


def private_parts() -> PrivateParts:
    """Return the parts of the current run. Raises TrioDiffersError where they are not what this module was made for."""
    try:
        from trio._core._io_epoll import EpollIOManager
        from trio._core._run import GLOBAL_RUN_CONTEXT, SystemClock

        runner = GLOBAL_RUN_CONTEXT.runner
        if runner.is_guest:
            raise TrioDiffersError("another loop waits for it")
        if not isinstance(runner.clock, SystemClock):
            raise TrioDiffersError("its clock is not the system's")
        manager, runnable = runner.io_manager, runner.runq
        if isinstance(manager, _HubFirst):
            raise TrioDiffersError("another hub is served in its wait")
        if not isinstance(manager, EpollIOManager) or not isinstance(manager._epoll, select.epoll):
            raise TrioDiffersError("it does not wait on an epoll of its own")
        if not isinstance(runnable, collections.deque):
            raise TrioDiffersError("it keeps its runnable tasks in another way")
        return PrivateParts(runner, manager, manager._epoll, runnable)
    except (ImportError, AttributeError) as error:
        raise TrioDiffersError(f"Trio {trio.__version__} has changed: {error}") from error


async def serve_forever(events: Events) -> None:
    """Serve events where Trio would wait; return at once where that cannot be."""
    try:
        parts = private_parts()
    except TrioDiffersError as error:
        log.info("the hub is served by a task of its own: %s", error)
        return
    fd = parts.epoll.fileno()
    manager = _HubFirst(parts, events)
    events.watch(fd, select.EPOLLIN, manager.on_own_event)
    parts.runner.io_manager = manager
    try:
        await trio.sleep_forever()
    finally:
        parts.runner.io_manager = parts.io_manager
        events.forget(fd)


class _HubFirst:
    """Trio's own I/O manager, but for its wait."""

    def __init__(self, parts: PrivateParts, events: Events) -> None:
        self._own = parts.io_manager
        self._get_own_events = parts.io_manager.get_events
        self._runnable = parts.runnable
        self._serve = events.serve
        self._now = parts.runner.clock.current_time
        self._has_own = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._own, name)
        setattr(self, name, found)
        return found

    def on_own_event(self, _events: int) -> None:
        """Called when something has happened that Trio waits for."""
        self._has_own = True

    def get_events(self, timeout: float) -> list[tuple[int, int]]:
        """Return the events that Trio waits for, after `timeout` at most.

        As Trio demands, the list is empty only if the time is over or a task is runnable.
        """
        self._has_own = False
        until = self._now() + timeout if timeout > 0 else 0.0
        served = self._serve(timeout)
        while served and not self._has_own and not self._runnable:
            rest_s = until - self._now()
            if rest_s <= 0:
                self._own.force_wakeup()  # or Trio would assume that nothing happened in this time
                self._has_own = True
                break
            served = self._serve(rest_s)
        return self._get_own_events(0) if self._has_own else []
