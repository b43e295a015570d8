"""The loads of all workers: expected durations for a load that begins, and lessons from a load that ends."""

import logging
from collections.abc import Callable

from ichat.fleet.load_times import LoadTimes
from ichat.fleet.worker_load import WorkerLoad
from ichat.fleet.worker_record import WorkerRecord
from ichat.protocol.load_story import summary_of

log = logging.getLogger(__name__)


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
