"""Limits for a day and a month: what counts, when it turns, and what a client is told."""

import calendar
import time

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ichat.config.schema import Config, Key, Limits, Security
from ichat.config.usage import Price
from ichat.proxy.refusals import over_limit
from ichat.security.period_limits import ModelTokens, Spending, day_start, month_end, month_start
from ichat.security.rate_limits import QuotaRefusal, QuotaReservation, Quotas

NOON = calendar.timegm((2026, 11, 30, 12, 0, 0))
DAY_S = 86400
PRICES = {"m": Price(input=1.0, output=2.0, cached=0.1), "dear": Price(input=1000.0)}


class Clock:
    """A wall clock that stands."""

    def __init__(self, at=NOON):
        self.at = at

    def __call__(self):
        return self.at


def quotas_with(clock, limits=None, prices=PRICES, **of_key):
    quotas = Quotas(limits or Limits(), [Key("a", **of_key), Key("b")], prices, clock)
    quotas.set_sums([])
    return quotas


def refused(quotas, key="a"):
    found = quotas.acquire(key, 0)
    if isinstance(found, QuotaReservation):
        found.release(0, 0)
        return None
    error = over_limit(found)
    assert (error.status, error.code, error.kind, error.retry) == (
        429,
        "insufficient_quota",
        "insufficient_quota",
        False,
    )
    return error.limit, error.retry_after_s, error.message


def test_tokens_of_a_day_end_at_midnight():
    """The next request is refused once they are used up, until the day (UTC) ends; other keys are not."""
    clock = Clock()
    quotas = quotas_with(clock, tokens_per_day=100)
    quotas.spend("a", "m", 60, 39, 0)
    assert refused(quotas) is None
    quotas.spend("a", "m", 0, 1, 0)
    limit, wait_s, message = refused(quotas)
    assert (limit, wait_s) == ("security.keys.tokens_per_day", DAY_S // 2)
    assert message == (
        "The key `a` has 100 tokens a day, and has used 100: it begins anew at 2026-12-01 00:00 UTC"
        " (security.keys.tokens_per_day)."
    )
    assert refused(quotas, "b") is None
    clock.at += DAY_S // 2 - 1
    assert refused(quotas)[1] == 1
    clock.at += 1
    assert refused(quotas) is None


def test_tokens_and_money_of_a_month_outlive_its_days():
    """Of several limits that are used up, the one that lasts longest is named; all requests together have theirs."""
    clock = Clock(NOON - 2 * DAY_S)
    limits = Limits(budget_per_month=3.0)
    quotas = quotas_with(clock, limits, tokens_per_day=100, tokens_per_month=1000)
    quotas.spend("a", "m", 1000, 0, 1000)
    assert refused(quotas)[0] == "security.keys.tokens_per_month"
    clock.at += 2 * DAY_S
    assert refused(quotas)[:2] == ("security.keys.tokens_per_month", DAY_S // 2)
    assert refused(quotas, "b") is None
    quotas.spend("", "dear", 3000, 50, 0)
    limit, _, message = refused(quotas, "b")
    assert limit == "limits.budget_per_month"
    assert message.startswith("This gateway has in all a budget of 3 a month, and has used 3.0001: it begins anew at")
    clock.at += DAY_S
    assert refused(quotas, "b") is None
    assert refused(quotas) is None


def test_usage_before_the_start_counts():
    """The sums of the ledger take the place of what is known, so that nothing counts twice."""
    clock = Clock()
    quotas = Quotas(Limits(tokens_per_month=100), [Key("a", tokens_per_day=30)], {}, clock)
    assert quotas.needs_sums
    quotas.spend("a", "m", 5, 5, 0)
    used = [
        ModelTokens("a", "m", False, 50, 0, 0),
        ModelTokens("a", "m", True, 20, 9, 0),
        ModelTokens("", "m", True, 9, 0, 0),
    ]
    quotas.set_sums(used)
    assert not quotas.needs_sums
    assert [(one.limit, one.used) for one in quotas.standings("a")] == [("tokens_per_day", 29)]
    assert [(one.limit, one.used) for one in quotas.standings("")] == [("tokens_per_month", 88)]
    quotas.spend("a", "m", 1, 0, 0)
    assert refused(quotas)[0] == "security.keys.tokens_per_day"


def test_a_reload_keeps_the_sums_and_takes_new_prices():
    """Prices count for what was used before as well; a limit that is new asks for what was used before it."""
    quotas = quotas_with(Clock(), budget_per_month=2.0)
    quotas.spend("a", "m", 1_000_000, 400_000, 0)
    assert refused(quotas) is None
    config = Config(
        prices={"m": Price(input=1.0, output=3.0)}, security=Security(keys=[Key("a", budget_per_month=2.0), Key("b")])
    )
    quotas.reconfigure(config)
    assert not quotas.needs_sums
    assert refused(quotas)[0] == "security.keys.budget_per_month"
    limits = attrs.evolve(config.limits, tokens_per_day=5)
    quotas.reconfigure(attrs.evolve(config, limits=limits))
    assert quotas.needs_sums
    quotas.reconfigure(Config(security=Security(keys=[Key("a"), Key("b")])))
    assert not quotas.has_periods
    assert not quotas.needs_sums
    assert refused(quotas) is None


def test_cached_tokens_have_their_price():
    """They are a part of the input, and cost what other input costs where no price is given for them."""
    assert PRICES["m"].cost_of(1_000_000, 0, 1_000_000) == pytest.approx(0.1)
    assert PRICES["m"].cost_of(1_000_000, 1_000_000, 500_000) == pytest.approx(0.5 + 0.05 + 2.0)
    assert Price(input=1.0).cost_of(1_000_000, 7, 1_000_000) == pytest.approx(1.0)


@given(at=st.integers(0, 4_000_000_000))
def test_days_and_months_are_those_of_the_calendar(at):
    """Their beginnings and ends are midnights of UTC, whatever the month and the year."""
    now, first = time.gmtime(at), time.gmtime(month_start(at))
    assert day_start(at) <= at < day_start(at) + DAY_S
    assert (first.tm_year, first.tm_mon, first.tm_mday, first.tm_hour) == (now.tm_year, now.tm_mon, 1, 0)
    after = time.gmtime(month_end(at))
    assert (after.tm_mday, after.tm_hour, (after.tm_mon - now.tm_mon) % 12) == (1, 0, 1)
    assert month_start(at) <= at < month_end(at)
    assert time.gmtime(month_end(at) - 1).tm_mon == now.tm_mon


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 40 * 3600), st.sampled_from("mno"), st.integers(0, 50), st.integers(0, 50)),
        max_size=40,
    )
)
def test_sums_are_those_of_the_days_and_months(steps):
    """Whatever comes when: the sums are what was used since the day and the month began."""
    clock = Clock(NOON)
    spending = Spending({"m": Price(input=1.0, output=1.0)}, clock)
    seen = []
    for wait_s, model, input_, output in steps:
        clock.at += wait_s
        spending.add(model, input_, output, 0)
        seen.append((clock.at, model, input_ + output))
        today = sum(count for at, _, count in seen if day_start(at) == day_start(clock.at))
        month = [(model, count) for at, model, count in seen if month_start(at) == month_start(clock.at)]
        limits = Key("a", tokens_per_day=1, tokens_per_month=1, budget_per_month=1.0)
        found = [one.used for one in spending.standings(limits)]
        assert found[:2] == [today, sum(count for _, count in month)]
        assert found[2] == pytest.approx(sum(count for model, count in month if model == "m") / 1e6)


def test_a_refusal_is_a_value():
    """The limit, what is allowed, and when it is worth asking again."""
    quotas = quotas_with(Clock(), tokens_per_day=1)
    quotas.spend("a", "m", 1, 0, 0)
    found = quotas.refusal("a", 0)
    assert isinstance(found, QuotaRefusal)
    assert (found.limit, found.allowed, found.wait_s) == ("tokens_per_day", 1, DAY_S // 2)
