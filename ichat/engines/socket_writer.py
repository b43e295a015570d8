"""Writing to a client's socket on the engine's loop: without blocking, and with a limit for a client that stalls."""

import asyncio
import contextlib
import socket


class SocketWriter:
    """Writes to a non-blocking socket. Everything except the constructor runs on the engine's loop."""

    def __init__(self, sock: socket.socket, stall_s: float) -> None:
        """A client that accepts nothing for `stall_s` counts as gone."""
        self._sock = sock
        self._stall_s = stall_s
        self._rest = memoryview(b"")
        self._drained: asyncio.Future[bool] | None = None
        """Has the result of `write` while that waits."""
        self._stalled: asyncio.TimerHandle

    def __repr__(self) -> str:
        return f"<SocketWriter with {len(self._rest)} bytes left>"

    @property
    def is_behind(self) -> bool:
        """Whether bytes wait for the socket."""
        return bool(self._rest)

    def write_now(self, data: bytes) -> None:
        """Write as much as the socket accepts at once."""
        with contextlib.suppress(OSError):
            self._sock.send(data)

    def give_up(self) -> None:
        """Let `write` return False if it waits."""
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(False)

    async def write(self, data: bytes) -> bool:
        """Write without blocking; wait while the socket is full, and so pause the application.

        Return whether all was written; otherwise the client is gone.
        """
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return False
        if sent == len(data):
            return True
        loop = asyncio.get_running_loop()
        fd = self._sock.fileno()
        self._rest = memoryview(data)[sent:]
        self._drained = loop.create_future()
        self._stalled = loop.call_later(self._stall_s, self.give_up)
        loop.add_writer(fd, self._writable)
        try:
            return await self._drained
        finally:
            self._stalled.cancel()
            loop.remove_writer(fd)
            self._drained = None

    def _writable(self) -> None:
        """Write as much as the socket accepts; any progress restarts the client's time limit."""
        if self._drained is None or self._drained.done():
            return
        try:
            sent = self._sock.send(self._rest)
        except BlockingIOError:
            return
        except OSError:
            self.give_up()
            return
        self._rest = self._rest[sent:]
        if not self._rest:
            self._drained.set_result(True)
        elif sent:
            self._stalled.cancel()
            self._stalled = asyncio.get_running_loop().call_later(self._stall_s, self.give_up)
