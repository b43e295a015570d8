"""What this machine has and how much of it is in use: processors, memory, GPUs and who holds them."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

from ichat.hardware.gpus import Gpu, GpuProcess

APART_S = 1.0
"""The use of the processors is measured over so long at least: over a millisecond it would be noise."""


class CpuMeter:
    """Measures how busy the processors are, without waiting: always since an earlier reading."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before = clock(), *_cpu_seconds()
        self._use: float | None = None

    def __repr__(self) -> str:
        return f"<CpuMeter use={self._use}>"

    def read(self) -> float | None:
        """Give the busy share, 0 to 1, since the reading before that is `APART_S` old; None until there is one."""
        now = self._clock()
        then, idle_then, all_then = self._before
        if now - then >= APART_S:
            idle, everything = _cpu_seconds()
            self._before = now, idle, everything
            if everything > all_then:
                busy = 1 - (idle - idle_then) / (everything - all_then)
                self._use = round(min(max(busy, 0.0), 1.0), 4)
        return self._use


def read_resources(meter: CpuMeter, gpus: Sequence[Gpu] | None, workers: Mapping[int, str]) -> dict[str, Any]:
    """Give what `GET /v1/admin/cluster/status` says of this machine; takes about a millisecond.

    `gpus` comes from `find_gpus`; `workers` has the ids of the managed workers by the pids of their first processes.
    """
    memory = psutil.virtual_memory()
    own = psutil.Process()
    return {
        "cpu": {"count": psutil.cpu_count(), "usable": _usable(), "use": meter.read(), "load": _load()},
        "memory": {"total_bytes": memory.total, "available_bytes": memory.available},
        "gateway": {"pid": own.pid, "memory_bytes": own.memory_info().rss},
        "gpus": None if gpus is None else [_gpu(gpu, workers) for gpu in gpus],
    }


def worker_of(pid: int, workers: Mapping[int, str]) -> str | None:
    """Give the id of the worker that a process belongs to: the first process of one is among its parents.

    One whose parent has ended is known by its session, which every managed worker has of its own.
    """
    if pid in workers:
        return workers[pid]
    try:
        first = os.getsid(pid)
        if first in workers:
            return workers[first]
        return next((workers[parent.pid] for parent in psutil.Process(pid).parents() if parent.pid in workers), None)
    except (psutil.Error, OSError, OverflowError):
        return None


def _gpu(gpu: Gpu, workers: Mapping[int, str]) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "memory_total_bytes": gpu.memory_total_bytes,
        "memory_used_bytes": gpu.memory_used_bytes,
        "memory_free_bytes": gpu.memory_free_bytes,
        "use": gpu.use,
        "failure": gpu.failure or None,
        "held_by": [_holder(process, workers) for process in gpu.processes],
    }


def _holder(process: GpuProcess, workers: Mapping[int, str]) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "program": process.program or None,
        "memory_bytes": process.memory_bytes,
        "worker_id": worker_of(process.pid, workers),
    }


def _cpu_seconds() -> tuple[float, float]:
    """Give the seconds that all processors have idled, and all their seconds, since the machine started."""
    times = psutil.cpu_times()._asdict()
    everything = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)  # Linux counts them twice
    return times["idle"] + times.get("iowait", 0.0), everything


def _usable() -> int | None:
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return None


def _load() -> list[float] | None:
    try:
        return [round(load, 2) for load in os.getloadavg()]
    except (AttributeError, OSError):
        return None
