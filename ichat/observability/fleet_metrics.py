"""The state of workers, external routes, queues and GPUs at a scrape, as Prometheus' families."""

from collections import Counter
from collections.abc import Container, Generator, Iterable, Mapping, Sequence
from typing import get_args

import attrs
import trio
from prometheus_client import Metric

from ichat.fleet.model_directory import ModelDirectory
from ichat.fleet.worker_record import State, WorkerRecord
from ichat.fleet.worker_table import WorkerTable
from ichat.hardware.machines import MachineMonitor, machines_of
from ichat.observability.exposition import Families
from ichat.observability.prometheus_families import (
    families_of,
    family,
    gpu_families_in_parts,
)
from ichat.observability.request_record import OTHER
from ichat.routing.balancer import Balancer
from ichat.routing.endpoint import Endpoint

MODELS_MAX = 1000
"""Models that are counted apart; where there are more at the same time, the others are counted together."""
WORKERS_AT_ONCE = 128
"""How many workers are looked at in a step."""
STATES: Sequence[str] = [name for names in get_args(State) for name in get_args(names)]
CIRCUITS = {"closed": 0.0, "half-open": 0.5, "open": 1.0}


@attrs.define(eq=False)
class _Totals:
    """Sums over all workers."""

    elsewhere: Container[str]
    """The models of external routes."""
    ready: dict[str, int]
    """How many endpoints can serve each model."""
    models_max: int
    coming: dict[str, int] = attrs.field(factory=dict[str, int])
    """How many workers are on their way to it."""
    states: Counter[str] = attrs.field(factory=Counter[str])
    pending: Counter[str] = attrs.field(factory=Counter[str])
    """How many managed workers wait for a place, by their launchers."""
    on_demand: set[str] = attrs.field(factory=set[str])

    def add(self, worker: WorkerRecord, state: State, *, serves: bool) -> None:
        self.states[state] += 1
        if worker.managed:
            self.pending[str(worker.settings.get("on", "here"))] += state == "pending"
        self.on_demand.update(worker.names if worker.on_demand else ())
        for name in worker.names:
            if name not in self.elsewhere:
                label = name if name in self.ready or len(self.ready) < self.models_max else OTHER
                self.ready[label] = self.ready.get(label, 0) + serves
                self.coming[label] = self.coming.get(label, 0) + (state in ("starting", "loading"))


class FleetMetrics:
    """Reads the state on each scrape, so no series of a worker outlives it."""

    def __init__(
        self,
        table: WorkerTable,
        directory: ModelDirectory,
        balancer: Balancer,
        monitor: MachineMonitor,
        models_max: int = MODELS_MAX,
    ) -> None:
        """`monitor` reads the gateway's machine."""
        self._table = table
        self._directory = directory
        self._balancer = balancer
        self._monitor = monitor
        self._models_max = models_max

    def __repr__(self) -> str:
        return f"<FleetMetrics of {self._table!r}>"

    def families(self) -> Generator[Families, None, Mapping[str, bool]]:
        """Return the families in parts that each need a millisecond or two.

        The generator returns the models of on-demand workers, and whether a worker of each is ready.
        """
        now, external = trio.current_time(), self._directory.external
        ready = {name: sum(_can_serve(one, now) for one in ones) for name, ones in external.items()}
        totals = _Totals(external, ready, self._models_max)
        workers = sorted(self._table, key=lambda worker: not worker.managed)
        for start in range(0, max(1, len(workers)), WORKERS_AT_ONCE):
            for metric in self._worker_families(workers[start : start + WORKERS_AT_ONCE], totals, now):
                yield from families_of(metric)
        for metric in self._state_families(totals, now):
            yield from families_of(metric)
        return {name: totals.ready.get(name, 0) > 0 for name in sorted(totals.on_demand - external.keys())}

    def _worker_families(self, workers: Sequence[WorkerRecord], totals: _Totals, now: float) -> Iterable[Metric]:
        """Return the families of some workers' state, and add them to the totals."""
        states = dict[tuple[str, ...], float]()
        endpoints = dict[str, Endpoint]()
        for worker in workers:
            state, endpoint = self._table.state(worker), self._table.endpoint_of(worker)
            states[worker.id, worker.names[0] if worker.names else "", state] = 1
            totals.add(worker, state, serves=state == "ready" and (endpoint is None or _can_serve(endpoint, now)))
            if endpoint is not None:
                endpoints[worker.id] = endpoint
        yield family("ichat_worker_state", states)
        yield family("ichat_worker_restarts", {one.id: one.restarts for one in workers})
        yield from _endpoint_families(endpoints, now)

    def _state_families(self, totals: _Totals, now: float) -> Iterable[Metric]:
        """Return the families of the gateway's state at this moment, except that of each worker."""
        balancer, ready = self._balancer, totals.ready
        queued = {name: balancer.waiting_for(name) for name in ready}
        if elsewhere := balancer.waiting - sum(queued.values()):
            queued[OTHER] = queued.get(OTHER, 0) + elsewhere
        yield family("ichat_requests_queued", queued)
        yield family("ichat_model_endpoints", ready)
        yield family("ichat_model_starting", totals.coming)
        routes = [endpoint for endpoints in self._directory.external.values() for endpoint in endpoints]
        yield from _endpoint_families({route.id.decode(): route for route in routes}, now)
        yield family("ichat_workers", {**dict.fromkeys(STATES, 0), **totals.states})
        yield family("ichat_pending_launches", {**totals.pending})
        if (is_up := self._monitor.has_others) is not None:
            yield family("ichat_ray_up", float(is_up))
        yield from gpu_families_in_parts(machines_of(self._monitor.report, self._table.machines()))


def _endpoint_families(endpoints: Mapping[str, Endpoint], now: float) -> Iterable[Metric]:
    """Return the families of circuits and health checks, by the names of workers and routes."""
    yield family("ichat_circuit_open", {name: CIRCUITS[one.circuit.state(now)] for name, one in endpoints.items()})
    checked = {name: one for name, one in endpoints.items() if one.probe_failures is not None}
    if checked:
        yield family("ichat_health_failed", {name: float(bool(one.health_failure)) for name, one in checked.items()})


def _can_serve(endpoint: Endpoint, now: float) -> bool:
    """Return whether requests go there, as its circuit has it: an answering endpoint is asked if there is no other."""
    return not endpoint.health_failure and (endpoint.circuit.answers or endpoint.circuit.state(now) == "closed")
