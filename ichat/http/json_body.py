"""Read and change members of a JSON request body by spans of bytes, without parsing the whole.

The body is scanned for its top-level members (a form is scanned for its fields, in `multipart.py`). The insides of
values are skipped; the upstream will check them. Other tasks run while a body is read, for any size and content.
A changed body is slices of the old body and new values, joined once.
"""

import codecs
import itertools
import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import cast

import attrs
import trio

from ichat.errors import ApiError, bad_request

Body = bytes | bytearray
"""A whole request body; it must not change while it is scanned."""

PARSED_BYTES_MAX = 64 * 1024
"""Up to this size, parsing a JSON body costs less than scanning it."""
MEMBERS_MAX = 10_000
NAME_BYTES_MAX = 4096
"""Bytes of a member's name, and of a model's name if the body is not parsed."""
STEPS_MAX = 2000
TURN_BYTES_MAX = 256 * 1024
"""After this many steps or bytes, other tasks get their turn."""
WINDOW_BYTES_MAX = 64 * 1024
"""Bytes scanned in a step, except for the fast search for the end of a string."""
_WINDOW_BYTES_MIN = 256
_NESTED_BYTES_MAX = 16 * 1024
"""The same while brackets are counted, which costs more."""

_NAME = re.compile(rb'"(?:([ !#-\[\]-~]*)"|[^"\\]*(?:\\.[^"\\]*)*")', re.DOTALL)
"""A string; the group is its text if that needs no decoding."""
_SPACE = re.compile(rb"[ \t\n\r]{0,65536}")
"""White space in a single place; more of it is refused."""
_SCALAR = re.compile(
    rb"-?(?:0|[1-9][0-9]{0,4299})(?:\.[0-9]{1,4299})?(?:[eE][-+]?[0-9]{1,4299})?|true|false|null|NaN|-?Infinity"
)
"""The scalars that `json.loads` accepts; it refuses longer integers, too."""

_MODEL = re.compile(rb'"model"[ \t\n\r]*:[ \t\n\r]*("[^"\\]*(?:\\.[^"\\]*)*")')
_BRACKET = re.compile(rb"[{}\[\]]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
_IS_OPENING = bytes(byte in b"{[" for byte in range(256))


@attrs.frozen
class Member:
    """A member of a JSON object, and its place in the body."""

    name: str
    start: int
    """Index of the quote that opens its name."""
    value_start: int
    end: int
    """Index after its value."""


async def members_of(body: Body) -> list[Member]:
    """Return the members of a JSON object in their order; the insides of values are not checked.

    Raises ApiError 400 for a body that is no JSON object in UTF-8 or has too many members.
    """
    cursor = Cursor(body, len(codecs.BOM_UTF8) if body.startswith(codecs.BOM_UTF8) else 0)
    cursor.skip_space()
    if not cursor.takes(b"{"):
        if cursor.stands_at(b'["-0123456789tfnIN'):
            raise bad_request("The request body must be a JSON object.")
        raise cursor.expected("an object")
    members: list[Member] = []
    cursor.skip_space()
    while not cursor.takes(b"}"):
        if members:
            if not cursor.takes(b","):
                raise cursor.expected("',' or '}'")
            cursor.skip_space()
        if len(members) == MEMBERS_MAX:
            raise bad_request(f"The request body has more than {MEMBERS_MAX} members.")
        start = cursor.at
        name = cursor.take_name()
        cursor.skip_space()
        if not cursor.takes(b":"):
            raise cursor.expected("':'")
        cursor.skip_space()
        value_start = cursor.at
        await cursor.skip_value()
        members.append(Member(name, start, value_start, cursor.at))
        cursor.skip_space()
        await cursor.step()
    cursor.skip_space()
    if cursor.at < len(body):
        raise cursor.expected("nothing more")
    return members


def value_of(body: Body, member: Member) -> object:
    """Return the parsed value of a member. Raises ApiError 400."""
    return parsed_value(member.name, body[member.value_start : member.end])


def parsed_value(name: str, value: Body) -> object:
    """Return the value of a member of this name, as it is written, parsed. Raises ApiError 400."""
    try:
        return json.loads(value.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise bad_request(f"The request body is not JSON: `{name}`: {error}.", param=name) from error


def rewrite_json(
    body: Body, members: Sequence[Member], replace: Mapping[str, bytes], drop: Container[str], *, before: bytes = b""
) -> bytes:
    """Return the body with new values and without some members; all else stays byte for byte.

    ``before`` is put before the first member, and ends with a comma.

    ``members`` are all of the body's. ``replace`` has values as JSON; it and ``drop`` apply to every member of a name,
    and ``drop`` wins. A member is dropped with the comma and the white space after it, or before it if it is the last.
    """
    last = max((index for index, member in enumerate(members) if member.name not in drop), default=-1)
    if last < 0:
        before = before.removesuffix(b",")
    spans = [(members[0].start, members[0].start, before)] if before else []
    for index, member in enumerate(members[: last + 1]):
        if member.name in drop:
            spans.append((member.start, members[index + 1].start, b""))
        elif member.name in replace:
            spans.append((member.value_start, member.end, replace[member.name]))
    if last + 1 < len(members):
        start = members[last].end if last >= 0 else members[0].start
        spans.append((start, members[-1].end, b""))
    return spliced(body, spans)


def find_model(body: Body) -> Member | None:
    r"""Return the member `model` of a JSON object if it is a string, and a quick search finds it for certain.

    That is so where its name stands in the body only once, and cannot be written in another way: `\u006` begins the
    escapes of all its letters.
    """
    start = body.find(b'"model"')
    if start < 0 or body.find(b'"model"', start + 1) >= 0 or b"\\u006" in body:
        return None
    match = _MODEL.match(body, start)
    return None if match is None else Member("model", start, match.start(1), match.end())


class Cursor:
    """A place in a body that a scan moves forward. Methods that may move it far let other tasks run."""

    def __init__(self, body: Body, at: int) -> None:
        self.body = body
        self.at = at
        self._steps = 0
        self._turn_end = at + TURN_BYTES_MAX

    def stands_at(self, any_of: bytes) -> bool:
        """Return whether one of these bytes is next."""
        return self.at < len(self.body) and self.body[self.at] in any_of

    def takes(self, expected: bytes) -> bool:
        """Skip these bytes if they are next; return whether they were."""
        found = self.body.startswith(expected, self.at)
        if found:
            self.at += len(expected)
        return found

    def expected(self, what: str) -> ApiError:
        """Return the error for something else than expected at this place."""
        where = f"at byte {self.at}" if self.at < len(self.body) else "where it ends"
        return bad_request(f"The request body is not JSON: expected {what} {where}.")

    def skip_space(self) -> None:
        """Skip white space."""
        match = _SPACE.match(self.body, self.at)
        self.at = match.end() if match else self.at

    def take_name(self) -> str:
        """Skip the name that begins here, and return it. Raises ApiError 400."""
        match = _NAME.match(self.body, self.at, self.at + NAME_BYTES_MAX)
        if match is None:
            raise self.expected(f"a name in double quotes, of at most {NAME_BYTES_MAX} bytes,")
        try:
            if match[1] is not None:
                name = match[1].decode("ascii")
            else:
                name = cast("str", json.loads(match[0].decode("utf-8", "surrogatepass")))
        except ValueError as error:
            raise bad_request(f"The request body is not JSON: a name, at byte {self.at}: {error}.") from error
        self.at = match.end()
        return name

    async def skip_value(self) -> None:
        """Skip the value that begins here. Raises ApiError 400 if there is none or it does not end."""
        if self.takes(b'"'):
            await self._skip_string()
        elif self.stands_at(b"{["):
            await self._skip_nested()
        else:
            match = _SCALAR.match(self.body, self.at)
            if match is None:
                raise self.expected("a value")
            self.at = match.end()

    async def _skip_string(self) -> None:
        """Skip the string after its opening quote."""
        body = self.body
        quote = body.find(b'"', self.at)
        if quote >= 0 and body[quote - 1] != 0x5C:
            self.at = quote + 1
            return
        size = _WINDOW_BYTES_MIN
        while quote >= 0:  # there are escapes: remove them, window by window, to see which quotes remain
            window = _without_escapes(body[self.at : self.at + size])
            end = window.find(b'"')
            if end >= 0:
                self.at += end + 1
                return
            if len(window) < size:
                break
            self.at += size - window.endswith(b"\\")
            size = min(2 * size, WINDOW_BYTES_MAX)
            await self.step()
        self.at = len(body)
        raise self.expected("the end of a string")

    async def _skip_nested(self) -> None:
        """Skip the array or object that begins here, by counting the brackets outside of strings."""
        body = self.body
        depth = 0
        size = _WINDOW_BYTES_MIN
        while self.at < len(body):
            window = _without_escapes(body[self.at : self.at + size])
            parts = window.split(b'"')  # alternately outside and inside of strings
            brackets = b"".join(parts[::2]).translate(_IS_OPENING, _NOT_BRACKETS)
            for nth, is_opening in enumerate(brackets, 1):
                depth += 1 if is_opening else -1
                if not depth:
                    self.at += _behind_bracket(parts, nth)
                    return
            self.at += len(window)
            if len(parts) % 2 == 0:
                self.at -= len(parts[-1])
                await self._skip_string()
            size = min(2 * size, _NESTED_BYTES_MAX)
            await self.step(len(parts) + len(brackets))
        raise self.expected("the end of a value")

    async def skip_behind(self, expected: bytes) -> bool:
        """Skip to the end of the place where these bytes are next; return whether they are."""
        while self.at < len(self.body):
            found = self.body.find(expected, self.at, self.at + WINDOW_BYTES_MAX + len(expected))
            if found >= 0:
                self.at = found + len(expected)
                return True
            self.at += WINDOW_BYTES_MAX
            await self.step()
        return False

    async def step(self, steps: int = 1) -> None:
        """Count steps, and let other tasks run when it is time."""
        self._steps += steps
        if self._steps >= STEPS_MAX or self.at >= self._turn_end:
            self._steps = 0
            self._turn_end = self.at + TURN_BYTES_MAX
            await trio.lowlevel.checkpoint()


def _without_escapes(window: Body) -> Body:
    """Return as many bytes, in which every quote opens or closes a string."""
    return window.replace(b"\\\\", b"..").replace(b'\\"', b"..") if b"\\" in window else window


def _behind_bracket(parts: Sequence[Body], nth: int) -> int:
    """Return the index after the nth bracket, for bytes split at their quotes that begin outside of strings."""
    at = number = 0
    while (count := len(parts[number].translate(None, _NOT_BRACKETS))) < nth:
        nth -= count
        at += len(parts[number]) + len(parts[number + 1]) + 2
        number += 2
    return at + next(itertools.islice(_BRACKET.finditer(parts[number]), nth - 1, None)).end()


def spliced(body: Body, spans: Iterable[tuple[int, int, bytes]]) -> bytes:
    """Return the body with other bytes in place of these spans, which are in order and do not overlap."""
    view = memoryview(body)
    pieces: list[bytes | memoryview] = []
    at = 0
    for start, end, new in spans:
        pieces += (view[at:start], new)
        at = end
    return b"".join([*pieces, view[at:]]) if pieces else bytes(body)
