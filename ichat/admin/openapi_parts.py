"""The parts that operations of the OpenAPI document have in common: `openapi.py` puts them together."""

from collections.abc import Mapping, Sequence

from ichat.admin.schemas import Schema, ref

FAILED = {status: {"$ref": "#/components/responses/Failed"} for status in ("4XX", "5XX")}


def operation_of(
    tag: str,
    operation_id: str,
    summary: str,
    answer: Schema,
    *,
    status: str = "200",
    body: Schema | None = None,
    parameters: Sequence[Schema] = (),
    failures: Mapping[str, str] | None = None,
) -> Schema:
    """Write one method of one route; `failures` has the statuses that are worth a word."""
    return {
        "tags": [tag],
        "operationId": operation_id,
        "summary": summary,
        **({"parameters": list(parameters)} if parameters else {}),
        **({"requestBody": {"required": True, "content": body}} if body else {}),
        "responses": {
            status: answer,
            **{code: failure(text) for code, text in (failures or {}).items()},
            **FAILED,
        },
    }


def json_of(name: str) -> Schema:
    """Return an answer whose body is a component."""
    return {"description": name, "content": json_body(name)}


def json_body(name: str) -> Schema:
    """Return a body that is a component."""
    return {"application/json": {"schema": ref(name)}}


def query(name: str, schema: Schema, description: str) -> Schema:
    """Return a parameter in the query."""
    return {"name": name, "in": "query", "schema": schema, "description": description}


def failure(description: str) -> Schema:
    """Return an answer that is an error."""
    headers = {name: header(name) for name in ("x-ichat-error", "retry-after")}
    return {"description": description, "headers": headers, "content": json_body("Error")}


def header(name: str) -> Schema:
    """Return a header that the document describes."""
    return {"$ref": f"#/components/headers/{name}"}
