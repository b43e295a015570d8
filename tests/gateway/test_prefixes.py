"""Where requests with a common beginning go, as a gateway sends them to workers over sockets."""

import json

import pytest
from support.exposition import heartbeat
from support.peers import code_of, plain

from ichat.protocol.prefixes import REPORTED_MAX, parse_chain
from ichat.proxy.prefix_reports import REPORT_BYTES_MAX
from ichat.routing.prefix_chain import chain_of

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
    chain = chain_of(CHAT, json.dumps(body).encode(), list(body), model)
    assert chain is not None
    return [digest.hex() for digest in chain.digests]


class Fleet:
    """Workers of one model behind a gateway; each answers at once, unless the test says otherwise."""

    def __init__(self, serve, connect, port):
        self._serve, self._connect, self.port = serve, connect, port
        self.workers = {}

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
        await stream.send_all(plain(b"{}"))

    async def ask(self, messages, **more):
        """Return which worker answered, and how many bytes of how many it was expected to hold."""
        client = await self._connect(self.port)
        status, headers, body = await client.ask(messages=messages, **more)
        assert status == 200, body
        matched = headers.get(b"x-ichat-prefix")
        return headers[b"x-ichat-worker"].decode(), matched and tuple(map(int, matched.split(b"/")))

    async def post(self, report):
        """Send a report; return the status and what was answered."""
        client = await self._connect(self.port)
        body = report if isinstance(report, bytes) else json.dumps(report).encode()
        await client.send(
            b"POST /v1/workers/prefixes HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
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


async def test_a_wrong_report_is_refused(fleet):
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
        await client.send(
            b"POST %b HTTP/1.1\r\nhost: x\r\nX-Ichat-Prefix: 1;00\r\ncontent-length: %d\r\n\r\n%b"
            % (CHAT, len(body), body)
        )
        assert (await client.response())[0] == 200
        [(head, _)] = [one for one in site.workers[worker_id][0].requests if one[0].method == b"POST"]
        sent = [value for name, value in head.headers if name == b"x-ichat-prefix"]
        assert [[one.hex() for one in parse_chain(value).digests] for value in sent] == ([expected] if expected else [])
