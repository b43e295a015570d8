"""A model has a single download at a time: a lock file beside those of `huggingface_hub`, held by its process.

The kernel releases the lock at the end of that process, however it ends: a file without a holder is no lock. Others
that want the model read the holder's progress, and begin when it has ended.
"""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import threading
from collections.abc import Generator

import attrs

from ichat.downloads.report import DownloadReport, read_report

_LOCK, _PROGRESS = "ichat.lock", "ichat.json"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_PROGRESS_BYTES_MAX = 8192


class NoLocks(Exception):
    """The file system of a cache has no locks."""


@attrs.frozen
class LockHolder:
    """The process that has a lock."""

    pid: int
    """0: the kernel does not name it; it is on another machine, or in another container."""

    @property
    def words(self) -> str:
        """The process, as a sentence names it."""
        program = program_of(self.pid) if self.pid else ""
        name = f" ({program})" if program else ""
        return f"process {self.pid}{name}" if self.pid else "a process that cannot be seen from here"


class ModelLock:
    """The lock of a model in a cache, for its download and its removal."""

    def __init__(self, directory: str) -> None:
        """`directory` has the locks of the model."""
        self._directory = pathlib.Path(directory)

    def __repr__(self) -> str:
        return f"<ModelLock {self._directory}>"

    @contextlib.contextmanager
    def held(self) -> Generator[LockHolder | None]:
        """Hold the lock in the context; yields the process that has it, if another has it. Raises NoLocks and OSError.

        The context then holds nothing.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        with locked(self._directory / _LOCK) as holder:
            try:
                yield holder
            finally:
                if holder is None:
                    (self._directory / _PROGRESS).unlink(missing_ok=True)

    def show(self, report: DownloadReport) -> None:
        """Let others see how far the holder is. An error is ignored: the download goes on without that."""
        with contextlib.suppress(OSError):
            write_json(self._directory / _PROGRESS, attrs.asdict(report))

    def shown(self) -> DownloadReport | None:
        """Return how far the holder is; None: it does not say."""
        with contextlib.suppress(OSError), open(self._directory / _PROGRESS, "rb") as file:
            return read_report(file.read(_PROGRESS_BYTES_MAX))
        return None


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Generator[LockHolder | None]:
    """Lock a file in the context as `filelock` does; yields the holder if another process has it.

    Raises NoLocks and OSError.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
        try:
            holder = _try_lock(descriptor)
            if holder is None and not _is_file(descriptor, path):
                continue  # the holder before has removed the file
            yield holder
            return
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int) -> LockHolder | None:
    """Lock an open file; return the process that has the lock, None if it is ours now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return LockHolder(holder_of(os.fstat(descriptor).st_ino) or 0)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise NoLocks(error.strerror) from error
        raise
    return None


def _is_file(descriptor: int, path: pathlib.Path) -> bool:
    """Return whether an open file is still the file at this path."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def holder_of(inode: int) -> int | None:
    """Return the process that holds the lock on a file, by /proc/locks; 0: another container's; None: none is known.

    The file's device is not compared: file systems in layers have another there than in `stat`.
    """
    with contextlib.suppress(OSError, ValueError), open("/proc/locks", encoding="ascii") as file:
        for words in map(str.split, file):
            if len(words) > 5 and words[1] == "FLOCK" and words[5].endswith(f":{inode}"):
                return max(0, int(words[4]))
    return None


def pause(seconds: float) -> None:
    """Wait for this time, in a thread of a download's process."""
    threading.Event().wait(seconds)


def program_of(pid: int) -> str:
    """Return the name of a process' program; "" if it is not known."""
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    return ""


def write_json(path: pathlib.Path, value: object) -> None:
    """Write a file of JSON, whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}")
    try:
        beside.write_text(json.dumps(value), encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
