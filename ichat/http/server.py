"""The front door: accept, read one request, have it answered, keep the connection for the next.

Requests are read by h11, whose strictness is the protection against smuggling: what it lets through can be read in
one way only. Responses are written by whoever answers (the relay, the engine's thread, or `Client.respond`), straight
to the socket. One task per connection; one cancel scope per connection, so a client that hangs up cancels whatever is
done for it, in every phase.
"""

import contextlib
import enum
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable

import attrs
import trio

from ichat import errors
from ichat.config.schema import Limits, Timeouts
from ichat.errors import ApiError
from ichat.http.heads import Headers, RequestHead, date_header, response_head
from ichat.http.hub import HANG_UP, Hub
from ichat.http.listeners import close_all
from ichat.http.request import Request, RequestIds, RequestReader
from ichat.http.tls import CLOSE_S, RESET, Bridge, make_bridge
from ichat.protocol import CODE_HEADER, ERROR_HEADER, WHY_HEADER

log = logging.getLogger(__name__)

NO_CONTENT = 204
"""A response of this status has no length either (RFC 9110, section 8.6)."""
ACCEPT_RETRY_S = 0.1
ACCEPT_MAX = 64
"""Connections accepted before other tasks get their turn."""
LEFT_POLL_S = 0.02
LINGER_S = 1.0
LINGER_RECVS_MAX = 4096
_FAMILIES = {socket.AF_INET, socket.AF_INET6}


Answer = Callable[[Request, "Client"], Awaitable[None]]
"""Writes exactly one response to the client, or raises before it has written anything."""
Refused = Callable[[ApiError, bytes, str, RequestHead | None], None]
"""Is told of a refusal of what did not become a request: its id, the connection's address, the head if it was read."""


class Ending(enum.Enum):
    """What becomes of a client's connection after the current response; whoever answers may only make it worse."""

    KEEP = "keep"
    """It may carry another request."""
    CLOSE = "close"
    RESET = "reset"
    """It ends in an error: the client would take an end in good order for the end of the response."""


class Client:
    """A client's connection."""

    __slots__ = (
        "_door",
        "_ending",
        "_head",
        "_head_sent",
        "_owns_socket",
        "_reader",
        "_scope",
        "blocks_drain",
        "caller",
        "has_left",
        "peer",
        "sock",
    )  # fmt: skip

    def __init__(self, door: "FrontDoor", sock: socket.socket, peer: str) -> None:
        self._door = door
        self._scope = trio.CancelScope()
        self._reader = RequestReader(sock, door, door.ids, self.send_all, self._authenticate)
        self._head: RequestHead | None = None
        self._owns_socket = True
        self.sock = sock
        self.peer = peer
        self.caller: object = None
        """Who sent the current request, as the role's `look` has found."""
        self._ending = Ending.KEEP
        self._head_sent = False
        self.has_left = False
        self.blocks_drain = True
        """Whether a drain waits for the current exchange; see `stand_aside`."""

    def __repr__(self) -> str:
        return f"<Client {self.peer}{' idle' if self.idle else ''}>"

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
        """Send what the socket takes at once, and return its length: 0 for a client that is gone, which is noted."""
        self._head_sent = True
        try:
            return self.sock.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self.on_disconnect()
            return 0

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send everything; a client that takes nothing for `timeouts.client_stall_s` counts as gone (cancelled)."""
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

    async def abandon(self) -> None:
        """Give up on this client; does not return."""
        self.on_disconnect()
        await trio.sleep_forever()

    def refuse(self, error: ApiError, *, encrypted: bool) -> None:
        """Answer a connection that is not served, without reading from it, and close it."""
        request_id = self._door.ids.next()
        self._door.refused(error, request_id, self.peer, None)
        self.close_after_response()
        if not encrypted:
            with contextlib.suppress(OSError):
                self.sock.send(self._error(error, request_id, b""))
        self.sock.close()

    def on_disconnect(self, _events: int = 0) -> None:
        """Be told that the client is gone, or as good as gone: cancel what is done for it and close the connection."""
        self.has_left = True
        self._door.hub.forget(self.sock.fileno())
        self._scope.cancel()

    def exempt_from_drain(self) -> None:
        """Let no drain wait for the current exchange: it goes on for as long as this process does, as a log does."""
        self.blocks_drain = False
        self._door.check_drained()

    def leave_socket(self) -> None:
        """Break the connection, but leave the socket open for somebody who may still write to it, and who has it."""
        self._owns_socket = False
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    @property
    def idle(self) -> bool:
        """Whether it waits for the first byte of a request."""
        return self._reader.idle

    def is_asking(self) -> bool:
        """Say whether the client has sent something that was not received yet."""
        return self._reader.is_asking()

    async def respond(self, request: Request, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole response of our own making."""
        await self.send_all(self._response(request.id, request.method, status, headers, body))

    def _response(self, request_id: bytes, method: bytes, status: int, headers: Headers, body: bytes) -> bytes:
        if self._door.draining:
            self.close_after_response()
        head = [date_header(), *headers]
        if status != NO_CONTENT:
            head.append((b"content-length", b"%d" % len(body)))
        head += [(b"x-request-id", request_id), *self.more_headers()]
        if not self.keep_alive:
            head.append((b"connection", b"close"))
        return response_head(status, head) + (b"" if method == b"HEAD" else body)

    def more_headers(self) -> Headers:
        """Return what the response to the current request has besides, whoever makes it, as the role says."""
        return [] if self._head is None else self._door.more_headers(self._head)

    def _error(self, error: ApiError, request_id: bytes, method: bytes) -> bytes:
        headers = [*error.headers(), (ERROR_HEADER, self._door.role)]
        if self._door.role == b"worker":
            code = error.code.encode()
            headers.append((CODE_HEADER, code))
            if code in errors.DECLINED:
                headers.append((WHY_HEADER, error.why()))
        return self._response(request_id, method, error.status, headers, error.body())

    async def run(self) -> None:
        """Serve this connection until it ends, and close it."""
        door = self._door
        fd = self.sock.fileno()
        door.hub.watch(fd, HANG_UP, self.on_disconnect)
        try:
            with self._scope:
                while self.keep_alive and not door.draining:
                    self._head = None
                    try:
                        request = await self._read()
                    except ApiError as error:
                        self.close_after_response()
                        request_id = self._id()
                        door.refused(error, request_id, self.peer, self._head)
                        await self.send_all(self._error(error, request_id, b""))
                        await self._linger()
                        return
                    if request is None:
                        return
                    if not request.keep_alive:
                        self.close_after_response()
                    await self._answer(request)
                if self._reader.has_more() and not self.must_reset:
                    await self._linger()
        finally:
            door.hub.forget(fd)
            if self._owns_socket:
                if self.must_reset:
                    self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                self.sock.close()

    async def _read(self) -> Request | None:
        """Read the next request, and note where the client leaves in the middle of it. Raises ApiError."""
        try:
            request = await self._reader.read()
        except trio.Cancelled:
            if self.has_left:
                self._note_left()
            raise
        if request is None:
            self._note_left()
        return request

    def _note_left(self) -> None:
        if self._head is not None:
            self._door.refused(errors.client_left(), self._id(), self.peer, self._head)

    def _id(self) -> bytes:
        """Give the id of what is refused before it is a request: its own, if the head was read and has one."""
        return self._door.ids.of(self._head.headers if self._head is not None else [])

    def _authenticate(self, head: RequestHead) -> None:
        self._head = head
        self.caller = self._door.look(head, self.peer)

    async def _answer(self, request: Request) -> None:
        """Have one request answered: the edge where every failure becomes a response."""
        self._head_sent = False
        if self._door.draining:
            self.close_after_response()
        try:
            await self._door.answer(request, self)
        except ApiError as error:
            failure = error
        except Exception:
            log.exception("a bug answering %s %s (%s)", request.method, request.path, request.id)
            failure = errors.internal_error()
        else:
            return
        finally:
            self.blocks_drain = True
        if self._head_sent:
            self.close_after_response()
        else:
            await self.send_all(self._error(failure, request.id, request.method))

    async def _linger(self) -> None:
        """Read and forget what the client still sends, for a while: closing at once would reset the response away."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
        deadline = trio.current_time() + LINGER_S
        for _ in range(LINGER_RECVS_MAX):
            if not await self._reader.receive(deadline):
                break


def _ignore(_error: ApiError, _id: bytes, _peer: str, _head: RequestHead | None) -> None:
    """Let a refusal be known to its client only."""


def _let_in(_head: RequestHead, _peer: str) -> object:
    """Let everybody in, whoever it is."""
    return None


def _no_headers(_head: RequestHead) -> Headers:
    """Add nothing to any response."""
    return []


@attrs.define(eq=False)
class FrontDoor:
    """Everything that the connections of one port share."""

    role: bytes
    """`gateway` or `worker`: who made an error, sent as `x-ichat-error`."""
    answer: Answer
    hub: Hub
    limits: Limits
    timeouts: Timeouts
    tls: ssl.SSLContext | None = None
    refused: Refused = _ignore
    look: Callable[[RequestHead, str], object] = _let_in
    """Says who sends a request, by its head and the connection's address, or raises ApiError: its body is not read."""
    more_headers: Callable[[RequestHead], Headers] = _no_headers
    """Gives what the response to a request with this head has besides."""
    is_proxy: Callable[[str], bool] = bool
    """Whether a connection comes from somebody who has those of many others."""
    draining: bool = False
    _handshakes: int = 0
    _by_address: dict[str, int] = attrs.field(factory=dict[str, int])
    _accepting: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _empty: trio.Event = attrs.field(factory=trio.Event)
    _waiting: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    clients: set[Client] = attrs.field(factory=set["Client"])
    ids: RequestIds = attrs.field(factory=RequestIds)

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
                close_all(listeners)
        finally:
            close_all(listeners)

    async def drain(self) -> None:
        """Stop accepting, close idle connections, and wait for every exchange to end, up to `timeouts.drain_s`.

        Those that stand aside are neither waited for nor cut; they end with `serve_forever` at the latest.
        """
        self.draining = True
        self._accepting.cancel()
        for client in list(self.clients):
            if client.idle and not client.is_asking():
                client.on_disconnect()
        self._waiting.deadline = trio.current_time() + self.timeouts.drain_s
        with self._waiting:
            self.check_drained()
            await self._empty.wait()
        if self._waiting.cancelled_caught:
            left = sum(client.blocks_drain for client in self.clients)
            log.warning("%d exchanges are cut: they did not end in time", left)

    async def wait_until_left(self, wait_s: float) -> None:
        """Wait for those too that stand aside, for so long."""
        with trio.move_on_after(wait_s):
            while True:
                if not self.clients:
                    break
                await trio.sleep(LEFT_POLL_S)

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
        refusal = self._refusal(peer)
        if refusal is not None:
            Client(self, sock, peer).refuse(refusal, encrypted=self.tls is not None)
            return
        host = peer.rpartition(":")[0]
        self._by_address[host] = self._by_address.get(host, 0) + 1
        if self.tls is not None:
            self._handshakes += 1
            connections.start_soon(self._run_encrypted, sock, peer, self.tls)
        else:
            client = Client(self, sock, peer)
            self.clients.add(client)
            connections.start_soon(self._run, client)

    def _refusal(self, peer: str) -> ApiError | None:
        """Say why one more connection from there is too many, if it is."""
        limits = self.limits
        if len(self.clients) + self._handshakes >= limits.connections_max:
            return errors.too_many_connections()
        host = peer.rpartition(":")[0]
        if self._by_address.get(host, 0) >= limits.connections_per_address_max and not self.is_proxy(peer):
            return errors.too_many_connections_of(host or peer, limits.connections_per_address_max)
        return None

    def _gone(self, peer: str) -> None:
        host = peer.rpartition(":")[0]
        self._by_address[host] -= 1
        if not self._by_address[host]:
            del self._by_address[host]

    async def _run(self, client: Client) -> None:
        try:
            await self._serve(client)
        finally:
            self._forget(client)
            self._gone(client.peer)

    async def _run_encrypted(self, sock: socket.socket, peer: str, context: ssl.SSLContext) -> None:
        try:
            await self._encrypt(sock, peer, context)
        finally:
            self._gone(peer)

    async def _encrypt(self, sock: socket.socket, peer: str, context: ssl.SSLContext) -> None:
        try:
            with trio.fail_after(self.timeouts.head_s):
                bridge = await make_bridge(sock, context, server_hostname=None, tolerant=True)
        except (OSError, trio.TooSlowError) as error:
            log.debug("%s: %s", peer, error)
            return
        finally:
            self._handshakes -= 1
        client = Client(self, bridge.plain, peer)
        self.clients.add(client)
        fd = sock.fileno()
        try:
            self.hub.watch(fd, HANG_UP, client.on_disconnect)
            await self._cross(bridge, client)
        except Exception:
            log.exception("a bug serving %r; its connection is closed, all others go on", client)
        finally:
            self.hub.forget(fd)
            if client.must_reset:
                bridge.abort()
            with trio.move_on_after(CLOSE_S, shield=True):
                await bridge.aclose()
            self._forget(client)

    async def _cross(self, bridge: Bridge, client: Client) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bridge.run)
            await self._serve(client)
            if client.must_reset:
                nursery.cancel_scope.cancel()
            bridge.leave(CLOSE_S if client.has_left else self.timeouts.client_stall_s)

    async def _serve(self, client: Client) -> None:
        try:
            await client.run()
        except Exception:
            log.exception("a bug serving %r; its connection is closed, all others go on", client)

    def _forget(self, client: Client) -> None:
        self.clients.discard(client)
        self.check_drained()

    def check_drained(self) -> None:
        """Look whether a drain has anything left to wait for."""
        if self.draining and not any(client.blocks_drain for client in self.clients):
            self._empty.set()
