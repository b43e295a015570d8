"""What a worker reports of its engine's cache, and when, to a gateway in memory."""

import hashlib
import json

import httpx
import pytest
import trio

from ichat.engines.held_prefixes import HeldPrefixes
from ichat.protocol.prefixes import BOUNDARIES, REPORTED_MAX, SentChain, parse_report
from ichat.roles.worker_reports import PREFIXES_PATH, REPORT_S, PrefixReporter


class InMemoryGateway:
    """A gateway that accepts heartbeats, and reports unless `refuses` says with what; it may be away."""

    def __init__(self):
        self.accepted = 0
        self.gateway_id = ""
        self.refuses = 200
        self.is_away = False
        self.reports = []
        self.times = []

    def client(self):
        return httpx.AsyncClient(base_url="http://gateway", transport=httpx.MockTransport(self.answer))

    async def answer(self, request):
        assert (request.method, request.url.path) == ("POST", PREFIXES_PATH)
        if self.is_away:
            raise httpx.ConnectError("away")
        if self.refuses == 200:
            self.reports.append(parse_report(json.loads(request.content)))
            self.times.append(trio.current_time())
        return httpx.Response(self.refuses, json={"status": "ok"})

    def accept_heartbeat(self, gateway_id):
        self.accepted += 1
        self.gateway_id = gateway_id


@pytest.fixture
def gateway():
    return InMemoryGateway()


@pytest.fixture
async def held(gateway, nursery):
    held = HeldPrefixes()
    nursery.start_soon(PrefixReporter(gateway, held, "w", "s").report_forever)
    return held


def store(held, name, blocks=4):
    """Store a prompt in blocks of 256 bytes, each with a digest; return the digests."""
    digests = [hashlib.sha1(f"{name} {boundary}".encode()).digest()[:8] for boundary in BOUNDARIES[:blocks]]
    tag = held.expect(SentChain(blocks * 256, digests), blocks * 16, blocks * 256)
    held.stored([f"{name} {at}".encode() for at in range(blocks)], None, 16, tag)
    return [digest.hex() for digest in digests]


def said(gateway):
    return [(report.cleared, sorted(report.have), sorted(report.gone)) for report in gateway.reports]


def remove(held, name, at):
    held.removed([f"{name} {at}".encode()])


async def test_lost_prefixes_are_reported_once(gateway, held, autojump_clock):
    """Once each, in one report for each interval, which names worker and start; what is stored is not reported."""
    gateway.accept_heartbeat("g")
    digests = store(held, "a")
    await trio.sleep(10 * REPORT_S)
    assert gateway.reports[1:] == []
    gateway.reports.clear()
    for at in (3, 2):
        remove(held, "a", at)
    await trio.sleep(2 * REPORT_S)
    remove(held, "a", 1)
    await trio.sleep(10 * REPORT_S)
    assert said(gateway) == [
        (False, [], sorted(digests[2:])),
        (False, [], [digests[1]]),
    ]
    assert {(report.worker_id, report.start_id) for report in gateway.reports} == {("w", "s")}


async def test_a_gateway_that_has_restarted_learns_what_is_held(gateway, held, autojump_clock):
    """After its first heartbeat that is accepted, and not before; at the first contact as well."""
    digests = store(held, "a")
    await trio.sleep(10)
    assert gateway.reports == []
    gateway.accept_heartbeat("g1")
    await trio.sleep(10)
    remove(held, "a", 3)
    await trio.sleep(10)
    gateway.accept_heartbeat("g2")
    await trio.sleep(10)
    assert said(gateway) == [
        (True, sorted(digests), []),
        (False, [], digests[3:]),
        (True, sorted(digests[:3]), []),
    ]


@pytest.mark.parametrize("is_away", [True, False])
async def test_a_report_that_fails_is_made_up_for_after_the_next_heartbeat(gateway, held, is_away, autojump_clock):
    """Everything is reported anew then, since it is not known what the gateway has got; until then, nothing."""
    gateway.accept_heartbeat("g")
    digests = store(held, "a")
    await trio.sleep(10)
    gateway.reports.clear()
    gateway.is_away, gateway.refuses = is_away, 404
    remove(held, "a", 3)
    await trio.sleep(10)
    gateway.is_away, gateway.refuses = False, 200
    await trio.sleep(10)
    assert gateway.reports == []
    gateway.accept_heartbeat("g")
    await trio.sleep(10)
    assert said(gateway) == [(True, sorted(digests[:3]), [])]


async def test_much_is_reported_in_pieces(gateway, held, autojump_clock):
    """A report has no more digests than the gateway accepts, and the next one follows after the interval."""
    gateway.accept_heartbeat("g")
    await trio.sleep(1)
    names = [f"prompt {number}" for number in range(1200)]
    lost = {digest for name in names for digest in store(held, name)}
    for name in names:
        held.removed([f"{name} {at}".encode() for at in range(4)])
    await trio.sleep(10)
    assert [len(report.gone) for report in gateway.reports] == [REPORTED_MAX, 4800 - REPORTED_MAX]
    assert {digest for report in gateway.reports for digest in report.gone} == lost
    assert gateway.times[1] - gateway.times[0] >= REPORT_S


async def test_an_empty_cache_is_reported_as_such(gateway, held, autojump_clock):
    """What is stored after that is in the same report, so that the gateway does not lose it."""
    gateway.accept_heartbeat("g")
    store(held, "a")
    await trio.sleep(10)
    gateway.reports.clear()
    held.cleared()
    digests = store(held, "b")
    await trio.sleep(10)
    assert said(gateway) == [(True, sorted(digests), [])]
