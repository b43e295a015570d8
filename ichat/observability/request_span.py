"""A request's span, and the parts of its response that the span has: its id, and why it ended.

Only their places in the first and the last bytes are read, and only if spans are sent. No text of a user is there.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ichat.http.body_mover import ByteObserver

FIRST_BYTES, LAST_BYTES = 512, 4096
"""How much of a response is kept until its end."""
REASONS_MAX = 16
_ID = re.compile(rb'"id"\s*:\s*"([A-Za-z0-9_.:-]{1,128})"')
_REASON = re.compile(rb'"finish_reason"\s*:\s*"([a-z_]{1,32})"')
"""It is not found in the text of an answer, where quotes are escaped."""
_REASONS_BY_ROUTE: Mapping[str, re.Pattern[bytes]] = {
    "/v1/chat/completions": _REASON,
    "/v1/completions": _REASON,
    "/v1/messages": re.compile(
        rb'"stop_reason"\s*:\s*"(end_turn|max_tokens|stop_sequence|tool_use|pause_turn|refusal)"'
    ),
}


@attrs.define(eq=False)
class RequestSpan:
    """OpenTelemetry's span of a request, and facts that it will have. It is a `ByteObserver`."""

    span: Any
    _inner: ByteObserver | None = None
    _first: bytearray = attrs.field(factory=bytearray)
    _last: bytearray = attrs.field(factory=bytearray)

    def watch(self, inner: ByteObserver | None) -> ByteObserver:
        """Return the observer of the next response's body; `inner` sees the same bytes."""
        self._inner = inner
        self._first, self._last = bytearray(), bytearray()
        return self

    def see(self, buffer: bytearray, end: int) -> None:
        """See `ByteObserver`."""
        if self._inner is not None:
            self._inner.see(buffer, end)
        if (room := FIRST_BYTES - len(self._first)) > 0:
            self._first += buffer[: min(end, room)]
        self._last += buffer[max(0, end - LAST_BYTES) : end]
        del self._last[:-LAST_BYTES]

    @property
    def response_id(self) -> str:
        """The id in the response; empty if none was seen."""
        found = _ID.search(self._first)
        return "" if found is None else found[1].decode()

    def finish_reasons(self, route: str) -> Sequence[str]:
        """Return why the response of a route has ended, for each of its choices; empty if that was not seen."""
        pattern = _REASONS_BY_ROUTE.get(route)
        found = [] if pattern is None else pattern.findall(self._last)
        return [reason.decode() for reason in found[:REASONS_MAX]]
