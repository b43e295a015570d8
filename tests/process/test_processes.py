"""Gateway and workers as real processes, with a fake engine: nothing is left behind, and every end has a reason."""

import json
import pathlib
import signal
import socket
import ssl
import threading
import urllib.error
import urllib.request

import pytest
import trustme
from support.deployments import free_port
from support.programs import LIMIT_S, alive, ichat


@pytest.fixture
def start_gateway(start, tmp_path):
    """Start a gateway with this configuration."""

    def run(text, port=0, settings=""):
        path = tmp_path / "ichat.toml"
        path.write_text(f"[server_settings]\nport = {port}\n{settings}[timeouts]\nstop_s = 10\ndrain_s = 3600\n{text}")
        return start(ichat("gateway", "-c", str(path))).wait_for_port()

    return run


MANAGED = """
[[managed_workers]]
model_name = "org/m"
model_path = "/m"
backend = "fake"
heartbeat_interval = 20
"""


def post(program, path):
    """Send a request and do not wait for its answer."""
    sock = socket.create_connection(("127.0.0.1", program.port))
    sock.sendall(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{{}}".encode())
    return sock


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_managed_worker_serves_and_ends_with_its_gateway(start_gateway, number):
    """From a configuration to an answer; a signal ends the gateway, the worker and the engine's children, with exit code 0."""
    gateway = start_gateway(MANAGED + "children = 2\n").wait_until_ready("org-m-0")
    status, answer = gateway.ask("/v1/chat/completions", {"model": "org/m"})
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "hello")
    worker = gateway.get("/v1/admin/workers/org-m-0")[1]
    assert (worker["managed"], worker["model_path"], worker["args"]["children"]) == (True, "/m", 2)
    family = gateway.descendants()
    assert len(family) >= 3
    assert gateway.stop(number) == 0
    assert not alive(family)
    assert "worker org-m-0 has ended, and nothing of it is left" in gateway.text()


def test_a_managed_worker_is_reached_the_short_way(start_gateway):
    """Requests and beats of a worker on the same machine use unix sockets, also where it listens on a port as well."""
    gateway = start_gateway(f"{MANAGED}port = 0\n").wait_until_ready("org-m-0")
    assert gateway.ask("/v1/chat/completions", {"model": "org/m"})[0] == 200
    port = gateway.get("/v1/admin/workers/org-m-0")[1]["port"]
    socket.create_connection(("127.0.0.1", port)).close()
    remote = {found.raddr.port for found in gateway.family.net_connections("tcp") if found.raddr}
    assert port not in remote


def test_a_managed_worker_stands_back(start_gateway):
    """Where the kernel shares processors between sessions, a busy worker must not keep its gateway waiting."""
    gateway = start_gateway(MANAGED * 3)
    names = [f"org-m-{number}" for number in range(3)]
    pids = [gateway.wait_until_ready(name).get(f"/v1/admin/workers/{name}")[1]["pid"] for name in names]
    groups = [pathlib.Path(f"/proc/{pid}/autogroup") for pid in pids]
    if not groups[0].exists():
        pytest.skip("this kernel has no autogroups")
    gateway.until(lambda: all(group.read_text().endswith(" nice 5\n") for group in groups))
    assert len({group.read_text() for group in groups}) == 3
    assert pathlib.Path(f"/proc/{gateway.process.pid}/autogroup").read_text().endswith(" nice 0\n")


def test_the_gateways_bounds_are_its_workers(start_gateway):
    """What the gateway lets through its worker takes; secrets among the arguments are not in the log."""
    text = MANAGED + 'secret_token = "hush"\n'
    gateway = start_gateway(text + "[limits]\nbody_bytes_max = 300000000\nconnections_max = 9000\n")
    gateway.until(lambda: "starting worker" in gateway.text())
    for flag in ("--body-bytes-max=300000000", "--connections-max=9000", "--secret-token=***"):
        assert flag in gateway.text()
    assert "hush" not in gateway.text().partition("refuse")[0].partition("unrecognized")[0]


def test_managed_workers_behind_an_encrypted_front_door(start_gateway, tmp_path):
    """With TLS on the port, workers register all the same: their beats do not come in through it."""
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "all.pem"))
    context = ssl.create_default_context()
    authority.configure_trust(context)
    files = f'tls_certificate = "{tmp_path}/all.pem"\ntls_key = "{tmp_path}/all.pem"\n'
    gateway = start_gateway(MANAGED, settings=files)
    body = json.dumps({"model": "org/m"}).encode()

    def chat():
        url, json_ = f"https://localhost:{gateway.port}/v1/chat/completions", {"content-type": "application/json"}
        request = urllib.request.Request(url, body, json_)
        try:
            return urllib.request.urlopen(request, context=context).status
        except urllib.error.HTTPError as error:
            return error.code

    gateway.until(lambda: chat() == 200)
    assert gateway.stop() == 0


def test_a_killed_gateway_leaves_nothing(start_gateway):
    """After SIGKILL of the gateway its worker ends by itself, and the engine's children with it."""
    gateway = start_gateway(MANAGED + "children = 2\n").wait_until_ready("org-m-0")
    family = gateway.descendants()
    gateway.process.kill()
    gateway.process.wait()
    gateway.until(lambda: not alive(family))


def test_a_killed_worker_leaves_nothing_and_its_reason(start_gateway):
    """After SIGKILL of the worker its children are gone; operators get the reason, and it is not tried again."""
    restart = "[restart]\nattempts_max = 1\n"
    gateway = start_gateway(restart + MANAGED + "children = 2\n").wait_until_ready("org-m-0")
    worker = gateway.descendants()[0]
    children = worker.children(recursive=True)
    assert len(children) >= 2
    worker.kill()
    gateway.until(lambda: gateway.state("org-m-0") == "failed")
    gateway.until(lambda: not alive(children))
    assert gateway.get("/v1/admin/workers/org-m-0")[1]["failure"] == "was ended by signal SIGKILL"
    status, answer = gateway.ask("/v1/chat/completions", {"model": "org/m"})
    assert (status, answer["error"]["code"]) == (503, "model_not_ready")
    assert "it has failed" in answer["error"]["message"]
    assert "SIGKILL" not in answer["error"]["message"]


@pytest.mark.parametrize(
    ("more", "reason", "code", "cause", "restarts"),
    [
        ("modle = 1", "ended with exit code 64", 64, "unrecognized arguments: --modle=1", 0),
        ("fail = true", "ended with exit code 70", 70, "The engine failed while loading: no such weights", 1),
        ('backend_args = { load_s = "x" }', "ended with exit code 64", 64, "invalid float value: 'x'", 0),
        ('python = "/no/such/python"', "cannot be started", None, "There is no interpreter /no/such/python", 1),
    ],
)
def test_a_worker_that_cannot_start_says_why(start_gateway, tmp_path, monkeypatch, more, reason, code, cause, restarts):
    """The worker is failed with its reason, a wrong command line at once, the gateway goes on."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "no flags are known"))
    gateway = start_gateway("[restart]\nattempts_max = 2\nfirst_s = 0.1\n" + MANAGED + more)
    gateway.until(lambda: gateway.state("org-m-0") == "failed")
    worker = gateway.get("/v1/admin/workers/org-m-0")[1]
    assert (worker["failure"], worker["exit_code"], worker["restarts"]) == (reason, code, restarts)
    assert cause in worker["cause"]
    assert code is None or any(cause in line for line in worker["last_lines"])
    assert cause in gateway.text()
    assert gateway.get("/health") == (200, {"status": "ok"})


def test_the_same_model_twice_shares_the_load(start_gateway, tmp_path):
    """Two workers of one model have ids of their own, and both get requests."""
    body = {"model": "org/m", "until_there": str(tmp_path / "go")}
    gateway = start_gateway(MANAGED + MANAGED).wait_until_ready("org-m-0").wait_until_ready("org-m-1")
    threads = [threading.Thread(target=gateway.ask, args=("/v1/chat/completions", body)) for _ in range(4)]
    for thread in threads:
        thread.start()
    gateway.until(lambda: [worker["in_flight"] for worker in gateway.get("/v1/admin/workers")[1]["data"]] == [2, 2])
    (tmp_path / "go").touch()
    for thread in threads:
        thread.join()


def test_shutdown_waits_for_exchanges_and_a_second_signal_hurries(start_gateway, tmp_path):
    """A request under way gets its answer; one that takes too long is cut by a second signal."""
    gateway = start_gateway(MANAGED).wait_until_ready("org-m-0")
    answers = []
    body = {"model": "org/m", "until_there": str(tmp_path / "go")}
    asking = threading.Thread(target=lambda: answers.append(gateway.ask("/v1/chat/completions", body)))
    asking.start()
    gateway.until(lambda: gateway.get("/v1/admin/workers/org-m-0")[1]["in_flight"] == 1)
    gateway.process.send_signal(signal.SIGTERM)
    gateway.until(lambda: "draining" in gateway.text())
    (tmp_path / "go").touch()
    assert gateway.process.wait(LIMIT_S) == 0
    asking.join()
    assert answers[0][0] == 200

    gateway = start_gateway(MANAGED).wait_until_ready("org-m-0")
    body = {"model": "org/m", "wait_s": 3600}
    asking = threading.Thread(target=lambda: answers.append(gateway.ask("/v1/chat/completions", body)))
    asking.start()
    gateway.until(lambda: gateway.get("/v1/admin/workers/org-m-0")[1]["in_flight"] == 1)
    family = gateway.descendants()
    gateway.process.send_signal(signal.SIGINT)
    gateway.until(lambda: "draining" in gateway.text())
    assert gateway.stop(signal.SIGINT) == 0
    asking.join()
    assert (answers[1][0], answers[1][1]["error"]["code"]) == (502, "upstream_failed")
    assert not alive(family)


def test_a_worker_registers_by_itself_and_finds_a_restarted_gateway(start, start_gateway):
    """Started by hand, before its gateway: it registers when there is one, and again when that was restarted."""
    port = free_port()
    worker = start(
        ichat("worker", "-be", "fake", "--model", "/m", "-n", "m", "other", "--port", "0", "--hi", "5", "--worker-id", "w1",
              "-ga", f"http://127.0.0.1:{port}")
    ).wait_for_port()  # fmt: skip
    worker.until(lambda: "accepts no heartbeats" in worker.text())
    for _ in range(2):
        gateway = start_gateway("", port).wait_until_ready("w1")
        for name in ("m", "other"):
            assert gateway.ask("/v1/chat/completions", {"model": name})[0] == 200
        gateway.process.kill()
        gateway.process.wait()
    gateway = start_gateway("", port).wait_until_ready("w1")
    assert worker.stop() == 0
    gateway.until(lambda: gateway.state("w1") is None)


def test_a_worker_whose_engine_dies_exits_with_the_reason(start):
    """Its launcher can tell by the exit code, its reader by the last line."""
    worker = start(ichat("worker", "-be", "fake", "--model", "/m", "--port", "0", "--children", "1")).wait_for_port()
    worker.until(lambda: worker.get("/health")[0] == 200)
    family = worker.descendants()
    assert worker.ask("/die", {})[0] == 500
    assert worker.process.wait(LIMIT_S) == 70
    assert worker.text().splitlines()[-1] == "The engine died: killed by a test"
    worker.until(lambda: not alive(family))


def test_a_stuck_engine_does_not_hold_up_the_end(start):
    """An engine that does not react costs the drain and the stop, and not more; a second signal costs nothing."""
    command = ichat("worker", "-be", "fake", "--model", "/m", "--port", "0", "--drain-s", "1", "--stop-s", "1")
    worker = start(command).wait_for_port()
    worker.until(lambda: worker.get("/health")[0] == 200)
    kept = [post(worker, path) for path in ("/wait", "/block")]
    worker.until(lambda: "blocking" in worker.text())
    assert worker.stop() == 0

    worker = start([*command[:-4], "--drain-s", "3600"]).wait_for_port()
    worker.until(lambda: worker.get("/health")[0] == 200)
    kept.append(post(worker, "/wait"))
    worker.until(lambda: worker.ask("/counts", {})[1]["running"] == 1)
    worker.process.send_signal(signal.SIGTERM)
    worker.until(lambda: "told to stop" in worker.text())
    assert worker.stop() == 0
    for sock in kept:
        sock.close()


def test_a_strange_end_of_one_worker_is_its_own(start_gateway):
    """A real-time signal, an environment that no process can have: the worker fails, the gateway and the others go on."""
    strange = MANAGED.replace("org/m", "strange") + 'env = { "A=B" = "x" }\n'
    gateway = start_gateway("[restart]\nattempts_max = 1\n" + MANAGED + strange).wait_until_ready("org-m-0")
    gateway.until(lambda: gateway.state("strange-0") == "failed")
    gateway.descendants()[0].send_signal(signal.SIGRTMIN + 1)
    gateway.until(lambda: gateway.state("org-m-0") == "failed")
    assert gateway.get("/v1/admin/workers/org-m-0")[1]["failure"] == "was ended by signal 35"
    assert gateway.get("/health")[0] == 200


@pytest.mark.parametrize("host", ["::1", "::", "0.0.0.0", "localhost"])
def test_every_address_to_listen_on(start, tmp_path, host):
    """Managed workers find a gateway wherever it listens."""
    path = tmp_path / "ichat.toml"
    path.write_text(f'[server_settings]\nport = 0\nhost = "{host}"\n{MANAGED}')
    gateway = start(ichat("gateway", "-c", str(path))).wait_for_port()
    if host == "::1":
        gateway.host = "[::1]"
    gateway.wait_until_ready("org-m-0")


def test_a_worker_can_be_stopped_while_it_loads(start):
    """A load that cannot be interrupted does not hold up the end."""
    worker = start(ichat("worker", "-be", "fake", "--model", "/m", "--port", "0", "--load-s", "3600")).wait_for_port()
    worker.until(lambda: "loading" in worker.text())
    assert worker.stop() == 0


def test_a_taken_port_ends_the_gateway_with_a_sentence(start, start_gateway):
    """One sentence, and exit code 69."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        worker = start(ichat("worker", "-be", "fake", "--model", "/m", "--port", str(port)))
        assert worker.process.wait(LIMIT_S) == 69
        assert (
            worker.text()
            == f"Cannot listen on 127.0.0.1:{port}: Address already in use; choose another host or port.\n"
        )
