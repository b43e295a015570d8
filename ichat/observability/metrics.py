"""The gateway's metrics, for Prometheus.

Requests are counted in plain numbers and lists, since that is cheap.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from operator import attrgetter

import attrs
import trio
from prometheus_client import Metric, ProcessCollector

from ichat import __version__
from ichat.fleet.model_directory import ModelDirectory
from ichat.fleet.worker_table import WorkerTable
from ichat.hardware.machines import MachineMonitor
from ichat.http.body_mover import ChunkGapHistogram, empty_gap_histogram
from ichat.observability.counts import AliasCounts, LoadCounts, PrefixCounts, ShadowCounts, prefix_families
from ichat.observability.exposition import Families
from ichat.observability.fleet_metrics import MODELS_MAX, FleetMetrics
from ichat.observability.history import ModelTraffic, errors_in
from ichat.observability.prometheus_families import (
    Histogram,
    TokenCounts,
    families_of,
    family,
    gap_family,
    histogram_family,
    token_family,
)
from ichat.observability.request_record import OTHER, RequestRecord, UsedTokens
from ichat.routing.balancer import Balancer

FORGET_S = 3600.0
"""How long the series of a model are shown after it has gone: longer than any scrape interval."""
LOOP_S = 1.0
"""How often the delay of the event loop is measured, in seconds: an idle gateway wakes for that as well."""
PHASES = ("begun", "queued", "connecting", "waiting", "first_token", "streaming", "plain")
"""`RequestProgress.phase`."""

_FIRST_BYTE_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300)
_DURATION_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800)
_OVERHEAD_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
_QUEUE_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120)
_LOOP_DELAY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


@attrs.define(eq=False)
class _Counts:
    """The counts of a model. Made once for each, and only ever added to."""

    requests: dict[tuple[str, int], int] = attrs.field(factory=dict[tuple[str, int], int])
    """By route and status."""
    first_byte: Histogram = attrs.field(factory=lambda: Histogram(_FIRST_BYTE_S))
    duration: Histogram = attrs.field(factory=lambda: Histogram(_DURATION_S))
    queue: Histogram = attrs.field(factory=lambda: Histogram(_QUEUE_S))
    gaps: ChunkGapHistogram = attrs.field(factory=empty_gap_histogram)
    tokens: TokenCounts = attrs.field(factory=TokenCounts)
    prefixes: PrefixCounts | None = None
    """None: there were none, as with a single endpoint."""
    gone_at: float | None = None
    """When a scrape first found that no worker or route has this model."""


_OF_MODELS: Mapping[str, Callable[[_Counts], Histogram]] = {
    "ichat_time_to_first_byte_seconds": attrgetter("first_byte"),
    "ichat_request_duration_seconds": attrgetter("duration"),
    "ichat_queue_seconds": attrgetter("queue"),
}
"""The histograms of each model."""


@attrs.define(eq=False)
class _KeyCounts:
    """The counts of a client's key that the configuration names."""

    requests: int = 0
    tokens: TokenCounts = attrs.field(factory=TokenCounts)
    refusals: int = 0


class Metrics:
    """The gateway's metrics."""

    def __init__(
        self,
        table: WorkerTable,
        directory: ModelDirectory,
        balancer: Balancer,
        monitor: MachineMonitor,
        loads: LoadCounts,
        *,
        models_max: int = MODELS_MAX,
    ) -> None:
        """`monitor` reads the gateway's machine, `loads` has the counts of loading models."""
        self._directory = directory
        self._balancer = balancer
        self._fleet = FleetMetrics(table, directory, balancer, monitor, models_max)
        self._models_max = models_max
        self._loads = loads
        self._models: dict[str, _Counts] = {}
        self._without_model: dict[tuple[str, int], int] = {}
        """Requests by route and status that named no model or an unknown model: only their number is counted."""
        self._in_flight = 0
        self._refusals: dict[str, int] = {}
        self._keys: defaultdict[str, _KeyCounts] = defaultdict(_KeyCounts)
        self._aliases = AliasCounts()
        self.shadows = ShadowCounts()
        self._cancelled: dict[str, int] = dict.fromkeys(PHASES, 0)
        self._bytes = 0
        self._chunks = 0
        self._overhead = Histogram(_OVERHEAD_S)
        self._loop_delay = Histogram(_LOOP_DELAY_S)
        self._process = ProcessCollector(registry=None)
        self.others: list[Callable[[], Iterable[Metric]]] = []
        """Return the families of parts that count for themselves."""

    def __repr__(self) -> str:
        return f"<Metrics of {len(self._models)} models, {self._in_flight} requests in flight>"

    def request_began(self) -> None:
        """Count a request to a model as under way."""
        self._in_flight += 1

    def ended(self, record: RequestRecord) -> None:
        """Count a request to a model that has ended, and a bug in any other; see `RecordSink`."""
        if not record.is_counted:
            if record.error == "internal_error" and record.answered_at is None:
                self.refused(record.error)
            return
        self._in_flight -= 1
        error, model = record.error, record.model
        if record.alias:
            self._aliases.add(record)
        counts = self._models.get(model) if error != "model_not_found" else None
        if counts is None and self._is_known(record):
            counts = self._begin(model)
        requests = self._without_model if counts is None else counts.requests
        key = (record.route, record.status)
        requests[key] = requests.get(key, 0) + 1
        if error == "client_left":
            self._cancelled[record.phase] = self._cancelled.get(record.phase, 0) + 1
        elif error == "internal_error" or (error and record.status < 400):
            self.refused(error)
        overhead_s, usage = record.overhead_s, record.usage
        if overhead_s is not None:
            self._overhead.add(overhead_s)
        if record.key_name:
            of_key = self._keys[record.key_name]
            of_key.requests += 1
            if usage is not None:
                of_key.tokens.add(usage)
        if counts is not None:
            self._add(record, usage, counts)

    def _add(self, record: RequestRecord, usage: UsedTokens | None, counts: _Counts) -> None:
        """Add a request that has ended to the counts of its model."""
        if usage is not None:
            counts.tokens.add(usage)
        if record.worker or record.queued_s:
            counts.queue.add(record.queued_s)
        if record.prefix is not None and record.worker:
            self._prefixes_of(counts).add(record.prefix)
        answered_at = record.answered_at
        if answered_at is not None:
            counts.first_byte.add((record.first_at or answered_at) - record.started_at)
            counts.duration.add(record.ended_at - record.started_at)
            self._bytes += record.bytes_out
            self._chunks += record.chunks

    def used_later(self, key: str, model: str, used: UsedTokens) -> None:
        """Count the tokens of a response that was made in the background; its request was counted before."""
        if key:
            self._keys[key].tokens.add(used)
        if (counts := self._models.get(model)) is not None:
            counts.tokens.add(used)

    def refused(self, reason: str, key: str = "") -> None:
        """Count an error that a client got from the gateway itself: its code, or the configuration's part that refuses.

        `key` is the name of the client's key, if that is known. `ended` counts errors in the middle of a response.
        """
        self._refusals[reason] = self._refusals.get(reason, 0) + 1
        if key:
            self._keys[key].refusals += 1

    def keep_keys(self, names: Collection[str]) -> None:
        """Forget the keys that are not among these."""
        for name in self._keys.keys() - set(names):
            del self._keys[name]

    def prefixes_evicted(self, model: str, count: int) -> None:
        """Count prefixes that were believed to be in a cache until its worker reported that they are not."""
        self._prefixes_of(self._of(model)).evicted += count

    def _prefixes_of(self, counts: _Counts) -> PrefixCounts:
        found = counts.prefixes
        if found is None:
            found = counts.prefixes = PrefixCounts()
        return found

    def gaps(self, model: str) -> ChunkGapHistogram:
        """Return the list in which relays count the gaps between the pieces of a model's streams."""
        return self._of(model).gaps

    def _of(self, model: str) -> _Counts:
        counts = self._models.get(model)
        return counts if counts is not None else self._begin(model)

    def _is_known(self, record: RequestRecord) -> bool:
        """Return whether a model that is not counted yet exists, or did when the request was sent to it."""
        model = record.model
        if not model or record.error == "model_not_found":
            return False
        return bool(record.worker) or self._directory.has(model)

    def _begin(self, model: str) -> _Counts:
        """Count a model apart from now on, if there still is one of that name; else together with the others."""
        if not self._directory.has(model):
            return self._models.setdefault(OTHER, _Counts())
        if len(self._models) >= self._models_max:
            for name in self._models.keys() - self._directory.names() - {OTHER}:
                del self._models[name]
        return self._models.setdefault(model if len(self._models) < self._models_max else OTHER, _Counts())

    def _forget(self, now: float) -> None:
        """Forget the models that have been gone for `FORGET_S`; values seen by the last scrape are not lost by that."""
        known = self._directory.names() | {OTHER}
        for name, counts in list(self._models.items()):
            if name in known:
                counts.gone_at = None
            elif counts.gone_at is None:
                counts.gone_at = now
            elif now - counts.gone_at >= FORGET_S:
                del self._models[name]

    @property
    def in_flight(self) -> int:
        """Requests to models under way."""
        return self._in_flight

    def traffic(self) -> Iterator[ModelTraffic]:
        """Return the counts of each model, for the history."""
        none = self._without_model
        yield ModelTraffic("", sum(none.values()), errors_in(none), 0, 0, None)
        for model, counts in self._models.items():
            requests, tokens = counts.requests, counts.tokens
            number, errors = sum(requests.values()), errors_in(requests)
            yield ModelTraffic(model, number, errors, tokens.input, tokens.output, counts.first_byte)

    async def watch_loop_forever(self) -> None:
        """Measure how late the event loop is: how long after its time a task goes on that has slept."""
        while True:
            due = trio.current_time() + LOOP_S
            await trio.sleep_until(due)
            self._loop_delay.add(trio.current_time() - due)

    def families(self) -> Iterator[Families]:
        """Return the current state and the counts, in parts that each need a millisecond or two."""
        self._forget(trio.current_time())
        is_loaded, loads = (yield from self._fleet.families()), self._loads
        loads.forget(self._directory.names())
        for metric in itertools.chain(
            self._families(), loads.families(is_loaded), self._process.collect(),
            *(families() for families in self.others),
        ):  # fmt: skip
            yield from families_of(metric)

    def _families(self) -> Iterable[Metric]:
        """Make families of the counts."""
        yield family("ichat_requests_in_flight", self._in_flight)
        models = list(self._models.items())
        by_model = [("", self._without_model), *((model, counts.requests) for model, counts in models)]
        yield family(
            "ichat_requests",
            {(model, route, str(status)): n for model, ended in by_model for (route, status), n in list(ended.items())},
        )
        yield token_family("ichat_tokens", [(model, counts.tokens) for model, counts in models])
        for name, spread_of in _OF_MODELS.items():
            yield histogram_family(name, [(model, spread_of(counts)) for model, counts in models])
        yield from prefix_families(
            [(model, counts.prefixes) for model, counts in models if counts.prefixes], len(self._balancer.prefixes)
        )
        yield from self._aliases.families()
        yield from self.shadows.families()
        yield gap_family([(model, counts.gaps) for model, counts in models])
        yield histogram_family("ichat_overhead_seconds", self._overhead)
        yield histogram_family("ichat_event_loop_delay_seconds", self._loop_delay)
        yield family("ichat_refusals", self._refusals)
        keys = list(self._keys.items())
        yield family("ichat_key_requests", {name: counts.requests for name, counts in keys})
        yield family("ichat_key_refusals", {name: counts.refusals for name, counts in keys})
        yield token_family("ichat_key_tokens", [(name, counts.tokens) for name, counts in keys])
        yield family("ichat_requests_cancelled", self._cancelled)
        yield family("ichat_relay_bytes", self._bytes)
        yield family("ichat_relay_chunks", self._chunks)
        yield family("ichat_build_info", {__version__: 1})
