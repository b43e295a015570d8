"""The processes that an engine starts: that none outlives the worker, and that none dies unnoticed.

multiprocessing makes a spawned child import its parent's main module under the name `__mp_main__`. A zipapp's main
module is not imported there, so `adopt_children` puts this module in its place. In the child, the kernel is asked to
end it when the thread that started it ends: the engine's thread, which lasts as long as the worker, however the
worker ends. Grandchildren get the same treatment, since they inherit the main module.
"""

import contextlib
import ctypes
import multiprocessing
import signal
import sys
import time
from collections.abc import Iterable
from multiprocessing.process import BaseProcess

import attrs
import psutil

_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.05

if __name__ == "__mp_main__":
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_children() -> None:
    """Make every process that multiprocessing spawns from now on import this module first."""
    main = sys.modules["__main__"]
    main.__spec__ = None
    main.__file__ = __file__


@attrs.frozen
class Child:
    """A process that multiprocessing started from here."""

    process: BaseProcess
    title: str
    """What it calls itself: more than multiprocessing knows, and known only while it lives."""


def children() -> list[Child]:
    """Give the processes that multiprocessing started from here and that are still alive."""
    return [Child(process, _title(process)) for process in multiprocessing.active_children()]


def _title(process: BaseProcess) -> str:
    with contextlib.suppress(psutil.Error):
        words = psutil.Process(process.pid).cmdline()
        if words and "python" not in words[0]:
            return words[0]
    return process.name


def first_dead(among: Iterable[Child]) -> str | None:
    """Say which of these processes has ended, and how; None while all are alive."""
    for child in among:
        if not child.process.is_alive():
            code = child.process.exitcode
            how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
            return f"its process {child.title} (pid {child.process.pid}) ended with {how}"
    return None


def wait_for_end(of: Iterable[Child], limit_s: float) -> None:
    """Wait until all of these processes have ended, for so long at most. Blocks."""
    deadline = time.monotonic() + limit_s
    for child in of:
        child.process.join(max(deadline - time.monotonic(), _LOOK_S))
