"""The operators' view of the whole: the gateway, its workers, models, machines and names, as they are now."""

import os
import time
from collections.abc import Iterator, Sequence

import attrs
import trio

import ichat
from ichat.admin import views
from ichat.fleet.model_directory import ModelDirectory
from ichat.fleet.views import load_of
from ichat.fleet.worker_record import HEALTHY
from ichat.fleet.worker_table import WorkerTable
from ichat.hardware.machines import MachineMonitor, MachineView
from ichat.observability.history import History
from ichat.proxy.context import GatewayContext
from ichat.proxy.lanes import LaneMeter
from ichat.proxy.requests_in_flight import RequestsInFlight
from ichat.relays.figures import RelayFigures
from ichat.supervisor.starts import Starts


@attrs.frozen
class Overview:
    """Looks at the gateway's parts."""

    table: WorkerTable
    directory: ModelDirectory
    context: GatewayContext
    monitor: MachineMonitor
    """Reads the gateway's machine."""
    history: History
    in_flight: RequestsInFlight
    lanes: LaneMeter
    gateway_id: str
    started_at: float
    """In seconds since 1970."""
    starts: Starts
    relays: Sequence[RelayFigures]
    """Of the processes that have the clients' connections; none: this process has them."""

    def gateway(self) -> views.GatewayView:
        """Return the gateway's process."""
        uptime_s = round(time.time() - self.started_at, 3)
        starts, saved = self.starts, self.starts.saved
        return views.GatewayView(
            self.gateway_id, ichat.__version__, os.getpid(), uptime_s,
            [view for one in self.relays for view in one.views()], starts.term,
            saved.last_crash, saved.last_takeover, next((one.last_crash for one in self.relays), None),
            starts.retiring_pid,
        )  # fmt: skip

    def model(self, name: str) -> views.ModelLoad:
        """Return the load of a model."""
        directory, demand, now = self.directory, self.context.balancer.demand(name), trio.current_time()
        return views.ModelLoad(
            name,
            **load_of(directory.availability(name), now),
            queued=demand.waiting,
            waiting_s=round(now - demand.since, 3) if demand.waiting else None,
            loaded=directory.is_loaded(name),
            copies=self._copies(name),
        )

    def _copies(self, name: str) -> views.CopyCounts | None:
        """Return the copies of a model; None if it has no copies."""
        copies = [one for one in self.directory.workers_of(name) if one.copies_wanted]
        if not copies:
            return None
        ready = sum(self.table.state(one) in HEALTHY for one in copies)
        coming = sum(one.is_coming(self.table.state(one), self.table.trouble_of(one)) for one in copies)
        return views.CopyCounts(ready, coming, copies[0].copies_wanted)

    def machines(self) -> Iterator[MachineView]:
        """Yield the gateway's machine, the workers' machines, and those of a cluster of Ray."""
        return self.monitor.machines(self.table.machines())

    def names(self) -> list[views.AliasView]:
        """Return the names that the configuration maps to models."""
        return [
            views.AliasView(one.name, one.targets, one.fallbacks, one.longer, one.shadow)
            for one in self.context.aliases.by_name.values()
        ]
