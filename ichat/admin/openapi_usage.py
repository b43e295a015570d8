"""The routes of usage in the OpenAPI document."""

from ichat.admin.openapi_parts import json_of, operation_of, query
from ichat.admin.schemas import Schema, object_of
from ichat.observability.usage.queries import COLUMNS
from ichat.observability.usage.report import COUNTED

_NOT_KEPT = "The gateway keeps no usage (`no_usage`): see `[usage]`."
_WHOLE = "Its minute counts as a whole; where only hours are kept, an hour counts by its first minute."
_ABOUT: dict[str, str] = {
    "requests": "Requests to models that have ended, in whatever way.",
    "errors": "Those that were answered with a status of 400 or more; a client that left is none.",
    "input_tokens": "Tokens of prompts, cached ones included.",
    "output_tokens": "Tokens of answers.",
    "cached_tokens": "The prompts' tokens that the engine had in its cache.",
    "estimated_tokens": "Tokens above that were not counted by an engine, but estimated.",
    "busy_s": "The seconds that these requests took, without their time in a queue.",
    "cost": "What the tokens cost, by `[prices]`; null where no model of the row has a price.",
}


def schemas_of_usage() -> dict[str, Schema]:
    """Return the schemas of answers about usage."""
    counts = {name: _count(name) for name in COUNTED}
    names: dict[str, Schema] = {name: {"type": "string"} for name in COLUMNS}
    times = {name: _time(text) for name, text in (("from", "The first moment."), ("to", "The first moment after it."))}
    usage: dict[str, Schema] = {
        **times,
        "by": {"type": "array", "items": {"enum": list(COLUMNS)}},
        "rows": {
            "type": "array",
            "items": object_of({**names, **counts}, "Of the names and times, those of `by`.", required=list(counts)),
        },
        "totals": object_of(counts),
        "storage": {"type": "string", "description": "`ok`, or in a sentence why the disk does not have everything."},
    }
    limit: dict[str, Schema] = {
        "limit": {"type": "string", "description": "Its key in the configuration."},
        "allowed": {"type": "number"},
        "used": {"type": "number"},
        "left": {"type": "number"},
        "begins_anew": _time("When the day or the month ends."),
    }
    own: dict[str, Schema] = {
        "key": {"type": "string", "description": "The name of the key."},
        "limits": {"type": "array", "items": object_of(limit), "description": "The key's, for a day and a month."},
    }
    return {"Usage": object_of(usage), "OwnUsage": object_of({**usage, **own})}


def paths_of_usage() -> dict[str, Schema]:
    """Return the routes of usage."""
    failures = {"400": "A parameter is wrong, or the answer would be too long.", "409": _NOT_KEPT}
    text: Schema = {"type": "string"}
    units = "by one unit of time: a minute is known for `usage.minute_days`, and then its hour"
    common: list[Schema] = [
        query("from", text, f"ISO 8601 (UTC), or seconds since 1970; left out: the beginning of this month. {_WHOLE}"),
        query("to", text, f"The same; left out: now. {_WHOLE}"),
        query("model", text, "Only of the model of this name."),
        query("format", {"enum": ["json", "csv"], "default": "json"}, "How the rows are written."),
    ]
    every = f"Names of {', '.join(COLUMNS)}, with commas: at most {units}. Left out: key,model."
    own = f"As for all usage, without the key: at most {units}. Left out: model."
    return {
        "/v1/admin/usage": {
            "get": operation_of(
                "cluster",
                "get_usage",
                "Who used what, and what it cost",
                _answer("Usage"),
                parameters=[query("by", text, every), query("key", text, "Only of the key of this name."), *common],
                failures=failures,
            )
        },
        "/v1/usage": {
            "get": operation_of(
                "models",
                "get_own_usage",
                "What the caller's key has used, and may still",
                _answer("OwnUsage"),
                parameters=[query("by", text, own), *common],
                failures=failures,
            )
        },
    }


def _answer(name: str) -> Schema:
    answer = json_of(name)
    answer["content"]["text/csv"] = {"schema": {"type": "string"}}
    return answer


def _count(name: str) -> Schema:
    kind: object = {"cost": ["number", "null"], "busy_s": "number"}.get(name, "integer")
    return {"type": kind, "minimum": 0, "description": _ABOUT[name]}


def _time(text: str) -> Schema:
    return {"type": "string", "format": "date-time", "description": text}
