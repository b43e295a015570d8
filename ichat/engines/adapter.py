"""What an engine's requests and responses must become, so that every worker reads alike to its clients.

A worker's errors are OpenAI's, with the type and code that the gateway gives for the same status; the words are the
engine's. A 422 becomes a 400, which is what both engines answer to most bodies that are wrong. Reranking takes and
gives what Cohere's and Jina's clients know. Of a stream nothing is touched but the event that tells an error.
"""

import ast
import http
import json
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol, cast

import attrs

from ichat.engines.reasoning import RENAMES
from ichat.errors import ApiError, background_full, bad_request, unsupported_by_model
from ichat.http.heads import Headers
from ichat.http.json_body import Body, Member, members_of, rewrite_json, value_of
from ichat.http.request import Request
from ichat.protocol import ModelCard, entry_of

BodyTransform = Callable[[int, bytes], tuple[int, bytes]]
"""Takes the status and the whole body of a response and gives others, of the same type; an error's body is JSON."""

VLLM_PATHS = {b"/v1/tokenize": b"/tokenize", b"/v1/detokenize": b"/detokenize", b"/v1/classify": b"/classify"}
"""Routes that vLLM has under another path."""
RESPONSES_PATH = b"/v1/responses"
_CHAT_PATH = b"/v1/chat/completions"
ERROR_BEGINNINGS = (b'data: {"error"', b"event: error\nd")
"""How the engines' own error events begin, as far as all of them go: 14 bytes."""
RERANK_PATHS = frozenset((b"/rerank", b"/v1/rerank", b"/v2/rerank"))
GENERATES = ("chat/completions", "completions", "responses", "messages")
POOLS = ("embeddings", "rerank", "score", "classify", "pooling")
HEARS = ("audio/transcriptions", "audio/translations")
"""What models are asked to do, as routes below `/v1`: to generate text, to make vectors or scores, to transcribe."""
MESSAGE_CHARS_MAX = 4000
"""Characters of an error's message as the client reads it."""
READ_CHARS_MAX = 64 * 1024
"""Characters of it that are looked at: engines quote the request, whatever its size."""
DETAILS_MAX = 5
"""Mistakes that one message names; a value that fits no kind of several is one for each."""
DETAILS_READ_MAX = 500

_RESTATED = (b"x-request-id", b"content-length", b"transfer-encoding")
_PHRASES = {int(status): status.phrase for status in http.HTTPStatus}
_REQUEST, _RATE, _SERVER = "invalid_request_error", "rate_limit_error", "server_error"
_KINDS = {
    400: (_REQUEST, "bad_request"),
    401: (_REQUEST, "invalid_api_key"),
    403: (_REQUEST, "forbidden"),
    404: (_REQUEST, "not_found"),
    405: (_REQUEST, "method_not_allowed"),
    408: (_REQUEST, "request_timeout"),
    409: (_REQUEST, "conflict"),
    413: (_REQUEST, "request_too_large"),
    429: (_RATE, "rate_limited"),
    501: (_SERVER, "not_implemented"),
    503: (_SERVER, "overloaded"),
    504: (_SERVER, "upstream_timeout"),
}
"""Type and code by status."""
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

_STATUSES = {kind: status for status, kind in _ANTHROPIC_KINDS.items()} | {_REQUEST: 400}
"""Statuses by Anthropic's types: its errors have no code."""

_STRING = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_PLACE = rf"\((?:{_STRING}|\d+|, ?)*\)|\[(?:{_STRING}|\d+|, ?)*\]|{_STRING}"
_DETAIL = re.compile(rf"  \{{(?:'type': '([a-z_]*)', )?'loc': ({_PLACE}), 'msg': ({_STRING})")
_CAUSE = re.compile(rf"'ctx': \{{'error': ({_STRING})")
_VALIDATION = re.compile(r"\d+ validation errors?:\n")
"""How both engines begin to tell what pydantic found; each mistake has a line, as Python writes a dictionary."""
_ATTACHED = " (parameter="
"""What vLLM puts behind a message about a parameter, with that and a value."""
_MODEL = re.compile(r"the model [`'\"]", re.IGNORECASE)
_EMPTY = re.compile(rb"\s*\}")
_FIELD = re.compile(r"[a-z0-9_]+")
_KIND_NAMES = frozenset(("str", "int", "float", "bool", "bytes", "list", "tuple", "dict", "set", "none", "nullable"))
"""What pydantic writes into a place for the kinds of value that it tried."""
_SUBJECT = re.compile(r"`?([A-Za-z_]+)`?(?:: | (?:must|cannot|should|contains|has|is|are)\b)")
_SUBJECTS = {
    name: name
    for name in (
        "dimensions", "documents", "frequency_penalty", "input", "logit_bias", "logprobs", "max_tokens", "messages",
        "min_p", "min_tokens", "n", "presence_penalty", "prompt", "prompt_logprobs", "query", "repetition_penalty",
        "seed", "stop", "stop_token_ids", "temperature", "tools", "top_k", "top_logprobs", "top_n", "top_p",
    )
} | {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}  # fmt: skip
"""Fields that a message without a place may begin with, and how a request calls them."""
_NO_FIELDS = frozenset(("", "input_tokens", "input_text"))
"""What vLLM gives for a prompt that is too long."""


@attrs.frozen
class AdapterSettings:
    """What the worker's command line says of requests and responses."""

    response_tag: str = ""
    """What the ids of responses get in them; see `beat.response_tag`. Empty: the engine makes the ids."""
    responses_max: int = 1000
    """Responses that the engine remembers; 0: none."""
    responses_bytes_max: int = 256 * 1024 * 1024
    """Bytes of the requests that they came from."""
    reasoning_field: str = "engine"
    """What a model's thoughts are called in chats; see `reasoning.FIELDS`."""


class ResponseStore(Protocol):
    """What an engine remembers of responses, as far as requests are concerned."""

    def is_full(self) -> bool:
        """Return whether no more responses can be made in the background."""
        ...


class ProtocolAdapter:
    """How an engine's requests and responses differ from what a worker takes and gives; here: as vLLM's do."""

    def __init__(self, paths: Mapping[bytes, bytes] | None = None) -> None:
        """`paths` are routes that the engine has under another path."""
        self._paths = paths or {}
        self.settings = AdapterSettings()
        """Set by the worker before the engine starts."""
        self.responses: ResponseStore | None = None
        """What the engine remembers of responses; set by the engine once it can be asked."""
        self._unserved: dict[bytes, str] = {}
        """Routes for which the model is no good, each with what it asks for."""
        self._served: tuple[str, Collection[str]] = ("", ())

    def serve_only(self, model: str, served: Collection[str], lacking: Collection[str]) -> None:
        """Refuse from now on what the model does not do: `lacking`, of which it serves none; see `GENERATES`."""
        self._served = (model, served)
        for name in lacking:
            for path in (f"/v1/{name}", f"/{name}", *(("/v2/rerank",) if name == "rerank" else ())):
                self._unserved[path.encode()] = name

    def check_served(self, request: Request) -> None:
        """Raise ApiError 400 where the request is for what the model does not do."""
        name = self._unserved.get(request.path)
        if name is not None and request.method == b"POST":
            raise self.unsupported(name)

    def unsupported(self, name: str) -> ApiError:
        """Return the error of a request for what the model does not do, such as `embeddings`."""
        model, served = self._served
        does = ", ".join(f"/v1/{one}" for one in served)
        return unsupported_by_model(
            f"The model `{model}` serves {does}; it does not serve /v1/{name}{_what_would(name, served)}."
        )

    def to_engine(self, path: bytes) -> bytes:
        """Return the path by which the engine knows a route."""
        return self._paths.get(path, path)

    async def request(self, request: Request) -> BodyTransform | None:
        """Change a request before the engine gets it; give what its answer must be put through where it is a 200.

        To be called in Trio: others have their turn while a large body is read. Raises ApiError where the engine shall
        not get the request.
        """
        self.check_served(request)
        rewrite = None
        if request.method == b"POST" and request.path in RERANK_PATHS:
            rewrite = await _rerank(request)
        elif request.method == b"POST" and request.path == RESPONSES_PATH:
            await self._name_response(request)
        self.redirect(request)
        sync_headers(request)
        return rewrite

    async def _name_response(self, request: Request) -> None:
        members = await members_of(request.body)
        given = {member.name: member for member in members}
        background = given.get("background")
        self.check_background(is_asked=background is not None and value_of(request.body, background) is True)
        response_id = self.new_response_id()
        if response_id and "request_id" in given:
            new = {"request_id": json.dumps(response_id).encode()}
            request.body = rewrite_json(request.body, members, new, ())
        elif response_id:
            request.body = with_members(request.body, {"request_id": response_id})

    def check_background(self, *, is_asked: bool) -> None:
        """Raise ApiError 429 where a response is asked for in the background and too many are being made there."""
        if is_asked and self.responses is not None and self.responses.is_full():
            raise background_full(self.settings.responses_max)

    def new_response_id(self) -> str:
        """Return the id of a new response, which says which worker has it; empty where the engine shall make it."""
        tag = self.settings.response_tag
        return f"resp_{tag}_{secrets.token_hex(16)}" if tag else ""

    def admit(self, request: Request, under_way: Collection[Request]) -> None:
        """Raise ApiError where the engine must not get this request now, beside those that are under way there.

        Called in Trio, after `request` and just before the engine gets it.
        """

    def redirect(self, request: Request) -> None:
        """Give the request the path by which the engine knows its route."""
        path = self._paths.get(request.path)
        if path is not None:
            request.target = path + request.target[len(request.path) :]
            request.path = path

    def response(
        self, request: Request, status: int, headers: Headers, asked: BodyTransform | None
    ) -> BodyTransform | None:
        """Give what a response must be put through, or None where its bytes go out as they come.

        Called once for each response, before its head goes out; a body that is rewritten is gathered first, so this
        gives None for streams. `asked` is what `request` gave.
        """
        if status >= 400:
            return anthropic_error if request.path.startswith(b"/v1/messages") else openai_error
        rename = RENAMES[self.settings.reasoning_field]
        if rename is not None and status == 200 and request.path == _CHAT_PATH and not _is_stream(headers):
            return lambda status, body: (status, rename(body))
        return asked if status == 200 else None

    def edit(self, request: Request) -> Callable[[bytes], bytes] | None:
        """Return what each piece of a stream must be put through, or None where they go out as they come.

        Called once for each event stream with status 200; engines hand over whole events.
        """
        return RENAMES[self.settings.reasoning_field] if request.path == _CHAT_PATH else None


def _is_stream(headers: Headers) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)


def with_members(body: Body, new: Mapping[str, str]) -> bytes:
    """Return a JSON object with more members, which it does not have yet, and else byte for byte as it was."""
    at = body.index(b"{") + 1
    text = json.dumps(new)[1:-1].encode()
    return b"".join((body[:at], text, b"" if _EMPTY.match(body, at) else b",", body[at:]))


def _what_would(name: str, served: Collection[str]) -> str:
    """Say what could be asked for this instead, to be put behind the sentence that the model does not serve it."""
    if name in HEARS:
        return ": models that transcribe speech do"
    if name in GENERATES:
        return ": a model that generates text would, in a worker that was started without `--runner pooling`"
    if any(other in served for other in POOLS):
        return ": it takes a model of another kind"
    return ": a worker that was started with `--runner pooling` would, if the model can do it"


def sync_headers(request: Request) -> None:
    """Make the headers say what a request has become: its id, which vLLM reads there, and the length of its body."""
    request.headers = [header for header in request.headers if header[0] not in _RESTATED]
    request.headers.append((b"x-request-id", request.id))
    if request.body:
        request.headers.append((b"content-length", b"%d" % len(request.body)))


def openai_error(status: int, body: bytes) -> tuple[int, bytes]:
    """Make any error of an engine one of OpenAI's form."""
    status = 400 if status == 422 else status
    return status, json.dumps({"error": _read_error(status, body)}).encode()


def error_event(path: bytes, event: bytes) -> bytes:
    """Return an engine's error event as errors are told everywhere, in the form that the route `path` has for one.

    `event` begins like one of `ERROR_BEGINNINGS`; what turns out to be none is returned as it is.
    """
    first, _, rest = bytes(event).partition(b"\n\n")
    data = first[first.find(b"data: ") + len(b"data: ") :]
    try:
        found: object = json.loads(data)
    except (ValueError, RecursionError):
        return event
    error = cast("dict[str, object]", found).get("error") if isinstance(found, dict) else None
    if not isinstance(error, dict):
        return event
    error = cast("dict[str, object]", error)
    given = str(error.get("code"))
    status = int(given) if given.isdigit() else _STATUSES.get(str(error.get("type")), 500)
    status = 400 if status == 422 else status if 400 <= status < 600 else 500
    read = _read_error(status, data)
    kind = _anthropic_kind(status) if b"/messages" in path else str(read["type"])
    told = ApiError(status, str(read["code"]), str(read["message"]), kind=kind, param=read["param"])
    return told.event(path) + rest


def anthropic_error(status: int, body: bytes) -> tuple[int, bytes]:
    """Make any error of an engine one that Anthropic's clients know, and OpenAI's can read as well."""
    status = 400 if status == 422 else status
    kind = _anthropic_kind(status)
    return status, json.dumps({"type": "error", "error": {**_read_error(status, body), "type": kind}}).encode()


def _anthropic_kind(status: int) -> str:
    return _ANTHROPIC_KINDS.get(status, _REQUEST if status < 500 else "api_error")


def _read_error(status: int, body: bytes) -> dict[str, str | None]:
    """Read an error in any of the forms that engines and their frameworks have for it."""
    given = _given(body)
    words = next((given[key] for key in ("message", "detail", "error_message") if given.get(key)), None)
    message, places = _read_words(words)
    if not message:
        message = _PHRASES.get(status) or f"Status {status}"
    if given.get("param"):
        before, attached, _ = message.rpartition(_ATTACHED)
        message = before if attached else message
    param = _field(given.get("param")) or (places[0] if places else _subject(message))
    kind, code = _KINDS.get(status, (_REQUEST, "bad_request") if status < 500 else (_SERVER, "internal_error"))
    if status == 404 and (param == "model" or _MODEL.match(message)):
        code, param = "model_not_found", "model"
    elif status == 404 and message.startswith("Response with id "):
        code = "response_not_found"
    if isinstance(given_code := given.get("code"), str) and not given_code.isdigit():
        code = given_code or code
        kind = str(given.get("type") or kind)
    return {"message": message[:MESSAGE_CHARS_MAX], "type": kind, "param": param or None, "code": code}


def _subject(message: str) -> str | None:
    """Give the field that a message without a place begins with."""
    if message.startswith("Requested token count exceeds"):
        return "max_tokens"
    match = _SUBJECT.match(message)
    return _SUBJECTS.get(match[1].lower()) if match else None


def _given(body: bytes) -> dict[str, object]:
    """Give the members of the error that a body holds; of one that is no JSON, its text as the message."""
    try:
        found: object = json.loads(body)
    except (ValueError, RecursionError):
        return {"message": body.decode("utf-8", "replace").strip()}
    if isinstance(found, dict):
        found = cast("dict[str, object]", found)
        found = found.get("error") or found
    return cast("dict[str, object]", found) if isinstance(found, dict) else {"message": found}


def _read_words(words: object) -> tuple[str, list[str]]:
    """Give a message as a sentence, and the fields that it is about."""
    details: list[tuple[str, str]] = []
    if isinstance(words, str):
        words = words[:READ_CHARS_MAX]
        if not _VALIDATION.match(words):
            return words, []
        for line in words.split("\n")[1:]:
            if not line.startswith("  "):
                break
            if (match := _DETAIL.match(line)) is not None:
                cause = _CAUSE.search(line, match.end()) if match[1] == "json_invalid" else None
                place, text = ast.literal_eval(match[2]), str(ast.literal_eval(match[3]))
                details.append(_detail(place, text, str(ast.literal_eval(cause[1])) if cause else ""))
            elif not line.startswith(("  {", "  ...")):
                details.append(("", line.strip()))
        if not details:
            return words.partition("\n\n  File ")[0], []
    elif isinstance(words, list):
        for one in cast("list[object]", words)[:DETAILS_READ_MAX]:
            if isinstance(one, dict):
                one = cast("dict[str, object]", one)
                details.append(_detail(one.get("loc"), str(one.get("msg", "")), ""))
            else:
                details.append(("", str(one)))
    else:
        return json.dumps(words) if words else "", []
    sentences = list(dict.fromkeys(f"{field}: {text}" if field else text for field, text in details))
    more = "; and more" if len(sentences) > DETAILS_MAX else ""
    return "; ".join(sentences[:DETAILS_MAX]) + more, [field for field, _ in details]


def _detail(place: object, text: str, cause: str) -> tuple[str, str]:
    """Give the field and the words of one mistake that pydantic found."""
    if cause:
        return "", f"The request body is not JSON: {cause}"
    while text.startswith("Value error, "):
        text = text.removeprefix("Value error, ")
    return _field(place), text


def _field(place: object) -> str:
    """Give the path of a request's field, without what is no part of it: empty where it is no field at all."""
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


async def _rerank(request: Request) -> BodyTransform | None:
    """Make a request for reranking one that vLLM takes: documents that are objects with a text become that text."""
    members = await members_of(request.body)
    last: dict[str, Member] = {member.name: member for member in members}
    drop = {name for name in ("top_n",) if name in last and value_of(request.body, last[name]) is None}
    replace: dict[str, bytes] = {}
    for name in ("query", "documents"):
        if name in last and b"{" in request.body[last[name].value_start : last[name].end]:
            replace[name] = json.dumps(flatten_texts(value_of(request.body, last[name]))).encode()
    if replace or drop:
        request.body = rewrite_json(request.body, members, replace, drop)
    shown = last.get("return_documents")
    return _without_documents if shown is not None and value_of(request.body, shown) is False else None


def flatten_texts(value: object) -> object:
    """Give a text for an object that has nothing but one, and so for each of a list. Raises ApiError 400."""
    if isinstance(value, list):
        values = cast("list[object]", value)
        if any(isinstance(one, list) for one in values):
            raise bad_request("A list of texts must not hold lists.")
        return [flatten_texts(one) for one in values]
    if isinstance(value, dict):
        members = cast("dict[str, object]", value)
        is_text = isinstance(members.get("text"), str) and not members.keys() & {"content", "type"}
        return members["text"] if is_text else members
    return value


def _without_documents(status: int, body: bytes) -> tuple[int, bytes]:
    answer = json.loads(body)
    for result in answer["results"]:
        result.pop("document", None)
    return status, json.dumps(answer).encode()


def model_body(model: ModelCard, created: int, owner: str) -> bytes:
    """Give the answer to `GET /v1/models/{name}`: since when there is the model, and who serves it."""
    return json.dumps(entry_of(model, created, owner)).encode()


def models_body(models: Iterable[ModelCard], created: int, owner: str) -> bytes:
    """Give the answer to `GET /v1/models`."""
    return json.dumps({"object": "list", "data": [entry_of(model, created, owner) for model in models]}).encode()
