"""The KV cache of a model on a GPU: the bytes of a token, and the tokens that fit, as each engine divides it."""

import math
from collections import Counter
from collections.abc import Sequence

from attrs import frozen

from ichat.placement.model_shape import ModelShape
from ichat.placement.settings import Settings


@frozen
class BlockGroup:
    """Layers of vLLM that share blocks."""

    window: int | None
    """None: they keep every token."""
    layers: int


def bytes_per_token(shape: ModelShape, settings: Settings) -> int:
    """Return the bytes of a token in the KV cache of a layer, on a GPU."""
    if shape.attention == "none":
        return 0
    if settings.cache_element is not None:
        size = settings.cache_element
    else:
        size = 1.0 if shape.has_small_cache and settings.backend == "vllm" else settings.element
    if shape.latent is not None:  # it is not divided: each GPU has it whole
        return math.ceil((shape.latent.kv_rank + shape.latent.rope_dim) * size)
    heads = max(1, shape.kv_heads // settings.tensor)
    return math.ceil(heads * (shape.head_dim + shape.value_dim) * size)


def windows_of(shape: ModelShape, settings: Settings) -> Sequence[int | None]:
    """Return the window of each layer of the longest stage; None: the layer keeps every token."""
    windows = shape.windows[: math.ceil(shape.layers / settings.pipeline)]
    keeps = shape.has_sglang_windows if settings.backend == "sglang" else None in shape.windows
    is_uniform = settings.backend == "vllm" and None not in shape.windows
    return windows if is_uniform or (keeps and settings.keeps_windows) else (None,) * len(windows)


def cache_bytes_of_sequence(shape: ModelShape, settings: Settings, length: int, batch_tokens: int) -> int:
    """Return the bytes that a sequence of this length needs in the KV cache of a GPU."""
    size, windows = bytes_per_token(shape, settings), windows_of(shape, settings)
    if settings.backend == "sglang":
        return math.ceil(_sglang_token(size, windows, settings) * length)
    groups = _groups_of(windows)
    return _blocks_of_sequence(groups, settings, length, batch_tokens) * _block_bytes(groups, size, settings)


def tokens_in_cache(shape: ModelShape, settings: Settings, cache_bytes: int, length: int, batch_tokens: int) -> int:
    """Return the number of tokens that an engine names as the size of a KV cache with these bytes on each GPU.

    `length` is the most tokens of a sequence: with windows, vLLM counts by sequences of that length.
    """
    size, windows = bytes_per_token(shape, settings), windows_of(shape, settings)
    if size == 0 or cache_bytes <= 0:
        return 0
    if settings.backend == "sglang":
        tokens = int(cache_bytes // _sglang_token(size, windows, settings))
        tokens = min(tokens, settings.tokens_max or tokens)
        return tokens // settings.block * settings.block
    groups = _groups_of(windows)
    blocks = cache_bytes // _block_bytes(groups, size, settings)
    return int(blocks / _blocks_of_sequence(groups, settings, length, batch_tokens) * length)


def bytes_of_blocks(shape: ModelShape, settings: Settings, blocks: int) -> int | None:
    """Return the size of a KV cache of vLLM with these blocks; None for a model that has none."""
    size = bytes_per_token(shape, settings)
    return math.ceil(blocks * _block_bytes(_groups_of(windows_of(shape, settings)), size, settings)) if size else None


def _sglang_token(size: int, windows: Sequence[int | None], settings: Settings) -> float:
    """Return the bytes of a token in all layers."""
    whole = sum(window is None for window in windows)
    return size * (whole + (settings.window_share if whole else 1.0) * (len(windows) - whole))


def _groups_of(windows: Sequence[int | None]) -> list[BlockGroup]:
    """Return vLLM's groups of layers: all of a group are alike, and all groups have the same number."""
    counts = Counter(windows)
    least, most = min(counts.values()), max(counts.values())
    layers = most if most < 1.5 * least else least
    return [BlockGroup(window, layers) for window, count in counts.items() for _ in range(math.ceil(count / layers))]


def _block_bytes(groups: Sequence[BlockGroup], size: int, settings: Settings) -> int:
    return groups[0].layers * size * settings.block


def _blocks_of_sequence(groups: Sequence[BlockGroup], settings: Settings, length: int, batch_tokens: int) -> int:
    blocks = 0
    for group in groups:
        if group.window is None:
            blocks += math.ceil(length / settings.block)
        else:  # a window need not begin where a block does
            kept = min(group.window - 1 + settings.batches * batch_tokens, length)
            blocks += math.ceil(kept / settings.block) + 1
    return blocks
