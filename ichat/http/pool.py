"""Connections to upstreams, kept alive and used again."""

import contextlib
import errno
import socket
from typing import Any, Protocol

import attrs
import trio

from ichat import errors
from ichat.http.hub import READABLE, Hub

EXPIRE_EVERY_S = 5.0
CONNECT_RETRY_S = 0.01


@attrs.frozen
class Upstream:
    """Somewhere that requests can be sent to: a TCP port, or a unix socket."""

    name: str
    """What error messages call it."""
    host: str
    """A name or an address; the socket's path where `port` is 0."""
    port: int

    @property
    def authority(self) -> bytes:
        """The `Host` header for it."""
        if not self.port:
            return b"localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}".encode()


class Receiver(Protocol):
    """Whoever wants the bytes of an upstream connection at the moment."""

    def readable(self) -> None:
        """Be told that bytes, the end or an error can be read."""
        ...


class Connection:
    """One connection to an upstream, registered with the hub for as long as it is open."""

    def __init__(self, pool: "Pool", upstream: Upstream, sock: socket.socket) -> None:
        self._pool = pool
        self.upstream = upstream
        self.sock = sock
        self.receiver: Receiver | None = None
        self.used = False
        """Whether it has carried an exchange before."""
        self.idle_since = 0.0
        self._paused = True
        self.resume()

    def __repr__(self) -> str:
        return f"<Connection to {self.upstream.name}{' used' if self.used else ''}>"

    def _ready(self, _events: int) -> None:
        if self.receiver is not None:
            self.receiver.readable()
        else:
            self._pool.discard(self)

    def is_quiet(self) -> bool:
        """Say whether there is neither anything to read nor an end."""
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def pause(self) -> None:
        """Stop telling the receiver; the upstream is held back by its full socket."""
        self._paused = True
        self._pool.hub.forget(self.sock.fileno())

    def resume(self) -> None:
        """Tell the receiver again; harmless where it was not paused."""
        if self._paused:
            self._paused = False
            self._pool.hub.watch(self.sock.fileno(), READABLE, self._ready)


class Pool:
    """Idle connections by upstream, the newest first; an idle one that becomes readable is closed at once."""

    def __init__(self, hub: Hub, *, connect_s: float, idle_s: float) -> None:
        self.hub = hub
        self._connect_s = connect_s
        self._idle_s = idle_s
        self._idle: dict[Upstream, list[Connection]] = {}

    def __repr__(self) -> str:
        return f"<Pool {sum(map(len, self._idle.values()))} idle to {len(self._idle)} upstreams>"

    def take(self, upstream: Upstream) -> Connection | None:
        """Take an idle connection, if there is one that is young enough and has nothing to say unasked."""
        idle = self._idle.get(upstream)
        while idle:
            connection = idle.pop()
            if trio.current_time() - connection.idle_since < self._idle_s and connection.is_quiet():
                return connection
            self._close(connection)
        return None

    def give(self, connection: Connection) -> None:
        """Take back a connection whose exchange has ended cleanly."""
        connection.resume()
        connection.used = True
        connection.idle_since = trio.current_time()
        self._idle.setdefault(connection.upstream, []).append(connection)

    def discard(self, connection: Connection) -> None:
        """Close a connection, idle or in use."""
        idle = self._idle.get(connection.upstream)
        if idle and connection in idle:
            idle.remove(connection)
        self._close(connection)

    def close_idle(self) -> None:
        """Close every idle connection."""
        for idle in self._idle.values():
            while idle:
                self._close(idle.pop())

    def _close(self, connection: Connection) -> None:
        self.hub.forget(connection.sock.fileno())
        connection.sock.close()

    async def connect(self, upstream: Upstream) -> Connection:
        """Open a connection. Raises ApiError 502 with the reason where that fails or takes longer than `connect_s`."""
        try:
            with trio.fail_after(self._connect_s):
                sock = await self._open(upstream)
        except trio.TooSlowError as error:
            why = f"no connection to {upstream.host}:{upstream.port} within {self._connect_s:g} s"
            raise errors.upstream_unreachable(upstream.name, why) from error
        except OSError as error:
            raise errors.upstream_unreachable(upstream.name, error.strerror or str(error)) from error
        return Connection(self, upstream, sock)

    async def _open(self, upstream: Upstream) -> socket.socket:
        if not upstream.port:
            return await _connect(socket.AF_UNIX, upstream.host)
        found = await trio.socket.getaddrinfo(upstream.host, upstream.port, type=socket.SOCK_STREAM)
        failure: OSError | None = None
        for family, _, _, _, address in found:
            try:
                return await _connect(family, address)
            except OSError as error:
                failure = error
        raise failure or OSError(errno.EHOSTUNREACH, "no address")

    async def expire_forever(self) -> None:
        """Close idle connections as they get too old."""
        while True:
            await trio.sleep(EXPIRE_EVERY_S)
            oldest = trio.current_time() - self._idle_s
            for upstream, idle in list(self._idle.items()):
                while idle and idle[0].idle_since < oldest:
                    self._close(idle.pop(0))
                if not idle:
                    del self._idle[upstream]


async def _connect(family: int, address: Any) -> socket.socket:
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        sock.setblocking(False)
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A unix socket whose backlog is full says EAGAIN, and nothing tells when it is not any more.
        while (number := sock.connect_ex(address)) == errno.EAGAIN:  # noqa: ASYNC110
            await trio.sleep(CONNECT_RETRY_S)
        if number == errno.EINPROGRESS:
            await trio.lowlevel.wait_writable(sock)
            number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            raise OSError(number, _reason(number))
        undo.pop_all()
        return sock


def _reason(number: int) -> str:
    return {errno.ECONNREFUSED: "connection refused", errno.ENOENT: "no such socket"}.get(
        number, errno.errorcode[number]
    )
