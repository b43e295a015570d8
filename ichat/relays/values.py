"""The values that the owner of a gateway and its relays send each other, and the clock that both have in common."""

from collections.abc import Mapping
from typing import Any, NamedTuple, NewType

import attrs

from ichat.observability.request_record import UsedTokens
from ichat.proxy.steps import AttemptStep, HeaderPairs, Outcome, Refuse, Wait

MonotonicNs = NewType("MonotonicNs", int)
"""A time by CLOCK_MONOTONIC, in nanoseconds: all processes of a machine have the same."""
NEVER = MonotonicNs(0)
"""Of an event that has not happened."""

STREAM, BACKGROUND, SUSPECT, HEAD_ONLY, UNDER_WAY, ENDED = (1 << number for number in range(6))
"""Bits of an ask. `HEAD_ONLY`: the body has not arrived, so the owner only admits the request.

`UNDER_WAY`: it asks nothing; a relay reports a request that carries out a step of an earlier owner. `ENDED`: it asks
nothing, either; its outcome follows, which no owner has settled.
"""
TELLS_HEAD, MAY_STEER, HIDES_KEYS, IS_COPIED, IGNORES_PREFIX = (1 << number for number in range(5))
"""Bits of a step. `TELLS_HEAD`: the owner gets a `head`.

`IS_COPIED`: the relay sends `shadow` if the response is no error.
`MAY_STEER` and `HIDES_KEYS` are those of the request's `Grant`. `IGNORES_PREFIX`: so the next request for this name
needs no sums of its prefix, as long as the steps of that name say so.
"""
COPIES = 1 << 31
"""Added to the number of a request, it is the number of the request's copy."""
UNREAD_BYTES_MAX = 8 * 1024 * 1024
"""A relay that leaves more than this unread is killed. An owner that does so gets no new requests."""
UNKNOWN = (1 << 32) - 1
"""The size of a body that is not known yet."""
NOTHING: Mapping[str, Any] = {}


class FrameError(Exception):
    """A frame that cannot be read or written: a sentence. It ends the connection, not the process."""


class TalkError(Exception):
    """A frame that breaks the order of frames: a sentence."""


@attrs.frozen
class TrioClock:
    """Converts times of Trio's clock: its zero differs in each process."""

    offset_ns: int

    @classmethod
    def read(cls, trio_s: float, monotonic_ns: int) -> "TrioClock":
        """Return the clock of this process by both times of the same moment."""
        return cls(monotonic_ns - round(trio_s * 1e9))

    def ns_of(self, trio_s: float) -> MonotonicNs:
        """Return a time of Trio's clock, in seconds, as a frame has it."""
        return MonotonicNs(round(trio_s * 1e9) + self.offset_ns)

    def trio_of(self, ns: MonotonicNs) -> float:
        """Return a time of a frame by Trio's clock, in seconds."""
        return (ns - self.offset_ns) / 1e9

    def ns_of_event(self, trio_s: float | None) -> MonotonicNs:
        """Return when an event happened, as a frame has it; None: it has not happened."""
        return NEVER if trio_s is None else MonotonicNs(round(trio_s * 1e9) + self.offset_ns)

    def trio_of_event(self, ns: MonotonicNs) -> float | None:
        """Return when an event happened, by Trio's clock; None: it has not happened."""
        return None if ns == NEVER else (ns - self.offset_ns) / 1e9


class SentAsk(NamedTuple):
    """A request, as far as the owner decides by it. Its body stays with the relay."""

    kind = "ask"
    number: int
    """By which the frames of the request name it, until it is over."""
    at: MonotonicNs
    """When it was asked first."""
    id: str
    model: str
    path: bytes
    method: bytes = b"POST"
    peer: str = ""
    """The client's address and port."""
    credential: bytes = b""
    host: bytes = b""
    session: bytes = b""
    bits: int = 0
    """`STREAM` and so on."""
    again: int = 0
    """How many owners have died that had its ask."""
    body_bytes: int = 0
    prompt_bytes: int = 0
    prefix_bytes: int = 0
    checksums: tuple[int, ...] = ()
    """With `before`: the sums of its prefix, see `PrefixSums`."""
    before: tuple[tuple[str, bytes], ...] = ()
    headers: HeaderPairs = ()
    """The headers that a decision may need: origin, forwarding, hops, trace."""
    previous_response_id: str = ""
    tried: tuple[tuple[str, str, str], ...] = ()
    """Its attempts: the endpoint, the model, and the kind of the outcome; `over` if it can be sent nowhere else."""
    queued_s: float = 0.0
    """For how long it has waited in queues, if it asks nothing."""


class SentStep(NamedTuple):
    """An attempt for a relay, and all that it must know of the endpoint."""

    kind = "step"
    number: int
    attempt: int
    """From 1."""
    step: AttemptStep
    address: bytes = b""
    """The owner's number of the endpoint."""
    key: str = ""
    """The name of the client's key."""
    bits: int = 0
    """`TELLS_HEAD` and so on."""
    settings: int = 0
    """The version of the settings by which it was decided."""
    queued_s: float = 0.0
    ticket: str = ""
    """The worker reports later usage under it; "" if there is none."""


class SentOutcome(NamedTuple):
    """How an attempt has ended."""

    kind = "outcome"
    number: int
    attempt: int
    seq: int
    """From 1, for each relay: outcomes up to a number are settled."""
    outcome: Outcome
    """Its `reason` and `waited_s` are not sent: they belong to lookups."""
    wants_next: bool = False
    """Whether the relay asks for the next step."""
    asked_at: MonotonicNs = NEVER
    first_at: MonotonicNs = NEVER
    ended_at: MonotonicNs = NEVER
    bytes_out: int = 0
    chunks: int = 0
    usage: UsedTokens | None = None
    error: str = ""
    """The code of the error that the client got."""
    key: str = ""
    """This and `model` are for an owner that does not know the request."""
    model: str = ""
    dropped: tuple[str, ...] = ()
    """The names of removed members of the body."""
    is_stream: bool = False
    """Whether the response was a stream of events."""
    tells_cached: bool = False
    """Whether the response says how many tokens of the prompt were cached."""
    body_at: MonotonicNs = NEVER
    """When the first piece of the response's body arrived."""
    has_lost_usage: bool = False
    """Whether a worker that reports the tokens beside the body has reported none of this whole stream."""


class HeadSeen(NamedTuple):
    """The response of an attempt has begun."""

    kind = "head"
    number: int
    status: int


class WaitsFor(NamedTuple):
    """The request waits for an endpoint; the relay sends the comments of its stream."""

    kind = "wait"
    number: int
    wait: Wait


class Refused(NamedTuple):
    """The owner's refusal of a request."""

    kind = "refuse"
    number: int
    refuse: Refuse


class Note(NamedTuple):
    """Any other frame: a kind, the number of a request (0: none), and JSON."""

    kind: str
    number: int = 0
    content: Mapping[str, Any] = NOTHING


Frame = SentAsk | SentStep | SentOutcome | HeadSeen | WaitsFor | Refused | Note
