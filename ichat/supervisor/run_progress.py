"""The course of a start of a managed worker, and the facts about its end."""

import math
import signal
import time
from collections.abc import Sequence

import attrs

from ichat.config.schema import Timeouts
from ichat.fleet.worker_facts import WorkerEnd
from ichat.fleet.worker_record import State
from ichat.observability.logs.lines import Line
from ichat.placement.learnt import MemoryLack
from ichat.supervisor.failure_causes import cause_of, describe_exit, memory_lack_in, oom_kills
from ichat.supervisor.last_words import lines_of_end

_KILLED = ("SIGKILL", "exit code: -9")
_UP: frozenset[State] = frozenset(("ready", "following", "asleep", "waking"))
_NOT_UP_YET: frozenset[State] = frozenset(("starting", "loading"))
_STUCK: frozenset[State] = frozenset(("unhealthy", "wedged"))


@attrs.define
class RunProgress:
    """The course of a start of a worker, by the states it has been in."""

    began: float
    launched_at: float = attrs.field(init=False)
    """When it was launched: with a wait for its place, that is before it began."""
    up_since: float | None = None
    up_at: float | None = None
    """The same in seconds since 1970."""
    ended_at: float | None = None
    """When its process ended, or was to end, in seconds since 1970."""
    ooms: int | None = attrs.field(factory=oom_kills)
    """How many processes the kernel had ended for want of memory before; None: not known."""
    stuck_since: float | None = None
    is_loading: bool = True
    is_wedged: bool = False

    def __attrs_post_init__(self) -> None:
        self.launched_at = self.began

    def record(self, state: State, now: float, *, is_unheard: bool = False) -> None:
        """Note the state of the worker now; `is_unheard` says that an adopted worker has not sent a heartbeat yet."""
        if state in _UP:
            self.up_since = now if self.up_since is None else self.up_since
            self.up_at = time.time() if self.up_at is None else self.up_at
        self.is_loading, self.is_wedged = state in _NOT_UP_YET, state == "wedged"
        if not (is_unheard or state in _STUCK):
            self.stuck_since = None
        elif self.stuck_since is None:
            self.stuck_since = now

    def begin(self, now: float) -> None:
        """Note that its process begins only now."""
        self.began = now

    def end(self) -> None:
        """Note that its process has ended, or will."""
        self.ended_at = time.time()

    def up_s(self, now: float) -> float:
        """Return for how long it has been up; less than 0 if it never was."""
        return -1.0 if self.up_since is None else now - self.up_since

    def deadlines(self, timeouts: Timeouts) -> tuple[float, float]:
        """Return when the worker must end, unless its state changes: for loading, and for being stuck."""
        loading = self.began + timeouts.load_s if self.is_loading else math.inf
        stuck = math.inf if self.stuck_since is None or not timeouts.stuck_s else self.stuck_since + timeouts.stuck_s
        return loading, stuck

    def failure(self, timeouts: Timeouts, now: float) -> str:
        """Return why the worker must end now, as words after its name; "" while it may go on."""
        loading, stuck = self.deadlines(timeouts)
        if now >= loading:
            return f"was not ready within {timeouts.load_s:g} s"
        if now >= stuck:
            return f"was {'wedged' if self.is_wedged else 'silent'} for {timeouts.stuck_s:g} s"
        return ""


@attrs.frozen
class RunResult:
    """The result of a start of a worker."""

    end: WorkerEnd | None
    """How it ended; None: as requested."""
    was_up: bool = False
    """Whether it was ready before."""
    was_well: bool = False
    """Whether earlier failures do not count any more: it was ready long enough, or there was no place for it."""
    was_started: bool = True
    """Whether there was a process."""
    lack: MemoryLack | None = None
    """The lack of GPU memory by which it ended before it was ready."""

    def count_failure(self, failures: int, attempts_max: int, *, is_on_demand: bool) -> int:
        """Return the failures in a row after this start, where there were `failures` before it.

        The obstacle to an on-demand worker's start may be gone when its model is wanted again: a full GPU, for
        example. So that alone never makes `attempts_max`.
        """
        if self.end is None:
            return 0
        if self.was_well:
            return 1
        most = attempts_max - 1 if is_on_demand and not self.was_started else math.inf
        return failures if failures >= most else failures + 1


def lack_of(code: int | None, progress: RunProgress, lines: Sequence[Line]) -> MemoryLack | None:
    """Return the lack of GPU memory by which a start ended before it was ready; None: it had another end."""
    if progress.up_at is not None:
        return None
    return memory_lack_in(lines_of_end(lines, progress.ended_at or time.time(), None), code)


def end_of(
    code: int | None, why: str, progress: RunProgress, lines: Sequence[Line], *, told: str, lines_max: int
) -> WorkerEnd:
    """Return the facts about the end of a start with this exit code and these last lines.

    `why` is set if the gateway has ended it, and `told` is the worker's own reason. `lines_max` lines are kept.
    """
    ended_at = progress.ended_at or time.time()
    now, about = oom_kills(), lines_of_end(lines, ended_at, progress.up_at)
    was_killed = code == -signal.SIGKILL or any(word in line for line in about for word in _KILLED)
    oom_killed = None if progress.ooms is None or now is None else now > progress.ooms and was_killed and not why
    return WorkerEnd(
        why or describe_exit(code),
        ended_at,
        exit_code=code if code is not None and code >= 0 else None,
        signal=describe_exit(code).rpartition(" ")[2] if code is not None and code < 0 else None,
        oom_killed=bool(oom_killed),
        cause="" if why else cause_of(about, code, oom_killed=oom_killed, told=told) or told,
        last_lines=[line.text for line in lines[len(lines) - min(len(lines), lines_max) :]],
    )
