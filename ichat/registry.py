"""The gateway's picture of its workers and models. Purely synchronous: what is decided is decided in one step."""

import math
import random
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import attrs

from ichat import errors
from ichat.beat import Beat, WorkerState, names_of
from ichat.config import ExternalRoute
from ichat.http.pool import Upstream

BEATS_MISSED_MAX = 3
"""A worker that has been silent for so many of its intervals is unhealthy."""
FORGET_S = 3600.0
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
    unreachable: bool = False
    """Whether a connection to it failed since its newest beat."""
    in_flight: int = 0

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
        if self.unreachable or now - self.beat_at > self.beat.heartbeat_interval * BEATS_MISSED_MAX:
            return "unhealthy"
        return self.beat.state

    def why_not_ready(self, now: float) -> str:
        """Say in a few words what stands between it and a request."""
        state = self.state(now)
        if state == "failed":
            return f"worker {self.id} {self.failure}"
        if self.unreachable:
            return f"worker {self.id} cannot be reached"
        if state == "unhealthy":
            return f"worker {self.id} has not been heard of for {now - self.beat_at:.0f} s"
        phase = self.beat.phase if self.beat else ""
        return f"worker {self.id} is {state}" + (f" ({phase})" if phase and phase != state else "")


@attrs.frozen
class Target:
    """Where one request goes."""

    upstream: Upstream
    worker: Worker | None = None
    prefix: bytes | None = None
    """What stands at the upstream where the gateway has `/v1`; None: the path is kept."""

    def path(self, target: bytes) -> bytes:
        """Give the request target to ask the upstream for."""
        if self.prefix is not None and target.startswith(b"/v1/"):
            return self.prefix + target[3:]
        return target

    def release(self) -> None:
        """Say that the request has ended."""
        if self.worker is not None:
            self.worker.in_flight -= 1


class Registry:
    """Workers by id, and which of them serves a model."""

    def __init__(self, routes: Iterable[ExternalRoute], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._workers: dict[str, Worker] = {}
        self._external = {route.model_name: _external(route) for route in routes}

    def __repr__(self) -> str:
        now = self._clock()
        return f"<Registry {', '.join(f'{worker.id}={worker.state(now)}' for worker in self)}>"

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def get(self, worker_id: str) -> Worker | None:
        """Give the worker of this id."""
        return self._workers.get(worker_id)

    def expect(self, worker_id: str, names: list[str]) -> Worker:
        """Add a worker that is being started here, before its first beat."""
        worker = Worker(worker_id, managed=True, expected=names)
        self._workers[worker_id] = worker
        return worker

    def beat(self, beat: Beat) -> bool:
        """Take a beat; say whether the worker was new. A good-bye removes a worker that was not started here.

        So does a silence of FORGET_S, of which a beat of anybody is the occasion to look for.
        """
        for worker in self:
            if not worker.managed and self._clock() - worker.beat_at > FORGET_S:
                del self._workers[worker.id]
        known = self._workers.get(beat.worker_id)
        if beat.state == "gone" and not (known and known.managed):
            self._workers.pop(beat.worker_id, None)
            return False
        worker = known or Worker(beat.worker_id, managed=False)
        self._workers[beat.worker_id] = worker
        worker.beat = beat
        worker.beat_at = self._clock()
        worker.unreachable = False
        return known is None

    def pick(self, model: str) -> Target:
        """Choose who serves a request: the ready worker with the fewest requests under way, ties at random.

        The choice counts as a request under way until `release`. Raises ApiError: 404 for an unknown model, 503 for
        one that nobody can serve now.
        """
        external = self._external.get(model)
        if external is not None:
            return external
        now = self._clock()
        having = [worker for worker in self._workers.values() if model in worker.names]
        if not having:
            raise errors.model_not_found(model, self.models())
        ready = [worker for worker in having if worker.state(now) == "ready"]
        if not ready:
            reasons = "; ".join(worker.why_not_ready(now) for worker in having)
            raise errors.model_not_ready(model, reasons, RETRY_AFTER_S)
        fewest = min(worker.in_flight for worker in ready)
        worker = random.choice([worker for worker in ready if worker.in_flight == fewest])
        assert worker.beat is not None
        worker.in_flight += 1
        upstream = Upstream(f"worker {worker.id}", worker.beat.host, worker.beat.port)
        return Target(upstream, worker)

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
        known = attrs.asdict(worker.beat) if worker.beat else {"worker_id": worker.id}
        return {
            **known,
            "model_names": worker.names,
            "state": worker.state(now),
            "managed": worker.managed,
            "in_flight": worker.in_flight,
            "failure": worker.failure,
            "beat_age_s": round(now - worker.beat_at, 3) if worker.beat else None,
        }


def _external(route: ExternalRoute) -> Target:
    url = urllib.parse.urlsplit(route.api_base)
    upstream = Upstream(f"the external route {route.model_name}", url.hostname or "", url.port or 80)
    return Target(upstream, prefix=url.path.rstrip("/").encode())
