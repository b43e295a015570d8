"""A gateway with relays, as real processes: what a relay imports and needs, how it ends, and who notices."""

import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import urllib.request

import psutil
import pytest
from support.deployments import free_port, worker
from support.programs import LIMIT_S, ROOT, words_of

RSS_MAX = 45 * 1024 * 1024
FORBIDDEN = ("ichat.roles", "ichat.admin", "prometheus_client", "httpx", "hypercorn", "quart", "sqlite3")


def relays_of(program):
    """Return the relays of a gateway, in the order of their numbers."""
    found = []
    for process in program.descendants():
        words = words_of(process)
        if "relay" in words:
            (number,) = (word.partition("=")[2] for word in words if word.startswith("--number="))
            found.append((int(number), process.pid, process))
    return [process for _, _, process in sorted(found)]


def holder_of(connection, program):
    """Return the relay that has a connection."""
    port = connection.sock.getsockname()[1]
    return next(
        process
        for process in relays_of(program)
        if any(one.raddr and one.raddr.port == port for one in process.net_connections())
    )


def begin(program, path, connection=None):
    """Send a request that is answered once a file is there, and return its connection."""
    if connection is None:
        connection = http.client.HTTPConnection("127.0.0.1", program.port, timeout=LIMIT_S)
    body = f'{{"model": "m", "until_there": "{path}"}}'
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    return connection


def ended(connection):
    """Return the status of the response on a connection, and whether it ends the connection."""
    with connection.getresponse() as response:
        response.read()
        return response.status, response.getheader("connection") == "close"


def metrics_of(program):
    """Return what Prometheus would get."""
    with urllib.request.urlopen(f"http://127.0.0.1:{program.port}/metrics", timeout=LIMIT_S) as answer:
        return answer.read().decode()


def decisions_of(program):
    """Return how many first answers to requests were counted."""
    (line,) = [one for one in metrics_of(program).splitlines() if one.startswith("ichat_decision_seconds_count")]
    return float(line.split()[1])


@pytest.fixture
def split(gateway):
    """Start a gateway with two relays that have begun: `program = split(text)`."""

    def start(text, settings=""):
        program = gateway(text, port=free_port(), settings=f"relays = 2\n{settings}")
        program.until(lambda: program.text().count("accepts connections") >= 2)
        return program

    return start


def test_a_relay_imports_no_part_that_decides():
    """Its modules are those that move bytes: they have no metrics, no control plane, and no database."""
    code = "import sys, ichat.relays.relay_process; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = found.stdout.split()
    assert [name for name in loaded if name.startswith(FORBIDDEN)] == []


def test_a_relay_that_no_gateway_has_started_ends_with_a_sentence():
    """It says in a sentence who starts it."""
    command = [
        sys.executable,
        "-m",
        "ichat",
        "relay",
        "--state=x",
        "--number=1",
        "--log-format=text",
        "--log-level=info",
    ]
    found = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr.count("\n")) == (64, 1)
    assert "server_settings.relays" in found.stderr


def test_requests_are_answered_by_relays_that_stay_small(split):
    """Models, the control plane and errors are answered as by one process, and no relay needs much memory."""
    program = split(worker("m"))
    program.wait_until_ready("m-0")
    for _ in range(50):
        status, answer = program.ask("/v1/chat/completions", {"model": "m"})
        assert (status, answer["model"]) == (200, "m")
    assert program.ask("/v1/chat/completions", {"model": "unknown"})[0] == 404
    assert program.get("/v1/models")[0] == 200
    assert max(process.memory_info().rss for process in relays_of(program)) < RSS_MAX


@pytest.mark.parametrize("is_chunked", [True, False])
def test_a_head_that_is_too_large_to_ask_is_refused_and_counted(split, is_chunked):
    """The client gets 431 before and after the body has arrived, and the connection's relay serves on."""
    program = split(worker("m"))
    program.wait_until_ready("m-0")
    relays = [process.pid for process in relays_of(program)]
    headers = {"content-type": "application/json", "authorization": "Bearer " + "x" * 20_000}
    body = b'{"model": "m"}'
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", program.port, timeout=LIMIT_S)) as connection:
        connection.request("POST", "/v1/chat/completions", iter([body]) if is_chunked else body, headers)
        assert ended(connection)[0] == 431
    assert program.ask("/v1/chat/completions", {"model": "m"})[0] == 200
    assert 'reason="head_too_large"' in metrics_of(program)
    assert [process.pid for process in relays_of(program)] == relays


def test_a_request_that_its_relay_refuses_is_recorded_as_others_are(split, tmp_path):
    """It has the client's id, its size and its duration in the access log, and counts as a request to a model."""
    log = tmp_path / "access.log"
    program = split(f'[logs]\naccess_log = "{log}"\n{worker("m")}')
    headers = {"content-type": "application/json", "x-request-id": "own-id"}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", program.port, timeout=LIMIT_S)) as connection:
        connection.request("POST", "/v1/chat/completions", b'{"model": 1}', headers)
        assert ended(connection)[0] == 400
    program.until(lambda: "own-id" in log.read_text())
    (line,) = (json.loads(line) for line in log.read_text().splitlines() if "own-id" in line)
    shown = {name: line[name] for name in ("id", "method", "path", "status", "error", "bytes_in", "worker")}
    assert shown == {
        "id": "own-id", "method": "POST", "path": "/v1/chat/completions", "status": 400, "error": "bad_request",
        "bytes_in": 12, "worker": "",
    }  # fmt: skip
    assert line["duration_ms"] >= 0
    text = metrics_of(program)
    assert re.search(r'(?m)^ichat_requests_total\{[^}]*status="400"[^}]*\} 1(\.0)?$', text), text
    assert re.search(r'(?m)^ichat_\w+\{[^}]*reason="bad_request"[^}]*\} 1(\.0)?$', text), text


def test_a_stop_leaves_no_socket(split, tmp_path):
    """Neither of a relay nor of the process that decides."""
    program = split(worker("m"))
    program.wait_until_ready("m-0")
    assert (tmp_path / "state" / "inner").is_socket()
    program.stop()
    assert [path for path in (tmp_path / "state").rglob("*") if path.is_socket()] == []


def test_a_killed_relay_is_replaced(split):
    """Its place is taken by another process, and requests are answered meanwhile and afterwards."""
    program = split(worker("m"))
    program.wait_until_ready("m-0")
    before = relays_of(program)
    before[0].send_signal(signal.SIGKILL)
    program.until(lambda: program.text().count("relay 1 accepts connections") == 2)
    after = relays_of(program)
    assert after[0].pid != before[0].pid
    assert after[1].pid == before[1].pid
    assert program.ask("/v1/chat/completions", {"model": "m"})[0] == 200
    assert "relay 1" in program.text()


def test_a_killed_relay_frees_the_places_of_its_requests(split, tmp_path):
    """A worker with a single place answers the next request after the relay of the first has ended."""
    program = split(worker("m", "max_in_flight = 1"))
    program.wait_until_ready("m-0")
    connection = begin(program, tmp_path / "never")
    program.until(lambda: program.get("/v1/admin/workers/m-0")[1]["in_flight"] == 1)
    holder_of(connection, program).send_signal(signal.SIGKILL)
    program.until(lambda: program.get("/v1/admin/workers/m-0")[1]["in_flight"] == 0)
    connection.close()


def test_a_relay_retires_at_a_stop_signal(split, tmp_path):
    """It is replaced at once. What is under way ends, what still arrives is answered, and then it ends by itself."""
    program = split(worker("m"))
    program.wait_until_ready("m-0")
    there = tmp_path / "there"
    first = begin(program, there)
    program.until(lambda: program.get("/v1/admin/workers/m-0")[1]["in_flight"] == 1)
    old = holder_of(first, program)
    kept = []
    while not kept or holder_of(kept[-1], program) != old:
        kept.append(begin(program, tmp_path))
        assert ended(kept[-1]) == (200, False)
    old.send_signal(signal.SIGTERM)
    program.until(lambda: program.text().count("accepts connections") == 3)
    shown = program.get("/v1/admin/cluster/status")[1]["gateway"]["relays"]
    assert sorted(one["state"] for one in shown) == ["accepting", "accepting", "retiring"]
    assert [one["pid"] for one in shown if one["state"] == "retiring"] == [old.pid]
    assert ended(begin(program, tmp_path, kept[-1])) == (200, True)
    there.touch()
    assert ended(first)[0] == 200
    for connection in (first, *kept):
        connection.close()
    assert psutil.wait_procs([old], LIMIT_S)[1] == []
    program.until(lambda: "it has retired" in program.text())
    assert "relay is killed" not in program.text()
    assert "it is started again" not in program.text()


def test_all_relays_may_retire_at_once(split, tmp_path):
    """New connections wait for the relays that take their places, and none is refused; a stop ends all of them."""
    program = split(worker("m"))
    program.wait_until_ready("m-0")
    waiting = begin(program, tmp_path / "there")
    program.until(lambda: program.get("/v1/admin/workers/m-0")[1]["in_flight"] == 1)
    before = relays_of(program)
    for relay in before:
        relay.send_signal(signal.SIGTERM)
    for _ in range(20):
        assert program.ask("/v1/chat/completions", {"model": "m"})[0] == 200
    program.until(lambda: len(relays_of(program)) == 3)
    (tmp_path / "there").touch()
    assert ended(waiting)[0] == 200
    waiting.close()
    relays = [*before, *relays_of(program)]
    assert program.stop() == 0
    assert psutil.wait_procs(relays, LIMIT_S)[1] == []


def test_relays_end_with_their_gateway(split):
    """After an ordered stop, and after kill -9 of the gateway, no relay is left."""
    program = split("ownerless_s = 1\n" + worker("m"))
    relays = relays_of(program)
    os.kill(program.process.pid, signal.SIGKILL)
    _, left = psutil.wait_procs(relays, LIMIT_S)
    assert left == []
    program = split(worker("m"))
    relays = relays_of(program)
    assert program.stop() == 0
    _, left = psutil.wait_procs(relays, LIMIT_S)
    assert left == []
    assert pathlib.Path(ROOT).is_dir()


def test_a_relay_has_no_secret_in_its_environment_and_no_rights_to_gain(gateway):
    """Keys stay with the process that decides. A relay dumps no memory, and gains no rights by another program."""
    keys = {"ADMIN": "admin-key-0123456789", "THEIRS": "their-key-0123456789", "ICHAT_ANY_KEY": "any-key-0123456789"}
    text = '[security]\nadmin_key_env = "ADMIN"\n[[external_routes]]\nmodel_name = "m"\n'
    text += 'api_base = "http://127.0.0.1:1/v1"\napi_key_env = "THEIRS"\n'
    program = gateway(text, port=free_port(), settings="relays = 2\n", **keys)
    program.until(lambda: program.text().count("accepts connections") >= 2)
    for relay in relays_of(program):
        found = {*relay.environ(), *relay.environ().values()}
        assert found.isdisjoint({*keys, *keys.values()})
        assert "NoNewPrivs:\t1" in pathlib.Path(f"/proc/{relay.pid}/status").read_text()
        assert relay.rlimit(psutil.RLIMIT_CORE) == (0, 0)


def test_status_lists_relays(split):
    """Each has its number, its process and its state, and the command shows them."""
    program = split(worker("m"))
    shown = program.get("/v1/admin/cluster/status")[1]["gateway"]["relays"]
    assert [(one["number"], one["state"]) for one in shown] == [(1, "accepting"), (2, "accepting")]
    assert {one["pid"] for one in shown} == {process.pid for process in relays_of(program)}
    program.until(lambda: "ichat_relay_cpu_seconds_total" in metrics_of(program))
    text = metrics_of(program)
    assert 'ichat_relays{state="accepting"} 2.0' in text
    assert 'ichat_relay_restarts_total{why="killed"} 0.0' in text
    before = decisions_of(program)
    assert program.ask("/v1/chat/completions", {"model": "unknown"})[0] == 404
    assert decisions_of(program) == before + 1

    def are_measured():  # by the first pulse of each
        shown = program.get("/v1/admin/cluster/status")[1]["gateway"]["relays"]
        return all(one["cpu_s"] > 0 and one["rss_bytes"] > 1_000_000 for one in shown)

    program.until(are_measured)


def test_a_reload_changes_all_relays_or_none(split, tmp_path):
    """A certificate that cannot be used is refused with a sentence; another setting is in force at once, everywhere."""
    program = split(worker("m"), settings="watch_config = false\n")
    program.wait_until_ready("m-0")
    path = tmp_path / "ichat.toml"
    path.write_text(path.read_text() + "[limits]\nbody_bytes_max = 2048\n")
    assert program.ask_by("POST", "/v1/admin/config/reload")[0] == 200
    for _ in range(8):
        assert program.ask("/v1/chat/completions", {"model": "m", "text": "x" * 4096})[0] == 413
    path.write_text(
        path.read_text().replace("[server_settings]\n", "[server_settings]\ntls_certificate='x'\ntls_key='y'\n")
    )
    assert program.ask_by("POST", "/v1/admin/config/reload")[0] == 400
    assert program.ask("/v1/chat/completions", {"model": "m"})[0] == 200


def test_a_reload_changes_the_number_of_relays(split, tmp_path):
    """More are started. The surplus retire: what is under way there ends, and nobody replaces them."""
    program = split(worker("m"), settings="watch_config = false\n")
    program.wait_until_ready("m-0")
    path, first = tmp_path / "ichat.toml", begin(program, tmp_path / "there")
    program.until(lambda: program.get("/v1/admin/workers/m-0")[1]["in_flight"] == 1)
    has_first = holder_of(first, program).pid

    def reload(before, after):
        path.write_text(path.read_text().replace(f"relays = {before}\n", f"relays = {after}\n"))
        return program.ask_by("POST", "/v1/admin/config/reload")

    def numbers(state):
        shown = program.get("/v1/admin/cluster/status")[1]["gateway"]["relays"]
        return [one["number"] for one in shown if one["state"] == state]

    assert reload(2, 4)[0] == 200
    program.until(lambda: numbers("accepting") == [1, 2, 3, 4])
    others = [begin(program, tmp_path / "there") for _ in range(12)]
    program.until(lambda: program.get("/v1/admin/workers/m-0")[1]["in_flight"] == 13)
    before = relays_of(program)
    assert reload(4, 1)[0] == 200
    assert (numbers("accepting"), {*numbers("retiring")} <= {2, 3, 4}) == ([1], True)
    assert program.ask("/v1/chat/completions", {"model": "m"})[0] == 200
    (tmp_path / "there").touch()
    for connection in (first, *others):
        assert ended(connection)[0] == 200
        connection.close()
    assert psutil.wait_procs(before[1:], LIMIT_S)[1] == []
    program.until(lambda: numbers("retiring") == [])
    assert reload(1, 2)[0] == 200
    program.until(lambda: numbers("accepting") == [1, 2])
    status, answer = reload(2, 0)
    assert (status, "--takeover" in answer["plan"][-1]["why"]) == (200, True)
    assert numbers("accepting") == [1, 2]
    assert has_first in {process.pid for process in before}
    assert "is killed" not in program.text()
    assert "it is started again" not in program.text()
