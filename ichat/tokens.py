"""How many tokens a response says that it used, read in passing: no byte of it is changed or held up.

OpenAI's routes say it in a `usage` object: `prompt_tokens`, `completion_tokens`, `total_tokens`; the Responses API and
Anthropic's messages in `input_tokens` and `output_tokens`. A stream does so near its end, and only if it was asked to.
"""

import re

_SIGN = b'_tokens"'
"""Found in a `usage` object, and not in the text of an answer, where the quote would be escaped."""
_COUNT = re.compile(rb'"(prompt|completion|total|input|output)_tokens"\s*:\s*(\d{1,12})')
KEPT_BYTES_MAX = 16 * 1024
BYTES_PER_TOKEN = 4
"""Of a request, where nobody has counted."""


class Usage:
    """What one response says of it."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept = b""

    def __repr__(self) -> str:
        return f"<Usage {len(self._kept)} bytes kept>"

    def see(self, buffer: bytearray, end: int) -> None:
        """Look at the next piece of the response: the buffer up to `end`. This runs for every chunk."""
        if self._kept or buffer.find(_SIGN, 0, end) >= 0:
            self._kept = (self._kept + buffer[:end])[-KEPT_BYTES_MAX:]

    def said(self) -> int | None:
        """Give the tokens that the response has told of, the newest where it did so again and again; else None."""
        counts = {name: int(count) for name, count in _COUNT.findall(self._kept)}
        if b"total" in counts:
            return counts[b"total"]
        parts = [counts[name] for name in (b"prompt", b"input", b"completion", b"output") if name in counts]
        return sum(parts) if parts else None


def estimate(bytes_in: int, chunks: int) -> int:
    """Guess the tokens of a stream that says nothing of them: one for each piece, and the request's by its length."""
    return bytes_in // BYTES_PER_TOKEN + chunks
