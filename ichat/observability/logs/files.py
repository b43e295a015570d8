"""Where lines come from and where they go: workers' pipes, the original output, files.

A thread reads, never a task of Trio's: what the Trio thread itself writes to a full pipe would wait for that task for
ever. The thread waits for nothing but its pipes, since every process that writes to them would wait with it; so it
hands what belongs to the original output to another thread, and never logs where its own output is captured.
"""

import contextlib
import fcntl
import logging
import os
import re
import select
import threading
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from ichat.observability.logs.lines import BYTES_MAX, LINES_MAX, LineBuffer, LineSplitter, timestamp

log = logging.getLogger(__name__)

PIPE_BYTES = 1024 * 1024
READ_BYTES = 64 * 1024
NAP_S = 0.01
"""The thread reads at most so often where little comes, so that each line does not cost a switch of threads."""
NAP_BELOW_BYTES = 16 * 1024
PARTIAL_S = 1.0
"""A line that has not ended for so long is shown as it is."""
TEE_BYTES_MAX = 4 * 1024 * 1024
TEE_RETRY_S = 0.1
FILE_BYTES_MAX = 16 * 1024 * 1024
FILES_MAX = 3
FILE_BUFFER_BYTES = 256 * 1024
FILE_RETRY_S = 5.0
_OURS = re.compile(r"\.log(\.\d+)?$")
_STAMPED = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (.*)", re.DOTALL)


class Tee:
    """Passes bytes on to a descriptor that may be slow or broken: whoever gives them never waits."""

    def __init__(self, fd: int, bytes_max: int = TEE_BYTES_MAX) -> None:
        """`fd` stays the caller's. At most `bytes_max` wait; what comes beyond is lost, and counted."""
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
                data = b"\n[ichat: %d bytes are missing here: nobody took them in time]\n%b" % (self._untold, data)
                self._untold = 0
            self._chunks.append(data)
            self._waiting += len(data)
            self._changed.notify()

    def close(self, wait_s: float) -> bool:
        """Let what waits be written, for so long; say whether the descriptor is not in use any more."""
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
        """Write all of it; give how many bytes can never be written."""
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
    """What a logging handler writes to: lines that are passed on by a Tee."""

    def __init__(self, tee: Tee) -> None:
        self._tee = tee

    def write(self, text: str) -> int:
        """Have a text written soon, or lose it."""
        self._tee.add(text.encode(errors="backslashreplace"))
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""


class PipeSource:
    """One pipe that is read."""

    def __init__(self, fd: int, lines: LineSplitter, tee: Tee | None = None) -> None:
        self.fd = fd
        self.lines = lines
        self.tee = tee


class Sink(Protocol):
    """Where lines go beside the ring; only the thread that reads them calls it, which may not be held up."""

    def append(self, lines: Sequence[bytes], now: float) -> None:
        """Take lines that came at one time (seconds since 1970)."""
        ...

    def flush(self) -> None:
        """Pass on what was taken."""
        ...

    def close(self) -> None:
        """No line will follow."""
        ...


class PipeReader:
    """A thread that reads pipes until all have ended: into a ring, and into sinks where there are any."""

    def __init__(
        self, sources: Sequence[PipeSource], ring: LineBuffer, sinks: Sequence[Sink] = (), *, ends_ring: bool = True
    ) -> None:
        """Take over the descriptors, the end of the sinks, and that of the ring unless others go on with it."""
        self._sources = {source.fd: source for source in sources}
        self._ring = ring
        self._sinks = sinks
        self._ends_ring = ends_ring
        self._deadline = 0.0
        self._settling: threading.Event | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="log drain", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Drain {len(self._sources)} pipes into {self._ring!r}>"

    def fds(self) -> list[int]:
        """Give the descriptors that no process which is forked from this one needs."""
        return [*self._sources, self._wake]

    def settle(self, wait_s: float) -> bool:
        """Wait, for so long, until the ring has what was written by now; say whether it has."""
        settling = self._settling = threading.Event()
        if self._ring.ended:
            return True
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)
        return settling.wait(wait_s)

    def stop(self, wait_s: float) -> None:
        """Read what is there now, for so long, and end; nothing where the pipes have ended."""
        if self._thread.is_alive():
            self._deadline = time.monotonic() + wait_s
            with contextlib.suppress(OSError):
                os.eventfd_write(self._wake, 1)
            self._thread.join(wait_s)

    def join(self, wait_s: float) -> bool:
        """Wait until the pipes have ended; say whether they have."""
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._read_until_the_end()
        finally:
            for source in list(self._sources.values()):
                self._put(source.lines.flush())
                self._forget(source)
            for sink in self._sinks:
                sink.close()
            if self._ends_ring:
                self._ring.end()
            if self._settling is not None:
                self._settling.set()
            os.close(self._wake)

    def _read_until_the_end(self) -> None:
        poll, nap = select.poll(), select.poll()
        nap.register(self._wake, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        for fd in self._sources:
            poll.register(fd, select.POLLIN)
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
                data = os.read(source.fd, READ_BYTES)
                size += len(data)
                if data:
                    self._take(source, data)
                else:
                    poll.unregister(source.fd)
                    self._put(source.lines.flush())
                    self._forget(source)
            self._show_partial_lines()
            for sink in self._sinks:
                sink.flush()
            if not stopping and 0 < size < NAP_BELOW_BYTES:
                nap.poll(NAP_S * 1000)

    def _patience_ms(self) -> float | None:
        return PARTIAL_S * 1000 if any(source.lines.has_partial() for source in self._sources.values()) else None

    def _take(self, source: PipeSource, data: bytes) -> None:
        if source.tee is not None:
            source.tee.add(data)
        self._put(source.lines.feed(data))

    def _put(self, lines: list[bytes]) -> None:
        if lines:
            now = time.time()
            for sink in self._sinks:
                sink.append(lines, now)
            self._ring.append(lines, now)

    def _show_partial_lines(self) -> None:
        now = time.monotonic()
        for source in self._sources.values():
            if source.lines.has_partial() and now - source.lines.since >= PARTIAL_S:
                self._put(source.lines.flush())

    def _forget(self, source: PipeSource) -> None:
        del self._sources[source.fd]
        os.close(source.fd)


def follow(
    fd: int, ring: LineBuffer, *sinks: Sink, lines: LineSplitter | None = None, ends_ring: bool = True
) -> PipeReader:
    """Read a worker's output from a pipe until its end, in a thread; the descriptor is taken over."""
    return PipeReader([PipeSource(fd, lines or LineSplitter())], ring, sinks, ends_ring=ends_ring)


def make_pipe() -> tuple[int, int]:
    """Make a pipe, for reading and for writing, that holds much, so that a reader may be late."""
    reading, writing = os.pipe()
    with contextlib.suppress(OSError):  # beyond /proc/sys/fs/pipe-user-pages-soft it stays at 64 KiB
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return reading, writing


class LogFile:
    """Lines with their times in `NAME.log`; older ones in `NAME.log.1` and so on, a run before in `NAME.previous.log`.

    Nothing here raises, and no full disk holds anybody up: what cannot be written is counted, and that is said once.
    """

    def __init__(
        self,
        directory: str,
        name: str,
        *,
        bytes_max: int = FILE_BYTES_MAX,
        files_max: int = FILES_MAX,
        goes_on: bool = False,
    ) -> None:
        """Begin a new run, or go on with the newest; `files_max` older files are kept of it, and of the one before."""
        self.path = os.path.join(directory, f"{name}.log")
        self._previous = previous_path(directory, name)
        self._bytes_max = bytes_max
        self._files_max = files_max
        self._data = bytearray()
        self._fd: int | None = None
        self._size = 0
        self._is_new = not goes_on
        self._retry_at = 0.0
        self._is_torn = False
        self._untold = 0
        self.is_failing = False
        self.lost_lines = 0
        if goes_on and _is_torn(self.path):
            self._data += b"\n"
        try:
            self._make_ready(0)
        except OSError as error:
            self._fail(error)

    def __repr__(self) -> str:
        return f"<LogFile {self.path}{' failing' if self.is_failing else ''}, {self.lost_lines} lines lost>"

    def append(self, lines: Sequence[bytes], now: float) -> None:
        """Take lines that came at one time; they are written with the next flush, or when they are many."""
        stamp = timestamp(now).encode() + b" "
        self._data += b"".join([b"%b%b\n" % (stamp, line) for line in lines])
        if len(self._data) >= FILE_BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what was taken, or count it as lost; during an outage the file is tried every FILE_RETRY_S."""
        if not self._data:
            return
        data = bytes(self._data)
        self._data.clear()
        if self.is_failing and time.monotonic() < self._retry_at:
            self._lose(data.count(b"\n"))
            return
        note = b""
        if self._untold:
            torn = b"\n" if self._is_torn else b""
            note = b"%b[ichat: %d lines are missing here: they could not be written]\n" % (torn, self._untold)
        view = memoryview(note + data)
        try:
            self._make_ready(len(view))
            assert self._fd is not None
            while view:
                written = os.write(self._fd, view)
                self._size += written
                view = view[written:]
        except OSError as error:
            left = bytes(view)
            if len(left) < len(data):
                self._is_torn = data[-len(left) - 1 : -len(left)] != b"\n"
                self._untold = 0
            self._fail(error)
            self._lose(min(left.count(b"\n"), data.count(b"\n")))
        else:
            self._recover()

    def close(self) -> None:
        """Write what was taken, and close the file."""
        self.flush()
        self._close()

    def _make_ready(self, size: int) -> None:
        """Have an open file with room for so many bytes. Raises OSError."""
        if self._is_new:
            os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
            self._keep_previous()
            self._is_new = False
        if self._fd is not None and os.fstat(self._fd).st_nlink == 0:  # somebody has removed it
            self._close()
        if self._fd is not None and self._size and self._size + size > self._bytes_max:
            self._close()
            self._rotate()
        if self._fd is None:
            os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
            self._size = os.fstat(self._fd).st_size

    def _keep_previous(self) -> None:
        if not os.path.exists(self.path):
            return
        for suffix in _suffixes(self._files_max):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._previous + suffix)
            with contextlib.suppress(FileNotFoundError):
                os.rename(self.path + suffix, self._previous + suffix)

    def _rotate(self) -> None:
        *kept, oldest = _suffixes(self._files_max)
        if not kept:
            os.unlink(self.path)
        for suffix in reversed(kept):
            with contextlib.suppress(FileNotFoundError):
                os.rename(self.path + suffix, self.path + oldest)
            oldest = suffix

    def _close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            with contextlib.suppress(OSError):
                os.close(fd)

    def _lose(self, lines: int) -> None:
        self._untold += lines
        self.lost_lines += lines

    def _fail(self, error: OSError) -> None:
        self._close()
        self._retry_at = time.monotonic() + FILE_RETRY_S
        if not self.is_failing:
            self.is_failing = True
            log.error("%s cannot be written: %s; its lines are lost until it can", self.path, error.strerror)

    def _recover(self) -> None:
        if self.is_failing:
            log.warning("%s can be written again; %d lines of it are lost", self.path, self._untold)
        self.is_failing = self._is_torn = False
        self._untold = 0


def _is_torn(path: str) -> bool:
    """Say whether a file ends in the middle of a line."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            return size > 0 and file.read() != b"\n"
    except OSError:
        return False


def previous_path(directory: str, name: str) -> str:
    """Give where the run before the current one has its newest lines."""
    return os.path.join(directory, f"{name}.previous.log")


def load(
    path: str, *, lines_max: int = LINES_MAX, bytes_max: int = BYTES_MAX, files_max: int = FILES_MAX
) -> LineBuffer:
    """Read back the last lines of a LogFile, as a ring that has ended; empty where there is no file. May block."""
    ring = LineBuffer(lines_max, bytes_max)
    parts: list[bytes] = []
    room = bytes_max
    for suffix in _suffixes(files_max):
        try:
            with open(path + suffix, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - room))
                data = file.read(room)
        except OSError:
            break
        room -= len(data)
        if size > len(data):
            data = data.partition(b"\n")[2]
        parts.append(data)
        if room <= 0 or size > len(data):
            break
    at = 0.0
    text = b"".join(reversed(parts))
    for line in text.removesuffix(b"\n").split(b"\n") if text else []:
        stamped = _STAMPED.fullmatch(line)
        if stamped is not None:
            with contextlib.suppress(ValueError):
                at = datetime.fromisoformat(stamped[1].decode()).timestamp()
        ring.append([stamped[2] if stamped else line], at)
    ring.end()
    return ring


def prune(directory: str, older_than_s: float) -> None:
    """Remove the files of workers that have written nothing for so long; blocks, and raises nothing.

    A file of another program is known by its first line, which has no time like ours.
    """
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if _OURS.search(entry.name) and time.time() - entry.stat().st_mtime > older_than_s:
                    with open(entry.path, "rb") as file:
                        is_ours = _STAMPED.match(file.read(64)) is not None
                    if is_ours:
                        os.unlink(entry.path)


def _suffixes(files_max: int) -> list[str]:
    """Give the ends of a file's names, the newest first."""
    return ["", *(f".{number}" for number in range(1, files_max + 1))]
