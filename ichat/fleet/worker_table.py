"""The workers with their endpoints and states. Purely synchronous: each decision is made in a single step.

A heartbeat without changes costs a single look at a table, however many workers there are: changes by time alone are
found by their deadlines.
"""

import functools
import heapq
import itertools
import logging
import math
from collections.abc import Callable, Iterator

from ichat.config.schema import CircuitBreaker, Config
from ichat.fleet import groups
from ichat.fleet.weights import Weights
from ichat.fleet.worker_facts import WorkerEnd
from ichat.fleet.worker_index import WorkerIndex
from ichat.fleet.worker_record import AWAY, HEARTBEATS_MISSED_MAX, State, WorkerRecord
from ichat.http.pool import Upstream
from ichat.listeners import Listeners
from ichat.protocol.messages import Heartbeat, Machine, PeerLoss
from ichat.routing.circuit_breaker import Circuit
from ichat.routing.endpoint import Endpoint

log = logging.getLogger(__name__)

FORGET_S = 3600.0
FAILED_S = 600.0
"""How long a worker is shown that failed and said good-bye."""
_STALE_ENTRIES_MAX = 64
"""The heap may have this many entries more than twice the workers before stale entries are removed."""


class Deadlines:
    """When each worker must be looked at again, without looking at all of them.

    To set a later time costs nothing: the worker is then handed out too early, and must be set again.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, WorkerRecord]] = []
        self._times: dict[WorkerRecord, float] = {}
        self._numbers = itertools.count()
        self.next_at = math.inf
        """When there is something to do, at the earliest."""

    def __repr__(self) -> str:
        return f"<Deadlines of {len(self._times)} workers, the next at {self.next_at:g}>"

    def set(self, worker: WorkerRecord, at: float) -> None:
        """Hand a worker out at this time, or earlier."""
        if at < self._times.get(worker, math.inf):
            self._times[worker] = at
            heapq.heappush(self._heap, (at, next(self._numbers), worker))
            self.next_at = self._heap[0][0]
            if len(self._heap) > 2 * len(self._times) + _STALE_ENTRIES_MAX:
                self._heap = [(time, next(self._numbers), one) for one, time in self._times.items()]
                heapq.heapify(self._heap)

    def pop(self, now: float) -> list[WorkerRecord]:
        """Return the workers that are due, and forget them until they are set again."""
        found: list[WorkerRecord] = []
        while self._heap and self._heap[0][0] <= now:
            at, _, worker = heapq.heappop(self._heap)
            if self._times.get(worker) == at:
                del self._times[worker]
                found.append(worker)
        self.next_at = self._heap[0][0] if self._heap else math.inf
        return found

    def remove(self, worker: WorkerRecord) -> None:
        """Forget a worker."""
        self._times.pop(worker, None)


class WorkerTable:
    """The workers by their ids; call `refresh` after each change of a worker."""

    def __init__(
        self, clock: Callable[[], float], weights: Weights, max_in_flight: int, wedged_after_s: float = math.inf
    ) -> None:
        """`max_in_flight` is the default of a worker; `weights` forgets the workers that are removed."""
        self.clock = clock
        """Returns the time by which states change."""
        self.index = WorkerIndex()
        """The workers by model, group and response: written here alone."""
        self.changed: Listeners[[]] = Listeners()
        """Called after every change, except changes by time alone."""
        self.version = 0
        """Grows with each change of which the state directory or a log follower must know."""
        self.changes = 0
        """Grows when a worker begins or ends to be able to serve, or has other names."""
        self.proof_of: Callable[[str], bytes] = _no_proof
        """Returns the proof to a worker with a key of its own, by its id; empty for all other workers."""
        self._weights = weights
        self._max_in_flight = max_in_flight
        self._wedged_after_s = wedged_after_s
        self._circuit_breaker = CircuitBreaker()
        self._workers: dict[str, WorkerRecord] = {}
        self._endpoints: dict[str, Endpoint] = {}
        """Where the requests of workers go, by the workers' ids, with what this process has seen there."""
        self._changes = Deadlines()
        """When time alone may change the state of a worker."""
        self._expiries = Deadlines()
        """When a worker that was not started here may have been silent long enough to be forgotten."""

    def __repr__(self) -> str:
        return f"<WorkerTable {self.index!r}>"

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[WorkerRecord]:
        return iter(list(self._workers.values()))

    def get(self, worker_id: str) -> WorkerRecord | None:
        """Return the worker of this id."""
        return self._workers.get(worker_id)

    def keeper(self, tag: str) -> WorkerRecord | None:
        """Return the worker that keeps the responses with this tag in their ids."""
        return self.index.of_tag(tag)

    def endpoint_of(self, worker: WorkerRecord) -> Endpoint | None:
        """Return where a worker's requests go, known from its first heartbeat on."""
        return self._endpoints.get(worker.id)

    def state(self, worker: WorkerRecord, *, sees_drain: bool = True) -> State:
        """Return the state of a worker now; see `WorkerRecord.state`."""
        return worker.state(self.clock(), self._wedged_after_s, self.trouble_of(worker), sees_drain=sees_drain)

    def state_until(self, worker: WorkerRecord) -> float:
        """Return the time at which the state of a worker changes if nothing is heard of it until then."""
        return worker.state_until(self.clock(), self._wedged_after_s)

    def trouble_of(self, worker: WorkerRecord) -> str:
        """Return why a worker's endpoint cannot be used now, in a few words; empty if it can, or there is none."""
        endpoint = self._endpoints.get(worker.id)
        return endpoint.trouble if endpoint is not None else ""

    def why_not_ready(self, worker: WorkerRecord) -> str:
        """Return in a few words why a worker that is not ready gets no requests."""
        return worker.why_not_ready(self.clock(), self._wedged_after_s, self.trouble_of(worker))

    def lost(self, worker_id: str) -> list[PeerLoss]:
        """Return the members that a worker's group has lost, or seems to have lost, since this worker is there."""
        worker = self.get(worker_id)
        return [] if worker is None else groups.losses_of(worker, self.index.of_group(worker), self.clock())

    def machines(self) -> list[tuple[str, Machine]]:
        """Return the machines that the present workers report, by the workers' ids, the newest first."""
        newest = sorted(self, key=lambda worker: worker.heartbeat_at, reverse=True)
        return [(worker.id, worker.machine) for worker in newest if worker.machine and self.state(worker) not in AWAY]

    def enter(self, worker: WorkerRecord) -> None:
        """Add a worker, in place of another one of its id."""
        if (before := self._workers.get(worker.id)) is not None:
            self._drop(before)
        self._workers[worker.id] = worker

    def remove(self, worker: WorkerRecord) -> None:
        """Forget a worker."""
        if self.get(worker.id) is worker:
            self._drop(worker)
            self.record_change(worker)

    def _drop(self, worker: WorkerRecord) -> None:
        del self._workers[worker.id]
        if (endpoint := self._endpoints.pop(worker.id, None)) is not None:
            endpoint.forget_prefixes()  # or the index of prefixes would keep it for good
        self.index.remove(worker)
        self._changes.remove(worker)
        self._expiries.remove(worker)
        self._weights.forget(worker.id)

    def remove_silent(self) -> None:
        """Forget the workers that have been silent for too long."""
        now = self.clock()
        if now >= self._expiries.next_at:
            for worker in self._expiries.pop(now):
                at = _expires_at(worker)
                if now >= at:
                    self.remove(worker)
                else:
                    self._expiries.set(worker, at)

    def place(self, worker: WorkerRecord, heartbeat: Heartbeat) -> None:
        """Make the worker's endpoint, or correct it by the worker's own report."""
        host, port = heartbeat.host, heartbeat.port
        if worker.unix_socket and heartbeat.unix_socket:
            host, port = worker.unix_socket, 0
        endpoint = self._endpoints.get(worker.id)
        if endpoint is None:
            server, circuit = worker.server, Circuit(self._circuit_breaker)
            upstream = Upstream(f"worker {worker.id}", host, port) if server is None else server.upstream
            access = None if server is None else server.access
            endpoint = Endpoint(upstream, worker.id.encode(), heartbeat.max_in_flight, access=access, circuit=circuit)
            endpoint.troubled.add(functools.partial(self.refresh, worker))
            self._endpoints[worker.id] = endpoint
        elif (endpoint.upstream.host, endpoint.upstream.port) != (host, port):
            endpoint.move(Upstream(f"worker {worker.id}", host, port))
            worker.answers = False
        endpoint.use_proof(self.proof_of(worker.id))
        self.limit(worker)
        endpoint.record_heartbeat(heartbeat, self.clock())

    def use_proofs(self, proof_of: Callable[[str], bytes]) -> None:
        """Have this function return the proofs to workers with keys of their own."""
        self.proof_of = proof_of

    def limit(self, worker: WorkerRecord) -> None:
        """Limit the requests of a worker to its own number, or to the default."""
        if (endpoint := self.endpoint_of(worker)) is not None and worker.heartbeat:
            endpoint.limit(worker.max_in_flight or worker.heartbeat.max_in_flight or self._max_in_flight)

    def begin(self, worker: WorkerRecord) -> None:
        """Forget the facts of an earlier start of a worker."""
        worker.begin()
        worker.began_at = self.clock() if worker.managed else None
        if (endpoint := self.endpoint_of(worker)) is not None:
            endpoint.begin()

    def fail(self, worker: WorkerRecord, end: WorkerEnd, retry_at: float | None = None) -> None:
        """Record how a worker ended by itself, and when it will be started again."""
        if not worker.is_down:
            self.break_group_of(worker, end.why)
        worker.end, worker.absence, worker.retry_at, worker.ready_at = end, "down", retry_at, None
        worker.load = None
        self.record_change(worker)

    def break_group_of(self, gone: WorkerRecord, why: str) -> None:
        """Record for the other members of a group that a member has ended: none of them is of any use now."""
        for other in groups.broken_by(gone, self.index.of_group(gone), self.clock()):
            log.error("the group of worker %s is broken: worker %s %s", other.id, gone.id, why)
            other.lost = groups.loss_of(gone, why, is_certain=True)
            self.refresh(other)

    def refresh(self, worker: WorkerRecord) -> None:
        """Find out anew whether a worker can serve."""
        if self._workers.get(worker.id) is not worker:
            return
        is_ready = self.state(worker) == "ready"
        self._changes.set(worker, self.state_until(worker))
        if not worker.managed and worker.server is None:
            self._expiries.set(worker, _expires_at(worker))
        endpoint = self._endpoints.get(worker.id) if is_ready else None
        if endpoint is not None and worker not in self.index.all_ready():
            endpoint.ready_again(worker.context_tokens, self.clock())
        self.changes += self.index.update(worker, endpoint)

    def refresh_due(self) -> None:
        """Find out again whether the workers can serve that may have changed by time alone."""
        now = self.clock()
        if now >= self._changes.next_at:
            for worker in self._changes.pop(now):
                self.refresh(worker)

    def record_change(self, worker: WorkerRecord) -> None:
        """Record a change of a worker that the next gateway should know of."""
        self.refresh(worker)
        self.outdate()
        self.changed()

    def outdate(self) -> None:
        """Count a change of which the state directory or a log follower must know; the caller calls `changed`."""
        self.version += 1

    def require_reauthentication(self) -> None:
        """Send workers from elsewhere nothing until their next heartbeat, since they must now know another token.

        No health check is enough.
        """
        for worker in self._workers.values():
            worker.can_return = False
            if not worker.managed and worker.server is None:  # what time alone changes of it stays as it is
                worker.is_stale = True
                self.changes += self.index.set_not_ready(worker)
        self.changed()

    def trust_all(self) -> None:
        """Count on all workers as they are now, since no more heartbeats arrive here."""
        for worker in self._workers.values():
            worker.answers = True
            self.refresh(worker)

    def reconfigure(self, config: Config) -> None:
        """Use the limits, times and circuit breakers of another configuration; counts and circuits keep their state.

        After another time, other workers are wedged.
        """
        before, self._max_in_flight = self._max_in_flight, config.routing.max_in_flight
        if before != self._max_in_flight:
            for worker in self._workers.values():
                self.limit(worker)
        if self._circuit_breaker != config.circuit_breaker:
            self._circuit_breaker = config.circuit_breaker
            for endpoint in self._endpoints.values():
                endpoint.circuit.reconfigure(config.circuit_breaker)
        seconds = config.timeouts.wedged_after_s
        if seconds != self._wedged_after_s:
            self._wedged_after_s = seconds
            for worker in self._workers.values():
                if worker.stuck_since < math.inf:
                    self.refresh(worker)


def _no_proof(_worker_id: str) -> bytes:
    """Return no proof: no worker has a key of its own."""
    return b""


def _expires_at(worker: WorkerRecord) -> float:
    """Return when a worker from elsewhere has been silent long enough to be forgotten."""
    interval_s = worker.heartbeat.heartbeat_interval if worker.heartbeat else 0
    keep_s = FAILED_S if worker.is_down else max(FORGET_S, interval_s * HEARTBEATS_MISSED_MAX)
    return math.nextafter(worker.heard_at + keep_s, math.inf)
