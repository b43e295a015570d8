"""The gateway's picture of its workers and models. Purely synchronous: what is decided is decided in one step."""

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from ichat.config.schema import CircuitBreaker, Config, Limits
from ichat.protocol import Heartbeat, Machine, PeerLoss, names_of
from ichat.routing import groups
from ichat.routing.availability import TooManyWorkers, TooMuchRegistered
from ichat.routing.endpoint import Endpoint
from ichat.routing.listened import Listened
from ichat.routing.model_directory import ModelDirectory
from ichat.routing.packed_args import ArgsPacker, PackedArgs
from ichat.routing.probes import record_probe
from ichat.routing.views import describe
from ichat.routing.worker_record import AWAY, State, WorkerEnd, WorkerRecord
from ichat.routing.worker_table import FORGET_S, WorkerTable

log = logging.getLogger(__name__)

KEEP_S = 600.0
"""How often, at most, the state directory is told that a worker still answers its health checks."""


class Registry(ModelDirectory, Listened):
    """The workers by their ids, and the endpoints of each model."""

    def __init__(
        self,
        external: Mapping[str, Sequence[Endpoint]],
        clock: Callable[[], float],
        max_in_flight: int,
        wedged_after_s: float = math.inf,
    ) -> None:
        """`external` has the endpoints of each external model; `max_in_flight` is the default of a worker."""
        table = WorkerTable(clock, wedged_after_s)
        ModelDirectory.__init__(self, external, table)
        Listened.__init__(self)
        self._clock, self._table = clock, table
        self.max_in_flight = max_in_flight
        self._workers_max = Limits().workers_max
        self._packer = ArgsPacker()
        self._circuit_breaker = CircuitBreaker()
        self._kept_at = -math.inf
        self.version = 0
        """Grows when the state directory or a log follower has to look: a worker comes, goes, or is elsewhere."""

    def __repr__(self) -> str:
        return f"<Registry {', '.join(worker.id for worker in self)}>"

    def __iter__(self) -> Iterator[WorkerRecord]:
        return iter(self._table)

    def get(self, worker_id: str) -> WorkerRecord | None:
        """Return the worker of this id."""
        return self._table.get(worker_id)

    def keeper(self, tag: str) -> WorkerRecord | None:
        """Return the worker that keeps the responses with this tag in their ids."""
        return self._table.keeper(tag)

    def endpoint_of(self, worker: WorkerRecord) -> Endpoint | None:
        """Return where a worker's requests go, known from its first heartbeat on."""
        return self._table.endpoint_of(worker)

    def state(self, worker: WorkerRecord, *, sees_drain: bool = True) -> State:
        """Return the state of a worker now; see `WorkerRecord.state`."""
        return self._table.state(worker, sees_drain=sees_drain)

    def why_not_ready(self, worker: WorkerRecord) -> str:
        """Return in a few words why a worker that is not ready gets no requests."""
        return self._table.why_not_ready(worker)

    def _begin(self, worker: WorkerRecord) -> None:
        """Forget what was known of an earlier start of a worker."""
        worker.begin()
        if (endpoint := self._table.endpoint_of(worker)) is not None:
            endpoint.begin()

    def state_until(self, worker: WorkerRecord) -> float:
        """Return the time at which the state of a worker changes if nothing is heard of it until then."""
        return self._table.state_until(worker)

    def is_away(self, worker: WorkerRecord) -> bool:
        """Return whether a worker has been silent for a while, or has ended."""
        return self.state(worker) in AWAY

    def expect(self, worker_id: str, names: list[str], unix_socket: str | None = None) -> WorkerRecord:
        """Add a worker that is being started here, before its first heartbeat."""
        worker = WorkerRecord(worker_id, managed=True, expected=names, unix_socket=unix_socket)
        self._table.add(worker)
        self._record_change(worker)
        return worker

    def configure(
        self,
        worker: WorkerRecord,
        *,
        names: list[str],
        max_in_flight: int | None,
        settings: Mapping[str, Any],
        on_demand: bool = False,
    ) -> None:
        """Set what a managed worker will serve, how many requests at once, and what operators see of its settings.

        `on_demand` says that it has a process only while its model is wanted. Such a worker keeps its adapters' names.
        """
        if not on_demand or worker.expected[:1] != names[:1]:
            worker.expected = names
        worker.max_in_flight, worker.settings, worker.on_demand = max_in_flight, settings, on_demand
        self._set_concurrency(worker)
        self._record_change(worker)

    def drain(self, worker: WorkerRecord) -> None:
        """Send a managed worker no more requests: it is about to be stopped."""
        worker.is_draining = True
        self._table.refresh(worker)
        self._notify()

    def resume(self, worker: WorkerRecord) -> None:
        """Send a managed worker requests again: it is not stopped after all."""
        worker.is_draining = False
        self._table.refresh(worker)
        self._notify()

    def cool(self, worker: WorkerRecord, end: WorkerEnd | None = None) -> None:
        """Record that a worker that is loaded on demand has no process now, and is loaded once somebody asks for it.

        `end` says how its process ended, if that was not asked for.
        """
        self._begin(worker)
        worker.is_cold, worker.ready_at, worker.end = True, None, end or worker.end
        self._record_change(worker)

    def expect_ready(self, worker: WorkerRecord, at: float | None) -> None:
        """Record when a worker that is being loaded will probably be ready; None: not known."""
        worker.ready_at = at

    def restart(self, worker: WorkerRecord) -> None:
        """Count another start of a managed worker, unless it was cold, and forget what was known of the one before."""
        worker.restarts += not worker.is_cold
        self._begin(worker)
        self._record_change(worker)

    def set_piped(self, worker: WorkerRecord, *, is_piped: bool) -> None:
        """Set whether the output of a managed worker comes through a pipe of this gateway."""
        worker.is_piped = is_piped
        self._record_change(worker)

    def remove(self, worker: WorkerRecord) -> None:
        """Forget a worker."""
        if self._table.get(worker.id) is worker:
            self._table.remove(worker)
            self._record_change(worker)

    def _record_change(self, worker: WorkerRecord) -> None:
        """Record a change of a worker that the next gateway should know of."""
        self._table.refresh(worker)
        self.version += 1
        self._notify()

    def snapshot(self) -> list[tuple[Heartbeat, float, PackedArgs | None]]:
        """Return the newest heartbeats of the workers that were not started here, each with its age in seconds.

        The arguments are those of workers that may never send them again; others do once they are heard of.
        """
        now = self._clock()
        return [
            (worker.heartbeat, now - worker.heard_at, worker.args if worker.is_foreign else None)
            for worker in self._table
            if worker.heartbeat and not worker.managed and not worker.is_down
        ]

    def restore(
        self, heartbeat: Heartbeat, age_s: float, *, can_return: bool = False, sender: str | None = None
    ) -> None:
        """Add a worker from before the gateway's start, stale until its next heartbeat.

        `can_return` says whether it has shown the token that is needed now. If so, a worker that is not iChat's own,
        and may never send a heartbeat again, returns as soon as it answers a health check. `sender` is as for
        heartbeats.
        """
        if self._table.get(heartbeat.worker_id) is None and len(self._table) < self._workers_max and age_s < FORGET_S:
            if self._weigh(heartbeat, None, sender) is not None:
                return
            worker = WorkerRecord(heartbeat.worker_id, managed=False)
            self._record(worker, heartbeat, self._clock() - age_s)
            worker.is_stale, worker.can_return = True, can_return and worker.is_foreign
            self._table.add(worker)
            if worker.can_return:
                self._place(worker, heartbeat)
            self._table.refresh(worker)

    def record_heartbeat(
        self, heartbeat: Heartbeat, sender: str | None = None
    ) -> bool | TooManyWorkers | TooMuchRegistered:
        """Record a heartbeat; return whether the worker was new. A good-bye removes a worker from elsewhere.

        `sender` is whose share of what may be registered a worker from elsewhere takes; None: nobody's.
        """
        for silent in self._table.pop_expired():
            self.remove(silent)
        known = self._table.get(heartbeat.worker_id)
        if heartbeat.state == "gone" and known is not None:
            if known.heartbeat and known.heartbeat.start_id != heartbeat.start_id:
                return False  # of an earlier start
            self._table.break_group_of(known, "has failed" if heartbeat.failure else "has ended")
        if heartbeat.state == "gone" and not (known and known.managed):
            if known is not None:
                self._record_goodbye(known, heartbeat)
            return False
        if known is None and len(self._table) >= self._workers_max:
            return TooManyWorkers(self._workers_max)
        if (refusal := self._weigh(heartbeat, known, sender)) is not None:
            return refusal
        worker = known or self._add(heartbeat)
        before, changes = worker.heartbeat, (self.version, self._table.changes)
        if before is not None and (before.start_id, before.pid) != (heartbeat.start_id, heartbeat.pid):
            self._table.break_group_of(worker, "was started again")
            self._begin(worker)
        self._update(worker, heartbeat, is_new=known is None)
        if heartbeat.state not in ("draining", "gone"):
            worker.last_healthy_at = worker.heartbeat_at
        worker.known_since = min(worker.known_since, worker.heartbeat_at)
        self._place(worker, heartbeat)
        self._table.refresh(worker)
        if worker.managed or changes != (self.version, self._table.changes):
            self._notify()
        return known is None

    def _weigh(self, heartbeat: Heartbeat, known: WorkerRecord | None, sender: str | None) -> TooMuchRegistered | None:
        """Count what a worker from elsewhere has the gateway keep; return the limit that it would pass, if it does."""
        if sender is None or (known is not None and known.managed):
            return None
        args = self._packer.pack(heartbeat.args) if heartbeat.args else known.args if known is not None else None
        return self._table.weights.admit(heartbeat, args, sender)

    def _add(self, heartbeat: Heartbeat) -> WorkerRecord:
        worker = WorkerRecord(heartbeat.worker_id, managed=False)
        self._table.add(worker)
        hidden = self.external.keys() & set(names_of(heartbeat))
        if hidden:
            log.warning("worker %s gets no requests for %s: external routes have that name", worker.id, sorted(hidden))
        return worker

    def _set_concurrency(self, worker: WorkerRecord) -> None:
        if (endpoint := self._table.endpoint_of(worker)) is not None and worker.heartbeat:
            endpoint.in_flight_max = worker.max_in_flight or worker.heartbeat.max_in_flight or self.max_in_flight

    def reconfigure(self, config: Config) -> None:
        """Use the limits and circuit breakers of another configuration; counts and circuits keep their state."""
        self.max_in_flight, self._workers_max = config.routing.max_in_flight, config.limits.workers_max
        self._circuit_breaker, self._table.weights.limits = config.circuit_breaker, config.limits
        for worker in self._table:
            self._set_concurrency(worker)
        for endpoint in (*self._table.endpoints(), *self._routes()):
            endpoint.circuit.settings = config.circuit_breaker
        self._table.refresh_all(config.timeouts.wedged_after_s)
        self._notify()

    def _routes(self) -> Iterator[Endpoint]:
        """Return the endpoints of all external routes."""
        return itertools.chain.from_iterable(self.external.values())

    def require_reauthentication(self) -> None:
        """Send workers from elsewhere nothing until their next heartbeat, since they must now know another token."""
        for worker in self._table:
            worker.is_stale = worker.is_stale or not worker.managed
            worker.can_return = False
        self._table.refresh_all()
        self._notify()

    def _record_goodbye(self, worker: WorkerRecord, heartbeat: Heartbeat) -> None:
        """Forget a worker that has ended in good order; one that failed is shown for a while."""
        if not heartbeat.failure:
            self.remove(worker)
            return
        log.error("worker %s %s", worker.id, heartbeat.failure)
        self._update(worker, heartbeat, is_new=False)
        self.fail(worker, WorkerEnd("has failed", time.time(), cause=heartbeat.failure))

    def _update(self, worker: WorkerRecord, heartbeat: Heartbeat, *, is_new: bool) -> None:
        """Record the newest heartbeat of a worker."""
        before = worker.heartbeat
        place = ("host", "port", "start_id", "pid", "model_names", "state", "max_in_flight")
        if is_new or worker.is_stale or any(getattr(before, name, None) != getattr(heartbeat, name) for name in place):
            self.version += 1
        self._record(worker, heartbeat, self._clock())
        if not worker.managed:
            worker.is_down = False
        worker.note_steps(heartbeat, worker.heartbeat_at)

    def _record(self, worker: WorkerRecord, heartbeat: Heartbeat, now: float) -> None:
        if heartbeat.args:
            worker.args = self._packer.pack(heartbeat.args)
            heartbeat = attrs.evolve(heartbeat, args={})
        worker.record_heartbeat(heartbeat, now)

    def _place(self, worker: WorkerRecord, heartbeat: Heartbeat) -> None:
        """Make the worker's endpoint, or correct it by what the worker says of itself."""
        endpoint = self._table.place(worker, heartbeat, self._circuit_breaker)
        self._set_concurrency(worker)
        endpoint.reports_prefixes, endpoint.reports_usage = heartbeat.prefix_reports, heartbeat.usage_reports
        if heartbeat.state == "asleep":  # with an empty cache
            endpoint.forget_prefixes()
        counts = (heartbeat.progress.get("running"), heartbeat.progress.get("waiting"))
        endpoint.report(int(sum(count for count in counts if count is not None)), self._clock())

    def stopped(self, worker: WorkerRecord) -> None:
        """Record that a managed worker was ended on purpose."""
        self._table.break_group_of(worker, "was stopped")

    def fail(self, worker: WorkerRecord, end: WorkerEnd, retry_at: float | None = None) -> None:
        """Record how a worker ended by itself, and when it will be started again."""
        if not worker.is_down:
            self._table.break_group_of(worker, end.why)
        worker.end, worker.is_down, worker.retry_at, worker.ready_at = end, True, retry_at, None
        self._record_change(worker)

    def lost(self, worker_id: str) -> list[PeerLoss]:
        """Return what the group of a worker has lost, or seems to have lost, since this worker is there."""
        worker = self._table.get(worker_id)
        return [] if worker is None else groups.losses_of(worker, self._table.group_of(worker), self._clock())

    def to_probe(self) -> list[tuple[Endpoint, WorkerRecord | None]]:
        """Return what health checks ask: workers that are not iChat's own, and routes with a health path."""
        return [
            *(
                (endpoint, worker)
                for worker in self._table
                if worker.is_foreign and (endpoint := self.endpoint_of(worker)) is not None and not worker.is_down
                if worker.can_return or not worker.is_stale
            ),
            *((endpoint, None) for endpoint in self._routes() if endpoint.route and endpoint.route.health_path),
        ]

    def probed(
        self, endpoint: Endpoint, worker: WorkerRecord | None, why: str, *, is_well: bool, failures_max: int
    ) -> None:
        """Record the result of a health check: healthy, `why` not, or nothing.

        A healthy worker can be reached, and need not send heartbeats.
        """
        now, changes = self._clock(), (self.version, self._table.changes)
        has_changed = record_probe(endpoint, worker, why, now, is_well=is_well, failures_max=failures_max)
        if worker is None:
            self._has_ill_routes = any(route.health_failure for route in self._routes())
        else:
            if is_well and now - self._kept_at > KEEP_S:  # the time is kept, if roughly
                self._kept_at, self.version = now, self.version + 1
            self._table.refresh(worker)
        if has_changed or changes != (self.version, self._table.changes):
            self._notify()

    def forget_probes(self) -> None:
        """Forget the results of health checks: there are none any more."""
        for endpoint in (*self._table.endpoints(), *self._routes()):
            endpoint.forget_probes()
        self._has_ill_routes = False
        for worker in self._table:
            worker.answers = False
            self._table.refresh(worker)

    def wants_machine(self, worker_id: str) -> bool:
        """Return whether a worker has not told yet, at this start of the gateway, what machine it runs on."""
        worker = self._table.get(worker_id)
        return worker is not None and worker.machine is None

    def machines(self) -> list[tuple[str, Machine]]:
        """Return what the workers that are there tell of their machines, by their ids, the newest first."""
        newest = sorted(self._table, key=lambda worker: worker.heartbeat_at, reverse=True)
        return [(worker.id, worker.machine) for worker in newest if worker.machine and not self.is_away(worker)]

    def describe(self, worker: WorkerRecord) -> Mapping[str, Any]:
        """Return everything known of a worker, as JSON can hold it."""
        return describe(worker, self.endpoint_of(worker), self.state(worker), self.lost(worker.id), self._clock())
