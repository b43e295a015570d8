"""The gateway's book of logs: every worker's lines, in a buffer and in files, of workers that are dead too.

A buffer lasts as long as its worker is in the book, through all of its starts, so a follower goes on with the next
start by itself. Files are kept of two starts: the newest, and the start before, called `previous`.
"""

import contextlib
import functools
import itertools
import logging
import os
import re
import time
from collections.abc import Callable, Container, Mapping, Sequence
from operator import itemgetter
from typing import NoReturn

import attrs
import trio

from ichat.config.schema import Config, Logs
from ichat.errors import ApiError
from ichat.observability.logs.files import LogFile, load, previous_path
from ichat.observability.logs.follower import TIMES, LogFollower, LogSource, LogTimes, TimedLine
from ichat.observability.logs.lines import Line, LineSplitter, Wakeup
from ichat.observability.logs.log_format import has_colours, is_short
from ichat.observability.logs.pipes import Tee, follow, make_pipe
from ichat.observability.logs.stream import LogCursor, LogQuery, LogStream
from ichat.observability.logs.worker_log import Echo, LogStatistics, WorkerLog

log = logging.getLogger(__name__)

STDERR = 2
THREADS_MAX = 4
"""The most threads that wait for the disk: this many write logs, and this many read them for streams."""
LOOK_SHARE = 0.05
"""The most of the time that is spent on looking for workers to follow, of which there may be thousands."""
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_PREVIOUS = ".previous"


class LogStore:
    """Every worker's lines, as the gateway keeps them: a buffer and rotating files each, for dead workers too."""

    def __init__(self, directory: str, settings: Logs, times: LogTimes = TIMES) -> None:
        """Keep the files in this directory, and make it if it is missing. Belongs to a single run of Trio."""
        self._directory = directory
        self.settings = settings
        self._times = times
        self._records: dict[str, WorkerLog] = {}
        self._tee: Tee | None = None
        self._changed = trio.Event()
        self._writers, self._readers = trio.CapacityLimiter(THREADS_MAX), trio.CapacityLimiter(THREADS_MAX)
        self._is_closing = False
        self._told_full = False

    def __repr__(self) -> str:
        return f"<LogStore {self._directory}, {len(self._records)} workers>"

    def statistics(self) -> Mapping[str, LogStatistics]:
        """Return the statistics of each worker's log, by the worker's id."""
        return {worker_id: record.statistics() for worker_id, record in self._records.items()}

    def path_of(self, worker_id: str) -> str:
        """Return the file that has the newest lines of a worker. Raises ValueError for an invalid id."""
        return os.path.join(self._directory, f"{_name_of(worker_id)}.log")

    def expect(self, worker_id: str) -> None:
        """Note a managed worker before its first start, so that streams wait. Raises ValueError for an invalid id."""
        if not os.path.exists(self.path_of(worker_id)):
            self._record(worker_id).is_managed = True

    def begin(self, worker_id: str) -> int:
        """Begin a new start of a managed worker; the start before becomes `previous`.

        Return the descriptor for its standard output and error: the caller closes it once the worker is started.
        Raises OSError if there are no more descriptors, and ValueError for an invalid id.
        """
        record = self._record(worker_id)
        self._leave(record)
        with contextlib.ExitStack() as stack:
            reading, writing = make_pipe()
            stack.callback(os.close, reading)
            stack.callback(os.close, writing)
            file = self._open_file(worker_id, goes_on=False)
            stack.callback(file.close)
            record.is_managed, record.start_id, record.refused = True, None, None
            record.begin_run(self.settings)
            lines = LineSplitter(self.settings.line_bytes_max)
            record.pipe_reader = follow(
                reading, record.buffer, file, *self._echo(worker_id), lines=lines, ends_buffer=False
            )
            stack.pop_all()
        return writing

    async def end(self, worker_id: str) -> None:
        """Read the rest of a start when its processes have ended, for `end_s` at most, and close its file.

        Followers wait for the next start. Returns at once if there is nothing to end.
        """
        record = self._records.get(worker_id)
        if record is None:
            return
        with trio.move_on_after(self._times.end_s, shield=True):
            if record.pipe_reader is not None:
                await trio.to_thread.run_sync(record.pipe_reader.stop, self._times.end_s, abandon_on_cancel=True)
            if record.follower is not None and not self._is_closing:
                await record.follower.wait_disconnected()
        record.stop_following()
        record.goes_on = record.goes_on or record.follower is not None
        record.pipe_reader = record.follower = None
        with trio.move_on_after(self._times.end_s, shield=True):
            await trio.to_thread.run_sync(record.leave_file, abandon_on_cancel=True)

    def finish(self, worker_id: str) -> None:
        """Let followers' streams end, since no other start is expected; a later start is still possible."""
        record = self._records.get(worker_id)
        if record is not None:
            record.buffer.end()

    def resume(self, worker_id: str, start_id: str | None = None, *, is_managed: bool = True) -> None:
        """Go on with the file of a worker that outlived an earlier gateway: `follow_forever` reads its further lines.

        `start_id` says of which start the file is; None: of the first start that a heartbeat names.
        Call `end` for a managed worker later. Raises ValueError for an invalid id.
        """
        record = self._record(worker_id)
        self._leave(record)
        record.is_managed, record.start_id, record.refused = is_managed, start_id, None
        record.goes_on = True

    def last_lines(self, worker_id: str, count: int) -> list[str]:
        """Return the texts of the last lines of the newest start, oldest first; none if nothing is known."""
        return [line.text for line in self.tail(worker_id, count)]

    def tail(self, worker_id: str, count: int) -> list[Line]:
        """Return the last lines of the newest start, oldest first; none if nothing is known."""
        record = self._records.get(worker_id)
        if record is None:
            return []
        count = min(count, record.buffer.last - record.run_after)
        return record.buffer.tail(count) if count > 0 else []

    def forget(self, worker_id: str) -> None:
        """Let a worker go that was removed: its streams end, its buffer is given up, its files stay."""
        record = self._records.pop(worker_id, None)
        if record is not None:
            self._leave(record)
            record.buffer.end()

    async def stream(self, worker_id: str, query: LogQuery) -> LogStream:
        """Return the stream for a request. Raises ApiError 404 if no lines of the worker, or of the run, are known."""
        record, path = self._find(worker_id, query)
        if record is not None:
            buffer, wakeup = record.buffer, record.wakeup
        else:
            settings = self.settings
            bounds = {"lines_max": settings.ring_lines_max, "bytes_max": settings.ring_bytes_max}
            read = functools.partial(load, path, files_max=settings.files_max, **bounds)
            buffer = await trio.to_thread.run_sync(read, abandon_on_cancel=True, limiter=self._readers)
            wakeup = Wakeup()
        after = query.after if query.after is not None and query.after >= buffer.start else None
        cursor = LogCursor(buffer, tail=query.tail, after=after, follow=query.follow)
        return LogStream(cursor, wakeup, is_ending=lambda: self._is_closing)

    def _find(self, worker_id: str, query: LogQuery) -> tuple[WorkerLog | None, str]:
        """Return the record that has the lines, or None and the file. Raises ApiError 404."""
        record = self._records.get(worker_id)
        path = self.path_of(worker_id) if _ID.fullmatch(worker_id) else ""
        has_none = record is None or (record.buffer.ended and record.buffer.last == record.buffer.start)
        if has_none and not (path and os.path.exists(path)):
            raise ApiError(404, "not_found", f"There is no worker {worker_id} whose lines are known here.")
        if query.previous:
            path = previous_path(self._directory, _name_of(worker_id))
            if not os.path.exists(path):
                raise ApiError(404, "not_found", f"There is no log of a run of {worker_id} before the newest one.")
            return None, path
        if record is not None and record.refused is not None and record.buffer.last == record.buffer.start:
            raise ApiError(404, "not_found", f"The worker {worker_id} does not stream its lines (see --log-streaming).")
        if record is not None and not query.follow and record.buffer.last == record.buffer.start:
            record = None
        return record, path

    def close_streams(self) -> None:
        """Let all streams end after the lines of this moment: the gateway stops."""
        self._is_closing = True
        for record in self._records.values():
            record.wakeup.notify()

    def reconfigure(self, config: Config) -> None:
        """Use these settings for all that begins from now on."""
        self.settings = config.logs
        self._changed.set()

    def changed(self) -> None:
        """Look at the sources again soon."""
        self._changed.set()

    async def follow_forever(self, sources: Callable[[], Mapping[str, LogSource]]) -> NoReturn:
        """Follow every worker that `sources` gives by its id, and no other; `logs.followed_max` of them.

        Those that were started here are left out. A source with another `start_id` is a new run of that worker.
        `sources` returns another mapping when something has changed.
        """
        before: Mapping[str, LogSource] | None = None
        async with trio.open_nursery() as nursery:
            while True:
                self._changed, began_at, wanted = trio.Event(), time.perf_counter(), sources()
                if wanted is not before:
                    before = wanted
                    self._drop_idle(wanted)
                    for worker_id in self._to_follow(wanted):
                        record, follower, scope = self._prepare(worker_id, wanted[worker_id])
                        nursery.start_soon(self._follow, worker_id, record, follower, scope)
                took_s = time.perf_counter() - began_at
                await trio.sleep(max(self._times.look_pause_s, took_s / LOOK_SHARE))
                with trio.move_on_after(self._times.look_s):
                    await self._changed.wait()
                    before = None

    def close(self) -> None:
        """Write what there is, and end everything, within 2 * `close_s`; the streams as well."""
        deadline = time.monotonic() + self._times.close_s
        for record in self._records.values():
            record.stop_following()
            if record.pipe_reader is not None:
                record.pipe_reader.stop(max(0.0, deadline - time.monotonic()))
            record.leave_file()
            record.buffer.end()
        if self._tee is not None:
            self._tee.close(self._times.close_s)

    def _record(self, worker_id: str) -> WorkerLog:
        """Return the record of a worker, new if there is none.

        Numbers go on growing over a restart of the gateway, so that no number a client knows means another line.
        """
        record = self._records.get(worker_id)
        if record is None:
            start = int(time.time() * 1e6) if os.path.exists(self.path_of(worker_id)) else 0
            record = self._records[worker_id] = WorkerLog(start, self.settings)
        return record

    def _open_file(self, worker_id: str, *, goes_on: bool) -> LogFile:
        settings = self.settings
        return LogFile(
            self._directory,
            _name_of(worker_id),
            bytes_max=settings.file_bytes_max,
            files_max=settings.files_max,
            goes_on=goes_on,
        )

    def _echo(self, worker_id: str) -> list[Echo]:
        if not self.settings.echo:
            return []
        if self._tee is None:
            self._tee = Tee(STDERR, self.settings.echo_bytes_max)
        is_dim = is_short(self.settings.format, STDERR) and has_colours(STDERR)
        return [Echo(worker_id, self._tee, is_dim=is_dim)]

    def _leave(self, record: WorkerLog) -> None:
        """Stop everything that adds lines to a record."""
        reader, record.pipe_reader = record.pipe_reader, None
        if reader is not None:
            reader.stop(self._times.end_s)
        record.stop_following()
        record.follower = None
        record.leave_file()

    def _to_follow(self, wanted: Mapping[str, LogSource]) -> list[str]:
        """Return the workers to follow from now on; inform the other followers of a new address or start."""
        found: list[str] = []
        busy = sum(record.scope is not None for record in self._records.values())
        is_full = False
        for worker_id, source in wanted.items():
            record = self._records.get(worker_id)
            if not _ID.fullmatch(worker_id) or (record and (record.pipe_reader or record.refused == source.start_id)):
                continue
            if record and record.scope is not None:
                self._tell(record, source)
            elif busy + len(found) < self.settings.followed_max:
                found.append(worker_id)
            else:
                is_full = True
        if is_full and not self._told_full:
            followed = busy + len(found)
            log.warning("the lines of %d workers are followed, and not of more: see logs.followed_max", followed)
        self._told_full = is_full
        return found

    def _tell(self, record: WorkerLog, source: LogSource) -> None:
        """Let the task that follows a worker know where it is; it ends where it has to begin anew."""
        follower = record.follower
        if follower is None or follower.source == source:
            return
        if record.is_early and attrs.evolve(follower.source, start_id=source.start_id) == source:
            record.start_id, record.is_early = source.start_id, False
            follower.source = source
        else:
            record.stop_following()

    def _prepare(self, worker_id: str, source: LogSource) -> tuple[WorkerLog, LogFollower, trio.CancelScope]:
        """Have all that is needed to follow a worker."""
        record = self._record(worker_id)
        is_new = record.follower is None and not record.goes_on
        is_other = record.start_id not in (None, source.start_id)
        if is_new or (is_other and not record.is_early):
            record.begin_run(self.settings)
            record.follower = None
        record.is_early = record.is_early and not is_other
        record.buffer.ended = False
        record.start_id, record.refused = source.start_id, None
        if record.follower is None:

            def began_anew() -> None:
                record.begin_run(self.settings)
                record.is_early = True

            take = functools.partial(self._take, worker_id, record)
            record.follower = LogFollower(source, self.settings.line_bytes_max, take, began_anew, self._times)
        record.follower.source = source
        record.scope = trio.CancelScope()
        return record, record.follower, record.scope

    def _drop_idle(self, wanted: Container[str]) -> None:
        """Stop following workers that are not wanted any more, and keep the lines of a limited number of them.

        A managed worker is followed until `end` is called for it; its last words are read then.
        """
        others = [worker_id for worker_id, record in self._records.items() if not record.is_managed]
        idle = [worker_id for worker_id in others if worker_id not in wanted]
        for worker_id in idle:
            record = self._records[worker_id]
            record.stop_following()
            if not record.buffer.ended:
                record.buffer.end()
        for worker_id in idle[: max(0, len(idle) - self.settings.followed_max)]:
            self.forget(worker_id)

    async def _follow(self, worker_id: str, record: WorkerLog, follower: LogFollower, scope: trio.CancelScope) -> None:
        refusal = ""
        try:
            with scope:
                refusal = await follower.follow()
                log.info("worker %s has no lines to follow: %s", worker_id, refusal)
        except Exception:
            refusal = "bug"
            log.exception("a bug following the lines of worker %s", worker_id)
        finally:
            if refusal:
                record.refused = follower.source.start_id
            if record.scope is scope:
                record.scope = None
            self._changed.set()

    async def _take(self, worker_id: str, record: WorkerLog, lines: Sequence[TimedLine]) -> None:
        """Keep lines of a worker that is followed; its own task waits for the disk, and thereby its worker."""
        turn = record.turn
        for at, group in itertools.groupby(lines, itemgetter(0)):
            record.buffer.append([line for _, line in group], at)

        def write() -> None:
            record.write(turn, lines, lambda goes_on: self._open_file(worker_id, goes_on=goes_on))

        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(write, limiter=self._writers)


def _name_of(worker_id: str) -> str:
    """Return the name of a worker's files. Raises ValueError for an invalid id."""
    if not _ID.fullmatch(worker_id):
        raise ValueError(f"not a worker's id: {worker_id[:200]!r}")
    return f"{worker_id}~" if worker_id.endswith(_PREVIOUS) else worker_id
