"""The handlers of the console's files, and of `/`: browsers are led to the console, programs are told what this is."""

import functools

from quart import Blueprint, Response, request

import ichat
from ichat import errors
from ichat.admin import views
from ichat.admin.routes import context, json_response
from ichat.console.files import read_file, security_headers

routes = Blueprint("console", __name__)
CONSOLE = "/console/"
_headers = functools.cache(security_headers)


@routes.get("/")
async def _root() -> Response:
    has_console = _is_on()
    if has_console and "text/html" in request.headers.get("accept", ""):
        return Response("", 303, {**_headers(), "location": CONSOLE, "vary": "accept"})
    response = json_response(views.Welcome(version=ichat.__version__, console=CONSOLE if has_console else None))
    response.headers["vary"] = "accept"
    return response


@routes.get("/console")
async def _console() -> Response:
    _check_on()
    return Response("", 308, {**_headers(), "location": CONSOLE})


@routes.get("/console/", defaults={"file": ""})
@routes.get("/console/<path:file>")
async def _file(file: str) -> Response:
    _check_on()
    found = read_file(file)
    if found is None:
        raise errors.not_found(request.path)
    headers = {**_headers(), "cache-control": "no-cache", "etag": f'"{found.etag}"'}
    if request.if_none_match.contains_weak(found.etag):
        return Response("", 304, headers)
    return Response(found.content, headers=headers, content_type=found.content_type)


def _is_on() -> bool:
    return context().reloader.config.server_settings.console


def _check_on() -> None:
    """Raise ApiError 404 where the configuration switches the console off."""
    if not _is_on():
        raise errors.not_found(request.path)
