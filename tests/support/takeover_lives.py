"""Takeovers in the lives of relays: the real sides of both processes, their messages, their acts, and their ends."""

import collections

from ichat.takeover.handover import PROTOCOL, Message, send

HELLO = {"protocol": PROTOCOL, "directory": "/state"}
DEATHS = 0.03
"""How often a process dies before one of its acts."""
S = 1_000_000_000
QUIET_S, HANGS_S = 15, 60
"""How long an owner may be frozen, and after what time a process that hangs goes on at last."""


class NewProcess:
    """A process that asks an owner for its gateway, until it is an owner or has ended."""

    def __init__(self, side, old):
        self.side, self.old = side, old
        self.is_alive, self.is_dying = True, False
        """`is_dying`: it does nothing more, but has not ended yet."""
        self.is_stuck = False
        """Whether it is stopped until somebody ends it, or has it go on."""
        self.is_open = self.old_is_open = self.reads = True
        """Whether its end of the connection, and the old process's, are open."""
        self.to_old, self.to_new = collections.deque(), collections.deque()
        self.has_snapshot = self.is_building = False
        self.decisions = 0
        """How much the old process had decided at the snapshot."""

    @property
    def runs(self):
        return self.is_alive and not self.is_dying and not self.is_stuck

    def end(self):
        self.is_alive = self.is_open = False


class Takeovers:
    """The part of a world of relays that is about takeovers."""

    new = None
    """The newest process that has asked for a gateway."""

    @property
    def seconds(self):
        return self.now / S

    def has_lock(self):
        """Whether a new process has got the lock of the state directory from an owner."""
        return self.new is not None and self.new.is_alive and self.new.has_snapshot

    def begin_takeover(self):
        owner, new = self.owner, self.new
        if not owner.is_alive or not owner.is_open:
            return
        if owner.side.state != "alone":
            assert owner.side.refusal(HELLO, ""), "I1: two processes get the gateway at once"
        elif new is None or not new.is_alive:
            self.new = NewProcess(self.new_side(), self.owner)
            self.perform(self.new, self.new.side.begin(HELLO, self.seconds))

    def takeover_goes_on(self):
        """The processes do some steps, in any order."""
        for _ in range(self.random.choice((1, 2, 5, 15)) if self.new is not None else 0):
            self.random.choice((self.old_acts, self.new_acts, self.freeze_ends, self.new_has_built))()

    def takeover_is_hurt(self):
        """One of the processes is stopped, ended or told to stop."""
        if self.new is not None and self.new.is_alive:
            hurts = [self.stand_still, self.new_hangs, self.old_is_told_to_stop, self.new_is_told_to_stop]
            hurts += [self.stand_still, self.new_dies]
            self.random.choice(hurts)()

    def old_acts(self):
        """The old process does what it can: see the end of the new process, read a message, look at the clock."""
        new = self.new
        if new is None or not new.old.is_there:
            return
        old, side = new.old, new.old.side
        if not new.is_alive:
            if new.old_is_open:
                self.perform(old, side.new_ended(self.seconds))
                new.old_is_open = False
            return
        if new.old_is_open and side.state != "killing":
            if new.to_old:
                message = new.to_old.popleft()
                if message.kind == "hello":
                    why = side.refusal(message.content, "")
                    acts = [send("refuse", why=why)] if why else side.greet(1, 2, self.seconds)
                    self.perform(old, acts)
                    new.old_is_open = not why
                else:
                    self.perform(old, side.receive(message.kind, self.seconds))
            elif not new.is_open:
                self.perform(old, side.lost(self.seconds))
        if old.is_there:
            self.perform(old, side.tick(self.seconds))

    def new_acts(self):
        """The new process does what it can: read all that was sent, see the end of the old process, and the clock."""
        new = self.new
        if new is None or not new.is_alive:
            return
        if new.is_dying:
            new.end()
            return
        self.read_as_new(new)
        if not new.old.is_there and new.runs:
            self.perform(new, new.side.old_ended(self.seconds))
            assert new.is_building or not new.runs, "a process waits for another that has ended"
        if new.runs:
            self.perform(new, new.side.tick(self.seconds))

    def read_as_new(self, new):
        while new.to_new and new.runs:
            self.perform(new, new.side.receive(new.to_new.popleft(), self.seconds))

    def freeze_ends(self):
        """The owner has become quiet, or cannot."""
        owner = self.owner
        if not owner.is_alive or not owner.is_freezing:
            return
        owner.is_freezing = False
        if self.random.random() < 0.2:
            self.perform(owner, owner.side.failed_to_freeze("The disk is full.", self.seconds))
        else:
            self.write(owner)
            self.perform(owner, owner.side.froze({}, self.seconds))

    def new_has_built(self):
        new = self.new
        if new is not None and new.runs and new.is_building:
            new.is_building = False
            self.perform(new, new.side.built(self.seconds))

    def old_is_told_to_stop(self):
        if self.owner.is_alive and self.owner.is_open:
            self.perform(self.owner, self.owner.side.stop(self.seconds))

    def new_is_told_to_stop(self):
        new = self.new
        if new is not None and new.runs and new.old is self.owner:
            self.perform(new, new.side.stop())

    def stand_still(self):
        """One of the two processes is stopped for some seconds, and goes on; the other one does not wait for it."""
        is_old = self.random.random() < 0.5
        for _ in range(self.random.choice((2, 7, 12))):
            self.now += S
            if is_old:
                self.new_has_built()
                self.new_acts()
            else:
                self.freeze_ends()
                self.old_acts()
        for relay in self.owner.relays.values() if is_old and self.owner.is_alive else ():
            relay.heard_at = self.seconds

    def new_hangs(self):
        self.new.is_stuck = True

    def new_dies(self):
        if self.new is not None and self.new.old is self.owner:
            self.new.end()

    def old_dies(self, old):
        old.is_there = False
        if old is self.owner and old.is_alive:
            self.owner_dies()

    def perform(self, process, acts):
        """Do the acts of a process. Either process may die before each of them."""
        for act in acts:
            if self.may_die and self.random.random() < DEATHS and self.new is not None:
                self.old_dies(self.new.old) if self.random.random() < 0.5 else self.new_dies()
            if not (process.runs if isinstance(process, NewProcess) else process.is_there):
                return
            if isinstance(process, NewProcess):
                self.do_as_new(process, act)
            else:
                self.do_as_old(process, act)

    def do_as_old(self, old, act):
        new = self.new
        match act.kind:
            case "send" | "go":
                message = act.message or Message("go", {})
                if not (new.is_open and new.old_is_open and new.reads):
                    self.perform(old, old.side.lost(self.seconds))
                    return
                if message.kind == "snapshot":
                    assert old.is_frozen, "I1: an owner hands over while it decides"
                    new.has_snapshot, new.decisions = True, old.decisions
                new.to_new.append(message)
                if message.kind == "go":
                    assert not new.is_dying, "I1: the gateway is given to a process that was killed"
                    old.side.went()
                    self.leave(old)
            case "freeze":
                old.is_frozen = old.is_freezing = True
                for relay in old.relays.values():
                    relay.pause()
            case "thaw":
                self.thaw(old)
            case "kill":
                new.is_dying = True
            case "drop":
                new.old_is_open = False
            case "stop":
                assert not old.is_frozen, "a gateway stops before it has thawed"
                old.side._is_stopping = False  # its end is another story
            case _:
                raise AssertionError(act)

    def thaw(self, old):
        new = self.new
        assert old is self.owner, "I1: a process thaws after another has begun"
        assert old.is_alive, "I1: a process thaws that has given the gateway away"
        assert not (new.is_alive and new.has_snapshot), "I1: two processes have the gateway"
        old.is_frozen = old.is_freezing = False
        for relay in old.relays.values():
            relay.go_on(self.seconds)
        assert not any(relay.wire.is_paused for relay in old.relays.values()), "a relay is not read after the thaw"
        self.blame_silent()
        self.serve()

    def do_as_new(self, new, act):
        match act.kind:
            case "send":
                if new.old.is_there and new.old_is_open:
                    new.to_old.append(act.message)
            case "build":
                new.is_building = True
            case "close_reading":
                new.reads = False
                self.read_as_new(new)
                if new.runs:
                    self.perform(new, new.side.closed())
            case "end":
                assert new.old.side.state != "gone", "I1: a process ends that has got the gateway"
                new.is_open, new.is_dying = False, True
            case "own":
                self.own(new)
            case "start":
                assert not new.old.is_there, "I1: a process starts beside another"
                new.end()
                self.start_owner()
            case _:
                raise AssertionError(act)

    def leave(self, old):
        """The old process decides nothing from now on; its relays hear of it, or see the end of their connections."""
        old.is_alive = False
        for relay in self.living():
            if relay.owner is old and self.random.random() < 0.8:
                self.say_bye(old, relay)
            if relay.owner is old:
                relay.up.clear()

    def own(self, new):
        """The new process decides, and finds the relays."""
        old = new.old
        assert old is self.owner, "I1: the gateway was another process's already"
        assert not old.is_alive, "I1: two processes decide"
        assert old.decisions == new.decisions, "I1: the old process has decided after its snapshot"
        new.end()
        old.is_there = False
        self.start_owner()

    def end_takeover(self):
        """Let a takeover that is under way come to its end. No process dies any more."""
        self.may_die = False
        for seconds in range(100):
            is_quiet = self.owner.is_alive and self.owner.is_frozen
            assert seconds < QUIET_S or not is_quiet, "requests wait for a process that is silent"
            if seconds == HANGS_S and self.new is not None:
                self.new.is_stuck = False
            self.freeze_ends()
            self.new_has_built()
            self.old_acts()
            self.new_acts()
            self.now += S
            if self.new is None or not self.new.is_alive:
                self.old_acts()
                break
        assert self.new is None or not self.new.is_alive, "a takeover has no end"
        assert not (self.owner.is_alive and self.owner.is_frozen), "an owner stays frozen"
