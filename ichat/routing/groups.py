"""Groups of workers that serve one model together: what it means for the others when a member ends."""

from collections.abc import Iterable

from ichat.protocol import PeerLoss
from ichat.routing.worker_record import HEARTBEATS_MISSED_MAX, WorkerRecord


def loss_of(worker: WorkerRecord, why: str, *, is_certain: bool) -> PeerLoss:
    """Return the loss of a worker, which has sent heartbeats, as its group is told of it."""
    assert worker.heartbeat is not None
    return PeerLoss(worker.id, why, worker.heartbeat.host, worker.heartbeat.port, is_certain=is_certain)


def broken_by(gone: WorkerRecord, workers: Iterable[WorkerRecord]) -> list[WorkerRecord]:
    """Return the members of a worker's group that its end breaks."""
    return [other for other in _group_of(gone, workers) if other.lost is None and other.overlapped_with(gone)]


def losses_of(worker: WorkerRecord, workers: Iterable[WorkerRecord], now: float) -> list[PeerLoss]:
    """Return what a worker's group has lost for certain, else the members that have been silent for too long."""
    if worker.lost is not None:
        return [worker.lost]
    return [
        loss_of(other, f"has been silent for {silent_s:.0f} s", is_certain=False)
        for other in _group_of(worker, workers)
        if other.heartbeat and worker.overlapped_with(other)
        if (silent_s := now - other.heartbeat_at) > other.heartbeat.heartbeat_interval * HEARTBEATS_MISSED_MAX
    ]


def _group_of(worker: WorkerRecord, workers: Iterable[WorkerRecord]) -> list[WorkerRecord]:
    """Return the other workers of a worker's group."""
    group = worker.heartbeat.group if worker.heartbeat else None
    if group is None:
        return []
    return [
        other
        for other in workers
        if other.heartbeat and other.heartbeat.group and other.heartbeat.group.id == group.id
        if other is not worker and other.heartbeat.state != "gone"
    ]
