"""The Responses API's state: it lives in one worker, which the response's id names, and it is bounded."""

import json
import os
import re
from types import SimpleNamespace

import pydantic
import pytest
import trio
from support.peers import JSON_POST, LIMIT_S, code_of, plain, until

from ichat.engines import responses
from ichat.engines.adapter import RESPONSES_PATH, VLLM_PATHS, AdapterSettings, ProtocolAdapter
from ichat.engines.responses import ResponseStore
from ichat.engines.sglang.adapter import SGLangAdapter
from ichat.errors import ApiError
from ichat.http.json_body import PARSED_BYTES_MAX
from ichat.http.request import Request
from ichat.protocol.messages import response_tag
from ichat.protocol.responses import is_background, is_of_model, new_response_id
from ichat.security.keys import hash_of

IDS = {
    worker: f"resp_{response_tag(worker, start)}_{'0' * 32}" for worker, start in (("w1", "s"), ("w2", "s"), ("w3", ""))
}


async def tell(client, port, worker="w1", start="s", **more):
    """Beat as a worker does that listens on this port."""
    body = json.dumps({
        "worker_id": worker, "model_name": "m", "host": "127.0.0.1", "port": port, "start_id": start, **more,
    }).encode()  # fmt: skip
    await client.send(JSON_POST % (b"/v1/workers/heartbeat", len(body), body))
    status, _, answer = await client.response()
    assert status == 200, answer


async def two_workers(serve, gateway_to, connect, more=""):
    """A gateway with two workers of the model m, which answer with their names; a client of it."""

    def naming(name):
        async def reply(stream, head, body):
            await stream.send_all(plain(name))

        return reply

    client = await connect(await gateway_to({}, more))
    upstreams = {}
    for worker in ("w1", "w2"):
        upstreams[worker], port = await serve(naming(worker.encode()))
        await tell(client, port, worker)
    return client, upstreams


def asked_of(upstream):
    """Return the requests about responses that a worker got; its gateway asks for its log as well."""
    return [(head.method, head.target) for head, _ in upstream.requests if b"/responses" in head.target]


@pytest.mark.parametrize("worker", ["w1", "w2"])
async def test_everything_about_a_response_goes_to_its_worker(serve, gateway_to, connect, worker):
    """Reading, deleting, cancelling and continuing: each time the worker that the id names, by the same path."""
    client, upstreams = await two_workers(serve, gateway_to, connect)
    path = b"/v1/responses/" + IDS[worker].encode()
    asked = [(b"GET", path), (b"DELETE", path), (b"POST", path + b"/cancel"), (b"GET", path + b"?stream=true")]
    for method, target in asked:
        for _ in range(3):
            await client.send(b"%b %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % (method, target))
            status, headers, _ = await client.response(method)
            assert (status, headers[b"x-ichat-worker"]) == (200, worker.encode())
    for _ in range(3):
        answer = await client.ask(target=b"/v1/responses", previous_response_id=IDS[worker])
        assert (answer[0], answer[2]) == (200, worker.encode())
    received = asked_of(upstreams[worker])
    assert received == [one for one in asked for _ in range(3)] + [(b"POST", b"/v1/responses")] * 3
    _, _, metrics = await client.get(b"/metrics")
    assert b'route="/v1/responses/{id}"' in metrics


@pytest.mark.parametrize("response_id", [IDS["w3"], "resp_x", "x", "resp_" + "0" * 45, "a/b/c"])
async def test_an_unknown_response_is_404(serve, gateway_to, connect, response_id):
    """Also where its worker has gone, and for a request that continues it, which names the parameter."""
    client, upstreams = await two_workers(serve, gateway_to, connect)
    for method in (b"GET", b"DELETE"):
        await client.send(b"%b /v1/responses/%b HTTP/1.1\r\nhost: localhost\r\n\r\n" % (method, response_id.encode()))
        status, _, body = await client.response(method)
        assert (status, code_of(body)) == (404, "response_not_found")
    status, _, body = await client.ask(target=b"/v1/responses", previous_response_id=response_id)
    assert (status, code_of(body), json.loads(body)["error"]["param"]) == (
        404, "response_not_found", "previous_response_id",
    )  # fmt: skip
    assert not any(asked_of(upstream) for upstream in upstreams.values())


async def test_a_worker_that_was_started_again_has_none_of_its_responses(serve, gateway_to, connect):
    """Its new start has another tag, so the gateway says that the response has gone instead of asking."""
    client, upstreams = await two_workers(serve, gateway_to, connect)
    await tell(client, 1, "w1", "another start")
    status, _, body = await client.get(b"/v1/responses/" + IDS["w1"].encode())
    assert (status, code_of(body)) == (404, "response_not_found")
    assert "started again" in json.loads(body)["error"]["message"]
    assert not asked_of(upstreams["w1"])


async def test_other_methods_are_refused(serve, gateway_to, connect):
    """A response is read, deleted or cancelled; a POST without the id of one is a request for a model."""
    client, _ = await two_workers(serve, gateway_to, connect)
    await client.send(b"PUT /v1/responses/%b HTTP/1.1\r\nhost: localhost\r\n\r\n" % IDS["w1"].encode())
    status, headers, _ = await client.response(b"PUT")
    assert (status, headers[b"allow"]) == (405, b"DELETE, GET, HEAD")
    status, headers, _ = await client.ask(target=b"/v1/responses/input_tokens")
    assert status == 200


@pytest.fixture
async def keyed(serve, gateway_to, connect):
    """Start a gateway with a worker of two models, and a key for each, for both, and for a name of one.

    `status, code = await keyed(key, method, target, body)`.
    """
    models = {"good": ["m"], "other": ["n"], "all": None, "named": ["fast"]}
    keys = "".join(
        f'[[security.keys]]\nname = "{name}"\nkey_hash = "{hash_of(name)}"\n'
        + (f"models = {json.dumps(of)}\n" if of else "")
        for name, of in models.items()
    )
    names = '[[models]]\nname = "fast"\ntargets = [{ model = "m" }]\n'
    upstream, port = await serve(lambda stream, head, body: stream.send_all(plain(b"{}")))
    client = await connect(await gateway_to({}, f'[security]\njoin_token_env = "PATH"\n{keys}{names}'))

    async def ask(key, method, target, body=b""):
        head = "%s %s HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        await client.send((head % (method, target, key, len(body))).encode() + body)
        status, _, answer = await client.response(method.encode())
        return status, code_of(answer) if status != 200 else ""

    heartbeat = {
        "worker_id": "w1",
        "model_name": "m",
        "host": "127.0.0.1",
        "port": port,
        "start_id": "s",
        "model_names": ["m", "n"],
    }
    assert await ask(os.environ["PATH"], "POST", "/v1/workers/heartbeat", json.dumps(heartbeat).encode()) == (200, "")
    ask.upstream = upstream
    return ask


MISSING = (404, "response_not_found")


@pytest.mark.parametrize(
    ("model", "allowed"), [("m", ("good", "all", "named")), ("n", ("other", "all")), ("gone", ("all",))]
)
async def test_a_key_has_responses_of_its_models_only(keyed, model, allowed):
    """Also where one worker has both models; of others it is not even told that they are there."""
    id_ = new_response_id(response_tag("w1", "s"), model)
    path = f"/v1/responses/{id_}"
    continued = json.dumps({"model": "m", "previous_response_id": id_}).encode()
    for key in ("good", "other", "all", "named"):
        expected = (200, "") if key in allowed else MISSING
        for method, target in (
            ("GET", path),
            ("DELETE", path),
            ("POST", path + "/cancel"),
            ("GET", path + "/input_items"),
        ):
            assert await keyed(key, method, target) == expected
    for key in ("good", "all"):
        assert await keyed(key, "POST", "/v1/responses", continued) == ((200, "") if key in allowed else MISSING)
    assert len(asked_of(keyed.upstream)) == 4 * len(allowed) + len({"good", "all"} & {*allowed})


PATHS = [  # what follows an id -> for whom, with what
    ("/../../../metrics", 400), ("/%2e%2e/metrics", 400), ("//cancel", 400), ("/cancel#x", 400), ("/..;/metrics", 400),
    ("/.\\metrics", 400), ("/", 404), ("/cancel/", 404), ("/x", 404), ("/cancel/x", 404), ("/input_items/x", 404), ("/cancel", 405),
    ("?stream=true", 200), ("/input_items?limit=1", 200),
]  # fmt: skip


@pytest.mark.parametrize(("below", "status"), PATHS)
async def test_only_known_routes_below_a_response_reach_a_worker(keyed, below, status):
    """Nothing below a response's id reaches a worker that it might read as another route."""
    id_ = new_response_id(response_tag("w1", "s"), "m")
    assert (await keyed("all", "GET", f"/v1/responses/{id_}{below}"))[0] == status
    assert len(asked_of(keyed.upstream)) == (status == 200)
    if status in (400, 404):
        assert (await keyed("all", "POST", f"/v1/responses/{id_}{below}"))[0] == status


async def test_a_wait_for_one_worker_delays_no_other_request(serve, gateway_to, connect, nursery):
    """A full worker that alone can answer is waited for, while requests behind it go to the other one."""
    go = trio.Event()

    async def slow(stream, head, body):
        await go.wait()
        await stream.send_all(plain(b"slow"))

    async def quick(stream, head, body):
        await stream.send_all(plain(b"quick"))

    gateway = await gateway_to({}, "[routing]\nmax_in_flight = 1\n")
    clients = [await connect(gateway) for _ in range(3)]
    held, port = await serve(slow)
    await tell(clients[0], port, "w1")
    _, port = await serve(quick)
    await tell(clients[0], port, "w2")
    answers = {}

    async def ask(number, **more):
        answers[number] = (await clients[number].ask(target=b"/v1/responses", **more))[2]

    nursery.start_soon(lambda: ask(0, previous_response_id=IDS["w1"]))
    await until(lambda: asked_of(held))
    nursery.start_soon(lambda: ask(1, previous_response_id=IDS["w1"]))
    with trio.fail_after(LIMIT_S):
        for _ in range(3):
            await ask(2)
            assert answers[2] == b"quick"
    assert set(answers) == {2}
    go.set()
    await until(lambda: len(answers) == 3)
    assert (answers[0], answers[1]) == (b"slow", b"slow")


def request_for(body):
    return Request(
        method=b"POST", target=RESPONSES_PATH, path=RESPONSES_PATH, version=b"1.1", headers=[], body=body, id=b"r",
        keep_alive=True,
    )  # fmt: skip


def test_an_id_says_which_model_a_response_is_of():
    """And otherwise which worker keeps it; no two are the same."""
    ids = {new_response_id("0123456789ab", model) for model in ("m", "n", "größe", "\ud800") for _ in range(50)}
    assert len(ids) == 200
    assert all(re.fullmatch(r"resp_0123456789ab_[0-9a-f]{32}", id_) for id_ in ids)
    assert sum(is_of_model(id_, "m") for id_ in ids) == 50
    assert is_of_model(new_response_id("0123456789ab", "\ud800"), "\ud800")


BACKGROUND = [
    (b"null", False), (b"false", False), (b"0", False), (b"0.0", False), (b"-0", False), (b"true", True), (b"1", True),
    (b"1.0", True), (b'"true"', True), (b'"yes"', True), (b'"on"', True), (b'"false"', True), (b"[]", True), (b"2", True),
]  # fmt: skip


@pytest.mark.parametrize(
    "value", [*(value for value, _ in BACKGROUND), b'"T"', b'"oN"', b'"0"', b"1e0", b"-1", b'"\\u0079"']
)
def test_values_that_pydantic_reads_as_true_count_as_background(value):
    """Both engines read requests by it."""
    taken = pydantic.create_model("Asked", background=(bool | None, False))
    try:
        is_true = taken.model_validate_json(b'{"background":%b}' % value).background
    except pydantic.ValidationError:
        is_true = False
    assert is_background(json.loads(value)) or not is_true


@pytest.mark.parametrize(("value", "is_asked"), BACKGROUND)
@pytest.mark.parametrize("pad", [0, PARSED_BYTES_MAX])
async def test_values_that_an_engine_reads_as_true_count_as_background(value, is_asked, pad):
    """By both engines' adapters: with a full store it is refused, and what an engine takes for false is not."""
    assert is_background(json.loads(value)) == is_asked
    for adapter in (ProtocolAdapter(VLLM_PATHS), SGLangAdapter(lambda: (("m",), ()))):
        adapter.responses = SimpleNamespace(is_full=lambda: True)
        request = request_for(b'{"model":"m","input":"%b","background":%b}' % (b"x" * pad, value))
        if is_asked:
            with pytest.raises(ApiError, match="in the background already"):
                await adapter.request(request)
        else:
            await adapter.request(request)


@pytest.mark.parametrize(
    "body",
    [b'{"input":"x"}', b"{}", b'{"model":"m"}', b'{"request_id":"resp_mine","input":"x"}', b'{"\\u0072equest_id":1}'],
)
async def test_a_response_gets_an_id_that_names_its_worker(body):
    """Whatever id the client wanted, and nothing else of the body changes."""
    adapter = ProtocolAdapter(VLLM_PATHS)
    adapter.settings = AdapterSettings("0123456789ab")
    request = request_for(body)
    await adapter.request(request)
    sent = json.loads(request.body)
    id_ = sent.pop("request_id")
    kind, tag, rest = id_.split("_")
    assert (kind, tag, len(rest)) == ("resp", "0123456789ab", 32)
    given = json.loads(body)
    assert is_of_model(id_, given.get("model", ""))
    given.pop("request_id", None)
    assert sent == given


class Serving:
    """What an engine has for the Responses API."""

    def __init__(self):
        self.response_store = {}
        self.msg_store = {}
        self.background_tasks = {}

    def answer(self, name):
        self.msg_store[name] = [name]
        self.response_store[name] = name

    async def cancel_responses(self, name):
        del self.background_tasks[name]


class Asked:
    def __init__(self, size):
        self.bytes_in = size


@pytest.mark.parametrize(("responses_max", "bytes_max"), [(3, 10**9), (10**9, 30)])
def test_the_oldest_responses_go_first(monkeypatch, responses_max, bytes_max):
    """So many are kept, or so many bytes; all that is known of the others goes."""
    monkeypatch.setattr(responses, "call_under_way", lambda: Asked(10))
    serving = Serving()
    store = ResponseStore(serving, responses_max, bytes_max)
    for number in range(100):
        serving.answer(number)
    assert list(serving.response_store) == list(serving.msg_store) == [97, 98, 99]
    assert len(store) == 3


def test_a_background_response_is_kept_until_it_is_done():
    """A response in the background stays until it is there, and a new one is refused where nothing else is kept."""
    serving = Serving()
    store = ResponseStore(serving, 2, 10**9)
    serving.background_tasks = {"a": None}
    for name in "abcd":
        serving.answer(name)
    assert list(serving.response_store) == ["a", "d"]
    assert not store.is_full()
    serving.background_tasks["d"] = None
    assert store.is_full()
    adapter = ProtocolAdapter()
    adapter.responses = store
    with pytest.raises(ApiError) as refused:
        adapter.check_background(is_asked=True)
    assert (refused.value.status, refused.value.code) == (429, "overloaded")
    adapter.check_background(is_asked=False)


async def test_a_response_is_deleted_with_all_that_belongs_to_it():
    """Also one that is being made, which is stopped; a second time it is not known."""
    serving = Serving()
    store = ResponseStore(serving, 9, 10**9)
    serving.answer("a")
    serving.background_tasks["a"] = None
    assert await store.delete("a")
    assert (serving.response_store, serving.msg_store, serving.background_tasks) == ({}, {}, {})
    assert not await store.delete("a")


def test_a_response_whose_messages_have_gone_is_not_kept():
    """It could not be continued: engines look for both."""
    serving = Serving()
    ResponseStore(serving, 2, 10**9)
    serving.msg_store["slow"] = []
    serving.answer("b")
    serving.answer("c")
    serving.response_store["slow"] = "slow"
    assert list(serving.response_store) == ["b", "c"]
