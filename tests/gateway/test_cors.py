"""What pages in browsers may do: preflights and answers as raw bytes."""

import json
import re

import pytest
import trio
from support.peers import LIMIT_S, OWN_SECRET, SSE_END, SSE_HEAD, code_of, event, plain

from ichat.config import load as configuration
from ichat.errors import Exit
from ichat.security.auth import CHANGES_MODELS
from ichat.security.cors import ASKED_BYTES_MAX
from ichat.security.keys import hash_of
from ichat.security.rules import ROUTES

PAGE, OTHER = b"https://chat.example", b"https://evil.example"
LISTED = 'cors_origins = ["https://chat.example", "http://localhost:3000"]\n'
ALL = 'cors_origins = ["*"]\n'
KEY = "sk-data-0123456789"
WITH_KEYS = f'[security]\n[[security.keys]]\nname = "a"\nkey_hash = "{hash_of(KEY)}"\n'
ENGINES_OWN = (
    b"Access-Control-Allow-Origin: *\r\naccess-control-allow-credentials: true\r\nAccess-Control-Expose-Headers: x\r\n"
    b"access-control-allow-methods: PUT\r\nVary: Accept\r\n"
)
EXPOSED = (
    b"retry-after, x-ichat-attempts, x-ichat-dropped, x-ichat-error, x-ichat-model, x-ichat-overhead-ms, x-ichat-prefix, x-ichat-worker, x-request-id,"
    b" x-should-retry"
)


async def hello(stream, head, body):
    if json.loads(body).get("stream"):
        await stream.send_all(SSE_HEAD.replace(b"\r\n\r\n", b"\r\n" + ENGINES_OWN + b"\r\n") + event(1) + SSE_END)
    else:
        await stream.send_all(plain(b'{"hello": 1}', ENGINES_OWN))


def head_of(method, path, origin=PAGE, *, length=0, **more):
    lines = [b"%b %b HTTP/1.1" % (method, path), b"Host: 127.0.0.1"]
    lines += [b"Origin: " + origin] if origin else []
    lines += [b"%b: %b" % (name.replace("_", "-").encode(), value) for name, value in more.items()]
    return b"\r\n".join([*lines, b"Content-Length: %d" % length, b"", b""])


def preflight(path=b"/v1/chat/completions", origin=PAGE, method=b"POST", **more):
    return head_of(b"OPTIONS", path, origin, access_control_request_method=method, **more)


async def raw(client, data):
    """Return a response without a body as the bytes that came."""
    await client.send(data)
    received = b""
    with trio.fail_after(LIMIT_S):
        while not received.endswith(b"\r\n\r\n"):
            received += await client.stream.receive_some()
    return received


async def lines_of(client, data, end=b"}"):
    """Return status and the lines about CORS of a response whose body ends so."""
    await client.send(data)
    received = b""
    with trio.fail_after(LIMIT_S):
        while not received.endswith(end):
            received += await client.stream.receive_some()
    head = received.partition(b"\r\n\r\n")[0]
    lines = [line for line in head.split(b"\r\n") if re.match(rb"(?i)access-control-|vary:", line)]
    return int(head.split()[1]), lines


def post(origin=PAGE, path=b"/v1/chat/completions", **more):
    body = json.dumps({"model": "m", **more}).encode()
    return head_of(b"POST", path, origin, length=len(body), authorization=b"Bearer " + KEY.encode()) + body


async def test_a_preflight_is_answered_without_a_key(serve, gateway_to, connect):
    """Byte for byte: what the page asked for is allowed, to its origin alone, and the connection serves the request."""
    _, port = await serve(hello)
    client = await connect(await gateway_to({"m": port}, LISTED + WITH_KEYS))
    asked = b"authorization,content-type,x-stainless-os"
    received = await raw(client, preflight(access_control_request_headers=asked, x_request_id=b"id-1"))
    assert re.sub(rb"date: [^\r]+", b"date: now", received) == (
        b"HTTP/1.1 204 No Content\r\n"
        b"date: now\r\n"
        b"access-control-allow-methods: GET, POST, DELETE\r\n"
        b"access-control-allow-headers: authorization,content-type,x-stainless-os\r\n"
        b"access-control-max-age: 600\r\n"
        b"x-request-id: id-1\r\n"
        b"content-security-policy: sandbox; default-src 'none'\r\n"
        b"x-content-type-options: nosniff\r\n"
        b"access-control-allow-origin: https://chat.example\r\n"
        b"vary: origin\r\n"
        b"access-control-expose-headers: " + EXPOSED + b"\r\n\r\n"
    )
    assert (await lines_of(client, post()))[0] == 200
    assert b"access-control-allow-methods: GET\r\n" in await raw(client, preflight(b"/v1/models/org/m", method=b"GET"))
    assert (await raw(client, preflight(b"/v1/responses/resp_1", method=b"DELETE"))).startswith(b"HTTP/1.1 204 ")


@pytest.mark.parametrize(
    "asked", [b"", b"x" * (ASKED_BYTES_MAX + 1), b"a b", b"a,,b", b"a;b", b'"a"', b"caf\xe9", b"a,"], ids=range(8)
)
async def test_a_preflight_gets_back_nothing_but_names_of_headers(gateway_to, connect, asked):
    """A list that is missing, too long or not one is answered with the usual headers."""
    client = await connect(await gateway_to({}, ALL))
    received = await raw(client, preflight(access_control_request_headers=asked))
    usual = b"access-control-allow-headers: authorization, content-type, x-api-key, x-request-id, x-session-id\r\n"
    assert usual in received
    assert b"access-control-allow-origin: *\r\n" in received
    assert b"vary" not in received


async def test_answers_say_which_page_may_read_them(serve, gateway_to, connect):
    """Each answer names the origin once, streams and failures too, and upstreams' own words on it are taken off."""
    upstream, port = await serve(hello)
    listed = [b"Vary: Accept", b"access-control-allow-origin: " + PAGE, b"vary: origin"]
    listed += [b"access-control-expose-headers: " + EXPOSED]
    for more, allowed, other in (
        (LISTED, listed, [b"Vary: Accept", b"vary: origin"]),
        (ALL, [b"Vary: Accept", b"access-control-allow-origin: *", listed[-1]], None),
        ("", [b"Vary: Accept"], None),
    ):
        gateway_port = await gateway_to({"m": port}, more)
        other = allowed if other is None else other
        for stream, end in ((False, b"}"), (True, b"0\r\n\r\n")):
            for origin, expected in ((PAGE, allowed), (OTHER, other), (b"", other), (b"null", other)):
                may = not origin or (origin == PAGE and more == LISTED) or more == ALL
                client = await connect(gateway_port)
                status, lines = await lines_of(client, post(origin, stream=stream), end if may else b"}")
                assert status == (200 if may else 403)
                if not may:
                    expected = [line for line in expected if line != b"Vary: Accept"]
                assert [line.lower() for line in lines] == [line.lower() for line in expected], (more, origin, stream)
        missing = [line for line in allowed if line != b"Vary: Accept"]
        for status, data in (
            (404, post(model="none")),
            (200, head_of(b"GET", b"/v1/models")),
            (404, head_of(b"GET", b"/v1/models/none")),
            (405, head_of(b"PUT", b"/v1/chat/completions")),
        ):
            client = await connect(gateway_port)
            end = b"0\r\n\r\n" if status == 200 and more else b"}"
            assert await lines_of(client, data, end) == (status if more else 403, missing)
    assert not [name for head, _ in upstream.requests for name, _ in head.headers if name in (b"origin", b"cookie")]


async def test_a_refusal_of_a_head_can_be_read_by_its_page(gateway_to, connect):
    """A page is told that its key is wrong, or its body too large; what follows on the connection is judged anew."""
    port = await gateway_to({}, LISTED + WITH_KEYS + "[limits]\nbody_bytes_max = 65536\n")
    for data, status in (
        (head_of(b"POST", b"/v1/completions"), 401),
        (head_of(b"POST", b"/v1/completions", length=65537, authorization=b"Bearer " + KEY.encode()), 413),
    ):
        client = await connect(port)
        found, lines = await lines_of(client, data)
        assert (found, lines[0]) == (status, b"access-control-allow-origin: " + PAGE)
    client = await connect(port)
    assert (await lines_of(client, post()))[1]
    await client.send(b"x\r\n\r\n")
    received = await client.everything()
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"access-control-" not in received


async def test_a_stream_that_is_kept_alive_can_be_read(serve, gateway_to, connect):
    """The head that comes with the first comment names the origin as well."""

    async def silent(stream, head, body):
        await trio.sleep_forever()

    _, port = await serve(silent)
    client = await connect(await gateway_to({"m": port}, LISTED + "[timeouts]\nsse_keepalive_s = 0.05\n"))
    status, lines = await lines_of(client, post(stream=True), b": keep-alive\n\n\r\n")
    assert (status, lines[0]) == (200, b"access-control-allow-origin: " + PAGE)


@pytest.mark.parametrize("more", [LISTED, ALL])
@pytest.mark.parametrize("origin", [PAGE, b"http://localhost:3000"])
async def test_the_control_plane_is_closed_to_pages(gateway_to, connect, more, origin):
    """Nobody's page gets leave to ask for a route of operators or workers, or to read one: whatever is configured."""
    port = await gateway_to({}, more)
    routes = [(method, re.sub(r"<.*?>", "x", path)) for (method, path) in ROUTES if "/v1/models" not in path]
    routes += [("POST", path.decode()) for path in CHANGES_MODELS]
    routes += [("POST", "/v1/admin/"), ("POST", "/v1/logs/"), ("POST", "/v1/load_lora_adapter/")]
    for method, path in routes:
        for ask in (b"POST", b"GET", b"DELETE"):
            client = await connect(port)
            await client.send(preflight(path.encode(), origin, ask))
            status, headers, _ = await client.response(b"OPTIONS")
            assert status != 204
            assert not [name for name in headers if name.startswith(b"access-control-")], path
        if method == "GET" and "/logs/" not in path and path != "/v1/admin/events":  # which do not end
            client = await connect(port)
            await client.send(head_of(b"GET", path.encode(), origin))
            _, headers, _ = await client.response(b"GET")
            assert not [name for name in headers if name.startswith(b"access-control-")], path


async def test_a_page_that_is_listed_is_not_here(gateway_to, connect):
    """A page of a listed origin that is opened on this machine may use models; it changes nothing, and reads nothing."""
    port = await gateway_to({}, LISTED)
    reload = b"/v1/admin/config/reload"
    client = await connect(port)
    await client.send(head_of(b"POST", reload))
    status, headers, body = await client.response()
    assert (status, code_of(body)) == (401, "invalid_api_key")
    assert b"access-control-allow-origin" not in headers
    await client.stream.aclose()
    client = await connect(port)
    await client.send(head_of(b"GET", b"/v1/admin/workers"))
    assert (await client.response(b"GET"))[0] == 401
    await client.send(head_of(b"GET", b"/v1/admin/workers", b""))
    assert (await client.response(b"GET"))[0] == 200
    client = await connect(port)
    await client.send(head_of(b"POST", reload, b"", authorization=b"Bearer " + OWN_SECRET.encode()))
    assert (await client.response())[0] == 409, "there is no file: but it was let in"


async def test_a_preflight_of_an_unlisted_origin_is_403_with_a_reason(gateway_to, connect):
    """A preflight from an origin that is not listed is a 403 with a sentence, and allows nothing."""
    client = await connect(await gateway_to({}, LISTED))
    for origin in (
        OTHER,
        b"null",
        b"https://chat.example:8443",
        b"http://chat.example",
        b"https://chat.example.evil.example",
    ):
        await client.send(preflight(origin=origin))
        status, headers, body = await client.response(b"OPTIONS")
        assert (status, code_of(body), headers[b"vary"]) == (403, "forbidden", b"origin")
        assert origin in body
        assert not [name for name in headers if name.startswith(b"access-control-")]


@pytest.mark.parametrize(("more", "status"), [("", 403), (WITH_KEYS, 401)])
async def test_nothing_is_open_by_default(gateway_to, connect, more, status):
    """Without `cors_origins` a preflight is a request like any other, and no answer speaks of origins."""
    client = await connect(await gateway_to({}, more))
    await client.send(preflight())
    found, headers, _ = await client.response(b"OPTIONS")
    assert found == status
    assert not [name for name in headers if name.startswith(b"access-control-") or name == b"vary"]


@pytest.mark.parametrize(
    "data",
    [
        head_of(b"OPTIONS", b"/v1/completions"),
        head_of(b"OPTIONS", b"/v1/completions", b"", access_control_request_method=b"POST"),
        preflight(origin=PAGE + b"\r\nOrigin: " + PAGE),
    ],
    ids=["no method", "no origin", "two origins"],
)
async def test_options_that_are_no_preflight_need_a_key(gateway_to, connect, data):
    """Only a browser's question is answered without a key."""
    client = await connect(await gateway_to({}, LISTED + WITH_KEYS))
    await client.send(data)
    assert (await client.response(b"OPTIONS"))[0] == 401


async def test_a_preflight_has_no_body(gateway_to, connect):
    """Who has no key cannot have a body read by calling it a preflight."""
    client = await connect(await gateway_to({}, ALL + WITH_KEYS))
    await client.send(head_of(b"OPTIONS", b"/v1/completions", length=1000, access_control_request_method=b"POST"))
    assert (await client.response(b"OPTIONS"))[0] == 401, "before any of it has come"


@pytest.mark.parametrize(
    "origin",
    ["", "null", "chat.example", "https://chat.example/", "https://chat.example/app", "https://Chat.example",
     "https://chat.example:443", "http://chat.example:80", "https://*.example", "https://a@b.example", "https://a b", "**"],
)  # fmt: skip
def test_an_origin_that_could_never_match_is_a_configuration_error(origin):
    """An origin that could never match is a mistake in the configuration, with a sentence."""
    with pytest.raises(Exit, match=r"server_settings.cors_origins: .* is neither .* such as"):
        configuration.parse(f"[server_settings]\ncors_origins = [{json.dumps(origin)}]\n", "test.toml")


def test_origins_of_browsers_are_accepted():
    """Pages of the web, of this machine, of addresses, and of programs that have pages."""
    right = ["*", "https://chat.example", "http://localhost:3000", "http://[::1]:8080", "https://10.0.0.1:8443",
             "https://xn--bcher-kva.example", "chrome-extension://abcdefgh", "tauri://localhost", "http://x:443"]  # fmt: skip
    config = configuration.parse(f"[server_settings]\ncors_origins = {json.dumps(right)}\n", "test.toml")
    assert config.server_settings.cors_origins == right


async def test_allowing_all_origins_without_keys_is_warned_of(gateway_to, caplog):
    """Any page of the web could use the models; with keys, or with named origins, there is nothing to warn of."""
    for more, warned in ((ALL, True), (ALL + WITH_KEYS, False), (LISTED, False)):
        caplog.clear()
        await gateway_to({}, more)
        assert ("ANY PAGE" in caplog.text) == warned
