"""The sockets between an owner and a relay: frames of a turn leave together, and a bad frame ends the connection."""

import os
import select
import socket

import pytest
import trio
import trio.lowlevel
import trio.testing

from ichat.http.hub import Hub
from ichat.relays.frames import encode
from ichat.relays.values import Note, TalkError
from ichat.relays.wire import FrameWire, receive_descriptors, send_descriptors


class End:
    """An end of a connection that notes what it receives."""

    def __init__(self, hub, sock, refuses=""):
        self.frames, self.ends, self.refuses = [], [], refuses
        self.wire = FrameWire(hub, sock, self.receive, self.ends.append)

    def receive(self, frame):
        if frame.kind == self.refuses:
            raise TalkError("It is not expected.")
        self.frames.append(frame)


async def until(condition):
    with trio.fail_after(20):
        while not condition():
            await trio.sleep(0.001)


@pytest.fixture
async def hub(nursery):
    found = Hub()
    nursery.start_soon(found.run_forever)
    await trio.testing.wait_all_tasks_blocked(0.01)
    return found


async def test_frames_of_a_turn_are_sent_together_and_arrive_in_their_order(hub):
    """They need a single send, and many more than a turn reads arrive all the same."""
    ours, theirs = socket.socketpair()
    one, other = End(hub, ours), End(hub, theirs)
    sent = [Note("leave", number) for number in range(1, 3000)]
    for frame in sent:
        one.wire.send(frame)
    assert one.wire.unread_bytes == sum(len(encode(frame)) for frame in sent)
    await until(lambda: len(other.frames) == len(sent))
    assert other.frames == sent
    assert one.wire.unread_bytes == 0
    one.wire.close()
    await until(lambda: other.ends == [""])
    assert one.ends == [""]


async def test_frames_that_are_not_read_wait(hub):
    """They are counted meanwhile, and arrive once the other side reads."""
    ours, theirs = socket.socketpair()
    one = End(hub, ours)
    frame = Note("settings", 0, {"text": "x" * 100_000})
    for _ in range(50):
        one.wire.send(frame)
        await trio.lowlevel.checkpoint()
    await until(lambda: 0 < one.wire.unread_bytes < 50 * len(encode(frame)))
    other = End(hub, theirs)
    await until(lambda: len(other.frames) == 50)
    await until(lambda: one.wire.unread_bytes == 0)
    one.wire.close()
    await until(lambda: other.ends == [""])


class WatchedEvents(Hub):
    """A hub that notes which events are watched."""

    events = 0

    def watch(self, fd, events, ready):
        self.events = events
        super().watch(fd, events, ready)

    def rearm(self, fd, events):
        self.events = events
        super().rearm(fd, events)


async def test_the_other_side_wakes_a_sender_only_while_bytes_wait(nursery):
    """Each of its `recv` would be an event otherwise: a turn of the loop for nothing."""
    hub, reader = WatchedEvents(), Hub()
    nursery.start_soon(hub.run_forever)
    nursery.start_soon(reader.run_forever)
    ours, theirs = socket.socketpair()
    one = End(hub, ours)
    assert not hub.events & select.EPOLLOUT
    for _ in range(50):
        one.wire.send(Note("settings", 0, {"text": "x" * 100_000}))
    await until(lambda: one.wire.unread_bytes and hub.events & select.EPOLLOUT)
    other = End(reader, theirs)
    await until(lambda: len(other.frames) == 50)
    await until(lambda: not hub.events & select.EPOLLOUT)
    one.wire.close()
    await until(lambda: other.ends == [""])


async def test_a_side_that_ends_with_unread_frames_is_no_fault(hub):
    """The kernel calls that a reset. What it has sent before is received."""
    ours, theirs = socket.socketpair()
    one = End(hub, ours)
    one.wire.send(Note("drain"))
    await until(lambda: not one.wire.unread_bytes)
    theirs.send(encode(Note("leave", 1)))
    theirs.close()
    await until(lambda: one.ends)
    assert (one.frames, one.ends) == ([Note("leave", 1)], [""])


@pytest.mark.parametrize("data", [b"\x03\0\0\0\0\0\0\0", encode(Note("drain"))])
async def test_a_frame_that_is_damaged_or_out_of_order_ends_the_connection(hub, data):
    """The reason is known, and nothing is read after that."""
    ours, theirs = socket.socketpair()
    one = End(hub, ours, refuses="drain")
    with theirs:
        theirs.send(data + encode(Note("leave", 1)))
        await until(lambda: one.ends)
    assert one.frames == []
    assert len(one.ends[0]) > 10
    assert not one.wire.is_open


def test_descriptors_arrive_with_their_message():
    """They are closed at an exec, and a message may have none."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read, write = os.pipe()
    with ours, theirs:
        send_descriptors(ours, {"kind": "listen", "address": "a"}, [read, write])
        send_descriptors(ours, {"kind": "frames"})
        note, descriptors = receive_descriptors(theirs)
        assert (note.kind, note.content, len(descriptors)) == ("listen", {"address": "a"}, 2)
        assert not any(os.get_inheritable(descriptor) for descriptor in descriptors)
        for descriptor in (read, write, *descriptors):
            os.close(descriptor)
        assert receive_descriptors(theirs) == (Note("frames", 0, {}), [])
        ours.close()
        assert receive_descriptors(theirs) is None


@pytest.mark.parametrize("is_paused", [True, False])
@pytest.mark.parametrize("damage", [b"", b"xx", b"\0" * 20])
async def test_the_rest_of_a_connection_is_read_to_its_end(is_paused, damage):
    """Whether the owner was paused in the middle of what had arrived, or had not got to it: damage ends the rest."""
    ours, theirs = socket.socketpair()
    sent = [Note("leave", number) for number in range(1, 1000)]
    with theirs:
        theirs.sendall(b"".join(map(encode, sent)) + damage)
    end = End(Hub(), ours)
    if is_paused:
        end.receive = lambda frame: (end.frames.append(frame), end.wire.pause())
        end.wire._received = end.receive
        end.wire._on_events(1)
        assert end.frames == sent[:1]
    assert [*end.wire.rest()] == sent[len(end.frames) :]
    end.wire.close()
    assert [*end.wire.rest()] == []
