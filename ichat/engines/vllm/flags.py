"""The rules for arguments that vLLM does not know: those of its older releases, and those of SGLang."""

import json
from collections.abc import Mapping

from ichat.engines.flags import (
    KEY_RULES,
    CommandLine,
    Flag,
    FlagRule,
    FlagValueError,
    Outcome,
    Refusal,
    Replacement,
    Table,
    also_native,
    chosen,
    dropped,
    fraction,
    mapping,
    nested_in,
    part,
    refused,
    renamed,
    renaming,
    replace_with,
    same,
    single_value,
    switch,
    whole,
)
from ichat.engines.vocabulary import ATTENTION, GRAMMARS, METHODS, NOTHING, OLD_VLLM, REASONING, TOOLS

_SPECULATIVE, _OVERRIDES, _LOGGING = "--speculative-config", "--hf-overrides", "--logging-config"


def _chunk(flag: Flag, _: CommandLine) -> Outcome:
    tokens = whole(single_value(flag))
    if tokens > 0:
        return replace_with(
            "--max-num-batched-tokens", str(tokens), why="vLLM limits the tokens of a step, answers included"
        )
    return replace_with("--no-enable-chunked-prefill", why="vLLM says it so")


def _prefill(flag: Flag, line: CommandLine) -> Outcome:
    if line.has("--chunked-prefill-size", "--max-num-batched-tokens"):
        return Replacement((), "vLLM has one limit for the tokens of a step, which is given as well")
    return replace_with(
        "--max-num-batched-tokens",
        str(whole(single_value(flag))),
        why="vLLM limits the tokens of a step, answers included",
    )


def _pool(flag: Flag, line: CommandLine) -> Outcome:
    size = line.number("--block-size", "--page-size", default=0)
    if size < 1:
        return Refusal("vLLM counts blocks, not tokens; give --block-size as well, or --num-gpu-blocks-override")
    blocks = str(whole(single_value(flag)) // size)
    return replace_with("--num-gpu-blocks-override", blocks, why=f"vLLM counts blocks, of {size} tokens each")


def _experts(flag: Flag, line: CommandLine) -> Outcome:
    """Spread experts over all ranks or none: vLLM knows nothing between."""
    size, ranks = whole(single_value(flag)), line.number("--tp-size", "--tensor-parallel-size", "-tp", default=1)
    if size == 1:
        return Replacement((), "vLLM does not spread experts unless --enable-expert-parallel is given")
    if size != ranks:
        return Refusal(f"vLLM spreads experts over all ranks, {ranks} here, or none (--enable-expert-parallel)")
    return replace_with("--enable-expert-parallel", why="vLLM spreads experts over all of its ranks")


def _meeting(flag: Flag, _: CommandLine) -> Outcome:
    host, colon, port = single_value(flag).rpartition(":")
    if not colon or not port.isdigit():
        raise FlagValueError("must be like HOST:PORT")
    return replace_with("--master-addr", host.strip("[]"), "--master-port", port)


def _adapters(flag: Flag, line: CommandLine) -> Outcome:
    words: list[str] = []
    for text in flag.values:
        if text[:1] != "{":
            words.append(text if "=" in text else f"{text}={text}")
            continue
        adapter = mapping(text)
        if adapter.get("pinned"):
            return Refusal("vLLM pins no adapters; leave `pinned` out")
        words.append(json.dumps({"name": adapter.get("lora_name"), "path": adapter.get("lora_path")}))
    enable = [] if line.has("--enable-lora") else ["--enable-lora"]
    return replace_with(*enable, "--lora-modules", *words)


def _adapters_in_batch(flag: Flag, _: CommandLine) -> Outcome:
    count = max(1, whole(single_value(flag)) - 1)
    return replace_with("--max-loras", str(count), why="SGLang counts the model itself as one of them, vLLM does not")


def _draft_tokens(flag: Flag, line: CommandLine) -> Outcome:
    if line.has("--speculative-num-steps"):
        return Replacement((), "--speculative-num-steps says how many tokens vLLM drafts")
    count = whole(single_value(flag)) - 1
    why = "SGLang counts the token that the draft starts from, vLLM does not"
    return Replacement([part(_SPECULATIVE, "num_speculative_tokens", value=count)], why)


def _threshold(flag: Flag, _: CommandLine) -> Outcome:
    if fraction(single_value(flag)) >= 1:
        return Replacement((), "it is how vLLM accepts tokens")
    return Refusal("vLLM has no thresholds for draft tokens")


def _buckets(family: str) -> FlagRule:
    target, why = "--custom-histogram-buckets", "vLLM takes them for each kind of histogram"
    return FlagRule(
        lambda flag, _: Replacement([part(target, family, value=[fraction(text) for text in flag.values])], why)
    )


def _capture_sizes(flag: Flag, _: CommandLine) -> Outcome:
    return Replacement([Flag("--cudagraph-capture-sizes", flag.values)])


def _capital(flag: Flag, _: CommandLine) -> Outcome | None:
    level = single_value(flag)
    return (
        None
        if level == level.upper()
        else replace_with("--log-level", level.upper(), why="vLLM's levels are in capitals")
    )


def _log_config(flag: Flag, line: CommandLine) -> Outcome | None:
    if _LOGGING not in line.options:
        why = "this vLLM has it for uvicorn, which the worker does without; set the variable VLLM_LOGGING_CONFIG_PATH"
        return Refusal(why)
    if flag.name in line.options:
        return None
    target = f"{_LOGGING}.pylogging_config_file"
    return Replacement([part(*target.split("."), value=single_value(flag))], f"it is {target}")


def _named(target: str, key: str, name: str) -> Outcome:
    return Replacement([part(target, key, value=name)], f"it is {target}.{key}")


def _turned(names: Mapping[str, str]) -> dict[str, str]:
    return {theirs.lower(): ours for ours, theirs in names.items()}


_SPLIT = "vLLM separates prefill and decode by --kv-transfer-config"
_SHARE = "vLLM's share is for activations, too, SGLang's is not: by the same number vLLM has less KV cache"

_NOT_HERE: Mapping[str, str] = {
    "vLLM has no such logging; leave it out": (
        "--show-time-cost --decode-log-interval --enable-request-time-stats-logging --crash-dump-folder"
    ),
    "vLLM asks for one of --all2all-backend deepep_high_throughput and deepep_low_latency": (
        "--enable-deepep-moe --deepep-mode --deepep-config"
    ),
    "vLLM balances experts by --enable-eplb and --eplb-config": (
        "--ep-dispatch-algorithm --init-expert-location --eplb-algorithm --eplb-rebalance-layers-per-chunk "
        "--expert-distribution-recorder-mode --expert-distribution-recorder-buffer-size "
        "--enable-expert-distribution-metrics"
    ),
    "vLLM has no double sparsity; leave it out": (
        "--enable-double-sparsity --ds-channel-config-path --ds-heavy-channel-num --ds-heavy-token-num "
        "--ds-heavy-channel-type --ds-sparse-decode-threshold"
    ),
    _SPLIT: (
        "--disaggregation-transfer-backend --disaggregation-bootstrap-port --disaggregation-decode-tp "
        "--disaggregation-decode-dp --disaggregation-prefill-pp --disaggregation-ib-device "
        "--num-reserved-decode-tokens --pdlb-url"
    ),
    "vLLM keeps KV cache in the CPU's memory by --kv-offloading-size": (
        "--enable-hierarchical-cache --hicache-ratio --hicache-size --hicache-write-policy --hicache-io-backend"
    ),
    "vLLM dumps no tensors; leave it out": (
        "--debug-tensor-dump-output-folder --debug-tensor-dump-input-file --debug-tensor-dump-inject "
        "--debug-tensor-dump-prefill-only"
    ),
    "it tunes kernels of SGLang's; leave it out": (
        "--disable-cuda-graph-padding --enable-profile-cuda-graph --enable-nccl-nvls --enable-mscclpp "
        "--enable-tokenizer-batch-encode --disable-outlines-disk-cache --disable-overlap-cg-plan "
        "--enable-dp-lm-head --enable-p2p-check --triton-attention-reduce-in-fp32 "
        "--triton-attention-num-kv-splits --flashinfer-mla-disable-ragged --disable-shared-experts-fusion "
        "--disable-chunked-prefix-cache --enable-triton-kernel-moe --lora-backend"
    ),
    "name the GPUs by gpu_ids in ichat.toml, or by CUDA_VISIBLE_DEVICES": ("--base-gpu-id --gpu-id-step"),
}
"""Reasons for which vLLM refuses several of SGLang's flags."""

_NO_SERVER = "it concerns vLLM's own HTTP server, which an iChat worker replaces"
_NO_TLS = "the worker speaks no TLS itself; the gateway does (server_settings.tls_certificate)"
_SERVER: Mapping[str, FlagRule] = {
    "--uds": also_native(refused(f"{_NO_SERVER}; the worker's own flag is --unix-socket")),
    **same("--ssl-keyfile --ssl-certfile --ssl-ca-certs", also_native(refused(f"{_NO_SERVER}; {_NO_TLS}"))),
    "--grpc": also_native(switch(Refusal(_NO_SERVER), Replacement((), "the worker is without it anyway"))),
    "--grpc-port": also_native(refused(_NO_SERVER)),
    "--api-server-count": also_native(chosen({"1": None}, Refusal(_NO_SERVER))),
    **same("--enable-ssl-refresh --ssl-cert-reqs --ssl-ciphers", also_native(dropped(_NO_TLS))),
    **same("--uvicorn-log-level --log-level-http", also_native(dropped("the worker serves without uvicorn"))),
    **same(
        "--disable-uvicorn-access-log --disable-access-log-for-endpoints",
        also_native(dropped("the worker serves without uvicorn, and the gateway logs the requests")),
    ),
    **same(
        "--h11-max-incomplete-event-size --h11-max-header-count",
        also_native(dropped("the worker's own bound is --head-bytes-max")),
    ),
    "--log-config-file": also_native(FlagRule(_log_config)),
    **KEY_RULES,
}
"""Flags of vLLM's own HTTP server: flags without effect are refused, or left out with the reason."""

_SGLANG: Mapping[str, FlagRule] = {
    **{name: refused(why) for why, names in _NOT_HERE.items() for name in names.split()},
    "--model-path": renamed("--model"),
    "--tokenizer-path": renamed("--tokenizer"),
    "--context-length": renamed("--max-model-len"),
    "--mem-fraction-static": renamed("--gpu-memory-utilization", _SHARE),
    "--max-running-requests": renamed("--max-num-seqs"),
    "--max-queued-requests": renamed("--max-num-queued-reqs"),
    "--max-total-tokens": FlagRule(_pool),
    "--chunked-prefill-size": FlagRule(_chunk),
    "--max-prefill-tokens": FlagRule(_prefill),
    "--schedule-policy": chosen(
        {"fcfs": replace_with("--scheduling-policy",
        "fcfs")}, Refusal("vLLM schedules by fcfs or priority: --scheduling-policy")
    ),
    "--schedule-conservativeness": refused("vLLM's scheduler has nothing like it; leave it out"),
    "--page-size": renamed("--block-size"),
    **same("--tp-size --tp", renamed("--tensor-parallel-size")),
    **same("--pp-size --pp", renamed("--pipeline-parallel-size")),
    **same("--dp-size --dp", renamed("--data-parallel-size")),
    **same("--ep-size --ep --expert-parallel-size", FlagRule(_experts)),
    **same("--dist-init-addr --nccl-init-addr", FlagRule(_meeting)),
    "--nccl-port": refused("vLLM finds free ports itself; machines meet at --master-addr and --master-port"),
    "--dist-timeout": renamed("--distributed-timeout-seconds"),
    "--use-ray": switch(replace_with("--distributed-executor-backend", "ray"), NOTHING),
    "--random-seed": renamed("--seed"),
    "--sleep-on-idle": dropped("vLLM is idle while it has nothing to do"),
    "--skip-server-warmup": dropped("vLLM sends itself no request to warm up"),
    "--is-embedding": switch(replace_with("--runner", "pooling"), NOTHING),
    "--enable-multimodal": dropped("vLLM finds out by itself what a model takes"),
    "--impl": renamed("--model-impl"),
    "--model-impl": renaming("--model-impl", {"sglang": "vllm"}, "vLLM"),
    "--completion-template": refused("vLLM has no templates for completions; apply it in the client"),
    "--stream-output": dropped("vLLM's streams always have what is new only"),
    "--incremental-streaming-output": dropped("vLLM's streams always have what is new only"),
    "--json-model-override-args": nested_in(_OVERRIDES, convert=mapping, why=f"it is {_OVERRIDES}"),
    "--preferred-sampling-params": nested_in(
        "--override-generation-config", convert=mapping, why="it is --override-generation-config"
    ),
    "--file-storage-path": refused("vLLM stores no files; leave it out"),
    "--enable-cache-report": switch(replace_with("--enable-prompt-tokens-details"), NOTHING),
    "--load-balance-method": refused("vLLM balances its data parallel ranks itself; leave it out"),
    "--log-level": also_native(FlagRule(_capital)),
    "--log-requests": switch(replace_with("--enable-log-requests"), NOTHING),
    "--log-requests-level": refused("vLLM shortens what it logs of a request by --max-log-len"),
    "--enable-metrics": dropped("vLLM always has metrics"),
    "--collect-tokens-histogram": dropped("vLLM always has these histograms"),
    "--bucket-time-to-first-token": _buckets("time_to_first_token"),
    "--bucket-inter-token-latency": _buckets("inter_token_latency"),
    "--bucket-e2e-request-latency": _buckets("request_latency"),
    "--watchdog-timeout": refused("vLLM has no watchdog"),
    "--warmups": refused("vLLM has no warm-ups of your own; send requests once the worker is ready"),
    "--lora-paths": FlagRule(_adapters),
    "--max-loras-per-batch": FlagRule(_adapters_in_batch),
    "--max-loaded-loras": renamed("--max-cpu-loras"),
    "--attention-backend": renaming("--attention-backend", {**_turned(ATTENTION), "fa4": "FLASH_ATTN"}, "vLLM"),
    "--mm-attention-backend": chosen({
        "sdpa": replace_with("--mm-encoder-attn-backend", "TORCH_SDPA"),
        "fa3": replace_with("--mm-encoder-attn-backend", "FLASH_ATTN"),
        "triton_attn": replace_with("--mm-encoder-attn-backend", "TRITON_ATTN"),
    }, Refusal("vLLM has no such kernel (--mm-encoder-attn-backend)")),
    "--sampling-backend": refused("vLLM chooses it by the environment variable VLLM_USE_FLASHINFER_SAMPLER"),
    "--grammar-backend": chosen(
        {theirs: _named("--structured-outputs-config", "backend", ours) for ours, theirs in GRAMMARS.items()},
        Refusal("vLLM has xgrammar, guidance and outlines (--structured-outputs-config.backend), never none"),
    ),
    "--constrained-json-whitespace-pattern": refused(
        "vLLM can allow any white space or none (--structured-outputs-config.disable_any_whitespace)"
    ),
    "--constrained-json-disable-any-whitespace": switch(
        Replacement([part("--structured-outputs-config", "disable_any_whitespace", value=True)]), NOTHING
    ),
    "--reasoning-parser": renaming(
        "--reasoning-parser", {**_turned(REASONING), "qwen3-thinking": "qwen3", "kimi": "kimi_k2"}, "vLLM"
    ),
    "--tool-call-parser": renaming(
        "--tool-call-parser", {**_turned(TOOLS), "qwen25": "hermes", "qwen": "hermes", "glm": "glm45"}, "vLLM"
    ),
    "--kv-cache-dtype": renaming("--kv-cache-dtype", {"bf16": "bfloat16"}, "vLLM"),
    "--speculative-algorithm": chosen(
        {theirs.lower(): _named(_SPECULATIVE, "method", ours) for ours, theirs in METHODS.items()},
        Refusal("vLLM has no such way to speculate; see --speculative-config.method"),
    ),
    **same("--speculative-draft-model-path --speculative-draft-model", nested_in(_SPECULATIVE, "model")),
    "--speculative-draft-model-revision": nested_in(_SPECULATIVE, "revision"),
    "--speculative-draft-model-quantization": nested_in(_SPECULATIVE, "quantization"),
    "--speculative-num-steps": nested_in(_SPECULATIVE, "num_speculative_tokens", convert=whole),
    "--speculative-num-draft-tokens": FlagRule(_draft_tokens),
    "--speculative-eagle-topk": chosen(
        {"1": Replacement((), "vLLM drafts one token at each step")}, Refusal("vLLM drafts one token at each step")
    ),
    "--speculative-accept-threshold-single": FlagRule(_threshold),
    "--speculative-accept-threshold-acc": FlagRule(_threshold),
    "--speculative-token-map": refused("vLLM reads the vocabulary of a draft model in its checkpoint"),
    "--enable-ep-moe": switch(replace_with("--enable-expert-parallel"), NOTHING),
    "--enable-flashinfer-moe": switch(replace_with("--moe-backend", "flashinfer_cutlass"), NOTHING),
    "--enable-flashinfer-allreduce-fusion": switch(
        Replacement([part("--compilation-config", "pass_config", "fuse_allreduce_rms", value=True)]), NOTHING
    ),
    "--ep-num-redundant-experts": nested_in("--eplb-config", "num_redundant_experts", convert=whole),
    "--eplb-rebalance-num-iterations": nested_in("--eplb-config", "step_interval", convert=whole),
    "--disable-radix-cache": switch(replace_with("--no-enable-prefix-caching"), NOTHING),
    **same("--cuda-graph-max-bs --cuda-graph-max-bs-decode", renamed("--max-cudagraph-capture-size")),
    **same("--cuda-graph-bs --cuda-graph-bs-decode", FlagRule(_capture_sizes)),
    "--disable-cuda-graph": switch(
        replace_with("--enforce-eager", why="vLLM's comes without torch.compile, too"), NOTHING,
    ),
    "--disable-overlap-schedule": switch(replace_with("--no-async-scheduling"), NOTHING),
    "--enable-mixed-chunk": dropped("vLLM always mixes prefill and decode"),
    "--enable-two-batch-overlap": switch(replace_with("--enable-dbo"), NOTHING),
    "--enable-torch-compile": dropped("vLLM compiles unless --enforce-eager is given"),
    "--enable-memory-saver": switch(replace_with("--enable-sleep-mode"), NOTHING),
    "--enable-custom-logit-processor": refused("vLLM takes none from requests; --logits-processors names its own"),
    "--weight-loader-disable-mmap": switch(replace_with("--safetensors-load-strategy", "eager"), NOTHING),
    "--disaggregation-mode": chosen({"null": NOTHING}, Refusal(_SPLIT)),
    "--enable-dp-attention": refused(
        "vLLM says it by --data-parallel-size N, with --tensor-parallel-size divided by N and --enable-expert-parallel"
    ),
    "--torchao-config": refused("vLLM reads it in the checkpoint (--quantization torchao)"),
    "--enable-nan-detection": refused("vLLM counts them with the environment variable VLLM_COMPUTE_NANS_IN_LOGITS=1"),
    "--allow-auto-truncate": refused("vLLM truncates where a request says truncate_prompt_tokens"),
    "--num-continuous-decode-steps": chosen({"1": NOTHING}, Refusal("vLLM schedules every step")),
    "--enable-return-hidden-states": refused("vLLM returns them from pooling models only (--runner pooling)"),
    "--delete-ckpt-after-loading": refused("vLLM deletes no checkpoints; leave it out"),
    "--custom-weight-loader": refused("vLLM's loaders are named by --load-format"),
    "--hybrid-kvcache-ratio": refused("vLLM divides the KV cache among kinds of layers itself; leave it out"),
    "--max-micro-batch-size": refused("vLLM divides batches among the stages of a pipeline itself; leave it out"),
    "--moe-dense-tp-size": refused("vLLM splits dense layers over all tensor parallel ranks; leave it out"),
    "--torch-compile-max-bs": refused("vLLM compiles for all batch sizes; leave it out"),
    "--disable-fast-image-processor": refused('vLLM says it by --mm-processor-kwargs \'{"use_fast": false}\''),
}  # fmt: skip

TABLE = Table("vLLM", {**OLD_VLLM, **_SGLANG, **_SERVER})
