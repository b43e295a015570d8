"""Shared by the handlers of the control plane: the reading and answering of requests."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast

from quart import Response, current_app, request

from ichat import errors
from ichat.admin.lists import Pieces, to_json
from ichat.config.schema import DRAIN_S_MAX
from ichat.http import sse
from ichat.observability.logs.stream import read_flag, read_parameters

Parts = Mapping[type[Any], Any]
"""The parts of the gateway that the control plane shows and changes, by their classes."""
_Part = TypeVar("_Part")


def part(kind: type[_Part]) -> _Part:
    """Return the gateway's part of this class, for the application that handles the request."""
    return cast("Parts", current_app.config["PARTS"])[kind]


def json_response(value: object, status: int = 200) -> Response:
    """Return the response with a value that JSON can hold, or with views."""
    return Response(to_json(value), status=status, content_type="application/json")


def long_response(parts: Iterator[str], content_type: str = "application/json") -> Response:
    """Return the response with a body of these parts."""
    return Response(b"" if request.method == "HEAD" else Pieces(parts), content_type=content_type)


def stream_response(events: Any) -> Response:
    """Return the response with a body of these blocks of server-sent events."""
    headers = {name.decode(): value.decode() for name, value in sse.HEADERS}
    return Response(b"" if request.method == "HEAD" else events, headers=headers)


async def read_json() -> Any:
    """Return the parsed body of the request. Raises ApiError 400 for a body that is not JSON."""
    try:
        return json.loads(await request.get_data())
    except (ValueError, RecursionError) as error:
        raise errors.bad_request(f"The body is not JSON: {error}.") from error


def query_string() -> str:
    """Return the query of the request, as it was sent."""
    return request.query_string.decode("latin-1")


def read_flags(*names: str) -> list[bool]:
    """Return these flags of the query. Raises ApiError 400 for any other parameter: it may be one of them, misspelt."""
    values = read_parameters(query_string(), names)
    return [read_flag(values, name, default=False) for name in names]


def seconds_of(name: str, default: float) -> float:
    """Return the seconds that the query has under this name. Raises ApiError 400."""
    text = request.args.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= DRAIN_S_MAX:
        raise errors.bad_request(f"{name} must be from 0 to {DRAIN_S_MAX:g} seconds, not {text!r}.", param=name)
    return value
