"""The workers by model, by group, and by the responses that they keep. Purely synchronous."""

from collections.abc import Collection

import attrs

from ichat.fleet.worker_record import WorkerRecord
from ichat.routing.availability import Ready
from ichat.routing.endpoint import Endpoint
from ichat.routing.near_names import NearNames


@attrs.frozen
class _Entry:
    """Where a worker stands in the index."""

    names: tuple[str, ...]
    group: str | None
    tag: str


@attrs.define(eq=False)
class _ModelWorkers:
    """The workers of a model name."""

    workers: dict[WorkerRecord, None] = attrs.field(factory=dict[WorkerRecord, None])
    ready: dict[WorkerRecord, Endpoint] = attrs.field(factory=dict[WorkerRecord, Endpoint])
    found: Ready = attrs.field(factory=lambda: Ready(()))
    """The endpoints that were ready when that was last asked."""
    is_same: bool = False
    """Whether they still are."""

    def set_ready(self, worker: WorkerRecord, endpoint: Endpoint | None) -> None:
        """Set the endpoint of a worker that is ready; None if it is not."""
        self.is_same = False
        before = self.ready.pop(worker, None)
        if endpoint is not None:
            self.ready[worker] = endpoint
        if self.found.ring is not None and before is not endpoint:
            if before is not None:
                self.found.ring.remove(before)
            if endpoint is not None:
                self.found.ring.add(endpoint)


class WorkerIndex:
    """Knows the state of each worker at its last `update`, so that nothing looks at all workers."""

    def __init__(self) -> None:
        self._entries: dict[WorkerRecord, _Entry] = {}
        self._ready: dict[WorkerRecord, Endpoint] = {}
        self._models: dict[str, _ModelWorkers] = {}
        self._groups: dict[str, dict[WorkerRecord, None]] = {}
        self._tags: dict[str, WorkerRecord] = {}
        self.names = NearNames()
        """Every name that a worker serves, or will."""

    def __repr__(self) -> str:
        return f"<WorkerIndex {len(self._entries)} workers, {len(self._models)} models>"

    def update(self, worker: WorkerRecord, ready: Endpoint | None) -> bool:
        """Record a worker as it is, with its endpoint if that can serve now; return whether something has changed."""
        heartbeat = worker.heartbeat
        group = heartbeat.group.id if heartbeat and heartbeat.group else None
        entry, before = _Entry(tuple(worker.names), group, worker.tag), self._entries.get(worker)
        if before == entry and self._ready.get(worker) is ready:
            return False
        if before != entry:
            self.remove(worker)
            self._add(worker, entry)
            self.names.settle()
        if ready is not None:
            self._ready[worker] = ready
        else:
            self._ready.pop(worker, None)
        for name in entry.names:
            self._models[name].set_ready(worker, ready)
        return True

    def set_not_ready(self, worker: WorkerRecord) -> bool:
        """Record that a worker cannot serve now; return whether it could before."""
        if self._ready.pop(worker, None) is None:
            return False
        for name in self._entries[worker].names:
            self._models[name].set_ready(worker, None)
        return True

    def _add(self, worker: WorkerRecord, entry: _Entry) -> None:
        self._entries[worker] = entry
        for name in entry.names:
            model = self._models.get(name)
            if model is None:
                model = self._models[name] = _ModelWorkers()
                self.names.add(name)
            model.workers[worker] = None
        if entry.group is not None:
            self._groups.setdefault(entry.group, {})[worker] = None
        if entry.tag:
            self._tags[entry.tag] = worker

    def remove(self, worker: WorkerRecord) -> None:
        """Forget a worker, if it is there."""
        entry = self._entries.pop(worker, None)
        if entry is None:
            return
        self._ready.pop(worker, None)
        for name in dict.fromkeys(entry.names):
            model = self._models[name]
            del model.workers[worker]
            model.set_ready(worker, None)
            if not model.workers:
                del self._models[name]
                self.names.discard(name)
        if entry.group is not None:
            del self._groups[entry.group][worker]
            if not self._groups[entry.group]:
                del self._groups[entry.group]
        if self._tags.get(entry.tag) is worker:
            del self._tags[entry.tag]

    def ready(self, model: str) -> Ready | None:
        """Return the endpoints that can serve a model now; None if there is none."""
        workers = self._models.get(model)
        if workers is None or not workers.ready:
            return None
        if not workers.is_same:
            endpoints = list(workers.ready.values())
            workers.found, workers.is_same = Ready(endpoints, workers.found.ring, len(workers.workers)), True
        return workers.found

    def all_ready(self) -> Collection[WorkerRecord]:
        """Return the workers that could serve at their last `update`."""
        return self._ready.keys()

    def of_model(self, model: str) -> Collection[WorkerRecord]:
        """Return the workers that serve a model of this name, or will."""
        workers = self._models.get(model)
        return workers.workers.keys() if workers is not None else ()

    def of_group(self, worker: WorkerRecord) -> Collection[WorkerRecord]:
        """Return the workers that name a worker's group, if it names any."""
        entry = self._entries.get(worker)
        return self._groups[entry.group].keys() if entry is not None and entry.group is not None else ()

    def of_tag(self, tag: str) -> WorkerRecord | None:
        """Return the worker with this tag in the ids of its responses."""
        return self._tags.get(tag)

    def models(self) -> Collection[str]:
        """Return every name that a worker serves, or will."""
        return self._models.keys()
