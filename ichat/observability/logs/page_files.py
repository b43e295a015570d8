"""Reads pages of a worker's files, backwards or forwards, and whole files. All but `FileBlocks` may block."""

import collections
import contextlib
import os
import re
import time
from collections.abc import Generator, Iterator, Sequence

import attrs
import trio
from typing_extensions import Self

from ichat.errors import ApiError
from ichat.observability.logs.files import LogFiles
from ichat.observability.logs.lines import read_timestamp
from ichat.observability.logs.pages import LogPage, PageLine, PageQuery, Position, TimeOfDay

READ_BYTES_MAX = 64 * 1024 * 1024
"""The most bytes that are read for a page; its answer says where to go on."""
READ_S = 1.0
"""The longest time of reading for a page, in seconds; its answer says where to go on."""
BLOCK_BYTES = 256 * 1024
LINE_BYTES_MAX = 1024 * 1024
"""A longer line is cut: it was written by another program."""
_STAMP = re.compile(rb"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) ", re.MULTILINE)
_COLOURS = re.compile(rb"\x1b\[[0-9;:]*m")
_GONE = "The lines of this position are not kept any more: read again from the end."


class _Renamed(Exception):
    """A file has another name than a moment before."""


@attrs.define
class Budget:
    """The bytes and the time that are left for a page."""

    bytes_left: int = READ_BYTES_MAX
    until: float = attrs.field(factory=lambda: time.monotonic() + READ_S)

    @property
    def is_spent(self) -> bool:
        return self.bytes_left <= 0 or time.monotonic() > self.until


@attrs.frozen
class FilePart:
    """A file of the chain that a worker's files are, from the oldest to the newest."""

    path: str
    inode: int
    size: int
    previous: bool
    is_last: bool
    """Whether lines are still added to it."""

    def open(self) -> int:
        """Return a descriptor. Raises _Renamed."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise _Renamed from error
        if os.fstat(fd).st_ino != self.inode:
            os.close(fd)
            raise _Renamed
        return fd

    def began_ms(self, fd: int) -> int:
        """Return the time of the first line; 0 if there is none."""
        found = _STAMP.search(os.pread(fd, BLOCK_BYTES, 0))
        return int(read_timestamp(found[1].decode()).timestamp() * 1000) if found else 0

    def end(self, fd: int) -> int:
        """Return the end of the last whole line."""
        if not self.is_last:
            return self.size
        begin = max(0, self.size - LINE_BYTES_MAX)
        found = os.pread(fd, self.size - begin, begin).rfind(b"\n")
        return begin + found + 1 if found >= 0 else begin


class LogPages:
    """Reads pages of the files of workers."""

    def __init__(self, files: LogFiles) -> None:
        self._files = files

    def __repr__(self) -> str:
        return f"<LogPages of {self._files!r}>"

    def read(self, worker_id: str, query: PageQuery) -> LogPage:
        """Return a page. Raises ApiError 404 for a position that is not kept any more, OSError for a lost disk."""
        for _ in range(10):
            with contextlib.suppress(_Renamed):
                return Reading(worker_files(self._files, worker_id, is_previous_only=query.previous), query).page()
        raise _too_often()

    def files_of(self, worker_id: str, *, previous: bool) -> Sequence[FilePart]:
        """Return the files of the newest run, or of the run before, oldest first."""
        with contextlib.suppress(_Renamed):
            found = worker_files(self._files, worker_id, is_previous_only=previous)
            return [part for part in found if part.previous == previous]
        raise _too_often()


class FileBlocks:
    """The bytes of files, in blocks that are read in threads."""

    def __init__(self, files: Sequence[FilePart], limiter: trio.CapacityLimiter) -> None:
        """`files` are read in their order; lines of a file that is removed meanwhile are left out."""
        self._files = collections.deque(files)
        self._limiter = limiter
        self._at = 0

    def __repr__(self) -> str:
        return f"<FileBlocks {len(self._files)} files>"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        block = await trio.to_thread.run_sync(self._read, limiter=self._limiter, abandon_on_cancel=True)
        if not block:
            raise StopAsyncIteration
        return block

    def _read(self) -> bytes:
        while self._files:
            part = self._files[0]
            with contextlib.suppress(_Renamed), _opened(part) as fd:
                data = os.pread(fd, min(BLOCK_BYTES, part.end(fd) - self._at), self._at)
                self._at += len(data)
                if data:
                    return data
            self._files.popleft()
            self._at = 0
        return b""


def worker_files(files: LogFiles, worker_id: str, *, is_previous_only: bool) -> Sequence[FilePart]:
    """Return the files that a worker has, oldest first: of the run before, and of the newest run. Raises _Renamed."""
    runs = [(files.path_of(worker_id), False), (files.previous_of(worker_id), True)]
    found: dict[int, FilePart] = {}
    for path, previous in runs[1:] if is_previous_only else runs:
        for suffix in files.suffixes():  # the newest first: a file that is renamed meanwhile is seen twice
            with contextlib.suppress(FileNotFoundError):
                stat = os.stat(path + suffix)
                if stat.st_ino in found:
                    raise _Renamed
                is_last = not (previous or suffix)
                found[stat.st_ino] = FilePart(path + suffix, stat.st_ino, stat.st_size, previous, is_last)
    return [*reversed(found.values())]


@attrs.define
class Reading:
    """A page that is being read."""

    chain: Sequence[FilePart]
    query: PageQuery
    budget: Budget = attrs.field(factory=Budget)
    block_bytes: int = BLOCK_BYTES

    def page(self) -> LogPage:
        """Return the page. Raises ApiError 404, _Renamed."""
        if not self.chain:
            return LogPage([], None, None)
        query = self.query
        if query.after is not None:
            return self._forwards(*self._find(query.after))
        if isinstance(query.before, TimeOfDay):
            index, offset = self._find_moment(query.before)
        elif query.before is not None:
            index, offset = self._find(query.before)
        else:
            index, offset = len(self.chain) - 1, -1
        return self._backwards(index, offset)

    def _find(self, position: Position) -> tuple[int, int]:
        """Return the index of a position's file and the offset there. Raises ApiError 404, _Renamed."""
        for index, part in enumerate(self.chain):
            if part.inode == position.inode and position.offset <= part.size:
                with _opened(part) as fd:
                    if position.began_ms == part.began_ms(fd) or position.offset == 0 == position.began_ms:
                        return index, position.offset
        raise ApiError(404, "not_found", _GONE)

    def _find_moment(self, moment: TimeOfDay) -> tuple[int, int]:
        """Return where the lines of a time end, less the known lines; (0, 0) if all lines are newer."""
        began_ms = int(read_timestamp(moment.at.decode()).timestamp() * 1000)
        for index in reversed(range(len(self.chain))):
            with _opened(self.chain[index]) as fd:
                if self.chain[index].began_ms(fd) > began_ms:
                    continue
                offset = _end_of_time(fd, self.chain[index].end(fd), moment.at)
            return self._step_back(index, offset, moment)
        return 0, 0

    def _step_back(self, index: int, offset: int, moment: TimeOfDay) -> tuple[int, int]:
        """Return the place before the known lines of a time, which end at a place: never more lines than there are."""
        known = moment.known
        while known:
            with _opened(self.chain[index]) as fd:
                for begin, data in _blocks_back(fd, offset, self.block_bytes):
                    for at, line in reversed(_lines(begin, data)):
                        if known == 0 or not line.startswith(moment.at):
                            return index, offset
                        offset, known = at, known - 1
            if index == 0:
                return 0, 0
            index -= 1
            with _opened(self.chain[index]) as fd:
                offset = self.chain[index].end(fd)
        return index, offset

    def _backwards(self, index: int, offset: int) -> LogPage:
        found: list[PageLine] = []
        began: str | None = None
        after: str | None = None
        while True:
            part = self.chain[index]
            with _opened(part) as fd:
                began_ms = part.began_ms(fd)
                end = part.end(fd) if offset < 0 else offset
                after = after or str(Position(part.inode, began_ms, end))
                for begin, data in _blocks_back(fd, end, self.block_bytes):
                    self.budget.bytes_left -= len(data)
                    lines = _matching(begin, data, self.query.text)
                    missing = self.query.limit - len(found)
                    for at, line in reversed(lines[-missing:]):
                        found.append(_shown(line, Position(part.inode, began_ms, at), part))
                    if len(lines) >= missing:
                        began = found[-1].position
                    elif self.budget.is_spent:
                        began = str(Position(part.inode, began_ms, begin))
                    if began is not None:
                        is_oldest = index == 0 and began.endswith(".0")
                        return LogPage(found[::-1], None if is_oldest else began, after)
            if index == 0:
                return LogPage(found[::-1], None, after)
            index, offset = index - 1, -1

    def _forwards(self, index: int, offset: int) -> LogPage:
        found: list[PageLine] = []
        reached: str | None = None
        first = self.chain[index]
        with _opened(first) as fd:
            began_ms = first.began_ms(fd)
        before = None if index == 0 == offset else str(Position(first.inode, began_ms, offset))
        for part in self.chain[index:]:
            with _opened(part) as fd:
                began_ms = part.began_ms(fd)
                end = part.end(fd)
                for begin, data in _blocks_on(fd, offset, end, self.block_bytes):
                    self.budget.bytes_left -= len(data)
                    lines = _matching(begin, data, self.query.text)
                    missing = self.query.limit - len(found)
                    for at, line in lines[:missing]:
                        found.append(_shown(line, Position(part.inode, began_ms, at), part))
                    if len(lines) > missing:
                        return LogPage(found, before, str(Position(part.inode, began_ms, lines[missing][0])))
                    if self.budget.is_spent:
                        return LogPage(found, before, str(Position(part.inode, began_ms, begin + len(data))))
                reached = str(Position(part.inode, began_ms, max(offset, end)))
            offset = 0
        return LogPage(found, before, reached)


def _too_often() -> ApiError:
    return ApiError(503, "unavailable", "The files of this log are renamed too often: try again.")


@contextlib.contextmanager
def _opened(part: FilePart) -> Generator[int]:
    fd = part.open()
    try:
        yield fd
    finally:
        os.close(fd)


def _blocks_back(fd: int, end: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield the whole lines before an offset in blocks with their offsets, the newest block first."""
    rest = b""
    while end > 0:
        begin = max(0, end - size)
        data = os.pread(fd, end - begin, begin) + rest
        cut = data.find(b"\n") + 1 if begin else 0
        if begin and cut in (0, len(data)) and len(data) < LINE_BYTES_MAX:
            rest = data
        else:
            rest = data[:cut]
            yield begin + cut, data[cut:]
        end = begin


def _blocks_on(fd: int, begin: int, end: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield the whole lines after an offset in blocks with their offsets."""
    while begin < end:
        data = os.pread(fd, min(size, end - begin), begin)
        while (cut := data.rfind(b"\n") + 1) == 0 and begin + len(data) < end and len(data) < LINE_BYTES_MAX:
            data += os.pread(fd, min(size, end - begin - len(data)), begin + len(data))
        whole = data[:cut] or data
        if not whole:
            return
        yield begin, whole
        begin += len(whole)


def _lines(begin: int, data: bytes) -> list[tuple[int, bytes]]:
    """Return the lines of a block with their offsets."""
    found: list[tuple[int, bytes]] = []
    for line in data.removesuffix(b"\n").split(b"\n") if data else ():
        found.append((begin, line))
        begin += len(line) + 1
    return found


def _plain(data: bytes) -> bytes:
    """Return data without colours, in small letters."""
    return (_COLOURS.sub(b"", data) if b"\x1b" in data else data).lower()


def _matching(begin: int, data: bytes, text: bytes) -> list[tuple[int, bytes]]:
    """Return the lines of a block that contain a text, with their offsets."""
    if not text:
        return _lines(begin, data)
    if text not in _plain(data):
        return []
    return [one for one in _lines(begin, data) if text in _plain(_STAMP.sub(b"", one[1]))]


def _shown(line: bytes, position: Position, part: FilePart) -> PageLine:
    found = _STAMP.match(line)
    text = line[found.end() :] if found else line
    at = found[1].decode() if found else None
    return PageLine(at, text.decode(errors="replace"), str(position), part.previous)


def _end_of_time(fd: int, end: int, at: bytes) -> int:
    """Return the offset after the last line of a time in a file with lines in the order of their times."""
    low, high = 0, end
    while high - low > BLOCK_BYTES:
        middle = (low + high) // 2
        data = os.pread(fd, min(LINE_BYTES_MAX, high - middle), middle)
        found = _STAMP.search(data, data.find(b"\n") + 1)
        if found is None or found[1] > at:
            high = middle
        else:
            low = middle + found.start()
    lines = _lines(low, os.pread(fd, LINE_BYTES_MAX, low)[: end - low])
    newer = [offset for offset, line in lines if (found := _STAMP.match(line)) and found[1] > at]
    return min(newer, default=min(end, low + sum(len(line) + 1 for _, line in lines)))
