"""When each worker must be looked at again, without looking at all of them. Purely synchronous."""

import heapq
import itertools
import math

from ichat.fleet.worker_record import WorkerRecord

_STALE_ENTRIES_MAX = 64
"""The heap may have this many entries more than twice the workers before stale entries are removed."""


class Deadlines:
    """A time for each worker, of which the earliest is known.

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
