"""The lanes: the requests and tokens of each key, by name, model and worker, for the operators' picture.

Nothing is counted while no operator looks. Tokens of a stream under way are its pieces, of which most are a token
each; its end corrects the sum.
"""

import itertools
from collections.abc import Sequence

import attrs
import trio

from ichat.observability.request_record import RecordSink, RequestRecord
from ichat.protocol.messages import Count
from ichat.proxy.requests_in_flight import InFlight, RequestsInFlight

LANES_MAX = 1000
"""The most lanes of a reading; of the rest only their number of requests is known."""
LOOKED_AT_MAX = 1000
"""The most requests in flight that a reading looks at, the oldest; the others count when they end."""
AT_ONCE = 16
"""Look at this many requests before other tasks run: about 0.1 ms."""
NAME_MAX = 200
"""The most characters of a name: clients choose the rest of a name that a pattern matches."""


@attrs.frozen
class Lane:
    """The requests of a key for a name at a worker."""

    key: str
    """The name of the client's key; empty if it has none."""
    name: str
    """The name that the requests asked for."""
    model: str
    worker: str
    """The worker or the external route."""
    in_flight: Count
    ended: Count
    """How many have ended since the reading before."""
    tokens: Count
    """The output tokens since the reading before, as far as they are known."""


@attrs.frozen
class Lanes:
    """The lanes since the reading before."""

    seconds: float
    """The time since that."""
    lanes: Sequence[Lane]
    left_out: Count
    """The requests of lanes that are not listed."""


class LaneMeter:
    """Counts the lanes between two readings. While an operator looks, it is a `RecordSink`."""

    def __init__(self, requests: RequestsInFlight, sinks: list[RecordSink]) -> None:
        """`sinks` get the record of each request that ends; the meter is among them while an operator looks."""
        self._requests = requests
        self._sinks = sinks
        self._read_at: float | None = None
        """None: no operator looks."""
        self._sums: dict[tuple[str, str, str, str], list[int]] = {}
        """In flight, ended, and tokens, by key, name, model and worker."""
        self._left_out = 0
        self._counted: dict[str, int] = {}
        """The pieces of streams in flight that were counted, by the gateway's ids of their requests."""

    def __repr__(self) -> str:
        return f"<LaneMeter of {len(self._sums)} lanes>"

    def stop(self) -> None:
        """Count no more until the next reading."""
        if self._read_at is not None:
            self._sinks.remove(self)
        self._read_at, self._left_out = None, 0
        self._sums.clear()
        self._counted.clear()

    def ended(self, record: RequestRecord) -> None:
        """Count a request that has ended; see `RecordSink`."""
        known = self._counted.pop(record.own_id, 0)
        if not record.worker or not record.is_counted:
            return
        tokens = 0 if record.usage is None else max(0, record.usage.output - known)
        self._add(record, in_flight=0, ended=1, tokens=tokens)

    async def read(self) -> Lanes:
        """Return the lanes since the reading before; the first begins to count."""
        now = trio.current_time()
        before, self._read_at = self._read_at, now
        if before is None:
            self._sinks.append(self)
        for number, one in enumerate(list(itertools.islice(self._requests.requests, LOOKED_AT_MAX)), start=1):
            if one in self._requests.requests:
                self._look_at(one, now, before)
            if number % AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        sums, self._sums = self._sums, {}
        left_out, self._left_out = self._left_out, 0
        lanes = [Lane(*way, *counts) for way, counts in sums.items()]
        return Lanes(0.0 if before is None else round(now - before, 3), lanes, left_out)

    def _look_at(self, one: InFlight, now: float, before: float | None) -> None:
        """Count a request in flight, and the pieces of its stream since it was looked at before."""
        phase = one.phase
        record = one.record(phase, now)
        if not record.worker or not record.is_counted:
            return
        tokens = 0
        if one.is_stream or phase in ("first_token", "streaming"):
            known = self._counted.get(record.own_id)
            if known is None:
                known = record.chunks if before is None or record.started_at < before else 0
            self._counted[record.own_id] = max(known, record.chunks)
            tokens = max(0, record.chunks - known)
        self._add(record, in_flight=1, ended=0, tokens=tokens)

    def _add(self, record: RequestRecord, *, in_flight: int, ended: int, tokens: int) -> None:
        way = (record.key_name, (record.alias or record.model)[:NAME_MAX], record.model[:NAME_MAX], record.worker)
        sums = self._sums.get(way)
        if sums is None:
            if len(self._sums) >= LANES_MAX:
                self._left_out += 1
                return
            sums = self._sums[way] = [0, 0, 0]
        sums[0] += in_flight
        sums[1] += ended
        sums[2] += tokens
