"""The gateway in this process, between raw clients and upstreams that do what the test says."""

import json
import random

import openai
import pytest
import trio
import trio.testing
from support.deployments import free_port
from support.peers import (
    AS_OWN,
    JSON_POST,
    LIMIT_S,
    SSE_END,
    SSE_HEAD,
    Upstream,
    chunk,
    code_of,
    event,
    plain,
    post_of,
    reset,
    until,
)

from ichat.config import load as configuration
from ichat.http import pool
from ichat.proxy.upstream_request import engine_target
from ichat.roles import gateway
from ichat.routing.endpoint import Endpoint
from ichat.routing.sessions import home_of

PAIR = [Endpoint(pool.Upstream(name, "", 1), name.encode(), 9) for name in ("external:m", "external:m#2")]


async def hello(stream, head, body):
    await stream.send_all(plain(b'{"hello": 1}'))


async def sse(stream, head, body):
    await stream.send_all(SSE_HEAD)
    for number in range(3):
        await stream.send_all(event(number))
    await stream.send_all(SSE_END)


async def test_a_request_reaches_its_upstream_unchanged(serve, gateway_to, connect):
    """The body arrives byte for byte, with the end-to-end headers and without those of the connection."""
    upstream, port = await serve(hello)
    client = await connect(await gateway_to({"m": port}))
    body = b'{ "model":"m",  "x": "\\u00e9\xc3\xa9", "n": 1e3 }'
    await client.send(
        b"POST /v1/chat/completions?a=b HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer k\r\nX-Mine: 1\r\nConnection: x-hop\r\n"
        b"X-Hop: 1\r\nTE: trailers\r\nExpect: 100-continue\r\nX-Request-Id: id-1\r\nContent-Length: %d\r\n\r\n%b"
        % (len(body), body)
    )
    status, headers, answer = await client.response()
    assert (status, answer) == (200, b'{"hello": 1}')
    assert headers[b"x-request-id"] == b"id-1"
    [(head, received)] = upstream.requests
    assert received == body
    assert head.target == b"/v1/chat/completions?a=b"
    names = dict(head.headers)
    assert names[b"host"] == b"127.0.0.1:%d" % port
    assert names[b"authorization"] == b"Bearer k"
    assert names[b"x-mine"] == b"1"
    assert names[b"x-request-id"] == b"id-1"
    assert not {b"x-hop", b"te", b"expect", b"connection"} & set(names)


async def test_concurrent_streams_arrive_byte_for_byte(serve, gateway_to, connect, nursery):
    """32 streams at once, cut at random places by the upstream: every client gets exactly what its upstream sent."""
    sent = {}

    async def reply(stream, head, body):
        number = json.loads(body)["number"]
        dice = random.Random(number)
        data = b"".join(event(f"{number}.{part} " + "x" * dice.randrange(400)) for part in range(200)) + SSE_END
        sent[number] = data
        await stream.send_all(SSE_HEAD)
        while data:
            cut = dice.randrange(1, 3000)
            await stream.send_all(data[:cut])
            data = data[cut:]
            await trio.sleep(dice.random() * 0.002)

    _, port = await serve(reply)
    gateway = await gateway_to({"m": port})
    got = {}

    async def one(number):
        client = await connect(gateway)
        body = json.dumps({"model": "m", "stream": True, "number": number}).encode()
        await client.send(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            % len(body)
            + body
        )
        got[number] = await client.everything()

    async with trio.open_nursery() as streams:
        for number in range(32):
            streams.start_soon(one, number)
    for number in range(32):
        head, _, body = got[number].partition(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head
        assert body == sent[number]


async def test_no_head_ends_like_a_body(serve, gateway_to, connect):
    """Simple clients look for a 0 and two line breaks: a number at the end of the head would end their stream."""

    async def reply(stream, head, body):
        await stream.send_all(SSE_HEAD)
        await trio.sleep(0.002)
        await stream.send_all(event(1) + SSE_END)

    _, port = await serve(reply)
    client = await connect(await gateway_to({"m": port}))
    body = b'{"model": "m"}'
    for number in range(20):
        await client.send(post_of(body, head=b"x-request-id: a%d0\r\n" % number))
        data = b""
        with trio.fail_after(LIMIT_S):
            while not data.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
                data += await client.stream.receive_some()
                await trio.lowlevel.checkpoint()
        assert data.partition(b"\r\n\r\n")[0].endswith(b"\r\ntransfer-encoding: chunked")


async def test_a_slow_reader_holds_up_its_own_upstream_only(serve, gateway_to, connect):
    """Backpressure reaches the upstream of a client that does not read; another stream goes on; nothing is lost."""
    big = [chunk(b"%07d" % number + b"x" * 60_000) for number in range(400)]
    progress = []

    async def reply(stream, head, body):
        if json.loads(body).get("big"):
            await stream.send_all(SSE_HEAD)
            for piece in big:
                await stream.send_all(piece)
                progress.append(1)
            await stream.send_all(b"0\r\n\r\n")
        else:
            await sse(stream, head, body)

    _, port = await serve(reply)
    gateway = await gateway_to({"m": port})
    slow, quick = await connect(gateway), await connect(gateway)
    body = b'{"model": "m", "big": 1}'
    await slow.send(post_of(body, head=b"connection: close\r\n"))
    await until(lambda: progress)
    await trio.testing.wait_all_tasks_blocked(0.02)
    assert len(progress) < len(big), "the upstream was never held back"
    assert (await quick.ask())[2].endswith(b"[DONE]\n\n")
    received = await slow.everything()
    assert received.partition(b"\r\n\r\n")[2] == b"".join(big) + b"0\r\n\r\n"


@pytest.mark.parametrize("when", ["before the head", "after the head", "in the stream", "while it does not read"])
async def test_a_client_that_hangs_up_closes_its_upstream_in_every_phase(serve, gateway_to, connect, when):
    """In every phase the upstream connection is closed, which is what makes an engine abort."""
    begun = trio.Event()

    async def reply(stream, head, body):
        if when != "before the head":
            await stream.send_all(SSE_HEAD)
        begun.set()
        if when == "while it does not read":
            while True:
                await stream.send_all(chunk(b"x" * 60_000))
        if when == "in the stream":
            await stream.send_all(event(0))
        await stream.receive_some()
        return "close"

    upstream, port = await serve(reply)
    gateway = await gateway_to({"m": port}, "[timeouts]\nclient_stall_s = 3600\n")
    client = await connect(gateway)
    await client.send(post_of(b'{"model": "m"}'))
    with trio.fail_after(LIMIT_S):
        await begun.wait()
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert upstream.closed == 0
    if when == "in the stream":
        reset(client.stream)
    else:
        await client.stream.aclose()
    await until(lambda: upstream.closed == 1)
    metrics = (await (await connect(gateway)).get(b"/metrics"))[2].decode()
    assert 'ichat_requests_total{model="m",route="/v1/completions",status="499"} 1.0' in metrics
    assert "ichat_requests_in_flight 0.0" in metrics


async def test_connections_to_an_upstream_are_used_again(serve, gateway_to, connect, relay_count):
    """Requests one after another share one upstream connection of each process, whoever asks."""
    upstream, port = await serve(hello)
    gateway = await gateway_to({"m": port})
    for _ in range(3):
        client = await connect(gateway)
        for _ in range(3):
            assert (await client.ask())[0] == 200
    assert len(upstream.requests) == 9
    assert 1 <= upstream.connections <= max(1, relay_count)


async def test_a_kept_connection_that_the_upstream_drops_is_replaced(serve, gateway_to, connect, autojump_clock):
    """A request that an upstream drops together with a kept connection is sent again, once, on a fresh one."""

    async def reply(stream, head, body):
        if len(upstream.requests) == 2:
            return "close"
        await hello(stream, head, body)
        return None

    upstream, port = await serve(reply)
    client = await connect(await gateway_to({"m": port}))
    assert (await client.ask())[0] == 200
    assert (await client.ask())[0] == 200
    assert (len(upstream.requests), upstream.connections) == (3, 2)


async def test_a_kept_connection_that_breaks_late_is_not_replaced(serve, gateway_to, connect, autojump_clock):
    """Where the upstream had time to work on the request, it may have: nothing is generated twice."""

    async def reply(stream, head, body):
        if len(upstream.requests) == 2:
            await trio.sleep(60)
            return "close"
        await hello(stream, head, body)
        return None

    upstream, port = await serve(reply)
    client = await connect(await gateway_to({"m": port}))
    assert (await client.ask())[0] == 200
    status, _, body = await client.ask()
    assert (status, code_of(body)) == (502, "upstream_failed")
    assert len(upstream.requests) == 2


async def test_a_request_that_kills_its_upstream_kills_no_other(serve, nursery, connect):
    """A kept connection lost, and no new one to be had: the request may be the reason, so nobody else gets it."""
    other, other_port = await serve(hello)
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")

    accepting = trio.CancelScope()

    async def reply(stream, head, body):
        if len(victim.requests) == 2:
            accepting.cancel()
            await listeners[0].aclose()
            return "close"
        await hello(stream, head, body)
        return None

    async def accept():
        with accepting:
            await trio.serve_listeners(victim.serve, listeners, handler_nursery=nursery)

    victim = Upstream(reply)
    nursery.start_soon(accept)
    victim_port = listeners[0].socket.getsockname()[1]
    text = "[server_settings]\nport = 0\n"
    for port in (victim_port, other_port):
        text += f'[[external_routes]]\nmodel_name = "m"\napi_base = "http://127.0.0.1:{port}/v1"\n'
    client = await connect(await nursery.start(gateway.run, configuration.parse(text, "test.toml")))
    session = next(f"{number}" for number in range(99) if home_of(b"%d" % number, PAIR) is PAIR[0]).encode()
    body = b'{"model": "m"}'
    statuses = []
    for _ in range(2):
        await client.send(post_of(body, head=b"x-session-id: %b\r\n" % session))
        statuses.append((await client.response())[0])
    assert statuses == [200, 502]
    assert (len(victim.requests), len(other.requests)) == (2, 0)


async def ended(client):
    """Return how a connection ends: in good order, or broken."""
    try:
        await client.everything()
    except trio.BrokenResourceError:
        return "broken"
    return "ended"


@pytest.mark.parametrize("how", ["whole", "stalled", "reset"])
async def test_a_body_that_ends_with_its_connection(serve, gateway_to, connect, how):
    """Without a length only the end says that it is whole: where it is not, the client's connection is reset."""

    async def reply(stream, head, body):
        await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 100)
        if how == "stalled":
            while True:
                await stream.send_all(b"x" * 60_000)
        if how == "reset":
            await trio.testing.wait_all_tasks_blocked()  # the gateway has read what was sent
            reset(stream)
        return "close"

    upstream, port = await serve(reply)
    client = await connect(await gateway_to({"m": port}, "[timeouts]\nclient_stall_s = 0.3\n"))
    body = b'{"model": "m"}'
    await client.send(post_of(body))
    await until(lambda: upstream.closed)
    assert await ended(client) == ("ended" if how == "whole" else "broken")


async def test_a_fresh_connection_that_fails_is_not_tried_again(serve, gateway_to, connect):
    """A request that may have been processed is never sent twice."""

    async def reply(stream, head, body):
        return "close"

    upstream, port = await serve(reply)
    client = await connect(await gateway_to({"m": port}))
    status, headers, body = await client.ask()
    assert (status, code_of(body)) == (502, "upstream_failed")
    assert headers[b"x-ichat-error"] == b"gateway"
    assert len(upstream.requests) == 1


async def test_an_upstream_that_is_not_there(gateway_to, connect):
    """Nothing listens: 502 with the reason, and the connection of the client lives on."""
    client = await connect(await gateway_to({"m": free_port()}))
    for _ in range(2):
        status, _, body = await client.ask()
        assert (status, code_of(body)) == (502, "upstream_unreachable")
        assert b"connection refused" in body


async def test_a_silent_upstream_is_given_up(serve, gateway_to, connect):
    """No first byte in time is 504; a stream that stops is ended with an error. Either has its own bound."""

    async def reply(stream, head, body):
        if json.loads(body).get("begin"):
            await stream.send_all(SSE_HEAD + event(0))
        await trio.sleep_forever()

    _, port = await serve(reply)
    silent = await gateway_to({"m": port}, "[timeouts]\nfirst_byte_s = 0.2\n")
    status, _, body = await (await connect(silent)).ask()
    assert (status, code_of(body)) == (504, "upstream_timeout")
    stalled = await gateway_to({"m": port}, "[timeouts]\nstream_stall_s = 0.2\n")
    status, _, body = await (await connect(stalled)).ask(begin=1)
    assert status == 200
    assert code_of(body.split(b"data: ")[-1]) == "upstream_timeout"
    assert b"[DONE]" not in body


@pytest.mark.parametrize(
    "response",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 2\r\n\r\nab",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: " + b"b" * 100_000,
    ],
)
async def test_an_ambiguous_response_is_not_passed_on(serve, gateway_to, connect, response):
    """What could be read in two ways is 502."""

    async def reply(stream, head, body):
        await stream.send_all(response)
        await trio.sleep_forever()

    _, port = await serve(reply)
    client = await connect(await gateway_to({"m": port}))
    status, _, body = await client.ask()
    assert (status, code_of(body)) == (502, "upstream_failed")


@pytest.mark.parametrize("end", ["close", "reset", "garbage"])
async def test_a_stream_that_breaks_off_says_so(serve, gateway_to, connect, end):
    """A stream whose upstream dies between two events ends with an error event and without [DONE]."""

    async def reply(stream, head, body):
        await stream.send_all(SSE_HEAD + event(0))
        await trio.sleep(0.05)
        if end == "garbage":
            await stream.send_all(b"nonsense\r\n")
            await trio.sleep_forever()
        if end == "reset":
            reset(stream)
        return "close"

    _, port = await serve(reply)
    client = await connect(await gateway_to({"m": port}))
    status, _, body = await client.ask(stream=True)
    assert status == 200
    if end == "garbage":
        assert body == "broken"
    else:
        assert code_of(body.split(b"data: ")[-1]) == "upstream_failed"
        assert b"[DONE]" not in body
    assert await client.everything() == b""


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf",
        SSE_HEAD + b"40\r\ndata: half",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n",
    ],
)
async def test_a_body_that_breaks_off_is_never_a_whole_one(serve, gateway_to, connect, sent):
    """Where no event can say it, the connection ends short."""

    async def reply(stream, head, body):
        await stream.send_all(sent)
        return "close"

    _, port = await serve(reply)
    client = await connect(await gateway_to({"m": port}))
    assert (await client.ask())[::2] == (200, "broken")


async def test_responses_in_every_form(serve, gateway_to, connect):
    """Informational responses are skipped; bodies may be empty, end with the connection, or come in single bytes."""
    answers = [
        (b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + plain(b"a"), b"a", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"", True),
        (plain(b"b", b"connection: close\r\n"), b"b", True),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", b"until the end", False),
    ]

    async def reply(stream, head, body):
        data = answers[json.loads(body)["which"]][0]
        for byte in data:
            await stream.send_all(bytes([byte]))
        if b"close" in data or b"until" in data:
            return "close"
        return None

    _, port = await serve(reply)
    gateway = await gateway_to({"m": port})
    for which, (_, expected, kept) in enumerate(answers):
        client = await connect(gateway)
        status, headers, body = await client.ask(which=which)
        assert (status in (200, 204), body) == (True, expected)
        assert b"link" not in headers
        assert (headers.get(b"connection") != b"close") == kept


@pytest.mark.parametrize("end", [SSE_END, b"", b"5\r\nab"])
async def test_old_clients_get_whole_bodies(serve, gateway_to, connect, end):
    """A client of HTTP/1.0, which cannot read chunks, never gets any; and no clean end where its upstream broke off."""
    many = b"".join(event(number) for number in range(2000))

    async def reply(stream, head, body):
        assert head.http_version == b"1.1"
        await stream.send_all(SSE_HEAD)
        await trio.sleep(0.01)
        await stream.send_all(event(1)[:9])
        await trio.sleep(0.01)
        await stream.send_all(event(1)[9:] + many + end)
        return "close" if end != SSE_END else None

    _, port = await serve(reply)
    client = await connect(await gateway_to({"m": port}))
    await client.send(b'POST /v1/completions HTTP/1.0\r\ncontent-length: 14\r\n\r\n{"model": "m"}')
    if end == SSE_END:
        head, _, body = (await client.everything()).partition(b"\r\n\r\n")
        assert body == b"".join(b'data: {"n": %d}\n\n' % number for number in (1, *range(2000))) + b"data: [DONE]\n\n"
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
    else:
        with pytest.raises(trio.BrokenResourceError):
            await client.everything()


@pytest.mark.parametrize(
    ("method", "target", "body", "status", "code"),
    [
        (b"POST", b"/v1/chat/completions", b"", 400, "bad_request"),
        (b"POST", b"/v1/chat/completions", b"{", 400, "bad_request"),
        (b"POST", b"/v1/chat/completions", b"[]", 400, "bad_request"),
        (b"POST", b"/v1/chat/completions", b"{}", 400, "bad_request"),
        (b"POST", b"/v1/chat/completions", b'{"model": 3}', 400, "bad_request"),
        (b"POST", b"/v1/chat/completions", b"\xff\xfe", 400, "bad_request"),
        (b"POST", b"/v1/chat/completions", b"[" * 100_000, 400, "bad_request"),
        (b"POST", b"/v1/chat/completions", b'{"model": "no"}', 404, "model_not_found"),
        (b"POST", b"/v1/anything/else", b'{"model": "no"}', 404, "model_not_found"),
        (b"GET", b"/v1/chat/completions", b"", 405, "method_not_allowed"),
        (b"DELETE", b"/rerank", b"", 405, "method_not_allowed"),
        (b"GET", b"/nothing", b"", 404, "not_found"),
        (b"GET", b"/v1/nothing", b"", 404, "not_found"),
        (b"GET", b"/v1/models/no/such", b"", 404, "model_not_found"),
        (b"GET", b"/v1/admin/nothing", b"", 404, "not_found"),
        (b"DELETE", b"/v1/models", b"", 405, "method_not_allowed"),
        (b"GET", b"/v1/admin/workers/none", b"", 404, "not_found"),
        (b"POST", b"/v1/workers/heartbeat", b"{}", 400, "bad_request"),
        (b"POST", b"/v1/workers/heartbeat", b"x", 400, "bad_request"),
        (b"POST", b"/v1/workers/heartbeat", b"x" * 5_000_000, 413, "request_too_large"),
    ],
)
async def test_every_refusal_has_openais_shape(gateway_to, connect, method, target, body, status, code):
    """Whatever is wrong, the body is an OpenAI error, with a request id, and says who made it."""
    client = await connect(await gateway_to({"m": 1}))
    await client.send(
        b"%b %b HTTP/1.1\r\nhost: localhost\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (method, target, AS_OWN, len(body), body)
    )
    found, headers, answer = await client.response(method)
    assert (found, code_of(answer)) == (status, code)
    assert headers[b"x-request-id"]
    assert headers[b"x-ichat-error"] == b"gateway"
    assert headers[b"content-type"] == b"application/json"


async def test_workers_register_by_their_beats(serve, gateway_to, connect):
    """A beat makes a model available, by every of its names; a good-bye takes it away."""
    _upstream, port = await serve(hello)
    client = await connect(await gateway_to({}, "[timeouts]\nrestart_wait_s = 0\n"))

    async def heartbeat(**more):
        body = json.dumps(
            {"worker_id": "w1", "model_name": "org/m", "host": "127.0.0.1", "port": port, **more}
        ).encode()
        await client.send(JSON_POST % (b"/v1/workers/heartbeat", len(body), body))
        status, _, answer = await client.response()
        assert status == 200
        return json.loads(answer)

    assert (await client.ask("org/m"))[0] == 404
    assert (await heartbeat(state="loading"))["status"] == "registered"
    status, headers, body = await client.ask("org/m")
    assert (status, code_of(body), headers[b"retry-after"]) == (503, "model_not_ready", b"5")
    answer = await heartbeat(model_names=["org/m", "alias"])
    assert answer["status"] == "ok"
    assert answer["gateway_id"]
    for name in ("org/m", "alias"):
        status, headers, _ = await client.ask(name)
        assert (status, headers[b"x-ichat-worker"]) == (200, b"w1")
    models = json.loads((await client.get(b"/v1/models"))[2])
    assert [model["id"] for model in models["data"]] == ["alias", "org/m"]
    assert json.loads((await client.get(b"/v1/models/org/m"))[2])["id"] == "org/m"
    described = json.loads((await client.get(b"/v1/admin/workers/w1"))[2])
    assert (described["state"], described["managed"], described["in_flight"]) == ("ready", False, 0)
    await heartbeat(state="gone")
    assert (await client.ask("org/m"))[0] == 404


@pytest.mark.parametrize("more", ["", 'cors_origins = ["*"]\n'], ids=["no pages", "pages"])
async def test_the_openai_client_understands(serve, gateway_to, connect, more):
    """openai-python streams, lists, retrieves and raises as it does with OpenAI itself."""

    async def reply(stream, head, body):
        if json.loads(body).get("stream"):
            parts = [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in ("Hello", " world")]
            common = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
            events = b"".join(chunk(b"data: " + json.dumps(common | part).encode() + b"\n\n") for part in parts)
            await stream.send_all(SSE_HEAD + events)
            if json.loads(body).get("seed") == 1:
                return "close"
            await stream.send_all(SSE_END)
        else:
            await stream.send_all(
                plain(b'{"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": []}')
            )
        return None

    _, port = await serve(reply)
    gateway = await gateway_to({"m": port}, more)
    await trio.to_thread.run_sync(talk, f"http://127.0.0.1:{gateway}/v1")


def talk(url):
    messages = [{"role": "user", "content": "hi"}]
    with openai.OpenAI(base_url=url, api_key="k", max_retries=0) as client:
        stream = client.chat.completions.create(model="m", messages=messages, stream=True)
        assert [part.choices[0].delta.content for part in stream] == ["Hello", " world"]
        assert client.chat.completions.create(model="m", messages=messages).id == "x"
        assert [model.id for model in client.models.list()] == ["m"]
        assert client.models.retrieve("m").id == "m"
        with pytest.raises(openai.NotFoundError, match="Models here: m") as caught:
            client.chat.completions.create(model="other", messages=messages)
        assert caught.value.request_id
        stream = client.chat.completions.create(model="m", messages=messages, stream=True, seed=1)
        with pytest.raises(openai.APIError, match="closed the connection"):
            list(stream)


async def test_an_upstream_may_answer_before_it_has_read_everything(nursery, gateway_to, connect):
    """A refusal that comes while the request is still being sent reaches the client."""

    async def refuse(stream):
        await stream.receive_some(1)
        await stream.send_all(plain(b"too much").replace(b"200 OK", b"413 Too Large"))
        await trio.sleep_forever()

    listeners = await nursery.start(trio.serve_tcp, refuse, 0)
    client = await connect(await gateway_to({"m": listeners[0].socket.getsockname()[1]}))
    status, _, body = await client.ask(big="x" * 20_000_000)
    assert status == 413
    assert json.loads(body)["error"]["message"] == "The external route m answered 413: too much."


async def test_a_dead_worker_is_not_a_black_hole(serve, gateway_to, connect):
    """A worker that cannot be reached gets no more requests until its next beat, and the request goes to another one."""
    upstream, port = await serve(hello)
    client = await connect(await gateway_to({}))
    for name, where in (("alive", port), ("dead", free_port())):
        heartbeat = {"worker_id": name, "model_name": "m", "host": "127.0.0.1", "port": where, "heartbeat_interval": 60}
        body = json.dumps(heartbeat).encode()
        await client.send(JSON_POST % (b"/v1/workers/heartbeat", len(body), body))
        assert (await client.response())[0] == 200
    for _ in range(20):
        assert (await client.ask())[::2] == (200, b'{"hello": 1}')
    assert len(upstream.posts) == 20
    described = json.loads((await client.get(b"/v1/admin/workers/dead"))[2])
    assert (described["state"], described["in_flight"]) == ("unhealthy", 0)


async def register(client, **workers):
    """Send a beat of each worker, called by its name, that listens at this port."""
    for name, port in workers.items():
        body = json.dumps({"worker_id": name, "model_name": "m", "host": "127.0.0.1", "port": port}).encode()
        await client.send(JSON_POST % (b"/v1/workers/heartbeat", len(body), body))
        assert (await client.response())[0] == 200


def declining(code):
    """Make an upstream answer 503 as a worker does whose engine has not seen the request."""
    error = json.dumps({"error": {"message": "No.", "type": "server_error", "param": None, "code": code}}).encode()

    async def reply(stream, head, body):
        await stream.send_all(
            b"HTTP/1.1 503 No\r\nx-ichat-error: worker\r\nx-ichat-code: %b\r\nx-ichat-why: pid 7\r\n"
            b"content-length: %d\r\n\r\n%b" % (code.encode(), len(error), error)
        )

    return reply


def asked(upstream):
    """Return the bodies of the requests for a model."""
    return [body for _, body in upstream.posts]


@pytest.mark.parametrize("code", ["engine_dead", "draining", "model_not_ready"])
async def test_a_declined_request_goes_to_another_worker(serve, gateway_to, connect, code):
    """Its engine has not seen the request: another worker gets it whole, and this one nothing more until its next beat."""
    (declined, first), (answered, second) = await serve(declining(code)), await serve(hello)
    client = await connect(await gateway_to({}))
    await register(client, dead=first)
    await register(client, alive=second)
    large = "x" * 300_000
    for number in range(20):
        assert (await client.ask(number=number, prompt=large))[::2] == (200, b'{"hello": 1}')
    assert len(asked(declined)) == 1
    assert [json.loads(body)["number"] for body in asked(answered)] == list(range(20))
    assert {len(json.loads(body)["prompt"]) for body in asked(answered)} == {len(large)}
    described = json.loads((await client.get(b"/v1/admin/workers/dead"))[2])
    assert (described["state"], described["in_flight"], described["circuit"]["failures"]) == ("unhealthy", 0, 0)


async def test_a_request_that_the_only_worker_declines_is_503_with_a_wait(serve, gateway_to, connect):
    """503 with a time to wait and the state, without asking again, until a beat says that it is well."""
    upstream, port = await serve(declining("engine_dead"))
    client = await connect(await gateway_to({}))
    await register(client, w=port)
    for words in (b"its worker has lost its engine.", b"its worker is unhealthy.", b"its worker is unhealthy."):
        status, headers, body = await client.ask()
        assert (status, code_of(body)) == (503, "model_not_ready")
        assert int(headers[b"retry-after"]) > 0
        assert headers[b"x-ichat-error"] == b"gateway"
        assert words in body
        assert b"pid 7" not in body, "of what the engine died is for operators"
    assert len(asked(upstream)) == 1
    upstream.reply = hello
    await register(client, w=port)
    assert (await client.ask())[0] == 200


async def test_only_workers_decline(serve, gateway_to, connect):
    """From an external route, or with another code, a 503 is the answer: it may have been worked on."""
    far, far_port = await serve(declining("engine_dead"))
    near, near_port = await serve(declining("overloaded"))
    client = await connect(await gateway_to({"far": far_port}))
    await register(client, w=near_port)
    for upstream, model, code in ((far, "far", "engine_dead"), (near, "m", "overloaded")):
        for count in (1, 2):
            status, headers, body = await client.ask(model=model)
            assert (status, code_of(body), len(asked(upstream))) == (503, code, count)
            assert b"x-ichat-code" not in headers


async def test_the_control_plane_takes_a_burst(gateway_to, connect):
    """Many at once are all answered: beats and health checks come together after an outage."""
    port = await gateway_to({})
    statuses = []

    async def one():
        statuses.append((await (await connect(port)).get(b"/health"))[0])

    async with trio.open_nursery() as burst:
        for _ in range(300):
            burst.start_soon(one)
    assert statuses == [200] * 300


async def test_a_kept_connection_that_has_spoken_unasked_is_not_used(serve, gateway_to, connect):
    """What an upstream says between two requests is never the answer to the second."""

    answered, spoken = trio.Event(), 0

    async def reply(stream, head, body):
        nonlocal spoken
        await stream.send_all(plain(b"first"))
        await answered.wait()
        await stream.send_all(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
        spoken += 1

    upstream, port = await serve(reply)
    client = await connect(await gateway_to({"m": port}))
    for number in range(3):
        answered = trio.Event()
        assert (await client.ask())[::2] == (200, b"first")
        answered.set()
        await until(lambda number=number: spoken > number)
        await trio.testing.wait_all_tasks_blocked()
    assert upstream.connections == 3


async def test_a_reset_behind_a_whole_response_costs_nothing(serve, gateway_to, connect):
    """The response was complete: how the upstream closes afterwards is nobody's business."""

    async def reply(stream, head, body):
        await stream.send_all(plain(b"whole"))
        reset(stream)
        return "close"

    _, port = await serve(reply)
    client = await connect(await gateway_to({"m": port}))
    for _ in range(5):
        status, headers, body = await client.ask()
        assert (status, body, headers.get(b"connection")) == (200, b"whole", None)


async def test_a_length_cannot_be_named_away(serve, gateway_to, connect):
    """An upstream whose `Connection` names the length still has a body of that length."""

    async def reply(stream, head, body):
        await stream.send_all(plain(b"whole", b"connection: content-length\r\n"))

    _, port = await serve(reply)
    assert (await (await connect(await gateway_to({"m": port}))).ask())[::2] == (200, b"whole")


async def test_health_and_version(gateway_to, connect):
    """The gateway says that it is well, and what it is made of."""
    client = await connect(await gateway_to({}))
    status, _headers, body = await client.get(b"/health")
    assert (status, json.loads(body)) == (200, {"status": "ok"})
    version = json.loads((await client.get(b"/v1/admin/cluster/version"))[2])
    assert version["version"]
    assert set(version["packages"]) >= {"trio", "h11", "hypercorn"}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (b"/v1/tokenize", b"/tokenize"),
        (b"/v1/classify?a=b", b"/classify?a=b"),
        (b"/v1/tokenizer", b"/v1/tokenizer"),
        (b"/chat/completions", b"/v1/chat/completions"),
        (b"/audio/transcriptions?x", b"/v1/audio/transcriptions?x"),
        (b"/v1/chat/completions", b"/v1/chat/completions"),
        (b"/rerank", b"/rerank"),
        (b"/v2/rerank", b"/v2/rerank"),
    ],
)
def test_every_name_of_a_route_leads_to_it(asked, expected):
    """Engines have some routes below /v1 and some beside it; clients need not know."""
    assert engine_target(asked) == expected
