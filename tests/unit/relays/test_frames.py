"""Frames as bytes: each value comes back, damage is a FrameError, and older and newer programs understand each other."""

import contextlib
import json
import random
import struct
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ichat.observability.request_record import UsedTokens
from ichat.proxy.refusals import Failure
from ichat.proxy.steps import AttemptStep, BodyEdits, Outcome, OutcomeKind, Refuse, Wait
from ichat.relays.adoption import Adoption
from ichat.relays.frames import ASK_BYTES_MAX, FRAME_BYTES_MAX, FrameReader, decode, encode
from ichat.relays.layouts import LAYOUTS, OPTIONAL
from ichat.relays.link import hello
from ichat.relays.owner_talk import OwnerTalk
from ichat.relays.relay_talk import RelayTalk
from ichat.relays.request_frames import OUTCOMES
from ichat.relays.values import (
    FrameError,
    HeadSeen,
    MonotonicNs,
    Note,
    Refused,
    SentAsk,
    SentOutcome,
    SentStep,
    TalkError,
    TrioClock,
    WaitsFor,
)

DAMAGED = 100_000

texts = st.text(st.characters(), max_size=20)
data = st.binary(max_size=20)
bits = st.integers(0, 0xFFFF)
u8, u32 = st.integers(0, 0xFF), st.integers(0, 0xFFFFFFFF)
times = st.integers(0, 2**64 - 1).map(MonotonicNs)
seconds = st.floats(0, 1e6, width=32)
names = st.from_regex(rb"[a-z-]{1,12}", fullmatch=True)
values = st.binary(max_size=12).filter(lambda value: b"\r" not in value and b"\n" not in value)


def rows(*cells, most=3):
    return st.lists(st.tuples(*cells), max_size=most).map(tuple)


headers = rows(names, values)
methods = st.sampled_from((b"GET", b"POST", b"PURGE"))
paths = st.sampled_from((b"/v1/completions", b"/v1/responses/resp_1", b"/\xff?q"))
asks = st.builds(
    SentAsk, u32, times, texts, texts, paths, methods, texts, data, data, data, bits, u8, u32, u32, u32,
    st.lists(u32, max_size=94).map(tuple), rows(texts, data), headers, texts, rows(texts, texts, texts), seconds,
)  # fmt: skip
edits = st.builds(BodyEdits, texts, rows(texts, data), st.lists(texts, max_size=2).map(tuple))
rejects = st.sampled_from(((), ("429",), ("5xx",), ("429", "5xx")))
attempts = st.builds(
    AttemptStep, texts, texts, edits, headers, headers, seconds, seconds, rejects, st.booleans(), st.booleans(),
    st.booleans(),
)  # fmt: skip
steps = st.builds(SentStep, u32, u8, attempts, data, texts, bits, u32, seconds, texts)
failures = st.builds(
    Failure, st.integers(400, 599), texts, texts, texts, st.none() | texts, st.none() | u32, st.none() | st.booleans(),
    texts,
)  # fmt: skip
ends = st.builds(
    Outcome, st.sampled_from(OUTCOMES), texts, st.none() | failures, texts, st.just(""), st.integers(0, 999),
    st.booleans(), st.booleans(), st.just(0.0),
)  # fmt: skip
used = st.builds(UsedTokens, u32, u32, u32, st.booleans())
outcomes = st.builds(
    SentOutcome, u32, u8, st.integers(0, 2**64 - 1), ends, st.booleans(), times, times, times, st.integers(0, 2**63),
    u32, st.none() | used, texts, texts, texts, st.lists(texts, max_size=2).map(tuple),
    st.booleans(), st.booleans(), times, st.booleans(),
)  # fmt: skip
waits = st.builds(WaitsFor, u32, st.builds(Wait, st.sampled_from(("place", "pause")), seconds))
notes = st.builds(
    Note, st.sampled_from([name for name, layout in LAYOUTS.items() if layout.value_of is None and layout.read is None]), u32,
    st.dictionaries(texts, texts | u32 | st.lists(texts, max_size=2), max_size=3),
)  # fmt: skip
frames = st.one_of(
    asks, steps, outcomes, waits, notes, st.builds(HeadSeen, u32, st.integers(0, 999)),
    st.builds(Refused, u32, st.builds(Refuse, failures)),
)  # fmt: skip

FAILURE = Failure(503, "model_busy", "The model `m` is busy.", retry_after_s=2)
PLAIN_STEP = AttemptStep(
    "worker-1", "qwen3-32b", request_head=((b"x-ichat-proof", b"a" * 64),), response_head=((b"x-ichat-worker", b"w"),),
    first_byte_s=600.0, stall_s=120.0,
)  # fmt: skip
PLAIN = [
    SentAsk(7, MonotonicNs(10**15), "0b9c1d2e3f405162", "qwen3-32b", b"/v1/chat/completions", peer="10.0.0.7:51234",
          credential=b"Bearer sk-0123456789abcdef", host=b"gateway:4000", body_bytes=900),
    SentStep(7, 1, PLAIN_STEP, b"12", "team-a", queued_s=5.0),
    SentOutcome(7, 1, 99, Outcome("answered", status=200), False, MonotonicNs(10**15), MonotonicNs(10**15 + 10**7),
                MonotonicNs(10**15 + 10**9), 4000, 1, UsedTokens(200, 300, 128)),
]  # fmt: skip
RARE = [
    PLAIN[0]._replace(checksums=tuple(range(16)), before=(("tools", b"\xff" * 20),), tried=(("w1", "m", "declined"),)),
    PLAIN[1]._replace(step=PLAIN_STEP._replace(edits=BodyEdits("m", (("top_p", b"0.5"),), ("seed",)))),
    PLAIN[2]._replace(outcome=Outcome("unreachable", "w1", FAILURE, "refused"), wants_next=True, dropped=("seed",)),
    Refused(7, Refuse(FAILURE)),
    WaitsFor(7, Wait("place", 30.0)),
    HeadSeen(7, 200),
    Note("leave", 7),
    Note("settings", 0, {"version": 3, "routes": ["/v1"]}),
]


@given(frames)
def test_each_value_of_a_frame_comes_back(frame):
    """The reader has the value that the writer had."""
    assert decode(encode(frame)) == frame


@given(st.lists(frames, max_size=8), st.randoms(use_true_random=False))
def test_frames_arrive_in_pieces_of_any_size(sent, chance):
    """The reader yields the same frames, however the bytes are cut."""
    stream, reader, got = b"".join(map(encode, sent)), FrameReader(), []
    while stream:
        size = chance.choice((1, 2, 7, 8, 9, 100, 10_000))
        got += reader.feed(stream[:size])
        stream = stream[size:]
    assert got == sent


@given(st.one_of(st.lists(steps, min_size=2, max_size=2), st.lists(outcomes, min_size=2, max_size=2)))
def test_frames_that_share_fields_have_their_own(two):
    """A part that was remembered of a frame is used for no frame with another: each field comes back as it is."""
    one, other = two
    for field in one._fields:
        mixed = one._replace(**{field: getattr(other, field)})
        assert [decode(encode(frame)) for frame in (one, mixed, other, one)] == [one, mixed, other, one]
        assert decode(encode(one._replace(number=one.number ^ 1))).number == one.number ^ 1


def test_damaged_frames_are_frame_errors():
    """No damage raises anything else than a FrameError, in the reader or later when the value is written again."""
    chance = random.Random(1)
    originals = [encode(frame) for frame in PLAIN + RARE]
    refused = []
    for _ in range(DAMAGED):
        damaged = bytearray(chance.choice(originals))
        for _ in range(chance.choice((1, 1, 2, 8))):
            at = chance.randrange(4, len(damaged))
            match chance.randrange(4):
                case 0:
                    damaged[at] = chance.randrange(256)
                case 1:
                    del damaged[at:]
                    damaged += chance.randbytes(5)
                case 2:
                    damaged[at:at] = chance.randbytes(chance.randrange(4))
                case 3:
                    damaged[at] ^= 1 << chance.randrange(8)
        damaged[:4] = struct.pack("<I", len(damaged) if chance.random() < 0.97 else chance.randrange(2**32))
        try:
            for frame in FrameReader().feed(bytes(damaged)):
                encode(frame)
        except FrameError as error:
            refused.append(str(error))
    assert len(refused) > DAMAGED / 20
    assert [sentence for sentence in refused if len(sentence) > 400 or not sentence.endswith(".")] == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | texts, lambda inner: st.lists(inner, max_size=6), max_leaves=12
)
members = st.sampled_from(("version", "seq", "rows", "trying", "recent", "protocol", "knows", "term", "settings"))
wild_notes = st.builds(
    Note, st.sampled_from(("hello", "report", "ready", "added", "prepared", "settled", "settings", "commit", "leave")),
    st.integers(0, 3), st.dictionaries(members, json_values, max_size=5),
)  # fmt: skip
rows_of_reports = st.lists(st.lists(st.integers(0, 9) | texts, min_size=3, max_size=6), max_size=3)
reports = st.builds(Note, st.just("report"), st.just(0), st.fixed_dictionaries({"trying": rows_of_reports}))


@given(st.lists(st.one_of(wild_notes, reports, frames), max_size=10))
def test_frames_with_any_content_are_refused_by_sentences(sent):
    """Whatever the other side sends, a talk and an adoption raise nothing but a TalkError."""
    owner, relay = OwnerTalk(10), RelayTalk()
    adoption = Adoption(["r"], {}, MonotonicNs(0))
    owner.sends(hello(1))
    owner.receives(hello(0))
    relay.meet_owner(hello(1), MonotonicNs(1))
    for frame in sent:
        for receive in (owner.receives, partial(relay.receives, now=MonotonicNs(2)), partial(adoption.receive, "r")):
            with contextlib.suppress(TalkError):
                receive(frame)
        with contextlib.suppress(TalkError):
            RelayTalk().meet_owner(frame, MonotonicNs(1)) if isinstance(frame, Note) else None


@pytest.mark.parametrize("rest", [
    b"[]", b"1", b"{", b"\xff", b'{"status": 1e999}', b'{"status": NaN}', b'{"status": "x"}', b'{"status": true}', b"{}",
    b'{"x":' * 50_000, b'{"status": ' + b"9" * 5000 + b"}",
])  # fmt: skip
def test_json_of_another_form_is_refused(rest):
    """Deep, endless and wrongly typed JSON ends in a sentence, too."""
    plain = encode(Note("leave", 1))
    head = bytearray(plain)
    head[4] = LAYOUTS["refuse"].number
    head[:4] = struct.pack("<I", len(head) + len(rest))
    with pytest.raises(FrameError):
        decode(bytes(head) + rest)


@pytest.mark.parametrize("change", [
    {"number": -1}, {"number": 2**32}, {"again": 256}, {"credential": b"x" * 70_000}, {"checksums": (2**32,)},
    {"credential": b"x" * ASK_BYTES_MAX},
])  # fmt: skip
def test_values_out_of_bounds_are_not_written(change):
    """The writer raises before a byte is sent; an ask has 16 kB at most."""
    with pytest.raises(FrameError):
        encode(PLAIN[0]._replace(**change))


@pytest.mark.parametrize("frame", [
    Note("no_such_kind"),
    Note("settings", 0, {"x": float("nan")}),
    Note("settings", 0, {"x": "y" * FRAME_BYTES_MAX}),
    PLAIN[1]._replace(step=PLAIN_STEP._replace(request_head=((b"a", b"b\r\nc: d"),))),
    PLAIN[2]._replace(outcome=Outcome("full")),
])  # fmt: skip
def test_values_without_a_form_are_not_written(frame):
    """A line break in a header, an outcome of a lookup and an unknown kind have no bytes."""
    with pytest.raises(FrameError):
        encode(frame)


def test_unknown_kinds_are_skipped_if_they_are_optional():
    """Bit 0 decides whether a frame of an unknown kind ends the connection."""
    unknown = bytearray(encode(Note("leave", 7)))
    unknown[4] = 250
    with pytest.raises(FrameError, match="unknown"):
        list(FrameReader().feed(bytes(unknown)))
    unknown[5] |= OPTIONAL
    assert list(FrameReader().feed(bytes(unknown) + encode(Note("leave", 8)))) == [Note("leave", 8)]


@pytest.mark.parametrize("frame", [*PLAIN, *RARE], ids=lambda frame: frame.kind)
def test_newer_and_older_writers_are_understood(frame):
    """Fields and strings that were appended are skipped; fields that are missing are 0 or empty."""
    written = encode(frame)
    head_bytes = struct.unpack_from("<H", written, 6)[0]
    count = written[head_bytes]
    lengths_end = head_bytes + 1 + 2 * count
    strings_end = lengths_end + sum(struct.unpack_from(f"<{count}H", written, head_bytes + 1))

    def made(fixed, lengths, strings):
        body = bytes((len(lengths) // 2,)) + lengths + strings + written[strings_end:]
        return struct.pack("<IBBH", 8 + len(fixed) + len(body), *written[4:6], 8 + len(fixed)) + fixed + body

    fixed, lengths = written[8:head_bytes], written[head_bytes + 1 : lengths_end]
    strings = written[lengths_end:strings_end]
    assert decode(made(fixed + b"new!", lengths, strings)) == frame
    assert decode(made(fixed, lengths + b"\3\0", strings + b"new")) == frame
    assert decode(made(fixed + b"new!", lengths + b"\3\0", strings + b"new")) == frame
    if count and not lengths[-2:].strip(b"\0"):
        assert decode(made(fixed, lengths[:-2], strings)) == frame
    older = decode(made(fixed[:4], lengths, strings)) if frame.kind in ("step", "leave") else frame
    assert older.number == frame.number
    with pytest.raises(FrameError):
        decode(made(fixed, lengths + b"\3\0", strings)[:-2])


def test_sizes_are_bounded_before_the_bytes_are_there():
    """A size that no frame can have ends the connection at once, without waiting for that many bytes."""
    for size in (0, 7, FRAME_BYTES_MAX + 1, 2**32 - 1):
        with pytest.raises(FrameError, match="cannot have"):
            list(FrameReader().feed(struct.pack("<IBBH", size, 1, 0, 8)))


def test_tables_name_each_kind_once():
    """Numbers are unique, and each outcome of an attempt has one."""
    numbers = [layout.number for layout in LAYOUTS.values()]
    assert len(set(numbers)) == len(numbers)
    assert all(layout.from_owner or layout.from_relay for layout in LAYOUTS.values())
    lookups = {"begun", "full", "loadable", "starting", "alone", "seems_too_long", "refused", "waited"}
    assert set(OUTCOMES) | lookups == set(OutcomeKind.__args__)


def test_plain_frames_are_as_small_as_the_design_says():
    """A plain request's frames have no JSON."""
    sizes = [len(encode(frame)) for frame in PLAIN]
    assert all(b"{" not in encode(frame) for frame in PLAIN)
    assert [size < most for size, most in zip(sizes, (300, 600, 120), strict=True)] == [True] * 3, sizes


def test_times_of_two_processes_are_the_same_moment():
    """Each process converts by its own offset, and no bit of a microsecond is lost."""
    here, there = TrioClock.read(1234.5, 10**15), TrioClock.read(987654.25, 10**15 + 2 * 10**9)
    ns = here.ns_of(1240.0)
    assert there.trio_of(ns) == pytest.approx(987654.25 + 3.5, abs=1e-6)
    assert json.loads(json.dumps(ns)) == 10**15 + 5_500_000_000
