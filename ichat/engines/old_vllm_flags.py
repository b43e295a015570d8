"""Rules for flags of vLLM's older releases that `flags.toml` cannot express: their values must be computed."""

import json

from ichat.engines.flag_table import FlagRules
from ichat.engines.flags import (
    CommandLine,
    Flag,
    FlagValueError,
    Outcome,
    Refusal,
    Replacement,
    fraction,
    mapping,
    part,
    replace_with,
    single_value,
    whole,
)

RULES = FlagRules()
_SPECULATIVE, _OVERRIDES = "--speculative-config", "--hf-overrides"


@RULES.of("--rope-scaling")
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


@RULES.of("--rope-theta")
def _rope_theta(flag: Flag, line: CommandLine) -> Outcome:
    why = f"it is {_OVERRIDES}.rope_parameters.rope_theta now"
    if _OVERRIDES in line.options and not line.has("--rope-scaling"):
        why += ", and vLLM forgets a RoPE scaling of the model's own unless --rope-scaling repeats it"
    return Replacement([part(_OVERRIDES, "rope_parameters", "rope_theta", value=fraction(single_value(flag)))], why)


@RULES.of("--guided-decoding-backend")
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


@RULES.of("--speculative-model")
def _speculative_model(flag: Flag, _: CommandLine) -> Outcome:
    name = single_value(flag)
    key, value = ("method", "ngram") if name in ("ngram", "[ngram]") else ("model", name)
    return Replacement([part(_SPECULATIVE, key, value=value)], f"it is {_SPECULATIVE}.{key} now")


@RULES.of("--ngram-prompt-lookup-max --ngram-prompt-lookup-min")
def _prompt_lookup(flag: Flag, line: CommandLine) -> Outcome:
    key = flag.name.removeprefix("--ngram-").replace("-", "_")
    parts = [part(_SPECULATIVE, key, value=whole(single_value(flag)))]
    if line.value("--speculative-model") in (None, "ngram", "[ngram]"):
        parts.append(part(_SPECULATIVE, "method", value="ngram"))
    return Replacement(parts, f"it is {_SPECULATIVE}.{key} now, with ngram as the method")


@RULES.of("--limit-mm-per-prompt", is_for_native=True)
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


@RULES.of("-O")
@RULES.of("--compilation-config", is_for_native=True)
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


@RULES.of("--override-pooler-config")
def _pooler(flag: Flag, _: CommandLine) -> Outcome:
    old = mapping(single_value(flag))
    new = {"use_activation" if key in ("normalize", "softmax", "activation") else key: old[key] for key in old}
    if isinstance(new.get("pooling_type"), str):
        new["pooling_type"] = new["pooling_type"].upper()
    return Replacement([Flag("--pooler-config", [json.dumps(new)])])
