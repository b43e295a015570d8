"""`ichat.pyz keep gateway`: the first process of a container, which does for a gateway what systemd does elsewhere.

It starts the gateway, and starts it again after a crash. Relays and workers live on meanwhile: this process becomes
their parent. Neither Trio nor the gateway is imported, so it stays small and has little that can fail.
"""

import contextlib
import os
import secrets
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence

from ichat.config.command_line import CommandLineParser
from ichat.errors import EXIT_SOFTWARE, EXIT_USAGE, Exit
from ichat.program import own_command
from ichat.service_manager import NOTIFY_VARIABLE, WATCHDOG_VARIABLE, Notifier, become_subreaper

PAUSE_FIRST_S, PAUSE_MAX_S = 0.2, 5.0
"""Before a gateway that has crashed is started again: requests wait in the relays for timeouts.owner_wait_s."""
LIVED_S = 10.0
"""After this life, the pause is the first again."""
WATCHDOG_S = 30.0
"""A gateway that has been silent for this time is killed."""
LATE_S = 1.0
"""If this process itself wakes later than this, as after a pause of the container, no silence counts."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that the gateway gets."""
_PASSED_ON = ("READY=1", "STOPPING=1", "STATUS=")
_MESSAGE_BYTES = 4096
_CREDENTIALS = struct.Struct("3i")


class Keeper:
    """Keeps a gateway running."""

    def __init__(self, command: Sequence[str], notifier: Notifier, *, watchdog_s: float = WATCHDOG_S) -> None:
        """`notifier` is for the program that has started this process: it hears of the gateway's states."""
        self._command = [*command]
        self._notifier = notifier
        self._watchdog_s = watchdog_s
        self._main = 0
        """The gateway's process; 0: none."""
        self._main_fd = -1
        self._code: int | None = None
        self._is_stopping = False
        self._silent_at = float("inf")
        """The gateway is killed then."""
        self._signals, self._woken = socket.socketpair()
        self._messages = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def __repr__(self) -> str:
        return f"<Keeper of process {self._main}>"

    def run(self) -> int:
        """Keep the gateway running until it has ended in good order, or cannot begin; return its exit code."""
        become_subreaper()
        self._signals.setblocking(False)
        self._woken.setblocking(False)
        self._messages.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._messages.setblocking(False)
        self._messages.bind(f"\0ichat-keep-{secrets.token_hex(8)}")
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        for number in (*SIGNALS, signal.SIGCHLD):
            signal.signal(number, _ignore)
        pause_s = PAUSE_FIRST_S
        while True:
            began_at = time.monotonic()
            code = self._run_once()
            if self._is_stopping or code in (0, EXIT_USAGE):
                return code if code >= 0 else 128 - code
            if time.monotonic() - began_at > LIVED_S:
                pause_s = PAUSE_FIRST_S
            how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
            _say(f"the gateway has ended {how}: it is started again in {pause_s:g} s")
            until = time.monotonic() + pause_s
            while not self._is_stopping and time.monotonic() < until:
                self._wait(until)
            if self._is_stopping:
                return 0
            pause_s = min(PAUSE_MAX_S, 2 * pause_s)

    def _run_once(self) -> int:
        """Start the gateway, and return its exit code when it has ended; minus the signal that has ended it."""
        address = f"@{self._messages.getsockname()[1:].decode()}"
        watched = {NOTIFY_VARIABLE: address, WATCHDOG_VARIABLE: str(int(self._watchdog_s * 1e6))}
        # a session of its own: Ctrl-C at a terminal reaches this process alone, and is passed on once
        self._use(os.posix_spawn(self._command[0], self._command, {**os.environ, **watched}, setsid=True))
        has_ended = False
        while not has_ended:
            main, has_ended = self._main, bool(select.select([self._main_fd], [], [], 0)[0])
            self._wait(0.0 if has_ended else self._silent_at)  # its last message may name another process
            has_ended = has_ended and main == self._main
        self._reap()
        os.close(self._main_fd)
        self._main, self._main_fd = 0, -1
        if self._code is not None:
            return self._code
        return 0 if self._is_stopping else EXIT_SOFTWARE  # a process that a takeover has brought is no child

    def _use(self, pid: int) -> None:
        """Keep this process from now on. Raises ProcessLookupError if it has ended."""
        descriptor = os.pidfd_open(pid)
        if self._main_fd >= 0:
            os.close(self._main_fd)
        self._main, self._main_fd, self._code, self._silent_at = pid, descriptor, None, float("inf")

    def _wait(self, until: float) -> None:
        """Wait for signals, messages, the end of the gateway, or a time; then handle them."""
        watched = [self._signals, self._messages, *([self._main_fd] if self._main else [])]
        seconds = None if until == float("inf") else max(0.0, until - time.monotonic())
        select.select(watched, [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            for number in self._signals.recv(_MESSAGE_BYTES):
                self._obey(number)
        self._receive_all()
        late_s = time.monotonic() - self._silent_at
        if late_s > LATE_S:
            self._silent_at = time.monotonic() + self._watchdog_s
        elif late_s >= 0:
            self._silent_at = float("inf")
            _say(f"the gateway was silent for {self._watchdog_s:g} s: it is killed")
            self._send(signal.SIGKILL)

    def _obey(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._reap()
            return
        if number != signal.SIGHUP:
            self._is_stopping, self._silent_at = True, float("inf")
        self._send(number)

    def _send(self, number: int) -> None:
        if self._main:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._main_fd, number)

    def _receive_all(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._receive(*self._messages.recvmsg(_MESSAGE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))[:2])

    def _receive(self, message: bytes, ancillary: Sequence[tuple[int, int, bytes]]) -> None:
        """Obey a message of the gateway's process; messages of others are dropped."""
        senders = [_CREDENTIALS.unpack(data)[0] for _, kind, data in ancillary if kind == socket.SCM_CREDENTIALS]
        if senders != [self._main]:
            return
        for line in message.decode(errors="replace").splitlines():
            name, _, value = line.partition("=")
            if name == "MAINPID" and value.isdecimal():
                with contextlib.suppress(OSError, OverflowError):
                    self._use(int(value))
            elif line in ("READY=1", "WATCHDOG=1") and not self._is_stopping:
                self._silent_at = time.monotonic() + self._watchdog_s
            elif line == "STOPPING=1":
                self._silent_at = float("inf")
            if line.startswith(_PASSED_ON):
                self._notifier.send(line)

    def _reap(self) -> None:
        """Reap all children that have ended, and note how the gateway has.

        The waiting messages count before each child: they may say that this child is the gateway's process.
        """
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                self._receive_all()
                code = os.waitstatus_to_exitcode(os.waitpid(ended.si_pid, 0)[1])
                if ended.si_pid == self._main:
                    self._code = code


def _ignore(*_: object) -> None:
    """Do nothing: the descriptor for wake-ups gets the signal's number."""


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError):
        print(f"ichat.pyz keep: {sentence}", file=sys.stderr, flush=True)


def parser() -> CommandLineParser:
    """Return the parser of the command."""
    usage = CommandLineParser(
        prog="ichat.pyz keep",
        description="Run a gateway as the first process of a container, and start it again after a crash.",
        allow_abbrev=False,
    )
    usage.add_argument("role", metavar="gateway", help="followed by the flags of `ichat.pyz gateway`")
    return usage


def run(argv: Sequence[str]) -> int:
    """Keep a gateway with these flags running; return its exit code. Raises Exit 64."""
    role = parser().parse_args(list(argv[:1])).role
    if role != "gateway":
        raise Exit(
            EXIT_USAGE, f"ichat.pyz keep: `{role}` cannot be kept: `ichat.pyz keep gateway -c FILE` keeps a gateway."
        )
    notifier = Notifier.taken_from(os.environ)
    return Keeper([*own_command(sys.executable), *argv], notifier).run()
