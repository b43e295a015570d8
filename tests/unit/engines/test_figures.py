"""The figures and the models that an engine reports, from the metrics and the names that it has."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ichat.engines.engine import EngineInfo, ModelCard, Progress, cards_of, progress_of
from ichat.engines.sglang import engine as sglang
from ichat.engines.vllm import engine as vllm

SAMPLES = {
    "running": "e:running",
    "waiting": "e:waiting",
    "kv_use": "e:kv_use",
    "steps": "e:tokens_count",
    "tokens_out": "e:out_total",
    "prompt_tokens": "e:prompt_total",
    "cached_tokens": "e:cached_total",
}


def test_samples_of_several_processes_are_added_and_the_fullest_cache_counts():
    """A histogram counts the steps; a figure without a sample is not known."""
    registry = CollectorRegistry()
    running = Gauge("e:running", "", ["engine"], registry=registry)
    kv_use = Gauge("e:kv_use", "", ["engine"], registry=registry)
    steps = Histogram("e:tokens", "", ["engine"], registry=registry)
    out = Counter("e:out", "", ["engine"], registry=registry)
    for engine, use in (("0", 0.25), ("1", 0.5)):
        running.labels(engine).set(3)
        kv_use.labels(engine).set(use)
        steps.labels(engine).observe(7)
        out.labels(engine).inc(40)
    expected = Progress(running=6, kv_use=0.5, steps=2, tokens_out=80)
    assert progress_of(registry.collect(), SAMPLES) == expected
    assert progress_of(registry.restricted_registry(list(SAMPLES.values())).collect(), SAMPLES) == expected
    assert progress_of([], SAMPLES) == Progress()


def test_no_sample_of_hits_is_no_hit():
    """An engine that counts prompts, and has had no hit yet, has cached nothing."""
    registry = CollectorRegistry()
    Counter("e:prompt", "", registry=registry).inc(5)
    assert progress_of(registry.collect(), SAMPLES) == Progress(prompt_tokens=5, cached_tokens=0)


@pytest.mark.parametrize("metrics", [vllm._METRICS, sglang._METRICS])
def test_each_figure_has_a_metric(metrics):
    """An engine's table names every figure of `Progress`, and nothing else."""
    assert metrics.keys() == SAMPLES.keys() == {name for name in Progress.__slots__ if name[0] != "_"}


def test_a_model_has_a_card_for_each_name_and_each_adapter():
    """An adapter's parent is the model's first name, and its length is not known."""
    info = EngineInfo("/m", ["a", "b"], {}, {})
    assert cards_of(info, 10, {"lora": "/l"}) == [
        ModelCard("a", "/m", None, 10), ModelCard("b", "/m", None, 10), ModelCard("lora", "/l", "a"),
    ]  # fmt: skip
