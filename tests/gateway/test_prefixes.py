"""Where requests with a common beginning go, as a gateway sends them to workers over sockets."""

import json
import socket

import pytest
import trio
from support.exposition import heartbeat
from support.peers import JSON_POST, SSE_HEAD, chunk, code_of, plain, post_of, until
from support.programs import LIMIT_S

from ichat.fleet.prefix_reports import REPORT_BYTES_MAX
from ichat.protocol.prefixes import BOUNDARIES, REPORTED_MAX, SentChain, chain_header, parse_chain
from ichat.proxy import progress
from ichat.proxy.attempt_lessons import WRONG_MAX, held
from ichat.proxy.token_usage import TokenUsage
from ichat.routing.prefix_chain import chain_of, sums_of

AWARE = '[routing]\npolicy = "prefix_aware"\n'
CHAT = b"/v1/chat/completions"
SYSTEM = "You answer in one word. " * 100


def conversation(name, turns=1):
    """Return the messages of a conversation, which begins like no other one."""
    messages = [{"role": "system", "content": f"{name}. {SYSTEM}"}]
    for turn in range(turns):
        messages += [{"role": "user", "content": f"{turn} {SYSTEM[:600]}"}, {"role": "assistant", "content": "Yes."}]
    return messages[:-1]


def digests_of(messages, model="m", **more):
    """Return the chain of the request that a client of `peers` makes of these messages."""
    body = {"model": model, "messages": messages, **more}
    chain = chain_of(sums_of(CHAT, json.dumps(body).encode(), list(body)), model)
    assert chain is not None
    return [digest.hex() for digest in chain.digests]


class Fleet:
    """Workers of one model behind a gateway; each answers at once, unless the test says otherwise."""

    def __init__(self, serve, connect, port):
        self._serve, self._connect, self.port = serve, connect, port
        self.workers = {}
        self._idle = {}
        """Clients by the gateway's port."""
        self.answer = [plain(b"{}")]
        self.gate = trio.Event()
        """Answers wait for it."""
        self.gate.set()

    async def add(self, *worker_ids, model="m", **more):
        """Register workers, each with its own socket."""
        for worker_id in worker_ids:
            self.workers[worker_id] = await self._serve(self.reply)
            await self.register(worker_id, model=model, **more)

    async def register(self, worker_id, *, model="m", **more):
        place = self.workers[worker_id][1]
        known = {"start_id": "1", "heartbeat_interval": 3600, "prefix_reports": True} | more
        await heartbeat(self._connect, self.port, place, worker_id=worker_id, model_name=model, **known)

    async def reply(self, stream, head, body):
        await self.gate.wait()
        for piece in self.answer:
            await stream.send_all(piece)
            await trio.lowlevel.checkpoint()

    def asked(self, worker_id):
        """Return how many requests a worker has got."""
        return sum(head.method == b"POST" for head, _ in self.workers[worker_id][0].requests)

    async def ask(self, messages, **more):
        """Return which worker answered, and how many bytes of how many it was expected to hold."""
        idle = self._idle.setdefault(self.port, [])
        client = idle.pop() if idle else await self._connect(self.port)
        status, headers, body = await client.ask(messages=messages, **more)
        assert status == 200, body
        idle.append(client)  # the next request there is read when the gateway is done with this one
        matched = headers.get(b"x-ichat-prefix")
        return headers[b"x-ichat-worker"].decode(), matched and tuple(map(int, matched.split(b"/")))

    async def post(self, report):
        """Send a report; return the status and what was answered."""
        client = await self._connect(self.port)
        body = report if isinstance(report, bytes) else json.dumps(report).encode()
        await client.send(JSON_POST % (b"/v1/workers/prefixes", len(body), body))
        status, _, answer = await client.response()
        return status, answer

    async def report(self, worker_id, start_id="1", **more):
        return await self.post({"worker_id": worker_id, "start_id": start_id, **more})

    async def metric(self, name):
        client = await self._connect(self.port)
        _, _, text = await client.get(b"/metrics?workers=0")
        return sum(float(line.rpartition(" ")[2]) for line in text.decode().splitlines() if line.startswith(name))


@pytest.fixture
def fleet(serve, connect, gateway_to):
    """Start a gateway: `site = await fleet("a", "b")` has these workers."""

    async def start(*worker_ids, more=AWARE, **known):
        site = Fleet(serve, connect, await gateway_to({}, more))
        await site.add(*worker_ids, **known)
        return site

    return start


# Where requests go.


async def test_a_conversation_stays_where_it_is(fleet):
    """Each turn goes to the worker of the one before, and new ones to the worker that has had the least to do."""
    site = await fleet("a", "b", "c")
    first = {name: (await site.ask(conversation(name)))[0] for name in "xyz"}
    assert sorted(first.values()) == ["a", "b", "c"]
    before = 0
    for turns in (2, 3, 4):
        for name in "zxy":
            where, (matched, length) = await site.ask(conversation(name, turns))
            assert where == first[name]
        assert matched > before
        assert length - matched < 2500
        before = matched
    assert await site.metric('ichat_prefix_spills_total{model="m"}') == 0


async def test_sessions_go_first(fleet):
    """A session's requests go to its worker, whoever holds their beginning."""
    site = await fleet("a", "b")
    messages = conversation("x")
    homes = set()
    for session in range(20):
        client = await site._connect(site.port)
        body = json.dumps({"model": "m", "messages": messages}).encode()
        head = b"POST %b HTTP/1.1\r\nhost: localhost\r\nx-session-id: %d\r\ncontent-length: %d\r\n\r\n" % (
            CHAT,
            session,
            len(body),
        )
        await client.send(head + body)
        _, headers, _ = await client.response()
        homes.add(headers[b"x-ichat-worker"])
        assert b"x-ichat-prefix" not in headers
    assert homes == {b"a", b"b"}
    assert await site.metric("ichat_prefix_entries") == 0


@pytest.mark.parametrize("case", ["one endpoint", "short", "another route", "another policy", "no header"])
async def test_a_model_with_one_worker_needs_no_digests(fleet, case):
    """No digests are made, none sent, none told."""
    more = {
        "another policy": AWARE.replace("prefix_aware", "least_loaded"),
        "no header": f"prefix_header = false\n{AWARE}",
    }.get(case, AWARE)
    site = await fleet(*("a" if case == "one endpoint" else "ab"), more=more)
    messages = [{"role": "user", "content": "Hello"}] if case == "short" else conversation("x")
    for _ in range(2):
        _, matched = await site.ask(messages, **({"target": b"/v1/embeddings"} if case == "another route" else {}))
        assert matched is None
    assert (await site.metric("ichat_prefix_entries") > 0) == (case == "no header")
    if case != "no header":
        requests = [head for upstream, _ in site.workers.values() for head, _ in upstream.requests]
        assert not any(name == b"x-ichat-prefix" for head in requests for name, _ in head.headers)


async def test_a_busy_holder_is_relieved(fleet, nursery):
    """What only one worker holds goes elsewhere once that has far more to do, and is found there from then on."""
    site = await fleet("a", "b", max_in_flight=64)
    site.gate = trio.Event()
    talks = [conversation(f"talk {number}") for number in range(10)]
    for messages in talks:
        await site.report("a", have=digests_of(messages))
    went = []

    async def ask(messages):
        went.append(await site.ask(messages))

    for number, messages in enumerate(talks):
        nursery.start_soon(ask, messages)
        await until(lambda number=number: site.asked("a") + site.asked("b") == number + 1)
    assert (site.asked("a"), site.asked("b")) == (9, 1)
    site.gate.set()
    await until(lambda: len(went) == 10)
    assert await site.metric('ichat_prefix_spills_total{model="m"}') == 1
    assert await site.metric('ichat_prefix_holders_count{model="m"}') == 10


async def test_a_freed_worker_takes_what_it_holds(fleet, nursery):
    """Of the requests that wait for room."""
    site = await fleet("a", "b", max_in_flight=1)
    talks = {worker_id: conversation(f"of {worker_id}") for worker_id in "ab"}
    for worker_id, messages in talks.items():
        await site.report(worker_id, have=digests_of(messages))
    site.gate = trio.Event()
    went = []

    async def ask(name, messages):
        went.append((name, await site.ask(messages)))

    for worker_id in "ab":
        nursery.start_soon(ask, "begun", talks[worker_id])
        await until(lambda worker_id=worker_id: site.asked(worker_id) == 1)
    for number, worker_id in enumerate("baab", 1):
        nursery.start_soon(ask, worker_id, talks[worker_id])
        await waiting(site, number)
    site.gate.set()
    await until(lambda: len(went) == 6)
    assert [(name, where) for name, (where, _) in went if name not in ("begun", where)] == []


async def waiting(site, count):
    with trio.fail_after(LIMIT_S):
        while await site.metric("ichat_requests_queued") != count:  # noqa: ASYNC110
            await trio.sleep(0.01)


async def test_an_unreached_worker_holds_no_new_prefix(fleet):
    """It goes to another worker with its chain; the one that could not be reached has what it had."""
    site = await fleet("b")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        site.workers["a"] = None, closed.getsockname()[1]
        await site.register("a")
        messages = conversation("x")
        digests = digests_of(messages)
        await site.report("a", have=digests[:4])
        where, (matched, length) = await site.ask(messages)
        assert (where, matched) == ("b", 0)
    site.workers["a"] = await site._serve(site.reply)
    await site.register("a")
    await site.report("b", cleared=True)
    assert await site.ask(messages) == ("a", (1024, length))


async def test_a_worker_that_comes_back_has_what_it_kept(fleet):
    """While it drains its conversations go elsewhere, and stay there; what is started anew has nothing."""
    site = await fleet("a", "b")
    where, _ = await site.ask(conversation("x"))
    await site.register(where, state="draining")
    other, (matched, _) = await site.ask(conversation("x", 2))
    assert (other != where, matched) == (True, 0)
    await site.register(where)
    assert (await site.ask(conversation("x", 3)))[0] == other
    await site.register(other, start_id="2")
    back, (matched, length) = await site.ask(conversation("x", 4))
    assert back == where
    assert 1024 < matched < length - 2000


async def test_a_restarted_gateway_learns_again(fleet, gateway_to):
    """Workers say all they have to a gateway that they do not know."""
    site = await fleet("a", "b")
    talks = [conversation(f"talk {number}") for number in range(4)]
    homes = [(await site.ask(messages))[0] for messages in talks]
    site.port = await gateway_to({}, AWARE)
    assert (await site.report("a", cleared=True))[0] == 404
    for worker_id in "ab":
        await site.register(worker_id)
        here = [messages for messages, home in zip(talks, homes, strict=True) if home == worker_id]
        have = [digest for messages in here for digest in digests_of(messages)]
        assert (await site.report(worker_id, cleared=True, have=have))[0] == 200
    for messages, home in zip(talks, homes, strict=True):
        where, (matched, length) = await site.ask(messages)
        assert where == home
        assert length - matched < 1024


async def test_the_header_is_of_the_gateway_that_answers(fleet, gateway_to, connect):
    """What a gateway behind it says of its own workers is not forwarded."""
    site = await fleet("a", "b")
    outer = await gateway_to({"m": site.port})
    for port, expected in ((site.port, 1), (outer, 0)):
        client = await connect(port)
        body = json.dumps({"model": "m", "messages": conversation("x")}).encode()
        await client.send(
            b"POST %b HTTP/1.0\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (CHAT, len(body), body)
        )
        assert (await client.everything()).lower().count(b"x-ichat-prefix:") == expected


async def test_prefix_hits_are_in_metrics_and_access_log(fleet, tmp_path):
    """In the metrics and in the access log."""
    log = tmp_path / "access"
    site = await fleet("a", "b", more=f'{AWARE}[logs]\naccess_log = "{log}"\n')
    _, (_, first) = await site.ask(conversation("x"))
    _, (matched, second) = await site.ask(conversation("x", 2))
    await site.ask([{"role": "user", "content": "Hello"}])
    assert await site.metric('ichat_prefix_bytes_total{kind="matched",model="m"}') == matched > 2000
    assert await site.metric('ichat_prefix_bytes_total{kind="all",model="m"}') == first + second
    assert await site.metric('ichat_prefix_holders_bucket{le="0.0",model="m"}') == 1
    assert await site.metric('ichat_prefix_holders_bucket{le="1.0",model="m"}') == 2
    assert await site.metric("ichat_prefix_entries") > 8
    found = []
    with trio.fail_after(LIMIT_S):
        while len(found) < 3:
            await trio.sleep(0.05)
            lines = log.read_text().splitlines() if log.exists() else []
            found = [one for one in map(json.loads, lines) if one["path"] == CHAT.decode()]
    assert [(one["prefix_matched"], one["prefix_length"]) for one in found] == [
        (0, first),
        (matched, second),
        (None, None),
    ]


# What responses say.


@pytest.mark.parametrize(
    ("matched", "told", "count"),
    [
        (4096, (1000, 490), None),  # 4018 of 8200 bytes
        (4096, (1000, 250), None),
        (4096, (1000, 245), 7),  # 2009 bytes
        (4096, (1000, 0), 0),
        (256, (1000, 0), 0),
        (4096, (0, 0), 0),
        (512, (100, 99), None),
        (8192, (10, 99), None),
    ],
)
def test_far_less_than_expected(matched, told, count):
    """Less than half of it, by a boundary at least; what it had stays."""
    assert held(matched, 8200, *told) == count
    assert count is None or (BOUNDARIES[count - 1] if count else 0) <= 8200 * told[1] // max(1, told[0])


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        ([b'{"usage":{"prompt_tokens":30,"total_tokens":40,"prompt_tokens_details":{"cached_tokens":16}}}'], (30, 16)),
        ([b'{"usage":{"prompt_tokens":30,"prompt_tokens_details":{"cac', b'hed_tokens":1', b"6}}}"], (30, 16)),
        ([b'{"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":0}}}'], (9, 0)),
        ([b'{"usage":{"input_tokens":9,"cache_creation_input_tokens":3,"cache_read_', b'input_tokens":21}}'], (33, 21)),
        ([b'{"usage":{"prompt_tokens":30,"prompt_tokens_details":null}}'], None),
        ([b'{"text":"\\"cached_tokens\\": 3","usage":{"prompt_tokens":30}}'], None),
    ],
)
def test_cached_tokens_are_read_in_passing(pieces, told):
    """Of both APIs, and however they are cut; they are no tokens more."""
    path = b"/v1/messages" if any(b"cache_creation" in one for one in pieces) else b"/v1/chat/completions"
    usage = TokenUsage(b"/v1/responses" if b"input_tokens_details" in pieces[0] else path)
    for piece in pieces:
        usage.see(bytearray(piece), len(piece))
    said = usage.said()
    assert ((said.input, said.cached) if usage.tells_cached else None) == told
    assert said.input == (told or (30,))[0]


def said(prompt, cached, how):
    """Return the pieces of a response with these tokens."""
    details = "" if cached is None else f', "prompt_tokens_details": {{"cached_tokens": {cached}}}'
    usage = f'{{"usage": {{"prompt_tokens": {prompt}, "completion_tokens": 1{details}}}}}'.encode()
    if how == "plain":
        return [plain(usage)]
    event = b"data: " + usage + b"\n\n"
    body = chunk(event) + b"0\r\n\r\n"
    cut = body.find(b"details") + 15
    return [SSE_HEAD + chunk(b"data: {}\n\n"), body[:cut], body[cut:]]


@pytest.mark.parametrize("how", ["plain", "stream"])
async def test_an_engine_that_keeps_nothing_is_believed_no_longer(fleet, how):
    """Once wrong is no reason to leave it, since it has the prompt now; what is always wrong is."""
    site = await fleet("a", "b")
    more = {} if how == "plain" else {"stream": True, "stream_options": {"include_usage": True}}
    turns = iter(range(1, 99))

    async def ask(cached):
        site.answer = said(1000, cached, how)
        where, (matched, _) = await site.ask(conversation("x", next(turns)), **more)
        return where, matched

    first, _ = await ask(0)
    for cached in (*[0] * (WRONG_MAX - 1), 990, *[0] * WRONG_MAX):
        where, matched = await ask(cached)
        assert (where, matched > 2000) == (first, True)
    where, matched = await ask(0)
    assert (where != first, matched) == (True, 0)
    assert await site.metric('ichat_prefix_corrections_total{model="m"}') == 2 * WRONG_MAX - 1
    cached = await site.metric('ichat_tokens_total{direction="cached",model="m"}')
    assert cached == 990, "they are counted without a key"


@pytest.mark.parametrize("how", ["plain", "stream"])
async def test_nothing_is_concluded_from_nothing(fleet, how):
    """A response may say nothing of its cache."""
    site = await fleet("a", "b")
    site.answer = said(1000, None, how)
    first, _ = await site.ask(conversation("x"))
    for turns in range(2, WRONG_MAX + 3):
        assert (await site.ask(conversation("x", turns), **({"stream": True} if how == "stream" else {})))[0] == first
    assert await site.metric("ichat_prefix_corrections_total") == 0


# What workers report.


async def test_a_report_says_where_requests_go(fleet):
    """What a worker has, it gets; what it has lost, it is not expected to have; `cleared` is all of it."""
    site = await fleet("a", "b")
    for worker_id in ("a", "b", "a"):
        messages = conversation(f"at {worker_id}")
        digests = digests_of(messages)
        assert await site.report(worker_id, have=digests) == (200, b'{"status": "ok"}')
        where, (matched, length) = await site.ask(messages)
        assert where == worker_id
        assert 0 < length - matched < 1024
    assert await site.report("a", gone=digests[4:]) == (200, b'{"status": "ok"}')
    assert await site.ask(messages) == ("a", (1024, length))
    assert await site.metric("ichat_prefix_reported_evictions_total") == len(digests) - 4
    assert await site.report("b", gone=digests) == (200, b'{"status": "ok"}')  # it never had them
    assert await site.report("a", cleared=True) == (200, b'{"status": "ok"}')
    assert (await site.ask(messages))[1] == (0, length)
    assert await site.metric("ichat_prefix_reported_evictions_total") == len(digests) - 4


async def test_a_report_applies_in_its_order(fleet):
    """First everything is forgotten, then comes what there is, then what is gone of that."""
    site = await fleet("a", "b")
    messages, before = conversation("new"), conversation("old")
    digests = digests_of(messages)
    await site.report("b", have=digests_of(before))
    await site.report("b", cleared=True, have=digests, gone=digests[2:])
    where, (matched, _) = await site.ask(messages)
    assert (where, matched) == ("b", 512)
    assert (await site.ask(before))[1][0] == 0


async def test_a_report_is_of_a_start_that_is_known(fleet):
    """Neither of another worker's, nor of an earlier start; a new start has nothing."""
    site = await fleet("a", "b")
    messages = conversation("x")
    digests = digests_of(messages)
    for worker_id, start_id in (("c", "1"), ("a", "0"), ("a", "")):
        status, answer = await site.report(worker_id, start_id, have=digests)
        assert (status, code_of(answer)) == (404, "registration_not_found")
    await site.report("a", have=digests)
    await site.register("a", start_id="2")
    assert (await site.report("a", have=digests))[0] == 404
    assert (await site.ask(messages))[1][0] == 0


async def test_a_wrong_prefix_report_is_refused_over_http(fleet):
    """It changes nothing."""
    site = await fleet("a", "b")
    known = {"worker_id": "a", "start_id": "1"}
    good = "0123456789abcdef"
    for wrong in (
        b"x", b"[]", b"{}", b"[" * 100_000, {**known, "have": [good, "x"]}, {**known, "have": [7]}, {**known, "gone": good},
        {**known, "gone": [good.upper()]}, {**known, "have": [f"{good} {good}"]}, {**known, "have": [f"{good}{good}", ""]},
        {**known, "cleared": 1}, {**known, "have": [good] * (REPORTED_MAX + 1)}, {"worker_id": "a"},
    ):  # fmt: skip
        status, answer = await site.post(wrong)
        assert (status, code_of(answer)) == (400, "bad_request")
    largest = json.dumps({**known, "have": [good] * REPORTED_MAX, "gone": [good] * REPORTED_MAX}).encode()
    assert (await site.post(largest))[0] == 200
    status, answer = await site.post(largest.ljust(REPORT_BYTES_MAX + 1))
    assert (status, code_of(answer)) == (413, "request_too_large")


async def test_a_worker_gets_the_chains_that_it_wants(fleet):
    """And no client's header of that name; a worker that does not report gets none."""
    site = await fleet("a", "b")
    await site.register("b", prefix_reports=False)
    messages = conversation("x")
    digests = digests_of(messages)
    for worker_id, expected in (("a", digests), ("b", None)):
        await site.report("a", cleared=True)
        await site.report("b", cleared=True)
        await site.report(worker_id, have=digests)
        body = json.dumps({"model": "m", "messages": messages}).encode()
        client = await site._connect(site.port)
        await client.send(post_of(body, CHAT, b"X-Ichat-Prefix: 1;00\r\n"))
        assert (await client.response())[0] == 200
        [(head, _)] = [one for one in site.workers[worker_id][0].requests if one[0].method == b"POST"]
        sent = [value for name, value in head.headers if name == b"x-ichat-prefix"]
        assert [[one.hex() for one in parse_chain(value).digests] for value in sent] == ([expected] if expected else [])


@pytest.mark.one_process("counts the readings of bodies in the process that reads them")
async def test_a_body_is_read_once_for_all_models_of_a_name(fleet, monkeypatch):
    """The next model gets its own chain, with the members that the name sets, from the sums of the first."""
    made = []
    monkeypatch.setattr(progress, "sums_of", lambda *args: made.append(sums_of(*args)) or made[-1])
    name = '[[models]]\nname = "n"\ntargets = [{ model = "m" }]\nfallbacks = ["k"]\nset = { cache_salt = "s" }\n'
    site = await fleet(more=AWARE + name)
    await site.add("c", "d", model="k")
    with socket.socket() as one, socket.socket() as other:
        for worker_id, closed in (("a", one), ("b", other)):
            closed.bind(("127.0.0.1", 0))
            site.workers[worker_id] = None, closed.getsockname()[1]
            await site.register(worker_id)
        where, _ = await site.ask(conversation("x"), model="n", cache_salt="c", stream=False)
    [(head, body)] = [one for one in site.workers[where][0].requests if one[0].method == b"POST"]
    [sent] = [value for name, value in head.headers if name == b"x-ichat-prefix"]
    assert json.loads(body)["cache_salt"] == "s"
    chain = chain_of(made[0], "k", [("cache_salt", b'"s"')])
    assert parse_chain(sent) == SentChain(chain.length, chain.digests)
    assert sent != chain_header(chain.length, chain_of(made[0], "k").digests)
    assert len(made) == 1


@pytest.mark.parametrize("path", [b"/sleep", b"/reset_prefix_cache", b"/flush_cache", b"/release_memory_occupation"])
async def test_no_cache_is_emptied_through_the_gateway(fleet, path):
    """So what it believes does not change unseen by its own doing."""
    site = await fleet("a", "b")
    client = await site._connect(site.port)
    status, _, answer = await client.ask(target=path)
    assert (status, code_of(answer)) == (404, "not_found")
    assert site.asked("a") + site.asked("b") == 0
