"""How an object hears of another's changes: its functions are called, or a task of it waits for the next news."""

from collections.abc import Awaitable, Callable
from typing import Generic, ParamSpec

import trio

_News = ParamSpec("_News")


class Listeners(Generic[_News]):
    """Functions that are called with each piece of news, in the order in which they were added."""

    def __init__(self) -> None:
        self._listeners: tuple[Callable[_News, object], ...] = ()
        self._heard: trio.Event | None = None
        """Set with the next piece of news, for all tasks that wait for that; None: none waits."""

    def __repr__(self) -> str:
        return f"<Listeners {len(self._listeners)}>"

    def add(self, listener: Callable[_News, object]) -> None:
        """Call a function from now on; a function that was added twice is called once."""
        if listener not in self._listeners:
            self._listeners = (*self._listeners, listener)

    def remove(self, listener: Callable[_News, object]) -> None:
        """Call it no longer. Raises KeyError for a function that is not there."""
        if listener not in self._listeners:
            raise KeyError(listener)
        self._listeners = tuple(one for one in self._listeners if one != listener)

    def __call__(self, *args: _News.args, **kwargs: _News.kwargs) -> None:
        """Call all of them, and wake the tasks that wait."""
        if self._heard is not None:
            self._heard.set()
            self._heard = None
        for listener in self._listeners:
            listener(*args, **kwargs)

    async def wait(self) -> None:
        """Wait for the next piece of news; earlier news does not count.

        So a task waits for a state in a loop, `while not lines: await added.wait()`: from the look at the state until
        this waits, nothing else runs.
        """
        if self._heard is None:
            self._heard = trio.Event()
        await self._heard.wait()


class Gate:
    """Lets tasks pass while it is open; those that arrive while it is closed wait until it opens."""

    def __init__(self) -> None:
        self.is_open = True
        self.opened: Listeners[[]] = Listeners()

    def __repr__(self) -> str:
        return f"<Gate {'open' if self.is_open else 'closed'}>"

    def close(self) -> None:
        """Let no task pass until `open`."""
        self.is_open = False

    def open(self) -> None:
        """Let all tasks pass."""
        self.is_open = True
        self.opened()

    async def wait_open(self) -> None:
        """Pass, at once if it is open."""
        while not self.is_open:
            await self.opened.wait()


async def wait_any(*waits: Callable[[], Awaitable[object]]) -> None:
    """Wait until the first of these returns, and cancel the others."""

    async def run(wait: Callable[[], Awaitable[object]]) -> None:
        await wait()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for wait in waits:
            nursery.start_soon(run, wait)
