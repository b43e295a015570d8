"""The client's view of a refusal or a wait: values of the domain become errors, or comments in a stream."""

import time
from collections.abc import Callable, Iterable, Sequence

import attrs
import trio

from ichat import errors
from ichat.config.schema import Timeouts
from ichat.errors import ApiError
from ichat.fleet.fleet_view import DirectoryView
from ichat.fleet.responses import ResponseMissing
from ichat.http.body_mover import COMMENT_BYTES_MAX
from ichat.protocol.load_story import story_of
from ichat.routing.availability import Draining, Full, Loadable, NotReady, QueueTimeout, Refusal
from ichat.routing.choice import RETRY_AFTER_S
from ichat.security.period_limits import PeriodStanding
from ichat.security.rate_limits import QuotaRefusal

LOAD_RETRY_S = 5
"""The Retry-After of a request for a model that is loaded now, if the duration of the load is not known."""

_COMMENT_BYTES_MAX = COMMENT_BYTES_MAX - 16
"""For the words of a comment, in a chunk."""
_NAME_BYTES_MAX = 72
"""Bytes of a model's name in a comment, at most."""


@attrs.frozen
class Failure:
    """The error that a client gets if the request goes no further; see `ApiError`."""

    status: int
    code: str
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    retry_after_s: int | None = None
    retry: bool | None = None
    limit: str = ""
    allow: str = ""

    @classmethod
    def of(cls, error: ApiError) -> "Failure":
        """Return the facts of an error, without its traceback."""
        return cls(
            error.status, error.code, error.message, error.kind, error.param, error.retry_after_s, error.retry,
            error.limit, error.allow,
        )  # fmt: skip

    def error(self) -> ApiError:
        """Return it as an exception, for the edge."""
        return ApiError(
            self.status, self.code, self.message, kind=self.kind, param=self.param, retry_after_s=self.retry_after_s,
            retry=self.retry, limit=self.limit, allow=self.allow,
        )  # fmt: skip


@attrs.frozen
class WaitBound:
    """How long a request may wait for a lease."""

    name: str
    """The key of `[timeouts]` that sets it."""
    seconds: float

    @classmethod
    def of_load(cls, load: Loadable, timeouts: Timeouts) -> "WaitBound":
        """Return how long a request may wait for a load."""
        if load.is_coming:
            return cls("restart_wait_s", timeouts.restart_wait_s)
        return cls("load_wait_s", timeouts.load_wait_s)


def no_lease(
    refusal: Refusal, model: str, known: Callable[[], Iterable[str]], bound: WaitBound, now: float
) -> ApiError:
    """Return the error of a request for a model that got no lease; `known` returns the models that there are.

    It says in which state the model is. Why that is so may name arguments and paths, and is for operators only.
    """
    match refusal:
        case Full(waiting):
            return errors.queue_full(model, waiting, RETRY_AFTER_S)
        case Loadable():
            why = f"{refusal.told}; the request has waited for {bound.seconds:g} s"
            return errors.model_not_ready(model, why, refusal.rest_s(now) or LOAD_RETRY_S, f"timeouts.{bound.name}")
        case NotReady(_, retry_after_s, limit):
            return errors.model_not_ready(model, refusal.told, retry_after_s, limit)
        case Draining():
            return errors.draining()
        case QueueTimeout():
            return errors.queue_timeout(model, bound.seconds, RETRY_AFTER_S, f"timeouts.{bound.name}")
        case _:
            return errors.model_not_found(model, known())


def response_missing(missing: ResponseMissing, param: str | None = None) -> ApiError:
    """Return the error of a request about a response that no worker keeps."""
    return errors.response_not_found(missing.response_id, missing.reason, param)


def over_limit(refusal: QuotaRefusal) -> ApiError:
    """Return the error of a request that is over a limit."""
    limit, name = refusal.limit, refusal.key_name
    if refusal.period is not None:
        return _over_period(refusal.period, name, refusal.wait_s)
    words = f"{refusal.allowed} {limit.partition('_')[0]} a minute"
    if limit == "max_in_flight":
        words = f"{refusal.allowed} requests at once"
    if name:
        return errors.rate_limited(f"The key `{name}` may have {words}.", f"security.keys.{limit}", refusal.wait_s)
    return errors.rate_limited(f"This gateway takes {words} in all.", f"limits.{limit}", refusal.wait_s)


def _over_period(period: PeriodStanding, name: str, wait_s: int) -> ApiError:
    """Return the error of a request beyond a limit for a day or a month."""
    unit, _, span = period.limit.partition("_per_")
    allowed, used = _amount(period.allowed), _amount(period.used)
    what = f"{allowed} tokens" if unit == "tokens" else f"a budget of {allowed}"
    ends = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(period.ends_at))
    who = f"The key `{name}` has" if name else "This gateway has in all"
    message = f"{who} {what} a {span}, and has used {used}: it begins anew at {ends}."
    where = f"security.keys.{period.limit}" if name else f"limits.{period.limit}"
    return errors.insufficient_quota(message, where, wait_s)


def _amount(number: float) -> str:
    """Return a number of tokens, or an amount of money, as a sentence has it."""
    return f"{number:,.4f}".rstrip("0").rstrip(".")


def failure_of_all(name: str, failures: Sequence[tuple[str, Failure]]) -> Failure:
    """Return the error of a request for `name` that no model has answered: the last model's, with the words of all."""
    _, last = failures[-1]
    is_unknown = last.code == "model_not_found"
    if len(failures) == 1 and not is_unknown:
        return last
    told = "; ".join(_told(model, one) for model, one in failures)
    waits = [one.retry_after_s for _, one in failures if one.retry_after_s is not None]
    message = f"No model answers for `{name}`: {told}."
    last = attrs.evolve(last, message=message, retry_after_s=min(waits, default=None))
    if is_unknown:
        return attrs.evolve(last, status=503, code="model_not_ready", kind="server_error", param=None)
    return last


def _told(model: str, failure: Failure) -> str:
    if failure.code == "model_not_found":
        return f"`{model}` is not here: no worker and no external route has it"
    words = failure.message.removesuffix(".")
    rest = words.removeprefix(f"The model `{model}` ")
    return f"`{model}` {rest}" if rest != words else f"`{model}`: {words}"


def load_comment_of(directory: DirectoryView, model: str) -> bytes:
    """Return the comment for a stream that waits for a model now."""
    now = trio.current_time()
    found, story = directory.availability(model), directory.story(model, now)
    words = found.words(now) if isinstance(found, Loadable) else ""
    return load_comment(model, words if story is None else story_of(story))


def load_comment(model: str, words: str) -> bytes:
    """Return the comment for a stream that waits for a model: the worker's current work, and its expected duration.

    It has at most `body_mover.COMMENT_BYTES_MAX` with what stands around it.
    """
    head = f"loading {_cut(model, _NAME_BYTES_MAX)}"
    left = _COMMENT_BYTES_MAX - len(f"{head}: ".encode())
    words = _cut("".join(character if character.isprintable() else "?" for character in words), left)
    return f"{head}{f': {words}' if words else ''}".encode()


def _cut(text: str, bytes_max: int) -> str:
    return text.encode()[: max(0, bytes_max)].decode(errors="ignore")
