"""The configuration as JSON schema, with which editors check and complete `ichat.toml`: `ichat.pyz config schema`.

Names, types and defaults are from the classes, bounds from their checks, and descriptions from the docstrings of
fields, else from the comments of `ichat.toml.example`. `gateway --check` reports mistakes that only the gateway can
find: a model that does not exist, or two keys that contradict each other.
"""

import json
import pathlib
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, Union, get_args, get_origin

import attrs

import ichat
from ichat.admin.schemas import Schema, bounds_of, docs_of, schema_of
from ichat.config.command_line import CommandLineParser
from ichat.config.schema import Config, EngineValue, ManagedWorkerConfig

EXAMPLE = "ichat.toml.example"
_TABLE = re.compile(r"\[+([\w.]+)")
_KEY = re.compile(r"#?([A-Za-z_]\w*) = ")
_ENGINE_VALUE: Schema = {"type": ["string", "number", "boolean", "array", "object"]}


def parser() -> CommandLineParser:
    """Return the parser of the command."""
    usage = CommandLineParser(
        prog="ichat.pyz config",
        description="Print the configuration as JSON schema (2020-12), by which editors check and complete the file.",
    )
    usage.add_argument("what", metavar="WHAT", choices=("schema",), help="schema")
    return usage


def run(argv: Sequence[str]) -> int:
    """Print the schema. Raises Exit 64."""
    parser().parse_args(list(argv))
    print(json.dumps(config_schema(), indent=2))
    return 0


def config_schema() -> Schema:
    """Return the schema (JSON schema 2020-12) of the whole file."""
    comments = _comments(_example())
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ichat.toml",
        "description": f"The configuration of iChat's gateway, version {ichat.__version__}.",
        **_section(Config, "", comments),
    }


def _section(owner: type[Any], path: str, comments: Mapping[str, str]) -> Schema:
    docs, properties, required = docs_of(owner), dict[str, Schema](), list[str]()
    for one in attrs.fields(owner):
        inner = f"{path}.{one.name}" if path else one.name
        schema = _of_type(one.type, inner, comments) | bounds_of(one)
        default: Any = one.default
        if default is attrs.NOTHING:
            required.append(one.name)
        elif type(default) in (str, int, float, bool):
            schema["default"] = default
        text = docs.get(one.name) or comments.get(inner) or _purpose_of(one.type)
        properties[one.name] = schema | ({"description": text} if text else {})
    rest: Any = _ENGINE_VALUE if owner is ManagedWorkerConfig else False
    found: Schema = {"type": "object", "properties": properties, "additionalProperties": rest}
    return found | ({"required": required} if required else {})


def _purpose_of(kind: Any) -> str:
    """Return the description of a section from its docstring; empty for other types."""
    owner = next((one for one in (kind, *get_args(kind)) if attrs.has(one)), None)
    return "" if owner is None else " ".join((owner.__doc__ or "").split())


def _of_type(kind: Any, path: str, comments: Mapping[str, str]) -> Schema:
    """Return a type as TOML has it. TOML has no null: a key that may be None may be left out."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind == EngineValue:
        return dict(_ENGINE_VALUE)
    if attrs.has(kind):
        return _section(kind, path, comments)
    if origin in (Union, types.UnionType):
        rest = [one for one in inner if one is not type(None)]
        return _of_type(rest[0], path, comments) if len(rest) == 1 else schema_of(kind)
    if origin is list:
        return {"type": "array", "items": _of_type(inner[0], path, comments)}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _of_type(inner[1], path, comments)}
    return schema_of(kind)


def _example() -> str:
    """Return the example with its comments: in the pyz beside the configuration, in a checkout at its root."""
    package = pathlib.Path(ichat.__file__).parent
    for path in (package / "config" / EXAMPLE, package.parent / EXAMPLE):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return ""


def _comments(text: str) -> Mapping[str, str]:
    """Return the example's comment on each key and table, by their paths; the keys of a paragraph share its comment."""
    found: dict[str, str] = {}
    table = ""
    for paragraph in re.split(r"\n\s*\n", text):
        lines: Sequence[str] = paragraph.splitlines()
        comment = " ".join(line[2:].strip() for line in lines if line.startswith("# "))
        for line in lines:
            if (began := _TABLE.match(line)) is not None:
                table = began[1].removesuffix(".")
                found.setdefault(table, comment)
            elif (key := _KEY.match(line)) is not None:
                found.setdefault(f"{table}.{key[1]}" if table else key[1], comment)
    return {path: comment for path, comment in found.items() if comment}
