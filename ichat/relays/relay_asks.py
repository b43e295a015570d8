"""A relay's questions to its owner: the part of a request's head by which it decides."""

from collections.abc import Mapping
from typing import Any

from ichat import errors
from ichat.errors import ApiError
from ichat.http.heads import RequestHead
from ichat.http.request import Request
from ichat.protocol.messages import HOP_HEADER
from ichat.relays.frame_desk import Asking, FrameDesk
from ichat.relays.values import NOTHING, FrameError, MonotonicNs, Note, Refused, SentAsk
from ichat.routing.prefix_chain import PrefixSums
from ichat.security.addresses import FORWARDED
from ichat.security.auth import CREDENTIALS

_JUDGED = (
    CREDENTIALS - {b"authorization"}
    | FORWARDED
    | {b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest", b"content-encoding"}
    | {b"traceparent", b"tracestate", HOP_HEADER}
)
"""Headers that a decision may depend on, beside those that each ask has, and a content type that is not `_JSON`."""
_TEXT_MAX = 1024
"""A longer header is not in the report of a refusal, and a longer method or target ends there."""
_TYPE, _JSON = b"content-type", b"application/json"


def asked_of(
    number: int,
    request: Request | RequestHead,
    peer: str,
    *,
    bits: int,
    model: str = "",
    prompt_bytes: int = 0,
    sums: PrefixSums | None = None,
    session_header: bytes,
    at: MonotonicNs,
    body_bytes: int = 0,
    previous: str = "",
) -> SentAsk:
    """Return the part of a request's head that the owner gets."""
    names = request.by_name
    headers: tuple[tuple[bytes, bytes], ...] = ()
    is_usual = _JUDGED.isdisjoint(names) and names.get(_TYPE, _JSON) == _JSON
    if not is_usual or len(names) < len(request.headers) or request.version != b"1.1":
        headers = _judged_of(request)
    shown_id = ""
    if isinstance(request, Request):
        shown_id = request.id.decode()
        if request.own_id != request.id:
            headers += ((b":own-id", request.own_id),)
    prefix_bytes, checksums, before = 0, (), ()
    if sums is not None:
        prefix_bytes, checksums, before = sums.length, tuple(sums.checksums), tuple(sums.before.items())
    session = names.get(session_header, b"") if session_header else b""
    return SentAsk(
        number, at, shown_id, model, request.target, request.method, peer, names.get(b"authorization", b""),
        names.get(b"host", b""), session, bits, 0, body_bytes, prompt_bytes, prefix_bytes, checksums, before, headers,
        previous,
    )  # fmt: skip


def _judged_of(request: Request | RequestHead) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers of a head that a decision may depend on, beside those that each ask has."""
    headers = tuple(
        header for header in request.headers if header[0] in _JUDGED or (header[0] == _TYPE and header[1] != _JSON)
    )
    headers += tuple([header for header in request.headers if header[0] == b"authorization"][1:])
    return headers if request.version == b"1.1" else (*headers, (b":version", request.version))


def report_refusal(
    desk: FrameDesk,
    error: ApiError,
    request_id: bytes,
    peer: str,
    head: Request | RequestHead | None,
    *,
    about: Mapping[str, int] = NOTHING,
) -> None:
    """Report a refusal by this relay: the owner counts and logs it. A frame that is too large goes without headers.

    `about` has the time `at` of a request's beginning, and its `bytes_in`; it is empty for bytes that were no request.
    """
    content: dict[str, Any] = {
        "status": error.status, "code": error.code, "limit": error.limit, "id": request_id.decode(), "peer": peer,
        **about,
    }  # fmt: skip
    if head is not None:
        content["head"] = [part[:_TEXT_MAX].decode("latin-1") for part in (head.method, head.target, head.version)]
        content["headers"] = [
            [part.decode("latin-1") for part in pair] for pair in head.headers if len(pair[1]) < _TEXT_MAX
        ]
    try:
        desk.send(Note("record", 0, content))
    except FrameError:
        desk.send(Note("record", 0, {**content, "headers": []}))


async def admit(desk: FrameDesk, head: SentAsk) -> None:
    """Raise ApiError if the owner refuses a request for its head, or the head is too large to ask."""
    asking = Asking()
    desk.begin(head, asking)
    try:
        frame = await asking.wait()
    finally:
        desk.end(asking)
    if isinstance(frame, Refused):
        raise frame.refuse.failure.error()
    if frame is None or frame.kind != "go":
        raise errors.owner_away()
