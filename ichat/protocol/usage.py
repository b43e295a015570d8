"""The tokens that a request used, as its worker reports them to its gateway.

A request with the header `x-ichat-usage` gets them in a header of its response, or in a trailer where the body is in
chunks. A background response is reported later, in a heartbeat, by the ticket that the header has in that case. The
gateway passes neither on. The engine itself counts, so no part of a body is read for it.
"""

import re
import secrets
from collections.abc import Callable, Iterable
from typing import NamedTuple

import attrs

from ichat.config.strict import Between, checked

USAGE_HEADER = b"x-ichat-usage"
_WANTED = (USAGE_HEADER, b"1")

Usage = tuple[int, int, int]
"""The tokens of the prompt, those of the answer, and how many of the prompt's were cached."""

_TICKET = re.compile(rb"[0-9a-f]{32}")
LATE_MAX = 256
"""The most background responses that a heartbeat reports."""
_TOKENS_MAX = 10**12


class UsedTokens(NamedTuple):
    """The tokens that a request used."""

    input: int
    """Of its prompt, cached tokens included."""
    output: int
    cached: int = 0
    """How many of the prompt's the engine had in its cache."""
    is_estimate: bool = False
    """Whether at least some of the tokens were not counted."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.input + self.output


def _is_ticket(value: str) -> None:
    if not ticket_in(value.encode()):
        raise ValueError("must be 32 hexadecimal digits")


@attrs.frozen
class LateUsage:
    """The tokens of a response that was made in the background, as its worker reports them afterwards.

    The gateway's request for it had this ticket in the header `x-ichat-usage`, in place of a 1.
    """

    ticket: str = checked(_is_ticket, schema={"pattern": "^[0-9a-f]{32}$"})
    input: int = checked(Between(0, _TOKENS_MAX))
    output: int = checked(Between(0, _TOKENS_MAX))
    cached: int = checked(Between(0, _TOKENS_MAX))


def new_ticket() -> str:
    """Return a ticket that cannot be guessed."""
    return secrets.token_hex(16)


def usage_wanted(ticket: str = "") -> tuple[bytes, bytes]:
    """Return the header by which the gateway asks for the tokens of a request, with its ticket if it has any."""
    return (USAGE_HEADER, ticket.encode()) if ticket else _WANTED


def ticket_in(value: bytes) -> str:
    """Return the ticket in the header of a request for a response in the background; "" if it has none."""
    return value.decode("ascii") if _TICKET.fullmatch(value) else ""


_VALUE = re.compile(rb"(\d{1,12}),(\d{1,12}),(\d{1,12})")
_TRAILER = re.compile(rb"(?:^|\n)(?i:x-ichat-usage):[ \t]*(\d{1,12},\d{1,12},\d{1,12})[ \t]*\r\n")


def sum_of_usage(parts: Iterable[Callable[[], Usage]]) -> Usage:
    """Return the tokens of a request that was answered in these parts."""
    given = made = cached = 0
    for part in parts:
        counts = part()
        given, made, cached = given + counts[0], made + counts[1], cached + counts[2]
    return given, made, cached


def difference(usage: Usage, told: Usage) -> Usage:
    """Return the tokens that have not been reported yet."""
    return usage[0] - told[0], usage[1] - told[1], usage[2] - told[2]


def value_of_usage(usage: Usage) -> bytes:
    """Return the header's value."""
    return b"%d,%d,%d" % usage


def parse_usage(value: bytes) -> Usage | None:
    """Return the tokens in the header; None if they are not valid."""
    match = _VALUE.fullmatch(value)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))


def usage_in_trailers(lines: bytes | bytearray) -> Usage | None:
    """Return the tokens in the trailers of a body; None if there are none."""
    match = _TRAILER.search(lines)
    return None if match is None else parse_usage(bytes(match[1]))
