"""A real engine whose clients leave in every phase of their requests."""

import re
import socket
import time
from collections import Counter

import httpx
import psutil
from support.real_engines import Deployment, Standstill, send

LONG = {"prompt": "x", "ignore_eos": True}
TOKENS = {"vllm": 1900, "sglang": 700}
"""Of an answer that takes seconds: on a CPU, SGLang is slower."""
BESIDES = {
    "vllm": {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"},
    # how many steps until it counts again; threads, whose steps on busy cores wait for each other
    "sglang": {"decode_log_interval": 1, "env": {"OMP_NUM_THREADS": "1"}},
}
"""Arguments of each engine: vLLM's are also those of vLLM's own server, with which another test compares it."""


class Place(Deployment):
    """A deployment with two more ways to its worker: `single`, which has one place, and `shut`, which accepts nothing."""

    def __init__(self, engine, model, directory):
        super().__init__(engine, model, directory, max_model_len=2048, enforce_eager=True, **BESIDES[engine])
        self._clock = Standstill()
        self.shut = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.fillers = [socket.socket() for _ in range(2)]
        for filler in self.fillers:
            filler.setblocking(False)
            filler.connect_ex(self.shut.getsockname())

    def wait(self):
        super().wait()
        worker, shut = self.worker()["port"], self.shut.getsockname()[1]
        lines = ["[timeouts]", "connect_s = 60", self.config.read_text()]
        for name, port in ("shut", shut), ("single", worker):
            lines += ["[[external_routes]]", f'model_name = "{name}"', 'upstream_model = "tiny"']
            lines += [f'api_base = "http://127.0.0.1:{port}/v1"']
        self.config.write_text("\n".join([*lines, "max_in_flight = 1"]))
        self.program.until(lambda: '"single"' in httpx.get(f"{self.url}/v1/models").text)
        return self

    def end(self):
        for sock in (self.shut, *self.fillers):
            sock.close()
        self._clock.stop()
        super().end()

    def now(self):
        """Return the time without what the machine stood still."""
        return time.monotonic() - self._clock.lost

    def ask(self, *, stream, model="tiny", **more):
        body = {**LONG, "max_tokens": TOKENS[self.engine], "model": model, "stream": stream, **more}
        return send(self.program.port, body)

    def at_gateway(self, *counts):
        """Sum these counts of the gateway's models, by default all that it has to do with requests."""
        models = self.program.get("/v1/admin/cluster/status")[1]["models"]
        return sum(model[count] for model in models for count in counts or ("in_flight", "queued"))

    def at_worker(self):
        return self.metric("ichat_worker_in_flight")

    def wait_for(self, requests):
        """Wait until the gateway has these many requests under way, and all has been done for them that can be."""
        self.program.until(lambda: self.at_gateway() == requests)
        for _ in range(3):
            self.at_gateway()

    def cancelled(self):
        """Return what the gateway counts of requests whose clients left, by phase."""
        text = httpx.get(f"{self.url}/metrics").text
        found = re.findall(r'(?m)^ichat_requests_cancelled_total\{.*phase="(\w+)".*\} (\S+)', text)
        return Counter({phase: int(float(count)) for phase, count in found})

    def connecting(self):
        """Return how many connections the gateway is about to make."""
        found = psutil.Process(self.program.process.pid).net_connections("tcp")
        return sum(one.status == psutil.CONN_SYN_SENT for one in found)
