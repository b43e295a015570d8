"""Frames that no relay should send: they end the connection to that relay, and nothing else happens to the owner."""

import logging
import random
import resource

import pytest
import trio
import trio.lowlevel
from support.frame_damage import BEGIN, answered, any_damage, ask
from support.owner_rig import owner_of
from support.peers import turns_until, until

from ichat.relays.frames import FRAME_BYTES_MAX, FrameReader, encode
from ichat.relays.values import UNREAD_BYTES_MAX, Note
from ichat.relays.wire import TURN_BYTES

DAMAGED = 1500
MANY_DAMAGED, PARTS = 1_000_000, 20
LARGE = 250_000
ROUTE = """
[[external_routes]]
model_name = "m"
api_base = "http://127.0.0.1:9/v1"
"""


class FakeRelay:
    """A relay that sends what a test says."""

    def __init__(self, owner):
        self.there, sock = owner.connect()
        self.stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        self.reader, self.frames = FrameReader(), []
        self.seq = 0

    async def send(self, *frames):
        await self.stream.send_all(b"".join(encode(frame) for frame in frames))

    async def next(self, kind):
        """Return the next frame of this kind; others are dropped."""
        while True:
            while self.frames:
                frame = self.frames.pop(0)
                if frame.kind == kind:
                    return frame
            data = await self.stream.receive_some()
            assert data, self.there.end_reasons
            self.frames += self.reader.feed(data)

    async def begin(self):
        await self.send(*BEGIN)
        return self

    async def serve(self, number):
        """Have a request decided, and end it."""
        await self.send(ask(number))
        step = await self.next("step")
        self.seq += 1
        await self.send(answered(number, step.attempt, self.seq))


async def fuzz(owner, count, chance):
    """Send damaged frames, each after a request has begun, on as many connections as end by them."""
    good = await FakeRelay(owner).begin()
    sent = connections = 0
    while sent < count:
        connections += 1
        bad = await FakeRelay(owner).begin()
        await bad.send(ask(1))
        await bad.next("step")
        while not bad.there.end_reasons and sent < count:
            sent += 1
            try:
                await bad.stream.send_all(any_damage(chance))
            except trio.BrokenResourceError:
                break
            seen = bad.there.wire._reader
            await trio.lowlevel.checkpoint()
            assert len(seen._rest) <= FRAME_BYTES_MAX + TURN_BYTES
            if bad.there.wire._reader._rest:  # a part of a frame that says that it is longer
                break
        await bad.stream.aclose()
        await turns_until(lambda: bad.there.end_reasons)  # noqa: B023 - it is awaited here
        (why,) = bad.there.end_reasons
        assert why == "" or why.endswith("."), why
        assert len(why) < 500
        if connections % 16 == 1:
            await good.serve(connections)
    await good.serve(connections + 1)
    assert good.there.end_reasons == []
    await good.stream.aclose()
    await until(lambda: owner.in_flight() == (0, 0))
    return connections


async def test_damaged_frames_end_their_relay_alone(tmp_path):
    """No damage is a bug at the owner; another relay is served all the time, and every place is free at the end."""
    async with owner_of(tmp_path, ROUTE) as owner:
        assert await fuzz(owner, DAMAGED, random.Random(1)) > DAMAGED / 10


async def test_a_relay_that_reads_nothing_is_hung_and_delays_no_other(tmp_path):
    """Frames wait for it up to the bound; the owner then takes it for hung, and serves another relay all the time."""
    async with owner_of(tmp_path, ROUTE) as owner:
        good = await FakeRelay(owner).begin()
        bad = await FakeRelay(owner).begin()
        number = 0
        while not bad.there.is_hung:
            number += 1
            bad.there.send(Note("hint", 1, {"comment": "x" * LARGE}))
            await good.serve(number)
        assert bad.there.wire.unread_bytes < UNREAD_BYTES_MAX + 2 * LARGE
        bad.there.kill("It leaves frames unread.")
        assert bad.there.end_reasons == ["It leaves frames unread."]
        await good.serve(number + 1)
        await bad.stream.aclose()
        await good.stream.aclose()
        await until(lambda: owner.in_flight() == (0, 0))


@pytest.mark.slow
async def test_a_million_damaged_frames_leave_nothing_behind(tmp_path, caplog):
    """The same for a long time: the memory of the owner has a bound."""
    caplog.set_level(logging.CRITICAL)  # the records would be kept
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    async with owner_of(tmp_path, ROUTE) as owner:
        first = 0
        for part in range(PARTS):
            ended = await fuzz(owner, MANY_DAMAGED // PARTS, random.Random(seed + part))
            used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            first = first or used
            print(f"part {part + 1} of {PARTS}: {ended} relays ended, {used} kB", flush=True)
            assert used - first < 32 * 1024
