"""The example unit in a real systemd, in namespaces of its own: what it does at a start, a crash, a hang and a stop."""

import contextlib
import http.client
import json
import os
import shutil
import subprocess
import sys

import psutil
import pytest
from support.counting_upstream import CountingUpstream
from support.deployments import free_port
from support.programs import LIMIT_S, ROOT, Program, alive

from ichat.config.process_marks import RELAY_VARIABLE, relays_of

SESSION = """
mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system /run/user/0 && chmod 700 /run/user/0
export XDG_RUNTIME_DIR=/run/user/0 SYSTEMD_UNIT_PATH="$1:"
systemd --user &
wait $!
"""
KEPT = (
    "StartLimitIntervalSec", "Type", "NotifyAccess", "LimitCORE", "Restart", "RestartPreventExitStatus", "RestartSec",
    "KillMode", "TimeoutStopSec", "ExecReload",
)  # fmt: skip
"""The settings of the example that are about the life of the gateway; all others need a machine of its own."""
SUCCESSOR = """
import os, signal, sys
from ichat.service_manager import Notifier
notifier = Notifier.taken_from(os.environ)
child = os.fork()
if child:
    notifier.ready()
    notifier.follow(child)
    os._exit(0)
print(os.getpid(), file=open(sys.argv[1] + ".new", "w"), flush=True)
os.rename(sys.argv[1] + ".new", sys.argv[1])
signal.pause()
"""


class Session:
    """A systemd that has the units of a directory."""

    def __init__(self, directory, log):
        self.directory = directory
        self.program = Program(
            ["unshare", "-m", "-p", "-f", "--mount-proc", "sh", "-c", SESSION, "sh", str(directory)], log
        )
        self.program.until(lambda: self.has_ended() or self.is_running())

    def has_ended(self):
        return self.program.process.poll() is not None

    def is_running(self):
        return bool(self.program.family.children()) and "running" in self.run("is-system-running", check=False)

    def inside(self, *words):
        """Return a command that runs in these namespaces."""
        [first] = self.program.family.children()
        return ["nsenter", "-t", str(first.pid), "-m", "-p", "env", "XDG_RUNTIME_DIR=/run/user/0", *words]

    def run(self, *words, check=True):
        """Run systemctl, and return its output."""
        command = self.inside("systemctl", "--user", *words)
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=check).stdout

    def shown(self, unit, name):
        return self.run("show", "--value", "-p", name, unit).strip()

    def end(self):
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in self.program.family.children():
                process.kill()
        self.program.process.wait(LIMIT_S)


@pytest.fixture
def session(tmp_path):
    """Start a systemd in namespaces of its own."""
    if os.geteuid() != 0 or os.path.exists("/run/systemd/system") or not shutil.which("systemd"):
        pytest.skip("needs root, and systemd on a machine that runs without it")
    units = tmp_path / "units"
    units.mkdir()
    one = Session(units, tmp_path / "systemd.log")
    if one.has_ended():
        pytest.skip(f"systemd does not run here: {one.program.text()[-500:]}")
    yield one
    one.end()


@pytest.fixture
def upstream():
    one = CountingUpstream()
    yield one
    one.close()


@pytest.fixture
def unit(session, upstream, tmp_path):
    """Write the example's unit for this machine, with a watchdog of some seconds; return its name and port."""
    path, port = tmp_path / "ichat.toml", free_port()
    path.write_text(
        f'[server_settings]\nport = {port}\nstate_directory = "{tmp_path}/state"\nrelays = 2\n'
        f"[timeouts]\ndrain_s = 20\n{upstream.route()}"
    )
    lines = (ROOT / "examples/ichat-gateway.service").read_text().splitlines()
    kept = [line for line in lines if line.startswith("[") or line.partition("=")[0] in KEPT]
    command = f"{sys.executable} -m ichat"
    text = "\n".join(kept).replace("[Install]", "")
    text += (
        f"\nWatchdogSec=5\nWorkingDirectory={ROOT}\nExecStart={command} gateway --config {path}"
        f"\nExecStopPost=-{command} sweep --config {path}"
        f"\nStandardOutput=append:{tmp_path}/output\nStandardError=append:{tmp_path}/output\n"
    )
    (session.directory / "ichat-gateway.service").write_text(text)
    session.run("daemon-reload")
    return "ichat-gateway.service", port


def begin_stream(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    body = json.dumps({"model": "m", "stream": True})
    connection.request(
        "POST", "/v1/chat/completions", body, {"content-type": "application/json", "connection": "close"}
    )
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    return response


def status_of(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    connection.request("GET", "/health")
    status = connection.getresponse().status
    connection.close()
    return status


def test_a_unit_outlives_crashes_and_hangs_and_its_stop_leaves_nothing(session, unit, upstream, tmp_path):
    """Start waits for requests; a killed and a stopped gateway begin again beside their relays; a stop takes its time."""
    name, port = unit
    session.run("start", name)
    assert status_of(port) == 200
    output = tmp_path / "output"
    session.program.until(lambda: output.read_text().count("accepts connections") == 2)
    relays = relays_of(f"{tmp_path}/state")
    stream = begin_stream(port)
    session.run("reload", name)
    main = session.shown(name, "MainPID")

    session.run("kill", "--kill-whom=main", "-s", "KILL", name)
    session.program.until(lambda: session.shown(name, "MainPID") not in ("0", main))
    session.program.until(lambda: session.shown(name, "ActiveState") == "active")
    assert session.shown(name, "NRestarts") == "1"

    session.run("kill", "--kill-whom=main", "-s", "STOP", name)
    session.program.until(lambda: session.shown(name, "NRestarts") == "2")
    session.program.until(lambda: session.shown(name, "ActiveState") == "active")
    assert "ended with the result signal" in output.read_text()
    assert "ended with the result watchdog" in output.read_text()
    assert status_of(port) == 200
    assert relays_of(f"{tmp_path}/state") == relays

    left = subprocess.Popen(session.inside(f"{RELAY_VARIABLE}={tmp_path}/state", "sleep", "600"))
    session.program.until(lambda: len(relays_of(f"{tmp_path}/state")) == 3)
    session.run("stop", "--no-block", name)
    session.program.until(lambda: session.shown(name, "ActiveState") == "deactivating")
    upstream.ends.set()
    assert stream.read().endswith(b"data: [DONE]\n\n")
    session.program.until(lambda: session.shown(name, "ActiveState") == "inactive")
    assert session.shown(name, "Result") == "success"
    left.wait(LIMIT_S)
    assert output.read_text().count("ended a relay (process") == 1
    assert alive([psutil.Process(pid) for pid in relays if psutil.pid_exists(pid)]) == []


def test_a_unit_follows_the_process_that_its_main_process_names(session, tmp_path):
    """The old one may end then: the service is active with the new one, and a stop ends that."""
    script = session.directory / "next.py"
    script.write_text(SUCCESSOR)
    (session.directory / "next.service").write_text(
        f"[Service]\nType=notify\nNotifyAccess=main\nKillMode=process\n"
        f"Environment=PYTHONPATH={ROOT}\nExecStart={sys.executable} {script} {tmp_path}/pid\n"
    )
    session.run("daemon-reload")
    session.run("start", "next.service")
    session.program.until((tmp_path / "pid").exists)
    pid = (tmp_path / "pid").read_text().strip()
    session.program.until(lambda: session.shown("next.service", "MainPID") == pid)
    assert session.shown("next.service", "ActiveState") == "active"
    session.run("stop", "next.service")
    assert session.shown("next.service", "Result") == "success"
