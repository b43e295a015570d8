"""Moving a response from an upstream to its receiver, as bytes.

The head is parsed and written anew (`relay.py`). The rest goes to the receiver unchanged, chunk framing included.
The hub calls `readable` for every piece: a `recv_into` a buffer that all responses share, a search for the body's end,
a `send`. The request's task sleeps meanwhile. It is woken when the response has ended or failed, and when the receiver
does not accept its bytes. Then the task sends them while the upstream is paused: a slow client delays only its own
upstream.

The time between two pieces of an event stream is how far its deadline moves; it is counted in a list that all streams
of a model share.
"""

import logging
import re
from collections.abc import Callable
from typing import Protocol

from ichat.http.client_side import ClientSide
from ichat.http.failures import Declined, ResponseRejected, UpstreamError
from ichat.http.framing import Framing, FramingError, UntilClose
from ichat.http.heads import HeadError, ResponseHead
from ichat.http.hub import ENDED
from ichat.http.pool import Connection

log = logging.getLogger(__name__)

COMMENT_BYTES_MAX = 256
"""A longer piece is not regarded as a comment."""
_BUFFER_BYTES = 128 * 1024
_BUFFER = bytearray(_BUFFER_BYTES)
_VIEW = memoryview(_BUFFER)
_COMMENTS = re.compile(rb"(?:(?:[0-9a-fA-F]{1,8}\r\n)?:[^\r\n]*(?:\r?\n)+)+")
"""Only comments, in chunks or not; the end of a chunk looks like an empty line. It has a single way to read a byte."""

ChunkGapHistogram = list[float]
"""How often two pieces of a stream were less than 2**index ms apart. The last item is the sum of the gaps in
seconds, for streams that have ended. The time in which a client accepts nothing is left out."""
_GAPS_INDEX_MAX = 63  # no gap is as long as 2**63 ms


ReadHead = tuple[ResponseHead, bytes, bytearray]
"""An upstream's head, our head for it, and the bytes behind it."""


def empty_gap_histogram() -> ChunkGapHistogram:
    """Return a histogram without any gaps."""
    return [0] * (_GAPS_INDEX_MAX + 1) + [0.0]


_UNCOUNTED = empty_gap_histogram()
"""Receives the gaps of responses that are not measured."""


class ByteObserver(Protocol):
    """Reads the body of a response in passing."""

    def see(self, buffer: bytearray, end: int) -> None:
        """Called with the next piece: the buffer up to `end`."""
        ...


def is_comment(buffer: bytearray, start: int, end: int) -> bool:
    """Return whether these bytes of an event stream are only comments."""
    return end - start <= COMMENT_BYTES_MAX and _COMMENTS.fullmatch(buffer, start, end) is not None


class BodyMover:
    """A body on its way from an upstream's connection to a receiver."""

    __slots__ = (
        "_connection", "_feed_head", "_gaps", "_held_s", "_hub", "_is_events", "_receive", "_send", "_stall_s",
        "_stream_gaps", "_to", "_usage", "_wake", "answered", "bytes_out", "chunks", "deadline", "done", "failure",
        "first_at", "framing", "is_torn", "reusable",
    )  # fmt: skip

    def __init__(
        self,
        connection: Connection,
        to: ClientSide,
        feed_head: Callable[[memoryview], ReadHead | None],
        wake: Callable[[], None],
        *,
        first_byte_s: float,
        stall_s: float,
        usage: ByteObserver | None,
        gaps: ChunkGapHistogram | None,
    ) -> None:
        """`feed_head` is called with all bytes until it returns the head, `gaps` counts the gaps of an event stream.

        `wake` is called when bytes wait for the receiver, and when the body has ended or failed.
        """
        self._hub = connection.hub
        self._connection = connection
        self._receive = connection.sock.recv_into
        self._to = to
        self._send = to.send
        self._stall_s = stall_s
        self._usage = usage
        self.framing: Framing | None = None
        self._is_events = False
        self._stream_gaps = _UNCOUNTED if gaps is None else gaps
        self._gaps = _UNCOUNTED
        self._held_s = 0.0
        """For how long the receiver held up the body."""
        self._feed_head = feed_head
        self._wake = wake
        self.deadline = self._hub.update_clock() + first_byte_s
        self.answered = False
        """Whether the upstream has sent anything."""
        self.done = False
        self.failure: UpstreamError | None = None
        self.reusable = False
        """Whether the upstream's connection may carry another exchange, once this has ended."""
        self.is_torn = False
        """Whether an error of the connection was consumed, so that its end proves nothing."""
        self.chunks = 0
        """Pieces of the body, as they were read."""
        self.first_at: float | None = None
        """When the first piece of the body arrived, on Trio's clock."""
        self.bytes_out = 0
        """Bytes of the response, head included, that were sent or kept for the receiver."""

    def __repr__(self) -> str:
        state = "head" if self.framing is None else "done" if self.done else "body"
        return f"<BodyMover from {self._connection.upstream.name}: {state}>"

    def readable(self, events: int) -> None:
        """Move what can be read now. This runs for every chunk: rare cases are handled elsewhere."""
        try:
            received = self._receive(_BUFFER)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(error.strerror or str(error))
            return
        if not received:
            self._eof()
            return
        framing = self.framing
        try:
            if framing is None:
                self.answered = True
                read = self._feed_head(_VIEW[:received])
                if read is not None:
                    self._begin(*read)
            else:
                if received > COMMENT_BYTES_MAX or not (self._is_events and is_comment(_BUFFER, 0, received)):
                    deadline = self._hub.now + self._stall_s
                    if self.chunks:
                        self._gaps[int((deadline - self.deadline) * 1000).bit_length()] += 1
                    else:
                        self._begin_body()
                    self.deadline = deadline
                    self.chunks += 1
                end = framing.feed(_BUFFER, 0, received)
                if self._usage is not None:
                    self._usage.see(_BUFFER, end)
                try:
                    sent = self._send(_VIEW[:end])
                except OSError as error:
                    sent = self._to.taker.not_sent(error)
                self.bytes_out += end
                if sent != end:
                    self._hold(sent, end)
                if framing.done:
                    self._finish(surplus=end + framing.cut < received)
        except Exception as error:
            self._fail(error)
            return
        if received == _BUFFER_BYTES or events & ENDED:
            self._connection.rearm()

    def _begin(self, head: ResponseHead, ours: bytes, behind: bytearray) -> None:
        framing = self.framing = head.framing
        self.deadline = self._hub.now + self._stall_s
        self.reusable = head.reusable
        if head.is_events:
            self._is_events, self._gaps = True, self._stream_gaps
        received = len(behind)
        end = framing.feed(behind, 0, received) if behind else 0
        if end and not (self._is_events and is_comment(behind, 0, end)):
            self._begin_body()
            self.chunks = 1
        if self._usage is not None:
            self._usage.see(behind, end)
        self.bytes_out = self._to.begin(head, ours, behind[:end])
        self._send = self._to.send
        self._hold_rest()
        if framing.done:
            self._finish(surplus=end + framing.cut < received)

    def resume(self) -> None:
        """Go on after the receiver has accepted all bytes that waited, unless the body has ended or failed."""
        if self.done or self.failure is not None:
            return
        deadline = self._hub.update_clock() + self._stall_s
        if self.first_at is not None:
            self._held_s += deadline - self.deadline
        self.deadline = deadline
        self._hub.time(self)
        self._connection.set_reader(self.readable)
        self._connection.rearm()

    def close(self) -> None:
        """Move nothing more, and add the time of the whole stream to its gaps. Called in the request's task."""
        if self.failure is not None and self.failure.__cause__ is not None:
            log.error("a bug moving a response", exc_info=self.failure.__cause__)
        self._hub.untime(self)
        del self._feed_head, self._wake  # they lead to owners of this: the garbage collector must have nothing to do
        if not self.done:
            self._connection.pause()
        if self.first_at is not None:
            self._gaps[-1] += self.deadline - self._stall_s - self.first_at - self._held_s

    def expire(self) -> None:
        """Called by the hub when the upstream has been silent for too long."""
        self._lost("it sent nothing for too long", timed_out=True)

    def _begin_body(self) -> None:
        """Called for the first piece of the body that is no comment: the upstream itself shows that it is alive."""
        self.first_at = self._hub.now
        if self._to.keepalive is not None:
            self._to.keepalive.stop()

    def _hold(self, sent: int, end: int) -> None:
        """Keep the rest of a piece of which the receiver has accepted this much; -1: the receiver's side has it."""
        if sent >= 0:
            self._to.rest = bytes(_VIEW[sent:end])
        self._hold_rest()

    def _hold_rest(self) -> None:
        """Leave bytes that the receiver has not accepted to the request's task, and read no more until then."""
        if self._to.rest:
            self._connection.pause()
            self._wake()

    def _finish(self, *, surplus: bool) -> None:
        self.done = True
        self._connection.set_reader(self._unasked)
        if surplus:
            self.reusable = False
        self._wake()

    def _unasked(self, _events: int) -> None:
        """Called when the upstream sends something, or disconnects, after its response."""
        self.reusable = False
        self._connection.pause()

    def _eof(self) -> None:
        self.reusable = False
        self._connection.pause()
        if self.framing is not None and self.framing.ends_at_eof() and not self._is_truncated():
            self.done = True
            self._to.end()
            self._wake()
        else:
            self._lost("it closed the connection" + (" in the middle of the response" if self.answered else ""))

    def _is_truncated(self) -> bool:
        """Return whether the connection may have ended before the body did, which ends with it."""
        return (self.is_torn or self._connection.truncated) and isinstance(self.framing, UntilClose)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, (HeadError, FramingError)):
            self._to.break_off()
            self._lost(f"its response is not valid HTTP/1.1: {error}")
        elif isinstance(error, ResponseRejected):
            self._lost(str(error), retry=False)
        elif isinstance(error, Declined):
            self._lost(str(error), declined=True)
        else:
            self._lost("the gateway has a bug, which is in its log")
            if self.failure is None:
                log.error("a bug after a response", exc_info=error)
            else:
                self.failure.__cause__ = error  # `close` logs it, in the request's task: the line has its id

    def _lost(self, why: str, *, timed_out: bool = False, retry: bool | None = None, declined: bool = False) -> None:
        self.reusable = False
        self._connection.pause()
        if not self.done:
            self.failure = UpstreamError(
                why,
                answered=self.answered,
                timed_out=timed_out,
                retry=retry,
                can_report=self._to.is_between_chunks,
                declined=declined,
            )
            self._wake()
