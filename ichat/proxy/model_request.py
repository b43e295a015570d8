"""What a request for a model asks for, as far as the gateway reads it."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from ichat import errors
from ichat.http.heads import form_type
from ichat.http.json_body import model_of, read_members
from ichat.http.multipart import fields_of, model_of_form
from ichat.http.request import Request
from ichat.observability.request_record import ROUTES
from ichat.proxy.upstream_request import hops_of

HOPS_MAX = 4
_READ_MEMBERS = frozenset(("model", "stream", "previous_response_id", "background"))
"""Members of a body whose values are read."""
_TWO_WAYS = re.compile(rb"[%#]|//|/\.{1,2}(?:/|$)")
"""Path forms that an upstream might read differently (as another route, or a way out of its base path): refused."""


class ModelRequest(NamedTuple):
    """What a request for a model asks for."""

    model: str
    names: Sequence[str]
    """The names of the body's members, or of the form's fields."""
    is_stream: bool
    previous_response_id: str | None
    """The response that it continues, if it names one."""
    is_background: bool = False
    """Whether the response is made after the request has ended."""


async def read_model_request(request: Request) -> ModelRequest:
    """Return what a request asks for. Raises ApiError for one that no upstream may get."""
    if request.path not in ROUTES and _TWO_WAYS.search(request.path):
        raise errors.bad_request("The path must be plain: no `%`, `#` or `//`, no segments `.` or `..`.")
    if hops_of(request.by_name) >= HOPS_MAX:
        raise errors.loop_detected()
    content_type = form_type(request.by_name)
    if content_type:
        fields = await fields_of(request.body, content_type)
        names = [field.name.decode("latin-1") for field in fields]
        return ModelRequest(model_of_form(request.body, fields), names, False, None)
    members = await read_members(request.body, _READ_MEMBERS)
    previous = members.get("previous_response_id")
    return ModelRequest(
        model_of(members),
        (*members,),
        members.get("stream") is True,
        None if previous is None else str(previous),
        request.path.endswith(b"/responses") and members.get("background") not in (None, False),
    )
