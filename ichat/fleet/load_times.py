"""The durations of loads of models, learnt from their last loads. Purely synchronous."""

import logging
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import attrs

from ichat.fleet.worker_load import ExpectedLoad, LoadKind, WorkerLoad
from ichat.fleet.worker_record import WorkerRecord
from ichat.protocol.load_story import DOWNLOADING, LoadStory, download_s, summary_of

log = logging.getLogger(__name__)

TIMES_MAX = 8
"""How many of the newest loads of a model count."""
PHASES_KEPT_MAX = 16
"""The most phases of a load with known durations; an engine has about ten."""
KNOWN_MAX = 256
"""The most models with known loads, starts and wakes apart; the latest loaded models are kept."""

SavedLoadTimes = dict[str, dict[str, list[float]]]
"""By model and kind of load, `start` or `wake`: the seconds of the last loads."""
SavedPhaseTimes = dict[str, dict[str, dict[str, float]]]
"""By model and kind of load: the seconds of each phase of the last load."""


@attrs.define
class _Known:
    """The last loads of a model and kind."""

    seconds: deque[float] = attrs.field(factory=lambda: deque[float](maxlen=TIMES_MAX))
    phases: dict[str, float] = attrs.field(factory=dict[str, float])
    """Of the last load."""


class LoadTimes:
    """The seconds of the last loads of each model: of starts, and of wakes, which are much shorter."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], _Known] = {}

    def __repr__(self) -> str:
        return f"<LoadTimes of {len(self._known)} kinds of loads>"

    def add(self, model: str, kind: LoadKind, load: LoadStory) -> None:
        """Record a load that has ended well, without the download of its model."""
        known = self._take(model, kind)
        known.seconds.append(round(load.elapsed_s - download_s(load.phases), 3))
        phases = [phase for phase in load.phases if phase.name != DOWNLOADING]
        known.phases = {phase.name: round(phase.seconds, 3) for phase in phases[:PHASES_KEPT_MAX]}

    def _take(self, model: str, kind: str) -> _Known:
        """Return the known loads, and make them the latest."""
        known = self._known[model, kind] = self._known.pop((model, kind), None) or _Known()
        while len(self._known) > KNOWN_MAX:
            del self._known[next(iter(self._known))]
        return known

    def expected(self, model: str, kind: LoadKind) -> float | None:
        """Return the probable duration of a load of this kind: the median; None if there was none yet."""
        known = self._known.get((model, kind))
        return statistics.median(known.seconds) if known is not None and known.seconds else None

    def expected_load(self, model: str, kind: LoadKind) -> ExpectedLoad:
        """Return the probable duration of a load of this kind and of its phases."""
        known = self._known.get((model, kind))
        return ExpectedLoad(self.expected(model, kind), known.phases if known is not None else {})

    def saved(self) -> tuple[SavedLoadTimes, SavedPhaseTimes]:
        """Return the facts for the next gateway."""
        seconds, phases = SavedLoadTimes(), SavedPhaseTimes()
        for (model, kind), known in self._known.items():
            seconds.setdefault(model, {})[kind] = list(known.seconds)
            phases.setdefault(model, {})[kind] = dict(known.phases)
        return seconds, phases

    def restore(
        self, seconds: Mapping[str, Mapping[str, Sequence[float]]], phases: Mapping[str, Mapping[str, dict[str, float]]]
    ) -> None:
        """Go on with the facts that an earlier gateway has learnt."""
        for model, kinds in seconds.items():
            for kind, times in kinds.items():
                known = self._take(model, kind)
                known.seconds.extend(times)
                known.phases = dict(phases.get(model, {}).get(kind, {}))


class WorkerLoads:
    """Knows the durations of loads; those of workers that joined are apart, since any caller may be such a worker."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.times = LoadTimes()
        """Of managed workers."""
        self._joined_times = LoadTimes()

    def __repr__(self) -> str:
        return f"<WorkerLoads {self.times!r}, {self._joined_times!r} of workers that joined>"

    def enter(self, worker: WorkerRecord, phase: str) -> bool:
        """Record the gateway's own step in starting a worker; return whether that is new."""
        if worker.load is not None and worker.load.phase == phase:
            return False
        worker.load = worker.load or WorkerLoad("start")
        worker.load.enter(phase, self._clock())
        self._expect(worker)
        return True

    def note(self, worker: WorkerRecord, detail: str, left_s: float | None) -> bool:
        """Record how far the gateway's own step is, and its probable rest; return whether that is new."""
        load = worker.load
        if load is None or load.own_detail == detail:
            return False
        load.own_detail = detail
        after_s = load.expected.seconds if load.expected is not None else None
        worker.ready_at = None if left_s is None or after_s is None else self._clock() + left_s + after_s
        return True

    def record(self, worker: WorkerRecord, ended: WorkerLoad | None) -> None:
        """Learn from a load if a heartbeat has ended it, and find the expected duration of a load that has begun."""
        if ended is not None:
            story = ended.story(self._clock())
            self._times_of(worker).add(_model_of(worker), ended.kind, story)
            log.info("worker %s is ready after %s", worker.id, summary_of(story))
        self._expect(worker)

    def _expect(self, worker: WorkerRecord) -> None:
        load, now = worker.load, self._clock()
        if load is not None and load.expected is None:
            load.expected = self._times_of(worker).expected_load(_model_of(worker), load.kind)
            rest_s = load.story(now).rest_s
            worker.ready_at = worker.ready_at if rest_s is None else now + rest_s

    def _times_of(self, worker: WorkerRecord) -> LoadTimes:
        return self.times if worker.managed else self._joined_times


def _model_of(worker: WorkerRecord) -> str:
    return next(iter(worker.names), "")
