"""What has changed since followers of the event stream were last told of it. Purely synchronous.

Each thing has facts, which are told at once, and figures, which change all the time: of those only so many are told at
a time, those first that have waited longest. So what a follower gets is bounded, however much there is.
"""

import heapq
from collections.abc import Hashable

from ichat.routing.registry import Registry
from ichat.routing.worker_record import WorkerRecord

FIGURES_AT_ONCE = 100
"""Things of one kind whose figures are told at a time, at most."""


class ToldMarks:
    """What followers know of the things of one kind, by their ids."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[object, object, int]] = {}
        """The facts and figures of each, and in which turn they were told."""
        self._turn = 0

    def __repr__(self) -> str:
        return f"<ToldMarks of {len(self._told)} things>"

    def clear(self) -> None:
        """Forget what was told: nobody listens any more."""
        self._told.clear()

    def find(self, now: dict[str, tuple[object, object]], *, with_figures: bool) -> tuple[list[str], list[str]]:
        """Return the ids that are to be told, of what is there now by its facts and figures, and those that are gone.

        They count as told from then on.
        """
        self._turn += 1
        told, urgent, later = self._told, list[str](), list[tuple[int, str]]()
        for key, (facts, figures) in now.items():
            known = told.get(key)
            if known is None or known[0] != facts:
                urgent.append(key)
            elif with_figures and known[1] != figures:
                later.append((known[2], key))
        found = urgent + [key for _, key in heapq.nsmallest(FIGURES_AT_ONCE, later)]
        for key in found:
            told[key] = (*now[key], self._turn)
        gone = [key for key in told if key not in now] if len(told) != len(now) or told.keys() != now.keys() else []
        for key in gone:
            del told[key]
        return found, gone


def marks_of(registry: Registry, worker: WorkerRecord) -> tuple[object, object]:
    """Return the facts and figures of a worker, from which its view is made: different ones if that may differ.

    The age of its newest heartbeat is not among them.
    """
    heartbeat, endpoint = worker.heartbeat, registry.endpoint_of(worker)
    facts: list[Hashable | object] = [
        registry.state(worker), worker.end, worker.retry_at, worker.ready_at, worker.restarts, worker.expected,
        worker.on_demand, worker.settings, worker.lost,
    ]  # fmt: skip
    if heartbeat is not None:
        facts += (
            heartbeat.phase, heartbeat.start_id, heartbeat.host, heartbeat.port, heartbeat.pid, heartbeat.models,
            heartbeat.model_names, heartbeat.model_name,
        )  # fmt: skip
    figures = (0, 0, heartbeat.progress if heartbeat else None)
    if endpoint is not None:
        facts += (endpoint.circuit.open_until, endpoint.health_failure)
        figures = (endpoint.in_flight, endpoint.circuit.failures, *figures[2:])
    return facts, figures
