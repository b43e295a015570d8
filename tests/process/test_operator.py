"""All of the terminal's commands against a real gateway with real worker processes, as an operator types them."""

import json
import os
import signal
import subprocess

import pytest
from support.deployments import worker
from support.programs import LIMIT_S, ROOT, alive, ichat


@pytest.fixture
def operate(gateway):
    """A gateway with one worker, and `operate("stop", "m-0")`, which gives exit code, output and errors.

    It reloads only when it is told to, and starts nothing again while the test looks.
    """
    text = "[restart]\nfirst_s = 3600\nlongest_s = 3600\n" + worker()
    program = gateway(text, settings="watch_config = false\n").wait_until_ready("m-0")

    def run(*words, code=0):
        command = ichat(*words, "--gateway", f"http://127.0.0.1:{program.port}")
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == code, done
        return done.stdout

    run.program = program
    return run


def environment():
    path = os.environ["XDG_STATE_HOME"]
    return {
        "PATH": "/usr/bin:/bin", "PYTHONPATH": "tests/support/fake_engine", "COLUMNS": "200", "NO_COLOR": "1",
        "XDG_STATE_HOME": path,
    }  # fmt: skip


def test_tables(operate):
    """What is there, for people, and for programs with --json."""
    out = operate("workers")
    assert "m-0" in out
    assert "ready" in out
    data = json.loads(operate("workers", "--json"))["data"]
    assert [(one["worker_id"], one["state"], one["managed"]) for one in data] == [("m-0", "ready", True)]
    assert json.loads(operate("workers", "m-0", "--json"))["worker_id"] == "m-0"
    assert "/m" in operate("worker-show", "m-0")
    status = json.loads(operate("status", "--json"))
    assert status["workers"] == {"ready": 1}
    assert status["resources"]["memory"]["total_bytes"] > 0
    model = {"id": "m", "workers": 1, "in_flight": 0, "circuits_open": 0, "queued": 0}
    assert status["models"] == [{**model, "waiting_s": None, "loaded": None, "copies": None}]
    assert "ready" in operate("status")
    assert [one["id"] for one in json.loads(operate("models", "--json"))["data"]] == ["m"]
    assert "m" in operate("models")
    assert json.loads(operate("explain", "m", "--json"))["chosen"] == "m-0"
    assert "It goes to m-0: no other is available now." in operate("explain", "m", "Hello.")
    operate("explain", "no-such", code=1)
    operate("workers", "no-such", code=1)


def test_launch_watch_and_stop(operate):
    """A worker is launched, seen through until it is ready, talked to, and stopped; one that fails says why."""
    out = operate(
        "launch",
        "/m",
        "--backend",
        "fake",
        "--model-name",
        "new",
        "--load-s",
        "0.5",
        "--heartbeat-interval",
        "20",
        "--wait",
    )
    assert "new-0" in out
    assert operate.program.state("new-0") == "ready"
    family = [one for one in operate.program.descendants() if "--worker-id=new-0" in one.cmdline()]
    assert len(family) == 1
    answer = json.loads(operate("stop", "new-0", "--json"))
    assert answer == {"worker_id": "new-0", "state": "stopped", "in_config": False, "stays": False}
    assert not alive(family)
    assert operate.program.state("new-0") is None
    launched = json.loads(operate("launch", "/m", "--backend", "fake", "--model-name", "x", "--fail", "--json"))
    assert launched["worker_id"] == "x-0"
    operate.program.until(lambda: operate.program.get("/v1/admin/workers/x-0")[1]["cause"])
    assert operate.program.state("x-0") == "restarting"
    assert "no such weights" in operate("workers")


def test_a_worker_of_the_configuration_stays_stopped_until_it_is_started(operate):
    """It is listed as stopped, over reloads as well; requests for its model are refused with that reason."""
    url = f"http://127.0.0.1:{operate.program.port}"
    done = subprocess.run(
        ichat("stop", "m-0", "--json", "--gateway", url),
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == {"worker_id": "m-0", "in_config": True, "stays": True, "state": "stopped"}
    assert done.stderr.endswith(  # behind its state, if slow
        "It stays stopped until `./ichat.pyz start m-0`, or until its table in the file changes.\n"
    )
    assert operate.program.state("m-0") == "stopped"
    assert "an operator has stopped it" in operate("reload")
    assert operate.program.state("m-0") == "stopped"
    status, answer = operate.program.ask("/v1/chat/completions", {"model": "m", "messages": []})
    assert (status, answer["error"]["code"]) == (503, "model_not_ready")
    assert "an operator has stopped it" in answer["error"]["message"]
    operate("restart", "m-0", code=1)
    assert json.loads(operate("stop", "m-0", "--json"))["stays"]
    operate("start", "m-0")
    operate.program.wait_until_ready("m-0")
    operate("start", "m-0", code=1)


def test_a_worker_is_restarted_and_drained(operate):
    """A restart is another process; a drained worker gets no requests until it is resumed."""
    pid = operate.program.get("/v1/admin/workers/m-0")[1]["pid"]
    operate("restart", "m-0", "--drain-s", "0")
    operate.program.until(lambda: operate.program.get("/v1/admin/workers/m-0")[1].get("pid", pid) not in (pid, None))
    operate.program.wait_until_ready("m-0")
    assert operate("drain", "m-0").split() == ["m-0", "draining"]
    status, answer = operate.program.ask("/v1/chat/completions", {"model": "m", "messages": []})
    assert (status, answer["error"]["code"]) == (503, "model_not_ready")
    assert operate("resume", "m-0").split() == ["m-0", "ready"]
    operate("resume", "m-0", code=1)
    assert "0" in operate("chat", "m", "count, please")


def test_the_chat_command_streams_an_answer(operate):
    """One question, one answer."""
    assert "0" in operate("chat", "m", "count, please")
    operate("chat", "unknown", "hello", code=1)


def test_requests_that_have_ended(operate):
    """A list of them, the timeline of each by its id, and a sentence for an id that nothing has."""
    operate("chat", "m", "hello")
    [one] = json.loads(operate("requests", "--done", "--json"))["requests"]
    assert (one["model"], one["worker"], one["status"]) == ("m", "m-0", 200)
    assert one["id"] in operate("requests", "--done", "--model", "m")
    assert one["id"] not in operate("requests", "--failed")
    assert "until the first token" in operate("requests", one["id"])
    operate("requests", "no-such", code=1)


def test_logs(operate):
    """History for people and for programs, and following until Ctrl-C."""
    assert "listens on" in operate("logs", "m-0")
    assert len(operate("logs", "--tail", "2", "m-0").splitlines()) == 2
    lines = [json.loads(line) for line in operate("logs", "m-0", "--json").splitlines()]
    assert any("listens on" in line.get("line", "") for line in lines)
    command = ichat("logs", "-f", "m-0", "--gateway", f"http://127.0.0.1:{operate.program.port}")
    following = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with following:
        assert following.stdout is not None
        assert following.stdout.readline()
        following.send_signal(signal.SIGINT)
        following.stdout.read()
        assert following.wait(LIMIT_S) == 130


@pytest.mark.parametrize(("attempts_max", "state", "code"), [(5, "restarting", 0), (1, "failed", 1)])
def test_logs_of_a_worker_that_cannot_be_started_say_why(gateway, attempts_max, state, code):
    """At once, followed or not, while it waits for its next attempt; and after the last attempt."""
    text = f"[restart]\nfirst_s = 3600\nlongest_s = 3600\nattempts_max = {attempts_max}\n"
    program = gateway(text + worker(more='python = "/no/python"'))
    program.until(lambda: program.state("m-0") == state)
    why = f"m-0 has no lines yet: it is {state}, since it cannot be started: There is no interpreter /no/python"

    def asked(*flags):
        return subprocess.Popen(
            ichat("logs", *flags, "m-0", "--gateway", f"http://127.0.0.1:{program.port}"),
            cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    with asked() as shown, asked("-f") as following:
        out, err = shown.communicate(timeout=LIMIT_S)
        assert (shown.returncode, out, err.startswith(why)) == (code, "", True)
        said = following.stderr.readline()
        following.send_signal(signal.SIGINT)
        assert following.communicate(timeout=LIMIT_S)[0] == ""
    assert said.startswith(why)
    assert said.endswith("Its lines are shown as soon as there are any.\n") == (state == "restarting")


def test_reload(operate, tmp_path):
    """The plan, and then its execution."""
    path = tmp_path / "ichat.toml"
    path.write_text(path.read_text().replace("stop_s = 6", "stop_s = 7\nqueue_s = 9"))
    plan = json.loads(operate("reload", "--dry-run", "--json"))
    assert not plan["applied"]
    assert {"action": "update", "what": "timeouts.queue_s", "why": "queue_s: 30.0 -> 9.0"} in plan["plan"]
    assert "untouched" in operate("reload")
