"""The snapshot of a takeover: it has every attribute that a gateway must not forget, and survives JSON."""

import ast
import inspect
import json
import math
import textwrap
import typing

import attrs
import pytest
from support.measures import attributes_of

from ichat.config.schema import Key
from ichat.fleet.fleet import Fleet
from ichat.fleet.packed_args import ArgsPacker
from ichat.fleet.saved_records import (
    FACTS,
    TIMES,
    SavedLoad,
    SavedRecord,
    SavedRegistration,
    record_of,
    restore_record,
)
from ichat.fleet.worker_facts import Registration
from ichat.fleet.worker_load import WorkerLoad
from ichat.fleet.worker_record import WorkerRecord
from ichat.protocol.messages import Heartbeat
from ichat.routing.circuit_breaker import Circuit
from ichat.routing.endpoint import Endpoint
from ichat.security.rate_limits import Quota, Window
from ichat.supervisor.life import NoProcess, Serving, Sleeping, Starting, Wanted
from ichat.supervisor.managed_worker import ManagedWorker
from ichat.supervisor.state import SavedManagedWorker
from ichat.supervisor.worker_life import WorkerLife
from ichat.takeover.snapshot import (
    SavedEndpoint,
    SavedLife,
    SavedQuota,
    SavedRequest,
    Snapshot,
    endpoint_of,
    life_of,
    quota_of,
    restore_endpoint,
    restore_quota,
    states_in,
)

A_FILE = "a file or the configuration has it"
NEW = "the new process makes its own"
NOT_TAKEN = {
    WorkerRecord: {
        "_served": "it follows from the heartbeat",
        "args": "they are in the saved heartbeat",
        "unix_socket": "it follows from the id",
        "server": A_FILE,
        "settings": A_FILE,
        "lacks": "the new process looks for a place again",
        "is_unanswered": "the new process asks the cluster again",
        "copy_number": "the new process numbers the copies",
        "copies_wanted": "the new process numbers the copies",
        "max_in_flight": A_FILE,
        "load": "the next heartbeat reports it; no managed worker is loaded during a takeover",
        "prefix_hits": "two further heartbeats show the rate",
    },
    Registration: {"checked_for": "the host is checked again", "checked_at": "the host is checked again"},
    WorkerLoad: {
        "expected": "it is looked up among the times of earlier loads",
        "own_detail": "a takeover is refused during a download",
    },
    Endpoint: {
        "upstream": "the heartbeat or the configuration has the address",
        "in_flight_max": "the heartbeat or the configuration has it",
        "route": A_FILE,
        "access": A_FILE,
        "timeouts": A_FILE,
        "in_flight": "relays report the requests that they have",
        "external_load": "the next heartbeat reports it",
        "reported_at": "the next heartbeat reports it",
        "seen_at": "it only spares a health check",
        "ready_since": "prefixes are learnt anew, and each worker counts as new for that",
        "context_tokens": "it is in the saved heartbeat",
        "reports_prefixes": "it is in the saved heartbeat",
        "reports_usage": "it is in the saved heartbeat",
        "reports_late_usage": "it is in the saved heartbeat",
        "is_usage_lost": "the log says it once more",
        "holder": "workers report their prefixes to the new process again",
        "facts": "they follow from the others",
        "troubled": NEW,
        "idle": NEW,
    },
    Circuit: {
        "settings": A_FILE,
        "probe": "a probe that is under way ends at the old process",
        "probe_until": "the first request to a half-open circuit is another probe",
    },
    Quota: {
        "limits": A_FILE,
        "in_flight": "relays report their requests, and the snapshot has those of the old process itself",
        "spending": "the ledger has all of it: it is written before the snapshot",
    },
    Window: {"newest": "it is the last of the seconds", "sum": "it is the sum of the seconds"},
    ManagedWorker: {
        "context": NEW,
        "workers": NEW,
        "found": "the new process looks the process up by its number and stamp",
        "finished": NEW,
        "record": "it is saved as a WorkerRecord",
        "life": "it is saved as a WorkerLife",
        "booking": "it is made of the chosen GPUs",
    },
    WorkerLife: {"table": NEW, "managed": NEW, "record": NEW, "changed": NEW},
    Wanted: {},
    NoProcess: {},
    Starting: {},
    Serving: {},
    Sleeping: {},
    SavedManagedWorker: {},
}
"""By the classes: the attributes that a snapshot does not have, with the reason."""
NAMED_OTHERWISE = {
    Circuit: {"open_until": "open_age_s"},
    Endpoint: {"circuit": "opened", "avoid_until": "avoid_s"},
    Quota: {"used_at": "used_age_s"},
    Window: {"seconds": "requests"},
    ManagedWorker: {"id": "worker_id", "placed_last": "placed"},
    WorkerLife: {"wanted": "state", "process": "pid"},
    NoProcess: {"kind": "actual", "run": "actual_run", "may_start_at": "start_in_s"},
    Starting: {"run": "actual_run"},
    Serving: {"run": "actual_run"},
    Sleeping: {"run": "actual_run"},
}
"""By the classes: the attributes that a snapshot has by other names, as ages or as a part of several."""
SAVED_AS = {
    WorkerRecord: (SavedRecord,), Registration: (SavedRegistration,), WorkerLoad: (SavedLoad,),
    Endpoint: (SavedEndpoint,), Circuit: (SavedEndpoint,), Quota: (SavedQuota,), Window: (SavedQuota,),
    ManagedWorker: (SavedLife, SavedManagedWorker), WorkerLife: (SavedLife, SavedManagedWorker),
    Wanted: (SavedLife,), NoProcess: (SavedLife,), Starting: (SavedLife,), Serving: (SavedLife,), Sleeping: (SavedLife,),
    SavedManagedWorker: (SavedManagedWorker,),
}  # fmt: skip
"""Everything that a snapshot carries, and where it has that."""


def names(kind):
    """Return the names of all attributes of a class, those of its bases included; `_x` is `x` where no field is."""
    if attrs.has(kind):
        return {field.name for field in attrs.fields(kind)}
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    return attributes_of(tree)


@pytest.mark.parametrize("kind", SAVED_AS)
def test_each_attribute_is_in_the_snapshot_or_left_out_for_a_reason(kind):
    """A new attribute must be saved, or named here; and nothing is named that is not there, or is saved after all."""
    saved = set().union(*map(names, SAVED_AS[kind]))
    saved |= {*TIMES, *FACTS} if kind is WorkerRecord else set()
    otherwise, left = NAMED_OTHERWISE.get(kind, {}), NOT_TAKEN[kind]
    assert names(kind) - saved - otherwise.keys() == left.keys()
    assert otherwise.keys() <= names(kind)
    assert {*otherwise.values()} <= saved


def test_nothing_else_is_in_a_snapshot():
    """What a snapshot has besides these would have no list of attributes."""
    parts = {part for field in attrs.fields(Snapshot) for part in typing.get_args(field.type)}
    made_for_it = {SavedRequest, dict[str, typing.Any]}
    assert parts == {SavedRecord, SavedEndpoint, SavedQuota, SavedLife} | made_for_it
    assert {part for parts in SAVED_AS.values() for part in parts} > parts - made_for_it


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
