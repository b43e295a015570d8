"""Where the body of an HTTP/1.1 message ends (RFC 9112, sections 6 and 7), without copying or decoding it.

Every framing has ``feed(data, start, end)``: it follows the bytes ``data[start:end]`` and gives the index behind the
last one that belongs to the body, and ``done``, true when the body is complete. Bytes may be split anywhere.
"""

import re
from typing import Protocol

SIZE_LINE_BYTES_MAX = 4096
TRAILER_BYTES_MAX = 16384

_SIZE_LINE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n\0]*)?\r\n")
_TRAILER_LINE = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[^\r\n\0]*\r\n")


class FramingError(Exception):
    """The bytes do not follow the framing that the head announced."""


class Framing(Protocol):
    """Follows one body; see the module's text."""

    @property
    def done(self) -> bool:
        """Whether the body is complete."""
        ...

    @property
    def may_insert(self) -> bool:
        """Whether a chunk of our own could be put in at this point."""
        ...

    def feed(self, data: bytearray, start: int, end: int) -> int:
        """Follow ``data[start:end]``; give the index behind the body's last byte. Raises FramingError."""
        ...

    def ends_at_eof(self) -> bool:
        """Say whether the body is complete when the connection ends here."""
        ...


class Length:
    """A body of a known number of bytes; 0 for a message that has none."""

    __slots__ = ("left",)
    may_insert = False

    def __init__(self, length: int) -> None:
        self.left = length

    @property
    def done(self) -> bool:
        return self.left == 0

    def feed(self, data: bytearray, start: int, end: int) -> int:
        taken = min(self.left, end - start)
        self.left -= taken
        return start + taken

    def ends_at_eof(self) -> bool:
        return self.left == 0


class UntilClose:
    """A body that ends with the connection."""

    __slots__ = ()
    done = False
    may_insert = False

    def feed(self, data: bytearray, start: int, end: int) -> int:
        return end

    def ends_at_eof(self) -> bool:
        return True


class Chunked:
    """The chunked transfer coding, with extensions and trailers."""

    __slots__ = ("_left", "_line", "_step", "_trailer_bytes")

    _SIZE, _DATA, _CR, _LF, _TRAILER, _DONE = range(6)

    def __init__(self) -> None:
        self._step = self._SIZE
        self._left = 0
        self._line = b""
        self._trailer_bytes = 0

    @property
    def done(self) -> bool:
        return self._step == self._DONE

    @property
    def may_insert(self) -> bool:
        return self._step == self._SIZE and not self._line

    def ends_at_eof(self) -> bool:
        return self._step == self._DONE

    def feed(self, data: bytearray, start: int, end: int) -> int:
        while start < end:
            step = self._step
            if step == self._SIZE:
                start = self._feed_size(data, start, end)
            elif step == self._DATA:
                taken = min(self._left, end - start)
                self._left -= taken
                start += taken
                if not self._left:
                    self._step = self._CR
            elif step in (self._CR, self._LF):
                if data[start] != (13 if step == self._CR else 10):
                    raise FramingError("a chunk is not followed by CRLF")
                start += 1
                self._step = self._LF if step == self._CR else self._SIZE
            elif step == self._TRAILER:
                start = self._feed_trailer(data, start, end)
            else:
                break
        return start

    def _feed_size(self, data: bytearray, start: int, end: int) -> int:
        """Follow a size line and, in the common case that all of it is here, the chunk and its CRLF as well."""
        if self._line:
            line, start = self._take_line(data, start, end, SIZE_LINE_BYTES_MAX)
            if line is None:
                return start
            match = _SIZE_LINE.fullmatch(line)
        else:
            match = _SIZE_LINE.match(data, start, end)
            if match is None:
                line, start = self._take_line(data, start, end, SIZE_LINE_BYTES_MAX)
                if line is None:
                    return start
            else:
                start = match.end()
        if match is None:
            raise FramingError("a chunk size is not valid")
        size = int(match[1], 16)
        if size == 0:
            self._step = self._TRAILER
            return start
        behind = start + size + 2
        if behind <= end and data[behind - 2] == 13 and data[behind - 1] == 10:
            return behind
        self._left = size
        self._step = self._DATA
        return start

    def _feed_trailer(self, data: bytearray, start: int, end: int) -> int:
        before = start
        line, start = self._take_line(data, start, end, TRAILER_BYTES_MAX)
        self._trailer_bytes += start - before
        if self._trailer_bytes > TRAILER_BYTES_MAX:
            raise FramingError("the trailers are too long")
        if line == b"\r\n":
            self._step = self._DONE
        elif line is not None and not _TRAILER_LINE.fullmatch(line):
            raise FramingError("a trailer is not valid")
        return start

    def _take_line(self, data: bytearray, start: int, end: int, bytes_max: int) -> tuple[bytes | None, int]:
        """Complete the line under way: the line, or None while its end is missing, and where to go on."""
        newline = data.find(b"\n", start, end)
        stop = end if newline < 0 else newline + 1
        self._line += bytes(data[start:stop])
        if len(self._line) > bytes_max:
            raise FramingError("a line of the chunked coding is too long")
        if newline < 0:
            return None, stop
        line, self._line = self._line, b""
        return line, stop
