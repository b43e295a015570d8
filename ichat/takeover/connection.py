"""The socket `takeover` in the state directory, the connection of an old and a new process of a gateway.

A message is JSON, with descriptors. A snapshot may be long: it is in a file in memory, and its descriptor is sent. Both
processes are of the same user, and each knows the other's end by a pidfd.
"""

import contextlib
import json
import os
import select
import signal
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, cast

import trio

from ichat.errors import EXIT_UNAVAILABLE, Exit
from ichat.relays.values import FrameError
from ichat.relays.wire import receive_descriptors, send_descriptors
from ichat.takeover.handover import Message

SOCKET = "takeover"
"""The name of the socket in the state directory."""
BACKLOG = 8
BYTES_MAX = 256 * 1024 * 1024
"""Of a snapshot."""
_CREDENTIALS = struct.Struct("3i")


class OtherProcess:
    """The other process, and the connection to it."""

    def __init__(self, sock: socket.socket) -> None:
        """Own a connected socket. Raises OSError if the other process has ended, PermissionError for another user."""
        self._sock = sock
        sock.setblocking(False)
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid, user, _ = _CREDENTIALS.unpack(credentials)
        if user not in (os.geteuid(), 0):
            raise PermissionError(f"The process {self.pid} is of another user.")
        self._pidfd = os.pidfd_open(self.pid)

    def __repr__(self) -> str:
        return f"<OtherProcess {self.pid}>"

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return _is_readable(self._pidfd)

    @property
    def is_readable(self) -> bool:
        """Whether there is something to receive, or the end of the connection."""
        return self._sock.fileno() >= 0 and _is_readable(self._sock.fileno())

    async def wait_end(self) -> None:
        """Wait until the process has ended."""
        await trio.lowlevel.wait_readable(self._pidfd)

    async def wait_readable(self) -> None:
        """Wait until there is something to receive, or the end of the connection. Raises trio.ClosedResourceError."""
        if self._sock.fileno() < 0:
            raise trio.ClosedResourceError
        await trio.lowlevel.wait_readable(self._sock)

    async def wait_writable(self) -> None:
        """Wait until a message can be sent, or until none can be any more."""
        await trio.lowlevel.wait_writable(self._sock)

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message. Raises OSError if it cannot arrive."""
        send_descriptors(self._sock, {**message.content, "kind": message.kind}, descriptors)

    def receive(self) -> tuple[Message, list[int]] | None:
        """Return the next message and its descriptors; None at the end. Raises OSError, BlockingIOError, FrameError."""
        received = receive_descriptors(self._sock)
        if received is None:
            return None
        note, descriptors = received
        return Message(note.kind, note.content), descriptors

    def close_reading(self) -> None:
        """Let nothing more arrive: the other process gets an error when it sends."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal, unless it has ended."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, number)

    def close(self) -> None:
        """Close the connection; `wait_end` goes on. Harmless the second time."""
        if self._sock.fileno() >= 0:
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()

    def forget(self) -> None:
        """Close everything."""
        self.close()
        os.close(self._pidfd)
        self._pidfd = -1


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def real_path(directory: str) -> str:
    """Return the path by which both processes name a state directory."""
    return os.path.realpath(directory)


def listen(directory: str) -> socket.socket:
    """Listen in a state directory, in place of an earlier process. Raises OSError."""
    path = os.path.join(directory, SOCKET)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + ".new")
        sock.bind(path + ".new")
        os.chmod(path + ".new", 0o600)
        sock.listen(BACKLOG)
        os.replace(path + ".new", path)
    except OSError:
        sock.close()
        raise
    return sock


def forget(directory: str) -> None:
    """Remove the socket at which this process has listened."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(directory, SOCKET))


def connect(directory: str) -> OtherProcess | None:
    """Connect to the gateway of a state directory; None if none can be reached. Raises Exit 69."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(os.path.join(directory, SOCKET))
        return OtherProcess(sock)
    except (FileNotFoundError, ConnectionRefusedError, ProcessLookupError):
        sock.close()
        return None
    except OSError as error:
        sock.close()
        raise Exit(EXIT_UNAVAILABLE, f"The running gateway cannot be reached: {error.strerror or error}.") from error


def to_memory(content: Mapping[str, Any]) -> int:
    """Return the descriptor of a file in memory with JSON; the caller closes it. Raises OSError."""
    fd = os.memfd_create("ichat-takeover", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(json.dumps(content).encode())
    except (OSError, ValueError):
        os.close(fd)
        raise
    return fd


def from_memory(fd: int) -> dict[str, Any]:
    """Return the JSON object in a file in memory. Raises FrameError."""
    try:
        size = os.fstat(fd).st_size
        if size > BYTES_MAX:
            raise FrameError(f"A snapshot of {size} bytes is too large.")
        found: Any = json.loads(os.pread(fd, size, 0))
    except (OSError, ValueError, RecursionError) as error:
        raise FrameError(f"The snapshot is damaged: {error}.") from error
    if not isinstance(found, dict):
        raise FrameError("The snapshot is no object.")
    return cast("dict[str, Any]", found)
