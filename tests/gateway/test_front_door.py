"""The front door: what it reads, what it refuses, and how it keeps a connection."""

import gc
import socket
import ssl
import weakref

import pytest
import trio
import trio.testing
import trustme
from support.peers import Client as Peer
from support.peers import code_of, reset, until
from support.programs import LIMIT_S

from ichat.config.schema import Limits, Timeouts
from ichat.errors import bad_request
from ichat.http.accept_turns import Peers
from ichat.http.front_door import FrontDoor
from ichat.http.heads import RequestHead
from ichat.http.hub import SWEEP_S, Hub
from ichat.http.leaving import Retirement
from ichat.http.listeners import open_listeners, port_of
from ichat.http.server import Client
from ichat.http.tls import server_context

pytestmark = pytest.mark.one_process("a front door, without a gateway")


class Door:
    """A front door that answers with what it read."""

    def __init__(self, nursery, limits, timeouts):
        self.requests = []
        self.cancelled = 0
        self.nursery = nursery
        self.go_on = trio.Event()
        self.door = FrontDoor(b"gateway", self.answer, lambda head, peer: peer, Hub(), limits, timeouts)

    async def open(self):
        listeners = await open_listeners("127.0.0.1", 0)
        self.nursery.start_soon(self.door.hub.run_forever)
        self.nursery.start_soon(self.door.serve_forever, listeners)
        return port_of(listeners)

    async def answer(self, request, client, caller):
        assert caller == client.peer
        self.requests.append(request)
        if request.path == b"/bug":
            raise RuntimeError("a bug")
        if request.path == b"/refuse":
            raise bad_request("No.")
        if request.path == b"/wait":
            try:
                await trio.sleep_forever()
            finally:
                self.cancelled += 1
        if request.path == b"/slow":
            await trio.testing.wait_all_tasks_blocked(0.05)
        if request.path == b"/held":
            await self.go_on.wait()
        await client.respond(request, 200, [(b"content-type", b"text/plain")], request.body or b"hello")


@pytest.fixture
def make_door(nursery):
    return lambda limits=None, **timeouts: Door(nursery, limits or Limits(), Timeouts(**timeouts))


@pytest.fixture
def door(make_door):
    return make_door()


async def test_keeps_the_connection_for_the_next_request(door, connect):
    """Several requests share a connection, pipelined ones included, and are answered in their order."""
    client = await connect(await door.open())
    assert (await client.get(b"/a"))[::2] == (200, b"hello")
    await client.send(
        b"POST /b HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nB1POST /c HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    )
    await client.send(b"content-length: 2\r\n\r\nC2")
    answers = await client.everything()
    assert answers.count(b"HTTP/1.1 200 OK") == 2
    assert answers.index(b"B1") < answers.index(b"C2")
    assert [request.path for request in door.requests] == [b"/a", b"/b", b"/c"]


async def test_a_connection_leaves_no_cycle_to_the_garbage_collector(door, connect):
    """When a connection has ended, nothing of it is left."""
    client = await connect(await door.open())
    await client.get(b"/a")
    (served,) = map(weakref.ref, door.door.clients)
    gc.disable()
    try:
        await client.stream.aclose()
        await until(lambda: not door.door.clients)
        await trio.testing.wait_all_tasks_blocked()
        assert served() is None
    finally:
        gc.enable()


async def test_bodies_in_every_form(door, connect):
    """A body may be chunked, may wait for 100-continue, and may come in single bytes."""
    client = await connect(await door.open())
    await client.send(
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n"
    )
    assert (await client.response())[2] == b"abcde"
    await client.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\nexpect: 100-continue\r\n\r\n")
    assert (await client.stream.receive_some()).startswith(b"HTTP/1.1 100 ")
    await client.send(b"abc")
    assert (await client.response())[2] == b"abc"
    for byte in b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nok":
        await client.send(bytes([byte]))
    assert (await client.response())[2] == b"ok"


async def test_an_old_client_gets_its_answer_and_the_end(door, connect):
    """A client of HTTP/1.0 is answered, and the connection closed."""
    client = await connect(await door.open())
    await client.send(b"GET / HTTP/1.0\r\n\r\n")
    answer = await client.everything()
    assert answer.endswith(b"hello")
    assert b"connection: close" in answer


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400, "bad_request"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", 400, "bad_request"),
        (b"GET /\r\n\r\n", 400, "bad_request"),
        (b"GET / HTTP/3.7\r\nhost: x\r\n\r\n", 400, "bad_request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400, "bad_request"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab", 400, "bad_request"),
        (
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
            "bad_request",
        ),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n", 400, "bad_request"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nxx\r\n", 400, "bad_request"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", 400, "bad_request"),
        (b"GET / HTTP/1.1\r\nhost: x\r\na b: c\r\n\r\n", 400, "bad_request"),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: \0\r\n\r\n", 400, "bad_request"),
        (b"GET http://x/ HTTP/1.1\r\nhost: x\r\n\r\n", 400, "bad_request"),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * 5000, 431, "head_too_large"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n", 413, "request_too_large"),
        (
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n7d0\r\n" + b"x" * 2000,
            413,
            "request_too_large",
        ),
    ],
)
async def test_invalid_or_ambiguous_requests_are_refused_and_closed(make_door, connect, request_, status, code):
    """A request that is wrong, or could be read in two ways, or is too large, is refused, and the connection closed."""
    door = make_door(Limits(head_bytes_max=2048, body_bytes_max=1024))
    client = await connect(await door.open())
    await client.send(request_)
    found, headers, body = await client.response()
    assert (found, code_of(body)) == (status, code)
    assert headers[b"x-ichat-error"] == b"gateway"
    assert headers[b"connection"] == b"close"
    assert headers[b"x-request-id"]
    assert not door.requests


async def test_failures_become_responses(door, connect, caplog):
    """A noun that is raised is its response; a bug is 500 without its details; both leave the connection usable."""
    client = await connect(await door.open())
    status, _headers, body = await client.get(b"/refuse")
    assert (status, code_of(body)) == (400, "bad_request")
    status, _headers, body = await client.get(b"/bug")
    assert (status, code_of(body)) == (500, "internal_error")
    assert b"a bug" not in body
    assert "RuntimeError: a bug" in caplog.text
    assert (await client.get(b"/"))[0] == 200


async def test_the_request_id_is_the_clients_where_it_is_sane(door, connect):
    """A sane id comes back; anything else is replaced by one of ours."""
    client = await connect(await door.open())
    await client.send(b"GET / HTTP/1.1\r\nhost: x\r\nx-request-id: mine-1\r\n\r\n")
    assert (await client.response(b"GET"))[1][b"x-request-id"] == b"mine-1"
    await client.send(b"GET / HTTP/1.1\r\nhost: x\r\nx-request-id: " + b"y" * 200 + b"\r\n\r\n")
    ours = (await client.response(b"GET"))[1][b"x-request-id"]
    assert ours.startswith(b"req-")
    assert (await client.get(b"/"))[1][b"x-request-id"] != ours


async def test_a_client_that_hangs_up_cancels_what_is_done_for_it(door, connect):
    """The work stops when the client has gone, and not before."""
    client = await connect(await door.open())
    await client.send(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n")
    await until(lambda: door.requests)
    await trio.sleep(0.05)
    assert not door.cancelled
    await client.stream.aclose()
    await until(lambda: door.cancelled)
    await until(lambda: not door.door.clients)


@pytest.mark.parametrize("length", [2, 300_000])
async def test_a_request_that_arrives_during_an_answer_is_read_in_its_turn(door, connect, length):
    """The next request may come at any moment, in any number of pieces: it is read when it is its turn."""
    client = await connect(await door.open())
    await client.send(b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n")
    await until(lambda: door.requests)
    body = bytes(range(256)) * (length // 256) + b"x" * (length % 256)
    head = b"POST /next HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % length
    await client.send(head[:30])
    await trio.testing.wait_all_tasks_blocked()
    await client.send(head[30:] + body[:1])
    await trio.testing.wait_all_tasks_blocked()
    door.go_on.set()
    assert (await client.response(b"GET"))[0] == 200
    await client.send(body[1:])
    with trio.fail_after(LIMIT_S):
        assert (await client.response(b"POST"))[2] == body
        assert (await client.get(b"/last"))[2] == b"hello"


async def test_another_thread_may_read_meanwhile(door, connect, monkeypatch):
    """While another thread reads a connection, nothing that comes is told here; a disconnect and all later bytes are."""
    client = await connect(await door.open())
    await client.send(b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n")
    await until(lambda: door.requests)
    (served,) = door.door.clients
    served.leave_reading()
    woken = []
    monkeypatch.setattr(type(served.reader), "wake", lambda reader: woken.append(reader))
    await client.send(b"GET /next HTTP/1.1\r\nhost: x\r\n")
    await trio.sleep(0.05)
    assert not woken
    served.resume_reading()
    await until(lambda: woken)
    monkeypatch.undo()
    served.leave_reading()
    served.resume_reading()
    door.go_on.set()
    assert (await client.response(b"GET"))[0] == 200
    await client.send(b"\r\n")
    with trio.fail_after(LIMIT_S):
        assert (await client.response(b"GET"))[0] == 200
    served.leave_reading()
    await client.stream.aclose()
    await until(lambda: not door.door.clients)


async def test_a_body_that_drips_is_bounded(make_door, connect):
    """A body has a time to come in, however often a piece of it does."""
    client = await connect(await make_door(body_s=0.1).open())
    await client.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")

    async def drip():
        while True:
            await client.send(b"x")
            await trio.sleep(0.001)

    async with trio.open_nursery() as dripping:
        dripping.start_soon(drip)
        with trio.fail_after(LIMIT_S):
            status, _, body = await client.response()
        dripping.cancel_scope.cancel()
    assert (status, code_of(body)) == (408, "request_timeout")


async def test_slow_requests_are_bounded(make_door, connect):
    """A head that does not get complete is 408; a connection without a request is closed without a word."""
    door = make_door(head_s=0.1, keep_alive_s=0.3)
    port = await door.open()
    client = await connect(port)
    await client.send(b"GET / HTTP/1.1\r\nho")
    status, _, body = await client.response()
    assert (status, code_of(body)) == (408, "request_timeout")
    assert await (await connect(port)).everything() == b""


async def test_a_connection_after_a_long_idle_time_may_wait_as_long_as_any(door, connect, mock_clock):
    """A client that connects when nothing has happened for longer than `keep_alive_s` is not disconnected early."""
    port = await door.open()
    await trio.testing.wait_all_tasks_blocked()
    mock_clock.jump(1000)
    client = await connect(port)
    await until(lambda: door.door.clients)
    await trio.testing.wait_all_tasks_blocked()
    mock_clock.jump(2 * SWEEP_S)
    await trio.testing.wait_all_tasks_blocked()
    assert len(door.door.clients) == 1
    assert (await client.get(b"/"))[0] == 200


@pytest.mark.parametrize("sent", [b"", b"GET", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nab"])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_client_that_leaves_in_the_middle_of_its_request(door, connect, sent, how):
    """It is forgotten, and everybody else is served."""
    port = await door.open()
    client = await connect(port)
    await client.send(sent)
    await until(lambda: door.door.clients)
    if how == "reset":
        reset(client.stream)
    await client.stream.aclose()
    await until(lambda: not door.door.clients)
    assert not door.requests
    assert (await (await connect(port)).get(b"/"))[0] == 200


async def test_a_bug_in_the_front_door_costs_one_connection(door, connect, monkeypatch, caplog):
    """Whatever goes wrong with one connection, the others go on, and the log has it."""
    port = await door.open()
    other = await connect(port)
    assert (await other.get(b"/"))[0] == 200
    monkeypatch.setattr(door.door.ids, "fresh", 1)
    client = await connect(port)
    await client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    assert await client.everything() == b""
    assert "a bug serving" in caplog.text
    monkeypatch.undo()
    assert (await other.get(b"/"))[0] == 200


async def test_too_many_connections_are_refused(make_door, connect):
    """Beyond the limit a connection is told so; when one ends there is room again."""
    door = make_door(Limits(connections_max=1))
    port = await door.open()
    first = await connect(port)
    await first.get(b"/")
    status, headers, body = await (await connect(port)).response()
    assert (status, code_of(body), headers[b"retry-after"]) == (503, "overloaded", b"1")
    await first.stream.aclose()
    await until(lambda: not door.door.clients)
    assert (await (await connect(port)).get(b"/"))[0] == 200


async def test_a_bug_with_one_new_connection_ends_only_that(door, connect):
    """A connection that cannot be admitted is closed, and the next ones are accepted."""

    def is_proxy(peer):
        raise RuntimeError("a bug")

    port = await door.open()
    limits, door.door.is_proxy = door.door.limits, is_proxy
    door.door.limits = Limits(connections_per_address_max=0)
    broken = await connect(port)
    assert await broken.everything() == b""
    door.door.limits = limits
    assert (await (await connect(port)).get(b"/"))[0] == 200


async def test_draining_lets_exchanges_end(door, connect):
    """Draining closes what is idle, refuses what is new, and waits for what is under way."""
    port = await door.open()
    idle, busy = await connect(port), await connect(port)
    await idle.get(b"/")
    await busy.send(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
    await until(lambda: len(door.requests) == 2)
    with trio.fail_after(LIMIT_S):
        await door.door.drain()
    assert await idle.everything() == b""
    assert (await busy.response(b"GET"))[::2] == (200, b"hello")
    with pytest.raises(OSError):
        await connect(port)


async def test_draining_loses_no_request_that_was_sent(door, connect):
    """A request that has arrived is answered though its connection looked idle; a new connection is refused at once."""
    port = await door.open()
    clients = [await connect(port) for _ in range(10)]
    for client in clients:
        await client.get(b"/")
    for client in clients:
        client.stream.socket._sock.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    with trio.fail_after(LIMIT_S):
        await door.door.drain()
    for client in clients:
        assert (await client.response(b"GET"))[::2] == (200, b"hello")


async def test_while_draining_nothing_new_is_accepted(door, connect, nursery):
    """The port is closed as soon as the draining begins, so that clients go elsewhere instead of waiting."""
    port = await door.open()
    busy = await connect(port)
    await busy.send(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
    await until(lambda: door.requests)
    nursery.start_soon(door.door.drain)
    await trio.testing.wait_all_tasks_blocked()
    with pytest.raises(OSError):
        await connect(port)
    assert (await busy.response(b"GET"))[0] == 200


async def test_draining_does_not_wait_for_exempt_requests(make_door, connect, nursery):
    """What goes on until the end holds up no drain, whether it came before or stands aside during it; nothing cuts it."""
    door = make_door(drain_s=3600)
    port = await door.open()
    following, late = await connect(port), await connect(port)
    for client in (following, late):
        await client.send(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n")
    await until(lambda: len(door.requests) == 2)
    first, second = door.door.clients
    first.exempt_from_drain()
    drained = trio.Event()

    async def drain():
        await door.door.drain()
        drained.set()

    nursery.start_soon(drain)
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert not drained.is_set()
    second.exempt_from_drain()
    with trio.fail_after(LIMIT_S):
        await drained.wait()
    assert (len(door.door.clients), door.cancelled) == (2, 0)


async def test_standing_aside_is_for_one_exchange(door, connect):
    """The next request on the same connection is waited for."""
    client = await connect(await door.open())
    await client.send(b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n")
    await until(lambda: door.requests)
    (served,) = door.door.clients
    served.exempt_from_drain()
    door.go_on.set()
    assert (await client.response(b"GET"))[0] == 200
    await client.send(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
    await until(lambda: len(door.requests) == 2)
    with trio.fail_after(LIMIT_S):
        await door.door.drain()
    assert (await client.response(b"GET"))[::2] == (200, b"hello")


REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def test_a_retiring_door_answers_what_comes_on_kept_connections(door, connect, nursery):
    """Requests sent at the moment of the retirement, and after it, are answered and told to go; no client is reset."""
    port = await door.open()
    clients = [await connect(port) for _ in range(50)]
    for client in clients:
        await client.get(b"/")
    for client in clients[:40]:
        client.stream.socket._sock.send(REQUEST)
    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as retiring:
            retiring.start_soon(door.door.retire, Retirement(idle_s=LIMIT_S))
            await trio.testing.wait_all_tasks_blocked()
            for client in clients[40:]:
                await client.send(REQUEST)
            for number, client in enumerate(clients):
                status, headers, body = await client.response(b"GET")
                if number < 40 and b"connection" not in headers:  # it was answered just before
                    status, headers, body = await client.get(b"/")
                assert (status, headers[b"connection"], body) == (200, b"close", b"hello")
                assert await client.everything() == b""
            for client in clients:
                await client.stream.aclose()
    assert not door.door.clients
    with pytest.raises(OSError):
        await connect(port)


async def test_a_retiring_door_answers_requests_that_follow_each_other_at_once(door, connect, nursery):
    """Of several requests that have arrived, only the response to the last ends the connection."""
    port = await door.open()
    client = await connect(port)
    await client.get(b"/")
    client.stream.socket._sock.send(REQUEST * 3)
    nursery.start_soon(door.door.retire, Retirement(idle_s=LIMIT_S))
    answers = await client.everything()
    assert (answers.count(b"200 OK"), answers.count(b"connection: close")) == (3, 1)


async def test_a_connection_that_stays_idle_is_ended_without_a_reset(door, connect, nursery):
    """Its client gets the end, and what it sent at that moment is read: it sees an end in good order, not a reset."""
    port = await door.open()
    silent, late = await connect(port), await connect(port)
    for client in (silent, late):
        await client.get(b"/")
    nursery.start_soon(door.door.retire, Retirement(idle_s=0, linger_s=LIMIT_S))
    assert await silent.everything() == b""
    await silent.stream.aclose()
    assert await late.everything() == b""
    for _ in range(3):
        await late.send(REQUEST)
        await trio.testing.wait_all_tasks_blocked(0.01)
    assert await late.everything() == b""
    assert late.stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    await late.stream.aclose()
    await until(lambda: not door.door.clients)


async def test_an_idle_encrypted_connection_is_ended_without_a_reset(door, nursery, tmp_path):
    """Its client gets TLS's own announcement of the end, and what it sends then is read until it has closed as well."""
    authority, trust = trustme.CA(), ssl.create_default_context()
    authority.configure_trust(trust)
    certificate = authority.issue_cert("localhost")
    certificate.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "all.pem"))
    door.door.use_certificate(server_context(str(tmp_path / "all.pem"), str(tmp_path / "all.pem")))
    port = await door.open()
    stream = await trio.open_ssl_over_tcp_stream("localhost", port, ssl_context=trust)
    assert (await Peer(stream).get(b"/"))[0] == 200
    nursery.start_soon(door.door.retire, Retirement(idle_s=0, linger_s=LIMIT_S))
    with trio.fail_after(LIMIT_S):
        assert await stream.receive_some() == b""  # without an announcement, this would be an error
        wire = stream.transport_stream
        for _ in range(3):
            await wire.send_all(b"bytes of a request that was on its way")
            await trio.testing.wait_all_tasks_blocked(0.01)
        assert await wire.receive_some() == b""
        await wire.aclose()
    await until(lambda: not door.door.clients)


async def test_a_retiring_door_lets_exchanges_end_and_cuts_them_after_its_time(make_door, connect, nursery):
    """What is under way ends by itself; after `total_s` it is ended by `overdue`, and cut if it goes on."""
    door = make_door()
    port = await door.open()
    held, endless = await connect(port), await connect(port)
    await held.send(b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n")
    await endless.send(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n")
    await until(lambda: len(door.requests) == 2)
    overdue, retired = trio.Event(), trio.Event()

    def end():
        overdue.set()
        for client in door.door.clients:
            client.scope.cancel()

    async def retire():
        await door.door.retire(Retirement(idle_s=0, linger_s=0, overdue=end))
        retired.set()

    nursery.start_soon(retire)
    await trio.testing.wait_all_tasks_blocked()
    door.go_on.set()
    assert (await held.response(b"GET"))[::2] == (200, b"hello")
    assert await held.everything() == b""
    assert not overdue.is_set()
    door.door.hurry()
    with trio.fail_after(LIMIT_S):
        await retired.wait()
    assert (overdue.is_set(), door.cancelled) == (True, 1)


@pytest.mark.parametrize("has_requests", [True, False])
async def test_a_process_with_a_surplus_ends_some_kept_connections(door, connect, has_requests):
    """With clearly more than its peers for two comparisons, a door ends as many connections, each with a response."""
    port = await door.open()
    busy = [await connect(port) for _ in range(11)]
    for client in busy:
        await client.send(b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n")
    await until(lambda: len(door.requests) == 11)
    others = [await connect(port) for _ in range(20)]
    peers = Peers(31, 1, is_fewest=True) if has_requests else Peers(20, 11, is_fewest=True)

    async def ended():
        return sum([b"connection" in (await client.get(b"/"))[1] for client in others])

    assert await ended() == 0
    door.door.see_peers(peers, 11, 31)
    assert await ended() == 0
    door.door.see_peers(peers, 11, 31)
    assert await ended() == 10
    door.door.see_peers(Peers(31, 11, is_fewest=True), 11, 31)
    door.go_on.set()
    for client in busy:
        assert b"connection" not in (await client.response(b"GET"))[1]


@pytest.mark.parametrize("kind", ["pipelined", "chunks"])
async def test_one_connection_does_not_starve_the_others(door, connect, nursery, kind):
    """A flood on one connection is served in turns with everybody else's requests."""
    port = await door.open()
    flooding, other = await connect(port), await connect(port)
    if kind == "pipelined":
        flood = b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n" * 20_000
    else:
        flood = (
            b"POST /flood HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            + b"1\r\nx\r\n" * 200_000
            + b"0\r\n\r\n"
        )

    async def drink():
        async for _ in flooding.stream:
            pass

    nursery.start_soon(drink)
    nursery.start_soon(flooding.send, flood)
    await until(lambda: door.requests if kind == "pipelined" else not all(client.idle for client in door.door.clients))
    for _ in range(3):
        assert (await other.get(b"/other"))[0] == 200
    floods = [request for request in door.requests if request.path == b"/flood"]
    assert len(floods) < (20_000 if kind == "pipelined" else 1)


async def test_draining_is_bounded(make_door, connect):
    """An exchange that does not end does not hold up the shutdown."""
    door = make_door(drain_s=0.1)
    client = await connect(await door.open())
    await client.send(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n")
    await until(lambda: door.requests)
    with trio.fail_after(LIMIT_S):
        await door.door.drain()
    assert door.door.clients


async def test_no_task_keeps_a_head_while_its_response_lasts(door, connect):
    """Once the response has begun, nothing refers to the request's head."""
    begun = trio.Event()

    async def answer(request, client, caller):
        client.more_headers()
        begun.set()
        await door.go_on.wait()
        await client.respond(request, 200, [], b"end")

    door.door.answer = answer
    client = await connect(await door.open())
    await client.send(b"GET /long HTTP/1.1\r\nhost: x\r\n\r\n")
    await begun.wait()
    assert not [found for found in gc.get_objects() if isinstance(found, RequestHead) and found.path == b"/long"]
    door.go_on.set()
    assert (await client.response(b"GET"))[2] == b"end"


async def test_a_head_is_not_kept_while_its_response_lasts():
    """What the role adds to a response is made once of the head, which is freed; no other request gets it."""
    made = []

    def more_headers(head):
        made.append(head)
        return [(b"x-path", head.path)]

    ours, theirs = socket.socketpair()
    door = FrontDoor(
        b"gateway", Door.answer, lambda head, peer: peer, Hub(), Limits(), Timeouts(), more_headers=more_headers
    )
    with ours, theirs:
        client = Client(door, ours, "peer")
        client.head = RequestHead(b"GET", b"/a?b", b"1.1", [(b"host", b"x")], 0)
        assert client.more_headers() == client.more_headers() == [(b"x-path", b"/a")]
        assert (client.head, len(made)) == (None, 1)
        client.begin_request()
        assert client.more_headers() == []
