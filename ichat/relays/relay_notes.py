"""The words of a relay about requests, as its owner reads them: refusals, reports, and the peers of clients.

A relay refuses bytes that are no request, and requests that no upstream may get, such as a body that is no JSON.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ichat.errors import ApiError
from ichat.http.heads import Headers, RequestHead
from ichat.observability.access_log import shown_path
from ichat.observability.request_record import LABELS, OTHER, RequestRecord
from ichat.protocol.messages import PEER_HEADER
from ichat.proxy.exchange import client_address
from ichat.proxy.handler import Gateway
from ichat.relays.link import whole
from ichat.relays.request_at_relay import Report
from ichat.relays.values import MonotonicNs, Note, TalkError, TrioClock


def record_refusal(note: Note, handler: Gateway, clock: TrioClock, now: float) -> None:
    """Count and record a refusal by a relay. Raises TalkError for a damaged note."""
    content = note.content
    try:
        error = ApiError(int(content["status"]), str(content["code"]), "", limit=str(content["limit"]))
        request_id, peer, head = str(content["id"]), str(content["peer"]), _head_in(content)
    except (KeyError, ValueError, TypeError, AttributeError) as broken:
        raise TalkError("A `record` is damaged.") from broken
    if head is None or "at" not in content:
        handler.refused(error, request_id.encode(), peer, head)
        return
    caller = handler.context.auth.caller(head, peer)
    record = RequestRecord(
        id=request_id,
        client=client_address(caller, peer),
        method=head.method.decode("latin-1"),
        path=shown_path(head.path),
        route=LABELS.get(head.path, OTHER),
        key_name=caller.key_name,
        model="",
        status=error.status,
        error=error.code,
        phase="",
        started_at=clock.trio_of(MonotonicNs(whole(note, "at"))),
        ended_at=now,
        queued_s=0.0,
        bytes_in=whole(note, "bytes_in"),
        bytes_out=0,
        usage=None,
        trace_id="",
    )
    handler.count_refusal(error.limit or error.code, caller)
    handler.record_earlier(record)


def _head_in(content: Mapping[str, Any]) -> RequestHead | None:
    parts, pairs = content.get("head"), content.get("headers", [])
    if parts is None:
        return None
    method, target, version = (str(part).encode("latin-1") for part in parts)
    headers: Headers = [(str(name).encode("latin-1"), str(value).encode("latin-1")) for name, value in pairs]
    return RequestHead(method, target, version, headers, 0)


def reports_in(note: Note, clock: TrioClock) -> Iterator[tuple[int, Report]]:
    """Yield how far requests have got with their endpoints, by their numbers. Raises TalkError."""
    rows: Any = note.content.get("rows")
    try:
        for number, asked_at, answered_at, is_stream, status, bytes_out, chunks in rows:
            asked, answered = (None if at is None else clock.trio_of(at) for at in (asked_at, answered_at))
            sizes = int(status), int(bytes_out), int(chunks)
            yield int(number), Report(asked, answered, answered, is_stream is True, *sizes)
    except (TypeError, ValueError) as error:
        raise TalkError(f"The report about requests is damaged: {error}.") from error


def peer_of(head: RequestHead, peer: str) -> str:
    """Return the peer of a forwarded request: the relay names it, and only relays reach the inner socket."""
    return head.by_name.get(PEER_HEADER, peer.encode()).decode("latin-1")
