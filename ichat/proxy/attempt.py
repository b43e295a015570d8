"""An attempt at a request: a single endpoint, and the fate of the request there.

An endpoint that may have worked on a request does not get it again. The request is sent once more only if a kept
connection broke at once, without a byte of response.
"""

import functools
import logging
from collections.abc import Mapping, Sequence

import trio

from ichat import errors
from ichat.errors import ApiError
from ichat.http.client_side import ClientSide
from ichat.http.failures import Declined, ResponseRejected, UpstreamError
from ichat.http.framing import Chunked, Reframed, UntilClose
from ichat.http.heads import Headers, ResponseHead
from ichat.http.json_body import Body
from ichat.http.pool import Connection
from ichat.http.relay import Relay
from ichat.http.request_body import NO_BODY
from ichat.observability.request_record import RequestRecord, UsedTokens
from ichat.protocol.messages import (
    CODE_HEADER,
    DROPPED_HEADER,
    ERROR_HEADER,
    OVERHEAD_HEADER,
    WHY_HEADER,
    WORKER_HEADER,
    sentence,
)
from ichat.protocol.prefixes import PREFIX_HEADER, chain_header
from ichat.protocol.usage import usage_wanted
from ichat.proxy.client_head import client_head
from ichat.proxy.engine_control import without_control
from ichat.proxy.forwarded_request import ForwardedRequest
from ichat.proxy.prefix_truth import correct
from ichat.proxy.shadow import copy_of
from ichat.proxy.token_usage import ReportedUsage, TokenUsage, is_counted, tokens_used
from ichat.proxy.upstream_errors import HeldError, may_be_held
from ichat.proxy.upstream_request import build_upstream_request
from ichat.routing.circuit_breaker import FAILED_STATUSES
from ichat.routing.endpoint import Endpoint

log = logging.getLogger(__name__)

_TOO_LONG = errors.CONTEXT_LENGTH_EXCEEDED.encode()
KEPT_RACE_S = 1.0
"""How soon a kept connection breaks if its upstream was about to close it."""


class Attempt:
    """An endpoint's answer to a request, and the facts learnt about it."""

    __slots__ = (
        "_body", "_context", "_dropped", "_forwarded", "_is_too_long", "_model", "_relay", "_usage", "answered_at",
        "asked_at", "endpoint", "error", "is_stream", "rejected", "status",
    )  # fmt: skip

    def __init__(self, forwarded: ForwardedRequest, endpoint: Endpoint, model: str) -> None:
        """`model` is the model that the endpoint serves; empty for the control plane."""
        self._forwarded = forwarded
        self._context = forwarded.context
        self._model = model
        self._body = forwarded.body
        """As the endpoint gets it; kept until there is a response."""
        self._dropped: Sequence[str] = ()
        """Names of members and headers that the worker did not get."""
        self._relay: Relay | None = None
        self._usage: TokenUsage | ReportedUsage | None = None
        """The reported tokens of the request, once it is sent."""
        self.endpoint = endpoint
        self._is_too_long = False
        """Whether its engine has refused it as too long, and another model may accept it."""
        self.rejected = 0
        """The status of a response that the client does not get, since another model may answer."""
        self.status = 0
        """Of the response, once it has begun."""
        self.error = ""
        """The code of the error, if the response did not go well."""
        self.asked_at: float | None = None
        self.answered_at: float | None = None
        self.is_stream = False
        """Whether the response is a stream of events."""

    def __repr__(self) -> str:
        return f"<Attempt at {self.endpoint.id.decode()} {self.status}>"

    @property
    def _overhead_s(self) -> float | None:
        """How long the gateway itself needed before it asked the upstream: not the time in a queue."""
        forwarded = self._forwarded
        return None if self.asked_at is None else self.asked_at - forwarded.started_at - forwarded.queued_s

    def note_in(self, record: RequestRecord) -> None:
        """Add the facts about this attempt to the record of its request."""
        record.worker = self.endpoint.id.decode()
        record.answered_at = self.answered_at
        record.overhead_s = self._overhead_s
        relay = self._relay
        if relay is not None:
            body = relay.body
            record.first_at, record.bytes_out, record.chunks = body.first_at, body.bytes_out, body.chunks

    @property
    def phase(self) -> str:
        """How far it has got since it was sent; see `Exchange.phase`."""
        if self.answered_at is None:
            return "waiting"
        if not self.is_stream:
            return "plain"
        return "streaming" if self._relay is not None and self._relay.body.chunks else "first_token"

    def tokens_used(self, bytes_in: int) -> UsedTokens | None:
        """Return the tokens that a request of this many bytes used, if they are known or can be estimated."""
        usage, relay, has_left = self._usage, self._relay, self._forwarded.client.has_left
        if usage is None or relay is None:
            return None
        if self._forwarded.ticket:
            return usage.said()
        is_good = self.answered_at is not None and self.status < 400
        bytes_out, chunks = relay.body.bytes_out, relay.body.chunks
        return tokens_used(
            usage, bytes_in, bytes_out, chunks, has_left=has_left, is_good=is_good, is_stream=self.is_stream
        )

    async def run(self) -> None:
        """Have the request answered by the endpoint. Raises ApiError if nothing has been sent.

        A kept connection may have been closed by the upstream just now, so that the request never got there: then it
        is sent once more, on a fresh connection. If that breaks later, or cannot be made, the request may have been
        worked on, and may be the reason: it goes nowhere else.
        """
        endpoint, forwarded = self.endpoint, self._forwarded
        endpoint.check_path(forwarded.request.path)
        if endpoint.route is not None:
            self._body = await endpoint.route.rewrite(self._body, forwarded.request.path)
        elif forwarded.is_suspect:
            self._body, self._dropped = await without_control(self._body, forwarded.request.by_name)
            self._context.drop_notices.log_dropped(forwarded.grant.key_name, self._dropped)
        pool = self._context.pool
        connection = pool.acquire(endpoint.upstream)
        if connection is not None:
            try:
                await self._send_on(connection)
            except UpstreamError as lost:
                soon = self.asked_at is not None and trio.current_time() - self.asked_at < KEPT_RACE_S
                if lost.answered or lost.timed_out or not soon:
                    await self._fail_response(lost)
                    return
                connection = await self._reconnect(lost)
            else:
                return
        else:
            connection = await pool.connect(endpoint.upstream)
        try:
            await self._send_on(connection)
        except UpstreamError as lost:
            await self._fail_response(lost)

    async def _reconnect(self, lost: UpstreamError) -> Connection:
        """Connect again after a kept connection was lost; if that fails, the request may have been the reason."""
        try:
            return await self._context.pool.connect(self.endpoint.upstream)
        except ApiError as error:
            self.record_failure()
            raise errors.upstream_failed(self.endpoint.upstream.name, str(lost)) from error

    def release_body(self) -> None:
        """Free the body after a failure: tracebacks may keep the attempt until the garbage collector runs."""
        self._body = NO_BODY

    def record_failure(self, *, answers: bool = False) -> None:
        """Record that the endpoint has failed with this request; `answers` says that there was a response."""
        circuit = self.endpoint.circuit
        if circuit.record_failure(trio.current_time(), answers=answers):
            name = self.endpoint.upstream.name
            log.warning("%s has failed %d times in a row: its circuit opens", name, circuit.failures)

    async def _send_on(self, connection: Connection) -> None:
        """Send the request on a connection, relay the response, and keep or close the connection.

        Raises UpstreamError.
        """
        context, forwarded = self._context, self._forwarded
        reader = None
        if not forwarded.internal and is_counted(forwarded.path):
            if self.endpoint.reports_usage:
                self._usage = ReportedUsage()
            else:
                self._usage = reader = TokenUsage(forwarded.path)
        first_byte_s, stall_s = self._timeouts()
        to = ClientSide(forwarded.taker or forwarded.client, forwarded.request.version, forwarded.keepalive)
        relay = self._relay = forwarded.relay = Relay(
            connection,
            to,
            method=forwarded.request.method,
            on_head=self._on_response_head,
            first_byte_s=first_byte_s,
            stall_s=stall_s,
            usage=reader,
            gaps=context.gaps(self._model) if self._model else None,
        )
        if forwarded.keepalive is not None:
            forwarded.keepalive.response = relay
        pieces = self._upstream_request()
        self.asked_at = trio.current_time()
        clean = False
        try:
            await relay.run(pieces)
            if self.status not in FAILED_STATUSES:
                self.endpoint.circuit.record_success()
            if self._usage is not None and self.status < 400:
                self._learn_from(self._usage)
            clean = relay.reusable
        finally:
            if clean:
                context.pool.release(connection)
            else:
                context.pool.discard(connection)

    def _learn_from(self, usage: TokenUsage | ReportedUsage) -> None:
        """Learn from the tokens that a response has reported, if it has reported any."""
        context, forwarded = self._context, self._forwarded
        if self.is_stream and isinstance(usage, ReportedUsage) and not usage.has_arrived:
            self._note_lost_usage()
        if forwarded.prefix is not None and (told := usage.prompt()) is not None:
            correct(context.balancer.prefixes, forwarded.prefix, self.endpoint, *told)
        if forwarded.prompt_bytes and (said := usage.said()) is not None:
            context.prompt_lengths.learn(self._model, forwarded.prompt_bytes, said.input)

    def _note_lost_usage(self) -> None:
        """Log, once for each start of a worker, that a whole stream arrived without the tokens that it used."""
        endpoint = self.endpoint
        if not endpoint.is_usage_lost and self._forwarded.path.endswith(b"/completions"):
            endpoint.is_usage_lost = True
            log.warning(
                "%s reports the tokens of each request, and a whole stream came without them: a proxy on the way may"
                " drop trailers. The tokens of its streams are only estimated",
                endpoint.upstream.name,
            )

    def _upstream_request(self) -> list[Body]:
        forwarded, endpoint = self._forwarded, self.endpoint
        added = forwarded.internal
        if forwarded.trace is not None:
            added = [*added, *forwarded.trace.headers]
        if forwarded.prefix is not None and endpoint.reports_prefixes:
            chain = chain_header(forwarded.prefix.length, forwarded.prefix.digests)
            added = [*added, (PREFIX_HEADER, chain)]
        if isinstance(self._usage, ReportedUsage):
            added = [*added, usage_wanted(forwarded.ticket)]
        return build_upstream_request(
            forwarded.request,
            self._body.data,
            endpoint,
            grant=forwarded.grant,
            proof=self._context.auth.proof,
            added=added,
            reads_response=forwarded.keepalive is not None or endpoint.route is not None,
        )

    def _timeouts(self) -> tuple[float, float]:
        timeouts = self._context.timeouts
        return self.endpoint.timeouts or (timeouts.first_byte_s, timeouts.stream_stall_s)

    async def _fail_response(self, lost: UpstreamError) -> None:
        """End a response that its upstream did not finish, so that no client can mistake it for a whole response."""
        forwarded, name = self._forwarded, self.endpoint.upstream.name
        if self._is_too_long:
            self.endpoint.circuit.record_success()
            raise errors.context_length_exceeded(self._model)
        if lost.declined:
            self.endpoint.fail(trio.current_time(), str(lost))
            raise errors.declined(self._model, str(lost))
        has_failed = self.answered_at is not None and self.status in FAILED_STATUSES  # and that was recorded
        if lost.retry is not False and not has_failed:
            self.record_failure()
        if not self.rejected:
            log.warning("%s failed with request %s: %s", name, forwarded.request.id.decode(), lost)
        error = errors.upstream_failed(name, str(lost), retry=lost.retry)
        if lost.timed_out:
            first_byte_s, stall_s = self._timeouts()
            error = errors.upstream_timeout(name, stall_s if lost.answered else first_byte_s)
        client = forwarded.client
        if self.answered_at is None or not client.head_sent:
            raise error
        self.error = error.code
        client.close_after_response()
        if lost.can_report:
            await client.end_with_event(b"\n\n" + error.event(forwarded.path))  # half an event may have been sent

    def _on_response_head(self, head: ResponseHead) -> bytes:
        """Called with the upstream's head: record it, and return the client's.

        Raises ResponseRejected or Declined for a response that the client must not get.
        """
        forwarded, client, names = self._forwarded, self._forwarded.client, head.by_name
        self._check_response(head.status, names)
        self._record_response(head)
        if isinstance(self._usage, ReportedUsage):
            self._usage.begin(head)
        if forwarded.keepalive is not None and forwarded.keepalive.has_begun:
            self._continue_after_comments(head)
            return b""
        is_unchunked = forwarded.request.version != b"1.1" and isinstance(head.framing, Chunked)
        if is_unchunked or isinstance(head.framing, UntilClose):
            client.begin_unframed()
        added = self._headers_of_gateway()
        if self.endpoint.route is None and names.get(ERROR_HEADER) == b"worker":
            added.append((ERROR_HEADER, b"worker"))
        if self.endpoint.route is not None and self._relay and may_be_held(forwarded.request, head):
            make_head = functools.partial(client_head, added=added, keeps_chunks=True, keep_alive=client.keep_alive)
            self._relay.reframe(HeldError(head, self.endpoint.upstream.name, forwarded.request, make_head))
            return b""
        return client_head(
            head, added, keeps_chunks=not is_unchunked, keep_alive=client.keep_alive,
            is_control=bool(forwarded.internal),
        )  # fmt: skip

    def _check_response(self, status: int, names: Mapping[bytes, bytes]) -> None:
        """Raise ResponseRejected or Declined for a response that the client must not get."""
        route = self.endpoint.route
        if status == 503 and route is None and not self._forwarded.internal:
            declined = errors.DECLINED.get(names.get(CODE_HEADER, b""))
            if declined is not None:
                why = sentence(names.get(WHY_HEADER, b"").decode("latin-1"))[: errors.WHY_CHARACTERS_MAX]
                raise Declined(f"{declined} ({why})" if why else declined)
        if status == 401 and self.endpoint.has_key:
            raise ResponseRejected("it does not accept the key that the gateway has for it")
        walk = self._forwarded.walk
        if walk is not None and status == 400 and walk.longer and names.get(CODE_HEADER) == _TOO_LONG:
            self._is_too_long = True
            raise Declined("refuses it as too long")
        if walk is not None and route is not None and walk.refuses(status):
            self.rejected = status
            if status in FAILED_STATUSES and walk.failed is not self.endpoint:  # a request fails a route only once
                self.record_failure(answers=True)
            raise ResponseRejected(f"it answered {status}")

    def _record_response(self, head: ResponseHead) -> None:
        """Record that a response begins. From here on the request is sent nowhere else, and its body is freed."""
        status = head.status
        self.status, self.error = status, ""
        if status in FAILED_STATUSES:
            self.record_failure(answers=True)
        elif self.endpoint.circuit.record_response():
            self._context.balancer.dispatch_waiting()
        self.answered_at = self.endpoint.seen_at = self._context.pool.hub.now
        if self._forwarded.is_copied and status < 400:
            self._send_copy()
        self._forwarded.request.release_body()
        self._forwarded.body = NO_BODY
        if self._forwarded.trace is not None:
            self._forwarded.trace.headers = ()
        self._body = NO_BODY
        if self._forwarded.internal:  # the control plane
            self.error = head.by_name.get(CODE_HEADER, b"").decode()
        self.is_stream = head.is_events

    def _send_copy(self) -> None:
        """Have the shadow of the name that the request asked for get a copy, now that the original is answered."""
        forwarded, context = self._forwarded, self._context
        if forwarded.walk is not None:
            context.shadows.start(copy_of(
                forwarded.request, forwarded.body, forwarded.walk.alias, grant=forwarded.grant,
                is_suspect=forwarded.is_suspect, proof=context.auth.proof, timeouts=context.timeouts,
            ))  # fmt: skip

    def _headers_of_gateway(self) -> Headers:
        """Return the headers of the response that this gateway makes."""
        settings, endpoint = self._context.settings, self.endpoint
        headers = [(b"x-request-id", self._forwarded.request.id)]
        headers += self._forwarded.client.more_headers()
        if self._dropped:
            headers.append((DROPPED_HEADER, ", ".join(self._dropped).encode()))
        if endpoint.id and settings.worker_header:
            headers.append((WORKER_HEADER, endpoint.id))
        prefix = self._forwarded.prefix
        if prefix is not None and settings.prefix_header:
            headers.append((PREFIX_HEADER, b"%d/%d" % (prefix.matched, prefix.length)))
        if self._forwarded.walk is not None:
            headers += self._forwarded.walk.headers(self._model)
        if endpoint.id and settings.overhead_header:
            headers.append((OVERHEAD_HEADER, b"%.2f" % ((self._overhead_s or 0) * 1000)))
        return headers

    def _continue_after_comments(self, head: ResponseHead) -> None:
        """Send the body after the head that was sent with the first comment, as an event if it is not a stream."""
        assert self._relay is not None
        if not self.is_stream:
            is_event = b"/messages" in self._forwarded.path and head.status >= 400
            before = b"event: error\ndata: " if is_event else b"data: "
            self._relay.reframe(Reframed(head.framing, before))
        elif not isinstance(head.framing, Chunked):
            self._relay.reframe(Reframed(head.framing))
        if head.status >= 400:
            self.error = f"upstream_{head.status}"
            self._forwarded.client.close_after_response()
