"""The access log: one JSON object a line for each request, written in the background.

Lines are gathered and written by another thread every FLUSH_S, so that a full disk or a terminal that is held up stops
no request. At most `logs.access_lines_max` wait for that; beyond, they are counted and the count is written.
"""

import json
import logging
import os
import time
from collections.abc import Mapping
from json.encoder import encode_basestring_ascii as _quoted

import trio

from ichat.errors import EXIT_UNAVAILABLE, Exit
from ichat.observability.request_record import RequestRecord

log = logging.getLogger(__name__)

FLUSH_S = 0.2
CLOSE_S = 1.0
STDOUT = 1
FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC

SHOWN_CHARACTERS_MAX = 256
"""Of what a client chose, in the access log."""

LogEntry = Mapping[str, str | int | float | None]


def _facts_of(record: RequestRecord) -> str:
    """Return what is logged of a request, as members of a JSON object; times in milliseconds, sizes in bytes.

    It is put together by hand, as that takes a quarter of the time of `json.dumps`.
    """
    started_at, answered_at, overhead_s = record.started_at, record.answered_at, record.overhead_s
    first_byte = "null" if answered_at is None else f"{(answered_at - started_at) * 1000:.2f}"
    overhead = "null" if overhead_s is None else f"{overhead_s * 1000:.2f}"
    matched, length = ("null", "null") if record.prefix is None else (record.prefix.matched, record.prefix.length)
    tokens = '"tokens": null, "tokens_in": null, "tokens_out": null, "tokens_cached": null'
    if (usage := record.usage) is not None:
        tokens = (
            f'"tokens": {usage.input + usage.output}, "tokens_in": {usage.input}, "tokens_out": {usage.output},'
            f' "tokens_cached": {usage.cached}'
        )
    facts = (
        f'"id": {_quoted(record.id)}, "client": {_quoted(record.client)}, "method": {_quoted(record.method)},'
        f' "path": {_quoted(record.path)}, "key": {_quoted(record.key_name)},'
        f' "model": {_quoted(record.model[:SHOWN_CHARACTERS_MAX])}, "worker": {_quoted(record.worker)},'
        f' "status": {record.status}, "error": {_quoted(record.error)}, "bytes_in": {record.bytes_in},'
        f' "bytes_out": {record.bytes_out}, "duration_ms": {(record.ended_at - started_at) * 1000:.2f},'
        f' "first_byte_ms": {first_byte}, "queue_ms": {record.queued_s * 1000:.2f}, "overhead_ms": {overhead},'
        f' "prefix_matched": {matched}, "prefix_length": {length},'
        f' {tokens}, "phase": {_quoted(record.phase)}, "trace": {_quoted(record.trace_id)}'
    )
    return facts if not record.alias else f'{facts}, "alias": {_quoted(record.alias[:SHOWN_CHARACTERS_MAX])}'


class AccessLog:
    """Where lines go: standard output ("-"), a file, or nowhere ("")."""

    def __init__(self, path: str, lines_max: int) -> None:
        """Open the file for appending. Raises Exit 69 where that fails."""
        self.enabled = bool(path)
        self._lines_max = lines_max
        self._lines: list[str] = []
        self._has_lines = trio.Event()
        self._dropped = 0
        self._limiter = trio.CapacityLimiter(1)
        self._fd, self._path = STDOUT, ""
        self._second = 0
        self._time = ""
        if path not in ("", "-"):
            try:
                self._fd, self._path = os.open(path, FLAGS, 0o640), path
            except OSError as error:
                raise Exit(
                    EXIT_UNAVAILABLE, f"The access log {path} cannot be opened: {error.strerror}; see logs.access_log."
                ) from error

    def __repr__(self) -> str:
        return f"<AccessLog {len(self._lines)} lines wait>"

    def add(self, entry: LogEntry) -> None:
        """Take the facts of what never was a request; they are written soon."""
        if self._has_room():
            self._lines.append(f'{{"time": "{self._now()}", {json.dumps(entry)[1:]}\n')

    def add_record(self, record: RequestRecord) -> None:
        """Take the facts of one request; they are written soon."""
        if self._has_room():
            self._lines.append(f'{{"time": "{self._now()}", {_facts_of(record)}}}\n')

    def _has_room(self) -> bool:
        """Return whether another line may wait; one that may not is counted."""
        if not self._lines:
            self._has_lines.set()
        has_room = len(self._lines) < self._lines_max
        self._dropped += not has_room
        return has_room

    def _now(self) -> str:
        """Return the time of day (RFC 3339, UTC); the part up to the second is made once a second."""
        now = time.time()
        second = int(now)
        if second != self._second:
            self._second = second
            self._time = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._time}.{int((now - second) * 1000):03d}Z"

    async def run_forever(self) -> None:
        """Write what has been gathered, until cancelled; then once more, for as long as CLOSE_S."""
        try:
            while True:
                await self._has_lines.wait()
                await trio.sleep(FLUSH_S)
                self._has_lines = trio.Event()
                await self._flush()
        finally:
            with trio.move_on_after(CLOSE_S, shield=True):
                await self._flush()

    async def _flush(self) -> None:
        if self._lines:
            await trio.lowlevel.checkpoint_if_cancelled()
            await trio.to_thread.run_sync(self._write, self._take(), abandon_on_cancel=True, limiter=self._limiter)

    def _take(self) -> bytes:
        lines, self._lines = self._lines, []
        if self._dropped:
            lines.append(f'{{"time": "{self._now()}", "lines_dropped": {self._dropped}}}\n')
            self._dropped = 0
        return "".join(lines).encode()

    def _follow_rename(self) -> None:
        """Open the file anew where it was moved away or removed, as logrotate does. Raises OSError."""
        if not self._path:
            return
        try:
            is_same = os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except FileNotFoundError:
            is_same = False
        if not is_same:
            fd = os.open(self._path, FLAGS, 0o640)
            os.close(self._fd)
            self._fd = fd

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            self._follow_rename()
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            log.error("the access log cannot be written: %s; %d bytes are lost", error.strerror, len(view))
