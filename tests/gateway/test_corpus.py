"""Requests that are malformed, or that two readers could read in two ways: refused, or passed on as h11 reads them.

Each entry of the corpus says what comes of it; h11 itself, asked in the test, says whether that is right. Behind nearly
all of them stands a request that must reach the upstream as a request of its own or not at all.
"""

import contextlib
import itertools
import json
import random

import h11
import pytest
import trio
import trio.testing
from support.corpus import (
    BODY,
    BODY_BYTES_MAX,
    CASES_BY_KIND,
    FORWARDED,
    FORWARDED_LAST,
    HEAD_BYTES_MAX,
    NOT_HTTP_1,
    PROBE,
    SMUGGLED,
    UNCLEAR,
    chunked,
    passed_on,
    post,
    read_by_h11,
    sized,
)
from support.peers import Upstream, code_of, plain, turns_until, until
from support.programs import LIMIT_S

from ichat.proxy.planes import is_control

ANY_HOST = 'hosts = ["*"]\n'
PIECES_MAX = 500
"""A longer entry is not sent byte by byte, but cut at so many places."""


def cut(data):
    """Cut into single bytes, or at places that are always the same ones."""
    dice = random.Random(data)
    places = min(len(data) - 1, PIECES_MAX)
    cuts = [0, *sorted(dice.sample(range(1, len(data)), places)), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(cuts)]


class Recorder(Upstream):
    """An upstream that also keeps what it received byte for byte."""

    def __init__(self):
        super().__init__(self.answer)
        self.forget()

    def forget(self):
        self.requests = []
        self.raw = b""

    async def answer(self, stream, head, body):
        await stream.send_all(plain(b"{}", b"x-recorded: 1\r\n"))

    async def serve(self, stream):
        await super().serve(Recorded(stream, self))


class Recorded:
    """A stream whose received bytes are kept."""

    def __init__(self, stream, recorder):
        self.stream = stream
        self.recorder = recorder
        self.send_all = stream.send_all
        self.aclose = stream.aclose

    async def receive_some(self):
        data = await self.stream.receive_some()
        self.recorder.raw += data
        return data


def read_by_the_length(raw):
    """Read requests as the simplest upstream does, which knows CRLF and one Content-Length and nothing else."""
    requests = []
    while raw:
        head, _, raw = raw.partition(b"\r\n\r\n")
        line, *lines = head.split(b"\r\n")
        headers = [tuple(line.split(b": ", 1)) for line in lines]
        [length] = [int(value) for name, value in headers if name.lower() == b"content-length"]
        assert not [name for name, _ in headers if b"transfer-encoding" == name.lower()]
        assert b"\n" not in head.replace(b"\r\n", b"")
        method, target, _ = line.split(b" ")
        requests.append((method, target, headers, raw[:length]))
        raw = raw[length:]
    return requests


class Answers:
    """The responses on one connection, one after another."""

    def __init__(self, stream):
        self.stream = stream
        self.data = b""

    async def next(self, method):
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        parser.send(h11.EndOfMessage())
        if self.data:
            parser.receive_data(self.data)
        head, body = None, b""
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                parser.receive_data(await self.stream.receive_some())
            elif isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                self.data = parser.trailing_data[0]
                return head.status_code, dict(head.headers), body
            else:
                assert isinstance(event, h11.InformationalResponse), event
                assert event.status_code == 100

    async def rest(self):
        try:
            while data := await self.stream.receive_some():
                self.data += data
        except trio.BrokenResourceError:
            pass  # closed is closed
        return self.data


def check_entry(case, reading):
    """An entry says of itself what h11 says of it, and names its rule where the gateway is stricter."""
    read = len(reading.requests)
    for number, answer in enumerate(case.answers):
        if answer.stricter:
            assert number < read or not (reading.refusal or reading.complete)
        elif answer.status == 200:
            assert number < read
        else:
            assert number == read
            assert answer.says in reading.refusal
            assert reading.refusal
    last = case.answers[-1] if case.answers else FORWARDED
    if last is FORWARDED_LAST:
        assert reading.ends
    if not last.closes:
        assert (len(case.answers), reading.refusal, reading.ends) == (read, "", False)
        assert reading.complete != case.unfinished


async def send(stream, pieces):
    for piece in pieces:
        await stream.send_all(piece)
        await trio.lowlevel.checkpoint()  # nearly always enough for the gateway to read it


async def expect_answer(answers, answer, method, refusal=""):
    """The next response is the one that the entry announces, in OpenAI's shape where it refuses."""
    status, headers, body = await answers.next(method if not answer.closes else b"POST")
    assert status == answer.status, body
    assert (headers.get(b"connection") == b"close") == answer.closes, headers
    if status != 200:
        assert headers[b"x-ichat-error"] == b"gateway"
        if method != b"HEAD" or answer.closes:
            assert code_of(body) == answer.code
            told = json.loads(body)["error"]["message"]
            own_words = () if answer.stricter else [one.says for one in UNCLEAR]  # the gateway looks before h11 does
            assert any(says in told for says in (answer.says if answer.stricter else refusal, *own_words)), told
    return b"x-recorded" in headers


@pytest.fixture
async def recorder(nursery):
    """An upstream that records, and its port."""
    recorder = Recorder()
    listeners = await nursery.start(trio.serve_tcp, recorder.serve, 0)
    recorder.port = listeners[0].socket.getsockname()[1]
    return recorder


def test_the_corpus_is_one():
    """Every entry can be told from all others."""
    cases = [case for kind in CASES_BY_KIND.values() for case in kind]
    assert len({case.id for case in cases}) == len(cases) >= 75
    assert len({case.data for case in cases}) == len(cases)


@pytest.mark.parametrize("how", ["whole", "bytes"])
@pytest.mark.parametrize("kind", CASES_BY_KIND)
async def test_refused_or_passed_on_as_h11_reads_it(recorder, gateway_to, caplog, kind, how):
    """What h11 does not read is refused and ends the connection; what it reads arrives so, framed by one length."""
    limits = f"[limits]\nhead_bytes_max = {HEAD_BYTES_MAX}\nbody_bytes_max = {BODY_BYTES_MAX}\n"
    port = await gateway_to({"m": recorder.port}, ANY_HOST + limits)
    failed = []
    for case in CASES_BY_KIND[kind]:
        recorder.forget()
        caplog.clear()
        try:
            await check_case(case, how, recorder, port)
            assert "a bug" not in caplog.text
        except (AssertionError, trio.TooSlowError) as error:
            error.add_note(f"the entry {case.id}")
            failed.append(error)
    if failed:
        raise ExceptionGroup("entries that were read in another way", failed)


async def check_case(case, how, recorder, port):
    """Send an entry of the corpus on a connection of its own, and compare what comes of it with what h11 makes of it."""
    pieces = [case.data] if how == "whole" else cut(case.data)
    reading, in_pieces = read_by_h11([case.data]), read_by_h11(pieces)
    assert (in_pieces.requests, bool(in_pieces.refusal)) == (reading.requests, bool(reading.refusal))
    check_entry(case, reading)
    refusal = reading.refusal if how == "whole" else NOT_HTTP_1  # in pieces h11 may say something else first
    methods = [head.method for head, _ in reading.requests] + [b"POST"]
    expected = []
    with trio.fail_after(LIMIT_S):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            try:
                await send(stream, pieces)
            except trio.BrokenResourceError:
                assert case.answers[-1].closes
            answers = Answers(stream)
            for number, answer in enumerate(case.answers):
                is_recorded = await expect_answer(answers, answer, methods[number], refusal)
                if answer.status == 200:
                    head, body = reading.requests[number]
                    assert is_recorded != is_control(head.target.partition(b"?")[0])
                    if is_recorded:
                        expected.append((head.method, head.target, passed_on(list(head.headers)), body))
            if case.unfinished:
                await trio.testing.wait_all_tasks_blocked(0.01)
                await stream.send_eof()
            elif not case.answers[-1].closes:
                await stream.send_all(PROBE)
                await expect_answer(answers, FORWARDED_LAST, b"POST")
                expected.append((b"POST", b"/v1/completions", [], b'{"model":"m","probe":1}'))
            assert await answers.rest() == b""
            await trio.testing.wait_all_tasks_blocked(0.001)
    received = [
        (head.method, head.target, passed_on(list(head.headers)), bytes(body)) for head, body in recorder.requests
    ]
    assert received == expected
    simplest = read_by_the_length(recorder.raw)
    assert [(method, target, body) for method, target, _, body in simplest] == [
        (method, target, body) for method, target, _, body in expected
    ]
    assert recorder.raw.count(b"smuggled") == sum(body.count(b"smuggled") for *_, body in expected)


async def trickle(stream, more):
    """Send single bytes, again and again, until the connection is closed."""
    try:
        for byte in itertools.cycle(more):
            await stream.send_all(bytes([byte]))
            await trio.sleep(0.01)
    except trio.BrokenResourceError:
        pass


async def flood(stream, more):
    """Send as much as is taken until the connection is closed."""
    try:
        while True:
            await stream.send_all(more)
    except trio.BrokenResourceError:
        pass


async def expect_timeout(answers):
    status, headers, body = await answers.next(b"POST")
    assert status == 408, body
    assert (code_of(body), headers[b"connection"]) == ("request_timeout", b"close")
    assert await answers.rest() == b""


SLOW_HEADS = {
    "request line": (b"POST /", b"a"),
    "names": (b"POST / HTTP/1.1\r\n", b"a"),
    "values": (b"POST / HTTP/1.1\r\nhost: localhost\r\na: ", b"b"),
    "headers": (b"POST / HTTP/1.1\r\n", b"a: b\r\n"),
    "folds": (b"POST / HTTP/1.1\r\nhost: x", b"\r\n "),
    "headers of a second request": (sized() + b"POST / HTTP/1.1\r\n", b"a: b\r\n"),
}


@pytest.mark.parametrize("what", SLOW_HEADS)
async def test_a_head_that_does_not_end_is_given_up(recorder, gateway_to, connect, nursery, what):
    """No byte of a head prolongs its time."""
    begin, more = SLOW_HEADS[what]
    client = await connect(await gateway_to({"m": recorder.port}, ANY_HOST + "[timeouts]\nhead_s = 0.3\n"))
    await client.send(begin)
    nursery.start_soon(trickle, client.stream, more)
    answers = Answers(client.stream)
    with trio.fail_after(LIMIT_S):
        if begin.startswith(sized()):
            assert (await answers.next(b"POST"))[0] == 200
        await expect_timeout(answers)
    assert len(recorder.requests) == (what == "headers of a second request")


SLOW_BODIES = {
    "length": (post(b"Content-Length: 60000"), b"a", trickle),
    "chunks": (chunked(b""), b"1\r\na\r\n", trickle),
    "extension": (chunked(b"1;"), b"a", trickle),
    "trailers": (chunked(b"d\r\n" + BODY + b"\r\n0\r\n"), b"X: y\r\n", trickle),
    "length behind 100": (post(b"Content-Length: 60000", b"Expect: 100-continue"), b"a", trickle),
    "many chunks": (chunked(b""), b"1\r\na\r\n" * 100_000, flood),
    "many extensions": (chunked(b""), (b"1;" + b"a" * 5000 + b"\r\na\r\n") * 100, flood),
}


@pytest.mark.parametrize("what", SLOW_BODIES)
async def test_a_body_that_does_not_end_is_given_up(recorder, gateway_to, connect, nursery, what):
    """No byte of a body prolongs its time, however slowly or fast they come."""
    begin, more, how = SLOW_BODIES[what]
    client = await connect(await gateway_to({"m": recorder.port}, ANY_HOST + "[timeouts]\nbody_s = 0.3\n"))
    await client.send(begin)
    nursery.start_soon(how, client.stream, more)
    with trio.fail_after(LIMIT_S):
        await expect_timeout(Answers(client.stream))
    assert not recorder.requests


async def test_slow_clients_are_bounded_in_number(recorder, gateway_to, connect, nursery, mock_clock):
    """While slow clients hold all connections a further one is told so; their time ends, and others are served."""
    limits = "[limits]\nconnections_max = 4\n[timeouts]\nhead_s = 0.3\n"
    port = await gateway_to({"m": recorder.port}, ANY_HOST + limits)
    slow = [await connect(port) for _ in range(4)]
    for client in slow:
        await client.send(b"POST / HTTP/1.1\r\n")
        nursery.start_soon(trickle, client.stream, b"a: b\r\n")
    for _ in range(3):
        status, headers, body = await (await connect(port)).ask()
        assert (status, code_of(body), headers[b"connection"]) == (503, "overloaded", b"close")
    for _ in range(2):
        mock_clock.jump(0.3)
        await trio.testing.wait_all_tasks_blocked()
    for client in slow:
        await expect_timeout(Answers(client.stream))
    while (await (await connect(port)).ask())[0] != 200:
        mock_clock.jump(0.1)
        await trio.testing.wait_all_tasks_blocked()
    assert len(recorder.requests) == 1


@pytest.mark.parametrize("pad", [0, 1_000_000])
async def test_a_client_that_only_asks_is_bounded(serve, gateway_to, connect, nursery, pad, mock_clock):
    """Of one that never reads no more requests are read than answers find room; it is dropped, others are served."""

    async def reply(stream, head, body):
        await stream.send_all(plain(b"x" * 2_000_000 if b"big" in body else b"{}"))

    upstream, port = await serve(reply)
    port = await gateway_to({"m": port}, ANY_HOST + "[timeouts]\nclient_stall_s = 0.5\n")
    greedy, other = await connect(port), await connect(port)
    sent = []

    async def ask_on():
        with contextlib.suppress(trio.BrokenResourceError):
            for _ in range(50):
                await greedy.send(sized(body=b'{"model":"m","big":"' + b"x" * pad + b'"}'))
                sent.append(1)

    nursery.start_soon(ask_on)
    await turns_until(lambda: upstream.requests)
    await trio.testing.wait_all_tasks_blocked(0.02)
    served = 0
    while not upstream.closed:
        assert (await other.ask())[0] == 200
        served += 1
        mock_clock.jump(0.1)
        await trio.testing.wait_all_tasks_blocked()
    assert served > 1
    asked = len(upstream.requests) - served
    assert 0 < asked < 25
    if pad:
        assert len(sent) < 50
    answers = await Answers(greedy.stream).rest()
    assert len(answers) < asked * 2_000_000
    assert answers.count(b"HTTP/1.1 200 OK") <= asked
    assert len(upstream.requests) == asked + served


@pytest.mark.parametrize("behind", [SMUGGLED, b"\r\n"], ids=["request", "empty line"])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_bytes_behind_the_last_request_cost_no_answer(serve, gateway_to, connect, version, behind):
    """The last answer arrives whole though the client has sent more, which nobody reads."""
    whole = b"x" * 3_000_000
    more = trio.Event()

    async def reply(stream, head, body):
        await more.wait()
        await stream.send_all(plain(whole))

    upstream, port = await serve(reply)
    client = await connect(await gateway_to({"m": port}, ANY_HOST))
    await client.send(sized(b"Connection: close", line=b"POST /v1/completions HTTP/" + version))
    await until(lambda: upstream.requests)
    await client.send(behind)
    more.set()
    answers = Answers(client.stream)
    with trio.fail_after(LIMIT_S):
        status, headers, body = await answers.next(b"POST")
        assert (status, headers[b"connection"], len(body)) == (200, b"close", len(whole))
        assert await answers.rest() == b""
    assert len(upstream.requests) == 1
