"""Responses that a worker keeps: their ids say which worker that is."""

from collections.abc import Sequence

import attrs

from ichat.fleet.fleet_view import DirectoryView, TableView
from ichat.fleet.worker_record import WorkerRecord
from ichat.protocol.responses import RESPONSE_ID
from ichat.routing.endpoint import Endpoint


@attrs.frozen
class ResponseMissing:
    """No worker keeps the response of this id."""

    response_id: str
    reason: str


def holder_of(table: TableView, response_id: str) -> WorkerRecord | ResponseMissing:
    """Return the worker that keeps a response."""
    match = RESPONSE_ID.fullmatch(response_id)
    if match is None:
        return ResponseMissing(response_id[:128], "no worker gives such an id")
    worker = table.keeper(match[1])
    if worker is not None and not worker.absence:
        return worker
    why = "the worker that had it has ended or was started again, and its responses with it"
    return ResponseMissing(response_id, why)


def continued_among(
    directory: DirectoryView, table: TableView, response_id: str, models: Sequence[str]
) -> tuple[tuple[str, ...], Endpoint | None] | ResponseMissing:
    """Return which of these models can continue a response, and the endpoint that keeps it.

    That is None for external models: only their upstreams know.
    """
    worker = holder_of(table, response_id)
    if isinstance(worker, ResponseMissing):
        external = tuple(model for model in models if model in directory.external)
        return (external, None) if external else worker
    served = tuple(model for model in models if worker.serves(model) and model not in directory.external)
    if not served:
        return ResponseMissing(response_id, f"it is of none of the models {', '.join(f'`{one}`' for one in models)}")
    return served[:1], table.endpoint_of(worker)


def continued_by(
    directory: DirectoryView, table: TableView, response_id: str, model: str
) -> Endpoint | ResponseMissing | None:
    """Return the endpoint that keeps the response which a request for this model continues.

    None for an external model: only its upstream knows.
    """
    if model in directory.external:
        return None
    worker = holder_of(table, response_id)
    if isinstance(worker, ResponseMissing):
        return worker
    if not worker.serves(model):
        return ResponseMissing(response_id, f"it is not of the model `{model}`")
    return table.endpoint_of(worker)
