"""SGLang's table of flags: `flags.toml`, and rules for flags of vLLM with values that must be computed."""

import functools
import json

from ichat.engines.flag_table import FlagRules, read_table, vocabulary
from ichat.engines.flags import (
    CommandLine,
    Flag,
    Outcome,
    Refusal,
    Replacement,
    Table,
    fraction,
    is_on,
    mapping,
    number,
    replace_with,
    single_value,
    whole,
)
from ichat.engines.old_vllm_flags import RULES as OLD_RULES

RULES = FlagRules()
NOTHING = Replacement((), "SGLang does so anyway")


@RULES.of("--served-model-name", is_for_native=True)
def _one_name(flag: Flag, _: CommandLine) -> Outcome | None:
    """Pass only the first of the model's names."""
    if len(flag.values) < 2:
        return None
    others = " and ".join(flag.values[1:])
    return replace_with(
        flag.name, flag.values[0], why=f"SGLang knows its model by one name; the worker also answers to {others}"
    )


@RULES.of("--max-num-batched-tokens")
def _step_tokens(flag: Flag, line: CommandLine) -> Outcome:
    """Limit the tokens of a step, or of a batch where prompts are not divided."""
    tokens = number(single_value(flag))
    last = [other for other in line.flags if other.name.endswith("enable-chunked-prefill")][-1:]
    if last and (last[0].name.startswith("--no-") == is_on(last[0])):
        return replace_with(
            "--max-prefill-tokens", tokens, why="prompts are not divided, so SGLang limits those of one batch"
        )
    return replace_with(
        "--chunked-prefill-size", tokens, why="SGLang limits the tokens of prompts in a step, not of answers"
    )


@RULES.of("--num-gpu-blocks-override")
def _cache_tokens(flag: Flag, line: CommandLine) -> Outcome:
    """Turn a number of blocks into a number of tokens."""
    size = line.number("--block-size", "--page-size", default=0)
    if size < 1:
        return Refusal("SGLang counts tokens, not blocks; give --block-size as well, or --max-total-tokens")
    return replace_with(
        "--max-total-tokens", str(whole(single_value(flag)) * size), why=f"SGLang counts tokens, {size} to a block"
    )


@RULES.of("--cpu-offload-gb", is_for_native=True)
def _offload_gb(flag: Flag, _: CommandLine) -> Outcome | None:
    """Accept whole gigabytes only."""
    size = fraction(single_value(flag))
    if size != int(size):
        return Refusal("SGLang takes whole GB")
    return (
        None if single_value(flag).isdigit() else replace_with(flag.name, str(int(size)), why="SGLang takes whole GB")
    )


@RULES.of("-ep --enable-expert-parallel --enable-ep-moe")
def _expert_ranks(flag: Flag, line: CommandLine) -> Outcome:
    """Spread experts over the ranks of a replica; vLLM spreads them over all replicas."""
    if not is_on(flag):
        return NOTHING
    if line.number("--data-parallel-size", "--dp-size", "-dp", default=1) > 1:
        return Refusal("SGLang's replicas share no experts; give --ep-size, or --attn-dp-size for --data-parallel-size")
    ranks = line.number("--tensor-parallel-size", "--tp-size", "-tp", default=1)
    if ranks == 1:
        return Replacement((), "with one rank there is nothing to spread experts over")
    return replace_with("--ep-size", str(ranks), why=f"SGLang says over how many ranks: all {ranks}")


@RULES.of("--lora-modules")
def _adapters(flag: Flag, _: CommandLine) -> Outcome:
    """Translate the list of LoRA adapters."""
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


@RULES.of("--max-cpu-loras")
def _adapters_in_memory(flag: Flag, line: CommandLine) -> Outcome:
    """Keep at least as many adapters in memory as in a batch."""
    count, in_batch = whole(single_value(flag)), line.number("--max-loras", default=0) + 1
    why = "SGLang calls it --max-loaded-loras"
    if in_batch == 1 and not line.has("--max-loras-per-batch"):
        in_batch, why = min(8, count), f"{why}, and wants --max-loras-per-batch to be no larger"
        return replace_with("--max-loaded-loras", str(count), "--max-loras-per-batch", str(in_batch), why=why)
    if count < in_batch:
        why += f", and has no fewer than --max-loras-per-batch, which is {in_batch}"
    return replace_with("--max-loaded-loras", str(max(count, in_batch)), why=why)


@RULES.of("--master-addr --master-port")
def _meeting_address(flag: Flag, line: CommandLine) -> Outcome:
    """Join address and port of the group's leader."""
    host, port = line.value("--master-addr") or "127.0.0.1", line.value("--master-port") or "29501"
    if flag.name == "--master-port" and line.has("--master-addr"):
        return Replacement((), "it stands in --dist-init-addr, with --master-addr")
    host = f"[{host}]" if ":" in host else host
    return replace_with("--dist-init-addr", f"{host}:{port}")


@RULES.of("--limit-mm-per-prompt")
def _media_limits(flag: Flag, _: CommandLine) -> Outcome:
    """Translate the inputs allowed in a prompt, from JSON or ``image=2``."""
    text = single_value(flag)
    limits = mapping(text if text[:1] == "{" else "{}")
    if text[:1] != "{":
        limits = {key: whole(count) for key, _, count in (pair.partition("=") for pair in text.split(","))}
    if not all(isinstance(count, int) for count in limits.values()):
        return Refusal("SGLang takes a number for each kind of input")
    return replace_with("--limit-mm-data-per-request", json.dumps(limits))


@RULES.of("--tokenizer-revision --code-revision")
def _same_revision(flag: Flag, line: CommandLine) -> Outcome:
    """Accept the revision of the model, and no other."""
    if single_value(flag) == line.value("--revision"):
        return Replacement((), "SGLang takes the tokenizer and the code of the model's --revision")
    return Refusal("SGLang takes the tokenizer and the code of the model's --revision; give the same one there")


@RULES.of("--chat-template", is_for_native=True)
def _template_file(flag: Flag, _: CommandLine) -> Outcome | None:
    """Refuse a chat template that is not in a file."""
    if "{{" in single_value(flag) or "{%" in single_value(flag):
        return Refusal("SGLang takes the path of a file with the template, or the name of one it has")
    return None


@RULES.of("--hybrid-kvcache-ratio")
def _window_ratio(flag: Flag, _: CommandLine) -> Outcome:
    """The old ratio went from 0, equal pools, to 1; the new ratio is the quotient of the pools' sizes."""
    if fraction(single_value(flag)) == 0:
        return replace_with(
            "--swa-full-tokens-ratio", "1", why="SGLang says it by the quotient of both pools' sizes now"
        )
    return Refusal("it is --swa-full-tokens-ratio now, which counts otherwise: 1 is for pools of equal size")


def _drafted(algorithm: str, count: int) -> list[str]:
    """Return the flags for a number of drafted tokens; most of SGLang's count the token that a draft starts from."""
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


@RULES.of("--speculative-config", is_object=True)
def _speculation(flag: Flag, line: CommandLine) -> Outcome:
    """Turn vLLM's description of how to speculate into SGLang's flags."""
    rest = mapping(single_value(flag))
    method = str(rest.pop("method", "")).lower()
    methods = vocabulary("methods")
    algorithm = "NEXTN" if method.endswith("_mtp") else methods.get(method)
    if algorithm is None:
        return Refusal(f"SGLang needs a `method`, and has these of vLLM's: {', '.join(methods)}")
    words = ["--speculative-algorithm", algorithm]
    count = rest.pop("num_speculative_tokens", None)
    if isinstance(count, int):
        words += _drafted(algorithm, count)
    for key, name in _DRAFT.items():
        if key in rest:
            words += [name, str(rest.pop(key))]
    ranks = line.number("--tensor-parallel-size", "--tp-size", "-tp", default=1)
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


@RULES.of("--structured-outputs-config", is_object=True)
def _structured_outputs(flag: Flag, _: CommandLine) -> Outcome:
    """Turn vLLM's description of constrained decoding into SGLang's flags."""
    rest = mapping(single_value(flag))
    words: list[str] = []
    backend = rest.pop("backend", "auto")
    if backend != "auto":
        grammars = vocabulary("grammars")
        if backend not in grammars:
            return Refusal(f"SGLang has no backend {backend!r}; it has {', '.join(grammars)}")
        words += ["--grammar-backend", grammars[backend]]
    if rest.pop("disable_any_whitespace", False):
        words.append("--constrained-json-disable-any-whitespace")
    if rest.get("reasoning_parser"):
        words += ["--reasoning-parser", rest.pop("reasoning_parser")]
    rest = {key: value for key, value in rest.items() if value}
    if rest:
        return Refusal(f"SGLang cannot be told {', '.join(rest)} of it")
    return replace_with(*words, why="SGLang has flags of its own for it")


@functools.cache
def table() -> Table:
    """Return how SGLang treats flags that are not its own: vLLM's, old and new, and those of its older releases."""
    return read_table("SGLang", ("ichat.engines", OLD_RULES), ("ichat.engines.sglang", RULES))
