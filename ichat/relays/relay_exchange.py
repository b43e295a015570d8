"""The requests of a client at its relay: each asks, carries out the steps of the owner, and reports their outcomes."""

from collections.abc import Coroutine
from typing import Any, TypeVar

import trio

from ichat import errors
from ichat.errors import ApiError
from ichat.http.request import Request
from ichat.http.request_ids import REQUEST_ID
from ichat.http.server import Client, next_request
from ichat.proxy.client_sink import end_cancelled
from ichat.proxy.leg import Leg
from ichat.proxy.refusals import Failure
from ichat.proxy.steps import ANSWERED, Outcome
from ichat.proxy.token_usage import ReportedUsage
from ichat.relays.frame_desk import Asking
from ichat.relays.relay_request import RelayParts, RelayRequest
from ichat.relays.request_frames import ENDS
from ichat.relays.values import Frame, Refused, SentOutcome, SentStep, WaitsFor

ResultT = TypeVar("ResultT")


def at_once(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT | None:
    """Return the value of a coroutine that needs no wait; None: it was broken off where it would wait.

    All its exceptions are raised.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    return None


class _NothingYet:
    """A response of which nothing has arrived."""

    bytes_out = chunks = 0
    first_at: float | None = None


_NOTHING_YET = _NothingYet()


def _lacks_usage(leg: Leg) -> bool:
    """Return whether a whole stream lacks the tokens that its engine reports."""
    return leg.is_stream and isinstance(leg.usage, ReportedUsage) and not leg.usage.has_arrived


class RelayExchange(Asking):
    """A client's requests for models: a request, and those that the hub begins after it without a turn of the task."""

    def __init__(self, parts: RelayParts, request: Request, client: Client) -> None:
        super().__init__()
        self._parts = parts
        self._begin_request(RelayRequest(parts, request, client))

    def __repr__(self) -> str:
        return f"<RelayExchange {self.progress!r}>"

    def _begin_request(self, request: RelayRequest) -> None:
        self._request, self.progress = request, request.progress
        self._is_cancelled = self._is_over = False
        self._trying: SentStep | None = None
        """The attempt that the hub has begun without this request's task."""

    async def forward(self) -> None:
        """Have the request answered. Raises ApiError if nothing has been sent."""
        desk = self._parts.desk
        asked = await self._request.read()
        try:
            desk.begin(asked, self)
        except ApiError as error:
            self._request.record(error)
            raise
        del asked
        try:
            await self._follow()
        except trio.Cancelled:
            if self._is_cancelled and not self.progress.client.has_left:
                await end_cancelled(self.progress, desk.cancel_error())  # noqa: ASYNC102 it has a shield with a bound
            raise
        finally:
            desk.end(self)

    @property
    def leg(self) -> Leg | None:
        """See `Asking`."""
        return self.progress.leg

    def cancel(self) -> None:
        """See `Asking`."""
        self._is_cancelled = True
        self.progress.client.scope.cancel()

    def comment(self, text: bytes) -> None:
        """See `Asking`."""
        self._request.comment(text)

    # The next request.

    def _wait_for_next(self) -> None:
        """Have the hub begin the client's next request; wake the task if that request may have arrived already."""
        client, task = self.progress.client, self._task
        if task is None or not client.keep_alive or not client.reader.wait_ahead(task, self._begin_next):
            self.wake()

    def abandon(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        """See `Asking`."""
        self.progress.client.reader.end_wait_ahead()
        return super().abandon(_raise_cancel)

    def _begin_next(self) -> bool:
        """Called in the hub's turn when bytes have arrived: begin the next request, or wake the task to read it.

        Return False if the reader must wake the task.
        """
        client, task = self.progress.client, self._task
        taken = None if task is None or self._parts.link.is_behind else next_request(client)
        if task is None or taken is None:
            return False
        request, data = taken
        if self._ask_for(RelayRequest(self._parts, request, client)):
            task.context.run(REQUEST_ID.set, request.id)
        else:
            client.reader.unread(data)
            self.wake()
        return True

    def _ask_for(self, request: RelayRequest) -> bool:
        """Ask for a further request; return False, and leave no trace, if the request needs the task."""
        try:
            asked = at_once(request.read_known())
            if asked is None:
                return False
            self._parts.desk.begin(asked, self)
        except Exception:  # the task meets it as well
            return False
        if self.progress.keepalive is not None:
            self.progress.keepalive.stop()
        self._begin_request(request)
        if request.progress.keepalive is not None:
            request.progress.keepalive.start()
        return True

    # The loop.

    async def _follow(self) -> None:
        """Carry out the owner's steps until the request has ended. Raises ApiError if nothing has been sent."""
        if self.progress.keepalive is not None:
            self.progress.keepalive.start()
        try:
            while not self._is_over:
                frame = await self._next()
                if isinstance(frame, SentStep):
                    await self._attempt(frame)
                elif isinstance(frame, Refused):
                    raise frame.refuse.failure.error()
                elif not isinstance(frame, WaitsFor) and not self._is_over:
                    raise errors.owner_away()
        except ApiError as error:
            progress = self.progress
            if progress.keepalive is None or not progress.keepalive.has_begun:
                raise
            await progress.client.end_with_event(error.event(progress.path))
        finally:
            if self.progress.keepalive is not None:
                self.progress.keepalive.stop()

    async def _next(self) -> Frame | None:
        """Return the owner's next frame, or the step of an attempt that needs this task; None: the request is over."""
        try:
            frame = await self.wait()
        except trio.Cancelled:
            trying, leg = self._trying, self.progress.leg
            if trying is not None and leg is not None:
                leg.abandon()
                self.progress.note_end_of(leg)
                self._report(trying, self._cut(trying), leg)
            raise
        return frame or self._trying

    def begin(self, sent: SentStep) -> bool:
        """See `Asking`: the response may be moved, and the outcome reported, without the task too."""
        try:
            leg = at_once(self._request.make_leg(sent))
        except Exception:  # the task meets it as well
            return False
        if leg is None:
            return False
        self._trying = sent
        if not leg.begin(self._changed):
            self.wake()
        return True

    def _changed(self) -> None:
        """Called in the hub's turn when the response is whole, or needs the task."""
        sent, leg = self._trying, self.progress.leg
        assert sent is not None
        assert leg is not None
        try:
            if leg.end():
                self._trying = None
                self.progress.note_end_of(leg)
                self._report(sent, Outcome("answered", sent.step.endpoint, status=leg.status), leg)
        finally:
            if self._is_over:
                self._wait_for_next()
            else:
                self.wake()

    async def _attempt(self, sent: SentStep) -> None:
        """Carry out an attempt, or the rest of it, and report its outcome."""
        progress, step = self.progress, sent.step
        outcome, leg = Outcome("broken", step.endpoint), None
        try:
            if self._trying is None:
                await self._request.make_leg(sent)
            self._trying, leg = None, progress.leg
            assert leg is not None
            try:
                outcome = await leg.run()
            finally:
                progress.note_end_of(leg)
            if outcome is ANSWERED:
                outcome = Outcome("answered", step.endpoint, status=leg.status)
        except ApiError as error:
            outcome = Outcome("unfit", step.endpoint, Failure.of(error))
        except trio.Cancelled:
            outcome = self._cut(sent)
            raise
        finally:
            self._report(sent, outcome, leg)

    def _cut(self, sent: SentStep) -> Outcome:
        """Return the outcome of an attempt that was cut off."""
        progress = self.progress
        kind = "cancelled" if self._is_cancelled and not progress.client.has_left else "left"
        return Outcome(kind, sent.step.endpoint, why=progress.phase, status=progress.status)

    def _report(self, sent: SentStep, outcome: Outcome, leg: Leg | None) -> None:
        """Report the outcome of an attempt."""
        parts, clock = self._parts, self._parts.clock
        wants_next, now = outcome.kind not in ENDS, clock.ns_of(parts.pool.hub.update_clock())
        if not wants_next:
            self._is_over = True
            parts.desk.end(self)
        if leg is None:
            seq = parts.desk.next_seq
            parts.desk.report(SentOutcome(sent.number, sent.attempt, seq, outcome, wants_next, ended_at=now))
            return
        usage, received = leg.usage, leg.relay.body if leg.relay is not None else _NOTHING_YET
        parts.desk.report(SentOutcome(
            sent.number, sent.attempt, parts.desk.next_seq,
            outcome if outcome.status else outcome._replace(status=leg.status),
            wants_next, clock.ns_of_event(leg.asked_at), clock.ns_of_event(leg.answered_at), now, received.bytes_out,
            received.chunks, self._request.used_tokens(sent.ticket), leg.error, sent.key, sent.step.model,
            is_stream=leg.is_stream, tells_cached=usage is not None and usage.tells_cached,
            body_at=clock.ns_of_event(received.first_at),
            has_lost_usage=outcome.kind == "answered" and _lacks_usage(leg),
        ))  # fmt: skip
