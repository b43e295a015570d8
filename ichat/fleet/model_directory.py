"""The models of external routes and workers by their names, and which of them can be served now. Purely synchronous.

A request costs a single look at a table, however many workers there are.
"""

import itertools
import math
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence

from ichat.config.schema import Config
from ichat.fleet.views import model_steps, result_of
from ichat.fleet.worker_record import State, WorkerRecord, activity_of, told_of
from ichat.fleet.worker_table import WorkerTable
from ichat.protocol.load_story import LoadStory
from ichat.protocol.messages import ModelCard
from ichat.routing.availability import Availability, Loadable, NotReady, Ready, Unknown, without_ill
from ichat.routing.endpoint import Endpoint
from ichat.routing.near_names import NearNames

RETRY_AFTER_S = 5
UNANSWERED = "the cluster that starts it does not answer"
"""The text for clients about such a model."""
REASONS_MAX = 8
"""The most workers with a reason why they do not serve a model."""


class ModelDirectory:
    """Answers questions about models, for workers and external routes alike."""

    def __init__(self, table: WorkerTable, external: Mapping[str, Sequence[Endpoint]]) -> None:
        """`external` has the endpoints of each external model."""
        self._table = table
        self._index = table.index
        self._restart_wait_s = 0.0
        """Requests wait for a worker that is on its way if it needs no longer; see `[timeouts]`. 0: none waits."""
        self._has_ill_routes = False
        self.use_routes(external)

    def __repr__(self) -> str:
        return f"<ModelDirectory {self._index!r}, {len(self.external)} external models>"

    def reconfigure(self, config: Config) -> None:
        """Use the time and the circuit breakers of another configuration; circuits keep their state."""
        self._restart_wait_s = config.timeouts.restart_wait_s
        for route in self.routes():
            route.circuit.reconfigure(config.circuit_breaker)

    def use_routes(self, external: Mapping[str, Sequence[Endpoint]]) -> None:
        """Go on with these endpoints of external models."""
        self.external = external
        self._external_names = NearNames(external)

    def routes(self) -> Iterator[Endpoint]:
        """Return the endpoints of all external routes."""
        return itertools.chain.from_iterable(self.external.values())

    def find_ill_routes(self) -> None:
        """Find out anew whether an external route fails its health checks."""
        self._has_ill_routes = any(route.health_failure for route in self.routes())

    def availability(self, model: str) -> Availability:
        """Return whether a model can be served now: by its external routes, else by its ready workers."""
        external = self.external.get(model)
        if external is not None:
            return without_ill(external, RETRY_AFTER_S) if self._has_ill_routes else Ready(external)
        self._table.refresh_due()
        return self._index.ready(model) or self._why_none(model)

    def _why_none(self, model: str) -> Loadable | NotReady | Unknown:
        table, having = self._table, self._index.of_model(model)
        if not having:
            return Unknown()
        now, reasons = table.clock(), [table.why_not_ready(one) for one in itertools.islice(having, REASONS_MAX)]
        if len(having) > REASONS_MAX:
            reasons.append(f"{len(having) - REASONS_MAX} more workers are not ready")
        states: dict[WorkerRecord, State] = {worker: table.state(worker) for worker in having}
        expected = [worker for worker, state in states.items() if worker.is_loadable(now, state)]
        told, coming = told_of([*states.values()]), not expected
        if coming and self._restart_wait_s:
            expected = [one for one, state in states.items() if one.is_coming(state, table.trouble_of(one))]
        if not expected:
            return _not_ready(having, now, "; ".join(reasons), told)
        first = min(expected, key=lambda one: math.inf if (at := one.comes_at()) is None else at)
        doing = activity_of(first, states[first])
        found = Loadable("; ".join(reasons), first.comes_at(), len(having), coming, doing, told=told)
        rest_s = found.rest_s(now)
        if not coming or rest_s is None or rest_s <= self._restart_wait_s:
            return found
        why = f"{found.reasons}; it takes about {rest_s} s"
        return NotReady(why, rest_s, "timeouts.restart_wait_s", told=f"{told}, which takes about {rest_s} s")

    def has(self, model: str) -> bool:
        """Return whether a model has this name, whether it can be served now or not."""
        return model in self.external or bool(self._index.of_model(model))

    def workers_of(self, model: str) -> Collection[WorkerRecord]:
        """Return the workers that serve a model of this name, or will."""
        return self._index.of_model(model)

    def names(self) -> set[str]:
        """Return every name of a model, whether it can be served now or not."""
        return {*self.external, *self._index.models()}

    def names_near(self, model: str, is_shown: Callable[[str], bool]) -> set[str]:
        """Return some of the names that may be shown, those near to this name among them."""
        return self._index.names.around(model, is_shown) | self._external_names.around(model, is_shown)

    def lists(self, model: str) -> bool:
        """Return whether a model is listed; of many workers that cannot serve now, only some count."""
        routes = self.external.get(model, ())
        if not all(route.health_failure for route in routes) or self._index.ready(model) is not None:
            return True
        return any(map(_will_serve, itertools.islice(self._index.of_model(model), REASONS_MAX)))

    def _listed(self, workers: Collection[WorkerRecord]) -> Iterator[WorkerRecord]:
        """Return the workers with listed models: those that can serve now, or will once they are asked for."""
        self._table.refresh_due()
        ready = self._index.all_ready()
        return (worker for worker in workers if worker in ready or _will_serve(worker))

    def model_steps(self) -> Generator[None, None, dict[str, tuple[ModelCard, str]]]:
        """Return the listed models by their names, each with its owner, in steps of a millisecond or so.

        These can be served now, or once they are loaded.
        """
        return model_steps(self.external, list(self._listed([*self._table])))

    def model(self, name: str) -> tuple[ModelCard, str] | None:
        """Return a listed model with its owner."""
        routes = {name: self.external[name]} if name in self.external else {}
        return result_of(model_steps(routes, self._listed(self._index.of_model(name)), name)).get(name)

    def story(self, model: str, now: float) -> LoadStory | None:
        """Return the load of a model that will end first; None while none is under way."""
        stories = [worker.load.story(now) for worker in self._index.of_model(model) if worker.load is not None]
        return min(stories, key=lambda one: math.inf if one.rest_s is None else one.rest_s, default=None)

    def owner_of(self, model: str) -> str:
        """Return what serves a model, now or once it is ready: an engine, or `external`; empty if it is not known."""
        if model in self.external:
            return "external"
        worker = next(iter(self._index.of_model(model)), None)
        return "" if worker is None else worker.engine

    def is_loaded(self, model: str) -> bool | None:
        """Return whether a model that is loaded on demand can be served at once; None: it is no such model."""
        if model in self.external or not any(worker.on_demand for worker in self._index.of_model(model)):
            return None
        return isinstance(self.availability(model), Ready)


def _will_serve(worker: WorkerRecord) -> bool:
    """Return whether a worker will serve once it is asked for."""
    return worker.on_demand and not worker.has_failed


def _not_ready(having: Collection[WorkerRecord], now: float, reasons: str, told: str) -> NotReady:
    """Return why none of these workers serves its model; it is final where only another request, or nothing, helps."""
    is_final = all(map(_is_final, having))
    retry_at = [one.retry_at for one in having if one.on_demand and one.retry_at is not None] if is_final else ()
    retry_after_s = max(1, math.ceil(min(retry_at) - now)) if retry_at else RETRY_AFTER_S
    if retry_at:
        told = f"it has failed, and can be asked for again in {retry_after_s} s"
    elif any(one.is_unanswered for one in having):
        told = UNANSWERED
    return NotReady(reasons, retry_after_s, is_final=is_final, told=told)


def _is_final(worker: WorkerRecord) -> bool:
    """Return whether no request can wait for a worker that is not on its way: it has failed, or has no cluster now."""
    has_failed = worker.is_down and (worker.on_demand or worker.has_failed or not worker.was_ready)
    return has_failed or worker.is_unanswered
