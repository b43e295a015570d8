"""Estimates of large models, by their config.json alone, against published figures; and the rules of each engine."""

import math

import attrs
import pytest

from ichat.placement.cache import bytes_per_token, tokens_in_cache
from ichat.placement.estimate import GIB, estimate, fewest_gpus, longest_context, tensor_sizes_of
from ichat.placement.model_shape import UnknownShape, read_shape
from ichat.placement.settings import Settings, settings_of
from ichat.placement.weights import implied_tensors, sum_weights

H100 = 81559 * 1024**2

LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "num_key_value_heads": 8, "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
}  # fmt: skip
LLAMA_8B = {
    **LLAMA,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
LLAMA_70B = {
    **LLAMA,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [], "sliding_window": None,
    "use_sliding_window": False, "max_window_layers": 48,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "max_position_embeddings": 163840,
    "tie_word_embeddings": False, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "moe_layer_freq": 1, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "quantization_config": {"quant_method": "fp8"}, "rope_scaling": {"factor": 40, "type": "yarn"},
}  # fmt: skip
GEMMA3_27B = {
    "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
    "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}  # fmt: skip
MISTRAL_24B = {
    "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
    "max_position_embeddings": 32768, "sliding_window": None, "tie_word_embeddings": False,
}  # fmt: skip


def weights_of(shape, element=2.0):
    return sum_weights(shape, implied_tensors(shape), element)


def estimate_of(config, gpu_bytes=None, **settings):
    shape = read_shape(config)
    return estimate(shape, weights_of(shape), Settings(**settings), gpu_bytes)


@pytest.mark.parametrize(
    ("config", "billions", "gigabytes"),
    [  # parameters by each model's card or report, and the total_size of its files; DeepSeek's have a layer more
        (LLAMA_8B, 8.03, 16.06),
        (LLAMA_70B, 70.6, 141.1),
        (QWEN3_30B, 30.5, 61.06),
        (DEEPSEEK_V3, 671, 688.59),
        (GEMMA3_27B, 27.0, 54.0),
        (MISTRAL_24B, 23.6, 47.15),
    ],
)
def test_weights_of_large_models_are_as_published(config, billions, gigabytes):
    """Within 5 %, by config.json alone."""
    shape = read_shape(config)
    parameters = sum(one.elements for one in implied_tensors(shape))
    assert parameters / 1e9 == pytest.approx(billions, rel=0.05)
    assert weights_of(shape).on_gpu() / 1e9 == pytest.approx(gigabytes, rel=0.05)


@pytest.mark.parametrize(
    ("config", "kilobytes"),
    [  # DeepSeek-V3's report on hardware (arXiv 2505.09343, table 1) names 70.272, and 327.680 for Qwen2.5-72B's shape
        (LLAMA_8B, 131.072),
        (LLAMA_70B, 327.680),
        (DEEPSEEK_V3, 70.272),
        (QWEN3_30B, 98.304),
        (MISTRAL_24B, 163.840),
    ],
)
def test_cache_of_a_token_is_as_published(config, kilobytes):
    """A token of a large model has the published size, with 16 bits."""
    assert estimate_of(config).token_bytes == kilobytes * 1000


def test_of_layers_with_a_window_only_the_others_count_by_the_token():
    """Gemma 3 keeps every token in each sixth layer: 10 of 62."""
    found = estimate_of(GEMMA3_27B)
    assert (found.token_bytes, found.window_layers) == (10 * 16 * 2 * 128 * 2, 52)
    assert estimate_of(GEMMA3_27B, backend="sglang").window_layers == 0  # SGLang keeps all of them
    assert estimate_of({**GEMMA3_27B, "layer_types": ["full_attention"] * 62}).window_layers == 0


def test_heads_are_shared_by_gpus_and_latent_vectors_are_not():
    """More GPUs than heads of keys keep copies of them; MLA's vector is whole on each GPU."""
    llama, deepseek = read_shape(LLAMA_70B), read_shape(DEEPSEEK_V3)
    assert [bytes_per_token(llama, Settings(tensor=number)) for number in (1, 8, 64)] == [4096, 512, 512]
    assert [bytes_per_token(deepseek, Settings(tensor=number)) for number in (1, 8)] == [1152, 1152]


def test_stages_divide_the_layers():
    """With 4 stages a GPU has a quarter of the layers, and one of the two ends."""
    whole, stage = estimate_of(LLAMA_70B), estimate_of(LLAMA_70B, pipeline=4)
    assert stage.token_bytes * 4 == whole.token_bytes
    ends = 2 * 128256 * 8192
    assert stage.parts[0].bytes == pytest.approx((whole.parts[0].bytes - 2 * ends) / 4 + ends, rel=1e-3)


def test_elements_of_the_cache_have_the_size_that_the_flags_say():
    """`fp8` halves a token, 4 bits have a scale for 16 of them, and a model may ask vLLM for 8 bits itself."""
    shape = read_shape(LLAMA_8B)
    sizes = [bytes_per_token(shape, settings_of("vllm", {"kv_cache_dtype": name})) for name in ("auto", "fp8", "nvfp4")]
    assert sizes == [4096, 2048, 1152]
    for scheme in ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, {"kv_cache_quant_algo": "FP8"}):
        small = read_shape({**LLAMA_8B, "quantization_config": {"quant_method": "fp8", **scheme}})
        assert bytes_per_token(small, Settings()) == 2048
        assert bytes_per_token(small, Settings(backend="sglang")) == 4096


def test_the_fewest_gpus_hold_weights_and_a_sequence():
    """One less of the possible numbers would not hold them."""
    for config, fewest in ((LLAMA_8B, 1), (LLAMA_70B, 4), (DEEPSEEK_V3, 16), (MISTRAL_24B, 1)):
        shape = read_shape(config)
        weights = weights_of(shape)
        assert fewest_gpus(shape, weights, Settings(), H100) == fewest
        below = [number for number in tensor_sizes_of(shape) if number < fewest]
        assert not any(estimate(shape, weights, Settings(tensor=number), H100).fits for number in below)
    shape = read_shape(LLAMA_70B)
    assert fewest_gpus(shape, weights_of(shape), Settings(), 1 * GIB) is None


def test_the_longest_context_fits_and_the_next_does_not():
    """In steps of 1024 tokens."""
    shape = read_shape(LLAMA_8B)
    weights, gpu = weights_of(shape), 24 * GIB
    longest = longest_context(shape, weights, Settings(), gpu)
    assert 0 < longest < shape.context
    assert estimate(shape, weights, Settings(context=longest), gpu).fits
    assert not estimate(shape, weights, Settings(context=longest + 1024), gpu).fits
    assert longest_context(shape, weights, Settings(), 8 * GIB) == 0


@pytest.mark.parametrize(("backend", "arguments"), [("sglang", {}), ("vllm", {"max_model_len": "auto"})])
def test_an_engine_that_shortens_its_context_starts_with_what_fits(backend, arguments):
    """No whole sequence must fit, but a token must; the fewest GPUs hold a whole sequence all the same."""
    shape = read_shape(LLAMA_8B)
    weights, settings = weights_of(shape), settings_of(backend, arguments)
    some, none = (estimate(shape, weights, settings, gpu) for gpu in (24 * GIB, 15 * GIB))
    assert (some.fits, some.holds_context, none.fits) == (True, False, False)
    assert not estimate(shape, weights, Settings(), 24 * GIB).fits
    assert fewest_gpus(shape, weights, settings, 24 * GIB) > 1
    assert estimate(shape, weights, settings).fits is None


def test_the_rest_for_the_cache_follows_each_engines_own_rule():
    """vLLM takes a share of all memory; SGLang a share of what is free, and weights and cache are within it."""
    shape = read_shape(LLAMA_8B)
    weights = weights_of(shape)
    vllm = estimate(shape, weights, Settings(share=0.5), H100)
    assert vllm.cache_bytes == math.ceil(0.5 * H100) - sum(part.bytes for part in vllm.parts)
    sglang = estimate(shape, weights, Settings("sglang", share=0.5), H100)
    assert sglang.cache_bytes == math.floor((H100 - GIB // 2) * 0.5) - weights.on_gpu()
    small = estimate(shape, weights, Settings("sglang", batch_tokens=2048, is_eager=True), H100)
    assert sum(part.bytes for part in small.parts[1:-1]) == 10 * GIB  # SGLang's floor above 60 GiB
    assert estimate(shape, weights, Settings(cache_bytes=GIB), H100).tokens == GIB // (131072 * 16) * 16


def test_every_figure_that_is_not_computed_says_so():
    """Weights are computed; activations, graphs, parallelism and CUDA's own memory are assumed."""
    for backend in ("vllm", "sglang"):
        grades = {part.name: part.grade for part in estimate_of(LLAMA_8B, H100, backend=backend, tensor=2).parts}
        assert grades.pop("weights") == "computed"
        assert grades.pop("reserve", "computed") == "computed"
        assert set(grades.values()) == {"assumed"}
        assert {"activations", "graphs", "CUDA context"} <= grades.keys()
    assert "graphs" not in {part.name for part in estimate_of(LLAMA_8B, is_eager=True).parts}


def test_an_encoder_has_no_cache():
    """Its tokens are 0, and it fits where its weights do."""
    shape = read_shape({
        "model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "vocab_size": 30522, "max_position_embeddings": 512,
    })  # fmt: skip
    found = estimate(shape, sum_weights(shape, []), Settings(), 16 * GIB)
    assert (found.tokens, found.token_bytes, found.sequence_bytes, found.at_once, found.fits) == (0, 0, 0, None, True)


def test_vllm_counts_sequences_where_layers_have_windows():
    """A window holds its tokens, those of the steps under way, and a block more; the pool has groups of equal size."""
    shape = read_shape({**GEMMA3_27B, "num_hidden_layers": 12, "max_position_embeddings": 4096, "sliding_window": 512})
    settings = Settings(block=128, batches=1)
    token = 16 * 2 * 128 * 2
    blocks = GIB // (2 * token * 128)  # 12 layers: 2 without a window, 5 times 2 with one
    of_sequence = 4096 // 128 + 5 * (math.ceil((511 + 1025) / 128) + 1)
    assert tokens_in_cache(shape, settings, GIB, 4096, 1025) == int(blocks / of_sequence * 4096)
    uniform = attrs.evolve(settings, keeps_windows=False)
    assert tokens_in_cache(shape, uniform, GIB, 4096, 1024) == GIB // (12 * token * 128) * 128


def test_groups_of_nearly_equal_size_are_filled_up():
    """Of 12 layers with a window and 10 without, vLLM makes two groups of 12, not four of 10."""
    types = ["sliding_attention", "full_attention"] * 10 + ["sliding_attention"] * 2
    shape = read_shape({**GEMMA3_27B, "num_hidden_layers": 22, "layer_types": types, "sliding_window": 512})
    blocks = GIB // (12 * 16 * 2 * 128 * 2 * 16)
    of_sequence = 4096 // 16 + (511 + 2 * 1025 + 15) // 16 + 1
    assert tokens_in_cache(shape, Settings(), GIB, 4096, 1025) == int(blocks / of_sequence * 4096)


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({}, 131072),  # llama3's scaling is in max_position_embeddings
        ({"rope_scaling": {"factor": 4.0, "rope_type": "yarn"}}, 131072),
        ({"rope_scaling": {"factor": 4.0, "type": "linear"}}, 524288),
        ({"rope_scaling": None, "rope_parameters": {"factor": 2.0, "rope_type": "dynamic"}}, 262144),
        ({"rope_scaling": {"rope_type": "longrope"}, "original_max_position_embeddings": 4096}, 4096),
    ],
)
def test_the_context_is_scaled_as_the_engine_scales_it(changes, context):
    """Some kinds of scaling lengthen it; Gemma 3's is counted already."""
    assert read_shape({**LLAMA_8B, **changes}).context == context
    assert read_shape(GEMMA3_27B).context == 131072


def test_a_window_counts_where_the_model_uses_it():
    """A switch, the first layer with a window, and the layers' types decide."""
    qwen = {**LLAMA_8B, "model_type": "qwen2", "num_hidden_layers": 4, "sliding_window": 4096, "max_window_layers": 3}
    assert read_shape({**qwen, "use_sliding_window": False}).windows == (None,) * 4
    assert read_shape({**qwen, "use_sliding_window": True}).windows == (None, None, None, 4096)
    mistral = read_shape({**MISTRAL_24B, "num_hidden_layers": 2, "sliding_window": 4096})
    assert mistral.windows == (4096, 4096)
    assert estimate(mistral, weights_of(mistral), Settings()).window_layers == 2
    assert estimate(mistral, weights_of(mistral), Settings("sglang")).window_layers == 0


STRANGE = [
    ({"model_type": "qwen3_next"}, "type qwen3_next is not known"),
    ({}, r"type \(none\) is not known"),
    ({**DEEPSEEK_V3, "index_topk": 2048}, "index_topk"),
    ({**LLAMA_8B, "is_encoder_decoder": True}, "is_encoder_decoder"),
    ({**LLAMA_8B, "layer_types": ["linear_attention"] * 32}, "linear_attention"),
    ({**LLAMA_8B, "layer_types": ["full_attention"]}, "layer_types"),
    ({**LLAMA_8B, "num_key_value_heads": [8, 4]}, "num_key_value_heads"),
    ({**LLAMA_8B, "hidden_size": "4096"}, "hidden_size"),
    ({**LLAMA_8B, "num_hidden_layers": 0}, "num_hidden_layers"),
    ({**LLAMA_8B, "num_hidden_layers": 1 << 39}, "at most 4096"),
    ({**LLAMA_8B, "num_attention_heads": None}, "no num_attention_heads"),
    ({"model_type": "mllama", "text_config": LLAMA_8B}, "mllama"),
    ({**DEEPSEEK_V3, "kv_lora_rank": None}, "no kv_lora_rank"),
]


@pytest.mark.parametrize(("config", "reason"), STRANGE)
def test_an_unknown_shape_has_no_figure(config, reason):
    """Attention that is not understood, and dimensions that are not there, are refused with the reason."""
    with pytest.raises(UnknownShape, match=reason):
        read_shape(config)


def test_values_of_another_type_do_not_count():
    """Before a start, a damaged config.json is the engine's to refuse."""
    shape = read_shape({**LLAMA_8B, "num_experts": 4, "mlp_only_layers": 5})
    assert shape.mixture.dense_layers == 0
    infinite = {"rope_type": "linear", "factor": float("inf")}
    assert read_shape({**LLAMA_8B, "rope_scaling": infinite}).context == shape.context


@pytest.mark.parametrize(
    ("backend", "arguments", "reason"),
    [
        ("tgi", {}, "engine tgi"),
        ("vllm", {"speculative_config": {"model": "x"}}, "speculative_config"),
        ("sglang", {"dp_size": 2}, "dp_size"),
        ("vllm", {"cpu_offload_gb": 4}, "cpu_offload_gb"),
        ("vllm", {"enable_lora": True}, "enable_lora"),
        ("sglang", {"disaggregation_mode": "decode"}, "disaggregation_mode"),
        ("vllm", {"hf_overrides": {"num_hidden_layers": 2}}, "hf_overrides"),
        ("vllm", {"limit_mm_per_prompt": {"image": 0}}, "limit_mm_per_prompt"),
        ("vllm", {"kv_cache_dtype": "turboquant_4bit_nc"}, "turboquant_4bit_nc"),
        ("vllm", {"dtype": "int4"}, "int4"),
        ("vllm", {"tensor_parallel_size": 1.5}, "tensor_parallel_size must be a count"),
        ("vllm", {"tensor_parallel_size": 0}, "tensor_parallel_size must be a count"),
        ("vllm", {"max_model_len": "long"}, "max_model_len must be a count"),
        ("vllm", {"max_model_len": 10**400}, "max_model_len must be a count"),
    ],
)
def test_flags_with_an_effect_that_is_not_computed_have_no_figure(backend, arguments, reason):
    """Never too low a figure."""
    with pytest.raises(UnknownShape, match=reason):
        settings_of(backend, arguments)


def test_flags_are_read_by_each_of_their_names():
    """vLLM's and SGLang's words lead to the same settings; `auto` is the engine's choice."""
    vllm = settings_of("vllm", {"tensor_parallel_size": 2, "max_model_len": 4096, "gpu_memory_utilization": 0.5})
    sglang = settings_of("sglang", {"tp": "2", "context_length": 4096, "mem_fraction_static": 0.5})
    chosen = ("tensor", "context", "share")
    assert [getattr(vllm, name) for name in chosen] == [getattr(sglang, name) for name in chosen] == [2, 4096, 0.5]
    fitted = settings_of("vllm", {"max_model_len": "auto"})
    assert (fitted.context, fitted.fits_context, vllm.fits_context) == (None, True, False)
