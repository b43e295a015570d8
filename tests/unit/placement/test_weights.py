"""Weights by the headers of safetensors files: where each tensor is, how GPUs share it, and damaged files."""

import json
import struct

import pytest

from ichat.placement.model_shape import read_shape
from ichat.placement.weights import (
    DamagedFile,
    Tensor,
    implied_tensors,
    length_of_header,
    sum_weights,
    tensors_of_header,
)

SMALL = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}  # fmt: skip
LATENT = {
    **SMALL, "model_type": "deepseek_v3", "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 32, "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip


def bytes_of(shape, *tensors, tensor=1, pipeline=1, element=2.0):
    return sum_weights(shape, tensors, element).on_gpu(tensor, pipeline)


def header(**entries):
    return json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()


def test_elements_have_the_size_that_engines_load():
    """Floats become 16 bits, or what `dtype` says; quantized elements stay, and so do the scales beside them."""
    plain, quantized = read_shape(SMALL), read_shape({**SMALL, "quantization_config": {"quant_method": "awq"}})
    of = [bytes_of(plain, Tensor("model.layers.0.mlp.up_proj.weight", dtype, 100)) for dtype in ("F32", "BF16", "I8")]
    assert of == [200, 200, 100]
    assert bytes_of(plain, Tensor("model.layers.0.x.weight", "BF16", 100), element=4.0) == 400
    packed = [Tensor("model.layers.0.x.qweight", "I32", 100), Tensor("model.layers.0.x.scales", "F32", 10)]
    assert bytes_of(quantized, *packed) == 440


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("model.layers.0.self_attn.q_proj.weight", 8),
        ("model.layers.0.self_attn.k_proj.weight", 2),
        ("model.layers.0.input_layernorm.weight", 1),
        ("model.layers.0.mlp.gate.weight", 1),
        ("model.layers.0.mlp.gate_proj.weight", 8),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", 1),
        ("vision_tower.layers.9.self_attn.k_proj.weight", 8),
    ],
)
def test_gpus_share_all_but_small_tensors(name, share):
    """Eight GPUs have an eighth each; of keys and values as many parts as heads; norms and routers are whole."""
    assert bytes_of(read_shape(SMALL), Tensor(name, "BF16", 800), tensor=8) == 1600 // share


def test_layers_beyond_the_last_and_a_second_output_matrix_do_not_count():
    """Layers for speculation stay on the disk; tied embeddings are in memory once, and in stages at both ends."""
    plain, tied = read_shape(SMALL), read_shape({**SMALL, "tie_word_embeddings": True})
    assert bytes_of(plain, Tensor("model.layers.4.x.weight", "BF16", 100)) == 0
    both = [Tensor("model.embed_tokens.weight", "BF16", 1024, 1024), Tensor("lm_head.weight", "BF16", 1024, 1024)]
    assert [bytes_of(shape, *both) for shape in (plain, tied)] == [4096, 2048]
    assert [bytes_of(shape, *both, pipeline=2) for shape in (plain, tied)] == [2048, 2048]
    assert bytes_of(plain, Tensor("lm_head.weight", "BF16", 65 * 10, 65)) == 128 * 10 * 2  # rows are filled up


def test_the_quantized_projection_of_latent_vectors_is_there_twice():
    """Both engines keep a copy of it that is not quantized."""
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    assert bytes_of(read_shape(LATENT), Tensor(name, "F8_E4M3", 100)) == 300
    assert bytes_of(read_shape(LATENT), Tensor(name, "BF16", 100)) == 200


def test_implied_tensors_follow_quantization():
    """Eight bits halve all but the embeddings; of other methods config.json does not say enough."""
    plain = sum_weights(read_shape(SMALL), implied_tensors(read_shape(SMALL))).on_gpu()
    small = read_shape({**SMALL, "quantization_config": {"quant_method": "fp8"}})
    ends = 2 * 1024 * 256 * 2
    assert sum_weights(small, implied_tensors(small)).on_gpu() == (plain - ends) // 2 + ends
    for config in ({**SMALL, "quantization_config": {"quant_method": "awq"}}, {**SMALL, "vision_config": {"a": 1}}):
        with pytest.raises(ValueError, match="files are not here"):
            implied_tensors(read_shape(config))


def test_a_header_names_the_tensors():
    """Metadata is none."""
    entry = {"dtype": "BF16", "shape": [4, 5], "data_offsets": [0, 40]}
    assert tensors_of_header(header(a=entry), 40) == [Tensor("a", "BF16", 20, 4)]
    assert length_of_header(struct.pack("<Q", 77)) == 77


@pytest.mark.parametrize(
    ("content", "damage"),
    [
        (b"{", "damaged header"),
        (b"[]", "damaged header"),
        (header(a=5), "damaged header"),
        (header(a={"dtype": "BF16"}), "damaged header"),
        (header(a={"dtype": "BF16", "shape": [-1]}), "damaged header"),
        (header(a={"dtype": "BF16", "shape": "4"}), "damaged header"),
        (header(a={"dtype": "Q9", "shape": [4]}), "unknown dtype Q9"),
        (header(a={"dtype": "BF16", "shape": [21]}), "cut off"),
        (b'{"a":' + b"[" * 100_000, "damaged header"),
    ],
)
def test_a_damaged_header_is_named(content, damage):
    """Never a number."""
    with pytest.raises(DamagedFile, match=damage):
        tensors_of_header(content, 40)


@pytest.mark.parametrize("start", [b"", b"\0" * 7, struct.pack("<Q", 0), struct.pack("<Q", 1 << 40), b"version "])
def test_a_file_that_does_not_begin_with_a_length_is_refused(start):
    """A header is 2 bytes to 100 MB long."""
    with pytest.raises(DamagedFile):
        length_of_header(start)
