"""Requests that carry out a step of an earlier owner: they count for their endpoints and keys until they end."""

from collections.abc import Callable

import trio

from ichat.fleet.worker_table import WorkerTable
from ichat.http.pool import Upstream
from ichat.observability.request_record import RequestRecord
from ichat.proxy.context import GatewayContext
from ichat.proxy.steps import Outcome
from ichat.relays.adoption import Trying
from ichat.relays.earlier_outcomes import record_of
from ichat.relays.request_at_relay import Report, ids_of, phase_of
from ichat.relays.values import STREAM, SentAsk, SentOutcome, TrioClock
from ichat.routing.endpoint import Endpoint
from ichat.routing.request import Lease
from ichat.security.rate_limits import QuotaReservation


class EarlierPlaces:
    """The places of such requests at endpoints.

    A worker may not be known again yet. Its requests have places at an endpoint that nothing is sent to, until it is.
    """

    def __init__(self, context: GatewayContext, table: WorkerTable) -> None:
        self._context = context
        self._table = table
        self._unknown: dict[str, Endpoint] = {}
        """Endpoints that stand for workers which are not known yet."""
        self._leases: dict[str, list[Lease]] = {}
        """The places at these."""
        table.changed.add(self._find_known)

    def __repr__(self) -> str:
        return f"<EarlierPlaces at {len(self._unknown)} unknown workers>"

    def lease(self, endpoint_id: str, model: str) -> Lease:
        """Return the place of a request, which no limit refuses."""
        endpoint = self._context.endpoint_of(endpoint_id)
        if endpoint is not None:
            return self._context.balancer.restore(endpoint, model)
        unknown = self._unknown.get(endpoint_id)
        if unknown is None:
            unknown = self._unknown[endpoint_id] = Endpoint(Upstream("", "", 0), endpoint_id.encode(), 1)
        lease = self._context.balancer.restore(unknown, model)
        self._leases.setdefault(endpoint_id, []).append(lease)
        return lease

    def _find_known(self) -> None:
        """Have the requests of workers that are known now count there."""
        for endpoint_id in [*self._unknown]:
            endpoint = self._context.endpoint_of(endpoint_id)
            if endpoint is not None:
                del self._unknown[endpoint_id]
                for lease in self._leases.pop(endpoint_id):
                    lease.move(endpoint)


class EarlierRequest:
    """A request that carries out a step of an earlier owner. It is `InFlight`."""

    def __init__(
        self,
        trying: Trying,
        asked: SentAsk,
        lease: Lease,
        reservation: QuotaReservation,
        *,
        cancel: Callable[[], None],
        client: str,
        clock: TrioClock,
    ) -> None:
        """`cancel` has the relay cut it off; `client` is the client's address."""
        self.asked = asked
        self.cancel = cancel
        self.told: Report | None = None
        self._trying = trying
        self._lease = lease
        self._reservation = reservation
        self._client = client
        self._clock = clock

    def __repr__(self) -> str:
        return f"<EarlierRequest {self.asked.id}>"

    @property
    def ids(self) -> tuple[bytes, bytes]:
        """See `InFlight`."""
        return ids_of(self.asked)

    @property
    def is_stream(self) -> bool:
        """See `InFlight`."""
        return self.asked.bits & STREAM != 0

    @property
    def phase(self) -> str:
        """See `InFlight`."""
        return phase_of(self.told)

    def record(self, phase: str, now: float) -> RequestRecord:
        """See `InFlight`."""
        told, trying, clock = self.told or Report(), self._trying, self._clock
        sent = SentOutcome(
            trying.number, trying.attempt, 0, Outcome("answered", trying.endpoint, status=told.status),
            asked_at=clock.ns_of_event(told.asked_at), first_at=clock.ns_of_event(told.answered_at),
            ended_at=clock.ns_of(now), bytes_out=told.bytes_out, chunks=told.chunks, key=trying.key, model=trying.model,
        )  # fmt: skip
        record = record_of(sent, self.asked, clock, self._client)
        record.phase = phase
        return record

    def release(self, tokens: int) -> None:
        """Free its place, and count its tokens for the limits of its key."""
        self._lease.release()
        self._reservation.release(tokens, trio.current_time())
