"""A worker's connection in the hands of the engine's thread: what it reads itself, and what goes back to Trio."""

import json
import logging

import pytest
import trio
import trio.lowlevel
from support.peers import code_of, until
from support.programs import LIMIT_S

from ichat.engines.engine_loop import EngineTimes
from ichat.engines.kept import REQUEST_BYTES_MAX
from ichat.observability.logs.log_format import JsonFormatter

POST = b"POST %b HTTP/1.1\r\nhost: localhost\r\n%bcontent-length: %d\r\n\r\n%b"


def post(path=b"/v1/chat/completions", body=b"{}", extra=b""):
    return POST % (path, extra, len(body), body)


@pytest.fixture
async def worker(make_worker, connect):
    """A client whose connection the engine's thread has kept, and the paths of the requests that Trio has read."""
    rig, port = await make_worker()
    seen = []
    answer = rig.door.answer

    async def noted(request, client, caller):
        seen.append(request.path)
        await answer(request, client, caller)

    rig.door.answer = noted
    client = await connect(port)
    assert (await client.ask())[0] == 200
    seen.clear()
    return rig, client, seen


def is_kept(rig):
    """Return whether the engine's loop has the only connection, and waits for a request on it."""
    return [kept.is_idle for kept in rig.host.connections] == [True]


async def test_the_next_requests_do_not_cross(worker):
    """Plain and streamed, and one that comes in pieces."""
    rig, client, seen = worker
    for stream in (False, True, False):
        assert (await client.ask(stream=stream))[0] == 200
    request = post(body=b'{"model": "m"}')
    for index in range(0, len(request), 7):
        await client.send(request[index : index + 7])
        await trio.lowlevel.checkpoint()
    assert (await client.response())[0] == 200
    assert seen == []
    await until(lambda: is_kept(rig))
    await until(lambda: rig.engine.done == 5)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", 200),
        (b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 200),
        (post(b"/a%20b"), 400),
        (post(b"/beat"), 409),
        (post(b"/v1/load_lora_adapter"), 200),
        (post(body=b'{"x": "%b"}' % (b"y" * REQUEST_BYTES_MAX)), 200),
    ],
)
async def test_an_unusual_request_is_answered_by_trio(worker, request_, status):
    """It comes back whole, is answered there, and the connection goes on."""
    rig, client, seen = worker
    await client.send(request_)
    assert (await client.response(request_.partition(b" ")[0]))[0] == status
    assert (await client.ask())[0] == 200
    assert seen[0] == request_.split(b" ")[1]
    await until(lambda: not rig.host.in_flight)


async def test_bytes_that_are_no_http_end_a_kept_connection(worker):
    """It ends the connection, as on one that is not kept."""
    _, client, _ = worker
    await client.send(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n")
    assert (await client.everything()).startswith(b"HTTP/1.1 400 ")


async def test_pipelined_requests_are_answered_in_order(worker):
    """What comes behind a request waits until that is answered."""
    _, client, _ = worker
    await client.send(post(b"/scope") + post(b"/empty") + post())
    for status in (200, 204, 200):
        assert (await client.response())[0] == status


async def test_a_failure_has_the_id_of_its_own_request(worker, caplog, monkeypatch):
    """Not that of the request with which the connection was kept; so has the line in the worker's log."""
    _, client, seen = worker
    monkeypatch.setattr(caplog.handler, "formatter", JsonFormatter())
    with caplog.at_level(logging.ERROR):
        await client.send(post(b"/raise", extra=b"x-request-id: mine\r\n"))
        status, headers, body = await client.response()
    assert (status, code_of(body), headers[b"x-request-id"]) == (500, "engine_failed", b"mine")
    assert headers[b"x-ichat-error"] == b"worker"
    await until(lambda: "the engine has a bug" in caplog.text)  # the engine's thread writes it
    lines = [line for line in caplog.text.splitlines() if line.startswith("{")]  # earlier lines are text
    assert [json.loads(line).get("request_id") for line in lines] == ["mine"]
    assert seen == []
    assert (await client.ask())[0] == 200


async def test_work_after_the_response_does_not_hold_up_the_next_request(worker, connect):
    """The connection takes its next request after the response, whose context has nothing of the last one's."""
    rig, client, _ = worker
    for one in (client, client, client, await connect(rig.worker.port)):
        status, _, body = await one.ask(target=b"/afterwards")
        assert (status, json.loads(body)) == (200, {"context": None})
    await until(lambda: rig.host.in_flight == 0)


async def test_a_request_that_the_adapter_refuses_never_reaches_the_engine(worker):
    """Trio reads the request again, and refuses it."""
    rig, client, seen = worker
    rig.engine.adapter.serve_only("m", ["chat/completions"], ["embeddings"])
    status, _, body = await client.ask(target=b"/v1/embeddings")
    assert (status, code_of(body)) == (400, "unsupported_by_model")
    assert seen == [b"/v1/embeddings"]
    await until(lambda: rig.engine.done == 1 and rig.host.in_flight == 0)


async def test_an_adapter_that_may_wait_is_asked_in_trio(worker):
    """Unless its class says that it never waits."""
    rig, client, seen = worker
    adapter = rig.engine.adapter
    assert (await client.get(b"/health"))[0] == 200

    class Waiting(type(adapter)):
        async def request(self, request):
            await trio.lowlevel.checkpoint()
            return await super().request(request)

    adapter.__class__ = Waiting
    seen.clear()
    for _ in range(2):
        assert (await client.ask())[0] == 200
    assert len(seen) == 2


async def test_a_client_that_leaves_is_forgotten(worker, connect):
    """While the connection is idle, and during its second request, which is aborted."""
    rig, client, _ = worker
    busy = await connect(rig.worker.port)
    assert (await busy.ask())[0] == 200
    await busy.send(post(b"/wait"))
    await until(lambda: rig.engine.running == 1)
    await client.stream.aclose()
    await until(lambda: len(rig.door.clients) == 1)
    await busy.stream.aclose()
    await until(lambda: not rig.door.clients and not rig.host.connections)
    await until(lambda: (rig.engine.aborted, rig.host.aborts) == (1, 1))


async def test_an_idle_connection_is_closed(make_worker, connect):
    """After `keep_alive_s`, as anywhere else; one whose request does not arrive, after `body_s`."""
    rig, port = await make_worker(times=EngineTimes(watch_s=0.02), keep_alive_s=0.2, body_s=0.2)
    idle, slow = await connect(port), await connect(port)
    for client in (idle, slow):
        assert (await client.ask())[0] == 200
    await slow.send(post(body=b"{}")[:-1])
    assert await idle.everything() == b""
    assert (await slow.everything()).startswith(b"HTTP/1.1 408 ")
    await until(lambda: not rig.door.clients)


async def test_a_drain_does_not_wait_for_idle_connections(worker, connect):
    """A request under way is answered, with the end of its connection."""
    rig, client, _ = worker
    busy = await connect(rig.worker.port)
    for _ in range(2):
        assert (await busy.ask())[0] == 200
    await until(lambda: rig.host.in_flight == 0)
    await busy.send(post(body=b'{"stream": true, "events": 20, "gap_s": 0.01}'))
    await until(lambda: rig.host.in_flight == 1)
    rig.host.give_back_connections()
    with trio.fail_after(LIMIT_S):
        await rig.door.drain()
    status, _, body = await busy.response()
    assert (status, body.count(b"data: ")) == (200, 21)
    assert await client.everything() == b""
    assert await busy.everything() == b""


async def test_the_engines_end_gives_connections_back(worker):
    """The next request is answered by Trio, with the reason."""
    rig, client, _ = worker
    rig.engine.dead = "killed by a test"
    with trio.fail_after(LIMIT_S):
        await rig.host.ended.wait()
    status, _, body = await client.ask()
    assert (status, code_of(body)) == (503, "engine_dead")
