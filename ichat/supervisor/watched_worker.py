"""The loader's notes on an on-demand worker, and how the worker looks to a decision."""

import math
from collections.abc import Callable, Sequence

import trio

from ichat.config.schema import ManagedWorkerConfig
from ichat.preflight.claims import Claims, claims_of
from ichat.routing.endpoint import REPORT_S, Endpoint
from ichat.supervisor.managed_worker import ManagedWorker
from ichat.supervisor.swaps import RemoteWait, SwapCandidate


class WatchedWorker:
    """An on-demand worker with the times of its last load and its last request."""

    def __init__(self, worker: ManagedWorker, became_idle: Callable[["WatchedWorker"], None]) -> None:
        """`became_idle` is called when its last request has ended."""
        self.worker = worker
        self._place: Claims | None = None
        """Where its load was decided, until its GPUs are booked."""
        self._load: tuple[str, float] | None = None
        """The reason and the beginning of a load that has neither succeeded nor failed yet."""
        self.busy_at = -math.inf
        """When it was last seen to have requests, or its last request ended; `-inf`: not since it was ready."""
        self._ready_since = -math.inf
        self._endpoint: Endpoint | None = None
        self._became_idle = became_idle
        self._claimed: tuple[ManagedWorkerConfig, Claims] | None = None

    def __repr__(self) -> str:
        return f"<WatchedWorker {self.worker}>"

    @property
    def model(self) -> str:
        """The name of its model in decisions."""
        return self.worker.spec.model_name

    def follow(self, endpoint: Endpoint | None) -> None:
        """Hear when the last request ends there, and no more where it was before."""
        if self._endpoint is not endpoint:
            if self._endpoint is not None:
                self._endpoint.idle.remove(self._hear_of_idleness)
            self._endpoint = endpoint
            if endpoint is not None:
                endpoint.idle.add(self._hear_of_idleness)

    def _hear_of_idleness(self) -> None:
        self.busy_at = trio.current_time()
        self._became_idle(self)

    def begin_load(self, reason: str, now: float, place: Claims | None) -> None:
        """Note that its model is being loaded, for a `request` or a `command`, at a place if that was chosen."""
        self._load, self._place = (reason, now), place
        if place is not None:
            self.worker.prefer(sorted(place.gpus))

    def pop_result(self, now: float) -> tuple[str, str, float | None] | None:
        """Return the reason for a load that has ended, how it has, and the seconds of a success, once; None: none has.

        Only a load with a noted beginning counts.
        """
        phase = self.worker.phase
        if self._load is None or phase not in ("ready", "draining", "cold", "down"):
            return None
        (reason, began_at), self._load = self._load, None
        if phase in ("ready", "draining"):
            return reason, "ready", now - began_at
        is_failure = phase == "down" or self.worker.life.failed_change == "ready"
        return reason, "failed" if is_failure else "stopped", None

    def report_until(self) -> float:
        """Return until when the worker's report of its load counts, if it counts anything; else `inf`."""
        endpoint = self._endpoint
        return math.inf if endpoint is None or not endpoint.external_load else endpoint.reported_at + REPORT_S

    def _claims(self, *, has_gpus: bool) -> Claims:
        """Return the claims of its table, or of the place of its load; they are read anew only for another table."""
        if self._place is not None and self.worker.booking is None and self.worker.phase == "starting":
            return self._place
        table = self.worker.holds
        if self._claimed is None or self._claimed[0] is not table:
            self._claimed = table, claims_of(table, has_gpus=has_gpus)
        return self._claimed[1]

    def candidate(
        self,
        now: float,
        places: Sequence[Claims] = (),
        remote: RemoteWait | None = None,
        *,
        has_gpus: bool,
        is_spare: bool = False,
    ) -> SwapCandidate:
        """Return how it is now; `has_gpus` says whether this machine has any GPU.

        `places` are where it could be loaded, if it has no place. `remote` is its wait for GPUs on a cluster.
        `is_spare` says that it is a copy that may go.
        """
        worker, endpoint, phase = self.worker, self._endpoint, self.worker.phase
        if phase == "ready" and self._ready_since == -math.inf:
            first = now if self.busy_at == -math.inf else self.busy_at
            self._ready_since = math.nextafter(first, -math.inf)  # before any request that it has had
        elif phase in ("cold", "down", "asleep", "waking", "ending"):
            self._ready_since = self.busy_at = -math.inf
        requests = endpoint.load(now) if endpoint is not None and phase in ("ready", "draining", "ending") else 0
        if requests:
            self.busy_at = now
        heartbeat = worker.record.heartbeat
        can_sleep = heartbeat is not None and heartbeat.can_sleep and worker.life.failed_change != "asleep"
        return SwapCandidate(
            worker_id=worker.id,
            model=self.model,
            phase=phase,
            requests=requests,
            ready_since=self._ready_since,
            idle_since=math.inf if requests else max(self.busy_at, self._ready_since),
            claims=self._claims(has_gpus=has_gpus),
            places=places if phase in ("cold", "down") else (),
            idle_s=0.0 if is_spare else worker.spec.idle_s,
            min_loaded_s=worker.spec.min_loaded_s,
            when_idle="sleep" if worker.spec.when_idle == "sleep" and can_sleep else "stop",
            may_start_at=worker.life.may_start_at,
            remote=remote,
            is_spare=is_spare,
        )
