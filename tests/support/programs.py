"""Running iChat as its users do: as processes."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import psutil

ROOT = pathlib.Path(__file__).parents[2]
LIMIT_S = 120
"""How long a test waits for anything: more than a machine that has no time for it takes, so that only an end that never
comes takes so long."""


class Program:
    """One process of iChat's, its log in a file, and an HTTP client for it."""

    def __init__(self, command, log, env=None):
        self.log = log
        self.host = "127.0.0.1"
        self.key = ""
        self.port = 0
        self.env = {**os.environ, "PYTHONPATH": "tests/support/fake_engine", **(env or {})}
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                cwd=ROOT,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self.family = psutil.Process(self.process.pid)

    def text(self):
        return self.log.read_text(errors="replace")

    def wait_for_port(self, limit_s=LIMIT_S):
        """Read the port from the log, as an operator would."""
        self.until(lambda: " listens on " in self.text(), limit_s)
        line = next(line for line in self.text().splitlines() if " listens on " in line)
        self.port = int(line.rpartition(":")[2])
        return self

    def until(self, condition, limit_s=LIMIT_S):
        began = time.monotonic()
        while not condition():
            waited_s = time.monotonic() - began
            assert waited_s < limit_s, f"not within {limit_s} s; the log:\n{self.text()[-6000:]}"
            time.sleep(min(0.5, 0.05 + waited_s / 100))  # what takes long shall not be held up by the question

    def get(self, path):
        """Return status and parsed JSON."""
        return self.ask(path, None)

    def ask(self, path, body, timeout=LIMIT_S):
        return self.ask_by("GET" if body is None else "POST", path, body, timeout)

    def ask_by(self, method, path, body=None, timeout=LIMIT_S):
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        if key := self.key or self.own_secret():
            headers["authorization"] = f"Bearer {key}"
        request = urllib.request.Request(f"http://{self.host}:{self.port}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def own_secret(self):
        """Return the secret by which a gateway knows its own user; "" if it is none, or has an admin key."""
        place = pathlib.Path(self.env.get("XDG_STATE_HOME") or pathlib.Path.home() / ".local/state", "ichat")
        for directory in (place / str(self.port), place / f"{self.port}.at"):
            with contextlib.suppress(OSError):
                found = directory if directory.is_dir() else pathlib.Path(directory.read_text().strip())
                return (found / "secret").read_text().strip()
        return ""

    def state(self, worker_id):
        status, worker = self.get(f"/v1/admin/workers/{worker_id}")
        return worker["state"] if status == 200 else None

    def wait_until_ready(self, worker_id, limit_s=LIMIT_S):
        def ready():
            state = self.state(worker_id)
            assert state != "failed", f"the log:\n{self.text()[-6000:]}"
            return state == "ready"

        self.until(ready, limit_s)
        return self

    def descendants(self):
        return self.family.children(recursive=True)

    def stop(self, number=signal.SIGTERM, limit_s=LIMIT_S):
        """Send a signal and give the exit code."""
        self.process.send_signal(number)
        return self.process.wait(limit_s)

    def end(self):
        """End whatever is left of it."""
        left = self.descendants() if self.process.poll() is None else []
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def ichat(*arguments):
    """Return the command that runs iChat from its sources."""
    return [sys.executable, "-m", "ichat", *arguments]


KEPT = """
import sys
from ichat.roles.keep import Keeper
from ichat.service_manager import Notifier
sys.exit(Keeper(sys.argv[2:], Notifier(), watchdog_s=float(sys.argv[1])).run())
"""


def kept_command(watchdog_s, command):
    """Return the command that keeps another running, as `ichat.pyz keep` does, with this time of its watchdog."""
    return [sys.executable, "-c", KEPT, watchdog_s, *command]


def words_of(process):
    """Return the command line of a process; nothing of one that has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def alive(processes):
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
