"""Prompts that are too long for the model of a name: who answers them, before and after that model has seen them."""

import json

import pytest
import trio
from support.exposition import shown
from support.peers import JSON_POST, SSE_END, SSE_HEAD, code_of, event, plain, post_of, until
from support.programs import LIMIT_S

TOO_LONG = {
    "message": "It has 256 tokens.", "type": "invalid_request_error", "param": None, "code": "context_length_exceeded",
}  # fmt: skip
N = '[[models]]\nname = "n"\ntargets = [{ model = "short" }]\nlonger = "long"\n'


def refusing(error=TOO_LONG, code=b"x-ichat-code: context_length_exceeded\r\n"):
    body = json.dumps({"error": error}).encode()
    raw = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b"

    async def reply(stream, head, asked):
        await stream.send_all(raw % (code, len(body), body))

    return reply


def answering(name, bytes_per_token=4):
    """Return a reply with the usage of a prompt whose tokens have so many bytes."""

    async def reply(stream, head, body):
        usage = {"prompt_tokens": len(body) // bytes_per_token, "completion_tokens": 1}
        await stream.send_all(plain(json.dumps({"by": name, "usage": usage}).encode()))

    return reply


@pytest.fixture
def site(serve, gateway_to, connect):
    """Start a gateway with a worker for each reply: `client, workers = await site(short=(256, reply), ...)`."""

    async def start(more=N, **models):
        port = await gateway_to({}, more)
        client, workers = await connect(port), {}
        for name, (length, reply) in models.items():
            workers[name], place = await serve(reply)
            beat = {
                "worker_id": f"w-{name}", "model_name": name, "host": "127.0.0.1", "port": place, "start_id": "s",
                "models": [{"id": name, "max_model_len": length}], "heartbeat_interval": 3600,
            }  # fmt: skip
            body = json.dumps(beat).encode()
            await client.send(JSON_POST % (b"/v1/workers/heartbeat", len(body), body))
            assert (await client.response())[0] == 200
        client.port = port
        return client, workers

    return start


def asked_of(worker):
    """Return how many requests of clients a worker has got: it is asked for its log as well."""
    return sum(head.method == b"POST" for head, _ in worker.requests)


def words(count):
    return {"messages": [{"role": "user", "content": "word " * count}]}


async def test_a_prompt_refused_as_too_long_goes_to_the_longer_model(site):
    """The client sees one answer, the worker that refused it is asked again by the next one, and its circuit is well."""
    client, workers = await site(short=(256, refusing()), long=(4096, answering("long")))
    for asked in range(1, 8):
        status, headers, body = await client.ask("n", **words(20))
        assert (status, json.loads(body)["by"]) == (200, "long")
        assert (headers[b"x-ichat-model"], headers[b"x-ichat-attempts"]) == (b"long", b"2")
        assert b"x-ichat-code" not in headers
        assert asked_of(workers["short"]) == asked
    sent = json.loads(next(body for head, body in workers["long"].requests if head.method == b"POST"))
    assert sent == {"model": "long", **words(20)}


async def test_a_stream_goes_there_too(site):
    """Nothing of the refusal is in it."""

    async def streaming(stream, head, body):
        await stream.send_all(SSE_HEAD + event(1) + SSE_END)

    client, _ = await site(short=(256, refusing()), long=(4096, streaming))
    status, headers, body = await client.ask("n", stream=True, **words(20))
    assert (status, headers[b"x-ichat-model"]) == (200, b"long")
    assert body == b'data: {"n": 1}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    "more",
    [
        '[[models]]\nname = "n"\ntargets = [{ model = "short" }]\nfallbacks = ["long"]\n',
        '[[models]]\nname = "n"\ntargets = [{ model = "short" }]\nlonger = "short"\n',
        "",
    ],
)
async def test_without_a_longer_model_the_refusal_is_the_answer(site, more):
    """Whole, as the engine's worker has written it; a fallback is for other reasons."""
    client, workers = await site(more, short=(256, refusing()), long=(4096, answering("long")))
    status, headers, body = await client.ask("n" if more else "short", **words(20))
    assert (status, json.loads(body)) == (400, {"error": TOO_LONG})
    assert b"x-ichat-code" not in headers
    assert not asked_of(workers["long"])


async def test_other_refusals_are_answers(site):
    """A wrong parameter is as wrong for the longer model, and nobody but a worker says that a prompt is too long."""
    client, workers = await site(short=(256, refusing({**TOO_LONG, "code": "bad_request"}, b"")), long=(4096, None))
    assert (await client.ask("n", **words(20)))[0] == 400
    assert not asked_of(workers["long"])


async def test_a_prompt_too_long_for_both_is_refused_by_the_longer_model(site):
    """Its words are the answer; there is no third model."""
    other = {**TOO_LONG, "message": "It has 4096 tokens."}
    client, _ = await site(short=(256, refusing()), long=(4096, refusing(other)))
    status, headers, body = await client.ask("n", **words(20))
    assert (status, json.loads(body)["error"]["message"]) == (400, "It has 4096 tokens.")
    assert headers[b"x-ichat-model"] == b"long"


async def test_a_longer_model_that_is_not_there_is_an_error_that_says_so(site):
    """The client learns of both."""
    client, _ = await site(short=(256, refusing()))
    status, _, body = await client.ask("n", **words(20))
    assert (status, code_of(body)) == (503, "model_not_ready")
    assert "too long for the model `short`" in json.loads(body)["error"]["message"]


async def test_learnt_lengths_send_a_long_prompt_past_the_short_model(site, connect):
    """Never while nothing was learnt, and only if it is clearly too long; the metrics tell both ways apart."""
    short = refusing()

    async def reply(stream, head, body):
        await (answering("short") if len(body) < 1500 else short)(stream, head, body)

    client, workers = await site(short=(256, reply), long=(4096, answering("long")))
    # 256 tokens are 1024 bytes, and clearly too long is what has more than 1280
    assert json.loads((await client.ask("n", **words(400)))[2])["by"] == "long"
    assert asked_of(workers["short"]) == 1
    for _ in range(3):
        assert json.loads((await client.ask("n", **words(100)))[2])["by"] == "short"
    assert json.loads((await client.ask("n", **words(230)))[2])["by"] == "short"
    assert asked_of(workers["short"]) == 5
    status, headers, body = await client.ask("n", **words(300))
    assert (status, json.loads(body)["by"]) == (200, "long")
    assert (headers[b"x-ichat-model"], headers[b"x-ichat-attempts"]) == (b"long", b"1")
    assert asked_of(workers["short"]) == 5
    seen = await shown(connect, client.port)
    for reason in ("too_long", "seems_too_long"):
        assert seen.get("ichat_alias_fallbacks_total", alias="n", model="short", reason=reason) == 1


async def test_an_estimate_leads_to_no_model_that_is_not_ready(site):
    """The short one is asked, as it may take the prompt after all."""
    client, workers = await site(short=(256, answering("short")))
    for _ in range(3):
        await client.ask("n", **words(100))
    assert json.loads((await client.ask("n", **words(300)))[2])["by"] == "short"
    assert asked_of(workers["short"]) == 4


async def test_explain_names_the_longer_model_for_a_long_prompt(site, connect):
    """As a request for it would go; while nothing is learnt, and for a short one, the longer model gets nothing."""
    client, _ = await site(short=(256, answering("short")), long=(4096, answering("long")))

    async def plan(count):
        client_of_admin = await connect(client.port)
        status, _, body = await client_of_admin.ask("n", target=b"/v1/admin/route", **words(count))
        view = json.loads(body)
        assert status == 200, view
        return view["model"], [
            tuple(one[key] for key in ("model", "place", "worker", "goes_on")) for one in view["plan"]
        ]

    to_short = ("short", [("short", 1, "w-short", None), ("long", None, "w-long", None)])
    assert await plan(300) == to_short
    for _ in range(3):
        await client.ask("n", **words(100))
    assert await plan(100) == to_short
    assert await plan(300) == ("long", [("short", 1, None, "seems_too_long"), ("long", 2, "w-long", None)])


@pytest.mark.parametrize(
    "more",
    [
        {"messages": [{"role": "user", "content": [{"url": "data:image/png;base64," + "A" * 5000}]}]},
        {**words(300), "truncate_prompt_tokens": 100},
    ],
)
async def test_pictures_and_truncated_prompts_are_left_to_the_engine(site, more):
    """A picture, and a prompt that the engine is to cut."""
    client, workers = await site(short=(256, answering("short")), long=(4096, answering("long")))
    for _ in range(3):
        await client.ask("n", **words(100))
    assert json.loads((await client.ask("n", **more))[2])["by"] == "short"
    assert not asked_of(workers["long"])


async def test_a_worker_that_does_not_say_how_long_its_model_is_gets_everything(site):
    """There is nothing to compare an estimate with."""
    client, workers = await site(short=(None, answering("short")), long=(4096, answering("long")))
    for _ in range(3):
        assert json.loads((await client.ask("n", **words(1000)))[2])["by"] == "short"
    assert not asked_of(workers["long"])


async def test_a_client_that_leaves_while_the_longer_model_is_asked(site):
    """The request under way ends there."""
    gone = trio.Event()

    async def waiting(stream, head, body):
        with trio.fail_after(LIMIT_S):
            await stream.receive_some()
        gone.set()
        return "close"

    client, workers = await site(short=(256, refusing()), long=(4096, waiting))
    body = json.dumps({"model": "n", **words(20)}).encode()
    await client.send(post_of(body, b"/v1/chat/completions"))
    await until(lambda: asked_of(workers["long"]) == 1)
    await client.stream.aclose()
    with trio.fail_after(LIMIT_S):
        await gone.wait()
