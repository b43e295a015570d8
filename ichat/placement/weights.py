"""The weights of a model: the tensors in its files, or as its config.json implies them, and their size on a GPU."""

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

from attrs import frozen

from ichat.placement.model_shape import Latent, Mixture, ModelShape, UnknownShape

HEADER_BYTES_MAX = 100_000_000
"""The format's own limit."""
LENGTH_BYTES = 8

Place = Literal["layers", "first", "last", "both"]
"""In the layers; in the first stage, the last, or both of these."""
Split = Literal["whole", "shared", "heads"]
"""On each GPU as a whole; shared by all; shared by as many as there are heads of keys and values."""

_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I8": 8, "U8": 8, "BOOL": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
_FLOATS = ("F64", "F32", "F16", "BF16")
_ROWS = 64
"""Both engines round the rows of the vocabulary up to a multiple."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_NUMBER = re.compile(r"\d+")
_OTHER_PART = re.compile(r"vision|visual|audio|image|multi_modal|mm_projector|patch")
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight", "word_embeddings.weight", "wte.weight")
_WHOLE = re.compile(
    r"norm|\.bias$|(?:mlp|block_sparse_moe|feed_forward)\.(?:gate|router)\.|q_a_proj|kv_a_proj|rotary|e_score"
)
"""Tensors that each GPU has as a whole: norms, biases, routers, and the narrow side of MLA."""
_KEY_OR_VALUE = re.compile(r"\.(?:k|v|key|value)_proj\.")
_UNFOLDED = "kv_b_proj.weight"
_NO_MEMORY = re.compile(r"inv_freq$|^mtp\.|\.mtp\.")


class DamagedFile(ValueError):
    """A file of a model is damaged; the text is the damage, in a clause."""


class Tensor(NamedTuple):
    """A tensor in a file; a large model has 100 000."""

    name: str
    dtype: str
    elements: int
    rows: int = 1
    """The first dimension."""


def length_of_header(start: bytes) -> int:
    """Return the length of the header that a safetensors file begins with. Raises DamagedFile."""
    if len(start) < LENGTH_BYTES:
        raise DamagedFile("is cut off")
    (length,) = struct.unpack("<Q", start[:LENGTH_BYTES])
    if not 2 <= length <= HEADER_BYTES_MAX:
        raise DamagedFile("is no safetensors file")
    return length


def tensors_of_header(header: bytes, data_bytes: int) -> list[Tensor]:
    """Return the tensors of a safetensors file by its header and the size of the data after it.

    Raises DamagedFile.
    """
    try:
        table = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise DamagedFile("has a damaged header") from error
    if not isinstance(table, dict):
        raise DamagedFile("has a damaged header")
    found = [_tensor(name, entry) for name, entry in cast("dict[str, Any]", table).items() if name != "__metadata__"]
    if sum(math.ceil(tensor.elements * _bits_of(tensor.dtype) / 8) for tensor in found) > data_bytes:
        raise DamagedFile("is cut off")
    return found


def _tensor(name: str, entry: Any) -> Tensor:
    table = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
    dtype, dimensions = table.get("dtype"), table.get("shape")
    counts = cast("list[object]", dimensions) if isinstance(dimensions, list) else [None]
    numbers = [one for one in counts if isinstance(one, int) and 0 <= one < 1 << 48]
    if not isinstance(dtype, str) or len(numbers) < len(counts):
        raise DamagedFile("has a damaged header")
    return Tensor(name, dtype, math.prod(numbers), numbers[0] if numbers else 1)


def _bits_of(dtype: str) -> int:
    if dtype not in _BITS:
        raise DamagedFile(f"has tensors of the unknown dtype {dtype[:20]}")
    return _BITS[dtype]


@frozen
class WeightSums:
    """The size of a model's weights by where they are and how GPUs share them."""

    layers: int
    kv_heads: int
    sizes: Mapping[tuple[Place, Split], float]

    def on_gpu(self, tensor: int = 1, pipeline: int = 1) -> int:
        """Return the bytes on the GPU that holds most.

        `tensor` GPUs share each layer, `pipeline` stages share the layers.
        """
        first, last = self._on_gpu("first", tensor), self._on_gpu("last", tensor)
        ends = first + last if pipeline == 1 else max(first, last)
        layered = self._on_gpu("layers", tensor) * math.ceil(self.layers / pipeline) / self.layers
        return math.ceil(layered + ends + self._on_gpu("both", tensor))

    def _on_gpu(self, place: Place, tensor: int) -> float:
        divisors: dict[Split, int] = {"whole": 1, "shared": tensor, "heads": min(tensor, self.kv_heads)}
        return sum(self.sizes.get((place, split), 0.0) / divisor for split, divisor in divisors.items())


def sum_weights(shape: ModelShape, tensors: Sequence[Tensor], element: float = 2.0) -> WeightSums:
    """Return the size of a model with these tensors; `element` is that of an element that is not quantized."""
    sizes = Counter[tuple[Place, Split]]()
    kinds = dict[str, tuple[Place, Split] | None]()  # by the names with 0 for each number: layers are alike
    for one in tensors:
        pattern = _NUMBER.sub("0", one.name)
        if pattern not in kinds:
            kinds[pattern] = _kind_of(shape, one.name)
        kind = kinds[pattern]
        if kind is not None and (kind[0] != "layers" or _layer_of(one.name) < shape.layers):
            sizes[kind] += _size(shape, one, element)  # pyright: ignore[reportArgumentType]
    return WeightSums(shape.layers, shape.kv_heads, dict(sizes))


def _layer_of(name: str) -> int:
    """Return the number of a tensor's layer; layers beyond the last are for speculation."""
    found = _LAYER.search(name)
    return int(found[1]) if found is not None else 0


def _kind_of(shape: ModelShape, name: str) -> tuple[Place, Split] | None:
    """Return where a tensor is, and how GPUs share it; None: no GPU has it."""
    if _NO_MEMORY.search(name) or ("lm_head" in name and shape.is_tied):
        return None
    if _LAYER.search(name) and not _OTHER_PART.search(name):
        return "layers", _split_of(name)
    if "lm_head" in name:
        return "last", _split_of(name)
    return "both" if shape.is_tied and name.endswith(_VOCABULARY) else "first", _split_of(name)


def _split_of(name: str) -> Split:
    """Return how the GPUs that share a layer share a tensor."""
    if _WHOLE.search(name):
        return "whole"
    return "heads" if _KEY_OR_VALUE.search(name) and not _OTHER_PART.search(name) else "shared"


def _size(shape: ModelShape, one: Tensor, element: float) -> float:
    is_converted = one.dtype in _FLOATS and not (shape.quantization and one.dtype == "F32")
    size = one.elements * (element if is_converted else _bits_of(one.dtype) / 8)
    if one.name.endswith(_VOCABULARY):
        size *= math.ceil(one.rows / _ROWS) * _ROWS / max(one.rows, 1)
    if one.name.endswith(_UNFOLDED) and _bits_of(one.dtype) <= 8:
        size += one.elements * element  # both engines keep it a second time, not quantized
    return size


def implied_tensors(shape: ModelShape) -> list[Tensor]:
    """Return the large tensors that a model should have by its config.json.

    Raises UnknownShape if config.json does not say enough.
    """
    if shape.has_other_part:
        raise UnknownShape("its files are not here, and config.json does not say how large its part for pictures is")
    if shape.attention == "none" or shape.quantization not in ("", "fp8"):
        raise UnknownShape("its files are not here, and config.json does not say how large its weights are")
    dtype = "F8_E4M3" if shape.quantization else "BF16"
    found = [_matrix("model.embed_tokens.weight", "BF16", shape.vocabulary, shape.hidden)]
    if not shape.is_tied:
        found.append(_matrix("lm_head.weight", "BF16", shape.vocabulary, shape.hidden))
    dense = shape.mixture.dense_layers if shape.mixture is not None else shape.layers
    for number in range(shape.layers):
        prefix = f"model.layers.{number}"
        found += _attention(shape, f"{prefix}.self_attn", dtype)
        if shape.mixture is None or number < dense:  # which of them are dense does not matter for the sum
            matrices = 2 if shape.has_plain_mlp else 3
            found.append(_matrix(f"{prefix}.mlp.all.weight", dtype, matrices * shape.width, shape.hidden))
        else:
            found += _experts(shape, shape.mixture, f"{prefix}.mlp", dtype)
    return found


def _attention(shape: ModelShape, prefix: str, dtype: str) -> Iterator[Tensor]:
    yield _matrix(f"{prefix}.o_proj.weight", dtype, shape.hidden, shape.heads * shape.value_dim)
    if shape.latent is not None:
        yield from _latent_attention(shape, shape.latent, prefix, dtype)
        return
    yield _matrix(f"{prefix}.q_proj.weight", dtype, shape.heads * shape.head_dim, shape.hidden)
    for name in ("k_proj", "v_proj"):
        yield _matrix(f"{prefix}.{name}.weight", dtype, shape.kv_heads * shape.head_dim, shape.hidden)


def _latent_attention(shape: ModelShape, latent: Latent, prefix: str, dtype: str) -> Iterator[Tensor]:
    queries = shape.heads * (latent.plain_dim + latent.rope_dim)
    if latent.query_rank:
        yield _matrix(f"{prefix}.q_a_proj.weight", dtype, latent.query_rank, shape.hidden)
    yield _matrix(f"{prefix}.q_b_proj.weight", dtype, queries, latent.query_rank or shape.hidden)
    yield _matrix(f"{prefix}.kv_a_proj_with_mqa.weight", dtype, latent.kv_rank + latent.rope_dim, shape.hidden)
    both = shape.heads * (latent.plain_dim + shape.value_dim)
    yield _matrix(f"{prefix}.kv_b_proj.weight", dtype, both, latent.kv_rank)


def _experts(shape: ModelShape, mixture: Mixture, prefix: str, dtype: str) -> Iterator[Tensor]:
    yield _matrix(f"{prefix}.gate.weight", "BF16", mixture.experts, shape.hidden)
    width = mixture.experts * mixture.width + mixture.shared_width
    yield _matrix(f"{prefix}.experts.all.weight", dtype, 3 * width, shape.hidden)


def _matrix(name: str, dtype: str, rows: int, columns: int) -> Tensor:
    return Tensor(name, dtype, rows * columns, rows)
