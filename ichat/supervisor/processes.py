"""Ending processes so that none is left."""

import contextlib
import os
import pathlib
import select
import signal
import threading
from collections.abc import Iterable

import psutil
import trio

LAUNCHER_FD = "ICHAT_LAUNCHER_FD"
"""Names the descriptor of a pipe to a worker's launcher: the pipe ends when the launcher does."""
AUTOGROUP_NICE = 5
NICE_TRIES, NICE_RETRY_S = 20, 0.12


def descendants(pid: int) -> list[psutil.Process]:
    """Return every process that stems from this process, without itself."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


async def lower_session_priority(session: int) -> None:
    """Lower the weight of a new session where the kernel shares processors between sessions.

    That is autogroup (sched(7)), which counts only outside control groups. With equal weights a busy engine kept its
    gateway waiting for up to 26 s (Linux 6.18). A nice of 1 changed nothing; with 5 there was no such wait.
    """
    group = pathlib.Path(f"/proc/{session}/autogroup")
    for _ in range(NICE_TRIES):
        if _lower_weight(group):
            return
        await trio.sleep(NICE_RETRY_S)


def _lower_weight(group: pathlib.Path) -> bool:
    """Lower a group's weight; return whether that is done or impossible. Users may do it ten times a second."""
    try:
        group.write_text(str(AUTOGROUP_NICE))
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def session_members(session: int) -> list[psutil.Process]:
    """Return every live process of a session, wherever its parent has gone; none for 0, since that is no session.

    In a container the kernel reports 0 for processes that were started from outside.
    """
    members: list[psutil.Process] = []
    if session <= 0:
        return members
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if os.getsid(pid) == session:
                process = psutil.Process(pid)
                if is_alive(process):
                    members.append(process)
    return members


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill those that are still alive, but no process that has got the pid of one of them meanwhile."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)


def kill_own_children(wait_s: float) -> None:
    """Kill everything that stems from this process, and wait until it is gone; resource trackers end by themselves.

    Processes that have lost their parent meanwhile are found if the session is this process' own.
    """
    own = os.getpid()
    found = descendants(own)
    if os.getsid(0) == own:
        found += [process for process in session_members(own) if process.pid != own and process not in found]
    left = [process for process in found if not is_resource_tracker(process)]
    kill(left)
    psutil.wait_procs(left, timeout=wait_s)


def launcher_pipe() -> int | None:
    """Return the descriptor that LAUNCHER_FD names, if any. From now on no child inherits it."""
    value = os.environ.get(LAUNCHER_FD)
    if not value:
        return None
    os.set_inheritable(int(value), False)
    return int(value)


def end_without_launcher(pipe: int, grace_s: float, kill_s: float, code: int) -> None:
    """End this process with all its children some time after its launcher, at the other end of this pipe.

    After `grace_s` everything is killed, with `kill_s` to disappear, and the process ends with `code`. A thread of its
    own does that, since the rest of the process may hang.
    """

    def wait() -> None:
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        poll.poll()
        threading.Event().wait(grace_s)
        kill_own_children(kill_s)
        os._exit(code)

    threading.Thread(target=wait, name="launcher", daemon=True).start()


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process still runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_resource_tracker(process: psutil.Process) -> bool:
    """Return whether it is multiprocessing's resource tracker, which cleans up after the processes it watches."""
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False
