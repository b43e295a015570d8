"""Calls at given times, all from a single task."""

import heapq
import itertools
import logging
import math
from collections.abc import Callable

import attrs
import trio

from ichat.listeners import Listeners

log = logging.getLogger(__name__)


@attrs.define(eq=False)
class Timer:
    """A call that is due at a time of Trio's clock."""

    call: Callable[[], None] | None

    def cancel(self) -> None:
        """Do not call; harmless afterwards."""
        self.call = None


class Timers:
    """The calls that are due, at a time or in the next turn of this task."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._changed: Listeners[[]] = Listeners()

    def __repr__(self) -> str:
        return f"<Timers {len(self._due)}>"

    def at(self, deadline: float, call: Callable[[], None]) -> Timer:
        """Call a function at a time of Trio's clock, unless the timer is cancelled before."""
        timer = Timer(call)
        heapq.heappush(self._due, (deadline, next(self._numbers), timer))
        if self._due[0][2] is timer:
            self._changed()
        return timer

    def soon(self, call: Callable[[], None]) -> Timer:
        """Call a function in the next turn."""
        return self.at(-math.inf, call)

    async def run_forever(self) -> None:
        """Make the calls. A bug in a call is logged, and ends nothing."""
        while True:
            with trio.move_on_at(self._due[0][0] if self._due else math.inf):
                await self._changed.wait()
            now = trio.current_time()
            while self._due and self._due[0][0] <= now:
                self._run(heapq.heappop(self._due)[2])

    def _run(self, timer: Timer) -> None:
        call, timer.call = timer.call, None
        try:
            if call is not None:
                call()
        except Exception:
            log.exception("a bug in a call at its time")
