"""What the gateway counts, and the workers' own metrics beside it."""

import json
import math
from types import SimpleNamespace

import pytest
import trio
import trio.testing
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from support.exposition import PROCESS, Shown, exposing, heartbeat, known, own, read, shown
from support.peers import SSE_END, SSE_HEAD, code_of, event, plain, post_of, turns_until, until
from support.programs import LIMIT_S

from ichat.config.schema import CircuitBreaker
from ichat.http.body_mover import empty_gap_histogram
from ichat.http.client_side import ClientSide
from ichat.http.hub import Hub
from ichat.http.listeners import open_unix_listener
from ichat.http.pool import Connection, Pool, Upstream
from ichat.http.relay import Relay
from ichat.observability import exposition, fleet_metrics, scrape
from ichat.observability import metrics as counted
from ichat.observability.prometheus_families import MACHINES_AT_ONCE, families_of
from ichat.protocol.messages import Heartbeat, parse_heartbeat
from ichat.routing.endpoint import Endpoint

NAME = 'a "model" \\ b'
HISTOGRAM = """\
# HELP vllm:{name}_seconds Time.
# TYPE vllm:{name}_seconds histogram
vllm:{name}_seconds_bucket{{engine="0",le="1.0",model_name="m"}} 3.0
vllm:{name}_seconds_bucket{{engine="0",le="+Inf",model_name="m"}} 4.0
vllm:{name}_seconds_count{{engine="0",model_name="m"}} 4.0
vllm:{name}_seconds_sum{{engine="0",model_name="m"}} 5.5
"""
GAUGE = '# HELP vllm:{name} Use.\n# TYPE vllm:{name} gauge\nvllm:{name}{{engine="0"}} 0.5\n'
OURS = "# HELP ichat_engine_aborts_total Requests.\n# TYPE ichat_engine_aborts_total counter\nichat_engine_aborts_total 7.0\n"


@pytest.fixture(autouse=True)
def patience(mock_clock):
    """The gateway's time stands, so that workers have as long to answer as they need."""


async def hello(stream, head, body):
    await stream.send_all(plain(b"{}"))


async def test_a_stream_is_measured(serve, gateway_to, connect, mock_clock):
    """Its parts last as long as they do; a model that nobody has is counted without its name."""
    steps = [trio.Event(), trio.Event()]

    async def reply(stream, head, body):
        await steps[0].wait()
        await stream.send_all(SSE_HEAD)
        await steps[1].wait()
        await stream.send_all(event(0) + SSE_END)

    upstream, port = await serve(reply)
    gateway = await gateway_to({"m": port})
    client = await connect(gateway)
    await client.send(post_of(b'{"model": "m"}', b"/chat/completions"))
    await turns_until(lambda: upstream.requests)
    mock_clock.jump(0.5)
    during = await shown(connect, gateway)
    steps[0].set()
    received = await client.stream.receive_some()
    assert received.endswith(b"\r\n\r\n"), "the head alone"
    mock_clock.jump(0.25)
    steps[1].set()
    while not received.endswith(SSE_END):
        received += await client.stream.receive_some()
    assert during.get("ichat_requests_in_flight") == 1
    assert during.get("ichat_requests_total", model="m", route="/v1/chat/completions", status="200") is None
    assert code_of((await (await connect(gateway)).ask(model="nobody's"))[2]) == "model_not_found"
    assert (await (await connect(gateway)).ask(target=b"/v1/new/things"))[0] == 200
    after = await shown(connect, gateway)
    assert after.get("ichat_requests_in_flight") == 0
    assert after.get("ichat_requests_total", model="m", route="/v1/chat/completions", status="200") == 1
    assert after.get("ichat_requests_total", model="m", route="other", status="200") == 1
    assert after.get("ichat_requests_total", model="", route="/v1/chat/completions", status="404") == 1
    assert after.get("ichat_refusals_total", reason="model_not_found") == 1
    for name, longest_s in (("ichat_time_to_first_byte_seconds", 0.75), ("ichat_request_duration_seconds", 0.75)):
        assert after.get(f"{name}_count", model="m") == 2
        assert after.get(f"{name}_bucket", model="m", le="0.25") == 1
        assert after.get(f"{name}_bucket", model="m", le="1.0") == 2
        assert after.get(f"{name}_sum", model="m") == pytest.approx(longest_s)
    assert after.get("ichat_queue_seconds_bucket", model="m", le="0.001") == 2
    assert after.get("ichat_overhead_seconds_count") == 2
    assert after.get("ichat_relay_chunks_total") >= 2
    assert after.get("ichat_relay_bytes_total") > 2 * len(event(0) + SSE_END)
    mock_clock.jump(counted.LOOP_S)  # after 0.75 s of that already
    assert (await shown(connect, gateway)).get("ichat_event_loop_delay_seconds_sum") == pytest.approx(0.75)


async def test_gaps_are_counted_by_model(serve, gateway_to, connect):
    """What comes between the pieces of a model's streams is counted under its name."""
    arrived, more = trio.open_memory_channel(0)

    async def reply(stream, head, body):
        await stream.send_all(SSE_HEAD)
        for number in range(3):
            await stream.send_all(event(number))
            await more.receive()
        await stream.send_all(SSE_END)

    _, port = await serve(reply)
    gateway = await gateway_to({"m": port})
    client = await connect(gateway)
    body = b'{"model": "m"}'
    await client.send(post_of(body))
    received = b""
    for number in range(3):
        while not received.endswith(event(number)):
            received += await client.stream.receive_some()
        await arrived.send(None)  # so that no two of them come in one piece
    while not received.endswith(SSE_END):
        received += await client.stream.receive_some()
    assert (await shown(connect, gateway)).get("ichat_chunk_gap_seconds_count", model="m") == 3


class Reader:
    """A client, as far as a relay knows it."""

    peer = "a test"

    def __init__(self, sock):
        self.sock = sock
        self.send_some = sock.send

    def response_is_whole(self):
        pass


@pytest.mark.parametrize("kind", [b"text/event-stream", b"application/json"])
async def test_a_gap_is_between_two_pieces_of_an_event_stream(kind, mock_clock, nursery):
    """Between two pieces of an event stream; not before the first, nor while the client does not read."""
    hub = Hub()
    ours, upstream = trio.socket.socketpair()
    theirs, client_end = trio.socket.socketpair()
    for sock in (ours, theirs):
        sock._sock.setblocking(False)
    client = Reader(theirs._sock)
    sent = bytearray()

    async def send_all(data):
        mock_clock.jump(30)
        sent.extend(data)

    client.send_all = send_all
    pool = Pool(hub, connect_s=1, idle_s=1)
    nursery.start_soon(hub.run_forever)
    gaps = empty_gap_histogram()
    connection = Connection(pool, Upstream("u", "u", 0), ours._sock)
    relay = Relay(
        connection, ClientSide(client, b"1.1"), method=b"POST", on_head=lambda head: b"head",
        first_byte_s=1000, stall_s=1000, gaps=gaps,
    )  # fmt: skip

    async def piece(data, after_s):
        mock_clock.jump(after_s)
        chunks = relay.body.chunks
        await upstream.send(data)
        await turns_until(lambda: relay.body.chunks > chunks)

    async with trio.open_nursery() as inner:
        inner.start_soon(relay.run, [b"request"])
        await upstream.recv(100)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n" % kind
        await upstream.send(head)
        await turns_until(lambda: relay.body.answered)
        await piece(event(0), 8)
        await piece(event(1), 0.0105)
        await piece(event(2), 2)
        relay._to.rest = b"held up"
        relay.body._hold_rest()
        await turns_until(lambda: sent)
        await piece(event(3), 0.25)
        await piece(b"0\r\n\r\n", 100)
    assert relay.body.first_at == pytest.approx(8)
    counts = {index: count for index, count in enumerate(gaps[:-1]) if count}
    if kind == b"application/json":
        assert (counts, gaps[-1]) == ({}, 0)
    else:
        assert counts == {4: 1, 8: 1, 11: 1, 17: 1}
        assert gaps[-1] == pytest.approx(0.0105 + 2 + 0.25 + 100)
        assert all(
            2 ** (index - 1) <= ms < 2**index for index, ms in zip(counts, (10.5, 250, 2000, 100_000), strict=True)
        )
    nursery.cancel_scope.cancel()
    for sock in (ours, upstream, theirs, client_end):
        sock.close()


async def test_cancelled_requests_are_counted_by_phase(serve, gateway_to, connect):
    """One waits in a queue, one for an answer, one reads a stream."""

    async def reply(stream, head, body):
        if b"stream" in body:
            await stream.send_all(SSE_HEAD + event(0))
        await trio.sleep_forever()

    upstream, port = await serve(reply)
    gateway = await gateway_to({"m": port}, "[routing]\nmax_in_flight = 2\n")
    clients = [await connect(gateway) for _ in range(3)]
    for number, client in enumerate(clients):
        body = b'{"model": "m", "x": "%b"}' % (b"stream" if number == 1 else b"plain!")
        await client.send(post_of(body))
        if number < 2:
            await until(lambda number=number: len(upstream.requests) == number + 1)
    assert await clients[1].stream.receive_some()

    async def now(name, **labels):
        return (await shown(connect, gateway)).get(name, **labels)

    with trio.fail_after(LIMIT_S):
        while await now("ichat_requests_queued", model="m") != 1:
            await trio.sleep(0.01)
        for phase, client in (("queued", clients[2]), ("waiting", clients[0]), ("streaming", clients[1])):
            await client.stream.aclose()
            while await now("ichat_requests_cancelled_total", phase=phase) != 1:
                await trio.sleep(0.01)
    assert await now("ichat_requests_total", model="m", route="/v1/completions", status="499") == 3
    assert await now("ichat_requests_queued", model="m") == 0


async def test_a_client_that_does_not_read_counts_as_left(serve, gateway_to, connect, tmp_path):
    """The end of a client that does not read is its own, not the gateway's; so is that of one that stops sending."""

    async def reply(stream, head, body):
        await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n")
        while True:
            await stream.send_all(b"x" * 60_000)

    _, port = await serve(reply)
    path = tmp_path / "access.log"
    gateway = await gateway_to({"m": port}, f'[timeouts]\nclient_stall_s = 0.3\n[logs]\naccess_log = "{path}"\n')
    reader, sender = await connect(gateway), await connect(gateway)
    await reader.send(post_of(b'{"model": "m"}'))
    await sender.send(b'POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-length: 14\r\n\r\n{"model"')
    await trio.testing.wait_all_tasks_blocked()
    await sender.stream.aclose()
    with trio.fail_after(LIMIT_S):
        while len(lines := path.read_text().splitlines()) < 2:
            await trio.sleep(0.05)
    found = {line["path"]: (line["status"], line["error"]) for line in map(json.loads, lines)}
    assert found == {"/v1/completions": (499, "client_left"), "/v1/embeddings": (499, "client_left")}
    now = await shown(connect, gateway)
    assert now.get("ichat_requests_total", model="m", route="/v1/completions", status="499") == 1
    assert now.get("ichat_requests_cancelled_total", phase="plain") == 1
    assert not now.labels("ichat_refusals_total")


async def test_errors_of_the_gateway_are_counted_by_their_codes(serve, gateway_to, connect):
    """Those that are no request to a model too, and those in the middle of a stream."""

    async def reply(stream, head, body):
        await stream.send_all(SSE_HEAD + event(0))
        return "close"

    _, port = await serve(reply)
    gateway = await gateway_to({"m": port})
    await (await connect(gateway)).get(b"/nothing/here")
    await (await connect(gateway)).get(b"/v1/chat/completions")
    await (await connect(gateway)).get(b"/v1/models/nobody")
    await (await connect(gateway)).send(b"nonsense\r\n\r\n")
    await (await connect(gateway)).ask()
    with trio.fail_after(LIMIT_S):
        while True:
            now = await shown(connect, gateway)
            codes = {labels["reason"] for labels in now.labels("ichat_refusals_total")}
            if codes == {"not_found", "model_not_found", "method_not_allowed", "bad_request", "upstream_failed"}:
                break
            await trio.sleep(0.01)
    assert now.get("ichat_requests_total", model="m", route="/v1/chat/completions", status="200") == 1


ONE_KEY = """
[[security.keys]]
name = "k"
key_env = "ICHAT_TEST_KEY"
models = ["m"]
metrics = true
"""


@pytest.mark.parametrize("keys", ["", ONE_KEY])
async def test_unknown_models_are_counted_by_route_and_status_only(serve, gateway_to, connect, monkeypatch, keys):
    """Of requests without a model that there is, /metrics has their number by route and status, and nothing else."""
    monkeypatch.setenv("ICHAT_TEST_KEY", "one-key-for-all-of-them")
    _, port = await serve(hello)
    gateway = await gateway_to({"m": port}, keys)
    client = await connect(gateway)
    head = b"HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer one-key-for-all-of-them\r\n"
    bodies = [b'{"model"', b"{}", b'{"model": ""}', b'{"model": 7}', *(b'{"model": "n%d"}' % n for n in range(100))]
    for body in bodies:
        await client.send(b"POST /v1/completions %bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        assert (await client.response())[0] in (400, 403, 404)
    await client.send(b"GET /metrics %b\r\n" % head)
    now = Shown((await client.response(b"GET"))[2].decode())
    assert {line.split("{")[0] for line in now.text.splitlines() if 'model=""' in line} == {"ichat_requests_total"}
    assert {value for _, labels in now.samples for name, value in labels if name == "model"} == {"", "m"}
    assert sum(now.get("ichat_requests_total", **labels) for labels in now.labels("ichat_requests_total")) == 104
    refused = {"bad_request", "forbidden" if keys else "model_not_found"}
    assert {labels["reason"] for labels in now.labels("ichat_refusals_total")} == refused
    assert sum(now.get("ichat_refusals_total", reason=reason) for reason in refused) == 104


async def test_a_model_that_has_gone_is_forgotten(mock_clock):
    """Its series stay for an hour after its end has been seen, whenever somebody asks; it may come again."""
    fleet, metrics = known("m")
    metrics._of("m").tokens.input += 1

    def models():
        return {labels["model"] for labels in own(metrics).labels("ichat_tokens_total")}

    for after_s in (0, 2 * counted.FORGET_S):
        mock_clock.jump(after_s)
        assert models() == {"m"}
    fleet.directory.use_routes({})
    for after_s, there in ((0, {"m"}), (counted.FORGET_S - 1, {"m"}), (1, set())):
        mock_clock.jump(after_s)
        assert models() == there
    fleet.directory.use_routes({"m": ()})
    metrics._of("m").tokens.input += 1
    fleet.directory.use_routes({})
    assert models() == {"m"}


async def test_models_that_come_and_go_leave_little():
    """There is a bound to what is kept; who is still there is not forgotten, and nobody is counted twice."""
    fleet, metrics = known("stays", models_max=5)
    metrics._of("stays").tokens.input += 10
    for number in range(50):
        fleet.directory.use_routes({"stays": (), f"m{number}": ()})
        metrics._of(f"m{number}").tokens.input += 1
        metrics._of(f"unknown-{number}").tokens.input += 1
    assert len(metrics._models) <= 6
    now = own(metrics)
    assert now.get("ichat_tokens_total", model="stays", direction="input") == 10
    assert now.get("ichat_tokens_total", model="m49", direction="input") == 1
    assert now.get("ichat_tokens_total", model=counted.OTHER, direction="input") == 50
    fleet.directory.use_routes({f"many{number}": () for number in range(20)})
    for number in range(20):
        metrics._of(f"many{number}").tokens.input += 1
    now = own(metrics)
    tokens = {
        labels["model"]: now.get("ichat_tokens_total", **labels)
        for labels in now.labels("ichat_tokens_total")
        if labels["direction"] == "input"
    }
    assert len(tokens) <= 7
    assert tokens[counted.OTHER] - 50 + sum(tokens.get(f"many{number}", 0) for number in range(20)) == 20


async def test_metrics_of_a_worker_go_with_it():
    """State, restarts and circuit have the worker's name, and none of them is left when it is gone."""
    fleet, metrics = known("route")
    fleet.directory.use_routes({"route": [Endpoint(Upstream("u", "u", 1), b"external:route", 1)]})
    fleet.registry.record_heartbeat(
        parse_heartbeat({"worker_id": "w", "model_name": NAME, "host": "127.0.0.1", "port": 1})
    )
    starting = fleet.managed.expect("managed", [NAME, "alias"])
    for _ in range(3):
        fleet.managed.restart(starting)
    now = own(metrics)
    assert now.get("ichat_workers", state="ready") == 1
    assert now.get("ichat_workers", state="starting") == 1
    assert now.get("ichat_workers", state="failed") == 0
    assert now.get("ichat_worker_state", worker="w", model=NAME, state="ready") == 1
    assert now.get("ichat_worker_state", worker="managed", model=NAME, state="starting") == 1
    assert now.get("ichat_worker_restarts_total", worker="managed") == 3
    assert now.get("ichat_model_endpoints", model=NAME) == 1
    assert now.get("ichat_model_endpoints", model="route") == 1
    assert now.get("ichat_model_endpoints", model="alias") == 0
    assert now.get("ichat_model_starting", model="alias") == 1
    assert now.get("ichat_model_starting", model=NAME) == 1
    assert now.get("ichat_circuit_open", worker="w") == 0
    assert now.get("ichat_circuit_open", worker="external:route") == 0
    assert len(now.labels("ichat_build_info")) == 1
    for worker in fleet.table:
        fleet.table.remove(worker)
    assert 'worker="' not in own(metrics).text.replace('worker="external:route"', "")


async def test_a_circuit_is_shown(mock_clock):
    """1 while it is open, 0.5 while one request may try it; nobody serves the model until one has gone well."""
    fleet, metrics = known()
    fleet.registry.record_heartbeat(
        parse_heartbeat({"worker_id": "w", "model_name": "m", "host": "127.0.0.1", "port": 1})
    )
    circuit = fleet.table.endpoint_of(fleet.table.get("w")).circuit
    circuit.settings = CircuitBreaker(failures_max=1, open_s=5)
    seen = []
    for after_s in (0, 1, 10):
        mock_clock.jump(after_s)
        if after_s == 1:
            circuit.record_failure(trio.current_time())
        now = own(metrics)
        seen.append((now.get("ichat_circuit_open", worker="w"), now.get("ichat_model_endpoints", model="m")))
    assert seen == [(0, 1), (1, 0), (0.5, 0)]


async def test_workers_metrics_are_shown_with_their_names(serve, gateway_to, connect):
    """Each sample says of whom it is, each family is whole, and old and new names of vLLM's are both there."""
    old = HISTOGRAM.format(name="time_per_output_token") + GAUGE.format(name="gpu_cache_usage_perc") + PROCESS
    new = HISTOGRAM.format(name="inter_token_latency") + GAUGE.format(name="kv_cache_usage_perc") + OURS + "untyped 1\n"
    gateway = await gateway_to({})
    for worker_id, text in (("old", old), ("new", new)):
        _, port = await serve(exposing(text))
        await heartbeat(connect, gateway, port, worker_id=worker_id, model_name=NAME)
    now = await shown(connect, gateway)
    for worker in ("old", "new"):
        labels = {"worker": worker, "model": NAME}
        for name in ("inter_token_latency", "time_per_output_token"):
            bucket = {"le": "+Inf", "engine": "0", "model_name": "m"}
            assert now.get(f"vllm:{name}_seconds_bucket", **labels, **bucket) == 4
            assert now.get(f"vllm:{name}_seconds_sum", **labels, engine="0", model_name="m") == 5.5
        for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
            assert now.get(f"vllm:{name}", **labels, engine="0") == 0.5
        assert now.get("ichat_worker_scrape_failed", worker=worker) == 0
    assert now.get("ichat_engine_aborts_total", worker="new", model=NAME) == 7
    assert now.get("untyped", worker="new", model=NAME) == 1
    assert now.get("process_open_fds", worker="old", model=NAME) == 12
    assert now.get("process_open_fds") > 0, "the gateway's own"
    types_ = {family.name: family.type for family in now.families}
    assert types_["vllm:inter_token_latency_seconds"] == types_["vllm:time_per_output_token_seconds"] == "histogram"


async def test_a_worker_without_metrics_is_left_out(serve, mock_clock, nursery):
    """One that is silent, refuses, says too much or is not there is named; the others are shown."""

    async def silent(stream, head, body):
        await trio.sleep_forever()

    async def refuses(stream, head, body):
        await stream.send_all(b"HTTP/1.1 403 no\r\ncontent-length: 0\r\n\r\n")

    async def breaks(stream, head, body):
        await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nbroken 1\n")
        return "close"

    replies = {
        "silent": silent, "refuses": refuses, "breaks": breaks, "long": exposing("x 1\n" * 10_000),
        "page": exposing("<html>\n<p>x 1\n</html>\nx{ 1\n"), "well": exposing(OURS),
    }  # fmt: skip
    fleet, _ = known()
    for worker_id, reply in replies.items():
        _, port = await serve(reply)
        fleet.registry.record_heartbeat(Heartbeat(worker_id, "m", "127.0.0.1", port))
    fleet.registry.record_heartbeat(Heartbeat("absent", "m", "127.0.0.1", 1))
    scraper = scrape.Scraper(
        fleet.table, 10, SimpleNamespace(proof=b""), limits=scrape.ScrapeLimits(ask_s=1.0, bytes_max=10_000)
    )
    found = []

    async def look():
        found.append(Shown("".join(await scraper.expose([]))))

    nursery.start_soon(look)
    await trio.testing.wait_all_tasks_blocked(0.05)  # all have been asked, and have answered if they do
    assert not found
    mock_clock.jump(1.0)
    await turns_until(lambda: found)
    [now] = found
    failed = {
        one["worker"]: now.get("ichat_worker_scrape_failed", **one) for one in now.labels("ichat_worker_scrape_failed")
    }
    assert failed == {**dict.fromkeys(("silent", "refuses", "breaks", "long", "absent"), 1), "page": 0, "well": 0}
    assert now.labels("ichat_engine_aborts_total") == [{"worker": "well", "model": "m"}]
    assert not now.labels("x")


async def test_concurrent_scrapes_share_one_result(serve, connect, gateway_to, mock_clock):
    """A worker is asked once for all who ask within a second, and again later."""
    upstream, port = await serve(exposing(OURS))
    gateway = await gateway_to({})
    await heartbeat(connect, gateway, port)
    found = []

    async def one():
        found.append((await shown(connect, gateway)).get("ichat_engine_aborts_total", worker="w", model="m"))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(one)
    mock_clock.jump(scrape.REUSE_S / 2)
    await one()
    assert (found, asked(upstream)) == ([7] * 6, 1)
    mock_clock.jump(scrape.REUSE_S / 2)
    await one()
    assert asked(upstream) == 2


async def test_too_many_workers_are_not_asked(serve, connect, gateway_to, mock_clock):
    """With more ready workers than the limit, none is asked, rather than some; the metrics say how many that are."""
    upstream, port = await serve(exposing(OURS))
    gateway = await gateway_to({}, "[limits]\nscraped_workers_max = 2\n")
    seen = []
    for number in range(3):
        await heartbeat(connect, gateway, port, worker_id=f"w{number}")
        now = await shown(connect, gateway)
        workers = {labels["worker"] for labels in now.labels("ichat_engine_aborts_total")}
        seen.append((len(workers), now.get("ichat_workers_not_scraped"), asked(upstream)))
        assert now.get("ichat_worker_state", worker=f"w{number}", model="m", state="ready") == 1
        mock_clock.jump(scrape.REUSE_S)
    assert seen == [(1, 0, 1), (2, 0, 3), (0, 3, 3)]


async def test_workers_metrics_can_be_left_out(serve, connect, gateway_to):
    """Then no worker is asked."""
    upstream, port = await serve(exposing(OURS))
    gateway = await gateway_to({})
    await heartbeat(connect, gateway, port)
    client = await connect(gateway)
    now = Shown((await client.get(b"/metrics?workers=0"))[2].decode())
    assert now.get("ichat_workers", state="ready") == 1
    assert not now.labels("ichat_engine_aborts_total")
    assert asked(upstream) == 0
    assert (await client.get(b"/metrics?workers=few"))[0] == 400


async def test_metrics_of_many_workers_are_made_in_short_steps():
    """However many workers there are, a part has few lines; so has a step of reading what a worker has."""
    fleet, metrics = known()
    for number in range(1000):
        gpus = [{"index": index, "uuid": f"{number}-{index}"} for index in range(8)]
        beat = {"worker_id": f"w{number}", "model_name": "m", "host": "127.0.0.1", "port": 1}
        beat["machine"] = {"id": f"b{number}", "name": f"n{number}", "gpus": gpus}
        fleet.registry.record_heartbeat(parse_heartbeat(beat))
    parts = list(metrics.families())
    lines = [sum(len(family.samples) for family in part.values()) for part in parts]
    assert sum(lines) > 11 * 1000
    assert max(lines) == fleet_metrics.WORKERS_AT_ONCE == MACHINES_AT_ONCE * 8
    found = {}
    steps = exposition.read_steps("a 1\n" * 10 * exposition.LINES_AT_ONCE, {}, found)
    grown = [len(found["a"].samples) for _ in steps]
    assert grown == [(number + 1) * exposition.LINES_AT_ONCE - 1 for number in range(10)]


def test_families_are_written_as_prometheus_client_writes_them():
    """Names, types, help texts, labels and numbers; a long family is in several parts."""
    counter = CounterMetricFamily("a", 'Two\nlines, \\ and "quotes".', labels=["b", "a"])
    for number in (0, 1, 2.5, 1000, math.inf):
        counter.add_metric((NAME, f"{number}\n"), number)
    histogram = HistogramMetricFamily("h", "Time.", [("0.1", 1), ("+Inf", 3)], 5.5)
    gauge = GaugeMetricFamily("g", "Many.", labels=["n"])
    for number in range(2 * exposition.LINES_AT_ONCE):
        gauge.add_metric((str(number),), number)
    metrics = [counter, histogram, gauge]
    collector = SimpleNamespace(collect=lambda: metrics)
    parts = [part for metric in metrics for part in families_of(metric)]
    assert len(parts) == 4
    assert "".join(exposition.written(parts)) == generate_latest(collector).decode()


def asked(upstream):
    return sum(head.target == b"/metrics" for head, _ in upstream.requests)


@pytest.mark.parametrize("managed", [True, False])
async def test_how_a_worker_is_reached(serve, nursery, tmp_path, managed):
    """By its unix socket where it has one; one that was not started here is told that its gateway asks."""
    fleet, _ = known()
    upstream, port = await serve(exposing(OURS))
    if managed:
        path = str(tmp_path / "socket")
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(open_unix_listener(path)))
        nursery.start_soon(trio.serve_listeners, upstream.serve, [listener])
        fleet.managed.expect("w", ["m"], path)
        port = 1
    fleet.registry.record_heartbeat(
        parse_heartbeat(
            {"worker_id": "w", "model_name": "m", "host": "127.0.0.1", "port": port, "unix_socket": managed}
        )
    )
    parts = await scrape.Scraper(fleet.table, 1, SimpleNamespace(proof=b"secret")).expose([read("own 1\n", {})])
    now = Shown("".join(parts))
    assert now.get("ichat_engine_aborts_total", worker="w", model="m") == 7
    assert now.get("own") == 1
    [(head, _)] = upstream.requests
    assert dict(head.headers).get(b"x-ichat-proof") == (None if managed else b"secret")
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a 1", 'a{worker="w",model="m"} 1'),
        ("a{} NaN", 'a{worker="w",model="m"} NaN'),
        ('a{b="1",} +Inf 1700000000000', 'a{worker="w",model="m",b="1",} +Inf 1700000000000'),
        ('a{b="} {",c="\\"} 2"} 1e-5', 'a{worker="w",model="m",b="} {",c="\\"} 2"} 1e-5'),
        ('a{model="x",b=",model=",worker="\\\\"} 1', 'a{worker="w",model="m",exported_model="x",b=",model=",exported_worker="\\\\"} 1'),
        ('a{b="\\",model=\\"x"} 1', 'a{worker="w",model="m",b="\\",model=\\"x"} 1'),
        ("# EOF", None),
        ("a one", None),
        ("a{ 1", None),
        ("-a 1", None),
        ('a{b="1"', None),
    ],
)  # fmt: skip
def test_a_line_gets_labels(line, expected):
    """Whatever its labels hold; what is no sample is left out."""
    text = "".join(exposition.written([read(line + "\n", {"worker": "w", "model": "m"})]))
    assert text.strip().splitlines() == ([expected] if expected else [])
    if expected:
        [family] = text_string_to_metric_families(text)
        assert [sample.labels["worker"] for sample in family.samples] == ["w"]


def test_families_of_several_stand_together():
    """The head of a family is there once, before all of its samples, whoever knows it."""
    first = read("a 1\n" + HISTOGRAM.format(name="b"), {"worker": "1"})
    second = read(
        "# HELP a What it is.\n# TYPE a counter\na 2\n" + HISTOGRAM.format(name="b") + "c 1\n", {"worker": "2"}
    )
    lines = "".join(exposition.written([first, second])).splitlines()
    assert lines[:4] == ["# HELP a What it is.", "# TYPE a counter", 'a{worker="1"} 1', 'a{worker="2"} 2']
    assert [line for line in lines[4:] if line.startswith("#")] == HISTOGRAM.format(name="b").splitlines()[:2]
    assert Shown("\n".join(lines) + "\n").get("c", worker="2") == 1
