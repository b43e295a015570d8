"""The changes by the results of health checks; `fleet/health_checks.py` asks."""

import heapq
import logging
import math

from ichat.fleet.model_directory import ModelDirectory
from ichat.fleet.worker_record import WorkerRecord
from ichat.fleet.worker_table import WorkerTable
from ichat.routing.endpoint import Endpoint

log = logging.getLogger(__name__)

OWN_AT_ONCE_MAX = 100
"""At most this many of iChat's own workers are asked in a round: those that fail, then the longest not seen."""
KEEP_S = 600.0
"""How often, at most, the state directory records that a worker still answers its health checks."""


def record_probe(
    endpoint: Endpoint, worker: WorkerRecord | None, why: str, now: float, *, is_well: bool, failures_max: int
) -> bool:
    """Record the result of a health check: healthy, `why` not, or nothing; return whether it begins or ends to fail.

    `worker` is the owner of the endpoint; None: an external route's.
    """
    was_ill, name = endpoint.health_failure, endpoint.upstream.name
    endpoint.record_probe(why, failures_max)
    if endpoint.health_failure and not was_ill:
        log.warning("%s fails its health checks: %s", name, why)
    elif was_ill and not endpoint.health_failure:
        log.info("%s passes its health checks again", name)
    if worker is not None and not worker.is_foreign:
        return was_ill != endpoint.health_failure  # its heartbeats report everything else
    if worker is not None and (is_well or endpoint.health_failure or not why):
        worker.answers = is_well
    is_configured = worker is not None and worker.server is not None
    if is_well or (is_configured and not why):  # that has no other way to show that it can be reached
        endpoint.record_reachable()
        if worker is not None:
            worker.heard_at = now
            worker.is_stale = worker.is_stale and not worker.can_return
    return was_ill != endpoint.health_failure


class Probes:
    """Records the results of health checks of workers and external routes."""

    def __init__(self, table: WorkerTable, directory: ModelDirectory) -> None:
        self._table = table
        self._directory = directory
        self._kept_at = -math.inf
        """When the state directory was last to record that a worker still answers."""

    def __repr__(self) -> str:
        return f"<Probes of {self._table!r}>"

    def to_probe(self) -> list[tuple[Endpoint, WorkerRecord | None]]:
        """Return the targets of health checks: workers that are not iChat's own, and routes with a health path."""
        return [
            *(
                (endpoint, worker)
                for worker in self._table
                if worker.is_foreign and not worker.is_down and (worker.can_return or not worker.is_stale)
                if (endpoint := self._table.endpoint_of(worker)) is not None
            ),
            *(
                (endpoint, None)
                for endpoint in self._directory.routes()
                if endpoint.route and endpoint.route.health_path
            ),
        ]

    def unseen(self, since: float) -> list[tuple[Endpoint, WorkerRecord | None]]:
        """Return iChat's own workers from elsewhere that should be ready, with their endpoints not seen since then."""
        found = (
            (endpoint, worker)
            for worker in self._table
            if worker.heartbeat is not None and worker.heartbeat.state == "ready"
            if not (worker.managed or worker.is_foreign or worker.is_down or worker.is_stale)
            if (endpoint := self._table.endpoint_of(worker)) is not None and endpoint.seen_at <= since
        )
        return [*heapq.nsmallest(OWN_AT_ONCE_MAX, found, key=lambda one: (not one[0].probe_failures, one[0].seen_at))]

    def record(
        self, endpoint: Endpoint, worker: WorkerRecord | None, why: str, *, is_well: bool, failures_max: int
    ) -> None:
        """Record the result of a health check: healthy, `why` not, or nothing.

        A healthy worker can be reached, and need not send heartbeats.
        """
        table = self._table
        now, before = table.clock(), (table.version, table.changes)
        has_changed = record_probe(endpoint, worker, why, now, is_well=is_well, failures_max=failures_max)
        if worker is None:
            self._directory.find_ill_routes()
        else:
            if is_well and now - self._kept_at > KEEP_S:  # the time is kept, if roughly
                self._kept_at = now
                table.outdate()
            table.refresh(worker)
        if has_changed or before != (table.version, table.changes):
            table.changed()

    def forget(self) -> None:
        """Forget the results of health checks: there are none any more."""
        endpoints = filter(None, map(self._table.endpoint_of, self._table))
        for endpoint in (*endpoints, *self._directory.routes()):
            endpoint.forget_probes()
        self._directory.find_ill_routes()
        for worker in self._table:
            if worker.answers:
                worker.answers = False
                self._table.refresh(worker)
