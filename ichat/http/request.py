"""Read requests from a client's connection, each whole.

A plain head is parsed by `heads.py`, all others by h11, made stricter (`h11_patch.py`). That protects against request
smuggling: a head that is accepted has a single reading.
"""

import math
import socket
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import attrs
import h11
import trio

from ichat import errors
from ichat.config.schema import Limits, Timeouts
from ichat.http.h11_patch import announced_length, refusal_of, send_continue, server_parser
from ichat.http.heads import Headers, RequestHead, parse_plain_request_head
from ichat.http.hub import Hub
from ichat.http.request_ids import RequestIds

PIECES_MAX = 128
"""Pieces of a body received before other tasks get their turn."""
UNWAITED_MAX = 16
"""Receives in a row without a wait, before other tasks get their turn."""
RECV_BYTES = 65536
"""Bytes received at a time, at most, while a head or a body in chunks is read."""
_BUFFER = bytearray(256 * 1024)
_VIEW = memoryview(_BUFFER)
_NOTHING: Mapping[bytes, bytes] = MappingProxyType({})


def _by_name(request: "Request") -> Mapping[bytes, bytes]:
    return dict(reversed(request.headers))


@attrs.define(eq=False)
class Request:
    """A request, including its body."""

    method: bytes
    target: bytes
    """Path and query as sent."""
    path: bytes
    version: bytes
    """"1.1" or "1.0"."""
    headers: Headers
    body: bytes | bytearray
    id: bytes
    """The client's `x-request-id` if it is valid, else one of ours."""
    keep_alive: bool
    """Whether the client lets the connection carry another request."""
    own_id: bytes = b""
    """The id that this process made: different for each request, and not known to other clients."""
    by_name: Mapping[bytes, bytes] = attrs.Factory(_by_name, takes_self=True)
    """Each header's value by its name; the first value where a name is repeated."""

    def replace_headers(self, headers: Headers) -> None:
        """Have these headers from now on."""
        self.headers = headers
        self.by_name = dict(reversed(headers))

    def release_body(self) -> None:
        """Free body and headers when they are no longer needed: the response may last an hour."""
        self.body = b""
        self.headers = []
        self.by_name = _NOTHING


class Bounds(Protocol):
    """Where a reader looks up the current bounds, which a reload may replace."""

    limits: Limits
    timeouts: Timeouts
    ids: RequestIds
    draining: bool


class RequestReader:
    """Reads the requests of a connection in turn: the head, then the body.

    The hub calls `wake` when something can be received, and `expire` when nothing arrived in time.
    """

    __slots__ = (
        "_arrived", "_bounds", "_fed", "_has_expired", "_has_waited", "_hub", "_is_readable", "_leftover", "_parser",
        "_send_all", "_sock", "_task", "_unwaited", "deadline", "idle",
    )  # fmt: skip

    def __init__(
        self, sock: socket.socket, bounds: Bounds, hub: Hub, send_all: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """`send_all` sends the interim response that asks a client for its body."""
        self._sock = sock
        self._bounds = bounds
        self._hub = hub
        self._send_all = send_all
        self._leftover = b""
        """Bytes received but not yet read."""
        self._parser: h11.Connection | None = None
        """Has read the current head, unless that is a plain head."""
        self._fed = 0
        """Bytes given to the parser."""
        self._is_readable = True
        """Whether bytes may have arrived since the socket was last found empty."""
        self._unwaited = 0
        """How often something was received since the last wait."""
        self._task: trio.lowlevel.Task | None = None
        """The task that waits for bytes."""
        self._arrived: Callable[[], bool] | None = None
        """Called before that task is woken; see `wait_ahead`."""
        self._has_expired = self._has_waited = False
        """Whether nothing arrived in time, and whether that wait was for the next head; see `wait_ahead`."""
        self.deadline = math.inf
        """Of the wait, on Trio's clock."""
        self.idle = True
        """Whether it waits for the first byte of a request."""

    async def read_head(self) -> RequestHead | None:
        """Read the next request's head; None if the client has left. Raises ApiError (408, 431, 400)."""
        if self._has_waited:
            self.end_wait_ahead()
            if self._has_expired:
                return None
        if self._leftover:
            await trio.lowlevel.checkpoint()
            data, self._leftover = self._leftover, b""
        else:
            self.idle = True
            received: memoryview | None = None
            while received is None:
                if not self._is_readable and not await self._wait(
                    self._hub.update_clock() + self._bounds.timeouts.keep_alive_s
                ):
                    return None
                received = self._receive_now(RECV_BYTES)
            if not received:
                return None
            self.idle = False
            data = bytes(received)
            if self._unwaited >= UNWAITED_MAX:
                await self._let_others_run()
        limits = self._bounds.limits
        end = data.find(b"\r\n\r\n", 0, limits.head_bytes_max)
        head = parse_plain_request_head(data[:end]) if end >= 0 else None
        if head is not None:
            self._leftover = data[end + 4 :]
            return head
        self._parser = parser = server_parser(limits.head_bytes_max)
        parser.receive_data(data)
        self._fed = len(data)
        return await self._parse_head(parser, trio.current_time() + self._bounds.timeouts.head_s)

    def receive_ahead(self) -> bytes:
        """Return the bytes that have arrived in the wait of `wait_ahead`. Then end that, or `unread` the bytes."""
        received = self._receive_now(RECV_BYTES)
        self.idle = not received
        return bytes(received or b"")

    def take_request(self, head: RequestHead) -> Request | None:
        """Return the request with this head if its whole body has been received, as most have; else `read_body`."""
        length, data = head.length, self._leftover
        if self._parser is not None or length is None or length > len(data):
            return None
        if length > self._bounds.limits.body_bytes_max:
            return None
        self._leftover = data[length:]
        return self.request_of(head, data[:length])

    async def read_body(self, head: RequestHead) -> Request | None:
        """Read the body behind this head; None if the client has left. Raises ApiError (408, 413, 400)."""
        deadline = trio.current_time() + self._bounds.timeouts.body_s
        parser, self._parser = self._parser, None
        data, self._leftover = self._leftover, b""
        if head.length is not None and head.length > self._bounds.limits.body_bytes_max:
            raise errors.request_too_large(self._bounds.limits.body_bytes_max)
        if parser is not None:
            await send_continue(parser, self._send_all)
            data = parser.trailing_data[0]
        if head.length is not None:
            body = await self._read_exactly(head.length, data, deadline)
        else:
            assert parser is not None
            body = await self._read_chunks(parser, deadline)
        return None if body is None else self.request_of(head, body)

    async def _parse_head(self, parser: h11.Connection, deadline: float) -> RequestHead | None:
        """Read the head by h11; None if the client has left. Raises ApiError (408, 431, 400)."""
        event = await self._next_event(parser, deadline)
        if not isinstance(event, h11.Request):
            return None
        if self._fed - len(parser.trailing_data[0]) > self._bounds.limits.head_bytes_max:
            raise errors.head_too_large(self._bounds.limits.head_bytes_max)
        if event.http_version not in (b"1.1", b"1.0"):
            raise errors.bad_request(f"HTTP/{event.http_version.decode()} is not supported: use HTTP/1.1.")
        if not event.target.startswith(b"/"):
            raise errors.bad_request("The request target must be a path that begins with '/'.")
        return RequestHead(event.method, event.target, event.http_version, list(event.headers), announced_length(event))

    async def _next_event(self, parser: h11.Connection, deadline: float) -> object:
        """Return the parser's next event, feeding it as needed; None if the client has left. Raises ApiError."""
        while True:
            try:
                event = parser.next_event()
            except h11.RemoteProtocolError as error:
                raise refusal_of(error, self._bounds.limits.head_bytes_max) from error
            if event is not h11.NEED_DATA:
                return event
            await send_continue(parser, self._send_all)
            data = await self.receive(deadline)
            if data is None:
                raise errors.request_timeout()
            if not data:
                return None
            self._fed += len(data)
            parser.receive_data(data)

    async def _read_chunks(self, parser: h11.Connection, deadline: float) -> bytearray | None:
        body = bytearray()
        bytes_max = self._bounds.limits.body_bytes_max
        pieces = 0
        while isinstance(event := await self._next_event(parser, deadline), h11.Data):
            body += event.data
            if len(body) > bytes_max:
                raise errors.request_too_large(bytes_max)
            pieces += 1
            if pieces % PIECES_MAX == 0:
                await trio.lowlevel.checkpoint()
        self._leftover = parser.trailing_data[0]
        return body if isinstance(event, h11.EndOfMessage) else None

    async def _read_exactly(self, length: int, data: bytes, deadline: float) -> bytes | bytearray | None:
        """Return a body of a known length: the bytes received with the head, and the rest with a single copy."""
        if len(data) >= length:
            self._leftover = data[length:]
            return data[:length]
        body = bytearray(data)
        while len(body) < length:
            received = await self._receive_into(length - len(body), deadline)
            if received is None:
                raise errors.request_timeout()
            if not received:
                return None
            body += received
        return body

    def request_of(self, head: RequestHead, body: bytes | bytearray) -> Request:
        """Return the request of this head and this whole body."""
        by_name = head.by_name
        keep_alive = head.version == b"1.1"
        if b"connection" in by_name and any(
            name == b"connection" and b"close" in value.lower() for name, value in head.headers
        ):
            keep_alive = False
        shown_id, own_id = self._bounds.ids.of(by_name)
        return Request(
            head.method, head.target, head.path, head.version, head.headers, body, shown_id, keep_alive, own_id, by_name
        )  # fmt: skip

    @property
    def limits(self) -> Limits:
        """The current limits."""
        return self._bounds.limits

    @property
    def timeouts(self) -> Timeouts:
        """The current time limits."""
        return self._bounds.timeouts

    def has_received(self) -> bool:
        """Return whether bytes of a further request were received, but not yet read, or may have arrived."""
        return bool(self._leftover) or self._has_waited

    def unread(self, data: bytes) -> None:
        """Read these bytes, which were received elsewhere, before all others."""
        self._leftover = data + self._leftover

    def has_more(self) -> bool:
        """Return whether the client has sent something that was not read."""
        return bool(self._leftover) or self.is_asking()

    def is_asking(self) -> bool:
        """Return whether the client has sent something that was not received yet."""
        try:
            return bool(self._sock.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    async def receive(self, deadline: float) -> bytes | None:
        """Return some bytes: none at the end of the stream, None if nothing arrived in time."""
        received = await self._receive_into(RECV_BYTES, deadline)
        return None if received is None else bytes(received)

    async def _receive_into(self, bytes_max: int, deadline: float) -> memoryview | None:
        """Return a view of some bytes in a buffer that all clients share; it is valid until the next await."""
        if self._unwaited >= UNWAITED_MAX:
            await self._let_others_run()
            if trio.current_time() >= deadline:
                return None
        received: memoryview | None = None
        while received is None:
            if not self._is_readable and not (await self._wait(deadline) and self._hub.now < deadline):
                return None
            received = self._receive_now(bytes_max)
        return received

    def _receive_now(self, bytes_max: int) -> memoryview | None:
        """Return a view of the received bytes: empty at the end of the stream, None if none have arrived."""
        bytes_max = min(bytes_max, len(_BUFFER))
        try:
            received = self._sock.recv_into(_BUFFER, bytes_max)
        except BlockingIOError:
            self._is_readable = False
            return None
        except OSError:
            return _VIEW[:0]
        self._unwaited += 1
        if 0 < received < bytes_max:
            self._is_readable = False  # the socket is empty: the hub reports all later bytes
        return _VIEW[:received]

    async def _let_others_run(self) -> None:
        self._unwaited = 0
        await trio.lowlevel.checkpoint()

    async def _wait(self, deadline: float) -> bool:
        """Wait for bytes; return whether they arrived in time."""
        self._unwaited = 0
        self._has_expired = False
        self.deadline = deadline
        self._hub.time(self)
        self._task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._abandon)
        self.deadline = math.inf
        return not self._has_expired

    def wait_ahead(self, task: trio.lowlevel.Task, arrived: Callable[[], bool]) -> bool:
        """Have the next request wake this task, as `read_head` would; return False if it may have arrived already.

        So the end of a response needs no turn of its task. `arrived` is called first, and returns whether it has begun
        the request without the task (`receive_ahead`). `end_wait_ahead` must follow if the task is cancelled.
        """
        if self._leftover or self._is_readable or self._bounds.draining:
            return False
        self._unwaited, self._has_expired, self._has_waited, self.idle = 0, False, True, True
        self.deadline = self._hub.update_clock() + self._bounds.timeouts.keep_alive_s
        self._hub.time(self)
        self._task, self._arrived = task, arrived
        return True

    def end_wait_ahead(self) -> None:
        """End the wait of `wait_ahead`. Harmless the second time."""
        self._task, self._arrived, self._has_waited, self.deadline = None, None, False, math.inf

    def wake(self) -> None:
        """Called when bytes have arrived."""
        self._is_readable = True
        arrived, self._arrived = self._arrived, None
        if arrived is not None and arrived():
            return
        task = self._task
        if task is not None:
            self._task = None
            trio.lowlevel.reschedule(task)

    def expire(self) -> None:
        """Called by the hub when nothing arrived in time."""
        task, self._task = self._task, None
        if task is not None:
            self._has_expired = True
            trio.lowlevel.reschedule(task)

    def _abandon(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED
