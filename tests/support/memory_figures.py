"""Load models with an engine on the CPU, in one process, and print its own figures of their memory.

    python tests/support/memory_figures.py ENGINE NAME=DIRECTORY[:KV_DTYPE] …

Run by the engine's own interpreter. It prints a line of JSON for each model, with its NAME: `cache_bytes` and `tokens`
of the KV cache, `weights` in bytes, and for vLLM `block`, `in_flight` and `context`.
"""

import json
import os
import sys
from collections.abc import Mapping

CACHE_BYTES = 1 << 28
TOKENS = 1 << 16
BATCH_TOKENS = 1024


def vllm_figures(directory: str, kv_dtype: str) -> Mapping[str, object]:
    """Return vLLM's figures. Its parameters are counted before the CPU's kernels pack them."""
    from vllm import LLM
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    llm = LLM(
        directory, enforce_eager=True, skip_tokenizer_init=True, max_num_batched_tokens=BATCH_TOKENS, kv_cache_memory_bytes=CACHE_BYTES,
        kv_cache_dtype=kv_dtype,
    )  # fmt: skip
    config = llm.llm_engine.vllm_config
    cache = config.cache_config
    figures = {
        "cache_bytes": cache.kv_cache_memory_bytes,
        "tokens": cache.kv_cache_size_tokens,
        "block": cache.block_size,
        "in_flight": config.max_in_flight_tokens,
        "context": config.model_config.max_model_len,
    }
    config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        model = initialize_model(config)
    return {**figures, "weights": sum(one.numel() * one.element_size() for one in model.parameters())}


def sglang_figures(directory: str, kv_dtype: str) -> Mapping[str, object]:
    """Return SGLang's figures: the bytes of its pool, which has a slot more than tokens."""
    from sglang.srt.managers.scheduler import Scheduler, SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    args = ServerArgs(
        model_path=directory, device="cpu", max_total_tokens=TOKENS, mem_fraction_static=0.3,
        skip_tokenizer_init=True, kv_cache_dtype=kv_dtype,
    )  # fmt: skip
    args.resolve_once()
    ports = PortArgs.init_new(args)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    scheduler = Scheduler(args, ports)
    runner = scheduler.tp_worker.model_runner
    pool, sizes = runner.token_to_kv_pool, runner.token_to_kv_pool.get_kv_size_bytes()
    size = int(sum(sizes) if isinstance(sizes, tuple) else sizes)
    return {
        "cache_bytes": size * pool.size // (pool.size + pool.page_size),
        "tokens": scheduler.max_total_num_tokens,
        "weights": sum(one.numel() * one.element_size() for one in runner.model.parameters()),
    }


def main(engine: str, models: list[str]) -> None:
    """Fork for each model: what the engine's import costs is paid once, and what a load leaves behind is gone."""
    if engine == "vllm":
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_CI_ENV="1", VLLM_CPU_KVCACHE_SPACE="1")
        import vllm  # noqa: F401

        figures = vllm_figures
    else:
        import sglang.srt.managers.scheduler  # noqa: F401

        figures = sglang_figures
    for model in models:
        name, _, rest = model.partition("=")
        directory, _, kv_dtype = rest.partition(":")
        child = os.fork()
        if not child:
            code = 1
            try:
                line = json.dumps({"name": name, **figures(directory, kv_dtype or "auto")})
                sys.stdout.write(f"\n{line}\n")
                sys.stdout.flush()
                code = 0
            finally:
                os._exit(code)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{engine} has not loaded {name}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
