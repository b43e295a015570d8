"""Limits of one request at a time, while the process that decides and its relays are killed.

    .build/dev/bin/python tests/soak/limits_over_crashes.py [--requests 1000000] [--relays 4]
                                                            [--owner-s 10] [--relay-s 7]

Half of the clients ask for a model with `max_in_flight = 1` at its upstream. The other half share keys with
`max_in_flight = 1`, and ask for a model without a bound. The upstreams notice at once that a connection has closed.
The owner gets kill -9 every `--owner-s` seconds and is started again, a relay every `--relay-s` seconds. The script
fails if an upstream ever has two requests where one is allowed, if a client sees another status than 200 and 429, or
if a request is still in flight at the end.
"""

import argparse
import asyncio
import collections
import json
import os
import pathlib
import random
import select
import signal
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from support.deployments import free_port
from support.programs import Program, ichat
from support.relay_site import relays_of

from ichat.security.keys import hash_of

CLIENTS, KEYS = 8, 2
HOLD_S = 0.001
ANSWER = json.dumps({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}).encode()
RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)
TOML = """
[server_settings]
port = {port}
state_directory = "{directory}/state"
relays = {relays}
watch_config = false
[timeouts]
ownerless_s = 60
owner_wait_s = 60
[logs]
access_log = ""
[[external_routes]]
model_name = "bounded"
api_base = "http://127.0.0.1:{bounded}/v1"
max_in_flight = 1
[[external_routes]]
model_name = "free"
api_base = "http://127.0.0.1:{free}/v1"
[[security.keys]]
name = "any"
key_hash = "{any}"
"""
KEY = '[[security.keys]]\nname = "k{number}"\nkey_hash = "{hash}"\nmax_in_flight = 1\n'


def length_of(head):
    return int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])


def is_closed(connection):
    """Return whether the other side has closed a connection, also if that has not been read yet."""
    look = select.poll()
    look.register(connection.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(look.poll(0))


class Upstream:
    """Counts the requests that it has at once, by their content."""

    def __init__(self):
        self.held, self.most = collections.defaultdict(set), collections.Counter()

    async def listen(self):
        """Listen, and return the server with its port."""
        server = await asyncio.get_running_loop().create_server(lambda: Connection(self), "127.0.0.1", 0)
        return server, server.sockets[0].getsockname()[1]

    def begin(self, connection, who):
        self.held[who].add(connection)
        open_ones = sum(not is_closed(one) for one in self.held[who])
        self.most[who] = max(self.most[who], open_ones)


class Connection(asyncio.Protocol):
    """A connection to the upstream, with a request at a time."""

    def __init__(self, upstream):
        self.upstream, self.who, self.data = upstream, None, b""

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.data += data
        head, found, body = self.data.partition(b"\r\n\r\n")
        if found and len(body) >= length_of(head):
            self.data = b""
            self.who = json.loads(body)["messages"][0]["content"]
            self.upstream.begin(self, self.who)
            asyncio.get_running_loop().call_later(HOLD_S, self.answer)

    def answer(self):
        if self.who is not None:
            self._end()
            self.transport.write(RESPONSE)

    def connection_lost(self, error):
        if self.who is not None:
            self._end()

    def _end(self):
        self.upstream.held[self.who].discard(self)
        self.who = None


class Clients:
    """Ask until there are enough answers."""

    def __init__(self, port, requests):
        self.port, self.requests = port, requests
        self.statuses = collections.Counter()

    @property
    def count(self):
        return sum(self.statuses.values())

    async def ask_forever(self, model, who, key):
        """Ask on one connection after another: each broken connection is counted as the status 0."""
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": who}]}).encode()
        request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b" % (key.encode(), len(body), body)
        )
        while self.count < self.requests:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                while self.count < self.requests:
                    writer.write(request)
                    head = await reader.readuntil(b"\r\n\r\n")
                    await reader.readexactly(length_of(head))
                    self.statuses[int(head[9:12])] += 1
            except (OSError, asyncio.IncompleteReadError):
                self.statuses[0] += 1
            finally:
                writer.close()


async def kill_relays(program, every_s, kills):
    while True:
        await asyncio.sleep(random.uniform(0.5, 1.5) * every_s)
        relays = [*relays_of(program).values()]
        if relays:
            random.choice(relays).send_signal(signal.SIGKILL)
            kills["relays"] += 1


async def kill_owners(start, every_s, kills, owners):
    while True:
        await asyncio.sleep(random.uniform(0.5, 1.5) * every_s)
        owners[-1].process.send_signal(signal.SIGKILL)
        owners[-1].process.wait()
        kills["owners"] += 1
        await asyncio.sleep(random.uniform(0, 1))
        owners.append(await asyncio.to_thread(start))


async def run(chosen, directory):
    bounded, free = Upstream(), Upstream()
    (one, bounded_port), (other, free_port_) = await bounded.listen(), await free.listen()
    port, path = free_port(), pathlib.Path(directory) / "ichat.toml"
    keys = "".join(KEY.format(number=number, hash=hash_of(f"sk-{number}")) for number in range(KEYS))
    path.write_text(
        TOML.format(
            port=port, directory=directory, relays=chosen.relays, bounded=bounded_port, free=free_port_,
            any=hash_of("sk-any"),
        ) + keys
    )  # fmt: skip

    def start():
        return Program(ichat("gateway", "-c", str(path)), pathlib.Path(directory) / "log").wait_for_port()

    owners, kills, clients = [await asyncio.to_thread(start)], collections.Counter(), Clients(port, chosen.requests)
    killers = [
        asyncio.create_task(kill_relays(owners[0], chosen.relay_s, kills)),
        asyncio.create_task(kill_owners(start, chosen.owner_s, kills, owners)),
    ]
    asking = [clients.ask_forever("bounded", "all", "sk-any") for _ in range(CLIENTS // 2)]
    asking += [clients.ask_forever("free", f"k{at % KEYS}", f"sk-{at % KEYS}") for at in range(CLIENTS - CLIENTS // 2)]
    ends = asyncio.gather(*asking)
    before = -1
    while not ends.done():
        if before == clients.count or any(killer.done() for killer in killers):
            ends.cancel()
            raise RuntimeError("no answer for a minute, or a program could not be killed and started")
        before = clients.count
        await asyncio.wait([ends, *killers], timeout=60, return_when=asyncio.FIRST_COMPLETED)
        print(
            f"{clients.count:,} answers {dict(clients.statuses)}, kills {dict(kills)}, most {dict(bounded.most)}",
            flush=True,
        )
    for killer in killers:
        killer.cancel()
    await asyncio.gather(*killers, return_exceptions=True)
    await ends
    program = owners[-1]
    program.until(lambda: program.get("/v1/admin/requests")[1]["total"] <= 1)  # this question itself, at most
    left = program.get("/v1/admin/requests")[1]["requests"]
    program.stop()
    one.close()
    other.close()
    print(f"most at once: with one place {dict(bounded.most)}, of each key {dict(free.most)}; in flight {left}")
    strange = clients.statuses.keys() - {0, 200, 429}
    exceeded = max(*bounded.most.values(), *free.most.values()) > 1
    return int(exceeded or bool(strange) or bool(left))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--relays", type=int, default=4)
    parser.add_argument("--owner-s", type=float, default=10)
    parser.add_argument("--relay-s", type=float, default=7)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        code = asyncio.run(run(chosen, directory))
    print(f"load {os.getloadavg()[0]:.1f}")
    return code


if __name__ == "__main__":
    sys.exit(main())
