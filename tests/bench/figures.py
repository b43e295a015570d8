"""What a run has measured, and how it is shown: medians of the rounds, and ratios taken inside each round."""

import statistics

import attrs

COLUMNS = {"rate": "requests/s", "p50_ms": "p50 ms", "p99_ms": "p99 ms", "first_ms": "first ms", "memory_mb": "MB"}
RATIOS = {"cpu_us": "CPU", "tree_us": "CPU of all", "rate": "requests/s", "p50_ms": "p50"}


@attrs.frozen
class Scenario:
    """One kind of load. The client keeps `connections` busy until `requests` have been made."""

    name: str
    connections: int
    requests: int
    body: dict
    events: int = 0
    """Those that every stream must have; 0: any number."""
    unit: str = "request"
    """What the CPU is divided by: request, chunk or token."""


@attrs.frozen
class Figures:
    """One scenario on one process in one round. A figure is 0 where there is none."""

    cpu_us: float
    tree_us: float
    """CPU of the process and all its descendants."""
    rate: float
    p50_ms: float
    p99_ms: float
    first_ms: float
    memory_mb: float
    failures: int
    reasons: list[str]


@attrs.frozen
class Ratio:
    """One figure of one process over that of another."""

    figure: str
    over: str
    under: str


def figures_of(load, scenario, cpu_ns, tree_ns, memory_mb):
    """Make the figures of what the load client says and what the process has used."""
    units = load[{"request": "requests", "chunk": "events", "token": "tokens"}[scenario.unit]]
    return Figures(
        cpu_us=cpu_ns / 1e3 / units if units else 0.0,
        tree_us=tree_ns / 1e3 / units if units else 0.0,
        rate=load["requests"] / load["seconds"],
        p50_ms=load["p50_ms"],
        p99_ms=load["p99_ms"],
        first_ms=load["first_ms"],
        memory_mb=memory_mb,
        failures=load["failures"],
        reasons=load["reasons"],
    )


def table(scenario, rounds, ratios):
    """Return the lines that show one scenario: `rounds` has the figures of each process by its name."""
    unit = f"CPU µs/{scenario.unit}"
    yield f"{scenario.name}: {scenario.connections} connections, {scenario.requests} requests"
    yield f"  {'':10}{unit:>15}" + "".join(f"{title:>12}" for title in COLUMNS.values()) + f"{'failed':>9}"
    for name, found in rounds.items():
        cells = [number(median(found, "cpu_us"), 15)] + [number(median(found, column), 12) for column in COLUMNS]
        yield f"  {name:10}{''.join(cells)}{sum(one.failures for one in found):>9}"
    for ratio in ratios:
        if ratio.over in rounds and ratio.under in rounds:
            yield f"  {ratio.over + ' / ' + ratio.under:17}{RATIOS[ratio.figure]:13}{spread(ratio, rounds)}"
    for name, found in rounds.items():
        for reason in dict.fromkeys(reason for one in found for reason in one.reasons):
            yield f"  {name} failed: {reason}"
    yield ""


def median(found, figure):
    return statistics.median(getattr(one, figure) for one in found)


def number(value, width):
    text = "–" if not value else f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    return f"{text:>{width}}"


def spread(ratio, rounds):
    """Return the median of the rounds' ratios, with the least and the greatest."""
    pairs = zip(rounds[ratio.over], rounds[ratio.under], strict=True)
    parts = [(getattr(over, ratio.figure), getattr(under, ratio.figure)) for over, under in pairs]
    found = [over / under for over, under in parts if over and under]
    if not found:
        return "–"
    return f"{statistics.median(found):.2f}" + f"  ({min(found):.2f} to {max(found):.2f})" * (len(found) > 1)
