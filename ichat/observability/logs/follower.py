"""Following the lines of a worker that was not started here: its `/logs/stream`, over every break, at little cost.

The input is not trusted: sizes are bounded, nothing is queued, and a worker costs at most a fifth of the thread.
"""

import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

import attrs
import trio

from ichat.http import client, sse
from ichat.http.pool import Upstream
from ichat.listeners import Listeners
from ichat.observability.logs.lines import LINE_BYTES_MAX, read_timestamp
from ichat.protocol.messages import PROOF_HEADER

log = logging.getLogger(__name__)

NAP_S = 0.02
NAP_S_MAX = 2.0
NAP_RATIO = 4
"""After working on a piece, the follower naps for this many times as long."""
EVENT_BYTES_MAX = 8 * LINE_BYTES_MAX
"""JSON needs up to six bytes for a byte of text."""
CUT_BYTES = 64
"""The most that a worker may add to a line that it has cut itself."""
LOST_MAX = 10**15
_NUMBER = re.compile(r"[0-9]{1,18}")
_ASK_AGAIN = frozenset((408, 425, 429))


@attrs.frozen
class LogTimes:
    """Limits on the parts of keeping logs, in seconds."""

    connect_s: float = 5.0
    silence_s: float = 45.0
    """A stream without data for this time, even without a comment, is dead: a new stream goes on where it stood."""
    pause_s: float = 0.5
    """The pause until a stream that has ended is requested again; doubled after each stream without data."""
    pause_s_max: float = 10.0
    look_s: float = 1.0
    """How often the workers to follow are compared with those that are followed."""
    look_pause_s: float = 0.1
    """The least time between two comparisons."""
    end_s: float = 2.0
    """The limit on reading the rest of a worker's output, once its processes have ended."""
    close_s: float = 2.0
    """The limit on closing the store."""


TIMES = LogTimes()
TimedLine = tuple[float, bytes]
"""When a line was read, in seconds since 1970, and the line."""


@attrs.frozen
class LogSource:
    """How a worker is reached, and which start of it that is."""

    start_id: str
    """Different at each start; "" if it is not known."""
    host: str = ""
    port: int = 0
    unix_socket: str | None = None
    """A path, which goes before host and port."""
    proof: bytes = attrs.field(default=b"", repr=False)
    """Shows a worker that its gateway asks."""

    @property
    def upstream(self) -> Upstream:
        """Where requests for its lines are sent."""
        return Upstream("", self.host, self.port) if self.unix_socket is None else Upstream("", self.unix_socket, 0)


class LogFollower:
    """Follows a worker; it remembers the lines that it has, however often the connection breaks."""

    def __init__(
        self,
        source: LogSource,
        line_bytes_max: int,
        take: Callable[[Sequence[TimedLine]], Awaitable[None]],
        began_anew: Callable[[], None],
        times: LogTimes = TIMES,
    ) -> None:
        """`take` gets the lines; `began_anew` is called before the lines of a start that no heartbeat has reported."""
        self.source = source
        self._bytes_max = line_bytes_max
        self._take = take
        self._began_anew = began_anew
        self._times = times
        self._last = 0
        """The number of the last line received; 0: none."""
        self._is_first = True
        self._lost = 0
        """Lines that are missing before the next line."""
        self.is_connected = False
        """Whether lines arrive, or would if there were any."""
        self._disconnected: Listeners[[]] = Listeners()

    def __repr__(self) -> str:
        return f"<LogFollower of {self.source}, last {self._last}{', connected' if self.is_connected else ''}>"

    async def wait_disconnected(self) -> None:
        """Wait until all data of the current connection has arrived."""
        if self.is_connected:
            await self._disconnected.wait()

    async def follow(self) -> str:
        """Hand over arriving lines, again and again; return why, if there is nothing to follow at this worker."""
        pause_s = self._times.pause_s
        while True:
            last = self._last
            try:
                refusal = await self._read()
            except client.FAILURES as error:
                refusal = ""
                log.debug("the lines of %s broke off: %r", self.source, error)
            finally:
                self.is_connected = False
                self._disconnected()
            if refusal:
                return refusal
            pause_s = self._times.pause_s if self._last != last else min(2 * pause_s, self._times.pause_s_max)
            await trio.sleep(pause_s)

    async def _read(self) -> str:
        """Follow a connection to its end; return why there should be no further connection, or nothing."""
        headers = [(b"accept", sse.CONTENT_TYPE.encode())]
        if self.source.proof:
            headers.append((PROOF_HEADER, self.source.proof))
        if self._last:
            headers.append((b"last-event-id", b"%d" % self._last))
        # the client never decodes a body, so compressed data stays as small as it arrived
        times = self._times
        with trio.fail_after(times.silence_s):
            response = await client.request(self.source.upstream, "/logs/stream", headers, connect_s=times.connect_s)
        async with response:
            refusal = _refusal(response)
            if refusal or response.status != 200:
                return refusal
            self.is_connected, self._is_first, self._lost = True, True, 0
            events = sse.EventDecoder(EVENT_BYTES_MAX)
            while True:
                size = response.unparsed_bytes
                began = time.thread_time()
                data = response.parse()
                lines = self._lines(events.feed(data)) if data else []
                spent_s = time.thread_time() - began
                if lines:
                    await self._take(lines)
                if response.is_complete:
                    return ""
                nap_s = NAP_RATIO * spent_s
                if size < client.READ_BYTES:
                    nap_s = max(NAP_S if size else 0, nap_s)
                await trio.sleep(min(nap_s, NAP_S_MAX))
                with trio.fail_after(times.silence_s):
                    await response.receive()

    def _lines(self, events: Iterable[sse.Event | None]) -> list[TimedLine]:
        """Make lines of events, and a line of those that are missing."""
        found: list[TimedLine] = []
        for event in events:
            if event is None:
                self._lost += 1
            elif event.name == "gap":
                self._lost += _read_gap(event.data)
            elif event.name == "message":
                self._take_line(event, found)
        return found

    def _take_line(self, event: sse.Event, found: list[TimedLine]) -> None:
        number = _NUMBER.fullmatch(event.id or "")
        line = _read_line(event.data, self._bytes_max)
        if number is None or line is None:
            self._lost += 1
            return
        seq = int(number[0])
        if seq <= self._last:
            if not self._is_first:
                return
            self._began_anew()
        self._is_first, self._last = False, seq
        if self._lost:
            found.append((line[0], missing(self._lost)))
            self._lost = 0
        found.append(line)


def missing(count: int) -> bytes:
    """Write the line that stands for lines that are missing."""
    return b"[ichat: %d line%b missing here]" % (count, b" is" if count == 1 else b"s are")


def _refusal(response: client.HttpResponse) -> str:
    """Return why a response cannot be followed, now or later; nothing if it can be, or may be soon."""
    status, headers = response.status, response.headers
    if status == 200:
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != sse.CONTENT_TYPE.encode() or headers.get(b"content-encoding", b"identity") != b"identity":
            return "it answers with something else"
    elif status < 500 and status not in _ASK_AGAIN:
        return f"it answers with {status}"
    return ""


def _read_gap(data: str) -> int:
    try:
        lost = json.loads(data)["lost"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return 1
    return min(lost, LOST_MAX) if isinstance(lost, int) and lost > 0 else 1


def _read_line(data: str, bytes_max: int) -> TimedLine | None:
    """Read a line; None for anything else. A time that is invalid becomes that of now."""
    try:
        entry = json.loads(data)
        text, at = entry["line"], entry["time"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    if not isinstance(text, str):
        return None
    line = text.encode(errors="replace").replace(b"\r", b" ").replace(b"\n", b" ")
    if len(line) > bytes_max + CUT_BYTES:
        line = line[:bytes_max] + f" … [{len(line) - bytes_max} bytes more]".encode()
    return _seconds(at), line


def _seconds(at: object) -> float:
    try:
        time_of_day = read_timestamp(at) if isinstance(at, str) else None
        if time_of_day is not None and time_of_day.tzinfo is not None and 1970 < time_of_day.year < 9999:
            return time_of_day.timestamp()
    except (ValueError, OverflowError):
        pass
    return time.time()
