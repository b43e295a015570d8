"""vLLM's table of flags: `flags.toml`, and rules for flags of SGLang with values that must be computed."""

import functools
import json

from ichat.engines.flag_table import FlagRules, read_table
from ichat.engines.flags import (
    CommandLine,
    Flag,
    FlagValueError,
    Outcome,
    Refusal,
    Replacement,
    Table,
    fraction,
    mapping,
    part,
    replace_with,
    single_value,
    whole,
)
from ichat.engines.old_vllm_flags import RULES as OLD_RULES

RULES = FlagRules()
_LOGGING = "--logging-config"


@RULES.of("--chunked-prefill-size")
def _chunk(flag: Flag, _: CommandLine) -> Outcome:
    tokens = whole(single_value(flag))
    if tokens > 0:
        return replace_with(
            "--max-num-batched-tokens", str(tokens), why="vLLM limits the tokens of a step, answers included"
        )
    return replace_with("--no-enable-chunked-prefill", why="vLLM says it so")


@RULES.of("--max-total-tokens")
def _pool(flag: Flag, line: CommandLine) -> Outcome:
    size = line.number("--block-size", "--page-size", default=0)
    if size < 1:
        return Refusal("vLLM counts blocks, not tokens; give --block-size as well, or --num-gpu-blocks-override")
    blocks = str(whole(single_value(flag)) // size)
    return replace_with("--num-gpu-blocks-override", blocks, why=f"vLLM counts blocks, of {size} tokens each")


@RULES.of("--ep-size --ep --expert-parallel-size")
def _experts(flag: Flag, line: CommandLine) -> Outcome:
    """Spread experts over all ranks or none: vLLM knows nothing between."""
    size, ranks = whole(single_value(flag)), line.number("--tp-size", "--tensor-parallel-size", "-tp", default=1)
    if size == 1:
        return Replacement((), "vLLM does not spread experts unless --enable-expert-parallel is given")
    if size != ranks:
        return Refusal(f"vLLM spreads experts over all ranks, {ranks} here, or none (--enable-expert-parallel)")
    return replace_with("--enable-expert-parallel", why="vLLM spreads experts over all of its ranks")


@RULES.of("--dist-init-addr --nccl-init-addr")
def _meeting(flag: Flag, _: CommandLine) -> Outcome:
    host, colon, port = single_value(flag).rpartition(":")
    if not colon or not port.isdigit():
        raise FlagValueError("must be like HOST:PORT")
    return replace_with("--master-addr", host.strip("[]"), "--master-port", port)


@RULES.of("--lora-paths")
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


@RULES.of("--max-loras-per-batch")
def _adapters_in_batch(flag: Flag, _: CommandLine) -> Outcome:
    count = max(1, whole(single_value(flag)) - 1)
    return replace_with("--max-loras", str(count), why="SGLang counts the model itself as one of them, vLLM does not")


@RULES.of("--speculative-accept-threshold-single --speculative-accept-threshold-acc")
def _threshold(flag: Flag, _: CommandLine) -> Outcome:
    if fraction(single_value(flag)) >= 1:
        return Replacement((), "it is how vLLM accepts tokens")
    return Refusal("vLLM has no thresholds for draft tokens")


@RULES.of("--log-config-file", is_for_native=True)
def _log_config(flag: Flag, line: CommandLine) -> Outcome | None:
    if _LOGGING not in line.options:
        why = "this vLLM has it for uvicorn, which the worker does without; set the variable VLLM_LOGGING_CONFIG_PATH"
        return Refusal(why)
    if flag.name in line.options:
        return None
    target = f"{_LOGGING}.pylogging_config_file"
    return Replacement([part(*target.split("."), value=single_value(flag))], f"it is {target}")


@functools.cache
def table() -> Table:
    """Return how vLLM treats flags that are not its own: those of its older releases, and those of SGLang."""
    return read_table("vLLM", ("ichat.engines", OLD_RULES), ("ichat.engines.vllm", RULES))
