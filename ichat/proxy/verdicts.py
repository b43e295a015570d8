"""The lessons of an attempt: whether its endpoint works, what its cache held, and how long prompts are. Synchronous.

An engine that has just answered has the whole prompt in its cache. So a single wrong guess is no reason to send the
next request of the kind elsewhere. An engine that keeps nothing shows it by being wrong again and again.
"""

import logging
from bisect import bisect_right

import trio

from ichat.protocol.prefixes import BOUNDARIES
from ichat.proxy.context import GatewayContext
from ichat.proxy.progress import RequestProgress
from ichat.proxy.steps import AttemptStep, Outcome
from ichat.proxy.token_usage import ReportedUsage
from ichat.routing.circuit_breaker import FAILED_STATUSES
from ichat.routing.endpoint import Endpoint
from ichat.routing.prefix_chain import PrefixChain
from ichat.routing.prefix_index import PrefixIndex

log = logging.getLogger(__name__)

WRONG_MAX = 8
"""After this many wrong matches of an endpoint in a row, stop recording the prefixes that it gets."""


def held(matched: int, length: int, prompt_tokens: int, cached_tokens: int) -> int | None:
    """Return how many digests of a chain were in a cache, if that is far less than was expected; else None.

    `matched` of the prefix' `length` bytes were expected. Far less is less than half of that, and by a boundary: tokens
    are not bytes, and an engine keeps whole blocks of them.
    """
    told = length * min(cached_tokens, prompt_tokens) // max(1, prompt_tokens)
    count = bisect_right(BOUNDARIES, told)
    return count if told < matched / 2 and count < bisect_right(BOUNDARIES, matched) else None


def correct(index: PrefixIndex, chain: PrefixChain, endpoint: Endpoint, prompt_tokens: int, cached_tokens: int) -> None:
    """Compare the expectation with the report of a prompt's tokens."""
    if not chain.matched:
        return
    count = held(chain.matched, chain.length, prompt_tokens, cached_tokens)
    if count is None:
        endpoint.holder.wrong = 0
        return
    chain.was_wrong = True
    endpoint.holder.wrong += 1
    if endpoint.holder.wrong >= WRONG_MAX:
        index.discard(chain.digests[count:], endpoint)


def take_back(index: PrefixIndex, chain: PrefixChain, endpoint: Endpoint) -> None:
    """Record that an endpoint has not worked on a request after all: only its earlier prefixes are believed there."""
    index.discard(chain.digests[bisect_right(BOUNDARIES, chain.matched) :], endpoint)


def note_failure(
    context: GatewayContext, progress: RequestProgress, endpoint: Endpoint, step: AttemptStep, outcome: Outcome
) -> None:
    """Record that an endpoint has not answered a request, or not to the end."""
    kind, now, prefix = outcome.kind, trio.current_time(), progress.prefix
    _log_failure(progress, endpoint, outcome)
    if kind in ("unreachable", "declined", "too_long") and prefix is not None:
        take_back(context.balancer.prefixes, prefix, endpoint)
    match kind:
        case "unreachable":
            endpoint.fail(now)
            record_failure(endpoint)
        case "declined":
            endpoint.fail(now, outcome.why)
        case "too_long":
            endpoint.circuit.record_success()
        case "rejected" if outcome.status in FAILED_STATUSES and not step.is_again:  # a request fails it only once
            record_failure(endpoint, answers=True)
        case "broken" | "late" | "cut" if outcome.status not in FAILED_STATUSES:  # else that was recorded
            record_failure(endpoint)
        case _:
            pass


def _log_failure(progress: RequestProgress, endpoint: Endpoint, outcome: Outcome) -> None:
    kind, name = outcome.kind, endpoint.upstream.name
    if kind in ("unreachable", "declined") and outcome.failure is not None:
        log.warning("%s", outcome.failure.message)
    elif kind in ("broken", "late", "cut") or (kind == "rejected" and outcome.status == 401):
        log.warning("%s failed with request %s: %s", name, progress.request.id.decode(), outcome.why)


def record_failure(endpoint: Endpoint, *, answers: bool = False) -> None:
    """Record that an endpoint has failed with a request; `answers` says that there was a response."""
    circuit = endpoint.circuit
    if circuit.record_failure(trio.current_time(), answers=answers):
        log.warning("%s has failed %d times in a row: its circuit opens", endpoint.upstream.name, circuit.failures)


def learn_from(context: GatewayContext, progress: RequestProgress, endpoint: Endpoint) -> None:
    """Record that a response has arrived whole, and learn from the tokens that it has reported, if it has any."""
    leg = progress.leg
    if leg is None:
        return
    if leg.status not in FAILED_STATUSES:
        endpoint.circuit.record_success()
    usage, prefix = leg.usage, progress.prefix
    if usage is None or leg.status >= 400:
        return
    said = usage.said()
    if said is None:
        if leg.is_stream and isinstance(usage, ReportedUsage) and not usage.has_arrived:
            _note_lost_usage(endpoint, progress.path)
        return
    if not progress.client.has_left:
        progress.usage = said
    if prefix is not None and said.input and usage.tells_cached:
        correct(context.balancer.prefixes, prefix, endpoint, said.input, said.cached)
    if progress.prompt_bytes:
        context.prompt_lengths.learn(progress.model, progress.prompt_bytes, said.input)


def _note_lost_usage(endpoint: Endpoint, path: bytes) -> None:
    """Log, once for each start of a worker, that a whole stream arrived without the tokens that it used."""
    if not endpoint.is_usage_lost and path.endswith(b"/completions"):
        endpoint.is_usage_lost = True
        log.warning(
            "%s reports the tokens of each request, and a whole stream came without them: a proxy on the way may"
            " drop trailers. The tokens of its streams are only estimated",
            endpoint.upstream.name,
        )
