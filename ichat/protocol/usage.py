"""The tokens that a request used, as its worker tells its gateway.

A request with the header `x-ichat-usage: 1` gets them in a header of its response, or in a trailer where the body is in
chunks. The gateway passes neither on. The engine itself counts, so no part of a body is read for it.
"""

import re
from collections.abc import Callable, Iterable

USAGE_HEADER = b"x-ichat-usage"
USAGE_WANTED = (USAGE_HEADER, b"1")

Usage = tuple[int, int, int]
"""The tokens of the prompt, those of the answer, and how many of the prompt's were cached."""

_VALUE = re.compile(rb"(\d{1,12}),(\d{1,12}),(\d{1,12})")
_TRAILER = re.compile(rb"(?:^|\n)(?i:x-ichat-usage):[ \t]*(\d{1,12},\d{1,12},\d{1,12})[ \t]*\r\n")


def value_of_usage(parts: Iterable[Callable[[], Usage]]) -> bytes:
    """Return the header's value for a request that was answered in these parts."""
    given = made = cached = 0
    for part in parts:
        counts = part()
        given, made, cached = given + counts[0], made + counts[1], cached + counts[2]
    return b"%d,%d,%d" % (given, made, cached)


def parse_usage(value: bytes) -> Usage | None:
    """Return what the header says; None if that is not valid."""
    match = _VALUE.fullmatch(value)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))


def usage_in_trailers(lines: bytes | bytearray) -> Usage | None:
    """Return what is said in the trailers of a body; None if nothing is."""
    match = _TRAILER.search(lines)
    return None if match is None else parse_usage(bytes(match[1]))
