"""The flags of an engine that decide its memory, read from its arguments by any of their names."""

import math
from typing import cast

from attrs import frozen

from ichat.config.engine_args import PIPELINE, SHARE, TENSOR, Arguments, number_of
from ichat.placement.model_shape import UnknownShape, size_of_dtype

RANKS_MAX = 4096
_CACHE_SIZES = {
    "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "bfloat16": 2.0, "bf16": 2.0, "float16": 2.0,
    "nvfp4": 0.5 + 1 / 16, "fp4_mx_block16": 0.5 + 1 / 16,
}  # fmt: skip
"""The bytes of an element in the KV cache; those of 4 bits have a scale for every 16."""
_NOT_COUNTED = (
    ("speculative_config", "speculative_algorithm", "spec_method", "speculative_draft_model_path"),
    ("cpu_offload_gb", "cpu_offload_params", "offload_group_size"),
    ("enable_lora", "lora_paths", "lora_modules"),
    ("hf_overrides", "json_model_override_args", "hf_config_path"),
    ("config", "config_file"),
    ("enable_dp_attention", "disaggregation_mode"),
    ("language_model_only", "language_only"),
)
"""Arguments with an effect on the memory that is not computed."""
_MORE_THAN_ONE = ("decode_context_parallel_size", "dcp_size", "data_parallel_size", "dp_size", "dp", "attn_cp_size")
"""Numbers that divide or multiply a model in other ways than those above; 1 changes nothing."""


@frozen
class Settings:
    """The settings of an engine; None: the engine chooses."""

    backend: str = "vllm"
    tensor: int = 1
    """The number of GPUs that share each layer."""
    pipeline: int = 1
    """The number of stages that the layers are divided into."""
    context: int | None = None
    """The most tokens of a sequence."""
    fits_context: bool = False
    """Whether the engine lowers that number until it fits."""
    element: float = 2.0
    """The bytes of an element of the weights."""
    cache_element: float | None = None
    """The bytes of an element of the KV cache; None: as the model has it."""
    share: float | None = None
    batch_tokens: int | None = None
    """The most tokens of a step."""
    sequences: int | None = None
    """The most sequences of a step."""
    block: int = 16
    """The tokens of a block of the KV cache; SGLang's page."""
    batches: int = 2
    """Steps of vLLM that may be under way at once; a block outside a window is freed after them."""
    is_eager: bool = False
    """Whether the engine captures no graphs."""
    keeps_windows: bool = True
    """Whether layers with a window may keep less than the others."""
    window_share: float = 0.8
    """SGLang's size of the cache of layers with a window, as a share of the others'."""
    cache_bytes: int | None = None
    """vLLM's KV cache on each GPU, if it is set."""
    tokens_max: int | None = None
    """The most tokens in the KV cache, if that is set."""

    @property
    def ranks(self) -> int:
        """The number of GPUs."""
        return self.tensor * self.pipeline


def settings_of(backend: str, arguments: Arguments) -> Settings:
    """Return the settings in an engine's arguments, which have underscores. Raises UnknownShape."""
    _refuse_unknown(backend, arguments)
    pipeline = _count_of(arguments, *PIPELINE) or 1
    is_sglang = backend == "sglang"
    return Settings(
        backend=backend,
        tensor=_count_of(arguments, *TENSOR) or 1,
        pipeline=pipeline,
        context=_count_of(arguments, "max_model_len", "context_length"),
        fits_context=is_sglang or arguments.get("max_model_len") in ("auto", -1),
        element=size_of_dtype(arguments.get("dtype")),
        cache_element=_cache_element(arguments.get("kv_cache_dtype")),
        share=number_of(arguments, *SHARE, default=0) or None,
        batch_tokens=_count_of(arguments, "max_num_batched_tokens", "chunked_prefill_size"),
        sequences=_count_of(arguments, "max_num_seqs", "max_running_requests"),
        block=_count_of(arguments, "block_size", "page_size") or (1 if is_sglang else 16),
        batches=pipeline + (arguments.get("async_scheduling") is not False),
        is_eager=_is_on(arguments, "enforce_eager", "disable_cuda_graph"),
        keeps_windows=not _is_on(arguments, "disable_hybrid_kv_cache_manager", "disable_hybrid_swa_memory"),
        window_share=number_of(arguments, "swa_full_tokens_ratio", default=0.8),
        cache_bytes=_count_of(arguments, "kv_cache_memory_bytes"),
        tokens_max=_count_of(arguments, "max_total_tokens"),
    )


def _refuse_unknown(backend: str, arguments: Arguments) -> None:
    """Raise UnknownShape for an engine or arguments with an effect that is not computed."""
    if backend not in ("vllm", "sglang"):
        raise UnknownShape(f"the engine {backend} is not known")
    if given := next((name for names in _NOT_COUNTED for name in names if _is_set(arguments.get(name))), None):
        raise UnknownShape(f"the effect of {given} is not computed")
    if given := next((name for name in _MORE_THAN_ONE if number_of(arguments, name, default=1) != 1), None):
        raise UnknownShape(f"the effect of {given} is not computed")
    limits = arguments.get("limit_mm_per_prompt")
    if isinstance(limits, dict) and 0 in cast("dict[str, object]", limits).values():
        raise UnknownShape("the effect of limit_mm_per_prompt is not computed")


def _count_of(arguments: Arguments, *names: str) -> int | None:
    """Return a count, None if it is left out. Raises UnknownShape."""
    given = next((name for name in names if arguments.get(name) is not None), None)
    if given is None or arguments[given] in ("auto", -1):
        return None
    number = number_of(arguments, given, default=math.nan)
    if not (number.is_integer() and 1 <= number < 1 << 50) or (given in (*TENSOR, *PIPELINE) and number > RANKS_MAX):
        raise UnknownShape(f"{given} must be a count, not {str(arguments[given])[:40]}")
    return int(number)


def _cache_element(name: object) -> float | None:
    if name in (None, "auto"):
        return None
    if str(name) not in _CACHE_SIZES:
        raise UnknownShape(f"kv_cache_dtype {str(name)[:40]} is not known")
    return _CACHE_SIZES[str(name)]


def _is_on(arguments: Arguments, *names: str) -> bool:
    return any(arguments.get(name) is True for name in names)


def _is_set(value: object) -> bool:
    return value not in (None, False, 0, "", "null")
