"""Where a request would go now, and why: what operators ask a gateway that surprises them.

The balancer decides as it does for a request; here is only shown what that depended on.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import attrs

from ichat.config.schema import Routing
from ichat.fleet.load_view import LoadView, ScaleView
from ichat.fleet.model_directory import ModelDirectory
from ichat.fleet.worker_record import State, WorkerRecord
from ichat.fleet.worker_table import WorkerTable
from ichat.protocol.messages import Count, Share
from ichat.routing.availability import Loadable, NotReady, Ready, Refusal, Unknown
from ichat.routing.balancer import Balancer
from ichat.routing.choice import candidates, why_not
from ichat.routing.circuit_breaker import CircuitView
from ichat.routing.endpoint import Endpoint
from ichat.routing.policies import Rule
from ichat.routing.prefix_index import Match
from ichat.routing.prefix_policy import overloaded_of
from ichat.routing.request import RoutingRequest

Outcome = Rule | Literal["loading", "queued", "queue_full", "not_ready", "draining"]
"""The rule by which an endpoint gets a request, or what becomes of the request if none does."""
NO_MATCH = Match({}, 0, 0, ())


@attrs.frozen
class PrefixView:
    """The beginning of the request's prompt, as far as the choice depends on it."""

    length: Count
    """Of the whole prefix, in bytes."""
    matched: Count
    """The bytes of it that the chosen worker is believed to have in its engine's cache."""
    deepest: Count
    """The most bytes that any worker is believed to have."""


@attrs.frozen
class CandidateView:
    """A worker or external route that has the model."""

    worker_id: str
    """The worker's id, or `external:` and the name of the route."""
    state: State
    """Of an external route `ready` or `unhealthy`, by its health checks."""
    chosen: bool
    why_not: str | None
    """Why this endpoint cannot get the request now, in a few words; None: it can."""
    in_flight: Count
    """Requests that this gateway has sent there and that are not finished."""
    load: Count
    """Those, and further requests in the worker's newest report."""
    in_flight_max: Count
    """The most concurrent requests that the gateway sends there."""
    matched: Count
    """The bytes of the request's prefix that are believed to be in the cache there."""
    overloaded: bool
    """Whether there are too many requests, compared with the average, for the policy `prefix_aware` to send more."""
    circuit: CircuitView | None
    """None: the worker has not sent a heartbeat yet."""


@attrs.frozen
class TargetView:
    """A model that a name stands for, and its part in the request now."""

    model: str
    share: Share | None
    """Of the name's requests now, by the weights of the targets that can answer; 0: this target cannot.

    None: this is a fallback, or for prompts that are too long.
    """
    place: Count | None
    """The place among those that the request goes to, from 1 on; None: the request goes to another target."""
    rule: Outcome
    """As in the whole answer."""
    worker: str | None
    """The worker or external route that this model's part of the plan leads to; None: none accepts it now."""
    reason: str | None
    """Why none accepts it, in a few words; None: it is accepted."""
    goes_on: str | None
    """The reason for which the request goes on to the next model (`fallback_on`, or `seems_too_long`: to the model for
    longer prompts); None: the request stays here."""


@attrs.frozen
class RouteView:
    """Where a request would go now, and why. The question itself changes nothing."""

    model: str
    policy: str
    """`routing.policy`."""
    rule: Outcome
    chosen: str | None
    """The `worker_id` of the candidate that gets the request; None: none does now."""
    reason: str | None
    """Why no endpoint gets the request, in a few words; None: an endpoint gets it."""
    waiting: Count
    """Requests that wait in the model's queue."""
    session: bool
    """Whether the request names a session."""
    prefix: PrefixView | None
    """None: the prompt does not matter: it is short, or there is a session, a single worker or such a policy."""
    candidates: Sequence[CandidateView]
    """All that have the model, those that are not ready too, in the order of their ids."""
    alias: str | None = None
    """The name that was asked for, or the pattern that matches it, if that stands for models; `model` is then the model
    that gets the request."""
    plan: Sequence[TargetView] = ()
    """Those models, if it does: its targets, then its fallbacks. Without a session, the plan of the largest share."""
    load: LoadView | None = None
    """The load that the model would need; None: it is loaded, or not loaded on demand."""
    scale: ScaleView | None = None
    """The number of its copies and the last decision about it; None: its load does not change that number."""


def explain(
    directory: ModelDirectory, table: WorkerTable, balancer: Balancer, settings: Routing, request: RoutingRequest
) -> RouteView | Unknown:
    """Return where a request would go now, and why; the supervisor knows the cost of a load."""
    decided = balancer.rehearse(request)
    if isinstance(decided, Unknown):
        return decided
    chain = request.prefix
    match = balancer.prefixes.part_of(chain).match(chain) if chain is not None else NO_MATCH
    if isinstance(decided, tuple):
        chosen, outcome, reason = decided[0], decided[1], None
        matched = match.bytes_of.get(chosen, 0)
    else:
        outcome, reason = _without(decided, request.model, balancer, settings)
        chosen, matched = None, 0
    views = _candidates(directory, table, request, match, chosen, compares=settings.policy == "prefix_aware")
    return RouteView(
        model=request.model,
        policy=settings.policy,
        rule=outcome,
        chosen=next((one.worker_id for one in views if one.chosen), None),
        reason=reason,
        waiting=balancer.waiting_for(request.model),
        session=bool(request.session),
        prefix=PrefixView(chain.length, matched, match.deepest) if chain is not None else None,
        candidates=views,
    )


def _candidates(
    directory: ModelDirectory,
    table: WorkerTable,
    request: RoutingRequest,
    match: Match,
    chosen: Endpoint | None,
    *,
    compares: bool,
) -> Sequence[CandidateView]:
    """Return all that have a request's model; with `compares` those with too much to do are marked."""
    now, found = table.clock(), directory.availability(request.model)
    ready = found.endpoints if isinstance(found, Ready) else ()
    choice = candidates(ready, request, now)
    overloaded = overloaded_of(choice, match, now) if compares else ()
    views = list[CandidateView]()
    for endpoint, worker in _having(directory, table, request.model):
        is_ready = endpoint in ready
        if endpoint is None or not is_ready:
            reason = _why_not_ready(table, endpoint, worker)
        else:
            reason = None if endpoint in choice else why_not(endpoint, request, now)
        views.append(
            CandidateView(
                worker_id=worker.id if worker is not None else endpoint.id.decode() if endpoint is not None else "",
                state=table.state(worker) if worker is not None else "ready" if is_ready else "unhealthy",
                chosen=endpoint is not None and endpoint is chosen,
                why_not=reason,
                overloaded=endpoint in overloaded,
                **_counts_of(endpoint, match, now),
            )
        )
    return views


def _having(
    directory: ModelDirectory, table: WorkerTable, model: str
) -> Iterator[tuple[Endpoint | None, WorkerRecord | None]]:
    """Yield all that have a model: its external routes, else its workers with their endpoints, if these are known."""
    routes = directory.external.get(model)
    if routes is not None:
        yield from ((route, None) for route in routes)
        return
    for worker in sorted(table, key=lambda worker: worker.id):
        if worker.serves(model):
            yield table.endpoint_of(worker), worker


def _counts_of(endpoint: Endpoint | None, match: Match, now: float) -> dict[str, Any]:
    """Return the fields of a candidate's view that only its endpoint knows; it has none before a first heartbeat."""
    if endpoint is None:
        return {"in_flight": 0, "load": 0, "in_flight_max": 0, "matched": 0, "circuit": None}
    return {
        "in_flight": endpoint.in_flight,
        "load": endpoint.load(now),
        "in_flight_max": endpoint.in_flight_max,
        "matched": match.bytes_of.get(endpoint, 0),
        "circuit": endpoint.circuit.describe(now),
    }


def _why_not_ready(table: WorkerTable, endpoint: Endpoint | None, worker: WorkerRecord | None) -> str:
    if worker is not None:
        return table.why_not_ready(worker).removeprefix(f"worker {worker.id} ")
    return endpoint.trouble if endpoint is not None else ""


def _without(refusal: Refusal, model: str, balancer: Balancer, settings: Routing) -> tuple[Outcome, str]:
    """Return what becomes of a request that no endpoint gets now, and why."""
    if isinstance(refusal, NotReady):
        return "not_ready", refusal.reasons
    if balancer.is_closed:
        return "draining", "the gateway is about to end"
    waiting = balancer.waiting_for(model)
    outcome, why = ("loading", refusal.reasons) if isinstance(refusal, Loadable) else ("queued", "all are full")
    if waiting >= settings.queue_max:
        return "queue_full", f"{why}, and the queue is full: it has {waiting} (routing.queue_max)"
    already = "1 request waits already" if waiting == 1 else f"{waiting} requests wait already"
    return outcome, f"{why}, and {already}" if waiting else why
