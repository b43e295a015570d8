"""Which managed workers cannot stand side by side, by their tables alone: for the same port, or the same GPUs."""

import math

from ichat.config.schema import ManagedWorkerConfig
from ichat.supervisor.preflight_facts import VISIBLE, arguments_of

MEMORY_SHARE = 0.9
"""vLLM's default share of a GPU's memory: 0.9, in newer releases 0.92. The smaller one refuses nothing wrongly."""

_ALL_ADDRESSES = frozenset(("", "0.0.0.0", "::"))


def conflicts(one: ManagedWorkerConfig, other: ManagedWorkerConfig, *, has_gpus: bool) -> bool:
    """Return whether only one of two workers can run at a time.

    `has_gpus` says whether the machine has any: a worker whose GPUs are not named uses all of them. Three workers that
    share a GPU may take more of it than there is although each two of them fit; preflight finds that.
    """
    return have_one_port(one, other) or _need_one_gpu(one, other, has_gpus=has_gpus)


def have_one_port(one: ManagedWorkerConfig, other: ManagedWorkerConfig) -> bool:
    """Return whether both listen on one port of the same address."""
    first, second = one.tcp_address(), other.tcp_address()
    if first is None or second is None:
        return False
    is_same_host = first[0] == second[0] or not _ALL_ADDRESSES.isdisjoint((first[0], second[0]))
    return first[1] != 0 and first[1] == second[1] and is_same_host


def _need_one_gpu(one: ManagedWorkerConfig, other: ManagedWorkerConfig, *, has_gpus: bool) -> bool:
    """Return whether both use one GPU and may not, or cannot, share it."""
    if one.share_gpus and other.share_gpus and do_shares_fit(one, other):
        return False
    first, second = _gpus_of(one, has_gpus=has_gpus), _gpus_of(other, has_gpus=has_gpus)
    if first is None or second is None:
        return first != set() and second != set()
    return not first.isdisjoint(second)


def _gpus_of(worker: ManagedWorkerConfig, *, has_gpus: bool) -> set[int] | None:
    """Return the numbers of the GPUs that a worker uses; None: all of them, or it is not known which."""
    words = worker.env[VISIBLE].split(",") if VISIBLE in worker.env else None
    if words is None and worker.gpu_ids is not None:
        return set(worker.gpu_ids)
    named = [word.strip() for word in words or () if word.strip()]
    if words is not None and all(word.isdecimal() for word in named):
        return {int(word) for word in named}
    return None if has_gpus else set()


def do_shares_fit(*workers: ManagedWorkerConfig) -> bool:
    """Return whether a GPU has the memory that the vLLM workers among these take of it."""
    return shares_of(*workers) <= 1 + 1e-9


def shares_of(*workers: ManagedWorkerConfig) -> float:
    """Return the share of a GPU's memory that the vLLM workers among these take together."""
    return sum(memory_share(worker) for worker in workers if worker.backend == "vllm")


def memory_share(worker: ManagedWorkerConfig) -> float:
    """Return the share of its GPUs' memory that a worker was told to take."""
    names = ("gpu_memory_utilization", "device_memory_utilization", "mem_fraction_static")
    return number_in_arguments(worker, *names, default=MEMORY_SHARE)


def number_in_arguments(worker: ManagedWorkerConfig, *names: str, default: float) -> float:
    """Return an engine argument by any of its names. The engine itself refuses a value that is no number."""
    arguments = arguments_of(worker)
    value = next((arguments[name] for name in names if name in arguments), default)
    try:
        number = default if isinstance(value, bool | list | dict) else float(value)
    except ValueError:
        return default
    return number if math.isfinite(number) else default
