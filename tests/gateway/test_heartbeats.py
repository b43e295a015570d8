"""Heartbeats over the gateway's port: who answers them, and what the gateway makes of them."""

import json

import attrs
import pytest
import trio
import trio.testing
from support.peers import JSON_POST, code_of, plain, until

from ichat.admin import app
from ichat.protocol.messages import HEARTBEAT_PATHS, Heartbeat, Machine
from ichat.roles.heartbeat_sender import HeartbeatSender

NEEDED = {"worker_id": "w1", "model_name": "m", "host": "127.0.0.1", "port": 9}


async def send(client, heartbeat, path=b"/v1/workers/heartbeat"):
    body = heartbeat if isinstance(heartbeat, bytes) else json.dumps(heartbeat).encode()
    await client.send(JSON_POST % (path, len(body), body))
    status, headers, answer = await client.response()
    assert headers[b"content-type"] == b"application/json"
    return status, json.loads(answer)


@pytest.fixture
def no_control_plane(monkeypatch):
    """Let gateways of this process have no control plane: what is sent there fails."""

    async def serve(_app, _path, *, task_status):
        task_status.started()
        await trio.sleep_forever()

    monkeypatch.setattr(app, "serve", serve)


@pytest.mark.parametrize("path", sorted(HEARTBEAT_PATHS))
async def test_no_framework_is_asked(no_control_plane, gateway_to, connect, path, tmp_path):
    """The gateway's port answers heartbeats by itself, good ones and wrong ones, and logs them as any request."""
    log = tmp_path / "access"
    client = await connect(await gateway_to({}, f'[logs]\naccess_log = "{log}"\n'))
    assert (await client.get(b"/v1/models"))[0] == 502
    status, answer = await send(client, NEEDED, path)
    assert (status, answer.pop("status"), bool(answer.pop("gateway_id"))) == (200, "registered", True)
    assert answer == {"heartbeat_interval": 30.0, "lost": [], "wants_machine": True, "accepts_short": True}
    assert (await send(client, NEEDED, path))[1]["status"] == "ok"
    for body in (b"x", b"[" * 100_000, b"{}", b'{"worker_id": "?"}', b"[]"):
        status, answer = await send(client, body, path)
        assert (status, answer["error"]["code"]) == (400, "bad_request")
    await until(lambda: log.read_text().count("\n") >= 8)
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [one["status"] for one in entries] == [502, 200, 200, *[400] * 5]
    assert [one["error"] for one in entries[1:]] == ["", "", *["bad_request"] * 5]
    assert {one["path"] for one in entries[1:]} == {path.decode()}
    assert entries[1]["bytes_out"] > 80


async def test_other_methods_are_the_control_planes(gateway_to, connect):
    """It says which method there is."""
    client = await connect(await gateway_to({}))
    status, headers, body = await client.get(b"/v1/workers/heartbeat")
    assert (status, code_of(body)) == (405, "method_not_allowed")
    assert b"POST" in headers[b"allow"]


async def test_a_load_is_seen_while_it_goes_on(gateway_to, connect):
    """By whole heartbeats and short ones; of phases that are too many or too long none is taken."""
    client = await connect(await gateway_to({}))

    async def seen():
        [worker] = json.loads((await client.get(b"/v1/admin/workers"))[2])["data"]
        return worker["load"], worker["last_load"]

    whole, phase = {**NEEDED, "registration": "r"}, {"name": "importing vLLM", "seconds": 4}
    assert (await send(client, {**whole, "state": "starting", "load": [phase]}))[0] == 200
    load, last = await seen()
    assert ([one["name"] for one in load["phases"]], last) == (["importing vLLM"], None)
    assert 4 <= load["elapsed_s"] < 60
    weights = {"name": "loading weights", "seconds": 1.5, "detail": "1 of 2 shards"}
    short = {"worker_id": "w1", "registration": "r", "state": "loading", "load": [phase, weights]}
    assert (await send(client, short))[0] == 200
    load, _ = await seen()
    assert [(one["name"], one["detail"]) for one in load["phases"]] == [
        ("importing vLLM", ""),
        ("loading weights", "1 of 2 shards"),
    ]
    wrong = (
        [phase] * 65,
        [{**phase, "name": "x" * 65}],
        [{**phase, "name": "a\nb"}],
        [{**phase, "seconds": -1}],
        [{}],
        ["x"],
    )
    for phases in wrong:
        assert (await send(client, {**short, "load": phases}))[0] == 400
        assert (await send(client, {**whole, "loaded": phases}))[0] == 400
    ready = {**whole, "registration": "s", "loaded": [phase, {**weights, "seconds": 2}]}
    assert (await send(client, ready))[0] == 200
    load, last = await seen()
    assert (load, last["elapsed_s"]) == (None, 6)
    assert [one["expected_s"] for one in last["phases"]] == [None, None]


# What workers send.


class Gateways:
    """What answers a worker's heartbeats: each as its kind of gateway does."""

    def __init__(self):
        self.kind = "new"
        self.known = set()
        self.asked_s = 0.0
        self.forms = []
        self.bodies = []

    async def take(self, stream, head, body):
        sent = json.loads(body)
        is_short = "host" not in sent
        self.forms.append("short" if is_short else "whole")
        self.bodies.append(body)
        if is_short and (self.kind == "old" or sent["registration"] not in self.known):
            status = b"400 Bad Request" if self.kind == "old" else b"404 Not Found"
            await stream.send_all(b"HTTP/1.1 %b\r\ncontent-length: 2\r\n\r\n{}" % status)
            return
        answer = {"status": "ok", "heartbeat_interval": self.asked_s}
        if self.kind == "new":
            self.known.add(sent["registration"])
            answer["accepts_short"] = True
        await stream.send_all(plain(json.dumps(answer).encode()))


@pytest.fixture
async def worker(serve, nursery):
    """Start the heartbeats of one worker: `gateways, beat = worker`; `await beat(**changes)` returns the forms sent."""
    gateways = Gateways()
    _, port = await serve(gateways.take)
    now = Heartbeat("w1", "m", "127.0.0.1", 9, heartbeat_interval=3600.0, args={"a": "b" * 1000})
    sender = HeartbeatSender(f"http://127.0.0.1:{port}", ca_file=None, host="127.0.0.1", now=lambda: now, lost=print)
    nursery.start_soon(sender.send_forever)
    await until(lambda: gateways.forms)

    async def beat(**changes):
        nonlocal now
        now = attrs.evolve(now, **changes)
        count = len(gateways.forms)
        sender.changed()
        await until(lambda: len(gateways.forms) > count and not sender._is_due)
        await trio.testing.wait_all_tasks_blocked(0.02)
        return gateways.forms[count:]

    yield gateways, beat
    nursery.cancel_scope.cancel()


async def test_a_worker_sends_short_beats_to_a_gateway_that_knows_it(worker):
    """The whole again only where it has changed."""
    gateways, beat = worker
    assert gateways.forms == ["whole"]
    assert await beat(progress={"steps": 1}) == ["short"]
    assert await beat(state="draining", phase="x", failure="It broke.", machine=Machine("a", "b")) == ["short"]
    sent = json.loads(gateways.bodies[-1])
    del sent["registration"]
    assert sent.pop("machine")["id"] == "a"
    assert sent == {
        "worker_id": "w1", "state": "draining", "phase": "x", "failure": "It broke.", "progress": {"steps": 1},
    }  # fmt: skip
    assert await beat(args={"a": "c"}) == ["whole"]
    assert await beat(failure="", phase="") == ["short"]
    assert len(gateways.bodies[-1]) < 300


async def test_a_worker_sends_whole_beats_to_a_new_gateway(worker):
    """At once, where a gateway was started anew, or another one has come to its address."""
    gateways, beat = worker
    assert await beat() == ["short"]
    gateways.known.clear()
    assert await beat() == ["short", "whole"]
    assert await beat() == ["short"]
    gateways.kind = "old"
    assert await beat() == ["short", "whole"]
    assert await beat() == ["whole"]
    gateways.kind = "new"
    assert await beat() == ["whole"]
    assert await beat() == ["short"]


async def test_a_worker_follows_the_gateways_interval(serve, nursery, autojump_clock):
    """Its own is the shortest; a change is told at once all the same, and an interval that is none is not followed."""
    gateways = Gateways()
    _, port = await serve(gateways.take)
    now = Heartbeat("w1", "m", "127.0.0.1", 9, heartbeat_interval=0.01)
    sender = HeartbeatSender(f"http://127.0.0.1:{port}", ca_file=None, host="127.0.0.1", now=lambda: now, lost=print)
    nursery.start_soon(sender.send_forever)
    await until(lambda: len(gateways.forms) > 5)
    for wrong in (1e9, -1.0, "x", None, [], True):
        gateways.asked_s = wrong
        count = len(gateways.forms)
        await until(lambda count=count: len(gateways.forms) > count + 3)
    gateways.asked_s = 3600
    await until(lambda: sender._interval_s == 3600)
    count = len(gateways.forms)
    await trio.sleep(0.2)
    assert len(gateways.forms) == count
    gateways.asked_s = 0.0
    sender.changed()
    await until(lambda: len(gateways.forms) > count + 3)
    nursery.cancel_scope.cancel()


async def test_a_workers_memory_is_known_from_its_heartbeat(gateway_to, connect):
    """Figures that it leaves out are null, keys of later releases are ignored, and none is 0 or negative."""
    client = await connect(await gateway_to({}))
    memory = {"tokens": 4096, "weights_bytes": 5, "of_a_later_release": True}
    assert (await send(client, {**NEEDED, "memory": memory}))[0] == 200
    await client.send(b"GET /v1/admin/workers/w1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    known = json.loads((await client.response())[2])["memory"]
    assert (known["tokens"], known["weights_bytes"], known["blocks"]) == (4096, 5, None)
    status, answer = await send(client, {**NEEDED, "memory": {"tokens": 0}})
    assert (status, "memory.tokens: must be from 1" in answer["error"]["message"]) == (400, True), answer
