"""What operators see of a worker, and clients of the models."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import attrs

from ichat.config.strict import Between
from ichat.fleet.worker_record import HEALTHY, State, WorkerRecord
from ichat.fleet.worker_table import WorkerTable
from ichat.protocol.load_story import LoadStory
from ichat.protocol.messages import Count, ModelCard, PeerLoss
from ichat.routing.availability import Availability, Ready
from ichat.routing.circuit_breaker import CircuitView
from ichat.routing.endpoint import Endpoint

_Result = TypeVar("_Result")

LOADING: frozenset[State] = frozenset(("starting", "loading", "waking"))
"""In other states it is not known that a load goes on."""
CARDS_AT_ONCE = 500
"""How many models are looked at in a step, or the models of a worker."""


@attrs.frozen(kw_only=True)
class WorkerFacts:
    """The gateway's own knowledge of a worker, in few words."""

    worker_id: str
    model_name: str
    model_names: Sequence[str]
    """Every name that the worker serves or will serve."""
    status: Literal["healthy", "unhealthy"]
    """`healthy`: the worker's `state` is `ready`, `following`, `cold` or `asleep`. `unhealthy`: every other state."""
    state: State
    managed: bool
    """Whether this gateway starts and stops the worker."""
    machine: str | None
    """The host name of the worker's machine; None: not known."""
    in_flight: Count
    """Requests that this gateway has sent to the worker and that are not finished."""
    circuit: CircuitView | None
    """None: the worker has not sent a heartbeat yet."""
    restarts: Count
    """How often the gateway has restarted the worker."""
    failure: str | None
    """Why the worker is down, fails its health checks, or waits for GPUs; None: none of these."""
    cause: str | None
    """Why the worker last ended unexpectedly, in a sentence; None: not known, or never."""
    retry_in_s: Annotated[float, Between(0)] | None
    """Seconds until the worker is started again; None: the worker is not down, or stays down."""
    on_demand: bool
    """Whether the worker has a process only while its model is wanted."""
    copy: Count | None
    """The worker's number among the copies of its table; None: it is the only worker of its table."""
    copies: Count | None
    """How many copies of its table are wanted; None: it is the only worker of its table."""
    coming: bool
    """Whether the worker will probably be ready soon without being asked for: it starts, or is started again."""
    ready_in_s: Annotated[float, Between(0)] | None
    """Seconds until the worker will probably be ready; None: not known, or it is not being loaded."""
    where: str | None
    """Its launcher, its node and its GPUs, as in `here:0,1` or `ray:gpu-7:0`; `ray:pending` waits for a place.
    Of a worker that was started elsewhere: its machine. None: not known."""
    load: LoadStory | None
    """The load that is under way; None: there is none."""
    last_load: LoadStory | None
    """The last load after which the worker was ready; None: not known."""
    lost: Sequence[PeerLoss]
    """Workers that the worker's group has lost."""
    heartbeat_age_s: float | None
    """Seconds since the newest heartbeat; None: there was none yet, or the configuration registers the server."""


@attrs.frozen(kw_only=True)
class WorkerView(WorkerFacts):
    """A worker as the gateway knows it, beside the worker's heartbeats."""

    exit_code: int | None
    """The exit code of the last unexpected end; None: a signal ended the worker, or the code is not known."""
    signal: str | None
    """The signal that ended the worker, for example `SIGKILL`, or None."""
    oom_killed: bool
    """Whether the kernel killed a process of the worker because memory had run out."""
    last_lines: Sequence[str]
    """The worker's last output before that end, oldest line first."""
    ended_at: float | None
    """When the worker last ended unexpectedly, in seconds since 1970; None: never."""


@attrs.frozen(kw_only=True)
class WorkerSummary(WorkerFacts):
    """A worker in the list of all workers. Facts of its heartbeats are null before the first of them."""

    backend: str | None
    """The engine: `vllm`, `sglang`, or the name of another engine."""
    host: str | None
    port: int | None
    pid: int | None
    """The worker's first process, on its own machine."""
    phase: str | None
    """The worker's activity, in a few words; None: the worker has no process, or does not report it."""
    progress: Mapping[str, float | None] | None
    """The engine's activity, by its own account."""
    running: float | None
    """Requests that the engine works on, by its own account."""
    waiting: float | None
    """Requests in the engine's queue, by its own account."""
    kv_use: float | None
    """Share of the engine's KV cache in use, 0 to 1."""
    prefix_hit_rate: float | None
    """Share of the last minutes' prompt tokens that the engine had in its prefix cache, 0 to 1."""


def describe(table: WorkerTable, worker: WorkerRecord) -> Mapping[str, Any]:
    """Return everything known of a worker, as JSON can hold it."""
    heartbeat, end = worker.heartbeat, worker.end
    known: dict[str, Any] = {}
    if heartbeat:
        args = worker.args.unpack() if worker.args is not None else {}
        left_out = ("args", "backend_args", "load", "loaded", "machine", "registration")
        known = attrs.asdict(heartbeat, filter=lambda field, _: field.name not in left_out)
        known |= {"args": args, "backend_args": args, "phase": worker.phase}
    view = WorkerView(
        **_facts(table, worker),
        exit_code=end.exit_code if end else None,
        signal=end.signal if end else None,
        oom_killed=end.oom_killed if end else False,
        last_lines=list(end.last_lines) if end else [],
        ended_at=round(end.at, 3) if end else None,
    )
    return {**known, **worker.settings, **attrs.asdict(view)}


def summarize(table: WorkerTable, worker: WorkerRecord) -> WorkerSummary:
    """Return a worker as lists show it."""
    heartbeat = worker.heartbeat
    progress = heartbeat.progress if heartbeat else None
    told = progress or {}
    return WorkerSummary(
        **_facts(table, worker),
        backend=heartbeat.backend if heartbeat else worker.settings.get("backend"),
        host=heartbeat.host if heartbeat else None,
        port=heartbeat.port or None if heartbeat else None,
        pid=heartbeat.pid if heartbeat else None,
        phase=worker.phase or None,
        progress=progress,
        running=told.get("running"),
        waiting=told.get("waiting"),
        kv_use=told.get("kv_use"),
        prefix_hit_rate=worker.prefix_hits.rate(),
    )


def _facts(table: WorkerTable, worker: WorkerRecord) -> dict[str, Any]:
    """Return the fields of `WorkerFacts`."""
    endpoint, state, now = table.endpoint_of(worker), table.state(worker), table.clock()
    heartbeat, end, names = worker.heartbeat, worker.end, worker.names
    return {
        "worker_id": worker.id,
        "model_name": heartbeat.model_name if heartbeat else next(iter(names), ""),
        "model_names": names,
        "status": "healthy" if state in HEALTHY else "unhealthy",
        "state": state,
        "managed": worker.managed,
        "machine": worker.machine.name if worker.machine else None,
        "in_flight": endpoint.in_flight if endpoint else 0,
        "circuit": endpoint.circuit.describe(now) if endpoint else None,
        "restarts": worker.restarts,
        "failure": _failure_of(worker, endpoint) or None,
        "cause": end.cause or None if end else None,
        "retry_in_s": _rest_s(worker.retry_at, now),
        "on_demand": worker.on_demand,
        "copy": worker.copy_number or None,
        "copies": worker.copies_wanted or None,
        "coming": worker.is_coming(state, table.trouble_of(worker)),
        "ready_in_s": _rest_s(worker.ready_at, now) if state != "ready" else None,
        "where": _where(worker, state) or None,
        "load": worker.load.story(now) if worker.load and state in LOADING else None,
        "last_load": worker.last_load.story(now) if worker.last_load else None,
        "lost": table.lost(worker.id),
        "heartbeat_age_s": round(now - worker.heartbeat_at, 3) if heartbeat and not worker.server else None,
    }


def _failure_of(worker: WorkerRecord, endpoint: Endpoint | None) -> str:
    if worker.end and (worker.is_down or worker.absence == "stopped"):
        return worker.end.why
    if worker.lacks:
        return f"waits for GPUs: {worker.lacks}"
    return endpoint.health_failure if endpoint else ""


def _where(worker: WorkerRecord, state: State) -> str:
    """Return where a worker runs, or will run, in a few words; "" if it is not known."""
    launcher, heartbeat = str(worker.settings.get("on", "")), worker.heartbeat
    host = heartbeat.host if heartbeat else ""
    node = worker.machine.name if worker.machine else host
    if not launcher:
        return node
    if state == "pending":
        return f"{launcher}:pending"
    if launcher == "here":
        return ":".join(filter(None, (launcher, ",".join(map(str, worker.settings.get("gpu_ids") or ())))))
    held = ",".join(str(gpu.index) for gpu in (worker.machine.gpus if worker.machine else None) or () if gpu.held_bytes)
    return ":".join(filter(None, (launcher, node, held)))


def _rest_s(at: float | None, now: float) -> float | None:
    return None if at is None else max(0.0, round(at - now, 3))


def model_steps(
    external: Mapping[str, Sequence[Endpoint]], workers: Iterable[WorkerRecord], only: str | None = None
) -> Generator[None, None, dict[str, tuple[ModelCard, str]]]:
    """Return the models of external routes and of these workers, by their names, each with its owner; in steps.

    The context length of a model is the shortest of its workers. `only` is the requested name.
    """
    there = (name for name, routes in external.items() if not all(route.health_failure for route in routes))
    found: dict[str, tuple[ModelCard, str]] = {name: (ModelCard(name), "external") for name in there}
    count = 0
    for worker in workers:
        if count > CARDS_AT_ONCE:
            count = 0
            yield
        heartbeat = worker.heartbeat
        path = heartbeat.model_path if heartbeat else worker.settings.get("model_path", "")
        cards = (heartbeat.models if heartbeat else ()) or worker.cards
        cards = cards or [ModelCard(name, path) for name in worker.names if name not in found]
        count += len(cards) + 1
        for card in cards:
            if only is not None and card.id != only:
                continue
            known, owner = found.get(card.id, (card, worker.engine))
            found[card.id] = (_with_shortest(known, card), owner)
    return found


def _with_shortest(known: ModelCard, other: ModelCard) -> ModelCard:
    """Return a model's card with the shorter context of two."""
    lengths = [one.max_model_len for one in (known, other) if one.max_model_len is not None]
    shortest = min(lengths, default=None)
    return known if known.max_model_len == shortest else attrs.evolve(known, max_model_len=shortest)


def result_of(steps: Generator[None, None, _Result]) -> _Result:
    """Return the result of steps, all at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def load_of(found: Availability, now: float) -> dict[str, int]:
    """Return how many endpoints can serve a model now, and how many requests they work on."""
    endpoints = found.endpoints if isinstance(found, Ready) else ()
    return {
        "workers": len(endpoints),
        "in_flight": sum(one.in_flight for one in endpoints),
        "circuits_open": sum(one.circuit.state(now) != "closed" for one in endpoints),
    }
