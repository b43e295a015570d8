"""The frames that each request has: `ask`, `step` and `outcome`, written and read without any detour.

They are read where they stand in the bytes that have arrived. Most of a step and of an outcome is the same for many
requests: for each endpoint, key and model. Those parts are written and read once, and then remembered.
"""

import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import attrs

from ichat.observability.request_record import UsedTokens
from ichat.proxy.steps import NO_EDITS, AttemptStep, BodyEdits, HeaderPairs, Outcome, OutcomeKind
from ichat.relays.frame_parts import (
    bytes_of,
    failure_in,
    float_in,
    json_of,
    latin,
    lines_of,
    object_in,
    pairs_of,
    rows_in,
    text_in,
    text_of,
    texts_in,
    unlatin,
)
from ichat.relays.values import NOTHING, FrameError, SentAsk, SentOutcome, SentStep

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
ASK = "IQIBBHBII"
_STEP_OWN, _STEP_SHARED = "IBf", "IffI"
_OUTCOME_OWN, _OUTCOME_SHARED = "IBQQQQQIIIIQ", "BHB"
STEP, OUTCOME = _STEP_OWN + _STEP_SHARED, _OUTCOME_OWN + _OUTCOME_SHARED
"""The fixed fields of each, as `struct` names them: first those of the request alone, then those that many share."""
ASK_STRINGS, STEP_STRINGS, OUTCOME_STRINGS = 7, 6, 5
_BeforeHead = tuple[str, str, BodyEdits]
_AfterHead = tuple[HeaderPairs, float, float, tuple[str, ...], bool, bool, bool]
"""The fields of an `AttemptStep` before the headers of the request, and after them."""
REMEMBERED = 1024
"""How many shared parts are remembered of each kind."""
SHARED_BYTES_MAX = 1024
"""A longer part is not remembered."""
_ASK = struct.Struct(f"<IBBH{ASK}B{ASK_STRINGS}H")
_STEP, _STEP_REST = struct.Struct(f"<IBBH{_STEP_OWN}"), struct.Struct(f"<{_STEP_SHARED}B{STEP_STRINGS}H")
_OUTCOME = struct.Struct(f"<IBBH{_OUTCOME_OWN}")
_OUTCOME_REST = struct.Struct(f"<{_OUTCOME_SHARED}B{OUTCOME_STRINGS}H")
_STEP_BYTES = _STEP.size + _STEP_REST.size
_ASK_HEAD = _ASK.size - 1 - 2 * ASK_STRINGS
_STEP_HEAD = _STEP_BYTES - 1 - 2 * STEP_STRINGS
_OUTCOME_HEAD = _OUTCOME.size + _OUTCOME_REST.size - 1 - 2 * OUTCOME_STRINGS


def write_ask(asked: SentAsk) -> bytes:
    """Return the bytes of an ask."""
    (
        number, at, identity, model, path, method, peer, credential, host, session, bits, again, body_bytes,
        prompt_bytes, prefix_bytes, sums, before, headers, previous, tried, queued_s,
    ) = asked  # fmt: skip
    path_number, method_number = _PATH_NUMBERS.get(path, 0), _METHOD_NUMBERS.get(method, 0)
    rest = b""
    if before or headers or previous or tried or queued_s or not path_number or not method_number:
        content: dict[str, Any] = {"previous": previous, "tried": tried} if previous or tried else {}
        if not path_number or not method_number:
            content |= dict(latin((("path", path), ("method", method))))
        if before or headers:
            content["before"] = latin(before)
            content["headers"] = latin((name.decode("latin-1"), value) for name, value in headers)
        if queued_s:
            content["queued_s"] = queued_s
        rest = json_of(content)
    one, two, three = bytes_of(identity), bytes_of(model), bytes_of(peer)
    packed = struct.pack(f"<{len(sums)}I", *sums) if sums else b""
    after = b"".join((one, two, three, credential, host, session, packed, rest))
    return _ASK.pack(
        _ASK.size + len(after), 1, 0, _ASK_HEAD, number, at, body_bytes, method_number, path_number, bits, again,
        prompt_bytes, prefix_bytes, ASK_STRINGS, len(one), len(two), len(three), len(credential), len(host),
        len(session), len(packed),
    ) + after  # fmt: skip


def read_ask(data: bytes, at: int, end: int) -> SentAsk:
    """Return the ask that stands there."""
    (
        _, _, _, _, number, when, body_bytes, method, path, bits, again, prompt_bytes, prefix_bytes, _,
        id_, model, peer, credential, host, session, sums,
    ) = _ASK.unpack_from(data, at)  # fmt: skip
    id_ += (start := at + _ASK.size)
    model += id_
    peer += model
    credential += peer
    host += credential
    session += host
    sums += session
    before, headers, previous, tried, queued_s = (), (), "", (), 0.0
    is_usual = path and method
    rest = NOTHING if sums == end else _rest_in(data, sums, end)
    if rest:
        before = unlatin(rows_in(rest, "before", 2))
        headers = tuple((name.encode("latin-1"), value) for name, value in unlatin(rows_in(rest, "headers", 2)))
        previous, tried = text_in(rest, "previous"), rows_in(rest, "tried", 3)
        queued_s = float_in(rest, "queued_s")
    return SentAsk(
        number, when, text_of(data[start:id_]), text_of(data[id_:model]),
        _PATHS[path] if is_usual else text_in(rest, "path").encode("latin-1"),
        _METHODS[method] if is_usual else text_in(rest, "method").encode("latin-1"),
        text_of(data[model:peer]), data[peer:credential], data[credential:host], data[host:session], bits, again,
        body_bytes, prompt_bytes, prefix_bytes,
        struct.unpack(f"<{(sums - session) // 4}I", data[session:sums]) if sums != session else (),
        before, headers, previous, tried, queued_s,
    )  # fmt: skip


def write_step(sent: SentStep) -> bytes:
    """Return the bytes of a step."""
    number, attempt, step, address, key, bits, settings, queued_s, ticket = sent
    (
        endpoint, model, edits, request_head, response_head, first_byte_s, stall_s, rejects, has_longer, is_again,
        passes_all,
    ) = step  # fmt: skip
    if rejects or has_longer or is_again or passes_all:
        bits |= _HAS_LONGER * has_longer | _IS_AGAIN * is_again | _PASSES_ALL * passes_all
        bits |= _REJECTS_429 * ("429" in rejects) | _REJECTS_5XX * ("5xx" in rejects)
    rest = b""
    if ticket or edits != NO_EDITS:
        content: dict[str, Any] = {"ticket": ticket} if ticket else {}
        if edits != NO_EDITS:
            content |= {"model": edits.model, "set": latin(edits.set), "drop": edits.drop}
        rest = json_of(content)
    lines = lines_of(request_head) if request_head else b""
    fields = (bits, first_byte_s, stall_s, settings, STEP_STRINGS, len(lines))
    fixed, strings = _shared_of_step(fields, address, (endpoint, key, model), response_head)
    size = _STEP_BYTES + len(lines) + len(strings) + len(rest)
    return b"".join((_STEP.pack(size, 2, 0, _STEP_HEAD, number, attempt, queued_s), fixed, lines, strings, rest))


@lru_cache(REMEMBERED)
def _shared_of_step(
    fields: tuple[int | float, ...], address: bytes, names: tuple[str, ...], response_head: HeaderPairs
) -> tuple[bytes, bytes]:
    """Return the shared fields and strings of a step; the last of `fields` is the length of its own headers."""
    strings = (address, *map(bytes_of, names), lines_of(response_head))
    return _STEP_REST.pack(*fields, *map(len, strings)), b"".join(strings)


def read_step(data: bytes, at: int, end: int) -> SentStep:
    """Return the step that stands there."""
    _, _, _, _, number, attempt, queued_s = _STEP.unpack_from(data, at)
    if not queued_s >= 0:
        raise FrameError("A time in a step is no number from 0 on.")
    start = at + _STEP_BYTES
    lines = start + int.from_bytes(data[start - 2 * STEP_STRINGS : start - 2 * STEP_STRINGS + 2], "little")
    shared = data[at + _STEP.size : start], data[lines:end]
    read = _shared_in_step if end - lines <= SHARED_BYTES_MAX else _shared_in_step.__wrapped__
    names, after, address, key, bits, settings, ticket = read(*shared)
    step = AttemptStep(*names, pairs_of(data[start:lines]) if lines != start else (), *after)
    return SentStep(number, attempt, step, address, key, bits, settings, queued_s, ticket)


@lru_cache(REMEMBERED)
def _shared_in_step(fixed: bytes, strings: bytes) -> tuple[_BeforeHead, _AfterHead, bytes, str, int, int, str]:
    """Return the shared part of a step: its attempt before and after the headers, and fields of `SentStep`."""
    bits, first_byte_s, stall_s, settings, _, _, address, endpoint, key, model, response_head = _STEP_REST.unpack(fixed)
    if not (first_byte_s >= 0 and stall_s >= 0):
        raise FrameError("A time in a step is no number from 0 on.")
    endpoint += address
    key += endpoint
    model += key
    response_head += model
    edits, ticket, rejects, end = NO_EDITS, "", (), len(strings)
    if response_head != end:
        rest = _rest_in(strings, response_head, end)
        ticket = text_in(rest, "ticket")
        edits = BodyEdits(text_in(rest, "model"), unlatin(rows_in(rest, "set", 2)), texts_in(rest, "drop"))
    if bits & _ANY_REJECTS:
        rejects = tuple(one for one, bit in zip(_REJECTS, (_REJECTS_429, _REJECTS_5XX), strict=True) if bits & bit)
    return (
        (text_of(strings[address:endpoint]), text_of(strings[key:model]), edits),
        (
            pairs_of(strings[model:response_head]), first_byte_s, stall_s, rejects, bits & _HAS_LONGER != 0,
            bits & _IS_AGAIN != 0, bits & _PASSES_ALL != 0,
        ),
        strings[:address], text_of(strings[endpoint:key]), bits & 0xFFFF, settings, ticket,
    )  # fmt: skip


def write_outcome(sent: SentOutcome) -> bytes:
    """Return the bytes of an outcome."""
    (
        number, attempt, seq, outcome, wants_next, asked_at, first_at, ended_at, bytes_out, chunks, usage, error, key,
        model, dropped, is_stream, tells_cached, body_at, has_lost_usage,
    ) = sent  # fmt: skip
    kind, endpoint, failure, why, _, status, is_external, is_over, _ = outcome
    bits = _WANTS_NEXT * wants_next | _IS_OVER * is_over | _IS_EXTERNAL * is_external | _IS_STREAM * is_stream
    bits |= _TELLS_CACHED * tells_cached | _LOST_USAGE * has_lost_usage
    got = made = cached = 0
    if usage is not None:
        got, made, cached, is_estimate = usage
        bits |= _HAS_USAGE | _IS_ESTIMATE * is_estimate
    shared = _shared_of_outcome(kind, status, bits, error, why, endpoint, key, model)
    if failure is not None or dropped:
        shared += json_of({"failure": None if failure is None else attrs.asdict(failure), "dropped": dropped})
    return _OUTCOME.pack(
        _OUTCOME.size + len(shared), 3, 0, _OUTCOME_HEAD, number, attempt, seq, asked_at, first_at, ended_at, bytes_out,
        chunks, got, made, cached, body_at,
    ) + shared  # fmt: skip


@lru_cache(REMEMBERED)
def _shared_of_outcome(kind: OutcomeKind, status: int, bits: int, *texts: str) -> bytes:
    """Return the shared fields and strings of an outcome."""
    strings = [*map(bytes_of, texts)]
    return _OUTCOME_REST.pack(_OUTCOME_NUMBERS[kind], status, bits, OUTCOME_STRINGS, *map(len, strings)) + b"".join(
        strings
    )


def read_outcome(data: bytes, at: int, end: int) -> SentOutcome:
    """Return the outcome that stands there."""
    (
        _, _, _, _, number, attempt, seq, asked_at, first_at, ended_at, size, chunks, got, made, cached, body_at,
    ) = _OUTCOME.unpack_from(data, at)  # fmt: skip
    start = at + _OUTCOME.size
    read = _shared_in_outcome if end - start <= SHARED_BYTES_MAX else _shared_in_outcome.__wrapped__
    outcome, bits, error, key, model, dropped = read(data[start:end])
    return SentOutcome(
        number, attempt, seq, outcome, bits & _WANTS_NEXT != 0, asked_at, first_at, ended_at, size, chunks,
        UsedTokens(got, made, cached, bits & _IS_ESTIMATE != 0) if bits & _HAS_USAGE else None, error, key, model,
        dropped, bits & _IS_STREAM != 0, bits & _TELLS_CACHED != 0, body_at, bits & _LOST_USAGE != 0,
    )  # fmt: skip


@lru_cache(REMEMBERED)
def _shared_in_outcome(shared: bytes) -> tuple[Outcome, int, str, str, str, tuple[str, ...]]:
    """Return the shared part of an outcome: its bits, too, and the fields of `SentOutcome` that are texts."""
    kind, status, bits, _, error, why, endpoint, key, model = _OUTCOME_REST.unpack_from(shared)
    error += (start := _OUTCOME_REST.size)
    why += error
    endpoint += why
    key += endpoint
    model += key
    failure, dropped = None, ()
    if model != len(shared):
        rest = _rest_in(shared, model, len(shared))
        given, dropped = rest.get("failure"), texts_in(rest, "dropped")
        failure = None if given is None else failure_in(given)
    outcome = Outcome(
        OUTCOMES[kind], text_of(shared[why:endpoint]), failure, text_of(shared[error:why]), "", status,
        bits & _IS_EXTERNAL != 0, bits & _IS_OVER != 0,
    )  # fmt: skip
    return (
        outcome, bits, text_of(shared[start:error]), text_of(shared[endpoint:key]), text_of(shared[key:model]), dropped
    )  # fmt: skip


def _rest_in(data: bytes, at: int, end: int) -> Mapping[str, Any]:
    """Return the JSON of a frame behind its strings, which end at `at`."""
    if at > end:
        raise ValueError("its strings are cut off")
    return object_in(data[at:end])
