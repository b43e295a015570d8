"""vLLM's sleep of level 1: the weights go to the machine's memory, and the KV cache is dropped."""

# vLLM is not there where types are checked, so nothing about it is known to them.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false

import argparse
import os
from typing import Any

from ichat.errors import engine_busy

ON_THE_CPU = "ICHAT_SLEEP_ON_THE_CPU"
"""Set to 1 by tests: on the CPU, vLLM refuses its flag, but does all that belongs to a sleep except to free memory."""
LEVEL = 1
"""Level 2 drops the weights as well: the engine would load them again before the first request."""


def why_no_sleep(args: argparse.Namespace, *, is_alone: bool) -> str:
    """Return why vLLM cannot give its memory back, as a clause; empty if it can. `is_alone`: no group serves it."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and os.environ.get(ON_THE_CPU) != "1":
        return "vLLM gives no memory back on the CPU"
    if not is_alone:
        return "several machines serve the model"
    return "" if args.enable_sleep_mode or current_platform.is_cpu() else "vLLM was started without --enable-sleep-mode"


async def fall_asleep(client: Any) -> None:
    """Let vLLM's client give the memory back. Raises ApiError 409 while vLLM has requests, also without a client."""
    if count := client.output_processor.get_num_unfinished_requests():
        raise engine_busy("vLLM", count)
    await client.sleep(LEVEL)


async def wake_up(client: Any) -> None:
    """Let vLLM's client allocate the memory again. Raises RuntimeError if a part of it stays away."""
    if await client.wake_up() is False:  # older versions return None
        raise RuntimeError("a part of vLLM's memory did not come back")
