"""The client's view of a refusal: the values of the domain become errors with a status here."""

import time
from collections.abc import Callable, Iterable

import attrs

from ichat import errors
from ichat.errors import ApiError
from ichat.fleet.responses import ResponseMissing
from ichat.http.body_mover import COMMENT_BYTES_MAX
from ichat.routing.availability import Draining, Full, Loadable, NotReady, QueueTimeout, Refusal
from ichat.routing.balancer import RETRY_AFTER_S
from ichat.security.period_limits import PeriodStanding
from ichat.security.rate_limits import QuotaRefusal

_COMMENT_BYTES_MAX = COMMENT_BYTES_MAX - 16
"""For the words of a comment, in a chunk."""
_NAME_BYTES_MAX = 72
"""Bytes of a model's name in a comment, at most."""
LOAD_RETRY_S = 5
"""The Retry-After of a request for a model that is loaded now, if the duration of the load is not known."""


@attrs.frozen
class WaitBound:
    """How long a request may wait for a lease."""

    name: str
    """The key of `[timeouts]` that sets it."""
    seconds: float


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
