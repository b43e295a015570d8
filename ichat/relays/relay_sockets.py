"""Where the next owner of a state directory finds the relays of an earlier owner: a unix socket of each, by its pid.

An owner goes on with the relays of its own program, and replaces the others: see `build_id`.
"""

import contextlib
import hashlib
import os
import socket
import struct
from typing import NamedTuple

import ichat

RELAYS_DIRECTORY = "relays"
"""In the state directory."""
OFFERS_MAX = 4
"""Connections of owners that wait to be accepted: the directory is closed to other users."""
_PEER = struct.Struct("3i")


class Peer(NamedTuple):
    """The process at the other end of a unix socket, as it was when it connected or began to listen."""

    pid: int
    uid: int


def peer_of(sock: socket.socket) -> Peer:
    """Return the process at the other end. Raises OSError."""
    pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return Peer(pid, uid)


def path_of(directory: str, pid: int) -> str:
    """Return where a relay of this state directory listens."""
    return os.path.join(directory, RELAYS_DIRECTORY, str(pid))


def open_relay_socket(path: str) -> socket.socket:
    """Listen for the next owner. Raises OSError.

    A socket that an earlier process of the same pid has left is replaced.
    """
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        sock.bind(path)
        os.chmod(path, 0o600)
        sock.listen(OFFERS_MAX)
    except OSError:
        sock.close()
        raise
    return sock


def connect_to_relay(path: str) -> tuple[socket.socket, Peer]:
    """Return a connection to the relay that listens there, and its process.

    Raises ConnectionRefusedError or FileNotFoundError if there is none any more, and OSError.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        sock.connect(path)
        peer = peer_of(sock)
        if peer.uid != os.geteuid():
            raise PermissionError(f"{path} is a socket of another user (number {peer.uid})")
    except OSError:
        sock.close()
        raise
    return sock, peer


def paths_in(directory: str) -> list[str]:
    """Return the sockets of relays in a state directory, of living and of dead relays."""
    found = os.path.join(directory, RELAYS_DIRECTORY)
    try:
        return sorted(os.path.join(found, name) for name in os.listdir(found) if name.isdecimal())
    except FileNotFoundError:
        return []


def build_id() -> str:
    """Return a digest of this program's files as they are now: of their names, sizes and times."""
    root = os.path.dirname(os.path.abspath(ichat.__file__))
    found = [ichat.__version__]
    if os.path.isdir(root):
        for directory, names, files in os.walk(root):
            names[:] = sorted(name for name in names if name != "__pycache__")
            found += [_mark_of(os.path.join(directory, name)) for name in sorted(files) if name.endswith(".py")]
    else:  # a pyz
        found.append(_mark_of(os.path.dirname(root)))
    return hashlib.blake2b("\n".join(found).encode(), digest_size=8).hexdigest()


def _mark_of(path: str) -> str:
    try:
        facts = os.stat(path)
    except OSError:
        return path
    return f"{path} {facts.st_size} {facts.st_mtime_ns}"
