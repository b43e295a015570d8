"""A load of a worker as the gateway knows it: its own phases, then those that the worker reports.

A worker reports seconds, not times of day, so the clocks of two machines need not agree. The gateway counts on between
two heartbeats. Purely synchronous.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import attrs

from ichat.protocol.field_checks import PHASE_CHARACTERS_MAX
from ichat.protocol.load_story import WAKING, LoadStory, StoryPhase, download_s
from ichat.protocol.messages import Heartbeat, LoadPhase

LoadKind = Literal["start", "wake"]
"""A start loads a model into a new process; a wake gives an engine its memory again, in much less time."""


@attrs.frozen
class ExpectedLoad:
    """The probable duration of a load, by earlier loads of the same model and kind."""

    seconds: float | None = None
    phases: Mapping[str, float] = attrs.field(factory=dict[str, float])
    """The seconds of each phase of the last load."""


@attrs.define(eq=False)
class WorkerLoad:
    """A load that is under way, or has ended."""

    kind: LoadKind
    expected: ExpectedLoad | None = None
    """None: not looked up yet."""
    own: list[tuple[float, str]] = attrs.field(factory=list[tuple[float, str]])
    """The gateway's own phases: when each began, and its name."""
    own_detail: str = ""
    """How far the newest of these phases is; empty: not known."""
    told: Sequence[LoadPhase] = ()
    """The worker's phases, by its newest heartbeat."""
    told_at: float = 0.0
    heard_since: float | None = None
    """When the worker's first heartbeat of this load arrived."""
    ended_at: float | None = None

    @property
    def phase(self) -> str:
        """Its current phase, by the newest heartbeat."""
        return self.told[-1].name if self.told else self.own[-1][1] if self.own else ""

    @property
    def seconds(self) -> float:
        """How long it lasted, if it has ended."""
        return self.story(0.0).elapsed_s

    def enter(self, phase: str, now: float) -> None:
        """Begin a phase of the gateway's own."""
        if not self.own or self.own[-1][1] != phase:
            self.own.append((now, phase))
            self.own_detail = ""

    def hear(self, phases: Sequence[LoadPhase], now: float, otherwise: str) -> None:
        """Record the phases that the worker reports; if it reports none, `otherwise` is the only phase."""
        self.heard_since = now if self.heard_since is None else self.heard_since
        self.told = phases or [LoadPhase(otherwise[:PHASE_CHARACTERS_MAX], now - self.heard_since)]
        self.told_at = now

    def is_unlike(self, heartbeat: Heartbeat) -> bool:
        """Return whether a worker now reports another load than this, or none; that report is weighed."""
        return len(self.told) > 1 and self.told is not heartbeat.loaded

    def end(self, now: float) -> None:
        """Record that the worker is ready."""
        self.ended_at = now

    def story(self, now: float) -> LoadStory:
        """Return the phases with their seconds until now, and the seconds of each at the last load."""
        until = now if self.ended_at is None else self.ended_at
        told = [phase.seconds for phase in self.told]
        if told and self.ended_at is None:
            told[-1] += max(0.0, until - self.told_at)
        begins = [at for at, _ in self.own]
        ends = [*begins[1:], self.told_at - sum(phase.seconds for phase in self.told) if told else until]
        own = [(name, max(0.0, end - at), "") for (at, name), end in zip(self.own, ends if begins else (), strict=True)]
        if own and not told:
            own[-1] = (*own[-1][:2], self.own_detail)
        heard = [(phase.name, seconds, phase.detail) for phase, seconds in zip(self.told, told, strict=True)]
        expected = self.expected or ExpectedLoad()
        last = expected.phases
        phases = [
            StoryPhase(name, round(seconds, 3), last.get(name), detail) for name, seconds, detail in (*own, *heard)
        ]
        elapsed_s = round(sum(phase.seconds for phase in phases), 3)
        expected_s = None if expected.seconds is None else expected.seconds + download_s(phases)
        return LoadStory(elapsed_s, expected_s, phases)


def load_after(load: WorkerLoad | None, heartbeat: Heartbeat, now: float) -> WorkerLoad | None:
    """Return the load of a worker after a heartbeat; a load that has ended by it has its `ended_at`."""
    state = heartbeat.state
    if state in ("starting", "loading"):
        load = load or WorkerLoad("start")
        load.hear(heartbeat.load, now, heartbeat.phase or state)
        return load
    if state == "waking":
        load = load if load is not None and load.kind == "wake" else WorkerLoad("wake")
        load.enter(WAKING, now)
        return load
    if state in ("ready", "following") and load is not None:
        if load.kind == "start":
            load.hear(heartbeat.loaded, now, load.told[-1].name if load.told else "loading")
        load.end(now)
        return load
    return None


def load_of(heartbeat: Heartbeat, now: float) -> WorkerLoad | None:
    """Return the load by which a worker became ready before the gateway knew of it; None: it reports none."""
    if not heartbeat.loaded:
        return None
    return WorkerLoad("start", told=heartbeat.loaded, told_at=now, ended_at=now)
