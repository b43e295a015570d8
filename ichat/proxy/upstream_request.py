"""A request as its upstream gets it. Pure functions."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

from ichat.http.heads import HOP_BY_HOP, hop_by_hop_of, request_head
from ichat.http.json_body import Body
from ichat.http.request import Request
from ichat.http.request_body import RequestBody
from ichat.observability.tracing import NAMES as TRACE_HEADERS
from ichat.protocol.messages import HOP_HEADER
from ichat.proxy.engine_control import HEADER_NAMES, HEADER_PREFIXES, without_control
from ichat.proxy.header_filter import NOT_OF_REQUESTS, NOT_OF_REQUESTS_BEGIN, IsLeftOut, left_out
from ichat.routing.endpoint import EndpointFacts
from ichat.security.addresses import CREDENTIALS
from ichat.security.grant import Grant

JOINED_BYTES_MAX = 65536
"""A body up to this size is sent in a piece with its head; joining larger bodies would cost more than it saves."""
_MADE_ANEW = frozenset((b"host", b"content-length", b"expect", b"x-request-id")) | HOP_BY_HOP | TRACE_HEADERS
_LEFT_OUT: Mapping[tuple[bool, bool, bool], IsLeftOut] = {
    (has_keys, is_guarded, reads_response): left_out(
        (_MADE_ANEW | NOT_OF_REQUESTS).union(
            CREDENTIALS if has_keys else (),
            HEADER_NAMES if is_guarded else (),
            (b"accept-encoding",) if reads_response else (),
        ),
        NOT_OF_REQUESTS_BEGIN + (HEADER_PREFIXES if is_guarded else ()),
    )
    for has_keys, is_guarded, reads_response in itertools.product((False, True), repeat=3)
}
"""Headers that no upstream gets, by whether: a key may be in them, engines must not be steered, we read the answer."""
_BESIDE_V1 = re.compile(rb"/v1/(?:tokenize|detokenize|pooling|classify)(?=[?]|$)")
_BELOW_V1 = re.compile(rb"/(?:chat/completions|completions|embeddings|responses|messages|audio/[a-z]+)(?=[?]|$)")


def engine_target(target: bytes) -> bytes:
    """Return a request target as engines have it: some of their routes stand only below `/v1`, some only beside it."""
    if target.startswith(b"/v1/"):
        return target[3:] if _BESIDE_V1.match(target) else target
    return b"/v1" + target if _BELOW_V1.match(target) else target


def hops_of(by_name: Mapping[bytes, bytes]) -> int:
    """Return how many gateways a request has passed, by its headers."""
    value = by_name.get(HOP_HEADER, b"")
    return int(value) if value.isdigit() and len(value) < 3 else 0


async def prepare_body(
    request: Request, body: RequestBody, endpoint: EndpointFacts, *, is_suspect: bool
) -> tuple[RequestBody, Sequence[str]]:
    """Return the body that an endpoint gets, and the names of members and headers that it does not get.

    `is_suspect` says that there may be some that would steer an engine. Raises ApiError 400 for a request that the
    endpoint must not get.
    """
    if endpoint.route is not None:
        return await endpoint.route.rewrite(body, request.path), ()
    return await without_control(body, request.by_name) if is_suspect else (body, ())


def build_upstream_request(
    request: Request,
    body: Body,
    endpoint: EndpointFacts,
    *,
    grant: Grant,
    added: Iterable[tuple[bytes, bytes]],
    reads_response: bool,
) -> list[Body]:
    """Return the pieces of the request to send: the client's end-to-end headers, those `added`, and the body.

    `reads_response` says that the gateway looks into the response, which must not be compressed then. Raises ApiError
    404 for a path that the gateway's key for the endpoint is not for.
    """
    target = engine_target(request.target)
    upstream = endpoint.upstream
    is_left_out = _LEFT_OUT[grant.hides_keys, endpoint.route is None and not grant.may_steer, reads_response]
    headers = [header for header in request.headers if not is_left_out(header[0])]
    if b"connection" in request.by_name:
        named = hop_by_hop_of(request.headers)
        if named is not HOP_BY_HOP:
            headers = [header for header in headers if header[0] not in named]
    if upstream.port:
        headers.append((HOP_HEADER, b"%d" % (hops_of(request.by_name) + 1)))
    if endpoint.access is not None:
        headers = endpoint.access.headers_for(headers)
        endpoint.access.check_path(request.path)
        target = endpoint.access.target_for(target)
    headers.append((b"host", upstream.authority))
    headers.append((b"x-request-id", request.id))
    headers += added
    if body or request.method in (b"POST", b"PUT", b"PATCH"):
        headers.append((b"content-length", b"%d" % len(body)))
    head = request_head(request.method, target, headers)
    return [head + body] if len(body) <= JOINED_BYTES_MAX else [head, body]
