"""The record of a request, made of what its exchange and its newest attempt know."""

import trio

from ichat.observability.access_log import SHOWN_CHARACTERS_MAX
from ichat.observability.request_record import RequestRecord, label_of
from ichat.proxy.attempt import Attempt, ForwardedRequest
from ichat.security.addresses import address_in
from ichat.security.auth import Caller


def record_of(
    forwarded: ForwardedRequest,
    attempt: Attempt | None,
    *,
    model: str,
    status: int,
    error: str,
    phase: str,
    bytes_in: int,
    bytes_out: int,
    tokens: int | None,
) -> RequestRecord:
    """Return the facts of a request that has ended now; `phase` is how far it had come if it was cut off.

    `bytes_out` are of a response of the gateway's own.
    """
    request, caller = forwarded.request, forwarded.caller
    return RequestRecord(
        id=request.id.decode(),
        client=client_address(caller, forwarded.client.peer),
        method=request.method.decode("latin-1"),
        path=shown_path(request.path),
        route=label_of(forwarded.path),
        key_name=caller.key_name,
        model=model,
        worker=attempt.endpoint.id.decode() if attempt else "",
        status=status,
        error=error,
        phase=phase,
        started_at=forwarded.started_at,
        ended_at=trio.current_time(),
        answered_at=attempt.answered_at if attempt else None,
        first_at=attempt.first_at if attempt else None,
        queued_s=forwarded.queued_s,
        overhead_s=attempt.overhead_s if attempt else None,
        bytes_in=bytes_in,
        bytes_out=attempt.bytes_out if attempt else bytes_out,
        chunks=attempt.chunks if attempt else 0,
        tokens=tokens,
        trace_id=forwarded.trace.id if forwarded.trace else "",
    )


def client_address(caller: Caller, peer: str) -> str:
    """Return the connection's address and port, or the address for which a trusted proxy asks."""
    return peer if address_in(peer) == caller.address else caller.address


def shown_path(path: bytes) -> str:
    """Return a path as records have it."""
    return path.decode("latin-1")[:SHOWN_CHARACTERS_MAX]
