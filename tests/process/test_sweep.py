"""`ichat.pyz sweep`: which processes it ends, and when it ends none."""

import fcntl
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from support.deployments import free_port, worker
from support.programs import LIMIT_S, ROOT, alive, ichat

from ichat.config.process_marks import RELAY_VARIABLE, WORKER_VARIABLE
from ichat.supervisor.orphans import process_identity

WAITING = "import signal; print('begun', flush=True); signal.pause()"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAITING}"


@pytest.fixture
def state(tmp_path):
    """Return a state directory without a gateway."""
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    (path / "lock").write_text("1\n")
    return path


@pytest.fixture
def left():
    """Start a process with a mark: `process = left({"ICHAT_RELAY": "…"}, program, session=True)`."""
    processes = []

    def run(marks, program=WAITING, *, session=True):
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, **marks}, stdout=subprocess.PIPE, start_new_session=session,
        )  # fmt: skip
        processes.append(process)
        assert process.stdout.readline() == b"begun\n"
        return process

    yield run
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def sweep(*arguments, **env):
    """Run the command; return its exit code and its lines."""
    done = subprocess.run(
        [str(word) for word in ichat("sweep", *arguments)],
        cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_relays_and_workers_of_the_directory_are_ended_and_no_others(state, left):
    """SIGTERM ends a relay and the first process of a worker, and its others are killed then."""
    relay = left({RELAY_VARIABLE: str(state)})
    first = left({WORKER_VARIABLE: f"{state}:m-0"})
    child = left({WORKER_VARIABLE: f"{state}:m-0"}, session=False)
    others = [left({RELAY_VARIABLE: f"{state}2"}), left({WORKER_VARIABLE: f"{state}2:m-0"}), left({})]
    code, lines = sweep(state)
    assert code == 0
    assert set(lines) == {
        f"ended a relay (process {relay.pid})",
        f"ended worker m-0 (process {first.pid})",
        f"ended worker m-0 (process {child.pid})",
    }
    assert [one.wait(LIMIT_S) for one in (relay, first, child)] == [-signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL]
    assert all(one.poll() is None for one in others)
    assert sweep(state) == (0, [f"No process is left of the gateway of {state}."])


def test_a_process_that_does_not_end_is_killed(state, left):
    """It has the seconds of --wait-s."""
    relay = left({RELAY_VARIABLE: str(state)}, STUBBORN)
    assert sweep(state, "--wait-s", "0.1") == (0, [f"killed a relay (process {relay.pid})"])
    assert relay.wait(LIMIT_S) == -signal.SIGKILL


def test_a_symbolic_link_leads_to_the_same_processes(state, left, tmp_path):
    """Marks have the directory's name as the gateway knew it."""
    (tmp_path / "link").symlink_to(state)
    through, direct = left({RELAY_VARIABLE: f"{tmp_path}/link"}), left({RELAY_VARIABLE: str(state)})
    assert sweep(tmp_path / "link")[0] == 0
    assert [one.wait(LIMIT_S) for one in (through, direct)] == [-signal.SIGTERM, -signal.SIGTERM]


def saved(state, process, keeps="stop", stamp=None):
    stamp = process_identity(process.pid) if stamp is None else stamp
    spec = {"on_gateway_exit": keeps}
    started = [{"worker_id": "k-0", "spec": spec, "is_launched": False, "pid": process.pid, "stamp": stamp}]
    (state / "workers.json").write_text(json.dumps({"version": 1, "started": started}))


def test_a_worker_without_its_mark_is_known_by_its_stamp(state, left):
    """A program may overwrite its environment; another process with the saved number is left alone."""
    process = left({})
    saved(state, process, stamp="boot:1")
    assert sweep(state) == (0, [f"No process is left of the gateway of {state}."])
    assert process.poll() is None
    saved(state, process)
    assert sweep(state) == (0, [f"ended worker k-0 (process {process.pid})"])
    assert process.wait(LIMIT_S) == -signal.SIGTERM


def test_kept_workers_stay_unless_all_must_end(state, left):
    """They are meant to outlive their gateway."""
    process = left({WORKER_VARIABLE: f"{state}:k-0"})
    saved(state, process, "keep")
    code, [line] = sweep(state)
    assert (code, process.poll()) == (0, None)
    assert line.startswith("worker k-0 stays")
    assert sweep(state, "--all") == (0, [f"ended worker k-0 (process {process.pid})"])


def test_nothing_is_ended_while_a_gateway_runs(state, left):
    """The gateway has the lock, and the sentence names its process."""
    relay = left({RELAY_VARIABLE: str(state)})
    (state / "lock").write_text("4711\n127.0.0.1 4000\n")
    with (state / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, [line] = sweep(state)
    assert (code, relay.poll()) == (69, None)
    assert line == f"A gateway (process 4711) uses {state}: stop it, and it ends its processes itself."


@pytest.mark.parametrize("result", ["signal", "exit-code", "watchdog", "core-dump", "oom-kill"])
def test_relays_wait_for_the_restart_after_a_crash(state, left, result):
    """As ExecStopPost, it ends nothing then."""
    relay = left({RELAY_VARIABLE: str(state)})
    code, [line] = sweep(state, SERVICE_RESULT=result)
    assert (code, relay.poll()) == (0, None)
    assert result in line


@pytest.mark.parametrize("result", ["success", "timeout"])
def test_nothing_stays_after_an_ordered_stop_of_the_service(state, left, result):
    relay = left({RELAY_VARIABLE: str(state)})
    assert sweep(state, SERVICE_RESULT=result) == (0, [f"ended a relay (process {relay.pid})"])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["/none/at/all"], 69, "There is no directory /none/at/all"),
        (["/"], 69, "No gateway has ever used /"),
        (["--config", "/none/ichat.toml"], 64, "/none/ichat.toml"),
        (["x", "--config", "y"], 64, "not allowed with argument"),
        (["x", "--wait-s", "-1"], 64, "--wait-s"),
        (["x", "--wait-s", "nan"], 64, "--wait-s"),
        ([], 64, "name the gateway's state directory, or its configuration"),
    ],
)
def test_bad_arguments_end_nothing(arguments, code, words):
    """Each is refused with a sentence."""
    found, [line] = sweep(*arguments)
    assert found == code
    assert words in line


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a directory of another user")
def test_a_sweep_of_another_users_directory_is_refused(state, left):
    """Even for root: its user could have put any mark on any process."""
    relay = left({RELAY_VARIABLE: str(state)})
    os.chown(state, 65534, 65534)
    code, [line] = sweep(state)
    assert (code, relay.poll()) == (69, None)
    assert "belongs to another user (number 65534)" in line


def test_an_abandoned_gateway_leaves_nothing_after_a_sweep(gateway, tmp_path):
    """Real relays and a real worker, stopped at the death of the gateway, so that none ends by itself."""
    program = gateway(worker("m"), port=free_port(), settings="relays = 2\n")
    program.wait_until_ready("m-0")
    left = program.descendants()
    relays = [one for one in left if one.environ().get(RELAY_VARIABLE)]
    assert len(relays) == 2
    assert {one.pid for one in left if one.environ().get(WORKER_VARIABLE)}.isdisjoint(one.pid for one in relays)
    for process in left:
        process.suspend()
    program.process.kill()
    program.process.wait()
    assert alive(left) == left
    assert doctor_of(tmp_path / "ichat.toml")["relays"] == f"./ichat.pyz sweep {tmp_path}/state"
    other = tmp_path / "other.toml"
    other.write_text(f'[server_settings]\nport = {program.port}\nstate_directory = "{tmp_path}/other"\n')
    refused = subprocess.run(
        ichat("gateway", "-c", str(other)), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert refused.returncode == 69
    assert f"of the gateway in {tmp_path}/state, which waits for its gateway: start that gateway, or" in refused.stderr
    code, lines = sweep("--config", tmp_path / "ichat.toml", "--wait-s", "0.1")
    assert (code, alive(left)) == (0, []), lines
    assert {f"killed a relay (process {one.pid})" for one in relays} <= set(lines)


def doctor_of(path):
    """Return the commands of the doctor's warnings and errors, by their names."""
    done = subprocess.run(
        ichat("doctor", "-c", str(path), "--json"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return {one["name"]: one["command"] for one in json.loads(done.stdout)["findings"] if one["level"] != "ok"}


def test_relays_are_no_orphans_in_a_sweep_of_workers(gateway):
    """A gateway that ends what earlier workers have left spares relays, and the end of a relay ends no worker."""
    program = gateway(worker("m"), port=free_port(), settings="relays = 2\n")
    program.until(lambda: program.text().count("accepts connections") == 2)
    program.wait_until_ready("m-0")
    relays = [one for one in program.descendants() if one.environ().get(RELAY_VARIABLE)]
    [pid] = {one["pid"] for one in program.get("/v1/admin/workers")[1]["data"]}
    relays[0].kill()
    program.until(lambda: program.text().count("accepts connections") == 3)
    assert psutil.Process(pid).is_running()
    program.process.kill()
    program.process.wait()
    after = gateway(worker("m"), port=program.port, settings="relays = 2\n")
    after.wait_until_ready("m-0")
    assert relays[1].is_running()
    assert relays[1].status() != psutil.STATUS_ZOMBIE
    assert after.stop() == 0
