"""A managed worker's life: the state that is wanted, the actual state, and the next action that follows from both.

Everything here is a value or a pure function. Operators, the loader and a reload change only `Wanted`. `ManagedWorker`
carries out what `next_action` returns, and moves to the values that the events below return.
"""

import math
from typing import Literal

import attrs
from attrs import frozen

from ichat.config.schema import Restart
from ichat.errors import EXIT_USAGE
from ichat.fleet.worker_record import State
from ichat.supervisor.run_progress import RunResult
from ichat.supervisor.swaps import Phase

DOUBLED_MAX = 64
"""How often the wait before a restart is doubled, at most."""


@frozen
class Wanted:
    """The state that a worker is wanted to reach."""

    state: Literal["cold", "loaded", "asleep", "gone"]
    """`gone` is for good: nothing else can be wanted after it."""
    run: int = 0
    """Processes of earlier runs must end: they have another table, or were unloaded."""
    drain_s: float | None = None
    """The seconds for which requests may delay the end or the sleep of a process; None: the configured time."""
    takes_requests: bool = True
    """Whether a loaded worker gets new requests. The loader stops them before it makes room."""


@frozen
class NoProcess:
    """There is no process, and none is being started."""

    run: int = 0
    """The last run."""
    kind: Literal["new", "cold", "stopped", "failed"] = "new"
    """`new` will be started for the first time, or after it was cold; `stopped` has ended as requested."""
    failures: int = 0
    """Failures in a row."""
    may_start_at: float = -math.inf
    """The earliest time of the next start after a failure; `inf`: only after an operator's or a reload's call."""


@frozen
class Alive:
    """A process runs, or is about to be started."""

    run: int
    failures: int = 0
    """Failures in a row before this start."""


@frozen
class Starting(Alive):
    """It waits for room, is checked or loads; or it answers no longer."""


@frozen
class Serving(Alive):
    """It is ready for requests."""


@frozen
class Sleeping(Alive):
    """Its engine has freed its memory."""


@frozen
class Changing(Alive):
    """The gateway has asked its engine to sleep or to wake."""

    to: Literal["asleep", "ready"] = "ready"


@frozen
class Clearing(Alive):
    """Its process has ended or is being ended, and what stems from it is cleared away."""


Actual = NoProcess | Starting | Serving | Sleeping | Changing | Clearing


@frozen
class LifeAction:
    """The next thing to do for a worker."""

    kind: Literal["start", "cool", "end", "sleep", "wake", "leave", "wait"]
    """`cool` records that the worker is cold, `leave` that nothing of a removed worker is left."""
    until: float = math.inf
    """Of `wait`: when to ask again if nothing changes."""


def must_end(wanted: Wanted, actual: Alive) -> bool:
    """Return whether the process must end."""
    return wanted.state in ("cold", "gone") or wanted.run > actual.run


def next_action(wanted: Wanted, actual: Actual, now: float) -> LifeAction:
    """Return what to do now to reach the wanted state."""
    if isinstance(actual, NoProcess):
        return _next_without_process(wanted, actual, now)
    if isinstance(actual, Clearing):
        return LifeAction("wait")
    if must_end(wanted, actual):
        return LifeAction("end")
    if isinstance(actual, Serving) and wanted.state == "asleep":
        return LifeAction("sleep")
    if isinstance(actual, Sleeping) and wanted.state == "loaded":
        return LifeAction("wake")
    return LifeAction("wait")


def _next_without_process(wanted: Wanted, actual: NoProcess, now: float) -> LifeAction:
    is_due = now >= actual.may_start_at or wanted.run > actual.run
    if wanted.state == "gone":
        return LifeAction("leave")
    if wanted.state == "loaded":
        return LifeAction("start") if is_due else LifeAction("wait", actual.may_start_at)
    if actual.kind == "cold":
        return LifeAction("wait")
    return LifeAction("cool") if is_due else LifeAction("wait", actual.may_start_at)


def phase_of(wanted: Wanted, actual: Actual, state: State) -> Phase:
    """Return how far a worker is on the way to serve its model, or to give its room back.

    `state` is that of its record, as if the worker were not drained.
    """
    if isinstance(actual, NoProcess):
        if actual.kind in ("cold", "failed"):
            return "cold" if actual.kind == "cold" else "down"
        return "starting" if wanted.state == "loaded" else "ending"
    is_for_sleep = (isinstance(actual, Changing) and actual.to == "asleep") or (
        isinstance(actual, Serving) and wanted.state == "asleep"
    )
    if isinstance(actual, Clearing) or must_end(wanted, actual) or is_for_sleep or state == "draining":
        return "ending"
    if isinstance(actual, Sleeping):
        return "waking" if wanted.state == "loaded" else "asleep"
    if isinstance(actual, Changing) or state == "waking":
        return "waking"
    if not wanted.takes_requests:
        return "draining"
    return "ready" if isinstance(actual, Serving) else "starting"


def absence_of(actual: Actual) -> Literal["", "cold", "stopped", "failed"]:
    """Return why there is no process; "" if a process runs or is about to be started."""
    return "" if not isinstance(actual, NoProcess) or actual.kind == "new" else actual.kind


def is_drained(wanted: Wanted, actual: Actual, *, on_demand: bool) -> bool | None:
    """Return whether a worker gets no new requests; None while there is no process to send any to.

    Requests for a worker that is loaded on demand wait while its ended process is cleared away.
    """
    if wanted.state == "gone":
        return True
    if isinstance(actual, NoProcess):
        return None
    is_for_sleep = wanted.state == "asleep" and not isinstance(actual, Sleeping)
    is_cleared = isinstance(actual, Clearing) and on_demand
    return must_end(wanted, actual) or is_for_sleep or is_cleared or not wanted.takes_requests


def does_return(wanted: Wanted, actual: Actual) -> bool:
    """Return whether a worker is started anew after the end of its process, which must end."""
    return wanted.state == "loaded" and isinstance(actual, Alive) and must_end(wanted, actual)


# Events.


def begun(wanted: Wanted, actual: NoProcess) -> Starting:
    """Return the state of a worker at the beginning of a start: a new run forgets the failures of those before it."""
    return Starting(wanted.run, 0 if wanted.run > actual.run else actual.failures)


def observed(wanted: Wanted, actual: Actual, state: State) -> tuple[Wanted, Actual]:
    """Return both values after a look at the state of a worker's record, as if the worker were not drained.

    An engine that went to sleep or woke without the gateway's request is left so.
    """
    is_woken = isinstance(actual, Changing) and actual.to == "ready" and state == "ready"
    if isinstance(actual, NoProcess | Changing | Clearing) and not is_woken:
        return wanted, actual
    kind = Sleeping if state == "asleep" else Serving if state in ("ready", "following") else Starting
    if isinstance(actual, kind):
        return wanted, actual
    if kind is Sleeping and wanted.state == "loaded":
        wanted = attrs.evolve(wanted, state="asleep")
    elif isinstance(actual, Sleeping) and wanted.state == "asleep":
        wanted = attrs.evolve(wanted, state="loaded")
    return wanted, kind(actual.run, actual.failures)


def ended(
    wanted: Wanted, actual: Alive, result: RunResult, settings: Restart, now: float, *, on_demand: bool
) -> tuple[Wanted, NoProcess]:
    """Return both values after the end of a run.

    After an end by itself, a worker that is loaded on demand is not wanted any more: the loader asks for it again.
    """
    if result.end is None or must_end(wanted, actual):
        return wanted, NoProcess(actual.run, "stopped")
    most = settings.attempts_max
    failures = result.count_failure(actual.failures, most, is_on_demand=on_demand)
    is_final = result.end.exit_code == EXIT_USAGE or failures >= most
    wait_s = math.inf if is_final else min(settings.longest_s, settings.first_s * 2.0 ** min(failures - 1, DOUBLED_MAX))
    kind = "cold" if on_demand and result.was_up and not is_final else "failed"
    if on_demand or wanted.state == "asleep":
        wanted = attrs.evolve(wanted, state="cold" if on_demand else "loaded", takes_requests=True)
    return wanted, NoProcess(actual.run, kind, failures, now + wait_s)


def forgiven(actual: Actual) -> Actual:
    """Return the state of a worker with its failures forgotten: it may be started at once."""
    if isinstance(actual, NoProcess):
        return NoProcess(actual.run, actual.kind)
    return attrs.evolve(actual, failures=0)
