"""The models that a request may be sent to: its route at the beginning, and its body for each of them."""

import math

from ichat.fleet.fleet_view import DirectoryView
from ichat.http.request_body import RequestBody
from ichat.proxy.steps import BodyEdits, RequestRoute
from ichat.routing.aliases import Plan
from ichat.routing.availability import Full, Loadable, NotReady, QueueTimeout, Ready, Refusal, Unknown
from ichat.routing.prompt_lengths import PromptLengths


def route_along(
    plan: Plan, *, repeats_until: float = 0.0, queue_s: float = 0.0, is_bound: bool = False
) -> RequestRoute:
    """Return the route of a request through the models of a plan; see `RequestRoute` for the others."""
    alias = plan.alias
    return RequestRoute(
        plan.targets[0],
        plan.targets[1:],
        alias.name,
        tuple(sorted(alias.goes_on)),
        alias.longer or "",
        alias.retries,
        repeats_until,
        queue_s,
        is_bound,
        BodyEdits(plan.targets[0], tuple(alias.set.items()), tuple(sorted(alias.drop))),
    )


async def body_for(body: RequestBody, edits: BodyEdits, name: str) -> RequestBody:
    """Return a body with the edits of the name that the request asked for. Raises ApiError 400.

    They replace those for an earlier model. The rest is unchanged.
    """
    body = body.original
    if not edits.set and not edits.drop and edits.model in ("", name):
        return body
    given = dict(edits.set)
    values = body.written(given)
    drop = {*edits.drop, *(given.keys() - values)}  # nor may the client choose values that a form cannot have
    return await body.edited({**values, "model": body.text(edits.model)}, drop)


def seems_too_long(directory: DirectoryView, lengths: PromptLengths, model: str, longer: str, bytes_in: int) -> bool:
    """Return whether a prompt of this size is clearly too long for a model, by earlier prompts; 0: not measurable.

    That is only an estimate: it counts where `longer`, the model for longer prompts, is ready.
    """
    found = directory.availability(model) if bytes_in else None
    if not isinstance(found, Ready) or not isinstance(directory.availability(longer), Ready):
        return False
    return lengths.is_too_long(model, bytes_in, found.endpoints)


def reason_of_refusal(refusal: Refusal, queue_max: float = math.inf, *, has_waited: bool = False) -> str:
    """Return the reason to go on (`config.models.REASONS`) after a refusal; empty if there is none.

    `queue_max` is how many requests may wait, `has_waited` says that this request has.
    """
    match refusal:
        case NotReady():
            return "circuit" if refusal.limit == "circuit_breaker" else "not_ready"
        case Unknown():
            return "not_ready"
        case Full(waiting):
            return "queue_full" if has_waited or waiting >= queue_max else "busy"
        case QueueTimeout():
            return "queue_full"
        case Loadable(is_coming=is_coming):
            return "not_ready" if has_waited or is_coming else "loading"
        case _:
            return ""
