"""The chain of a request: digests of the beginning of its prompt, by the bytes of its body. Pure functions.

A client that goes on with a conversation sends the same bytes again and more after them, since it serializes alike. So
two requests that share the beginning of their prompts share the beginning of their chains.
"""

import hashlib
import itertools
import operator
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from ichat.http.json_body import Body
from ichat.protocol.prefixes import BOUNDARIES, DIGEST_BYTES

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
"""Members that stand before that in an engine's prompt, or decide what is shared with whom; a dictionary for `keys`."""
_PIECES = [slice(start, end) for start, end in itertools.pairwise((0, *BOUNDARIES))]
"""What lies between two boundaries."""
_first_bytes = operator.itemgetter(slice(DIGEST_BYTES))
_SPAN_BYTES_MAX = BOUNDARIES[-1]
_TAIL_BYTES = 512
"""What follows a prompt is mostly so short, and is looked for there first."""
_SEARCHED_BYTES_MAX = 1024 * 1024
"""A member that begins later in the body is not looked for."""


class PrefixChain:
    """The digests of a request's prefix at BOUNDARIES, and what was believed of them when its endpoint was chosen."""

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
        """Whether the response showed that the chosen one held far less."""

    def __repr__(self) -> str:
        return f"<PrefixChain {self.matched}/{self.length} bytes, {len(self.digests)} digests>"


def chain_of(path: bytes, body: Body, names: Sequence[str], model: str) -> PrefixChain | None:
    """Return the chain of a request, or None if its prefix is too short or its route has no prompt.

    `names` are those of the body's members in their order. The search for a member is quick, not exact: a body may be
    written so that another place is found, which is the same one in the conversation's next request.
    """
    member = PROMPTS.get(path)
    if member is None or len(body) <= BOUNDARIES[0]:
        return None
    start, end = _span_of(body, names, member)
    length = end - start
    if length < BOUNDARIES[0]:
        return None
    running = hashlib.sha1(model.encode(), usedforsecurity=False)
    if not _BEFORE.keys().isdisjoint(names):
        for name in _BEFORE:
            if name in names:
                running.update(_value_of(body, names, name))
    # This is the longest loop on the way of a request, so it runs in C as far as it can. The views end with it.
    pieces = map(memoryview(body)[start:end].__getitem__, _PIECES[: bisect_right(BOUNDARIES, length)])
    digest = running.digest
    return PrefixChain(length, list(map(_first_bytes, [digest() for _ in map(running.update, pieces)])))


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
