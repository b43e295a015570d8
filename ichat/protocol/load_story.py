"""A load as a story: its phases, their durations, and the same in words.

A worker sends its phases with its heartbeats. The gateway puts its own before them, and the durations of the last load
beside them. Commands, comments in streams and logs all have their words from here.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs

from ichat.protocol.field_checks import SECONDS_MAX

DOWNLOADING = "downloading"
CHECKING = "checking"
MAKING_ROOM = "waiting for room"
STARTING = "starting the process"
WAKING = "waking up"
UNDER_A_SECOND = "under 1 s"


@attrs.frozen
class StoryPhase:
    """A phase of a load; the last phase is under way until the load has ended."""

    name: str
    """For example `loading weights`."""
    seconds: float
    """Its duration so far."""
    expected_s: float | None = None
    """Its duration when the model was last loaded; None: not known."""
    detail: str = ""
    """How far it is, for example `3 of 8 shards`; empty: not known."""


@attrs.frozen
class LoadStory:
    """A load of a worker: the load under way, or the last load."""

    elapsed_s: float
    """Its duration so far: the sum of its phases."""
    expected_s: float | None
    """Its probable duration in all, by the last loads of its model; None: there was none yet."""
    phases: Sequence[StoryPhase]
    """In their order, and never empty."""

    @property
    def rest_s(self) -> float | None:
        """The probable rest of its duration, less than 0 if it is slower than usual; None: not known."""
        return None if self.expected_s is None else self.expected_s - self.elapsed_s


def story_of(load: LoadStory) -> str:
    """Return the present phase of a load: `loading weights 3 of 8 shards, 12 s (last time 14 s); about 40 s left`."""
    words, rest_s = "", load.rest_s
    if load.phases:
        phase = load.phases[-1]
        words = f"{phase.name} {phase.detail}".rstrip() + f", {math.floor(phase.seconds)} s"
        if phase.expected_s is not None:
            words += f" (last time {_span(phase.expected_s)})"
    if rest_s is not None:
        left = f"about {math.ceil(rest_s)} s left" if rest_s > 0 else "it is slower than usual"
        words = f"{words}; {left}" if words else left
    return words


def summary_of(load: LoadStory) -> str:
    """Return the durations of a load: `21 s: importing vLLM 9 s, loading weights 2 s, …`. Short phases are left out."""
    phases = ", ".join(f"{phase.name} {_span(phase.seconds)}" for phase in load.phases if phase.seconds >= 1)
    return f"{_span(load.elapsed_s)}: {phases}" if phases else _span(load.elapsed_s)


def download_s(phases: Sequence[StoryPhase]) -> float:
    """Return the seconds in which a model was downloaded: no other load of the model has them."""
    return sum(phase.seconds for phase in phases if phase.name == DOWNLOADING)


def read_story(told: object) -> LoadStory | None:
    """Return the load of a worker in parsed JSON; None where there is none, or it has another form."""
    if not isinstance(told, dict):
        return None
    load = cast("dict[str, Any]", told)
    listed = load.get("phases")
    phases = cast("list[object]", listed) if isinstance(listed, list) else []
    found = [phase for one in phases if (phase := _read_phase(one)) is not None]
    elapsed_s = _seconds(load.get("elapsed_s"))
    return None if elapsed_s is None or not found else LoadStory(elapsed_s, _seconds(load.get("expected_s")), found)


def _read_phase(told: object) -> StoryPhase | None:
    if not isinstance(told, dict):
        return None
    phase: Mapping[str, Any] = cast("dict[str, Any]", told)
    seconds = _seconds(phase.get("seconds"))
    name, detail = phase.get("name"), phase.get("detail")
    if seconds is None or not isinstance(name, str):
        return None
    return StoryPhase(name, seconds, _seconds(phase.get("expected_s")), detail if isinstance(detail, str) else "")


def _seconds(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= SECONDS_MAX
    return float(cast("float", value)) if is_number else None


def _span(seconds: float) -> str:
    return f"{round(seconds)} s" if seconds >= 1 else UNDER_A_SECOND
