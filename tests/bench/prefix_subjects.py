"""Who takes part in `./build bench prefix`: workers with small caches, and the routers that stand before them in turn."""

import contextlib
import http.client
import json
import os
import shutil
import subprocess
import sys
import time

import attrs
from prefix_figures import Count, count_of, own_counters_of
from processes import HERE, OPENER, ROOT, Failed, Process, free_port

PYZ = ROOT / "ichat.pyz"
CACHE_TOKENS = 700 * 32
BLOCK = {"vllm": 32, "sglang": 1}
"""How many tokens are found in a cache or not as one. SGLang's pages have one token by default."""
LOAD_MODEL_S = 600.0
START_S = 60.0
SETTLE_S = 5.0
"""How long a router may take to hear of all workers, where it does not say whether it has."""
ASK_S = 20.0
GREETING = {"model": "tiny", "messages": [{"role": "user", "content": "a b"}], "max_tokens": 1}
FLAGS = {
    "vllm": ["--max-model-len", "2048", "--enforce-eager", "--block-size", "32", "--num-gpu-blocks-override", "700"],
    "sglang": [
        "--context-length", "2048", "--max-total-tokens", CACHE_TOKENS, "--device", "cpu", "--mem-fraction-static", "0.1",
        "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-overlap-schedule",
        "--disable-cuda-graph", "--sleep-on-idle", "--enable-metrics",
    ],
}  # fmt: skip
GATEWAY = """\
[server_settings]
port = {port}
state_directory = {state}

[routing]
policy = "{policy}"

[logs]
access_log = ""
"""
POLICIES = ("least_loaded", "round_robin", "prefix_aware")
PEERS = ("sglang-router", "vllm-router")
PEER_POLICIES = ("cache_aware", "round_robin")


def environment(backend, number):
    """Return what an engine needs around it; each computes on a CPU of its own, as far as there are enough."""
    cpus = sorted(os.sched_getaffinity(0))
    cpu = str(cpus[number % len(cpus)])
    if backend == "vllm":
        return {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": cpu}
    on_cpu = {"PYTHONPATH": str(ROOT / "tests/support/sglang_on_cpu"), "OMP_NUM_THREADS": "1"}
    return {**on_cpu, "SGLANG_CPU_OMP_THREADS_BIND": cpu}


def fetch(url):
    with OPENER.open(url, timeout=ASK_S) as response:
        return response.read().decode()


class Fleet:
    """The workers of one run. They outlive the routers, and register at the port that our gateways share."""

    def __init__(self, started, args, directory):
        kinds = ("vllm", "sglang") if args.backend == "both" else (args.backend,)
        self.backends = [kinds[number % len(kinds)] for number in range(args.workers)]
        self.ports = [free_port() for _ in self.backends]
        self.gateway_port = free_port()
        self.started = started
        self.args = args
        self.directory = directory
        self.processes = [None] * args.workers
        self.starts = 0
        for number in range(args.workers):
            self.start(number)
        for number in range(args.workers):
            self.wait(number)

    @property
    def urls(self):
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def start(self, number):
        backend, port = self.backends[number], self.ports[number]
        python = ROOT / f".engines/{backend}/bin/python"
        if not python.exists() or not self.args.model.exists():
            raise Failed(f"{backend} needs {python} and {self.args.model}: ./build bench prefix makes them")
        command = [python, PYZ, "worker", "--backend", backend, "--model", self.args.model]
        command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", port]
        command += ["--gateway-address", f"http://127.0.0.1:{self.gateway_port}", "--heartbeat-interval", "2"]
        name = f"worker {number} start {self.starts}"
        self.starts += 1
        process = Process(name, [*command, *FLAGS[backend]], port, self.directory, env=environment(backend, number))
        self.processes[number] = process
        self.started.append(process)

    def wait(self, number):
        self.processes[number].wait_until_ready(GREETING, LOAD_MODEL_S)

    def kill(self, number):
        self.processes[number].kill()

    def counts(self, without=None):
        """Return what each engine has counted so far, and nothing for a worker that is down."""
        return [
            Count() if number == without else count_of(fetch(f"{url}/metrics")) for number, url in enumerate(self.urls)
        ]


@attrs.frozen
class Router:
    """One gateway or router, with one policy."""

    name: str
    command: list[str]
    port: int
    is_ours: bool = False

    def start(self, started, directory, title):
        """Start it, and return when it answers and knows all workers that are there. Raises Failed."""
        process = Process(title, self.command, self.port, directory)
        started.append(process)
        process.wait_until_ready(GREETING, START_S)

    def wait_for(self, count):
        """Wait until it sends requests to so many workers. Raises Failed."""
        if not self.is_ours:
            time.sleep(SETTLE_S)
            return
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, http.client.HTTPException):
                workers = json.loads(fetch(f"http://127.0.0.1:{self.port}/v1/admin/workers?state=ready"))
                if len(workers["data"]) == count:
                    return
            time.sleep(0.2)
        raise Failed(f"{self.name} does not have {count} ready workers within {START_S:g} s")

    def own_counters(self):
        if not self.is_ours:
            return {}
        return own_counters_of(fetch(f"http://127.0.0.1:{self.port}/metrics?workers=0"))


def routers(fleet, args):
    """Return the routers to compare. What is not installed is named on stderr."""
    found = [ours(fleet, policy, args) for policy in args.policies]
    places = os.pathsep.join([*([str(args.peers / "bin")] if args.peers else []), os.environ.get("PATH", "")])
    for name in PEERS:
        program = shutil.which(name, path=places)
        if program is None:
            print(f"• {name} is skipped: it is not installed (--peers DIR)", file=sys.stderr)
            continue
        found += [peer(fleet, name, program, policy) for policy in PEER_POLICIES]
    return found


def ours(fleet, policy, args):
    config = fleet.directory / f"{policy}.toml"
    state = json.dumps(str(fleet.directory / policy))
    config.write_text(GATEWAY.format(port=fleet.gateway_port, state=state, policy=policy))
    return Router(f"iChat {policy}", [args.python, PYZ, "gateway", "-c", config], fleet.gateway_port, is_ours=True)


def peer(fleet, name, program, policy):
    port = free_port()
    command = [program, *(["launch"] if name == "sglang-router" else []), "--host", "127.0.0.1", "--port", port]
    command += ["--policy", policy, "--prometheus-port", free_port(), "--health-check-interval-secs", 2]
    return Router(f"{name} {policy}", [*command, "--worker-urls", *fleet.urls], port)


class Tokens:
    """A process that says which tokens prompts have, with the tokenizer of an engine's environment."""

    def __init__(self, backend, model):
        python = ROOT / f".engines/{backend}/bin/python"
        command = [str(python), str(HERE / "prompt_tokens.py"), str(model)]
        self._popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}, start_new_session=True,
        )  # fmt: skip

    def of(self, prompts):
        found = []
        for messages in prompts:
            self._popen.stdin.write(json.dumps(messages) + "\n")
            self._popen.stdin.flush()
            line = self._popen.stdout.readline()
            if not line:
                raise Failed("the tokenizer has ended")
            found.append(json.loads(line))
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._popen.kill()
        self._popen.wait()
