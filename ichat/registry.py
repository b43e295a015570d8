"""The gateway's picture of its workers and models. Purely synchronous: what is decided is decided in one step."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs

from ichat import errors
from ichat.balance import Endpoint
from ichat.beat import Beat, WorkerState, names_of
from ichat.http.pool import Upstream

log = logging.getLogger(__name__)

BEATS_MISSED_MAX = 3
"""A worker that has been silent for so many of its intervals is unhealthy."""
FORGET_S = 3600.0
WORKERS_MAX = 4096
RETRY_AFTER_S = 5

State = WorkerState | Literal["unhealthy", "failed"]


@attrs.define(eq=False)
class Worker:
    """One worker as the gateway knows it."""

    id: str
    managed: bool
    beat: Beat | None = None
    """The newest one; None for a managed worker that has not beaten yet."""
    beat_at: float = -math.inf
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
        return self.beat.state

    def why_not_ready(self, now: float) -> str:
        """Say in a few words what stands between it and a request."""
        state = self.state(now)
        if state == "failed":
            return f"worker {self.id} {self.failure}"
        if self.is_unreachable:
            return f"worker {self.id} cannot be reached"
        if state == "unhealthy":
            return f"worker {self.id} has not been heard of for {now - self.beat_at:.0f} s"
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
        worker.beat = beat
        worker.beat_at = self._clock()
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

    def models(self) -> dict[str, str]:
        """Give the models that can be asked for now, each with who owns it."""
        now = self._clock()
        found = dict.fromkeys(self._external, "external")
        for worker in self._workers.values():
            if worker.state(now) == "ready":
                found.update(dict.fromkeys(worker.names, worker.beat.backend if worker.beat else ""))
        return found

    def describe(self, worker: Worker) -> Mapping[str, Any]:
        """Give everything known of a worker, as JSON can hold it."""
        now = self._clock()
        known = attrs.asdict(worker.beat, recurse=False) if worker.beat else {"worker_id": worker.id}
        return {
            **known,
            "model_names": worker.names,
            "state": worker.state(now),
            "managed": worker.managed,
            "in_flight": worker.endpoint.in_flight if worker.endpoint else 0,
            "failure": worker.failure,
            "beat_age_s": round(now - worker.beat_at, 3) if worker.beat else None,
        }


def _ignore() -> None:
    """Tell nobody of a change."""
