"""A relay, as the process that decides sees it: its process, and the connection to it."""

import contextlib
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import trio

from ichat.config.process_marks import RELAY_VARIABLE
from ichat.config.schema import Config
from ichat.program import own_command
from ichat.relays.adoption import Trying
from ichat.relays.link import whole
from ichat.relays.owner_talk import OwnerTalk
from ichat.relays.values import Frame, MonotonicNs, Note, SentAsk, SentOutcome, TalkError
from ichat.relays.wire import FrameWire, send_descriptors
from ichat.supervisor.launch import own_environment
from ichat.supervisor.orphans import AdoptedProcess

log = logging.getLogger(__name__)

ASKS_MAX = 2_000_000
PULSE_S = 1.0
LATE_S = 1.0
"""If this process itself is later than this by its own clock, no relay is blamed for a silence."""
START_S = 60.0
"""A relay that does not accept by then is killed."""
QUIET_S = 2.5
"""After this silence a relay does not count where others share new connections."""

RelayEnd = Literal["ended", "killed", "retired"]
RelayState = Literal["starting", "accepting", "retiring", "draining", "gone"]
"""`retiring`: it leaves new connections to other relays, and ends when it has none left."""


class RelayDesk:
    """Answers the frames of a relay's requests; see `Relays.desk_of`. This class answers none."""

    def receives(self, frame: Frame) -> None:
        """Called with each frame about requests, after a check of the order. Raises TalkError."""
        raise TalkError(f"A frame `{frame.kind}` is about no request.")

    def restore(self, trying: Trying, asked: SentAsk | None) -> None:
        """Called with each request that has a place at an endpoint by an earlier owner. `asked` is None for a copy."""

    def note_earlier(self, item: SentOutcome | Note, asked: SentAsk | None) -> None:
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
        self.connections = self.requests = self.cpu_ms = self.rss_bytes = 0
        self.since = self.heard_at = now
        self.build = ""
        """The digest of its program; see `build_id`."""
        self.adopted_state: RelayState = "starting"
        """Its state, as an adopted relay reports it."""
        self.lost_at: MonotonicNs | None = None
        """When it lost its last owner; None: it had none before, or does not say."""
        self.address = ""
        """The configured address of the listeners that it has handed over."""
        self.prepared = 0
        """The newest version of settings that it has prepared."""
        self.refusal = ""
        """Why it could not prepare the newest settings."""
        self.killed_for = ""
        """Why this process has killed it."""
        self.has_retired = False
        """Whether it has ended without a connection, after it had left its place."""
        self.drained = trio.Event()
        self.gone = trio.Event()
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

    def note_pulse(self, frame: Note, now: float) -> None:
        """Note a sign of its life. Raises TalkError."""
        self.heard_at = now
        self.connections, self.requests = whole(frame, "connections"), whole(frame, "requests")
        self.cpu_ms, self.rss_bytes = whole(frame, "cpu_ms"), whole(frame, "rss")

    def note_leaving(self, kind: str) -> None:
        """Note that it retires, so that another relay is started, or has no connection left: then it ends, too."""
        if kind == "drained":
            self.drained.set()
            if self.state == "retiring":
                self.send(Note("end"))
        elif self.state == "accepting":
            log.info("relay %d (process %d) retires", self.number, self.process.pid)
            self.state = "retiring"
            self.leaves_place.set()

    def settle(self, seq: int) -> None:
        """Have the relay forget its outcomes up to a number: no later owner needs them."""
        seq = min(seq, self.talk.received)
        if seq > self.talk.settled:
            self.send(Note("settled", 0, {"seq": seq}))

    def is_preparing(self, version: int) -> bool:
        """Whether it may still answer that it has prepared settings, or cannot."""
        return self.prepared < version and not self.refusal and self.state == "accepting"

    def is_peer(self, now: float) -> bool:
        """Whether new connections are shared with it: it accepts them, and was heard lately."""
        return self.state == "accepting" and now - self.heard_at <= QUIET_S

    def fault(self, now: float, silent_s: float) -> str:
        """Return why it must be killed; "" if it need not be. `silent_s` is how long it may be silent."""
        self.talk.unread_bytes = 0 if self.wire is None else self.wire.unread_bytes
        if self.talk.is_hung:
            return "it leaves frames unread"
        if self.state == "starting" and now - self.heard_at > START_S:
            return f"it has not begun within {START_S:g} s"
        is_read = self.wire is None or not self.wire.is_paused
        is_silent = is_read and self.state in ("accepting", "retiring") and now - self.heard_at > silent_s
        return f"it was silent for {silent_s:g} s" if is_silent else ""

    def meet(self, greeting: Note, now: float, now_ns: int) -> None:
        """Note the facts that an adopted relay reports about itself. Raises TalkError."""
        self.number, self.build = whole(greeting, "number"), str(greeting.content.get("build", ""))
        phase = greeting.content.get("phase")
        self.adopted_state = phase if phase in ("accepting", "retiring") else "starting"
        self.prepared = whole(greeting, "settings")
        lost = greeting.content.get("lost")
        self.lost_at = MonotonicNs(lost) if type(lost) is int else None
        self.since = now - max(0, now_ns - whole(greeting, "since")) / 1e9

    def pause(self) -> None:
        """Read no frame until `go_on`: asks and outcomes wait in the socket."""
        if self.wire is not None:
            self.wire.pause()

    def go_on(self, now: float) -> None:
        """Read again."""
        self.heard_at = now
        if self.wire is not None:
            self.wire.resume()

    def pass_on(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Send the relay descriptors, which stay open here, to hold open for workers; kill a relay that does not read.

        Otherwise some relays would have a worker's descriptors, and others would not.
        """
        if self.state != "gone":
            try:
                send_descriptors(self._descriptors, message, descriptors)
            except (BrokenPipeError, ConnectionResetError):
                pass  # it has ended, which others notice
            except OSError as error:
                self.kill(f"it accepts no descriptors: {error.strerror or error}")

    def close(self) -> None:
        """Close the connection, and wake all that wait for something of it: the process has ended."""
        self.has_retired = self.state == "retiring" and self.drained.is_set()
        self.state = "gone"
        for event in (self.gone, self.leaves_place, self.drained):
            event.set()
        if self.wire is not None:
            self.wire.close()
        self._descriptors.close()
        if isinstance(self.process, AdoptedProcess):
            self.process.close()

    @property
    def left_by(self) -> RelayEnd:
        """How it has left its place."""
        if self.state == "retiring" or self.has_retired:
            return "retired"
        return "killed" if self.killed_for else "ended"

    @property
    def end_in_words(self) -> str:
        """How its process has ended, after `relay 1 (process 2)`."""
        if self.has_retired:
            return "has ended: it has retired"
        if self.killed_for:
            return f"was killed: {self.killed_for}"
        code = self.process.returncode
        if code is None:
            return "has ended"
        return f"has ended by signal {signal.Signals(-code).name}" if code < 0 else f"has ended with code {code}"

    def kill(self, why: str) -> None:
        """Kill the process."""
        if self.process.returncode is None and self.state != "gone":
            log.error("relay %d (process %d) is killed: %s", self.number, self.process.pid, why)
            self.killed_for = why
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()


def send_pulses(relays: Iterable[RelayAtOwner], now: float) -> None:
    """Send each relay the means of those that accept connections and were heard lately."""
    running = [one for one in relays if one.state in ("accepting", "retiring")]
    peers = [one for one in running if one.is_peer(now)] or running
    connections, requests = [one.connections for one in peers], sum(one.requests for one in peers)
    for relay in running:
        relay.send(Note("pulse", 0, {
            "connections": sum(connections) / len(peers), "requests": requests / len(peers),
            "is_fewest": relay.connections <= min(connections),
        }))  # fmt: skip


def kill_faulty(relays: Iterable[RelayAtOwner], now: float, silent_s: float) -> None:
    """Kill the relays that do not read, do not begin, or were silent for this time."""
    for relay in relays:
        if why := relay.fault(now, silent_s):
            relay.kill(why)


async def start_relay(
    number: int, directory: str, config: Config, *, log_format: str, log_level: str
) -> tuple[RelayAtOwner, socket.socket]:
    """Start a relay's process; return it, and the connection for frames. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    frames, their_frames = socket.socketpair()
    with contextlib.ExitStack() as undo:
        undo.callback(ours.close)
        undo.callback(frames.close)
        with theirs, their_frames:
            process = await trio.lowlevel.open_process(
                [
                    *own_command(sys.executable), "relay", f"--state={directory}", f"--number={number}",
                    f"--log-format={log_format}", f"--log-level={log_level}",
                ],
                env={**own_environment(config), RELAY_VARIABLE: directory},
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
            relay = RelayAtOwner(number, process, ours, trio.current_time())
            send_descriptors(ours, {"kind": "frames"}, [their_frames.fileno()])
            undo.pop_all()
    return relay, frames


def pass_on_to(relays: Mapping[int, RelayAtOwner], message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Have all relays hold descriptors open, or close them."""
    for relay in relays.values():
        relay.pass_on(message, descriptors)
