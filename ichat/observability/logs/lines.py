"""Lines of output: kept in a buffer, numbered, and read by any number of cursors, as server-sent events.

A thread appends the output of a process (`pipes.py`) in batches. A reader has no queue, only the number of the last
line it knows. So a reader that stands still costs nothing and delays no other: it learns how many lines it has missed.
"""

import collections
import contextlib
import datetime as dt
import functools
import itertools
import threading
import time
from collections.abc import Sequence

import attrs
import trio

from ichat.listeners import Listeners

LINES_MAX = 10_000
BYTES_MAX = 2 * 1024 * 1024
LINE_BYTES_MAX = 16 * 1024


@attrs.frozen
class Line:
    """A line as readers see it."""

    seq: int
    """Grows by 1 with each line, from 1."""
    time: float
    """When it was read, in seconds since 1970."""
    text: str


class LineSplitter:
    """Makes lines of the data from a pipe.

    As a terminal would, it forgets text that a carriage return overwrites: of a progress bar the last state stays.
    """

    def __init__(self, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._bytes_max = line_bytes_max
        self._partial = b""
        self._cut = 0
        """Bytes of the partial line that were not kept."""
        self._returned = False
        """Whether the next data overwrites the partial line."""
        self.since = 0.0
        """When (monotonic) the partial line began."""

    def __repr__(self) -> str:
        return f"<LineSplitter {len(self._partial) + self._cut} bytes of a partial line>"

    def has_partial(self) -> bool:
        """Return whether a line has begun and not ended."""
        return bool(self._partial)

    @property
    def partial(self) -> bytes:
        """The line that has begun and not ended, as data with the same effect."""
        return self._partial + b"\r" if self._returned else self._partial

    def feed(self, data: bytes) -> list[bytes]:
        """Add the data and return the lines that are complete now, without their ends."""
        first, *others = data.split(b"\n")
        if not self._partial:
            self.since = time.monotonic()
        self._hold(first)
        if not others:
            return []
        lines = [self._take()]
        *whole, rest = others
        bytes_max = self._bytes_max
        for line in whole:
            if len(line) <= bytes_max and b"\r" not in line:
                lines.append(line)
            else:
                self._hold(line)
                lines.append(self._take())
        self.since = time.monotonic()
        self._hold(rest)
        return lines

    def flush(self) -> list[bytes]:
        """Return the partial line, if there is any, as if it had ended."""
        return [self._take()] if self._partial else []

    def _hold(self, piece: bytes) -> None:
        text = piece.rstrip(b"\r")
        if text:
            if self._returned or b"\r" in text:
                self._partial, self._cut = b"", 0
                text = text[text.rfind(b"\r") + 1 :]
            held = self._partial + text
            self._cut += max(0, len(held) - self._bytes_max)
            self._partial = held[: self._bytes_max]
        if piece:
            self._returned = piece[-1:] == b"\r"

    def _take(self) -> bytes:
        line, cut = self._partial, self._cut
        self._partial, self._cut, self._returned = b"", 0, False
        return line + f" … [{cut} bytes more]".encode() if cut else line


class LineBuffer:
    """The last lines of a source. A single thread appends, any may read."""

    def __init__(self, lines_max: int = LINES_MAX, bytes_max: int = BYTES_MAX, start: int = 0) -> None:
        """Keep at most `lines_max` lines and `bytes_max` bytes of text; the first number follows `start`."""
        self._lines_max = lines_max
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._lines: collections.deque[tuple[float, bytes]] = collections.deque()
        self._bytes = 0
        self.start = start
        self.last = start
        """The number of the newest line; `start` where there is none."""
        self.ended = False
        """Whether no line will follow."""
        self.changed: Listeners[[]] = Listeners()
        """Called, by the thread that appends, once after each batch and at the end."""

    def __repr__(self) -> str:
        end = ", ended" if self.ended else ""
        return f"<LineBuffer {self.last - len(self._lines) + 1}..{self.last}, {self._bytes} bytes{end}>"

    def bound(self, lines_max: int, bytes_max: int) -> None:
        """Use these limits from the next line on."""
        self._lines_max, self._bytes_max = lines_max, bytes_max

    def append(self, lines: Sequence[bytes], now: float) -> None:
        """Add lines that arrived at the same time, for the oldest lines if there is no room."""
        if not lines:
            return
        with self._lock:
            kept = self._lines
            kept.extend([(now, line) for line in lines])
            self._bytes += sum(map(len, lines))
            self.last += len(lines)
            while len(kept) > self._lines_max or self._bytes > self._bytes_max:
                self._bytes -= len(kept.popleft()[1])
        self.changed()

    def end(self) -> None:
        """Let readers know that nothing follows."""
        self.ended = True
        self.changed()

    def reopen(self) -> None:
        """Note that further lines follow after all."""
        self.ended = False

    def restore(self, lines: Sequence[Line], last: int) -> None:
        """Begin, while there are none, with lines of an earlier buffer; the newest has the number `last`."""
        with self._lock:
            self._lines.extend((line.time, line.text.encode()) for line in lines)
            self._bytes = sum(len(line) for _, line in self._lines)
            self.start, self.last = last - len(lines), last
        self.changed()

    def after(self, seq: int, lines_max: int) -> tuple[list[Line], int]:
        """Return lines after that of number `seq`, oldest first, and how many between are not kept any more."""
        with self._lock:
            oldest = self.last - len(self._lines) + 1
            first = max(seq + 1, oldest)
            index = first - oldest
            found = list(itertools.islice(self._lines, index, index + lines_max))
        lines = [Line(first + offset, at, line.decode(errors="replace")) for offset, (at, line) in enumerate(found)]
        return lines, max(0, oldest - seq - 1)

    def tail(self, count: int) -> list[Line]:
        """Return the last lines, oldest first."""
        return self.after(self.last - count, count)[0]


class Wakeup:
    """Wakes Trio's tasks from another thread: once, however often it is struck until they run."""

    def __init__(self) -> None:
        """Belongs to the run of Trio in which it is made."""
        self._token = trio.lowlevel.current_trio_token()
        self._struck: Listeners[[]] = Listeners()

    def __repr__(self) -> str:
        return f"<Wakeup {self._struck!r}>"

    def notify(self) -> None:
        """Wake those that wait; from any thread, and of no effect after the end of the run."""
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._struck, idempotent=True)

    async def wait_notified(self) -> None:
        """Wait for the next time; nothing is missed between a look at the buffer and this, but for a checkpoint."""
        await self._struck.wait()


def timestamp(seconds: float) -> str:
    """Return a time of day (RFC 3339, UTC, milliseconds)."""
    whole = int(seconds)
    return f"{_to_the_second(whole)}.{int((seconds - whole) * 1000):03d}Z"


def read_timestamp(text: str) -> dt.datetime:
    """Return the time that a text in ISO 8601 says; `Z` is UTC, which Python 3.10 does not know. Raises ValueError."""
    return dt.datetime.fromisoformat(f"{text[:-1]}+00:00" if text.endswith("Z") else text)


@functools.lru_cache(maxsize=16)
def _to_the_second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
