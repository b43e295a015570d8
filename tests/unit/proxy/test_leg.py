"""An exchange with one endpoint: however it goes, its outcome is a value."""

import pytest
import trio
from support.peers import plain, until

from ichat.http.hub import Hub
from ichat.http.pool import Pool, Upstream
from ichat.proxy.leg import Leg, Nowhere
from ichat.proxy.steps import ANSWERED, AttemptStep
from ichat.routing.endpoint import Endpoint

HEAD = b"HTTP/1.1 %b\r\ncontent-length: 0\r\n%b\r\n"
REQUEST = b"POST /v1/x HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"


@pytest.fixture
def leg_to(nursery):
    """Return `leg_to(port, ...)`, which makes a leg whose sink drops the response."""
    hub = Hub()
    nursery.start_soon(hub.run_forever)
    pool, upstreams = Pool(hub, connect_s=5, idle_s=5), {}

    def make(port, *, route=None, first_byte_s=30.0, **more):
        upstream = upstreams.setdefault(port, Upstream("worker w", "127.0.0.1", port))
        endpoint = Endpoint(upstream, b"w", 8, route)
        step = AttemptStep("w", "m", first_byte_s=first_byte_s, stall_s=30.0, **more)
        return Leg(pool, endpoint.facts, step, Nowhere(), (REQUEST,), b"POST")

    yield make
    pool.close_idle()


@pytest.mark.parametrize(("answer", "more", "kind", "status", "code"), [
    (plain(b"{}"), {}, "answered", 200, ""),
    (HEAD % (b"500 Failed", b""), {}, "answered", 500, ""),
    (b"", {}, "broken", 0, "upstream_failed"),
    (b"hello\r\n\r\n", {}, "broken", 0, "upstream_failed"),
    (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", {}, "broken", 200, "upstream_failed"),
    (None, {"first_byte_s": 0.05}, "late", 0, "upstream_timeout"),
    (HEAD % (b"503 Away", b"x-ichat-code: draining\r\n"), {}, "declined", 0, "model_not_ready"),
    (HEAD % (b"503 Away", b"x-ichat-code: draining\r\n"), {"passes_all": True}, "answered", 503, ""),
    (HEAD % (b"429 Busy", b""), {"route": object(), "rejects": ("429",)}, "rejected", 429, "upstream_failed"),
    (HEAD % (b"429 Busy", b""), {"route": object(), "rejects": ("5xx",)}, "answered", 429, ""),
    (HEAD % (b"429 Busy", b""), {"rejects": ("429",)}, "answered", 429, ""),
    (HEAD % (b"400 Bad", b"x-ichat-code: context_length_exceeded\r\n"), {"has_longer": True}, "too_long", 0,
     "context_length_exceeded"),
    (HEAD % (b"400 Bad", b"x-ichat-code: context_length_exceeded\r\n"), {}, "answered", 400, ""),
])  # fmt: skip
async def test_outcomes_are_values(serve, leg_to, answer, more, kind, status, code):
    """Once something of the response has been passed on, the request is over."""

    async def reply(stream, head, body):
        if answer is None:
            await trio.sleep_forever()
        await stream.send_all(answer)
        return "close"

    _, port = await serve(reply)
    leg = leg_to(port, **more)
    outcome = await leg.run()
    if kind == "answered":
        assert (outcome, leg.status) == (ANSWERED, status)
        return
    found = "" if outcome.failure is None else outcome.failure.code
    assert (outcome.kind, outcome.status, found) == (kind, status, code)
    assert outcome.is_over == (status == 200)
    assert outcome.is_external == ("route" in more)


async def test_an_upstream_that_does_not_listen_has_not_seen_the_request(leg_to):
    """No endpoint has seen the request."""
    outcome = await leg_to(1).run()
    assert (outcome.kind, outcome.failure.code, outcome.is_over) == ("unreachable", "upstream_unreachable", False)


async def begun_on_kept(leg_to, port, **more):
    """Return a leg that has begun on a kept connection, and a list that gets an item at its change."""
    first, changes = leg_to(port), []
    assert first.begin(lambda: None) is False, "there is no connection yet"
    assert await first.run() is ANSWERED
    leg = leg_to(port, **more)
    assert leg.begin(lambda: changes.append(1))
    return leg, changes


@pytest.mark.parametrize("answer", [plain(b"{}"), HEAD % (b"500 Failed", b"")])
async def test_a_leg_without_a_task_begins_and_ends_on_a_kept_connection(serve, leg_to, answer):
    """Its change is reported once, and the connection carries the next exchange."""
    connections = []

    async def reply(stream, head, body):
        if stream not in connections:
            connections.append(stream)
        await stream.send_all(answer)

    _, port = await serve(reply)
    leg, changes = await begun_on_kept(leg_to, port)
    await until(lambda: changes)
    assert (leg.end(), changes, leg.status) == (True, [1], int(answer.split()[1]))
    assert await leg_to(port).run() is ANSWERED
    assert len(connections) == 1


@pytest.mark.parametrize(("answer", "kind"), [
    (b"", "broken"), (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", "broken"),
    (HEAD % (b"503 Away", b"x-ichat-code: draining\r\n"), "declined"),
])  # fmt: skip
async def test_a_leg_that_cannot_end_without_a_task_goes_on_in_one(serve, leg_to, answer, kind):
    """`end` returns False, and `run` has the outcome, as if it had begun the exchange itself."""
    answers = [plain(b"{}"), answer, answer]

    async def reply(stream, head, body):
        given = answers.pop(0)
        await stream.send_all(given)
        return None if len(answers) == 2 else "close"

    _, port = await serve(reply)
    leg, changes = await begun_on_kept(leg_to, port)
    await until(lambda: changes)
    assert leg.end() is False
    assert (await leg.run()).kind == kind


async def test_an_abandoned_leg_gives_up_its_connection(serve, leg_to):
    """The upstream sees the end, no change is reported, and it is harmless the second time."""
    ends, has_first = [], []

    async def reply(stream, head, body):
        if has_first:
            ends.append(await stream.receive_some())
            return "close"
        has_first.append(1)
        await stream.send_all(plain(b"{}"))
        return None

    _, port = await serve(reply)
    leg, changes = await begun_on_kept(leg_to, port)
    leg.abandon()
    leg.abandon()
    await until(lambda: ends)
    assert (ends, changes) == ([b""], [])
