"""What a run of chaos breaks: a gateway and its workers, as processes, and what can be seen of them from outside.

`calm` is a model that no fault touches: what is asked of it must always go well. `twin` and `embed` are killed, stopped
and restarted, `narrow` has room for two requests, `far` is served by workers that register by themselves through a
network that can be cut.
"""

import contextlib
import json
import os
import pathlib
import random
import re
import signal
import socket
import stat
import sys

import attrs
import psutil
import trio
from chaos_wire import TOKEN, Connection, Link, written
from support.deployments import free_port
from support.peers import write_secret
from support.programs import ROOT, Program
from support.real_engines import ENV, LOAD_S, MODELS, ON_THE_CPU, python_of, toml
from support.relay_site import relays_of

from ichat.supervisor.orphans import marked_by
from ichat.supervisor.processes import is_alive, is_resource_tracker

PYZ = ROOT / "ichat.pyz"
ASK_S = 90.0
FAR_HOST = "127.0.0.2"
"""Where the network to self-registered workers is; they themselves listen at 127.0.0.1."""
BODY_BYTES_MAX = 4 * 1024 * 1024
HEAD_S = 15.0
"""Long: a machine that stands still makes no client slow."""
STALL_S = 15.0
FIRST_BYTE_S = 20.0
STUCK_S = 12.0
LINES_TOLD = 200
"""The lines about workers and reloads, from the end of the gateway's log, that explain why it is not well again."""

SETTINGS = """
[server_settings]
port = {port}
relays = {relays}
state_directory = "{directory}/state"
[security]
join_token_env = "ICHAT_JOIN_TOKEN"
[routing]
queue_max = {queue_max}
[limits]
body_bytes_max = {body_bytes_max}
[timeouts]
head_s = {head_s}
body_s = {head_s}
client_stall_s = {stall_s}
queue_s = 6
connect_s = 3
upstream_idle_s = 2
first_byte_s = {first_byte_s}
stream_stall_s = {first_byte_s}
drain_s = 5
stop_s = 6
wedged_after_s = 60
stuck_s = {stuck_s}
[restart]
first_s = 0.2
longest_s = 3
well_s = 5
attempts_max = 30
[logs]
access_log = "{directory}/access.log"
access_lines_max = 1000000
ring_lines_max = 2000
ring_bytes_max = 262144
echo = false
"""


@attrs.frozen
class Workers:
    """The managed workers of one model."""

    model: str
    count: int = 1
    keys: dict = attrs.field(factory=dict)

    def toml(self, backend):
        table = {"model_name": self.model, "backend": backend, "heartbeat_interval": 1, "port": 0}
        if backend == "fake":
            table |= {"model_path": "/m", "gpu_ids": [], "load_s": 0.1}
        else:
            table |= {"model_path": str(MODELS / "chat"), "heartbeat_interval": 8, "env": ENV[backend]}
            table |= ON_THE_CPU[backend]
        table |= self.keys
        text = "\n".join(f"{key} = {toml(value) if key != 'gpu_ids' else value}" for key, value in table.items())
        return f"\n[[managed_workers]]\n{text}\n" * self.count


KIN = {"children": 1, "needs_children": True}
BASE = {
    "fake": [
        Workers("calm", keys={"heartbeat_interval": 8}),
        Workers("twin", 2, KIN),
        Workers("embed", 1, KIN),
        Workers("narrow", 1, {"max_in_flight": 2}),
    ],
    "real": [Workers("calm"), Workers("twin")],
}
READY_S = {"fake": 120.0}


class Far:
    """A worker with the fake engine that registers by itself, behind two links: that of its heartbeats, and that of its requests."""

    def __init__(self, site, number):
        self.id = f"far-{number}"
        self._site = site
        self.port = _quiet_port()
        self.heartbeats = Link(site.port)
        self.data = Link(self.port)
        self.program = None
        self._starts = 0
        self._is_wanted = True

    def _start(self):
        self._starts += 1
        command = self._site.command(
            "worker", "-be", "fake", "--model", "/m", "-n", "far", "--host", "127.0.0.1", "--port", self.port,
            "--worker-id", self.id, "--advertise-host", FAR_HOST, "-ga", f"http://127.0.0.1:{self.heartbeats.port}",
            "--hi", "1", "--drain-s", "3", "--stop-s", "6", "--children", "1", "--needs-children",
        )  # fmt: skip
        log = self._site.directory / f"{self.id}-{self._starts}.log"
        self.program = Program(command, log, {"ICHAT_JOIN_TOKEN": TOKEN})

    async def keep_forever(self):
        """Start it, and again a moment after each end, as systemd would."""
        while self._is_wanted:
            self._start()
            while self.program.process.poll() is None:
                await trio.sleep(0.1)
            await trio.sleep(0.5)

    async def end(self):
        """End it for good; give what is left of it."""
        self._is_wanted = False
        family = [self.program.family, *self.program.descendants()] if self.program.process.poll() is None else []
        with contextlib.suppress(ProcessLookupError):
            self.program.process.send_signal(signal.SIGTERM)
        with trio.move_on_after(60):
            while self.program.process.poll() is None or any(map(is_alive, family)):
                await trio.sleep(0.1)
        left = [one for one in family if is_alive(one) and not is_resource_tracker(one)]
        self.program.end()
        return left


class Site:
    """The gateway, its workers, and its configuration."""

    def __init__(self, directory, backend, *, is_pyz, relays=0):
        self.directory = directory
        self._relays = relays
        self._configured_port = free_port() if relays else 0
        self.backend = backend
        self._is_pyz = is_pyz or backend != "fake"
        self.path = directory / "ichat.toml"
        self.base = list(BASE.get(backend) or BASE["real"])
        self.rewriting = trio.Lock()
        """Held by whoever changes the file."""
        self.program = None
        self.port = 0
        self.relays = []
        """Those of the start: no fault ends any of them."""
        self.fars = []

    def command(self, *words):
        """Return the command that runs iChat so."""
        return [sys.executable, *([PYZ] if self._is_pyz else ["-m", "ichat"]), *words]

    def text(self, workers, more="", queue_max=6):
        """Write a configuration with these workers."""
        settings = SETTINGS.format(
            directory=self.directory, port=self._configured_port, relays=self._relays, queue_max=queue_max,
            body_bytes_max=BODY_BYTES_MAX, head_s=HEAD_S, stall_s=STALL_S, first_byte_s=FIRST_BYTE_S,
            stuck_s=STUCK_S if self.backend == "fake" else 60.0,
        )  # fmt: skip
        engine = "" if self.backend == "fake" else f'[engines.{self.backend}]\npython = "{python_of(self.backend)}"\n'
        return settings + engine + "".join(one.toml(self.backend) for one in workers) + more

    @property
    def ready_s(self):
        """How long everything may take to be ready again."""
        return READY_S.get(self.backend, LOAD_S * 2)

    async def start(self, nursery):
        """Start everything, and wait until all of it is ready."""
        self.path.write_text(self.text(self.base))
        write_secret(self.directory / "state")
        log = self.directory / "gateway.log"
        self.program = Program(self.command("gateway", "-c", self.path), log, {"ICHAT_JOIN_TOKEN": TOKEN})
        with trio.fail_after(self.ready_s):
            while " listens on " not in self.program.text():
                assert self.program.process.poll() is None, self.program.text()
                await trio.sleep(0.1)
        self.program.wait_for_port()
        self.port = self.program.port
        for number in range(2 if self.backend == "fake" else 0):
            far = Far(self, number)
            await nursery.start(far.heartbeats.run, "127.0.0.1", 0)
            await nursery.start(far.data.run, FAR_HOST, far.port)
            nursery.start_soon(far.keep_forever)
            self.fars.append(far)
        wrong = await self.wait_until_well(self.ready_s)
        self.relays = self.find_relays()
        return wrong or ("" if len(self.relays) == self._relays else f"the relays are {self.relays}")

    async def ask(self, method, path, body=None, *, port=0, limit_s=ASK_S):
        """Ask the control plane, or a worker at its own port: give status and parsed JSON (or text)."""
        with trio.fail_after(limit_s):
            async with await Connection.open(port or self.port) as connection:
                await connection.send(written(method, path, body, ["connection: close"]))
                reply = await connection.reply(method=method.encode())
        try:
            return reply.status, json.loads(reply.body)
        except ValueError:
            return reply.status, reply.body.decode(errors="replace")

    async def workers(self):
        """Return what the gateway says of each worker."""
        status, found = await self.ask("GET", "/v1/admin/workers")
        assert status == 200, (status, found)
        return found["data"]

    async def managed(self, *models):
        """Return the managed workers of these models that have a process."""
        found = await self.workers()
        return [one for one in found if one["managed"] and one["model_name"] in models and one.get("pid")]

    def children_of(self, pid):
        """Return the processes of a worker's engine that hold its model; of the fake engine, all that it needs."""
        title = {"fake": "spawn_main", "vllm": "EngineCore", "sglang": "sglang::scheduler"}[self.backend]
        with contextlib.suppress(psutil.NoSuchProcess):
            return [one for one in psutil.Process(pid).children(recursive=True) if title in _words(one)]
        return []

    async def wait_until_well(self, limit_s):
        """Wait until the configured workers are ready, and no others are there: give what is wrong after that time."""
        expected = sorted([one.model for one in self.base for _ in range(one.count)] + ["far"] * len(self.fars))
        state = ""
        with trio.move_on_after(limit_s):
            while True:
                found = await self.workers()
                models = sorted(one["model_name"] for one in found)
                if models == expected and all(one["state"] == "ready" for one in found):
                    return ""
                state = ", ".join(f"{one['worker_id']} {one['state']} ({one['failure']})" for one in found)
                await trio.sleep(0.2)
        told = [line for line in self.program.text().splitlines() if "worker " in line or "reloading" in line]
        lines = "\n".join(told[-LINES_TOLD:])
        return f"not well within {limit_s:g} s: {state}; expected {expected}; the gateway's last lines:\n{lines}"

    async def metric(self, name, port=0):
        """Sum a metric's samples, whatever their labels."""
        _, text = await self.ask("GET", "/metrics", port=port)
        found = re.findall(rf"(?m)^{name}(?:{{[^}}]*}})? (\S+)$", text)
        return sum(map(float, found))

    def weigh(self):
        """Return the memory of the gateway and its relays in MB, their descriptors and their threads."""
        processes = [self.program.family, *(one for one in self.relays if one.is_running())]
        return [sum(values) for values in zip(*map(_weigh, processes), strict=True)]

    def find_relays(self):
        """Return the processes of the gateway's relays, in the order of their numbers."""
        found = relays_of(self.program)
        return [found[number] for number in sorted(found)]

    def zombies(self):
        """Return the gateway's children that have ended and were not waited for."""
        return [one.pid for one in self.program.family.children() if one.status() == psutil.STATUS_ZOMBIE]

    def leftovers(self):
        """Return the processes and the sockets that a gateway must not leave behind, each in words."""
        marked = [one for one, _ in marked_by(f"{self.directory}/state:") if not is_resource_tracker(one)]
        left = [f"process {one.pid} {_words(one)}" for one in marked]
        for path in (self.directory / "state").rglob("*"):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(path.stat().st_mode):
                    left.append(f"socket {path}")
        return left

    def end_hard(self):
        """Kill whatever is left of everything."""
        programs = [far.program for far in self.fars if far.program] + [self.program]
        for program in programs:
            program.end()
        for one, _ in marked_by(f"{self.directory}/state:"):
            with contextlib.suppress(psutil.Error):
                one.kill()


def _weigh(process):
    with process.oneshot():
        return process.memory_info().rss / 1e6, process.num_fds(), process.num_threads()


def weigh(pid):
    """Return a process' memory in MB, its descriptors and its threads."""
    return _weigh(psutil.Process(pid))


def _words(process):
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.Error:
        return ""


def _quiet_port():
    """Return a free port below those that the kernel gives out by itself: another start of the same worker finds it free."""
    first = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(10_000, first)
        with (
            contextlib.suppress(OSError),
            socket.create_server(("127.0.0.1", port)),
            socket.create_server((FAR_HOST, port)),
        ):
            return port


def send_signal(pid, number):
    """Signal a process, which may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
