"""Who used what, over the API: all of it for operators, its own for each client; limits that hold over restarts."""

import json

import pytest
from support.peers import code_of, plain

from ichat.roles import gateway
from ichat.security.keys import hash_of

KEYS = {name: f"sk-{name}-0123456789abc" for name in ("a", "b")}
ADMIN = "sk-admin-0123456789abc"
NAMES = {"a": "a", "b": "b", "admin": "admin"}


def settings(directory, a="", more=""):
    text = f'state_directory = "{directory}"\n[usage]\nflush_s = 0.05\n{more}\n'
    text += f'[prices."m"]\ninput = 1.0\noutput = 10.0\n[security]\nadmin_key_hash = "{hash_of(ADMIN)}"\n'
    for name, extra in (("a", a), ("b", "")):
        text += f'[[security.keys]]\nname = "{name}"\nkey_hash = "{hash_of(KEYS[name])}"\n{extra}\n'
    return text


async def hello(stream, head, body):
    usage = b'"usage": {"prompt_tokens": 30, "completion_tokens": 70, "prompt_tokens_details": {"cached_tokens": 10}}'
    await stream.send_all(plain(b"{%b}" % usage))


async def ask(client, key="a", model="m"):
    data = json.dumps({"model": model}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS[key]}\r\n"
    await client.send(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return await client.response()


async def get(client, target, key=ADMIN):
    head = f"GET {target} HTTP/1.1\r\nHost: localhost\r\n" + (f"Authorization: Bearer {key}\r\n" if key else "")
    await client.send(f"{head}\r\n".encode())
    return await client.response(b"GET")


async def test_operators_see_everything_and_clients_their_own(serve, gateway_to, connect, tmp_path):
    """By key and model of this month unless asked otherwise, as JSON or CSV, at once after the request."""
    _, port = await serve(hello)
    client = await connect(await gateway_to({"m": port, "n": port}, settings(tmp_path, "tokens_per_day = 1000")))
    for key, model in (("a", "m"), ("a", "n"), ("b", "m"), ("a", "m")):
        assert (await ask(client, key, model))[0] == 200
    assert (await ask(client, "b", "unknown"))[0] == 404
    status, _, body = await get(client, "/v1/admin/usage")
    answer = json.loads(body)
    assert (status, answer["by"], answer["storage"]) == (200, ["key", "model"], "ok")
    shown = [(one["key"], one["model"], one["requests"], one["errors"], one["cost"]) for one in answer["rows"]]
    assert shown == [
        ("a", "m", 2, 0, 0.00146), ("a", "n", 1, 0, None), ("b", "", 1, 1, None), ("b", "m", 1, 0, 0.00073),
    ]  # fmt: skip
    totals = answer["totals"]
    assert [totals[name] for name in ("requests", "input_tokens", "output_tokens", "cached_tokens")] == [
        5,
        120,
        280,
        40,
    ]
    status, headers, body = await get(client, "/v1/admin/usage?by=model,month&key=a&format=csv")
    assert (status, headers[b"content-type"]) == (200, b"text/csv; charset=utf-8")
    lines = body.decode().splitlines()
    assert lines[0].startswith("model,month,requests,errors,input_tokens,")
    assert [line.split(",")[0] for line in lines[1:]] == ["m", "n"]
    status, _, body = await get(client, "/v1/usage", KEYS["a"])
    own = json.loads(body)
    assert (status, own["key"], own["by"]) == (200, "a", ["model"])
    assert [(one["model"], one["requests"]) for one in own["rows"]] == [("m", 2), ("n", 1)]
    (limit,) = own["limits"]
    assert [limit[name] for name in ("limit", "allowed", "used", "left")] == ["tokens_per_day", 1000, 300, 700]
    assert limit["begins_anew"].endswith("T00:00:00Z")


@pytest.mark.parametrize(
    ("target", "key", "status", "code"),
    [
        ("/v1/admin/usage", "", 401, "invalid_api_key"),
        ("/v1/admin/usage", KEYS["a"], 403, "forbidden"),
        ("/v1/usage", "", 401, "invalid_api_key"),
        ("/v1/usage", ADMIN, 403, "forbidden"),
        ("/v1/usage?key=b", KEYS["a"], 400, "bad_request"),
        ("/v1/usage?by=key", KEYS["a"], 400, "bad_request"),
        ("/v1/usage?by=endpoint", KEYS["a"], 400, "bad_request"),
        ("/v1/admin/usage?by=colour", ADMIN, 400, "bad_request"),
        ("/v1/admin/usage?by=day,hour", ADMIN, 400, "bad_request"),
        ("/v1/admin/usage?by=key,key", ADMIN, 400, "bad_request"),
        ("/v1/admin/usage?from=yesterday", ADMIN, 400, "bad_request"),
        ("/v1/admin/usage?from=-5", ADMIN, 400, "bad_request"),
        ("/v1/admin/usage?from=nan", ADMIN, 400, "bad_request"),
        ("/v1/admin/usage?to=2026-01-01&from=2026-01-02", ADMIN, 400, "bad_request"),
        ("/v1/admin/usage?format=xml", ADMIN, 400, "bad_request"),
        ("/v1/admin/usage?since=1", ADMIN, 400, "bad_request"),
        ("/v1/admin/usage?from=2026-11-01T00:00%2B01:00&to=1800000000.5", ADMIN, 200, None),
        ("/v1/admin/usage?key=%27%3BDROP%20TABLE%20usage&by=", ADMIN, 200, None),
    ],
)
async def test_every_wrong_parameter_of_usage_is_refused(gateway_to, connect, tmp_path, target, key, status, code):
    """Each parameter is checked, and each kind of key gets what is its own."""
    client = await connect(await gateway_to({}, settings(tmp_path)))
    found, _, body = await get(client, target, key)
    assert found == status, body
    assert code is None or code_of(body) == code


async def test_a_budget_is_used_up_and_stays_so_after_a_restart(serve, gateway_to, connect, tmp_path, nursery):
    """429 `insufficient_quota` until the month ends, which another gateway with the same directory knows as well."""
    _, port = await serve(hello)
    limits = "budget_per_month = 0.001"
    first = tmp_path / "state"
    client = await connect(await gateway_to({"m": port}, settings(first, limits)))
    assert [(await ask(client))[0] for _ in range(3)] == [200, 200, 429]
    status, headers, body = await ask(client)
    error = json.loads(body)["error"]
    assert (status, error["code"], error["type"]) == (429, "insufficient_quota", "insufficient_quota")
    assert "The key `a` has a budget of 0.001 a month, and has used 0.0015" in error["message"]
    assert int(headers[b"retry-after"]) > 0
    assert headers[b"x-should-retry"] == b"false"
    assert (await ask(client, "b"))[0] == 200
    _, _, body = await get(client, "/v1/admin/usage?by=key")
    assert [(one["key"], one["requests"], one["errors"]) for one in json.loads(body)["rows"]] == [
        ("a", 4, 2),
        ("b", 1, 0),
    ]


async def test_a_gateway_without_usage_says_so(gateway_to, connect, tmp_path):
    """409, with what to change."""
    text = settings(tmp_path).replace("flush_s = 0.05", "enabled = false")
    client = await connect(await gateway_to({}, text))
    status, _, body = await get(client, "/v1/admin/usage")
    assert (status, code_of(body)) == (409, "no_usage")


async def test_limits_wait_for_a_start_with_usage(tmp_path, connect, nursery):
    """A reload cannot begin to keep usage: limits that rest on it would begin anew with each start."""
    path = tmp_path / "ichat.toml"
    start = f"[server_settings]\nport = 0\n{settings(tmp_path / 'state')}"
    path.write_text(start.replace("flush_s = 0.05", "enabled = false"))
    client = await connect(await nursery.start(gateway.run, *gateway.read_command_line(["-c", str(path)])))

    async def post(target, body=b""):
        head = f"POST {target} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ADMIN}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        await client.send(head.encode() + body)
        status, _, answer = await client.response()
        return status, json.loads(answer)

    for limited in (
        start.replace("[prices", "[limits]\ntokens_per_day = 5\n[prices", 1),
        start + "budget_per_month = 1\n",
    ):
        path.write_text(limited)
        status, answer = await post("/v1/admin/config/reload")
        assert (status, answer["error"]["code"]) == (400, "bad_configuration")
        assert "Start the gateway again for this" in answer["error"]["message"]
    path.write_text(start)
    assert (await post("/v1/admin/config/reload"))[0] == 200
    status, answer = await post("/v1/admin/keys", b'{"name": "made", "tokens_per_day": 5}')
    assert (status, "when the gateway starts" in answer["error"]["message"]) == (400, True)
    assert (await post("/v1/admin/keys", b'{"name": "made"}'))[0] == 201
