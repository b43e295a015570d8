"""The routes of the gateway as an OpenAPI 3.1 document: `GET /openapi.json`.

The control plane is described in full, beside its handlers. The routes of models are described in short:
their bodies are OpenAI's. `security/rules.py` says which key a route needs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import ichat
from ichat.admin import cluster_routes, key_routes, open_routes, usage_routes, worker_routes
from ichat.admin.openapi_models import components_of_models, paths_of_models
from ichat.admin.operations import failure, shown_path
from ichat.admin.schemas import Schema, schemas
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


def document() -> dict[str, Any]:
    """Make the document, as JSON can hold it."""
    rules: Mapping[tuple[str, str], Rule] = {
        (method.lower(), shown_path(path)): rule for (method, path), rule in ROUTES.items()
    }
    paths: dict[str, Schema] = {}
    for part in (paths_of_models(), *(one.paths for one in HANDLED), open_routes.paths()):
        for path, item in part.items():
            paths[path] = {
                name: one if name == "parameters" else {**one, "security": _keys_for(rules.get((name, path), "data"))}
                for name, one in item.items()
            }
    of_models = components_of_models()
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
