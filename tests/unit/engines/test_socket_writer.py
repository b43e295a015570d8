"""Writing to a client's socket on the engine's loop: all of it, or the client counts as gone."""

import asyncio
import socket

import pytest

from ichat.engines.socket_writer import SocketWriter

LARGE = b"x" * 4_000_000
"""More than the buffers of both sockets."""


@pytest.fixture
def sockets():
    """The worker's end of a connection, and the client's."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def test_a_small_piece_is_written_at_once(sockets):
    """The writer does not wait, and says that all was written."""
    ours, theirs = sockets
    assert asyncio.run(SocketWriter(ours, 60).write(b"small"))
    assert theirs.recv(16) == b"small"


def test_a_slow_client_gets_everything_in_the_end(sockets):
    """The writer waits while the socket is full, and says that all was written."""
    ours, theirs = sockets

    async def run():
        writer = SocketWriter(ours, 60)
        writing = asyncio.create_task(writer.write(LARGE))
        received = 0
        while received < len(LARGE):
            received += len(await asyncio.get_running_loop().sock_recv(theirs, 65536))
        assert await writing
        assert not writer.is_behind

    asyncio.run(run())


def test_a_client_that_accepts_nothing_is_gone(sockets):
    """After its time, and with the rest not written."""

    async def run():
        writer = SocketWriter(sockets[0], 0.01)
        assert not await writer.write(LARGE)
        assert writer.is_behind

    asyncio.run(run())


@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_client_that_closes_is_gone(sockets, is_waiting):
    """Whether it closes before the write or while the writer waits."""
    ours, theirs = sockets

    async def run():
        writer = SocketWriter(ours, 60)
        if not is_waiting:
            theirs.close()
        writing = asyncio.create_task(writer.write(LARGE))
        while is_waiting and not writer.is_behind:
            await asyncio.sleep(0)
        theirs.close()
        assert not await writing

    asyncio.run(run())


def test_a_writer_that_is_given_up_returns(sockets):
    """The client's disconnect is known by other means, while the socket is full."""

    async def run():
        writer = SocketWriter(sockets[0], 60)
        writing = asyncio.create_task(writer.write(LARGE))
        while not writer.is_behind:
            await asyncio.sleep(0)
        writer.give_up()
        assert not await writing

    asyncio.run(run())
