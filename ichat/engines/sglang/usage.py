"""How many tokens SGLang used for a call: the figures that it would log of each ended request."""

from typing import Any

from ichat.engines.asgi import call_under_way
from ichat.protocol.usage import Usage


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
