"""Which endpoints are believed to have which prefixes in their engines' caches. Purely synchronous.

A prefix that the gateway has sent is believed to be there, until a worker's report or a response contradicts it. There
is no tree: each digest stands for a whole prefix, so nothing must be split or merged, and unused entries expire.

The entry of a prefix is a single integer: no garbage collection looks at it, and the digests of a request share it.

The two loops over a chain are plain. Other work empties the caches of the processor between two requests, so a few
more functions of Python's own cost more than sixteen turns of a loop.
"""

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ichat.config.schema import Routing
from ichat.protocol.prefixes import BOUNDARIES
from ichat.routing.endpoint import CacheHolder, Endpoint
from ichat.routing.prefix_chain import PrefixChain

HOLDERS_MAX = 4
"""At most this many endpoints are remembered of a prefix: the newest."""
_HOLDER_BITS, _USES_BITS = 20, 16
_HOLDERS_MASK = (1 << HOLDERS_MAX * _HOLDER_BITS) - 1
_HOLDER_MASK = (1 << _HOLDER_BITS) - 1
_USES_MAX = (1 << _USES_BITS) - 1
_FREED_MAX = 256
"""At most this many entries are freed at a time, since to free thousands of them needs milliseconds."""


class Match(NamedTuple):
    """The knowledge about a request's chain."""

    bytes_of: Mapping[Endpoint, int]
    """The bytes of each endpoint that holds any."""
    deepest: int
    """The most that one of them holds."""
    uses: int
    """How many requests had exactly this length in common with earlier requests, the older the less."""
    known: Sequence[int | None]
    """The earlier knowledge about the chain's digests, in the index' own form."""


class PrefixIndex:
    """The knowledge about prefixes by their digests: those used in the last while, and those of the while before."""

    def __init__(self, clock: Callable[[], float], settings: Routing) -> None:
        self._clock = clock
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._freed: dict[bytes, int] = {}
        """Forgotten entries, which are freed bit by bit."""
        self._holders: dict[int, CacheHolder] = {}
        self._numbers: dict[CacheHolder, int] = {}
        self._next_number = itertools.cycle(range(1, _HOLDER_MASK)).__next__
        self._turn_at = math.inf
        """When the young entries become the old entries."""
        self.reconfigure(settings)

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self)} entries>"

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def reconfigure(self, settings: Routing) -> None:
        """Use the bounds of another configuration from now on."""
        self._young_max = settings.prefix_entries_max // 2
        self._turn_s = settings.prefix_ttl_s / 2
        self._turn_at = min(self._turn_at, self._clock() + self._turn_s)

    def _turn(self, now: float) -> None:
        """Forget entries that have not been used for a while, or make room."""
        for _ in range(min(_FREED_MAX, len(self._freed))):
            self._freed.popitem()
        if now >= self._turn_at or len(self._young) >= self._young_max:
            self._freed = self._old
            self._old, self._young = self._young, {}
            if now >= self._turn_at + self._turn_s:
                self._old = {}
            self._turn_at = now + self._turn_s
            for number, holder in list(self._holders.items()):
                if holder.endpoint.holder is not holder:
                    del self._holders[number], self._numbers[holder]

    def _number_of(self, holder: CacheHolder) -> int:
        number = self._numbers.get(holder)
        if number is None:
            number = self._next_number()
            while number in self._holders:
                number = self._next_number()
            self._numbers[holder], self._holders[number] = number, holder
        return number

    def _holders_of(self, known: int) -> Iterator[CacheHolder]:
        """Yield the holders that count in the entry of a prefix."""
        known >>= _USES_BITS
        while known:
            holder = self._holders.get(known & _HOLDER_MASK)
            if holder is not None and holder.endpoint.holder is holder:
                yield holder
            known >>= _HOLDER_BITS

    def _known(self, digest: bytes) -> int | None:
        """Return the entry of a digest; an old entry becomes young again."""
        known = self._young.get(digest)
        if known is None:
            known = self._old.pop(digest, None)
            if known is not None:
                known -= (known & _USES_MAX) - (known & _USES_MAX) // 2
                self._young[digest] = known
        return known

    def match(self, chain: PrefixChain, now: float | None = None) -> Match:
        """Return the knowledge about a chain; `now` saves a look at the clock."""
        if now is None:
            now = self._clock()
        if now >= self._turn_at or len(self._young) >= self._young_max or self._freed:
            self._turn(now)
        known = list(map(self._young.get, chain.digests))
        if self._old and None in known and not self._old.keys().isdisjoint(chain.digests):
            known = list(map(self._known, chain.digests))
        found: dict[Endpoint, int] = {}
        deepest = uses = seen = 0
        if not any(known):
            return Match(found, deepest, uses, known)
        holder_of, place = self._holders.get, len(known)
        for one in reversed(known):
            place -= 1
            if one is None or one >> _USES_BITS == seen:
                continue
            seen = holders = one >> _USES_BITS
            while holders:  # as in `_holders_of`
                holder = holder_of(holders & _HOLDER_MASK)
                if holder is not None and holder.endpoint.holder is holder:
                    found.setdefault(holder.endpoint, BOUNDARIES[place])
                holders >>= _HOLDER_BITS
            if found and not deepest:
                deepest, uses = BOUNDARIES[place], one & _USES_MAX
        return Match(found, deepest, uses, known)

    def part_of(self, chain: PrefixChain) -> "PrefixIndex":
        """Return an index that knows the same of a chain, and can be asked without a change of this index."""
        part = copy.copy(self)
        part._young = {one: self._young[one] for one in chain.digests if one in self._young}
        part._old = {one: self._old[one] for one in chain.digests if one in self._old}
        part._freed, part._holders, part._numbers = {}, self._holders.copy(), self._numbers.copy()
        return part

    def is_deepest(self, chain: PrefixChain, endpoint: Endpoint) -> bool:
        """Return whether an endpoint holds as much of a chain as any, and holds any of it."""
        for digest in reversed(chain.digests):
            known = self._young.get(digest) or self._old.get(digest, 0)
            if known >> _USES_BITS:
                holders = list(self._holders_of(known))
                if holders:
                    return endpoint.holder in holders
        return False

    def record(self, chain: PrefixChain, match: Match, endpoint: Endpoint) -> None:
        """Record that an endpoint will have a whole chain, of which this was known before."""
        number = self._number_of(endpoint.holder)
        alone = number << _USES_BITS
        before, after = -1, 0
        young = self._young
        for digest, boundary, known in zip(chain.digests, BOUNDARIES, match.known, strict=False):
            if known is None:
                young[digest] = alone
                continue
            if known != before:
                before, after = known, self._with(known, number)
            if boundary == match.deepest and after & _USES_MAX < _USES_MAX:
                young[digest] = after + 1
            elif after != known:
                young[digest] = after

    def _with(self, known: int, number: int) -> int:
        """Return the entry of a prefix with another endpoint."""
        holders = known >> _USES_BITS
        while holders:
            if holders & _HOLDER_MASK == number:
                return known
            holders >>= _HOLDER_BITS
        holders = ((known >> _USES_BITS) << _HOLDER_BITS | number) & _HOLDERS_MASK
        return holders << _USES_BITS | known & _USES_MAX

    def add(self, digests: Iterable[bytes], endpoint: Endpoint) -> None:
        """Record that an endpoint has these prefixes, as its worker says."""
        self._turn(self._clock())
        number = self._number_of(endpoint.holder)
        for digest in digests:
            self._young[digest] = self._with(self._known(digest) or 0, number)

    def discard(self, digests: Iterable[bytes], endpoint: Endpoint) -> int:
        """Record that an endpoint has these prefixes no longer; return how many it was believed to have."""
        number, count = self._numbers.get(endpoint.holder), 0
        for digest in digests:
            place = self._young if digest in self._young else self._old
            known = place.get(digest, 0)
            kept = _without(known, number)
            if kept != known:
                place[digest] = kept
                count += 1
        return count


def _without(known: int, number: int | None) -> int:
    """Return the entry of a prefix without an endpoint that has it no longer."""
    holders, kept, shift = known >> _USES_BITS, 0, 0
    while holders:
        if holders & _HOLDER_MASK != number:
            kept |= (holders & _HOLDER_MASK) << shift
            shift += _HOLDER_BITS
        holders >>= _HOLDER_BITS
    return kept << _USES_BITS | known & _USES_MAX
