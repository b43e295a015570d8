"""The tokens of responses that are made in the background: the worker tells them afterwards, and they count once."""

import asyncio
import importlib
import json

import pytest
from support.exposition import heartbeat
from support.peers import JSON_POST, code_of, plain, until

from ichat.engines.asgi import call_under_way
from ichat.engines.responses import ResponseStore
from ichat.fleet.fleet import Fleet
from ichat.protocol.messages import Heartbeat, Machine, parse_short_heartbeat, registration_of, shortened
from ichat.protocol.usage import LATE_MAX, LateUsage, usage_wanted
from ichat.proxy.late_usage import OF_A_LIMITED_KEY_MAX, WAITING_MAX, LateUsageBook
from ichat.roles.worker_reports import LateUsages
from ichat.security.keys import hash_of

KEY = "sk-a-0123456789-0123456789"
LIMITED = f'[[security.keys]]\nname = "a"\nkey_hash = "{hash_of(KEY)}"\n'


@pytest.fixture
def site(serve, connect, gateway_to):
    """Start a worker and its gateway: `ask, beat, counts, tickets = await site(limits, **what the worker says)`."""

    async def start(more="", status=200, **known):
        tickets = []

        async def reply(stream, head, body):
            if body:
                tickets.append(dict(head.headers).get(b"x-ichat-usage"))
            await stream.send_all(plain(b'{"status": "queued"}').replace(b"200 OK", b"%d X" % status))

        _, upstream = await serve(reply)
        port = await gateway_to({}, more)
        known = {"usage_reports": True, "late_usage_reports": True, "start_id": "1", **known}

        async def beat(*told, worker="w", **more):
            await heartbeat(connect, port, upstream, worker_id=worker, late_usage=[*told], **{**known, **more})

        await beat()

        async def ask(*, background=True, **more):
            body = json.dumps({"model": "m", "input": "x", "background": background, **more}).encode()
            head = f"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n"
            client = await connect(port)
            await client.send(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            return await client.response()

        async def counts():
            _, _, text = await (await connect(port)).get(b"/metrics?workers=0")
            lines = [line.split() for line in text.decode().splitlines() if line.startswith("ichat_tokens_total")]
            found = {name.partition('direction="')[2].partition('"')[0]: float(count) for name, count in lines}
            return found["input"], found["output"], found["cached"]

        return ask, beat, counts, tickets

    return start


def told(ticket, *usage):
    return dict(zip(("ticket", "input", "output", "cached"), (ticket.decode(), *usage), strict=True))


async def test_late_usage_counts_once(site):
    """By the ticket of the request, from its own worker alone, and however often it is told."""
    ask, beat, counts, tickets = await site()
    assert (await ask())[0] == 200
    assert (await ask(background=False))[0] == 200
    assert tickets[1] == b"1"
    await beat(told(tickets[0], 70, 8, 9), worker="other")
    assert await counts() == (0, 0, 0)
    for _ in range(2):
        await beat(told(tickets[0], 70, 8, 9), told(b"0" * 32, 5, 5, 5))
        assert await counts() == (70, 8, 9)


async def test_limits_of_tokens_hold_for_the_background(site):
    """The request is let in, and the next one is refused once its tokens are known."""
    ask, beat, _, tickets = await site(LIMITED + "tokens_per_minute = 50\n", args={})
    assert (await ask())[0] == 200
    assert (await ask())[0] == 200
    await beat(told(tickets[0], 70, 8, 9))
    status, _, body = await ask()
    assert (status, code_of(body)) == (429, "rate_limited")


async def test_a_background_response_that_nothing_counts_is_refused(site):
    """By a worker that tells no late usage; and more than a few at once, by one that does."""
    ask, _, _, _ = await site(LIMITED + "tokens_per_minute = 50\n", late_usage_reports=False)
    status, _, body = await ask()
    assert (status, code_of(body)) == (400, "bad_request")
    assert (await ask(background=False))[0] == 200


async def test_a_refused_request_is_expected_no_longer(site):
    """So that a limited key is not shut out by its own mistakes."""
    ask, _, _, tickets = await site(LIMITED + "tokens_per_minute = 50\n", status=400)
    for _ in range(OF_A_LIMITED_KEY_MAX + 1):
        assert (await ask())[0] == 400
    assert len(set(tickets)) == OF_A_LIMITED_KEY_MAX + 1


async def test_a_heartbeat_with_a_wrong_ticket_is_refused(connect, gateway_to):
    """With the path of the mistake."""
    client = await connect(await gateway_to({}))
    body = json.dumps({
        "worker_id": "w", "model_name": "m", "host": "127.0.0.1", "port": 1, "late_usage": [told(b"x", 1, 2, 3)],
    }).encode()  # fmt: skip
    await client.send(JSON_POST % (b"/v1/workers/heartbeat", len(body), body))
    status, _, body = await client.response()
    assert status == 400
    assert b"late_usage[0].ticket: must be 32 hexadecimal digits" in body


def test_the_book_is_bounded():
    """The oldest are forgotten; those of a start that is over do not hold a limited key up."""
    fleet = Fleet({}, lambda: 0.0, 5)
    fleet.registry.record_heartbeat(Heartbeat("w", "m", "h", 1, start_id="1"))
    book = LateUsageBook(fleet.table)
    first = book.expect("b", "m", "w")
    for _ in range(OF_A_LIMITED_KEY_MAX):
        book.expect("a", "m", "w")
    assert book.is_full_for("a")
    assert not book.is_full_for("b")
    fleet.registry.record_heartbeat(Heartbeat("w", "m", "h", 1, start_id="2"))
    assert not book.is_full_for("a")
    for _ in range(WAITING_MAX):
        book.expect("c", "m", "w")
    assert book.forget(first) is None


def test_a_short_heartbeat_has_it():
    """Beside the machine: the gateway reads both from it."""
    sent = Heartbeat("w", "m", "h", 1, machine=Machine("a", "a"), late_usage=[LateUsage("f" * 32, 1, 2, 0)])
    read = parse_short_heartbeat(json.loads(json.dumps({**shortened(sent), "registration": "r"})))
    assert (read.machine, read.late_usage) == (sent.machine, sent.late_usage)
    assert registration_of(sent) == registration_of(Heartbeat("w", "m", "h", 1))


def test_the_worker_keeps_it_until_the_gateway_has_it():
    """As many at a time as a heartbeat takes, and the newest ones where no gateway answers."""
    changes = []
    kept = LateUsages(lambda: changes.append(1), waiting_max=LATE_MAX + 2)
    for number in range(LATE_MAX + 3):
        kept.add(f"{number:032x}", (1, 2, 0))
    assert len(changes) == LATE_MAX + 3
    some = kept.some()
    assert [one.ticket for one in some] == [f"{number:032x}" for number in range(1, LATE_MAX + 1)]
    assert kept.forget(Heartbeat("w", "m", "h", 1, late_usage=some))
    assert kept.some() == [LateUsage(f"{number:032x}", 1, 2, 0) for number in (LATE_MAX + 1, LATE_MAX + 2)]
    assert not kept.forget(Heartbeat("w", "m", "h", 1, late_usage=kept.some()))
    assert usage_wanted("ab")[1] == b"ab"


class _Serving:
    """An engine's object for the Responses API."""

    def __init__(self):
        self.response_store, self.background_tasks = {}, {}


@pytest.mark.parametrize("ends_first", ["call", "task"])
@pytest.mark.parametrize("ticket", [b"f" * 32, b"1"])
async def test_a_worker_reports_usage_of_background_responses(make_worker, connect, monkeypatch, ends_first, ticket):
    """Once the response and the task behind it have ended, whichever is last, and only what was not told before."""
    serving, told_later, seen = _Serving(), [], []
    ResponseStore(serving, 10, 10_000)

    async def app(self, scope, receive, send):
        call, go = call_under_way(), asyncio.Event()

        async def work():
            call.usage.append(lambda: (7, 3, 1))
            await go.wait()
            call.usage.append(lambda: (0, 5, 0))

        task = serving.background_tasks["r"] = asyncio.get_running_loop().create_task(work())
        await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        if ends_first == "task":
            go.set()
            await task
        await send({"type": "http.response.body", "body": b"{}"})
        seen.append(len(told_later))
        go.set()

    monkeypatch.setattr(importlib.import_module("fake_engine").Fake, "app", app)
    rig, port = await make_worker()
    rig.engine.adapter.late_usage.add(lambda *one: told_later.append(one))
    client = await connect(port)
    body = b'{"model": "m", "background": true}'
    head = b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\nx-ichat-usage: %b\r\n"
    await client.send((head + b"content-length: %d\r\n\r\n%b") % (ticket, len(body), body))
    status, headers, _ = await client.response()
    assert (status, headers[b"x-ichat-usage"]) == (200, b"7,3,1")
    await until(lambda: len(seen) == 1)
    if ticket == b"1":
        assert told_later == []
        return
    await until(lambda: told_later)
    assert told_later == [("f" * 32, (0, 5, 0))]
    if ends_first == "call":
        assert seen == [0]
