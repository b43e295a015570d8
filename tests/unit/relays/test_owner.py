"""All relays of a gateway: what the end of one of them means."""

import socket

from ichat.config.schema import Config
from ichat.http.hub import Hub
from ichat.proxy.steps import AttemptStep, Outcome
from ichat.relays.frames import encode
from ichat.relays.link import hello
from ichat.relays.owner import Relays
from ichat.relays.relay_at_owner import RelayAtOwner, RelayDesk
from ichat.relays.values import MonotonicNs, Note, SentAsk, SentOutcome, SentStep
from ichat.relays.wire import FrameWire
from ichat.supervisor.kept import KeptDescriptors


class Process:
    """A process that has ended."""

    pid, returncode = 9, -9

    async def wait(self):
        pass


class Desk(RelayDesk):
    """Notes what it is told."""

    def __init__(self):
        self.told = []

    def receives(self, frame):
        self.told.append((frame.kind, frame.number))

    def end(self):
        self.told.append(("end", 0))


async def test_frames_that_a_killed_relay_had_sent_are_not_lost():
    """The owner was behind: it reads outcomes and records before it ends the requests of the relay."""
    hub = Hub()
    ours, theirs = socket.socketpair()
    relays = Relays(hub, "", Config(), log_format="text", kept=KeptDescriptors())
    relay = relays.relays[9] = RelayAtOwner(1, Process(), socket.socket(), 0.0)
    relay.wire, relay.desk = FrameWire(hub, ours, relay.talk.receives, lambda _why: None), Desk()
    for frame in (hello(1), SentStep(1, 1, AttemptStep("w", "m")), SentStep(2, 1, AttemptStep("w", "m"))):
        if isinstance(frame, SentStep):
            relay.talk.receives(SentAsk(frame.number, MonotonicNs(1), "id", "m", b"/v1/completions"))
        relay.talk.sends(frame)
        if frame.kind == "hello":
            for report in (hello(0), Note("report"), Note("ready")):
                relay.talk.receives(report)
            relay.talk.open()
    with theirs:
        theirs.sendall(encode(Note("record")))
        theirs.sendall(encode(SentOutcome(1, 1, 1, Outcome("answered", "w"))))
        theirs.sendall(encode(SentAsk(3, MonotonicNs(1), "id", "m", b"/v1/completions")))
    await relays._wait_for(relay)
    assert relay.desk.told == [("record", 0), ("outcome", 1), ("end", 0)]
    assert relays.relays == {}
