"""What one client may have: quotas of keys, turns in a queue, connections; and that nobody's trouble is another's."""

import json
import re

import pytest
import trio
from support.peers import SSE_END, SSE_HEAD, chunk, code_of, event, plain, post_of, until
from support.programs import LIMIT_S

from ichat.config.schema import CircuitBreaker, Config, Key, Limits, Routing, Security
from ichat.http.pool import Upstream
from ichat.observability.request_record import UsedTokens
from ichat.proxy.refusals import over_limit
from ichat.proxy.token_usage import TokenUsage
from ichat.routing.availability import Full, NotReady, Ready
from ichat.routing.balancer import Balancer
from ichat.routing.circuit_breaker import Circuit
from ichat.routing.endpoint import Endpoint
from ichat.routing.request import RoutingRequest
from ichat.security.keys import hash_of
from ichat.security.rate_limits import QuotaRefusal, QuotaReservation, Quotas, Window

KEYS = {name: f"sk-{name}-0123456789abc" for name in ("a", "b")}


def with_keys(a="", b="", more=""):
    text = f"{more}[security]\nopen_metrics = true\n"
    for name, extra in (("a", a), ("b", b)):
        text += f'[[security.keys]]\nname = "{name}"\nkey_hash = "{hash_of(KEYS[name])}"\n{extra}\n'
    return text


async def ask(client, key="a", body=None, model="m"):
    data = json.dumps({"model": model, **(body or {})}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS[key]}\r\n"
    await client.send(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)


async def hello(stream, head, body):
    await stream.send_all(plain(b'{"usage": {"prompt_tokens": 30, "completion_tokens": 70, "total_tokens": 100}}'))


async def metric(connect, port, name):
    client = await connect(port)
    await client.send(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
    _, _, text = await client.response(b"GET")
    return sum(float(line.rpartition(" ")[2]) for line in text.decode().splitlines() if line.startswith(name))


async def queued(connect, port, count):
    """Wait until so many requests wait for a place."""
    with trio.fail_after(LIMIT_S):
        while await metric(connect, port, "ichat_requests_queued") != count:  # noqa: ASYNC110
            await trio.sleep(0.02)


# Quotas.


def test_a_window_is_the_last_minute():
    """What is older than a minute counts no more; the wait is until there is room, not longer."""
    window = Window()
    window.add(3, 100.2)
    window.add(2, 130.9)
    assert (window.sum(159.9), window.sum(160.0), window.sum(189.9), window.sum(190.0)) == (5, 2, 2, 0)
    window.add(4, 200)
    window.add(4, 210)
    assert window.wait_s(8, 211) == 49
    assert window.wait_s(4, 211) == 59


def refusal(quotas, key, now):
    refused = quotas.acquire(key, now)
    assert isinstance(refused, QuotaRefusal)
    error = over_limit(refused)
    assert (error.status, error.code) == (429, "rate_limited")
    return error.limit, error.retry_after_s


def test_a_key_has_its_own_limits_and_everybody_has_the_common_ones():
    """At once, requests a minute, tokens a minute; each refusal says which, and when to come again."""
    keys = [Key("a", max_in_flight=2, requests_per_minute=5), Key("b", tokens_per_minute=100)]
    quotas = Quotas(Limits(max_in_flight=4), keys)
    first, second = quotas.acquire("a", 0), quotas.acquire("a", 1)
    assert refusal(quotas, "a", 2) == ("security.keys.max_in_flight", 1)
    others = [quotas.acquire("b", 2), quotas.acquire("b", 2)]
    assert refusal(quotas, "b", 2) == ("limits.max_in_flight", 1)
    assert refusal(quotas, "", 2) == ("limits.max_in_flight", 1)
    first.release(0, 3)
    second.release(0, 3)
    for now in (4, 5, 6):
        quotas.acquire("a", now).release(0, now)
    assert refusal(quotas, "a", 7) == ("security.keys.requests_per_minute", 53)
    quotas.acquire("a", 60).release(0, 60)
    others[0].release(99, 10)
    quotas.acquire("b", 10).release(2, 11)
    assert refusal(quotas, "b", 12) == ("security.keys.tokens_per_minute", 58)
    quotas.acquire("b", 71.0)


def test_other_limits_forget_nothing():
    """A reload changes limits; what was used in the last minute stays used."""
    quotas = Quotas(Limits(), [Key("a", requests_per_minute=2)])
    quotas.acquire("a", 0)
    quotas.acquire("a", 0)
    assert refusal(quotas, "a", 1) == ("security.keys.requests_per_minute", 59)
    quotas.reconfigure(Config(security=Security(keys=[Key("a", requests_per_minute=3)])))
    quotas.acquire("a", 1)
    assert refusal(quotas, "a", 1) == ("security.keys.requests_per_minute", 59)
    quotas.reconfigure(Config(security=Security(keys=[])))
    assert isinstance(quotas.acquire("a", 1), QuotaReservation)


@pytest.mark.parametrize(
    ("pieces", "tokens"),
    [
        ([b'{"choices":[{"text":"\\"total_tokens\\": 9"}],"usage":{"prompt_tokens":3,"total_tokens": 7}}'], 7),
        ([b'data: {"usage":{"prompt_tok', b'ens":3,"completion_tokens":4,"total_', b'tokens":7}}\n\n'], 7),
        ([b'{"usage":{"prompt_tokens":3,"total_tokens":50}, "prompt_logprobs": [', b"1, " * 30_000, b"1]}"], 50),
        ([b"x" * 99, b'{"usage":{"prompt_tokens":3,"completion_tokens":4,"total_', b'tokens":7}}'], 7),
        ([b'{"usage": {"input_tokens": 5,', b' "output_tokens": 6}}'], 11),
        ([b'{"usage": {"input_tokens": 5, "output_tokens": 1}}', b'{"usage": {"output_tokens": 6}}'], 11),
        ([b'{"prompt_tokens": 2}', b"y" * 40_000, b'{"usage":{"total_tokens": 7}}'], 7),
        ([b"no usage"], None),
    ],
)
def test_usage_is_read_in_passing(pieces, tokens):
    """Whatever pieces it comes in, once a piece shows the sign of it; the newest counts, and text is no usage."""
    usage = TokenUsage(
        b"/v1/responses" if any(b"input_tokens" in piece for piece in pieces) else b"/v1/chat/completions"
    )
    for piece in pieces:
        buffer = bytearray(piece + b"left from before" * 9)
        usage.see(buffer, len(piece))
    said = usage.said()
    assert (None if said is None else said.total) == tokens


def test_token_sums_in_a_models_text_are_ignored():
    """Anthropic's answers have a tool's arguments as they are, and tell no sum: one of them would be a way out."""
    usage = TokenUsage(b"/v1/messages")
    text = b'{"content":[{"input":{"total_tokens":0,"input_tokens":1}}],"usage":{"input_tokens":50,"output_tokens":9}}'
    usage.see(bytearray(text), len(text))
    assert usage.said() == UsedTokens(50, 9)


@pytest.mark.parametrize("path", [b"/v1/messages", b"/v1/responses"])
def test_names_that_a_route_does_not_use_lower_no_account(path):
    """A tool's arguments and its schema are told again as they came."""
    usage = TokenUsage(path)
    text = b'{"tools":[{"prompt_tokens":0,"completion_tokens":0}],"usage":{"input_tokens":50,"output_tokens":9}}'
    usage.see(bytearray(text), len(text))
    assert usage.said() == UsedTokens(50, 9)


@pytest.mark.parametrize("cached", [0, 49, 50, 51, 999999999999])
def test_no_more_tokens_are_cached_than_there_are(cached):
    """Cached ones cost less: an account must not shrink by a response that says too many of them."""
    usage = TokenUsage(b"/v1/chat/completions")
    text = b'{"usage":{"prompt_tokens":50,"completion_tokens":9,"prompt_tokens_details":{"cached_tokens":%d}}}' % cached
    usage.see(bytearray(text), len(text))
    assert usage.said() == UsedTokens(50, 9, min(cached, 50))


async def test_tokens_of_a_key_are_counted_from_its_responses(serve, gateway_to, connect):
    """As `usage` says; then 429 with the seconds to wait, for this key alone, and a count of the refusals."""
    _, port = await serve(hello)
    gateway = await gateway_to({"m": port}, with_keys("tokens_per_minute = 150"))
    client = await connect(gateway)
    results = []
    for _ in range(3):
        await ask(client)
        status, headers, body = await client.response()
        results.append(status)
    assert results == [200, 200, 429]
    assert code_of(body) == "rate_limited"
    assert b"security.keys.tokens_per_minute" in body
    assert 1 <= int(headers[b"retry-after"]) <= 60
    await ask(client, "b")
    assert (await client.response())[0] == 200
    assert await metric(connect, gateway, 'ichat_refusals_total{reason="security.keys.tokens_per_minute"}') == 1
    assert await metric(connect, gateway, 'ichat_tokens_total{direction="input",model="m"}') == 90
    assert await metric(connect, gateway, 'ichat_tokens_total{direction="output",model="m"}') == 210
    assert await metric(connect, gateway, 'ichat_key_tokens_total{direction="input",key="a"}') == 60
    assert await metric(connect, gateway, 'ichat_key_tokens_total{direction="output",key="a"}') == 140
    assert await metric(connect, gateway, 'ichat_key_requests_total{key="a"}') == 3
    assert await metric(connect, gateway, 'ichat_key_refusals_total{key="a"}') == 1


@pytest.mark.parametrize(("limit", "status"), [("tokens_per_minute = 500", 400), ("requests_per_minute = 500", 200)])
async def test_where_tokens_are_limited_none_are_used_in_the_background(serve, gateway_to, connect, limit, status):
    """They would not be counted; another key, and a request that waits for its response, may go on."""
    _, port = await serve(hello)
    client = await connect(await gateway_to({"m": port}, with_keys(limit)))
    seen = []
    long = b'{"model":"m","pad":"%b","background":1.%b}' % (b"x" * 70_000, b"0" * 4200)
    asked = [("a", True), ("a", False), ("b", True), ("a", 1), ("a", "yes"), ("a", 0)]
    for key, background in [*asked, ("a", None)]:
        data = long if background is None else json.dumps({"model": "m", "background": background}).encode()
        head = f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS[key]}\r\n"
        await client.send(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        seen.append((await client.response())[0])
    assert seen == [status, 200, 200, status, status, 200, 400]


async def test_tokens_of_a_stream_count_though_it_says_nothing(serve, gateway_to, connect):
    """Nobody escapes by not asking for `usage`, or by leaving before it comes; the stream's bytes are untouched."""
    ended = []

    async def reply(stream, head, body):
        await stream.send_all(SSE_HEAD)
        for number in range(5):
            await stream.send_all(event(number))
            await trio.sleep(0.02)
        if json.loads(body).get("stream_options"):
            await stream.send_all(chunk(b'data: {"choices":[],"usage":{"total_tokens":1000}}\n\n'))
        await stream.send_all(SSE_END)
        ended.append(head)

    _, port = await serve(reply)
    gateway = await gateway_to({"m": port}, with_keys("tokens_per_minute = 900000"))
    client = await connect(gateway)
    await ask(client, body={"stream": True})
    assert (await client.response())[2].count(b"data: ") == 6
    guessed = await metric(connect, gateway, "ichat_tokens_total")
    assert 6 <= guessed <= 20
    await ask(client, body={"stream": True, "stream_options": {"include_usage": True}})
    assert (await client.response())[2].count(b"data: ") == 7
    assert await metric(connect, gateway, "ichat_tokens_total") == guessed + 1000


async def test_requests_at_once_are_bounded_by_key(serve, gateway_to, connect):
    """The third of two is refused at once; who has left, has left: there is room again."""
    go_on = trio.Event()

    async def reply(stream, head, body):
        await go_on.wait()
        await hello(stream, head, body)

    upstream, port = await serve(reply)
    gateway = await gateway_to({"m": port}, with_keys("max_in_flight = 2"))
    clients = [await connect(gateway) for _ in range(3)]
    for client in clients[:2]:
        await ask(client)
    await until(lambda: len(upstream.requests) == 2)
    await ask(clients[2])
    status, headers, body = await clients[2].response()
    assert (status, code_of(body), headers[b"retry-after"]) == (429, "rate_limited", b"1")
    large = await connect(gateway)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS['a']}\r\n"
    await large.send(f"{head}content-length: 9000000\r\n\r\n".encode())
    status, headers, body = await large.response()  # before any of the body
    assert (status, code_of(body), headers[b"connection"]) == (429, "rate_limited", b"close")
    await clients[0].stream.aclose()
    with trio.fail_after(LIMIT_S):
        while await metric(connect, gateway, "ichat_requests_in_flight") > 1:  # noqa: ASYNC110
            await trio.sleep(0.02)
    await ask(clients[2])
    go_on.set()
    assert (await clients[2].response())[0] == 200


@pytest.mark.one_process("each relay has a share of this bound, and more")
async def test_connections_of_one_address_are_bounded(gateway_to, connect):
    """One address cannot have them all; what is closed makes room; a trusted proxy has those of many."""
    gateway = await gateway_to({}, "[limits]\nconnections_per_address_max = 3\n")
    clients = [await connect(gateway) for _ in range(3)]
    for client in clients:
        assert (await client.get(b"/health"))[0] == 200
    refused = await connect(gateway)
    status, headers, body = await refused.response(b"GET")
    assert (status, code_of(body)) == (429, "rate_limited")
    assert headers[b"retry-after"] == b"1"
    await clients[0].stream.aclose()
    with trio.fail_after(LIMIT_S):
        while (await (await connect(gateway)).get(b"/health"))[0] != 200:  # noqa: ASYNC110
            await trio.sleep(0.05)
    more = "[limits]\nconnections_per_address_max = 1\n[security]\ntrusted_proxies = ['127.0.0.0/8']\n"
    proxied = await gateway_to({}, more)
    for _ in range(4):
        assert (await (await connect(proxied)).get(b"/health"))[0] == 200


# Turns.


def balancer_of(*endpoints, queue_max=100, clock=lambda: 0.0):
    return Balancer(lambda _model: Ready(endpoints), clock, Routing(policy="least_loaded", queue_max=queue_max))


def endpoint(name="w", in_flight_max=1, **settings):
    circuit = Circuit(CircuitBreaker(**settings))
    return Endpoint(Upstream(f"worker {name}", "", 1), name.encode(), in_flight_max, circuit=circuit)


def test_keys_take_turns_in_a_queue():
    """Who has a hundred requests waiting and who has one are served one after the other; each one's in their order."""
    balancer, served = balancer_of(endpoint()), []
    held = balancer.lease(RoutingRequest("m"))
    waiters = {}
    for name in ("greedy-1", "greedy-2", "greedy-3", "greedy-4", "modest-1", "other-1", "modest-2"):
        waiters[name] = balancer.wait(
            RoutingRequest("m", fairness_key=name.partition("-")[0]), lambda name=name: served.append(name)
        )
    held.release()
    while len(served) < len(waiters):
        waiters[served[-1]].lease.release()
    assert served == ["greedy-1", "modest-1", "other-1", "greedy-2", "modest-2", "greedy-3", "greedy-4"]


def test_a_full_queue_displaces_the_flow_that_waits_most():
    """The last of the flow with the most has to go, with 429; nobody displaces as many as his own."""
    balancer, told = balancer_of(endpoint(), queue_max=3), []
    balancer.lease(RoutingRequest("m"))
    greedy = [
        balancer.wait(RoutingRequest("m", fairness_key="greedy"), lambda number=number: told.append(number))
        for number in range(3)
    ]
    assert balancer.wait(RoutingRequest("m", fairness_key="greedy"), lambda: None) == Full(3)
    balancer.wait(RoutingRequest("m", fairness_key="modest"), lambda: None)
    assert told == [2]
    assert greedy[2].lease is None
    assert balancer.why_no_lease(greedy[2]) == Full(3)
    assert balancer.wait(RoutingRequest("m", fairness_key="modest"), lambda: None) == Full(3)
    assert balancer.waiting == 3
    balancer.withdraw(greedy[2])
    assert balancer.waiting == 3


async def test_a_modest_key_is_not_behind_a_greedy_one(serve, gateway_to, connect):
    """With one place and twenty requests of one key waiting, another key's request is the next but one."""
    order, go_on = [], trio.Event()

    async def reply(stream, head, body):
        order.append(json.loads(body)["who"])
        await go_on.wait()
        await hello(stream, head, body)

    _, port = await serve(reply)
    gateway = await gateway_to({"m": port}, with_keys(more="[routing]\nmax_in_flight = 1\n"))
    clients = []
    for number in range(21):
        clients.append(await connect(gateway))
        await ask(clients[-1], "a", {"who": f"a{number}"})
    modest = await connect(gateway)
    await ask(modest, "b", {"who": "b"})
    await queued(connect, gateway, 21)
    go_on.set()
    assert (await modest.response())[0] == 200
    assert order.index("b") <= 2
    for client in clients:
        assert (await client.response())[0] == 200


# Circuits.


def test_a_circuit_opens_tries_and_closes():
    """Failures in a row open it, each failed try doubles the wait up to the longest, one success closes it."""
    circuit = Circuit(CircuitBreaker(failures_max=3, open_s=5, open_longest_s=15))
    assert [circuit.record_failure(0), circuit.record_failure(0)] == [False, False]
    circuit.record_success()
    assert [circuit.record_failure(1), circuit.record_failure(1), circuit.record_failure(1)] == [False, False, True]
    assert (circuit.state(5.9), circuit.state(6)) == ("open", "half-open")
    waits = []
    now = 6.0
    for _ in range(3):
        assert circuit.allows_request(now)
        probe = circuit.begin(now)
        assert probe
        assert not circuit.allows_request(now), "one try at a time"
        circuit.record_failure(now)
        circuit.end(probe)
        waits.append(circuit.open_until - now)
        now = circuit.open_until
    assert waits == [10, 15, 15]
    circuit.end(circuit.begin(now))
    assert circuit.allows_request(now), "a try whose client left says nothing, and there is another one"
    circuit.begin(now)
    assert circuit.record_response()
    circuit.record_success()
    assert (circuit.state(now), circuit.opened, circuit.describe(now).failures) == ("closed", 0, 0)


def test_a_long_trial_of_a_circuit_delays_no_other_trial():
    """Another one may be made after a while; the end of the first says nothing of the second."""
    circuit = Circuit(CircuitBreaker(failures_max=1, open_s=5))
    circuit.record_failure(0)
    first = circuit.begin(5)
    assert not circuit.allows_request(9.9)
    assert circuit.allows_request(10)
    second = circuit.begin(10)
    circuit.end(first)
    assert not circuit.allows_request(11)
    circuit.end(second)
    assert circuit.allows_request(11)


def test_answers_that_break_off_open_a_circuit():
    """Each begins well; what counts is that none comes whole."""
    circuit = Circuit(CircuitBreaker(failures_max=3, open_s=5))
    opened = []
    for _ in range(3):
        circuit.record_response()
        opened.append(circuit.record_failure(0))
    assert opened == [False, False, True]


def test_no_circuit_opens_where_that_is_switched_off():
    """`failures_max = 0`."""
    circuit = Circuit(CircuitBreaker(failures_max=0))
    assert not any(circuit.record_failure(0) for _ in range(100))
    assert circuit.allows_request(0)


def test_an_open_circuit_leaves_the_others_alone():
    """Requests go to who is well; when all are open, the next hears so at once, with the seconds to wait."""
    now = [0.0]
    bad, good = endpoint("bad", 9, failures_max=1), endpoint("good", 9, failures_max=1)
    balancer = balancer_of(bad, good, clock=lambda: now[0])
    bad.circuit.record_failure(0)
    assert {balancer.lease(RoutingRequest("m")).endpoint for _ in range(9)} == {good}
    assert balancer.lease(RoutingRequest("m")) == Full(), "it is full: the next waits for it"
    good.circuit.record_failure(0)
    refused = balancer.lease(RoutingRequest("m"))
    assert isinstance(refused, NotReady)
    assert re.search(r"worker bad has failed with 1 requests in a row.* tried again in 5 s", refused.reasons)
    assert (refused.retry_after_s, refused.limit) == (5, "circuit_breaker")
    now[0] = 5.0
    probe = balancer.lease(RoutingRequest("m"))
    assert probe.endpoint is bad
    assert balancer.lease(RoutingRequest("m")) == Full()
    bad.circuit.record_success()
    assert balancer.lease(RoutingRequest("m")).endpoint is bad


def test_errors_are_better_than_nothing():
    """Who answers with errors is avoided for who is well, and asked all the same where there is nobody else."""
    bad, good = endpoint("bad", 9, failures_max=1), endpoint("good", 2, failures_max=1)
    bad.circuit.record_failure(0, answers=True)
    both = balancer_of(bad, good)
    assert [both.lease(RoutingRequest("m")).endpoint for _ in range(2)] == [good, good]
    assert both.lease(RoutingRequest("m")) == Full(), "the good one is worth waiting for"
    assert balancer_of(bad).lease(RoutingRequest("m")).endpoint is bad
    good.circuit.record_failure(0)
    assert both.lease(RoutingRequest("m")).endpoint is bad


async def test_a_request_that_waits_for_a_circuit_is_woken(serve, gateway_to, connect):
    """By the time that it is tried again, and by the answer to that try, though nobody else ends or beats."""
    held = trio.Event()

    async def reply(stream, head, body):
        if json.loads(body).get("first"):
            await held.wait()
            return "close"
        await hello(stream, head, body)
        return None

    upstream, port = await serve(reply)
    more = "[routing]\nmax_in_flight = 1\n[circuit_breaker]\nfailures_max = 1\nopen_s = 0.5\n"
    gateway = await gateway_to({"m": port}, more)
    clients = [await connect(gateway) for _ in range(4)]
    async with trio.open_nursery() as nursery:
        results = []

        async def one(client, **body):
            results.append((await client.ask(**body))[0])

        nursery.start_soon(one, clients[0])
        await until(lambda: results == [200])
        results.clear()
        nursery.start_soon(lambda: one(clients[0], first=True))
        await until(lambda: len(upstream.requests) == 2)
        for client in clients[1:]:
            nursery.start_soon(one, client)
        await queued(connect, gateway, 3)
        held.set()
    assert sorted(results) == [200, 200, 200, 502]


async def fails(stream, head, body):
    status = json.loads(body).get("status", 200)
    if isinstance(status, str):
        code = 200 if status == "break" else 500
        await stream.send_all(b"HTTP/1.1 %d X\r\ncontent-length: 100\r\n\r\nx" % code)
        return "close"
    await stream.send_all(b"HTTP/1.1 %d X\r\ncontent-length: 2\r\n\r\n{}" % status)
    return None


@pytest.mark.parametrize("status", [500, 502, 503, 504, "break", "500 and break"])
async def test_a_failing_worker_is_left_alone(serve, gateway_to, connect, status):
    """After so many failures in a row the next requests go to the other one; the circuit is shown as open."""
    bad, bad_port = await serve(fails)
    good, good_port = await serve(hello)
    route = '[[external_routes]]\nmodel_name = "m"\napi_base = "http://127.0.0.1:%d/v1"\n'
    more = (
        '[routing]\npolicy = "round_robin"\n[circuit_breaker]\nfailures_max = 2\nopen_s = 600\nopen_longest_s = 600\n'
    )
    gateway = await gateway_to({}, more + route % bad_port + route % good_port)
    for _ in range(8):
        await (await connect(gateway)).ask(status=status)
    assert (len(bad.requests), len(good.requests)) == (2, 6)
    assert await metric(connect, gateway, "ichat_circuit_open") == 1


@pytest.mark.parametrize(("status", "expected"), [("break", 503), (500, 500), ("500 and break", 502)])
async def test_the_only_worker_is_shut_off_if_it_is_silent(serve, gateway_to, connect, status, expected):
    """Then requests are refused at once and it sees none; one that answers with errors goes on doing so."""
    upstream, port = await serve(fails)
    gateway = await gateway_to({"m": port}, "[circuit_breaker]\nfailures_max = 2\nopen_s = 600\nopen_longest_s = 600\n")
    for _ in range(2):
        await (await connect(gateway)).ask(status=status)
    found, headers, body = await (await connect(gateway)).ask(status=status)
    assert found == expected
    assert len(upstream.requests) == (2 if expected == 503 else 3)
    if expected == 503:
        assert code_of(body) == "model_not_ready"
        assert 500 < int(headers[b"retry-after"]) <= 600


async def test_a_circuit_closes_again(serve, gateway_to, connect):
    """One request goes through after a while, and closes it."""
    _, port = await serve(fails)
    gateway = await gateway_to({"m": port}, "[circuit_breaker]\nfailures_max = 1\nopen_s = 0.3\n")
    await (await connect(gateway)).ask(status="break")
    client = await connect(gateway)
    with trio.fail_after(LIMIT_S):
        while (await client.ask())[0] != 200:  # noqa: ASYNC110
            await trio.sleep(0.05)
    assert await metric(connect, gateway, "ichat_circuit_open") == 0


@pytest.mark.parametrize("status", [400, 401, 404, 408, 413, 422, 429, 501])
async def test_client_errors_open_no_circuit(serve, gateway_to, connect, status):
    """However often."""
    _, port = await serve(fails)
    gateway = await gateway_to({"m": port}, "[circuit_breaker]\nfailures_max = 2\n")
    client = await connect(gateway)
    for _ in range(5):
        assert (await client.ask(status=status))[0] == status
    assert (await client.ask())[0] == 200
    assert await metric(connect, gateway, "ichat_circuit_open") == 0


async def test_clients_that_leave_open_no_circuit(serve, gateway_to, connect):
    """A request that nobody waits for says nothing of who was asked."""

    async def reply(stream, head, body):
        if json.loads(body).get("slow"):
            await trio.sleep_forever()
        await hello(stream, head, body)

    upstream, port = await serve(reply)
    gateway = await gateway_to({"m": port}, "[circuit_breaker]\nfailures_max = 2\n")
    for number in range(4):
        client = await connect(gateway)
        body = b'{"model": "m", "slow": true}'
        await client.send(post_of(body))
        await until(lambda number=number: len(upstream.requests) > number)
        await client.stream.aclose()
    client = await connect(gateway)
    assert (await client.ask())[0] == 200


async def test_a_silent_worker_opens_its_circuit(serve, gateway_to, connect):
    """A timeout counts like a failure."""

    async def reply(stream, head, body):
        await trio.sleep_forever()

    _, port = await serve(reply)
    more = "[timeouts]\nfirst_byte_s = 0.2\n[circuit_breaker]\nfailures_max = 2\nopen_s = 60\n"
    client = await connect(await gateway_to({"m": port}, more))
    answers = [await client.ask() for _ in range(3)]
    assert [(status, code_of(body)) for status, _, body in answers] == [
        (504, "upstream_timeout"), (504, "upstream_timeout"), (503, "model_not_ready"),
    ]  # fmt: skip
