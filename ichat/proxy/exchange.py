"""One request on its way through the gateway: a lease on an endpoint, a connection, the response relayed.

Nothing is tried twice that an upstream may have worked on. A request goes out again only to another endpoint where no
connection could be made or the worker declined it, since its engine is dead, or on a fresh connection where a kept one
died at once, without a byte of response.
"""

import logging
import re
from collections.abc import Iterable, Sequence

import attrs
import trio

from ichat import errors
from ichat.errors import ApiError
from ichat.http.framing import Chunked, UntilClose
from ichat.http.heads import Headers, ResponseHead, date_header, end_to_end, form_type, request_head, response_head
from ichat.http.json_body import Body, model_of, read_members
from ichat.http.keepalive import KeepAlive
from ichat.http.multipart import fields_of, model_of_form
from ichat.http.pool import Connection
from ichat.http.relay import Declined, Reframed, Relay, ResponseRejected, UpstreamError
from ichat.http.request import Request
from ichat.http.server import Client
from ichat.http.sse import is_events
from ichat.observability.tracing import NAMES as TRACE_HEADERS
from ichat.observability.tracing import Trace
from ichat.protocol import (
    CODE_HEADER,
    DROPPED_HEADER,
    HOP_HEADER,
    INTERNAL,
    OVERHEAD_HEADER,
    PROOF_HEADER,
    WHY_HEADER,
    WORKER_HEADER,
)
from ichat.proxy.context import GatewayContext
from ichat.proxy.engine_control import HEADER_NAMES, HEADER_PREFIXES, is_suspect, without_control
from ichat.proxy.refusals import no_lease, over_limit, response_missing
from ichat.proxy.token_usage import TokenUsage, estimate
from ichat.routing.availability import Full, Refusal
from ichat.routing.circuit_breaker import FAILED_STATUSES
from ichat.routing.endpoint import Endpoint
from ichat.routing.queue import Waiter
from ichat.routing.request import Lease, RoutingRequest
from ichat.routing.responses import ResponseMissing, continued_by, holder_of
from ichat.security.auth import CREDENTIALS, FORWARDED, Caller
from ichat.security.rate_limits import QuotaRefusal, QuotaReservation

log = logging.getLogger(__name__)

_OURS_BACK = frozenset((
    b"x-request-id", WORKER_HEADER, OVERHEAD_HEADER, CODE_HEADER, WHY_HEADER,
    b"access-control-allow-origin", b"access-control-allow-credentials", b"access-control-allow-methods",
    b"access-control-allow-headers", b"access-control-expose-headers", b"access-control-max-age",
    b"access-control-allow-private-network",
))  # fmt: skip
"""Headers of a response that only the gateway nearest to the client makes."""
HOPS_MAX = 4
_READ_MEMBERS = frozenset(("model", "stream", "previous_response_id"))
"""Members of a request's body whose values the gateway reads."""
RESPONSE_PATH = b"/v1/responses/{id}"
"""How requests about a response that was made before are counted, whatever its id."""
_NOT_WORKED_ON = frozenset(("upstream_unreachable", "model_not_ready"))
"""Failures of an endpoint after which another one may be asked."""
_COMPRESSION = frozenset((b"accept-encoding",))
"""Left out where a response is looked into."""
JOINED_BYTES_MAX = 65536
"""A body up to this size is sent in one piece with its head; joining larger ones would cost more than it saves."""
KEPT_RACE_S = 1.0
"""How soon a kept connection breaks that its upstream was about to close."""
_OURS = frozenset((b"host", b"content-length", b"expect", b"x-request-id", b"origin")) | FORWARDED | TRACE_HEADERS
"""Headers of a request that are made anew for the upstream, or are none of its business."""
_LEFT_OUT = {
    (has_keys, is_guarded): _OURS.union(CREDENTIALS if has_keys else (), HEADER_NAMES if is_guarded else ())
    for has_keys in (False, True)
    for is_guarded in (False, True)
}
_GUARDED = (INTERNAL, *HEADER_PREFIXES)

_BESIDE_V1 = re.compile(rb"/v1/(?:tokenize|detokenize|pooling|classify)(?=[?]|$)")
_BELOW_V1 = re.compile(rb"/(?:chat/completions|completions|embeddings|responses|messages|audio/[a-z]+)(?=[?]|$)")
_TWO_WAYS = re.compile(rb"[%#]|//|/\.{1,2}(?:/|$)")
"""What an upstream may read in another way than the gateway: as another route, or as a way out of its base path."""


def engine_target(target: bytes) -> bytes:
    """Give a request target as engines have it: some of their routes stand only below `/v1`, some only beside it."""
    if _BESIDE_V1.match(target):
        return target[3:]
    return b"/v1" + target if _BELOW_V1.match(target) else target


class Exchange:
    """One request, and what becomes known of it on its way. Times are Trio's clock."""

    __slots__ = (
        "_body", "_client", "_is_suspect", "_keepalive", "_means", "_only", "_relay", "_request", "_share", "_usage",
        "answered_at", "asked_at", "bytes_in", "caller", "dropped", "endpoint", "error", "internal", "is_stream",
        "is_waiting", "model", "path", "queued_s", "started_at", "status", "tokens", "trace",
    )  # fmt: skip

    def __init__(self, means: GatewayContext, request: Request, client: Client, caller: Caller) -> None:
        self._means = means
        self._request = request
        self._body: Body = b""
        """As the endpoint gets it; kept until there is a response."""
        self._is_suspect = False
        """Whether it may have what no worker gets from this caller."""
        self.dropped: Sequence[str] = ()
        """What the worker did not get."""
        self._client = client
        self._keepalive: KeepAlive | None = None
        self._only: Endpoint | None = None
        """The one endpoint that can answer, where there is just one: it keeps the response that is spoken of."""
        self._relay: Relay | None = None
        self._share: QuotaReservation | None = None
        self._usage: TokenUsage | None = None
        self.caller = caller
        self.internal: Headers = []
        """Headers for the upstream that no client can send."""
        self.trace: Trace | None = None
        self.tokens: int | None = None
        """How many it used, where somebody has to know."""
        self.path = request.path
        self.model = ""
        """What it asks for, once that has been read."""
        self.endpoint: Endpoint | None = None
        """Who answers, or was last asked to."""
        self.status = 500
        """Of the response; 499 where the client left, before or in the middle of it."""
        self.error = "internal_error"
        """The code of the error, where it did not go well; of a bug, until there is a response."""
        self.started_at = trio.current_time()
        self.queued_s = 0.0
        self.asked_at: float | None = None
        self.answered_at: float | None = None
        self.bytes_in = len(request.body)
        self.is_waiting = False
        """Whether it waits in a queue."""
        self.is_stream = False
        """Whether the response is a stream of events, known when there is one."""

    def __repr__(self) -> str:
        return f"<Exchange {self._request.id.decode()} {self.model} {self.status}>"

    @property
    def bytes_out(self) -> int:
        """Bytes of the response that the client was given, its head included."""
        return self._relay.bytes_out if self._relay is not None else 0

    @property
    def first_at(self) -> float | None:
        """When the first piece of the response's body came."""
        return self._relay.first_at if self._relay is not None else None

    @property
    def chunks(self) -> int:
        """Pieces in which the response's body came, as they were read."""
        return self._relay.chunks if self._relay is not None else 0

    @property
    def phase(self) -> str:
        """How far it has come: `begun`, `queued`, `connecting`, `waiting`, `first_token`, `streaming` or `plain`.

        `waiting` has been sent and has no answer yet, `first_token` has the head of a stream and nothing of its body,
        `plain` has the head of a response that is no stream.
        """
        if self.answered_at is not None:
            if not self.is_stream:
                return "plain"
            return "streaming" if self.chunks else "first_token"
        if self.asked_at is not None:
            return "waiting"
        if self.is_waiting:
            return "queued"
        return "begun" if self.endpoint is None else "connecting"

    @property
    def overhead_s(self) -> float | None:
        """How long the gateway itself took before it asked the upstream: not the time in a queue."""
        return None if self.asked_at is None else self.asked_at - self.started_at - self.queued_s

    async def forward(self) -> None:
        """Have the request answered by whoever serves its model. Raises ApiError where nothing has been sent."""
        request = self._request
        if _TWO_WAYS.search(request.path):
            raise errors.bad_request("The path must be plain: no `%`, `#` or `//`, no segments `.` or `..`.")
        if self._hops() >= HOPS_MAX:
            raise errors.loop_detected()
        means, caller = self._means, self.caller
        content_type = form_type(request.headers)
        if content_type:
            fields = await fields_of(request.body, content_type)
            self.model = model_of_form(request.body, fields)
            names: Iterable[str] = [field.name.decode("latin-1") for field in fields]
        else:
            names = members = await read_members(request.body, _READ_MEMBERS)
            self.model = model_of(members)
            if means.timeouts.sse_keepalive_s and members.get("stream") is True and request.version == b"1.1":
                interval_s = means.timeouts.sse_keepalive_s
                self._keepalive = KeepAlive(means.pool.hub, self._client, request.id, interval_s)
            previous = members.get("previous_response_id")
            if previous is not None and request.path.endswith(b"/responses"):
                holder = continued_by(means.registry, str(previous), self.model)
                if isinstance(holder, ResponseMissing):
                    raise response_missing(holder, "previous_response_id")
                self._only = holder
        self._is_suspect = not means.auth.lets_steer(caller) and is_suspect(names, request.headers)
        means.auth.check_model(caller, self.model)
        await self._within_limits()

    async def forward_to_holder(self) -> None:
        """Have the request answered by the worker that keeps the response it names. Raises ApiError.

        The path is `/v1/responses/{id}`, and maybe more.
        """
        response_id = self._request.path.split(b"/")[3].decode("latin-1")
        self.path = RESPONSE_PATH
        worker = holder_of(self._means.registry, response_id)
        if isinstance(worker, ResponseMissing):
            raise response_missing(worker)
        key = self.caller.key
        names = [name for name in worker.names if key is None or key.models is None or name in key.models]
        if not names or worker.endpoint is None:
            raise errors.response_not_found(response_id, "it is of a model that this key is not for")
        self.model, self._only = names[0], worker.endpoint
        await self._within_limits()

    async def _within_limits(self) -> None:
        """Have the request answered within the limits of its key."""
        means, caller, request = self._means, self.caller, self._request
        share = means.quotas.acquire(caller.key_name, trio.current_time())
        if isinstance(share, QuotaRefusal):
            raise over_limit(share)
        self._share = share
        if self._share.counts_tokens:
            self._usage = TokenUsage(has_total=not request.path.endswith(b"/messages"))
        try:
            await (self._forward_with_failover() if self._keepalive is None else self._kept_alive(self._keepalive))
        finally:
            self._count_tokens()
            self._share.release(self.tokens or 0, trio.current_time())

    async def _kept_alive(self, keepalive: KeepAlive) -> None:
        """Send comments until the stream begins. What fails after the first of them ends the stream, as an event."""
        keepalive.start()
        try:
            await self._forward_with_failover()
        except ApiError as error:
            if not keepalive.has_begun:
                raise
            self.error = error.code
            self._client.close_after_response()
            event = error.event(self.path)
            await self._client.send_all(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
        finally:
            keepalive.stop()
            if keepalive.has_begun:
                self.status = 200

    def _count_tokens(self) -> None:
        """Find out what was used, where that counts: as the response says, else by a guess for what was streamed."""
        usage = self._usage
        if usage is None or self.asked_at is None:
            return
        if self._client.has_left:  # it may have been said already how long the request was, and nothing more
            self.tokens = max(usage.said() or 0, estimate(self.bytes_in, usage.events))
        elif self.answered_at is not None and self.status < 400:
            self.tokens = usage.said()
            if self.tokens is None and self.is_stream:
                self.tokens = estimate(self.bytes_in, usage.events)

    async def _forward_with_failover(self) -> None:
        routing = RoutingRequest(self.model, self._session(), self.caller.fairness_key, only=self._only)
        while True:
            lease = await self._lease(routing)
            try:
                await self.forward_to(lease.endpoint)
            except ApiError as error:
                if error.code not in _NOT_WORKED_ON:
                    raise
                log.warning("%s", error.message)
                if error.code == "upstream_unreachable":
                    lease.endpoint.fail(trio.current_time())
                    self._record_failure(lease.endpoint)
                routing = attrs.evolve(routing, excluded=(*routing.excluded, lease.endpoint))
                if routing.only is not None or not self._means.balancer.has_alternative(routing):
                    raise
            else:
                return
            finally:
                lease.release()

    def _hops(self) -> int:
        for name, value in self._request.headers:
            if name == HOP_HEADER:
                return int(value) if value.isdigit() and len(value) < 3 else 0
        return 0

    def _session(self) -> bytes:
        name = self._means.session_header
        for key, value in self._request.headers:
            if key == name:
                return value
        return b""

    def _refused(self, refusal: Refusal) -> ApiError:
        registry, key = self._means.registry, self.caller.key
        known = registry.models if key is None or key.models is None else (key.models - {self.model}).__iter__
        return no_lease(refusal, self.model, known, self._means.timeouts.queue_s)

    async def _lease(self, routing: RoutingRequest) -> Lease:
        """Lease an endpoint, waiting for one if need be. Raises ApiError: 404, 429, 503."""
        balancer = self._means.balancer
        lease = balancer.lease(routing)
        if isinstance(lease, Lease):
            return lease
        if not isinstance(lease, Full):
            raise self._refused(lease)
        since = trio.current_time()
        granted = trio.Event()
        waiter = balancer.wait(routing, granted.set)
        if not isinstance(waiter, Waiter):
            raise self._refused(waiter)
        self.is_waiting = True
        try:
            with trio.move_on_after(self._means.timeouts.queue_s):
                await granted.wait()
        except trio.Cancelled:
            if waiter.lease is not None:
                waiter.lease.release()
            raise
        else:
            self.is_waiting = False
        finally:
            balancer.leave(waiter)
            self.queued_s += trio.current_time() - since
        if waiter.lease is None:
            raise self._refused(balancer.why_no_lease(waiter))
        return waiter.lease

    async def forward_to(self, endpoint: Endpoint) -> None:
        """Have the request answered by this endpoint. Raises ApiError where nothing has been sent.

        A connection that was used before may have been closed by the upstream just now, so that the request never got
        there: then it is sent once more, on a fresh one. If it breaks later, or none can be made, the request may have
        been worked on, and may be the reason: it goes nowhere else.
        """
        self.endpoint, self.asked_at = endpoint, None
        self._body = self._request.body
        self.dropped = ()
        if endpoint.route is not None:
            self._body = await endpoint.route.rewrite(self._request)
        elif self._is_suspect:
            self._body, self.dropped = await without_control(self._body, self._request.headers)
            self._means.told.tell(self.caller.key_name, self.dropped)
        pool = self._means.pool
        connection = pool.acquire(endpoint.upstream)
        if connection is not None:
            try:
                await self._attempt(endpoint, connection)
            except UpstreamError as lost:
                soon = self.asked_at is not None and trio.current_time() - self.asked_at < KEPT_RACE_S
                if lost.answered or lost.timed_out or not soon:
                    await self._fail_response(endpoint, lost)
                    return
                connection = await self._reconnect(endpoint, lost)
            else:
                return
        else:
            connection = await pool.connect(endpoint.upstream)
        try:
            await self._attempt(endpoint, connection)
        except UpstreamError as lost:
            await self._fail_response(endpoint, lost)

    async def _reconnect(self, endpoint: Endpoint, lost: UpstreamError) -> Connection:
        """Connect where a kept connection was lost; where that fails, the request may have been what broke it."""
        try:
            return await self._means.pool.connect(endpoint.upstream)
        except ApiError as error:
            self._record_failure(endpoint)
            raise errors.upstream_failed(endpoint.upstream.name, str(lost)) from error

    def _record_failure(self, endpoint: Endpoint, *, answers: bool = False) -> None:
        """Note that the endpoint has failed with this request; whether it gave an answer at all."""
        if endpoint.circuit.record_failure(trio.current_time(), answers=answers):
            log.warning(
                "%s has failed %d times in a row: its circuit opens", endpoint.upstream.name, endpoint.circuit.failures
            )

    async def _attempt(self, endpoint: Endpoint, connection: Connection) -> None:
        """One request and its response on one connection, which is then kept or closed. Raises UpstreamLost."""
        means = self._means
        first_byte_s, stall_s = self._timeouts_of(endpoint)
        relay = self._relay = Relay(
            means.pool.hub,
            self._client,
            connection,
            method=self._request.method,
            version=self._request.version,
            on_head=self._on_response_head,
            first_byte_s=first_byte_s,
            stall_s=stall_s,
            usage=self._usage,
            gaps=means.gaps(self.model) if self.model else None,
            keepalive=self._keepalive,
        )
        if self._keepalive is not None:
            self._keepalive.response = relay
        pieces = self._build_upstream_request(endpoint)
        self.asked_at = trio.current_time()
        clean = False
        try:
            await relay.run(pieces)
            if self.status not in FAILED_STATUSES:
                endpoint.circuit.record_success()
            clean = relay.reusable
        finally:
            if clean:
                means.pool.release(connection)
            else:
                means.pool.discard(connection)

    def _timeouts_of(self, endpoint: Endpoint) -> tuple[float, float]:
        timeouts = self._means.timeouts
        return endpoint.timeouts or (timeouts.first_byte_s, timeouts.stream_stall_s)

    async def _fail_response(self, endpoint: Endpoint, lost: UpstreamError) -> None:
        """End a response that its upstream did not finish, so that no client can take it for a whole one."""
        name = endpoint.upstream.name
        if lost.declined:
            endpoint.fail(trio.current_time(), str(lost))
            raise errors.model_not_ready(self.model, f"{name} {lost}", errors.DECLINED_RETRY_S)
        has_failed = self.answered_at is not None and self.status in FAILED_STATUSES  # and that was noted
        if lost.retry is not False and not has_failed:
            self._record_failure(endpoint)
        log.warning("%s failed with request %s: %s", name, self._request.id.decode(), lost)
        error = errors.upstream_failed(name, str(lost), retry=lost.retry)
        if lost.timed_out:
            first_byte_s, stall_s = self._timeouts_of(endpoint)
            error = errors.upstream_timeout(name, stall_s if lost.answered else first_byte_s)
        if self.answered_at is None or not self._client.head_sent:
            raise error
        self.error = error.code
        self._client.close_after_response()
        if lost.can_report:
            event = b"\n\n" + error.event(self.path)  # the upstream may have left half an event
            await self._client.send_all(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))

    def _build_upstream_request(self, endpoint: Endpoint) -> list[Body]:
        """Write the request as the upstream gets it: the same end-to-end headers, and the body."""
        request, body = self._request, self._body
        target = engine_target(request.target)
        auth = self._means.auth
        is_guarded = endpoint.route is None and not auth.lets_steer(self.caller)
        left_out = _LEFT_OUT[auth.has_keys or self.caller.kind in ("data", "admin", "worker"), is_guarded]
        if self._keepalive is not None or (self._usage is not None and endpoint.route is not None):
            left_out |= _COMPRESSION
        headers = [
            header
            for header in end_to_end(request.headers)
            if header[0] not in left_out and not header[0].startswith(_GUARDED if is_guarded else INTERNAL)
        ]
        headers += self.internal
        if endpoint.route is None and endpoint.upstream.port and auth.proof:
            headers.append((PROOF_HEADER, auth.proof))
        if endpoint.upstream.port:
            headers.append((HOP_HEADER, b"%d" % (self._hops() + 1)))
        if endpoint.route is not None:
            headers = endpoint.route.headers_for(headers)
            target = endpoint.route.target_for(target)
        headers.append((b"host", endpoint.upstream.authority))
        headers.append((b"x-request-id", request.id))
        if self.trace is not None:
            headers += self.trace.headers
        if body or request.method in (b"POST", b"PUT", b"PATCH"):
            headers.append((b"content-length", b"%d" % len(body)))
        head = request_head(request.method, target, headers)
        return [head + body] if len(body) <= JOINED_BYTES_MAX else [head, body]

    def _on_response_head(self, head: ResponseHead) -> bytes:
        """Write the head of the response as the client gets it. Raises Unwanted, Declined for one it must not get."""
        means, client, endpoint = self._means, self._client, self.endpoint
        assert endpoint is not None
        if head.status == 503 and endpoint.route is None and not self.internal:
            said = dict(head.headers)
            declined = errors.DECLINED.get(said.get(CODE_HEADER, b""))
            if declined is not None:
                why = said.get(WHY_HEADER, b"").decode("latin-1")
                raise Declined(f"{declined} ({why})" if why else declined)
        if head.status == 401 and endpoint.route is not None and endpoint.route.has_key:
            raise ResponseRejected("it does not accept the key that the gateway has for it")
        self.status, self.error = head.status, ""
        if head.status in FAILED_STATUSES:
            self._record_failure(endpoint, answers=True)
        elif endpoint.circuit.record_response():
            means.balancer.dispatch_waiting()
        self.answered_at = means.pool.hub.now
        self._request.release_body()
        self._body = b""
        if self.internal:  # the control plane
            self.error = dict(head.headers).get(CODE_HEADER, b"").decode()
        names = dict(head.headers)
        self.is_stream = is_events(names.get(b"content-type", b""))
        if self._keepalive is not None and self._keepalive.has_begun:
            self._go_on_behind_comments(head)
            return b""
        is_unchunked = self._request.version != b"1.1" and isinstance(head.framing, Chunked)
        if is_unchunked or isinstance(head.framing, UntilClose):
            client.begin_unframed()
        headers: Headers = [header for header in end_to_end(head.headers) if header[0] not in _OURS_BACK]
        if b"date" not in names:
            headers.append(date_header())
        headers.append((b"x-request-id", self._request.id))
        headers += client.more_headers()
        if self.dropped:
            headers.append((DROPPED_HEADER, ", ".join(self.dropped).encode()))
        if endpoint.id:
            if means.settings.worker_header:
                headers.append((WORKER_HEADER, endpoint.id))
            if means.settings.overhead_header:
                headers.append((OVERHEAD_HEADER, b"%.2f" % ((self.overhead_s or 0) * 1000)))
        if not client.keep_alive:
            headers.append((b"connection", b"close"))
        if b"transfer-encoding" in names and not is_unchunked:
            headers.append((b"transfer-encoding", b"chunked"))
        return response_head(head.status, headers, head.reason)

    def _go_on_behind_comments(self, head: ResponseHead) -> None:
        """Let the body follow the head that the client was sent with the first comment, as an event where need be."""
        assert self._relay is not None
        if not self.is_stream:
            before = b"event: error\ndata: " if b"/messages" in self.path and head.status >= 400 else b"data: "
            self._relay.reframe(Reframed(head.framing, before))
        elif not isinstance(head.framing, Chunked):
            self._relay.reframe(Reframed(head.framing))
        if head.status >= 400:
            self.error = f"upstream_{head.status}"
            self._client.close_after_response()
