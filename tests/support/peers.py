"""Upstreams that do exactly what a test says, clients that show exactly what they got, and small helpers."""

import json
import re
import socket
import time

import h11
import trio
from support.programs import LIMIT_S

from ichat.errors import ApiError


class Upstream:
    """A server that answers every request by a function of the test's: `async reply(stream, head, body)`."""

    def __init__(self, reply):
        self.reply = reply
        self.requests = []
        self.connections = 0
        self.closed = 0

    @property
    def posts(self):
        """The requests of clients, with their bodies: a gateway may ask for a worker's log at any time."""
        return [(head, body) for head, body in self.requests if head.method == b"POST"]

    async def serve(self, stream):
        self.connections += 1
        try:
            while True:
                parser = h11.Connection(h11.SERVER)
                head, body = None, b""
                while not isinstance(event := parser.next_event(), h11.EndOfMessage):
                    if event is h11.NEED_DATA:
                        data = await stream.receive_some()
                        if not data:
                            return
                        parser.receive_data(data)
                    elif isinstance(event, h11.Request):
                        head = event
                    else:
                        body += event.data
                self.requests.append((head, body))
                if await self.reply(stream, head, body) == "close":
                    return
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self.closed += 1
            with trio.CancelScope(shield=True):
                await stream.aclose()


OWN_SECRET = "own-secret-of-the-gateways-in-this-process-"
"""By which gateways in a test's process know their own user."""
AS_OWN = f"authorization: Bearer {OWN_SECRET}\r\n".encode()
"""What it sends."""


def write_secret(directory):
    """Write OWN_SECRET as the secret of the gateway that will have this state directory."""
    directory.mkdir(mode=0o700, exist_ok=True)
    (directory / "secret").write_text(OWN_SECRET)
    (directory / "secret").chmod(0o600)


def post_of(body, target=b"/v1/completions", head=b""):
    """Return a request as bytes; `head` are more lines of its head."""
    return b"POST %b HTTP/1.1\r\nhost: localhost\r\n%bcontent-length: %d\r\n\r\n%b" % (target, head, len(body), body)


JSON_POST = (
    b"POST %b HTTP/1.1\r\nhost: localhost\r\n"
    + AS_OWN
    + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
)
"""A request of the gateway's own user: its path, the length of its body, and that."""
_CONTROL = (b"/v1/admin/", b"/v1/workers/", b"/register", b"/v1/logs/", b"/v1/load_lora", b"/v1/unload_lora")


class Client:
    """A raw HTTP/1.1 client: what it sends and gets are bytes."""

    def __init__(self, stream):
        self.stream = stream
        self.parser = h11.Connection(h11.CLIENT)

    async def send(self, data):
        await self.stream.send_all(data)

    async def everything(self):
        """Return all bytes up to the end of the connection."""
        data = b""
        with trio.fail_after(LIMIT_S):
            while more := await self.stream.receive_some():
                data += more
        return data

    async def response(self, method=b"POST"):
        """Return one response: status, headers, body, as h11 reads it; "broken" in place of the body where it broke off."""
        self.parser = parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method=method, target="/", headers=[("host", "x"), ("connection", "keep-alive")]))
        parser.send(h11.EndOfMessage())
        head, body = None, b""
        with trio.fail_after(LIMIT_S):
            while True:
                try:
                    event = parser.next_event()
                    if event is h11.NEED_DATA:
                        parser.receive_data(await self.stream.receive_some())
                        continue
                except (h11.RemoteProtocolError, trio.BrokenResourceError):
                    return (head.status_code, dict(head.headers), "broken") if head else (0, {}, "broken")
                if isinstance(event, h11.Response):
                    head = event
                elif isinstance(event, h11.Data):
                    body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    return head.status_code, dict(head.headers), bytes(body)

    async def ask(self, model="m", method=b"POST", target=b"/v1/chat/completions", **more):
        body = json.dumps({"model": model, **more}).encode()
        await self.send(
            b"%b %b HTTP/1.1\r\nhost: localhost\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (method, target, AS_OWN if target.startswith(_CONTROL) else b"", len(body), body)
        )
        return await self.response(method)

    async def get(self, target):
        own = AS_OWN if target.startswith(_CONTROL) else b""
        await self.send(b"GET %b HTTP/1.1\r\nhost: localhost\r\n%b\r\n" % (target, own))
        return await self.response(b"GET")


def reset(stream):
    """Break a connection the hard way."""
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    stream.socket.close()


async def until(condition, limit_s=LIMIT_S):
    """Wait until a condition holds; the only way in which tests wait."""
    with trio.fail_after(limit_s):
        while not condition():
            await trio.sleep(0.005)


async def turns_until(condition):
    """Wait without the clock, where the test has one of its own: tasks get turns, and time does not pass."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        await trio.lowlevel.checkpoint()


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(number):
    return chunk(b"data: " + json.dumps({"n": number}).encode() + b"\n\n")


SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
SSE_END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def plain(body, extra=b""):
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b" % (
        extra,
        len(body),
        body,
    )


def code_of(body):
    """Return the code of an OpenAI error body."""
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert re.search(r"\w.*\.$", error["message"]), error
    return error["code"]


async def outcome(read):
    """Return what reading returns, or the 400 that it raises."""
    try:
        return await read
    except ApiError as refusal:
        if refusal.status != 400:
            raise
        return refusal


async def turns_during(read):
    """Count the turns that another task has while a body is read."""
    turns = 0

    async def count():
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        await outcome(read)
        nursery.cancel_scope.cancel()
    return turns
