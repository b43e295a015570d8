"""This process' own standard output and error: captured into a buffer, and passed on to their original places."""

import contextlib
import faulthandler
import io
import os
import sys
import time

from ichat.observability.logs.lines import LINE_BYTES_MAX, LineBuffer, LineSplitter
from ichat.observability.logs.pipes import TEE_BYTES_MAX, PipeReader, PipeSource, Tee, make_pipe

CLOSE_S = 2.0
STDOUT, STDERR = 1, 2


class Capture:
    """Captures this process' standard output and error, before it has children that inherit them.

    All output goes into a buffer, and on to its original place. If both have the same place, as in a terminal, they
    share a pipe, so that the order is kept. If there are two places, each keeps its own output.
    """

    def __init__(
        self, buffer: LineBuffer, *, line_bytes_max: int = LINE_BYTES_MAX, tee_bytes_max: int = TEE_BYTES_MAX
    ) -> None:
        """Begin to capture. Output of children in Python is not held back from now on (PYTHONUNBUFFERED)."""
        os.environ["PYTHONUNBUFFERED"] = "1"
        self._originals: dict[int, int] = {}
        self.tees: list[Tee] = []
        self._closed = False
        for fd in (STDOUT, STDERR):
            _open_if_closed(fd)
        _flush()
        apart = not os.path.samestat(os.fstat(STDOUT), os.fstat(STDERR))
        self.buffer = buffer
        sources: list[PipeSource] = []
        for fds in ((STDOUT,), (STDERR,)) if apart else ((STDOUT, STDERR),):
            self._originals.update({fd: os.dup(fd) for fd in fds})
            reading, writing = make_pipe()
            for fd in fds:
                os.dup2(writing, fd)
            os.close(writing)
            tee = Tee(self._originals[fds[0]], tee_bytes_max)
            self.tees.append(tee)
            sources.append(PipeSource(reading, LineSplitter(line_bytes_max), tee))
        self._drain = PipeReader(sources, buffer)
        faulthandler.enable(self._originals[STDERR])  # no thread reads the pipe of a process that has crashed
        os.register_at_fork(after_in_child=self._forget_in_child)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)

    def __repr__(self) -> str:
        return f"<Capture {self._drain!r}, {self.tees}>"

    def settle(self, wait_s: float) -> bool:
        """Wait up to `wait_s` until the buffer has all output written before; return whether it has. May block."""
        _flush()
        return self._drain.settle(wait_s)

    def close(self, wait_s: float = CLOSE_S) -> None:
        """Restore the descriptors, and let earlier output arrive at its place, for at most `wait_s`."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + wait_s
        _flush()
        for fd, original in self._originals.items():
            os.dup2(original, fd)
        faulthandler.enable(STDERR)
        self._drain.stop(wait_s)
        idle = [tee.close(deadline - time.monotonic()) for tee in self.tees]
        if all(idle):
            for original in self._originals.values():
                os.close(original)

    def _forget_in_child(self) -> None:
        """Close, in a forked child, the descriptors that would keep pipes open after the end of this process."""
        if not self._closed:
            self._closed = True
            faulthandler.enable(STDERR)
            for fd in (*self._drain.fds(), *self._originals.values()):
                with contextlib.suppress(OSError):
                    os.close(fd)


def _open_if_closed(fd: int) -> None:
    """Let /dev/null stand in for a descriptor that this process was started without."""
    try:
        os.fstat(fd)
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)
        if null != fd:
            os.dup2(null, fd)
            os.close(null)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
