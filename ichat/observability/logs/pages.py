"""Requests for pages of a worker's files, and the pages: lines before or after a position, perhaps only with a text.

A position names a file by its inode and the time of its first line, so that it outlasts renaming: a page that is read
later continues exactly where the last page ended.
"""

import contextlib
import datetime as dt
import re
from collections.abc import Sequence

import attrs

from ichat.errors import bad_request
from ichat.observability.logs.lines import read_timestamp
from ichat.observability.logs.stream import read_flag, read_parameters

PAGE_LINES = 200
"""Lines of a page, if its request names no number."""
PAGE_LINES_MAX = 1000
KNOWN_MAX = 100_000
"""The most lines of the same time that a client may have already."""
TEXT_CHARACTERS_MAX = 200
_POSITION = re.compile(r"([0-9]{1,20})\.([0-9]{1,15})\.([0-9]{1,15})")
_NUMBER = re.compile(r"[0-9]{1,9}")
_KNOWN = ("before", "known", "after", "limit", "text", "previous")


@attrs.frozen
class Position:
    """A place between two lines of a worker's files."""

    inode: int
    began_ms: int
    """The time of the first line of the file, in milliseconds since 1970; 0: it has none."""
    offset: int

    def __str__(self) -> str:
        return f"{self.inode}.{self.began_ms}.{self.offset}"


@attrs.frozen
class TimeOfDay:
    """The end of the lines of a time, less those that a client has already."""

    at: bytes
    """As lines have it."""
    known: int = 0


@attrs.frozen
class PageQuery:
    """A request for a page; it goes backwards unless `after` is given."""

    before: Position | TimeOfDay | None = None
    """None: the end."""
    after: Position | None = None
    limit: int = PAGE_LINES
    text: bytes = b""
    """Only lines that contain it, in capitals or not."""
    previous: bool = False
    """Only the run before the newest."""


@attrs.frozen
class PageLine:
    """A line of a page."""

    time: str | None
    """When it was read; null for a remark of the gateway about missing lines."""
    line: str
    position: str
    """Where it begins."""
    previous: bool
    """Whether it belongs to the run before the newest."""


@attrs.frozen
class LogPage:
    """Lines of a worker, oldest first."""

    lines: Sequence[PageLine]
    before: str | None
    """The position before which further lines may be; null: these are the oldest lines that are kept."""
    after: str | None
    """The position after these lines; null: no line is kept."""


def read_page_query(query: str) -> PageQuery:
    """Read the query of a request for a page. Raises ApiError 400."""
    values = read_parameters(query, _KNOWN)
    if "before" in values and "after" in values:
        raise bad_request("A page is before a position or after it, not both.", param="after")
    known = _number(values.get("known", "0"), "known", KNOWN_MAX)
    before = _read_before(values["before"], known) if "before" in values else None
    if "known" in values and not isinstance(before, TimeOfDay):
        raise bad_request("known belongs to a time in before.", param="known")
    after = _read_position(values["after"]) if "after" in values else None
    if "after" in values and after is None:
        raise bad_request("after must be a position that an answer had.", param="after")
    limit = _number(values.get("limit", str(PAGE_LINES)), "limit", PAGE_LINES_MAX, least=1)
    text = values.get("text", "")
    if len(text) > TEXT_CHARACTERS_MAX:
        raise bad_request(f"text may have {TEXT_CHARACTERS_MAX} characters, not {len(text)}.", param="text")
    wanted = text.encode(errors="replace").lower()
    return PageQuery(before, after, limit, wanted, read_flag(values, "previous", default=False))


def _number(text: str, name: str, most: int, *, least: int = 0) -> int:
    if not _NUMBER.fullmatch(text) or not least <= int(text) <= most:
        raise bad_request(f"{name} must be a number from {least} to {most}, not {text[:40]!r}.", param=name)
    return int(text)


def _read_position(text: str) -> Position | None:
    found = _POSITION.fullmatch(text)
    return Position(*map(int, found.groups())) if found else None


def _read_before(text: str, known: int) -> Position | TimeOfDay:
    position = _read_position(text)
    if position is not None:
        return position
    with contextlib.suppress(ValueError, OverflowError):
        at = read_timestamp(text)
        if at.tzinfo is not None:
            utc = at.astimezone(dt.timezone.utc).isoformat(timespec="milliseconds")
            return TimeOfDay(utc.replace("+00:00", "Z").encode(), known)
    raise bad_request(
        f"before must be a position that an answer had, or a time with its zone, not {text[:40]!r}.", param="before"
    )
