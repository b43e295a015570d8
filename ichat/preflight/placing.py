"""A worker with `gpus` before its start: its wish, the GPUs of this machine, and its table with its place."""

import math
import os
from collections.abc import Callable, Mapping, Sequence

import attrs

from ichat.config.engine_args import USABLE, arguments_of, has_share, stages_of
from ichat.config.process_marks import WORKER_VARIABLE, mark_of
from ichat.config.schema import ManagedWorkerConfig
from ichat.engines.kept_flags import version_of
from ichat.hardware.gpus import Gpu
from ichat.placement.estimate import GIB
from ichat.placement.learnt import LoadCircumstances
from ichat.placement.model_shape import UnknownShape
from ichat.placement.place import Held, ModelFigures, NoPlace, PlaceableGpu, Placement, Wish, place
from ichat.placement.settings import settings_of
from ichat.placement.weights import DamagedFile
from ichat.preflight.claims import claims_of
from ichat.preflight.facts import VISIBLE, real_path_of
from ichat.preflight.model_memory import describe_model

UNKNOWN_RESERVE = 0.1
"""The share of its claim that SGLang keeps for steps and graphs, if the model's figures are not known."""


def read_wish(worker: ManagedWorkerConfig, environment: Mapping[str, str], python: str) -> Wish:
    """Return the wish of a worker with `gpus`, without the figures of earlier loads.

    `python` is its engine's interpreter. It reads files of the model and of the engine, so it belongs in a thread.
    """
    assert worker.gpus is not None
    arguments, figures, unknown = arguments_of(worker), None, ""
    try:
        settings = settings_of(worker.backend, arguments)
        model = describe_model(worker.model_path, arguments, environment)
        figures = ModelFigures(model.shape, model.weights(settings.element), settings)
    except (UnknownShape, DamagedFile) as error:
        unknown = str(error)
    except OSError as error:
        unknown = error.strerror or str(error)
    return Wish(
        model=os.path.basename(worker.model_path.rstrip("/")) or worker.model_name,
        path=worker.model_path,
        gpus=worker.gpus,
        figures=figures,
        unknown=unknown,
        memory_bytes=None if worker.gpu_memory_gib is None else math.ceil(worker.gpu_memory_gib * GIB),
        stages=stages_of(arguments),
        circumstances=_circumstances_of(worker, python),
    )


def _circumstances_of(worker: ManagedWorkerConfig, python: str) -> LoadCircumstances | None:
    version = version_of(worker.backend, python)
    if version is None:
        return None
    return LoadCircumstances(real_path_of(worker.model_path), worker.backend, arguments_of(worker), version)


def unbooked(gpus: Sequence[Gpu] | None) -> list[PlaceableGpu] | None:
    """Return the GPUs as if no gateway's worker ran here; it reads `/proc`."""
    found = placeable(gpus, os.environ.get(VISIBLE), lambda pid: bool(mark_of(pid, WORKER_VARIABLE)))
    return None if found is None else [attrs.evolve(gpu, used_bytes=None) for gpu in found]


def placeable(
    gpus: Sequence[Gpu] | None, visible: str | None, is_ours: Callable[[int], bool]
) -> list[PlaceableGpu] | None:
    """Return the GPUs of this machine for a placement; None if they are not known.

    `visible` is the gateway's own CUDA_VISIBLE_DEVICES: no other GPUs are used. `is_ours` says whether a process
    belongs to a worker, so that a claim has its memory already.
    """
    return None if gpus is None else [_placeable(gpu, visible, is_ours) for gpu in gpus]


def _placeable(gpu: Gpu, visible: str | None, is_ours: Callable[[int], bool]) -> PlaceableGpu:
    words = [word.strip() for word in (visible or "").split(",")]
    is_named = str(gpu.index) in words or any(word.startswith("GPU-") and gpu.uuid.startswith(word) for word in words)
    trouble = "" if visible is None or is_named else f"is not for this gateway ({VISIBLE}={visible})"
    if gpu.is_split:
        trouble = "is divided into instances (MIG): name an instance by CUDA_VISIBLE_DEVICES in env"
    if gpu.failure and gpu.memory_total_bytes is None:
        trouble = f"does not answer ({gpu.failure})"
    others = sum(one.memory_bytes or 0 for one in gpu.processes if one.program and not is_ours(one.pid))
    return PlaceableGpu(gpu.index, gpu.name, gpu.memory_total_bytes, gpu.memory_used_bytes, others, trouble)


def held_by(tables: Mapping[str, ManagedWorkerConfig]) -> Held:
    """Return the claims of workers with these tables, by their ids. A share of unknown size is the whole GPU."""
    claims = {name: claims_of(table, has_gpus=True).gpus for name, table in tables.items()}
    return {name: {number: share or math.inf for number, share in found.items()} for name, found in claims.items()}


def placed(
    worker: ManagedWorkerConfig, wish: Wish, found: Placement, gpus: Sequence[PlaceableGpu]
) -> ManagedWorkerConfig:
    """Return a worker's table with its place: its GPUs, and the arguments that follow only from the place."""
    table = attrs.evolve(worker, gpu_ids=list(found.gpu_ids))
    gpu = next((one for one in gpus if one.number in found.gpu_ids), None)
    if not has_share(worker) or worker.backend != "sglang" or gpu is None or gpu.memory_bytes is None:
        return table
    share = sglang_share(wish, found.share, gpu.memory_bytes, gpu.free_bytes or gpu.memory_bytes)
    return attrs.evolve(table, backend_args={**worker.backend_args, "mem_fraction_static": share})


def sglang_share(wish: Wish, share: float, memory_bytes: int, free_bytes: int) -> float:
    """Return SGLang's `mem_fraction_static` for a share of a GPU: a share of the memory that is free at its start.

    SGLang uses memory for steps and graphs beside it.
    """
    claim = USABLE * share * memory_bytes
    if wish.figures is None:
        beside = UNKNOWN_RESERVE * claim
    else:
        beside = sum(part.bytes for part in wish.figures.on(1, memory_bytes).parts if part.grade == "assumed")
    return math.floor(1000 * min(0.99, max(0.001, (claim - beside) / free_bytes))) / 1000


def place_tables(
    tables: Mapping[str, ManagedWorkerConfig], wishes: Mapping[str, Wish], gpus: Sequence[PlaceableGpu] | None
) -> dict[str, ManagedWorkerConfig | NoPlace]:
    """Return the tables with `gpus` with their places, as if all workers were started in this order.

    `wishes` has the wish of each. Workers that name their GPUs keep them.
    """
    held = {name: table for name, table in tables.items() if table.gpus is None and table.load == "start"}
    found: dict[str, ManagedWorkerConfig | NoPlace] = {}
    for name, table in tables.items():
        if table.gpus is None:
            continue
        chosen = place(wishes[name], gpus, held_by(held if table.load == "start" else {}))
        if isinstance(chosen, Placement):
            found[name] = placed(table, wishes[name], chosen, gpus or ())
            if table.load == "start":
                held[name] = attrs.evolve(table, gpu_ids=list(chosen.gpu_ids))
        else:
            found[name] = chosen
    return found
