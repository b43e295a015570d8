"""Processes that have lost their parent: whose they are, and that none of them stays a zombie.

The gateway is a child subreaper (prctl(2)): what a worker leaves behind becomes a child of the gateway, not of init.
"""

import contextlib
import ctypes
import os
import pathlib
import select
import signal
from collections.abc import Callable, Collection

import psutil
import trio

from ichat.supervisor.processes import is_alive

WORKER_TAG_VAR = "ICHAT_WORKER"
"""The variable that says which start of which worker a process belongs to, in whatever session it is."""
_PR_SET_CHILD_SUBREAPER = 36
REAP_S = 2.0
"""A child that nobody waits for is a zombie for so long at least: one that was started just now is waited for soon."""


def become_subreaper() -> None:
    """Have the kernel give this process what its descendants leave behind; without effect where it knows no such."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


async def reap_forever(known: Callable[[], Collection[int]]) -> None:
    """Wait for the children that are not among the `known` pids, which others wait for, once they have ended.

    Children are looked for now and then, since a handler of SIGCHLD belongs to whoever started them.
    """
    seen: set[int] = set()
    while True:
        await trio.sleep(REAP_S)
        zombies = set[int]()
        if _has_zombie():
            zombies = {pid for pid in await trio.to_thread.run_sync(_zombies) if pid not in known()}
        for pid in seen & zombies:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222
        seen = zombies


def _has_zombie() -> bool:
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _zombies() -> list[int]:
    found: list[int] = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.status() == psutil.STATUS_ZOMBIE:
                found.append(child.pid)
    return found


def marked(mark: str) -> list[psutil.Process]:
    """Give the live processes that were started with this mark, wherever their parents have gone."""
    return [process for process, found in marked_by(mark) if found == mark]


def marked_by(beginning: str) -> list[tuple[psutil.Process, str]]:
    """Give the live processes other than this one whose mark begins so, each with its mark."""
    name, found = f"{WORKER_TAG_VAR}=".encode(), list[tuple[psutil.Process, str]]()
    for pid in set(psutil.pids()) - {os.getpid()}:
        with contextlib.suppress(OSError, psutil.Error):
            words = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            mark = next((word[len(name) :].decode(errors="replace") for word in words if word.startswith(name)), "")
            process = psutil.Process(pid)
            if mark and mark.startswith(beginning) and is_alive(process):
                found.append((process, mark))
    return found


def process_identity(pid: int) -> str:
    """Tell a process from every other that has had or will have its pid: the boot, and its start since then.

    Empty where there is none. proc_pid_stat(5), field 22. Raises OSError where that cannot be looked up.
    """
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] == "Z" else f"{boot}:{fields[19]}"


class AdoptedProcess:
    """A process that another one started: as much of `trio.Process` as can be had of it."""

    def __init__(self, pid: int) -> None:
        """Hold on to a process that lives. Raises ProcessLookupError."""
        self.pid = pid
        self.returncode: int | None = None
        """Never known; what says that it has ended is that `wait` returns."""
        self._fd = os.pidfd_open(pid)

    def __repr__(self) -> str:
        return f"<Adopted {self.pid}>"

    async def wait(self) -> None:
        """Wait until it has ended."""
        await trio.lowlevel.wait_readable(self._fd)

    def has_ended(self) -> bool:
        """Say whether it has ended."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal. Raises ProcessLookupError."""
        signal.pidfd_send_signal(self._fd, number)

    def kill(self) -> None:
        """Kill it. Raises ProcessLookupError."""
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Let go of it."""
        os.close(self._fd)
