"""The requests in flight: what is shown of them, and what cancelling does in each phase."""

import functools
import json
import re

import pytest
import trio
import trio.testing
from support.peers import AS_OWN, chunk, code_of, event, until
from support.programs import LIMIT_S

from ichat import errors
from ichat.http.leaving import Retirement
from ichat.roles import gateway

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ONE_PLACE = "[routing]\nmax_in_flight = 1\n"


class Site:
    """A gateway before one upstream, which answers as far as it is told, and knows whether it was left."""

    def __init__(self, connect, port, upstream):
        self.connect, self.port, self.upstream = connect, port, upstream

    async def begin(self, more=b""):
        """Send a request that is not answered yet."""
        client = await self.connect(self.port)
        body = b'{"model": "m", "stream": true}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n%bcontent-length: %d\r\n\r\n" % (more, len(body))
        await client.send(head + body)
        return client

    async def listed(self):
        client = await self.connect(self.port)
        _, _, body = await client.get(b"/v1/admin/requests")
        return json.loads(body)

    async def in_phase(self, phase):
        """Wait for a request in this phase, and return what is shown of it."""
        with trio.fail_after(LIMIT_S):
            while True:
                for one in (await self.listed())["requests"]:
                    if one["phase"] == phase:
                        return one
                await trio.sleep(0.01)

    async def cancel(self, request_id):
        client = await self.connect(self.port)
        await client.send(
            b"DELETE /v1/admin/requests/%b HTTP/1.1\r\nhost: localhost\r\n%bcontent-length: 0\r\n\r\n"
            % (request_id.encode(), AS_OWN)
        )
        status, _, body = await client.response(b"DELETE")
        return status, json.loads(body)


@pytest.fixture
async def site(serve, gateway_to, connect):
    async def start(pieces, more=""):
        async def reply(stream, head, body):
            for piece in pieces:
                await stream.send_all(piece)
            await stream.receive_some()  # until the gateway leaves

        upstream, port = await serve(reply)
        return Site(connect, await gateway_to({"m": port}, more), upstream)

    return start


async def test_requests_in_flight_show_caller_phase_and_age(site):
    """Who asks for what, where it is, and for how long it has been there."""
    here = await site([STREAM, chunk(event(1)), chunk(event(2))])
    assert await here.listed() == {"requests": [], "total": 0}
    await here.begin(b"x-request-id: mine\r\n")
    one = await here.in_phase("streaming")
    assert (one["id"], one["model"], one["route"], one["is_stream"]) == ("mine", "m", "/v1/completions", True)
    assert (one["key"], one["alias"], one["queued_s"]) == ("", "", 0)
    assert one["worker"] == "external:m"
    assert one["bytes_in"] == 30
    assert one["bytes_out"] > 0
    assert one["tokens_out_estimate"] in (1, 2)
    assert 0 < one["age_s"] < LIMIT_S


async def test_one_that_waits_for_its_worker_is_cancelled(site):
    """The client gets an error that asks for no other try, and the upstream is left."""
    here = await site([])
    client = await here.begin()
    one = await here.in_phase("waiting")
    assert await here.cancel(one["id"]) == (200, {"id": one["id"], "cancelled": 1})
    status, headers, body = await client.response()
    assert (status, code_of(body)) == (503, "request_cancelled")
    assert headers[b"x-should-retry"] == b"false"
    assert await client.everything() == b""
    await until(lambda: here.upstream.closed == 1)
    await until_none(here)


async def until_none(here):
    with trio.fail_after(LIMIT_S):
        while (await here.listed())["total"]:
            await trio.sleep(0.01)


async def test_one_in_a_queue_is_cancelled(site):
    """Its place is free: the other one keeps its own, and a third gets the next."""
    here = await site([], ONE_PLACE)
    first = await here.begin()
    kept = await here.in_phase("waiting")
    second = await here.begin()
    queued = await here.in_phase("queued")
    assert (await here.cancel(queued["id"]))[0] == 200
    assert (await second.response())[0] == 503
    assert [one["id"] for one in (await here.listed())["requests"]] == [kept["id"]]
    third = await here.begin()
    await here.in_phase("queued")
    assert (await here.cancel(kept["id"]))[0] == 200
    assert (await first.response())[0] == 503
    last = await here.in_phase("waiting")
    await here.cancel(last["id"])
    assert (await third.response())[0] == 503
    await until_none(here)


async def test_a_stream_ends_with_an_event(site):
    """A client that has whole events gets the error as another one, and then the connection's end."""
    here = await site([STREAM, chunk(event(1))])
    client = await here.begin()
    one = await here.in_phase("streaming")
    await here.cancel(one["id"])
    status, _, body = await client.response()
    assert status == 200
    assert code_of(body.rpartition(b"data: ")[2]) == "request_cancelled"
    assert body.startswith(event(1))
    await until(lambda: here.upstream.closed == 1)


@pytest.mark.one_process("retires the front door in this process; see test_relays.py for a relay's")
async def test_streams_of_a_retired_gateway_end_with_an_event(site, monkeypatch, nursery):
    """Once the time of its retirement is over, a stream gets an error as its last event, and no [DONE]."""
    built, build = [], gateway.build
    monkeypatch.setattr(gateway, "build", lambda *args: built.append(build(*args)) or built[-1])
    here = await site([STREAM, chunk(event(1))])
    clients = [await here.begin() for _ in range(3)]
    data = built[0].data
    await until(lambda: sum(one.phase == "streaming" for one in data.handler.in_flight.view().requests) == 3)
    overdue = functools.partial(data.handler.in_flight.end_all, errors.draining)
    with trio.fail_after(LIMIT_S):
        await data.door.retire(Retirement(total_s=0, overdue=overdue))
    for client in clients:
        status, _, body = await client.response()
        assert (status, code_of(body.rpartition(b"data: ")[2])) == (200, "draining")
        assert (body.startswith(event(1)), b"[DONE]" in body) == (True, False)
        assert await client.everything() == b""
    assert not data.door.clients


@pytest.mark.parametrize(
    "pieces",
    [[STREAM, b"5\r\nda"], [b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"]],
)
async def test_a_response_that_cannot_go_on_breaks_off(site, pieces):
    """No client takes half an event, or half of a plain response, for a whole one."""
    here = await site(pieces)
    client = await here.begin()
    one = await here.in_phase("streaming" if pieces[0] is STREAM else "plain")
    await here.cancel(one["id"])
    assert (await client.response())[2] == "broken"
    await until(lambda: here.upstream.closed == 1)
    await until_none(here)


async def test_a_client_that_takes_nothing_is_cut(site):
    """What is half sent to it is no whole event, so nothing is put behind that."""
    here = await site([STREAM, *[chunk(b"data: " + b"x" * 60_000 + b"\n\n")] * 200])
    client = await here.begin()
    one = await here.in_phase("streaming")
    size = -1
    with trio.fail_after(LIMIT_S):
        while size != one["bytes_out"]:
            size = one["bytes_out"]
            await trio.testing.wait_all_tasks_blocked(0.05)
            one = await here.in_phase("streaming")
    await here.cancel(one["id"])
    assert (await client.response())[2] == "broken"


async def test_cancelling_an_unknown_request_is_404(site):
    """404; and requests to the control plane are not in the list."""
    here = await site([])
    assert (await here.cancel("nobody"))[0] == 404
    assert (await here.listed())["total"] == 0


async def test_one_request_is_cancelled_and_no_other_of_its_id(site):
    """Clients choose ids, and may choose the same one: then the gateway's own ids tell the requests apart."""
    here = await site([])
    clients = []
    for number in range(1, 3):  # their order is that of the list: two relays may ask in any order
        clients.append(await here.begin(b"x-request-id: same\r\n"))
        with trio.fail_after(LIMIT_S):
            while (await here.listed())["total"] < number:
                await trio.sleep(0.01)
    own = [one["own_id"] for one in (await here.listed())["requests"]]
    status, answer = await here.cancel("same")
    assert (status, answer["error"]["code"]) == (409, "ambiguous_id")
    assert (
        answer["error"]["message"] == f"2 requests have the id same: cancel one by its own: {', '.join(sorted(own))}."
    )
    assert await here.cancel(own[0]) == (200, {"id": own[0], "cancelled": 1})
    assert (await clients[0].response())[0] == 503
    assert [one["own_id"] for one in (await here.listed())["requests"]] == own[1:]
    assert await here.cancel("same") == (200, {"id": "same", "cancelled": 1})
    assert (await clients[1].response())[0] == 503


async def test_no_client_can_take_the_id_of_another(site):
    """Ids are random, and one that a client copies names its own request only where no other has it from the gateway."""
    here = await site([])
    first = await here.begin()
    victim = await here.in_phase("waiting")
    assert re.fullmatch("req-[0-9a-f]{24}", victim["id"])
    copied = await here.begin(b"x-request-id: %b\r\n" % victim["id"].encode())
    with trio.fail_after(LIMIT_S):
        while (await here.listed())["total"] < 2:
            await trio.sleep(0.01)
    assert await here.cancel(victim["own_id"]) == (200, {"id": victim["own_id"], "cancelled": 1})
    assert (await first.response())[0] == 503
    [left] = (await here.listed())["requests"]
    assert (left["id"], left["own_id"] != left["id"]) == (victim["id"], True)
    assert (await here.cancel(left["own_id"]))[0] == 200
    assert (await copied.response())[0] == 503
