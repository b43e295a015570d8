"""vLLM's own figures about its load, from the registry of its metrics."""

from collections.abc import Callable, Sequence

from ichat.engines.engine import Progress


def read_progress() -> Progress:
    """Return vLLM's own metrics, over all of its engines."""
    return Progress(
        running=_count("vllm:num_requests_running"),
        waiting=_count("vllm:num_requests_waiting"),
        kv_use=_metric("vllm:kv_cache_usage_perc", of=max),
        steps=_count("vllm:iteration_tokens_total", "vllm:iteration_tokens_total_count"),
        tokens_out=_count("vllm:generation_tokens", "vllm:generation_tokens_total"),
        prompt_tokens=_count("vllm:prefix_cache_queries", "vllm:prefix_cache_queries_total"),
        cached_tokens=_count("vllm:prefix_cache_hits", "vllm:prefix_cache_hits_total"),
    )


def _count(name: str, sample: str | None = None) -> int | None:
    found = _metric(name, sample)
    return None if found is None else int(found)


def _metric(name: str, sample: str | None = None, *, of: Callable[[Sequence[float]], float] = sum) -> float | None:
    """Return a metric over all of vLLM's engines, from its registry; None if it is not reported."""
    from prometheus_client import REGISTRY

    values = [
        found.value
        for metric in REGISTRY.restricted_registry([sample or name]).collect()
        for found in metric.samples
        if found.name == (sample or name)
    ]
    return of(values) if values else None
