"""Several processes accept from one listener: each gets its share, and a process that leaves loses no client."""

import collections
import contextlib
import os
import pathlib
import signal
import socket
import ssl
import subprocess
import sys

import psutil
import pytest
import trio
import trio.testing
import trustme
from support.peers import Client, until
from support.programs import LIMIT_S

from ichat.errors import Exit
from ichat.http.listeners import adopt_listeners, close_all, open_listeners, port_of

ROOT = pathlib.Path(__file__).parent.parent.parent
PROGRAM = ROOT / "tests" / "support" / "sharing_door.py"
REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
SHARE_MIN = 0.2
"""Of the connections, for each of three processes: far below a third, as the machine may be busy."""


class Site:
    """Three processes that share a listener, and their clients."""

    def __init__(self, port, processes, trust):
        self.port = port
        self.processes = processes
        self._trust = trust
        self._streams = []

    async def connect(self):
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        self._streams.append(stream)
        if self._trust is not None:
            stream = trio.SSLStream(stream, self._trust, server_hostname="localhost", https_compatible=True)
        return Client(stream)

    async def close(self):
        for stream in self._streams:
            await trio.aclose_forcefully(stream)

    async def connect_paced(self):
        """Return a client, and the process that has answered it; it connects when all processes wait.

        A busy process leaves connections to those that wait, and how busy they are depends on the machine.
        """
        await until(lambda: all(psutil.Process(process.pid).status() == "sleeping" for process in self.processes))
        client = await self.connect()
        return client, int((await client.get(b"/"))[2])

    def tell(self, process, command):
        process.stdin.write(command + "\n")
        process.stdin.flush()

    def line(self, process):
        return process.stdout.readline().strip()


def start(command, descriptors):
    """Start a process that has these descriptors too."""
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        pass_fds=descriptors,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(params=["plain", "TLS"])
async def site(request, tmp_path):
    """Start three processes that accept from a listener which was bound here, and is closed here."""
    trust, files = None, []
    if request.param == "TLS":
        authority, trust = trustme.CA(), ssl.create_default_context()
        authority.configure_trust(trust)
        certificate, files = authority.issue_cert("localhost"), [tmp_path / "cert.pem", tmp_path / "key.pem"]
        certificate.cert_chain_pems[0].write_to_path(str(files[0]))
        certificate.private_key_pem.write_to_path(str(files[1]))
    listeners = await open_listeners("127.0.0.1", 0)
    numbers = [listener.fileno() for listener in listeners]
    command = [sys.executable, str(PROGRAM), ",".join(map(str, numbers)), *map(str, files)]
    with contextlib.ExitStack() as stack:
        processes = []
        for _ in range(3):
            process = start(command, numbers)
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        found = Site(port_of(listeners), processes, trust)
        close_all(listeners)
        assert [found.line(process) for process in processes] == ["ready"] * 3
        yield found
        await found.close()


async def test_each_process_gets_its_share_of_paced_connections(site):
    """Clients that connect one after the other reach all processes, though each process is idle every time."""
    shares = collections.Counter()
    for _ in range(300):
        client, process = await site.connect_paced()
        shares[process] += 1
        await client.stream.aclose()
    assert len(shares) == 3
    assert min(shares.values()) >= SHARE_MIN * 300, shares


async def test_each_process_gets_its_share_of_kept_connections(site):
    """Connections that stay are spread as well."""
    shares = collections.Counter([(await site.connect_paced())[1] for _ in range(50)])
    assert len(shares) == 3
    assert min(shares.values()) >= SHARE_MIN * 50, shares


async def test_a_process_that_leaves_loses_no_connection_of_the_queue(site):
    """Of 200 clients that wait when a process leaves, it answers some and the other processes the rest."""
    for process in site.processes:
        process.send_signal(signal.SIGSTOP)
    leaving, *others = site.processes
    answered = collections.Counter()

    async def ask():
        client = await site.connect()
        status, _, body = await client.get(b"/")
        assert status == 200
        answered[int(body)] += 1
        await client.stream.aclose()

    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            for _ in range(200):
                nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked(0.01)
            site.tell(leaving, "retire")
            leaving.send_signal(signal.SIGCONT)
            assert await trio.to_thread.run_sync(site.line, leaving) == "retired"
            for process in others:
                process.send_signal(signal.SIGCONT)
    assert sum(answered.values()) == 200
    assert answered.keys() & {process.pid for process in others}


async def test_a_process_that_leaves_answers_what_its_kept_connections_send(site):
    """Requests sent at that moment are answered, streams are whole, and no connection is reset."""
    for process in site.processes[1:]:
        process.kill()
        process.wait()
    (leaving, *_), done = site.processes, []
    clients = [await site.connect() for _ in range(200)]
    for client in clients:
        await client.get(b"/")
    streaming = [await site.connect() for _ in range(10)]
    for client in streaming:
        await client.send(b"GET /stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"200" in await client.stream.receive_some(100)

    async def finish(client):
        status, headers, _ = await client.response(b"GET")
        while b"connection" not in headers:  # the process does not know yet that it leaves
            status, headers, _ = await client.get(b"/")
        assert (status, headers[b"connection"], await client.everything()) == (200, b"close", b"")
        await client.stream.aclose()
        done.append(client)

    async with trio.open_nursery() as nursery:
        for number, client in enumerate(clients):
            if number == 100:
                site.tell(leaving, "retire")
            await client.send(REQUEST)
        for client in clients:
            nursery.start_soon(finish, client)
    assert len(done) == 200
    site.tell(leaving, "finish")
    for client in streaming:
        data = b""
        while not data.endswith(b"3\r\nend\r\n0\r\n\r\n"):
            data += (more := await client.stream.receive_some())
            assert more
        await client.send(REQUEST)
        await finish(client)
    assert await trio.to_thread.run_sync(site.line, leaving) == "retired"
    assert leaving.wait(LIMIT_S) == 0


async def test_only_listeners_are_adopted():
    """A descriptor of something else is refused with a sentence, and all descriptors are closed."""
    (listener,) = await open_listeners("127.0.0.1", 0)
    port = port_of([listener])
    (again,) = adopt_listeners([listener.detach()])
    assert (again.getsockname()[1], again.getblocking()) == (port, False)
    descriptors = [again.detach(), socket.socket().detach()]
    with pytest.raises(Exit, match="does not listen"):
        adopt_listeners(descriptors)
    for descriptor in descriptors:
        with pytest.raises(OSError):
            os.fstat(descriptor)
