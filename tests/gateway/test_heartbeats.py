"""Heartbeats over the gateway's port: who answers them, and what the gateway makes of them."""

import json

import pytest
import trio
from support.peers import code_of

from ichat.admin import app
from ichat.proxy.heartbeats import HEARTBEAT_PATHS

NEEDED = {"worker_id": "w1", "model_name": "m", "host": "127.0.0.1", "port": 9}


async def send(client, heartbeat, path=b"/v1/workers/heartbeat"):
    body = heartbeat if isinstance(heartbeat, bytes) else json.dumps(heartbeat).encode()
    await client.send(b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (path, len(body), body))
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
    assert (await client.get(b"/health"))[0] == 502
    status, answer = await send(client, NEEDED, path)
    assert (status, answer.pop("status"), bool(answer.pop("gateway_id"))) == (200, "registered", True)
    assert answer == {"heartbeat_interval": 30.0, "lost": [], "wants_machine": True}
    assert (await send(client, NEEDED, path))[1]["status"] == "ok"
    for body in (b"x", b"[" * 100_000, b"{}", b'{"worker_id": "?"}', b"[]"):
        status, answer = await send(client, body, path)
        assert (status, answer["error"]["code"]) == (400, "bad_request")
    with trio.fail_after(10):
        while not log.exists() or len(log.read_text().splitlines()) < 8:  # noqa: ASYNC110
            await trio.sleep(0.05)
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
