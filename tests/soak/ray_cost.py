"""What `[ray]` costs: bytecodes for a request, with and without it, and the CPU of a gateway with idle workers on Ray.

    PYTHONPATH=. .build/dev/bin/python tests/soak/ray_cost.py requests [REQUESTS]
    PYTHONPATH=. .build/dev/bin/python tests/soak/ray_cost.py idle [SECONDS WORKERS]

`requests`: a whole gateway runs in a process, whose event loop counts the bytecodes that it runs for each request. The
load of the machine does not change the median: other counts have work beside the requests, or an answer in two parts.
The gateways are one without `[ray]`, the same again, one with it, and one with twenty workers that wait for a cluster
that does not answer.

`idle`: a gateway has 20 workers with a fake engine on a real cluster of Ray (`./build test` fetches it). The CPU of its
process is the kernel's count.
"""

import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import trio
from support.deployments import free_port
from support.programs import Program, ichat
from support.ray_cluster import RayCluster
from support.ray_site import ENV, ON_RAY, START_S

from ichat.admin.reload import ConfigFile, fingerprint
from ichat.config import load as configuration
from ichat.roles import gateway

BASE = """
[server_settings]
port = {port}
state_directory = "{directory}/state"
watch_config = false
[logs]
access_log = "{directory}/access"
[[external_routes]]
model_name = "far"
api_base = "http://127.0.0.1:{upstream}/v1"
"""
NOWHERE = 'address = "http://127.0.0.1:9"\n'
VARIANTS = {
    "without [ray]": "",
    "without [ray], again": "",
    "with [ray]": f"[ray]\n{NOWHERE}",
    "with 20 workers that wait for Ray": f"""
[ray]
{NOWHERE}[[managed_workers]]
model_name = "m"
model_path = "/m"
backend = "fake"
on = "ray"
gpus = 1
replicas = 20
""",
}
REQUESTS, WARM, QUIET_S = 300, 50, 0.005
SECONDS, WORKERS = 60, 20
SETTLE_S = 15
LIMIT_S = 60
BODY = b'{"model": "far", "messages": [{"role": "user", "content": "hello"}]}'
ASKED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
ANSWER = b'{"object": "chat.completion", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


class Bytecodes:
    """Counts the bytecodes that the thread runs which calls `begin`."""

    def __init__(self):
        self.count = 0

    def begin(self):
        sys.settrace(self._trace)

    def _trace(self, frame, event, _argument):
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.count += event == "opcode"
        return self._trace

    def until_quiet(self):
        """Return the count once it has stood still for a moment; another thread calls this."""
        before = -1
        while before != self.count:
            before = self.count
            time.sleep(QUIET_S)
        return before


def answer_forever(server):
    """Answer each request on each connection of a socket."""

    def serve(connection):
        answer = HEAD % len(ANSWER) + ANSWER
        while data := connection.recv(65536):
            while not data.endswith(BODY):
                data += connection.recv(65536)
            connection.sendall(answer)

    while True:
        connection, _ = server.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


def counts_of(port, bytecodes, requests):
    """Return the bytecodes for each of several requests on a connection: the next is sent when nothing runs any more."""
    found, request = [], ASKED % len(BODY) + BODY
    with socket.create_connection(("127.0.0.1", port), LIMIT_S) as client:
        for _ in range(requests + WARM):
            before = bytecodes.until_quiet()
            client.sendall(request)
            data = b""
            while not data.endswith(ANSWER):
                if not (more := client.recv(65536)):
                    sys.exit(f"the gateway has closed the connection: {data.decode(errors='replace')}")
                data += more
            found.append(bytecodes.until_quiet() - before)
    return found[WARM:]


async def measure(text, requests):
    """Print the quartiles of the bytecodes for a request through a gateway with this configuration."""
    bytecodes, port = Bytecodes(), free_port()
    with tempfile.TemporaryDirectory() as directory, socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer_forever, args=(server,), daemon=True).start()
        path = pathlib.Path(directory) / "ichat.toml"
        path.write_text(BASE.format(port=port, directory=directory, upstream=server.getsockname()[1]) + text)
        async with trio.open_nursery() as nursery:
            await nursery.start(gateway.run, configuration.load(path), ConfigFile(path, fingerprint(path)))
            bytecodes.begin()
            found = await trio.to_thread.run_sync(counts_of, port, bytecodes, requests)
            sys.settrace(None)
            nursery.cancel_scope.cancel()
    print(*statistics.quantiles(found, n=4))


def compare(requests):
    """Measure each variant in a process of its own, and print it beside the first."""
    first = None
    for name in VARIANTS:
        words = [sys.executable, __file__, "variant", name, str(requests)]
        run = subprocess.run(
            words, env={**os.environ, "PYTHONHASHSEED": "0"}, stdout=subprocess.PIPE, check=True, timeout=600
        )
        low, middle, high = map(float, run.stdout.split())
        first = first or middle
        print(
            f"{name}: {middle:.0f} bytecodes for a request ({low:.0f} to {high:.0f}), {middle / first:.4f}", flush=True
        )


def measure_idle(seconds, workers):
    """Print the CPU of a gateway with idle workers on Ray."""
    with tempfile.TemporaryDirectory() as directory, RayCluster(nodes=1, gpus=4) as cluster:
        path = pathlib.Path(directory) / "ichat.toml"
        keys = f"gpus = {4 / max(1, workers):.3f}\nreplicas = {workers}"
        table = ON_RAY.format(
            address=cluster.address, python=sys.executable, restart="", ray="cpus = 0.1", keys=keys
        ).replace("heartbeat_interval = 0.5", "heartbeat_interval = 10")
        path.write_text(f'[server_settings]\nport = {free_port()}\nstate_directory = "{directory}/state"\n{table}')
        program = Program(ichat("gateway", "-c", str(path)), pathlib.Path(directory) / "log", ENV).wait_for_port()
        try:
            for number in range(workers):
                program.wait_until_ready(f"m-{number}", 4 * START_S)
            time.sleep(SETTLE_S)
            before, began = program.family.cpu_times(), time.monotonic()
            time.sleep(seconds)
            after, took_s = program.family.cpu_times(), time.monotonic() - began
            used_s = after.user + after.system - before.user - before.system
            print(f"{workers} workers: {100 * used_s / took_s:.2f} % of a core over {took_s:.0f} s")
            program.stop()
        finally:
            program.end()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["requests"]:
            compare(REQUESTS)
        case ["requests", requests]:
            compare(int(requests))
        case ["variant", name, requests]:
            trio.run(measure, VARIANTS[name], int(requests))
        case ["idle"]:
            measure_idle(SECONDS, WORKERS)
        case ["idle", seconds, workers]:
            measure_idle(float(seconds), int(workers))
        case _:
            sys.exit(__doc__)
