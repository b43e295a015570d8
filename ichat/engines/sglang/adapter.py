"""How SGLang's requests and responses are changed.

SGLang accepts any model's name and identifies a request by `rid` in its body. It loads an adapter only if a field of
its own, or a name with a colon, names it. It reranks in a form of its own, and its score route does something else.
"""

import functools
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
    at_once,
    flatten_texts,
    openai_error,
    sync_headers,
    with_members,
)
from ichat.engines.media import check_media
from ichat.engines.sglang.memory import Memory
from ichat.errors import ApiError, bad_request
from ichat.http.heads import Headers, form_type
from ichat.http.json_body import NAME_BYTES_MAX, PARSED_BYTES_MAX, Body, members_of, rewrite_json, value_of
from ichat.http.multipart import model_in_form
from ichat.http.request import Request
from ichat.http.request_body import object_of
from ichat.protocol.responses import is_background

PATHS = {
    b"/rerank": b"/v1/rerank",
    b"/v2/rerank": b"/v1/rerank",
    b"/score": b"/v1/score",
    b"/v1/load_lora_adapter": b"/load_lora_adapter",
    b"/v1/unload_lora_adapter": b"/unload_lora_adapter",
}
"""Routes that have another path in SGLang."""

_CHAT, _COMPLETIONS, _EMBEDDINGS = b"/v1/chat/completions", b"/v1/completions", b"/v1/embeddings"
_CLASSIFY, _MESSAGES, _RERANK, _SCORE = b"/v1/classify", b"/v1/messages", b"/v1/rerank", b"/v1/score"
_RESPONSES, _TRANSCRIPTIONS = RESPONSES_PATH, b"/v1/audio/transcriptions"
_WITH_RID = {_CHAT: "chatcmpl", b"/invocations": "chatcmpl", _COMPLETIONS: "cmpl", _EMBEDDINGS: "embd"} | {
    _CLASSIFY: "classify"
}
"""Routes that accept a request's id, and vLLM's prefix of it there."""
_SINGLE = frozenset((_EMBEDDINGS, _CLASSIFY))
"""Those of them that fail with a single id for a list of inputs."""
_PREFIXES = tuple(f"{prefix}-" for prefix in set(_WITH_RID.values()))
_NATIVE = frozenset((b"/generate", b"/encode", b"/classify"))
"""Routes of SGLang's own, on which the client may set the request's id."""
_LORA_PATH = frozenset((_CHAT, b"/invocations", _COMPLETIONS, _EMBEDDINGS))
"""Routes that accept an adapter in a field of its own."""
_ANY_NAME = frozenset((
    b"/tokenize", b"/v1/tokenize", b"/detokenize", b"/v1/detokenize", b"/v1/messages/count_tokens",
))  # fmt: skip
"""Routes for which an adapter makes no difference."""
_WITH_MODEL = frozenset((
    *_WITH_RID, *_ANY_NAME, _MESSAGES, _RERANK, _SCORE, _RESPONSES, _TRANSCRIPTIONS, b"/v1/decisions",
))  # fmt: skip
_NAMED_ALWAYS = frozenset((_MESSAGES, b"/v1/messages/count_tokens"))
"""Routes on which the client must name a model, with either engine."""
_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""The names of the two sides of vLLM's score request."""
_NO_VECTORS = b"does not appear to be an embedding model"
"""SGLang's words for a model that generates text instead of vectors."""


class SGLangAdapter(ProtocolAdapter):
    """How SGLang's requests and responses differ from a worker's."""

    def __init__(self, names: Callable[[], tuple[Sequence[str], Sequence[str]]]) -> None:
        """`names` returns the names of the model, SGLang's own first, and those of its adapters."""
        super().__init__(PATHS)
        self._names = names
        self.memory = Memory(names)
        self.can_rerank = True
        """Whether the model can rerank; otherwise such a request would end SGLang."""
        self.only_reranks = False
        """Whether it is a cross-encoder: a request for a vector, between others for scores, would end SGLang."""
        self.apply_sigmoid = False
        """Whether scores are mapped to 0..1 by a sigmoid."""

    async def request(self, request: Request) -> BodyTransform | None:
        """Check the model, add the request's id and adapter, and translate; see `ProtocolAdapter.request`."""
        self.check_served(request)
        await check_media(request, self.settings.media_domains, guards_files=True)
        self.redirect(request)
        rewrite: BodyTransform | None = None
        if request.method == b"POST" and request.path in _WITH_MODEL:
            if form := form_type(request.by_name):
                self._named(request.path, await _model_of(request.body, form))
            else:
                rewrite = await self._translate(request)
        elif request.method == b"POST" and request.path in _NATIVE:
            await self._check_native(request)
        sync_headers(request, next(self._count))
        return rewrite

    def prepare(self, request: Request) -> BodyTransform | None:
        """See `ProtocolAdapter.prepare`."""
        return at_once(self.request(request))

    def admit(self, request: Request, under_way: Collection[Request]) -> None:
        """Refuse requests that would end SGLang's scheduler; see `ProtocolAdapter.admit`."""
        self.memory.admit(request, under_way)

    def set_routes(self, *, generates: bool) -> None:
        """Set the routes that the model serves: SGLang has all routes for all models, and fails in many ways."""
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
        """See `ProtocolAdapter.response`. Only SGLang knows whether a model that generates text can rerank."""
        if status == 400 and request.path in (_RERANK, _SCORE):
            is_score = request.path == _SCORE or (isinstance(asked, functools.partial) and asked.func is _scored)
            return functools.partial(self._refused, "score" if is_score else "rerank")
        return super().response(request, status, headers, asked)

    def _refused(self, name: str, status: int, body: bytes) -> tuple[int, bytes]:
        return (status, self.unsupported(name).body()) if _NO_VECTORS in body else openai_error(status, body)

    async def _translate(self, request: Request) -> BodyTransform | None:
        """Turn a request that names a model into SGLang's form; return the transform of its response."""
        path = request.path
        translate = _TRANSLATORS.get(path)
        given = await _read(request.body, whole=translate is not None)
        self._check_pooling(path, given)
        model = given.get("model")
        if model is not None and not isinstance(model, str):
            return None
        name, adapter = self._named(path, model)
        if given.get("lora_path") and given["lora_path"] != adapter:  # else a key for this model could reach others
            raise bad_request("An adapter is asked for by its name, in `model`.", param="lora_path")
        if translate is not None:
            transform = translate(request, given, name, apply_sigmoid=self.apply_sigmoid)
            if transform is not None:
                return transform
        new: dict[str, str] = {}
        if adapter and "lora_path" not in given and ":" not in adapter:
            new["lora_path"] = adapter
        elif adapter and not given.get("lora_path"):
            name = f"{self._names()[0][0]}:{adapter}"
        new |= self._ids(request, given)
        if name != model and (path not in _NAMED_ALWAYS or "model" in given):
            new["model"] = name
        await _set_members(request, given, new, "rid" if path in _WITH_RID else None)
        return functools.partial(_naming, model=name) if path == _EMBEDDINGS else None

    def _check_pooling(self, path: bytes, given: Mapping[str, object]) -> None:
        """Raise ApiError 400 for a vector or a score that would end SGLang."""
        if not self.can_rerank and (path == _RERANK or (path == _SCORE and given.get("label_token_ids") is None)):
            raise bad_request("This model gives vectors, not scores: it cannot rerank.", param="model")
        if self.only_reranks and path in _SINGLE:
            raise bad_request("This model gives scores, not vectors: it can only rerank.", param="model")

    def _ids(self, request: Request, given: Mapping[str, object]) -> dict[str, str]:
        """Return the members by which SGLang knows a request or a response. Raises ApiError 429."""
        path = request.path
        if path == _RESPONSES:
            self.check_background(is_asked=is_background(given.get("background")))
            response_id = self.new_response_id(given.get("model"))
            return {"request_id": response_id} if response_id else {}
        if path not in _WITH_RID or (path in _SINGLE and not isinstance(given.get("input"), str)):
            return {}
        return {"rid": f"{_WITH_RID[path]}-{next(self._count):08x}-{request.id.decode()}"}

    async def _check_native(self, request: Request) -> None:
        """Refuse an id that the worker's ids begin with: SGLang would abort their requests with it."""
        given = await _read(request.body, whole=False)
        rid = given.get("rid")
        rids = cast("list[object]", rid) if isinstance(rid, list) else [rid]
        texts = [rid for rid in rids if isinstance(rid, str)]
        if any(prefix.startswith(text) or text.startswith(prefix) for text in texts for prefix in _PREFIXES):
            raise bad_request("`rid` must not begin like the ids that the worker gives.", param="rid")
        if self.only_reranks:
            raise bad_request("This model gives scores, not vectors: it can only rerank.", param="model")

    def _named(self, path: bytes, model: str | None) -> tuple[str, str | None]:
        """Return the model's name for SGLang, which the response repeats, and the adapter to use.

        Raises ApiError 404 for an unknown name, 400 for an adapter that SGLang would ignore.
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
    """Return the error for an unknown model, in vLLM's words."""
    message = f"The model `{model}` does not exist. Valid aliases: {', '.join(names)}."
    return ApiError(404, "model_not_found", message, param="model")


async def _model_of(body: Body, form: bytes) -> str | None:
    """Return the model that a form names; None for a wrong form, which SGLang will refuse."""
    try:
        return await model_in_form(body, form)
    except ApiError:
        return None


async def _read(body: Body, *, whole: bool) -> Mapping[str, object]:
    """Return the members of a JSON object. Raises ApiError 400.

    Unless it is read as a `whole`, long values of a large object are replaced by their beginnings.
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
    """Return something of the same type as the value that begins so."""
    return value[1:].decode("utf-8", "replace") if value.startswith(b'"') else [value]


def _content(value: object) -> object:
    """Return a query or a document in SGLang's form: a text, or a list of parts."""
    value = flatten_texts(value)
    if isinstance(value, dict) and "content" in value:
        return cast("dict[str, object]", value)["content"]
    return cast("object", value)


def _listed(value: object) -> list[object]:
    return [_content(one) for one in (cast("list[object]", value) if isinstance(value, list) else [value])]


def _translate_rerank(
    request: Request, given: Mapping[str, object], model: str, *, apply_sigmoid: bool
) -> BodyTransform | None:
    """Turn a rerank request into SGLang's form, which asks for the scores of all documents."""
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
        apply_sigmoid=apply_sigmoid,
    )


async def _set_members(request: Request, given: Mapping[str, object], new: Mapping[str, str], own: str | None) -> None:
    """Set members of a request's JSON object, and remove the client's `own`, which only the worker may set."""
    replaced = {name: json.dumps(value).encode() for name, value in new.items() if name in given}
    dropped = [own] if own is not None and own in given and own not in new else []
    if replaced or dropped:
        request.body = rewrite_json(request.body, await members_of(request.body), replaced, dropped)
    if added := {name: value for name, value in new.items() if name not in given}:
        request.body = with_members(request.body, added)


def _reranked(
    status: int,
    body: bytes,
    *,
    request_id: str,
    model: str,
    documents: Sequence[object] | None,
    top_n: int,
    apply_sigmoid: bool,
) -> tuple[int, bytes]:
    """Return vLLM's answer with SGLang's scores."""
    results: list[dict[str, object]] = []
    found = _scores(body, apply_sigmoid=apply_sigmoid)
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
    request: Request, given: Mapping[str, object], model: str, *, apply_sigmoid: bool
) -> BodyTransform | None:
    """Turn vLLM's score request into a rerank request of a text against others. Raises ApiError 400."""
    pair = next((pair for pair in _PAIRS if set(pair) <= given.keys()), None)
    if pair is None:
        return None
    left, right = (_listed(given[side]) for side in pair)
    if len(left) != 1:
        raise bad_request(
            f"`{pair[0]}` must be one text here, which each of `{pair[1]}` is scored against.", param=pair[0]
        )
    request.target = _RERANK + request.target[len(request.path) :]
    request.path = _RERANK
    request.body = json.dumps({"query": left[0], "documents": right, "return_documents": False}).encode()
    return functools.partial(_scored, request_id=request.id.decode(), model=model, apply_sigmoid=apply_sigmoid)


_TRANSLATORS = {_RERANK: _translate_rerank, _SCORE: _translate_score}
"""How requests are turned into SGLang's form on routes that differ by more than a few members."""


def _scored(status: int, body: bytes, *, request_id: str, model: str, apply_sigmoid: bool) -> tuple[int, bytes]:
    found = _scores(body, apply_sigmoid=apply_sigmoid)
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


def _scores(body: bytes, *, apply_sigmoid: bool) -> list[dict[str, Any]]:
    """Return SGLang's score of each document. Raises ValueError for an unknown form."""
    found: object = json.loads(body)
    scores = cast("list[dict[str, Any]]", found) if isinstance(found, list) else []
    if not scores or not all("index" in one and "score" in one for one in scores):
        raise ValueError(f"SGLang reranks in a form that is not known here: {body[:200]!r}")
    return [{**one, "score": _sigmoid(one["score"])} for one in scores] if apply_sigmoid else scores


def _naming(status: int, body: bytes, *, model: str) -> tuple[int, bytes]:
    """Replace the model's path by its name, without parsing the vectors."""
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
