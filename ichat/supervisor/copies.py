"""The copies of managed workers: how many are wanted, which number each has, and changes of that by operators."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from attrs import frozen

from ichat import errors
from ichat.config.copies import contradictions_of_replicas, count_of, with_replicas
from ichat.config.replicas import Replicas
from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.errors import ApiError
from ichat.fleet.worker_record import HEALTHY
from ichat.supervisor.context import SupervisorContext
from ichat.supervisor.managed_worker import ManagedWorker
from ichat.supervisor.reload_plan import Running, in_order_of_stay
from ichat.supervisor.restarts import Restarts, StartWorker
from ichat.supervisor.state import SetReplicas

log = logging.getLogger(__name__)


@frozen
class ScaledCopies:
    """The effect of another number of copies."""

    started: Sequence[str]
    """The ids of new workers."""
    ending: Sequence[str]
    """The ids of workers that are drained and ended."""


class ReplicaNumbers:
    """The numbers of copies that operators have set, each until the configuration names other numbers."""

    def __init__(self) -> None:
        self._set: dict[str, SetReplicas] = {}

    def __repr__(self) -> str:
        return f"<ReplicaNumbers {self._set}>"

    def tables(self, config: Config) -> list[ManagedWorkerConfig]:
        """Return the tables of a configuration with the numbers that are in force."""
        return [self._changed(worker, config) or worker for worker in config.managed_workers]

    def _changed(self, worker: ManagedWorkerConfig, config: Config) -> ManagedWorkerConfig | None:
        """Return a table with the number that was set; None: none was, or the table or another table rules it out."""
        found = self._set.get(worker.model_name)
        if found is None or found.configured != worker.replicas:
            return None
        if sum(one.model_name == worker.model_name for one in config.managed_workers) > 1:
            return None
        changed = with_replicas(worker, found.now)
        return None if any(contradictions_of_replicas(changed)) else changed

    def set(self, worker: ManagedWorkerConfig, now: Replicas) -> None:
        """Set the number of copies of a table of the configuration."""
        self._set[worker.model_name] = SetReplicas(worker.replicas, now)

    def use(self, config: Config) -> None:
        """Forget the numbers that are not in force with a configuration."""
        kept = {worker.model_name for worker in config.managed_workers if self._changed(worker, config) is not None}
        self._set = {name: one for name, one in self._set.items() if name in kept}

    def saved(self) -> dict[str, SetReplicas]:
        """Return the numbers for the next gateway."""
        return dict(self._set)

    def restore(self, saved: Mapping[str, SetReplicas]) -> None:
        """Go on with the numbers of an earlier gateway."""
        self._set = dict(saved)


def is_scaled(worker: ManagedWorker) -> bool:
    """Return whether the number of copies follows the load of the model."""
    return worker.spec.replicas.max > max(1, worker.spec.replicas.min)


class Copies:
    """Changes the numbers of copies, and gives each copy its number."""

    def __init__(
        self,
        context: SupervisorContext,
        workers: Mapping[str, ManagedWorker],
        numbers: ReplicaNumbers,
        restarts: Restarts,
        *,
        start: StartWorker,
        remove: Callable[[ManagedWorker], object],
    ) -> None:
        """`start` starts a new worker, `remove` drains and ends a worker for good."""
        self._context = context
        self._workers = workers
        self._numbers = numbers
        self._restarts = restarts
        self._start = start
        self._remove = remove

    def __repr__(self) -> str:
        return f"<Copies of {len(self._workers)} workers, {self._numbers!r}>"

    def number(self) -> None:
        """Set the number of each copy among the copies of its model; a worker that will be replaced has none."""
        groups: dict[tuple[str, bool], list[ManagedWorker]] = {}
        for one in self._workers.values():
            if one.is_leaving or self._restarts.new_id(one.id):
                self._context.managed.number(one.record, 0, 0)
            else:
                groups.setdefault((one.spec.model_name, one.is_launched), []).append(one)
        for group in groups.values():
            is_copied = any(one.spec.replicas.max > 1 for one in group)
            wanted = max(len(group), group[0].spec.replicas.wanted) if is_copied else 0
            for number, one in enumerate(sorted(group, key=lambda one: (len(one.id), one.id)), 1):
                self._context.managed.number(one.record, number if is_copied else 0, wanted)

    def running(self, worker: ManagedWorker) -> Running:
        """Return a worker as the plan of a reload needs it."""
        record, endpoint = worker.record, self._context.table.endpoint_of(worker.record)
        return Running(
            worker.id, worker.spec, worker.is_launched, record.has_failed, record.is_cold, record.is_down,
            self._restarts.new_id(worker.id),
            serves=self._restarts.serves(worker),
            is_ready=self._context.table.state(record) in HEALTHY,
            requests=endpoint.in_flight if endpoint is not None else 0,
            placed=worker.placed_last if worker.booking is not None else (),
        )  # fmt: skip

    def wanted(self, config: Config) -> list[ManagedWorkerConfig]:
        """Return each table of a configuration once for each of its copies; as many as there are, if bounds allow."""
        ours = [one for one in self._workers.values() if not (one.is_launched or one.is_leaving)]
        there = Counter(one.spec.model_name for one in ours if not self._restarts.new_id(one.id))
        tables = self._numbers.tables(config)
        named = Counter(table.model_name for table in tables)
        return [
            table
            for table in tables
            for _ in range(count_of(table.replicas, there[table.model_name] if named[table.model_name] == 1 else 0))
        ]

    def scaled(self) -> dict[str, list[ManagedWorker]]:
        """Return the copies of each model with such a number, without those that are leaving."""
        found: dict[str, list[ManagedWorker]] = {}
        for one in self._workers.values():
            if is_scaled(one) and not one.is_leaving:
                found.setdefault(one.spec.model_name, []).append(one)
        return found

    def spare(self) -> list[ManagedWorker]:
        """Return the copies above the fewest of their models: they may go for the first copy of another model."""
        groups = [ours for ours in self.scaled().values() if not self.is_changing(ours)]
        found = (in_order_of_stay(map(self.running, ours))[max(1, ours[0].spec.replicas.min) :] for ours in groups)
        return [self._workers[one.worker_id] for group in found for one in group]

    def end_for_room(self, worker: ManagedWorker) -> None:
        """End a spare copy, and all spare copies that wait for a place: the room is for another model."""
        pending = [one for one in self.spare() if one.spec.gpus and one.booking is None]
        for one in {one.id: one for one in (worker, *pending)}.values():
            log.info("worker %s ends: another model needs its room", one.id)
            self._remove(one)

    def is_changing(self, ours: Sequence[ManagedWorker]) -> bool:
        """Return whether one of these copies is being restarted after a reload."""
        under_way = self._restarts.under_way()
        return any(one.id in under_way for one in ours)

    def add(self, like: ManagedWorker, count: int) -> None:
        """Start this many copies with the table of a worker."""
        for _ in range(count):
            self._start(like.spec, is_launched=like.is_launched)

    def end(self, worker: ManagedWorker) -> None:
        """End a copy that has no requests, or cannot serve."""
        log.info("worker %s ends: fewer copies of %s are needed", worker.id, worker.spec.model_name)
        self._remove(worker)

    def scale(self, model: str, replicas: Replicas) -> ScaledCopies:
        """Change the number of copies of a model: until a reload names another number, or for good if it was launched.

        Raises ApiError: 404 for an unknown model, 409 where the model has no table here, several tables, or copies that
        are being restarted, 400 where its table does not allow this number.
        """
        ours, changed = self._changed(model, replicas)
        is_launched = bool(ours) and ours[0].is_launched
        if not is_launched:
            tables = self._context.config.managed_workers
            self._numbers.set(next(one for one in tables if one.model_name == model), replicas)
        there = [self._workers[one.worker_id] for one in in_order_of_stay(map(self.running, ours))]
        count = count_of(replicas, len(there))
        stay, ending = there[:count], there[count:]
        for one in stay:
            one.update(with_replicas(one.spec, replicas))
        for one in ending:
            self._remove(one)
        started = [self._start(changed, is_launched=is_launched) for _ in range(count - len(stay))]
        self.number()
        self._context.memory.save_soon()
        return ScaledCopies([one.id for one in started], [one.id for one in ending])

    def _changed(self, model: str, replicas: Replicas) -> tuple[list[ManagedWorker], ManagedWorkerConfig]:
        """Return the copies of a model, and its table with another number of copies. Raises ApiError as `scale`."""
        ours = [one for one in self._workers.values() if one.spec.model_name == model and not one.is_leaving]
        table = self._table_of(model, ours)
        if restarting := [one.id for one in ours if one.id in self._restarts.under_way()]:
            raise _conflict("restarting", f"Worker {restarting[0]} is being replaced after a reload: try again later.")
        changed = with_replicas(table, replicas)
        if problems := list(contradictions_of_replicas(changed)):
            raise errors.bad_request(f"{model} cannot have {replicas} copies: {'; '.join(problems)}.")
        return ours, changed

    def _table_of(self, model: str, ours: Sequence[ManagedWorker]) -> ManagedWorkerConfig:
        """Return the only table of a model. Raises ApiError 404 and 409."""
        directory = self._context.directory
        tables = [one for one in self._numbers.tables(self._context.config) if one.model_name == model]
        launched = [one.spec for one in ours if one.is_launched]
        tables += [one for index, one in enumerate(launched) if one not in launched[:index]]
        if len(tables) > 1:
            raise _conflict("several_tables", f"The model `{model}` has {len(tables)} tables: change them in the file.")
        if tables:
            return tables[0]
        if directory.has(model):
            raise _conflict("not_managed", f"The model `{model}` has no worker that this gateway starts.")
        raise errors.model_not_found(model, directory.names_near(model, directory.has))


def _conflict(code: str, message: str) -> ApiError:
    return ApiError(409, code, message, param="model")
