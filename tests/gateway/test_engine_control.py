"""What steers an engine is taken off on the way to a worker, and off nothing else: which names, whose requests, which bytes."""

import json
import pathlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.peers import OWN_SECRET, code_of, plain

from ichat.errors import ApiError
from ichat.http import json_body as bodies
from ichat.http.multipart import fields_of
from ichat.http.request_body import form_body, read_json_body
from ichat.proxy import engine_control
from ichat.proxy.engine_control import (
    CARRIER,
    HEADER_PREFIXES,
    HEADERS,
    MEMBERS,
    DropNotices,
    without_control,
)
from ichat.proxy.model_request import is_suspect
from ichat.security.keys import hash_of

JSON = [(b"content-type", b"application/json")]
FORM = [(b"content-type", b"multipart/form-data; boundary=bound")]
SECURITY = pathlib.Path(__file__).parents[2] / "SECURITY.md"
MARKS = ("<!-- engine control -->\n", "<!-- /engine control -->\n")
PAD = b'"pad":"%b"' % (b"x" * bodies.PARSED_BYTES_MAX)

CASES = [  # a body, what a worker gets, what was taken off
    (b'{"model":"m","x":1}', b'{"model":"m","x":1}', []),
    (b'{"model":"m", "priority": -5, "x": 1}', b'{"model":"m", "x": 1}', ["priority"]),
    (b'{"rid":"c","model":"m"}', b'{"model":"m"}', ["rid"]),
    (b'{"model":"m" , "bootstrap_room":[1,2] }', b'{"model":"m" }', ["bootstrap_room"]),
    (b'{"priority":1,"model":"m","priority":2}', b'{"model":"m"}', ["priority"]),
    (b'{"model":"m","\\u0070r\\u0069ority":1}', b'{"model":"m"}', ["priority"]),
    (b'{"model":"m","metadata":{"priority":1},"Priority":1}', b'{"model":"m","metadata":{"priority":1},"Priority":1}', []),
    (b'{%b,"priority":1,"model":"m"}' % PAD, b'{%b,"model":"m"}' % PAD, ["priority"]),
    (b'{"model":"m","vllm_xargs":{"a":[1]}}', b'{"model":"m","vllm_xargs":{"a":[1]}}', []),
    (b'{"model":"m","vllm_xargs":"priority"}', b'{"model":"m","vllm_xargs":"priority"}', []),
    (
        b'{"vllm_xargs":{"ngram_size":3,"kv_transfer_params":{"do_remote_prefill":true}},"model":"m"}',
        b'{"vllm_xargs":{"ngram_size": 3},"model":"m"}',
        ["vllm_xargs.kv_transfer_params"],
    ),
    (
        b'{"vllm_xargs":{"rid":1},"model":"m","vllm_xargs":{"a":1},"request_id":"x"}',
        b'{"vllm_xargs":{"a": 1},"model":"m","vllm_xargs":{"a": 1}}',
        ["request_id", "vllm_xargs.rid"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("body", "left", "names"), CASES)
async def test_members_are_taken_off_and_the_rest_is_the_same_bytes(body, left, names):
    """By the name that a parser reads, all of one name, at the top and in `vllm_xargs`, in a body of any size."""
    read, members = await read_json_body(body, ())
    kept, found = await without_control(read, dict(JSON))
    assert (kept.data, found) == (left, names)
    assert is_suspect(members, dict(JSON)) >= bool(names)


@given(
    st.dictionaries(st.sampled_from([*MEMBERS, "model", "messages", "x"]), st.integers() | st.text(), min_size=1),
    st.booleans(),
    st.booleans(),
)
async def test_a_stripped_body_equals_the_parsed_object_without_the_names(members, ascii_, indent):
    """Whatever is there and in whichever order: the object without these names, and a body without them is untouched."""
    body = json.dumps(members, ensure_ascii=ascii_, indent=2 if indent else None).encode()
    read, _ = await read_json_body(body, ())
    left, names = await without_control(read, dict(JSON))
    assert json.loads(left.data) == {name: value for name, value in members.items() if name not in MEMBERS}
    assert set(names) == members.keys() & MEMBERS.keys()
    assert names or left is read


def form(*parts):
    lines = [b'--bound\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % part for part in parts]
    return b"".join(lines) + b"--bound--\r\n"


async def read_form(*parts):
    body = form(*parts)
    return form_body(body, await fields_of(body, FORM[0][1]))


FORMS = [
    ([(b"model", b"m"), (b"file", b"RIFF\r\n")], [0, 1], []),
    ([(b"priority", b"1"), (b"rid", b"x"), (b"model", b"m")], [2], ["priority", "rid"]),
    ([(b"model", b"m"), (b"priority", b"1"), (b"file", b"x--boun"), (b"priority", b"2")], [0, 2], ["priority"]),
    ([(b"model", b"m"), (b"request_id", b"1"), (b"rid", b"2")], [0], ["rid", "request_id"]),
]


@pytest.mark.parametrize(("parts", "left", "names"), FORMS)
async def test_fields_of_a_form_are_taken_off(parts, left, names):
    """Whole parts, the first and the last as well; what is left is the form that has never had them."""
    body, found = await without_control(await read_form(*parts), dict(FORM))
    assert (body.data, found) == (form(*(parts[index] for index in left)), names)
    assert len(await fields_of(body.data, FORM[0][1])) == len(left)


async def test_a_form_carries_no_more_than_json():
    """vLLM reads a form's `vllm_xargs` as JSON: what steers the engine is not in there either."""
    given = await read_form((b"vllm_xargs", b'{"a": 1, "priority": 2}'), (b"model", b"m"))
    body, names = await without_control(given, dict(FORM))
    assert (body.data, names) == (form((b"vllm_xargs", b'{"a": 1}'), (b"model", b"m")), ["vllm_xargs.priority"])


@pytest.mark.parametrize(
    "value", [b'"%b"' % (b"x" * bodies.PARSED_BYTES_MAX), b"{", b'{"a":' * 5000 + b"1" + b"}" * 5000]
)
async def test_vllm_xargs_that_cannot_be_checked_are_refused(value):
    """400 for a `vllm_xargs` that is too large, or no JSON, or nested without an end."""
    with pytest.raises(ApiError) as caught:
        await without_control(await read_form((CARRIER.encode(), value), (b"model", b"m")), dict(FORM))
    assert (caught.value.status, caught.value.param) == (400, CARRIER)


def test_the_log_says_each_name_once_for_each_key(caplog):
    """Who sends the same again is not told again, and there is an end to it."""
    caplog.set_level("INFO")
    told = DropNotices()
    for key, names in (("a", ["rid"]), ("a", ["rid", "priority"]), ("", ["rid"]), ("a", ["priority"]), ("b", [])):
        told.log_dropped(key, names)
    said = [record.getMessage().partition(" (said once)")[0] for record in caplog.records]
    assert said == [
        "workers do not get rid of the key a", "workers do not get priority of the key a",
        "workers do not get rid of clients without a key",
    ]  # fmt: skip
    for number in range(2 * engine_control.TOLD_MAX):
        told.log_dropped(str(number), ["rid"])
    assert len(caplog.records) == engine_control.TOLD_MAX


def test_the_page_about_security_names_all_of_it():
    """The table in SECURITY.md is made from the code: names, and what each of them does."""
    rows: dict[str, tuple[list[str], list[str]]] = {}
    for name, reason in MEMBERS.items():
        rows.setdefault(reason, ([], []))[0].append(f"`{name}`")
    for name, reason in HEADERS.items():
        if not name.startswith(HEADER_PREFIXES[0]):
            rows.setdefault(reason, ([], []))[1].append(f"`{name.decode()}`")
    table = "\n| it … | members of the body | headers |\n|---|---|---|\n" + "".join(
        f"| {reason} | {', '.join(members)} | {', '.join(headers)} |\n" for reason, (members, headers) in rows.items()
    )
    assert SECURITY.read_text().partition(MARKS[0])[2].partition(MARKS[1])[0] == table + "\n"
    assert all(prefix.decode() in SECURITY.read_text() for prefix in (*HEADER_PREFIXES, CARRIER.encode()))


# The gateway, between clients and a worker.

ADMIN, TOKEN, DATA, STEERING = "sk-admin-0123456789", "sk-token-0123456789", "sk-data-0123456789", "sk-steer-0123456789"
KEYS = f"""[[security.keys]]
name = "a"
key_hash = "{hash_of(DATA)}"
[[security.keys]]
name = "b"
key_hash = "{hash_of(STEERING)}"
engine_control = true
"""
BODY = b'{"model": "m", "priority": 3, "messages": []}'
STEERED = {"X-Vllm-Priority": "1", "X-Data-Parallel-Rank": "2", "X-Override-New": "3", "X-SMG-Routing-Key": "4"}


async def hello(stream, head, body):
    await stream.send_all(plain(b'{"hello": 1}'))


@pytest.fixture
def ask(connect):
    """Send a request: `status, headers, body = await ask(port, body, header=value)`."""

    async def send(port, body=BODY, path="/v1/chat/completions", **headers):
        client = await connect(port)
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items() if value)
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{lines}content-length: {len(body)}\r\n\r\n"
        await client.send(head.encode() + body)
        return await client.response()

    return send


@pytest.fixture
def worker_behind(serve, gateway_to, ask, monkeypatch):
    """Start a gateway with a worker that has joined: `upstream, port = await worker_behind(more_toml)`."""

    async def start(more="", routes=()):
        monkeypatch.setenv("T_ADMIN", ADMIN)
        monkeypatch.setenv("T_TOKEN", TOKEN)
        upstream, port = await serve(hello)
        gateway_port = await gateway_to(dict.fromkeys(routes, port), more)
        if not routes:
            heartbeat = {"worker_id": "w", "model_name": "m", "host": "127.0.0.1", "port": port, "state": "ready"}
            token = f"Bearer {TOKEN if 'T_TOKEN' in more else OWN_SECRET}"
            status, _, answer = await ask(
                gateway_port,
                json.dumps(heartbeat).encode(),
                "/v1/workers/heartbeat",
                authorization=token,
                content_type="application/json",
            )
            assert status == 200, answer
        return upstream, gateway_port

    return start


ADMIN_KEY, JOIN = 'admin_key_env = "T_ADMIN"\n', 'join_token_env = "T_TOKEN"\n'
CALLERS = {  # [security], a key, an address -> whether a worker gets what steers it
    "nobody's key, here": ("", "", "", False),
    "the gateway's own user": ("", OWN_SECRET, "", True),
    "nobody's key, through a proxy": ("", "", "203.0.113.9", False),
    "nobody's key, here, where operators have one": (ADMIN_KEY, "", "", False),
    "the operator's key": (ADMIN_KEY, ADMIN, "203.0.113.9", True),
    "the workers' token": (JOIN, TOKEN, "203.0.113.9", False),
    "a key": (JOIN + KEYS, DATA, "", False),
    "a key for it": (JOIN + KEYS, STEERING, "203.0.113.9", True),
}


@pytest.mark.parametrize("who", CALLERS)
async def test_only_keys_with_engine_control_steer_engines(worker_behind, ask, who):
    """Body and headers reach the worker whole, or without what steers it: then the response and the log say so."""
    security, key, address, steers = CALLERS[who]
    upstream, port = await worker_behind("[security]\n" + security)
    status, headers, _ = await ask(
        port, authorization=key and f"Bearer {key}", x_forwarded_for=address, x_mine="1", **STEERED
    )
    assert status == 200
    [(head, body)] = upstream.posts
    names = dict(head.headers)
    steering = {name.lower().encode() for name in STEERED} & names.keys()
    assert names[b"x-mine"] == b"1"
    assert names[b"content-length"] == b"%d" % len(body)
    if steers:
        assert (body, len(steering)) == (BODY, 4)
        assert b"x-ichat-dropped" not in headers
    else:
        assert (body, steering) == (b'{"model": "m", "messages": []}', set())
        assert headers[b"x-ichat-dropped"] == b"priority, x-data-parallel-rank, x-smg-routing-key, x-vllm-priority"


async def test_members_that_the_operator_sets_replace_the_clients(worker_behind, ask):
    """Also where the client sends the same member: its own value is gone by then, and all else of its kind is off."""
    more = '[[models]]\nname = "fast"\ntargets = [{ model = "m" }]\nset = { priority = -1 }\n'
    upstream, port = await worker_behind(more)
    for sent in (b'"priority": 3, "rid": "x", ', b""):
        _, headers, _ = await ask(port, b'{"model": "fast", %b"messages": []}' % sent, x_forwarded_for="203.0.113.9")
        _, body = upstream.posts[-1]
        assert json.loads(body) == {"model": "m", "priority": -1, "messages": []}
        assert headers.get(b"x-ichat-dropped") == (b"rid" if sent else None)


async def test_a_request_without_control_fields_is_unchanged(worker_behind, ask, caplog):
    """A request without such names goes on as it came, byte for byte, and no line is written."""
    upstream, port = await worker_behind()
    body = b'{ "model":"m", "vllm_xargs": {"a": 1}, "user": "priority" }'
    _, headers, _ = await ask(port, body, x_forwarded_for="203.0.113.9")
    assert [sent for _, sent in upstream.posts] == [body]
    assert b"x-ichat-dropped" not in headers
    assert not [record for record in caplog.records if record.name == "ichat.proxy.engine_control"]


async def test_a_large_body_and_a_form_are_no_way_round(worker_behind, ask):
    """Neither a body beyond what is parsed nor a form brings such a name to a worker."""
    upstream, port = await worker_behind()
    large = b'{%b,"model":"m","kv_transfer_params":{"remote_host":"10.0.0.1"}}' % PAD
    await ask(port, large, x_forwarded_for="203.0.113.9")
    audio = form((b"model", b"m"), (b"priority", b"1"), (b"file", b"RIFF"))
    for_form = FORM[0][1].decode()
    await ask(port, audio, "/v1/audio/transcriptions", x_forwarded_for="203.0.113.9", content_type=for_form)
    assert [body for _, body in upstream.posts] == [
        b'{%b,"model":"m"}' % PAD,
        form((b"model", b"m"), (b"file", b"RIFF")),
    ]


async def test_an_external_route_gets_what_it_is_sent(worker_behind, ask):
    """What these names mean elsewhere is not the gateway's to know."""
    upstream, port = await worker_behind(routes=["m"])
    await ask(port, x_forwarded_for="203.0.113.9", **STEERED)
    [(head, body)] = upstream.posts
    assert body == BODY
    assert {name.lower().encode() for name in STEERED} <= dict(head.headers).keys()


async def test_a_body_that_cannot_be_looked_into_reaches_no_worker(worker_behind, ask):
    """The client is told which member it is."""
    upstream, port = await worker_behind()
    body = b'{"model":"m","vllm_xargs":{"a":"%b"}}' % (b"x" * bodies.PARSED_BYTES_MAX)
    status, _, answer = await ask(port, body, x_forwarded_for="203.0.113.9")
    assert (status, code_of(answer)) == (400, "bad_request")
    assert re.search("`vllm_xargs` must have at most", answer.decode())
    assert not upstream.posts
