"""The routes that show the gateway as it changes, for `openapi.py`: events, the history, requests in flight."""

from ichat.admin import views
from ichat.admin.events import KEEP_ALIVE_S
from ichat.admin.openapi_parts import json_of, operation_of, query
from ichat.admin.schemas import Schema, object_of, ref, view
from ichat.http import sse
from ichat.observability.history import COLUMNS, OF_MODEL, OF_WORKER
from ichat.proxy.requests_in_flight import RequestView

_EVENTS = f"""\
Server-sent events. The first is `state`, an EventState, which comes again where a client is too slow. Then come \
changes: `workers`, an object with `changed`, a list of WorkerSummary, and `gone`, a list of ids; `models` and \
`machines`, with the lists `models` and `machines` of those that have changed, and `gone`; `sample`, the newest values \
of the history with `usage_storage`; `requests`, a RequestsInFlight; `reloaded`, with `summary` and `at`; \
`keys`, where keys have changed. A comment comes when nothing else has for {KEEP_ALIVE_S:g} s. \
The stream ends with the gateway."""
_VALUES: Schema = {"type": "array", "items": {"type": ["number", "null"]}}


def paths_of_live() -> dict[str, Schema]:
    """Return the routes."""
    text: Schema = {"type": "string"}
    return {
        "/v1/admin/events": {
            "get": operation_of(
                "cluster",
                "get_events",
                "Everything that operators see, and then each change of it",
                {"description": _EVENTS, "content": {sse.CONTENT_TYPE: {"schema": text}}},
                parameters=[
                    query("requests", {"type": "boolean", "default": False}, "Tell of the requests in flight as well.")
                ],
                failures={"400": "A parameter is wrong.", "503": "There are too many (`limits.event_streams_max`)."},
            )
        },
        "/v1/admin/history": {
            "get": operation_of(
                "cluster",
                "get_history",
                "What happened in the last hour, in samples (`[history]`)",
                json_of("History"),
                parameters=[query("worker", text, "Only this worker beside models and totals; left out: all of them.")],
                failures={"400": "A parameter is wrong."},
            )
        },
        "/v1/admin/requests": {
            "get": operation_of("cluster", "get_requests", "The requests in flight", json_of("RequestsInFlight"))
        },
        "/v1/admin/requests/{request_id}": {
            "parameters": [
                {
                    "name": "request_id",
                    "in": "path",
                    "required": True,
                    "schema": text,
                    "description": "The request's `own_id`, or its `id` if no other request has that one.",
                }
            ],
            "delete": operation_of(
                "cluster",
                "cancel_request",
                "Cancel a request in flight: its client gets 503 `request_cancelled`, or its response breaks off",
                json_of("RequestCancelled"),
                failures={
                    "404": "There is no such request in flight.",
                    "409": "Several requests have this id of their clients' (`ambiguous_id`): use their `own_id`.",
                },
            ),
        },
    }


def schemas_of_live() -> dict[str, Schema]:
    """Return the schemas of what these routes give."""
    columns = object_of(dict.fromkeys(COLUMNS, _VALUES), "Each column has one value of every sample, oldest first.")
    of_model = object_of(dict.fromkeys(OF_MODEL, _VALUES))
    of_worker = object_of(dict.fromkeys(OF_WORKER, _VALUES))
    history: dict[str, Schema] = {
        "sample_s": {"type": "number", "description": "Seconds between two samples."},
        "columns": columns,
        "models": {"type": "object", "additionalProperties": of_model},
        "workers": {"type": "object", "additionalProperties": of_worker},
    }
    state: dict[str, Schema] = {
        "gateway": view(views.GatewayView),
        "aliases": {"type": "array", "items": view(views.AliasView)},
        "usage_storage": {"type": "string", "description": "`ok`, or why usage cannot be kept."},
        "history": ref("History"),
        "workers": {"type": "array", "items": ref("WorkerSummary")},
        "models": {"type": "array", "items": view(views.ModelLoad)},
        "machines": {"type": "array", "items": ref("Machine")},
    }
    return {
        "History": object_of(
            history,
            "What happened, sample by sample; null: nothing is known. Requests, errors and tokens are those since the"
            " sample before, `at` is in seconds since 1970, and `kv_use` is the mean of the workers that tell theirs.",
        ),
        "RequestInFlight": view(RequestView),
        "RequestsInFlight": object_of(
            {
                "requests": {"type": "array", "items": ref("RequestInFlight"), "description": "Oldest first."},
                "total": {
                    "type": "integer",
                    "minimum": 0,
                    "description": "How many there are; the youngest are left out.",
                },
            }
        ),
        "RequestCancelled": view(views.RequestCancelled),
        "EventState": object_of(state, "The data of an event `state`, whose history is without workers."),
    }
