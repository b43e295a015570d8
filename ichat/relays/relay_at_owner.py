"""A relay, as the process that decides sees it: its process, and the connection to it."""

import contextlib
import logging
import socket
from collections.abc import Sequence
from typing import Literal

import attrs
import trio

from ichat.protocol.messages import Count
from ichat.relays.owner_talk import OwnerTalk
from ichat.relays.values import Frame, Note, TalkError
from ichat.relays.wire import FrameWire, send_descriptors

log = logging.getLogger(__name__)

ASKS_MAX = 2_000_000
SILENT_S = 10.0

RelayState = Literal["starting", "accepting", "retiring", "draining", "gone"]
"""`retiring`: it leaves new connections to other relays, and ends when it has none left."""


@attrs.frozen
class RelayView:
    """A process that moves bytes for this gateway."""

    number: Count
    pid: Count
    state: RelayState
    connections: Count
    requests: Count
    """In flight."""
    age_s: float
    restarts: Count
    """How often a relay of this number has ended, and was started again."""


class RelayDesk:
    """Answers the frames of a relay's requests; see `Relays.desk_of`. This class answers none."""

    def receives(self, frame: Frame) -> None:
        """Called with each frame about a request, after a check of the order. Raises TalkError."""
        raise TalkError(f"A frame `{frame.kind}` is about no request.")

    def end(self) -> None:
        """Called when the relay has ended: its requests have."""


class RelayAtOwner:
    """A relay's process, and the connection to it."""

    def __init__(self, number: int, process: trio.Process, descriptors: socket.socket, now: float) -> None:
        self.number = number
        self.process = process
        self.talk = OwnerTalk(ASKS_MAX)
        self.wire: FrameWire | None = None
        self.desk = RelayDesk()
        self.state: RelayState = "starting"
        self.connections = self.requests = 0
        self.since = self.heard_at = now
        self.prepared = 0
        """The newest version of settings that it has prepared."""
        self.refusal = ""
        """Why it could not prepare the newest settings."""
        self.drained = trio.Event()
        self.leaves_place = trio.Event()
        """Set when another relay may replace it: it retires, or has ended."""
        self._descriptors = descriptors

    def __repr__(self) -> str:
        return f"<RelayAtOwner {self.number}, process {self.process.pid}, {self.state}>"

    def send(self, frame: Frame) -> None:
        """Send a frame, in the order of frames. Raises TalkError."""
        if self.wire is not None and self.wire.is_open and not self.talk.is_over:
            self.talk.sends(frame)
            self.wire.send(frame)

    def settle(self, seq: int) -> None:
        """Have the relay forget its outcomes up to a number: no later owner needs them."""
        seq = min(seq, self.talk.received)
        if seq > self.talk.settled:
            self.send(Note("settled", 0, {"seq": seq}))

    def is_preparing(self, version: int) -> bool:
        """Whether it may still answer that it has prepared settings, or cannot."""
        return self.prepared < version and not self.refusal and self.state == "accepting"

    def fault(self, now: float) -> str:
        """Return why it must be killed; "" if it need not be."""
        self.talk.unread_bytes = 0 if self.wire is None else self.wire.unread_bytes
        if self.talk.is_hung:
            return "it leaves frames unread"
        return f"it was silent for {SILENT_S:g} s" if now - self.heard_at > SILENT_S else ""

    def hand_over(self, kind: str, sockets: Sequence[socket.socket]) -> None:
        """Send the relay descriptors, which stay open here. Raises OSError."""
        send_descriptors(self._descriptors, {"kind": kind}, [one.fileno() for one in sockets])

    def close(self) -> None:
        """Close the connection; the process has ended, or will be killed."""
        self.state = "gone"
        if self.wire is not None:
            self.wire.close()
        self._descriptors.close()

    def kill(self, why: str) -> None:
        """Kill the process."""
        if self.process.returncode is None:
            log.error("relay %d (process %d) is killed: %s", self.number, self.process.pid, why)
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
