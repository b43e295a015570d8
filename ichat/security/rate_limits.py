"""How much one key, or everybody together, may ask for: at once, and in any minute. Purely synchronous."""

import math
from collections import deque
from collections.abc import Mapping, Sequence

import attrs

from ichat import errors
from ichat.config.schema import Key, Limits

WINDOW_S = 60
BUSY_RETRY_S = 1
"""What a client is told to wait whose requests under way are as many as they may be."""


class Window:
    """A count over the last minute, to the second."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int]] = deque()
        self._sum = 0

    def __repr__(self) -> str:
        return f"<Window {self._sum}>"

    def add(self, count: int, now: float) -> None:
        """Count something that happened now."""
        second = int(now)
        if self._seconds and self._seconds[-1][0] == second:
            count_before = self._seconds.pop()[1]
            self._seconds.append((second, count_before + count))
        else:
            self._seconds.append((second, count))
        self._sum += count

    def sum(self, now: float) -> int:
        """Give the count of the last minute."""
        while self._seconds and self._seconds[0][0] <= now - WINDOW_S:
            self._sum -= self._seconds.popleft()[1]
        return self._sum

    def wait_s(self, limit: int, now: float) -> int:
        """Give the whole seconds until the count is below the limit, if nothing is added."""
        left = self.sum(now)
        for second, count in self._seconds:
            left -= count
            if left < limit:
                return max(1, math.ceil(second + WINDOW_S - now))
        return 1


@attrs.define(eq=False)
class Quota:
    """What one key has used, and may."""

    name: str
    """The key's; empty: everybody's together."""
    limits: Key | Limits
    in_flight: int = 0
    requests: Window = attrs.field(factory=Window)
    tokens: Window = attrs.field(factory=Window)

    @property
    def counts_tokens(self) -> bool:
        """Whether anybody must say what requests have used."""
        return self.limits.tokens_per_minute is not None

    def check(self, now: float) -> None:
        """Raise ApiError 429 where another request would be too many."""
        limits = self.limits
        if limits.max_in_flight is not None and self.in_flight >= limits.max_in_flight:
            raise self._refusal("max_in_flight", f"{limits.max_in_flight} requests at once", BUSY_RETRY_S)
        for name, window in (("requests_per_minute", self.requests), ("tokens_per_minute", self.tokens)):
            limit: int | None = getattr(limits, name)
            if limit is not None and window.sum(now) >= limit:
                words = f"{limit} {name.partition('_')[0]} a minute"
                raise self._refusal(name, words, window.wait_s(limit, now))

    def _refusal(self, limit: str, words: str, wait_s: int) -> errors.ApiError:
        if self.name:
            return errors.rate_limited(f"The key `{self.name}` may have {words}.", f"security.keys.{limit}", wait_s)
        return errors.rate_limited(f"This gateway takes {words} in all.", f"limits.{limit}", wait_s)


class Quotas:
    """Every key's quota, and that of all."""

    def __init__(self, limits: Limits, keys: Sequence[Key]) -> None:
        self._all = Quota("", limits)
        self._by_name: Mapping[str, Quota] = {key.name: Quota(key.name, key) for key in keys}

    def __repr__(self) -> str:
        return f"<Quotas of {len(self._by_name)} keys>"

    def set(self, limits: Limits, keys: Sequence[Key]) -> None:
        """Take other limits; what has been used stays used."""
        self._all.limits = limits
        known = self._by_name
        self._by_name = {key.name: known.get(key.name) or Quota(key.name, key) for key in keys}
        for key in keys:
            self._by_name[key.name].limits = key

    def _of(self, key: str) -> Sequence[Quota]:
        quota = self._by_name.get(key)
        return [self._all] if quota is None else [quota, self._all]

    def check(self, key: str, now: float) -> None:
        """Raise ApiError 429 where a request of this key ("" for none) would not be let in now."""
        for one in self._of(key):
            one.check(now)

    def acquire(self, key: str, now: float) -> "QuotaReservation":
        """Let a request of this key ("" for none) in, and count it. Raises ApiError 429."""
        self.check(key, now)
        used = self._of(key)
        for one in used:
            one.in_flight += 1
            if one.limits.requests_per_minute is not None:
                one.requests.add(1, now)
        return QuotaReservation(used)


@attrs.frozen
class QuotaReservation:
    """One request that was let in."""

    _quotas: Sequence[Quota]

    @property
    def counts_tokens(self) -> bool:
        """Whether somebody must say how many tokens it used: they have a limit, or are told by key."""
        return any(quota.name or quota.counts_tokens for quota in self._quotas)

    def release(self, tokens: int, now: float) -> None:
        """Say that it has ended, and what it used."""
        for quota in self._quotas:
            quota.in_flight -= 1
            if quota.counts_tokens and tokens:
                quota.tokens.add(tokens, now)
