"""A response's report of the engine's cache, and the belief when its endpoint was chosen. Purely synchronous.

An engine that has just answered has the whole prompt in its cache. So a single wrong guess is no reason to send the
next request of the kind elsewhere. An engine that keeps nothing shows it by being wrong again and again.
"""

from bisect import bisect_right

from ichat.protocol.prefixes import BOUNDARIES
from ichat.routing.endpoint import Endpoint
from ichat.routing.prefix_chain import PrefixChain
from ichat.routing.prefix_index import PrefixIndex

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
    wrong = endpoint.holder.record_match(is_wrong=count is not None)
    if count is None:
        return
    chain.was_wrong = True
    if wrong >= WRONG_MAX:
        index.discard(chain.digests[count:], endpoint)


def take_back(index: PrefixIndex, chain: PrefixChain, endpoint: Endpoint) -> None:
    """Record that an endpoint has not worked on a request after all: only its earlier prefixes are believed there."""
    index.discard(chain.digests[bisect_right(BOUNDARIES, chain.matched) :], endpoint)
