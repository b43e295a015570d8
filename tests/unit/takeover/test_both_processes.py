"""Both processes of a takeover over a real connection: signals at the moment of `go`, and a damaged snapshot."""

import contextlib
import functools
import json
import os
import signal
import socket
import sys

import pytest
import trio
import trio.testing

from ichat.errors import EXIT_UNAVAILABLE, Exit
from ichat.roles.gateway_after_takeover import FOLLOW_S, tell_manager
from ichat.service_manager import Notifier
from ichat.takeover.connection import OtherProcess, to_memory
from ichat.takeover.getting import Takeover
from ichat.takeover.giving import Handed, TakeoverServer
from ichat.takeover.handover import PROTOCOL, Message

LIMIT_S = 20.0

NEW = """
import json, os, signal, socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1] + "/takeover")
for kind, answer in ("hello", "welcome"), ("freeze", "snapshot"), ("ready", "go"):
    message = {"kind": kind, "protocol": int(sys.argv[2]), "directory": os.path.realpath(sys.argv[1])}
    sock.send(json.dumps(message).encode())
    assert json.loads(sock.recv(65536))["kind"] == answer
signal.pause()
"""
"""A new process that gets a gateway, and waits for a signal then."""


class Giver:
    """A gateway without any part."""

    def busy(self, new_pid):
        return ""

    async def freeze(self):
        return Handed({}, {}, [])

    def thaw(self):
        pass

    let_go = hold_on = thaw


async def test_a_signal_at_the_moment_of_the_go_stops_the_new_process(tmp_path):
    """The old process has got it, but cannot stop the gateway any more."""
    server = TakeoverServer(str(tmp_path), Giver(), 1)
    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve_forever)
            command = [sys.executable, "-c", NEW, str(tmp_path), str(PROTOCOL)]
            new = await nursery.start(functools.partial(trio.run_process, command, check=False))
            assert await server.wait_gone(server.gone.wait)
            assert await new.wait() == -signal.SIGTERM
            nursery.cancel_scope.cancel()


class SlowGiver(Giver):
    """A gateway that needs time to become quiet."""

    def __init__(self):
        self.is_frozen, self.has_begun, self.written = False, trio.Event(), trio.Event()

    async def freeze(self):
        self.has_begun.set()
        await self.written.wait()
        self.is_frozen = True
        await trio.lowlevel.checkpoint()
        return Handed({}, {}, [])

    def thaw(self):
        self.is_frozen = False


async def test_a_freeze_that_goes_on_for_a_moment_after_the_thaw_leaves_nothing_frozen(tmp_path):
    """A stop signal arrives just when a part of the gateway has become quiet."""
    giver = SlowGiver()
    server = TakeoverServer(str(tmp_path), giver, 1)
    with trio.fail_after(LIMIT_S), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve_forever)
            sock.connect(str(tmp_path / "takeover"))
            hello = {"kind": "hello", "protocol": PROTOCOL, "directory": str(tmp_path)}
            for message in (hello, {"kind": "freeze"}):
                sock.send(json.dumps(message).encode())
            await giver.has_begun.wait()
            await trio.testing.wait_all_tasks_blocked()
            giver.written.set()
            assert await server.stop()
            await trio.testing.wait_all_tasks_blocked()
            assert not giver.is_frozen
            nursery.cancel_scope.cancel()


@contextlib.contextmanager
def connected(snapshot):
    """Return a takeover, and the old process's end of its connection, which has sent this snapshot."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    old, takeover = OtherProcess(theirs), Takeover(OtherProcess(ours))
    old.send(Message("welcome", {}))
    old.send(Message("snapshot", {}), [snapshot])
    os.close(snapshot)
    yield old, takeover
    takeover.close()
    old.forget()


class Told:
    """A signal that has arrived."""

    async def __anext__(self):
        return signal.SIGTERM


async def test_a_signal_that_meets_the_go_is_for_the_gateway(tmp_path):
    """The new process decides already: it stops as a gateway does, once it serves."""
    with connected(to_memory({})) as (old, takeover), trio.fail_after(LIMIT_S):
        assert await takeover.ask(str(tmp_path), "")
        old.send(Message("go", {}))
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            await takeover.begin(Told())
            assert takeover.side.may_decide
            assert await anext(signals) == signal.SIGTERM


async def test_a_damaged_snapshot_ends_the_new_process_with_a_sentence(tmp_path):
    """The old process sees its end, and goes on."""
    damaged = os.memfd_create("damaged")
    os.write(damaged, b"{")
    with connected(damaged) as (_, takeover), trio.fail_after(LIMIT_S):
        with pytest.raises(Exit, match="The snapshot is damaged") as refused:
            await takeover.ask(str(tmp_path), "")
    assert refused.value.code == EXIT_UNAVAILABLE


@pytest.fixture
def manager(tmp_path):
    """Return a service manager's socket that accepts no further message, and what sends to it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"{tmp_path}/notify")
        sock.setblocking(False)
        notifier = Notifier(f"{tmp_path}/notify")
        while notifier.send("WATCHDOG=1"):
            pass
        yield sock, notifier


async def test_the_service_manager_hears_of_the_new_process_once_it_reads(manager, autojump_clock):
    """Its queue is full at first: the message is sent again."""
    sock, notifier = manager
    found = set()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell_manager, notifier, 7)
        await trio.sleep(FOLLOW_S / 2)
        with contextlib.suppress(BlockingIOError):
            while True:
                found.add(sock.recv(100))
    assert found == {b"WATCHDOG=1"}
    assert sock.recv(100) == b"MAINPID=7"


async def test_a_service_manager_that_reads_nothing_is_an_error(manager, autojump_clock, caplog):
    """The log names the process that an operator has to stop."""
    began_at = trio.current_time()
    await tell_manager(manager[1], 7)
    assert trio.current_time() == began_at + FOLLOW_S
    assert "does not know that process 7 is the gateway" in caplog.text
    caplog.clear()
    await tell_manager(Notifier(), 7)
    assert caplog.text == ""


async def test_a_connection_that_is_closed_before_anything_waits_for_it_ends_the_wait():
    """Another task may drop it at any time, such as a freeze that fails at once."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        peer = OtherProcess(ours)
        peer.close()
        with pytest.raises(trio.ClosedResourceError):
            await peer.wait_readable()
        peer.forget()
