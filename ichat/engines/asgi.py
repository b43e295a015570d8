"""A request across the threads: an ASGI call on the engine's loop that writes to the client's socket itself.

Trio reads the request and sleeps. The call runs on the engine's thread, which writes head, chunk framing and body
straight to the client's socket. Only the end of the exchange crosses back to Trio, and only a client's disconnect
crosses over meanwhile. The protocol is ASGI's HTTP 2.3: from 2.4 on Starlette does not listen for the disconnect.
"""

import asyncio
import contextvars
import logging
import socket
import urllib.parse
from collections.abc import Callable
from typing import Any

from ichat import errors
from ichat.engines.adapter import BodyTransform, ProtocolAdapter
from ichat.engines.context_length import SIGN
from ichat.engines.engine import Application, Message, Scope
from ichat.engines.error_translation import ERROR_BEGINNINGS, error_event
from ichat.engines.response_framing import ResponseFraming, last_chunk
from ichat.engines.socket_writer import SocketWriter
from ichat.http.heads import Headers
from ichat.http.request import Request
from ichat.http.request_ids import REQUEST_ID
from ichat.http.server import Ending
from ichat.protocol.messages import CODE_HEADER
from ichat.protocol.usage import USAGE_HEADER, Usage, difference, sum_of_usage, ticket_in, value_of_usage

log = logging.getLogger(__name__)

REWRITTEN_BYTES_MAX = 512 * 1024 * 1024
"""The largest response body that is rewritten, for which it is gathered first."""
DONE = b"data: [DONE]\n\n"
"""The event at which clients of OpenAI's leave a stream."""

_ASGI = {"version": "3.0", "spec_version": "2.3"}
_DEFAULT_ADAPTER = ProtocolAdapter()
_UNDER_WAY: contextvars.ContextVar["Call | None"] = contextvars.ContextVar("call", default=None)


class Call:
    """An ASGI call. Everything except the constructor runs on the engine's loop."""

    def __init__(
        self,
        request: Request,
        sock: socket.socket,
        peer: str,
        *,
        keep_alive: bool,
        stall_s: float,
        ended: Callable[[], None],
        adapter: ProtocolAdapter = _DEFAULT_ADAPTER,
        rewrite: BodyTransform | None = None,
        rewritten_bytes_max: int = REWRITTEN_BYTES_MAX,
    ) -> None:
        """`rewrite` is the transform that the adapter returned for this request."""
        self._rewritten_bytes_max = rewritten_bytes_max
        self.request = request
        self._adapter = adapter
        self._rewrite = rewrite
        self._writer = SocketWriter(sock, stall_s)
        self._framing = ResponseFraming(request, keep_alive=keep_alive)
        self._peer = peer
        self._ended: Callable[[], None] | None = ended
        self.bytes_in = len(request.body)
        self.head_sent = False
        self.status = 0
        self.failure: errors.ApiError | None = None
        """Why there is no complete response, if the client is still connected."""
        self.hung_up = False
        self._is_over = False
        """Whether further output of the application is dropped."""
        self.parts: dict[str, Callable[[], None]] = {}
        """How each of the engine's own requests for this call is aborted, by their ids, if the engine noted them."""
        self.usage: list[Callable[[], Usage]] | None = [] if USAGE_HEADER in request.by_name else None
        """The tokens of the engine's own requests for this call, known when they have ended; None: not asked for."""
        self._ticket = ticket_in(request.by_name.get(USAGE_HEADER, b""))
        """The ticket under which the gateway gets the tokens used after the response's end; "": it wants no report."""
        self._told: Usage = (0, 0, 0)
        """The tokens that the response itself has reported."""
        self._in_background: set[asyncio.Task[Any]] = set()
        """The tasks that continue after the call has ended."""
        self.task: asyncio.Task[None]
        """Known when the call has started."""
        self.is_tagged = False
        """Whether one of the engine's requests has the tag for the events about its prompt."""
        self._gone = asyncio.Event()
        self._gathered: bytearray | None = None
        """The body so far, if it will be rewritten."""
        self._given: Headers = []
        self._edit: Callable[[bytes], bytes] | None = None
        """Changes each piece of the body, if it is a stream that is changed."""
        self._last_event = b""
        """The event that ends a stream, until it goes together with the end of the body; see `_send`."""
        self._has_told_error = False
        """Whether the engine has sent an error event. Its later events are dropped: they end whole streams, too."""
        self.complete = False
        """Whether the whole response has been written or buffered."""
        self._body_taken = False

    def __repr__(self) -> str:
        return f"<Call {self.request.id.decode()} {self.request.path.decode()} {self.status or 'waiting'}>"

    @property
    def keep_alive(self) -> bool:
        """Whether the connection may be used again; known when the call has ended."""
        return self._framing.keep_alive

    @property
    def ending(self) -> Ending:
        """What happens to the connection, known when the call has ended."""
        if self.head_sent and self._framing.ends_with_connection and not self.complete:
            return Ending.RESET
        return Ending.KEEP if self.keep_alive else Ending.CLOSE

    def start(self, app: Application, calls: "set[Call]", context: contextvars.Context) -> None:
        """Start in this context; the call is a member of `calls` until the application is done with it."""
        self.task = context.run(asyncio.get_running_loop().create_task, self._run(app, calls))
        calls.add(self)

    def refuse(self, failure: errors.ApiError) -> None:
        """End the call before it has started: the application never sees it."""
        self.failure = failure
        self._end()

    def hang_up(self) -> None:
        """Report the client's disconnect to the application; its further output is dropped, as in ASGI 2.3."""
        self.hung_up = self._is_over = True
        self._gone.set()
        self._writer.give_up()
        for abort in self.parts.values():
            abort()

    def add_part(self, part: str, abort: Callable[[], None]) -> None:
        """Note a request of the engine's own for this call; `abort` is called on, or after, the disconnect."""
        self.parts[part] = abort
        if self.hung_up:
            abort()

    def abandon(self, failure: errors.ApiError) -> None:
        """Cancel the call, even while the application waits for something; its further output is dropped."""
        self.failure, self._is_over = failure, True
        self.task.cancel()

    async def _run(self, app: Application, calls: "set[Call]") -> None:
        token = _UNDER_WAY.set(self)
        try:
            await app(self._scope(), self._receive, self._send)
            if not self.complete and not self.hung_up:
                self.failure = self.failure or errors.engine_failed("it gave no complete response")
        except asyncio.CancelledError:  # noqa: ASYNC103
            self.failure = self.failure or errors.engine_failed("it gave the request up")
        except Exception:
            REQUEST_ID.set(self.request.id)
            log.exception("%r failed", self)
            self.failure = errors.engine_failed("an exception, which is in the worker's log")
        finally:
            self._gone.set()
            if self.head_sent and not self.complete:
                self._framing.keep_alive = False
                self._send_failure()
            self.parts.clear()
            _UNDER_WAY.reset(token)
            calls.discard(self)
            self._end()

    def _end(self) -> None:
        """Report the end of the response, once; applications may have things to do afterwards."""
        ended, self._ended = self._ended, None
        if ended is not None:
            ended()
            self._tell_late_usage()

    def note_background(self, task: asyncio.Task[Any]) -> None:
        """Note a task that makes the response, and that goes on after the call's end."""
        if self._ticket:
            self._in_background.add(task)
            task.add_done_callback(self._background_ended)

    def _background_ended(self, task: asyncio.Task[Any]) -> None:
        self._in_background.discard(task)
        self._tell_late_usage()

    def _tell_late_usage(self) -> None:
        """Report to the worker the tokens that the response has not reported, once call and background have ended."""
        if not self._ticket or self._in_background or self._ended is not None:
            return
        ticket, self._ticket = self._ticket, ""
        self._adapter.late_usage(ticket, difference(sum_of_usage(self.usage or ()), self._told))

    def _send_failure(self) -> None:
        """Send an error as the last event of a failed stream, if the socket accepts it at once."""
        framing = self._framing
        if self.failure is None or self.hung_up or self._writer.is_behind:
            return
        if framing.is_stream and framing.is_chunked:
            event = b"" if self._has_told_error else self._last_event + self.failure.event(self.request.path)
            self._writer.write_now(framing.frame(event, more=False) + last_chunk(self._usage_now()))

    def _scope(self) -> Scope:
        request = self.request
        path, _, query = request.target.partition(b"?")
        host, _, port = self._peer.rpartition(":")
        return {
            "type": "http",
            "asgi": _ASGI,
            "http_version": request.version.decode(),
            "method": request.method.decode(),
            "scheme": "http",
            "path": urllib.parse.unquote(path.decode("latin-1")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": request.headers,
            "client": (host, int(port)) if host else None,
            "server": None,
            "state": {},
        }

    async def _receive(self) -> Message:
        """Return the body once, and then the disconnect, to any number of waiters."""
        if not self._body_taken:
            self._body_taken = True
            body = bytes(self.request.body)
            self.request.body = b""
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._is_over or self.complete:
            return
        framing = self._framing
        if message["type"] == "http.response.body":
            more = message.get("more_body", False)
            body = message.get("body", b"")
            if self._gathered is not None:
                body = self._gather(self._gathered, body, more=more)
                if body is None:
                    return
            if self._edit is not None:
                body = self._edit(bytes(body))
            if self._has_told_error:
                body = b""
            elif framing.is_stream and body[:14] in ERROR_BEGINNINGS and not framing.has_length:
                error = error_event(self.request.path, body)
                self._has_told_error = error is not None
                body = error or body
            if more and self.usage and body[-len(DONE) :] == DONE:
                self._last_event = body  # clients disconnect at it, and the usage must precede that
                return
            if self._last_event:
                body, self._last_event = self._last_event + body, b""
            data = framing.frame(body, more=more)
            if framing.is_chunked and not more:
                data += last_chunk(self._usage_now())
            if data:
                await self._write(data)
            if not more and not self.hung_up:
                self.complete = True
                self._gone.set()
                self._end()
        elif message["type"] == "http.response.start":
            self._start(message["status"], message.get("headers", ()))
            if framing.is_chunked:
                await self._write(framing.pop_head())

    def _start(self, status: int, headers: Headers) -> None:
        """Accept the head. A streamed response's is sent at once, any other's together with its body."""
        self.status = status
        given = [(name.lower(), value) for name, value in headers]
        self._rewrite = self._adapter.response(self.request, status, given, self._rewrite)
        if self._rewrite is None:
            self._make_head(status, given)
            if self._framing.is_stream and status == 200:
                self._edit = self._adapter.edit(self.request)
        else:
            self._given = given
            self._gathered = bytearray()

    def _gather(self, gathered: bytearray, body: bytes, *, more: bool) -> bytes | None:
        """Add a piece to a body that will be rewritten; after the last, make the head and return the new body."""
        gathered += body
        if self.failure is None and len(gathered) > self._rewritten_bytes_max:
            self.abandon(errors.engine_failed(f"its answer has more than {self._rewritten_bytes_max} bytes"))
        if self.failure is not None:
            gathered.clear()
            return None
        if more or self._rewrite is None:
            return None
        self._gathered = None
        status, new = self._rewrite(self.status, bytes(gathered))
        headers = [header for header in self._given if header[0] != b"content-length"]
        if status >= 400:
            headers = [header for header in headers if header[0] != b"content-type"]
            headers.append((b"content-type", b"application/json"))
        if status == 400 and SIGN in new:
            headers.append((CODE_HEADER, errors.CONTEXT_LENGTH_EXCEEDED.encode()))
        if self.request.method != b"HEAD":
            headers.append((b"content-length", b"%d" % len(new)))
        self._make_head(status, headers)
        return new

    def _make_head(self, status: int, headers: Headers) -> None:
        self.status = status
        self._framing.begin(status, headers, self._usage_now)

    def _usage_now(self) -> bytes | None:
        """Return the tokens that the call has used, which the response reports; None if it reports none."""
        if not self.usage:
            return None
        self._told = sum_of_usage(self.usage)
        return value_of_usage(self._told)

    async def _write(self, data: bytes) -> None:
        self.head_sent = True
        if not await self._writer.write(data) and not self.hung_up:
            self.hang_up()


def call_under_way() -> Call | None:
    """Return the call that this code runs for, also in tasks that the application has started for it."""
    return _UNDER_WAY.get()
