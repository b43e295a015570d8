"""The gateway's own requests over HTTP: one request, one connection, and nothing is left of it."""

import pytest
import trio
import trio.testing
from support.peers import chunk

from ichat.http import client
from ichat.http.pool import Upstream

PEER = Upstream("peer", "peer.example", 8080)


@pytest.fixture
async def make_peer(monkeypatch):
    """Make the peer of the next request: it has sent these pieces and ended its side."""

    async def make(*pieces):
        ours, peer = trio.testing.memory_stream_pair()

        async def connect(upstream):
            return ours

        monkeypatch.setattr(client, "connect", connect)
        for piece in pieces:
            await peer.send_all(piece)
        await peer.send_stream.aclose()
        return peer

    return make


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nbody"], b"body"),
        ([b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n", b"\r\nto the", b" end"], b"to the end"),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", chunk(b"a") + chunk(b"b") + b"0\r\n\r\n"], b"ab"),
    ],
)
async def test_a_body_in_pieces(make_peer, pieces, expected):
    """However the peer frames it; the request says that its connection is used once, and the connection is closed."""
    peer = await make_peer(*pieces)
    async with await client.request(PEER, "/path", [(b"accept", b"*/*")], method="POST") as response:
        assert response.status == 200
        assert b"".join([piece async for piece in response]) == expected
    head = b"".join([data async for data in peer])
    assert head.startswith(b"POST /path HTTP/1.1\r\n")
    assert sorted(head.lower().split(b"\r\n")[1:]) == [
        b"", b"", b"accept: */*", b"connection: close", b"content-length: 0", b"host: peer.example:8080"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "piece", [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 101 Switching\r\n\r\n", b"HTTP/1.1 200 OK\r\nx"]
)
async def test_a_peer_without_a_response(make_peer, piece):
    """The request fails with what its callers know, and its connection is closed."""
    peer = await make_peer(piece)
    with pytest.raises(client.BROKEN):
        await client.request(PEER, "/")
    assert b"".join([data async for data in peer])


async def test_a_body_that_breaks_off(make_peer):
    """What came is handed over; then it fails, rather than ends."""
    await make_peer(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
    async with await client.request(PEER, "/") as response:
        assert await anext(response) == b"half"
        with pytest.raises(client.BROKEN):
            await anext(response)
