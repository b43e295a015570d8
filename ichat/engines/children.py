"""The processes that an engine starts: that none outlives the worker, and that none dies unnoticed.

multiprocessing makes a spawned child import its parent's main module under the name `__mp_main__`. A zipapp's main
module is not imported there, so `adopt_children` puts this module in its place. In the child, the kernel is asked to
end it when the thread that started it ends: the engine's thread, which lasts as long as the worker, however the
worker ends. Grandchildren get the same treatment, since they inherit the main module.

Two more things concern a process before anything else runs in it. The kernel lets a process use AMX, the matrix
registers of some Intel processors, only after the process has asked; vLLM's attention uses them without, and dies of
SIGILL where no library has asked before. And a process that a signal ends says so, with its stack, in the log.
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


def _settle_in() -> None:
    """Do in a child what must come before everything else."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if platform.machine() == "x86_64":
        libc.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    faulthandler.enable(2)  # standard error, wherever that leads


if __name__ == "__mp_main__":
    _settle_in()


def adopt_children() -> None:
    """Make every process that multiprocessing spawns from now on import this module first."""
    main = sys.modules["__main__"]
    main.__spec__ = None
    main.__file__ = __file__


@attrs.frozen
class Child:
    """A process that stems from this one."""

    process: BaseProcess | psutil.Process
    """As multiprocessing knows it, where it was started by this process itself."""
    title: str
    """What it calls itself, which is known only while it lives."""

    def has_ended(self) -> bool:
        """Say whether it runs no more."""
        if isinstance(self.process, BaseProcess):
            return not self.process.is_alive()
        try:
            return not self.process.is_running() or self.process.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            return True


def children(kin: str = "") -> list[Child]:
    """Give the processes that multiprocessing started from here and that are alive.

    Where `kin` is given, so are all others that stem from this one and call themselves something beginning with it.
    """
    own = {process.pid: process for process in multiprocessing.active_children()}
    found: list[Child] = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            title = words[0] if words and "python" not in words[0] else ""
            if process.pid in own:
                found.append(Child(own[process.pid], title or own[process.pid].name))
            elif kin and title.startswith(kin):
                found.append(Child(process, title))
    return found


class ProcessFamily:
    """Processes that an engine cannot do without. To ask whether one has ended costs one system call for all."""

    def __init__(self, members: Iterable[Child] = ()) -> None:
        self._members = list(members)
        self._epoll = select.epoll()
        self._by_fd: dict[int, Child] = {}
        self._unwatched: list[Child] = []
        """Those that have ended before this began, and all of them where the kernel has no pidfds."""
        for child in self._members:
            try:
                fd = os.pidfd_open(child.process.pid or 0)
            except OSError:
                self._unwatched.append(child)
            else:
                self._by_fd[fd] = child
                self._epoll.register(fd, select.EPOLLIN)

    def __repr__(self) -> str:
        return f"<Family of {', '.join(child.title for child in self._members) or 'nobody'}>"

    def __iter__(self) -> Iterator[Child]:
        return iter(self._members)

    def first_dead(self) -> str | None:
        """Say which of them has ended, and how; None while all are alive."""
        for fd, _ in self._epoll.poll(0, 1):
            return describe_child_exit(self._by_fd[fd])
        return first_dead(self._unwatched) if self._unwatched else None


def first_dead(among: Iterable[Child]) -> str | None:
    """Say which of these processes has ended, and how; None while all are alive."""
    return next((describe_child_exit(child) for child in among if child.has_ended()), None)


def describe_child_exit(child: Child) -> str:
    """Say how a process has ended, as far as that can be known here."""
    code = child.process.exitcode if isinstance(child.process, BaseProcess) else None
    how = "" if code is None else f" with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
    return f"its process {child.title} (pid {child.process.pid}) ended{how}"


def wait_for_end(of: Iterable[Child], limit_s: float) -> None:
    """Wait until all of these processes have ended, for so long at most. Blocks."""
    deadline = time.monotonic() + limit_s
    for child in of:
        if isinstance(child.process, BaseProcess):
            child.process.join(max(deadline - time.monotonic(), _LOOK_S))
