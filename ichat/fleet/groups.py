"""Groups of workers that serve a model together: their members, and the effect of a member's end on the others.

Every worker may name any group in its heartbeats. It is a member only if it fits in, and only members break a group.
"""

from collections.abc import Iterable, Sequence

from ichat.fleet.worker_record import HEARTBEATS_MISSED_MAX, WorkerRecord
from ichat.protocol.messages import PeerLoss


def loss_of(worker: WorkerRecord, why: str, *, is_certain: bool) -> PeerLoss:
    """Return the loss of a worker that has sent heartbeats, as its group gets it."""
    assert worker.heartbeat is not None
    return PeerLoss(worker.id, why, worker.heartbeat.host, worker.heartbeat.port, is_certain=is_certain)


def broken_by(gone: WorkerRecord, claimants: Iterable[WorkerRecord], now: float) -> list[WorkerRecord]:
    """Return the members of a worker's group that its end breaks; `claimants` are the workers that name that group."""
    return [other for other in others_of(gone, claimants, now) if other.lost is None and other.overlapped_with(gone)]


def losses_of(worker: WorkerRecord, claimants: Iterable[WorkerRecord], now: float) -> list[PeerLoss]:
    """Return the certain losses of a worker's group, else the members that have been silent for too long.

    `claimants` are the workers that name its group.
    """
    if worker.lost is not None:
        return [worker.lost]
    return [
        loss_of(other, f"has been silent for {silent_s:.0f} s", is_certain=False)
        for other in others_of(worker, claimants, now)
        if worker.overlapped_with(other) and (silent_s := _silent_s(other, now))
    ]


def others_of(worker: WorkerRecord, claimants: Iterable[WorkerRecord], now: float) -> list[WorkerRecord]:
    """Return the other members of a worker's group; none if it is in no group, or no member of the group it names."""
    group = worker.heartbeat.group if worker.heartbeat else None
    if group is None:
        return []
    named = [
        other
        for other in claimants
        if other.heartbeat and other.heartbeat.group and other.heartbeat.group.id == group.id
        if other is worker or other.heartbeat.state != "gone"
    ]
    members = members_of(named, now)
    return [other for other in members if other is not worker] if worker in members else []


def members_of(claimants: Sequence[WorkerRecord], now: float) -> list[WorkerRecord]:
    """Return the members of a group, of the workers that name it in their newest heartbeats.

    Managed workers stand first, as no other worker gets their ranks, then the earliest. A worker is a member if it
    fits the members before it that are of the same run: it has their size, and a rank that is free.
    """
    members = list[WorkerRecord]()
    for worker in sorted(claimants, key=lambda one: (not one.managed, one.known_since)):
        if _fits(worker, [one for one in members if _are_of_one_run(one, worker, now)]):
            members.append(worker)
    return members


def _are_of_one_run(one: WorkerRecord, other: WorkerRecord, now: float) -> bool:
    """Return whether two workers were healthy at the same time, or may have been until the earlier is silent.

    A group that is started again soon after its end has other ids, while the old workers have not been missed yet.
    """
    first, second = (one, other) if one.known_since <= other.known_since else (other, one)
    if second.known_since <= first.last_healthy_at:
        return True
    return second.overlapped_with(first) and not _silent_s(first, now)


def _silent_s(worker: WorkerRecord, now: float) -> float:
    """Return for how long a worker has been silent; 0 while it has not missed too many heartbeats."""
    if worker.heartbeat is None:
        return 0.0
    silent_s = now - worker.heartbeat_at
    return silent_s if silent_s > worker.heartbeat.heartbeat_interval * HEARTBEATS_MISSED_MAX else 0.0


def _fits(worker: WorkerRecord, members: Iterable[WorkerRecord]) -> bool:
    """Return whether a worker can be one of these members of the group that it names."""
    group = worker.heartbeat.group if worker.heartbeat else None
    if group is None or group.rank >= group.size:
        return False
    known = [one.heartbeat.group for one in members if one.heartbeat and one.heartbeat.group]
    return all(one.size == group.size and one.rank != group.rank for one in known)
