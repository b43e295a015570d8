"""The front door: accept, read one request, have it answered, keep the connection for the next.

Requests are read by h11, whose strictness is the protection against smuggling: what it lets through can be read in
one way only. Responses are written by whoever answers (the relay, the engine's thread, or `Client.respond`), straight
to the socket. One task per connection; one cancel scope per connection, so a client that hangs up cancels whatever is
done for it, in every phase.
"""

import contextlib
import itertools
import logging
import math
import os
import re
import socket
from collections.abc import Awaitable, Callable

import attrs
import h11
import trio

from ichat import errors
from ichat.config import Limits, Timeouts
from ichat.errors import EXIT_UNAVAILABLE, ApiError, Exit
from ichat.http.heads import Headers, date_header, response_head
from ichat.http.hub import HANG_UP, Hub

log = logging.getLogger(__name__)

ACCEPT_RETRY_S = 0.1
ACCEPT_MAX = 64
"""Connections accepted before other tasks get their turn."""
PIECES_MAX = 128
"""Pieces of a body taken before other tasks get their turn."""
RECV_BYTES = 65536
LINGER_S = 1.0
LINGER_RECVS_MAX = 4096
BACKLOG = 4096
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
_FAMILIES = {socket.AF_INET, socket.AF_INET6}


@attrs.define(eq=False)
class Request:
    """One request, body included."""

    method: bytes
    target: bytes
    """Path and query as sent."""
    path: bytes
    version: bytes
    """"1.1" or "1.0"."""
    headers: Headers
    body: bytes
    id: bytes
    """The client's `x-request-id` where it is sane, else one of ours."""


Answer = Callable[[Request, "Client"], Awaitable[None]]
"""Writes exactly one response to the client, or raises before it has written anything."""


@attrs.define
class _RequestIds:
    """Ids that are unique without asking the kernel for randomness each time."""

    prefix: str = attrs.field(factory=lambda: os.urandom(6).hex())
    count: "itertools.count[int]" = attrs.field(factory=lambda: itertools.count(1))

    def next(self) -> bytes:
        return f"req-{self.prefix}-{next(self.count):x}".encode()


class Client:
    """A client's connection."""

    def __init__(self, door: "FrontDoor", sock: socket.socket, peer: str) -> None:
        self._door = door
        self._scope = trio.CancelScope()
        self._leftover = b""
        self._owns_socket = True
        self.sock = sock
        self.peer = peer
        self.keep_alive = True
        """Whether the connection may carry another request; whoever answers may only turn it off."""
        self.head_sent = False
        """Whether any byte of the current response may have been sent."""
        self.idle = True

    def __repr__(self) -> str:
        return f"<Client {self.peer}{' idle' if self.idle else ''}>"

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send everything; a client that takes nothing for `timeouts.client_stall_s` counts as gone (cancelled)."""
        view = memoryview(data)
        self.head_sent = True
        while view:
            try:
                sent = self.sock.send(view)
            except BlockingIOError:
                self._scope.deadline = trio.current_time() + self._door.timeouts.client_stall_s
                await trio.lowlevel.wait_writable(self.sock)
                self._scope.deadline = math.inf
            except OSError:
                await self.gone()
            else:
                view = view[sent:]

    async def gone(self) -> None:
        """Give up on this client; does not return."""
        self.hung_up()
        await trio.sleep_forever()

    def refuse(self, error: ApiError) -> None:
        """Answer a connection that is not served, without reading from it, and close it."""
        self.keep_alive = False
        with contextlib.suppress(OSError):
            self.sock.send(self._error(error, self._door.ids.next(), b""))
        self.sock.close()

    def hung_up(self, _events: int = 0) -> None:
        """Be told that the client is gone, or as good as gone: cancel what is done for it and close the connection."""
        self._door.hub.forget(self.sock.fileno())
        self._scope.cancel()

    def leave_socket(self) -> None:
        """Break the connection, but leave the socket open for somebody who may still write to it, and who has it."""
        self._owns_socket = False
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def is_asking(self) -> bool:
        """Say whether the client has sent something that was not read yet."""
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    async def respond(self, request: Request, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole response of our own making."""
        await self.send_all(self._response(request.id, request.method, status, headers, body))

    def _response(self, request_id: bytes, method: bytes, status: int, headers: Headers, body: bytes) -> bytes:
        if self._door.draining:
            self.keep_alive = False
        head = [date_header(), *headers, (b"content-length", b"%d" % len(body)), (b"x-request-id", request_id)]
        if not self.keep_alive:
            head.append((b"connection", b"close"))
        return response_head(status, head) + (b"" if method == b"HEAD" else body)

    def _error(self, error: ApiError, request_id: bytes, method: bytes) -> bytes:
        headers = [*error.headers(), (b"x-ichat-error", self._door.role)]
        return self._response(request_id, method, error.status, headers, error.body())

    async def run(self) -> None:
        """Serve this connection until it ends, and close it."""
        door = self._door
        fd = self.sock.fileno()
        door.hub.watch(fd, HANG_UP, self.hung_up)
        try:
            with self._scope:
                while self.keep_alive and not door.draining:
                    try:
                        request = await self._read_request()
                    except ApiError as error:
                        self.keep_alive = False
                        await self.send_all(self._error(error, door.ids.next(), b""))
                        await self._linger()
                        break
                    if request is None:
                        break
                    await self._answer(request)
        finally:
            door.hub.forget(fd)
            if self._owns_socket:
                self.sock.close()

    async def _answer(self, request: Request) -> None:
        """Have one request answered: the edge where every failure becomes a response."""
        self.head_sent = False
        if self._door.draining:
            self.keep_alive = False
        try:
            await self._door.answer(request, self)
        except ApiError as error:
            failure = error
        except Exception:
            log.exception("a bug answering %s %s (%s)", request.method, request.path, request.id)
            failure = errors.internal_error()
        else:
            return
        if self.head_sent:
            self.keep_alive = False
        else:
            await self.send_all(self._error(failure, request.id, request.method))

    async def _read_request(self) -> Request | None:
        """Read the next request whole; None where the client has none. Raises ApiError (408, 413, 431, 400)."""
        door = self._door
        limits = door.limits
        self.idle = True
        parser = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes_max)
        if self._leftover:
            await trio.lowlevel.checkpoint()
            parser.receive_data(self._leftover)
        else:
            data = await self._receive(door.timeouts.keep_alive_s)
            if not data:
                return None
            parser.receive_data(data)
        self.idle = False
        deadline = trio.current_time() + door.timeouts.head_s
        body = bytearray()
        pieces = 0
        head: h11.Request | None = None
        while True:
            try:
                event = parser.next_event()
            except h11.RemoteProtocolError as error:
                raise self._refusal(error) from error
            if event is h11.NEED_DATA:
                if parser.they_are_waiting_for_100_continue:
                    await self._continue(parser)
                data = await self._receive(deadline - trio.current_time())
                if data is None:
                    raise errors.request_timeout()
                if not data:
                    return None
                parser.receive_data(data)
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > limits.body_bytes_max:
                    raise errors.request_too_large(limits.body_bytes_max)
                pieces += 1
                if pieces % PIECES_MAX == 0:
                    await trio.lowlevel.checkpoint()
            elif isinstance(event, h11.Request):
                head = event
                deadline = trio.current_time() + door.timeouts.body_s
                self._check_framing(event)
            elif isinstance(event, h11.EndOfMessage):
                break
            else:
                return None
        assert head is not None
        self._leftover = parser.trailing_data[0]
        return self._request(head, bytes(body))

    def _check_framing(self, head: h11.Request) -> None:
        """Refuse a body that is known to be too large, and one whose length could be read in two ways."""
        names = [name for name, _ in head.headers]
        if b"content-length" in names:
            if b"transfer-encoding" in names:
                raise errors.bad_request("A request has either Content-Length or Transfer-Encoding, not both.")
            if int(dict(head.headers)[b"content-length"]) > self._door.limits.body_bytes_max:
                raise errors.request_too_large(self._door.limits.body_bytes_max)

    def _request(self, head: h11.Request, body: bytes) -> Request:
        if head.http_version not in (b"1.1", b"1.0"):
            raise errors.bad_request(f"HTTP/{head.http_version.decode()} is not spoken here, only HTTP/1.1 is.")
        headers = list(head.headers)
        request_id = b""
        self.keep_alive = head.http_version == b"1.1"
        for name, value in headers:
            if name == b"x-request-id":
                request_id = value
            elif name == b"connection" and b"close" in value.lower():
                self.keep_alive = False
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = self._door.ids.next()
        target = head.target
        if not target.startswith(b"/"):
            raise errors.bad_request("The request target must be a path that begins with '/'.")
        return Request(
            method=head.method,
            target=target,
            path=target.partition(b"?")[0],
            version=head.http_version,
            headers=headers,
            body=body,
            id=request_id,
        )

    async def _receive(self, wait_s: float) -> bytes | None:
        """Receive some bytes: empty at the end of the stream, None when nothing came in time."""
        deadline = trio.current_time() + wait_s
        waited = False
        while True:
            try:
                data = self.sock.recv(RECV_BYTES)
            except BlockingIOError:
                with trio.move_on_at(deadline) as scope:
                    await trio.lowlevel.wait_readable(self.sock)
                if scope.cancelled_caught:
                    return None
                waited = True
            except OSError:
                return b""
            else:
                if not waited:
                    await trio.lowlevel.checkpoint()
                return data

    async def _linger(self) -> None:
        """Read and forget what the client still sends, for a while: closing at once would reset the response away."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
        deadline = trio.current_time() + LINGER_S
        for _ in range(LINGER_RECVS_MAX):
            if not await self._receive(deadline - trio.current_time()):
                break

    async def _continue(self, parser: h11.Connection) -> None:
        event = h11.InformationalResponse(status_code=100, headers=[])
        await self.send_all(parser.send(event) or b"")

    def _refusal(self, error: h11.RemoteProtocolError) -> ApiError:
        if error.error_status_hint == 431:
            return errors.head_too_large(self._door.limits.head_bytes_max)
        return errors.bad_request(f"This is not valid HTTP/1.1: {error}.")


@attrs.define(eq=False)
class FrontDoor:
    """Everything that the connections of one port share."""

    role: bytes
    """`gateway` or `worker`: who made an error, sent as `x-ichat-error`."""
    answer: Answer
    hub: Hub
    limits: Limits
    timeouts: Timeouts
    draining: bool = False
    _accepting: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _empty: trio.Event = attrs.field(factory=trio.Event)
    _waiting: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    clients: set[Client] = attrs.field(factory=set["Client"])
    ids: _RequestIds = attrs.field(factory=_RequestIds)

    def __repr__(self) -> str:
        return f"<FrontDoor {len(self.clients)} connections{' draining' if self.draining else ''}>"

    async def serve_forever(self, listeners: list[socket.socket]) -> None:
        """Accept and serve until cancelled, which cuts every exchange; ``drain`` first. Closes the listeners."""
        try:
            async with trio.open_nursery() as connections:
                with self._accepting:
                    async with trio.open_nursery() as accepting:
                        for listener in listeners:
                            accepting.start_soon(self._accept_forever, listener, connections)
                _close(listeners)
        finally:
            _close(listeners)

    async def drain(self) -> None:
        """Stop accepting, close idle connections, and wait for every exchange to end, up to `timeouts.drain_s`."""
        self.draining = True
        self._accepting.cancel()
        for client in list(self.clients):
            if client.idle and not client.is_asking():
                client.hung_up()
        self._waiting.deadline = trio.current_time() + self.timeouts.drain_s
        with self._waiting:
            if self.clients:
                await self._empty.wait()
        if self._waiting.cancelled_caught:
            log.warning("%d exchanges are cut: they did not end within %g s", len(self.clients), self.timeouts.drain_s)

    def hurry(self) -> None:
        """Cut short a drain that is under way or to come."""
        self._waiting.cancel()

    async def _accept_forever(self, listener: socket.socket, connections: trio.Nursery) -> None:
        while True:
            await trio.lowlevel.wait_readable(listener)
            for _ in range(ACCEPT_MAX):
                try:
                    sock, address = listener.accept()
                except BlockingIOError:
                    break
                except OSError as error:
                    log.error("cannot accept: %s", error)
                    await trio.sleep(ACCEPT_RETRY_S)
                    break
                self._admit(sock, address, connections)

    def _admit(self, sock: socket.socket, address: object, connections: trio.Nursery) -> None:
        sock.setblocking(False)
        if sock.family in _FAMILIES:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "unix"
        client = Client(self, sock, peer)
        if len(self.clients) >= self.limits.connections_max:
            client.refuse(errors.too_many_connections())
            return
        self.clients.add(client)
        connections.start_soon(self._run, client)

    async def _run(self, client: Client) -> None:
        try:
            await client.run()
        except Exception:
            log.exception("a bug serving %r; its connection is closed, all others go on", client)
        finally:
            self.clients.discard(client)
            if self.draining and not self.clients:
                self._empty.set()


async def open_listeners(host: str, port: int) -> list[socket.socket]:
    """Listen on every address of the host (all interfaces for "" and "0.0.0.0" or "::"); port 0 takes a free one.

    Raises Exit 69 where an address cannot be bound.
    """
    listeners: list[socket.socket] = []
    try:
        found = await trio.socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE, proto=socket.IPPROTO_TCP
        )
        for family, kind, protocol, _, address in found:
            number = port_of(listeners) if listeners else port
            sock = socket.socket(family, kind, protocol)
            listeners.append(sock)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6 and len(found) > 1:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((address[0], number, *address[2:]))
            sock.listen(BACKLOG)
    except OSError as error:
        _close(listeners)
        why = error.strerror or str(error)
        raise Exit(EXIT_UNAVAILABLE, f"Cannot listen on {host}:{port}: {why}; choose another host or port.") from error
    return listeners


def _close(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def port_of(listeners: list[socket.socket]) -> int:
    """Give the port that these listeners were bound to."""
    return listeners[0].getsockname()[1]
