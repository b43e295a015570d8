"""The requests in flight: the operators' view of those that have begun and not ended, and how they are cancelled.

A request costs an insertion and a deletion. All else is read when an operator asks.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import trio

from ichat import errors
from ichat.errors import ApiError
from ichat.observability.request_record import RequestRecord
from ichat.protocol.messages import Count
from ichat.proxy.client_sink import end_cancelled
from ichat.proxy.exchange import Exchange
from ichat.texts import some_of

SHOWN_MAX = 200
"""Requests that are shown, at most: the oldest."""


@attrs.frozen
class RequestView:
    """A request to a model that has begun and not ended."""

    id: str
    """The client's own, if it sent an id; several requests may have it."""
    own_id: str
    """The gateway's, by which a single request can be cancelled."""
    key: str
    """The name of the client's key; empty if it has none."""
    client: str
    """The client's address."""
    model: str
    """Empty until it is known."""
    alias: str
    """The name that it asked for, if that stands for models."""
    worker: str
    """The worker or external route that has it, or had it last; empty: none yet."""
    route: str
    """The route's label in metrics, for example `/v1/chat/completions`."""
    phase: str
    """`begun`, `queued`, `connecting`, `waiting`, `first_token`, `streaming` or `plain`.

    `waiting` has no answer yet, `first_token` has the head of a stream, `plain` that of another response.
    """
    age_s: float
    queued_s: float
    """Seconds for which it has waited for a worker."""
    is_stream: bool
    bytes_in: Count
    bytes_out: Count
    tokens_out_estimate: Count | None
    """The pieces of a stream until now, of which most are a token each; null: it is no stream."""


@attrs.frozen
class RequestsView:
    """The requests in flight, oldest first."""

    requests: Sequence[RequestView]
    total: Count
    """How many there are; the youngest may be left out."""


class InFlight(Protocol):
    """A request to a model that has begun and not ended."""

    @property
    def ids(self) -> tuple[bytes, bytes]:
        """Its id (the client's own, if it sent an id), and the gateway's."""
        ...

    @property
    def phase(self) -> str:
        """How far it has got; see `RequestView`."""
        ...

    @property
    def is_stream(self) -> bool:
        """Whether it asks for a stream."""
        ...

    def cancel(self) -> None:
        """Cut it off."""
        ...

    def record(self, phase: str, now: float) -> RequestRecord:
        """Return the facts of the request; `phase` is how far it had got if it was cut off."""
        ...


class RequestsInFlight:
    """The requests to models that have begun and not ended."""

    def __init__(self) -> None:
        self.requests: dict[InFlight, bool] = {}
        """In the order of their beginnings; whether each was cancelled."""
        self._error: Callable[[], ApiError] = errors.request_cancelled
        """Makes the error by which a cancelled request ends."""

    def __repr__(self) -> str:
        return f"<RequestsInFlight {len(self.requests)}>"

    def view(self, request_id: str | None = None) -> RequestsView:
        """Return the facts about the oldest requests, or about those with this id, the gateway's or the client's."""
        now, found = trio.current_time(), self.requests
        if request_id is not None:
            wanted = request_id.encode()
            found = [one for one in self.requests if wanted in one.ids]
        return RequestsView([_view_of(one, now) for one in itertools.islice(found, SHOWN_MAX)], len(found))

    def cancel(self, request_id: str) -> bool:
        """Cancel the request of this id, the gateway's or the client's own; return whether there is such a request.

        Raises ApiError 409 for an id that clients have given several requests.
        """
        wanted = request_id.encode()
        found = [one for one in self.requests if one.ids[1] == wanted]
        found = found or [one for one in self.requests if one.ids[0] == wanted]
        if len(found) > 1:
            own = some_of((one.ids[1].decode() for one in found), "GET /v1/admin/requests lists all")
            raise ApiError(
                409,
                "ambiguous_id",
                f"{len(found)} requests have the id {request_id}: cancel one by its own: {own}.",
            )
        for one in found:
            self.requests[one] = True
            one.cancel()
        return bool(found)

    def end_all(self, error: Callable[[], ApiError]) -> None:
        """Cancel all requests, and end them and later cancelled requests by this error: the process ends now."""
        self._error = error
        for one in self.requests:
            self.requests[one] = True
            one.cancel()

    async def end_if_cancelled(self, exchange: Exchange) -> bool:
        """End the response of a request that was cancelled here; return whether it was."""
        if exchange.progress.client.has_left or not self.requests.get(exchange):
            return False
        await end_cancelled(exchange.progress, self._error())
        return True


def _view_of(one: InFlight, now: float) -> RequestView:
    phase = one.phase
    record = one.record(phase, now)
    age_s = now - record.started_at
    is_stream = one.is_stream or phase in ("first_token", "streaming")
    return RequestView(
        id=record.id,
        own_id=one.ids[1].decode(),
        key=record.key_name,
        client=record.client,
        model=record.model,
        alias=record.alias,
        worker=record.worker,
        route=record.route,
        phase=phase,
        age_s=round(age_s, 3),
        queued_s=round(age_s if phase == "queued" else record.queued_s, 3),
        is_stream=is_stream,
        bytes_in=record.bytes_in,
        bytes_out=record.bytes_out,
        tokens_out_estimate=record.chunks if is_stream else None,
    )
