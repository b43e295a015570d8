"""The system's facts about a managed worker before it is started: its port, interpreter, flags, model and GPUs.

`collect_facts` asks in threads and for a bounded time. `obstacles.obstacles_of` decides what follows.
"""

import contextlib
import errno
import logging
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Literal

import attrs
import psutil
import trio

from ichat import __version__
from ichat.config.engine_args import arguments_of
from ichat.config.own_secret import is_running
from ichat.config.process_marks import RELAY_VARIABLE, mark_of
from ichat.config.schema import ManagedWorkerConfig
from ichat.engines.flag_check import FlagEntry
from ichat.engines.flags import KEY_VARIABLE
from ichat.engines.kept_flags import Interpreter, read_kept, version_of
from ichat.hardware.gpus import Gpu, GpuReader, has_other_gpus
from ichat.placement.learnt import LearntMemory
from ichat.preflight.hub import HubFacts, ask_hub, read_hub
from ichat.preflight.model_files import has_architecture, lack_of
from ichat.preflight.model_memory import MemoryNeed, read_need
from ichat.program import is_installed

log = logging.getLogger(__name__)

PROBE_S = 30.0
"""The limit on an interpreter's answer whether it has the engine; a cold network disk makes that seconds."""
COLLECT_S = 45.0
"""The limit on `collect_facts` altogether: the probe, and a host name that is resolved."""
REMEMBERED_MAX = 256
"""The number of interpreters that are remembered."""
PYTHON_NEEDED = (3, 10)
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
"""The engines with known arguments and models. The package of each has its name."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable that `gpu_ids` sets, unless the engine's section names another."""

_ABSENT, _OLD, _WITHOUT = 73, 74, 75
_PROBE = f"""
import sys
if sys.version_info < {PYTHON_NEEDED}:
    sys.exit({_OLD})
import importlib.metadata, importlib.util
name, built_in, ours = sys.argv[1], sys.argv[2] == "1", sys.argv[3]
if built_in:
    spec = importlib.util.find_spec(name)
    found = spec is not None and spec.origin is not None
else:
    found = bool(importlib.metadata.entry_points(group="ichat.engines", name=name))
if not found:
    sys.exit({_ABSENT})
try:
    sys.exit({_WITHOUT} if ours and importlib.metadata.version("ichat") != ours else 0)
except importlib.metadata.PackageNotFoundError:
    sys.exit({_WITHOUT})
"""
_OTHER_CONFIGS = frozenset(("hf_config_path", "hf_overrides", "json_model_override_args", "config_format", "config"))
"""Arguments that may say a model's architecture in the place of its config.json."""
_ARCHITECTURE = {"vllm": ("architectures", "model_type", "auto_map"), "sglang": ("architectures",)}
"""The keys of config.json by which each engine recognizes a model."""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")

PortState = Literal["free", "taken", "forbidden", "elsewhere", "unknown_host", "refused"]
PythonState = Literal[
    "right", "missing", "directory", "not_executable", "old", "without_engine", "without_ichat", "broken", "silent"
]
ModelState = Literal[
    "right", "unchecked", "missing", "unreadable", "without_config", "without_architecture", "incomplete", "not_a_model"
]


_STATES: Mapping[int, PythonState] = {0: "right", _ABSENT: "without_engine", _OLD: "old", _WITHOUT: "without_ichat"}
"""The states of an interpreter by the exit codes of the probe."""


class KnownPythons(set[tuple[object, ...]]):
    """Interpreters that have their engine, with their times of change. The others are asked again."""

    def add(self, element: tuple[object, ...], /) -> None:
        """Remember an interpreter; after `REMEMBERED_MAX` of them, all are forgotten."""
        if len(self) >= REMEMBERED_MAX:
            self.clear()
        super().add(element)


@attrs.frozen
class Holder:
    """A process that listens on the port."""

    pid: int
    program: str
    relay_of: str = ""
    """The state directory of its gateway, if it is a relay."""
    is_waiting: bool = False
    """Whether it is a relay, and no gateway runs with that state directory."""


@attrs.frozen
class Facts:
    """The system's answers; the defaults mean that nothing is known to be wrong."""

    port: PortState = "free"
    port_holders: Sequence[Holder] = ()
    python: PythonState = "right"
    python_words: str = ""
    """The last line that a broken interpreter wrote; for other states, the interpreter that may be meant."""
    model: ModelState = "unchecked"
    model_hint: str = ""
    """A path that may be meant; for an incomplete model, the missing part."""
    real_path: str = ""
    """The model's path without links, or its name on a hub."""
    directory: str = ""
    """The directory that relative paths start from."""
    need: MemoryNeed | None = None
    """The memory that the model needs on each GPU; None: it is not known."""
    learnt: Sequence[LearntMemory] = ()
    """Its memory at earlier loads, on each kind of GPU."""
    version: str | None = None
    """The version of the engine; None: it is not known."""
    hub: HubFacts | None = None
    """The facts about a model that is named as on the hub; None: it is a path."""
    flags: Sequence[FlagEntry] | None = None
    """The flags of the engine; None: its interpreter has not reported them yet."""
    has_engine_key: bool = False
    """Whether the environment would have the engine ask for a key of its own."""
    gpus: Sequence[Gpu] | None = None
    devices: str = VISIBLE
    """The variable that says which GPUs the worker may use."""
    visible: str | None = None
    """Its value, from any source."""


async def collect_facts(
    worker: ManagedWorkerConfig,
    python: str,
    environment: Mapping[str, str],
    devices: str = VISIBLE,
    known: KnownPythons | None = None,
    *,
    within_s: float = COLLECT_S,
    limiter: trio.CapacityLimiter | None = None,
    reader: GpuReader | None = None,
) -> Facts:
    """Return the system's answers within this time.

    `python` is the interpreter that the worker will have, `environment` all of its variables, `devices` the variable
    for the GPUs it may use. `known` has the interpreters that need not be asked again. `limiter` bounds the threads
    that ask at once, also those with an answer that is not waited for any more. `reader` is as for `gpus_for`.
    """
    facts, gpus = Facts(devices=devices, visible=environment.get(devices)), None

    async def read() -> None:
        nonlocal facts
        facts = await trio.to_thread.run_sync(
            read_facts, worker, python, environment, devices, known, abandon_on_cancel=True, limiter=limiter
        )
        if facts.hub is not None:
            facts = attrs.evolve(facts, hub=await ask_hub(facts.hub, environment))

    with trio.move_on_after(within_s) as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            gpus = await gpus_for(devices, reader)
    if scope.cancelled_caught:
        log.warning(
            "checking worker %s needed more than %g s: unknown facts are not checked",
            worker.model_name,
            within_s,
        )
    return attrs.evolve(facts, gpus=gpus)


async def gpus_for(devices: str, reader: GpuReader | None = None) -> list[Gpu] | None:
    """Return the GPUs that this variable counts; None: they are not known, since NVML knows NVIDIA's only.

    `reader` reads the GPUs; None: nothing else in this process does.
    """
    if devices != VISIBLE:
        return None
    gpus = await (reader or GpuReader()).find()
    is_without = gpus is None and not await trio.to_thread.run_sync(has_other_gpus)
    return [] if is_without else gpus


def read_facts(
    worker: ManagedWorkerConfig,
    python: str,
    environment: Mapping[str, str],
    devices: str = VISIBLE,
    known: KnownPythons | None = None,
    *,
    probe_s: float = PROBE_S,
) -> Facts:
    """Return the facts about port, interpreter, flags and model; the hub is not asked yet.

    It runs a program and may resolve a name, so it belongs in a thread. The interpreter has `probe_s` to answer.
    """
    address = worker.tcp_address()
    port = read_port(*address) if address is not None else "free"
    known = KnownPythons() if known is None else known
    state, words = _read_python(python, worker.backend, environment, known, probe_s)
    model, hint = read_model(worker) if worker.backend in ENGINES else ("unchecked", "")
    is_name = worker.backend in ENGINES and not os.path.exists(worker.model_path) and not is_path(worker.model_path)
    kept = read_kept(Interpreter.of(python, worker.backend, environment)) if worker.backend_args else None
    return Facts(
        port=port,
        port_holders=port_holders(address[1]) if address is not None and port == "taken" else (),
        python=state,
        python_words=words,
        model=model,
        model_hint=hint,
        real_path=real_path_of(worker.model_path),
        directory=_here(),
        need=read_need(worker, arguments_of(worker), environment),
        version=version_of(worker.backend, python) if worker.backend in ENGINES else None,
        hub=read_hub(worker, environment) if is_name else None,
        flags=kept.flags if kept is not None else None,
        has_engine_key=worker.backend in ENGINES and bool(environment.get(KEY_VARIABLE)),
        devices=devices,
        visible=environment.get(devices),
    )


def real_path_of(path: str) -> str:
    """Return the path of a model without links, the same for all paths that lead to it; or its name on a hub."""
    return os.path.realpath(path) if os.path.exists(path) else path


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "a directory that is gone"


def read_port(host: str, port: int) -> PortState:
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


def port_holders(port: int) -> list[Holder]:
    """Return the processes that listen on a port; those of other users may be invisible."""
    holders: dict[int, Holder] = {}
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            address, pid = connection.laddr, connection.pid
            if pid and address and address.port == port and connection.status == psutil.CONN_LISTEN:
                with contextlib.suppress(psutil.Error):
                    relay_of = mark_of(pid, RELAY_VARIABLE)
                    is_waiting = bool(relay_of) and not is_running(relay_of)
                    holders[pid] = Holder(pid, psutil.Process(pid).name(), relay_of, is_waiting)
    return list(holders.values())


def _read_python(
    python: str, backend: str, environment: Mapping[str, str], known: KnownPythons, probe_s: float
) -> tuple[PythonState, str]:
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
        if key in known:
            return "right", ""
        ours = __version__ if is_installed() else ""
        command = [path, "-c", _PROBE, backend, str(int(backend in ENGINES)), ours]
        state, words = run_probe(command, environment, probe_s)
    except OSError as error:
        return "broken", error.strerror or str(error)
    except ValueError:  # an environment that no process can have: the start itself reports it
        return "right", ""
    if state == "right":
        known.add(key)
    return state, words


def run_probe(command: list[str], environment: Mapping[str, str], probe_s: float) -> tuple[PythonState, str]:
    """Run an interpreter, and return its state with the last line that a broken interpreter wrote.

    It writes to a file, since a process that it leaves behind would hold a pipe open.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(probe_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "silent", ""
        if code in _STATES:
            return _STATES[code], ""
        output.seek(max(0, output.seek(0, os.SEEK_END) - 4096))
        lines = output.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return "broken", last[:200]


def read_model(worker: ManagedWorkerConfig) -> tuple[ModelState, str]:
    """Return the state of a model here, and a path that may be meant, or the missing part."""
    path = worker.model_path
    try:
        if os.path.isfile(path):
            return _read_model_file(path)
        if not os.path.isdir(path):
            home = os.path.expanduser(path) if path.startswith("~") else ""
            return ("missing", home if os.path.exists(home) else "") if is_path(path) else ("unchecked", "")
        if not os.access(path, os.R_OK | os.X_OK):
            return "unreadable", ""
        if any(os.path.exists(os.path.join(path, name)) for name in ("config.json", "params.json", "model_index.json")):
            keys = _ARCHITECTURE.get(worker.backend, ())
            lack = "" if arguments_of(worker).get("load_format", "auto") != "auto" else lack_of(path)
            if not lack and _OTHER_CONFIGS.isdisjoint(arguments_of(worker)) and not has_architecture(path, keys):
                return "without_architecture", ""
            return ("incomplete", lack) if lack else ("right", "")
        if "hf_config_path" in arguments_of(worker):
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
    """Return the model in a directory: just below, in the layout of the hub's cache, or a GGUF file; "" for none."""
    for pattern in ("*/config.json", "snapshots/*/config.json", "*.gguf"):
        found = next(pathlib.Path(path).glob(pattern), None)
        if found is not None:
            return str(found if found.suffix == ".gguf" else found.parent)
    return ""


def is_path(path: str) -> bool:
    """Return whether this can only be a path: no name on a hub, no file in a repository there, no address."""
    if path.startswith(("/", ".", "~")):
        return True
    is_remote = "://" in path or path.endswith(".gguf")
    return not is_remote and _HUB_NAME.fullmatch(path) is None
