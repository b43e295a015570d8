"""Stand in for vLLM where SGLang runs without a GPU: it asks vLLM for one function that is in no package of its own.

Every process of SGLang that holds a model imports this early, so it is also the place for two things that it does
whatever the device and that torch refuses without CUDA: its LoRA layers pin memory, and it waits for the GPU when it is
asked to release its memory.
"""

import functools
from collections.abc import Callable

import torch


def without_pins(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a maker of tensors that leaves them in memory like any other."""

    @functools.wraps(make)
    def make_unpinned(*args, pin_memory: bool = False, **settings) -> torch.Tensor:
        return make(*args, **settings)

    return make_unpinned


for name in ("tensor", "zeros"):
    setattr(torch, name, without_pins(getattr(torch, name)))
torch.Tensor.pin_memory = lambda self, device=None: self
torch.cuda.synchronize = lambda device=None: None
