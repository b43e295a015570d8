"""The event stream and the history: what followers get, in which order, and what it takes."""

import json
from types import SimpleNamespace

import attrs
import pytest
import trio
from support.peers import JSON_POST, code_of, plain
from support.programs import LIMIT_S

from ichat.admin import events as streams
from ichat.admin.changes import FIGURES_AT_ONCE, ToldMarks
from ichat.admin.events import LOOK_S, EventStreams
from ichat.admin.overview import Overview
from ichat.config.schema import HistorySettings, Routing
from ichat.fleet.fleet import Fleet
from ichat.hardware.machines import MachineMonitor
from ichat.http import sse
from ichat.observability.history import History
from ichat.protocol.messages import Heartbeat, LoadPhase, Machine
from ichat.proxy.lanes import LaneMeter
from ichat.proxy.requests_in_flight import RequestsInFlight
from ichat.relays.figures import RelayView
from ichat.routing.aliases import Aliases
from ichat.routing.balancer import Balancer
from ichat.security.keys import hash_of
from ichat.supervisor.starts import Starts


class Reader:
    """A client of the event stream, which keeps the state as the stream tells it."""

    def __init__(self, client):
        self._client = client
        self._decoder = sse.EventDecoder(2**24)
        self.events = []
        self.names = []

    async def next(self, *names):
        """Return the data of the next event of one of these names."""
        with trio.fail_after(LIMIT_S):
            while True:
                while self.events:
                    event = self.events.pop(0)
                    self.names.append(event.name)
                    if not names or event.name in names:
                        return json.loads(event.data)
                data = await self._client.stream.receive_some()
                assert data, "the stream has ended"
                self.events += self._decoder.feed(b"\n".join(data.split(b"\r\n")))


async def follow(connect, port, query=b""):
    client = await connect(port)
    await client.send(b"GET /v1/admin/events%b HTTP/1.1\r\nhost: localhost\r\n\r\n" % query)
    return Reader(client)


async def hello(stream, head, body):
    await stream.send_all(plain(b'{"usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}'))


async def send_heartbeat(client, worker_id="w", **more):
    body = json.dumps({"worker_id": worker_id, "model_name": "n", "host": "127.0.0.1", "port": 1, **more}).encode()
    await client.send(JSON_POST % (b"/v1/workers/heartbeat", len(body), body))
    assert (await client.response())[0] == 200


async def test_a_follower_gets_everything_and_then_what_changes(serve, gateway_to, connect):
    """First the whole state, then a worker that comes, its figures as they change, and its end."""
    _, upstream = await serve(hello)
    port = await gateway_to({"m": upstream}, '[[models]]\nname = "best"\ntargets = [{ model = "m" }]\n')
    reader = await follow(connect, port)
    state = await reader.next("state")
    assert state.keys() == {
        "gateway", "config", "aliases", "usage_storage", "history", "workers", "models", "machines",
    }  # fmt: skip
    assert (state["workers"], [one["id"] for one in state["models"]]) == ([], ["m"])
    [alias] = state["aliases"]
    assert (alias["name"], alias["targets"], alias["shadow"]) == ("best", [{"model": "m", "weight": 1.0}], None)
    client = await connect(port)
    progress = {"running": 1, "waiting": 2, "kv_use": 0.25, "prompt_tokens": 100, "cached_tokens": 10}
    await send_heartbeat(client, progress=progress)
    [worker] = (await reader.next("workers"))["changed"]
    assert (worker["worker_id"], worker["state"], worker["prefix_hit_rate"]) == ("w", "ready", None)
    assert (worker["running"], worker["waiting"], worker["kv_use"]) == (1, 2, 0.25)
    await send_heartbeat(client, progress=progress | {"kv_use": 0.5, "prompt_tokens": 200, "cached_tokens": 60})
    [worker] = (await reader.next("workers"))["changed"]
    assert (worker["kv_use"], worker["prefix_hit_rate"]) == (0.5, 0.5)
    await send_heartbeat(client, state="gone")
    assert await reader.next("workers") == {"changed": [], "gone": ["w"]}
    assert "state" not in reader.names[1:]


async def test_a_model_in_use_is_an_event(serve, gateway_to, connect):
    """What is in flight is looked at once in a while: no request waits for that."""
    release = trio.Event()

    async def slow(stream, head, body):
        await release.wait()
        await hello(stream, head, body)

    _, upstream = await serve(slow)
    port = await gateway_to({"m": upstream})
    reader, client = await follow(connect, port), await connect(port)
    assert [one["in_flight"] for one in (await reader.next("state"))["models"]] == [0]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.ask)
        assert [one["in_flight"] for one in (await reader.next("models"))["models"]] == [1]
        release.set()
    assert [one["in_flight"] for one in (await reader.next("models"))["models"]] == [0]


async def test_samples_are_sent_and_kept(serve, gateway_to, connect):
    """A sample has what was counted since the one before; the history has the same, as columns."""
    _, upstream = await serve(hello)
    port = await gateway_to({"m": upstream}, "[history]\nsample_s = 1\n")
    reader, client = await follow(connect, port), await connect(port)
    await reader.next("state")
    assert (await client.ask())[0] == 200
    assert (await client.ask("nothing"))[0] == 404
    seen = []
    while sum(one["requests"] for one in seen) < 2:
        seen.append(await reader.next("sample"))
    assert {one["usage_storage"] for one in seen} == {"ok"}
    assert sum(one["errors"] for one in seen) == 1
    assert sum(one["output_tokens"] for one in seen) == 2
    assert sum(one["models"].get("m", {}).get("requests", 0) for one in seen) == 1
    _, _, body = await client.get(b"/v1/admin/history")
    history = json.loads(body)
    columns = history["columns"]
    first = columns["at"].index(seen[0]["at"])  # there may be samples from before there was a follower
    sent = slice(first, first + len(seen))
    assert columns["at"][sent] == [one["at"] for one in seen]
    assert columns["requests"][sent] == [one["requests"] for one in seen]
    assert {len(column) for column in (*columns.values(), *history["models"]["m"].values())} == {len(columns["at"])}
    assert max(value for value in history["models"]["m"]["ttft_p50_ms"] if value is not None) > 0


async def test_lanes_say_which_key_and_name_bring_requests_where(serve, gateway_to, connect):
    """A request under way is a lane, its tokens count at its end, and an empty list follows the last lane."""
    release = trio.Event()

    async def slow(stream, head, body):
        await release.wait()
        await hello(stream, head, body)

    _, upstream = await serve(slow)
    port = await gateway_to({"m": upstream}, '[[models]]\nname = "best"\ntargets = [{ model = "m" }]\n')
    reader, client = await follow(connect, port), await connect(port)
    await reader.next("state")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.ask, "best")
        [lane] = (await reader.next("lanes"))["lanes"]
        assert (lane["key"], lane["name"], lane["model"], lane["worker"]) == ("", "best", "m", "external:m")
        assert (lane["in_flight"], lane["ended"], lane["tokens"]) == (1, 0, 0)
        release.set()
    while not lane["ended"]:
        [lane] = (await reader.next("lanes"))["lanes"]
    assert (lane["in_flight"], lane["ended"], lane["tokens"]) == (0, 1, 2)
    assert (await reader.next("lanes"))["lanes"] == []


async def test_a_disk_that_fails_later_is_an_event(overview, nursery, autojump_clock):
    """Who follows since the morning hears in the evening that usage cannot be written any more, and that it is again."""
    ledger = SimpleNamespace(storage="ok")
    streams = streams_of(overview, ledger)
    nursery.start_soon(streams.run_forever)
    nursery.start_soon(overview.history.sample_forever)
    follower = streams.follow(wants_requests=False)
    [(name, state)] = await read(follower)
    assert (name, state["usage_storage"]) == ("state", "ok")
    for storage in ("the disk is full", "ok"):
        ledger.storage = storage
        [(name, sample)] = await read(follower)
        assert (name, sample["usage_storage"]) == ("sample", storage)


async def test_followers_hear_of_keys(gateway_to, connect, tmp_path):
    """Who shows keys asks for them again when one was made; the event has no secret."""
    hash_ = hash_of("sk-admin-0123456789")
    port = await gateway_to({}, f'state_directory = "{tmp_path}"\n[security]\nadmin_key_hash = "{hash_}"\n')
    client = await connect(port)
    headers = b"host: localhost\r\nauthorization: Bearer sk-admin-0123456789\r\ncontent-type: application/json\r\n"
    await client.send(b"GET /v1/admin/events HTTP/1.1\r\n%b\r\n" % headers)
    reader = Reader(client)
    await reader.next("state")
    other, body = await connect(port), b'{"name": "a"}'
    await other.send(b"POST /v1/admin/keys HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n%b" % (headers, len(body), body))
    assert (await other.response())[0] == 201
    assert await reader.next("keys") == {}


async def test_there_is_a_bound_to_streams(gateway_to, connect):
    """More than `limits.event_streams_max` are refused, and one that ends makes room."""
    port = await gateway_to({}, "[limits]\nevent_streams_max = 1\n")
    reader = await follow(connect, port)
    await reader.next("state")
    client = await connect(port)
    status, _, body = await client.get(b"/v1/admin/events")
    assert (status, code_of(body)) == (503, "overloaded")
    await reader._client.stream.aclose()
    with trio.fail_after(LIMIT_S):
        while (await client.get(b"/v1/admin/events?nonsense=1"))[0] == 503:
            await trio.sleep(0.01)
    status, _, body = await client.get(b"/v1/admin/events?nonsense=1")
    assert status == 400


# Followers, in virtual time.


@pytest.fixture
def fleet():
    return Fleet({}, trio.current_time, max_in_flight=5)


@pytest.fixture
async def overview(fleet):
    balancer = Balancer(fleet.directory.availability, trio.current_time, Routing())
    traffic = SimpleNamespace(in_flight=0, traffic=tuple)
    history = History(HistorySettings(), fleet.table, fleet.directory, balancer, traffic=traffic)
    context, monitor = SimpleNamespace(balancer=balancer, aliases=Aliases({})), MachineMonitor(SimpleNamespace(pids={}))
    requests = RequestsInFlight()
    return Overview(
        fleet.table,
        fleet.directory,
        context,
        monitor,
        history,
        requests,
        LaneMeter(requests, []),
        "g",
        0.0,
        Starts(""),
        [],
    )


def streams_of(overview, ledger=None, **more):
    ledger = ledger or SimpleNamespace(storage="ok")
    return EventStreams(overview, ledger, SimpleNamespace(state=None), **more)


def beat(fleet, worker_id, **more):
    fleet.registry.record_heartbeat(
        Heartbeat(worker_id=worker_id, model_name="m", host="h", port=1, backend="vllm", **more)
    )


async def test_a_load_is_sent_each_second_and_a_phase_at_once(fleet, overview, nursery, autojump_clock):
    """Who follows sees the seconds of a load go on, and its phases as they begin."""
    streams = streams_of(overview)
    nursery.start_soon(streams.run_forever)
    beat(fleet, "w", state="loading", load=[LoadPhase("importing vLLM", 4.0)], heartbeat_interval=3600.0)
    follower, began_at = streams.follow(wants_requests=False), trio.current_time()
    [(_, state)] = await read(follower)
    assert [one["load"]["phases"][-1]["name"] for one in state["workers"]] == ["importing vLLM"]

    async def row_told():
        while True:
            [(name, told)] = await read(follower)
            if name == "workers":
                return told["changed"][0]

    for _ in range(3):
        row = await row_told()
        assert row["load"]["elapsed_s"] == pytest.approx(4 + trio.current_time() - began_at, abs=0.01)
    assert 2 < trio.current_time() - began_at < 5
    beat(fleet, "w", state="loading", load=[LoadPhase("importing vLLM", 5.0), LoadPhase("loading weights", 0.1)])
    row = await row_told()
    assert [one["name"] for one in row["load"]["phases"]] == ["importing vLLM", "loading weights"]


async def test_a_changed_machine_of_an_idle_worker_is_an_event(overview, fleet, nursery, autojump_clock):
    """A heartbeat that differs from the one before in nothing but the worker's machine is a change."""
    streams = streams_of(overview)
    nursery.start_soon(streams.run_forever)
    beat(fleet, "w", heartbeat_interval=3600.0)
    follower = streams.follow(wants_requests=False)
    [(_, state)] = await read(follower)
    assert [one["machine"] for one in state["workers"]] == [None]
    beat(fleet, "w", heartbeat_interval=3600.0, machine=Machine(id="boot-1", name="gpu-1"))
    with trio.fail_after(5 * LOOK_S):
        while (told := (await read(follower))[0])[0] != "workers":
            pass
    assert [one["machine"] for one in told[1]["changed"]] == ["gpu-1"]


async def test_a_change_while_the_state_is_read_follows_it(overview, nursery, autojump_clock):
    """The state may have been read before the change: it is sent as an event, too."""

    class Reloader:
        @property
        def state(self):
            streams.send_to_all("config", "changed")
            return "before"

    streams = EventStreams(overview, SimpleNamespace(storage="ok"), Reloader())
    nursery.start_soon(streams.run_forever)
    with trio.fail_after(5 * LOOK_S):
        (first, state), (second, config) = await read(streams.follow(wants_requests=False), 2)
    assert (first, state["config"], second, config) == ("state", "before", "config", "changed")


async def test_a_gateway_as_it_was_before_is_an_event_for_who_has_seen_it_otherwise(overview, nursery, autojump_clock):
    """A follower that gets the state between two looks hears of figures that are those of the last look again."""
    relay = RelayView(1, 8, "accepting", 0, 0, 1.0, 0, 0.0, 0)
    figures = SimpleNamespace(last_crash=None, views=lambda: [relay])
    streams = streams_of(attrs.evolve(overview, relays=[figures]))
    nursery.start_soon(streams.run_forever)
    first = streams.follow(wants_requests=False)
    await read(first)
    await trio.sleep(LOOK_S / 4)
    relay = attrs.evolve(relay, requests=1)
    second = streams.follow(wants_requests=False)
    (_, state), *_ = await read(second)
    relay = attrs.evolve(relay, requests=0)
    seen = [state["gateway"]["relays"][0]["requests"]]
    with trio.fail_after(5 * LOOK_S):
        while seen[-1]:
            gateways = [data for name, data in await read(second) if name == "gateway"]
            seen += [data["relays"][0]["requests"] for data in gateways]
    assert seen[0] == 1


@pytest.mark.parametrize(
    ("worker_id", "then", "later"), [("w", "draining", "ready"), ("w", "gone", "ready"), ("x", "ready", "gone")]
)
async def test_a_worker_as_it_was_before_is_an_event_for_who_has_seen_it_otherwise(
    overview, fleet, nursery, autojump_clock, worker_id, then, later
):
    """It changes after the look at all workers, is in the state of a new follower so, and changes back at once."""

    class Reloader:
        changes = False

        @property
        def state(self):  # which is read between the look and the workers of the state
            if self.changes:
                beat(fleet, worker_id, state=then)

    reloader = Reloader()
    streams = EventStreams(overview, SimpleNamespace(storage="ok"), reloader)
    nursery.start_soon(streams.run_forever)
    beat(fleet, "w", heartbeat_interval=3600.0)
    first = streams.follow(wants_requests=False)
    await read(first)
    reloader.changes = True
    second = streams.follow(wants_requests=False)
    [(_, state)] = await read(second)
    known = {one["worker_id"]: one["state"] for one in state["workers"]}
    assert known.get(worker_id, "gone") == then
    beat(fleet, worker_id, state=later)
    with trio.fail_after(5 * LOOK_S):
        while known.get(worker_id, "gone") != later:
            for name, data in await read(second):
                if name == "workers":
                    known |= {one["worker_id"]: one["state"] for one in data["changed"]}
                    known = {key: value for key, value in known.items() if key not in data["gone"]}


async def test_figures_of_a_state_are_sent_again_like_others():
    """A new follower may have seen other figures: they take their turn."""
    changes = ToldMarks()
    things = {"t": ("fact", 0)}
    changes.find(things, with_figures=True)
    changes.note_state({"t": ("fact", 1)})
    assert changes.find(things, with_figures=False) == ([], [])
    assert changes.find(things, with_figures=True) == (["t"], [])
    changes.note_state(things)
    assert changes.find(things, with_figures=True) == ([], [])


async def read(follower, count=1):
    """Return the names and data of the next events."""
    decoder, found = sse.EventDecoder(2**24), []
    while len(found) < count:
        found += decoder.feed(await anext(follower))
    return [(event.name, json.loads(event.data)) for event in found]


async def test_nothing_runs_without_followers(overview, fleet, nursery, autojump_clock):
    """The first one to come wakes the task, and the last one to go lets it sleep again."""
    events = streams_of(overview)
    nursery.start_soon(events.run_forever)
    await trio.sleep(100)
    assert not fleet.table.changed._listeners
    follower = events.follow(wants_requests=False)
    assert (await read(follower))[0][0] == "state"
    assert fleet.table.changed._listeners
    events.forget(follower)
    await trio.sleep(10)
    assert not fleet.table.changed._listeners
    follower = events.follow(wants_requests=False)
    await read(follower)
    del follower
    await trio.sleep(10)
    assert not fleet.table.changed._listeners, "a follower whose client has left without a word is gone as well"


async def test_one_worker_of_many_is_one_workers_json(overview, fleet, nursery, autojump_clock):
    """However many workers there are, a change of one of them tells of it alone."""
    for number in range(1000):
        beat(fleet, f"w{number}")
    events = streams_of(overview)
    nursery.start_soon(events.run_forever)
    follower = events.follow(wants_requests=False)
    [(_, state)] = await read(follower)
    assert len(state["workers"]) == 1000
    beat(fleet, "w500", state="draining")
    [(name, data), *_] = await read(follower)
    assert name in ("workers", "models")
    while name != "workers":
        [(name, data), *_] = await read(follower)
    assert [one["worker_id"] for one in data["changed"]] == ["w500"]
    assert len(json.dumps(data)) < 1500


async def test_figures_take_turns():
    """Of figures only so many are told at a time, the longest unheard ones first; facts are told at once."""
    changes = ToldMarks()
    things = {f"t{number}": ("fact", 0) for number in range(3 * FIGURES_AT_ONCE)}
    assert changes.find(things, with_figures=True) == (list(things), [])
    seen = []
    for turn in range(1, 4):
        things = dict.fromkeys(things, ("fact", turn))
        found, gone = changes.find(things, with_figures=True)
        assert (len(found), gone) == (FIGURES_AT_ONCE, [])
        seen += found
    assert sorted(seen) == sorted(things)
    assert changes.find(things, with_figures=False) == ([], [])
    things["t1"] = ("other", 0)
    del things["t2"]
    assert changes.find(things, with_figures=False) == (["t1"], ["t2"])


async def test_a_follower_that_fell_behind_gets_the_whole_state_again(overview, fleet, nursery, autojump_clock):
    """What waits for it is bounded; what it gets after that is the state, and whole events only."""
    events = streams_of(overview, behind_bytes_max=10_000)
    nursery.start_soon(events.run_forever)
    lazy, quick = events.follow(wants_requests=False), events.follow(wants_requests=False)
    await read(lazy)
    await read(quick)
    for number in range(100):
        beat(fleet, f"w{number}")
        await read(quick)
    assert lazy._changes_bytes <= 10_000
    [(name, state)] = await read(lazy)
    assert name == "state"
    assert len(state["workers"]) == 100
    beat(fleet, "w7", state="draining")
    events_after = await read(lazy)
    assert events_after[0][0] in ("workers", "models")


async def test_streams_end_with_the_gateway(overview, nursery, autojump_clock):
    """What is there is still told."""
    events = streams_of(overview)
    nursery.start_soon(events.run_forever)
    follower = events.follow(wants_requests=False)
    await read(follower)
    events.send_to_all("keys", {})
    events.close()
    assert [piece async for piece in follower] == [b"event: keys\ndata: {}\n\n"]


async def test_a_silent_stream_has_comments(overview, nursery, autojump_clock):
    """So that no proxy between closes the connection."""
    events = streams_of(overview)
    nursery.start_soon(events.run_forever)
    follower = events.follow(wants_requests=False)
    await read(follower)
    began = trio.current_time()
    assert await anext(follower) == sse.COMMENT
    assert trio.current_time() - began == pytest.approx(streams.KEEP_ALIVE_S, abs=1)
