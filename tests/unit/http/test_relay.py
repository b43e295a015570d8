"""A response on its way between two sockets, without a gateway: what a chunk costs, and what is left at the end."""

import contextlib
import gc
import json
import socket
import sys

import pytest
import trio
import trio.testing

from ichat.http.client_side import ClientSide
from ichat.http.failures import UpstreamError
from ichat.http.hub import Hub
from ichat.http.pool import Connection, Pool, Upstream
from ichat.http.relay import Relay
from ichat.http.request_ids import REQUEST_ID
from ichat.observability.logs.log_format import JsonFormatter

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = b"text/event-stream"
ENDED = b"0\r\n\r\n"


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


class Receiver:
    """Receives a response on a socket."""

    peer = "receiver"
    is_whole = False

    def __init__(self, sock):
        self.sock = sock

    def send_some(self, data):
        try:
            return self.sock.send(data)
        except BlockingIOError:
            return 0

    def not_sent(self, error):
        assert isinstance(error, BlockingIOError)
        return 0

    async def send_all(self, data):
        while data:
            data = data[self.send_some(data) :]
            await trio.lowlevel.checkpoint()

    def response_is_whole(self):
        self.is_whole = True


class Site:
    """An upstream, a relay and a receiver; the test itself serves the hub."""

    def __init__(self, sockets):
        ours, self.upstream, theirs, self.client = sockets
        self.hub = Hub()
        pool = Pool(self.hub, connect_s=1, idle_s=1)
        self.receiver = Receiver(theirs)
        self.connection = Connection(pool, Upstream("u", "u", 0), ours)
        self.relay = Relay(
            self.connection,
            ClientSide(self.receiver, b"1.1"),
            method=b"POST",
            on_head=lambda head: b"%d " % head.status,
            first_byte_s=1000,
            stall_s=1000,
        )

    def arrive(self, *pieces):
        """Have the relay move what the upstream sends."""
        for piece in pieces:
            self.upstream.sendall(piece)
            self.hub.serve(0)

    def read(self):
        """Return what the client has got."""
        got = bytearray()
        with contextlib.suppress(BlockingIOError):
            while data := self.client.recv(1 << 20):
                got += data
        return bytes(got)


@pytest.fixture
def sockets():
    """Return two pairs of connected sockets that never block."""
    found = [*socket.socketpair(), *socket.socketpair()]
    for sock in found:
        sock.setblocking(False)
    yield found
    for sock in found:
        sock.close()


@pytest.fixture
async def site(sockets, nursery):
    """Return a site whose relay runs, and has sent its request."""
    site = Site(sockets)
    nursery.start_soon(site.relay.run, [b"request"])
    await trio.testing.wait_all_tasks_blocked()
    assert site.upstream.recv(100) == b"request"
    return site


@pytest.mark.parametrize(("kind", "size", "calls"), [(EVENTS, 60, 4), (EVENTS, 1000, 3), (b"audio/wav", 60, 3)])
async def test_a_chunk_is_moved_by_few_calls(site, kind, size, calls):
    """The hub calls the mover, and that the framing in two steps; only a small event may be a comment."""
    piece = chunk(b"d" * size)
    site.arrive(HEAD % kind, piece, piece)
    assert site.read() == b"200 " + 2 * piece
    found = []

    def count(frame, event, _):
        if event == "call" and "/ichat/http/" in frame.f_code.co_filename:
            found.append(frame.f_code.co_name)

    site.upstream.sendall(piece)
    sys.setprofile(count)
    try:
        site.hub.serve(0)
    finally:
        sys.setprofile(None)
    assert site.read() == piece
    assert len([name for name in found if name not in ("serve", "update_clock")]) <= calls
    assert site.relay.body.chunks == 3


async def test_a_slow_receiver_gets_all_in_order(site):
    """Its upstream is paused meanwhile; the response is whole only when the receiver has accepted it."""
    body = b"".join(chunk(b"%06d" % number * 10_000) for number in range(40)) + ENDED
    left, got, waits = memoryview(HEAD % EVENTS + body), bytearray(), 0
    with trio.fail_after(60):
        while not site.receiver.is_whole:
            with contextlib.suppress(BlockingIOError):
                left = left[site.upstream.send(left) :]
            site.hub.serve(0)
            if not left or site.relay._to.rest:
                waits += bool(site.relay._to.rest)
                assert not (site.relay._to.rest and site.receiver.is_whole)
                got += site.read()
            await trio.lowlevel.checkpoint()
    assert got + site.read() == b"200 " + body
    assert waits
    assert site.relay.reusable


async def test_an_upstream_that_fails_before_its_head_has_sent_none(sockets, nursery):
    """So a comment for the next attempt still has to begin with a head, and may."""
    site = Site(sockets)
    nursery.start_soon(fail_after_half_a_head, site)
    with pytest.raises(UpstreamError) as caught:
        await site.relay.run([b"request"])
    assert (caught.value.answered, caught.value.can_report, site.relay.reusable) == (True, False, False)
    assert (site.relay.has_head, site.relay.may_insert) == (False, True)


async def test_a_bug_in_a_response_is_logged_with_its_request(sockets, nursery, caplog, monkeypatch):
    """The hub's call has no request; the line is written by the request's task, in which the formatter finds the id."""
    site = Site(sockets)
    site.relay.body._usage = 7  # that is no observer
    lines = []
    form = JsonFormatter().format
    monkeypatch.setattr(caplog.handler, "emit", lambda record: lines.append(json.loads(form(record))))
    nursery.start_soon(move_a_chunk, site)
    REQUEST_ID.set(b"req-7")
    with pytest.raises(UpstreamError, match="the gateway has a bug"):
        await site.relay.run([b"request"])
    [line] = lines
    assert (line["request_id"], line["message"]) == ("req-7", "a bug moving a response")
    assert "AttributeError" in line["traceback"]


async def move_a_chunk(site):
    await trio.testing.wait_all_tasks_blocked()
    site.arrive(HEAD % EVENTS + chunk(b"d"))


async def fail_after_half_a_head(site):
    await trio.testing.wait_all_tasks_blocked()
    site.arrive(b"HTTP/1.1 200 OK\r\n")
    site.upstream.shutdown(socket.SHUT_WR)
    site.hub.serve(0)


async def test_nothing_is_left_to_the_garbage_collector(sockets):
    """Whether a response was whole or not, its objects end with the last reference."""
    site = Site(sockets)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(site.relay.run, [b"request"])
        await trio.testing.wait_all_tasks_blocked()
        site.arrive(HEAD % EVENTS, chunk(b"d") + ENDED)
    assert site.receiver.is_whole
    site.connection.park(0.0)
    gc.collect()
    gc.disable()
    try:
        del site.relay
        assert not [one for one in gc.get_objects() if isinstance(one, Relay)]
    finally:
        gc.enable()
