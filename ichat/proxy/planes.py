"""Which part of the gateway answers a request: by its method and its path."""

from typing import Literal

from ichat import errors
from ichat.errors import ApiError
from ichat.http.request import Request
from ichat.observability.access_log import shown_path
from ichat.observability.request_record import ROUTES
from ichat.protocol.messages import HEARTBEAT_PATHS
from ichat.protocol.orders import END_PATH, ORDER_PATH
from ichat.protocol.prefixes import PREFIXES_PATH
from ichat.proxy.wrong_addresses import is_wrong_base
from ichat.security.cors import Cors

CONTROL_BYTES_MAX = 4 * 1024 * 1024
"""The largest body of a request to the control plane."""
WORKER_ROUTES = HEARTBEAT_PATHS | {PREFIXES_PATH, ORDER_PATH, END_PATH}
"""Routes of workers, which are answered here."""
_RESPONSES = b"/v1/responses/"
_CONTROL_EXACT = frozenset((
    b"/", b"/console", b"/health", b"/metrics", b"/v1/models", b"/v1/usage", b"/register", b"/openapi.json",
))  # fmt: skip
_CONTROL_BELOW = (b"/v1/models/", b"/v1/workers/", b"/v1/admin/", b"/v1/logs/", b"/console/")

RequestKind = Literal["model", "engine", "response", "preflight", "worker", "control", "wrong_method", "nowhere"]
"""`model` is a known route, `engine` another route of an engine, `response` is about a kept response."""


def is_control(path: bytes) -> bool:
    """Return whether a path belongs to the control plane."""
    return path in _CONTROL_EXACT or path.startswith(_CONTROL_BELOW)


def kind_of(request: Request, cors: Cors | None) -> RequestKind:
    """Return the kind of a request. Raises ApiError 405 for a method that no kept response has."""
    path, is_post = request.path, request.method == b"POST"
    if is_post and path in ROUTES:
        return "model"
    if cors is not None and cors.is_preflight(request.method, path, request.headers):
        return "preflight"
    if is_post and path in WORKER_ROUTES:
        return "worker"
    if is_control(path):
        return "control"
    if path.startswith(_RESPONSES) and _is_about_response(request):
        return "response"
    if is_post and path.startswith(b"/v1/") and not is_wrong_base(path):
        return "engine"
    return "wrong_method" if path in ROUTES else "nowhere"


def is_for_model(request: Request, cors: Cors | None) -> bool:
    """Return whether a relay has a request answered by an upstream of a model; the owner answers all others.

    Other routes of an engine below `/v1/responses/` are among the others, since a relay sees no response's id there.
    """
    try:
        kind = kind_of(request, cors)
    except ApiError:
        return False
    return kind in ("model", "response") or (kind == "engine" and not request.path.startswith(_RESPONSES))


def _is_about_response(request: Request) -> bool:
    """Return whether a request below `/v1/responses/` is about an earlier response. Raises ApiError 405."""
    if request.method == b"POST":
        return request.path.startswith(_RESPONSES + b"resp_")
    if request.method not in (b"GET", b"HEAD", b"DELETE"):
        raise errors.method_not_allowed(request.method.decode("latin-1"), shown_path(request.path), "DELETE, GET, HEAD")
    return True
