"""A small HTTP/1.1 client for the gateway's own requests: a connection for each, no redirects, nothing decoded.

Requests of clients go through the pool and the relay instead. Timeouts are scopes of the caller.
"""

import math
import ssl
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from typing import TypeVar, cast

import h11
import trio
from exceptiongroup import BaseExceptionGroup
from typing_extensions import Self

from ichat.http.pool import Upstream
from ichat.texts import reason_of

READ_BYTES = 16 * 1024
ASKED_AT_ONCE_MAX = 32
"""How many of many peers are asked at the same time."""
BROKEN = (trio.BrokenResourceError, trio.ClosedResourceError, h11.ProtocolError)
"""Raised where the connection breaks, or where the peer does not speak HTTP."""
FAILURES = (OSError, ValueError, trio.TooSlowError, *BROKEN)
"""All that a request may raise; OSError where no connection can be made."""

_Asked = TypeVar("_Asked")


class HttpResponse:
    """A response: iterate for the body; leaving its context closes the connection."""

    def __init__(self, parser: h11.Connection, stream: trio.abc.Stream) -> None:
        self._parser = parser
        self._stream = stream
        self.status = 0
        """0 until the head is received."""
        self.headers: dict[bytes, bytes] = {}
        """Their names in lower case."""
        self.is_complete = False
        """Whether the whole body has been parsed."""

    def __repr__(self) -> str:
        return f"<HttpResponse {self.status}{', complete' if self.is_complete else ''}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await trio.aclose_forcefully(self._stream)

    async def receive_head(self) -> None:
        """Receive until the head is complete. Raises one of BROKEN."""
        while not self.status:
            event = self._parser.next_event()
            if event is h11.NEED_DATA:
                await self.receive()
            elif isinstance(event, h11.Response):
                self.status, self.headers = event.status_code, dict(event.headers)
            elif not isinstance(event, h11.InformationalResponse):
                raise h11.RemoteProtocolError("no response")

    async def receive(self) -> None:
        """Receive READ_BYTES at most, which `parse` makes a piece of the body. Raises one of BROKEN."""
        self._parser.receive_data(bytes(await self._stream.receive_some(READ_BYTES)))

    @property
    def unparsed_bytes(self) -> int:
        """How much has been received and not parsed yet."""
        return len(self._parser.trailing_data[0])

    def parse(self) -> bytes:
        """Return the part of the body that has been received since the last call. Raises h11.RemoteProtocolError."""
        if self.is_complete:
            return b""
        pieces: list[bytes] = []
        while isinstance(event := self._parser.next_event(), h11.Data):
            pieces.append(bytes(event.data))
        self.is_complete = event is not h11.NEED_DATA
        return b"".join(pieces)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        piece = self.parse()
        while not piece and not self.is_complete:
            await self.receive()
            piece = self.parse()
        if not piece:
            raise StopAsyncIteration
        return piece


async def request(
    upstream: Upstream,
    target: str,
    headers: Sequence[tuple[bytes, bytes]] = (),
    *,
    method: str = "GET",
    body: bytes = b"",
    connect_s: float = math.inf,
) -> HttpResponse:
    """Send a request; return its response once its head is received. Raises one of FAILURES."""
    parser = h11.Connection(h11.CLIENT)
    own = [(b"host", upstream.authority), (b"connection", b"close")]
    if body or method != "GET":
        own.append((b"content-length", b"%d" % len(body)))
    head = parser.send(h11.Request(method=method, target=target, headers=[*own, *headers])) or b""
    data = parser.send(h11.Data(data=body)) or b"" if body else b""
    parser.send(h11.EndOfMessage())
    with trio.fail_after(connect_s):
        stream = await connect(upstream)
    response = HttpResponse(parser, stream)
    try:
        await stream.send_all(head + data)
        await response.receive_head()
    finally:
        if not response.status:
            await trio.aclose_forcefully(stream)
    return response


def reason_of_failure(error: BaseException) -> str:
    """Return why a request has failed, by one of FAILURES, in a few words: the system's or TLS's if they have any."""
    cause = error.__cause__
    if isinstance(error, trio.TooSlowError):
        return "no answer in time"
    if isinstance(cause, ssl.SSLError):
        return str(getattr(cause, "verify_message", "") or cause.reason or "no TLS")
    if isinstance(error, OSError):
        return reason_of(first_cause(error))
    return str(error) or type(error).__name__


def first_cause(error: OSError) -> OSError:
    """Return the first error of several attempts to connect."""
    cause = error.__cause__
    if isinstance(cause, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", cause).exceptions:
            if isinstance(inner, OSError):
                return inner
    return cause if isinstance(cause, OSError) else error


async def ask_each(asked: Collection[_Asked], ask: Callable[[_Asked], Awaitable[None]]) -> None:
    """Call `ask` for each of `asked`, for ASKED_AT_ONCE_MAX of them at a time."""

    async def ask_next(left: Iterator[_Asked]) -> None:
        for one in left:
            await ask(one)

    left = iter(asked)
    async with trio.open_nursery() as nursery:
        for _ in range(min(ASKED_AT_ONCE_MAX, len(asked))):
            nursery.start_soon(ask_next, left)


async def connect(upstream: Upstream) -> trio.abc.Stream:
    """Open a connection to an upstream. Raises OSError."""
    if not upstream.port:
        return await trio.open_unix_socket(upstream.host)
    stream = await trio.open_tcp_stream(upstream.host, upstream.port)
    if upstream.tls is None:
        return stream
    return trio.SSLStream(stream, upstream.tls, server_hostname=upstream.host, https_compatible=True)
