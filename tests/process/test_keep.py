"""`ichat.pyz keep`: a gateway in a container ends in good order or begins again, and its first process stays."""

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
from support.counting_upstream import CountingUpstream
from support.deployments import free_port
from support.programs import LIMIT_S, ROOT, alive, ichat, kept_command

OWN_NAMESPACE = ("unshare", "-p", "-f", "--mount-proc")


@pytest.fixture(params=["child", "process 1"])
def wrapped(request):
    """Return the command in which a keeper is process 1 of a namespace, and in which it is any process."""
    if request.param == "child":
        return ()
    if not shutil.which("unshare") or subprocess.run([*OWN_NAMESPACE, "true"], check=False, timeout=LIMIT_S).returncode:
        pytest.skip("this machine makes no namespace of processes for this user")
    return OWN_NAMESPACE


@pytest.fixture
def upstream():
    one = CountingUpstream()
    yield one
    one.close()


@pytest.fixture
def kept(start, tmp_path, wrapped, upstream):
    """Start a keeper with a gateway that has two relays: `program, keeper = kept()`."""

    def run():
        path, port = tmp_path / "ichat.toml", free_port()
        path.write_text(
            f'[server_settings]\nport = {port}\nstate_directory = "{tmp_path}/state"\nrelays = 2\n{upstream.route("")}'
        )
        program = start([*wrapped, *ichat("keep", "gateway", "-c", path)])
        program.wait_for_port()
        [keeper] = program.family.children() if wrapped else [program.family]
        program.until(lambda: program.text().count("accepts connections") == 2)
        return program, keeper

    return run


def relays_below(process):
    """Return the relays among the children of a process."""
    return [one for one in process.children() if "relay" in one.cmdline()]


def test_a_keeper_imports_neither_trio_nor_the_gateway():
    """It has little that can fail, and little memory."""
    code = "import sys, ichat.roles.keep; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    forbidden = ("trio", "psutil", "attrs", "ichat.roles.gateway", "ichat.http", "ichat.relays", "ichat.config.schema")
    assert [name for name in found.stdout.split() if name.startswith(forbidden)] == []


def test_a_killed_gateway_begins_again_and_an_ordered_stop_ends_all(kept, upstream):
    """The keeper is the parent of its relays then: they go on with a stream. No process is left after the stop."""
    program, keeper = kept()
    [owner] = keeper.children()
    relays = relays_below(owner)
    connection = http.client.HTTPConnection("127.0.0.1", program.port, timeout=LIMIT_S)
    body = json.dumps({"model": "m", "stream": True})
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    stream = connection.getresponse()
    assert stream.readline().startswith(b"data: ")
    owner.kill()
    program.until(lambda: program.text().count(" listens on ") == 2)
    assert "the gateway has ended by signal SIGKILL: it is started again in 0.2 s" in program.text()
    assert program.get("/health")[0] == 200
    assert {one.pid for one in relays_below(keeper)} == {one.pid for one in relays}
    upstream.ends.set()
    assert stream.read().endswith(b"data: [DONE]\n\n")
    connection.close()
    left = keeper.children(recursive=True)
    keeper.send_signal(signal.SIGTERM)
    assert program.process.wait(LIMIT_S) == 0
    assert alive(left) == []
    assert program.text().count("stop signal") == 1


def test_a_killed_keeper_ends_its_container_alone(kept, upstream, wrapped):
    """The kernel ends all processes with process 1, and the next start serves. Elsewhere the gateway goes on."""
    program, keeper = kept()
    left = keeper.children(recursive=True)
    keeper.kill()
    if wrapped:
        assert psutil.wait_procs(left, LIMIT_S)[1] == []
        program, keeper = kept()
        assert program.get("/health")[0] == 200
        keeper.send_signal(signal.SIGTERM)
        assert program.process.wait(LIMIT_S) == 0
        return
    program.process.wait(LIMIT_S)
    assert program.ask("/v1/chat/completions", {"model": "m"})[0] == 200
    assert {one.pid for one in alive(left)} == {one.pid for one in left}
    (owner,) = [one for one in left if "relay" not in one.cmdline()]
    owner.send_signal(signal.SIGTERM)
    assert psutil.wait_procs(left, LIMIT_S)[1] == []


def test_a_wrong_configuration_is_not_tried_again(start, tmp_path, wrapped):
    """The exit code and the sentence are the gateway's."""
    (tmp_path / "ichat.toml").write_text("[server_settings]\nport = -1\n")
    program = start([*wrapped, *ichat("keep", "gateway", "-c", tmp_path / "ichat.toml")])
    assert program.process.wait(LIMIT_S) == 64
    assert "is started again" not in program.text()


def test_a_keeper_keeps_gateways_only(start):
    program = start(ichat("keep", "worker"))
    assert program.process.wait(LIMIT_S) == 64
    assert program.text().count("\n") == 1
    assert "ichat.pyz keep gateway -c FILE" in program.text()


SCRIPT = """
import os, pathlib, signal, sys, time
from ichat.service_manager import Notifier
notifier = Notifier.taken_from(os.environ)
starts = pathlib.Path(sys.argv[1], "starts")
starts.open("a").write("x")
first = starts.read_text() == "x"
"""


@pytest.fixture
def keeps(start, tmp_path):
    """Start a keeper with a program in the gateway's place: `program = keeps(text, watchdog_s)`."""

    def run(text, watchdog_s=60.0):
        command = [sys.executable, "-c", SCRIPT + text, tmp_path]
        return start(kept_command(watchdog_s, command), PYTHONPATH=ROOT)

    return run


def test_a_silent_gateway_is_killed_and_begins_again(keeps):
    """One that reports its life within the time is not."""
    program = keeps("notifier.ready()\nif first: signal.pause()\nsys.exit(0)\n", 0.3)
    assert program.process.wait(LIMIT_S) == 0
    assert "the gateway was silent for 0.3 s: it is killed" in program.text()
    assert "ended by signal SIGKILL" in program.text()


def test_a_gateway_that_is_not_ready_yet_may_be_silent(keeps, tmp_path):
    """The watchdog begins with its readiness: the program is silent for longer, and is started once."""
    text = "end = time.monotonic() + 0.5\nwhile time.monotonic() < end: time.sleep(0.05)\nsys.exit(0)\n"
    assert keeps(text, 0.1).process.wait(LIMIT_S) == 0
    assert (tmp_path / "starts").read_text() == "x"


def test_the_end_of_another_main_process_is_that_of_the_gateway(keeps):
    """After MAINPID the first may end; the code of the second counts."""
    text = (
        "child = os.fork()\n"
        "if child:\n    notifier.follow(child)\n    os._exit(0)\n"
        "while os.getppid() != int(os.environ['KEEPER']): time.sleep(0.01)\n"
        "os._exit(64)\n"
    )
    program = keeps("os.environ['KEEPER'] = str(os.getppid())\n" + text)
    assert program.process.wait(LIMIT_S) == 64


def test_the_end_of_another_main_process_counts_although_both_have_ended(keeps):
    """The keeper stands still meanwhile, so that it sees the message and both ends at once."""
    text = (
        "import signal\n"
        "os.kill(os.getppid(), signal.SIGSTOP)\n"
        "child = os.fork()\n"
        "if child:\n    notifier.follow(child)\n    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)\n    os._exit(0)\n"
        "os._exit(64)\n"
    )
    program = keeps(text)
    program.until(lambda: [one.status() for one in program.family.children(recursive=True)] == ["zombie"] * 2)
    program.process.send_signal(signal.SIGCONT)
    assert program.process.wait(LIMIT_S) == 64


def test_messages_of_other_processes_do_not_count(keeps):
    """Otherwise any child of the gateway could say that another process is the gateway."""
    text = (
        "child = os.fork()\n"
        "if not child:\n    notifier.follow(os.getpid())\n    os._exit(64)\n"
        "os.waitpid(child, 0)\nsys.exit(0)\n"
    )
    assert keeps(text).process.wait(LIMIT_S) == 0


def test_the_code_after_a_stop_is_that_of_the_gateway(keeps, tmp_path):
    """It is not started again, whatever the code is."""
    program = keeps(
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "if not first: os.kill(os.getppid(), signal.SIGTERM)\n"
        "end = time.monotonic() + 60\n"
        "while not first and time.monotonic() < end: time.sleep(0.01)\n"
        "sys.exit(1)\n"
    )
    assert program.process.wait(LIMIT_S) == 7
    assert (tmp_path / "starts").read_text() == "xx"


def test_a_stop_during_the_pause_ends_the_keeper(keeps):
    """A gateway that has not begun by then does not begin; one that has just begun ends by the signal."""
    program = keeps("sys.exit(1)\n")
    program.until(lambda: "is started again in 1.6 s" in program.text())
    assert program.stop() in (0, 143)


def test_orphans_are_reaped(keeps, tmp_path):
    """A process that has lost its parent leaves no zombie."""
    text = (
        "middle = os.fork()\n"
        "if not middle:\n"
        "    orphan = os.fork()\n"
        "    if orphan:\n        os._exit(0)\n"
        "    keeper = int(os.environ['KEEPER'])\n"
        "    while os.getppid() != keeper: time.sleep(0.01)\n"
        "    open(sys.argv[1] + '/orphan.new', 'w').write(str(os.getpid()))\n"
        "    os.rename(sys.argv[1] + '/orphan.new', sys.argv[1] + '/orphan')\n"
        "    os._exit(0)\n"
        "os.waitpid(middle, 0)\nsignal.pause()\n"
    )
    program = keeps("os.environ['KEEPER'] = str(os.getppid())\n" + text)
    program.until((tmp_path / "orphan").exists)
    pid = int((tmp_path / "orphan").read_text())
    program.until(lambda: not psutil.pid_exists(pid))
    os.kill(program.process.pid, signal.SIGTERM)
    assert program.process.wait(LIMIT_S) == 143
