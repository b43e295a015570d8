"""Learnt figures: what a load teaches, when two loads are alike, and what a launch without enough memory changes."""

import json

import attrs
import pytest

from ichat.placement.cache import bytes_of_blocks, tokens_in_cache
from ichat.placement.estimate import GIB, MIB, estimate, fewest_gpus, longest_context
from ichat.placement.learnt import (
    KNOWN_MAX,
    LearntMemories,
    LearntMemory,
    MemoryLack,
    cache_flags_of,
    key_of,
    learnt_from,
    raised_by,
    version_in,
)
from ichat.placement.model_shape import read_shape
from ichat.placement.settings import settings_of
from ichat.placement.weights import implied_tensors, sum_weights
from ichat.protocol.engine_memory import EngineMemory

SHAPE = read_shape({
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
})  # fmt: skip
WEIGHTS = sum_weights(SHAPE, implied_tensors(SHAPE))
H100 = "NVIDIA H100 80GB HBM3", 80 * GIB
KEY = key_of("/m", "vllm", {}, 1, H100)
LOAD = LearntMemory(KEY, "0.32.0", "m", 1.0)


@pytest.mark.parametrize(
    ("one", "other", "are_alike"),
    [
        ({}, {"max_model_len": 4096, "gpu_memory_utilization": 0.5}, True),
        ({}, {"api_key": "secret", "served_model_name": "x", "seed": 1}, True),
        ({}, {"enforce_eager": True}, False),
        ({"max_num_seqs": 8}, {"max_num_seqs": 16}, False),
        ({"tp": 2}, {"tensor_parallel_size": 2}, True),
        ({"tp": 2}, {}, False),
        ({"a_flag_of_a_later_release": 1}, {}, False),
    ],
)
def test_loads_are_alike_if_all_flags_that_count_are_equal(one, other, are_alike):
    """The size of the KV cache and names do not count beside it; a flag that is not known does."""
    assert (key_of("/m", "vllm", one, 1, H100) == key_of("/m", "vllm", other, 1, H100)) == are_alike


def test_other_circumstances_are_another_key():
    """Another model at the same path has other weights; kinds of GPUs differ by name and memory."""
    others = [
        key_of("/n", "vllm", {}, 1, H100), key_of("/m", "sglang", {}, 1, H100), key_of("/m", "vllm", {}, 2, H100),
        key_of("/m", "vllm", {}, None, H100), key_of("/m", "vllm", {}, 1, (H100[0], GIB)), key_of("/m", "vllm", {}, 1),
    ]  # fmt: skip
    assert len({KEY, *others}) == 1 + len(others)


def test_a_key_reveals_no_argument():
    """It is written to disk."""
    key = key_of("/m", "vllm", {"hf_token": "s3cret"}, 1, H100)
    assert "s3cret" not in json.dumps(attrs.asdict(key))


def test_figures_are_found_by_version_or_from_the_newest_load():
    """A version that was not loaded has none; the cache's size is unknown for other flags of the cache."""
    memories, cache = LearntMemories(), cache_flags_of({"max_model_len": 4096})
    old = attrs.evolve(LOAD, version="0.31.0", tokens=5, cache_bytes=6, weights_bytes=7, cache_flags=cache)
    memories.add(old)
    memories.add(LOAD)
    assert memories.find(KEY, "0.31.0", cache) == old
    assert memories.find(KEY) == memories.find(KEY, "0.32.0") == LOAD
    other = memories.find(KEY, "0.31.0", cache_flags_of({"max_model_len": 8192}))
    assert (other.tokens, other.cache_bytes, other.weights_bytes) == (None, None, 7)
    assert memories.find(KEY, "0.30.0") is None
    assert memories.find(key_of("/n", "vllm", {}, 1, H100)) is None
    memories.add(old)
    assert memories.find(KEY) == old


def test_the_oldest_of_too_many_figures_are_dropped():
    """200 are kept."""
    memories = LearntMemories()
    for number in range(KNOWN_MAX + 5):
        memories.add(attrs.evolve(LOAD, version=str(number)))
    assert [one.version for one in memories] == [str(number) for number in range(5, KNOWN_MAX + 5)]
    assert KNOWN_MAX == 200


def test_versions_are_compared_without_the_name_of_the_build():
    """A package for processors has another name, and vLLM itself then adds a word."""
    assert version_in("0.32.0+cpu") == version_in("0.32.0") == "0.32.0"


def test_a_load_teaches_all_but_the_kv_cache():
    """By vLLM's share of the GPU, or else by what the driver says; without either, or the cache, it is unknown."""
    told = EngineMemory(tokens=100, cache_bytes=40 * GIB, weights_bytes=16 * GIB, graphs_bytes=GIB)
    held = attrs.evolve(LOAD, held_bytes=70 * GIB, raised_bytes=99 * GIB)
    by_share = learnt_from(told, held, taken_bytes=64 * GIB, cache_bytes=None)
    assert (by_share.beside_bytes, by_share.need_bytes, by_share.tokens, by_share.raised_bytes) == (
        24 * GIB, 24 * GIB, 100, None,
    )  # fmt: skip
    by_driver = learnt_from(told, held, taken_bytes=None, cache_bytes=None)
    assert (by_driver.beside_bytes, by_driver.held_bytes) == (30 * GIB, 70 * GIB)
    blocks = learnt_from(EngineMemory(tokens=100), held, taken_bytes=64 * GIB, cache_bytes=60 * GIB)
    assert (blocks.beside_bytes, blocks.cache_bytes, blocks.weights_bytes) == (4 * GIB, 60 * GIB, None)
    neither = learnt_from(told, LOAD, taken_bytes=None, cache_bytes=None)
    assert (neither.beside_bytes, neither.need_bytes) == (None, 17 * GIB)
    nothing = learnt_from(EngineMemory(), held, taken_bytes=64 * GIB, cache_bytes=None)
    assert (nothing.beside_bytes, nothing.need_bytes, nothing.tokens) == (None, None, None)
    assert learnt_from(told, LOAD, taken_bytes=40 * GIB, cache_bytes=None).beside_bytes is None


def test_a_launch_without_enough_memory_raises_the_figure():
    """By a tenth, or to all that was there; the rest that vLLM names for its cache is as good as a load."""
    known, taken = attrs.evolve(LOAD, beside_bytes=20 * GIB, estimated_bytes=10 * GIB), 73 * GIB
    once = raised_by(MemoryLack(), known, taken_bytes=taken)
    assert (once.raised_bytes, once.beside_bytes, once.need_bytes) == (22 * GIB, 20 * GIB, 20 * GIB)
    assert raised_by(MemoryLack(), once, taken_bytes=taken).raised_bytes == pytest.approx(24.2 * GIB, abs=2)
    assert raised_by(MemoryLack(0), known, taken_bytes=taken).raised_bytes == taken
    named = raised_by(MemoryLack(3 * GIB), once, taken_bytes=taken)
    assert (named.beside_bytes, named.raised_bytes) == (70 * GIB, None)
    first = raised_by(MemoryLack(), attrs.evolve(LOAD, estimated_bytes=10 * GIB), taken_bytes=None)
    assert (first.raised_bytes, first.need_bytes) == (11 * GIB, None)
    most = raised_by(MemoryLack(), attrs.evolve(known, raised_bytes=87 * GIB), taken_bytes=taken)
    assert most.raised_bytes == 88 * GIB
    assert raised_by(MemoryLack(), LOAD, taken_bytes=taken) is None


def test_the_error_of_an_estimate_is_a_part_of_the_measured_memory():
    """Negative where the estimate was too low; unknown without both."""
    known = attrs.evolve(LOAD, beside_bytes=20 * GIB, estimated_bytes=19 * GIB)
    assert known.error_ratio == pytest.approx(-0.05)
    assert attrs.evolve(known, estimated_bytes=None).error_ratio is None
    assert attrs.evolve(known, beside_bytes=None).error_ratio is None


def test_an_estimate_prefers_learnt_figures():
    """Everything but the cache is as at the last load, and the tokens of another share of the GPU follow from it."""
    learnt = attrs.evolve(LOAD, beside_bytes=20 * GIB)
    settings = settings_of("vllm", {"gpu_memory_utilization": 0.5})
    found = estimate(SHAPE, WEIGHTS, settings, 80 * GIB, learnt)
    assert [(part.name, part.grade) for part in found.parts] == [("weights", "computed"), ("everything else", "learnt")]
    assert sum(part.bytes for part in found.parts) == 20 * GIB
    assert (found.grade, found.cache_bytes, found.cache_grade) == ("learnt", 20 * GIB, "assumed")
    assert found.tokens == 20 * GIB // (128 * 1024)
    assert estimate(SHAPE, WEIGHTS, settings, 80 * GIB).grade == "assumed"
    large = attrs.evolve(LOAD, beside_bytes=43 * GIB)
    assert not estimate(SHAPE, WEIGHTS, settings, 80 * GIB, large).fits
    assert fewest_gpus(SHAPE, WEIGHTS, settings, 80 * GIB, large) == 2
    tight = attrs.evolve(LOAD, beside_bytes=40 * GIB - 512 * MIB)
    assert longest_context(SHAPE, WEIGHTS, settings, 80 * GIB, tight) == 4096
    assert longest_context(SHAPE, WEIGHTS, settings, 80 * GIB) == 8192


def test_learnt_tokens_count_as_they_are():
    """Also where no GPU is known: an engine on a processor reports its tokens, and no more."""
    learnt = attrs.evolve(LOAD, tokens=1000)
    found = estimate(SHAPE, WEIGHTS, settings_of("vllm", {}), None, learnt)
    assert (found.tokens, found.cache_grade, found.cache_bytes) == (1000, "learnt", None)
    found = estimate(SHAPE, WEIGHTS, settings_of("vllm", {}), 80 * GIB, attrs.evolve(learnt, cache_bytes=GIB))
    assert (found.tokens, found.cache_bytes, found.fits) == (1000, GIB, True)


def test_sglangs_own_figures_replace_its_parts():
    """Weights and graphs; the reserve stays as SGLang computes it, so only the weights change the cache."""
    settings = settings_of("sglang", {})
    before = estimate(SHAPE, WEIGHTS, settings, 40 * GIB)
    learnt = attrs.evolve(LOAD, weights_bytes=WEIGHTS.on_gpu() + GIB, graphs_bytes=3 * GIB)
    found = estimate(SHAPE, WEIGHTS, settings, 40 * GIB, learnt)
    grades = {part.name: part.grade for part in found.parts}
    assert (grades["weights"], grades["graphs"], grades["activations"]) == ("learnt", "learnt", "assumed")
    assert (found.grade, before.cache_bytes - found.cache_bytes) == ("assumed", GIB)


def test_a_raised_figure_is_assumed():
    """It fits no rule: the parts say so."""
    found = estimate(SHAPE, WEIGHTS, settings_of("vllm", {}), 80 * GIB, attrs.evolve(LOAD, raised_bytes=30 * GIB))
    assert [part.grade for part in found.parts] == ["computed", "assumed"]
    assert found.parts[-1].note == "raised after a lack of memory"
    assert sum(part.bytes for part in found.parts) == 30 * GIB


def test_the_size_of_a_cache_follows_from_its_blocks():
    """It is the inverse of the tokens that follow from a size."""
    settings = settings_of("vllm", {"block_size": 32})
    size = bytes_of_blocks(SHAPE, settings, 64)
    assert size == 64 * 32 * 128 * 1024
    assert tokens_in_cache(SHAPE, settings, size, 8192, 2048) == 64 * 32
