"""How many copies of a model there are between its bounds, by its load: a pure function of samples.

`decide` has no clock and no state of its own: it gets the memory that its last call has returned. A sample that is not
whole starts nothing and ends nothing.
"""

import math
from collections.abc import Sequence
from typing import Literal

import attrs
from attrs import field, frozen

from ichat.config.replicas import Replicas, Scale

SAMPLE_S = 5.0
"""The time between two samples."""
GAP_S = 3 * SAMPLE_S
"""After this time without a whole sample, earlier samples count no more."""
ROOM = 0.875
"""The share of `Scale.busy` to which copies are filled after copies were added."""
IDLE = 0.7
"""The share of `Scale.busy` below which the load must stay for the copies that remain."""
AT_ONCE_MAX = 2
"""The most copies of a model that start at the same time."""
FAILURES_MAX = 3
"""After this many failed starts in a row of a copy, none is added."""
LOADS_LONG = 2
"""How many times as long as a load the quiet time is, at least."""
PEAKS_MAX = 64
"""In how many parts the quiet time is divided: of each part the highest load is remembered."""

Phase = Literal["ready", "starting", "draining"]


@frozen
class CopyFacts:
    """A copy as it is now."""

    worker_id: str
    phase: Phase
    busy: float | None = None
    """The share of the engine that is in use, 0 to 1; None: not known now, or it is not ready."""
    requests: int = 0
    prefix_work: float = 0.0
    """How many requests with a known prefix it got lately."""
    failures: int = 0
    """Failed starts in a row."""


@frozen
class ScaleFacts:
    """A model as it is now."""

    copies: Sequence[CopyFacts]
    """In the order of their starts."""
    bounds: Replicas
    slots: float
    """How many requests a copy works on at the same time."""
    waiting: int = 0
    """Requests that wait at the gateway."""
    waited_s: float = 0.0
    """For how long the oldest of these has waited."""
    load_s: float = 0.0
    """How long a load of the model lasts, as far as it is known."""
    may_start: int = AT_ONCE_MAX
    """How many copies the gateway may start now, of all models together."""
    is_whole: bool = True
    """Whether the gateway itself was in time: otherwise the sample does not count."""


@frozen
class ScaleMemory:
    """The result of earlier samples."""

    busy_since: float | None = None
    """Since when every sample has been busy."""
    seen_since: float | None = None
    """Since when samples have been whole, without a gap."""
    seen_at: float = -math.inf
    """The time of the last whole sample."""
    changed_at: float = -math.inf
    """When the number last changed."""
    failed_at: float = -math.inf
    """When a copy was last given up, after failed starts."""
    peaks: tuple[tuple[float, float], ...] = field(default=())
    """The beginning and the highest load of each part of the quiet time, oldest first."""


@frozen
class ScaleDecision:
    """What to do now."""

    direction: Literal["up", "down", "stay"]
    start: int
    """How many copies to start."""
    resume: Sequence[str]
    """Copies that drain, and get requests again."""
    drain: str
    """The copy that gets no more requests, and ends after its last request; "" if none does."""
    reason: Literal["busy", "waiting", "idle", "below_min", "above_max", "steady", "unknown", "failing", "full"]
    load: float | None
    """The load in copies; None: not known."""
    look_at: float
    """When to decide again, at the latest."""


def load_of(facts: ScaleFacts) -> float | None:
    """Return the load in copies; None where it is not known."""
    busy = [one.busy for one in facts.copies if one.phase == "ready"]
    if not facts.is_whole or None in busy:
        return None
    return sum(one for one in busy if one is not None) + facts.waiting / max(1.0, facts.slots)


def quiet_s(facts: ScaleFacts, settings: Scale) -> float:
    """Return for how long the load must be low before a copy ends."""
    return max(settings.down_s, LOADS_LONG * facts.load_s)


def decide(now: float, facts: ScaleFacts, settings: Scale, memory: ScaleMemory) -> tuple[ScaleDecision, ScaleMemory]:
    """Return what to do now, and the memory for the next call."""
    load = load_of(facts)
    memory = _noted(now, load, facts, settings, memory)
    turn = _Turn(now, facts, settings, memory, load)
    decision = turn.bounded() or turn.given_up() or turn.up() or turn.down()
    decision = decision or turn.stay("unknown" if load is None else "steady")
    if decision.direction != "stay":
        memory = attrs.evolve(memory, changed_at=now, busy_since=None)
    if decision.reason == "failing" and decision.drain:
        memory = attrs.evolve(memory, failed_at=now)
    return decision, memory


def _noted(now: float, load: float | None, facts: ScaleFacts, settings: Scale, memory: ScaleMemory) -> ScaleMemory:
    """Return the memory with a sample."""
    if load is None:
        return attrs.evolve(memory, busy_since=None) if now - memory.seen_at <= GAP_S else _forgotten(memory)
    if now - memory.seen_at > GAP_S:
        memory = _forgotten(memory)
    ready = sum(one.phase == "ready" for one in facts.copies)
    is_busy = ready > 0 and load / ready >= settings.busy
    return attrs.evolve(
        memory,
        busy_since=(now if memory.busy_since is None else memory.busy_since) if is_busy else None,
        seen_since=now if memory.seen_since is None else memory.seen_since,
        seen_at=now,
        peaks=_with_load(memory.peaks, now, load, quiet_s(facts, settings)),
    )


def _with_load(
    peaks: Sequence[tuple[float, float]], now: float, load: float, window_s: float
) -> tuple[tuple[float, float], ...]:
    """Return the highest loads of the parts of the quiet time with another load."""
    part_s = window_s / PEAKS_MAX
    rest = [one for one in peaks if one[0] > now - window_s - part_s]
    if rest and now - rest[-1][0] < part_s:
        return (*rest[:-1], (rest[-1][0], max(rest[-1][1], load)))
    return (*rest, (now, load))


def _forgotten(memory: ScaleMemory) -> ScaleMemory:
    """Return the memory without samples."""
    return ScaleMemory(changed_at=memory.changed_at, failed_at=memory.failed_at)


@frozen
class _Turn:
    """A decision while it is made."""

    now: float
    facts: ScaleFacts
    settings: Scale
    memory: ScaleMemory
    load: float | None

    def of_phase(self, phase: Phase) -> list[CopyFacts]:
        """Return the copies in this phase."""
        return [one for one in self.facts.copies if one.phase == phase]

    @property
    def there(self) -> int:
        """The number of copies that are ready, or will be."""
        return len(self.facts.copies) - len(self.of_phase("draining"))

    def stay(self, reason: Literal["steady", "unknown", "failing", "full"]) -> ScaleDecision:
        """Return the decision to do nothing."""
        return ScaleDecision("stay", 0, (), "", reason, self.load, self._look_at())

    def _look_at(self) -> float:
        waits = self.facts.waiting and self.facts.waited_s < self.settings.wait_s
        rest_s = self.settings.wait_s - self.facts.waited_s if waits else math.inf
        return self.now + min(SAMPLE_S, max(rest_s, 0.05))

    def bounded(self) -> ScaleDecision | None:
        """Return the way back to the bounds; None: the number is within them."""
        least, most = max(1, self.facts.bounds.min), self.facts.bounds.max
        if self.there < least:
            return self._more(least, "below_min")
        return self._fewer("above_max") if self.there > most else None

    def given_up(self) -> ScaleDecision | None:
        """Return the decision to give up a copy above `min` that cannot be started; None: there is none."""
        failing = [one for one in self.of_phase("starting") if one.failures >= FAILURES_MAX]
        if not failing or self.there <= max(1, self.facts.bounds.min):
            return None
        return ScaleDecision("down", 0, (), failing[-1].worker_id, "failing", self.load, self._look_at())

    def up(self) -> ScaleDecision | None:
        """Return the decision to add copies; None: none is needed."""
        ready, since = len(self.of_phase("ready")), self.memory.busy_since
        is_busy = since is not None and self.now - since >= self.settings.up_s
        has_waited = self.facts.waiting > 0 and self.facts.waited_s >= self.settings.wait_s
        if self.load is None or not ready or not (is_busy or has_waited):
            return None
        wanted = max(math.ceil(self.load / (ROOM * self.settings.busy) - 1e-9), ready + 1)
        wanted = min(wanted, 2 * ready, self.facts.bounds.max)
        if self.there >= wanted:
            return None
        is_failing = any(one.failures >= FAILURES_MAX for one in self.facts.copies)
        if is_failing or self.now - self.memory.failed_at < quiet_s(self.facts, self.settings):
            return self.stay("failing")
        return self._more(wanted, "busy" if is_busy else "waiting")

    def _more(self, wanted: int, reason: Literal["busy", "waiting", "below_min"]) -> ScaleDecision:
        """Return the decision to have this many copies: copies that drain first, then new copies."""
        resume = [one.worker_id for one in self.of_phase("draining")][: wanted - self.there]
        at_once = min(AT_ONCE_MAX - len(self.of_phase("starting")), self.facts.may_start)
        start = max(0, min(wanted - self.there - len(resume), at_once))
        if not resume and not start:
            return self.stay("full")
        return ScaleDecision("up", start, resume, "", reason, self.load, self._look_at())

    def down(self) -> ScaleDecision | None:
        """Return the decision to end a copy; None: all are needed, or may be."""
        ready, window_s = len(self.of_phase("ready")), quiet_s(self.facts, self.settings)
        seen, changed = self.memory.seen_since, self.memory.changed_at
        is_quiet = seen is not None and self.now - seen >= window_s and self.now - changed >= window_s
        if self.load is None or not is_quiet or self.facts.waiting or self.there > ready:
            return None
        peak = max(load for _, load in self.memory.peaks)
        if ready <= max(1, self.facts.bounds.min) or peak > IDLE * self.settings.busy * (ready - 1):
            return None
        return self._fewer("idle")

    def _fewer(self, reason: Literal["idle", "above_max"]) -> ScaleDecision:
        """Return the decision to end the copy that is missed least."""
        order = {one.worker_id: number for number, one in enumerate(self.facts.copies)}
        goes = min(
            (one for one in self.facts.copies if one.phase != "draining"),
            key=lambda one: (one.phase == "ready", one.prefix_work, one.requests, -order[one.worker_id]),
        )
        return ScaleDecision("down", 0, (), goes.worker_id, reason, self.load, self._look_at())
