"""Pipes for a worker's output, and the original output that it is passed on to.

A thread reads the pipes, never a Trio task: output of the Trio thread itself to a full pipe would wait for that task
for ever. The thread waits for nothing but its pipes, since every process that writes to them would wait with it.
So it hands bytes for the original output to another thread, and never logs where its own output is captured.
"""

import contextlib
import fcntl
import os
import select
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from ichat.observability.logs.lines import LineBuffer, LineSplitter

OUTPUT = "output"
PIPE_BYTES = 1024 * 1024
READ_BYTES = 64 * 1024
NAP_S = 0.01
"""The shortest time between two reads if little arrives, so that each line does not cost a switch of threads."""
NAP_BELOW_BYTES = 16 * 1024
PARTIAL_S = 1.0
"""A line that has not ended after this time is shown as it is."""
TEE_BYTES_MAX = 4 * 1024 * 1024
TEE_RETRY_S = 0.1


class Tee:
    """Passes bytes on to a descriptor that may be slow or broken: adding them never waits."""

    def __init__(self, fd: int, bytes_max: int = TEE_BYTES_MAX) -> None:
        """`fd` stays the caller's. At most `bytes_max` wait; further bytes are lost, and counted."""
        self._fd = fd
        self._bytes_max = bytes_max
        self._chunks: list[bytes] = []
        self._waiting = 0
        self._untold = 0
        self._closed = False
        self._changed = threading.Condition()
        self.lost_bytes = 0
        self.is_broken = False
        self._thread = threading.Thread(target=self._run, name="log tee", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Tee {self._fd}{' broken' if self.is_broken else ''}, {self._waiting} wait, {self.lost_bytes} lost>"

    def add(self, data: bytes) -> None:
        """Have bytes written soon, or lose them."""
        with self._changed:
            if self.is_broken or self._waiting + len(data) > self._bytes_max:
                self._untold += len(data)
                self.lost_bytes += len(data)
                return
            if self._untold:
                data = b"\n[ichat: %d bytes are missing here: they were not read in time]\n%b" % (self._untold, data)
                self._untold = 0
            self._chunks.append(data)
            self._waiting += len(data)
            self._changed.notify()

    def close(self, wait_s: float) -> bool:
        """Let waiting bytes be written, for at most `wait_s`; return whether the descriptor is not in use any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(max(0.0, wait_s))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._chunks and not self._closed:
                    self._changed.wait()
                if not self._chunks:
                    return
                data = b"".join(self._chunks)
                self._chunks.clear()
            left = self._write(data)
            with self._changed:
                self._waiting -= len(data)
                if left:
                    self.is_broken = True
                    self.lost_bytes += left + self._waiting
                    self._chunks.clear()
                    self._waiting = 0
                    return

    def _write(self, data: bytes) -> int:
        """Write all of it and return how many bytes can never be written."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:  # it was handed to us like that, and is shared with others
                with contextlib.suppress(OSError):
                    select.select([], [self._fd], [], TEE_RETRY_S)
            except OSError:
                return len(view)
        return 0


class TeeStream:
    """A stream for a logging handler: its lines are passed on by a Tee."""

    def __init__(self, tee: Tee) -> None:
        self._tee = tee

    def write(self, text: str) -> int:
        """Have a text written soon, or lose it."""
        self._tee.add(text.encode(errors="backslashreplace"))
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""


class PipeSource:
    """A pipe that is read."""

    def __init__(self, fd: int, lines: LineSplitter, tee: Tee | None = None) -> None:
        self.fd = fd
        self.lines = lines
        self.tee = tee

    def read(self) -> bytes:
        """Return bytes of the pipe; none at its end."""
        return os.read(self.fd, READ_BYTES)

    @property
    def descriptors(self) -> Mapping[str, int]:
        """The descriptors with which another process can read on, by their names."""
        return {OUTPUT: self.fd}

    def note(self, number: int) -> None:
        """Called when all lines up to this number have been passed on."""

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.fd)


class Sink(Protocol):
    """A place for lines beside the buffer; only the thread that reads the lines calls it. A sink must not block."""

    def append(self, lines: Sequence[bytes], now: float) -> None:
        """Add lines that arrived at the same time (seconds since 1970)."""
        ...

    def flush(self) -> None:
        """Pass on the added lines."""
        ...

    def close(self) -> None:
        """No line will follow."""
        ...


class PipeReader:
    """A thread that reads pipes until all have ended: into a buffer, and into sinks where there are any."""

    def __init__(
        self,
        sources: Sequence[PipeSource],
        buffer: LineBuffer,
        sinks: Sequence[Sink] = (),
        *,
        first: Sequence[bytes] = (),
        ends_buffer: bool = True,
        partial_s: float = PARTIAL_S,
    ) -> None:
        """Own the descriptors, the end of the sinks, and that of the buffer unless others go on with it.

        `first` are lines before those of the pipes.
        """
        self._sources = {source.fd: source for source in sources}
        self._buffer = buffer
        self._sinks = sinks
        self._first = [*first]
        self._ends_buffer = ends_buffer
        self._partial_s = partial_s
        self._deadline = 0.0
        self._settling: threading.Event | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._has_ended = False
        """Whether `_wake` is closed: its number may be that of another file then."""
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="log drain", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<PipeReader {len(self._sources)} pipes into {self._buffer!r}>"

    def fds(self) -> list[int]:
        """Return the descriptors that a process forked from this process does not need."""
        return [*self._sources] if self._has_ended else [*self._sources, self._wake]

    def settle(self, wait_s: float) -> bool:
        """Wait up to `wait_s` until the buffer has all output written before; return whether it has."""
        settling = self._settling = threading.Event()
        return settling.wait(wait_s) if self._notify() else True

    def stop(self, wait_s: float) -> None:
        """Read the available data, for at most `wait_s`, and end; do nothing if the pipes have ended."""
        if self._thread.is_alive():
            self._deadline = time.monotonic() + wait_s
            self._notify()
            self._thread.join(wait_s)

    def join(self, wait_s: float) -> bool:
        """Wait until the pipes have ended; return whether they have."""
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _notify(self) -> bool:
        """Wake the thread; return whether it still reads."""
        with self._ending:
            if not self._has_ended:
                os.eventfd_write(self._wake, 1)
            return not self._has_ended

    def _run(self) -> None:
        try:
            self._read_until_the_end()
        finally:
            for source in list(self._sources.values()):
                self._put(source.lines.flush())
                self._forget(source)
            for sink in self._sinks:
                sink.close()
            if self._ends_buffer:
                self._buffer.end()
            with self._ending:
                self._has_ended = True
                os.close(self._wake)
            if self._settling is not None:
                self._settling.set()

    def _read_until_the_end(self) -> None:
        poll, nap = select.poll(), select.poll()
        nap.register(self._wake, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        for fd in self._sources:
            poll.register(fd, select.POLLIN)
        self._put(self._first)
        self._pass_on()
        while self._sources:
            stopping, settling = self._deadline > 0, self._settling
            events = poll.poll(0 if stopping or settling else self._patience_ms())
            ready = [self._sources[fd] for fd, _ in events if fd in self._sources]
            if (self._wake, select.POLLIN) in events:
                os.eventfd_read(self._wake)
            if settling and not ready:
                settling.set()
                self._settling = None
            if stopping and (not ready or time.monotonic() > self._deadline):
                return
            size = 0
            for source in ready:
                data = source.read()
                size += len(data)
                if data:
                    self._take(source, data)
                else:
                    poll.unregister(source.fd)
                    self._put(source.lines.flush())
                    self._forget(source)
            self._show_partial_lines()
            self._pass_on()
            if not stopping and 0 < size < NAP_BELOW_BYTES:
                nap.poll(NAP_S * 1000)

    def _patience_ms(self) -> float | None:
        return self._partial_s * 1000 if any(source.lines.has_partial() for source in self._sources.values()) else None

    def _take(self, source: PipeSource, data: bytes) -> None:
        if source.tee is not None:
            source.tee.add(data)
        self._put(source.lines.feed(data))

    def _put(self, lines: list[bytes]) -> None:
        if lines:
            now = time.time()
            for sink in self._sinks:
                sink.append(lines, now)
            self._buffer.append(lines, now)

    def _pass_on(self) -> None:
        for sink in self._sinks:
            sink.flush()
        for source in self._sources.values():
            source.note(self._buffer.last)

    def _show_partial_lines(self) -> None:
        now = time.monotonic()
        for source in self._sources.values():
            if source.lines.has_partial() and now - source.lines.since >= self._partial_s:
                self._put(source.lines.flush())

    def _forget(self, source: PipeSource) -> None:
        del self._sources[source.fd]
        source.close()


def make_pipe() -> tuple[int, int]:
    """Make a pipe, for reading and for writing, that holds much, so that a reader may be late."""
    reading, writing = os.pipe()
    with contextlib.suppress(OSError):  # beyond /proc/sys/fs/pipe-user-pages-soft it stays at 64 KiB
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return reading, writing
