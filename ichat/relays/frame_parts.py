"""The parts of frames: texts, headers, and JSON of checked types. All raise FrameError for damage."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from operator import methodcaller
from typing import Any, cast

from ichat.proxy.refusals import Failure
from ichat.proxy.steps import HeaderPairs
from ichat.relays.values import FrameError

_PAIR = re.compile(rb"([^\r\n]*?): ([^\r\n]*)\r\n")
_FAILURE_TYPES: Mapping[str, tuple[type, ...]] = {
    "status": (int,), "code": (str,), "message": (str,), "kind": (str,), "param": (str, type(None)),
    "retry_after_s": (int, type(None)), "retry": (bool, type(None)), "limit": (str,),
    "allow": (str,),
}  # fmt: skip


def rows_in(rest: Mapping[str, Any], name: str, width: int) -> tuple[Any, ...]:
    """Return a list of rows of texts, each `width` long."""
    rows = rest.get(name, ())
    for row in rows:
        if len(row) != width or not all(isinstance(cell, str) for cell in row):
            raise FrameError(f"The rows of `{name}` in a frame are no lists of {width} texts.")
    return tuple(map(tuple, rows))


def texts_in(rest: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return a list of texts."""
    return tuple(row[0] for row in rows_in({name: [[text] for text in rest.get(name, ())]}, name, 1))


def text_in(rest: Mapping[str, Any], name: str) -> str:
    """Return a text."""
    return texts_in({name: [rest.get(name, "")]}, name)[0]


def float_in(rest: Mapping[str, Any], name: str) -> float:
    """Return a number from 0 on."""
    value = rest.get(name, 0.0)
    if not isinstance(value, int | float) or not 0.0 <= value < math.inf:
        raise FrameError(f"The field `{name}` of a frame is {value!r}, not a number from 0 on.")
    return value


def latin(pairs: Iterable[tuple[Any, bytes]]) -> list[tuple[Any, str]]:
    """Return pairs with their bytes as Latin-1."""
    return [(name, value.decode("latin-1")) for name, value in pairs]


def unlatin(rows: Iterable[tuple[str, str]]) -> tuple[tuple[str, bytes], ...]:
    """Return pairs with the bytes of their Latin-1."""
    return tuple((name, value.encode("latin-1")) for name, value in rows)


def lines_of(pairs: HeaderPairs) -> bytes:
    """Return headers as the lines of a head."""
    lines = b"".join([b"%s: %s\r\n" % pair for pair in pairs])
    if lines.count(b"\n") != len(pairs) or lines.count(b"\r") != len(pairs):
        raise FrameError("A header in a frame has a line break.")
    return lines


def pairs_of(lines: bytes) -> HeaderPairs:
    """Return the headers of the lines of a head."""
    found = _PAIR.findall(lines)
    count = len(found)
    if lines.count(b"\n") != count or lines.count(b"\r") != count or lines[-2:] not in (b"", b"\r\n"):
        raise FrameError("The headers in a frame are no lines with colons.")
    return tuple(found)


bytes_of: Callable[[str], bytes] = methodcaller("encode", "utf-8", "surrogatepass")
"""Returns a text as bytes; it may have halves of surrogates."""
text_of: Callable[[bytes], str] = methodcaller("decode", "utf-8", "surrogatepass")
"""Returns the text of bytes."""


def json_of(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a JSON object."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def object_in(data: bytes) -> Mapping[str, Any]:
    """Return the JSON object of these bytes. Raises ValueError, TypeError."""
    rest = json.loads(data.decode(), parse_constant=_no_number)
    if not isinstance(rest, dict):
        raise TypeError("its JSON is no object")
    return cast("dict[str, Any]", rest)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def failure_in(rest: Mapping[str, Any]) -> Failure:
    """Return the error in a frame."""
    for name, types in _FAILURE_TYPES.items():
        if name in rest and (not isinstance(rest[name], types) or (rest[name] is True and bool not in types)):
            raise FrameError(f"The field `{name}` of an error in a frame is {rest[name]!r}.")
    return Failure(**{name: rest[name] for name in _FAILURE_TYPES if name in rest})
