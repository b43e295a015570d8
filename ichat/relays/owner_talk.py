"""An owner's side of the talk with a relay: the order of frames. It does no I/O."""

from typing import Literal

import attrs

from ichat.relays.adoption import sums_in, trying_in
from ichat.relays.link import Link, request_in, whole
from ichat.relays.request_frames import ENDS
from ichat.relays.values import (
    COPIES,
    ENDED,
    HEAD_ONLY,
    TELLS_HEAD,
    UNDER_WAY,
    UNREAD_BYTES_MAX,
    Frame,
    HeadSeen,
    Note,
    Refused,
    SentAsk,
    SentOutcome,
    SentStep,
    TalkError,
)  # fmt: skip

_ANSWERED = {"wait": ("asked",), "refuse": ("head", "asked"), "go": ("head",), "gone": ("left",)}
"""The phases of a request in which the owner may send these frames."""


@attrs.define
class RequestThere:
    """A request at a relay, as its owner knows it."""

    phase: Literal["head", "admitted", "asked", "left", "trying"]
    attempt: int = 0
    tells_head: bool = False
    has_ask: bool = True
    """Whether the relay has asked this owner, and not an earlier owner."""


class OwnerTalk:
    """Checks the frames that an owner sends to a relay and receives from it. Raises TalkError."""

    def __init__(self, asks_max: int) -> None:
        """The relay may have `asks_max` requests at once: for each of its connections a request, and a copy."""
        self.requests: dict[int, RequestThere] = {}
        self.identity = ""
        """The relay's, from its `hello` on."""
        self.unread_bytes = 0
        """Set by the caller: the bytes that the relay has not read yet."""
        self._asks_max = asks_max
        self._link = Link(is_owner=True)
        self._is_ready = self._is_open = self._is_counted = False
        self._seq = self._settled = 0

    def __repr__(self) -> str:
        return f"<OwnerTalk about {len(self.requests)} requests>"

    @property
    def is_over(self) -> bool:
        """Whether the owner has sent its last frame."""
        return self._link.is_over

    @property
    def settings(self) -> int:
        """The version of the settings in force at the relay."""
        return self._link.settings

    @property
    def offered(self) -> int:
        """The version of the settings that the relay was offered last."""
        return self._link.offered

    @property
    def received(self) -> int:
        """The number of the newest outcome."""
        return self._seq

    @property
    def counted(self) -> int:
        """The number of the newest outcome that this owner has counted; 0 until it has counted those of the report."""
        return self._seq if self._is_counted or self._is_open else 0

    def note_counted(self) -> None:
        """Note that the outcomes of the report are counted."""
        self._is_counted = True

    @property
    def settled(self) -> int:
        """The number of the newest outcome that is settled."""
        return self._settled

    @property
    def is_hung(self) -> bool:
        """Whether the relay must be killed, since it does not read."""
        return self.unread_bytes > UNREAD_BYTES_MAX

    @property
    def may_read(self) -> bool:
        """Whether frames may be received now: after the report, the owner reads on once all relays have reported."""
        return not self._link.is_over and (self._is_open or not self._is_ready)

    def open(self) -> None:
        """Let asks be answered, now that every relay has reported or ended."""
        if not self._is_ready:
            raise TalkError("The relay has not reported.")
        self._is_open = True

    # Frames to the relay.

    def sends(self, frame: Frame) -> None:
        """Note a frame of the owner."""
        if not self._is_open and (isinstance(frame, SentStep | Refused) or frame.kind in ("go", "gone")):
            raise TalkError(f"A frame `{frame.kind}` answers an ask before all relays have reported.")
        link = self._link
        is_step = isinstance(frame, SentStep)
        if frame.kind not in link.plainly_sent or (is_step and frame.settings != link.settings):
            link.check(frame, is_sent=True)
        if is_step:
            self._begin(frame)
        elif frame.kind in _ANSWERED:
            one = request_in(self.requests, frame.number, *_ANSWERED[frame.kind])
            if frame.kind == "go":
                one.phase = "admitted"
            elif frame.kind != "wait":
                del self.requests[frame.number]
        elif isinstance(frame, Note) and frame.kind == "settled":
            seq = whole(frame, "seq")
            if not self._settled <= seq <= self._seq:
                raise TalkError(f"The outcome {seq} cannot be settled: {self._seq} have arrived.")
            self._settled = seq

    def _begin(self, sent: SentStep) -> None:
        number = sent.number
        one = request_in(self.requests, number, "asked")
        if sent.attempt != one.attempt + 1:
            raise TalkError(f"The attempt {sent.attempt} of the request {number} follows the attempt {one.attempt}.")
        one.phase, one.attempt, one.tells_head = "trying", sent.attempt, bool(sent.bits & TELLS_HEAD)

    # Frames from the relay.

    def receives(self, frame: Frame) -> bool:
        """Note a frame of the relay, and return whether it has an effect. The answer to `leave` is `gone` then."""
        if not (self._is_open or self.may_read):
            raise TalkError(f"A frame `{frame.kind}` was read too early or too late.")
        if frame.kind not in self._link.plainly_received:
            self._link.check(frame, is_sent=False)
        match frame:
            case SentAsk():
                self._ask(frame)
            case SentOutcome():
                self._end(frame)
            case HeadSeen(number, _):
                one = request_in(self.requests, number, "trying")
                if not one.tells_head:
                    raise TalkError(f"The head of the request {number} was not wanted, or is sent twice.")
                one.tells_head = False
            case Note("leave", number):
                return self._withdraw(number)
            case Note():
                self._note(frame)
            case _:
                pass
        return True

    def _withdraw(self, number: int) -> bool:
        one = self.requests.get(number)
        if one is None or one.phase not in ("head", "admitted", "asked"):
            return False
        one.phase = "left"
        return True

    def _note(self, frame: Note) -> None:
        kind = frame.kind
        if kind in ("report", "ready") and self._is_ready:
            raise TalkError(f"A frame `{kind}` was sent after `ready`.")
        if kind == "hello":
            self.identity = str(frame.content.get("identity", ""))
        elif kind == "shadow":
            request_in(self.requests, frame.number, "trying")
            if COPIES | frame.number in self.requests or frame.number >= COPIES:
                raise TalkError(f"The request {frame.number} has a copy, or is a copy.")
            self.requests[COPIES | frame.number] = RequestThere("asked", has_ask=False)
        elif kind == "added":
            self._count(whole(frame, "seq"))
            sums_in(frame)
        elif kind == "report":
            self.requests |= {
                row.number: RequestThere("trying", row.attempt, has_ask=False) for row in trying_in(frame)
            }
        self._is_ready = self._is_ready or kind == "ready"

    def _ask(self, asked: SentAsk) -> None:
        number = asked.number
        if asked.bits & UNDER_WAY:
            if self._is_ready or request_in(self.requests, number, "trying").has_ask:
                raise TalkError(f"The request {number} is no request of an earlier owner.")
            return
        one, is_head = self.requests.get(number), bool(asked.bits & HEAD_ONLY)
        if asked.bits & ENDED and not self._is_ready:
            return
        if number >= COPIES or (one is not None and (one.phase != "admitted" or is_head)):
            raise TalkError(f"The request {number} was asked twice.")
        if one is None and len(self.requests) >= self._asks_max:
            raise TalkError(f"The relay has more than {self._asks_max} requests.")
        self.requests[number] = RequestThere("head" if is_head else "asked", len(asked.tried))

    def _count(self, seq: int) -> None:
        if seq <= self._seq:
            raise TalkError(f"The outcome {seq} follows the outcome {self._seq}.")
        self._seq = seq

    def _end(self, sent: SentOutcome) -> None:
        self._count(sent.seq)
        if not self._is_ready:  # it has ended before the report
            if sent.wants_next:
                raise TalkError("An outcome of an earlier owner's step wants a next step.")
            return
        one = request_in(self.requests, sent.number, "trying")
        if sent.attempt != one.attempt or (sent.wants_next and (sent.outcome.kind in ENDS or not one.has_ask)):
            raise TalkError(f"The outcome of the request {sent.number} is not that of its attempt.")
        if sent.wants_next:
            one.phase = "asked"
        else:
            del self.requests[sent.number]
