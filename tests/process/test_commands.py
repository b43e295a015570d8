"""The operator's commands against a gateway that says what a test wants, and against a real one with the fake engine."""

import contextlib
import datetime as dt
import io
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import types
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import get_args

import pytest
import trustme
from support.deployments import free_port
from support.programs import LIMIT_S, ROOT, Program, ichat
from support.terminals import Pty

from ichat.cli import chat as terminal_chat
from ichat.cli import commands as terminal
from ichat.cli import launch as terminal_launch
from ichat.cli.client import Waits, read_events
from ichat.engines.flags import engine_flags
from ichat.errors import Exit
from ichat.routing.policies import Rule

KEPT = ("command", "path", "query", "headers", "body")
STATES = ("starting", "loading", "ready", "following", "draining", "gone", "unhealthy", "wedged", "failed", "broken", "stale",
          "restarting", "cold", "asleep", "waking", "a-new-one")  # fmt: skip
READY = {
    "worker_id": "w1", "managed": True, "state": "ready", "phase": "ready", "model_name": "org/m", "model_names": ["org/m", "m"],
    "backend": "vllm", "model_path": "/m", "host": "10.0.0.1", "port": 8001, "pid": 7, "in_flight": 3, "heartbeat_age_s": 1.26,
    "progress": {"running": 2, "waiting": 1, "kv_use": 0.375, "steps": 9, "tokens_out": 70, "prompt_tokens": 80,
                 "cached_tokens": 70}, "restarts": 0, "failure": None,
    "cause": None, "last_lines": ["loaded"], "args": {"max_model_len": 8192, "seed": None}, "versions": {"vllm": "0.32.0"},
    "group": {"id": "g", "rank": 0, "size": 2}, "load_s": 75,
}  # fmt: skip
FAILED = {**READY, "worker_id": "w2", "state": "failed", "ended_at": 1767225600.5, "exit_code": 70, "failure": "ended with exit code 70", "cause": "CUDA is out of memory.",
          "last_lines": ["\x1b[31mtorch.OutOfMemoryError\x1b[0m\x1b]0;title\x07", "bye"]}  # fmt: skip
STATUS = {
    "gateway": {"id": "gw", "version": "0.1.0", "pid": 5, "uptime_s": 90061},
    "resources": {
        "cpu": {"count": 8, "use": 0.25}, "memory": {"total_bytes": 64 * 2**30, "available_bytes": 2**30},
        "gpus": [{"index": 0, "name": "H100", "memory_total_bytes": 80 * 2**30, "memory_used_bytes": 40 * 2**30, "use": 0.9,
                  "held_by": [{"pid": 7, "memory_bytes": 1, "worker_id": "w1"},
                              {"pid": 8, "memory_bytes": 1, "worker_id": None}]}],
    },
    "workers": {"ready": 1, "failed": 1}, "models": [{"id": "org/m", "workers": 1, "in_flight": 3, "queued": 0}],
}  # fmt: skip
MODELS = {
    "object": "list",
    "data": [{"id": "org/m", "object": "model", "owned_by": "vllm", "max_model_len": 8192, "root": "/m"}],
}
ROUTE = {
    "model": "m", "policy": "prefix_aware", "rule": "prefix", "chosen": "w1", "reason": None, "waiting": 0, "session": False,
    "prefix": {"length": 8190, "matched": 6144, "deepest": 6144},
    "candidates": [
        {"worker_id": "w1", "state": "ready", "chosen": True, "why_not": None, "in_flight": 2, "load": 3, "in_flight_max": 256,
         "matched": 6144, "overloaded": False, "circuit": {"state": "closed", "failures": 0, "retry_in_s": None}},
        {"worker_id": "w2", "state": "ready", "chosen": False, "why_not": None, "in_flight": 90, "load": 90,
         "in_flight_max": 256, "matched": 0, "overloaded": True, "circuit": {"state": "closed"}},
        {"worker_id": "w3", "state": "loading", "chosen": False, "why_not": "is loading (weights)", "in_flight": 0, "load": 0,
         "in_flight_max": 0, "matched": 0, "overloaded": False, "circuit": None},
    ],
}  # fmt: skip
LOAD = {
    "worker_id": "m-0", "expected_s": 25.2,
    "evicts": [{"worker_id": "x-0", "model": "x", "kind": "stop", "idle_s": 40.4},
               {"worker_id": "y-0", "model": "y", "kind": "sleep", "idle_s": None}],
    "waits_for": [{"worker_id": "z-0", "model": "z", "why": "is starting"}],
}  # fmt: skip
COLD = {"worker_id": "m-0", "state": "cold", "model_name": "m", "in_flight": 0}
CHANGED = {"model": "m", "worker_id": "m-0", "state": "ready", "seconds": 23.4}
VERBS = ("load", "unload", "sleep", "wake")
USAGE_ROW = {"requests": 3, "errors": 1, "input_tokens": 900, "output_tokens": 80, "cached_tokens": 64,
             "estimated_tokens": 0, "busy_s": 12.5, "cost": 0.25}  # fmt: skip
USED = {
    "from": "2026-11-01T00:00:00Z", "to": "2026-11-23T04:00:00Z", "by": ["key", "model"], "storage": "ok",
    "rows": [{"key": "a", "model": "m", **USAGE_ROW}, {"key": "", "model": "n", **USAGE_ROW, "cost": None}],
    "totals": {**USAGE_ROW, "requests": 6},
}  # fmt: skip
LIMIT = {"limit": "tokens_per_day", "allowed": 1000, "used": 980, "left": 20.0, "begins_anew": "2026-11-24T00:00:00Z"}
PLAN = {
    "applied": True,
    "summary": "+1 start, ~0 restart, -0 stop, 1 untouched",
    "plan": [
        {"action": "start", "what": "worker b", "why": "is new"},
        {"action": "keep", "what": "worker a", "why": ""},
    ],
}


class Fake:
    """A gateway that answers by a table: (method, path) -> (status, JSON) or a function of the request."""

    def __init__(self, wrap=None):
        fake = self

        class Connection(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do(self):
                self.body = self.rfile.read(int(self.headers.get("content-length", 0)))
                path, _, query = self.path.partition("?")
                self.query = dict(urllib.parse.parse_qsl(query))
                fake.asked.append(types.SimpleNamespace(**{name: getattr(self, name) for name in KEPT}))
                answer = fake.answers.get((self.command, path), (404, error("not_found", f"There is no route {path}.")))
                if callable(answer):
                    answer = answer(self)
                if answer is not None:
                    self.plain(*answer)

            do_GET = do_POST = do_DELETE = do

            def plain(self, status, value, kind="application/json"):
                data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def stream(self, *events, whole=True):
                self.send_response(200)
                self.send_header("content-type", "text/event-stream; charset=utf-8")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                for event in events:
                    data = event.encode()
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
                if whole:
                    self.wfile.write(b"0\r\n\r\n")
                else:
                    self.close_connection = True

            def log_message(self, *arguments):
                pass

        self.answers = {}
        self.asked = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Connection)
        if wrap:
            self.server.socket = wrap(self.server.socket)
        self.server.handle_error = lambda *arguments: None
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def bodies(self):
        return [json.loads(one.body) for one in self.asked if one.body]


def error(code, message):
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


def data(value, extra=""):
    return f"{extra}data: {value if isinstance(value, str) else json.dumps(value)}\n\n"


def line(seq, text):
    return data({"seq": seq, "time": "2026-01-01T00:00:00.000Z", "line": text}, f"id: {seq}\n")


def delta(**fields):
    return data({"choices": [{"index": 0, "delta": fields, "finish_reason": None}]})


DONE = data("[DONE]")
USAGE = data({"choices": [], "usage": {"completion_tokens": 40}})


@pytest.fixture
def fake(monkeypatch):
    gateway = Fake()
    for name in ("ICHAT_API_KEY", "ICHAT_GATEWAY", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ICHAT_GATEWAY", f"http://127.0.0.1:{gateway.port}")
    gateway.answers = {
        ("GET", "/v1/admin/workers"): (200, {"object": "list", "data": [READY, FAILED, {"worker_id": "w3"}]}),
        ("GET", "/v1/admin/workers/w1"): (200, READY),
        ("GET", "/v1/admin/workers/w2"): (200, FAILED),
        ("GET", "/v1/admin/cluster/status"): (200, STATUS),
        ("GET", "/v1/models"): (200, MODELS),
        ("GET", "/v1/admin/usage"): (200, USED),
        ("GET", "/v1/usage"): (200, {**USED, "by": ["model"], "limits": [LIMIT]}),
        ("POST", "/v1/admin/config/reload"): (200, PLAN),
        ("POST", "/v1/admin/route"): (200, ROUTE),
        ("POST", "/v1/admin/workers/launch"): (202, {"worker_id": "w1", "state": "starting"}),
        ("DELETE", "/v1/admin/workers/w1"): (200, {"worker_id": "w1", "state": "stopped"}),
        **{("POST", f"/v1/admin/models/{verb}"): (200, CHANGED) for verb in VERBS},
    }
    yield gateway
    gateway.close()


@pytest.fixture
def run(capsys):
    """Run a command in this process; give its exit code, standard output and standard error."""

    def command(*words):
        try:
            code = terminal.run(list(words), Waits(0.01, (0.01,)))
        except Exit as exit_:
            print(exit_, file=sys.stderr)
            code = exit_.code
        out, err = capsys.readouterr()
        assert "\x1b" not in out + err
        return code, out, err

    return command


@pytest.fixture
def console(fake):
    """Run commands on a terminal of their own: `with console("chat", "m") as screen`."""
    return lambda *words, **more: contextlib.closing(Pty(words, fake.port, **more))


def test_workers_are_lines_of_columns(fake, run):
    """Without a terminal every worker is one line with as many words as columns, whatever is known of it."""
    code, out, err = run("workers")
    head, *rows = [row.split() for row in out.splitlines()]
    assert (code, err, len(rows)) == (0, "", 3)
    first = dict(zip(head, rows[0], strict=True))
    assert (first["WORKER"], first["STATE"], first["MODEL"], first["ADDRESS"]) == (
        "w1",
        "ready",
        "org/m,m",
        "10.0.0.1:8001",
    )
    assert (first["IN_FLIGHT"], first["RUNNING"], first["KV_USE"], first["LAST_HEARTBEAT"]) == ("3", "2", "38%", "1.3s")
    assert "ended with exit code 70: CUDA is out of memory" in out
    assert rows[2] == ["w3", *["-"] * (len(head) - 1)]
    assert len({row.find(word) for row, word in zip(out.splitlines(), ["STATE", "ready", "failed"], strict=False)}) == 1


def test_every_state_is_shown(fake, run, console):
    """Those of today and those of another gateway, in a line and on a terminal; a worker is not more than its words."""
    workers = [{**READY, "worker_id": f"w{number}", "state": state} for number, state in enumerate(STATES)]
    workers += [{**FAILED, "worker_id": "long", "state": "failed", "cause": "because " * 50}]
    workers += [
        {"worker_id": 7, "state": None, "progress": "x", "args": [], "group": 1, "heartbeat_age_s": float("inf")}
    ]
    fake.answers["GET", "/v1/admin/workers"] = 200, {"data": workers}
    code, out, _err = run("workers")
    assert (code, [row.split()[1] for row in out.splitlines()[1:]]) == (0, [*STATES, "failed", "-"])
    assert "because " * 49 in out
    with console("workers", columns=160) as screen:
        assert screen.end() == 0
        assert "\x1b[1;31mrestarting" in screen.text
        assert "\x1b[1;31mwedged" in screen.text
        assert "a-new-one" in screen.text
        assert 5 < screen.text.count("because") < 15
    for worker in workers:
        fake.answers["GET", "/v1/admin/workers/w1"] = 200, worker
        assert run("workers", "w1")[0] == 0


def test_usage_is_a_table_or_csv(fake, run, console, monkeypatch):
    """A line for each row, with as many words as columns; the flags are the question; --own asks with one's own key."""
    code, out, err = run(
        "usage", "--by", "key,model", "--from", "2026-11-01", "--to", "2026-11-23T04:00", "--model", "m"
    )
    assert fake.asked[-1].query == {"by": "key,model", "from": "2026-11-01", "to": "2026-11-23T04:00", "model": "m"}
    head, *rows = [line.split() for line in out.splitlines()]
    assert (code, err, len(rows)) == (0, "", 2)
    first = dict(zip(head, rows[0], strict=True))
    assert [first[name] for name in ("KEY", "MODEL", "REQUESTS", "TOKENS_IN", "BUSY", "COST")] == [
        "a",
        "m",
        "3",
        "900",
        "12s",
        "0.25",
    ]
    assert rows[1][:2] == ["-", "n"]
    assert rows[1][-1] == "-"
    _, out, _ = run("usage", "--csv")
    assert (
        out.splitlines()[0]
        == "key,model,requests,errors,input_tokens,output_tokens,cached_tokens,estimated_tokens,busy_s,cost"
    )
    assert out.splitlines()[2] == ",n,3,1,900,80,64,0,12.5,"
    assert json.loads(run("usage", "--json")[1]) == USED
    monkeypatch.setenv("ICHAT_API_KEY", "sk-own")
    monkeypatch.setenv("ICHAT_ADMIN_KEY", "sk-admin")
    _, out, _ = run("usage", "--own")
    assert fake.asked[-1].headers["authorization"] == "Bearer sk-own"
    assert "tokens_per_day" in out
    with console("usage") as screen:
        assert screen.end() == 0
        assert re.search(r" all .* 6 ", screen.text)
    fake.answers["GET", "/v1/admin/usage"] = 200, {**USED, "rows": [], "storage": "the disk is full"}
    _, out, err = run("usage")
    assert err == "This may not be all: the disk is full.\n"
    with console("usage") as screen:
        screen.until("Nothing was used from 2026-11-01")


def test_a_worker_is_shown_whole_and_does_nothing_to_the_terminal(fake, run):
    """Everything that is known of it is there, in lines; nothing that a worker writes is done by the terminal."""
    for words in (("workers", "w2"), ("worker-show", "w2")):
        code, out, _err = run(*words)
        assert code == 0
        facts = dict(re.findall(r"^ *(\S+(?: \S+)*?)  +(.*)$", out, re.MULTILINE))
        assert facts["failure"] == "ended with exit code 70"
        assert (facts["backend"], facts["group"], facts["load time"]) == ("vllm 0.32.0", "rank 0 of 2 in g", "1m15s")
        assert facts["max_model_len"] == "8192"
        assert "seed" not in facts
        assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:00:00[+-]\d\d:\d\d", facts["ended last"])
        assert "last lines before it ended\n  torch.OutOfMemoryError\n  bye\n" in out


def test_arguments_that_are_the_engines_defaults_are_not_shown(fake, run, console):
    """Of the arguments only those are shown that differ, all of them with `--all`, and all of a worker that cannot say."""
    args = {
        "model": "/m",
        "max_model_len": 8192,
        "seed": None,
        "dtype": "auto",
        "note": "",
        "config": {"sizes": [8] * 40},
    }
    worker = {**READY, "args": args, "backend_args": args, "changed_args": ["model", "max_model_len", "config", "note"]}
    fake.answers["GET", "/v1/admin/workers/w1"] = 200, worker

    def shown(*words):
        title, _, rest = run(*words, "w1")[1].partition("\narguments")[2].partition("\n")
        rest = rest.partition("\n\n")[0]
        return title, dict(line.split(maxsplit=1) for line in rest.splitlines())

    title, facts = shown("worker-show")
    assert title == " other than the engine's defaults (4 of 6; --all shows all)"
    assert facts == {"config": json.dumps(args["config"]), "max_model_len": "8192", "model": "/m", "note": '""'}
    assert shown("workers")[1] == facts
    assert shown("worker-show", "--all")[0] == ""
    assert shown("workers", "--all")[1] == {**facts, "dtype": "auto", "seed": "null"}
    with console("worker-show", "w1", columns=80) as screen:
        assert screen.end() == 0
        lines = re.sub(r"\x1b\[[\d;]*m", "", screen.text).splitlines()
        assert max(map(len, lines)) <= 80
        below = lines[next(index for index, line in enumerate(lines) if line.startswith("  config")) + 1]
        assert below.startswith(" " * 17 + "8, 8")
    fake.answers["GET", "/v1/admin/workers/w1"] = 200, {**worker, "changed_args": None}
    assert shown("worker-show") == ("", {**facts, "dtype": "auto"})


def test_an_end_that_is_over_is_no_failure(fake, run):
    """A worker that runs again is well; when and why it ended last is told where all is told."""
    more = {"origin": "api", "gpu_ids": [], "log_file": "/s/logs/w1.log", "signal": "SIGKILL", "exit_code": None}
    again = {**FAILED, **more, "worker_id": "w1", "state": "ready", "failure": None, "retry_in_s": None}
    fake.answers["GET", "/v1/admin/workers"] = 200, {"data": [again]}
    assert run("workers")[1].splitlines()[1].split()[-1] == "-"
    fake.answers["GET", "/v1/admin/workers/w1"] = 200, again
    out = run("workers", "w1")[1]
    assert re.search(r"^ended last +20\S+ \d\d:00:00\S+, SIGKILL, CUDA is out of memory\.$", out, re.MULTILINE)
    assert re.search(r"^started by +the gateway, by its API$", out, re.MULTILINE)
    assert re.search(r"^gpus +none$", out, re.MULTILINE)
    assert "\ncause" not in out
    ill = {**again, "state": "unhealthy", "failure": "/health is answered with 500"}
    fake.answers["GET", "/v1/admin/workers"] = 200, {"data": [ill]}
    assert run("workers")[1].rstrip().endswith("  /health is answered with 500")
    fake.answers["GET", "/v1/admin/workers/w1"] = 200, ill
    out = run("workers", "w1")[1]
    assert "\ncause" not in out
    assert "SIGKILL, CUDA is out of memory.\n" in out
    fake.answers["GET", "/v1/admin/workers"] = 200, {"data": [{**READY, "state": "draining"}]}
    assert run("workers")[1].splitlines()[1].split()[-1] == "-", "one that is drained says that it is ready"
    down = {**again, "state": "restarting", "failure": "ended with exit code 70", "retry_in_s": 4.2}
    fake.answers["GET", "/v1/admin/workers"] = 200, {"data": [down]}
    assert run("workers")[1].rstrip().endswith(" ended with exit code 70: CUDA is out of memory; starts in 4.2s")
    lost = [{"worker_id": f"r{rank}", "why": "has ended", "host": "h", "port": 1} for rank in (1, 2)]
    fake.answers["GET", "/v1/admin/workers"] = 200, {"data": [{**READY, "state": "broken", "lost": lost}]}
    said = "has lost worker r1, which has ended and worker r2, which has ended, of its group"
    assert run("workers")[1].rstrip().endswith(said)


def test_status_and_models(fake, run):
    """The machine, its GPUs and who holds them; the models."""
    code, out, _err = run("status")
    assert code == 0
    assert out.splitlines()[0] == "! worker w2 is failed: ended with exit code 70: CUDA is out of memory"
    assert re.search(r"^up +1d1h$", out, re.MULTILINE)
    assert re.search(r"^memory +1.0GiB free of 64.0GiB$", out, re.MULTILINE)
    assert re.search(r"^workers +1 failed, 1 ready$", out, re.MULTILINE)
    assert re.search(r"^0 +H100 +90% +40.0GiB +80.0GiB +w1, process 8$", out, re.MULTILINE)
    assert re.search(r"^org/m +1 +3 +0 +- +-$", out, re.MULTILINE)
    fake.answers["GET", "/v1/admin/cluster/status"] = 200, {"gateway": {}, "resources": {"gpus": None}}
    assert run("status")[0] == 0
    gpu = {"index": 3, "name": "H200", "memory_total_bytes": 2**37, "memory_used_bytes": 2**30, "use": 0.5,
           "held_by": [{"worker_id": "w2", "memory_bytes": 2**30}]}  # fmt: skip
    far = {"name": "far", "cpus": 64, "cpu_use": 0.35, "memory_total_bytes": 2**40, "memory_available_bytes": 2**39,
           "workers": ["w2", "w3"], "gpus": [gpu]}  # fmt: skip
    near = {**far, "name": "near", "has_gateway": True, "cpu_use": None, "workers": [], "gpus": None}
    fake.answers["GET", "/v1/admin/cluster/status"] = 200, {**STATUS, "machines": [near, far]}
    out = run("status")[1]
    assert re.search(r"^near \(gateway\) +- of 64 +512.0GiB free of 1.0TiB", out, re.MULTILINE)
    assert re.search(r"^far +35% of 64 +512.0GiB free of 1.0TiB +w2, w3$", out, re.MULTILINE)
    assert re.search(r"^far +3 +H200 +50% +1.0GiB +128.0GiB +w2$", out, re.MULTILINE)
    fake.answers["GET", "/v1/admin/cluster/status"] = 200, {"resources": {"gpus": None}, "machines": [far]}
    assert re.search(r"^3 +H200 +50% +1.0GiB +128.0GiB +w2$", run("status")[1], re.MULTILINE)
    assert run("models")[1].splitlines()[1].split() == ["org/m", "vllm", "8192", "-", "/m", "-"]


def test_models_that_are_loaded_on_demand(fake, run):
    """They are told apart by whether they are loaded, and a worker that is being loaded says when it will be ready."""
    models = [{"id": "m", "workers": 0, "in_flight": 0, "queued": 2, "loaded": False, "waiting_s": 12.3}]
    fake.answers["GET", "/v1/admin/cluster/status"] = 200, {**STATUS, "models": models, "workers": {"cold": 1}}
    out = run("status")[1]
    assert re.search(r"^m +0 +0 +2 +no +12s$", out, re.MULTILINE)
    assert re.search(r"^workers +1 cold$", out, re.MULTILINE)
    entries = [{"id": "m", "owned_by": "vllm", "loaded": False}, {"id": "n", "owned_by": "vllm", "loaded": True}]
    fake.answers["GET", "/v1/models"] = 200, {"object": "list", "data": entries}
    assert [row.split()[-1] for row in run("models")[1].splitlines()[1:]] == ["no", "yes"]
    workers = [COLD, {**COLD, "worker_id": "m-1", "state": "loading", "phase": "weights", "ready_in_s": 7.25}]
    fake.answers["GET", "/v1/admin/workers"] = 200, {"data": workers}
    fake.answers["GET", "/v1/admin/workers/m-1"] = 200, workers[1]
    out = run("workers")[1].splitlines()
    assert out[1].split()[:3] == ["m-0", "cold", "m"]
    assert out[2].endswith("weights, ready in about 7.2s")
    assert re.search(r"^ready in +7.2s$", run("workers", "m-1")[1], re.MULTILINE)


def test_a_load_is_shown_in_words(fake, run):
    """The phase with its seconds, what it took last time, and what is left; later what the load took."""
    phases = [
        {"name": "importing vLLM", "seconds": 9.1, "expected_s": 8.0, "detail": ""},
        {"name": "loading weights", "seconds": 12.6, "expected_s": 14.1, "detail": "3 of 8 shards"},
    ]
    load = {"elapsed_s": 21.7, "expected_s": 61.7, "phases": phases}
    workers = [
        {**COLD, "worker_id": "m-1", "state": "loading", "phase": "loading weights", "ready_in_s": 7, "load": load}
    ]
    fake.answers["GET", "/v1/admin/workers"] = 200, {"data": workers}
    fake.answers["GET", "/v1/admin/workers/m-1"] = 200, workers[0]
    words = "loading weights 3 of 8 shards, 12 s (last time 14 s); about 40 s left"
    assert run("workers")[1].splitlines()[1].endswith(words)
    assert re.search(rf"^loading +{re.escape(words)}$", run("workers", "m-1")[1], re.MULTILINE)
    fake.answers["GET", "/v1/admin/workers/m-1"] = 200, {**READY, "load": None, "last_load": load}
    out = run("workers", "m-1")[1]
    assert re.search(r"^last load +22 s: importing vLLM 9 s, loading weights 13 s$", out, re.MULTILINE)
    assert not re.search(r"^loading ", out, re.MULTILINE)


def test_where_a_request_would_go(fake, run, monkeypatch, tmp_path):
    """The chosen one is marked, each other one says why not, and a sentence says why."""
    code, out, err = run("explain", "m", "Hello, ä.", "--session", "s")
    verdict, head, *rows, last = out.splitlines()
    assert (code, err) == (0, "")
    assert verdict == "→ w1 (longest cached prefix, 6 144 of 8 190 bytes)"
    assert head.split() == ["CHOSEN", "WORKER", "STATE", "LOAD", "IN_FLIGHT", "HAS_BYTES", "CIRCUIT", "REMARK"]
    assert [row.split(maxsplit=7) for row in rows] == [
        ["yes", "w1", "ready", "3", "2/256", "6144", "closed", "-"],
        ["-", "w2", "ready", "90", "90/256", "0", "closed", "has too much to do"],
        ["-", "w3", "loading", "0", "0/0", "0", "-", "is loading (weights)"],
    ]
    assert last == "It goes to w1: its cache should have 6144 of the prompt's 8190 bytes, and no other's has more."
    assert fake.asked[-1].query == {"session": "s"}
    said = '{"model":"m","messages":[{"role":"user","content":"Hello, ä."}]}'
    assert fake.asked[-1].body == said.encode(), "as OpenAI's client writes it"
    assert run("explain", "m")[0] == 0
    assert fake.bodies()[-1] == {"model": "m"}
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"From a pipe.")))
    assert run("explain", "m", "-", "--path", "/v1/messages")[0] == 0
    assert fake.bodies()[-1]["messages"][0]["content"] == "From a pipe."
    assert fake.asked[-1].query == {"path": "/v1/messages"}
    body = b'{ "model": "m",\n  "prompt" : "a" }'
    (tmp_path / "body.json").write_bytes(body)
    assert run("explain", "m", "--file", str(tmp_path / "body.json"))[0] == 0
    assert fake.asked[-1].body == body, "byte for byte"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(body)))
    assert run("explain", "m", "--file", "-")[0] == 0
    assert fake.asked[-1].body == body


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"rule": "spill", "prefix": {"length": 9, "matched": 2, "deepest": 8}},
         "It goes to w1: another's cache should have 8 of the prompt's 9 bytes, but that worker has had more to do."),
        ({"rule": "least_loaded"},
         "It goes to w1: it has the fewest requests, and no cache should have the prompt's beginning."),
        ({"rule": "least_loaded", "prefix": None}, "It goes to w1: it has the fewest requests."),
        ({"rule": "session"}, "It goes to w1: the session belongs there, with any prompt and load."),
        ({"rule": "a-new-one"}, "It goes to w1: the rule is a-new-one."),
        ({"rule": "queued", "chosen": None, "reason": "all are full, and 2 requests wait already"},
         "It waits: all are full, and 2 requests wait already."),
        ({"rule": "queue_full", "chosen": None, "reason": "all are full"}, "It is refused (429): all are full."),
        ({"rule": "loading", "chosen": None, "reason": "worker m-0 is cold", "load": None},
         "It waits while the model is loaded: worker m-0 is cold."),
        ({"rule": "loading", "chosen": None, "load": LOAD},
         ("Loading it would stop worker x-0, which has been idle for 40s, and put worker y-0 to sleep once its"
          " requests have ended, and would wait for worker z-0, which is starting. That takes about 25s.")),
        ({"rule": "loading", "chosen": None, "load": {"worker_id": "m-0", "evicts": [], "waits_for": []}},
         "Loading it evicts no other worker."),
        ({"rule": "not_ready", "chosen": None, "reason": "worker w1 is loading", "candidates": []},
         "It is refused (503): worker w1 is loading."),
    ],
)  # fmt: skip
def test_why_it_would_go_there(fake, run, more, sentence):
    """Each rule has a sentence, one of a newer gateway too."""
    fake.answers["POST", "/v1/admin/route"] = 200, {**ROUTE, **more}
    assert run("explain", "m")[1].splitlines()[-1] == sentence


def test_the_plan_of_a_name_comes_first(fake, run):
    """Each model with its place, its share and what it would do; then where the request goes, as for a model."""
    plan = [
        {"model": "a", "share": 0.95, "place": 1, "rule": "not_ready", "worker": None, "reason": "w9 is loading",
         "goes_on": "not_ready"},
        {"model": "c", "share": 0.05, "place": None, "rule": "single", "worker": "w8", "reason": None, "goes_on": None},
        {"model": "m", "share": None, "place": 2, "rule": "prefix", "worker": "w1", "reason": None, "goes_on": None},
    ]  # fmt: skip
    fake.answers["POST", "/v1/admin/route"] = 200, {**ROUTE, "alias": "gpt", "plan": plan}
    verdict, *told = run("explain", "gpt")[1].splitlines()
    assert verdict.startswith("→ w1 (longest cached prefix")
    lines = [line.split() for line in told]
    assert lines[:5] == [
        ["ASKED", "MODEL", "SHARE", "LEADS_TO", "THEN", "REMARK"],
        ["1", "a", "0.95", "not_ready", "goes", "on", "(not_ready)", "w9", "is", "loading"],
        ["-", "c", "0.05", "w8", "-", "-"],
        ["2", "m", "-", "w1", "-", "-"],
        ["gpt", "is", "m", "for", "this", "request:"],
    ]
    assert lines[5][0] == "CHOSEN"


def test_every_rule_has_a_sentence(fake, run):
    """None that this gateway knows is shown by its name alone."""
    for rule in get_args(Rule):
        fake.answers["POST", "/v1/admin/route"] = 200, {**ROUTE, "rule": rule}
        out = run("explain", "m")[1]
        assert "the rule is" not in out, rule
        assert f"({rule})" not in out.splitlines()[0], rule


def test_explain_begins_with_a_request_that_no_worker_gets(fake, run):
    """It is said before anything else."""
    for rule, words in (("queued", "waits"), ("loading", "waits while the model is loaded"), ("x", "is refused (503)")):
        fake.answers["POST", "/v1/admin/route"] = 200, {**ROUTE, "rule": rule, "chosen": None, "reason": "so"}
        assert run("explain", "m")[1].splitlines()[0] == f"→ no worker now: it {words}"


@pytest.mark.parametrize(
    ("tokens", "share", "words"),
    [
        ({"prompt_tokens": 800, "cached_tokens": 600}, "75%", ["had 600 of 800 prompt tokens (75%)"]),
        ({"prompt_tokens": 0, "cached_tokens": 0}, "-", []),
        ({"prompt_tokens": 80, "cached_tokens": None}, "-", []),
        ({}, "-", []),
    ],
)
def test_hits_of_the_prefix_cache(fake, run, tokens, share, words):
    """The share of the prompts' tokens that an engine's own cache had; unknown before there was a prompt."""
    worker = {**READY, "progress": tokens}
    fake.answers["GET", "/v1/admin/workers"] = 200, {"data": [worker]}
    fake.answers["GET", "/v1/admin/workers/w1"] = 200, worker
    head, row = (row.split() for row in run("workers")[1].splitlines())
    assert dict(zip(head, row, strict=True))["HITS"] == share
    assert re.findall(r"^prefix cache +(.*)$", run("workers", "w1")[1], re.MULTILINE) == words


def test_reload_shows_the_plan(fake, run):
    """A plan that was to be carried out and was not is a refusal."""
    code, out, _err = run("reload", "--dry-run")
    assert (code, fake.asked[-1].query) == (0, {"dry_run": "1"})
    assert out.splitlines()[1].split() == ["start", "worker", "b", "is", "new"]
    assert out.splitlines()[-1] == PLAN["summary"]
    assert (run("reload")[0], fake.asked[-1].query) == (0, {})
    fake.answers["POST", "/v1/admin/config/reload"] = 200, {**PLAN, "applied": False}
    assert run("reload")[0] == 1
    assert run("reload", "--dry-run")[0] == 0
    actions = ("later", "keep", "a-new-one")
    plan = [{"action": action, "what": f"the {action}", "why": None} for action in actions]
    fake.answers["POST", "/v1/admin/config/reload"] = 200, {"applied": False, "plan": plan[:2]}
    assert run("reload")[0] == 0
    fake.answers["POST", "/v1/admin/config/reload"] = 200, {"applied": True, "plan": plan}
    code, out, _err = run("reload")
    assert (code, [row.split()[0] for row in out.splitlines()[1:]]) == (0, list(actions))


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["workers"], {"object": "list", "data": [READY, FAILED, {"worker_id": "w3"}]}),
        (["workers", "w1"], READY),
        (["worker-show", "w2"], FAILED),
        (["status"], STATUS),
        (["models"], MODELS),
        (["reload"], PLAN),
        (["explain", "m", "Hello."], ROUTE),
        (["launch", "/m"], {"worker_id": "w1", "state": "starting"}),
        (["launch", "/m", "--wait"], READY),
        (["stop", "w1"], {"worker_id": "w1", "state": "stopped"}),
        *((([verb, "m"]), CHANGED) for verb in VERBS),
    ],
)
def test_json_is_what_the_gateway_said(fake, run, words, value):
    """`--json` gives exactly the answer, and nothing else on standard output."""
    code, out, _err = run(*words, "--json")
    assert (code, out) == (0, json.dumps(value) + "\n")


def test_launch_sends_what_was_typed(fake, run, tmp_path, monkeypatch):
    """Our flags may stand anywhere, the engine's after the model; only what was given is sent."""
    code, out, _err = run("launch", "--gpu-ids", "0,1", "org/M", "--max-model-len", "8192", "--port=0", "--enforce-eager",
                          "--heartbeat-interval", "2.5", "-be", "sglang", "-n", "m", "--", "--api-key", "007")  # fmt: skip
    assert (code, out) == (0, "w1 starting\n")
    assert fake.bodies() == [{
        "model_name": "m", "model_path": "org/M", "backend": "sglang", "gpu_ids": [0, 1], "port": 0, "heartbeat_interval": 2.5,
        "max_model_len": 8192, "enforce_eager": True, "api_key": "007",
    }]  # fmt: skip
    run("launch", "org/M", "--gpu-ids", "none", "--share-gpus")
    assert fake.bodies()[-1] == {"model_name": "org/M", "model_path": "org/M", "gpu_ids": [], "share_gpus": True}
    run("launch", "org/M")
    assert fake.bodies()[-1] == {"model_name": "org/M", "model_path": "org/M"}
    (tmp_path / "models/x").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    run("launch", "./models/x/")
    assert fake.bodies()[-1] == {"model_name": "x", "model_path": str(tmp_path / "models/x")}


@pytest.mark.parametrize(
    ("words", "arguments", "flags"),
    [
        (["--a-b", "1", "--c", "1.5", "--d", "1e3", "--e", "007"], {"a_b": 1, "c": 1.5, "d": "1e3", "e": "007"}, None),
        (["--a", "--no-b", "--c=x=y", "--d", "-1"], {"a": True, "b": False, "c": "x=y", "d": -1}, None),
        (["--a", "x=1", "y=2"], {"a": ["x=1", "y=2"]}, None),
        (["--a", '{"k": 1}'], {"a": '{"k": 1}'}, None),
        (
            ["--a.k_e-y.z", "5", "--a.x", "t"],
            {"a": {"k_e-y": {"z": 5}, "x": "t"}},
            ["--a", '{"k_e-y": {"z": 5}, "x": "t"}'],
        ),
    ],
)
def test_engine_flags_survive_the_way_through_the_api(words, arguments, flags):
    """What the gateway makes of the arguments is what was typed."""
    found = terminal_launch.engine_arguments(words)
    assert found == arguments
    assert [type(value) for value in found.values()] == [type(value) for value in arguments.values()]
    assert " ".join(engine_flags(found)).replace("=", " ") == " ".join(flags or words).replace("=", " ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launch"], "the following arguments are required: MODEL_PATH"),
        (["run"], "ichat.pyz run: the following arguments are required: MODEL\n"),
        (["launch", "--max-model-len", "8192", "m"], "--max-model-len is no flag of it; the engine's flags stand after"),
        (["launch", "m", "x"], "x belongs to no flag."),
        (["launch", "m", "-tp", "2"], "-tp: write the long form"),
        (["launch", "m", "--x", "1", "--x", "2"], "--x is given twice."),
        (["launch", "m", "--x", "1", "--x.y", "2"], "--x has a value already."),
        (["launch", "m", "--port", "0", "--", "--port", "1"], "--port is given twice."),
        (["launch", "m", "--gpu-ids", "0;1"], "must be like 0,1"),
        (["launch", "m", "--port"], "argument --port: expected one argument"),
        (["stop", "w1", "--drain-s", "-1"], "--drain-s"),
        (["workers", "a", "b"], "unrecognized arguments: b"),
        (["top", "--onse=1"], "unrecognized arguments: --onse=1 (did you mean --once"),
        (["worker-show"], "the following arguments are required: ID"),
        (["logs", "-f", "--previous", "w1"], "not allowed with argument"),
        (["logs", "--tail", "x", "w1"], "must be a number from 0 on"),
        (["logs"], "Name a worker"),
        (["logs", "--own", "w1"], "Name a worker"),
        (["logs", "-f", "--grep", "x", "w1"], "leave out --follow and --own"),
        (["logs", "--own", "--before", "2026-11-23"], "leave out --follow and --own"),
        (["logs", "--before", "yesterday", "w1"], "--before must be a time such as"),
        (["models", "--gateway", "ftp://x"], "The gateway's address must be like"),
        (["models", "--gateway", "http://u:p@x"], "The gateway's address must be like"),
        (["models", "--gateway", "x", "-c", "y"], "not allowed with argument"),
        (["models", "-c", "/none.toml"], "/none.toml cannot be read"),
        (["models", "--api-key", "ä"], "The API key must be printable ASCII"),
        (["models", "--ca-certificates", "/none.pem", "-g", "https://x"], "The certificates /none.pem cannot be used"),
        (["chat", "m", " "], "The prompt is empty."),
        (["explain", "m", "Hello.", "--file", "x"], "Give a PROMPT or --file BODY, not both."),
        (["explain", "m", "--file", "/none.json"], "/none.json cannot be read: No such file"),
        (["explain", "m", "--file", "pyproject.toml"], "The body in pyproject.toml is for the model None, not 'm'."),
    ],
)  # fmt: skip
def test_a_wrong_command_line_asks_nothing(fake, run, words, said):
    """It is one sentence and exit code 64."""
    code, out, err = run(*words)
    assert (code, out, fake.asked) == (64, "", [])
    assert said in err


def test_launch_waits_until_ready(fake, run):
    """Each change is told once; a connection that breaks meanwhile is made again."""
    states = iter(
        [
            {"state": "starting"},
            None,
            {"state": "loading", "phase": "weights"},
            None,
            {"phase": "weights"},
            {"state": "restarting", "failure": "ended with exit code 70", "cause": "CUDA out of memory"},
            {"state": "loading", "failure": None, "restarts": 1},
            READY,
        ]
    )
    worker = {"worker_id": "w1"}

    def answer(one):
        state = next(states)
        one.close_connection = state is None
        worker.update(state or {})
        return (200, worker) if state else None

    fake.answers["GET", "/v1/admin/workers/w1"] = answer
    code, out, err = run("launch", "/m", "--wait")
    assert (code, out) == (0, "w1 ready\n")
    assert err.splitlines() == [
        "w1: starting",
        "w1: loading (weights)",
        "w1: restarting since it ended with exit code 70: CUDA out of memory",
        "w1: loading (weights) after 1 restart",
    ]


def test_launch_waits_for_no_request(fake, run):
    """A worker that is loaded on demand has been launched when it is cold."""
    fake.answers["GET", "/v1/admin/workers/w1"] = 200, {**READY, "state": "cold", "phase": None}
    assert run("launch", "/m", "--load", "on_demand", "--wait")[:2] == (0, "w1 cold\n")
    assert fake.bodies()[0]["load"] == "on_demand"


def test_launch_says_why_a_worker_has_failed(fake, run):
    """Its last lines and one sentence, with exit code 1."""
    fake.answers["GET", "/v1/admin/workers/w1"] = 200, FAILED
    code, out, err = run("launch", "/m", "--wait")
    assert (code, out) == (1, "")
    assert err == "torch.OutOfMemoryError\nbye\nWorker w1 ended with exit code 70: CUDA is out of memory.\n"
    fake.answers["GET", "/v1/admin/workers/w1"] = 200, {**FAILED, "last_lines": ["one", FAILED["cause"]]}
    assert run("launch", "/m", "--wait")[2] == "one\nWorker w1 ended with exit code 70: CUDA is out of memory.\n"


def test_launch_waits_no_longer_than_its_bound(fake, run):
    """The worker goes on loading."""
    fake.answers["GET", "/v1/admin/workers/w1"] = 200, {**READY, "state": "loading"}
    code, _out, err = run("launch", "/m", "--wait", "--timeout-s", "0.05")
    assert code == 1
    assert "Worker w1 was not ready within 0.05 s; it goes on loading." in err


def test_stop_shows_what_is_under_way(fake, run):
    """It lasts as long as the gateway takes, and shows what the worker still does."""
    seen = threading.Event()

    def stop(_):
        seen.wait(LIMIT_S)
        return 200, {"worker_id": "w1", "state": "stopped"}

    def worker(_):
        seen.set()
        return 200, {**READY, "state": "draining", "phase": ""}

    fake.answers["DELETE", "/v1/admin/workers/w1"] = stop
    fake.answers["GET", "/v1/admin/workers/w1"] = worker
    code, out, err = run("stop", "w1", "--drain-s", "5")
    assert (code, out) == (0, "w1 stopped\n")
    assert "w1: draining, 3 requests under way\n" in err
    assert next(one for one in fake.asked if one.command == "DELETE").query == {"drain_s": "5"}


def test_load_says_what_it_evicts_and_how_long_it_took(fake, run):
    """First comes what is in the way, then each change of the model's workers, and at the end what has become of it."""
    workers = iter([COLD, {**COLD, "state": "loading", "phase": "weights"}])
    is_over = threading.Event()

    def load(_):
        assert is_over.wait(LIMIT_S)
        return 200, CHANGED

    def listed(_):
        worker = next(workers, None)
        if worker is None:
            is_over.set()
        return 200, {"data": [worker or {**COLD, "state": "loading", "phase": "weights"}]}

    fake.answers["POST", "/v1/admin/route"] = 200, {**ROUTE, "load": LOAD}
    fake.answers["POST", "/v1/admin/models/load"] = load
    fake.answers["GET", "/v1/admin/workers"] = listed
    code, out, err = run("load", "m")
    assert (code, out) == (0, "m-0 ready after 23s\n")
    first, *rest = err.splitlines()
    assert first.startswith("Loading it would stop worker x-0, which has been idle for 40s")
    assert rest == ["m-0: cold", "m-0: loading (weights)"]
    assert "/v1/admin/workers?model=m" in [one.path for one in fake.asked]
    assert fake.bodies() == [{"model": "m"}, {"model": "m"}]


@pytest.mark.parametrize("verb", VERBS)
def test_a_model_that_cannot_be_changed(fake, run, verb):
    """The refusal is one sentence, whether the gateway can say what is in the way or not."""
    refusal = error("not_on_demand", "The model `m` is not loaded on demand.")
    fake.answers["POST", f"/v1/admin/models/{verb}"] = 409, refusal
    fake.answers["POST", "/v1/admin/route"] = 404, error("model_not_found", "The model `m` does not exist.")
    code, out, err = run(verb, "m")
    said = err.splitlines()[-1]  # behind what its workers do, if slow
    assert (code, out, said) == (1, "", "The model `m` is not loaded on demand.")


def test_unload_sends_its_drain_time(fake, run):
    """`--drain-s` goes to the gateway; the other commands have no such flag."""
    assert run("unload", "m", "--drain-s", "2.5")[:2] == (0, "m-0 ready after 23s\n")
    assert run("unload", "m")[0] == 0
    unloads = [one.query for one in fake.asked if "/models/unload" in one.path]
    assert unloads == [{"drain_s": "2.5"}, {}]
    assert run("load", "m", "--drain-s", "2.5")[0] == 64


def test_a_refusal_is_the_gateways_sentence(fake, run):
    """With exit code 1, and a hint where a key is missing."""
    fake.answers["DELETE", "/v1/admin/workers/w1"] = 409, error("conflict", "Worker w1\nwas started by hand.")
    code, out, err = run("stop", "w1")
    assert (code, out, err.splitlines()[-1]) == (1, "", "Worker w1 was started by hand.")  # behind its state, if slow
    fake.answers["GET", "/v1/models"] = 401, error("invalid_api_key", "A key is needed.")
    assert run("models")[2] == "A key is needed. Set ICHAT_API_KEY, or give --api-key.\n"
    assert run("models", "--api-key", "k")[2] == "A key is needed.\n"
    assert fake.asked[-1].headers["authorization"] == "Bearer k"
    fake.answers["GET", "/v1/models"] = 400, {"object": "error", "message": "Flat.", "code": 400}
    assert run("models", "--json") == (1, "", "Flat.\n")
    assert run("workers", "a/b?c")[0] == 1
    assert fake.asked[-1].path == "/v1/admin/workers/a%2Fb%3Fc"


def test_health_is_an_exit_code(fake, run):
    """0 if the gateway answers, 1 if it refuses, 69 if nothing answers there."""
    fake.answers["GET", "/health"] = (200, {"status": "ok"})
    assert run("health") == (0, "ok\n", "")
    fake.answers["GET", "/health"] = (503, {"error": {"code": "draining", "message": "It is shutting down."}})
    code, out, err = run("health")
    assert (code, out) == (1, "")
    assert "shutting down" in err
    fake.answers["GET", "/health"] = lambda one: setattr(one, "close_connection", True)
    assert run("health")[0] == 69


def test_no_gateway_there(fake, run, monkeypatch):
    """Nothing that listens, something else that listens, something that is no certificate's: exit code 69, one sentence."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        for words in (["models"], ["chat", "m", "hi"], ["logs", "-f", "w1"], ["stop", "w1"]):
            code, out, err = run(*words, "--gateway", address)
            assert (code, out) == (69, "")
            assert err.endswith(f"The gateway at http://{address} cannot be reached: Connection refused.\n")
    fake.answers["GET", "/v1/models"] = lambda one: one.plain(200, "<html>", "text/html")
    code, _out, err = run("models", "-g", f"http://127.0.0.1:{fake.port}/v1/")
    assert (code, err.count("\n")) == (69, 1)
    assert "is not iChat's gateway (status 200, text/html)" in err
    fake.answers["GET", "/v1/models"] = lambda one: setattr(one, "close_connection", True)
    code, _out, err = run("models")
    assert code == 69
    assert "broke: Remote end closed connection" in err


def test_proxies_of_the_environment_are_not_asked(fake, run, monkeypatch):
    """The gateway is asked itself."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ICHAT_API_KEY", "from-the-environment")
    assert run("models")[0] == 0
    assert fake.asked[-1].headers["authorization"] == "Bearer from-the-environment"


def test_the_configuration_says_where_and_whom_to_believe(run, tmp_path):
    """An https gateway is known by the certificate of its configuration, whatever its names; another's is refused."""
    authority = trustme.CA()
    for name in ("right", "wrong"):
        issued = authority.issue_cert("elsewhere.example")
        issued.private_key_pem.write_to_path(str(tmp_path / f"{name}.key"))
        issued.cert_chain_pems[0].write_to_path(str(tmp_path / f"{name}.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "right.pem", tmp_path / "right.key")
    fake = Fake(lambda sock: context.wrap_socket(sock, server_side=True))
    fake.answers["GET", "/v1/models"] = 200, MODELS
    try:
        for name, code in (("right", 0), ("wrong", 69)):
            config = tmp_path / f"{name}.toml"
            config.write_text(
                f'[server_settings]\nhost = "0.0.0.0"\nport = {fake.port}\n'
                f'tls_certificate = "{tmp_path}/{name}.pem"\ntls_key = "{tmp_path}/{name}.key"\n'
            )
            found, _out, err = run("models", "-c", str(config))
            assert found == code, err
        assert "certificate verify failed" in err
        code, _out, err = run(
            "models", "-g", f"https://127.0.0.1:{fake.port}", "--ca-certificates", str(tmp_path / "ca.pem")
        )
        assert code == 69
        assert "IP address mismatch" in err
    finally:
        fake.close()


def test_the_configuration_here_says_where(fake, run, tmp_path, monkeypatch):
    """`ichat.toml` in the current directory gives the address, unless a flag or the environment does."""
    (tmp_path / "ichat.toml").write_text(f"[server_settings]\nport = {fake.port}\n")
    (tmp_path / "other.toml").write_text("[server_settings]\nport = 9\n")
    monkeypatch.delenv("ICHAT_GATEWAY")
    monkeypatch.chdir(tmp_path)
    for words in (
        ["ps"],
        ["status"],
        ["models"],
        ["top", "--once"],
        ["logs", "w1"],
        ["keys"],
        ["console"],
        ["stop", "w1"],
    ):
        asked = len(fake.asked)
        run(*words)
        assert len(fake.asked) > asked, words
    asked = len(fake.asked)
    assert run("ps", "-c", "other.toml")[0] == run("ps", "-g", "127.0.0.1:9")[0] == 69
    monkeypatch.setenv("ICHAT_GATEWAY", "127.0.0.1:9")
    assert run("ps")[0] == 69
    assert len(fake.asked) == asked
    monkeypatch.delenv("ICHAT_GATEWAY")
    (tmp_path / "ichat.toml").write_text("[server_settings]\nprot = 1\n")
    code, _out, err = run("ps")
    assert (code, "ichat.toml" in err, "prot" in err) == (64, True, True)


def test_logs_are_lines(fake, run):
    """Lines and gaps as text; with `--json` one object a line, as it came."""
    events = [
        data({"lost": 4}, "event: gap\n"),
        line(5, "\x1b[31mred\x1b[0m \u2028 50%\r100%"),
        ": \n\n",
        line(6, "end"),
    ]
    fake.answers["GET", "/v1/logs/stream/w1"] = lambda one: one.stream(*events)
    assert run("logs", "--tail", "2", "w1") == (0, "--- 4 lines are lost ---\n100%\nend\n", "")
    assert fake.asked[-1].query == {"follow": "false", "tail": "2"}
    code, out, _err = run("logs", "--json", "--previous", "w1")
    found = [json.loads(one) for one in out.splitlines()]
    assert (code, found[0], [one["seq"] for one in found[1:]]) == (0, {"lost": 4}, [5, 6])
    assert fake.asked[-1].query == {"follow": "false", "previous": "1"}
    assert run("logs", "-t", "w1")[1].splitlines()[-1] == "2026-01-01T00:00:00.000Z end"


def test_logs_with_a_text_are_read_page_by_page(fake, run):
    """From the newest page back, until there are enough lines; they are shown oldest first."""
    entry = {"time": "2026-01-01T00:00:00.000Z", "position": "1.2.3", "previous": False}
    pages = iter([
        {"lines": [{**entry, "line": "three"}, {**entry, "line": "\x1b[31mfour\x1b[0m \x07"}], "before": "1.2.9"},
        {"lines": [], "before": "1.2.8"},
        {"lines": [{**entry, "line": "one"}, {**entry, "line": "two", "time": None}], "before": "1.2.7"},
    ])  # fmt: skip
    fake.answers["GET", "/v1/logs/pages/w1"] = lambda one: one.plain(200, json.dumps({**next(pages), "after": None}))
    code, out, err = run("logs", "--grep", "o", "--tail", "4", "-t", "--before", "2026-01-02T00:00Z", "w1")
    at = "2026-01-01T00:00:00.000Z"
    assert (code, out) == (0, f"{at} one\n- two\n{at} three\n{at} four \n")
    assert err == "Older lines: add --before 1.2.7\n"
    asked = [one.query for one in fake.asked if "/pages/" in one.path]
    assert [(one["before"], one["limit"], one["text"]) for one in asked[1:]] == [
        ("1.2.9", "2", "o"),
        ("1.2.8", "2", "o"),
    ]
    assert dt.datetime.fromisoformat(asked[0]["before"]) == dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
    fake.answers["GET", "/v1/logs/pages/w1"] = 200, {"lines": [], "before": None, "after": "1.2.3"}
    assert run("logs", "--grep", "x", "w1") == (0, "", "No line that is kept of w1 contains 'x'.\n")


def test_the_gateways_own_lines_are_shown(fake, run):
    """They have a stream of their own, whatever the workers are called."""
    fake.answers["GET", "/v1/logs/gateway"] = lambda one: one.stream(line(1, "reloaded"))
    assert run("logs", "--own") == (0, "reloaded\n", "")


def test_logs_go_on_after_a_break(fake, run):
    """A follower asks for what comes after its last line, and ends with the worker; nothing comes twice."""
    streams = iter([
        lambda one: one.stream(line(1, "one"), line(2, "two"), whole=False),
        lambda one: one.plain(404, error("not_found", "There is no worker w1.")),
        lambda one: one.stream(data({"lost": 7}, "event: gap\n"), line(10, "ten"), "data: half"),
        lambda one: one.stream(line(11, "eleven")),
    ])  # fmt: skip
    states = iter([READY, FAILED])
    fake.answers["GET", "/v1/logs/stream/w1"] = lambda one: next(streams)(one)
    fake.answers["GET", "/v1/admin/workers/w1"] = lambda one: (200, next(states))
    code, out, err = run("logs", "-f", "--tail", "2", "w1")
    assert (code, out) == (0, "one\ntwo\n--- 7 lines are lost ---\nten\neleven\n")
    assert err.count("Trying again.") == 1
    asked = [(one.headers["last-event-id"], one.query) for one in fake.asked if "/logs/" in one.path]
    follow = {"follow": "true"}
    assert asked == [(None, {**follow, "tail": "2"}), ("2", follow), ("2", follow), ("10", follow)]


def test_logs_of_an_unknown_worker_are_refused(fake, run):
    """A worker that was never there is refused at once."""
    fake.answers["GET", "/v1/logs/stream/w9"] = 404, error("not_found", "There is no worker w9.")
    assert run("logs", "-f", "w9") == (1, "", "There is no worker w9.\n")


NO_LINES = [
    ({"state": "restarting", "failure": "cannot be started", "cause": "There is no interpreter /no.", "retry_in_s": 4},
     "it is restarting, since it cannot be started: There is no interpreter /no; it is started again in 4.0s."),
    ({"state": "cold", "failure": None}, "it is cold, and is started when a request needs its model."),
    ({"state": "starting", "failure": None, "phase": "waiting for room"}, "it is starting (waiting for room)."),
    ({"state": "ready"}, "it is ready."),
]  # fmt: skip


@pytest.mark.parametrize(("known", "why"), NO_LINES)
def test_logs_without_a_line_say_why(fake, run, known, why):
    """Whether they are followed or not; a worker with lines, or whose old lines aren't asked for, needs no word."""
    fake.answers["GET", "/v1/admin/workers/w1"] = 200, {**READY, **known}
    fake.answers["GET", "/v1/logs/stream/w1"] = lambda one: one.stream()
    assert run("logs", "w1") == (0, "", f"w1 has no lines yet: {why}\n")
    assert run("logs", "--tail", "0", "w1") == (0, "", "")
    streams = iter([
        lambda one: one.stream(": \n\n", ": \n\n"),
        lambda one: one.stream(": \n\n", line(1, "one"), ": \n\n"),
    ])  # fmt: skip
    states = iter([(200, {**READY, **known}), (200, READY), (200, FAILED)])
    fake.answers["GET", "/v1/logs/stream/w1"] = lambda one: next(streams)(one)
    fake.answers["GET", "/v1/admin/workers/w1"] = lambda one: next(states)
    assert run("logs", "-f", "w1") == (
        0,
        "one\n",
        f"w1 has no lines yet: {why} Its lines are shown as soon as there are any.\n",
    )
    fake.answers["GET", "/v1/logs/stream/w1"] = lambda one: one.stream(line(1, "one"))
    assert run("logs", "w1") == (0, "one\n", "")


def test_logs_without_a_line_or_a_state_are_silent(fake, run):
    """If the gateway does not say how the worker is, the lines go on without that."""
    fake.answers["GET", "/v1/logs/stream/w1"] = lambda one: one.stream(": \n\n", line(1, "one"))
    states = iter([(500, error("internal_error", "A bug.")), (200, FAILED)])
    fake.answers["GET", "/v1/admin/workers/w1"] = lambda one: next(states)
    assert run("logs", "-f", "w1") == (0, "one\n", "")


def test_logs_of_a_worker_that_has_failed_before_its_first_line_say_why(fake, run):
    """Such a worker has no log; the refusal of its previous run, or of a worker that is well, is the gateway's."""
    refusal = "There is no worker w2 whose lines are known here."
    fake.answers["GET", "/v1/logs/stream/w2"] = 404, error("not_found", refusal)
    why = "w2 has no lines yet: it is failed, since it ended with exit code 70: CUDA is out of memory."
    assert run("logs", "w2") == run("logs", "-f", "w2") == (1, "", f"{why}\n")
    assert run("logs", "--previous", "w2") == (1, "", f"{refusal}\n")
    fake.answers["GET", "/v1/admin/workers/w2"] = 200, READY
    assert run("logs", "w2") == run("logs", "-f", "w2") == (1, "", f"{refusal}\n")


def test_one_answer(fake, run):
    """Standard output has the answer and nothing else; how fast it came stands on standard error."""
    fake.answers["POST", "/v1/chat/completions"] = lambda one: one.stream(
        delta(role="assistant", content=""), delta(reasoning="I think"), delta(reasoning_content="."), delta(content="Hel"),
        delta(content="lo\x1b[2J"), USAGE, DONE,
    )  # fmt: skip
    code, out, err = run(
        "chat", "m", "Say", "hello", "--system", "Be brief.", "--max-tokens", "9", "--temperature", "0"
    )
    assert (code, out) == (0, "Hello\n")
    assert re.fullmatch(r"\[40 tokens(, [\d.]+ tokens/s)?, the first after 0\.\d\d s\]\n", err)
    assert fake.bodies() == [{
        "model": "m", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello"}],
        "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 9, "temperature": 0.0,
    }]  # fmt: skip


@pytest.mark.parametrize(("words", "prompt"), [([], "from\nstdin"), (["Sum", "up:", "-"], "Sum up:\nfrom\nstdin")])
def test_a_prompt_on_standard_input(fake, run, monkeypatch, words, prompt):
    """Without a terminal it is the prompt, and with one it stands where `-` does."""
    fake.answers["POST", "/v1/chat/completions"] = lambda one: one.stream(delta(content="ok"), DONE)
    monkeypatch.setattr(sys, "stdin", io.StringIO("from\nstdin"))
    assert run("chat", "m", *words)[:2] == (0, "ok\n")
    assert fake.bodies()[0]["messages"] == [{"role": "user", "content": prompt}]


def test_events_as_json(fake, run):
    """One a line, as they came."""
    fake.answers["POST", "/v1/chat/completions"] = lambda one: one.stream(delta(content="a\u2028b"), USAGE, DONE)
    code, out, err = run("chat", "m", "hi", "--json")
    found = [json.loads(one) for one in out.rstrip("\n").split("\n")]
    assert (code, err, found[0]["choices"][0]["delta"]["content"], len(found)) == (0, "", "a\u2028b", 2)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_an_answer_that_breaks_off_is_no_success(fake, run, flags):
    """An error event, an end without [DONE], a broken connection: what came is shown, and the exit code is not 0."""
    ends = [([data(error("x", "The engine failed."))], True, 1), ([], True, 1), ([], False, 69)]
    for more, whole, expected in ends:
        events = [delta(content="Hel"), *more]
        fake.answers["POST", "/v1/chat/completions"] = lambda one, events=events, whole=whole: one.stream(
            *events, whole=whole
        )
        code, out, err = run("chat", "m", "hi", *flags)
        assert code == expected
        assert "Hel" in out
        assert re.search(r"The engine failed\.|The answer broke off\.|The connection .* broke", err)
    fake.answers["POST", "/v1/chat/completions"] = 503, error("model_not_ready", "Not ready.")
    assert run("chat", "m", "hi", *flags) == (1, "", "Not ready.\n")


def test_a_conversation(console, fake):
    """Ctrl-C stops an answer and closes its connection, what came of it stays in the history; Ctrl-D ends."""
    gone = threading.Event()

    def answer(one):
        if len(fake.asked) > 1:
            return one.stream(delta(reasoning="hmm"), delta(content="second"), DONE)
        one.stream(delta(content="first "), whole=False)
        if one.connection.recv(1) == b"":
            gone.set()
        return None

    fake.answers["POST", "/v1/chat/completions"] = answer
    with console("chat", "org/m") as screen:
        screen.until("> $")
        screen.press_until("\x03", r"Ctrl-D ends\.\x1b")
        screen.until("> $")
        screen.type("one\\\ntwo\n")
        screen.until("first ")
        screen.press_until("\x03", r"\[stopped\]")
        screen.until("> $")
        assert gone.wait(LIMIT_S)
        screen.type("again\n")
        screen.until(r"\x1b\[2mhmm\x1b\[0m\r\nsecond\r\n[^\n]*tokens[^>]*> $")
        screen.type("\x04")
        assert screen.end() == 0
    assert fake.bodies()[1]["messages"] == [
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "first "},
        {"role": "user", "content": "again"},
    ]


def test_a_refused_question_leaves_the_conversation(console, fake):
    """One that may be answered later is told, and can be asked again; one that never will be ends the program."""
    fake.answers["POST", "/v1/chat/completions"] = lambda one: one.plain(
        *[(503, error("model_not_ready", "Not ready.")), (404, error("model_not_found", "No such model."))][
            len(fake.asked) - 1
        ]
    )
    with console("chat", "m") as screen:
        screen.until("> $")
        screen.type("hi\n")
        screen.until("Not ready.*\n.*> $")
        screen.type("hi\n")
        assert screen.end() == 1
        assert "No such model." in screen.text
    assert [len(body["messages"]) for body in fake.bodies()] == [1, 1]


def test_a_terminal_has_colours_and_a_narrow_one_fewer_columns(console):
    """States are coloured; of what does not fit the least important columns go, and no row is folded into soup."""
    with console("workers", columns=160) as screen:
        assert screen.end() == 0
        assert "\x1b[32mready" in screen.text
        assert "\x1b[1;31mfailed" in screen.text
        assert "10.0.0.1:8001" in screen.text
    with console("workers", columns=80) as screen:
        assert screen.end() == 0
        text = re.sub(r"\x1b\[[\d;]*m", "", screen.text)
        assert re.search(r"^ *w1 +ready +org/m,m +3 +88% ", text, re.MULTILINE)
        assert "last heartbeat" not in text
        assert max(map(len, text.splitlines())) <= 80


def test_a_long_name_does_not_make_rows_fold(console, fake, run):
    """On a narrow terminal it is cut; in a pipe it is cut later; `--wide` has all of it, and every column."""
    name = "a-worker-" + "x" * 191
    rows = [{**READY, "worker_id": name}, FAILED]
    fake.answers["GET", "/v1/admin/workers"] = 200, {"object": "list", "data": rows}
    for columns in (120, 80, 40):
        with console("workers", columns=columns) as screen:
            assert screen.end() == 0
            text = re.sub(r"\x1b\[[\d;]*m", "", screen.text)
            assert max(map(len, text.splitlines())) <= columns
            assert re.search(r"^ *a-worker-x+… +ready", text, re.MULTILINE)
            assert text.count("ready") == 1
    cut_name = run("workers")[1].splitlines()[1].split()[0]
    assert (len(cut_name), cut_name[-1]) == (120, "…")
    assert run("workers", "--wide")[1].splitlines()[1].split()[0] == name
    assert json.loads(run("workers", "--json")[1])["data"][0]["worker_id"] == name
    with console("workers", "--wide", columns=80) as screen:
        assert screen.end() == 0
        assert name in screen.text
        assert "LAST_HEARTBEAT" in screen.text


def test_rich_works_without_what_the_pyz_leaves_out(console, fake, tmp_path, monkeypatch):
    """rich is bundled without what it needs for source code and Markdown."""
    for name in ("pygments", "markdown_it", "mdurl"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('left out')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    fake.answers["POST", "/v1/chat/completions"] = lambda one: one.stream(
        delta(reasoning="hm"), delta(content="yes"), DONE
    )
    shown = {
        ("workers",): "w1",
        ("status",): "H100",
        ("launch", "/m", "--wait"): "w1 ready",
        ("chat", "m", "hi"): "yes",
    }
    for words, expected in shown.items():
        with console(*words) as screen:
            assert screen.end() == 0, screen.text
            assert expected in screen.text


def test_progress_on_a_terminal_is_one_line(console, fake):
    """It changes in place and is gone at the end; Ctrl-C ends the waiting, not the worker."""
    fake.answers["GET", "/v1/admin/workers/w1"] = 200, {**READY, "state": "loading", "phase": "reading weights"}
    with console("launch", "/m", "--wait") as screen:
        screen.until(r"w1: loading \(reading weights\)")
        screen.type("\x03")
        assert screen.end() == 130
        assert "worker w1 goes on loading" in screen.text
        assert "Traceback" not in screen.text
    assert "DELETE" not in [one.command for one in fake.asked]


def test_ctrl_c_ends_following(console, fake):
    """At once and without a word; colours of the lines are kept on a terminal, other sequences are not."""

    def answer(one):
        one.stream(line(1, "\x1b[31mred\x1b[2J"), whole=False)
        one.connection.recv(1)

    fake.answers["GET", "/v1/logs/stream/w1"] = answer
    with console("logs", "-f", "w1") as screen:
        screen.until("red")
        screen.type("\x03")
        assert screen.end() == 130
        assert "\x1b[31mred\x1b[0m" in screen.text
        assert "\x1b[2J" not in screen.text


def test_a_reader_that_leaves_is_no_error(fake):
    """`| head -1` ends the command quietly."""
    fake.answers["GET", "/v1/logs/stream/w1"] = lambda one: one.stream(*(line(n, "x" * 1000) for n in range(500)))
    process = subprocess.Popen(ichat("logs", "w1"), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(LIMIT_S) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_command_is_light(fake):
    """What asks the gateway and shows the answer in plain columns imports nothing heavy."""
    code = (
        "import sys\nfrom ichat.cli import commands as terminal\n"
        f"assert terminal.run(['workers', '-g', 'http://127.0.0.1:{fake.port}']) == 0\n"
        "assert not {'httpx', 'rich', 'trio', 'attrs', 'cattrs'} & set(sys.modules), sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("WORKER")


def test_help_is_light():
    """Nothing heavy is imported to show it, and every command has one."""
    code = (
        "import sys\nfrom ichat.cli import commands as terminal\nfor name in terminal.COMMANDS:\n"
        " try: terminal.run([name, '--help'])\n except SystemExit as end: assert end.code == 0\n"
        "assert not {'httpx', 'rich', 'trio', 'attrs', 'cattrs'} & set(sys.modules), sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    whole = subprocess.run(ichat("--help"), cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert terminal.HELP in whole
    for name in terminal.COMMANDS:
        assert f"usage: ichat.pyz {name} " in done.stdout
        assert f"ichat.pyz {name} " in terminal.HELP or f"ichat.pyz {name}\n" in terminal.HELP


def test_events_are_read_alike_however_they_are_cut():
    """At any byte; lines end with LF or CRLF and nothing else; comments and unfinished events are nothing."""
    stream = ": hi\n\nid: 1\r\ndata: ä\u2028\x85b\r\n\r\nevent: gap\ndata: x\ndata:  y\n\nid\ndata\n\nretry: 1\n\ndata: cut".encode()
    expected = [("message", "ä\u2028\x85b", "1"), ("gap", "x\n y", "1"), ("message", "", "")]
    for size_ in range(1, len(stream)):
        pieces = [stream[at : at + size_] for at in range(0, len(stream), size_)]
        assert [tuple(event) for event in read_events(pieces)] == expected, size_


def test_with_a_real_gateway(run, tmp_path, monkeypatch):
    """The commands whose routes every gateway has, from its own configuration."""
    port = free_port()
    config = tmp_path / "ichat.toml"
    config.write_text(
        f'[server_settings]\nport = {port}\n[[managed_workers]]\nmodel_name = "org/m"\nmodel_path = "/m"\nbackend = "fake"\n'
        "heartbeat_interval = 20\n"
    )
    gateway = Program(ichat("gateway", "-c", str(config)), tmp_path / "log")
    monkeypatch.delenv("ICHAT_GATEWAY", raising=False)
    place = ["-c", str(config)]
    try:
        gateway.wait_for_port().wait_until_ready("org-m-0")
        code, out, _err = run("workers", *place)
        assert (code, out.splitlines()[1].split()[:4]) == (0, ["org-m-0", "ready", "org/m", "fake"])
        code, out, _err = run("workers", "org-m-0", "--json", *place)
        assert (code, json.loads(out)["state"]) == (0, "ready")
        shown = run("worker-show", "org-m-0", *place)[1]
        assert "\nbackend" in shown
        assert re.search(r"^  model +/m$", shown, re.MULTILINE)
        assert "load_s" not in shown
        assert re.search(r"^  load_s +0\.0$", run("worker-show", "org-m-0", "--all", *place)[1], re.MULTILINE)
        assert run("models", *place)[1].splitlines()[1].split()[:3] == ["org/m", "fake", "4096"]
        assert run("chat", "org/m", "hi", *place)[:2] == (0, "0 1 2 \n")
        assert "The model `none` does not exist. Models here: org/m." in run("chat", "none", "hi", *place)[2]
        assert run("workers", "none", *place)[0] == 1
        assert gateway.stop(signal.SIGTERM) == 0
        assert run("workers", *place)[0] == 69
    finally:
        gateway.end()


def main(*words):
    done = subprocess.run(ichat(*words), cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("wrkers", " (did you mean workers or worker?)"),
        ("work", " (did you mean worker or workers?)"),
        ("serve", " (did you mean run or worker?)"),
        ("create", " (did you mean launch or keys make?)"),
        ("xyzzy", ""),
    ],
)
def test_a_mistake_is_two_lines(word, meant):
    """What is not there, what may have been meant, and where all commands are listed."""
    expected = f"ichat.pyz: there is no command '{word}'{meant}.\n`ichat.pyz --help` lists all commands.\n"
    assert main(word) == (64, "", expected)


def test_help_of_one_thing():
    """`help` takes a command, and an action on keys has a help of its own."""
    assert main("help", "gateway")[1].startswith("usage: ichat.pyz gateway ")
    code, out, _ = main("keys", "make", "--help")
    assert (code, out.splitlines()[0].startswith("usage: ichat.pyz keys make ")) == (0, True)
    assert "--expires-in" in out
    assert "--overlap" not in out
    assert "--models" not in main("keys", "delete", "--help")[1]
    assert "--overlap" in main("keys", "rotate", "--help")[1]


def test_other_words_for_commands(fake, run):
    """What Docker's and Ollama's users type does the same."""
    assert run("ps") == run("workers")
    assert run("ls") == run("list") == run("models")
    assert run("rm", "w1")[:2] == run("stop", "w1")[:2]  # on standard error it shows the worker's state, if slow
    assert [one.path for one in fake.asked if one.command == "DELETE"] == ["/v1/admin/workers/w1"] * 2
    fake.answers["POST", "/v1/admin/keys"] = 200, {"name": "a", "key": "sk"}
    fake.answers["DELETE", "/v1/admin/keys/a"] = 200, {"name": "a", "keys_left": 1}
    assert run("keys", "create", "a")[:2] == (0, "sk\n")
    assert run("keys", "delete", "a")[:2] == (0, "a withdrawn\n")


def test_the_model_may_be_left_out(fake, run, monkeypatch):
    """Of one model; of several, the command names them."""
    fake.answers["POST", "/v1/chat/completions"] = lambda one: one.stream(delta(content="ok"), DONE)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi"))
    assert run("chat")[:2] == (0, "ok\n")
    assert fake.bodies()[0]["model"] == "org/m"
    fake.answers["GET", "/v1/models"] = 200, {"data": [{"id": "a"}, {"id": "b"}]}
    assert run("chat")[::2] == (64, "ichat.pyz chat: name one of the models here: a, b.\n")
    fake.answers["GET", "/v1/models"] = 200, {"data": []}
    assert run("chat")[::2] == (64, "No model can be asked for yet: `ichat.pyz run MODEL` launches one.\n")


def test_commands_in_a_conversation(console, fake):
    """They change it, and none of them is sent to the model; a mistake is told."""
    fake.answers["POST", "/v1/chat/completions"] = lambda one: one.stream(delta(content="fine"), DONE)
    fake.answers["GET", "/v1/models"] = 200, {"data": [{"id": "org/m"}, {"id": "other"}]}
    with console("chat", "org/m", "--system", "Be brief.") as screen:
        screen.until(r"(?s)/help lists commands.*> $")
        for typed, shown in {
            "/help": "forget the conversation",
            "exit": "/exit is a command here",
            "/modle": r"There is no /modle \(did you mean /model\?\)",
            "/model othr": r"There is no model othr \(did you mean other\?\)",
            "one": "fine",
            "/model": "org/m; here: org/m, other",
            "/model other": "other goes on",
            "/system Be long.": "begins with this",
            "/etc/passwd?": "fine",
            "/clear": "Forgotten",
            "/system": "Be long.",
            "two": "fine",
        }.items():
            screen.type(f"{typed}\n")
            screen.until(rf"(?s){shown}.*> $")
        screen.type("/exit\n")
        assert screen.end() == 0
    first, second, third = fake.bodies()
    assert (first["model"], second["model"]) == ("org/m", "other")
    assert [one["content"] for one in first["messages"]] == ["Be brief.", "one"]
    assert [one["content"] for one in second["messages"]] == ["Be long.", "one", "fine", "/etc/passwd?"]
    assert [one["content"] for one in third["messages"]] == ["Be long.", "two"]


def test_chat_shows_the_load_that_an_answer_waits_for(console, fake, run):
    """A terminal shows what the gateway says of a load until the answer begins, with its seconds; a pipe gets none."""
    go_on = threading.Event()

    def answer(one):
        one.stream(": loading m, about 60 s left\n\n", whole=False)
        go_on.wait(LIMIT_S)
        for piece in (delta(content="here"), DONE):
            one.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece.encode()))
        one.wfile.write(b"0\r\n\r\n")

    fake.answers["POST", "/v1/chat/completions"] = answer
    with console("chat", "m", "hi") as screen:
        screen.until(r"loading m, about 60 s left.*1\.\ds")
        go_on.set()
        screen.until("here")
        assert screen.end() == 0
    assert run("chat", "m", "hi")[1] == "here\n"


@pytest.mark.parametrize(("tokens", "is_rated"), [(19, False), (40, True)])
def test_how_fast_a_short_answer_was_is_not_said(fake, run, tokens, is_rated, monkeypatch):
    """Of few tokens, or of an answer that came at once, a rate says nothing."""
    clock = iter(range(1000))
    monkeypatch.setattr(terminal_chat, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    usage = data({"choices": [], "usage": {"completion_tokens": tokens}})
    fake.answers["POST", "/v1/chat/completions"] = lambda one: one.stream(
        delta(content="a"), delta(content="b"), usage, DONE
    )
    _, _, err = run("chat", "m", "hi")
    assert f"[{tokens} tokens, " in err
    assert ("tokens/s" in err) is is_rated


def test_launch_shows_a_load_phase_by_phase(console, fake):
    """What is over stays on the screen with its time; what is under way has its seconds, and those of last time."""
    phases = [
        {"name": "importing vllm", "seconds": 12.0, "expected_s": 10.0},
        {"name": "loading weights", "seconds": 3.2, "expected_s": 14.0, "detail": "3 of 8 shards"},
    ]
    load = {"elapsed_s": 15.2, "expected_s": 55.2, "phases": phases}
    fake.answers["GET", "/v1/admin/workers/w1"] = 200, {
        **READY, "state": "loading", "phase": "loading weights", "load": load,
    }  # fmt: skip
    with console("launch", "/m", "--wait") as screen:
        screen.until("w1: importing vllm took 12s")
        screen.until(r"w1: loading \(loading weights\), 3 of 8 shards, 3 s \(last time 14s\), about 40s left")
        fake.answers["GET", "/v1/admin/workers/w1"] = 200, READY
        assert screen.end() == 0


def test_mistakes_of_a_file_are_a_list(fake, run):
    """Each on its line, as they came."""
    said = "ichat.toml was not accepted:\n  a.b: unknown key\n  c: must be\x1b[2J 1 Nothing was changed."
    fake.answers["POST", "/v1/admin/config/reload"] = 400, error("bad_configuration", said)
    assert run("reload")[2] == f"{said}\n".replace("\x1b[2J", "")


def test_a_launch_waits_until_it_is_known_why_a_worker_is_gone(fake, run):
    """A managed worker that fails to load says goodbye before its process has ended."""
    told = iter([(200, {**READY, "state": "gone"})] * 3)
    fake.answers["GET", "/v1/admin/workers/w1"] = lambda _: next(told, (200, {**FAILED, "worker_id": "w1"}))
    code, _, err = run("launch", "/m", "--wait")
    assert (code, err.splitlines()[-1]) == (1, "Worker w1 ended with exit code 70: CUDA is out of memory.")
