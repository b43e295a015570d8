"""Measure how many chunks a second a gateway moves with relays and without, and how much memory a relay has.

    .build/dev/bin/python tests/soak/relay_throughput.py [--streams 200] [--relays 2] [--seconds 5] [--rounds 3]

An upstream sends each stream 50 events a second. The client only counts bytes. What a gateway could move is computed:
the chunks a second that it moves, divided by the share of a core that its busiest process uses. So the figure does not
depend on the cores that the upstream and the client use; it does depend on other programs. `--streams` is for each
process that moves bytes: a chunk costs less in a process that has more of them at once, so processes are compared at
the same number. Then 1 000 connections, each with a request, begin and end, and the memory of each process of the
gateway is printed.
"""

import argparse
import asyncio
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import psutil
from running import ROOT, ending, running_gateway

sys.path.insert(0, str(ROOT / "tests"))
from support.deployments import free_port

UPSTREAM = ROOT / "tests" / "bench" / "upstream.py"
GAP_S = 0.02
EVENTS = 100_000
CONNECTIONS = 1000
TOML = """
[server_settings]
port = {port}
relays = {relays}
state_directory = "{directory}/state"
watch_config = false
[limits]
connections_per_address_max = 8192
[[external_routes]]
model_name = "tiny"
api_base = "http://127.0.0.1:{upstream}/v1"
"""


def request_of(more=b"", head=b""):
    body = b'{"model": "tiny"%b}' % more
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n%b"
        b"content-length: %d\r\n\r\n%b" % (head, len(body), body)
    )


class Stream(asyncio.Protocol):
    """A stream whose events are counted."""

    events = 0

    def connection_made(self, transport):
        transport.write(request_of(b', "stream": true, "events": %d, "gap_s": %f' % (EVENTS, GAP_S)))

    def data_received(self, data):
        Stream.events += data.count(b"data:")


def processes_of(gateway):
    """Return the process that decides, and its relays."""
    process = psutil.Process(gateway.pid)
    return [process, *(one for one in process.children() if "relay" in one.cmdline())]


async def chunks(gateway, port, streams, seconds):
    """Return the chunks a second that the gateway moves, and that it would move if its busiest process had a core."""
    loop = asyncio.get_running_loop()
    transports = []
    for _ in range(streams):
        transport, _ = await loop.create_connection(Stream, "127.0.0.1", port)
        transports.append(transport)
        await asyncio.sleep(2 * GAP_S / streams)
    await asyncio.sleep(2)
    processes = processes_of(gateway)
    before = [sum(one.cpu_times()[:2]) for one in processes]
    count, began = Stream.events, time.perf_counter()
    await asyncio.sleep(seconds)
    passed_s = time.perf_counter() - began
    shares = [(sum(one.cpu_times()[:2]) - used) / passed_s for one, used in zip(processes, before, strict=True)]
    rate = (Stream.events - count) / passed_s
    for transport in transports:
        transport.abort()
    await asyncio.sleep(0.5)
    return rate, rate / max(shares), sum(shares) / rate * 1e6


async def come_and_go(port):
    """Begin and end connections, each with a request."""
    for _ in range(CONNECTIONS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_of(head=b"connection: close\r\n"))
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()


def measure(relays, upstream, args):
    """Return what a gateway moves; print its memory."""
    with tempfile.TemporaryDirectory() as directory:
        config = TOML.format(port=free_port(), relays=relays, directory=directory, upstream=upstream)
        with running_gateway(pathlib.Path(directory), config) as (gateway, port):
            while len(processes_of(gateway)) < 1 + relays:
                time.sleep(0.05)
            time.sleep(1)
            found = asyncio.run(chunks(gateway, port, args.streams * max(1, relays), args.seconds))
            asyncio.run(come_and_go(port))
            sizes = [one.memory_info().rss / 1e6 for one in processes_of(gateway)]
    rate, possible, cost = found
    shown = ", ".join(f"{size:.1f}" for size in sizes)
    print(
        f"relays = {relays}: {rate:,.0f} chunks a second, {cost:.1f} µs of CPU each; {possible:,.0f} with a busiest"
        f" process at a whole core; memory after {CONNECTIONS} connections: {shown} MB",
        flush=True,
    )
    return possible


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--relays", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with ending(subprocess.Popen([sys.executable, UPSTREAM, "0"], stdout=subprocess.PIPE, text=True)) as process:
        upstream = int(process.stdout.readline())
        ratios = []
        for _ in range(args.rounds):
            alone = measure(0, upstream, args)
            ratios.append(measure(args.relays, upstream, args) / alone)
    print(f"with {args.relays} relays: {statistics.median(ratios):.2f} times the chunks of a gateway without")


if __name__ == "__main__":
    main()
