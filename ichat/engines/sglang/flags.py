"""The rules for arguments that SGLang does not know: vLLM's, old and new, and those of its own older releases."""

from collections.abc import Mapping

import ichat.engines.sglang.flag_rules as rules
from ichat.engines.flags import (
    KEY_RULES,
    Flag,
    FlagRule,
    Refusal,
    Replacement,
    Table,
    also_native,
    chosen,
    dropped,
    expand_json,
    nested_in,
    part,
    refused,
    renamed,
    renaming,
    replace_with,
    same,
    switch,
    whole,
)
from ichat.engines.sglang.flag_rules import NOTHING
from ichat.engines.vocabulary import ATTENTION, OLD_VLLM, REASONING, TOOLS

_SHARE = (
    "SGLang's share is for weights and KV cache only, vLLM's for activations, too: by the same number SGLang leaves"
    " less for the rest, so take a smaller one if memory runs out"
)


def _only(value: str, why: str) -> FlagRule:
    """Return the rule of a flag that accepts only SGLang's own behaviour."""
    return chosen({value: NOTHING}, Refusal(why))


_CORS = "SGLang admits every origin, method and header, with credentials; the gateway's cors_origins says which may"
_KERNELS = {name: name for name in (
    "triton", "flashinfer_trtllm", "flashinfer_cutlass", "flashinfer_cutedsl", "cutlass", "deep_gemm", "marlin",
    "aiter", "humming",
)}  # fmt: skip

_COMMON: Mapping[str, FlagRule] = {
    "-tp": renamed("--tensor-parallel-size"),
    "-pp": renamed("--pipeline-parallel-size"),
    "-dp": renamed("--data-parallel-size"),
    "-dcp": renamed("--decode-context-parallel-size"),
    "-ep": FlagRule(rules.expert_ranks),
    "-q": renamed("--quantization"),
    "-n": renamed("--nnodes"),
    "-r": renamed("--node-rank"),
    "-sc": renamed("--speculative-config"),
    "-cc": renamed("--compilation-config"),
    "--served-model-name": also_native(FlagRule(rules.one_name)),
    "--tokenizer": renamed("--tokenizer-path"),
    "--tokenizer-mode": also_native(chosen({
        "auto": None, "slow": None, "hf": replace_with("--tokenizer-mode", "auto"),
    })),
    "--tokenizer-revision": FlagRule(rules.same_revision),
    "--code-revision": FlagRule(rules.same_revision),
    "--hf-config-path": refused("SGLang reads the configuration beside the model; change it by --hf-overrides"),
    "--hf-overrides": expand_json(rules.config_overrides),
    "--hf-token": refused("SGLang reads the environment variable HF_TOKEN"),
    "--config-format": chosen({
        "auto": NOTHING, "hf": replace_with("--model-config-parser", "hf"),
        "mistral": replace_with("--model-config-parser", "mistral"),
    }, Refusal("SGLang knows auto, hf and mistral")),
    "--model-impl": renaming("--model-impl", {"vllm": "sglang"}, "SGLang"),
    **same("--gpu-memory-utilization --device-memory-utilization", renamed("--mem-fraction-static", _SHARE)),
    "--max-model-len": FlagRule(rules.context_length),
    "--max-num-seqs": renamed("--max-running-requests"),
    "--max-num-queued-reqs": renamed("--max-queued-requests"),
    "--max-num-batched-tokens": FlagRule(rules.step_tokens),
    "--enable-chunked-prefill": switch(NOTHING, replace_with("--chunked-prefill-size", "-1", why="SGLang says it so")),
    "--enable-prefix-caching": switch(NOTHING, replace_with("--disable-radix-cache", why="SGLang says it so")),
    "--enforce-eager": FlagRule(rules.eager),
    "--cudagraph-capture-sizes": FlagRule(lambda flag, _: Replacement([Flag("--cuda-graph-bs-decode", flag.values)])),
    "--max-cudagraph-capture-size": renamed("--cuda-graph-max-bs-decode"),
    "--compilation-config": refused("SGLang compiles by --enable-torch-compile, and has --cuda-graph-bs-decode"),
    **same("--optimization-level -O", refused("SGLang has no levels; see --enable-torch-compile")),
    "--seed": renamed("--random-seed"),
    "--kv-cache-dtype": renaming("--kv-cache-dtype", {"fp8": "fp8_e4m3"}, "SGLang"),
    "--block-size": renamed("--page-size"),
    "--num-gpu-blocks-override": FlagRule(rules.cache_tokens),
    "--cpu-offload-gb": also_native(FlagRule(rules.offload_gb)),
    "--kv-offloading-size": refused("SGLang says it for each rank: --enable-hierarchical-cache --hicache-size GB"),
    "--enable-sleep-mode": switch(replace_with("--enable-memory-saver"), NOTHING),
    "--async-scheduling": switch(NOTHING, replace_with("--disable-overlap-schedule", why="SGLang says it so")),
    "--scheduling-policy": chosen({
        "fcfs": replace_with("--schedule-policy", "fcfs"),
        "priority": replace_with("--enable-priority-scheduling", "--schedule-low-priority-values-first",
                        why="SGLang asks for it so, and prefers high values unless told otherwise"),
    }, Refusal("SGLang has fcfs and priority of vLLM's policies")),
    "--scheduler-cls": refused("SGLang's scheduler cannot be exchanged; leave it out"),
    "--distributed-executor-backend": chosen({
        "ray": replace_with("--use-ray"), "mp": NOTHING, "uni": NOTHING,
    }, Refusal("SGLang has ray and mp")),
    **same("--master-addr --master-port", FlagRule(rules.meeting_address)),
    "--headless": switch(Replacement((), "SGLang knows by --node-rank who leads"), NOTHING),
    "--distributed-timeout-seconds": renamed("--dist-timeout"),
    "--enable-expert-parallel": FlagRule(rules.expert_ranks),
    "--eplb-config": refused("SGLang has --eplb-rebalance-num-iterations and --ep-num-redundant-experts"),
    "--enable-dbo": switch(replace_with("--enable-two-batch-overlap"), NOTHING),
    "--all2all-backend": chosen({
        "allgather_reducescatter": NOTHING,
        "deepep_high_throughput": replace_with("--moe-a2a-backend", "deepep", "--deepep-mode", "normal"),
        "deepep_low_latency": replace_with("--moe-a2a-backend", "deepep", "--deepep-mode", "low_latency"),
    }, Refusal("SGLang has others: --moe-a2a-backend")),
    "--moe-backend": chosen({
        "auto": NOTHING, **{name: replace_with("--moe-runner-backend", name) for name in _KERNELS},
    }, Refusal("SGLang has others: --moe-runner-backend")),
    "--attention-backend": renaming(
        "--attention-backend", {ours.lower(): theirs for ours, theirs in ATTENTION.items()}, "SGLang"
    ),
    "--runner": chosen({
        "auto": NOTHING, "generate": NOTHING, "pooling": replace_with("--is-embedding", why="SGLang says it so"),
    }, Refusal("SGLang generates or pools")),
    "--convert": FlagRule(rules.pooling),
    "--pooler-config": refused("SGLang pools as the model's configuration says"),
    "--chat-template": also_native(FlagRule(rules.template_file)),
    "--chat-template-content-format": _only("auto", "SGLang finds it out from the template; leave it out"),
    "--response-role": _only("assistant", "SGLang answers as the assistant; leave it out"),
    "--reasoning-parser": renaming("--reasoning-parser", REASONING, "SGLang"),
    "--tool-call-parser": renaming("--tool-call-parser", {**TOOLS, "llama4_pythonic": "pythonic"}, "SGLang"),
    "--enable-auto-tool-choice": dropped("SGLang's --tool-call-parser alone says it"),
    **same("--tool-parser-plugin --reasoning-parser-plugin", refused("SGLang takes no parsers from outside")),
    "--structured-outputs-config": expand_json(rules.structured_outputs),
    "--speculative-config": expand_json(rules.speculation),
    "--spec-method": nested_in("--speculative-config", "method"),
    "--spec-model": nested_in("--speculative-config", "model"),
    "--spec-tokens": nested_in(
        "--speculative-config", "num_speculative_tokens", convert=whole
    ),
    "--lora-modules": FlagRule(rules.adapters),
    "--max-loras": FlagRule(rules.adapters_in_batch),
    "--max-cpu-loras": FlagRule(rules.adapters_in_memory),
    "--lora-dtype": _only("auto", "SGLang keeps adapters in the type of the model; leave it out"),
    "--fully-sharded-loras": refused("SGLang splits adapters its own way; leave it out"),
    "--limit-mm-per-prompt": FlagRule(rules.media_limits),
    "--mm-processor-kwargs": refused("SGLang says it for each kind of input, as JSON: --mm-process-config"),
    "--mm-processor-cache-gb": chosen(
        {"0": replace_with("--mm-preprocess-cache-size-mb",
        "0")}, Refusal("SGLang counts MB: --mm-preprocess-cache-size-mb")
    ),
    "--mm-encoder-tp-mode": chosen({"weights": NOTHING, "data": replace_with("--mm-enable-dp-encoder")}),
    "--allowed-local-media-path": refused("SGLang does not restrict local files to a directory"),
    "--generation-config": chosen(
        {"auto": NOTHING, "vllm": replace_with("--sampling-defaults", "openai")},
        Refusal("SGLang reads the generation_config.json of the model, or none (--sampling-defaults openai)"),
    ),
    "--override-generation-config": expand_json(
        lambda config, _: Replacement([part("--preferred-sampling-params", value=dict(config))])
    ),
    "--max-logprobs": dropped("SGLang sets no limit: requests get as many as they ask for"),
    "--enable-log-requests": switch(replace_with("--log-requests"), NOTHING),
    "--max-log-len": refused("SGLang shortens what it logs by --log-requests-level"),
    "--disable-log-stats": switch(Refusal("SGLang makes it rarer by --decode-log-interval"), NOTHING),
    "--log-level": also_native(FlagRule(rules.lower_case)),
    "--log-config-file": refused("SGLang reads the environment variable SGLANG_LOGGING_CONFIG_PATH"),
    "--enable-request-id-headers": dropped("the gateway puts x-request-id on every response"),
    "--enable-prompt-tokens-details": switch(replace_with("--enable-cache-report"), NOTHING),
    "--enable-force-include-usage": switch(replace_with("--stream-response-default-include-usage"), NOTHING),
    "--enable-server-load-tracking": refused("the worker's /metrics has the load; leave it out"),
    "--allow-credentials": switch(NOTHING, Refusal(_CORS)),
    "--allowed-origins": _only('["*"]', _CORS),
    "--allowed-methods": _only('["*"]', _CORS),
    "--allowed-headers": _only('["*"]', _CORS),
    "--middleware": refused("SGLang takes no middleware; put it before iChat"),
    "--disable-fastapi-docs": refused("SGLang reads the environment variable DISABLE_OPENAPI_DOC=1"),
    "--return-tokens-as-token-ids": refused("SGLang writes no tokens so; leave it out"),
    "--collect-detailed-traces": refused("SGLang traces by --enable-trace and --trace-modules"),
    "--use-tqdm-on-load": switch(NOTHING, Refusal("SGLang always shows how far it has loaded; leave it out")),
    "--kv-transfer-config": refused("SGLang separates prefill and decode by --disaggregation-mode"),
    "--disable-sliding-window": refused("SGLang keeps the model's sliding window; leave it out"),
    "--long-prefill-token-threshold": refused("SGLang treats long prompts like others; see --chunked-prefill-size"),
    "--max-parallel-loading-workers": refused("SGLang's ranks load at the same time; leave it out"),
    "--ray-workers-use-nsight": refused("SGLang cannot be profiled so; leave it out"),
    "--ignore-patterns": refused("SGLang chooses the files to load itself; leave it out"),
    "--show-hidden-metrics-for-version": refused("SGLang hides no metrics; leave it out"),
    **same("--worker-cls --worker-extension-cls", refused("SGLang's workers cannot be exchanged; leave it out")),
    "--additional-config": refused("SGLang has a flag for everything that it can be told; leave it out"),
}  # fmt: skip
"""vLLM's names, which are the common names."""

_NOW = "it is measured whenever --enable-metrics is given"
_PDLB = "SGLang finds this out from the other side now"

_OLD: Mapping[str, FlagRule] = {
    "--impl": renamed("--model-impl"),
    "--hybrid-kvcache-ratio": FlagRule(rules.window_ratio),
    "--max-micro-batch-size": renamed("--pp-max-micro-batch-size"),
    "--stream-output": switch(replace_with("--incremental-streaming-output"), NOTHING),
    "--collect-tokens-histogram": dropped(_NOW),
    "--enable-ep-moe": FlagRule(rules.expert_ranks),
    "--enable-deepep-moe": switch(replace_with("--moe-a2a-backend", "deepep"), NOTHING),
    "--enable-flashinfer-moe": switch(replace_with("--moe-runner-backend", "flashinfer_cutlass"), NOTHING),
    "--enable-triton-kernel-moe": switch(replace_with("--moe-runner-backend", "triton_kernel"), NOTHING),
    "--cuda-graph-max-bs": renamed("--cuda-graph-max-bs-decode"),
    "--cuda-graph-bs": FlagRule(lambda flag, _: Replacement([Flag("--cuda-graph-bs-decode", flag.values)])),
    "--disable-cuda-graph": FlagRule(rules.eager),
    "--enable-dp-attention": refused("it is --attn-dp-size N now, in the place of --dp-size N"),
    "--enable-flashinfer-allreduce-fusion": switch(
        replace_with("--flashinfer-allreduce-fusion-backend", "auto"), NOTHING
    ),
    "--disable-fast-image-processor": switch(replace_with("--image-processor-backend", "pil"), NOTHING),
    "--enable-expert-distribution-metrics": switch(
        replace_with("--expert-balancedness-report-mode", "server_log"), NOTHING
    ),
    "--enable-nan-detection": switch(
        Refusal("SGLang reads the environment variable SGLANG_ENABLE_NAN_LOGITS_CHECK=1 now"), NOTHING
    ),
    **same(
        "--enable-double-sparsity --ds-channel-config-path --ds-heavy-channel-num --ds-heavy-token-num"
        " --ds-heavy-channel-type --ds-sparse-decode-threshold",
        refused("SGLang has no double sparsity any more; leave it out"),
    ),
    "--disable-overlap-cg-plan": dropped("SGLang has no such plan to overlap any more"),
    "--torchao-config": refused("SGLang has no torchao any more; see --quantization"),
    **same(
        "--debug-tensor-dump-inject --debug-tensor-dump-prefill-only",
        refused("SGLang dumps tensors by --debug-tensor-dump-output-folder and --debug-tensor-dump-layers only"),
    ),
    **same("--disaggregation-decode-tp --disaggregation-decode-dp --disaggregation-prefill-pp", dropped(_PDLB)),
    "--pdlb-url": refused("SGLang registers with no load balancer any more; name this worker there"),
}
"""Flags of older SGLang releases, and their successors."""

_NO_SERVER = "it concerns SGLang's own HTTP server, which an iChat worker replaces"
_NO_TLS = "the worker speaks no TLS itself; the gateway does (server_settings.tls_certificate)"
_NO_ACCESS_LOG = "the worker serves without uvicorn, and the gateway logs the requests"
_SERVER: Mapping[str, FlagRule] = {
    **same("--ssl-keyfile --ssl-certfile --ssl-ca-certs", also_native(refused(f"{_NO_SERVER}; {_NO_TLS}"))),
    "--enable-ssl-refresh": also_native(
        switch(Refusal(f"{_NO_SERVER}; {_NO_TLS}"), Replacement((), "the worker is without it anyway"))
    ),
    **same("--ssl-cert-reqs --ssl-keyfile-password", also_native(dropped(_NO_TLS))),
    **same("--fastapi-root-path --root-path", also_native(refused(f"{_NO_SERVER}; let the proxy take the prefix off"))),
    **same(
        "--enable-http2 --grpc-mode --smg-grpc-mode --encoder-only",
        also_native(switch(Refusal(_NO_SERVER), Replacement((), "the worker is without it anyway"))),
    ),
    "--grpc-port": also_native(refused(_NO_SERVER)),
    "--tokenizer-worker-num": also_native(chosen({"1": None}, Refusal(_NO_SERVER))),
    **same("--log-level-http --uvicorn-log-level", also_native(dropped("the worker serves without uvicorn"))),
    "--uvicorn-access-log-exclude-prefixes": also_native(dropped(_NO_ACCESS_LOG)),
    "--disable-uvicorn-access-log": dropped(_NO_ACCESS_LOG),
    **KEY_RULES,
}
"""Flags of SGLang's own HTTP server: flags without effect are refused, or left out with the reason."""

TABLE = Table("SGLang", {**OLD_VLLM, **_COMMON, **_OLD, **_SERVER})
