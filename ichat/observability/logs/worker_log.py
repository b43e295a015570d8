"""The lines of a worker, through all of its starts: in a buffer, in files, and on the gateway's standard error."""

import itertools
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from operator import itemgetter

import attrs
import trio

from ichat.config.schema import Logs
from ichat.observability.logs.files import LogFile, load
from ichat.observability.logs.follower import LogFollower, TimedLine
from ichat.observability.logs.lines import Line, LineBuffer, Wakeup
from ichat.observability.logs.log_format import json_line
from ichat.observability.logs.pipes import PipeReader, Tee

LAST_BYTES = 256 * 1024
"""Bytes that are read of the end of a file, for the time of its last line."""
AGAIN = b"[ichat: started again]"
_COLOURS = re.compile(rb"\x1b\[[0-9;:]*m")


class Echo:
    """Passes a worker's lines on to the gateway's standard error."""

    def __init__(self, worker_id: str, tee: Tee, *, is_dim: bool = False, is_json: bool = False) -> None:
        """`is_dim` has a terminal show the lines behind the gateway's own; their own colours are removed then.

        `is_json` writes each line as a JSON object, like the gateway's own.
        """
        self._worker_id = worker_id
        self._prefix = f"[{worker_id}] ".encode()
        self._tee = tee
        self._is_dim = is_dim
        self._is_json = is_json

    def append(self, lines: Sequence[bytes], now: float) -> None:
        """Have lines written soon, or lose them."""
        if self._is_json:
            texts = [_COLOURS.sub(b"", line).decode(errors="replace") for line in lines]
            told = [json_line(now, {"worker": self._worker_id, "message": text}) + "\n" for text in texts]
            self._tee.add("".join(told).encode())
        elif self._is_dim:
            lines = [_COLOURS.sub(b"", line) for line in lines]
            self._tee.add(b"".join([b"\x1b[2m%b%b\x1b[0m\n" % (self._prefix, line) for line in lines]))
        else:
            self._tee.add(b"".join([b"%b%b\n" % (self._prefix, line) for line in lines]))

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """The others go on."""


@attrs.frozen
class LogStatistics:
    """A worker's log at a given moment."""

    lines: Sequence[Line]
    """All that are kept in memory."""
    has_ended: bool
    start_id: str | None
    refused_start: str | None
    """The start that has no lines to follow."""


class WorkerLog:
    """A worker's lines, through all of its starts."""

    def __init__(self, start: int, settings: Logs) -> None:
        """`start` is the number before that of the first line."""
        self.buffer = LineBuffer(settings.ring_lines_max, settings.ring_bytes_max, start)
        self.wakeup = Wakeup()
        self.buffer.changed = self.wakeup.notify
        self.run_after = start
        """The number before that of the first line of the newest start."""
        self.is_managed = False
        """Whether this gateway manages the worker: then `end` is called, and its followers wait for its next start."""
        self.pipe_reader: PipeReader | None = None
        """Reads the pipe of a worker that this gateway has started."""
        self.start_id: str | None = None
        """The start of a followed worker; None if the next reported start is this start."""
        self.is_early = False
        """Whether that start has ended, and lines of the next arrived before a heartbeat reported it."""
        self.follower: LogFollower | None = None
        self.scope: trio.CancelScope | None = None
        """Of the task that follows it, while it runs."""
        self.refused: str | None = None
        """The start that has no lines to follow."""
        self.goes_on = False
        """Whether the file of a followed worker goes on when it is opened, since it is of this start."""
        self.turn = 0
        """Grows whenever the file is left: a thread that writes for an earlier turn is too late."""
        self._file: LogFile | None = None
        """Of a worker that is followed; otherwise the pipe reader has it."""
        self._file_after = -math.inf
        """The time of the last line that the file had before it was opened."""
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<WorkerLog {self.buffer!r}, {self.pipe_reader or self.follower}>"

    def statistics(self) -> LogStatistics:
        """Return the current statistics."""
        buffer = self.buffer
        return LogStatistics(buffer.tail(buffer.last - buffer.start), buffer.ended, self.start_id, self.refused)

    def begin_run(self, settings: Logs) -> None:
        """Leave the file, and note that lines of another start follow, within these bounds."""
        self.buffer.bound(settings.ring_lines_max, settings.ring_bytes_max)
        self.leave_file()
        self.goes_on = False
        self.buffer.ended = False
        if self.buffer.last > self.buffer.start:
            self.buffer.append([AGAIN], time.time())
        self.run_after = self.buffer.last

    def write(self, turn: int, lines: Sequence[TimedLine], open_file: Callable[[bool], LogFile]) -> None:
        """Write lines to the file, unless it was left since; in a thread, since that may wait for the disk.

        If the file goes on, lines that it had before are left out, by their time. `open_file` gets that as argument.
        """
        with self._lock:
            if turn != self.turn:
                return
            if self._file is None:
                self._file = open_file(self.goes_on)
                self._file_after = _last_time(self._file) if self.goes_on else -math.inf
                self.goes_on = True
            new = list(itertools.dropwhile(lambda line: line[0] <= self._file_after, lines))
            if new:
                self._file_after = -math.inf
                for at, group in itertools.groupby(new, itemgetter(0)):
                    self._file.append([line for _, line in group], at)
                self._file.flush()

    def leave_file(self) -> None:
        """Close the file of a worker that is followed."""
        with self._lock:
            self.turn += 1
            file, self._file = self._file, None
            if file is not None:
                file.close()

    def stop_following(self) -> None:
        """Have the task that follows it end."""
        if self.scope is not None:
            self.scope.cancel()


def _last_time(file: LogFile) -> float:
    """Return the time of the last line of a file."""
    last = load(file.path, lines_max=1, bytes_max=LAST_BYTES).tail(1)
    return last[0].time if last else -math.inf
