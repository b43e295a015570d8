"""The hardware of machines and how much of it is in use, as the gateway and the workers on them report it.

Several workers may report the same machine, in containers each with other GPUs: `machines_of` merges the reports.
Nothing is added up, so that nothing is counted twice.
"""

import itertools
import pathlib
import re
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import attrs
import psutil
import trio

from ichat.config.checks import WORKER_ID
from ichat.hardware.gpus import Gpu, GpuReader
from ichat.hardware.host import CpuMeter, worker_of
from ichat.protocol.field_checks import MACHINE_NAME_CHARACTERS_MAX
from ichat.protocol.messages import Machine, MachineGpu

LOOK_S = 10.0
"""The least time between two readings of a machine: reading its GPUs costs milliseconds of a thread."""
STEP = 0.05
"""The use of processors and memory is rounded to this share of the whole, since it always changes a little."""

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_SHORT = 8


Held = Mapping[int, Mapping[str, int]]
"""The bytes that workers hold, by the index of the GPU and the worker's id."""


@attrs.frozen
class RayShare:
    """The part of a machine that a cluster of Ray gives to jobs."""

    raylets: int
    """How many raylets run on the machine."""
    gpus: float
    gpus_free: float | None
    """GPUs that no job has booked; None: not known."""
    kinds: Sequence[str] = ()
    """The kinds of its GPUs, by the label `ray.io/accelerator-type`."""
    unanswered_since: float | None = None
    """When Ray has stopped to answer, in seconds since 1970; the figures are older. None: it answers."""


@attrs.frozen
class MachineReport:
    """The report of a worker, the gateway or Ray on a machine; `by` is the worker's id, otherwise ""."""

    by: str
    machine: Machine
    held: Held = attrs.field(factory=dict[int, Mapping[str, int]])
    workers: Collection[str] = ()
    """Other workers on the machine that the gateway itself knows of."""
    ray: RayShare | None = None
    """The share of Ray, in a report of Ray's."""


@attrs.frozen
class GpuView:
    """A GPU, merged from several reports."""

    label: str
    """The GPU's index, or its uuid if containers use the same index for several GPUs of the machine."""
    gpu: MachineGpu
    held: Mapping[str, int]
    """The bytes that workers hold, by their ids."""

    def describe(self) -> Mapping[str, Any]:
        """Return the GPU as JSON can hold it."""
        gpu = attrs.asdict(self.gpu, filter=lambda field, _: field.name != "held_bytes")
        held_by = [{"worker_id": worker, "memory_bytes": size} for worker, size in self.held.items()]
        return gpu | {"failure": self.gpu.failure or None, "held_by": held_by}


@attrs.frozen
class MachineView:
    """A machine, merged from several reports."""

    name: str
    """The host name of the machine or of a container on it, with part of `id` if another machine has the same name."""
    machine: Machine
    has_gateway: bool
    """Whether the machine is this gateway's own."""
    workers: Sequence[str]
    """The ids of the workers that run on the machine."""
    gpus: Sequence[GpuView] | None
    """The GPUs in the order of the PCI bus; None: not known."""
    ray: RayShare | None = None
    """The part that a cluster of Ray gives to jobs; None: the machine is no node of Ray."""

    def describe(self) -> Mapping[str, Any]:
        """Return the machine as JSON can hold it."""
        machine = attrs.asdict(self.machine, filter=lambda field, _: field.name != "gpus")
        gpus = None if self.gpus is None else [one.describe() for one in self.gpus]
        ray = None if self.ray is None else attrs.asdict(self.ray)
        seen = {"name": self.name, "has_gateway": self.has_gateway, "workers": self.workers, "gpus": gpus, "ray": ray}
        return machine | seen


def own_id() -> str:
    """Return the id of this machine: the kernel's boot id, which containers on the machine share."""
    try:
        found = pathlib.Path(_BOOT_ID).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        found = ""
    if WORKER_ID.fullmatch(found):
        return found
    return re.sub(r"[^A-Za-z0-9._:-]", "-", socket.gethostname())[:128] or "unknown"


def own_addresses() -> frozenset[str]:
    """Return the addresses of this machine's interfaces."""
    return frozenset(one.address for found in psutil.net_if_addrs().values() for one in found)


class KnowsPids(Protocol):
    """Knows the processes of workers on this machine: a supervisor, or a worker."""

    @property
    def pids(self) -> Mapping[int, str]:
        """The workers' ids by the pids of their first processes."""
        ...


class OtherMachines(Protocol):
    """Knows machines by another program than workers and gateway: a cluster of Ray."""

    async def watch_forever(self, every_s: float) -> None:
        """Read them at this interval."""
        ...

    @property
    def is_answering(self) -> bool | None:
        """Whether that program has answered the last time; None: it was not asked yet."""
        ...

    def reports(self) -> Iterator[MachineReport]:
        """Return their newest reports."""
        ...


class MachineMonitor:
    """Reads this machine at intervals, for a worker or for the gateway; for the gateway, other machines too."""

    def __init__(
        self, workers: KnowsPids, by: str = "", *, gpus: GpuReader | None = None, others: OtherMachines | None = None
    ) -> None:
        """`by` is the worker that reads; `gpus` reads the GPUs; None: nothing else in this process does."""
        self._others = others
        self._gpus = gpus or GpuReader()
        self._workers = workers
        self._by = by
        self._meter = CpuMeter()
        self.report: MachineReport | None = None
        """The newest reading."""

    def __repr__(self) -> str:
        return f"<MachineMonitor of {self._by or 'the gateway'}: {self.report}>"

    @property
    def has_others(self) -> bool | None:
        """Whether the other machines were reported the last time; None: there are none, or it is not known yet."""
        return None if self._others is None else self._others.is_answering

    async def watch_forever(self, every_s: float, seen: Callable[[], None] | None = None) -> None:
        """Read the machine at this interval, in a thread; `seen` is called after the first reading."""
        async with trio.open_nursery() as nursery:
            if self._others is not None:
                nursery.start_soon(self._others.watch_forever, every_s)
            await self._watch_own(every_s, seen)

    async def _watch_own(self, every_s: float, seen: Callable[[], None] | None) -> None:
        while True:
            is_first, gpus = self.report is None, await self._gpus.find()
            self.report = await trio.to_thread.run_sync(read_machine, self._meter, gpus, self._workers.pids, self._by)
            if is_first and seen is not None:
                seen()
            await trio.sleep(every_s)

    def machines(self, told: Iterable[tuple[str, Machine]], own: MachineReport | None = None) -> Iterator[MachineView]:
        """Yield the gateway's machine, the workers' machines, and other machines; `own` is a newer report."""
        return machines_of(own or self.report, told, () if self._others is None else self._others.reports())


def read_machine(
    meter: CpuMeter, gpus: Sequence[Gpu] | None, workers: Mapping[int, str], by: str = ""
) -> MachineReport:
    """Return the hardware of this machine, and the use of its GPUs by workers, in about a millisecond.

    `gpus` is from a `GpuReader`; `workers` has ids by the pids of first processes; `by` is the worker that reports.
    """
    memory = psutil.virtual_memory()
    use = meter.read()
    held = {gpu.index: _held_of(gpu, workers) for gpu in gpus or ()}
    machine = Machine(
        own_id(),
        _text(socket.gethostname()),
        cpus=psutil.cpu_count(),
        cpu_use=None if use is None else stepped(use),
        memory_total_bytes=memory.total,
        memory_available_bytes=stepped_bytes(memory.available, memory.total),
        gpus=None if gpus is None else [_gpu(gpu, held[gpu.index], by) for gpu in gpus],
    )
    known = {index: {worker: size for worker, size in of_gpu.items() if size} for index, of_gpu in held.items()}
    return MachineReport(by, machine, known, list(workers.values()))


def machine_gpus(gpus: Sequence[Gpu]) -> list[MachineGpu]:
    """Return GPUs as reports have them, without the use of any worker."""
    return [_gpu(gpu, {}, "") for gpu in gpus]


def stepped(use: float) -> float:
    """Return the use of processors in steps of STEP."""
    return round(round(use / STEP) * STEP, 2)


def stepped_bytes(part: int, whole: int) -> int:
    """Return the use of memory in steps of STEP of the whole."""
    step = max(1, int(whole * STEP))
    return min(whole, round(part / step) * step)


def _gpu(gpu: Gpu, held: Mapping[str, int | None], by: str) -> MachineGpu:
    return MachineGpu(
        gpu.index,
        uuid=_text(gpu.uuid),
        name=_text(gpu.name),
        memory_total_bytes=gpu.memory_total_bytes,
        memory_used_bytes=gpu.memory_used_bytes,
        use=gpu.use,
        failure=_text(gpu.failure),
        held_bytes=held.get(by, None if "" in held else 0) if by else None,
    )


def _held_of(gpu: Gpu, workers: Mapping[int, str]) -> dict[str, int | None]:
    """Return the bytes that each worker holds, None where the driver does not say; "" is there for unknown processes.

    In a container, the driver may name processes by numbers that they have elsewhere.
    """
    found: dict[str, int | None] = {}
    for process in gpu.processes:
        worker = worker_of(process.pid, workers)
        if worker is None:
            if not process.program:
                found[""] = None
            continue
        before = found.get(worker, 0)
        found[worker] = None if before is None or process.memory_bytes is None else before + process.memory_bytes
    return found


def _text(value: str) -> str:
    """Return any text as a heartbeat accepts it."""
    return "".join(one if one.isprintable() else "?" for one in value)[:MACHINE_NAME_CHARACTERS_MAX]


def report_of(worker_id: str, machine: Machine) -> MachineReport:
    """Return the report in a worker's heartbeat."""
    held = {gpu.index: {worker_id: gpu.held_bytes} for gpu in machine.gpus or () if gpu.held_bytes}
    return MachineReport(worker_id, machine, held)


def machines_of(
    own: MachineReport | None, told: Iterable[tuple[str, Machine]], others: Iterable[MachineReport] = ()
) -> Iterator[MachineView]:
    """Return the merged machines of several reports, lazily; the first report of a value wins.

    `own` is the gateway's report; `told` has the workers' reports, and they know their own use best. `others` are of
    machines that may have neither. With
    thousands of workers the first machine costs some milliseconds, and each other machine less than a millisecond.
    Names are unique, and so are the labels of a machine's GPUs.
    """
    by_id: dict[str, list[MachineReport]] = {}
    for report in itertools.chain([own] if own else [], itertools.starmap(report_of, told), others):
        by_id.setdefault(report.machine.id, []).append(report)
    names = Counter(reports[0].machine.name for reports in by_id.values())
    found = set[str]()
    for machine_id, reports in by_id.items():
        machine = reports[0].machine
        name = machine.name if names[machine.name] == 1 else f"{machine.name}-{machine_id[:_SHORT]}"
        name = name if name not in found else f"{machine.name}-{machine_id}"
        workers = {worker: None for report in reports for worker in (report.by, *report.workers) if worker}
        has_gateway = any(not report.by and report.ray is None for report in reports)
        ray = next((report.ray for report in reports if report.ray is not None), None)
        if name not in found:
            found.add(name)
            yield MachineView(name, machine, has_gateway, sorted(workers), _gpus_of(reports), ray)


def _gpus_of(reports: Sequence[MachineReport]) -> list[GpuView] | None:
    """Return the merged GPUs of a machine; the same GPU has the same uuid, or without a uuid the same index."""
    if all(report.machine.gpus is None for report in reports):
        return None
    found: list[tuple[MachineGpu, dict[str, int]]] = []
    by_uuid: dict[str, int] = {}
    by_index: dict[int, int] = {}
    for report in reports:
        for gpu in report.machine.gpus or ():
            place = by_uuid.get(gpu.uuid)
            same = by_index.get(gpu.index)
            if place is None and same is not None and not (gpu.uuid and found[same][0].uuid):
                place = same
            if place is None:
                place = len(found)
                found.append((gpu, {}))
                by_index.setdefault(gpu.index, place)
                if gpu.uuid:
                    by_uuid[gpu.uuid] = place
            for worker, bytes_ in report.held.get(gpu.index, {}).items():
                if worker == report.by or worker not in found[place][1]:
                    found[place][1][worker] = bytes_
    often = Counter(gpu.index for gpu, _ in found)
    labels: dict[str, GpuView] = {}
    for gpu, held in found:
        label = str(gpu.index) if often[gpu.index] == 1 or not gpu.uuid else gpu.uuid
        labels.setdefault(label, GpuView(label, gpu, held))
    return sorted(labels.values(), key=lambda one: (one.gpu.index, one.label))
