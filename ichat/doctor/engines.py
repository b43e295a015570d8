"""The engines: whether each can be imported, its version was tested, and its build fits driver and processor."""

import re
import shutil
from collections.abc import Iterator, Sequence

import attrs
import trio

from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.doctor.findings import Finding
from ichat.doctor.machine import is_on_cpu, text_of
from ichat.engines.kept_flags import libraries_of, version_of
from ichat.engines.versions import Version, check_version
from ichat.errors import Exit
from ichat.hardware.gpus import GpuReader
from ichat.preflight.facts import ENGINES, PythonState, run_probe
from ichat.supervisor.launch import environment_of, python_of

IMPORT_S = 6.5
"""The longest time to import an engine's libraries, in seconds; a slower engine gets a warning."""
IMPORTS_AT_ONCE_MAX = 4

UNCHANGED = {"PYTHONDONTWRITEBYTECODE": "1"}
"""Keeps an interpreter from changing its environment."""
_IMPORT = """
import importlib.util, sys
if importlib.util.find_spec("torch") is not None:
    import torch
"""
"""Imports the compiled parts of an engine, which fail first. The whole engine needs ten seconds and more."""
_CUDA = re.compile(r"^cuda(?:: *[^=]+)? *= *['\"](\d+)\.(\d+)", re.MULTILINE)
_HIP = re.compile(r"^hip(?:: *[^=]+)? *= *['\"]", re.MULTILINE)

Cuda = tuple[int, int]


@attrs.frozen
class EngineFacts:
    """An engine in an interpreter."""

    backend: str
    python: str
    version: str | None = None
    cuda: Cuda | None = None
    """The CUDA that its PyTorch was built for; None: built without CUDA, or not known."""
    has_torch: bool = False
    is_for_other_gpus: bool = False
    state: PythonState = "right"
    words: str = ""
    """The last line of the failed import's error."""
    is_on_cpu: bool = False
    """Whether all of its workers are configured to use processors only."""


@attrs.frozen
class ProcessorFacts:
    """The driver and the processor."""

    gpus: int | None = None
    driver: str = ""
    cuda: Cuda | None = None
    """The newest CUDA that the driver can run."""
    flags: frozenset[str] = frozenset()
    """The processor's features, on x86; empty elsewhere."""


async def read_engine_facts(config: Config, ends_at: float) -> list[EngineFacts]:
    """Ask the interpreters of the workers on this machine, several at the same time; it is `silent` if it is slow."""
    found: list[EngineFacts] = []
    turn = trio.CapacityLimiter(IMPORTS_AT_ONCE_MAX)
    pairs: dict[tuple[str, str], list[ManagedWorkerConfig]] = {}
    for worker in config.managed_workers:
        if worker.on != "here":
            continue
        pairs.setdefault((worker.backend, python_of(config, worker)), []).append(worker)

    async def read(place: int, workers: list[ManagedWorkerConfig]) -> None:
        with trio.move_on_at(ends_at):
            found[place] = await trio.to_thread.run_sync(
                _read_engine, config, workers, abandon_on_cancel=True, limiter=turn
            )

    async with trio.open_nursery() as nursery:
        for place, ((backend, python), workers) in enumerate(pairs.items()):
            found.append(EngineFacts(backend, python, state="silent"))
            nursery.start_soon(read, place, workers)
    return found


def read_processor_facts(gpus: int | None) -> ProcessorFacts:
    """Return the facts about driver and processor; `gpus` is how many GPUs answer, None: the driver does not answer."""
    driver = GpuReader().read_versions() if gpus is not None else None
    line = next((line for line in text_of("/proc/cpuinfo").splitlines() if line.startswith("flags")), "")
    version, cuda = driver or ("", None)
    return ProcessorFacts(gpus, version, cuda, frozenset(line.partition(":")[2].split()))


def find_in_engines(engines: Sequence[EngineFacts], processor: ProcessorFacts) -> list[Finding]:
    """Return the findings about each engine."""
    if not engines:
        return [Finding("ok", "engines", "No managed worker needs an engine on this machine.")]
    return [finding for engine in engines for finding in _check_engine(engine, processor)]


def _check_engine(engine: EngineFacts, processor: ProcessorFacts) -> Iterator[Finding]:
    name, problems = ENGINES.get(engine.backend, engine.backend), list[Finding]()
    if engine.state == "silent":
        sentence = f"{engine.python} has not imported PyTorch within {IMPORT_S:g} s: its disk or the machine is slow."
        problems.append(Finding("warning", name, sentence, f'time {engine.python} -c "import torch"'))
    elif engine.state == "broken":
        make = f"./build engine {engine.backend}" if engine.backend in ENGINES else ""
        sentence = f"{engine.python} cannot import what {name} needs ({engine.words}): install the engine again."
        problems.append(Finding("error", name, sentence, make))
    if engine.version is not None and engine.backend in ENGINES:
        try:
            check_version(name, engine.version, *_bounds(engine.backend))
        except Exit as exit_:
            problems.append(Finding("error", name, str(exit_), f"./build engine {engine.backend}"))
    problems += _check_build(name, engine, processor)
    yield from problems
    if not problems and engine.version is not None:
        build = f", built for CUDA {_dotted(engine.cuda)}" if engine.cuda else ""
        yield Finding("ok", name, f"{name} {engine.version} of {engine.python} is tested{build}.")


def _check_build(name: str, engine: EngineFacts, processor: ProcessorFacts) -> Iterator[Finding]:
    if not engine.has_torch or engine.is_for_other_gpus:
        return
    build = engine.cuda
    if build is not None and processor.cuda is not None and processor.cuda[0] < build[0] and not engine.is_on_cpu:
        sentence = (
            f"{name} of {engine.python} is built for CUDA {_dotted(build)}, and the driver {processor.driver} runs"
            f" CUDA {_dotted(processor.cuda)} at most: install a newer driver, or an older build."
        )
        yield Finding("error", name, sentence, "nvidia-smi")
    elif build is not None and not processor.gpus and not engine.is_on_cpu:
        sentence = f"{name} of {engine.python} is built for CUDA {_dotted(build)}, and no GPU answers on this machine."
        yield Finding("warning", name, sentence, "nvidia-smi")
    elif build is None and processor.gpus and not engine.is_on_cpu:
        sentence = f"{name} of {engine.python} is built without CUDA, and leaves this machine's GPUs unused."
        yield Finding("warning", name, sentence, f"./build engine {engine.backend}")
    if build is None and processor.flags and "avx2" not in processor.flags:
        sentence = f"This processor has no AVX2, which {name} on the CPU needs: run it on another machine."
        yield Finding("error", name, sentence, "lscpu")
    elif build is None and processor.flags and "avx512f" not in processor.flags and not processor.gpus:
        sentence = f"This processor has no AVX512, so that {name} is slow on it; AMX would help most."
        yield Finding("warning", name, sentence, "lscpu")


def _read_engine(config: Config, workers: Sequence[ManagedWorkerConfig]) -> EngineFacts:
    worker = workers[0]
    python, backend = python_of(config, worker), worker.backend
    facts = EngineFacts(backend, python, version_of(backend, python), is_on_cpu=all(map(is_on_cpu, workers)))
    torch = next((text for path in libraries_of(python) if (text := text_of(path / "torch" / "version.py"))), "")
    if torch:
        match = _CUDA.search(torch)
        cuda = (int(match[1]), int(match[2])) if match else None
        facts = attrs.evolve(facts, has_torch=True, cuda=cuda, is_for_other_gpus=_HIP.search(torch) is not None)
    program = shutil.which(python)
    if facts.version is None or program is None:
        return facts  # preflight reports the mistake
    try:
        environment = {**environment_of(config, worker, ""), **UNCHANGED}
        state, words = run_probe([program, "-c", _IMPORT], environment, IMPORT_S)
    except (OSError, ValueError):
        return facts
    return attrs.evolve(facts, state=state, words=words)


def _bounds(backend: str) -> tuple[Version, Version]:
    """Return the oldest and the newest version that was tested; their modules are large."""
    if backend == "vllm":
        from ichat.engines.vllm import engine as module
    else:
        from ichat.engines.sglang import engine as module
    return module.OLDEST, module.NEWEST


def _dotted(version: Cuda) -> str:
    return ".".join(map(str, version))
