"""Prometheus' text format: expositions of workers, read as lines that get more labels, and the one that is written.

Text stays text: a sample is a line. The lines of one family stand together, whichever worker they are from.
What is long is done in steps of a millisecond or two, between which the caller gives other tasks their turn.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

import attrs

LINES_AT_ONCE = 500
"""How many lines make one step."""
TWINS = (
    ("vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc"),
    ("vllm:time_per_output_token_seconds", "vllm:inter_token_latency_seconds"),
)
"""Old and new names of vLLM's for the same: where there is one of them, both are shown."""

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_VALUE = re.compile(r"[-+.0-9a-zA-Z]+[ \t]+-?[0-9]+\s*")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="(?:[^"\\]|\\.)*"')
_LABELS = re.compile(r'(?:[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\]|\\.)*",?)*')
_TYPES = frozenset(("counter", "gauge", "histogram", "summary", "untyped"))
_OURS = re.compile(r"ichat_(?!worker_(?:in_flight|load_seconds)\b|engine_)")
"""Names of the gateway's own metrics, which no worker may have."""
_SUFFIXES = frozenset(("", "_bucket", "_sum", "_count", "_total", "_created", "_info"))


@attrs.define
class MetricFamily:
    """The lines of one metric."""

    head: dict[str, str] = attrs.field(factory=dict[str, str])
    """The lines that begin with `# HELP` and `# TYPE`."""
    samples: list[str] = attrs.field(factory=list[str])


Families = dict[str, MetricFamily]


def read_steps(text: str, labels: Mapping[str, str], families: Families) -> Iterator[None]:
    """Take an exposition apart in steps, and add labels to each sample; `families` gets what is found, by name.

    A label of such a name that is there already becomes `exported_...`. Lines that are no samples are left out.
    """

    def renamed(label: re.Match[str]) -> str:
        return f"exported_{label[0]}" if label[1] in labels else label[0]

    added = ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items())
    clashes = any(f'{name}="' in text for name in labels)
    name, family, last, samples = "", MetricFamily(), "", [""]
    for number, line in enumerate(text.split("\n"), 1):
        if number % LINES_AT_ONCE == 0:
            yield
        if line.startswith("#"):
            words = line.split(None, 3)
            is_right = len(words) == 4 and _NAME.fullmatch(words[2]) and not (added and _OURS.match(words[2]))
            if is_right and (words[1] == "HELP" or (words[1] == "TYPE" and words[3] in _TYPES)):
                name, last = words[2], ""
                family = families.setdefault(name, MetricFamily())
                family.head.setdefault(words[1], line)
            continue
        its_name, its_labels, value = _parts_of(line)
        if its_name != last:
            if not _NAME.fullmatch(its_name) or (added and _OURS.match(its_name)):
                continue
            last = its_name
            if not (its_name.startswith(name) and its_name[len(name) :] in _SUFFIXES):
                name, family = its_name, families.setdefault(its_name, MetricFamily())
            samples = family.samples
        if not _is_value(value) or not _LABELS.fullmatch(its_labels):
            continue
        if clashes:
            its_labels = _LABEL.sub(renamed, its_labels)
        both = f"{added},{its_labels}" if added and its_labels else added or its_labels
        samples.append(f"{its_name}{{{both}}} {value}" if both else f"{its_name} {value}")


def _parts_of(line: str) -> tuple[str, str, str]:
    """Take a sample apart: its name, its labels, and what follows."""
    name, brace, rest = line.partition("{")
    if brace:
        labels, end, value = rest.rpartition("} ")
        return name, labels, value if end else ""
    name, _, value = line.partition(" ")
    return name, "", value


def _is_value(text: str) -> bool:
    """Return whether this is a number, with or without a time behind it."""
    try:
        float(text)
    except ValueError:
        return _VALUE.fullmatch(text) is not None
    return True


def escaped(value: str) -> str:
    """Return the value of a label as it stands between its quotes."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def add_twins(families: Families) -> None:
    """Show what has an old and a new name by both."""
    for pair in TWINS:
        for one, other in (pair, pair[::-1]):
            family = families.get(one)
            if family is not None and other not in families:
                head = {kind: line.replace(one, other, 1) for kind, line in family.head.items()}
                families[other] = MetricFamily(head, [other + line[len(one) :] for line in family.samples])


def written(parts: Iterable[Families]) -> Iterator[str]:
    """Return one exposition in short texts: what several parts have of one family stands together, under one head."""
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
