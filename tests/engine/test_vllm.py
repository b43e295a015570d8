"""Real vLLM on the CPU, in a real worker behind a real gateway, asked with real clients.

Other tests share its gateway and managed worker; two more engines start for what needs their own.
"""

import contextlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import psutil
import pytest
import trio
from support.peers import Client, post_of
from support.programs import LIMIT_S, ROOT, Program, alive
from support.real_engines import LOAD_S

from ichat.config import load as configuration
from ichat.roles import gateway as gateway_role

PYZ = ROOT / "ichat.pyz"
PYTHON = ROOT / ".engines/vllm/bin/python"
MODEL = ROOT / ".build/tiny/chat"
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1"}
FLAGS = [
    "--max-model-len=2048", "--enforce-eager", "--enable-auto-tool-choice", "--tool-call-parser=hermes",
    '--structured-outputs-config={"backend": "xgrammar", "disable_any_whitespace": true}',
]  # fmt: skip
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
BOOLEAN = {
    "type": "object",
    "properties": {"sunny": {"type": "boolean"}},
    "required": ["sunny"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": BOOLEAN}}


@pytest.fixture
def client(one_place):
    with openai.OpenAI(base_url=f"{one_place.url}/v1", api_key="k", max_retries=0) as client:
        yield client


on_vllm = pytest.mark.parametrize("one_place", ["vllm"], indirect=True)


@on_vllm
async def test_the_bytes_of_32_streams_are_what_the_worker_sent(one_place, nursery):
    """Between gateway and worker stands a listener: what it heard is what the clients got, for each of 32 streams at once."""
    heard = {}
    worker = one_place.worker()["port"]

    async def listen(near):
        async with near, await trio.open_tcp_stream("127.0.0.1", worker) as far, trio.open_nursery() as both:

            async def forward():
                async for data in near:
                    await far.send_all(data)
                both.cancel_scope.cancel()

            both.start_soon(forward)
            record = b""
            async for data in far:
                record += data
                if found := re.search(rb"x-request-id: (n-\d+)", record):
                    heard[found[1]] = record
                await near.send_all(data)
            both.cancel_scope.cancel()

    listeners = await nursery.start(trio.serve_tcp, listen, 0)
    config = configuration.parse(
        f"""
        [server_settings]
        port = 0
        [[external_routes]]
        model_name = "tiny"
        api_base = "http://127.0.0.1:{listeners[0].socket.getsockname()[1]}/v1"
        """,
        "test",
    )
    port = await nursery.start(gateway_role.run, config)
    got = {}

    async def one(number):
        body = json.dumps(
            {"model": "tiny", "prompt": f"number {number}", "max_tokens": 100, "ignore_eos": True, "stream": True}
        ).encode()
        name = b"n-%d" % number
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            client = Client(stream)
            await client.send(
                post_of(
                    body, head=b"content-type: application/json\r\nconnection: close\r\nx-request-id: %b\r\n" % name
                )
            )
            with trio.fail_after(LIMIT_S):
                got[name] = await client.everything()

    async with trio.open_nursery() as streams:
        for number in range(32):
            streams.start_soon(one, number)
    assert len(got) == 32
    for name, data in got.items():
        body = data.partition(b"\r\n\r\n")[2]
        assert body == heard[name].partition(b"\r\n\r\n")[2]
        assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    # vLLM makes one piece of the tokens that its server did not get round to: on a busy machine of a whole stream
    assert max(data.count(b"data: ") for data in got.values()) > 20


@pytest.fixture(scope="module")
def stock(room, tmp_path_factory):
    """vLLM's own server, with the same model and flags."""
    room.make(1)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # The CPU build has no metadata, which the `vllm` command asks for; this module is the same server.
    entry = "vllm.entrypoints.launchers.api_server.entry"
    command = [PYTHON, "-m", entry, "--model", MODEL, "--served-model-name=tiny", f"--port={port}", *FLAGS]
    program = Program(command, tmp_path_factory.mktemp("stock") / "vllm.log", {**ENV, "PYTHONPATH": ""})
    program.port = port

    def answers():
        assert program.process.poll() is None, program.text()[-4000:]
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=LIMIT_S).status == 200

    try:
        program.until(answers, LOAD_S)
        yield program
    finally:
        program.end()


@on_vllm
def test_concurrent_streams_say_what_vllm_says(client, stock):
    """16 sampled streams at once through gateway and worker: each has the text that vLLM's own server gives for its seed."""

    def ask(client, number):
        stream = client.completions.create(
            model="tiny", prompt=f"story number {number}", max_tokens=24, temperature=0.7, seed=number, stream=True
        )
        return "".join(part.choices[0].text for part in stream)

    with openai.OpenAI(base_url=f"http://127.0.0.1:{stock.port}/v1", api_key="k", max_retries=0) as direct:
        expected = [ask(direct, number) for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda number: ask(client, number), range(16))) == expected
    assert len(set(expected)) == 16


@on_vllm
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_tools_are_called_as_vllm_calls_them(client, stock, choice):
    """Tools are accepted, and whatever the parser makes of random text, it makes the same of it here and there."""

    def ask(client):
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=[TOOL], tool_choice=choice, max_tokens=40, temperature=0
        )
        message = answer.choices[0].message
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
        return answer.choices[0].finish_reason, message.content, calls

    with openai.OpenAI(base_url=f"http://127.0.0.1:{stock.port}/v1", api_key="k", max_retries=0) as direct:
        assert ask(client) == ask(direct)


def test_a_wrong_argument_ends_the_worker_within_seconds():
    """What vLLM itself would find after the load, a value without its flag, no model: one sentence, exit code 64, and nothing is loaded."""
    cases = {
        ("--tool-call-parser", "none", "--enable-auto-tool-choice"): "invalid tool call parser: none",
        ("--kv-cache-memory-bytes", "-5", "--block-size", "-3"): "",
        ("True",): "--model takes one value, not 2",
    }

    def run(arguments):
        command = [PYTHON, PYZ, "worker", "--model", MODEL, "--port", "0", *arguments]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=LOAD_S,
            check=False,
            env={**os.environ, **ENV, "PYTHONPATH": ""},
        )

    with ThreadPoolExecutor(2) as pool:
        for (arguments, said), done in zip(cases.items(), pool.map(run, cases), strict=True):
            assert done.returncode == 64, (arguments, done.stderr[-2000:])
            assert said in done.stderr.splitlines()[-1], (arguments, done.stderr[-500:])
            assert "vLLM refuses these arguments: " in done.stderr.splitlines()[-1]
    command = [PYTHON, PYZ, "worker", "--port", "0"]
    without = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_S, check=False)
    assert (without.returncode, "--model is missing" in without.stderr) == (64, True)


@on_vllm
def test_a_worker_by_hand_and_its_sudden_end(one_place, room, tmp_path):
    """A worker that registers by itself is routed to; when it is killed, nothing of vLLM survives it."""
    gateway = one_place.program
    room.make(2)  # it, and vLLM's own server
    worker = Program(
        [PYTHON, PYZ, "worker", "--backend", "vllm", "--model", MODEL, "--served-model-name", "tiny-by-hand", "--port", "0",
         "--worker-id", "by-hand", "--gateway-address", f"http://127.0.0.1:{gateway.port}", "--hi", "8", *FLAGS],
        tmp_path / "worker.log", {**ENV, "PYTHONPATH": ""},
    )  # fmt: skip
    try:
        worker.wait_for_port()
        gateway.until(lambda: gateway.state("by-hand") in ("starting", "loading"))
        status, health = worker.get("/health")
        assert (status, health["status"]) == (503, "unavailable")
        # The request waits for the load.
        status, answer = gateway.ask("/v1/completions", {"model": "tiny-by-hand", "prompt": "x", "max_tokens": 3})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
        assert gateway.state("by-hand") == "ready"
        assert worker.get("/health") == (200, {"status": "ok"})
        family = worker.descendants()
        assert any("EngineCore" in process.name() or "EngineCore" in " ".join(process.cmdline()) for process in family)
        worker.process.kill()
        worker.process.wait()
        worker.until(lambda: not alive(family))
        gateway.until(lambda: gateway.state("by-hand") == "unhealthy")
    finally:
        worker.end()


def test_the_demonstration(room):
    """`./build demo --once` prints a streamed answer of the real engine, and leaves no process behind."""
    room.make(2)  # it, and vLLM's own server
    before = {process.pid for process in psutil.process_iter()}
    done = subprocess.run(
        [sys.executable, ROOT / "build", "demo", "--once", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ tokens, first after \d+ ms, then \d+ tokens/s", done.stdout)
    assert "smollm2 is ready after" in done.stdout
    assert "sky" in done.stdout.partition("smollm2 is ready after")[2]
    assert "/v1/chat/completions -H 'content-type: application/json'" in done.stdout
    assert "from openai import OpenAI" in done.stdout
    left = [process for process in psutil.process_iter(["cmdline"]) if process.pid not in before]
    left = [
        process for process in left if "ichat" in " ".join(process.info["cmdline"] or []) or "VLLM" in process.name()
    ]
    assert not alive(left)
    assert "nothing of it is left" in pathlib.Path(ROOT / ".demo/gateway.log").read_text()
