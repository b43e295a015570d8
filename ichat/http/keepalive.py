"""Comments that keep a waiting event stream alive: some proxies close a connection on which nothing is sent.

A comment is a line that begins with a colon; clients ignore it (HTML Living Standard, section 9.2.6). If the upstream
has sent nothing yet, the first comment is preceded by a response head. Such a stream has the status 200 even if the
request fails later. Comments stop with the first byte of the response's body.
"""

from collections.abc import Callable
from typing import Protocol

import trio

from ichat.http import sse
from ichat.http.heads import date_header, response_head
from ichat.http.hub import Hub
from ichat.http.server import Client

COMMENT = b": keep-alive\n\n"
FIRST_S = 1.0
"""How long after the first comment of `announce` the second is sent; twice as long each further time."""
_HEADERS = (
    *sse.HEADERS,
    (b"transfer-encoding", b"chunked"),
)


class Response(Protocol):
    """How much of the upstream's response has arrived."""

    @property
    def has_head(self) -> bool:
        """Whether the client has the upstream's head."""
        ...

    @property
    def may_insert(self) -> bool:
        """Whether a chunk of our own could be sent to the client now."""
        ...


class KeepAlive:
    """The comments of a stream: `start` when the wait begins, `stop` when the body does."""

    __slots__ = (
        "_client",
        "_hub",
        "_pause_s",
        "_request_id",
        "deadline",
        "has_begun",
        "interval_s",
        "response",
        "text",
    )

    def __init__(self, hub: Hub, client: Client, request_id: bytes, interval_s: float) -> None:
        self._hub = hub
        self._client = client
        self._request_id = request_id
        self.interval_s = interval_s
        """How often a comment is sent; in effect from `start` on."""
        self.text: Callable[[], bytes] | None = None
        """Returns the text of the next comment, in a single line; None: that the stream is alive."""
        self._pause_s = FIRST_S
        """Until the next comment of `announce`, if that is less than the interval."""
        self.deadline = 0.0
        self.has_begun = False
        """Whether the client was sent that head."""
        self.response: Response | None = None
        """The upstream's response; None until the request is sent."""

    def __repr__(self) -> str:
        return f"<KeepAlive {self._client.peer}{' begun' if self.has_begun else ''}>"

    def start(self) -> None:
        """Send a comment after each interval from now on."""
        pause_s = self.interval_s
        if self.text is not None:
            pause_s, self._pause_s = min(pause_s, self._pause_s), 2 * self._pause_s
        self.deadline = trio.current_time() + pause_s
        self._hub.time(self)

    def announce(self, text: Callable[[], bytes], interval_s: float) -> None:
        """Send a comment that says this, now and again: soon at first, since more happens then, later every interval.

        It ends with `end_announcement`.
        """
        self.text, self.interval_s, self._pause_s = text, interval_s, FIRST_S
        self.expire()

    def end_announcement(self, interval_s: float) -> None:
        """Send plain comments from now on, after each interval; 0: send none."""
        self.text, self.interval_s = None, interval_s
        if interval_s:
            self.start()
        else:
            self.stop()

    def follow(self, response: Response) -> None:
        """Insert comments only where this response of the upstream allows it."""
        self.response = response

    def stop(self) -> None:
        """Send no more comments; harmless if none are sent."""
        self._hub.untime(self)

    def expire(self) -> None:
        """Called by the hub when an interval is over."""
        self.start()
        response = self.response
        if response is not None and not response.may_insert:
            return
        comment = COMMENT if self.text is None else b": %b\n\n" % self.text()
        chunk = b"%x\r\n%b\r\n" % (len(comment), comment)
        if self.has_begun or (response is not None and response.has_head):
            self._send(chunk)
        else:
            self.has_begun = True
            self._send(self._head() + chunk)

    def _head(self) -> bytes:
        """Return the head of a response that begins with a comment."""
        headers = [date_header(), *_HEADERS, (b"x-request-id", self._request_id), *self._client.more_headers()]
        if not self._client.keep_alive:
            headers.append((b"connection", b"close"))
        return response_head(200, headers)

    def _send(self, data: bytes) -> None:
        """Send all of it, or give the client up: a client without room for this little has not read for long."""
        if self._client.send_some(data) != len(data):
            self.stop()
            self._client.on_disconnect()
