"""The handlers of logs: the lines of workers as a stream, as pages and as a file, and the lines of the gateway."""

from quart import Response, request

from ichat.admin.context import query_string, read_flags, stream_response
from ichat.admin.operations import TEXT, Operations, content_of, flag, query
from ichat.admin.schemas import Schema
from ichat.http import sse
from ichat.observability.logs.pages import (
    KNOWN_MAX,
    PAGE_LINES,
    PAGE_LINES_MAX,
    TEXT_CHARACTERS_MAX,
    LogPage,
    read_page_query,
)
from ichat.observability.logs.store import LogStore
from ichat.observability.logs.stream import KEEP_ALIVE_S, read_query

_LINES = f"""\
Server-sent events. A plain event is a LogLine, with its number as the id; an event `gap` is a LogGap; a comment is \
sent after each {KEEP_ALIVE_S:g} s without another event. A stream that is followed goes on with the worker's next \
start, and ends when the gateway forgets the worker or ends itself."""
_WRONG = "A parameter is wrong."
_UNKNOWN = "There are no lines of such a worker, or run."
_NUMBER: Schema = {"type": "integer", "minimum": 0}
_TAIL = query("tail", _NUMBER, "Lines of history, at most; left out: all that are kept.")
_FOLLOW = query("follow", {"type": "boolean"}, "Whether to follow new lines; left out: true, but for `previous`.")
_PREVIOUS = flag("previous", "The run before the newest run.")
_LAST: Schema = {
    "name": "Last-Event-ID",
    "in": "header",
    "schema": _NUMBER,
    "description": "The last line that is known already; goes before `tail`.",
}

operations = Operations("logs")


@operations.add(
    "GET /v1/logs/stream/<worker_id>",
    response=content_of(sse.CONTENT_TYPE, _LINES),
    parameters=[
        _TAIL,
        _FOLLOW,
        flag("previous", "The run before the newest run; is never followed."),
        _LAST,
    ],
    failures={"400": _WRONG, "404": _UNKNOWN},
)
async def get_log(worker_id: str, log_store: LogStore) -> Response:
    """Return the lines of a worker, also after it has failed."""
    found = read_query(query_string(), request.headers.get("last-event-id", ""))
    return stream_response(await log_store.stream(worker_id, found))


@operations.add(
    "GET /v1/logs/gateway",
    response=content_of(sse.CONTENT_TYPE, _LINES),
    parameters=[_TAIL, _FOLLOW, _LAST],
    failures={"400": _WRONG},
)
async def get_own_log(log_store: LogStore) -> Response:
    """Return the gateway's own lines: the newest, since the start of its process."""
    found = read_query(query_string(), request.headers.get("last-event-id", ""))
    return stream_response(log_store.stream_own(found))


@operations.add(
    "GET /v1/logs/pages/<worker_id>",
    parameters=[
        query("before", TEXT, "A position, as pages have it, or a time with its zone; left out: the end."),
        query(
            "known",
            {"type": "integer", "minimum": 0, "maximum": KNOWN_MAX},
            "With a time: how many of the last lines of that time the client has already.",
        ),
        query("after", TEXT, "A position: the page goes forward from it."),
        query(
            "limit",
            {"type": "integer", "minimum": 1, "maximum": PAGE_LINES_MAX, "default": PAGE_LINES},
            "Lines of the page, at most.",
        ),
        query(
            "text",
            {"type": "string", "maxLength": TEXT_CHARACTERS_MAX},
            "Only lines that contain it; capitals and small letters of ASCII are the same, and colours are ignored.",
        ),
        _PREVIOUS,
    ],
    failures={"400": _WRONG, "404": f"{_UNKNOWN} Or the lines of the position are not kept any more."},
)
async def get_log_page(worker_id: str, log_store: LogStore) -> LogPage:
    """Return lines of a worker's files, of the newest run and the run before, in pages of lines."""
    return await log_store.read_page(worker_id, read_page_query(query_string()))


@operations.add(
    "GET /v1/logs/files/<worker_id>",
    response=content_of("text/plain", "Each line with its time, as the files have it."),
    parameters=[_PREVIOUS],
    failures={"400": _WRONG, "404": _UNKNOWN},
)
async def get_log_file(worker_id: str, log_store: LogStore) -> Response:
    """Return all kept lines of a worker's run as a text to download."""
    (previous,) = read_flags("previous")
    blocks = log_store.file_blocks(worker_id, previous=previous)
    name = f"{worker_id}{'.previous' if previous else ''}.log"
    headers = {"content-disposition": f'attachment; filename="{name}"', "x-content-type-options": "nosniff"}
    body = b"" if request.method == "HEAD" else blocks
    return Response(body, headers=headers, content_type="text/plain; charset=utf-8")
