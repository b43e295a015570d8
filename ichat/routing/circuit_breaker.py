"""The circuit breaker of a worker or external route. Purely synchronous.

Closed: requests go there. After `failures_max` failures in a row it opens, and none goes there for `open_s`, twice as
long each time. Then it is half open: a request is let through, and its response closes or opens the circuit.
A client's mistake (4xx), or a client that leaves, is no failure. An endpoint that answers with errors is avoided while
there are others, but is used if it is alone. Single requests may be the cause, and errors are better than none.
"""

import math
from typing import Literal

import attrs

from ichat.config.schema import CircuitBreaker
from ichat.protocol.messages import Count

State = Literal["closed", "open", "half-open"]
FAILED_STATUSES = frozenset((500, 502, 503, 504))
"""Statuses of responses that are failures of the endpoint."""


@attrs.frozen
class CircuitView:
    """Whether a worker gets requests, judged by its last requests (`[circuit_breaker]`)."""

    state: State
    """`open`: the worker gets no requests, since the last requests failed. `half-open`: it gets a single request."""
    failures: Count
    """The number of consecutive failed requests."""
    retry_in_s: float | None
    """Seconds until the worker gets a probe; None: the circuit is not open."""


@attrs.define(eq=False)
class Circuit:
    """The state of an endpoint's circuit, by its last requests."""

    settings: CircuitBreaker = CircuitBreaker()
    failures: int = 0
    """In a row."""
    opened: int = 0
    """How often it has opened since it was last closed."""
    open_until: float | None = None
    answers: bool = False
    """Whether the last failure was a response, such as 500, and not silence."""
    probe: int = 0
    """The number of the newest probe of a half-open circuit."""
    probe_until: float = -math.inf
    """Until then no other request is let through: the newest probe is under way."""

    def reconfigure(self, settings: CircuitBreaker) -> None:
        """Go on by other settings; counts stay."""
        self.settings = settings

    def restore(self, failures: int, opened: int, open_until: float | None, *, answers: bool) -> None:
        """Go on with the counts of another process."""
        self.failures, self.opened, self.open_until, self.answers = failures, opened, open_until, answers

    def state(self, now: float) -> State:
        """Return its state."""
        if self.open_until is None or not self.settings.failures_max:
            return "closed"
        return "open" if now < self.open_until else "half-open"

    def allows_request(self, now: float) -> bool:
        """Return whether a request may go there."""
        if self.open_until is None:
            return True
        state = self.state(now)
        return state == "closed" or (state == "half-open" and now >= self.probe_until)

    def is_worth_waiting(self, now: float, *, skips_open: bool) -> bool:
        """Return whether a request may go there soon: with `skips_open` only as `allows_request` says."""
        if self.open_until is None:
            return True
        return self.allows_request(now) if skips_open else self.answers or self.state(now) != "open"

    def open_s(self, now: float) -> float:
        """Return the seconds until it is half open; 0 if it is not open."""
        return max(0.0, (self.open_until or now) - now)

    def why_open(self, now: float) -> str:
        """Return in a few words, after the endpoint's name, why it lets no request through."""
        rest_s = math.ceil(self.open_s(now))
        again = f"is tried again in {rest_s} s" if rest_s else "is being tried with one request"
        return f"has failed with {self.failures} requests in a row, and {again}"

    def retry_at(self, now: float) -> float:
        """Return when time alone lets a request through that is refused now; infinity if none is refused."""
        if self.open_until is None or self.state(now) == "closed":
            return math.inf
        ends = (self.open_until, self.probe_until)
        return min((end for end in ends if end > now), default=math.inf)

    def begin(self, now: float) -> int:
        """Record a request that goes there; return its number if it is a probe, else 0."""
        if self.open_until is None or self.state(now) != "half-open":
            return 0
        self.probe += 1
        self.probe_until = now + self.settings.open_s
        return self.probe

    def end(self, probe: int) -> None:
        """Record that a request has ended, with a verdict or without."""
        if probe and probe == self.probe:
            self.probe_until = -math.inf

    def record_response(self) -> bool:
        """Record that a good response begins, and let others through; return whether that is new."""
        was_open, self.open_until = self.open_until is not None, None
        return was_open

    def record_success(self) -> None:
        """Record that a response has arrived whole."""
        self.failures = self.opened = 0
        self.open_until = None

    def record_failure(self, now: float, *, answers: bool = False) -> bool:
        """Record that there was no response, or a failure as response; return whether that has opened the circuit."""
        self.failures += 1
        self.answers = answers
        settings = self.settings
        state = self.state(now)
        if (
            not settings.failures_max
            or state == "open"
            or (state == "closed" and self.failures < settings.failures_max)
        ):
            return False
        wait_s = min(settings.open_longest_s, settings.open_s * 2.0**self.opened)
        self.opened, self.open_until, self.probe_until = min(self.opened + 1, 60), now + wait_s, -math.inf
        return True

    def describe(self, now: float) -> CircuitView:
        """Return what operators see of the circuit."""
        state = self.state(now)
        retry_in_s = round(self.open_until - now, 3) if state == "open" and self.open_until is not None else None
        return CircuitView(state, self.failures, retry_in_s)
