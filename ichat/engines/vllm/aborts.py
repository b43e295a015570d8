"""Requests that vLLM's engine core aborts by itself, as it does when its process gets SIGTERM.

vLLM ends their responses as if they were whole: with the finish reason `abort`, and streams with `[DONE]`. Here their
calls fail, so that no client mistakes such a response for a whole response. Aborts by a disconnect never arrive here.
"""

# vLLM is not there where types are checked, so nothing about it is known to them.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

import logging
import weakref
from collections.abc import MutableMapping
from typing import Any

from ichat import errors
from ichat.engines.asgi import Call, call_under_way

log = logging.getLogger(__name__)

RETRY_AFTER_S = 5
"""When it is worth asking this worker again: its engine is ending."""
_FINISHED = "_update_stats_from_finished"
"""vLLM's output processor calls it once for each request that its engine core has ended, before the end is read."""


def fail_aborted(client: Any, model: str) -> None:
    """Let each call fail if the engine core aborts a request of the call; costs nothing for a token.

    The engine core refuses each request that arrives after the first abort, without working on it: it may be sent
    elsewhere. The refusal names `model`. Logs it where this version of vLLM does not let us.
    """
    processor = getattr(client, "output_processor", None)
    states, finished = getattr(processor, "request_states", None), getattr(processor, _FINISHED, None)
    if processor is None or states is None or finished is None:
        log.warning("this version of vLLM does not tell which requests its engine core aborts by itself")
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
