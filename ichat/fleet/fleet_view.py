"""The reads of the fleet by the data plane: nothing else of it is known to code that answers requests."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ichat.fleet.worker_record import WorkerRecord
from ichat.protocol.load_story import LoadStory
from ichat.routing.availability import Availability
from ichat.routing.endpoint import Endpoint


class DirectoryView(Protocol):
    """The models as the data plane sees them: a `ModelDirectory`, or a copy of it in another process."""

    @property
    def external(self) -> Mapping[str, Sequence[Endpoint]]:
        """The endpoints of each external model."""
        ...

    def availability(self, model: str) -> Availability:
        """Return whether a model can be served now, and by which endpoints."""
        ...

    def has(self, model: str) -> bool:
        """Return whether a model has this name, whether it can be served now or not."""
        ...

    def lists(self, model: str) -> bool:
        """Return whether a model is shown to clients."""
        ...

    def names_near(self, model: str, is_shown: Callable[[str], bool]) -> set[str]:
        """Return some of the names that may be shown, those near to this name among them."""
        ...

    def story(self, model: str, now: float) -> LoadStory | None:
        """Return the load of a model that will end first; None while none is under way."""
        ...


class TableView(Protocol):
    """The workers as the data plane sees them: a `WorkerTable`, or a copy of it in another process."""

    def get(self, worker_id: str) -> WorkerRecord | None:
        """Return the worker of this id."""
        ...

    def keeper(self, tag: str) -> WorkerRecord | None:
        """Return the worker that keeps the responses with this tag in their ids."""
        ...

    def endpoint_of(self, worker: WorkerRecord) -> Endpoint | None:
        """Return where a worker's requests go, known from its first heartbeat on."""
        ...
