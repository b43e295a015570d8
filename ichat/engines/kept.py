"""A client's connection in the hands of the engine's thread, which reads the next requests itself.

A request that crosses from Trio to the engine's thread and back wakes both threads, and they wait for each other's
turn. So after the first response the connection stays on the engine's loop: it serves each request that is small, plain
and for the engine. Everything else is for Trio, which gets the connection back with the bytes that were received.
"""

import asyncio
from collections.abc import Callable

from ichat.engines.asgi import Call
from ichat.http.heads import RequestHead, parse_plain_request_head
from ichat.http.json_body import PARSED_BYTES_MAX
from ichat.http.server import Client

REQUEST_BYTES_MAX = PARSED_BYTES_MAX
"""Head and body of a request that is read on the engine's loop; a larger request is for Trio."""
_BUFFER = bytearray(REQUEST_BYTES_MAX)
_VIEW = memoryview(_BUFFER)

Begin = Callable[["KeptConnection", RequestHead, bytes], bool]
"""Begins the call for a request of this head and body; returns False if the request is for Trio."""


class KeptConnection:
    """A kept connection. Everything except the constructor runs on the engine's loop."""

    def __init__(self, client: Client, *, begin: Begin | None, give_back: Callable[[], None]) -> None:
        """`give_back` is called once: after the first response if `begin` is None."""
        self.client = client
        self.call: Call
        """The call under way, or the last call."""
        self._begin = begin
        self._give_back = give_back
        self._fd = client.sock.fileno()
        self._received = b""
        """The beginning of a request."""
        self._idle_since: float | None = None
        """The time since which it waits for a request, on the loop's clock; None while a call is under way."""
        self._is_late = False
        """Whether `check` has seen the beginning of the request."""
        self._is_watched = False
        self._has_left = False
        self._is_given_back = False

    def __repr__(self) -> str:
        return f"<KeptConnection of {self.client.peer}: {self.call!r}{' idle' if self.is_idle else ''}>"

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a request."""
        return self._idle_since is not None

    def client_left(self) -> None:
        """Called when Trio no longer wants the response: give the connection back as soon as possible."""
        self._has_left = True
        if not self.is_idle:
            self.call.hang_up()
        else:
            self._return()

    def call_ended(self, *, may_wait: bool) -> None:
        """Wait for the next request, or give the connection back, which Trio needs for everything unusual."""
        call = self.call
        is_usual = call.complete and call.keep_alive and not (call.hung_up or self._has_left)
        if not (may_wait and is_usual) or self._begin is None:
            self._return()
            return
        loop = asyncio.get_running_loop()
        self._idle_since = loop.time()
        if self._received and not self._take():
            self._return()
        elif not self._is_watched:
            self._is_watched = True
            loop.add_reader(self._fd, self._readable)

    def check(self, now: float) -> None:
        """Called at intervals: give back a connection that is idle for too long, or waits too long for a request."""
        if self._idle_since is None:
            return
        if self._received:
            if self._is_late:
                self._return()
            self._is_late = True
        elif now - self._idle_since > self.client.reader.timeouts.keep_alive_s:
            self.give_back_idle(close=True)

    def give_back_idle(self, *, close: bool = False) -> None:
        """Return it to Trio if no request has arrived until now; Trio closes it if `close`."""
        if self.is_idle:
            self._readable()
        if self.is_idle and not self._is_given_back:
            if close and not self._received:
                self.client.close_after_response()
            self._return()

    def _return(self) -> None:
        if not self._is_given_back:
            self._is_given_back = True
            self._unwatch()
            self.client.reader.unread(self._received)
            self._give_back()

    def _unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            asyncio.get_running_loop().remove_reader(self._fd)

    def _readable(self) -> None:
        """Receive a request, or a part of it; also while the call under way ends, after its response."""
        is_idle = self.is_idle
        if not is_idle and (self._received or not self.call.complete):
            self._unwatch()
            return
        try:
            size = self.client.sock.recv_into(_BUFFER)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        self._received += _VIEW[:size]
        if not size and not is_idle:
            self._unwatch()
        elif is_idle and not (size and self._take()):
            self._return()

    def _take(self) -> bool:
        """Begin the call for the received bytes, once they are a whole request; return False if it is for Trio."""
        data = self._received
        limits = self.client.reader.limits
        end = data.find(b"\r\n\r\n", 0, limits.head_bytes_max)
        if end < 0:
            return len(data) < min(limits.head_bytes_max, REQUEST_BYTES_MAX)
        head = parse_plain_request_head(data[:end])
        if head is None or head.length is None or self._begin is None:
            return False
        whole = end + 4 + head.length
        if len(data) != whole:
            return len(data) < whole <= min(limits.body_bytes_max, REQUEST_BYTES_MAX)
        if not self._begin(self, head, data[end + 4 :]):
            return False
        self.client.head = head
        self._idle_since = None
        self._received = b""
        self._is_late = False
        return True
