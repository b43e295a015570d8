"""What starts managed workers at some place, and finds those of earlier gateways.

The supervisor knows a launcher by these protocols alone. `local_launcher.LocalLauncher` starts processes on this
machine, and has their output. `ray_launcher.RayLauncher` starts jobs on a Ray cluster.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Protocol

import attrs
import psutil
import trio

from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.fleet.worker_facts import WorkerEnd
from ichat.observability.logs.store import LogStore
from ichat.placement.place import Wish
from ichat.placement.placeable_gpus import PlaceableGpu
from ichat.preflight.facts import Facts
from ichat.supervisor.kept import Start
from ichat.supervisor.remote_wait import RemoteLack
from ichat.supervisor.state import SavedManagedWorker


@attrs.frozen
class Order:
    """A launch of a worker: a launcher is asked for it once."""

    worker_id: str
    number: int
    """Higher than that of any earlier launch that is saved in this state directory.

    It is saved before the launcher is asked. If `workers.json` cannot be written, the worker is started all the same.
    """
    spec: ManagedWorkerConfig
    config: Config


class LaunchedProcess(Protocol):
    """The first process of a start of a worker."""

    spec: ManagedWorkerConfig
    identity: str
    is_adopted: bool

    @property
    def pid(self) -> int:
        """Its process id on this machine; 0: it is on another machine, or is not there yet."""
        ...

    @property
    def returncode(self) -> int | None:
        """Its exit code, a signal's number if negative; None while it runs, or if it is not known."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether it has ended."""
        ...

    @property
    def waits_for(self) -> str:
        """Why no process runs yet, in a sentence; empty: it runs, or has ended."""
        ...

    @property
    def is_unanswered(self) -> bool:
        """Whether it waits since its launcher gets no answers."""
        ...

    @property
    def node_id(self) -> str:
        """The node of its cluster that runs it; empty: none does yet, or it is a process of this machine."""
        ...

    async def wait_change(self) -> None:
        """Wait for the next change of `waits_for`."""
        ...

    @property
    def reported_end(self) -> WorkerEnd | None:
        """How it has ended, if its launcher knows more than the exit code."""
        ...

    @property
    def had_no_place(self) -> bool:
        """Whether it has ended since there was no place to run it: that is no failure of the worker."""
        ...

    async def lower_priority(self) -> None:
        """Have the gateway go first where both want the same processor."""
        ...

    async def wait(self) -> None:
        """Wait until it has ended."""
        ...

    async def end(self, stop_s: float, hurry: trio.Event) -> None:
        """Signal it to end, kill it after `stop_s` or once `hurry`, and sweep what stems from it."""
        ...

    async def sweep(self, family: list[psutil.Process]) -> list[psutil.Process]:
        """Kill the remaining processes; return those that are still there after a while."""
        ...

    def close(self) -> None:
        """Release the gateway's handles of it."""
        ...


class FoundProcess(Protocol):
    """A process that an earlier gateway has started, and that still runs."""

    @property
    def may_stay(self) -> bool:
        """Whether it has not seen that the gateway before was gone."""
        ...

    def adopt(self, config: Config, spec: ManagedWorkerConfig) -> LaunchedProcess:
        """Go on with it; `spec` is the table that it was started with."""
        ...


class RemoteLauncher(Protocol):
    """Starts workers on machines that it chooses."""

    async def start(self, order: Order) -> LaunchedProcess:
        """Launch a worker's first process; it waits for its place afterwards."""
        ...

    async def find(self, started: Sequence[SavedManagedWorker]) -> Mapping[str, FoundProcess]:
        """Return the launches of these workers that have not ended, by the workers' ids. Launches of others are ended.

        A launch counts as not ended if nothing is known of it.
        """
        ...

    def lacking(self, spec: ManagedWorkerConfig) -> RemoteLack:
        """Return the lack of GPUs for such a worker, as far as it is known."""
        ...


class Launcher(Protocol):
    """Starts workers on the gateway's machine."""

    @property
    def logs(self) -> LogStore:
        """The output of its workers."""
        ...

    def socket_of(self, worker_id: str) -> str:
        """Return the unix socket by which the gateway reaches a worker."""
        ...

    async def facts(self, config: Config, spec: ManagedWorkerConfig, limiter: trio.CapacityLimiter | None) -> Facts:
        """Return the place's facts about a worker before its start. `limiter` bounds how many ask at once."""
        ...

    async def wish(self, config: Config, spec: ManagedWorkerConfig) -> Wish:
        """Return the wish of a worker with `gpus`, by its model's files there."""
        ...

    async def placeable(self, config: Config, spec: ManagedWorkerConfig) -> Sequence[PlaceableGpu] | None:
        """Return the GPUs that the place has for such a worker; None if they are not known."""
        ...

    async def start(self, order: Order) -> LaunchedProcess:
        """Start a worker's first process. Raises OSError or ValueError where that cannot be."""
        ...

    async def find(self, started: Sequence[SavedManagedWorker]) -> Mapping[str, FoundProcess]:
        """Return the processes of these workers that still run, by the workers' ids. Processes of others are ended.

        There are no checkpoints between the last look at the processes and the return.
        """
        ...

    async def read_on(self, living: Container[Start]) -> None:
        """Read on the kept outputs of earlier starts; the outputs of starts that do not live are read to their end."""
        ...
