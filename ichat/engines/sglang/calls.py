"""What happens to SGLang's own requests, noted at the calls that they are for: tokens, prefixes, and aborts."""

# SGLang is not there where types are checked, so nothing about it is known to them.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

import functools
from collections.abc import Awaitable, Collection
from typing import Any

from ichat.engines.asgi import call_under_way
from ichat.engines.kv_events import KvEvents
from ichat.protocol.usage import Usage

ABORT_POLL_S = "1"
"""How often SGLang itself checks that the client of a request is still connected, by default every 4 s."""


def tag_requests(manager: Any, events: KvEvents) -> None:
    """Tag the requests of SGLang's tokenizer manager to the scheduler: a single call each, which knows the tokens."""
    send = manager._send_one_request

    def send_tagged(*given: Any) -> Awaitable[None]:
        for request in given:
            if not type(request).__name__.startswith("TokenizedGenerate"):
                continue
            if request.mm_inputs is None and request.session_params is None and request.input_ids is not None:
                events.tag(request, len(request.input_ids))
        return send(*given)

    manager._send_one_request = send_tagged


def note_usage(manager: Any) -> bool:
    """Note at each call the tokens of the requests that SGLang made for it; return whether this version lets us."""
    logger = getattr(manager, "request_logger", None)
    log_finished = getattr(logger, "log_finished_request", None)
    if logger is None or log_finished is None:
        return False

    def log_noted(asked: Any, out: Any, *more: Any, **named: Any) -> None:
        call = call_under_way()
        if call is not None and call.usage is not None:
            usage = _usage_of(asked, out["meta_info"])
            call.usage.append(lambda: usage)
        log_finished(asked, out, *more, **named)

    logger.log_finished_request = log_noted
    return True


def _usage_of(asked: Any, told: dict[str, Any]) -> Usage:
    """Return the tokens of a request of the engine.

    Where several answers are wanted, SGLang sends the prompt ahead in a request without an answer: it counts there.
    """
    given, made, cached = (told.get(f"{name}_tokens") or 0 for name in ("prompt", "completion", "cached"))
    options = getattr(asked, "sampling_params", None)
    if made and isinstance(options, dict) and (options.get("n") or 1) > 1:
        return 0, made, 0
    return given, made, min(cached, given)


def abort_at_once(manager: Any) -> None:
    """Let SGLang abort the requests of a disconnected client at once, all of them and no others.

    SGLang itself checks plain requests every `ABORT_POLL_S`, forgets streams (0.5.15 to 0.5.19), and aborts each
    request with an id that begins with the aborted id. So everything that it waits for is noted at its call. An id is
    not aborted if the id of another call's request begins with it.
    """
    wait, abort = manager._wait_one_response, manager.abort_request

    def wait_noted(asked: Any, *more: Any, **named: Any) -> Any:
        call = call_under_way()
        if call is not None:
            call.add_part(asked.rid, functools.partial(abort_alone, asked.rid, call.parts))
        return wait(asked, *more, **named)

    def abort_alone(rid: str, mine: Collection[str]) -> None:
        if not any(other.startswith(rid) and other != rid and other not in mine for other in manager.rid_to_state):
            abort(rid)

    def abort_request(rid: str = "", abort_all: bool = False) -> None:  # noqa: FBT001, FBT002
        call = call_under_way()
        if abort_all:
            abort(abort_all=True)
        else:
            abort_alone(rid, () if call is None else call.parts)

    manager._wait_one_response = wait_noted
    manager.abort_request = abort_request
