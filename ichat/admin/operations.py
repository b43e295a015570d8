"""Operations of the control plane: each is described beside its handler, and `openapi.py` makes the document of them.

A handler's name is the operation's id, the first line of its docstring the summary, and its return type the answer.
"""

import functools
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from quart import Blueprint, Response

from ichat.admin.context import json_response, part
from ichat.admin.schemas import COMPONENTS, PARTS, Schema, ref

FAILED = {status: {"$ref": "#/components/responses/Failed"} for status in ("4XX", "5XX")}
TEXT: Schema = {"type": "string"}
MODEL_KEYS: Schema = PARTS["models"]["body"]
"""The member that the gateway reads of the body of a request to a model."""
MODEL_FAILURES: Mapping[str, str] = PARTS["models"]["failures"]
Answer = type[Any] | str | Schema
"""The body of an answer by its class or the name of its component; or a whole answer."""
_Handler = TypeVar("_Handler", bound=Callable[..., Awaitable[Any]])


class Operations:
    """The operations of a part of the control plane."""

    def __init__(self, tag: str) -> None:
        """`tag` is the part of the document in which they stand, unless an operation names another."""
        self._tag = tag
        self.blueprint = Blueprint(tag, __name__)
        self.paths: dict[str, Schema] = {}
        """The operations as the document has them."""

    def __repr__(self) -> str:
        return f"<Operations of {self._tag}>"

    def add(
        self,
        route: str,
        *,
        name: str = "",
        tag: str = "",
        response: Answer | None = None,
        status: int = 200,
        other_responses: Mapping[str, Answer] | None = None,
        body: Schema | None = None,
        parameters: Sequence[Schema] = (),
        path_descriptions: Mapping[str, str] | None = None,
        failures: Mapping[str, str] | None = None,
    ) -> Callable[[_Handler], _Handler]:
        """Return the decorator of the handler of a route, such as `GET /v1/models/<path:name>`.

        A handler gets the variable parts of the path, and the parts of the gateway that it names by their classes. It
        returns a response, or a value for a response in JSON. `response` is for a handler that returns responses,
        `other_responses` are answers of other statuses, `body` is the schema of the body, `path_descriptions`
        describes variable parts of the path, and `failures` the statuses that are worth a word.
        """
        method, _, path = route.partition(" ")

        def decorate(handler: _Handler) -> _Handler:
            id_ = name or getattr(handler, "__name__", "")
            item = self.paths.setdefault(shown_path(path), path_parameters(path, path_descriptions or {}))
            item[method.lower()] = operation_of(
                tag or self._tag,
                id_,
                (inspect.getdoc(handler) or "").partition("\n")[0].rstrip("."),
                {str(status): response or inspect.signature(handler).return_annotation, **(other_responses or {})},
                body=body,
                parameters=parameters,
                failures=failures,
            )
            self.blueprint.add_url_rule(path, id_, _answering(handler), methods=[method])
            return handler

        return decorate


def _answering(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Response]]:
    arguments = inspect.signature(handler).parameters.values()
    needs = {one.name: one.annotation for one in arguments if one.annotation is not str}

    @functools.wraps(handler)
    async def answer(**variables: str) -> Response:
        found = await handler(**variables, **{name: part(kind) for name, kind in needs.items()})
        return found if isinstance(found, Response) else json_response(found)

    return answer


def shown_path(path: str) -> str:
    """Return the path of a route as the document has it."""
    return re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", path)


def path_parameters(path: str, descriptions: Mapping[str, str]) -> Schema:
    """Return the variable parts of a route's path, which all its methods share."""
    found: list[Schema] = []
    for name in re.findall(r"<(?:\w+:)?(\w+)>", path):
        more = {"description": descriptions[name]} if name in descriptions else {}
        found.append({"name": name, "in": "path", "required": True, "schema": TEXT, **more})
    return {"parameters": found} if found else {}


def operation_of(
    tag: str,
    operation_id: str,
    summary: str,
    answers: Mapping[str, Answer],
    *,
    body: Schema | None = None,
    parameters: Sequence[Schema] = (),
    failures: Mapping[str, str] | None = None,
) -> Schema:
    """Describe a method of a route, with the answers of its statuses, and with the failures worth a word."""
    sent: Schema = {"required": True, "content": {"application/json": {"schema": body}}}
    return {
        "tags": [tag],
        "operationId": operation_id,
        "summary": summary,
        **({"parameters": list(parameters)} if parameters else {}),
        **({"requestBody": sent} if body else {}),
        "responses": {
            **{status: answer_of(one) for status, one in answers.items()},
            **{status: failure(text) for status, text in (failures or {}).items()},
            **FAILED,
        },
    }


def answer_of(answer: Answer) -> Schema:
    """Return an answer; a class or the name of a component stands for a body in JSON."""
    if isinstance(answer, dict):
        return answer
    name = answer if isinstance(answer, str) else COMPONENTS[answer]
    return {"description": name, "content": {"application/json": {"schema": ref(name)}}}


def content_of(kind: str, description: str) -> Schema:
    """Return an answer with a text of this kind."""
    return {"description": description, "content": {kind: {"schema": TEXT}}}


def query(name: str, schema: Schema, description: str) -> Schema:
    """Return a parameter in the query."""
    return {"name": name, "in": "query", "schema": schema, "description": description}


def flag(name: str, description: str, *, default: bool = False) -> Schema:
    """Return a parameter in the query that is true or false."""
    return query(name, {"type": "boolean", "default": default}, description)


def failure(description: str) -> Schema:
    """Return an answer that is an error."""
    headers = {name: header(name) for name in ("x-ichat-error", "retry-after")}
    return {"description": description, "headers": headers, "content": {"application/json": {"schema": ref("Error")}}}


def header(name: str) -> Schema:
    """Return a header that the document describes."""
    return {"$ref": f"#/components/headers/{name}"}
