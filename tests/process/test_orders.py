"""Workers of other machines, started by orders: what the codes and keys are good for, and what ends with what.

Gateway, guard and worker are processes here; the machines are one.
"""

import json
import pathlib
import signal
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from support.deployments import QUICK, free_port, gateway_fixture, start_fixture, worker
from support.programs import LIMIT_S, alive, ichat, words_of
from support.takeovers import begin

__all__ = ["gateway_fixture", "start_fixture"]

SECRET = "a-variable-of-the-worker"
TOKEN = "the-token-of-all-workers"
RELAYS = pytest.mark.parametrize("settings", ["", "relays = 2\n"], ids=["alone", "relays"])


def order(program, **more):
    """Order a worker and return the answer."""
    table = {"model_name": "m", "model_path": "/m", "backend": "fake", "heartbeat_interval": 0.5, **more}
    status, made = program.ask("/v1/admin/orders", table)
    assert status == 201, made
    return made


def fetch(program, code, start_id):
    return program.ask("/v1/workers/order", {"code": code, "start_id": start_id})


@pytest.fixture(name="guard")
def guard_fixture(start):
    """Start the guard of an order."""

    def run(program, made, **env):
        address = f"http://127.0.0.1:{program.port}"
        return start(ichat("worker", "--order", made["code"], "--gateway-address", address), **env)

    return run


def ready(program, made, first):
    """Wait until an ordered worker is ready, while the program that has started it runs; return the worker."""
    worker_id = made["worker_id"]

    def is_ready():
        assert first.process.poll() is None, first.text()
        return program.state(worker_id) == "ready"

    program.until(is_ready)
    return program.get(f"/v1/admin/workers/{worker_id}")[1]


def shown(program, made):
    """Return an order as operators see it."""
    orders = program.get("/v1/admin/orders")[1]["orders"]
    return next(one for one in orders if one["launch"] == made["launch"])


@RELAYS
def test_an_order_starts_a_worker_and_its_secrets_stay_secret(gateway, guard, tmp_path, settings):
    """It serves with a key of its own; no token, key or variable is on a command line or in a log."""
    secured = f'{QUICK}[security]\njoin_token_env = "TEAM_TOKEN"\n'
    program = gateway(secured, free_port(), settings, TEAM_TOKEN=TOKEN)
    made = order(program, env={"VARIABLE": SECRET})
    first = guard(program, made)
    worker = ready(program, made, first)
    assert program.ask("/v1/chat/completions", {"model": "m"})[0] == 200
    assert psutil.Process(worker["pid"]).environ()["VARIABLE"] == SECRET
    state = pathlib.Path(tmp_path, "state")
    kept = (state / "orders.json").read_text()
    key = kept.partition('"key": "')[2].partition('"')[0]
    assert key
    assert (state / "orders.json").stat().st_mode & 0o077 == 0
    commands = "\n".join(word for one in psutil.process_iter() for word in words_of(one))
    texts = [*(path.read_text(errors="replace") for path in tmp_path.glob("*.log")), commands]
    texts += [str(program.get(f"/v1/admin/{what}")) for what in ("orders", "workers?full=1", "config")]
    for secret in (SECRET, TOKEN, key):
        assert not any(secret in text for text in texts), secret
    status, _ = program.ask_by("DELETE", f"/v1/admin/workers/{made['worker_id']}")
    assert status == 200
    assert first.process.wait(LIMIT_S) == 0
    assert shown(program, made)["ended"] == "was stopped"
    assert program.state(made["worker_id"]) is None


@RELAYS
def test_a_code_is_used_once(gateway, settings):
    """The same process gets the same answer again; others, late ones and wrong codes get none."""
    program = gateway(QUICK, free_port(), settings)
    made = order(program, env={"A": "1"})
    status, found = fetch(program, made["code"], "first")
    assert (status, found["worker_id"], found["worker"]["env"]) == (200, made["worker_id"], {"A": "1"})
    assert fetch(program, made["code"], "first") == (200, found)
    status, refused = fetch(program, made["code"], "second")
    assert (status, refused["error"]["code"]) == (409, "code_used")
    late = order(program, valid_s=0.001)
    assert fetch(program, late["code"], "first")[0] == 410
    assert [fetch(program, "wrong", "first")[0] for _ in range(11)] == [403] * 10 + [429]


def test_the_key_of_an_order_is_for_its_worker_and_launch(gateway):
    """It admits no other worker and no operator, and dies when the worker is ordered again, also for another place."""
    program = gateway(QUICK)
    made = order(program)
    program.key = fetch(program, made["code"], "first")[1]["key"]
    heartbeat = {"model_name": "m", "host": "127.0.0.1", "port": 9}
    path = "/v1/workers/heartbeat"
    assert program.ask(path, {"worker_id": made["worker_id"], **heartbeat})[0] == 200
    assert program.ask(path, {"worker_id": "another", **heartbeat})[0] == 403
    assert program.ask("/v1/workers/heartbea%74", {"worker_id": "another", **heartbeat})[0] in (401, 403)
    assert program.ask("/v1/admin/config/reload", {})[0] == 403
    key, program.key = program.key, ""
    assert program.ask(path, {"worker_id": made["worker_id"], **heartbeat})[0] == 403
    again = order(program, worker_id=made["worker_id"])
    program.key = key
    status, refused = program.ask(path, {"worker_id": made["worker_id"], **heartbeat})
    assert (status, refused["error"]["code"]) == (410, "launch_ended")
    program.key = fetch(program, again["code"], "second")[1]["key"]
    elsewhere = {**heartbeat, "host": "127.0.0.2"}
    assert program.ask(path, {"worker_id": made["worker_id"], **elsewhere})[0] == 200


def test_a_worker_that_cannot_be_called_ends_by_its_next_heartbeat(gateway):
    """The answer says so, also if the gateway has not reached it at its address."""
    program = gateway(QUICK)
    made = order(program)
    heartbeat = {"worker_id": made["worker_id"], "model_name": "m", "host": "127.0.0.1", "port": 9}
    key = fetch(program, made["code"], "first")[1]["key"]

    def send(**more):
        program.key = key
        try:
            status, answer = program.ask("/v1/workers/heartbeat", {**heartbeat, **more})
        finally:
            program.key = ""
        assert status == 200, answer
        return answer

    assert not send()["ends"]
    with ThreadPoolExecutor() as pool:
        path = f"/v1/admin/workers/{made['worker_id']}?drain_s=0"
        ended = pool.submit(request_of(program, "DELETE", path))
        program.until(lambda: send()["ends"])
        send(state="gone")
        assert ended.result() == 200
    assert shown(program, made)["ended"] == "was stopped"


def request_of(program, method, path):
    """Return a function that sends a request with the own secret and returns its status, also in another thread."""
    head = {"authorization": f"Bearer {program.own_secret()}"}
    request = urllib.request.Request(f"http://127.0.0.1:{program.port}{path}", headers=head, method=method)

    def send():
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return answer.status

    return send


def test_another_launch_ends_the_worker(gateway, guard):
    """The worker hears at its next heartbeat that its key is dead, and ends; the new worker has its id."""
    program = gateway(QUICK)
    made = order(program)
    first = guard(program, made)
    pid = ready(program, made, first)["pid"]
    second = guard(program, order(program, worker_id=made["worker_id"]))
    assert first.process.wait(LIMIT_S) == 0
    assert "has ended this launch" in first.text()
    program.until(lambda: program.get(f"/v1/admin/workers/{made['worker_id']}")[1].get("pid") not in (None, pid))
    ready(program, made, second)
    assert second.process.poll() is None


def test_a_killed_worker_is_reported(gateway, guard):
    """The guard clears its processes away, and reports the signal and the last lines; it ends with an error."""
    program = gateway(QUICK)
    made = order(program, backend_args={"children": 2, "leftovers": 1})
    first = guard(program, made)
    worker = psutil.Process(ready(program, made, first)["pid"])
    family = [*first.descendants()]
    worker.kill()
    assert first.process.wait(LIMIT_S) == 70
    assert not alive(family)
    found = program.get(f"/v1/admin/workers/{made['worker_id']}")[1]
    assert (found["state"], found["signal"]) == ("failed", "SIGKILL")
    assert any("listens on" in line for line in found["last_lines"])
    assert shown(program, made)["ended"].startswith("was ended by signal SIGKILL")
    assert program.ask_by("DELETE", f"/v1/admin/workers/{made['worker_id']}")[0] == 200
    assert program.state(made["worker_id"]) is None


def test_a_killed_guard_takes_its_worker_with_it(gateway, guard):
    """Nobody would clear up after the worker."""
    program = gateway(QUICK)
    made = order(program, backend_args={"children": 1})
    first = guard(program, made)
    ready(program, made, first)
    family = first.descendants()
    assert len(family) >= 2
    first.process.kill()
    program.until(lambda: not alive(family))
    program.until(lambda: program.state(made["worker_id"]) is None)


def test_a_guard_ends_on_a_signal_and_with_its_parent(gateway, guard, start):
    """SIGTERM ends the worker in good order; so does the end of the program that has started the guard."""
    program = gateway(QUICK)
    made = order(program)
    first = guard(program, made)
    ready(program, made, first)
    assert first.stop(signal.SIGTERM) == 0
    assert program.state(made["worker_id"]) is None
    assert shown(program, made)["ended"] == "was stopped on its machine"
    again = order(program)
    no_nohup = "signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # with it a guard may outlive its parent
    script = f"import signal, subprocess, sys; {no_nohup}; sys.exit(subprocess.call(sys.argv[1:]))"
    command = ichat("worker", "--order", again["code"], "--gateway-address", f"http://127.0.0.1:{program.port}")
    parent = start([command[0], "-c", script, *command])
    ready(program, again, parent)
    family = parent.descendants()
    parent.process.kill()
    program.until(lambda: not alive(family))
    assert shown(program, again)["ended"] == "was stopped on its machine"


def test_an_ordered_worker_listens_on_a_free_port_of_its_range(gateway, guard):
    """Binding decides; without a free port its end is reported."""
    program = gateway(QUICK)
    first, taken = (free_port() for _ in range(2))
    with socket.create_server(("127.0.0.1", first)):
        refused = order(program, ports=f"{first}-{first}")
        assert guard(program, refused).process.wait(LIMIT_S) == 69
        assert f"No port from {first} to {first} is free on 127.0.0.1" in str(shown(program, refused))
    made = order(program, ports=f"{taken}-{taken}")
    assert ready(program, made, guard(program, made))["port"] == taken
    status, answer = program.ask("/v1/admin/orders", {"model_name": "m", "model_path": "/m", "ports": "5"})
    assert (status, answer["error"]["param"]) == (400, "ports")
    status, answer = program.ask("/v1/admin/orders", {"model_name": "m", "model_path": "/m", "port": 5, "ports": "5-6"})
    assert (status, "exclude each other" in answer["error"]["message"]) == (400, True)


def place(gateway, program, tmp_path, settings="", **given):
    """Return another life of a gateway, in which the places of all orders are these."""
    program.process.kill()
    program.process.wait()
    path = tmp_path / "state" / "orders.json"
    orders = json.loads(path.read_text())
    for one in orders["orders"]:
        one["place"] = given
    path.write_text(json.dumps(orders))
    return gateway(QUICK, program.port, settings)


@RELAYS
def test_an_order_is_fetched_from_its_place_alone(gateway, tmp_path, settings):
    """Another sender gets 403, and every sender 503 while the place is not known; the code is as good as before."""
    program = gateway(QUICK, free_port(), settings)
    made = order(program)
    for senders, expected in (([], 503), (["10.1.2.3"], 403), (["127.0.0.0/8"], 200)):
        program = place(gateway, program, tmp_path, settings, senders=senders)
        assert fetch(program, made["code"], "first")[0] == expected
    program = place(gateway, program, tmp_path, settings, senders=["10.1.2.3"])
    again = order(program)
    program = place(gateway, program, tmp_path, settings, senders=["10.1.2.3"])
    assert [fetch(program, again["code"], "first")[0] for _ in range(11)] == [403] * 10 + [429]


def test_the_engine_of_an_order_has_its_address_and_no_token_of_ray(gateway, guard, tmp_path):
    """An address that cannot be bound is registered all the same; variables of the table stay."""
    program = gateway(QUICK)
    made = order(program, env={"RAY_OWN": "1", "SGLANG_HOST_IP": "127.0.0.9"})
    program = place(gateway, program, tmp_path, address="127.0.0.1")
    first = guard(program, made, RAY_AUTH_TOKEN=SECRET, RAY_JOB_CONFIG_JSON_ENV_VAR=SECRET)
    worker = ready(program, made, first)
    environment = psutil.Process(worker["pid"]).environ()
    assert {name: value for name, value in environment.items() if name.startswith("RAY_")} == {"RAY_OWN": "1"}
    assert (environment["VLLM_HOST_IP"], environment["SGLANG_HOST_IP"]) == ("127.0.0.1", "127.0.0.9")
    assert worker["host"] == "127.0.0.1"


def test_a_guard_ends_with_its_launcher_also_where_hang_ups_are_ignored(gateway, start, tmp_path):
    """Ray's own processes may run under nohup; the order says that the worker ends with them."""
    program = gateway(QUICK)
    made = order(program)
    program = place(gateway, program, tmp_path, ends_with_parent=True)
    script = (
        "import signal, subprocess, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN);"
        " sys.exit(subprocess.call(sys.argv[1:]))"
    )
    command = ichat("worker", "--order", made["code"], "--gateway-address", f"http://127.0.0.1:{program.port}")
    parent = start([command[0], "-c", script, *command])
    ready(program, made, parent)
    family = parent.descendants()
    parent.process.kill()
    program.until(lambda: not alive(family))
    assert shown(program, made)["ended"] == "was stopped on its machine"


def test_a_worker_that_cannot_start_is_reported(gateway, guard):
    """The guard examines its machine before the start; the order shows why, and the exit code whether to try again."""
    program = gateway(QUICK)
    made = order(program, python="/no/such/python")
    first = guard(program, made)
    assert first.process.wait(LIMIT_S) == 64
    assert "/no/such/python" in first.text()
    assert "/no/such/python" in shown(program, made)["ended"]


def test_an_ordered_worker_outlives_a_killed_gateway(gateway, guard):
    """The next gateway knows its key: the same process serves on."""
    program = gateway(QUICK)
    made = order(program)
    first = guard(program, made)
    pid = ready(program, made, first)["pid"]
    program.process.kill()
    program.process.wait()
    second = gateway(QUICK, port=program.port)
    assert ready(second, made, first)["pid"] == pid
    assert second.ask("/v1/chat/completions", {"model": "m"})[0] == 200
    assert second.ask_by("DELETE", f"/v1/admin/workers/{made['worker_id']}")[0] == 200
    assert first.process.wait(LIMIT_S) == 0


def test_an_ordered_worker_outlives_a_takeover(gateway, guard, start, tmp_path):
    """The new process knows the key: the worker serves on, and can be ended."""
    program = gateway(QUICK, free_port())
    made = order(program)
    first = guard(program, made)
    pid = ready(program, made, first)["pid"]
    new = begin(start, tmp_path / "ichat.toml").wait_for_port()
    assert ready(new, made, first)["pid"] == pid
    assert new.ask("/v1/chat/completions", {"model": "m"})[0] == 200
    assert new.ask_by("DELETE", f"/v1/admin/workers/{made['worker_id']}")[0] == 200
    assert first.process.wait(LIMIT_S) == 0


def test_the_command_prints_the_line_that_starts_the_worker(gateway, start):
    """An operator copies it; the list of orders shows what became of it."""
    program = gateway(QUICK)
    place = ["--gateway", f"http://127.0.0.1:{program.port}"]
    made = start(ichat("order", "/m", "--backend", "fake", "--heartbeat-interval", "0.5", *place))
    assert made.process.wait(LIMIT_S) == 0
    line, *notes = made.text().splitlines()
    assert line.startswith("python3 ichat.pyz worker --order order-")
    assert "m-order-0" in notes[0]
    assert "loopback alone" in notes[1]
    first = start(ichat(*line.split()[2:]))
    ready(program, {"worker_id": "m-order-0"}, first)
    listed = start(ichat("orders", *place))
    assert listed.process.wait(LIMIT_S) == 0
    assert "fetched" in listed.text()
    stopped = start(ichat("stop", "m-order-0", *place))
    assert stopped.process.wait(LIMIT_S) == 0
    assert first.process.wait(LIMIT_S) == 0


def test_an_order_that_another_machine_cannot_carry_out_is_refused(gateway):
    """A sentence for each key that has no meaning there, and for an id of another worker; an unused code is withdrawn."""
    program = gateway(QUICK + worker())
    table = {"model_name": "m", "model_path": "/m", "backend": "fake"}
    for more, said in (
        ({"load": "on_demand"}, "leave load out"),
        ({"on_gateway_exit": "keep"}, "leave on_gateway_exit out"),
        ({"share_gpus": True}, "leave share_gpus out"),
        ({"worker_id": "a b"}, "worker_id"),
        ({"valid_s": 0}, "valid_s must be"),
        ({"gpu_id": [0]}, "gpu_id"),
    ):
        status, answer = program.ask("/v1/admin/orders", {**table, **more})
        assert (status, said in answer["error"]["message"]) == (400, True), answer
    status, answer = program.ask("/v1/admin/orders", {**table, "worker_id": "m-0"})
    assert (status, answer["error"]["code"]) == (409, "worker_exists")
    made = order(program)
    assert program.ask_by("DELETE", f"/v1/admin/workers/{made['worker_id']}")[0] == 200
    assert fetch(program, made["code"], "first")[0] == 410
