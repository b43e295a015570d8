"""A relay's side of decisions: the requests that ask the owner, each woken by the frame that answers it."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import trio

from ichat import errors
from ichat.errors import ApiError
from ichat.proxy.leg import Leg
from ichat.proxy.steps import Outcome
from ichat.relays.endpoint_facts import endpoint_of
from ichat.relays.frames import OWN_BYTES_MAX, has_large_ask
from ichat.relays.link import whole
from ichat.relays.relay_talk import RelayTalk
from ichat.relays.values import (
    COPIES,
    Frame,
    MonotonicNs,
    Note,
    Refused,
    SentAsk,
    SentOutcome,
    SentStep,
    TalkError,
    TrioClock,
    WaitsFor,
)
from ichat.routing.endpoint import EndpointFacts

TOLD_MAX = 200
"""The number of requests of which operators see how far they have got."""


class Asking:
    """A request that asks. It has a single task."""

    def __init__(self) -> None:
        self.number = 0
        """Set when it asks."""
        self._answers: list[Frame | None] = []
        self._task: trio.lowlevel.Task | None = None
        """The task, while it waits."""

    @property
    def leg(self) -> Leg | None:
        """Its newest attempt; None: it has none."""
        return None

    def cancel(self) -> None:
        """Called when an operator cancels the request."""

    def comment(self, text: bytes) -> None:
        """Called with the text of a comment, for a stream that waits."""

    def begin(self, sent: SentStep) -> bool:
        """Called with a step while the task waits: return whether it has begun without the task."""
        del sent
        return False

    def answer(self, frame: Frame) -> None:
        """Wake the task with a frame, if it is needed for it."""
        if self._task is None or not isinstance(frame, SentStep) or not self.begin(frame):
            self.wake(frame)

    def wake(self, frame: Frame | None = None) -> None:
        """Wake the task with a frame, or without any."""
        self._answers.append(frame)
        task, self._task = self._task, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    async def wait(self) -> Frame | None:
        """Return the next answer; None if it was woken without any."""
        if not self._answers:
            self._task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self.abandon)
        return self._answers.pop(0) if self._answers else None

    def unread_step(self) -> SentStep | None:
        """Return the step that the task has not received: it was cancelled in the same turn."""
        for frame in self._answers:
            if isinstance(frame, SentStep):
                return frame
        return None

    def abandon(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        """Called when the task is cancelled while it waits."""
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED


class FrameDesk:
    """Asks the owner, and knows the endpoints that it has named."""

    def __init__(
        self,
        talk: RelayTalk,
        send: Callable[[Frame], None],
        now: Callable[[], MonotonicNs],
    ) -> None:
        """`send` sends a frame after a check of the order."""
        self._talk = talk
        self._send = send
        self._now = now
        self._last = 0
        self.asking: dict[int, Asking] = {}
        self.endpoints: dict[int, EndpointFacts] = {}
        """Endpoints by the owner's numbers."""
        self.cancel_error: Callable[[], ApiError] = errors.request_cancelled
        """Makes the error by which a cancelled request ends."""

    def __repr__(self) -> str:
        return f"<FrameDesk {len(self.asking)} asking, {len(self.endpoints)} endpoints>"

    def new_number(self) -> int:
        """Return a number that no request of this relay has."""
        self._last = self._last + 1 if self._last < COPIES - 1 else 1
        while not self._talk.requests.keys().isdisjoint((self._last, COPIES | self._last)):
            self._last += 1
        return self._last

    def begin(self, asked: SentAsk, asking: Asking) -> None:
        """Ask, and have `asking` get the answers; `end` must follow. Without an owner, the next is asked.

        Raises ApiError for an ask that is too large.
        """
        if has_large_ask(asked):
            raise errors.head_too_large(OWN_BYTES_MAX)
        asking.number = asked.number
        self.asking[asked.number] = asking
        for frame in self._talk.ask(asked, self._now()):
            self._send(frame)

    def begin_copy(self, number: int, content: Mapping[str, Any], asking: Asking) -> bool:
        """Ask for a copy of this request, and have `asking` get the answer; `end` must follow.

        Return False if there is no owner that knows the request.
        """
        frames = self._talk.sends(Note("shadow", number, content), self._now())
        if frames:
            asking.number = COPIES | number
            self.asking[asking.number] = asking
        for frame in frames:
            self._send(frame)
        return bool(frames)

    def end(self, asking: Asking) -> None:
        """Receive no more answers; a request that still asks leaves. Harmless the second time."""
        if self.asking.pop(asking.number, None) is None:
            return
        one = self._talk.requests.get(asking.number)
        step = asking.unread_step()
        if step is not None:
            self._report_left(step)
        elif one is not None and one.phase in ("head", "admitted", "asked"):
            self._say(Note("leave", asking.number))

    @property
    def next_seq(self) -> int:
        """The number of the next outcome."""
        return self._talk.next_seq

    def report(self, sent: SentOutcome) -> None:
        """Send the outcome of an attempt, which ends now; it has the next number."""
        for frame in self._talk.end(sent, sent.ended_at):
            self._send(frame)

    def send(self, frame: Frame) -> None:
        """Send another frame about a request."""
        self._say(frame)

    def _say(self, frame: Frame) -> None:
        for one in self._talk.sends(frame, self._now()):
            self._send(one)

    def receive(self, frame: Frame, *, has_effect: bool) -> None:
        """Use a frame of the owner about a request. Raises TalkError."""
        if isinstance(frame, SentStep | Refused | WaitsFor):
            asking = self.asking.get(frame.number)
            if asking is not None and has_effect:
                asking.answer(frame)
            elif isinstance(frame, SentStep):
                self._report_left(frame)
        elif isinstance(frame, Note):
            self._receive_note(frame)

    def _report_left(self, step: SentStep) -> None:
        """Report that the request has left before the step: nothing was sent."""
        outcome = Outcome("left", step.step.endpoint)
        self.report(SentOutcome(step.number, step.attempt, self.next_seq, outcome, ended_at=self._now()))

    def _receive_note(self, frame: Note) -> None:
        asking = self.asking.get(frame.number)
        if frame.kind == "endpoint":
            self.endpoints[whole(frame, "at")] = endpoint_of(frame.content)
        elif asking is None:
            pass
        elif frame.kind == "go":
            asking.answer(frame)
        elif frame.kind == "cancel":
            asking.cancel()
        elif frame.kind == "hint":
            asking.comment(str(frame.content.get("comment", "")).encode())

    def end_all(self, error: Callable[[], ApiError]) -> None:
        """Cancel all requests, and end them and later cancelled requests by this error: the process ends now."""
        self.cancel_error = error
        for asking in self.asking.values():
            asking.cancel()

    def drop_copies(self) -> None:
        """Drop the copies that the last owner has not answered: the next owner does not know of them."""
        for number, asking in self.asking.items():
            if number >= COPIES and number not in self._talk.requests:
                asking.answer(Note("gone"))

    def refuse_overdue(self, wait_ns: int) -> None:
        """Refuse the requests that have waited for a word of an owner for too long, or outlived too many of them."""
        now = self._now()
        for number in self._talk.overdue(now, wait_ns):
            for frame in self._talk.give_up(number, now, wait_ns):
                self._send(frame)
            asking = self.asking.get(number)
            if asking is not None:
                asking.answer(Note("gone"))

    def told(self, clock: TrioClock) -> Note | None:
        """Return how far the oldest requests have got with their endpoints; None if there are none."""
        rows: list[list[object]] = []
        for number, asking in itertools.islice(self.asking.items(), TOLD_MAX):
            leg = asking.leg
            if leg is not None:
                mover = None if leg.relay is None else leg.relay.body
                times = [None if at is None else clock.ns_of(at) for at in (leg.asked_at, leg.answered_at)]
                sizes = [0, 0] if mover is None else [mover.bytes_out, mover.chunks]
                rows.append([number, *times, leg.is_stream, leg.status, *sizes])
        return Note("told", 0, {"rows": rows}) if rows else None

    def endpoint(self, sent: SentStep) -> EndpointFacts:
        """Return the endpoint of a step. Raises TalkError."""
        found = self.endpoints.get(int(sent.address))
        if found is None:
            raise TalkError(f"The endpoint of the request {sent.number} was not named.")
        return found
