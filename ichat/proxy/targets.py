"""The way of a request through the models of its plan: the next model, its body, and why the last was not used.

A request goes on to the next model only before the client has a byte of a response, and only for the reasons that its
name allows. A request that a worker may have worked on goes nowhere else; of external routes a name may allow it.
"""

import math
import urllib.parse

import attrs

from ichat import errors
from ichat.errors import ApiError
from ichat.fleet.registry import Registry
from ichat.fleet.responses import ResponseMissing, continued_among, continued_by
from ichat.http.heads import Headers
from ichat.http.request_body import RequestBody
from ichat.observability.request_record import RequestRecord
from ichat.proxy.client_head import ATTEMPTS_HEADER, MODEL_HEADER
from ichat.proxy.refusals import response_missing
from ichat.routing.aliases import Plan
from ichat.routing.availability import Full, Loadable, NotReady, Ready, Refusal, Unknown
from ichat.routing.endpoint import Endpoint
from ichat.routing.prompt_lengths import PromptLengths

_AGAIN = frozenset(("5xx", "429", "timeout"))
"""Reasons for which the same external route may be asked again."""
TOO_LONG, SEEMS_TOO_LONG = "too_long", "seems_too_long"
"""Reasons to go on to the model for longer prompts: the engine's refusal, and an estimate before it was asked."""
_LATER = frozenset(("busy", "loading"))
"""Reasons for which a model is passed over, and waited for if no other model can answer."""
_STARTING = "model_starting"
"""The code of a model that is passed over since its worker is started: it is waited for later, too."""
_PASSED_OVER = {
    "busy": ("model_busy", "has all its places taken"),
    "loading": ("model_loading", "is being loaded"),
    "not_ready": (_STARTING, "is being started"),
}
"""The code and the words of the error of a model that is not waited for, by the reason."""
AGAIN_FIRST_S = 0.25
"""The pause before the only endpoint of a model is asked again; twice as long each further time."""
AGAIN_LONGEST_S = 4.0
_QUEUES = frozenset(("routing.queue_max", "timeouts.queue_s", "timeouts.load_wait_s"))


class TargetWalk:
    """A request's way through the models of its plan. It begins at the first model."""

    __slots__ = (
        "_again", "_ahead", "_failures", "_later", "_waits", "alias", "failed", "model", "passed", "tries",
    )  # fmt: skip

    def __init__(self, plan: Plan) -> None:
        self.alias = plan.alias
        self.model = plan.targets[0]
        """The current model."""
        self._ahead = list(plan.targets[1:])
        self._later: list[str] = []
        """Those that were passed over."""
        self._waits = False
        """Whether it has returned to those, and waits for them."""
        self._again = plan.alias.retries
        self.failed: Endpoint | None = None
        """The route of the current model that has failed, if the model is asked again."""
        self._failures: dict[str, ApiError] = {}
        """Why each model could not answer, the last time that it was asked; none has a traceback, which leads here."""
        self.passed: list[tuple[str, str]] = []
        """The models that it went on from, each with the reason."""
        self.tries = 1
        """How many endpoints were asked, and models without an endpoint to ask, the current model included."""

    def __repr__(self) -> str:
        return f"<TargetWalk {self.alias.name} at {self.model}>"

    @property
    def has_more(self) -> bool:
        """Whether another model can be asked after the current model."""
        return bool(self._ahead or self._later)

    @property
    def skips_open(self) -> bool:
        """Whether an endpoint with an open circuit is not asked, since another model can be."""
        return "circuit" in self.alias.goes_on and self.has_more

    @property
    def pause_s(self) -> float:
        """How long to wait before the current model is asked again, if only the failed route can answer."""
        if self.failed is None:
            return 0.0
        return min(AGAIN_LONGEST_S, AGAIN_FIRST_S * 2.0 ** (self.alias.retries - self._again - 1))

    def passes_over(self, reason: str) -> bool:
        """Return whether not to wait for the current model, for this reason."""
        return reason in self.alias.goes_on and not self._waits and self.has_more

    def refuses(self, status: int) -> bool:
        """Return whether the client does not get an external route's response of this status: there is another way."""
        reason = _reason_of_status(status)
        return reason in self.alias.goes_on and (self.has_more or self._again > 0)

    @property
    def longer(self) -> str | None:
        """The model for a prompt that is too long for the current model; None if there is none, or it is that."""
        return self.alias.longer if self.alias.longer != self.model else None

    def go_longer(self, longer: str, reason: str) -> None:
        """Go on to the model for longer prompts, and to no other after it."""
        self.passed.append((self.model, reason))
        self.model, self._ahead, self._later, self._again = longer, [], [], self.alias.retries

    def skips_too_long(self, registry: Registry, lengths: PromptLengths, bytes_in: int) -> bool:
        """Go on to the model for longer prompts if the prompt seems too long for this model; return whether it does."""
        longer = self.longer
        if longer is None or not seems_too_long(registry, lengths, self.model, longer, bytes_in):
            return False
        self.go_longer(longer, SEEMS_TOO_LONG)
        return True

    def advance(self, error: ApiError, reason: str, failed: Endpoint | None = None, *, may_repeat: bool = True) -> bool:
        """Go on after the current model could not answer; return False if there is no reason to, or nowhere.

        `failed` is the endpoint that was asked last, `may_repeat` says that there is time to ask a model again.
        """
        self.failed = None
        self._failures.pop(self.model, None)
        self._failures[self.model] = _copy_of(error)
        if reason == TOO_LONG and self.longer is not None:
            self.go_longer(self.longer, reason)
            self.tries += 1
            return True
        if reason not in self.alias.goes_on:
            return False
        if reason in _AGAIN and self._again and may_repeat:
            self._again -= 1
            self.failed = failed
        else:
            if reason in _LATER or error.code == _STARTING:
                self._later.append(self.model)
            if not self._ahead:
                self._ahead, self._later, self._waits = self._later, [], True
            if not self._ahead:
                return False
            self.passed.append((self.model, reason))
            self.model, self._again = self._ahead.pop(0), self.alias.retries
        self.tries += 1
        return True

    @property
    def is_told(self) -> bool:
        """Whether the last model's own error says all: it is the only model that was asked, and exists."""
        return len(self._failures) == 1 and next(iter(self._failures.values())).code != "model_not_found"

    def error(self) -> ApiError:
        """Return the error of a request that no model has answered: the last model's, with the words of all."""
        last = next(reversed(self._failures.values()))
        told = "; ".join(_told(model, error) for model, error in self._failures.items())
        is_unknown = last.code == "model_not_found"
        waits = [error.retry_after_s for error in self._failures.values() if error.retry_after_s is not None]
        return ApiError(
            503 if is_unknown else last.status,
            "model_not_ready" if is_unknown else last.code,
            f"No model answers for `{self.alias.name}`: {told}.",
            kind="server_error" if is_unknown else last.kind,
            param=None if is_unknown else last.param,
            retry_after_s=min(waits, default=None),
            retry=last.retry,
            limit=last.limit,
        )

    def headers(self, model: str) -> Headers:
        """Return the headers of a response by this model."""
        return [(MODEL_HEADER, shown(model)), (ATTEMPTS_HEADER, b"%d" % self.tries)]

    def note_in(self, record: RequestRecord) -> None:
        """Add the facts about the walk to the record of its request."""
        record.alias, record.passed = self.alias.name, self.passed

    async def fit(self, body: RequestBody) -> RequestBody:
        """Return the body for the current model: with the members that the name sets, without those that it drops.

        That replaces the changes for an earlier model. The rest is unchanged. Raises ApiError 400.
        """
        alias, body = self.alias, body.original
        if self.model == alias.name and not alias.drop and not alias.set:
            return body
        values = body.written(alias.set)
        drop = alias.drop | (alias.set.keys() - values)  # nor may the client choose values that a form cannot have
        return await body.edited({**values, "model": body.text(self.model)}, drop)


def continue_response(
    registry: Registry, response_id: str, model: str, plan: Plan | None
) -> tuple[Plan | None, Endpoint | None]:
    """Return the plan that is left for a request that continues a response, and the only endpoint that keeps it.

    The plan is None for the name of a model, the endpoint is None where only an upstream knows. Raises ApiError 404.
    """
    if plan is None:
        found = continued_by(registry, response_id, model)
        if isinstance(found, ResponseMissing):
            raise response_missing(found, "previous_response_id")
        return None, found
    left = continued_among(registry, response_id, tuple(dict.fromkeys(plan.targets + plan.alias.models)))
    if isinstance(left, ResponseMissing):
        raise response_missing(left, "previous_response_id")
    return Plan(left[0], attrs.evolve(plan.alias, longer=None)), left[1]


def seems_too_long(registry: Registry, lengths: PromptLengths, model: str, longer: str, bytes_in: int) -> bool:
    """Return whether a prompt of this size is clearly too long for a model, by earlier prompts; 0: not measurable.

    That is only an estimate: it counts where `longer`, the model for longer prompts, is ready.
    """
    found = registry.availability(model) if bytes_in else None
    if not isinstance(found, Ready) or not isinstance(registry.availability(longer), Ready):
        return False
    return lengths.is_too_long(model, bytes_in, found.endpoints)


def reason_of(error: ApiError, *, is_external: bool, rejected: int) -> str:
    """Return the reason to go on (`config.models.REASONS`) after an error; empty if there is none.

    `is_external` says that an external route was asked last and has begun no response, `rejected` is the status of a
    response that the client did not get, or 0.
    """
    match error.code:
        case "upstream_unreachable":
            return "unreachable"
        case "model_not_ready":
            return "circuit" if error.limit == "circuit_breaker" else "not_ready"
        case "model_not_found" | "model_starting":
            return "not_ready"
        case "model_busy":
            return "busy"
        case "model_loading":
            return "loading"
        case "overloaded" if error.limit in _QUEUES:
            return "queue_full"
        case errors.CONTEXT_LENGTH_EXCEEDED:
            return TOO_LONG
        case "upstream_timeout" if is_external:
            return "timeout"
        case "upstream_failed" if is_external:
            return _reason_of_status(rejected) or "5xx"
        case _:
            return ""


def reason_of_refusal(refusal: Refusal, queue_max: float = math.inf) -> str:
    """Return the reason to go on after a refusal, before any wait; empty if there is none."""
    match refusal:
        case NotReady():
            return "circuit" if refusal.limit == "circuit_breaker" else "not_ready"
        case Unknown():
            return "not_ready"
        case Full(waiting):
            return "queue_full" if waiting >= queue_max else "busy"
        case Loadable(is_coming=True):
            return "not_ready"
        case Loadable():
            return "loading"
        case _:
            return ""


def _reason_of_status(status: int) -> str:
    return "429" if status == 429 else "5xx" if status >= 500 else ""


def passed_over(model: str, reason: str) -> ApiError:
    """Return the error of a model that is not waited for, since it is `busy`, `loading` or `not_ready` yet."""
    code, words = _PASSED_OVER[reason]
    return ApiError(503, code, f"The model `{model}` {words}.", kind="server_error", retry_after_s=1)


def shown(model: str) -> bytes:
    """Return a model's name as a header has it."""
    return model.encode() if model.isascii() else urllib.parse.quote(model).encode()


def _copy_of(error: ApiError) -> ApiError:
    return ApiError(
        error.status,
        error.code,
        error.message,
        kind=error.kind,
        param=error.param,
        retry_after_s=error.retry_after_s,
        retry=error.retry,
        limit=error.limit,
    )


def _told(model: str, error: ApiError) -> str:
    if error.code == "model_not_found":
        return f"`{model}` is not here: no worker and no external route has it"
    words = error.message.removesuffix(".")
    rest = words.removeprefix(f"The model `{model}` ")
    return f"`{model}` {rest}" if rest != words else f"`{model}`: {words}"
