"""How many tokens a response says that it used, read in passing: no byte of it is changed or held up.

OpenAI's routes say it in a `usage` object: `prompt_tokens`, `completion_tokens`, `total_tokens`; the Responses API and
Anthropic's messages in `input_tokens` and `output_tokens`. A stream does so near its end, and only if it was asked to.
How many of a prompt's tokens were cached stands in `cached_tokens`, or in Anthropic's `cache_read_input_tokens`.
"""

import re

_SIGN = b'_tokens"'
"""Found in a `usage` object, and not in the text of an answer, where the quote would be escaped."""
_COUNT = re.compile(rb'"(prompt|completion|total|input|output|cached|cache_read_input)_tokens"\s*:\s*(\d{1,12})')
_NAME_BYTES_MAX = len(b'"cache_read_input')
"""What stands before the sign, at most."""
_SPLIT_BYTES = 64
"""A count and its name are shorter than this."""
BYTES_PER_TOKEN = 4
"""Of a request, if they are not counted."""
REQUEST_TOKENS_MAX = 8192
"""What is guessed of a request at most: one with a picture in it is long for other reasons."""


class TokenUsage:
    """The counts of one response."""

    __slots__ = ("_counts", "_has_total", "_tail", "events")

    def __init__(self, *, has_total: bool = True) -> None:
        """`has_total` says whether the route tells a sum: otherwise what looks like one is the model's own words."""
        self._has_total = has_total
        self._counts: dict[bytes, int] = {}
        self._tail = bytearray()
        """The end of the last piece, once there was a count: the next one may be cut in two."""
        self.events = 0
        """How many events the stream had."""

    def __repr__(self) -> str:
        return f"<TokenUsage {self._counts}>"

    def see(self, buffer: bytearray, end: int) -> None:
        """Look at the next piece of the response: the buffer up to `end`. This runs for every chunk."""
        self.events += buffer.count(b"data:", 0, end)
        start = buffer.find(_SIGN, 0, end)
        if self._tail:
            buffer, start = self._tail + buffer[:end], 0
            end = len(buffer)
        if start >= 0:
            for name, count in _COUNT.findall(buffer, max(0, start - _NAME_BYTES_MAX), end):
                self._counts[name] = int(count)
            self._tail = buffer[max(0, end - _SPLIT_BYTES) : end]

    def said(self) -> int | None:
        """Return the tokens by the newest count in the response; None if there was none."""
        counts = self._counts
        if self._has_total and b"total" in counts:
            return counts[b"total"]
        parts = [counts[name] for name in (b"prompt", b"input", b"completion", b"output") if name in counts]
        return sum(parts) if parts else None

    def prompt_tokens(self) -> int:
        """Return the tokens of the prompt, cached ones included; 0 where the response does not say it."""
        counts = self._counts
        return counts.get(b"prompt", counts.get(b"input", 0)) + counts.get(b"cache_read_input", 0)

    def prompt(self) -> tuple[int, int] | None:
        """Return the tokens of the prompt and how many of them were cached; None where the response does not say it."""
        counts = self._counts
        read = counts.get(b"cache_read_input")
        if read is not None:  # `input_tokens` are the others
            return counts.get(b"input", 0) + read, read
        prompt = counts.get(b"prompt", counts.get(b"input"))
        return (prompt, counts[b"cached"]) if prompt and b"cached" in counts else None


def tokens_used(usage: TokenUsage, bytes_in: int, *, has_left: bool, is_good: bool, is_stream: bool) -> int | None:
    """Return the tokens that a request used: as its response says, else an estimate if it was a stream.

    `has_left` says that the client left, `is_good` that there was a response without an error.
    """
    if has_left:  # the response may have told the length of the request already, and nothing more
        return max(usage.said() or 0, estimate(bytes_in, usage.events))
    if not is_good:
        return None
    said = usage.said()
    return estimate(bytes_in, usage.events) if said is None and is_stream else said


def estimate(bytes_in: int, events: int) -> int:
    """Return a guess for a stream without a count: one token an event, and the request's by its length."""
    return min(bytes_in // BYTES_PER_TOKEN, REQUEST_TOKENS_MAX) + events
