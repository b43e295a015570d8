"""A request at a relay, as the process that decides knows it: its desk, and the relay's reports about its bytes."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import trio

from ichat.errors import ApiError
from ichat.fleet.waiting import LeaseWait
from ichat.http.heads import Headers, RequestHead
from ichat.http.keepalive import FIRST_S
from ichat.observability.access_log import shown_path
from ichat.observability.request_record import LABELS, OTHER, RESPONSE_PATH, ROUTES, RequestRecord
from ichat.protocol.usage import UsedTokens
from ichat.proxy.desk import Desk
from ichat.proxy.exchange import client_address
from ichat.proxy.model_request import Asked, Tried
from ichat.proxy.refusals import Failure
from ichat.proxy.steps import AttemptStep, Step, Wait
from ichat.relays.timers import Timer, Timers
from ichat.relays.values import (
    BACKGROUND,
    HEAD_ONLY,
    NEVER,
    STREAM,
    SUSPECT,
    UNKNOWN,
    Frame,
    Note,
    SentAsk,
    SentOutcome,
    TrioClock,
)
from ichat.routing.prefix_chain import PrefixSums


class Report(NamedTuple):
    """A relay's report about the newest attempt. Times are Trio's clock."""

    asked_at: float | None = None
    answered_at: float | None = None
    first_at: float | None = None
    is_stream: bool = False
    status: int = 0
    bytes_out: int = 0
    chunks: int = 0


class RequestAtRelay:
    """A request at a relay: the `Asker` of its desk, and `InFlight`."""

    __slots__ = (
        "_comments", "_comments_at", "_send", "_timer", "_timers", "asked", "attempt", "desk", "error", "go_on", "head",
        "status", "step", "told", "usage", "wait", "was_heard",
    )  # fmt: skip

    def __init__(
        self,
        asked: SentAsk,
        head: RequestHead,
        timers: Timers,
        send: Callable[[Frame], None],
        go_on: Callable[["RequestAtRelay", Step], None],
    ) -> None:
        """`go_on` is called with the next step after each wait."""
        self.asked = asked
        self.head = head
        self.go_on = go_on
        self.desk: Desk
        """Set by the caller."""
        self.attempt = len(asked.tried)
        """The number of the newest."""
        self.step: AttemptStep | None = None
        """The newest."""
        self.was_heard = False
        """Whether its response has begun."""
        self.told: Report | None = None
        self.status, self.error = 500, "internal_error"
        self._comments_at = math.inf
        """When the client gets a comment, if no response has begun: that of the gateway has the status 200 then."""
        self.usage: UsedTokens | None = None
        self.wait: LeaseWait | None = None
        """While it waits for a place."""
        self._timers = timers
        self._send = send
        self._timer: Timer | None = None
        """Of its wait."""
        self._comments: Timer | None = None

    def __repr__(self) -> str:
        return f"<RequestAtRelay {self.asked.id}, {self.phase}>"

    def expect_comments(self, interval_s: float) -> None:
        """Expect that the relay sends a stream's client comments at this interval; 0: none."""
        if self.is_stream and interval_s:
            self._comments_at = self.desk.started_at + interval_s

    def first_step(self) -> Step:
        """Return the first step. Raises ApiError."""
        asked = self.asked
        if not asked.model and is_about_response(asked):
            return self.desk.ask_holder(asked.method, self.head.path)
        bits = asked.bits
        return self.desk.ask(Asked(
            asked.model, asked.session, bits & STREAM != 0, asked.previous_response_id or None, bits & BACKGROUND != 0,
            bits & SUSPECT != 0, tuple(Tried(*row) for row in asked.tried),
        ))  # fmt: skip

    # For its desk: see `Asker`.

    def read_prefix(self) -> PrefixSums | None:
        """See `Asker`: the relay has read it."""
        asked = self.asked
        return PrefixSums(asked.prefix_bytes, asked.checksums, dict(asked.before)) if asked.checksums else None

    def prompt_bytes(self) -> int:
        """See `Asker`."""
        return self.asked.prompt_bytes

    def announce_load(self, text: Callable[[], bytes], interval_s: float) -> None:
        """See `Asker`: the relay gets the text of each comment."""
        if self.is_stream:
            self._comment(text, interval_s, FIRST_S)

    def _comment(self, text: Callable[[], bytes], interval_s: float, pause_s: float) -> None:
        """Send a comment, and the next after a pause: soon at first, later every interval."""
        self._send(Note("hint", self.asked.number, {"comment": text().decode()}))
        self._comments_at = min(self._comments_at, trio.current_time())
        again = partial(self._comment, text, interval_s, 2 * pause_s)
        self._comments = self._timers.at(trio.current_time() + min(pause_s, interval_s), again)

    def end_load(self) -> None:
        """See `Asker`."""
        if self._comments is not None:
            self._comments.cancel()

    # Waits.

    def begin_wait(self, step: Wait) -> None:
        """Wait without a task; `go_on` is called afterwards."""
        if step.kind != "place":
            self._timer = self._timers.at(trio.current_time() + step.seconds, self._end_pause)
            return
        self.wait = wait = self.desk.begin_wait(step.seconds, self._woken)
        if wait.is_over:
            self._woken()
        else:
            self._timer = self._timers.at(wait.deadline, self._expire)

    def end_waits(self) -> None:
        """Wait for nothing any more, and send no comments."""
        wait, self.wait = self.wait, None
        if wait is not None:
            self.desk.leave_queue(wait)
        if self._timer is not None:
            self._timer.cancel()
        self.end_load()

    def _woken(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._timers.soon(self._end_wait)

    def _expire(self) -> None:
        wait = self.wait
        if wait is None:
            return
        wait.expire()
        if wait.is_over:
            self._end_wait()
        else:
            self._timer = self._timers.at(wait.deadline, self._expire)

    def _end_wait(self) -> None:
        wait, self.wait = self.wait, None
        if wait is not None:
            self.go_on(self, self.desk.end_wait(wait))

    def _end_pause(self) -> None:
        self.go_on(self, self.desk.end_wait(None))

    # An attempt.

    def hear(self, status: int) -> None:
        """Note that the response of the newest attempt has begun."""
        if not self.was_heard and self.desk.lease is not None:
            self.was_heard = True
            self.desk.heard(status)

    def note(self, sent: SentOutcome, clock: TrioClock) -> None:
        """Note the facts of an outcome about the attempt."""
        status, self.usage = sent.outcome.status, sent.usage
        self.told = Report(
            clock.trio_of_event(sent.asked_at), clock.trio_of_event(sent.first_at), clock.trio_of_event(sent.body_at),
            sent.is_stream, status, sent.bytes_out, sent.chunks,
        )  # fmt: skip
        if sent.first_at != NEVER:
            has_begun = self._comments_at <= clock.trio_of(sent.first_at)
            self.status, self.error = 200 if has_begun else status, sent.error
            self.hear(status)

    def failed(self, error: ApiError) -> None:
        """Note an error; its status counts only if no response had begun."""
        self.error = error.code
        if not self.is_answered:
            self.status = error.status

    def refused(self, failure: Failure, now: float) -> bool:
        """Note a refusal, and return whether the client gets its status; after a comment it gets an event."""
        has_begun = self._comments_at <= now
        self.ended(200 if has_begun else failure.status, failure.code)
        return not has_begun

    def ended(self, status: int, error: str) -> None:
        """Note how it has ended."""
        self.status, self.error = status, error

    # For operators: see `InFlight`.

    @property
    def ids(self) -> tuple[bytes, bytes]:
        """See `InFlight`."""
        return ids_of(self.asked)

    @property
    def is_stream(self) -> bool:
        """Whether it asks for a stream."""
        return self.asked.bits & STREAM != 0

    @property
    def is_answered(self) -> bool:
        """Whether a response has begun, as far as the relay has said."""
        return self.told is not None and self.told.answered_at is not None

    @property
    def phase(self) -> str:
        """How far it has got, as far as the relay has said."""
        if self.desk.is_waiting:
            return "queued"
        return "begun" if self.step is None and self.told is None else phase_of(self.told)

    def cancel(self) -> None:
        """Have the relay cut it off."""
        self._send(Note("cancel", self.asked.number))

    def record(self, phase: str, now: float) -> RequestRecord:
        """Return the facts of the request; `phase` is how far it had got if it was cut off."""
        asked, desk, told, path = self.asked, self.desk, self.told or Report(), self.head.path
        trace, asked_at = desk.trace, told.asked_at
        return RequestRecord(
            id=asked.id,
            client=client_address(desk.caller, asked.peer),
            method=asked.method.decode("latin-1"),
            path=shown_path(path),
            route=LABELS.get(RESPONSE_PATH if not asked.model and is_about_response(asked) else path, OTHER),
            key_name=desk.caller.key_name,
            model=desk.model,
            status=self.status,
            error=self.error,
            phase=phase,
            started_at=desk.started_at,
            ended_at=now,
            queued_s=desk.queued_s,
            bytes_in=asked.body_bytes,
            bytes_out=told.bytes_out,
            usage=self.usage,
            trace_id="" if trace is None else trace.id,
            span=None if trace is None else trace.span,
            is_stream=told.is_stream,
            is_counted=desk.is_counted,
            prefix=desk.prefix,
            worker=desk.worker,
            answered_at=told.answered_at,
            first_at=told.first_at,
            overhead_s=None if asked_at is None else asked_at - desk.started_at - desk.queued_s,
            chunks=told.chunks,
            alias=desk.route.name,
            passed=desk.route.passed,
            own_id=own_id_of(asked),
        )


def is_about_response(asked: SentAsk) -> bool:
    """Return whether a request is about a response that a worker keeps."""
    return not asked.model and asked.path not in ROUTES and asked.path.startswith(b"/v1/responses/")


def ids_of(asked: SentAsk) -> tuple[bytes, bytes]:
    """Return the id of a request, and the gateway's own; see `InFlight`."""
    return asked.id.encode(), (own_id_of(asked) or asked.id).encode()


def own_id_of(asked: SentAsk) -> str:
    """Return the gateway's own id of a request; "" if that is the id that its client knows."""
    return next((value.decode() for name, value in asked.headers if name == b":own-id"), "")


def phase_of(told: Report | None) -> str:
    """Return how far a request has got that has a place at an endpoint, as far as the relay has said."""
    if told is None or told.asked_at is None:
        return "connecting"
    if told.answered_at is None:
        return "waiting"
    if not told.is_stream:
        return "plain"
    return "streaming" if told.chunks else "first_token"


def head_of(asked: SentAsk) -> RequestHead:
    """Return the head of a request, as far as decisions need it."""
    headers: Headers = []
    if asked.credential:
        headers.append((b"authorization", asked.credential))
    if asked.host:
        headers.append((b"host", asked.host))
    version = b"1.1"
    for header in asked.headers:
        if header[0] == b":version":
            version = header[1]
        else:
            headers.append(header)
    length = None if asked.body_bytes == UNKNOWN else asked.body_bytes if asked.bits & HEAD_ONLY else 0
    return RequestHead(asked.method, asked.path, version, headers, length)
