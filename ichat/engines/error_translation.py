"""An engine's errors in the form that a worker's clients know.

Types and codes are those that the gateway gives for the same status; the words are the engine's. A 422 becomes a 400,
with which both engines answer most wrong bodies. A request that is too long gets a common message and OpenAI's
code (`context_length`), by which the gateway and clients distinguish it from other mistakes.
"""

import ast
import http
import json
import re
from collections.abc import Iterator, Sequence
from typing import cast

from ichat import error_shapes
from ichat.engines.context_length import restated
from ichat.error_shapes import ANTHROPIC_STATUSES, anthropic_kind
from ichat.errors import CONTEXT_LENGTH_EXCEEDED, kind_of
from ichat.protocol.json_text import object_in

ERROR_BEGINNINGS = (b'data: {"error"', b"event: error\nd")
"""The first 14 bytes of the engines' own error events."""
MESSAGE_CHARS_MAX = 4000
"""Characters of an error's message that the client gets."""
READ_CHARS_MAX = 64 * 1024
"""Characters of it that are parsed: engines quote the request, of any size."""
DETAILS_MAX = 5
"""Mistakes that a message names; a value that fits none of several types counts as a mistake for each type."""
DETAILS_READ_MAX = 500

_PHRASES = {int(status): status.phrase for status in http.HTTPStatus}
_CODES = {
    401: "invalid_api_key", 403: "forbidden", 404: "not_found", 405: "method_not_allowed", 408: "request_timeout",
    409: "conflict", 413: "request_too_large", 429: "rate_limited", 501: "not_implemented", 503: "overloaded",
    504: "upstream_timeout",
}  # fmt: skip
"""The codes of errors by their statuses."""

_STRING = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_PLACE = rf"\((?:{_STRING}|\d+|, ?)*\)|\[(?:{_STRING}|\d+|, ?)*\]|{_STRING}"
_DETAIL = re.compile(rf"  \{{(?:'type': '([a-z_]*)', )?'loc': ({_PLACE}), 'msg': ({_STRING})")
_CAUSE = re.compile(rf"'ctx': \{{'error': ({_STRING})")
_VALIDATION = re.compile(r"\d+ validation errors?:\n")
"""The beginning of both engines' reports of pydantic; each mistake is a line with a Python dictionary."""
_ATTACHED = " (parameter="
"""The text that vLLM appends to a message about a parameter, followed by its name and value."""
_MODEL = re.compile(r"the model [`'\"]", re.IGNORECASE)
_FIELD = re.compile(r"[a-z0-9_]+")
_KIND_NAMES = frozenset(("str", "int", "float", "bool", "bytes", "list", "tuple", "dict", "set", "none", "nullable"))
"""The words that pydantic writes into a place for the types that it tried."""
_SUBJECT = re.compile(r"`?([A-Za-z_]+)`?(?:: | (?:must|cannot|should|contains|has|is|are)\b)")
_SUBJECTS = {
    name: name
    for name in (
        "dimensions", "documents", "frequency_penalty", "input", "logit_bias", "logprobs", "max_tokens", "messages",
        "min_p", "min_tokens", "n", "presence_penalty", "prompt", "prompt_logprobs", "query", "repetition_penalty",
        "seed", "stop", "stop_token_ids", "temperature", "tools", "top_k", "top_logprobs", "top_n", "top_p",
    )
} | {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}  # fmt: skip
"""Fields that a message without a place may begin with, and their names in a request."""
_NO_FIELDS = frozenset(("", "input_tokens", "input_text"))
"""The fields that vLLM names for a prompt that is too long."""


def openai_error(status: int, body: bytes) -> tuple[int, bytes]:
    """Return any error of an engine in OpenAI's form."""
    status = 400 if status == 422 else status
    return status, json.dumps({"error": read_error(status, body)}).encode()


def error_event(path: bytes, piece: bytes) -> bytes | None:
    """Return the engine's error event at the beginning of a stream's piece, in the form of the route `path`.

    `piece` begins like one of `ERROR_BEGINNINGS`. Returns None if it begins with something else all the same.
    """
    first = bytes(piece).partition(b"\n\n")[0]
    data = first[first.find(b"data: ") + len(b"data: ") :]
    error = object_in(data).get("error")
    if not isinstance(error, dict):
        return None
    error = cast("dict[str, object]", error)
    given = str(error.get("code"))
    status = int(given) if given.isdigit() else ANTHROPIC_STATUSES.get(str(error.get("type")), 500)
    status = 400 if status == 422 else status if 400 <= status < 600 else 500
    read = read_error(status, data)
    return error_shapes.error_event(status, read, path)


def anthropic_error(status: int, body: bytes) -> tuple[int, bytes]:
    """Return any error of an engine in Anthropic's form, which OpenAI's clients can read as well."""
    status = 400 if status == 422 else status
    kind = anthropic_kind(status)
    return status, json.dumps({"type": "error", "error": {**read_error(status, body), "type": kind}}).encode()


def read_error(status: int, body: bytes) -> dict[str, str | None]:
    """Return the members of OpenAI's error: from any form that engines, other servers and their frameworks use."""
    given = _given(body)
    words = next((given[key] for key in ("message", "detail", "error_message") if given.get(key)), None)
    message, places = _read_words(words)
    if not message:
        message = _PHRASES.get(status) or f"Status {status}"
    if given.get("param"):
        before, attached, _ = message.rpartition(_ATTACHED)
        message = before if attached else message
    param = _field(given.get("param")) or (places[0] if places else _subject(message))
    kind, code = kind_of(status), _code(status, message, param)
    if code == "model_not_found":
        param = "model"
    if isinstance(given_code := given.get("code"), str) and not given_code.isdigit():
        code = given_code or code
        kind = str(given.get("type") or kind)
    too_long = restated(message) if status == 400 else None
    if too_long is not None:
        message, kind, code = too_long, kind_of(status), CONTEXT_LENGTH_EXCEEDED
    return {"message": message[:MESSAGE_CHARS_MAX], "type": kind, "param": param or None, "code": code}


def _code(status: int, message: str, param: str | None) -> str:
    if status == 404 and (param == "model" or _MODEL.match(message)):
        return "model_not_found"
    if status == 404 and message.startswith("Response with id "):
        return "response_not_found"
    return _CODES.get(status, "bad_request" if status < 500 else "internal_error")


def _subject(message: str) -> str | None:
    """Return the field that a message without a place begins with."""
    if message.startswith("Requested token count exceeds"):
        return "max_tokens"
    match = _SUBJECT.match(message)
    return _SUBJECTS.get(match[1].lower()) if match else None


def _given(body: bytes) -> dict[str, object]:
    """Return the members of the error in a body; if that is not JSON, its text is the message."""
    try:
        found: object = json.loads(body)
    except (ValueError, RecursionError):
        return {"message": body.decode("utf-8", "replace").strip()}
    if isinstance(found, dict):
        found = cast("dict[str, object]", found)
        found = found.get("error") or found
    return cast("dict[str, object]", found) if isinstance(found, dict) else {"message": found}


def _read_words(words: object) -> tuple[str, list[str]]:
    """Return a message as a sentence, and the fields that it is about."""
    if isinstance(words, str):
        words = words[:READ_CHARS_MAX]
        if not _VALIDATION.match(words):
            return words, []
        details = list(_details_in_text(words))
        if not details:
            return words.partition("\n\n  File ")[0], []
    elif isinstance(words, list):
        details = [_detail_in_json(detail) for detail in cast("list[object]", words)[:DETAILS_READ_MAX]]
    else:
        return json.dumps(words) if words else "", []
    sentences = list(dict.fromkeys(f"{field}: {text}" if field else text for field, text in details))
    more = "; and more" if len(sentences) > DETAILS_MAX else ""
    return "; ".join(sentences[:DETAILS_MAX]) + more, [field for field, _ in details]


def _details_in_text(words: str) -> Iterator[tuple[str, str]]:
    """Return the field and the words of each mistake in a report of pydantic, a line each."""
    for line in words.split("\n")[1:]:
        if not line.startswith("  "):
            return
        if (match := _DETAIL.match(line)) is not None:
            cause = _CAUSE.search(line, match.end()) if match[1] == "json_invalid" else None
            place, text = ast.literal_eval(match[2]), str(ast.literal_eval(match[3]))
            yield _detail(place, text, str(ast.literal_eval(cause[1])) if cause else "")
        elif not line.startswith(("  {", "  ...")):
            yield "", line.strip()


def _detail_in_json(detail: object) -> tuple[str, str]:
    """Return the field and the words of a mistake in FastAPI's list."""
    if not isinstance(detail, dict):
        return "", str(detail)
    detail = cast("dict[str, object]", detail)
    return _detail(detail.get("loc"), str(detail.get("msg", "")), "")


def _detail(place: object, text: str, cause: str) -> tuple[str, str]:
    """Return the field and the words of a mistake that pydantic found."""
    if cause:
        return "", f"The request body is not JSON: {cause}"
    while text.startswith("Value error, "):
        text = text.removeprefix("Value error, ")
    return _field(place), text


def _field(place: object) -> str:
    """Return the path of a request's field, without pydantic's additions; empty if it is no field."""
    if place is None or isinstance(place, str):
        parts = (place or "").split(".")
    elif isinstance(place, list | tuple):
        parts = [str(part) for part in cast("Sequence[object]", place)]
    else:
        return ""
    if parts[:1] == ["header"]:
        return ""
    if parts[:1] in (["body"], ["query"], ["path"]):
        parts = parts[1:]
    parts = [part for part in parts if _FIELD.fullmatch(part) and part not in _KIND_NAMES]
    field = ".".join(parts)
    return "" if field in _NO_FIELDS or parts[0].isdigit() else field
