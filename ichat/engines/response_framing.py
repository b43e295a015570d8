"""The head and the framing of a response that the engine's application makes."""

from collections.abc import Callable

from ichat.http.heads import HOP_BY_HOP, Headers, date_header, is_events, response_head
from ichat.http.request import Request
from ichat.protocol.usage import USAGE_HEADER


class ResponseFraming:
    """Makes the head of a response, and frames each piece of its body."""

    def __init__(self, request: Request, *, keep_alive: bool) -> None:
        self._request = request
        self.keep_alive = keep_alive
        """Whether the connection may be used again; known when the response has ended."""
        self.is_stream = False
        """Whether the body is a stream of events."""
        self.is_chunked = False
        self.ends_with_connection = False
        """Whether only the end of the connection marks the end of the body: HTTP/1.0 has no chunks."""
        self._head = b""
        self._left: int | None = None

    def __repr__(self) -> str:
        return f"<ResponseFraming {'chunked' if self.is_chunked else self._left}>"

    @property
    def has_length(self) -> bool:
        """Whether the head has the body's length."""
        return self._left is not None

    def begin(self, status: int, headers: Headers, usage: Callable[[], bytes | None]) -> None:
        """Make the head; `usage` returns the tokens that a response without a trailer reports, or None."""
        request = self._request
        out = self._read(headers)
        if request.method == b"HEAD" or status in (204, 304):
            self._left = 0
        elif self._left is None:
            if request.version == b"1.1":
                self.is_chunked = True
                out.append((b"transfer-encoding", b"chunked"))
            else:
                self.ends_with_connection = True
                self.keep_alive = False
        if not self.is_chunked and (used := usage()) is not None:
            out.append((USAGE_HEADER, used))
        if not self.keep_alive:
            out.append((b"connection", b"close"))
        self._head = response_head(status, out)

    def _read(self, headers: Headers) -> Headers:
        """Return the application's headers that are sent, after the date and with the request's id."""
        out: Headers = [date_header()]
        identified = False
        for name, value in headers:
            if name == b"content-length":
                self._left = int(value)
            elif name in HOP_BY_HOP:
                continue
            elif name == b"content-type":
                self.is_stream = is_events(value)
            identified = identified or name == b"x-request-id"
            out.append((name, value))
        if not identified:
            out.append((b"x-request-id", self._request.id))
        return out

    def pop_head(self) -> bytes:
        """Return the head if it has not been returned before, otherwise b""."""
        head, self._head = self._head, b""
        return head

    def frame(self, body: bytes, *, more: bool) -> bytes:
        """Return a framed piece of the body, after the head if that was not returned before.

        The last chunk is missing; see `last_chunk`.
        """
        if self.is_chunked:
            return b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        if self._left is not None:
            body = body[: self._left]
            self._left -= len(body)
            if self._left and not more:
                self.keep_alive = False
        return self.pop_head() + body


def last_chunk(usage: bytes | None) -> bytes:
    """Return the end of a body in chunks, with the tokens that were used as a trailer."""
    return b"0\r\n\r\n" if usage is None else b"0\r\n%b: %b\r\n\r\n" % (USAGE_HEADER, usage)
