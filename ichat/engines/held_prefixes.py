"""Which prefixes an engine's cache holds: the gateway's digests, tied to the cache's blocks by the engine's events.

The gateway sends the chain of a request, and the engine says which blocks it stores for that request. So each digest
is tied to a single block, the last that ends before its boundary, and is held for as long as that block is there. The
place of a boundary among the prompt's tokens is estimated from its place among the bytes. No tokens are needed here.
"""

import itertools
import threading
from collections.abc import Iterator, Sequence

import attrs

from ichat.protocol.prefixes import BOUNDARIES, REPORTED_MAX, SentChain

RECENT_MAX = 2 * REPORTED_MAX
"""Digests that were just reported as gone, which are reported again once they are held."""


@attrs.frozen
class HeldBounds:
    """The most things that are followed."""

    blocks_max: int = 1_000_000
    """More blocks than this are not followed: then everything is forgotten."""
    chains_max: int = 1024
    """The most requests that await their blocks; beyond that the oldest is given up."""
    digests_max: int = 65_536
    """Digests that are tied to blocks; the oldest is reported as gone."""


BOUNDS = HeldBounds()


class _Block:
    """A block of the cache; engines may have it more than once."""

    __slots__ = ("copies", "depth", "digests", "hash", "parent")

    def __init__(self, hash_: int | bytes, parent: "_Block | None", depth: int) -> None:
        self.hash = hash_
        self.parent = parent
        self.depth = depth
        """The tokens of the prompt up to its end."""
        self.copies = 0
        self.digests: list[bytes] = []


@attrs.define
class _Chain:
    """The chain of a request, and how much of it is tied."""

    digests: Sequence[bytes]
    prefix_bytes: int
    body_bytes: int
    prompt_tokens: int
    round: int
    """The round of reports that the gateway had received when the request arrived."""
    tied: int = 0

    def tokens_of_next(self) -> int:
        """Return how many tokens are before the boundary of the next digest."""
        rest_bytes = self.prefix_bytes - BOUNDARIES[self.tied]
        return self.prompt_tokens * (self.body_bytes - rest_bytes) // self.body_bytes


@attrs.frozen
class CacheChanges:
    """The changes that will be reported to the gateway, as in `PrefixReport`."""

    cleared: bool
    have: Sequence[bytes]
    gone: Sequence[bytes]


class HeldPrefixes:
    """The prefixes that the cache holds, by the engine's events. Its methods may be called in any thread."""

    def __init__(self, bounds: HeldBounds = BOUNDS) -> None:
        self._bounds = bounds
        self._lock = threading.Lock()
        self._blocks: dict[int | bytes, _Block] = {}
        self._tied: dict[bytes, _Block] = {}
        self._chains: dict[str, _Chain] = {}
        self._tags = itertools.count(1)
        self._have: dict[bytes, None] = {}
        """Digests that must be reported as held; the gateway knows or believes the rest."""
        self._gone: dict[bytes, None] = {}
        self._recent: dict[bytes, None] = {}
        """Digests last reported as gone. A request may have arrived meanwhile, so they are reported again when held."""
        self.reports = 0
        """How many reports the gateway has received."""
        self._cleared = False
        """Whether the next report begins anew."""
        self._round = 0
        self._is_asleep = False
        self._is_clearing = False
        """Whether such a report is on its way: it may erase the notes that the gateway makes meanwhile."""

    def __repr__(self) -> str:
        return f"<HeldPrefixes: {len(self._tied)} digests, {len(self._blocks)} blocks, {len(self._chains)} awaited>"

    def __len__(self) -> int:
        """Return the number of digests of prefixes that the cache holds."""
        return len(self._tied)

    @property
    def digests(self) -> set[bytes]:
        """The digests of the prefixes that the cache holds."""
        with self._lock:
            return set(self._tied)

    def expect(self, chain: SentChain, prompt_tokens: int, body_bytes: int) -> str:
        """Return the tag for the events of a request with this chain and `prompt_tokens` tokens.

        The prefix is the end of the prompt: the text before it (tools, a template) has tokens too, by its share
        of the body.
        """
        with self._lock:
            tag = f"{next(self._tags):x}"
            whole = max(body_bytes, chain.length, 1)
            self._chains[tag] = _Chain(chain.digests, chain.length, whole, prompt_tokens, self._round)
            if len(self._chains) > self._bounds.chains_max:
                del self._chains[next(iter(self._chains))]
            return tag

    def stored(
        self, hashes: Sequence[int | bytes], parent: int | bytes | None, block_tokens: int, tag: str | None
    ) -> None:
        """Note blocks that follow each other, stored for the request with this tag."""
        with self._lock:
            block = None if parent is None else self._blocks.get(parent)
            if self._is_asleep or not hashes or (parent is not None and block is None):
                return  # of what follows an unknown block, the depth is unknown
            for hash_ in hashes:
                known = self._blocks.get(hash_)
                if known is None:
                    depth = block_tokens + (0 if block is None else block.depth)
                    known = self._blocks[hash_] = _Block(hash_, block, depth)
                known.copies += 1
                block = known
            if len(self._blocks) > self._bounds.blocks_max:
                self._forget()
            elif tag is not None and block is not None and (chain := self._chains.get(tag)) is not None:
                self._tie(chain, block, block_tokens)
                if chain.tied == len(chain.digests):
                    del self._chains[tag]

    def removed(self, hashes: Sequence[int | bytes]) -> None:
        """Note that the cache has lost these blocks, once each."""
        with self._lock:
            for hash_ in hashes:
                block = self._blocks.get(hash_)
                if block is None:
                    continue
                block.copies -= 1
                if block.copies:
                    continue
                del self._blocks[hash_]
                for digest in block.digests:
                    del self._tied[digest]
                    self._have.pop(digest, None)
                    self._gone[digest] = None
            if len(self._gone) > self._bounds.digests_max:
                self._cleared = True

    def cleared(self) -> None:
        """Note that the cache is empty, or that its contents are no longer known."""
        with self._lock:
            self._forget()

    def set_asleep(self, *, is_asleep: bool) -> None:
        """Note that the cache is empty, and stays so while the engine sleeps: late events are from before the sleep."""
        with self._lock:
            self._is_asleep = is_asleep
            self._forget()

    def report_all(self) -> None:
        """Report everything anew: the gateway knows nothing."""
        with self._lock:
            self._cleared = True

    def next_changes(self) -> CacheChanges | None:
        """Return the changes to report next, or None; `sent` follows, or `report_all` if the report failed."""
        with self._lock:
            cleared, self._cleared = self._cleared, False
            if cleared:
                self._is_clearing = True
                self._have = dict.fromkeys(self._tied)
                self._gone.clear()
                self._recent.clear()
            have, gone = _taken(self._have), _taken(self._gone)
            if not (cleared or have or gone):
                return None
            self._recent.update(dict.fromkeys(gone))
            for digest in list(itertools.islice(self._recent, max(0, len(self._recent) - RECENT_MAX))):
                del self._recent[digest]
            return CacheChanges(cleared, have, gone)

    def sent(self) -> None:
        """Called when the gateway has received the result of `next_changes`."""
        with self._lock:
            self.reports += 1
            if self._is_clearing:
                self._is_clearing = False
                self._round += 1

    def _tie(self, chain: _Chain, last: _Block, block_tokens: int) -> None:
        """Tie the digests of which no later block could end before the boundary."""
        due: list[tuple[int, bytes]] = []
        while chain.tied < len(chain.digests) and (tokens := chain.tokens_of_next()) < last.depth + block_tokens:
            if (digest := chain.digests[chain.tied]) not in self._tied:
                due.append((tokens, digest))
            chain.tied += 1
        for block, digest in _places(due, last):
            if self._blocks.get(block.hash) is not block:
                continue
            block.digests.append(digest)
            self._tied[digest] = block
            is_known = digest not in self._recent and chain.round == self._round and not self._is_clearing
            self._recent.pop(digest, None)
            self._gone.pop(digest, None)
            if not is_known:
                self._have[digest] = None
        while len(self._tied) > self._bounds.digests_max:
            digest, block = next(iter(self._tied.items()))
            del self._tied[digest]
            block.digests.remove(digest)
            self._have.pop(digest, None)
            self._gone[digest] = None

    def _forget(self) -> None:
        self._blocks.clear()
        self._tied.clear()
        self._have.clear()
        self._gone.clear()
        self._cleared = True


def _places(due: Sequence[tuple[int, bytes]], last: _Block) -> Iterator[tuple[_Block, bytes]]:
    """Return each digest with the last block that ends before its boundary, or the first block; the deepest first."""
    block = last
    for tokens, digest in reversed(due):
        while block.parent is not None and block.depth > tokens:
            block = block.parent
        yield block, digest


def _taken(digests: dict[bytes, None]) -> list[bytes]:
    """Remove and return the first digests, as many as a report may have."""
    taken = list(itertools.islice(digests, REPORTED_MAX))
    for digest in taken:
        del digests[digest]
    return taken
