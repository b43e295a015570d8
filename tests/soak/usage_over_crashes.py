"""The ledger of a gateway with relays against its upstream's count, while the process that decides is killed.

    python tests/soak/usage_over_crashes.py [--seconds 100] [--allowed 60]

Eight clients ask all the time; the owner gets kill -9 every few seconds. Their key may ask `--allowed` times a minute,
and the others' may ask without a limit. It prints the figures, and fails if a request or a token is missing or counted
twice, if a client sees an error, or if the upstream sees more of the limited key than it may have.
"""

import argparse
import http.client
import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from support.deployments import free_port
from support.programs import LIMIT_S, Program, ichat

from ichat.security.keys import hash_of

KEYS = {"limited": "sk-limited-key-of-the-test", "free": "sk-free-key-of-the-test"}
WINDOW_S = 58.5
"""A window of the limits has whole seconds; what waits on its way to the upstream may come closer to another."""


class Upstream:
    """Answers with tokens that differ for each request, and notes when each key's requests arrive."""

    def __init__(self):
        self.requests, self.tokens, self.arrivals = 0, [0, 0], []
        lock, upstream = threading.Lock(), self

        class Connection(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with lock:
                    upstream.requests += 1
                    used = upstream.requests % 1000, upstream.requests % 77
                    upstream.tokens = [one + more for one, more in zip(upstream.tokens, used, strict=True)]
                    if asked["who"] == "limited":
                        upstream.arrivals.append(time.monotonic())
                time.sleep(random.random() * 0.2)
                data = json.dumps({"usage": {"prompt_tokens": used[0], "completion_tokens": used[1]}}).encode()
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


class Client(threading.Thread):
    """Asks until it is stopped."""

    def __init__(self, port, who):
        super().__init__(daemon=True)
        self.port, self.who, self.statuses, self.error, self.is_stopped = port, who, {}, None, False

    def run(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEYS[self.who]}"}
        body = json.dumps({"model": "m", "who": self.who})
        try:
            while not self.is_stopped:
                connection.request("POST", "/v1/chat/completions", body, headers)
                with connection.getresponse() as answer:
                    answer.read()
                self.statuses[answer.status] = self.statuses.get(answer.status, 0) + 1
                time.sleep(0.02 if answer.status == 200 else 0.2)
        except (OSError, http.client.HTTPException) as error:
            self.error = repr(error)


def config_in(directory, port, upstream, allowed):
    keys = "".join(
        f'[[security.keys]]\nname = "{who}"\nkey_hash = "{hash_of(key)}"\n'
        + (f"requests_per_minute = {allowed}\n" if who == "limited" else "")
        for who, key in KEYS.items()
    )
    path = pathlib.Path(directory) / "ichat.toml"
    path.write_text(
        f'[server_settings]\nport = {port}\nstate_directory = "{directory}/state"\nrelays = 2\n'
        f'[timeouts]\nownerless_s = 30\nowner_wait_s = 30\n{keys}[logs]\naccess_log = ""\n'
        f'[[external_routes]]\nmodel_name = "m"\napi_base = "http://127.0.0.1:{upstream.server.server_address[1]}/v1"\n'
    )
    return path


def most_in_a_window(arrivals):
    return max((sum(at <= other < at + WINDOW_S for other in arrivals) for at in arrivals), default=0)


def totals_of(program):
    totals = program.get("/v1/admin/usage")[1]["totals"]
    return [totals["requests"] - totals["errors"], totals["input_tokens"], totals["output_tokens"]]


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--seconds", type=float, default=100)
    arguments.add_argument("--allowed", type=int, default=60)
    chosen = arguments.parse_args()
    upstream, port = Upstream(), free_port()
    with tempfile.TemporaryDirectory() as directory:
        path = config_in(directory, port, upstream, chosen.allowed)

        def start():
            return Program(ichat("gateway", "-c", str(path)), pathlib.Path(directory) / "log").wait_for_port()

        program, kills = start(), 0
        clients = [Client(port, who) for who in ("limited", "limited", *["free"] * 6)]
        for client in clients:
            client.start()
        until = time.monotonic() + chosen.seconds
        while time.monotonic() < until:
            time.sleep(random.uniform(2, 6))
            program.stop(signal.SIGKILL)
            kills += 1
            time.sleep(random.uniform(0, 1))
            program = start()
        for client in clients:
            client.is_stopped = True
        for client in clients:
            client.join(LIMIT_S)
        expected = [upstream.requests, *upstream.tokens]
        deadline = time.monotonic() + LIMIT_S
        while (found := totals_of(program)) != expected and time.monotonic() < deadline:
            time.sleep(0.1)
        most, statuses = most_in_a_window(upstream.arrivals), [client.statuses for client in clients]
        program.stop()
    print(f"{kills} kills; requests, tokens in and out: upstream {expected}, ledger {found}")
    print(f"most of the limited key in {WINDOW_S:g} s: {most} of {chosen.allowed}; answers {statuses}")
    errors = [client.error for client in clients if client.error]
    others = {status for counts in statuses for status in counts} - {200, 429}
    print(f"errors {errors}, other statuses {others}, load {os.getloadavg()[0]:.1f}")
    return int(found != expected or most > chosen.allowed or bool(errors or others))


if __name__ == "__main__":
    sys.exit(main())
