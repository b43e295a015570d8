"""The arguments of a managed worker's engine that iChat reads itself, and how `gpus` and they go together."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ichat.config.schema import ManagedWorkerConfig

Arguments = Mapping[str, Any]

TENSOR = ("tensor_parallel_size", "tp_size", "tp")
PIPELINE = ("pipeline_parallel_size", "pp_size", "pp")
SHARE = ("gpu_memory_utilization", "device_memory_utilization", "mem_fraction_static")
_DATA = ("data_parallel_size", "dp_size", "dp")
USABLE = 0.95
"""The share of a GPU's memory that `gpus` gives out; the rest is for the driver and for what no engine counts."""
_ENGINES = ("vllm", "sglang")


def arguments_of(worker: ManagedWorkerConfig) -> dict[str, Any]:
    """Return the engine's arguments, their names with underscores."""
    return {**implied_arguments(worker), **_given(worker)}


def number_of(arguments: Arguments, *names: str, default: float) -> float:
    """Return an argument by any of its names. The engine itself refuses a value that is no number."""
    value = next((arguments[name] for name in names if name in arguments), default)
    try:
        number = default if value is None or isinstance(value, bool | list | dict) else float(value)
    except (ValueError, OverflowError):
        return default
    return number if math.isfinite(number) else default


def has_share(worker: ManagedWorkerConfig) -> bool:
    """Return whether a worker gets a share of a GPU, by `gpus`."""
    return isinstance(worker.gpus, float)


def stages_of(arguments: Arguments) -> int:
    """Return into how many parts an engine divides or copies a model, beside the GPUs that share each layer."""
    copies = 1.0 if arguments.get("enable_dp_attention") is True else number_of(arguments, *_DATA, default=1)
    return max(1, int(number_of(arguments, *PIPELINE, default=1))) * max(1, int(copies))


def _given(worker: ManagedWorkerConfig) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in worker.backend_args.items()}


def implied_arguments(worker: ManagedWorkerConfig) -> dict[str, Any]:
    """Return the arguments that follow from `gpus`: the number of GPUs that share each layer, and vLLM's share."""
    if worker.gpus is None or worker.backend not in _ENGINES:
        return {}
    if has_share(worker):
        share = math.floor(100 * USABLE * float(worker.gpus) + 1e-9) / 100
        return {"gpu_memory_utilization": share} if worker.backend == "vllm" else {}
    given, count = _given(worker), worker.gpus if worker.gpu_ids is None else len(worker.gpu_ids)
    if not isinstance(count, int) or any(name in given for name in TENSOR) or is_over_machines(given):
        return {}
    tensor = count // stages_of(given)
    return {"tensor_parallel_size": tensor} if tensor > 1 else {}


def uses_ray(arguments: Arguments) -> bool:
    """Return whether an engine starts processes by Ray itself."""
    by_vllm = (arguments.get(name) == "ray" for name in ("distributed_executor_backend", "data_parallel_backend"))
    return arguments.get("use_ray") is True or any(by_vllm)


def is_over_machines(arguments: Arguments) -> bool:
    """Return whether the GPUs of other machines count as well."""
    return uses_ray(arguments) or number_of(arguments, "nnodes", default=1) > 1


def contradictions_of_gpus(worker: ManagedWorkerConfig, devices: str) -> Iterator[str]:
    """Return the contradictions of `gpus` with other keys; `devices` is the variable that names the worker's GPUs."""
    if worker.gpus is None:
        if worker.gpu_memory_gib is not None:
            yield "gpu_memory_gib: is for workers with gpus: give that too, or leave it out"
        return
    if worker.gpu_ids is not None:
        yield "gpus: gpus and gpu_ids exclude each other: give the number, or the GPUs"
        return
    if devices in worker.env:
        yield f"gpus: gpus and {devices} in env exclude each other: give the number, or the GPUs"
    if worker.share_gpus:
        yield "share_gpus: a worker with gpus gets whole GPUs, or its share of a GPU: leave share_gpus out"
    if worker.gpu_memory_gib is not None and worker.gpus in ("auto", 0):
        yield "gpu_memory_gib: is the memory on each of a number of GPUs: write that number in gpus"
    yield from _contradictions_of_arguments(worker)


def _contradictions_of_arguments(worker: ManagedWorkerConfig) -> Iterator[str]:
    arguments = arguments_of(worker)
    given = worker.backend_args.keys()
    if has_share(worker) and (names := [name for name in given if name.replace("-", "_") in SHARE]):
        yield f"gpus: a share of a GPU sets the engine's share of its memory: leave {names[0]} out"
    if worker.gpus == "auto" or is_over_machines(arguments) or not worker.gpus:
        return
    count, stages = math.ceil(worker.gpus), stages_of(arguments)
    used = max(1, int(number_of(arguments, *TENSOR, default=1))) * stages
    if used == count or worker.backend not in _ENGINES:
        return
    name = next((name for name in given if name.replace("-", "_") in TENSOR), "")
    if name or used > count:
        remedy = f"leave {name} out, or write" if name else "write"
        yield f"gpus: The engine is to use {used} GPUs and the worker gets {count}: {remedy} gpus = {used}"
    else:
        yield f"gpus: the model is divided into {stages} parts, so gpus must be a multiple of {stages}, not {count}"
