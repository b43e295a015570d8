"""Where the body of an HTTP/1.1 message ends (RFC 9112, sections 6 and 7), without copying or decoding it.

Every framing has ``feed(data, start, end)``, which follows the bytes ``data[start:end]`` and returns the index after
the body's last byte, and ``done``, true when the body is complete. Bytes may be split anywhere.
"""

import re
from typing import Protocol

import h11

SIZE_LINE_BYTES_MAX = 4096
TRAILER_BYTES_MAX = 16384

_SIZE_LINE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n\0]*)?\r\n")
_TRAILER_LINE = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[^\0\n-\r]*\r\n")


_SIZE, _DATA, _CR, _LF, _TRAILER, _DONE = range(6)
"""The next part in the chunked coding."""


class FramingError(Exception):
    """The bytes do not follow the framing that the head announced."""


class Framing(Protocol):
    """Follows a body; see the module's docstring."""

    @property
    def done(self) -> bool:
        """Whether the body is complete."""
        ...

    @property
    def cut(self) -> int:
        """How many bytes fewer to send on than were followed, of the piece with the body's end."""
        ...

    @property
    def may_insert(self) -> bool:
        """Whether a chunk of our own could be inserted at this point."""
        ...

    def feed(self, data: bytearray, start: int, end: int) -> int:
        """Follow ``data[start:end]`` and return the index after the body's last byte. Raises FramingError."""
        ...

    def ends_at_eof(self) -> bool:
        """Return whether the body is complete when the connection ends here."""
        ...


class Length:
    """A body of a known number of bytes; 0 for a message without a body."""

    __slots__ = ("done", "left")
    cut = 0
    may_insert = False

    def __init__(self, length: int) -> None:
        self.left = length
        self.done = not length

    def feed(self, data: bytearray, start: int, end: int) -> int:
        taken = min(self.left, end - start)
        self.left -= taken
        self.done = not self.left
        return start + taken

    def ends_at_eof(self) -> bool:
        return self.done


class UntilClose:
    """A body that ends with the connection."""

    __slots__ = ()
    done = False
    cut = 0
    may_insert = False

    def feed(self, data: bytearray, start: int, end: int) -> int:
        return end

    def ends_at_eof(self) -> bool:
        return True


class Chunked:
    """The chunked transfer coding, with extensions. Trailers are kept here: the body is sent on without them."""

    __slots__ = ("_left", "_line", "_step", "_trailer_bytes", "cut", "done", "trailers")

    def __init__(self) -> None:
        self._step = _SIZE
        self._left = 0
        self._line = b""
        self._trailer_bytes = 0
        self.trailers = bytearray()
        """The lines of the trailers so far."""
        self.cut = 0
        self.done = False

    @property
    def may_insert(self) -> bool:
        return self._step == _SIZE and not self._line

    def ends_at_eof(self) -> bool:
        return self.done

    def feed(self, data: bytearray, start: int, end: int) -> int:
        if self._step == _SIZE and not self._line:
            start = self._feed_whole(data, start, end)
        while start < end:
            step = self._step
            if step == _SIZE:
                start = self._feed_size(data, start, end)
            elif step == _DATA:
                taken = min(self._left, end - start)
                self._left -= taken
                start += taken
                if not self._left:
                    self._step = _CR
            elif step in (_CR, _LF):
                if data[start] != (13 if step == _CR else 10):
                    raise FramingError("a chunk is not followed by CRLF")
                start += 1
                self._step = _LF if step == _CR else _SIZE
            elif step == _TRAILER:
                return self._feed_trailers(data, start, end)
            else:
                break
        return start

    @staticmethod
    def _feed_whole(data: bytearray, start: int, end: int) -> int:
        """Follow chunks that have arrived whole, except for the last chunk: the common case, in few steps."""
        while start < end:
            match = _SIZE_LINE.match(data, start, end)
            if match is None:
                break
            size = int(match[1], 16)
            behind = match.end() + size + 2
            if not size or behind > end or data[behind - 2] != 13 or data[behind - 1] != 10:
                break
            start = behind
        return start

    def _feed_size(self, data: bytearray, start: int, end: int) -> int:
        line, start = self._take_line(data, start, end, SIZE_LINE_BYTES_MAX)
        if line is None:
            return start
        match = _SIZE_LINE.fullmatch(line)
        if match is None:
            raise FramingError("a chunk size is not valid")
        self._left = int(match[1], 16)
        self._step = _DATA if self._left else _TRAILER
        return start

    def _feed_trailer(self, data: bytearray, start: int, end: int) -> int:
        before = start
        line, start = self._take_line(data, start, end, TRAILER_BYTES_MAX)
        self._trailer_bytes += start - before
        if self._trailer_bytes > TRAILER_BYTES_MAX:
            raise FramingError("the trailers are too long")
        if line == b"\r\n":
            self._step = _DONE
            self.done = True
        elif line is not None and not _TRAILER_LINE.fullmatch(line):
            raise FramingError("a trailer is not valid")
        elif line is not None:
            self.trailers += line
        return start

    def _feed_trailers(self, data: bytearray, start: int, end: int) -> int:
        """Follow the trailers as if they were not there; the line that ends them is written where they began."""
        at = start
        while at < end and not self.done:
            at = self._feed_trailer(data, at, end)
        if not self.done:
            return start
        data[start : start + 2] = b"\r\n"
        self.cut = at - start - 2
        return start + 2

    def _take_line(self, data: bytearray, start: int, end: int, bytes_max: int) -> tuple[bytes | None, int]:
        """Return the line under way, or None while its end is missing, and the index to go on at."""
        newline = data.find(b"\n", start, end)
        stop = end if newline < 0 else newline + 1
        self._line += bytes(data[start:stop])
        if len(self._line) > bytes_max:
            raise FramingError("a line of the chunked coding is too long")
        if newline < 0:
            return None, stop
        line, self._line = self._line, b""
        return line, stop


class Unchunk:
    """Removes the chunk framing of a body, for clients of HTTP/1.0; `Chunked` has checked it."""

    may_insert = False

    def __init__(self) -> None:
        self._parser = h11.Connection(h11.CLIENT)
        self._parser.send(h11.Request(method="GET", target="/", headers=[("host", "localhost")]))
        self._parser.send(h11.EndOfMessage())
        self._parser.receive_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        self._parser.next_event()

    def __repr__(self) -> str:
        return f"<Unchunk {self._parser.their_state}>"

    def feed(self, piece: bytes | bytearray | memoryview, *, is_last: bool = False) -> bytes:
        """Return the data in the next piece of the body. Raises FramingError where h11 is stricter than `Chunked`."""
        if piece:  # h11 regards an empty piece as the end
            self._parser.receive_data(bytes(piece))
        found: list[bytes | bytearray] = []
        try:
            while isinstance(event := self._parser.next_event(), h11.Data):
                found.append(event.data)
        except h11.RemoteProtocolError as error:
            raise FramingError(str(error)) from error
        return b"".join(found)


class Reframed:
    """Puts a body in chunks of our own, as a single event if it is no event stream."""

    def __init__(self, framing: Framing, before: bytes = b"") -> None:
        """`framing` is the upstream's; `before` begins the event, if the body becomes a single event."""
        self._unchunk = Unchunk() if isinstance(framing, Chunked) else None
        self._before = before
        self._is_event = bool(before)
        self.may_insert = not before
        """Whether a chunk of our own could be inserted between two pieces."""

    def __repr__(self) -> str:
        return f"<Reframed{' as an event' if self._is_event else ''}>"

    def feed(self, piece: bytes | bytearray | memoryview, *, is_last: bool) -> bytes:
        """Return the chunks to be sent for the next piece of the body. Raises FramingError."""
        payload = bytes(piece) if self._unchunk is None else self._unchunk.feed(piece)
        if self._is_event:
            payload = payload.replace(b"\r", b" ").replace(b"\n", b" ")  # white space between the values of a JSON body
            payload, self._before = self._before + payload, b""
            if is_last:
                payload += b"\n\n"
        chunk = b"%x\r\n%b\r\n" % (len(payload), payload) if payload else b""
        return chunk + b"0\r\n\r\n" if is_last else chunk


class Transform(Protocol):
    """Makes another body of a body that a framing follows."""

    @property
    def may_insert(self) -> bool:
        """Whether a chunk of our own could be inserted between two pieces."""
        ...

    def feed(self, piece: bytes | bytearray | memoryview, *, is_last: bool) -> bytes:
        """Return the bytes to send for the next piece of the body. Raises FramingError."""
        ...
