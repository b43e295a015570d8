"""A wait for GPUs on a cluster, as a decision about loads sees it."""

from collections.abc import Mapping, Sequence

from attrs import frozen


@frozen
class RemoteRoom:
    """A node of a cluster that could hold a waiting worker if others there went."""

    lacks: float
    """How many GPUs it has too few."""
    holders: Mapping[str, float]
    """The numbers of GPUs of the on-demand workers there, by their ids."""


@frozen
class RemoteWait:
    """A wait for GPUs on a cluster, which itself chooses the node. No node has as many free."""

    evict_at: float
    """When others may go for it."""
    rooms: Sequence[RemoteRoom]
