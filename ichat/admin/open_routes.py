"""The routes that are open to everybody, answered by the front door itself: health, the OpenAPI document, the console.

Browsers are led from `/` to the console, programs are told what this is.
"""

import functools
from collections.abc import Callable

import ichat
from ichat import errors
from ichat.admin import views
from ichat.admin.lists import to_json
from ichat.admin.openapi import document
from ichat.config.schema import ServerSettings
from ichat.console.files import read_file, security_headers
from ichat.http.heads import Headers
from ichat.http.request import Request
from ichat.http.server import OwnResponse

CONSOLE = b"/console/"
_JSON = (b"content-type", b"application/json")
_HEALTH = OwnResponse(200, [_JSON], to_json(views.GatewayHealth()).encode())


class OpenRoutes:
    """Makes the answers of open routes."""

    def __init__(self, settings: Callable[[], ServerSettings]) -> None:
        """`settings` are those in force."""
        self._settings = settings

    def __repr__(self) -> str:
        return "<OpenRoutes>"

    def __call__(self, request: Request) -> OwnResponse:
        """Return the answer to a GET or HEAD of one of these routes. Raises ApiError 404."""
        path = request.path
        if path == b"/health":
            return _HEALTH
        if path == b"/openapi.json":
            return _openapi()
        has_console = self._settings().console
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
    etag = f'"{found.etag}"'.encode()
    headers = [*_security(), (b"cache-control", b"no-cache"), (b"etag", etag)]
    known = [tag.strip().removeprefix(b"W/") for tag in request.by_name.get(b"if-none-match", b"").split(b",")]
    if etag in known or b"*" in known:
        return OwnResponse(304, headers, b"")
    return OwnResponse(200, [*headers, (b"content-type", found.content_type.encode())], found.content)


@functools.cache
def _openapi() -> OwnResponse:
    return OwnResponse(200, [_JSON], to_json(document()).encode())


@functools.cache
def _security() -> Headers:
    return [(name.encode(), value.encode()) for name, value in security_headers().items()]
