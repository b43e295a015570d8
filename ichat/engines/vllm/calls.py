"""What happens to vLLM's own requests, noted at the calls that they are for: tokens, prefixes, and aborts."""

# vLLM is not there where types are checked, so nothing about it is known to them.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

import functools
import logging
import weakref
from collections.abc import Awaitable, MutableMapping
from typing import Any

from ichat import errors
from ichat.engines.asgi import Call, call_under_way
from ichat.engines.kv_events import KvEvents
from ichat.protocol.usage import Usage

log = logging.getLogger(__name__)

RETRY_AFTER_S = 5
"""When it is worth asking this worker again: its engine is ending."""
_FINISHED = "_update_stats_from_finished"
"""vLLM's output processor calls it once for each request that its engine core has ended, before the end is read."""


def tag_requests(client: Any, events: KvEvents) -> None:
    """Tag the requests of vLLM's client to the engine core: a single call each, which knows the prompt's tokens."""
    add = client.engine_core.add_request_async

    def add_tagged(request: Any) -> Awaitable[None]:
        if request.prompt_token_ids is not None and not request.mm_features:
            events.tag(request, len(request.prompt_token_ids))
        return add(request)

    client.engine_core.add_request_async = add_tagged


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


def fail_aborted(client: Any, model: str) -> None:
    """Let each call fail if the engine core aborts a request of the call; costs nothing for a token.

    The engine core refuses each request that arrives after the first abort, without working on it: it may be sent
    elsewhere. The refusal names `model`. Logs it where this version of vLLM does not let us.
    """
    processor = getattr(client, "output_processor", None)
    states, finished = getattr(processor, "request_states", None), getattr(processor, _FINISHED, None)
    if processor is None or states is None or finished is None:
        log.warning("this version of vLLM does not report which requests its engine core aborts by itself")
        return
    from vllm.v1.engine import FinishReason

    abort, add = FinishReason.ABORT, processor.add_request
    calls: MutableMapping[Any, tuple[Call, bool]] = weakref.WeakKeyDictionary()
    is_ending = False

    def add_noted(request: Any, *more: Any, **named: Any) -> None:
        add(request, *more, **named)
        call, state = call_under_way(), states.get(request.request_id)
        if call is not None and state is not None:
            calls[state] = call, is_ending

    def finish_noted(state: Any, reason: Any, *more: Any, **named: Any) -> None:
        nonlocal is_ending
        is_ending = reason == abort
        call, is_refused = calls.get(state, (None, False)) if is_ending else (None, False)
        if call is not None and call.failure is None:
            dead = errors.engine_dead(model, "its engine core is ending", RETRY_AFTER_S)
            call.abandon(dead if is_refused else errors.engine_aborted())
        finished(state, reason, *more, **named)

    processor.add_request = add_noted
    setattr(processor, _FINISHED, finish_noted)
