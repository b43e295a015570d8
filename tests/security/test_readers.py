"""Clients that ask and do not read take nothing from others: no place of the control plane, and not for long."""

import contextlib
import json
import resource
import socket
import time

import attrs
import pytest
import trio
from running import percentile, running_gateway
from support.peers import code_of, plain, until

from ichat.config.schema import Config
from ichat.http import unread
from ichat.http.unread import UnreadAnswers
from ichat.observability.usage.ledger import Ledger
from ichat.proxy import control_plane
from ichat.proxy.control_plane import Places
from ichat.security.keys import hash_of
from ichat.security.rules import ROUTES, find_rule, methods_of

TINY_BYTES = 4096
SEGMENT_BYTES = 1448
"""Of a reader's connection, as on Ethernet: with the loopback's the kernel alone would take megabytes for each."""
TCP_CLOSE = 7
"""The state of a connection that was reset."""
ASKED = 60
FILE = b"/openapi.json"
"""A route that is open to everybody, with more than a hundred kilobytes."""
ADMIN, TOKEN, KEY = "admin-0123456789", "token-0123456789", "client-0123456789"
ALL_KEYS = f"""
[security]
admin_key_hash = "{hash_of(ADMIN)}"
join_token_env = "T_TOKEN"
[[security.keys]]
name = "a"
key_hash = "{hash_of(KEY)}"
[[security.keys]]
name = "b"
key_hash = "{hash_of(KEY + "b")}"
"""
BEAT = {"worker_id": "w1", "model_name": "far", "host": "127.0.0.1", "port": 9, "state": "ready"}


async def hello(stream, head, body):
    await stream.send_all(plain(b'{"hello": 1}'))


@pytest.fixture(autouse=True)
def _token(monkeypatch):
    monkeypatch.setenv("T_TOKEN", TOKEN)


@pytest.fixture
def read_nothing():
    """Open a client that asks many times and reads nothing: `sock = await read_nothing(port, path, key, host)`."""
    with contextlib.ExitStack() as stack:

        async def open_(port, path=FILE, key="", host="127.0.0.1", count=ASKED):
            sock = stack.enter_context(trio.socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, TINY_BYTES)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
            await sock.bind((host, 0))
            await sock.connect(("127.0.0.1", port))
            await sock.send(asking(path, key) * count)
            await trio.lowlevel.wait_readable(sock)  # the answer has begun
            return sock

        yield open_


def asking(path, key="", method=b"GET", body=b""):
    bearer = f"Authorization: Bearer {key}\r\n".encode() if key else b""
    json_ = b"Content-Type: application/json\r\nContent-Length: %d\r\n"
    length = json_ % len(body) if method == b"POST" else b""
    return b"%b %b HTTP/1.1\r\nHost: localhost\r\n%b%b\r\n%b" % (method, path, bearer, length, body)


EVERYTHING = [
    (asking(b"/health"), b"GET"),
    (asking(b"/console/"), b"GET"),
    (asking(b"/v1/workers/heartbeat", TOKEN, b"POST", json.dumps(BEAT).encode()), b"POST"),
    (asking(b"/v1/admin/workers", ADMIN), b"GET"),
    (asking(b"/v1/models", ADMIN), b"GET"),
    (asking(b"/v1/models", KEY), b"GET"),
    (asking(b"/v1/chat/completions", KEY, b"POST", b'{"model": "m"}'), b"POST"),
]


async def expect_everything(connect, port):
    """Health, console, heartbeats, operators, lists of models and chats are answered."""
    for request, method in EVERYTHING:
        client = await connect(port)
        await client.send(request)
        status, _, body = await client.response(method)
        assert status == 200, (request, body)


def is_cut(sock):
    """Return whether the gateway has broken off a connection."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE


@pytest.mark.parametrize("addresses", [1, 50])
async def test_clients_that_do_not_read_keep_no_other_client_out(
    serve, gateway_to, connect, read_nothing, monkeypatch, addresses
):
    """Whoever they are, and from however many addresses: there are more of them than places."""
    monkeypatch.setattr(control_plane, "PLACES_MAX", 20)
    _, upstream = await serve(hello)
    port = await gateway_to({"m": upstream}, ALL_KEYS)
    await expect_everything(connect, port)
    for number in range(200):
        path = (FILE, b"/console/vendor/purify.es.mjs", b"/console/app.js", b"/health")[number % 4]
        await read_nothing(port, path, host=f"127.0.1.{1 + number % addresses}")
    await expect_everything(connect, port)


async def test_unread_whole_answers_hold_no_place(serve, gateway_to, connect, read_nothing, monkeypatch):
    """A list that is whole in memory is the connection's alone, whoever asked for it."""
    monkeypatch.setattr(control_plane, "PLACES_MAX", 1)
    _, upstream = await serve(hello)
    routes = {f"model-{number:0200}": upstream for number in range(300)}
    port = await gateway_to({"m": upstream, **routes}, ALL_KEYS)
    for key in (KEY, KEY + "b", ADMIN):
        for _ in range(3):
            await read_nothing(port, b"/v1/models", key)
    client = await connect(port)
    await client.send(asking(b"/v1/models", KEY))
    assert TINY_BYTES < len((await client.response(b"GET"))[2]) < unread.WHOLE_BYTES_MAX
    await expect_everything(connect, port)


async def test_an_answer_that_is_too_long_to_keep_comes_whole(serve, gateway_to, connect, read_nothing, monkeypatch):
    """It goes to the client as that takes it; whoever does not take it is cut, and the place is free again."""
    monkeypatch.setattr(control_plane, "PLACES_MAX", 2)
    _, upstream = await serve(hello)
    names = [f"model-{number:0200}" for number in range(3000)]
    port = await gateway_to(dict.fromkeys(names, upstream), ALL_KEYS + "[timeouts]\nunread_s = 1\n")
    client = await connect(port)
    await client.send(asking(b"/v1/models", KEY))
    status, _, body = await client.response(b"GET")
    assert (status, len(body) > unread.WHOLE_BYTES_MAX) == (200, True)
    assert [one["id"] for one in json.loads(body)["data"]] == names
    readers = [await read_nothing(port, b"/v1/models", KEY, count=1) for _ in range(2)]
    await until(lambda: all(map(is_cut, readers)))
    await client.send(asking(b"/v1/models", KEY))
    assert (await client.response(b"GET"))[::2] == (200, body)


async def test_a_client_that_does_not_read_is_cut_after_unread_s(gateway_to, connect, read_nothing):
    """After `unread_s`, though it could hold on for `client_stall_s` with a stream of a model."""
    port = await gateway_to({}, "[timeouts]\nunread_s = 0.3\nclient_stall_s = 3600\n")
    reader = await read_nothing(port)
    await until(lambda: is_cut(reader))


async def test_a_client_that_reads_a_few_bytes_is_cut_after_unread_s(gateway_to, read_nothing, nursery):
    """Taking a few bytes now and then is no reading."""
    port = await gateway_to({}, "[timeouts]\nunread_s = 1\nclient_stall_s = 3600\n")
    reader = await read_nothing(port)

    async def sip():
        with contextlib.suppress(OSError):
            while await reader.recv(100):
                await trio.sleep(0.02)

    nursery.start_soon(sip)
    await until(lambda: is_cut(reader))


async def test_a_client_on_a_slow_line_gets_everything(gateway_to, connect):
    """A client on a slow line takes 64 KiB in each `unread_s`, however many of these that are."""
    port = await gateway_to({}, "[timeouts]\nunread_s = 60\n")
    whole = await (await connect(port)).get(FILE)
    with trio.socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, TINY_BYTES)
        await sock.connect(("127.0.0.1", port))
        await sock.send(asking(FILE) * 10)
        data = b""
        while data.count(b"HTTP/1.1 200") < 10 or not data.endswith(whole[2]):
            more = await sock.recv(2000)
            assert more
            data += more
            await trio.lowlevel.checkpoint()
        assert data.count(whole[2]) == 10


async def test_few_answers_wait_for_one_party(gateway_to, connect, read_nothing):
    """The newest answer is let in and the oldest is cut, so that a client that asks for more only harms itself."""
    port = await gateway_to({}, "[timeouts]\nunread_s = 3600\nclient_stall_s = 3600\n")
    other = await read_nothing(port, host="127.0.0.2")
    readers = [await read_nothing(port) for _ in range(unread.UNREAD_OF_ONE_MAX + 2)]
    await until(lambda: [is_cut(reader) for reader in readers[:3]] == [True, True, False])
    assert not any(map(is_cut, [other, *readers[2:]]))


def test_clients_that_do_not_read_cannot_take_all_places():
    """An answer that is too long to keep holds its place, but fewer of these wait than there are places."""
    assert unread.UNREAD_MAX < control_plane.PLACES_MAX
    assert unread.UNREAD_OF_ONE_MAX < unread.UNREAD_MAX
    assert "0 of 0" in repr(UnreadAnswers())


async def test_a_stranger_takes_no_place(gateway_to, connect, monkeypatch):
    """The rule of a route is checked before there is a place: where none is left, it is only the operator who is told."""
    monkeypatch.setattr(control_plane, "PLACES_MAX", 0)
    monkeypatch.setattr(control_plane, "SLOW_MAX", 0)
    port = await gateway_to({}, ALL_KEYS)
    for method, path in ROUTES:
        if method == "GET" and ROUTES[method, path] != "open":
            client = await connect(port)
            await client.send(asking(path.replace("<", "").replace(">", "").encode()))
            assert (await client.response(b"GET"))[0] == 401, path
    client = await connect(port)
    await client.send(asking(b"/v1/admin/workers", ADMIN))
    assert (await client.response(b"GET"))[0] == 503
    assert (await client.get(b"/health"))[0] == 200


async def test_a_key_cannot_take_all_places_by_its_usage(gateway_to, connect, monkeypatch, nursery):
    """What takes seconds has places of its own, few of them for one key: others' usage and lists are answered."""
    asked, may_answer = [], trio.Event()
    monkeypatch.setattr(control_plane, "OF_A_SLOW_ONE_MAX", 3)
    read = Ledger.read

    async def read_late(self, question):
        asked.append(question.key)
        await may_answer.wait()
        return await read(self, question)

    monkeypatch.setattr(Ledger, "read", read_late)
    port = await gateway_to({}, ALL_KEYS + "[usage]\nenabled = true\n")
    clients = [await connect(port) for _ in range(4)]
    for client in clients[:3]:
        await client.send(asking(b"/v1/usage", KEY))
    await until(lambda: asked == ["a"] * 3)
    await clients[3].send(asking(b"/v1/usage", KEY))
    status, _, body = await clients[3].response(b"GET")
    assert (status, code_of(body)) == (503, "overloaded")
    other = await connect(port)
    await other.send(asking(b"/v1/usage", KEY + "b"))
    await until(lambda: asked == ["a"] * 3 + ["b"])
    for path, key in ((b"/v1/models", KEY), (b"/v1/admin/workers", ADMIN)):
        client = await connect(port)
        await client.send(asking(path, key))
        assert (await client.response(b"GET"))[0] == 200
    may_answer.set()
    for client in (*clients[:3], other):
        assert (await client.response(b"GET"))[0] == 200


def test_places_are_counted_by_caller_and_in_all():
    """Nobody takes more than the share of one, and what was taken is given back."""
    places = Places(3, 2)
    with contextlib.ExitStack() as taken:
        taken.enter_context(places.hold("a"))
        taken.enter_context(places.hold("a"))
        with pytest.raises(Exception, match="Too many"), places.hold("a"):
            pass
        taken.enter_context(places.hold("b"))
        with pytest.raises(Exception, match="Too many"), places.hold("c"):
            pass
    assert places.taken == 0
    assert repr(places) == "<Places 0 of 3 taken>"


# Which route a request is for.


@pytest.mark.parametrize(
    ("method", "path", "rule"),
    [
        (b"GET", b"/health", "open"),
        (b"HEAD", b"/health", "open"),
        (b"GET", b"/console/pages/index.js", "open"),
        (b"GET", b"/v1/models/a/b", "models"),
        (b"GET", b"/v1/admin/w%6frkers", "read"),
        (b"GET", b"/v1/admin/workers/launch", "read"),
        (b"POST", b"/v1/admin/workers/launch", "write"),
        (b"DELETE", b"/v1/admin/workers/launch", "write"),
        (b"GET", b"/v1/admin/workers/a%2fb", None),
        (b"GET", b"/v1/admin/workers/", None),
        (b"GET", b"/v1/models/", None),
        (b"POST", b"/health", None),
        (b"GET", b"/openapiXjson", None),
        (b"GET", b"/v1/admin/workers\n", None),
        (b"OPTIONS", b"/health", None),
        (b"\xff", b"/\xff", None),
    ],
)
def test_the_rule_of_a_request(method, path, rule):
    """It is found by method and path, as the control plane itself reads them."""
    assert find_rule(method, path) == rule


def test_each_route_is_found():
    """No route hides another."""
    for (method, path), rule in ROUTES.items():
        asked = path.replace("<path:", "").replace("<", "").replace(">", "").encode()
        assert find_rule(method.encode(), asked) == rule
        assert method in methods_of(asked)
    assert methods_of(b"/health") == ["GET", "HEAD", "OPTIONS"]
    assert methods_of(b"/nothing") == []


async def test_an_unknown_route_or_method_needs_no_place(gateway_to, connect, monkeypatch):
    """Another method gets 405 with those that there are, and an unknown path 404; no place is needed for that."""
    monkeypatch.setattr(control_plane, "PLACES_MAX", 0)
    client = await connect(await gateway_to({}))
    status, _, body = await client.get(b"/v1/admin/nothing")
    assert (status, code_of(body)) == (404, "not_found")
    status, headers, body = await client.get(b"/v1/admin/models/load")
    assert (status, code_of(body), headers[b"allow"]) == (405, "method_not_allowed", b"OPTIONS, POST")
    await client.send(asking(b"/v1/admin/keys", method=b"OPTIONS"))
    status, headers, _ = await client.response(b"OPTIONS")
    assert (status, headers[b"allow"]) == (200, b"GET, HEAD, OPTIONS, POST")


def test_the_bound_has_a_name():
    """Operators may change how long an answer waits for its client."""
    assert attrs.fields_dict(type(Config().timeouts))["unread_s"].default == 10


# Many of them, against a gateway of their own, and beside it one without any.

READERS = 2000
SAMPLES = 300
MANY_TIMES = 3
SLACK_S = 0.01
"""The load of the machine hits both gateways, of which the requests alternate, but not each alike."""


@pytest.mark.slow
@pytest.mark.parametrize("addresses", [1, 500])
async def test_thousands_of_stalled_readers_slow_no_other_client(serve, connect, tmp_path, addresses):
    """2000 readers that do not read, from one address or from 500: answers are as fast as those of another gateway."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 3 * READERS), hard))
    _, upstream = await serve(hello)
    try:
        with contextlib.ExitStack() as stack:
            ports = []
            for name in ("without", "with"):
                (tmp_path / name).mkdir()
                _, port = stack.enter_context(running_gateway(tmp_path / name, text_of(tmp_path / name, upstream)))
                ports.append(port)
            await measured(connect, ports)  # what is slow only once
            for number in range(READERS):
                sock = stack.enter_context(trio.socket.socket())
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, TINY_BYTES)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
                place = number % addresses
                await sock.bind((f"127.0.{1 + place // 250}.{1 + place % 250}", 0))
                await sock.connect(("127.0.0.1", ports[1]))
                await sock.send(asking((FILE, b"/console/vendor/purify.es.mjs")[number % 2]) * ASKED)
            took = await measured(connect, ports)
        print("\nmilliseconds, the slowest in ten, without and with readers:")
        for what, (without, beside) in took.items():
            print(f"  {without * 1000:6.2f} {beside * 1000:6.2f}  {what}")
        assert not [what for what, (without, beside) in took.items() if beside > MANY_TIMES * without + SLACK_S]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def text_of(directory, upstream):
    """Return the configuration of a gateway of its own."""
    return (
        f'[server_settings]\nport = 0\nstate_directory = "{directory}/state"\nwatch_config = false\n'
        f'[logs]\naccess_log = ""\n[[external_routes]]\nmodel_name = "m"\napi_base = "http://127.0.0.1:{upstream}/v1"\n'
        + ALL_KEYS
    )


async def measured(connect, ports):
    """Return how long the slowest in ten answers of each kind take at each port, in seconds. All must be 200."""
    took = {request.partition(b" HTTP")[0].decode(): [[] for _ in ports] for request, _ in EVERYTHING}
    clients = [[await connect(port) for port in ports] for _ in EVERYTHING]
    for _ in range(SAMPLES):
        for (request, method), pair in zip(EVERYTHING, clients, strict=True):
            for client, times in zip(pair, took[request.partition(b" HTTP")[0].decode()], strict=True):
                since = time.perf_counter()
                await client.send(request)
                status, _, body = await client.response(method)
                times.append(time.perf_counter() - since)
                assert status == 200, body
    return {what: [percentile(times, 0.9) for times in both] for what, both in took.items()}
