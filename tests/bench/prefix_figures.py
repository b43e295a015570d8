"""What the engines' own counters say of a run, and how it is shown beside what one infinite cache would have had."""

import re
import statistics

import attrs

COUNTERS = {
    "vllm:prefix_cache_queries_total": "prompt",
    "vllm:prefix_cache_hits_total": "cached",
    "vllm:request_success_total": "requests",
    "sglang:prompt_tokens_total": "prompt",
    "sglang:cached_tokens_total": "cached",
    "sglang:num_requests_total": "requests",
}
_LINE = re.compile(r"^([a-z_:]+)(?:\{.*\})? (\S+)", re.MULTILINE)
BASIS = "round_robin"
"""The policy that keeps nothing together: what is gained is gained over it."""


@attrs.frozen
class Count:
    """What one worker's engine has counted: prompt tokens, those of them found in its cache, and requests."""

    prompt: float = 0.0
    cached: float = 0.0
    requests: float = 0.0

    @property
    def hit(self):
        return self.cached / self.prompt if self.prompt else 0.0

    def since(self, earlier):
        """Return what came after an earlier count; a smaller one is that of a new process, which began at nothing."""
        if self.prompt < earlier.prompt or self.requests < earlier.requests:
            return self
        return Count(self.prompt - earlier.prompt, self.cached - earlier.cached, self.requests - earlier.requests)


@attrs.frozen
class Row:
    """One scenario with one subject in one round."""

    scenario: str
    subject: str
    hit: float
    ideal: float
    spread: float
    ttft50_ms: float
    ttft99_ms: float
    rate: float
    requests: int
    failures: int
    lost: int
    """Failures of requests that were under way when a worker was killed."""
    by_worker: list[Count]
    own: dict[str, float] = attrs.field(factory=dict)
    """The gateway's own counters of prefixes, where it has any."""
    turns: list[tuple[list[Count], float]] = attrs.field(factory=list)
    """What each worker has counted in a turn, and the ideal hit rate, where turns are counted one by one."""
    reasons: list[str] = attrs.field(factory=list)

    def line(self):
        """Return the figures in one line, for the one who waits."""
        shares = " + ".join(f"{one.requests:.0f} ({one.hit:.3f})" for one in self.by_worker)
        return (
            f"{self.scenario} {self.subject}: hit {self.hit:.3f} of {self.ideal:.3f}, {shares}, "
            f"ttft {self.ttft50_ms:.0f}/{self.ttft99_ms:.0f} ms, {self.rate:.1f}/s, {self.failures} failed"
        )


def count_of(exposition):
    """Return the count that a worker's metrics state, whichever engine it has."""
    found = {"prompt": 0.0, "cached": 0.0, "requests": 0.0}
    for name, value in _LINE.findall(exposition):
        if name in COUNTERS:
            found[COUNTERS[name]] += float(value)
    return Count(**found)


def own_counters_of(exposition):
    """Return the gateway's own counters of prefixes, with the labels of one name summed up."""
    found = {}
    for name, value in _LINE.findall(exposition):
        if name.startswith("ichat_prefix") and not name.endswith("_created"):
            found[name] = found.get(name, 0.0) + float(value)
    return found


def together(counts):
    return Count(*(sum(values) for values in zip(*(attrs.astuple(one) for one in counts), strict=True)))


def spread_of(counts):
    """Return how many times as many requests the busiest worker had as the idlest."""
    requests = [one.requests for one in counts]
    return max(requests) / max(min(requests), 1)


def ideal_hit(prompts, block, start=0):
    """Return the share of all tokens that one infinite cache of whole blocks finds, prompt after prompt.

    The prompts before `start` fill the cache, and do not count. As in an engine, the last token of a prompt is always computed, so a last block is not found whole.
    """
    seen = set()
    found = total = 0
    for number, tokens in enumerate(prompts):
        counts = number >= start
        total += len(tokens) * counts
        key, is_known = 0, True
        for at in range(block, len(tokens), block):
            key = hash((key, *tokens[at - block : at]))
            is_known = is_known and key in seen
            found += block * (is_known and counts)
            seen.add(key)
    return found / total if total else 0.0


def gained(hit, basis, ideal):
    """Return which share of what is to be gained over the basis a hit rate has, or None where there is nothing."""
    return (hit - basis) / (ideal - basis) if ideal - basis > 0.01 else None


def medians(rows, subject):
    """Return the medians of one subject's rounds, by the names of the columns."""
    own = [row for row in rows if row.subject == subject]
    names = ("hit", "ideal", "spread", "ttft50_ms", "ttft99_ms", "rate")
    found = {name: statistics.median(getattr(row, name) for row in own) for name in names}
    return {**found, "failures": sum(row.failures for row in own), "lost": sum(row.lost for row in own)}


def table(scenario, rows):
    """Return the Markdown lines that show all subjects of one scenario, as medians of its rounds."""
    rows = [row for row in rows if row.scenario == scenario]
    subjects = list(dict.fromkeys(row.subject for row in rows))
    bases = [subject for subject in subjects if subject == f"iChat {BASIS}"]
    basis = medians(rows, bases[0])["hit"] if bases else None
    yield f"| {scenario} | hit | ideal | gained | busiest/idlest | ttft p50 / p99 ms | requests/s | failed |"
    yield "|---|---|---|---|---|---|---|---|"
    for subject in subjects:
        one = medians(rows, subject)
        share = None if basis is None else gained(one["hit"], basis, one["ideal"])
        cells = [
            subject,
            f"{one['hit']:.3f}",
            f"{one['ideal']:.3f}",
            "–" if share is None or subject in bases else f"{share:.0%}",
            f"{one['spread']:.2f}",
            f"{one['ttft50_ms']:.0f} / {one['ttft99_ms']:.0f}",
            f"{one['rate']:.1f}",
            str(one["failures"]) + f" (+ {one['lost']} lost)" * bool(one["lost"]),
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield from details(rows)


def details(rows):
    """Return lines on what a table has no room for: turns, the gateway's own counters, and why requests failed."""
    for row in rows:
        if row.turns:
            turns = ", ".join(
                f"{together(counts).hit:.3f} of {ideal:.3f} ({' + '.join(f'{one.requests:.0f}' for one in counts)})"
                for counts, ideal in row.turns
            )
            yield f"- {row.subject}, hit rate by turn: {turns}"
        if own := ", ".join(f"{name} {value:g}" for name, value in row.own.items() if value):
            yield f"- {row.subject}: {own}"
        for reason in row.reasons:
            yield f"- {row.subject} failed: {reason}"
    yield ""
