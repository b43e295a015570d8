"""What the loader notes of one on-demand worker, and how the worker looks to a decision."""

import math
from collections.abc import Callable, Sequence

import attrs

from ichat.config.schema import ManagedWorkerConfig
from ichat.routing.endpoint import REPORT_S, Endpoint
from ichat.supervisor.conflicts import conflicts, have_one_port
from ichat.supervisor.managed_worker import ManagedWorker
from ichat.supervisor.swaps import SwapCandidate


@attrs.define
class LoadUnderWay:
    """A load that has neither succeeded nor failed yet."""

    kind: str
    """`start` or `wake`."""
    reason: str
    began_at: float


class ConflictTable:
    """Which workers cannot stand side by side; found anew only when there are other workers or other tables."""

    def __init__(self, *, has_gpus: bool) -> None:
        """`has_gpus` says whether this machine has any."""
        self._has_gpus = has_gpus
        self._tables: list[tuple[str, ManagedWorkerConfig]] = []
        self._found: dict[str, tuple[frozenset[str], frozenset[str]]] = {}

    def __repr__(self) -> str:
        return f"<ConflictTable of {len(self._tables)} workers>"

    def update(self, workers: Sequence[ManagedWorker]) -> None:
        """Find out for these workers."""
        tables = [(one.id, one.holds) for one in workers]
        if len(tables) == len(self._tables) and all(
            name == known and table is before
            for (name, table), (known, before) in zip(tables, self._tables, strict=True)
        ):
            return
        self._tables, self._found = tables, {}
        for name, table in tables:
            others = [(other, it) for other, it in tables if other != name]
            apart = [(other, it) for other, it in others if conflicts(table, it, has_gpus=self._has_gpus)]
            ports = frozenset(other for other, it in apart if have_one_port(table, it))
            self._found[name] = frozenset(other for other, _ in apart), ports

    def of(self, worker: ManagedWorker) -> tuple[frozenset[str], frozenset[str]]:
        """Return the ids of the workers that a worker cannot stand beside, and of those that have its port."""
        return self._found[worker.id]


class WatchedWorker:
    """An on-demand worker with the times of its last load and its last request."""

    def __init__(self, worker: ManagedWorker, became_idle: Callable[["WatchedWorker"], None]) -> None:
        """`became_idle` is called when its last request has ended."""
        self.worker = worker
        self.load: LoadUnderWay | None = None
        self.cannot_sleep = False
        """Whether its engine has not gone to sleep when it was to, at this start."""
        self.busy_at = -math.inf
        """When it was last seen to have requests, or its last one ended."""
        self._ready_since = -math.inf
        self._endpoint: Endpoint | None = None
        self._became_idle = became_idle

    def __repr__(self) -> str:
        return f"<WatchedWorker {self.worker}>"

    @property
    def model(self) -> str:
        """The name by which its model is decided about."""
        return self.worker.spec.model_name

    def follow(self, endpoint: Endpoint | None) -> None:
        """Hear when the last request ends there, and no more where it was before."""
        if self._endpoint is not endpoint:
            if self._endpoint is not None:
                self._endpoint.when_idle.discard(self._hear_of_idleness)
            self._endpoint = endpoint
            if endpoint is not None:
                endpoint.when_idle.add(self._hear_of_idleness)

    def _hear_of_idleness(self) -> None:
        self._became_idle(self)

    def report_until(self) -> float:
        """Return until when the worker's report of its load counts, if it counts anything; else `inf`."""
        endpoint = self._endpoint
        return math.inf if endpoint is None or not endpoint.external_load else endpoint.reported_at + REPORT_S

    def candidate(self, table: ConflictTable, now: float) -> SwapCandidate:
        """Return how it is now beside the other on-demand workers."""
        worker, endpoint, phase = self.worker, self._endpoint, self.worker.phase
        if phase == "ready" and self._ready_since == -math.inf:
            self._ready_since = now
        elif phase in ("cold", "down", "asleep", "waking", "ending"):
            self._ready_since = -math.inf
        if phase in ("cold", "down"):
            self.cannot_sleep = False
        requests = endpoint.load(now) if endpoint is not None and phase in ("ready", "draining", "ending") else 0
        if requests:
            self.busy_at = now
        in_the_way, have_its_port = table.of(worker)
        heartbeat = worker.record.heartbeat
        can_sleep = heartbeat is not None and heartbeat.can_sleep and not self.cannot_sleep
        return SwapCandidate(
            worker_id=worker.id,
            model=self.model,
            phase=phase,
            requests=requests,
            ready_since=self._ready_since,
            idle_since=math.inf if requests else max(self.busy_at, self._ready_since),
            conflicts=in_the_way,
            port_conflicts=have_its_port,
            idle_s=worker.spec.idle_s,
            min_loaded_s=worker.spec.min_loaded_s,
            when_idle="sleep" if worker.spec.when_idle == "sleep" and can_sleep else "stop",
            may_start_at=worker.may_start_at,
        )
