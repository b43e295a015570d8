"""A takeover in virtual time: either side is killed, stopped or told to stop before each of its steps."""

import heapq
import itertools
import random

import pytest

from ichat.takeover.handover import PROTOCOL, Message, NewSide, OldSide, send

HELLO = {"protocol": PROTOCOL, "directory": "/state"}
DELAY_S = 0.01
STEPS = 14
"""More than a takeover has."""
FAULTS = ("kill", "kill 7", "stop 2", "stop 60", "term")
WAIT_MAX_S = 12.0
"""How long nothing may decide while a process runs that could."""


class Process:
    """A process with a side of the handover."""

    def __init__(self, side):
        self.side = side
        self.is_alive, self.is_stopped, self.has_noted_end = True, False, False
        self.is_open = True
        self.reads = True
        self.inbox = []
        self.is_stopping = self.is_signalled = False


class World:
    """Both processes, their connection, and the time."""

    def __init__(self, faults):
        self.now, self.events, self.order = 0.0, [], itertools.count()
        self.old, self.new = Process(OldSide("/state")), Process(NewSide())
        self.faults, self.steps = dict(faults), 0
        self.quiet_since, self.longest_quiet = None, 0.0
        self.has_gone_on = False
        """Whether the old process has decided after its snapshot."""
        self.later(0.0, lambda: self.perform(self.new, self.new.side.begin(HELLO, self.now)))

    def later(self, wait_s, call):
        heapq.heappush(self.events, (self.now + wait_s, next(self.order), call))

    def run(self, until):
        while self.events and self.events[0][0] <= until:
            self.now, _, call = heapq.heappop(self.events)
            call()
            self.work(self.old)
            self.work(self.new)
            self.check()
        self.now = until

    # The rules of an operating system.

    def peer(self, one):
        return self.new if one is self.old else self.old

    def end(self, one):
        one.is_alive = one.is_open = False
        self.later(DELAY_S, lambda: None)

    def may_run(self, one):
        return one.is_alive and not one.is_stopped

    def send(self, one, message):
        """Send a message; return whether the kernel accepts it."""
        peer = self.peer(one)
        if not (one.is_open and peer.is_open and peer.reads):
            return False

        def arrive():
            if peer.is_alive and peer.is_open:
                peer.inbox.append(message)

        arrive() if message.kind == "go" else self.later(DELAY_S, arrive)
        return True

    def work(self, one):
        """Have a process do what it is able to do: read all that came, see the other's end, look at the clock."""
        peer = self.peer(one)
        while self.may_run(one) and one.inbox and one.is_open and not one.is_stopping:
            message = one.inbox.pop(0)
            if one is self.new:
                self.perform(one, one.side.receive(message, self.now))
            elif message.kind == "hello":
                why = one.side.refusal(message.content, "")
                self.perform(one, [send("refuse", why=why)] if why else one.side.greet(1, 2, self.now))
            else:
                self.perform(one, one.side.receive(message.kind, self.now))
        if self.may_run(one) and not peer.is_alive and not one.has_noted_end:
            one.has_noted_end = True
            self.perform(one, one.side.new_ended(self.now) if one is self.old else one.side.old_ended(self.now))
        elif self.may_run(one) and one is self.old and one.is_open and not peer.is_open:
            one.is_open = False
            self.perform(one, one.side.lost(self.now))
        if self.may_run(one):
            self.perform(one, one.side.tick(self.now))
            if one.side.deadline < 1e9:
                self.later(max(0.0, one.side.deadline - self.now), lambda: None)

    def perform(self, one, acts):
        for act in acts:
            self.steps += 1
            for side, fault in self.faults.pop(self.steps, ()):
                self.strike(self.old if side == "old" else self.new, fault)
            if not one.is_alive:
                return
            if one.is_stopped:
                self.later_when_running(one, acts[acts.index(act) :])
                return
            self.do(one, act)

    def later_when_running(self, one, acts):
        if one.is_stopped:
            self.later(0.5, lambda: self.later_when_running(one, acts))
        else:
            self.perform(one, acts)

    def strike(self, one, fault):
        if fault == "kill":
            self.end(one)
        elif fault == "kill 7":
            self.later(7.0, lambda: self.end(one))
        elif fault == "term" and one.is_alive:
            self.later(0.0, lambda: self.terminate(one))
        elif one.is_alive:
            one.is_stopped = True
            self.later(float(fault.split()[1]), lambda: self.resume(one))

    def resume(self, one):
        one.is_stopped = False
        if one.is_signalled:  # a signal is seen before anything is read
            self.terminate(one)

    def terminate(self, one):
        one.is_signalled = one.is_stopped
        if self.may_run(one):
            self.perform(one, one.side.stop(self.now) if one is self.old else one.side.stop())

    def do(self, one, act):
        match act.kind:
            case "send":
                if not self.send(one, act.message) and one is self.old:
                    self.perform(one, one.side.lost(self.now))
            case "freeze":
                self.later(0.05, lambda: self.froze())
            case "go":
                if self.send(one, Message("go", {})):
                    one.side.went()
                else:
                    self.perform(one, one.side.lost(self.now))
            case "kill":
                self.end(self.new)
            case "drop":
                one.is_open = False
            case "stop":
                one.is_stopping = True
                self.later(0.1, lambda: self.end(one))
            case "build":
                self.later(0.05, lambda: self.built())
            case "close_reading":
                one.reads = False
                for message in one.inbox:
                    self.perform(one, one.side.receive(message, self.now))
                one.inbox = []
                self.perform(one, one.side.closed())
            case "end":
                self.end(one)
            case _:
                assert act.kind in ("thaw", "own", "start"), act

    def froze(self):
        if self.old.is_stopped:
            self.later(0.5, self.froze)
        elif self.old.is_alive:
            self.perform(self.old, self.old.side.froze({}, self.now))

    def built(self):
        if self.new.is_stopped:
            self.later(0.5, self.built)
        elif self.new.is_alive:
            self.perform(self.new, self.new.side.built(self.now))

    # What must hold.

    def check(self):
        old = self.old.is_alive and self.old.side.may_decide
        new = self.new.is_alive and (self.new.side.may_decide or self.new.side.state == "starting")
        assert not (old and new), "two processes decide"
        if self.new.is_alive and self.new.side.state in ("owner", "starting"):
            assert not self.old.is_alive or self.old.side.state == "gone", "the new process did not wait for `go`"
        self.has_gone_on |= old and self.new.side.state in ("building", "ready", "closing", "owner")
        assert not (self.has_gone_on and self.new.is_alive and self.new.side.may_decide), "the snapshot is old"
        serves = (old and not self.old.is_stopped) or (new and not self.new.is_stopped)
        is_faulty = self.old.is_stopped or self.new.is_stopped
        could = (self.old.is_alive and self.old.side.state != "gone") or self.new.is_alive
        if serves or is_faulty or not could:
            self.quiet_since = None
        else:
            self.quiet_since = self.now if self.quiet_since is None else self.quiet_since
            assert self.now - self.quiet_since <= WAIT_MAX_S, "requests wait for too long"


def finished(faults):
    """Return the world after a takeover with faults: by step, the sides with their faults."""
    world = World(faults)
    world.run(300.0)
    return world


def check_end(world, faults):
    """Check that a process decides, unless the faults have ended the only process that could."""
    old, new = world.old, world.new
    has_owner = (old.is_alive and old.side.may_decide) or (
        new.is_alive and (new.side.may_decide or new.side.state == "starting")
    )
    kinds = {(side, fault) for of in faults.values() for side, fault in of}
    has_ended_new = any(side == "new" and "kill" in fault for side, fault in kinds) and old.side.state == "gone"
    assert has_owner or has_ended_new or ("old", "term") in kinds, faults


def test_the_new_process_decides_after_a_takeover_without_faults():
    """The old process has gone, and requests have waited for a fraction of a second."""
    world = finished({})
    assert (world.old.side.state, world.new.side.state) == ("gone", "owner")
    assert world.steps < STEPS


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("side", ["old", "new"])
@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_single_fault_leaves_a_single_owner(side, fault, step):
    """At each moment one process decides at most, and in the end one does, unless the only owner was ended."""
    faults = {step: [(side, fault)]}
    world = finished(faults)
    check_end(world, faults)
    if (side, fault) == ("new", "kill") and world.old.side.state != "gone":
        assert world.old.side.state == "alone"
    if side == "old" and fault == "stop 2":
        assert world.new.side.state == "owner"


def test_any_two_faults_never_make_two_owners():
    """Faults of both sides, in each order: no two processes decide, and no process waits for ever."""
    every = [(step, side, fault) for step in range(1, STEPS + 1) for side in ("old", "new") for fault in FAULTS]
    for one, other in random.Random(7).sample(list(itertools.combinations(every, 2)), 3000):
        faults = {}
        for step, side, fault in (one, other):
            faults.setdefault(step, []).append((side, fault))
        world = finished(faults)
        if not any("kill" in fault for _, _, fault in (one, other)) and ("old", "term") not in (one[1:], other[1:]):
            check_end(world, faults)


def test_a_gateway_that_cannot_be_taken_over_is_refused_before_the_freeze():
    """Another protocol, another state directory, a second takeover, a busy or stopping gateway: each in a sentence."""
    old = OldSide("/state")
    assert "protocol" in old.refusal({**HELLO, "protocol": 2}, "")
    assert "/other" in old.refusal({**HELLO, "directory": "/other"}, "")
    assert old.refusal(HELLO, "It loads.") == "It loads."
    assert old.refusal(HELLO, "") == ""
    old.greet(1, 2, 0.0)
    assert "Another takeover" in old.refusal(HELLO, "")
    assert [act.kind for act in old.stop(0.0)] == ["send", "drop", "stop"]
    assert "stops" in old.refusal(HELLO, "")


def test_a_freeze_that_fails_lets_the_old_process_go_on():
    """A disk that cannot be written is a refusal, with its reason; the new process ends with it."""
    old, new = OldSide("/state"), NewSide()
    new.begin(HELLO, 0.0)
    (welcome,) = old.greet(1, 2, 0.0)
    (freeze,) = new.receive(welcome.message, 0.0)
    old.receive(freeze.message.kind, 0.0)
    thaw, refuse, drop = old.failed_to_freeze("The disk is full.", 1.0)
    assert (thaw.kind, drop.kind, old.state) == ("thaw", "drop", "alone")
    (end,) = new.receive(refuse.message, 1.0)
    assert (end.kind, end.why) == ("end", "The disk is full.")
