"""Which pages in browsers may use the routes of models, and read what these answer (CORS, the Fetch Standard).

A browser asks first, with a preflight that has no key, whether a page of this origin may send such a request. It shows
the page only answers that allow its origin. Nothing else is guarded here: programs that are no browsers never ask.
The control plane is closed to pages of other origins, for any list of origins here and any key of the page.
"""

import re
from collections.abc import Callable, Sequence

import attrs

from ichat import errors
from ichat.http.heads import Headers
from ichat.security.auth import CHANGES_MODELS

MAX_AGE_S = 600
"""How long a browser may remember the answer to a preflight."""
ASKED_BYTES_MAX = 2048
"""Of the names of headers that a preflight asks for."""
_NAMES = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+(?:[ \t]*,[ \t]*[!#$%&'*+\-.^_`|~0-9A-Za-z]+)*")
_USUAL = b"authorization, content-type, x-api-key, x-request-id, x-session-id"
"""Headers that are allowed where a preflight's list of them is too long or no list."""
_EXPOSED_NAMES = (
    "retry-after x-ichat-attempts x-ichat-dropped x-ichat-error x-ichat-model x-ichat-overhead-ms x-ichat-prefix"
    " x-ichat-worker x-request-id x-should-retry"
)
_EXPOSED = (b"access-control-expose-headers", _EXPOSED_NAMES.replace(" ", ", ").encode())
_VARY = (b"vary", b"origin")


@attrs.frozen
class Cors:
    """The origins of pages that may use the routes of models."""

    origins: frozenset[bytes]
    """As browsers write them; `*` stands for all."""
    is_control: Callable[[bytes], bool]
    """Whether a path belongs to the control plane."""

    def headers_for(self, path: bytes, headers: Headers) -> Headers:
        """Return the CORS headers of every response to a request of this path and these headers; none where none apply.

        Without an origin as well: a cache must not give a page the answer that it has kept for a program.
        """
        if not self._is_open(path):
            return []
        if b"*" in self.origins:
            return [(b"access-control-allow-origin", b"*"), _EXPOSED]
        origin = _one(headers, b"origin")
        if origin in self.origins:
            return [(b"access-control-allow-origin", origin), _VARY, _EXPOSED]
        return [_VARY]

    def is_preflight(self, method: bytes, path: bytes, headers: Headers) -> bool:
        """Return whether this is a browser's question whether a page may ask for a route of models."""
        return (
            method == b"OPTIONS"
            and bool(_one(headers, b"origin") and _one(headers, b"access-control-request-method"))
            and self._is_open(path)
        )

    def answer(self, path: bytes, headers: Headers) -> Headers:
        """Return the headers for a preflight's answer beside `headers_for`. Raises ApiError 403 for other origins."""
        origin = _one(headers, b"origin")
        if b"*" not in self.origins and origin not in self.origins:
            raise errors.forbidden(
                f"Pages of {origin.decode('latin-1')[:256]} may not ask here: server_settings.cors_origins does not"
                " name that origin."
            )
        asked = _one(headers, b"access-control-request-headers")
        if len(asked) > ASKED_BYTES_MAX or not _NAMES.fullmatch(asked):
            asked = _USUAL
        return [
            (b"access-control-allow-methods", b"GET" if self.is_control(path) else b"GET, POST, DELETE"),
            (b"access-control-allow-headers", asked),
            (b"access-control-max-age", b"%d" % MAX_AGE_S),
        ]

    def _is_open(self, path: bytes) -> bool:
        """Return whether a path is one of models: all but the control plane's, and but those that load adapters."""
        if self.is_control(path):
            return path == b"/v1/models" or path.startswith(b"/v1/models/")
        return path.rstrip(b"/") not in CHANGES_MODELS


def cors_of(origins: Sequence[str], is_control: Callable[[bytes], bool]) -> Cors | None:
    """Return the meaning of the configuration's origins; None where it names none."""
    return Cors(frozenset(origin.encode() for origin in origins), is_control) if origins else None


def _one(headers: Headers, name: bytes) -> bytes:
    """Return the value of a header that was sent once, else nothing."""
    found = [value for key, value in headers if key == name]
    return found[0] if len(found) == 1 else b""
