"""`[usage]` and `[prices]`: the ledger of usage, the prices of tokens, and the limits that rest on both."""

from collections.abc import Iterable, Mapping

from attrs import frozen

from ichat.config.strict import Between, checked

PERIOD_LIMITS = ("tokens_per_day", "tokens_per_month", "budget_per_month")
"""The keys of `[limits]` and of a client's key that count for a day or a month (UTC)."""
PRICE = Between(0, 1e9)
_DAYS = Between(1, 36500)


@frozen
class UsageSettings:
    """`[usage]`: the ledger of requests and tokens, in the state directory."""

    enabled: bool = checked(None, True, reload="later")
    """Whether it is kept at all."""
    flush_s: float = checked(Between(0.05, 60), 0.5)
    """Seconds between two writes; a gateway without relays that is killed loses the counts since then."""
    minute_days: float = checked(_DAYS, 2.0)
    """Days for which each minute is kept apart; then its hour."""
    keep_days: float = checked(_DAYS, 400.0)
    """Days for which anything is kept."""
    in_spans: bool = checked(None, True, reload="later")
    """Whether OpenTelemetry's spans have the tokens of requests: with clients' own spans they would count twice."""
    pending_rows_max: int = checked(Between(1, 1_000_000), 100_000)
    """The most rows that wait in memory for a disk that cannot be written."""


@frozen
class Price:
    """`[prices."MODEL"]`: the price of a million tokens of a model, in the operator's currency."""

    input: float = checked(PRICE, 0.0)
    """Of the prompt."""
    output: float = checked(PRICE, 0.0)
    """Of the answer."""
    cached: float | None = checked(PRICE, None)
    """Of the prompt's tokens that the engine's cache had; None: as all others of the prompt."""

    def cost_of(self, input: int, output: int, cached: int) -> float:  # noqa: A002
        """Return the cost of these numbers of tokens; the cached tokens are a part of the input."""
        price = self.input if self.cached is None else self.cached
        return ((input - cached) * self.input + cached * price + output * self.output) / 1_000_000


Prices = Mapping[str, Price]
"""By the names of models."""


def contradictions_of_limits(where: str, limits: object, usage: UsageSettings, prices: Prices) -> Iterable[str]:
    """Return the contradictions in this section's limits for a day and a month; messages call the section `where`."""
    for name in PERIOD_LIMITS:
        if getattr(limits, name) is None:
            continue
        if not usage.enabled:
            yield f"{where}.{name}: needs [usage] enabled = true when the gateway starts, or it begins anew each time"
        if name == "budget_per_month" and not any((price.input, price.output) > (0, 0) for price in prices.values()):
            yield f'{where}.{name}: needs a price: write a table [prices."MODEL"] for each model that costs something'
