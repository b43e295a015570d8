"""The history: the gateway's activity in the last hour, a sample every few seconds, in a ring of bounded size.

A sample is made of differences between what metrics count, so that no request pays for it.
"""

import json
import math
import time
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import attrs
import trio

from ichat.config.schema import Config, HistorySettings
from ichat.fleet.model_directory import ModelDirectory
from ichat.fleet.views import load_of
from ichat.fleet.worker_table import WorkerTable
from ichat.listeners import Listeners
from ichat.observability.prometheus_families import Histogram
from ichat.observability.request_record import CLIENT_LEFT
from ichat.routing.balancer import Balancer

MODELS_MAX = 50
"""Models that have series of their own, at most."""
WORKERS_MAX = 256
"""Workers that have series of their own, at most."""
WORKERS_AT_ONCE = 256
"""How many workers are looked at in a step."""
NAN = math.nan
COLUMNS: Sequence[str] = (
    "at", "requests", "errors", "input_tokens", "output_tokens", "in_flight", "queued", "ttft_p50_ms", "ttft_p95_ms",
    "kv_use",
)  # fmt: skip
OF_MODEL: Sequence[str] = ("requests", "output_tokens", "ttft_p50_ms", "in_flight", "queued")
OF_WORKER: Sequence[str] = ("kv_use", "in_flight")
Values = Mapping[str, float]
"""A sample by the names of its columns; NaN for unknown values."""


class ModelTraffic(NamedTuple):
    """The counts of a model since the gateway's start."""

    model: str
    """Empty for requests without a model."""
    requests: int
    errors: int
    input_tokens: int
    output_tokens: int
    first_byte: Histogram | None
    """From arrival to the first byte of the response's body."""


class TrafficCounts(Protocol):
    """Counts the requests to models."""

    @property
    def in_flight(self) -> int:
        """Requests to models under way."""
        ...

    def traffic(self) -> Iterable[ModelTraffic]:
        """Return the counts of each model."""
        ...


@attrs.frozen
class Sample:
    """A moment, and the events since the previous sample."""

    total: Values
    models: Mapping[str, Values]
    workers: Mapping[str, Values]

    def describe(self) -> Mapping[str, Any]:
        """Return it as JSON can hold it."""
        models = {name: _shown_values(values) for name, values in self.models.items()}
        workers = {name: _shown_values(values) for name, values in self.workers.items()}
        return _shown_values(self.total) | {"models": models, "workers": workers}


class _Series:
    """The columns of a thing, each as long as the ring."""

    __slots__ = ("columns", "written_at")

    def __init__(self, names: Sequence[str], length: int) -> None:
        self.columns = {name: array("d" if name == "at" else "f", [NAN]) * length for name in names}
        self.written_at = 0
        """The number of the last sample that it is in."""


class History:
    """The ring of samples; it holds at most some three megabytes with its usual length."""

    def __init__(
        self,
        settings: HistorySettings,
        table: WorkerTable,
        directory: ModelDirectory,
        balancer: Balancer,
        *,
        traffic: TrafficCounts,
        models_max: int = MODELS_MAX,
        workers_max: int = WORKERS_MAX,
    ) -> None:
        self._table = table
        self._directory = directory
        self._balancer = balancer
        self._traffic = traffic
        self._models_max = models_max
        self._workers_max = workers_max
        self._before: dict[str, tuple[ModelTraffic, list[int]]] = {}
        """The counts at the last sample, and its histogram."""
        self.sampled: Listeners[[Sample]] = Listeners()
        """Called with each new sample."""
        self._settings = settings
        self._clear()

    def __repr__(self) -> str:
        return f"<History of {min(self._count, self._length)} samples, {len(self._models)} models>"

    def _clear(self) -> None:
        self._length = max(1, round(self._settings.seconds / self._settings.sample_s))
        self._count = 0
        self._total = _Series(COLUMNS, self._length)
        self._models: dict[str, _Series] = {}
        self._workers: dict[str, _Series] = {}

    def reconfigure(self, config: Config) -> None:
        """Use another length or interval from now on; earlier samples are forgotten then."""
        if config.history != self._settings:
            self._settings = config.history
            self._clear()

    async def sample_forever(self) -> NoReturn:
        """Add a sample at each interval."""
        self._count_traffic()
        while True:
            await trio.sleep(self._settings.sample_s)
            sample = await self._sample()
            self._add(sample)
            self.sampled(sample)

    async def _sample(self) -> Sample:
        """Return the events since the last sample, and the current state."""
        models, total, first_byte = self._count_traffic()
        workers, known = dict[str, Values](), list[float]()
        for number, worker in enumerate(self._table):
            if number % WORKERS_AT_ONCE == WORKERS_AT_ONCE - 1:
                await trio.lowlevel.checkpoint()
            endpoint, heartbeat = self._table.endpoint_of(worker), worker.heartbeat
            kv_use = heartbeat.progress.get("kv_use") if heartbeat and not worker.is_down else None
            if kv_use is not None:
                known.append(kv_use)
            if len(workers) < self._workers_max and endpoint is not None:
                workers[worker.id] = {"kv_use": NAN if kv_use is None else kv_use, "in_flight": endpoint.in_flight}
        total |= {
            "at": round(time.time(), 3),
            "in_flight": self._traffic.in_flight,
            "queued": self._balancer.waiting,
            "ttft_p50_ms": percentile_ms(first_byte, 0.5),
            "ttft_p95_ms": percentile_ms(first_byte, 0.95),
            "kv_use": sum(known) / len(known) if known else NAN,
        }
        return Sample(total, models, workers)

    def _count_traffic(self) -> tuple[dict[str, Values], dict[str, float], Histogram]:
        """Return the counts since the last call: of each model, in total, and the histogram of first-byte times."""
        models, total = dict[str, Values](), dict.fromkeys(COLUMNS[1:5], 0.0)
        before, self._before, now = self._before, {}, trio.current_time()
        all_first_bytes = Histogram(())
        for new in self._traffic.traffic():
            old, old_counts = before.get(new.model, (_NOTHING, []))
            new_counts = list(new.first_byte.counts) if new.first_byte is not None else []
            self._before[new.model] = new, new_counts
            earlier = old_counts or [0] * len(new_counts)
            since = [max(0, count - known) for count, known in zip(new_counts, earlier, strict=True)]
            passed = {name: max(0, getattr(new, name) - getattr(old, name)) for name in total}
            for name, value in passed.items():
                total[name] += value
            spread = Histogram(())
            if new.first_byte is not None:
                spread = Histogram(new.first_byte.bounds, since)
                all_first_bytes = _joined(all_first_bytes, spread)
            queued, working = self._balancer.waiting_for(new.model), 0
            is_shown = new.model in self._models or (
                len(models) < self._models_max and bool(passed["requests"] or queued)
            )
            if new.model and is_shown:
                working = load_of(self._directory.availability(new.model), now)["in_flight"]
                models[new.model] = {
                    "requests": passed["requests"],
                    "output_tokens": passed["output_tokens"],
                    "ttft_p50_ms": percentile_ms(spread, 0.5),
                    "in_flight": working,
                    "queued": queued,
                }
        return models, total, all_first_bytes

    def _add(self, sample: Sample) -> None:
        """Write a sample over the oldest sample."""
        self._count += 1
        self._write(self._total, sample.total)
        self._write_each(self._models, sample.models, OF_MODEL, self._models_max)
        self._write_each(self._workers, sample.workers, OF_WORKER, self._workers_max)

    def _write_each(
        self, series: dict[str, _Series], values: Mapping[str, Values], names: Sequence[str], series_max: int
    ) -> None:
        """Write the values of each thing; a series without values makes room for another series."""
        for name in [name for name, one in series.items() if self._count - one.written_at >= self._length]:
            del series[name]
        for name in values:
            if name not in series and len(series) < series_max:
                series[name] = _Series(names, self._length)
        for name, one in series.items():
            self._write(one, values.get(name))

    def _write(self, series: _Series, values: Values | None) -> None:
        if values is not None:
            series.written_at = self._count
        for name, column in series.columns.items():
            column[(self._count - 1) % self._length] = NAN if values is None else values[name]

    def parts(self, workers: Collection[str] | None = None) -> Iterator[str]:
        """Return the ring as JSON in parts: columns, oldest sample first; with these workers, or all of them."""
        columns = json.dumps(self._columns_of(self._total))
        yield f'{{"sample_s": {json.dumps(self._settings.sample_s)}, "columns": {columns}, "models": {{'
        yield from self._parts_of(self._models, self._models)
        yield '}, "workers": {'
        yield from self._parts_of(self._workers, self._workers if workers is None else workers)
        yield "}}"

    def _parts_of(self, series: Mapping[str, _Series], names: Collection[str]) -> Iterator[str]:
        found = [(name, series[name]) for name in series if name in names]
        for number, (name, one) in enumerate(found):
            yield f"{', ' if number else ''}{json.dumps(name)}: {json.dumps(self._columns_of(one))}"

    def _columns_of(self, series: _Series) -> Mapping[str, Sequence[float | None]]:
        start = self._count % self._length if self._count > self._length else 0
        count = min(self._count, self._length)
        return {
            name: [_shown(value) for value in (*column[start:count], *column[:start])]
            for name, column in series.columns.items()
        }


_NOTHING = ModelTraffic("", 0, 0, 0, 0, None)


def _joined(one: Histogram, other: Histogram) -> Histogram:
    """Return the counts of both; an empty histogram is allowed, all others have the same bounds."""
    if not one.bounds:
        return other
    return Histogram(one.bounds, [first + second for first, second in zip(one.counts, other.counts, strict=True)])


def percentile_ms(spread: Histogram, share: float) -> float:
    """Return the milliseconds that a share of the values does not exceed, according to the buckets; NaN without any."""
    total = sum(spread.counts)
    if not total or not spread.bounds:
        return NAN
    wanted, below, lower = share * total, 0, 0.0
    for bound, count in zip(spread.bounds, spread.counts, strict=False):
        if count and below + count >= wanted:
            return round((lower + (bound - lower) * (wanted - below) / count) * 1000, 1)
        below, lower = below + count, bound
    return round(spread.bounds[-1] * 1000, 1)


def _shown(value: float) -> float | None:
    if math.isnan(value):
        return None
    return int(value) if value == int(value) else round(value, 3)


def _shown_values(values: Values) -> dict[str, float | None]:
    return {name: _shown(value) for name, value in values.items()}


def errors_in(requests: Mapping[tuple[str, int], int]) -> int:
    """Return how many of the requests by route and status failed; a client that left is no error."""
    return sum(count for (_, status), count in requests.items() if status >= 400 and status != CLIENT_LEFT)
