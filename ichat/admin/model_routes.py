"""The handlers that load, unload, put to sleep and wake the models of on-demand workers."""

from collections.abc import Awaitable, Callable
from typing import cast

import trio
from quart import Blueprint, Response, request

from ichat.admin import views
from ichat.admin.routes import context, json_response, seconds_of
from ichat.http.json_body import model_of, read_members

routes = Blueprint("models", __name__)


@routes.post("/v1/admin/models/load")
async def _load() -> Response:
    return await _answer(context().supervisor.loader.load)


@routes.post("/v1/admin/models/unload")
async def _unload() -> Response:
    drain_s = seconds_of("drain_s", context().reloader.config.timeouts.drain_s)
    return await _answer(lambda model: context().supervisor.loader.unload(model, drain_s))


@routes.post("/v1/admin/models/sleep")
async def _sleep() -> Response:
    return await _answer(context().supervisor.loader.sleep)


@routes.post("/v1/admin/models/wake")
async def _wake() -> Response:
    return await _answer(context().supervisor.loader.wake)


async def _answer(change: Callable[[str], Awaitable[str]]) -> Response:
    """Answer with what the change has made of the model that the body names, and how long that took.

    `change` returns the id of the worker that it was about, and raises ApiError.
    """
    body = cast("bytes", await request.get_data())
    model = model_of(await read_members(body, ("model",)))
    began_at = trio.current_time()
    worker_id = await change(model)
    seconds = round(trio.current_time() - began_at, 3)
    registry = context().registry
    worker = registry.get(worker_id)
    state = registry.state(worker) if worker is not None else "gone"
    return json_response(views.ModelChange(model, worker_id, state, seconds))
