"""The relays of a gateway, as the process that decides starts, watches and ends them.

A relay that ends is started again, after a pause that grows while it ends soon. A relay that is silent is killed.
Settings are put in force in all relays or in none.
"""

import contextlib
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import attrs
import trio

from ichat.config.command_line import own_command
from ichat.config.schema import Config
from ichat.errors import EXIT_USAGE, Exit
from ichat.http.hub import Hub
from ichat.protocol.messages import Count
from ichat.relays.link import hello, whole
from ichat.relays.owner_talk import OwnerTalk
from ichat.relays.settings import RelaySettings, count_of
from ichat.relays.values import Frame, Note, TalkError
from ichat.relays.wire import FrameWire, send_descriptors
from ichat.supervisor.launch import own_environment

log = logging.getLogger(__name__)

PULSE_S = 1.0
LATE_S = 1.0
"""If this process itself is later than this by its own clock, no relay is blamed for a silence."""
SILENT_S = 10.0
PREPARE_S = 5.0
"""How long relays may need for other settings."""
PAUSE_FIRST_S, PAUSE_MAX_S = 0.1, 5.0
"""Before a relay that has ended is started again."""
LIVED_S = 10.0
"""After this life, the pause is the first again."""
END_S = 5.0
"""How long a relay may need to end after it was told to, beside the streams of logs."""
ASKS_MAX = 2_000_000
RELAY_VARIABLE = "ICHAT_RELAY"
"""In a relay's environment: the state directory of its gateway."""
TERM = 1
"""No relay outlives its owner yet, so that each has the first owner of its life."""

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
    """Answers the frames of a relay's requests; see `Relays.desk_of`. This one answers none."""

    def receives(self, frame: Frame) -> None:
        """Called with each frame about a request, whose order was checked. Raises TalkError."""
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
        self._descriptors = descriptors

    def __repr__(self) -> str:
        return f"<RelayAtOwner {self.number}, process {self.process.pid}, {self.state}>"

    def send(self, frame: Frame) -> None:
        """Send a frame, in the order of frames. Raises TalkError."""
        if self.wire is not None and self.wire.is_open and not self.talk.is_over:
            self.talk.sends(frame)
            self.wire.send(frame)

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


class Relays:
    """All relays of a gateway."""

    def __init__(
        self,
        hub: Hub,
        directory: str,
        config: Config,
        *,
        log_format: str,
        recorded: Callable[[Note], None],
    ) -> None:
        """`directory` is the state directory. `recorded` is called with each refusal of what was no request."""
        self._hub = hub
        self._directory = directory
        self._config = config
        self._log_format = log_format
        self._recorded = recorded
        self.count = count_of(config.server_settings.relays)
        self.version = 1
        """Of the settings in force."""
        self._settings = RelaySettings.of(config, self.count)
        self._offered: tuple[int, RelaySettings] | None = None
        self._answered = trio.Event()
        self._accepting = trio.Event()
        """Set when the first relay accepts connections."""
        self._is_ending = False
        self._end = trio.Event()
        self._listeners: Sequence[socket.socket] = ()
        self.relays: dict[int, RelayAtOwner] = {}
        """By their numbers."""
        self._restarts: dict[int, int] = {}
        self.desk_of: Callable[[RelayAtOwner], RelayDesk] = lambda _relay: RelayDesk()

    def __repr__(self) -> str:
        return f"<Relays {[*self.relays.values()]}>"

    @property
    def pids(self) -> Mapping[int, str]:
        """The processes, which this object waits for, with their names."""
        return {relay.process.pid: f"relay {number}" for number, relay in self.relays.items()}

    def views(self) -> list[RelayView]:
        """Return the facts that operators see of each relay."""
        now = trio.current_time()
        return [
            RelayView(
                one.number, one.process.pid, one.state, one.connections, one.requests, round(now - one.since, 3),
                self._restarts.get(one.number, 0),
            )
            for _, one in sorted(self.relays.items())
        ]  # fmt: skip

    # Life.

    async def run(
        self, listeners: Sequence[socket.socket], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Keep all relays running until `end`; `started` when the first of them accepts connections."""
        self._listeners = listeners
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._pulse_forever)
            try:
                async with trio.open_nursery() as keepers:
                    for number in range(1, self.count + 1):
                        keepers.start_soon(self._keep, number)
                    await self._accepting.wait()
                    task_status.started()
            finally:
                for relay in self.relays.values():
                    relay.kill("its gateway ends")
            nursery.cancel_scope.cancel()

    async def _keep(self, number: int) -> None:
        """Start a relay, and start it again whenever it has ended."""
        pause_s = PAUSE_FIRST_S
        while not self._is_ending:
            began_at = trio.current_time()
            try:
                relay = await self._start(number)
            except OSError as error:
                log.error("relay %d cannot be started: %s", number, error.strerror or error)
            else:
                await self._wait_for(relay)
            if self._is_ending:
                return
            if trio.current_time() - began_at > LIVED_S:
                pause_s = PAUSE_FIRST_S
            with trio.move_on_after(pause_s):
                await self._end.wait()
            pause_s = min(PAUSE_MAX_S, 2 * pause_s)
            self._restarts[number] = self._restarts.get(number, 0) + 1

    async def _start(self, number: int) -> RelayAtOwner:
        """Start a process, and the talk with it. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        frames, their_frames = socket.socketpair()
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            undo.callback(frames.close)
            with theirs, their_frames:
                process = await trio.lowlevel.open_process(
                    [
                        *own_command(sys.executable), "relay", f"--state={self._directory}", f"--number={number}",
                        f"--log-format={self._log_format}", f"--log-level={self._settings.log_level}",
                    ],
                    env={**own_environment(self._config), RELAY_VARIABLE: self._directory},
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )  # fmt: skip
                relay = RelayAtOwner(number, process, ours, trio.current_time())
                self.relays[number] = relay
                undo.pop_all()
                relay.hand_over("frames", [their_frames])
            relay.hand_over("listen", self._listeners)
        relay.desk = self.desk_of(relay)

        def received(frame: Frame) -> None:
            self._receive(relay, frame)

        def ended(why: str) -> None:
            if why:
                relay.kill(why)

        relay.wire = FrameWire(self._hub, frames, received, ended)
        relay.send(hello(TERM))
        return relay

    async def _wait_for(self, relay: RelayAtOwner) -> None:
        """Wait until a relay has ended, and forget it."""
        try:
            await relay.process.wait()
        finally:
            if relay.process.returncode is None:
                relay.kill("its gateway ends")
                with trio.CancelScope(shield=True):
                    await relay.process.wait()
            relay.close()
            del self.relays[relay.number]
            relay.drained.set()
            self._answered.set()
            relay.desk.end()
        if not self._is_ending:
            code = relay.process.returncode
            how = f"by signal {signal.Signals(-code).name}" if code and code < 0 else f"with code {code}"
            log.error("relay %d (process %d) has ended %s: it is started again", relay.number, relay.process.pid, how)

    async def drain(self) -> None:
        """Have all relays accept nothing new, and wait until they have no request left."""
        self._is_ending = True
        draining = [*self.relays.values()]
        for relay in draining:
            if relay.state == "accepting":
                relay.state = "draining"
                relay.send(Note("drain"))
            else:
                relay.kill("it has not begun, and the gateway ends")
        for relay in draining:
            await relay.drained.wait()

    def hurry(self) -> None:
        """Cut short a drain that is under way or will follow."""
        for relay in self.relays.values():
            if relay.state in ("accepting", "draining"):
                relay.send(Note("hurry"))

    async def end(self) -> None:
        """End all relays; kill those that do not end within `END_S`."""
        self._is_ending = True
        self._end.set()
        ending = [*self.relays.values()]
        for relay in ending:
            relay.send(Note("end"))
        with trio.move_on_after(END_S):
            for relay in ending:
                await relay.process.wait()
        for relay in ending:
            relay.kill("it has not ended in time")

    # Frames.

    def _receive(self, relay: RelayAtOwner, frame: Frame) -> None:
        """Called with each frame of a relay. Raises TalkError."""
        has_effect = relay.talk.receives(frame)
        match frame:
            case Note("ready"):
                relay.talk.open()
                self._offer(relay, self.version, self._settings)
            case Note("prepared"):
                self._note_prepared(relay, whole(frame, "version"))
            case Note("cannot"):
                self._note_refusal(relay, str(frame.content.get("why", "")))
            case Note("pulse"):
                self._note_pulse(relay, frame)
            case Note("record"):
                self._recorded(frame)
            case Note("drained"):
                relay.drained.set()
            case Note("hello" | "report" | "sums"):
                pass
            case _ if has_effect:
                relay.desk.receives(frame)
            case _:
                pass

    def _note_pulse(self, relay: RelayAtOwner, frame: Note) -> None:
        relay.heard_at = trio.current_time()
        relay.connections, relay.requests = whole(frame, "connections"), whole(frame, "requests")

    async def _pulse_forever(self) -> None:
        """Send each relay the means of all, each second, and kill a relay that is silent or does not read."""
        while True:
            due_at = trio.current_time() + PULSE_S
            await trio.sleep_until(due_at)
            now = trio.current_time()
            relays = [one for one in self.relays.values() if one.state == "accepting"]
            if now - due_at > LATE_S:
                for relay in self.relays.values():
                    relay.heard_at = now
            if not relays:
                continue
            connections = [one.connections for one in relays]
            fewest, mean = min(connections), sum(connections) / len(relays)
            requests = sum(one.requests for one in relays) / len(relays)
            for relay in relays:
                is_fewest = relay.connections == fewest
                relay.send(Note("pulse", 0, {"connections": mean, "requests": requests, "is_fewest": is_fewest}))
                relay.send(Note("settled", 0, {"seq": relay.talk.received}))
                relay.talk.unread_bytes = 0 if relay.wire is None else relay.wire.unread_bytes
                if relay.talk.is_hung:
                    relay.kill("it does not read what it is sent")
                elif now - relay.heard_at > SILENT_S:
                    relay.kill(f"it was silent for {SILENT_S:g} s")

    # Settings: in all relays, or in none.

    async def prepare(self, config: Config) -> None:
        """Have all relays prepare the settings of another configuration. Raises Exit 64 if one of them cannot.

        `reconfigure` must follow, or `forget`.
        """
        self._offered = version, settings = self.version + 1, RelaySettings.of(config, self.count)
        asked = [relay for relay in self.relays.values() if relay.state == "accepting"]
        for relay in asked:
            relay.refusal = ""
            self._offer(relay, version, settings)
        with trio.move_on_after(PREPARE_S):
            while any(one.prepared < version and not one.refusal and one.state == "accepting" for one in asked):
                self._answered = trio.Event()
                await self._answered.wait()
        if refusal := next((one.refusal for one in asked if one.refusal), ""):
            self.forget()
            raise Exit(EXIT_USAGE, refusal)
        for relay in asked:
            if relay.prepared < version and relay.state == "accepting":
                relay.kill(f"it has not prepared other settings within {PREPARE_S:g} s")

    def forget(self) -> None:
        """Drop the settings that were prepared."""
        if self._offered is None:
            return
        version, _ = self._offered
        self._offered = None
        for relay in self.relays.values():
            if relay.state == "accepting" and relay.talk.offered == version:
                relay.send(Note("forget", 0, {"version": version}))

    def reconfigure(self, config: Config) -> None:
        """Put the prepared settings in force, in the same moment as the rest of the configuration."""
        if self._offered is None:
            return
        self.version, self._settings = self._offered
        self._offered, self._config = None, config
        for relay in self.relays.values():
            if relay.prepared == self.version:
                relay.send(Note("commit", 0, {"version": self.version}))

    def _offer(self, relay: RelayAtOwner, version: int, settings: RelaySettings) -> None:
        relay.send(Note("settings", 0, {"version": version, "settings": settings.content()}))

    def _note_prepared(self, relay: RelayAtOwner, version: int) -> None:
        relay.prepared = version
        self._answered.set()
        if self._offered is not None and version == self._offered[0]:
            return
        relay.send(Note("commit", 0, {"version": version}))
        if version < self.version:  # they have changed meanwhile
            self._offer(relay, self.version, self._settings)
        elif relay.state == "starting":
            relay.send(Note("accept"))
            relay.state = "accepting"
            relay.heard_at = trio.current_time()
            log.info("relay %d accepts connections (process %d)", relay.number, relay.process.pid)
            self._accepting.set()

    def _note_refusal(self, relay: RelayAtOwner, why: str) -> None:
        relay.refusal = why or "A relay cannot use the configuration."
        self._answered.set()
        if relay.state == "starting":
            relay.kill(why)
