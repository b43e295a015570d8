"""A gateway with more models than may be loaded at once, on both real engines."""

import contextlib
import json
import shutil
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import psutil
from support.deployments import free_port
from support.programs import LIMIT_S, Program
from support.real_engines import ENGINES, LOAD_S, MODELS, PYZ, interpreters, worker_table

GREEDY = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


class Site:
    """A gateway with a model on each engine, of which one may be loaded, and one that no engine can load."""

    def __init__(self, directory):
        self.directory = directory
        self.port = free_port()
        self.config = directory / "ichat.toml"
        broken = shutil.copytree(MODELS / "chat", directory / "broken")
        settings = json.loads((broken / "config.json").read_text())
        (broken / "config.json").write_text(json.dumps({**settings, "architectures": ["NoSuchModel"]}))
        self.write()
        command = [sys.executable, PYZ, "gateway", "-c", self.config]
        self.program = Program(command, directory / "gateway.log", {"PYTHONPATH": ""}).wait_for_port()

    def write(self, **more):
        """Write the configuration; `more` are keys of each worker."""
        lines = [
            "[server_settings]", f"port = {self.port}", f'state_directory = "{self.directory}/state"',
            "watch_config = false", "[timeouts]", f"load_wait_s = {LOAD_S}",
            "[[swap_sets]]", 'members = ["vllm", "sglang", "broken"]', "loaded_max = 1", *interpreters(),
        ]  # fmt: skip
        keys = {"load": "on_demand", "min_loaded_s": 2, "max_model_len": 512, "enforce_eager": True, **more}
        for name, engine, model in (
            ("vllm", "vllm", "chat"),
            ("sglang", "sglang", "chat"),
            ("broken", "vllm", self.directory / "broken"),
        ):
            lines += worker_table(engine, model, name, **keys)
        self.config.write_text("\n".join(lines))

    def reload(self, **more):
        """Go on with these keys of each worker."""
        self.write(**more)
        status, plan = self.program.ask("/v1/admin/config/reload", {})
        assert status == 200, plan

    def ask(self, model):
        """Send a request; return status, answer and when it came."""
        status, answer = self.program.ask("/v1/completions", {"model": model, **GREEDY}, timeout=LOAD_S)
        return status, answer, time.monotonic()

    def workers(self):
        """Return the ids of the workers that have a process."""
        found = set()
        for process in self.program.descendants():
            with contextlib.suppress(psutil.Error):
                found.update(word.partition("=")[2] for word in process.cmdline() if word.startswith("--worker-id="))
        return found

    def loads(self):
        """Return how often a model was loaded."""
        url = f"http://127.0.0.1:{self.program.port}/metrics?workers=false"
        text = urllib.request.urlopen(url, timeout=LIMIT_S).read().decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("ichat_model_loads_total{"))


class Watch:
    """Looks at the processes all the time, and keeps which workers had one at the same time."""

    def __init__(self, site):
        self.seen = set()
        self._site = site
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self):
        while not self._stopped.wait(0.1):
            self.seen.add(frozenset(self._site.workers()))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stopped.set()
        self._thread.join()


def take_turns(site, clients, requests):
    """Have clients want one model after the other, each as soon as the last has answered.

    Return the answers, each with the seconds that it took, and which workers had a process at the same time.
    """

    def client(number):
        answers = []
        for turn in range(requests):
            began = time.monotonic()
            status, answer, at = site.ask(ENGINES[(number + turn) % 2])
            answers.append((status, answer, at - began))
        return answers

    with Watch(site) as watch, ThreadPoolExecutor(clients) as pool:
        answers = [answer for one in pool.map(client, range(clients)) for answer in one]
    return answers, watch.seen
