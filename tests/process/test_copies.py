"""Copies of a worker as real processes with the fake engine: they are there, they come back, and their number changes."""

import json
import subprocess
import threading
import time

import psutil
from support.deployments import QUICK, pid_of, worker
from support.programs import LIMIT_S, alive, ichat

THREE = QUICK + worker(more="replicas = 3\ngpu_ids = []")
IDS = ("m-0", "m-1", "m-2")


def states(program):
    return {one["worker_id"]: one["state"] for one in program.get("/v1/admin/workers")[1]["data"]}


def copies(program):
    return {one["worker_id"]: (one["copy"], one["copies"]) for one in program.get("/v1/admin/workers")[1]["data"]}


def counts(program):
    (model,) = program.get("/v1/admin/cluster/status")[1]["models"]
    return model["copies"]


def cli(program, *words):
    """Return the exit code of a command to this gateway, and what it has written."""
    url = f"http://127.0.0.1:{program.port}"
    done = subprocess.run(
        ichat(words[0], "--gateway", url, *words[1:]), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_a_killed_copy_comes_back_and_no_unsent_request_fails(gateway, tmp_path):
    """Of three held requests that of the killed copy fails; all requests after its end are answered by the others."""
    program = gateway(THREE)
    for one in IDS:
        program.wait_until_ready(one)
    assert copies(program) == {"m-0": (1, 3), "m-1": (2, 3), "m-2": (3, 3)}
    assert counts(program) == {"ready": 3, "starting": 0, "wanted": 3}
    over, held = tmp_path / "over", []
    body = {"model": "m", "until_there": str(over)}
    holders = [threading.Thread(target=lambda: held.append(program.ask("/v1/chat/completions", body)[0])) for _ in IDS]
    for number, holder in enumerate(holders, 1):
        holder.start()
        program.until(lambda n=number: sum(
            one["in_flight"] for one in program.get("/v1/admin/workers")[1]["data"]
        ) == n)  # fmt: skip
    assert [one["in_flight"] for one in program.get("/v1/admin/workers")[1]["data"]] == [1, 1, 1]
    victim, answers, stop = psutil.Process(pid_of(program, "m-1")), [], threading.Event()

    def ask_on():
        while not stop.is_set():
            began_at = time.monotonic()
            answers.append((began_at, program.ask("/v1/chat/completions", {"model": "m"})[0]))

    asking = [threading.Thread(target=ask_on) for _ in range(2)]
    for one in asking:
        one.start()
    try:
        program.until(lambda: len(answers) > 20)
        victim.kill()
        program.until(lambda: not alive([victim]))
        ended_at, before = time.monotonic(), len(answers)
        program.until(lambda: len(answers) > before + 20)
        program.until(lambda: pid_of(program, "m-1") not in (None, victim.pid))
        program.wait_until_ready("m-1")
    finally:
        stop.set()
        over.touch()
        for one in [*asking, *holders]:
            one.join()
    assert sorted(held) == [200, 200, 502]
    assert not [status for began_at, status in answers if began_at > ended_at and status != 200]
    assert counts(program) == {"ready": 3, "starting": 0, "wanted": 3}


def test_an_operator_changes_the_number_of_copies(gateway, tmp_path):
    """A copy with a request is drained first; the next gateway keeps the number, and a reload of another ends that."""
    program = gateway(THREE, settings="watch_config = false\n")
    for one in IDS:
        program.wait_until_ready(one)
    code, text = cli(program, "scale", "m", "1")
    assert (code, text.splitlines()[0]) == (0, "m: ends m-1, m-2")
    program.until(lambda: states(program) == {"m-0": "ready"})
    code, text = cli(program, "scale", "m", "2")
    assert (code, text.splitlines()[0]) == (0, "m: starts m-1")
    program.until(lambda: states(program) == {"m-0": "ready", "m-1": "ready"})
    code, text = cli(program, "scale", "m", "0")
    assert (code, "begins at 1" in text) == (1, True)
    code, text = cli(program, "scale", "x", "2")
    assert (code, "x" in text) == (1, True)
    head, *rows = cli(program, "workers")[1].splitlines()
    assert head.split()[:4] == ["WORKER", "STATE", "MODEL", "COPY"]
    assert [row.split()[3] for row in rows[:2]] == ["1/2", "2/2"]
    assert "ready 2, starting 0, wanted 2" in cli(program, "status")[1]
    program.end()
    program = gateway(THREE, settings="watch_config = false\n")
    program.until(lambda: states(program) == {"m-0": "ready", "m-1": "ready"})
    path = tmp_path / "ichat.toml"
    path.write_text(path.read_text().replace("replicas = 3", "replicas = { min = 3, max = 4 }"))
    assert program.ask_by("POST", "/v1/admin/config/reload")[0] == 200
    program.until(lambda: states(program) == dict.fromkeys(IDS, "ready"))


def test_a_changed_table_is_never_without_two_of_three(gateway, tmp_path):
    """All requests are answered while the copies are restarted, and the plan says so."""
    program = gateway(THREE, settings="watch_config = false\n")
    for one in IDS:
        program.wait_until_ready(one)
    path = tmp_path / "ichat.toml"
    path.write_text(path.read_text().replace("replicas = 3", "replicas = 3\nload_s = 0.2"))
    answers, stop, served = [], threading.Event(), []

    def ask_on():
        while not stop.is_set():
            answers.append(program.ask("/v1/chat/completions", {"model": "m"})[0])
            served.append(counts(program)["ready"])

    asking = threading.Thread(target=ask_on)
    asking.start()
    try:
        plan = program.ask_by("POST", "/v1/admin/config/reload")[1]["plan"]
        assert [step["action"] for step in plan] == ["restart"] * 3
        assert all("without a gap: the copies are restarted in turn" in step["why"] for step in plan)

        def is_done():
            there = [program.get(f"/v1/admin/workers/{one}")[1] for one in states(program)]
            return len(there) == 3 and all(one.get("args", {}).get("load_s") == 0.2 for one in there)

        program.until(is_done)
        program.until(lambda: set(states(program).values()) == {"ready"})
    finally:
        stop.set()
        asking.join()
    assert set(answers) == {200}
    assert min(served) >= 2


def test_copies_that_have_never_served_are_restarted_at_once(gateway, tmp_path):
    """No process starts beside them: they keep their ids, and have the new table at their next start."""
    more = "replicas = 2\ngpu_ids = []\nload_s = 3600"
    program = gateway(QUICK + worker(more=more), settings="watch_config = false\n")
    program.until(lambda: states(program) == {"m-0": "loading", "m-1": "loading"})
    old = {one: psutil.Process(pid_of(program, one)) for one in IDS[:2]}
    path = tmp_path / "ichat.toml"
    path.write_text(path.read_text().replace("load_s = 3600", "load_s = 0.1"))
    plan = program.ask_by("POST", "/v1/admin/config/reload")[1]["plan"]
    assert [(step["action"], "gap" in step["why"]) for step in plan] == [("restart", False)] * 2
    assert list(states(program)) == ["m-0", "m-1"]
    program.until(lambda: states(program) == {"m-0": "ready", "m-1": "ready"})
    program.until(lambda: not alive(old.values()))


def test_a_load_adds_a_copy_and_its_end_ends_it(gateway, tmp_path):
    """A request that waits for the only copy is answered by a new copy; all are answered, and the copy goes again."""
    more = "replicas = { min = 1, max = 2 }\ngpu_ids = []\nmax_in_flight = 1\nscale = { wait_s = 0.5, up_s = 1, down_s = 6 }"
    program = gateway(QUICK + worker(more=more, beats_s=2)).wait_until_ready("m-0")
    over, answers = tmp_path / "over", []

    def ask(body):
        answers.append(program.ask("/v1/chat/completions", {"model": "m", **body})[0])

    asking = [threading.Thread(target=ask, args=({"until_there": str(over)},)) for _ in range(2)]
    for one in asking:
        one.start()
    program.until(lambda: states(program).get("m-1") == "ready")
    program.until(lambda: [one["in_flight"] for one in program.get("/v1/admin/workers")[1]["data"]] == [1, 1])
    assert "Its copies: 2 ready" in cli(program, "explain", "m")[1]
    over.touch()
    for one in asking:
        one.join()
    program.until(lambda: len(states(program)) == 1)
    ask({})
    assert answers == [200, 200, 200]


def test_copies_are_launched(gateway):
    """They are launched, and counted, as those of the configuration; a number that cannot be is refused at once."""
    program = gateway(QUICK)
    code, text = cli(
        program, "launch", "/m", "-n", "m", "-be", "fake", "--gpu-ids", "none", "--replicas", "2", "--wait"
    )
    assert code == 0
    assert {"m-0 ready", "m-1 ready"} <= {*text.splitlines()}
    assert copies(program) == {"m-0": (1, 2), "m-1": (2, 2)}
    code, text = cli(program, "launch", "/m", "-n", "x", "-be", "fake", "--replicas", "2", "--port", "8001")
    assert code == 1
    assert "two copies cannot have the same port" in text
    status, answer = program.ask("/v1/admin/models/m/replicas", {"min": 1})
    assert (status, answer["ending"]) == (200, ["m-1"])
    program.until(lambda: states(program) == {"m-0": "ready"})


def test_a_check_knows_copies(tmp_path):
    path = tmp_path / "ichat.toml"
    path.write_text(f"[server_settings]\nport = 0\n{worker(more='replicas = 2')}port = 8001\n")
    done = subprocess.run(
        ichat("gateway", "-c", str(path), "--check"), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 64
    assert "managed_workers[0].port: two copies cannot have the same port" in done.stderr
    path.write_text(f"[server_settings]\nport = 0\n{worker(more='replicas = 2')}gpu_ids = []\n")
    done = subprocess.run(
        ichat("doctor", "-c", str(path), "--json"), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    names = {one["name"] for one in json.loads(done.stdout)["findings"]}
    assert {"m-0", "m-1"} <= names
