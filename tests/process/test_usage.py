"""The ledger of a gateway as a process: killed, on a disk that takes nothing more, with limits over restarts."""

import json
import resource
import signal
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest
from support.deployments import free_port

USED = {"prompt_tokens": 30, "completion_tokens": 70, "total_tokens": 100}
WRITABLE_BYTES = 24 * 1024
"""Less than what a few writes of the ledger take."""


@pytest.fixture
def upstream():
    """An external route's server, which says what each answer used."""

    class Connection(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            data = json.dumps({"usage": USED}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Connection)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def config(port, more=""):
    return (
        f'{more}\n[logs]\naccess_log = ""\n[[external_routes]]\nmodel_name = "m"\n'
        f'api_base = "http://127.0.0.1:{port}/v1"\n'
    )


def ask(program):
    return program.ask("/v1/chat/completions", {"model": "m"})[0]


def usage_of(program):
    status, answer = program.get("/v1/admin/usage")
    assert status == 200, answer
    return answer["totals"]["requests"], answer["totals"]["input_tokens"], answer["storage"]


def is_written(program):
    """Return whether everything that was counted is on disk."""
    with urllib.request.urlopen(f"http://127.0.0.1:{program.port}/metrics?workers=0") as answer:
        lines = dict(line.rpartition(" ")[::2] for line in answer.read().decode().splitlines())
    return (lines["ichat_usage_rows_pending"], lines["ichat_usage_store_ok"]) == ("0.0", "1.0")


def test_a_killed_gateway_has_written_what_it_counted(gateway, upstream):
    """Kill -9 loses what is not written yet, and nothing else; the next gateway's limits know all of it."""
    port, text = free_port(), config(upstream, "[limits]\ntokens_per_month = 1000")
    program = gateway(text, port)
    for round_ in range(1, 4):
        assert [ask(program) for _ in range(3)] == [200, 200, 200]
        program.until(lambda: is_written(program))  # noqa: B023
        program.stop(signal.SIGKILL)
        program = gateway(text, port)
        assert usage_of(program) == (3 * round_, 90 * round_, "ok")
    assert [ask(program) for _ in range(3)] == [200, 429, 429]
    assert program.stop() == 0
    again = gateway(text, port)
    assert usage_of(again) == (12, 300, "ok")
    assert ask(again) == 429
    status, answer = again.ask("/v1/chat/completions", {"model": "m"})
    assert (status, answer["error"]["code"]) == (429, "insufficient_quota")


def test_a_disk_that_takes_nothing_more_stops_no_request(gateway, upstream):
    """Requests are answered and counted all the while; it is said when it begins and ends, and nothing is lost."""
    program = gateway(config(upstream, "[usage]\nflush_s = 0.05"))
    assert ask(program) == 200
    program.until(lambda: is_written(program))
    process = psutil.Process(program.process.pid)
    limits = process.rlimit(resource.RLIMIT_FSIZE)
    process.rlimit(resource.RLIMIT_FSIZE, (WRITABLE_BYTES, limits[1]))
    asked = 1
    while " cannot be written: " not in program.text():
        assert ask(program) == 200
        asked += 1
        assert asked < 1000
    for _ in range(20):
        assert ask(program) == 200
        asked += 1
    requests, tokens, storage = usage_of(program)
    assert (requests, tokens) == (asked, 30 * asked)
    assert " cannot be written: " in storage
    process.rlimit(resource.RLIMIT_FSIZE, limits)
    program.until(lambda: is_written(program))
    assert usage_of(program) == (asked, 30 * asked, "ok")
    program.until(lambda: " is written again" in program.text())
    assert program.text().count(" cannot be written: ") == program.text().count(" is written again") == 1
    program.stop(signal.SIGKILL)
