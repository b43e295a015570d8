"""The one kernel that SGLang, run with `--device cpu` and CUDA's torch, takes from vLLM: here in plain torch."""

import torch


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,  # noqa: FBT001 - the signature is vLLM's
) -> None:
    """Turn the queries and the keys, in place, by the angles of their positions.

    A row of the cache holds the cosines of one position and then its sines. Where they are fewer than half a head,
    the rest of the head is left as it is.
    """
    cos, sin = cos_sin_cache[positions.flatten()].unsqueeze(1).chunk(2, dim=-1)
    for states in (query, key):
        if states is None:
            continue
        heads = states.view(cos.shape[0], -1, head_size)[..., : cos_sin_cache.shape[-1]]
        halves = heads.chunk(2, dim=-1) if is_neox else (heads[..., ::2], heads[..., 1::2])
        first, second = (half.to(cos.dtype) for half in halves)
        turned = first * cos - second * sin, second * cos + first * sin
        for half, values in zip(halves, turned, strict=True):
            half.copy_(values)
