"""How the gateway answers requests: a request's plane, its permitted senders, and the notes made at its end."""

from collections.abc import Awaitable, Callable, Mapping, Sequence

import trio

from ichat import errors
from ichat.config.schema import Config
from ichat.errors import ApiError
from ichat.fleet.heartbeats import HEARTBEAT_BYTES_MAX, HeartbeatReceiver
from ichat.fleet.order_store import OrderStore
from ichat.fleet.prefix_reports import REPORT_BYTES_MAX, PrefixReportReceiver
from ichat.http.heads import Headers, RequestHead
from ichat.http.request import Request
from ichat.http.server import NO_CONTENT, Client
from ichat.observability.access_log import AccessLog, shown_path
from ichat.observability.metrics import Metrics
from ichat.observability.request_record import CLIENT_LEFT, ROUTES, RecordSink, RequestRecord, UsedTokens
from ichat.observability.tracing import Tracing
from ichat.observability.usage.ledger import Ledger
from ichat.protocol.messages import HEARTBEAT_PATHS
from ichat.protocol.orders import END_PATH, ORDER_PATH
from ichat.protocol.orders import REPORT_BYTES_MAX as END_BYTES_MAX
from ichat.protocol.prefixes import PREFIXES_PATH
from ichat.proxy.client_sink import SEALED
from ichat.proxy.context import GatewayContext
from ichat.proxy.control_plane import ControlPlane
from ichat.proxy.desk import Desk
from ichat.proxy.exchange import Exchange, client_address
from ichat.proxy.finished_requests import FinishedRequests
from ichat.proxy.lanes import LaneMeter
from ichat.proxy.late_usage import Spender
from ichat.proxy.planes import CONTROL_BYTES_MAX, RequestKind, is_control, kind_of
from ichat.proxy.refusals import over_limit
from ichat.proxy.requests_in_flight import InFlight, RequestsInFlight
from ichat.proxy.upstream_request import JOINED_BYTES_MAX
from ichat.proxy.wrong_addresses import is_googles, no_route
from ichat.security.auth import CHANGES_MODELS, Caller
from ichat.security.cors import cors_of
from ichat.security.rules import find_rule

_READS = frozenset((b"GET", b"HEAD", b"OPTIONS"))
_METHODS = _READS | {b"POST", b"PATCH", b"DELETE"}
_BYTES_MAX = {
    **dict.fromkeys(HEARTBEAT_PATHS, HEARTBEAT_BYTES_MAX),
    PREFIXES_PATH: REPORT_BYTES_MAX,
    END_PATH: END_BYTES_MAX,
}
"""The largest bodies of workers' requests."""
_JSON = [(b"content-type", b"application/json")]
_NO_HEAD = RequestHead(b"", b"", b"1.1", [], 0)
_JUDGED = frozenset((b"content-encoding", b"sec-fetch-dest", b"sec-fetch-mode"))
_MODES = frozenset((b"cors", b"same-origin", b"no-cors"))
"""Modes in which scripts send requests (`Sec-Fetch-Mode`, the Fetch Standard)."""
_ELSEWHERE = frozenset((b"cross-site", b"same-site"))
"""Origins that are not the gateway's own (`Sec-Fetch-Site`); another port of its host is `same-site`."""


class Gateway:
    """Answers requests by an upstream or the control plane, and records them."""

    def __init__(
        self,
        context: GatewayContext,
        metrics: Metrics,
        access: AccessLog,
        tracing: Tracing,
        heartbeats: HeartbeatReceiver,
        *,
        ledger: Ledger,
        prefix_reports: PrefixReportReceiver,
        orders: OrderStore,
        control: ControlPlane,
        finished: FinishedRequests,
    ) -> None:
        self.context = context
        self.cors = cors_of(context.settings.cors_origins, is_control)
        """Which pages in browsers may use the routes of models; None: none."""
        self._metrics = metrics
        self._access = access
        self._tracing = tracing
        tracing.find_providers(context.provider_of)
        self._ledger = ledger
        self._receivers: Mapping[bytes, Callable[[bytes | bytearray, Caller], Awaitable[bytes]]] = {
            **dict.fromkeys(HEARTBEAT_PATHS, heartbeats.receive),
            PREFIXES_PATH: prefix_reports.receive,
            ORDER_PATH: orders.fetch,
            END_PATH: orders.report_end,
        }
        """The answers to workers, by the routes."""
        self.in_flight = RequestsInFlight()
        self.finished = finished
        heartbeats.used_late.add(context.late_usage.settle)
        context.late_usage.used.add(self._count_late)
        self._control = control
        sinks: list[RecordSink] = [
            metrics,
            *([ledger] if ledger.enabled else ()),
            context.quotas,
            *([tracing] if tracing.sends_spans else ()),
            *([access] if access.enabled else ()),
            finished,
        ]
        self._sinks: Sequence[RecordSink] = sinks
        """Each of them gets the record of each request when the request has ended."""
        self.lanes = LaneMeter(self.in_flight, sinks)
        self._answers: Mapping[RequestKind, Callable[[Exchange, Request, Client], Awaitable[None]]] = {
            "response": self._answer_response,
            "preflight": self._answer_preflight,
            "worker": self._answer_worker,
            "control": self._answer_control,
            "wrong_method": self._refuse_method,
            "nowhere": self._refuse_route,
        }

    def reconfigure(self, config: Config) -> None:
        """Use the origins, and the bounds on streams and on finished requests, of another configuration."""
        self.cors = cors_of(config.server_settings.cors_origins, is_control)
        self._control.set_bounds(config)
        self.finished.reconfigure(config)

    def authenticate(self, head: RequestHead, peer: str) -> Caller:
        """Return the sender of a request. Raises ApiError before the body is read if the key is not right.

        The control plane looks again for itself: it knows its routes best.
        """
        auth, path = self.context.auth, head.path
        caller = auth.caller(head, peer)
        if self.cors is not None and head.length == 0 and self.cors.is_preflight(head.method, path, head.headers):
            return caller
        if path not in ROUTES and is_control(path):
            self._check_control(head, path, caller)
            return caller
        if path.rstrip(b"/") in CHANGES_MODELS:
            auth.check("write", caller)
        else:
            auth.check("data", caller)
        if not head.by_name.keys().isdisjoint(_JUDGED):
            _check_head(head)
        if head.length is None or head.length > JOINED_BYTES_MAX:
            refusal = self.context.quotas.refusal(caller.key_name, trio.current_time())
            if refusal is not None:  # before a large body is sent in vain
                raise over_limit(refusal)
        return caller

    def _check_control(self, head: RequestHead, path: bytes, caller: Caller) -> None:
        """Raise ApiError where a request to the control plane may be refused before its body is read."""
        if head.method not in _METHODS:  # names are case-sensitive (RFC 9110, section 9.1); frameworks forget that
            allowed = b", ".join(sorted(_METHODS)).decode()
            raise errors.method_not_allowed(head.method.decode("latin-1"), shown_path(path), allowed)
        if head.method == b"POST" and is_googles(path):
            raise no_route(path, head.by_name, self.context.auth.site)
        if head.method not in _READS:
            self.context.auth.check(find_rule(head.method, path) or "write", caller)
        if head.length is None:
            raise errors.length_required(shown_path(path))
        if head.length and head.method not in _READS and not _is_json(head.by_name.get(b"content-type", b"")):
            raise errors.not_json(shown_path(path))
        bytes_max = _BYTES_MAX.get(path, CONTROL_BYTES_MAX)
        if head.length > bytes_max:
            raise errors.request_too_large(bytes_max)

    def more_headers(self, head: RequestHead) -> Headers:
        """Return the headers for browsers in the response to a request with this head."""
        sealed = () if head.path not in ROUTES and is_control(head.path) else SEALED
        return [*sealed] if self.cors is None else [*sealed, *self.cors.headers_for(head.path, head.headers)]

    async def answer(self, request: Request, client: Client, caller: Caller) -> None:
        """Answer a request through an upstream. Raises ApiError if nothing has been sent."""
        exchange, phase = Exchange(self.context, request, client, caller), ""
        progress = exchange.progress
        try:
            is_usual = request.method == b"POST" and request.path in ROUTES
            kind = "model" if is_usual else kind_of(request, self.cors)
            if kind in ("model", "engine"):
                self._begin(exchange, request, is_known=kind == "model")
                await exchange.forward()
            else:
                await self._answers[kind](exchange, request, client)
        except ApiError as error:
            progress.ended(error.status, error.code)
            self._metrics.refused(error.limit or error.code, caller.key_name)
            raise
        except trio.Cancelled:
            phase = exchange.phase
            if not await self.in_flight.end_if_cancelled(exchange):  # noqa: ASYNC102 it has a shield with a bound
                progress.ended(*((CLIENT_LEFT, "client_left") if client.has_left else (503, "draining")))
            elif not progress.is_answered:  # an error after the head is counted by the metrics themselves
                self._metrics.refused(progress.error, caller.key_name)
            raise
        finally:
            self.finish(exchange, phase)

    def finish(self, one: InFlight, phase: str) -> None:
        """Record a request that has ended; `phase` is how far it had got if it was cut off."""
        self.in_flight.requests.pop(one, None)
        record = one.record(phase, self.context.pool.hub.update_clock())
        for sink in self._sinks:
            sink.ended(record)

    def use_sinks(self, sinks: Sequence[RecordSink]) -> Sequence[RecordSink]:
        """Have these get the records of requests from now on; return those that got them before."""
        before, self._sinks = self._sinks, sinks
        return before

    def record_earlier(self, record: RequestRecord) -> None:
        """Record a request that has ended without a decision of this process."""
        self._metrics.request_began()
        for sink in self._sinks:
            sink.ended(record)

    def add_earlier(self, key: str, model: str, worker: str, used: UsedTokens, *, requests: int, errors: int) -> None:
        """Count many such requests of a key, a model and an endpoint, of which only the sums are known."""
        self._metrics.used_later(key, model, used)
        if self._ledger.enabled:
            self._ledger.add_sums(key, model, worker, used, requests=requests, errors=errors)
        if self.context.quotas.has_periods:
            self.context.quotas.spend(key, model, used.input, used.output, used.cached)

    def client_of(self, head: RequestHead, peer: str) -> str:
        """Return the address of the client that has sent a head."""
        return client_address(self.context.auth.caller(head, peer), peer)

    def count_refusal(self, code: str, caller: Caller) -> None:
        """Count a refused request, by the code of its error or the limit that refuses it."""
        self._metrics.refused(code, caller.key_name)

    async def _answer_response(self, exchange: Exchange, request: Request, _client: Client) -> None:
        self._begin(exchange, request, is_known=False)
        await exchange.forward_to_holder()

    async def _answer_preflight(self, exchange: Exchange, request: Request, client: Client) -> None:
        assert self.cors is not None
        await client.respond(request, NO_CONTENT, self.cors.answer(request.path, request.headers), b"")
        exchange.progress.ended(NO_CONTENT, "")

    async def _refuse_method(self, _exchange: Exchange, request: Request, _client: Client) -> None:
        raise errors.method_not_allowed(request.method.decode("latin-1"), request.path.decode("latin-1"), "POST")

    async def _refuse_route(self, _exchange: Exchange, request: Request, _client: Client) -> None:
        raise no_route(request.path, request.by_name, self.context.auth.site)

    def _count_late(self, spender: Spender, used: UsedTokens) -> None:
        """Note the tokens of a response that was made in the background."""
        self._metrics.used_later(spender.key_name, spender.model, used)
        if self._ledger.enabled:
            self._ledger.add_sums(spender.key_name, spender.model, spender.worker, used)
        quotas = self.context.quotas
        quotas.spend_late(spender.key_name, used.total, trio.current_time())
        if quotas.has_periods:
            quotas.spend(spender.key_name, spender.model, used.input, used.output, used.cached)

    def _begin(self, exchange: Exchange, request: Request, *, is_known: bool) -> None:
        self.begin(exchange, exchange.desk, request.headers, request.path, is_known=is_known)

    def begin(
        self, one: InFlight, desk: Desk, headers: Sequence[tuple[bytes, bytes]], path: bytes, *, is_known: bool
    ) -> None:
        """Count and trace a request to a model from now on; `is_known` says that its path is one of few."""
        self.in_flight.requests[one] = False
        self._metrics.request_began()
        desk.count(self._tracing.begin(headers, path, is_known=is_known))

    async def _answer_worker(self, exchange: Exchange, request: Request, client: Client) -> None:
        """Answer a request of a worker here, since a thousand workers send them. Raises ApiError."""
        with self._control.joins.hold(exchange.caller.fairness_key):
            body = await self._receivers[request.path](request.body, exchange.caller)
        await client.respond(request, 200, _JSON, body)
        exchange.progress.ended(200, "", len(body))

    async def _answer_control(self, exchange: Exchange, request: Request, client: Client) -> None:
        await self._control.answer(exchange, request, client)
        if exchange.progress.error:
            self._metrics.refused(exchange.progress.error, exchange.caller.key_name)

    def refused(self, error: ApiError, request_id: bytes, peer: str, head: RequestHead | None) -> None:
        """Record a refusal of bytes that were not yet a request."""
        caller = self.context.auth.caller(head or _NO_HEAD, peer)
        if error.status != CLIENT_LEFT:
            self._metrics.refused(error.limit or error.code, caller.key_name)
        client, shown_id = client_address(caller, peer), request_id.decode()
        self.finished.refused(error, shown_id, client, caller.key_name, head)
        if self._access.enabled:
            entry: dict[str, str | int | float | None] = {"id": shown_id, "client": client}
            if head is not None:
                entry |= {"method": head.method.decode("latin-1"), "path": shown_path(head.path)}
            self._access.add(entry | {"status": error.status, "error": error.code})


def _is_json(content_type: bytes) -> bool:
    """Return whether a body is said to be JSON, which a page of another origin may not say without being asked."""
    return content_type.partition(b";")[0].strip().lower() == b"application/json"


def _check_head(head: RequestHead) -> None:
    """Raise ApiError for a request that no upstream may get: 403 for a browser's own request, 415 for a coded body."""
    for name, value in head.headers:
        if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
            raise errors.coded_body(value.decode("latin-1")[:40])
        if name == b"sec-fetch-dest" and value != b"empty":
            raise _not_by_a_script(f"is a browser's own, for a `{value.decode('latin-1')[:40]}`")
        if name == b"sec-fetch-mode":
            _check_mode(value, head.by_name.get(b"sec-fetch-site", b""))


def _check_mode(mode: bytes, site: bytes) -> None:
    """Raise ApiError for a mode that no script uses, or in which a script of another origin cannot read the answer."""
    if mode not in _MODES:
        raise _not_by_a_script(f"is a browser's own, of the mode `{mode.decode('latin-1')[:40]}`")
    if mode == b"no-cors" and site in _ELSEWHERE:
        raise _not_by_a_script("is of a page of another origin that cannot read it (`no-cors`)")


def _not_by_a_script(why: str) -> ApiError:
    return errors.forbidden(f"Programs, and pages that may read the answer, send requests for models: this one {why}.")
