"""The chain of a request: digests of the beginning of its prompt, by the bytes of its body. Pure functions.

A client that goes on with a conversation sends the same bytes again and more after them, since it serializes alike. So
two requests that share the beginning of their prompts share the beginning of their chains.

A digest is the digest before it times a constant, plus the Adler-32 of the bytes between the two. That is a sum and no
proof: a client can construct two prompts with the same digest. The only effect: one goes where the other is cached.
But its code is short and needs no table: in a gateway, which does other work in between, SHA-1 needs twice the time.
"""

import functools
import hashlib
import itertools
import struct
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from zlib import adler32

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
_BEFORE = dict.fromkeys(
    ("tools", "functions", "system", "instructions", "documents", "chat_template", "chat_template_kwargs", "cache_salt")
)
"""Members that stand before that in an engine's prompt, or decide which clients share it; a dictionary for `keys`."""
_PIECES = [slice(start, end) for start, end in itertools.pairwise((0, *BOUNDARIES))]
"""What lies between two boundaries."""
_FACTOR = 0x9E3779B97F4A7C15
"""Any odd number of 64 bits without a pattern."""
_MASK = (1 << 64) - 1
_bytes_of = struct.Struct(">Q").pack
_MODELS_MAX = 1024
"""At most this many models are remembered with the beginnings of their chains."""
_SPAN_BYTES_MAX = BOUNDARIES[-1]
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


def chain_of(path: bytes, body: Body, names: Sequence[str], model: str) -> PrefixChain | None:
    """Return the chain of a request, or None if its prefix is too short or its route has no prompt.

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
    if _BEFORE.keys().isdisjoint(names):
        digest = _seed_of(model)
    else:
        digest = _seed(model.encode() + b"".join(_value_of(body, names, name) for name in _BEFORE if name in names))
    digests: list[bytes] = []
    pieces = map(memoryview(body)[start:end].__getitem__, _PIECES[: bisect_right(BOUNDARIES, length)])
    for checksum in map(adler32, pieces):
        digest = (digest * _FACTOR + checksum) & _MASK
        digests.append(_bytes_of(digest))
    return PrefixChain(length, digests)


def _seed(value: bytes) -> int:
    """Return the beginning of a chain with this value: with another value, all digests of the chain differ."""
    return int.from_bytes(hashlib.sha1(value, usedforsecurity=False).digest()[:8], "big")


@functools.lru_cache(_MODELS_MAX)
def _seed_of(model: str) -> int:
    """Return the seed of a request that has nothing but its prompt."""
    return _seed(model.encode())


def _span_of(body: Body, names: Sequence[str], name: str) -> tuple[int, int]:
    """Return where the value of a member begins, and where the next member does; (0, 0) if it is not found."""
    key = b'"%b":' % name.encode()
    start = body.find(key, 0, _SEARCHED_BYTES_MAX)
    if start < 0:
        return 0, 0
    start += len(key)
    place = names.index(name) + 1 if name in names else len(names)
    if place == len(names):
        return start, len(body)
    key = b'"%b":' % names[place].encode()
    end = body.rfind(key, max(start, len(body) - _TAIL_BYTES))
    if end < 0:
        end = body.find(key, start, start + _SPAN_BYTES_MAX)
    return start, end if end >= 0 else len(body)


def _value_of(body: Body, names: Sequence[str], name: str) -> bytes:
    """Return what stands for the name and the value of a member."""
    start, end = _span_of(body, names, name)
    value = body[start : min(end, start + _SPAN_BYTES_MAX)].rstrip(b" \t\r\n,}")  # as at the end of the body
    return name.encode() + hashlib.sha1(value, usedforsecurity=False).digest()
