"""The routes that are open to everybody, answered by the front door itself: health, the OpenAPI document, the console.

`/` redirects browsers to the console, and answers programs with the gateway's version.
"""

import functools
from collections.abc import Callable, Mapping

import ichat
from ichat import errors
from ichat.admin import views
from ichat.admin.lists import to_json
from ichat.admin.operations import TEXT, Answer, content_of, operation_of, path_parameters, shown_path
from ichat.admin.schemas import Schema
from ichat.console.files import read_file, security_headers
from ichat.http.heads import Headers
from ichat.http.request import Request
from ichat.http.server import OwnResponse
from ichat.proxy.context import GatewayContext

CONSOLE = b"/console/"
_JSON = (b"content-type", b"application/json")
_HEALTH = OwnResponse(200, [_JSON], to_json(views.GatewayHealth()).encode())
_NO_CONSOLE = {"404": "There is no such file, or `server_settings.console` is false."}
_MOVED: Schema = {"description": "It is at `/console/`.", "headers": {"location": {"schema": TEXT}}}
_DOCUMENT: Schema = {"description": "OpenAPI 3.1.", "content": {"application/json": {"schema": {"type": "object"}}}}
_OPERATIONS: Mapping[str, tuple[str, str, Answer]] = {
    "/": ("get_root", "What answers here; a browser is led to the console instead", views.Welcome),
    "/health": ("get_health", "Whether the gateway answers", views.GatewayHealth),
    "/openapi.json": ("get_openapi", "This document", _DOCUMENT),
    "/console": ("get_console", "Leads to the console", _MOVED),
    "/console/": ("get_console_page", "The console, a page", content_of("text/html", "The page.")),
    "/console/<path:file>": ("get_console_file", "A file of the console", content_of("*/*", "The file.")),
}
"""Each route's operation: its id, a summary, and the answer."""


def paths() -> dict[str, Schema]:
    """Return the open routes as the OpenAPI document has them, by their paths."""
    found: dict[str, Schema] = {}
    for path, (name, summary, answer) in _OPERATIONS.items():
        answers, failures = {"308" if answer is _MOVED else "200": answer}, _NO_CONSOLE if "console" in path else {}
        operation = operation_of("cluster", name, summary, answers, failures=failures)
        found[shown_path(path)] = {**path_parameters(path, {}), "get": operation}
    return found


class OpenRoutes:
    """Makes the answers of open routes."""

    def __init__(self, context: GatewayContext, document: Callable[[], object]) -> None:
        """`context` has the settings in force, `document` makes the OpenAPI document."""
        self._context = context
        self._document = document

    def __call__(self, request: Request) -> OwnResponse:
        """Return the answer to a GET or HEAD of one of these routes. Raises ApiError 404."""
        path = request.path
        if path == b"/health":
            return _HEALTH
        if path == b"/openapi.json":
            return _openapi(self._document)
        has_console = self._context.settings.console
        if path == b"/":
            return _root(request, has_console=has_console)
        if has_console and path == b"/console":
            return OwnResponse(308, [*_security(), (b"location", CONSOLE)], b"")
        if has_console and path.startswith(CONSOLE):
            return _file(request, path[len(CONSOLE) :].decode("latin-1"))
        raise errors.not_found(path.decode("latin-1"))


def _root(request: Request, *, has_console: bool) -> OwnResponse:
    vary = (b"vary", b"accept")
    if has_console and b"text/html" in request.by_name.get(b"accept", b""):
        return OwnResponse(303, [*_security(), (b"location", CONSOLE), vary], b"")
    welcome = views.Welcome(version=ichat.__version__, console=CONSOLE.decode() if has_console else None)
    return OwnResponse(200, [_JSON, vary], to_json(welcome).encode())


def _file(request: Request, name: str) -> OwnResponse:
    found = read_file(name)
    if found is None:
        raise errors.not_found(request.path.decode("latin-1"))
    is_small = _accepts_gzip(request)
    etag = f'"{found.etag}{"-gzip" if is_small else ""}"'.encode()
    control = b"public, max-age=31536000, immutable" if found.is_kept else b"no-cache"
    headers = [*_security(), (b"cache-control", control), (b"etag", etag), (b"vary", b"accept-encoding")]
    known = [tag.strip().removeprefix(b"W/") for tag in request.by_name.get(b"if-none-match", b"").split(b",")]
    if etag in known or b"*" in known:
        return OwnResponse(304, headers, b"")
    headers.append((b"content-type", found.content_type.encode()))
    if not is_small:
        return OwnResponse(200, headers, found.content)
    return OwnResponse(200, [*headers, (b"content-encoding", b"gzip")], found.gzipped)


def _accepts_gzip(request: Request) -> bool:
    """Return whether the client names gzip among the encodings that it reads."""
    names = request.by_name.get(b"accept-encoding", b"").lower().split(b",")
    return any(name.strip() in (b"gzip", b"gzip;q=1", b"gzip;q=1.0") for name in names)


@functools.cache
def _openapi(document: Callable[[], object]) -> OwnResponse:
    return OwnResponse(200, [_JSON], to_json(document()).encode())


def _security() -> Headers:
    return [(name.encode(), value.encode()) for name, value in security_headers().items()]
