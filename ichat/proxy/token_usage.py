"""How many tokens a response says that it used.

A worker of our own reports it beside the body (`ReportedUsage`). Others' responses are read in passing (`TokenUsage`):
no byte of them is changed or held up.

OpenAI's routes say it in a `usage` object: `prompt_tokens`, `completion_tokens`, `total_tokens`; the Responses API and
Anthropic's messages in `input_tokens` and `output_tokens`. A stream does so near its end, and only if it was asked to.
How many of a prompt's tokens were cached stands in `cached_tokens`, or in Anthropic's `cache_read_input_tokens`.
"""

import re

from ichat.http.framing import Chunked
from ichat.http.heads import ResponseHead
from ichat.observability.request_record import RESPONSE_PATH, UsedTokens
from ichat.protocol.usage import USAGE_HEADER, parse_usage, usage_in_trailers

_SIGN = b'_tokens"'
"""Found in a `usage` object, and not in the text of an answer, where the quote would be escaped."""
_COUNT = re.compile(
    rb'"(prompt|completion|total|input|output|cached|cache_(?:read|creation)_input)_tokens"\s*:\s*(\d{1,12})'
)
_NAME_BYTES_MAX = len(b'"cache_creation_input')
"""The most bytes before the sign."""
_NAMES = frozenset((b"prompt", b"completion", b"total", b"cached"))
_NAMES_BY_ROUTE = {
    b"responses": frozenset((b"input", b"output", b"total", b"cached")),
    b"messages": frozenset((b"input", b"output", b"cache_read_input", b"cache_creation_input")),
}
"""The counted names of each route's responses: OpenAI's older routes, its Responses API, Anthropic's messages."""
_SPLIT_BYTES = 64
"""A count and its name are shorter than this."""
BYTES_PER_TOKEN = 4
"""Of a request, if they are not counted."""
EVENT_BYTES = 250
"""Of an event with a single token, if the events are not counted."""
REQUEST_TOKENS_MAX = 8192
"""The most that is guessed of a request: a request with a picture in it is long for other reasons."""


class TokenUsage:
    """The counts of a response."""

    __slots__ = ("_counts", "_names", "_tail", "events", "tells_cached")

    def __init__(self, path: bytes = b"") -> None:
        """Read the usage in the responses to requests for this path.

        Some have JSON of the client's or the model's own in them: names that the route does not use count nothing.
        """
        self._names = _NAMES_BY_ROUTE.get(path.rpartition(b"/")[2], _NAMES)
        self._counts: dict[bytes, int] = {}
        self._tail = bytearray()
        """The end of the last piece, once there was a count: the next count may be cut in two."""
        self.events = 0
        """How many events the stream had."""
        self.tells_cached = False
        """Whether the response says how many tokens of the prompt were cached, once `said` was called."""

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
                if name in self._names:
                    self._counts[name] = int(count)
            self._tail = buffer[max(0, end - _SPLIT_BYTES) : end]

    def said(self) -> UsedTokens | None:
        """Return the tokens by the newest counts in the response; None if there were none."""
        counts = self._counts
        if not counts:
            return None
        given, output = counts.get(b"prompt", counts.get(b"input")), counts.get(b"completion", counts.get(b"output"))
        cached, read = counts.get(b"cached", 0), counts.get(b"cache_read_input")
        self.tells_cached = read is not None or b"cached" in counts
        if read is not None:  # `input_tokens` are the others
            given, cached = (given or 0) + read + counts.get(b"cache_creation_input", 0), read
        elif b"total" in counts:
            if given is None:
                given = max(0, counts[b"total"] - (output or 0))
            elif output is None:
                output = max(0, counts[b"total"] - given)
        return _used(given or 0, output or 0, cached)


class ReportedUsage:
    """The tokens that the worker itself reports beside the response's body. The body is not read for it."""

    __slots__ = ("_header", "_trailers")
    tells_cached = True

    def __init__(self) -> None:
        self._header = b""
        self._trailers: bytes | bytearray = b""

    def __repr__(self) -> str:
        return f"<ReportedUsage {self.said()}>"

    def begin(self, head: ResponseHead) -> None:
        """Called with the head of the response: tokens are reported there, or in a trailer."""
        self._header = head.by_name.get(USAGE_HEADER, b"")
        if isinstance(head.framing, Chunked):
            self._trailers = head.framing.trailers

    @property
    def has_arrived(self) -> bool:
        """Whether there was a header or a trailer that may report them."""
        return bool(self._header or self._trailers)

    def said(self) -> UsedTokens | None:
        """Return the tokens; None if the response has not reported them, or not yet."""
        told = parse_usage(self._header) if self._header else usage_in_trailers(self._trailers)
        return None if told is None else _used(*told)


def _used(given: int, output: int, cached: int) -> UsedTokens:
    """Return the reported tokens, within reason: cached tokens are a part of the prompt's, and cost less."""
    return UsedTokens(given, output, min(cached, given))


def tokens_used(
    usage: TokenUsage | ReportedUsage,
    bytes_in: int,
    bytes_out: int,
    chunks: int,
    *,
    has_left: bool,
    is_good: bool,
    is_stream: bool,
) -> UsedTokens | None:
    """Return the tokens that a request used: as its response says, else an estimate if it was a stream.

    `bytes_out` is the size of the response, received in `chunks` pieces: several events may be in a piece. `has_left`
    says that the client left: the response may have said the length of the prompt by then, and no more. `is_good` says
    that there was a response without an error.
    """
    said = usage.said()
    if isinstance(usage, ReportedUsage):
        if said is not None:
            return said
        events = max(chunks, bytes_out // EVENT_BYTES)
    else:
        events = usage.events
    if has_left:
        guess = estimate(bytes_in, events)
        return guess if said is None or said.total < guess.total else said._replace(is_estimate=True)
    if not is_good:
        return None
    return estimate(bytes_in, events) if said is None and is_stream else said


def estimate(bytes_in: int, events: int) -> UsedTokens:
    """Return a guess for a stream without a count: a token for each event, and the request's by its length."""
    return UsedTokens(min(bytes_in // BYTES_PER_TOKEN, REQUEST_TOKENS_MAX), events, is_estimate=True)


def usage_reader(path: bytes, *, reports_usage: bool) -> TokenUsage | ReportedUsage | None:
    """Return the reader of the tokens that a response reports; None for a path without such reports.

    The usage of an earlier request is repeated with its response, and counting tokens uses none. `reports_usage` says
    that the endpoint is a worker that reports them itself.
    """
    if path == RESPONSE_PATH or path.endswith(b"/count_tokens"):
        return None
    return ReportedUsage() if reports_usage else TokenUsage(path)
