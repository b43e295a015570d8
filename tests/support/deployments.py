"""What tests of workers' lives share: a gateway with a state directory of the test's, and what it shows."""

import contextlib
import json
import secrets
import socket
import threading

import psutil
import pytest
from support.programs import LIMIT_S, Program, ichat

WORKER = """
[[managed_workers]]
model_name = "{name}"
model_path = "/m"
backend = "fake"
heartbeat_interval = {beats_s}
{more}
"""
QUICK = "[restart]\nfirst_s = 0.2\n"
BEATS_S = 20
"""Between two beats of a worker, unless a test is about silence: on a machine that stands still for seconds, one that
beats often would be taken for silent."""


def worker(name="m", more="", beats_s=BEATS_S):
    return WORKER.format(name=name, more=more, beats_s=beats_s)


@pytest.fixture(name="start")
def start_fixture(tmp_path):
    """Start processes that are gone when the test ends."""
    programs = []

    def run(command, **env):
        program = Program(command, tmp_path / f"{len(programs)}.log", env)
        programs.append(program)
        return program

    yield run
    left = []
    for program in programs:
        left += program.descendants() if program.process.poll() is None else []
        program.end()
    for process in [*left, *_workers_of(tmp_path)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _workers_of(directory):
    """Return the workers that outlived a gateway of this test."""
    return [one for one in psutil.process_iter() if any(str(directory) in word for word in _words(one))]


def _words(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture(name="gateway")
def gateway_fixture(start, tmp_path):
    """Start a gateway: `gateway(toml, port=0, settings)`; the same state directory each time."""

    def run(text, port=0, settings="", **env):
        path = tmp_path / "ichat.toml"
        path.write_text(
            f'[server_settings]\nport = {port}\nstate_directory = "{tmp_path}/state"\n{settings}'
            f"[timeouts]\nstop_s = 6\ndrain_s = 60\n{text}"
        )
        return start(ichat("gateway", "-c", str(path)), **env).wait_for_port()

    return run


FIXED_PORTS = range(15000, 30000)
"""Ports below those that the kernel gives to connections and to whoever listens on port 0."""


def free_port():
    """Return a port on which nobody listens, and that the kernel gives to nobody until a test listens on it.

    A port that the kernel chose may be that of a connection of another test by the time it is used.
    """
    while True:
        port = secrets.choice(FIXED_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def pid_of(program, worker_id="m-0"):
    return program.get(f"/v1/admin/workers/{worker_id}")[1].get("pid")


def stream(program, body, path="/v1/chat/completions"):
    """Begin a request and give its socket."""
    data = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", program.port))
    sock.settimeout(LIMIT_S)
    sock.sendall(
        b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(data)) + data
    )
    return sock


def lines_of(program, worker_id, query="follow=false"):
    """Read a worker's log through the gateway."""
    url = f"/v1/logs/stream/{worker_id}?{query}"
    with socket.create_connection(("127.0.0.1", program.port)) as sock:
        sock.sendall(f"GET {url} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        data = b""
        while more := sock.recv(65536):
            data += more
    return [json.loads(line[6:])["line"] for line in data.decode().splitlines() if line.startswith("data: {")]


def start_registering(start, gateway_port, interval_s, **env):
    """Start a worker called w1 that registers by itself."""
    return start(
        ichat("worker", "-be", "fake", "--model", "/m", "-n", "m", "--port", "0", "--worker-id", "w1",
              "--hi", str(interval_s), "-ga", f"http://127.0.0.1:{gateway_port}"), **env
    ).wait_for_port()  # fmt: skip


class Proxy:
    """A TCP proxy that can be cut: what goes through it stops, and nothing new is let in."""

    def __init__(self, port):
        self._to = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._open = []
        self.is_cut = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._server.accept()
                if self.is_cut:
                    here.close()
                    continue
                there = socket.create_connection(("127.0.0.1", self._to))
                self._open += [here, there]
                for source, target in ((here, there), (there, here)):
                    threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def cut(self):
        """Break everything."""
        self.is_cut = True
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def mend(self):
        """Let new connections through."""
        self.is_cut = False

    def close(self):
        self.cut()
        for sock in (self._server, *self._open):
            sock.close()
