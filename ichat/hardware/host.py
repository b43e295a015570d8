"""The hardware of this machine and how much of it is in use: processors, memory, GPUs and their processes."""

import os
import time
from collections.abc import Callable, Mapping, Sequence

import attrs
import psutil

from ichat.hardware.gpus import Gpu
from ichat.protocol.messages import Count, Share

APART_S = 1.0
"""The least time over which the use of the processors is measured: over a millisecond it would be noise."""


@attrs.frozen
class CpuUse:
    """The processors of a machine."""

    count: Count | None
    """The processors of the machine."""
    usable: Count | None
    """The processors that the gateway may use."""
    use: Share | None
    """The busy share of all processors, 0 to 1, over a second or more; None: there were no two readings yet."""
    load: tuple[float, float, float] | None
    """The load averages of 1, 5 and 15 minutes."""


@attrs.frozen
class MemoryUse:
    """The memory of a machine."""

    total_bytes: Count
    available_bytes: Count


@attrs.frozen
class ProcessUse:
    """The gateway's process."""

    pid: Count
    memory_bytes: Count
    """Resident memory, in bytes."""


@attrs.frozen
class GpuHolder:
    """A process that uses a GPU."""

    pid: int
    """As the driver counts: in a container, another process may have this number."""
    memory_bytes: int | None
    program: str | None
    worker_id: str | None
    """The managed worker that the process belongs to, or None."""


@attrs.frozen
class GpuStatus:
    """A GPU and the processes that use it."""

    index: int
    """The GPU's number in the order of the PCI bus."""
    uuid: str
    name: str
    memory_total_bytes: int | None
    memory_used_bytes: int | None
    memory_free_bytes: int | None
    use: float | None
    """The share of the last moments in which the GPU computed, 0 to 1."""
    failure: str | None
    """Why the GPU does not answer; None: it does."""
    held_by: Sequence[GpuHolder]
    """The processes that use the GPU."""


@attrs.frozen
class HostResources:
    """The gateway's machine; a field that is None is not known."""

    cpu: CpuUse
    memory: MemoryUse
    gateway: ProcessUse
    gpus: Sequence[GpuStatus] | None
    """The GPUs in the order of the PCI bus; None: NVIDIA's library is missing or did not answer."""


class CpuMeter:
    """Measures how busy the processors are since an earlier reading, without waiting."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before = clock(), *_cpu_seconds()
        self._use: float | None = None

    def __repr__(self) -> str:
        return f"<CpuMeter use={self._use}>"

    def read(self) -> float | None:
        """Return the busy share, 0 to 1, since a reading that is `APART_S` old; None until such a reading exists."""
        now = self._clock()
        then, idle_then, all_then = self._before
        if now - then >= APART_S:
            idle, everything = _cpu_seconds()
            self._before = now, idle, everything
            if everything > all_then:
                busy = 1 - (idle - idle_then) / (everything - all_then)
                self._use = round(min(max(busy, 0.0), 1.0), 4)
        return self._use


def read_resources(meter: CpuMeter, gpus: Sequence[Gpu] | None, workers: Mapping[int, str]) -> HostResources:
    """Return the hardware of this machine and how much of it is in use, in about a millisecond.

    `gpus` is from a `GpuReader`; `workers` has the ids of the managed workers by the pids of their first processes.
    """
    memory = psutil.virtual_memory()
    own = psutil.Process()
    return HostResources(
        CpuUse(psutil.cpu_count(), _usable(), meter.read(), _load()),
        MemoryUse(memory.total, memory.available),
        ProcessUse(own.pid, own.memory_info().rss),
        None if gpus is None else [_gpu(gpu, workers) for gpu in gpus],
    )


def worker_of(pid: int, workers: Mapping[int, str]) -> str | None:
    """Return the id of the worker that a process belongs to: one of the process's parents started the worker.

    If its parent has ended, a process is found by its session, since every managed worker has its own.
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


def _gpu(gpu: Gpu, workers: Mapping[int, str]) -> GpuStatus:
    told = {name: getattr(gpu, name) for name in attrs.fields_dict(GpuStatus) if name not in ("failure", "held_by")}
    holders = [
        GpuHolder(one.pid, one.memory_bytes, one.program or None, worker_of(one.pid, workers)) for one in gpu.processes
    ]
    return GpuStatus(**told, failure=gpu.failure or None, held_by=holders)


def _cpu_seconds() -> tuple[float, float]:
    """Return the idle seconds and all seconds of all processors since the machine started."""
    times = psutil.cpu_times()._asdict()
    everything = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)  # Linux counts them twice
    return times["idle"] + times.get("iowait", 0.0), everything


def _usable() -> int | None:
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return None


def _load() -> tuple[float, float, float] | None:
    try:
        now, recent, earlier = os.getloadavg()
        return round(now, 2), round(recent, 2), round(earlier, 2)
    except (AttributeError, OSError):
        return None
