"""Measure how many requests a second the deciding process of a gateway with relays decides, on one core.

    PYTHONPATH=. .build/dev/bin/python tests/soak/relay_decisions.py [--seconds 5] [--relays 3] [--at-once 16]
                                                                     [--rate 5000] [--heartbeats 300] [--workers 8]

The relays are generators of frames: each asks, and ends the attempt of each step at once. All that decides is real: a
key with all kinds of limits, `prefix_aware` with 16 digests, the ledger, the access log. Heartbeats of workers arrive
beside them over HTTP. The process that decides has a core of its own, and the generators have the other cores.

Two figures are printed. First the requests that are decided in a second while each relay has `--at-once` of them open.
Then the time from an ask to its step while requests arrive at `--rate` a second.
"""

import argparse
import json
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time

import trio
from running import ROOT, percentile

sys.path.insert(0, str(ROOT / "tests"))
from support.frame_damage import BEGIN, answered, ask
from support.owner_rig import owner_of

from ichat.protocol.messages import PEER_HEADER
from ichat.relays.frames import encode
from ichat.relays.layouts import LAYOUTS
from ichat.security.keys import hash_of

KEY = "sk-a-key-of-a-client-that-measures"
CONVERSATIONS = 64
"""Prompts that differ, so that a choice by prefixes has something to choose."""
MORE = """
[routing]
policy = "prefix_aware"
max_in_flight = 100000
[usage]
enabled = true
[[security.keys]]
name = "team-a"
key_hash = "{hash}"
max_in_flight = 100000
requests_per_minute = 100000000
tokens_per_minute = 10000000000
tokens_per_day = 1000000000000
"""
SETTLE_S = 1.0
OPEN_MAX = 2000
"""Of a relay: beyond it asks wait, and the rate is missed."""
STEP, REFUSED = LAYOUTS["step"].number, LAYOUTS["refuse"].number


class Generator:
    """A relay that has nothing but frames."""

    def __init__(self, descriptor, number):
        self._sock = socket.socket(fileno=descriptor)
        self._sock.setblocking(True)
        self._asks = [self._ask_of(number * CONVERSATIONS + one) for one in range(CONVERSATIONS)]
        self._outcome = encode(answered(1, 1, 1, key="team-a", model="m"))
        self._number = self._seq = 0
        self._sent_at = {}
        self._rest = b""
        self.latencies, self.refused = [], 0
        self._sock.sendall(b"".join(map(encode, BEGIN)))

    def _ask_of(self, conversation):
        sums = tuple(conversation * 1000 + place for place in range(16))
        credential = f"Bearer {KEY}".encode()
        return encode(ask(1, checksums=sums, prefix_bytes=16_000, credential=credential))

    def _next_ask(self):
        self._number += 1
        data = bytearray(self._asks[self._number % CONVERSATIONS])
        struct.pack_into("<IQ", data, 8, self._number, time.monotonic_ns())
        self._sent_at[self._number] = time.perf_counter()
        return bytes(data)

    def _ends_of(self, data):
        """Return the outcomes of the steps in these bytes, and how many steps there are."""
        data, at, found = self._rest + data, 0, []
        now = time.perf_counter()
        while len(data) - at >= 8:
            size, kind = struct.unpack_from("<IB", data, at)
            if len(data) - at < size:
                break
            if kind in (STEP, REFUSED):
                (number,) = struct.unpack_from("<I", data, at + 8)
                self.latencies.append(now - self._sent_at.pop(number))
                if kind == STEP:
                    self._seq += 1
                    outcome = bytearray(self._outcome)
                    struct.pack_into("<IBQ", outcome, 8, number, 1, self._seq)
                    found.append(bytes(outcome))
                else:
                    self.refused += 1
            at += size
        self._rest = data[at:]
        return found

    def run(self, seconds, at_once, rate):
        """Ask for this time; `rate` is asks a second, or 0 for `at_once` open asks at any time."""
        ends_at = time.perf_counter() + seconds
        self.latencies.clear()
        open_asks, due = 0, time.perf_counter()
        out = []
        while (now := time.perf_counter()) < ends_at or open_asks:
            if now < ends_at:
                if rate:
                    while due <= now and open_asks < OPEN_MAX:
                        out.append(self._next_ask())
                        open_asks, due = open_asks + 1, due + 1 / rate
                else:
                    out += [self._next_ask() for _ in range(at_once - open_asks)]
                    open_asks = at_once
            if out:
                self._sock.sendall(b"".join(out))
                out = []
            if select.select([self._sock], [], [], max(0.0, due - time.perf_counter()) if rate else None)[0]:
                before = len(self.latencies)
                out = self._ends_of(self._sock.recv(65536))
                open_asks -= len(self.latencies) - before
        if out:
            self._sock.sendall(b"".join(out))


def generate(descriptor, number, seconds, at_once, rate):
    """Be a relay; print what it has measured."""
    generator = Generator(descriptor, number)
    generator.run(SETTLE_S, at_once, rate)
    generator.run(seconds, at_once, rate)
    print(json.dumps({"latencies": generator.latencies, "refused": generator.refused}))


def beat(path, workers, rate, seconds):
    """Be the workers: register, and then send heartbeats; print how many were accepted."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    accepted, number = 0, 0
    secret = os.environ["MEASURED_SECRET"].encode()

    def send(content):
        data = json.dumps(content).encode()
        sock.sendall(
            b"POST /v1/workers/heartbeat HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n%b: "
            b"127.0.0.1:9\r\nauthorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b"
            % (PEER_HEADER, secret, len(data), data)
        )
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += sock.recv(65536)
        head, _, rest = answer.partition(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        while len(rest) < length:
            rest += sock.recv(65536)
        return head.split()[1] == b"200", rest

    for one in range(workers):
        is_accepted, answer = send({
            "worker_id": f"w-{one}", "model_name": "m", "host": "127.0.0.1", "port": 9, "backend": "vllm",
            "heartbeat_interval": 600, "start_id": "s", "pid": one + 1, "registration": "r", "state": "ready",
        })  # fmt: skip
        assert is_accepted, answer
    print("registered", flush=True)
    ends_at = time.monotonic() + seconds
    while rate and time.monotonic() < ends_at:
        progress = {"running": 0, "waiting": 0, "steps": number, "tokens_in": 1, "tokens_out": number}
        worker = f"w-{number % workers}"
        accepted += send({"worker_id": worker, "registration": "r", "state": "ready", "progress": progress})[0]
        number += 1
        time.sleep(max(0.0, ends_at - seconds + number / rate - time.monotonic()))
    print(accepted)


def start(role, *words, cores, **more):
    """Start a process of this file on these cores."""
    process = subprocess.Popen(
        [sys.executable, __file__, role, *map(str, words)], stdout=subprocess.PIPE, text=True, cwd=ROOT, **more
    )
    os.sched_setaffinity(process.pid, cores)
    return process


async def measure(owner, args, cores, rate):
    """Return the latencies of a run, and how many seconds of CPU the deciding process has used in a second."""
    generators = []
    relays = []
    for number in range(args.relays):
        relay, sock = owner.connect()
        sock.set_inheritable(True)
        relays.append(relay)
        generators.append(start(
            "relay", sock.fileno(), number, args.seconds, args.at_once, rate / args.relays, cores=cores,
            pass_fds=[sock.fileno()],
        ))  # fmt: skip
        sock.close()
    while not all(relay.asks for relay in relays):
        await trio.sleep(0.01)
    await trio.sleep(SETTLE_S)
    used, began, count = time.process_time(), time.perf_counter(), sum(relay.asks for relay in relays)
    await trio.sleep(max(0.5, args.seconds - SETTLE_S))
    seconds = time.perf_counter() - began
    cpu = time.process_time() - used
    assert all(relay.wire.is_open for relay in relays), [relay.end_reasons for relay in relays]
    frames = sum(relay.asks for relay in relays) - count
    outputs = [json.loads(await trio.to_thread.run_sync(lambda one=one: one.communicate()[0])) for one in generators]
    latencies = [one for output in outputs for one in output["latencies"]]
    assert not any(output["refused"] for output in outputs), "requests were refused"
    return latencies, frames / seconds, cpu / frames * 1e6, cpu / seconds


async def run(args):
    cores = sorted(os.sched_getaffinity(0))
    own, others = cores[0], set(cores[1:] or cores)
    os.sched_setaffinity(0, {own})
    with tempfile.TemporaryDirectory() as directory:
        async with owner_of(directory, MORE.format(hash=hash_of(KEY))) as owner:
            secret = owner.components.control.auth.secret
            beats = start(
                "workers", owner.inner, args.workers, args.heartbeats, 4 * args.seconds, cores=others,
                env={**os.environ, "MEASURED_SECRET": secret},
            )  # fmt: skip
            assert await trio.to_thread.run_sync(beats.stdout.readline) == "registered\n"
            _, rate, cost, share = await measure(owner, args, others, 0)
            print(
                f"{args.relays} relays, {args.at_once} open at each: {rate:,.0f} decisions a second with {share:.0%} of a"
                f" core, {cost:.0f} µs of CPU each: {1e6 / cost:,.0f} a second with a whole core"
            )
            latencies, rate, cost, share = await measure(owner, args, others, args.rate)
            shown = ", ".join(
                f"p{place:g} {percentile(latencies, place / 100) * 1e3:.2f} ms" for place in (50, 99, 99.9)
            )
            print(f"at {rate:,.0f} a second: {shown}; {cost:.0f} µs of CPU each, {share:.0%} of a core")
            beats.terminate()
            await trio.to_thread.run_sync(beats.wait)
            in_flight, _ = owner.in_flight()
            assert in_flight == 0, "requests stay in flight"


def main():
    if sys.argv[1:2] == ["relay"]:
        descriptor, number, seconds, at_once, rate = sys.argv[2:]
        generate(int(descriptor), int(number), float(seconds), int(at_once), float(rate))
        return
    if sys.argv[1:2] == ["workers"]:
        path, workers, rate, seconds = sys.argv[2:]
        beat(path, int(workers), float(rate), float(seconds))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run (5)")
    parser.add_argument("--relays", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=16, help="open asks of each relay in the first run (16)")
    parser.add_argument("--rate", type=float, default=5000, help="asks a second in the second run (5000)")
    parser.add_argument("--heartbeats", type=float, default=300, help="a second (300)")
    parser.add_argument("--workers", type=int, default=8)
    trio.run(run, parser.parse_args())


if __name__ == "__main__":
    main()
