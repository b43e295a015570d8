"""Heads that two parsers may read in two ways are refused, and a machine's many IPv6 addresses count as one."""

import socket

import pytest
import trio
from support.peers import code_of, plain

from ichat.config.schema import Limits, Timeouts
from ichat.http.front_door import FrontDoor
from ichat.http.hub import Hub
from ichat.http.parties import party_of
from ichat.security.auth import Caller, ClientKey

BODY = b'{"model":"m"}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
LENGTH = b"Content-Length: 13\r\n"
CHUNKS = b"Transfer-Encoding: chunked\r\n"
HEADS = {
    "line feeds alone": b"POST /v1/completions HTTP/1.1\nHost: localhost\nContent-Length: 13\n\n",
    "a line feed in a value": POST + b"X: y\nTransfer-Encoding: chunked\r\n" + LENGTH + b"\r\n",
    "an empty line of a line feed": POST + LENGTH + b"\n",
    "a folded line": POST + b"X: y\r\n z\r\n" + LENGTH + b"\r\n",
    "a line folded by a tab": POST + b"X: y\r\n\tTransfer-Encoding: chunked\r\n" + LENGTH + b"\r\n",
    "a control character": POST + b"X: a\x01b\r\n" + LENGTH + b"\r\n",
    "an escape": POST + b"X: \x1b[2J\r\n" + LENGTH + b"\r\n",
    "a delete": POST + b"X: a\x7f\r\n" + LENGTH + b"\r\n",
    "a carriage return alone": POST + b"X: a\rb\r\n" + LENGTH + b"\r\n",
    "chunks in HTTP/1.0": POST.replace(b"1.1", b"1.0") + CHUNKS + b"\r\nd\r\n" + BODY + b"\r\n0\r\n\r\n",
    "two lengths in one": POST + b"Content-Length: 13, 13\r\n\r\n",
    "a length twice": POST + LENGTH + LENGTH + b"\r\n",
    "a trailer behind a line feed": POST + CHUNKS + b"\r\nd\r\n" + BODY + b"\r\n0\r\nX: y\nZ: a\r\n\r\n",
    "a trailer that is folded": POST + CHUNKS + b"\r\nd\r\n" + BODY + b"\r\n0\r\nX: y\r\n z\r\n\r\n",
}


@pytest.fixture
async def site(serve, gateway_to):
    """A gateway, and what its upstream has seen."""
    seen = []

    async def reply(stream, head, body):
        seen.append(head)
        await stream.send_all(plain(b"{}"))

    _, port = await serve(reply)
    return await gateway_to({"m": port}), seen


@pytest.mark.parametrize("what", HEADS)
@pytest.mark.parametrize("is_whole", [True, False])
async def test_a_head_that_two_parsers_read_differently_is_refused(site, connect, what, is_whole):
    """It gets 400 at once, also byte by byte, and the connection ends: nothing behind it is a request."""
    port, seen = site
    client = await connect(port)
    data = HEADS[what] + (b"" if b"chunked\r\n\r\n" in HEADS[what] else BODY)
    for piece in [data + POST + LENGTH + b"\r\n" + BODY] if is_whole else [bytes([byte]) for byte in data]:
        try:
            await client.send(piece)
        except trio.BrokenResourceError:
            break
        await trio.lowlevel.checkpoint()
    status, headers, body = await client.response()
    assert (status, code_of(body), headers[b"connection"]) == (400, "bad_request", b"close")
    assert seen == []


@pytest.mark.parametrize(
    ("address", "party"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2::5", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff:ffff:ffff:ffff", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::5", "2001:db8:1:3::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("invalid", "invalid"),
        ("a:b", "a:b"),
    ],
)
def test_a_party_is_an_ipv4_address_or_the_64_bits_of_an_ipv6_one(address, party):
    """A machine that has a /64 for itself is one party, whichever address it takes."""
    assert party_of(address) == party


def test_addresses_of_one_64_share_a_queue():
    """They take one turn together, while a key's turn is its own."""
    one, other, third = (Caller("anonymous", f"2001:db8::{end}", is_local=False) for end in ("1", "2", "1:0:0:0:0"))
    assert one.fairness_key == other.fairness_key != third.fairness_key
    assert Caller("data", "2001:db8::1", is_local=False, key=ClientKey("a", None)).fairness_key == "a"


async def test_addresses_of_one_64_share_their_connections(nursery):
    """The bound on connections of one address counts them together."""

    async def answer(request, client, caller):
        raise AssertionError

    limits = Limits(connections_per_address_max=2)
    bounds = Hub(), limits, Timeouts()
    door = FrontDoor(b"gateway", answer, lambda head, peer: peer, *bounds, is_proxy=lambda peer: False)
    door._connections = nursery
    with socket.create_server(("127.0.0.1", 0)) as server:

        def arrive(address):
            theirs = socket.create_connection(server.getsockname())
            theirs.settimeout(1)
            ours, _ = server.accept()
            door._admit(ours, (address, 5000, 0, 0))
            return theirs

        clients = [arrive("2001:db8::1"), arrive("2001:db8::2")]
        refused = arrive("2001:db8::3")
        assert b" 429 " in refused.recv(1000)
        clients += [arrive("2001:db8:0:1::3"), refused]
        assert len(door.clients) == 3
        for client in clients:
            client.close()
        nursery.cancel_scope.cancel()
