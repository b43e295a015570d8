"""Prompts that are too long for a model: with both engines' refusals, a name's model for longer prompts answers."""

import json
import re
import urllib.error
import urllib.request

import pytest
from support.programs import LIMIT_S
from support.real_engines import ENGINES, LOAD_S, Deployment, worker_table

CONTEXT = 256
SHORT = {"vllm": "tiny", "sglang": "short"}
"""The model of each engine that takes no more than that."""


def alias(engine):
    return ["[[models]]", f'name = "of-{engine}"', f'targets = [{{ model = "{SHORT[engine]}" }}]', 'longer = "long"']


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A model of each engine for short prompts, and one for longer ones."""
    known = {"max_model_len": CONTEXT, "enforce_eager": True}
    more = [
        *worker_table("sglang", "chat", "short", **known),
        *worker_table("sglang", "chat", "long", **known | {"max_model_len": 1024}),
        *alias("vllm"),
        *alias("sglang"),
    ]
    deployment = Deployment("vllm", "chat", tmp_path_factory.mktemp("longer"), more=more, **known)
    try:
        deployment.wait()
        for name in ("short", "long"):
            deployment.program.wait_until_ready(f"{name}-0", LOAD_S)
        yield deployment
    finally:
        deployment.end()


def ask(site, path, body):
    """Return status, headers and the body's bytes."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(site.url + path, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


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
def test_what_was_learnt_spares_the_refusal(site, engine):
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
