"""How an engine's requests and responses are changed, so that clients see no difference between engines.

Errors get OpenAI's form (`error_translation`). Reranking accepts and returns what Cohere's and Jina's clients know.
In a stream, only error events and the name of a model's thoughts are changed.
"""

import itertools
import json
import re
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from typing import Any, Protocol, cast

import attrs

from ichat.engines.error_translation import anthropic_error, openai_error
from ichat.engines.flags import FlagOutcome
from ichat.engines.media import check_media, media_flag
from ichat.engines.reasoning import RENAMES
from ichat.errors import ApiError, background_full, bad_request, unsupported_by_model
from ichat.http.heads import Headers, is_events
from ichat.http.json_body import Body, Member, members_of, rewrite_json, value_of
from ichat.http.request import Request
from ichat.listeners import Listeners
from ichat.protocol.messages import ModelCard
from ichat.protocol.model_entry import entry_of
from ichat.protocol.responses import is_background, new_response_id
from ichat.protocol.usage import Usage

BodyTransform = Callable[[int, bytes], tuple[int, bytes]]
"""Maps the status and the whole body of a response to others of the same type; an error's body is JSON."""

VLLM_PATHS = {b"/v1/tokenize": b"/tokenize", b"/v1/detokenize": b"/detokenize", b"/v1/classify": b"/classify"}
"""Routes that have another path in vLLM."""
RESPONSES_PATH = b"/v1/responses"
_CHAT_PATH = b"/v1/chat/completions"
RERANK_PATHS = frozenset((b"/rerank", b"/v1/rerank", b"/v2/rerank"))
GENERATES = ("chat/completions", "completions", "responses", "messages")
POOLS = ("embeddings", "rerank", "score", "classify", "pooling")
HEARS = ("audio/transcriptions", "audio/translations")
"""The routes below `/v1` of models that generate text, that return vectors or scores, and that transcribe speech."""
_RESTATED = (b"x-request-id", b"content-length", b"transfer-encoding")
_EMPTY = re.compile(rb"\s*\}")


@attrs.frozen
class AdapterSettings:
    """The settings of requests and responses from the worker's command line."""

    response_tag: str = ""
    """A part of each response's id; see `messages.response_tag`. Empty: the engine makes the ids."""
    responses_max: int = 1000
    """How many responses the engine remembers; 0: none."""
    responses_bytes_max: int = 256 * 1024 * 1024
    """How many bytes the requests of remembered responses may have in all."""
    reasoning_field: str = "engine"
    """The name of a model's thoughts in chats; see `reasoning.FIELDS`."""
    prefix_reports: str = "false"
    """Whether the worker reports which prefixes the engine's cache holds: `auto`, `true` or `false`."""
    events_directory: str = ""
    """Where the engine makes a directory for the socket of its events, if prefixes may be reported."""
    media_domains: frozenset[str] = frozenset()
    """From where requests may have the engine fetch pictures, sounds and videos; see `media`."""


class BoundedResponses(Protocol):
    """The responses that an engine remembers; see `ResponseStore`."""

    def is_full(self) -> bool:
        """Return whether the engine can make no more responses in the background."""
        ...


class ProtocolAdapter:
    """How an engine's requests and responses differ from a worker's. This class is right for vLLM."""

    reports_usage = False
    """Whether the engine notes at a call how many tokens it used (`Call.usage`); set once it serves."""

    def __init__(self, paths: Mapping[bytes, bytes] | None = None) -> None:
        """`paths` are routes that have another path in the engine."""
        self._paths = paths or {}
        self.settings = AdapterSettings()
        """Set by the worker before the engine starts."""
        self.responses: BoundedResponses | None = None
        """The responses that the engine remembers, once `bound_responses` has bounded them."""
        self.late_usage: Listeners[str, Usage] = Listeners()
        """Called on the engine's loop with a ticket and the tokens that its background response used."""
        self._count = itertools.count(1)
        """Numbers the requests, so that the engine's ids of them differ; next() may be called in any thread."""
        self._unserved: dict[bytes, str] = {}
        """Routes that the model cannot serve, each with its name."""
        self._served: tuple[str, Collection[str]] = ("", ())

    @property
    def reports_late_usage(self) -> bool:
        """Whether the engine reports the tokens of background responses, too."""
        return self.responses is not None

    def serve_only(self, model: str, served: Collection[str], lacking: Collection[str]) -> None:
        """Refuse from now on requests for the routes `lacking`, which the model cannot serve; see `GENERATES`."""
        self._served = (model, served)
        for name in lacking:
            for path in (f"/v1/{name}", f"/{name}", *(("/v2/rerank",) if name == "rerank" else ())):
                self._unserved[path.encode()] = name

    def guard_media(self, args: Any) -> list[FlagOutcome]:
        """Have an engine fetch from the allowed domains only, including those in its own arguments, if it can."""
        given = getattr(args, "allowed_media_domains", None)
        self.settings = attrs.evolve(self.settings, media_domains=self.settings.media_domains.union(given or ()))
        if given or not hasattr(args, "allowed_media_domains"):
            return []
        flag = media_flag(self.settings.media_domains)
        args.allowed_media_domains = list(flag.passed[1:])
        return [flag]

    def check_served(self, request: Request) -> None:
        """Raise ApiError 400 if the model cannot serve the request's route."""
        name = self._unserved.get(request.path)
        if name is not None and request.method == b"POST":
            raise self.unsupported(name)

    def unsupported(self, name: str) -> ApiError:
        """Return the error for a route that the model cannot serve, such as `embeddings`."""
        model, served = self._served
        does = ", ".join(f"/v1/{one}" for one in served)
        return unsupported_by_model(
            f"The model `{model}` serves {does}; it does not serve /v1/{name}{_what_would(name, served)}."
        )

    def to_engine(self, path: bytes) -> bytes:
        """Return the engine's path of a route."""
        return self._paths.get(path, path)

    async def request(self, request: Request) -> BodyTransform | None:
        """Change a request before the engine gets it; return the transform of its response if that is a 200.

        Called in Trio, where other tasks may run while a large body is read; `prepare` is for small requests.
        Raises ApiError if the engine must not get the request.
        """
        self.check_served(request)
        await check_media(request, self.settings.media_domains, guards_files=False)
        rewrite = None
        if request.method == b"POST" and request.path in RERANK_PATHS:
            rewrite = await _rerank(request)
        elif request.method == b"POST" and request.path == RESPONSES_PATH:
            await self._name_response(request)
        self.redirect(request)
        sync_headers(request, next(self._count))
        return rewrite

    @property
    def can_prepare(self) -> bool:
        """Whether `prepare` may be called: not if a class replaces `request` alone. Its requests may wait."""
        kind = type(self)
        return kind.request is ProtocolAdapter.request or kind.prepare is not ProtocolAdapter.prepare

    def prepare(self, request: Request) -> BodyTransform | None:
        """Do what `request` does, at once, for a request of at most 64 KiB. Called on the engine's loop.

        Each following request of a connection is prepared so, without Trio. After any exception, Trio reads the
        request again, and calls `request`.
        """
        return at_once(self.request(request))

    async def _name_response(self, request: Request) -> None:
        members = await members_of(request.body)
        given = {member.name: member for member in members}
        background, model = (
            value_of(request.body, given[name]) if name in given else None for name in ("background", "model")
        )
        self.check_background(is_asked=is_background(background))
        response_id = self.new_response_id(model)
        if response_id and "request_id" in given:
            new = {"request_id": json.dumps(response_id).encode()}
            request.body = rewrite_json(request.body, members, new, ())
        elif response_id:
            request.body = with_members(request.body, {"request_id": response_id})

    def check_background(self, *, is_asked: bool) -> None:
        """Raise ApiError 429 if a response is requested in the background and their limit is reached."""
        if is_asked and self.responses is not None and self.responses.is_full():
            raise background_full(self.settings.responses_max)

    def new_response_id(self, model: object = None) -> str:
        """Return the id of a new response of the model that a request names; empty if the engine makes the id."""
        tag = self.settings.response_tag
        return new_response_id(tag, model if isinstance(model, str) else "") if tag else ""

    def admit(self, request: Request, under_way: Collection[Request]) -> None:
        """Raise ApiError if the engine must not get this request beside those that are `under_way`.

        Called after `request` and just before the engine gets it, in the same thread. Calls never overlap.
        """

    def redirect(self, request: Request) -> None:
        """Replace the request's path by the engine's."""
        path = self._paths.get(request.path)
        if path is not None:
            request.target = path + request.target[len(request.path) :]
            request.path = path

    def response(
        self, request: Request, status: int, headers: Headers, asked: BodyTransform | None
    ) -> BodyTransform | None:
        """Return the transform of a response, or None if its bytes are sent unchanged.

        Called once for each response, before its head is sent. A transformed body is gathered first, so streams get
        None. `asked` is what `request` returned.
        """
        if status >= 400:
            return anthropic_error if request.path.startswith(b"/v1/messages") else openai_error
        rename = RENAMES[self.settings.reasoning_field]
        if rename is not None and status == 200 and request.path == _CHAT_PATH and not _is_stream(headers):
            return lambda status, body: (status, rename(body))
        return asked if status == 200 else None

    def edit(self, request: Request) -> Callable[[bytes], bytes] | None:
        """Return the transform of each piece of a stream, or None if they are sent unchanged.

        Called once for each event stream with status 200; each piece is made of whole events.
        """
        return RENAMES[self.settings.reasoning_field] if request.path == _CHAT_PATH else None


def at_once(changing: Coroutine[Any, Any, BodyTransform | None]) -> BodyTransform | None:
    """Return the result of `ProtocolAdapter.request` for a small request. Raises RuntimeError if it waits.

    A body of at most 64 KiB is read without waiting.
    """
    try:
        changing.send(None)
    except StopIteration as done:
        return done.value
    changing.close()
    raise RuntimeError("the adapter waited on the engine's loop")


def _is_stream(headers: Headers) -> bool:
    return any(name == b"content-type" and is_events(value) for name, value in headers)


def with_members(body: Body, new: Mapping[str, str]) -> bytes:
    """Return a JSON object with new members added; all other bytes stay as they are."""
    at = body.index(b"{") + 1
    text = json.dumps(new)[1:-1].encode()
    return b"".join((body[:at], text, b"" if _EMPTY.match(body, at) else b",", body[at:]))


def _what_would(name: str, served: Collection[str]) -> str:
    """Return the routes or models to use instead, as the end of the sentence that the model does not serve this."""
    if name in HEARS:
        return ": models that transcribe speech do"
    if name in GENERATES:
        return ": a model that generates text would, in a worker that was started without `--runner pooling`"
    if any(other in served for other in POOLS):
        return ": it takes a model of another kind"
    return ": a worker that was started with `--runner pooling` would, if the model can do it"


def sync_headers(request: Request, number: int) -> None:
    """Write the request's id, where vLLM reads it, and the length of its body into its headers.

    `number` differs for each request: clients choose ids, and an engine may refuse, or confuse, equal ids.
    """
    headers = [header for header in request.headers if header[0] not in _RESTATED]
    headers.append((b"x-request-id", b"%08x-%b" % (number, request.id)))
    if request.body:
        headers.append((b"content-length", b"%d" % len(request.body)))
    request.replace_headers(headers)


async def _rerank(request: Request) -> BodyTransform | None:
    """Turn a rerank request into vLLM's form: documents that are objects with a text become that text."""
    members = await members_of(request.body)
    last: dict[str, Member] = {member.name: member for member in members}
    shown = last.get("return_documents")
    is_hidden = shown is not None and value_of(request.body, shown) is False
    drop = {name for name in ("top_n",) if name in last and value_of(request.body, last[name]) is None}
    replace: dict[str, bytes] = {}
    for name in ("query", "documents"):
        if name in last and b"{" in request.body[last[name].value_start : last[name].end]:
            replace[name] = json.dumps(flatten_texts(value_of(request.body, last[name]))).encode()
    if replace or drop:
        request.body = rewrite_json(request.body, members, replace, drop)
    return _without_documents if is_hidden else None


def flatten_texts(value: object) -> object:
    """Return the text of an object that has nothing else, also for each member of a list. Raises ApiError 400."""
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
    """Return the answer to `GET /v1/models/{name}`: since when the model exists, and its owner."""
    return json.dumps(entry_of(model, created, owner)).encode()


def models_body(models: Iterable[ModelCard], created: int, owner: str) -> bytes:
    """Return the answer to `GET /v1/models`."""
    return json.dumps({"object": "list", "data": [entry_of(model, created, owner) for model in models]}).encode()
