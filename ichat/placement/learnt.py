"""The memory of models in earlier loads: such figures replace computed and assumed figures. Pure."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
from attrs import frozen

from ichat.listeners import Listeners
from ichat.placement.settings import PIPELINE, SHARE, TENSOR, Arguments, number_of
from ichat.protocol.engine_memory import EngineMemory

KNOWN_MAX = 200
"""The most figures that are kept; the oldest are dropped first."""
LOADS_DIFFER = 0.03
"""The share of the memory beside the KV cache by which two equal loads may differ."""
RAISE = 1.1
"""The factor by which a launch without enough memory raises the figure."""
_OF_CACHE = frozenset((
    "max_model_len", "context_length", *SHARE, "kv_cache_memory_bytes", "max_total_tokens", "num_gpu_blocks_override",
    "swa_full_tokens_ratio",
))  # fmt: skip
"""Arguments that decide the size of the KV cache, and not the memory beside it."""
_OF_NEITHER = frozenset((
    *TENSOR, *PIPELINE, "served_model_name", "host", "port", "api_key", "admin_api_key", "seed", "random_seed",
    "chat_template", "chat_template_content_format", "tool_call_parser", "reasoning_parser", "enable_auto_tool_choice",
    "trust_remote_code", "disable_log_stats", "disable_log_requests", "enable_log_requests", "log_level",
    "uvicorn_log_level", "generation_config", "override_generation_config", "enable_metrics", "sampling_defaults",
))  # fmt: skip
"""Arguments without an effect on memory; the first of them are in the key themselves."""


@frozen
class LearntKey:
    """The circumstances in which a model's memory is the same at each load."""

    model: str
    backend: str
    gpu: str
    """The kind of GPU by the driver's name; "" if there is none, or it is not known."""
    gpu_bytes: int
    """All of its memory; 0 if it is not known."""
    tensor: int
    pipeline: int
    flags: str
    """A digest of the arguments that count, and of the size of the weights: at the same path may be another model."""


@frozen
class LearntMemory:
    """The memory of a model on each of its GPUs, from its last load; a figure that is None is not known."""

    key: LearntKey
    version: str
    """Of the engine."""
    name: str
    """The model's name in requests."""
    at: float
    """When it was learnt, in seconds since 1970."""
    cache_flags: str = ""
    """A digest of the arguments that decide the size of the KV cache."""
    tokens: int | None = None
    """The tokens that the KV cache had room for."""
    cache_bytes: int | None = None
    weights_bytes: int | None = None
    graphs_bytes: int | None = None
    held_bytes: int | None = None
    """The most memory of a GPU that the worker held, by the driver."""
    beside_bytes: int | None = None
    """Everything but the KV cache."""
    estimated_bytes: int | None = None
    """Everything but the KV cache, as it was estimated for this load."""
    raised_bytes: int | None = None
    """More than `beside_bytes`, since a later launch ended for lack of memory: an assumption."""

    @property
    def need_bytes(self) -> int | None:
        """The memory that the engine needs beside the KV cache, as far as it was measured."""
        if self.beside_bytes is not None or self.weights_bytes is None:
            return self.beside_bytes
        return self.weights_bytes + (self.graphs_bytes or 0)

    @property
    def certain_bytes(self) -> int | None:
        """The least of it that a next load needs."""
        need = self.need_bytes
        return None if need is None else need - int(LOADS_DIFFER * need)

    @property
    def error_ratio(self) -> float | None:
        """The estimate's error as a part of the measured memory beside the KV cache; None: not known."""
        if not self.beside_bytes or self.estimated_bytes is None:
            return None
        return self.estimated_bytes / self.beside_bytes - 1


@frozen
class MemoryLack:
    """A lack of GPU memory by which a launch ended."""

    cache_bytes: int | None = None
    """The memory that the engine found for its KV cache, if it said so; 0: none."""


class LearntMemories:
    """The newest figures of each model in each of its circumstances, at most `KNOWN_MAX`."""

    def __init__(self) -> None:
        self._known: dict[tuple[LearntKey, str], LearntMemory] = {}
        self.number = 0
        """How often a figure was added or replaced."""
        self.changed: Listeners[[]] = Listeners()
        """Called when a figure was added or replaced."""

    def __repr__(self) -> str:
        return f"<LearntMemories of {len(self._known)} loads>"

    def __iter__(self) -> Iterator[LearntMemory]:
        """Return the figures, the newest last."""
        return iter(self._known.values())

    def add(self, found: LearntMemory) -> None:
        """Replace the figures of these circumstances."""
        self._known.pop((found.key, found.version), None)
        self._known[found.key, found.version] = found
        while len(self._known) > KNOWN_MAX:
            del self._known[next(iter(self._known))]
        self.number += 1
        self.changed()

    def find(self, key: LearntKey, version: str | None = None, cache_flags: str | None = None) -> LearntMemory | None:
        """Return the figures of these circumstances; None: there are none.

        Without a version, those of the newest load with any version. With a digest of the arguments that decide the
        size of the KV cache, that size is unknown if it was decided by others.
        """
        if version is None:
            found = next((one for one in reversed(self._known.values()) if one.key == key), None)
        else:
            found = self._known.get((key, version))
        if found is None or cache_flags in (None, found.cache_flags):
            return found
        return attrs.evolve(found, tokens=None, cache_bytes=None)

    def restore(self, saved: Sequence[LearntMemory]) -> None:
        """Go on with the figures that an earlier gateway has learnt, in their order."""
        for one in saved:
            self.add(one)


@frozen
class LoadCircumstances:
    """The circumstances of a worker's load, apart from its GPUs."""

    path: str
    """The real path of its model."""
    backend: str
    arguments: Arguments
    version: str
    """Of the engine."""

    def find(
        self, memories: LearntMemories, tensor: int, weights_bytes: int | None, gpu: tuple[str, int]
    ) -> LearntMemory | None:
        """Return the figures of the last load on GPUs of a kind, this number of which shared each layer."""
        arguments = {**self.arguments, TENSOR[0]: tensor}
        key = key_of(self.path, self.backend, arguments, weights_bytes, gpu)
        return memories.find(key, version_in(self.version), cache_flags_of(self.arguments))


def key_of(
    model: str, backend: str, arguments: Arguments, weights_bytes: int | None, gpu: tuple[str, int] = ("", 0)
) -> LearntKey:
    """Return the circumstances of a load.

    `weights_bytes` is the computed size of its weights, if known. `gpu` is the kind of its GPUs, and their memory.
    """
    counted = {name: value for name, value in arguments.items() if name not in _OF_CACHE | _OF_NEITHER}
    return LearntKey(
        model,
        backend,
        *gpu,
        max(1, int(number_of(arguments, *TENSOR, default=1))),
        max(1, int(number_of(arguments, *PIPELINE, default=1))),
        _digest_of({**counted, "": weights_bytes}),
    )


def cache_flags_of(arguments: Arguments) -> str:
    """Return the digest of the arguments that decide the size of the KV cache."""
    return _digest_of({name: value for name, value in arguments.items() if name in _OF_CACHE})


def version_in(text: str) -> str:
    """Return the version of an engine without the name of its build: `0.32.0` for `0.32.0+cpu`."""
    return text.partition("+")[0]


def _digest_of(values: Mapping[str, Any]) -> str:
    """Return a digest that reveals no value: arguments may hold secrets."""
    return hashlib.blake2b(json.dumps(sorted(values.items()), default=str).encode(), digest_size=12).hexdigest()


def learnt_from(
    told: EngineMemory, known: LearntMemory, *, taken_bytes: int | None, cache_bytes: int | None
) -> LearntMemory:
    """Return the figures after a load; `known` has the facts about the load, and the memory that the worker holds.

    `taken_bytes` is the part of the GPU that the engine shared between KV cache and everything else, by its own rule.
    `cache_bytes` is the size of the KV cache, if that follows from the number of its blocks.
    """
    cache = told.cache_bytes if told.cache_bytes is not None else cache_bytes
    whole = taken_bytes if taken_bytes is not None else known.held_bytes
    beside = None if whole is None or cache is None or cache >= whole else whole - cache
    return attrs.evolve(
        known,
        tokens=told.tokens,
        cache_bytes=cache,
        weights_bytes=told.weights_bytes,
        graphs_bytes=told.graphs_bytes,
        beside_bytes=beside,
        raised_bytes=None,
    )


def raised_by(lack: MemoryLack, known: LearntMemory, *, taken_bytes: int | None) -> LearntMemory | None:
    """Return the figures after a launch that ended for lack of memory; None: nothing follows.

    An engine that names the rest for its KV cache has measured everything else. Otherwise the figure rises by a tenth.
    """
    if lack.cache_bytes and taken_bytes is not None and lack.cache_bytes < taken_bytes:
        return attrs.evolve(known, beside_bytes=taken_bytes - lack.cache_bytes, raised_bytes=None)
    before = known.raised_bytes or known.beside_bytes or known.estimated_bytes
    if before is None:
        return None
    raised = math.ceil(RAISE * before)
    if lack.cache_bytes == 0 and taken_bytes is not None:
        raised = max(raised, taken_bytes)
    if known.key.gpu_bytes:
        raised = min(raised, math.ceil(RAISE * known.key.gpu_bytes))
    return attrs.evolve(known, raised_bytes=max(raised, before))
