"""Whose reports of prefixes count, and that a long one holds up nobody."""

import itertools
import json
import os

import pytest
import trio

from ichat.config.schema import Limits, Routing, Security
from ichat.errors import ApiError
from ichat.fleet.fleet import Fleet
from ichat.fleet.heartbeats import HeartbeatReceiver
from ichat.fleet.prefix_reports import AT_ONCE, PrefixReportReceiver
from ichat.protocol.prefixes import REPORTED_MAX
from ichat.routing.prefix_index import PrefixIndex
from ichat.security.auth import Auth, Caller

HERE, ELSEWHERE = "10.0.0.1", "10.0.0.2"
DIGEST = "0123456789abcdef"


def caller(address=HERE, kind="worker", **more):
    return Caller(kind, address, is_local=False, **more)


MANAGED = caller("", is_managed_worker=True)


class Site:
    """A receiver with its fleet and index."""

    def __init__(self):
        self.fleet = Fleet({}, trio.current_time, 8)
        self.index = PrefixIndex(trio.current_time, Routing())
        self.auth = Auth(Security())
        self.evicted = []
        fleet = self.fleet
        self._heartbeats = HeartbeatReceiver(fleet.registry, fleet.table, self.auth, Limits(), gateway_id="g")
        self._receiver = PrefixReportReceiver(self._heartbeats, fleet.table, self.index)
        self._receiver.evicted.add(lambda *more: self.evicted.append(more))

    async def beat(self, sender=None, **more):
        known = {"worker_id": "w", "model_name": "m", "host": HERE, "port": 9, "start_id": "1"} | more
        await self._heartbeats.receive(json.dumps(known).encode(), sender or caller())

    async def report(self, sender=None, **more):
        """Return "ok", or the status of the refusal."""
        body = json.dumps({"worker_id": "w", "start_id": "1", "have": [DIGEST]} | more).encode()
        try:
            self.auth.check("join", sender or caller())  # as the route does
            return json.loads(await self._receiver.receive(body, sender or caller()))["status"]
        except ApiError as error:
            return error.status

    def endpoint(self):
        return self.fleet.table.endpoint_of(self.fleet.table.get("w"))


@pytest.fixture
async def site():
    return Site()


async def test_a_report_counts_from_where_heartbeats_come_from(site):
    """Not from another host, nor from a client with another key, nor before a heartbeat."""
    assert await site.report() == 404
    await site.beat()
    assert await site.report(caller(ELSEWHERE)) == 403
    assert await site.report(caller(kind="anonymous")) == 401
    assert await site.report(caller(is_relayed=True)) == 403
    assert len(site.index) == 0
    assert await site.report() == "ok"
    assert site.index.discard([bytes.fromhex(DIGEST)], site.endpoint()) == 1


async def test_a_managed_worker_reports_over_its_socket_only(site):
    """It reports over the control plane's socket; over the network nobody has its id."""
    site.fleet.managed.expect("w", ["m"])
    assert await site.report(MANAGED) == 404
    await site.beat(MANAGED)
    assert await site.report() == 403
    assert await site.report(caller("127.0.0.1")) == 403
    assert await site.report(MANAGED) == "ok"
    assert await site.report(MANAGED, have=[], gone=[DIGEST, DIGEST[::-1]]) == "ok"
    assert site.evicted == [("m", 1)]


async def test_a_restarted_gateway_waits_for_a_heartbeat(site):
    """A worker that it only remembers is known again by its heartbeat, not by a report."""
    before = Site()
    await before.beat()
    [(heartbeat, age_s, _)] = before.fleet.registry.snapshot()
    site.fleet.registry.restore(heartbeat, age_s)
    assert await site.report() == 404
    await site.beat()
    assert await site.report() == "ok"


async def test_others_go_on_while_a_long_report_is_applied(site, nursery):
    """A task gets a turn after each step; if the worker is started again meanwhile, the rest is of no worker."""
    await site.beat()
    digests = [os.urandom(8).hex() for _ in range(REPORTED_MAX)]
    sizes = []

    async def look():
        while True:
            sizes.append(len(site.index))
            await trio.lowlevel.checkpoint()

    nursery.start_soon(look)
    assert await site.report(have=digests, gone=digests) == "ok"
    steps = [after - before for before, after in itertools.pairwise(sizes)]
    assert max(steps) <= 2 * AT_ONCE
    assert len(site.index) == REPORTED_MAX
    assert site.evicted == [("m", REPORTED_MAX)]

    async def restart():
        while not site.index.discard([bytes.fromhex(digests[0])], site.endpoint()):
            await trio.lowlevel.checkpoint()
        await site.beat(start_id="2")

    nursery.start_soon(restart)
    assert await site.report(have=digests) == "ok"
    assert site.index.discard(map(bytes.fromhex, digests), site.endpoint()) == 0
    nursery.cancel_scope.cancel()
