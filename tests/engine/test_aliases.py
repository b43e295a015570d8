"""Names of several models, each on a real engine: shares, sessions, longer prompts, and one model that is killed."""

import json
import math
import re
import signal
import threading
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from support.programs import LIMIT_S
from support.real_engines import ENGINES, LOAD_S, worker_table

CONTEXT = 256
SHORT = {"vllm": "tiny", "sglang": "short"}
"""The model of each engine that takes no more than that."""
DRAWS, SHARE = 2000, 0.8
DEVIATIONS = 4
"""A right share is further from the middle once in 16 000 runs."""
CLIENTS = 8
ALIASES = f"""
[[models]]
name = "of-vllm"
targets = [{{ model = "tiny" }}]
longer = "long"
[[models]]
name = "of-sglang"
targets = [{{ model = "short" }}]
longer = "long"
[[models]]
name = "mixed"
targets = [{{ model = "tiny", weight = {SHARE} }}, {{ model = "short", weight = {1 - SHARE:.1f} }}]
[[models]]
name = "safe"
targets = [{{ model = "tiny" }}]
fallbacks = ["short"]
"""


@pytest.fixture(scope="module")
def site(deploy):
    """A model of each engine for short prompts, one for longer ones, and the names above."""
    known = {"max_model_len": CONTEXT, "enforce_eager": True}
    more = [
        *worker_table("sglang", "chat", "short", **known),
        *worker_table("sglang", "chat", "long", **known | {"max_model_len": 1024}),
        ALIASES,
    ]
    with deploy("vllm", "chat", more=more, **known) as deployment:
        deployment.wait()
        for name in ("short", "long"):
            deployment.program.wait_until_ready(f"{name}-0", LOAD_S)
        yield deployment


def ask(site, path, body, **headers):
    """Return status, headers and the body's bytes."""
    headers["content-type"] = "application/json"
    request = urllib.request.Request(site.url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=LOAD_S) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def complete(site, name, session="", tokens=1):
    """Return the status of a request for one of the names, the model that answered, and the error's code."""
    body = {"model": name, "prompt": "Once", "max_tokens": tokens, "temperature": 0}
    status, headers, answer = ask(site, "/v1/completions", body, **({"x-session-id": session} if session else {}))
    answer = json.loads(answer)
    return status, headers["x-ichat-model"], answer["choices"] and "" if status == 200 else answer["error"]["code"]


def bodies(words):
    """Return a prompt of so many tokens for each route."""
    chat = {"messages": [{"role": "user", "content": "word " * words}], "max_tokens": 4}
    return {
        "/v1/chat/completions": chat,
        "/v1/completions": {"prompt": "word " * words, "max_tokens": 4},
        "/v1/messages": chat,
        "/v1/responses": {"input": "word " * words, "max_output_tokens": 16},
    }


def fallbacks(site, engine, reason):
    """Return how many requests for a name have gone on for this reason."""
    name = rf'ichat_alias_fallbacks_total\{{alias="of-{engine}",model="{SHORT[engine]}",reason="{reason}"\}} (\S+)'
    with urllib.request.urlopen(f"{site.url}/metrics?workers=0", timeout=LIMIT_S) as answer:
        return sum(float(found) for found in re.findall(name, answer.read().decode()))


@pytest.mark.parametrize("path", bodies(1))
@pytest.mark.parametrize("engine", ENGINES)
def test_the_engines_refusal_reads_alike(site, engine, path):
    """By its own name the model answers with OpenAI's code, the limit, and how long the prompt is."""
    status, headers, body = ask(site, path, {"model": SHORT[engine], **bodies(300)[path]})
    error = json.loads(body)["error"]
    assert (status, error["code"], error["type"]) == (400, "context_length_exceeded", "invalid_request_error")
    said = r"This model's maximum context length is 256 tokens\. However, your prompt has (at least )?(\d+) tokens\."
    assert int(re.fullmatch(said, error["message"])[2]) > CONTEXT
    assert "x-ichat-code" not in headers


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("engine", ENGINES)
def test_after_the_refusal_the_longer_model_answers(site, engine, path, stream):
    """A prompt of 300 tokens, where nothing was learnt yet: the client sees one whole answer."""
    before = fallbacks(site, engine, "too_long")
    status, headers, body = ask(site, path, {"model": f"of-{engine}", "stream": stream, **bodies(300)[path]})
    assert (status, headers["x-ichat-model"], headers["x-ichat-attempts"]) == (200, "long", "2")
    if stream:
        assert body.endswith(b"data: [DONE]\n\n")
        assert b'"error"' not in body
    else:
        assert 300 <= json.loads(body)["usage"]["prompt_tokens"] < 320
    assert fallbacks(site, engine, "too_long") == before + 1


@pytest.mark.parametrize("engine", ENGINES)
def test_a_prompt_that_seems_too_long_goes_to_the_longer_model_at_once(site, engine):
    """After a few prompts that fit, one that is clearly too long goes to the longer model at once."""
    path = "/v1/chat/completions"
    for _ in range(3):
        status, headers, _ = ask(site, path, {"model": f"of-{engine}", **bodies(200)[path]})
        assert (status, headers["x-ichat-model"]) == (200, SHORT[engine])
    before = fallbacks(site, engine, "seems_too_long")
    status, headers, body = ask(site, path, {"model": f"of-{engine}", **bodies(400)[path]})
    assert (status, headers["x-ichat-model"], headers["x-ichat-attempts"]) == (200, "long", "1")
    assert json.loads(body)["usage"]["prompt_tokens"] > 400
    assert fallbacks(site, engine, "seems_too_long") == before + 1


def test_shares_are_as_configured(site):
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(lambda _: complete(site, "mixed"), range(DRAWS)))
    assert {status for status, _, _ in answers} == {200}
    counts = Counter(model for _, model, _ in answers)
    assert counts.keys() == {"tiny", "short"}
    assert abs(counts["tiny"] - DRAWS * SHARE) <= DEVIATIONS * math.sqrt(DRAWS * SHARE * (1 - SHARE))


def test_a_session_keeps_its_side(site):
    sides = {number: {complete(site, "mixed", f"s{number}")[1] for _ in range(3)} for number in range(30)}
    assert all(len(models) == 1 for models in sides.values()), sides
    assert set().union(*sides.values()) == {"tiny", "short"}


def test_a_killed_target_costs_nothing_that_was_not_sent(site):
    """Who has sent nothing is answered by the other model; only what the dead engine was working on is lost."""
    worker = psutil.Process(site.worker()["pid"])
    killed, answers = threading.Event(), []

    def client(_):
        after = 0
        while after < 20:
            is_after = killed.is_set()
            answers.append((is_after, *complete(site, "safe", tokens=16)))
            after += is_after

    with ThreadPoolExecutor(CLIENTS) as clients:
        asking = [clients.submit(client, number) for number in range(CLIENTS)]
        site.program.until(lambda: len(answers) > 5 * CLIENTS)
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        killed.set()
        for one in asking:
            one.result()
    lost = [one for one in answers if one[1] != 200]
    assert {one[3] for one in lost} <= {"upstream_failed"}, lost
    assert len(lost) <= CLIENTS
    assert not any(is_after for is_after, *_ in lost), lost
    assert "tiny" in {model for is_after, _, model, _ in answers if not is_after}
    assert "short" in {model for is_after, _, model, _ in answers if is_after}
    site.program.wait_until_ready("tiny-0", LOAD_S)
    assert complete(site, "safe")[:2] == (200, "tiny")
