"""How long models take to be loaded, learnt from their last loads, and what a load would take now."""

import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence

from ichat.routing.load_view import EvictionView, LoadView, ObstacleView
from ichat.supervisor.state import SavedLoadTimes
from ichat.supervisor.swaps import LoadPlan, SwapCandidate

TIMES_MAX = 8
"""So many of the newest loads of a model count."""


class LoadTimes:
    """The seconds of the last loads of each model: of starts, and of wakes, which are much shorter."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, str], deque[float]] = {}

    def __repr__(self) -> str:
        return f"<LoadTimes of {len(self._times)} kinds of loads>"

    def add(self, model: str, kind: str, seconds: float) -> None:
        """Record that a load of this kind, `start` or `wake`, took so long."""
        self._times.setdefault((model, kind), deque(maxlen=TIMES_MAX)).append(round(seconds, 3))

    def expected(self, model: str, kind: str) -> float | None:
        """Return how long a load of this kind will probably take: the median; None if there was none yet."""
        times = self._times.get((model, kind))
        return statistics.median(times) if times else None

    def saved(self, models: Sequence[str]) -> SavedLoadTimes:
        """Return what the next gateway has to know of these models."""
        return {
            model: {kind: list(self._times[model, kind]) for kind in ("start", "wake") if (model, kind) in self._times}
            for model in models
        }

    def keep_only(self, models: Collection[str]) -> None:
        """Forget all but these models."""
        self._times = {key: times for key, times in self._times.items() if key[0] in models}

    def restore(self, saved: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
        """Go on with what an earlier gateway has learnt."""
        for model, kinds in saved.items():
            for kind, times in kinds.items():
                self._times[model, kind] = deque(times, TIMES_MAX)


def view_of(plan: LoadPlan, workers: Sequence[SwapCandidate], now: float, expected_s: float | None) -> LoadView:
    """Return what it would take to load a model, for operators."""
    evicts = [
        EvictionView(
            one.worker_id,
            one.model,
            "stop" if one.worker_id in plan.stops or one.phase == "asleep" else one.when_idle,
            None if one.requests else max(0.0, round(now - one.idle_since, 3)),
        )
        for one in plan.evicts
    ]
    waits_for = [
        ObstacleView(one.worker_id, one.model, _state_of(one)) for one in workers if one.worker_id in plan.waits_for
    ]
    return LoadView(plan.worker.worker_id, evicts, waits_for, expected_s)


def _state_of(one: SwapCandidate) -> str:
    """Return what a worker does that others wait for, in a few words."""
    if one.requests:
        return f"has {one.requests} requests"
    return "is loaded first, for older requests" if one.phase in ("cold", "down", "asleep") else f"is {one.phase}"
