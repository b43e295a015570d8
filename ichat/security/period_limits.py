"""Limits for a day and a month (UTC): the use since its beginning, and when it ends. Purely synchronous."""

import calendar
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import attrs

from ichat.config.schema import Key, Limits
from ichat.config.usage import PERIOD_LIMITS, Prices

DAY_S = 86400


class ModelTokens(NamedTuple):
    """The tokens that a key has used of a model, as the ledger has it."""

    key: str
    model: str
    is_today: bool
    """Whether it was used today; otherwise on another day of this month."""
    input: int
    output: int
    cached: int


def day_start(at: float) -> int:
    """Return when the day of a time began, in seconds since 1970."""
    return int(at // DAY_S) * DAY_S


def month_start(at: float) -> int:
    """Return when the month of a time began, in seconds since 1970."""
    return day_start(at) - DAY_S * (time.gmtime(at).tm_mday - 1)


def month_end(at: float) -> int:
    """Return when the month of a time ends, in seconds since 1970."""
    now = time.gmtime(at)
    return month_start(at) + DAY_S * calendar.monthrange(now.tm_year, now.tm_mon)[1]


class PeriodStanding(NamedTuple):
    """How much of a limit for a day or a month is used."""

    limit: str
    """Its name in the configuration."""
    allowed: float
    used: float
    ends_at: int
    """When it begins anew, in seconds since 1970."""


@attrs.define(eq=False)
class Spending:
    """The use of a single key, or of all together, today and this month."""

    prices: Prices
    wall: Callable[[], float] = time.time
    is_known: bool = False
    """Whether the use before this process is in it."""
    tokens_today: int = 0
    tokens_this_month: int = 0
    cost: float = 0.0
    """Of this month."""
    _models: dict[str, list[int]] = attrs.field(factory=dict[str, list[int]])
    """Input, output and cached tokens of this month, for other prices."""
    _day_end: int = 0
    _month_end: int = 0

    def add(self, model: str, input: int, output: int, cached: int) -> None:  # noqa: A002
        """Count tokens that a model has used now."""
        self._turn()
        self.tokens_today += input + output
        self._add_to_month(model, input, output, cached)

    def set(self, used: Iterable[ModelTokens]) -> None:
        """Begin anew with the ledger's sums: everything that was used until now."""
        self._models.clear()
        self._day_end = self._month_end = 0
        self._turn()
        for one in used:
            self._add_to_month(one.model, one.input, one.output, one.cached)
            if one.is_today:
                self.tokens_today += one.input + one.output
        self.is_known = True

    def reprice(self, prices: Prices) -> None:
        """Go on with other prices, for earlier use as well."""
        self.prices, self.cost = prices, 0.0
        for model, (input_, output, cached) in self._models.items():
            self.cost += self._cost_of(model, input_, output, cached)

    def standings(self, limits: Key | Limits) -> list[PeriodStanding]:
        """Return how much of each limit is used, in the order in which they are asked about."""
        self._turn()
        used = (self.tokens_today, self.tokens_this_month, self.cost)
        ends = (self._day_end, self._month_end, self._month_end)
        allowed = (limits.tokens_per_day, limits.tokens_per_month, limits.budget_per_month)
        return [
            PeriodStanding(name, most, of, end)
            for name, most, of, end in zip(PERIOD_LIMITS, allowed, used, ends, strict=True)
            if most is not None
        ]

    def exceeded(self, limits: Key | Limits) -> PeriodStanding | None:
        """Return the limit that is used up and ends last, if there is any."""
        self._turn()
        day, month, budget = limits.tokens_per_day, limits.tokens_per_month, limits.budget_per_month
        if (
            (day is None or self.tokens_today < day)
            and (month is None or self.tokens_this_month < month)
            and (budget is None or self.cost < budget)
        ):
            return None
        over = [one for one in self.standings(limits) if one.used >= one.allowed]
        return max(over, key=lambda one: one.ends_at)

    def _add_to_month(self, model: str, input_: int, output: int, cached: int) -> None:
        self.tokens_this_month += input_ + output
        self.cost += self._cost_of(model, input_, output, cached)
        sums = self._models.get(model)
        if sums is None:
            sums = self._models[model] = [0, 0, 0]
        sums[0] += input_
        sums[1] += output
        sums[2] += cached

    def _cost_of(self, model: str, input_: int, output: int, cached: int) -> float:
        price = self.prices.get(model)
        return price.cost_of(input_, output, cached) if price is not None else 0.0

    def _turn(self) -> None:
        """Forget the day and the month that have ended."""
        now = self.wall()
        if now < self._day_end:
            return
        self._day_end, self.tokens_today = day_start(now) + DAY_S, 0
        if now >= self._month_end:
            self._month_end, self.tokens_this_month, self.cost = month_end(now), 0, 0.0
            self._models.clear()


def has_period_limit(limits: Key | Limits) -> bool:
    """Return whether one of the limits is for a day or a month."""
    return any(getattr(limits, name) is not None for name in PERIOD_LIMITS)


def by_key(used: Iterable[ModelTokens]) -> Mapping[str, list[ModelTokens]]:
    """Return the use of each key."""
    found: dict[str, list[ModelTokens]] = {}
    for one in used:
        found.setdefault(one.key, []).append(one)
    return found
