"""The worker in this process, with a fake engine on its thread: the call across, and what ends it."""

import json
import os
import re
import subprocess
import sys

import attrs
import psutil
import pytest
import trio
import trio.testing
from support.nvml import Nvml
from support.peers import code_of, plain, post_of, until
from support.programs import LIMIT_S

from ichat import errors
from ichat.engines.children import Child, ProcessFamily
from ichat.engines.engine import find
from ichat.engines.engine_loop import EngineTimes
from ichat.errors import EXIT_SOFTWARE, EXIT_USAGE, Exit
from ichat.roles.heartbeat_sender import HeartbeatSender
from ichat.roles.worker_options import read_command_line

pytestmark = pytest.mark.one_process("a worker's process, without a gateway")


@pytest.fixture(autouse=True)
def plugins(monkeypatch):
    monkeypatch.syspath_prepend("tests/support/fake_engine")
    monkeypatch.delitem(sys.modules, "fake_engine", raising=False)


async def counts(connect, port):
    return json.loads((await (await connect(port)).get(b"/counts"))[2])


async def test_the_application_sees_the_request_as_it_is(make_worker, connect):
    """Scope, headers and body arrive as ASGI says."""
    _, port = await make_worker()
    client = await connect(port)
    await client.send(b"GET /scope?a=%20b HTTP/1.1\r\nHost: x\r\nX-Mine: 1\r\n\r\n")
    status, headers, body = await client.response(b"GET")
    scope = json.loads(body)
    assert (status, scope["path"], scope["query"], scope["method"]) == (200, "/scope", "a=%20b", "GET")
    assert ["x-mine", "1"] in scope["headers"]
    assert scope["asgi"]["spec_version"] == "2.3"
    assert headers[b"x-request-id"].startswith(b"req-")
    assert headers[b"date"]


async def test_of_internal_headers_the_engine_gets_the_chain_alone(make_worker, connect):
    """The first request of a connection is read by Trio, the next one by the engine's thread."""
    _, port = await make_worker()
    client = await connect(port)
    for _ in range(2):
        internal = b"X-Ichat-Caller: c\r\nX-Ichat-Prefix: 256;00\r\nX-Ichat-Hop: 1\r\n"
        await client.send(b"POST /scope HTTP/1.1\r\nHost: localhost\r\n%bContent-Length: 2\r\n\r\n{}" % internal)
        headers = json.loads((await client.response())[2])["headers"]
        assert [one for one in headers if one[0].startswith("x-ichat-")] == [["x-ichat-prefix", "256;00"]]


async def test_streams_and_plain_answers_share_a_connection(make_worker, connect):
    """Whatever the form of the answer, the connection goes on afterwards."""
    _, port = await make_worker()
    client = await connect(port)
    for _ in range(3):
        status, headers, body = await client.ask(stream=True)
        assert (status, headers[b"transfer-encoding"]) == (200, b"chunked")
        assert body.count(b"data: ") == 4
        assert (await client.ask())[0] == 200
    assert (await client.get(b"/empty"))[::2] == (204, b"")
    assert (await client.ask(method=b"HEAD"))[::2] == (200, b"")
    assert (await client.ask())[0] == 200


async def test_an_old_client_gets_a_stream_without_chunks(make_worker, connect):
    """A client of HTTP/1.0 gets the events and then the end of the connection."""
    _, port = await make_worker()
    client = await connect(port)
    await client.send(b'POST / HTTP/1.0\r\ncontent-length: 16\r\n\r\n{"stream": true}')
    answer = await client.everything()
    assert b"chunked" not in answer
    assert answer.endswith(b"data: [DONE]\n\n")


async def test_an_old_client_can_tell_a_broken_answer(make_worker, connect):
    """Without chunks and without a length, an answer that broke off does not end like a whole one."""
    _, port = await make_worker()
    client = await connect(port)
    await client.send(b"POST /break HTTP/1.0\r\ncontent-length: 2\r\n\r\n{}")
    with pytest.raises(trio.BrokenResourceError):
        await client.everything()


async def test_an_old_client_can_tell_an_answer_that_was_cut(make_worker, connect):
    """A response that the worker cuts at its own end does not end like a whole one either."""
    rig, port = await make_worker()
    client = await connect(port)
    body = b'{"stream": true, "events": 100000, "gap_s": 0.01}'
    await client.send(b"POST / HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    assert await client.stream.receive_some()
    (served,) = rig.door.clients
    served.scope.cancel()
    with pytest.raises(trio.BrokenResourceError):
        await client.everything()


@pytest.mark.parametrize("path", [b"/wait", b"/v1/chat/completions"])
async def test_a_client_that_hangs_up_aborts_its_generation(make_worker, connect, path):
    """Plain or streamed: the application learns of it at once, and every one of its waiters does."""
    rig, port = await make_worker(client_stall_s=3600)
    clients = [await connect(port) for _ in range(20)]
    body = b'{"stream": true, "events": 100000, "gap_s": 0.01}'
    for client in clients:
        await client.send(post_of(body, path))
    await until(lambda: rig.engine.running == 20)
    for client in clients:
        await client.stream.aclose()
    await until(lambda: rig.engine.running == 0)
    assert rig.engine.aborted == 20
    await until(lambda: rig.host.aborts == 20 and not rig.door.clients)


async def test_a_slow_reader_holds_the_application_back(make_worker, connect):
    """At most a little is buffered for a client that does not read, and nothing of it is lost."""
    rig, port = await make_worker()
    client = await connect(port)
    body = b'{"chunks": 400}'
    await client.send(post_of(body, b"/flood", b"connection: close\r\n"))
    await until(lambda: rig.engine.flooded > 0)
    last, turns = -1, 0
    while turns < 5:  # of the engine's loop, in which the application could have gone on
        turns = turns + 1 if rig.engine.flooded == last else 0
        last = rig.engine.flooded
        await counts(connect, port)
    assert last < 399, "the application was never held back"
    data = (await client.everything()).partition(b"\r\n\r\n")[2]
    assert data == b"".join(b"10000\r\n" + (b"%08d" % number) * 8192 + b"\r\n" for number in range(400)) + b"0\r\n\r\n"


async def test_a_client_that_never_reads_is_given_up_by_its_worker(make_worker, connect):
    """After `client_stall_s` it counts as gone, and the generation is aborted."""
    rig, port = await make_worker(client_stall_s=0.2)
    client = await connect(port)
    await client.send(post_of(b'{"chunks": 100000}', b"/flood"))
    await until(lambda: rig.host.aborts == 1)
    await until(lambda: rig.engine.running == 0 and not rig.door.clients)


async def test_a_client_that_reads_slowly_but_steadily_is_served(make_worker, connect):
    """Only a client that takes nothing at all is given up; one piece may take longer than `client_stall_s`."""
    _, port = await make_worker(client_stall_s=3)
    client = await connect(port)
    body = b'{"bytes": 12000000}'
    await client.send(post_of(body, b"/large"))
    received = 0
    while received < 12_000_000:
        data = await client.stream.receive_some(200_000)
        assert data, "it was cut"
        received += len(data)
        await trio.sleep(0.05)


async def test_a_piece_that_is_cut_is_not_complete(make_worker, connect):
    """When the engine dies before a slow client has the last piece, the connection ends there: nothing is put behind it."""
    rig, port = await make_worker()
    client = await connect(port)
    body = b'{"bytes": 20000000}'
    request = post_of(body, b"/large")
    await client.send(request + b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await until(lambda: rig.engine.running == 1)
    await trio.testing.wait_all_tasks_blocked(0.05)
    rig.engine.dead = "killed by a test"
    with trio.fail_after(LIMIT_S):
        await rig.host.ended.wait()
    await trio.testing.wait_all_tasks_blocked(0.05)
    data = await client.everything()
    assert data.count(b"HTTP/1.1 ") == 1
    assert len(data) < 20_000_000
    assert rig.worker.state() == "draining"


@pytest.mark.parametrize("path", [b"/raise", b"/nothing"])
async def test_an_application_that_fails_is_a_500(make_worker, connect, path, caplog):
    """Nothing was sent: the client gets an error and keeps its connection."""
    _, port = await make_worker()
    client = await connect(port)
    status, headers, body = await client.ask(target=path)
    assert (status, code_of(body), headers[b"x-ichat-error"]) == (500, "engine_failed", b"worker")
    assert b"has a bug" not in body
    assert (await client.ask())[0] == 200


@pytest.mark.parametrize("path", [b"/break", b"/short"])
async def test_an_application_that_breaks_off_is_never_complete(make_worker, connect, path, caplog):
    """Something was sent: the connection ends short."""
    _, port = await make_worker()
    client = await connect(port)
    assert (await client.ask(target=path))[::2] == (200, "broken")


async def test_not_ready_is_said_with_the_phase(make_worker, connect):
    """While it loads, health and requests are 503 with the phase; then health is ok."""
    rig, port = await make_worker("--load-s", "3600", wait=False)
    client = await connect(port)
    await until(lambda: rig.host.phase == "loading")
    status, _, body = await client.get(b"/health")
    assert (status, json.loads(body)) == (503, {"status": "unavailable", "phase": "loading"})
    status, headers, body = await client.ask()
    assert (status, code_of(body), headers[b"retry-after"]) == (503, "model_not_ready", b"5")
    rig.engine.go_on.set()
    await rig.host.ready.wait()
    assert (await client.get(b"/health"))[::2] == (200, b'{"status": "ok"}')


async def test_an_engine_that_dies_fails_its_requests(make_worker, connect):
    """Requests that the dead engine would let hang get an error, health turns, and the reason is kept."""
    rig, port = await make_worker()
    hanging, killer = await connect(port), await connect(port)
    await hanging.send(post_of(b"{}", b"/wait"))
    await until(lambda: rig.engine.running == 1)
    status, _, body = await killer.ask(target=b"/die")
    assert (status, code_of(body)) == (500, "engine_failed")
    assert b"killed by a test" not in body, "why it died is for operators"
    assert (await hanging.response())[0] == 500
    with trio.fail_after(LIMIT_S):
        await rig.host.ended.wait()
    assert rig.host.failure.code == EXIT_SOFTWARE
    assert "killed by a test" in str(rig.host.failure)
    assert (await hanging.get(b"/health"))[0] == 503


@pytest.fixture(name="core")
def core_fixture():
    """A process that stands for one which the engine cannot do without."""
    with subprocess.Popen(["sleep", "3600"]) as process:
        yield process
        process.kill()


def end(core):
    """Kill it, and wait until it has ended."""
    core.kill()
    os.waitid(os.P_PID, core.pid, os.WEXITED | os.WNOWAIT)


async def test_a_dead_engine_gets_no_more_requests(make_worker, connect, core):
    """Its end is known with the next request, however seldom it is looked after; that one is refused, with a code of its own."""
    rig, port = await make_worker(times=EngineTimes(watch_s=3600))
    rig.engine.kin = ProcessFamily([Child(psutil.Process(core.pid), "core")])
    client = await connect(port)
    assert (await client.ask())[0] == 200
    await until(lambda: rig.engine.done == 1)
    end(core)
    for _ in range(2):
        status, headers, body = await client.ask()
        assert (status, code_of(body), headers[b"retry-after"]) == (503, "engine_dead", b"5")
        assert (headers[b"x-ichat-error"], headers[b"x-ichat-code"]) == (b"worker", b"engine_dead")
        assert b"its process core" in body
        with trio.fail_after(LIMIT_S):
            await rig.host.ended.wait()
    assert rig.engine.done == 1
    assert rig.worker.state() == "draining"


async def test_a_death_that_is_not_noticed_yet(make_worker, connect, core):
    """A request that was taken while the engine's loop was busy, and its process had ended by then, is not begun."""
    rig, port = await make_worker(times=EngineTimes(watch_s=3600))
    rig.engine.kin = ProcessFamily([Child(psutil.Process(core.pid), "core")])
    blocking, late, leaving = [await connect(port) for _ in range(3)]
    await blocking.send(post_of(b"{}", b"/block"))
    await until(lambda: rig.engine.running == 1)
    end(core)
    for client in (late, leaving):
        await client.send(post_of(b"{}", b"/wait"))
    await until(lambda: rig.host.in_flight == 3)
    await leaving.stream.aclose()
    rig.engine.go_on.set()
    status, _, body = await late.response()
    assert (status, code_of(body)) == (503, "engine_dead")
    assert (await blocking.response())[0] == 500
    await until(lambda: rig.host.in_flight == 0)


async def test_a_stream_whose_engine_dies_ends_with_an_error(make_worker, connect):
    """One error as the last event, a clean end of the chunks, no [DONE], and the end of the connection."""
    rig, port = await make_worker(times=EngineTimes(fail_s=0.1))
    client = await connect(port)
    status, headers, body = await client.ask(target=b"/die", stream=True)
    assert (status, headers[b"transfer-encoding"]) == (200, b"chunked")
    first, last, rest = body.split(b"\n\n")
    assert (first, rest) == (b'data: {"n": 0}', b"")
    assert last.startswith(b'data: {"error"')
    assert code_of(last.removeprefix(b"data: ")) == "engine_failed"
    assert b"The engine failed: it has died." in last
    assert await client.everything() == b""
    with trio.fail_after(LIMIT_S):
        await rig.host.ended.wait()


async def test_a_stream_whose_engine_tells_its_death_itself_does_not_look_whole(make_worker, connect):
    """Engines let their usual end follow the error: the client gets the error as the last event, and no [DONE]."""
    rig, port = await make_worker(times=EngineTimes(fail_s=3600))
    client = await connect(port)
    status, _, body = await client.ask(target=b"/die", stream=True, tells=True)
    first, last, rest = body.split(b"\n\n")
    assert (status, first, rest) == (200, b'data: {"n": 0}', b"")
    assert code_of(last.removeprefix(b"data: ")) == "internal_error"
    with trio.fail_after(LIMIT_S):
        await rig.host.ended.wait()


async def test_an_engine_that_dies_while_it_loads_is_given_up(make_worker, connect):
    """It does not notice itself: after a while the worker does, and says what it was doing."""
    times = EngineTimes(watch_s=0.05, unnoticed_s=0.2)
    rig, port = await make_worker("--dies-loading", wait=False, times=times)
    client = await connect(port)
    with trio.fail_after(LIMIT_S):
        await rig.host.watch_loading()
    assert rig.host.ended.is_set()
    assert rig.host.failure.code == EXIT_SOFTWARE
    assert str(rig.host.failure) == "The engine was given up while loading: killed while it loaded"
    assert (await client.get(b"/health"))[0] == 503
    rig.engine.go_on.set()


async def test_an_engine_that_notices_its_death_gives_its_own_reason(make_worker, caplog):
    """Its own account is better, so it gets the time to give it."""
    times = EngineTimes(watch_s=0.01, unnoticed_s=3600)
    rig, _ = await make_worker("--dies-loading", wait=False, times=times)
    await until(lambda: rig.engine.dead)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.host.watch_loading)
        await trio.sleep(0.05)
        assert not rig.host.ended.is_set()
        rig.engine.go_on.set()
        nursery.cancel_scope.deadline = trio.current_time() + LIMIT_S
    assert not nursery.cancel_scope.cancelled_caught
    assert str(rig.host.failure) == "The engine failed while loading: it noticed by itself"


async def test_an_engine_that_cannot_load(make_worker, connect, caplog):
    """The reason is one sentence with the phase, and the traceback is in the log."""
    rig, _ = await make_worker("--fail", wait=False)
    with trio.fail_after(LIMIT_S):
        await rig.host.ended.wait()
    assert str(rig.host.failure) == "The engine failed while loading: no such weights"
    assert "RuntimeError: no such weights" in caplog.text


async def test_a_wrong_argument_is_the_engines_own_sentence(make_worker):
    """The engine's parser decides, with exit code 64."""
    rig, _ = await make_worker("--modell", "x", wait=False)
    with trio.fail_after(LIMIT_S):
        await rig.host.ended.wait()
    assert rig.host.failure.code == EXIT_USAGE
    assert "unrecognized arguments: --modell x" in str(rig.host.failure)


async def test_stopping_ends_what_is_under_way(make_worker, connect):
    """A request that does not end is ended, and the thread with it."""
    rig, port = await make_worker()
    client = await connect(port)
    await client.send(post_of(b"{}", b"/wait"))
    await until(lambda: rig.engine.running == 1)
    await rig.host.stop(10)
    assert rig.host.ended.is_set()
    assert rig.engine.running == 0
    assert (await client.response())[0] == 503


async def test_the_models_are_listed_by_the_worker(make_worker, connect):
    """Whatever the engine has for it: all of them, or one by its name, in any spelling of it, and 404 for another."""
    _, port = await make_worker("--served-model-name", "org/m", "a b")
    client = await connect(port)
    status, _, body = await client.get(b"/v1/models")
    listed = json.loads(body)
    assert (status, listed["object"]) == (200, "list")
    first, second = listed["data"]
    assert first["created"] > 1_700_000_000
    entry = {"object": "model", "created": first["created"], "owned_by": "fake", "root": "m", "parent": None}
    assert first == {**entry, "id": "org/m", "max_model_len": 4096}
    assert second == {**entry, "id": "a b", "max_model_len": None}
    for path, entry in ((b"org/m", first), (b"org%2Fm", first), (b"org%2fm", first), (b"a%20b", second)):
        status, headers, body = await client.get(b"/v1/models/" + path)
        assert (status, json.loads(body)) == (200, entry)
        assert headers[b"content-type"] == b"application/json"
    assert (await client.get(b"/v1/models/?x=1"))[0] == 200
    assert (await client.ask(method=b"HEAD", target=b"/v1/models/org%2Fm"))[::2] == (200, b"")
    for path in (b"m", b"org", b"org%252Fm", b"org/m/", b"org/m/x"):
        status, _, body = await client.get(b"/v1/models/" + path)
        assert (status, code_of(body)) == (404, "model_not_found")
        assert b"Models here: a b, org/m." in body


async def test_the_engines_metrics_come_first_and_then_the_workers(make_worker, connect):
    """Both in one text of one form, whatever form is asked for, with the length that it has become."""
    _, port = await make_worker()
    client = await connect(port)
    for accept in (b"*/*", b"application/openmetrics-text;version=1.0.0"):
        await client.send(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\naccept: %b\r\n\r\n" % accept)
        status, headers, body = await client.response(b"GET")
        assert (status, headers[b"content-type"]) == (200, b"text/plain; version=0.0.4")
        assert re.match(rb"fake_done \d+\n# HELP ichat_worker_in_flight ", body)
        assert b"# EOF" not in body
        lines = body.decode().splitlines()
        assert "ichat_worker_in_flight 0.0" in lines
        assert "ichat_engine_aborts_total 0.0" in lines
        assert any(line.startswith("ichat_worker_load_seconds ") for line in lines)


async def test_the_gpus_of_its_machine_are_in_a_workers_metrics(make_worker, connect, nursery, monkeypatch):
    """By the names that the gateway's metrics have, with what the worker itself holds; those of the engine come first."""
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(buses=(1, 2)))
    rig, port = await make_worker()
    nursery.start_soon(rig.worker.watch_machine_forever)
    client = await connect(port)
    assert b"ichat_gpu" not in (await client.get(b"/metrics"))[2]
    await until(lambda: rig.worker.heartbeat().machine is not None)
    status, _, body = await client.get(b"/metrics")
    assert status == 200
    found = body.decode()
    assert re.search(r'^ichat_gpu_memory_total_bytes\{gpu="1",machine="[^"]+"\} 8', found, re.MULTILINE)
    assert len(re.findall(r"^ichat_gpu_utilization_ratio\{", found, re.MULTILINE)) == 2
    nursery.cancel_scope.cancel()


async def test_the_gateway_hears_at_once_of_other_models(make_worker, connect, serve, nursery):
    """A route that loads or unloads an adapter makes the worker beat, long before the next beat is due."""

    async def take(stream, head, body):
        await stream.send_all(plain(b'{"lost": []}'))

    gateway, gateway_port = await serve(take)
    rig, port = await make_worker()
    address = f"http://127.0.0.1:{gateway_port}"
    reporter = HeartbeatSender(address, ca_file=None, host="127.0.0.1", now=rig.worker.heartbeat, lost=rig.host.fail)
    rig.worker.changed.add(reporter.changed)
    nursery.start_soon(reporter.send_forever)
    await until(lambda: len(gateway.requests) == 1)
    client = await connect(port)
    heartbeats = 1
    for path in (b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter", b"/load_lora_adapter", b"/unload_lora_adapter"):
        assert (await client.ask())[0] == 200
        assert (await client.ask(target=path))[0] == 200
        heartbeats += 1
        await until(lambda heartbeats=heartbeats: len(gateway.requests) >= heartbeats)
    assert len(gateway.requests) == heartbeats
    assert json.loads(gateway.requests[-1][1])["state"] == "ready"
    await reporter.send_goodbye()
    assert json.loads(gateway.requests[-1][1])["state"] == "gone"


def split(line):
    options, engine = read_command_line(line.split())
    return attrs.asdict(options), engine


def test_the_command_line_is_split_by_exact_names():
    """Our flags are ours in every spelling; everything else is the engine's, untouched and in its order."""
    options, engine = split(
        "-be fake --model M --max_model_len 5 -ga http://gw:4000 --hi 3 -tp 2 --served_model_name a b --port=0 --host 0.0.0.0 -O3"
    )
    assert options["backend"] == "fake"
    assert options["gateway_address"] == "http://gw:4000"
    assert options["heartbeat_interval"] == 3
    assert (options["log_streaming"], options["orphan_after_s"]) == (True, 0)
    assert options["served_model_name"] == ["a", "b"]
    assert engine == "--model M --max_model_len 5 -tp 2 -O3 --served-model-name a b".split()


@pytest.mark.parametrize(
    "line",
    [
        "--port x",
        "--port 99999",
        "--heartbeat-interval 0",
        "--gateway-address gw:4000",
        "--worker-id",
        "--log-streaming maybe",
        "--orphan-after-s -1",
        "--orphan-after-s nan",
        "--backend a b --drain-s z",
    ],
)
def test_a_wrong_flag_of_ours(line):
    """One sentence and exit code 64."""
    with pytest.raises(Exit) as caught:
        split(line)
    assert caught.value.code == EXIT_USAGE
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "line", ["--gateway http://gw:4000", "--gateway=http://gw:4000 --model m", "-be fake --gateway"]
)
def test_a_flag_that_has_another_name_now(line):
    """It is not handed to the engine: one sentence has the new name."""
    with pytest.raises(Exit) as caught:
        split(line)
    assert (caught.value.code, str(caught.value)) == (
        EXIT_USAGE,
        "ichat.pyz worker: --gateway is now --gateway-address.",
    )


def test_an_unknown_engine():
    """The sentence lists those there are."""
    with pytest.raises(Exit, match=r"no engine 'x'; known here: fake, sglang, vllm"):
        find("x")


async def test_the_wire_is_asked_just_before_the_engine_gets_a_request(make_worker, connect):
    """It knows of all that are under way then, and what it refuses never reaches the engine."""
    rig, port = await make_worker()
    seen = []

    def admit(request, under_way):
        seen.append((request.path, [one.path for one in under_way]))
        if under_way:
            raise errors.model_not_ready("m", "one at a time", 1)

    rig.engine.adapter.admit = admit
    first, second = await connect(port), await connect(port)
    await first.send(post_of(b"{}", b"/wait"))
    await until(lambda: rig.engine.running == 1)
    status, _, body = await second.ask(target=b"/second")
    assert (status, code_of(body)) == (503, "model_not_ready")
    assert seen == [(b"/wait", []), (b"/second", [b"/wait"])]
    await first.stream.aclose()
    await until(lambda: not rig.host.in_flight)
    assert (await second.ask(target=b"/third"))[0] == 200
    await until(lambda: rig.engine.done == 1)
    assert seen[2:] == [(b"/third", [])]
