"""The process that decides is killed and started again, as real processes: relays keep the port, streams and requests."""

import contextlib
import http.client
import json
import os
import signal
import threading

import psutil
import pytest
from support.counting_upstream import CountingUpstream
from support.deployments import free_port
from support.programs import LIMIT_S, alive

STREAMS = 6
HEADERS = {"content-type": "application/json"}


@pytest.fixture
def upstream():
    one = CountingUpstream()
    yield one
    one.close()


@pytest.fixture
def owner(gateway, upstream, tmp_path):
    """Start a gateway with two relays, or the next owner of them: `program = owner(more)`."""
    port = free_port()
    relays = []

    def start(more="", route="", settings=""):
        program = gateway(more + upstream.route(route), port, f"relays = 2\n{settings}")
        program.until(lambda: len(relays_in(tmp_path)) == 2)
        relays.extend(relays_in(tmp_path))
        return program

    yield start
    for process in alive(relays):
        process.kill()


def relays_in(directory):
    """Return the relays with a socket in the state directory."""
    found = []
    for path in directory.joinpath("state", "relays").glob("*"):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(int(path.name)))
    return alive(found)


def kill(program):
    program.process.send_signal(signal.SIGKILL)
    program.process.wait(LIMIT_S)


def begin_stream(program, connection=None):
    """Begin a stream, and return its response once it has an event."""
    connection = connection or http.client.HTTPConnection("127.0.0.1", program.port, timeout=LIMIT_S)
    body = json.dumps({"model": "m", "stream": True})
    connection.request("POST", "/v1/chat/completions", body, {**HEADERS, "connection": "close"})
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline().startswith(b"data: ")
    return response


class Asking:
    """Clients that send short requests, one after the other, until they are told to stop."""

    def __init__(self, program, clients=3):
        self.answers = []
        self.is_over = False
        self._threads = [threading.Thread(target=self._ask, args=(program.port,)) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, port):
        while not self.is_over:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
            try:
                connection.request("POST", "/v1/chat/completions", json.dumps({"model": "m"}), HEADERS)
                self.answers.append(connection.getresponse().status)
            except OSError as error:
                self.answers.append(repr(error))
            finally:
                connection.close()

    def stop(self):
        self.is_over = True
        for thread in self._threads:
            thread.join()
        return self.answers


def test_streams_and_requests_survive_the_owner(owner, upstream, tmp_path):
    """After kill -9 and another start, no stream is broken and no request refused: the same relays go on."""
    program = owner()
    streams = [begin_stream(program) for _ in range(STREAMS)]
    relays = {process.pid for process in relays_in(tmp_path)}
    asking = Asking(program)
    program.until(lambda: len(asking.answers) >= 20)
    kill(program)
    after = owner()
    seen = len(asking.answers)
    after.until(lambda: len(asking.answers) >= seen + 20)
    assert set(asking.stop()) == {200}
    assert {process.pid for process in relays_in(tmp_path)} == relays
    upstream.ends.set()
    for response in streams:
        assert response.read().endswith(b"data: [DONE]\n\n")
    assert after.stop() == 0
    assert relays_in(tmp_path) == []


def test_relays_without_an_owner_end_within_their_bounds(owner, upstream, tmp_path):
    """A request is refused after `owner_wait_s`; the port is closed, and nothing is left, after `ownerless_s`."""
    program = owner("owner_wait_s = 1\nownerless_s = 4\n")
    relays = relays_in(tmp_path)
    kill(program)
    status, answer = program.ask("/v1/chat/completions", {"model": "m"})
    assert (status, answer["error"]["code"]) == (503, "owner_away")
    assert program.get("/v1/models")[0] == 503
    _, left = psutil.wait_procs(relays, LIMIT_S)
    assert left == []
    with pytest.raises(OSError, match="refused"):
        http.client.HTTPConnection("127.0.0.1", program.port, timeout=LIMIT_S).connect()
    assert os.listdir(tmp_path / "state/relays") == []
