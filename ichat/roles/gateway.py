"""The gateway: one front door before many workers.

registry, balancer, metrics            plain objects
└ access log                           written in the background
└ hub                                  sockets' events; ends last
└ pool                               connections to upstreams
└ control plane                    hypercorn on a unix socket
└ supervisor                     one task for each managed worker
└ front door └ connection └ exchange
"""

import logging
import os
import pathlib
import re
import secrets
import signal
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence

import trio
from prometheus_client import CollectorRegistry, Counter, Gauge

from ichat import config as configuration
from ichat import errors
from ichat.accesslog import AccessLog, Entry
from ichat.balance import Balancer, Endpoint, external_endpoints
from ichat.config import Config
from ichat.errors import EXIT_UNAVAILABLE, ApiError, Exit
from ichat.exchange import Exchange, Means
from ichat.http.hub import Hub
from ichat.http.listeners import open_listeners, port_of
from ichat.http.pool import Pool, Upstream
from ichat.http.request import Request
from ichat.http.server import Client, FrontDoor
from ichat.http.tls import server_context
from ichat.registry import Registry
from ichat.supervisor import Supervisor
from ichat.usage import Usage

log = logging.getLogger(__name__)

CONTROL_REQUESTS_MAX = 1000
UNIX_PATH_BYTES_MAX = 107
SHOWN_CHARACTERS_MAX = 256
"""Of what a client chose, in the access log."""
_CONTROL_EXACT = frozenset((b"/health", b"/metrics", b"/v1/models", b"/register"))
_CONTROL_BELOW = (b"/v1/models/", b"/v1/workers/", b"/v1/admin/", b"/v1/logs/")
_BY_MODEL = re.compile(
    rb"(/v1)?/(chat/completions|completions|embeddings|rerank|score|classify|pooling|responses|messages|tokenize|detokenize"
    rb"|audio/transcriptions|audio/translations)|/v2/rerank"
)
"""The routes that are known to be routed by model; any other `POST /v1/...` is as well."""


def is_control(path: bytes) -> bool:
    """Say whether a path belongs to the control plane."""
    return path in _CONTROL_EXACT or path.startswith(_CONTROL_BELOW)


def read_command_line(argv: Sequence[str]) -> Config:
    """Read the gateway's flags and the configuration that they name. Raises Exit 64."""
    usage = Usage(
        prog="ichat.pyz gateway",
        description="Serve many models behind one OpenAI-compatible entry.",
        allow_abbrev=False,
    )
    usage.add_argument(
        "--config", "-c", required=True, metavar="FILE", help="TOML; ichat.toml.example explains every key"
    )
    usage.add_argument("--check", action="store_true", help="only say whether the configuration is right")
    args = usage.parse_args(list(argv))
    config = configuration.load(pathlib.Path(args.config))
    if args.check:
        secure_parts(config)
        raise Exit(0, f"{args.config} is right.")
    return config


class Metrics:
    """What the gateway counts."""

    def __init__(self, registry: Registry, balancer: Balancer) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "ichat_requests", "Requests to models, by how they ended (status 499: the client left).",
            ("model", "status"), registry=self.registry,
        )  # fmt: skip
        self._children: dict[tuple[str, int], Counter] = {}
        self.in_flight = Gauge("ichat_requests_in_flight", "Requests to models under way.", registry=self.registry)
        queued = Gauge("ichat_requests_queued", "Requests that wait for room at a worker.", registry=self.registry)
        queued.set_function(lambda: float(balancer.waiting))
        workers = Gauge("ichat_workers", "Workers in the state `ready`.", registry=self.registry)
        workers.set_function(lambda: float(sum(worker.state(trio.current_time()) == "ready" for worker in registry)))

    def count(self, model: str, status: int) -> None:
        """Count a request that has ended."""
        counter = self._children.get((model, status))
        if counter is None:
            counter = self._children[model, status] = self._requests.labels(model, status)
        counter.inc()


class Gateway:
    """Who answers a request, and what is known of it afterwards."""

    def __init__(self, means: Means, metrics: Metrics, access: AccessLog, control_socket: str) -> None:
        self._means = means
        self._metrics = metrics
        self._access = access
        self._control = Endpoint(Upstream("the control plane", control_socket, 0), b"", CONTROL_REQUESTS_MAX)

    async def answer(self, request: Request, client: Client) -> None:
        """Answer one request through an upstream. Raises ApiError where nothing has been sent."""
        exchange = Exchange(self._means, request, client)
        is_counted = False
        try:
            if is_control(request.path):
                await self._answer_control(exchange)
            elif request.method == b"POST" and (request.path.startswith(b"/v1/") or _BY_MODEL.fullmatch(request.path)):
                is_counted = True
                self._metrics.in_flight.inc()
                await exchange.by_model()
            elif _BY_MODEL.fullmatch(request.path):
                method, path = request.method.decode("latin-1"), request.path.decode("latin-1")
                raise errors.method_not_allowed(method, path, "POST")
            else:
                raise errors.not_found(request.path.decode("latin-1"))
        except ApiError as error:
            exchange.status, exchange.error = error.status, error.code
            raise
        except trio.Cancelled:
            exchange.status, exchange.error = (499, "client_left") if client.has_left else (503, "draining")
            raise
        finally:
            if is_counted:
                self._metrics.in_flight.dec()
                is_unknown = exchange.error == "model_not_found"
                self._metrics.count("" if is_unknown else exchange.model, exchange.status)
            if self._access.enabled:
                self._access.add(_entry(exchange, request, client))

    async def _answer_control(self, exchange: Exchange) -> None:
        control = self._control
        if control.in_flight >= control.in_flight_max:
            raise errors.too_many_control_requests()
        control.in_flight += 1
        try:
            await exchange.with_endpoint(control)
        finally:
            control.in_flight -= 1

    def refused(self, error: ApiError, peer: str) -> None:
        """Note what was refused before it was a request."""
        if self._access.enabled:
            self._access.add({"client": peer, "status": error.status, "error": error.code})


def _entry(exchange: Exchange, request: Request, client: Client) -> Entry:
    """Give the access log's facts of a request; times in milliseconds, sizes in bytes."""
    started = exchange.started_at
    overhead_s, answered_at = exchange.overhead_s, exchange.answered_at
    return {
        "id": request.id.decode(),
        "client": client.peer,
        "method": request.method.decode("latin-1"),
        "path": request.path.decode("latin-1")[:SHOWN_CHARACTERS_MAX],
        "model": exchange.model[:SHOWN_CHARACTERS_MAX],
        "worker": exchange.endpoint.id.decode() if exchange.endpoint else "",
        "status": exchange.status,
        "error": exchange.error,
        "bytes_in": exchange.bytes_in,
        "bytes_out": exchange.bytes_out,
        "duration_ms": _ms(trio.current_time() - started),
        "first_byte_ms": None if answered_at is None else _ms(answered_at - started),
        "queue_ms": _ms(exchange.queued_s),
        "overhead_ms": None if overhead_s is None else _ms(overhead_s),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)


async def run(config: Config, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
    """Run the gateway until it is told to stop; `started` with its port. Raises Exit where it cannot listen."""
    from ichat import control  # its frameworks are not needed to say that the configuration is wrong

    settings = config.server_settings
    tls, external = secure_parts(config)
    access = AccessLog(config.logs.access_log, config.logs.access_lines_max)
    listeners = await open_listeners(settings.host, settings.port)
    port = port_of(listeners)
    registry = Registry(external, trio.current_time, config.routing.max_in_flight)
    balancer = Balancer(
        registry.endpoints, trio.current_time, policy=config.routing.policy, queue_max=config.routing.queue_max
    )
    registry.changed = balancer.advance
    metrics = Metrics(registry, balancer)
    hub = Hub()
    timeouts = config.timeouts
    pool = Pool(hub, connect_s=timeouts.connect_s, idle_s=timeouts.upstream_idle_s)
    means = Means(
        balancer,
        pool,
        timeouts,
        session_header=config.routing.session_header.lower().encode(),
        worker_header=settings.worker_header,
        overhead_header=settings.overhead_header,
    )
    app = control.make_app(registry, metrics.registry, secrets.token_hex(8), int(time.time()))
    with tempfile.TemporaryDirectory(prefix="ichat-") as directory:
        control_socket = os.path.join(directory, "control")
        if len(control_socket) > UNIX_PATH_BYTES_MAX:
            raise Exit(
                EXIT_UNAVAILABLE, f"{directory} is too long for a unix socket; set TMPDIR to a shorter directory."
            )
        gateway = Gateway(means, metrics, access, control_socket)
        door = FrontDoor(b"gateway", gateway.answer, hub, config.limits, timeouts, tls, gateway.refused)
        supervisor = Supervisor(config, registry, directory, control_socket)
        async with trio.open_nursery() as base:
            base.start_soon(access.run_forever)
            base.start_soon(hub.run_forever)
            await base.start(pool.run_forever)
            await base.start(control.serve, app, control_socket)
            try:
                with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                    async with trio.open_nursery() as doors:
                        doors.start_soon(door.serve_forever, listeners)
                        log.info("the gateway listens on %s:%d", settings.host, port)
                        task_status.started(port)
                        async with trio.open_nursery() as workers:
                            workers.start_soon(supervisor.run)
                            await anext(signals)
                            log.info("told to stop: draining; a second signal hurries")
                            balancer.close()
                            doors.start_soon(_hurry_when_told, signals, door, supervisor)
                            await door.drain()
                            workers.cancel_scope.cancel()
                        doors.cancel_scope.cancel()
            finally:
                pool.close_idle()
            base.cancel_scope.cancel()


def secure_parts(config: Config) -> tuple[ssl.SSLContext | None, Mapping[str, Sequence[Endpoint]]]:
    """Make what needs certificates and keys: the front door's context, and the external routes' endpoints by model.

    Raises Exit 64 where one of them is missing or not usable.
    """
    settings = config.server_settings
    tls = None
    if settings.tls_certificate is not None and settings.tls_key is not None:
        tls = server_context(settings.tls_certificate, settings.tls_key)
    return tls, external_endpoints(config)


async def _hurry_when_told(signals: AsyncIterator[int], door: FrontDoor, supervisor: Supervisor) -> None:
    await anext(signals)
    log.info("told again: not waiting any longer")
    door.hurry()
    supervisor.hurry()
