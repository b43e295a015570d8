"""Types as JSON schemas: what has a class is written down once, and its schema cannot fall behind."""

import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

import attrs

Schema = dict[str, Any]
Notes = Mapping[str, str | Schema]
"""Of each key its description, or more that its type does not say."""

_SCALARS: Mapping[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}
COMPONENTS: Mapping[str, str] = {"ModelCard": "Model"}
"""The components whose classes have another name here; clients know the former."""
_TAKEN = "Taken"
"""Put before the names of what requests bring: there, keys may be missing that answers always have."""


def schema_of(kind: Any, prefix: str = "") -> Schema:
    """Write a type as a schema; an attrs class is a reference to the component of its name, after this prefix."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return {}
    if kind in _SCALARS:
        return {"type": _SCALARS[kind]}
    if attrs.has(kind):
        return ref(prefix + COMPONENTS.get(kind.__name__, kind.__name__))
    if origin is Literal:
        return {"type": "string", "enum": list(inner)}
    if origin in (Union, types.UnionType):
        joined = _any_of([schema_of(one, prefix) for one in inner if one is not type(None)])
        return or_null(joined) if type(None) in inner else joined
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": schema_of(inner[1], prefix)}
    if origin in (list, Sequence):
        return {"type": "array", "items": schema_of(inner[0], prefix)}
    raise TypeError(f"{kind} has no schema")


def _any_of(schemas: Sequence[Schema]) -> Schema:
    """Join what may be one or the other; plain types become a list of types, words one list of words."""
    if len(schemas) == 1:
        return schemas[0]
    if all(schema.keys() == {"type"} for schema in schemas):
        return {"type": [schema["type"] for schema in schemas]}
    if all("enum" in schema for schema in schemas):
        return {"type": "string", "enum": [word for schema in schemas for word in schema["enum"]]}
    return {"anyOf": list(schemas)}


def or_null(schema: Schema) -> Schema:
    """Allow null as well."""
    kinds = schema.get("type")
    if kinds is None:
        return {"anyOf": [schema, {"type": "null"}]}
    both = [kinds, "null"] if isinstance(kinds, str) else [kind for kind in kinds if kind != "null"] + ["null"]
    words: Schema = {"enum": [*schema["enum"], None]} if "enum" in schema else {}
    return {**schema, "type": both, **words}


def ref(name: str) -> Schema:
    """Refer to the schema of this name."""
    return {"$ref": f"#/components/schemas/{name}"}


def properties_of(owner: type[Any], notes: Notes, prefix: str = "", without: Collection[str] = ()) -> dict[str, Schema]:
    """Write the fields of an attrs class, each with its note."""
    found = {one.name: schema_of(one.type, prefix) for one in attrs.fields(owner) if one.name not in without}
    return {name: _noted(schema, notes.get(name)) for name, schema in found.items()}


def _noted(schema: Schema, note: str | Schema | None) -> Schema:
    if isinstance(note, str):
        return {**schema, "description": note}
    return {**({} if note and "$ref" in note else schema), **(note or {})}


def object_of(properties: Mapping[str, Schema], description: str = "", required: Sequence[str] | None = None) -> Schema:
    """Write an object of the gateway's: these keys and no others, all of them always there unless `required` says."""
    found: Schema = {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties if required is None else required),
        "additionalProperties": False,
    }
    return {**found, "description": description} if description else found


def taken(owner: type[Any], notes: Notes, description: str = "") -> Schema:
    """Write an attrs class as a request may bring it: only what has no default must be there."""
    properties = properties_of(owner, notes, _TAKEN)
    required: list[str] = []
    for one in attrs.fields(owner):
        if one.default is attrs.NOTHING:
            required.append(one.name)
        elif one.default is not None:
            properties[one.name]["default"] = _default_of(one)
    found: Schema = {"type": "object", "properties": properties, "required": required}
    return {**found, "description": description} if description else found


def _default_of(field: "attrs.Attribute[Any]") -> Any:
    factory = getattr(field.default, "factory", None)
    return factory() if factory is not None else field.default


def list_of(schema: Schema) -> Schema:
    """Write a list as OpenAI's API has it."""
    return object_of({"object": {"const": "list"}, "data": {"type": "array", "items": schema}})
