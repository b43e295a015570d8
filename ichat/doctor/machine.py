"""This machine: its disks, its memory, the limits of its kernel, and its GPUs."""

import math
import os
import pathlib
import resource
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence

import attrs
import psutil

from ichat.config.own_secret import directory_for
from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.doctor.findings import Finding, findings_by
from ichat.engines.load_phases import hub_cache
from ichat.hardware.gpus import Gpu, has_nvidia
from ichat.preflight.facts import is_path
from ichat.preflight.obstacles import gib
from ichat.relays.settings import count_of

DISK_BYTES_MIN = 64 * 1024**2
DISK_BYTES_LOW = 1024**3
INODES_LOW = 1000
SHM_BYTES_LOW = 1024**3
"""Less shared memory than this is a warning if a model is spread over several GPUs."""
FILES_MORE = 1024
"""Files that the gateway has open besides its connections."""
RELAY_BYTES = 64 * 1024**2
"""The memory of a relay with some thousand connections."""
RELAYS_SHARE = 0.1
"""Of the memory: more than this for relays is a warning."""
SWAP_LOW = 0.5
HOLDERS_MAX = 3

_SHM = "/dev/shm"  # noqa: S108
_NOT_ROOT = "/sys/fs/cgroup/cgroup.type"
_CGROUP_CORES = "/sys/fs/cgroup/cpu.max"
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@attrs.frozen
class DiskFacts:
    """The file system below a path."""

    name: str
    """The gateway's data there."""
    path: str
    """The path itself, or its longest part that exists."""
    free_bytes: int
    free_inodes: int | None
    """None: this file system has no fixed number of them."""


@attrs.frozen
class MachineFacts:
    """The system's facts about itself; None if it reports nothing."""

    disks: Sequence[DiskFacts] = ()
    shm_bytes: int | None = None
    files_max: int | None = None
    """How many files a process may have open, at most; None: any number."""
    processes_max: int | None = None
    processes: int = 0
    """The processes and threads of this user."""
    autogroup: bool = False
    """Whether the kernel shares processors between sessions, and this process is in no control group."""
    overcommit: int | None = None
    memory_bytes: int = 0
    memory_max_bytes: int | None = None
    """The limit of this process's control group; None: there is none."""
    swap_use: float = 0.0
    cores: float = math.inf
    """The cores that this process may use: by its affinity, and by its control group."""


def read_machine_facts(config: Config) -> MachineFacts:
    """Ask the system; it looks at disks, so it belongs in a thread."""
    (memory_bytes, memory_max_bytes), swap = read_memory(), psutil.swap_memory()
    files, processes = _limit(resource.RLIMIT_NOFILE), _limit(resource.RLIMIT_NPROC)
    return MachineFacts(
        disks=list(_read_disks(config)),
        shm_bytes=shutil.disk_usage(_SHM).total if os.path.isdir(_SHM) else None,
        files_max=files,
        processes_max=processes,
        processes=_own_threads() if processes is not None else 0,
        autogroup=text_of("/proc/sys/kernel/sched_autogroup_enabled") == "1" and _is_in_root_group(),
        overcommit=int(text_of("/proc/sys/vm/overcommit_memory") or 0),
        memory_bytes=memory_bytes,
        memory_max_bytes=memory_max_bytes,
        swap_use=swap.percent / 100 if swap.total else 0.0,
        cores=min(len(os.sched_getaffinity(0)), cores_in(text_of(_CGROUP_CORES))),
    )


def cores_in(limit: str) -> float:
    """Return the cores that a control group's limit allows: its microseconds in each period."""
    used, _, period = limit.partition(" ")
    return int(used) / int(period) if used.isdecimal() and period.isdecimal() and int(period) else math.inf


def read_memory() -> tuple[int, int | None]:
    """Return the memory of this machine, and how much of it this control group may use; None: all."""
    total = psutil.virtual_memory().total
    limits = [int(text) for path in _CGROUP_LIMITS if (text := text_of(path)).isdecimal()]
    return total, next((one for one in limits if one < total), None)


def find_in_machine(config: Config, facts: MachineFacts) -> list[Finding]:
    """Return the findings about disks, limits and memory."""
    found = [*_check_disks(facts), *_check_memory(config, facts), *_check_limits(config, facts)]
    return [*found, *_check_relays(config, facts)]


def find_gpus_and_holders(
    config: Config, gpus: Sequence[Gpu] | None, own: Mapping[int, str], *, is_silent: bool = False
) -> list[Finding]:
    """Return the findings about the GPUs; `own` has the workers by the ids of their processes.

    `is_silent`: NVIDIA's library did not answer in time.
    """
    wanted = [one.model_name for one in config.managed_workers if not is_on_cpu(one)]
    if gpus is None and has_nvidia() and wanted:
        why = "did not answer in time" if is_silent else "cannot be used"
        sentence = f"NVIDIA's device or driver is here, and its library {why}: read the output of nvidia-smi."
        return [Finding("error", "driver", sentence, "nvidia-smi")]
    if not gpus:
        return [Finding("ok", "GPUs", "No NVIDIA GPU answers here; the engines have the processors only.")]
    every = any(worker.gpu_ids is None for worker in config.managed_workers)
    named = {number for worker in config.managed_workers for number in worker.gpu_ids or ()}
    return [_check_gpu(gpu, own, is_wanted=every or gpu.index in named) for gpu in gpus]


def _check_gpu(gpu: Gpu, own: Mapping[int, str], *, is_wanted: bool) -> Finding:
    name = f"GPU {gpu.index}"
    if gpu.failure and gpu.memory_free_bytes is None:
        command = f"sudo nvidia-smi --gpu-reset -i {gpu.index}"
        return Finding("error", name, f"It does not answer ({gpu.failure}): reset it, or the machine.", command)
    size = f"{gib(gpu.memory_free_bytes or 0)} of {gib(gpu.memory_total_bytes or 0)} GiB are free"
    others = [one for one in gpu.processes if one.pid not in own]
    if not others:
        by = sorted({own[one.pid] for one in gpu.processes})
        return Finding("ok", name, f"{gpu.name}: {size}{'; used by ' + ', '.join(by) if by else ''}.")
    words = [f"process {one.pid}" + (f" ({one.program})" if one.program else "") for one in others[:HOLDERS_MAX]]
    more = f" and {len(others) - HOLDERS_MAX} more" if len(others) > HOLDERS_MAX else ""
    sentence = f"{gpu.name}: {size}; {', '.join(words)}{more} uses it and is no worker of this gateway."
    if not is_wanted:
        return Finding("ok", name, sentence)
    return Finding("warning", name, sentence, f"ps -fp {','.join(str(one.pid) for one in others[:HOLDERS_MAX])}")


def _check_disks(facts: MachineFacts) -> Iterator[Finding]:
    for disk in facts.disks:
        path, inodes, mib = shlex.quote(disk.path), disk.free_inodes, disk.free_bytes // 1024**2
        problems = findings_by(
            (inodes is not None and inodes < INODES_LOW, "warning" if inodes else "error", disk.name,
             f"{disk.path} has {inodes} inodes left: remove small files there.", f"df -i {path}"),
            (disk.free_bytes < DISK_BYTES_LOW, "error" if disk.free_bytes < DISK_BYTES_MIN else "warning", disk.name,
             f"{disk.path} has {mib} MiB left: free some, or use another directory.", f"df -h {path}"),
        )  # fmt: skip
        yield from problems[:1] or [Finding("ok", disk.name, f"{disk.path} has {gib(disk.free_bytes)} GiB left.")]


def _check_memory(config: Config, facts: MachineFacts) -> list[Finding]:
    spread = [one.model_name for one in config.managed_workers if _is_spread(one.backend_args)]
    shm, limit = facts.shm_bytes or 0, facts.memory_max_bytes
    more = f", of which this control group may use {gib(limit)}" if limit is not None else ""
    return findings_by(
        (spread and facts.shm_bytes is not None and shm < SHM_BYTES_LOW,
         "error" if shm <= DISK_BYTES_MIN else "warning", _SHM,
         (f"{_SHM} has {shm // 1024**2} MiB, and {''.join(spread[:1])} is spread over GPUs and needs more: make it 8"
          " GiB (Docker: --shm-size=8g)."),
         f"sudo mount -o remount,size=8g {_SHM}"),
        (facts.overcommit == 2, "error", "overcommit",
         "vm.overcommit_memory is 2, so that CUDA cannot reserve addresses: set it to 0.",
         "sudo sysctl -w vm.overcommit_memory=0"),
        (facts.swap_use > SWAP_LOW, "warning", "swap",
         f"{100 * facts.swap_use:.0f} % of the swap space is in use: engines that swap are slow; free memory.",
         "free -h"),
        (True, "ok", "memory", f"The machine has {gib(facts.memory_bytes)} GiB{more}.", ""),
    )  # fmt: skip


def _check_limits(config: Config, facts: MachineFacts) -> list[Finding]:
    connections, files = config.limits.connections_max, facts.files_max
    needed = 2 * connections + FILES_MORE
    return findings_by(
        (files is not None and files < needed, "warning", "files",
         (f"A process may have {files} files open, and {connections} connections (limits.connections_max) need"
          f" {needed}: raise the limit (systemd: LimitNOFILE), or allow fewer."),
         f"sudo prlimit --pid $$ --nofile={needed}"),
        (facts.processes_max is not None and facts.processes_max - facts.processes < FILES_MORE, "warning", "processes",
         (f"This user has {facts.processes} of at most {facts.processes_max} processes and threads, and an engine"
          " starts hundreds: raise the limit (systemd: TasksMax, LimitNPROC)."),
         "sudo prlimit --pid $$ --nproc=unlimited"),
        (facts.autogroup, "warning", "autogroup",
         "The kernel's autogroup lets a busy worker that was started by hand hold up all else for seconds.",
         "sudo sysctl -w kernel.sched_autogroup_enabled=0"),
    ) or [Finding("ok", "limits", "The limits on files and processes leave enough room.")]  # fmt: skip


def _check_relays(config: Config, facts: MachineFacts) -> list[Finding]:
    """Compare `server_settings.relays` with the cores and the memory."""
    count, memory = count_of(config.server_settings.relays), facts.memory_max_bytes or facts.memory_bytes
    return findings_by(
        (count > facts.cores, "warning", "relays",
         (f"server_settings.relays asks for {count} relays, and this process may use {facts.cores:g} cores: lower it,"
          " since a relay needs a core of its own."),
         "nproc"),
        (count * RELAY_BYTES > RELAYS_SHARE * memory, "warning", "relays",
         (f"server_settings.relays asks for {count} relays, with up to {gib(count * RELAY_BYTES)} of"
          f" {gib(memory)} GiB of memory: lower it, or give the gateway more memory."),
         "free -h"),
    )  # fmt: skip


def is_on_cpu(worker: ManagedWorkerConfig) -> bool:
    """Return whether a worker is configured to use processors only."""
    return worker.gpu_ids == [] or worker.backend_args.get("device") == "cpu"


def _is_spread(arguments: Mapping[str, object]) -> bool:
    names = ("tensor_parallel_size", "tp_size", "tp", "pipeline_parallel_size", "pp_size", "pp")
    given = {name.replace("-", "_"): value for name, value in arguments.items()}
    return any(isinstance(size := given.get(name), int) and size > 1 for name in names)


def _read_disks(config: Config) -> Iterator[DiskFacts]:
    directory, logs = directory_for(config.server_settings), config.logs
    wanted = [
        ("state", directory),
        ("logs", logs.directory or (os.path.join(directory, "logs") if directory else None)),
    ]
    if logs.access_log not in ("-", ""):
        wanted.append(("access log", os.path.dirname(os.path.abspath(logs.access_log))))
    if any(not os.path.exists(one.model_path) and not is_path(one.model_path) for one in config.managed_workers):
        wanted.append(("model cache", hub_cache(os.environ)))
    seen = set[int]()
    for name, path in wanted:
        if path is None:
            continue
        there = existing_part(path)
        try:
            device, system = os.stat(there).st_dev, os.statvfs(there)
        except OSError:
            continue
        if device not in seen:
            seen.add(device)
            size, inodes = system.f_frsize, system.f_favail if system.f_files else None
            yield DiskFacts(name, there, system.f_bavail * size, inodes)


def existing_part(path: str) -> str:
    """Return a path, or the last directory above it that is there as far as this user can see."""
    there = os.path.abspath(path)
    while not os.path.exists(there) and there != os.path.dirname(there):
        there = os.path.dirname(there)
    return there


def _limit(kind: int) -> int | None:
    hard = resource.getrlimit(kind)[1]
    is_free = kind == resource.RLIMIT_NPROC and os.geteuid() == 0  # it does not hold for root
    return None if hard == resource.RLIM_INFINITY or is_free else hard


def _own_threads() -> int:
    own, count = os.getuid(), 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        uids = process.info["uids"]
        count += (process.info["num_threads"] or 0) if uids is not None and uids.real == own else 0
    return count


def _is_in_root_group() -> bool:
    lines = text_of("/proc/self/cgroup").splitlines()
    if os.path.exists(_NOT_ROOT):
        return False  # in a container, where its own group appears as the root
    return all(line.rpartition(":")[2] == "/" for line in lines)


def text_of(path: str | pathlib.Path) -> str:
    """Return the text of a file, without blanks around it; "" if it cannot be read."""
    try:
        return pathlib.Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
