"""What the results of health checks change. Purely synchronous; `proxy/health_checks.py` asks."""

import logging

from ichat.routing.endpoint import Endpoint
from ichat.routing.worker_record import WorkerRecord

log = logging.getLogger(__name__)


def record_probe(
    endpoint: Endpoint, worker: WorkerRecord | None, why: str, now: float, *, is_well: bool, failures_max: int
) -> bool:
    """Record the result of a health check: healthy, `why` not, or nothing; return whether it begins or ends to fail.

    `worker` is whose endpoint it is; None: an external route's.
    """
    was_ill, name = endpoint.health_failure, endpoint.upstream.name
    endpoint.record_probe(why, failures_max)
    if endpoint.health_failure and not was_ill:
        log.warning("%s fails its health checks: %s", name, why)
    elif was_ill and not endpoint.health_failure:
        log.info("%s passes its health checks again", name)
    if worker is not None and (is_well or endpoint.health_failure or not why):
        worker.answers = is_well
    if is_well:
        endpoint.record_reachable()
        if worker is not None:
            worker.heard_at = now
            worker.is_stale = worker.is_stale and not worker.can_return
    return was_ill != endpoint.health_failure
