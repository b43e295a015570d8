"""A worker's life around its engine: its log for those that follow it, its gateway, its launcher, and its end."""

import contextlib
import http.client
import http.server
import json
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import trio
from support.deployments import free_port
from support.peers import code_of, plain, until
from support.programs import LIMIT_S, ROOT, Program, alive, ichat

from ichat.config.schema import Limits, Timeouts
from ichat.hardware.machines import own_id
from ichat.http.front_door import FrontDoor
from ichat.http.hub import Hub
from ichat.http.listeners import open_listeners, port_of
from ichat.observability.logs.endpoint import LogEndpoint
from ichat.observability.logs.lines import LineBuffer
from ichat.protocol.messages import FAILURE_CHARACTERS_MAX, Heartbeat, parse_heartbeat, sentence
from ichat.roles.heartbeat_sender import HeartbeatSender
from ichat.supervisor.processes import session_members

WORKER = ("worker", "-be", "fake", "--model", "/m", "-n", "m", "--port", "0", "--worker-id", "w", "--hi", "0.2")


@pytest.fixture
def start(tmp_path):
    """Start a program that is gone when the test ends, with everything that it started."""
    programs = []

    def run(*command):
        programs.append(Program(command, tmp_path / f"{len(programs)}.log"))
        return programs[-1]

    yield run
    for program in programs:
        program.end()


@pytest.fixture
def start_worker(start):
    """Start a worker with the fake engine, and wait until it is ready."""

    def run(*flags):
        worker = start(*ichat(*WORKER, *flags)).wait_for_port()
        worker.until(lambda: worker.get("/health")[0] == 200)
        return worker

    return run


class Gateway:
    """Takes beats, and keeps them."""

    def __init__(self, port=0):
        heartbeats = self.heartbeats = []

        class Taker(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                heartbeats.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b'{"status": "ok", "gateway_id": "g"}')

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Taker)
        self.port = self.server.server_port
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()

    def goodbyes(self):
        """Return the failures of the beats that said goodbye; one that was cut off for it may be noted after it."""
        return [beat["failure"] for beat in self.heartbeats if beat["state"] == "gone"]

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def gateway():
    with contextlib.closing(Gateway()) as one:
        yield one


def events_of(text):
    """Return lines by number, and the sum of what was missed; numbers and gaps must fit without a hole."""
    lines, lost, expected = {}, 0, None
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if not fields:
            continue
        data = json.loads(fields["data"])
        if fields.get("event") == "gap":
            assert "id" not in fields
            lost += data["lost"]
            expected = (expected or 1) + data["lost"]
        else:
            assert expected in (None, data["seq"]) or not lines
            expected = data["seq"] + 1
            lines[data["seq"]] = data["line"]
    return lines, lost


def last_id(text):
    return max(map(int, re.findall(rb"(?m)^id: (\d+)$", text)), default=0)


@contextlib.contextmanager
def follow(worker):
    """Begin to follow; give the response, of which nothing was read but the head."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", worker.port, timeout=LIMIT_S)) as connection:
        connection.request("GET", "/logs/stream")
        with connection.getresponse() as response:
            yield response


# The log, over HTTP.


@pytest.fixture
def serve_log(nursery):
    """Serve a buffer's lines: `log, door, port = await serve_log(buffer)`."""

    async def start(buffer, settle=lambda _: True):
        log = LogEndpoint(buffer, settle, [(b"x-ichat-worker", b"w")])
        listeners = await open_listeners("127.0.0.1", 0)

        async def answer(request, client, _caller):
            await log.answer(request, client)

        door = FrontDoor(b"worker", answer, lambda head, peer: None, Hub(), Limits(), Timeouts(drain_s=3600))
        nursery.start_soon(door.hub.run_forever)
        nursery.start_soon(door.serve_forever, listeners)
        return log, door, port_of(listeners)

    return start


def ring_of(count, **bounds):
    buffer = LineBuffer(**bounds)
    buffer.append([b"line %d" % number for number in range(1, count + 1)], 0)
    return buffer


async def test_log_lines_without_following_keep_the_connection(serve_log, connect):
    """Without following the answer is a whole one, and the next request comes over the same connection."""
    _, _, port = await serve_log(ring_of(600))
    client = await connect(port)
    for query, first in ((b"", 1), (b"&tail=3", 598), (b"&tail=0", 601)):
        status, headers, body = await client.get(b"/logs/stream?follow=false" + query)
        assert (status, headers[b"content-type"]) == (200, b"text/event-stream; charset=utf-8")
        assert (headers[b"cache-control"], headers[b"x-ichat-worker"]) == (b"no-cache", b"w")
        assert events_of(body.decode()) == ({number: f"line {number}" for number in range(first, 601)}, 0)
    await client.send(b"GET /logs/stream?follow=0 HTTP/1.1\r\nhost: localhost\r\nlast-event-id: 599\r\n\r\n")
    assert list(events_of((await client.response(b"GET"))[2].decode())[0]) == [600]
    await client.send(b"HEAD /logs/stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert (await client.response(b"HEAD"))[::2] == (200, b"")
    assert (await client.get(b"/logs/stream?follow=false&tail=0"))[0] == 200


async def test_an_old_client_gets_lines_without_chunks(serve_log, connect):
    """A client of HTTP/1.0 gets the events and then the end of the connection."""
    _, _, port = await serve_log(ring_of(2))
    client = await connect(port)
    await client.send(b"GET /logs/stream?follow=false HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
    head, _, body = (await client.everything()).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert b"chunked" not in head
    assert events_of(body.decode()) == ({1: "line 1", 2: "line 2"}, 0)


@pytest.mark.parametrize(
    ("target", "method", "status"),
    [(b"?previous=true", b"GET", 400), (b"?tail=x", b"GET", 400), (b"?lines=3", b"GET", 400), (b"", b"POST", 405)],
)
async def test_a_wrong_log_query_is_refused_with_a_sentence(serve_log, connect, target, method, status):
    """What makes no sense here is said in a sentence, and the connection goes on."""
    _, _, port = await serve_log(ring_of(2))
    client = await connect(port)
    await client.send(b"%b /logs/stream%b HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n" % (method, target))
    found, headers, body = await client.response(method)
    assert (found, headers[b"x-ichat-error"]) == (status, b"worker")
    assert code_of(body) in ("bad_request", "method_not_allowed")
    assert (await client.get(b"/logs/stream?follow=false"))[0] == 200


async def test_followers_hold_up_no_drain_and_get_the_last_lines(serve_log, connect, nursery):
    """The drain ends at once; what is written during it, and what is still in a pipe, comes before a proper end."""
    buffer = ring_of(1)

    def settle(_):
        buffer.append([b"from the pipe"], 0)

    log, door, port = await serve_log(buffer, settle)
    clients = [await connect(port) for _ in range(3)]
    for client in clients:
        await client.send(b"GET /logs/stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await until(lambda: repr(log).endswith(" 3 readers>"))
    with trio.fail_after(LIMIT_S):
        await door.drain()
    buffer.append([b"while it drained"], 0)
    with trio.fail_after(LIMIT_S):
        await log.finish(3600)
    for client in clients:
        _, _, body = await client.response(b"GET")
        assert events_of(body.decode()) == ({1: "line 1", 2: "while it drained", 3: "from the pipe"}, 0)
        assert await client.everything() == b""


async def test_a_follower_that_takes_nothing_does_not_hold_up_the_end(serve_log, connect):
    """It gets what fits into the time; its stream has no proper end, so that it can tell."""
    buffer = ring_of(5000, bytes_max=10**9)
    log, door, port = await serve_log(buffer)
    client = await connect(port)
    await client.send(b"GET /logs/stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await until(lambda: repr(log).endswith(" 1 readers>"))
    for _ in range(50):
        buffer.append([b"x" * 10_000] * 100, 0)
    with trio.fail_after(LIMIT_S):
        await log.finish(0.2)
    assert door.clients


# The log of a real process.


def test_the_log_is_there_from_the_start(start):
    """While the engine still loads: own lines and those of children, and the original output has the same."""
    worker = start(*ichat(*WORKER, "--load-s", "3600")).wait_for_port()
    with follow(worker) as response:
        text = ""
        while "loading" not in text.rpartition("data: ")[2]:
            text += response.readline().decode()
        lines, lost = events_of(text + "\n")
        assert lost == 0
        assert lines[1].endswith(f"worker w listens on 127.0.0.1:{worker.port}")
        worker.until(lambda: worker.text().splitlines()[: len(lines)] == list(lines.values()))
        assert worker.stop() == 0
        assert "told to stop: shutting down" in response.read().decode()


def test_the_log_can_be_switched_off(start_worker):
    """Then the output goes where it went before, and the route says how it is switched on."""
    worker = start_worker("--ls", "false")
    status, answer = worker.get("/logs/stream")
    assert (status, answer["error"]["code"]) == (404, "not_found")
    assert "--log-streaming true" in answer["error"]["message"]
    assert worker.ask("/print", {"lines": 3})[0] == 200
    worker.until(lambda: "child line 2" in worker.text())
    assert worker.stop() == 0


def test_a_follower_sees_the_whole_end(start_worker):
    """It does not hold up the shutdown, though that waits an hour for exchanges; its stream ends properly, with the last line."""
    worker = start_worker("--drain-s", "3600", "--children", "1")
    with follow(worker) as response:
        assert worker.stop(limit_s=LIMIT_S) == 0
        lines, _ = events_of(response.read().decode())
    assert list(lines.values()) == worker.text().splitlines()
    assert any("told to stop: shutting down" in line for line in lines.values())


def test_why_an_engine_ended_is_in_the_log_and_in_the_good_bye(start_worker, gateway):
    """Whoever follows reads it, and the gateway is told it with the last beat; the process' last line says it as well."""
    worker = start_worker("-ga", f"http://127.0.0.1:{gateway.port}")
    with follow(worker) as response:
        assert worker.ask("/die", {})[0] == 500
        assert worker.process.wait(LIMIT_S) == 70
        lines, _ = events_of(response.read().decode())
    why = "The engine died: killed by a test"
    assert any(line.endswith(why) for line in lines.values())
    assert gateway.goodbyes() == [why]
    assert not gateway.heartbeats[0]["failure"]
    assert worker.text().splitlines()[-1] == why


def test_a_failed_load_is_reported_before_the_worker_ends(start, gateway):
    """A worker that never was ready says why before it leaves."""
    worker = start(*ichat(*WORKER, "--fail", "-ga", f"http://127.0.0.1:{gateway.port}"))
    assert worker.process.wait(LIMIT_S) == 70
    why = "The engine failed while loading: no such weights"
    assert gateway.goodbyes() == [why]
    assert worker.text().splitlines()[-1] == why
    assert "RuntimeError: no such weights" in worker.text()


@pytest.mark.parametrize("reads", [True, False], ids=["reads", "sleeps"])
def test_a_flood_of_lines(start_worker, reads):
    """The worker waits for no reader; one that sleeps hears exactly how many lines it has missed, and has the last ones."""
    count = 50_000
    worker = start_worker("--client-stall-s", "3600")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(LIMIT_S)
        sock.connect(("127.0.0.1", worker.port))
        sock.sendall(b"GET /logs/stream HTTP/1.0\r\nHost: localhost\r\n\r\n")
        pieces = []
        reading = threading.Thread(target=lambda: pieces.extend(iter(lambda: sock.recv(1 << 20), b"")))
        if reads:
            reading.start()
        assert worker.ask("/print", {"lines": count})[0] == 200
        assert worker.get("/health") == (200, {"status": "ok"})
        if not reads:
            reading.start()
        assert worker.ask("/print", {"lines": 1})[0] == 200
        worker.until(lambda: last_id(b"".join(pieces[-100:])) >= len(worker.text().splitlines()))
        worker.process.send_signal(signal.SIGTERM)
        reading.join(LIMIT_S)
    assert worker.process.wait(LIMIT_S) == 0
    lines, lost = events_of(b"".join(pieces).partition(b"\r\n\r\n")[2].decode())
    written = worker.text().splitlines()
    assert len(written) >= max(lines) == len(lines) + lost > 2 * count
    assert all(written[number - 1] == line for number, line in lines.items())
    for name in ("own", "child"):
        numbers = [int(line.split()[-1]) for line in lines.values() if line.startswith(f"{name} line ")]
        assert numbers[-1] == 0, "the last one of the second time"
        assert numbers[:-1] == sorted(set(numbers[:-1]))
    if not reads:
        assert lost > count


# Its gateway.


def test_an_orphan_ends(start_worker):
    """Where its gateway has gone, a worker that shall not outlive it for long ends in good order, and says why."""
    gateway = Gateway()
    worker = start_worker("-ga", f"http://127.0.0.1:{gateway.port}", "--orphan-after-s", "1", "--children", "1")
    family = worker.descendants()
    worker.until(lambda: gateway.heartbeats and gateway.heartbeats[-1]["state"] == "ready")
    gateway.close()
    assert worker.process.wait(LIMIT_S) == 0
    assert "the gateway has accepted no heartbeat for 1 s: shutting down" in worker.text()
    worker.until(lambda: not alive(family))


def test_only_workers_with_the_flag_become_orphans(start_worker):
    """Without the flag a worker waits for its gateway for ever; one whose gateway comes back has never been an orphan."""
    gateway = Gateway(free_port())
    flags = ("-ga", f"http://127.0.0.1:{gateway.port}")
    patient, lucky = start_worker(*flags), start_worker(*flags, "--orphan-after-s", "600")
    gateway.close()
    for worker in (patient, lucky):
        worker.until(lambda worker=worker: "accepts no heartbeats" in worker.text())
    with contextlib.closing(Gateway(gateway.port)):
        for worker in (patient, lucky):
            worker.until(lambda worker=worker: "accepts heartbeats again" in worker.text())
    for worker in (patient, lucky):
        assert worker.process.poll() is None
        assert worker.stop() == 0


async def test_time_without_a_beat_does_not_make_an_orphan(serve, nursery, autojump_clock):
    """Only beats that were sent and not taken count: an hour between two of them is none without a gateway."""
    answers = iter(["ok", "no", "no", "ok", "no", "no", "no", "no"])

    async def take(stream, head, body):
        reply = plain(b"{}") if next(answers) == "ok" else b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n"
        await stream.send_all(reply)

    gateway, port = await serve(take)
    orphaned_after = []
    reporter = make_reporter(port, heartbeat_interval=3600.0, orphan_after_s=2.5)

    async def note():
        await reporter.wait_for_end()
        orphaned_after.append(len(gateway.requests))
        nursery.cancel_scope.cancel()

    nursery.start_soon(note)
    await reporter.send_forever()
    assert orphaned_after == [8]


def make_reporter(port, heartbeat_interval, **more):
    heartbeat = Heartbeat("w", "m", "127.0.0.1", 8000, heartbeat_interval=heartbeat_interval)
    address = f"http://127.0.0.1:{port}"
    return HeartbeatSender(address, ca_file=None, host="127.0.0.1", now=lambda: heartbeat, lost=print, **more)


async def test_a_gateway_that_was_started_anew_gets_another_beat(serve, nursery, autojump_clock):
    """As soon as it is known; two gateways behind one address do not make it beat without end."""
    ids = iter(["a", "a", "b", "b", "b", "c", "d", "", *"efgh"])

    async def take(stream, head, body):
        await stream.send_all(plain(json.dumps({"status": "ok", "gateway_id": next(ids)}).encode()))

    gateway, port = await serve(take)
    reporter = make_reporter(port, heartbeat_interval=3600.0)
    nursery.start_soon(reporter.send_forever)
    for expected in (1, 2, 4, 5, 7, 8):
        await until(lambda expected=expected: len(gateway.requests) >= expected)
        await trio.sleep(0.2)
        assert len(gateway.requests) == expected
        reporter.changed()


def test_a_gateway_can_ask_for_a_beat(start_worker, gateway):
    """At once, long before the next one is due; a worker without a gateway says so."""
    worker = start_worker("-ga", f"http://127.0.0.1:{gateway.port}", "--hi", "3600")
    worker.until(lambda: gateway.heartbeats and gateway.heartbeats[-1]["state"] == "ready")
    count = len(gateway.heartbeats)
    assert worker.ask("/beat", {}) == (200, {"status": "ok"})
    worker.until(lambda: len(gateway.heartbeats) > count)
    assert worker.get("/beat")[0] == 405

    status, answer = start_worker().ask("/beat", {})
    assert (status, answer["error"]["code"]) == (409, "no_gateway")


def test_a_worker_reports_its_machine_once(start_worker, gateway):
    """In one beat, once its engine serves; not again while that is as it was."""
    worker = start_worker("-ga", f"http://127.0.0.1:{gateway.port}", "--hi", "3600")
    worker.until(lambda: any(heartbeat["machine"] for heartbeat in gateway.heartbeats))
    [told] = [heartbeat for heartbeat in gateway.heartbeats if heartbeat["machine"]]
    assert (told["machine"]["id"], told["state"]) == (own_id(), "ready")
    assert told["machine"]["memory_total_bytes"] > 0
    count = len(gateway.heartbeats)
    worker.ask("/beat", {})
    worker.until(lambda: len(gateway.heartbeats) > count)
    assert gateway.heartbeats[-1]["machine"] is None


def test_a_failure_fits_into_a_beat():
    """Whatever an engine says: one line, printable and bounded; from others it is refused."""
    needed = {"worker_id": "w", "model_name": "m", "host": "h", "port": 1}
    for text in ("", "Out\nof  memory.", "\x1b[31mred\x00\ud800", "long " * 10_000):
        assert parse_heartbeat({**needed, "failure": sentence(text)}).failure == sentence(text)
    assert sentence("Out\nof  memory.") == "Out of memory."
    assert len(sentence("x" * 5000)) == FAILURE_CHARACTERS_MAX
    for wrong in ("two\nlines", "x" * (FAILURE_CHARACTERS_MAX + 1), 7, None):
        with pytest.raises(Exception, match="failure"):
            parse_heartbeat({**needed, "failure": wrong})


# Its launcher.

LAUNCHER = """
import os, subprocess, sys
reading, writing = os.pipe()
command = {"env": {**os.environ, "ICHAT_LAUNCHER_FD": str(reading)}, "pass_fds": [reading], "start_new_session": True}
worker = subprocess.Popen(sys.argv[1:], **command)
os.close(reading)
worker.wait()
"""


def post(worker, path, method="POST"):
    """Send a request and do not wait for its answer."""
    sock = socket.create_connection(("127.0.0.1", worker.port))
    sock.sendall(f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{{}}".encode())
    return sock


@pytest.mark.parametrize("state", ["loading", "idle", "followed", "busy", "leaving", "engine blocks", "trio hangs"])
def test_nothing_outlives_a_killed_launcher(start, state):
    """Whatever it was doing: the worker, the engine's children and what has lost its parent are gone soon."""
    flags = ["--children", "1", "--leftovers", "1", "--drain-s", "3600", "--stop-s", "3600"]
    if state == "loading":
        flags = ["--load-s", "3600"]
    launcher = start(sys.executable, "-c", LAUNCHER, *ichat(*WORKER, *flags)).wait_for_port()
    with contextlib.ExitStack() as stack:
        launcher.until(lambda: "loading" in launcher.text())
        if state != "loading":
            launcher.until(lambda: launcher.get("/health")[0] == 200)
        session = launcher.descendants()[0].pid
        if state == "followed":
            stack.enter_context(follow(launcher))
        elif state in ("busy", "leaving"):
            stack.enter_context(post(launcher, "/wait"))
            launcher.until(lambda: launcher.ask("/counts", {})[1]["running"] == 1)
        elif state == "engine blocks":
            stack.enter_context(post(launcher, "/block"))
            launcher.until(lambda: "blocking" in launcher.text())
        elif state == "trio hangs":
            assert launcher.ask("/hang", {})[0] == 200
            stack.enter_context(post(launcher, "/v1/models", "GET"))
            launcher.until(lambda: "hanging" in launcher.text())
        if state == "leaving":
            launcher.descendants()[0].send_signal(signal.SIGTERM)
            launcher.until(lambda: "told to stop" in launcher.text())
        family = session_members(session)
        assert len(family) >= (1 if state == "loading" else 4)
        launcher.process.kill()
        launcher.process.wait()
        began = time.monotonic()
        launcher.until(lambda: not alive(family), LIMIT_S)
        print(f"{state}: {time.monotonic() - began:.1f} s")
    if state in ("idle", "followed", "busy", "engine blocks"):
        assert "the launcher is gone: shutting down" in launcher.text()


def test_processes_that_lost_their_parent_are_found():
    """A process that leads a session finds what stems from it wherever its parent has gone, and spares itself."""
    program = """
        import os, subprocess
        from ichat.supervisor.processes import kill_own_children, session_members
        subprocess.run("sleep 3600 &", shell=True)
        before = len(session_members(os.getpid()))
        kill_own_children(5)
        print(before, len(session_members(os.getpid())))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, start_new_session=True, timeout=LIMIT_S, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "2 1\n")
