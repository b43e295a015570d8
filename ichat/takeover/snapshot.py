"""What the old process knows beyond files and relays, as JSON. Unknown fields are ignored, missing ones have defaults.

The clocks of two processes have nothing in common, so each time is an age: seconds before the snapshot, negative if the
time is still ahead.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import attrs
import cattrs
from attrs import frozen

from ichat.errors import ApiError
from ichat.fleet.packed_args import ArgsPacker
from ichat.fleet.worker_facts import Registration, WorkerEnd
from ichat.fleet.worker_load import WorkerLoad
from ichat.fleet.worker_record import WorkerRecord
from ichat.fleet.worker_table import WorkerTable
from ichat.protocol.messages import Heartbeat, LoadPhase, Machine, ModelCard, PeerLoss, names_of, parse_heartbeat
from ichat.routing.endpoint import Endpoint
from ichat.security.rate_limits import Quota, Window
from ichat.supervisor.life import Actual, NoProcess, Serving, Sleeping, Starting, Wanted
from ichat.supervisor.supervisor import saved_form

TIMES = (
    "heartbeat_at", "known_since", "last_healthy_at", "retry_at", "ready_at", "began_at", "heard_at", "stuck_since",
)  # fmt: skip
"""The times of a record, by Trio's clock."""
FACTS = (
    "tag", "expected", "absence", "on_demand", "restarts", "was_ready", "returns", "is_drained", "is_stale",
    "can_return", "answers", "busy_steps", "is_piped",
)  # fmt: skip
"""The values of a record that JSON has too."""
_LIVES: Mapping[str, type[Starting | Serving | Sleeping]] = {
    "starting": Starting, "serving": Serving, "sleeping": Sleeping,
}  # fmt: skip


@frozen
class SavedLoad:
    """A load that has ended."""

    kind: str = "start"
    own: list[tuple[float, str]] = attrs.field(factory=list[tuple[float, str]])
    told: list[LoadPhase] = attrs.field(factory=list[LoadPhase])
    told_at: float = 0.0
    heard_since: float | None = None
    ended_at: float | None = None


@frozen
class SavedRegistration:
    """The registration of a worker, without the last check of its host: that is made again."""

    digest: str = ""
    name: str = ""
    interval_s: float = 0.0
    host: str = ""


@frozen
class SavedRecord:
    """A worker."""

    id: str
    managed: bool = False
    heartbeat: dict[str, Any] | None = None
    registration: SavedRegistration | None = None
    ages: dict[str, float] = attrs.field(factory=dict[str, float])
    """Of `TIMES`; those without an end are left out."""
    facts: dict[str, Any] = attrs.field(factory=dict[str, Any])
    lost: PeerLoss | None = None
    end: WorkerEnd | None = None
    cards: list[ModelCard] = attrs.field(factory=list[ModelCard])
    machine: Machine | None = None
    last_load: SavedLoad | None = None


@frozen
class SavedEndpoint:
    """What was seen of an endpoint."""

    id: str
    failures: int = 0
    opened: int = 0
    open_age_s: float | None = None
    """Since when an open circuit is half open, usually negative; None: it is closed."""
    answers: bool = False
    avoid_s: float = 0.0
    """For how long it is still avoided."""
    unavailable_reason: str = ""
    probe_failures: int | None = None
    health_failure: str = ""


@frozen
class SavedQuota:
    """The use of a key in the last minute; "" stands for all requests together."""

    name: str
    used_age_s: float | None = None
    requests: list[tuple[float, int]] = attrs.field(factory=list[tuple[float, int]])
    tokens: list[tuple[float, int]] = attrs.field(factory=list[tuple[float, int]])


@frozen
class SavedLife:
    """The wanted and the actual state of a managed worker."""

    worker_id: str
    state: Literal["cold", "loaded", "asleep", "gone"] = "loaded"
    run: int = 0
    drain_s: float | None = None
    takes_requests: bool = True
    actual: Literal["new", "cold", "stopped", "failed", "starting", "serving", "sleeping"] = "new"
    """The kind of `NoProcess`, or `starting`, `serving`, `sleeping`."""
    actual_run: int = 0
    failures: int = 0
    start_in_s: float | None = None
    """When it may be started again; None: at any time, or never if it has failed."""
    failed_change: str = ""


@frozen
class Snapshot:
    """All of it."""

    workers: list[SavedRecord] = attrs.field(factory=list[SavedRecord])
    endpoints: list[SavedEndpoint] = attrs.field(factory=list[SavedEndpoint])
    quotas: list[SavedQuota] = attrs.field(factory=list[SavedQuota])
    lives: list[SavedLife] = attrs.field(factory=list[SavedLife])
    started: list[dict[str, Any]] = attrs.field(factory=list[dict[str, Any]])
    """The managed workers as `workers.json` has them, and those without a process as well."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return attrs.asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Snapshot":
        """Read it. Raises ValueError, with the reason, for something else."""
        try:
            return cattrs.structure(content, cls)
        except Exception as error:
            raise ValueError(f"The snapshot cannot be read: {cattrs.transform_error(error)}") from error


# Workers.


def record_of(worker: WorkerRecord, now: float) -> SavedRecord:
    """Return a worker as a snapshot has it."""
    ages = {name: now - at for name in TIMES if (at := getattr(worker, name)) is not None and math.isfinite(at)}
    known, heartbeat = worker.registration, worker.heartbeat
    registration = None
    if known is not None:
        digest = "" if known.digest is None else known.digest.hex()
        registration = SavedRegistration(digest, known.name, known.interval_s, known.host)
    return SavedRecord(
        worker.id,
        worker.managed,
        None if heartbeat is None else _form_of(heartbeat, worker),
        registration,
        ages,
        {name: getattr(worker, name) for name in FACTS},
        worker.lost,
        worker.end,
        [*worker.cards],
        worker.machine,
        None if worker.last_load is None else _load_of(worker.last_load, now),
    )


def _form_of(heartbeat: Heartbeat, worker: WorkerRecord) -> dict[str, Any]:
    return {**saved_form(heartbeat, worker.args), "load": [attrs.asdict(phase) for phase in heartbeat.load]}


def put_record(saved: SavedRecord, table: WorkerTable, packer: ArgsPacker) -> None:
    """Give a worker of the table, new if it is not there, everything that a snapshot has of it."""
    now, known = table.clock(), table.get(saved.id)
    if known is None and (saved.managed or saved.heartbeat is None):
        return  # a managed worker that the configuration has no more
    worker = known or WorkerRecord(saved.id, managed=False)
    if worker.server is not None or worker.managed != saved.managed:
        return
    if known is None:
        table.enter(worker)
    for field in attrs.fields(WorkerRecord):
        if field.name in TIMES:
            age = saved.ages.get(field.name)
            setattr(worker, field.name, field.default if age is None else now - age)
        elif field.name in FACTS and field.name in saved.facts:
            setattr(worker, field.name, saved.facts[field.name])
    worker.lost, worker.end, worker.cards, worker.machine = saved.lost, saved.end, saved.cards, saved.machine
    worker.last_load = None if saved.last_load is None else _put_load(saved.last_load, now)
    if saved.heartbeat is not None:
        _put_heartbeat(saved, worker, table, packer)
    table.refresh(worker)


def _put_heartbeat(saved: SavedRecord, worker: WorkerRecord, table: WorkerTable, packer: ArgsPacker) -> None:
    try:
        heartbeat = parse_heartbeat(saved.heartbeat)
    except ApiError:
        return
    if heartbeat.args:
        worker.args = packer.pack(heartbeat.args)
    worker.heartbeat = attrs.evolve(heartbeat, args={}, machine=None)
    worker._served = frozenset(names_of(heartbeat))
    if (known := saved.registration) is not None:
        digest = bytes.fromhex(known.digest) or None
        worker.registered(Registration(digest, known.name, known.interval_s, known.host, None, -math.inf))
    table.place(worker, worker.heartbeat)


def _load_of(load: WorkerLoad, now: float) -> SavedLoad:
    heard, ended = load.heard_since, load.ended_at
    return SavedLoad(
        load.kind, [(now - at, name) for at, name in load.own], [*load.told], now - load.told_at,
        None if heard is None else now - heard, None if ended is None else now - ended,
    )  # fmt: skip


def _put_load(saved: SavedLoad, now: float) -> WorkerLoad:
    heard, ended = saved.heard_since, saved.ended_at
    return WorkerLoad(
        "wake" if saved.kind == "wake" else "start", own=[(now - age, name) for age, name in saved.own],
        told=saved.told, told_at=now - saved.told_at, heard_since=None if heard is None else now - heard,
        ended_at=None if ended is None else now - ended,
    )  # fmt: skip


# Endpoints.


def endpoint_of(name: str, endpoint: Endpoint, now: float) -> SavedEndpoint:
    """Return the knowledge about an endpoint, under a name that both processes give it."""
    circuit = endpoint.circuit
    return SavedEndpoint(
        name, circuit.failures, circuit.opened, None if circuit.open_until is None else now - circuit.open_until,
        circuit.answers, max(0.0, endpoint.avoid_until - now), endpoint.unavailable_reason, endpoint.probe_failures,
        endpoint.health_failure,
    )  # fmt: skip


def put_endpoint(saved: SavedEndpoint, endpoint: Endpoint, now: float) -> None:
    """Give an endpoint the knowledge about it."""
    circuit = endpoint.circuit
    circuit.failures, circuit.opened, circuit.answers = saved.failures, saved.opened, saved.answers
    circuit.open_until = None if saved.open_age_s is None else now - saved.open_age_s
    if saved.unavailable_reason:
        endpoint.fail(now, saved.unavailable_reason)
    endpoint.avoid_until = now + saved.avoid_s if saved.avoid_s else -math.inf
    if saved.probe_failures is not None:
        endpoint.probe_failures = saved.probe_failures - (1 if saved.health_failure else 0)
        if saved.health_failure:
            endpoint.record_probe(saved.health_failure, 0)


# Limits.


def quota_of(quota: Quota, now: float) -> SavedQuota:
    """Return the use of a key."""
    used = None if quota.used_at is None else now - quota.used_at
    return SavedQuota(quota.name, used, quota.requests.ages(now), quota.tokens.ages(now))


def put_quota(saved: SavedQuota, quota: Quota, now: float) -> None:
    """Give a key the use that the old process has counted."""
    quota.used_at = None if saved.used_age_s is None else now - saved.used_age_s
    quota.requests, quota.tokens = Window.of_ages(saved.requests, now), Window.of_ages(saved.tokens, now)


# Managed workers.


def life_of(worker_id: str, wanted: Wanted, actual: Actual, failed_change: str, now: float) -> SavedLife:
    """Return the wanted and the actual state of a managed worker that is neither changing nor being cleared away."""
    in_s = None
    if isinstance(actual, NoProcess):
        kind = actual.kind
        in_s = actual.may_start_at - now if math.isfinite(actual.may_start_at) else None
    else:
        kind = "serving" if isinstance(actual, Serving) else "sleeping" if isinstance(actual, Sleeping) else "starting"
    return SavedLife(
        worker_id, wanted.state, wanted.run, wanted.drain_s, wanted.takes_requests, kind, actual.run, actual.failures,
        in_s, failed_change,
    )  # fmt: skip


def states_in(saved: SavedLife, now: float) -> tuple[Wanted, Actual]:
    """Return the wanted and the actual state."""
    wanted = Wanted(saved.state, saved.run, saved.drain_s, saved.takes_requests)
    if saved.actual in _LIVES:
        return wanted, _LIVES[saved.actual](saved.actual_run, saved.failures)
    never = math.inf if saved.actual == "failed" else -math.inf
    at = never if saved.start_in_s is None else now + saved.start_in_s
    kind = "new" if saved.actual in ("starting", "serving", "sleeping") else saved.actual
    return wanted, NoProcess(saved.actual_run, kind, saved.failures, at)


def names_of_external(external: Mapping[str, Iterable[Endpoint]]) -> dict[str, Endpoint]:
    """Return the endpoints of external routes, by names that another process with the same routes gives them too."""
    return {
        f"{model} {number} {endpoint.upstream.host}": endpoint
        for model, endpoints in external.items()
        for number, endpoint in enumerate(endpoints)
    }
