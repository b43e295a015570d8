"""Moving one response from an upstream to a client, as bytes.

The head is read and written again (`on_head`); behind it, whatever the upstream sends goes to the client as it is,
chunk framing included. The hub calls `readable` for every piece: one `recv_into` a buffer that all relays share, one
look at where the body ends, one `send`. The request's task sleeps meanwhile. It is woken when the response has ended
or failed, and when the client does not take its bytes: then it sends them itself while the upstream is paused, so a
slow reader holds up nobody but its own upstream.

The time between two pieces of an event stream is what its deadline moves by; it is counted in a list that all relays
of a model share.
"""

import logging
from collections.abc import Callable
from typing import Protocol

import trio

from ichat.http.framing import Chunked, Framing, FramingError, Unchunk, UntilClose
from ichat.http.heads import HeadError, ResponseHead, parse_response_head
from ichat.http.hub import ENDED, Hub
from ichat.http.keepalive import COMMENT_BYTES_MAX, KeepAlive, is_comment
from ichat.http.pool import Connection
from ichat.http.server import Client
from ichat.http.sse import is_events

log = logging.getLogger(__name__)

_BUFFER_BYTES = 128 * 1024
_BUFFER = bytearray(_BUFFER_BYTES)
_VIEW = memoryview(_BUFFER)
_HEAD_BYTES_MAX = 64 * 1024

ChunkGapHistogram = list[float]
"""How often a gap of less than 2**index ms came between two pieces of a stream; the last item is the gaps' sum in
seconds, known of streams that have ended. How long a client takes to read is none of it."""
_GAPS_INDEX_MAX = 63  # a gap of 2**63 ms does not come

OnHead = Callable[[ResponseHead], bytes]
"""Turns the upstream's head into the bytes of the client's head. Raises Unwanted, Declined."""


def empty_gap_histogram() -> ChunkGapHistogram:
    """Make a list that no gap has been counted in."""
    return [0] * (_GAPS_INDEX_MAX + 1) + [0.0]


_UNCOUNTED = empty_gap_histogram()
"""Where the gaps go that nobody asks for."""


class ByteObserver(Protocol):
    """Reads the body of a response in passing."""

    def see(self, buffer: bytearray, end: int) -> None:
        """Look at the next piece: the buffer up to `end`."""
        ...


class ResponseRejected(Exception):
    """A response that the client must not get, with the reason; another try would bring the same."""


class Declined(Exception):
    """A response that says, with the reason, that the upstream has not worked on the request: another one may."""


class UpstreamError(Exception):
    """The upstream failed in the middle of an exchange."""

    def __init__(
        self,
        why: str,
        *,
        answered: bool,
        timed_out: bool = False,
        retry: bool | None = None,
        can_report: bool = False,
        declined: bool = False,
    ) -> None:
        super().__init__(why)
        self.answered = answered
        """Whether it had sent anything, so that it must not be asked again."""
        self.timed_out = timed_out
        self.retry = retry
        """Whether the client's trying again makes sense, where that is known."""
        self.can_report = can_report
        """Whether the client can be told by one more event: it got whole chunks of an event stream so far."""
        self.declined = declined
        """Whether it has said that it did nothing with the request."""


class Reframed:
    """Another framing of a body: in chunks, and as one event where it is no event stream."""

    def __init__(self, framing: Framing, before: bytes = b"") -> None:
        """`framing` is the upstream's; `before` stands before the data of the event, where the body becomes one."""
        self._unchunk = Unchunk() if isinstance(framing, Chunked) else None
        self._before = before
        self._is_event = bool(before)
        self.may_insert = not before
        """Whether a chunk of our own could be put in between two pieces."""

    def __repr__(self) -> str:
        return f"<Reframed{' as an event' if self._is_event else ''}>"

    def feed(self, piece: bytes | bytearray | memoryview, *, is_last: bool) -> bytes:
        """Return the chunks to be sent for the next piece of the body. Raises FramingError."""
        payload = bytes(piece) if self._unchunk is None else self._unchunk.feed(piece)
        if self._is_event:
            payload = payload.replace(b"\r", b" ").replace(b"\n", b" ")  # white space between the values of a JSON body
            payload, self._before = self._before + payload, b""
            if is_last:
                payload += b"\n\n"
        chunk = b"%x\r\n%b\r\n" % (len(payload), payload) if payload else b""
        return chunk + b"0\r\n\r\n" if is_last else chunk


class Relay:
    """One response on its way. ``await relay.carry()`` from the request's task, once."""

    __slots__ = (
        "_client",
        "_connection",
        "_done",
        "_failure",
        "_framing",
        "_gaps",
        "_head",
        "_held_s",
        "_hub",
        "_is_events",
        "_is_torn",
        "_keepalive",
        "_method",
        "_on_head",
        "_receive",
        "_reframed",
        "_reportable",
        "_rest",
        "_send",
        "_sending",
        "_stall_s",
        "_stream_gaps",
        "_task",
        "_unchunk",
        "_unsent",
        "_usage",
        "_version",
        "_woken",
        "answered",
        "bytes_out",
        "chunks",
        "deadline",
        "first_at",
        "reusable",
    )  # fmt: skip

    def __init__(
        self,
        hub: Hub,
        client: Client,
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
        """`gaps` is where the gaps of an event stream are counted, if they are; `keepalive` is stopped by the body."""
        self._hub = hub
        self._client = client
        self._connection = connection
        self._method = method
        self._version = version
        self._on_head = on_head
        self._stall_s = stall_s
        self._usage = usage
        self._gaps = _UNCOUNTED
        self._stream_gaps = _UNCOUNTED if gaps is None else gaps
        self._receive = connection.sock.recv_into
        self._send: Callable[[memoryview], int] = client.sock.send
        self._keepalive = keepalive
        self._is_events = False
        self._unchunk: Unchunk | None = None
        self._reframed: Reframed | None = None
        self._head = b""
        self._held_s = 0.0
        self._framing: Framing | None = None
        self._rest = b""
        self._done = False
        self._failure: UpstreamError | None = None
        self._reportable = False
        self._task: trio.lowlevel.Task | None = None
        self._woken = False
        self._sending: trio.CancelScope | None = None
        self._unsent = 0
        self._is_torn = False
        self.deadline = trio.current_time() + first_byte_s
        self.answered = False
        self.bytes_out = 0
        """Bytes of the response that the client was given, its head included."""
        self.chunks = 0
        """Pieces in which the body came, as they were read."""
        self.first_at: float | None = None
        """When the first piece of the body came, on Trio's clock."""
        self.reusable = False
        """Whether the connection may carry another exchange; known when `carry` has returned."""

    def __repr__(self) -> str:
        state = "head" if self._framing is None else "done" if self._done else "body"
        return f"<Relay {self._connection.upstream.name} to {self._client.peer}: {state}>"

    async def run(self, request: list[bytes | bytearray]) -> None:
        """Send the request, piece by piece, and move the response until it has ended. The pieces are let go of.

        Raises UpstreamLost; the client's head may have been sent by then.
        """
        self._connection.set_reader(self.readable)
        self._hub.time(self)
        try:
            while request:
                await self._send_piece(request.pop(0))
            while not await self._is_over():
                await self._sleep()
            self._client.response_is_whole()
            self.reusable = self.reusable and not self._unsent
        finally:
            self._hub.untime(self)
            self._connection.pause()
            if self.first_at is not None:
                self._gaps[-1] += self.deadline - self._stall_s - self.first_at - self._held_s

    def expire(self) -> None:
        """Be told by the hub that the upstream has been silent for too long."""
        self._lost("it sent nothing for too long", timed_out=True)

    def readable(self, events: int) -> None:
        """Move what can be read now. This runs for every chunk: what is rare is done elsewhere."""
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
                    sent = self._not_sent(error)
                self.bytes_out += end
                if sent != end:
                    self._keep(_VIEW[sent:end])
                if framing.done:
                    self._finish(surplus=end < received)
        except (HeadError, FramingError) as error:
            self._reportable = False
            self._lost(f"its response is not valid HTTP/1.1: {error}")
            return
        except ResponseRejected as error:
            self._lost(str(error), retry=False)
            return
        except Declined as error:
            self._lost(str(error), declined=True)
            return
        except Exception:
            log.exception("a bug moving a response")
            self._lost("the gateway has a bug, which is in its log")
            return
        if received == _BUFFER_BYTES or events & ENDED:
            self._connection.rearm()

    def _feed_head(self, received: int) -> None:
        """Collect the head; when it is complete, send it and what follows."""
        self.answered = True
        data = self._head + _BUFFER[:received]
        end = data.find(b"\r\n\r\n")
        if end > _HEAD_BYTES_MAX:
            raise HeadError("its head is too long")
        while end >= 0:
            head = parse_response_head(data[:end], self._method)
            data = data[end + 4 :]
            if head.status == 101:
                raise HeadError("it switched protocols unasked")
            if head.status >= 200:
                self._begin(head, bytearray(data))
                return
            end = data.find(b"\r\n\r\n")
        if len(data) > _HEAD_BYTES_MAX:
            raise HeadError("its head is too long")
        self._head = data

    def _begin(self, head: ResponseHead, behind: bytearray) -> None:
        ours = self._on_head(head)
        self._framing = head.framing
        self.deadline = self._hub.now + self._stall_s
        headers = dict(head.headers)
        self._is_events = is_events(headers.get(b"content-type", b""))
        self._reportable = self._is_events and b"content-encoding" not in headers
        if self._reframed is not None:
            self._send = self._send_reframed
        elif self._version != b"1.1" and isinstance(head.framing, Chunked):
            self._unchunk, self._send, self._reportable = Unchunk(), self._send_unchunked, False
        if self._is_events:
            self._gaps = self._stream_gaps
        self.reusable = head.reusable
        end = head.framing.feed(behind, 0, len(behind)) if behind else 0
        if self._usage is not None:
            self._usage.see(behind, end)
        if self._reframed is not None:
            ours += self._reframed.feed(behind[:end], is_last=head.framing.done)
        else:
            ours += behind[:end] if self._unchunk is None else self._unchunk.feed(behind[:end])
        self.bytes_out = len(ours)
        if end and not (self._is_events and is_comment(behind, 0, end)):
            self._begin_body()
            self.chunks = 1
        self._send_ours(ours)
        if head.framing.done:
            self._finish(surplus=end < len(behind))

    def _begin_body(self) -> None:
        """Note the first piece of the body; a comment is none."""
        self.first_at = self._hub.now
        if self._keepalive is not None:
            self._keepalive.stop()

    def reframe(self, reframed: "Reframed") -> None:
        """Send the body as this makes it: the client has the head of another response. Called by `on_head`."""
        self._reframed = reframed

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
        if self._reframed is not None:
            return self._reportable and self._reframed.may_insert
        return self._reportable and self._framing is not None and self._framing.may_insert

    def _send_reframed(self, data: memoryview) -> int:
        """Send a piece of the body in chunks of our own; what is not taken at once is kept. Return its length."""
        assert self._reframed is not None
        assert self._framing is not None
        self._send_ours(self._reframed.feed(data, is_last=self._framing.done))
        return len(data)

    def _send_ours(self, payload: bytes) -> None:
        """Send bytes that are not as the upstream sent them; what the client does not take at once is kept."""
        sent = self._client.send_some(payload) if payload else 0
        if sent != len(payload):
            self._keep(payload[sent:])

    def _send_unchunked(self, data: memoryview) -> int:
        """Send what a piece of a chunked body holds; what is not taken at once is kept. Give the piece's length."""
        assert self._unchunk is not None
        self._send_ours(self._unchunk.feed(data))
        return len(data)

    async def _send_piece(self, piece: bytes | bytearray) -> None:
        """Send a piece of the request, or as much of it as the upstream wants to see before it answers or fails."""
        rest = memoryview(piece)
        while rest and not await self._is_over():
            try:
                rest = rest[self._connection.sock.send(rest) :]
            except BlockingIOError:
                with trio.CancelScope() as self._sending:
                    await trio.lowlevel.wait_writable(self._connection.sock)
                self._sending = None
            except OSError:  # which may have taken the error that a truncated response would end in
                self._is_torn = True
                break
        self._unsent += len(rest)

    async def _is_over(self) -> bool:
        """Send what the client did not take at once; say whether the response has ended. Raises UpstreamLost."""
        while self._rest:
            self._hub.untime(self)
            rest, self._rest = self._rest, b""
            await self._client.send_all(rest)
            if not self._done and self._failure is None:
                self._hub.now = trio.current_time()
                deadline = self._hub.now + self._stall_s
                if self.first_at is not None:
                    self._held_s += deadline - self.deadline
                self.deadline = deadline
                self._hub.time(self)
                self._connection.set_reader(self.readable)
                self._connection.rearm()
        if not self._done and self._failure is not None:
            raise self._failure
        return self._done

    def _not_sent(self, error: OSError) -> int:
        """Give how much was sent: nothing, since the client takes nothing at the moment, or is gone."""
        if not isinstance(error, BlockingIOError):
            self._client.on_disconnect()
        return 0

    def _keep(self, data: bytes | memoryview) -> None:
        """Leave to the request's task what the client does not take, and read no more until it has."""
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
        """Be told that the upstream says or ends something behind its response."""
        self.reusable = False
        self._connection.pause()

    def _eof(self) -> None:
        self.reusable = False
        self._connection.pause()
        if self._framing is not None and self._framing.ends_at_eof() and not self._is_truncated():
            self._done = True
            if self._reframed is not None:
                self._send_ours(self._reframed.feed(b"", is_last=True))
            self._wake()
        else:
            self._lost("it closed the connection" + (" in the middle of the response" if self.answered else ""))

    def _is_truncated(self) -> bool:
        """Say whether an end of the connection may not be taken for that of a body which ends with it."""
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
        self._woken = True
        if self._sending is not None:
            self._sending.cancel()
        if self._task is not None:
            task, self._task = self._task, None
            trio.lowlevel.reschedule(task)

    async def _sleep(self) -> None:
        if not self._woken:
            self._task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._abandon)
        self._woken = False

    def _abandon(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED
