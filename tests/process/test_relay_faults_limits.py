"""Limits and queues over several relays are those of one process, also while relays are killed."""

import hashlib
import random
import signal

import pytest
import trio
from support.deployments import free_port
from support.peers import until
from support.relay_site import Result, ask, clients_of, site_of

from ichat.security.keys import hash_of

RELAYS = 3
CLIENTS, KILLS, MANY_KILLS = 9, 3, 60
MANY, VERY_MANY = 30, 1000
KEY = '[[security.keys]]\nname = "{name}"\nkey_hash = "{hash}"\n{more}\n'
ROOM = "[limits]\nconnections_max = 32768\nconnections_per_address_max = 32768\n[routing]\nqueue_max = 100000\n"
SLOW, LARGE_BYTES = 12, 3_000_000


def key_of(name, more=""):
    return KEY.format(name=name, hash=hash_of(f"sk-{name}"), more=more)


async def ask_forever(site, who, results, chance):
    """Send requests one after another, on connections of any length."""
    while True:
        stream = await site.connect()
        async with stream:
            for _ in range(chance.choice((1, 3, 20))):
                result = Result()
                await ask(stream, {"model": "m", "who": who}, result, f"sk-{who}")
                results.append(result)
                if not result.is_whole or result.is_last:
                    break


async def serve_through_kills(site, kills):
    """Have clients of three keys ask while a relay is killed again and again; return what they got."""
    results, chance = [], random.Random(1)
    async with trio.open_nursery() as nursery:
        for number in range(CLIENTS):
            nursery.start_soon(ask_forever, site, "abc"[number % 3], results, chance)
        for _ in range(kills):
            number = chance.randrange(1, RELAYS + 1)
            starts, served = site.starts(number), site.upstream.served
            site.relays()[number].send_signal(signal.SIGKILL)
            await until(lambda: site.starts(number) > starts and site.upstream.served > served + 20)  # noqa: B023
        nursery.cancel_scope.cancel()
    await site.until_idle()
    await until(lambda: site.upstream.held == {})
    return {one.status for one in results}


async def live_with_one_place(gateway, kills):
    """The worker has a single place."""
    text = "".join(map(key_of, "abc"))
    async with site_of(gateway, free_port(), RELAYS, text, route="max_in_flight = 1") as site:
        site.upstream.hold_s = 0.002
        assert await serve_through_kills(site, kills) <= {0, 200}
        assert site.upstream.most == 1


async def live_with_one_request_a_key(gateway, kills):
    """Each key has a single request."""
    text = "".join(key_of(name, "max_in_flight = 1") for name in "abc")
    async with site_of(gateway, free_port(), RELAYS, text) as site:
        site.upstream.hold_s = 0.002
        assert await serve_through_kills(site, kills) <= {0, 200, 429}
        assert site.upstream.most_of_one == 1
        assert site.upstream.most > 1


@pytest.mark.parametrize("live", [live_with_one_place, live_with_one_request_a_key])
async def test_no_limit_of_one_is_exceeded_while_relays_are_killed(gateway, live):
    """The upstream, which notices closed connections at once, never has two requests where one is allowed."""
    await live(gateway, KILLS)


@pytest.mark.slow
@pytest.mark.parametrize("live", [live_with_one_place, live_with_one_request_a_key])
async def test_limits_of_one_hold_for_many_kills(gateway, live):
    """The same for many kills."""
    await live(gateway, MANY_KILLS)


# Turns.


async def turn_of_another_key(gateway, relays, count):
    """Have one key wait with `count` requests at a relay, and another key with one at another relay; return its turn."""
    async with site_of(
        gateway, free_port(), relays, ROOM + key_of("a") + key_of("b"), route="max_in_flight = 1"
    ) as site:
        site.upstream.opens = trio.Event()
        streams, look = {}, 16 + count // 8  # a list of all connections costs as much as many requests
        async with trio.open_nursery() as nursery:
            while True:
                stream = await site.connect(found := Result())
                await ask(stream, {"model": "none"}, found, "sk-a")  # a relay has it now
                if found.is_last:
                    await trio.aclose_forcefully(stream)
                    continue
                streams[found.port] = stream
                if len(streams) % look:
                    continue
                places = [clients_of(one) & streams.keys() for one in site.relays().values()] or [streams.keys()]
                if len(places[0]) > count and places[-1]:
                    break
            other = max(places[-1] - places[0], default=max(places[0]))
            first = sorted(places[0] - {other})[:count]
            results = []
            for port in first:
                results.append(Result())
                nursery.start_soon(ask, streams[port], {"model": "m", "who": "a"}, results[-1], "sk-a")
            await site.until_in_flight(count)
            results.append(Result())
            nursery.start_soon(ask, streams[other], {"model": "m", "who": "b"}, results[-1], "sk-b")
            await site.until_in_flight(count + 1)
            site.upstream.opens.set()
            await until(lambda: all(one.is_whole for one in results))
            for stream in streams.values():
                await trio.aclose_forcefully(stream)
        assert {one.status for one in results} == {200}
        assert site.upstream.most == 1
        return site.upstream.order.index("b")


@pytest.mark.parametrize("relays", [0, 2])
async def test_a_key_waits_for_no_queue_of_another_key_at_another_relay(gateway, relays):
    """The request that is under way and one more of the first key are served before; no other is."""
    assert await turn_of_another_key(gateway, relays, MANY) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("relays", [0, 2])
async def test_a_key_waits_for_no_long_queue_of_another_key(gateway, relays):
    """The same beside a thousand requests."""
    assert await turn_of_another_key(gateway, relays, VERY_MANY) <= 2


# Slow clients.


async def test_slow_clients_delay_no_other(gateway):
    """Clients that send a head byte by byte, read nothing, or send a large body do not stop others; they are served."""
    async with site_of(gateway, free_port(), 2) as site:
        results, heads = [], []
        async with trio.open_nursery() as nursery:
            for _ in range(SLOW):
                nursery.start_soon(send_slowly, site, heads)
                nursery.start_soon(read_nothing, site)
                results.append(Result())
                nursery.start_soon(send_much, site, results[-1])
            for _ in range(100):
                async with await site.connect() as stream:
                    await ask(stream, {"model": "m"}, result := Result())
                    assert result.status == 200
            await until(lambda: all(one.is_whole for one in results) and len(heads) == SLOW)
            nursery.cancel_scope.cancel()
        assert {one.status for one in results} | {one.status for one in heads} == {200}
        await site.until_idle()


async def send_slowly(site, heads):
    async with await site.connect() as stream:
        for byte in b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n":
            await stream.send_all(bytes((byte,)))
            await trio.sleep(0.01)
        await ask_rest(stream, heads)


async def ask_rest(stream, heads):
    """End a head, and note the response."""
    await stream.send_all(b"\r\n")
    data = b""
    while b"\r\n\r\n" not in data:
        more = await stream.receive_some()
        assert more, "the connection has ended without a response"
        data += more
    heads.append(Result(status=int(data.split()[1])))


async def read_nothing(site):
    async with await site.connect() as stream:
        await stream.send_all(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b'content-length: 29\r\n\r\n{"model": "m", "stream":true}'
        )
        await trio.sleep_forever()


async def send_much(site, result):
    async with await site.connect() as stream:
        text = hashlib.sha256(str(id(result)).encode()).hexdigest() * (LARGE_BYTES // 64)
        await ask(stream, {"model": "m", "text": text}, result)
        assert result.digest == hashlib.sha256(text.encode()).hexdigest()
