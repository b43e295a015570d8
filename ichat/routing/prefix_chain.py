"""The chain of a request: digests of the beginning of its prompt, by the bytes of its body. Pure functions.

A client that goes on with a conversation sends the same bytes again and more after them, since it serializes alike. So
two requests that share the beginning of their prompts share the beginning of their chains.

A digest is the digest before it times a constant, plus the Adler-32 of the bytes between the two. That is a sum and no
proof: a client can construct two prompts with the same digest. A request then goes where the other is cached.
But its code is short and needs no table: in a gateway, which does other work in between, SHA-1 needs twice the time.

`sums_of` reads the body, without a model. `chain_of` makes the chain of a model from that, so a request that goes on to
another model has its body read only once.
"""

import functools
import hashlib
import itertools
import struct
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from zlib import adler32

import attrs

from ichat.http.json_body import Body
from ichat.protocol.prefixes import BOUNDARIES

PROMPTS: Mapping[bytes, str] = {
    prefix + route: member
    for route, member in (
        (b"/chat/completions", "messages"),
        (b"/completions", "prompt"),
        (b"/responses", "input"),
        (b"/messages", "messages"),
    )
    for prefix in (b"/v1", b"")
}
"""The member that the prompt is made of, by the request's path. Other routes generate nothing."""
_BEFORE = (
    "tools", "functions", "system", "instructions", "documents", "chat_template", "chat_template_kwargs", "cache_salt"
)  # fmt: skip
"""Members that stand before that in an engine's prompt, or decide which clients share it."""
_has_none_before = frozenset(_BEFORE).isdisjoint
_PIECES = [slice(start, end) for start, end in itertools.pairwise((0, *BOUNDARIES))]
"""What lies between two boundaries."""
_FACTOR = 0x9E3779B97F4A7C15
"""Any odd number of 64 bits without a pattern."""
_MASK = (1 << 64) - 1
_bytes_of = struct.Struct(">Q").pack
_NOTHING: Mapping[str, bytes] = {}
_MODELS_MAX = 1024
"""At most this many models are remembered with the beginnings of their chains."""
_SPAN_BYTES_MAX = BOUNDARIES[-1]
_COPIED_BYTES_MAX = 8192
"""Up to this size, a copy of the prefix costs less than a view: its small pieces are made and read more quickly."""
_TAIL_BYTES = 512
"""The part of a body after its prompt is mostly shorter than this, and is searched first."""
_SEARCHED_BYTES_MAX = 1024 * 1024
"""A member that begins later in the body is not looked for."""


class PrefixChain:
    """The digests of a request's prefix at BOUNDARIES, and the beliefs about them when its endpoint was chosen."""

    __slots__ = ("deepest", "digests", "holders", "length", "matched", "was_wrong")

    def __init__(self, length: int, digests: Sequence[bytes]) -> None:
        self.length = length
        """Of the whole prefix, in bytes."""
        self.digests = digests
        self.matched = 0
        """The bytes that the chosen endpoint was believed to hold."""
        self.deepest = 0
        """The most that any endpoint was believed to hold then."""
        self.holders = 0
        """How many endpoints were believed to hold a part of it."""
        self.was_wrong = False
        """Whether the response showed that the chosen endpoint held far less."""

    def __repr__(self) -> str:
        return f"<PrefixChain {self.matched}/{self.length} bytes, {len(self.digests)} digests>"


@attrs.define(eq=False)
class PrefixSums:
    """All that the chains of a request need of its body, for any model."""

    length: int
    """Of the whole prefix, in bytes."""
    checksums: Sequence[int]
    """For each of BOUNDARIES in the prefix: the Adler-32 of the bytes between it and the boundary before."""
    before: Mapping[str, bytes]
    """The mark of each member before the prompt, by its name, in the order of `_BEFORE`."""


def sums_of(path: bytes, body: Body, names: Sequence[str]) -> PrefixSums | None:
    """Return the sums of a request, or None if its prefix is too short or its route has no prompt.

    `names` are those of the body's members in their order. The search for a member is quick, not exact: a body may be
    written so that another place is found. The conversation's next request leads to the same place.
    """
    member = PROMPTS.get(path)
    if member is None or len(body) <= BOUNDARIES[0]:
        return None
    start, end = _span_of(body, names, member)
    length = end - start
    if length < BOUNDARIES[0]:
        return None
    before = _NOTHING
    if not _has_none_before(names):
        before = {name: _mark_of(name, _value_of(body, names, name)) for name in _BEFORE if name in names}
    prefix = body[start:end] if length < _COPIED_BYTES_MAX else memoryview(body)[start:end]
    pieces = _PIECES[: bisect_right(BOUNDARIES, length)]
    return PrefixSums(length, [adler32(prefix[piece]) for piece in pieces], before)


def chain_of(
    sums: PrefixSums, model: str, given: Iterable[tuple[str, bytes]] = (), dropped: Collection[str] = ()
) -> PrefixChain:
    """Return the chain of a request for a model.

    The model gets the members `given`, as JSON, in place of the client's, and none of those that are `dropped`.
    """
    before = sums.before
    if given or dropped:
        before = _edited(before, given, dropped)
    digest = _seed(model.encode() + b"".join(before.values())) if before else _seed_of(model)
    digests: list[bytes] = []
    for checksum in sums.checksums:
        digest = (digest * _FACTOR + checksum) & _MASK
        digests.append(_bytes_of(digest))
    return PrefixChain(sums.length, digests)


def chain_for(
    read: Callable[[], PrefixSums | None], model: str, given: Iterable[tuple[str, bytes]], dropped: Collection[str]
) -> PrefixChain | None:
    """Return the chain of a request for a model, as `chain_of` does, from the sums that `read` returns, if any."""
    sums = read()
    return None if sums is None else chain_of(sums, model, given, dropped)


def _edited(
    before: Mapping[str, bytes], given: Iterable[tuple[str, bytes]], dropped: Collection[str]
) -> Mapping[str, bytes]:
    """Return the marks of the members before the prompt after a change of the body."""
    new = {name: _mark_of(name, value) for name, value in given if name in _BEFORE}
    if not new and _has_none_before(dropped):
        return before
    marks = {**before, **new}
    return {name: marks[name] for name in _BEFORE if name in marks and name not in dropped}


def _seed(value: bytes) -> int:
    """Return the beginning of a chain with this value: with another value, all digests of the chain differ."""
    return int.from_bytes(hashlib.sha1(value, usedforsecurity=False).digest()[:8], "big")


@functools.lru_cache(_MODELS_MAX)
def _seed_of(model: str) -> int:
    """Return the seed of a request that has nothing but its prompt."""
    return _seed(model.encode())


def _span_of(body: Body, names: Sequence[str], name: str) -> tuple[int, int]:
    """Return where the value of a member begins, and where the next member does; (0, 0) if it is not found."""
    key = f'"{name}":'.encode()
    start = body.find(key, 0, _SEARCHED_BYTES_MAX)
    if start < 0:
        return 0, 0
    start += len(key)
    place = names.index(name) + 1 if name in names else len(names)
    if place == len(names):
        return start, len(body)
    key = f'"{names[place]}":'.encode("utf-8", "surrogatepass")
    end = body.rfind(key, max(start, len(body) - _TAIL_BYTES))
    if end < 0:
        end = body.find(key, start, start + _SPAN_BYTES_MAX)
    return start, end if end >= 0 else len(body)


def _value_of(body: Body, names: Sequence[str], name: str) -> Body:
    """Return the value of a member, as it is written."""
    start, end = _span_of(body, names, name)
    return body[start : min(end, start + _SPAN_BYTES_MAX)]


def _mark_of(name: str, value: Body) -> bytes:
    """Return the mark of a member with this value. The end of the value is cut off, as at the end of a body."""
    return name.encode() + hashlib.sha1(value.rstrip(b" \t\r\n,}"), usedforsecurity=False).digest()
