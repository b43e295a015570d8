"""Who may do what: the whole table, with real requests to every route there is."""

import contextlib
import json
import operator
import os
import pathlib
import re
import socket
import types

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from support.peers import AS_OWN, OWN_SECRET, Client, code_of, plain
from support.programs import LIMIT_S, ichat

from ichat.admin.app import make_app
from ichat.admin.openapi import document
from ichat.config.schema import Key, Security
from ichat.errors import ApiError, Exit
from ichat.http.heads import RequestHead
from ichat.listeners import Listeners
from ichat.roles import gateway
from ichat.roles.worker_options import read_command_line
from ichat.roles.worker_server import WorkerServer
from ichat.security.addresses import address_in, sender_of
from ichat.security.auth import CALLERS_MAX, Auth, Caller, encode_caller
from ichat.security.keys import hand_over, hash_of, new_key, proof_of, take_token
from ichat.security.lookups import HostLookups
from ichat.security.rules import ROUTES

DATA, ADMIN, TOKEN = "sk-data-0123456789", "sk-admin-0123456789", "sk-token-0123456789"
KEYS = {"no key": "", "own secret": OWN_SECRET, "data key": DATA, "admin key": ADMIN, "worker token": TOKEN}
ELSEWHERE = "203.0.113.9"
PROXY = '[security]\ntrusted_proxies = ["127.0.0.2"]\n'
ALL = (
    PROXY
    + f"""admin_key_env = "T_ADMIN"
join_token_env = "T_TOKEN"
[[security.keys]]
name = "a"
key_hash = "{hash_of(DATA)}"
"""
)
CONFIGURED = {
    "No keys": PROXY,
    "Only clients' keys": PROXY + f'[[security.keys]]\nname = "a"\nkey_hash = "{hash_of(DATA)}"\n',
    "All three kinds": ALL,
}
LOADING = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
PLACES = {"here": "", "elsewhere": f"X-Forwarded-For: {ELSEWHERE}\r\n"}
DOCUMENT = pathlib.Path(__file__).parents[2] / "SECURITY.md"
MARKS = ("<!-- authorisation -->\n", "<!-- /authorisation -->\n")


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("T_ADMIN", ADMIN)
    monkeypatch.setenv("T_TOKEN", TOKEN)


async def hello(stream, head, body):
    await stream.send_all(plain(b'{"hello": 1}'))


def rules_of_the_application():
    """Return every route of the real application, as method and path."""
    for rule in make_app({}).url_map.iter_rules():
        if rule.endpoint != "static":
            yield from ((method, rule.rule) for method in sorted(rule.methods - {"HEAD", "OPTIONS"}))


def routes_of_the_control_plane():
    """Return every route as method, path, and path as the document shows it, in the document's order."""
    text = DOCUMENT.read_text()
    routes = [(method, path, re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", path)) for method, path in ROUTES]
    places = {route: text.find(f"| {route[0]} {route[2]} |") for route in routes}
    return sorted(routes, key=lambda route: (places[route] < 0, places[route]))


def routes_of_models():
    control = {re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", path) for _, path in ROUTES}
    return [path for path in document()["paths"] if path not in control]


def test_every_route_has_a_rule():
    """A route that somebody adds is refused to everybody until it is said who may use it; no rule is left over."""
    assert set(rules_of_the_application()) == {route for route, rule in ROUTES.items() if rule != "open"}


@pytest.fixture
async def connect_from():
    """Open a client on this machine, or as the trusted proxy: `client = await connect_from("elsewhere", port)`."""
    async with contextlib.AsyncExitStack() as stack:

        async def open_(place, port):
            address = {"here": "127.0.0.1", "elsewhere": "127.0.0.2"}[place]
            stream = await trio.open_tcp_stream("127.0.0.1", port, local_address=address)
            return Client(await stack.enter_async_context(stream))

        yield open_


async def ask(client, method, path, key="", place="here", body=b"{}"):
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{PLACES[place]}content-length: {len(body)}\r\n"
    head += "content-type: application/json\r\n"
    head += f"Authorization: Bearer {key}\r\n" if key else ""
    await client.send(head.encode() + b"\r\n" + body)
    return await client.response(method.encode())


async def outcomes(connect_from, port, method, path, body=b"{}"):
    """Return what becomes of a request, for each key and place: `yes` where it is let in, else the status."""
    found = []
    for place in PLACES:
        for name, key in KEYS.items():
            client = await connect_from(place, port)
            status, headers, answer = await ask(client, method, path, key, place, body)
            if status in (401, 403):
                assert code_of(answer) == {401: "invalid_api_key", 403: "forbidden"}[status]
                assert (headers.get(b"www-authenticate") == b"Bearer") == (status == 401)
            found.append(str(status) if status in (401, 403) else "yes")
            assert status < 500 or code_of(answer) in ("upstream_unreachable", "model_not_ready"), (name, answer)
            await client.stream.aclose()
    return found


async def tables(serve, gateway_to, connect_from):
    """Measure the whole table, and write it."""
    _, upstream = await serve(hello)
    text = []
    for title, more in CONFIGURED.items():
        port = await gateway_to({"m": upstream}, more)
        columns = [f"{key}, {place}" for place in PLACES for key in KEYS]
        text += [f"**{title} configured**", "", f"| route | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for name, paths in (("every route of models", routes_of_models()), ("/v1/(un)load_lora_adapter", LOADING)):
            found = {tuple(await outcomes(connect_from, port, "POST", path, b'{"model": "m"}')) for path in paths}
            assert len(found) == 1, "all of them are alike"
            text.append(f"| POST {name} | {' | '.join(found.pop())} |")
        for method, path, shown in routes_of_the_control_plane():
            asked = re.sub(r"{\w+}", "x", shown) + ("?follow=false" if "/logs/" in path else "")
            asked += "?requests=perhaps" if path.endswith("/events") else ""  # whoever is let in need not follow
            text.append(f"| {method} {shown} | {' | '.join(await outcomes(connect_from, port, method, asked))} |")
        text.append("")
    return "\n".join(text) + "\n"


async def test_the_table_of_the_document_is_what_happens(serve, gateway_to, connect_from):
    """Every route x every kind of key x here and elsewhere: what SECURITY.md says is what real requests get."""
    found = await tables(serve, gateway_to, connect_from)
    document_ = DOCUMENT.read_text()
    before, start, rest = document_.partition(MARKS[0])
    written, end, after = rest.partition(MARKS[1])
    assert start
    assert end
    if os.environ.get("ICHAT_WRITE_TABLES"):
        DOCUMENT.write_text(before + start + "\n" + found + end + after)
    else:
        assert written.strip() == found.strip()


# Keys.


async def test_a_key_opens_its_models_and_no_others(serve, gateway_to, connect):
    """403 for another model, whether it exists or not; the list has the key's own; a 404 names no other."""
    _, port = await serve(hello)
    more = f"""[security]
[[security.keys]]
name = "some"
key_hash = "{hash_of(DATA)}"
models = ["m", "gone"]
[[security.keys]]
name = "all"
key_env = "T_ADMIN"
"""
    client = await connect(await gateway_to({"m": port, "secret": port}, more))
    results = {}
    for model in ("m", "secret", "nothing", "gone"):
        body = json.dumps({"model": model}).encode()
        status, _, answer = await ask(client, "POST", "/v1/chat/completions", DATA, body=body)
        results[model] = status
        assert b"secret" not in answer or model == "secret"
    assert results == {"m": 200, "secret": 403, "nothing": 403, "gone": 404}
    for key, names in ((DATA, ["m"]), (ADMIN, ["m", "secret"])):
        _, _, answer = await ask(client, "GET", "/v1/models", key)
        assert [one["id"] for one in json.loads(answer)["data"]] == names
    assert (await ask(client, "GET", "/v1/models/secret", DATA))[0] == 404


@pytest.mark.parametrize("header", ["Authorization: Bearer", "authorization: bearer", "x-api-key:", "api-key:"])
async def test_a_key_may_come_in_every_usual_way(serve, gateway_to, connect, header):
    """As OpenAI's clients send it, Anthropic's, and Azure's."""
    _, port = await serve(hello)
    client = await connect(await gateway_to({"m": port}, ALL))
    body = b'{"model": "m"}'
    head = f"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\n{header} {DATA}\r\ncontent-length: {len(body)}\r\n\r\n"
    await client.send(head.encode() + body)
    assert (await client.response())[0] == 200


async def test_no_key_of_the_gateways_goes_any_further(serve, gateway_to, connect):
    """Neither a client's key, nor the operators', nor anything internal, nor who the client is, reaches an upstream."""
    upstream, port = await serve(hello)
    for more, key in ((ALL, DATA), ('[security]\nadmin_key_env = "T_ADMIN"\n', ADMIN)):
        client = await connect(await gateway_to({"m": port}, more))
        body = b'{"model": "m"}'
        await client.send(
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nX-Api-Key: {key}\r\n"
            "X-Ichat-Token: forged\r\nX-Ichat-Caller: admin here  \r\nX-ICHAT-Anything: 1\r\nX-Forwarded-For: 10.1.1.1\r\n"
            f"Forwarded: for=10.1.1.1\r\nX-Mine: kept\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        assert (await client.response())[0] == 200
        head, _ = upstream.requests.pop()
        names = {name for name, _ in head.headers}
        assert b"x-mine" in names
        internal = {name for name in names if name.startswith(b"x-ichat")}
        assert internal == {b"x-ichat-hop"}, "which a client may as well send: it only shortens its own way"
        assert not [name for name in names if b"forwarded" in name or b"auth" in name]
        assert b"x-api-key" not in names


async def test_a_clients_header_changes_no_identity(gateway_to, connect):
    """What the gateway tells the control plane cannot be told by a client."""
    client = await connect(await gateway_to({}, ALL))
    await client.send(b"GET /v1/admin/workers HTTP/1.1\r\nHost: localhost\r\nx-ichat-caller: admin here  \r\n\r\n")
    assert (await client.response(b"GET"))[0] == 401


@pytest.mark.parametrize("header", [b"", b"x-ichat-caller: admin here  127.0.0.1 any -\r\n"])
async def test_a_process_on_the_control_socket_is_a_worker_and_no_operator(gateway_to, tmp_path, header):
    """It may send heartbeats, whatever it says of itself: it has not the gateway's signature."""
    await gateway_to({}, f'state_directory = "{tmp_path}/state"\n{ALL}')
    client = Client(await trio.open_unix_socket(f"{tmp_path}/state/control"))
    for path in (b"/v1/admin/workers", b"/v1/models"):
        await client.send(b"GET %b HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % (path, header))
        assert (await client.response(b"GET"))[0] == 403
    await client.send(b"POST /v1/workers/heartbeat HTTP/1.1\r\nHost: localhost\r\ncontent-length: 2\r\n\r\n{}")
    assert (await client.response())[0] == 400
    await client.stream.aclose()


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/admin/workers/launch", "/register", "/v1/load_lora_adapter", "/v1/load_lora_adapter/"],
)
@pytest.mark.parametrize("length", ["content-length: 100000000", "transfer-encoding: chunked"])
async def test_a_body_without_a_key_is_not_read(gateway_to, connect, path, length):
    """Who has no key is told so before the body is there: nobody fills the memory from outside."""
    client = await connect(await gateway_to({}, ALL))
    await client.send(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n".encode())
    status, _, body = await client.response()
    assert (status, code_of(body)) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("length", "status", "code"),
    [("content-length: 100000000", 413, "request_too_large"), ("transfer-encoding: chunked", 411, "length_required")],
)
async def test_the_control_plane_takes_small_bodies(gateway_to, connect, length, status, code):
    """Of a length that is known before they come."""
    client = await connect(await gateway_to({}))
    await client.send(
        b"POST /register HTTP/1.1\r\nHost: localhost\r\ncontent-type: application/json\r\n%b%b\r\n\r\n"
        % (AS_OWN, length.encode())
    )
    found, _, body = await client.response()
    assert (found, code_of(body)) == (status, code)


@pytest.mark.parametrize(
    ("security", "sentence"),
    [
        ('admin_key_env = "T_NONE"', "security.admin_key_env: the environment has no usable key in T_NONE"),
        ('join_token_env = "T_SHORT"', "at least 16 printable characters"),
        ('admin_key_env = "T_ADMIN"\njoin_token_env = "T_ADMIN"', "the same key is given for two things"),
        ('[[security.keys]]\nname = "a"', "security.keys[0]: needs either key_hash or key_env"),
        ('[[security.keys]]\nname = "a"\nkey_hash = "md5:1"', "`./ichat.pyz key` makes a key and its hash"),
        ('trusted_proxies = ["x"]', "'x' is no address or network"),
    ],
)
def test_a_wrong_key_is_one_sentence(tmp_path, monkeypatch, security, sentence):
    """--check finds it, and says what to do."""
    monkeypatch.setenv("T_SHORT", "short")
    path = tmp_path / "ichat.toml"
    path.write_text(f"[security]\n{security}\n")
    with pytest.raises(Exit, match=re.escape(sentence)) as refusal:
        gateway.read_command_line(["-c", str(path), "--check"])
    assert refusal.value.code == 64


# Where somebody is.


def caller_of(security, headers, peer="127.0.0.1:1", version=b"1.1"):
    given = [(name.lower().encode(), value.encode()) for name, value in headers]
    return Auth(security).caller(RequestHead(b"GET", b"/", version, given, 0), peer)


@pytest.mark.parametrize(
    ("headers", "peer", "is_here"),
    [
        ({"Host": "localhost:4000"}, "127.0.0.1:1", True),
        ({"Host": "127.0.0.1"}, "127.0.0.1:1", True),
        ({"Host": "[::1]:4000"}, "::1:1", True),
        ({"Host": "localhost"}, "::ffff:127.0.0.1:1", True),
        ({"Host": "localhost"}, "10.0.0.1:1", False),
        ({"Host": "evil.example"}, "127.0.0.1:1", False),  # a name that somebody else lets point here
        ({"Host": "localhost.evil.example"}, "127.0.0.1:1", False),
        ({}, "127.0.0.1:1", False),
        ({"Host": "localhost", "X-Forwarded-For": "10.0.0.1"}, "127.0.0.1:1", False),  # a proxy that nobody told of
        ({"Host": "localhost", "X-Forwarded-For": "127.0.0.1"}, "127.0.0.1:1", False),
        ({"Host": "localhost", "Forwarded": "for=127.0.0.1"}, "127.0.0.1:1", False),
        ({"Host": "localhost", "Via": "1.1 somebody"}, "127.0.0.1:1", False),
        ({"Host": socket.gethostname()}, "127.0.0.1:1", True),
        ({"Host": "localhost", "Origin": "https://evil.example"}, "127.0.0.1:1", False),  # a page in a browser
        ({"Host": "localhost", "Origin": "null"}, "127.0.0.1:1", False),
        ({"Host": "localhost", "Origin": "http://localhost.evil.example"}, "127.0.0.1:1", False),
        ({"Host": "localhost:4000", "Origin": "http://localhost:4000"}, "127.0.0.1:1", True),
        ({"Host": "localhost:4000", "Origin": "https://localhost:4000"}, "127.0.0.1:1", False),
        ({"Host": "localhost:4000", "Origin": "http://127.0.0.1:4000"}, "127.0.0.1:1", False),
        ({"Host": "localhost", "Origin": "http://localhost:3000"}, "127.0.0.1:1", False),  # a page of another port
        ({"Host": "10.0.0.5:4000"}, "127.0.0.1:1", False),  # what a container's port driver passes on
        ({"Host": "localhost", "CF-Connecting-IP": "203.0.113.9"}, "127.0.0.1:1", False),
        ({"Host": "localhost", "Origin": "http://10.0.0.1"}, "127.0.0.1:1", False),
        ({"Host": "localhost", "Sec-Fetch-Site": "cross-site"}, "127.0.0.1:1", False),  # a picture of a page elsewhere
        ({"Host": "localhost", "Sec-Fetch-Site": "same-site"}, "127.0.0.1:1", False),
        ({"Host": "localhost", "Sec-Fetch-Site": "same-origin"}, "127.0.0.1:1", True),
        ({"Host": "localhost", "Sec-Fetch-Site": "none"}, "127.0.0.1:1", True),  # typed by the user
        ({"Host": "localhost", "Sec-Fetch-Site": "cross-site", "Origin": "http://localhost"}, "127.0.0.1:1", False),
    ],
)
def test_only_direct_local_connections_count_as_local(headers, peer, is_here):
    """Neither a proxy, nor a page in a browser of this machine, nor a name that leads here counts as being here."""
    assert caller_of(Security(), headers.items(), peer).is_local is is_here


def test_a_local_proxy_makes_its_clients_no_operators():
    """What speaks HTTP/1.0 is a proxy, as nginx is by default; where clients have keys, nobody is an operator without."""
    headers = [("Host", "127.0.0.1:4000")]
    assert caller_of(Security(), headers).is_local
    assert not caller_of(Security(), headers, version=b"1.0").is_local
    assert not caller_of(Security(keys=[Key("a", key_hash=hash_of(DATA))]), headers).is_local
    for proxies in (["127.0.0.1"], ["10.0.0.0/8", "127.0.0.0/8"]):
        for more in ([], [("X-Forwarded-For", "127.0.0.1")], [("X-Forwarded-For", "::1%x y")]):
            assert not caller_of(Security(trusted_proxies=proxies), headers + more).is_local
            assert not caller_of(Security(trusted_proxies=proxies), headers + more, "10.1.1.1:1").is_local


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("10.0.0.1:1", ["1.1.1.1"], "10.0.0.1"),  # not a proxy of ours: what it says means nothing
        ("192.168.1.1:1", ["1.1.1.1"], "1.1.1.1"),
        ("192.168.1.1:1", ["6.6.6.6, 1.1.1.1"], "1.1.1.1"),  # what the client itself claims stands before
        ("192.168.1.1:1", ["6.6.6.6", "1.1.1.1, 192.168.1.2"], "1.1.1.1"),
        ("192.168.1.1:1", ["192.168.1.9"], "invalid"),
        ("192.168.1.1:1", ["fe80::1%eth0"], "invalid"),
        ("192.168.1.1:1", ["1.1.1.1:5555"], "1.1.1.1"),
        ("192.168.1.1:1", ["[2001:db8::1]:80"], "2001:db8::1"),
        ("192.168.1.1:1", [""], "invalid"),
        ("192.168.1.1:1", ["_hidden"], "invalid"),
        ("192.168.1.1:1", ["::ffff:127.0.0.1"], "127.0.0.1"),
    ],
)
def test_forwarded_addresses_are_believed_from_trusted_proxies_only(peer, forwarded, address):
    """The last address that no trusted proxy has is the client's."""
    security = Security(trusted_proxies=["192.168.0.0/16"])
    caller = caller_of(security, [("X-Forwarded-For", value) for value in forwarded], peer)
    assert caller.address == address
    assert not caller.is_local


def test_addresses_in_every_form():
    """Zones and ports do not make another address; IPv4 in IPv6's clothes is IPv4."""
    assert [address_in(peer) for peer in ("1.2.3.4:5", "::1:5", "fe80::1%eth0:5", "::ffff:1.2.3.4:5", "unix")] == [
        "1.2.3.4", "::1", "fe80::1", "1.2.3.4", "",
    ]  # fmt: skip


# Workers.


@pytest.mark.parametrize(
    ("host", "peer", "networks", "accepted"),
    [
        ("10.0.0.7", "10.0.0.7", [], "10.0.0.7"),
        ("10.0.0.8", "10.0.0.7", [], None),
        ("127.0.0.1", "10.0.0.7", [], None),  # the gateway itself
        ("::1", "10.0.0.7", [], None),
        ("localhost", "10.0.0.7", [], None),
        ("::ffff:127.0.0.1", "10.0.0.7", [], None),
        ("0.0.0.0", "10.0.0.7", ["0.0.0.0/0"], None),
        ("169.254.169.254", "10.0.0.7", ["0.0.0.0/0"], None),  # where clouds keep their secrets
        ("169.254.169.254", "10.0.0.7", ["169.254.0.0/16"], "169.254.169.254"),
        ("10.0.0.8", "10.0.0.7", ["10.0.0.0/24"], "10.0.0.8"),
        ("127.0.0.1", "127.0.0.1", [], "127.0.0.1"),
        ("localhost", "127.0.0.1", [], "127.0.0.1"),
        ("nobody.invalid", "10.0.0.7", ["0.0.0.0/0"], None),
    ],
)
async def test_a_worker_is_where_its_beats_come_from_or_where_it_may_be(host, peer, networks, accepted):
    """Nobody can have the gateway send requests to what only the gateway reaches."""
    auth = Auth(Security(worker_networks=networks))
    caller = Caller("worker", peer, is_local=False)
    if accepted is None:
        with pytest.raises(ApiError, match="is not accepted") as refusal:
            auth.check_worker(host, await HostLookups().addresses_of(host, peer), caller)
        assert refusal.value.code == "forbidden"
    else:
        found = await HostLookups().addresses_of(host, peer)
        assert auth.check_worker(host, found, caller) in (accepted, "::1")


def test_a_proxy_without_trust_is_no_place_for_workers():
    """Its address says nothing of who speaks through it: what it relays may name no address but the allowed ones."""
    auth = Auth(Security(worker_networks=["10.0.0.0/24"]))
    head = RequestHead(b"POST", b"/register", b"1.1", [(b"host", b"gw"), (b"x-forwarded-for", b"10.0.0.7")], 2)
    caller = auth.decode_caller(encode_caller(auth.caller(head, "127.0.0.1:5")).decode())
    with pytest.raises(ApiError, match=r"arrived through a proxy at 127.0.0.1. Name that in security.trusted_proxies"):
        auth.check_worker("127.0.0.1", ["127.0.0.1"], caller)
    assert auth.check_worker("10.0.0.7", ["10.0.0.7"], caller) == "10.0.0.7"


def test_a_key_that_is_withdrawn_on_the_way_is_none():
    """The front door let its request in, and the control plane knows it no longer: it is not a key for everything."""
    limited, other = Key("a", key_hash=hash_of(DATA), models=["m"]), Key("b", key_hash=hash_of(TOKEN))
    head = RequestHead(b"GET", b"/v1/models", b"1.1", [(b"x-api-key", DATA.encode())], 0)
    caller = encode_caller(Auth(Security(keys=[limited, other])).caller(head, "10.0.0.1:5")).decode()
    after = Auth(Security(keys=[other]))
    with pytest.raises(ApiError) as refusal:
        after.check("models", after.decode_caller(caller))
    assert refusal.value.status == 401


def test_of_several_keys_the_known_one_counts():
    """A key of the gateway in a second header is one that nobody else may see."""
    auth = Auth(Security(admin_key_hash=hash_of(ADMIN)))
    for first, second in ((DATA, ADMIN), (ADMIN, DATA), ("", ADMIN)):
        headers = [(b"host", b"gw"), (b"authorization", f"Bearer {first}".encode()), (b"x-api-key", second.encode())]
        assert auth.caller(RequestHead(b"GET", b"/", b"1.1", headers, 0), "10.0.0.7:5").kind == "admin"
    assert auth.caller(RequestHead(b"GET", b"/", b"1.1", [(b"api-key", b"x")], 0), "10.0.0.7:5").kind == "invalid"


def test_a_remembered_client_is_no_one_else():
    """What is known of a client's key holds for the same key and address alone, and where nothing else was sent."""
    keys = [Key(name, key_hash=hash_of(key)) for name, key in (("a", DATA), ("b", TOKEN))]
    auth = Auth(Security(keys=keys, admin_key_hash=hash_of(ADMIN), trusted_proxies=["127.0.0.2"]))

    def caller(key, *more, peer="10.0.0.7:5"):
        headers = [(b"host", b"gw"), (b"authorization", b"Bearer " + key.encode()), *more]
        return auth.caller(RequestHead(b"POST", b"/v1/completions", b"1.1", headers, 0), peer)

    known = caller(DATA)
    assert caller(DATA, peer="10.0.0.7:6") is known
    assert (known.kind, known.key_name, known.address) == ("data", "a", "10.0.0.7")
    assert caller(DATA, peer="10.0.0.8:5").address == "10.0.0.8"
    assert caller(TOKEN).key_name == "b"
    assert caller(ADMIN).kind == "admin"
    assert caller(DATA + "x").kind == "invalid"
    assert caller("x", (b"authorization", b"Bearer " + ADMIN.encode())).kind == "admin"
    assert caller("x", (b"x-api-key", DATA.encode())).key_name == "a"
    assert caller(DATA, (b"x-forwarded-for", b"1.2.3.4")).is_relayed
    assert caller(DATA, (b"x-forwarded-for", b"1.2.3.4"), peer="127.0.0.2:5").address == "1.2.3.4"
    assert caller(DATA) is known


HEADERS = st.sampled_from((
    *((b"host", host) for host in (b"localhost:4000", b"127.0.0.1", b"gw.example:4000", b"h" * 600)),
    *((b"authorization", b"Bearer " + key.encode()) for key in ("", DATA, ADMIN, TOKEN, "sk-other")),
    (b"authorization", b"localhost:4000"),
    (b"x-api-key", ADMIN.encode()),
    *((b"origin", origin) for origin in (b"http://localhost:4000", b"https://elsewhere.example", b"null")),
    *((b"sec-fetch-site", site) for site in (b"same-origin", b"cross-site")),
    (b"x-forwarded-for", b"203.0.113.9"),
    (b"forwarded", b"for=203.0.113.9"),
    (b"accept", b"*/*"),
))  # fmt: skip
HEADS = st.tuples(
    st.lists(HEADERS, max_size=5),
    st.sampled_from((b"1.0", b"1.1")),
    st.sampled_from(("127.0.0.1:5", "127.0.0.2:5", "[::1]:5", "10.0.0.7:5")),
)


@pytest.mark.parametrize("which", CONFIGURED)
@given(heads=st.lists(HEADS, min_size=1, max_size=12))
def test_a_callers_rights_do_not_depend_on_earlier_callers(which, heads):
    """Whoever is remembered, each is taken for who it would be if nobody had come before."""
    security = {
        "No keys": Security(trusted_proxies=["127.0.0.2"]),
        "Only clients' keys": Security(trusted_proxies=["127.0.0.2"], keys=[Key("a", key_hash=hash_of(DATA))]),
        "All three kinds": Security(
            keys=[Key("a", key_hash=hash_of(DATA))],
            admin_key_hash=hash_of(ADMIN),
            join_token_env="T_TOKEN",
            trusted_proxies=["127.0.0.2"],
        ),
    }[which]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("T_TOKEN", TOKEN)
        auth = Auth(security)
        for headers, version, peer in heads * 2:
            head = RequestHead(b"POST", b"/v1/completions", version, headers, 0)
            callers = auth.caller(head, peer), auth.caller_by(sender_of(head, peer)), Auth(security).caller(head, peer)
            facts = operator.attrgetter("kind", "address", "is_local", "key_name", "is_relayed")
            assert len(set(map(facts, callers))) == 1


def test_callers_without_a_key_are_cached_within_a_bound():
    """A client that needs no key is found again, also with one that is not known, but not by a long `Host`."""
    auth = Auth(Security())

    def caller(host, *more):
        return auth.caller(RequestHead(b"POST", b"/", b"1.1", [(b"host", host), *more], 0), "127.0.0.1:5")

    key = (b"authorization", b"Bearer sk-none")
    assert caller(b"localhost") is caller(b"localhost")
    assert caller(b"localhost", key) is caller(b"localhost", key) is not caller(b"localhost")
    assert caller(b"h" * 513) is not caller(b"h" * 513)
    assert caller(b"localhost", (b"origin", b"http://e.example")).is_local is False
    for number in range(2 * CALLERS_MAX):
        caller(b"%d.example" % number)
    assert len(auth._callers) <= CALLERS_MAX


def heartbeat(**more):
    known = {"worker_id": "w", "model_name": "far", "host": "127.0.0.1", "port": 1, "state": "ready"}
    known["heartbeat_interval"] = 60
    return json.dumps(known | more).encode()


async def test_a_worker_joins_with_the_token_and_hears_it_with_each_request(serve, gateway_to, connect):
    """The token is asked of its beats; its requests carry it, and no client's key; without it there is no worker."""
    upstream, port = await serve(hello)
    gateway_port = await gateway_to({}, ALL)
    path = "/v1/workers/heartbeat"
    for key, status in (("", 401), (ADMIN, 403), (DATA, 403), (TOKEN, 200)):
        client = await connect(gateway_port)
        assert (await ask(client, "POST", path, key, body=heartbeat(port=port)))[0] == status
    status, _, _ = await ask(client, "POST", "/v1/completions", DATA, body=b'{"model": "far"}')
    assert status == 200
    heads = [dict(head.headers) for head, _ in upstream.posts]
    assert [head[b"x-ichat-proof"] for head in heads] == [proof_of(TOKEN.encode())]
    assert TOKEN.encode() not in b"".join(value for head, _ in upstream.requests for _, value in head.headers)
    assert b"authorization" not in heads[0]


async def test_a_worker_from_elsewhere_needs_a_token_to_be_configured(gateway_to, connect_from):
    """Without a token, only workers of the gateway's own user join."""
    port = await gateway_to({}, PROXY)
    client = await connect_from("elsewhere", port)
    status, _, body = await ask(client, "POST", "/register", "", "elsewhere", heartbeat(host=ELSEWHERE))
    assert (status, code_of(body)) == (401, "invalid_api_key")
    assert b"security.join_token_env" in body
    here = await connect_from("here", port)
    assert (await ask(here, "POST", "/register", "", body=heartbeat()))[0] == 401
    here = await connect_from("here", port)
    assert (await ask(here, "POST", "/register", OWN_SECRET, body=heartbeat()))[0] == 200


async def test_a_key_for_metrics_is_for_nothing_else(gateway_to, connect):
    """Prometheus has a key of its own, which reads figures and does nothing; the other clients' read none."""
    eyes = "sk-eyes-0123456789"
    keys = f"""[[security.keys]]\nname = "a"\nkey_hash = "{hash_of(DATA)}"
[[security.keys]]\nname = "eyes"\nkey_hash = "{hash_of(eyes)}"\nmodels = []\nmetrics = true\n"""
    port = await gateway_to({"m": 9}, keys)
    for key, expected in ((eyes, (200, 403, 403)), (DATA, (403, 502, 403))):
        for (method, path), status in zip(
            (("GET", "/metrics"), ("POST", "/v1/completions"), ("GET", "/v1/admin/workers")), expected, strict=True
        ):
            answer = await ask(await connect(port), method, path, key, body=b'{"model": "m"}')
            assert answer[0] == status, (key, path, answer)


async def test_a_worker_keeps_its_id(gateway_to, connect_from):
    """Another one that has the token cannot take it while the first is there."""
    port = await gateway_to({}, f'{PROXY}join_token_env = "T_TOKEN"\n')
    here, there = await connect_from("here", port), await connect_from("elsewhere", port)
    second = heartbeat(host=ELSEWHERE)
    assert (await ask(here, "POST", "/register", TOKEN, body=heartbeat()))[0] == 200
    assert (await ask(there, "POST", "/register", TOKEN, "elsewhere", second))[0] == 403
    assert (await ask(here, "POST", "/register", TOKEN, body=heartbeat(heartbeat_interval=0.2)))[0] == 200
    with trio.fail_after(LIMIT_S):
        while (await ask(there, "POST", "/register", TOKEN, "elsewhere", second))[0] != 200:  # noqa: ASYNC110
            await trio.sleep(0.05)


@pytest.mark.parametrize("method", ["HeAD", "get", "PUT", "patch", "TRACE", "X"])
async def test_methods_are_those_there_are(gateway_to, connect, method):
    """A name that only looks like one of them is none: who answers could take it for another than who relays it."""
    client = await connect(await gateway_to({}))
    status, headers, body = await ask(client, method, "/v1/models")
    assert (status, code_of(body), headers[b"allow"]) == (
        405,
        "method_not_allowed",
        b"DELETE, GET, HEAD, OPTIONS, PATCH, POST",
    )


async def test_a_gateway_is_not_its_own_worker(gateway_to, connect):
    """A request that goes round is refused after a few turns, with 508."""
    port = await gateway_to({})
    client = await connect(port)
    assert (await ask(client, "POST", "/register", OWN_SECRET, body=heartbeat(port=port)))[0] == 200
    status, headers, body = await ask(client, "POST", "/v1/completions", body=b'{"model": "far"}')
    assert (status, code_of(body)) == (508, "loop_detected")
    assert headers[b"x-should-retry"] == b"false"


async def test_a_worker_with_an_old_token_gets_no_requests(serve, start, tmp_path, nursery, connect):
    """With another token, workers get nothing until they have beaten with it, and never hear a token at all."""
    upstream, worker_port = await serve(hello)
    path = tmp_path / "ichat.toml"
    text = f'[server_settings]\nport = 0\nstate_directory = "{tmp_path}/s"\n[security]\njoin_token_env = "T_%s"\n'
    path.write_text(text % "TOKEN")
    program = start([*ichat("gateway", "-c"), path]).wait_for_port
    program = await trio.to_thread.run_sync(program)
    client = await connect(program.port)
    known = heartbeat(port=worker_port, heartbeat_interval=60)
    assert (await ask(client, "POST", "/register", TOKEN, body=known))[0] == 200
    assert (await ask(client, "POST", "/v1/completions", body=b'{"model": "far"}'))[0] == 200
    path.write_text(text % "ADMIN")
    with trio.fail_after(LIMIT_S):
        while (await ask(client, "POST", "/v1/completions", body=b'{"model": "far"}'))[0] != 503:  # noqa: ASYNC110
            await trio.sleep(0.05)
    assert (await ask(await connect(program.port), "POST", "/register", TOKEN, body=known))[0] == 401
    assert (await ask(client, "POST", "/register", ADMIN, body=known))[0] == 200
    assert (await ask(client, "POST", "/v1/completions", body=b'{"model": "far"}'))[0] == 200
    told = b"".join(value for head, _ in upstream.requests for _, value in head.headers)
    assert TOKEN.encode() not in told
    assert ADMIN.encode() not in told


async def test_an_upstreams_key_is_for_inference(serve, gateway_to, connect, monkeypatch):
    """With the gateway's own key for an upstream, nobody trains models or stores files there."""
    monkeypatch.setenv("THEIR_KEY", "sk-their-0123456789")
    upstream, port = await serve(hello)
    route = (
        f'[[external_routes]]\nmodel_name = "gpt"\napi_base = "http://127.0.0.1:{port}/v1"\napi_key_env = "THEIR_KEY"\n'
    )
    client = await connect(await gateway_to({}, route))
    for path, status in (
        ("/v1/fine_tuning/jobs", 404), ("/v1/files", 404), ("/v1/batches", 404), ("/v1/images/generations", 200),
        ("/v1/chat/completions", 200), ("/v1/moderations", 200), ("/chat/completions", 200),
    ):  # fmt: skip
        assert (await ask(client, "POST", path, body=b'{"model": "gpt"}'))[0] == status, path
    assert len(upstream.requests) == 4


def test_a_worker_answers_its_token_or_else_its_own_machine():
    """Everything but its health, which tells nothing."""
    options, _ = read_command_line(["--port", "1"])
    engine = types.SimpleNamespace(adapter=types.SimpleNamespace(late_usage=Listeners()))

    def outcome(token, peer, *headers, path=b"/v1/completions", method=b"POST", host=(b"host", b"127.0.0.1:8000")):
        worker = WorkerServer(options, engine, types.SimpleNamespace(admission=None, run_in_trio=print), 1, token=token)
        try:
            worker.authenticate(RequestHead(method, path, b"1.1", [host, *headers], 0), peer)
        except ApiError as refusal:
            return refusal.status
        return 200

    right, wrong = (b"x-ichat-proof", proof_of(TOKEN.encode())), (b"x-ichat-proof", proof_of(DATA.encode()))
    bearer = (b"authorization", b"bearer " + TOKEN.encode())
    table = {
        token: [outcome(token, peer, *headers) for peer in ("127.0.0.1:9", "unix", "10.0.0.1:9") for headers in ((), (wrong,), (right,), (bearer,))]
        for token in ("", TOKEN)
    }  # fmt: skip
    assert table[""] == [200, 200, 200, 200, 200, 200, 200, 200, 403, 403, 403, 403]
    assert table[TOKEN] == [401, 401, 200, 200, 200, 200, 200, 200, 401, 401, 200, 200]
    for path in (b"/logs/stream", b"/metrics", b"/flush_cache", b"/beat", b"/sleep", b"/wake"):
        assert outcome(TOKEN, "10.0.0.1:9", path=path) == 401
    assert outcome(TOKEN, "10.0.0.1:9", path=b"/health") == 401
    assert outcome(TOKEN, "10.0.0.1:9", path=b"/health", method=b"GET") == 200
    assert outcome(TOKEN, "127.0.0.1:9", host=(b"host", b"evil.example")) == 401
    assert outcome("", "127.0.0.1:9", (b"x-forwarded-for", b"1.1.1.1")) == 403
    assert outcome(TOKEN, "127.0.0.1:9", path=b"/health", method=b"GET") == 200
    for origin, statuses in (
        (b"https://evil.example", (403, 401)),
        (b"http://localhost:3000", (403, 401)),
        (b"http://127.0.0.1:8000", (200, 401)),
    ):
        page = (b"origin", origin)
        assert (outcome("", "127.0.0.1:9", page), outcome(TOKEN, "[::1]:9", page, method=b"OPTIONS")) == statuses
    assert outcome(TOKEN, "127.0.0.1:9", (b"origin", b"https://evil.example"), bearer) == 200


async def test_a_managed_workers_id_cannot_be_registered(gateway, start, tmp_path):
    """A beat over the network cannot say that it is a worker that the gateway has started."""
    program = gateway('[[managed_workers]]\nmodel_name = "m"\nmodel_path = "/m"\nbackend = "fake"\n')
    await trio.to_thread.run_sync(program.wait_until_ready, "m-0")
    forged = json.loads(heartbeat(worker_id="m-0", model_name="m", port=9))
    status, body = await trio.to_thread.run_sync(program.ask, "/v1/workers/heartbeat", forged)
    assert (status, body["error"]["code"]) == (403, "forbidden")
    assert program.get("/v1/admin/workers/m-0")[1]["port"] != 9


def test_a_token_is_handed_over_unseen():
    """A managed worker gets its token through a pipe that is empty afterwards: no file, command line or variable has it."""
    key = new_key()
    environment = {"ICHAT_JOIN_TOKEN_FD": str(hand_over(key)), "ICHAT_JOIN_TOKEN": "sk-other-0123456789", "X": "1"}
    assert take_token(environment) == key
    assert environment == {"X": "1"}
    environment = {"ICHAT_JOIN_TOKEN": key}
    assert take_token(environment) == key
    assert environment == {}
    with pytest.raises(Exit, match="16 printable characters"):
        take_token({"ICHAT_JOIN_TOKEN": "short"})


def test_a_managed_worker_has_the_token_and_shows_it_nowhere(gateway, monkeypatch):
    """Its environment, its command line and those of its children have no key of the gateway's."""
    monkeypatch.setenv("T_TEAM", "sk-team-0123456789")
    worker = '[[managed_workers]]\nmodel_name = "m"\nmodel_path = "/m"\nbackend = "fake"\n'
    keys = 'join_token_env = "T_TOKEN"\nadmin_key_env = "T_ADMIN"\n[[security.keys]]\nname = "a"\nkey_env = "T_TEAM"\n'
    program = gateway(f"{worker}[security]\n{keys}")
    program.key = ADMIN
    program.wait_until_ready("m-0")
    family = program.descendants()
    assert family
    for process in family:
        shown = " ".join(process.cmdline()) + repr(process.environ())
        assert not [key for key in (TOKEN, ADMIN, "sk-team") if key in shown]
    assert TOKEN not in program.text()


def test_a_hash_is_of_the_key():
    """What `./ichat.pyz key` prints lets its key in."""
    key = new_key()
    auth = Auth(Security(keys=[Key("a", key_hash=hash_of(key))]))
    head = RequestHead(b"GET", b"/", b"1.1", [(b"authorization", f"Bearer {key}".encode())], 0)
    caller = auth.caller(head, "1.1.1.1:1")
    assert (caller.kind, caller.fairness_key) == ("data", "a")
    assert key.startswith("sk-ichat-")
