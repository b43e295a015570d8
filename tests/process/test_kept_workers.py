"""Managed workers and the death of a gateway's own process while its relays live: nothing of them ends with it."""

import contextlib
import fcntl
import http.client
import json
import os
import signal
import socket
import sys
import termios
from pathlib import Path

import psutil
import pytest
from support.deployments import free_port, lines_of, pid_of, stream, worker
from support.programs import LIMIT_S, alive, words_of

from ichat.observability.logs.files import load
from ichat.supervisor.state import StateDirectory

LINES = 20_000
"""Two processes write each of them: more than a pipe holds, and less than a worker keeps for a slow reader."""


class UnixConnection(http.client.HTTPConnection):
    """A client of a worker's own socket."""

    def __init__(self, path):
        super().__init__("localhost", timeout=LIMIT_S)
        self._path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


class Site:
    """A gateway with two relays, whose own process is killed and started again."""

    def __init__(self, gateway, tmp_path, text, timeouts):
        self._gateway, self._text, self._timeouts = gateway, text, timeouts
        self._path, self._port = tmp_path, free_port()
        self.program = None
        self.start()

    def start(self):
        self.program = self._gateway(self._timeouts + self._text, self._port, settings="relays = 2\n")
        self.program.until(lambda: self.program.get("/v1/models")[0] == 200)

    def kill(self):
        """Kill the gateway's own process, and nothing else."""
        os.kill(self.program.process.pid, signal.SIGKILL)
        self.program.process.wait(LIMIT_S)

    def restart(self):
        self.kill()
        self.start()

    def relays(self):
        return [one for one in psutil.process_iter() if {"relay", f"--state={self._path}/state"} <= {*words_of(one)}]

    def print(self, lines, text):
        """Have the worker print lines; return when it has."""
        connection = UnixConnection(StateDirectory(f"{self._path}/state", "").socket_of("m-0"))
        body = json.dumps({"lines": lines, "text": text})
        connection.request("POST", "/print", body, {"content-type": "application/json"})
        with connection.getresponse() as response:
            assert response.status == 200, response.read()
        connection.close()

    def unread(self):
        """Return how many bytes of output wait for the next gateway, in the pipe that a relay keeps."""
        found = [0]
        for path in Path(f"/proc/{self.relays()[0].pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if path.is_fifo():
                    with open(path, "rb", buffering=0, opener=open_now) as pipe:
                        found.append(int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4), sys.byteorder))
        return max(found)

    def printed(self):
        """Return the lines in the worker's file that it was asked to print."""
        lines = load(f"{self._path}/state/logs/m-0.log", lines_max=10**7, bytes_max=2**30).tail(10**7)
        return [line.text for line in lines if line.text.startswith(("own ", "child ")) and "took" not in line.text]


def open_now(path, flags):
    return os.open(path, flags | os.O_NONBLOCK)


def numbers_of(program):
    """Return the number of each line of the worker, as clients of its log see it."""
    with socket.create_connection(("127.0.0.1", program.port)) as sock:
        sock.sendall(
            b"GET /v1/logs/stream/m-0?follow=false&tail=10000 HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        )
        data = b"".join(iter(lambda: sock.recv(65536), b""))
    found = {}
    for block in data.decode().replace("\r\n", "\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "data" in fields and "id" in fields:
            found[json.loads(fields["data"])["line"]] = int(fields["id"])
    found.pop("child took its time", None)  # the only line that occurs twice
    return found


@pytest.fixture
def site(gateway, tmp_path):
    """Start a gateway with two relays and a worker `m-0` that is ready: `site(more, timeouts)`."""

    def start(more="", timeouts=""):
        found = Site(gateway, tmp_path, worker(more=more, beats_s=3600), timeouts)
        found.program.wait_until_ready("m-0")
        return found

    return start


@pytest.mark.parametrize("on_exit", ["stop", "keep"])
def test_a_worker_goes_on_over_the_death_of_its_gateway(site, on_exit):
    """The next one has the same process, of which it knows the state and all lines, and manages it as before."""
    here = site(f'on_gateway_exit = "{on_exit}"\nchildren = 1')
    pid = pid_of(here.program)
    children = {one.pid for one in psutil.Process(pid).children(recursive=True)}
    for text in ("first", "second"):
        here.kill()
        here.print(LINES, text)
        here.start()
        here.program.wait_until_ready("m-0")
        assert pid_of(here.program) == pid
        assert here.program.ask("/v1/chat/completions", {"model": "m"})[0] == 200
    assert {one.pid for one in psutil.Process(pid).children(recursive=True)} == children
    wanted = [f"{one} {text} {n}" for text in ("first", "second") for one in ("own", "child") for n in range(LINES)]
    here.program.until(lambda: len(here.printed()) >= len(wanted))
    assert sorted(here.printed()) == sorted(wanted)
    # it is as much a managed worker as before: healed, and stopped by the API
    os.kill(pid, signal.SIGKILL)
    here.program.until(lambda: here.program.state("m-0") == "ready" and pid_of(here.program) != pid)
    last = psutil.Process(pid_of(here.program))
    assert here.program.ask_by("DELETE", "/v1/admin/workers/m-0?drain_s=0")[0] == 200
    assert not alive([last])


def test_lines_keep_their_numbers(site):
    """A client that follows a log goes on with the number that it knows."""
    here = site()
    here.print(100, "before")
    here.program.until(lambda: len(here.printed()) == 200)
    before = numbers_of(here.program)
    here.kill()
    here.print(100, "without")
    here.start()
    here.program.until(lambda: len(here.printed()) == 400)
    after = numbers_of(here.program)
    assert {line: number for line, number in after.items() if line in before} == before
    assert len(set(after.values())) == len(after)
    assert min(number for line, number in after.items() if line not in before) > max(before.values())


def test_a_worker_ends_with_the_last_process_of_its_gateway(site):
    """Each relay may die while another lives; without any process of its gateway it ends, with its children."""
    here = site("children = 1")
    first = psutil.Process(pid_of(here.program))
    family = [first, *first.children(recursive=True)]
    relays = here.relays()
    assert len(relays) == 2
    relays[0].kill()
    here.program.until(lambda: here.program.text().count("accepts connections") == 3)
    here.kill()
    *others, last = here.relays()
    for relay in others:
        relay.kill()
    here.print(1, "alive")
    assert [one.pid for one in alive(family)] == [one.pid for one in family]
    last.kill()
    here.program.until(lambda: not alive(family))


def test_without_a_successor_everything_ends(site):
    """After `ownerless_s` the relays end, and then the worker."""
    here = site(timeouts="owner_wait_s = 1\nownerless_s = 2\n")
    left = [psutil.Process(pid_of(here.program)), *here.relays()]
    here.kill()
    here.program.until(lambda: not alive(left))


def test_the_last_words_of_a_worker_that_died_without_a_gateway_are_in_its_log(site):
    """The next gateway reads the rest of its output, and starts another process."""
    here = site("children = 1")
    first = psutil.Process(pid_of(here.program))
    family = [first, *first.children(recursive=True)]
    here.kill()
    here.print(100, "last")
    size = sum(len(f"{one} last {n}\n") for one in ("own", "child") for n in range(100))
    here.program.until(lambda: here.unread() >= size)  # a worker passes its lines on a moment after they were printed
    first.kill()
    here.start()
    here.program.wait_until_ready("m-0")
    assert pid_of(here.program) != first.pid
    assert not alive(family)
    previous = lines_of(here.program, "m-0", "previous=1")
    assert [line for line in previous if line.startswith("own ")] == [f"own last {n}" for n in range(100)]


def test_a_worker_that_loads_is_not_started_twice(gateway, tmp_path):
    """The next gateway finds it loading, and it becomes ready in the same process."""
    here = Site(gateway, tmp_path, worker(more='load_s = 3600\nload = "on_demand"'), "load_wait_s = 3600\n")
    with stream(here.program, {"model": "m"}):
        here.program.until(lambda: here.program.state("m-0") == "loading")
        pid = pid_of(here.program)
        here.restart()
        here.program.until(lambda: here.program.state("m-0") == "loading")
        assert pid_of(here.program) == pid
        assert len([one for one in psutil.process_iter() if "--worker-id=m-0" in words_of(one)
                    and any(str(tmp_path) in word for word in words_of(one))]) == 1  # fmt: skip


def test_a_worker_in_use_is_not_evicted_by_the_next_gateway(gateway, tmp_path):
    """It knows the request under way there: another model waits, although the worker has its place."""
    table = worker("a", 'load = "on_demand"\nmin_loaded_s = 3600') + worker("b", 'load = "on_demand"')
    here = Site(gateway, tmp_path, table + '[[swap_sets]]\nmembers = ["a", "b"]\n', "load_wait_s = 3600\n")
    path = tmp_path / "there"
    with stream(here.program, {"model": "a", "until_there": str(path)}) as first:
        here.program.until(lambda: here.program.state("a-0") == "ready")
        here.program.until(lambda: here.program.get("/v1/admin/workers/a-0")[1]["in_flight"] == 1)
        pid = pid_of(here.program, "a-0")
        here.restart()
        with stream(here.program, {"model": "b"}) as second:
            here.program.until(lambda: here.program.state("a-0") == "ready")
            here.program.until(lambda: len(here.program.get("/v1/admin/requests")[1]["requests"]) == 2)
            assert (pid_of(here.program, "a-0"), here.program.state("b-0")) == (pid, "cold")
            path.touch()
            assert first.recv(65536).startswith(b"HTTP/1.1 200")
            assert second.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_sweep_of_workers_leaves_relays_alone(site):
    """The next gateway kills what is left of workers that it does not know, and no relay."""
    here = site()
    relays = {one.pid for one in here.relays()}
    worker_process = psutil.Process(pid_of(here.program))
    here.kill()
    os.unlink(f"{here._path}/state/workers.json")
    here.start()
    here.program.wait_until_ready("m-0")
    assert not alive([worker_process])
    assert {one.pid for one in here.relays()} == relays
    assert "is left of worker m-0: it is killed" in here.program.text()
