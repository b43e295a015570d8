"""The head of a response as the client gets it. A pure function."""

from ichat.http.heads import HOP_BY_HOP, Headers, ResponseHead, date_header, hop_by_hop_of, response_head
from ichat.protocol import CODE_HEADER, OVERHEAD_HEADER, WHY_HEADER, WORKER_HEADER
from ichat.protocol.prefixes import PREFIX_HEADER
from ichat.protocol.usage import USAGE_HEADER

MODEL_HEADER = b"x-ichat-model"
"""The model that answered a request for a name that stands for models."""
ATTEMPTS_HEADER = b"x-ichat-attempts"
"""How many endpoints were asked for it, and models that had none to ask."""
_LEFT_OUT = HOP_BY_HOP.union((
    b"x-request-id", WORKER_HEADER, OVERHEAD_HEADER, PREFIX_HEADER, CODE_HEADER, WHY_HEADER,
    MODEL_HEADER, ATTEMPTS_HEADER, USAGE_HEADER,
    b"access-control-allow-origin", b"access-control-allow-credentials", b"access-control-allow-methods",
    b"access-control-allow-headers", b"access-control-expose-headers", b"access-control-max-age",
    b"access-control-allow-private-network",
))  # fmt: skip
"""Headers of a response that are not forwarded: the last ones are made by the gateway nearest to the client alone."""


def client_head(head: ResponseHead, added: Headers, *, keeps_chunks: bool, keep_alive: bool) -> bytes:
    """Return the upstream's head with the headers that are `added`.

    `keeps_chunks` says that the body is sent in chunks if the upstream sends it so.
    """
    left_out = _LEFT_OUT | hop_by_hop_of(head.headers) if b"connection" in head.by_name else _LEFT_OUT
    headers: Headers = [header for header in head.headers if header[0] not in left_out]
    if b"date" not in head.by_name:
        headers.append(date_header())
    headers += added
    if not keep_alive:
        headers.append((b"connection", b"close"))
    if b"transfer-encoding" in head.by_name and keeps_chunks:
        headers.append((b"transfer-encoding", b"chunked"))
    return response_head(head.status, headers, head.reason)
