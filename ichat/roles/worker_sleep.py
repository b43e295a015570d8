"""The sleep of a worker's engine: the worker stays, and the engine gives the memory of its GPUs back until it wakes.

The engine is put to sleep only while it has no requests. From then on until it is awake, new requests are refused
with 503: so the gateway knows that they were not worked on.
"""

import functools
import logging
from collections.abc import Callable
from typing import cast

import attrs
import trio

from ichat.engines.engine import Engine, Sleeper
from ichat.engines.thread import EngineThread
from ichat.errors import ApiError, engine_busy
from ichat.listeners import wait_any
from ichat.protocol.messages import WorkerState

log = logging.getLogger(__name__)

IDLE_S, IDLE_POLL_S = 1.0, 0.02
"""The time in which requests may still end: clients have a response before the engine has ended the request."""
_FALLING_ASLEEP, _ASLEEP, _WAKING_UP = "falling asleep", "asleep", "waking up"
_STATES: dict[str, WorkerState] = {_FALLING_ASLEEP: "draining", _ASLEEP: "asleep", _WAKING_UP: "waking"}


@attrs.define(eq=False)
class _Change:
    """A change of the engine that is under way, between asleep and awake."""

    before: str
    after: str
    ended: trio.Event = attrs.field(factory=trio.Event)
    refusal: ApiError | None = None
    """Why the engine did not do it, if nothing has changed."""


class WorkerSleep:
    """Puts the engine of a worker to sleep, and wakes it up: changes never overlap."""

    def __init__(self, engine: Engine, thread: EngineThread, changed: Callable[[], None]) -> None:
        """`changed` is called when the state has changed."""
        self._engine = engine
        self._thread = thread
        self._admission = thread.admission
        self._changed = changed
        self._under_way: _Change | None = None

    def __repr__(self) -> str:
        return f"<WorkerSleep: {self._admission.closed or 'awake'}>"

    @property
    def state(self) -> WorkerState:
        """The state of a worker with an engine that serves."""
        return _STATES.get(self._admission.closed, "ready")

    def why_not(self) -> str:
        """Return why the engine cannot sleep, as a clause; empty if it can."""
        info = self._thread.info
        return "its arguments are not read yet" if info is None else info.why_no_sleep

    async def sleep(self) -> None:
        """Let the engine give its memory back; return when it has.

        Raises ApiError 409 if it cannot, or has requests, 503 if it is not there. The client may disconnect meanwhile.
        """
        until = trio.current_time() + IDLE_S
        while await self._is_awake():
            if why := self.why_not():
                raise ApiError(409, "cannot_sleep", f"The engine cannot sleep: {why}.", retry=False)
            busy = self._admission.close(_FALLING_ASLEEP)
            if not busy:
                await self._change("", _FALLING_ASLEEP, _ASLEEP)
                return
            if trio.current_time() >= until:
                raise engine_busy("The engine", busy)
            await trio.sleep(IDLE_POLL_S)

    async def wake(self) -> None:
        """Let the engine allocate its memory again; return when it is ready. Raises ApiError 503 if it is not there."""
        if not await self._is_awake():
            await self._change(_ASLEEP, _WAKING_UP, "")

    async def _is_awake(self) -> bool:
        """Return whether the engine is awake, once no change is under way. Raises ApiError 503 if it is not there."""
        while (change := self._under_way) is not None and not self._thread.ended.is_set():
            await wait_any(change.ended.wait, self._thread.ended.wait)
        self._thread.check_ready()
        return not self._admission.closed

    async def _change(self, before: str, during: str, after: str) -> None:
        """Change the state of the engine. The change goes on if the task that waits for it is cancelled."""
        sleeper = cast("Sleeper", self._engine)
        function = sleeper.wake if before else sleeper.sleep
        self._admission.closed = during
        change = self._under_way = _Change(before, after)
        self._changed()
        log.info("%s", during)
        self._thread.run_soon(function, functools.partial(self._end, change))
        await wait_any(change.ended.wait, self._thread.ended.wait)
        self._thread.check_ready()
        if change.refusal is not None:
            raise change.refusal

    def _end(self, change: "_Change", failure: object) -> None:
        """Note how a change has ended. An engine that failed may be without a part of its memory: it is given up."""
        during = self._admission.closed
        if isinstance(failure, ApiError):
            change.refusal, self._admission.closed = failure, change.before
        elif failure is not None:
            log.error("the engine failed while %s: %r", during, failure)
            self._thread.fail(self._engine.why_dead() or f"it failed while {during}: {failure!r}")
        else:
            log.info("%s", change.after or "awake")
            self._admission.closed = change.after
        if self._thread.info is not None and self._thread.info.held is not None:
            self._thread.info.held.set_asleep(is_asleep=self._admission.closed == _ASLEEP)
        self._under_way = None
        change.ended.set()
        self._changed()
