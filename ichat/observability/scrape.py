"""The workers' own metrics as the gateway shows them: every sample has the labels `worker` and `model`.

All workers are scraped at once when the gateway is. Text stays text: a sample is a line, which gets two more labels.
The lines of one family stand together, whichever worker they are from. That is done in a thread.
"""

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping

import attrs
import trio

from ichat.http import client
from ichat.http.pool import Upstream
from ichat.protocol import PROOF_HEADER
from ichat.routing.endpoint import Endpoint
from ichat.routing.registry import Registry
from ichat.routing.worker_record import WorkerRecord

log = logging.getLogger(__name__)

ASK_S = 2.0
"""How long a worker may take to answer."""
ROUND_S = 6.0
"""How long all of them may take: those that were not asked by then count as failed."""
REUSE_S = 1.0
"""How long other scrapes get what one has found."""
ASKED_AT_ONCE_MAX = 32
BYTES_MAX = 4 * 1024 * 1024
"""Of one worker's answer."""
ALL_BYTES_MAX = 64 * 1024 * 1024
"""Of all answers of a round."""
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


def read(text: str, labels: Mapping[str, str]) -> Families:
    """Take an exposition in Prometheus' text format apart, by the names of its families; add labels to each sample.

    A label of such a name that is there already becomes `exported_...`. Lines that are no samples are left out.
    """

    def renamed(label: re.Match[str]) -> str:
        return f"exported_{label[0]}" if label[1] in labels else label[0]

    families: Families = {}
    added = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    clashes = any(f'{name}="' in text for name in labels)
    name, family, last, samples = "", MetricFamily(), "", [""]
    for line in text.split("\n"):
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
    return families


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


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def add_twins(families: Families) -> None:
    """Show what has an old and a new name by both."""
    for pair in TWINS:
        for one, other in (pair, pair[::-1]):
            family = families.get(one)
            if family is not None and other not in families:
                head = {kind: line.replace(one, other, 1) for kind, line in family.head.items()}
                families[other] = MetricFamily(head, [other + line[len(one) :] for line in family.samples])


def write(parts: Iterable[Families]) -> bytes:
    """Write one exposition: what several parts have of one family stands together, under one head."""
    together: dict[str, list[MetricFamily]] = {}
    for families in parts:
        for name, family in families.items():
            if family.samples or family.head:
                together.setdefault(name, []).append(family)
    lines: list[str] = []
    for same in together.values():
        head = {kind: line for family in reversed(same) for kind, line in family.head.items()}
        lines += [head[kind] for kind in ("HELP", "TYPE") if kind in head]
        for family in same:
            lines += family.samples
    return ("\n".join(lines) + "\n").encode(errors="replace")


@attrs.define
class _Round:
    """What one round has found, and how much more it may take."""

    found: dict[str, Families | None]
    bytes_left: int = ALL_BYTES_MAX


class Scraper:
    """Asks the ready workers for their metrics, and shows them together with the gateway's own."""

    def __init__(self, registry: Registry, proof: Callable[[], bytes] = bytes) -> None:
        """`proof` gives what shows workers that were not started here that their gateway asks, if it is not empty."""
        self._registry = registry
        self._proof = proof
        self._turn = trio.Lock()
        self._thread = trio.CapacityLimiter(1)
        self._found: Mapping[str, Families | None] = {}
        self._found_at = -math.inf

    def __repr__(self) -> str:
        return f"<Scraper of {len(self._found)} workers>"

    async def expose(self, own: Callable[[], bytes]) -> bytes:
        """Return the gateway's metrics, which `own` writes in a thread, and those of the workers, in one exposition."""
        async with self._turn:
            if trio.current_time() - self._found_at >= REUSE_S:
                self._found = await self._ask_all()
                self._found_at = trio.current_time()
            found = self._found
        return await trio.to_thread.run_sync(_put_together, own, found, limiter=self._thread)

    async def _ask_all(self) -> Mapping[str, Families | None]:
        """Return what each worker has, or None where it did not answer."""
        registry = self._registry
        ready = [(one, registry.endpoint_of(one)) for one in registry if registry.state(one) == "ready"]
        workers = [(worker, endpoint) for worker, endpoint in ready if endpoint is not None]
        round_ = _Round(dict.fromkeys([worker.id for worker, _ in workers]))
        limit = trio.CapacityLimiter(ASKED_AT_ONCE_MAX)
        with trio.move_on_after(ROUND_S):
            async with trio.open_nursery() as nursery:
                for worker, endpoint in workers:
                    nursery.start_soon(self._ask, worker, endpoint, round_, limit)
        return round_.found

    async def _ask(self, worker: WorkerRecord, endpoint: Endpoint, round_: _Round, limit: trio.CapacityLimiter) -> None:
        labels = {"worker": worker.id, "model": worker.names[0] if worker.names else ""}
        async with limit:
            try:
                with trio.fail_after(ASK_S):
                    proof = b"" if worker.managed else self._proof()
                    data = await _fetch(endpoint.upstream, proof, round_)
            except client.FAILURES as error:
                log.debug("worker %s gave no metrics: %r", worker.id, error)
                return
        round_.found[worker.id] = await trio.to_thread.run_sync(_take, data, labels, limiter=self._thread)


async def _fetch(upstream: Upstream, proof: bytes, round_: _Round) -> bytes:
    """Return a worker's metrics. Raises one of client.FAILURES, ValueError where they are too long."""
    headers = [(b"accept", b"text/plain;version=0.0.4")]
    if proof:
        headers.append((PROOF_HEADER, proof))
    data = bytearray()
    async with await client.request(upstream, "/metrics", headers) as response:
        if response.status != 200:
            raise ValueError(f"it answers with {response.status}")
        async for piece in response:
            data += piece
            round_.bytes_left -= len(piece)
            if len(data) > BYTES_MAX or round_.bytes_left < 0:
                raise ValueError("its answer is too long")
    return bytes(data)


def _take(data: bytes, labels: Mapping[str, str]) -> Families:
    families = read(data.decode(errors="replace"), labels)
    add_twins(families)
    return families


def _put_together(own: Callable[[], bytes], found: Mapping[str, Families | None]) -> bytes:
    name = "ichat_worker_scrape_failed"
    head = {
        "HELP": f"# HELP {name} 1 for a ready worker whose metrics are missing here.",
        "TYPE": f"# TYPE {name} gauge",
    }
    samples = [f'{name}{{worker="{_escaped(one)}"}} {int(families is None)}' for one, families in found.items()]
    parts = [read(own().decode(), {}), {name: MetricFamily(head, samples)}]
    return write([*parts, *(families for families in found.values() if families is not None)])
