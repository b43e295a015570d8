"""The nodes of a cluster of Ray as machines, beside those that workers and the gateway report."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence

import trio

from ichat.config.schema import Config
from ichat.fleet.worker_table import WorkerTable
from ichat.hardware.machines import MachineReport, RayShare, own_addresses, own_id, stepped, stepped_bytes
from ichat.protocol.messages import Machine, MachineGpu
from ichat.ray.api import RayApi
from ichat.ray.reading import ClusterReading, read_cluster
from ichat.ray.values import RayGpu, RayHardware, RayNode, Resources
from ichat.security.keys import ray_token

log = logging.getLogger(__name__)

KIND_LABEL = "ray.io/accelerator-type"


def ray_machines_of(config: Config, table: WorkerTable) -> "RayMachines | None":
    """Return the machines of the cluster of `[ray]`; None without a cluster. Raises Exit 64 without its token."""
    if config.ray.address is None:
        return None
    return RayMachines(RayApi(config.ray.address, ray_token(config.ray)), table)


class RayMachines:
    """Reads a cluster at intervals; its newest reading stays while Ray does not answer."""

    def __init__(self, api: RayApi, table: WorkerTable) -> None:
        """`table` has the workers, by which machines on the cluster are known already."""
        self._api = api
        self._table = table
        self._reading = ClusterReading()
        self._own = frozenset[str]()
        """The addresses of this machine."""
        self._unanswered_since: float | None = None
        """In seconds since 1970; None while Ray answers."""
        self.is_answering: bool | None = None
        """Whether Ray has answered the last time; None: it was not asked yet."""

    def __repr__(self) -> str:
        return f"<RayMachines at {self._api.address}: {len(self._reading.nodes)} nodes>"

    async def watch_forever(self, every_s: float) -> None:
        """Read the cluster at this interval."""
        while True:
            reading = await read_cluster(self._api)
            if why := reading.missing.get("nodes"):
                if self._unanswered_since is None:
                    log.warning("Ray at %s does not report its nodes: %s", self._api.address, why)
                self._unanswered_since = self._unanswered_since or round(time.time(), 3)
            else:
                self._reading, self._unanswered_since, self._own = reading, None, own_addresses()
            self.is_answering = self._unanswered_since is None
            await trio.sleep(every_s)

    def reports(self) -> Iterator[MachineReport]:
        """Return a report for each machine of the newest reading."""
        known = dict.fromkeys(self._own, own_id())
        for worker in self._table if self._reading.nodes else ():
            if worker.machine is not None and worker.heartbeat is not None:
                known.setdefault(worker.heartbeat.host, worker.machine.id)
        return reports_of(self._reading, known, self._unanswered_since)


def reports_of(
    reading: ClusterReading, known: Mapping[str, str], unanswered_since: float | None = None
) -> Iterator[MachineReport]:
    """Yield a report for each machine of a cluster; `known` has the ids of other reports' machines by addresses."""
    for ip, nodes in reading.by_address().items():
        hardware = next((reading.hardware[node.id] for node in nodes if node.id in reading.hardware), None)
        share = RayShare(
            raylets=len(nodes),
            gpus=sum(node.gpus for node in nodes),
            gpus_free=_free_on(nodes, {} if reading.room is None else reading.room.free),
            kinds=tuple(sorted({node.labels[KIND_LABEL] for node in nodes if KIND_LABEL in node.labels})),
            unanswered_since=unanswered_since,
        )
        yield MachineReport("", _machine(known.get(ip, f"ray-{ip}"), ip, hardware), ray=share)


def _free_on(nodes: Sequence[RayNode], free: Mapping[str, Resources]) -> float | None:
    """Return how many GPUs are free on nodes; None: Ray has not reported all of them yet."""
    known = [free[node.id].get("GPU", 0.0) for node in nodes if node.id in free]
    return sum(known) if len(known) == len(nodes) else None


def _machine(machine_id: str, ip: str, hardware: RayHardware | None) -> Machine:
    """Return a machine as Ray knows it; GPUs that are only declared are not known."""
    if hardware is None:
        return Machine(machine_id, ip)
    total, available = hardware.memory_total_bytes, hardware.memory_available_bytes
    return Machine(
        machine_id,
        hardware.hostname,
        cpus=hardware.cpus,
        cpu_use=None if hardware.cpu_use is None else stepped(hardware.cpu_use),
        memory_total_bytes=total,
        memory_available_bytes=None if total is None or available is None else stepped_bytes(available, total),
        gpus=list(map(_gpu, hardware.gpus)) or None,
    )


def _gpu(gpu: RayGpu) -> MachineGpu:
    return MachineGpu(
        gpu.index,
        uuid=gpu.uuid,
        name=gpu.name,
        memory_total_bytes=gpu.memory_total_bytes,
        memory_used_bytes=gpu.memory_used_bytes,
        use=gpu.use,
    )
