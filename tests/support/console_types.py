"""Write the shapes of the gateway's answers as TypeScript, for the type check of the console's code.

    python tests/support/console_types.py .build/console-check/api.d.ts

They are made from the OpenAPI document, which is made from the gateway's own classes: a field that is renamed there is
an error of `./build check` where the console reads it.
"""

import json
import pathlib
import re
import sys

from ichat.admin.openapi import document

METHODS = ("get", "post", "patch", "delete")
PLAIN = {
    "string": "string", "integer": "number", "number": "number", "boolean": "boolean", "null": "null",
    "array": "unknown[]", "object": "Record<string, unknown>",
}  # fmt: skip


def type_of(schema):
    """Return a JSON Schema as a type; what it does not say is unknown."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "const" in schema or "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(map(type_of, schema["anyOf"])))
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return " | ".join(dict.fromkeys(type_of({**schema, "type": kind}) for kind in kinds))
    if kinds == "array" and schema.get("items"):
        return f"Array<{type_of(schema['items'])}>"
    if kinds == "object" and (schema.get("properties") or schema.get("additionalProperties")):
        return object_type_of(schema)
    return PLAIN.get(kinds, "unknown")


def object_type_of(schema):
    """Return the type of an object; a member that is not required may be left out."""
    required = schema.get("required", ())
    members = [
        f"{json.dumps(name)}{'' if name in required else '?'}: {type_of(one)};"
        for name, one in schema.get("properties", {}).items()
    ]
    others = schema.get("additionalProperties")
    if isinstance(others, dict) and not members:
        members.append(f"[name: string]: {type_of(others)};")
    return "{ " + " ".join(members) + " }" if members else "Record<string, unknown>"


def answers_of(paths, method):
    """Return a type that maps a path, which may have a query, to the JSON that the gateway answers it with."""
    lines = []
    for path in sorted(paths, key=lambda path: (path.count("{"), -len(path))):
        found = [
            type_of(answer["content"]["application/json"]["schema"])
            for status, answer in paths[path].get(method, {}).get("responses", {}).items()
            if status.startswith("2") and "application/json" in answer.get("content", {})
        ]
        if found:
            pattern = re.sub(r"\{\w+\}", "${string}", path)
            lines.append(f"    Path extends `{pattern}` ? {' & '.join(found)} :")
    return "\n".join([f"  type {method.title()}<Path extends string> =", *lines, "    never;"])


OURS = """\
declare namespace Api {
  /** What the stream told of a thing, and when that came, in milliseconds since 1970. */
  type Seen<Thing> = Thing & { seen_at: number };
  /** A path without its query. */
  type Plain<Path extends string> = Path extends `${infer Start}?${string}` ? Start : Path;"""


def main(place):
    """Write the types to this file."""
    found = document()
    kinds = [f"  type {name} = {type_of(schema)};" for name, schema in found["components"]["schemas"].items()]
    maps = [answers_of(found["paths"], method) for method in METHODS]
    pathlib.Path(place).write_text("\n".join([OURS, *kinds, *maps, "}", ""]))


if __name__ == "__main__":
    main(sys.argv[1])
