"""How much each key, and all together, may ask for: at once, and in any minute. Purely synchronous."""

import math
from collections import deque
from collections.abc import Mapping, Sequence

import attrs

from ichat.config.schema import Config, Key, Limits

WINDOW_S = 60
BUSY_RETRY_S = 1
"""When it is worth asking again with as many requests in flight as allowed."""


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
        """Return the count of the last minute."""
        while self._seconds and self._seconds[0][0] <= now - WINDOW_S:
            self._sum -= self._seconds.popleft()[1]
        return self._sum

    def wait_s(self, limit: int, now: float) -> int:
        """Return the whole seconds until the count is below the limit, if nothing is added."""
        left = self.sum(now)
        for second, count in self._seconds:
            left -= count
            if left < limit:
                return max(1, math.ceil(second + WINDOW_S - now))
        return 1


@attrs.frozen
class QuotaRefusal:
    """The limit that a request would exceed."""

    key_name: str
    """The key that has the limit; empty if all requests together have it."""
    limit: str
    """Its name in the configuration."""
    allowed: int
    wait_s: int
    """When it is worth asking again."""


@attrs.define(eq=False)
class Quota:
    """What one key has used, and may."""

    name: str
    """The key's; empty: of all requests together."""
    limits: Key | Limits
    in_flight: int = 0
    requests: Window = attrs.field(factory=Window)
    tokens: Window = attrs.field(factory=Window)

    @property
    def counts_tokens(self) -> bool:
        """Whether the tokens of requests must be counted."""
        return self.limits.tokens_per_minute is not None

    def refusal(self, now: float) -> QuotaRefusal | None:
        """Return why another request would be too many, if it would."""
        limits = self.limits
        if limits.max_in_flight is not None and self.in_flight >= limits.max_in_flight:
            return QuotaRefusal(self.name, "max_in_flight", limits.max_in_flight, BUSY_RETRY_S)
        for limit, allowed, window in (
            ("requests_per_minute", limits.requests_per_minute, self.requests),
            ("tokens_per_minute", limits.tokens_per_minute, self.tokens),
        ):
            if allowed is not None and window.sum(now) >= allowed:
                return QuotaRefusal(self.name, limit, allowed, window.wait_s(allowed, now))
        return None


class Quotas:
    """Every key's quota, and that of all."""

    def __init__(self, limits: Limits, keys: Sequence[Key]) -> None:
        self._all = Quota("", limits)
        self._by_name: Mapping[str, Quota] = {key.name: Quota(key.name, key) for key in keys}

    def __repr__(self) -> str:
        return f"<Quotas of {len(self._by_name)} keys>"

    def reconfigure(self, config: Config) -> None:
        """Use the limits of another configuration; what has been used stays used."""
        self._all.limits = config.limits
        known, keys = self._by_name, config.security.keys
        self._by_name = {key.name: known.get(key.name) or Quota(key.name, key) for key in keys}
        for key in keys:
            self._by_name[key.name].limits = key

    def _of(self, key: str) -> Sequence[Quota]:
        quota = self._by_name.get(key)
        return [self._all] if quota is None else [quota, self._all]

    def refusal(self, key: str, now: float) -> QuotaRefusal | None:
        """Return why a request of this key ("" for none) would be refused now, if it would."""
        for one in self._of(key):
            refusal = one.refusal(now)
            if refusal is not None:
                return refusal
        return None

    def acquire(self, key: str, now: float) -> "QuotaReservation | QuotaRefusal":
        """Count a request of this key ("" for none), or return why it is refused."""
        refusal = self.refusal(key, now)
        if refusal is not None:
            return refusal
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
        """Whether its tokens must be counted: they have a limit, or are shown by key."""
        return any(quota.name or quota.counts_tokens for quota in self._quotas)

    def release(self, tokens: int, now: float) -> None:
        """Record its end, and what it used."""
        for quota in self._quotas:
            quota.in_flight -= 1
            if quota.counts_tokens and tokens:
                quota.tokens.add(tokens, now)
