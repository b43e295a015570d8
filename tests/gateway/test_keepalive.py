"""Comments that keep a waiting stream alive, and those that an engine sends itself."""

import json

import pytest
import trio
from support.peers import JSON_POST, LIMIT_S, SSE_END, SSE_HEAD, chunk, event, plain

from ichat.http.body_mover import is_comment
from ichat.http.keepalive import COMMENT

ON = "[timeouts]\nsse_keepalive_s = 0.1\n"
ENGINES_OWN = chunk(b": ping - 2026-11-22\r\n\r\n")


async def read_until(client, found, data=b""):
    """Return what the client has received once `found(data)` holds."""
    with trio.fail_after(LIMIT_S):
        while not found(data):
            more = await client.stream.receive_some()
            assert more, data
            data += more
    return data


async def ask(client, path=b"/v1/chat/completions", **more):
    body = json.dumps({"model": "m", "stream": True, **more}).encode()
    await client.send(JSON_POST % (path, len(body), body))


def events_of(data):
    """Return the events of a response in chunks, comments and all, and whether its end came."""
    head, _, rest = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"content-type: text/event-stream" in head
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body += rest[:length]
        assert rest[length : length + 2] == b"\r\n"
        rest = rest[length + 2 :]
        if not length:
            return body.decode().split("\n\n")[:-1], rest == b""
    return body.decode().split("\n\n")[:-1], False


@pytest.mark.parametrize("begins", ["with its head", "with its first token"])
async def test_a_stream_that_waits_for_its_upstream_gets_comments(serve, gateway_to, connect, begins, autojump_clock):
    """Comments come until the first byte of the body and never after it; the connection serves the next request."""
    go = trio.Event()

    async def reply(stream, head, body):
        if begins == "with its first token":
            await stream.send_all(SSE_HEAD)
        await go.wait()
        if begins == "with its head":
            await stream.send_all(SSE_HEAD)
        await stream.send_all(event(1))
        await trio.sleep(1.2)  # more than a sweep of the hub: no comment comes any more
        await stream.send_all(event(2) + SSE_END)

    _, port = await serve(reply)
    client = await connect(await gateway_to({"m": port}, ON))
    for _ in range(2):
        await ask(client)
        data = await read_until(client, lambda data: data.count(COMMENT) >= 2)
        go.set()
        data = await read_until(client, lambda data: data.endswith(b"\r\n0\r\n\r\n"), data)
        events, has_ended = events_of(data)
        assert has_ended
        assert [one for one in events if one != ": keep-alive"] == ['data: {"n": 1}', 'data: {"n": 2}', "data: [DONE]"]
        assert events.index('data: {"n": 1}') == events.count(": keep-alive")
        go = trio.Event()


async def test_a_stream_that_waits_in_a_queue_gets_comments(serve, gateway_to, connect):
    """The one that is served is not disturbed, the one that waits is kept alive and then served."""
    go = trio.Event()

    async def reply(stream, head, body):
        await stream.send_all(SSE_HEAD + event(1))
        await go.wait()
        await stream.send_all(SSE_END)

    upstream, port = await serve(reply)
    gateway = await gateway_to({"m": port}, ON + "[routing]\nmax_in_flight = 1\n")
    first, second = await connect(gateway), await connect(gateway)
    await ask(first)
    await read_until(first, lambda data: data.endswith(event(1)))
    await ask(second)
    data = await read_until(second, lambda data: data.count(COMMENT) >= 2)
    assert len(upstream.requests) == 1
    go.set()
    served = await read_until(first, lambda data: data.endswith(SSE_END))
    assert COMMENT not in served
    data = await read_until(second, lambda data: data.endswith(SSE_END), data)
    assert events_of(data)[0][-2:] == ['data: {"n": 1}', "data: [DONE]"]


REFUSED = json.dumps({"error": {"message": "no.", "type": "t", "param": None, "code": "c"}}, indent=1).encode()


@pytest.mark.parametrize(
    ("answer", "last"),
    [
        (b"", "upstream_failed"),
        (plain(REFUSED).replace(b"200 OK", b"503 No"), "c"),
        (b"HTTP/1.1 500 No\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(REFUSED[:9]) + chunk(REFUSED[9:]) + b"0\r\n\r\n", "c"),
        (b"HTTP/1.1 400 No\r\ncontent-type: application/json\r\n\r\n" + REFUSED, "c"),
    ],
    ids=["nothing", "length", "chunks", "until it closes"],
)  # fmt: skip
async def test_a_failure_behind_comments_is_the_last_event(serve, gateway_to, connect, answer, last):
    """The client has had a 200 already, so the error is an event of the stream, and no [DONE] follows it."""
    go = trio.Event()

    async def reply(stream, head, body):
        await go.wait()
        await stream.send_all(answer)
        return "close"

    _, port = await serve(reply)
    client = await connect(await gateway_to({"m": port}, ON))
    await ask(client)
    data = await read_until(client, lambda data: COMMENT in data)
    go.set()
    events, has_ended = events_of(data + await client.everything())
    assert has_ended
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == last
    assert set(events[:-1]) == {": keep-alive"}


@pytest.mark.parametrize(
    ("path", "kind"), [(b"/v1/messages", "error"), (b"/v1/responses", "error"), (b"/v1/completions", None)]
)
async def test_the_last_event_is_in_the_form_of_its_protocol(serve, gateway_to, connect, path, kind):
    """Anthropic's clients look at the event's name, OpenAI's at the member `error`."""
    go = trio.Event()

    async def reply(stream, head, body):
        await go.wait()
        return "close"

    _, port = await serve(reply)
    client = await connect(await gateway_to({"m": port}, ON))
    await ask(client, path)
    await read_until(client, lambda data: COMMENT in data)
    go.set()
    events, _ = events_of(b"HTTP/1.1 200 \r\ncontent-type: text/event-stream\r\n\r\n" + await client.everything())
    name, _, data = events[-1].rpartition("data: ")
    assert name == ("event: error\n" if kind else "")
    assert json.loads(data).get("type") == kind
    assert json.loads(data)["error"]["code"] == "upstream_failed"


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 14\r\n\r\n",
    ],
    ids=["until it closes", "length"],
)
async def test_a_stream_in_another_framing_follows_comments_in_chunks(serve, gateway_to, connect, head):
    """The client was told of chunks, so it gets chunks, and their end where the upstream's body ends."""
    go = trio.Event()

    async def reply(stream, _head, body):
        await go.wait()
        await stream.send_all(head)
        await stream.send_all(b"data: [DONE]\n\n")
        return "close"

    _, port = await serve(reply)
    client = await connect(await gateway_to({"m": port}, ON))
    await ask(client)
    data = await read_until(client, lambda data: COMMENT in data)
    go.set()
    data = await read_until(client, lambda data: data.endswith(b"\r\n0\r\n\r\n"), data)
    assert events_of(data)[0][-1] == "data: [DONE]"


@pytest.mark.parametrize("config", ["", ON])
async def test_only_streams_with_keepalives_configured_get_comments(serve, gateway_to, connect, config, autojump_clock):
    """Comments are for streams, and only where they are configured."""

    async def reply(stream, head, body):
        await trio.sleep(1.2)  # more than a sweep of the hub
        await stream.send_all(plain(b"{}"))

    _, port = await serve(reply)
    client = await connect(await gateway_to({"m": port}, config))
    status, _, body = await client.ask(stream=not config)
    assert (status, body) == (200, b"{}")


@pytest.mark.parametrize("keepalive", ["", "sse_keepalive_s = 0.1\n"])
async def test_an_engines_comments_are_no_progress(serve, gateway_to, connect, keepalive):
    """They reach the client, but an engine that sends nothing else is given up, and none was a first byte."""

    async def reply(stream, head, body):
        await stream.send_all(SSE_HEAD)
        while True:
            await stream.send_all(ENGINES_OWN)
            await trio.sleep(0.05)

    _, port = await serve(reply)
    gateway = await gateway_to({"m": port}, f"[timeouts]\nstream_stall_s = 0.5\n{keepalive}")
    client = await connect(gateway)
    await ask(client)
    events, _ = events_of(await client.everything())
    assert any(one.startswith(": ping") for one in events)
    assert json.loads(events[-1].rpartition("data: ")[2])["error"]["code"] == "upstream_timeout"
    _, _, metrics = await (await connect(gateway)).get(b"/metrics")
    assert b"ichat_relay_chunks_total 0.0" in metrics


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b": a\n\n", True),
        (b":\n", True),
        (b"5\r\n: a\n\n\r\n", True),
        (b"5\r\n: a\n\n\r\n5\r\n: b\n\n\r\n", True),
        (ENGINES_OWN, True),
        (b"", False),
        (b"a: b\n\n", False),
        (b": a", False),
        (b"5\r\n: a\n\n\r\n9\r\ndata: 1\n\n\r\n", False),
        (b": a\n\ndata: 1\n\n", False),
        (b":" + b"a" * 256 + b"\n\n", False),
        (b":\n" * 63 + b"x", False),  # read in one way: in two for each line, it would take years
    ],
)
def test_a_comment_is_whole_lines_that_begin_with_a_colon(data, expected):
    """Whole lines that begin with a colon, in chunks or not, and nothing else."""
    assert is_comment(bytearray(b"xx" + data + b"xx"), 2, 2 + len(data)) is expected
