"""Engines' errors for a request that does not fit into the model's context, restated alike for all engines.

The words of vLLM and SGLang, at every place where they refuse such a request, are in `context_length.toml`.
"""

import functools
import re

from ichat.config.package_data import read_toml
from ichat.errors import CONTEXT_LENGTH_EXCEEDED

SIGN = f'"code": "{CONTEXT_LENGTH_EXCEEDED}"'.encode()
"""Found in the body of such an error, and of no other: quotes in a client's text are escaped there."""


@functools.cache
def _too_long() -> list[re.Pattern[str]]:
    """Return the patterns of `context_length.toml`."""
    words = read_toml("ichat.engines", "context_length.toml")
    return [re.compile(pattern) for pattern in (*words["vllm"], *words["sglang"])]


def restated(message: str) -> str | None:
    """Return the restated sentence for a request that is too long, or None if the message says something else."""
    match = next((match for words in _too_long() if (match := words.match(message))), None)
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
