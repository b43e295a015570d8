"""The vocabulary that both engines' tables share: values by both engines' names, and vLLM's flags of older releases."""

import json
from collections.abc import Mapping

from ichat.engines.flags import (
    CommandLine,
    Flag,
    FlagRule,
    FlagValueError,
    Outcome,
    Refusal,
    Replacement,
    also_native,
    chosen,
    dropped,
    fraction,
    mapping,
    nested_in,
    part,
    refused,
    renamed,
    replace_with,
    same,
    single_value,
    switch,
    whole,
)

METHODS = {
    "eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "NEXTN", "draft_model": "STANDALONE", "ngram": "NGRAM",
    "dflash": "DFLASH", "dspark": "DSPARK",
}  # fmt: skip
"""vLLM's and SGLang's names of ways to speculate."""
GRAMMARS = {"xgrammar": "xgrammar", "outlines": "outlines", "guidance": "llguidance"}
ATTENTION = {"FLASH_ATTN": "fa3", "FLASHINFER": "flashinfer", "TRITON_ATTN": "triton", "FLASHMLA": "flashmla"}
REASONING = {
    "deepseek_r1": "deepseek-r1", "deepseek_v3": "deepseek-v3", "deepseek_v4": "deepseek-v4",
    "deepseek_v41": "deepseek-v41", "openai_gptoss": "gpt-oss", "hunyuan_a13b": "hunyuan", "minimax_m2": "minimax",
    "minimax_m2_append_think": "minimax-append-think", "minimax_m3": "minimax-m3", "nemotron_v3": "nemotron_3",
    "muse_glimmer": "muse",
}  # fmt: skip
TOOLS = {
    "deepseek_v3": "deepseekv3", "deepseek_v31": "deepseekv31", "deepseek_v32": "deepseekv32",
    "deepseek_v4": "deepseekv4", "deepseek_v41": "deepseekv41", "llama3_json": "llama3", "openai": "gpt-oss",
    "minimax_m2": "minimax-m2", "minimax_m3": "minimax-m3", "hunyuan_a13b": "hunyuan", "muse_glimmer": "muse",
}  # fmt: skip

_SPECULATIVE, _OVERRIDES = "--speculative-config", "--hf-overrides"
NOTHING = Replacement((), "vLLM does so anyway")


def _rope_scaling(flag: Flag, line: CommandLine) -> Outcome:
    """RoPE's parameters are a single object now: SGLang merges it into the model's, vLLM replaces the model's."""
    scaling = mapping(single_value(flag))
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling.pop("type"))
    given = line.value("--rope-theta") or "rope_theta" in scaling or "rope_theta" in (line.value(_OVERRIDES) or "")
    if _OVERRIDES in line.options and not given:
        return Refusal(
            "vLLM puts it in the place of all of the model's rope_parameters now; give --rope-theta as well, with the"
            " rope_theta of the model's config.json"
        )
    return Replacement([part(_OVERRIDES, "rope_parameters", value=scaling)], f"it is {_OVERRIDES}.rope_parameters now")


def _rope_theta(flag: Flag, line: CommandLine) -> Outcome:
    why = f"it is {_OVERRIDES}.rope_parameters.rope_theta now"
    if _OVERRIDES in line.options and not line.has("--rope-scaling"):
        why += ", and vLLM forgets a RoPE scaling of the model's own unless --rope-scaling repeats it"
    return Replacement([part(_OVERRIDES, "rope_parameters", "rope_theta", value=fraction(single_value(flag)))], why)


def _guided_decoding(flag: Flag, _: CommandLine) -> Outcome:
    """Read ``xgrammar:no-fallback,disable-any-whitespace``."""
    target = "--structured-outputs-config"
    backend, _colon, text = single_value(flag).partition(":")
    words = [word.strip() for word in text.split(",") if word.strip()]
    unknown = sorted({*words} - {"no-fallback", "disable-any-whitespace", "no-additional-properties"})
    if unknown:
        return Refusal(f"{unknown[0]!r} is nothing that {target} knows")
    parts = [part(target, "backend", value=backend)]
    if "disable-any-whitespace" in words:
        parts.append(part(target, "disable_any_whitespace", value=True))
    if "no-additional-properties" in words:
        parts.append(part(target, "disable_additional_properties", value=True))
    return Replacement(parts, f"it is {target}.backend now, and a backend that is named has no fallback")


def _speculative_model(flag: Flag, _: CommandLine) -> Outcome:
    name = single_value(flag)
    key, value = ("method", "ngram") if name in ("ngram", "[ngram]") else ("model", name)
    return Replacement([part(_SPECULATIVE, key, value=value)], f"it is {_SPECULATIVE}.{key} now")


def _prompt_lookup(key: str) -> FlagRule:
    def rule(flag: Flag, line: CommandLine) -> Outcome:
        parts = [part(_SPECULATIVE, key, value=whole(single_value(flag)))]
        if line.value("--speculative-model") in (None, "ngram", "[ngram]"):
            parts.append(part(_SPECULATIVE, "method", value="ngram"))
        return Replacement(parts, f"it is {_SPECULATIVE}.{key} now, with ngram as the method")

    return FlagRule(rule)


def _media_limits(flag: Flag, _: CommandLine) -> Outcome | None:
    """Read ``image=16,video=2``; the present form is JSON."""
    text = single_value(flag)
    if flag.path or text[:1] == "{":
        return None
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(key and count.isdigit() for key, _, count in pairs):
        raise FlagValueError(f'takes JSON such as {{"image": 2}}, not {text!r}')
    limits = {key: int(count) for key, _, count in pairs}
    return replace_with("--limit-mm-per-prompt", json.dumps(limits), why="it takes JSON now")


def _optimization(flag: Flag, line: CommandLine) -> Outcome | None:
    """Read ``-O3``, ``-O 3``, and a number or JSON that is the whole compilation's configuration."""
    text = single_value(flag) if not flag.path else "{"
    if text[:1] == "{":
        return replace_with("--compilation-config", text) if flag.name == "-O" else None
    if flag.name == "-O" or not text.isdigit() or "--optimization-level" not in line.options:
        return None
    return replace_with(
        "--optimization-level", text, why="a number is an --optimization-level now, whose meanings differ"
    )


def _reasoning(_: Flag, line: CommandLine) -> Outcome:
    if line.has("--reasoning-parser"):
        return Replacement((), "--reasoning-parser alone turns it on now")
    return Refusal("the parser of the model's reasoning must be named now: --reasoning-parser NAME")


def _pooler(text: str) -> str:
    old = mapping(text)
    new = {"use_activation" if key in ("normalize", "softmax", "activation") else key: old[key] for key in old}
    if isinstance(new.get("pooling_type"), str):
        new["pooling_type"] = new["pooling_type"].upper()
    return json.dumps(new)


_TASKS = {
    "generate": "--runner generate", "transcription": "--runner generate", "draft": "--runner draft",
    "reward": "--runner pooling", "embed": "--runner pooling --convert embed",
    "embedding": "--runner pooling --convert embed", "classify": "--runner pooling --convert classify",
    "score": "--runner pooling --convert classify",
}  # fmt: skip
_GONE = "vLLM has no prompt adapters any more; use LoRA adapters (--enable-lora, --lora-modules)"
_TYPICAL = "vLLM has no typical acceptance any more; --speculative-config.rejection_sample_method has what there is"
_LENGTHS = "CUDA graphs are captured for batch sizes now, not for lengths (--max-cudagraph-capture-size)"
_POOL = "vLLM has no pool of tokenizers any more"
_PARTIAL = "vLLM decides itself now how many prompts it fills in at a time"
_IMAGES = "vLLM reads it in the model's configuration now"
_STEPS = "vLLM schedules every step now, while the one before it runs"
_SIZES = "vLLM speculates for every request now; --speculative-config.num_speculative_tokens_per_batch_size comes near"

OLD_VLLM: Mapping[str, FlagRule] = {
    "--task": chosen(
        {
            "auto": NOTHING,
            **{task: replace_with(*words.split(), why=f"it is {words} now") for task, words in _TASKS.items()},
        },
        Refusal("it is --runner and --convert now, which have no such task"),
    ),
    "--disable-log-requests": switch(
        replace_with("--no-enable-log-requests", why="requests are not logged unless --enable-log-requests says so"),
        replace_with("--enable-log-requests", why="it is --enable-log-requests now"),
    ),
    "--guided-decoding-backend": FlagRule(_guided_decoding),
    "--enable-reasoning": FlagRule(_reasoning),
    "--rope-scaling": FlagRule(_rope_scaling),
    "--rope-theta": FlagRule(_rope_theta),
    "--speculative-model": FlagRule(_speculative_model),
    "--num-speculative-tokens": nested_in(_SPECULATIVE, "num_speculative_tokens", convert=whole),
    "--speculative-max-model-len": nested_in(_SPECULATIVE, "max_model_len", convert=whole),
    "--speculative-draft-tensor-parallel-size": nested_in(_SPECULATIVE, "draft_tensor_parallel_size", convert=whole),
    "-spec-draft-tp": nested_in(_SPECULATIVE, "draft_tensor_parallel_size", convert=whole),
    "--speculative-model-quantization": nested_in(_SPECULATIVE, "quantization"),
    "--ngram-prompt-lookup-max": _prompt_lookup("prompt_lookup_max"),
    "--ngram-prompt-lookup-min": _prompt_lookup("prompt_lookup_min"),
    "--spec-decoding-acceptance-method": chosen(
        {"rejection_sampler": Replacement((), "rejection sampling is the default")}, Refusal(_TYPICAL)
    ),
    "--typical-acceptance-sampler-posterior-threshold": refused(_TYPICAL),
    "--typical-acceptance-sampler-posterior-alpha": refused(_TYPICAL),
    "--speculative-disable-by-batch-size": dropped(_SIZES),
    "--speculative-disable-by-sequence-length": dropped(_SIZES),
    "--speculative-disable-mqa-scorer": dropped("vLLM has one scorer now"),
    "--disable-logprobs-during-spec-decoding": dropped("requests get the logprobs that they ask for now"),
    "--num-lookahead-slots": dropped(f"it follows from {_SPECULATIVE} now"),
    "--override-pooler-config": renamed("--pooler-config", convert=_pooler),
    "--override-neuron-config": nested_in("--additional-config", "override_neuron_config", convert=mapping),
    "--disable-mm-preprocessor-cache": switch(
        replace_with("--mm-processor-cache-gb", "0", why="it is --mm-processor-cache-gb 0 now"), NOTHING
    ),
    "--max-seq-len-to-capture": dropped(_LENGTHS),
    "--max-context-len-to-capture": dropped(_LENGTHS),
    "--worker-use-ray": switch(replace_with("--distributed-executor-backend", "ray"), NOTHING),
    "--logits-processor-pattern": refused(
        "vLLM takes no logits processors from requests any more; --logits-processors names those that it loads"
    ),
    "--disable-frontend-multiprocessing": dropped("the worker has vLLM's front end in its own process anyway"),
    "--swap-space": dropped("vLLM swaps nothing any more; --kv-offloading-size keeps KV cache in the CPU's memory"),
    "--preemption-mode": dropped("vLLM recomputes what it preempts"),
    "--device": dropped("vLLM uses the kind of device that it was built for"),
    "--calculate-kv-scales": dropped("the scales come with the checkpoint now, and are 1.0 where it has none"),
    "--quantization-param-path": refused("the scales of the KV cache come with the checkpoint now, from no other file"),
    "--max-num-partial-prefills": dropped(_PARTIAL),
    "--max-long-partial-prefills": dropped(_PARTIAL),
    "--scheduler-delay-factor": dropped(_STEPS),
    "--num-scheduler-steps": dropped(_STEPS),
    "--multi-step-stream-outputs": dropped(_STEPS),
    "--disable-async-output-proc": dropped("vLLM has no such output processor any more"),
    "--use-v2-block-manager": dropped("vLLM has one block manager now"),
    "--max-paddings": dropped("vLLM pads no batches any more"),
    "--reorder-layers": dropped("vLLM places layers itself"),
    **same("--tokenizer-pool-size --tokenizer-pool-type --tokenizer-pool-extra-config", dropped(_POOL)),
    **same("--image-input-type --image-token-id --image-input-shape --image-feature-size", dropped(_IMAGES)),
    "--lora-extra-vocab-size": dropped("vLLM makes no room for words that adapters add any more"),
    "--enable-lora-bias": switch(Refusal("vLLM applies no biases of adapters any more"), NOTHING),
    "--long-lora-scaling-factors": refused("vLLM scales the context of no adapter any more"),
    "--qlora-adapter-name-or-path": refused("vLLM loads adapters by --enable-lora and --lora-modules NAME=PATH now"),
    "--enable-prompt-adapter": switch(Refusal(_GONE), NOTHING),
    **same("--max-prompt-adapters --max-prompt-adapter-token --prompt-adapters", refused(_GONE)),
    "--scheduler-cls": also_native(
        chosen({"vllm.core.scheduler.scheduler": Replacement((), "it names what was the default, which is gone")})
    ),
    "--limit-mm-per-prompt": also_native(FlagRule(_media_limits)),
    "--compilation-config": also_native(FlagRule(_optimization)),
    "-O": FlagRule(_optimization),
}
"""Flags of older vLLM releases, which either engine's command line may have, and their successors."""
