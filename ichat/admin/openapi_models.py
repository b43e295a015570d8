"""The routes of models in the OpenAPI document, in short: their bodies are OpenAI's."""

import re
from typing import Any

from ichat.admin.operations import FAILED, MODEL_FAILURES, MODEL_KEYS, failure, header, path_parameters, shown_path
from ichat.admin.schemas import Schema
from ichat.http import sse

_STREAMED = "Where the request says `stream: true`: events, the last of them `data: [DONE]`."
_BY_MODEL = {
    "chat/completions": "Chat",
    "completions": "Completion of a text",
    "embeddings": "Embeddings",
    "rerank": "Documents sorted by relevance, as Cohere and Jina do it",
    "score": "Scores of pairs of texts",
    "classify": "Classification",
    "pooling": "What a pooling model makes of a text",
    "responses": "OpenAI's Responses",
    "messages": "Anthropic's Messages",
    "tokenize": "Tokens of a text or a chat",
    "detokenize": "Text of tokens",
}
_OF_RESPONSES = {
    "GET /v1/responses/<response_id>": "Read a response again",
    "DELETE /v1/responses/<response_id>": "Forget a response",
    "POST /v1/responses/<response_id>/cancel": "Stop a response that is made in the background",
}
_BY_MODEL_IN_A_FORM = {
    "audio/transcriptions": "Transcription of speech",
    "audio/translations": "Translation of speech",
}
_BODIES_OF_MODELS = {"Model": "application/json", "ModelForm": "multipart/form-data"}
_HEADERS: dict[str, Schema] = {
    "x-ichat-worker": {
        "description": "Who served the request (`server_settings.worker_header`).",
        "schema": {"type": "string"},
    },
    "x-ichat-overhead-ms": {
        "description": "Milliseconds that the gateway took for itself (`server_settings.overhead_header`).",
        "schema": {"type": "number"},
    },
    "x-ichat-prefix": {
        "description": "The bytes of the prompt's beginning that the worker was expected to have in its cache, and all"
        " of them: `6144/8190` (`server_settings.prefix_header`, where a model has several endpoints).",
        "schema": {"type": "string"},
    },
    "x-ichat-dropped": {
        "description": "What the worker did not get of the request, as it steers engines (`engine_control` of a key).",
        "schema": {"type": "string"},
    },
    "x-ichat-model": {
        "description": "The model that answered a request for a name of `[[models]]`; percent-encoded if not ASCII.",
        "schema": {"type": "string"},
    },
    "x-ichat-attempts": {
        "description": "How many endpoints were asked for such a request, and models that had none to ask.",
        "schema": {"type": "integer", "minimum": 1},
    },
    "x-ichat-error": {
        "description": "Who made the error; not there where it is an external route's own.",
        "schema": {"enum": ["gateway", "worker"]},
    },
    "retry-after": {
        "description": "Seconds after which it is worth trying again, where that is known.",
        "schema": {"type": "integer"},
    },
}
_OF_ANSWERS = (
    "x-ichat-worker", "x-ichat-overhead-ms", "x-ichat-prefix", "x-ichat-dropped", "x-ichat-model", "x-ichat-attempts",
)  # fmt: skip
"""Headers of models' answers."""


def paths_of_models() -> dict[str, Schema]:
    """Return the routes of models by their paths."""
    paths: dict[str, Schema] = {}
    for name, summary in (_BY_MODEL | _BY_MODEL_IN_A_FORM).items():
        is_form = name in _BY_MODEL_IN_A_FORM
        for path in (f"/v1/{name}", f"/{name}", *(["/v2/rerank"] if name == "rerank" else [])):
            paths[path] = {"post": _by_model(path, summary, is_form=is_form)}
    for route, summary in _OF_RESPONSES.items():
        method, _, path = route.partition(" ")
        item = paths.setdefault(shown_path(path), path_parameters(path, {}))
        item[method.lower()] = _of_response(f"{method.lower()}{shown_path(path)}", summary)
    return paths


def _of_response(operation: str, summary: str) -> Schema:
    """Describe a route of an earlier response: the worker that keeps it answers."""
    statuses = {status: {"$ref": f"#/components/responses/Model{status}"} for status in ("200", "401", "429", "503")}
    gone = failure("No worker keeps this response, or its worker has ended (`response_not_found`).")
    return {
        "tags": ["models"],
        "operationId": re.sub(r"\W+", "_", operation).rstrip("_"),
        "summary": summary,
        "responses": {**statuses, "404": gone} | FAILED,
    }


def _by_model(path: str, summary: str, *, is_form: bool) -> Schema:
    """Describe a route of models: they differ only in their bodies, which the gateway does not read."""
    statuses = ["200", *MODEL_FAILURES]
    return {
        "tags": ["models"],
        "operationId": f"post{path}".replace("/", "_"),
        "summary": summary,
        "requestBody": {"$ref": f"#/components/requestBodies/{'ModelForm' if is_form else 'Model'}"},
        "responses": {status: {"$ref": f"#/components/responses/Model{status}"} for status in statuses} | FAILED,
    }


def _model_body(kind: str) -> Schema:
    return {
        "required": True,
        "description": "As OpenAI's; of it the gateway reads `model`.",
        "content": {kind: {"schema": MODEL_KEYS}},
    }


def _model_answer() -> Schema:
    return {
        "description": "The answer of the model's worker or external route, unchanged.",
        "content": {"application/json": {}, sse.CONTENT_TYPE: {"schema": {"type": "string", "description": _STREAMED}}},
        "headers": {name: header(name) for name in _OF_ANSWERS},
    }


def components_of_models() -> dict[str, Any]:
    """Return the request bodies, answers and headers to which the routes of models refer, by kind and name."""
    return {
        "requestBodies": {name: _model_body(kind) for name, kind in _BODIES_OF_MODELS.items()},
        "responses": {
            "Model200": _model_answer(),
            **{f"Model{status}": failure(text) for status, text in MODEL_FAILURES.items()},
        },
        "headers": _HEADERS,
    }
