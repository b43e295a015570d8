"""Starts workers as jobs of a Ray cluster, and finds the jobs of an earlier gateway.

Ray chooses the node. The first process of a job is the guard, which fetches its order from this gateway by a code.
"""

import io
import logging
import pathlib
import secrets
import sys
import zipfile
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import attrs
import trio

from ichat.config.ray_workers import on_node
from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.fleet.order_store import OrderStore
from ichat.fleet.orders import OrderPlace, RemoteOrder
from ichat.ray.api import RayApi, RayRefused, RayUnknown
from ichat.ray.values import RayJob, RayNode, RayRoom, RaySubmission
from ichat.security.keys import ray_token
from ichat.supervisor.launch import own_environment
from ichat.supervisor.launcher import Order, RemoteLauncher
from ichat.supervisor.ray_jobs import (
    LAUNCH,
    OWNER,
    WORKER,
    LaunchNames,
    address_for,
    entrypoint_of,
    is_own_address,
    lacking_on,
    place_on,
    submission_of,
    why_pending,
)
from ichat.supervisor.ray_launch import RayLaunch
from ichat.supervisor.remote_wait import RemoteLack
from ichat.supervisor.state import SavedManagedWorker, StateDirectory

log = logging.getLogger(__name__)

OWNER_FILE = "owner"
KEPT_JOBS = 3
"""The last jobs of each worker that Ray keeps: they are not deleted after their end."""
READ_AGAIN_S = 5.0
"""How long a reading of the cluster's nodes counts, in seconds."""
_PACKED_AT = (1980, 1, 1, 0, 0, 0)
"""The time of the file in the package: the same pyz is the same package."""


def launchers_of(config: Config, state: StateDirectory, orders: OrderStore) -> Mapping[str, RemoteLauncher]:
    """Return the launchers of workers on other machines, by `on`. Raises Exit 64 without the cluster's token."""
    if config.ray.address is None:
        return {}
    return {"ray": RayLauncher(RayApi(config.ray.address, ray_token(config.ray)), state.path, orders)}


@attrs.frozen
class _Reading:
    """The cluster's nodes with their free resources, and when they were read."""

    at: float
    nodes: Sequence[RayNode]
    room: RayRoom | None


class RayLauncher:
    """Starts workers on a cluster."""

    def __init__(self, api: RayApi, directory: str, orders: OrderStore) -> None:
        """`directory` is the state directory."""
        self.api = api
        self.orders = orders
        self._directory = directory
        self._owner = ""
        self._reading_owner = trio.Lock()
        """Held while the owner is read, so that launches at the same moment have the same."""
        self._package = ""
        self._address = ""
        """How the nodes reach the gateway, by the newest launch."""
        self._reading: _Reading | None = None
        self._ended: dict[str, list[str]] = defaultdict(list)
        """The jobs that have ended, by their workers' ids; the oldest are first."""

    def __repr__(self) -> str:
        return f"<RayLauncher at {self.api.address}>"

    async def start(self, order: Order) -> RayLaunch:
        """Return a new launch, which submits its job and waits for its place. Raises OSError."""
        await self._know_owner()
        return RayLaunch(order, self._names(order.worker_id, order.number).job_id, self)

    async def find(self, started: Sequence[SavedManagedWorker]) -> Mapping[str, "FoundRayLaunch"]:
        """Return the launches of these workers that have not ended, by the workers' ids. Others' launches are ended.

        If Ray does not answer, every launch counts that has an order. A launch counts without a job that Ray knows if a
        guard has fetched its order: its worker is soon heard, or it has ended.
        """
        ours = self.orders.orders.of_managed()
        if not (started or ours):
            return {}
        await self._know_owner()
        jobs = await self._read_jobs()
        orders = {one.worker_id: one for one in ours}
        found: dict[str, FoundRayLaunch] = {}
        for one in started:
            job_id, order = self._names(one.worker_id, one.launch).job_id, orders.get(one.worker_id)
            if order is not None and (jobs is None or _may_be_under_way(order, jobs.get(job_id))):
                found[one.worker_id] = FoundRayLaunch(one.worker_id, one.launch, job_id, order, self)
        for order in ours:
            if order.worker_id not in found:
                await self.orders.finish(order.launch, "was lost with its gateway")
        await self._end_others({one.job_id for one in found.values()}, jobs or {})
        return found

    async def _read_jobs(self) -> Mapping[str, RayJob] | None:
        """Return this gateway's jobs by their ids; None if they are not known."""
        try:
            return {job.id: job for job in await self.api.jobs() if job.metadata.get(OWNER) == self._owner}
        except (RayUnknown, RayRefused) as error:
            log.error("Ray at %s does not say which jobs run (%s): the workers there go on", self.api.address, error)
            return None

    async def _end_others(self, kept: Collection[str], jobs: Mapping[str, RayJob]) -> None:
        """Have Ray end this gateway's jobs that no worker has any more; their keys are dead."""
        for job in sorted(jobs.values(), key=lambda one: int(one.metadata.get(LAUNCH, "0"))):
            if job.id in kept:
                continue
            if job.is_over:
                self._ended[job.metadata.get(WORKER, "")].append(job.id)
            elif job.status == "RUNNING":
                log.warning("job %s on Ray is of no worker: it is stopped", job.id)
                await self._try(self.api.stop, job.id)

    # What launches need.

    async def prepare(self, order: Order) -> None:
        """Upload the program that the job runs. Raises RayUnknown, RayRefused, OSError."""
        nodes = (await self._read()).nodes
        alive = [node.ip for node in nodes if node.is_alive]
        if not alive:
            raise RayUnknown("it has no node that is alive")
        self._address = address_for(order.config, alive[0])
        package = await trio.to_thread.run_sync(_own_package)
        self._package = await self.api.upload(package) if package else ""

    def submission(self, order: Order, code: str) -> RaySubmission:
        """Return the job of an order with this code, after `prepare`."""
        source = "" if self._package else own_environment(order.config)["PYTHONPATH"]
        entrypoint = entrypoint_of(order.config.ray, code, self._address, source=source)
        names = self._names(order.worker_id, order.number)
        return submission_of(names, order.spec, order.config, entrypoint=entrypoint, package=self._package)

    def _names(self, worker_id: str, number: int) -> LaunchNames:
        return LaunchNames(self._owner, worker_id, number)

    def table_of(self, order: Order) -> ManagedWorkerConfig:
        """Return the worker's table for its node."""
        return on_node(order.spec, order.config)

    async def place_of(self, order: Order, node_id: str) -> OrderPlace | None:
        """Return the place of an order on a node; None: the node is not known yet. Raises RayUnknown, RayRefused."""
        ip = next((node.ip for node in (await self._read()).nodes if node.id == node_id), "")
        return place_on(order.config, ip, is_own=is_own_address(ip)) if ip else None

    async def why_pending(self, spec: ManagedWorkerConfig, job: RayJob) -> str:
        """Return why a pending job has no place, in a sentence. Raises RayUnknown, RayRefused."""
        reading = await self._read()
        return why_pending(spec, job, reading.nodes, reading.room)

    def lacking(self, spec: ManagedWorkerConfig) -> RemoteLack:
        """Return the lack of GPUs for such a worker; none if no launch has read that of late."""
        reading = self._reading
        if reading is None or trio.current_time() - reading.at > 2 * READ_AGAIN_S:
            return RemoteLack()
        return lacking_on(spec, reading.nodes, reading.room)

    async def tidy(self, worker_id: str, job_id: str) -> None:
        """Note the end of a launch, and have Ray forget earlier launches of this worker."""
        ended = self._ended[worker_id]
        ended.append(job_id)
        for old in ended[:-KEPT_JOBS]:
            if await self._try(self.api.delete, old):
                ended.remove(old)

    async def _try(self, call: Callable[[str], Awaitable[None]], job_id: str) -> bool:
        """Return whether Ray has done something with a job; if not, why is logged."""
        try:
            await call(job_id)
        except (RayUnknown, RayRefused) as error:
            log.info("Ray does not clear job %s away: %s", job_id, error)
            return False
        return True

    async def _read(self) -> _Reading:
        """Return a reading of the cluster that is not old. Raises RayUnknown, RayRefused."""
        now = trio.current_time()
        if self._reading is None or now - self._reading.at > READ_AGAIN_S:
            nodes, room = await self.api.nodes(), None
            try:
                room = await self.api.free()
            except (RayUnknown, RayRefused) as error:
                log.info("Ray does not report its free resources: %s", error)
            self._reading = _Reading(now, nodes, room)
        return self._reading

    async def _know_owner(self) -> None:
        async with self._reading_owner:
            self._owner = self._owner or await trio.to_thread.run_sync(keep_owner, self._directory)


@attrs.frozen
class FoundRayLaunch:
    """A launch of an earlier gateway that has not ended."""

    worker_id: str
    number: int
    job_id: str
    order: RemoteOrder
    _launcher: RayLauncher
    may_stay = True

    def adopt(self, config: Config, spec: ManagedWorkerConfig) -> RayLaunch:
        """Go on with it; `spec` is the table that it was started with."""
        return RayLaunch(Order(self.worker_id, self.number, spec, config), self.job_id, self._launcher, self.order)


def _may_be_under_way(order: RemoteOrder, job: RayJob | None) -> bool:
    """Return whether the worker of an order may run; without a job it may if its guard has begun."""
    return bool(order.fetched_at) if job is None else not job.is_over


def keep_owner(directory: str) -> str:
    """Return the name by which the jobs of this state directory are known on Ray, made once. Raises OSError."""
    path = pathlib.Path(directory, OWNER_FILE)
    try:
        known = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        known = ""
    if not known:
        known = secrets.token_hex(4)
        path.write_text(f"{known}\n", encoding="ascii")
    return known


def _own_package() -> bytes:
    """Return this program's pyz in a package for Ray; empty if the program runs from its source. Raises OSError."""
    if not zipfile.is_zipfile(sys.argv[0]):
        return b""
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w") as package:
        package.writestr(zipfile.ZipInfo("ichat.pyz", _PACKED_AT), pathlib.Path(sys.argv[0]).read_bytes())
    return found.getvalue()
