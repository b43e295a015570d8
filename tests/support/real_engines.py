"""The real engines on the CPU, each behind a real worker and a real gateway.

What a test asks for is written in the common vocabulary, once for all engines; what an engine needs besides, to run
without a GPU at all, stands here.
"""

import contextlib
import json
import re
import socket
import sys
import threading
import time
import urllib.request

import psutil
from support.deployments import free_port
from support.programs import LIMIT_S, ROOT, Program

ENGINES = ("vllm", "sglang")
PYZ = ROOT / "ichat.pyz"
MODELS = ROOT / ".build/tiny"
LOAD_S = 1200
"""How long an engine may take until it is ready: a minute where it has the machine for itself."""
ON_THE_CPU = {
    "vllm": {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}},
    "sglang": {
        "device": "cpu", "max_total_tokens": 16384, "mem_fraction_static": 0.1, "sleep_on_idle": True,
        "constrained_json_disable_any_whitespace": True, "lora_backend": "torch_native",
    },
}  # fmt: skip
ENV = {
    "vllm": {"VLLM_CPU_KVCACHE_SPACE": "1"},
    "sglang": {"PYTHONPATH": str(ROOT / "tests/support/sglang_on_cpu")},
}
TWO_RANKS = {
    "vllm": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    "sglang": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_NCCL_SO_PATH": "none"},
}
ENGINES_MAX = 4
"""How many tiny engines have room at once on a machine of 24 GiB: each takes two to four."""
WORKER_TABLE = "[[managed_workers]]"
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
RUNNING = {"vllm": "vllm:num_requests_(running|waiting)", "sglang": "sglang:num_(running|queue)_reqs"}
"""The metrics of how many requests an engine has."""


def python_of(engine):
    return ROOT / f".engines/{engine}/bin/python"


def flags_of(engine):
    """Return what an engine needs on the CPU, as a command line."""
    words = []
    for key, value in ON_THE_CPU[engine].items():
        words.append("--" + key.replace("_", "-"))
        if value is not True:
            words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return words


def interpreters():
    """Return the lines that say where each engine is."""
    return [line for one in ENGINES for line in (f"[engines.{one}]", f'python = "{python_of(one)}"')]


def worker_table(engine, model, name, *, env=None, **arguments):
    """Return the lines of a managed worker with a model of this name; see `Deployment`."""
    lines = [
        WORKER_TABLE, f'model_name = "{name}"', f'model_path = "{MODELS / model}"', f'backend = "{engine}"',
        "heartbeat_interval = 8",  # machines that run tests stand still for seconds at times
        "port = 0",  # tests ask workers themselves
    ]  # fmt: skip
    lines += [f"env = {toml({**ENV[engine], **(env or {})})}"]
    return lines + [f"{key} = {toml(value)}" for key, value in {**arguments, **ON_THE_CPU[engine]}.items()]


class Deployment:
    """A gateway with one managed worker called `tiny-0`, serving a model called `tiny`."""

    def __init__(self, engine, model, directory, *, env=None, settings=(), more=(), **arguments):
        """`model` is a kind of `tiny_models.py` or a path; `arguments` are the engine's, in the common vocabulary.

        `more` are lines of the configuration, such as those of other workers; `settings` are lines of the server's.
        """
        self.engine = engine
        lines = ["[server_settings]", f"port = {free_port()}", f'state_directory = "{directory}/state"', *settings]
        lines += [*interpreters(), *worker_table(engine, model, "tiny", env=env, **arguments), *more]
        self.directory = directory
        self.config = directory / "ichat.toml"
        self.config.write_text("\n".join(lines))
        self.start()

    def start(self):
        """Start the gateway: the first, or the next one."""
        command = [sys.executable, PYZ, "gateway", "-c", self.config]
        self.program = Program(command, self.directory / f"gateway-{time.time():.0f}.log", {"PYTHONPATH": ""})

    def end(self):
        """End everything, what outlived its gateway as well."""
        self.program.end()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if f"{self.directory}/" in " ".join(process.cmdline()):
                    for one in [process, *process.children(recursive=True)]:
                        one.kill()

    def scheduler(self):
        """Return the process that has the model."""
        title = {"vllm": "EngineCore", "sglang": "sglang::scheduler"}[self.engine]
        family = psutil.Process(self.worker()["pid"]).children(recursive=True)
        return next(process for process in family if title in " ".join(process.cmdline()))

    def wait(self):
        self.program.wait_for_port().wait_until_ready("tiny-0", LOAD_S)
        return self

    @property
    def url(self):
        return f"http://127.0.0.1:{self.program.port}"

    @property
    def worker_url(self):
        return f"http://127.0.0.1:{self.worker()['port']}"

    def worker(self, worker_id="tiny-0"):
        return self.program.get(f"/v1/admin/workers/{worker_id}")[1]

    def metric(self, name, worker_id="tiny-0"):
        """Sum the samples of a worker's metrics of a name, which is an expression."""
        url = f"http://127.0.0.1:{self.worker(worker_id)['port']}/metrics"
        text = urllib.request.urlopen(url, timeout=LIMIT_S).read().decode()
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if re.match(rf"{name}[ {{]", line))

    def running(self):
        """Return how many requests the engine itself says that it is working on."""
        return self.metric(RUNNING[self.engine])


class Room:
    """The memory that engines of tests have: the oldest deployments end where a new one needs it."""

    def __init__(self, engines_max=ENGINES_MAX):
        self._engines_max = engines_max
        self._kept = {}

    def make(self, engines):
        """End deployments, the oldest first, until there is room for so many engines more."""
        while self._kept and sum(self._kept.values()) + engines > self._engines_max:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            oldest.end()

    @contextlib.contextmanager
    def keep(self, kind, engine, model, directory, **arguments):
        """Start a deployment of a kind, and end it afterwards unless it has ended for others; see `Deployment`."""
        processes = arguments.get("tensor_parallel_size", 1) + list(arguments.get("more", ())).count(WORKER_TABLE)
        self.make(processes)
        deployment = kind(engine, model, directory, **arguments)
        self._kept[deployment] = processes
        try:
            yield deployment
        finally:
            if self._kept.pop(deployment, None):
                deployment.end()


class Standstill:
    """Measures how long the machine itself stands still, as virtual ones do: a thread that sleeps briefly oversleeps."""

    def __init__(self):
        self.lost = 0.0
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self):
        began = time.monotonic()
        while not self._stopped.wait(0.02):
            now = time.monotonic()
            if now - began > 0.3:
                self.lost += now - began
            began = now

    def stop(self):
        """Return the seconds that were lost."""
        self._stopped.set()
        return self.lost


def send(port, body, path="/v1/completions"):
    """Send a request on a socket of its own and give the socket."""
    data = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", port))
    sock.settimeout(LIMIT_S)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


def toml(value):
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps([str(inner) for inner in value] if isinstance(value, list) else value)
