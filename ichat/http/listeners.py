"""Where a role listens: TCP ports and unix sockets.

A listening socket is bound once, and may be shared: each process that accepts from it has a descriptor of its own, and
closes only that. The socket itself is open until the last process has closed its descriptor, with the connections that
wait in its queue. So no process shuts it down, and SO_REUSEPORT is not used: each socket would have its own queue, and
closing it would reset the connections there.
"""

import contextlib
import errno
import os
import secrets
import socket
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import trio

from ichat.errors import EXIT_UNAVAILABLE, Exit

BACKLOG = 4096


async def open_listeners(host: str, port: int, handed: Sequence[socket.socket] = ()) -> list[socket.socket]:
    """Listen on every address of the host (all interfaces for "" and "0.0.0.0" or "::"); port 0 means any free port.

    `handed` are listeners of another process: that of an address is used there. Raises Exit 69 if an address cannot be
    bound.
    """
    listeners: list[socket.socket] = []
    try:
        found = await trio.socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE, proto=socket.IPPROTO_TCP
        )
        is_dual = any(family == socket.AF_INET6 for family, *_ in found)
        for family, kind, protocol, _, address in found:
            if (shared := next((one for one in handed if _has(one, address, is_dual=is_dual)), None)) is not None:
                listeners += [shared] if shared not in listeners else []
                continue
            number = port_of(listeners) if listeners else port
            sock = socket.socket(family, kind, protocol)
            listeners.append(sock)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6 and len(found) > 1:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((address[0], number, *address[2:]))
            sock.listen(BACKLOG)
    except (OSError, UnicodeError) as error:
        close_all(listeners)
        why = getattr(error, "strerror", None) or str(error)
        raise Exit(EXIT_UNAVAILABLE, f"Cannot listen on {host}:{port}: {why}; choose another host or port.") from error
    return listeners


async def open_listeners_in(host: str, first: int, last: int) -> list[socket.socket]:
    """Listen as `open_listeners` does, on a free port of a range; the search begins at a random port.

    Raises Exit 69 if none is free, or the host cannot be bound.
    """
    ports = range(first, last + 1)
    middle = secrets.randbelow(len(ports))
    for port in (*ports[middle:], *ports[:middle]):
        try:
            return await open_listeners(host, port)
        except Exit as error:
            if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
                raise
    raise Exit(EXIT_UNAVAILABLE, f"No port from {first} to {last} is free on {host}: choose a larger range.")


def _has(listener: socket.socket, address: Sequence[Any], *, is_dual: bool) -> bool:
    """Return whether a listener has an address, or, with `is_dual`, has all of both families for all of IPv4."""
    if listener.family not in (socket.AF_INET, socket.AF_INET6) or listener.getsockname()[1] != address[1]:
        return False
    host = listener.getsockname()[0]
    if is_dual and (host, address[0]) == ("::", "0.0.0.0"):
        return not listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
    return host == address[0]


def address_name(host: str, port: int) -> str:
    """Return the name of a configured address, by which processes hand over its listeners."""
    return f"{host or '*'}:{port}"


def adopt_listeners(descriptors: Iterable[int]) -> list[socket.socket]:
    """Return the listeners that another process has opened and handed over; each descriptor belongs to its socket then.

    Raises Exit 69, with all of them closed, if something does not listen.
    """
    sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    for sock in sockets:
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            close_all(sockets)
            raise Exit(EXIT_UNAVAILABLE, "A socket that was handed over does not listen: start the gateway again.")
        sock.setblocking(False)
    return sockets


def reserve_port() -> socket.socket:
    """Return a socket that has a free port of 127.0.0.1 but does not listen: nothing can connect to it or bind it."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock


def open_unix_listener(path: str, *, replaces: bool = False) -> socket.socket:
    """Listen on a unix socket; its directory must be closed to all but its users. Raises Exit 69.

    A socket left by a process that has ended is replaced. With `replaces` so is that of a running process: the path
    always leads to a socket.
    """
    own = f"{path}.new" if replaces else path
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        _remove_stale(own)
        sock.bind(own)
        sock.listen(BACKLOG)
        os.replace(own, path)
    except OSError as error:
        sock.close()
        raise Exit(EXIT_UNAVAILABLE, f"Cannot listen on {path}: {error.strerror or error}.") from error
    return sock


@contextlib.contextmanager
def listening_at(path: str) -> Generator[list[socket.socket]]:
    """Listen on a unix socket in place of any other process, and remove its path at the end, if it is still its own.

    The caller closes the listener. Without a path there is none. Raises Exit 69.
    """
    if not path:
        yield []
        return
    listeners, own = [open_unix_listener(path, replaces=True)], os.stat(path).st_ino
    try:
        yield listeners
    finally:
        with contextlib.suppress(OSError):
            if os.stat(path).st_ino == own:
                os.unlink(path)


def _remove_stale(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(path) == errno.ECONNREFUSED:
            os.unlink(path)


def close_all(sockets: list[socket.socket]) -> None:
    """Close the sockets; harmless for closed sockets."""
    for sock in sockets:
        sock.close()


def port_of(listeners: list[socket.socket]) -> int:
    """Return the port that these listeners are bound to."""
    return listeners[0].getsockname()[1]
