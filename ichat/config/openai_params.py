"""The names of OpenAI's parameters, and how paths into them are written in the configuration."""

import re

KNOWN = frozenset((
    "functions", "function_call", "temperature", "top_p", "n", "stream", "stream_options", "stop", "max_tokens",
    "max_completion_tokens", "modalities", "prediction", "audio", "presence_penalty", "frequency_penalty",
    "logit_bias", "user", "response_format", "seed", "tools", "tool_choice", "logprobs", "top_logprobs",
    "parallel_tool_calls", "reasoning_effort", "verbosity", "thinking", "web_search_options",
    "include_server_side_tool_invocations", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "store", "context_management",
))  # fmt: skip
"""OpenAI's parameters of a completion, which an upstream may not have; others are none of our business."""

_PATH = re.compile(r"[^\s.\[\]]+(?:\.[^\s.\[\]]+|\[(?:\*|[0-9]{1,9})\])*(?<!\])")


def check_paths(values: list[str]) -> None:
    """Check the value of `additional_drop_params`. Raises ValueError with a sentence."""
    if "model" in values:
        raise ValueError("must not have 'model', which every request needs")
    wrong = [value for value in values if not _PATH.fullmatch(value)]
    if wrong:
        raise ValueError(
            "must be names, or paths such as tools[*].function.strict or a.b[0].c that end in a name, "
            f"not {', '.join(map(repr, wrong))}"
        )
