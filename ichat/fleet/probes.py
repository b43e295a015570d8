"""The changes by the results of health checks; `fleet/health_checks.py` asks."""

import itertools
import logging
import math
from collections.abc import Iterator

from ichat.fleet.managed_records import ManagedRecords
from ichat.fleet.worker_record import WorkerRecord
from ichat.routing.endpoint import Endpoint

log = logging.getLogger(__name__)

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


class ProbedFleet(ManagedRecords):
    """Workers and external routes with the results of their health checks."""

    _kept_at = -math.inf
    """When the state directory was last to record that a worker still answers."""

    def routes(self) -> Iterator[Endpoint]:
        """Return the endpoints of all external routes."""
        return itertools.chain.from_iterable(self.external.values())

    def to_probe(self) -> list[tuple[Endpoint, WorkerRecord | None]]:
        """Return the targets of health checks: workers that are not iChat's own, and routes with a health path."""
        return [
            *(
                (endpoint, worker)
                for worker in self
                if worker.is_foreign and not worker.is_down and (worker.can_return or not worker.is_stale)
                if (endpoint := self.endpoint_of(worker)) is not None
            ),
            *((endpoint, None) for endpoint in self.routes() if endpoint.route and endpoint.route.health_path),
        ]

    def probed(
        self, endpoint: Endpoint, worker: WorkerRecord | None, why: str, *, is_well: bool, failures_max: int
    ) -> None:
        """Record the result of a health check: healthy, `why` not, or nothing.

        A healthy worker can be reached, and need not send heartbeats.
        """
        now, changes = self._clock(), (self.version, self.changes)
        has_changed = record_probe(endpoint, worker, why, now, is_well=is_well, failures_max=failures_max)
        if worker is None:
            self._has_ill_routes = any(route.health_failure for route in self.routes())
        else:
            if is_well and now - self._kept_at > KEEP_S:  # the time is kept, if roughly
                self._kept_at, self.version = now, self.version + 1
            self.refresh(worker)
        if has_changed or changes != (self.version, self.changes):
            self.changed()

    def forget_probes(self) -> None:
        """Forget the results of health checks: there are none any more."""
        for endpoint in (*self.endpoints(), *self.routes()):
            endpoint.forget_probes()
        self._has_ill_routes = False
        for worker in self:
            if worker.answers:
                worker.answers = False
                self.refresh(worker)
