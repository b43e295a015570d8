"""Requests of all kinds to a real engine, and whether the gateway's ledger has what the engine has counted."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from support.programs import LIMIT_S
from support.real_engines import MESSAGES, send

CLIENTS = 8
COUNTERS = {
    "vllm": ("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    "sglang": ("sglang:prompt_tokens_total", "sglang:generation_tokens_total"),
}
STREAM = {"stream": True}
ASKED = {**STREAM, "stream_options": {"include_usage": True}}
KINDS = (
    ("/v1/chat/completions", {}), ("/v1/chat/completions", STREAM), ("/v1/chat/completions", ASKED),
    ("/v1/completions", {}), ("/v1/completions", STREAM), ("/v1/completions", ASKED),
    ("/v1/messages", {}), ("/v1/messages", STREAM), ("/v1/responses", {}),
)  # fmt: skip
LEAVES = {**STREAM, "model": "tiny", "prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True}


def request_of(number):
    """Return path and body of a request: each has another prompt, in part shared with others, and another length."""
    path, more = KINDS[number % len(KINDS)]
    prompt = f"{MESSAGES[0]['content']} {'And then ' * (number % 7)}{number % 11}"
    tokens = 1 + number % 23
    if path == "/v1/responses":
        return path, {"model": "tiny", "input": prompt, "max_output_tokens": 16, "store": False}
    known = {"model": "tiny", "max_tokens": tokens, "temperature": 0, **more}
    if path == "/v1/completions":
        return path, {**known, "prompt": prompt}
    return path, {**known, "messages": [{"role": "user", "content": prompt}]}


def ask(deployment, number):
    """Send a request, read the whole response, and return the status."""
    path, body = request_of(number)
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(deployment.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        answer.read()
        return answer.status


def leave(deployment):
    """Send a request for a long stream, and leave when it has begun."""
    with send(deployment.program.port, LEAVES) as sock:
        received = b""
        while received.count(b"data:") < 3:
            received += sock.recv(65536)


def counted_by_engine(deployment):
    """Return the tokens of prompts and answers that the engine has counted since its start."""
    return [int(deployment.metric(name)) for name in COUNTERS[deployment.engine]]


def totals_of(deployment):
    status, answer = deployment.program.get("/v1/admin/usage?by=endpoint&model=tiny")
    assert (status, answer["storage"]) == (200, "ok")
    return answer["totals"]


def compare(deployment, count):
    """Send so many requests, and return what the engine and the ledger have counted of them, when both have all."""
    before, ledger_before = counted_by_engine(deployment), totals_of(deployment)
    with ThreadPoolExecutor(CLIENTS) as clients:
        statuses = list(clients.map(lambda number: ask(deployment, number), range(count)))
    assert set(statuses) == {200}

    def sums():
        after, totals = counted_by_engine(deployment), totals_of(deployment)
        engine = [new - old for new, old in zip(after, before, strict=True)]
        names = ("input_tokens", "output_tokens", "requests", "errors", "estimated_tokens")
        return engine, [totals[name] - ledger_before[name] for name in names]

    deployment.program.until(lambda: sums()[1][2] == count)
    deployment.program.until(lambda: sums()[0] == sums()[1][:2], LIMIT_S / 4)
    return sums()
