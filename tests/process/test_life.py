"""The life of workers as real processes with a fake engine: what happens to them, what is left of them, what is known.

Each test is a row of the table of faults in ARCHITECTURE.md: what the registry says, what clients see, what is left of
the processes, what the logs say.
"""

import json
import os
import pathlib
import signal
import socket
import threading
import time
import urllib.request

import psutil
from support.deployments import (
    BEATS_S,
    QUICK,
    Proxy,
    free_port,
    lines_of,
    pid_of,
    start_registering,
    stream,
    worker,
)
from support.programs import LIMIT_S, alive, ichat


def test_a_killed_worker_is_healed(gateway):
    """kill -9 of a worker: its children are gone, it is restarting with its reason, then ready again under its name."""
    program = gateway(QUICK + worker(more="children = 2")).wait_until_ready("m-0")
    first = psutil.Process(pid_of(program))
    children = first.children(recursive=True)
    assert len(children) >= 2
    sock = stream(program, {"model": "m", "wait_s": 3600})
    program.until(lambda: program.get("/v1/admin/workers/m-0")[1]["in_flight"] == 1)
    first.kill()
    with sock:
        assert b"upstream_failed" in sock.recv(65536)
    program.until(
        lambda: (program.state("m-0"), pid_of(program)) not in [("ready", first.pid), ("restarting", first.pid)]
    )
    program.wait_until_ready("m-0")
    found = program.get("/v1/admin/workers/m-0")[1]
    assert (found["restarts"], found["signal"], found["exit_code"]) == (1, "SIGKILL", None)
    assert (found["failure"], found["oom_killed"]) == (None, False)
    assert any("listens on" in line for line in found["last_lines"])
    assert not alive(children)
    assert program.ask("/v1/chat/completions", {"model": "m"})[0] == 200
    assert "was ended by signal SIGKILL" in program.text()
    previous = lines_of(program, "m-0", "previous=1")
    assert any(f"{first.pid}" in line or "listens on" in line for line in previous)


def test_a_killed_worker_has_no_cause_from_its_load(gateway):
    """A warning of the load is not why it died, and clients are told neither that nor how it ended."""
    warning = (
        "User-specified max_model_len (65536) is greater than the derived max_model_len (max_position_embeddings=2048)."
    )
    text = "[restart]\nattempts_max = 1\n" + worker(more=f'warns = "{warning}"')
    program = gateway(text).wait_until_ready("m-0")
    os.kill(pid_of(program), signal.SIGKILL)
    program.until(lambda: program.state("m-0") == "failed")
    found = program.get("/v1/admin/workers/m-0")[1]
    assert (found["failure"], found["phase"]) == ("was ended by signal SIGKILL", "")
    assert found["cause"].startswith("it was killed from outside (SIGKILL)")
    assert any(warning in line for line in found["last_lines"])
    listed = program.get("/v1/admin/workers")[1]["data"][0]
    assert (listed["state"], listed["phase"], listed["cause"]) == ("failed", None, found["cause"])
    status, answer = program.ask("/v1/chat/completions", {"model": "m"})
    assert (status, "it has failed" in answer["error"]["message"]) == (503, True)
    assert not any(word in answer["error"]["message"] for word in ("SIGKILL", "max_model_len", "m-0"))


def test_requests_wait_for_a_worker_that_is_started_again(gateway):
    """After a kill -9 of the only worker of a model, none is refused that comes while the next start is on its way."""
    program = gateway("[restart]\nfirst_s = 2\n" + worker()).wait_until_ready("m-0")
    pid = pid_of(program)
    os.kill(pid, signal.SIGKILL)
    program.until(lambda: (program.state("m-0"), pid_of(program)) != ("ready", pid))
    assert [program.ask("/v1/chat/completions", {"model": "m"})[0] for _ in range(3)] == [200] * 3
    assert program.get("/v1/admin/workers/m-0")[1]["restarts"] == 1


def test_a_worker_that_crashes_at_start_is_given_up(gateway):
    """Five times, with waits in between; operators get the reason, clients the state, others are left alone."""
    text = "[restart]\nfirst_s = 0.05\nlongest_s = 0.2\n" + worker(more="fail = true") + worker("well")
    program = gateway(text)
    program.until(lambda: program.state("m-0") == "failed")
    found = program.get("/v1/admin/workers/m-0")[1]
    assert (found["restarts"], found["exit_code"]) == (4, 70)
    assert found["cause"] == "The engine failed while loading: no such weights"
    status, answer = program.ask("/v1/chat/completions", {"model": "m"})
    assert (status, answer["error"]["code"]) == (503, "model_not_ready")
    assert answer["error"]["message"] == (
        "The model `m` is not ready: it has failed; an operator sees why in the console, or with `ichat.pyz workers`."
    )
    program.wait_until_ready("well-0")
    assert any("no such weights" in line for line in lines_of(program, "m-0"))


def test_a_worker_of_one_second_has_its_lines(gateway, tmp_path, monkeypatch):
    """What a worker wrote that died at once is not lost: in the registry, and in its log."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "no flags are known"))
    program = gateway(worker(more="modle = 1"))
    program.until(lambda: program.state("m-0") == "failed")
    assert any(
        "unrecognized arguments: --modle=1" in line for line in program.get("/v1/admin/workers/m-0")[1]["last_lines"]
    )
    assert any("unrecognized arguments: --modle=1" in line for line in lines_of(program, "m-0"))


def test_a_stopped_process_is_silent_then_well_again(gateway):
    """SIGSTOP of a worker: unhealthy, no requests; SIGCONT: ready, the same process."""
    program = gateway(worker(beats_s=0.3)).wait_until_ready("m-0")
    pid = pid_of(program)
    os.kill(pid, signal.SIGSTOP)
    try:
        program.until(lambda: program.state("m-0") == "unhealthy")
        status, answer = program.ask("/v1/chat/completions", {"model": "m"})
        assert (status, answer["error"]["code"]) == (503, "model_not_ready")
        assert "its worker is unhealthy" in answer["error"]["message"]
    finally:
        os.kill(pid, signal.SIGCONT)
    program.wait_until_ready("m-0")
    assert pid_of(program) == pid


def change(tmp_path, old, new):
    """Change the configuration, which the gateway sees."""
    path = tmp_path / "ichat.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_silent_worker_is_replaced_in_the_end(gateway, tmp_path):
    """SIGSTOP for longer than `stuck_s`: killed with all its children, and started again."""
    program = gateway("stuck_s = 3600\n" + QUICK + worker(more="children = 1", beats_s=1)).wait_until_ready("m-0")
    first = psutil.Process(pid_of(program))
    family = [first, *first.children(recursive=True)]
    os.kill(first.pid, signal.SIGSTOP)
    change(tmp_path, "stuck_s = 3600", "stuck_s = 1")
    program.until(lambda: "was silent for 1 s" in program.text())
    program.until(lambda: program.state("m-0") == "ready" and pid_of(program) != first.pid)
    assert not alive(family)


def test_a_wedged_engine_is_distinguished_from_a_busy_one(gateway, tmp_path):
    """Requests and no step for `wedged_after_s`: no new requests, and replaced after `stuck_s`."""
    text = "wedged_after_s = 1\nstuck_s = 3600\n" + QUICK + worker(more="stands_still = true", beats_s=1)
    program = gateway(text).wait_until_ready("m-0")
    first = pid_of(program)
    sock = stream(program, {"model": "m", "wait_s": 3600})
    program.until(lambda: program.state("m-0") == "wedged")
    status, answer = program.ask("/v1/chat/completions", {"model": "m"})
    assert (status, answer["error"]["code"]) == (503, "model_not_ready")
    change(tmp_path, "stuck_s = 3600", "stuck_s = 1")
    program.until(lambda: program.state("m-0") == "ready" and pid_of(program) != first)
    with sock:
        assert sock.recv(100).split()[1] in (b"502", b"503")


def test_a_killed_gateway_leaves_nothing_and_the_next_one_starts_anew(gateway):
    """kill -9 of the gateway under load: nothing of its workers is left soon, the next gateway starts them again."""
    port = free_port()
    program = gateway(worker(more="children = 2"), port).wait_until_ready("m-0")
    family = program.descendants()
    sock = stream(program, {"model": "m", "wait_s": 3600})
    program.until(lambda: program.get("/v1/admin/workers/m-0")[1]["in_flight"] == 1)
    program.process.kill()
    program.process.wait()
    program.until(lambda: not alive(family))
    sock.close()
    again = gateway(worker(more="children = 2"), port).wait_until_ready("m-0")
    assert pid_of(again) not in [one.pid for one in family]


def test_a_worker_that_is_kept_is_taken_over(gateway):
    """kill -9 of the gateway, `keep`: the worker answers on, and the next gateway has it long before a heartbeat is due."""
    port = free_port()
    text = worker(more='on_gateway_exit = "keep"\nchildren = 1', beats_s=3600)
    program = gateway(text, port).wait_until_ready("m-0")
    pid = pid_of(program)
    children = {one.pid for one in psutil.Process(pid).children(recursive=True)}
    for end in (signal.SIGKILL, signal.SIGTERM):
        program.process.send_signal(end)
        program.process.wait(LIMIT_S)
        assert alive([psutil.Process(pid)])
        program = gateway(text, port).wait_until_ready("m-0")
        assert (pid_of(program), program.get("/v1/admin/workers")[1]["data"][0]["managed"]) == (pid, True)
        assert program.ask("/v1/chat/completions", {"model": "m"})[0] == 200
        assert ": adopted" in program.text()
    assert {one.pid for one in psutil.Process(pid).children(recursive=True)} == children
    assert any("listens on" in line for line in lines_of(program, "m-0"))
    program.until(lambda: lines_of(program, "m-0"))
    # it is as much a managed worker as before: healed, and stopped by the API
    os.kill(pid, signal.SIGKILL)
    program.until(lambda: program.state("m-0") == "ready" and pid_of(program) != pid)
    family = program.descendants()
    assert program.ask_by("DELETE", "/v1/admin/workers/m-0?drain_s=0")[0] == 200
    assert not alive(family)
    assert program.state("m-0") == "stopped"


def test_a_kept_worker_that_changed_is_started_anew(gateway):
    """The next gateway has another configuration for it: the process is replaced."""
    port = free_port()
    program = gateway(worker(more='on_gateway_exit = "keep"'), port).wait_until_ready("m-0")
    pid = pid_of(program)
    assert program.stop() == 0
    program = gateway(worker(more='on_gateway_exit = "keep"\nchildren = 1'), port)
    program.until(lambda: program.state("m-0") == "ready" and pid_of(program) != pid)
    assert not alive([one for one in psutil.process_iter() if one.pid == pid])
    assert program.stop() == 0


def test_a_kept_worker_without_a_gateway_ends(gateway):
    """After `orphan_after_s` without a gateway it ends by itself, with its children."""
    program = gateway("orphan_after_s = 2\n" + worker(more='on_gateway_exit = "keep"\nchildren = 1'))
    program.wait_until_ready("m-0")
    first = psutil.Process(pid_of(program))
    family = [first, *first.children(recursive=True)]
    program.process.kill()
    program.process.wait()
    program.until(lambda: not alive(family))


def test_launch_and_delete(gateway):
    """Over the API: started, listed, remembered by the next gateway, stopped; what was not started here is not ended."""
    port = free_port()
    program = gateway("", port)
    body = {"model_name": "new", "model_path": "/m", "backend": "fake", "heartbeat_interval": BEATS_S, "children": 1}
    status, answer = program.ask("/v1/admin/workers/launch", body)
    assert (status, answer["worker_id"]) == (202, "new-0")
    program.wait_until_ready("new-0")
    assert program.ask("/v1/chat/completions", {"model": "new"})[0] == 200
    assert program.stop() == 0
    program = gateway("", port).wait_until_ready("new-0")
    family = program.descendants()
    assert program.ask_by("DELETE", "/v1/admin/workers/new-0") == (
        200,
        {"worker_id": "new-0", "in_config": False, "stays": False, "state": "stopped"},
    )
    assert not alive(family)
    assert program.ask_by("DELETE", "/v1/admin/workers/new-0")[0] == 404
    status, answer = program.ask("/v1/admin/workers/launch", {"model_name": "x", "modle_path": "/m", "port": "a"})
    assert (status, answer["error"]["code"]) == (400, "bad_request")
    assert "port: must be a whole number" in answer["error"]["message"]
    program.ask("/v1/workers/heartbeat", {"worker_id": "own", "model_name": "o", "host": "127.0.0.1", "port": 9})
    status, answer = program.ask_by("DELETE", "/v1/admin/workers/own")
    assert (status, answer["error"]["code"]) == (409, "not_managed")


def test_delete_waits_for_requests(gateway, tmp_path):
    """A worker that is drained answers what it has, and gets nothing new."""
    program = gateway(worker()).wait_until_ready("m-0")
    answers, body = [], {"model": "m", "until_there": str(tmp_path / "go")}
    asking = threading.Thread(target=lambda: answers.append(program.ask("/v1/chat/completions", body)))
    asking.start()
    program.until(lambda: program.get("/v1/admin/workers/m-0")[1]["in_flight"] == 1)
    stopping = threading.Thread(target=program.ask_by, args=("DELETE", "/v1/admin/workers/m-0?drain_s=600"))
    stopping.start()
    program.until(lambda: program.state("m-0") == "draining")
    assert program.ask("/v1/chat/completions", {"model": "m"})[0] == 503
    (tmp_path / "go").touch()
    stopping.join()
    asking.join()
    assert answers[0][0] == 200


def test_ports_that_collide(gateway):
    """A port that somebody has: refused early, with who has it; started once it is free."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = "[restart]\nfirst_s = 0.3\nlongest_s = 0.3\nattempts_max = 1000\n"
        program = gateway(text + worker(more=f"port = {port}"))
        program.until(lambda: program.get("/v1/admin/workers/m-0")[1]["restarts"] > 0)
        found = program.get("/v1/admin/workers/m-0")[1]
        assert f"Port {port} of 127.0.0.1 is taken by" in found["cause"]
        assert f"process {os.getpid()}" in found["cause"]
    program.wait_until_ready("m-0")


def test_two_workers_that_want_one_port(gateway):
    """The first has it, the second says so."""
    port = free_port()
    text = "[restart]\nattempts_max = 1\n" + worker("a", f"port = {port}") + worker("b", f"port = {port}")
    program = gateway(text).wait_until_ready("a-0")
    program.until(lambda: program.state("b-0") == "failed")
    assert f"Port {port} is worker a-0's as well" in program.get("/v1/admin/workers/b-0")[1]["cause"]


def test_a_restarted_gateway_knows_its_registered_workers(start, gateway, tmp_path):
    """A registered worker with a long interval is back at once after a restart of the gateway: it is asked."""
    port = free_port()
    program = gateway("", port)
    heartbeats = start_registering(start, port, 600)
    program.wait_until_ready("w1")
    pid = pid_of(program, "w1")
    program.until(lambda: '"w1"' in (tmp_path / "state/workers.json").read_text())
    program.process.kill()
    program.process.wait()
    program = gateway("", port).wait_until_ready("w1")
    assert pid_of(program, "w1") == pid
    assert heartbeats.process.poll() is None
    assert program.ask("/v1/chat/completions", {"model": "m"})[0] == 200
    program.until(lambda: any("listens on" in line for line in lines_of(program, "w1")))


def test_a_registered_worker_that_fails_leaves_its_reason(start, gateway):
    """Its engine dies: it is shown as failed, with why, and its last lines are there."""
    program = gateway("")
    own = start_registering(start, program.port, 0.3)
    program.wait_until_ready("w1")
    program.until(lambda: lines_of(program, "w1"))
    own.ask("/die", {})
    assert own.process.wait(LIMIT_S) == 70
    program.until(lambda: program.state("w1") == "failed")
    assert program.get("/v1/admin/workers/w1")[1]["cause"] == "The engine died: killed by a test"
    program.until(
        lambda: any("killed by a test" in line or "the engine ended" in line for line in lines_of(program, "w1"))
    )


def test_another_gateway_is_not_let_in(gateway, start, tmp_path):
    """Two gateways with one state directory: the second says who has it, and ends."""
    gateway("")
    second = start(ichat("gateway", "-c", str(tmp_path / "ichat.toml")))
    assert second.process.wait(LIMIT_S) == 69
    assert "Another gateway (process" in second.text()


def test_a_network_cut_between_worker_and_gateway(start, gateway):
    """Beats do not arrive: unhealthy, no requests; when they do again: ready, the same process, and it was not restarted."""
    program = gateway('[security]\njoin_token_env = "ICHAT_JOIN_TOKEN"\n', ICHAT_JOIN_TOKEN="sk-token-0123456789")
    proxy = Proxy(program.port)
    own = start_registering(start, proxy.port, 0.3, ICHAT_JOIN_TOKEN="sk-token-0123456789")
    program.wait_until_ready("w1")
    pid = pid_of(program, "w1")
    proxy.cut()
    program.until(lambda: program.state("w1") == "unhealthy")
    assert program.ask("/v1/chat/completions", {"model": "m"})[0] == 503
    own.until(lambda: "accepts no heartbeats" in own.text())  # it may be slow to send one
    assert own.process.poll() is None
    proxy.mend()
    program.wait_until_ready("w1")
    assert pid_of(program, "w1") == pid
    own.until(lambda: "accepts heartbeats again" in own.text())
    proxy.close()


def test_a_network_cut_between_gateway_and_worker(start, gateway):
    """A request under way gets an error, later ones are refused with the reason, and it heals by itself."""
    program = gateway("connect_s = 1\n")
    own = start(ichat("worker", "-be", "fake", "--model", "/m", "-n", "m", "--port", "0")).wait_for_port()
    proxy = Proxy(own.port)
    heartbeat = {
        "worker_id": "w1",
        "model_name": "m",
        "host": "127.0.0.1",
        "port": proxy.port,
        "heartbeat_interval": 60,
    }
    program.ask("/v1/workers/heartbeat", heartbeat)
    program.until(lambda: program.ask("/v1/chat/completions", {"model": "m"})[0] == 200)
    with stream(program, {"model": "m", "wait_s": 3600}) as sock:
        program.until(lambda: program.get("/v1/admin/workers/w1")[1]["in_flight"] == 1)
        proxy.cut()
        assert b"upstream_failed" in sock.recv(65536)
    assert program.ask("/v1/chat/completions", {"model": "m"})[0] in (502, 503)
    proxy.mend()
    program.ask("/v1/workers/heartbeat", heartbeat)
    assert program.ask("/v1/chat/completions", {"model": "m"})[0] == 200
    proxy.close()


def test_a_full_disk_for_logs(gateway, tmp_path):
    """Nothing waits for it: requests are answered, the buffer goes on, and what the file misses is said in it."""
    program = gateway(worker(more="port = 0")).wait_until_ready("m-0")
    found = program.get("/v1/admin/workers/m-0")[1]
    path, url = pathlib.Path(found["log_file"]), f"http://127.0.0.1:{found['port']}"
    assert path.parent == tmp_path / "state" / "logs"

    def write(text):
        data = json.dumps({"lines": 1, "text": text}).encode()
        urllib.request.urlopen(urllib.request.Request(f"{url}/print", data), timeout=LIMIT_S).read()

    path.unlink()
    path.symlink_to("/dev/full")
    write("into the void")
    program.until(lambda: "cannot be written: No space left on device" in program.text())
    program.until(lambda: any("into the void" in line for line in lines_of(program, "m-0")))
    assert program.ask("/v1/chat/completions", {"model": "m"})[0] == 200
    path.unlink()

    def written():
        write("back again")
        return path.exists() and "back again" in path.read_text()

    program.until(written)
    assert "lines are missing here" in path.read_text()


def test_a_state_directory_that_cannot_be_written(gateway, tmp_path):
    """Workers are started all the same, and started again after a crash; the log says what is not saved."""
    directory = tmp_path / "state"
    (directory / "workers.new").mkdir(parents=True)
    directory.chmod(0o700)
    program = gateway(worker()).wait_until_ready("m-0")
    assert f"{directory} cannot be written: " in program.text()
    os.kill(pid := program.get("/v1/admin/workers/m-0")[1]["pid"], signal.SIGKILL)
    program.until(lambda: program.get("/v1/admin/workers/m-0")[1].get("pid", pid) != pid)
    program.wait_until_ready("m-0")
    assert not (directory / "workers.json").exists()


def test_a_gateway_restart_under_load(gateway):
    """Requests before and after are answered; those under way at the stop too; no worker that is kept is touched."""
    port = free_port()
    text = worker(more='on_gateway_exit = "keep"')
    program = gateway(text, port).wait_until_ready("m-0")
    pid = pid_of(program)
    statuses, stop = [], threading.Event()

    def ask_on():
        while not stop.is_set():
            try:
                statuses.append(program.ask("/v1/chat/completions", {"model": "m", "wait_s": 0.05})[0])
            except OSError:  # no gateway at the moment
                statuses.append(0)
                time.sleep(0.05)

    threads = [threading.Thread(target=ask_on) for _ in range(4)]
    for thread in threads:
        thread.start()
    program.until(lambda: statuses.count(200) > 20)
    assert program.stop() == 0
    program = gateway(text, port).wait_until_ready("m-0")
    good = statuses.count(200)
    program.until(lambda: statuses.count(200) > good + 20)
    stop.set()
    for thread in threads:
        thread.join()
    assert set(statuses) <= {200, 0, 503}, set(statuses)
    assert pid_of(program) == pid


def test_a_hundred_thousand_lines_while_the_reader_sleeps(gateway):
    """From a worker to a follower of the gateway that does not read: bounded, and every line or an exact count."""
    program = gateway(
        "client_stall_s = 3600\n[logs]\nring_lines_max = 5000\necho = false\n" + worker(more="port = 0")
    ).wait_until_ready("m-0")
    found = program.get("/v1/admin/workers/m-0")[1]
    before = psutil.Process(found["pid"]).memory_info().rss
    with socket.create_connection(("127.0.0.1", program.port), LIMIT_S) as sock:
        sock.sendall(b"GET /v1/logs/stream/m-0?tail=0 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        data = json.dumps({"lines": 50_000, "text": "line"}).encode()
        url = f"http://127.0.0.1:{found['port']}/print"
        urllib.request.urlopen(urllib.request.Request(url, data), timeout=LIMIT_S).read()
        urllib.request.urlopen(
            urllib.request.Request(url, json.dumps({"lines": 1, "text": "the last one"}).encode()), timeout=LIMIT_S
        ).read()
        text = b""
        while b"child the last one" not in text[-4096:]:
            more = sock.recv(1 << 20)
            assert more, text[-4096:]
            text += more
    numbers = [json.loads(line[6:])["seq"] for line in text.decode().splitlines() if line.startswith('data: {"seq')]
    lost = sum(json.loads(line[6:])["lost"] for line in text.decode().splitlines() if line.startswith('data: {"lost'))
    assert numbers == sorted(set(numbers))
    assert len(numbers) + lost >= 100_002
    assert psutil.Process(found["pid"]).memory_info().rss - before < 64 * 1024 * 1024


def test_delete_goes_on_without_its_client(gateway, tmp_path):
    """Who asked for it may leave: the worker is drained and ended all the same."""
    program = gateway(worker()).wait_until_ready("m-0")
    with stream(program, {"model": "m", "until_there": str(tmp_path / "go")}):
        program.until(lambda: program.get("/v1/admin/workers/m-0")[1]["in_flight"] == 1)
        with socket.create_connection(("127.0.0.1", program.port)) as sock:
            own = f"authorization: Bearer {program.own_secret()}\r\n\r\n".encode()
            sock.sendall(b"DELETE /v1/admin/workers/m-0?drain_s=600 HTTP/1.1\r\nhost: localhost\r\n" + own)
            program.until(lambda: program.state("m-0") == "draining")
        (tmp_path / "go").touch()
        program.until(lambda: program.state("m-0") == "stopped")


def test_a_question_for_a_logs_head_leaves_the_control_plane_well(gateway):
    """HEAD has no body to wait for, and the next request on that connection gets its answer; followers have a bound."""
    program = gateway("[logs]\nfollowers_max = 2\n" + worker()).wait_until_ready("m-0")
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", program.port)) as sock:
            sock.sendall(b"HEAD /v1/logs/stream/m-0 HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert sock.recv(65536).startswith(b"HTTP/1.1 200 OK")
        assert program.get("/health")[0] == 200
    following = []
    for _ in range(2):
        sock = socket.create_connection(("127.0.0.1", program.port))
        sock.sendall(b"GET /v1/logs/stream/m-0 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 200 OK")
        following.append(sock)
    with socket.create_connection(("127.0.0.1", program.port)) as sock:
        sock.sendall(b"GET /v1/logs/stream/m-0 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 503")
    assert program.get("/health")[0] == 200
    for sock in following:
        sock.close()


def test_launched_workers_survive_a_gateway_that_is_stopped_at_once(gateway):
    """Stopped while it still ends what the one before left: nothing is forgotten."""
    port = free_port()
    program = gateway("", port)
    for name in "xy":
        body = {"model_name": name, "model_path": "/m", "backend": "fake", "heartbeat_interval": 0.3}
        assert program.ask("/v1/admin/workers/launch", body)[0] == 202
    program.wait_until_ready("x-0").wait_until_ready("y-0")
    os.kill(pid_of(program, "x-0"), signal.SIGSTOP)  # it will not end by itself
    program.process.kill()
    program.process.wait()
    program = gateway("", port)
    program.until(lambda: "is still there" in program.text())
    assert program.stop() == 0
    program = gateway("", port).wait_until_ready("x-0").wait_until_ready("y-0")


def test_a_damaged_state_loses_no_process(gateway, tmp_path):
    """A kept worker that the next gateway cannot know of is not left beside the new one."""
    port = free_port()
    text = worker(more='on_gateway_exit = "keep"\nchildren = 1')
    program = gateway(text, port).wait_until_ready("m-0")
    first = psutil.Process(pid_of(program))
    family = [first, *first.children(recursive=True)]
    program.process.kill()
    program.process.wait()
    (tmp_path / "state/workers.json").write_text("{")
    program = gateway(text, port).wait_until_ready("m-0")
    assert pid_of(program) != first.pid
    assert not alive(family)
    assert "is left of worker m-0" in program.text()
    assert (tmp_path / "state/workers.unread").exists()


def test_the_access_log_follows_its_name(gateway, tmp_path):
    """logrotate moves it away: a new one begins."""
    path = tmp_path / "access.log"
    program = gateway(f'[logs]\naccess_log = "{path}"\n')
    program.until(lambda: program.get("/health")[0] == 200 and path.exists() and path.read_text())
    path.rename(tmp_path / "access.log.1")
    program.until(lambda: program.get("/health")[0] == 200 and path.exists() and path.read_text())


def test_a_worker_that_cannot_start_is_not_launched(gateway):
    """Refused at once, in a sentence that says what to do, and nothing is left of it."""
    program = gateway(worker(more=f"port = {free_port()}")).wait_until_ready("m-0")
    port = program.get("/v1/admin/workers/m-0")[1]["port"]
    body = {"model_name": "new", "model_path": "/m", "backend": "fake", "port": port, "python": "/no/such/python"}
    status, answer = program.ask("/v1/admin/workers/launch", body)
    assert (status, answer["error"]["code"]) == (409, "cannot_start")
    assert f"Port {port} is worker m-0's as well" in answer["error"]["message"]
    assert "There is no interpreter /no/such/python" in answer["error"]["message"]
    assert program.state("new-0") is None


def test_a_kept_worker_that_hangs_is_replaced(gateway):
    """Taken over without a sign of life: it is silent, whatever it was before."""
    port = free_port()
    text = "stuck_s = 2\n" + QUICK + worker(more='on_gateway_exit = "keep"')
    program = gateway(text, port).wait_until_ready("m-0")
    pid = pid_of(program)
    assert program.stop() == 0
    os.kill(pid, signal.SIGSTOP)
    program = gateway(text, port)
    program.until(lambda: "was silent for 2 s" in program.text())
    program.until(lambda: program.state("m-0") == "ready" and pid_of(program) != pid)


def test_the_next_gateway_finds_processes_of_a_dead_worker(gateway):
    """Gateway and worker are killed, a process of the worker's is not: it holds nothing when the worker is started again."""
    port = free_port()
    text = worker(more='on_gateway_exit = "keep"\nleftovers = 1')
    program = gateway(text, port).wait_until_ready("m-0")
    first = psutil.Process(pid_of(program))
    members = [one for one in psutil.process_iter() if _session_of(one) == first.pid and one.pid != first.pid]
    assert members
    program.process.kill()
    program.process.wait()
    first.kill()
    program.until(lambda: not alive([first]))
    assert alive(members)
    program = gateway(text, port).wait_until_ready("m-0")
    assert not alive(members)
    assert "is left of worker m-0" in program.text()


def _session_of(process):
    try:
        return os.getsid(process.pid)
    except OSError:
        return 0
