"""A loaded engine over the death of its gateway's own process, while relays live."""

import json

import pytest
from support.real_engines import ENGINES, MESSAGES, send

TOKENS = 300
BODY = {"model": "tiny", "messages": MESSAGES, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module", params=ENGINES)
def split(request, deploy):
    """A chat model behind two relays, which ends with the last process of its gateway."""
    known = {"max_model_len": 2048, "enforce_eager": True, "on_gateway_exit": "stop"}
    with deploy(request.param, "chat", settings=["relays = 2"], **known) as deployment:
        yield deployment.wait()


def events_of(data):
    lines = [line.removeprefix("data: ") for line in data.decode().splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_an_engine_and_its_stream_outlive_the_death_of_the_gateway(split):
    """kill -9 under a stream: the client gets all of it, the worker stays, and the next gateway serves with it."""
    pid, scheduler = split.worker()["pid"], split.scheduler()
    body = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    with send(split.program.port, body, "/v1/chat/completions") as sock:
        data = sock.recv(65536)
        while b"data: {" not in data:
            data += sock.recv(65536)
        split.program.process.kill()
        split.program.process.wait()
        assert b"[DONE]" not in data
        split.start()
        while b"data: [DONE]" not in data:
            more = sock.recv(65536)
            assert more, "the stream was cut off"
            data += more
    assert [event["usage"]["completion_tokens"] for event in events_of(data) if event.get("usage")][-1:] == [TOKENS]
    split.wait()
    assert split.worker()["pid"] == pid
    assert split.scheduler().pid == scheduler.pid
    status, answer = split.program.ask("/v1/chat/completions", {**BODY, "max_tokens": 5})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 5)
    assert not split.running()
