"""The routes of the gateway as an OpenAPI 3.1 document: `GET /openapi.json`.

The control plane is described in full, the routes of models in short: what they take and give is OpenAI's.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import ichat
from ichat.admin.openapi_keys import paths_of_keys, schemas_of_keys
from ichat.admin.openapi_live import paths_of_live, schemas_of_live
from ichat.admin.openapi_models import FAILURES, components_of_models, model_keys, paths_of_models
from ichat.admin.openapi_parts import failure, json_body, json_of, operation_of, query
from ichat.admin.openapi_settings import paths_of_settings
from ichat.admin.openapi_usage import paths_of_usage, schemas_of_usage
from ichat.admin.schemas import Schema, ref, schemas
from ichat.http import sse
from ichat.observability.logs.stream import KEEP_ALIVE_S
from ichat.routing.prefix_chain import PROMPTS
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
_LINES = f"""\
Server-sent events. A plain event is a LogLine, whose number is its id; an event `gap` is a LogGap; a comment comes \
when nothing else has for {KEEP_ALIVE_S:g} s. A stream that is followed goes on with the worker's next start, and ends \
when the gateway forgets the worker or ends itself."""
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
_NOT_ON_DEMAND = "None of its workers is an on-demand worker."
_CHANGES = {
    "load": (
        "Load the model of an on-demand worker, and evict others if they are in the way; answers once it is ready",
        _NOT_ON_DEMAND,
    ),
    "unload": (
        "End the process of a model's on-demand worker; answers when nothing of it is left",
        _NOT_ON_DEMAND,
    ),
    "sleep": (
        "Have the engine of a model's on-demand worker give its memory back, once it has no requests",
        f"{_NOT_ON_DEMAND[:-1]}, or it is not loaded, or its engine cannot sleep.",
    ),
    "wake": (
        "Wake the on-demand worker of a model; answers once it is ready",
        f"{_NOT_ON_DEMAND[:-1]}, or none of them is asleep.",
    ),
}
"""What can be done with models that are loaded on demand: in a sentence, and what a conflict means."""
_NOT_CHANGED = "It failed (`model_not_ready`), or the gateway is about to end (`draining`); the message has the cause."
_NO_WORKER = {"404": "There is no such worker."}
_ENDING = {"503": "The gateway is about to end (`draining`)."}


def document() -> dict[str, Any]:
    """Make the document, as JSON can hold it; a new one each time."""
    rules: dict[tuple[str, str], Rule] = {
        (method.lower(), re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", path)): rule for (method, path), rule in ROUTES.items()
    }
    paths = {
        **paths_of_models(),
        **_from_workers(),
        **_of_workers(),
        **paths_of_keys(),
        **_of_the_cluster(),
        **paths_of_usage(),
        **paths_of_live(),
    }
    for path, item in paths.items():
        for method in item.keys() - {"parameters"}:
            keys = _KEYS_FOR[rules.get((method, path), "data")]
            item[method]["security"] = [{}, *({key: []} for key in keys)]
    of_models = components_of_models()
    return {
        "openapi": "3.1.0",
        "info": {"title": "iChat", "version": ichat.__version__, "description": _ABOUT},
        "tags": [{"name": name, "description": text} for name, text in _TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": schemas() | schemas_of_keys() | schemas_of_usage() | schemas_of_live(),
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


def _from_workers() -> dict[str, Schema]:
    paths: dict[str, Schema] = {
        path: {
            "post": operation_of(
                "workers",
                operation,
                "Register a worker, or tell of one that is known: both are one",
                json_of("BeatAnswer"),
                body={"application/json": {"schema": {"anyOf": [ref("Beat"), ref("ShortBeat")]}}},
                failures={
                    "400": "It is not a heartbeat.",
                    "404": "The registration of a short one is not known (`registration_not_found`): send it whole.",
                    "429": "There are too many workers already.",
                },
            )
        }
        for path, operation in (("/v1/workers/heartbeat", "post_heartbeat"), ("/register", "register"))
    }
    paths["/v1/workers/prefixes"] = {
        "post": operation_of(
            "workers",
            "post_prefixes",
            "Tell which beginnings of prompts a worker's engine has in its cache, and no longer; first comes `cleared`",
            json_of("PrefixesAnswer"),
            body=json_body("PrefixReport"),
            failures={
                "400": "It is not such a report.",
                "404": "This start of the worker has sent no heartbeat here (`registration_not_found`).",
            },
        )
    }
    return paths


def _of_workers() -> dict[str, Schema]:
    worker_id: Schema = {"name": "worker_id", "in": "path", "required": True, "schema": {"type": "string"}}
    paths: dict[str, Schema] = {}
    drain_s = query(
        "drain_s",
        {"type": "number", "minimum": 0, "maximum": 3600},
        "Seconds that the requests it has may take, at most; left out: `timeouts.drain_s`.",
    )
    managed = "This gateway has not started it (`not_managed`)."
    paths["/v1/admin/workers"] = {
        "get": operation_of(
            "workers",
            "get_workers",
            "All workers, or a page of them",
            json_of("Workers"),
            parameters=_list_parameters(),
            failures={"400": "A parameter is wrong."},
        )
    }
    paths["/v1/admin/workers/{worker_id}"] = {
        "parameters": [worker_id],
        "get": operation_of("workers", "get_worker", "One worker", json_of("Worker"), failures=_NO_WORKER),
        "delete": operation_of(
            "workers",
            "stop_worker",
            "Stop a worker that the gateway started, and forget it; answers when nothing of it is left",
            json_of("Stopped"),
            parameters=[drain_s],
            failures={**_NO_WORKER, "409": managed},
        ),
    }
    paths["/v1/admin/workers/launch"] = {
        "post": operation_of(
            "workers",
            "launch_worker",
            "Start a worker; it is not waited for, and is started again with the next gateway",
            json_of("Launched"),
            status="202",
            body=json_body("Launch"),
            parameters=[
                query("dry_run", {"type": "boolean", "default": False}, "Only say what would keep it from starting.")
            ],
            failures={
                "400": "It cannot be launched so; the message has every reason.",
                "409": "It could not start now: port, GPU, interpreter or model; the message says what to do.",
                **_ENDING,
            },
        )
    }
    paths["/v1/admin/workers/launch"]["post"]["responses"]["200"] = json_of("LaunchCheck")
    for verb, (summary, conflict) in _CHANGES.items():
        paths[f"/v1/admin/models/{verb}"] = {
            "post": operation_of(
                "workers",
                f"{verb}_model",
                summary,
                json_of("ModelChange"),
                body={"application/json": {"schema": model_keys()}},
                parameters=[drain_s] if verb == "unload" else [],
                failures={"404": FAILURES["404"], "409": conflict, "503": _NOT_CHANGED},
            )
        }
    paths["/v1/admin/route"] = {"post": _explain()}
    paths["/v1/logs/stream/{worker_id}"] = {
        "parameters": [worker_id],
        "get": operation_of(
            "workers",
            "get_log",
            "The lines that a worker has written, also of one that has failed",
            {"description": _LINES, "content": {sse.CONTENT_TYPE: {"schema": {"type": "string"}}}},
            parameters=_log_parameters(),
            failures={"400": "A parameter is wrong.", "404": "There are no lines of such a worker, or run."},
        ),
    }
    return paths


def _explain() -> Schema:
    return operation_of(
        "workers",
        "explain_route",
        "Where a request would go now, and why; it goes nowhere, and nothing changes",
        json_of("Route"),
        body={"application/json": {"schema": model_keys()}},
        parameters=[
            query("path", {"enum": [path.decode() for path in PROMPTS]}, "The request's route; left out: by its keys."),
            query("session", {"type": "string"}, "The session that the request names (`routing.session_header`)."),
        ],
        failures={status: FAILURES[status] for status in ("400", "404")},
    )


def _list_parameters() -> list[Schema]:
    text: Schema = {"type": "string"}
    return [
        query("full", {"type": "boolean", "default": False}, "Everything known of each, rather than a summary."),
        query("limit", {"type": "integer", "minimum": 1}, "Workers in the answer, at most; left out: all."),
        query("after", text, "Only workers whose ids come after this one: `last_id` of the page before."),
        query("model", text, "Only workers that serve this model, or will."),
        query("state", ref("State"), "Only workers in this state."),
    ]


def _log_parameters() -> list[Schema]:
    number: Schema = {"type": "integer", "minimum": 0}
    return [
        query("tail", number, "Lines of history, at most; left out: all that are kept."),
        query("follow", {"type": "boolean"}, "Whether to go on with what comes; left out: true, but for `previous`."),
        query("previous", {"type": "boolean", "default": False}, "The run before the newest one; is never followed."),
        {
            "name": "Last-Event-ID",
            "in": "header",
            "schema": number,
            "description": "The last line that is known already; goes before `tail`.",
        },
    ]


def _of_the_console() -> dict[str, Schema]:
    off = {"404": "There is no such file, or `server_settings.console` is false."}
    moved: Schema = {"description": "It is at `/console/`.", "headers": {"location": {"schema": {"type": "string"}}}}
    page: Schema = {"description": "The page.", "content": {"text/html": {"schema": {"type": "string"}}}}
    file: Schema = {"description": "The file.", "content": {"*/*": {"schema": {"type": "string"}}}}
    moves = operation_of("cluster", "get_console", "Leads to the console", moved, status="308", failures=off)
    name: Schema = {"name": "file", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "/console": {"get": moves},
        "/console/": {"get": operation_of("cluster", "get_console_page", "The console, a page", page, failures=off)},
        "/console/{file}": {
            "parameters": [name],
            "get": operation_of("cluster", "get_console_file", "A file of the console", file, failures=off),
        },
    }


def _of_the_cluster() -> dict[str, Schema]:
    workers = query(
        "workers",
        {"type": "boolean", "default": True},
        "Whether the workers' own metrics are there too; where more than `limits.scraped_workers_max` are ready, they"
        " never are.",
    )
    dry_run = query("dry_run", {"type": "boolean", "default": False}, "Only say what would be done.")
    return {
        "/v1/admin/cluster/status": {
            "get": operation_of("cluster", "get_status", "The gateway, its machine, and the load", json_of("Status"))
        },
        "/v1/admin/cluster/version": {
            "get": operation_of("cluster", "get_version", "What the gateway consists of", json_of("Version"))
        },
        **paths_of_settings(),
        "/v1/admin/config/reload": {
            "post": operation_of(
                "cluster",
                "reload",
                "Read the configuration again and take what has changed; workers are not waited for",
                json_of("Reload"),
                parameters=[dry_run],
                failures={
                    "400": "The file is wrong (`bad_configuration`); nothing was changed.",
                    "409": "The gateway was not started from a file (`no_file`).",
                    **_ENDING,
                },
            )
        },
        "/": {
            "get": operation_of(
                "cluster", "get_root", "What answers here; a browser is led to the console instead", json_of("Welcome")
            )
        },
        **_of_the_console(),
        "/health": {"get": operation_of("cluster", "get_health", "Whether the gateway answers", json_of("Health"))},
        "/metrics": {
            "get": operation_of(
                "cluster",
                "get_metrics",
                "Metrics for Prometheus: the gateway's, and those of the ready workers and their engines",
                {"description": "Text.", "content": {"text/plain": {"schema": {"type": "string"}}}},
                parameters=[workers],
            )
        },
        "/openapi.json": {
            "get": operation_of(
                "cluster",
                "get_openapi",
                "This document",
                {"description": "OpenAPI 3.1.", "content": {"application/json": {"schema": {"type": "object"}}}},
            )
        },
    }
