"""`ichat.pyz estimate MODEL_PATH`: the memory of a model on a GPU, and the tokens that fit into the rest.

It reads the model's files and starts nothing. A model of an unknown shape has no figures.
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from ichat.cli.launch import engine_arguments, split
from ichat.cli.screen import Screen, prepare_streams
from ichat.config.command_line import CommandLineParser, guess
from ichat.config.schema import ManagedWorkerConfig
from ichat.errors import EXIT_USAGE, Exit
from ichat.hardware.gpus import Gpu, GpuReader
from ichat.placement.estimate import GIB, Estimate, estimate, fewest_gpus, longest_context, refusal_of_sharing
from ichat.placement.model_shape import UnknownShape
from ichat.placement.settings import Settings, settings_of
from ichat.placement.weights import DamagedFile, WeightSums
from ichat.preflight.facts import ENGINES, Facts, read_model
from ichat.preflight.model_memory import ModelDescription, describe_model
from ichat.preflight.obstacles import gib, problems_of_model

EXIT_UNKNOWN = 1
GPU_MIB = {
    "T4": 15360, "RTX4090": 24564, "RTX5090": 32607, "A10": 23028, "L4": 23034, "A100-40": 40960, "L40S": 46068,
    "RTX6000": 49140, "A100": 81920, "H100": 81559, "GH200": 97871, "H20": 97871, "H200": 143771, "B200": 183359,
}  # fmt: skip
"""Kinds of GPUs by their names, with their memory in MiB as NVIDIA's driver reports it."""


@attrs.frozen
class GpuKind:
    """The GPUs for which a model is estimated."""

    name: str
    memory_bytes: int


@attrs.frozen
class EstimateAnswer:
    """An estimate with the things that it is for."""

    name: str
    description: ModelDescription
    weights: WeightSums
    settings: Settings
    gpu: GpuKind | None
    found: Estimate
    fewest: int | None
    """The fewest GPUs that hold the model; None: not known, or no number does."""


def parser() -> CommandLineParser:
    """Return the parser of the command."""
    usage = CommandLineParser(
        prog="ichat.pyz estimate",
        description="Estimate the GPU memory of a model by its config.json and the headers of its files.",
        allow_abbrev=False,
    )
    usage.epilog = (
        "Every other flag after MODEL_PATH is the engine's, as launch has it (--max-model-len 8192,"
        " --tensor-parallel-size 2)."
    )
    usage.add_argument("model", metavar="MODEL_PATH", help="a directory, or a name in the model hub's cache")
    usage.add_argument("--backend", "-be", metavar="NAME", default="vllm", help="the engine: vllm (default) or sglang")
    usage.add_argument("--gpu", metavar="KIND", help=f"its GPUs: {', '.join(GPU_MIB)}; default: the GPUs here")
    usage.add_argument("--gpu-memory-gib", metavar="GIB", type=float, help="the memory of each GPU")
    usage.add_argument("--json", action="store_true", help="print JSON")
    return usage


def run(argv: Sequence[str]) -> int:
    """Show the estimate that the command line asks for, and return the exit code: 1 if there is none.

    Raises Exit 64 for a wrong command line, and for a model that is not here or is damaged.
    """
    usage = parser()
    has_help = bool({"-h", "--help"}.intersection(argv))
    ours, words = (list(argv), list[str]()) if has_help else split(usage, argv)
    args = usage.parse_args(ours)
    arguments = engine_arguments(words)
    if args.backend not in ENGINES:
        raise Exit(EXIT_USAGE, f"{usage.prog}: --backend must be {' or '.join(ENGINES)}, not {args.backend!r}.")
    gpu = _gpu_of(args.gpu, args.gpu_memory_gib)
    prepare_streams()
    screen = Screen()
    try:
        answer = answer_for(args.model, args.backend, arguments, gpu)
    except UnknownShape as error:
        sentence = f"The memory of {args.model} is not known ({error})."
        if not args.json:
            raise Exit(EXIT_UNKNOWN, sentence) from error
        screen.line(json.dumps({"model": args.model, "unknown": sentence}, ensure_ascii=False))
        return EXIT_UNKNOWN
    if args.json:
        screen.line(json.dumps(to_json(answer), ensure_ascii=False))
    else:
        show(screen, answer)
    return 0


def answer_for(path: str, backend: str, arguments: dict[str, Any], gpu: GpuKind | None) -> EstimateAnswer:
    """Return the estimate for a model, an engine's arguments, and GPUs.

    Raises UnknownShape, and Exit 64 for a model that is not here or damaged, and for flags that cannot be.
    """
    worker = ManagedWorkerConfig(model_name="", model_path=path, backend=backend, backend_args=arguments)
    state, hint = read_model(worker)
    if state in ("missing", "unreadable", "not_a_model"):
        facts = Facts(model=state, model_hint=hint, directory=os.getcwd())
        raise Exit(EXIT_USAGE, problems_of_model(path, facts, "MODEL_PATH")[0])
    settings = settings_of(backend, arguments)
    try:
        description = describe_model(path, arguments, os.environ)
    except DamagedFile as error:
        lack = Facts(model="incomplete", model_hint=str(error), directory=os.getcwd())
        raise Exit(EXIT_USAGE, problems_of_model(path, lack, "MODEL_PATH")[0]) from error
    except OSError as error:
        raise Exit(EXIT_USAGE, f"The model {path} cannot be read: {error.strerror or error}.") from error
    shape, weights = description.shape, description.weights(settings.element)
    name = os.path.basename(path.rstrip("/")) or path
    if refusal := refusal_of_sharing(name, shape, settings):
        raise Exit(EXIT_USAGE, refusal)
    return EstimateAnswer(
        name=name,
        description=description,
        weights=weights,
        settings=settings,
        gpu=gpu,
        found=estimate(shape, weights, settings, gpu.memory_bytes if gpu is not None else None),
        fewest=None if gpu is None else fewest_gpus(shape, weights, settings, gpu.memory_bytes),
    )


def verdict_of(answer: EstimateAnswer) -> str:
    """Return why these GPUs do not do, and the remedy; "" if the engine can start, or no GPU is known."""
    gpu, settings, shape = answer.gpu, answer.settings, answer.description.shape
    if gpu is None or answer.found.fits:
        return ""
    ranks = "1 GPU" if settings.ranks == 1 else f"{settings.ranks} GPUs"
    longest = longest_context(shape, answer.weights, settings, gpu.memory_bytes)
    remedies = [f"{answer.fewest} GPUs would do"] if answer.fewest is not None else []
    flag = "context_length" if settings.backend == "sglang" else "max_model_len"
    remedies += [f"{flag} = {longest}"] if longest else []
    return (
        f"{answer.name} needs {gib(answer.found.least_bytes)} GiB a GPU at {ranks}; {gpu.name} has"
        f" {gib(gpu.memory_bytes)}: {', or '.join(remedies) or 'no number of these GPUs would do'}."
    )


def _gpu_of(kind: str | None, memory_gib: float | None) -> GpuKind | None:
    """Return the GPUs that the command line names, or the smallest of those here; None: there are none.

    Raises Exit 64.
    """
    if memory_gib is not None:
        if not 0 < memory_gib <= 1e6:
            raise Exit(EXIT_USAGE, f"--gpu-memory-gib must be more than 0, not {memory_gib:g}.")
        return GpuKind(kind or "the GPU", math.floor(memory_gib * GIB))
    if kind is not None:
        known = {name.upper(): (name, size) for name, size in GPU_MIB.items()}
        if kind.upper() not in known:
            meant = guess(kind.upper(), known)
            raise Exit(EXIT_USAGE, f"The GPU {kind} is not known{meant}: give --gpu-memory-gib.")
        name, size = known[kind.upper()]
        return GpuKind(name, size * 1024**2)
    import trio

    gpus: list[Gpu] = trio.run(GpuReader().find) or []
    here = [gpu for gpu in gpus if gpu.memory_total_bytes and not gpu.is_split]
    if not here:
        return None
    smallest = min(here, key=lambda gpu: gpu.memory_total_bytes or 0)
    return GpuKind(f"GPU {smallest.index} ({smallest.name})", smallest.memory_total_bytes or 0)


def _rows(answer: EstimateAnswer) -> Iterator[tuple[str, int, str, str]]:
    """Return each amount of memory: its name, its bytes, how it is known, and a note."""
    found, description = answer.found, answer.description
    note = "by config.json alone: the files are not here" if description.is_implied else ""
    for part in found.parts:
        yield part.name, part.bytes, part.grade, note if part.name == "weights" else part.note
    yield "KV cache of a request", found.sequence_bytes, "computed", f"{found.context} tokens"
    is_assumed = any(part.grade == "assumed" for part in found.parts)
    yield "least", found.least_bytes, "assumed" if is_assumed else "computed", "all of these"
    if found.cache_bytes is not None:
        yield "left for the KV cache", max(found.cache_bytes, 0), "assumed", "if nothing else uses the GPU"


def show(screen: Screen, answer: EstimateAnswer) -> None:
    """Write the estimate for a reader."""
    settings, gpu = answer.settings, answer.gpu
    ranks = "1 GPU" if settings.ranks == 1 else f"each of {settings.ranks} GPUs"
    place = "" if gpu is None else f", {gpu.name} with {gib(gpu.memory_bytes)} GiB"
    screen.line(f"{answer.name} on {ranks} with {ENGINES[settings.backend]}{place}\n")
    screen.table(("part", "GiB", "known", "note"), ((name, gib(size), *rest) for name, size, *rest in _rows(answer)))
    screen.line("")
    screen.facts(_facts(answer))
    if verdict := verdict_of(answer):
        screen.line(f"\n{verdict}", "bold red")


def _facts(answer: EstimateAnswer) -> Iterator[tuple[str, object]]:
    """Return the figures that are no amounts of memory, by their names."""
    found = answer.found
    yield "KV cache of a token", f"{found.token_bytes} bytes (computed)" if found.token_bytes else "none"
    if found.window_layers:
        yield "layers with a window", f"{found.window_layers}, which keep no more than it (computed)"
    if found.tokens:
        yield "tokens", f"{found.tokens} (assumed)"
        yield "requests at once", f"{found.tokens / found.context:.1f} of {found.context} tokens (assumed)"
    if answer.fewest is not None:
        yield "fewest GPUs", f"{answer.fewest} (assumed)"
    if answer.gpu is None:
        yield "GPU", "none is known: give --gpu or --gpu-memory-gib"


def to_json(answer: EstimateAnswer) -> dict[str, Any]:
    """Return the estimate as JSON has it; figures that are not known are null."""
    found, gpu = answer.found, answer.gpu
    return {
        "model": answer.name,
        "backend": answer.settings.backend,
        "gpus": answer.settings.ranks,
        "gpu": None if gpu is None else attrs.asdict(gpu),
        "parts": [
            {"name": name, "bytes": size, "known": known, "note": note} for name, size, known, note in _rows(answer)
        ],
        "context": found.context,
        "kv_bytes_per_token": found.token_bytes,
        "window_layers": found.window_layers,
        "least_bytes": found.least_bytes,
        "tokens": found.tokens,
        "at_once": found.at_once,
        "fewest_gpus": answer.fewest,
        "fits": found.fits,
        "verdict": verdict_of(answer) or None,
        "unknown": None,
    }
