"""The routes of the gateway as an OpenAPI 3.1 document: `GET /openapi.json`.

The control plane is described in full, beside its handlers. The routes of models are described in short:
their bodies are OpenAI's. `security/rules.py` says which key a route needs. Other parts are in `openapi.toml`.
"""

import re
from collections.abc import Mapping
from typing import Any

import ichat
from ichat.admin import cluster_routes, key_routes, log_routes, open_routes, order_routes, usage_routes, worker_routes
from ichat.admin.operations import FAILED, MODEL_FAILURES, MODEL_KEYS, failure, header, path_parameters, shown_path
from ichat.admin.schemas import PARTS, Schema, schemas
from ichat.http import sse
from ichat.security.rules import ROUTES, Rule

HANDLED = tuple(
    one.operations for one in (worker_routes, log_routes, order_routes, key_routes, cluster_routes, usage_routes)
)
"""Served by the application; the front door answers open routes, and relays the routes of models."""


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
        "info": {"title": "iChat", "version": ichat.__version__, "description": PARTS["about"]},
        "tags": [{"name": name, "description": text} for name, text in PARTS["tags"].items()],
        "paths": paths,
        "components": {
            "schemas": schemas() | _schemas_of_routes(),
            **of_models,
            "responses": {
                "Failed": failure("Any error; its `code` says which."),
                **of_models["responses"],
            },
            "securitySchemes": {
                name: {"type": "http", "scheme": "bearer", "description": text} for name, text in PARTS["keys"].items()
            },
        },
    }


def _schemas_of_routes() -> dict[str, Schema]:
    return key_routes.schemas() | order_routes.schemas() | cluster_routes.schemas() | usage_routes.schemas()


def _keys_for(rule: Rule) -> list[Schema]:
    return [{}, *({key: []} for key in PARTS["keys_for"][rule])]


def _paths_of_models() -> dict[str, Schema]:
    """Return the routes of models by their paths."""
    paths: dict[str, Schema] = {}
    models = PARTS["models"]
    for name, summary in (models["of_json"] | models["of_form"]).items():
        is_form = name in models["of_form"]
        for path in (f"/v1/{name}", f"/{name}", *(["/v2/rerank"] if name == "rerank" else [])):
            paths[path] = {"post": _by_model(path, summary, is_form=is_form)}
    for route, summary in models["of_responses"].items():
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


def _model_answer() -> Schema:
    return {
        "description": "The answer of the model's worker or external route, unchanged.",
        "content": {"application/json": {}, sse.CONTENT_TYPE: {"schema": PARTS["models"]["streamed"]}},
        "headers": {name: header(name) for name in PARTS["models"]["headers"]},
    }


def _components_of_models() -> dict[str, Any]:
    """Return the request bodies, answers and headers to which the routes of models refer, by kind and name."""
    return {
        "requestBodies": {
            name: {
                "required": True,
                "description": "As OpenAI's; of it the gateway reads `model`.",
                "content": {kind: {"schema": MODEL_KEYS}},
            }
            for name, kind in PARTS["models"]["bodies"].items()
        },
        "responses": {
            "Model200": _model_answer(),
            **{f"Model{status}": failure(text) for status, text in MODEL_FAILURES.items()},
        },
        "headers": PARTS["headers"],
    }
