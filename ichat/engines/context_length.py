"""Engines' errors for a request that does not fit into the model's context, restated alike for all engines.

These are the words of vLLM and SGLang at every place where they refuse a prompt, or a prompt with its output tokens.
"""

import re

from ichat.errors import CONTEXT_LENGTH_EXCEEDED

SIGN = f'"code": "{CONTEXT_LENGTH_EXCEEDED}"'.encode()
"""Found in the body of such an error, and of no other: quotes in a client's text are escaped there."""

_TOO_LONG = tuple(
    re.compile(words)
    for words in (
        # vLLM
        (
            r"This model's maximum context length is (?P<limit>\d+) tokens\. However, your prompt contains"
            r" (?P<prompt>(?:at least )?\d+) input tokens"
        ),
        (
            r"This model's maximum context length is (?P<limit>\d+) tokens\. However, your prompt contains"
            r" (?P<characters>\d+) characters"
        ),
        r"Input length \((?P<prompt>\d+)\) exceeds model's maximum context length \((?P<limit>\d+)\)",
        r"The engine prompt length (?P<prompt>\d+) exceeds the max_model_len (?P<limit>\d+)",
        (
            r"The \w+ prompt \(length (?P<prompt>\d+)\)(?: plus .{1,60}\))? is longer than the maximum model length of"
            r" (?P<limit>\d+)"
        ),
        r"max_[a-z_]+=(?P<completion>\d+) cannot be greater than max_(?:model_len|total_tokens)=(?P<limit>\d+)",
        r"the prompt has (?P<prompt>\d+) tokens and a canvas read adds \d+, more than max_model_len=(?P<limit>\d+)",
        # SGLang
        r"The input \((?P<prompt>\d+) tokens\) is longer than the model's context length \((?P<limit>\d+) tokens\)",
        (
            r"Requested token count exceeds the model's maximum context length of (?P<limit>\d+) tokens\. You requested"
            r" a total of \d+ tokens: (?P<prompt>\d+) tokens from the input messages and (?P<completion>\d+) tokens"
        ),
        r"max_completion_tokens is too large: (?P<completion>\d+)\. ?This model supports at most (?P<limit>\d+) ",
        r"Input length \((?P<prompt>\d+) tokens\) exceeds the maximum allowed length \((?P<limit>\d+) tokens\)",
        r"Request prompt exceeds the KV memory budget: input_len=(?P<prompt>\d+)",
        r"the prompt has (?P<prompt>\d+) tokens, which does not fit the context length of (?P<limit>\d+) tokens",
    )
)


def restated(message: str) -> str | None:
    """Return the restated sentence for a request that is too long, or None if the message says something else."""
    match = next((match for words in _TOO_LONG if (match := words.match(message))), None)
    if match is None:
        return None
    said = match.groupdict()
    limit, prompt, completion = said.get("limit"), said.get("prompt"), said.get("completion")
    if limit is None:
        return f"This model has no room for the prompt, which has {prompt} tokens."
    if "characters" in said:
        asked = f"your prompt has {said['characters']} characters, which are more tokens than that"
    elif prompt is None:
        asked = f"you requested {completion} tokens for the completion alone"
    elif completion is None:
        asked = f"your prompt has {prompt} tokens"
    else:
        total = int(prompt) + int(completion)
        asked = f"you requested {total} tokens ({prompt} in the prompt, {completion} for the completion)"
    return f"This model's maximum context length is {limit} tokens. However, {asked}."
