"""Parts of a request that steer the engine past the gateway: removed on the way to a worker.

A name is in here when it lets a client act as the engine's own machinery. The client could have it connect somewhere,
choose a rank, go ahead of others, touch others' requests, or bring code. A name that only changes a client's own
response is not. `tests/engine/engine_fields.toml` has the judgement on every other field that the engines know. An
external route gets all of it: we cannot know the meaning of these names there.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from ichat.errors import bad_request
from ichat.http.json_body import PARSED_BYTES_MAX, parsed_value
from ichat.http.request_body import RequestBody

log = logging.getLogger(__name__)

TOLD_MAX = 1000
"""Pairs of keys and names that are remembered; beyond that nothing more is logged."""

_TRANSFER = "has the engine fetch from, or wait for, an address of the client's choice"
_RANK = "chooses which of the engine's ranks does the work"
_QUEUE = "goes ahead of others in the engine's queue"
_IDENTITY = "takes the name of another request, or goes on in another's session"
_ADAPTER = "has an adapter beside `model`, which a key may not be for"
_CODE = "brings code that the engine runs"
_EVENTS = "has the engine tell its listeners of all its cache with each request"
_BODY = "has the engine read another body than the gateway"

MEMBERS: Mapping[str, str] = {
    "kv_transfer_params": _TRANSFER,
    "ec_transfer_params": _TRANSFER,
    "bootstrap_host": _TRANSFER,
    "bootstrap_port": _TRANSFER,
    "bootstrap_room": _TRANSFER,
    "data_parallel_rank": _RANK,
    "routed_dp_rank": _RANK,
    "disagg_prefill_dp_rank": _RANK,
    "priority": _QUEUE,
    "rid": _IDENTITY,
    "request_id": _IDENTITY,
    "session_params": _IDENTITY,
    "lora_path": _ADAPTER,
    "custom_logit_processor": _CODE,
    "kv_cache_report_mode": _EVENTS,
}
"""Members of a body, and fields of a form, with what each of them does."""
CARRIER = "vllm_xargs"
"""A member that has such fields as its own members, beside the fields that extensions of vLLM accept."""
HEADERS: Mapping[bytes, str] = {
    b"x-override-bootstrap-host": _TRANSFER,
    b"x-override-bootstrap-port": _TRANSFER,
    b"x-override-bootstrap-room": _TRANSFER,
    b"x-data-parallel-rank": _RANK,
    b"x-override-routed-dp-rank": _RANK,
    b"x-override-disagg-prefill-dp-rank": _RANK,
    b"x-vllm-priority": _QUEUE,
    b"x-override-priority": _QUEUE,
    b"x-smg-routing-key": _QUEUE,
    b"x-override-rid": _IDENTITY,
    b"x-override-conversation-id": _IDENTITY,
    b"x-body-compressed": _BODY,
}
HEADER_PREFIXES = (b"x-override-", b"x-smg-")
"""Others that begin so will be of their kind."""
WATCHED = frozenset((*MEMBERS, CARRIER))
"""The names to look for in a body."""
HEADER_NAMES = frozenset(HEADERS)


async def without_control(body: RequestBody, by_name: Mapping[bytes, bytes]) -> tuple[RequestBody, Sequence[str]]:
    """Return a body without the members that steer an engine, and the names of these members, and of such headers.

    `by_name` are the request's headers. Members that were set here are the operator's: they stay.

    The rest of the body is the same byte for byte. Raises ApiError 400 for an unreadable body, and for a CARRIER
    of more than PARSED_BYTES_MAX.
    """
    off = [name for name in MEMBERS if name in body.names and not body.has_set(name)]
    carriers = [] if body.has_set(CARRIER) else [value for _, value in await body.values((CARRIER,))]
    replace, inner = _uncarried(carriers)
    if off or inner:
        body = await body.edited(replace, off)
    of_head = sorted(name.decode() for name in by_name if name in HEADER_NAMES)
    return body, [*off, *(f"{CARRIER}.{name}" for name in inner), *of_head]


def _uncarried(carriers: Sequence[bytes]) -> tuple[Mapping[str, bytes], Sequence[str]]:
    """Return the CARRIER's new value, if it needs a new value, and the names left out; the last CARRIER counts."""
    kept: dict[str, object] = {}
    off: dict[str, None] = {}
    for carrier in carriers:
        if len(carrier) > PARSED_BYTES_MAX:
            raise bad_request(f"`{CARRIER}` must have at most {PARSED_BYTES_MAX} bytes.", param=CARRIER)
        value = parsed_value(CARRIER, carrier)
        given = cast("dict[str, object]", value) if isinstance(value, dict) else {}
        off |= dict.fromkeys(name for name in given if name in MEMBERS)
        kept = {name: inner for name, inner in given.items() if name not in MEMBERS}
    try:
        return {CARRIER: json.dumps(kept).encode()} if off else {}, list(off)
    except RecursionError as error:
        raise bad_request(f"`{CARRIER}` is nested too deep.", param=CARRIER) from error


class DropNotices:
    """Logged names that were removed: each name once for each key."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def __repr__(self) -> str:
        return f"<DropNotices {len(self._told)}>"

    def log_dropped(self, key_name: str, names: Iterable[str]) -> None:
        """Log the names that were removed from a request; `key_name` is empty for a client without a key."""
        new = [name for name in names if (key_name, name) not in self._told][: TOLD_MAX - len(self._told)]
        if new:
            self._told.update((key_name, name) for name in new)
            who = f"the key {key_name}" if key_name else "clients without a key"
            log.info(
                "workers do not get %s of %s (said once); [[security.keys]] engine_control = true lets a key send it",
                ", ".join(new), who,
            )  # fmt: skip
