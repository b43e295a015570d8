"""What clients get for their mistakes: an error in the shape of their API, and the address that they meant."""

import json

import pytest
from support.peers import chunk, code_of, plain, post_of

KEYED = """
[[security.keys]]
name = "a"
key_env = "TEST_ERROR_KEY"
models = ["m"]
"""


async def hello(stream, head, body):
    await stream.send_all(plain(b'{"hello": 1}'))


def anthropics(body, kind):
    """Return the message of an error, which must have Anthropic's shape and this type."""
    told = json.loads(body)
    assert told["type"] == "error"
    assert told["error"]["type"] == kind
    return told["error"]["message"], told["request_id"]


@pytest.mark.parametrize("path", [b"/v1/messages", b"/messages", b"/v1/messages/count_tokens"])
async def test_errors_of_the_messages_api_have_its_shape(gateway_to, serve, connect, path):
    """Of models that there are not, of bodies that are wrong, of routes, and those before there is a request."""
    _, upstream = await serve(hello)
    client = await connect(await gateway_to({"m": upstream}))
    status, headers, body = await client.ask("nope", target=path)
    message, id_ = anthropics(body, "not_found_error")
    assert (status, id_) == (404, headers[b"x-request-id"].decode())
    assert message.startswith("The model `nope` does not exist.")
    assert json.loads(body)["error"]["code"] == "model_not_found"
    await client.send(post_of(b"{", path))
    status, _, body = await client.response()
    assert status == 400
    anthropics(body, "invalid_request_error")
    await client.send(b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\n\r\n" % path)
    status, _, body = await client.response()
    assert status == 413
    anthropics(body, "request_too_large")


async def test_a_wrong_key_has_the_error_shape_of_the_route(gateway_to, connect, monkeypatch):
    """Before a body is read: Anthropic's on its routes, OpenAI's on all others."""
    monkeypatch.setenv("TEST_ERROR_KEY", "sk-right-and-long-enough-0123456789")
    port = await gateway_to({"m": 1}, KEYED)
    status, _, body = await (await connect(port)).ask(target=b"/v1/messages")
    assert status == 401
    anthropics(body, "authentication_error")
    status, _, body = await (await connect(port)).ask()
    assert (status, code_of(body)) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        (b"GET", b"/models", "Did you mean http://localhost/v1/models? For clients, the base URL is http://localhost/v1."),
        (b"GET", b"/v1/v1/models", "Did you mean http://localhost/v1/models?"),
        (b"POST", b"/v1/v1/chat/completions", "Did you mean http://localhost/v1/chat/completions?"),
        (b"POST", b"/v1/chat/completions/chat/completions", "Did you mean http://localhost/v1/chat/completions?"),
        (b"POST", b"/openai/v1/chat/completions", "Did you mean http://localhost/v1/chat/completions?"),
        (b"GET", b"/api/tags", "Ollama's API, and this is an OpenAI-compatible gateway: the base URL is http://localhost/v1."),
        (b"POST", b"/api/chat", "Ollama's API"),
        (b"POST", b"/v1/api/chat", "Ollama's API"),
        (b"POST", b"/v1beta/models/m:generateContent", "Google's API"),
        (b"POST", b"/v1/models/m:streamGenerateContent", "Google's API"),
        (b"POST", b"/v1/workers/register", "Did you mean POST /register?"),
        (b"GET", b"/v1/health", "Did you mean GET /health?"),
        (b"GET", b"/v1", "For clients, the base URL is http://localhost/v1."),
    ],
)  # fmt: skip
async def test_a_wrong_address_names_the_right_one(gateway_to, serve, connect, method, path, said):
    """The two mistakes with `/v1`, other APIs, and the control plane: nothing of it reaches a model."""
    upstream, upstream_port = await serve(hello)
    client = await connect(await gateway_to({"m": upstream_port}))
    status, _, body = await client.ask(method=method, target=path)
    assert (status, code_of(body)) == (404, "not_found")
    message = json.loads(body)["error"]["message"]
    assert message.startswith(f"There is no route {path.decode()}. ")
    assert said in message
    assert not upstream.requests


@pytest.mark.parametrize("host", [b"evil.example", b"localhost@evil.example", b"x" * 300, b'"><script>'])
async def test_a_name_that_is_not_the_gateways_is_in_no_address(gateway_to, connect, host, monkeypatch):
    """Where it serves a client at all that asks by such a name."""
    monkeypatch.setenv("TEST_ERROR_KEY", "sk-right-and-long-enough-0123456789")
    client = await connect(await gateway_to({"m": 1}, KEYED))
    await client.send(
        b"GET /models HTTP/1.1\r\nhost: %b\r\nauthorization: Bearer sk-right-and-long-enough-0123456789\r\n\r\n" % host
    )
    status, _, body = await client.response(b"GET")
    assert status in (400, 404)
    assert b"evil" not in body
    assert b"script" not in body
    if status == 404:
        assert b"Did you mean /v1/models? For clients, the base URL is that of this gateway with /v1" in body


async def test_a_path_that_is_near_to_nothing_gets_no_advice(gateway_to, connect):
    """A guess would be worse than none."""
    client = await connect(await gateway_to({"m": 1}))
    _, _, body = await client.get(b"/nonsense")
    assert json.loads(body)["error"]["message"] == "There is no route /nonsense."


def answering(status, body, extra=b"content-type: application/json\r\n", *, chunked=False, length=None):
    """Make a reply of an upstream: in two pieces, so that the first has no whole body."""

    async def reply(stream, head, _request):
        framing = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % (length or len(body))
        await stream.send_all(b"HTTP/1.1 %d X\r\n%b%b\r\n\r\n" % (status, extra, framing))
        if chunked:
            half = len(body) // 2
            await stream.send_all(chunk(body[:half]))
            await stream.send_all(chunk(body[half:]) + b"0\r\n\r\n")
        else:
            await stream.send_all(body)
        return "close" if length else None

    return reply


FOREIGN = [
    (404, b"404: Not Found", "The external route m answered 404: Not Found (its server may not have the route {}).", "not_found"),
    (404, b'{"detail": "Not Found"}', "The external route m answered 404: Not Found (its server may not have the route {}).", "not_found"),
    (400, b'{"error": "no such thing"}', "The external route m answered 400: no such thing.", "bad_request"),
    (502, b"<html><h1>Bad Gateway</h1></html>", "The external route m answered 502: Bad Gateway.", "internal_error"),
    (429, b'{"object": "error", "message": "Slow down."}', "The external route m answered 429: Slow down.", "rate_limited"),
    (500, b"", "The external route m answered 500: Internal Server Error.", "internal_error"),
    (422, b"[" * 3000, "The external route m answered 422: " + "[" * 1000 + ".", "bad_request"),
]  # fmt: skip


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("status", "body", "said", "code"), FOREIGN)
async def test_an_external_routes_own_errors_name_it(gateway_to, serve, connect, status, body, said, code, chunked):
    """In the shape of the client's API, with the headers of the upstream; its connections are used again."""
    extra = b"content-type: text/plain\r\nretry-after: 7\r\n"
    upstream, port = await serve(answering(status, body, extra, chunked=chunked and bool(body)))
    client = await connect(await gateway_to({"m": port}))
    for path in (b"/v1/chat/completions", b"/v1/responses"):
        found, headers, answer = await client.ask(target=path)
        assert (found, code_of(answer)) == (status, code)
        assert json.loads(answer)["error"]["message"] == said.format(path.decode())
        assert (headers[b"content-type"], headers[b"retry-after"]) == (b"application/json", b"7")
        assert b"x-request-id" in headers
    _, _, answer = await client.ask(target=b"/v1/messages")
    told = json.loads(answer)
    assert told["type"] == "error"
    assert told["error"]["message"] == said.format("/v1/messages")
    assert len(upstream.requests) == 3
    assert upstream.connections == 1


async def test_an_openai_error_becomes_anthropics_for_its_clients(gateway_to, serve, connect):
    """Its message is kept; OpenAI's clients get it byte for byte."""
    body = b'{"error":{"message":"Over quota.","type":"x","param":null,"code":"insufficient_quota"},"more":1}'
    _, port = await serve(answering(429, body))
    client = await connect(await gateway_to({"m": port}))
    assert (await client.ask())[2] == body
    _, _, answer = await client.ask(target=b"/v1/messages")
    message, _ = anthropics(answer, "rate_limit_error")
    assert message == "The external route m answered 429: Over quota."
    assert json.loads(answer)["error"]["code"] == "insufficient_quota"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (b"/v1/chat/completions", b'{"error": {"message": "No.", "type": "odd"}}'),
        (b"/v1/messages", b'{"type": "error", "error": {"type": "not_found_error", "message": "No."}}'),
        (b"/v1/chat/completions", b"x" * 70_000),
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
async def test_errors_in_the_right_shape_and_long_ones_are_not_touched(gateway_to, serve, connect, path, body, chunked):
    """They go on byte for byte, with their own type."""
    _, port = await serve(answering(404, body, b"content-type: text/odd\r\n", chunked=chunked))
    client = await connect(await gateway_to({"m": port}))
    status, headers, answer = await client.ask(target=path)
    assert (status, headers[b"content-type"], answer) == (404, b"text/odd", body)


async def test_an_error_that_breaks_off_is_an_error_of_the_gateway(gateway_to, serve, connect):
    """Nothing of it was sent, so that the client gets a whole response."""
    _, port = await serve(answering(404, b"404: Not", length=100))
    client = await connect(await gateway_to({"m": port}))
    status, _, body = await client.ask()
    assert (status, code_of(body)) == (502, "upstream_failed")
