"""A worker's load in words, from its first second on: its present phase, and the duration of each past phase."""

import math

from ichat.cli.client import Json, object_of, objects_of
from ichat.cli.screen import Spinner, duration
from ichat.cli.views import progress_of

TOLD_S = 0.5
"""A phase that is over gets a line of its own if it lasted this many seconds."""


class LoadProgress:
    """Shows a worker's load: a line that changes, and a line for each phase that is over."""

    def __init__(self, spinner: Spinner) -> None:
        self._spinner = spinner
        self._told = 0
        """How many phases have their line."""

    def __repr__(self) -> str:
        return f"<LoadProgress, {self._told} phases>"

    def show(self, worker: Json) -> None:
        """Show the worker's load."""
        phases = objects_of(object_of(worker.get("load")).get("phases"))
        if len(phases) <= self._told:
            self._told = max(0, len(phases) - 1)  # it was started again
        for phase in phases[self._told : -1]:
            seconds = phase.get("seconds")
            if isinstance(seconds, int | float) and seconds >= TOLD_S:
                self._spinner.write_line(f"{worker.get('worker_id')}: {phase.get('name')} took {duration(seconds)}")
        self._told = max(0, len(phases) - 1)
        self._spinner.show(progress_of(worker), rest_of(worker))


def rest_of(worker: Json) -> str:
    """Return how far a load is and how long it will go on: `3 of 8 shards, 12 s (last time 14 s), about 40 s left`."""
    load = object_of(worker.get("load"))
    words: list[str] = []
    for phase in objects_of(load.get("phases"))[-1:]:
        seconds, expected = phase.get("seconds"), phase.get("expected_s")
        words.append(str(phase.get("detail") or ""))
        if isinstance(seconds, int | float):
            last = f" (last time {duration(expected)})" if isinstance(expected, int | float) else ""
            words.append(f"{math.floor(seconds)} s{last}")
    elapsed, expected = load.get("elapsed_s"), load.get("expected_s")
    rest = worker.get("ready_in_s")
    if isinstance(elapsed, int | float) and isinstance(expected, int | float):
        rest = expected - elapsed
    if isinstance(rest, int | float):
        words.append(f"about {duration(rest)} left" if rest > 0 else "it takes longer than usual")
    return ", ".join(filter(None, words))
