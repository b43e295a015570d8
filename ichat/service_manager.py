"""The messages of a gateway to its service manager: systemd or `ichat.pyz keep`; see sd_notify(3).

Only the standard library is imported: the keeper has nothing else in its memory.
"""

import contextlib
import ctypes
import os
import socket
import time
from collections.abc import Generator, Mapping, MutableMapping, Sequence

NOTIFY_VARIABLE, WATCHDOG_VARIABLE = "NOTIFY_SOCKET", "WATCHDOG_USEC"
_VARIABLES = (NOTIFY_VARIABLE, WATCHDOG_VARIABLE, "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
_FIRST_DESCRIPTOR = 3
_PR_SET_CHILD_SUBREAPER = 36


class Notifier:
    """Sends messages to the program that has started this process, if it wants any."""

    def __init__(self, address: str = "", watchdog_s: float = 0.0, descriptors: Sequence[int] = ()) -> None:
        """`address` is that of its socket; "" for none."""
        self._address = address
        self.watchdog_s = watchdog_s
        """It ends this process if it hears nothing for this time; 0: it does not."""
        self.descriptors = descriptors
        """The sockets that it has opened for this process."""
        self._is_ready = False

    def __repr__(self) -> str:
        return f"<Notifier {self._address}>"

    @classmethod
    def taken_from(cls, environment: MutableMapping[str, str]) -> "Notifier":
        """Return the service manager that an environment names. The variables are removed, so no child has them."""
        found = {name: environment.pop(name, "") for name in _VARIABLES}
        own = str(os.getpid())
        is_watched = found["WATCHDOG_PID"] in ("", own)
        count = _whole(found["LISTEN_FDS"]) if found["LISTEN_PID"] == own else 0
        return cls(
            found[NOTIFY_VARIABLE],
            _whole(found[WATCHDOG_VARIABLE]) / 1e6 if is_watched else 0.0,
            range(_FIRST_DESCRIPTOR, _FIRST_DESCRIPTOR + count),
        )

    def variables(self) -> Mapping[str, str]:
        """Return the environment of a process that will replace this process; see `follow`."""
        watched = {WATCHDOG_VARIABLE: str(int(self.watchdog_s * 1e6))} if self.watchdog_s else {}
        return {NOTIFY_VARIABLE: self._address, **watched} if self._address else {}

    def send(self, *lines: str) -> bool:
        """Send a message; return whether the service manager has received it. It never waits."""
        if not self._address.startswith(("/", "@")):
            return False
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.sendto("\n".join(lines).encode(), address)
        except OSError:
            return False
        return True

    def ready(self) -> None:
        """Report that requests are accepted."""
        self._is_ready = True
        self.send("READY=1")

    @contextlib.contextmanager
    def reloading(self) -> Generator[None]:
        """Report the beginning and the end of a reload, if requests are accepted."""
        if self._is_ready:
            self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            yield
        finally:
            if self._is_ready:
                self.send("READY=1")

    def stopping(self, within_s: float) -> None:
        """Report that the process ends, and ask for this time."""
        self._is_ready = False
        self.send("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int(within_s * 1e6)}")

    def would_follow(self, pid: int) -> bool:
        """Whether another process may replace this process: systemd wants it in the unit's control group."""
        return not self._address or _control_group_of(pid) == _control_group_of(os.getpid())

    def follow(self, pid: int) -> bool:
        """Report that another process replaces this process; return False if it was not received."""
        self._is_ready = False
        return not self._address or self.send(f"MAINPID={pid}")


def become_subreaper() -> None:
    """Have the kernel make this process the parent of orphaned descendants; without effect on older kernels."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _control_group_of(pid: int) -> str:
    """Return the control groups of a process, in the form of cgroups(7); "" if they cannot be read."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else 0
