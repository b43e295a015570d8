"""The command `bench` against a gateway and an engine of known speed, and against servers that refuse."""

import json
import signal
import statistics
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.deployments import start_registering
from support.programs import LIMIT_S, ROOT, ichat

from ichat.cli import commands as terminal
from ichat.cli.client import Waits
from ichat.errors import Exit

FIRST_S, GAP_S, TOKENS = 1.0, 0.2, 11
USAGE = {"prompt_tokens": 100, "completion_tokens": 1}


@pytest.fixture
def site(gateway, start):
    """A gateway and a worker `w1` of its model `m`, which has a known speed."""
    program = gateway("")
    worker = start_registering(start, program.port, 0.5, "--first-s", str(FIRST_S), "--gap-s", str(GAP_S))
    program.wait_until_ready("w1")
    return program, worker


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a command in this process; give its exit code, standard output and standard error."""
    for name in ("ICHAT_API_KEY", "ICHAT_ADMIN_KEY", "ICHAT_GATEWAY"):
        monkeypatch.delenv(name, raising=False)

    def command(*words):
        try:
            code = terminal.run(["bench", *map(str, words)], Waits(0.01, (0.01,)))
        except Exit as exit_:
            code = exit_.code
            print(exit_, file=terminal.sys.stderr)
        return code, *capsys.readouterr()

    return command


def test_figures_are_those_that_the_engine_has_noted(site, run, tmp_path):
    """Tokens, times between tokens and rates are within 2 % of the engine's own notes; nothing arrives too early.

    On a busy machine the engine itself is late, and the figures may differ by as much again.
    """
    program, worker = site
    saved = tmp_path / "figures.json"
    words = ["m", "-g", f"http://127.0.0.1:{program.port}", "--concurrency", 5, "--requests", 20, "--output", TOKENS]
    code, out, err = run(*words, "--slo", "ttft=60s,e2e=1ms", "--json", "--save", saved)
    found = json.loads(out)
    assert (code, err, json.loads(saved.read_text())) == (0, "", found)
    noted = worker.ask("/timed", {})[1]["requests"]
    assert (found["requests"], found["errors"], found["unfinished"]) == (20, {}, 0) == (len(noted), {}, 0)
    assert [found["output_tokens"]["mean"], found["is_counted"]] == [TOKENS, True]
    assert found["input_tokens"]["mean"] == found["input_tokens"]["max"] == 512
    spans = [sent[-1] - sent[0] for _, sent in noted]
    gap_s = statistics.fmean(spans) / (TOKENS - 1)
    tolerance_s = 0.02 * gap_s + (gap_s - GAP_S)
    assert [found["token_s"]["mean"], found["gap_s"]["mean"]] == pytest.approx([gap_s, gap_s], rel=0, abs=tolerance_s)
    took_s = max(sent[-1] for _, sent in noted) - min(arrived for arrived, _ in noted)
    assert found["duration_s"] == pytest.approx(took_s, rel=0.02, abs=0.2)
    assert found["requests_per_s"] == pytest.approx(20 / found["duration_s"], rel=0.001)
    assert found["output_tokens_per_s"] == pytest.approx(20 * TOKENS / found["duration_s"], rel=0.001)
    first_s = statistics.fmean(sent[0] - arrived for arrived, sent in noted)
    assert FIRST_S <= first_s <= found["first_token_s"]["mean"] <= 1.2 * first_s
    assert (found["goodput_share"], found["plan"]["objective"]) == (0.0, {"ttft": 60.0, "e2e": 0.001})
    (shown,) = found["workers"]
    assert shown["worker_id"] == "w1"
    assert 0 < shown["running"]["max"] <= 5


def test_an_open_loop_is_shown_as_a_table(site, run):
    """Each time has a row, each worker a line, and a short run is not called steady."""
    program, _worker = site
    code, out, err = run("m", "-g", f"127.0.0.1:{program.port}", "--rate", 10, "--requests", 5, "--output", 2)
    assert (code, err) == (0, "")
    assert "10 requests/s at random moments" in out
    assert "only 5 whole answers" in out
    for row in ("first token", "between pieces", "for each token", "whole answer", "sent late", "w1"):
        assert f"\n{row} " in out


def test_ctrl_c_shows_the_figures_so_far(site, start):
    """The answers that are whole count, those under way are said to be cut short; the exit code is 130."""
    program, worker = site
    command = ichat(
        "bench", "m", "-g", f"http://127.0.0.1:{program.port}", "--json", "--output", "2", "--seconds", "3600"
    )
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        worker.until(lambda: len(worker.ask("/timed", {})[1]["requests"]) > 16)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    found = json.loads(out)
    assert (process.returncode, err) == (130, "")
    assert found["requests"] >= 8
    assert (found["errors"], found["unfinished"] > 0) == ({}, True)


def test_a_model_that_does_not_exist_is_one_sentence(site, run):
    """It is the gateway's own, and nothing is measured."""
    program, _worker = site
    code, out, err = run("n", "-g", f"http://127.0.0.1:{program.port}")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "`n` does not exist" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rate", "1", "--concurrency", "2"], "not allowed with argument"),
        (["--slo", "ttft=fast"], "--slo: 'ttft=fast' is no objective; write for example ttft=1s,gap=60ms,e2e=30s"),
        (["--rate", "0"], "--rate: must be a number above 0 and up to 10000, not '0'"),
        (["--rate", "nan"], "must be a number above 0"),
        (["--requests", "0"], "--requests: must be a whole number from 1 to 1000000, not '0'"),
        (["--concurrency", "5000"], "must be a whole number from 1 to 4096"),
        (["--shared-prefix", "600"], "--shared-prefix must not be larger than --input."),
        (["--save", "/none/figures.json"], "/none/figures.json cannot be written: No such file or directory."),
    ],
)
def test_wrong_flags_of_a_benchmark_are_one_sentence(run, words, said):
    """Its exit code is 64, and no server is asked."""
    code, out, err = run("m", "-g", "http://127.0.0.1:9", *words)
    assert (code, out, err.count("\n")) == (64, "", 1)
    assert said in err


def test_no_gateway_is_one_sentence(run):
    """Its exit code is 69."""
    code, out, err = run("m", "-g", "http://127.0.0.1:9")
    assert (code, out, err.count("\n")) == (69, "", 1)
    assert "cannot be reached" in err


class Server(BaseHTTPRequestHandler):
    """A server that is no gateway, and refuses the fields of engines; it fails in ways that the test chooses."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer(404, {"detail": "Not Found"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if "ignore_eos" in body:
            self.answer(400, {"error": {"message": "Unknown field ignore_eos.", "code": "unknown_field"}})
        elif not body.get("stream"):
            self.answer(
                200, {"choices": [], "usage": {"prompt_tokens": 10 + body["messages"][0]["content"].count(" ")}}
            )
        else:
            with self.server.lock:
                failure = self.server.failures.pop() if self.server.failures else ""
            getattr(self, failure or "well")()

    def answer(self, status, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, *events):
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for event in events:
            self.wfile.write(f"data: {event}\n\n".encode())

    def well(self):
        self.stream(
            '{"choices": [{"delta": {"content": "a"}}]}', '{"choices": [{"delta": {"content": "b"}}]}', "[DONE]"
        )

    def busy(self):
        self.answer(503, {"error": {"message": "Busy.", "code": "overloaded"}})

    def half(self):
        self.stream('{"choices": [{"delta": {"content": "a"}}]}')

    def failing(self):
        self.stream('{"error": {"message": "It failed.", "code": "engine_aborted"}}', "[DONE]")

    def plain(self):
        self.answer(200, {"choices": []})

    def broken(self):
        self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 100\r\n\r\nhalf")
        self.close_connection = True

    def silent(self):
        self.server.ended.wait(LIMIT_S)
        self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    found = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    found.failures, found.lock, found.ended = [], threading.Lock(), threading.Event()
    thread = threading.Thread(target=found.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.ended.set()
    found.shutdown()
    thread.join()
    found.server_close()


def test_errors_are_counted_by_their_codes(server, run):
    """On any OpenAI-compatible server: it may refuse engines' fields, know no workers, and count no tokens."""
    server.failures = ["busy", "busy", "half", "failing", "plain", "broken", "silent"]
    words = ["--concurrency", 3, "--requests", 30, "--timeout", 5, "--input", 100, "--output", 2]
    code, out, err = run("m", "-g", f"http://127.0.0.1:{server.server_port}", *words, "--json")
    found = json.loads(out)
    assert code == 0
    assert "answers may be shorter than --output" in err
    assert "No figures of workers" in err
    assert found["errors"] == {
        "503 overloaded": 2, "broken off": 2, "engine_aborted": 1, "no stream": 1, "timeout": 1,
    }  # fmt: skip
    assert (found["requests"], found["workers"], found["is_counted"]) == (23, [], False)
    assert (found["output_tokens"]["mean"], found["input_tokens"]) == (2.0, None)
    assert any("7 of 30 requests failed" in reason for reason in found["not_steady"])


def test_a_run_without_any_answer_is_a_failure(server, run):
    """The errors are shown, and the exit code is 1."""
    server.failures = ["busy"] * 4
    code, out, _err = run("m", "-g", f"http://127.0.0.1:{server.server_port}", "--requests", 4)
    assert code == 1
    assert "0 answered, 4 failed: 503 overloaded" in out


def test_a_prompt_that_is_shorter_than_the_template_is_refused(server, run):
    """The sentence has the tokens of the shortest prompt."""
    code, _out, err = run("m", "-g", f"http://127.0.0.1:{server.server_port}", "--input", 5)
    assert code == 64
    assert "--input 5 is too few: a prompt of a single word has 11 tokens" in err
