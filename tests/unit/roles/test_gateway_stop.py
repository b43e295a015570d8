"""The stop of a gateway with workers on other machines."""

import contextlib
import json
import socket

import pytest
import trio
from support.peers import code_of

from ichat.config import load as configuration
from ichat.fleet.orders import ANYWHERE
from ichat.http.listeners import port_of
from ichat.observability.tracing import open_tracing
from ichat.roles.gateway_components import build
from ichat.roles.gateway_stop import drain
from ichat.supervisor.state import open_state

TABLE = '[[managed_workers]]\nmodel_name = "m"\nmodel_path = "/m"\n'


@pytest.fixture
async def stopping(tmp_path, nursery):
    """Return a function that makes a gateway which drains: its components, its port, and the door that is left."""
    text = f'[server_settings]\nport = 0\nstate_directory = "{tmp_path}"\n{TABLE}'
    config = configuration.parse(text, "test.toml")
    _sending, signals = trio.open_memory_channel[int](1)
    with contextlib.ExitStack() as stack:
        state = stack.enter_context(open_state(config.server_settings, None))
        components = build(config, None, state, stack.enter_context(contextlib.closing(open_tracing())))
        stack.callback(components.control.log_store.close)
        nursery.start_soon(components.data.hub.run_forever)
        listeners = [socket.create_server(("127.0.0.1", 0))]
        listeners[0].setblocking(False)
        nursery.start_soon(components.data.door.serve_forever, listeners)
        port = port_of(listeners)

        async def begin():
            left = await drain(components, listeners, signals, nursery)
            return components, port, left

        begin.components = components
        yield begin
        nursery.cancel_scope.cancel()


async def test_a_guard_reports_while_its_gateway_stops(stopping, connect):
    """Workers on other machines and their guards are answered; clients are refused, and go elsewhere."""
    (spec,) = stopping.components.reloader.config.managed_workers
    _, code = await stopping.components.control.orders.make_managed("m-0", spec, 60, ANYWHERE)
    components, port, left = await stopping()
    client = await connect(port)
    await client.send(request("/v1/workers/order", {"code": code, "start_id": "s" * 20}))
    status, _, body = await client.response()
    assert status == 200
    order = json.loads(body)
    report = {"worker_id": "m-0", "launch": order["launch"], "why": "was ended", "is_failure": False}
    await client.send(request("/v1/workers/end", report, f"authorization: Bearer {order['key']}\r\n"))
    assert (await client.response())[0] == 200
    assert [one.ended for one in components.control.orders.orders.by_launch.values()] == ["was ended"]
    for target in ("/v1/chat/completions", "/health"):
        other = await connect(port)
        await other.send(request(target, {"model": "m"}))
        status, _, body = await other.response()
        assert (status, code_of(body)) == (503, "draining")
    await left.drain()


async def test_a_port_is_closed_where_no_worker_is_elsewhere(stopping, connect):
    _, port, left = await stopping()
    assert left is None
    with pytest.raises(OSError, match="connect"):
        await connect(port)


def request(target, body, head=""):
    """Return the bytes of a request."""
    data = json.dumps(body)
    length = f"content-type: application/json\r\ncontent-length: {len(data)}"
    return f"POST {target} HTTP/1.1\r\nhost: localhost\r\n{head}{length}\r\n\r\n{data}".encode()
