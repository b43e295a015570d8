"""A worker's own output for those that follow it over HTTP: server-sent events, answered by Trio, not by the engine."""

from collections.abc import Callable

import trio

from ichat import errors
from ichat.http import sse
from ichat.http.heads import Headers, date_header, response_head
from ichat.http.request import Request
from ichat.http.server import Client
from ichat.listeners import Listeners
from ichat.observability.logs.lines import LineBuffer, Wakeup
from ichat.observability.logs.stream import LogCursor, LogStream, read_query

_LAST_CHUNK = b"0\r\n\r\n"


class LogEndpoint:
    """Sends the lines of this process to its followers, for as long as it can."""

    def __init__(self, buffer: LineBuffer, settle: Callable[[float], object], headers: Headers) -> None:
        """`settle` waits at most the given seconds until the buffer has all output written before; it may block.

        `headers` are put on every response.
        """
        self._buffer = buffer
        self._settle = settle
        self._headers = headers
        self._wakeup = Wakeup()
        self._readers = 0
        self.is_ending = False
        """Whether all streams end: the worker stops."""
        self._left: Listeners[[]] = Listeners()
        buffer.changed.add(self._wakeup.notify)

    def __repr__(self) -> str:
        return f"<LogEndpoint {self._buffer!r}, {self._readers} readers>"

    async def answer(self, request: Request, client: Client) -> None:
        """Answer a request for the lines: `?tail=N`, `?follow=false`, `Last-Event-ID`. Raises ApiError 400, 405.

        A drain does not wait for followers; `finish` ends their streams.
        """
        if request.method not in (b"GET", b"HEAD"):
            path = request.path.decode("latin-1")
            raise errors.method_not_allowed(request.method.decode("latin-1"), path, "GET, HEAD")
        last_id = next((value for name, value in request.headers if name == b"last-event-id"), b"")
        query = read_query(request.target.partition(b"?")[2].decode("latin-1"), last_id.decode("latin-1"))
        if query.previous:
            raise errors.bad_request("A worker knows its own run only: ask its gateway.", param="previous")
        cursor = LogCursor(self._buffer, tail=query.tail, after=query.after, follow=query.follow)
        is_chunked = request.version == b"1.1"
        if not is_chunked:
            client.close_after_response()
        await client.send_all(self._head(request.id, is_chunked=is_chunked, keep_alive=client.keep_alive))
        if request.method == b"HEAD":
            return

        async def send_chunk(block: bytes) -> None:
            await client.send_all(b"%x\r\n%b\r\n" % (len(block), block))

        client.exempt_from_drain()
        self._readers += 1
        try:
            send = send_chunk if is_chunked else client.send_all
            async for block in LogStream(cursor, self._wakeup, self):
                await send(block)
            if is_chunked:
                await client.send_all(_LAST_CHUNK)
        finally:
            self._readers -= 1
            self._left()

    async def finish(self, wait_s: float) -> None:
        """End all followers, with every line that was written by now, within `wait_s`; later lines are cut."""
        with trio.move_on_after(wait_s):
            if self._readers:
                await trio.to_thread.run_sync(self._settle, wait_s, abandon_on_cancel=True)
            self.is_ending = True
            self._wakeup.notify()
            while self._readers:
                await self._left.wait()

    def _head(self, request_id: bytes, *, is_chunked: bool, keep_alive: bool) -> bytes:
        head = [date_header(), *sse.HEADERS, *self._headers, (b"x-request-id", request_id)]
        if is_chunked:
            head.append((b"transfer-encoding", b"chunked"))
        if not keep_alive:
            head.append((b"connection", b"close"))
        return response_head(200, head)
