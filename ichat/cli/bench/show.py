"""How the figures of a benchmark look."""

from ichat.cli.bench.figures import BenchFigures, Spread
from ichat.cli.screen import Screen, percent

_COLUMNS = ("time", "mean", "p50", "p90", "p99", "max")


def show_figures(screen: Screen, figures: BenchFigures) -> None:
    """Show the figures: load, rates, times, workers, and whether they are those of a steady state."""
    plan = figures.plan
    screen.facts(
        [
            ("model", plan.model),
            ("load", _load_words(figures)),
            ("requests", _requests_words(figures)),
            ("prompts", _prompts_words(figures)),
            ("answers", _answers_words(figures)),
            ("rate", _rate_words(figures)),
            ("goodput", _goodput_words(figures)),
            ("steady", "yes" if not figures.not_steady else f"no: {'; '.join(figures.not_steady)}"),
        ]
    )
    times = [
        ("first token", figures.first_token_s),
        ("between pieces", figures.gap_s),
        ("for each token", figures.token_s),
        ("whole answer", figures.whole_s),
        ("sent late", figures.sent_late_s if plan.rate else None),
    ]
    if rows := [[name, *_cells(spread)] for name, spread in times if spread is not None]:
        screen.line("")
        screen.table(_COLUMNS, rows)
    if figures.workers:
        screen.line("")
        workers = (
            [one.worker_id, *_use(one.kv_use), *_counts(one.running), *_counts(one.waiting)] for one in figures.workers
        )
        screen.table(("worker", "kv use", "kv use max", "running", "running max", "waiting", "waiting max"), workers)


def time_words(seconds: float) -> str:
    """Write a time: milliseconds below ten seconds."""
    return f"{seconds * 1000:.1f}ms" if seconds < 10 else f"{seconds:.2f}s"


def _load_words(figures: BenchFigures) -> str:
    plan = figures.plan
    loop = f"{plan.concurrency} at a time" if plan.rate is None else f"{plan.rate:g} requests/s at random moments"
    return f"{loop}, for {figures.duration_s:.1f} s; {figures.under_way:.1f} under way on average"


def _requests_words(figures: BenchFigures) -> str:
    words = [f"{figures.requests} answered"]
    words += [f"{number} failed: {code}" for code, number in figures.errors.items()]
    if figures.unfinished:
        words.append(f"{figures.unfinished} cut short")
    return ", ".join(words)


def _prompts_words(figures: BenchFigures) -> str:
    wanted, found = figures.plan.input_tokens, figures.input_tokens
    if found is None:
        return f"about {wanted} tokens each (the server counts none)"
    cached = figures.cached_tokens / max(1.0, found.mean * figures.requests)
    return f"{found.mean:.1f} tokens each ({found.max:.0f} at most, {wanted} wanted), {percent(cached)} of them cached"


def _answers_words(figures: BenchFigures) -> str | None:
    found = figures.output_tokens
    if found is None:
        return None
    about = "" if figures.is_counted else "about "
    return f"{about}{found.mean:.1f} tokens each ({found.max:.0f} at most, {figures.plan.output_tokens} wanted)"


def _rate_words(figures: BenchFigures) -> str:
    words = [f"{figures.requests_per_s:.3g} requests/s"]
    if figures.input_tokens_per_s is not None:
        words.append(f"{figures.input_tokens_per_s:.1f} tokens/s in")
    return ", ".join([*words, f"{figures.output_tokens_per_s:.1f} tokens/s out"])


def _goodput_words(figures: BenchFigures) -> str | None:
    if figures.goodput_per_s is None:
        return None
    goals = ", ".join(f"{name} {time_words(limit_s)}" for name, limit_s in figures.plan.objective.items())
    return f"{figures.goodput_per_s:.3g} requests/s, {percent(figures.goodput_share)} of all, within {goals}"


def _cells(spread: Spread) -> list[str]:
    return [time_words(value) for value in (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)]


def _use(spread: Spread | None) -> list[str | None]:
    return [None, None] if spread is None else [percent(spread.mean), percent(spread.max)]


def _counts(spread: Spread | None) -> list[str | None]:
    return [None, None] if spread is None else [f"{spread.mean:.1f}", f"{spread.max:.0f}"]
