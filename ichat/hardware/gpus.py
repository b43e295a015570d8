"""The GPUs of this machine, as NVIDIA's management library (NVML) reports them.

A number in `gpu_ids` counts in the order of the PCI bus, as nvidia-smi does and `Gpu.index` here. CUDA by itself counts
the fastest GPU first: workers therefore get ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
"""

# NVML's Python module has no types, and need not be there.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

import contextlib
import ctypes
import importlib
import itertools
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import psutil
import trio

from ichat.protocol.messages import GPUS_MAX

READ_S = 5.0
"""The limit for a reading, apart from the call in progress; and the limit of its wait for another reading."""
FIND_S = 12.0
"""How long `GpuReader.find` waits: for another reading, for its own, and for a slow call."""
PROCESSES_MAX = 256
"""The most processes that are reported for each GPU."""

_Read = TypeVar("_Read")
_MODULE = "pynvml"
_DRIVER = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")
"""Files that exist if NVIDIA's driver is loaded; the last is for Linux on Windows."""
_OTHERS = ("/dev/kfd", "/dev/davinci_manager", "/dev/accel")
"""Files that exist with AMD's driver, Ascend's, or that of another accelerator."""
_PCI = "sys/bus/pci/devices"
_VENDORS = f"{_PCI}/*/vendor"
_P2P_NVLINK, _P2P_OK = 2, 0
"""NVML's numbers for a connection by NVLink, and for the answer that it exists."""
_NVIDIA = "0x10de"
_USUAL_ERRORS = (3, 4, 13)
"""Not supported, no permission, function not found: such a value is not known, and the GPU is well."""
_PROCESSES = (
    ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetComputeRunningProcesses_v2"),
    ("nvmlDeviceGetGraphicsRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses_v2"),
    ("nvmlDeviceGetMPSComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses_v2"),
)
"""Three kinds of processes; the second name of each is for older drivers."""


@attrs.frozen
class GpuProcess:
    """A process that uses a GPU."""

    pid: int
    """As the driver counts: in a container, another process or none may have this number."""
    memory_bytes: int | None = None
    program: str = ""


@attrs.frozen
class Gpu:
    """A GPU; a field that is None is not known."""

    index: int
    """Its number in the order of the PCI bus."""
    uuid: str = ""
    name: str = ""
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_free_bytes: int | None = None
    use: float | None = None
    """Share of the last moments in which it computed, 0 to 1."""
    processes: Sequence[GpuProcess] = ()
    is_split: bool = False
    """Whether it is divided into instances (MIG), each of which has memory of its own."""
    failure: str = ""
    """Why it does not answer; empty where it does."""
    node: int | None = None
    """The NUMA node that it is attached to."""
    island: int | None = None
    """The lowest number of the GPUs that NVLink connects it with, itself included; None: with none."""


class GpuReader:
    """Reads the GPUs, a single reading at a time: a driver that hangs holds a single thread.

    A process with several readings, such as a gateway, shares a reader.
    """

    def __init__(self, read_s: float = READ_S, find_s: float = FIND_S) -> None:
        self._read_s, self._find_s = read_s, find_s
        self._turn = threading.Lock()
        self._islands: tuple[Sequence[str], Mapping[str, int]] = (), {}
        """The newest GPUs by their UUIDs, and the islands of those that NVLink connects: read once."""

    def __repr__(self) -> str:
        return f"<GpuReader{', reading' if self._turn.locked() else ''}>"

    async def find(self) -> list[Gpu] | None:
        """Read the GPUs in a thread, for `find_s` at most; None where NVML is not there, or does not answer."""
        with trio.move_on_after(self._find_s):
            return await trio.to_thread.run_sync(self.read, abandon_on_cancel=True)
        return None

    def read(self) -> list[Gpu] | None:
        """Read the GPUs within milliseconds to seconds; None where NVML is not there. Raises nothing.

        Each GPU that the driver counts is in the list, with its `failure` where it does not answer. A single call into
        a driver that hangs cannot be ended: a caller on an event loop uses `find`.
        """
        return self._in_turn(self._read)

    def _read(self, driver: "_Driver") -> list[Gpu] | None:
        found = driver.read()
        uuids = [gpu.uuid for gpu in found or ()]
        if found is None or len(uuids) < 2 or not all(uuids):
            return found
        if self._islands[0] != uuids:
            self._islands = uuids, {uuids[index]: island for index, island in driver.read_islands(len(uuids)).items()}
        return [attrs.evolve(gpu, island=self._islands[1].get(gpu.uuid)) for gpu in found]

    def read_versions(self) -> tuple[str, tuple[int, int]] | None:
        """Return the driver's version, and the newest CUDA that it can run; None where NVML does not report both."""
        return self._in_turn(_Driver.read_versions)

    def _in_turn(self, read: "Callable[[_Driver], _Read | None]") -> "_Read | None":
        driver = _driver(self._read_s)
        if driver is None or not self._turn.acquire(timeout=self._read_s):
            return None
        try:
            return driver.use(read)
        finally:
            self._turn.release()


def has_other_gpus() -> bool:
    """Return whether this machine may have GPUs that NVML does not report now: NVIDIA's, or another vendor's."""
    return has_nvidia() or any(os.path.exists(path) for path in _OTHERS)


def has_nvidia() -> bool:
    """Return whether this machine has NVIDIA's driver, or a device for which it may yet be loaded."""
    if any(os.path.exists(path) for path in _DRIVER):
        return True
    with contextlib.suppress(OSError):
        return any(path.read_text().strip() == _NVIDIA for path in pathlib.Path("/").glob(_VENDORS))
    return False


def _driver(read_s: float) -> "_Driver | None":
    if _MODULE not in sys.modules and not has_nvidia():
        return None  # its module costs memory, and is of no use
    try:
        nvml = importlib.import_module(_MODULE)
    except (ImportError, SyntaxError, OSError, Warning):
        return None
    error = getattr(nvml, "NVMLError", None)
    return _Driver(nvml, error, read_s) if isinstance(error, type) and issubclass(error, Exception) else None


class _Driver:
    """NVML for the time of a reading: values that it cannot report are None."""

    def __init__(self, nvml: Any, error: type[Exception], read_s: float) -> None:
        self._nvml = nvml
        mismatch = getattr(nvml, "NVMLLibraryMismatchError", error)  # an older driver lacks a call; no NVMLError
        self._absent = (AttributeError, *({mismatch} - {error}))
        self._errors = (
            error, mismatch, AttributeError, OSError, TypeError, ValueError, LookupError, RuntimeError,
            ctypes.ArgumentError,
        )  # fmt: skip
        self._read_s, self._deadline = read_s, time.monotonic() + read_s
        self._why = ""

    def use(self, read: "Callable[[_Driver], _Read | None]") -> "_Read | None":
        """Return the result of a reading; None if NVML does not begin."""
        try:
            self._nvml.nvmlInit()
        except self._errors:
            return None
        try:
            return read(self)
        finally:
            with contextlib.suppress(*self._errors):
                self._nvml.nvmlShutdown()

    def read(self) -> list[Gpu] | None:
        """Return every GPU in the order of the PCI bus."""
        count = self._ask("nvmlDeviceGetCount")
        if count is None:
            return None
        return [self._gpu(index, *found) for index, found in enumerate(self._handles(min(count, GPUS_MAX)))]

    def read_islands(self, count: int) -> dict[int, int]:
        """Return the island of each GPU that NVLink connects with another, by their numbers."""
        handles = [handle for handle, *_ in self._handles(count)]
        islands = list(range(count))
        for first, second in itertools.combinations(range(count), 2):
            if self._ask("nvmlDeviceGetP2PStatus", handles[first], handles[second], _P2P_NVLINK) == _P2P_OK:
                old, new = sorted((islands[first], islands[second]), reverse=True)
                islands = [new if island == old else island for island in islands]
        return {index: island for index, island in enumerate(islands) if islands.count(island) > 1}

    def read_versions(self) -> tuple[str, tuple[int, int]] | None:
        """Return the version of the driver, and that of CUDA."""
        version, cuda = self._ask("nvmlSystemGetDriverVersion"), _count(self._ask("nvmlSystemGetCudaDriverVersion"))
        return None if cuda is None else (_text(version), (cuda // 1000, cuda % 1000 // 10))

    def _ask(self, call: str, *args: Any) -> Any:
        if time.monotonic() > self._deadline:
            self._why = f"the driver has not answered everything within {self._read_s:g} s"
            return None
        try:
            return getattr(self._nvml, call)(*args)
        except self._errors as error:
            if getattr(error, "value", None) not in _USUAL_ERRORS and not isinstance(error, self._absent):
                self._why = str(error) or type(error).__name__
            return None

    def _handles(self, count: int) -> list[tuple[Any, str, Any]]:
        """Return each handle, or why there is none, with its place on the PCI bus.

        They are sorted by the PCI bus if all of them answer: NVML promises no order, though it has that order.
        """
        found: list[tuple[Any, str, Any]] = []
        for index in range(count):
            self._why = ""
            handle = self._ask("nvmlDeviceGetHandleByIndex", index)
            why = self._why
            found.append((handle, why, None if handle is None else self._ask("nvmlDeviceGetPciInfo", handle)))
        try:
            keys = [(place.domain, place.bus, place.device) for *_, place in found]
            return [found[index] for index in sorted(range(count), key=lambda index: keys[index])]
        except (AttributeError, TypeError):
            return found

    def _gpu(self, index: int, handle: Any, why: str, place: Any) -> Gpu:
        if handle is None:
            return Gpu(index, failure=why or "the driver gives no access to it")
        self._why = ""
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        rates = self._ask("nvmlDeviceGetUtilizationRates", handle)
        mode = self._ask("nvmlDeviceGetMigMode", handle)
        percent = _count(getattr(rates, "gpu", None))
        return Gpu(
            index,
            uuid=_text(self._ask("nvmlDeviceGetUUID", handle)),
            name=_text(self._ask("nvmlDeviceGetName", handle)),
            memory_total_bytes=_count(getattr(memory, "total", None)),
            memory_used_bytes=_count(getattr(memory, "used", None)),
            memory_free_bytes=_count(getattr(memory, "free", None)),
            use=None if percent is None else min(percent, 100) / 100,
            processes=self._processes(handle),
            is_split=isinstance(mode, Sequence) and mode[:1] == [1],
            failure=self._why,
            node=node_at(place),
        )

    def _processes(self, handle: Any) -> tuple[GpuProcess, ...]:
        """Return the processes that compute or draw, the largest first and each of them once."""
        found: dict[int, int | None] = {}
        for calls in _PROCESSES:
            answers = (self._ask(call, handle) for call in calls)
            for process in next((answer for answer in answers if answer is not None), ()):
                pid, memory = _count(getattr(process, "pid", None)), _count(getattr(process, "usedGpuMemory", None))
                if pid is not None:
                    found[pid] = max(found.get(pid) or 0, memory or 0) or memory
        largest = sorted(found, key=lambda pid: (-(found[pid] or 0), pid))
        return tuple(GpuProcess(pid, found[pid], _program(pid)) for pid in largest[:PROCESSES_MAX])


def node_at(place: Any, root: str = "/") -> int | None:
    """Return the NUMA node of a place on the PCI bus; None: not known, or there is a single node."""
    try:
        address = f"{place.domain:04x}:{place.bus:02x}:{place.device:02x}.0"
        node = int(pathlib.Path(root, _PCI, address, "numa_node").read_text())
    except (AttributeError, TypeError, ValueError, OSError):
        return None
    return node if node >= 0 else None


def _program(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except (psutil.Error, OSError, ValueError):
        return ""


def _text(value: Any) -> str:
    """Read a name, which older versions of the module give as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def _count(value: Any) -> int | None:
    """Read a number; NVML says 2^64 - 1 for a number that it does not know."""
    return value if isinstance(value, int) and 0 <= value < 2**64 - 1 else None
