"""The gateway: one front door before many workers.

registry, metrics                      plain objects
└ hub                                  sockets' events; ends last
└ pool                               connections to upstreams
└ control plane                    hypercorn on a unix socket
└ supervisor                     one task for each managed worker
└ front door └ connection └ exchange
"""

import json
import logging
import pathlib
import re
import secrets
import signal
import time
from collections.abc import AsyncIterator, Sequence
from typing import cast

import trio
from prometheus_client import CollectorRegistry, Counter, Gauge

from ichat import config as configuration
from ichat import errors
from ichat.config import Config, Timeouts
from ichat.errors import ApiError, Exit
from ichat.http.framing import UntilClose
from ichat.http.heads import Headers, ResponseHead, date_header, end_to_end, request_head, response_head
from ichat.http.hub import Hub
from ichat.http.pool import Connection, Pool, Upstream
from ichat.http.relay import Relay, UpstreamLost
from ichat.http.server import Client, FrontDoor, Request, open_listeners, port_of
from ichat.registry import Registry, Target
from ichat.supervisor import Supervisor
from ichat.usage import Usage

log = logging.getLogger(__name__)

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
        raise Exit(0, f"{args.config} is right.")
    return config


class Metrics:
    """What the gateway counts."""

    def __init__(self, registry: Registry) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "ichat_requests", "Requests to models, by how they ended (status 499: the client left).",
            ("model", "status"), registry=self.registry,
        )  # fmt: skip
        self.in_flight = Gauge("ichat_requests_in_flight", "Requests to models under way.", registry=self.registry)
        workers = Gauge("ichat_workers", "Workers in the state `ready`.", registry=self.registry)
        workers.set_function(lambda: float(sum(worker.state(trio.current_time()) == "ready" for worker in registry)))


class Gateway:
    """How the gateway answers: which upstream, and what is said when that fails."""

    def __init__(
        self, registry: Registry, metrics: Metrics, pool: Pool, timeouts: Timeouts, *, control_socket: str
    ) -> None:
        self._registry = registry
        self._metrics = metrics
        self._pool = pool
        self._timeouts = timeouts
        self._control = Target(Upstream("the control plane", control_socket, 0))

    async def answer(self, request: Request, client: Client) -> None:
        """Answer one request through an upstream. Raises ApiError where nothing has been sent."""
        if is_control(request.path):
            await self._forward(request, client, self._control)
        elif request.method == b"POST" and (request.path.startswith(b"/v1/") or _BY_MODEL.fullmatch(request.path)):
            await self._answer_by_model(request, client)
        elif _BY_MODEL.fullmatch(request.path):
            raise errors.method_not_allowed(request.method.decode("latin-1"), request.path.decode("latin-1"))
        else:
            raise errors.not_found(request.path.decode("latin-1"))

    async def _answer_by_model(self, request: Request, client: Client) -> None:
        model = model_of(request)
        target = self._registry.pick(model)
        self._metrics.in_flight.inc()
        status = 500
        try:
            while True:
                try:
                    status = await self._forward(request, client, target)
                except ApiError as error:
                    if error.code != "upstream_unreachable" or target.worker is None:
                        raise
                    log.warning("%s", error.message)
                    target.worker.unreachable = True
                    target.release()
                    target = self._registry.pick(model)
                else:
                    return
        except ApiError as error:
            status = error.status
            raise
        except trio.Cancelled:
            status = 499
            raise
        finally:
            target.release()
            self._metrics.in_flight.dec()
            self._metrics.requests.labels(model, status).inc()

    async def _forward(self, request: Request, client: Client, target: Target) -> int:
        """Send the request upstream and relay the response; give its status.

        A connection that was used before may have been closed by the upstream just now, so that the request never got
        there: then it is sent once more, on a fresh one.
        """
        connection = self._pool.take(target.upstream)
        if connection is not None:
            try:
                return await self._exchange(request, client, target, connection)
            except UpstreamLost as lost:
                if lost.answered or lost.timed_out:
                    return await self._break_off(request, client, target, lost)
        connection = await self._pool.connect(target.upstream)
        try:
            return await self._exchange(request, client, target, connection)
        except UpstreamLost as lost:
            return await self._break_off(request, client, target, lost)

    async def _exchange(self, request: Request, client: Client, target: Target, connection: Connection) -> int:
        """One request and its response on one connection, which is then kept or closed. Raises UpstreamLost."""
        status = 0

        def on_head(head: ResponseHead) -> bytes:
            nonlocal status
            status = head.status
            if isinstance(head.framing, UntilClose):
                client.keep_alive = False
            return response_head(head.status, _for_client(head, request, client, target), head.reason)

        relay = Relay(
            self._pool.hub,
            client,
            connection,
            method=request.method,
            version=request.version,
            on_head=on_head,
            first_byte_s=self._timeouts.first_byte_s,
            stall_s=self._timeouts.stream_stall_s,
        )
        clean = False
        try:
            await relay.carry(_for_upstream(request, target))
            clean = relay.reusable
        finally:
            if clean:
                self._pool.give(connection)
            else:
                self._pool.discard(connection)
        return status

    async def _break_off(self, request: Request, client: Client, target: Target, lost: UpstreamLost) -> int:
        """End a response that its upstream did not finish, so that no client can take it for a whole one."""
        name = target.upstream.name
        log.warning("%s failed with request %s: %s", name, request.id.decode(), lost)
        error = errors.upstream_failed(name, str(lost))
        if lost.timed_out:
            waited_s = self._timeouts.stream_stall_s if lost.answered else self._timeouts.first_byte_s
            error = errors.upstream_timeout(name, waited_s)
        if not client.head_sent:
            raise error
        client.keep_alive = False
        if lost.can_report:
            event = b"\n\ndata: " + error.body() + b"\n\n"  # the upstream may have left half an event
            await client.send_all(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
        return error.status


def model_of(request: Request) -> str:
    """Give the model that a request asks for. Raises ApiError 400."""
    try:
        body: object = json.loads(request.body)
    except (ValueError, RecursionError) as error:
        raise errors.bad_request(f"The request body is not JSON: {error}.") from error
    if not isinstance(body, dict):
        raise errors.bad_request("The request body must be a JSON object.")
    model = cast("dict[str, object]", body).get("model")
    if not isinstance(model, str) or not model:
        raise errors.bad_request("The request must name its model: a string `model`.", param="model")
    return model


def _for_upstream(request: Request, target: Target) -> bytes:
    """Write the request as the upstream gets it: the same body, the same end-to-end headers."""
    dropped = (b"host", b"content-length", b"expect", b"x-request-id")
    headers = [header for header in end_to_end(request.headers) if header[0] not in dropped]
    headers.append((b"host", target.upstream.authority))
    headers.append((b"x-request-id", request.id))
    if request.body or request.method in (b"POST", b"PUT", b"PATCH"):
        headers.append((b"content-length", b"%d" % len(request.body)))
    return request_head(request.method, target.path(request.target), request.version, headers) + request.body


def _for_client(head: ResponseHead, request: Request, client: Client, target: Target) -> Headers:
    """Give the headers of the response as the client gets it."""
    names = {name for name, _ in head.headers}
    headers = [header for header in end_to_end(head.headers) if header[0] != b"x-request-id"]
    if b"transfer-encoding" in names:
        headers.append((b"transfer-encoding", b"chunked"))
    if b"date" not in names:
        headers.append(date_header())
    headers.append((b"x-request-id", request.id))
    if target.worker is not None:
        headers.append((b"x-ichat-worker", target.worker.id.encode()))
    if not client.keep_alive:
        headers.append((b"connection", b"close"))
    return headers


async def run(config: Config, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
    """Run the gateway until it is told to stop; `started` with its port. Raises Exit where it cannot listen."""
    from ichat import control  # its frameworks are not needed to say that the configuration is wrong

    settings = config.server_settings
    listeners = await open_listeners(settings.host, settings.port)
    port = port_of(listeners)
    here = "127.0.0.1" if settings.host in ("", "0.0.0.0", "::") else settings.host
    here = f"[{here}]" if ":" in here else here
    registry = Registry(config.external_routes, trio.current_time)
    metrics = Metrics(registry)
    hub = Hub()
    timeouts = config.timeouts
    pool = Pool(hub, connect_s=timeouts.connect_s, idle_s=timeouts.upstream_idle_s)
    supervisor = Supervisor(config, registry, f"http://{here}:{port}")
    app = control.make_app(registry, metrics.registry, secrets.token_hex(8), int(time.time()))
    async with trio.open_nursery() as base:
        base.start_soon(hub.run_forever)
        base.start_soon(pool.expire_forever)
        socket_path = await base.start(control.serve, app)
        gateway = Gateway(registry, metrics, pool, timeouts, control_socket=socket_path)
        door = FrontDoor(b"gateway", gateway.answer, hub, config.limits, timeouts)
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
                        doors.start_soon(_hurry_when_told, signals, door, supervisor)
                        await door.drain()
                        workers.cancel_scope.cancel()
                    doors.cancel_scope.cancel()
        finally:
            pool.close_idle()
        base.cancel_scope.cancel()


async def _hurry_when_told(signals: AsyncIterator[int], door: FrontDoor, supervisor: Supervisor) -> None:
    await anext(signals)
    log.info("told again: not waiting any longer")
    door.hurry()
    supervisor.hurry()
