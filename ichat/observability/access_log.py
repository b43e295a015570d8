"""The access log: a JSON object on each line for a request, or on a terminal a short line; written in the background.

Lines are gathered, and another thread writes them every FLUSH_S, so that a full disk or a stopped terminal delays no
request. At most `logs.access_lines_max` lines wait; further lines are dropped, and their number is logged.
"""

import json
import logging
import os
import time
from collections.abc import Mapping
from json.encoder import encode_basestring_ascii as _quoted

import trio

from ichat.errors import EXIT_UNAVAILABLE, Exit
from ichat.listeners import Listeners
from ichat.observability.logs.log_format import RED, SHORT_TIME, YELLOW, coloured, has_colours, is_short, shown_safely
from ichat.observability.request_record import CLIENT_LEFT, OTHER, RequestRecord

log = logging.getLogger(__name__)

FLUSH_S = 0.2
CLOSE_S = 1.0
STDOUT = 1
FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC

SHOWN_CHARACTERS_MAX = 256
"""The longest text in the access log that a client chose, in characters."""

_JOINS = frozenset(("/v1/workers/heartbeat", "/v1/workers/prefixes"))
"""Workers report here, each every few seconds."""

LogEntry = Mapping[str, str | int | float | None]


def _facts_of(record: RequestRecord) -> str:
    """Return the facts of a request for the log, as members of a JSON object; times in milliseconds, sizes in bytes.

    The text is put together by hand, in a quarter of the time of `json.dumps`.
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


def short_line(record: RequestRecord) -> str:
    """Return a request on a short line for people: ``200 tiny 48 tok 0.3 s team-a``."""
    name = record.model if record.alias in ("", record.model) else f"{record.alias} -> {record.model}"
    words = [str(record.status), name[:SHOWN_CHARACTERS_MAX] if name else f"{record.method} {record.path}"]
    if (usage := record.usage) is not None:
        words.append(f"{usage.output} tok" if usage.output else f"{usage.input} tok in")
    words += [record.error, record.phase, f"{record.ended_at - record.started_at:.1f} s", record.key_name]
    return shown_safely(" ".join(filter(None, words))).replace("\n", "\\n")


def is_routine(record: RequestRecord) -> bool:
    """Return whether a request went well and is a heartbeat or an operator's watching."""
    is_well = record.status < 400 or record.status == CLIENT_LEFT
    is_watching = record.method in ("GET", "HEAD") or record.path in _JOINS
    return is_well and is_watching and record.route == OTHER and not record.model


class AccessLog:
    """Where lines go: standard output ("-"), a file, or nowhere ("")."""

    def __init__(self, path: str, lines_max: int, form: str = "auto", *, stdout: int = STDOUT) -> None:
        """Open the file for appending; `form` is `logs.format`. Raises Exit 69 if the file cannot be opened."""
        self.enabled = bool(path)
        self._is_short = is_short(form, stdout) if path == "-" else form == "text"
        self._has_colours = self._is_short and path == "-" and has_colours(stdout)
        self._lines_max = lines_max
        self._lines: list[str] = []
        self._begun: Listeners[[]] = Listeners()
        """Called when the first line begins to wait."""
        self._dropped = 0
        self._limiter = trio.CapacityLimiter(1)
        self._fd, self._path = stdout, ""
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
        """Add the facts of an event that is no request; they are written soon."""
        if not self._has_room():
            return
        if self._is_short:
            words = (entry.get(name) for name in ("status", "method", "path", "error"))
            self._add_short(shown_safely(" ".join(str(word) for word in words if word)), RED)
        else:
            self._lines.append(f'{{"time": "{self._now()}", {json.dumps(entry)[1:]}\n')

    def ended(self, record: RequestRecord) -> None:
        """Note the facts of a request; they are written soon. See `RecordSink`."""
        if self._is_short:
            if (log.isEnabledFor(logging.DEBUG) or not is_routine(record)) and self._has_room():
                colour = RED if record.status >= 500 else YELLOW if record.status >= 400 else ""
                self._add_short(short_line(record), colour)
        elif self._has_room():
            self._lines.append(f'{{"time": "{self._now()}", {_facts_of(record)}}}\n')

    def _add_short(self, line: str, colour: str) -> None:
        line = f"{time.strftime(SHORT_TIME)} {line}"
        self._lines.append(f"{coloured(line, colour) if colour and self._has_colours else line}\n")

    def _has_room(self) -> bool:
        """Return whether another line may wait; a line that may not is counted."""
        if not self._lines:
            self._begun()
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
        """Write gathered lines until cancelled; then write once more, for CLOSE_S at most."""
        try:
            while True:
                while not self._lines:
                    await self._begun.wait()
                await trio.sleep(FLUSH_S)
                await self.flush()
        finally:
            with trio.move_on_after(CLOSE_S, shield=True):
                await self.flush()

    async def flush(self) -> None:
        """Write the lines that wait now."""
        if self._lines:
            await trio.lowlevel.checkpoint_if_cancelled()
            await trio.to_thread.run_sync(self._write, self._take(), abandon_on_cancel=True, limiter=self._limiter)

    def _take(self) -> bytes:
        lines, self._lines = self._lines, []
        if self._dropped:
            told = f'{{"time": "{self._now()}", "lines_dropped": {self._dropped}}}\n'
            lines.append(f"[{self._dropped} lines of requests are missing here]\n" if self._is_short else told)
            self._dropped = 0
        return "".join(lines).encode()

    def _follow_rename(self) -> None:
        """Open the file anew if it was moved away or removed, as logrotate does. Raises OSError."""
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


def shown_path(path: bytes) -> str:
    """Return a path as records and errors have it."""
    return path.decode("latin-1")[:SHOWN_CHARACTERS_MAX]
