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
from support.programs import LIMIT_S, alive, ichat

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


def waiting_at(program):
    """Return how many requests wait for a place."""
    return sum(one["phase"] == "queued" for one in program.get("/v1/admin/requests")[1]["requests"])


def begin_stream(program, headers=HEADERS):
    """Begin a stream, and return its response once it has an event."""
    connection = http.client.HTTPConnection("127.0.0.1", program.port, timeout=LIMIT_S)
    body = json.dumps({"model": "m", "stream": True})
    connection.request("POST", "/v1/chat/completions", body, {**headers, "connection": "close"})
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline().startswith(b"data: ")
    return response


class Asking:
    """Clients that send short requests, one after the other, until they are told to stop."""

    def __init__(self, program, clients=3, headers=HEADERS):
        self._headers = headers
        self.answers = []
        self.is_over = False
        self._threads = [threading.Thread(target=self._ask, args=(program.port,)) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, port):
        while not self.is_over:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
            try:
                connection.request("POST", "/v1/chat/completions", json.dumps({"model": "m"}), self._headers)
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


@pytest.mark.parametrize("limit", ["upstream", "key"])
def test_limits_are_exact_over_a_crash(owner, upstream, limit, monkeypatch):
    """An endpoint with one place, and a key with one request at once, never have two: the stream counts on."""
    key = "sk-" + "k" * 32
    monkeypatch.setenv("THE_KEY", key)
    more = "" if limit == "upstream" else '[[security.keys]]\nname = "k"\nkey_env = "THE_KEY"\nmax_in_flight = 1\n'
    route = "max_in_flight = 1" if limit == "upstream" else ""
    headers = {**HEADERS, "authorization": f"Bearer {key}"}
    program = owner(more, route)
    stream = begin_stream(program, headers=headers)
    kill(program)
    after = owner(more, route)
    asking = Asking(after, 2, headers)
    if limit == "upstream":
        after.until(lambda: waiting_at(after) == 2)
    else:
        after.until(lambda: len(asking.answers) >= 4)
        assert set(asking.answers) == {429}
    assert upstream.most == 1
    upstream.ends.set()
    assert stream.read().endswith(b"data: [DONE]\n\n")
    after.until(lambda: 200 in asking.answers)
    asking.stop()
    assert upstream.most == 1


def test_a_request_that_two_owners_died_with_is_refused(owner):
    """It may be the cause. It has its 503 at once; what goes on is served by the third owner, and so is the next."""
    more, route = "owner_wait_s = 600\n", "max_in_flight = 1"
    program = owner(more, route)
    stream, answers = begin_stream(program), []
    waiter = threading.Thread(target=lambda: answers.append(program.ask("/v1/chat/completions", {"model": "m"})))
    waiter.start()
    program.until(lambda: waiting_at(program) == 1)
    kill(program)
    after = owner(more, route)
    after.until(lambda: waiting_at(after) == 1)
    assert answers == []
    kill(after)
    waiter.join(LIMIT_S)
    [(status, answer)] = answers
    assert (status, answer["error"]["code"]) == (503, "owner_away")
    third = owner(more, route)
    assert third.get("/v1/admin/requests")[1]["total"] == 1
    assert third.ask_by("DELETE", f"/v1/admin/requests/{stream.getheader('x-request-id')}")[0] in (200, 202, 204)
    assert b"request_cancelled" in stream.read()
    assert third.ask("/v1/chat/completions", {"model": "m"})[0] == 200


def test_requests_of_an_earlier_owner_are_listed_and_cancelled(owner, upstream):
    """The next owner shows the stream that goes on, cancels it by its id, and has its place free then."""
    program = owner("", "max_in_flight = 1")
    stream = begin_stream(program)
    shown_id = stream.getheader("x-request-id")
    kill(program)
    after = owner("", "max_in_flight = 1")
    (shown,) = after.get("/v1/admin/requests")[1]["requests"]
    assert (shown["id"], shown["model"], shown["is_stream"]) == (shown_id, "m", True)
    after.until(lambda: after.get("/v1/admin/requests")[1]["requests"][0]["phase"] == "streaming")
    assert after.ask_by("DELETE", f"/v1/admin/requests/{shown_id}")[0] in (200, 202, 204)
    assert b"request_cancelled" in stream.read()
    after.until(lambda: after.get("/v1/admin/requests")[1]["total"] == 0)
    assert after.ask("/v1/chat/completions", {"model": "m"})[0] == 200


def test_a_gateway_with_another_directory_names_both_ways_out(owner, start, tmp_path):
    """The port is held by relays that wait: the error says whose they are, and how to end them."""
    program = owner()
    kill(program)
    path = tmp_path / "other.toml"
    path.write_text(f'[server_settings]\nport = {program.port}\nstate_directory = "{tmp_path}/other"\n')
    other = start(ichat("gateway", "-c", str(path)))
    assert other.process.wait(LIMIT_S) == 69
    assert f"of the gateway in {tmp_path}/state" in other.text()
    assert f"or run `./ichat.pyz sweep {tmp_path}/state`" in other.text()
