"""The workers with their endpoints, and which of them can serve a model now. Purely synchronous.

A request costs one look at a table. A heartbeat without changes costs no more, however many workers there are:
changes by time alone are found by their deadlines.
"""

import functools
import heapq
import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterator

from ichat.config.schema import CircuitBreaker, Config, Limits
from ichat.fleet import groups
from ichat.fleet.weights import Weights
from ichat.fleet.worker_index import WorkerIndex
from ichat.fleet.worker_record import HEARTBEATS_MISSED_MAX, State, WorkerRecord, told_of
from ichat.http.pool import Upstream
from ichat.protocol.messages import Heartbeat
from ichat.routing.availability import Availability, Loadable, NotReady, Unknown
from ichat.routing.circuit_breaker import Circuit
from ichat.routing.endpoint import Endpoint

log = logging.getLogger(__name__)

FORGET_S = 3600.0
FAILED_S = 600.0
"""How long a worker is shown that failed and said good-bye."""
RETRY_AFTER_S = 5
REASONS_MAX = 8
"""The most workers with a reason why they do not serve a model."""
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
        """Return the workers whose time has passed, and forget them until they are set again."""
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

    def __init__(self, clock: Callable[[], float], wedged_after_s: float) -> None:
        self._clock = clock
        self.restart_wait_s = 0.0
        """Requests wait for a worker that is on its way if it needs no longer; see `[timeouts]`. 0: none waits."""
        self._wedged_after_s = wedged_after_s
        self._workers: dict[str, WorkerRecord] = {}
        self._endpoints: dict[str, Endpoint] = {}
        """Where the requests of workers go, by the workers' ids, with what this process has seen there."""
        self._index = WorkerIndex()
        self.weights = Weights(Limits())
        """The gateway's memory for the workers that joined."""
        self._changes = Deadlines()
        """When time alone may change the state of a worker."""
        self._expiries = Deadlines()
        """When a worker that was not started here may have been silent long enough to be forgotten."""
        self.changes = 0
        """Grows when a worker begins or ends to be able to serve, or has other names."""

    def __repr__(self) -> str:
        return f"<WorkerTable {self._index!r}>"

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[WorkerRecord]:
        return iter(list(self._workers.values()))

    def get(self, worker_id: str) -> WorkerRecord | None:
        """Return the worker of this id."""
        return self._workers.get(worker_id)

    def endpoint_of(self, worker: WorkerRecord) -> Endpoint | None:
        """Return where a worker's requests go, known from its first heartbeat on."""
        return self._endpoints.get(worker.id)

    def endpoints(self) -> Collection[Endpoint]:
        """Return the endpoints of all workers."""
        return self._endpoints.values()

    def state(self, worker: WorkerRecord, *, sees_drain: bool = True) -> State:
        """Return the state of a worker now; see `WorkerRecord.state`."""
        return worker.state(self._clock(), self._wedged_after_s, self._trouble_of(worker), sees_drain=sees_drain)

    def state_until(self, worker: WorkerRecord) -> float:
        """Return the time at which the state of a worker changes if nothing is heard of it until then."""
        return worker.state_until(self._clock(), self._wedged_after_s)

    def _trouble_of(self, worker: WorkerRecord) -> str:
        endpoint = self._endpoints.get(worker.id)
        return endpoint.trouble if endpoint is not None else ""

    def _enter(self, worker: WorkerRecord) -> None:
        """Add a worker, in place of another one of its id."""
        before = self._workers.get(worker.id)
        if before is not None:
            self._drop(before)
        self._workers[worker.id] = worker

    def _find_place(self, worker: WorkerRecord, heartbeat: Heartbeat, breaker: CircuitBreaker) -> Endpoint:
        """Return where a worker's requests go: made, or corrected, by the worker's own report."""
        host, port = heartbeat.host, heartbeat.port
        if worker.unix_socket and heartbeat.unix_socket:
            host, port = worker.unix_socket, 0
        endpoint = self._endpoints.get(worker.id)
        if endpoint is None:
            server, circuit = worker.server, Circuit(breaker)
            upstream = Upstream(f"worker {worker.id}", host, port) if server is None else server.upstream
            access = None if server is None else server.access
            in_flight_max = heartbeat.max_in_flight
            endpoint = Endpoint(upstream, worker.id.encode(), in_flight_max, access=access, circuit=circuit)
            endpoint.troubled.add(functools.partial(self.refresh, worker))
            self._endpoints[worker.id] = endpoint
        elif (endpoint.upstream.host, endpoint.upstream.port) != (host, port):
            endpoint.move(Upstream(f"worker {worker.id}", host, port))
            worker.answers = False
        return endpoint

    def _drop(self, worker: WorkerRecord) -> None:
        """Forget a worker."""
        del self._workers[worker.id]
        endpoint = self._endpoints.pop(worker.id, None)
        if endpoint is not None:
            endpoint.forget_prefixes()  # or the index of prefixes would keep it for good
        self._index.remove(worker)
        self._changes.remove(worker)
        self._expiries.remove(worker)
        self.weights.forget(worker.id)

    def refresh(self, worker: WorkerRecord) -> None:
        """Find out anew whether a worker can serve."""
        if self._workers.get(worker.id) is not worker:
            return
        is_ready = self.state(worker) == "ready"
        self._changes.set(worker, self.state_until(worker))
        if not worker.managed and worker.server is None:
            self._expiries.set(worker, _expires_at(worker))
        endpoint = self._endpoints.get(worker.id) if is_ready else None
        if endpoint is not None and not self._index.is_ready(worker):
            endpoint.ready_again(worker.context_tokens, self._clock())
        self.changes += self._index.update(worker, endpoint)

    def _set_stale(self) -> None:
        """Have no worker from elsewhere serve until its next heartbeat; no health check is enough."""
        for worker in self._workers.values():
            worker.can_return = False
            if not worker.managed and worker.server is None:  # what time alone changes of it stays as it is
                worker.is_stale = True
                self.changes += self._index.set_not_ready(worker)

    def _use_limits(self, config: Config) -> None:
        """Use the limits and times of another configuration; after another time, other workers are wedged."""
        self.weights.reconfigure(config.limits)
        self.restart_wait_s, seconds = config.timeouts.restart_wait_s, config.timeouts.wedged_after_s
        if seconds != self._wedged_after_s:
            self._wedged_after_s = seconds
            for worker in self._workers.values():
                if worker.stuck_since < math.inf:
                    self.refresh(worker)

    def _pop_expired(self) -> list[WorkerRecord]:
        """Return the workers that have been silent for too long, once; the caller removes them."""
        now, expired = self._clock(), list[WorkerRecord]()
        if now >= self._expiries.next_at:
            for worker in self._expiries.pop(now):
                at = _expires_at(worker)
                if now >= at:
                    expired.append(worker)
                else:
                    self._expiries.set(worker, at)
        return expired

    def availability(self, model: str) -> Availability:
        """Return whether workers can serve a model now."""
        now = self._clock()
        if now >= self._changes.next_at:
            self._refresh_due(now)
        return self._index.ready(model) or self._why_none(model)

    def ready(self) -> Collection[WorkerRecord]:
        """Return the workers that can serve now."""
        self._refresh_due(self._clock())
        return self._index.all_ready()

    def listed(self, model: str | None = None) -> Iterator[WorkerRecord]:
        """Return the workers with listed models: those that can serve now, or will once they are asked for.

        With a model's name, only the workers of that are returned.
        """
        ready = self.ready()
        for worker in self if model is None else self.of_model(model):
            if worker in ready or (worker.on_demand and not worker.has_failed):
                yield worker

    def lists(self, model: str) -> bool:
        """Return whether a model has such a worker; of many that cannot serve now, not all are looked at."""
        some = itertools.islice(self._index.of_model(model), REASONS_MAX)
        return self._index.ready(model) is not None or any(one.on_demand and not one.has_failed for one in some)

    def names_near(self, model: str, is_shown: Callable[[str], bool]) -> set[str]:
        """Return some names of models near to this name."""
        return self._index.names.around(model, is_shown)

    def _refresh_due(self, now: float) -> None:
        for worker in self._changes.pop(now):
            self.refresh(worker)

    def _why_none(self, model: str) -> Loadable | NotReady | Unknown:
        having, now = self._index.of_model(model), self._clock()
        if not having:
            return Unknown()
        reasons = [self.why_not_ready(worker) for worker in itertools.islice(having, REASONS_MAX)]
        if len(having) > REASONS_MAX:
            reasons.append(f"{len(having) - REASONS_MAX} more workers are not ready")
        states: dict[WorkerRecord, State] = {worker: self.state(worker) for worker in having}
        expected = [worker for worker, state in states.items() if worker.is_loadable(now, state)]
        told, coming = told_of([*states.values()]), not expected
        if coming and self.restart_wait_s:
            expected = [one for one, state in states.items() if one.is_coming(state, self._trouble_of(one))]
        if not expected:
            return _not_ready(having, now, "; ".join(reasons), told)
        first = min(expected, key=lambda worker: _known_or_inf(worker.comes_at()))
        doing = first.doing(states[first])
        found = Loadable("; ".join(reasons), first.comes_at(), len(having), coming, doing, told=told)
        rest_s = found.rest_s(now)
        if not coming or rest_s is None or rest_s <= self.restart_wait_s:
            return found
        why = f"{found.reasons}; it takes about {rest_s} s"
        return NotReady(why, rest_s, "timeouts.restart_wait_s", told=f"{told}, which takes about {rest_s} s")

    def why_not_ready(self, worker: WorkerRecord) -> str:
        """Return in a few words why a worker that is not ready gets no requests."""
        return worker.why_not_ready(self._clock(), self._wedged_after_s, self._trouble_of(worker))

    def of_model(self, model: str) -> Collection[WorkerRecord]:
        """Return the workers that serve a model of this name, or will."""
        return self._index.of_model(model)

    def served_names(self) -> Collection[str]:
        """Return every name that a worker serves, or will."""
        return self._index.models()

    def group_of(self, worker: WorkerRecord) -> Collection[WorkerRecord]:
        """Return the workers that name a worker's group, if it names any: `groups` says which of them are members."""
        return self._index.of_group(worker)

    def _break_group_of(self, gone: WorkerRecord, why: str) -> None:
        """Record for the other members of a group that a member has ended: none of them is of any use now."""
        for other in groups.broken_by(gone, self.group_of(gone), self._clock()):
            log.error("the group of worker %s is broken: worker %s %s", other.id, gone.id, why)
            other.lost = groups.loss_of(gone, why, is_certain=True)
            self.refresh(other)

    def keeper(self, tag: str) -> WorkerRecord | None:
        """Return the worker that keeps the responses with this tag in their ids."""
        return self._index.of_tag(tag)


def _not_ready(having: Collection[WorkerRecord], now: float, reasons: str, told: str) -> NotReady:
    """Return why none of these workers serves its model; it is final where only another request, or nothing, helps."""
    is_final = all(one.is_down and (one.on_demand or one.has_failed or not one.was_ready) for one in having)
    retry_at = [one.retry_at for one in having if one.on_demand and one.retry_at is not None] if is_final else ()
    retry_after_s = max(1, math.ceil(min(retry_at) - now)) if retry_at else RETRY_AFTER_S
    if retry_at:
        told = f"it has failed, and can be asked for again in {retry_after_s} s"
    return NotReady(reasons, retry_after_s, is_final=is_final, told=told)


def _known_or_inf(at: float | None) -> float:
    return math.inf if at is None else at


def _expires_at(worker: WorkerRecord) -> float:
    """Return when a worker from elsewhere has been silent long enough to be forgotten."""
    interval_s = worker.heartbeat.heartbeat_interval if worker.heartbeat else 0
    keep_s = FAILED_S if worker.is_down else max(FORGET_S, interval_s * HEARTBEATS_MISSED_MAX)
    return math.nextafter(worker.heard_at + keep_s, math.inf)
