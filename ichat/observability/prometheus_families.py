"""Prometheus' families, made of the gateway's counts and of its state at a given moment."""

import functools
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import attrs
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from ichat.config.package_data import read_toml
from ichat.hardware.machines import MachineView
from ichat.http.body_mover import ChunkGapHistogram
from ichat.observability.exposition import LINES_AT_ONCE, Families, MetricFamily, escaped
from ichat.observability.request_record import UsedTokens

MACHINES_AT_ONCE = 16
"""How many machines' GPUs are looked at in a step."""
GPUS_SHOWN_MAX = 4096
"""After this many GPUs no more machines are shown: workers that joined may report any number."""
_MAKERS = {"gauges": GaugeMetricFamily, "counters": CounterMetricFamily, "histograms": HistogramMetricFamily}
_OF_GPUS = (
    "info", "failed", "utilization_ratio", "memory_used_bytes", "memory_total_bytes", "memory_worker_bytes",
)  # fmt: skip
"""The ends of the names of the families of GPUs."""
_GAP_S = tuple(2.0**index / 1000 for index in range(17))


def _no_counts(of: "Histogram") -> list[int]:
    return [0] * (len(of.bounds) + 1)


@attrs.define(eq=False)
class Histogram:
    """Counts of values by their size."""

    bounds: Sequence[float]
    counts: list[int] = attrs.Factory(_no_counts, takes_self=True)
    """How many values were at most each bound and more than the bound before; the last: more than all bounds."""
    sum: float = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@attrs.define(eq=False)
class TokenCounts:
    """How many tokens requests used; `cached` is a part of the `input`."""

    input: int = 0
    output: int = 0
    cached: int = 0

    def add(self, usage: UsedTokens) -> None:
        """Count the tokens of a request."""
        self.input += usage.input
        self.output += usage.output
        self.cached += usage.cached


def gpu_families_in_parts(machines: Iterator[MachineView], shown_max: int = GPUS_SHOWN_MAX) -> Iterable[Metric]:
    """Return the families of GPUs, of some machines at a time."""
    shown = 0
    while shown < shown_max and (some := list(itertools.islice(machines, MACHINES_AT_ONCE))):
        shown += sum(len(machine.gpus or ()) for machine in some)
        yield from gpu_families(some)


def gpu_families(machines: Iterable[MachineView]) -> Iterable[Metric]:
    """Return families of GPUs, each GPU once; memory held by workers is a part of the used memory, by another name."""
    found: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in _OF_GPUS}
    for machine in machines:
        for seen in machine.gpus or ():
            gpu, of_it = seen.gpu, (machine.name, seen.label)
            found["info"][(*of_it, gpu.uuid, gpu.name)] = 1
            numbers = (float(bool(gpu.failure)), gpu.use, gpu.memory_used_bytes, gpu.memory_total_bytes)
            for name, value in zip(_OF_GPUS[1:5], numbers, strict=True):
                if value is not None:
                    found[name][of_it] = value
            found["memory_worker_bytes"].update({(*of_it, worker): size for worker, size in seen.held.items()})
    return [family(f"ichat_gpu_{name}", values) for name, values in found.items() if values]


@functools.cache
def _described(name: str) -> tuple[Callable[..., Any], Sequence[str], str]:
    """Return how a family of this name in `metrics.toml` is made, its labels, and its help."""
    for kind, tables in read_toml("ichat.observability", "metrics.toml").items():
        if name in tables:
            return _MAKERS[kind], tables[name].get("labels", "").split(), tables[name]["help"]
    raise KeyError(name)


def family(name: str, values: float | Mapping[str, float] | Mapping[tuple[str, ...], float]) -> Metric:
    """Return the gauge or counter of this name in `metrics.toml`.

    `values` is a number if there are no labels; else numbers by the value of the label, or by tuples of several values.
    """
    make, labels, text = _described(name)
    found = make(name, text, labels=labels)
    series: Iterable[tuple[Any, float]] = [((), values)] if isinstance(values, int | float) else list(values.items())
    for key, number in series:
        found.add_metric((key,) if isinstance(key, str) else key, number)
    return found


def token_family(name: str, values: Iterable[tuple[str, TokenCounts]]) -> Metric:
    """Return a counter of tokens; its second label is their direction."""
    return family(name, {
        (value, direction): getattr(counts, direction)
        for value, counts in values for direction in ("input", "output", "cached")
    })  # fmt: skip


def histogram_family(name: str, spreads: Histogram | Iterable[tuple[str, Histogram]]) -> Metric:
    """Return the histogram of this name in `metrics.toml`; if it has a label, `spreads` are by its values."""
    make, labels, text = _described(name)
    found = make(name, text, labels=labels)
    for value, spread in [("", spreads)] if isinstance(spreads, Histogram) else spreads:
        buckets = _buckets(spread.bounds, list(spread.counts))
        found.add_metric([value] if labels else [], buckets, spread.sum)
    return found


def gap_family(gaps: Iterable[tuple[str, ChunkGapHistogram]]) -> Metric:
    """Return the histogram of the gaps that relays have counted, for each model."""
    make, labels, text = _described("ichat_chunk_gap_seconds")
    found, bounded = make("ichat_chunk_gap_seconds", text, labels=labels), len(_GAP_S)
    for model, counts in gaps:
        found.add_metric((model,), _buckets(_GAP_S, [*counts[:bounded], sum(counts[bounded:-1])]), counts[-1])
    return found


def _buckets(bounds: Sequence[float], counts: Sequence[float]) -> list[tuple[str, float]]:
    """Add counts up as Prometheus has them: how many were at most each bound."""
    return list(zip([*(str(float(bound)) for bound in bounds), "+Inf"], accumulate(counts), strict=True))


def families_of(metric: Metric) -> Iterator[Families]:
    """Return a family as the lines of Prometheus' text format, in parts that are short.

    prometheus_client writes the same, but all families at once, and is several times as slow.
    """
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    text = metric.documentation.replace("\\", r"\\").replace("\n", r"\n")
    head = {"HELP": f"# HELP {name} {text}", "TYPE": f"# TYPE {name} {metric.type}"}
    lines = list[str]()
    for sample in metric.samples:
        if len(lines) == LINES_AT_ONCE:
            yield {name: MetricFamily(head, lines)}
            lines = []
        labels = ",".join([f'{label}="{escaped(value)}"' for label, value in sorted(sample.labels.items())])
        value = _number(sample.value)
        lines.append(f"{sample.name}{{{labels}}} {value}" if labels else f"{sample.name} {value}")
    yield {name: MetricFamily(head, lines)}


def _number(value: float) -> str:
    text = repr(float(value))
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(text, text)
