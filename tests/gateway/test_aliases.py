"""Names that stand for models, end to end: who answers, when another one does, and what is said of it."""

import collections
import gc
import json

import pytest
import trio
from support.peers import JSON_POST, LIMIT_S, SSE_END, SSE_HEAD, code_of, event, plain, post_of, reset, until

from ichat.config import load as configuration
from ichat.fleet.worker_facts import WorkerEnd
from ichat.http.request import Request
from ichat.http.request_body import RequestBody
from ichat.protocol.messages import Heartbeat, response_tag
from ichat.proxy.leg import Leg
from ichat.roles import gateway
from ichat.security.keys import hash_of

N_TO_A_OR_B = '[[models]]\nname = "n"\ntargets = [{ model = "a" }]\nfallbacks = ["b"]\n'
ASKED_FOR = 'fallback_on = ["unreachable", "not_ready", "queue_full", "circuit", "5xx", "429", "timeout"]\n'


def answering(name):
    async def reply(stream, head, body):
        await stream.send_all(plain(name.encode()))

    return reply


def failing(status, more=b""):
    async def reply(stream, head, body):
        await stream.send_all(b"HTTP/1.1 %d Failed\r\n%bcontent-length: 4\r\n\r\nsad!" % (status, more))

    return reply


async def closing(stream, head, body):
    return "close"


async def silent(stream, head, body):
    await trio.sleep_forever()


async def beat(client, port, worker, model, state="ready", **more):
    body = json.dumps({
        "worker_id": worker, "model_name": model, "host": "127.0.0.1", "port": port, "start_id": "s", "state": state,
        **more,
    }).encode()  # fmt: skip
    await client.send(JSON_POST % (b"/v1/workers/heartbeat", len(body), body))
    assert (await client.response())[0] == 200


@pytest.fixture
def routed(serve, gateway_to, connect):
    """Start a gateway with an external route for each reply: `client, upstreams = await routed(toml, a=reply, ...)`."""

    async def start(more=N_TO_A_OR_B, **replies):
        upstreams, ports = {}, {}
        for name, reply in replies.items():
            upstreams[name], ports[name] = (None, 1) if reply is None else await serve(reply)
        client = await connect(await gateway_to(ports, more))
        return client, upstreams

    return start


@pytest.fixture
def served(serve, gateway_to, connect):
    """The same with a worker for each reply; None: one that cannot be reached."""

    async def start(more=N_TO_A_OR_B, routes=None, **replies):
        client, upstreams = await connect(await gateway_to(routes or {}, more)), {}
        for name, reply in replies.items():
            upstreams[name], port = (None, 1) if reply is None else await serve(reply)
            await beat(client, port, f"w-{name}", name)
        return client, upstreams

    return start


def asked(upstream):
    """Return the bodies of requests to a model that an upstream got; the gateway asks workers for their logs too."""
    return [json.loads(body) for _, body in upstream.posts]


def said(headers):
    return headers.get(b"x-ichat-model"), headers.get(b"x-ichat-attempts")


async def test_a_name_leads_to_its_model(routed):
    """The upstream gets its own model's name, the client is told which one it is; a model has no such headers."""
    client, upstreams = await routed(a=answering("a"), b=answering("b"))
    status, headers, body = await client.ask("n", temperature=1)
    assert (status, body, said(headers)) == (200, b"a", (b"a", b"1"))
    assert asked(upstreams["a"]) == [{"model": "a", "temperature": 1}]
    _, headers, body = await client.ask("b")
    assert (body, said(headers)) == (b"b", (None, None))


async def test_a_worker_that_cannot_be_reached(served):
    """Nothing was sent: the next one answers, and it was the second try. Then the first one is known to be away."""
    client, upstreams = await served(a=None, b=answering("b"))
    for _ in range(2):
        status, headers, body = await client.ask("n")
        assert (status, body, said(headers)) == (200, b"b", (b"b", b"2"))
    assert len(asked(upstreams["b"])) == 2
    metrics = (await client.get(b"/metrics"))[2]
    assert b'ichat_alias_requests_total{alias="n",model="b"} 2.0' in metrics
    assert b'ichat_alias_fallbacks_total{alias="n",model="a",reason="unreachable"} 1.0' in metrics
    assert b'ichat_alias_fallbacks_total{alias="n",model="a",reason="not_ready"} 1.0' in metrics
    assert b'ichat_requests_total{model="b",route="/v1/chat/completions",status="200"} 2.0' in metrics


@pytest.mark.parametrize("state", ["loading", None])
async def test_a_model_that_is_not_ready(served, connect, state):
    """It loads, or is not here at all."""
    client, _ = await served(b=answering("b"))
    if state is not None:
        await beat(client, 1, "w-a", "a", state)
    status, headers, body = await client.ask("n")
    assert (status, body, said(headers)) == (200, b"b", (b"b", b"2"))


async def test_a_worker_that_declines(served):
    """It says that its engine has not seen the request."""

    async def declining(stream, head, body):
        await stream.send_all(
            b"HTTP/1.1 503 x\r\nx-ichat-code: engine_dead\r\ncontent-length: 2\r\n\r\n{}"
            if head.method == b"POST"
            else plain(b"")
        )

    client, upstreams = await served(a=declining, b=answering("b"))
    status, _, body = await client.ask("n")
    assert (status, body) == (200, b"b")
    assert len(asked(upstreams["a"])) == 1


async def test_a_full_queue(served, connect, nursery):
    """The next one answers where the first has no place and no room to wait."""
    more = "[routing]\nmax_in_flight = 1\nqueue_max = 0\n" + N_TO_A_OR_B
    client, upstreams = await served(more, a=silent, b=answering("b"))
    other = await connect(client.stream.socket.getpeername()[1])
    nursery.start_soon(other.ask, "a")
    await until(lambda: asked(upstreams["a"]))
    _, headers, body = await client.ask("n")
    assert (body, said(headers)) == (b"b", (b"b", b"2"))


async def test_busy_is_a_reason_only_where_it_is_asked_for(served, connect, nursery):
    """A request waits for the first one's place, or goes on at once; where all are busy, it waits for the first."""
    go = trio.Event()

    async def held(stream, head, body):
        if head.method == b"POST":
            await go.wait()
        await stream.send_all(plain(b"held"))

    more = (
        "[routing]\nmax_in_flight = 1\n"
        + N_TO_A_OR_B
        + '[[models]]\nname = "quick"\ntargets = [{ model = "a" }]\nfallbacks = ["b"]\nfallback_on = ["busy"]\n'
    )
    client, upstreams = await served(more, a=held, b=held)
    answers = {}

    async def ask(number, name):
        answers[number] = await (await connect(client.stream.socket.getpeername()[1])).ask(name)

    nursery.start_soon(ask, 0, "a")
    await until(lambda: len(asked(upstreams["a"])) == 1)
    nursery.start_soon(ask, 1, "quick")
    await until(lambda: len(asked(upstreams["b"])) == 1)
    nursery.start_soon(ask, 2, "n")
    nursery.start_soon(ask, 3, "quick")
    metrics = await connect(client.stream.socket.getpeername()[1])
    while b'ichat_requests_queued{model="a"} 2.0' not in (await metrics.get(b"/metrics"))[2]:
        await trio.sleep(0.005)
    go.set()
    await until(lambda: len(answers) == 4)
    assert [said(answers[number][1]) for number in (1, 2, 3)] == [(b"b", b"2"), (b"a", b"1"), (b"a", b"3")]


@pytest.mark.parametrize(
    ("reply", "reason"), [(failing(500), "5xx"), (failing(503), "5xx"), (failing(429), "429"), (closing, "5xx")]
)
async def test_an_external_routes_error_is_passed_on_unless_fallbacks_are_allowed(routed, reply, reason):
    """It is passed on, as by default, or another one is asked, where that is allowed; the last one's is passed on."""
    client, upstreams = await routed(a=reply, b=answering("b"))
    before, headers, _ = await client.ask("n")
    assert before in (429, 500, 502, 503)
    assert not asked(upstreams["b"])
    client, upstreams = await routed(N_TO_A_OR_B + ASKED_FOR, a=reply, b=answering("b"))
    status, headers, body = await client.ask("n")
    assert (status, body, said(headers)) == (200, b"b", (b"b", b"2"))
    metrics = (await client.get(b"/metrics"))[2]
    assert f'ichat_alias_fallbacks_total{{alias="n",model="a",reason="{reason}"}} 1.0'.encode() in metrics
    client, _ = await routed(N_TO_A_OR_B + ASKED_FOR, a=answering("a"), b=reply)
    assert (await client.ask("n"))[2] == b"a"


async def test_the_last_ones_answer_is_passed_on(routed):
    """An upstream's own words are better than ours, and its name stands before them."""
    client, _ = await routed(N_TO_A_OR_B + ASKED_FOR, a=failing(503), b=failing(500))
    status, headers, body = await client.ask("n")
    assert (status, said(headers)) == (500, (b"b", b"2"))
    assert json.loads(body)["error"]["message"] == "The external route b answered 500: sad."


async def test_no_first_byte_in_time(routed, autojump_clock):
    """Of an external route, and where it is asked for."""
    more = "[timeouts]\nfirst_byte_s = 0.2\n" + N_TO_A_OR_B
    client, _ = await routed(more, a=silent, b=answering("b"))
    assert code_of((await client.ask("n"))[2]) == "upstream_timeout"
    client, _ = await routed(more + ASKED_FOR, a=silent, b=answering("b"))
    assert (await client.ask("n"))[2] == b"b"


@pytest.mark.parametrize("reply", [failing(500), failing(429), closing, silent])
async def test_a_request_that_a_worker_may_have_worked_on_goes_nowhere_else(served, reply):
    """However much is asked for."""
    more = "[timeouts]\nfirst_byte_s = 0.2\n" + N_TO_A_OR_B + ASKED_FOR
    client, upstreams = await served(more, a=reply, b=answering("b"))
    assert (await client.ask("n"))[0] in (429, 500, 502, 504)
    assert not asked(upstreams["b"])


async def test_an_open_circuit_leads_on(routed):
    """A route that answers with errors is left alone while another model can be asked; alone it is asked still."""
    more = "[circuit_breaker]\nfailures_max = 2\n" + N_TO_A_OR_B
    client, upstreams = await routed(more, a=failing(500), b=answering("b"))
    answers = [(await client.ask("n"))[0] for _ in range(4)]
    assert answers == [500, 500, 200, 200]
    assert len(asked(upstreams["a"])) == 2
    assert (await client.ask("a"))[0] == 500


async def test_a_stream_goes_on_before_its_first_byte_only(routed, connect, autojump_clock):
    """Comments may have come by then; what has begun is never begun again by another one."""

    async def streaming(stream, head, body):
        await stream.send_all(SSE_HEAD + event(1) + SSE_END)

    async def breaking(stream, head, body):
        await stream.send_all(SSE_HEAD + event(0))
        reset(stream)

    more = "[timeouts]\nfirst_byte_s = 0.5\nsse_keepalive_s = 0.1\n" + N_TO_A_OR_B + ASKED_FOR
    client, _ = await routed(more, a=silent, b=streaming)
    status, _, body = await client.ask("n", stream=True)
    assert status == 200
    assert body.startswith(b": keep-alive\n\n")
    assert body.endswith(b'data: {"n": 1}\n\ndata: [DONE]\n\n')
    client, upstreams = await routed(N_TO_A_OR_B + ASKED_FOR, a=breaking, b=streaming)
    status, _, body = await client.ask("n", stream=True)
    assert (status, b'{"n": 0}' in body, b'{"n": 1}' in body) == (200, True, False)
    assert not asked(upstreams["b"])


@pytest.mark.one_process("looks for bodies in the memory of the process that has them")
async def test_the_body_is_freed_once_there_is_a_response(routed, connect):
    """A response may take an hour: neither the client's body nor a changed one is kept, whichever model answers."""
    go = trio.Event()

    async def slow(stream, head, body):
        await stream.send_all(SSE_HEAD + event(1))
        await go.wait()
        await stream.send_all(SSE_END)

    client, _ = await routed(N_TO_A_OR_B + ASKED_FOR, a=failing(503), b=slow)
    body = json.dumps({"model": "n", "stream": True, "prompt": "x" * 100_000}).encode()
    await client.send(post_of(body))
    received = b""
    with trio.fail_after(LIMIT_S):
        while b'{"n": 1}' not in received:
            received += await client.stream.receive_some()
    assert b"x-ichat-model: b\r\n" in received
    kept = [one for one in gc.get_objects() if isinstance(one, Request) and one.path == b"/v1/completions"]
    assert [one.body for one in kept] == [b""]
    assert not [one for one in gc.get_objects() if isinstance(one, RequestBody) and len(one.data) > 100_000]
    assert not [one for one in gc.get_objects() if isinstance(one, Leg) and one.pieces]
    go.set()


async def test_a_form_leads_to_its_model(routed):
    """Audio is sent as a form; its files stay as they are."""
    client, upstreams = await routed(
        N_TO_A_OR_B + 'set = { language = "de" }\n' + ASKED_FOR, a=failing(503), b=answering("b")
    )
    file = b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n\x00\xff\r\n'
    form = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nn\r\n--x\r\n' + file + b"--x--\r\n"
    head = (
        b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=x\r\n"
        b"content-length: %d\r\n\r\n%b"
    )
    await client.send(head % (len(form), form))
    assert (await client.response())[2] == b"b"
    language = b'--x\r\nContent-Disposition: form-data; name="language"\r\n\r\nde\r\n'
    for name, upstream in upstreams.items():
        ((_, body),) = upstream.requests
        assert body == language + form.replace(b"\r\n\r\nn\r\n", b"\r\n\r\n%b\r\n" % name.encode())


async def test_a_client_that_leaves_ends_it_all(routed, connect):
    """Its request goes nowhere else."""
    client, upstreams = await routed(N_TO_A_OR_B + ASKED_FOR, a=silent, b=answering("b"))
    port = client.stream.socket.getpeername()[1]
    leaving = await connect(port)
    await leaving.send(post_of(b'{"model": "n"}'))
    await until(lambda: asked(upstreams["a"]))
    await leaving.stream.aclose()
    while b'ichat_requests_cancelled_total{phase="waiting"} 1.0' not in (await client.get(b"/metrics"))[2]:
        await trio.sleep(0.005)
    assert not asked(upstreams["b"])


async def test_the_error_after_all_targets_names_every_model(served):
    """One message has every model and why; the status is the last one's."""
    client, _ = await served(a=None)
    status, _, body = await client.ask("n")
    assert (status, code_of(body)) == (503, "model_not_ready")
    message = json.loads(body)["error"]["message"]
    assert message.startswith("No model answers for `n`: `a`: worker w-a cannot be reached")
    assert message.endswith("; `b` is not here: no worker and no external route has it.")


async def test_kill_a_target_under_load(served, connect, nursery):
    """No client sees an error while the first model's worker goes away and comes back between two requests."""
    client, _ = await served(N_TO_A_OR_B, a=answering("a"), b=answering("b"))
    port = client.stream.socket.getpeername()[1]
    answers = collections.Counter()

    async def ask_on():
        mine = await connect(port)
        for _ in range(50):
            status, headers, _ = await mine.ask("n")
            answers[status, headers[b"x-ichat-model"]] += 1

    async with trio.open_nursery() as clients:
        for _ in range(4):
            clients.start_soon(ask_on)
        await until(lambda: answers.total() > 20)
        await beat(client, 1, "w-a", "a")  # where nothing listens
    assert {status for status, _ in answers} == {200}
    assert answers.total() == 200
    assert {model for _, model in answers} == {b"a", b"b"}


async def test_a_session_stays_on_its_side(routed, connect):
    """And without sessions the shares are those of the weights."""
    more = '[[models]]\nname = "n"\ntargets = [{ model = "a", weight = 3 }, { model = "b", weight = 1 }]\n'
    client, _ = await routed(more, a=answering("a"), b=answering("b"))

    async def ask(session):
        body = b'{"model": "n"}'
        await client.send(post_of(body, head=session))
        return (await client.response())[2]

    sides = {}
    for _ in range(3):
        for number in range(20):
            answer = await ask(b"x-session-id: s%d\r\n" % number)
            assert sides.setdefault(number, answer) == answer
    assert set(sides.values()) == {b"a", b"b"}
    drawn = collections.Counter([await ask(b"") for _ in range(200)])
    assert 105 < drawn[b"a"] < 190


async def test_members_are_set_and_dropped(routed):
    """For every model of the name, once; an external route's own name and rules count after that."""
    more = N_TO_A_OR_B + 'set = { temperature = 0.5, options = { on = true } }\ndrop = ["user"]\n' + ASKED_FOR
    client, upstreams = await routed(more, a=failing(503), b=answering("b"))
    await client.ask("n", temperature=1, user="u", seed=7)
    for name in ("a", "b"):
        assert asked(upstreams[name]) == [{"model": name, "temperature": 0.5, "seed": 7, "options": {"on": True}}]


async def test_external_routes_keep_their_names_and_rules(serve, gateway_to, connect):
    """`upstream_model` is what the upstream gets, and `drop_params` is applied to what is set as well."""
    upstream, port = await serve(answering("x"))
    more = f"""
        [[models]]
        name = "n"
        targets = [{{ model = "x" }}]
        set = {{ reasoning_effort = "low" }}
        [[external_routes]]
        model_name = "x"
        api_base = "http://127.0.0.1:{port}/v1"
        upstream_model = "org/x"
        drop_params = true
    """
    client = await connect(await gateway_to({}, more))
    assert (await client.ask("n"))[2] == b"x"
    assert asked(upstream) == [{"model": "org/x"}]


async def test_limits_count_once_and_keys_are_for_names(served, connect):
    """A key for the name alone is enough, and not one for its model alone; a request is one, however many it asked."""
    keys = "".join(
        f'[[security.keys]]\nname = "{name}"\nkey_hash = "{hash_of(name)}"\nmodels = ["{model}"]\nrequests_per_minute = 2\n'
        for name, model in (("good", "n"), ("bad", "a"))
    )
    client, _ = await served(f'[security]\njoin_token_env = "PATH"\n{keys}{N_TO_A_OR_B}')

    async def ask(key, target=b"POST /v1/completions", body=b'{"model": "n"}'):
        head = b"%b HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b"
        await client.send(head % (target, key, len(body), body))
        return await client.response(target.split(b" ")[0])

    assert code_of((await ask(b"bad"))[2]) == "forbidden"
    kept = b'{"model": "n", "previous_response_id": "resp_no"}'
    assert code_of((await ask(b"bad", b"POST /v1/responses", kept))[2]) == "forbidden"
    for _ in range(2):
        status, _, body = await ask(b"good")
        assert (status, "No model answers for `n`" in json.loads(body)["error"]["message"]) == (503, True)
    assert code_of((await ask(b"good"))[2]) == "rate_limited"


async def test_a_pattern_stands_for_names(served):
    """Rights, counts and the plan are those of the pattern's name; a model that there is comes first."""
    keys = "".join(
        f'[[security.keys]]\nname = "{name}"\nkey_hash = "{hash_of(name)}"\nmodels = ["{model}"]\n'
        for name, model in (("all", "claude-*"), ("one", "claude-opus"), ("none", "a"))
    )
    more = '[[models]]\nname = "claude-*"\ntargets = [{ model = "a" }]\n'
    client, _ = await served(
        f'[security]\njoin_token_env = "PATH"\nadmin_key_hash = "{hash_of("admin")}"\n{keys}{more}',
        {"a": 1, "claude-here": 1},
    )

    async def ask(key, model, target=b"POST /v1/completions"):
        head = b"%b HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\n%bcontent-length: %d\r\n\r\n%b"
        body = b'{"model": "%b"}' % model if target.startswith(b"POST") else b""
        await client.send(head % (target, key, b"content-type: application/json\r\n", len(body), body))
        return await client.response(target.split(b" ")[0])

    for key, model, status in (
        (b"all", b"claude-opus", 502), (b"all", b"claude-opus-4-8[1m]", 502), (b"one", b"claude-opus", 502),
        (b"one", b"claude-haiku", 403), (b"none", b"claude-opus", 403), (b"all", b"claude-here", 403),
    ):  # fmt: skip
        assert ((await ask(key, model))[0], key, model) == (status, key, model)
    listed = json.loads((await ask(b"all", b"", b"GET /v1/models"))[2])["data"]
    assert listed == []
    assert json.loads((await ask(b"all", b"", b"GET /v1/models/claude-opus"))[2])["id"] == "claude-opus"
    assert (await ask(b"none", b"", b"GET /v1/models/claude-opus"))[0] == 404
    metrics = (await ask(b"admin", b"", b"GET /metrics"))[2]
    assert b'alias="claude-*"' in metrics
    assert b"claude-opus" not in metrics
    view = json.loads((await ask(b"admin", b"claude-opus", b"POST /v1/admin/route"))[2])
    assert (view["alias"], view["model"]) == ("claude-*", "a")


async def test_a_name_is_owned_by_its_main_target(serve, gateway_to, connect):
    """Also while that is not ready, and something else answers for it: by its engine, which is known from its state."""
    more = """[[models]]
name = "mixed"
targets = [{ model = "far", weight = 1 }, { model = "near", weight = 3 }]
"""
    _, port = await serve(answering("far"))
    gateway = await gateway_to({"far": port}, more)
    client = await connect(gateway)

    async def owners():
        one = json.loads((await client.get(b"/v1/models/mixed"))[2])["owned_by"]
        listed = {model["id"]: model["owned_by"] for model in json.loads((await client.get(b"/v1/models"))[2])["data"]}
        return one, listed["mixed"], listed["far"]

    assert await owners() == ("external", "external", "external")
    await beat(client, port, "w", "near", state="loading", backend="vllm")
    assert await owners() == ("vllm", "vllm", "external")


async def test_lists_have_names(served):
    """With the card of the first model that is there; a hidden model is not in them, and 404 messages have them."""
    more = N_TO_A_OR_B + '[[models]]\nname = "b"\ntargets = [{ model = "a" }]\n'
    more = more.replace('fallbacks = ["b"]\n', "", 1)
    client, _ = await served(more, a=answering("a"), b=answering("b"))
    listed = json.loads((await client.get(b"/v1/models"))[2])["data"]
    assert [model["id"] for model in listed] == ["a", "b", "n"]
    assert (await client.ask("b"))[2] == b"a"
    assert json.loads((await client.get(b"/v1/models/n"))[2])["id"] == "n"
    _, _, body = await client.ask("other")
    assert json.loads(body)["error"]["message"].endswith("Models here: a, b, n.")


async def test_a_response_is_continued_where_it_is(served):
    """The worker that keeps it answers, whatever the weights say; one of none of the models is refused."""
    more = '[[models]]\nname = "n"\ntargets = [{ model = "a", weight = 1 }, { model = "b", weight = 0.000001 }]\n'
    more += '[[models]]\nname = "m"\ntargets = [{ model = "a" }]\n'
    client, _ = await served(more, a=answering("a"), b=answering("b"))
    kept = f"resp_{response_tag('w-b', 's')}_{'0' * 32}"
    _, headers, body = await client.ask("n", target=b"/v1/responses", previous_response_id=kept)
    assert (body, said(headers)) == (b"b", (b"b", b"1"))
    status, _, body = await client.ask("m", target=b"/v1/responses", previous_response_id=kept)
    assert (status, code_of(body)) == (404, "response_not_found")
    assert "of none of the models `a`" in json.loads(body)["error"]["message"]


async def test_litellms_words_mean_the_same(routed):
    """Its fallbacks go on for whatever an external route answers; its retries ask the same route again."""
    replies = [failing(500), answering("a")]

    async def in_turn(stream, head, body):
        await replies.pop(0)(stream, head, body)

    more = """
        [litellm_settings]
        fallbacks = [{ "a" = ["b"] }]
        num_retries = 1
        [router_settings]
        model_group_alias = { "n" = "a", "secret" = { model = "b", hidden = true } }
    """
    client, _ = await routed(more, a=in_turn, b=answering("b"))
    _, headers, body = await client.ask("a")
    assert (body, said(headers)) == (b"a", (b"a", b"2"))
    assert (await client.ask("secret"))[2] == b"b"
    listed = json.loads((await client.get(b"/v1/models"))[2])["data"]
    assert [model["id"] for model in listed] == ["a", "b", "n"]


async def test_another_route_of_the_name_is_asked_first(serve, gateway_to, connect):
    """Where a model has two routes, one retry is enough to get past the one that fails."""
    upstreams = [await serve(failing(503)), await serve(answering("well"))]
    routes = "".join(
        f'[[external_routes]]\nmodel_name = "x"\napi_base = "http://127.0.0.1:{port}/v1"\n' for _, port in upstreams
    )
    client = await connect(await gateway_to({}, f"{routes}[litellm_settings]\nnum_retries = 1\n"))
    answers = [await client.ask("x") for _ in range(20)]
    assert {(status, body) for status, _, body in answers} == {(200, b"well")}
    assert {headers[b"x-ichat-attempts"] for _, headers, _ in answers} <= {b"1", b"2"}
    assert asked(upstreams[0][0])


@pytest.mark.parametrize(("strict", "expected"), [
    ("true", ("b", "w-b", [
        ["a", 0.75, 1, "not_ready", None, "not_ready"],
        ["c", 0.25, None, "single", "w-c", None],
        ["b", None, 2, "single", "w-b", None],
    ])),
    ("false", ("c", "w-c", [
        ["a", 0.0, None, "not_ready", None, None],
        ["c", 1.0, 1, "single", "w-c", None],
        ["b", None, 2, "single", "w-b", None],
    ])),
])  # fmt: skip
async def test_the_plan_is_explained(served, strict, expected):
    """Each model with its share as it counts now, what it would do, and why the request goes on from it."""
    more = '[[models]]\nname = "n"\ntargets = [{ model = "a", weight = 3 }, { model = "c" }]\nfallbacks = ["b"]\n'
    client, _ = await served(f"{more}strict_shares = {strict}\n", c=answering("c"), b=answering("b"))

    async def explain(query=b""):
        body = b'{"model": "n"}'
        await client.send(JSON_POST % (b"/v1/admin/route" + query, len(body), body))
        return json.loads((await client.response())[2])

    def rows_of(view):
        return [[one[key] for key in ("model", "share", "place", "rule", "worker", "goes_on")] for one in view["plan"]]

    view = await explain()
    assert (view["alias"], view["model"], view["chosen"]) == ("n", *expected[:2])
    assert rows_of(view) == expected[2]
    for number in range(20):
        session = f"s{number}".encode()
        model = (await explain(b"?session=" + session))["model"]
        body = b'{"model": "n"}'
        await client.send(post_of(body, head=b"x-session-id: %b\r\n" % session))
        assert (await client.response())[2] == model.encode()


async def test_a_name_survives_one_of_its_targets(served):
    """While one is not ready the others answer all requests; with strict shares its own are refused, and nothing follows."""
    more = '[[models]]\nname = "n"\ntargets = [{ model = "a", weight = 9 }, { model = "b" }]\n'
    strict = more.replace('"n"', '"s"') + "strict_shares = true\n"
    client, _ = await served(more + strict, a=answering("a"), b=answering("b"))
    await beat(client, 1, "w-a", "a", "draining")
    answers = [await client.ask("n") for _ in range(30)]
    assert {(status, body, said(headers)) for status, headers, body in answers} == {(200, b"b", (b"b", b"1"))}
    refused = [status for status, _, _ in [await client.ask("s") for _ in range(30)] if status == 503]
    assert refused
    view = json.loads((await client.ask("s", target=b"/v1/admin/route"))[2])
    assert (view["rule"], [one["goes_on"] for one in view["plan"]]) == ("not_ready", [None, None])


async def test_a_target_that_has_just_failed_gets_no_share(routed, autojump_clock):
    """Where no connection could be made, only the request that meets that fails."""
    more = '[[models]]\nname = "n"\ntargets = [{ model = "a", weight = 99 }, { model = "b" }]\n'
    client, _ = await routed(more, a=None, b=answering("b"))
    statuses = [(await client.ask("n"))[0] for _ in range(60)]  # all to `b` once in 10 ** 120 times
    assert collections.Counter(statuses) == {502: 1, 200: 59}


@pytest.fixture
def gateways(monkeypatch):
    """Collect the components of the gateways that are started."""
    built, build = [], gateway.build

    def building(*args):
        built.append(build(*args))
        return built[-1]

    monkeypatch.setattr(gateway, "build", building)
    return built


def on_demand(fleet, model):
    """Add a cold worker that is loaded on demand."""
    worker = fleet.managed.expect(f"w-{model}", [model])
    fleet.managed.configure(worker, names=[model], max_in_flight=None, settings={}, on_demand=True)
    fleet.managed.cool(worker)
    return worker


async def test_a_cold_target_is_waited_for_unless_it_fails(serve, served, gateways, connect, nursery):
    """A request waits for the load of the first one, or goes on where `loading` is asked for; a failed load leads on."""
    more = N_TO_A_OR_B + N_TO_A_OR_B.replace('"n"', '"quick"') + 'fallback_on = ["loading"]\n'
    client, _ = await served(more, b=answering("b"))
    fleet, balancer = gateways[0].control.fleet, gateways[0].control.balancer
    worker = on_demand(fleet, "a")
    status, headers, body = await client.ask("quick")
    assert (status, body, said(headers)) == (200, b"b", (b"b", b"2"))
    answers = []

    async def ask():
        answers.append(await (await connect(client.stream.socket.getpeername()[1])).ask("n"))

    nursery.start_soon(ask)
    await until(lambda: balancer.demand("a").waiting == 1)
    listed = json.loads((await client.get(b"/v1/models"))[2])["data"]
    assert {model["id"]: model.get("loaded") for model in listed} == {"a": False, "b": None, "n": False, "quick": False}
    fleet.managed.restart(worker)
    _, port = await serve(answering("a"))
    fleet.registry.record_heartbeat(Heartbeat("w-a", "a", "127.0.0.1", port, start_id="1", heartbeat_interval=1e3))
    await until(lambda: answers)
    assert (answers[0][2], said(answers[0][1])) == (b"a", (b"a", b"1"))
    fleet.managed.cool(worker)
    nursery.start_soon(ask)
    await until(lambda: balancer.demand("a").waiting == 1)
    fleet.managed.restart(worker)
    fleet.table.fail(worker, WorkerEnd("has failed", 0.0, cause="no memory"), trio.current_time() + 60)
    await until(lambda: len(answers) == 2)
    assert (answers[1][2], said(answers[1][1])) == (b"b", (b"b", b"2"))


async def test_waiting_for_a_load_takes_no_time_from_the_next_models_queue(
    served, gateways, connect, nursery, autojump_clock
):
    """The first model's load fails after longer than `queue_s`; the second one's only place is free soon after."""
    go = trio.Event()

    async def held(stream, head, body):
        if head.method == b"POST":
            await go.wait()
        await stream.send_all(plain(b"held"))

    more = "[routing]\nmax_in_flight = 1\n[timeouts]\nqueue_s = 0.5\n" + N_TO_A_OR_B
    client, upstreams = await served(more, b=held)
    fleet, balancer = gateways[0].control.fleet, gateways[0].control.balancer
    worker, answers = on_demand(fleet, "a"), []
    other = await connect(client.stream.socket.getpeername()[1])
    nursery.start_soon(other.ask, "b")
    await until(lambda: asked(upstreams["b"]))

    async def ask():
        answers.append(await client.ask("n"))

    nursery.start_soon(ask)
    await until(lambda: balancer.demand("a").waiting == 1)
    await trio.sleep(0.6)
    fleet.managed.restart(worker)
    fleet.table.fail(worker, WorkerEnd("has failed", 0.0, cause="no memory"), trio.current_time() + 60)
    await until(lambda: balancer.demand("b").waiting == 1)
    go.set()
    await until(lambda: answers)
    assert (answers[0][0], answers[0][2]) == (200, b"held")


async def test_another_configuration_is_in_force_at_once(routed, gateways):
    """Names come, change and go with a reload; requests under way keep their plan."""
    client, upstreams = await routed(a=answering("a"), b=answering("b"))
    assert (await client.ask("n"))[2] == b"a"
    changed = N_TO_A_OR_B.replace('"a"', '"b"') + '[[models]]\nname = "new"\ntargets = [{ model = "a" }]\n'
    gateways[0].data.context.reconfigure(configuration.parse(changed, "test.toml"))
    assert [(await client.ask(name))[2] for name in ("n", "new")] == [b"b", b"a"]
    gateways[0].data.context.reconfigure(configuration.parse("", "test.toml"))
    assert code_of((await client.ask("n"))[2]) == "model_not_found"
    assert [len(asked(upstreams[name])) for name in ("a", "b")] == [2, 1]


async def test_waits_are_bounded_in_all(served, gateways, connect, nursery, autojump_clock):
    """The second model's queue gets what is left of `timeouts.queue_s`, not as much again."""
    go = trio.Event()

    async def held(stream, head, body):
        if head.method == b"POST":
            await go.wait()
        await stream.send_all(plain(b"held"))

    more = "[routing]\nmax_in_flight = 1\n[timeouts]\nqueue_s = 0.3\n" + N_TO_A_OR_B
    client, upstreams = await served(more, a=held, b=held)
    for name in ("a", "b"):
        other = await connect(client.stream.socket.getpeername()[1])
        nursery.start_soon(other.ask, name)
        await until(lambda name=name: asked(upstreams[name]))
    since = trio.current_time()
    status, headers, body = await client.ask("n")
    assert (status, code_of(body), headers[b"retry-after"]) == (503, "overloaded", b"2")
    assert trio.current_time() - since == pytest.approx(0.3, abs=0.01)
    message = json.loads(body)["error"]["message"]
    assert message.count("is overloaded: the request waited") == 2
    go.set()


async def test_the_access_log_has_both_names(serve, gateway_to, connect, tmp_path):
    """The name that was asked for, and the model that answered; a request for a model has no such member."""
    path = tmp_path / "access"
    client = await connect(
        await gateway_to({"b": (await serve(answering("b")))[1]}, f'[logs]\naccess_log = "{path}"\n{N_TO_A_OR_B}')
    )
    await client.ask("n")
    await client.ask("b")
    await until(lambda: path.read_text().count("\n") == 2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line.get("alias"), line["model"]) for line in lines] == [("n", "b"), (None, "b")]
