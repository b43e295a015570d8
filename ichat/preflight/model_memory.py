"""The memory that a model needs, by its files here: its config.json and the headers of its weights are read."""

import os
from collections.abc import Mapping, Sequence

from attrs import frozen

from ichat.config.engine_args import Arguments
from ichat.config.schema import ManagedWorkerConfig
from ichat.engines.load_phases import hub_cache
from ichat.placement.estimate import estimate
from ichat.placement.learnt import LOADS_DIFFER
from ichat.placement.model_shape import ModelShape, UnknownShape, read_shape
from ichat.placement.settings import settings_of
from ichat.placement.weights import DamagedFile, Tensor, WeightSums, implied_tensors, sum_weights
from ichat.preflight.hub import snapshot_in
from ichat.preflight.model_files import read_config, read_tensors, read_tokenizer_length


@frozen
class ModelDescription:
    """The facts about a model that decide its memory."""

    shape: ModelShape
    tensors: Sequence[Tensor]
    is_implied: bool
    """Whether the weights are not here: config.json alone implies them."""

    def weights(self, element: float = 2.0) -> WeightSums:
        """Return the size of the weights; `element` is that of an element that is not quantized."""
        return sum_weights(self.shape, self.tensors, element)


@frozen
class MemoryNeed:
    """The memory without which a worker cannot start, on each of its GPUs: computed, or learnt from an earlier load."""

    weights_bytes: int
    sequence_bytes: int
    """The KV cache of the longest sequence; 0 if the engine lowers that length to what fits."""
    context: int
    """The tokens of that sequence."""
    learnt_bytes: int | None = None
    """Everything but the KV cache at an earlier load, which then counts in place of the weights; None: not known."""

    @property
    def bytes(self) -> int:
        """All of it together."""
        return self.sequence_bytes + (self.weights_bytes if self.learnt_bytes is None else self.learnt_bytes)

    @property
    def certain_bytes(self) -> int:
        """The least of it that a next load needs."""
        return self.bytes - int(LOADS_DIFFER * (self.learnt_bytes or 0))


def describe_model(path: str, arguments: Arguments, environment: Mapping[str, str]) -> ModelDescription:
    """Return the description of a model in a directory, or by its name in the hub's cache.

    Raises UnknownShape with the reason, DamagedFile, and OSError.
    """
    if os.path.isfile(path):
        raise UnknownShape("it is a single file, without config.json")
    if not os.path.isdir(path):
        path = _cached(path, arguments, environment)
    if str(arguments.get("load_format", "auto")) not in ("auto", "safetensors", "dummy"):
        raise UnknownShape(f"the effect of load_format {arguments['load_format']} is not computed")
    config = read_config(path)
    if config is None:
        raise UnknownShape("no config.json")
    shape = read_shape(config, read_tokenizer_length(path))
    if arguments.get("quantization") and not shape.quantization:
        raise UnknownShape("the effect of quantization is not computed for weights that are not quantized")
    tensors = read_tensors(path)
    return ModelDescription(shape, implied_tensors(shape) if tensors is None else tensors, tensors is None)


def _cached(name: str, arguments: Arguments, environment: Mapping[str, str]) -> str:
    """Return the directory of a model in the hub's cache. Raises UnknownShape."""
    cache = str(arguments.get("download_dir") or hub_cache(environment))
    directory = snapshot_in(cache, name.partition(":")[0], str(arguments.get("revision") or "main"))
    if directory is None:
        raise UnknownShape(f"it is neither a directory here nor in {cache}: download it, or name a directory")
    return directory


def read_need(worker: ManagedWorkerConfig, arguments: Arguments, environment: Mapping[str, str]) -> MemoryNeed | None:
    """Return the memory that a worker needs, by its engine's arguments; None: it is not known."""
    try:
        settings = settings_of(worker.backend, arguments)
        model = describe_model(worker.model_path, arguments, environment)
        found = estimate(model.shape, model.weights(settings.element), settings)
    except (UnknownShape, DamagedFile, OSError):
        return None
    sequence = 0 if settings.fits_context else found.sequence_bytes
    return MemoryNeed(found.parts[0].bytes, sequence, found.context)
