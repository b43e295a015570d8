"""The model and the other parts of a request for a model that the gateway reads."""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from ichat import errors
from ichat.http.heads import form_type
from ichat.http.multipart import model_of_form, read_form
from ichat.http.request import Request
from ichat.http.request_body import RequestBody, form_body, read_model_body
from ichat.observability.request_record import ROUTES
from ichat.protocol.messages import HOP_HEADER
from ichat.protocol.responses import is_background
from ichat.proxy.engine_control import HEADER_NAMES, WATCHED
from ichat.proxy.upstream_request import hops_of
from ichat.routing.prefix_chain import PrefixSums

HOPS_MAX = 4
_CONTENT_TYPE = b"content-type"
_JSON = b"application/json"
_URL_ENCODED = b"application/x-www-form-urlencoded"
"""The type of bodies from which engines would read fields, where the gateway reads JSON."""
_READ_MEMBERS = frozenset(("model", "stream", "previous_response_id", "background"))
"""The members of a body that are read."""
_TWO_WAYS = re.compile(rb"[%#;\\]|//|/\.{1,2}(?:/|$)")
"""Path forms that an upstream might read differently (as another route, or a way out of its base path): refused."""


class Tried(NamedTuple):
    """An attempt that an earlier owner has decided on: it has ended, and the request has not."""

    endpoint: str
    model: str
    kind: str
    """That of its `Outcome`. Any other word: the request can be sent nowhere else."""


class Asked(NamedTuple):
    """The facts by which a request for a model is decided: nothing of its body, client or connection."""

    model: str
    """The name that it asks for."""
    session: bytes = b""
    """Requests of the same session go to the same endpoint; empty: it has none."""
    is_stream: bool = False
    previous_response_id: str | None = None
    """The response that it continues, if it names any."""
    is_background: bool = False
    """Whether the response is made after the request has ended."""
    is_suspect: bool = False
    """Whether it may steer an engine: workers get that from few callers only."""
    tried: tuple[Tried, ...] = ()


class Asker(Protocol):
    """The side of a request that has its bytes."""

    def read_prefix(self) -> PrefixSums | None:
        """Return the sums of its prefix, by its body as the client sent it; None if it has no chain."""
        ...

    def prompt_bytes(self) -> int:
        """Return the bytes of its body, if they show how long its prompt is; else 0."""
        ...

    def announce_load(self, text: Callable[[], bytes], interval_s: float) -> None:
        """Have a stream get comments of this text, at once and at least each interval, until `end_load`."""
        ...

    def end_load(self) -> None:
        """Go on with the comments of every stream, if there are any."""
        ...


def check_path(path: bytes) -> None:
    """Raise ApiError 400 for a path that an upstream might read differently."""
    if _TWO_WAYS.search(path):
        raise errors.bad_request("The path must be plain: no `%`, `#`, `;`, `\\` or `//`, no segments `.` or `..`.")


async def read_model_request(request: Request, session: bytes) -> tuple[Asked, RequestBody]:
    """Return the facts of a request of this session, and its body. Raises ApiError if no upstream may get it.

    A form becomes a form that all parsers read in the same way.
    """
    if request.path not in ROUTES:
        check_path(request.path)
    if HOP_HEADER in request.by_name and hops_of(request.by_name) >= HOPS_MAX:
        raise errors.loop_detected()
    if request.by_name.get(_CONTENT_TYPE) != _JSON or len(request.by_name) < len(request.headers):
        _check_content_type(request)
    content_type = form_type(request.by_name)
    if content_type:
        form = await read_form(request.body, content_type)
        request.body = form.body
        request.replace_headers([
            (name, form.content_type if name == _CONTENT_TYPE else value) for name, value in request.headers
        ])  # fmt: skip
        body = form_body(form.body, form.fields)
        suspect = is_suspect(body.names, request.by_name)
        return Asked(model_of_form(form.body, form.fields), session, is_suspect=suspect), body
    model, body, members = await read_model_body(request.body, _READ_MEMBERS)
    is_stream, suspect = members.get("stream") is True, is_suspect(body.names, request.by_name)
    if not request.path.endswith(b"/responses"):
        return Asked(model, session, is_stream, is_suspect=suspect), body
    previous, later = members.get("previous_response_id"), is_background(members.get("background"))
    return Asked(model, session, is_stream, None if previous is None else str(previous), later, suspect), body


def is_suspect(names: Iterable[str], of_head: Iterable[bytes]) -> bool:
    """Return whether a request with these members or fields, and these headers, may steer an engine."""
    return not (WATCHED.isdisjoint(names) and HEADER_NAMES.isdisjoint(of_head))


def _check_content_type(request: Request) -> None:
    """Raise ApiError 400 where an upstream could read the body in another way than the gateway."""
    by_name, headers = request.by_name, request.headers
    if len(by_name) < len(headers) and sum(name == _CONTENT_TYPE for name, _ in headers) > 1:
        raise errors.bad_request("A request must have one content type.")
    if by_name.get(_CONTENT_TYPE, b"")[: len(_URL_ENCODED)].lower() == _URL_ENCODED:
        raise errors.bad_request(
            "The content type says that the body is an HTML form; send JSON, with `content-type: application/json`."
        )
