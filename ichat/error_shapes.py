"""The shapes in which clients get errors: OpenAI's, and on Anthropic's routes Anthropic's. Pure functions.

OpenAI's is ``{"error": {"message": str, "type": str, "param": str | null, "code": str}}``. Anthropic's is
``{"type": "error", "error": {"type": str, "message": str}, "request_id": str}``; here the error has the members of
OpenAI's too.
"""

import json
from collections.abc import Mapping

Members = Mapping[str, str | None]
"""Of an error: `message`, `type`, `param` and `code`."""
_ANTHROPICS = (b"/v1/messages", b"/messages")
"""The beginnings of the paths that clients of Anthropic's API use."""
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Anthropic's types by status; its errors have no code."""
ANTHROPIC_STATUSES = {
    "invalid_request_error": 400,
    **{kind: status for status, kind in reversed(_ANTHROPIC_KINDS.items())},
}
"""Statuses by Anthropic's types."""


def is_anthropics(path: bytes) -> bool:
    """Return whether the clients of a route expect Anthropic's shape."""
    return path.startswith(_ANTHROPICS)


def anthropic_kind(status: int) -> str:
    """Return Anthropic's type of an error of this status."""
    return _ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")


def error_body(status: int, error: Members, path: bytes = b"", request_id: bytes = b"") -> bytes:
    """Return the JSON body of an error in the shape of the route `path`."""
    if not is_anthropics(path):
        return json.dumps({"error": error}).encode()
    told = {"request_id": request_id.decode("latin-1")} if request_id else {}
    return json.dumps({"type": "error", "error": {**error, "type": anthropic_kind(status)}, **told}).encode()


def error_event(status: int, error: Members, path: bytes) -> bytes:
    """Return the event that ends a stream of the route `path`, in the form that the route's clients know."""
    if is_anthropics(path):
        return b"event: error\ndata: " + error_body(status, error, path) + b"\n\n"
    if b"/responses" in path:
        flat = {"type": "error", "code": error["code"], "message": error["message"], "param": error["param"]}
        return b"event: error\ndata: " + json.dumps({**flat, "error": error}).encode() + b"\n\n"
    return b"data: " + error_body(status, error) + b"\n\n"
