"""Lines in rotated files: written by `LogFile`, read back by `load`, removed by `prune`."""

import contextlib
import logging
import os
import re
import time
from collections.abc import Sequence

import attrs

from ichat.config.schema import Logs
from ichat.observability.logs.lines import BYTES_MAX, LINES_MAX, LineBuffer, read_timestamp, timestamp

log = logging.getLogger(__name__)

FILE_BYTES_MAX = 16 * 1024 * 1024
FILES_MAX = 3
FILE_BUFFER_BYTES = 256 * 1024
FILE_RETRY_S = 5.0
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_PREVIOUS = ".previous"
_LOG_NAME = re.compile(r"\.log(\.\d+)?$")
_STAMPED = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (.*)", re.DOTALL)


@attrs.frozen
class LogPlace:
    """The end of the newest file of a worker at some time."""

    inode: int = 0
    """0: there was no file."""
    size: int = 0


class LogFile:
    """Lines with their times in `NAME.log`; older lines in `NAME.log.1` and so on, a run before in `NAME.previous.log`.

    Nothing here raises, and a full disk delays no worker: lost lines are counted, and logged once.
    """

    def __init__(
        self,
        directory: str,
        name: str,
        *,
        bytes_max: int = FILE_BYTES_MAX,
        files_max: int = FILES_MAX,
        goes_on: bool = False,
        retry_s: float = FILE_RETRY_S,
    ) -> None:
        """Begin a new run, or go on with the newest; `files_max` older files are kept of it, and of the run before."""
        self.path = os.path.join(directory, f"{name}.log")
        self._previous = previous_path(directory, name)
        self._bytes_max = bytes_max
        self._files_max = files_max
        self._data = bytearray()
        self._fd: int | None = None
        self._size = 0
        self._is_new = not goes_on
        self._retry_s = retry_s
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
        """Add lines that arrived at the same time; they are written with the next flush, or when they are many."""
        stamp = timestamp(now).encode() + b" "
        self._data += b"".join([b"%b%b\n" % (stamp, line) for line in lines])
        if len(self._data) >= FILE_BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the added lines, or count them as lost; during an outage the file is tried again every `retry_s`."""
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

    @property
    def place(self) -> LogPlace:
        """Where the file ends, without lines that are not flushed."""
        return LogPlace() if self._fd is None else LogPlace(os.fstat(self._fd).st_ino, self._size)

    def close(self) -> None:
        """Write the added lines, and close the file."""
        self.flush()
        self._close()

    def _make_ready(self, size: int) -> None:
        """Have an open file with room for `size` bytes. Raises OSError."""
        if self._is_new:
            os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
            self._keep_previous()
            self._is_new = False
        if self._fd is not None and os.fstat(self._fd).st_nlink == 0:  # it was removed
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
        self._retry_at = time.monotonic() + self._retry_s
        if not self.is_failing:
            self.is_failing = True
            log.error("%s cannot be written: %s; its lines are lost until it can", self.path, error.strerror)

    def _recover(self) -> None:
        if self.is_failing:
            log.warning("%s can be written again; %d lines of it are lost", self.path, self._untold)
        self.is_failing = self._is_torn = False
        self._untold = 0


class LogFiles:
    """All workers' files in a directory, by the workers' ids."""

    def __init__(self, directory: str, settings: Logs) -> None:
        """The directory is made when the first file is, by these settings; further files follow later settings."""
        self.directory = directory
        self.settings = settings

    def __repr__(self) -> str:
        return f"<LogFiles {self.directory}>"

    def path_of(self, worker_id: str) -> str:
        """Return the file that has the newest lines of a worker. Raises ValueError for an invalid id."""
        return os.path.join(self.directory, f"{_name_of(worker_id)}.log")

    def previous_of(self, worker_id: str) -> str:
        """Return the file that has the lines of the start before. Raises ValueError for an invalid id."""
        return previous_path(self.directory, _name_of(worker_id))

    def suffixes(self) -> Sequence[str]:
        """Return the ends of the names of a run's files, the newest first."""
        return _suffixes(self.settings.files_max)

    def open(self, worker_id: str, *, goes_on: bool) -> LogFile:
        """Open a worker's file for a new start, or go on with it. Raises ValueError for an invalid id."""
        bounds = {"bytes_max": self.settings.file_bytes_max, "files_max": self.settings.files_max}
        return LogFile(self.directory, _name_of(worker_id), **bounds, goes_on=goes_on)

    def count_since(self, worker_id: str, place: LogPlace) -> int:
        """Return how many lines of a worker follow a place in its files; 0 if that is not known. May block."""
        count, path = 0, self.path_of(worker_id)
        for suffix in _suffixes(self.settings.files_max):
            try:
                with open(path + suffix, "rb") as file:
                    is_there = os.fstat(file.fileno()).st_ino == place.inode
                    file.seek(place.size if is_there else 0)
                    count += sum(_STAMPED.match(line) is not None and line.endswith(b"\n") for line in file)
            except OSError:
                break
            if is_there:
                return count
        return 0

    def load(self, path: str) -> LineBuffer:
        """Read back as many lines of a file as are kept in memory; see `load`. May block."""
        kept = self.settings
        return load(path, lines_max=kept.ring_lines_max, bytes_max=kept.ring_bytes_max, files_max=kept.files_max)


def is_worker_id(text: str) -> bool:
    """Return whether a worker of this id can have files."""
    return _ID.fullmatch(text) is not None


def _name_of(worker_id: str) -> str:
    """Return the name of a worker's files. Raises ValueError for an invalid id."""
    if not is_worker_id(worker_id):
        raise ValueError(f"not a worker's id: {worker_id[:200]!r}")
    return f"{worker_id}~" if worker_id.endswith(_PREVIOUS) else worker_id


def _is_torn(path: str) -> bool:
    """Return whether a file ends in the middle of a line."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            return size > 0 and file.read() != b"\n"
    except OSError:
        return False


def previous_path(directory: str, name: str) -> str:
    """Return the path of the newest lines of the previous run."""
    return os.path.join(directory, f"{name}.previous.log")


def load(
    path: str, *, lines_max: int = LINES_MAX, bytes_max: int = BYTES_MAX, files_max: int = FILES_MAX
) -> LineBuffer:
    """Read back the last lines of a LogFile, as a buffer that has ended; empty where there is no file. May block."""
    buffer = LineBuffer(lines_max, bytes_max)
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
                at = read_timestamp(stamped[1].decode()).timestamp()
        buffer.append([stamped[2] if stamped else line], at)
    buffer.end()
    return buffer


def prune(directory: str, older_than_s: float) -> None:
    """Remove the files of workers that have written nothing for `older_than_s`; blocks, and raises nothing.

    The first line of another program's file has no time like ours, and such a file stays.
    """
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if _LOG_NAME.search(entry.name) and time.time() - entry.stat().st_mtime > older_than_s:
                    with open(entry.path, "rb") as file:
                        is_ours = _STAMPED.match(file.read(64)) is not None
                    if is_ours:
                        os.unlink(entry.path)


def _suffixes(files_max: int) -> list[str]:
    """Return the ends of a file's names, the newest first."""
    return ["", *(f".{number}" for number in range(1, files_max + 1))]
