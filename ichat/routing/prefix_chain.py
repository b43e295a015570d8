"""The chain of a request: digests of the beginning of its prompt, by the bytes of its body. Pure functions.

A client that goes on with a conversation sends the same bytes again and more after them, since it serializes alike. So
two requests that share the beginning of their prompts share the beginning of their chains.
"""

import hashlib
from collections.abc import Mapping, Sequence

from ichat.http.json_body import Body
from ichat.protocol.prefixes import BOUNDARIES, DIGEST_BYTES

PROMPTS: Mapping[bytes, bytes] = {
    prefix + route: member
    for route, member in (
        (b"/chat/completions", b"messages"),
        (b"/completions", b"prompt"),
        (b"/responses", b"input"),
        (b"/messages", b"messages"),
    )
    for prefix in (b"/v1", b"")
}
"""The member that the prompt is made of, by the request's path. Other routes generate nothing."""
_BEFORE = ("tools", "functions", "system", "instructions", "documents", "chat_template", "chat_template_kwargs",
           "cache_salt")  # fmt: skip
"""Members that stand before that in an engine's prompt, or decide what is shared with whom."""
_SPAN_BYTES_MAX = BOUNDARIES[-1]
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
    start, end = _span_of(body, names, member.decode())
    length = end - start
    if length < BOUNDARIES[0]:
        return None
    running = hashlib.sha1(model.encode(), usedforsecurity=False)
    for name in _BEFORE:
        if name in names:
            running.update(_value_of(body, names, name))
    digests: list[bytes] = []
    with memoryview(body) as view:
        at = start
        for boundary in BOUNDARIES:
            if boundary > length:
                break
            running.update(view[at : start + boundary])
            at = start + boundary
            digests.append(running.copy().digest()[:DIGEST_BYTES])
    return PrefixChain(length, digests)


def _span_of(body: Body, names: Sequence[str], name: str) -> tuple[int, int]:
    """Return where the value of a member begins, and where the next member does; (0, 0) if it is not found."""
    key = b'"%b":' % name.encode()
    start = body.find(key, 0, _SEARCHED_BYTES_MAX)
    if start < 0:
        return 0, 0
    start += len(key)
    place = names.index(name) + 1 if name in names else len(names)
    end = -1
    if place < len(names):
        end = body.find(b'"%b":' % names[place].encode(), start, start + _SPAN_BYTES_MAX)
    return start, end if end >= 0 else len(body)


def _value_of(body: Body, names: Sequence[str], name: str) -> bytes:
    """Return what stands for the name and the value of a member."""
    start, end = _span_of(body, names, name)
    value = body[start : min(end, start + _SPAN_BYTES_MAX)].rstrip(b" \t\r\n,}")  # as at the end of the body
    return name.encode() + hashlib.sha1(value, usedforsecurity=False).digest()
