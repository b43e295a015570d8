"""The front door: accept connections, read their requests, have each answered.

Requests are read strictly, as a protection against smuggling: an accepted request has a single reading
(`request.py`). There is a task and a cancel scope for each connection, so a client that hangs up cancels its
request in every phase.
"""

import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import attrs
import trio

from ichat import errors
from ichat.config.schema import Config, Limits, Timeouts
from ichat.errors import ApiError
from ichat.http import h11_patch
from ichat.http.accept_turns import AcceptTurns, Peers, Shedding
from ichat.http.heads import Headers, RequestHead
from ichat.http.hub import HANG_UP, READABLE, Hub
from ichat.http.leaving import Retirement, close_bridge, end_connection, linger
from ichat.http.parties import ConnectionCounts
from ichat.http.request import Request
from ichat.http.request_ids import REQUEST_ID, RequestIds
from ichat.http.server import Client
from ichat.http.tls import CLOSE_S, Bridge, make_bridge

log = logging.getLogger(__name__)

END_S = 6.0
"""How long exchanges may last after `Retirement.overdue`: it may send each client a last event."""

Caller = TypeVar("Caller")
"""The role's facts about the client that sent a request."""
Refused = Callable[[ApiError, bytes, str, RequestHead | None], None]
"""Called when the received bytes were no request: with the id, the peer's address, and the head if it was read."""


Answer = Callable[[Request, Client, Caller], Awaitable[None]]


def _ignore(_error: ApiError, _id: bytes, _peer: str, _head: RequestHead | None) -> None:
    """Report an error to the client only."""


async def _admit_all(_head: RequestHead, _client: Client) -> None:
    """Let every body be read."""


def _no_headers(_head: RequestHead) -> Headers:
    """Add nothing to any response."""
    return []


@attrs.define(eq=False)
class FrontDoor(Generic[Caller]):
    """Everything that the connections of a port share."""

    role: bytes
    """`gateway` or `worker`: sent with errors, as `x-ichat-error`."""
    answer: Answer[Caller]
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
    admit: Callable[[RequestHead, Client], Awaitable[None]] = _admit_all
    """Called before a body is read that has not been received yet. Raises ApiError: then it is not read."""
    peer_of: Callable[[RequestHead, str], str] | None = None
    """Returns the peer that a request is from, if its connection carries the requests of many."""
    is_proxy: Callable[[str], bool] = bool
    """Whether a peer brings the connections of many clients, so that it may have many."""
    draining: bool = False
    retirement: Retirement | None = None
    """Set by `retire`."""
    ends_connection: Callable[[], bool] | None = None
    """Returns whether the next response ends its connection; None: no response does so for the door's sake."""
    counts: ConnectionCounts = attrs.field(factory=ConnectionCounts)
    _accepting: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _drained: trio.Event = attrs.field(factory=trio.Event)
    _drain_wait: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _retire_wait: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    clients: set[Client] = attrs.field(factory=set["Client"])
    ids: RequestIds = attrs.field(factory=RequestIds)
    turns: AcceptTurns = attrs.field(init=False)
    """How it accepts from listeners that other processes may accept from too."""
    _shedding: Shedding = attrs.field(init=False)
    _connections: trio.Nursery = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.turns = AcceptTurns(self.hub, self._accepted, self.counts)
        self._shedding = Shedding()

    def __repr__(self) -> str:
        state = " draining" if self.draining else " retiring" if self.retirement is not None else ""
        return f"<FrontDoor {len(self.clients)} connections{state}>"

    def reconfigure(self, config: Config) -> None:
        """Apply the bounds of another configuration from now on."""
        self.use_settings(config.limits, config.timeouts)

    def use_settings(self, limits: Limits, timeouts: Timeouts) -> None:
        """Apply these bounds from now on."""
        self.limits = limits
        self.timeouts = timeouts if self.retirement is None else self.retirement.bound(timeouts)

    def use_answers(self, answer: Answer[Caller], authenticate: Callable[[RequestHead, str], Caller]) -> None:
        """Have later requests answered, and their senders identified, by other functions."""
        self.answer, self.authenticate = answer, authenticate

    def use_certificate(self, tls: ssl.SSLContext | None) -> None:
        """Encrypt new connections by this from now on; None: not at all."""
        self.tls = tls

    def see_peers(self, peers: Peers, requests: int, connections: int) -> None:
        """Compare these figures with those of the processes that accept from the same listeners, once a second."""
        self.turns.see(peers)
        self._shedding.see(requests, connections, peers)
        if self.retirement is None:
            self.ends_connection = self._shedding.sheds_next if self._shedding.left else None

    async def serve_forever(self, listeners: list[socket.socket]) -> None:
        """Accept and serve until cancelled, which cuts every exchange; ``drain`` first. Closes the listeners."""
        h11_patch.apply()
        async with trio.open_nursery() as self._connections:
            with self._accepting:
                await self.turns.run_forever(listeners)

    async def drain(self) -> None:
        """Stop accepting, close idle connections, and wait for every exchange to end, up to `timeouts.drain_s`.

        Exempt exchanges are neither waited for nor cut; they end with `serve_forever` at the latest.
        """
        self.draining = True
        self.turns.stop()
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

    async def retire(self, retirement: Retirement) -> None:
        """Leave new connections to other processes, end all connections in good order, and return when they have ended.

        Each further request on a kept connection is answered, with `connection: close`. Exempt exchanges are waited
        for too: the caller ends them.
        """
        self.retirement = retirement
        self.turns.retire()
        self._accepting.cancel()
        self.ends_connection = end_connection
        self.timeouts = retirement.bound(self.timeouts)
        retirement.bound_idle(self.clients)
        self._retire_wait.deadline = trio.current_time() + retirement.total_s
        with self._retire_wait:
            await self.counts.wait_until_none()
        if self.counts.total:
            log.warning("%d connections are cut: they did not end in time", len(self.clients))
            retirement.overdue()
            with trio.move_on_after(END_S):
                await self.counts.wait_until_none()
            for client in list(self.clients):
                client.cut()

    async def wait_until_left(self, wait_s: float) -> None:
        """Wait for the end of exempt exchanges too, at most `wait_s`."""
        with trio.move_on_after(wait_s):
            while self.clients:
                await self.counts.wait_for_end()

    def hurry(self) -> None:
        """Cut short a drain or a retirement that is under way or will follow."""
        self._drain_wait.cancel()
        self._retire_wait.cancel()

    def check_drained(self) -> None:
        """End the drain, if the server drains, unless it has an exchange to wait for."""
        if self.draining and not any(client.blocks_drain for client in self.clients):
            self._drained.set()

    # A connection: accepted, bounded, encrypted, served, forgotten.

    def _accepted(self, sock: socket.socket, address: object) -> None:
        try:
            self._admit(sock, address)
        except Exception:
            log.exception("a bug accepting from %r; this connection is closed, all others go on", address)
            sock.close()

    def _admit(self, sock: socket.socket, address: object) -> None:
        sock.setblocking(False)
        peer = "unix"
        if isinstance(address, tuple):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = f"{address[0]}:{address[1]}"
        refusal = None if self.peer_of else self.counts.refusal(peer, self.limits, self.is_proxy)
        if refusal is not None:
            _turn_away(self, Client(self, sock, peer), refusal)
            return
        self.counts.begin(peer)
        if self.tls is not None:
            self._connections.start_soon(self._run_encrypted, sock, peer, self.tls)
        else:
            client = Client(self, sock, peer)
            self.clients.add(client)
            self._connections.start_soon(self._run, client, peer)

    async def _run(self, client: Client, peer: str) -> None:
        try:
            await self._serve(client, client.sock)
        finally:
            self._forget(client)
            self._uncount(peer)

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
        client = Client(self, bridge.plain, peer)
        self.clients.add(client)
        fd = sock.fileno()
        try:
            self.hub.watch(fd, HANG_UP, client.on_disconnect)
            await _cross(self, bridge, client, sock)
        except Exception:
            log.exception("a bug serving %r; its connection is closed, all others go on", client)
        finally:
            self.hub.forget(fd)
            if client.must_reset:
                bridge.abort()
            try:
                await close_bridge(bridge, sock, self._parting_from(client))  # noqa: ASYNC102 it has bounds
            finally:
                self._forget(client)

    async def _serve(self, client: Client, wire: socket.socket) -> None:
        """Serve a connection until it ends, and close it. `wire` is the socket to the client, before any TLS."""
        fd = client.sock.fileno()
        try:
            self.hub.watch(fd, READABLE, client.on_events)
            with client.scope:
                await self._serve_requests(client)
                while self.retirement is not None and client.keep_alive and client.reader.is_asking():
                    await self._serve_requests(client)  # a request arrived just when the connection had been idle
            if client.sock is wire and (retirement := self._parting_from(client)) is not None:
                self.hub.forget(fd)
                await retirement.part(wire)
        except Exception:
            log.exception("a bug serving %r; its connection is closed, all others go on", client)
        finally:
            self.hub.forget(fd)
            self.hub.untime(client.reader)
            client.close()

    def _parting_from(self, client: Client) -> Retirement | None:
        """Return how its connection ends while the door retires; None for a connection that is simply closed."""
        return None if client.must_reset or client.has_left else self.retirement

    def _forget(self, client: Client) -> None:
        self.clients.discard(client)
        del client.reader  # it refers to the client, and the garbage collector must have nothing to do
        self.check_drained()

    def _uncount(self, peer: str) -> None:
        self.counts.end(peer)
        self.turns.update()
        if self.ends_connection is not None:
            self.turns.give_way()

    # The requests of a connection.

    async def _serve_requests(self, client: Client) -> None:
        reader = client.reader
        while client.keep_alive and (not self.draining or reader.has_received()):
            client.begin_request()
            try:
                head = client.head = await reader.read_head()
                if head is None:
                    return
                if self.peer_of is not None:
                    client.peer = self.peer_of(head, client.peer)
                caller = self.authenticate(head, client.peer)
                request = reader.take_request(head)
                if request is None:
                    await self.admit(head, client)
                    request = await reader.read_body(head)
            except ApiError as error:
                await _refuse(self, client, error)
                return
            except trio.Cancelled:
                _note_cut(self, client)
                raise
            if request is None:
                self._note_refused(client, errors.client_left())
                return
            if not request.keep_alive:
                client.close_after_response()
            del head  # the response may last an hour, and the client frees it
            await self._answer(request, client, caller)
        if reader.has_more() and not client.must_reset:
            await linger(client)

    def _note_refused(self, client: Client, error: ApiError) -> bytes:
        """Report that the client sent no valid request, and return the id: the client's own, if it has sent an id."""
        request_id, _ = self.ids.of(client.head.by_name if client.head is not None else {})
        self.refused(error, request_id, client.peer, client.head)
        return request_id

    async def _answer(self, request: Request, client: Client, caller: Caller) -> None:
        """Have a request answered: the edge where every failure becomes a response."""
        client.begin_exchange(request)
        if self.ends_connection is not None and self.ends_connection() and not client.reader.has_more():
            client.close_after_response()
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
            request = client.request or request  # the answer may have begun a later request, too
            await client.send_all(client.error_response(failure, request.id, request.method, request.path))


def _turn_away(door: FrontDoor[Any], client: Client, error: ApiError) -> None:
    """Send the error, where that needs no handshake, without reading from the connection, and close it."""
    request_id = door.ids.next()
    door.refused(error, request_id, client.peer, None)
    client.close_after_response()
    if door.tls is None:
        client.send_some(client.error_response(error, request_id))
    client.close()


async def _cross(door: FrontDoor[Any], bridge: Bridge, client: Client, wire: socket.socket) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bridge.run)
        await door._serve(client, wire)
        if client.must_reset:
            nursery.cancel_scope.cancel()
        bridge.finish(CLOSE_S if client.has_left else door.timeouts.client_stall_s)


async def _refuse(door: FrontDoor[Any], client: Client, error: ApiError) -> None:
    """Send an error for bytes that were no valid request; the connection ends."""
    client.close_after_response()
    path = client.head.path if client.head is not None else b""
    await client.send_all(client.error_response(error, door._note_refused(client, error), path=path))
    await linger(client)


def _note_cut(door: FrontDoor[Any], client: Client) -> None:
    """Report a client that has left in the middle of a request."""
    if client.has_left and client.head is not None:
        door._note_refused(client, errors.client_left())
