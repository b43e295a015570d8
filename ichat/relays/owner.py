"""The relays of a gateway, as the process that decides starts, watches and ends them.

A relay that ends is started again, after a pause that grows while it ends soon. A relay that is silent is killed. A
relay that retires is replaced at once, and ends with its last connection.
Settings are put in force in all relays or in none.
"""

import collections
import contextlib
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import get_args

import trio
from prometheus_client import Metric

from ichat.config.command_line import own_command
from ichat.config.schema import Config
from ichat.http.hub import Hub
from ichat.observability.prometheus_families import family
from ichat.observability.usage.rows import Marks
from ichat.relays.link import hello, whole
from ichat.relays.relay_at_owner import RelayAtOwner, RelayDesk, RelayState, RelayView
from ichat.relays.settings import count_of
from ichat.relays.settings_in_force import SettingsInForce
from ichat.relays.values import Frame, Note, SentAsk, SentOutcome
from ichat.relays.wire import FrameWire
from ichat.supervisor.launch import own_environment

log = logging.getLogger(__name__)

PULSE_S = 1.0
LATE_S = 1.0
"""If this process itself is later than this by its own clock, no relay is blamed for a silence."""
PAUSE_FIRST_S, PAUSE_MAX_S = 0.1, 5.0
"""Before a relay that has ended is started again."""
LIVED_S = 10.0
"""After this life, the pause is the first again."""
END_S = 5.0
"""How long a relay may need for its end, beside the streams of logs."""
RELAY_VARIABLE = "ICHAT_RELAY"
"""In a relay's environment: the state directory of its gateway."""
TERM = 1
"""No relay outlives its owner yet, so that each has the first owner of its life."""


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
        has_ledger: bool = False,
    ) -> None:
        """`directory` is the state directory. `recorded` is called with each refusal of bytes that were no request.

        With a ledger outcomes are settled by `settle`, else with each pulse.
        """
        self._has_ledger = has_ledger
        self._hub = hub
        self._directory = directory
        self._log_format = log_format
        self._recorded = recorded
        self.count = count_of(config.server_settings.relays)
        self._accepting = trio.Event()
        """Set when the first relay accepts connections."""
        self._is_ending = False
        self._end = trio.Event()
        self._listeners: Sequence[socket.socket] = ()
        self.relays: dict[int, RelayAtOwner] = {}
        """By their processes."""
        self.settings = SettingsInForce(config, self.count, self.relays)
        self._restarts: dict[int, int] = {}
        self.desk_of: Callable[[RelayAtOwner], RelayDesk] = lambda _relay: RelayDesk()

    def __repr__(self) -> str:
        return f"<Relays {[*self.relays.values()]}>"

    @property
    def pids(self) -> Mapping[int, str]:
        """The processes, which this object waits for, with their names."""
        return {pid: f"relay {relay.number}" for pid, relay in self.relays.items()}

    def views(self) -> list[RelayView]:
        """Return the facts that operators see of each relay."""
        now = trio.current_time()
        return [
            RelayView(
                one.number, one.process.pid, one.state, one.connections, one.requests, round(now - one.since, 3),
                self._restarts.get(one.number, 0),
            )
            for one in sorted(self.relays.values(), key=lambda one: (one.number, one.since))
        ]  # fmt: skip

    def families(self) -> Iterator[Metric]:
        """Return the families for Prometheus."""
        states = collections.Counter(dict.fromkeys(get_args(RelayState), 0))
        states.update(relay.state for relay in self.relays.values())
        yield family("ichat_relays", states)
        yield family("ichat_relay_restarts", sum(self._restarts.values()))

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
                        keepers.start_soon(self._keep, number, keepers)
                    await self._accepting.wait()
                    task_status.started()
            finally:
                for relay in self.relays.values():
                    relay.kill("its gateway ends")
            nursery.cancel_scope.cancel()

    async def _keep(self, number: int, nursery: trio.Nursery) -> None:
        """Start a relay, and start it again whenever it has ended, or retires."""
        pause_s = PAUSE_FIRST_S
        while not self._is_ending:
            began_at = trio.current_time()
            try:
                relay = await self._start(number)
            except OSError as error:
                log.error("relay %d cannot be started: %s", number, error.strerror or error)
            else:
                nursery.start_soon(self._wait_for, relay)
                await relay.leaves_place.wait()
                if relay.state == "retiring":
                    self._restarts[number] = self._restarts.get(number, 0) + 1
                    continue
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
                        f"--log-format={self._log_format}", f"--log-level={self.settings.now.log_level}",
                    ],
                    env={**own_environment(self.settings.config), RELAY_VARIABLE: self._directory},
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )  # fmt: skip
                relay = RelayAtOwner(number, process, ours, trio.current_time())
                self.relays[process.pid] = relay
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
            has_retired = relay.state == "retiring" and relay.drained.is_set()
            relay.close()
            del self.relays[relay.process.pid]
            relay.leaves_place.set()
            relay.drained.set()
            self.settings.answered()
            relay.desk.end()
        if has_retired:
            log.info("relay %d (process %d) has ended: it has retired", relay.number, relay.process.pid)
        elif not self._is_ending:
            code = relay.process.returncode
            how = f"by signal {signal.Signals(-code).name}" if code and code < 0 else f"with code {code}"
            log.error("relay %d (process %d) has ended %s: it is started again", relay.number, relay.process.pid, how)

    def retire(self, relay: RelayAtOwner) -> None:
        """Have a relay leave new connections to others, and end after its last connection. Another replaces it."""
        relay.send(Note("retire"))
        self._replace(relay)

    def _replace(self, relay: RelayAtOwner) -> None:
        """Start another relay, since this relay retires."""
        if relay.state == "accepting":
            log.info("relay %d (process %d) retires, and is replaced", relay.number, relay.process.pid)
            relay.state = "retiring"
            relay.leaves_place.set()
            self.settings.answered()

    async def drain(self) -> None:
        """Have all relays accept nothing new, and wait until they have no request left."""
        self._is_ending = True
        draining = [*self.relays.values()]
        for relay in draining:
            if relay.state in ("accepting", "retiring"):
                relay.state = "draining"
                relay.send(Note("drain"))
            else:
                relay.kill("it has not begun, and the gateway ends")
        for relay in draining:
            await relay.drained.wait()

    def hurry(self) -> None:
        """Cut short a drain that is under way or will follow."""
        for relay in self.relays.values():
            if relay.state in ("accepting", "retiring", "draining"):
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
            case SentAsk() | SentOutcome():
                relay.desk.receives(frame)
            case Note("ready"):
                relay.talk.open()
                self.settings.offer(relay)
            case Note("prepared" | "cannot"):
                if self.settings.receive(relay, frame) and relay.state == "starting":
                    self._accept(relay)
            case Note("pulse"):
                self._note_pulse(relay, frame)
            case Note("record"):
                self._recorded(frame)
            case Note("drained" | "retiring"):
                self._note_leaving(relay, frame.kind)
            case Note("hello" | "report"):
                pass
            case _:
                if has_effect:
                    relay.desk.receives(frame)

    def _note_leaving(self, relay: RelayAtOwner, kind: str) -> None:
        """Note that a relay retires by itself, or has no connection left; end it then, if it retires."""
        if kind == "retiring":
            self._replace(relay)
            return
        relay.drained.set()
        if relay.state == "retiring":
            relay.send(Note("end"))

    def _accept(self, relay: RelayAtOwner) -> None:
        """Have a relay accept connections."""
        relay.send(Note("accept"))
        relay.state, relay.heard_at = "accepting", trio.current_time()
        log.info("relay %d accepts connections (process %d)", relay.number, relay.process.pid)
        self._accepting.set()

    def _note_pulse(self, relay: RelayAtOwner, frame: Note) -> None:
        relay.heard_at = trio.current_time()
        relay.connections, relay.requests = whole(frame, "connections"), whole(frame, "requests")

    async def _pulse_forever(self) -> None:
        """Send each relay the means of all, each second, and kill a relay that is silent or does not read."""
        while True:
            due_at = trio.current_time() + PULSE_S
            await trio.sleep_until(due_at)
            now = trio.current_time()
            relays = [one for one in self.relays.values() if one.state in ("accepting", "retiring")]
            peers = [one for one in relays if one.state == "accepting"] or relays
            if now - due_at > LATE_S:
                for relay in self.relays.values():
                    relay.heard_at = now
            for relay in relays:
                self._send_pulse(relay, peers)
                if why := relay.fault(now):
                    relay.kill(why)

    def _send_pulse(self, relay: RelayAtOwner, peers: Sequence[RelayAtOwner]) -> None:
        """Send a relay the means of all that accept connections."""
        connections, requests = [one.connections for one in peers], sum(one.requests for one in peers)
        relay.send(Note("pulse", 0, {
            "connections": sum(connections) / len(peers), "requests": requests / len(peers),
            "is_fewest": relay.connections == min(connections),
        }))  # fmt: skip
        if not self._has_ledger:
            relay.settle(relay.talk.received)

    # Outcomes: those that are counted, and those that are counted on disk.

    def newest_outcomes(self) -> Marks:
        """Return the number of the newest outcome of each relay that was counted, by the relay's identity."""
        talks = [relay.talk for relay in self.relays.values()]
        return {talk.identity: talk.counted for talk in talks if talk.identity and talk.counted}

    def settle(self, marks: Marks) -> None:
        """Have relays forget the outcomes that are counted on disk."""
        for relay in self.relays.values():
            relay.settle(marks.get(relay.talk.identity, 0))

    # Settings: in all relays, or in none.

    async def prepare(self, config: Config) -> None:
        """Have all relays prepare another configuration; see `SettingsInForce`. Raises Exit 64."""
        await self.settings.prepare(config)

    def reconfigure(self, config: Config) -> None:
        """Put the prepared settings in force."""
        self.settings.put_in_force(config)
