"""The room on clusters for workers that wait there for GPUs, while other on-demand workers have them."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import attrs

from ichat.supervisor.launcher import RemoteLauncher
from ichat.supervisor.managed_worker import ManagedWorker
from ichat.supervisor.remote_wait import RemoteLack, RemoteRoom, RemoteWait

CROWDED_S = 5.0
"""How long a worker waits for GPUs on a cluster before others there make room for it."""
SETTLE_S = 15.0
"""How long the GPUs that a worker has left count for the next worker there: Ray's figures are up to 10 s old."""
LOOK_S = 2.0
"""How often the room is looked at while a worker waits: nothing reports that a cluster's figures have changed."""

Place = tuple[str, float]
"""The node of a worker, and the number of its GPUs."""


@attrs.frozen
class LeftRoom:
    """GPUs that a worker has left, and for which no other worker is known yet."""

    node: str
    gpus: float
    until: float
    """When a cluster's figures have them for certain."""


class RemoteRooms:
    """Which on-demand workers could make room on clusters, and since when others wait for it."""

    def __init__(self, workers: Mapping[str, ManagedWorker], clusters: Mapping[str, RemoteLauncher]) -> None:
        """`workers` are all managed workers; `clusters` start those with another `on` than `here`."""
        self._workers = workers
        self._clusters = clusters
        self._held: Mapping[str, Place] = {}
        """The places of the on-demand workers on clusters, by the workers' ids."""
        self._left: Sequence[LeftRoom] = ()
        self._since: dict[str, float] = {}
        """Since when workers wait for GPUs that others have, by their ids."""
        self.look_at = math.inf
        """When to look again."""

    def __repr__(self) -> str:
        return f"<RemoteRooms {self._held}>"

    def waits(self, now: float) -> Mapping[str, RemoteWait]:
        """Return the waits of on-demand workers for GPUs that others have, by the workers' ids."""
        ours = list(self._elsewhere())
        held = {one.id: place for one in ours if (place := _place_of(one)) is not None}
        self._left, self._held = left_after(self._left, self._held, held, now), held
        self.look_at = now + LOOK_S if len(ours) > len(self._held) else math.inf
        lacks = {one.id: lack for one in ours if (lack := self._lack_for(one)).unplaced}
        self._since = {worker_id: self._since.get(worker_id, now) for worker_id in lacks}
        return {
            worker_id: RemoteWait(
                float(self._workers[worker_id].holds.gpus or 0),
                lack.unplaced,
                self._since[worker_id] + CROWDED_S,
                list(self._rooms_at(lack)),
            )
            for worker_id, lack in lacks.items()
        }

    def _elsewhere(self) -> Iterator[ManagedWorker]:
        """Yield the on-demand workers with a launch on a cluster."""
        for one in self._workers.values():
            if one.is_on_demand and one.holds.on in self._clusters and one.has_process:
                yield one

    def _lack_for(self, worker: ManagedWorker) -> RemoteLack:
        """Return the lack of GPUs for a worker that waits for a node; none if it does not."""
        process = worker.life.process
        if process is None or not process.waits_for or process.node_id:
            return RemoteLack()
        return self._clusters[worker.holds.on].lacking(worker.holds)

    def _rooms_at(self, lack: RemoteLack) -> Iterator[RemoteRoom]:
        """Yield the nodes that could hold a waiting worker, at least if others went."""
        left = defaultdict[str, float](float)
        for one in self._left:
            left[one.node] += one.gpus
        for node, gpus in lack.by_node.items():
            holders = {worker_id: held for worker_id, (at, held) in self._held.items() if at == node}
            if sum(holders.values()) >= (lacks := gpus - left[node]):
                yield RemoteRoom(node, lacks, holders)


def left_after(
    left: Sequence[LeftRoom], before: Mapping[str, Place], held: Mapping[str, Place], now: float
) -> Sequence[LeftRoom]:
    """Return the room that workers have left, where they held their places before, and hold the others now.

    A worker that is new on a node has the room there that was left first.
    """
    gone = [LeftRoom(node, gpus, now + SETTLE_S) for _, (node, gpus) in before.items() - held.items()]
    found = [one for one in (*left, *gone) if one.until > now]
    for _, (node, gpus) in held.items() - before.items():
        rest = gpus
        for number, one in enumerate(found):
            used = min(rest, one.gpus) if one.node == node else 0.0
            rest -= used
            found[number] = attrs.evolve(one, gpus=one.gpus - used)
    return [one for one in found if one.gpus > 0]


def _place_of(worker: ManagedWorker) -> Place | None:
    """Return the place of a worker on a cluster; None: it has none yet."""
    process, gpus = worker.life.process, worker.holds.gpus
    if process is None or not process.node_id or not isinstance(gpus, int | float):
        return None
    return process.node_id, float(gpus)
