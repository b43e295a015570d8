"""What becomes of arguments that SGLang does not know: vLLM's, old and new, and those of its own older releases."""

import json
from collections.abc import Mapping
from typing import Any

from ichat.engines.flags import (
    CommandLine,
    Flag,
    FlagRule,
    Outcome,
    Refusal,
    Replacement,
    Table,
    also_native,
    chosen,
    dropped,
    expand_json,
    fraction,
    is_on,
    mapping,
    nested_in,
    number,
    part,
    refused,
    renamed,
    replace_with,
    single_value,
    switch,
    whole,
)
from ichat.engines.vllm.flags import ATTENTION, GRAMMARS, METHODS, OLD, REASONING, TOOLS, renaming, same

NOTHING = Replacement((), "SGLang does so anyway")
_CONFIG = "--json-model-override-args"
_SHARE = (
    "SGLang's share is for weights and KV cache only, vLLM's for activations, too: by the same number SGLang leaves"
    " less for the rest, so take a smaller one if memory runs out"
)


# Rules that more than a name goes into.


def _names(flag: Flag, _: CommandLine) -> Outcome | None:
    if len(flag.values) < 2:
        return None
    others = " and ".join(flag.values[1:])
    return replace_with(
        flag.name, flag.values[0], why=f"SGLang knows its model by one name; the worker also answers to {others}"
    )


def _keys(flag: Flag, _: CommandLine) -> Outcome | None:
    return Refusal("SGLang takes one key, not several") if len(flag.values) > 1 else None


def _length(flag: Flag, _: CommandLine) -> Outcome:
    text = single_value(flag)
    if text.lower() in ("auto", "-1"):
        return Refusal("SGLang has no length that fits itself to the memory; give a number, or leave it out")
    return replace_with("--context-length", number(text))


def _step_tokens(flag: Flag, case: CommandLine) -> Outcome:
    tokens = number(single_value(flag))
    last = [other for other in case.flags if other.name.endswith("enable-chunked-prefill")][-1:]
    if last and (last[0].name.startswith("--no-") == is_on(last[0])):
        return replace_with(
            "--max-prefill-tokens", tokens, why="prompts are not divided, so SGLang limits those of one batch"
        )
    return replace_with(
        "--chunked-prefill-size", tokens, why="SGLang limits the tokens of prompts in a step, not of answers"
    )


def _blocks(flag: Flag, case: CommandLine) -> Outcome:
    size = case.number("--block-size", "--page-size", default=0)
    if size < 1:
        return Refusal("SGLang counts tokens, not blocks; give --block-size as well, or --max-total-tokens")
    return replace_with(
        "--max-total-tokens", str(whole(single_value(flag)) * size), why=f"SGLang counts tokens, {size} to a block"
    )


def _eager(flag: Flag, case: CommandLine) -> Outcome:
    if not is_on(flag):
        return NOTHING
    if "--cuda-graph-backend-decode" not in case.options:
        return replace_with("--disable-cuda-graph")
    return replace_with("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled")


def _offload(flag: Flag, _: CommandLine) -> Outcome | None:
    size = fraction(single_value(flag))
    if size != int(size):
        return Refusal("SGLang takes whole GB")
    return (
        None if single_value(flag).isdigit() else replace_with(flag.name, str(int(size)), why="SGLang takes whole GB")
    )


def _experts(flag: Flag, case: CommandLine) -> Outcome:
    """Spread experts over the ranks of a replica; vLLM spreads them over all replicas."""
    if not is_on(flag):
        return NOTHING
    if case.number("--data-parallel-size", "--dp-size", "-dp", default=1) > 1:
        return Refusal("SGLang's replicas share no experts; give --ep-size, or --attn-dp-size for --data-parallel-size")
    ranks = case.number("--tensor-parallel-size", "--tp-size", "-tp", default=1)
    if ranks == 1:
        return Replacement((), "with one rank there is nothing to spread experts over")
    return replace_with("--ep-size", str(ranks), why=f"SGLang says over how many ranks: all {ranks}")


def _adapters(flag: Flag, _: CommandLine) -> Outcome:
    words: list[str] = []
    why = "SGLang calls it --lora-paths"
    for text in flag.values:
        if text[:1] != "{":
            words.append(text)
            continue
        adapter = mapping(text)
        if {*adapter} - {"base_model_name"} != {"name", "path"}:
            return Refusal("SGLang takes `name` and `path` of an adapter")
        if "base_model_name" in adapter:
            why = "SGLang calls it --lora-paths, and needs no base_model_name"
        words.append(json.dumps({"lora_name": adapter["name"], "lora_path": adapter["path"]}))
    return replace_with("--lora-paths", *words, why=why)


def _adapters_in_batch(flag: Flag, _: CommandLine) -> Outcome:
    count = str(whole(single_value(flag)) + 1)
    return replace_with(
        "--max-loras-per-batch", count, why="SGLang counts the model itself as one of them, vLLM does not"
    )


def _adapters_in_memory(flag: Flag, case: CommandLine) -> Outcome:
    count, in_batch = whole(single_value(flag)), case.number("--max-loras", default=0) + 1
    why = "SGLang calls it --max-loaded-loras"
    if in_batch == 1 and not case.has("--max-loras-per-batch"):
        in_batch, why = min(8, count), f"{why}, and wants --max-loras-per-batch to be no larger"
        return replace_with("--max-loaded-loras", str(count), "--max-loras-per-batch", str(in_batch), why=why)
    if count < in_batch:
        why += f", and has no fewer than --max-loras-per-batch, which is {in_batch}"
    return replace_with("--max-loaded-loras", str(max(count, in_batch)), why=why)


def _address(flag: Flag, case: CommandLine) -> Outcome:
    host, port = case.value("--master-addr") or "127.0.0.1", case.value("--master-port") or "29501"
    if flag.name == "--master-port" and case.has("--master-addr"):
        return Replacement((), "it stands in --dist-init-addr, with --master-addr")
    host = f"[{host}]" if ":" in host else host
    return replace_with("--dist-init-addr", f"{host}:{port}")


def _convert(flag: Flag, case: CommandLine) -> Outcome:
    if single_value(flag) in ("auto", "none"):
        return NOTHING
    if case.has("--runner"):
        return Replacement((), "SGLang finds out from the model how it is pooled")
    return replace_with("--is-embedding", why="SGLang finds out from the model how it is pooled")


def _media_limits(flag: Flag, _: CommandLine) -> Outcome:
    text = single_value(flag)
    limits = mapping(text if text[:1] == "{" else "{}")
    if text[:1] != "{":
        limits = {key: whole(count) for key, _, count in (pair.partition("=") for pair in text.split(","))}
    if not all(isinstance(count, int) for count in limits.values()):
        return Refusal("SGLang takes a number for each kind of input")
    return replace_with("--limit-mm-data-per-request", json.dumps(limits))


def _same_revision(flag: Flag, case: CommandLine) -> Outcome:
    if single_value(flag) == case.value("--revision"):
        return Replacement((), "SGLang takes the tokenizer and the code of the model's --revision")
    return Refusal("SGLang takes the tokenizer and the code of the model's --revision; give the same one there")


def _lower(flag: Flag, _: CommandLine) -> Outcome | None:
    level = single_value(flag)
    return (
        None
        if level == level.lower()
        else replace_with("--log-level", level.lower(), why="SGLang's levels are in lower case")
    )


def _template(flag: Flag, _: CommandLine) -> Outcome | None:
    if "{{" in single_value(flag) or "{%" in single_value(flag):
        return Refusal("SGLang takes the path of a file with the template, or the name of one it has")
    return None


def _ratio(flag: Flag, _: CommandLine) -> Outcome:
    """The old ratio went from 0, equal pools, to 1; the new one is the quotient of the pools' sizes."""
    if fraction(single_value(flag)) == 0:
        return replace_with(
            "--swa-full-tokens-ratio", "1", why="SGLang says it by the quotient of both pools' sizes now"
        )
    return Refusal("it is --swa-full-tokens-ratio now, which counts otherwise: 1 is for pools of equal size")


def _drafted(algorithm: str, count: int) -> list[str]:
    """Say how many tokens are drafted; most of SGLang's counts have the token in it that a draft starts from."""
    match algorithm:
        case "NGRAM":
            return ["--speculative-num-draft-tokens", str(count + 1)]
        case "DFLASH":
            return ["--speculative-dflash-block-size", str(count + 1)]
        case "DSPARK":
            return ["--speculative-dspark-block-size", str(count)]
        case _:
            steps = ["--speculative-num-steps", str(count), "--speculative-eagle-topk", "1"]
            return [*steps, "--speculative-num-draft-tokens", str(count + 1)]


def _speculation(config: Mapping[str, Any], case: CommandLine) -> Outcome:
    """Turn vLLM's description of how to speculate into SGLang's flags."""
    rest = dict(config)
    method = str(rest.pop("method", "")).lower()
    algorithm = "NEXTN" if method.endswith("_mtp") else METHODS.get(method)
    if algorithm is None:
        return Refusal(f"SGLang needs a `method`, and has these of vLLM's: {', '.join(METHODS)}")
    words = ["--speculative-algorithm", algorithm]
    count = rest.pop("num_speculative_tokens", None)
    if isinstance(count, int):
        words += _drafted(algorithm, count)
    for key, name in _DRAFT.items():
        if key in rest:
            words += [name, str(rest.pop(key))]
    ranks = case.number("--tensor-parallel-size", "--tp-size", "-tp", default=1)
    if rest.get("draft_tensor_parallel_size") == ranks:
        del rest["draft_tensor_parallel_size"]
    if rest.get("rejection_sample_method") == "standard":
        del rest["rejection_sample_method"]
    why = "SGLang has flags of its own for it, and counts the token that a draft starts from"
    if algorithm == "NGRAM" and {"prompt_lookup_min", "prompt_lookup_max"} & {*rest}:
        rest = {key: value for key, value in rest.items() if not key.startswith("prompt_lookup_")}
        why += "; it has no window to look up (--speculative-ngram-max-trie-depth comes near)"
    if rest:
        return Refusal(f"SGLang cannot be told {', '.join(rest)} of it")
    return replace_with(*words, why=why)


_DRAFT = {
    "model": "--speculative-draft-model-path", "revision": "--speculative-draft-model-revision",
    "quantization": "--speculative-draft-model-quantization", "kv_cache_dtype": "--speculative-draft-kv-cache-dtype",
}  # fmt: skip


def _structured(config: Mapping[str, Any], _: CommandLine) -> Outcome:
    rest = dict(config)
    words: list[str] = []
    backend = rest.pop("backend", "auto")
    if backend != "auto":
        if backend not in GRAMMARS:
            return Refusal(f"SGLang has no backend {backend!r}; it has {', '.join(GRAMMARS)}")
        words += ["--grammar-backend", GRAMMARS[backend]]
    if rest.pop("disable_any_whitespace", False):
        words.append("--constrained-json-disable-any-whitespace")
    if rest.get("reasoning_parser"):
        words += ["--reasoning-parser", rest.pop("reasoning_parser")]
    rest = {key: value for key, value in rest.items() if value}
    if rest:
        return Refusal(f"SGLang cannot be told {', '.join(rest)} of it")
    return replace_with(*words, why="SGLang has flags of its own for it")


def _overrides(config: Mapping[str, Any], _: CommandLine) -> Outcome:
    return Replacement([part(_CONFIG, value=dict(config))])


def _only(value: str, why: str) -> FlagRule:
    """Make the entry of a flag that may say what SGLang does anyway, and nothing else."""
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
    "-ep": FlagRule(_experts),
    "-q": renamed("--quantization"),
    "-n": renamed("--nnodes"),
    "-r": renamed("--node-rank"),
    "-sc": renamed("--speculative-config"),
    "-cc": renamed("--compilation-config"),
    "--served-model-name": also_native(FlagRule(_names)),
    "--api-key": also_native(FlagRule(_keys)),
    "--tokenizer": renamed("--tokenizer-path"),
    "--tokenizer-mode": also_native(chosen({
        "auto": None, "slow": None, "hf": replace_with("--tokenizer-mode", "auto"),
    })),
    "--tokenizer-revision": FlagRule(_same_revision),
    "--code-revision": FlagRule(_same_revision),
    "--hf-config-path": refused("SGLang reads the configuration beside the model; change it by --hf-overrides"),
    "--hf-overrides": expand_json(_overrides),
    "--hf-token": refused("SGLang reads the environment variable HF_TOKEN"),
    "--config-format": chosen({
        "auto": NOTHING, "hf": replace_with("--model-config-parser", "hf"),
        "mistral": replace_with("--model-config-parser", "mistral"),
    }, Refusal("SGLang knows auto, hf and mistral")),
    "--model-impl": renaming("--model-impl", {"vllm": "sglang"}, "SGLang"),
    **same("--gpu-memory-utilization --device-memory-utilization", renamed("--mem-fraction-static", _SHARE)),
    "--max-model-len": FlagRule(_length),
    "--max-num-seqs": renamed("--max-running-requests"),
    "--max-num-queued-reqs": renamed("--max-queued-requests"),
    "--max-num-batched-tokens": FlagRule(_step_tokens),
    "--enable-chunked-prefill": switch(NOTHING, replace_with("--chunked-prefill-size", "-1", why="SGLang says it so")),
    "--enable-prefix-caching": switch(NOTHING, replace_with("--disable-radix-cache", why="SGLang says it so")),
    "--enforce-eager": FlagRule(_eager),
    "--cudagraph-capture-sizes": FlagRule(lambda flag, _: Replacement([Flag("--cuda-graph-bs-decode", flag.values)])),
    "--max-cudagraph-capture-size": renamed("--cuda-graph-max-bs-decode"),
    "--compilation-config": refused("SGLang compiles by --enable-torch-compile, and has --cuda-graph-bs-decode"),
    **same("--optimization-level -O", refused("SGLang has no levels; see --enable-torch-compile")),
    "--seed": renamed("--random-seed"),
    "--kv-cache-dtype": renaming("--kv-cache-dtype", {"fp8": "fp8_e4m3"}, "SGLang"),
    "--block-size": renamed("--page-size"),
    "--num-gpu-blocks-override": FlagRule(_blocks),
    "--cpu-offload-gb": also_native(FlagRule(_offload)),
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
    **same("--master-addr --master-port", FlagRule(_address)),
    "--headless": switch(Replacement((), "SGLang knows by --node-rank who leads"), NOTHING),
    "--distributed-timeout-seconds": renamed("--dist-timeout"),
    "--enable-expert-parallel": FlagRule(_experts),
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
    "--convert": FlagRule(_convert),
    "--pooler-config": refused("SGLang pools as the model's configuration says"),
    "--chat-template": also_native(FlagRule(_template)),
    "--chat-template-content-format": _only("auto", "SGLang finds it out from the template; leave it out"),
    "--response-role": _only("assistant", "SGLang answers as the assistant; leave it out"),
    "--reasoning-parser": renaming("--reasoning-parser", REASONING, "SGLang"),
    "--tool-call-parser": renaming("--tool-call-parser", {**TOOLS, "llama4_pythonic": "pythonic"}, "SGLang"),
    "--enable-auto-tool-choice": dropped("SGLang's --tool-call-parser alone says it"),
    **same("--tool-parser-plugin --reasoning-parser-plugin", refused("SGLang takes no parsers from outside")),
    "--structured-outputs-config": expand_json(_structured),
    "--speculative-config": expand_json(_speculation),
    "--spec-method": nested_in("--speculative-config", "method"),
    "--spec-model": nested_in("--speculative-config", "model"),
    "--spec-tokens": nested_in(
        "--speculative-config", "num_speculative_tokens", convert=whole
    ),
    "--lora-modules": FlagRule(_adapters),
    "--max-loras": FlagRule(_adapters_in_batch),
    "--max-cpu-loras": FlagRule(_adapters_in_memory),
    "--lora-dtype": _only("auto", "SGLang keeps adapters in the type of the model; leave it out"),
    "--fully-sharded-loras": refused("SGLang splits adapters its own way; leave it out"),
    "--limit-mm-per-prompt": FlagRule(_media_limits),
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
    "--log-level": also_native(FlagRule(_lower)),
    "--log-config-file": refused("SGLang reads the environment variable SGLANG_LOGGING_CONFIG_PATH"),
    "--uvicorn-log-level": renamed("--log-level-http"),
    "--disable-uvicorn-access-log": dropped("the worker serves without uvicorn, and the gateway logs the requests"),
    "--root-path": renamed("--fastapi-root-path"),
    "--enable-request-id-headers": dropped("the gateway puts x-request-id on every response"),
    "--enable-prompt-tokens-details": switch(replace_with("--enable-cache-report"), NOTHING),
    "--enable-force-include-usage": switch(replace_with("--stream-response-default-include-usage"), NOTHING),
    "--enable-server-load-tracking": refused("the worker's /metrics has the load; leave it out"),
    "--allow-credentials": switch(NOTHING, Refusal(_CORS)),
    "--allowed-origins": _only('["*"]', _CORS),
    "--allowed-methods": _only('["*"]', _CORS),
    "--allowed-headers": _only('["*"]', _CORS),
    "--ssl-cert-reqs": _only("0", "SGLang asks clients for no certificates"),
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
"""vLLM's names, which are the common ones."""

_NOW = "it is measured whenever --enable-metrics is given"
_PDLB = "SGLang finds this out from the other side now"

_OLD: Mapping[str, FlagRule] = {
    "--impl": renamed("--model-impl"),
    "--hybrid-kvcache-ratio": FlagRule(_ratio),
    "--max-micro-batch-size": renamed("--pp-max-micro-batch-size"),
    "--stream-output": switch(replace_with("--incremental-streaming-output"), NOTHING),
    "--collect-tokens-histogram": dropped(_NOW),
    "--enable-ep-moe": FlagRule(_experts),
    "--enable-deepep-moe": switch(replace_with("--moe-a2a-backend", "deepep"), NOTHING),
    "--enable-flashinfer-moe": switch(replace_with("--moe-runner-backend", "flashinfer_cutlass"), NOTHING),
    "--enable-triton-kernel-moe": switch(replace_with("--moe-runner-backend", "triton_kernel"), NOTHING),
    "--cuda-graph-max-bs": renamed("--cuda-graph-max-bs-decode"),
    "--cuda-graph-bs": FlagRule(lambda flag, _: Replacement([Flag("--cuda-graph-bs-decode", flag.values)])),
    "--disable-cuda-graph": FlagRule(_eager),
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
"""Names of SGLang's older releases, and what they are in newer ones."""

TABLE = Table("SGLang", {**OLD, **_COMMON, **_OLD})
