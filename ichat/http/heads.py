"""Heads of HTTP/1.1 messages: parse an upstream's response head and a client's plain request head, write both.

h11 needs 32 microseconds for a head, this 5. The parsers are property-tested against h11; a request head that is
not plain is left to h11 itself (`request.py`).
"""

import email.utils
import http
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

from ichat.http.framing import Chunked, Framing, Length, UntilClose

Headers = list[tuple[bytes, bytes]]
"""Names in lower case, values without surrounding white space."""

HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
"""Headers of a single connection, never forwarded (RFC 9110, section 7.6.1)."""

# `[ \t]*(?![ \t])` matches all blanks and gives none back, so that no line costs quadratic time.
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([^\0\n-\r]*))?")
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*(?![ \t])([^\0\n-\r]*)")
_REQUEST_LINE = re.compile(rb"([A-Z]{1,32}) (/[!-~]*) HTTP/1\.1")
_PLAIN_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*(?![ \t])([^\0-\x08\x0a-\x1f\x7f]*)")
_NOT_PLAIN = frozenset((b"transfer-encoding", b"expect", b"upgrade"))
_LENGTH_DIGITS_MAX = 18
_REASONS = {int(status): status.phrase.encode() for status in http.HTTPStatus}
LINES_MAX = 512
"""Lines of a kind that are remembered with the result of reading them."""
LINE_BYTES_MAX = 256
"""A longer line is not remembered."""


class HeadError(Exception):
    """A response head is not valid, or could be read in two ways."""


class ResponseHead(NamedTuple):
    """An upstream's response head, and how its body is framed."""

    status: int
    reason: bytes
    headers: Headers
    by_name: Mapping[bytes, bytes]
    """Each header's value by its name; the first value where a name is repeated."""
    framing: Framing
    reusable: bool
    """Whether the connection may carry another exchange after the body."""
    is_events: bool
    """Whether its body is a stream of events."""


class RequestHead:
    """A client's request head."""

    __slots__ = ("by_name", "headers", "length", "method", "path", "target", "version")

    def __init__(
        self,
        method: bytes,
        target: bytes,
        version: bytes,
        headers: Headers,
        length: int | None,
        *,
        by_name: dict[bytes, bytes] | None = None,
    ) -> None:
        """`by_name` is made of the headers unless it is given."""
        self.method = method
        self.target = target
        """A path, possibly with a query."""
        self.path = target.partition(b"?")[0]
        """The target without its query."""
        self.version = version
        self.headers = headers
        self.by_name = dict(reversed(headers)) if by_name is None else by_name
        """Each header's value by its name; the first value where a name is repeated."""
        self.length = length
        """Bytes of the body; None for a body in chunks."""

    def __repr__(self) -> str:
        return f"<RequestHead {self.method.decode('latin-1')} {self.path.decode('latin-1')}>"


Read = TypeVar("Read")


class RememberedLines(dict[bytes, Read]):
    """Results of reading lines of heads: a peer sends the same lines again and again. It is emptied when it is full."""

    def __init__(self, read: Callable[[bytes], Read]) -> None:
        """`read` returns the meaning of a line, or raises HeadError."""
        super().__init__()
        self._read = read

    def __missing__(self, line: bytes) -> Read:
        read = self._read(line)
        if len(line) <= LINE_BYTES_MAX:
            if len(self) >= LINES_MAX:
                self.clear()
            self[line] = read
        return read


def _reader_of_headers(form: re.Pattern[bytes]) -> Callable[[bytes], tuple[bytes, bytes]]:
    """Return a function that reads a header line of this form."""

    def read(line: bytes) -> tuple[bytes, bytes]:
        match = form.fullmatch(line)
        if match is None:
            raise HeadError("a header line is not valid")
        return match[1].lower(), match[2].rstrip(b" \t")

    return read


def _read_request_line(line: bytes) -> tuple[bytes, bytes]:
    """Return method and target."""
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise HeadError("the request line is not plain")
    return match[1], match[2]


def _read_status_line(line: bytes) -> tuple[int, bytes, bool]:
    """Return status, reason, and whether the version is 1.1."""
    match = _STATUS_LINE.fullmatch(line)
    if match is None:
        raise HeadError("the status line is not valid")
    return int(match[2]), match[3] or b"", match[1] == b"1"


_request_line = RememberedLines(_read_request_line).__getitem__
_plain_header = RememberedLines(_reader_of_headers(_PLAIN_HEADER)).__getitem__
_status_line = RememberedLines(_read_status_line).__getitem__
_header = RememberedLines(_reader_of_headers(_HEADER)).__getitem__


def parse_plain_request_head(head: bytes) -> RequestHead | None:
    """Return the parsed head (given without its final empty line) of a plain HTTP/1.1 request.

    Return None for everything that is rare or that two parsers could read differently; it may still be valid.
    """
    lines = head.split(b"\r\n")
    try:
        method, target = _request_line(lines[0])
        headers = [*map(_plain_header, lines[1:])]
    except HeadError:
        return None
    by_name = dict(headers)
    if len(by_name) != len(headers):
        names = [name for name, _ in headers]
        if names.count(b"host") > 1 or names.count(b"content-length") > 1:
            return None
        by_name = dict(reversed(headers))
    length = by_name.get(b"content-length", b"0")
    if b"host" not in by_name or not _NOT_PLAIN.isdisjoint(by_name) or not _is_length(length):
        return None
    return RequestHead(method, target, b"1.1", headers, int(length), by_name=by_name)


def _is_length(value: bytes) -> bool:
    return value.isdigit() and len(value) <= _LENGTH_DIGITS_MAX


def is_events(content_type: bytes) -> bool:
    """Return whether a body of this type is a stream of events."""
    return content_type.startswith(b"text/event-stream")


def parse_response_head(head: bytes, method: bytes) -> ResponseHead:
    """Return the parsed head (given without its final empty line) of the response to a request of this method.

    Raises HeadError for what RFC 9112 calls invalid and for what two parsers could read differently.
    """
    lines = head.split(b"\r\n")
    status, reason, reusable = _status_line(lines[0])
    headers = [*map(_header, lines[1:])]
    by_name = dict(headers)
    connection = by_name.get(b"connection", b"")
    if len(by_name) != len(headers):
        headers = _without_repeated(headers)
        by_name = dict(reversed(headers))
        connection = b",".join([value for name, value in headers if name == b"connection"])
    length, coding = by_name.get(b"content-length"), by_name.get(b"transfer-encoding")
    if length is not None and not _is_length(length):
        raise HeadError("the content length is not a number")
    if b"close" in connection.lower():
        reusable = False
    if method == b"HEAD" or status < 200 or status in (204, 304):
        framing = Length(0)
    else:
        framing = _framing_of(length, coding)
        reusable = reusable and not isinstance(framing, UntilClose)
    is_stream = is_events(by_name.get(b"content-type", b""))
    return ResponseHead(status, reason, headers, by_name, framing, reusable, is_stream)


def _without_repeated(headers: Headers) -> Headers:
    """Return the headers with a single content length. Raises HeadError if two of them contradict each other."""
    if sum(name == b"transfer-encoding" for name, _ in headers) > 1:
        raise HeadError("two transfer encodings")
    lengths = [header for header in headers if header[0] == b"content-length"]
    if len(set(lengths)) > 1:
        raise HeadError("two different content lengths")
    first = headers.index(lengths[0]) if lengths else -1
    return [header for at, header in enumerate(headers) if at == first or header[0] != b"content-length"]


def _framing_of(length: bytes | None, coding: bytes | None) -> Framing:
    """Return the framing of a body by its content length and transfer encoding. Raises HeadError."""
    if coding is None:
        return UntilClose() if length is None else Length(int(length))
    if coding.lower() != b"chunked":
        raise HeadError(f"the transfer encoding {coding[:40]!r} is not supported")
    if length is not None:
        raise HeadError("both a content length and a transfer encoding")
    return Chunked()


def hop_by_hop_of(headers: Headers) -> frozenset[bytes]:
    """Return the names of headers that may not be forwarded: hop-by-hop headers and those that `Connection` names.

    `Content-Length` may, even if it is named there: the body is forwarded with that length.
    """
    by_name = dict(headers)
    if len(by_name) == len(headers) and by_name.get(b"connection", b"keep-alive").lower() == b"keep-alive":
        return HOP_BY_HOP
    named = {name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",")}
    return HOP_BY_HOP | (named - {b"content-length"})


def form_type(by_name: Mapping[bytes, bytes]) -> bytes:
    """Return the content type of a multipart form, of the headers by name; empty for a body of any other type."""
    value = by_name.get(b"content-type", b"")
    return value if value[:10].lower() == b"multipart/" else b""


def request_head(method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a request head as bytes; the headers must be a parser's or our own."""
    lines = [b"%b %b HTTP/1.1" % (method, target)]
    lines += map(b": ".join, headers)
    lines += [b"", b""]
    return b"\r\n".join(lines)


def response_head(status: int, headers: Iterable[tuple[bytes, bytes]], reason: bytes = b"") -> bytes:
    """Return a response head as bytes, with the given or the usual reason phrase."""
    lines = [b"HTTP/1.1 %d %b" % (status, reason or _REASONS.get(status, b""))]
    lines += map(b": ".join, headers)
    lines += [b"", b""]
    return b"\r\n".join(lines)


class _Clock:
    """The `Date` header, made once a second (RFC 9110, section 6.6.1)."""

    def __init__(self) -> None:
        self.second = 0
        self.header = (b"date", b"")

    def now(self) -> tuple[bytes, bytes]:
        second = int(time.time())
        if second != self.second:
            self.second, self.header = second, (b"date", email.utils.formatdate(second, usegmt=True).encode())
        return self.header


date_header = _Clock().now
