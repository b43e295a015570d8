"""The gateway's control plane: a Quart application that hypercorn serves on a private unix socket.

The front door relays requests to it as to any upstream, so no framework is on the path of a model's requests.
"""

import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable

import hypercorn.config
import hypercorn.trio
import trio
from quart import Response, current_app, g, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from ichat import errors
from ichat.admin.context import Parts, part
from ichat.admin.openapi import HANDLED
from ichat.errors import ApiError
from ichat.protocol.messages import CALLER_HEADER, CODE_HEADER, ERROR_HEADER
from ichat.security.auth import Auth
from ichat.security.keys import Seal
from ichat.security.rules import ROUTES

BODY_BYTES_MAX = 4 * 1024 * 1024
"""The largest body of a control request; the gateway refuses a larger body unread."""
BODY_S = 30
KEEP_ALIVE_S = 3600.0
"""Longer than the gateway's pool keeps an idle connection, so that only the pool closes connections."""
SHUTDOWN_S = 3.0
BACKLOG = 4096


def make_app(parts: Parts) -> QuartTrio:
    """Return the application; its handlers get the parts of the gateway that they name."""
    app = QuartTrio("ichat", static_folder=None)
    app.config.update(MAX_CONTENT_LENGTH=BODY_BYTES_MAX, BODY_TIMEOUT=BODY_S, RESPONSE_TIMEOUT=None, PARTS=parts)
    app.before_request(_check_access)
    for operations in HANDLED:
        app.register_blueprint(operations.blueprint)
    app.register_error_handler(ApiError, _api_error)
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(Exception, _bug)
    return app


async def _check_access() -> None:
    """Raise ApiError unless the sender of the request may use its route."""
    auth = part(Auth)
    signed = request.headers.get(CALLER_HEADER.decode())
    g.caller = auth.decode_caller(None if signed is None else part(Seal).verified(signed))
    if request.url_rule is not None and request.method != "OPTIONS":
        method = "GET" if request.method == "HEAD" else request.method
        rule = ROUTES.get((method, request.url_rule.rule))
        if rule is None:
            raise errors.forbidden("This route has no access rule, so that the gateway refuses every request to it.")
        auth.check(rule, g.caller)


async def _api_error(error: ApiError) -> Response:
    ours = [(ERROR_HEADER, b"gateway"), (CODE_HEADER, error.code.encode())]
    headers = {name.decode(): value.decode() for name, value in [*error.headers(), *ours]}
    return Response(error.body(), status=error.status, headers=headers)


async def _http_error(error: HTTPException) -> Response:
    if error.code == 404:
        return await _api_error(errors.not_found(request.path))
    if error.code == 405:
        methods: Iterable[str] = getattr(error, "valid_methods", None) or ()
        return await _api_error(errors.method_not_allowed(request.method, request.path, ", ".join(sorted(methods))))
    if error.code == 413:
        return await _api_error(errors.request_too_large(BODY_BYTES_MAX))
    return await _api_error(ApiError(error.code or 500, "bad_request", error.description or str(error)))


async def _bug(error: Exception) -> Response:
    current_app.logger.error("a bug in the control plane", exc_info=error)
    return await _api_error(errors.internal_error())


async def serve(app: QuartTrio, path: str, *, task_status: trio.TaskStatus[None]) -> None:
    """Serve the control plane on a unix socket until cancelled.

    The path must be in a directory that only the owner can enter.
    """
    config = hypercorn.config.Config()
    config.bind = [f"unix:{path}"]
    config.backlog = BACKLOG
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.keep_alive_max_requests = 2**31
    config.graceful_timeout = SHUTDOWN_S
    config.accesslog = None
    config.errorlog = None
    config.include_server_header = False
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope(shield=True)

        async def run(*, task_status: trio.TaskStatus[list[str]]) -> None:
            trigger: Callable[[], Awaitable[None]] = stop.wait
            with scope:
                await hypercorn.trio.serve(app, config, shutdown_trigger=trigger, task_status=task_status)

        await nursery.start(run)
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            stop.set()
            scope.deadline = trio.current_time() + SHUTDOWN_S + 1
            with contextlib.suppress(OSError):
                os.unlink(path)
