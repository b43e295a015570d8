"""Models that are loaded on demand, as real processes with a fake engine: when they have a process, and who waits."""

import os
import pathlib
import signal
import threading
import time

import psutil
from support.deployments import free_port, pid_of, stream, worker

ON_DEMAND = 'load = "on_demand"\nmin_loaded_s = 0\n'
ONE_OF_TWO = '[[swap_sets]]\nmembers = ["a", "b"]\n'


def on_demand(name, more=""):
    return worker(name, ON_DEMAND + more)


def engines(tmp_path):
    """Return the workers of this test that have a process, by the tags of all processes: names with their pids."""
    found = {}
    beginning = f"ICHAT_WORKER={tmp_path}/state:".encode()
    for pid in psutil.pids():
        try:
            words = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for word in words:
            if word.startswith(beginning) and psutil.pid_exists(pid):
                found.setdefault(word[len(beginning) :].decode(), set()).add(pid)
    return found


def ask(program, model, **more):
    return program.ask("/v1/chat/completions", {"model": model, **more})


def test_twenty_first_requests_start_one_process(gateway, tmp_path):
    """A cold model has no process; whoever asks at once waits for the one that is started, and all are answered."""
    program = gateway(on_demand("a", "load_s = 0.5") + on_demand("b"))
    assert (program.state("a-0"), program.state("b-0"), engines(tmp_path)) == ("cold", "cold", {})
    statuses = []
    asking = [threading.Thread(target=lambda: statuses.append(ask(program, "a")[0])) for _ in range(20)]
    for one in asking:
        one.start()
    for one in asking:
        one.join()
    assert statuses == [200] * 20
    assert program.text().count("starting worker a-0") == 1
    assert list(engines(tmp_path)) == ["a-0"]
    assert (program.state("a-0"), program.state("b-0")) == ("ready", "cold")
    assert program.get("/v1/admin/workers/a-0")[1]["restarts"] == 0


def test_alternating_requests_never_have_two_processes(gateway, tmp_path):
    """Of a set of one, each request is answered, and at no moment are there processes of both."""
    program = gateway(on_demand("a") + on_demand("b") + ONE_OF_TWO)
    both, stop = [], threading.Event()

    def watch():
        while not stop.is_set():
            found = engines(tmp_path)
            if len(found) > 1:
                both.append(found)
            time.sleep(0.02)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        assert [ask(program, name)[0] for name in "aba"] == [200] * 3
    finally:
        stop.set()
        watching.join()
    assert not both
    assert program.text().count("starting worker") == 3


def test_a_failed_load_answers_every_waiting_request_at_once(gateway, tmp_path):
    """Whoever waits is told so; who comes before the next attempt, at once; after the last one it stays so."""
    text = "[restart]\nfirst_s = 5\nattempts_max = 2\n"
    program = gateway(text + on_demand("a", "load_s = 0.3\nfail = true"))
    answers = []
    asking = [threading.Thread(target=lambda: answers.append(ask(program, "a"))) for _ in range(5)]
    for one in asking:
        one.start()
    for one in asking:
        one.join()
    for status, answer in [*answers, ask(program, "a")]:
        assert (status, answer["error"]["code"]) == (503, "model_not_ready")
        assert "it has failed" in answer["error"]["message"]
        assert "no such weights" not in answer["error"]["message"]
    assert program.text().count("starting worker a-0") == 1
    program.until(lambda: program.state("a-0") == "cold")
    assert ask(program, "a")[0] == 503
    assert program.state("a-0") == "failed"
    assert program.text().count("starting worker a-0") == 2
    assert not engines(tmp_path)


def test_idle_workers_end_and_killed_workers_are_cold(gateway, tmp_path):
    """A process without requests ends after `idle_s`; one that is killed is started again once it is asked for."""
    program = gateway("[restart]\nfirst_s = 0.05\n" + on_demand("a", "idle_s = 0.5\nchildren = 1"))
    assert ask(program, "a")[0] == 200
    program.until(lambda: program.state("a-0") == "cold")
    assert not engines(tmp_path)
    with stream(program, {"model": "a", "wait_s": 3600}) as sock:
        program.until(lambda: program.get("/v1/admin/workers/a-0")[1]["in_flight"] == 1)
        os.kill(pid_of(program, "a-0"), signal.SIGKILL)
        assert b"upstream_failed" in sock.recv(65536)
    program.until(lambda: program.state("a-0") == "cold")
    assert not engines(tmp_path)
    found = program.get("/v1/admin/workers/a-0")[1]
    assert (found["signal"], found["restarts"]) == ("SIGKILL", 0)
    assert ask(program, "a")[0] == 200


def test_a_worker_killed_while_it_loads_is_a_failed_load(gateway, tmp_path):
    """Who waits is told that it failed, operators why, and nothing of the process is left."""
    program = gateway("[restart]\nfirst_s = 30\n" + on_demand("a", "load_s = 3600"))
    answers = []
    asking = threading.Thread(target=lambda: answers.append(ask(program, "a")))
    asking.start()
    program.until(lambda: program.state("a-0") == "loading")
    os.kill(pid_of(program, "a-0"), signal.SIGKILL)
    asking.join()
    assert answers[0][0] == 503
    assert "it has failed" in answers[0][1]["error"]["message"]
    assert program.get("/v1/admin/workers/a-0")[1]["failure"] == "was ended by signal SIGKILL"
    assert program.state("a-0") == "restarting"
    assert not engines(tmp_path)


def test_a_gateway_that_restarts_has_cold_workers_but_for_those_it_adopts(gateway, tmp_path):
    """`keep`: the same process is ready again. `stop`: nothing is left, and the next request is answered."""
    port = free_port()
    text = on_demand("a", 'on_gateway_exit = "keep"') + on_demand("b")
    program = gateway(text, port)
    assert [ask(program, name)[0] for name in "ab"] == [200, 200]
    pid = pid_of(program, "a-0")
    assert program.stop() == 0
    assert list(engines(tmp_path)) == ["a-0"]
    program = gateway(text, port).wait_until_ready("a-0")
    assert (pid_of(program, "a-0"), program.state("b-0")) == (pid, "cold")
    assert [ask(program, name)[0] for name in "ab"] == [200, 200]
    program.process.kill()
    program.process.wait()
    program = gateway(text.replace('on_gateway_exit = "keep"', 'on_gateway_exit = "stop"'), port)
    program.until(lambda: list(engines(tmp_path)) == [])
    program.until(lambda: (program.state("a-0"), program.state("b-0")) == ("cold", "cold"))


def reload(program, tmp_path, old, new):
    path = tmp_path / "ichat.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert program.ask_by("POST", "/v1/admin/config/reload")[0] == 200


def test_a_reload_makes_workers_on_demand_and_back(gateway, tmp_path):
    """What runs is not touched either way; what is cold is started once it is not on demand any more."""
    unwatched = "watch_config = false\n"
    program = gateway(worker("a", 'load = "start"') + on_demand("b"), settings=unwatched).wait_until_ready("a-0")
    pid = pid_of(program, "a-0")
    reload(program, tmp_path, 'load = "start"', 'load = "on_demand"\nidle_s = 3600')
    assert (program.state("a-0"), program.state("b-0")) == ("ready", "cold")
    reload(program, tmp_path, ON_DEMAND, 'load = "start"\n')
    program.wait_until_ready("b-0")
    assert pid_of(program, "a-0") == pid
    reload(program, tmp_path, "idle_s = 3600", "idle_s = 0.1")
    program.until(lambda: program.state("a-0") == "cold")
    reload(program, tmp_path, 'heartbeat_interval = 20\nload = "on_demand"\nidle_s = 0.1', "heartbeat_interval = 19")
    program.wait_until_ready("a-0")
    assert pid_of(program, "a-0") != pid


def test_a_changed_worker_that_is_loaded_is_cold_and_a_removed_one_is_gone(gateway, tmp_path):
    """A changed table: the process ends, the next request gets one of the new table. Who waits for a removed one is told."""
    program = gateway(on_demand("a") + on_demand("b", "load_s = 3600"), settings="watch_config = false\n")
    assert ask(program, "a")[0] == 200
    reload(program, tmp_path, 'model_name = "a"\nmodel_path = "/m"', 'model_name = "a"\nmodel_path = "/n"')
    program.until(lambda: program.state("a-0") == "cold")
    answers = []
    asking = threading.Thread(target=lambda: answers.append(ask(program, "b")[0]))
    asking.start()
    program.until(lambda: program.state("b-0") == "loading")
    assert program.ask_by("DELETE", "/v1/admin/workers/b-0")[0] == 200
    asking.join()
    assert answers == [404]
    assert not engines(tmp_path)
    assert ask(program, "a")[0] == 200
    assert program.get("/v1/admin/workers/a-0")[1]["model_path"] == "/n"


def test_a_model_in_use_keeps_its_room_for_min_loaded_s(gateway, tmp_path):
    """With requests without a pause, another model waits for `min_loaded_s`, and no request under way is cut."""
    program = gateway(on_demand("a", "").replace("min_loaded_s = 0", "min_loaded_s = 2") + on_demand("b") + ONE_OF_TWO)
    assert ask(program, "a")[0] == 200
    loaded_at, stop, statuses = time.monotonic(), threading.Event(), []

    def ask_on():
        while not stop.is_set():
            statuses.append(ask(program, "a", wait_s=0.05)[0])

    asking = [threading.Thread(target=ask_on) for _ in range(2)]
    for one in asking:
        one.start()
    assert ask(program, "b")[0] == 200
    took_s = time.monotonic() - loaded_at
    stop.set()
    for one in asking:
        one.join()
    assert took_s > 1.5
    assert set(statuses) == {200}


def test_a_launched_worker_on_demand_is_cold(gateway, tmp_path):
    """A launch over the API starts no process; the next gateway knows the worker."""
    port = free_port()
    program = gateway("", port)
    body = {"model_name": "new", "model_path": "/m", "backend": "fake", "load": "on_demand"}
    status, answer = program.ask("/v1/admin/workers/launch", body)
    assert (status, answer["worker_id"], answer["state"]) == (202, "new-0", "cold")
    assert ask(program, "new")[0] == 200
    assert program.stop() == 0
    program = gateway("", port)
    program.until(lambda: program.state("new-0") == "cold")
    assert not engines(tmp_path)


def test_engines_sleep_where_that_makes_the_room(gateway, tmp_path):
    """Of two on one GPU, one sleeps while the other serves; a sleep outlasts the gateway, but not kill -9."""
    more = 'gpu_ids = [0]\nwhen_idle = "sleep"\nsleeps = true\non_gateway_exit = "keep"\n'
    head = '[engines.fake]\ndevices = "FAKE_VISIBLE_DEVICES"\n[restart]\nfirst_s = 0.05\n'
    text, port = head + on_demand("a", more) + on_demand("b", more), free_port()
    program = gateway(text, port)
    assert ask(program, "a")[0] == 200
    pid = pid_of(program, "a-0")
    assert ask(program, "b")[0] == 200
    assert (program.state("a-0"), program.state("b-0")) == ("asleep", "ready")
    assert ask(program, "a")[0] == 200
    assert (pid_of(program, "a-0"), program.state("a-0"), program.state("b-0")) == (pid, "ready", "asleep")
    assert program.text().count("starting worker") == 2
    assert program.stop() == 0
    program = gateway(text, port)
    program.until(lambda: (program.state("a-0"), program.state("b-0")) == ("ready", "asleep"))
    os.kill(pid_of(program, "b-0"), signal.SIGKILL)
    program.until(lambda: program.state("b-0") == "cold")
    assert ask(program, "b")[0] == 200
    assert (program.text().count("starting worker"), pid_of(program, "a-0")) == (1, pid)
    assert sorted(engines(tmp_path)) == ["a-0", "b-0"]
