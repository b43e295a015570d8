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
"""Names the descriptor of a pipe whose other end a worker's launcher holds: it ends when the launcher does."""
AUTOGROUP_NICE = 5
STAND_BACK_TRIES, STAND_BACK_EVERY_S = 20, 0.12


def descendants(pid: int) -> list[psutil.Process]:
    """Give every process that stems from this one, without itself."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


async def lower_session_priority(session: int) -> None:
    """Have a session that was just made leave others their turn, where the kernel shares processors between sessions.

    That is autogroup (sched(7)), which counts outside of control groups alone. With equal weights a busy engine kept
    its gateway waiting for up to 26 s (Linux 6.18); so it did with a nice of 1, and with 5 not at all.
    """
    group = pathlib.Path(f"/proc/{session}/autogroup")
    for _ in range(STAND_BACK_TRIES):
        if _stands_back(group):
            return
        await trio.sleep(STAND_BACK_EVERY_S)


def _stands_back(group: pathlib.Path) -> bool:
    """Lower a group's weight; say whether that is done, or cannot be. Not root may do so ten times a second."""
    try:
        group.write_text(str(AUTOGROUP_NICE))
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def session_members(session: int) -> list[psutil.Process]:
    """Give every live process of a session, wherever its parent has gone; none of 0, which is no session.

    In a container, 0 is what the kernel says of whatever was started from outside.
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
    """Kill those that are still alive; a process id that has been given to another process meanwhile is left alone."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)


def kill_own_children(wait_s: float) -> None:
    """Kill everything that stems from this process, and wait until it is gone; resource trackers end by themselves.

    What has lost its parent meanwhile is found where the session is this process' own.
    """
    own = os.getpid()
    found = descendants(own)
    if os.getsid(0) == own:
        found += [process for process in session_members(own) if process.pid != own and process not in found]
    left = [process for process in found if not is_resource_tracker(process)]
    kill(left)
    psutil.wait_procs(left, timeout=wait_s)


def launcher_pipe() -> int | None:
    """Give the descriptor that LAUNCHER_FD names; None where it names none. No child inherits it from now on."""
    value = os.environ.get(LAUNCHER_FD)
    if not value:
        return None
    os.set_inheritable(int(value), False)
    return int(value)


def end_without_launcher(pipe: int, grace_s: float, kill_s: float, code: int) -> None:
    """See to it that nothing of this process is left some time after the end of its launcher, whose pipe this is.

    After `grace_s` everything is killed, with `kill_s` to disappear, and the process ends with `code`. A thread does
    it that waits for no other: it is for the case that the rest of the process hangs.
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
