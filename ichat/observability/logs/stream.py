"""Streams of lines for clients: the request, a cursor, and server-sent events until there is no more."""

import json
import logging
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs
import trio
from typing_extensions import Self

from ichat.config.schema import Logs
from ichat.errors import bad_request
from ichat.http import sse
from ichat.observability.logs.lines import Line, LineBuffer, Wakeup, timestamp
from ichat.observability.logs.log_format import LineFormatter

BLOCK_LINES_MAX = 256
"""Lines that are sent at a time, before other tasks get their turn."""
KEEP_ALIVE_S = 15.0
"""After this time without a line the client gets a comment, so that no proxy between closes the connection."""
_NUMBER = re.compile(r"[0-9]{1,18}")
_YES = frozenset({"true", "1", "yes"})
_NO = frozenset({"false", "0", "no"})
_KNOWN = ("tail", "follow", "previous")


class LogCursor:
    """A reader of a buffer: history, then new lines, as server-sent events."""

    def __init__(
        self, buffer: LineBuffer, *, tail: int | None = None, after: int | None = None, follow: bool = True
    ) -> None:
        """Begin `after` a line, or with the last `tail` lines, or with the oldest line; end now, or with the buffer.

        A number that the buffer has not reached is from an earlier buffer: then everything is new.
        """
        self._buffer = buffer
        last = buffer.last
        if after is not None:
            self._seq = after if after <= last else buffer.start
        else:
            self._seq = buffer.start if tail is None else max(buffer.start, last - tail)
        self._end = None if follow else last

    def __repr__(self) -> str:
        return f"<LogCursor after {self._seq} of {self._buffer!r}>"

    def next(self) -> bytes:
        """Return the available lines, up to BLOCK_LINES_MAX; nothing if there is nothing new."""
        lines, lost = self._buffer.after(self._seq, BLOCK_LINES_MAX)
        if self._end is not None:
            lost = min(lost, self._end - self._seq)
            lines = [line for line in lines if line.seq <= self._end]
        self._seq += lost + len(lines)
        return (gap(lost) if lost else b"") + b"".join(map(event, lines))

    def finish(self) -> None:
        """End with the lines that are available now, rather than with the buffer."""
        if self._end is None:
            self._end = self._buffer.last

    def is_done(self) -> bool:
        """Return whether nothing will follow."""
        if self._end is not None:
            return self._seq >= self._end
        return self._buffer.ended and self._seq >= self._buffer.last


class EndsStreams(Protocol):
    """Makes streams, and lets all of them end."""

    @property
    def is_ending(self) -> bool:
        """Whether its streams end after the lines of this moment."""
        ...


class LogStream:
    """The response to a client: blocks of server-sent events, until there are no more lines."""

    def __init__(self, cursor: LogCursor, wakeup: Wakeup, owner: EndsStreams) -> None:
        """Notify `wakeup` when the cursor's buffer changes, or when the owner's streams begin to end.

        A stream without a line yet begins with a comment, so that its client knows that it waits.
        """
        self._cursor = cursor
        self._wakeup = wakeup
        self._owner = owner
        self._has_begun = False

    def __repr__(self) -> str:
        return f"<LogStream {self._cursor!r}>"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while True:
            await trio.lowlevel.checkpoint()
            if self._owner.is_ending:
                self._cursor.finish()
            is_done, is_first, self._has_begun = self._cursor.is_done(), not self._has_begun, True
            if block := self._cursor.next():
                return block
            if is_done:
                raise StopAsyncIteration
            if is_first:
                return sse.COMMENT
            with trio.move_on_after(KEEP_ALIVE_S) as waiting:
                await self._wakeup.wait_notified()
            if waiting.cancelled_caught:
                return sse.COMMENT


class OwnLines(logging.Handler):
    """Keeps the lines that this process logs, until `close`."""

    def __init__(self, settings: Logs) -> None:
        """Belongs to a single run of Trio. `ring_lines_max` and `ring_bytes_max` bound the lines."""
        super().__init__()
        self._buffer = LineBuffer(settings.ring_lines_max, settings.ring_bytes_max)
        self.wakeup = Wakeup()
        self._buffer.changed.add(self.wakeup.notify)
        self.setFormatter(LineFormatter())
        self._loggers = [logging.getLogger(), logging.getLogger("ichat")]
        for logger in self._loggers:
            logger.addHandler(self)

    def __repr__(self) -> str:
        return f"<OwnLines {self._buffer!r}>"

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record; the lines of a traceback are lines of their own."""
        try:
            lines = self.format(record).encode(errors="replace").split(b"\n")
        except (TypeError, ValueError):
            self.handleError(record)
        else:
            self._buffer.append(lines, record.created)

    def bound(self, settings: Logs) -> None:
        """Use these bounds from the next line on."""
        self._buffer.bound(settings.ring_lines_max, settings.ring_bytes_max)

    def stream(self, query: "LogQuery", owner: EndsStreams) -> LogStream:
        """Return the stream for a request; `owner` may end it."""
        cursor = LogCursor(self._buffer, tail=query.tail, after=query.after, follow=query.follow)
        return LogStream(cursor, self.wakeup, owner)

    def close(self) -> None:
        """Keep no further lines."""
        for logger in self._loggers:
            logger.removeHandler(self)
        super().close()


def event(line: Line) -> bytes:
    """Return a line as an event; a client sends the event's id back as Last-Event-ID."""
    entry = {"seq": line.seq, "time": timestamp(line.time), "line": line.text}
    return sse.encode(json.dumps(entry, ensure_ascii=False), event_id=line.seq)


def gap(lost: int) -> bytes:
    """Return an event for lines that a client has missed. It has no id, so a client that resumes gets it again."""
    return sse.encode(f'{{"lost": {lost}}}', name="gap")


@attrs.frozen
class LogQuery:
    """A request for lines."""

    tail: int | None
    """At most this many lines of history; None: all that is kept."""
    follow: bool
    previous: bool
    """The previous run; never with `follow`."""
    after: int | None
    """The line that the client knows already (Last-Event-ID), which goes before `tail`."""


def read_query(query: str, last_event_id: str) -> LogQuery:
    """Read the query of a target (`tail=100&follow=false`) and the header ("" where it is not there). Raises 400."""
    values = read_parameters(query, _KNOWN)
    previous = read_flag(values, "previous", default=False)
    follow = read_flag(values, "follow", default=not previous)
    if previous and follow:
        raise bad_request("previous is a run that has ended: it cannot be followed.", param="follow")
    tail = values.get("tail")
    if tail is not None and not _NUMBER.fullmatch(tail):
        raise bad_request(f"tail must be a number of lines, not {tail!r}.", param="tail")
    after = last_event_id.strip()
    if after and not _NUMBER.fullmatch(after):
        raise bad_request(f"Last-Event-ID must be the id of an event, a number, not {after!r}.")
    return LogQuery(None if tail is None else int(tail), follow, previous, int(after) if after else None)


def read_parameters(query: str, known: Sequence[str]) -> Mapping[str, str]:
    """Return the parameters of a query by their names, each of which must be known. Raises ApiError 400."""
    values: dict[str, str] = {}
    for name, value in urllib.parse.parse_qsl(query, keep_blank_values=True):
        if name not in known:
            raise bad_request(f"There is no parameter {name!r} here; there are {', '.join(known)}.", param=name)
        if name in values:
            raise bad_request(f"{name} is given twice.", param=name)
        values[name] = value
    return values


def read_flag(values: Mapping[str, str], name: str, *, default: bool) -> bool:
    """Return whether a parameter of a query is true; `default` where it is not there. Raises ApiError 400."""
    value = values.get(name)
    if value is None:
        return default
    if value.lower() in _YES:
        return True
    if value.lower() in _NO:
        return False
    raise bad_request(f"{name} must be true or false, not {value!r}.", param=name)
