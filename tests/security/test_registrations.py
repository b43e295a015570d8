"""What joined workers register is bounded for all together and for each address, and their names delay nobody."""

import json
import socket
import sys
import threading
import tracemalloc

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from support.exposition import known, own

from ichat.config.schema import Config, Limits, Security
from ichat.errors import ApiError
from ichat.fleet.fleet import Fleet
from ichat.fleet.heartbeats import LARGE_BYTES, HeartbeatReceiver
from ichat.fleet.weights import Weights
from ichat.hardware.machines import machines_of
from ichat.observability import prometheus_families
from ichat.protocol.messages import Heartbeat, Machine, MachineGpu, ModelCard
from ichat.security import lookups
from ichat.security.auth import Auth, Caller
from ichat.security.lookups import HOST_CHECK_S, LOOKUPS_A_MINUTE, THREADS_OF_SENDER, HostLookups

MIB = 1024 * 1024
NEEDED = {"worker_id": "w", "model_name": "m", "host": "10.0.0.1", "port": 9, "start_id": "1", "registration": "r"}
SMALL = Limits(
    joined_bytes_max=4 * MIB, joined_bytes_per_address_max=2 * MIB,
    joined_names_max=100, joined_names_per_address_max=50,
)  # fmt: skip


class Site:
    """A receiver with its fleet."""

    def __init__(self, limits=SMALL):
        self.fleet = Fleet({}, trio.current_time, 8)
        self.fleet.reconfigure(Config(limits=limits))
        self.auth = Auth(Security(worker_networks=["10.0.0.0/8", "fd00::/8"]))
        fleet = self.fleet
        self.receiver = HeartbeatReceiver(fleet.registry, fleet.table, self.auth, limits, gateway_id="g")

    async def send(self, address="10.0.0.1", **more):
        """Return the status of a heartbeat, or the limit that refuses it."""
        caller = Caller("worker", address, is_local=False)
        try:
            await self.receiver.receive(json.dumps({**NEEDED, "host": address, **more}).encode(), caller)
        except ApiError as error:
            return error.limit.removeprefix("limits.") or error.status
        return 200


def names(start, count, **more):
    return [{"id": f"m{number}", **more} for number in range(start, start + count)]


# How much.


async def test_names_are_bounded_for_each_address_and_in_all():
    """What several workers serve counts once; what would be too much is refused, and changes nothing."""
    site = Site()
    assert await site.send(models=names(0, 50)) == 200
    assert await site.send(worker_id="v", models=names(0, 50)) == 200
    assert await site.send(worker_id="u", models=names(50, 1)) == "joined_names_per_address_max"
    assert site.fleet.table.get("u") is None
    assert await site.send(models=names(0, 51)) == "joined_names_per_address_max"
    assert len(site.fleet.table.get("w").heartbeat.models) == 50
    assert await site.send("10.0.0.2", worker_id="t", models=names(50, 50)) == 200
    assert await site.send("10.0.0.3", worker_id="s", models=names(100, 1)) == "joined_names_max"
    assert await site.send("10.0.0.3", worker_id="s", models=names(0, 50)) == 200


async def test_bytes_are_bounded_for_each_address_and_in_all():
    """Of names, paths, arguments and everything else that is kept."""
    for more in (
        {"models": names(0, 40, root="é" + "y" * 4000, parent="z" * 4000)},
        {"args": {"a": [f"{number * 7919 % 10007:x}" for number in range(30_000)]}, "phase": "p" * 4000},
        {"versions": {f"v{number}": "x" * 255 for number in range(256)}, "changed_args": ["y" * 256] * 256},
    ):
        site, refused = Site(), []
        for number in range(60):
            address, one = f"10.0.{number // 20}.1", {**more, "worker_id": f"w{number}"}
            if "args" in one:
                one["args"] = {"a": [*one["args"]["a"], number]}
            refused.append(await site.send(address, **one))
        assert set(refused) <= {200, "joined_bytes_per_address_max", "joined_bytes_max"}
        assert refused[0] == refused[20] == 200
        assert refused[-1] == "joined_bytes_max"
        weights = site.fleet.registry._weights
        assert max(one.bytes for one in weights._by_sender.values()) <= 2 * MIB
        assert 3 * MIB < weights._all.bytes <= 4 * MIB


async def test_a_status_counts_as_well():
    """A worker that is known is refused a status that is too much, and may go on with one that is not."""
    limits = attrs.evolve(SMALL, joined_bytes_max=65536, joined_bytes_per_address_max=65536)
    site = Site(limits)
    assert await site.send() == 200
    gpus = [{"index": number, "uuid": "\U0001f4a9" * 256, "name": "x" * 256} for number in range(64)]
    machine = {"id": "a", "name": "b", "gpus": gpus}
    short = {"worker_id": "w", "registration": "r"}

    async def send_short(**more):
        caller = Caller("worker", "10.0.0.1", is_local=False)
        try:
            await site.receiver.receive(json.dumps(short | more).encode(), caller)
        except ApiError as error:
            return error.limit
        return 200

    assert await send_short(machine=machine) == "limits.joined_bytes_max"
    assert site.fleet.table.get("w").machine is None
    assert await send_short(phase="p" * 4000) == 200


async def test_a_worker_that_has_gone_counts_no_longer():
    """Nor does one that was forgotten, and one that has moved counts where it is."""
    site = Site()
    assert await site.send(models=names(0, 50)) == 200
    assert await site.send(worker_id="v", models=names(50, 50)) == "joined_names_per_address_max"
    assert await site.send(state="gone") == 200
    assert await site.send(worker_id="v", models=names(50, 50)) == 200
    site.fleet.table.remove(site.fleet.table.get("v"))
    assert await site.send(models=names(0, 50)) == 200
    assert repr(site.fleet.registry._weights).endswith(" 50 names, 1 senders>")


async def test_all_addresses_of_an_ipv6_network_are_one_sender():
    """The /64 of an IPv6 address counts."""
    site = Site()
    assert await site.send("fd00::1", models=names(0, 50)) == 200
    assert await site.send("fd00::ffff:1", worker_id="v", models=names(50, 1)) == "joined_names_per_address_max"
    assert await site.send("fd00:0:0:1::1", worker_id="v", models=names(50, 1)) == 200


async def test_managed_workers_are_not_counted():
    """Nor are they refused."""
    site = Site()
    site.fleet.managed.expect("m-0", ["m"])
    by_socket = Caller("worker", "", is_local=False, is_managed_worker=True)
    body = json.dumps({**NEEDED, "worker_id": "m-0", "models": names(0, 200)}).encode()
    await site.receiver.receive(body, by_socket)
    assert await site.send(models=names(200, 50)) == 200


def test_workers_of_the_state_directory_are_bounded_too():
    """The state directory of a gateway with other limits may have more."""
    fleet = Fleet({}, lambda: 0.0, 8)
    fleet.reconfigure(Config(limits=SMALL))
    for number in range(5):
        told = Heartbeat(
            f"w{number}", "m", "10.0.0.1", 9, models=[ModelCard(one["id"]) for one in names(number * 20, 20)]
        )
        fleet.registry.restore(told, 1.0, sender="10.0.0.1")
    assert len(list(fleet.table)) == 2


def test_the_bytes_that_are_counted_are_those_that_are_kept():
    """Python keeps no more for a registration than is counted, whether it has many names, long paths or long texts."""
    for models in (
        [ModelCard(f"m{number}") for number in range(2000)],
        [ModelCard(f"org-{number}/{'x' * 200}{number}") for number in range(1000)],
        [ModelCard(f"m{number}", "é" * 2000 + str(number), "p" * 2000 + str(number)) for number in range(200)],
    ):
        fleet = Fleet({}, lambda: 0.0, 8)
        fleet.reconfigure(Config(limits=Limits(joined_bytes_max=1024 * MIB, joined_bytes_per_address_max=1024 * MIB)))
        cards = sum(sys.getsizeof(text) for one in models for text in (one.id, one.root, one.parent) if text)
        tracemalloc.start()
        try:
            fleet.registry.record_heartbeat(Heartbeat("w", "m", "h", 1, models=models), "h")
            fleet.directory.names_near("x", bool)
            kept = tracemalloc.get_traced_memory()[0] + cards + len(models) * sys.getsizeof(models[0])
        finally:
            tracemalloc.stop()
        assert kept < fleet.registry._weights._all.bytes < 6 * kept


SENT = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(0, 9), st.integers(0, 9), st.booleans()),
    max_size=12,
)


@given(SENT)
def test_registration_counts_match_the_registry(sent):
    """However workers come, change, move and go, admitted or refused."""
    limits = attrs.evolve(SMALL, joined_names_max=9, joined_names_per_address_max=7)
    weights, there = Weights(limits), {}
    for worker_id, sender, start, count, goes in sent:
        if goes:
            weights.forget(worker_id)
            there.pop(worker_id, None)
            continue
        told = Heartbeat(worker_id, "m", "h", 1, models=[ModelCard(one["id"]) for one in names(start, count)])
        if weights.admit(told, None, sender) is None:
            there[worker_id] = told, sender
    fresh = Weights(Limits())
    for told, sender in there.values():
        assert fresh.admit(told, None, sender) is None
    assert (weights._all, weights._by_sender) == (fresh._all, fresh._by_sender)


async def test_large_heartbeats_take_turns():
    """Between two steps with large ones, every other task has its turn."""
    site = Site(Limits())
    models = names(0, 500, root="y" * 200)
    steps, largest = 0, 0

    def count(before):
        nonlocal steps, largest
        steps, largest = steps + 1, max(largest, len(list(site.fleet.table)) - before)

    async with trio.open_nursery() as nursery:

        async def watch(*, task_status):
            task_status.started()
            while len(list(site.fleet.table)) < 10:
                before = len(list(site.fleet.table))
                await trio.lowlevel.checkpoint()
                count(before)

        await nursery.start(watch)
        for number in range(10):
            nursery.start_soon(lambda number=number: site.send(worker_id=f"w{number}", models=models))
    assert len(json.dumps(models)) > LARGE_BYTES
    assert largest <= 2  # one in each round of the event loop
    assert steps >= 20


# Metrics.


async def test_series_by_joined_workers_are_bounded():
    """Models beyond the bound share a series, managed workers' and routes' are not among them; so are GPUs."""
    fleet, metrics = known("far", clock=lambda: 0.0, models_max=10)
    for number in range(40):
        cards = [ModelCard(f"m{number}-{one}") for one in range(50)]
        machine = Machine(f"machine-{number}", "h", gpus=[MachineGpu(one) for one in range(8)])
        fleet.registry.record_heartbeat(Heartbeat(f"w{number}", "m", "h", 1, models=cards, machine=machine))
    fleet.managed.expect("n-0", ["n"])
    shown = own(metrics)
    for family in ("ichat_model_endpoints", "ichat_model_starting", "ichat_requests_queued"):
        models = {labels["model"] for labels in shown.labels(family)}
        assert len(models) <= 11
    assert {"far", "n", "other"} <= {labels["model"] for labels in shown.labels("ichat_model_endpoints")}
    assert shown.get("ichat_model_endpoints", model="other") == 2000 - 8
    gpus = prometheus_families.gpu_families_in_parts(machines_of(None, fleet.table.machines()), shown_max=40)
    infos = [one for family in gpus if family.name == "ichat_gpu_info" for one in family.samples]
    assert 40 <= len(infos) <= 40 + 8 * prometheus_families.MACHINES_AT_ONCE


# Lookups.


class Resolver:
    """A resolver that answers by `found`, and counts."""

    def __init__(self, monkeypatch):
        self.found, self.asked = {}, []
        monkeypatch.setattr(lookups, "resolve", self.resolve)

    async def resolve(self, host, _):
        self.asked.append(host)
        await trio.sleep(0.01)
        return self.found.get(host, [])


@pytest.fixture(name="resolver")
def resolver_fixture(monkeypatch):
    return Resolver(monkeypatch)


async def test_a_name_is_looked_up_once_a_minute_for_all_of_a_sender(resolver, autojump_clock):
    """However many workers give it, and at the same time."""
    found, resolver.found = HostLookups(), {"node": ["10.0.0.1"]}
    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(found.addresses_of, "node", "10.0.0.1")
    assert resolver.asked == ["node"]
    await trio.sleep(HOST_CHECK_S + 1)
    assert await found.addresses_of("node", "10.0.0.1") == ["10.0.0.1"]
    assert resolver.asked == ["node", "node"]
    assert await found.addresses_of("10.0.0.7", "10.0.0.1") == ["10.0.0.7"]
    assert len(resolver.asked) == 2


async def test_a_known_address_is_kept_while_it_cannot_be_looked_up(resolver, autojump_clock):
    """It changes once it is found elsewhere; a name that was never found has none."""
    found, resolver.found = HostLookups(), {"node": ["10.0.0.1"]}
    assert not await found.addresses_of("other", "10.0.0.1")
    assert await found.addresses_of("node", "10.0.0.1") == ["10.0.0.1"]
    resolver.found = {}
    for _ in range(3):
        await trio.sleep(HOST_CHECK_S + 1)
        assert await found.addresses_of("node", "10.0.0.1") == ["10.0.0.1"]
    resolver.found = {"node": ["10.0.0.2"]}
    await trio.sleep(HOST_CHECK_S + 1)
    assert await found.addresses_of("node", "10.0.0.1") == ["10.0.0.2"]


async def test_a_sender_has_a_share_of_lookups(resolver, autojump_clock):
    """New names beyond it are refused, what it has is kept, and others have their own shares."""
    found, resolver.found = HostLookups(), {"node": ["10.0.0.1"]}
    await found.addresses_of("node", "10.0.0.1")
    await trio.sleep(HOST_CHECK_S + 1)
    for number in range(LOOKUPS_A_MINUTE):
        assert not await found.addresses_of(f"evil-{number}", "10.0.0.1")
    with pytest.raises(ApiError, match="name too many hosts") as refused:
        await found.addresses_of("one-more", "10.0.0.1")
    assert refused.value.status == 429
    assert await found.addresses_of("node", "10.0.0.1") == ["10.0.0.1"]
    assert await found.addresses_of("node", "10.0.0.2") == ["10.0.0.1"]
    await trio.sleep(60)
    assert await found.addresses_of("node", "10.0.0.1") == ["10.0.0.1"]


async def test_a_resolver_that_does_not_answer_delays_no_other_sender(monkeypatch):
    """A sender's lookups have two threads at most, which are not those of everybody else in the gateway."""
    released, waiting = threading.Event(), []

    def getaddrinfo(host, *_, **__):
        if host.startswith("slow"):
            waiting.append(host)
            released.wait(60)
            raise OSError
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.2", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    found, shared = HostLookups(), trio.to_thread.current_default_thread_limiter()
    try:
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(found.addresses_of, f"slow-{number}", "10.0.0.1")
            with trio.fail_after(60):
                while len(waiting) < THREADS_OF_SENDER:  # noqa: ASYNC110
                    await trio.sleep(0.01)
                assert await found.addresses_of("node", "10.0.0.2") == ["10.0.0.2"]
            assert len(waiting) == THREADS_OF_SENDER
            assert shared.borrowed_tokens == 0
            nursery.cancel_scope.cancel()
    finally:
        released.set()
    with trio.fail_after(60):
        while found._threads.borrowed_tokens:  # noqa: ASYNC110
            await trio.sleep(0.01)
