"""A common name for a model's thoughts in chats: vLLM calls the field `reasoning`, SGLang `reasoning_content`.

Bytes are replaced without parsing: inside a JSON string every quote is escaped, so a name in plain quotes with a colon
behind it is a member's name.
"""

import re
from collections.abc import Callable, Mapping

FIELDS = ("engine", "reasoning", "reasoning_content", "both")
"""The names that a worker can use; `engine`: the engine's own."""

_SHORT, _LONG = b'"reasoning":', b'"reasoning_content":'
_EITHER = re.compile(rb'"reasoning(?:_content)?":(\s*(?:"(?:[^"\\]|\\.)*"|null))')


def _short(data: bytes) -> bytes:
    return data.replace(_LONG, _SHORT)


def _long(data: bytes) -> bytes:
    return data.replace(_SHORT, _LONG)


def _both(data: bytes) -> bytes:
    return _EITHER.sub(rb'"reasoning":\1,"reasoning_content":\1', data)


RENAMES: Mapping[str, Callable[[bytes], bytes] | None] = {
    "engine": None, "reasoning": _short, "reasoning_content": _long, "both": _both,
}  # fmt: skip
"""How whole events, or the whole body, of a chat get each of these names; None: unchanged."""
