"""Another configuration while the gateway runs, with real processes: only what has changed is touched."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import threading
import time
import urllib.request

import pytest
import trustme
from support.deployments import free_port, pid_of, stream, worker
from support.programs import LIMIT_S, ROOT, alive, ichat


@pytest.fixture
def edit(tmp_path):
    """Change the file: `edit(old, new)`."""

    def change(old, new):
        path = tmp_path / "ichat.toml"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return change


UNWATCHED = "watch_config = false\n"
"""For tests that say themselves when the file is read."""


def reload(program, query=""):
    return program.ask_by("POST", f"/v1/admin/config/reload{query}")


def ids(program):
    return {one["worker_id"]: one["state"] for one in program.get("/v1/admin/workers")[1]["data"]}


def test_one_of_three_workers_changes(gateway, edit, tmp_path):
    """The pids of the other two stay, requests to them go on; the plan says what and why, and a dry run does nothing."""
    text = worker("a") + worker("b", "load_s = 0.1") + worker("c")
    program = gateway(text, settings=UNWATCHED)
    for name in "abc":
        program.wait_until_ready(f"{name}-0")
    before = {name: pid_of(program, f"{name}-0") for name in "abc"}
    answers, stop = [], threading.Event()

    def ask_on():
        while not stop.is_set():
            answers.extend(program.ask("/v1/chat/completions", {"model": name})[0] for name in "ac")

    asking = threading.Thread(target=ask_on)
    asking.start()
    over = tmp_path / "over"
    body = {"model": "a", "until_there": str(over)}
    waiting = threading.Thread(target=lambda: answers.append(program.ask("/v1/chat/completions", body)[0]))
    waiting.start()
    program.until(lambda: program.get("/v1/admin/workers/a-0")[1]["in_flight"] > 0)
    try:
        edit("load_s = 0.1", "load_s = 0.2")
        status, plan = reload(program, "?dry_run=1")
        assert (status, plan["applied"]) == (200, False)
        assert [(step["action"], step["what"]) for step in plan["plan"]] == [
            ("keep", "worker a-0"), ("restart", "worker b-0"), ("keep", "worker c-0"),
        ]  # fmt: skip
        gap = "with a gap: without gpu_ids each may use every GPU"
        assert plan["plan"][1]["why"] == f"load_s: 0.1 -> 0.2; {gap}"
        assert reload(program)[1]["applied"]
        program.until(lambda: pid_of(program, "b-0") not in (None, before["b"]))
        program.wait_until_ready("b-0")
    finally:
        stop.set()
        over.touch()
        asking.join()
        waiting.join()
    assert {name: pid_of(program, f"{name}-0") for name in "ac"} == {name: before[name] for name in "ac"}
    assert set(answers) == {200}
    status, plan = reload(program)
    assert [step["action"] for step in plan["plan"]] == ["keep"] * 3
    assert program.get("/v1/admin/workers/b-0")[1]["args"]["load_s"] == 0.2


def test_workers_come_and_go(gateway, edit, tmp_path):
    """What is new in the file is started, what is gone is drained and ended; SIGHUP does it as well."""
    program = gateway(worker("a") + worker("b")).wait_until_ready("a-0").wait_until_ready("b-0")
    first, second = pid_of(program, "a-0"), pid_of(program, "b-0")
    family = [one for one in program.descendants() if one.pid == second]
    path = tmp_path / "ichat.toml"
    path.write_text(path.read_text().replace(worker("b"), worker("c")))
    program.process.send_signal(signal.SIGHUP)
    program.wait_until_ready("c-0") if program.state("c-0") else program.until(lambda: program.state("c-0") == "ready")
    program.until(lambda: set(ids(program)) == {"a-0", "c-0"})
    assert pid_of(program, "a-0") == first
    assert not alive(family)
    assert "SIGHUP" in program.text()
    assert program.ask("/v1/chat/completions", {"model": "b"})[0] == 404


def test_a_bad_file_changes_nothing(gateway, edit):
    """Neither by the API, nor by SIGHUP, nor by being watched; the reason is told."""
    program = gateway(worker("a")).wait_until_ready("a-0")
    pid = pid_of(program, "a-0")
    edit('model_path = "/m"', 'model_paht = "/m"')
    status, answer = reload(program)
    assert (status, answer["error"]["code"]) == (400, "bad_configuration")
    assert "managed_workers[0].model_paht" in answer["error"]["message"]
    program.until(lambda: "the configuration stays as it is" in program.text())
    program.process.send_signal(signal.SIGHUP)
    program.until(lambda: program.text().count("the configuration stays as it is") == 2)
    assert (program.state("a-0"), pid_of(program, "a-0")) == ("ready", pid)


def cli(program, *words):
    """Return the exit code of a command to this gateway, what it has written, and what it has complained of."""
    url = f"http://127.0.0.1:{program.port}"
    done = subprocess.run(
        [*ichat(*words), "--gateway", url],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "300", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def next_event(events, name):
    """Return the data of the next event of this name."""
    while events.readline() != b"event: %b\n" % name:
        pass
    return json.loads(events.readline().removeprefix(b"data: "))


def test_a_refused_file_is_the_first_that_is_wrong(gateway, edit):
    """Every view of the gateway says so with each mistake, until the file is mended."""
    program = gateway(worker("a")).wait_until_ready("a-0")
    assert program.get("/v1/admin/config")[1]["file"]["state"] == "ok"
    assert not cli(program, "status")[1].startswith("!")
    headers = {"authorization": f"Bearer {program.own_secret()}"}
    stream_of = urllib.request.Request(f"http://127.0.0.1:{program.port}/v1/admin/events", headers=headers)
    with urllib.request.urlopen(stream_of, timeout=LIMIT_S) as events:
        assert next_event(events, b"state")["config"] == program.get("/v1/admin/config")[1]["file"]
        edit("port = 0", "portt = 3\nhots = 1")
        assert next_event(events, b"config")["state"] == "changed"
        while (told := next_event(events, b"config"))["state"] == "changed":
            pass
        assert (told["state"], len(told["errors"])) == ("refused", 2)
    edit("\nhots = 1", "")
    edit('model_path = "/m"', 'model_paht = "/m"')
    program.until(lambda: len(program.get("/v1/admin/config")[1]["file"]["errors"]) == 3)
    program.until(lambda: program.get("/v1/admin/config")[1]["file"]["state"] == "refused")
    file = program.get("/v1/admin/config")[1]["file"]
    assert [error.partition(":")[0] for error in file["errors"]] == [
        "managed_workers[0].model_paht", "managed_workers[0].model_path", "server_settings.portt",
    ]  # fmt: skip
    assert file["in_force_since"] <= file["since"] <= time.time()
    assert program.get("/v1/admin/cluster/status")[1]["config"] == file
    with urllib.request.urlopen(f"http://127.0.0.1:{program.port}/metrics", timeout=LIMIT_S) as metrics:
        assert b"ichat_config_refused 1.0" in metrics.read().splitlines()
    _, out, _ = cli(program, "status")
    first = out.splitlines()[0]
    assert first.startswith(f"! {file['path']} is refused since ")
    assert "; the configuration of " in first
    assert all(error in first for error in file["errors"])
    assert file["errors"][0] in cli(program, "top", "--once")[1].splitlines()[0]
    code, _, err = cli(program, "reload")
    assert (code, [line[:2] for line in err.splitlines()]) == (1, [file["path"][:2], *["  "] * 3, "No"])
    edit('model_paht = "/m"', 'model_path = "/m"')
    edit("portt = 3", "port = 0")
    program.until(lambda: program.get("/v1/admin/config")[1]["file"]["state"] == "ok")
    assert not cli(program, "status")[1].startswith("!")


def test_commands_that_name_a_refused_file_find_its_gateway(gateway, edit, tmp_path):
    """They say since when it is refused, the doctor first of all; without a gateway they say what is wrong with it."""
    program, path = gateway(worker("a"), free_port()).wait_until_ready("a-0"), str(tmp_path / "ichat.toml")

    def ask(*words):
        done = subprocess.run(
            ichat(*words, "-c", path), cwd=ROOT, env={**os.environ, "COLUMNS": "300"}, capture_output=True, text=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    edit("stop_s = 6", "stopp_s = 6")
    program.until(lambda: program.get("/v1/admin/config")[1]["file"]["state"] == "refused")
    code, out, _ = ask("status")
    assert (code, out.startswith(f"! {path} is refused since ")) == (0, True)
    code, out, _ = ask("doctor")
    lines = " ".join(out.split())
    assert (code, lines.startswith(f"Configuration ✗ configuration: {path} is refused since ")) == (1, True), out
    assert lines.count("timeouts.stopp_s: unknown key") == 1
    assert "a-0: It is ready" in lines
    assert program.stop() == 0
    for words in (["status"], ["doctor"]):
        code, out, err = ask(*words)
        assert "timeouts.stopp_s: unknown key; did you mean stop_s?" in " ".join((out + err).split())
        assert "is refused since" not in out


def test_a_failed_worker_is_left_alone_by_a_reload(gateway, edit):
    """An unrelated change does not load it again; a flag does, and so does a change of its own table."""
    program = gateway("[restart]\nattempts_max = 1\n" + worker("a", "fail = true"), settings=UNWATCHED)
    program.until(lambda: program.state("a-0") == "failed")
    ended_at = program.get("/v1/admin/workers/a-0")[1]["ended_at"]

    def again(plan):
        return [(step["action"], step["why"].partition(" and")[0]) for step in plan["plan"] if "a-0" in step["what"]]

    edit("stop_s = 6", "stop_s = 5")
    status, plan = reload(program)
    assert (status, again(plan)) == (200, [("keep", "it has failed")])
    assert program.get("/v1/admin/workers/a-0")[1]["ended_at"] == ended_at
    assert again(reload(program, "?restart_failed=1")[1]) == [("restart", "it has failed")]
    program.until(lambda: program.get("/v1/admin/workers/a-0")[1]["ended_at"] != ended_at)
    program.until(lambda: program.state("a-0") == "failed")
    edit("\nfail = true", "")
    assert reload(program)[1]["summary"].startswith("+0 start, ~1 restart")
    program.wait_until_ready("a-0")


def asked(program, method, path, headers):
    """Return status and allowed origin."""
    connection = http.client.HTTPConnection("127.0.0.1", program.port, timeout=LIMIT_S)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers["access-control-allow-origin"]


def test_settings_are_taken_without_a_restart(gateway, edit):
    """Bounds and routes change while requests go on; what cannot is named."""
    route = '[[external_routes]]\nmodel_name = "far"\napi_base = "http://127.0.0.1:9/v1"\n'
    program = gateway(worker("a") + route, settings=UNWATCHED).wait_until_ready("a-0")
    pid = pid_of(program, "a-0")
    edit('model_name = "far"', 'model_name = "near"')
    edit("stop_s = 6", "stop_s = 5\nfirst_byte_s = 0.5")
    preflight = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    assert asked(program, "OPTIONS", "/v1/chat/completions", preflight) == (403, None)
    edit("port = 0", 'port = 1\ncors_origins = ["https://chat.example"]')
    status, plan = reload(program)
    assert status == 200
    assert asked(program, "OPTIONS", "/v1/chat/completions", preflight) == (204, "https://chat.example")
    steps = {step["what"]: step["action"] for step in plan["plan"]}
    assert steps["server_settings.port"] == "later"
    assert steps["timeouts.first_byte_s"] == "update"
    assert (steps["external route far"], steps["external route near"]) == ("remove", "add")
    assert program.ask("/v1/chat/completions", {"model": "a", "wait_s": 3600})[0] == 504
    assert program.ask("/v1/chat/completions", {"model": "far"})[0] == 404
    assert program.ask("/v1/chat/completions", {"model": "near"})[0] == 502
    assert pid_of(program, "a-0") == pid


def test_the_new_worker_before_the_old_one(gateway, edit):
    """Where the GPUs allow it the old worker serves until the new one does; one that cannot start changes nothing."""
    text = "[restart]\nattempts_max = 1\n" + worker("a", "gpu_ids = []\nload_s = 1.0")
    program = gateway(text).wait_until_ready("a-0")
    pid = pid_of(program, "a-0")
    edit("load_s = 1.0", "load_s = 1.0\nfail = true")
    program.until(lambda: ids(program).get("a-1") == "failed")
    assert (program.state("a-0"), pid_of(program, "a-0")) == ("ready", pid)
    assert program.ask("/v1/chat/completions", {"model": "a"})[0] == 200
    edit("\nfail = true", "\nchildren = 1")  # mended: the failed one is tried again, and replaces the old one
    answers = []
    deadline = time.monotonic() + LIMIT_S
    while list(ids(program)) == ["a-0"] or list(ids(program).values()) != ["ready"]:
        answers.append(program.ask("/v1/chat/completions", {"model": "a"})[0])
        assert time.monotonic() < deadline, ids(program)
    assert set(answers) == {200}


def test_back_to_what_it_was(gateway, edit):
    """A change that fails, taken back: the old worker was never touched, the failed one goes."""
    text = "[restart]\nattempts_max = 1\n" + worker("a", "gpu_ids = []\nload_s = 0.1")
    program = gateway(text).wait_until_ready("a-0")
    pid = pid_of(program, "a-0")
    edit("load_s = 0.1", "load_s = 0.1\nfail = true")
    program.until(lambda: ids(program).get("a-1") == "failed")
    edit("\nfail = true", "")
    program.until(lambda: ids(program) == {"a-0": "ready"})
    assert pid_of(program, "a-0") == pid


def test_launched_workers_are_left_alone(gateway, edit):
    """A reload is about the file: what was launched by hand stays."""
    program = gateway("")
    program.ask("/v1/admin/workers/launch", {"model_name": "new", "model_path": "/m", "backend": "fake"})
    program.until(lambda: program.state("new-0") == "ready")
    status, plan = reload(program)
    assert [(step["action"], step["what"]) for step in plan["plan"]] == [("keep", "worker new-0")], (status, plan)
    assert program.state("new-0") == "ready"


def test_back_in_the_file_while_it_still_ends(gateway, edit, tmp_path):
    """A worker that leaves does not count as one that is there: put back, it is started again."""
    program = gateway(worker("a") + worker("b"), settings=UNWATCHED)
    program.wait_until_ready("a-0").wait_until_ready("b-0")
    path = tmp_path / "ichat.toml"
    whole = path.read_text()
    asking = stream(program, {"model": "b", "wait_s": 3600})
    program.until(lambda: program.get("/v1/admin/workers/b-0")[1]["in_flight"] == 1)
    path.write_text(whole.replace(worker("b"), ""))
    assert reload(program)[0] == 200
    assert program.state("b-0") == "draining"
    path.write_text(whole)
    status, plan = reload(program)
    assert [step["action"] for step in plan["plan"]] == ["keep", "start"], (status, plan)
    asking.close()
    program.until(lambda: sorted(ids(program).values()) == ["ready", "ready"] and "b-0" not in ids(program))
    assert program.ask("/v1/chat/completions", {"model": "b"})[0] == 200


def test_the_gateway_applies_a_refused_file_once_it_is_mended(gateway, edit, tmp_path):
    """What it names may come later than the file itself."""
    program = gateway(worker("a")).wait_until_ready("a-0")
    edit(
        "[timeouts]", f'tls_certificate = "{tmp_path}/all.pem"\ntls_key = "{tmp_path}/all.pem"\n[timeouts]\nqueue_s = 7'
    )
    program.until(lambda: "the configuration stays as it is" in program.text())
    certificate = trustme.CA().issue_cert("localhost")
    certificate.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "all.pem"))
    program.until(lambda: "update timeouts.queue_s" in program.text())


def test_bounds_are_taken_by_what_runs(gateway, edit):
    """A worker's bound that is taken away, the lines of a log, the body of a request on a connection that is kept."""
    program = gateway("queue_s = 3600\n" + worker("a", "max_in_flight = 2")).wait_until_ready("a-0")
    kept = http.client.HTTPConnection("127.0.0.1", program.port, timeout=LIMIT_S)
    body = json.dumps({"model": "a", "x": "y" * 3000})

    def post_on_kept():
        kept.request("POST", "/v1/chat/completions", body)
        answer = kept.getresponse()
        answer.read()
        return answer.status

    assert post_on_kept() == 200
    waiting = [stream(program, {"model": "a", "wait_s": 3600}) for _ in range(3)]
    program.until(lambda: program.get("/v1/admin/workers/a-0")[1]["in_flight"] == 2)
    edit("max_in_flight = 2", "")
    edit("[timeouts]", "[logs]\nring_lines_max = 3\n[limits]\nbody_bytes_max = 2000\n[timeouts]")
    assert reload(program)[0] == 200
    program.until(lambda: program.get("/v1/admin/workers/a-0")[1]["in_flight"] == 3)
    assert post_on_kept() == 413
    for sock in (*waiting, kept):
        sock.close()


def test_a_hang_up_ends_no_managed_worker(gateway):
    """SIGHUP is a word for its gateway: a worker that gets it as well goes on."""
    program = gateway(worker("a")).wait_until_ready("a-0")
    pid = pid_of(program, "a-0")
    os.kill(pid, signal.SIGHUP)
    assert program.ask("/v1/chat/completions", {"model": "a"})[0] == 200
    assert (program.state("a-0"), pid_of(program, "a-0")) == ("ready", pid)
