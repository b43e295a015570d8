"""A gateway with relays as real processes, an upstream that counts, and clients that count what they got.

Each client knows the local port of its connection. So a fault can say which clients it may hurt: those whose
connections the killed relay had.
"""

import collections
import contextlib
import hashlib
import json
import select
import signal
import ssl
import time
from functools import partial

import attrs
import psutil
import pytest
import trio
import trio.lowlevel
import trustme
from support.peers import SSE_END, SSE_HEAD, chunk, event, plain, until
from support.programs import LIMIT_S

ROUTE = """
[[external_routes]]
model_name = "{name}"
api_base = "http://127.0.0.1:{port}/v1"
{more}
"""
STARTED = "accepts connections"


SETTLE_S = 0.25


class CountingUpstream:
    """Serves plain responses and streams, and counts the requests that it has at once.

    A new request first drops those whose connections are closed. The kernel of a busy machine may report that later
    than the end of the process that had them, so a new maximum counts only those that are open after `SETTLE_S`. This
    process may also read a request later than its end: such a request does not count.
    """

    def __init__(self):
        self.held = {}
        """The requests that it has, by their streams: the texts `who` of their bodies."""
        self.most = 0
        self.most_of_one = 0
        """The most requests with the same `who`."""
        self.served = 0
        self.tokens = [0, 0]
        """Those of all prompts, and of all answers; each answer has others."""
        self.order = []
        """The texts `who` of the requests' bodies, in the order of their arrival."""
        self.ends = trio.Event()
        """Streams end when it is set."""
        self.gap_s = 0.02
        self.hold_s = 0.0
        """How long a plain response takes."""
        self.opens = trio.Event()
        self.opens.set()
        """Plain responses wait for it."""

    async def serve(self, stream):
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            try:
                rest = b""
                while True:
                    head, _, rest = await _until(stream, rest, b"\r\n\r\n")
                    if not head:
                        return
                    length = next(
                        int(line.partition(b":")[2])
                        for line in head.lower().split(b"\r\n")
                        if line.startswith(b"content-length")
                    )
                    while len(rest) < length:
                        data = await stream.receive_some()
                        if not data:
                            return
                        rest += data
                    body, rest = json.loads(rest[:length]), rest[length:]
                    await self._answer(stream, body)
            finally:
                self.held.pop(stream, None)
                await trio.aclose_forcefully(stream)

    async def _answer(self, stream, body):
        self.held = {one: who for one, who in self.held.items() if not _has_ended(one.socket)}
        self.held[stream] = who = body.get("who", "")
        self.order.append(who)
        before = {one: of for one, of in self.held.items() if one is not stream}
        if len(before) >= self.most or sum(of == who for of in before.values()) >= self.most_of_one:
            if before:
                await trio.sleep(SETTLE_S)
            if _has_ended(stream.socket):  # it was read after another request that may be there since its end
                return
            before = {one: of for one, of in before.items() if not _has_ended(one.socket)}
            self.most = max(self.most, 1 + len(before))
            self.most_of_one = max(self.most_of_one, 1 + sum(of == who for of in before.values()))
        if not body.get("stream"):
            await self.opens.wait()
            await trio.sleep(self.hold_s)
            used = self._served(stream)
            answer = {"model": "m", "digest": _digest_of(body), "usage": used}
            await stream.send_all(plain(json.dumps(answer).encode()))
            return
        await stream.send_all(SSE_HEAD)
        number = 0
        while not self.ends.is_set():
            await stream.send_all(event(number))
            number += 1
            with trio.move_on_after(self.gap_s):
                await self.ends.wait()
        last = json.dumps({"choices": [], "usage": self._served(stream)}).encode()
        await stream.send_all(chunk(b"data: %b\n\n" % last) + SSE_END)

    def _served(self, stream):
        """Count a response, and return its usage."""
        self.held.pop(stream, None)
        self.served += 1
        used = self.served, self.served % 77
        self.tokens = [one + more for one, more in zip(self.tokens, used, strict=True)]
        return {"prompt_tokens": used[0], "completion_tokens": used[1], "total_tokens": sum(used)}


def _digest_of(body):
    return hashlib.sha256(body.get("text", "").encode()).hexdigest()


async def _until(stream, data, end):
    """Return what is before `end`, `end`, and what was read behind it; the first is empty at the end of the stream."""
    while end not in data:
        more = await stream.receive_some()
        if not more:
            return b"", b"", b""
        data += more
    return data.partition(end)


def _has_ended(sock):
    """Return whether a connection is closed, here or at the other side."""
    if sock.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


@attrs.define
class Result:
    """What a client got for a request."""

    port: int = 0
    """Its connection's; 0: it was refused."""
    status: int = 0
    """0: the connection ended without a response."""
    is_whole: bool = False
    events: int = 0
    code: str = ""
    is_last: bool = False
    """Whether its connection ends with it."""
    digest: str = ""
    """Of the text that its upstream has got."""
    began_at: float = attrs.field(factory=time.monotonic)
    took_s: float = 0.0


class Load:
    """Clients with streams, and clients with short requests, on new and on kept connections."""

    def __init__(self, site):
        self._site = site
        self.streams = []
        self.results = []
        self.under_way = set()
        self.is_over = False
        self.start_soon = None
        """Starts another client's task, once `run` has begun."""

    async def run(self, streams, requests_s, kept=4, *, task_status=trio.TASK_STATUS_IGNORED):
        """Begin streams, and then `requests_s` requests a second; `started` when the streams have begun.

        There are `streams` of them, and more until each relay has one.
        """
        lanes = [trio.Semaphore(1, max_value=1) for _ in range(kept)]
        connections = [None] * kept
        async with trio.open_nursery() as nursery:
            self.start_soon = nursery.start_soon
            for _ in range(streams):
                nursery.start_soon(self._stream)
            await until(lambda: len(self.streams) == streams)
            await until(self._have_begun)
            while not all({one.port for one in self.streams} & clients_of(relay) for relay in self._relays()):
                nursery.start_soon(self._stream)
                await trio.lowlevel.checkpoint()
                await until(self._have_begun)
            task_status.started()
            due, number = trio.current_time(), 0
            while not self.is_over:
                number += 1
                lane = number % (2 * kept)
                nursery.start_soon(self._request, *((lanes, connections, lane) if lane < kept else (None, None, 0)))
                due = max(due + 1 / requests_s, trio.current_time() - 1)
                await trio.sleep_until(due)
        for connection in connections:  # the last requests may have opened some
            if connection is not None:
                await trio.aclose_forcefully(connection)

    def _relays(self):
        return self._site.relays().values()

    def _have_begun(self):
        return self.streams and all(one.events > 0 for one in self.streams)

    async def _stream(self):
        result = Result()
        self.streams.append(result)
        stream = await self._site.connect(result)
        async with stream:
            await stream.send_all(post({"model": "m", "stream": True}))
            data, next_number = b"", 0
            with contextlib.suppress(trio.BrokenResourceError):
                while more := await stream.receive_some():
                    data += more
                    *lines, data = data.split(b"\n")
                    for line in lines:
                        if line.startswith(b"HTTP/"):
                            result.status = int(line.split()[1])
                        elif line.startswith(b'data: {"n"'):
                            assert json.loads(line[6:])["n"] == next_number, "an event was lost, or sent twice"
                            next_number = result.events = next_number + 1
                        elif line.startswith(b"data: {"):
                            result.code = json.loads(line[6:]).get("error", {}).get("code", "")
                        elif line.startswith(b"data: [DONE]"):
                            result.is_whole = True
                            return

    async def _request(self, lanes, connections, lane):
        result = Result()
        self.results.append(result)
        self.under_way.add(id(result))
        try:
            if lanes is None:
                stream = await self._site.connect(result)
                if stream is not None:
                    async with stream:
                        await ask(stream, {"model": "m"}, result)
                return
            async with lanes[lane]:
                result.began_at = time.monotonic()
                if connections[lane] is None:
                    connections[lane] = await self._site.connect(result)
                if connections[lane] is not None:
                    result.port = _port_of(connections[lane])
                    await ask(connections[lane], {"model": "m"}, result)
                    if not result.is_whole or result.is_last:
                        await trio.aclose_forcefully(connections[lane])
                        connections[lane] = None
        finally:
            result.took_s = time.monotonic() - result.began_at
            self.under_way.discard(id(result))

    @property
    def failed(self):
        """The requests that have ended without a 200."""
        return [one for one in self.results if id(one) not in self.under_way and one.status != 200]

    @property
    def broken(self):
        """The streams that are not whole. They are when the load is over."""
        return [one for one in self.streams if not one.is_whole]

    async def more(self, count):
        """Wait until this number of requests that begin from now on has ended."""
        first = len(self.results)
        await until(lambda: len(self.results) > first + count and not self._open_of(first, count))

    def _open_of(self, first, count):
        return any(id(one) in self.under_way for one in self.results[first : first + count])

    def summary(self):
        """Return the counts in a line."""
        statuses = collections.Counter(f"{one.status} {one.code}".strip() for one in self.results)
        longest = max((one.took_s for one in self.results), default=0.0)
        return f"{len(self.streams)} streams, {len(self.broken)} broken; {dict(statuses)}, longest {longest:.2f} s"


def post(body):
    """Return the bytes of a request."""
    data = json.dumps(body).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(data), data)
    )


async def ask(stream, body, result, key=""):
    """Send a request, and note the response."""
    data = post(body)
    if key:
        data = data.replace(b"host:", b"authorization: Bearer %b\r\nhost:" % key.encode(), 1)
    with contextlib.suppress(trio.BrokenResourceError):
        await stream.send_all(data)
        head, rest = await _response(stream)
        if rest is None:
            return
        result.status = int(head.split()[1])
        result.is_whole = True
        result.is_last = b"\r\nconnection: close" in head.lower()
        answer = json.loads(rest)
        result.digest = answer.get("digest", "")
        if result.status != 200:
            result.code = answer["error"]["code"]


async def _response(stream):
    """Return the head of a response and its body; None if that is not whole."""
    head, _, rest = await _until(stream, b"", b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    if b"transfer-encoding: chunked" in lines:
        body = b""
        while True:
            size, end, rest = await _until(stream, rest, b"\r\n")
            if not end:
                return head, None
            while len(rest) < int(size, 16) + 2:
                more = await stream.receive_some()
                if not more:
                    return head, None
                rest += more
            body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
            if not int(size, 16):
                return head, body
    length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), None)
    while length is not None and len(rest) < length:
        more = await stream.receive_some()
        if not more:
            return head, None
        rest += more
    return head, None if length is None else rest


def _port_of(stream):
    sock = getattr(stream, "transport_stream", stream).socket
    return sock.getsockname()[1]


class Site:
    """A gateway, its relays, and its upstream."""

    def __init__(self, program, upstream, trust=None, restart=None):
        """`restart` is called with more text of the configuration, and returns the next program."""
        self.program = program
        self._restart = restart
        self._more = ""
        self.upstream = upstream
        self._trust = trust

    async def connect(self, result=None):
        """Return a connection to the gateway, or None if it is refused."""
        try:
            stream = await trio.open_tcp_stream("127.0.0.1", self.program.port)
        except OSError:
            return None
        if result is not None:
            result.port = _port_of(stream)
        if self._trust is not None:
            stream = trio.SSLStream(stream, self._trust, server_hostname="localhost", https_compatible=True)
        return stream

    async def get(self, path):
        """Return the JSON of the control plane's answer, by the key of the gateway's own user."""
        head = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {self.program.own_secret()}\r\n\r\n"
        async with await self.connect() as stream:
            await stream.send_all(head.encode())
            return json.loads((await _response(stream))[1])

    async def until(self, holds):
        """Wait until an asynchronous function returns something true."""
        with trio.fail_after(LIMIT_S):
            while not await holds():
                await trio.sleep(0.02)

    async def until_ready(self, worker_id):
        """Wait for a worker, and return its process."""
        found = {}

        async def is_ready():
            found.update(await self.get(f"/v1/admin/workers/{worker_id}"))
            return found.get("state") == "ready"

        await self.until(is_ready)
        return found["pid"]

    def relays(self):
        """Return the relays of the gateway, by their numbers."""
        return relays_of(self.program)

    def starts(self, number):
        """Return how often the relay of this number has begun to accept."""
        return self.program.text().count(f"relay {number} {STARTED}")

    async def kill_owner(self):
        """End the process that decides by SIGKILL."""
        self.program.process.send_signal(signal.SIGKILL)
        await trio.to_thread.run_sync(self.program.process.wait)

    async def start_owner(self):
        """Start the next process that decides."""
        self.program = await trio.to_thread.run_sync(self._restart, self._more)

    def configure(self, more):
        """Add text to the configuration, for a reload and for the next start."""
        self._more += more
        path = self.program.log.parent / "ichat.toml"
        path.write_text(path.read_text() + more)

    async def until_started(self, count, times=1):
        await until(lambda: all(self.starts(number) >= times for number in range(1, count + 1)))

    async def in_flight(self):
        """Return the requests that the owner knows."""
        return (await self.get("/v1/admin/requests"))["total"]

    async def until_in_flight(self, least):
        async def has_requests():
            return await self.in_flight() >= least

        await self.until(has_requests)

    async def until_idle(self):
        async def is_idle():
            return not await self.in_flight()

        await self.until(is_idle)


def relays_of(program):
    """Return the relays of a gateway, by their numbers; a gateway that has ended may have some, too."""
    found, state = {}, f"--state={program.log.parent}/state"
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "relay" in words and state in words and process.status() != psutil.STATUS_ZOMBIE:
                (number,) = (word.partition("=")[2] for word in words if word.startswith("--number="))
                found[int(number)] = process
    return found


def stop_and_list(process):
    """Stop a process, and return the ports of its clients: none arrives before it is killed, or goes on."""
    process.send_signal(signal.SIGSTOP)
    while process.status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)
    return clients_of(process).union(*(clients_of(process) for _ in range(3)))  # the kernel's list may lack a few


def clients_of(process):
    """Return the ports of the connections of a process, at their other ends."""
    return {one.raddr.port for one in process.net_connections("tcp") if one.raddr}


@contextlib.asynccontextmanager
async def site_of(gateway, port, relays, text="", settings="", route="", trust=None, others=()):
    """Start an upstream and a gateway before it; `gateway` is the fixture of that name.

    `route` is more text of the route for the model `m`. `others` are other models that the upstream has, each with the
    text of its route.
    """
    upstream = CountingUpstream()
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, upstream.serve, 0, host="127.0.0.1"))
        port_there = listeners[0].socket.getsockname()[1]
        for name, more in (("m", route), *others):
            text += ROUTE.format(name=name, port=port_there, more=more)

        def start(more):
            return gateway(text + more, port=port, settings=f"relays = {relays}\n{settings}")

        program = await trio.to_thread.run_sync(start, "")
        site = Site(program, upstream, trust, start)
        await site.until_started(relays)
        try:
            yield site
        finally:
            upstream.ends.set()
            upstream.opens.set()
            nursery.cancel_scope.cancel()


@pytest.fixture(name="tls")
def tls_fixture(tmp_path):
    """Return the settings of a gateway with a certificate, and the context of its clients."""
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "chain.pem")
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    return f'tls_certificate = "{tmp_path}/chain.pem"\ntls_key = "{tmp_path}/key.pem"\n', trust
