"""The gateway's control plane: a Quart application served by hypercorn on a private unix socket, off the data path.

The front door relays to it like to any other upstream, so frameworks stay where they help.
"""

import json
import platform
from collections.abc import Awaitable, Callable, Iterable
from importlib import metadata

import attrs
import hypercorn.config
import hypercorn.trio
import trio
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

import ichat
from ichat import errors
from ichat.beat import Model, entry_of, read_beat
from ichat.errors import ApiError
from ichat.registry import Registry

BODY_BYTES_MAX = 4 * 1024 * 1024
"""The largest body that a control route takes."""
BODY_S = 30
KEEP_ALIVE_S = 3600.0
"""Longer than the pool keeps a connection, so that it is never this end that closes an idle one."""
SHUTDOWN_S = 3.0
BACKLOG = 4096

PACKAGES = ("trio", "hypercorn", "quart", "quart-trio", "httpx", "h11", "attrs", "cattrs")


def make_app(registry: Registry, metrics: CollectorRegistry, gateway_id: str, started_at: int) -> QuartTrio:
    """Make the application.

    `gateway_id` tells one start of the gateway from the next; `started_at` is in seconds since the epoch, for the
    models' `created`.
    """
    app = QuartTrio("ichat")
    app.config.update(MAX_CONTENT_LENGTH=BODY_BYTES_MAX, BODY_TIMEOUT=BODY_S, RESPONSE_TIMEOUT=None)

    def entry(model: Model, owner: str) -> dict[str, object]:
        return entry_of(model, started_at, owner or "ichat")

    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get("/metrics")
    async def expose() -> Response:
        return Response(generate_latest(metrics), content_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> Response:
        found = registry.models()
        return _json({"object": "list", "data": [entry(*found[name]) for name in sorted(found)]})

    @app.get("/v1/models/<path:name>")
    async def one_model(name: str) -> Response:
        found = registry.models()
        if name not in found:
            raise errors.model_not_found(name, found)
        return _json(entry(*found[name]))

    @app.post("/v1/workers/heartbeat")
    @app.post("/register")
    async def heartbeat() -> Response:
        try:
            body = json.loads(await request.get_data())
        except (ValueError, RecursionError) as error:
            raise errors.bad_request(f"The body is not JSON: {error}.") from error
        beat = read_beat(body)
        new = registry.beat(beat)
        return _json({
            "status": "registered" if new else "ok",
            "gateway_id": gateway_id,
            "heartbeat_interval": beat.heartbeat_interval,
            "lost": [attrs.asdict(lost) for lost in registry.lost(beat.worker_id)],
        })  # fmt: skip

    @app.get("/v1/admin/workers")
    async def workers() -> Response:
        return _json({"object": "list", "data": [registry.describe(worker) for worker in registry]})

    @app.get("/v1/admin/workers/<worker_id>")
    async def one_worker(worker_id: str) -> Response:
        worker = registry.get(worker_id)
        if worker is None:
            known = ", ".join(one.id for one in registry) or "none"
            raise ApiError(404, "not_found", f"There is no worker {worker_id}. Workers here: {known}.")
        return _json(dict(registry.describe(worker)))

    @app.get("/v1/admin/cluster/version")
    async def version() -> Response:
        packages = {name: metadata.version(name) for name in PACKAGES}
        return _json({"version": ichat.__version__, "python": platform.python_version(), "packages": packages})

    @app.errorhandler(ApiError)
    async def api_error(error: ApiError) -> Response:
        headers = [(name.decode(), value.decode()) for name, value in error.headers()]
        return Response(error.body(), status=error.status, headers=dict(headers) | {"x-ichat-error": "gateway"})

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


def _json(value: object) -> Response:
    return Response(json.dumps(value), content_type="application/json")


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
