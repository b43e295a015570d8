"""How workers from elsewhere become known, and what heartbeats change. Purely synchronous."""

import logging
import time
from collections.abc import Mapping

import attrs

from ichat.config.schema import Config, Limits
from ichat.fleet.load_times import WorkerLoads
from ichat.fleet.model_directory import ModelDirectory
from ichat.fleet.packed_args import ArgsPacker, PackedArgs
from ichat.fleet.registered_servers import Server
from ichat.fleet.weights import Weights
from ichat.fleet.worker_facts import Registration, WorkerEnd
from ichat.fleet.worker_record import WorkerRecord
from ichat.fleet.worker_table import FORGET_S, WorkerTable
from ichat.protocol.messages import Heartbeat, names_of
from ichat.routing.availability import TooManyWorkers, TooMuchRegistered

log = logging.getLogger(__name__)


@attrs.frozen
class Recorded:
    """The result of a heartbeat that was recorded."""

    is_new: bool = False
    """Whether the worker was not known before."""
    has_moved: bool = False
    """Whether another start of it is reached now, or it is reached elsewhere or no longer."""


class Registry:
    """Records heartbeats, and registers workers by them, by the state directory and by the configuration."""

    def __init__(self, table: WorkerTable, directory: ModelDirectory, loads: WorkerLoads, weights: Weights) -> None:
        """`weights` is the memory for the workers that joined."""
        self._table = table
        self._directory = directory
        self._loads = loads
        self._weights = weights
        self._workers_max = Limits().workers_max
        self._packer = ArgsPacker()

    def __repr__(self) -> str:
        return f"<Registry of {self._table!r}>"

    def reconfigure(self, config: Config) -> None:
        """Use the limits of another configuration from the next heartbeat on."""
        self._workers_max = config.limits.workers_max
        self._weights.reconfigure(config.limits)

    def snapshot(self) -> list[tuple[Heartbeat, float, PackedArgs | None]]:
        """Return the newest heartbeats of the workers that were not started here, each with its age in seconds.

        The arguments are those of workers that may never send them again; others do once they are heard of.
        """
        now = self._table.clock()
        return [
            (worker.heartbeat, now - worker.heard_at, worker.args if worker.is_foreign else None)
            for worker in self._table
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
        if self._table.get(heartbeat.worker_id) is None and len(self._table) < self._workers_max and age_s < FORGET_S:
            if self._weigh(heartbeat, None, sender) is not None:
                return
            worker = WorkerRecord(heartbeat.worker_id, managed=False)
            self._record(worker, heartbeat, self._table.clock() - age_s)
            worker.is_stale, worker.can_return, worker.load = True, can_return and worker.is_foreign, None
            self._table.enter(worker)
            if worker.can_return:
                self._table.place(worker, heartbeat)
            self._table.refresh(worker)

    def record_heartbeat(
        self, heartbeat: Heartbeat, sender: str | None = None, registration: Registration | None = None
    ) -> Recorded | TooManyWorkers | TooMuchRegistered:
        """Record a heartbeat, or return the limit that it would pass. A good-bye removes a worker from elsewhere.

        `sender` is the party with the share of registrations that a worker from elsewhere counts in; None: no party.
        `registration` is that of a whole heartbeat.
        """
        known = self._table.get(heartbeat.worker_id)
        before = known.place if known is not None else None
        is_new = self._admit(heartbeat, sender)
        if not isinstance(is_new, bool):
            return is_new
        worker = self._table.get(heartbeat.worker_id)
        if worker is not None and registration is not None and heartbeat.state != "gone":
            worker.registered(registration)
        return Recorded(is_new, (worker.place if worker is not None else None) != before)

    def _admit(self, heartbeat: Heartbeat, sender: str | None) -> bool | TooManyWorkers | TooMuchRegistered:
        """Record a heartbeat; return whether the worker was new, or the limit that it would pass."""
        self._table.remove_silent()
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
        before, changes = worker.heartbeat, (self._table.version, self._table.changes)
        if before is not None and (before.start_id, before.pid) != (heartbeat.start_id, heartbeat.pid):
            self._table.break_group_of(worker, "was started again")
            self._table.begin(worker)
        self._update(worker, heartbeat, is_new=known is None)
        if heartbeat.state not in ("draining", "gone"):
            worker.last_healthy_at = worker.heartbeat_at
        worker.known_since = min(worker.known_since, worker.heartbeat_at)
        self._table.place(worker, heartbeat)
        self._table.refresh(worker)
        if worker.managed or changes != (self._table.version, self._table.changes):
            self._table.changed()
        return known is None

    def _weigh(self, heartbeat: Heartbeat, known: WorkerRecord | None, sender: str | None) -> TooMuchRegistered | None:
        """Count the memory for a worker from elsewhere in the gateway; return the limit that it would pass, if any."""
        if sender is None or (known is not None and known.managed):
            return None
        args = self._packer.pack(heartbeat.args) if heartbeat.args else known.args if known is not None else None
        return self._weights.admit(heartbeat, args, sender)

    def _add(self, heartbeat: Heartbeat) -> WorkerRecord:
        worker = WorkerRecord(heartbeat.worker_id, managed=False)
        self._table.enter(worker)
        hidden = self._directory.external.keys() & set(names_of(heartbeat))
        if hidden:
            log.warning("worker %s gets no requests for %s: external routes have that name", worker.id, sorted(hidden))
        return worker

    def use_servers(self, servers: Mapping[str, Server]) -> None:
        """Make these servers of the configuration workers, in place of those of the configuration before.

        A server keeps its counts if its table is the same, and gets its new certificates and key.
        """
        for worker in self._table:
            if worker.server is not None and worker.id not in servers:
                self._table.remove(worker)
        for server in servers.values():
            known = self._table.get(server.worker_id)
            endpoint = self._table.endpoint_of(known) if known is not None else None
            before = known.server if known is not None else None
            if known is not None and endpoint is not None and before is not None and before.settings == server.settings:
                known.server = server
                endpoint.reconfigure(server.upstream, server.access)
                continue
            settings, upstream = server.settings, server.upstream
            worker = WorkerRecord(server.worker_id, managed=False, server=server, max_in_flight=settings.max_in_flight)
            worker.settings = {"api_base": settings.api_base}
            heartbeat = Heartbeat(server.worker_id, settings.model_name, upstream.host, upstream.port)
            self._record(worker, heartbeat, self._table.clock())
            self._table.enter(worker)
            self._table.place(worker, heartbeat)
            self._table.record_change(worker)

    def _record_goodbye(self, worker: WorkerRecord, heartbeat: Heartbeat) -> None:
        """Forget a worker that has ended in good order; a worker that failed is shown for a while."""
        if not heartbeat.failure:
            self._table.remove(worker)
            return
        log.error("worker %s %s", worker.id, heartbeat.failure)
        self._update(worker, heartbeat, is_new=False)
        self._table.fail(worker, WorkerEnd("has failed", time.time(), cause=heartbeat.failure))

    def _update(self, worker: WorkerRecord, heartbeat: Heartbeat, *, is_new: bool) -> None:
        """Record the newest heartbeat of a worker."""
        before = worker.heartbeat
        place = ("host", "port", "start_id", "pid", "model_names", "state", "max_in_flight")
        if is_new or worker.is_stale or any(getattr(before, name, None) != getattr(heartbeat, name) for name in place):
            self._table.outdate()
        self._record(worker, heartbeat, self._table.clock())
        if not worker.managed:
            worker.absence = ""
        worker.note_steps(heartbeat, worker.heartbeat_at)

    def _record(self, worker: WorkerRecord, heartbeat: Heartbeat, now: float) -> None:
        if heartbeat.args:
            worker.args = self._packer.pack(heartbeat.args)
            heartbeat = attrs.evolve(heartbeat, args={})
        self._loads.record(worker, worker.record_heartbeat(heartbeat, now))
