"""The cost of loading a model that is not loaded, for operators before they do it."""

from collections.abc import Sequence
from typing import Annotated, Literal

import attrs

from ichat.config.strict import Between
from ichat.protocol.messages import Count


@attrs.frozen
class EvictionView:
    """A worker that would be evicted to make room."""

    worker_id: str
    model: str
    kind: Literal["stop", "sleep"]
    """Whether its process would be ended, or only put to sleep."""
    idle_s: Annotated[float, Between(0)] | None
    """Seconds for which it has had no request; None: it has requests, which are answered first."""


@attrs.frozen
class ObstacleView:
    """A worker that cannot be evicted now, although its room is needed."""

    worker_id: str
    model: str
    why: str
    """In a few words, to be put after the worker's name."""


@attrs.frozen
class ScaleView:
    """The number of copies of a model, and the last decision about it."""

    min: Count
    max: Count
    ready: Count
    starting: Count
    draining: Count
    """Copies that get no more requests, and end after their last request."""
    load: Annotated[float, Between(0)] | None
    """The load in copies; null: not known now, so that nothing changes."""
    reason: str
    """Why the number is as it is: `steady`, `busy`, `waiting`, `idle`, `unknown`, `failing`, `full`, `below_min` or
    `above_max`."""
    busy_s: Annotated[float, Between(0)] | None
    """Seconds for which all samples have been busy; None: the last sample was not."""
    changed: Literal["up", "down", "stay"] | None
    """The direction of the last change; None: there was none."""
    changed_reason: str | None
    changed_s: Annotated[float, Between(0)] | None
    """Seconds since the last change."""


@attrs.frozen
class LoadView:
    """The load that the model would need now. The question itself loads nothing."""

    worker_id: str
    """The worker that would be started, or woken."""
    evicts: Sequence[EvictionView]
    waits_for: Sequence[ObstacleView]
    expected_s: Annotated[float, Between(0)] | None
    """The usual duration of a load, in seconds; None: it has not been loaded yet."""
