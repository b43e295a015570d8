"""A relay, as the process that decides sees it: its process, and the connection to it."""

import contextlib
import logging
import socket
from collections.abc import Sequence
from typing import Literal

import attrs
import trio

from ichat.protocol.messages import Count
from ichat.relays.adoption import Trying
from ichat.relays.link import whole
from ichat.relays.owner_talk import OwnerTalk
from ichat.relays.values import Frame, Note, SentAsk, SentOutcome, TalkError
from ichat.relays.wire import FrameWire, send_descriptors
from ichat.supervisor.orphans import AdoptedProcess

log = logging.getLogger(__name__)

ASKS_MAX = 2_000_000
SILENT_S = 10.0

RelayState = Literal["starting", "accepting", "draining", "gone"]


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

    def restore(self, trying: Trying, asked: SentAsk | None) -> None:
        """Called with each request that has a place at an endpoint by an earlier owner. `asked` is None for a copy."""

    def note_earlier(self, item: SentOutcome | Note) -> None:
        """Called with each outcome that no ledger has; see `Adopted.outcomes`."""

    def end(self) -> None:
        """Called when the relay has ended: its requests have."""


class RelayAtOwner:
    """A relay's process, and the connection to it."""

    def __init__(
        self, number: int, process: trio.Process | AdoptedProcess, descriptors: socket.socket, now: float
    ) -> None:
        self.number = number
        self.process = process
        self.talk = OwnerTalk(ASKS_MAX)
        self.wire: FrameWire | None = None
        self.desk = RelayDesk()
        self.state: RelayState = "starting"
        self.connections = self.requests = 0
        self.since = self.heard_at = now
        self.accepts = True
        """Whether it accepts connections, or will: an adopted relay may be about to end."""
        self.build = ""
        """The digest of its program; see `build_id`."""
        self.prepared = 0
        """The newest version of settings that it has prepared."""
        self.refusal = ""
        """Why it could not prepare the newest settings."""
        self.drained = trio.Event()
        self.gone = trio.Event()
        self.leaves_place = trio.Event()
        """Set when another relay may be started for it: it has ended."""
        self._descriptors = descriptors

    def __repr__(self) -> str:
        return f"<RelayAtOwner {self.number}, process {self.process.pid}, {self.state}>"

    def send(self, frame: Frame) -> None:
        """Send a frame, in the order of frames. Raises TalkError."""
        if self.wire is not None and self.wire.is_open and not self.talk.is_over:
            self.talk.sends(frame)
            self.wire.send(frame)

    def is_preparing(self, version: int) -> bool:
        """Whether it may still answer that it has prepared settings, or cannot."""
        return self.prepared < version and not self.refusal and self.state == "accepting"

    def fault(self, now: float) -> str:
        """Return why it must be killed; "" if it need not be."""
        self.talk.unread_bytes = 0 if self.wire is None else self.wire.unread_bytes
        if self.talk.is_hung:
            return "it leaves frames unread"
        return f"it was silent for {SILENT_S:g} s" if now - self.heard_at > SILENT_S else ""

    def meet(self, greeting: Note, now: float, now_ns: int) -> None:
        """Note the facts that an adopted relay reports about itself. Raises TalkError."""
        self.number, self.build = whole(greeting, "number"), str(greeting.content.get("build", ""))
        self.accepts = greeting.content.get("accepts") is True
        self.prepared = whole(greeting, "settings")
        self.since = now - max(0, now_ns - whole(greeting, "since")) / 1e9

    def hand_over(self, kind: str, sockets: Sequence[socket.socket], address: str = "") -> None:
        """Send the relay descriptors, which stay open here. Raises OSError."""
        send_descriptors(self._descriptors, {"kind": kind, "address": address}, [one.fileno() for one in sockets])

    def close(self) -> None:
        """Close the connection; the process has ended, or will be killed."""
        self.state = "gone"
        if self.wire is not None:
            self.wire.close()
        self._descriptors.close()
        if isinstance(self.process, AdoptedProcess):
            self.process.close()

    def kill(self, why: str) -> None:
        """Kill the process."""
        if self.process.returncode is None and self.state != "gone":
            log.error("relay %d (process %d) is killed: %s", self.number, self.process.pid, why)
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
