"""Counts beside those of each request: names for models, copies, loads, and prefixes."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Literal

import attrs
from prometheus_client import Metric

from ichat.observability.prometheus_families import (
    Histogram,
    family,
    histogram_family,
)
from ichat.observability.request_record import OTHER, RequestRecord
from ichat.routing.prefix_chain import PrefixChain

LaunchResult = Literal["ready", "failed", "no_place", "stopped"]
"""`failed` has ended before it was ready, `stopped` too, by the gateway's wish; `no_place` has waited for a place."""
SERIES_MAX = 1000
"""Series of each family; if reloads bring more names, the others are counted together."""
_LOAD_S = (1, 2.5, 5, 10, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1200, 1800)
_COPY_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_HOLDERS = (0, 1, 2, 3, 4)


class SeriesTable:
    """A counter with labels, of which the first two are an alias and a model of the configuration."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.series: dict[tuple[str, ...], int] = {}

    def __repr__(self) -> str:
        return f"<SeriesTable {self._name}: {len(self.series)} series>"

    def add(self, alias: str, model: str, *others: str) -> None:
        """Add 1 for these values of the labels."""
        key = (alias, model, *others)
        if key not in self.series and len(self.series) >= SERIES_MAX:
            key = (OTHER, OTHER, *others)
        self.series[key] = self.series.get(key, 0) + 1

    def family(self) -> Metric:
        """Return the family with the current counts."""
        return family(self._name, self.series)


class AliasCounts:
    """Requests for names that stand for models: which model answered, and why others did not."""

    def __init__(self) -> None:
        self._requests = SeriesTable("ichat_alias_requests")
        self._passed = SeriesTable("ichat_alias_fallbacks")

    def __repr__(self) -> str:
        return f"<AliasCounts {self._requests!r}>"

    def add(self, record: RequestRecord) -> None:
        """Count a request for such a name."""
        self._requests.add(record.alias, record.model)
        for model, reason in record.passed:
            self._passed.add(record.alias, model, reason)

    def families(self) -> Iterator[Metric]:
        """Return the families with the current counts."""
        yield self._requests.family()
        yield self._passed.family()


class ShadowCounts:
    """Copies for shadows: their results, their durations, and their tokens."""

    def __init__(self) -> None:
        self._copies = SeriesTable("ichat_shadow_requests")
        self._seconds: dict[str, Histogram] = {}
        self._tokens: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<ShadowCounts {self._copies!r}>"

    def add(self, alias: str, model: str, result: str) -> None:
        """Count a copy by its result: the status of its response, or why there was none."""
        self._copies.add(alias, model, result)

    def add_response(self, model: str, seconds: float, tokens: int) -> None:
        """Count the duration of a whole response, and the tokens that it says were used."""
        if model not in self._seconds and len(self._seconds) >= SERIES_MAX:
            model = OTHER
        self._seconds.setdefault(model, Histogram(_COPY_S)).add(seconds)
        self._tokens[model] = self._tokens.get(model, 0) + tokens

    def families(self) -> Iterator[Metric]:
        """Return the families with the current counts; none if there were no copies."""
        if not self._copies.series:
            return
        yield self._copies.family()
        yield histogram_family("ichat_shadow_seconds", list(self._seconds.items()))
        yield family("ichat_shadow_tokens", self._tokens)


@attrs.define(eq=False)
class LoadCounts:
    """The loads of each model, and the launches of workers, since the gateway's start.

    The configuration bounds how many models these are.
    """

    swaps: int = 0
    """Workers that were evicted to make room for another worker."""
    loads: Counter[tuple[str, str, str]] = attrs.field(factory=Counter[tuple[str, str, str]])
    """By model, reason and result."""
    seconds: dict[str, Histogram] = attrs.field(factory=dict[str, Histogram])
    launches: Counter[tuple[str, LaunchResult]] = attrs.field(factory=Counter[tuple[str, LaunchResult]])
    """By launcher (`here` or `ray`) and result; adopted launches do not count again."""
    launch_seconds: dict[str, Histogram] = attrs.field(factory=dict[str, Histogram])

    def launched(self, launcher: str, result: LaunchResult, seconds: float | None = None) -> None:
        """Count a launch that has ended, or led to a ready worker after `seconds`."""
        self.launches[launcher, result] += 1
        if seconds is not None:
            self.launch_seconds.setdefault(launcher, Histogram(_LOAD_S)).add(seconds)

    def loaded(self, model: str, reason: str, result: str, seconds: float | None = None) -> None:
        """Count a load that has ended; `seconds` is its duration, if the model is ready now."""
        self.loads[model, reason, result] += 1
        if seconds is not None:
            self.seconds.setdefault(model, Histogram(_LOAD_S)).add(seconds)

    def forget(self, known: Container[str]) -> None:
        """Forget the models that are not known any more."""
        for key in [key for key in self.loads if key[0] not in known]:
            del self.loads[key]
        for model in [model for model in self.seconds if model not in known]:
            del self.seconds[model]

    def families(self, is_loaded: Mapping[str, bool]) -> Iterable[Metric]:
        """Return the families; `is_loaded` has the models of on-demand workers, and whether one of each is ready."""
        yield family("ichat_model_loads", self.loads)
        yield histogram_family("ichat_model_load_seconds", list(self.seconds.items()))
        yield family("ichat_swaps", self.swaps)
        yield family("ichat_launches", {**self.launches})
        yield histogram_family("ichat_launch_seconds", list(self.launch_seconds.items()))
        yield family("ichat_model_loaded", {model: float(loaded) for model, loaded in is_loaded.items()})


@attrs.define(eq=False)
class PrefixCounts:
    """Counts of the requests of a model that were routed by their prefix."""

    matched_bytes: int = 0
    all_bytes: int = 0
    spills: int = 0
    wrong: int = 0
    evicted: int = 0
    holders: Histogram = attrs.field(factory=lambda: Histogram(_HOLDERS))

    def add(self, prefix: PrefixChain) -> None:
        """Count a request."""
        self.matched_bytes += prefix.matched
        self.all_bytes += prefix.length
        self.spills += prefix.matched < prefix.deepest
        self.wrong += prefix.was_wrong
        self.holders.add(prefix.holders)


_PREFIX_COUNTERS = {
    "ichat_prefix_spills": attrgetter("spills"),
    "ichat_prefix_corrections": attrgetter("wrong"),
    "ichat_prefix_reported_evictions": attrgetter("evicted"),
}


def prefix_families(found: Sequence[tuple[str, PrefixCounts]], entries: int) -> Iterable[Metric]:
    """Return the families of where requests with a common beginning went, of models with several endpoints."""
    yield family("ichat_prefix_entries", entries)
    sizes = [(model, (("matched", one.matched_bytes), ("all", one.all_bytes))) for model, one in found]
    yield family("ichat_prefix_bytes", {(model, kind): size for model, of_kinds in sizes for kind, size in of_kinds})
    for name, number_of in _PREFIX_COUNTERS.items():
        yield family(name, {model: number_of(counts) for model, counts in found})
    yield histogram_family("ichat_prefix_holders", [(model, counts.holders) for model, counts in found])
