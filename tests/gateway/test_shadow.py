"""Copies of requests for a shadow: what it gets, when it gets nothing, and that no client notices."""

import json

import pytest
import trio
from support.exposition import shown
from support.peers import SSE_END, SSE_HEAD, event, plain, post_of, until
from support.programs import LIMIT_S

from ichat.config.models import ShadowConfig
from ichat.proxy.shadow import COPIED_BYTES_MAX, is_copied

N = '[[models]]\nname = "n"\ntargets = [{ model = "a" }]\nset = { seed = 5 }\nshadow = { model = "s", share = 1 }\n'
USAGE = {"usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}}


def answering(name):
    async def reply(stream, head, body):
        await stream.send_all(plain(json.dumps({"by": name, **USAGE}).encode()))

    return reply


class Held:
    """A reply that waits for the test."""

    def __init__(self):
        self.gate, self.begun, self.broken = trio.Event(), 0, 0

    async def __call__(self, stream, head, body):
        self.begun += 1
        try:
            with trio.fail_after(LIMIT_S):
                await self.gate.wait()
            await stream.send_all(plain(b"{}"))
        except trio.Cancelled:
            self.broken += 1
            raise


@pytest.fixture
def site(serve, gateway_to, connect):
    """Start a gateway with an external route for each reply: `client, upstreams = await site(toml, a=reply, ...)`."""

    async def start(more=N, **replies):
        upstreams, ports = {}, {}
        for name, reply in replies.items():
            upstreams[name], ports[name] = (None, 1) if reply is None else await serve(reply)
        client = await connect(await gateway_to(ports, more))
        client.port = client.stream.socket.getpeername()[1]
        return client, upstreams

    return start


async def results(connect, client):
    """Return how many copies had each result."""
    seen = await shown(connect, client.port)
    name = "ichat_shadow_requests_total"
    return {one["result"]: seen.get(name, **one) for one in seen.labels(name) if one["alias"] == "n"}


async def until_results(connect, client, expected):
    """Wait until so many copies have ended in these ways."""
    with trio.fail_after(LIMIT_S):
        while await results(connect, client) != expected:
            await trio.sleep(0.01)


async def test_the_shadow_gets_what_the_target_got(site, connect):
    """The same body with another model, an id of its own, no key of the client; its answer is counted and dropped."""
    client, upstreams = await site(a=answering("a"), s=answering("s"))
    body = b'{"model": "n",  "messages": [1], "stream": false}'
    await client.send(
        post_of(
            body,
            b"/v1/chat/completions?x=1",
            b"content-type: application/json\r\nauthorization: Bearer secret\r\nx-request-id: mine\r\nx-custom: yes\r\n",
        )
    )
    status, headers, answer = await client.response()
    assert (status, json.loads(answer)["by"], headers[b"x-ichat-model"]) == (200, "a", b"a")
    await until_results(connect, client, {"200": 1})
    [(head, copied)] = upstreams["s"].requests
    [(original, _)] = upstreams["a"].requests
    given = dict(head.headers)
    assert head.target == original.target == b"/v1/chat/completions?x=1"
    assert copied == b'{"seed":5,"model": "s",  "messages": [1], "stream": false}'
    assert (given[b"x-request-id"], given[b"x-custom"]) == (b"mine-shadow", b"yes")
    assert b"authorization" not in given
    assert dict(original.headers)[b"authorization"] == b"Bearer secret"
    seen = await shown(connect, client.port)
    assert seen.get("ichat_shadow_requests_total", alias="n", model="s", result="200") == 1
    assert seen.get("ichat_shadow_tokens_total", model="s") == 7
    assert seen.get("ichat_shadow_seconds_count", model="s") == 1
    assert seen.get("ichat_requests_total", model="a", route="/v1/chat/completions", status="200") == 1
    assert seen.get("ichat_requests_total", model="s", route="/v1/chat/completions", status="200") is None


async def test_a_shadow_that_never_answers_delays_no_response(site):
    """The copy begins after the answer to the original, which has ended long before the copy does."""
    held = Held()
    client, _ = await site(a=answering("a"), s=held)
    for number in range(1, 4):
        assert (await client.ask("n"))[0] == 200
        await until(lambda number=number: held.begun == number)
    held.gate.set()


async def test_a_stream_is_copied_as_a_stream(site, connect):
    """It is read to its end."""

    async def streaming(stream, head, body):
        await stream.send_all(SSE_HEAD)
        for number in range(3):
            await stream.send_all(event(number))
        await stream.send_all(SSE_END)

    client, upstreams = await site(a=streaming, s=streaming)
    assert (await client.ask("n", stream=True))[0] == 200
    await until_results(connect, client, {"200": 1})
    assert json.loads(upstreams["s"].requests[0][1])["stream"] is True


async def test_more_copies_than_there_may_be_are_not_sent(site, connect):
    """`routing.shadows_max` at once; what is left out is counted, and the answers are the same."""
    held = Held()
    client, _ = await site("[routing]\nshadows_max = 2\n" + N, a=answering("a"), s=held)
    for _ in range(5):
        assert (await client.ask("n"))[0] == 200
    await until(lambda: held.begun == 2)
    assert await results(connect, client) == {"busy": 3}
    held.gate.set()


async def test_a_shadow_has_no_more_requests_than_it_may_have(serve, gateway_to, connect):
    """A copy waits in no queue, and its place is free again when it has ended."""
    held = Held()
    _, a = await serve(answering("a"))
    _, s = await serve(held)
    port = await gateway_to({"a": a}, N + (
        f'[[external_routes]]\nmodel_name = "s"\napi_base = "http://127.0.0.1:{s}/v1"\nmax_in_flight = 1\n'
    ))  # fmt: skip
    client = await connect(port)
    client.port = port
    for _ in range(3):
        assert (await client.ask("n"))[0] == 200
    await until(lambda: held.begun == 1)
    held.gate.set()
    await until_results(connect, client, {"200": 1, "busy": 2})
    assert (await client.ask("n"))[0] == 200
    await until_results(connect, client, {"200": 2, "busy": 2})


@pytest.mark.parametrize(
    ("reply", "result"),
    [(None, "failed"), ("close", "failed"), ("500", "500"), ("nonsense", "failed")],
)
async def test_a_shadow_that_fails_is_counted_and_nothing_else(site, connect, reply, result):
    """Whatever it does; the next copy is sent all the same."""

    async def failing(stream, head, body):
        if reply == "500":
            await stream.send_all(b"HTTP/1.1 500 Failed\r\ncontent-length: 0\r\n\r\n")
        elif reply == "nonsense":
            await stream.send_all(b"hello\r\n\r\n")
        return "close"

    client, _ = await site(a=answering("a"), s=None if reply is None else failing)
    for _ in range(2):
        assert (await client.ask("n"))[0] == 200
    await until_results(connect, client, {result: 2})


async def test_a_shadow_that_is_not_there(site, connect):
    """Its model is known to nobody yet."""
    client, _ = await site(a=answering("a"))
    assert (await client.ask("n"))[0] == 200
    assert await results(connect, client) == {"not_ready": 1}


async def test_a_copy_is_no_probe_of_a_circuit(site, connect, autojump_clock):
    """It gives no verdict, and a request that could give one would wait for it."""

    async def failing(stream, head, body):
        await stream.send_all(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n")

    more = f"{N}[circuit_breaker]\nfailures_max = 1\nopen_s = 10\n"
    client, upstreams = await site(more, a=answering("a"), s=failing)
    assert (await client.ask("s"))[0] == 500
    await trio.sleep(11)
    assert (await client.ask("n"))[0] == 200
    await until_results(connect, client, {"not_ready": 1})
    assert len(upstreams["s"].requests) == 1


async def test_a_large_request_has_no_copy(site, connect):
    """A copy would keep it in memory."""
    client, upstreams = await site(a=answering("a"), s=answering("s"))
    assert (await client.ask("n", prompt="x" * COPIED_BYTES_MAX))[0] == 200
    assert await results(connect, client) == {"too_large": 1}
    assert upstreams["s"].requests == []


async def test_a_failed_request_has_no_copy(site, connect):
    """A request that is wrong for one model is wrong for the other."""

    async def refusing(stream, head, body):
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    client, upstreams = await site(a=refusing, s=answering("s"))
    assert (await client.ask("n"))[0] == 400
    assert await results(connect, client) == {}
    assert upstreams["s"].requests == []


async def test_only_a_share_is_copied_and_a_session_stays_on_its_side(site, connect):
    """All requests of a session have a copy, or none has."""
    more = "[routing]\nshadows_max = 100\n" + N.replace("share = 1", "share = 0.5")
    client, upstreams = await site(more, a=answering("a"), s=answering("s"))
    for number in range(20):
        for _ in range(2):
            body = b'{"model": "n"}'
            await client.send(
                post_of(
                    body, b"/v1/chat/completions", b"x-session-id: %d\r\ncontent-type: application/json\r\n" % number
                )
            )
            assert (await client.response())[0] == 200
    copied = {number for number in range(20) if is_copied("n", ShadowConfig("s", 0.5), b"%d" % number)}
    await until_results(connect, client, {"200": 2 * len(copied)})
    by_session = {}
    for head, _ in upstreams["s"].requests:
        session = int(dict(head.headers)[b"x-session-id"])
        by_session[session] = by_session.get(session, 0) + 1
    assert 2 <= len(copied) <= 18
    assert by_session == dict.fromkeys(copied, 2)
