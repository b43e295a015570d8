"""A process that accepts from listeners which its parent has bound.

    python tests/support/sharing_door.py DESCRIPTORS [CERTIFICATE KEY]

Each response is the process' id; `/stream` is one in chunks whose last part is sent after `finish`. Commands are lines
of the standard input: `retire`, `finish`, `cpu`. The process prints `ready`, and `retired` before it ends.
"""

import os
import resource
import sys

import trio
import trio.testing

from ichat.config.schema import Limits, Timeouts
from ichat.http.front_door import FrontDoor
from ichat.http.hub import Hub
from ichat.http.leaving import Retirement
from ichat.http.listeners import adopt_listeners
from ichat.http.tls import server_context

MANY = 100_000
IDLE_S = 60.0
"""A retiring process waits for requests for so long that no test can be late."""
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Process:
    """A front door, and what its parent wants of it."""

    def __init__(self):
        limits = Limits(connections_max=MANY, connections_per_address_max=MANY)
        tls = server_context(*sys.argv[2:]) if sys.argv[2:] else None
        self.finished = trio.Event()
        self.door = FrontDoor(b"gateway", self.answer, lambda head, peer: peer, Hub(), limits, Timeouts(), tls)

    async def answer(self, request, client, caller):
        own = b"%d" % os.getpid()
        if request.path == b"/stream":
            await client.send_all(HEAD + b"%x\r\n%b\r\n" % (len(own), own))
            await self.finished.wait()
            await client.send_all(b"3\r\nend\r\n0\r\n\r\n")
        else:
            await client.respond(request, 200, [], own)

    async def run(self):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.door.hub.run_forever)
            listeners = adopt_listeners(int(descriptor) for descriptor in sys.argv[1].split(","))
            nursery.start_soon(self.door.serve_forever, listeners)
            await trio.testing.wait_all_tasks_blocked()
            print("ready", flush=True)
            async for line in trio.lowlevel.FdStream(os.dup(0)):
                for command in line.split():
                    self.obey(command, nursery)
            nursery.cancel_scope.cancel()

    def obey(self, command, nursery):
        if command == b"retire":
            nursery.start_soon(self.retire, nursery.cancel_scope)
        elif command == b"finish":
            self.finished.set()
        elif command == b"cpu":
            used = resource.getrusage(resource.RUSAGE_SELF)
            print(used.ru_utime + used.ru_stime, flush=True)

    async def retire(self, scope):
        await self.door.retire(Retirement(idle_s=IDLE_S))
        print("retired", flush=True)
        scope.cancel()


if __name__ == "__main__":
    trio.run(Process().run)
