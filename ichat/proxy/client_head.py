"""The head of a response as the client gets it. A pure function."""

from collections.abc import Sequence

from ichat.http.framing import Chunked
from ichat.http.heads import HOP_BY_HOP, Headers, ResponseHead, date_header, hop_by_hop_of, response_head
from ichat.protocol.messages import CODE_HEADER
from ichat.proxy.header_filter import NOT_OF_ANSWERS, NOT_OF_ANSWERS_BEGIN, left_out

MODEL_HEADER = b"x-ichat-model"
"""The model that answered a request for a name that stands for models."""
ATTEMPTS_HEADER = b"x-ichat-attempts"
"""How many endpoints were asked for it, and models without an endpoint to ask."""
SEALED: Sequence[tuple[bytes, bytes]] = (
    (b"content-security-policy", b"sandbox; default-src 'none'"),
    (b"x-content-type-options", b"nosniff"),
)
"""Every answer about models has these: a browser that shows it as a page runs no script, and loads nothing, for it."""
_NO_BODY = frozenset((204, 304))
"""Statuses of responses without a body; so no header has its length or coding (RFC 9110, section 8.6)."""
_not_of_models = left_out(HOP_BY_HOP | NOT_OF_ANSWERS, NOT_OF_ANSWERS_BEGIN)
_not_of_control = left_out(HOP_BY_HOP | {b"x-request-id", CODE_HEADER}, ())


def client_head(
    head: ResponseHead, added: Headers, *, keeps_chunks: bool, keep_alive: bool, is_control: bool = False
) -> bytes:
    """Return the head of a model's answer with the headers that are `added`, without those that end at the gateway.

    `keeps_chunks` says that the body is sent in chunks if the upstream sends it so. With `is_control` the answer is the
    control plane's: its own headers for browsers pass.
    """
    is_left_out = _not_of_control if is_control else _not_of_models
    headers: Headers = [header for header in head.headers if not is_left_out(header[0])]
    if b"connection" in head.by_name:
        named = hop_by_hop_of(head.headers)
        headers = [header for header in headers if header[0] not in named]
    is_chunked = isinstance(head.framing, Chunked)
    if head.status in _NO_BODY or (b"transfer-encoding" in head.by_name and not is_chunked):
        headers = [header for header in headers if header[0] != b"content-length"]
    if b"date" not in head.by_name:
        headers.append(date_header())
    headers += added
    if head.status == 401 and not is_control:
        headers.append((b"www-authenticate", b"Bearer"))
    if not keep_alive:
        headers.append((b"connection", b"close"))
    if is_chunked and keeps_chunks:
        headers.append((b"transfer-encoding", b"chunked"))
    return response_head(head.status, headers, head.reason)
