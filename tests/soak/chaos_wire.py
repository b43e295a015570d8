"""Connections of a run of chaos: a client that sees exactly how a response ended, and a network that can be cut."""

import json
import socket

import attrs
import h11
import trio
from support import peers

RECEIVED_BYTES = 65536


def reset(stream):
    """Break a connection the hard way, if it is still open."""
    if stream.socket.fileno() >= 0:
        peers.reset(stream)


@attrs.frozen
class Reply:
    """What came back for one request."""

    status: int = 0
    """0 where no head came."""
    headers: dict = attrs.field(factory=dict)
    body: bytes = b""
    end: str = "nothing"
    """`whole`; `broken`: it visibly ended before its time; `nothing`: the connection ended without a head."""

    @property
    def id(self):
        return self.headers.get(b"x-request-id", b"").decode()


@attrs.frozen
class Pace:
    """How a slow reader reads."""

    bytes_max: int = RECEIVED_BYTES
    pause_s: float = 0.0
    stop_after: int = 1 << 60
    """So many bytes of body are enough: the rest is not waited for."""


BRISK = Pace()


class Connection:
    """One connection to an HTTP server."""

    def __init__(self, stream):
        self.stream = stream
        self.is_over = False
        """Whether the newest response ends the connection."""
        self._behind = b""

    @classmethod
    async def open(cls, port, *, receive_bytes=0):
        """Connect to a port of this machine; `receive_bytes` is the size of the kernel's buffer, 0 the usual one."""
        sock = trio.socket.socket()
        try:
            if receive_bytes:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            await sock.connect(("127.0.0.1", port))
        except BaseException:
            sock.close()
            raise
        return cls(trio.SocketStream(sock))

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.stream.aclose()

    def reset(self):
        """Break it the hard way."""
        reset(self.stream)

    async def send(self, data):
        """Send all of it, or as much as the other side takes: what it says instead is read afterwards."""
        try:
            await self.stream.send_all(data)
        except trio.BrokenResourceError:
            return False
        return True

    async def reply(self, pace=BRISK, method=b"POST"):
        """Read one response."""
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        parser.send(h11.EndOfMessage())
        if self._behind:
            parser.receive_data(self._behind)
        head, body = None, bytearray()
        while True:
            try:
                event = parser.next_event()
                if event is h11.NEED_DATA:
                    if pace.pause_s:
                        await trio.sleep(pace.pause_s)
                    parser.receive_data(await self.stream.receive_some(pace.bytes_max))
                    continue
            except (h11.RemoteProtocolError, trio.BrokenResourceError):
                return _reply(head, body, "broken") if head else Reply()
            if isinstance(event, h11.Response):
                head = event
                self.is_over = (b"connection", b"close") in [(name, value.lower()) for name, value in event.headers]
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) >= pace.stop_after:
                    return _reply(head, body, "left")
            elif isinstance(event, h11.EndOfMessage):
                self._behind = parser.trailing_data[0]
                return _reply(head, body, "whole")
            elif isinstance(event, h11.ConnectionClosed):
                return Reply()


def _reply(head, body, end):
    return Reply(head.status_code, dict(head.headers), bytes(body), end)


TOKEN = "sk-token-of-all-workers"
WORKERS_OWN = ("/die", "/print", "/metrics")
"""Paths of workers that are asked at their own ports."""


def written(method, path, body=None, headers=(), version="1.1"):
    """Write a request; a body that is no bytes is written as JSON."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/{version}", "host: localhost", *headers]
    if path.startswith("/v1/workers/") or path in WORKERS_OWN:
        lines.append(f"authorization: Bearer {TOKEN}")
    elif path.startswith("/v1/admin/"):
        lines.append(f"authorization: Bearer {peers.OWN_SECRET}")
    if data or method == "POST":
        lines += ["content-type: application/json", f"content-length: {len(data)}"]
    return "\r\n".join([*lines, "", ""]).encode() + data


class Link:
    """A TCP proxy that can be cut, reset and frozen, as networks are."""

    def __init__(self, to):
        self._to = to
        self._streams = set()
        self._flows = trio.Event()
        self._flows.set()
        self.is_cut = False
        self.port = 0

    async def run(self, host, port, *, task_status=trio.TASK_STATUS_IGNORED):
        """Pass on what comes to this address, until cancelled."""
        listeners = await trio.open_tcp_listeners(port, host=host)
        self.port = listeners[0].socket.getsockname()[1]
        await trio.serve_listeners(self._pass, listeners, task_status=task_status)

    async def _pass(self, here):
        try:
            there = await trio.open_tcp_stream("127.0.0.1", self._to)
        except OSError:
            reset(here)
            return
        if self.is_cut:
            reset(here)
            reset(there)
            return
        both = {here, there}
        self._streams |= both
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._pump, here, there, both)
                nursery.start_soon(self._pump, there, here, both)
        finally:
            self._streams -= both
            for stream in both:
                await trio.aclose_forcefully(stream)

    async def _pump(self, source, target, both):
        try:
            while data := await source.receive_some(RECEIVED_BYTES):
                await self._flows.wait()
                await target.send_all(data)
            await self._flows.wait()
            await target.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            for stream in both:
                reset(stream)

    def break_all(self):
        """Reset every connection; new ones are let through."""
        for stream in list(self._streams):
            reset(stream)

    async def cut(self, cut_s):
        """Reset every connection, and let none through for so long."""
        self.is_cut = True
        self.break_all()
        try:
            await trio.sleep(cut_s)
        finally:
            self.is_cut = False

    async def freeze(self, freeze_s):
        """Swallow what is sent for so long, and deliver it then: nobody is told."""
        self._flows = trio.Event()
        try:
            await trio.sleep(freeze_s)
        finally:
            self._flows.set()
