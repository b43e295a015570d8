"""The circuit breaker of one worker or external route. Purely synchronous.

Closed: requests go there. After `failures_max` failures in a row it opens, and none does, for `open_s`, twice as long
each time. Then it is half open: one request is let through, and its answer closes or opens the circuit. What clients
do wrong (4xx), or a client that leaves, is no failure.
"""

from typing import Literal

import attrs

from ichat.config import CircuitBreaker

State = Literal["closed", "open", "half-open"]
FAILED_STATUSES = frozenset((500, 502, 503, 504))
"""Answers that speak against who gives them; any other, however unwelcome, is one."""


@attrs.define(eq=False)
class Circuit:
    """What the last requests say of where they went."""

    settings: CircuitBreaker = CircuitBreaker()
    failures: int = 0
    """In a row."""
    opened: int = 0
    """How often it has opened since it was last closed."""
    open_until: float | None = None
    is_probing: bool = False
    """Whether the one request is under way that a half-open circuit lets through."""

    def state(self, now: float) -> State:
        """Give its state."""
        if self.open_until is None or not self.settings.failures_max:
            return "closed"
        return "open" if now < self.open_until else "half-open"

    def lets_through(self, now: float) -> bool:
        """Say whether a request may go there."""
        if self.open_until is None:
            return True
        state = self.state(now)
        return state == "closed" or (state == "half-open" and not self.is_probing)

    def begin(self, now: float) -> bool:
        """Note a request that goes there; say whether it is the one that tries a half-open circuit."""
        if self.open_until is None or self.state(now) != "half-open":
            return False
        self.is_probing = True
        return True

    def end(self, *, was_probe: bool) -> None:
        """Note that a request has ended, with a verdict or without."""
        if was_probe:
            self.is_probing = False

    def succeed(self) -> None:
        """Note an answer."""
        self.failures = 0
        if self.open_until is not None:
            self.opened, self.open_until, self.is_probing = 0, None, False

    def fail(self, now: float) -> bool:
        """Note that there was none, or one that is a failure; say whether the circuit has opened by that."""
        self.failures += 1
        settings = self.settings
        state = self.state(now)
        if (
            not settings.failures_max
            or state == "open"
            or (state == "closed" and self.failures < settings.failures_max)
        ):
            return False
        wait_s = min(settings.open_longest_s, settings.open_s * 2.0**self.opened)
        self.opened, self.open_until, self.is_probing = min(self.opened + 1, 60), now + wait_s, False
        return True

    def describe(self, now: float) -> dict[str, object]:
        """Give what operators see of it."""
        state = self.state(now)
        retry_in_s = round(self.open_until - now, 3) if state == "open" and self.open_until is not None else None
        return {"state": state, "failures": self.failures, "retry_in_s": retry_in_s}
