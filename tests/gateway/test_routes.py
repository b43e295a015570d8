"""External routes and the way to an endpoint: keys, names, parameters, queues, what is said of it afterwards."""

import json
import os
import signal
import time

import openai
import pytest
import trio
from support.peers import LIMIT_S, SSE_END, SSE_HEAD, code_of, event, plain, post_of, turns_until, until

from ichat.config import load as configuration
from ichat.errors import Exit
from ichat.observability import access_log as accesslog
from ichat.roles import gateway

KEY = "sk-very-secret"


async def hello(stream, head, body):
    await stream.send_all(plain(b'{"hello": 1}'))


def held():
    """Make an upstream's reply that waits, and the event that it waits for."""
    go = trio.Event()

    async def reply(stream, head, body):
        await go.wait()
        await hello(stream, head, body)

    return go, reply


@pytest.fixture
def routed(nursery, serve):
    """Start an upstream and a gateway with one route `m` to it: `upstream, port = await routed(reply, route, more)`."""

    async def start(reply=hello, route="", more=""):
        upstream, port = await serve(reply)
        text = f'[server_settings]\nport = 0\n{more}\n[[external_routes]]\nmodel_name = "m"\n'
        text += f'api_base = "http://127.0.0.1:{port}/base/v1"\n{route}'
        return upstream, await nursery.start(gateway.run, configuration.parse(text, "test.toml"))

    return start


async def logged(path, count, mock_clock):
    """Wait for so many lines of the access log."""
    lines = []
    deadline = time.monotonic() + LIMIT_S
    while len(lines) < count:
        assert time.monotonic() < deadline, lines
        mock_clock.jump(accesslog.FLUSH_S)
        await trio.testing.wait_all_tasks_blocked()
        *lines, _unfinished = path.read_text().split("\n")
    return [json.loads(line) for line in lines]


async def shows(client, text):
    """Wait until the metrics have this line."""
    deadline = time.monotonic() + LIMIT_S
    while text not in (await client.get(b"/metrics"))[2]:
        assert time.monotonic() < deadline, text


async def ask(connect, port, body, target=b"/v1/chat/completions", content_type=b"application/json", headers=b""):
    client = await connect(port)
    await client.send(
        post_of(body, target, b"authorization: Bearer mine\r\ncontent-type: %b\r\n%b" % (content_type, headers))
    )
    return await client.response()


async def test_a_route_has_its_own_key_name_and_headers(routed, connect, monkeypatch, capfd, caplog):
    """The upstream gets the route's key and headers in place of the client's, and its own name for the model."""
    monkeypatch.setenv("THEIR_KEY", KEY)
    upstream, port = await routed(
        route='upstream_model = "org/big"\napi_key_env = "THEIR_KEY"\nheaders = { "X-Org" = "us", "X-Title" = "ichat" }\n'
    )
    body = b'{ "model" : "m", "n":1e0,\t"x": "\\u00e9", "model": "m" }'
    status, headers, _ = await ask(connect, port, body, headers=b"x-org: them\r\n")
    assert status == 200
    [(head, received)] = upstream.requests
    assert received == b'{ "model" : "org/big", "n":1e0,\t"x": "\\u00e9", "model": "org/big" }'
    assert head.target == b"/base/v1/chat/completions"
    sent = [(name, value) for name, value in head.headers if name in (b"authorization", b"x-org", b"x-title")]
    assert sorted(sent) == [(b"authorization", b"Bearer " + KEY.encode()), (b"x-org", b"us"), (b"x-title", b"ichat")]
    assert headers[b"x-ichat-worker"] == b"external:m"
    client = await connect(port)
    shown = [await client.get(path) for path in (b"/v1/models", b"/v1/admin/workers", b"/metrics")]
    assert [model["id"] for model in json.loads(shown[0][2])["data"]] == ["m"]
    assert KEY not in repr(shown) + capfd.readouterr().out + caplog.text


@pytest.mark.parametrize("own", [True, False])
async def test_a_clients_credentials_stay_here(routed, connect, monkeypatch, own):
    """Where the route has a key, nothing goes out with which a client says who it is; cookies never do."""
    monkeypatch.setenv("THEIR_KEY", KEY)
    upstream, port = await routed(route='api_key_env = "THEIR_KEY"\n' if own else "")
    mine = b"X-Api-Key: a\r\nApi-Key: b\r\nCookie: c\r\nProxy-Authorization: d\r\nOpenAI-Organization: e\r\n"
    assert (await ask(connect, port, b'{"model": "m"}', headers=mine))[0] == 200
    names = {name for name, _ in upstream.requests[0][0].headers}
    assert not names & {b"cookie", b"proxy-authorization"}
    assert bool(names & {b"x-api-key", b"api-key", b"openai-organization"}) != own


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (b"/v1/chat/completions?a=b", b"/base/v1/chat/completions?a=b"),
        (b"/rerank", b"/base/v1/rerank"),
        (b"/v2/rerank", b"/base/v2/rerank"),
        (b"/tokenize", b"/base/tokenize"),
        (b"/v1/audio/speech", b"/base/v1/audio/speech"),
    ],
)
async def test_where_a_route_leads(routed, connect, path, expected):
    """`api_base` is what stands before /chat/completions; what engines have beside /v1 is found beside it."""
    upstream, port = await routed()
    assert (await ask(connect, port, b'{"model": "m"}', path))[0] == 200
    assert upstream.requests[0][0].target == expected


async def test_a_stopping_gateway_refuses_its_queues_at_once(routed, connect, nursery):
    """A gateway that is told to stop refuses its queues at once, so that their clients can go elsewhere."""
    go, reply = held()
    upstream, port = await routed(reply, "max_in_flight = 1\n")
    answers = []

    async def one():
        answers.append(await ask(connect, port, b'{"model": "m"}'))

    nursery.start_soon(one)
    await until(lambda: upstream.requests)
    nursery.start_soon(one)
    metrics = await connect(port)
    await shows(metrics, b'ichat_requests_queued{model="m"} 1.0')
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: answers)
    status, headers, body = answers[0]
    assert (status, code_of(body), b"retry-after" in headers) == (503, "draining", True)
    go.set()
    await until(lambda: len(answers) == 2)
    assert answers[1][0] == 200


async def test_a_key_that_is_not_accepted_is_the_operators_problem(routed, connect, monkeypatch):
    """The client's own key is not in question: 502, and the upstream's words about the key are not passed on."""
    monkeypatch.setenv("THEIR_KEY", KEY)

    async def reply(stream, head, body):
        words = b'{"error": {"message": "Incorrect API key: %b"}}' % KEY.encode()
        await stream.send_all(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: %d\r\n\r\n%b" % (len(words), words))

    _, port = await routed(reply, 'api_key_env = "THEIR_KEY"\n')
    status, headers, body = await ask(connect, port, b'{"model": "m"}')
    assert (status, code_of(body)) == (502, "upstream_failed")
    assert headers[b"x-should-retry"] == b"false"
    assert KEY.encode() not in body
    assert b"does not accept the key" in body


async def test_without_a_key_of_its_own_a_route_passes_the_clients(routed, connect):
    """And then a 401 is for the client."""

    async def reply(stream, head, body):
        assert dict(head.headers)[b"authorization"] == b"Bearer mine"
        await stream.send_all(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n")

    _, port = await routed(reply)
    assert (await ask(connect, port, b'{"model": "m"}'))[0] == 401


@pytest.mark.parametrize("value", [None, "", "a\nb", " padded ", "schlüssel"])
def test_a_missing_key_is_found_before_anything_starts(monkeypatch, value):
    """A key that is not there, or that cannot be sent, is one sentence with its variable's name, and not its value."""
    monkeypatch.delenv("THEIR_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("THEIR_KEY", value)
    config = configuration.parse(
        '[[external_routes]]\nmodel_name = "m"\napi_base = "https://there/v1"\napi_key_env = "THEIR_KEY"\n', "test.toml"
    )
    with pytest.raises(
        Exit, match=r"external_routes\[0\]: the environment has no usable key in THEIR_KEY\.$"
    ) as caught:
        gateway.secure_parts(config)
    assert caught.value.code == 64


async def test_unsupported_parameters_are_refused_or_dropped(routed, connect, caplog, capfd, relay_count):
    """Refused by name, or dropped where the route says so; what is not OpenAI's passes; said once by each process."""
    body = b'{"model": "m", "reasoning_effort": "low", "top_k": 3, "n": 1}'
    upstream, port = await routed()
    status, _, answer = await ask(connect, port, body)
    assert (status, code_of(answer)) == (400, "unsupported_parameter")
    assert json.loads(answer)["error"]["param"] == "reasoning_effort"
    assert not upstream.requests
    upstream, port = await routed(route="drop_params = true\n")
    with caplog.at_level("INFO"):
        for _ in range(2):
            assert (await ask(connect, port, body))[0] == 200
    assert [received for _, received in upstream.requests] == [b'{"model": "m", "top_k": 3, "n": 1}'] * 2
    said = (capfd.readouterr().err if relay_count else caplog.text).count("drops reasoning_effort (said once)")
    assert 1 <= said <= max(1, relay_count)


@pytest.mark.parametrize(
    ("everywhere", "route", "expected"),
    [
        ("drop_params = true", "", {"top_k": 3}),
        ("drop_params = true", "drop_params = false", 400),
        ("", 'allowed_openai_params = ["thinking"]', {"thinking": {"type": "x"}, "top_k": 3}),
        ('allowed_openai_params = ["thinking"]', "", {"thinking": {"type": "x"}, "top_k": 3}),
        ("drop_params = true", 'additional_drop_params = ["top_k"]', {}),
        (
            'additional_drop_params = ["thinking.type"]',
            'allowed_openai_params = ["thinking"]',
            {"thinking": {}, "top_k": 3},
        ),
    ],
)
async def test_rules_hold_everywhere_and_for_a_route(routed, connect, everywhere, route, expected):
    """[litellm_settings] is for all routes; a route's own drop_params goes before it, its lists add to it."""
    upstream, port = await routed(route=route + "\n", more=f"[litellm_settings]\n{everywhere}\n")
    status, _, _ = await ask(connect, port, b'{"model": "m", "thinking": {"type": "x"}, "top_k": 3}')
    if expected == 400:
        assert status == 400
    else:
        assert json.loads(upstream.requests[0][1]) == {"model": "m", **expected}


async def test_openai_through_a_route(routed):
    """The client that most users have, streamed, with a name that only the gateway knows."""

    async def reply(stream, head, body):
        assert json.loads(body)["model"] == "org/big"
        await stream.send_all(SSE_HEAD + event(0) + SSE_END)

    _, port = await routed(reply, 'upstream_model = "org/big"\n')

    def chat():
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k") as client:
            return [chunk.n for chunk in client.chat.completions.create(model="m", messages=[], stream=True)]

    assert await trio.to_thread.run_sync(chat) == [0]


def form(boundary, *parts):
    body = b"".join(
        b"--%b\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % (boundary, what, value) for what, value in parts
    )
    return body + b"--%b--\r\n" % boundary


@pytest.mark.parametrize("path", [b"/v1/audio/transcriptions", b"/v1/audio/translations"])
async def test_audio_is_routed_by_its_model_field(routed, connect, path):
    """A form goes where its `model` field says, whatever comes before it, byte for byte but for the name."""
    upstream, port = await routed(route='upstream_model = "whisper-1"\n')
    audio = bytes(range(256)) * 300 + b"\r\n--b\r\n--bb"
    body = form(
        b"bound", (b'name="file"; filename="a.wav"', audio), (b'name="model"', b"m"), (b'name="language"', b"de")
    )
    status, _, _ = await ask(connect, port, body, path, b"multipart/form-data; boundary=bound")
    assert status == 200
    expected = form(
        b"bound",
        (b'name="file"; filename="a.wav"', audio),
        (b'name="model"', b"whisper-1"),
        (b'name="language"', b"de"),
    )
    [(head, received)] = upstream.requests
    assert (head.target, received) == (b"/base" + path, expected)
    status, _, answer = await ask(connect, port, form(b"b"), path, b"multipart/form-data; boundary=b")
    assert (status, code_of(answer)) == (400, "bad_request")


async def test_openai_sends_audio(routed):
    """What the openai package makes of a file is understood."""
    upstream, port = await routed(lambda stream, head, body: stream.send_all(plain(b'{"text": "hello"}')))
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k") as client:
        answer = await client.audio.transcriptions.create(model="m", file=("a.wav", b"RIFF" * 100_000))
    assert answer.text == "hello"
    assert b"RIFFRIFF" in upstream.requests[0][1]


async def test_a_body_of_20_mb_arrives_unchanged(routed, connect):
    """Images in JSON: read for the model's name only, wherever it stands, and sent on as they came, chunked or not."""
    upstream, port = await routed(more="[limits]\nbody_bytes_max = 30000000\n")
    image = b"A" * 20_000_000
    body = b'{"messages": [{"role": "user", "content": [{"type": "image_url", "url": "%b"}]}], "model": "m"}' % image
    assert (await ask(connect, port, body))[0] == 200
    client = await connect(port)
    await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
    for at in range(0, len(body), 1_000_000):
        piece = body[at : at + 1_000_000]
        await client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
    await client.send(b"0\r\n\r\n")
    assert (await client.response())[0] == 200
    assert [received == body for _, received in upstream.requests] == [True, True]


async def test_a_large_upload_lets_others_go_on(routed, connect, nursery):
    """While a large body is read and scanned, another client's requests are answered in between."""
    _, port = await routed()
    tokens = b'{"model": "m", "prompt": [%b]}' % b",".join([b'"%05d"' % number for number in range(100_000)] * 20)
    done = trio.Event()

    async def upload():
        assert (await ask(connect, port, tokens))[0] == 200
        done.set()

    nursery.start_soon(upload)
    answered = 0
    client = await connect(port)
    while not done.is_set():
        assert (await client.ask())[0] == 200
        answered += 1
    assert answered > 20


@pytest.mark.parametrize("more", ["", "worker_header = false\noverhead_header = false\n"])
async def test_timing_can_be_seen_or_not(serve, gateway_to, connect, more):
    """Who answered, and what the gateway took before it asked: unless they are switched off."""
    _, port = await serve(hello)
    client = await connect(await gateway_to({"m": port}, more))
    headers = (await client.ask())[1]
    if more:
        assert not [name for name in headers if name.startswith(b"x-ichat")]
    else:
        assert headers[b"x-ichat-worker"] == b"external:m"
        assert float(headers[b"x-ichat-overhead-ms"]) > 0


async def test_overhead_does_not_hold_the_queue(routed, connect, tmp_path, nursery, mock_clock):
    """Waiting for room is told apart from what the gateway itself takes."""
    go, reply = held()
    path = tmp_path / "access.log"
    upstream, port = await routed(reply, "max_in_flight = 1\n", f'[logs]\naccess_log = "{path}"\n')
    answers = []

    async def one():
        answers.append(await ask(connect, port, b'{"model": "m"}'))

    nursery.start_soon(one)
    await turns_until(lambda: len(upstream.requests) == 1)
    nursery.start_soon(one)
    await shows(await connect(port), b'ichat_requests_queued{model="m"} 1.0')
    mock_clock.jump(0.3)
    assert len(upstream.requests) == 1
    go.set()
    await turns_until(lambda: len(answers) == 2)
    assert [float(headers[b"x-ichat-overhead-ms"]) for _, headers, _ in answers] == [0, 0]
    found = await logged(path, 3, mock_clock)
    first, second = (line for line in found if line["method"] == "POST")
    assert first["queue_ms"] == 0
    assert (second["queue_ms"], second["overhead_ms"]) == (300, 0)


async def test_a_queue_has_two_bounds(routed, connect, nursery, mock_clock):
    """A full queue is 429 at once, a long wait 503; both say when to come again, and the queue goes on."""
    go, reply = held()
    upstream, port = await routed(reply, "max_in_flight = 1\n", "[routing]\nqueue_max = 1\n[timeouts]\nqueue_s = 0.4\n")
    nursery.start_soon(ask, connect, port, b'{"model": "m"}')
    await turns_until(lambda: upstream.requests)
    waited = []

    async def wait():
        waited.append(await ask(connect, port, b'{"model": "m"}'))

    nursery.start_soon(wait)
    metrics = await connect(port)
    await shows(metrics, b'ichat_requests_queued{model="m"} 1.0')
    status, headers, body = await ask(connect, port, b'{"model": "m"}')
    assert (status, code_of(body), b"retry-after" in headers) == (429, "overloaded", True)
    mock_clock.jump(0.4)
    await turns_until(lambda: waited)
    status, headers, body = waited[0]
    assert (status, code_of(body), b"retry-after" in headers) == (503, "overloaded", True)
    nursery.start_soon(wait)
    go.set()
    await turns_until(lambda: len(waited) == 2)
    assert waited[1][0] == 200


async def test_a_client_that_leaves_the_queue_loses_no_place(routed, connect, nursery):
    """A client that hangs up while it waits is out of the queue, and no place is lost."""
    go, reply = held()
    upstream, port = await routed(reply, "max_in_flight = 1\n")
    nursery.start_soon(ask, connect, port, b'{"model": "m"}')
    await until(lambda: upstream.requests)
    leaver = await connect(port)
    await leaver.send(post_of(b'{"model": "m"}'))
    metrics = await connect(port)
    await shows(metrics, b'ichat_requests_queued{model="m"} 1.0')
    await leaver.stream.aclose()
    await shows(metrics, b'ichat_requests_queued{model="m"} 0.0')
    go.set()
    assert (await ask(connect, port, b'{"model": "m"}'))[0] == 200
    assert len(upstream.requests) == 2


async def test_routes_of_one_name_share_the_load(serve, nursery, connect):
    """Several upstreams for one model: both get requests, and one that is away is passed over."""
    first, one = await serve(hello)
    second, two = await serve(hello)
    text = "[server_settings]\nport = 0\n[routing]\npolicy = 'round_robin'\n"
    for port in (one, two, 1):
        text += f'[[external_routes]]\nmodel_name = "m"\napi_base = "http://127.0.0.1:{port}/v1"\n'
    port = await nursery.start(gateway.run, configuration.parse(text, "test.toml"))
    names = set()
    for _ in range(9):
        status, headers, _ = await ask(connect, port, b'{"model": "m"}')
        assert status == 200
        names.add(headers[b"x-ichat-worker"])
    assert names == {b"external:m", b"external:m#2"}
    assert len(first.requests) + len(second.requests) == 9
    assert min(len(first.requests), len(second.requests)) >= 3


async def test_a_session_goes_where_it_went(serve, nursery, connect):
    """Requests with the same x-session-id meet the same upstream, and its warm prefix cache."""
    upstreams = [await serve(hello) for _ in range(3)]
    text = "[server_settings]\nport = 0\n"
    for _, port in upstreams:
        text += f'[[external_routes]]\nmodel_name = "m"\napi_base = "http://127.0.0.1:{port}/v1"\n'
    port = await nursery.start(gateway.run, configuration.parse(text, "test.toml"))
    for session in (b"a", b"b"):
        for _ in range(6):
            await ask(connect, port, b'{"model": "m"}', headers=b"X-Session-Id: %b\r\n" % session)
    assert {len(upstream.requests) % 6 for upstream, _ in upstreams} == {0}
    assert sum(len(upstream.requests) for upstream, _ in upstreams) == 12


async def test_the_access_log_has_a_line_for_each_request(routed, connect, tmp_path, mock_clock):
    """Answered, refused or not even a request: one JSON object each, with what an operator asks for."""
    path = tmp_path / "access.log"
    _, port = await routed(more=f'[logs]\naccess_log = "{path}"\n')
    assert (await ask(connect, port, b'{"model": "m"}', headers=b"x-request-id: abc\r\n"))[0] == 200
    assert (await ask(connect, port, b'{"model": "else"}'))[0] == 404
    bad = await connect(port)
    await bad.send(b"BAD\r\n\r\n")
    assert (await bad.response())[0] == 400
    answered, unknown, malformed = await logged(path, 3, mock_clock)
    assert {key: answered[key] for key in ("id", "method", "path", "model", "worker", "status", "error", "bytes_in")} == {
        "id": "abc", "method": "POST", "path": "/v1/chat/completions", "model": "m", "worker": "external:m",
        "status": 200, "error": "", "bytes_in": 14,
    }  # fmt: skip
    assert answered["client"].startswith("127.0.0.1:")
    assert answered["bytes_out"] > 100
    assert answered["duration_ms"] >= answered["first_byte_ms"] >= answered["overhead_ms"] >= 0
    assert (unknown["status"], unknown["error"], unknown["model"]) == (404, "model_not_found", "else")
    assert (malformed["status"], malformed["error"]) == (400, "bad_request")
