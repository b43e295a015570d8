"""The models of external routes and workers by their names. Purely synchronous."""

import math
from collections.abc import Callable, Generator, Mapping, Sequence

from ichat.fleet.views import model_steps, result_of
from ichat.fleet.worker_table import RETRY_AFTER_S, WorkerTable
from ichat.protocol.load_story import LoadStory
from ichat.protocol.messages import ModelCard
from ichat.routing.availability import Availability, Ready, without_ill
from ichat.routing.endpoint import Endpoint
from ichat.routing.near_names import NearNames


class ModelDirectory(WorkerTable):
    """Answers questions about models, for workers and external routes alike."""

    def __init__(
        self, external: Mapping[str, Sequence[Endpoint]], clock: Callable[[], float], wedged_after_s: float
    ) -> None:
        """`external` has the endpoints of each external model."""
        super().__init__(clock, wedged_after_s)
        self.external = external
        self._has_ill_routes = False
        self._routes_near = external, NearNames(external)

    def use_routes(self, external: Mapping[str, Sequence[Endpoint]]) -> None:
        """Go on with these endpoints of external models."""
        self.external = external

    def availability(self, model: str) -> Availability:
        """Return whether a model can be served now: by its external routes, else by its ready workers."""
        external = self.external.get(model)
        if external is not None:
            return without_ill(external, RETRY_AFTER_S) if self._has_ill_routes else Ready(external)
        return super().availability(model)

    def has(self, model: str) -> bool:
        """Return whether a model has this name, whether it can be served now or not."""
        return model in self.external or bool(self.of_model(model))

    def names(self) -> set[str]:
        """Return every name of a model, whether it can be served now or not."""
        return {*self.external, *self.served_names()}

    def names_near(self, model: str, is_shown: Callable[[str], bool]) -> set[str]:
        """Return some of the names that may be shown, those near to this name among them."""
        if self._routes_near[0] is not self.external:
            self._routes_near = self.external, NearNames(self.external)
        return super().names_near(model, is_shown) | self._routes_near[1].around(model, is_shown)

    def lists(self, model: str) -> bool:
        """Return whether a model is among the `models`."""
        routes = self.external.get(model, ())
        return not all(route.health_failure for route in routes) or super().lists(model)

    def models(self) -> dict[str, tuple[ModelCard, str]]:
        """Return the models that can be served now, or once they are loaded, by their names, each with its owner."""
        return result_of(self.model_steps())

    def model_steps(self) -> Generator[None, None, dict[str, tuple[ModelCard, str]]]:
        """Return the `models` in steps of a millisecond or so."""
        return model_steps(self.external, list(self.listed()))

    def model(self, name: str) -> tuple[ModelCard, str] | None:
        """Return one of the `models`, with its owner."""
        routes = {name: self.external[name]} if name in self.external else {}
        return result_of(model_steps(routes, self.listed(name), name)).get(name)

    def story(self, model: str, now: float) -> LoadStory | None:
        """Return the load of a model that will end first; None while none is under way."""
        stories = [worker.load.story(now) for worker in self.of_model(model) if worker.load is not None]
        return min(stories, key=lambda one: math.inf if one.rest_s is None else one.rest_s, default=None)

    def owner_of(self, model: str) -> str:
        """Return what serves a model, now or once it is ready: an engine, or `external`; empty if it is not known."""
        if model in self.external:
            return "external"
        worker = next(iter(self.of_model(model)), None)
        if worker is None:
            return ""
        return worker.heartbeat.backend if worker.heartbeat else str(worker.settings.get("backend", ""))

    def is_loaded(self, model: str) -> bool | None:
        """Return whether a model that is loaded on demand can be served at once; None: it is no such model."""
        if model in self.external or not any(worker.on_demand for worker in self.of_model(model)):
            return None
        return isinstance(super().availability(model), Ready)
