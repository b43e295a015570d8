"""What a worker knows of its engine's cache, against a simulated cache that stores, shares and evicts blocks."""

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st

from ichat.engines.held_prefixes import HeldBounds, HeldPrefixes
from ichat.protocol.prefixes import BOUNDARIES, REPORTED_MAX, SentChain

BLOCK_TOKENS = 8
TOKEN_BYTES = 16
"""So a block is 128 bytes, and the first boundary, 256, is the end of the second one."""


def digest_of(tokens):
    return hashlib.sha1(repr(tokens).encode(), usedforsecurity=False).digest()[:8]


def block_of(tokens):
    return int.from_bytes(digest_of(("block", *tokens)), "big")


def chain_of(tokens):
    length = len(tokens) * TOKEN_BYTES
    return SentChain(length, [digest_of(tokens[: b // TOKEN_BYTES]) for b in BOUNDARIES if b <= length])


def last_block(tokens, boundary):
    """Return the hash of the last block that ends before a boundary."""
    return block_of(tokens[: boundary // TOKEN_BYTES // BLOCK_TOKENS * BLOCK_TOKENS])


class Cache:
    """An engine's cache: the least recently used block goes first, and of one prompt the last block."""

    def __init__(self, held, blocks_max):
        self.held = held
        self.blocks_max = blocks_max
        self.blocks = {}
        """Hashes, the next one to go first."""

    def serve(self, tokens, tag):
        """Return how many blocks had to be stored for this prompt."""
        hashes = [block_of(tokens[:end]) for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)]
        hits = next((at for at, one in enumerate(hashes) if one not in self.blocks), len(hashes))
        used = [one for one in hashes if one in self.blocks]
        for one in used:
            del self.blocks[one]
        new = [one for one in hashes if one not in used]
        while len(self.blocks) + len(used) + len(new) > self.blocks_max:
            lost = next(iter(self.blocks))
            del self.blocks[lost]
            self.held.removed([lost])
        middle = hits + len(new) // 2
        for start, end in ((hits, middle), (middle, len(hashes))):  # as chunked prefill does
            self.held.stored(hashes[start:end], hashes[start - 1] if start else None, BLOCK_TOKENS, tag)
        self.blocks |= dict.fromkeys(reversed(hashes))
        return len(new)

    def clear(self):
        self.blocks.clear()
        self.held.cleared()


class Gateway:
    """What a gateway believes: all that it has sent here, but for what it is told."""

    def __init__(self, held):
        self.held = held
        self.believed = set()

    def get(self, changes):
        assert max(len(changes.have), len(changes.gone)) <= REPORTED_MAX
        if changes.cleared:
            self.believed.clear()
        self.believed |= set(changes.have)
        self.believed -= set(changes.gone)
        self.held.sent()

    def listen(self):
        while (changes := self.held.next_changes()) is not None:
            self.get(changes)


TURNS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
"""A conversation: each turn has 20 tokens, so that turns do not end where blocks do."""
STEPS = st.one_of(
    TURNS, TURNS, TURNS, TURNS,
    st.sampled_from(["clear", "restart", "take", "deliver", "fail"]),
)  # fmt: skip


@settings(max_examples=300)
@given(steps=st.lists(STEPS, max_size=40), blocks_max=st.integers(15, 40))
def test_held_prefixes_are_in_the_cache(steps, blocks_max):
    """After any sequence: nothing is held that the cache has lost, and what was stored last is held, if it is there.

    A gateway that is told of it, however late, believes that and nothing else, but for prompts of which no block had
    to be stored: of these there are no events.
    """
    held = HeldPrefixes()
    cache, gateway = Cache(held, blocks_max), Gateway(held)
    places, silent, under_way = {}, set(), None
    for step in steps:
        if step == "clear":
            cache.clear()
        elif step == "restart":
            gateway.believed.clear()
            held.report_all()
            under_way = None
        elif step == "take":
            under_way = under_way or held.next_changes()
        elif step == "deliver" and under_way:
            gateway.get(under_way)
            under_way = None
        elif step == "fail" and under_way:
            held.report_all()
            under_way = None
        elif isinstance(step, list):
            tokens = tuple(turn for turn in step for _ in range(20))
            chain = chain_of(tokens)
            gateway.believed |= set(chain.digests)
            tag = held.expect(chain, len(tokens), chain.length)
            if cache.serve(tokens, tag):
                there = {}
                for digest, boundary in zip(chain.digests, BOUNDARIES, strict=False):
                    there[digest] = places[digest] = last_block(tokens, boundary)
                assert {digest for digest, block in there.items() if block in cache.blocks} <= held.digests
            else:
                silent |= set(chain.digests)
        assert all(places[digest] in cache.blocks for digest in held.digests)
    if under_way:
        gateway.get(under_way)
    gateway.listen()
    assert held.digests <= gateway.believed
    assert gateway.believed - held.digests <= silent


def test_a_growing_conversation_is_tied_at_each_turn():
    """The next turn's event names the last block of the turn before as its parent, and its tag alone."""
    held = HeldPrefixes()
    cache = Cache(held, 1000)
    turns = [tuple(range(length)) for length in (40, 100, 400)]
    for tokens in turns:
        chain = chain_of(tokens)
        cache.serve(tokens, held.expect(chain, len(tokens), chain.length))
        assert held.digests == set(chain.digests)


def test_text_before_the_prefix_counts_by_its_share_of_the_body():
    """Of 100 tokens, 50 are those of the tools: a prefix of 800 bytes in a body of 1600 begins at token 50."""
    held = HeldPrefixes()
    tokens = tuple(range(100))
    chain = SentChain(800, [digest_of(("tools", boundary)) for boundary in (256, 512, 768)])
    tag = held.expect(chain, 100, 1600)
    hashes = [block_of(tokens[:end]) for end in range(8, 101, 8)]
    held.stored(hashes, None, 8, tag)
    held.removed(hashes[-1:])  # 88 to 96: 768 bytes end at token 98
    assert held.digests == set(chain.digests[:2])
    held.removed(hashes[9:-1])  # 72 to 88: 512 bytes end at token 82
    assert held.digests == set(chain.digests[:1])
    held.removed(hashes[8:9])  # 64 to 72: 256 bytes end at token 66
    assert held.digests == set(chain.digests[:1])
    held.removed(hashes[7:8])
    assert held.digests == set()


def test_a_block_stored_twice_is_lost_with_the_second_eviction():
    """Two equal prompts that are worked on at the same time store their blocks twice."""
    held = HeldPrefixes()
    tokens = tuple(range(32))
    chain = chain_of(tokens)
    hashes = [block_of(tokens[:end]) for end in range(8, 33, 8)]
    for _ in range(2):
        held.stored(hashes, None, 8, held.expect(chain, 32, chain.length))
    held.removed(hashes)
    assert held.digests == set(chain.digests)
    held.removed(hashes)
    assert held.digests == set()


def test_blocks_after_an_unknown_one_are_not_followed():
    """Of a block whose parent is not known, the depth is not known either."""
    held = HeldPrefixes()
    tokens = tuple(range(64))
    chain = chain_of(tokens)
    held.stored([1, 2, 3], 99, 8, held.expect(chain, 64, chain.length))
    assert held.digests == set()
    assert repr(held) == "<HeldPrefixes: 0 digests, 0 blocks, 1 awaited>"


def test_bounds():
    """Too many digests: the oldest are gone. Too many blocks: everything is. Too many requests: the oldest is given up."""
    held = HeldPrefixes(HeldBounds(digests_max=8, chains_max=2, blocks_max=40))
    cache, gateway = Cache(held, 10_000), Gateway(held)
    for first in range(5):
        tokens = (first, *range(1, 64))
        chain = chain_of(tokens)
        gateway.believed |= set(chain.digests)
        cache.serve(tokens, held.expect(chain, 64, chain.length))
    assert len(held.digests) == 8
    gateway.listen()
    assert gateway.believed == held.digests
    for _ in range(4):
        held.expect(chain, 64, chain.length)
    assert "2 awaited" in repr(held)
    cache.serve(tuple(range(1000, 1064)), None)
    assert held.digests == set()
    gateway.listen()
    assert gateway.believed == set()


def test_reports_have_a_bound():
    """A gateway that has restarted is told everything in as many reports as it takes, and then nothing more."""
    held = HeldPrefixes()
    for first in range(1500):
        chain = chain_of((first, *range(1, 64)))
        hashes = [block_of((first, *range(1, end))) for end in range(8, 65, 8)]
        held.stored(hashes, None, 8, held.expect(chain, 64, chain.length))
    assert held.next_changes() is None
    held.report_all()
    first, second = held.next_changes(), held.next_changes()
    assert (first.cleared, len(first.have), second.cleared) == (True, REPORTED_MAX, False)
    assert {*first.have, *second.have} == held.digests
    assert held.next_changes() is None
