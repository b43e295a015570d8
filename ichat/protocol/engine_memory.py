"""The memory of an engine after its load, as its worker reports it in heartbeats."""

import attrs

from ichat.config.strict import Between, Schema, checked

_SIZE = Between(1, 2**63)
_FROM_1: Schema = {"minimum": 1}


@attrs.frozen
class EngineMemory:
    """The memory of an engine on each of its GPUs, by its own figures; a field that is None is not known."""

    tokens: int | None = checked(_SIZE, None, _FROM_1)
    """The tokens that its KV cache has room for."""
    blocks: int | None = checked(_SIZE, None, _FROM_1)
    """The blocks of the KV cache."""
    block_tokens: int | None = checked(_SIZE, None, _FROM_1)
    """The tokens of a block."""
    cache_bytes: int | None = checked(_SIZE, None, _FROM_1)
    """The size of the KV cache."""
    weights_bytes: int | None = checked(_SIZE, None, _FROM_1)
    graphs_bytes: int | None = checked(_SIZE, None, _FROM_1)
    """The memory of captured CUDA graphs."""
