"""How one start of a managed worker goes, and what is known of its end."""

import math
import signal
import time
from collections.abc import Sequence

import attrs

from ichat.config.schema import Timeouts
from ichat.routing.worker_record import State, WorkerEnd
from ichat.supervisor.failure_causes import cause_of, describe_exit, oom_kills

_KILLED = ("SIGKILL", "exit code: -9")
_UP: frozenset[State] = frozenset(("ready", "following", "asleep", "waking"))
_NOT_UP_YET: frozenset[State] = frozenset(("starting", "loading"))
_STUCK: frozenset[State] = frozenset(("unhealthy", "wedged"))


@attrs.define
class RunProgress:
    """How one start of a worker goes, by the states it has been in."""

    began: float
    up_since: float | None = None
    stuck_since: float | None = None
    is_loading: bool = True
    is_wedged: bool = False

    def record(self, state: State, now: float, *, is_unheard: bool = False) -> None:
        """Note the state of the worker now; `is_unheard` says that an adopted one has not sent a heartbeat yet."""
        if state in _UP:
            self.up_since = now if self.up_since is None else self.up_since
        self.is_loading, self.is_wedged = state in _NOT_UP_YET, state == "wedged"
        if not (is_unheard or state in _STUCK):
            self.stuck_since = None
        elif self.stuck_since is None:
            self.stuck_since = now

    def up_s(self, now: float) -> float:
        """Return for how long it has been up; less than 0 if it never was."""
        return -1.0 if self.up_since is None else now - self.up_since

    def deadlines(self, timeouts: Timeouts) -> tuple[float, float]:
        """Return when the worker is to be ended, unless its state changes: for loading, and for being stuck."""
        loading = self.began + timeouts.load_s if self.is_loading else math.inf
        stuck = math.inf if self.stuck_since is None or not timeouts.stuck_s else self.stuck_since + timeouts.stuck_s
        return loading, stuck

    def failure(self, timeouts: Timeouts, now: float) -> str:
        """Return why the worker is to be ended now, to be put after its name; "" while it may go on."""
        loading, stuck = self.deadlines(timeouts)
        if now >= loading:
            return f"was not ready within {timeouts.load_s:g} s"
        if now >= stuck:
            return f"was {'wedged' if self.is_wedged else 'silent'} for {timeouts.stuck_s:g} s"
        return ""


@attrs.frozen
class RunResult:
    """How one start of a worker went."""

    end: WorkerEnd | None
    """How it ended; None: as requested."""
    was_up: bool = False
    """Whether it was ready before."""
    was_well: bool = False
    """Whether it was ready for so long that earlier failures do not count any more."""
    was_started: bool = True
    """Whether there was a process."""

    def count_failure(self, failures: int, attempts_max: int, *, is_on_demand: bool) -> int:
        """Return the failures in a row after this start, where there were `failures` before it.

        What keeps an on-demand worker from being started may be gone when its model is wanted again: a full GPU, for
        example. So that alone never makes `attempts_max`.
        """
        if self.end is None:
            return 0
        if self.was_well:
            return 1
        most = attempts_max - 1 if is_on_demand and not self.was_started else math.inf
        return failures if failures >= most else failures + 1


def end_of(
    code: int | None, why: str, lines: Sequence[str], *, ooms: int | None, told: str, lines_max: int
) -> WorkerEnd:
    """Return what is known of the end of a worker with this exit code and these last lines.

    `why` is set where the gateway has ended it, `ooms` is the kernel's count of such ends before it, and `told` what
    the worker itself said. `lines_max` lines are kept.
    """
    now = oom_kills()
    was_killed = code == -signal.SIGKILL or any(word in line for line in lines for word in _KILLED)
    oom_killed = bool(not why and was_killed and ooms is not None and now is not None and now > ooms)
    return WorkerEnd(
        why or describe_exit(code),
        time.time(),
        exit_code=code if code is not None and code >= 0 else None,
        signal=describe_exit(code).rpartition(" ")[2] if code is not None and code < 0 else None,
        oom_killed=oom_killed,
        cause="" if why else cause_of(lines, code, oom_killed=oom_killed, told=told) or told,
        last_lines=lines[len(lines) - min(len(lines), lines_max) :],
    )
