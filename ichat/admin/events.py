"""The event stream: the gateway's state as a whole, then its changes, for each follower.

A single task makes the bytes, once for all followers. It runs only while there are followers, and compares the state
with the state before: no request waits for it.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, NoReturn, TypeVar

import attrs
import trio
from typing_extensions import Self

from ichat.admin.changes import ToldMarks, marks_of_model, marks_of_worker
from ichat.admin.lists import Pieces, joined, to_json
from ichat.admin.overview import Overview
from ichat.admin.reload import Reloader
from ichat.admin.views import GatewayView
from ichat.fleet.views import summarize
from ichat.http import sse
from ichat.listeners import Listeners
from ichat.observability.history import Sample
from ichat.observability.usage.ledger import Ledger

GATHER_S = 0.25
"""The least time between two looks, in seconds."""
LOOK_S = 1.0
"""Seconds between two looks at figures, and at states that change by the clock alone."""
REST_RATIO = 30
"""After a look the task rests this many times the look's duration, so that it uses at most 3 % of a core."""
MACHINES_S = 5.0
"""Seconds between two looks at machines; their own reports are at least twice as far apart."""
AT_ONCE = 16
"""Look at this many things before other tasks run: about 0.3 ms."""
BEHIND_BYTES_MAX = 4 * 1024 * 1024
"""The most bytes of changes that wait for a follower; beyond that it gets the whole state again instead."""
BLOCK_BYTES = 64 * 1024
"""The size of the pieces that a follower gets, about."""
KEEP_ALIVE_S = 15.0
"""Seconds without an event after which a follower gets a comment."""


class Follower:
    """A client of the stream: it gets the state, then changes, until the gateway ends."""

    def __init__(self, streams: "EventStreams", *, wants_requests: bool, behind_bytes_max: int) -> None:
        self._streams = streams
        self._behind_bytes_max = behind_bytes_max
        self.wants_requests = wants_requests
        """Whether it gets the requests in flight."""
        self.wants_state = True
        """Whether it waits for the state as a whole."""
        self._keeps_changes = False
        """Whether changes follow the state that it waits for: the state is being read."""
        self._state: deque[bytes] = deque()
        """The rest of that."""
        self._changes: deque[bytes] = deque()
        self._changes_bytes = 0
        self._is_behind = False
        """Whether changes were dropped, so that it needs the whole state again."""
        self.arrived: Listeners[[]] = Listeners()
        """Called when there is something to send, or the streams end."""

    def __repr__(self) -> str:
        return f"<Follower, {len(self._state)} pieces and {self._changes_bytes} bytes behind>"

    def expect_state(self) -> None:
        """Keep changes from now on: the state is being read, and may not have them."""
        self._keeps_changes, self._is_behind = True, False

    def begin(self, state: Iterable[bytes]) -> None:
        """Send it the state in these pieces, and then the changes since `expect_state`."""
        self._state.extend(state)
        self.wants_state = self._keeps_changes = False
        self.arrived()

    def put(self, event: bytes) -> None:
        """Send it a change, unless the whole state will have it."""
        if (self.wants_state and not self._keeps_changes) or self._is_behind:
            return
        self._changes.append(event)
        self._changes_bytes += len(event)
        if self._changes_bytes > self._behind_bytes_max:
            self._changes.clear()
            self._changes_bytes, self._is_behind = 0, True
        self.arrived()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        goes_on = False
        try:
            block = await self._wait_block()
            goes_on = True
            return block
        finally:
            if not goes_on:
                self._streams.forget(self)

    async def _wait_block(self) -> bytes:
        """Return the next events, or a comment after `KEEP_ALIVE_S`. Raises StopAsyncIteration."""
        while True:
            await trio.lowlevel.checkpoint()
            if block := self._next():
                return block
            if self._streams.is_ending:
                raise StopAsyncIteration
            if self._is_behind and not self.wants_state:
                self.wants_state = True
                self._streams.ask()
            with trio.move_on_after(KEEP_ALIVE_S) as waiting:
                await self.arrived.wait()
            if waiting.cancelled_caught:
                return sse.COMMENT

    def _next(self) -> bytes:
        """Return the next whole events, or a piece of the state; empty if there are none."""
        found, size = list[bytes](), 0
        while (self._state or (self._changes and not self.wants_state)) and size < BLOCK_BYTES:
            if self._state:
                piece = self._state.popleft()
            else:
                piece = self._changes.popleft()
                self._changes_bytes -= len(piece)
            found.append(piece)
            size += len(piece)
        return b"".join(found)


class EventStreams:
    """All followers, and the task that sends to them."""

    def __init__(
        self, overview: Overview, ledger: Ledger, reloader: Reloader, *, behind_bytes_max: int = BEHIND_BYTES_MAX
    ) -> None:
        self._behind_bytes_max = behind_bytes_max
        self._overview = overview
        self._ledger = ledger
        self._reloader = reloader
        self._followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        """Weak, since a follower does not notice that its client leaves between two pieces."""
        self._has_news = False
        """Whether something has changed since the last look."""
        self._woken: Listeners[[]] = Listeners()
        self._asked: Listeners[[]] = Listeners()
        """Called when a follower wants the state."""
        self.is_ending = False
        """Whether the streams end after their present events."""
        self._kinds = (
            _Kind("workers", "changed", self._read_workers),
            _Kind("models", "models", self._read_models),
            _Kind("machines", "machines", self._read_machines),
        )
        self._told_gateway: GatewayView | None = None
        """The gateway as it was sent last, without times."""
        self._told_lanes = False
        """Whether the last look had lanes."""
        self._figures_at = self._machines_at = 0.0
        """When the task looks at figures, and at machines, again."""
        overview.history.sampled.add(self._send_sample)

    def __repr__(self) -> str:
        return f"<EventStreams of {len(self._followers)} followers>"

    def follow(self, *, wants_requests: bool) -> Follower:
        """Return a new follower."""
        follower = Follower(self, wants_requests=wants_requests, behind_bytes_max=self._behind_bytes_max)
        self._followers.add(follower)
        self.ask()
        return follower

    def forget(self, follower: Follower) -> None:
        """Forget a follower after its client has disconnected."""
        self._followers.discard(follower)

    def close(self) -> None:
        """Let all streams end: the gateway stops."""
        self.is_ending = True
        for follower in list(self._followers):
            follower.arrived()

    def wake(self) -> None:
        """Look at everything soon."""
        self._has_news = True
        self._woken()

    def ask(self) -> None:
        """Look at once, since a follower wants the state."""
        self.wake()
        self._asked()

    def send_to_all(self, name: str, data: object) -> None:
        """Send all followers an event at once."""
        if self._followers:
            _put(sse.encode(to_json(data), name=name), self._followers)

    def _send_sample(self, sample: Sample) -> None:
        if self._followers:
            self.send_to_all("sample", {**sample.describe(), "usage_storage": self._ledger.storage})

    def send_reload(self, summary: str) -> None:
        """Send all followers that another configuration is in force."""
        self.send_to_all("reloaded", {"summary": summary, "at": round(time.time(), 3)})

    async def run_forever(self) -> NoReturn:
        """Send changes while there are followers."""
        while True:
            while not self._followers:
                await self._asked.wait()
            changed = self._overview.table.changed
            changed.add(self.wake)
            try:
                while self._followers:
                    await self._look_and_rest()
            finally:
                changed.remove(self.wake)
                self._overview.lanes.stop()
                for kind in self._kinds:
                    kind.told.clear()

    async def _look_and_rest(self) -> None:
        """Look once, and wait until the next look is due or asked for."""
        self._has_news, began_at = False, trio.current_time()
        await self._look()
        rest_s = max(GATHER_S, REST_RATIO * (trio.current_time() - began_at))
        with trio.move_on_after(LOOK_S):
            while not self._has_news:
                await self._woken.wait()
        with trio.move_on_after(rest_s):
            while not any(one.wants_state for one in self._followers):
                await self._asked.wait()

    async def _look(self) -> None:
        """Send followers the changes, and new followers the whole state."""
        now = trio.current_time()
        with_figures, with_machines = now >= self._figures_at, now >= self._machines_at
        if with_figures:
            self._figures_at = now + LOOK_S
        if with_machines:
            self._machines_at = now + MACHINES_S
        has_readers = any(not one.wants_state for one in self._followers)
        for kind in self._kinds if with_machines else self._kinds[:-1]:
            event = await kind.next_event(with_figures=with_figures, is_wanted=has_readers)
            if event is not None:
                _put(event, self._followers)
        if with_figures:
            self._send_gateway()
            self._send_requests()
            await self._send_lanes()
        await self._send_state()

    def _send_gateway(self) -> None:
        """Send the gateway's process and its relays, if more than times has changed."""
        view = self._overview.gateway()
        relays = [attrs.evolve(one, age_s=0.0, cpu_s=0.0) for one in view.relays]
        marks = attrs.evolve(view, uptime_s=0.0, relays=relays)
        if marks != self._told_gateway:
            self._told_gateway = marks
            self.send_to_all("gateway", view)

    def _send_requests(self) -> None:
        curious = [one for one in self._followers if one.wants_requests]
        if curious:
            _put(sse.encode(to_json(self._overview.in_flight.view()), name="requests"), curious)

    async def _send_lanes(self) -> None:
        """Send the lanes since the last look, unless there are none again."""
        found = await self._overview.lanes.read()
        if found.lanes or self._told_lanes:
            self.send_to_all("lanes", found)
        self._told_lanes = bool(found.lanes)

    async def _send_state(self) -> None:
        """Send the whole state to the followers that want it."""
        waiting = [one for one in self._followers if one.wants_state]
        for follower in waiting:
            follower.expect_state()
        if waiting:
            pieces = [piece async for piece in Pieces(self._state())]
            for follower in waiting:
                follower.begin([b"event: state\ndata: ", *pieces, b"\n\n"])

    def _state(self) -> Iterator[str]:
        """Return the whole state as JSON in parts. All followers know the same gateway then."""
        self._send_gateway()
        overview = self._overview
        short = {
            "gateway": overview.gateway(),
            "config": self._reloader.state,
            "aliases": overview.names(),
            "usage_storage": self._ledger.storage,
        }
        yield f'{to_json(short)[:-1]}, "history": '
        yield from overview.history.parts(workers=())
        for kind in self._kinds:
            yield f', "{kind.name}": ['
            state: dict[str, tuple[object, object]] = {}
            yield from joined(to_json(one.view) for one in kind.read_into(state))
            kind.told.note_state(state)
            yield "]"
        yield "}"

    def _read_workers(self) -> Iterator["_Marked"]:
        for worker in self._overview.table:
            view = summarize(self._overview.table, worker)
            yield _Marked(worker.id, view, marks_of_worker(view, worker))

    def _read_models(self) -> Iterator["_Marked"]:
        for view in map(self._overview.model, sorted(self._overview.directory.names())):
            yield _Marked(view.id, view, marks_of_model(view))

    def _read_machines(self) -> Iterator["_Marked"]:
        for view in self._overview.machines():
            yield _Marked(view.machine.id, view, (view, None))


class _Marked(NamedTuple):
    """A thing that followers see: its id, its view, and its facts and figures."""

    id: str
    view: object
    marks: tuple[object, object]


@attrs.define(eq=False)
class _Kind:
    """A kind of things that followers see."""

    name: str
    """Of the event about changes, and of the list in the state."""
    key: str
    """Of the changed things in the event."""
    read: Callable[[], Iterator[_Marked]]
    told: ToldMarks = attrs.field(factory=ToldMarks)

    def read_into(self, marks: dict[str, tuple[object, object]]) -> Iterator[_Marked]:
        """Yield the things, and note their marks by their ids."""
        for one in self.read():
            marks[one.id] = one.marks
            yield one

    async def next_event(self, *, with_figures: bool, is_wanted: bool) -> bytes | None:
        """Return the event about the changes since the last look; None if there are none, or no follower wants it."""
        things = {one.id: one for one in await _in_turns(self.read())}
        changed, gone = self.told.find({key: one.marks for key, one in things.items()}, with_figures=with_figures)
        if not is_wanted or not (changed or gone):
            return None
        texts = await _in_turns(to_json(things[key].view) for key in changed)
        return sse.encode(f'{{"{self.key}": [{", ".join(texts)}], "gone": {to_json(gone)}}}', name=self.name)


def _put(event: bytes, followers: Iterable[Follower]) -> None:
    for follower in list(followers):
        follower.put(event)


_Item = TypeVar("_Item")


async def _in_turns(items: Iterable[_Item]) -> list[_Item]:
    """Return the items as a list; other tasks run between every `AT_ONCE` of them."""
    found = list[_Item]()
    for number, item in enumerate(items, start=1):
        found.append(item)
        if number % AT_ONCE == 0:
            await trio.lowlevel.checkpoint()
    return found
