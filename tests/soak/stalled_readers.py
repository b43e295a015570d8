"""Measure what streams feel of clients beside them that stop reading: gaps between chunks, memory, how those end.

    python tests/soak/stalled_readers.py [--streams 1000] [--stalled 200] [--seconds 15] [--runs 3]

A gateway relays streams of one chunk every 200 ms each. First all clients read; then some stop, and get larger events
until nothing more fits between them and their upstream. Compared are the gaps of all others, in the same run. Ends with
1 where the gaps' 99th percentile grew by more than a fifth, a byte was lost, or a stalled stream did not end as it must.
"""

import argparse
import collections
import contextlib
import json
import pathlib
import re
import resource
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import attrs
import psutil
from running import ending, percentile, running_gateway

GAP_S = 0.2
"""Between two chunks of one stream."""
SLOTS = 100
"""Parts of GAP_S, so that the streams do not all have their chunk at the same time."""
PADDING = 100
BIG_BYTES = 64 * 1024
"""An event for a client that does not read, every GAP_S."""
HELD_S = 1.0
"""A stream of which the gateway takes nothing for so long is held back."""
STALL_S = 30.0
"""The gateway's `timeouts.client_stall_s`."""
TINY_BYTES = 4096
"""Receive buffer of a client that will stop reading."""
SEGMENT_BYTES = 1448
"""Of such a client's connection, as on Ethernet: with the loopback's the kernel alone would take megabytes for each."""
UNSENT_BYTES = 64 * 1024
"""Send buffer of the upstream for such a client."""
KEPT_BYTES_MAX = 128 * 1024
"""What the gateway keeps of a stream whose client takes nothing: one piece, as it was read."""
RATIO_MAX = 1.2
DIRECT = 100
"""Streams past the gateway, which show what the machine itself does to gaps at the time."""
STOOD_S = 0.5
"""A loop that wakes so late was not running: the machine stood still, and what was late then says nothing."""
LIMIT_S = 60.0
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
TOML = """
[server_settings]
port = 0
state_directory = "{directory}/state"
watch_config = false
[timeouts]
client_stall_s = {stall_s}
[logs]
access_log = ""
[[external_routes]]
model_name = "m"
api_base = "http://127.0.0.1:{port}/v1"
"""


def event(number):
    """Return a chunk of about 180 bytes, with its number in it."""
    data = b'data: {"choices":[{"index":0,"delta":{"content":"%09d%b"}}]}\n\n' % (number, b"x" * PADDING)
    return b"%x\r\n%b\r\n" % (len(data), data)


EVENT_BYTES = len(event(0))
BIG = b"%x\r\n%b\r\n" % (BIG_BYTES, b": " + b"x" * (BIG_BYTES - 4) + b"\n\n")


# The upstream, a process of its own.


@attrs.define(eq=False)
class Stream:
    """One response of the upstream."""

    sock: socket.socket
    will_stall: bool
    number: int = 0
    left: bytes = b""
    """What the gateway has not taken."""
    taken_at: float = 0.0
    is_held: bool = False
    """Whether the gateway has once taken nothing of it for HELD_S."""

    def send(self, data):
        """Send what is left and this; give how many bytes were taken."""
        self.left += data
        try:
            sent = self.sock.send(self.left)
        except BlockingIOError:
            return 0
        self.left = self.left[sent:]
        self.taken_at = time.monotonic()
        return sent


class Pace:
    """Sends every stream its chunk when it is its turn, and does what it is told on standard input."""

    def __init__(self):
        self.server = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.slots = [{} for _ in range(SLOTS)]
        self.poll = select.epoll()
        self.opened = 0
        self.are_big = self.is_ended = False
        self.closed = collections.Counter()
        self.held = 0
        """Streams that were held back, those that have ended since included."""
        self.taken_while_held = 0
        print(self.server.getsockname()[1], flush=True)
        self.poll.register(self.server, select.EPOLLIN)
        self.poll.register(0, select.EPOLLIN)

    def streams(self):
        return [stream for slot in self.slots for stream in slot.values()]

    def serve(self):
        """Serve until standard input ends."""
        due, slot = time.monotonic(), 0
        while True:
            for fd, _ in self.poll.poll(max(due - time.monotonic(), 0)):
                if fd == self.server.fileno():
                    self.accept()
                elif fd == 0:
                    word = sys.stdin.readline()
                    if not word:
                        return
                    self.obey(word.strip())
                else:
                    self.gone(fd)
            while due <= time.monotonic():
                for fd, stream in list(self.slots[slot].items()):
                    self.step(fd, stream)
                slot, due = (slot + 1) % SLOTS, due + GAP_S / SLOTS

    def accept(self):
        sock, _ = self.server.accept()
        request = b""
        while b"}" not in request:
            request += sock.recv(65536)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = Stream(sock, b'"stall"' in request)
        if stream.will_stall:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT_BYTES)
        self.slots[self.opened % SLOTS][sock.fileno()] = stream
        self.opened += 1
        self.poll.register(sock, select.EPOLLRDHUP)
        stream.send(HEAD)

    def step(self, fd, stream):
        try:
            if stream.left:
                taken = stream.send(b"")
                self.taken_while_held += taken * stream.is_held
                if stream.left and not stream.is_held and time.monotonic() - stream.taken_at > HELD_S:
                    stream.is_held = True
                    self.held += 1
            elif self.are_big and stream.will_stall:
                stream.send(BIG)
            else:
                stream.send(event(stream.number))
                stream.number += 1
        except OSError:
            self.gone(fd)

    def gone(self, fd):
        for slot in self.slots:
            stream = slot.pop(fd, None)
            if stream is not None:
                self.closed["ended" if self.is_ended else "stalled" if stream.will_stall else "others"] += 1
                stream.sock.close()

    def obey(self, word):
        """Do as told, and answer with what is known of the streams."""
        streams = self.streams()
        if word == "big":
            self.are_big = True
        elif word == "end":
            self.is_ended = True
            for stream in streams:
                stream.sock.setblocking(True)
                stream.send(END)
            self.slots = [{} for _ in range(SLOTS)]
        facts = {
            "streams": len(streams),
            "held": self.held,
            "taken_while_held": self.taken_while_held,
            "closed": dict(self.closed),
        }
        print(json.dumps(facts), flush=True)


# The clients.


@attrs.define
class Window:
    """Gaps between chunks, in milliseconds, of the streams that are always read."""

    gaps: list[float] = attrs.field(factory=list)
    direct: list[float] = attrs.field(factory=list)
    """Of those past the gateway."""
    seconds: dict[int, list[float]] = attrs.field(factory=lambda: collections.defaultdict(list))
    """The gaps by the second in which they ended."""

    def add(self, at_s, gap_ms, *, is_direct):
        if is_direct:
            self.direct.append(gap_ms)
        else:
            self.gaps.append(gap_ms)
            self.seconds[int(at_s)].append(gap_ms)

    def p99(self):
        """Return the 99th percentile of each second, and of these the median: one bad second of the machine is no matter."""
        return statistics.median(percentile(gaps, 0.99) for gaps in self.seconds.values())

    def row(self):
        return [len(self.gaps), *(percentile(self.gaps, share) for share in (0.5, 0.99, 1)), self.p99(),
                percentile(self.direct, 0.99)]  # fmt: skip


class Reading:
    """All clients, served by one loop."""

    def __init__(self, port):
        self.port = port
        self.poll = select.epoll()
        self.socks = {}
        self.last = {}
        self.bytes = collections.Counter()
        self.tails = {}
        self.stalled = set()
        self.direct = set()
        self.ended = set()
        self.broken = set()
        self.stood = 0

    def open(self, *, will_stall=False, past_gateway=0):
        """Begin a stream; `past_gateway` is the upstream's port for one that does not go through it."""
        sock = socket.socket()
        if will_stall:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, TINY_BYTES)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
        sock.connect(("127.0.0.1", past_gateway or self.port))
        body = b'{"model":"m"%b}' % (b',"stall":1' if will_stall else b"")
        sock.send(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        sock.setblocking(False)
        fd = sock.fileno()
        self.socks[fd] = sock
        self.tails[fd] = b""
        if will_stall:
            self.stalled.add(fd)
        if past_gateway:
            self.direct.add(fd)
        self.poll.register(fd, select.EPOLLIN)

    def stop_reading(self):
        for fd in self.stalled:
            self.poll.unregister(fd)

    def read_again(self):
        for fd in self.stalled:
            self.poll.register(fd, select.EPOLLIN)

    def read_for(self, seconds, until=lambda: False):
        """Read for so long, or until a condition holds that is looked at now and then; give the gaps."""
        window = Window()
        begun = time.monotonic()
        end = begun + seconds
        woken = look = time.monotonic()
        while (now := time.monotonic()) < end:
            if now > look:
                if until():
                    break
                look = now + 0.5
            ready = self.poll.poll(0.05)
            now = time.monotonic()
            is_late = now - woken > STOOD_S
            self.stood += is_late
            for fd, _ in ready:
                if self.read(fd) and fd not in self.stalled:
                    before = self.last.get(fd)
                    self.last[fd] = now
                    if before is not None and not is_late:
                        window.add(now - begun, (now - before) * 1000, is_direct=fd in self.direct)
            woken = now
        return window

    def read(self, fd):
        """Read once; say whether there was something."""
        try:
            data = self.socks[fd].recv(262144)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if fd not in self.bytes and data:
            self.bytes[fd] -= data.find(b"\r\n\r\n") + 4  # the head comes at once
        self.bytes[fd] += len(data)
        self.tails[fd] = (self.tails[fd] + data)[-2 * EVENT_BYTES :]
        if self.tails[fd].endswith(END):
            self.ended.add(fd)
        if not data:
            (self.broken if fd not in self.ended else set()).add(fd)
            self.poll.unregister(fd)
        return bool(data)

    def numbers_lost(self, fd):
        """Return how many chunks a stream that has ended is short of, by its bytes and by the last number in it."""
        found = re.findall(rb'"content":"([0-9]{9})', self.tails[fd])
        body = self.bytes[fd] - len(END)
        return int(found[-1]) + 1 - body // EVENT_BYTES if found else 1

    def close(self):
        for sock in self.socks.values():
            sock.close()


# One run.


@attrs.frozen
class Site:
    """An upstream and a gateway, each a process."""

    upstream: subprocess.Popen
    gateway: subprocess.Popen
    port: int
    upstream_port: int

    def tell(self, word):
        """Tell the upstream something; give what it knows."""
        self.upstream.stdin.write(word + "\n")
        self.upstream.stdin.flush()
        return json.loads(self.upstream.stdout.readline())

    def resident(self):
        """Return the gateway's memory in bytes."""
        return psutil.Process(self.gateway.pid).memory_info().rss


@contextlib.contextmanager
def running_site(directory, stall_s):
    """Yield an upstream and a gateway before it."""
    command = [sys.executable, __file__, "--upstream"]
    upstream = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    with ending(upstream):
        upstream_port = int(upstream.stdout.readline())
        config = TOML.format(directory=directory, stall_s=stall_s, port=upstream_port)
        with running_gateway(directory, config) as (gateway, port):
            yield Site(upstream, gateway, port, upstream_port)


def socket_memory():
    """Return what the kernel holds for all TCP connections of this machine, in bytes."""
    found = re.search(r"^TCP:.* mem (\d+)", pathlib.Path("/proc/net/sockstat").read_text(), re.MULTILINE)
    return int(found[1]) * resource.getpagesize()


@attrs.define
class Facts:
    """What one run showed; sizes in bytes."""

    windows: dict[str, Window] = attrs.field(factory=dict)
    resident: dict[str, int] = attrs.field(factory=dict)
    kernel: dict[str, int] = attrs.field(factory=dict)
    held: int = 0
    """Upstream streams that could send nothing any more."""
    taken_while_held: int = 0
    """Bytes that the gateway took from these all the same."""
    stalled_for_s: float = 0.0
    """From when all were held to when all had been ended."""
    closed: dict[str, int] = attrs.field(factory=dict)
    """Upstream connections that ended, by what they were."""
    broken: int = 0
    """Stalled clients that saw their response break off."""
    whole: int = 0
    """Streams that were read to their end, without a byte missing."""
    lost: int = 0
    stood: int = 0
    """How often the machine stood still."""

    def ratio(self):
        """Return by how much the gaps' 99th percentile has grown."""
        return self.windows["held"].p99() / self.windows["reading"].p99()


def run(directory, streams, stalled, seconds, stall_s, *, direct=0):
    """Run once; give what was found."""
    facts = Facts()
    with running_site(directory, stall_s) as site:
        clients = Reading(site.port)

        def note(name):
            facts.resident[name], facts.kernel[name] = site.resident(), socket_memory()

        def all_held():
            return site.tell("say")["held"] == stalled

        def all_closed():
            return site.tell("say")["closed"].get("stalled", 0) == stalled

        note("before")
        try:
            for number in range(streams):
                clients.open(will_stall=number < stalled)
                if number % 20 == 0:
                    clients.read_for(0.01)
            for _ in range(direct):
                clients.open(past_gateway=site.upstream_port)
            clients.read_for(min(3, seconds))
            facts.windows["reading"] = clients.read_for(seconds)
            note("reading")
            clients.stop_reading()
            site.tell("big")
            facts.windows["filling"] = clients.read_for(LIMIT_S, all_held)
            begun = time.monotonic()
            facts.windows["held"] = clients.read_for(seconds)
            after = site.tell("say")
            facts.held, facts.taken_while_held = after["held"], after["taken_while_held"]
            note("held")
            clients.read_for(stall_s + LIMIT_S, all_closed)
            facts.stalled_for_s = time.monotonic() - begun
            facts.windows["after"] = clients.read_for(seconds)
            note("after")
            facts.closed = site.tell("end")["closed"]
            clients.read_again()
            clients.read_for(LIMIT_S, lambda: len(clients.ended | clients.broken) == streams + direct)
            facts.broken = len(clients.broken & clients.stalled)
            facts.whole = len(clients.ended - clients.stalled - clients.direct)
            facts.lost = sum(clients.numbers_lost(fd) != 0 for fd in clients.socks if fd not in clients.stalled)
            facts.stood = clients.stood
        finally:
            clients.close()
    return facts


def table(facts, streams, stalled):
    """Write what one run showed."""
    lines = [
        f"{'gaps in ms':10} {'count':>7} {'p50':>7} {'p99':>7} {'max':>7} {'p99 of a second':>16} {'p99 past gateway':>17}"
    ]
    for name, window in facts.windows.items():
        lines.append("{:10} {:7} {:7.1f} {:7.1f} {:7.1f} {:16.1f} {:17.1f}".format(name, *window.row()))
    lines.append(f"p99 of a second, held / reading: {facts.ratio():.3f} (at most {RATIO_MAX})")
    for name, resident in facts.resident.items():
        lines.append(
            f"{name:10} gateway RSS {resident / 1e6:7.1f} MB, TCP of this machine {facts.kernel[name] / 1e6:7.1f} MB"
        )
    grown = facts.resident["held"] - facts.resident["reading"]
    bound = stalled * KEPT_BYTES_MAX
    lines.append(f"RSS by stalled clients: {grown / 1e6:+.1f} MB, bound {stalled} x 128 KiB = {bound / 1e6:.1f} MB")
    lines.append(f"held back: {facts.held} of {stalled}; taken from them then: {facts.taken_while_held} bytes")
    lines.append(f"ended by client_stall_s: {facts.broken}, {facts.stalled_for_s:.0f} s after all were held")
    lines.append(f"upstream connections closed then: {facts.closed}")
    lines.append(f"read to the end: {facts.whole} of {streams - stalled}, with something missing: {facts.lost}")
    lines.append(f"the machine stood still {facts.stood} times")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--stalled", type=int, default=200, help="how many of them stop reading (200)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each window (15)")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if args.upstream:
        Pace().serve()
        return
    is_well = True
    for number in range(args.runs):
        with tempfile.TemporaryDirectory() as directory:
            facts = run(pathlib.Path(directory), args.streams, args.stalled, args.seconds, STALL_S, direct=DIRECT)
        print(f"run {number + 1}\n{table(facts, args.streams, args.stalled)}\n", flush=True)
        whole = args.streams - args.stalled
        is_well &= facts.ratio() <= RATIO_MAX and (facts.broken, facts.whole, facts.lost) == (args.stalled, whole, 0)
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
