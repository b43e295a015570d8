"""`run`: from nothing to a conversation, and nothing is left behind."""

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest
from support.deployments import free_port
from support.programs import LIMIT_S, ROOT, Program, alive, ichat
from support.terminals import Pty


@pytest.fixture(name="site")
def site_fixture(tmp_path):
    """A directory with a configuration and a model; what still runs there at the end is killed."""
    port = free_port()
    (tmp_path / "tiny").mkdir()
    (tmp_path / "ichat.toml").write_text(
        f'[server_settings]\nport = {port}\nstate_directory = "{tmp_path}/state"\n'
        "[timeouts]\nstop_s = 6\n[restart]\nfirst_s = 0.2\n"
    )
    yield tmp_path
    for process in of(tmp_path):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def of(directory):
    """Return the processes that work in a directory, or have it on their command line."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and (
                process.cwd() == str(directory) or any(str(directory) in word for word in process.cmdline())
            ):
                found.append(process)
    return alive(found)


def run(site, *words):
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests/support/fake_engine"}
    env.pop("ICHAT_GATEWAY", None)
    return subprocess.run(
        ichat("run", *words), cwd=site, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def on_terminal(site, *words):
    return contextlib.closing(Pty(["run", *words], cwd=site, ICHAT_GATEWAY=""))


def test_one_answer_from_nothing(site):
    """A gateway is started by the file that is here, the model is launched, and all of it ends with the answer."""
    done = run(site, "tiny", "hi", "-be", "fake")
    assert (done.returncode, done.stdout) == (0, "0 1 2 \n"), done.stderr
    assert "Starting a gateway at http://127.0.0.1:" in done.stderr
    assert "tiny-0: starting" in done.stderr
    assert of(site) == []
    assert json.loads((site / "state/workers.json").read_text())["started"] == []


def test_a_conversation_and_its_end(site):
    """Every phase is told, a conversation follows, and its end ends the gateway and its worker."""
    with on_terminal(site, "tiny", "-be", "fake", "--", "--load-s", "2") as screen:
        screen.until("the gateway is starting")
        screen.until(r"tiny-0: (starting|loading)")
        screen.until(r"> $")
        assert len(of(site)) >= 3
        screen.type("hi\n")
        screen.until(r"0 1 2")
        screen.until(r"> $")
        screen.type("/bye\n")
        screen.until("the gateway is ending")
        assert screen.end() == 0
    assert of(site) == []


def test_ctrl_c_while_it_loads(site):
    """Nothing is left."""
    with on_terminal(site, "tiny", "-be", "fake", "--", "--load-s", "600") as screen:
        screen.until(r"tiny-0: loading")
        screen.type("\x03")
        assert screen.end() == 130
        assert "Traceback" not in screen.text
    assert of(site) == []


def test_a_command_that_is_killed_leaves_nothing(site):
    """The gateway ends with it."""
    with on_terminal(site, "tiny", "-be", "fake") as screen:
        screen.until(r"> $")
        left = of(site)
        screen.process.kill()
        screen.process.wait()
        psutil.wait_procs(left, LIMIT_S)
    assert of(site) == []


def test_a_running_gateway_is_used(site, tmp_path):
    """What is launched there stays, and is used again; what does not get ready is taken back; a name must be known."""
    gateway = Program(
        ichat("gateway", "-c", str(site / "ichat.toml")),
        tmp_path / "log",
        {"PYTHONPATH": f"{ROOT}/tests/support/fake_engine"},
    )
    try:
        gateway.wait_for_port()
        done = run(site, "tiny", "hi", "-be", "fake")
        assert (done.returncode, done.stdout) == (0, "0 1 2 \n"), done.stderr
        assert "Starting a gateway" not in done.stderr
        assert "Worker tiny-0 goes on when this ends; `ichat.pyz stop tiny-0 -c ichat.toml` ends it." in done.stderr
        assert gateway.state("tiny-0") == "ready"
        for known in ("tiny", str(site / "tiny")):
            done = run(site, known, "hi")
            assert (done.returncode, done.stdout) == (0, "0 1 2 \n"), done.stderr
        (site / "other").mkdir()
        done = run(site, "other", "hi", "-be", "fake", "--", "--fail")
        assert done.returncode == 1
        assert re.search(r"Worker other-0 .*no such weights", done.stderr), done.stderr
        assert [one["worker_id"] for one in gateway.get("/v1/admin/workers")[1]["data"]] == ["tiny-0"]
        with on_terminal(site, "other", "-be", "fake", "--", "--load-s", "600") as screen:
            screen.until(r"other-\d: loading")
            screen.type("\x03")
            assert screen.end() == 130
        assert [one["worker_id"] for one in gateway.get("/v1/admin/workers")[1]["data"]] == ["tiny-0"]
        done = run(site, "tinny", "hi")
        assert done.returncode == 64
        assert done.stderr.startswith(
            "ichat.pyz run: tinny is no model of this gateway (did you mean tiny?) and no dir"
        )
        assert gateway.stop(signal.SIGTERM) == 0
    finally:
        gateway.end()


def test_a_gateway_that_is_kept(site):
    """It goes on with its worker, and can be ended."""
    done = run(site, "tiny", "hi", "-be", "fake", "--keep")
    assert (done.returncode, done.stdout) == (0, "0 1 2 \n"), done.stderr
    pid = int(re.search(r"`kill (\d+)` ends it", done.stderr)[1])
    left = of(site)
    assert pid in [one.pid for one in left]
    os.kill(pid, signal.SIGTERM)
    assert psutil.wait_procs(left, LIMIT_S)[1] == []


def test_a_gateway_that_cannot_start(site):
    """Its last words say why, and its exit code is that of the command."""
    (site / "ichat.toml").write_text((site / "ichat.toml").read_text() + '[security]\nadmin_key_env = "NOT_THERE"\n')
    done = run(site, "tiny", "hi")
    assert (done.returncode, done.stdout) == (64, "")
    assert "NOT_THERE" in done.stderr


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that has no model."""

    class Replies(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response_only(404)
            self.end_headers()

        def log_message(self, *_):
            """Write nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Replies) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()


def refused_at_once(site, model):
    """Return the refusal of a model, if no gateway was started for it."""
    done = run(site, model, "hi")
    assert (done.returncode, done.stdout, "Starting" in done.stderr) == (64, "", False), done.stderr
    assert not (site / "state").exists()
    return done.stderr


def test_a_model_that_is_nowhere_starts_no_gateway(site, hub, monkeypatch):
    """A name that neither this machine nor the hub has is refused as before a worker's start."""
    for model in ("org/wrong", "wrong"):
        sentence = rf"There is no model {model} on http://127.0.0.1:\d+ and no such directory here: correct model_path"
        assert re.match(sentence, refused_at_once(site, model))
    assert refused_at_once(site, "./wrong") == f"There is no model ./wrong (seen from {site}): correct MODEL.\n"
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "Starting a gateway" in run(site, "org/wrong", "hi").stderr  # it may be there


def test_a_name_of_the_configuration_starts_a_gateway(site, hub):
    """Also a name that stands for others, and the name of a worker that an earlier gateway has launched."""
    with (site / "ichat.toml").open("a") as file:
        file.write('[[external_routes]]\nmodel_name = "far"\napi_base = "http://127.0.0.1:9/v1"\n')
        file.write('[[models]]\nname = "gpt-*"\ntargets = [{ model = "far" }]\n')
    (site / "state").mkdir(mode=0o700)
    for name in ("far", "gpt-5", "x"):
        (site / "state/workers.json").write_text('{"started": [{"worker_id": "x-0", "spec": {"model_name": "x"}}]}')
        assert "Starting a gateway" in run(site, name, "hi").stderr
