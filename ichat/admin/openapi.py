"""The routes of the gateway as an OpenAPI 3.1 document: `GET /openapi.json`.

The control plane is described in full, beside its handlers. The routes of models are described in short:
their bodies are OpenAI's. `security/rules.py` says which key a route needs.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import ichat
from ichat.admin import cluster_routes, key_routes, open_routes, usage_routes, worker_routes
from ichat.admin.operations import FAILED, MODEL_FAILURES, MODEL_KEYS, failure, header, path_parameters, shown_path
from ichat.admin.schemas import Schema, schemas
from ichat.http import sse
from ichat.security.rules import ROUTES, Rule

_ABOUT = """\
One entry for many models, and the workers behind it. A request goes to where its `model` is served, and so does any \
`POST /v1/...` that is not listed here. Every answer has an `x-request-id`, the request's own where it brought one. \
Times are in seconds, sizes in bytes, unless a name says otherwise."""
_TAGS = {
    "models": "OpenAI's routes, relayed byte for byte to a worker or an external route that has the model.",
    "workers": "What workers tell the gateway, and what operators see and ask of them.",
    "keys": "Clients' keys: those of the configuration, and those that are made over the API.",
    "cluster": "The gateway, its machine and its configuration.",
}
_KEYS: Mapping[str, str] = {
    "client": "One of `[[security.keys]]`; anything, or nothing, where there are none.",
    "admin": "The key of `security.admin_key_env` or `admin_key_hash`. Without one: the secret of the gateway's own"
    " user; where no key of any kind is configured, nothing is needed to read.",
    "worker": "The token of `security.join_token_env`. Without one: the secret of the gateway's own user.",
}
_KEYS_FOR: Mapping[Rule, Sequence[str]] = {
    "open": (),
    "data": ("client",),
    "models": ("client", "admin"),
    "metrics": ("admin",),
    "read": ("admin",),
    "write": ("admin",),
    "join": ("worker",),
}
HANDLED = (worker_routes.operations, key_routes.operations, cluster_routes.operations, usage_routes.operations)
"""Served by the application; the front door answers open routes, and relays the routes of models."""

# The routes of models, in short: their bodies are OpenAI's.

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


def document() -> dict[str, Any]:
    """Make the document, as JSON can hold it."""
    rules: Mapping[tuple[str, str], Rule] = {
        (method.lower(), shown_path(path)): rule for (method, path), rule in ROUTES.items()
    }
    paths: dict[str, Schema] = {}
    for part in (_paths_of_models(), *(one.paths for one in HANDLED), open_routes.paths()):
        for path, item in part.items():
            paths[path] = {
                name: one if name == "parameters" else {**one, "security": _keys_for(rules.get((name, path), "data"))}
                for name, one in item.items()
            }
    of_models = _components_of_models()
    return {
        "openapi": "3.1.0",
        "info": {"title": "iChat", "version": ichat.__version__, "description": _ABOUT},
        "tags": [{"name": name, "description": text} for name, text in _TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": schemas() | key_routes.schemas() | cluster_routes.schemas() | usage_routes.schemas(),
            **of_models,
            "responses": {
                "Failed": failure("Anything that goes wrong, whose `code` says what."),
                **of_models["responses"],
            },
            "securitySchemes": {
                name: {"type": "http", "scheme": "bearer", "description": text} for name, text in _KEYS.items()
            },
        },
    }


def _keys_for(rule: Rule) -> list[Schema]:
    return [{}, *({key: []} for key in _KEYS_FOR[rule])]


def _paths_of_models() -> dict[str, Schema]:
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


def _components_of_models() -> dict[str, Any]:
    """Return the request bodies, answers and headers to which the routes of models refer, by kind and name."""
    return {
        "requestBodies": {name: _model_body(kind) for name, kind in _BODIES_OF_MODELS.items()},
        "responses": {
            "Model200": _model_answer(),
            **{f"Model{status}": failure(text) for status, text in MODEL_FAILURES.items()},
        },
        "headers": _HEADERS,
    }
