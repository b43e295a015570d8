"""Counts beside those of each request: names for models, copies, loads, and prefixes."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

import attrs
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ichat.observability.prometheus_families import (
    Histogram,
    counter_family,
    gauge_family,
    histogram_family_by_model,
    labelled_counter,
)
from ichat.observability.request_record import OTHER, RequestRecord
from ichat.routing.prefix_chain import PrefixChain

SERIES_MAX = 1000
"""Series of each family; if reloads bring more names, the others are counted together."""
_LOAD_S = (1, 2.5, 5, 10, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1200, 1800)
_COPY_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_HOLDERS = (0, 1, 2, 3, 4)


class SeriesTable:
    """A counter with labels, of which the first two are an alias and a model of the configuration."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self._name, self._text, self._labels = name, text, labels
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
        return labelled_counter(self._name, self._text, self._labels, self.series)


class AliasCounts:
    """Requests for names that stand for models: which model answered, and why others did not."""

    def __init__(self) -> None:
        self._requests = SeriesTable(
            "ichat_alias_requests",
            "Requests for names that stand for models, by the model that answered or was asked last.",
            ("alias", "model"),
        )
        self._passed = SeriesTable(
            "ichat_alias_fallbacks",
            "How often a request went on from a model to the next one of its name, by the reason.",
            ("alias", "model", "reason"),
        )

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
        self._copies = SeriesTable(
            "ichat_shadow_requests",
            "Copies of requests for a shadow, by the status of the response, or why there is none.",
            ("alias", "model", "result"),
        )
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
        yield histogram_family_by_model(
            "ichat_shadow_seconds", "From the start of a copy to the end of its response.", list(self._seconds.items())
        )
        yield counter_family("ichat_shadow_tokens", "Tokens of copies, where responses say it.", "model", self._tokens)


@attrs.define(eq=False)
class LoadCounts:
    """The loads of each model since the gateway's start. The configuration bounds how many models these are."""

    swaps: int = 0
    """Workers that were evicted to make room for another worker."""
    loads: Counter[tuple[str, str, str]] = attrs.field(factory=Counter[tuple[str, str, str]])
    """By model, reason and result."""
    seconds: dict[str, Histogram] = attrs.field(factory=dict[str, Histogram])

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
        text = "Loads of models, by why they were begun and how they ended."
        yield labelled_counter("ichat_model_loads", text, ("model", "reason", "result"), self.loads)
        yield histogram_family_by_model(
            "ichat_model_load_seconds", "From the start of a load to the model's readiness.", list(self.seconds.items())
        )
        yield CounterMetricFamily("ichat_swaps", "Workers that were evicted to make room for another one.", self.swaps)
        yield gauge_family(
            "ichat_model_loaded", "1 for a model of on-demand workers that is loaded, 0 for one that is not.", "model",
            {model: float(loaded) for model, loaded in is_loaded.items()},
        )  # fmt: skip


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


_PREFIX_COUNTERS = (
    (
        "ichat_prefix_spills",
        "Requests that went elsewhere than to an endpoint that held the most.",
        attrgetter("spills"),
    ),
    (
        "ichat_prefix_corrections",
        "Responses that showed that far less was cached than was believed.",
        attrgetter("wrong"),
    ),
    (
        "ichat_prefix_reported_evictions",
        "Beginnings of prompts that a worker reported as gone from its cache.",
        attrgetter("evicted"),
    ),
)


def prefix_families(found: Sequence[tuple[str, PrefixCounts]], entries: int) -> Iterable[Metric]:
    """Return the families of where requests with a common beginning went, of models with several endpoints."""
    yield GaugeMetricFamily("ichat_prefix_entries", "Beginnings of prompts that are remembered.", entries)
    text = "Bytes of prompts: `matched` were believed to be in the cache of the endpoint that was chosen."
    sizes = [(model, (("matched", one.matched_bytes), ("all", one.all_bytes))) for model, one in found]
    series = {(model, kind): size for model, of_kinds in sizes for kind, size in of_kinds}
    yield labelled_counter("ichat_prefix_bytes", text, ("model", "kind"), series)
    for name, text, number_of in _PREFIX_COUNTERS:
        yield counter_family(name, text, "model", {model: number_of(counts) for model, counts in found})
    yield histogram_family_by_model(
        "ichat_prefix_holders", "How many endpoints were believed to hold a part of a request's prompt.",
        [(model, counts.holders) for model, counts in found],
    )  # fmt: skip
