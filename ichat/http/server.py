"""A client's connection: send a response, and decide what becomes of the connection.

The relay and the engine's thread write to its socket directly; all others use `Client.respond` and `Client.send_all`.
"""

import contextlib
import enum
import socket
from typing import NamedTuple, Protocol

import attrs
import trio

from ichat import errors
from ichat.errors import ApiError
from ichat.http.heads import Headers, RequestHead, date_header, parse_plain_request_head, response_head
from ichat.http.hub import ENDED, HANG_UP, READABLE, Hub
from ichat.http.request import Bounds, Request, RequestReader
from ichat.http.tls import RESET
from ichat.protocol.messages import CODE_HEADER, ERROR_HEADER, WHY_HEADER

NO_CONTENT = 204
_WITHOUT_LENGTH = frozenset((NO_CONTENT, 304))
"""A response of these statuses has no body, and here no length (RFC 9110, section 8.6)."""


class OwnResponse(NamedTuple):
    """A response of our own making, without the headers that each response has."""

    status: int
    headers: Headers
    body: bytes


class Sends(Protocol):
    """An object to which a response is sent as to a socket."""

    def send(self, data: bytes | memoryview, /) -> int: ...


class Taker(Protocol):
    """Receives a response in pieces: its client, or an object that keeps it for the client (`unread.py`)."""

    @property
    def sock(self) -> Sends: ...
    @property
    def peer(self) -> str: ...
    def send_some(self, data: bytes | memoryview, /) -> int: ...
    def not_sent(self, error: OSError, /) -> int: ...
    def response_is_whole(self) -> None: ...
    async def send_all(self, data: bytes, /) -> None: ...


class Door(Bounds, Protocol):
    """Everything that the connections of a port share; see `FrontDoor`."""

    role: bytes
    hub: Hub

    @property
    def ends_connection(self) -> object: ...
    def more_headers(self, head: RequestHead, /) -> Headers: ...
    def check_drained(self) -> None: ...


class Ending(enum.Enum):
    """What becomes of a client's connection after the current response; answering can only make it worse."""

    KEEP = "keep"
    """It may carry another request."""
    CLOSE = "close"
    RESET = "reset"
    """It ends in an error: the client would regard an end in good order as the end of the response."""


@attrs.define(eq=False, repr=False)
class Client:
    """A client's connection."""

    _door: Door
    sock: socket.socket
    peer: str
    reader: RequestReader = attrs.field(init=False)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    """The work for the client; cancelled when it disconnects."""
    head: RequestHead | None = attrs.field(default=None, init=False)
    """The head of the current request, until its response begins."""
    request: Request | None = attrs.field(default=None, init=False)
    """The newest request, once it has been read; None if an engine's thread reads it."""
    _more: Headers = attrs.field(factory=list[tuple[bytes, bytes]], init=False)
    has_left: bool = attrs.field(default=False, init=False)
    blocks_drain: bool = attrs.field(default=True, init=False)
    """Whether a drain waits for the current exchange; see `exempt_from_drain`."""
    _ending: Ending = attrs.field(default=Ending.KEEP, init=False)
    _head_sent: bool = attrs.field(default=False, init=False)
    _owns_socket: bool = attrs.field(default=True, init=False)

    def __attrs_post_init__(self) -> None:
        self.reader = RequestReader(self.sock, self._door, self._door.hub, self.send_all)

    def __repr__(self) -> str:
        return f"<Client {self.peer}{' idle' if self.idle else ''}>"

    @property
    def idle(self) -> bool:
        """Whether it waits for the first byte of a request."""
        return self.reader.idle

    @property
    def keep_alive(self) -> bool:
        """Whether the connection may carry another request."""
        return self._ending is Ending.KEEP

    @property
    def head_sent(self) -> bool:
        """Whether any byte of the current response may have been sent."""
        return self._head_sent

    @property
    def must_reset(self) -> bool:
        """Whether the connection must end in an error; see `Ending.RESET`."""
        return self._ending is Ending.RESET

    def begin_request(self) -> None:
        """Called before a request is read."""
        self.head = None
        self._more = []

    def begin_exchange(self, request: Request | None = None) -> None:
        """Called when a request has been read: nothing of its response has been sent."""
        self._head_sent, self.request = False, request
        if self._door.draining:
            self.close_after_response()

    def close_after_response(self) -> None:
        """Let the connection carry no further request."""
        if self._ending is Ending.KEEP:
            self._ending = Ending.CLOSE

    def begin_unframed(self) -> None:
        """Called before the head of a response that ends with the connection: until it is whole, its end is a reset."""
        self._ending = Ending.RESET

    def response_is_whole(self) -> None:
        """Called when the client has all of a response, so that the connection may end in good order."""
        if self._ending is Ending.RESET:
            self._ending = Ending.CLOSE

    def end_of_response(self, *, head_sent: bool, ending: Ending) -> None:
        """Called when an engine has written a response to the socket itself."""
        self._head_sent = head_sent
        if ending is not Ending.KEEP:
            self._ending = ending

    def send_some(self, data: bytes | memoryview) -> int:
        """Send as much as the socket accepts at once, and return how much that is."""
        self._head_sent = True
        try:
            return self.sock.send(data)
        except OSError as error:
            return self.not_sent(error)

    def not_sent(self, error: OSError) -> int:
        """Return how much was sent: 0, as the client accepts nothing now, or has left. A departure is noted."""
        if not isinstance(error, BlockingIOError):
            self.on_disconnect()
        return 0

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send everything; a client that accepts nothing for `timeouts.client_stall_s` is given up (cancelled)."""
        view = memoryview(data)
        self._head_sent = True
        while view:
            try:
                sent = self.sock.send(view)
            except BlockingIOError:
                with trio.move_on_after(self._door.timeouts.client_stall_s) as stall:
                    await trio.lowlevel.wait_writable(self.sock)
                if stall.cancelled_caught:
                    await self.abandon()
            except OSError:
                await self.abandon()
            else:
                view = view[sent:]

    async def end_with_event(self, event: bytes) -> None:
        """End a stream in chunks with an event, and the connection with it."""
        self.close_after_response()
        await self.send_all(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))

    async def abandon(self) -> None:
        """Abandon this client; does not return."""
        self.on_disconnect()
        await trio.sleep_forever()

    def cut(self) -> None:
        """Give up this client, and what its connection still holds: cancel its request."""
        self._ending = Ending.RESET
        self.on_disconnect()

    def on_events(self, events: int) -> None:
        """Called by the hub when the client has sent something, or has disconnected."""
        if events & ENDED:
            self.on_disconnect()
        else:
            self.reader.wake()

    def on_disconnect(self, _events: int = 0) -> None:
        """Called when the client disconnects or is given up: cancel its request and close the connection."""
        self.has_left = True
        self._door.hub.forget(self.sock.fileno())
        self.scope.cancel()

    def leave_reading(self) -> None:
        """Receive only disconnect events: another thread reads the next requests, until `resume_reading`."""
        self._door.hub.rearm(self.sock.fileno(), HANG_UP)

    def resume_reading(self) -> None:
        """Receive events of received bytes again."""
        self._door.hub.rearm(self.sock.fileno(), READABLE)

    def exempt_from_drain(self) -> None:
        """Let no drain wait for the current exchange: it lasts as long as this process, as a stream of its log does."""
        self.blocks_drain = False
        self._door.check_drained()

    def leave_socket(self) -> None:
        """Break the connection, but leave the socket open: an engine that has it may still write to it."""
        self._owns_socket = False
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; with a reset where it must end in an error."""
        if self._owns_socket:
            if self.must_reset:
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.sock.close()

    async def respond(self, request: Request, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole response of our own making."""
        await self.send_all(self.response(request, OwnResponse(status, headers, body)))

    def response(self, request: Request, answer: OwnResponse) -> bytes:
        """Return a whole response of our own making, as bytes."""
        return self._response(request.id, request.method, *answer)

    def more_headers(self) -> Headers:
        """Return the headers that the role adds to every response to the current request."""
        if self.head is not None:
            self._more = self._door.more_headers(self.head)
            self.head = None  # the response may last an hour
        return self._more

    def error_response(self, error: ApiError, request_id: bytes, method: bytes = b"", path: bytes = b"") -> bytes:
        """Return the whole response for an error, in the shape of the route `path`."""
        headers = [*error.headers(), (ERROR_HEADER, self._door.role)]
        if self._door.role == b"worker":
            code = error.code.encode()
            headers.append((CODE_HEADER, code))
            if code in errors.DECLINED:
                headers.append((WHY_HEADER, error.why()))
        return self._response(request_id, method, error.status, headers, error.body(path, request_id))

    def _response(self, request_id: bytes, method: bytes, status: int, headers: Headers, body: bytes) -> bytes:
        if self._door.draining:
            self.close_after_response()
        head = [date_header(), *headers]
        if status not in _WITHOUT_LENGTH:
            head.append((b"content-length", b"%d" % len(body)))
        head += [(b"x-request-id", request_id), *self.more_headers()]
        if not self.keep_alive:
            head.append((b"connection", b"close"))
        return response_head(status, head) + (b"" if method == b"HEAD" else body)


def next_request(client: Client) -> tuple[Request, bytes] | None:
    """Return the next request of a client, and its bytes, if these are all that have arrived; see `wait_ahead`.

    The client is not identified. None: the task that waits must read the bytes. The caller may `unread` others for it.
    """
    door, reader = client._door, client.reader
    if door.draining or door.ends_connection is not None:
        return None
    data, limits = reader.receive_ahead(), door.limits
    body = data.find(b"\r\n\r\n", 0, limits.head_bytes_max) + 4
    head = parse_plain_request_head(data[: body - 4]) if body >= 4 else None
    if head is None or not head.length == len(data) - body <= limits.body_bytes_max:
        reader.unread(data)
        return None
    reader.end_wait_ahead()
    client.begin_request()
    client.head, request = head, reader.request_of(head, data[body:])
    if not request.keep_alive:
        client.close_after_response()
    client.begin_exchange(request)
    return request, data
