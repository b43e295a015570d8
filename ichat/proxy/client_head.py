"""The head of a response as the client gets it. A pure function."""

from collections.abc import Mapping

from ichat.http.heads import Headers, ResponseHead, date_header, end_to_end, response_head
from ichat.protocol import CODE_HEADER, OVERHEAD_HEADER, WHY_HEADER, WORKER_HEADER

_OURS_BACK = frozenset((
    b"x-request-id", WORKER_HEADER, OVERHEAD_HEADER, CODE_HEADER, WHY_HEADER,
    b"access-control-allow-origin", b"access-control-allow-credentials", b"access-control-allow-methods",
    b"access-control-allow-headers", b"access-control-expose-headers", b"access-control-max-age",
    b"access-control-allow-private-network",
))  # fmt: skip
"""Headers of a response that only the gateway nearest to the client makes."""


def client_head(
    head: ResponseHead, names: Mapping[bytes, bytes], added: Headers, *, keeps_chunks: bool, keep_alive: bool
) -> bytes:
    """Return the upstream's head with the headers that are `added`; `names` are the upstream's headers by name.

    `keeps_chunks` says that the body is sent in chunks if the upstream sends it so.
    """
    headers: Headers = [header for header in end_to_end(head.headers) if header[0] not in _OURS_BACK]
    if b"date" not in names:
        headers.append(date_header())
    headers += added
    if not keep_alive:
        headers.append((b"connection", b"close"))
    if b"transfer-encoding" in names and keeps_chunks:
        headers.append((b"transfer-encoding", b"chunked"))
    return response_head(head.status, headers, head.reason)
