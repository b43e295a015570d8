"""Counts of requests that were routed by their prefix."""

from collections.abc import Iterable, Sequence

import attrs
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ichat.observability.prometheus_families import Histogram, counter_family, histogram_family_by_model
from ichat.routing.prefix_chain import PrefixChain

_HOLDERS = (0, 1, 2, 3, 4)


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


def prefix_families(found: Sequence[tuple[str, PrefixCounts]], entries: int) -> Iterable[Metric]:
    """Return the families of where requests with a common beginning went, of models with several endpoints."""
    yield GaugeMetricFamily("ichat_prefix_entries", "Beginnings of prompts that are remembered.", entries)
    matched = CounterMetricFamily(
        "ichat_prefix_bytes",
        "Bytes of prompts: `matched` were believed to be in the cache of the endpoint that was chosen.",
        labels=("model", "kind"),
    )
    for model, counts in found:
        matched.add_metric((model, "matched"), counts.matched_bytes)
        matched.add_metric((model, "all"), counts.all_bytes)
    yield matched
    yield counter_family(
        "ichat_prefix_spills", "Requests that went elsewhere than to an endpoint that held the most.", "model",
        {model: counts.spills for model, counts in found},
    )  # fmt: skip
    yield counter_family(
        "ichat_prefix_corrections", "Responses that showed that far less was cached than was believed.",
        "model", {model: counts.wrong for model, counts in found},
    )  # fmt: skip
    yield counter_family(
        "ichat_prefix_reported_evictions", "Beginnings of prompts that a worker reported as gone from its cache.",
        "model", {model: counts.evicted for model, counts in found},
    )  # fmt: skip
    yield histogram_family_by_model(
        "ichat_prefix_holders", "How many endpoints were believed to hold a part of a request's prompt.",
        [(model, counts.holders) for model, counts in found],
    )  # fmt: skip
