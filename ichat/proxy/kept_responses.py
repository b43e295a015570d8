"""Requests about a response that a worker keeps, and requests that continue such a response: the permissions."""

from collections.abc import Collection, Mapping

import attrs

from ichat import errors
from ichat.fleet.fleet_view import DirectoryView, TableView
from ichat.fleet.responses import ResponseMissing, continued_among, continued_by, holder_of
from ichat.observability.access_log import shown_path
from ichat.protocol.responses import is_of_model
from ichat.proxy.context import GatewayContext
from ichat.proxy.model_request import check_path
from ichat.proxy.refusals import response_missing
from ichat.routing.aliases import Plan
from ichat.routing.endpoint import Endpoint
from ichat.security.auth import Caller

_NOT_FOR = "it is of a model that this key is not for"
_READS = (b"GET", b"HEAD")
_METHODS: Mapping[bytes, tuple[bytes, ...]] = {b"": (b"DELETE", *_READS), b"input_items": _READS, b"cancel": (b"POST",)}
"""The parts that may follow a response's id in a path, with the methods that are accepted there."""


def kept_response(context: GatewayContext, method: bytes, path: bytes, caller: Caller) -> tuple[str, Endpoint]:
    """Return a model and the endpoint of the worker that keeps the response which a request is about.

    The path is `/v1/responses/{id}`, and maybe more. Raises ApiError: 400, 404, 405.
    """
    check_path(path)
    _, _, _, id_, *rest = path.split(b"/", 4)
    response_id, below = id_.decode("latin-1"), b"".join(rest)
    worker = holder_of(context.table, response_id)
    if isinstance(worker, ResponseMissing):
        raise response_missing(worker)
    methods = _METHODS.get(below)
    if methods is None or (rest and not below):
        raise errors.not_found(shown_path(path))
    if method not in methods:
        allowed = b", ".join(methods).decode()
        raise errors.method_not_allowed(method.decode("latin-1"), shown_path(path), allowed)
    models = worker.names[:1]
    if (allowed := _models_of(context, caller)) is not None:
        models = [model for model in allowed if worker.serves(model) and is_of_model(response_id, model)]
    endpoint = context.table.endpoint_of(worker)
    if not models or endpoint is None:
        raise errors.response_not_found(response_id, _NOT_FOR)
    return models[0], endpoint


def continue_response(
    directory: DirectoryView, table: TableView, response_id: str, model: str, plan: Plan | None
) -> tuple[Plan | None, Endpoint | None]:
    """Return the plan that is left for a request that continues a response, and the only endpoint that keeps it.

    The plan is None for the name of a model, the endpoint is None where only an upstream knows. Raises ApiError 404.
    """
    if plan is None:
        found = continued_by(directory, table, response_id, model)
        if isinstance(found, ResponseMissing):
            raise response_missing(found, "previous_response_id")
        return None, found
    left = continued_among(directory, table, response_id, tuple(dict.fromkeys(plan.targets + plan.alias.models)))
    if isinstance(left, ResponseMissing):
        raise response_missing(left, "previous_response_id")
    return Plan(left[0], attrs.evolve(plan.alias, longer=None)), left[1]


def check_continued(context: GatewayContext, caller: Caller, response_id: str) -> None:
    """Raise ApiError 404 if the caller's key is not for the model of a response, which a worker keeps."""
    allowed = _models_of(context, caller)
    if allowed is not None and not any(is_of_model(response_id, model) for model in allowed):
        raise errors.response_not_found(response_id, _NOT_FOR, "previous_response_id")


def _models_of(context: GatewayContext, caller: Caller) -> Collection[str] | None:
    """Return the models that a caller's key is for, and those that its names lead to; None: every model."""
    names = None if caller.key is None else caller.key.models
    return names if names is None else names | context.aliases.models_of(names)
