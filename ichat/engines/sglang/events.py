"""SGLang's events about its cache: whether they can be had, and which requests they are about."""

# SGLang is not there where types are checked, so nothing about it is known to them.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from collections.abc import Awaitable, Mapping
from typing import Any

from ichat.engines.kv_events import KvEvents

PAGE_TOKENS_MIN = 16
"""SGLang makes an event for each page of its cache, on its scheduler: smaller pages cost too much."""


def obstacle_to_events(args: Mapping[str, Any]) -> str | None:
    """Return why the worker cannot listen to SGLang's events, or None."""
    try:
        from sglang.srt.disaggregation.kv_events import BlockStored
    except ImportError:
        return "this version of SGLang has no events about its cache"
    if "session_id" not in BlockStored.__struct_fields__:
        return "the events of this version of SGLang do not say which request they are about"
    if args.get("kv_events_config"):
        return "--kv-events-config is given"
    if args.get("disable_radix_cache") or args.get("is_embedding"):
        return "SGLang caches no prefixes"
    if args.get("enable_session_radix_cache"):
        return "with --enable-session-radix-cache SGLang uses the mark of the events for something else"
    if args.get("dp_size", 1) > 1 or args.get("attn_dp_size", 1) not in (None, 1) or args.get("nnodes", 1) > 1:
        return "several caches serve the model"
    if args.get("enable_hierarchical_cache") or args.get("disaggregation_mode", "null") != "null":
        return "SGLang keeps a part of its cache elsewhere"
    return None


def why_too_dear(args: Mapping[str, Any]) -> str | None:
    """Return why events would cost SGLang too much, or None."""
    page = args.get("page_size") or 1
    if page >= PAGE_TOKENS_MIN:
        return None
    return f"an event for every {page} tokens would cost too much (--page-size {PAGE_TOKENS_MIN} would do)"


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
