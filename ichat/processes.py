"""Ending processes so that none is left."""

import contextlib
import os
import signal
from collections.abc import Iterable

import psutil

LAUNCHER_FD = "ICHAT_LAUNCHER_FD"
"""Names the descriptor of a pipe whose other end a worker's launcher holds: it ends when the launcher does."""


def descendants(pid: int) -> list[psutil.Process]:
    """Give every process that stems from this one, without itself."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def session_members(session: int) -> list[psutil.Process]:
    """Give every live process of a session, wherever its parent has gone."""
    members: list[psutil.Process] = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if os.getsid(pid) == session:
                process = psutil.Process(pid)
                if is_alive(process):
                    members.append(process)
    return members


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill those that are still alive; a process id that has been given to another process meanwhile is left alone."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def kill_own_children(wait_s: float) -> None:
    """Kill everything that this process has started, and wait until it is gone; resource trackers end by themselves."""
    left = [process for process in descendants(os.getpid()) if not is_resource_tracker(process)]
    kill(left)
    psutil.wait_procs(left, timeout=wait_s)


def is_alive(process: psutil.Process) -> bool:
    """Say whether a process still runs; one that has ended but was not waited for does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_resource_tracker(process: psutil.Process) -> bool:
    """Say whether it is multiprocessing's: it ends right after those it watches, and removes what they have left."""
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False
