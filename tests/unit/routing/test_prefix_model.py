"""The index of prefixes against a simple model of it, by properties."""

import collections
import hashlib

from hypothesis import given
from hypothesis import strategies as st

from ichat.config.schema import Routing
from ichat.http.pool import Upstream
from ichat.protocol.prefixes import BOUNDARIES
from ichat.routing.endpoint import Endpoint
from ichat.routing.prefix_chain import PrefixChain
from ichat.routing.prefix_index import HOLDERS_MAX, PrefixIndex

TTL_S = 10
WORDS = st.text("ab", min_size=1, max_size=5)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["record", "add", "discard", "begin"]), WORDS, st.integers(0, HOLDERS_MAX - 1)),
        st.tuples(st.just("wait"), WORDS, st.integers(0, 12)),
    ),
    max_size=60,
)


def chain_of(word):
    """Return the chain of a prompt that is made of letters, one for each boundary."""
    digests = [hashlib.sha1(word[: place + 1].encode()).digest()[:8] for place in range(len(word))]
    return PrefixChain(BOUNDARIES[len(word) - 1], digests)


class Model:
    """A set of holders for each digest, and in which half of the time to live it was used last."""

    def __init__(self, now):
        self.holders, self.used = collections.defaultdict(set), {}
        self.half, self.turn_at = 0, now + TTL_S / 2

    def turn(self, now):
        """Begin another half if the time has come; what was used in neither of the last two is forgotten."""
        if now >= self.turn_at:
            self.half += 2 if now >= self.turn_at + TTL_S / 2 else 1
            self.turn_at = now + TTL_S / 2
            for digest in [one for one, half in self.used.items() if self.half - half > 1]:
                del self.used[digest], self.holders[digest]

    def bytes_of(self, chain, now):
        self.turn(now)
        found = {}
        for digest, boundary in zip(chain.digests, BOUNDARIES, strict=False):
            if digest in self.used:
                self.used[digest] = self.half
                found |= dict.fromkeys(self.holders[digest], boundary)
        return found

    def add(self, chain, endpoint, now):
        self.turn(now)
        for digest in chain.digests:
            self.holders[digest].add(endpoint)
            self.used[digest] = self.half

    def discard(self, digests, endpoint):
        """Return how many of the digests the endpoint had."""
        had = [digest for digest in digests if endpoint in self.holders.get(digest, ())]
        for digest in had:
            self.holders[digest].discard(endpoint)
        return len(had)

    def begin(self, endpoint):
        self.discard(list(self.holders), endpoint)


@given(STEPS)
def test_the_index_knows_what_the_model_knows(steps):
    """After whatever was sent, reported, restarted and forgotten: the same endpoints hold the same bytes."""
    now = 1000.0
    index, model = PrefixIndex(lambda: now, Routing(prefix_ttl_s=TTL_S)), Model(now)
    endpoints = [Endpoint(Upstream(str(one), "h", 1), b"%d" % one, 10) for one in range(HOLDERS_MAX)]
    for step, word, number in steps:
        chain, endpoint = chain_of(word), endpoints[number % HOLDERS_MAX]
        if step == "record":
            match = index.match(chain)
            assert match.bytes_of == model.bytes_of(chain, now)
            assert match.deepest == max(match.bytes_of.values(), default=0)
            index.record(chain, match, endpoint)
            model.add(chain, endpoint, now)
            assert index.is_deepest(chain, endpoint)
        elif step == "add":
            index.add(chain.digests, endpoint)
            model.add(chain, endpoint, now)
        elif step == "discard":
            gone = chain.digests[number % len(chain.digests) :]
            assert index.discard(gone, endpoint) == model.discard(gone, endpoint)
        elif step == "begin":
            endpoint.begin()
            model.begin(endpoint)
        else:
            now += number
        found = index.match(chain)
        assert found.bytes_of == model.bytes_of(chain, now)
        for one in endpoints:
            deepest = [digest for digest in chain.digests if model.holders.get(digest)][-1:]
            assert index.is_deepest(chain, one) == any(one in model.holders[digest] for digest in deepest)
    assert len(index) <= len(model.used)
