"""Processes that have lost their parent: which worker they belong to, and that none of them stays a zombie.

The gateway is a child subreaper (prctl(2)): a process left by a worker becomes a child of the gateway, not of init.
"""

import contextlib
import os
import pathlib
import select
import signal
from collections.abc import Mapping, Sequence

import attrs
import psutil
import trio

from ichat.config.process_marks import WORKER_VARIABLE, mark_of
from ichat.hardware.machines import KnowsPids
from ichat.supervisor.processes import is_alive

REAP_S = 2.0
"""How long a child stays a zombie at least before it is reaped: other code may still wait for a new child."""


@attrs.frozen
class KnownPids:
    """The pids of several objects."""

    _of: Sequence[KnowsPids]

    @property
    def pids(self) -> Mapping[int, str]:
        """All of them, with their names."""
        return {pid: name for one in self._of for pid, name in one.pids.items()}


async def reap_forever(workers: KnowsPids) -> None:
    """Reap the children that have ended, except the workers' first processes, which other code waits for.

    Children are checked at intervals, since a handler of SIGCHLD belongs to the code that started them.
    """
    seen: set[int] = set()
    while True:
        await trio.sleep(REAP_S)
        zombies = set[int]()
        if _has_zombie():
            zombies = {pid for pid in await trio.to_thread.run_sync(_zombies) if pid not in workers.pids}
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
    """Return the live processes that were started with this mark, wherever their parents have gone."""
    return [process for process, found in marked_by(mark) if found == mark]


def marked_by(beginning: str) -> list[tuple[psutil.Process, str]]:
    """Return the live processes other than this process with a mark that begins so, each with its mark."""
    found = list[tuple[psutil.Process, str]]()
    for pid in set(psutil.pids()) - {os.getpid()}:
        mark = mark_of(pid, WORKER_VARIABLE)
        with contextlib.suppress(psutil.Error):
            if mark and mark.startswith(beginning) and is_alive(process := psutil.Process(pid)):
                found.append((process, mark))
    return found


def process_identity(pid: int) -> str:
    """Return the identity of a process among all with its pid: the boot, and the time of its start since then.

    Empty if there is no such process. proc_pid_stat(5), field 22. Raises OSError if that cannot be read.
    """
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] == "Z" else f"{boot}:{fields[19]}"


class AdoptedProcess:
    """A process that another process started: as much of `trio.Process` as is possible for it."""

    def __init__(self, pid: int) -> None:
        """Open a process that is alive. Raises ProcessLookupError."""
        self.pid = pid
        self.returncode: int | None = None
        """Never known; `wait` returns when it has ended."""
        self._fd = os.pidfd_open(pid)

    def __repr__(self) -> str:
        return f"<AdoptedProcess {self.pid}>"

    async def wait(self) -> None:
        """Wait until it has ended."""
        await trio.lowlevel.wait_readable(self._fd)

    def has_ended(self) -> bool:
        """Return whether it has ended."""
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
        """Close its descriptor."""
        os.close(self._fd)
