"""The receiver's side of a response: bytes that wait for it, and the body in another form."""

from collections.abc import Callable

from ichat.http.framing import Chunked, Framing, Transform, Unchunk
from ichat.http.heads import ResponseHead
from ichat.http.keepalive import KeepAlive
from ichat.http.server import Taker


class ClientSide:
    """Sends a response to its receiver, and keeps the bytes that are not accepted at once."""

    __slots__ = ("_framing", "_is_reportable", "_transform", "_version", "keepalive", "rest", "send", "taker")

    def __init__(self, taker: Taker, version: bytes, keepalive: KeepAlive | None = None) -> None:
        """`version` is the receiver's version of HTTP; `keepalive` is stopped when the body begins."""
        self.taker = taker
        self._version = version
        self.keepalive = keepalive
        self._framing: Framing | None = None
        """The upstream's, once its head was read."""
        self._transform: Transform | None = None
        self._is_reportable = False
        """Whether the response is an event stream that may get another event."""
        self.send: Callable[[memoryview], int] = taker.sock.send
        """Sends a piece of the body that the framing has followed, and returns how many of its bytes were accepted.

        -1: it sends the piece in another form, and `rest` has bytes of that. Raises OSError; see `Taker.not_sent`.
        """
        self.rest = b""
        """Bytes that the receiver did not accept at once. Nothing may be sent before them."""

    def __repr__(self) -> str:
        return f"<ClientSide {self.taker.peer}{f', {len(self.rest)} bytes wait' if self.rest else ''}>"

    @property
    def is_between_chunks(self) -> bool:
        """Whether the receiver has whole chunks of an event stream, so that another chunk could follow."""
        body = self._transform or self._framing
        return self._is_reportable and body is not None and body.may_insert

    def reframe(self, transform: Transform) -> None:
        """Send the body as this makes it, and the head too where the receiver has none. Called before `begin`."""
        self._transform = transform

    def begin(self, head: ResponseHead, ours: bytes, piece: bytearray) -> int:
        """Send our head and the first piece of the body (maybe empty); return how many bytes that makes."""
        framing = self._framing = head.framing
        self._is_reportable = head.is_events and b"content-encoding" not in head.by_name
        if self._version != b"1.1" and self._transform is None and isinstance(framing, Chunked):
            self._transform = Unchunk()
        if self._transform is None:
            ours += piece
        else:
            self.send = self._send_transformed
            ours += self._transform.feed(piece, is_last=framing.done)
        self._send_ours(ours)
        return len(ours)

    def end(self) -> None:
        """Send what ends the body in another form, where it has ended with the connection."""
        if self._transform is not None:
            self._send_ours(self._transform.feed(b"", is_last=True))

    def break_off(self) -> None:
        """Let nothing follow: the upstream's bytes make no sense."""
        self._is_reportable = False

    async def flush(self) -> None:
        """Send the bytes that were not accepted, however slow the receiver is."""
        await self.taker.send_all(self.rest)
        self.rest = b""

    def _send_transformed(self, piece: memoryview) -> int:
        assert self._transform is not None
        assert self._framing is not None
        self._send_ours(self._transform.feed(piece, is_last=self._framing.done))
        return -1 if self.rest else len(piece)

    def _send_ours(self, payload: bytes) -> None:
        """Send bytes made here; keep those that are not accepted at once."""
        sent = self.taker.send_some(payload) if payload else 0
        self.rest = payload[sent:]
