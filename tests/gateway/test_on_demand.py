"""Requests for models that are loaded on demand: they wait, and all of them get an answer. The tests do the loading."""

import json
import re

import pytest
import trio
from support.peers import JSON_POST, LIMIT_S, SSE_END, SSE_HEAD, chunk, code_of, event, plain, post_of, until

from ichat.fleet.worker_facts import WorkerEnd
from ichat.http.body_mover import is_comment
from ichat.http.keepalive import COMMENT
from ichat.protocol.messages import Heartbeat, LoadPhase, response_tag
from ichat.roles import gateway
from ichat.security.keys import hash_of

SOON = "[timeouts]\nload_comment_s = 0.1\n"
FAILED = WorkerEnd("was ended by signal SIGKILL", 0.0, cause="The GPU has no memory left")


async def hello(stream, head, body):
    await stream.send_all(plain(b'{"hello": 1}'))


async def sse(stream, head, body):
    await stream.send_all(SSE_HEAD + event(1) + SSE_END)


class Site:
    """A gateway with a worker of the model m that is loaded on demand, and is cold."""

    def __init__(self, control, port, upstream, worker_port):
        self.fleet, self.balancer, self.port = control.fleet, control.balancer, port
        self.upstream, self._worker_port = upstream, worker_port
        self.worker = self.fleet.managed.expect("w", ["m"])
        self.configure(None)
        self.fleet.managed.cool(self.worker)

    def configure(self, max_in_flight):
        settings = {"model_path": "/models/m", "backend": "fake"}
        self.fleet.managed.configure(
            self.worker, names=["m"], max_in_flight=max_in_flight, settings=settings, on_demand=True
        )

    def start(self):
        """Start the worker, as what loads models does."""
        self.fleet.managed.restart(self.worker)

    def tell(self, state="ready", **more):
        """Have the worker send a heartbeat."""
        known = {"state": state, "start_id": "1", "heartbeat_interval": 1e3, **more}
        self.fleet.registry.record_heartbeat(Heartbeat("w", "m", "127.0.0.1", self._worker_port, **known))

    def fail(self):
        self.fleet.table.fail(self.worker, FAILED, trio.current_time() + 7.5)

    async def until_waiting(self, count):
        """Wait until so many requests wait for the model."""
        await until(lambda: self.balancer.demand("m").waiting == count)


@pytest.fixture
def open_site(serve, gateway_to, monkeypatch):
    """Start a gateway: `site = await open_site(reply, more_toml)`."""
    built, build = [], gateway.build

    def building(*args):
        built.append(build(*args))
        return built[-1]

    monkeypatch.setattr(gateway, "build", building)

    async def start(reply=hello, more=""):
        upstream, worker_port = await serve(reply)
        port = await gateway_to({}, more)
        return Site(built[-1].control, port, upstream, worker_port)

    return start


async def ask_all(connect, port, count, then):
    """Send so many requests at once, do something once they wait, and return their answers."""
    answers = []

    async def one():
        client = await connect(port)
        answers.append(await client.ask())

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(one)
        await then()
    return answers


async def stream(client, path=b"/v1/chat/completions"):
    """Ask for a stream."""
    body = b'{"model": "m", "stream": true}'
    await client.send(JSON_POST % (path, len(body), body))


async def read_until(client, found, data=b""):
    """Return what the client has received once `found(data)` holds."""
    with trio.fail_after(LIMIT_S):
        while not found(data):
            more = await client.stream.receive_some()
            assert more, data
            data += more
    return data


async def test_waiting_requests_are_answered_once_the_worker_is_ready(open_site, connect):
    """20 first requests at once: nobody gets an error, and whoever loads models is told of each."""
    site = await open_site()
    wanted = []
    site.balancer.wanted.add(wanted.append)

    async def load():
        await site.until_waiting(20)
        assert wanted == ["m"] * 20
        site.start()
        site.tell("loading")
        assert site.balancer.demand("m").waiting == 20
        site.tell()

    answers = await ask_all(connect, site.port, 20, load)
    assert [(status, body) for status, _, body in answers] == [(200, b'{"hello": 1}')] * 20
    assert {headers[b"x-ichat-worker"] for _, headers, _ in answers} == {b"w"}
    assert len({headers[b"x-request-id"] for _, headers, _ in answers}) == 20
    assert len(site.upstream.posts) == 20


async def test_a_failed_load_refuses_waiting_requests_at_once(open_site, connect):
    """At once, with the time of the next try and without the cause, and not after `load_wait_s`."""
    site = await open_site(more="[timeouts]\nload_wait_s = 1e6\n")

    async def fail():
        await site.until_waiting(20)
        site.start()
        site.fail()

    answers = await ask_all(connect, site.port, 20, fail)
    assert {(status, headers[b"retry-after"]) for status, headers, _ in answers} == {(503, b"8")}
    assert {json.loads(body)["error"]["message"] for _, _, body in answers} == {
        "The model `m` is not ready: it has failed, and can be asked for again in 8 s."
    }
    assert {code_of(body) for _, _, body in answers} == {"model_not_ready"}
    assert site.upstream.posts == []
    status, _, body = await (await connect(site.port)).ask()
    assert (status, code_of(body)) == (503, "model_not_ready"), "who comes later is told the same"


async def test_a_request_that_waits_too_long_gets_the_remaining_time(open_site, connect):
    """The wait is bounded by `load_wait_s`, not by `queue_s`; the bound that was reached counts as the reason."""
    site = await open_site(more="[timeouts]\nload_wait_s = 0.3\nqueue_s = 0.001\n")
    site.fleet.managed.expect_ready(site.worker, trio.current_time() + 100)
    client = await connect(site.port)
    began = trio.current_time()
    status, headers, body = await client.ask()
    assert trio.current_time() - began >= 0.3
    assert (status, code_of(body)) == (503, "model_not_ready")
    assert 1 <= int(headers[b"retry-after"]) <= 100
    assert json.loads(body)["error"]["message"].endswith("ready: it is not loaded; the request has waited for 0.3 s.")
    _, _, metrics = await client.get(b"/metrics")
    assert b'ichat_refusals_total{reason="timeouts.load_wait_s"} 1.0' in metrics


async def test_a_client_that_leaves_leaves_the_queue(open_site, connect):
    """Nobody is answered who is not there any more; the others are."""
    site = await open_site()
    first, second = await connect(site.port), await connect(site.port)
    await stream(first)
    await site.until_waiting(1)
    await stream(second)
    await site.until_waiting(2)
    await first.stream.aclose()
    await site.until_waiting(1)
    site.start()
    site.tell()
    status, _, _ = await second.response()
    assert status == 200
    assert len(site.upstream.posts) == 1


async def test_the_queue_of_a_model_that_is_loaded_is_bounded(open_site, connect):
    """Beyond `queue_max` a request gets 429 at once, as where all workers are full."""
    site = await open_site(more="[routing]\nqueue_max = 1\n")
    waiting = await connect(site.port)
    await stream(waiting)
    await site.until_waiting(1)
    status, _, body = await (await connect(site.port)).ask()
    assert (status, code_of(body)) == (429, "overloaded")


async def test_an_ending_gateway_refuses_waiting_requests(open_site, connect):
    """Who waits for a load is told that the gateway is shutting down, and so is who comes then."""
    site = await open_site()

    async def close():
        await site.until_waiting(3)
        site.balancer.close()

    answers = await ask_all(connect, site.port, 3, close)
    answers.append(await (await connect(site.port)).ask())
    assert [(status, code_of(body)) for status, _, body in answers] == [(503, "draining")] * 4


async def test_a_worker_drained_for_another_model_loses_no_request(open_site, connect):
    """Who waits for room there is served when it comes again, and who it works for gets its answer first."""
    go = trio.Event()

    async def reply(stream, head, body):
        await go.wait()
        await stream.send_all(plain(b"{}"))

    site = await open_site(reply, "[timeouts]\nqueue_s = 3600\n")
    site.configure(1)
    site.start()
    site.tell()
    served, waiting = await connect(site.port), await connect(site.port)
    await stream(served)
    await until(lambda: site.upstream.posts)
    await stream(waiting)
    await site.until_waiting(1)
    site.fleet.managed.drain(site.worker)
    go.set()
    assert (await served.response())[0] == 200
    await until(lambda: not site.fleet.table.endpoint_of(site.worker).in_flight)
    site.fleet.managed.cool(site.worker)
    assert site.balancer.demand("m").waiting == 1
    site.start()
    site.tell()
    assert (await waiting.response())[0] == 200


async def test_a_waiting_stream_gets_the_phase_of_the_load(open_site, connect):
    """The comment has the phase and its seconds, however long its name, and stays a comment to a gateway in front."""
    site = await open_site(sse, SOON)
    client = await connect(site.port)
    await stream(client)
    await site.until_waiting(1)
    site.start()
    site.fleet.managed.enter_load(site.worker, "checking")
    data = await read_until(client, lambda data: re.search(rb": loading m: checking, \d+ s\n\n", data))
    site.tell("loading", load=[LoadPhase("importing vLLM", 4.2)])
    data = await read_until(client, lambda data: re.search(rb"m: importing vLLM, ([4-9]|\d\d+) s\n\n", data), data)
    site.tell("loading", load=[LoadPhase("ä" * 64, 7.2, "ö" * 64)])
    data = await read_until(client, lambda data: "ö".encode() in data and data.endswith(b"\n\n\r\n"), data)
    comment = data.rpartition(b"\r\n: ")[2].removesuffix(b"\r\n")
    assert "ää" in comment.decode(), "no character is cut in two"
    assert is_comment(bytearray(b": " + comment), 0, len(comment) + 2)
    site.tell()
    await read_until(client, lambda data: data.endswith(SSE_END), data)


@pytest.mark.parametrize("more", ["", "sse_keepalive_s = 3600\n"])
async def test_a_waiting_stream_gets_comments_and_then_the_answer(open_site, connect, more):
    """Comments come while the model is loaded, then the answer, and the connection serves the next request."""
    site = await open_site(sse, SOON + more)
    client = await connect(site.port)
    await stream(client)
    await site.until_waiting(1)
    data = await read_until(client, lambda data: b": loading m: about to start\n\n\r\n" in data)
    comments = data.partition(b"\r\n\r\n")[2]
    assert not comments.replace(chunk(b": loading m: about to start\n\n"), b""), "it is not known how long it takes"
    site.fleet.managed.expect_ready(site.worker, trio.current_time() + 1000)
    data = await read_until(client, lambda data: b" left" in data, data)
    assert re.search(rb"\n: loading m: about to start; about (1000|9\d\d) s left\n\n\r\n$", data)
    site.fleet.managed.expect_ready(site.worker, trio.current_time())
    data = await read_until(client, lambda data: b"longer than usual\n\n" in data, data)
    site.start()
    site.tell()
    data = await read_until(client, lambda data: data.endswith(SSE_END), data)
    assert data.endswith(event(1) + SSE_END)
    assert data.count(b"HTTP/1.1") == 1
    assert b"x-request-id: " in data
    assert (await client.ask())[0] == 200


async def test_the_first_comments_come_soon(open_site, connect):
    """However rarely comments are sent: the client knows at once that its model is being loaded, and soon how."""
    site = await open_site(sse, "[timeouts]\nload_comment_s = 3600\n")
    client = await connect(site.port)
    await stream(client)
    data = await read_until(client, lambda data: b": loading m: about to start\n\n" in data)
    assert data.startswith(b"HTTP/1.1 200")
    site.start()
    site.tell("loading", load=[LoadPhase("importing vLLM", 4.2)])
    data = await read_until(client, lambda data: b": loading m: importing vLLM, " in data, data)
    site.tell()
    await read_until(client, lambda data: data.endswith(SSE_END), data)


async def test_comments_of_other_waits_come_after_the_load(open_site, connect):
    """While the worker thinks, a stream is kept alive as it ever was, if that is configured."""
    go = trio.Event()

    async def reply(stream, head, body):
        await go.wait()
        await sse(stream, head, body)

    site = await open_site(reply, SOON + "sse_keepalive_s = 0.1\n")
    client = await connect(site.port)
    await stream(client)
    data = await read_until(client, lambda data: b": loading m: about to start\n\n" in data)
    site.start()
    site.tell()
    data = await read_until(client, lambda data: COMMENT in data, data)
    loading = data.count(b": loading")
    data = await read_until(client, lambda data: data.count(COMMENT) >= 2, data)
    assert data.count(b": loading") == loading
    go.set()
    await read_until(client, lambda data: data.endswith(event(1) + SSE_END), data)


async def test_no_comment_comes_after_a_load_where_none_is_configured(open_site, connect, autojump_clock):
    """The comments of a load end with the load."""
    go = trio.Event()

    async def reply(stream, head, body):
        await go.wait()
        await sse(stream, head, body)

    site = await open_site(reply, SOON)
    client = await connect(site.port)
    await stream(client)
    data = await read_until(client, lambda data: b": loading m: about to start\n\n" in data)
    site.start()
    site.tell()
    await until(lambda: site.upstream.posts)
    await trio.sleep(1.2)  # more than a sweep of the hub
    go.set()
    data = await read_until(client, lambda data: data.endswith(SSE_END), data)
    assert data.endswith(chunk(b": loading m: about to start\n\n") + event(1) + SSE_END)


@pytest.mark.parametrize(
    ("path", "before"),
    [(b"/v1/chat/completions", b"data: "), (b"/v1/messages", b"event: error\ndata: ")],
)
async def test_a_load_that_fails_after_a_comment_ends_the_stream_with_an_event(
    open_site, connect, tmp_path, path, before
):
    """The client has had a 200, so the cause is an event in the form of its protocol, and the connection ends.

    The access log has that status, too.
    """
    log = tmp_path / "access.log"
    site = await open_site(sse, f'{SOON}[logs]\naccess_log = "{log}"\n')
    client = await connect(site.port)
    await stream(client, path)
    data = await read_until(client, lambda data: b": loading m: about to start\n\n" in data)
    site.start()
    site.fail()
    data += await client.everything()
    assert data.endswith(b"\n\n\r\n0\r\n\r\n")
    last = data.partition(before)[2].partition(b"\n\n")[0]
    error = json.loads(last)["error"]
    assert error["code"] == "model_not_ready"
    assert "it has failed" in error["message"]
    with trio.fail_after(LIMIT_S):
        while '"model_not_ready"' not in log.read_text():
            await trio.sleep(0.01)
    (line,) = (json.loads(line) for line in log.read_text().splitlines() if '"model_not_ready"' in line)
    assert line["status"] == 200


async def test_a_load_that_fails_before_any_comment_is_a_plain_error(open_site, connect):
    """A stream that gets no comments gets the status."""
    site = await open_site(sse, "[timeouts]\nload_comment_s = 0\n")
    client = await connect(site.port)
    await stream(client)
    await site.until_waiting(1)
    site.fail()
    status, headers, body = await client.response()
    assert (status, headers[b"retry-after"], code_of(body)) == (503, b"8", "model_not_ready")


@pytest.mark.parametrize(("config", "is_stream"), [(SOON, False), ("[timeouts]\nload_comment_s = 0\n", True)])
async def test_only_streams_with_load_comments_configured_get_comments(
    open_site, connect, config, is_stream, autojump_clock
):
    """Comments are for streams, and only where they are configured."""
    site = await open_site(hello, config)
    client = await connect(site.port)
    answers = []
    async with trio.open_nursery() as nursery:

        async def ask():
            answers.append(await client.ask(stream=is_stream))

        nursery.start_soon(ask)
        await site.until_waiting(1)
        await trio.sleep(1.2)  # more than a sweep of the hub
        site.start()
        site.tell()
    [(status, headers, body)] = answers
    assert (status, body, headers[b"content-length"]) == (200, b'{"hello": 1}', b"12")


async def test_models_say_whether_they_are_loaded(open_site, connect):
    """A model that is loaded on demand is listed while it is cold; others say nothing of it."""
    site = await open_site(more='[[external_routes]]\nmodel_name = "far"\napi_base = "http://127.0.0.1:1/v1"\n')
    client = await connect(site.port)

    async def listed():
        status, _, body = await client.get(b"/v1/models")
        assert status == 200
        return {one["id"]: one.get("loaded", "") for one in json.loads(body)["data"]}

    assert await listed() == {"far": "", "m": False}
    _, _, body = await client.get(b"/v1/models/m")
    cold = json.loads(body)
    assert (cold["loaded"], cold["owned_by"], cold["root"]) == (False, "fake", "/models/m")
    _, _, body = await client.ask("other")
    assert json.loads(body)["error"]["message"].endswith("Models here: far, m.")
    site.start()
    site.tell()
    assert await listed() == {"far": "", "m": True}
    site.tell("asleep")
    assert await listed() == {"far": "", "m": False}


async def test_a_key_sees_only_its_models(open_site, connect):
    """Also among those that are not loaded; one that it may not use is neither listed nor loaded for it."""
    keys = [("mine", "m"), ("yours", "n")]
    text = "".join(
        f'[[security.keys]]\nname = "{name}"\nkey_hash = "{hash_of(f"sk-{name}-0123456789")}"\nmodels = ["{model}"]\n'
        for name, model in keys
    )
    site = await open_site(more=text)
    client = await connect(site.port)
    for name, expected in (("mine", ["m"]), ("yours", [])):
        await client.send(
            b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer sk-%b-0123456789\r\n\r\n"
            % name.encode()
        )
        _, _, body = await client.response(b"GET")
        assert [one["id"] for one in json.loads(body)["data"]] == expected
    body = b'{"model": "m"}'
    await client.send(post_of(body, head=b"authorization: Bearer sk-yours-0123456789\r\n"))
    status, _, _ = await client.response()
    assert status in (403, 404)
    assert site.balancer.demand("m").waiting == 0


async def test_operators_see_the_state(open_site, connect):
    """Lists, counts and the route of one worker know the new states; a queue of a cold model is the model's."""
    site = await open_site()
    client = await connect(site.port)
    waiting = await connect(site.port)
    await stream(waiting)
    await site.until_waiting(1)
    for state in ("cold", "waking", "asleep"):
        if state != "cold":
            site.start()
            site.tell(state)
        _, _, body = await client.get(b"/v1/admin/workers?state=" + state.encode())
        [worker] = json.loads(body)["data"]
        is_healthy = state != "waking"
        assert (worker["worker_id"], worker["state"]) == ("w", state)
        assert worker["status"] == ("healthy" if is_healthy else "unhealthy")
        _, _, body = await client.get(b"/v1/admin/cluster/status")
        status = json.loads(body)
        assert status["workers"] == {state: 1}
        assert [(one["id"], one["workers"], one["queued"]) for one in status["models"]] == [("m", 0, 1)]
    _, _, body = await client.ask(target=b"/v1/admin/route")
    assert (json.loads(body)["rule"], json.loads(body)["waiting"]) == ("loading", 1)


async def test_a_response_is_gone_with_the_process_that_kept_it(open_site, connect):
    """It is no reason to load the model again: 404, as for a worker that has ended."""
    site = await open_site()
    site.start()
    site.tell()
    kept = b"resp_%b_%b" % (response_tag("w", "1").encode(), b"0" * 32)
    client = await connect(site.port)
    assert (await client.get(b"/v1/responses/" + kept))[0] == 200
    site.fleet.managed.cool(site.worker)
    for status, _, body in (
        await client.get(b"/v1/responses/" + kept),
        await client.ask(target=b"/v1/responses", previous_response_id=kept.decode()),
    ):
        assert (status, code_of(body)) == (404, "response_not_found")
    assert site.balancer.demand("m").waiting == 0


async def test_the_wait_is_time_in_the_queue(open_site, connect, tmp_path, autojump_clock):
    """The access log and the metrics tell it apart from the gateway's own time."""
    log = tmp_path / "access.log"
    site = await open_site(more=f'[logs]\naccess_log = "{log}"\n')

    async def load():
        await site.until_waiting(1)
        await trio.sleep(0.3)
        site.start()
        site.tell()

    [(status, _, _)] = await ask_all(connect, site.port, 1, load)
    assert status == 200
    await until(lambda: log.exists() and log.read_text())
    entry = json.loads(log.read_text().splitlines()[-1])
    assert entry["queue_ms"] >= 300
    assert entry["overhead_ms"] + entry["queue_ms"] <= entry["duration_ms"] + 0.1, "no time counts twice"
