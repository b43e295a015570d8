"""The gateway's picture of its workers and models. Purely synchronous: what is decided is decided in one step."""

import itertools
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from ichat import errors
from ichat.config.schema import CircuitBreaker
from ichat.errors import ApiError
from ichat.http.pool import Upstream
from ichat.protocol import Heartbeat, Machine, ModelCard, PeerLoss, names_of
from ichat.routing.balancer import Endpoint
from ichat.routing.circuit_breaker import Circuit
from ichat.routing.views import WorkerView
from ichat.routing.worker_record import AWAY, HEALTHY, HEARTBEATS_MISSED_MAX, State, WorkerEnd, WorkerRecord

log = logging.getLogger(__name__)

FORGET_S = 3600.0
FAILED_S = 600.0
"""How long a worker is shown that has said good-bye since it failed."""
KEEP_S = 600.0
"""How often it is written down, at most, that workers were heard of that only answer health checks."""
WORKERS_MAX = 4096
RETRY_AFTER_S = 5
_RESPONSE_ID = re.compile(r"resp_([0-9a-f]{12})_[0-9a-f]{32}")
"""As `engines.adapter.ProtocolAdapter.new_response_id` makes them."""


class Registry:
    """Workers by id, and who serves a model."""

    def __init__(
        self,
        external: Mapping[str, Sequence[Endpoint]],
        clock: Callable[[], float],
        max_in_flight: int,
        wedged_after_s: float = math.inf,
    ) -> None:
        """`external` has the endpoints of each external model; `max_in_flight` is for workers that say nothing else."""
        self._clock = clock
        self._workers: dict[str, WorkerRecord] = {}
        self.external = external
        self.max_in_flight = max_in_flight
        self.wedged_after_s = wedged_after_s
        self._circuit_breaker = CircuitBreaker()
        self._listeners: dict[Callable[[], None], None] = {}
        self._has_ill_routes = False
        self._kept_at = -math.inf
        self.version = 0
        """Grows whenever there is something to remember: a worker comes, goes, or is somewhere else."""

    def __repr__(self) -> str:
        return f"<Registry {', '.join(worker.id for worker in self)}>"

    def __iter__(self) -> Iterator[WorkerRecord]:
        return iter(list(self._workers.values()))

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Have a function called after every change of a worker, or of where requests can go."""
        self._listeners[listener] = None

    def remove_listener(self, listener: Callable[[], None]) -> None:
        """Have it called no longer."""
        del self._listeners[listener]

    def _notify(self) -> None:
        for listener in list(self._listeners):
            listener()

    def get(self, worker_id: str) -> WorkerRecord | None:
        """Give the worker of this id."""
        return self._workers.get(worker_id)

    def state(self, worker: WorkerRecord) -> State:
        """Give the state of a worker now."""
        return worker.state(self._clock(), self.wedged_after_s)

    def state_until(self, worker: WorkerRecord) -> float:
        """Return the time at which the state of a worker changes if nothing is heard of it until then."""
        return worker.state_until(self._clock(), self.wedged_after_s)

    def is_away(self, worker: WorkerRecord) -> bool:
        """Say whether nothing has been heard of it for a while, or it has ended."""
        return self.state(worker) in AWAY

    def expect(self, worker_id: str, names: list[str], unix_socket: str | None = None) -> WorkerRecord:
        """Add a worker that is being started here, before its first beat."""
        worker = WorkerRecord(worker_id, managed=True, expected=names, unix_socket=unix_socket)
        self._workers[worker_id] = worker
        self._record_change()
        return worker

    def configure(
        self, worker: WorkerRecord, *, names: list[str], max_in_flight: int | None, settings: Mapping[str, Any]
    ) -> None:
        """Set what a managed worker will serve, how many requests at once, and what operators see of its settings."""
        worker.expected, worker.max_in_flight, worker.settings = names, max_in_flight, settings
        self._set_concurrency(worker)
        self._record_change()

    def drain(self, worker: WorkerRecord) -> None:
        """Send a managed worker no more requests: it is about to be stopped."""
        worker.is_draining = True
        self._notify()

    def restart(self, worker: WorkerRecord) -> None:
        """Count another start of a managed worker, and forget what was known of the one before."""
        worker.restarts += 1
        worker.begin()
        self._record_change()

    def set_piped(self, worker: WorkerRecord, *, is_piped: bool) -> None:
        """Set whether the output of a managed worker comes through a pipe of this gateway."""
        worker.is_piped = is_piped
        self._notify()

    def remove(self, worker: WorkerRecord) -> None:
        """Forget a worker."""
        if self._workers.get(worker.id) is worker:
            del self._workers[worker.id]
            self._record_change()

    def _record_change(self) -> None:
        """Note a change that the next gateway should know of."""
        self.version += 1
        self._notify()

    def snapshot(self) -> list[tuple[Heartbeat, float]]:
        """Give the newest beats of the workers that were not started here, each with its age in seconds."""
        now = self._clock()
        return [
            (worker.heartbeat, now - worker.heard_at)
            for worker in self._workers.values()
            if worker.heartbeat and not worker.managed and not worker.is_down
        ]

    def restore(self, heartbeat: Heartbeat, age_s: float, *, can_return: bool = False) -> None:
        """Know a worker from before the gateway's start: it is stale until it beats.

        `can_return` says whether it has shown the token that is needed now. Then one that is not iChat's own, and may
        never beat again, is known again as soon as it answers a health check.
        """
        if heartbeat.worker_id not in self._workers and len(self._workers) < WORKERS_MAX and age_s < FORGET_S:
            worker = WorkerRecord(heartbeat.worker_id, managed=False)
            worker.record_heartbeat(heartbeat, self._clock() - age_s)
            worker.is_stale, worker.can_return = True, can_return and worker.is_foreign
            self._workers[heartbeat.worker_id] = worker
            if worker.can_return:
                self._place(worker, heartbeat)

    def record_heartbeat(self, heartbeat: Heartbeat) -> bool:
        """Take a beat; say whether the worker was new. A good-bye removes a worker that was not started here.

        So does a silence of FORGET_S, of which a beat of anybody is the occasion to look for.
        """
        for worker in self:
            interval = worker.heartbeat.heartbeat_interval if worker.heartbeat else 0
            keep_s = FAILED_S if worker.is_down else max(FORGET_S, interval * HEARTBEATS_MISSED_MAX)
            if not worker.managed and self._clock() - worker.heard_at > keep_s:
                self.remove(worker)
        known = self._workers.get(heartbeat.worker_id)
        if heartbeat.state == "gone" and known and known.heartbeat and known.heartbeat.start_id != heartbeat.start_id:
            return False  # of an earlier start of it
        if known is not None and heartbeat.state == "gone":
            self._mark_group_broken(known, "has failed" if heartbeat.failure else "has ended")
        if heartbeat.state == "gone" and not (known and known.managed):
            self._say_goodbye(known, heartbeat)
            return False
        if known is None and len(self._workers) >= WORKERS_MAX:
            raise errors.too_many_workers(WORKERS_MAX)
        worker = known or WorkerRecord(heartbeat.worker_id, managed=False)
        self._workers[heartbeat.worker_id] = worker
        taken = self.external.keys() & set(names_of(heartbeat))
        if taken and known is None:
            log.warning("worker %s gets no requests for %s: external routes have that name", worker.id, sorted(taken))
        if worker.heartbeat is not None and (worker.heartbeat.start_id, worker.heartbeat.pid) != (
            heartbeat.start_id,
            heartbeat.pid,
        ):
            self._mark_group_broken(worker, "was started again")
            worker.begin()
        self._note(worker, heartbeat, is_new=known is None)
        if heartbeat.state not in ("draining", "gone"):
            worker.last_healthy_at = worker.heartbeat_at
        worker.known_since = min(worker.known_since, worker.heartbeat_at)
        self._place(worker, heartbeat)
        self._notify()
        return known is None

    def _set_concurrency(self, worker: WorkerRecord) -> None:
        if worker.endpoint and worker.heartbeat:
            in_flight_max = worker.max_in_flight or worker.heartbeat.max_in_flight or self.max_in_flight
            worker.endpoint.in_flight_max = in_flight_max

    def set_default_concurrency(self, max_in_flight: int) -> None:
        """Send workers that say nothing else so many requests at once, at most; what each has for itself holds."""
        self.max_in_flight = max_in_flight
        for worker in self._workers.values():
            self._set_concurrency(worker)

    def set_circuits(self, settings: CircuitBreaker) -> None:
        """Let circuits open and close by other settings; their state stays."""
        self._circuit_breaker = settings
        workers = (worker.endpoint for worker in self._workers.values())
        for endpoint in itertools.chain(workers, *self.external.values()):
            if endpoint is not None:
                endpoint.circuit.settings = settings

    def require_reauthentication(self) -> None:
        """Send nothing to workers that were not started here until they beat again, as they must now know a token."""
        for worker in self._workers.values():
            worker.is_stale = worker.is_stale or not worker.managed
            worker.can_return = False
        self._notify()

    def _say_goodbye(self, worker: WorkerRecord | None, heartbeat: Heartbeat) -> None:
        """Forget a worker that has ended in good order; one that failed is shown with its reason until it is old."""
        if worker is None:
            return
        if not heartbeat.failure:
            self.remove(worker)
            return
        log.error("worker %s %s", worker.id, heartbeat.failure)
        self._note(worker, heartbeat, is_new=False)
        self.fail(worker, WorkerEnd("has failed", time.time(), cause=heartbeat.failure))

    def _note(self, worker: WorkerRecord, heartbeat: Heartbeat, *, is_new: bool) -> None:
        """Keep a beat as the newest one."""
        before = worker.heartbeat
        place = ("host", "port", "start_id", "model_names", "state")
        if is_new or worker.is_stale or any(getattr(before, name, None) != getattr(heartbeat, name) for name in place):
            self.version += 1
        worker.record_heartbeat(heartbeat, self._clock())
        if not worker.managed:
            worker.is_down = False
        worker.note_steps(heartbeat, worker.heartbeat_at)

    def _place(self, worker: WorkerRecord, heartbeat: Heartbeat) -> None:
        """Say where the worker's requests go, by what it says of itself."""
        host, port = (
            (worker.unix_socket, 0)
            if worker.unix_socket and heartbeat.unix_socket
            else (heartbeat.host, heartbeat.port)
        )
        endpoint = worker.endpoint
        if endpoint is None:
            upstream = Upstream(f"worker {worker.id}", host, port)
            circuit = Circuit(self._circuit_breaker)
            endpoint = worker.endpoint = Endpoint(upstream, worker.id.encode(), self.max_in_flight, circuit=circuit)
        elif (endpoint.upstream.host, endpoint.upstream.port) != (host, port):
            endpoint.upstream = Upstream(f"worker {worker.id}", host, port)
            endpoint.probe_failures, endpoint.health_failure, worker.answers = None, "", False
        self._set_concurrency(worker)
        counts = (heartbeat.progress.get("running"), heartbeat.progress.get("waiting"))
        endpoint.report(int(sum(count for count in counts if count is not None)), self._clock())

    def stopped(self, worker: WorkerRecord) -> None:
        """Note that a managed worker was ended on purpose."""
        self._mark_group_broken(worker, "was stopped")

    def fail(self, worker: WorkerRecord, end: WorkerEnd, retry_at: float | None = None) -> None:
        """Note how a worker ended, where nobody had asked for it, and when it will be started again."""
        if not worker.is_down:
            self._mark_group_broken(worker, end.why)
        worker.end, worker.is_down, worker.retry_at = end, True, retry_at
        self._record_change()

    def _mark_group_broken(self, gone: WorkerRecord, why: str) -> None:
        """Note for the others of a group that one of them has ended: none of them is of any use now."""
        for other in self._group_of(gone):
            if gone.heartbeat and other.lost is None and other.overlapped_with(gone):
                log.error("the group of worker %s is broken: worker %s %s", other.id, gone.id, why)
                other.lost = PeerLoss(gone.id, why, gone.heartbeat.host, gone.heartbeat.port, is_certain=True)

    def _group_of(self, worker: WorkerRecord) -> list[WorkerRecord]:
        """Give the other workers of a worker's group."""
        group = worker.heartbeat.group if worker.heartbeat else None
        return [
            other
            for other in self._workers.values()
            if group and other.heartbeat and other.heartbeat.group and other.heartbeat.group.id == group.id
            if other is not worker and other.heartbeat.state != "gone"
        ]

    def lost(self, worker_id: str) -> list[PeerLoss]:
        """Say what the group of a worker has lost, or seems to have lost since this worker is there."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.lost is not None:
            return [worker.lost] if worker and worker.lost else []
        now = self._clock()
        return [
            PeerLoss(
                other.id,
                f"has been silent for {silent_s:.0f} s",
                other.heartbeat.host,
                other.heartbeat.port,
                is_certain=False,
            )
            for other in self._group_of(worker)
            if other.heartbeat and worker.overlapped_with(other)
            if (silent_s := now - other.heartbeat_at) > other.heartbeat.heartbeat_interval * HEARTBEATS_MISSED_MAX
        ]

    def to_probe(self) -> list[tuple[Endpoint, WorkerRecord | None]]:
        """Return whom to ask whether they are well: workers that are not iChat's own, routes that have a way to ask."""
        routes = (endpoint for endpoints in self.external.values() for endpoint in endpoints)
        return [
            *(
                (worker.endpoint, worker)
                for worker in self._workers.values()
                if worker.is_foreign and worker.endpoint and not worker.is_down
                if worker.can_return or not worker.is_stale
            ),
            *((endpoint, None) for endpoint in routes if endpoint.route and endpoint.route.health_path),
        ]

    def probed(
        self, endpoint: Endpoint, worker: WorkerRecord | None, why: str, *, is_well: bool, failures_max: int
    ) -> None:
        """Note what a health check has found: that it is well, `why` it is not, or nothing.

        Who is well need not beat, and can be reached. Who fails so many times in a row gets no requests.
        """
        now = self._clock()
        was_ill, name = endpoint.health_failure, endpoint.upstream.name
        endpoint.probe_failures = (endpoint.probe_failures or 0) + 1 if why else 0
        endpoint.health_failure = why if endpoint.probe_failures >= failures_max else ""
        if endpoint.health_failure and not was_ill:
            log.warning("%s fails its health checks: %s", name, why)
        elif was_ill and not endpoint.health_failure:
            log.info("%s passes its health checks again", name)
        if worker is None:
            self._has_ill_routes = any(route.health_failure for routes in self.external.values() for route in routes)
        elif is_well or endpoint.health_failure or not why:
            worker.answers = is_well
        if is_well:
            endpoint.unavailable_reason, endpoint.avoid_until = "", -math.inf
            if worker is not None:
                worker.heard_at = now
                worker.is_stale = worker.is_stale and not worker.can_return
                if now - self._kept_at > KEEP_S:  # when it was heard of is to be remembered, if roughly
                    self._kept_at, self.version = now, self.version + 1
        self._notify()

    def forget_probes(self) -> None:
        """Forget what health checks have found: nobody is asked any more."""
        for endpoint in (endpoint for endpoints in self.external.values() for endpoint in endpoints):
            endpoint.probe_failures, endpoint.health_failure = None, ""
        self._has_ill_routes = False
        for worker in self._workers.values():
            worker.answers = False
            if worker.endpoint is not None:
                worker.endpoint.probe_failures, worker.endpoint.health_failure = None, ""

    def wants_machine(self, worker_id: str) -> bool:
        """Return whether a worker has not told yet, at this start of the gateway, what machine it runs on."""
        worker = self._workers.get(worker_id)
        return worker is not None and worker.machine is None

    def machines(self) -> list[tuple[str, Machine]]:
        """Return what the workers that are there tell of their machines, by their ids, the newest first."""
        now = self._clock()
        newest = sorted(self._workers.values(), key=lambda worker: worker.heartbeat_at, reverse=True)
        return [(worker.id, worker.machine) for worker in newest if worker.machine and worker.state(now) not in AWAY]

    def endpoints(self, model: str) -> Sequence[Endpoint]:
        """Give who can serve a model now: its external routes, else its ready workers.

        Raises ApiError: 404 for an unknown model, 503 for one that nobody can serve now.
        """
        external = self.external.get(model)
        if external is not None:
            return self._well(model, external) if self._has_ill_routes else external
        now = self._clock()
        having = [worker for worker in self._workers.values() if worker.serves(model)]
        if not having:
            raise errors.model_not_found(model, self.models())
        wedged_after_s = self.wedged_after_s
        ready = [one.endpoint for one in having if one.endpoint and one.state(now, wedged_after_s) == "ready"]
        if not ready:
            reasons = "; ".join(worker.why_not_ready(now, wedged_after_s) for worker in having)
            raise errors.model_not_ready(model, reasons, RETRY_AFTER_S)
        return ready

    def _well(self, model: str, routes: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """Return the routes of a model that do not fail their health checks. Raises ApiError 503 where all do."""
        well = [route for route in routes if not route.health_failure]
        if not well:
            reasons = "; ".join(
                f"{route.upstream.name} fails its health checks: {route.health_failure}" for route in routes
            )
            raise errors.model_not_ready(model, reasons, RETRY_AFTER_S)
        return well

    def has(self, model: str) -> bool:
        """Return whether a model has this name, whether anybody can serve it now or not."""
        return model in self.external or any(worker.serves(model) for worker in self._workers.values())

    def holder_of(self, response_id: str) -> WorkerRecord:
        """Return the worker that has a response, which its id says. Raises ApiError 404 where nobody has it."""
        match = _RESPONSE_ID.fullmatch(response_id)
        if match is None:
            raise errors.response_not_found(response_id[:128], "no worker gives such an id")
        for worker in self._workers.values():
            if worker.tag == match[1] and not worker.is_down:
                return worker
        why = "the worker that had it has ended or was started again, and its responses with it"
        raise errors.response_not_found(response_id, why)

    def continued_by(self, response_id: str, model: str) -> Endpoint | None:
        """Return who keeps a response that a request for this model continues; None where that is not ours to know.

        Raises ApiError 404.
        """
        if model in self.external:
            return None
        try:
            worker = self.holder_of(response_id)
            if not worker.serves(model):
                raise errors.response_not_found(response_id, f"it is not of the model `{model}`")
        except ApiError as error:
            error.param = "previous_response_id"
            raise
        return worker.endpoint

    def names(self) -> set[str]:
        """Give every name of a model, whether anybody can serve it now or not."""
        return {*self.external, *(name for worker in self._workers.values() for name in worker.names)}

    def load_of(self, model: str) -> dict[str, int]:
        """Give how many can serve a model now, and how many requests they work on."""
        try:
            endpoints = self.endpoints(model)
        except errors.ApiError:
            endpoints = ()
        now = self._clock()
        return {
            "workers": len(endpoints),
            "in_flight": sum(one.in_flight for one in endpoints),
            "circuits_open": sum(one.circuit.state(now) != "closed" for one in endpoints),
        }

    def models(self) -> dict[str, tuple[ModelCard, str]]:
        """Give the models that can be asked for now, by their names, each with who owns it.

        Where several workers serve one, it is as long as the shortest of them.
        """
        there = (name for name, routes in self.external.items() if not all(route.health_failure for route in routes))
        found: dict[str, tuple[ModelCard, str]] = {name: (ModelCard(name), "external") for name in there}
        for worker in self._workers.values():
            if worker.heartbeat is None or self.state(worker) != "ready":
                continue
            for model in worker.heartbeat.models or [
                ModelCard(name, worker.heartbeat.model_path) for name in worker.names
            ]:
                known, owner = found.get(model.id, (model, worker.heartbeat.backend))
                lengths = [one.max_model_len for one in (known, model) if one.max_model_len is not None]
                found[model.id] = (attrs.evolve(known, max_model_len=min(lengths, default=None)), owner)
        return found

    def describe(self, worker: WorkerRecord) -> Mapping[str, Any]:
        """Return everything known of a worker, as JSON can hold it."""
        now, heartbeat, end, state = self._clock(), worker.heartbeat, worker.end, self.state(worker)
        known: dict[str, Any] = {}
        if heartbeat:
            args = heartbeat.args  # may be large, and is not changed: it needs no copy
            left_out = ("args", "backend_args", "machine")
            known = attrs.asdict(heartbeat, filter=lambda field, _: field.name not in left_out)
            known |= {"args": args, "backend_args": args}
        view = WorkerView(
            worker_id=worker.id,
            model_name=known.get("model_name", next(iter(worker.names), "")),
            model_names=worker.names,
            status="healthy" if state in HEALTHY else "unhealthy",
            state=state,
            managed=worker.managed,
            machine=worker.machine.name if worker.machine else None,
            in_flight=worker.endpoint.in_flight if worker.endpoint else 0,
            circuit=worker.endpoint.circuit.describe(now) if worker.endpoint else None,
            restarts=worker.restarts,
            failure=end.why if end and worker.is_down else worker.health_failure or None,
            retry_in_s=max(0.0, round(worker.retry_at - now, 3)) if worker.retry_at is not None else None,
            exit_code=end.exit_code if end else None,
            signal=end.signal if end else None,
            oom_killed=end.oom_killed if end else False,
            cause=end.cause or None if end else None,
            last_lines=list(end.last_lines) if end else [],
            ended_at=round(end.at, 3) if end else None,
            lost=self.lost(worker.id),
            beat_age_s=round(now - worker.heartbeat_at, 3) if heartbeat else None,
        )
        return {**known, **worker.settings, **attrs.asdict(view)}
