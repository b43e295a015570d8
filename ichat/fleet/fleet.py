"""The gateway's picture of its workers and models, in parts: each component gets the parts that it uses."""

import math
from collections.abc import Callable, Mapping, Sequence

from ichat.config.schema import Config, Limits
from ichat.fleet.load_times import WorkerLoads
from ichat.fleet.managed_records import ManagedRecords
from ichat.fleet.model_directory import ModelDirectory
from ichat.fleet.probes import Probes
from ichat.fleet.registry import Registry
from ichat.fleet.weights import Weights
from ichat.fleet.worker_table import WorkerTable
from ichat.routing.endpoint import Endpoint


class Fleet:
    """The parts: each owns a state, or makes a single kind of change of workers.

    `table` has the workers with their endpoints and states, and notifies of every change; `directory` has the models.
    `managed`, `registry` and `probes` change workers by the processes started here, heartbeats and health checks.
    """

    def __init__(
        self,
        external: Mapping[str, Sequence[Endpoint]],
        clock: Callable[[], float],
        max_in_flight: int,
        wedged_after_s: float = math.inf,
    ) -> None:
        """`external` has the endpoints of each external model; `max_in_flight` is the default of a worker."""
        weights, loads = Weights(Limits()), WorkerLoads(clock)
        self.table = WorkerTable(clock, weights, max_in_flight, wedged_after_s)
        self.directory = ModelDirectory(self.table, external)
        self.managed = ManagedRecords(self.table, loads)
        self.registry = Registry(self.table, self.directory, loads, weights)
        self.probes = Probes(self.table, self.directory)

    def __repr__(self) -> str:
        return f"<Fleet {', '.join(worker.id for worker in self.table)}>"

    def reconfigure(self, config: Config) -> None:
        """Use another configuration in all parts, and then notify the listeners once."""
        self.directory.reconfigure(config)
        self.registry.reconfigure(config)
        self.table.reconfigure(config)
        self.table.changed()
