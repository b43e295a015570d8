"""A load client: some connections to one port, each of which sends its next request when its last response has ended.

    python tests/bench/load.py PORT --connections 32 --requests 1000 --body JSON [--events N] [--limit-s 60]

Prints one line of JSON. A response that is not right in everything is a failure, and in no other figure.
"""

import argparse
import asyncio
import json
import time

from response import Broken, Response

try:
    from uvloop import run
except ImportError:
    from asyncio import run

REASONS_MAX = 3


class Connection(asyncio.Protocol):
    """One connection, with at most one response under way."""

    def __init__(self, reasons):
        self.reasons = reasons
        self.response = self.ended = None
        self.is_lost = False

    def connection_made(self, transport):
        self.transport = transport

    def ask(self, request, response):
        self.response = response
        self.ended = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.ended

    def data_received(self, data):
        if self.ended is None or self.ended.done():
            self.is_lost = True
            self.reasons.append(f"bytes that nobody asked for: {data[:200].decode('latin-1')}")
            self.transport.abort()
            return
        try:
            if self.response.feed(data):
                self.ended.set_result(None)
        except (Broken, ValueError) as error:
            self.ended.set_exception(error)

    def connection_lost(self, error):
        self.is_lost = True
        if self.ended is not None and not self.ended.done():
            self.ended.set_exception(Broken(f"the connection ended in the middle ({error or 'closed'})"))


class Load:
    """All requests of one run, and what came of them."""

    def __init__(self, args):
        self.args = args
        self.left = args.requests
        self.responses = []
        self.reasons = []
        body = args.body.encode()
        self.is_stream = bool(json.loads(body).get("stream"))
        self.request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (args.port, len(body), body)
        )

    async def run(self):
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self.args.limit_s):
                await asyncio.gather(*(self.client() for _ in range(self.args.connections)))
        except TimeoutError:
            self.reasons.insert(0, f"not all ended within {self.args.limit_s:g} s")
        return self.figures(time.perf_counter() - began)

    async def client(self):
        connection = None
        while self.left:
            self.left -= 1
            response = Response(self.args.events, is_stream=self.is_stream)
            try:
                if connection is None or connection.is_lost:
                    loop = asyncio.get_running_loop()
                    _, connection = await loop.create_connection(
                        lambda: Connection(self.reasons), "127.0.0.1", self.args.port
                    )
                began = time.perf_counter()
                await connection.ask(self.request, response)
            except (Broken, ValueError, OSError) as error:
                self.reasons.append(str(error))
            else:
                whole, first = response.ended_at - began, response.first_at - began
                self.responses.append((whole, first, response.events, response.tokens))
                if not response.closes:
                    continue
            if connection is not None:
                connection.transport.abort()
                connection = None

    def figures(self, seconds):
        whole, first, events, tokens = zip(*self.responses, strict=True) if self.responses else ((), (), (), ())
        return {
            "requests": len(whole),
            "failures": max(self.args.requests - len(whole), len(self.reasons)),
            "reasons": self.reasons[:REASONS_MAX],
            "seconds": seconds,
            "events": sum(events),
            "tokens": sum(tokens),
            "p50_ms": share(whole, 0.5),
            "p99_ms": share(whole, 0.99),
            "first_ms": share(first, 0.5),
        }


def share(values, part):
    """Return the value below which this part of all lies, in milliseconds."""
    return sorted(values)[min(len(values) - 1, int(len(values) * part))] * 1e3 if values else 0.0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--body", required=True, help="of every request, JSON")
    parser.add_argument("--events", type=int, default=0, help="how many a stream must have; 0: any number")
    parser.add_argument("--limit-s", type=float, default=60.0, help="for all requests together")
    print(json.dumps(run(Load(parser.parse_args()).run())))


if __name__ == "__main__":
    main()
