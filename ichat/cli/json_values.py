"""Values in the gateway's answers. A gateway may be older or newer: anything may be missing, or of another kind."""

from typing import Any, cast

from ichat.protocol.json_text import object_in

Json = dict[str, Any]
parse_object = object_in
"""Read a JSON object; return an empty object for anything else."""


def list_of(value: object) -> list[object]:
    """Return a value that should be a list; for anything else an empty list."""
    return cast("list[object]", value) if isinstance(value, list) else []


def objects_of(value: object) -> list[Json]:
    """Return the objects in a value that should be a list of them."""
    return [cast("Json", item) for item in list_of(value) if isinstance(item, dict)]


def object_of(value: object) -> Json:
    """Return a value that should be an object; for anything else an empty object."""
    return cast("Json", value) if isinstance(value, dict) else {}
