r"""Our changes to h11: a linear expression for header lines, and heads of requests that have a single reading.

h11's expression can give blanks back to the part after them. A line of many blanks that does not match costs quadratic
time. Any client can so block the only thread for half a minute, with a head of 64 KiB. Ours differs in that
blanks are never given back (`(?![ \t])`), and reads the same lines in the same way (tests/unit/http/test_heads.py).
It can go with h11's expression.

h11 also accepts lines that end with a line feed alone, folded lines, control characters and repeated lengths. Proxies
read these in different ways, so that none of them is let through (`server_parser`).
"""

import re
from collections.abc import Awaitable, Callable

import h11
import h11._readers
import h11._receivebuffer

from ichat import errors
from ichat.errors import ApiError

_TOKEN = rb"[-!#$%&'*+.^_`|~0-9a-zA-Z]+"
_TEXT = rb"[^\x00\s]+"
HEADER_FIELD = re.compile(
    rb"(?P<field_name>%b):[ \t]*(?![ \t])(?P<field_value>(%b(?:[ \t]+%b)*)?)[ \t]*(?![ \t])" % (_TOKEN, _TEXT, _TEXT)
)
_REPLACED = HEADER_FIELD.pattern.replace(rb"(?![ \t])", b"")
_EMPTY_LINE = re.compile(rb"\n\r?\n")
_LENGTH = b"\ncontent-length:"
_CONTROLS = bytes([*range(9), 11, 12, *range(14, 32), 127])
"""Control characters but for tab, line feed and carriage return."""
LINE_FEED = "a line ends with a line feed alone"
BLANK = "a line begins with a blank"
CONTROL = "there is a control character"
LENGTHS = "Content-Length is given more than once"


def apply() -> None:
    """Make h11 read header lines in linear time, in the whole process; a version with another expression keeps that."""
    if h11._readers.header_field_re.pattern == _REPLACED:
        h11._readers.header_field_re = HEADER_FIELD


def server_parser(head_bytes_max: int) -> h11.Connection:
    """Return a parser of a single request, which refuses heads and trailers that could be read in two ways."""
    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=head_bytes_max)
    parser._receive_buffer = StrictBuffer()
    return parser


class StrictBuffer(h11._receivebuffer.ReceiveBuffer):
    """The bytes that h11 has received of a message: its heads and trailers must be clear."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Return the lines up to the next empty line; None until that is received. Raises LocalProtocolError."""
        data = self._data
        if data.startswith(b"\n"):
            raise h11.LocalProtocolError(LINE_FEED)
        if data.startswith(b"\r\n"):
            self._extract(2)
            return []
        end = _EMPTY_LINE.search(data, self._multiple_lines_search)
        if end is None:
            self._multiple_lines_search = max(0, len(data) - 2)
            return None
        head = self._extract(end.end())
        check_clear(head)
        return head[:-4].split(b"\r\n")


def check_clear(head: bytes | bytearray) -> None:
    """Raise LocalProtocolError unless a head or trailer, given with its final empty line, has a single reading."""
    ends = head.count(b"\r\n")
    if head.count(b"\n") != ends:
        raise h11.LocalProtocolError(LINE_FEED)
    if b"\n " in head or b"\n\t" in head:
        raise h11.LocalProtocolError(BLANK)
    if head.count(b"\r") != ends or len(head.translate(None, _CONTROLS)) != len(head):
        raise h11.LocalProtocolError(CONTROL)
    _, _, behind = head.lower().partition(_LENGTH)
    if behind and (_LENGTH in behind or b"," in behind.partition(b"\r")[0]):
        raise h11.LocalProtocolError(LENGTHS)


def announced_length(head: h11.Request) -> int | None:
    """Return the length of the body, or None for a body in chunks. Raises ApiError if that is not clear."""
    length = b"0"
    is_chunked = False
    is_announced = False
    for name, value in head.headers:
        if name == b"content-length":
            is_announced, length = True, value
        elif name == b"transfer-encoding":
            is_chunked = True
    if is_chunked:
        if is_announced:
            raise errors.bad_request("A request has either Content-Length or Transfer-Encoding, not both.")
        if head.http_version != b"1.1":
            raise errors.bad_request("HTTP/1.0 has no Transfer-Encoding: send Content-Length, or use HTTP/1.1.")
        return None
    return int(length)


async def send_continue(parser: h11.Connection, send_all: Callable[[bytes], Awaitable[None]]) -> None:
    """Ask for the body if the client waits for that (RFC 9110, section 10.1.1)."""
    if parser.they_are_waiting_for_100_continue:
        event = h11.InformationalResponse(status_code=100, headers=[])
        await send_all(parser.send(event) or b"")


def refusal_of(error: h11.RemoteProtocolError, head_bytes_max: int) -> ApiError:
    """Return the error that the client of a request gets that h11 refuses."""
    if error.error_status_hint == 431:
        return errors.head_too_large(head_bytes_max)
    return errors.bad_request(f"This is not valid HTTP/1.1: {error}.")
