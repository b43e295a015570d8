"""How a request goes on: values, and a pure function.

`next_step` decides by the facts of the request and by the outcome of its last step. It sees no body, no client and
no endpoint, only their names and numbers. All values can be sent to another process (they are strings, bytes, numbers,
and tuples of them), and a route has everything that a decision needs. They are named tuples, since a request makes
several of them, and a frozen class costs ten times as much. `Refuse` and `Done`, the ends of a request, are classes.

A request goes to another endpoint of its model only where no endpoint can have worked on it. It goes on to another
model only before the client has a byte of a response, and only for the reasons that its name allows.
"""

import functools
import urllib.parse
from typing import Literal, NamedTuple

import attrs

from ichat.proxy.refusals import Failure, failure_of_all

HeaderPairs = tuple[tuple[bytes, bytes], ...]

MODEL_HEADER = b"x-ichat-model"
"""The model that answered a request for a name that stands for models."""
ATTEMPTS_HEADER = b"x-ichat-attempts"
"""How many endpoints were asked for it, and models without an endpoint to ask."""
TOO_LONG, SEEMS_TOO_LONG = "too_long", "seems_too_long"
"""Reasons to go on to the model for longer prompts: the engine's refusal, and an estimate before it was asked."""
AGAIN_FIRST_S = 0.25
"""The pause before the only endpoint of a model is asked again; twice as long each further time."""
AGAIN_LONGEST_S = 4.0
STARTS_MAX = 256
"""The number of models of which the first step of a request is kept."""
_AGAIN = frozenset(("5xx", "429", "timeout"))
"""Reasons for which the same external route may be asked again."""
_PASSED_OVER = {
    "full": ("busy", "model_busy", "has all its places taken"),
    "loadable": ("loading", "model_loading", "is being loaded"),
    "starting": ("not_ready", "model_starting", "is being started"),
}
"""The reason, and the code and the words of the error, of a model that is not waited for."""

OutcomeKind = Literal[
    "begun", "full", "loadable", "starting", "alone", "seems_too_long", "refused", "waited",
    "answered", "cut", "left", "cancelled",
    "unreachable", "declined", "rejected", "too_long", "late", "broken", "unfit",
]  # fmt: skip
"""`begun`: the request is there, and nothing was tried.

A lookup ends in `Found`, or in the state of the model: `full`, `loadable` (it must be loaded), `starting` (it
starts by itself), `alone` (only the excluded endpoints are left), `seems_too_long` (the prompt, by an estimate), or
`refused`. A wait ends in `waited`, `Found` or `refused`.

An attempt ends in `answered`, in `cut` (the client has a part of the response), in `left` (the client has gone), in
`cancelled` (by an operator), or without a response for the client. Then it was `unreachable`, it has `declined` the
request, its response was `rejected`, it found the request `too_long`, it was `late`, it has `broken` off, or the
request is `unfit` for it.
"""
_ENDS = frozenset(("answered", "cut", "left", "cancelled"))
NOT_WORKED_ON = frozenset(("unreachable", "declined"))
"""Outcomes of an attempt after which another endpoint of the same model may be asked."""
_REASONS = {"unreachable": "unreachable", "declined": "not_ready", "too_long": TOO_LONG}
_REASONS_OF_EXTERNAL = {"late": "timeout", "broken": "5xx", "rejected": "5xx"}


class BodyEdits(NamedTuple):
    """Edits of a body by its members' names. They always refer to the body as the client sent it."""

    model: str = ""
    """The model's name, if the body has another name; empty: it stays."""
    set: tuple[tuple[str, bytes], ...] = ()
    """Members that it gets, as JSON."""
    drop: tuple[str, ...] = ()
    """Members that it loses."""


NO_EDITS = BodyEdits()


class RequestRoute(NamedTuple):
    """The facts of a request, the models that it may be sent to, and how far it has got."""

    model: str
    """The current model."""
    ahead: tuple[str, ...] = ()
    """The models that follow, in their order."""
    name: str = ""
    """The name that it asked for, if that stands for models."""
    goes_on: tuple[str, ...] = ()
    """The reasons for which it goes on to the next model (`config.models.REASONS`)."""
    longer: str = ""
    """The model for prompts that are too long for the current model; empty: there is none."""
    retries: int = 0
    """How often an external route that has failed is asked again."""
    repeats_until: float = 0.0
    """No model is asked again after this time."""
    queue_s: float = 0.0
    """How long it may wait in queues, in all."""
    is_bound: bool = False
    """Whether a single endpoint can answer it: that keeps the response which the request continues."""
    edits: BodyEdits = NO_EDITS
    """The edits that its name makes in its body, for the current model."""

    later: tuple[str, ...] = ()
    """The models that were passed over."""
    waits: bool = False
    """Whether it has returned to those, and waits for them."""
    again: int = 0
    """How often the current model has been asked again."""
    excluded: tuple[str, ...] = ()
    """The endpoints of the current model that are not asked, since they have failed with it."""
    failed: str = ""
    """The external route that has failed, if the current model is asked again."""
    newest: Failure | None = None
    """The failure of the current model, while another endpoint of it is looked for; `newest_reason` belongs to it."""
    newest_reason: str = ""
    failures: tuple[tuple[str, Failure], ...] = ()
    """Why each model could not answer, the last time that it was asked."""
    passed: tuple[tuple[str, str], ...] = ()
    """The models that it went on from, each with the reason."""
    tries: int = 1
    """How many endpoints were asked, and models without an endpoint to ask, the current model included."""

    @property
    def has_more(self) -> bool:
        """Whether another model can be asked after the current model."""
        return bool(self.ahead or self.later)


class Outcome(NamedTuple):
    """How a step has ended."""

    kind: OutcomeKind
    endpoint: str = ""
    """The endpoint that was asked, by its id."""
    failure: Failure | None = None
    """The error for the client, if nothing else can be done."""
    why: str = ""
    """The reason of a failure, for the log."""
    reason: str = ""
    """Of `refused`: the reason to go on."""
    status: int = 0
    """Of the response."""
    is_external: bool = False
    """Whether the endpoint is an external route."""
    is_over: bool = False
    """Whether the request cannot be sent again: a response had begun when the attempt failed."""
    waited_s: float = 0.0
    """Of `full` and the like: how long the request has waited in queues until now."""


class Found(NamedTuple):
    """The outcome of a lookup or a wait that has found an endpoint."""

    kind = "found"
    endpoint: str
    """By its id."""
    first_byte_s: float = 0.0
    """How long it may need until its first byte, and between two bytes (`stall_s`)."""
    stall_s: float = 0.0
    request_head: HeaderPairs = ()
    """Headers that the request gets for it."""
    response_head: HeaderPairs = ()
    """Headers that the client gets with its response."""


class Lookup(NamedTuple):
    """Find an endpoint with a free place."""

    model: str
    edits: BodyEdits
    excluded: tuple[str, ...] = ()
    """If not empty: where only these could answer, the outcome is `alone`."""
    skips_open: bool = False
    """Whether an endpoint with an open circuit is not asked even if it answers, since another model can be asked."""
    longer: str = ""
    """If not empty, and the prompt seems too long for `model` and not for this model: the outcome is that."""


class Wait(NamedTuple):
    """Wait for a place at an endpoint (`place`), or only for some time (`pause`)."""

    kind: Literal["place", "pause"]
    seconds: float
    """Of a `place`: in queues. A load has a time limit of its own."""


class AttemptStep(NamedTuple):
    """Send the request to an endpoint, and its response to the client."""

    endpoint: str
    """By its id."""
    model: str
    """The model that it serves; empty for the control plane."""
    edits: BodyEdits = NO_EDITS
    request_head: HeaderPairs = ()
    """Headers that the request gets."""
    response_head: HeaderPairs = ()
    """Headers that the response gets."""
    first_byte_s: float = 0.0
    stall_s: float = 0.0
    rejects: tuple[str, ...] = ()
    """Statuses of an external route that the client must not get: `429`, `5xx`."""
    has_longer: bool = False
    """Whether the client must not get a refusal of the request as too long, since another model may accept it."""
    is_again: bool = False
    """Whether this endpoint has failed with this request before."""
    passes_all: bool = False
    """Whether any response at all is passed on: the control plane's is."""


@attrs.frozen
class Refuse:
    """Send the client this error."""

    failure: Failure


@attrs.frozen
class Done:
    """The request has ended: there is nothing to send."""


Step = Lookup | Wait | AttemptStep | Refuse | Done


BEGUN = Outcome("begun")
ANSWERED = Outcome("answered")


def next_step(route: RequestRoute, outcome: Outcome | Found, now: float) -> tuple[RequestRoute, Step]:
    """Return how a request goes on after the outcome of its last step, and its route as that leaves it."""
    kind = outcome.kind
    if route.newest is not None and kind != "alone":
        route = route._replace(newest=None, tries=route.tries + 1)
    if isinstance(outcome, Found):
        return route, _attempt(route, outcome)
    if kind in _ENDS:
        return route, Done()
    if kind in _PASSED_OVER:
        return _pass_over_or_wait(route, outcome, now)
    if kind == "seems_too_long":
        return _look_up(_go_longer(route, SEEMS_TOO_LONG))
    if kind == "alone":
        return _go_on_alone(route, outcome, now)
    if outcome.failure is None:  # it has begun, or waited
        return _look_up(route._replace(excluded=()) if kind == "waited" else route)
    reason = _reason_of(outcome)
    if kind in NOT_WORKED_ON and not route.is_bound:
        excluded = (*route.excluded, outcome.endpoint)
        left = route._replace(excluded=excluded, newest=outcome.failure, newest_reason=reason)
        return left, Lookup(route.model, route.edits, excluded, _skips_open(route))
    return _advance(route, outcome.failure, reason, outcome, now)


@functools.lru_cache(STARTS_MAX)
def plain_start(model: str, queue_s: float, *, is_bound: bool = False) -> tuple[RequestRoute, Step]:
    """Return the route of a request to a single model, and its first step: most requests have the same."""
    return next_step(RequestRoute(model, queue_s=queue_s, is_bound=is_bound), BEGUN, 0.0)


def is_rejected(status: int, rejects: tuple[str, ...]) -> bool:
    """Return whether the client must not get a response of this status; see `AttemptStep.rejects`."""
    return _reason_of_status(status) in rejects


def shown(model: str) -> bytes:
    """Return a model's name as a header has it."""
    return model.encode() if model.isascii() else urllib.parse.quote(model).encode()


def _look_up(route: RequestRoute) -> tuple[RequestRoute, Lookup]:
    longer = route.longer if route.longer != route.model else ""
    return route, Lookup(route.model, route.edits, route.excluded, _skips_open(route), longer)


def _attempt(route: RequestRoute, found: Found) -> AttemptStep:
    """Return the attempt at an endpoint that was found."""
    endpoint, first_byte_s, stall_s, request_head, response_head = found
    if not route.name:
        return AttemptStep(endpoint, route.model, NO_EDITS, request_head, response_head, first_byte_s, stall_s)
    goes_further = route.has_more or route.again < route.retries
    return AttemptStep(
        endpoint,
        route.model,
        route.edits,
        request_head,
        (*response_head, (MODEL_HEADER, shown(route.model)), (ATTEMPTS_HEADER, b"%d" % route.tries)),
        first_byte_s,
        stall_s,
        rejects=tuple(one for one in ("429", "5xx") if one in route.goes_on) if goes_further else (),
        has_longer=bool(route.longer) and route.longer != route.model,
        is_again=route.failed == endpoint,
    )


def _skips_open(route: RequestRoute) -> bool:
    return route.has_more and "circuit" in route.goes_on


def _go_on_alone(route: RequestRoute, outcome: Outcome, now: float) -> tuple[RequestRoute, Step]:
    """Go on where no other endpoint of the current model can answer; an external route may be asked again."""
    if route.newest is not None:
        return _advance(route, route.newest, route.newest_reason, outcome, now)
    return route, Wait("pause", min(AGAIN_LONGEST_S, AGAIN_FIRST_S * 2.0 ** (route.again - 1)))


def _pass_over_or_wait(route: RequestRoute, outcome: Outcome, now: float) -> tuple[RequestRoute, Step]:
    reason, code, words = _PASSED_OVER[outcome.kind]
    if reason not in route.goes_on or route.waits or not route.has_more:
        return route, Wait("place", max(0.0, route.queue_s - outcome.waited_s))
    message = f"The model `{route.model}` {words}."
    failure = Failure(503, code, message, kind="server_error", retry_after_s=1)
    return _advance(route._replace(later=(*route.later, route.model)), failure, reason, outcome, now)


def _advance(
    route: RequestRoute, failure: Failure, reason: str, outcome: Outcome, now: float
) -> tuple[RequestRoute, Step]:
    """Go on after the current model could not answer; refuse the request if there is no reason to, or nowhere."""
    if not route.name:
        return route, Refuse(failure)
    failures = (*((model, one) for model, one in route.failures if model != route.model), (route.model, failure))
    route = route._replace(failures=failures, failed="", newest=None, newest_reason="")
    if reason == TOO_LONG and route.longer not in ("", route.model):
        return _look_up(_go_longer(route, reason)._replace(tries=route.tries + 1))
    if reason not in route.goes_on:
        return route, Refuse(failure_of_all(route.name, route.failures))
    if reason in _AGAIN and route.again < route.retries and now < route.repeats_until:
        again = route._replace(
            again=route.again + 1, failed=outcome.endpoint, excluded=(outcome.endpoint,), tries=route.tries + 1
        )
        return _look_up(again)
    ahead = route.ahead or route.later
    if not ahead:
        return route, Refuse(failure_of_all(route.name, route.failures))
    later, waits = (route.later, route.waits) if route.ahead else ((), True)
    following = route._replace(ahead=ahead[1:], later=later, waits=waits, tries=route.tries + 1)
    return _look_up(go_to(following, ahead[0], reason))


def _go_longer(route: RequestRoute, reason: str) -> RequestRoute:
    """Go on to the model for longer prompts, and to no other after it."""
    return go_to(route._replace(ahead=(), later=()), route.longer, reason)


def go_to(route: RequestRoute, model: str, reason: str) -> RequestRoute:
    """Return a route at its next model, after the reason to leave the current model."""
    edits, passed = route.edits._replace(model=model), (*route.passed, (route.model, reason))
    return route._replace(model=model, again=0, excluded=(), edits=edits, passed=passed)


def _reason_of(outcome: Outcome) -> str:
    """Return the reason to go on (`config.models.REASONS`) after a failure; empty if there is none."""
    kind = outcome.kind
    if kind == "refused":
        return outcome.reason
    if outcome.is_external and not outcome.is_over and kind in _REASONS_OF_EXTERNAL:
        return (kind == "rejected" and _reason_of_status(outcome.status)) or _REASONS_OF_EXTERNAL[kind]
    return _REASONS.get(kind, "")


def _reason_of_status(status: int) -> str:
    return "429" if status == 429 else "5xx" if status >= 500 else ""
