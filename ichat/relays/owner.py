"""The relays of a gateway, as the process that decides starts, watches and ends them.

A relay that ends is started again, after a pause that grows while it ends soon. A relay that is silent is killed. A
relay that retires is replaced at once, and ends with its last connection.
Settings are put in force in all relays or in none.

Relays outlive this process. The next owner finds them by their sockets (`found_relays.py`), collects their reports
(`adopting.py`), and answers their requests then.
"""

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import trio

from ichat.config.schema import Config
from ichat.http.hub import Hub
from ichat.http.listeners import address_name
from ichat.observability.usage.rows import Marks
from ichat.relays.adopting import Adopting, places_of
from ichat.relays.figures import RelayFigures
from ichat.relays.link import hello
from ichat.relays.relay_at_owner import (
    LATE_S,
    PULSE_S,
    RelayAtOwner,
    RelayDesk,
    kill_faulty,
    pass_on_to,
    send_pulses,
    start_relay,
)
from ichat.relays.relay_places import RelayPlaces
from ichat.relays.relay_sockets import build_id
from ichat.relays.settings_in_force import SettingsInForce
from ichat.relays.values import Frame, MonotonicNs, Note
from ichat.relays.wire import FrameWire
from ichat.supervisor.kept import KeptDescriptors

log = logging.getLogger(__name__)

END_S = 5.0
"""How long a relay may need for its end, beside the streams of logs."""
KILL_S = 5.0
"""How long killed relays may need for their end."""


class Relays:
    """All relays of a gateway."""

    def __init__(
        self,
        hub: Hub,
        directory: str,
        config: Config,
        *,
        log_format: str,
        kept: KeptDescriptors,
        term: int = 1,
        marks: Callable[[], Marks] | None = None,
    ) -> None:
        """`directory` is the state directory, `term` the number of this start of a gateway with it.

        All relays hold the descriptors of `kept` open. `marks` returns those of the ledger; without a ledger each pulse
        settles all outcomes.
        """
        self._hub = hub
        self._directory = directory
        self._log_format = log_format
        self.term = term
        self._kept = kept
        self._accepting = trio.Event()
        """Set when the first relay accepts connections."""
        self._draining = trio.CancelScope()
        self._scope = trio.CancelScope()
        """Of `run`."""
        self._listeners: Sequence[socket.socket] = ()
        self._address = address_name(config.server_settings.host, config.server_settings.port)
        self.adopting = Adopting(directory, lambda: MonotonicNs(time.monotonic_ns()), marks or dict[str, int])
        self._has_ledger = marks is not None
        self._opened = trio.Event()
        self.relays: dict[int, RelayAtOwner] = {}
        """By their processes."""
        kept.changed.add(partial(pass_on_to, self.relays))
        self.settings = SettingsInForce(config, self.relays)
        self.figures = RelayFigures(self.relays)
        self._places = RelayPlaces(self.settings, self._start, self.figures)
        self._keepers: trio.Nursery
        """Of the tasks that wait for the ends of relays."""
        self.desk_of: Callable[[RelayAtOwner], RelayDesk] = lambda _relay: RelayDesk()

    def __repr__(self) -> str:
        return f"<Relays {[*self.relays.values()]}>"

    @property
    def pids(self) -> Mapping[int, str]:
        """The processes, which this object waits for, with their names."""
        return {pid: f"relay {relay.number}" for pid, relay in self.relays.items()}

    @property
    def lost_at(self) -> MonotonicNs | None:
        """When the relays that had accepted connections before this start lost their owner; None: there are none."""
        accepting = [relay for relay in self.relays.values() if relay.adopted_state == "accepting"]
        return min((relay.lost_at for relay in accepting if relay.lost_at is not None), default=None)

    async def find(self) -> list[socket.socket]:
        """Have the relays of earlier owners follow this process; return the listeners for the configured address."""
        listeners = await self.adopting.find(self.term, self._address)
        for relay in self.adopting.found:
            relay.give_kept(self._kept)
        return listeners

    async def run(
        self, listeners: Sequence[socket.socket], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Keep all relays running until `end`; `started` when those that were found have reported.

        Requests are answered from `open` on.
        """
        self._listeners = listeners
        async with trio.open_nursery() as nursery:
            self._scope = nursery.cancel_scope
            nursery.start_soon(self._pulse_forever)
            async with trio.open_nursery() as self._keepers:
                for relay, frames in self.adopting.begin():
                    self.relays[relay.process.pid] = relay
                    self._kept.send_all(relay.pass_on)
                    self._keepers.start_soon(self._wait_for, relay)
                    self._begin_talk(relay, frames)
                await self.adopting.collect()
                task_status.started()
                await self._opened.wait()
                places, leaving = places_of(self.relays.values(), self.settings.count, build_id(), self._address)
                for relay in leaving:
                    self.retire(relay)
                self._places.begin(self._keepers, places)
            nursery.cancel_scope.cancel()

    def reconfigure(self, config: Config) -> None:
        """Put the prepared settings in force; start missing relays, and have relays of too high numbers retire."""
        self.settings.put_in_force(config)
        for relay in self.relays.values():
            if relay.number > self.settings.count and relay.state == "accepting" and not self._places.is_over:
                self.retire(relay)
        self._places.fill()

    async def open(self) -> None:
        """Answer requests from now on, and start the relays that are missing; return when a relay accepts."""
        for relay in self.relays.values():
            relay.talk.open()
            relay.state, relay.heard_at = relay.adopted_state, trio.current_time()
            self.settings.follow(relay.prepared)
        for relay in self.relays.values():
            if relay.state == "accepting":
                self._accepting.set()
                self.settings.offer(relay)
            elif relay.state == "starting":
                relay.kill("it has not begun")
        self.adopting.end_all()
        self._opened.set()
        await self._accepting.wait()

    async def kill_all(self) -> None:
        """Kill all relays, and wait for their ends: no next owner will need them."""
        for relay in self.relays.values():
            relay.kill("its gateway ends")
        for relay in [*self.relays.values()]:
            await relay.process.wait()
            relay.close()

    async def _start(self, number: int) -> RelayAtOwner:
        """Start a process, and the talk with it. Raises OSError."""
        relay, frames = await start_relay(
            number, self._directory, self.settings.config,
            log_format=self._log_format, log_level=self.settings.now.log_level,
        )  # fmt: skip
        self.relays[relay.process.pid] = relay
        self._keepers.start_soon(self._wait_for, relay)
        if self._places.is_over:
            frames.close()
            relay.kill("its gateway ends")
        else:
            relay.pass_on({"kind": "listen", "address": self._address}, [one.fileno() for one in self._listeners])
            self._kept.send_all(relay.pass_on)
            self._begin_talk(relay, frames)
        return relay

    def _begin_talk(self, relay: RelayAtOwner, frames: socket.socket) -> None:
        """Greet a relay over the connection for frames."""
        relay.desk = self.desk_of(relay)

        def received(frame: Frame) -> None:
            has_effect = relay.talk.receives(frame)
            if self.adopting.has(relay):
                self.adopting.receive(relay, frame)
            elif isinstance(frame, Note):
                self._receive(relay, frame, has_effect=has_effect)
            else:
                relay.desk.receives(frame)

        def ended(why: str) -> None:
            if why:
                relay.kill(why)

        relay.wire = FrameWire(self._hub, frames, received, ended)
        relay.send(hello(self.term))

    async def _wait_for(self, relay: RelayAtOwner) -> None:
        """Wait until a relay has ended, and forget it."""
        await relay.process.wait()
        last = [] if relay.wire is None else [*relay.wire.rest()]
        has_place = not relay.leaves_place.is_set() and relay.number <= self.settings.count
        relay.close()
        del self.relays[relay.process.pid]
        self.figures.note_end(relay)
        self.settings.answered()
        self.adopting.end(relay, last)
        relay.desk.end()
        if not self._places.is_over or relay.has_retired:
            if not relay.has_retired:
                self.figures.note_crash(relay)
            level = logging.INFO if relay.has_retired else logging.ERROR
            more = "; it is started again" if has_place else ""
            log.log(level, "relay %d (process %d) %s%s", relay.number, relay.process.pid, relay.end_in_words, more)

    def hand_over(self) -> None:
        """Leave all relays to the next owner."""
        self._places.end()
        for relay in self.relays.values():
            relay.send(Note("bye"))
            relay.close()
        self._scope.cancel()

    def retire(self, relay: RelayAtOwner) -> None:
        """Have a relay leave new connections to others, and end after its last connection."""
        relay.send(Note("retire"))
        relay.note_leaving("retiring")
        self.settings.answered()

    async def drain(self) -> None:
        """Have all relays accept nothing new, and wait until they have no request left."""
        self._places.end()
        draining = [*self.relays.values()]
        for relay in draining:
            if relay.state in ("accepting", "retiring"):
                relay.state = "draining"
                relay.send(Note("drain"))
            else:
                relay.kill("it has not begun, and the gateway ends")
        longest = trio.current_time() + self.settings.config.timeouts.drain_s + END_S
        self._draining.deadline = min(self._draining.deadline, longest)
        with self._draining:
            for relay in draining:
                await relay.drained.wait()
        for relay in (one for one in draining if not one.drained.is_set()):
            relay.kill("it has not drained in time")

    def hurry(self) -> None:
        """Cut short a drain that is under way or will follow."""
        self._draining.deadline = min(self._draining.deadline, trio.current_time() + END_S)
        for relay in self.relays.values():
            if relay.state in ("accepting", "retiring", "draining"):
                relay.send(Note("hurry"))

    async def end(self) -> None:
        """End all relays; kill those that do not end within `END_S`."""
        self._places.end()
        ending = [*self.relays.values()]
        for relay in ending:
            relay.send(Note("end"))
        with trio.move_on_after(END_S):
            for relay in ending:
                await relay.gone.wait()
        for relay in ending:
            relay.kill("it has not ended in time")

    # Frames.

    def _receive(self, relay: RelayAtOwner, frame: Note, *, has_effect: bool) -> None:
        """Called with each note of a relay. Raises TalkError."""
        match frame:
            case Note("ready"):
                relay.talk.open()
                self.settings.offer(relay)
            case Note("prepared" | "cannot"):
                if self.settings.receive(relay, frame) and relay.state == "starting":
                    self._accept(relay)
            case Note("pulse"):
                relay.note_pulse(frame, trio.current_time())
            case Note("drained" | "retiring"):
                relay.note_leaving(frame.kind)
                self.settings.answered()
            case Note("hello" | "report"):
                pass
            case _ if has_effect:
                relay.desk.receives(frame)
            case _:
                pass

    def _accept(self, relay: RelayAtOwner) -> None:
        """Have a relay accept connections."""
        relay.send(Note("accept"))
        relay.state, relay.heard_at = "accepting", trio.current_time()
        log.info("relay %d accepts connections (process %d)", relay.number, relay.process.pid)
        self._accepting.set()
        if relay.number > self.settings.count:  # since another configuration is in force
            self.retire(relay)

    async def _pulse_forever(self) -> None:
        """Send each relay the means of all, each second, and kill a relay that is silent or does not read."""
        while True:
            due_at = trio.current_time() + PULSE_S
            await trio.sleep_until(due_at)
            now = trio.current_time()
            if now - due_at > LATE_S:
                for relay in self.relays.values():
                    relay.heard_at = now
            running = [relay for relay in self.relays.values() if not self.adopting.has(relay)]
            send_pulses(running, now)
            kill_faulty(running, now, self.settings.config.timeouts.relay_silent_s)
            if not self._has_ledger:
                self.settle(self.newest_outcomes())

    def newest_outcomes(self) -> Marks:
        """Return the number of the newest outcome of each relay that was counted, by the relay's identity."""
        return {one.talk.identity: one.talk.counted for one in self.relays.values() if one.talk.counted}

    def settle(self, marks: Marks) -> None:
        """Have relays forget the outcomes that are counted on disk."""
        for relay in self.relays.values():
            relay.settle(marks.get(relay.talk.identity, 0))
