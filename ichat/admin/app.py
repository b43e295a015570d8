"""The gateway's control plane: a Quart application served by hypercorn on a private unix socket, off the data path.

The front door relays to it like to any other upstream, so frameworks stay where they help.
"""

import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable

import attrs
import hypercorn.config
import hypercorn.trio
import trio
from prometheus_client import CONTENT_TYPE_LATEST
from quart import Response, g, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from ichat import errors
from ichat.admin import views
from ichat.admin.routes import AdminContext, add_routes, json_response, read_json
from ichat.errors import ApiError
from ichat.observability.metrics import Metrics
from ichat.observability.scrape import Scraper
from ichat.protocol import CALLER_HEADER, CODE_HEADER, ERROR_HEADER, Heartbeat, ModelCard, entry_of, parse_heartbeat
from ichat.routing.registry import TooManyWorkers
from ichat.security.auth import ROUTES, Caller

BODY_BYTES_MAX = 4 * 1024 * 1024
"""The largest body that a control route takes; the gateway refuses a larger one before it is read."""
BODY_S = 30
KEEP_ALIVE_S = 3600.0
"""Longer than the pool keeps a connection, so that it is never this end that closes an idle one."""
SHUTDOWN_S = 3.0
BACKLOG = 4096


def make_app(parts: AdminContext, metrics: Metrics, scraper: Scraper) -> QuartTrio:
    """Make the application."""
    registry = parts.registry
    app = QuartTrio("ichat")
    app.config.update(MAX_CONTENT_LENGTH=BODY_BYTES_MAX, BODY_TIMEOUT=BODY_S, RESPONSE_TIMEOUT=None)

    def allowed_models() -> dict[str, tuple[ModelCard, str]]:
        key = g.caller.key
        found = registry.models()
        return found if key is None or key.models is None else {name: found[name] for name in found.keys() & key.models}

    @app.before_request
    async def look_who_asks() -> None:
        auth = parts.auth()
        g.caller = auth.decode_caller(request.headers.get(CALLER_HEADER.decode()))
        if request.url_rule is not None and request.method != "OPTIONS":
            method = "GET" if request.method == "HEAD" else request.method
            rule = ROUTES.get((method, request.url_rule.rule))
            if rule is None:
                raise errors.forbidden("Nobody may do that: the route has no rule.")
            auth.check(rule, g.caller)

    def entry(model: ModelCard, owner: str) -> dict[str, object]:
        return entry_of(model, int(parts.started_at), owner or "ichat")

    @app.get("/health")
    async def health() -> Response:
        return json_response(views.GatewayHealth())

    @app.get("/metrics")
    async def expose() -> Response:
        return Response(await scraper.expose(metrics.snapshot()), content_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> Response:
        found = allowed_models()
        return json_response({"object": "list", "data": [entry(*found[name]) for name in sorted(found)]})

    @app.get("/v1/models/<path:name>")
    async def one_model(name: str) -> Response:
        found = allowed_models()
        if name not in found:
            raise errors.model_not_found(name, found)
        return json_response(entry(*found[name]))

    async def accepted(heartbeat: Heartbeat) -> Heartbeat:
        """Check what a worker says that was not started here: whose it is, and where."""
        caller: Caller = g.caller
        if caller.is_managed_worker:
            return heartbeat
        host = await parts.auth().check_worker(heartbeat.host, caller)
        known = registry.get(heartbeat.worker_id)
        if known is not None and known.managed:
            raise errors.forbidden(f"The id {heartbeat.worker_id} belongs to a worker that this gateway has started.")
        if (
            known is not None
            and known.heartbeat is not None
            and known.heartbeat.host != host
            and not registry.is_away(known)
        ):
            raise errors.forbidden(
                f"The id {heartbeat.worker_id} belongs to a worker at {known.heartbeat.host}, which is there."
            )
        return attrs.evolve(heartbeat, host=host)

    @app.post("/v1/workers/heartbeat")
    @app.post("/register")
    async def heartbeat() -> Response:
        heartbeat = await accepted(parse_heartbeat(await read_json()))
        new = registry.record_heartbeat(heartbeat)
        if isinstance(new, TooManyWorkers):
            raise errors.too_many_workers(new.workers_max)
        parts.logbook.changed()
        return json_response(
            views.HeartbeatResponse(
                status="registered" if new else "ok",
                gateway_id=parts.gateway_id,
                heartbeat_interval=heartbeat.heartbeat_interval,
                lost=registry.lost(heartbeat.worker_id),
                wants_machine=registry.wants_machine(heartbeat.worker_id),
            )
        )

    add_routes(app, parts)

    @app.errorhandler(ApiError)
    async def api_error(error: ApiError) -> Response:
        ours = [(ERROR_HEADER, b"gateway"), (CODE_HEADER, error.code.encode())]
        headers = {name.decode(): value.decode() for name, value in [*error.headers(), *ours]}
        return Response(error.body(), status=error.status, headers=headers)

    @app.errorhandler(HTTPException)
    async def http_error(error: HTTPException) -> Response:
        if error.code == 404:
            return await api_error(errors.not_found(request.path))
        if error.code == 405:
            allow = ", ".join(sorted(_methods(error)))
            return await api_error(errors.method_not_allowed(request.method, request.path, allow))
        if error.code == 413:
            return await api_error(errors.request_too_large(BODY_BYTES_MAX))
        return await api_error(ApiError(error.code or 500, "bad_request", error.description or str(error)))

    @app.errorhandler(Exception)
    async def bug(error: Exception) -> Response:
        app.logger.error("a bug in the control plane", exc_info=error)
        return await api_error(errors.internal_error())

    return app


def _methods(error: HTTPException) -> Iterable[str]:
    """Give the methods that a route has, of the error that it has not another one."""
    return getattr(error, "valid_methods", None) or ()


async def serve(app: QuartTrio, path: str, *, task_status: trio.TaskStatus[None]) -> None:
    """Serve the control plane on a unix socket until cancelled; it is made where only its owner can reach it."""
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
