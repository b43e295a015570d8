"""What SGLang's requests and responses must become.

SGLang takes any model's name, knows a request by `rid` in its body, loads an adapter only where a field of its own or a
name with a colon says so, reranks in a form of its own, and has another thing under the name of score.
"""

import functools
import itertools
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

from ichat.engines.adapter import (
    GENERATES,
    HEARS,
    RESPONSES_PATH,
    BodyTransform,
    ProtocolAdapter,
    flatten_texts,
    openai_error,
    sync_headers,
    with_members,
)
from ichat.engines.sglang.memory import Memory
from ichat.errors import ApiError, bad_request
from ichat.http.heads import Headers, form_type
from ichat.http.json_body import NAME_BYTES_MAX, PARSED_BYTES_MAX, Body, members_of, object_of, rewrite_json, value_of
from ichat.http.multipart import model_in_form
from ichat.http.request import Request

PATHS = {
    b"/rerank": b"/v1/rerank",
    b"/v2/rerank": b"/v1/rerank",
    b"/score": b"/v1/score",
    b"/v1/load_lora_adapter": b"/load_lora_adapter",
    b"/v1/unload_lora_adapter": b"/unload_lora_adapter",
}
"""Routes that SGLang has under another path."""

_CHAT, _COMPLETIONS, _EMBEDDINGS = b"/v1/chat/completions", b"/v1/completions", b"/v1/embeddings"
_CLASSIFY, _MESSAGES, _RERANK, _SCORE = b"/v1/classify", b"/v1/messages", b"/v1/rerank", b"/v1/score"
_RESPONSES, _TRANSCRIPTIONS = RESPONSES_PATH, b"/v1/audio/transcriptions"
_WITH_RID = {_CHAT: "chatcmpl", b"/invocations": "chatcmpl", _COMPLETIONS: "cmpl", _EMBEDDINGS: "embd"} | {
    _CLASSIFY: "classify"
}
"""Routes that take a request's id, and what vLLM puts before it there."""
_SINGLE = frozenset((_EMBEDDINGS, _CLASSIFY))
"""Those of them that fail with one id for a list of inputs."""
_PREFIXES = tuple(f"{prefix}-" for prefix in set(_WITH_RID.values()))
_NATIVE = frozenset((b"/generate", b"/encode", b"/classify"))
"""Routes of SGLang's own, which take a request's id as the client gives it."""
_LORA_PATH = frozenset((_CHAT, b"/invocations", _COMPLETIONS, _EMBEDDINGS))
"""Routes that take an adapter in a field of its own."""
_ANY_NAME = frozenset((
    b"/tokenize", b"/v1/tokenize", b"/detokenize", b"/v1/detokenize", b"/v1/messages/count_tokens",
))  # fmt: skip
"""Routes for which an adapter makes no difference."""
_WITH_MODEL = frozenset((
    *_WITH_RID, *_ANY_NAME, _MESSAGES, _RERANK, _SCORE, _RESPONSES, _TRANSCRIPTIONS, b"/v1/decisions",
))  # fmt: skip
_NAMED_ALWAYS = frozenset((_MESSAGES, b"/v1/messages/count_tokens"))
"""Routes that want a model to be named, with either engine."""
_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""What vLLM's score request may call its two sides."""
_NO_VECTORS = b"does not appear to be an embedding model"
"""What SGLang says of a model that generates text where it would need vectors."""


class SGLangAdapter(ProtocolAdapter):
    """How SGLang's requests and responses differ from what a worker takes and gives."""

    def __init__(self, names: Callable[[], tuple[Sequence[str], Sequence[str]]]) -> None:
        """`names` gives the names of the model, SGLang's own first, and those of its adapters."""
        super().__init__(PATHS)
        self._names = names
        self._count = itertools.count(1)
        self.memory = Memory(lambda: names()[0][0])
        self.reranks = True
        """Whether the model can be asked to rerank: SGLang ends where it cannot."""
        self.only_reranks = False
        """Whether it is a cross-encoder: SGLang ends where one is asked for a vector and a score at once."""
        self.squashes = False
        """Whether scores are to be brought between 0 and 1, by a sigmoid."""

    async def request(self, request: Request) -> BodyTransform | None:
        """Check the model, name the request and its adapter, and translate; see `Wire.request`."""
        self.check_served(request)
        self.redirect(request)
        rewrite: BodyTransform | None = None
        if request.method == b"POST" and request.path in _WITH_MODEL:
            if form := form_type(request.headers):
                self._named(request.path, await _model_of(request.body, form))
            else:
                rewrite = await self._prepare(request)
        elif request.method == b"POST" and request.path in _NATIVE:
            await self._check_native(request)
        sync_headers(request)
        return rewrite

    def admit(self, request: Request, under_way: Collection[Request]) -> None:
        """Refuse what would end SGLang's scheduler; see `Wire.admit`."""
        self.memory.admit(request, under_way)

    def tell_routes(self, *, generates: bool) -> None:
        """Note what the model does: SGLang has all routes for all models, and fails in many ways."""
        if generates:
            served, lacking = GENERATES, ("embeddings", "classify", "pooling", "audio/translations")
        elif self.only_reranks:
            served, lacking = ("rerank", "score"), (*GENERATES, "embeddings", "classify", "pooling", *HEARS)
        else:
            served, lacking = ("embeddings",), (*GENERATES, "rerank", "pooling", *HEARS)
        self.serve_only(self._names()[0][0], served, lacking)

    def response(
        self, request: Request, status: int, headers: Headers, asked: BodyTransform | None
    ) -> BodyTransform | None:
        """See `Wire.response`. A model that generates text may score and rerank, or not: only SGLang knows."""
        if status == 400 and request.path in (_RERANK, _SCORE):
            is_score = request.path == _SCORE or (isinstance(asked, functools.partial) and asked.func is _scored)
            return functools.partial(self._refused, "score" if is_score else "rerank")
        return super().response(request, status, headers, asked)

    def _refused(self, name: str, status: int, body: bytes) -> tuple[int, bytes]:
        return (status, self.unsupported(name).body()) if _NO_VECTORS in body else openai_error(status, body)

    async def _prepare(self, request: Request) -> BodyTransform | None:
        path = request.path
        given = await _read(request.body, whole=path in (_RERANK, _SCORE))
        if not self.reranks and (path == _RERANK or (path == _SCORE and given.get("label_token_ids") is None)):
            raise bad_request("This model gives vectors, not scores: it cannot rerank.", param="model")
        if self.only_reranks and path in _SINGLE:
            raise bad_request("This model gives scores, not vectors: it can only rerank.", param="model")
        model = given.get("model")
        if model is not None and not isinstance(model, str):
            return None
        name, adapter = self._named(path, model)
        if given.get("lora_path") and given["lora_path"] != adapter:  # else a key for one model could have another
            raise bad_request("An adapter is asked for by its name, in `model`.", param="lora_path")
        if path == _RERANK:
            return _translate_rerank(request, given, name, squashes=self.squashes)
        if path == _SCORE and (pair := next((pair for pair in _PAIRS if set(pair) <= given.keys()), None)):
            return _translate_score(request, given, name, pair, squashes=self.squashes)
        new: dict[str, str] = {}
        if adapter and "lora_path" not in given and ":" not in adapter:
            new["lora_path"] = adapter
        elif adapter and not given.get("lora_path"):
            name = f"{self._names()[0][0]}:{adapter}"
        prefix = _WITH_RID.get(path)
        if prefix and (path not in _SINGLE or isinstance(given.get("input"), str)):
            new["rid"] = f"{prefix}-{next(self._count):08x}-{request.id.decode()}"
        if path == _RESPONSES:
            self.check_background(is_asked=given.get("background") is True)
            if response_id := self.new_response_id():
                new["request_id"] = response_id
        if name != model and (path not in _NAMED_ALWAYS or "model" in given):
            new["model"] = name
        old = {member: json.dumps(value).encode() for member, value in new.items() if member in given}
        new = {member: value for member, value in new.items() if member not in given}
        drop = ["rid"] if prefix and "rid" in given and "rid" not in old else []
        if old or drop:
            request.body = rewrite_json(request.body, await members_of(request.body), old, drop)
        if new:
            request.body = with_members(request.body, new)
        return functools.partial(_naming, model=name) if path == _EMBEDDINGS else None

    async def _check_native(self, request: Request) -> None:
        """Refuse an id that others' begin with: SGLang aborts every request whose id begins with one that is left."""
        given = await _read(request.body, whole=False)
        rid = given.get("rid")
        rids = cast("list[object]", rid) if isinstance(rid, list) else [rid]
        texts = [rid for rid in rids if isinstance(rid, str)]
        if any(prefix.startswith(text) or text.startswith(prefix) for text in texts for prefix in _PREFIXES):
            raise bad_request("`rid` must not begin like the ids that the worker gives.", param="rid")
        if self.only_reranks:
            raise bad_request("This model gives scores, not vectors: it can only rerank.", param="model")

    def _named(self, path: bytes, model: str | None) -> tuple[str, str | None]:
        """Give the name by which SGLang shall know the model, and the adapter that it shall use.

        The response repeats the name. Raises ApiError 404 for one that is not known, 400 for an adapter that SGLang
        would leave out.
        """
        names, adapters = self._names()
        own = names[0]
        if not model:
            return own, None
        if model in names:
            return (own if ":" in model or path == _RESPONSES else model), None
        adapter = next((name for name in adapters if model in (name, f"{own}:{name}")), None)
        if adapter is None:
            raise _no_model(model, names)
        if path in _ANY_NAME or (path in _LORA_PATH and model == adapter):
            return model, (adapter if path in _LORA_PATH else None)
        if path in _LORA_PATH or path == _MESSAGES:
            return f"{own}:{adapter}", None
        raise bad_request(f"The adapter `{adapter}` cannot be used on {path.decode()}.", param="model")


def _no_model(model: str, names: Sequence[str]) -> ApiError:
    """404, in the words that vLLM has for it."""
    message = f"The model `{model}` does not exist. Valid aliases: {', '.join(names)}."
    return ApiError(404, "model_not_found", message, param="model")


async def _model_of(body: Body, form: bytes) -> str | None:
    """Give the model that a form names; None where SGLang shall see for itself what is wrong with it."""
    try:
        return await model_in_form(body, form)
    except ApiError:
        return None


async def _read(body: Body, *, whole: bool) -> Mapping[str, object]:
    """Give the members of a JSON object. Raises ApiError 400.

    Of a large one, long values are given as what they begin with, unless the whole is asked for.
    """
    if len(body) <= PARSED_BYTES_MAX:
        return object_of(body)
    return {
        member.name: value_of(body, member)
        if whole or member.end - member.value_start <= NAME_BYTES_MAX
        else _beginning(body[member.value_start : member.value_start + NAME_BYTES_MAX])
        for member in await members_of(body)
    }


def _beginning(value: Body) -> object:
    """Give something of the same kind as a value of which only the beginning is at hand."""
    return value[1:].decode("utf-8", "replace") if value.startswith(b'"') else [value]


def _content(value: object) -> object:
    """Give a query or a document as SGLang takes it: a text, or a list of parts."""
    value = flatten_texts(value)
    if isinstance(value, dict) and "content" in value:
        return cast("dict[str, object]", value)["content"]
    return cast("object", value)


def _listed(value: object) -> list[object]:
    return [_content(one) for one in (cast("list[object]", value) if isinstance(value, list) else [value])]


def _translate_rerank(
    request: Request, given: Mapping[str, object], model: str, *, squashes: bool
) -> BodyTransform | None:
    """Make a request for reranking SGLang's own; it is asked for every document, by its number."""
    if "query" not in given or "documents" not in given:
        return None
    documents = _listed(given["documents"])
    shown = given.get("return_documents", True)
    top_n = given.get("top_n") or 0
    asked: dict[str, object] = {"query": _content(given["query"]), "documents": documents, "return_documents": False}
    if not isinstance(shown, bool):
        asked["return_documents"] = shown
    if not isinstance(top_n, int) or top_n < 0:
        asked["top_n"] = top_n
        top_n = 0
    if instruction := given.get("instruct", given.get("instruction")):
        asked["instruct"] = instruction
    request.body = json.dumps(asked).encode()
    return functools.partial(
        _reranked,
        request_id=request.id.decode(),
        model=model,
        documents=documents if shown else None,
        top_n=top_n,
        squashes=squashes,
    )


def _reranked(
    status: int,
    body: bytes,
    *,
    request_id: str,
    model: str,
    documents: Sequence[object] | None,
    top_n: int,
    squashes: bool,
) -> tuple[int, bytes]:
    """Give what vLLM would answer for SGLang's scores."""
    results: list[dict[str, object]] = []
    found = _scores(body, squashes=squashes)
    for one in sorted(found, key=lambda one: -one["score"])[: top_n or None]:
        result: dict[str, object] = {"index": one["index"]}
        if documents is not None:
            document = documents[one["index"]]
            is_text = isinstance(document, str)
            result["document"] = {"text": document if is_text else None, "multi_modal": None if is_text else document}
        results.append({**result, "relevance_score": one["score"]})
    answer = {"id": f"score-{request_id}", "model": model, "usage": _usage(found), "results": results}
    return status, json.dumps(answer).encode()


def _translate_score(
    request: Request, given: Mapping[str, object], model: str, pair: tuple[str, str], *, squashes: bool
) -> BodyTransform | None:
    """Make vLLM's score request one for reranking, which scores one text against others. Raises ApiError 400."""
    left, right = (_listed(given[side]) for side in pair)
    if len(left) != 1:
        raise bad_request(
            f"`{pair[0]}` must be one text here, which each of `{pair[1]}` is scored against.", param=pair[0]
        )
    request.target = _RERANK + request.target[len(request.path) :]
    request.path = _RERANK
    request.body = json.dumps({"query": left[0], "documents": right, "return_documents": False}).encode()
    return functools.partial(_scored, request_id=request.id.decode(), model=model, squashes=squashes)


def _scored(status: int, body: bytes, *, request_id: str, model: str, squashes: bool) -> tuple[int, bytes]:
    found = _scores(body, squashes=squashes)
    data = [
        {"index": one["index"], "object": "score", "score": one["score"]}
        for one in sorted(found, key=lambda one: one["index"])
    ]
    usage = {**_usage(found), "completion_tokens": 0, "prompt_tokens_details": None, "completion_tokens_details": None}
    answer = {
        "id": f"score-{request_id}", "object": "list", "created": int(time.time()), "model": model, "data": data,
        "usage": usage,
    }  # fmt: skip
    return status, json.dumps(answer).encode()


def _scores(body: bytes, *, squashes: bool) -> list[dict[str, Any]]:
    """Give SGLang's scores, one for each document. Raises ValueError where they are not of the form that is known."""
    found: object = json.loads(body)
    scores = cast("list[dict[str, Any]]", found) if isinstance(found, list) else []
    if not scores or not all("index" in one and "score" in one for one in scores):
        raise ValueError(f"SGLang reranks in a form that is not known here: {body[:200]!r}")
    return [{**one, "score": _sigmoid(one["score"])} for one in scores] if squashes else scores


def _naming(status: int, body: bytes, *, model: str) -> tuple[int, bytes]:
    """Put the model's name where SGLang puts its path. The vectors are not parsed for that."""
    before, key, after = body.rpartition(b'"model":')
    if not key:
        return status, body
    text = after.decode().lstrip()
    path, end = json.JSONDecoder().raw_decode(text)
    rest = text[end:].encode()
    return status, before + key + json.dumps(model if isinstance(path, str) else path).encode() + rest


def _sigmoid(score: float) -> float:
    return 0.5 * (1 + math.tanh(score / 2))


def _usage(scores: Sequence[dict[str, Any]]) -> dict[str, object]:
    known = (cast("dict[str, int]", one.get("meta_info") or {}) for one in scores)
    tokens = sum(meta.get("prompt_tokens", 0) for meta in known)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
