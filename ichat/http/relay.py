"""Moving a response from an upstream to a client, as bytes.

The head is parsed and written anew (`on_head`). The rest goes to the client unchanged, chunk framing included.
The hub calls `readable` for every piece: a `recv_into` a buffer that all relays share, a search for the body's end,
a `send`. The request's task sleeps meanwhile. It is woken when the response has ended or failed, and when the client
does not accept its bytes. Then the task sends them while the upstream is paused: a slow client delays only its own
upstream.

The time between two pieces of an event stream is how far its deadline moves; it is counted in a list that all relays of
a model share.
"""

import logging
from collections.abc import Callable
from typing import Protocol

import trio

from ichat.http.failures import Declined, ResponseRejected, UpstreamError
from ichat.http.framing import Chunked, Framing, FramingError, Transform, Unchunk, UntilClose
from ichat.http.heads import HeadError, ResponseHead, parse_response_head
from ichat.http.hub import ENDED, Hub
from ichat.http.keepalive import COMMENT_BYTES_MAX, KeepAlive, is_comment
from ichat.http.pool import Connection
from ichat.http.server import Taker
from ichat.http.sse import is_events

log = logging.getLogger(__name__)

_BUFFER_BYTES = 128 * 1024
_BUFFER = bytearray(_BUFFER_BYTES)
_VIEW = memoryview(_BUFFER)
_HEAD_BYTES_MAX = 64 * 1024

ChunkGapHistogram = list[float]
"""How often two pieces of a stream were less than 2**index ms apart. The last item is the sum of the gaps in
seconds, for streams that have ended. The time in which a client accepts nothing is left out."""
_GAPS_INDEX_MAX = 63  # no gap is as long as 2**63 ms

OnHead = Callable[[ResponseHead], bytes]
"""Returns the client's head for the upstream's. Raises ResponseRejected, Declined."""


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


class Relay:
    """A response on its way. ``await relay.run()`` from the request's task, once."""

    __slots__ = (
        "_client", "_connection", "_done", "_failure", "_framing", "_gaps", "_head", "_held_s", "_hub", "_is_events",
        "_is_torn", "_keepalive", "_method", "_on_head", "_receive", "_reportable", "_rest", "_send", "_sending",
        "_stall_s", "_stream_gaps", "_task", "_transform", "_unsent", "_usage", "_version", "answered",
        "bytes_out", "chunks", "deadline", "first_at", "reusable",
    )  # fmt: skip

    def __init__(
        self,
        hub: Hub,
        client: Taker,
        connection: Connection,
        *,
        method: bytes,
        version: bytes,
        on_head: OnHead,
        first_byte_s: float,
        stall_s: float,
        usage: ByteObserver | None = None,
        gaps: ChunkGapHistogram | None = None,
        keepalive: KeepAlive | None = None,
    ) -> None:
        """`gaps` counts the gaps of an event stream; `keepalive` is stopped when the body begins."""
        self._hub = hub
        self._method = method
        self._version = version
        self._on_head = on_head
        self._stall_s = stall_s
        self._usage = usage
        self._keepalive = keepalive

        # The upstream's side.
        self._connection = connection
        self._receive = connection.sock.recv_into
        self._head = b""
        self._framing: Framing | None = None
        self._is_events = False
        self._stream_gaps = _UNCOUNTED if gaps is None else gaps
        self._gaps = _UNCOUNTED
        self._is_torn = False
        self._done = False
        self._failure: UpstreamError | None = None
        self.answered = False
        self.deadline = hub.update_clock() + first_byte_s
        self.reusable = False
        """Whether the connection may carry another exchange; known when `run` has returned."""
        self.chunks = 0
        """Pieces of the body, as they were read."""
        self.first_at: float | None = None
        """When the first piece of the body arrived, on Trio's clock."""

        # The client's side.
        self._client = client
        self._send: Callable[[memoryview], int] = client.sock.send
        self._transform: Transform | None = None
        self._reportable = False
        self._rest = b""
        """Bytes that the client did not accept at once."""
        self._held_s = 0.0
        """For how long the client held up the body."""
        self.bytes_out = 0
        """Bytes of the response, head included, that were sent or kept for the client."""

        # The request's task.
        self._task: trio.lowlevel.Task | None = None
        self._sending: trio.CancelScope | None = None
        self._unsent = 0
        """Bytes of the request that the upstream did not accept."""

    def __repr__(self) -> str:
        state = "head" if self._framing is None else "done" if self._done else "body"
        return f"<Relay {self._connection.upstream.name} to {self._client.peer}: {state}>"

    async def run(self, request: list[bytes | bytearray]) -> None:
        """Send the request, freeing its pieces, and move the response until it has ended.

        Raises UpstreamError; the client's head may have been sent by then.
        """
        self._connection.set_reader(self.readable)
        self._hub.time(self)
        try:
            while request:
                try:
                    sent = self._connection.sock.send(request[0])
                except OSError:
                    sent = 0
                if sent != len(request[0]):
                    await self._send_piece(memoryview(request[0])[sent:])
                del request[0]
            while self._rest or not self._done:
                if self._rest or self._failure is not None:
                    await self._is_over()
                else:
                    self._task = trio.lowlevel.current_task()
                    await trio.lowlevel.wait_task_rescheduled(self._abandon)
            self._client.response_is_whole()
            self.reusable = self.reusable and not self._unsent
        finally:
            self._hub.untime(self)
            if not self._done:
                self._connection.pause()
            del self._on_head  # its owner keeps this relay, and the garbage collector must have nothing to do
            if self.first_at is not None:
                self._gaps[-1] += self.deadline - self._stall_s - self.first_at - self._held_s

    def expire(self) -> None:
        """Called by the hub when the upstream has been silent for too long."""
        self._lost("it sent nothing for too long", timed_out=True)

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
        framing = self._framing
        try:
            if framing is None:
                self._feed_head(received)
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
                    sent = self._client.not_sent(error)
                self.bytes_out += end
                if sent != end:
                    self._keep(_VIEW[sent:end])
                if framing.done:
                    self._finish(surplus=end + framing.cut < received)
        except Exception as error:
            self._fail(error)
            return
        if received == _BUFFER_BYTES or events & ENDED:
            self._connection.rearm()

    def _fail(self, error: Exception) -> None:
        if isinstance(error, (HeadError, FramingError)):
            self._reportable = False
            self._lost(f"its response is not valid HTTP/1.1: {error}")
        elif isinstance(error, ResponseRejected):
            self._lost(str(error), retry=False)
        elif isinstance(error, Declined):
            self._lost(str(error), declined=True)
        else:
            log.error("a bug moving a response", exc_info=error)
            self._lost("the gateway has a bug, which is in its log")

    def _feed_head(self, received: int) -> None:
        """Collect the head; when it is complete, send it and what follows."""
        self.answered = True
        data = self._head + _VIEW[:received]
        while (end := data.find(b"\r\n\r\n")) >= 0:
            if end > _HEAD_BYTES_MAX:
                raise HeadError("its head is too long")
            head = parse_response_head(data[:end], self._method)
            if head.status >= 200:
                self._begin(head, bytearray(data[end + 4 :]))
                return
            if head.status == 101:
                raise HeadError("it switched protocols unasked")
            data = data[end + 4 :]
        if len(data) > _HEAD_BYTES_MAX:
            raise HeadError("its head is too long")
        self._head = data

    def _begin(self, head: ResponseHead, behind: bytearray) -> None:
        ours = self._on_head(head)
        framing = self._framing = head.framing
        self.deadline = self._hub.now + self._stall_s
        self.reusable = head.reusable
        if is_events(head.by_name.get(b"content-type", b"")):
            self._is_events = True
            self._reportable = b"content-encoding" not in head.by_name
            self._gaps = self._stream_gaps
        if self._version != b"1.1" and self._transform is None and isinstance(framing, Chunked):
            self._transform = Unchunk()
        received = len(behind)
        end = framing.feed(behind, 0, received) if behind else 0
        if end and not (self._is_events and is_comment(behind, 0, end)):
            self._begin_body()
            self.chunks = 1
        if self._usage is not None:
            self._usage.see(behind, end)
        if self._transform is None:
            ours += behind[:end]
        else:
            self._send = self._send_transformed
            ours += self._transform.feed(behind[:end], is_last=framing.done)
        self.bytes_out = len(ours)
        self._send_ours(ours)
        if framing.done:
            self._finish(surplus=end + framing.cut < received)

    def _begin_body(self) -> None:
        """Called for the first piece of the body that is no comment."""
        self.first_at = self._hub.now
        if self._keepalive is not None:
            self._keepalive.stop()

    def reframe(self, transform: Transform) -> None:
        """Send the body as this makes it, and head too where the client has none. Called by `on_head`."""
        self._transform = transform

    @property
    def has_head(self) -> bool:
        """See `keepalive.Response`."""
        return self._framing is not None

    @property
    def may_insert(self) -> bool:
        """See `keepalive.Response`."""
        return self._framing is None or (self._is_between_chunks() and not self._rest and not self._done)

    def _is_between_chunks(self) -> bool:
        """Return whether the client has whole chunks of an event stream so far."""
        body = self._transform or self._framing
        return self._reportable and body is not None and body.may_insert

    def _send_transformed(self, data: memoryview) -> int:
        """Send a piece of the body as the transform makes it; keep bytes not accepted. Return the piece's length."""
        assert self._transform is not None
        assert self._framing is not None
        self._send_ours(self._transform.feed(data, is_last=self._framing.done))
        return len(data)

    def _send_ours(self, payload: bytes) -> None:
        """Send bytes made here; keep those that the client does not accept at once."""
        sent = self._client.send_some(payload) if payload else 0
        if sent != len(payload):
            self._keep(payload[sent:])

    async def _send_piece(self, rest: memoryview) -> None:
        """Send the rest of a piece of the request, or as much as the upstream accepts before it answers or fails."""
        while rest and not await self._is_over():
            try:
                rest = rest[self._connection.sock.send(rest) :]
            except BlockingIOError:
                with trio.CancelScope() as self._sending:
                    await trio.lowlevel.wait_writable(self._connection.sock)
                self._sending = None
            except OSError:  # a truncated response would have ended in this error, now consumed
                self._is_torn = True
                break
        self._unsent += len(rest)

    async def _is_over(self) -> bool:
        """Send bytes that the client did not accept; return whether the response has ended. Raises UpstreamError."""
        while self._rest:
            self._hub.untime(self)
            await self._client.send_all(self._rest)
            self._rest = b""
            if not self._done and self._failure is None:
                deadline = self._hub.update_clock() + self._stall_s
                if self.first_at is not None:
                    self._held_s += deadline - self.deadline
                self.deadline = deadline
                self._hub.time(self)
                self._connection.set_reader(self.readable)
                self._connection.rearm()
        if not self._done and self._failure is not None:
            raise self._failure
        return self._done

    def _keep(self, data: bytes | memoryview) -> None:
        """Leave these bytes to the request's task, and read no more until the client has accepted them."""
        self._rest = bytes(data)
        self._connection.pause()
        self._wake()

    def _finish(self, *, surplus: bool) -> None:
        self._done = True
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
        if self._framing is not None and self._framing.ends_at_eof() and not self._is_truncated():
            self._done = True
            if self._transform is not None:
                self._send_ours(self._transform.feed(b"", is_last=True))
            self._wake()
        else:
            self._lost("it closed the connection" + (" in the middle of the response" if self.answered else ""))

    def _is_truncated(self) -> bool:
        """Return whether the connection may have ended before the body did, which ends with it."""
        return (self._is_torn or self._connection.truncated) and isinstance(self._framing, UntilClose)

    def _lost(self, why: str, *, timed_out: bool = False, retry: bool | None = None, declined: bool = False) -> None:
        self.reusable = False
        self._connection.pause()
        if not self._done:
            self._failure = UpstreamError(
                why,
                answered=self.answered,
                timed_out=timed_out,
                retry=retry,
                can_report=self._is_between_chunks(),
                declined=declined,
            )
            self._wake()

    def _wake(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
        if self._task is not None:
            task, self._task = self._task, None
            trio.lowlevel.reschedule(task)

    def _abandon(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED
