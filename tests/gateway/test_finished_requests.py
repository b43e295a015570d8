"""The requests that have ended, as a gateway shows them: answered, failed, cancelled, refused."""

import json

import attrs
import pytest
import trio
from support.peers import AS_OWN, SSE_END, SSE_HEAD, chunk, code_of, event
from support.programs import LIMIT_S

from ichat.config.load import parse
from ichat.roles import gateway
from ichat.security.keys import hash_of

SECRET = "sk-of-a-client-in-this-test-000000000000"
KEY = f'[[security.keys]]\nname = "team"\nkey_hash = "{hash_of(SECRET)}"\n'
ROUTE = '[[external_routes]]\nmodel_name = "{name}"\napi_base = "http://127.0.0.1:{port}/v1"\n'
STREAM = [SSE_HEAD, event(0), event(1), SSE_END]


class Site:
    """A gateway whose model `good` answers a stream, `bad` breaks off, and `slow` does not end its stream."""

    def __init__(self, connect, port):
        self.connect, self.port = connect, port

    async def begin(self, model, request_id, secret=SECRET):
        client = await self.connect(self.port)
        body = json.dumps({"model": model, "stream": True}).encode()
        await client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\n"
            b"x-request-id: %b\r\ncontent-length: %d\r\n\r\n%b" % (secret.encode(), request_id, len(body), body)
        )
        return client

    async def get(self, path):
        status, _, body = await (await self.connect(self.port)).get(path)
        return status, json.loads(body)

    async def finished(self, request_id):
        """Return the finished request of this id, once there is one."""
        with trio.fail_after(LIMIT_S):
            while True:
                _, found = await self.get(b"/v1/admin/requests/finished?id=" + request_id)
                if found["requests"]:
                    [one] = found["requests"]
                    return one
                await trio.sleep(0.01)


@pytest.fixture(params=[0, 2])
async def site(request, serve, nursery, connect):
    async def answer(stream, head, body):
        model = json.loads(body)["model"]
        pieces = {"good": STREAM, "bad": [SSE_HEAD, chunk(b"data: {")], "slow": [SSE_HEAD, event(0)]}[model]
        for piece in pieces:
            await stream.send_all(piece)
        if model == "slow":
            await stream.receive_some()
        return "close"

    _, port = await serve(answer)
    routes = (ROUTE.format(name=name, port=port) for name in ("good", "bad", "slow"))
    config = parse("[server_settings]\nport = 0\n" + KEY + "".join(routes), "test.toml")
    settings = attrs.evolve(config.server_settings, relays=request.param)
    return Site(connect, await nursery.start(gateway.run, attrs.evolve(config, server_settings=settings)))


async def test_finished_requests_tell_how_each_has_ended(site):
    """An answered, a broken, a cancelled, a refused and an unknown request are found by their clients' ids."""
    status, _, _ = await (await site.begin("good", b"mine-1")).response()
    assert status == 200
    one = await site.finished(b"mine-1")
    assert (one["status"], one["error"], one["phase"], one["key"], one["worker"]) == (
        200,
        "",
        "",
        "team",
        "external:good",
    )
    assert (one["model"], one["route"], one["chunks"] > 0) == ("good", "/v1/chat/completions", True)
    assert one["own_id"].startswith("req-")
    assert (await site.finished(one["own_id"].encode()))["id"] == "mine-1"
    assert list(one["phases"]) == ["queued_s", "overhead_s", "head_s", "first_s", "body_s"]
    assert sum(one["phases"].values()) == pytest.approx(one["duration_s"], abs=1e-4)
    assert one["ended_at"] - one["started_at"] == pytest.approx(one["duration_s"], abs=0.01)

    await (await site.begin("bad", b"mine-2")).response()
    two = await site.finished(b"mine-2")
    assert (two["status"], bool(two["error"]), two["worker"]) == (200, True, "external:bad")

    client = await site.begin("slow", b"mine-3")
    with trio.fail_after(LIMIT_S):
        while (
            not (found := (await site.get(b"/v1/admin/requests?id=mine-3"))[1]["requests"]) or not found[0]["bytes_out"]
        ):
            await trio.sleep(0.01)
    assert (await site.get(b"/v1/admin/requests?id=mine-1"))[1] == {"requests": [], "total": 0}
    canceller = await site.connect(site.port)
    own_id = found[0]["own_id"].encode()
    await canceller.send(
        b"DELETE /v1/admin/requests/%b HTTP/1.1\r\nhost: localhost\r\n%bcontent-length: 0\r\n\r\n" % (own_id, AS_OWN)
    )
    assert (await canceller.response(b"DELETE"))[0] == 200
    await client.response()
    three = await site.finished(b"mine-3")
    assert (three["error"], three["phase"]) == ("request_cancelled", "streaming")
    assert three["own_id"].encode() == own_id

    assert (await (await site.begin("good", b"mine-4", "sk-wrong")).response())[0] == 401
    four = await site.finished(b"mine-4")
    assert (four["status"], four["error"], four["model"], four["worker"]) == (401, "invalid_api_key", "", "")

    assert (await (await site.begin("nobody", b"mine-5")).response())[0] == 404
    assert (await site.finished(b"mine-5"))["error"] == "model_not_found"

    _, listed = await site.get(b"/v1/admin/requests/finished?failed=1")
    assert [one["id"] for one in listed["requests"]] == ["mine-5", "mine-4", "mine-3", "mine-2"]
    assert (listed["kept_max"], listed["since"] <= one["started_at"]) == (500, True)
    assert [one["id"] for one in (await site.get(b"/v1/admin/requests/finished?limit=1"))[1]["requests"]] == ["mine-5"]


async def test_the_operators_requests_are_not_among_them(site):
    """Neither reading the list nor a mistake in it is a finished request."""
    status, answer = await site.get(b"/v1/admin/requests/finished?limit=0")
    assert (status, code_of(json.dumps(answer).encode())) == (400, "bad_request")
    assert (await site.get(b"/v1/admin/requests/nothing"))[0] in (404, 405)
    assert (await site.get(b"/v1/admin/requests/finished"))[1]["requests"] == []
