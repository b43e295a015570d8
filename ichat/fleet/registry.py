"""The gateway's picture of its workers and models. Purely synchronous: each decision is made in a single step."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from ichat.config.schema import CircuitBreaker, Config, Limits
from ichat.fleet import groups
from ichat.fleet.packed_args import ArgsPacker, PackedArgs
from ichat.fleet.probes import ProbedFleet
from ichat.fleet.registered_servers import Server
from ichat.fleet.views import describe
from ichat.fleet.worker_facts import Registration, WorkerEnd
from ichat.fleet.worker_record import AWAY, WorkerRecord
from ichat.fleet.worker_table import FORGET_S
from ichat.protocol.messages import Heartbeat, Machine, PeerLoss, names_of
from ichat.routing.availability import TooManyWorkers, TooMuchRegistered
from ichat.routing.endpoint import Endpoint

log = logging.getLogger(__name__)


@attrs.frozen
class Recorded:
    """The result of a heartbeat that was recorded."""

    is_new: bool = False
    """Whether the worker was not known before."""
    has_moved: bool = False
    """Whether another start of it is reached now, or it is reached elsewhere or no longer."""


class Registry(ProbedFleet):
    """The workers by their ids, and the endpoints of each model."""

    def __init__(
        self,
        external: Mapping[str, Sequence[Endpoint]],
        clock: Callable[[], float],
        max_in_flight: int,
        wedged_after_s: float = math.inf,
    ) -> None:
        """`external` has the endpoints of each external model; `max_in_flight` is the default of a worker."""
        super().__init__(external, clock, max_in_flight, wedged_after_s)
        self._workers_max = Limits().workers_max
        self._packer = ArgsPacker()
        self._circuit_breaker = CircuitBreaker()

    def __repr__(self) -> str:
        return f"<Registry {', '.join(worker.id for worker in self)}>"

    def is_away(self, worker: WorkerRecord) -> bool:
        """Return whether a worker has been silent for a while, or has ended."""
        return self.state(worker) in AWAY

    def remove(self, worker: WorkerRecord) -> None:
        """Forget a worker."""
        if self.get(worker.id) is worker:
            self._drop(worker)
            self._record_change(worker)

    def snapshot(self) -> list[tuple[Heartbeat, float, PackedArgs | None]]:
        """Return the newest heartbeats of the workers that were not started here, each with its age in seconds.

        The arguments are those of workers that may never send them again; others do once they are heard of.
        """
        now = self._clock()
        return [
            (worker.heartbeat, now - worker.heard_at, worker.args if worker.is_foreign else None)
            for worker in self
            if worker.heartbeat and not worker.managed and not worker.is_down and worker.server is None
        ]

    def restore(
        self, heartbeat: Heartbeat, age_s: float, *, can_return: bool = False, sender: str | None = None
    ) -> None:
        """Add a worker from before the gateway's start, stale until its next heartbeat.

        `can_return` says whether it has shown the token that is needed now. If so, a worker that is not iChat's own,
        and may never send a heartbeat again, returns as soon as it answers a health check. `sender` is as for
        heartbeats.
        """
        if self.get(heartbeat.worker_id) is None and len(self) < self._workers_max and age_s < FORGET_S:
            if self._weigh(heartbeat, None, sender) is not None:
                return
            worker = WorkerRecord(heartbeat.worker_id, managed=False)
            self._record(worker, heartbeat, self._clock() - age_s)
            worker.is_stale, worker.can_return, worker.load = True, can_return and worker.is_foreign, None
            self._enter(worker)
            if worker.can_return:
                self._place(worker, heartbeat)
            self.refresh(worker)

    def record_heartbeat(
        self, heartbeat: Heartbeat, sender: str | None = None, registration: Registration | None = None
    ) -> Recorded | TooManyWorkers | TooMuchRegistered:
        """Record a heartbeat, or return the limit that it would pass. A good-bye removes a worker from elsewhere.

        `sender` is the party with the share of registrations that a worker from elsewhere counts in; None: no party.
        `registration` is that of a whole heartbeat.
        """
        known = self.get(heartbeat.worker_id)
        before = known.place if known is not None else None
        is_new = self._admit(heartbeat, sender)
        if not isinstance(is_new, bool):
            return is_new
        worker = self.get(heartbeat.worker_id)
        if worker is not None and registration is not None and heartbeat.state != "gone":
            worker.registered(registration)
        return Recorded(is_new, (worker.place if worker is not None else None) != before)

    def _admit(self, heartbeat: Heartbeat, sender: str | None) -> bool | TooManyWorkers | TooMuchRegistered:
        """Record a heartbeat; return whether the worker was new, or the limit that it would pass."""
        for silent in self._pop_expired():
            self.remove(silent)
        known = self.get(heartbeat.worker_id)
        if heartbeat.state == "gone" and known is not None:
            if known.heartbeat and known.heartbeat.start_id != heartbeat.start_id:
                return False  # of an earlier start
            self._break_group_of(known, "has failed" if heartbeat.failure else "has ended")
        if heartbeat.state == "gone" and not (known and known.managed):
            if known is not None:
                self._record_goodbye(known, heartbeat)
            return False
        if known is None and len(self) >= self._workers_max:
            return TooManyWorkers(self._workers_max)
        if (refusal := self._weigh(heartbeat, known, sender)) is not None:
            return refusal
        worker = known or self._add(heartbeat)
        before, changes = worker.heartbeat, (self.version, self.changes)
        if before is not None and (before.start_id, before.pid) != (heartbeat.start_id, heartbeat.pid):
            self._break_group_of(worker, "was started again")
            self._begin(worker)
        self._update(worker, heartbeat, is_new=known is None)
        if heartbeat.state not in ("draining", "gone"):
            worker.last_healthy_at = worker.heartbeat_at
        worker.known_since = min(worker.known_since, worker.heartbeat_at)
        self._place(worker, heartbeat)
        self.refresh(worker)
        if worker.managed or changes != (self.version, self.changes):
            self.changed()
        return known is None

    def _weigh(self, heartbeat: Heartbeat, known: WorkerRecord | None, sender: str | None) -> TooMuchRegistered | None:
        """Count the memory for a worker from elsewhere in the gateway; return the limit that it would pass, if any."""
        if sender is None or (known is not None and known.managed):
            return None
        args = self._packer.pack(heartbeat.args) if heartbeat.args else known.args if known is not None else None
        return self.weights.admit(heartbeat, args, sender)

    def _add(self, heartbeat: Heartbeat) -> WorkerRecord:
        worker = WorkerRecord(heartbeat.worker_id, managed=False)
        self._enter(worker)
        hidden = self.external.keys() & set(names_of(heartbeat))
        if hidden:
            log.warning("worker %s gets no requests for %s: external routes have that name", worker.id, sorted(hidden))
        return worker

    def reconfigure(self, config: Config) -> None:
        """Use the limits and circuit breakers of another configuration; counts and circuits keep their state."""
        before, self.max_in_flight = self.max_in_flight, config.routing.max_in_flight
        self._workers_max = config.limits.workers_max
        if before != self.max_in_flight:
            for worker in self:
                self._set_concurrency(worker)
        for route in self.routes():  # they may be new
            route.circuit.reconfigure(config.circuit_breaker)
        if self._circuit_breaker != config.circuit_breaker:
            self._circuit_breaker = config.circuit_breaker
            for endpoint in self.endpoints():
                endpoint.circuit.reconfigure(config.circuit_breaker)
        self._use_limits(config)
        self.changed()

    def use_servers(self, servers: Mapping[str, Server]) -> None:
        """Make these servers of the configuration workers, in place of those of the configuration before.

        A server keeps its counts if its table is the same, and gets its new certificates and key.
        """
        for worker in self:
            if worker.server is not None and worker.id not in servers:
                self.remove(worker)
        for server in servers.values():
            known = self.get(server.worker_id)
            endpoint = self.endpoint_of(known) if known is not None else None
            before = known.server if known is not None else None
            if known is not None and endpoint is not None and before is not None and before.settings == server.settings:
                known.server = server
                endpoint.reconfigure(server.upstream, server.access)
                continue
            settings, upstream = server.settings, server.upstream
            worker = WorkerRecord(server.worker_id, managed=False, server=server, max_in_flight=settings.max_in_flight)
            worker.settings = {"api_base": settings.api_base}
            heartbeat = Heartbeat(server.worker_id, settings.model_name, upstream.host, upstream.port)
            self._record(worker, heartbeat, self._clock())
            self._enter(worker)
            self._place(worker, heartbeat)
            self._record_change(worker)

    def require_reauthentication(self) -> None:
        """Send workers from elsewhere nothing until their next heartbeat, since they must now know another token."""
        self._set_stale()
        self.changed()

    def _record_goodbye(self, worker: WorkerRecord, heartbeat: Heartbeat) -> None:
        """Forget a worker that has ended in good order; a worker that failed is shown for a while."""
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
            worker.absence = ""
        worker.note_steps(heartbeat, worker.heartbeat_at)

    def _record(self, worker: WorkerRecord, heartbeat: Heartbeat, now: float) -> None:
        if heartbeat.args:
            worker.args = self._packer.pack(heartbeat.args)
            heartbeat = attrs.evolve(heartbeat, args={})
        self.loads.record(worker, worker.record_heartbeat(heartbeat, now))

    def _place(self, worker: WorkerRecord, heartbeat: Heartbeat) -> None:
        """Make the worker's endpoint, or correct it by the worker's own report."""
        endpoint = self._find_place(worker, heartbeat, self._circuit_breaker)
        self._set_concurrency(worker)
        endpoint.record_heartbeat(heartbeat, self._clock())

    def lost(self, worker_id: str) -> list[PeerLoss]:
        """Return the members that a worker's group has lost, or seems to have lost, since this worker is there."""
        worker = self.get(worker_id)
        return [] if worker is None else groups.losses_of(worker, self.group_of(worker), self._clock())

    def machines(self) -> list[tuple[str, Machine]]:
        """Return the machines that the present workers report, by the workers' ids, the newest first."""
        newest = sorted(self, key=lambda worker: worker.heartbeat_at, reverse=True)
        return [(worker.id, worker.machine) for worker in newest if worker.machine and not self.is_away(worker)]

    def describe(self, worker: WorkerRecord) -> Mapping[str, Any]:
        """Return everything known of a worker, as JSON can hold it."""
        return describe(worker, self.endpoint_of(worker), self.state(worker), self.lost(worker.id), self._clock())
