"""The asyncio loop in which an engine serves: the calls of its application, and the end of both."""

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any

import attrs
import trio

from ichat import errors
from ichat.engines.asgi import Call
from ichat.engines.engine import Application
from ichat.engines.kept import KeptConnection


@attrs.frozen
class EngineTimes:
    """The times of an engine's thread, in seconds."""

    watch_s: float = 0.5
    """How often the engine is checked for being alive, besides before each request."""
    unnoticed_s: float = 10.0
    """The time in which an engine that died while it loaded may report it itself, with more detail."""
    fail_s: float = 2.0
    """The time in which requests may end by themselves after the engine has died."""
    abort_s: float = 10.0
    """The time in which an abandoned request may end before its connection is closed anyway."""
    change_s: float = 600.0
    """The limit for the engine to fall asleep, or to wake up; after that it is given up."""


TIMES = EngineTimes()


class EngineLoop:
    """The loop of the engine's thread. Its methods run on that loop; those of Trio's side say so."""

    def __init__(self, why_dead: Callable[[], str | None], times: EngineTimes = TIMES) -> None:
        """`why_dead` is the engine's; see `Engine.why_dead`."""
        self._why_dead = why_dead
        self._times = times
        self.app: Application | None = None
        """The engine's application while it serves requests."""
        self.failed_by: str | None = None
        """Why the engine is dead, once that is known."""
        self.stop_asked = False
        self.gives_back = False
        """Whether connections return to Trio after each response."""
        self.connections: dict[KeptConnection, trio.Event] = {}
        """The connections on this loop; the event returns a connection to Trio, which adds and removes them."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._context = contextvars.copy_context()
        """The context in which calls begin: without variables of Trio or of other calls."""
        self._calls: set[Call] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<EngineLoop with {len(self.connections)} connections and {len(self._calls)} calls>"

    @property
    def is_there(self) -> bool:
        """Whether the loop has begun. For any thread."""
        return self._stopping is not None

    def post(self, function: Callable[..., None], *args: object) -> None:
        """Run a function on the loop, unless that is closed. Called in Trio, once the loop has begun."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    def end(self) -> None:
        """Let `serve` return. Called in Trio, once the loop has begun."""
        assert self._stopping is not None
        self.post(self._stopping.set)

    def run_soon(self, function: Callable[[], Coroutine[Any, Any, None]], ended: Callable[[object], None]) -> None:
        """Run a function as a task, for `change_s` at most; `ended` gets the exception that ended it, or None.

        Called in Trio. `ended` is called on the loop, and not if the engine ends first.
        """

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                ended(task.exception())

        def start() -> None:
            limited = asyncio.wait_for(function(), self._times.change_s)
            task = self._context.copy().run(asyncio.get_running_loop().create_task, limited)
            self._tasks.add(task)
            task.add_done_callback(done)

        self.post(start)

    def start_call(self, call: Call, app: Application) -> None:
        """Start a call of the application."""
        call.start(app, self._calls, self._context.copy())

    def check_alive(self) -> str | None:
        """Return why the engine is dead, or None; a dead engine is ended."""
        assert self._stopping is not None
        self.failed_by = self.failed_by or self._why_dead()
        if self.failed_by is not None:
            self._stopping.set()
        return self.failed_by

    async def serve(self, app: Application | None, has_begun: Callable[[], None]) -> str | None:
        """Serve until the engine must end, and return None, or has died, and return why. Calls may be under way then.

        `has_begun` is called once requests can begin.
        """
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._stopping = asyncio.Event()
        self.app = app
        has_begun()
        while not self.stop_asked:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self._times.watch_s)
            for kept in tuple(self.connections):
                kept.check(self._loop.time())
            if not self.stop_asked and (why := self.check_alive()) is not None:
                return why
        return None

    def give_back_idle(self) -> None:
        """Return each connection to Trio that waits for a request."""
        for kept in tuple(self.connections):
            kept.give_back_idle()

    async def abandon_calls(self, failure: errors.ApiError) -> None:
        """Wait a moment for the calls under way, then end them with this failure."""
        self.give_back_idle()
        await self._wait_for_calls()
        for call in self._calls:
            call.abandon(failure)
        await self._wait_for_calls()

    async def _wait_for_calls(self) -> None:
        if self._calls:
            await asyncio.wait([call.task for call in self._calls], timeout=self._times.fail_s)
