"""The memory of a model on a GPU, and the tokens that fit into the rest: pure functions of shape, weights, settings.

Each part says whether it is computed from the model and the flags, learnt from an earlier load, or assumed.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import attrs
from attrs import frozen

from ichat.placement.cache import bytes_per_token, cache_bytes_of_sequence, tokens_in_cache, windows_of
from ichat.placement.learnt import LearntMemory
from ichat.placement.model_shape import ModelShape
from ichat.placement.settings import Settings
from ichat.placement.weights import WeightSums

Grade = Literal["computed", "learnt", "assumed"]

MIB, GIB = 1024**2, 1024**3
VLLM_SHARE = 0.92
"""vLLM's share of a GPU's memory unless it is set; older releases have 0.9."""
CONTEXT_BYTES = GIB // 2
"""The memory of CUDA itself on a GPU."""
TENSOR_MAX = 64
GPUS_MAX = 64
_FLOOR_FROM, _FLOOR = 60 * GIB, 10 * GIB
"""SGLang leaves at least the second amount free on a GPU with more memory than the first."""
_SGLANG_DEFAULTS = ((20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (160, 8192, 256, 512))
"""By the memory of a GPU in GiB: SGLang's tokens of a step, and the largest graph below 4 GPUs and from 4 on."""
_GRAPH_SIZES = (
    *range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64), *range(1280, 4097, 256),
    *range(4608, 16385, 512),
)  # fmt: skip
"""The numbers of tokens for which SGLang captures a step that reads prompts."""


@frozen
class Part:
    """A part of the memory on a GPU."""

    name: str
    bytes: int
    grade: Grade
    note: str = ""


@frozen
class Estimate:
    """The memory of a model on the GPU that holds most of it."""

    parts: Sequence[Part]
    """Everything but the KV cache; the weights first."""
    context: int
    """The most tokens of a sequence."""
    token_bytes: int
    """The bytes of a token in all layers that keep every token; if there are none, in all layers."""
    window_layers: int
    """The number of layers that keep no more than a window."""
    sequence_bytes: int
    """The KV cache of a sequence with the most tokens."""
    cache_bytes: int | None = None
    """The rest, for the KV cache; None: the GPU is not known."""
    tokens: int | None = None
    """The tokens in the KV cache; 0 for a model that has none."""
    cache_grade: Grade = "assumed"
    """How the two figures above are known."""
    fits_context: bool = False
    """Whether the engine lowers `context` until a sequence fits."""

    @property
    def grade(self) -> Grade:
        """How `least_bytes` is known: by the least certain of its parts."""
        grades = {part.grade for part in self.parts}
        return "assumed" if "assumed" in grades else "learnt" if "learnt" in grades else "computed"

    @property
    def least_bytes(self) -> int:
        """The least memory that a GPU must give."""
        return sum(part.bytes for part in self.parts) + self.sequence_bytes

    @property
    def at_once(self) -> float | None:
        """The number of sequences with the most tokens that fit at once; None: not known, or without a bound."""
        return None if not self.tokens else self.tokens / self.context

    @property
    def holds_context(self) -> bool | None:
        """Whether a sequence with the most tokens fits; None: the GPU is not known."""
        return None if self.cache_bytes is None else self.cache_bytes >= self.sequence_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the engine can start; None: the GPU is not known."""
        return self.holds_context or (None if self.tokens is None else self.fits_context and self.tokens > 0)


def estimate(
    shape: ModelShape,
    weights: WeightSums,
    settings: Settings,
    gpu_bytes: int | None = None,
    learnt: LearntMemory | None = None,
) -> Estimate:
    """Return the memory of a model with these weights on each of its GPUs, which have this size if it is known.

    `learnt` has figures of an earlier load in the same circumstances.
    """
    length = settings.context or shape.context
    batch = batch_tokens_of(settings, gpu_bytes)
    by_rule = list(_parts(shape, weights, settings, gpu_bytes))
    parts = by_rule if learnt is None else list(_learnt_parts(by_rule, learnt))
    windows = windows_of(shape, settings)
    whole = sum(window is None for window in windows)
    has_cache = shape.attention != "none"
    found = Estimate(
        parts=parts,
        context=length,
        token_bytes=bytes_per_token(shape, settings) * (whole or len(windows)),
        window_layers=len(windows) - whole,
        sequence_bytes=cache_bytes_of_sequence(shape, settings, length, batch) if has_cache else 0,
        fits_context=settings.fits_context,
    )
    if gpu_bytes is not None:
        left = _cache_bytes(by_rule, parts, settings, gpu_bytes)
        tokens = tokens_in_cache(shape, settings, left, length, batch)
        found = attrs.evolve(found, cache_bytes=left, tokens=tokens)
    if learnt is not None and learnt.tokens is not None:
        size = learnt.cache_bytes if learnt.cache_bytes is not None else found.cache_bytes
        found = attrs.evolve(found, cache_bytes=size, tokens=learnt.tokens, cache_grade="learnt")
    return found


def _learnt_parts(parts: Sequence[Part], learnt: LearntMemory) -> Iterator[Part]:
    """Return the parts with the figures of an earlier load in their place, as far as it had any."""
    known = {"weights": learnt.weights_bytes, "graphs": learnt.graphs_bytes}
    found = [
        part if (size := known.get(part.name)) is None else Part(part.name, size, "learnt", part.note) for part in parts
    ]
    need = max(learnt.beside_bytes or 0, learnt.raised_bytes or 0)
    if not need:
        yield from found
        return
    weights = attrs.evolve(found[0], bytes=min(found[0].bytes, need))
    graphs = [part for part in found if part.name == "graphs" and part.grade == "learnt"]
    rest = need - weights.bytes - sum(part.bytes for part in graphs)
    is_raised = need != learnt.beside_bytes
    note = "raised after a lack of memory" if is_raised else "activations, graphs and CUDA context"
    yield from (weights, *graphs)
    yield Part("everything else", max(rest, 0), "assumed" if is_raised else "learnt", note)


def batch_tokens_of(settings: Settings, gpu_bytes: int | None) -> int:
    """Return the most tokens of a step: as set, or as the engine chooses by the size of its GPU."""
    if settings.batch_tokens is not None:
        return settings.batch_tokens
    if settings.backend == "sglang":
        return _sglang_defaults(settings, gpu_bytes)[0]
    if gpu_bytes is None or gpu_bytes < 70 * GIB:
        return 2048
    return 8192 if gpu_bytes < 160 * GIB else 16384


def tensor_sizes_of(shape: ModelShape) -> list[int]:
    """Return the numbers of GPUs that can share each layer of a model."""
    return [
        number
        for number in range(1, TENSOR_MAX + 1)
        if shape.heads % number == 0
        and (shape.latent is not None or shape.kv_heads % number == 0 or number % shape.kv_heads == 0)
    ]


def refusal_of_sharing(name: str, shape: ModelShape, settings: Settings) -> str:
    """Return why the GPUs of these settings cannot share a model's layers; "" if they can."""
    sizes = tensor_sizes_of(shape)
    if settings.tensor in sizes:
        return ""
    possible = [str(size) for size in sizes]
    listed = " or ".join(filter(None, [", ".join(possible[:-1]), possible[-1]]))
    return f"{name} has {shape.heads} attention heads: it runs on {listed} GPUs, not on {settings.tensor}."


def fewest_gpus(
    shape: ModelShape, weights: WeightSums, settings: Settings, gpu_bytes: int, learnt: LearntMemory | None = None
) -> int | None:
    """Return the fewest GPUs of this size that hold a model and a sequence; None: no number up to `GPUS_MAX` does.

    `learnt` is as for `estimate`, and counts for the number of GPUs in the settings.
    """
    for number in tensor_sizes_of(shape):
        tried = attrs.evolve(settings, tensor=number)
        known = learnt if tried == settings else None
        if tried.ranks <= GPUS_MAX and estimate(shape, weights, tried, gpu_bytes, known).holds_context:
            return tried.ranks
    return None


def longest_context(
    shape: ModelShape, weights: WeightSums, settings: Settings, gpu_bytes: int, learnt: LearntMemory | None = None
) -> int:
    """Return the most tokens in steps of 1024, of a sequence that fits beside a model; 0: none does."""
    fitting, beyond = 0, (settings.context or shape.context) // 1024 + 1
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        tried = attrs.evolve(settings, context=1024 * middle)
        fits = estimate(shape, weights, tried, gpu_bytes, learnt).holds_context
        fitting, beyond = (middle, beyond) if fits else (fitting, middle)
    return 1024 * fitting


def _parts(shape: ModelShape, weights: WeightSums, settings: Settings, gpu_bytes: int | None) -> Iterator[Part]:
    batch = batch_tokens_of(settings, gpu_bytes)
    yield Part("weights", weights.on_gpu(settings.tensor, settings.pipeline), "computed")
    if settings.backend == "sglang":
        yield from _sglang_reserve(shape, settings, gpu_bytes, batch)
        yield Part("CUDA context", CONTEXT_BYTES, "assumed")
        return
    sequences = settings.sequences or (1024 if (gpu_bytes or 0) >= 70 * GIB else 256)
    yield Part("activations", _vllm_activations(shape, settings, batch, sequences), "assumed", f"{batch} tokens a step")
    if not settings.is_eager:
        yield Part("graphs", 2 * MIB * min(2 * sequences, 512), "assumed")
    if settings.ranks > 1:
        yield Part("parallelism", settings.ranks * GIB // 8, "assumed")
    yield Part("CUDA context", CONTEXT_BYTES, "assumed")


def _vllm_activations(shape: ModelShape, settings: Settings, batch: int, sequences: int) -> int:
    """Return the memory of the largest step: of a layer's MLP, or of the choice of tokens."""
    width = shape.width
    if shape.mixture is not None:
        width = max(width, shape.mixture.used * shape.mixture.width + shape.mixture.shared_width)
    layer = batch * (3 * width / settings.tensor + 4 * shape.hidden) * settings.element
    choice = sequences * shape.vocabulary * 3 * 4
    return math.ceil(max(layer, choice)) + 256 * MIB


def _sglang_defaults(settings: Settings, gpu_bytes: int | None) -> tuple[int, int]:
    """Return the tokens of a step and the largest graph, as SGLang chooses them."""
    if gpu_bytes is None:
        return 4096, 160
    for below, tokens, few, many in _SGLANG_DEFAULTS:
        if gpu_bytes < below * GIB:
            return tokens, few if settings.tensor < 4 else many
    return 16384, 512


def _sglang_reserve(shape: ModelShape, settings: Settings, gpu_bytes: int | None, batch: int) -> Iterator[Part]:
    """Return the parts that SGLang leaves free beside weights and KV cache, by its own rules."""
    largest = _sglang_defaults(settings, gpu_bytes)[1]
    largest = min(largest, settings.sequences or largest)
    prompts = math.floor(1.5 * GIB) if shape.latent is not None else 8 * MIB * sum(one <= batch for one in _GRAPH_SIZES)
    parts = [
        Part("activations", 512 * MIB + math.floor(1.5 * MIB * max(batch, 2048)), "assumed", f"{batch} tokens a step"),
        Part("graphs", 0 if settings.is_eager else 2 * MIB * largest + prompts, "assumed"),
        Part("parallelism", settings.ranks * GIB // 8, "assumed"),
    ]
    yield from parts
    missing = _FLOOR - sum(part.bytes for part in parts)
    if gpu_bytes is not None and gpu_bytes > _FLOOR_FROM and missing > 0:
        yield Part("reserve", missing, "computed", "SGLang leaves 10 GiB free on a GPU with more than 60")


def _cache_bytes(by_rule: Sequence[Part], parts: Sequence[Part], settings: Settings, gpu_bytes: int) -> int:
    """Return the memory for the KV cache on a GPU of this size that is empty.

    SGLang decides by its own rule about each part, and not by the sizes that the parts turn out to have.
    """
    if settings.cache_bytes is not None:
        return settings.cache_bytes
    if settings.backend == "sglang":
        reserve = sum(part.bytes for part in by_rule[1:]) - CONTEXT_BYTES
        share = settings.share or round((gpu_bytes - reserve) / gpu_bytes, 3)
        return math.floor((gpu_bytes - CONTEXT_BYTES) * share) - parts[0].bytes
    return taken_bytes(settings.share, gpu_bytes) - sum(part.bytes for part in parts)


def taken_bytes(share: float | None, gpu_bytes: int) -> int:
    """Return the part of a GPU that vLLM divides between its KV cache and everything else; None: the usual share."""
    return math.ceil(gpu_bytes * (share or VLLM_SHARE))
