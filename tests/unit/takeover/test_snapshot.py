"""The snapshot of a takeover: it has every attribute that a gateway must not forget, and survives JSON."""

import json
import math

import attrs
import pytest

from ichat.config.schema import Key
from ichat.fleet.fleet import Fleet
from ichat.fleet.packed_args import ArgsPacker
from ichat.fleet.saved_records import FACTS, TIMES, SavedLoad, SavedRecord, record_of, restore_record
from ichat.fleet.worker_facts import Registration
from ichat.fleet.worker_load import WorkerLoad
from ichat.fleet.worker_record import WorkerRecord
from ichat.protocol.messages import Heartbeat
from ichat.routing.circuit_breaker import Circuit
from ichat.security.rate_limits import Quota
from ichat.supervisor.life import NoProcess, Serving, Wanted
from ichat.takeover.snapshot import (
    SavedEndpoint,
    SavedQuota,
    Snapshot,
    endpoint_of,
    life_of,
    quota_of,
    restore_endpoint,
    restore_quota,
    states_in,
)

A_FILE = "a file or the configuration has it"
NOT_TAKEN = {
    WorkerRecord: {
        "_served": "it follows from the heartbeat",
        "args": "they are in the saved heartbeat",
        "unix_socket": "it follows from the id",
        "server": A_FILE,
        "settings": A_FILE,
        "max_in_flight": A_FILE,
        "load": "the next heartbeat reports it; no managed worker is loaded during a takeover",
        "prefix_hits": "two further heartbeats show the rate",
    },
    Circuit: {
        "settings": A_FILE,
        "open_until": "it is saved as an age",
        "probe": "a probe that is under way ends at the old process",
        "probe_until": "the first request to a half-open circuit is another probe",
    },
    Quota: {
        "limits": A_FILE,
        "used_at": "it is saved as an age",
        "in_flight": "relays report their requests, and the snapshot has those of the old process itself",
        "spending": "the ledger has all of it: it is written before the snapshot",
    },
    WorkerLoad: {"expected": "it is looked up among the times of earlier loads"},
}
"""By the classes: the attributes that a snapshot does not have by their names, with the reason."""


def names(kind):
    return {field.name for field in attrs.fields(kind)}


@pytest.mark.parametrize(
    ("kind", "taken"),
    [
        (WorkerRecord, names(SavedRecord) | {*TIMES, *FACTS}),
        (Circuit, names(SavedEndpoint)),
        (Quota, names(SavedQuota)),
        (WorkerLoad, names(SavedLoad)),
    ],
)
def test_each_attribute_is_in_the_snapshot_or_left_out_for_a_reason(kind, taken):
    """A new attribute must be in either list."""
    assert names(kind) - taken == NOT_TAKEN[kind].keys() - taken


def fleet_at(now):
    return Fleet({}, lambda: now, 8)


def test_a_worker_is_as_it_was_in_the_old_process():
    """It is ready, its registration is known, and its times have moved to the other clock."""
    old, new = fleet_at(1000.0), fleet_at(50.0)
    heartbeat = Heartbeat("w", "m", "127.0.0.1", 9, args={"a": 1}, start_id="s", registration="r")
    old.registry.record_heartbeat(heartbeat, None, Registration(b"d", "r", 30.0, "127.0.0.1", None, 1000.0))
    saved = Snapshot([record_of(old.table.get("w"), 1003.0)])
    read = Snapshot.from_json({**json.loads(json.dumps(saved.to_json())), "unknown": 1})
    restore_record(read.workers[0], new.table, ArgsPacker())
    worker = new.table.get("w")
    assert new.table.state(worker) == "ready"
    assert worker.heartbeat_at == 47.0
    assert worker.args.unpack() == {"a": 1}
    assert (worker.registration.name, worker.registration.digest) == ("r", b"d")
    assert new.table.endpoint_of(worker).upstream.port == 9


def test_an_open_circuit_stays_open_for_its_rest():
    """The time until the next try is the same on the other clock."""
    old, new = (fleet_at(now) for now in (100.0, 5.0))
    for fleet in (old, new):
        fleet.registry.record_heartbeat(Heartbeat("w", "m", "127.0.0.1", 9))
    endpoint, other = (fleet.table.endpoint_of(fleet.table.get("w")) for fleet in (old, new))
    for _ in range(endpoint.circuit.settings.failures_max):
        endpoint.circuit.record_failure(100.0)
    restore_endpoint(endpoint_of("w", endpoint, 101.0), other, 6.0)
    assert other.circuit.open_s(6.0) == endpoint.circuit.open_s(101.0)
    assert other.circuit.failures == endpoint.circuit.failures


def test_a_limit_of_a_minute_goes_on():
    """A request that was counted counts for its minute, and up to a second longer."""
    old = Quota("k", Key(name="k", requests_per_minute=2))
    old.requests.add(2, 100.0)
    new = Quota("k", old.limits)
    restore_quota(quota_of(old, 130.0), new, 10.0)
    assert new.refusal(10.0).limit == "requests_per_minute"
    assert new.requests.sum(39.0) == 2
    assert new.requests.sum(41.5) == 0


@pytest.mark.parametrize(
    "actual", [NoProcess(2, "stopped", 3, 120.0), NoProcess(1, "failed", 5, math.inf), Serving(4, 1)]
)
def test_a_managed_worker_goes_on_with_its_failures(actual):
    """The wanted state, the run, the failures and the time of the next start are those of the old process."""
    wanted = Wanted("loaded", 4, 3.0, takes_requests=False)
    found_wanted, found = states_in(life_of("w", wanted, actual, "", 100.0), 100.0)
    assert (found_wanted, found) == (wanted, actual)
