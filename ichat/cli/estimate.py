"""`ichat.pyz estimate MODEL_PATH`: the memory of a model on a GPU, and the tokens that fit into the rest.

It reads the model's files and starts nothing. Figures that a gateway has learnt from loads replace those that are
assumed: they are read from its state directory, so it need not run. A model of an unknown shape has no figures.
"""

import json
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from ichat.cli.earlier_loads import read_earlier_loads
from ichat.cli.gateway_address import USUAL_FILE
from ichat.cli.launch import engine_arguments, split
from ichat.cli.screen import Screen, prepare_streams
from ichat.config.command_line import CommandLineParser, guess
from ichat.config.schema import ManagedWorkerConfig
from ichat.errors import EXIT_USAGE, Exit
from ichat.hardware.gpus import Gpu, GpuReader
from ichat.placement.estimate import GIB, Estimate, estimate, fewest_gpus, longest_context, refusal_of_sharing
from ichat.placement.learnt import LearntKey, LearntMemories, LearntMemory, cache_flags_of, key_of
from ichat.placement.model_shape import UnknownShape
from ichat.placement.settings import Settings, settings_of
from ichat.placement.weights import DamagedFile, WeightSums
from ichat.preflight.facts import ENGINES, Facts, read_model, real_path_of
from ichat.preflight.model_memory import ModelDescription, describe_model
from ichat.preflight.obstacles import gib, problems_of_model

EXIT_UNKNOWN = 1
SIZES_DIFFER = 0.03
"""The share of a GPU's memory by which two GPUs of a kind may differ."""
_OF_FILE = ("key", "cache_flags")
"""The fields of learnt figures that only serve to find them."""
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
    kinds: Sequence[tuple[str, int]] = ()
    """The GPUs of learnt figures that are meant: the driver's name of each, and its memory."""


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
    learnt: LearntMemory | None = None
    """The figures of the model's last load in these circumstances; None: there are none."""


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
    place = usage.add_mutually_exclusive_group()
    place.add_argument(
        "--config", "-c", metavar="FILE", help=f"the gateway that has learnt from loads; else {USUAL_FILE} here"
    )
    place.add_argument("--state-directory", metavar="DIRECTORY", help="its state directory")
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
    learnt = read_earlier_loads(args.config, args.state_directory)
    gpu = _gpu_of(args.gpu, args.gpu_memory_gib, learnt)
    prepare_streams()
    screen = Screen()
    try:
        answer = answer_for(args.model, args.backend, arguments, gpu, learnt)
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


def answer_for(
    path: str, backend: str, arguments: dict[str, Any], gpu: GpuKind | None, memories: LearntMemories
) -> EstimateAnswer:
    """Return the estimate for a model, an engine's arguments, and GPUs; `memories` are of earlier loads.

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
    weights_bytes = weights.on_gpu(settings.tensor, settings.pipeline)
    kinds = [("", 0)] if gpu is None else gpu.kinds
    keys = [key_of(real_path_of(path), backend, arguments, weights_bytes, kind) for kind in kinds]
    learnt = _last_load(keys, cache_flags_of(arguments), memories)
    return EstimateAnswer(
        name=name,
        description=description,
        weights=weights,
        settings=settings,
        gpu=gpu,
        found=estimate(shape, weights, settings, gpu.memory_bytes if gpu is not None else None, learnt),
        fewest=None if gpu is None else fewest_gpus(shape, weights, settings, gpu.memory_bytes, learnt),
        learnt=learnt,
    )


def _last_load(keys: Sequence[LearntKey], cache_flags: str, memories: LearntMemories) -> LearntMemory | None:
    """Return the figures of the newest load in any of these circumstances; None: there are none."""
    found = [one for key in keys if (one := memories.find(key, None, cache_flags)) is not None]
    return max(found, key=lambda one: one.at, default=None)


def verdict_of(answer: EstimateAnswer) -> str:
    """Return why these GPUs do not hold the longest sequence, and the remedy; "" if they do, or no GPU is known."""
    gpu, settings, shape, found = answer.gpu, answer.settings, answer.description.shape, answer.found
    if gpu is None or found.holds_context:
        return ""
    ranks = "1 GPU" if settings.ranks == 1 else f"{settings.ranks} GPUs"
    longest = longest_context(shape, answer.weights, settings, gpu.memory_bytes, answer.learnt)
    remedies = [f"{answer.fewest} GPUs would do"] if answer.fewest is not None else []
    flag = "context_length" if settings.backend == "sglang" else "max_model_len"
    remedies += [f"{flag} = {longest}"] if longest else []
    starts = f", and {ENGINES[settings.backend]} starts with a shorter context" if found.fits else ""
    return (
        f"{answer.name} needs {gib(found.least_bytes)} GiB a GPU at {ranks}; {gpu.name} has"
        f" {gib(gpu.memory_bytes)}{starts}: {', or '.join(remedies) or 'no number of these GPUs would do'}."
    )


def _gpu_of(kind: str | None, memory_gib: float | None, memories: LearntMemories) -> GpuKind | None:
    """Return the GPUs that the command line names, or the smallest of those here; None: there are none.

    `memories` have the names that the driver gives to kinds of GPUs. Raises Exit 64.
    """
    if memory_gib is not None:
        if not 0 < memory_gib <= 1e6:
            raise Exit(EXIT_USAGE, f"--gpu-memory-gib must be more than 0, not {memory_gib:g}.")
        return GpuKind(kind or "the GPU", math.floor(memory_gib * GIB))
    if kind is not None:
        return _named_gpu(kind, memories)
    import trio

    gpus: list[Gpu] = trio.run(GpuReader().find) or []
    here = [gpu for gpu in gpus if gpu.memory_total_bytes and not gpu.is_split]
    if not here:
        return None
    smallest = min(here, key=lambda gpu: gpu.memory_total_bytes or 0)
    size = smallest.memory_total_bytes or 0
    return GpuKind(f"GPU {smallest.index} ({smallest.name})", size, [(smallest.name, size)])


def _named_gpu(kind: str, memories: LearntMemories) -> GpuKind:
    """Return the GPUs of a kind of `GPU_MIB`. Raises Exit 64."""
    known = {name.upper(): (name, size) for name, size in GPU_MIB.items()}
    if kind.upper() not in known:
        meant = guess(kind.upper(), known)
        raise Exit(EXIT_USAGE, f"The GPU {kind} is not known{meant}: give --gpu-memory-gib.")
    name, size = known[kind.upper()]
    told = dict.fromkeys((one.key.gpu, one.key.gpu_bytes) for one in memories)
    return GpuKind(name, size * 1024**2, [one for one in told if _is_of_kind(*one, name, size * 1024**2)])


def _is_of_kind(name: str, size: int, kind: str, memory_bytes: int) -> bool:
    """Return whether a GPU with this name and memory, by its driver, is of this kind of `GPU_MIB`."""
    word = re.sub(r"(?<=X)(?=\d)", " ?", kind.partition("-")[0])
    is_named = re.search(rf"(?<![A-Z0-9]){word}(?![0-9A-Z])", name.upper()) is not None
    return is_named and abs(size - memory_bytes) <= SIZES_DIFFER * memory_bytes


def _rows(answer: EstimateAnswer) -> Iterator[tuple[str, int, str, str]]:
    """Return each amount of memory: its name, its bytes, how it is known, and a note."""
    found, description = answer.found, answer.description
    note = "by config.json alone: the files are not here" if description.is_implied else ""
    for part in found.parts:
        yield part.name, part.bytes, part.grade, note if part.name == "weights" else part.note
    yield "KV cache of a request", found.sequence_bytes, "computed", f"{found.context} tokens"
    yield "least", found.least_bytes, found.grade, "all of these"
    if found.cache_bytes is not None:
        is_learnt = found.cache_grade == "learnt"
        why = "of the last load" if is_learnt else "if nothing else uses the GPU"
        yield "left for the KV cache", max(found.cache_bytes, 0), found.cache_grade, why


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
        grade = found.cache_grade
        yield "tokens", f"{found.tokens} ({grade})"
        yield "requests at once", f"{found.tokens / found.context:.1f} of {found.context} tokens ({grade})"
    if answer.fewest is not None:
        yield "fewest GPUs", f"{answer.fewest} (assumed)"
    if (learnt := answer.learnt) is not None:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(learnt.at))
        engine = f"{ENGINES[learnt.key.backend]} {learnt.version}".rstrip()
        held = f"; it held {gib(learnt.held_bytes)} GiB of a GPU" if learnt.held_bytes is not None else ""
        yield "learnt", f"from {learnt.name} with {engine}, {at}{held}"
    if answer.gpu is None:
        yield "GPU", "none is known: give --gpu or --gpu-memory-gib"


def to_json(answer: EstimateAnswer) -> dict[str, Any]:
    """Return the estimate as JSON has it; figures that are not known are null."""
    found, gpu = answer.found, answer.gpu
    return {
        "model": answer.name,
        "backend": answer.settings.backend,
        "gpus": answer.settings.ranks,
        "gpu": None if gpu is None else {"name": gpu.name, "memory_bytes": gpu.memory_bytes},
        "parts": [
            {"name": name, "bytes": size, "known": known, "note": note} for name, size, known, note in _rows(answer)
        ],
        "context": found.context,
        "kv_bytes_per_token": found.token_bytes,
        "window_layers": found.window_layers,
        "least_bytes": found.least_bytes,
        "tokens": found.tokens,
        "tokens_known": found.cache_grade,
        "at_once": found.at_once,
        "fewest_gpus": answer.fewest,
        "fits": found.fits,
        "verdict": verdict_of(answer) or None,
        "learnt": _learnt_json(answer.learnt),
        "unknown": None,
    }


def _learnt_json(learnt: LearntMemory | None) -> dict[str, Any] | None:
    """Return the figures of the last load as JSON has them; None: there are none."""
    return None if learnt is None else attrs.asdict(learnt, filter=lambda field, _: field.name not in _OF_FILE)
