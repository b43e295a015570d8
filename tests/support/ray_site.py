"""A gateway with workers on a cluster of Ray, for tests; the engine is the fake engine."""

import contextlib
import json
import sys
import urllib.error
import urllib.request

import psutil
from support.deployments import free_port, stream
from support.programs import LIMIT_S, ROOT, words_of

ON_RAY = """
[restart]
first_s = 0.2
{restart}
[ray]
address = "{address}"
python = "{python}"
{ray}
[[managed_workers]]
model_name = "m"
model_path = "/m"
backend = "fake"
heartbeat_interval = 0.5
python = "{python}"
on = "ray"
{keys}
"""
ENV = {"PYTHONPATH": str(ROOT / "tests/support/fake_engine")}
START_S = 120


class Site:
    """A gateway with workers on a cluster; the next gateway has the same port and directory.

    `address` is where the gateway finds the dashboard of Ray, if that is not the cluster's own address.
    """

    def __init__(self, gateway, cluster, address=""):
        self._gateway, self._cluster, self._port = gateway, cluster, free_port()
        self._address = address
        self.program = None

    def begin(self, keys="gpus = 1", ray="", settings="", restart="", **env):
        address = self._address or self._cluster.address
        text = ON_RAY.format(address=address, python=sys.executable, ray=ray, keys=keys, restart=restart)
        self.program = self._gateway(text, self._port, settings, **{**ENV, **env})
        return self

    def close(self):
        """End the gateway, and what it has left on Ray."""
        if self.program is None:
            return
        if self.program.process.poll() is None:
            self.program.stop()
        with contextlib.suppress(OSError):
            for name in self.living():
                request = urllib.request.Request(f"{self._cluster.address}/api/jobs/{name}/stop", method="POST")
                urllib.request.urlopen(request, timeout=LIMIT_S).close()

    def until_ready(self, *worker_ids):
        for worker_id in worker_ids:
            self.program.wait_until_ready(worker_id, START_S)
        return [self.pid(worker_id) for worker_id in worker_ids]

    def worker(self, worker_id="m-0"):
        return self.program.get(f"/v1/admin/workers/{worker_id}")[1]

    def pid(self, worker_id="m-0"):
        return self.worker(worker_id)["pid"]

    def answers(self):
        return self.program.ask("/v1/chat/completions", {"model": "m"})[0] == 200

    def jobs(self):
        """Return each job of this gateway by its id."""
        with urllib.request.urlopen(f"{self._cluster.address}/api/jobs/", timeout=LIMIT_S) as answer:
            found = json.load(answer)
        owner = self.owner()
        return {job["submission_id"]: job for job in found if (job["metadata"] or {}).get("ichat.owner") == owner}

    def owner(self):
        """Return the name of the state directory; "" before it has any."""
        with contextlib.suppress(FileNotFoundError):
            return self.directory().joinpath("owner").read_text().strip()
        return ""

    def directory(self):
        return self.program.log.parent / "state"

    def logs_of_ray(self):
        """Return the files below Ray's directory that its programs have written as text."""
        return [path for path in self._cluster.directory.rglob("*") if path.suffix in (".log", ".out", ".err")]

    def living(self):
        return sorted(name for name, job in self.jobs().items() if job["status"] in ("PENDING", "RUNNING"))

    def tagged(self):
        """Return the processes of workers that belong to this gateway."""
        port = f"127.0.0.1:{self.program.port}"
        return [one for one in psutil.process_iter() if any(port in word for word in words_of(one))]


def read_all(program, body):
    """Return all that a request is answered."""
    data = b""
    with stream(program, body) as sock:
        while b"\r\n0\r\n" not in data and (more := sock.recv(65536)):
            data += more
    return data
