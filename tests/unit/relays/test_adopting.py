"""The owner's first meeting with relays: what their reports and their ends mean for its requests."""

import socket
import types

import pytest

from ichat.proxy.steps import Outcome
from ichat.relays.adopting import Adopting
from ichat.relays.link import hello
from ichat.relays.relay_at_owner import RelayDesk
from ichat.relays.values import (
    ENDED,
    UNDER_WAY,
    FrameError,
    MonotonicNs,
    Note,
    SentAsk,
    SentOutcome,
    TalkError,
)

S = 1_000_000_000
ABOUT = {"number": 1, "since": 1, "phase": "accepting"}


class Process:
    """A process that can be killed."""

    returncode = None

    def __init__(self, pid):
        self.pid = pid

    def kill(self):
        self.returncode = -9


class Wire:
    """A connection that keeps what is sent, and may be too small for some kinds of frames."""

    is_open = True

    def __init__(self):
        self.sent, self.refuses = [], ""

    def send(self, frame):
        if frame.kind == self.refuses:
            raise FrameError("It is too large.")
        self.sent.append(frame)

    def pause(self):
        self.sent.append(Note("paused"))

    def resume(self):
        self.sent.append(Note("resumed"))

    def close(self):
        self.is_open = False


class Desk(RelayDesk):
    """Notes what it is told, and refuses one thing."""

    def __init__(self, refuses):
        self.told, self.refuses = [], refuses

    def _note(self, *what):
        self.told.append(what)
        if self.refuses == what[0]:
            raise TalkError("It is damaged.")

    def receives(self, frame):
        self._note("receives", frame.kind, frame.number)

    def restore(self, trying, asked):
        self._note("restore", trying.number, None if asked is None else asked.id)

    def note_earlier(self, item, asked):
        self._note("note_earlier", item.number, None if asked is None else asked.id)

    def end(self):
        self._note("end")


def ask(number, bits=0):
    return SentAsk(number, MonotonicNs(number), f"id{number}", "m", b"/v1/completions", bits=bits)


def ended(number, seq):
    return SentOutcome(number, 1, seq, Outcome("answered", "w"), key="k", model="m")


TRYING = [[1, 1, "w", "k", "m"], [2, 1, "w", "k", "m"]]
REPORT = (
    Note("report", 0, {"trying": TRYING}), ask(3, ENDED), ended(3, 2), ask(4), ask(1, UNDER_WAY), ask(2, UNDER_WAY),
    Note("ready"),
)  # fmt: skip


class Site:
    """Relays that were found; those of the first process refuse one thing."""

    def __init__(self, refuses=""):
        self.adopting, self.sockets = Adopting("", lambda: MonotonicNs(S), lambda: {"id8": 1}), []
        for pid in (8, 9):
            self.sockets.append(socket.socket())
            found = types.SimpleNamespace(process=Process(pid), descriptors=self.sockets[-1], frames=None, address="")
            self.adopting.found.append(found)
        self.relays = [relay for relay, _ in self.adopting.begin()]
        for relay in self.relays:
            relay.wire, relay.desk = Wire(), Desk(refuses if relay.process.pid == 8 else "")
            relay.talk.sends(hello(2))
            about = {**ABOUT, "identity": f"id{relay.process.pid}"}
            self.hear(relay, hello(1, about=about))

    def hear(self, relay, *frames):
        for frame in frames:
            relay.talk.receives(frame)
            self.adopting.receive(relay, frame)

    def end(self, relay, *last):
        """The process of a relay has ended, and these frames were not read; see `Relays`."""
        relay.close()
        self.adopting.end(relay, last)
        relay.desk.end()

    def open(self):
        """Answer requests, as `Relays.open` does."""
        for relay in self.relays:
            if relay.state != "gone":
                relay.talk.open()
        self.adopting.end_all()

    def close(self):
        for one in self.sockets:
            one.close()


@pytest.fixture
def site():
    """Return sites that are closed at the end."""
    made = []

    def make(refuses=""):
        made.append(Site(refuses))
        return made[-1]

    yield make
    for one in made:
        one.close()


WHOLE = [
    ("restore", 1, "id1"), ("restore", 2, "id2"), ("note_earlier", 3, "id3"), ("receives", "ask", 4),
]  # fmt: skip


@pytest.mark.parametrize("refuses", ["", "restore", "note_earlier", "receives", "settled"])
async def test_a_report_that_cannot_be_used_ends_its_relay_and_not_the_start(site, refuses):
    """The owner starts with the other relays: otherwise each next start would end in the same way."""
    found = site(refuses)
    bad, good = found.relays
    bad.wire.refuses = refuses
    for relay in found.relays:
        skipped = (ended(9, 1),) if relay is bad else ()
        found.hear(relay, *REPORT[:1], *skipped, *REPORT[1:])
    await found.adopting.collect()
    found.open()
    assert good.desk.told == WHOLE
    assert good.process.returncode is None
    assert bad.process.returncode == (-9 if refuses else None)
    assert {relay.wire.sent[-1].kind for relay in found.relays} == {"resumed"}


@pytest.mark.parametrize("count", range(1, len(REPORT) + 1))
async def test_requests_of_a_relay_that_ends_during_its_report_are_lost(site, count):
    """Their places are taken for a moment and freed by the end of the desk, which records them."""
    found = site()
    bad, good = found.relays
    found.hear(bad, *REPORT[:count])
    found.end(bad)
    found.hear(good, *REPORT)
    await found.adopting.collect()
    found.open()
    asks = {frame.number for frame in REPORT[:count] if isinstance(frame, SentAsk) and frame.bits & UNDER_WAY}
    restored = [("restore", number, f"id{number}" if number in asks else None) for number in (1, 2)]
    assert bad.desk.told[1:] == [*restored, *(WHOLE[2:3] if count >= 3 else ()), ("end",)]
    assert good.desk.told == WHOLE


LATE = ask(7), Note("leave", 4), Note("told"), ended(2, 3), ended(1, 4), Note("pulse"), Note("record"), Note("sums")
COUNTED = [
    ("receives", kind, number)
    for kind, number in (("told", 0), ("outcome", 2), ("outcome", 1), ("record", 0), ("sums", 0))
]


@pytest.mark.parametrize("moment", ["report", "collect", "open", "served"])
@pytest.mark.parametrize("count", range(len(REPORT) + 1))
async def test_frames_that_a_relay_had_sent_before_its_end_are_read(site, moment, count):
    """Whenever it ends, the rest of its report, its outcomes and its records count, and nothing is answered."""
    found = site()
    bad, good = found.relays
    found.hear(bad, *REPORT[: count if moment == "report" else len(REPORT)])
    if moment == "report":
        found.end(bad, *REPORT[count:], *LATE)
    found.hear(good, *REPORT)
    if moment == "collect":
        found.end(bad, *LATE)
    await found.adopting.collect()
    if moment == "open":
        found.end(bad, *LATE)
    found.open()
    if moment == "served":
        found.end(bad, *LATE)
    told = [one for one in bad.desk.told if one != ("end",)]
    assert told == [*WHOLE[: 4 if moment == "served" else 3], *COUNTED]
    assert bad.desk.told[-1] == ("end",)
    assert good.desk.told == WHOLE


async def test_damaged_frames_of_a_relay_that_has_ended_are_the_last(site):
    """The outcomes before them count, and the owner goes on."""
    found = site()
    bad, good = found.relays
    for relay in found.relays:
        found.hear(relay, *REPORT)
    await found.adopting.collect()
    found.open()
    found.end(bad, ended(2, 3), ended(2, 4), ended(1, 5))
    assert bad.desk.told == [*WHOLE, COUNTED[1], ("end",)]
    assert good.process.returncode is None
