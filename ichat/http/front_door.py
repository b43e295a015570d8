"""The front door: accept connections, read their requests, have each answered.

Requests are read strictly, as a protection against smuggling: an accepted request has a single reading
(`request.py`). There is a task and a cancel scope for each connection, so a client that hangs up cancels its
request in every phase.
"""

import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import attrs
import trio

from ichat import errors
from ichat.config.schema import Config, Limits, Timeouts
from ichat.errors import ApiError
from ichat.http import h11_patch
from ichat.http.heads import Headers, RequestHead
from ichat.http.hub import HANG_UP, READABLE, Hub
from ichat.http.listeners import close_all
from ichat.http.parties import party_of
from ichat.http.request import Request
from ichat.http.request_ids import REQUEST_ID, RequestIds
from ichat.http.server import Client
from ichat.http.tls import CLOSE_S, Bridge, make_bridge
from ichat.listeners import Listeners

log = logging.getLogger(__name__)

ACCEPT_RETRY_S = 0.1
ACCEPT_MAX = 16
"""Accept at most this many connections before other tasks run. Each brings a request.
With 64, a burst of new clients delayed all streams and first bytes by 64 requests."""
LINGER_S = 1.0
LINGER_RECVS_MAX = 4096

Caller = TypeVar("Caller")
"""The role's facts about the client that sent a request."""
Refused = Callable[[ApiError, bytes, str, RequestHead | None], None]
"""Called when the received bytes were no request: with the id, the peer's address, and the head if it was read."""


def _ignore(_error: ApiError, _id: bytes, _peer: str, _head: RequestHead | None) -> None:
    """Report an error to the client only."""


def _no_headers(_head: RequestHead) -> Headers:
    """Add nothing to any response."""
    return []


@attrs.define(eq=False)
class FrontDoor(Generic[Caller]):
    """Everything that the connections of a port share."""

    role: bytes
    """`gateway` or `worker`: sent with errors, as `x-ichat-error`."""
    answer: Callable[[Request, Client, Caller], Awaitable[None]]
    """Writes a single response to the client, or raises before it has written anything."""
    authenticate: Callable[[RequestHead, str], Caller]
    """Returns the caller by the request's head and the peer's address. Raises ApiError: then no body is read."""
    hub: Hub
    limits: Limits
    timeouts: Timeouts
    tls: ssl.SSLContext | None = None
    refused: Refused = _ignore
    more_headers: Callable[[RequestHead], Headers] = _no_headers
    """Returns the headers that every response to a request with this head gets."""
    is_proxy: Callable[[str], bool] = bool
    """Whether a peer brings the connections of many clients, so that it may have many."""
    draining: bool = False
    _handshakes: int = 0
    _by_address: dict[str, int] = attrs.field(factory=dict[str, int])
    """How many connections each party has; see `parties.py`."""
    _accepting: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _drained: trio.Event = attrs.field(factory=trio.Event)
    _drain_wait: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _one_left: Listeners[[]] = attrs.field(factory=Listeners[[]])
    clients: set[Client] = attrs.field(factory=set["Client"])
    ids: RequestIds = attrs.field(factory=RequestIds)

    def __repr__(self) -> str:
        return f"<FrontDoor {len(self.clients)} connections{' draining' if self.draining else ''}>"

    def reconfigure(self, config: Config) -> None:
        """Apply the bounds of another configuration from now on."""
        self.limits, self.timeouts = config.limits, config.timeouts

    def use_certificate(self, tls: ssl.SSLContext | None) -> None:
        """Encrypt new connections by this from now on; None: not at all."""
        self.tls = tls

    async def serve_forever(self, listeners: list[socket.socket]) -> None:
        """Accept and serve until cancelled, which cuts every exchange; ``drain`` first. Closes the listeners."""
        h11_patch.apply()
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

        Exempt exchanges are neither waited for nor cut; they end with `serve_forever` at the latest.
        """
        self.draining = True
        self._accepting.cancel()
        for client in list(self.clients):
            if client.idle and not client.reader.is_asking():
                client.on_disconnect()
        self._drain_wait.deadline = trio.current_time() + self.timeouts.drain_s
        with self._drain_wait:
            self.check_drained()
            await self._drained.wait()
        if self._drain_wait.cancelled_caught:
            left = sum(client.blocks_drain for client in self.clients)
            log.warning("%d exchanges are cut: they did not end in time", left)

    async def wait_until_left(self, wait_s: float) -> None:
        """Wait for the end of exempt exchanges too, at most `wait_s`."""
        with trio.move_on_after(wait_s):
            while self.clients:
                await self._one_left.wait()

    def hurry(self) -> None:
        """Cut short a drain that is under way or will follow."""
        self._drain_wait.cancel()

    def check_drained(self) -> None:
        """End the drain, if the server drains, unless it has an exchange to wait for."""
        if self.draining and not any(client.blocks_drain for client in self.clients):
            self._drained.set()

    # A connection: accepted, bounded, encrypted, served, forgotten.

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
        peer = "unix"
        if isinstance(address, tuple):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = f"{address[0]}:{address[1]}"
        refusal = self._refusal(peer)
        if refusal is not None:
            self._turn_away(Client(self, sock, peer), refusal)
            return
        party = _party_in(peer)
        self._by_address[party] = self._by_address.get(party, 0) + 1
        if self.tls is not None:
            self._handshakes += 1
            connections.start_soon(self._run_encrypted, sock, peer, self.tls)
        else:
            client = Client(self, sock, peer)
            self.clients.add(client)
            connections.start_soon(self._run, client)

    def _refusal(self, peer: str) -> ApiError | None:
        """Return the error for a connection beyond the limits; None for a connection within them."""
        limits = self.limits
        if len(self.clients) + self._handshakes >= limits.connections_max:
            return errors.too_many_connections()
        party = _party_in(peer)
        if self._by_address.get(party, 0) >= limits.connections_per_address_max and not self.is_proxy(peer):
            return errors.too_many_connections_of(party or peer, limits.connections_per_address_max)
        return None

    def _turn_away(self, client: Client, error: ApiError) -> None:
        """Send the error, where that needs no handshake, without reading from the connection, and close it."""
        request_id = self.ids.next()
        self.refused(error, request_id, client.peer, None)
        client.close_after_response()
        if self.tls is None:
            client.send_some(client.error_response(error, request_id))
        client.close()

    async def _run(self, client: Client) -> None:
        try:
            await self._serve(client)
        finally:
            self._forget(client)
            self._uncount(client.peer)

    async def _run_encrypted(self, sock: socket.socket, peer: str, context: ssl.SSLContext) -> None:
        try:
            await self._encrypt(sock, peer, context)
        finally:
            self._uncount(peer)

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
            bridge.finish(CLOSE_S if client.has_left else self.timeouts.client_stall_s)

    async def _serve(self, client: Client) -> None:
        """Serve a connection until it ends, and close it."""
        fd = client.sock.fileno()
        try:
            self.hub.watch(fd, READABLE, client.on_events)
            with client.scope:
                await self._serve_requests(client)
        except Exception:
            log.exception("a bug serving %r; its connection is closed, all others go on", client)
        finally:
            self.hub.forget(fd)
            self.hub.untime(client.reader)
            client.close()

    def _forget(self, client: Client) -> None:
        self.clients.discard(client)
        del client.reader  # it refers to the client, and the garbage collector must have nothing to do
        self._one_left()
        self.check_drained()

    def _uncount(self, peer: str) -> None:
        party = _party_in(peer)
        self._by_address[party] -= 1
        if not self._by_address[party]:
            del self._by_address[party]

    # The requests of a connection.

    async def _serve_requests(self, client: Client) -> None:
        reader = client.reader
        while client.keep_alive and (not self.draining or reader.has_received()):
            client.begin_request()
            try:
                head = client.head = await reader.read_head()
                if head is None:
                    return
                caller = self.authenticate(head, client.peer)
                request = reader.take_request(head) or await reader.read_body(head)
            except ApiError as error:
                client.close_after_response()
                path = client.head.path if client.head is not None else b""
                response = client.error_response(error, self._note_refused(client, error), path=path)
                await client.send_all(response)
                await _linger(client)
                return
            except trio.Cancelled:
                if client.has_left and client.head is not None:
                    self._note_refused(client, errors.client_left())
                raise
            if request is None:
                self._note_refused(client, errors.client_left())
                return
            if not request.keep_alive:
                client.close_after_response()
            del head  # the response may last an hour, and the client frees it
            await self._answer(request, client, caller)
        if reader.has_more() and not client.must_reset:
            await _linger(client)

    def _note_refused(self, client: Client, error: ApiError) -> bytes:
        """Report that the client sent no valid request, and return the id: the client's own, if it has sent an id."""
        request_id, _ = self.ids.of(client.head.by_name if client.head is not None else {})
        self.refused(error, request_id, client.peer, client.head)
        return request_id

    async def _answer(self, request: Request, client: Client, caller: Caller) -> None:
        """Have a request answered: the edge where every failure becomes a response."""
        client.begin_exchange()
        REQUEST_ID.set(request.id)
        try:
            await self.answer(request, client, caller)
        except ApiError as error:
            failure = error
        except Exception:
            log.exception("a bug answering %s %s (%s)", request.method, request.path, request.id)
            failure = errors.internal_error()
        else:
            return
        finally:
            client.blocks_drain = True
            REQUEST_ID.set(b"")
        if client.head_sent:
            client.close_after_response()
        else:
            await client.send_all(client.error_response(failure, request.id, request.method, request.path))


def _party_in(peer: str) -> str:
    """Return the party in ``address:port``; "" for a unix socket."""
    return party_of(peer.rpartition(":")[0])


async def _linger(client: Client) -> None:
    """Read and drop further bytes of the client, for a while: a close at once would reset the response away."""
    with contextlib.suppress(OSError):
        client.sock.shutdown(socket.SHUT_WR)
    deadline = trio.current_time() + LINGER_S
    for _ in range(LINGER_RECVS_MAX):
        if not await client.reader.receive(deadline):
            break
