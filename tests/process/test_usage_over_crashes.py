"""The ledger and the limits of a gateway with relays whose process that decides is killed again and again."""

import http.client
import json
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.deployments import free_port
from support.programs import LIMIT_S

ROUNDS, CLIENTS, AT_LEAST = 3, 4, 25
TIMEOUTS = "ownerless_s = 20\nowner_wait_s = 20\n"


class Counted:
    """An external route's server: each answer has used other tokens, and the server counts them."""

    def __init__(self):
        self.requests = self.input = self.output = 0
        self.holds = threading.Event()
        self.holds.set()
        """Cleared: answers wait."""
        self.waiting = 0
        self._lock = threading.Lock()
        counted = self

        class Connection(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                self.rfile.read(int(self.headers["content-length"]))
                used = counted.count()
                counted.holds.wait(LIMIT_S)
                data = json.dumps({"usage": used}).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Connection)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def count(self):
        with self._lock:
            self.requests += 1
            used = self.requests, 3 * self.requests
            self.input += used[0]
            self.output += used[1]
            return {"prompt_tokens": used[0], "completion_tokens": used[1], "total_tokens": sum(used)}

    def config(self, more=""):
        port = self.server.server_address[1]
        return (
            f'{TIMEOUTS}{more}\n[logs]\naccess_log = ""\n[usage]\nflush_s = 0.2\n'
            f'[[external_routes]]\nmodel_name = "m"\napi_base = "http://127.0.0.1:{port}/v1"\n'
        )


@pytest.fixture
def upstream():
    counted = Counted()
    yield counted
    counted.holds.set()
    counted.server.shutdown()
    counted.server.server_close()


class Client(threading.Thread):
    """Asks again and again over a kept connection, until it is stopped."""

    def __init__(self, port):
        super().__init__(daemon=True)
        self.port, self.statuses, self.error = port, [], None
        self.is_stopped = False

    def run(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            while not self.is_stopped:
                connection.request(
                    "POST", "/v1/chat/completions", '{"model": "m"}', {"content-type": "application/json"}
                )
                with connection.getresponse() as answer:
                    answer.read()
                    self.statuses.append(answer.status)
        except (OSError, http.client.HTTPException) as error:
            self.error = error
        finally:
            connection.close()

    def stop(self):
        self.is_stopped = True
        self.join(LIMIT_S)


def totals_of(program):
    status, answer = program.get("/v1/admin/usage")
    assert status == 200, answer
    totals = answer["totals"]
    return totals["requests"], totals["input_tokens"], totals["output_tokens"], totals["errors"]


def test_usage_over_crashes_is_that_of_the_upstream(gateway, upstream):
    """Kill -9 of the process that decides costs no request, and the ledger has each of them once."""
    port = free_port()
    program = gateway(upstream.config(), port, "relays = 2\n")
    clients = [Client(port) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    for _ in range(ROUNDS):
        before = upstream.requests
        program.until(lambda: upstream.requests >= before + AT_LEAST)  # noqa: B023
        program.stop(signal.SIGKILL)
        program = gateway(upstream.config(), port, "relays = 2\n")
    before = upstream.requests
    program.until(lambda: upstream.requests >= before + AT_LEAST)
    for client in clients:
        client.stop()
    assert [client.error for client in clients] == [None] * CLIENTS
    assert {status for client in clients for status in client.statuses} == {200}
    expected = (upstream.requests, upstream.input, upstream.output, 0)
    assert sum(len(client.statuses) for client in clients) == upstream.requests
    program.until(lambda: totals_of(program) == expected)
    assert program.stop() == 0


def test_a_request_that_ends_without_an_owner_is_counted_once_by_the_next(gateway, upstream):
    """So is a request that ends after the next owner has begun; a third owner counts neither of them again."""
    port = free_port()
    program = gateway(upstream.config(), port, "relays = 2\n")
    upstream.holds.clear()
    clients = [Client(port) for _ in range(2)]
    for client in clients:
        client.is_stopped = False
        client.start()
    program.until(lambda: upstream.requests == 2)
    program.stop(signal.SIGKILL)
    for client in clients:
        client.is_stopped = True
    upstream.holds.set()
    for client in clients:
        client.join(LIMIT_S)
    assert [client.statuses for client in clients] == [[200], [200]]
    for _ in range(2):
        program = gateway(upstream.config(), port, "relays = 2\n")
        program.until(lambda: totals_of(program) == (2, 3, 9, 0))  # noqa: B023
        program.until(lambda: _is_written(program))  # noqa: B023
        program.stop(signal.SIGKILL)
    program = gateway(upstream.config(), port, "relays = 2\n")
    assert totals_of(program) == (2, 3, 9, 0)
    assert program.stop() == 0


def _is_written(program):
    connection = http.client.HTTPConnection("127.0.0.1", program.port, timeout=LIMIT_S)
    connection.request("GET", "/metrics?workers=0")
    lines = dict(line.rpartition(" ")[::2] for line in connection.getresponse().read().decode().splitlines())
    connection.close()
    return (lines["ichat_usage_rows_pending"], lines["ichat_usage_store_ok"]) == ("0.0", "1.0")


@pytest.mark.parametrize("relays", [0, 2])
def test_limits_of_a_minute_hold_over_crashes(gateway, upstream, relays):
    """What was used of them before the crash is used after it, too; a crash gives no key a second share."""
    allowed, port, settings = 7, free_port(), f"relays = {relays}\n"
    text = upstream.config(f"[limits]\nrequests_per_minute = {allowed}\n")
    program = gateway(text, port, settings)
    answers = []
    for _ in range(3):
        answers += [program.ask("/v1/chat/completions", {"model": "m"})[0] for _ in range(3)]
        program.until(lambda: _is_written(program))  # noqa: B023
        program.stop(signal.SIGKILL)
        program = gateway(text, port, settings)
    assert answers == [200] * allowed + [429] * 2
    assert upstream.requests == allowed
    assert program.stop() == 0
