"""The room on clusters for workers that wait there for GPUs, while other on-demand workers have them."""

import math
from collections.abc import Iterator, Mapping, Sequence

from ichat.supervisor.launcher import RemoteLauncher
from ichat.supervisor.managed_worker import ManagedWorker
from ichat.supervisor.remote_wait import RemoteRoom, RemoteWait

CROWDED_S = 5.0
"""How long a worker waits for GPUs on a cluster before others there make room for it."""
SETTLE_S = 15.0
"""How long nothing more is evicted after a worker on a cluster has gone: Ray's figures are up to 10 s old."""

LOOK_S = 2.0
"""How often the room is looked at while a worker waits: nothing reports that a cluster's figures have changed."""


class RemoteRooms:
    """Which on-demand workers could make room on clusters, and since when others wait for it."""

    def __init__(self, workers: Mapping[str, ManagedWorker], clusters: Mapping[str, RemoteLauncher]) -> None:
        """`workers` are all managed workers; `clusters` start those with another `on` than `here`."""
        self._workers = workers
        self._clusters = clusters
        self._held: Mapping[str, tuple[str, float]] = {}
        """The nodes of the on-demand workers on clusters, and the numbers of their GPUs, by the workers' ids."""
        self._released_at = -math.inf
        """When a worker on a cluster was last seen to have gone."""
        self._since: dict[str, float] = {}
        """Since when workers wait for GPUs that others have, by their ids."""
        self.look_at = math.inf
        """When to look again."""

    def __repr__(self) -> str:
        return f"<RemoteRooms {self._held}>"

    def waits(self, now: float) -> Mapping[str, RemoteWait]:
        """Return the waits of on-demand workers for GPUs that others have, by the workers' ids."""
        ours = list(self._elsewhere())
        self._note_places(ours, now)
        self.look_at = now + LOOK_S if len(ours) > len(self._held) else math.inf
        rooms = {one.id: found for one in ours if (found := list(self._rooms_for(one)))}
        self._since = {worker_id: self._since.get(worker_id, now) for worker_id in rooms}
        settled_at = self._released_at + SETTLE_S
        return {
            worker_id: RemoteWait(max(self._since[worker_id] + CROWDED_S, settled_at), found)
            for worker_id, found in rooms.items()
        }

    def _note_places(self, workers: Sequence[ManagedWorker], now: float) -> None:
        held = {one.id: place for one in workers if (place := _place_of(one)) is not None}
        if self._held.keys() - held.keys():
            self._released_at = now
        self._held = held

    def _elsewhere(self) -> Iterator[ManagedWorker]:
        """Yield the on-demand workers with a launch on a cluster."""
        for one in self._workers.values():
            if one.is_on_demand and one.holds.on in self._clusters and one.has_process:
                yield one

    def _rooms_for(self, worker: ManagedWorker) -> Iterator[RemoteRoom]:
        """Yield the nodes that could hold a waiting worker if others went; none if a node has room already."""
        process = worker.life.process
        if process is None or not process.waits_for or process.node_id:
            return
        lacking = self._clusters[worker.holds.on].lacking(worker.holds)
        if min(lacking.values(), default=0.0) <= 0:
            return
        for node, lacks in lacking.items():
            holders = {worker_id: gpus for worker_id, (at, gpus) in self._held.items() if at == node}
            if sum(holders.values()) >= lacks:
                yield RemoteRoom(lacks, holders)


def _place_of(worker: ManagedWorker) -> tuple[str, float] | None:
    """Return the node of a worker on a cluster, and the number of its GPUs; None: it has none yet."""
    process, gpus = worker.life.process, worker.holds.gpus
    if process is None or not process.node_id or not isinstance(gpus, int | float):
        return None
    return process.node_id, float(gpus)
