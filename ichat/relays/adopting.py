"""The owner's first meeting with the relays of earlier owners: until each of them has reported, or has ended."""

import contextlib
import logging
import socket
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping

import trio

from ichat.listeners import Listeners
from ichat.relays.adoption import Adopted, Adoption
from ichat.relays.found_relays import FoundRelay, find_relays, first_listeners
from ichat.relays.relay_at_owner import RelayAtOwner
from ichat.relays.values import Frame, FrameError, MonotonicNs, Note, SentOutcome, TalkError

log = logging.getLogger(__name__)

LAST_NOTES = ("record", "sums", "told")
"""The notes that count after the end of a relay: its refusals, and what its requests have done."""
LOOK_S = 0.25
LATE_S = 1.0
"""If this process itself is later than this by its own clock, no relay is blamed for its silence."""


class Adopting:
    """The relays of earlier owners, from the search for them to the first decision."""

    def __init__(
        self, directory: str, now: Callable[[], MonotonicNs], marks: Callable[[], Mapping[str, int]] = dict[str, int]
    ) -> None:
        """`directory` is the state directory. `marks` returns the ledger's outcomes, by the identities of relays."""
        self._directory = directory
        self._now = now
        self._read_marks = marks
        self.found: list[FoundRelay] = []
        """Until `begin`."""
        self._relays: dict[str, RelayAtOwner] = {}
        """By their processes, until `end_all`."""
        self._identities: Mapping[str, int] = {}
        self._marks: dict[str, int] = {}
        """By the names of relays: an identity is known from the relay's `hello` on."""
        self._adoption = Adoption((), {}, now())
        self._adopted: Adopted | None = None
        self._late: list[tuple[RelayAtOwner, Frame]] = []
        """Outcomes and notes of relays that have reported and ended: until the requests are restored."""
        self._changed: Listeners[[]] = Listeners()

    def __repr__(self) -> str:
        return f"<Adopting {self._adoption!r}>"

    async def find(self, term: int, address: str) -> list[socket.socket]:
        """Have the relays of earlier owners follow the owner of this term; return the listeners for an address."""
        self.found = await find_relays(self._directory, term)
        return first_listeners(self.found, address)

    def begin(self) -> Iterator[tuple[RelayAtOwner, socket.socket]]:
        """Expect a report of each relay that was found; yield the relays, each with its connection for frames."""
        found, self.found = self.found, []
        now = trio.current_time()
        relays = [RelayAtOwner(0, relay.process, relay.descriptors, now) for relay in found]
        self._relays = {_name_of(relay): relay for relay in relays}
        self._identities = self._read_marks()
        self._adoption = Adoption(self._relays, self._marks, self._now())
        for relay, given in zip(relays, found, strict=True):
            relay.address = given.address
            yield relay, given.frames

    def has(self, relay: RelayAtOwner) -> bool:
        """Return whether this relay reports, or has reported."""
        return bool(self._relays) and _name_of(relay) in self._relays

    def receive(self, relay: RelayAtOwner, frame: Frame) -> None:
        """Note a frame of a report. Raises TalkError."""
        name = _name_of(relay)
        if isinstance(frame, Note) and frame.kind == "hello":
            relay.meet(frame, trio.current_time(), self._now())
            self._marks[name] = self._identities.get(relay.talk.identity, 0)
            return
        self._adoption.receive(name, frame)
        if frame.kind == "ready":
            if relay.wire is not None:
                relay.wire.pause()
            self._changed()

    def end(self, relay: RelayAtOwner, last: Iterable[Frame]) -> None:
        """Note that a relay has ended. Of its `last` frames, its report, outcomes and `LAST_NOTES` count."""
        with _killed_by_errors(relay):
            for frame in last:
                self._receive_last(relay, frame)
        self._adoption.end(_name_of(relay))
        self._changed()

    def _receive_last(self, relay: RelayAtOwner, frame: Frame) -> None:
        """Use a frame of a relay that has ended: its clients have gone, so nothing is answered. Raises TalkError."""
        if self._adoption.expects(_name_of(relay)):
            relay.talk.receives(frame)
            self.receive(relay, frame)
        elif isinstance(frame, SentOutcome) or frame.kind in LAST_NOTES:
            if not relay.talk.may_read:
                relay.talk.open()
            relay.talk.receives(frame)
            if self.has(relay) and self._adopted is None:
                self._late.append((relay, frame))
            else:
                relay.desk.receives(frame)

    async def collect(self) -> None:
        """Wait until all have reported, and restore their requests; kill those that do not report in time."""
        due_at = trio.current_time() + LOOK_S
        while not self._adoption.is_complete:
            with trio.move_on_at(due_at):
                await self._changed.wait()
            late_s = trio.current_time() - due_at
            if late_s < 0:
                continue
            due_at = trio.current_time() + LOOK_S
            if late_s > LATE_S:
                self._adoption.begin_anew(self._now())
            for name in self._adoption.overdue(self._now()):
                self._relays[name].kill("it has not reported in time")
        self._adopted = self._adoption.result()
        self._restore(self._adopted)

    def _restore(self, adopted: Adopted) -> None:
        """Have the desks of all relays know the reported requests, and their ends."""
        for name, trying in (*adopted.trying, *adopted.lost):
            with _killed_by_errors(self._relays[name]) as relay:
                relay.desk.restore(trying, adopted.under_way.get((name, trying.number)))
        for name, outcome in adopted.outcomes:
            with _killed_by_errors(self._relays[name]) as relay:
                relay.desk.note_earlier(outcome, adopted.ended.get((name, outcome.number)))
        for relay, frame in self._late:
            with _killed_by_errors(relay):
                relay.desk.receives(frame)
        for relay in self._relays.values():
            relay.talk.note_counted()
            if relay.state == "gone":
                relay.desk.end()
        if self._relays:
            log.info("adopted the relays of an earlier start, with %d requests under way", len(adopted.trying))

    @property
    def windows(self) -> Mapping[tuple[int, str], tuple[int, int]] | None:
        """The requests and tokens of the last minute, by second and key; None if no relay is there to say so."""
        is_known = any(relay.state != "gone" for relay in self._relays.values())
        return self._adopted.windows if is_known and self._adopted is not None else None

    def end_all(self) -> None:
        """Answer the requests that wait, in the order of their times, and all later frames."""
        relays, self._relays, adopted = self._relays, {}, self._adopted
        for name, asked in () if adopted is None else adopted.waiting:
            with _killed_by_errors(relays[name]) as relay:
                if relay.state != "gone":
                    relay.desk.receives(asked)
        for name, seq in () if adopted is None else adopted.skipped.items():
            with _killed_by_errors(relays[name]) as relay:
                relay.settle(seq)
        for relay in relays.values():
            if relay.wire is not None:
                relay.wire.resume()


def places_of(
    relays: Iterable[RelayAtOwner], count: int, build: str, address: str
) -> tuple[dict[int, RelayAtOwner], list[RelayAtOwner]]:
    """Return the relays that stay, by their numbers, and those that must retire.

    The oldest of a number stays if it accepts from this address and runs this program.
    """
    accepting = sorted((relay for relay in relays if relay.state == "accepting"), key=lambda relay: relay.since)
    places: dict[int, RelayAtOwner] = {}
    for relay in accepting:
        if (relay.build, relay.address) == (build, address) and 1 <= relay.number <= count:
            places.setdefault(relay.number, relay)
    return places, [relay for relay in accepting if places.get(relay.number) is not relay]


def _name_of(relay: RelayAtOwner) -> str:
    return str(relay.process.pid)


@contextlib.contextmanager
def _killed_by_errors(relay: RelayAtOwner) -> Generator[RelayAtOwner]:
    """Kill a relay if its report cannot be used: this process must start with the others."""
    try:
        yield relay
    except (TalkError, FrameError) as error:
        relay.kill(str(error))
