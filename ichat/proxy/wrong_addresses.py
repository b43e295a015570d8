"""Guesses about the intended route of a client that asked for a route that does not exist. Pure functions.

A client has a base URL, and puts its own paths behind it. So most wrong paths are right paths with too little, or too
much, before them; others are those of another API.
"""

import re
from collections.abc import Iterable, Mapping

from ichat.errors import ApiError, not_found
from ichat.observability.access_log import shown_path
from ichat.observability.request_record import ROUTES
from ichat.security.origins import Site
from ichat.security.rules import ROUTES as CONTROL_ROUTES

_OLLAMAS = re.compile(
    rb"(?:/v1)?/api/(?:tags|chat|generate|show|ps|version|pull|push|create|copy|delete|embed(?:dings)?)"
)
_GOOGLES = re.compile(rb"/.*models/.*:[a-zA-Z]+")
_READ_BYTES_MAX = 200
"""Bytes of a path's end that are compared with the routes."""
_TWICE = re.compile(rb"/v1/v1(?:/|$)")


def _tails(paths: Iterable[str]) -> dict[bytes, str]:
    """Return the paths of clients' routes by their part behind the base URL."""
    return {path.removeprefix("/v1").encode(): path for path in paths}


_BEHIND_BASE = _tails(["/v1/models", *ROUTES.values()])
_CONTROL = {
    path.encode(): f"{method} {path}"
    for (method, path), rule in CONTROL_ROUTES.items()
    if "<" not in path and path != "/" and rule != "models"
}


def no_route(path: bytes, by_name: Mapping[bytes, bytes], site: Site) -> ApiError:
    """Return the error of a request for a route that does not exist; `by_name` are its headers."""
    return not_found(shown_path(path), hint_for(path, site.url_of(by_name.get(b"host", b""))))


def is_wrong_base(path: bytes) -> bool:
    """Return whether a path below `/v1/` shows that the client's base URL is wrong: no engine has it."""
    return bool(_TWICE.match(path) or _OLLAMAS.fullmatch(path) or _doubled(path))


def is_googles(path: bytes) -> bool:
    """Return whether a path is of Google's API."""
    return _GOOGLES.fullmatch(path) is not None


def hint_for(path: bytes, url: str) -> str:
    """Return a sentence about the probable intention; "" if that is not clear. `url` is the gateway's, if known."""
    base = f"the base URL is {url}/v1" if url else "the base URL is that of this gateway with /v1 behind it, once"
    if _OLLAMAS.fullmatch(path):
        return f"That is a route of Ollama's API, and this is an OpenAI-compatible gateway: {base}."
    if is_googles(path):
        return f"That is a route of Google's API, and this is an OpenAI-compatible gateway: {base}."
    plain = path[-_READ_BYTES_MAX:].rstrip(b"/")
    start = plain.find(b"/")
    while start >= 0:
        tail = plain[start:]
        if tail in _BEHIND_BASE:
            meant = _BEHIND_BASE[tail]
            return f"Did you mean {url}{meant}? For clients, {base}."
        if tail in _CONTROL and tail != path:
            return f"Did you mean {_CONTROL[tail]}? GET /openapi.json has all routes."
        start = plain.find(b"/", start + 1)
    return f"For clients, {base}." if plain in (b"/v1", b"") else ""


def _doubled(path: bytes) -> bool:
    """Return whether a path is the whole of a client's route, and behind that the path a client adds to a base URL."""
    return any(path.startswith(b"/v1" + tail + b"/") and path.endswith(tail) for tail in _BEHIND_BASE)
