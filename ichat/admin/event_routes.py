"""The handlers of what shows the gateway as it changes: the event stream, the history, and the requests in flight."""

from quart import Blueprint, Response, request

from ichat.admin import views
from ichat.admin.routes import context, json_response, long_response
from ichat.errors import ApiError
from ichat.http import sse
from ichat.observability.logs.stream import read_flag, read_parameters

routes = Blueprint("events", __name__)


@routes.get("/v1/admin/events")
async def _events() -> Response:
    values = read_parameters(request.query_string.decode("latin-1"), ("requests",))
    wants_requests = read_flag(values, "requests", default=False)
    headers = {name.decode(): value.decode() for name, value in sse.HEADERS}
    if request.method == "HEAD":
        return Response(b"", headers=headers)
    return Response(context().events.follow(wants_requests=wants_requests), headers=headers)


@routes.get("/v1/admin/history")
async def _history() -> Response:
    values = read_parameters(request.query_string.decode("latin-1"), ("worker",))
    worker = values.get("worker")
    return long_response(context().overview.history.parts(None if worker is None else (worker,)))


@routes.get("/v1/admin/requests")
async def _requests() -> Response:
    return json_response(context().overview.in_flight.view())


@routes.delete("/v1/admin/requests/<path:request_id>")
async def _cancel(request_id: str) -> Response:
    if not context().overview.in_flight.cancel(request_id):
        raise ApiError(404, "not_found", f"There is no request {request_id} in flight.")
    return json_response(views.RequestCancelled(request_id, 1))
