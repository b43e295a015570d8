"""The relays that earlier owners of a state directory have left: found by their sockets."""

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Sequence

import attrs
import trio

from ichat.errors import Exit
from ichat.http.listeners import adopt_listeners, close_all
from ichat.relays.relay_sockets import connect_to_relay, paths_in
from ichat.relays.values import FrameError, Note
from ichat.relays.wire import receive_descriptors, send_descriptors
from ichat.supervisor.kept import KeptDescriptors
from ichat.supervisor.orphans import AdoptedProcess

log = logging.getLogger(__name__)

HAND_OVER_S = 5.0
"""A relay that has not handed over its descriptors by then is killed."""


@attrs.define(eq=False)
class FoundRelay:
    """A relay of an earlier owner, which follows this owner now."""

    process: AdoptedProcess
    descriptors: socket.socket
    """It sends and receives descriptors there."""
    frames: socket.socket
    address: str = ""
    """The configured address of its listeners; "" if it accepts nothing any more."""
    listeners: list[socket.socket] = attrs.field(factory=list[socket.socket])
    kept: list[tuple[Note, list[int]]] = attrs.field(factory=list[tuple[Note, list[int]]])
    """Messages with descriptors that it holds open for workers."""

    def receive(self, message: Note, descriptors: list[int]) -> None:
        """Note descriptors that it hands over. Raises Exit."""
        if message.kind == "listen":
            self.address = str(message.content.get("address", ""))
            self.listeners += adopt_listeners(descriptors)
        else:
            self.kept.append((message, descriptors))

    def take_listeners(self) -> list[socket.socket]:
        """Return the listeners: the caller closes them."""
        listeners, self.listeners = self.listeners, []
        return listeners

    def give_kept(self, kept: KeptDescriptors) -> None:
        """Hand over the descriptors that it has held open for workers."""
        given, self.kept = self.kept, []
        for message, descriptors in given:
            try:
                kept.receive({"kind": message.kind, **message.content}, descriptors)
            except ValueError as error:
                log.error("the relay of process %d: %s", self.process.pid, error)

    def close(self) -> None:
        """Close everything: it is no relay of this owner."""
        close_all([*self.listeners, self.descriptors, self.frames])
        for _, descriptors in self.kept:
            for descriptor in descriptors:
                os.close(descriptor)
        self.process.close()


async def find_relays(directory: str, term: int) -> list[FoundRelay]:
    """Have all relays of a state directory follow the owner of this term, and return them.

    The socket of a dead relay is removed. A relay that does not answer is killed; see `HAND_OVER_S`.
    """
    found: list[FoundRelay] = []

    async def add(path: str) -> None:
        relay = _meet(path, term)
        if relay is not None and await _has_handed_over(relay):
            found.append(relay)

    async with trio.open_nursery() as nursery:
        for path in paths_in(directory):
            nursery.start_soon(add, path)
    return found


def _meet(path: str, term: int) -> FoundRelay | None:
    """Offer a relay a connection for frames; return None if there is no relay any more, or it cannot be met."""
    try:
        descriptors, peer = connect_to_relay(path)
    except (ConnectionRefusedError, FileNotFoundError):
        with contextlib.suppress(OSError):
            os.unlink(path)
        return None
    except OSError as error:
        log.error("the relay at %s cannot be reached: %s", path, error.strerror or error)
        return None
    with contextlib.ExitStack() as undo:
        undo.callback(descriptors.close)
        try:
            process = AdoptedProcess(peer.pid)
            frames, theirs = socket.socketpair()
            with theirs:
                undo.callback(frames.close)
                send_descriptors(descriptors, {"kind": "adopt", "term": term}, [theirs.fileno()])
        except ProcessLookupError:
            return None
        except OSError as error:
            log.error("the relay at %s cannot be met: %s", path, error.strerror or error)
            return None
        undo.pop_all()
        return FoundRelay(process, descriptors, frames)


async def _has_handed_over(relay: FoundRelay) -> bool:
    """Return whether a relay has handed over everything; kill it if it is silent."""
    why = "it has not answered"
    with trio.move_on_after(HAND_OVER_S):
        try:
            while True:
                await trio.lowlevel.wait_readable(relay.descriptors)
                try:
                    received = receive_descriptors(relay.descriptors)
                except BlockingIOError:
                    continue
                if received is None:
                    why = "it follows no owner of this term"
                    break
                if received[0].kind == "handed":
                    return True
                relay.receive(*received)
        except (OSError, FrameError, Exit) as error:
            why = str(error)
    pid = relay.process.pid
    if not relay.process.has_ended():
        log.error("the relay of process %d is killed: %s", pid, why)
        with contextlib.suppress(ProcessLookupError):
            relay.process.send_signal(signal.SIGKILL)
        with trio.move_on_after(HAND_OVER_S):
            await relay.process.wait()
    relay.close()
    return False


def first_listeners(found: Sequence[FoundRelay], address: str) -> list[socket.socket]:
    """Return the listeners for this address, which all of these relays share; close all others of this process."""
    chosen: list[socket.socket] = []
    for relay in found:
        listeners = relay.take_listeners()
        if relay.address == address and not chosen:
            chosen = listeners
        else:
            close_all(listeners)
    return chosen
