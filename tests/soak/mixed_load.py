"""Measure what paced streams feel of heartbeats, plain requests and the control plane beside them.

    python tests/soak/mixed_load.py [--streams 500] [--heartbeats 1000] [--plain 200] [--workers 3000]
                                    [--seconds 10] [--rounds 3]

A gateway that knows many workers relays streams of 50 events a second each. In every round the streams run alone, beside
heartbeats and plain requests, beside the list of workers and /metrics, and alone again. The gaps between the pieces of
the streams are compared within the run. Ends with 1 where one of the ratios is above its bound, or a request failed.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import pathlib
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

import attrs
from running import FROM_SOURCE, LIMIT_S, ROOT, ending, percentile, running_gateway

sys.path.insert(0, str(ROOT / "tests"))
from support.peers import AS_OWN, OWN_SECRET, write_secret

try:
    from uvloop import run
except ImportError:
    from asyncio import run

UPSTREAM = ROOT / "tests" / "bench" / "upstream.py"
GAP_S = 0.02
EVENTS = 100_000
"""More than any window is long."""
RATIO_MAX = 1.3
"""By how much heartbeats and plain requests may lengthen the 99th percentile of the gaps."""
HELD_MS_MAX = 50
"""By how much the list of workers or /metrics may delay a stream."""
CONNECTIONS = 16
"""Of each kind of load beside the streams."""
ARGUMENTS = {f"argument_{number}": "value " * 8 for number in range(300)}
"""About 20 kB of an engine's arguments, as real workers send."""
PROGRESS = {"running": 0, "waiting": 0, "steps": 1, "tokens_in": 100, "tokens_out": 100}
TOML = """
[server_settings]
port = 0
state_directory = "{directory}/state"
watch_config = false
[logs]
access_log = "{directory}/access"
[[external_routes]]
model_name = "tiny"
api_base = "http://127.0.0.1:{port}/v1"
"""


def request_of(path, body):
    data = json.dumps(body).encode()
    return (
        b"POST %b HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b"
        % (
            path.encode(),
            AS_OWN,
            len(data),
            data,
        )
    )


# The streams.


@attrs.define
class Window:
    """Gaps between the pieces of all streams, in milliseconds."""

    began: float = attrs.field(factory=time.perf_counter)
    seconds: dict[int, list[float]] = attrs.field(factory=lambda: collections.defaultdict(list))
    """By the second in which they ended."""

    def add(self, now, gap_s):
        self.seconds[int(now - self.began)].append(gap_s * 1000)

    def p99(self):
        """Return the median of the 99th percentiles of all seconds: one bad second of the machine is no matter."""
        return statistics.median(percentile(gaps, 0.99) for gaps in self.seconds.values())

    def longest(self):
        return statistics.median(max(gaps) for gaps in self.seconds.values())


class Stream(asyncio.Protocol):
    """One stream, whose pieces are only timed."""

    window = None
    lost = 0

    def __init__(self):
        self.last = 0.0

    def connection_made(self, transport):
        self.transport = transport
        transport.write(
            request_of("/v1/chat/completions", {"model": "tiny", "stream": True, "events": EVENTS, "gap_s": GAP_S})
        )

    def data_received(self, data):
        now = time.perf_counter()
        if Stream.window is not None and self.last:
            Stream.window.add(now, now - self.last)
        self.last = now

    def connection_lost(self, error):
        Stream.lost += 1


async def windows(port, args, site):
    loop = asyncio.get_running_loop()
    transports = []
    for _ in range(args.streams):
        transport, _ = await loop.create_connection(Stream, "127.0.0.1", port)
        transports.append(transport)
        await asyncio.sleep(2 * GAP_S / args.streams)  # not all of them in step
    await asyncio.sleep(2)
    found = collections.defaultdict(list)
    failed = 0
    for _ in range(args.rounds):
        for name, load in (("alone", None), ("beside load", site.load), ("beside views", site.views), ("alone", None)):
            with ending(load(args)) if load else contextlib.nullcontext() as process:
                await asyncio.sleep(1)
                Stream.window = Window()
                await asyncio.sleep(args.seconds)
                window, Stream.window = Stream.window, None
                line = f"{name:14} p99 {window.p99():7.1f} ms, longest of a second {window.longest():7.1f} ms"
                if process:
                    process.terminate()
                    line += "; " + process.communicate(timeout=LIMIT_S)[0].strip().replace("\n", ", ")
                    failed += process.returncode != 0
            found[name].append(window)
            print(line, flush=True)
            await asyncio.sleep(1)
    lost = Stream.lost
    for transport in transports:
        transport.abort()
    return found, lost, failed


# The load beside them, in a process of its own.


class Beside:
    """Sends requests at a steady rate over a few connections."""

    def __init__(self, port):
        self.port = port
        self.done = collections.Counter()
        self.failed = collections.Counter()
        self.latencies = collections.defaultdict(list)

    async def send_forever(self, name, rate, next_request):
        pause = CONNECTIONS / rate
        await asyncio.gather(*(self._send(name, pause, number, next_request) for number in range(CONNECTIONS)))

    async def _send(self, name, pause, number, next_request):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        due = time.perf_counter() + pause * number / CONNECTIONS
        while True:
            await asyncio.sleep(max(0, due - time.perf_counter()))
            due += pause
            began = time.perf_counter()
            writer.write(next_request())
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            if length:
                await reader.readexactly(int(length[1]))
            else:
                while size := int(await reader.readline(), 16):
                    await reader.readexactly(size + 2)
                await reader.readline()
            self.latencies[name].append(time.perf_counter() - began)
            (self.done if head.startswith(b"HTTP/1.1 200") else self.failed)[name] += 1

    def tell(self):
        for name, latencies in self.latencies.items():
            p99 = percentile(latencies, 0.99) * 1000
            print(f"{name}: {self.done[name]} answered, {self.failed[name]} refused, p99 {p99:.0f} ms")


async def beside(port, loads):
    """Send what the command line names until terminated, and tell what came of it; return whether a request failed."""
    load, ended = Beside(port), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(15, ended.set)
    numbers = collections.Counter()

    def next_of(kind, requests):
        def next_request():
            numbers[kind] += 1
            return requests[numbers[kind] % len(requests)]

        return next_request

    tasks = []
    for kind, value in json.loads(loads).items():
        requests = [one.encode("latin-1") for one in value["requests"]]
        tasks.append(asyncio.create_task(load.send_forever(kind, value["rate"], next_of(kind, requests))))
    await ended.wait()
    for task in tasks:
        if task.done():
            task.result()  # raises what ended it
        task.cancel()
    load.tell()
    return bool(load.failed)


# The gateway and its upstream.


@attrs.frozen
class Site:
    """A gateway before an upstream, and the heartbeats of the workers that it knows."""

    directory: pathlib.Path
    port: int
    heartbeats: list[str] = attrs.field(factory=list)

    def register(self, workers):
        """Register so many workers by whole heartbeats, and keep the short ones that they send from then on."""
        for number in range(workers):
            whole = {
                "worker_id": f"w-{number}", "model_name": f"m-{number % 50}", "host": "127.0.0.1", "port": 9,
                "backend": "vllm", "heartbeat_interval": 600, "start_id": "s", "pid": number + 1, "args": ARGUMENTS,
                "registration": "r",
            }  # fmt: skip
            with urllib.request.urlopen(
                urllib.request.Request(
                    f"http://127.0.0.1:{self.port}/v1/workers/heartbeat",
                    json.dumps(whole).encode(),
                    {"content-type": "application/json", "authorization": f"Bearer {OWN_SECRET}"},
                ),
                timeout=LIMIT_S,
            ) as response:
                json.load(response)
            short = {"worker_id": f"w-{number}", "registration": "r", "state": "ready", "progress": PROGRESS}
            self.heartbeats.append(request_of("/v1/workers/heartbeat", short).decode())

    def load(self, args):
        plain = request_of("/v1/chat/completions", {"model": "tiny"}).decode()
        return self._start(
            heartbeats={"rate": args.heartbeats, "requests": self.heartbeats},
            plain={"rate": args.plain, "requests": [plain]},
        )

    def views(self, _args):
        get = "GET {} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
        return self._start(
            **{path: {"rate": 1, "requests": [get.format(path)]} for path in ("/v1/admin/workers", "/metrics")}
        )

    def _start(self, **loads):
        file = self.directory / "loads.json"
        file.write_text(json.dumps(loads))
        return subprocess.Popen(
            [sys.executable, __file__, "--beside", str(self.port), file], stdout=subprocess.PIPE, text=True
        )


@contextlib.contextmanager
def running_site(directory, program):
    """Yield a gateway before an upstream, each a process."""
    with ending(subprocess.Popen([sys.executable, UPSTREAM, "0"], stdout=subprocess.PIPE, text=True)) as upstream:
        write_secret(pathlib.Path(directory, "state"))
        config = TOML.format(directory=directory, port=int(upstream.stdout.readline()))
        with running_gateway(directory, config, program) as (_, port):
            yield Site(directory, port)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--heartbeats", type=float, default=1000, help="a second (1000)")
    parser.add_argument("--plain", type=float, default=200, help="plain requests a second (200)")
    parser.add_argument("--workers", type=int, default=3000, help="registered workers (3000)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each window (10)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pyz", help="measure this file instead of the source")
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if args.beside:
        sys.exit(run(beside(int(args.beside[0]), pathlib.Path(args.beside[1]).read_text())))
    with (
        tempfile.TemporaryDirectory() as directory,
        running_site(pathlib.Path(directory), [args.pyz] if args.pyz else FROM_SOURCE) as site,
    ):
        site.register(args.workers)
        found, lost, failed = run(windows(site.port, args, site))
    alone = statistics.median(window.p99() for window in found["alone"])
    loaded = statistics.median(window.p99() for window in found["beside load"]) / alone
    held = statistics.median(window.longest() for window in found["beside views"])
    held -= statistics.median(window.longest() for window in found["alone"])
    print(f"p99 beside heartbeats and plain requests: {loaded:.2f} of that alone (at most {RATIO_MAX})")
    print(f"longest gap beside the list and /metrics: {held:+.0f} ms (at most {HELD_MS_MAX})")
    print(f"streams lost: {lost}; loads with a failed request: {failed}")
    sys.exit(not (loaded <= RATIO_MAX and held <= HELD_MS_MAX and not lost and not failed))


if __name__ == "__main__":
    main()
