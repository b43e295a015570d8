"""How many tokens vLLM used for a call: its output processor's figures for each request, read when the call ends."""

# vLLM is not there where types are checked, so nothing about it is known to them.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

import functools
from typing import Any

from ichat.engines.asgi import call_under_way
from ichat.protocol.usage import Usage


def note_usage(client: Any) -> bool:
    """Note at each call the requests that vLLM's client makes for it; return whether this version lets us."""
    processor = getattr(client, "output_processor", None)
    states = getattr(processor, "request_states", None)
    if processor is None or states is None or not _can_count():
        return False
    add = processor.add_request

    def add_noted(request: Any, *more: Any, **named: Any) -> None:
        add(request, *more, **named)
        call = call_under_way()
        if call is not None and call.usage is not None and (state := states.get(request.request_id)) is not None:
            call.usage.append(functools.partial(_usage_of, state))

    processor.add_request = add_noted
    return True


def _can_count() -> bool:
    try:
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer
    except ImportError:
        return False
    return hasattr(IncrementalDetokenizer, "num_output_tokens")


def _usage_of(state: Any) -> Usage:
    """Return the tokens of a request of the engine; the prompt of several answers counts with the first."""
    made = state.detokenizer.num_output_tokens() if state.detokenizer is not None else 0
    if state.parent_req is not None and state.request_index:
        return 0, made, 0
    return state.prompt_len, made, min(state.num_cached_tokens or 0, state.prompt_len)
