"""An exchange on an upstream's connection: a request is sent, and its response moved to a receiver.

A task that has nothing else to do runs it. Without a task it can be begun, and ended once the response is whole: the
hub moves the bytes.
"""

from collections.abc import Callable

import trio

from ichat.http.body_mover import BodyMover, ByteObserver, ChunkGapHistogram, ReadHead
from ichat.http.client_side import ClientSide
from ichat.http.framing import Transform
from ichat.http.heads import HeadError, ResponseHead, parse_response_head
from ichat.http.pool import Connection

_HEAD_BYTES_MAX = 64 * 1024

Piece = bytes | bytearray | memoryview
OnHead = Callable[[ResponseHead], bytes]
"""Returns our head for the upstream's. Raises ResponseRejected, Declined."""


class HeadReader:
    """Collects the upstream's head."""

    __slots__ = ("_data", "_method", "_on_head")

    def __init__(self, method: bytes, on_head: OnHead) -> None:
        """`method` is the request's."""
        self._method = method
        self._on_head = on_head
        self._data = b""

    def __repr__(self) -> str:
        return f"<HeadReader {len(self._data)} bytes>"

    def feed(self, received: memoryview) -> ReadHead | None:
        """Follow the next bytes; return the head, ours for it, and the bytes behind it, once it is complete.

        Raises HeadError, and what `OnHead` raises.
        """
        data = self._data + received
        while (end := data.find(b"\r\n\r\n")) >= 0:
            if end > _HEAD_BYTES_MAX:
                raise HeadError("its head is too long")
            head = parse_response_head(data[:end], self._method)
            if head.status >= 200:
                return head, self._on_head(head), bytearray(data[end + 4 :])
            if head.status == 101:
                raise HeadError("it switched protocols unasked")
            data = data[end + 4 :]
        if len(data) > _HEAD_BYTES_MAX:
            raise HeadError("its head is too long")
        self._data = data
        return None


class Relay:
    """A request on its way, and its response. ``await relay.run(pieces)`` from the request's task, once.

    Or `begin`, and `end` when the function that it has got is called; where that returns False, `run` goes on.
    """

    __slots__ = ("_changed", "_connection", "_has_begun", "_sending", "_task", "_to", "_unsent", "body", "reusable")

    def __init__(
        self,
        connection: Connection,
        to: ClientSide,
        *,
        method: bytes,
        on_head: OnHead,
        first_byte_s: float,
        stall_s: float,
        usage: ByteObserver | None = None,
        gaps: ChunkGapHistogram | None = None,
    ) -> None:
        """`gaps` counts the gaps of an event stream."""
        self._connection = connection
        self._to = to
        self.body = BodyMover(
            connection,
            to,
            HeadReader(method, on_head).feed,
            self._wake,
            first_byte_s=first_byte_s,
            stall_s=stall_s,
            usage=usage,
            gaps=gaps,
        )
        """The response's body, and the facts learnt about it."""
        self._task: trio.lowlevel.Task | None = None
        """The request's task, while it waits for the response."""
        self._sending: trio.CancelScope | None = None
        """Its wait until the upstream accepts more of the request."""
        self._changed: Callable[[], None] | None = None
        """Called where no task waits for the response."""
        self._has_begun = False
        self._unsent = 0
        """Bytes of the request that the upstream did not accept."""
        self.reusable = False
        """Whether the connection may carry another exchange; known at the end."""

    def __repr__(self) -> str:
        return f"<Relay from {self.body} to {self._to}>"

    def reframe(self, transform: Transform) -> None:
        """See `ClientSide.reframe`."""
        self._to.reframe(transform)

    @property
    def has_head(self) -> bool:
        """See `keepalive.Response`."""
        return self.body.framing is not None

    @property
    def may_insert(self) -> bool:
        """See `keepalive.Response`."""
        to, body = self._to, self.body
        return not self.has_head or (to.is_between_chunks and not to.rest and not body.done)

    def begin(self, request: list[Piece], changed: Callable[[], None] | None = None) -> None:
        """Send the request, freeing its pieces, as far as the upstream accepts it at once.

        `changed` is called once: when the response has ended or failed, or bytes wait for the receiver.
        """
        connection, self._has_begun = self._connection, True
        connection.set_reader(self.body.readable)
        connection.hub.time(self.body)
        while request:
            try:
                sent = connection.sock.send(request[0])
            except OSError:
                sent = 0
            if sent != len(request[0]):
                request[0] = memoryview(request[0])[sent:]
                return
            del request[0]
        self._changed = changed

    def end(self) -> bool:
        """End an exchange that was begun, if the receiver has all of the response; return whether it has."""
        body, to = self.body, self._to
        if to.rest or not body.done:
            return False
        to.taker.response_is_whole()
        self.reusable = body.reusable and not self._unsent
        body.close()
        return True

    def abandon(self) -> None:
        """Move nothing more of an exchange that was begun."""
        self._changed = None
        self.body.close()

    async def run(self, request: list[Piece]) -> None:
        """Send the request, freeing its pieces, and move the response until it has ended.

        Raises UpstreamError; the client's head may have been sent by then.
        """
        body, to = self.body, self._to
        if not self._has_begun:
            self.begin(request)
        try:
            while request:
                await self._send_piece(memoryview(request[0]))
                del request[0]
            while to.rest or not body.done:
                if to.rest or body.failure is not None:
                    await self._is_over()
                else:
                    self._task = trio.lowlevel.current_task()
                    await trio.lowlevel.wait_task_rescheduled(self._abandon)
            to.taker.response_is_whole()
            self.reusable = body.reusable and not self._unsent
        finally:
            body.close()

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
                self.body.is_torn = True
                break
        self._unsent += len(rest)

    async def _is_over(self) -> bool:
        """Send bytes that the client did not accept; return whether the response has ended. Raises UpstreamError."""
        body, to = self.body, self._to
        while to.rest:
            self._connection.hub.untime(body)
            await to.flush()
            body.resume()
        if not body.done and body.failure is not None:
            raise body.failure
        return body.done

    def _wake(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
        if self._task is not None:
            task, self._task = self._task, None
            trio.lowlevel.reschedule(task)
        elif self._changed is not None:
            changed, self._changed = self._changed, None
            changed()

    def _abandon(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED
