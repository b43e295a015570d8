"""How the front door has requests to the control plane answered, and how many places each kind of caller has.

A request occupies a place until its answer is whole in memory, and no longer, however slowly its client reads
(`http/unread.py`). It occupies none before its route's rule admits it, and none for an open route: its answers are in
memory. Operators, clients and workers each have places of their own, and streams have, since they last.
"""

import contextlib
from collections.abc import Callable, Generator

from ichat import errors
from ichat.config.schema import DRAIN_S_MAX, CircuitBreaker, Config
from ichat.http.pool import Upstream
from ichat.http.request import Request
from ichat.http.server import Client, OwnResponse
from ichat.http.unread import UnreadAnswers, WholeAnswer
from ichat.observability.access_log import shown_path
from ichat.protocol.messages import CALLER_HEADER
from ichat.proxy.context import GatewayContext
from ichat.proxy.exchange import Exchange
from ichat.proxy.wrong_addresses import no_route
from ichat.routing.circuit_breaker import Circuit
from ichat.routing.endpoint import Endpoint
from ichat.security.auth import encode_caller
from ichat.security.origins import Site
from ichat.security.rules import find_rule, methods_of

PLACES_MAX = 1000
"""Requests of operators that are answered at the same time; as many of clients, and as many of workers."""
OF_A_CLIENT_MAX = 250
OF_A_WORKER_MAX = 500
"""Of a single address."""
SLOW_MAX = 250
OF_A_SLOW_ONE_MAX = 16
"""Of a single client, on a route that may need seconds to answer: more at once would only wait for each other."""
CONTROL_TIMEOUTS = (DRAIN_S_MAX + 600.0, 120.0)
"""Seconds until the control plane's first byte, and between two bytes: stopping a worker lasts as long as its drain."""
_LOGS = (b"/v1/logs/stream/", b"/v1/logs/files/", b"/v1/logs/gateway")
"""Streams, and files that are too large to be held in memory."""
_EVENTS = b"/v1/admin/events"
_SLOW = (b"/v1/usage", b"/metrics")

OpenRoutes = Callable[[Request], OwnResponse]
"""Returns the answer of a route that is open to everybody. Raises ApiError."""


class Places:
    """How many requests of a kind are answered at the same time: in all, and of a single caller."""

    def __init__(self, places_max: int, of_one_max: int) -> None:
        self.places_max = places_max
        self._of_one_max = of_one_max
        self._taken: dict[str, int] = {}
        self.taken = 0

    def __repr__(self) -> str:
        return f"<Places {self.taken} of {self.places_max} taken>"

    @contextlib.contextmanager
    def hold(self, caller: str) -> Generator[None]:
        """Hold a place for as long as this lasts. Raises ApiError 503 if there is none."""
        mine = self._taken.get(caller, 0)
        if self.taken >= self.places_max or mine >= self._of_one_max:
            raise errors.too_many_control_requests()
        self.taken += 1
        self._taken[caller] = mine + 1
        try:
            yield
        finally:
            self.taken -= 1
            self._taken[caller] -= 1
            if not self._taken[caller]:
                del self._taken[caller]


class ControlPlane:
    """Has requests answered by the control plane, or from memory."""

    def __init__(self, context: GatewayContext, socket: str, open_routes: OpenRoutes, config: Config) -> None:
        """`socket` is the control plane's own."""
        self._context = context
        self._open_routes = open_routes
        upstream, never_open = Upstream("the control plane", socket, 0), Circuit(CircuitBreaker(failures_max=0))
        self._endpoint = Endpoint(upstream, b"", PLACES_MAX, timeouts=CONTROL_TIMEOUTS, circuit=never_open)
        self.joins = Places(PLACES_MAX, OF_A_WORKER_MAX)
        """For heartbeats and reports, which the front door answers itself."""
        self._operators = Places(PLACES_MAX, PLACES_MAX)
        self._clients = Places(PLACES_MAX, OF_A_CLIENT_MAX)
        self._slow = {path: Places(SLOW_MAX, OF_A_SLOW_ONE_MAX) for path in _SLOW}
        self._log_streams, self._event_streams = Places(0, PLACES_MAX), Places(0, PLACES_MAX)
        self._unread_of_operators, self._unread = UnreadAnswers(), UnreadAnswers()
        self.set_bounds(config)

    def __repr__(self) -> str:
        return f"<ControlPlane operators {self._operators!r}, clients {self._clients!r}, workers {self.joins!r}>"

    def set_bounds(self, config: Config) -> None:
        """Use the bounds on streams of another configuration from now on."""
        self._log_streams.places_max = config.logs.followers_max
        self._event_streams.places_max = config.limits.event_streams_max

    async def answer(self, exchange: Exchange, request: Request, client: Client) -> None:
        """Answer a request. Raises ApiError if nothing has been sent."""
        caller, path = exchange.caller, request.path
        rule = find_rule(request.method, path)
        if rule is None:
            await self._send(exchange, request, client, _answer_elsewhere(request, self._context.auth.site))
            return
        self._context.auth.check(rule, caller)
        if rule == "open":
            await self._send(exchange, request, client, self._open_routes(request))
            return
        internal = [(CALLER_HEADER, self._context.seal.sign(encode_caller(caller)))]
        if path == _EVENTS or path.startswith(_LOGS):
            client.exempt_from_drain()
            with (self._event_streams if path == _EVENTS else self._log_streams).hold(caller.fairness_key):
                await exchange.forward_to_control_plane(self._endpoint, internal, client)
            return
        unread, places = self._unread, self._slow.get(path, self._clients)
        if self._context.auth.is_operator(caller):
            unread, places = self._unread_of_operators, self._operators
        whole = WholeAnswer(client, unread, caller.fairness_key, self._context.timeouts.unread_s)
        with places.hold(caller.fairness_key):
            await exchange.forward_to_control_plane(self._endpoint, internal, whole)
        await whole.finish()

    async def _send(self, exchange: Exchange, request: Request, client: Client, answer: OwnResponse) -> None:
        """Send an answer from memory."""
        exchange.progress.ended(answer.status, "", len(answer.body))
        data, unread_s = client.response(request, answer), self._context.timeouts.unread_s
        await self._unread.send(client, exchange.caller.fairness_key, data, unread_s)


def _answer_elsewhere(request: Request, site: Site) -> OwnResponse:
    """Return the answer to a request that no route accepts, where there is an answer. Raises ApiError: 404, 405."""
    path, methods = shown_path(request.path), methods_of(request.path)
    if not methods:
        raise no_route(request.path, request.by_name, site)
    if request.method != b"OPTIONS":
        raise errors.method_not_allowed(request.method.decode("latin-1"), path, ", ".join(methods))
    return OwnResponse(200, [(b"allow", ", ".join(methods).encode())], b"")
