"""The use under earlier owners, from the reports of relays: outcomes that no ledger has, and the last minute.

The next owner records each of these outcomes once, as if it had decided about the request itself.
"""

import math
from collections.abc import Iterator, Mapping

from ichat import errors
from ichat.observability.access_log import shown_path
from ichat.observability.request_record import CLIENT_LEFT, LABELS, OTHER, RESPONSE_PATH, RequestRecord
from ichat.protocol.usage import UsedTokens
from ichat.proxy.handler import Gateway
from ichat.relays.adoption import sums_in
from ichat.relays.request_at_relay import head_of, is_about_response, own_id_of
from ichat.relays.request_frames import ENDS
from ichat.relays.values import COPIES, NEVER, MonotonicNs, Note, SentAsk, SentOutcome, TrioClock
from ichat.security.rate_limits import EarlierUse

_S = 1_000_000_000
NO_ASK = SentAsk(0, NEVER, "", "", b"")
"""Stands for the ask of a request of which only the outcome is known."""


def record_earlier(item: SentOutcome | Note, asked: SentAsk | None, handler: Gateway, clock: TrioClock) -> None:
    """Record a request that has ended under an earlier owner, or the sums of many. Raises TalkError.

    An outcome that wants a next step is not an end: its request asks again.
    """
    if isinstance(item, Note):
        for row in sums_in(item):
            handler.add_earlier(
                row.key, row.model, row.endpoint, UsedTokens(row.input, row.output, row.cached),
                requests=row.requests, errors=row.errors,
            )  # fmt: skip
    elif item.outcome.kind in ENDS and item.number < COPIES:
        asked = asked or NO_ASK._replace(at=item.asked_at or item.ended_at)
        client = handler.client_of(head_of(asked), asked.peer)
        handler.record_earlier(record_of(item, asked, clock, client))


def record_of(sent: SentOutcome, asked: SentAsk, clock: TrioClock, client: str) -> RequestRecord:
    """Return the facts of a request that has ended by this outcome. `client` is the client's address."""
    outcome, is_answered, path = sent.outcome, sent.first_at != NEVER, asked.path.partition(b"?")[0]
    status, error = (outcome.status, sent.error) if is_answered else (500, "internal_error")
    if outcome.kind == "left":
        status, error = CLIENT_LEFT, "client_left"
    elif outcome.kind == "cancelled":
        cancelled = errors.request_cancelled()
        status, error = status if is_answered else cancelled.status, cancelled.code
    asked_at, started_at = clock.trio_of_event(sent.asked_at), clock.trio_of(asked.at)
    return RequestRecord(
        id=asked.id,
        client=client,
        method=asked.method.decode("latin-1"),
        path=shown_path(path),
        route=LABELS.get(RESPONSE_PATH if is_about_response(asked) else path, OTHER),
        key_name=sent.key,
        model=sent.model,
        status=status,
        error=error,
        phase=outcome.why if outcome.kind in ("left", "cancelled") else "",
        started_at=started_at,
        ended_at=clock.trio_of(sent.ended_at),
        queued_s=asked.queued_s,
        bytes_in=asked.body_bytes,
        bytes_out=sent.bytes_out,
        usage=sent.usage,
        trace_id="",
        worker=outcome.endpoint,
        answered_at=clock.trio_of_event(sent.first_at),
        first_at=clock.trio_of_event(sent.body_at),
        overhead_s=None if asked_at is None else asked_at - started_at - asked.queued_s,
        chunks=sent.chunks,
        alias=asked.model if asked.model != sent.model else "",
        own_id=own_id_of(asked),
    )


def earlier_use(windows: Mapping[tuple[int, str], tuple[int, int]], clock: TrioClock) -> Iterator[EarlierUse]:
    """Return the use of the last minute that relays have reported, by seconds of this process.

    A second there lies in two of this process: the use counts for the later, so that it is not forgotten too early.
    """
    for (second, key), (requests, tokens) in windows.items():
        yield EarlierUse(math.ceil(clock.trio_of(MonotonicNs(second * _S))), key, requests, tokens)
