"""A fake upstream that costs little itself: what stands behind a gateway while the gateway is measured.

    python tests/bench/upstream.py PORT

For port 0 it takes a free one, and prints it. Each event is written by itself, in a pass of the event loop of its own,
and never faster than it is read.
"""

import asyncio
import json
import sys

from answers import COMPLETION, DONE, EVENT, PLAIN_TYPE, STREAM_TYPE

try:
    from uvloop import run
except ImportError:
    from asyncio import run

BACKLOG = 4096


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (
    PLAIN_TYPE,
    len(COMPLETION),
    COMPLETION,
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n" % STREAM_TYPE
PIECE = chunk(EVENT)
END = chunk(DONE) + b"0\r\n\r\n"
NO_LENGTH = b"HTTP/1.1 411 Length Required\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Connection(asyncio.Protocol):
    """One connection: its requests are answered one after the other."""

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.buffer = b""
        self.left = None
        self.gap_s = 0.0
        self.is_full = False
        self.is_waiting = False

    def connection_made(self, transport):
        self.transport = transport

    def pause_writing(self):
        self.is_full = True

    def resume_writing(self):
        self.is_full = False
        if self.is_waiting:
            self.is_waiting = False
            self.step()

    def data_received(self, data):
        self.buffer += data
        while self.left is None and (body := self.take()) is not None:
            self.answer(json.loads(body or b"{}"))

    def take(self):
        """Return the body of the next request, or None while it is not complete."""
        head, blank, rest = self.buffer.partition(b"\r\n\r\n")
        if not blank:
            return None
        length = 0
        for line in head.lower().split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name == b"content-length":
                length = int(value)
            elif name == b"transfer-encoding":
                self.transport.write(NO_LENGTH)
                self.transport.close()
                return None
        if len(rest) < length:
            return None
        self.buffer = rest[length:]
        return rest[:length]

    def answer(self, wanted):
        if not wanted.get("stream"):
            self.transport.write(PLAIN)
            return
        self.left = wanted.get("events", 1)
        self.gap_s = wanted.get("gap_s", 0)
        self.transport.write(HEAD)
        self.step()

    def step(self):
        """Write the next event and see to it that another follows."""
        if self.transport.is_closing():
            return
        if self.is_full:
            self.is_waiting = True
        elif self.left:
            self.left -= 1
            self.transport.write(PIECE)
            if self.gap_s:
                self.loop.call_later(self.gap_s, self.step)
            else:
                self.loop.call_soon(self.step)
        else:
            self.left = None
            self.transport.write(END)
            self.data_received(b"")


async def main(port):
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", port, backlog=BACKLOG)
    if not port:
        print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    run(main(int(sys.argv[1])))
