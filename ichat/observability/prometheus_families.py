"""Prometheus' families, made of the gateway's counts and of its state at a given moment."""

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

import attrs
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from ichat.hardware.machines import MachineView
from ichat.http.body_mover import ChunkGapHistogram
from ichat.observability.exposition import LINES_AT_ONCE, Families, MetricFamily, escaped
from ichat.observability.request_record import UsedTokens

MACHINES_AT_ONCE = 16
"""How many machines' GPUs are looked at in a step."""
GPUS_SHOWN_MAX = 4096
"""After this many GPUs no more machines are shown: workers that joined may report any number."""
_GAP_S = tuple(2.0**index / 1000 for index in range(17))


@attrs.define(eq=False)
class Histogram:
    """Counts of values by their size."""

    bounds: Sequence[float]
    counts: list[int] = attrs.field(init=False)
    """How many values were at most each bound and more than the bound before; the last: more than all bounds."""
    sum: float = 0.0

    def __attrs_post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

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


def gpu_families_in_parts(machines: Iterator[MachineView]) -> Iterable[Metric]:
    """Return the families of GPUs, of some machines at a time."""
    shown = 0
    while shown < GPUS_SHOWN_MAX and (some := list(itertools.islice(machines, MACHINES_AT_ONCE))):
        shown += sum(len(machine.gpus or ()) for machine in some)
        yield from gpu_families(some)


def gpu_families(machines: Iterable[MachineView]) -> Iterable[Metric]:
    """Return families of GPUs, each GPU once; memory held by workers is a part of the used memory, by another name."""
    labels = ("machine", "gpu")
    info = GaugeMetricFamily("ichat_gpu_info", "Which GPU that is.", labels=(*labels, "uuid", "name"))
    failed = GaugeMetricFamily("ichat_gpu_failed", "1 for one that does not answer.", labels=labels)
    use = GaugeMetricFamily(
        "ichat_gpu_utilization_ratio", "Share of the last moments in which it computed, 0 to 1.", labels=labels
    )
    used = GaugeMetricFamily("ichat_gpu_memory_used_bytes", "Memory in use, by whomever.", labels=labels)
    total = GaugeMetricFamily("ichat_gpu_memory_total_bytes", "All of its memory.", labels=labels)
    held = GaugeMetricFamily(
        "ichat_gpu_memory_worker_bytes", "Of the memory in use, what a worker's processes hold.",
        labels=(*labels, "worker"),
    )  # fmt: skip
    for machine in machines:
        for seen in machine.gpus or ():
            gpu, of_it = seen.gpu, (machine.name, seen.label)
            info.add_metric((*of_it, gpu.uuid, gpu.name), 1)
            failed.add_metric(of_it, bool(gpu.failure))
            for family, value in ((use, gpu.use), (used, gpu.memory_used_bytes), (total, gpu.memory_total_bytes)):
                if value is not None:
                    family.add_metric(of_it, value)
            for worker, size in seen.held.items():
                held.add_metric((*of_it, worker), size)
    return [family for family in (info, failed, use, used, total, held) if family.samples]


def gauge_family(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a gauge with a single label."""
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric((value,), number)
    return family


def counter_family(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    """Return a counter with a single label."""
    return labelled_counter(name, text, [label], {(value,): number for value, number in list(values.items())})


def labelled_counter(name: str, text: str, labels: Sequence[str], series: Mapping[tuple[str, ...], int]) -> Metric:
    """Return a counter with several labels."""
    family = CounterMetricFamily(name, text, labels=labels)
    for key, count in list(series.items()):
        family.add_metric(key, count)
    return family


def token_family(name: str, text: str, label: str, values: Iterable[tuple[str, TokenCounts]]) -> Metric:
    """Return a counter of tokens with a label besides their direction."""
    series = {
        (value, direction): getattr(counts, direction)
        for value, counts in values for direction in ("input", "output", "cached")
    }  # fmt: skip
    return labelled_counter(name, text, [label, "direction"], series)


def histogram_family(name: str, text: str, spread: Histogram) -> Metric:
    """Return a histogram without labels."""
    return HistogramMetricFamily(name, text, _buckets(spread.bounds, list(spread.counts)), spread.sum)


def histogram_family_by_model(name: str, text: str, spreads: Iterable[tuple[str, Histogram]]) -> Metric:
    """Return a histogram for each model."""
    family = HistogramMetricFamily(name, text, labels=["model"])
    for model, spread in spreads:
        family.add_metric((model,), _buckets(spread.bounds, list(spread.counts)), spread.sum)
    return family


def gap_family(gaps: Iterable[tuple[str, ChunkGapHistogram]]) -> Metric:
    """Return the histogram of the gaps that relays have counted, for each model."""
    family = HistogramMetricFamily(
        "ichat_chunk_gap_seconds", "Between two pieces of a stream; the sum is of streams that have ended.",
        labels=["model"],
    )  # fmt: skip
    bounded = len(_GAP_S)
    for model, counts in gaps:
        family.add_metric((model,), _buckets(_GAP_S, [*counts[:bounded], sum(counts[bounded:-1])]), counts[-1])
    return family


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
