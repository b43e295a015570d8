"""The kinds of frames: their numbers, their fields, and how the value of each becomes fields, and the reverse.

Fields are only appended. A number is never used again for another kind or value. The kinds that each request has are
written and read by functions of their own (`request_frames.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs

from ichat.proxy.steps import Refuse, Wait
from ichat.relays.frame_parts import failure_in, float_in, text_in
from ichat.relays.request_frames import (
    ASK,
    ASK_STRINGS,
    OUTCOME,
    OUTCOME_STRINGS,
    STEP,
    STEP_STRINGS,
    read_ask,
    read_outcome,
    read_step,
    write_ask,
    write_outcome,
    write_step,
)
from ichat.relays.values import NOTHING, Frame, FrameError, HeadSeen, Note, Refused, WaitsFor

OPTIONAL = 1
"""The bit of a kind that a reader may ignore if it does not know it."""
Parts = tuple[Sequence[Any], Sequence[bytes], Mapping[str, Any]]
"""The fixed fields of a frame, its strings, and its JSON."""


def _wait_parts(sent: WaitsFor) -> Parts:
    return (sent.number,), (), {"kind": sent.wait.kind, "seconds": sent.wait.seconds}


def _wait_of(fixed: Sequence[Any], _strings: Sequence[bytes], rest: Mapping[str, Any]) -> WaitsFor:
    kind = text_in(rest, "kind")
    if kind not in ("place", "pause"):
        raise FrameError(f"A request cannot wait for {kind!r}.")
    return WaitsFor(fixed[0], Wait(kind, float_in(rest, "seconds")))


def _refuse_parts(sent: Refused) -> Parts:
    return (sent.number,), (), attrs.asdict(sent.refuse.failure)


def _refuse_of(fixed: Sequence[Any], _strings: Sequence[bytes], rest: Mapping[str, Any]) -> Refused:
    return Refused(fixed[0], Refuse(failure_in(rest)))


def _head_parts(sent: HeadSeen) -> Parts:
    return sent, (), NOTHING


def _head_of(fixed: Sequence[Any], _strings: Sequence[bytes], _rest: Mapping[str, Any]) -> HeadSeen:
    return HeadSeen(*fixed)


def _note_parts(sent: Note) -> Parts:
    return (sent.number,), (), sent.content


class Layout(NamedTuple):
    """The form of a kind of frame."""

    number: int
    from_owner: bool
    """Whether the owner may send it."""
    from_relay: bool
    fixed: str = "I"
    """The fixed fields, as `struct` names them."""
    strings: int = 0
    parts_of: Callable[[Any], Parts] = _note_parts
    value_of: Callable[[Sequence[Any], Sequence[bytes], Mapping[str, Any]], Frame] | None = None
    """None: it is a `Note`, or a frame that each request has."""
    bits: int = 0
    write: Callable[[Any], bytes] | None = None
    """Returns all bytes of a frame. The kinds with `write` and `read` need no parts."""
    read: Callable[[bytes, int, int], Frame] | None = None
    """Returns the value of a frame of the known form: its bytes stand from an index to an index."""


_OWNER, _RELAY = (True, False), (False, True)
LAYOUTS: Mapping[str, Layout] = {
    "ask": Layout(1, *_RELAY, ASK, ASK_STRINGS, write=write_ask, read=read_ask),
    "step": Layout(2, *_OWNER, STEP, STEP_STRINGS, write=write_step, read=read_step),
    "outcome": Layout(3, *_RELAY, OUTCOME, OUTCOME_STRINGS, write=write_outcome, read=read_outcome),
    "head": Layout(4, *_RELAY, "IH", 0, _head_parts, _head_of),
    "wait": Layout(5, *_OWNER, "I", 0, _wait_parts, _wait_of),
    "refuse": Layout(6, *_OWNER, "I", 0, _refuse_parts, _refuse_of),
    **{name: Layout(number, *_OWNER) for number, name in enumerate((
        "go", "gone", "settings", "commit", "forget", "accept", "hint", "cancel", "settled", "retire", "drain", "hurry",
        "bye", "end", "endpoint",
    ), 16)},
    **{name: Layout(number, *_RELAY) for number, name in enumerate((
        "leave", "report", "ready", "prepared", "cannot", "record", "sums", "added", "shadow", "told", "drained",
        "retiring",
    ), 64)},
    "hello": Layout(128, from_owner=True, from_relay=True),
    "pulse": Layout(129, from_owner=True, from_relay=True, bits=OPTIONAL),
}  # fmt: skip
"""All kinds. A number is never used again for something else."""
