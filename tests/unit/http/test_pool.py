"""The pool: which idle connections it gives out, and when a connection is broken."""

import socket

import pytest
import trio
import trio.testing

from ichat.http.hub import Hub
from ichat.http.pool import LOST_S, PROBE_AFTER_S, PROBE_EVERY_S, Pool, Upstream

IDLE_S = 4


@pytest.mark.parametrize(("idle_s", "is_reused"), [(IDLE_S - 1, True), (IDLE_S + 1, False)])
async def test_an_old_connection_is_not_reused(serve, nursery, mock_clock, idle_s, is_reused):
    """Its age is that of the moment when it is needed, even if nothing has happened since it became idle."""
    hub = Hub()
    nursery.start_soon(hub.run_forever)
    await trio.testing.wait_all_tasks_blocked()
    _, port = await serve(None)
    pool = Pool(hub, connect_s=1, idle_s=IDLE_S)
    upstream = Upstream("u", "127.0.0.1", port)
    connection = await pool.connect(upstream)
    pool.release(connection)
    mock_clock.jump(idle_s)
    assert (pool.acquire(upstream) is connection) == is_reused
    connection.close()


async def test_the_kernel_breaks_connections_to_machines_that_are_gone(serve, nursery):
    """These acknowledge nothing and send no reset: neither a request that is sent nor one that waits hangs there."""
    hub = Hub()
    nursery.start_soon(hub.run_forever)
    await trio.testing.wait_all_tasks_blocked()
    _, port = await serve(None)
    connection = await Pool(hub, connect_s=1, idle_s=IDLE_S).connect(Upstream("u", "127.0.0.1", port))
    names = ("TCP_NODELAY", "TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_KEEPINTVL")
    found = [connection.sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
    assert found == [1, LOST_S * 1000, PROBE_AFTER_S, PROBE_EVERY_S]
    assert connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    connection.close()
