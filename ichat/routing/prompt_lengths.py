"""How many tokens a prompt has at least, by its bytes, and whether that is clearly too long. Purely synchronous.

How many bytes of a request's body make a token of its prompt is learnt by model, from the usage in its responses. Only
a model of an alias with `longer` learns it. The prompt with the fewest tokens for its bytes counts: the requests of a
client must not make another client's prompts seem too long.
"""

import math
import re
from collections.abc import Collection, Iterable, Sequence

from ichat.routing.endpoint import Endpoint

CLEARLY = 1.25
"""A prompt is clearly too long with this many times the tokens that the model accepts, by the estimate."""
LEARNT_TOKENS_MIN = 64
"""A shorter prompt teaches nothing: the additions of the chat template, and its parameters, are too much of it."""
_RISE = 1.02
"""With each response, the learnt value may grow by this factor, so that a rare prompt is forgotten."""
_PATHS = frozenset((b"/chat/completions", b"/completions", b"/responses", b"/messages"))
"""Routes below `/v1` with a prompt of a single text: of many texts, each may be as long as the model allows."""
_ELSEWHERE = frozenset((
    "previous_response_id", "conversation", "prompt_embeds", "truncate_prompt_tokens", "truncation",
))  # fmt: skip
"""With one of these members a part of the prompt is not in the body, or a part of the body is not in the prompt."""
_LIST = re.compile(rb'"prompt"\s*:\s*\[')
"""Several prompts, or tokens."""
MEASURED_BYTES_MAX = 8 * 1024 * 1024
"""A larger body is not looked at, as that would need milliseconds."""
_MEDIA = (b"base64", b"input_audio")
"""Pictures and sounds have many bytes and few tokens."""


def is_measurable(path: bytes, names: Collection[str], body: bytes | bytearray) -> bool:
    """Return whether the bytes of a request with these members show how long its prompt is."""
    path = path.removeprefix(b"/v1")
    if path not in _PATHS or len(body) > MEASURED_BYTES_MAX or not _ELSEWHERE.isdisjoint(names):
        return False
    return not (any(sign in body for sign in _MEDIA) or (path == b"/completions" and _LIST.search(body)))


class PromptLengths:
    """The learnt bytes per token of the models."""

    def __init__(self) -> None:
        self._learnt: dict[str, float] = {}
        """The fewest tokens for a byte that each model's last prompts had."""

    def __repr__(self) -> str:
        return f"<PromptLengths of {', '.join(self._learnt) or 'no model'}>"

    def learn(self, model: str, body_bytes: int, prompt_tokens: int) -> None:
        """Learn from a response: the request had `body_bytes`, and its prompt `prompt_tokens`."""
        if prompt_tokens >= LEARNT_TOKENS_MIN:
            self._learnt[model] = min(prompt_tokens / body_bytes, self._learnt.get(model, math.inf) * _RISE)

    def tokens(self, model: str, body_bytes: int) -> int | None:
        """Return how many tokens a prompt in `body_bytes` has at least; None while nothing was learnt."""
        learnt = self._learnt.get(model)
        return None if learnt is None else round(body_bytes * learnt)

    def is_too_long(self, model: str, body_bytes: int, endpoints: Sequence[Endpoint]) -> bool:
        """Return whether a prompt in `body_bytes` is clearly too long for all of a model's endpoints."""
        tokens = self.tokens(model, body_bytes)
        if tokens is None or not endpoints:
            return False
        return all(one.context_tokens is not None and tokens > CLEARLY * one.context_tokens for one in endpoints)

    def keep_only(self, models: Iterable[str]) -> None:
        """Forget all but these models."""
        self._learnt = {model: self._learnt[model] for model in models if model in self._learnt}
