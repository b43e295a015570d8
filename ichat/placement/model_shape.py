"""The shape of a model, read from its config.json: its layers, and what each keeps of a token in the KV cache."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from attrs import evolve, frozen

from ichat.config.package_data import read_toml

Attention = Literal["full", "latent", "none"]
Config = Mapping[str, Any]

LAYERS_MAX = 4096
"""The most layers of a model: a damaged config.json must not fill the memory."""
_LAYER_TYPES = {"full_attention": False, "sliding_attention": True}
_UNSCALED_ROPES = frozenset(("default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"))
"""Kinds of rotary embeddings by which the context is no longer than `max_position_embeddings`."""
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
_SIZES = {"float32": 4.0, "float": 4.0, "float16": 2.0, "half": 2.0, "bfloat16": 2.0}


class UnknownShape(ValueError):
    """The memory of a model cannot be computed; the text is the reason, in a clause."""


@frozen
class Mixture:
    """The experts of a model's layers."""

    experts: int
    used: int
    """The number of experts that work on a token."""
    width: int
    """The width of an expert."""
    shared_width: int
    """The width of the part that works on every token, 0 if there is none."""
    dense_layers: int
    """The number of layers with an ordinary MLP."""


@frozen
class Latent:
    """The dimensions of MLA."""

    kv_rank: int
    rope_dim: int
    query_rank: int
    """0: queries are not compressed."""
    plain_dim: int
    """The part of a head that is not rotated."""


@frozen
class ModelShape:
    """The dimensions of a model that decide its memory."""

    kind: str
    """Its `model_type`."""
    attention: Attention
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    width: int
    """The width of the MLP."""
    vocabulary: int
    context: int
    """The most tokens of a sequence, by the model itself."""
    windows: Sequence[int | None]
    """The window of each layer; None: it keeps every token."""
    is_tied: bool
    """Whether the same matrix serves for input and output."""
    quantization: str
    """The method by which the weights are quantized, "" if they are not."""
    has_small_cache: bool
    """Whether the model asks vLLM for a KV cache of 8 bits."""
    has_other_part: bool
    """Whether there is more than the language model: a part for pictures."""
    has_plain_mlp: bool
    has_sglang_windows: bool
    """Whether SGLang keeps no more than the window in layers with a window."""
    latent: Latent | None = None
    mixture: Mixture | None = None


@functools.cache
def _known() -> dict[str, Any]:
    return read_toml("ichat.placement", "shapes.toml")


def read_shape(config: Config, tokenizer_length: int | None = None) -> ModelShape:
    """Return the shape of a model with this config.json. Raises UnknownShape with the reason.

    `tokenizer_length` is the most tokens of a sequence by the model's tokenizer, if it says so.
    """
    outer = _text_of(config, "model_type")
    inner = _table_of(config, "text_config") or config
    known = _known()
    if inner is not config and outer not in known["wrappers"]:
        raise UnknownShape(f"its type {outer or '(none)'} is not known")
    kind = _text_of(inner, "model_type") or outer
    attention = next((one for one in ("full", "latent", "none") if kind in known[one]), None)
    if attention is None:
        raise UnknownShape(f"its type {kind or '(none)'} is not known")
    for table in (config, inner):
        if strange := next((key for key in known["not_understood"] if table.get(key)), None):
            raise UnknownShape(f"its config.json has {strange}, and its effect is not known")
    shape = _shape(kind, cast("Attention", attention), {**known["defaults"].get(kind, {}), **inner}, config)
    return evolve(shape, context=min(shape.context, tokenizer_length or shape.context))


def _shape(kind: str, attention: Attention, config: Config, whole: Config) -> ModelShape:
    known = _known()
    layers, hidden, heads = (
        _count(config, *keys)
        for keys in (("num_hidden_layers", "n_layers"), ("hidden_size", "dim"), ("num_attention_heads", "n_heads"))
    )
    if layers > LAYERS_MAX:
        raise UnknownShape(f"its config.json has {layers} layers: at most {LAYERS_MAX} are computed")
    latent = _latent_of(config) if attention == "latent" else None
    head_dim = _count(config, "head_dim", default=hidden // heads)
    value_dim = _count(config, "v_head_dim") if latent is not None else head_dim
    quantization = _table_of(whole, "quantization_config") or _table_of(config, "quantization_config")
    is_tied = config.get("tie_word_embeddings", whole.get("tie_word_embeddings"))
    return ModelShape(
        kind=kind,
        attention=attention,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_count(config, "num_key_value_heads", default=heads),
        head_dim=head_dim,
        value_dim=value_dim,
        width=_count(config, "intermediate_size", "hidden_dim", default=4 * hidden),
        vocabulary=_count(config, "vocab_size"),
        context=_context_of(kind, config),
        windows=_windows_of(kind, config, layers),
        is_tied=is_tied if isinstance(is_tied, bool) else kind in known["tied"],
        quantization=str(quantization.get("quant_method") or "unnamed") if quantization else "",
        has_small_cache=_has_small_cache(quantization),
        has_other_part=config.get("model_type") != whole.get("model_type") or bool(whole.get("vision_config")),
        has_plain_mlp=kind in known["plain_mlp"],
        has_sglang_windows=kind in known["sglang_windows"],
        latent=latent,
        mixture=_mixture_of(config, layers),
    )


def size_of_dtype(name: object) -> float:
    """Return the bytes of an element that an engine loads by its `dtype`: both load float32 as 16 bits by default.

    Raises UnknownShape.
    """
    if name in (None, "auto"):
        return 2.0
    if str(name) not in _SIZES:
        raise UnknownShape(f"dtype {name} is not known")
    return _SIZES[str(name)]


def _text_of(config: Config, key: str) -> str:
    value = config.get(key)
    return value if isinstance(value, str) else ""


def _table_of(config: Config, key: str) -> Config:
    """Return a table in a table, empty if it is left out."""
    value = config.get(key)
    return cast("Config", value) if isinstance(value, dict) else {}


def _count(config: Config, *keys: str, default: int | None = None) -> int:
    """Return a dimension by any of its names. Raises UnknownShape."""
    key, value = next(((key, config[key]) for key in keys if config.get(key) is not None), (keys[0], default))
    if value is None:
        raise UnknownShape(f"its config.json has no {key}")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 40:
        raise UnknownShape(f"{key} in its config.json is no count")
    return value


def _optional_count(config: Config, *keys: str) -> int:
    """Return a dimension, 0 if it is left out."""
    return _count(config, *keys) if any(config.get(key) for key in keys) else 0


def _latent_of(config: Config) -> Latent:
    return Latent(
        kv_rank=_count(config, "kv_lora_rank"),
        rope_dim=_count(config, "qk_rope_head_dim"),
        query_rank=_optional_count(config, "q_lora_rank"),
        plain_dim=_count(config, "qk_nope_head_dim"),
    )


def _mixture_of(config: Config, layers: int) -> Mixture | None:
    experts = _optional_count(config, *_EXPERTS)
    if experts == 0:
        return None
    width = _count(config, "moe_intermediate_size", "intermediate_size")
    shared = _optional_count(config, "n_shared_experts") * width
    step = _optional_count(config, "decoder_sparse_step", "moe_layer_freq") or 1
    dense = {*range(min(layers, _optional_count(config, "first_k_dense_replace")))}
    dense |= {number for number in range(layers) if step > 1 and (number + 1) % step}
    named = config.get("mlp_only_layers")
    numbers = cast("list[object]", named) if isinstance(named, list) else []
    dense |= {number for number in numbers if isinstance(number, int) and 0 <= number < layers}
    return Mixture(
        experts=experts,
        used=_count(config, "num_experts_per_tok", "experts_per_token", default=1),
        width=width,
        shared_width=shared or _optional_count(config, "shared_expert_intermediate_size"),
        dense_layers=len(dense),
    )


def _windows_of(kind: str, config: Config, layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer."""
    window = _optional_count(config, "sliding_window")
    have_windows = _have_windows(kind, config, layers)
    if not window or config.get("use_sliding_window") is False:
        return (None,) * layers
    return tuple(window if has_window else None for has_window in have_windows)


def _have_windows(kind: str, config: Config, layers: int) -> list[bool]:
    """Return whether each layer has a window, if the model has any. Raises UnknownShape."""
    if config.get("layer_types") is not None:
        return _are_sliding(config["layer_types"], layers)
    if config.get("use_sliding_window") is True:
        first = _count(config, "max_window_layers", default=layers)
        return [number >= first for number in range(layers)]
    period = _optional_count(config, "sliding_window_pattern", "_sliding_window_pattern")
    period = period or _known()["window_period"].get(kind, 0)
    return [not period or bool((number + 1) % period) for number in range(layers)]


def _are_sliding(types: object, layers: int) -> list[bool]:
    """Return whether each layer has a window, by the types of the layers. Raises UnknownShape."""
    named = cast("list[object]", types) if isinstance(types, list) else []
    if len(named) != layers:
        raise UnknownShape("layer_types in its config.json does not fit its layers")
    if strange := [one for one in named if one not in _LAYER_TYPES]:
        raise UnknownShape(f"its layers of type {strange[0]} are not understood")
    return [_LAYER_TYPES[str(one)] for one in named]


def _context_of(kind: str, config: Config) -> int:
    context = _count(config, "max_position_embeddings", "model_max_length", "max_sequence_length")
    if kind.startswith("gemma3"):
        return context
    table = _table_of(config, "rope_scaling") or _table_of(config, "rope_parameters")
    factor, rope_kind = table.get("factor", 1.0), str(table.get("rope_type", table.get("type", "default")))
    if rope_kind == "longrope":
        return _count(config, "original_max_position_embeddings", default=context)
    is_scaled = rope_kind not in _UNSCALED_ROPES
    return int(context * factor) if is_scaled and isinstance(factor, int | float) and 1 <= factor < 1 << 20 else context


def _has_small_cache(quantization: Config) -> bool:
    """Return whether the KV cache has 8 bits by a model's quantization_config."""
    inner = quantization.get("quantization")
    tables = [quantization, cast("Config", inner)] if isinstance(inner, dict) else [quantization]
    schemes = [cast("object", table.get("kv_cache_scheme")) for table in tables]
    found = [cast("Config", one) for one in schemes if isinstance(one, dict)]
    is_float_8 = any(one.get("num_bits") == 8 and one.get("type") == "float" for one in found)
    return is_float_8 or any(str(table.get("kv_cache_quant_algo")).upper() == "FP8" for table in tables)
