"""A third engine, in a package of its own: the server of transformers, in a real worker behind a real gateway.

Nothing in iChat knows it: it is installed into a directory, as anybody would, and found there by its entry point.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from support.peers import post_of
from support.programs import LIMIT_S, ROOT, Program, alive
from support.real_engines import LOAD_S

PYZ = ROOT / "ichat.pyz"
PYTHON = ROOT / ".engines/vllm/bin/python"
MODEL = ROOT / ".build/tiny/chat"
PACKAGE = ROOT / "examples/transformers_engine"
MESSAGES = [{"role": "user", "content": "Tell me a story."}]


def generation(tokens):
    """So many tokens, sampled: transformers' own way to ask for what OpenAI's parameters cannot."""
    return json.dumps({"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": True})


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A directory with the engine, and with the one package that it needs beyond those of vLLM's environment."""
    directory = tmp_path_factory.mktemp("packages")
    uv = [ROOT / ".build/tools/bin/uv", "pip", "install", "--quiet", "--python", PYTHON]
    uv += ["--refresh-package", "ichat-transformers"]
    subprocess.run(
        [*uv, "--target", directory, "--no-deps", "accelerate==1.15.0", PACKAGE], check=True, timeout=LIMIT_S
    )
    return directory


@pytest.fixture(scope="module")
def gateway(room, tmp_path_factory, packages):
    """A gateway with one managed worker."""
    room.make(2)  # also for the worker that batches
    directory = tmp_path_factory.mktemp("transformers")
    config = directory / "ichat.toml"
    config.write_text(f"""
        [server_settings]
        port = 0
        [timeouts]
        stop_s = 120
        [engines.transformers]
        python = "{PYTHON}"
        [[managed_workers]]
        model_name = "tiny"
        model_path = "{MODEL}"
        backend = "transformers"
        port = 0
        heartbeat_interval = 3
        device = "cpu"
        chat_template_kwargs = {{ colour = "blue" }}
        env = {{ PYTHONPATH = "{packages}", HF_HUB_OFFLINE = "1" }}
    """)
    program = Program([sys.executable, PYZ, "gateway", "-c", config], directory / "gateway.log", {"PYTHONPATH": ""})
    try:
        yield program.wait_for_port().wait_until_ready("tiny-0", LOAD_S)
    finally:
        program.end()


@pytest.fixture(scope="module")
def client(gateway):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="k", max_retries=0) as client:
        yield client


def worker(gateway):
    return gateway.get("/v1/admin/workers/tiny-0")[1]


def metric(gateway, name):
    """One of the worker's own metrics, from the worker itself."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{worker(gateway)['port']}/metrics").read().decode()
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


def test_an_engine_of_a_package_is_shown_like_any_other(client, gateway):
    """The list of models, the worker's arguments and versions: all as of the engines that iChat brings."""
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    heartbeat = worker(gateway)
    assert (heartbeat["backend"], heartbeat["state"], heartbeat["model_path"]) == ("transformers", "ready", str(MODEL))
    assert (heartbeat["args"]["device"], heartbeat["args"]["continuous_batching"]) == ("cpu", False)
    assert json.loads(heartbeat["args"]["chat_template_kwargs"]) == {"colour": "blue"}
    assert heartbeat["versions"]["transformers"].startswith("5.19")


def test_chat_limits_tokens_by_both_of_openais_names(client):
    """Plain answers, with their usage; the two names that OpenAI has for the number of tokens mean the same."""
    for limit in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, **{limit: 7})
        assert (answer.model, answer.choices[0].finish_reason) == ("tiny", "length")
        assert answer.usage.completion_tokens == 7
    answer = client.completions.create(model="tiny", prompt="Once upon a time", max_tokens=5)
    assert answer.usage.completion_tokens == 5


def test_a_seeded_stream_is_the_plain_answer_in_pieces(client):
    """The pieces of the stream make the text of the plain answer for the same seed, and the usage comes last."""
    ask = {"model": "tiny", "messages": MESSAGES, "seed": 7, "extra_body": {"generation_config": generation(40)}}
    plain = client.chat.completions.create(**ask)
    parts = list(client.chat.completions.create(**ask, stream=True))
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text.strip() == plain.choices[0].message.content.strip()
    assert len(text) > 40
    assert len(parts) > 5
    assert parts[-1].usage == plain.usage
    assert plain.usage.completion_tokens == 40


def test_errors_have_their_class(client):
    """What is refused by the gateway and what by transformers: the classes of openai-python, and the words of each."""
    with pytest.raises(openai.NotFoundError, match="Models here: tiny") as caught:
        client.chat.completions.create(model="none", messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="Unexpected fields in the request") as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"colour": "blue"})
    assert (caught.value.type, caught.value.code) == ("invalid_request_error", "bad_request")
    assert caught.value.response.headers["x-ichat-worker"] == "tiny-0"
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature="warm")
    assert (caught.value.type, caught.value.code) == ("server_error", "internal_error")
    assert client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1).usage.completion_tokens == 1


def test_one_model_stays(gateway):
    """The routes by which transformers' server loads and unloads models are not there."""
    for path in ("/load_model", "/reset"):
        assert gateway.ask(path, {"model": "tiny"})[0] == 404


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
def test_running_and_waiting_generations_end_when_clients_hang_up(gateway, stream):
    """One request runs, another waits; when both clients leave, neither goes on, long before its end."""
    steps = worker(gateway)["progress"]["steps"]
    aborts = metric(gateway, "ichat_engine_aborts_total")
    body = json.dumps({
        "model": "tiny", "messages": MESSAGES, "stream": stream, "generation_config": generation(100_000),
    }).encode()  # fmt: skip
    clients = []
    for _ in range(2):
        sock = socket.create_connection(("127.0.0.1", gateway.port))
        sock.sendall(post_of(body, b"/v1/chat/completions", b"content-type: application/json\r\n"))
        clients.append(sock)

    def load():
        progress = worker(gateway)["progress"]
        return progress["running"], progress["waiting"]

    gateway.until(lambda: load() == (1, 1))
    gateway.until(lambda: worker(gateway)["progress"]["steps"] > steps + 10)
    for sock in clients:
        sock.close()
    gateway.until(lambda: load() == (0, 0))
    gateway.until(lambda: metric(gateway, "ichat_engine_aborts_total") - aborts == 2)
    progress = worker(gateway)["progress"]
    assert 10 < progress["steps"] - steps < 100_000
    assert progress["tokens_out"] == progress["steps"]


def test_a_wrong_argument_ends_the_worker(packages):
    """What transformers' own parser and its server refuse: their words, exit code 64, and nothing is loaded."""
    cases = {
        ("--cb-block-sizes", "5"): "No such option: --cb-block-sizes",
        ("--model-timeout", "many"): "Invalid value for '--model-timeout'",
        ("--dtype", "float17"): "Unsupported dtype: 'float17'",
    }
    for arguments, said in cases.items():
        done = subprocess.run(
            [PYTHON, PYZ, "worker", "--backend", "transformers", "--model", MODEL, "--port", "0", *arguments],
            capture_output=True,
            text=True,
            timeout=LOAD_S,
            check=False,
            env={**os.environ, "PYTHONPATH": str(packages)},
        )
        assert done.returncode == 64, done.stderr
        assert said in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr


def test_an_engine_of_a_package_ends_with_its_gateway(gateway):
    """SIGTERM to the gateway: the worker ends by itself, and nothing is left."""
    family = gateway.descendants()
    assert family
    assert gateway.stop(signal.SIGTERM) == 0
    assert not alive(family)
    assert "worker tiny-0 has ended, and nothing of it is left" in gateway.text()
    assert "is killed" not in gateway.text()


def test_requests_are_batched(packages, tmp_path):
    """The server's other way to generate, with several requests at a time; that all have the same id mixes nothing up."""
    command = [PYTHON, PYZ, "worker", "--backend", "transformers", "--model", MODEL, "--port", "0", "--device", "cpu"]
    command += ["--served-model-name", "tiny", "small", "--continuous-batching", "--cb-num-blocks", "64"]
    environment = {"PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"}
    program = Program(command, tmp_path / "worker.log", environment).wait_for_port()
    try:
        program.until(lambda: program.get("/health")[0] == 200, LOAD_S)
        address = f"http://127.0.0.1:{program.port}/v1"
        with openai.OpenAI(base_url=address, api_key="k", max_retries=0) as client, ThreadPoolExecutor(4) as pool:

            def ask(number):
                stream = client.chat.completions.create(
                    model=["tiny", "small"][number % 2], messages=MESSAGES, max_tokens=20 + number, stream=True,
                    extra_headers={"x-request-id": "one"},
                )  # fmt: skip
                assert stream.response.headers["x-request-id"] == "one"
                return list(stream)[-1].usage.completion_tokens

            assert list(pool.map(ask, range(4))) == [20, 21, 22, 23]
        assert program.stop(signal.SIGTERM) == 0
    finally:
        program.end()
