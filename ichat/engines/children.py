"""The processes that an engine starts: none outlives the worker, and none dies unnoticed.

In a spawned child, multiprocessing imports the parent's main module under the name `__mp_main__`, but not that of a
zipapp. So `adopt_children` puts this module in its place. The child then asks the kernel to kill it when the thread
that started it ends: the engine's thread, which lasts as long as the worker. Grandchildren inherit the main module
and do the same.

Two more things are set up before anything else runs in a child. It asks the kernel for AMX, the matrix registers of
some Intel processors; vLLM's attention uses them without asking, and would die of SIGILL. And a fatal signal logs the
child's stack.
"""

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import platform
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from multiprocessing.process import BaseProcess

import attrs
import psutil

_PR_SET_PDEATHSIG = 1
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
"""The call by which a process on x86-64 asks for AMX; it fails, and changes nothing, where there is none."""
_LOOK_S = 0.05


def _set_up_child() -> None:
    """Set up a child before anything else runs in it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if platform.machine() == "x86_64":
        libc.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    faulthandler.enable(2)  # standard error, wherever that leads


if __name__ == "__mp_main__":
    _set_up_child()


def adopt_children() -> None:
    """Let every process that multiprocessing spawns from now on import this module first."""
    main = sys.modules["__main__"]
    main.__spec__ = None
    main.__file__ = __file__


@attrs.frozen
class Child:
    """A descendant of this process."""

    process: BaseProcess | psutil.Process
    """A process of multiprocessing's if this process has started it itself."""
    title: str
    """The title that it has set. It is known only while the process runs."""

    def has_ended(self) -> bool:
        """Return whether it has ended."""
        if isinstance(self.process, BaseProcess):
            return not self.process.is_alive()
        try:
            return not self.process.is_running() or self.process.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            return True


def children(prefix: str = "") -> list[Child]:
    """Return the running processes that multiprocessing started from here.

    If `prefix` is given, the result includes all other descendants with a title that begins with it.
    """
    own = {process.pid: process for process in multiprocessing.active_children()}
    found: list[Child] = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            title = words[0] if words and "python" not in words[0] else ""
            if process.pid in own:
                found.append(Child(own[process.pid], title or own[process.pid].name))
            elif prefix and title.startswith(prefix):
                found.append(Child(process, title))
    return found


class ProcessFamily:
    """Processes that an engine cannot work without. A single system call checks whether any of them has ended."""

    def __init__(self, members: Iterable[Child] = ()) -> None:
        self._members = list(members)
        self._epoll = select.epoll()
        self._by_fd: dict[int, Child] = {}
        self._unwatched: list[Child] = []
        """Processes that had ended already, and all of them if the kernel has no pidfds."""
        for child in self._members:
            try:
                fd = os.pidfd_open(child.process.pid or 0)
            except OSError:
                self._unwatched.append(child)
            else:
                self._by_fd[fd] = child
                self._epoll.register(fd, select.EPOLLIN)

    def __repr__(self) -> str:
        return f"<ProcessFamily of {', '.join(child.title for child in self._members) or 'none'}>"

    def __iter__(self) -> Iterator[Child]:
        return iter(self._members)

    def first_dead(self) -> str | None:
        """Return which of them has ended, and how; None while all are alive."""
        for fd, _ in self._epoll.poll(0, 1):
            return describe_child_exit(self._by_fd[fd])
        return first_dead(self._unwatched) if self._unwatched else None


def first_dead(among: Iterable[Child]) -> str | None:
    """Return which of these processes has ended, and how; None while all are alive."""
    return next((describe_child_exit(child) for child in among if child.has_ended()), None)


def describe_child_exit(child: Child) -> str:
    """Return how a process has ended, as far as that is known here."""
    code = child.process.exitcode if isinstance(child.process, BaseProcess) else None
    how = "" if code is None else f" with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
    return f"its process {child.title} (pid {child.process.pid}) ended{how}"


def wait_for_end(of: Iterable[Child], limit_s: float) -> None:
    """Wait until all of these processes have ended, but not longer than `limit_s`. Blocks."""
    deadline = time.monotonic() + limit_s
    for child in of:
        if isinstance(child.process, BaseProcess):
            child.process.join(max(deadline - time.monotonic(), _LOOK_S))
