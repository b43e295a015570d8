"""A response as a load client reads it: strictly, to its end, and at little cost.

It must be right in everything: status, framing, the number of events, no event that tells of an error, [DONE] at the
end and nothing after it.
"""

import re
import time

TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


class Broken(Exception):
    """A response that is not what it should be."""


class Response:
    """One response to a request that wanted a plain answer, or a stream of so many events (0: any number)."""

    def __init__(self, events, *, is_stream):
        self.expected = events
        self.is_stream = is_stream
        self.status = 0
        self.closes = False
        self.first_at = self.ended_at = 0.0
        self.events = self.tokens = 0
        self._buffer = self._text = b""
        self._left = None
        self._is_done = False

    def feed(self, data):
        """Take the next bytes; say whether the response has ended. Raises Broken, or ValueError for a wrong number."""
        self._buffer += data
        if not self.status and not self._read_head():
            return False
        ended = self._read_chunks() if self._left is None else self._read_body()
        if ended:
            self._finish()
        return ended

    def _read_head(self):
        head, blank, rest = self._buffer.partition(b"\r\n\r\n")
        if not blank:
            return False
        first, *lines = head.lower().split(b"\r\n")
        fields = {name: value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        if not first.startswith(b"http/1.1 200"):
            raise Broken(f"{first.decode('latin-1')} {rest[:200].decode('latin-1')}")
        if fields.get(b"content-type", b"").startswith(b"text/event-stream") != self.is_stream:
            raise Broken("the wrong content-type")
        if fields.get(b"transfer-encoding") != b"chunked":
            if b"content-length" not in fields:
                raise Broken("no content-length and no chunks")
            self._left = int(fields[b"content-length"])
        self.status = 200
        self.closes = fields.get(b"connection") == b"close"
        self._buffer = rest
        return True

    def _read_chunks(self):
        buffer, at, pieces, ended = self._buffer, 0, [], False
        while not ended and (line := buffer.find(b"\r\n", at)) >= 0:
            size = int(buffer[at:line], 16)
            end = line + 2 + size
            if len(buffer) < end + 2:
                break
            if buffer[end : end + 2] != b"\r\n":
                raise Broken("a chunk without its end")
            pieces.append(buffer[line + 2 : end])
            at, ended = end + 2, size == 0
        self._buffer = buffer[at:]
        self._take(b"".join(pieces))
        return ended

    def _read_body(self):
        taken, self._buffer = self._buffer[: self._left], self._buffer[self._left :]
        self._left -= len(taken)
        self._take(taken)
        return self._left == 0

    def _take(self, text):
        """Take a piece of the body: whole events are counted, what follows them is kept."""
        if not text:
            return
        self.first_at = self.first_at or time.perf_counter()
        self._text += text
        if not self.is_stream:
            return
        *events, self._text = self._text.split(b"\n\n")
        for event in events:
            if event.startswith(b":"):
                continue
            if self._is_done or not event.startswith(b"data: ") or event.startswith(b'data: {"error"'):
                raise Broken(f"not an event that may come here: {event[:200].decode('latin-1')}")
            if event == b"data: [DONE]":
                self._is_done = True
                continue
            self.events += 1
            if b'"completion_tokens"' in event and (found := TOKENS.search(event)):
                self.tokens = int(found[1])

    def _finish(self):
        if self._buffer:
            raise Broken("bytes after the end")
        if self.is_stream and (not self._is_done or self._text):
            raise Broken("a stream without its [DONE]")
        if self.is_stream and self.expected not in (0, self.events):
            raise Broken(f"{self.events} events, not {self.expected}")
        if not self.is_stream:
            found = TOKENS.search(self._text)
            self.tokens = int(found[1]) if found else 0
        self.ended_at = time.perf_counter()
