"""Connections to upstreams, kept alive and reused."""

import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import trio

from ichat import errors
from ichat.config.schema import Config
from ichat.http.hub import READABLE, Hub
from ichat.http.tls import CLOSE_S, Bridge, make_bridge

log = logging.getLogger(__name__)

_OUR_OWN = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
"""Errors of a new connection that are not the upstream's fault."""
EXPIRE_EVERY_S = 5.0
CONNECT_RETRY_S = 0.01
LOST_S = 60
"""A connection is broken when the upstream's machine has acknowledged nothing for this time, in seconds.

A machine that is off, or cut off, sends no reset. Its kernel acknowledges while an engine is busy, however long.
"""
PROBE_AFTER_S, PROBE_EVERY_S = 30, 10
"""When a silent upstream's machine is first asked whether it is there, and how often after that."""
LOOKUPS_MAX = 4
"""Threads that may look up an upstream's name at the same time."""
_TCP_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S),
)


def _authority_of(upstream: "Upstream") -> bytes:
    if not upstream.port:
        return b"localhost"
    host = f"[{upstream.host}]" if ":" in upstream.host else upstream.host
    usual = 443 if upstream.tls else 80
    return (host if upstream.port == usual else f"{host}:{upstream.port}").encode()


@attrs.frozen(eq=False)
class Upstream:
    """A TCP port or unix socket that requests are sent to. Two are never equal, even with the same address."""

    name: str
    """Its name in error messages."""
    host: str
    """A name or an address; the socket's path if `port` is 0."""
    port: int
    tls: ssl.SSLContext | None = None
    """Verifies and encrypts; None means plain."""
    ca_certificates: str | None = None
    """The file of the authorities by which `tls` verifies; None: the system's."""
    authority: bytes = attrs.field(init=False, default=attrs.Factory(_authority_of, takes_self=True))
    """Its value of the `Host` header."""


class Connection:
    """A connection to an upstream, registered with the hub for as long as it is open."""

    __slots__ = ("_bridge", "_fd", "_pool", "hub", "idle_since", "sock", "upstream")

    def __init__(self, pool: "Pool", upstream: Upstream, sock: socket.socket, bridge: Bridge | None = None) -> None:
        self._pool = pool
        self.hub = pool.hub
        self._bridge = bridge
        self._fd = sock.fileno()
        self.upstream = upstream
        self.sock = sock
        self.idle_since = 0.0
        self.hub.watch(self._fd, READABLE, self._unasked)

    def __repr__(self) -> str:
        return f"<Connection to {self.upstream.name}>"

    def set_reader(self, readable: Callable[[int], None]) -> None:
        """Call this function whenever new bytes, the end or an error can be read."""
        self.hub.direct(self._fd, readable)

    def rearm(self) -> None:
        """Call the reader once more for what can be read already."""
        self.hub.rearm(self._fd, READABLE)

    def pause(self) -> None:
        """Call no reader: the upstream is held back as its socket fills."""
        self.hub.direct(self._fd, _ignore)

    def park(self, now: float) -> None:
        """Until the next exchange, have the pool close this connection if anything can be read from it."""
        self.idle_since = now
        self.hub.direct(self._fd, self._unasked)

    def _unasked(self, _events: int) -> None:
        self._pool.discard(self)

    @property
    def truncated(self) -> bool:
        """Whether the connection may have ended before the data that it carried."""
        return self._bridge is not None and self._bridge.truncated

    def close(self) -> None:
        """Close the connection."""
        self.hub.forget(self._fd)
        self.sock.close()
        if self._bridge is not None:
            self._bridge.finish()

    def is_quiet(self) -> bool:
        """Return whether there is nothing to read, not even the end."""
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False


def _ignore(_events: int) -> None:
    """Ignore an event."""


class Pool:
    """Idle connections by upstream, newest first; an idle connection that becomes readable is closed at once."""

    def __init__(self, hub: Hub, *, connect_s: float, idle_s: float) -> None:
        self.hub = hub
        self.connect_s = connect_s
        self.idle_s = idle_s
        self._idle: dict[Upstream, dict[Connection, None]] = {}
        self._lookups: WeakKeyDictionary[Upstream, trio.CapacityLimiter] = WeakKeyDictionary()
        self._nursery: trio.Nursery | None = None

    def __repr__(self) -> str:
        return f"<Pool {sum(map(len, self._idle.values()))} idle to {len(self._idle)} upstreams>"

    def acquire(self, upstream: Upstream) -> Connection | None:
        """Return an idle connection that is young enough and has nothing to read, or None."""
        idle = self._idle.get(upstream)
        while idle:
            connection, _ = idle.popitem()
            if self.hub.update_clock() - connection.idle_since < self.idle_s and connection.is_quiet():
                return connection
            connection.close()
        return None

    def release(self, connection: Connection) -> None:
        """Keep a connection after an exchange that has ended cleanly."""
        connection.park(self.hub.now)
        idle = self._idle.get(connection.upstream)
        if idle is None:
            idle = self._idle[connection.upstream] = {}
        idle[connection] = None

    def discard(self, connection: Connection) -> None:
        """Close a connection, idle or in use."""
        self._idle.get(connection.upstream, {}).pop(connection, None)
        connection.close()

    def close_idle(self) -> None:
        """Close every idle connection."""
        for idle in self._idle.values():
            while idle:
                idle.popitem()[0].close()

    async def connect(self, upstream: Upstream) -> Connection:
        """Open a connection. Raises ApiError: 502 with the reason, also after `connect_s`; 503 without resources."""
        try:
            with trio.fail_after(self.connect_s):
                sock = await self._open(upstream)
                if upstream.tls is not None:
                    return await self._encrypt(upstream, sock, upstream.tls)
        except trio.TooSlowError as error:
            why = f"no connection to {upstream.host}:{upstream.port} within {self.connect_s:g} s"
            raise errors.upstream_unreachable(upstream.name, why) from error
        except (OSError, UnicodeError) as error:
            if isinstance(error, OSError) and error.errno in _OUR_OWN:
                raise errors.out_of_resources(error.strerror or str(error)) from error
            why = getattr(error, "strerror", None) or str(error)
            raise errors.upstream_unreachable(upstream.name, why) from error
        return Connection(self, upstream, sock)

    async def _open(self, upstream: Upstream) -> socket.socket:
        if not upstream.port:
            return await _connect(socket.AF_UNIX, upstream.host)
        found = await self._look_up(upstream)
        failure: OSError | None = None
        for family, _, _, _, address in found:
            try:
                with trio.fail_after(self.connect_s / len(found)):
                    return await _connect(family, address)
            except OSError as error:
                failure = error
            except trio.TooSlowError:
                failure = OSError(errno.ETIMEDOUT, f"no connection to {upstream.host}:{upstream.port} in time")
        raise failure or OSError(errno.EHOSTUNREACH, "no address")

    async def _look_up(self, upstream: Upstream) -> Sequence[Any]:
        """Return the result of `getaddrinfo`.

        A slow resolver holds its threads for longer than a request waits, so every upstream has threads of its own.
        """
        with contextlib.suppress(socket.gaierror):
            return _getaddrinfo(upstream.host, upstream.port, socket.AI_NUMERICHOST)
        limiter = self._lookups.get(upstream)
        if limiter is None:
            limiter = self._lookups[upstream] = trio.CapacityLimiter(LOOKUPS_MAX)
        return await trio.to_thread.run_sync(
            _getaddrinfo, upstream.host, upstream.port, limiter=limiter, abandon_on_cancel=True
        )

    async def _encrypt(self, upstream: Upstream, sock: socket.socket, context: ssl.SSLContext) -> Connection:
        assert self._nursery is not None, "the pool does not run"
        bridge = await make_bridge(sock, context, server_hostname=upstream.host, tolerant=False)
        self._nursery.start_soon(_run, bridge)
        return Connection(self, upstream, bridge.plain, bridge)

    def reconfigure(self, config: Config) -> None:
        """Apply the times of another configuration from now on."""
        self.connect_s, self.idle_s = config.timeouts.connect_s, config.timeouts.upstream_idle_s

    async def run_forever(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve encrypted connections and close old idle connections, for as long as anything uses this pool."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            while True:
                await trio.sleep(EXPIRE_EVERY_S)
                self._expire(trio.current_time() - self.idle_s)

    def _expire(self, oldest: float) -> None:
        for upstream, idle in list(self._idle.items()):
            for connection in [connection for connection in idle if connection.idle_since < oldest]:
                self.discard(connection)
            if not idle:
                del self._idle[upstream]


def _getaddrinfo(host: str, port: int, flags: int = 0) -> Sequence[Any]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)


async def _connect(family: int, address: Any) -> socket.socket:
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        sock.setblocking(False)
        if family != socket.AF_UNIX:
            for level, option, value in _TCP_OPTIONS:
                sock.setsockopt(level, option, value)
        # A unix socket with a full backlog fails with EAGAIN, and no event says when there is room again.
        while (number := sock.connect_ex(address)) == errno.EAGAIN:  # noqa: ASYNC110
            await trio.sleep(CONNECT_RETRY_S)
        if number == errno.EINPROGRESS:
            number = sock.connect_ex(address)  # on this machine it is connected, or refused, by now
        if number == errno.EALREADY:
            await trio.lowlevel.wait_writable(sock)
            number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            raise OSError(number, _reason(number))
        undo.pop_all()
        return sock


async def _run(bridge: Bridge) -> None:
    try:
        await bridge.run()
    except Exception:
        log.exception("a bug moving encrypted bytes; this connection is closed")
    finally:
        with trio.move_on_after(CLOSE_S, shield=True):
            await bridge.aclose()


def _reason(number: int) -> str:
    return {errno.ECONNREFUSED: "connection refused", errno.ENOENT: "no such socket"}.get(
        number, errno.errorcode[number]
    )
