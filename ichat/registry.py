"""The gateway's picture of its workers and models. Purely synchronous: what is decided is decided in one step."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs

from ichat import errors
from ichat.balance import Endpoint
from ichat.beat import Beat, Lost, Model, WorkerState, names_of
from ichat.http.pool import Upstream

log = logging.getLogger(__name__)

BEATS_MISSED_MAX = 3
"""A worker that has been silent for so many of its intervals is unhealthy."""
FORGET_S = 3600.0
WORKERS_MAX = 4096
RETRY_AFTER_S = 5

State = WorkerState | Literal["unhealthy", "failed", "broken"]
"""`broken` is a worker whose group has lost another member for good."""


@attrs.define(eq=False)
class Worker:
    """One worker as the gateway knows it."""

    id: str
    managed: bool
    beat: Beat | None = None
    """The newest one; None for a managed worker that has not beaten yet."""
    beat_at: float = -math.inf
    known_since: float = math.inf
    """When the first beat of this start of it came."""
    well_at: float = -math.inf
    """When its newest beat came that was no good-bye: those who came later are none of its group."""
    lost: Lost | None = None
    """What its group has lost for good."""
    expected: list[str] = attrs.field(factory=list[str])
    """The names that a managed worker will serve, known before its first beat."""
    failure: str | None = None
    """Why a managed worker's process ended, where nobody had asked for it."""
    unix_socket: str | None = None
    """Where it is reached by a shorter way than its port, known of a managed worker."""
    endpoint: Endpoint | None = None
    """Where its requests go, known from its first beat on."""

    @property
    def is_unreachable(self) -> bool:
        """Whether a connection to it failed since its newest beat."""
        return self.endpoint is not None and self.endpoint.unreachable

    @property
    def names(self) -> list[str]:
        """Every model name that it serves or will serve."""
        return names_of(self.beat) if self.beat and self.beat.model_name else self.expected

    def state(self, now: float) -> State:
        """Give the state, by what it said last and how long ago that was."""
        if self.failure is not None:
            return "failed"
        if self.beat is None:
            return "starting"
        if self.is_unreachable or now - self.beat_at > self.beat.heartbeat_interval * BEATS_MISSED_MAX:
            return "unhealthy"
        return "broken" if self.lost is not None else self.beat.state

    def met(self, other: "Worker") -> bool:
        """Say whether the other was well when this start of the worker was there already, or came within a beat."""
        interval = other.beat.heartbeat_interval if other.beat else 0
        return self.known_since <= other.well_at + interval

    def why_not_ready(self, now: float) -> str:
        """Say in a few words what stands between it and a request."""
        state = self.state(now)
        if state == "failed":
            return f"worker {self.id} {self.failure}"
        if self.is_unreachable:
            return f"worker {self.id} cannot be reached"
        if state == "unhealthy":
            return f"worker {self.id} has not been heard of for {now - self.beat_at:.0f} s"
        if self.lost is not None:
            return f"worker {self.id} lost {self.lost.worker_id}, which {self.lost.why}"
        phase = self.beat.phase if self.beat else ""
        return f"worker {self.id} is {state}" + (f" ({phase})" if phase and phase != state else "")


class Registry:
    """Workers by id, and who serves a model."""

    def __init__(
        self, external: Mapping[str, Sequence[Endpoint]], clock: Callable[[], float], max_in_flight: int
    ) -> None:
        """`external` has the endpoints of each external model; `max_in_flight` is for workers that say nothing else."""
        self._clock = clock
        self._workers: dict[str, Worker] = {}
        self._external = external
        self._max_in_flight = max_in_flight
        self.changed: Callable[[], None] = _ignore
        """Called when more requests may be served than before."""

    def __repr__(self) -> str:
        now = self._clock()
        return f"<Registry {', '.join(f'{worker.id}={worker.state(now)}' for worker in self)}>"

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def get(self, worker_id: str) -> Worker | None:
        """Give the worker of this id."""
        return self._workers.get(worker_id)

    def expect(self, worker_id: str, names: list[str], unix_socket: str | None = None) -> Worker:
        """Add a worker that is being started here, before its first beat."""
        worker = Worker(worker_id, managed=True, expected=names, unix_socket=unix_socket)
        self._workers[worker_id] = worker
        return worker

    def beat(self, beat: Beat) -> bool:
        """Take a beat; say whether the worker was new. A good-bye removes a worker that was not started here.

        So does a silence of FORGET_S, of which a beat of anybody is the occasion to look for.
        """
        for worker in self:
            interval = worker.beat.heartbeat_interval if worker.beat else 0
            if not worker.managed and self._clock() - worker.beat_at > max(FORGET_S, interval * BEATS_MISSED_MAX):
                del self._workers[worker.id]
        known = self._workers.get(beat.worker_id)
        if known is not None and beat.state == "gone":
            self._tell_group(known, "has ended")
        if beat.state == "gone" and not (known and known.managed):
            self._workers.pop(beat.worker_id, None)
            return False
        if known is None and len(self._workers) >= WORKERS_MAX:
            raise errors.too_many_workers(WORKERS_MAX)
        worker = known or Worker(beat.worker_id, managed=False)
        self._workers[beat.worker_id] = worker
        taken = self._external.keys() & set(names_of(beat))
        if taken and known is None:
            log.warning("worker %s gets no requests for %s: external routes have that name", worker.id, sorted(taken))
        if worker.beat is not None and (worker.beat.start_id, worker.beat.pid) != (beat.start_id, beat.pid):
            self._tell_group(worker, "was started again")
            worker.known_since, worker.lost = math.inf, None
        worker.beat = beat
        worker.beat_at = self._clock()
        if beat.state not in ("draining", "gone"):
            worker.well_at = worker.beat_at
        worker.known_since = min(worker.known_since, worker.beat_at)
        self._place(worker, beat)
        self.changed()
        return known is None

    def _place(self, worker: Worker, beat: Beat) -> None:
        """Say where the worker's requests go, by what it says of itself."""
        host, port = (worker.unix_socket, 0) if worker.unix_socket and beat.unix_socket else (beat.host, beat.port)
        endpoint = worker.endpoint
        if endpoint is None:
            upstream = Upstream(f"worker {worker.id}", host, port)
            endpoint = worker.endpoint = Endpoint(upstream, worker.id.encode(), self._max_in_flight)
        elif (endpoint.upstream.host, endpoint.upstream.port) != (host, port):
            endpoint.upstream = Upstream(f"worker {worker.id}", host, port)
        endpoint.in_flight_max = beat.max_in_flight or self._max_in_flight
        counts = (beat.progress.get("running"), beat.progress.get("waiting"))
        endpoint.report(int(sum(count for count in counts if count is not None)), self._clock())

    def fail(self, worker: Worker, failure: str) -> None:
        """Note why a managed worker's process ended, where nobody had asked for it."""
        worker.failure = failure
        self._tell_group(worker, failure)

    def _tell_group(self, gone: Worker, why: str) -> None:
        """Note for the others of a group that one of them has ended: none of them is of any use now."""
        for other in self._group_of(gone):
            if gone.beat and other.lost is None and other.met(gone):
                log.error("the group of worker %s is broken: worker %s %s", other.id, gone.id, why)
                other.lost = Lost(gone.id, why, gone.beat.host, gone.beat.port, is_certain=True)

    def _group_of(self, worker: Worker) -> list[Worker]:
        """Give the other workers of a worker's group."""
        group = worker.beat.group if worker.beat else None
        return [
            other
            for other in self._workers.values()
            if group and other.beat and other.beat.group and other.beat.group.id == group.id
            if other is not worker and other.beat.state != "gone"
        ]

    def lost(self, worker_id: str) -> list[Lost]:
        """Say what the group of a worker has lost, or seems to have lost since this worker is there."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.lost is not None:
            return [worker.lost] if worker and worker.lost else []
        now = self._clock()
        return [
            Lost(other.id, f"has been silent for {silent_s:.0f} s", other.beat.host, other.beat.port, is_certain=False)
            for other in self._group_of(worker)
            if other.beat and worker.met(other)
            if (silent_s := now - other.beat_at) > other.beat.heartbeat_interval * BEATS_MISSED_MAX
        ]

    def endpoints(self, model: str) -> Sequence[Endpoint]:
        """Give who can serve a model now: its external routes, else its ready workers.

        Raises ApiError: 404 for an unknown model, 503 for one that nobody can serve now.
        """
        external = self._external.get(model)
        if external is not None:
            return external
        now = self._clock()
        having = [worker for worker in self._workers.values() if model in worker.names]
        if not having:
            raise errors.model_not_found(model, self.models())
        ready = [worker.endpoint for worker in having if worker.endpoint and worker.state(now) == "ready"]
        if not ready:
            reasons = "; ".join(worker.why_not_ready(now) for worker in having)
            raise errors.model_not_ready(model, reasons, RETRY_AFTER_S)
        return ready

    def models(self) -> dict[str, tuple[Model, str]]:
        """Give the models that can be asked for now, by their names, each with who owns it.

        Where several workers serve one, it is as long as the shortest of them.
        """
        now = self._clock()
        found: dict[str, tuple[Model, str]] = {name: (Model(name), "external") for name in self._external}
        for worker in self._workers.values():
            if worker.beat is None or worker.state(now) != "ready":
                continue
            for model in worker.beat.models or [Model(name, worker.beat.model_path) for name in worker.names]:
                known, owner = found.get(model.id, (model, worker.beat.backend))
                lengths = [one.max_model_len for one in (known, model) if one.max_model_len is not None]
                found[model.id] = (attrs.evolve(known, max_model_len=min(lengths, default=None)), owner)
        return found

    def describe(self, worker: Worker) -> Mapping[str, Any]:
        """Give everything known of a worker, as JSON can hold it."""
        now = self._clock()
        known = attrs.asdict(worker.beat) if worker.beat else {"worker_id": worker.id}
        return {
            **known,
            "model_names": worker.names,
            "state": worker.state(now),
            "managed": worker.managed,
            "in_flight": worker.endpoint.in_flight if worker.endpoint else 0,
            "failure": worker.failure,
            "lost": [attrs.asdict(lost) for lost in self.lost(worker.id)],
            "beat_age_s": round(now - worker.beat_at, 3) if worker.beat else None,
        }


def _ignore() -> None:
    """Tell nobody of a change."""
