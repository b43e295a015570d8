"""The requests that an old process without relays still has after a takeover: they count at the new process.

The old process reports over the connection of the takeover where each of them has a place, that it has ended, and its
record. It has sent everything when it ends. If the new process ends first, later reports are lost with it.
"""

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import cattrs
import trio
from cattrs.errors import BaseValidationError

from ichat.fleet.worker_table import WorkerTable
from ichat.listeners import Listeners
from ichat.observability.request_record import RecordSink, RequestRecord
from ichat.observability.tracing import Tracing
from ichat.proxy.exchange import Exchange
from ichat.proxy.handler import Gateway
from ichat.relays.earlier_requests import EarlierPlaces
from ichat.routing.request import Lease
from ichat.security.grant import NO_GRANT
from ichat.security.rate_limits import QuotaReservation
from ichat.takeover.snapshot import SavedRequest

log = logging.getLogger(__name__)

LOOK_S = 0.2
"""The longest time until the new process hears that a request of the old process has another place."""
_TIMES = ("started_at", "ended_at", "answered_at", "first_at")
_KEPT_HERE = frozenset(("span", "prefix"))
"""Parts of a record that only its own process can use."""
_FIELDS = [one.name for one in attrs.fields(RequestRecord) if one.name not in _KEPT_HERE]


def report_of(record: RequestRecord, now: float) -> dict[str, Any]:
    """Return a record as JSON can hold it, with ages in place of times."""
    content = {name: getattr(record, name) for name in _FIELDS}
    return {**content, **{name: None if content[name] is None else now - content[name] for name in _TIMES}}


def record_in(report: Any, now: float) -> RequestRecord:
    """Return the record of a report. Raises ValueError for something else."""
    try:
        times = {name: None if report[name] is None else now - report[name] for name in _TIMES}
        return cattrs.structure({**report, **times}, RequestRecord)
    except (BaseValidationError, TypeError, KeyError) as error:
        raise ValueError(f"The record of a request cannot be read: {error!r}.") from error


class RequestsOfOthers:
    """The requests under way at the process that had this gateway before: their places, and their ends."""

    def __init__(self, handler: Gateway, table: WorkerTable) -> None:
        self._handler = handler
        self._places = EarlierPlaces(handler.context, table)
        self.saved: dict[str, SavedRequest] = {}
        """By their ids."""
        self._reservations: dict[str, QuotaReservation] = {}
        self._leases: dict[str, Lease] = {}
        self._is_followed = False
        """Whether the process that has them reports."""
        self._ended: Listeners[[]] = Listeners()

    def __repr__(self) -> str:
        return f"<RequestsOfOthers {len(self.saved)}>"

    def restore(self, requests: Iterable[SavedRequest]) -> None:
        """Count requests for the limits of their keys and endpoints, until `end`."""
        self._is_followed = True
        for one in requests:
            self._place(one)

    def receive(self, report: Mapping[str, Any]) -> None:
        """Note a report of the process that has them."""
        try:
            if "placed" in report:
                self._place(cattrs.structure(report["placed"], SavedRequest))
            elif "ended" in report:
                self._end(str(report["ended"]))
            elif "record" in report:
                self._record(record_in(report["record"], trio.current_time()), is_spent=report.get("is_spent") is True)
        except (BaseValidationError, TypeError, ValueError) as error:
            log.error("a report of the old process is not used: %s", error)

    def end(self) -> None:
        """Free all places: the process that has them has ended, or is not waited for."""
        for one in [*self.saved]:
            self._end(one)
        self._is_followed = False
        self._ended()

    async def wait_end(self) -> None:
        """Wait for `end`, if there are any."""
        while self._is_followed:
            await self._ended.wait()

    def _record(self, record: RequestRecord, *, is_spent: bool) -> None:
        self._handler.record_earlier(record)
        if record.usage is not None and not is_spent:
            self._handler.context.quotas.spend_late(record.key_name, record.usage.total, trio.current_time())

    def _place(self, one: SavedRequest) -> None:
        if one.id not in self._reservations:
            self._reservations[one.id] = self._handler.context.quotas.restore(one.key)
        self._leave(one.id)
        if one.endpoint:
            self._leases[one.id] = self._places.lease(one.endpoint, one.model)
        self.saved[one.id] = one

    def _leave(self, request_id: str) -> None:
        lease = self._leases.pop(request_id, None)
        if lease is not None:
            lease.release()

    def _end(self, request_id: str) -> None:
        if self.saved.pop(request_id, None) is not None:
            self._leave(request_id)
            self._reservations.pop(request_id).release(0, trio.current_time())


class RequestsHere:
    """The requests under way at this process, while another process may have its gateway. It is a `RecordSink`."""

    def __init__(self, handler: Gateway, others: Mapping[str, SavedRequest]) -> None:
        """`others` has those of processes that have had this gateway before."""
        self._handler = handler
        self._others = others
        self._sinks: Sequence[RecordSink] | None = None
        """Those of this process, while this object gets the records."""
        self._records: list[RequestRecord] = []
        self._spent = 0
        """How many of the records, the oldest, have their tokens in the snapshot."""
        self._known: Mapping[str, SavedRequest] = {}
        """As the new process knows them."""
        self._unsent: deque[Mapping[str, Any]] = deque()
        self._changed: Listeners[[]] = Listeners()

    def __repr__(self) -> str:
        return f"<RequestsHere {len(self._records)} records>"

    def hold(self) -> None:
        """Hold the records of requests that end from now on: it is not known yet which process counts them."""
        if self._sinks is None:
            self._sinks = self._handler.use_sinks([self])

    def give_back(self) -> None:
        """Have this process count them."""
        if self._sinks is not None:
            self._handler.use_sinks(self._sinks)
            records, self._records, sinks, self._sinks = self._records, [], self._sinks, None
            for record in records:
                for sink in sinks:
                    sink.ended(record)

    def ended(self, record: RequestRecord) -> None:
        """See `RecordSink`. Requests for no model count nowhere but here."""
        if record.is_counted:
            self._records.append(record)
            self._changed()
            return
        for sink in self._sinks or ():
            sink.ended(record)

    def save(self) -> list[SavedRequest]:
        """Return the requests for the snapshot."""
        self._known, self._spent = self._under_way(), len(self._records)
        return [*self._known.values()]

    def _under_way(self) -> dict[str, SavedRequest]:
        found = dict(self._others)
        for one in self._handler.in_flight.requests:
            if isinstance(one, Exchange) and one.desk.grant is not NO_GRANT:  # a relay reports its own requests
                desk, own_id = one.desk, one.ids[1].decode()
                place = "" if desk.lease is None else desk.lease.endpoint.id.decode()
                found[own_id] = SavedRequest(own_id, desk.grant.key_name, place, desk.model)
        return found

    async def report_forever(self, send: Callable[[Mapping[str, Any]], Awaitable[bool]]) -> None:
        """Report to the new process until cancelled, or until it has ended."""
        while await self.report(send):
            with trio.move_on_after(LOOK_S):
                await self._changed.wait()

    async def report(self, send: Callable[[Mapping[str, Any]], Awaitable[bool]]) -> bool:
        """Report everything that the new process does not know; return whether it is there."""
        self._note_news()
        while self._unsent:
            if not await send(self._unsent[0]):
                return False
            self._unsent.popleft()
        return True

    def _note_news(self) -> None:
        records, self._records, spent, self._spent = self._records, [], self._spent, 0
        before, self._known = self._known, self._under_way()
        now = trio.current_time()
        for number, record in enumerate(records):
            self._unsent.append({"record": report_of(record, now), "is_spent": number < spent})
            for sink in self._sinks or ():
                if isinstance(sink, Tracing):  # a span ends where it has begun
                    sink.ended(record)
        self._unsent.extend({"ended": one} for one in before.keys() - self._known.keys())
        self._unsent.extend(
            {"placed": attrs.asdict(one)} for own_id, one in self._known.items() if before.get(own_id) != one
        )
