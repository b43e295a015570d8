"""Whether a benchmark has measured a state that would last, or only the beginning or the end of something."""

import math
import statistics
from collections.abc import Sequence

from ichat.cli.bench.samples import BenchRequest, WorkerSample

REQUESTS_MIN = 20
"""Fewer requests with a whole answer say nothing about a steady state."""
HALVES_MAX = 1.25
"""The largest ratio of the mean times of both halves, beyond chance."""
UNCERTAIN_MAX = 0.1
"""The largest standard error of the mean time of an answer, as a share of that mean."""
CHANCE = 2.0
"""Standard errors that count as chance."""
TAIL_MAX = 0.3
"""The share of the time in which no request was sent any more, and the last requests only ended."""
GROWTH_MAX = 1.5
"""How much more requests may be under way in the last quarter than in the second, beyond `GROWTH_FREE`."""
GROWTH_FREE = 3.0
ERRORS_MAX = 0.01
CLIENT_CPU_MAX = 0.8
"""The share of a core from which on this client delays the answers that it measures."""


def why_not_steady(
    requests: Sequence[BenchRequest], workers: Sequence[WorkerSample], *, client_cpu: float, is_cut_short: bool = False
) -> list[str]:
    """Return the reasons why the figures are not those of a steady state; none if they are.

    The requests are divided by the times at which they were planned. The reasons are:
    - fewer than `REQUESTS_MIN` whole answers;
    - more errors than `ERRORS_MAX` of all requests;
    - the mean times to the end of the two halves differ by more than the factor `HALVES_MAX`,
      and by more than `CHANCE` standard errors: answers become slower, or faster;
    - the mean time to the end has a standard error above `UNCERTAIN_MAX`: the answers are too uneven for their number;
    - in the last quarter more requests are under way than in the second (the first fills the engine): a queue grows;
    - the same of the requests that wait in a worker's engine;
    - for more than `TAIL_MAX` of the time nothing was sent, unless the user cut the run short;
    - this client was busy for more than `CLIENT_CPU_MAX` of a core.
    """
    well = [one for one in requests if one.is_well]
    reasons: list[str] = []
    if len(well) < REQUESTS_MIN:
        reasons.append(f"only {len(well)} whole answers: at least {REQUESTS_MIN} are needed")
    failed = sum(1 for one in requests if one.error)
    if failed > ERRORS_MAX * len(requests):
        reasons.append(f"{failed} of {len(requests)} requests failed")
    if client_cpu > CLIENT_CPU_MAX:
        reasons.append(f"this client used {client_cpu:.0%} of a core: run several, or on another machine")
    if len(well) >= REQUESTS_MIN:
        reasons += [*_changing(well), *_growing(requests), *_waiting(workers)]
        if not is_cut_short:
            reasons += _tail(requests)
    return reasons


def _changing(well: Sequence[BenchRequest]) -> list[str]:
    ordered = sorted(well, key=lambda one: one.planned_at)
    halves = ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]
    first, second = ([one.whole_s for one in half if one.whole_s is not None] for half in halves)
    before, after = statistics.fmean(first), statistics.fmean(second)
    error = math.sqrt(statistics.variance(first) / len(first) + statistics.variance(second) / len(second))
    means = f"{before:.2f} s in the first half, {after:.2f} s in the second"
    if max(before, after) > HALVES_MAX * min(before, after) and abs(after - before) > CHANCE * error:
        return [f"the answers became {'slower' if after > before else 'faster'}: {means}"]
    mean, error = (before + after) / 2, error / 2
    if error > UNCERTAIN_MAX * mean:
        return [f"the answers are uneven: {mean:.2f} s each, with an error of {error:.2f} s; use a longer run"]
    return []


def _growing(requests: Sequence[BenchRequest]) -> list[str]:
    """Return whether the number of requests under way grows while requests are sent."""
    begin, end = min(one.planned_at for one in requests), max(one.planned_at for one in requests)
    quarter = (end - begin) / 4
    before = mean_under_way(requests, begin + quarter, begin + 2 * quarter)
    after = mean_under_way(requests, end - quarter, end)
    if after <= GROWTH_MAX * before + GROWTH_FREE:
        return []
    return [f"requests pile up: {before:.1f} were under way at first, {after:.1f} later; the rate is too high"]


def span_of(requests: Sequence[BenchRequest]) -> tuple[float, float]:
    """Return when the first request was planned, and when the last has ended, of those that have."""
    begin = min((one.planned_at for one in requests), default=0.0)
    return begin, max((one.ended_at for one in requests if one.ended_at is not None), default=begin)


def mean_under_way(requests: Sequence[BenchRequest], begin: float, end: float) -> float:
    """Return how many requests were planned and not yet ended, on average over a span of time."""
    if end <= begin:
        return 0.0
    spans = ((one.planned_at, end if one.ended_at is None else one.ended_at) for one in requests)
    return sum(max(0.0, min(end, until) - max(begin, since)) for since, until in spans) / (end - begin)


def _waiting(workers: Sequence[WorkerSample]) -> list[str]:
    reasons: list[str] = []
    for worker_id in dict.fromkeys(one.worker_id for one in workers):
        waiting = [one.waiting for one in workers if one.worker_id == worker_id and one.waiting is not None]
        quarter = len(waiting) // 4
        if quarter:
            before = statistics.fmean(waiting[quarter : 2 * quarter])
            after = statistics.fmean(waiting[-quarter:])
            if after > GROWTH_MAX * before + GROWTH_FREE:
                reasons.append(f"the queue of worker {worker_id} grew from {before:.1f} to {after:.1f}")
    return reasons


def _tail(requests: Sequence[BenchRequest]) -> list[str]:
    begin, end = span_of(requests)
    last = max(one.planned_at for one in requests)
    if end - last <= TAIL_MAX * (end - begin):
        return []
    return [f"for {end - last:.1f} of {end - begin:.1f} s the last requests only ended: use a longer run"]
