"""Where a request would go, asked over HTTP; and that the request then goes there."""

import json

from support.exposition import heartbeat
from support.peers import plain

ROUTE = b"/v1/admin/route"
PREFIX_AWARE = '[routing]\npolicy = "prefix_aware"\n'


def messages(number):
    return [{"role": "system", "content": "You are." * 200}, {"role": "user", "content": f"{number}" * 500}]


async def answering(stream, head, body):
    await stream.send_all(plain(b"{}"))


async def test_an_explained_request_goes_where_it_was_explained(gateway_to, serve, connect):
    """A conversation is explained by its prefix, and goes there; the question leaves no trace."""
    port = await gateway_to({}, PREFIX_AWARE)
    client = await connect(port)
    for number in range(3):
        _, worker_port = await serve(answering)
        await heartbeat(connect, port, worker_port, worker_id=f"w-{number}")
    for _ in range(3):
        status, _, body = await client.ask(target=ROUTE, messages=messages(1))
        view = json.loads(body)
        assert (status, view["rule"], view["prefix"]["matched"]) == (200, "least_loaded", 0), view
    status, headers, _ = await client.ask(messages=messages(1))
    home = headers[b"x-ichat-worker"].decode()
    assert status == 200
    said = [*messages(1), {"role": "user", "content": "And?"}]
    view = json.loads((await client.ask(target=ROUTE, messages=said))[2])
    assert (view["model"], view["policy"], view["rule"], view["chosen"]) == ("m", "prefix_aware", "prefix", home)
    assert view["prefix"]["matched"] == view["prefix"]["deepest"] > 1500
    matched = {one["worker_id"]: one["matched"] for one in view["candidates"]}
    assert matched == dict.fromkeys(["w-0", "w-1", "w-2"], 0) | {home: view["prefix"]["matched"]}
    assert (await client.ask(messages=said))[1][b"x-ichat-worker"].decode() == home


async def test_sessions_paths_and_policies(gateway_to, serve, connect):
    """A session goes first, and then no prefix is looked at; `path` says how the body is read."""
    port = await gateway_to({}, PREFIX_AWARE)
    client = await connect(port)
    for number in range(2):
        _, worker_port = await serve(answering)
        await heartbeat(connect, port, worker_port, worker_id=f"w-{number}")
    view = json.loads((await client.ask(target=ROUTE + b"?session=s", messages=messages(1)))[2])
    assert (view["rule"], view["session"], view["prefix"]) == ("session", True, None)
    text = "a" * 1000
    lengths = []
    for target, said in (
        (ROUTE, {"prompt": text}),
        (ROUTE, {"input": text}),
        (ROUTE + b"?path=/v1/messages", {"prompt": text, "messages": messages(1)}),
        (ROUTE + b"?path=/v1/responses", {"prompt": text}),
        (ROUTE, {}),
    ):
        status, _, body = await client.ask(target=target, **said)
        assert status == 200, body
        prefix = json.loads(body)["prefix"]
        lengths.append(prefix["length"] if prefix else None)
    assert lengths[0] >= 1000 <= lengths[1]
    assert lengths[2] > 2000
    assert lengths[3:] == [None, None]


async def test_an_invalid_request_is_refused_by_explain(gateway_to, serve, connect):
    """What no upstream would get is refused here too, with the same code."""
    _, upstream = await serve(answering)
    port = await gateway_to({"m": upstream})
    client = await connect(port)
    for model, target, more, expected in (
        ("other", ROUTE, {}, (404, "model_not_found")),
        ("", ROUTE, {}, (400, None)),
        ("m", ROUTE + b"?path=/v1/nothing", {}, (400, None)),
        ("m", ROUTE + b"?path=/v1/responses", {"previous_response_id": "resp_x", "input": "a"}, (200, None)),
    ):
        status, _, body = await client.ask(model, target=target, **more)
        code = json.loads(body).get("error", {}).get("code")
        assert (status, code if expected[1] else None) == expected, body
    view = json.loads((await client.ask(target=ROUTE))[2])
    assert (view["rule"], view["chosen"], view["candidates"][0]["state"]) == ("single", "external:m", "ready")
