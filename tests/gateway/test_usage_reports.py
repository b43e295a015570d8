"""Workers that tell the gateway the tokens of each request, beside bodies that the client gets as they are."""

import importlib
import json

import pytest
import trio
from support.exposition import heartbeat
from support.peers import SSE_END, SSE_HEAD, chunk, event, plain
from support.programs import LIMIT_S

from ichat.engines.asgi import call_under_way
from ichat.protocol.usage import parse_usage, usage_in_trailers

STREAM = SSE_HEAD + event(0) + event(1) + SSE_END
HEAD = b"POST /v1/chat/completions HTTP/1.%d\r\nhost: localhost\r\ncontent-length: %d\r\n%b\r\n%b"


def with_trailer(stream, usage):
    assert stream.endswith(b"\r\n\r\n")
    return stream[:-2] + b"x-ichat-usage: %b\r\nx-other: 1\r\n\r\n" % usage


@pytest.fixture
def site(serve, connect, gateway_to):
    """Start a worker and its gateway: `ask, counts, heads = await site(pieces of a response)`."""

    async def start(*pieces, more="", **known):
        heads, asked = [], []

        async def reply(stream, head, body):
            if body:
                heads.append(dict(head.headers))
            for piece in pieces:
                await stream.send_all(piece)
                await trio.testing.wait_all_tasks_blocked()

        _, port = await serve(reply)
        gateway = await gateway_to({}, more)
        await heartbeat(connect, gateway, port, heartbeat_interval=3600, **{"usage_reports": True, **known})

        async def ask(version=1, extra=b"", body=b'{"model": "m", "stream": true}'):
            asked.append(body)
            client = await connect(gateway)
            await client.send(HEAD % (version, len(body), extra + b"connection: close\r\n", body))
            received = b""
            with trio.fail_after(LIMIT_S):
                while data := await client.stream.receive_some():
                    received += data
            return received

        async def counts():
            """Return the tokens once all requests are counted: a relay's client has its response before."""
            with trio.fail_after(LIMIT_S):
                while sum(float(count) for _, count in await samples("ichat_requests_total")) < len(asked):
                    await trio.sleep(0.005)
            lines = await samples("ichat_tokens_total")
            found = {name.partition('direction="')[2].partition('"')[0]: float(count) for name, count in lines}
            return found["input"], found["output"], found["cached"]

        async def samples(metric):
            _, _, text = await (await connect(gateway)).get(b"/metrics?workers=0")
            return [line.split() for line in text.decode().splitlines() if line.startswith(f"{metric}{{")]

        return ask, counts, heads

    return start


@pytest.mark.parametrize("step", [1, 2, 3, 7, 10_000])
async def test_a_trailer_is_for_the_gateway_alone(site, step):
    """However it is cut: the client gets the stream as it is without one, and the connection serves the next request."""
    told = with_trailer(STREAM, b"70,8,9")
    ask, counts, heads = await site(*(told[at : at + step] for at in range(0, len(told), step)))
    for number in range(1, 3):
        received = await ask()
        assert received.partition(b"\r\n\r\n")[2] == STREAM.partition(b"\r\n\r\n")[2]
        assert b"x-ichat-usage" not in received
        assert b"x-other" not in received
        assert await counts() == (70 * number, 8 * number, 9 * number)
    assert [head[b"x-ichat-usage"] for head in heads] == [b"1", b"1"]


async def test_an_old_client_gets_no_trailer_either(site):
    """HTTP/1.0 has no chunks."""
    ask, counts, _ = await site(with_trailer(STREAM, b"7,1,0"))
    assert (await ask(version=0)).endswith(b'data: {"n": 0}\n\ndata: {"n": 1}\n\ndata: [DONE]\n\n')
    assert await counts() == (7, 1, 0)


async def test_comments_do_not_keep_the_trailer_from_the_gateway(site):
    """A stream that has begun with comments is put in chunks anew."""
    ask, counts, _ = await site(with_trailer(STREAM, b"7,1,0"), more="[timeouts]\nsse_keepalive_s = 0.001\n")
    received = await ask()
    assert received.endswith(b"0\r\n\r\n")
    assert b"x-ichat-usage" not in received
    assert await counts() == (7, 1, 0)


async def test_a_plain_response_reports_usage_in_a_header(site):
    """What the body says is not asked."""
    ask, counts, _ = await site(plain(b'{"usage": {"prompt_tokens": 1}}', b"X-Ichat-Usage: 5,4,3\r\n"))
    received = await ask(body=b'{"model": "m"}')
    assert received.endswith(b'{"usage": {"prompt_tokens": 1}}')
    assert b"ichat-usage" not in received.lower()
    assert await counts() == (5, 4, 3)


@pytest.mark.parametrize("trailer", [STREAM, with_trailer(STREAM, b"7,8"), with_trailer(STREAM, b"7,8,-9")])
async def test_a_stream_without_a_report_is_estimated(site, trailer, relay_count):
    """By its pieces, and by the request's length."""
    ask, counts, _ = await site(*(trailer[at : at + 30] for at in range(0, len(trailer), 30)))
    await ask()
    given, made, cached = await counts()
    assert (given, cached) == (len(b'{"model": "m", "stream": true}') // 4, 0)
    fewest = 0 if relay_count else 2  # all pieces may reach another process at once, and are few bytes
    assert fewest <= made <= len(trailer) / 30


async def test_reports_that_do_not_arrive_are_logged_once(site, caplog):
    """A proxy before a worker may drop trailers: the operator has to know that its streams are only estimated."""
    ask, counts, _ = await site(STREAM)
    for _ in range(3):
        await ask()
    assert await counts() > (0, 0, 0)
    [said] = [one for one in caplog.records if "came without them" in one.getMessage()]
    assert (said.levelname, "drop trailers" in said.getMessage()) == ("WARNING", True)


@pytest.mark.parametrize(
    "stream", [with_trailer(STREAM, b"7,1,0"), plain(b"{}", b"X-Ichat-Usage: 5,4,3\r\n"), plain(b"{}")]
)
async def test_reports_that_arrive_are_not_missed(site, stream, caplog):
    """And those that are not expected: a response that is no stream may use no tokens."""
    ask, _, _ = await site(stream)
    await ask()
    assert "came without them" not in caplog.text


async def test_a_client_that_leaves_before_the_trailer_pays_an_estimate(serve, connect, gateway_to, caplog):
    """Pieces are no events: many of them come at once where the client or the gateway is slow."""

    async def reply(stream, head, body):
        if body:
            await stream.send_all(SSE_HEAD + b"".join(chunk(b"data: " + b"x" * 300 + b"\n\n") for _ in range(400)))
            await trio.sleep_forever()

    _, port = await serve(reply)
    gateway = await gateway_to({}, "")
    await heartbeat(connect, gateway, port, heartbeat_interval=3600, usage_reports=True)
    client, received = await connect(gateway), b""
    body = b'{"model": "m", "stream": true}'
    await client.send(HEAD % (1, len(body), b"", body))
    while received.count(b"data:") < 400:
        received += await client.stream.receive_some()
    await client.stream.aclose()
    rows = []
    while not rows:
        rows = json.loads((await (await connect(gateway)).get(b"/v1/admin/usage"))[2])["rows"]
    assert 300 <= rows[0]["output_tokens"] <= 600
    assert "came without them" not in caplog.text, "nothing was lost on the way"


async def test_only_workers_that_report_usage_are_asked(site):
    """An older worker's body is read in passing, and no client can ask."""
    body = b'{"usage": {"prompt_tokens": 6, "completion_tokens": 2}}'
    ask, counts, heads = await site(plain(body, b"x-ichat-usage: 5,4,3\r\n"), usage_reports=False)
    received = await ask(body=b'{"model": "m"}', extra=b"X-Ichat-Usage: 1\r\n")
    assert b"x-ichat-usage" not in received
    assert b"x-ichat-usage" not in heads[0]
    assert await counts() == (6, 2, 0)


@pytest.mark.parametrize("asks", [True, False])
async def test_a_worker_reports_the_usage_that_its_engine_noted(make_worker, connect, monkeypatch, asks):
    """In a header or, of a stream, in a trailer; to nobody who has not asked. The next request is another one."""
    fake = importlib.import_module("fake_engine").Fake
    app = fake.app

    async def noting(self, scope, receive, send):
        call = call_under_way()
        if call.usage is not None:
            call.usage += [lambda: (5, 3, 2), lambda: (1, 1, 0)]
        await app(self, scope, receive, send)

    monkeypatch.setattr(fake, "app", noting)
    _, port = await make_worker()
    client = await connect(port)
    wish = b"X-Ichat-Usage: 1\r\n" if asks else b""
    for _ in range(2):
        body = b'{"model": "m"}'
        await client.send(HEAD % (1, len(body), wish, body))
        status, headers, _ = await client.response()
        assert (status, headers.get(b"x-ichat-usage")) == (200, b"6,4,2" if asks else None)
        body = b'{"model": "m", "stream": true}'
        await client.send(HEAD % (1, len(body), wish, body))
        received = b""
        while not received.endswith(b"\r\n\r\n") or b"\r\n0\r\n" not in received:
            received += await client.stream.receive_some()
        assert received.endswith(chunk(b"data: [DONE]\n\n") + b"0\r\n" + b"x-ichat-usage: 6,4,2\r\n" * asks + b"\r\n")


def test_an_invalid_report_is_ignored():
    """Three numbers, and nothing else."""
    assert parse_usage(b"1,22,333") == (1, 22, 333)
    assert [parse_usage(value) for value in (b"", b"1,2", b"1,2,3,4", b"a,2,3", b"1, 2,3", b"-1,2,3", b"9" * 13)] == [
        None
    ] * 7
    assert usage_in_trailers(b"a: b\r\nX-Ichat-Usage: 1,2,3 \r\nc: d\r\n") == (1, 2, 3)
    assert usage_in_trailers(b"x-x-ichat-usage: 1,2,3\r\n") is None
    assert usage_in_trailers(bytearray()) is None
