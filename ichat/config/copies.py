"""The copies of managed workers: the tables for each of them, and the keys that do not go with several copies."""

from collections.abc import Iterable, Sequence

import attrs

from ichat.config.replicas import Replicas
from ichat.config.schema import ManagedWorkerConfig


def contradictions_of_replicas(worker: ManagedWorkerConfig) -> Iterable[str]:
    """Return the keys of a table that do not go with its number of copies, each with the reason."""
    if worker.scale.down_s < worker.scale.up_s:
        times = f"scale.down_s ({worker.scale.down_s:g}) must be at least scale.up_s ({worker.scale.up_s:g})"
        yield f"{times}: otherwise the number of copies never rests"
    if worker.replicas.min == 0 and worker.load != "on_demand":
        yield "load: replicas.min = 0 means that the model is loaded on demand: leave load out"
    if worker.replicas.max < 2:
        return
    if worker.load == "on_demand":
        yield "load: a single copy is loaded on demand: leave load out, or write replicas = { min = 0, max = 1 }"
    if worker.port:
        yield "port: two copies cannot have the same port: leave port out (0: any free port), or write two tables"
    if worker.gpu_ids:
        yield "gpu_ids: two copies cannot have the same GPUs: write gpus = 1, or two tables"


def with_replicas(worker: ManagedWorkerConfig, replicas: Replicas) -> ManagedWorkerConfig:
    """Return a table with another number of copies: with a `min` of 0 its model is loaded on demand."""
    was_on_demand = worker.replicas.min == 0
    load = "on_demand" if replicas.min == 0 else "start" if was_on_demand else worker.load
    return attrs.evolve(worker, replicas=replicas, load=load)


def count_of(replicas: Replicas, there: int) -> int:
    """Return how many copies there are within these bounds, if this many are there now."""
    return max(replicas.wanted, min(there, replicas.max))


def each_copy(workers: Iterable[ManagedWorkerConfig]) -> Sequence[ManagedWorkerConfig]:
    """Return each table once for each of its copies."""
    return [worker for worker in workers for _ in range(worker.replicas.wanted)]
