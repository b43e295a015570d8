"""A relay's side of the talk with its owners: the order of frames, and the state that outlives an owner.

An ask is answered once: by a step, by a refusal, or by `gone` after it has left. A step has a single outcome. While
there is no owner the relay decides nothing: requests wait, and outcomes are kept until an owner has settled them.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import attrs

from ichat.observability.request_record import UsedTokens
from ichat.relays.adoption import SUMS, RecentUse
from ichat.relays.link import Link, hello, request_in, whole
from ichat.relays.request_frames import ENDS
from ichat.relays.values import (
    COPIES,
    ENDED,
    HEAD_ONLY,
    NEVER,
    NOTHING,
    TELLS_HEAD,
    UNDER_WAY,
    Frame,
    HeadSeen,
    MonotonicNs,
    Note,
    SentAsk,
    SentOutcome,
    SentStep,
    TalkError,
)  # fmt: skip

OUTCOMES_MAX = 100_000
"""Beyond this number of unsettled outcomes, unsent outcomes are added up."""
AGAIN_MAX = 2
"""A request is not asked again after the deaths of this number of owners that had its ask."""
ROWS_MAX = 1000
"""Of a frame `report` or `added`."""
_ANSWERS = {"wait": ("asked", "left"), "refuse": ("head", "asked", "left"), "go": ("head", "left"), "gone": ("left",)}
"""The phases of a request in which the owner may send these frames. A client may leave while they are sent."""


@attrs.define
class RequestHere:
    """A request at its relay. `admitted`: its head was, and its body arrives; `left`: its client has gone."""

    asked: SentAsk | None
    """None for a copy."""
    since: MonotonicNs
    """Since when it has waited for a word of the owner; NEVER: it does not."""
    phase: Literal["head", "admitted", "asked", "left", "trying"]
    step: SentStep | None = None
    has_left: bool = False
    is_known: bool = True
    """Whether the owner has its ask: a later owner than that of its step has not."""

    @property
    def is_copy_waiting(self) -> bool:
        """Whether it is a copy that no owner has answered yet."""
        return self.asked is None and self.phase == "asked"

    def lose_owner(self, now: MonotonicNs, *, has_died: bool) -> None:
        """Note that the owner has gone: if it has died, this request may be the cause."""
        if has_died and self.is_known and self.asked is not None and self.phase in ("head", "asked"):
            self.asked = self.asked._replace(again=min(255, self.asked.again + 1))
        self.since, self.is_known = now, False


class RelayTalk:
    """Checks the frames that a relay sends and receives, and knows the requests between them. Raises TalkError."""

    def __init__(self, outcomes_max: int = OUTCOMES_MAX) -> None:
        self.requests: dict[int, RequestHere] = {}
        self.unsettled: deque[SentOutcome | Note] = deque()
        self._ended: dict[int, RequestHere] = {}
        """The requests that have ended by unsettled outcomes, by the numbers of these."""
        self.term = 0
        self.about: Mapping[str, Any] = NOTHING
        """Facts about this relay, which each owner gets."""
        self._outcomes_max = outcomes_max
        self._link: Link | None = None
        self._seq = self._sent = self._settled = 0
        self._sums: dict[tuple[str, str, str], list[int]] = {}
        """The outcomes that were added up, by key, model and endpoint: their sums."""
        self._recent = RecentUse()
        self._settings = 0

    def __repr__(self) -> str:
        return f"<RelayTalk with {len(self.requests)} requests, {len(self.unsettled)} unsettled>"

    # Owners.

    def lose_owner(self, now: MonotonicNs) -> None:
        """The connection has ended: nothing more arrives from this owner."""
        has_died = self._link is not None and not self._link.is_over
        if self._link is not None:
            self._settings, self._link = self._link.settings, None
        for number in [number for number, one in self.requests.items() if one.phase == "left" or one.is_copy_waiting]:
            del self.requests[number]
        for one in self.requests.values():
            one.lose_owner(now, has_died=has_died)

    def meet_owner(self, greeting: Note, now: MonotonicNs) -> list[Frame]:
        """Return the frames that a new owner gets at its `hello`: report, outcomes, and each open ask again."""
        term = whole(greeting, "term")
        if self._link is not None or term <= self.term:
            raise TalkError(f"The owner of term {term} is not later than that of term {self.term}.")
        link = Link(is_owner=False, settings=self._settings)
        link.check(greeting, is_sent=False)
        frames: list[Frame] = [hello(self.term, self._settings, self.about), *self._reports(now)]
        self._link, self.term = link, term
        self._add_up(is_last=True)
        for item in self.unsettled:
            frames += self._as_reported(item)
        self._sent = self._seq
        for one in self.requests.values():
            if one.asked is not None and one.phase in ("head", "asked"):
                one.since, one.is_known = now, True
                frames.append(one.asked)
            elif one.asked is not None and one.phase == "trying":
                queued_s = 0.0 if one.step is None else one.step.queued_s
                frames.append(one.asked._replace(bits=one.asked.bits | UNDER_WAY, queued_s=queued_s))
        frames.append(Note("ready"))
        for frame in frames:
            link.check(frame, is_sent=True)
        return frames

    def _as_reported(self, item: SentOutcome | Note) -> list[Frame]:
        """Return the frames about an unsettled outcome: the request that it ends, and the outcome."""
        if not isinstance(item, SentOutcome):
            return [item]
        one, sent = self._ended.get(item.seq), item._replace(wants_next=False)
        if one is None or one.asked is None:
            return [sent]
        queued_s = 0.0 if one.step is None else one.step.queued_s
        bits = one.asked.bits & ~HEAD_ONLY | ENDED
        return [one.asked._replace(bits=bits, checksums=(), before=(), queued_s=queued_s), sent]

    def _reports(self, now: MonotonicNs) -> list[Note]:
        steps = [one.step for one in self.requests.values() if one.phase == "trying" and one.step is not None]
        trying = [[one.number, one.attempt, one.step.endpoint, one.key, one.step.model] for one in steps]
        recent = self._recent.rows(now)
        return [
            Note("report", 0, {"trying": trying[at : at + ROWS_MAX], "recent": recent[at : at + ROWS_MAX]})
            for at in range(0, max(1, len(trying), len(recent)), ROWS_MAX)
        ]

    @property
    def next_seq(self) -> int:
        """The number of the next outcome."""
        return self._seq + 1

    @property
    def owner_term(self) -> int:
        """The term of the owner; 0: there is none."""
        return self.term if self._link is not None else 0

    # Requests without an answer.

    def overdue(self, now: MonotonicNs, wait_ns: int) -> list[int]:
        """Return the numbers of requests that have waited for an owner for too long, or outlived too many of them."""
        return [number for number, one in self.requests.items() if self._is_overdue(one, now, wait_ns)]

    def _is_overdue(self, one: RequestHere, now: MonotonicNs, wait_ns: int) -> bool:
        if one.phase not in ("head", "asked") or one.asked is None:
            return False
        outlived = self._link is None and one.asked.again >= AGAIN_MAX
        return outlived or (one.since != NEVER and now - one.since >= wait_ns)

    def give_up(self, number: int, now: MonotonicNs, wait_ns: int) -> list[Frame]:
        """Have an overdue request refused by the relay itself, and return the frames for the owner."""
        if not self._is_overdue(request_in(self.requests, number, "head", "asked"), now, wait_ns):
            raise TalkError(f"The request {number} still waits for its owner.")
        return self.sends(Note("leave", number), now)

    # Frames to the owner.

    def ask(self, asked: SentAsk, now: MonotonicNs) -> list[Frame]:
        """Note an ask, and return the frames to send now: none if there is no owner."""
        one = self.requests.get(asked.number)
        if asked.number >= COPIES or (one is not None and (one.phase != "admitted" or asked.bits & HEAD_ONLY)):
            raise TalkError(f"The request {asked.number} cannot be asked now.")
        phase, is_known = "head" if asked.bits & HEAD_ONLY else "asked", self._link is not None
        self.requests[asked.number] = RequestHere(asked, now, phase, is_known=is_known)
        return self._out(asked)

    def sends(self, frame: Frame, now: MonotonicNs) -> list[Frame]:
        """Note any other frame, and return the frames to send now."""
        match frame:
            case SentOutcome():
                return self.end(frame, now)
            case HeadSeen(number, _):
                one = request_in(self.requests, number, "trying")
                if not one.is_known:  # the owner that wanted it has gone
                    return []
                if one.step is None or not one.step.bits & TELLS_HEAD:
                    raise TalkError(f"The owner does not want the head of the request {number}, or has it.")
                one.step = one.step._replace(bits=one.step.bits & ~TELLS_HEAD)
            case Note("leave", number):
                one = request_in(self.requests, number, "head", "admitted", "asked")
                if self._link is None or not one.is_known:
                    del self.requests[number]
                    return []
                one.phase = "left"
            case Note("shadow", number):
                return self._begin_copy(frame, number)
            case Note("report" | "ready" | "added" | "hello") | SentAsk():
                raise TalkError(f"A frame `{frame.kind}` has a method of its own.")
            case _:
                pass
        return self._out(frame)

    def _begin_copy(self, shadow: Note, number: int) -> list[Frame]:
        """Note that a copy of a request is asked for, if the owner knows the request."""
        if not request_in(self.requests, number, "trying").is_known or self._link is None:
            return []
        self.requests[COPIES | number] = RequestHere(None, NEVER, "asked")
        return self._out(shadow)

    def _out(self, frame: Frame) -> list[Frame]:
        if self._link is not None and frame.kind not in self._link.plainly_sent:
            self._link.check(frame, is_sent=True)
        return [frame] if self._link is not None else []

    def end(self, sent: SentOutcome, now: MonotonicNs) -> list[Frame]:
        """Note the outcome of an attempt, and return the frames to send now."""
        one, step = self._trying(sent)
        self._seq = sent.seq
        if sent.usage is not None and one.asked is not None:
            self._recent.count(step.key, now, tokens=sent.usage.total)
        if not sent.outcome.endpoint or sent.model != step.step.model or sent.key != step.key:
            outcome = sent.outcome if sent.outcome.endpoint else sent.outcome._replace(endpoint=step.step.endpoint)
            sent = sent._replace(outcome=outcome, key=step.key, model=step.step.model)
        self.unsettled.append(sent)
        if sent.wants_next and one.asked is not None:
            last = step.step.endpoint, step.step.model, "over" if sent.outcome.is_over else sent.outcome.kind
            tried = (*one.asked.tried, last)
            one.asked, one.phase, one.since, one.step = one.asked._replace(tried=tried), "asked", now, None
        else:
            self._ended[sent.seq] = one
            del self.requests[sent.number]
        if self._link is None:
            self._add_up()
            return []
        if one.is_known and self._sent == sent.seq - 1:
            self._sent = sent.seq
            return self._out(sent)
        return self._send_all([sent])

    def _trying(self, sent: SentOutcome) -> tuple[RequestHere, SentStep]:
        """Return the request of an attempt that has ended, and the step of the attempt. Raises TalkError."""
        one, kind = request_in(self.requests, sent.number, "trying"), sent.outcome.kind
        if one.step is None or sent.attempt != one.step.attempt or sent.seq != self._seq + 1:
            raise TalkError(f"The outcome {sent.seq} of the request {sent.number} is not that of its attempt.")
        if sent.wants_next and (kind in ENDS or one.asked is None):
            raise TalkError(f"An attempt that is {kind} wants no next step.")
        if one.has_left and kind != "left":
            raise TalkError(f"The request {sent.number} has left, and is {kind}.")
        return one, one.step

    def _send_all(self, items: Iterable[SentOutcome | Note]) -> list[Frame]:
        """Return unsent outcomes as frames. An owner that does not know a request gets its ask after the outcome."""
        frames: list[Frame] = []
        for item in items:
            if _seq_of(item) <= self._sent:
                continue
            one = self.requests.get(item.number)
            is_known = one is not None and one.is_known
            is_answered = isinstance(item, SentOutcome) and item.wants_next and not is_known
            frames += self._out(item._replace(wants_next=False) if is_answered else item)
            if one is not None and one.asked is not None and not is_known and one.phase == "asked":
                one.is_known = True
                frames += self._out(one.asked)
        self._sent = self._seq
        return frames

    def _add_up(self, *, is_last: bool = False) -> None:
        """Add up unsent outcomes if there are too many; `is_last`: the sums are an outcome of their own now."""
        if len(self.unsettled) > self._outcomes_max:
            kept: deque[SentOutcome | Note] = deque()
            for item in self.unsettled:
                if not isinstance(item, SentOutcome) or item.seq <= self._sent or item.wants_next:
                    kept.append(item)
                    continue
                self._ended.pop(item.seq, None)
                sums = self._sums.setdefault((item.key, item.model, item.outcome.endpoint), [0] * SUMS)
                for place, count in enumerate(_sums_of(item)):
                    sums[place] += count
            self.unsettled = kept
        if is_last:
            rows = [[*names, *sums] for names, sums in self._sums.items()]
            self._sums = {}
            for at in range(0, len(rows), ROWS_MAX):
                self._seq += 1
                self.unsettled.append(Note("added", 0, {"seq": self._seq, "rows": rows[at : at + ROWS_MAX]}))

    # Frames from the owner.

    def receives(self, frame: Frame, now: MonotonicNs) -> bool:
        """Note a frame of the owner, and return whether it has an effect. A step without effect gets `left`."""
        link, kind = self._link, frame.kind
        if link is None:
            raise TalkError(f"A frame `{kind}` is from no owner.")
        is_step = isinstance(frame, SentStep)
        if kind not in link.plainly_received or (is_step and frame.settings != link.settings):
            link.check(frame, is_sent=False)
        if is_step:
            return self._begin(frame, now)
        if isinstance(frame, Note) and kind == "settled":
            self._settle(whole(frame, "seq"))
        elif kind == "pulse":
            self._bound_unsettled()
        if kind not in _ANSWERS:
            return kind != "cancel" or frame.number in self.requests
        one = request_in(self.requests, frame.number, *_ANSWERS[kind])
        has_effect = one.phase != "left"
        if kind in ("refuse", "gone"):
            del self.requests[frame.number]
        else:
            one.since = NEVER
            if kind == "go" and has_effect:
                one.phase = "admitted"
        return has_effect

    def _begin(self, sent: SentStep, now: MonotonicNs) -> bool:
        one = request_in(self.requests, sent.number, "asked", "left")
        one.has_left, one.phase, one.step = one.phase == "left", "trying", sent
        if sent.attempt == 1 and one.asked is not None:
            self._recent.count(sent.key, now, requests=1)
        return not one.has_left

    def _settle(self, seq: int) -> None:
        if not self._settled <= seq <= self._sent:
            raise TalkError(f"The outcome {seq} cannot be settled: {self._sent} were sent.")
        self._settled = seq
        while self.unsettled and _seq_of(self.unsettled[0]) <= seq:
            self._ended.pop(_seq_of(self.unsettled.popleft()), None)

    def _bound_unsettled(self) -> None:
        """Forget the oldest outcomes if there are too many: the owner has them, and its disk fails for long."""
        while len(self.unsettled) > self._outcomes_max and _seq_of(self.unsettled[0]) <= self._sent:
            self._ended.pop(_seq_of(self.unsettled.popleft()), None)


def _sums_of(sent: SentOutcome) -> tuple[int, ...]:
    """Return the sums of a single outcome; see `AddedUp`. A copy of a request does not count."""
    if sent.number >= COPIES:
        return (0,) * SUMS
    used, status = sent.usage or UsedTokens(0, 0), sent.outcome.status
    return 1, status >= 400 and sent.outcome.kind != "left", used.input, used.output, used.cached


def _seq_of(item: SentOutcome | Note) -> int:
    return item.seq if isinstance(item, SentOutcome) else whole(item, "seq")
