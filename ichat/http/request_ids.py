"""The ids of requests: the client's name for its request, and this process' name for it."""

import os
import re
from collections.abc import Mapping
from contextvars import ContextVar

import attrs

REQUEST_ID: ContextVar[bytes] = ContextVar("request_id", default=b"")
"""The id of the request that this task answers, for its log lines; empty outside of requests."""

_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
_ID_BYTES = 12
_IDS_AT_ONCE = 512
"""Ids that are made of a single read of the kernel's randomness."""


@attrs.define
class RequestIds:
    """Unique ids of 96 random bits, which do not ask the kernel for randomness each time."""

    fresh: list[bytes] = attrs.field(factory=list[bytes])

    def next(self) -> bytes:
        if not self.fresh:
            digits = os.urandom(_ID_BYTES * _IDS_AT_ONCE).hex().encode()
            self.fresh = [b"req-" + digits[at : at + 2 * _ID_BYTES] for at in range(0, len(digits), 2 * _ID_BYTES)]
        return self.fresh.pop()

    def of(self, by_name: Mapping[bytes, bytes]) -> tuple[bytes, bytes]:
        """Return the id that a request with these headers has, if it is valid, else a new id; and a new id."""
        own, found = self.next(), by_name.get(b"x-request-id")
        return (found if found is not None and _REQUEST_ID.fullmatch(found) else own), own
