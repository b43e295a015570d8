"""The gateway's book of logs: every worker's lines, in a buffer and in files, of workers that are dead too.

A buffer lasts as long as its worker is in the book, through all of its starts, so a follower goes on with the next
start by itself. Files are kept of two starts: the newest, and the start before, called `previous`.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Container, Mapping
from typing import NoReturn

import trio

from ichat.config.schema import Config, Logs
from ichat.errors import ApiError
from ichat.listeners import Listeners
from ichat.observability.logs.files import LogFiles, is_worker_id
from ichat.observability.logs.follower import TIMES, LogFollower, LogSource, LogTimes
from ichat.observability.logs.journal import Journal, recover
from ichat.observability.logs.lines import Line, Wakeup
from ichat.observability.logs.log_format import has_colours, is_short
from ichat.observability.logs.page_files import FileBlocks, LogPages
from ichat.observability.logs.pages import LogPage, PageQuery
from ichat.observability.logs.pipes import Tee
from ichat.observability.logs.stream import LogCursor, LogQuery, LogStream, OwnLines
from ichat.observability.logs.worker_log import Echo, WorkerLog

log = logging.getLogger(__name__)

STDERR = 2
THREADS_MAX = 4
"""The most threads that wait for the disk: this many write logs, and this many read them for streams."""
DETACH_S = 0.5
"""How long the rest of all outputs is read before another process reads on."""
LOOK_SHARE = 0.05
"""The most of the time that is spent on looking for workers to follow, of which there may be thousands."""


class LogStore:
    """Every worker's lines, as the gateway keeps them: a buffer and rotating files each, for dead workers too."""

    def __init__(self, directory: str, settings: Logs, times: LogTimes = TIMES, *, echo_fd: int = STDERR) -> None:
        """Keep the files in this directory, and make it if it is missing. Belongs to a single run of Trio.

        Lines of workers that are started here are shown on `echo_fd`, which stays the caller's.
        """
        self._files = LogFiles(directory, settings)
        self._times = times
        self._echo_fd = echo_fd
        self._logs: dict[str, WorkerLog] = {}
        self._tee: Tee | None = None
        self._seen: Mapping[str, LogSource] | None = None
        """The sources that were compared last with the workers that are followed; None: compare again."""
        self._woken: Listeners[[]] = Listeners()
        self._writers, self._readers = trio.CapacityLimiter(THREADS_MAX), trio.CapacityLimiter(THREADS_MAX)
        self.is_ending = False
        """Whether all streams end: the gateway stops."""
        self._told_full = False
        self._pages = LogPages(self._files)
        self._own = OwnLines(settings)

    def __repr__(self) -> str:
        return f"<LogStore {self._files.directory}, {len(self._logs)} workers>"

    def path_of(self, worker_id: str) -> str:
        """Return the file that has the newest lines of a worker. Raises ValueError for an invalid id."""
        return self._files.path_of(worker_id)

    def expect(self, worker_id: str) -> None:
        """Note a managed worker before its first start, so that streams wait. Raises ValueError for an invalid id."""
        if not os.path.exists(self.path_of(worker_id)):
            self._log_of(worker_id).expect()

    def begin(self, worker_id: str, *, is_kept: bool = False) -> int:
        """Begin a new start of a managed worker; the start before becomes `previous`.

        Return the descriptor for its standard output and error: the caller closes it once the worker is started.
        `is_kept` says that a later gateway may `go_on` with it. Raises OSError if there are no more descriptors, and
        ValueError for an invalid id.
        """
        return self._log_of(worker_id).begin(self._echo(worker_id), is_kept=is_kept)

    def descriptors_of(self, worker_id: str) -> Mapping[str, int]:
        """Return those with which a later gateway may `go_on`; valid while the caller of `begin` has its descriptor."""
        return self._logs[worker_id].descriptors

    def is_piped(self, worker_id: str) -> bool:
        """Return whether a pipe of the worker is read."""
        return worker_id in self._logs and self._logs[worker_id].is_piped

    async def go_on(self, worker_id: str, output: int, journal: int | None) -> None:
        """Go on with a start of a worker before this gateway's, from its pipe and its journal; own the descriptors.

        Call `end` for it later. Raises OSError if there are no more descriptors, and ValueError for an invalid id.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, output)
            notes = None if journal is None else Journal(journal)
            if notes is not None:
                undo.callback(notes.close)
            found = await trio.to_thread.run_sync(recover, self._files, worker_id, notes, limiter=self._readers)
            worker_log = self._log_of(worker_id)
            worker_log.go_on(output, notes, found, self._echo(worker_id))
            undo.pop_all()

    async def end(self, worker_id: str) -> None:
        """Read the rest of a start when its processes have ended, for `end_s` at most, and close its file.

        Followers wait for the next start. Returns at once if there is nothing to end.
        """
        worker_log = self._logs.get(worker_id)
        if worker_log is not None:
            await worker_log.end(waits_for_follower=not self.is_ending)

    def finish(self, worker_id: str) -> None:
        """Let followers' streams end, since no other start is expected; a later start is still possible."""
        worker_log = self._logs.get(worker_id)
        if worker_log is not None:
            worker_log.buffer.end()

    def resume(self, worker_id: str, start_id: str | None = None, *, is_managed: bool = True) -> None:
        """Go on with the file of a worker that outlived an earlier gateway: `follow_forever` reads its further lines.

        `start_id` says of which start the file is; None: of the first start that a heartbeat names.
        Call `end` for a managed worker later. Raises ValueError for an invalid id.
        """
        self._log_of(worker_id).resume(start_id, is_managed=is_managed)

    def last_lines(self, worker_id: str, count: int) -> list[str]:
        """Return the texts of the last lines of the newest start, oldest first; none if nothing is known."""
        return [line.text for line in self.tail(worker_id, count)]

    def tail(self, worker_id: str, count: int) -> list[Line]:
        """Return the last lines of the newest start, oldest first; none if nothing is known."""
        worker_log = self._logs.get(worker_id)
        return worker_log.tail(count) if worker_log is not None else []

    def forget(self, worker_id: str) -> None:
        """Let a worker go that was removed: its streams end, its buffer is given up, its files stay."""
        worker_log = self._logs.pop(worker_id, None)
        if worker_log is not None:
            worker_log.detach()
            worker_log.buffer.end()

    async def stream(self, worker_id: str, query: LogQuery) -> LogStream:
        """Return the stream for a request. Raises ApiError 404 if no lines of the worker, or of the run, are known."""
        worker_log, path = self._find(worker_id, query)
        if worker_log is not None:
            buffer, wakeup = worker_log.buffer, worker_log.wakeup
        else:
            read = self._files.load
            buffer = await trio.to_thread.run_sync(read, path, abandon_on_cancel=True, limiter=self._readers)
            wakeup = Wakeup()
        after = query.after if query.after is not None and query.after >= buffer.start else None
        cursor = LogCursor(buffer, tail=query.tail, after=after, follow=query.follow)
        return LogStream(cursor, wakeup, self)

    def stream_own(self, query: LogQuery) -> LogStream:
        """Return the stream of the gateway's own lines. Raises ApiError 404 for a run before."""
        if query.previous:
            raise ApiError(404, "not_found", "Only lines of the gateway's present process are in its memory.")
        return self._own.stream(query, self)

    async def read_page(self, worker_id: str, query: PageQuery) -> LogPage:
        """Return a page of a worker's files. Raises ApiError 404 if no lines of the worker are known."""
        self._find(worker_id, LogQuery(None, follow=True, previous=query.previous, after=None))
        read = self._pages.read
        return await trio.to_thread.run_sync(read, worker_id, query, abandon_on_cancel=True, limiter=self._readers)

    def file_blocks(self, worker_id: str, *, previous: bool) -> FileBlocks:
        """Return the bytes of a run's files, oldest first. Raises ApiError 404 if there are none."""
        self._find(worker_id, LogQuery(None, follow=True, previous=previous, after=None))
        return FileBlocks(self._pages.files_of(worker_id, previous=previous), self._readers)

    def _find(self, worker_id: str, query: LogQuery) -> tuple[WorkerLog | None, str]:
        """Return the log that has the lines, or None and the file. Raises ApiError 404."""
        worker_log = self._logs.get(worker_id)
        path = self.path_of(worker_id) if is_worker_id(worker_id) else ""
        has_none = worker_log is None or (worker_log.buffer.ended and worker_log.is_empty)
        if has_none and not (path and os.path.exists(path)):
            raise ApiError(404, "not_found", f"There is no worker {worker_id} whose lines are known here.")
        if query.previous:
            path = self._files.previous_of(worker_id)
            if not os.path.exists(path):
                raise ApiError(404, "not_found", f"There is no log of a run of {worker_id} before the newest start.")
            return None, path
        if worker_log is not None and worker_log.refused is not None and worker_log.is_empty:
            raise ApiError(404, "not_found", f"The worker {worker_id} does not stream its lines (see --log-streaming).")
        if worker_log is not None and not query.follow and worker_log.is_empty:
            worker_log = None
        return worker_log, path

    def close_streams(self) -> None:
        """Let all streams end after the lines of this moment: the gateway stops."""
        self.is_ending = True
        self._own.wakeup.notify()
        for worker_log in self._logs.values():
            worker_log.wakeup.notify()

    def reconfigure(self, config: Config) -> None:
        """Use these settings for all that begins from now on."""
        self._files.settings = config.logs
        self._own.bound(config.logs)
        self.changed()

    def changed(self) -> None:
        """Look at the sources again soon."""
        self._seen = None
        self._woken()

    async def follow_forever(self, sources: Callable[[], Mapping[str, LogSource]]) -> NoReturn:
        """Follow every worker that `sources` gives by its id, and no other; `logs.followed_max` of them.

        Those that were started here are left out. A source with another `start_id` is a new run of that worker.
        `sources` returns another mapping when something has changed.
        """
        async with trio.open_nursery() as nursery:
            while True:
                began_at, wanted = time.perf_counter(), sources()
                if wanted is not self._seen:
                    self._seen = wanted
                    self._drop_idle(wanted)
                    for worker_id in self._to_follow(wanted):
                        worker_log = self._log_of(worker_id)
                        nursery.start_soon(self._follow, worker_log, *worker_log.prepare(wanted[worker_id]))
                took_s = time.perf_counter() - began_at
                await trio.sleep(max(self._times.look_pause_s, took_s / LOOK_SHARE))
                with trio.move_on_after(self._times.look_s):
                    while self._seen is not None:
                        await self._woken.wait()

    def detach_all(self) -> None:
        """Write the rest, and read no output any more, within `DETACH_S`: another process reads on."""
        deadline = time.monotonic() + DETACH_S
        for worker_log in self._logs.values():
            worker_log.detach(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Write what there is, and end everything, within 2 * `close_s`; the streams as well."""
        deadline = time.monotonic() + self._times.close_s
        for worker_log in self._logs.values():
            worker_log.detach(max(0.0, deadline - time.monotonic()))
            worker_log.buffer.end()
        if self._tee is not None:
            self._tee.close(self._times.close_s)

    def _log_of(self, worker_id: str) -> WorkerLog:
        """Return a worker's log, new if there is none. Raises ValueError for an invalid id."""
        worker_log = self._logs.get(worker_id)
        if worker_log is None:
            worker_log = self._logs[worker_id] = WorkerLog(worker_id, self._files, self._times, self._writers)
        return worker_log

    def _echo(self, worker_id: str) -> list[Echo]:
        settings, fd = self._files.settings, self._echo_fd
        if not settings.echo:
            return []
        if self._tee is None:
            self._tee = Tee(fd, settings.echo_bytes_max)
        is_dim = is_short(settings.format, fd) and has_colours(fd)
        return [Echo(worker_id, self._tee, is_dim=is_dim, is_json=settings.format == "json")]

    def _to_follow(self, wanted: Mapping[str, LogSource]) -> list[str]:
        """Return the workers to follow from now on; inform the other followers of a new address or start."""
        found: list[str] = []
        busy = sum(worker_log.is_followed for worker_log in self._logs.values())
        is_full = False
        for worker_id, source in wanted.items():
            worker_log = self._logs.get(worker_id)
            if not is_worker_id(worker_id) or (worker_log and not worker_log.may_follow(source)):
                continue
            if worker_log and worker_log.is_followed:
                worker_log.note(source)
            elif busy + len(found) < self._files.settings.followed_max:
                found.append(worker_id)
            else:
                is_full = True
        if is_full and not self._told_full:
            followed = busy + len(found)
            log.warning(
                "reading the logs of %d workers, the most that logs.followed_max allows; the others are not read",
                followed,
            )
        self._told_full = is_full
        return found

    def _drop_idle(self, wanted: Container[str]) -> None:
        """Stop following workers that are not wanted any more, and keep the lines of a limited number of them.

        A managed worker is followed until `end` is called for it; its last words are read then.
        """
        others = [worker_id for worker_id, worker_log in self._logs.items() if not worker_log.is_managed]
        idle = [worker_id for worker_id in others if worker_id not in wanted]
        for worker_id in idle:
            worker_log = self._logs[worker_id]
            worker_log.stop_following()
            if not worker_log.buffer.ended:
                worker_log.buffer.end()
        for worker_id in idle[: max(0, len(idle) - self._files.settings.followed_max)]:
            self.forget(worker_id)

    async def _follow(self, worker_log: WorkerLog, follower: LogFollower, scope: trio.CancelScope) -> None:
        try:
            await worker_log.follow_in(scope, follower)
        finally:
            self.changed()
