"""A relay's connection to its owner, and the socket at which the next owner finds the relay.

The first owner has started the relay, which inherits a socket for descriptors. A later owner connects to the relay's
own socket and offers a connection for frames. The relay hands over its descriptors, and follows that owner if its term
is higher. It reads all frames of the owner before it.
"""

import contextlib
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from ichat.errors import Exit
from ichat.http.hub import READABLE, Hub
from ichat.relays.link import whole
from ichat.relays.relay_sockets import open_relay_socket, peer_of
from ichat.relays.values import UNREAD_BYTES_MAX, Frame, FrameError, Note, TalkError
from ichat.relays.wire import FrameWire, receive_descriptors, send_descriptors

log = logging.getLogger(__name__)

OLD_S = 2.0
"""How long a later owner waits for the end of the connection to the owner before it."""


class FollowsOwner(Protocol):
    """A relay, as its connection to the owner sees it."""

    @property
    def term(self) -> int:
        """That of the owner that it has met last."""
        ...

    def received(self, frame: Frame) -> None:
        """Called with each frame of the owner. Raises TalkError."""
        ...

    def given(self, message: Note, descriptors: list[int]) -> None:
        """Called with descriptors of the owner, which belong to the relay then. Raises TalkError, Exit."""
        ...

    def descriptors_for_next(self) -> Sequence[tuple[Mapping[str, Any], Sequence[int]]]:
        """Return the messages with descriptors for the next owner."""
        ...

    def lost_owner(self, why: str) -> None:
        """Called when the connection has ended."""
        ...


class _Offer(NamedTuple):
    """A later owner that waits."""

    descriptors: socket.socket
    frames: socket.socket
    term: int
    at: float


class OwnerLink:
    """The connection to the owner of this moment; None in `wire`: there is no owner."""

    def __init__(self, hub: Hub, relay: FollowsOwner, path: str) -> None:
        """`path` is the relay's own socket."""
        self._hub = hub
        self._relay = relay
        self._path = path
        self._listener: socket.socket | None = None
        self._descriptors: socket.socket | None = None
        self.wire: FrameWire | None = None
        self._offer: _Offer | None = None

    def __repr__(self) -> str:
        return f"<OwnerLink {self.wire!r}>"

    @property
    def is_behind(self) -> bool:
        """Whether the owner has left its bound of bytes unread, and nothing new may be asked or reported."""
        return self.wire is not None and self.wire.unread_bytes > UNREAD_BYTES_MAX

    def begin(self, descriptors: socket.socket) -> None:
        """Follow the first owner, and listen for the next. Raises OSError."""
        self._listener = open_relay_socket(self._path)
        self._hub.watch(self._listener.fileno(), READABLE, self._on_connection)
        self._follow_descriptors(descriptors)

    def close(self) -> None:
        """End the connection, after all frames have been sent that the owner reads; no owner finds the relay now."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            self._hub.forget(self._listener.fileno())
            self._listener.close()
        self._drop_offer()
        if self.wire is not None:
            self.wire.close()

    def send(self, frame: Frame) -> None:
        """Send a frame, if there is an owner; see `FrameWire.send`."""
        if self.wire is not None:
            self.wire.send(frame)

    def leave_owner(self) -> None:
        """Wait for the next owner from now on: a request may arrive before the end of the connection does."""
        if self.wire is not None:
            self.wire.close()

    def flush(self) -> None:
        """Send the frames that wait."""
        if self.wire is not None:
            self.wire.flush()

    # The owner of this moment.

    def _follow_descriptors(self, descriptors: socket.socket) -> None:
        descriptors.setblocking(False)
        self._descriptors = descriptors
        self._hub.watch(descriptors.fileno(), READABLE, self._on_descriptors)

    def _follow_frames(self, frames: socket.socket) -> None:
        wire: FrameWire

        def ended(why: str) -> None:
            self._on_end(wire, why)

        self.wire = wire = FrameWire(self._hub, frames, self._relay.received, ended)

    def _on_descriptors(self, _events: int) -> None:
        assert self._descriptors is not None
        try:
            while True:
                received = receive_descriptors(self._descriptors)
                if received is None:
                    self._end_descriptors()
                    if self.wire is None:
                        self._relay.lost_owner("it has closed the connection before it began")
                    return
                self._take(*received)
        except BlockingIOError:
            return
        except (OSError, FrameError, TalkError, Exit) as error:
            log.error("the owner's descriptors cannot be used: %s", error)
            self._end_descriptors()
            if self.wire is not None:
                self.wire.close(str(error))

    def _take(self, message: Note, descriptors: list[int]) -> None:
        if message.kind == "frames" and len(descriptors) == 1 and self.wire is None:
            self._follow_frames(socket.socket(fileno=descriptors[0]))
        else:
            self._relay.given(message, descriptors)

    def _end_descriptors(self) -> None:
        descriptors, self._descriptors = self._descriptors, None
        if descriptors is not None:
            self._hub.forget(descriptors.fileno())
            descriptors.close()

    def _receive_last_descriptors(self) -> None:
        """Receive everything that the owner has sent before its end: a worker may depend on it."""
        with contextlib.suppress(OSError, FrameError, TalkError, Exit):
            while self._descriptors is not None and (received := receive_descriptors(self._descriptors)) is not None:
                self._relay.given(*received)

    def _on_end(self, wire: FrameWire, why: str) -> None:
        if self.wire is not wire:
            return
        self.wire = None
        self._receive_last_descriptors()
        self._end_descriptors()
        self._relay.lost_owner(why)
        self._follow_offer()

    # The next owner.

    def _on_connection(self, _events: int) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                sock.setblocking(False)
                if (uid := peer_of(sock).uid) != os.geteuid():
                    log.error("a process of another user (number %d) wants to decide: it may not", uid)
                    sock.close()
                else:
                    self._hub.watch(sock.fileno(), READABLE, partial(self._on_offer, sock))

    def _on_offer(self, sock: socket.socket, _events: int) -> None:
        """Called when a later owner has offered a connection for frames, or has gone."""
        given: list[int] = []
        try:
            received = receive_descriptors(sock)
            if received is None:
                raise TalkError("it has gone")
            message, given = received
            term = whole(message, "term")
            if message.kind != "adopt" or len(given) != 1:
                raise TalkError(f"it has sent `{message.kind}` with {len(given)} descriptors")
            if term <= max(self._relay.term, self._offer.term if self._offer is not None else 0):
                raise TalkError(f"its term {term} is not higher")
        except BlockingIOError:
            return
        except (OSError, FrameError, TalkError) as error:
            log.error("a later owner is not followed: %s", error)
            self._hub.forget(sock.fileno())
            sock.close()
            for descriptor in given:
                os.close(descriptor)
            return
        self._hub.forget(sock.fileno())
        self._drop_offer()
        self._offer = _Offer(sock, socket.socket(fileno=given[0]), term, self._hub.update_clock())
        self._follow_offer()

    def see_time(self, now: float) -> None:
        """End the connection to an owner that has not ended it while a later owner waits."""
        if self._offer is not None and self.wire is not None and now - self._offer.at > OLD_S:
            self.wire.close(f"there is a later owner, of term {self._offer.term}")

    def _drop_offer(self) -> None:
        offer, self._offer = self._offer, None
        if offer is not None:
            offer.descriptors.close()
            offer.frames.close()

    def _follow_offer(self) -> None:
        """Follow the owner that waits, once the owner before it has gone: give it all descriptors first."""
        offer = self._offer
        if offer is None or self.wire is not None:
            return
        self._offer = None
        try:
            for message, descriptors in self._relay.descriptors_for_next():
                send_descriptors(offer.descriptors, message, descriptors)
            send_descriptors(offer.descriptors, {"kind": "handed"})
        except OSError as error:
            log.error("a later owner is not followed: %s", error.strerror or error)
            offer.descriptors.close()
            offer.frames.close()
            return
        self._end_descriptors()
        self._follow_descriptors(offer.descriptors)
        self._follow_frames(offer.frames)
