"""What is behind and before a gateway while its console is measured: workers that are no engines, and clients.

    python tests/bench/console_site.py PORT --workers 300 --models 60 --rate 200

All workers are one port of this process; each has its own heartbeat, with its machine and GPU. The clients' requests are
streams, `rate` of them each second for as long as the process runs. It prints `ready` once all workers have joined.
`ICHAT_SECRET` is the gateway's own secret.
"""

import argparse
import asyncio
import json
import os
import random
import sys

import load
import upstream
from response import Broken, Response

HEARTBEAT_S = 5.0
EVENTS, GAP_S = 8, 0.06
"""Of each stream."""
GPUS = 8
"""Of each machine."""
GIB = 1024**3
JOINING = 16
"""How many connections heartbeats have."""


class Site:
    """The workers and the clients of a gateway."""

    def __init__(self, args, port):
        self._args = args
        self._port = port
        self._head = f"host: 127.0.0.1:{args.port}\r\nauthorization: Bearer {os.environ['ICHAT_SECRET']}\r\n"
        self._chance = random.Random(1)
        self._steps = 0
        self._idle = []
        """Connections without a request."""
        self._reasons = []
        self._failed = 0

    def _request(self, path, body):
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\n{self._head}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data

    def _heartbeat(self, number):
        machine, gpu = divmod(number, GPUS)
        self._steps += 1
        gpus = [
            {"index": index, "uuid": f"GPU-{machine}-{index}", "name": "NVIDIA H200", "memory_total_bytes": 141 * GIB,
             "memory_used_bytes": 128 * GIB, "held_bytes": 127 * GIB if index == gpu else 0,
             "use": round(0.7 + 0.3 * self._chance.random(), 2)}
            for index in range(GPUS)
        ]  # fmt: skip
        running = self._chance.randrange(4)
        return {
            "worker_id": f"w-{number:03}", "model_name": self._model(number), "host": f"127.0.{number // 200}.{number % 200 + 1}",
            "port": self._port, "backend": "vllm", "heartbeat_interval": HEARTBEAT_S, "pid": 1000 + number,
            "start_id": "1", "state": "ready", "phase": "ready",
            "progress": {"running": running, "waiting": 0, "kv_use": running / 10, "steps": self._steps},
            "machine": {"id": f"boot-{machine}", "name": f"gpu-{machine:02}", "cpus": 96, "cpu_use": 0.3,
                        "memory_total_bytes": 1024 * GIB, "memory_available_bytes": 700 * GIB, "gpus": gpus},
        }  # fmt: skip

    def _model(self, number):
        return f"model-{number % self._args.models:02}"

    async def run(self):
        """Join, say so, and go on until the process is ended."""
        joining = asyncio.Semaphore(JOINING)

        async def join(number):
            async with joining:
                await self._ask(
                    self._request("/v1/workers/heartbeat", self._heartbeat(number)), Response(0, is_stream=False)
                )

        await asyncio.gather(*map(join, range(self._args.workers)))
        if self._failed:
            sys.exit(f"{self._failed} heartbeats failed: {self._reasons[:3]}")
        print("ready", flush=True)
        await asyncio.gather(self._beat_forever(), self._ask_forever())

    async def _beat_forever(self):
        while True:
            for number in range(self._args.workers):
                await self._ask(
                    self._request("/v1/workers/heartbeat", self._heartbeat(number)), Response(0, is_stream=False)
                )
                await asyncio.sleep(HEARTBEAT_S / self._args.workers)

    async def _ask_forever(self):
        """Send requests, at times of their own: a slow answer delays none of them."""
        loop, tasks = asyncio.get_running_loop(), set()
        at = loop.time()
        while True:
            at += self._chance.expovariate(self._args.rate)
            await asyncio.sleep(max(0.0, at - loop.time()))
            body = {"model": self._model(self._chance.randrange(self._args.models)), "stream": True, "events": EVENTS,
                    "gap_s": GAP_S, "messages": [{"role": "user", "content": "Hello!"}]}  # fmt: skip
            task = loop.create_task(
                self._ask(self._request("/v1/chat/completions", body), Response(EVENTS, is_stream=True))
            )
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _ask(self, request, response):
        """Send a request over an idle connection, or a new one."""
        connection = None
        try:
            while self._idle and (connection is None or connection.is_lost):
                connection = self._idle.pop()
            if connection is None or connection.is_lost:
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: load.Connection(self._reasons), "127.0.0.1", self._args.port
                )
            await connection.ask(request, response)
        except (Broken, ValueError, OSError) as error:
            self._failed += 1
            self._reasons.append(str(error))
            print(f"failed: {error}", flush=True)
        else:
            if not response.closes:
                self._idle.append(connection)
                return
        if connection is not None:
            connection.transport.abort()


async def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--workers", type=int, default=300)
    parser.add_argument("--models", type=int, default=60)
    parser.add_argument("--rate", type=float, default=200.0)
    args = parser.parse_args()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(upstream.Connection, "0.0.0.0", 0, backlog=upstream.BACKLOG)
    await Site(args, server.sockets[0].getsockname()[1]).run()


if __name__ == "__main__":
    load.run(main())
