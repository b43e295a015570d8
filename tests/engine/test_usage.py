"""The tokens that each request used: with both engines, on every route, whether the client asks for them or not."""

import http.client
import itertools
import json
import re
import socket

import pytest
from support.programs import LIMIT_S
from support.real_engines import MESSAGES

GREEDY = {"model": "tiny", "temperature": 0, "seed": 1, "max_tokens": 12}
CHAT = {**GREEDY, "messages": MESSAGES}
TEXT = {**GREEDY, "prompt": "Once upon a time there was"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
ASKED = {"stream": True, "stream_options": {"include_usage": True}}
REQUESTS = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat-stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "chat-stream-asked": ("/v1/chat/completions", {**CHAT, **ASKED}),
    "chat-n": ("/v1/chat/completions", {**CHAT, "temperature": 0.01, "n": 2}),
    "chat-n-stream": ("/v1/chat/completions", {**CHAT, "temperature": 0.01, "n": 2, **ASKED}),
    "chat-tools": ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "none"}),
    "text": ("/v1/completions", TEXT),
    "text-stream": ("/v1/completions", {**TEXT, "stream": True}),
    "text-two": ("/v1/completions", {**TEXT, "prompt": [TEXT["prompt"], "A dog"]}),
    "text-stop": ("/v1/completions", {**TEXT, "stop": ["e"], "ignore_eos": True}),
    "messages": ("/v1/messages", CHAT),
    "messages-stream": ("/v1/messages", {**CHAT, "stream": True}),
    "responses": ("/v1/responses", {"model": "tiny", "input": "Tell me.", "max_output_tokens": 16, "temperature": 0}),
    "embeddings": ("/v1/embeddings", {"model": "vectors", "input": ["one two three", "four"]}),
    "rerank": ("/v1/rerank", {"model": "ranks", "query": "one", "documents": ["one two three", "four"]}),
}
CHANGES = re.compile(
    rb'"(id|item_id|response_id|created|created_at|completed_at|request_id|call_id|system_fingerprint)": ?("[^"]*"|[0-9.]+)'
    rb'|resp_[0-9a-z_]+|msg_[0-9a-z_]+|"score-[^"]*"|-?[0-9.]+e?-?[0-9]*(?=[],}])'
)  # fmt: skip
"""What is another one in each response, and numbers, which the engine's batches change a little."""
TEXTS = re.compile(rb'(?:(?<="text":)|(?<="text": )|(?<="content":)|(?<="content": ))"((?:[^"\\]|\\.)*)"')
"""The values of `content` and `text`."""
_ids = itertools.count(1)


def port_of(site, model):
    return site.program.get(f"/v1/admin/workers/{model}-0")[1]["port"]


def raw(port, path, body, **headers):
    """Return the bytes of a response, read until the connection closes."""
    data = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "host: localhost",
        "connection: close",
        "content-type: application/json",
        f"content-length: {len(data)}",
    ]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    with socket.create_connection(("127.0.0.1", port), LIMIT_S) as sock:
        sock.sendall("\r\n".join([*lines, "", ""]).encode() + data)
        return b"".join(iter(lambda: sock.recv(65536), b""))


def body_of(response):
    """Return status and body of a response, out of its chunks."""

    class Kept:
        def makefile(self, _mode):
            import io

            return io.BytesIO(response)

    parsed = http.client.HTTPResponse(Kept())
    parsed.begin()
    return parsed.status, parsed.read()


def shape_of(body):
    """Return what is the same in two responses to a request: engines join pieces of a stream that come at once."""
    text = b"".join(TEXTS.findall(body)) if b"data:" in body else b""
    events = CHANGES.sub(b"", TEXTS.sub(b"", body) if text else body).split(b"\n\n")
    return sorted(set(events)), sorted(text)


def logged(site, request_id):
    """Return the access log's entry of a request."""
    found = []

    def has_entry():
        text = (site.directory / "access.log").read_text()
        found[:] = [json.loads(line) for line in text.splitlines() if f'"{request_id}"' in line]
        return found

    site.program.until(has_entry)
    return found[0]


def said(body):
    """Return the tokens in and out that a response tells, the newest of a stream's; None if it tells none."""
    values = {name: int(count) for name, count in re.findall(rb'"([a-z]+)_tokens": ?(\d+)', body)}
    given = values.get(b"prompt", values.get(b"input", values.get(b"total")))
    return None if given is None else (given, values.get(b"completion", values.get(b"output", 0)))


@pytest.mark.parametrize("name", REQUESTS)
def test_every_request_is_counted_and_no_byte_shows_it(site, name):
    """The gateway knows what the client is told, or would be; the client gets what it got from the worker itself."""
    path, body = REQUESTS[name]
    request_id = f"usage-{next(_ids)}"
    response = raw(site.program.port, path, body, x_request_id=request_id)
    alone = raw(port_of(site, body["model"]), path, body)
    status, told = body_of(response)
    assert status == 200, told
    assert b"x-ichat-usage" not in (response + alone).lower()
    assert response.endswith(b"\r\n0\r\n\r\n") == alone.endswith(b"\r\n0\r\n\r\n") == bool(body.get("stream"))
    assert shape_of(told) == shape_of(body_of(alone)[1])
    entry = logged(site, request_id)
    if body.get("stream") and said(told) is None:
        plain = {key: value for key, value in body.items() if key != "stream"}
        told = body_of(raw(site.program.port, path, plain))[1]
    assert (entry["tokens_in"], entry["tokens_out"]) == said(told)
    assert 0 <= entry["tokens_cached"] <= entry["tokens_in"]


def test_a_request_that_is_refused_uses_nothing(site):
    """The engine refuses it before it begins."""
    body = {**CHAT, "max_tokens": 100_000}
    status, _ = body_of(raw(site.program.port, "/v1/chat/completions", body, x_request_id="refused"))
    assert (status, logged(site, "refused")["tokens"]) == (400, None)


def test_a_client_that_leaves_is_counted_by_an_estimate(site):
    """The pieces that came, and the request's length."""
    body = json.dumps({**CHAT, "max_tokens": 1900, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: left\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", site.program.port), LIMIT_S) as sock:
        sock.sendall(head.encode() + body)
        received = b""
        while received.count(b"data:") < 5:
            received += (more := sock.recv(65536))
            assert more, received
    entry = logged(site, "left")
    assert entry["status"] == 499
    assert entry["tokens_in"] == len(body) // 4
    assert 1 <= entry["tokens_out"] < 1900


def test_the_gateway_counts_what_the_engine_counts(site):
    """The sums of both, over plain requests and streams at once."""
    names = {
        "vllm": ("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
        "sglang": ("sglang:prompt_tokens_total", "sglang:generation_tokens_total"),
    }[site.engine]
    before = [site.metric(name) for name in names]
    entries = []
    for number, name in enumerate(("chat", "chat-stream", "text", "text-stream", "text-two", "messages", "responses")):
        path, body = REQUESTS[name]
        raw(site.program.port, path, body, x_request_id=f"sum-{number}")
        entries.append(logged(site, f"sum-{number}"))
    counted = [sum(entry[key] for entry in entries) for key in ("tokens_in", "tokens_out")]
    site.program.until(
        lambda: [site.metric(name) for name in names] == [a + b for a, b in zip(before, counted, strict=True)]
    )
