"""The sockets between an owner and a relay: the first carries frames, the second carries descriptors.

Frames that are sent in the same turn leave by a single `send` at its end. Frames that the other side does not read
wait here.
"""

import array
import contextlib
import json
import logging
import select
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from ichat.http.hub import READABLE, Hub
from ichat.relays.frames import FrameReader, encode
from ichat.relays.values import Frame, FrameError, Note, TalkError

log = logging.getLogger(__name__)

TURN_BYTES = 8192
"""Bytes read of a relay before others get their turn: about 64 frames."""
_READABLE_OR_WRITABLE = READABLE | select.EPOLLOUT
_MESSAGE_BYTES_MAX = 64 * 1024
_DESCRIPTORS_MAX = 253
"""The kernel's bound for a message, SCM_MAX_FD."""


class FrameWire:
    """A connection on which frames are sent and received."""

    def __init__(
        self, hub: Hub, sock: socket.socket, received: Callable[[Frame], None], ended: Callable[[str], None]
    ) -> None:
        """`received` is called with each frame, and may raise FrameError or TalkError, which end the connection.

        `ended` is called once, with the reason; "" for an end in good order. The socket is closed then.
        """
        sock.setblocking(False)
        self._hub, self._sock = hub, sock
        self._received, self._ended = received, ended
        self._reader = FrameReader()
        self._gathered: list[bytes] = []
        self._is_flushed_soon = False
        """Whether the gathered frames leave at the end of this turn."""
        self._unsent = b""
        self.unread_bytes = 0
        """The bytes that the other side has not received yet, as far as this process knows."""
        self.is_open = True
        self.is_paused = False
        self._events = READABLE
        """The events that the hub watches.

        Each `recv` of the other side is an event "writable" here, so that is watched only while bytes wait.
        """
        hub.watch(sock.fileno(), READABLE, self._on_events)

    def __repr__(self) -> str:
        return f"<FrameWire{'' if self.is_open else ' closed'}, {self.unread_bytes} bytes unread>"

    def send(self, frame: Frame) -> None:
        """Send a frame at the end of this turn. Raises FrameError for a frame that cannot be written."""
        data = encode(frame)
        if not self.is_open:
            return
        self.unread_bytes += len(data)
        self._gathered.append(data)
        if not self._is_flushed_soon:
            self._is_flushed_soon = True
            self._hub.soon(self._flush)

    def flush(self) -> None:
        """Send the frames that wait, if any do."""
        if self._gathered:
            self._flush()

    def pause(self) -> None:
        """Receive nothing after this frame, until `resume`."""
        self.is_paused = True

    def resume(self) -> None:
        """Receive on: first the frames that have arrived."""
        if self.is_paused and self.is_open:
            self.is_paused = False
            self._receive(b"")
            if self.is_open:
                self._rearm()

    def rest(self) -> Iterator[Frame]:
        """Yield the frames that have arrived and were not received. It never waits: the other side has ended."""
        data = b""
        with contextlib.suppress(FrameError, OSError):
            while self.is_open:
                yield from self._reader.feed(data)
                data = self._sock.recv(TURN_BYTES)
                if not data:
                    return

    def close(self, why: str = "") -> None:
        """End the connection, and say why. Harmless the second time."""
        if self.is_open:
            self._flush()
            self.is_open = False
            self._hub.forget(self._sock.fileno())
            self._sock.close()
            self._ended(why)

    def _flush(self) -> None:
        """Send the gathered frames, as far as the other side accepts them now."""
        gathered, self._gathered, self._is_flushed_soon = self._gathered, [], False
        data = b"".join((self._unsent, *gathered)) if self._unsent or len(gathered) > 1 else b"".join(gathered)
        sent = 0
        try:
            if self.is_open and data:
                sent = self._sock.send(data)
        except BlockingIOError:
            pass
        except OSError:
            sent = len(data)  # the end is reported as an event
        self._unsent = data[sent:]
        self.unread_bytes = len(self._unsent)
        events = _READABLE_OR_WRITABLE if self._unsent else READABLE
        if events != self._events:
            self._events = events
            self._rearm()

    def _on_events(self, events: int) -> None:
        if self._unsent:
            self._flush()
        if self.is_paused:
            return
        try:
            data = self._sock.recv(TURN_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:  # the other side has ended without reading everything
            data = b""
        except OSError as error:
            self.close(error.strerror or str(error))
            return
        if not data:
            self.close()
            return
        self._receive(data)
        if self.is_open and (len(data) == TURN_BYTES or events & ~5):  # there may be more, or the end
            self._rearm()

    def _rearm(self) -> None:
        self._hub.rearm(self._sock.fileno(), self._events)

    def _receive(self, data: bytes) -> None:
        try:
            for frame in self._reader.feed(data):
                self._received(frame)
                if not self.is_open or self.is_paused:
                    return
        except (FrameError, TalkError) as error:
            self.close(str(error))
        except Exception:
            log.exception("a bug answering a frame; the connection between a relay and its owner ends")
            self.close("a bug")


def send_descriptors(sock: socket.socket, content: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message with descriptors, which stay open here. It never waits. Raises OSError, BlockingIOError."""
    data = json.dumps(content).encode()
    given = array.array("i", list(descriptors)[:_DESCRIPTORS_MAX])
    more = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, given)] if given else []
    sock.sendmsg([data], more, socket.MSG_DONTWAIT)  # `socket.send_fds` ignores flags before Python 3.12


def receive_descriptors(sock: socket.socket) -> tuple[Note, list[int]] | None:
    """Return the next message and its descriptors; None at the end. Raises OSError, BlockingIOError, FrameError."""
    words = array.array("i")
    data, more, _, _ = sock.recvmsg(
        _MESSAGE_BYTES_MAX, socket.CMSG_LEN(_DESCRIPTORS_MAX * words.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, given in more:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            words.frombytes(given[: len(given) - len(given) % words.itemsize])
    if not data:
        return None
    try:
        content: Any = json.loads(data)
        return Note(str(content.pop("kind")), 0, cast("dict[str, Any]", content)), list(words)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise FrameError(f"A message with descriptors is damaged: {error}.") from error
