"""Server-sent events: written as bytes, and read from a stream piece by piece."""

from collections.abc import Callable
from typing import NamedTuple

CONTENT_TYPE = "text/event-stream"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
"""Of a response with events as its body; the last keeps nginx from buffering it."""
COMMENT = b": \n\n"
"""Means nothing; it shows that the connection is alive."""


class Event(NamedTuple):
    """An event of a stream."""

    name: str
    data: str
    id: str | None
    """None if the event has none; the last id before it stays valid then."""


class EventDecoder:
    """Reads events from a stream, however it is cut.

    Lines end with LF or CRLF only: texts may hold other line ends.
    """

    def __init__(self, event_bytes_max: int) -> None:
        """Of a larger event, no more than this is kept in memory."""
        self._bytes_max = event_bytes_max
        self.on_comment: Callable[[str], None] | None = None
        """Called with each comment, without its colon."""
        self._partial_line = bytearray()
        self._is_skipping = False
        self._begin()

    def _begin(self) -> None:
        self._name, self._id = "message", None
        self._data: list[bytes] = []
        self._size = 0

    def __repr__(self) -> str:
        state = ", too large" if self._is_skipping else ""
        return f"<EventDecoder {self._size + len(self._partial_line)} bytes of a partial event{state}>"

    def feed(self, data: bytes) -> list[Event | None]:
        """Return the events that are complete now; None for each event that was too large."""
        found: list[Event | None] = []
        self._partial_line += data
        if b"\n" in data:
            *lines, self._partial_line = self._partial_line.split(b"\n")
            for line in lines:
                self._feed_line(bytes(line.removesuffix(b"\r")), found)
        if self._size + len(self._partial_line) > self._bytes_max:
            self._is_skipping = True
        if self._is_skipping:
            self._data.clear()
            self._size = 0
            del self._partial_line[1:]
        return found

    def _feed_line(self, line: bytes, found: list[Event | None]) -> None:
        self._size += len(line)
        if not line:
            if self._is_skipping:
                found.append(None)
            elif self._data:
                found.append(Event(self._name, b"\n".join(self._data).decode(errors="replace"), self._id))
            self._is_skipping = False
            self._begin()
            return
        if self._size > self._bytes_max:
            self._is_skipping = True
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data" and not self._is_skipping:
            self._data.append(value)
        elif not field and self.on_comment is not None:
            self.on_comment(value.decode(errors="replace"))
        elif field == b"event":
            self._name = value.decode(errors="replace") or "message"
        elif field == b"id" and b"\0" not in value:
            self._id = value.decode(errors="replace")


def encode(data: str, *, name: str = "", event_id: int | None = None) -> bytes:
    """Return an event. `data` is a single line."""
    head = f"event: {name}\n" if name else ""
    if event_id is not None:
        head += f"id: {event_id}\n"
    return f"{head}data: {data}\n\n".encode()
