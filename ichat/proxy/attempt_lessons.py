"""The lessons of an attempt: about the endpoint, its cache of prefixes, and the lengths of prompts.

An engine that has just answered has the whole prompt in its cache. So a single wrong guess is no reason to send the
next request of the kind elsewhere. An engine that keeps nothing shows it by being wrong again and again.
"""

import logging
from bisect import bisect_right

import trio

from ichat.protocol.prefixes import BOUNDARIES
from ichat.proxy.context import GatewayContext
from ichat.proxy.steps import AttemptStep, Outcome
from ichat.routing.circuit_breaker import FAILED_STATUSES
from ichat.routing.endpoint import Endpoint
from ichat.routing.prefix_chain import PrefixChain
from ichat.routing.prefix_index import PrefixIndex

log = logging.getLogger(__name__)

WRONG_MAX = 8
"""After this many wrong matches of an endpoint in a row, stop recording the prefixes that it gets."""


def learn_failure(
    context: GatewayContext, endpoint: Endpoint, step: AttemptStep, outcome: Outcome, prefix: PrefixChain | None
) -> None:
    """Record that an endpoint has not answered a request with this prefix, or not to the end."""
    kind, now = outcome.kind, trio.current_time()
    _log_failure(endpoint, outcome)
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


def held(matched: int, length: int, prompt_tokens: int, cached_tokens: int) -> int | None:
    """Return how many digests of a chain were in a cache, if that is far less than was expected; else None.

    `matched` of the prefix' `length` bytes were expected. Far less is less than half of that, and by a boundary: tokens
    are not bytes, and an engine keeps whole blocks of them.
    """
    told = length * min(cached_tokens, prompt_tokens) // max(1, prompt_tokens)
    count = bisect_right(BOUNDARIES, told)
    return count if told < matched / 2 and count < bisect_right(BOUNDARIES, matched) else None


def correct(index: PrefixIndex, chain: PrefixChain, endpoint: Endpoint, prompt_tokens: int, cached_tokens: int) -> None:
    """Compare the expectation, of a chain that was matched, with the report of a prompt's tokens."""
    count = held(chain.matched, chain.length, prompt_tokens, cached_tokens)
    wrong = endpoint.holder.record_match(is_wrong=count is not None)
    if count is None:
        return
    chain.was_wrong = True
    if wrong >= WRONG_MAX:
        index.discard(chain.digests[count:], endpoint)


def take_back(index: PrefixIndex, chain: PrefixChain, endpoint: Endpoint) -> None:
    """Record that an endpoint has not worked on a request after all: only its earlier prefixes are believed there."""
    index.discard(chain.digests[bisect_right(BOUNDARIES, chain.matched) :], endpoint)


def record_failure(endpoint: Endpoint, *, answers: bool = False) -> None:
    """Record that an endpoint has failed with a request; `answers` says that there was a response."""
    circuit = endpoint.circuit
    if circuit.record_failure(trio.current_time(), answers=answers):
        log.warning("%s has failed %d times in a row: its circuit opens", endpoint.upstream.name, circuit.failures)


def _log_failure(endpoint: Endpoint, outcome: Outcome) -> None:
    kind, name = outcome.kind, endpoint.upstream.name
    if kind in ("unreachable", "declined") and outcome.failure is not None:
        log.warning("%s", outcome.failure.message)
    elif kind in ("broken", "late", "cut") or (kind == "rejected" and outcome.status == 401):
        log.warning("%s failed with this request: %s", name, outcome.why)


def note_lost_usage(endpoint: Endpoint) -> None:
    """Log, once for each start of a worker, that a whole stream arrived without the tokens that it used."""
    if endpoint.lose_usage():
        log.warning(
            "%s reports the tokens of each request, and a whole stream came without them: a proxy on the way may"
            " drop trailers. The tokens of its streams are only estimated",
            endpoint.upstream.name,
        )
