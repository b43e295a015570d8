"""What relays forward to the process that decides: the peers of their requests, and their refusals."""

from typing import Any

from ichat.errors import ApiError
from ichat.http.heads import Headers, RequestHead
from ichat.protocol.messages import PEER_HEADER
from ichat.proxy.handler import Gateway
from ichat.relays.values import Note, TalkError


def peer_of(head: RequestHead, peer: str) -> str:
    """Return the peer of a forwarded request: the relay names it, and only relays reach the inner socket."""
    return head.by_name.get(PEER_HEADER, peer.encode()).decode("latin-1")


class RecordedRefusals:
    """Records what relays have refused before it was a request."""

    def __init__(self, handler: Gateway) -> None:
        self._handler = handler

    def __call__(self, frame: Note) -> None:
        """Record a refusal. Raises TalkError for a damaged frame."""
        content = frame.content
        try:
            status, code, limit = int(content["status"]), str(content["code"]), str(content["limit"])
            error = ApiError(status, code, "", limit=limit)
            self._handler.refused(error, str(content["id"]).encode(), str(content["peer"]), _head_in(content))
        except (KeyError, ValueError, TypeError, AttributeError) as broken:
            raise TalkError("A `record` is damaged.") from broken


def _head_in(content: Any) -> RequestHead | None:
    parts, pairs = content.get("head"), content.get("headers", [])
    if parts is None:
        return None
    method, target, version = (str(part).encode("latin-1") for part in parts)
    headers: Headers = [(str(name).encode("latin-1"), str(value).encode("latin-1")) for name, value in pairs]
    return RequestHead(method, target, version, headers, 0)
