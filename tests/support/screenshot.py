"""Take a picture of the console's Overview: a real gateway, engines that are none, and requests through it.

    PYTHONPATH=.:tests python tests/support/screenshot.py FILE     (that is ./build screenshot)

Workers of two machines join the gateway; each is a port of this process that streams as an engine does. Clients send
requests until there are samples enough for the charts.
"""

import json
import math
import pathlib
import random
import sys
import tempfile
import time
import urllib.request

import trio
from support.browser import chromium
from support.peers import Upstream
from support.programs import Program, ichat

SAMPLES = 80
"""Samples that the charts have, one every two seconds."""
WIDTH, HEIGHT = 1280, 1190
GIB = 1024**3
CHUNKS, TOKENS = 8, 176
"""Events of a stream, and the tokens that its usage says."""
WORKERS = {
    "llama-3.3-70b-0": ("llama-3.3-70b", "vllm", "gpu-1", (0, 1), 0.72),
    "llama-3.3-70b-1": ("llama-3.3-70b", "vllm", "gpu-2", (0, 1), 0.66),
    "qwen3-32b-0": ("qwen3-32b", "sglang", "gpu-1", (2,), 0.41),
    "qwen3-32b-1": ("qwen3-32b", "sglang", "gpu-2", (2,), 0.38),
    "gemma-3-27b-0": ("gemma-3-27b", "vllm", "gpu-1", (3,), 0.27),
    "qwen3-coder-30b-0": ("qwen3-coder-30b", "vllm", "gpu-2", (3,), 0.0),
}
"""Model, engine, machine, GPUs, and the share of the KV cache that is in use at most."""
LOADING = "qwen3-coder-30b-0"
"""The worker that is about to be ready."""
MODELS = ("llama-3.3-70b",) * 2 + ("assistant",) * 5 + ("qwen3-32b", "gemma-3-27b")
CONFIG = """
[server_settings]
port = 0
state_directory = "{directory}/state"
watch_config = false
[history]
sample_s = 2
[[models]]
name = "assistant"
targets = [{{ model = "llama-3.3-70b", weight = 3 }}, {{ model = "qwen3-32b", weight = 2 }}]
[[models]]
name = "coder"
targets = [{{ model = "qwen3-coder-30b" }}]
"""


class Site:
    """The gateway, its workers, and the clients."""

    def __init__(self, program):
        self.url = f"http://127.0.0.1:{program.port}"
        self.secret = program.own_secret()
        self.ports = {}
        self.running = dict.fromkeys(WORKERS, 0)
        self.steps = 0
        self.began = time.monotonic()
        self.chance = random.Random(1)
        self.is_over = False
        """Whether the picture is there."""

    def ask(self, path, body=None):
        """Return the JSON of an answer, or the text of a stream."""
        headers = {"content-type": "application/json", "authorization": f"Bearer {self.secret}"}
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if answer.headers["content-type"] == "application/json" else text

    def engine(self, worker):
        """Return what answers a worker's requests: a stream of chunks, a little slower the more there are."""

        async def reply(stream, _head, _body):
            self.running[worker] += 1
            try:
                await trio.sleep(0.06 + 0.012 * self.running[worker] + self.chance.random() * 0.08)
                await stream.send_all(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                )
                for _ in range(CHUNKS):
                    self.steps += 1
                    await send(stream, {"choices": [{"index": 0, "delta": {"content": "word "}}]})
                    await trio.sleep(0.12 + self.chance.random() * 0.06)
                usage = {"prompt_tokens": 410, "completion_tokens": TOKENS, "total_tokens": 410 + TOKENS}
                await send(stream, {"choices": [], "usage": usage})
                await stream.send_all(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            finally:
                self.running[worker] -= 1

        return reply

    def machine(self, name, held):
        """Return what a worker that holds some GPUs of a machine reports of it."""
        gpus = [
            {"index": index, "uuid": f"GPU-{name}-{index}", "name": "NVIDIA H200", "memory_total_bytes": 141 * GIB,
             "memory_used_bytes": 128 * GIB, "held_bytes": 127 * GIB if index in held else 0, "use": round(0.75 + self.chance.random() / 5, 2)}
            for index in range(4)
        ]  # fmt: skip
        return {"id": f"boot-{name}", "name": name, "cpus": 96, "cpu_use": 0.3, "memory_total_bytes": 1024 * GIB,
                "memory_available_bytes": 700 * GIB, "gpus": gpus}  # fmt: skip

    def heartbeat(self, worker):
        """Return what a worker reports."""
        model, backend, machine, gpus, cache = WORKERS[worker]
        running = self.running[worker]
        load = [("importing vLLM", 9.1, ""), ("loading weights", time.monotonic() - self.began - 60, "11 of 16 shards")]
        is_loading = worker == LOADING
        share = round(min(1.0, cache * (0.35 + running / 14)), 3)
        return {
            "worker_id": worker, "model_name": model, "host": "127.0.0.1", "port": self.ports[worker],
            "backend": backend, "heartbeat_interval": 5, "pid": 4000 + self.ports[worker] % 1000, "start_id": "1",
            "state": "loading" if is_loading else "ready", "phase": load[-1][0] if is_loading else "ready",
            "load": [{"name": name, "seconds": max(0.0, seconds), "detail": detail} for name, seconds, detail in load]
            if is_loading else [],
            "progress": {} if is_loading else {"running": running, "waiting": 0, "kv_use": share, "steps": self.steps},
            "machine": self.machine(machine, gpus),
        }  # fmt: skip

    async def beat_forever(self):
        """Send the heartbeats of all workers."""
        while True:
            for worker in WORKERS:
                await trio.to_thread.run_sync(self.ask, "/v1/workers/heartbeat", self.heartbeat(worker))
            await trio.sleep(1)

    async def ask_until_over(self, nursery):
        """Send requests, more and fewer of them by turns."""
        while not self.is_over:
            at = time.monotonic() - self.began
            rate = 11 + 6 * math.sin(at / 13) + 3 * math.sin(at / 4)
            nursery.start_soon(self.chat, self.chance.choice(MODELS))
            await trio.sleep(self.chance.expovariate(rate))

    async def chat(self, model):
        """Send one request."""
        body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
        await trio.to_thread.run_sync(self.ask, "/v1/chat/completions", body, limiter=CLIENTS)

    def samples(self):
        """Return how many samples the history has since requests began."""
        return sum((value or 0) > 0 for value in self.ask("/v1/admin/history")["columns"]["requests"])


CLIENTS = trio.CapacityLimiter(64)


async def send(stream, event):
    """Send an event of a stream, as a chunk."""
    data = b"data: %b\n\n" % json.dumps(event).encode()
    await stream.send_all(b"%x\r\n%b\r\n" % (len(data), data))


def picture(site, path):
    """Take the picture."""
    with chromium() as browser:
        view = {"width": WIDTH, "height": HEIGHT}
        page = browser.new_context(viewport=view, color_scheme="light", locale="en-GB").new_page()
        page.goto(f"{site.url}/console/#key={site.secret}")
        page.goto(f"{site.url}/console/#/overview")
        page.wait_for_selector("[data-connection=live]")
        page.wait_for_selector(".charts canvas")
        page.evaluate("document.activeElement?.blur()")
        page.wait_for_timeout(2500)
        page.screenshot(path=path)


async def fill(program, path):
    """Have workers join and clients ask, wait for the samples, and take the picture."""
    site = Site(program)
    async with trio.open_nursery() as nursery:
        for worker in WORKERS:
            upstream = Upstream(site.engine(worker))
            listeners = await nursery.start(trio.serve_tcp, upstream.serve, 0)
            site.ports[worker] = listeners[0].socket.getsockname()[1]
        nursery.start_soon(site.beat_forever)
        await trio.sleep(2)
        async with trio.open_nursery() as clients:  # ends with the last answer
            clients.start_soon(site.ask_until_over, clients)
            while await trio.to_thread.run_sync(site.samples) < SAMPLES:
                await trio.sleep(2)
            await trio.to_thread.run_sync(picture, site, path)
            site.is_over = True
        nursery.cancel_scope.cancel()


def main(path):
    """Start a gateway, take the picture, and end the gateway."""
    with tempfile.TemporaryDirectory() as directory:
        config = pathlib.Path(directory, "ichat.toml")
        config.write_text(CONFIG.format(directory=directory))
        program = Program(ichat("gateway", "-c", config), pathlib.Path(directory, "log"))
        try:
            program.wait_for_port()
            trio.run(fill, program, path)
        finally:
            program.end()


if __name__ == "__main__":
    main(sys.argv[1])
