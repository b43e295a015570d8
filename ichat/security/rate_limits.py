"""How much each key, and all together, may ask for: at once, in any minute, in a day and a month.

Purely synchronous.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import attrs

from ichat.config.schema import Config, Key, Limits
from ichat.config.usage import Prices
from ichat.protocol.usage import UsedTokens
from ichat.security.period_limits import ModelTokens, PeriodStanding, Spending, by_key, has_period_limit

WINDOW_S = 60
BUSY_RETRY_S = 1
"""When it is worth asking again with as many requests in flight as allowed."""


class Window:
    """A count over the last minute, to the second."""

    def __init__(self) -> None:
        self._seconds: deque[list[int]] = deque()
        """Seconds, each with its count."""
        self._newest = [-1, 0]
        self._sum = 0

    def __repr__(self) -> str:
        return f"<Window {self._sum}>"

    def add(self, count: int, now: float) -> None:
        """Count something that happened now."""
        newest, second = self._newest, int(now)
        if newest[0] != second:
            newest = self._newest = [second, 0]
            self._seconds.append(newest)
        newest[1] += count
        self._sum += count

    def ages(self, now: float) -> list[tuple[float, int]]:
        """Return how many seconds ago each second of the last minute began, with its count."""
        self.sum(now)
        return [(now - second, count) for second, count in self._seconds]

    @classmethod
    def of_ages(cls, ages: Iterable[tuple[float, int]], now: float) -> "Window":
        """Return a window of another process. A count ends up to a second later than there, and never earlier."""
        window, counts = cls(), Counter[int]()
        for age_s, count in ages:
            counts[math.ceil(now - age_s)] += count
        window.restore(counts)
        return window

    def restore(self, counts: Counter[int]) -> None:
        """Add the counts of earlier seconds."""
        seconds = +counts
        for second, count in self._seconds:
            seconds[second] += count
        self._seconds = deque([second, count] for second, count in sorted(seconds.items()))
        self._newest = self._seconds[-1] if self._seconds else [-1, 0]
        self._sum = seconds.total()

    def sum(self, now: float) -> int:
        """Return the count of the last minute."""
        seconds, since = self._seconds, now - WINDOW_S
        while seconds and seconds[0][0] <= since:
            self._sum -= seconds.popleft()[1]
        return self._sum

    def wait_s(self, limit: int, now: float) -> int:
        """Return the whole seconds until the count is below the limit, if nothing is added."""
        left = self.sum(now)
        for second, count in self._seconds:
            left -= count
            if left < limit:
                return max(1, math.ceil(second + WINDOW_S - now))
        return 1


class EarlierUse(NamedTuple):
    """The use of a key in a second, as an earlier process counted it."""

    second: int
    """By the clock of the limits in this process."""
    key: str
    """Its name; empty for requests without a key."""
    requests: int
    tokens: int


class SpendingRecord(Protocol):
    """The record of a request, as far as limits read it (`observability.request_record`)."""

    key_name: str
    """The name of the client's key; empty if it has none."""
    model: str
    """The model that answered."""
    usage: UsedTokens | None
    """The tokens that it used; None where nothing is known of them."""


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
    period: PeriodStanding | None = None
    """The use so far, if the limit is for a day or a month."""


@attrs.define(eq=False)
class Quota:
    """The use and the limits of a single key."""

    name: str
    """The key's; empty: of all requests together."""
    limits: Key | Limits
    in_flight: int = 0
    used_at: float | None = None
    """When its newest request was let in; None: it had none."""
    requests: Window = attrs.field(factory=Window)
    tokens: Window = attrs.field(factory=Window)
    spending: Spending | None = None
    """The use in the day and the month, if they have limits."""

    def refusal(self, now: float) -> QuotaRefusal | None:
        """Return why another request would be too many, if it would."""
        limits = self.limits
        allowed = limits.max_in_flight
        if allowed is not None and self.in_flight >= allowed:
            return QuotaRefusal(self.name, "max_in_flight", allowed, BUSY_RETRY_S)
        allowed = limits.requests_per_minute
        if allowed is not None and self.requests.sum(now) >= allowed:
            return QuotaRefusal(self.name, "requests_per_minute", allowed, self.requests.wait_s(allowed, now))
        allowed = limits.tokens_per_minute
        if allowed is not None and self.tokens.sum(now) >= allowed:
            return QuotaRefusal(self.name, "tokens_per_minute", allowed, self.tokens.wait_s(allowed, now))
        return None if self.spending is None else self._period_refusal(self.spending)

    def _period_refusal(self, spending: Spending) -> QuotaRefusal | None:
        over = spending.exceeded(self.limits)
        if over is None:
            return None
        wait_s = max(1, math.ceil(over.ends_at - spending.wall()))
        return QuotaRefusal(self.name, over.limit, int(over.allowed), wait_s, over)


class Quotas:
    """Every key's quota, and that of all."""

    def __init__(
        self, limits: Limits, keys: Sequence[Key], prices: Prices | None = None, wall: Callable[[], float] = time.time
    ) -> None:
        """`wall` returns the time of day, by which days and months end."""
        self._prices = prices or {}
        self._wall = wall
        self._all = Quota("", limits)
        self._keyless: Sequence[Quota] = (self._all,)
        self._by_key: Mapping[str, Sequence[Quota]] = {key.name: (Quota(key.name, key), self._all) for key in keys}
        """The quotas that a request of each key counts for: the key's, and that of all."""
        self.has_periods = False
        """Whether there is a limit for a day or a month."""
        self._follow_periods()

    def __repr__(self) -> str:
        return f"<Quotas of {len(self._by_key)} keys>"

    def reconfigure(self, config: Config) -> None:
        """Use the limits of another configuration; earlier use stays counted."""
        self._all.limits = config.limits
        known, keys = self._by_key, config.security.keys
        self._by_key = {key.name: known.get(key.name) or (Quota(key.name, key), self._all) for key in keys}
        for key in keys:
            self._by_key[key.name][0].limits = key
        self._prices = config.prices
        self._follow_periods()

    def _follow_periods(self) -> None:
        """Begin to count where a limit for a day or a month is new, and stop where there is none any more."""
        for one in self._each():
            if not has_period_limit(one.limits):
                one.spending = None
            elif one.spending is None:
                one.spending = Spending(self._prices, self._wall)
            elif one.spending.prices != self._prices:
                one.spending.reprice(self._prices)
        self.has_periods = any(one.spending is not None for one in self._each())

    def __iter__(self) -> Iterator[Quota]:
        return iter(self._each())

    def _each(self) -> Iterable[Quota]:
        return (self._all, *(quotas[0] for quotas in self._by_key.values()))

    @property
    def has_windows(self) -> bool:
        """Whether there is a limit for a minute."""
        return any(
            limit is not None
            for one in self._each()
            for limit in (one.limits.requests_per_minute, one.limits.tokens_per_minute)
        )

    def restore_windows(self, used: Iterable[EarlierUse]) -> None:
        """Count the use of the last minute that an earlier process has counted."""
        found: dict[Quota, tuple[Counter[int], Counter[int]]] = {}
        for use in used:
            for one in self._by_key.get(use.key, self._keyless):
                requests, tokens = found.setdefault(one, (Counter(), Counter()))
                requests[use.second] += use.requests
                tokens[use.second] += use.tokens
        for one, (requests, tokens) in found.items():
            one.requests.restore(requests)
            one.tokens.restore(tokens)

    def restore(self, key: str) -> "QuotaReservation":
        """Count a request in flight that an earlier process has let in: no limit refuses it.

        `restore_windows` has counted it for the limits of a minute.
        """
        used = self._by_key.get(key, self._keyless)
        for one in used:
            one.in_flight += 1
        return QuotaReservation(used)

    @property
    def needs_sums(self) -> bool:
        """Whether a limit for a day or a month does not know the earlier use yet."""
        return self.has_periods and any(one.spending is not None and not one.spending.is_known for one in self._each())

    def set_sums(self, used: Sequence[ModelTokens]) -> None:
        """Set the use in this month until now, today included."""
        of_keys = by_key(used)
        for one in self._each():
            if one.spending is not None:
                one.spending.set(of_keys.get(one.name, ()) if one.name else used)

    def spend(self, key: str, model: str, input: int, output: int, cached: int) -> None:  # noqa: A002
        """Count tokens that a request of this key ("" for none) has used, for limits of a day or a month."""
        for one in self._by_key.get(key, self._keyless):
            if one.spending is not None:
                one.spending.add(model, input, output, cached)

    def ended(self, record: SpendingRecord) -> None:
        """Count the tokens of a request that has ended, for limits of a day or a month."""
        used = record.usage
        if self.has_periods and used is not None:
            self.spend(record.key_name, record.model, used.input, used.output, used.cached)

    def spend_late(self, key: str, tokens: int, now: float) -> None:
        """Count tokens of a request of this key ("" for none) that has ended before, for limits of a minute."""
        for one in self._by_key.get(key, self._keyless):
            if tokens and one.limits.tokens_per_minute is not None:
                one.tokens.add(tokens, now)

    def standings(self, key: str) -> list[PeriodStanding]:
        """Return how much of each limit of this key for a day or a month is used."""
        quota = self._by_key.get(key, self._keyless)[0]
        return quota.spending.standings(quota.limits) if quota.spending is not None else []

    def of_key(self, name: str) -> Quota | None:
        """Return the quota of the key of this name; None where no key has it."""
        found = self._by_key.get(name)
        return None if found is None else found[0]

    def refusal(self, key: str, now: float) -> QuotaRefusal | None:
        """Return why a request of this key ("" for none) would be refused now, if it would."""
        for one in self._by_key.get(key, self._keyless):
            refusal = one.refusal(now)
            if refusal is not None:
                return refusal
        return None

    def acquire(self, key: str, now: float) -> "QuotaReservation | QuotaRefusal":
        """Count a request of this key ("" for none), or return why it is refused."""
        used = self._by_key.get(key, self._keyless)
        for one in used:
            refusal = one.refusal(now)
            if refusal is not None:
                return refusal
        for one in used:
            limits = one.limits
            one.in_flight += 1
            one.used_at = now
            if limits.requests_per_minute is not None:
                one.requests.add(1, now)
        return QuotaReservation(used)


class QuotaReservation(NamedTuple):
    """A request that was let in. A tuple, as it is made for every request."""

    quotas: Sequence[Quota]

    @property
    def bounds_tokens(self) -> bool:
        """Whether a limit of tokens or a budget holds for it."""
        return any(
            quota.limits.tokens_per_minute is not None or has_period_limit(quota.limits) for quota in self.quotas
        )

    def release(self, tokens: int, now: float) -> None:
        """Record its end, and its tokens."""
        for quota in self.quotas:
            quota.in_flight -= 1
            if tokens and quota.limits.tokens_per_minute is not None:
                quota.tokens.add(tokens, now)


NO_RESERVATION = QuotaReservation(())
"""That of a copy of a request: it counts for no limit."""
