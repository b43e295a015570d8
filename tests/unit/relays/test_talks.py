"""The order of frames: each side raises where F1 to F7 forbid a frame, and the bounds hold."""

import json

import pytest

from ichat.observability.request_record import UsedTokens
from ichat.proxy.refusals import Failure
from ichat.proxy.steps import AttemptStep, Outcome, Refuse, Wait
from ichat.relays.frames import decode, encode
from ichat.relays.layouts import LAYOUTS
from ichat.relays.link import hello
from ichat.relays.owner_talk import UNREAD_BYTES_MAX, OwnerTalk
from ichat.relays.relay_talk import RelayTalk
from ichat.relays.values import (
    COPIES,
    ENDED,
    HEAD_ONLY,
    TELLS_HEAD,
    UNDER_WAY,
    HeadSeen,
    MonotonicNs,
    Note,
    Refused,
    SentAsk,
    SentOutcome,
    SentStep,
    TalkError,
    WaitsFor,
)

S = 1_000_000_000
FAILURE = Failure(503, "model_busy", "Busy.")


def ask(number, bits=0, **more):
    return SentAsk(number, MonotonicNs(number), f"id{number}", "m", b"/v1/completions", bits=bits, **more)


def step(number, attempt=1, bits=0, settings=0):
    return SentStep(number, attempt, AttemptStep("w", "m"), key="k", bits=bits, settings=settings)


def ended(number, seq, kind="answered", attempt=1, *, wants_next=False, tokens=7):
    failure = None if kind in ("answered", "left", "cancelled") else FAILURE
    used = UsedTokens(tokens, 0) if tokens else None
    return SentOutcome(number, attempt, seq, Outcome(kind, "w", failure), wants_next, usage=used)


def refused(number):
    return Refused(number, Refuse(FAILURE))


def waits(number):
    return WaitsFor(number, Wait("place", 30.0))


class Pair:
    """Both sides, and the bytes between them; a frame is named by its sender."""

    def __init__(self, settings=0, **bounds):
        self.relay, self.owner, self.now, self.term = RelayTalk(**bounds), OwnerTalk(100), S, 0
        self.meet()

    def meet(self):
        self.term += 1
        self.owner = OwnerTalk(100)
        greeting = hello(self.term)
        self.owner.sends(greeting)
        self.report = self.carried(self.relay.meet_owner(greeting, self.now))
        self.owner.open()

    def carried(self, frames):
        frames = [decode(encode(frame)) for frame in frames]
        for frame in frames:
            self.owner.receives(frame)
        return frames

    def relays(self, frame):
        """The relay sends a frame; the owner gets it."""
        if isinstance(frame, SentAsk):
            return self.carried(self.relay.ask(frame, self.now))
        return self.carried(self.relay.sends(frame, self.now))

    def owns(self, frame):
        """The owner sends a frame; the relay gets it."""
        self.owner.sends(frame)
        return self.relay.receives(decode(encode(frame)), self.now)

    def run(self, *frames):
        for frame in frames:
            by_owner = LAYOUTS[frame.kind].from_owner
            self.owns(frame) if by_owner else self.relays(frame)


@pytest.mark.parametrize("frames", [
    (ask(1), step(1), ended(1, 1), Note("settled", 0, {"seq": 1})),
    (ask(1), waits(1), waits(1), step(1), ended(1, 1)),
    (ask(1), refused(1), ask(1), refused(1)),
    (ask(1, HEAD_ONLY), Note("go", 1), ask(1), step(1), ended(1, 1)),
    (ask(1, HEAD_ONLY), refused(1)),
    (ask(1, HEAD_ONLY), Note("go", 1), Note("leave", 1), Note("gone", 1)),
    (ask(1), step(1), ended(1, 1, "unreachable", wants_next=True), step(1, 2), ended(1, 2, attempt=2)),
    (ask(1), step(1), ended(1, 1, "unreachable", wants_next=True), waits(1), Note("leave", 1), Note("gone", 1)),
    (ask(1), step(1, 1, TELLS_HEAD), HeadSeen(1, 200), ended(1, 1)),
    (ask(1), step(1), Note("shadow", 1), step(COPIES | 1), ended(1, 1), ended(COPIES | 1, 2)),
    (ask(1), step(1), Note("shadow", 1), ended(1, 1), refused(COPIES | 1), ask(1), step(1), Note("shadow", 1)),
    (ask(1), step(1), Note("shadow", 1), Note("leave", COPIES | 1), Note("gone", COPIES | 1), ended(1, 1)),
    (Note("settings", 0, {"version": 1}), Note("prepared", 0, {"version": 1}), Note("commit", 0, {"version": 1}),
     ask(1), step(1, settings=1)),
    (Note("settings", 0, {"version": 1}), Note("cannot", 0, {"version": 1, "why": "no file"}),
     Note("forget", 0, {"version": 1}), ask(1), step(1)),
    (ask(1), Note("pulse"), Note("bye")),
    (Note("accept"), ask(1), Note("retire"), ask(2), step(2), ended(2, 1), step(1), ended(1, 2), Note("drained"),
     Note("end")),
    (Note("accept"), Note("retiring"), ask(1), step(1), ended(1, 1), Note("drained"), Note("end")),
    (Note("accept"), Note("retiring"), Note("retire"), Note("drained"), Note("end")),
])  # fmt: skip
def test_allowed_orders_pass_both_sides(frames):
    """Neither side raises where the order is kept."""
    Pair().run(*frames)


@pytest.mark.parametrize("frames", [
    # F2: an ask has one answer
    (ask(1), refused(1), step(1)),
    (ask(1), refused(1), refused(1)),
    (ask(1), step(1), step(1, 2)),
    (ask(1), step(1), refused(1)),
    (ask(1), Note("gone", 1)),
    (ask(1), Note("go", 1)),
    (ask(1), step(1), waits(1)),
    (ask(1, HEAD_ONLY), step(1)),
    (ask(1, HEAD_ONLY), Note("go", 1), step(1)),
    (ask(1, HEAD_ONLY), Note("go", 1), ask(1, HEAD_ONLY)),
    (ask(1, HEAD_ONLY), waits(1)),
    (step(1),),
    (waits(1),),
    (ask(1), ask(1)),
    (ask(COPIES),),
    # F3: a step has one outcome
    (ask(1), ended(1, 1)),
    (ask(1), step(1), ended(1, 1), ended(1, 2)),
    (ask(1), step(1), ended(1, 1, attempt=2)),
    (ask(1), step(1), ended(1, 2)),
    (ask(1), step(1, 2)),
    (ask(1), step(1), ask(1)),
    (ask(1), step(1), HeadSeen(1, 200)),
    (ask(1), step(1, 1, TELLS_HEAD), HeadSeen(1, 200), HeadSeen(1, 200)),
    (ask(1), Note("shadow", 1)),
    # F4: an outcome that wants a next step is an ask
    (ask(1), step(1), ended(1, 1, wants_next=True)),
    (ask(1), step(1), ended(1, 1, "declined", wants_next=True), ended(1, 2, attempt=2)),
    (ask(1), step(1), ended(1, 1, "declined", wants_next=True), step(1, 3)),
    (ask(1), step(1), Note("shadow", 1), step(COPIES | 1), ended(COPIES | 1, 1, "late", wants_next=True)),
    # a copy is asked for once, and has a single step
    (ask(1), step(1), step(COPIES | 1)),
    (ask(1), step(1), Note("shadow", 1), refused(COPIES | 1), step(COPIES | 1)),
    (ask(1), step(1), Note("shadow", 1), step(COPIES | 1), step(COPIES | 1, 2)),
    (ask(1), step(1), Note("shadow", 1), step(COPIES | 1), refused(COPIES | 1)),
    # F5: who has left is answered by `gone`
    (ask(1), Note("leave", 1), step(1)),
    (ask(1), Note("leave", 1), refused(1)),
    (ask(1), Note("leave", 1), Note("leave", 1)),
    (ask(1), step(1), Note("leave", 1)),
    (Note("leave", 1),),
    # F6: settings come before the steps that need them
    (ask(1), step(1, settings=1)),
    (Note("settings", 0, {"version": 1}), Note("commit", 0, {"version": 1})),
    (Note("settings", 0, {"version": 1}), Note("prepared", 0, {"version": 1}), ask(1), step(1, settings=1)),
    (Note("settings", 0, {"version": 1}), Note("settings", 0, {"version": 2})),
    (Note("prepared", 0, {"version": 1}),),
    (Note("forget", 0, {"version": 1}),),
    (Note("settings", 0, {"version": "1"}),),
    # F7: nothing follows `bye`
    (Note("bye"), Note("pulse")),
    (Note("bye"), Note("retire")),
    (ask(1), Note("bye"), step(1)),
    (Note("end"), ask(1)),
    # a relay retires once, and does not accept again
    (Note("accept"), Note("accept")),
    (Note("accept"), Note("retire"), Note("retire")),
    (Note("accept"), Note("retire"), Note("accept")),
    (Note("accept"), Note("retiring"), Note("retiring")),
    # the beginning and the directions
    (hello(9),),
    (Note("report"),),
    (Note("ready"),),
    (Note("settled", 0, {"seq": 1}),),
    (ask(1), step(1), ended(1, 1), Note("settled", 0, {"seq": 1}), Note("settled", 0, {"seq": 0})),
])  # fmt: skip
def test_forbidden_orders_are_refused(frames):
    """All but the last frame pass; the sender of the last raises before it is sent."""
    pair = Pair()
    pair.run(*frames[:-1])
    with pytest.raises(TalkError):
        pair.run(frames[-1])


@pytest.mark.parametrize("frames", [
    (step(1),), (ask(1), refused(1), refused(1)), (ask(1), step(1), step(1, 2)), (ask(1), Note("gone", 1)),
    (ask(1), step(1), waits(1)), (Note("settled", 0, {"seq": 1}),), (ask(1), step(1, settings=4)), (Note("leave", 1),),
    (Note("bye"), Note("retire")), (hello(1),), (Note("retire"), Note("accept")), (Note("retire"), Note("retire")),
])  # fmt: skip
def test_relays_refuse_a_forbidden_frame_of_their_owner(frames):
    """A relay does not rely on its owner's checks."""
    relay = RelayTalk()
    relay.meet_owner(hello(1), 0)
    for frame in frames[:-1]:
        relay.ask(frame, 0) if isinstance(frame, SentAsk) else relay.receives(frame, 0)
    with pytest.raises(TalkError):
        relay.receives(frames[-1], 0)


@pytest.mark.parametrize("frames", [
    (ask(1), ask(1)), (ended(1, 1),), (ask(COPIES),), (HeadSeen(1, 200),), (Note("ready"),), (Note("gone", 1),),
    (Note("added", 0, {"seq": 1, "rows": [[1]]}),), (Note("added", 0, {"seq": 1, "rows": [["", "", "", 1, 0, 1, 1, []]]}),),
    tuple(ask(number) for number in range(1, 102)),
])  # fmt: skip
def test_owners_refuse_a_forbidden_frame_of_a_relay(frames):
    """An owner does not rely on a relay's checks, and a relay has no more requests than connections."""
    pair = Pair()
    for frame in frames[:-1]:
        pair.owner.receives(frame)
    with pytest.raises(TalkError):
        pair.owner.receives(frames[-1])


def test_owners_answer_no_ask_before_all_relays_have_reported():
    """I8: the talk itself refuses every answer until it is opened, and it cannot be opened before the report."""
    owner = OwnerTalk(10)
    owner.sends(hello(1))
    owner.receives(hello(0))
    with pytest.raises(TalkError):
        owner.open()
    owner.receives(ask(1))
    for answer in (step(1), refused(1), Note("go", 1)):
        with pytest.raises(TalkError, match="before all relays"):
            owner.sends(answer)
    owner.sends(waits(1))
    owner.receives(Note("ready"))
    assert not owner.may_read
    with pytest.raises(TalkError, match="early"):
        owner.receives(ask(2))
    owner.open()
    owner.sends(step(1))


def test_clients_that_leave_while_the_answer_is_sent_get_nothing():
    """F5: both frames cross. The owner ignores `leave`, and the relay ends the step with `left`."""
    pair = Pair()
    pair.relays(ask(1))
    (leaves,) = pair.relay.sends(Note("leave", 1), 0)
    pair.owner.sends(step(1))
    assert pair.relay.receives(step(1), 0) is False
    assert pair.owner.receives(leaves) is False
    with pytest.raises(TalkError, match="has left"):
        pair.relay.sends(ended(1, 1), 0)
    pair.relays(ended(1, 1, "left"))
    assert pair.relay.requests == pair.owner.requests == {}


def test_relays_without_an_owner_refuse_only_after_their_bound():
    """I7: nothing is decided before; a wait that the owner has announced is not overdue."""
    pair = Pair()
    pair.run(ask(1), ask(2), waits(2))
    assert pair.relay.overdue(10 * S, 10 * S) == []
    with pytest.raises(TalkError, match="still waits"):
        pair.relay.give_up(1, 10 * S, 10 * S)
    assert pair.relay.overdue(11 * S, 10 * S) == [1]
    assert pair.relay.give_up(1, 11 * S, 10 * S) == [Note("leave", 1)]
    pair.relay.lose_owner(20 * S)
    assert pair.relay.overdue(29 * S, 10 * S) == []
    assert pair.relay.give_up(2, 30 * S, 10 * S) == []
    assert pair.relay.requests == {}


def test_requests_are_not_asked_of_every_owner_in_turn():
    """Section 15: a request that two owners did not survive gets its refusal from the relay."""
    pair = Pair()
    pair.relays(ask(1))
    pair.relay.lose_owner(S)
    assert pair.relay.overdue(S, 10 * S) == []
    pair.relays(ask(2))
    pair.meet()
    assert [(one.number, one.again) for one in pair.report if isinstance(one, SentAsk)] == [(1, 1), (2, 0)]
    pair.relay.lose_owner(S)
    assert pair.relay.overdue(S, 10 * S) == [1]


def test_an_owner_that_has_handed_over_has_not_died():
    """However many takeovers a request waits through, none counts."""
    pair = Pair()
    pair.relays(ask(1))
    for _ in range(3):
        pair.owner.sends(Note("bye"))
        pair.relay.receives(Note("bye"), S)
        pair.relay.lose_owner(S)
        assert pair.relay.overdue(S, 10 * S) == []
        pair.meet()
        assert [one.again for one in pair.report if isinstance(one, SentAsk)] == [0]


def test_new_owners_get_everything_that_is_open():
    """The report has places, the last minute, unsettled outcomes, and the asks with their first time."""
    pair = Pair()
    pair.run(ask(1), step(1), ask(2), step(2), ask(3), step(3), ended(1, 1))
    pair.run(ask(4), ask(5), Note("leave", 5), ended(2, 2, "declined", wants_next=True))
    pair.relay.lose_owner(S)
    pair.meet()
    report, *rest = [one for one in pair.report[1:] if not (isinstance(one, SentAsk) and one.bits & UNDER_WAY)]
    assert report.content["trying"] == [[3, 1, "w", "k", "m"]]
    assert report.content["recent"] == [[1, "k", 3, 14]]
    assert rest[0] == ask(1, ENDED)
    assert [(one.seq, one.key, one.model, one.wants_next) for one in rest[1:3]] == [
        (1, "k", "m", False),
        (2, "k", "m", False),
    ]
    assert [(one.number, one.at, one.tried) for one in rest[3:5]] == [(2, 2, (("w", "m", "declined"),)), (4, 4, ())]
    assert rest[5:] == [Note("ready")]


def test_new_owners_get_the_asks_of_requests_under_way():
    """They need them to show and to end those requests, and answer none of them."""
    pair = Pair()
    pair.run(ask(1), step(1), ask(2))
    pair.relay.lose_owner(S)
    pair.meet()
    asks = [(frame.number, frame.bits & UNDER_WAY != 0) for frame in pair.report if isinstance(frame, SentAsk)]
    assert asks == [(1, True), (2, False)]
    with pytest.raises(TalkError, match="request of an earlier owner"):
        pair.owner.receives(ask(1, UNDER_WAY))


def test_relays_keep_only_the_last_minute():
    """The sums of a second do not outlive the windows of the limits; a relay that runs for weeks stays small."""
    pair = Pair()
    for number in range(1, 201):
        pair.now += S
        pair.run(ask(number), step(number), ended(number, number))
    assert len(pair.relay._recent) <= 61
    pair.relay.lose_owner(pair.now)
    pair.meet()
    seconds = [row[0] for row in pair.report[1].content["recent"]]
    assert seconds == list(range(pair.now // S - 60, pair.now // S + 1))


def test_outcomes_of_an_earlier_owners_step_are_asked_anew():
    """The new owner does not know the request: it gets the outcome, and then the whole ask."""
    pair = Pair()
    pair.run(ask(1), step(1))
    pair.relay.lose_owner(S)
    pair.meet()
    outcome, again = pair.relays(ended(1, 1, "unreachable", wants_next=True))
    assert not outcome.wants_next
    assert again.tried == (("w", "m", "unreachable"),)
    pair.run(step(1, 2), ended(1, 2, attempt=2))


def test_unsent_outcomes_are_added_up():
    """5.4: beyond the bound the relay keeps sums by key, model and worker, and drops none."""
    pair = Pair(outcomes_max=10)
    asks = [ask(number) for number in range(1, 41)]
    pair.run(*asks, *(step(one.number) for one in asks))
    pair.relay.lose_owner(S)
    for one in asks:
        assert pair.relay.sends(ended(one.number, pair.relay.next_seq), 0) == []
    assert len(pair.relay.unsettled) <= 10
    pair.meet()
    assert pair.owner.requests == {}
    sums = [row for one in pair.relay.unsettled if isinstance(one, Note) for row in one.content["rows"]]
    single = [one for one in pair.relay.unsettled if isinstance(one, SentOutcome)]
    assert sum(row[3] for row in sums) + len(single) == 40
    assert sum(row[5] for row in sums) + sum(one.usage.total for one in single) == 280
    assert len(pair.relay._ended) == len(single)
    pair.owns(Note("settled", 0, {"seq": pair.relay.next_seq - 1}))
    assert not pair.relay.unsettled
    assert not pair.relay._ended


def test_outcomes_that_were_sent_are_not_added_up():
    """A mark of the ledger may lie between them."""
    pair = Pair(outcomes_max=3)
    for number in range(1, 6):
        pair.run(ask(number), step(number), ended(number, number))
    pair.relay.lose_owner(S)
    pair.relay.ask(ask(9), 0)
    assert [one.seq for one in pair.relay.unsettled] == [1, 2, 3, 4, 5]


def test_relays_that_do_not_read_are_hung():
    """5.4: 8 MB wait for a relay, and no more."""
    owner = OwnerTalk(10)
    owner.unread_bytes = UNREAD_BYTES_MAX
    assert not owner.is_hung
    owner.unread_bytes += 1
    assert owner.is_hung


@pytest.mark.parametrize("greeting", [
    hello(0), hello(1), Note("hello", 0, {**hello(2).content, "protocol": 3}), Note("hello"),
    Note("hello", 0, {**hello(2).content, "knows": 5}), Note("hello", 0, {**hello(2).content, "term": "x"}),
])  # fmt: skip
def test_relays_follow_only_a_later_owner_of_their_protocol(greeting):
    """An owner of an earlier term, or of another protocol, gets nothing."""
    relay = RelayTalk()
    relay.meet_owner(hello(1), 0)
    relay.lose_owner(S)
    with pytest.raises(TalkError):
        relay.meet_owner(greeting, 0)
    relay.meet_owner(hello(2), 0)


def test_frames_that_the_other_side_does_not_know_are_not_sent():
    """`hello` names the frames that a side knows."""
    owner = OwnerTalk(10)
    owner.sends(hello(1))
    knows = [name for name in LAYOUTS if name != "hurry"]
    owner.receives(Note("hello", 0, {**hello(0).content, "knows": knows}))
    owner.sends(Note("retire"))
    with pytest.raises(TalkError, match="does not know"):
        owner.sends(Note("hurry"))


def test_adopted_relays_keep_their_settings():
    """A new owner learns the version in force from `hello`, and goes on from there."""
    pair = Pair()
    pair.run(*(Note(kind, 0, {"version": 3}) for kind in ("settings", "prepared", "commit")))
    pair.relay.lose_owner(S)
    pair.meet()
    pair.run(
        ask(1), step(1, settings=3), *(Note(kind, 0, {"version": 4}) for kind in ("settings", "prepared", "commit"))
    )
    assert json.dumps(hello(1).content)


def test_an_owner_whose_disk_fails_for_long_costs_a_relay_no_memory():
    """Beyond a bound the relay forgets the oldest outcomes that were sent, and settling goes on with the others."""
    pair = Pair(outcomes_max=3)
    for number in range(1, 9):
        pair.carried(pair.relay.ask(ask(number), pair.now))
        frame = step(number)
        pair.owner.sends(frame)
        pair.relay.receives(frame, pair.now)
        pair.carried(pair.relay.sends(ended(number, number), pair.now))
    assert len(pair.relay.unsettled) == 8
    pair.relay.receives(Note("pulse"), pair.now)
    assert [one.seq for one in pair.relay.unsettled] == [6, 7, 8]
    settled = Note("settled", 0, {"seq": 7})
    pair.owner.sends(settled)
    pair.relay.receives(settled, pair.now)
    assert [one.seq for one in pair.relay.unsettled] == [8]
