"""The ledger over crashes of owners: real talks, frames and files, with a crash between any two steps.

Each request that a relay has ended is in the ledger once, with its tokens. Owners die before an outcome is read, between
its row and the write, between the commit and `settled`, in the middle of a report, and before they open.
"""

import collections
import random

import pytest

from ichat.config.schema import Limits
from ichat.config.usage import UsageSettings
from ichat.observability.request_record import UsedTokens
from ichat.observability.usage.ledger import Ledger
from ichat.observability.usage.queries import UsageQuestion
from ichat.observability.usage.store import Batch, UsageStore
from ichat.proxy.steps import AttemptStep, Outcome
from ichat.relays.adoption import Adoption, sums_in
from ichat.relays.earlier_outcomes import record_of
from ichat.relays.frames import decode, encode
from ichat.relays.link import hello
from ichat.relays.owner_talk import OwnerTalk
from ichat.relays.relay_talk import RelayTalk
from ichat.relays.request_frames import ENDS
from ichat.relays.values import Note, SentAsk, SentOutcome, SentStep, TrioClock
from ichat.security.rate_limits import Quotas

S = 1_000_000_000
SEEDS, EVENTS = 40, 120
NAMES = ("r1", "r2")
CLOCK = TrioClock(0)
KINDS = ("answered", "answered", "answered", "left", "cancelled", "cut", "unreachable")


class Crash(Exception):
    """The owner dies here."""


class Disk(UsageStore):
    """The ledger's file; a write may be the last act of its owner, before or after the commit."""

    def __init__(self, directory):
        super().__init__(directory)
        self.crash = ""

    def write(self, batch):
        if self.crash == "before":
            raise Crash
        super().write(batch)
        if self.crash == "after":
            raise Crash


class TornDisk(Disk):
    """A mistake: rows and marks are written one after the other."""

    def write(self, batch):
        super().write(Batch(batch.rows))
        super().write(Batch({}, batch.marks))


class Owner:
    """An owner's process: the talks, the asks that it knows, and the ledger."""

    def __init__(self, term, ledger):
        self.term, self.ledger = term, ledger
        self.talks, self.asks, self.is_open = {}, {}, False
        self.adoption = self.adopted = None


class World:
    def __init__(self, seed, directory, owner_talk=OwnerTalk, adoption=Adoption, disk=Disk, *, settles_early=False):
        self.random, self.directory = random.Random(seed), directory
        self.owner_talk, self.adoption, self.disk = owner_talk, adoption, disk
        self.settles_early = settles_early
        self.now, self.term, self.number, self.owner = S, 0, 0, None
        self.relays = {name: RelayTalk(outcomes_max=6) for name in NAMES}
        self.up = {name: collections.deque() for name in NAMES}
        self.down = {name: collections.deque() for name in NAMES}
        self.trying = {}
        """By relay and number: the attempt."""
        self.truth = collections.Counter()
        for name, talk in self.relays.items():
            talk.about = {"identity": f"id-{name}"}

    # The owner's life.

    async def start_owner(self):
        if self.owner is not None:
            return
        self.term += 1
        store = self.disk(self.directory)
        ledger = Ledger(UsageSettings(), store, lambda _model: True, Quotas(Limits(), []))
        owner = self.owner = Owner(self.term, ledger)
        ledger.follow(self.newest, self.settle)
        await ledger.read_marks()
        names = {name: ledger.marks().get(f"id-{name}", 0) for name in NAMES}
        owner.adoption = self.adoption(NAMES, names, self.now)
        for name, relay in self.relays.items():
            talk = owner.talks[name] = self.owner_talk(1000)
            greeting = hello(self.term)
            talk.sends(greeting)
            self.up[name].extend(map(encode, relay.meet_owner(decode(encode(greeting)), self.now)))

    async def kill_owner(self):
        owner, self.owner = self.owner, None
        if owner is None:
            return
        owner.ledger._store.close()
        for name, relay in self.relays.items():
            self.relay_reads(name, len(self.down[name]))
            self.up[name].clear()
            relay.lose_owner(self.now)

    def newest(self):
        return {talk.identity: talk.counted for talk in self.owner.talks.values() if talk.counted}

    def settle(self, marks):
        for name, talk in self.owner.talks.items():
            seq = min(marks.get(talk.identity, 0), talk.received)
            if seq > talk.settled:
                self.tell(name, Note("settled", 0, {"seq": seq}))

    def tell(self, name, frame):
        self.owner.talks[name].sends(frame)
        self.down[name].append(encode(frame))

    def owner_reads(self, name, count):
        owner = self.owner
        for _ in range(min(count, len(self.up[name]))):
            talk = owner.talks[name]
            if not talk.may_read:
                return
            frame = decode(self.up[name].popleft())
            talk.receives(frame)
            if frame.kind == "hello":
                continue
            if owner.is_open:
                self.hear(name, frame)
            else:
                owner.adoption.receive(name, frame)

    def hear(self, name, frame):
        at = name, frame.number
        if isinstance(frame, SentAsk):
            self.owner.asks[at] = frame
            self.tell(name, SentStep(frame.number, len(frame.tried) + 1, AttemptStep("w", "m"), key="k"))
        elif isinstance(frame, SentOutcome):
            self.count(frame, self.owner.asks.get(at))
            if frame.wants_next:
                asked = self.owner.asks[at]
                asked = self.owner.asks[at] = asked._replace(tried=(*asked.tried, ("w", "m", frame.outcome.kind)))
                self.tell(name, SentStep(frame.number, len(asked.tried) + 1, AttemptStep("w", "m"), key="k"))
            if self.settles_early:
                self.settle(self.newest())

    def count(self, item, asked):
        """As `record_earlier` and `OwnerDesk` do it."""
        if isinstance(item, Note):
            for row in sums_in(item):
                used = UsedTokens(row.input, row.output, row.cached)
                self.owner.ledger.add_sums(
                    row.key, row.model, row.endpoint, used, requests=row.requests, errors=row.errors
                )
        elif item.outcome.kind in ENDS:
            asked = asked or SentAsk(0, item.ended_at, "", "", b"")
            self.owner.ledger.ended(record_of(item, asked, CLOCK, "client"))

    def count_report(self):
        """Count everything that was reported; the first decision is later."""
        owner = self.owner
        if owner is None or owner.adopted is not None or not owner.adoption.is_complete:
            return
        adopted = owner.adoption.result()
        owner.asks |= adopted.under_way
        for name, item in adopted.outcomes:
            self.count(item, adopted.ended.get((name, item.number)))
        for talk in owner.talks.values():
            talk.note_counted()
        owner.adopted = adopted

    def open(self):
        owner = self.owner
        if owner is None or owner.is_open or owner.adopted is None:
            return
        owner.is_open = True
        for talk in owner.talks.values():
            talk.open()
        for name, seq in owner.adopted.skipped.items():
            if seq > owner.talks[name].settled:
                self.tell(name, Note("settled", 0, {"seq": seq}))
        for name, asked in owner.adopted.waiting:
            self.hear(name, asked)

    async def flush(self, crash=""):
        if self.owner is None:
            return
        ledger = self.owner.ledger
        ledger._store.crash = crash
        try:
            async with ledger._lock:
                await ledger._flush(is_last=True)
        except Crash:
            await self.kill_owner()
        else:
            ledger._store.crash = ""

    # Relays and their clients.

    def relay_reads(self, name, count):
        for _ in range(min(count, len(self.down[name]))):
            frame = decode(self.down[name].popleft())
            self.relays[name].receives(frame, self.now)
            if isinstance(frame, SentStep):
                self.trying[name, frame.number] = frame.attempt

    def client_asks(self, name):
        self.number += 1
        asked = SentAsk(self.number, self.now, f"id{self.number}", "m", b"/v1/completions")
        self.up[name].extend(map(encode, self.relays[name].ask(asked, self.now)))

    def attempt_ends(self, kinds=KINDS):
        if not self.trying:
            return
        (name, number), attempt = self.trying.popitem()
        kind = self.random.choice(kinds)
        used = UsedTokens(number, 2 * number, number // 2)
        wants_next, talk = kind not in ENDS, self.relays[name]
        outcome = Outcome(kind, "w", status=200 if kind == "answered" else 0)
        sent = SentOutcome(
            number, attempt, talk.next_seq, outcome, wants_next, ended_at=self.now, usage=None if wants_next else used
        )
        self.up[name].extend(map(encode, talk.sends(sent, self.now)))
        if not wants_next:
            self.truth.update(requests=1, input=number, output=2 * number, cached=number // 2)

    # Lives.

    async def live(self):
        for _ in range(EVENTS):
            self.now += S // 50
            name, chance = self.random.choice(NAMES), self.random.random()
            if chance < 0.2:
                self.client_asks(name)
            elif chance < 0.45:
                self.attempt_ends()
            elif chance < 0.6:
                self.relay_reads(name, self.random.randrange(1, 4))
            elif chance < 0.75 and self.owner is not None:
                self.owner_reads(name, self.random.randrange(1, 6))
            elif chance < 0.82:
                self.count_report()
            elif chance < 0.87:
                self.open()
            elif chance < 0.95:
                await self.flush(self.random.choice(("", "", "before", "after")))
            elif chance < 0.97:
                await self.kill_owner()
            else:
                await self.start_owner()
        await self.rest()

    async def rest(self):
        """The last owner hears everything."""
        await self.start_owner()
        for _ in range(99):
            for name in NAMES:
                self.owner_reads(name, 99)
            self.count_report()
            self.open()
            for name in NAMES:
                self.relay_reads(name, 99)
            while self.trying:
                self.attempt_ends(("answered",))
            if self.owner.is_open and not any(self.up.values()) and not any(self.down.values()):
                break
        await self.flush()
        for name in NAMES:
            self.relay_reads(name, 99)
        store = self.owner.ledger._store
        [sums] = store.read(UsageQuestion(0, 1e12, ())).values() or [[0] * 7]
        store.close()
        found = collections.Counter(requests=int(sums[0]), input=int(sums[2]), output=int(sums[3]), cached=int(sums[4]))
        assert found == self.truth
        assert not any(talk.unsettled or talk.requests or talk._ended for talk in self.relays.values())


async def live_all(directory, seeds=SEEDS, **mistakes):
    for seed in range(seeds):
        place = directory / str(seed)
        place.mkdir()
        world = World(seed, str(place), **mistakes)
        try:
            await world.live()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            await world.kill_owner()


async def test_each_request_is_counted_once_whenever_owners_die(tmp_path):
    """Requests and tokens of the file are those of the relays, and no relay keeps anything at the end."""
    await live_all(tmp_path)


class Boastful(OwnerTalk):
    """Says that outcomes of a report are counted as soon as they are read."""

    @property
    def counted(self):
        return self.received


class WithoutMarks(Adoption):
    """Counts what the file has."""

    def __init__(self, relays, marks, now):
        super().__init__(relays, {}, now)


@pytest.mark.parametrize("mistakes", [
    {"owner_talk": Boastful}, {"adoption": WithoutMarks}, {"disk": TornDisk}, {"settles_early": True},
])  # fmt: skip
async def test_a_planted_mistake_is_found_by_a_crash(tmp_path, mistakes):
    """The lives prove something only if a wrong rule ends one of them."""
    with pytest.raises(AssertionError):
        await live_all(tmp_path, 5 * SEEDS, **mistakes)
