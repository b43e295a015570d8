"""Prometheus' text format: expositions of workers, read as lines that get more labels, and the gateway's own.

Text stays text: a sample is a line. All lines of a family stand together, from all workers.
Long work is done in steps of a millisecond or two, between which the caller gives other tasks their turn.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping

import attrs

LINES_AT_ONCE = 500
"""The lines in a step."""
TWINS = (
    ("vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc"),
    ("vllm:time_per_output_token_seconds", "vllm:inter_token_latency_seconds"),
)
"""Old and new names of vLLM's metrics: if either is there, both are shown."""

SAMPLES_MAX = 50_000
"""The most samples that are shown of a worker; an engine has a thousand or two."""
NUMBER_CHARACTERS_MAX = 64

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_HEAD = re.compile(
    r"#[ \t]+(?:HELP[ \t]+([a-zA-Z_:][a-zA-Z0-9_:]*)[ \t]+(.*)"
    r"|TYPE[ \t]+([a-zA-Z_:][a-zA-Z0-9_:]*)[ \t]+(counter|gauge|histogram|summary|untyped)[ \t]*)"
)
_VALUE = re.compile(
    r"[ \t]*([-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?|[-+]?Inf|NaN)(?:[ \t]+-?[0-9]{1,18})?[ \t]*"
)
"""A number as Prometheus reads it, with or without a time behind it. Prometheus refuses the whole answer otherwise."""
_PLAIN = r'[^"\\\x00-\x1f\x7f]*'
_TEXT = rf'"{_PLAIN}(?:\\[\\n"]{_PLAIN})*"'
_LABEL = re.compile(rf"([a-zA-Z_][a-zA-Z0-9_]*)={_TEXT}")
_LABELS = re.compile(rf"(?:[a-zA-Z_][a-zA-Z0-9_]*={_TEXT}(?:,|\Z))*")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_OURS = re.compile(r"ichat_(?!worker_(?:in_flight|load_seconds)\b|engine_)")
"""Names of the gateway's own metrics, which no worker may have."""
_SUFFIXES = frozenset(("", "_bucket", "_sum", "_count", "_total", "_created", "_info"))


@attrs.define
class MetricFamily:
    """The lines of a metric."""

    head: dict[str, str] = attrs.field(factory=dict[str, str])
    """The lines that begin with `# HELP` and `# TYPE`."""
    samples: list[str] = attrs.field(factory=list[str])


Families = dict[str, MetricFamily]


class _Reader:
    """Reads a worker's exposition, line by line, into families."""

    def __init__(self, text: str, labels: Mapping[str, str], families: Families, samples_max: int) -> None:
        self._samples_max = samples_max
        self._labels = labels
        self._added = ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items())
        self._clashes = any(f'{name}="' in text for name in labels)
        self._families = families
        self._name, self._family = "", MetricFamily()
        """The family of the newest line."""
        self._last = ""
        """The name of the newest sample; the next sample of this name has the same family."""
        self._count = 0

    def read_head(self, line: str) -> None:
        """Read a comment: a family begins with each HELP or TYPE."""
        head = _HEAD.fullmatch(line)
        name = (head[1] or head[3]) if head is not None else ""
        if head is not None and not self._is_ours(name):
            self._name, self._last = name, ""
            self._family = self._families.setdefault(name, MetricFamily())
            self._family.head.setdefault("HELP" if head[1] else "TYPE", _CONTROL.sub("?", line))

    def read_sample(self, line: str) -> None:
        """Read a sample, and leave it out if Prometheus would refuse it."""
        name, labels, value = _parts_of(line)
        if self._count == self._samples_max or not (name == self._last or self._begin(name)):
            return
        if not _is_value(value) or not _LABELS.fullmatch(labels):
            return
        if self._clashes:
            labels = _LABEL.sub(self._renamed, labels)
        if labels and not _has_each_once(labels):
            return
        self._count += 1
        both = ",".join(filter(None, (self._added, labels)))
        self._family.samples.append(f"{name}{{{both}}} {value}" if both else f"{name} {value}")

    def _begin(self, name: str) -> bool:
        """Find the family of the first sample of a name; return whether there may be such samples."""
        if not _NAME.fullmatch(name) or self._is_ours(name):
            return False
        self._last = name
        if not (name.startswith(self._name) and name[len(self._name) :] in _SUFFIXES):
            self._name, self._family = name, self._families.setdefault(name, MetricFamily())
        return True

    def _is_ours(self, name: str) -> bool:
        return bool(self._added and _OURS.match(name))

    def _renamed(self, label: re.Match[str]) -> str:
        return f"exported_{label[0]}" if label[1] in self._labels else label[0]


def read_steps(
    text: str, labels: Mapping[str, str], families: Families, samples_max: int = SAMPLES_MAX
) -> Iterator[None]:
    """Parse an exposition in steps, and add labels to each sample; the result goes into `families`, by name.

    A label of such a name that is there already becomes `exported_...`. Lines that Prometheus would refuse are left
    out, since Prometheus reads either a whole answer or nothing.
    """
    reader = _Reader(text, labels, families, samples_max)
    for number, line in enumerate(text.split("\n"), 1):
        if number % LINES_AT_ONCE == 0:
            yield
        if line.startswith("#"):
            reader.read_head(line)
        else:
            reader.read_sample(line)


def _parts_of(line: str) -> tuple[str, str, str]:
    """Split a sample into its name, its labels, and the rest."""
    name, brace, rest = line.partition("{")
    if brace:
        labels, end, value = rest.rpartition("} ")
        return name, labels, value if end else ""
    name, _, value = line.partition(" ")
    return name, "", value


def _is_value(text: str) -> bool:
    """Return whether this is a number that Prometheus reads, with or without a time behind it."""
    if len(text) > NUMBER_CHARACTERS_MAX or (match := _VALUE.fullmatch(text)) is None:
        return False
    number = match[1]
    return "e" not in number.lower() or math.isfinite(float(number))


def _has_each_once(labels: str) -> bool:
    """Return whether no name of a label is there twice."""
    names = _LABEL.findall(labels)
    return len(names) == len(set(names))


def escaped(value: str) -> str:
    """Return the value of a label as it stands between its quotes."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def add_twins(families: Families) -> None:
    """Show each metric that has an old and a new name by both names."""
    for pair in TWINS:
        for one, other in (pair, pair[::-1]):
            family = families.get(one)
            if family is not None and other not in families:
                head = {kind: line.replace(one, other, 1) for kind, line in family.head.items()}
                families[other] = MetricFamily(head, [other + line[len(one) :] for line in family.samples])


def written(parts: Iterable[Families]) -> Iterator[str]:
    """Return an exposition in short texts: the lines of a family from all parts stand together, under a single head."""
    together: dict[str, list[MetricFamily]] = {}
    for families in parts:
        yield ""
        for name, family in families.items():
            if family.samples or family.head:
                together.setdefault(name, []).append(family)
    for same in together.values():
        head = {kind: line for family in reversed(same) for kind, line in family.head.items()}
        lines = [head[kind] for kind in ("HELP", "TYPE") if kind in head]
        for family in same:
            lines += family.samples
            if lines:
                yield "\n".join(lines) + "\n"
            lines = []
