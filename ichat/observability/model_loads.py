"""Counts of loading and evicting the models of on-demand workers."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping

import attrs
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily

from ichat.observability.prometheus_families import Histogram, gauge_family, histogram_family_by_model

_LOAD_S = (1, 2.5, 5, 10, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1200, 1800)


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
        loads = CounterMetricFamily(
            "ichat_model_loads",
            "Loads of models, by why they were begun and how they ended.",
            labels=("model", "reason", "result"),
        )
        for key, count in list(self.loads.items()):
            loads.add_metric(key, count)
        yield loads
        yield histogram_family_by_model(
            "ichat_model_load_seconds", "From the start of a load to the model's readiness.", list(self.seconds.items())
        )
        yield CounterMetricFamily("ichat_swaps", "Workers that were evicted to make room for another one.", self.swaps)
        yield gauge_family(
            "ichat_model_loaded", "1 for a model of on-demand workers that is loaded, 0 for one that is not.", "model",
            {model: float(loaded) for model, loaded in is_loaded.items()},
        )  # fmt: skip
