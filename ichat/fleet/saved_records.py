"""Workers as a snapshot of a gateway has them, for the next process of the same gateway. Times are ages."""

import math
from typing import Any

import attrs
from attrs import frozen

from ichat.errors import ApiError
from ichat.fleet.packed_args import ArgsPacker
from ichat.fleet.worker_facts import Registration, WorkerEnd
from ichat.fleet.worker_load import WorkerLoad
from ichat.fleet.worker_record import WorkerRecord
from ichat.fleet.worker_table import WorkerTable
from ichat.protocol.messages import (
    Heartbeat,
    LoadPhase,
    Machine,
    ModelCard,
    PeerLoss,
    names_of,
    parse_heartbeat,
    saved_form,
)

TIMES = (
    "heartbeat_at", "known_since", "last_healthy_at", "retry_at", "ready_at", "began_at", "heard_at", "stuck_since",
)  # fmt: skip
"""The times of a record, by Trio's clock."""
FACTS = (
    "tag", "expected", "absence", "on_demand", "restarts", "was_ready", "returns", "is_drained", "is_stale",
    "can_return", "answers", "busy_steps", "is_piped",
)  # fmt: skip
"""The values of a record that JSON has too."""


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
    args = None if worker.args is None else worker.args.unpack()
    return {**saved_form(heartbeat, args), "load": [attrs.asdict(phase) for phase in heartbeat.load]}


def restore_record(saved: SavedRecord, table: WorkerTable, packer: ArgsPacker) -> None:
    """Set everything that a snapshot has of a worker; a worker that the table does not have is added."""
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
