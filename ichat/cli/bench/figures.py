"""The figures of a benchmark, computed from its requests."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
from typing_extensions import Self

from ichat.cli.bench.objective import Objective, is_met
from ichat.cli.bench.samples import BenchRequest, WorkerSample
from ichat.cli.bench.steadiness import mean_under_way, span_of, why_not_steady


@attrs.frozen
class Spread:
    """How the values of a quantity are spread."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Self | None:
        """Return the spread of the values that are known; None if none is."""
        known = sorted(value for value in values if value is not None)
        if not known:
            return None
        middle, most, nearly_all = (percentile(known, share) for share in (0.5, 0.9, 0.99))
        return cls(statistics.fmean(known), middle, most, nearly_all, known[-1])


@attrs.frozen
class WorkerFigures:
    """A worker during a benchmark, by its own account; its other requests are in these figures too."""

    worker_id: str
    kv_use: Spread | None
    running: Spread | None
    waiting: Spread | None


@attrs.frozen(kw_only=True)
class BenchPlan:
    """The load of a benchmark, and its objective."""

    model: str
    concurrency: int | None
    """Of a closed loop: how many requests are under way at any time."""
    rate: float | None
    """Of an open loop: requests a second, which arrive by chance (Poisson)."""
    requests_max: int | None
    seconds_max: float | None
    """For how long requests are sent."""
    input_tokens: int
    output_tokens: int
    shared_prefix: int
    """Tokens at the beginning that all prompts share."""
    objective: Objective
    timeout_s: float
    """The longest time of a request."""


@attrs.frozen(kw_only=True)
class BenchFigures:
    """The results of a benchmark. Rates are of whole answers, over the whole time; null: not known."""

    plan: BenchPlan
    duration_s: float
    """From the first planned moment to the last end."""
    requests: int
    """Requests with a whole answer."""
    errors: Mapping[str, int]
    """Failed requests, by the codes of their errors."""
    unfinished: int
    """Requests that were under way when the user ended the benchmark."""
    requests_per_s: float
    input_tokens_per_s: float | None
    output_tokens_per_s: float
    is_counted: bool
    """Whether the server has counted the tokens of the answers; else the pieces of the streams are counted."""
    input_tokens: Spread | None
    output_tokens: Spread | None
    cached_tokens: int
    """Tokens of all prompts that were in the engine's prefix cache."""
    first_token_s: Spread | None
    gap_s: Spread | None
    """Between two pieces of an answer, over all answers."""
    token_s: Spread | None
    """For each token after the first: the average of an answer, over all answers."""
    whole_s: Spread | None
    """To the end of an answer."""
    sent_late_s: Spread | None
    """By how much requests were sent later than planned; this is in all durations."""
    under_way: float
    """Requests under way, on average."""
    client_cpu: float
    """The share of a core that this client used."""
    goodput_per_s: float | None
    """Requests a second that meet the objective."""
    goodput_share: float | None
    """The share of these among all requests that have ended."""
    not_steady: Sequence[str]
    """Why the figures are not those of a steady state."""
    workers: Sequence[WorkerFigures]
    """Empty if they are not known."""


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which this share of ordered values lies, interpolated between its neighbours."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def figures_of(
    plan: BenchPlan,
    requests: Sequence[BenchRequest],
    workers: Sequence[WorkerSample] = (),
    *,
    client_cpu: float = 0.0,
    is_cut_short: bool = False,
) -> BenchFigures:
    """Return the figures of a benchmark's requests; `is_cut_short`: the user ended it."""
    well = [one for one in requests if one.is_well]
    begin, end = span_of(requests)
    per_s = 1 / (end - begin) if end > begin else 0.0
    return BenchFigures(
        plan=plan,
        duration_s=end - begin,
        requests=len(well),
        requests_per_s=len(well) * per_s,
        under_way=mean_under_way(requests, begin, end),
        client_cpu=client_cpu,
        not_steady=why_not_steady(requests, workers, client_cpu=client_cpu, is_cut_short=is_cut_short),
        workers=_worker_figures(workers),
        **_outcomes(requests, plan.objective, per_s),
        **_tokens(well, per_s),
        **_spreads(well),
    )


def _outcomes(requests: Sequence[BenchRequest], objective: Objective, per_s: float) -> dict[str, Any]:
    """Return the fields of `BenchFigures` about the ends of the requests."""
    ended = [one for one in requests if one.ended_at is not None]
    met = sum(is_met(one, objective) for one in ended) if objective and ended else None
    return {
        "errors": dict(Counter(one.error for one in ended if one.error).most_common()),
        "unfinished": len(requests) - len(ended),
        "goodput_per_s": None if met is None else met * per_s,
        "goodput_share": None if met is None else met / len(ended),
    }


def _tokens(well: Sequence[BenchRequest], per_s: float) -> dict[str, Any]:
    """Return the fields of `BenchFigures` about the tokens of whole answers."""
    prompts = [one.input_tokens for one in well if one.input_tokens is not None]
    return {
        "input_tokens_per_s": sum(prompts) * per_s if prompts else None,
        "output_tokens_per_s": sum(one.tokens_out for one in well) * per_s,
        "is_counted": all(one.output_tokens is not None for one in well),
        "input_tokens": Spread.of(prompts),
        "cached_tokens": sum(one.cached_tokens for one in well),
    }


def _spreads(well: Sequence[BenchRequest]) -> dict[str, Any]:
    """Return the fields of `BenchFigures` that are computed from each whole answer."""
    gaps = (after - before for one in well for before, after in itertools.pairwise(one.pieces_at))
    names = {"output_tokens": "tokens_out", "first_token_s": "first_s", "token_s": "token_s", "whole_s": "whole_s"}
    found = {field: Spread.of(getattr(one, name) for one in well) for field, name in names.items()}
    return {**found, "gap_s": Spread.of(gaps), "sent_late_s": Spread.of(one.late_s for one in well)}


def _worker_figures(samples: Sequence[WorkerSample]) -> list[WorkerFigures]:
    found: list[WorkerFigures] = []
    for worker_id in dict.fromkeys(one.worker_id for one in samples):
        own = [one for one in samples if one.worker_id == worker_id]
        spreads = (Spread.of(getattr(one, name) for one in own) for name in ("kv_use", "running", "waiting"))
        found.append(WorkerFigures(worker_id, *spreads))
    return found
