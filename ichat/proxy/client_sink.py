"""The response as the client gets it: its head, and the end of a response that its endpoint did not finish."""

import functools
from collections.abc import Sequence

import attrs
import trio

from ichat.errors import ApiError
from ichat.http.framing import Chunked, Reframed, UntilClose
from ichat.http.heads import HOP_BY_HOP, Headers, ResponseHead, date_header, hop_by_hop_of, response_head
from ichat.http.server import Taker
from ichat.protocol.messages import CODE_HEADER, ERROR_HEADER, OVERHEAD_HEADER
from ichat.proxy.header_filter import NOT_OF_ANSWERS, NOT_OF_ANSWERS_BEGIN, left_out
from ichat.proxy.leg import Leg
from ichat.proxy.progress import RequestProgress
from ichat.proxy.upstream_errors import HeldError, may_be_held

REPLY_S = 5.0
"""How long the client of a request that was cancelled may need to receive the error."""
SEALED: Sequence[tuple[bytes, bytes]] = (
    (b"content-security-policy", b"sandbox; default-src 'none'"),
    (b"x-content-type-options", b"nosniff"),
)
"""Every answer about models has these: a browser that shows it as a page runs no script, and loads nothing, for it."""
_NO_BODY = frozenset((204, 304))
"""Statuses of responses without a body; so no header has its length or coding (RFC 9110, section 8.6)."""
_not_of_models = left_out(HOP_BY_HOP | NOT_OF_ANSWERS, NOT_OF_ANSWERS_BEGIN)
_not_of_control = left_out(HOP_BY_HOP | {b"x-request-id", CODE_HEADER}, ())


@attrs.define(eq=False)
class ClientSink:
    """Sends a leg's response to the client."""

    progress: RequestProgress
    taker: Taker
    """The client, or an object that keeps the response for it."""
    version: bytes
    """The client's version of HTTP."""
    added: Headers
    """Headers of the response that the gateway makes for this leg."""
    ready_at: float | None = None
    """When the request could have been sent, without the gateway's own work: the response shows that overhead.

    By Trio's clock; None: the response does not show it."""
    is_control: bool = False
    """Whether the answer is the control plane's: its own headers for browsers pass."""

    def begin(self, head: ResponseHead, leg: Leg, /) -> bytes:
        """Return the client's head; nothing if it was sent before, or if an error is kept until it is whole."""
        progress, client = self.progress, self.progress.client
        request, keepalive, relay = progress.request, progress.keepalive, leg.relay
        assert relay is not None
        if keepalive is not None and keepalive.has_begun:
            self._continue_after_comments(head, leg)
            return b""
        is_unchunked = request.version != b"1.1" and isinstance(head.framing, Chunked)
        if is_unchunked or isinstance(head.framing, UntilClose):
            client.begin_unframed()
        added = [(b"x-request-id", request.id), *client.more_headers(), *self.added]
        if self.ready_at is not None:
            overhead_s = (leg.asked_at or 0.0) - self.ready_at
            added.append((OVERHEAD_HEADER, b"%.2f" % (overhead_s * 1000)))
        is_external = leg.endpoint.route is not None
        if not is_external and head.by_name.get(ERROR_HEADER) == b"worker":
            added.append((ERROR_HEADER, b"worker"))
        if is_external and may_be_held(request, head):
            make_head = functools.partial(_client_head, added=added, keeps_chunks=True, keep_alive=client.keep_alive)
            relay.reframe(HeldError(head, leg.endpoint.upstream.name, request, make_head))
            return b""
        return _client_head(
            head, added, keeps_chunks=not is_unchunked, keep_alive=client.keep_alive, is_control=self.is_control
        )

    def _continue_after_comments(self, head: ResponseHead, leg: Leg) -> None:
        """Send the body after the head that was sent with the first comment, as an event if it is not a stream."""
        assert leg.relay is not None
        if not leg.is_stream:
            is_event = b"/messages" in self.progress.path and head.status >= 400
            before = b"event: error\ndata: " if is_event else b"data: "
            leg.relay.reframe(Reframed(head.framing, before))
        elif not isinstance(head.framing, Chunked):
            leg.relay.reframe(Reframed(head.framing))
        if head.status >= 400:
            self.progress.client.close_after_response()

    async def break_off(self, error: ApiError, *, may_report: bool) -> bool:
        """End a response that its endpoint did not finish; see `BodySink`."""
        client = self.progress.client
        if not client.head_sent:
            return False
        client.close_after_response()
        if may_report:
            await client.end_with_event(b"\n\n" + error.event(self.progress.path))  # half an event may have been sent
        return True


def _client_head(
    head: ResponseHead, added: Headers, *, keeps_chunks: bool, keep_alive: bool, is_control: bool = False
) -> bytes:
    """Return the head of an answer with the headers that are `added`, without those that end at the gateway.

    `keeps_chunks` says that the body is sent in chunks if the upstream sends it so.
    """
    is_left_out = _not_of_control if is_control else _not_of_models
    headers: Headers = [header for header in head.headers if not is_left_out(header[0])]
    if b"connection" in head.by_name:
        named = hop_by_hop_of(head.headers)
        headers = [header for header in headers if header[0] not in named]
    is_chunked = isinstance(head.framing, Chunked)
    if head.status in _NO_BODY or (b"transfer-encoding" in head.by_name and not is_chunked):
        headers = [header for header in headers if header[0] != b"content-length"]
    if b"date" not in head.by_name:
        headers.append(date_header())
    headers += added
    if head.status == 401 and not is_control:
        headers.append((b"www-authenticate", b"Bearer"))
    if not keep_alive:
        headers.append((b"connection", b"close"))
    if is_chunked and keeps_chunks:
        headers.append((b"transfer-encoding", b"chunked"))
    return response_head(head.status, headers, head.reason)


async def end_cancelled(progress: RequestProgress, error: ApiError) -> None:
    """End the response of a cancelled request by an error.

    It is a response where nothing was sent, an event where the client has whole events, and otherwise a broken
    connection. The connection ends in any case.
    """
    client, request = progress.client, progress.request
    relay = None if progress.leg is None else progress.leg.relay
    progress.failed(error)
    client.close_after_response()
    event = error.event(progress.path)
    with trio.move_on_after(REPLY_S, shield=True):
        if not client.head_sent:
            await client.send_all(client.error_response(error, request.id, request.method, request.path))
        elif relay is not None and relay.has_head:
            if relay.may_insert:
                await client.end_with_event(b"\n\n" + event)
        elif progress.keepalive is not None and progress.keepalive.has_begun:
            await client.end_with_event(event)
