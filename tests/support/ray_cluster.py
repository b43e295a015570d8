"""A cluster of real Ray on this machine: a head without GPUs, and nodes of declared GPUs.

`RayCluster` is for tests. This file is also the program below which all processes of a cluster run: it kills them when
the pipe from the tests' process closes, however that process ends. No port and no directory is Ray's usual one.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request

import psutil

ROOT = pathlib.Path(__file__).parents[2]
RAY = ROOT / ".build/ray/bin/ray"
START_S = 240
ATTEMPTS = 3
"""On a busy machine Ray gives itself up while it starts."""
END_S = 30
STORE_BYTES = 80 << 20
PORTS = range(15000, 30000)
"""Ports below those that the kernel gives to connections."""
OWN_PORTS = (
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
)
"""Each raylet on an address needs these for itself: otherwise nothing can be read from the second."""
PR_SET_CHILD_SUBREAPER = 36
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_prestart_worker_first_driver": "0"}
"""Keeps Ray from sending statistics, and from starting processes that no test uses."""


class RayCluster:
    """A cluster for the block of its context; `nodes` are besides the head, each with `gpus` declared GPUs."""

    def __init__(self, nodes=2, gpus=4, token=""):
        self._nodes, self._gpus, self.token = nodes, gpus, token
        self.address = self.ip = ""
        """Of the dashboard, and that of all nodes."""
        self._before = []
        """The programs of clusters before this, each with its directory and its log."""
        self._revived = []
        """The programs of Ray that `revive` has started."""

    @property
    def _port(self):
        """The port of the dashboard; 0: any free port."""
        return str(urllib.parse.urlsplit(self.address).port or 0)

    def __enter__(self):
        for _ in range(ATTEMPTS - 1):
            with contextlib.suppress(RuntimeError):
                return self._start()
        return self._start()

    def _start(self):
        """Start it. Raises RuntimeError, with the end of its log."""
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="rc"))  # short: Ray's sockets have long names below it
        self._log = (self.directory / "cluster.log").open("wb")
        more = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token} if self.token else {}
        self._program = subprocess.Popen(
            [sys.executable, __file__, self.directory, str(self._nodes), str(self._gpus), self._port],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **ENVIRONMENT, **more},
        )
        self._family = psutil.Process(self._program.pid)
        if not (told := self._program.stdout.readline()):
            self._program.wait()
            words = (self.directory / "cluster.log").read_text(errors="replace")[-4000:]
            self._end(self._program, self.directory, self._log)
            raise RuntimeError(f"the cluster did not start: {words}")
        self.address, self.ip = json.loads(told)
        return self

    def __exit__(self, *_):
        self._end_revived()
        for program in (*self._before, (self._program, self.directory, self._log)):
            self._end(*program)

    @staticmethod
    def _end(program, directory, log):
        program.stdin.close()
        program.stdout.close()
        program.wait()
        log.close()
        shutil.rmtree(directory, ignore_errors=True)

    def begin_anew(self):
        """Kill all of Ray, and start another cluster at the same address.

        Processes of jobs live on as long as they do by themselves: `__exit__` ends the rest.
        """
        for program in ("ray", "raylet", "gcs_server", "dashboard.py"):  # the first would end all the rest
            self.kill(program)
        self._end_revived()
        self._before.append((self._program, self.directory, self._log))
        self.__enter__()

    @contextlib.contextmanager
    def without_dashboard(self):
        """Kill the dashboard, and start it again at the end of the block; its `ray start` sees neither."""
        for process in self.processes("ray", "--head"):
            process.suspend()
        (process,) = self.processes("dashboard.py")
        words, environment, directory = process.cmdline(), process.environ(), process.cwd()
        self.kill("dashboard.py")
        try:
            yield
        finally:
            self._revived.append(
                subprocess.Popen(words, env=environment, cwd=directory, stdin=subprocess.DEVNULL, stdout=self._log)
            )

    def _end_revived(self):
        for process in self._revived:
            process.kill()
            process.wait()
        self._revived = []

    def processes(self, program, node_id=""):
        """Return the processes of `raylet`, `gcs_server`, `dashboard.py`, `ray::DashboardAgent` or another program.

        They are those of a node, or of all.
        """
        found = []
        for process in self._family.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if any(word.endswith(f"/{program}") for word in words[:4]) and node_id in " ".join(words):
                    found.append(process)
                if words[:1] == [program] and node_id in " ".join(process.parent().cmdline()):  # of a raylet
                    found.append(process)
        return found

    def kill(self, program, node_id=""):
        """Kill them, and wait until they are gone."""
        found = self.processes(program, node_id)
        for process in found:
            process.kill()
        psutil.wait_procs(found, timeout=END_S)
        return len(found)


def main(directory, nodes, gpus, port):
    """Start a cluster, report the addresses on stdout, and end all of it at the end of stdin."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which close the pipe
    has_started = False
    try:
        print(json.dumps(start(directory, nodes, gpus, port)), flush=True)
        has_started = True
        threading.Thread(target=reap, daemon=True).start()
        sys.stdin.read()
    finally:
        end_all()
        if has_started:  # otherwise the tests show its log
            shutil.rmtree(directory, ignore_errors=True)


def start(directory, nodes, gpus, port):
    """Start a cluster, with its dashboard at a port, or at any; return the addresses of dashboard and nodes."""
    gcs, dashboard, client, *own = free_ports(3 + len(OWN_PORTS) * (nodes + 1))
    dashboard = port or dashboard
    address = f"http://127.0.0.1:{dashboard}"
    usual = ["--block", "--temp-dir", directory, f"--object-store-memory={STORE_BYTES}"]
    usual += ["--min-worker-port=0", "--max-worker-port=0"]
    head = ["--head", f"--port={gcs}", f"--ray-client-server-port={client}", "--dashboard-host=127.0.0.1"]
    started = []
    for number in range(nodes + 1):  # two at once choose the same socket
        ports = [f"--{name}={own.pop()}" for name in OWN_PORTS]
        if number == 0:
            words = [*head, f"--dashboard-port={dashboard}", "--num-gpus=0", "--num-cpus=2"]
        else:
            labels = json.dumps({"zone": "ab"[number % 2]})
            words = [f"--address=127.0.0.1:{gcs}", f"--num-gpus={gpus}", "--num-cpus=8", "--labels", labels]
            words += ["--include-log-monitor=False"]
        command = [str(RAY), "start", *words, *ports, *usual]
        started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr))
        found = wait_for_nodes(address, started)
    return address, found[0]["node_ip"]


def wait_for_nodes(address, started):
    """Return as many living nodes as were started, once they are there."""
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    request = urllib.request.Request(f"{address}/api/v0/nodes", headers={"authorization": f"Bearer {token}"})
    ends_at = time.monotonic() + START_S
    while time.monotonic() < ends_at and all(process.poll() is None for process in started):
        with contextlib.suppress(OSError, ValueError, KeyError), urllib.request.urlopen(request, timeout=5) as answer:
            rows = [row for row in json.load(answer)["data"]["result"]["result"] if row["state"] == "ALIVE"]
            if len(rows) == len(started):
                return rows
        time.sleep(0.1)
    sys.exit(f"no {len(started)} nodes within {START_S} s, or one has ended")


def free_ports(count):
    """Return ports on which nobody listens."""
    found = set()
    while len(found) < count:
        port = secrets.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            found.add(port)
    return list(found)


def reap():
    """Reap processes that have lost their parents."""
    while True:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)
        time.sleep(0.1)


def end_all():
    """Kill all descendants, until there is none."""
    ends_at = time.monotonic() + END_S
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < ends_at:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
