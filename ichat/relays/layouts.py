"""The kinds of frames: their numbers, their fields, and how the value of each becomes fields, and the reverse.

Fields are only appended. A number is never used again for another kind or value.
"""

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs

from ichat.observability.request_record import UsedTokens
from ichat.proxy.refusals import Failure
from ichat.proxy.steps import NO_EDITS, AttemptStep, BodyEdits, HeaderPairs, Outcome, OutcomeKind, Refuse, Wait
from ichat.relays.values import (
    NOTHING,
    Frame,
    FrameError,
    HeadSeen,
    MonotonicNs,
    Note,
    Refused,
    SentAsk,
    SentOutcome,
    SentStep,
    WaitsFor,
)

OPTIONAL = 1
"""The bit of a kind that a reader may ignore if it does not know it."""
Parts = tuple[Sequence[Any], Sequence[bytes], Mapping[str, Any]]
"""The fixed fields of a frame, its strings, and its JSON."""

# Numbers for common values. More may be appended, and none is ever used for something else.

_PATHS = (
    b"", b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/messages", b"/v1/embeddings",
    b"/v1/rerank", b"/v1/score", b"/v1/audio/transcriptions", b"/v1/audio/translations", b"/tokenize", b"/detokenize",
)  # fmt: skip
_METHODS = (b"", b"POST", b"GET", b"DELETE", b"HEAD", b"PATCH", b"OPTIONS", b"PUT")
OUTCOMES: tuple[OutcomeKind, ...] = (
    "answered", "cut", "left", "cancelled", "unreachable", "declined", "rejected", "too_long", "late", "broken", "unfit"
)  # fmt: skip
"""The outcomes of attempts: those of lookups and waits stay with the owner."""
ENDS = frozenset(OUTCOMES[:4])
"""The outcomes that want no next step."""
_REJECTS = ("429", "5xx")
_PATH_NUMBERS = {path: number for number, path in enumerate(_PATHS) if number}
_METHOD_NUMBERS = {method: number for number, method in enumerate(_METHODS) if number}
_OUTCOME_NUMBERS = {kind: number for number, kind in enumerate(OUTCOMES)}
_WANTS_NEXT, _IS_OVER, _HAS_USAGE, _IS_ESTIMATE, _IS_EXTERNAL, _IS_STREAM, _TELLS_CACHED, _LOST_USAGE = (
    1 << number for number in range(8)
)
_REJECTS_429, _REJECTS_5XX, _HAS_LONGER, _IS_AGAIN, _PASSES_ALL = (1 << number for number in range(16, 21))
_ANY_REJECTS = _REJECTS_429 | _REJECTS_5XX
_FAILURE_TYPES: Mapping[str, tuple[type, ...]] = {
    "status": (int,), "code": (str,), "message": (str,), "kind": (str,), "param": (str, type(None)),
    "retry_after_s": (int, type(None)), "retry": (bool, type(None)), "limit": (str,),
    "allow": (str,),
}  # fmt: skip


# Parts of the JSON. Bytes are Latin-1 there.


def _rows(rest: Mapping[str, Any], name: str, width: int) -> tuple[Any, ...]:
    """Return a list of rows of texts, each `width` long."""
    rows = rest.get(name, ())
    for row in rows:
        if len(row) != width or not all(isinstance(cell, str) for cell in row):
            raise FrameError(f"The rows of `{name}` in a frame are no lists of {width} texts.")
    return tuple(map(tuple, rows))


def _texts(rest: Mapping[str, Any], name: str) -> tuple[str, ...]:
    return tuple(row[0] for row in _rows({name: [[text] for text in rest.get(name, ())]}, name, 1))


def _text(rest: Mapping[str, Any], name: str) -> str:
    return _texts({name: [rest.get(name, "")]}, name)[0]


def _float_of(rest: Mapping[str, Any], name: str) -> float:
    value = rest.get(name, 0.0)
    if not isinstance(value, int | float) or not 0.0 <= value < math.inf:
        raise FrameError(f"The field `{name}` of a frame is {value!r}, not a number from 0 on.")
    return value


def _latin(pairs: Iterable[tuple[Any, bytes]]) -> list[tuple[Any, str]]:
    return [(name, value.decode("latin-1")) for name, value in pairs]


def _unlatin(rows: Iterable[tuple[str, str]]) -> tuple[tuple[str, bytes], ...]:
    return tuple((name, value.encode("latin-1")) for name, value in rows)


def _lines_of(pairs: HeaderPairs) -> bytes:
    """Return headers as the lines of a head. Those of requests have a trace of their own, so none are remembered."""
    if not pairs:
        return b""
    lines = b"".join([b"%s: %s\r\n" % pair for pair in pairs])
    if lines.count(b"\n") != len(pairs) or lines.count(b"\r") != len(pairs):
        raise FrameError("A header in a frame has a line break.")
    return lines


def _pairs_of(lines: bytes) -> HeaderPairs:
    if not lines:
        return ()
    if lines[-2:] != b"\r\n":
        raise FrameError("The headers in a frame do not end with a line break.")
    pairs: list[tuple[bytes, bytes]] = []
    for line in lines[:-2].split(b"\r\n"):
        name, colon, value = line.partition(b": ")
        if not colon:
            raise FrameError("A header in a frame is no line with a colon.")
        pairs.append((name, value))
    if lines.count(b"\n") != len(pairs) or lines.count(b"\r") != len(pairs):
        raise FrameError("A header in a frame has a line break.")
    return tuple(pairs)


def _str_bytes(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def _str_of(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("utf-8", "surrogatepass")


def _failure_of(rest: Mapping[str, Any]) -> Failure:
    for name, types in _FAILURE_TYPES.items():
        if name in rest and (not isinstance(rest[name], types) or (rest[name] is True and bool not in types)):
            raise FrameError(f"The field `{name}` of an error in a frame is {rest[name]!r}.")
    return Failure(**{name: rest[name] for name in _FAILURE_TYPES if name in rest})


# Each kind: how its value becomes parts, and the reverse.


def _ask_parts(asked: SentAsk) -> Parts:
    (
        number, at, identity, model, path, method, peer, credential, host, session, bits, again, body_bytes,
        prompt_bytes, prefix_bytes, sums, before, headers, previous, tried, queued_s,
    ) = asked  # fmt: skip
    path_number, method_number = _PATH_NUMBERS.get(path, 0), _METHOD_NUMBERS.get(method, 0)
    rest: dict[str, Any] = {}
    if not path_number or not method_number:
        rest = dict(_latin((("path", path), ("method", method))))
    if before or headers:
        rest["before"] = _latin(before)
        rest["headers"] = _latin((name.decode("latin-1"), value) for name, value in headers)
    if previous or tried:
        rest |= {"previous": previous, "tried": tried}
    if queued_s:
        rest["queued_s"] = queued_s
    fixed = (number, at, body_bytes, method_number, path_number, bits, again, prompt_bytes, prefix_bytes)
    strings = (
        _str_bytes(identity), _str_bytes(model), _str_bytes(peer), credential, host, session,
        struct.pack(f"<{len(sums)}I", *sums) if sums else b"",
    )  # fmt: skip
    return fixed, strings, rest


def _ask_of(fixed: Sequence[Any], strings: Sequence[bytes], rest: Mapping[str, Any]) -> SentAsk:
    number, at, body_bytes, method, path, bits, again, prompt_bytes, prefix_bytes = fixed
    identity, model, peer, credential, host, session, sums = strings
    before, headers, previous, tried, queued_s = (), (), "", (), 0.0
    if rest:
        queued_s = _float_of(rest, "queued_s")
        before = _unlatin(_rows(rest, "before", 2))
        headers = tuple((name.encode("latin-1"), value) for name, value in _unlatin(_rows(rest, "headers", 2)))
        previous, tried = _text(rest, "previous"), _rows(rest, "tried", 3)
    return SentAsk(
        number, at, _str_of(identity), _str_of(model),
        _PATHS[path] if path and method else _text(rest, "path").encode("latin-1"),
        _METHODS[method] if path and method else _text(rest, "method").encode("latin-1"),
        _str_of(peer), credential, host, session, bits, again, body_bytes, prompt_bytes, prefix_bytes,
        struct.unpack(f"<{len(sums) // 4}I", sums) if sums else (), before, headers, previous, tried,
        queued_s,
    )  # fmt: skip


def _step_parts(sent: SentStep) -> Parts:
    step, bits, rest = sent.step, sent.bits, NOTHING
    if step.rejects or step.has_longer or step.is_again or step.passes_all:
        bits |= _HAS_LONGER * step.has_longer | _IS_AGAIN * step.is_again | _PASSES_ALL * step.passes_all
        bits |= _REJECTS_429 * ("429" in step.rejects) | _REJECTS_5XX * ("5xx" in step.rejects)
    if step.edits != NO_EDITS:
        model, given, dropped = step.edits
        rest = {"model": model, "set": _latin(given), "drop": dropped}
    if sent.ticket:
        rest = {**rest, "ticket": sent.ticket}
    fixed = (
        sent.number, sent.attempt, bits, sent.usage_route, step.first_byte_s, step.stall_s, sent.connect_s,
        sent.queued_s, sent.settings,
    )  # fmt: skip
    strings = (
        sent.address, _str_bytes(sent.name), _str_bytes(step.endpoint), _str_bytes(sent.key), _str_bytes(step.model),
        _lines_of(step.request_head), _lines_of(step.response_head),
    )  # fmt: skip
    return fixed, strings, rest


def _step_of(fixed: Sequence[Any], strings: Sequence[bytes], rest: Mapping[str, Any]) -> SentStep:
    number, attempt, bits, usage_route, first_byte_s, stall_s, connect_s, queued_s, settings = fixed
    if not (first_byte_s >= 0 and stall_s >= 0 and connect_s >= 0 and queued_s >= 0):
        raise FrameError("A time in a step is no number from 0 on.")
    address, name, endpoint, key, model, request_head, response_head = strings
    edits, ticket = NO_EDITS, ""
    if rest:
        ticket = _text(rest, "ticket")
        edits = BodyEdits(_text(rest, "model"), _unlatin(_rows(rest, "set", 2)), _texts(rest, "drop"))
    rejects = ()
    if bits & _ANY_REJECTS:
        rejects = tuple(one for one, bit in zip(_REJECTS, (_REJECTS_429, _REJECTS_5XX), strict=True) if bits & bit)
    step = AttemptStep(
        _str_of(endpoint), _str_of(model), edits, _pairs_of(request_head), _pairs_of(response_head), first_byte_s,
        stall_s, rejects, bits & _HAS_LONGER != 0, bits & _IS_AGAIN != 0, bits & _PASSES_ALL != 0,
    )  # fmt: skip
    return SentStep(
        number, attempt, step, address, _str_of(name), _str_of(key), bits & 0xFFFF, usage_route, settings, connect_s,
        queued_s, ticket,
    )  # fmt: skip


def _outcome_parts(sent: SentOutcome) -> Parts:
    outcome, usage, rest = sent.outcome, sent.usage or UsedTokens(0, 0), NOTHING
    bits = _WANTS_NEXT * sent.wants_next | _IS_OVER * outcome.is_over
    bits |= _HAS_USAGE * (sent.usage is not None) | _IS_ESTIMATE * usage.is_estimate
    bits |= _IS_EXTERNAL * outcome.is_external | _IS_STREAM * sent.is_stream
    bits |= _TELLS_CACHED * sent.tells_cached | _LOST_USAGE * sent.has_lost_usage
    if outcome.failure is not None or sent.dropped:
        failure = None if outcome.failure is None else attrs.asdict(outcome.failure)
        rest = {"failure": failure, "dropped": sent.dropped}
    fixed = (
        sent.number, sent.attempt, sent.seq, _OUTCOME_NUMBERS[outcome.kind], outcome.status, bits, sent.asked_at,
        sent.first_at, sent.ended_at, sent.bytes_out, sent.chunks, usage.input, usage.output, usage.cached,
        sent.body_at,
    )  # fmt: skip
    texts = (sent.error, outcome.why, outcome.endpoint, sent.key, sent.model)
    return fixed, tuple(map(_str_bytes, texts)), rest


def _outcome_of(fixed: Sequence[Any], strings: Sequence[bytes], rest: Mapping[str, Any]) -> SentOutcome:
    number, attempt, seq, kind, status, bits, asked_at, first_at, ended_at, size, chunks, got, made, cached, body_at = (
        fixed
    )
    error, why, endpoint, key, model = [_str_of(text) if text else "" for text in strings]
    failure, dropped = None, ()
    if rest:
        failure, dropped = rest.get("failure"), _texts(rest, "dropped")
    outcome = Outcome(
        OUTCOMES[kind], endpoint, None if failure is None else _failure_of(failure), why, "", status,
        bits & _IS_EXTERNAL != 0, bits & _IS_OVER != 0,
    )  # fmt: skip
    usage = UsedTokens(got, made, cached, bits & _IS_ESTIMATE != 0) if bits & _HAS_USAGE else None
    return SentOutcome(
        number, attempt, seq, outcome, bits & _WANTS_NEXT != 0, asked_at, first_at, ended_at, size, chunks, usage,
        error, key, model, dropped, bits & _IS_STREAM != 0, bits & _TELLS_CACHED != 0, body_at, bits & _LOST_USAGE != 0,
    )  # fmt: skip


def _wait_parts(sent: WaitsFor) -> Parts:
    rest = {"kind": sent.wait.kind, "seconds": sent.wait.seconds, "why": sent.why, "comment_s": sent.comment_s}
    return (sent.number, sent.ready_at), (), rest


def _wait_of(fixed: Sequence[Any], _strings: Sequence[bytes], rest: Mapping[str, Any]) -> WaitsFor:
    kind = _text(rest, "kind")
    if kind not in ("place", "pause"):
        raise FrameError(f"A request cannot wait for {kind!r}.")
    wait = Wait(kind, _float_of(rest, "seconds"))
    return WaitsFor(fixed[0], wait, _text(rest, "why"), _float_of(rest, "comment_s"), MonotonicNs(fixed[1]))


def _refuse_parts(sent: Refused) -> Parts:
    return (sent.number,), (), attrs.asdict(sent.refuse.failure)


def _refuse_of(fixed: Sequence[Any], _strings: Sequence[bytes], rest: Mapping[str, Any]) -> Refused:
    return Refused(fixed[0], Refuse(_failure_of(rest)))


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
    """None: it is a `Note`."""
    bits: int = 0


_OWNER, _RELAY = (True, False), (False, True)
LAYOUTS: Mapping[str, Layout] = {
    "ask": Layout(1, *_RELAY, "IQIBBHBII", 7, _ask_parts, _ask_of),
    "step": Layout(2, *_OWNER, "IBIBffffI", 7, _step_parts, _step_of),
    "outcome": Layout(3, *_RELAY, "IBQBHBQQQQIIIIQ", 5, _outcome_parts, _outcome_of),
    "head": Layout(4, *_RELAY, "IH", 0, _head_parts, _head_of),
    "wait": Layout(5, *_OWNER, "IQ", 0, _wait_parts, _wait_of),
    "refuse": Layout(6, *_OWNER, "I", 0, _refuse_parts, _refuse_of),
    **{name: Layout(number, *_OWNER) for number, name in enumerate((
        "go", "gone", "settings", "commit", "forget", "listen", "unlisten", "accept", "keep", "drop", "hint", "cancel",
        "list", "settled", "retire", "drain", "hurry", "nudge", "bye", "end", "endpoint",
    ), 16)},
    **{name: Layout(number, *_RELAY) for number, name in enumerate((
        "leave", "report", "ready", "prepared", "cannot", "record", "sums", "added", "shadow", "told", "drained",
        "retiring",
    ), 64)},
    "hello": Layout(128, from_owner=True, from_relay=True),
    "pulse": Layout(129, from_owner=True, from_relay=True, bits=OPTIONAL),
}  # fmt: skip
"""All kinds. A number is never used again for something else."""
