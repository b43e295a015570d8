"""vLLM's events about its cache: whether they can be had, and which requests they are about."""

# vLLM is not there where types are checked, so nothing about it is known to them.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false

import argparse
from collections.abc import Awaitable
from typing import Any

from ichat.engines.kv_events import KvEvents


def obstacle_to_events(args: argparse.Namespace, *, is_alone: bool) -> str | None:
    """Return why the worker cannot listen to vLLM's events, or None. `is_alone`: no group serves the model."""
    try:
        from vllm.distributed.kv_events import BlockStored
    except ImportError:
        return "this version of vLLM has no events about its cache"
    if "session_id" not in BlockStored.__struct_fields__:
        return "the events of this version of vLLM do not say which request they are about"
    if args.kv_events_config is not None:
        return "--kv-events-config is given"
    if args.enable_prefix_caching is False or args.runner == "pooling":
        return "vLLM caches no prefixes"
    if args.data_parallel_size > 1 or not is_alone:
        return "several caches serve the model"
    if args.kv_transfer_config is not None or getattr(args, "kv_offloading_size", None):
        return "vLLM keeps a part of its cache elsewhere"
    return None


def tag_requests(client: Any, events: KvEvents) -> None:
    """Tag the requests of vLLM's client to the engine core: a single call each, which knows the prompt's tokens."""
    add = client.engine_core.add_request_async

    def add_tagged(request: Any) -> Awaitable[None]:
        if request.prompt_token_ids is not None and not request.mm_features:
            events.tag(request, len(request.prompt_token_ids))
        return add(request)

    client.engine_core.add_request_async = add_tagged
