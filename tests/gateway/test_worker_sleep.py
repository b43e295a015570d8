"""The sleep of a worker's engine, with a fake engine: what is refused meanwhile, and what can happen in the middle."""

import json
import sys

import pytest
import trio
from support.peers import post_of, until
from support.programs import LIMIT_S

from ichat import errors
from ichat.engines.engine_loop import TIMES, EngineTimes
from ichat.engines.held_prefixes import HeldPrefixes
from ichat.errors import EXIT_SOFTWARE, ApiError
from ichat.protocol.prefixes import SentChain

pytestmark = pytest.mark.one_process("a worker's process, without a gateway")


@pytest.fixture(autouse=True)
def plugins(monkeypatch):
    monkeypatch.syspath_prepend("tests/support/fake_engine")
    monkeypatch.delitem(sys.modules, "fake_engine", raising=False)


async def change(client, name, method=b"POST", proof=b"t"):
    """Ask as the gateway does; return the status and the parsed body."""
    await client.send(
        b"%b /%b HTTP/1.1\r\nhost: localhost\r\nx-ichat-proof: %b\r\ncontent-length: 0\r\n\r\n"
        % (method, name.encode(), proof)
    )
    status, _, body = await client.response(method)
    return status, json.loads(body)


async def refusal_of_work(client):
    """Ask for work; return the code of the error."""
    status, _, body = await client.ask()
    return json.loads(body)["error"]["code"] if status != 200 else ""


async def test_an_engine_sleeps_and_wakes(make_worker, connect):
    """Asleep, the worker declines work as the gateway understands it, still tells of itself, and is the same afterwards."""
    rig, port = await make_worker("--sleeps", token="t")
    states = []
    rig.worker.changed.add(lambda: states.append(rig.worker.state()))
    client = await connect(port)
    assert rig.worker.heartbeat().can_sleep
    assert await change(client, "sleep") == (200, {"state": "asleep"})
    heartbeat = rig.worker.heartbeat()
    assert (heartbeat.state, heartbeat.phase, [model.id for model in heartbeat.models]) == ("asleep", "asleep", ["m"])
    status, headers, body = await client.ask()
    assert (status, headers[b"x-ichat-code"], headers[b"retry-after"]) == (503, b"model_not_ready", b"5")
    assert headers[b"x-ichat-code"] in errors.DECLINED
    assert json.loads(body)["error"]["message"] == "The model `m` is not ready: its engine is asleep."
    assert (await client.get(b"/health"))[::2] == (503, b'{"status": "unavailable"}')
    assert (await client.get(b"/v1/models"))[0] == 200
    assert (await client.get(b"/metrics"))[0] == 200
    assert (await client.get(b"/health_generate"))[0] == 503
    assert await change(client, "wake") == (200, {"state": "ready"})
    assert (await client.ask())[0] == 200
    assert (await client.get(b"/health"))[0] == 200
    assert states == ["draining", "asleep", "waking", "ready"]
    assert rig.engine.worked_asleep == 0


async def test_connections_of_the_engines_loop_are_refused_as_well(make_worker, connect):
    """A connection whose requests the engine's thread reads itself: 503 while the engine sleeps, and on it goes."""
    rig, port = await make_worker("--sleeps", token="t")
    client, gateway = await connect(port), await connect(port)
    for _ in range(3):
        assert (await client.ask())[0] == 200
        assert len(rig.host.connections) == 1, "it is on the engine's loop"
        assert (await change(gateway, "sleep"))[0] == 200
        for _ in range(2):
            assert await refusal_of_work(client) == "model_not_ready"
        assert (await change(gateway, "wake"))[0] == 200
    assert rig.engine.worked_asleep == 0


async def test_a_worker_with_requests_does_not_sleep(make_worker, connect, tmp_path):
    """409 in one sentence while there is one, which ends as always; a reader of the metrics is no obstacle."""
    rig, port = await make_worker("--sleeps", token="t")
    client, gateway, there = await connect(port), await connect(port), tmp_path / "there"
    body = json.dumps({"until_there": str(there)}).encode()
    await client.send(post_of(body, b"/v1/x"))
    await until(lambda: rig.engine.running == 1)
    status, answer = await change(gateway, "sleep")
    assert (status, answer["error"]["code"]) == (409, "conflict")
    assert answer["error"]["message"].startswith("The engine works on 1 request, and sleeps only when it is idle")
    assert rig.worker.state() == "ready"
    there.touch()
    assert (await client.response())[0] == 200
    waiting = await connect(port)
    await waiting.send(b"GET /wait HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await until(lambda: rig.engine.running == 1)
    assert (await change(gateway, "sleep"))[0] == 200


async def test_a_second_time_is_harmless(make_worker, connect, nursery):
    """Asked for at once or one after the other, the engine sleeps once, and wakes once."""
    rig, port = await make_worker("--sleeps", token="t")
    clients = [await connect(port) for _ in range(3)]
    assert await change(clients[0], "wake") == (200, {"state": "ready"})
    for name, state in (("sleep", "asleep"), ("wake", "ready")):
        rig.engine.holds, answers = True, []

        async def ask(client, name, answers):
            answers.append(await change(client, name))

        for client in clients:
            nursery.start_soon(ask, client, name, answers)
        await until(lambda: len(rig.door.clients) == 3 and rig.engine.changes[-1:] == [name])  # noqa: B023
        rig.engine.holds = False
        await until(lambda: len(answers) == 3)  # noqa: B023
        assert answers == [(200, {"state": state})] * 3
        assert await change(clients[0], name) == (200, {"state": state})
    assert rig.engine.changes == ["sleep", "wake"]


async def test_a_wake_in_the_middle_of_the_way_to_sleep(make_worker, connect, nursery):
    """The engine falls asleep first, and wakes then; work is refused all the time, and each caller hears of its own."""
    rig, port = await make_worker("--sleeps", token="t")
    first, second, client = [await connect(port) for _ in range(3)]
    rig.engine.holds, answers = True, {}

    async def ask(name, one):
        answers[name] = await change(one, name)

    nursery.start_soon(ask, "sleep", first)
    await until(lambda: rig.engine.changes == ["sleep"])
    assert rig.worker.state() == "draining"
    nursery.start_soon(ask, "wake", second)
    assert await refusal_of_work(client) == "model_not_ready"
    rig.engine.holds = False
    await until(lambda: len(answers) == 2)
    assert {name: status for name, (status, _) in answers.items()} == {"sleep": 200, "wake": 200}
    assert (rig.engine.changes, rig.worker.state()) == (["sleep", "wake"], "ready")
    assert (await client.ask())[0] == 200


@pytest.mark.parametrize("name", ["sleep", "wake"])
async def test_a_caller_that_leaves_changes_nothing(make_worker, connect, name):
    """What was begun goes on to its end, and the worker knows where it is."""
    rig, port = await make_worker("--sleeps", token="t")
    gateway = await connect(port)
    if name == "wake":
        await change(gateway, "sleep")
    rig.engine.holds = True
    await gateway.send(post_of(b"", b"/%b" % name.encode(), b"x-ichat-proof: t\r\n"))
    await until(lambda: rig.engine.changes[-1:] == [name])
    await gateway.stream.aclose()
    await until(lambda: not rig.door.clients)
    rig.engine.holds = False
    await until(lambda: rig.worker.state() == {"sleep": "asleep", "wake": "ready"}[name])
    assert (await change(await connect(port), "wake")) == (200, {"state": "ready"})


async def test_an_engine_without_sleep(make_worker, connect):
    """409 with the engine's own reason; the gateway knows it beforehand."""
    rig, port = await make_worker(token="t")
    client = await connect(port)
    status, answer = await change(client, "sleep")
    assert (status, answer["error"]["code"]) == (409, "cannot_sleep")
    assert answer["error"]["message"] == "The engine cannot sleep: it is a fake."
    assert not rig.worker.heartbeat().can_sleep
    assert await change(client, "wake") == (200, {"state": "ready"})
    assert (await client.ask())[0] == 200


async def test_sleep_is_only_for_the_gateway_and_its_method(make_worker, connect):
    """Others than the gateway reach the engine's own route of that name; a GET is told the method; none while it loads."""
    rig, port = await make_worker("--sleeps", token="t")
    client = await connect(port)
    for proof in (b"", b"wrong"):
        assert (await change(client, "sleep", proof=proof))[1]["choices"], "the engine's own answer"
    assert (await client.ask(target=b"/wake"))[0] == 200
    assert rig.engine.changes == []
    status, answer = await change(client, "sleep", method=b"GET")
    assert (status, answer["error"]["code"]) == (405, "method_not_allowed")
    rig.worker.draining = True
    assert (await change(client, "sleep"))[1]["error"]["code"] == "draining"
    rig, port = await make_worker("--sleeps", "--load-s", "3600", token="t", wait=False)
    client = await connect(port)
    for name in ("sleep", "wake"):
        assert (await change(client, name))[1]["error"]["code"] == "model_not_ready"
    rig.engine.go_on.set()
    await rig.host.ready.wait()


async def test_an_engine_that_refuses_is_as_before(make_worker, connect):
    """Its own error is the answer, and it works on."""
    rig, port = await make_worker("--sleeps", token="t")
    rig.engine.change_failure = ApiError(409, "conflict", "The engine is busy.", retry=False)
    client = await connect(port)
    status, answer = await change(client, "sleep")
    assert (status, answer["error"]["message"]) == (409, "The engine is busy.")
    rig.engine.asleep = False
    assert rig.worker.state() == "ready"
    assert (await client.ask())[0] == 200


@pytest.mark.parametrize("name", ["sleep", "wake"])
@pytest.mark.parametrize("how", ["fails", "dies", "hangs"])
async def test_an_engine_that_fails_in_the_middle_is_given_up(make_worker, connect, name, how):
    """The caller hears 503, and the worker ends with the reason, so that its gateway can start another one."""
    rig, port = await make_worker("--sleeps", token="t", times=EngineTimes(change_s=0.05) if how == "hangs" else TIMES)
    gateway = await connect(port)
    if name == "wake":
        await change(gateway, "sleep")
    why = f"it failed while {'falling asleep' if name == 'sleep' else 'waking up'}"
    if how == "fails":
        rig.engine.change_failure, why = RuntimeError("out of memory"), f"{why}: RuntimeError('out of memory')"
    elif how == "hangs":
        rig.engine.holds, why = True, f"{why}: TimeoutError()"
    else:
        rig.engine.change_failure = RuntimeError("no connection to the core")
        rig.engine.dead = why = "its core was killed"
    status, answer = await change(gateway, name)
    assert (status, answer["error"]["code"]) == (503, "engine_dead")
    assert why in answer["error"]["message"]
    with trio.fail_after(LIMIT_S):
        await rig.host.ended.wait()
    assert (rig.host.failure.code, why in str(rig.host.failure)) == (EXIT_SOFTWARE, True)
    assert why in rig.worker.heartbeat().failure
    assert rig.worker.state() == "draining"


@pytest.mark.parametrize("name", ["sleep", "wake"])
async def test_a_stop_in_the_middle(make_worker, connect, nursery, name):
    """An engine that is stopped while it changes ends, and who waits for the change gets an answer."""
    rig, port = await make_worker("--sleeps", token="t")
    gateway, answers = await connect(port), []
    if name == "wake":
        await change(gateway, "sleep")
    rig.engine.holds = True

    async def ask():
        answers.append(await change(gateway, name))

    nursery.start_soon(ask)
    await until(lambda: rig.engine.changes[-1:] == [name])
    await rig.host.stop(5)
    assert rig.host.ended.is_set()
    await until(lambda: answers)
    assert answers[0][0] == 503
    assert rig.host.failure is None


async def test_a_worker_ends_in_its_sleep(make_worker, connect):
    """It needs not wake up for that."""
    rig, port = await make_worker("--sleeps", token="t")
    await change(await connect(port), "sleep")
    rig.worker.draining = True
    assert rig.worker.state() == "draining"
    await rig.host.stop(5)
    assert (rig.host.ended.is_set(), rig.host.failure, rig.engine.changes) == (True, None, ["sleep"])


async def test_the_gateway_hears_that_the_cache_is_gone(make_worker, connect):
    """Nothing of what was held is reported after a sleep, and what comes late is no news; awake, all goes on."""
    rig, port = await make_worker("--sleeps", token="t")
    held = HeldPrefixes()
    object.__setattr__(rig.host.info, "held", held)

    def store():
        held.stored([1], None, 64, held.expect(SentChain(256, (b"d" * 8,)), 64, 256))
        return len(held)

    assert store() == 1
    client = await connect(port)
    for name, after in (("sleep", 0), ("wake", 1)):
        await change(client, name)
        changes = held.next_changes()
        assert (changes.cleared, changes.have, len(held)) == (True, [], 0)
        held.sent()
        assert store() == after


async def test_no_request_is_lost_or_worked_on_asleep(make_worker, connect, nursery):
    """Clients that never rest, beside a gateway that lets the engine sleep whenever it can: all answers are whole."""
    rig, port = await make_worker("--sleeps", token="t")
    gateway, answers, ends = await connect(port), [], False

    async def ask():
        client = await connect(port)
        while not ends:
            status, _, body = await client.ask(stream=len(answers) % 3 == 0)
            answers.append((status, json.loads(body)["error"]["code"] if status != 200 else ""))
            await trio.sleep(0.001)

    for _ in range(4):
        nursery.start_soon(ask)
    slept = 0
    with trio.fail_after(LIMIT_S):
        while slept < 20:
            slept += (await change(gateway, "sleep"))[0] == 200
            assert (await change(gateway, "wake"))[0] == 200
    ends = True
    assert set(answers) == {(200, ""), (503, "model_not_ready")}
    assert rig.engine.worked_asleep == 0
