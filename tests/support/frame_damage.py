"""Damaged frames: bytes of real frames that were changed, and frames whose JSON has other values."""

import copy
import json
import struct
import time

from ichat.observability.request_record import UsedTokens
from ichat.proxy.steps import Outcome
from ichat.relays.frames import encode
from ichat.relays.link import hello
from ichat.relays.values import HEAD_ONLY, HeadSeen, MonotonicNs, Note, SentAsk, SentOutcome

BEGIN = (hello(0), Note("report", 0, {"trying": [], "recent": []}), Note("ready"))
"""The first frames of a relay that has started."""
WILD = (
    None, True, 0, -1, 1, 2**31, 2**63, 1.5, "", "x", "\ud800", [], [[]], [1], [[1, 2, 3]], ["a", "b"], {}, {"a": 1},
    [None], [[None] * 7], [[1, None, None, True, 200, 1, 1]], [["a", "b", "c", "d", "e", "f", "g"]],
    [[1, 10**30, 5, True, "x", 1, 1]],
)  # fmt: skip
"""Values where JSON has something else."""


def ask(number, **more):
    """Return an ask of a request as a relay sends it."""
    return SentAsk(
        number, MonotonicNs(time.monotonic_ns()), f"id{number}", "m", b"/v1/chat/completions", peer="127.0.0.1:5",
        host=b"localhost", body_bytes=900, prompt_bytes=600, **more,
    )  # fmt: skip


def answered(number, attempt, seq, **more):
    """Return the outcome of an attempt that has served its request."""
    now = MonotonicNs(time.monotonic_ns())
    return SentOutcome(
        number, attempt, seq, Outcome("answered", status=200), asked_at=now, first_at=now, ended_at=now, bytes_out=500,
        chunks=1, usage=UsedTokens(200, 300, 128), body_at=now, **more,
    )  # fmt: skip


FROM_RELAYS = (
    ask(7),
    ask(8, bits=HEAD_ONLY),
    ask(9, checksums=tuple(range(16)), before=(("tools", b"\xff" * 20),), prefix_bytes=5000),
    ask(10, headers=((b"origin", b"http://x"), (b"traceparent", b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"))),
    ask(11, tried=(("external:m", "m", "declined"),), again=1),
    answered(1, 1, 1),
    answered(1, 1, 1)._replace(outcome=Outcome("unreachable", "external:m"), wants_next=True),
    HeadSeen(1, 200),
    Note("leave", 1),
    Note("shadow", 1),
    Note("pulse", 0, {"connections": 3, "requests": 2}),
    Note("told", 0, {"rows": [[1, 10**9, None, True, 200, 500, 3]]}),
    Note("sums", 0, {"gaps": [["m", "external:m", [0] * 12, 1.0, 3]]}),
    Note("record", 0, {
        "status": 400, "code": "bad_head", "limit": "", "id": "x", "peer": "127.0.0.1:5", "head": ["GET", "/", "1.1"],
        "headers": [["host", "x"]],
    }),
    Note("added", 0, {"seq": 1, "rows": [["", "m", "external:m", 1, 0, 1, 1, 0]]}),
    Note("prepared", 0, {"version": 1}),
    Note("cannot", 0, {"version": 1, "why": "There is no file."}),
    Note("drained"),
    *BEGIN,
)  # fmt: skip
"""A frame of each kind that a relay sends."""


def damaged(data, chance):
    """Return the bytes of a frame with other bytes in a few places; most have a right size."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(4, max(5, len(found)))
        match chance.randrange(4):
            case 0:
                found[at : at + 1] = bytes((chance.randrange(256),))
            case 1:
                del found[at:]
                found += chance.randbytes(5)
            case 2:
                found[at:at] = chance.randbytes(chance.randrange(4))
            case 3 if at < len(found):
                found[at] ^= 1 << chance.randrange(8)
    found[:4] = struct.pack("<I", len(found) if chance.random() < 0.97 else chance.randrange(2**32))
    return bytes(found)


def changed(note, chance):
    """Return a frame with JSON, in which values are others: at the top, or a cell of a row."""
    content = json.loads(json.dumps(dict(note.content)))
    for _ in range(chance.choice((1, 1, 2))):
        where = content
        while True:
            names = [*where] if isinstance(where, dict) else [*range(len(where))]
            if not names:
                break
            name = chance.choice(names)
            if isinstance(where[name], dict | list) and where[name] and chance.random() < 0.7:
                where = where[name]
                continue
            if isinstance(where, dict) and chance.random() < 0.2:
                del where[name]
            else:
                where[name] = copy.deepcopy(chance.choice(WILD))
            break
    return note._replace(content=content)


def any_damage(chance, frames=FROM_RELAYS):
    """Return the bytes of a frame with some damage."""
    frame = chance.choice(frames)
    if isinstance(frame, Note) and frame.content and chance.random() < 0.5:
        return encode(changed(frame, chance))
    return damaged(encode(frame), chance)
