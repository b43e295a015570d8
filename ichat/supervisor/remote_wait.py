"""Waits for GPUs on a cluster, as a decision about loads sees them."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

from attrs import frozen


@frozen
class RemoteLack:
    """The lack of GPUs on a cluster for launches of a worker."""

    unplaced: int = 0
    """How many launches with its number of GPUs have no place, by the cluster's report; 0: none, or not known."""
    by_node: Mapping[str, float] = {}
    """How many GPUs each node that is large enough has too few, by the ids of the nodes."""


@frozen
class RemoteRoom:
    """A node of a cluster that could hold a waiting worker, at least if others there went."""

    node: str
    lacks: float
    """How many GPUs it has too few; less than 0 if it has more than the worker needs."""
    holders: Mapping[str, float]
    """The numbers of GPUs of the on-demand workers there, by their ids."""


@frozen
class RemoteWait:
    """A wait for GPUs on a cluster, which itself chooses the node."""

    gpus: float
    unplaced: int
    """How many launches with this number of GPUs have no place, by the cluster's report."""
    evict_at: float
    """When others may go for it."""
    rooms: Sequence[RemoteRoom]


class GivenRoom:
    """The room on clusters that a decision gives to waiting workers, the oldest waiter first."""

    def __init__(self) -> None:
        self._given = defaultdict[str, float](float)
        """The GPUs of each node that waiters get, less those that others leave for them."""
        self._waiters = Counter[float]()
        """How many waiters get room, by their numbers of GPUs."""

    def __repr__(self) -> str:
        return f"<GivenRoom {dict(self._given)}>"

    def rooms_for(self, wait: RemoteWait) -> Sequence[RemoteRoom]:
        """Return the nodes for another waiter; none if all launches without a place have room."""
        return wait.rooms if self._waiters[wait.gpus] < wait.unplaced else ()

    def missing(self, room: RemoteRoom) -> float:
        """Return how many GPUs a node has too few for a waiter after those before it."""
        return room.lacks + self._given[room.node]

    def give(self, wait: RemoteWait, room: RemoteRoom, evicted: Collection[str]) -> None:
        """Note that a waiter gets a node's room, once these workers have left it."""
        self._waiters[wait.gpus] += 1
        self._given[room.node] += wait.gpus - sum(room.holders[one] for one in evicted)
