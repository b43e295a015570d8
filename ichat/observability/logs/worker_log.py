"""The lines of a worker, through all of its starts: in a buffer, in files, and on the gateway's standard error."""

import contextlib
import itertools
import logging
import math
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from operator import itemgetter

import attrs
import trio

from ichat.observability.logs.files import LogFile, LogFiles, load
from ichat.observability.logs.follower import LogFollower, LogSource, LogTimes, TimedLine
from ichat.observability.logs.journal import Journal, Recovered, source_of
from ichat.observability.logs.lines import Line, LineBuffer, LineSplitter, Wakeup
from ichat.observability.logs.log_format import json_line
from ichat.observability.logs.pipes import PipeReader, PipeSource, Sink, Tee, make_pipe

log = logging.getLogger(__name__)

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


class WorkerLog:
    """A worker's lines, through all of its starts; the store changes it by its methods only."""

    def __init__(self, worker_id: str, files: LogFiles, times: LogTimes, writers: trio.CapacityLimiter) -> None:
        """`writers` limits the threads that write the lines of followed workers.

        Numbers go on growing over a restart of the gateway, so that no number a client knows means another line.
        """
        start = int(time.time() * 1e6) if os.path.exists(files.path_of(worker_id)) else 0
        self._worker_id = worker_id
        self._files = files
        self._times = times
        self._writers = writers
        self.buffer = LineBuffer(files.settings.ring_lines_max, files.settings.ring_bytes_max, start)
        self.wakeup = Wakeup()
        self.buffer.changed.add(self.wakeup.notify)
        self._run_after = start
        """The number before that of the first line of the newest start."""
        self.is_managed = False
        """Whether this gateway manages the worker: then `end` is called, and its followers wait for its next start."""
        self._pipe_reader: PipeReader | None = None
        """Reads the pipe of a worker that this gateway, or an earlier gateway, has started."""
        self.descriptors: Mapping[str, int] = {}
        """Of the newest pipe that is read, while it has a writer."""
        self._start_id: str | None = None
        """The start of a followed worker; None if the next reported start is this start."""
        self._is_early = False
        """Whether that start has ended, and lines of the next arrived before a heartbeat reported it."""
        self._follower: LogFollower | None = None
        self._scope: trio.CancelScope | None = None
        """Of the task that follows it, while it runs."""
        self.refused: str | None = None
        """The start that has no lines to follow."""
        self._goes_on = False
        """Whether the file of a followed worker goes on when it is opened, since it is of this start."""
        self._turn = 0
        """Grows whenever the file is left: a thread that writes for an earlier turn is too late."""
        self._file: LogFile | None = None
        """Of a worker that is followed; otherwise the pipe reader has it."""
        self._file_after = -math.inf
        """The time of the last line that the file had before it was opened."""
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<WorkerLog {self.buffer!r}, {self._pipe_reader or self._follower}>"

    @property
    def is_empty(self) -> bool:
        """Whether no line of this gateway's time is known."""
        return self.buffer.last == self.buffer.start

    @property
    def is_piped(self) -> bool:
        """Whether the lines arrive through a pipe."""
        return self._pipe_reader is not None

    @property
    def is_followed(self) -> bool:
        """Whether a task follows the worker."""
        return self._scope is not None

    def tail(self, count: int) -> list[Line]:
        """Return the last lines of the newest start, oldest first."""
        count = min(count, self.buffer.last - self._run_after)
        return self.buffer.tail(count) if count > 0 else []

    def expect(self) -> None:
        """Note that this gateway will start the worker."""
        self.is_managed = True

    def begin(self, sinks: Sequence[Sink], *, is_kept: bool) -> int:
        """Begin a start by this gateway; return the descriptor for the worker's output, which the caller closes.

        Its lines go to `sinks` as well. `is_kept` says that a later gateway may go on with its pipe. Raises OSError if
        there are no more descriptors.
        """
        self.detach()
        with contextlib.ExitStack() as stack:
            reading, writing = make_pipe()
            stack.callback(os.close, reading)
            stack.callback(os.close, writing)
            journal = Journal.make() if is_kept else None
            if journal is not None:
                stack.callback(journal.close)
            file = self._files.open(self._worker_id, goes_on=False)
            stack.callback(file.close)
            self._begin_run()
            lines = LineSplitter(self._files.settings.line_bytes_max)
            self._read(source_of(reading, lines, journal, file), [file, *sinks])
            stack.pop_all()
        return writing

    def go_on(self, reading: int, journal: Journal | None, found: Recovered, sinks: Sequence[Sink]) -> None:
        """Go on with the pipe of a start before this gateway's; own the descriptors.

        Lines that are missing in the file go to `sinks` as well.
        """
        self.detach()
        if self.is_empty:
            last = self.buffer.start + len(found.lines) if found.last is None else found.last
            self.buffer.restore(found.lines, last)
            self._run_after = self.buffer.start
        file = self._files.open(self._worker_id, goes_on=True)
        self._read(source_of(reading, found.splitter, journal, file), [file, *sinks], found.missing)

    def _read(self, source: PipeSource, sinks: Sequence[Sink], first: Sequence[bytes] = ()) -> None:
        """Read a pipe from now on; `first` are lines before its own."""
        self.is_managed, self._start_id, self.refused = True, None, None
        self.descriptors = source.descriptors
        self._pipe_reader = PipeReader([source], self.buffer, sinks, first=first, ends_buffer=False)

    def resume(self, start_id: str | None, *, is_managed: bool) -> None:
        """Go on with the file of a start before this gateway's; None: of the first start that a heartbeat names."""
        self.detach()
        self.is_managed, self._start_id, self.refused = is_managed, start_id, None
        self._goes_on = True

    async def end(self, *, waits_for_follower: bool) -> None:
        """Read the rest of a start, for `end_s` at most, and close its file; at once if there is nothing to end."""
        with trio.move_on_after(self._times.end_s, shield=True):
            if self._pipe_reader is not None:
                await trio.to_thread.run_sync(self._pipe_reader.stop, self._times.end_s, abandon_on_cancel=True)
            if self._follower is not None and waits_for_follower:
                await self._follower.wait_disconnected()
        self.stop_following()
        self._goes_on = self._goes_on or self._follower is not None
        self._pipe_reader = self._follower = None
        with trio.move_on_after(self._times.end_s, shield=True):
            await trio.to_thread.run_sync(self._leave_file, abandon_on_cancel=True)

    def detach(self, wait_s: float | None = None) -> None:
        """Write the rest, and stop everything that adds lines, within `wait_s` (None: `end_s`)."""
        reader, self._pipe_reader = self._pipe_reader, None
        if reader is not None:
            reader.stop(self._times.end_s if wait_s is None else wait_s)
        self.stop_following()
        self._follower = None
        self._leave_file()

    def may_follow(self, source: LogSource) -> bool:
        """Return whether there may be lines to follow that no pipe brings."""
        return self._pipe_reader is None and self.refused != source.start_id

    def note(self, source: LogSource) -> None:
        """Let the task that follows the worker know where it is; it ends where it has to begin anew."""
        follower = self._follower
        if follower is None or follower.source == source:
            return
        if self._is_early and attrs.evolve(follower.source, start_id=source.start_id) == source:
            self._start_id, self._is_early = source.start_id, False
            follower.source = source
        else:
            self.stop_following()

    def prepare(self, source: LogSource) -> tuple[LogFollower, trio.CancelScope]:
        """Count as followed from now on; return the arguments of `follow_in`."""
        is_new = self._follower is None and not self._goes_on
        is_other = self._start_id not in (None, source.start_id)
        if is_new or (is_other and not self._is_early):
            self._begin_run()
            self._follower = None
        self._is_early = self._is_early and not is_other
        self.buffer.reopen()
        self._start_id, self.refused = source.start_id, None
        if self._follower is None:
            bytes_max = self._files.settings.line_bytes_max
            self._follower = LogFollower(source, bytes_max, self._take, self._begin_early, self._times)
        self._follower.source = source
        self._scope = trio.CancelScope()
        return self._follower, self._scope

    async def follow_in(self, scope: trio.CancelScope, follower: LogFollower) -> None:
        """Follow the worker until `stop_following`, or until it turns out to have no lines."""
        refusal = ""
        try:
            with scope:
                refusal = await follower.follow()
                log.info("worker %s has no lines to follow: %s", self._worker_id, refusal)
        except Exception:
            refusal = "bug"
            log.exception("a bug following the lines of worker %s", self._worker_id)
        finally:
            if refusal:
                self.refused = follower.source.start_id
            if self._scope is scope:
                self._scope = None

    def stop_following(self) -> None:
        """Have the task that follows it end."""
        if self._scope is not None:
            self._scope.cancel()

    def _begin_run(self) -> None:
        """Leave the file, and note that lines of another start follow, within the bounds of today."""
        settings = self._files.settings
        self.buffer.bound(settings.ring_lines_max, settings.ring_bytes_max)
        self._leave_file()
        self._goes_on = False
        self.buffer.reopen()
        if not self.is_empty:
            self.buffer.append([AGAIN], time.time())
        self._run_after = self.buffer.last

    def _begin_early(self) -> None:
        self._begin_run()
        self._is_early = True

    async def _take(self, lines: Sequence[TimedLine]) -> None:
        """Keep lines of a worker that is followed; its own task waits for the disk, and thereby its worker."""
        turn = self._turn
        for at, group in itertools.groupby(lines, itemgetter(0)):
            self.buffer.append([line for _, line in group], at)
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._write, turn, lines, limiter=self._writers)

    def _write(self, turn: int, lines: Sequence[TimedLine]) -> None:
        """Write lines to the file, unless it was left since; in a thread, since that may wait for the disk.

        If the file goes on, lines that it had before are left out, by their time.
        """
        with self._lock:
            if turn != self._turn:
                return
            if self._file is None:
                self._file = self._files.open(self._worker_id, goes_on=self._goes_on)
                self._file_after = _last_time(self._file) if self._goes_on else -math.inf
                self._goes_on = True
            new = list(itertools.dropwhile(lambda line: line[0] <= self._file_after, lines))
            if new:
                self._file_after = -math.inf
                for at, group in itertools.groupby(new, itemgetter(0)):
                    self._file.append([line for _, line in group], at)
                self._file.flush()

    def _leave_file(self) -> None:
        """Close the file of a worker that is followed."""
        with self._lock:
            self._turn += 1
            file, self._file = self._file, None
            if file is not None:
                file.close()


def _last_time(file: LogFile) -> float:
    """Return the time of the last line of a file."""
    last = load(file.path, lines_max=1, bytes_max=LAST_BYTES).tail(1)
    return last[0].time if last else -math.inf
