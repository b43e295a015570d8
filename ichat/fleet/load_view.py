"""The cost of loading a model that is not loaded, for operators before they do it."""

from collections.abc import Sequence
from typing import Annotated, Literal

import attrs

from ichat.config.strict import Between


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
class LoadView:
    """The load that the model would need now. The question itself loads nothing."""

    worker_id: str
    """The worker that would be started, or woken."""
    evicts: Sequence[EvictionView]
    waits_for: Sequence[ObstacleView]
    expected_s: Annotated[float, Between(0)] | None
    """The usual duration of a load, in seconds; None: it has not been loaded yet."""
