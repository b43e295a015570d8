"""A reading of a cluster of Ray: its nodes, their hardware, and free resources."""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence

import attrs

from ichat.ray.api import RayApi, RayRefused, RayUnknown
from ichat.ray.values import RayHardware, RayNode, RayRoom


@attrs.frozen
class ClusterReading:
    """What Ray reports about its cluster; a view that fails hides no other."""

    nodes: Sequence[RayNode] = ()
    """The nodes that are alive."""
    dead: int = 0
    """How many other nodes Ray remembers."""
    hardware: Mapping[str, RayHardware] = attrs.field(factory=dict[str, RayHardware])
    """By the ids of the nodes."""
    room: RayRoom | None = None
    missing: Mapping[str, str] = attrs.field(factory=dict[str, str])
    """Why a part is not known, by its name: `nodes`, `hardware` or `free resources`."""

    def by_address(self) -> Mapping[str, Sequence[RayNode]]:
        """Return the nodes by their addresses: several raylets with an address share a machine."""
        found: defaultdict[str, list[RayNode]] = defaultdict(list)
        for node in self.nodes:
            found[node.ip].append(node)
        return found


async def read_cluster(api: RayApi) -> ClusterReading:
    """Ask Ray for all of it."""
    nodes, hardware, room = list[RayNode](), dict[str, RayHardware](), list[RayRoom]()
    missing = dict[str, str]()

    async def read_nodes() -> None:
        nodes.extend(await api.nodes())

    async def read_hardware() -> None:
        hardware.update(await api.hardware())

    async def read_room() -> None:
        room.append(await api.free())

    parts: dict[str, Callable[[], Awaitable[None]]] = {
        "nodes": read_nodes, "hardware": read_hardware, "free resources": read_room,
    }  # fmt: skip
    for name, read in parts.items():
        try:
            await read()
        except (RayUnknown, RayRefused) as error:
            missing[name] = str(error)
    alive = [node for node in nodes if node.is_alive]
    return ClusterReading(alive, len(nodes) - len(alive), hardware, room[0] if room else None, missing)
