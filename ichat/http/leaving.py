"""How a connection ends without loss, when its client may be sending at that moment.

A close with unread bytes resets the connection, and the reset destroys a response that the client has not
read yet. A client that gets the end of a connection, in place of a reset, knows that its last request was
not answered, and may repeat it elsewhere. So the end is sent first, and the connection is closed later.
"""

import contextlib
import socket
from collections.abc import Callable, Iterable

import attrs
import trio

from ichat.config.schema import Timeouts
from ichat.http.server import Client
from ichat.http.tls import CLOSE_S, Bridge

LINGER_S = 1.0
LINGER_RECVS_MAX = 4096
_RECV_BYTES = 65536


def _do_nothing() -> None:
    """Let the exchanges be cut."""


@attrs.frozen
class Retirement:
    """How a process ends its connections while other processes go on accepting."""

    idle_s: float = 5.0
    """How long a kept connection may wait for another request, counted from the retirement or the last response."""
    linger_s: float = LINGER_S
    """How long a connection is read from after its end was sent."""
    total_s: float = 3600.0
    """How long exchanges may last."""
    overdue: Callable[[], None] = _do_nothing
    """Called after `total_s`: ends exchanges by a last event where it can. Those that do not end then are cut."""

    def bound(self, timeouts: Timeouts) -> Timeouts:
        """Return these timeouts, but with at most `idle_s` for the next request."""
        return attrs.evolve(timeouts, keep_alive_s=min(timeouts.keep_alive_s, self.idle_s))

    def bound_idle(self, clients: Iterable[Client]) -> None:
        """Let clients that wait for a first byte wait for `idle_s` at most from now on."""
        idle_until = trio.current_time() + self.idle_s
        for client in clients:
            if client.idle:
                client.reader.deadline = min(client.reader.deadline, idle_until)

    async def part(self, sock: socket.socket) -> None:
        """Send the end of a connection, and read until the client ends it too, for `linger_s` at most.

        The caller closes the socket, which nothing else may use meanwhile.
        """
        with contextlib.suppress(OSError), trio.move_on_after(self.linger_s):
            sock.shutdown(socket.SHUT_WR)
            while True:
                await trio.lowlevel.wait_readable(sock)
                with contextlib.suppress(BlockingIOError):
                    if not sock.recv(_RECV_BYTES):
                        return


async def close_bridge(bridge: Bridge, wire: socket.socket, retirement: Retirement | None) -> None:
    """Close an encrypted connection on the socket `wire`; in a retirement, read on after sending its end."""
    kept = None
    if retirement is not None:
        with contextlib.suppress(OSError):
            kept = wire.dup()  # the bridge closes its own
    with contextlib.ExitStack() as closing:
        if kept is not None:
            closing.enter_context(kept)
        with trio.move_on_after(CLOSE_S, shield=True):
            await bridge.aclose()
        if kept is not None and retirement is not None:
            await retirement.part(kept)


def end_connection() -> bool:
    """Return True: every response ends its connection; see `FrontDoor.ends_connection`."""
    return True


async def linger(client: Client) -> None:
    """Read and drop further bytes of the client, for a while: a close at once would reset the response away."""
    with contextlib.suppress(OSError):
        client.sock.shutdown(socket.SHUT_WR)
    deadline = trio.current_time() + LINGER_S
    for _ in range(LINGER_RECVS_MAX):
        if not await client.reader.receive(deadline):
            break
