"""Errors of external routes in a shape that clients of the route do not know: a text, a page, or another API's JSON.

Such a body is kept back until it is whole. Then the client gets an error in the shape of its API that names the
external route. A body of the right shape goes on byte for byte, and so does a body that is too long to be read.
"""

import json
from collections.abc import Callable
from typing import cast

from ichat.engines.error_translation import read_error
from ichat.error_shapes import error_body, is_anthropics
from ichat.http.framing import Chunked, Length, Unchunk, UntilClose
from ichat.http.heads import ResponseHead
from ichat.http.request import Request

READ_BYTES_MAX = 64 * 1024
"""A longer error is not read."""
_WORDS_MAX = 1000
"""Characters of it that the client gets."""
_NO_ROUTE = (404, 405, 501)
_OF_BODIES = frozenset((b"content-length", b"content-type", b"transfer-encoding"))


class HeldError:
    """Keeps an error back until it is whole, and makes the client's response of it."""

    may_insert = False

    def __init__(
        self, head: ResponseHead, name: str, request: Request, make_head: Callable[[ResponseHead], bytes]
    ) -> None:
        """`name` is the upstream's, `make_head` returns the client's head for the upstream's."""
        self._head = head
        self._name = name
        self._path, self._id = request.path, request.id
        self._make_head = make_head
        self._held = b""
        self._is_passed_on = False

    def __repr__(self) -> str:
        return f"<HeldError {self._head.status} of {self._name}: {len(self._held)} bytes>"

    def feed(self, piece: bytes | bytearray | memoryview, *, is_last: bool) -> bytes:
        """Return the bytes for the client now, head included. Raises FramingError."""
        if self._is_passed_on:
            return bytes(piece)
        self._held += bytes(piece)
        if not is_last and len(self._held) <= READ_BYTES_MAX:
            return b""
        self._is_passed_on, held, self._held = True, self._held, b""
        told = None
        if is_last and len(held) <= READ_BYTES_MAX:
            body = Unchunk().feed(held) if isinstance(self._head.framing, Chunked) else held
            told = shaped(self._head.status, body, self._path, self._id, self._name)
        if told is None:
            return self._make_head(self._head) + held
        headers = [header for header in self._head.headers if header[0] not in _OF_BODIES]
        headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(told))]
        by_name = dict(reversed(headers))
        return self._make_head(self._head._replace(headers=headers, by_name=by_name, framing=Length(len(told)))) + told


def may_be_held(request: Request, head: ResponseHead) -> bool:
    """Return whether a response is an error that can be read."""
    return (
        head.status >= 400
        and request.version == b"1.1"
        and request.method != b"HEAD"
        and b"content-encoding" not in head.by_name
        and not isinstance(head.framing, UntilClose)
    )


def shaped(status: int, body: bytes, path: bytes, request_id: bytes, name: str) -> bytes | None:
    """Return an upstream's error in the shape of the route `path`, with the upstream's name; None if it has that shape.

    `request_id` is the request's.
    """
    if _has_shape(body, is_anthropics=is_anthropics(path)):
        return None
    error = read_error(status, b"" if body.lstrip()[:1] == b"<" else body)
    words = str(error["message"])[:_WORDS_MAX].strip().removeprefix(f"{status}: ").rstrip(".!")
    where = path.decode("latin-1")
    hint = f" (its server may not have the route {where})" if status in _NO_ROUTE and not error["param"] else ""
    message = f"{name[:1].upper()}{name[1:]} answered {status}: {words}{hint}."
    return error_body(status, {**error, "message": message}, path, request_id)


def _has_shape(body: bytes, *, is_anthropics: bool) -> bool:
    """Return whether a body is an error as clients of Anthropic's API, or of OpenAI's, know it."""
    try:
        found: object = json.loads(body)
    except (ValueError, RecursionError):
        return False
    if not isinstance(found, dict):
        return False
    members = cast("dict[str, object]", found)
    error = members.get("error")
    if not isinstance(error, dict) or not isinstance(cast("dict[str, object]", error).get("message"), str):
        return False
    return not is_anthropics or members.get("type") == "error"
