"""What would keep a managed worker from starting, said before it is started: every problem at once, and what to do.

`look` asks the system, in threads and for a bounded time; `problems_of` decides, and touches nothing. What cannot be
known is no problem: the worker itself says the rest.
"""

import contextlib
import errno
import logging
import math
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
import psutil
import trio

from ichat.config.schema import ManagedWorkerConfig
from ichat.hardware.gpus import Gpu, GpuProcess, find_gpus

log = logging.getLogger(__name__)

PROBE_S = 30.0
"""How long an interpreter may take to say whether it has the engine; a cold network disk makes it seconds."""
LOOK_S = 45.0
"""How long `look` may take altogether: the probe, and a name that is looked up."""
KNOWN_MAX = 256
"""So many interpreters are remembered."""
HOLDERS_MAX = 3
PYTHON_NEEDED = (3, 11)
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
"""The engines whose arguments and models are known here. Each one's package has its name."""
MEMORY_SHARE = 0.9
"""What vLLM takes of a GPU's memory by default: 0.9, in newer releases 0.92. The smaller refuses nothing wrongly."""
BALANCE = 0.9
"""SGLang refuses GPUs of which one has less free memory than this share of another's."""

_GIB = 1024**3
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ABSENT, _OLD = 73, 74
_PROBE = f"""
import sys
if sys.version_info < {PYTHON_NEEDED}:
    sys.exit({_OLD})
import importlib.metadata, importlib.util
name, built_in = sys.argv[1], sys.argv[2] == "1"
if built_in:
    spec = importlib.util.find_spec(name)
    found = spec is not None and spec.origin is not None
else:
    found = bool(importlib.metadata.entry_points(group="ichat.engines", name=name))
sys.exit(0 if found else {_ABSENT})
"""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
_remembered: set[tuple[Any, ...]] = set()
"""Interpreters that have their engine, with their times of change. One that has not may get it at any moment."""

PortState = Literal["free", "taken", "forbidden", "elsewhere", "unknown_host", "refused"]
PythonState = Literal["right", "missing", "directory", "not_executable", "old", "without_engine", "broken", "silent"]
ModelState = Literal["right", "unchecked", "missing", "unreadable", "without_config", "not_a_model"]


@attrs.frozen
class Holder:
    """A process that has the port."""

    pid: int
    program: str


@attrs.frozen
class Facts:
    """What a look at the system gave; by default, that nothing is known to be wrong."""

    port: PortState = "free"
    port_holders: Sequence[Holder] = ()
    python: PythonState = "right"
    python_words: str = ""
    """The last thing that a broken interpreter said; of any other, the interpreter that may be meant."""
    model: ModelState = "unchecked"
    model_hint: str = ""
    """A path that may be meant."""
    directory: str = ""
    """Where relative paths are seen from."""
    gpus: Sequence[Gpu] | None = None
    visible: str | None = None
    """The worker's CUDA_VISIBLE_DEVICES, wherever it comes from."""


async def collect_facts(worker: ManagedWorkerConfig, python: str, environment: Mapping[str, str]) -> Facts:
    """Look at the system, as far as it answers within `LOOK_S`.

    `python` is the interpreter that the worker will have, `environment` all of its variables.
    """
    facts, gpus = Facts(visible=environment.get(_VISIBLE)), None

    async def read() -> None:
        nonlocal facts
        facts = await trio.to_thread.run_sync(read_facts, worker, python, environment, abandon_on_cancel=True)

    with trio.move_on_after(LOOK_S) as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            gpus = await find_gpus()
    if scope.cancelled_caught:
        log.warning("what worker %s needs could not be looked at within %g s", worker.model_name, LOOK_S)
    return attrs.evolve(facts, gpus=gpus)


def read_facts(worker: ManagedWorkerConfig, python: str, environment: Mapping[str, str]) -> Facts:
    """Look at port, interpreter and model; runs a program and may look up a name, so it belongs in a thread."""
    port = _read_port(worker.host, worker.port)
    state, words = _read_python(python, worker.backend, environment)
    model, hint = _read_model(worker) if worker.backend in ENGINES else ("unchecked", "")
    return Facts(
        port=port,
        port_holders=_port_holders(worker.port) if port == "taken" else (),
        python=state,
        python_words=words,
        model=model,
        model_hint=hint,
        directory=_here(),
        visible=environment.get(_VISIBLE),
    )


def problems_of(
    worker: ManagedWorkerConfig, python: str, others: Mapping[str, ManagedWorkerConfig], facts: Facts
) -> list[str]:
    """Give every reason why this worker would not start, each one sentence that says what to do.

    `others` are the managed workers that run or are about to, by their ids; `python` is this one's interpreter.
    """
    return [
        *_problems_of_port(worker, others, facts),
        *_problems_of_python(worker, python, facts),
        *_problems_of_model(worker, facts),
        *_problems_of_sharing(worker, others),
        *_problems_of_gpus(worker, facts),
    ]


# Decisions.


def _problems_of_port(
    worker: ManagedWorkerConfig, others: Mapping[str, ManagedWorkerConfig], facts: Facts
) -> Iterator[str]:
    host, port = worker.host, worker.port
    same = [name for name, other in others.items() if port and other.port == port and _overlap(host, other.host)]
    if same:
        yield f"Port {port} is worker {same[0]}'s as well: give each a port of its own, or 0 for any free one."
    elif facts.port == "taken":
        by = " and ".join(f"{one.program} (process {one.pid})" for one in facts.port_holders[:HOLDERS_MAX])
        by = by or "a process that this user cannot see"
        yield f"Port {port} of {host} is taken by {by}: end that, or choose another port (0 takes any free one)."
    elif facts.port == "forbidden":
        yield f"Port {port} is not for this user to take: choose one above 1023, or 0 for any free one."
    elif facts.port == "elsewhere":
        yield f"The host {host} is no address of this machine: use 127.0.0.1, 0.0.0.0 or an address that it has."
    elif facts.port == "unknown_host":
        yield f"The host {host!r} cannot be resolved: correct its name, or use an address."
    elif facts.port == "refused":
        yield f"{host}:{port} cannot be bound: choose another host or port."


def _overlap(host: str, other: str) -> bool:
    return host == other or not {"", "0.0.0.0", "::"}.isdisjoint((host, other))


def _problems_of_python(worker: ManagedWorkerConfig, python: str, facts: Facts) -> Iterator[str]:
    engine, words = ENGINES.get(worker.backend, worker.backend), facts.python_words
    make = f"make one with `./build engine {worker.backend}`"
    if worker.backend not in ENGINES:
        make = "install the package that brings it there"
    says = f"set python of this worker, or of [engines.{worker.backend}]"
    if facts.python == "missing":
        meant = f" ({words} may be meant)" if words else ""
        yield f"There is no interpreter {python}{meant}: {says}, or {make}."
    elif facts.python == "directory":
        meant = f"probably to {words}" if words else "to the interpreter in it"
        yield f"The interpreter {python} is a directory: {says}, {meant}."
    elif facts.python == "not_executable":
        yield f"The interpreter {python} may not be executed by this user: correct its permissions, or {says}."
    elif facts.python == "old":
        needed = ".".join(map(str, PYTHON_NEEDED))
        yield f"The interpreter {python} is older than Python {needed}, which iChat needs: {says}, to a newer one."
    elif facts.python == "without_engine":
        yield f"{engine} is not installed for {python}: {says}, to an interpreter that has it, or {make}."
    elif facts.python == "broken":
        yield f"The interpreter {python} does not run ({words or 'it says nothing'}): repair it, or {says}."
    elif facts.python == "silent":
        yield f"The interpreter {python} did not answer within {PROBE_S:g} s: see what holds it up, or {says}."


def _problems_of_model(worker: ManagedWorkerConfig, facts: Facts) -> Iterator[str]:
    path, hint = worker.model_path, f"; {facts.model_hint} may be meant" if facts.model_hint else ""
    here = "" if os.path.isabs(path) else f" (seen from {facts.directory})"
    if facts.model == "missing":
        yield f"There is no model {path}{here}: correct model_path{hint}."
    elif facts.model == "unreadable":
        yield f"The model {path} may not be read by this user: correct the permissions of its files, or model_path."
    elif facts.model == "without_config":
        yield f"The directory {path} has no config.json: set model_path to a model's own directory{hint}."
    elif facts.model == "not_a_model":
        yield f"The file {path} is no GGUF model: set model_path to the model's directory, or to a GGUF file{hint}."


def _problems_of_sharing(worker: ManagedWorkerConfig, others: Mapping[str, ManagedWorkerConfig]) -> Iterator[str]:
    for number in dict.fromkeys(worker.gpu_ids or ()):
        holders = {name: other for name, other in others.items() if number in (other.gpu_ids or ())}
        apart = [name for name, other in holders.items() if not (worker.share_gpus and other.share_gpus)]
        if apart:
            yield (
                f"GPU {number} is worker {apart[0]}'s: choose other gpu_ids, or set share_gpus = true for both and"
                " see that their shares of its memory fit together."
            )
        elif holders and worker.backend == "vllm":
            shares = [_share(other) for other in [worker, *holders.values()] if other.backend == "vllm"]
            if sum(shares) > 1 + 1e-9:
                yield (
                    f"The vLLM workers that share GPU {number} take {100 * sum(shares):.0f} % of its memory together"
                    f" (this one and {', '.join(holders)}): lower their gpu_memory_utilization, to 100 % in all."
                )


def _problems_of_gpus(worker: ManagedWorkerConfig, facts: Facts) -> Iterator[str]:
    needed = _ranks(worker)
    ids = _ids(worker, facts)
    if ids is None:
        return
    key = "gpu_ids" if worker.gpu_ids is not None and _VISIBLE not in worker.env else _VISIBLE
    if len(set(ids)) < len(ids):
        yield f"{key} has a GPU twice ({', '.join(map(str, ids))}): name each one once."
    if ids and needed > len(set(ids)) and not _is_spread(worker):
        yield (
            f"The model is spread over {needed} GPUs, and the worker has {len(set(ids))} ({', '.join(map(str, ids))}):"
            " lower tensor_parallel_size or pipeline_parallel_size, or give it more gpu_ids."
        )
    if facts.gpus is None:
        return
    known = {gpu.index: gpu for gpu in facts.gpus}
    for number in dict.fromkeys(number for number in ids if number not in known):
        there = f"those here are {', '.join(map(str, sorted(known)))}" if known else "there is none here"
        yield f"There is no GPU {number}: {there} (as nvidia-smi numbers them); correct {key}."
    used = [known[number] for number in dict.fromkeys(ids[:needed]) if number in known]
    for gpu in used:
        if gpu.failure and gpu.memory_free_bytes is None:
            yield (
                f"GPU {gpu.index} does not answer ({gpu.failure}): choose other gpu_ids, or reset it"
                f" (nvidia-smi --gpu-reset -i {gpu.index})."
            )
    if not {"base_gpu_id", "gpu_id_step"}.intersection(_arguments(worker)):
        yield from _problems_of_memory(worker, used)


def _problems_of_memory(worker: ManagedWorkerConfig, gpus: Sequence[Gpu]) -> Iterator[str]:
    """Compare with the engines' own rules: a share of all memory for vLLM; for SGLang, of what is free then."""
    sizes = [(gpu, gpu.memory_total_bytes, gpu.memory_free_bytes) for gpu in gpus if not gpu.is_split]
    known = [(gpu, total, free) for gpu, total, free in sizes if total and free is not None]
    if worker.backend == "vllm":
        share = _share(worker)
        for gpu, total, free in known:
            if share * total > free:
                fitting = math.floor(100 * free / total) / 100
                lower = f"lower gpu_memory_utilization to {fitting:g}, " if fitting >= 0.05 else ""
                yield (
                    f"GPU {gpu.index} has {_gib(free)} of {_gib(total)} GiB free, and vLLM needs {_gib(share * total)}"
                    f" (gpu_memory_utilization {share:g}): {_held(gpu)}; end what holds it, {lower}or choose another"
                    " GPU."
                )
    elif worker.backend == "sglang" and len(known) > 1:
        most = max(free for _, _, free in known)
        for gpu, _, free in known:
            if free < BALANCE * most:
                yield (
                    f"GPU {gpu.index} has {_gib(free)} GiB free and another of this worker's {_gib(most)}, and SGLang"
                    f" refuses GPUs that differ so much: {_held(gpu)}; end what holds it, or choose another GPU."
                )


def _held(gpu: Gpu) -> str:
    if not gpu.processes:
        return "who holds the rest cannot be seen from here"
    more = len(gpu.processes) - HOLDERS_MAX
    words = [_process(process) for process in gpu.processes[:HOLDERS_MAX]]
    return ", ".join([*words, f"{more} more"] if more > 0 else words)


def _process(process: GpuProcess) -> str:
    program = f" ({process.program})" if process.program else ""
    size = "some" if process.memory_bytes is None else f"{_gib(process.memory_bytes)} GiB"
    return f"process {process.pid}{program} holds {size}"


def _gib(size: float) -> str:
    return f"{size / _GIB:.1f}"


def _ids(worker: ManagedWorkerConfig, facts: Facts) -> list[int] | None:
    """Give the numbers of the GPUs that the worker sees, all of them where nothing is said; None is not known."""
    if facts.visible is None:
        if worker.gpu_ids is not None:
            return worker.gpu_ids
        return None if not facts.gpus else [gpu.index for gpu in facts.gpus]
    ids: list[int] = []
    for word in filter(None, map(str.strip, facts.visible.split(","))):
        named = [gpu.index for gpu in facts.gpus or () if word.startswith("GPU-") and gpu.uuid.startswith(word)]
        if word.isdecimal():
            ids.append(int(word))
        elif len(named) == 1:
            ids += named
        else:
            return None
    return ids


def _share(worker: ManagedWorkerConfig) -> float:
    names = ("gpu_memory_utilization", "device_memory_utilization", "mem_fraction_static")
    return _number(worker, *names, default=MEMORY_SHARE)


def _ranks(worker: ManagedWorkerConfig) -> int:
    if worker.backend not in ENGINES:
        return 1
    tensor = _number(worker, "tensor_parallel_size", "tp_size", "tp", default=1)
    pipeline = _number(worker, "pipeline_parallel_size", "pp_size", "pp", default=1)
    return max(int(tensor), 1) * max(int(pipeline), 1)


def _is_spread(worker: ManagedWorkerConfig) -> bool:
    """Say whether the GPUs of other machines count as well."""
    arguments = _arguments(worker)
    is_ray = arguments.get("distributed_executor_backend") == "ray" or arguments.get("use_ray") is True
    return is_ray or _number(worker, "nnodes", default=1) > 1


def _arguments(worker: ManagedWorkerConfig) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in worker.backend_args.items()}


def _number(worker: ManagedWorkerConfig, *names: str, default: float) -> float:
    """Read an argument of the engine by any of its names; what is no number is the engine's to refuse."""
    arguments = _arguments(worker)
    value = next((arguments[name] for name in names if name in arguments), default)
    try:
        number = default if isinstance(value, bool | list | dict) else float(value)
    except ValueError:
        return default
    return number if math.isfinite(number) else default


# Looking at the system.


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "a directory that is gone"


def _read_port(host: str, port: int) -> PortState:
    """Try to bind as the worker will; nothing listens meanwhile, so no client is misled."""
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE, proto=socket.IPPROTO_TCP
        )
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6 and len(found) > 1:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except (socket.gaierror, UnicodeError):
        return "unknown_host"
    except OSError as error:
        states: dict[int | None, PortState] = {
            errno.EADDRINUSE: "taken", errno.EACCES: "forbidden", errno.EADDRNOTAVAIL: "elsewhere",
        }  # fmt: skip
        return states.get(error.errno, "refused")
    return "free"


def _port_holders(port: int) -> list[Holder]:
    """Give the processes that listen on a port; those of other users may not be seen."""
    holders: dict[int, Holder] = {}
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            address, pid = connection.laddr, connection.pid
            if pid and address and address.port == port and connection.status == psutil.CONN_LISTEN:
                with contextlib.suppress(psutil.Error):
                    holders[pid] = Holder(pid, psutil.Process(pid).name())
    return list(holders.values())


def _read_python(python: str, backend: str, environment: Mapping[str, str]) -> tuple[PythonState, str]:
    path = python if os.path.dirname(python) else shutil.which(python, path=environment.get("PATH"))
    if path is None or not os.path.exists(path):
        home = os.path.expanduser(python) if python.startswith("~") else ""
        return "missing", home if os.path.exists(home) else ""
    if os.path.isdir(path):
        inside = os.path.join(path, "bin", "python")
        return "directory", inside if os.path.isfile(inside) else ""
    if not os.access(path, os.X_OK):
        return "not_executable", ""
    try:
        times = os.lstat(path).st_mtime_ns, os.stat(path).st_mtime_ns
        key = (path, *times, backend, environment.get("PYTHONPATH"))
        if key in _remembered:
            return "right", ""
        state, words = _probe([path, "-c", _PROBE, backend, str(int(backend in ENGINES))], environment)
    except OSError as error:
        return "broken", error.strerror or str(error)
    except ValueError:  # an environment that no process can have: the start says so
        return "right", ""
    if state == "right":
        if len(_remembered) >= KNOWN_MAX:
            _remembered.clear()
        _remembered.add(key)
    return state, words


def _probe(command: list[str], environment: Mapping[str, str]) -> tuple[PythonState, str]:
    """Ask an interpreter. It writes to a file, since a pipe would be held open by whatever it leaves behind."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(PROBE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "silent", ""
        states: dict[int, PythonState] = {0: "right", _ABSENT: "without_engine", _OLD: "old"}
        if code in states:
            return states[code], ""
        output.seek(max(0, output.seek(0, os.SEEK_END) - 4096))
        lines = output.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return "broken", last[:200]


def _read_model(worker: ManagedWorkerConfig) -> tuple[ModelState, str]:
    path = worker.model_path
    try:
        if os.path.isfile(path):
            return _read_model_file(path)
        if not os.path.isdir(path):
            home = os.path.expanduser(path) if path.startswith("~") else ""
            return ("missing", home if os.path.exists(home) else "") if _is_path(path) else ("unchecked", "")
        if not os.access(path, os.R_OK | os.X_OK):
            return "unreadable", ""
        if any(os.path.exists(os.path.join(path, name)) for name in ("config.json", "params.json", "model_index.json")):
            return "right", ""
        if "hf_config_path" in _arguments(worker):
            return "unchecked", ""
        return "without_config", _model_inside(path)
    except (OSError, ValueError):
        return "unchecked", ""


def _read_model_file(path: str) -> tuple[ModelState, str]:
    try:
        with open(path, "rb") as file:
            is_gguf = file.read(4) == b"GGUF"
    except PermissionError:
        return "unreadable", ""
    if is_gguf:
        return "right", ""
    directory = os.path.dirname(path)
    return "not_a_model", directory if os.path.exists(os.path.join(directory, "config.json")) else ""


def _model_inside(path: str) -> str:
    """Find the model that a directory holds: just below, in the layout of the hub's cache, or a GGUF file."""
    for pattern in ("*/config.json", "snapshots/*/config.json", "*.gguf"):
        found = next(pathlib.Path(path).glob(pattern), None)
        if found is not None:
            return str(found if found.suffix == ".gguf" else found.parent)
    return ""


def _is_path(path: str) -> bool:
    """Say whether this can only be a path: no name on a hub, no file in a repository there, no address."""
    if path.startswith(("/", ".", "~")):
        return True
    is_remote = "://" in path or path.endswith(".gguf")
    return not is_remote and _HUB_NAME.fullmatch(path) is None
