"""The output of a worker that may not be in its file yet, in memory that other processes hold open too.

A reader moves bytes from the worker's pipe to this memory in a single step, and notes after each write where the file
ends.
So the next reader knows, wherever the last reader was killed, which lines the file lacks.
"""

import contextlib
import os
import struct
from collections.abc import Mapping

import attrs

from ichat.observability.logs.files import LogFile, LogFiles, LogPlace
from ichat.observability.logs.lines import Line, LineSplitter
from ichat.observability.logs.pipes import READ_BYTES, PipeSource

JOURNAL = "journal"
KEPT_BYTES = 1024 * 1024
_HEAD = struct.Struct("<4sIQQQQ")
_FORM = b"log1"
_PARTIAL_MAX = 64 * 1024
_DATA = 2 * _PARTIAL_MAX
"""Where the bytes of the pipe begin: behind the head and the partial line."""


@attrs.frozen
class Journaled:
    """The notes of the last reader, and the bytes that it has read since."""

    number: int
    """Of the last line in the file then."""
    place: LogPlace
    """Where the file ended then."""
    data: bytes
    """A partial line, and everything after it."""


class Journal:
    """The unwritten output of a start of a worker. A single thread uses it."""

    def __init__(self, fd: int, kept_bytes: int = KEPT_BYTES) -> None:
        """Own a descriptor of this memory. `kept_bytes` may be kept though their lines are in the file."""
        self._fd, self._kept_bytes = fd, kept_bytes
        self._end = max(0, os.fstat(fd).st_size - _DATA)

    def __repr__(self) -> str:
        return f"<Journal {self._fd}, {self._end} bytes>"

    @classmethod
    def make(cls) -> "Journal | None":
        """Return an empty journal; None if this system has none. Raises OSError if there are no more descriptors."""
        return cls(os.memfd_create("ichat-log", os.MFD_CLOEXEC)) if hasattr(os, "splice") else None

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def receive(self, pipe: int) -> bytes:
        """Move bytes of a pipe here, and return them; nothing at the pipe's end. Raises OSError."""
        count = os.splice(pipe, self._fd, READ_BYTES, offset_dst=_DATA + self._end)
        data = os.pread(self._fd, count, _DATA + self._end)
        self._end += count
        return data

    def note(self, number: int, place: LogPlace, partial: bytes) -> None:
        """Note where the file ends, with the line of this number; a partial line is missing there. Raises OSError."""
        self._write(number, place, partial)
        if self._end > self._kept_bytes:  # killed here or there: a position behind the end means that nothing follows
            os.ftruncate(self._fd, _DATA)
            self._end = 0
            self._write(number, place, partial)

    def _write(self, number: int, place: LogPlace, partial: bytes) -> None:
        partial = partial[:_PARTIAL_MAX]
        head = _HEAD.pack(_FORM, len(partial), number, place.inode, place.size, self._end)
        os.pwrite(self._fd, head + partial, 0)

    def read(self) -> Journaled | None:
        """Return the notes of the reader before; None if there are none. Raises OSError."""
        with contextlib.suppress(struct.error):
            form, partial, number, inode, size, position = _HEAD.unpack(os.pread(self._fd, _HEAD.size, 0))
            if form == _FORM:
                data = os.pread(self._fd, min(partial, _PARTIAL_MAX), _HEAD.size)
                while position < self._end and (more := os.pread(self._fd, self._end - position, _DATA + position)):
                    data, position = data + more, position + len(more)
                return Journaled(number, LogPlace(inode, size), data)
        return None

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)


class JournaledSource(PipeSource):
    """A pipe that is read through a journal, into a file."""

    def __init__(self, fd: int, lines: LineSplitter, journal: Journal, file: LogFile) -> None:
        super().__init__(fd, lines)
        self._journal, self._file = journal, file

    def read(self) -> bytes:
        """Return bytes of the pipe; none at its end."""
        return self._journal.receive(self.fd)

    def note(self, number: int) -> None:
        """Note in the journal that the file has all lines up to this number."""
        self._journal.note(number, self._file.place, self.lines.partial)

    @property
    def descriptors(self) -> Mapping[str, int]:
        """The descriptors with which another process can read on, by their names."""
        return {**super().descriptors, JOURNAL: self._journal.fileno()}

    def close(self) -> None:
        """Close the pipe and the journal."""
        super().close()
        self._journal.close()


def source_of(fd: int, lines: LineSplitter, journal: Journal | None, file: LogFile) -> PipeSource:
    """Return a pipe as the source of a file's lines; it is read through the journal if there is any."""
    return PipeSource(fd, lines) if journal is None else JournaledSource(fd, lines, journal, file)


@attrs.frozen
class Recovered:
    """The lines of a running start that an earlier gateway read."""

    lines: list[Line]
    """The last lines in the file."""
    last: int | None
    """The number of the newest of them; None: not known."""
    missing: list[bytes]
    """Lines that were read, and are not in the file."""
    splitter: LineSplitter
    """Has a partial line that was read."""


def recover(files: LogFiles, worker_id: str, journal: Journal | None) -> Recovered:
    """Read the file of a start, and find the lines that it lacks by its journal. May block. Raises OSError."""
    splitter, kept = LineSplitter(files.settings.line_bytes_max), files.settings.ring_lines_max
    lines = files.load(files.path_of(worker_id)).tail(kept)
    notes = None if journal is None else journal.read()
    if notes is None:
        return Recovered(lines, None, [], splitter)
    written, read = files.count_since(worker_id, notes.place), splitter.feed(notes.data)
    if written > len(read):  # the partial line is in the file, since it did not end in time
        splitter.flush()
    return Recovered(lines, notes.number + written, read[written:], splitter)
