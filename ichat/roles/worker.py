"""The worker: one engine behind a front door, known to the gateway by its beats.

hub                                    sockets' events; ends last
└ front door └ connection └ exchange   requests go to the engine's thread
└ beats                                to the gateway, where there is one; of the machine, once the engine serves
└ watch                                a signal, the launcher's end or the engine's end begins the shutdown
"""

import hmac
import json
import logging
import math
import os
import secrets
import signal
import socket
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import attrs
import trio

from ichat import __version__, errors
from ichat.config.schema import Limits, Timeouts
from ichat.engines import Engine, find
from ichat.engines.adapter import AdapterSettings, model_body, models_body
from ichat.engines.thread import EngineThread
from ichat.engines.translation import explain
from ichat.errors import ApiError
from ichat.hardware.machines import LOOK_S, MachineMonitor
from ichat.http.front_door import FrontDoor
from ichat.http.heads import RequestHead
from ichat.http.hub import Hub
from ichat.http.listeners import open_listeners, open_unix_listener, port_of
from ichat.http.request import Request
from ichat.http.server import Client
from ichat.observability.logs.capture import Capture
from ichat.observability.logs.endpoint import LogEndpoint
from ichat.protocol import (
    INTERNAL,
    NAMES_MAX,
    PROOF_HEADER,
    WORKER_HEADER,
    Heartbeat,
    WorkerState,
    response_tag,
    sentence,
)
from ichat.roles.heartbeat_sender import HeartbeatSender
from ichat.roles.worker_options import Options, read_command_line
from ichat.security.auth import (
    CHANGES_MODELS,
    address_in,
    bearer_of,
    comes_from_this_host,
    is_loopback,
    targets_this_host,
)
from ichat.security.keys import digest_of, proof_of
from ichat.supervisor.processes import launcher_pipe

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = ["WorkerServer", "explain_args", "read_command_line", "run"]

log = logging.getLogger(__name__)

GROUP_BEAT_S = 3.0
"""Members of a group beat at least so often: each of them is of no use without the others."""
LAST_LINES_S = 2.0
"""How long those that follow the log may take for its end."""
WITHOUT_LAUNCHER_S = (2.0, 5.0, 6.0)
"""How long after the launcher's end, at most, exchanges may go on, the engine may take to end, and the last words."""
_PROOF_HEADERS = frozenset((PROOF_HEADER, b"authorization"))
_CHANGES = CHANGES_MODELS | {b"/resume_memory_occupation", b"/wake_up"}
"""Routes after which the gateway should hear of the worker at once: it has other models, or takes requests again."""
_JSON = [(b"content-type", b"application/json")]


class WorkerServer:
    """The worker's parts, and how they answer."""

    def __init__(
        self,
        options: Options,
        engine: Engine,
        host: EngineThread,
        port: int,
        *,
        capture: Capture | None = None,
        token: str = "",
    ) -> None:
        """`capture` has the lines of this process, where they are kept; `token` lets others than this machine ask."""
        self.options = options
        self._known_by = [digest_of(one) for one in (token.encode(), proof_of(token.encode()))] if token else []
        self.host = host
        self._engine = engine
        self.port = port
        self.id = options.worker_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        self.draining = False
        self._created = int(time.time())
        self._start_id = secrets.token_hex(8)
        own = [(WORKER_HEADER, self.id.encode())]
        self.log = LogEndpoint(capture.ring, capture.settle, own) if capture is not None else None
        self.changed: Callable[[], None] = _tell_nobody
        """Called when the gateway should hear of something now."""
        self.grouped: Callable[[], None] = _tell_nobody
        """Called when the worker turns out to be one of several that serve a model together."""
        self._lookout = MachineMonitor(lambda: {os.getpid(): self.id}, self.id)

    def __repr__(self) -> str:
        return f"<Worker {self.id}: {self.state()}, {self.host!r}>"

    def adapter_settings(self) -> AdapterSettings:
        """Return what the engine's requests and responses must become at this worker."""
        options = self.options
        tag = response_tag(self.id, self._start_id)
        return AdapterSettings(tag, options.responses_max, options.responses_bytes_max, options.reasoning_field)

    def state(self) -> WorkerState:
        """Give the state as the gateway shall see it."""
        if self.draining or self.host.unready.is_set():
            return "draining"
        if self.host.is_ready():
            return "ready"
        if self.host.is_following():
            return "following"
        return "loading" if self.host.parsed.is_set() else "starting"

    def authenticate(self, head: RequestHead, peer: str) -> None:
        """Let this machine ask, and whoever has the token; everybody for the health. Raises ApiError 401, 403."""
        address = address_in(peer)
        if not address or (
            is_loopback(address) and targets_this_host(head.headers) and comes_from_this_host(head.headers)
        ):
            return
        if head.path == b"/health" and head.method in (b"GET", b"HEAD"):
            return
        if not self._known_by:
            raise errors.forbidden(
                "This worker answers its own machine only, at 127.0.0.1 or `localhost`, through no proxy and no page of"
                " another origin: start it, and its gateway, with the same ICHAT_JOIN_TOKEN."
            )
        given = (digest_of(bearer_of(value)) for name, value in head.headers if name in _PROOF_HEADERS)
        if not any(hmac.compare_digest(one, known) for one in given for known in self._known_by):
            raise errors.invalid_api_key(
                "This worker answers its own machine, its gateway, and whoever sends their token (ICHAT_JOIN_TOKEN) as"
                " `Authorization: Bearer`."
            )

    async def answer(self, request: Request, client: Client, _caller: None) -> None:
        """Answer one request: what concerns the worker as a whole here, everything else by the engine."""
        request.headers = [header for header in request.headers if not header[0].startswith(INTERNAL)]
        asks = request.method in (b"GET", b"HEAD")
        if asks and request.path == b"/health":
            await self._tell_health(request, client)
        elif request.path == b"/logs/stream":
            if self.log is None:
                raise ApiError(404, "not_found", "This worker keeps no log: start it with --log-streaming true.")
            await self.log.answer(request, client)
        elif request.path == b"/beat":
            await self._send_heartbeat(request, client)
        elif not asks and b"%" in request.path:
            raise errors.bad_request("The path must be written without percent signs.")  # routes are told by it
        elif self.draining and not self.host.is_ready() and self.host.failure is None:
            raise errors.draining()
        elif asks and self._lists_models() and (request.path + b"/").startswith(b"/v1/models/"):
            await self._list_models(request, client)
        elif asks and request.path == b"/metrics":
            request.headers = [header for header in request.headers if header[0] != b"accept"]  # plain text, please
            await self.host.answer(request, client, lambda status, body: (status, body + metrics_of(self.host)))
        else:
            await self.host.answer(request, client)
            if request.path in _CHANGES:
                self.changed()

    def _lists_models(self) -> bool:
        """Say whether the list of models is for everybody: where the engine has a key, it guards the list as well."""
        info = self.host.info
        return self.host.is_ready() and info is not None and not info.args.get("api_key")

    async def _tell_health(self, request: Request, client: Client) -> None:
        """200 while requests are answered, or while a follower follows; 503 with the phase otherwise."""
        well = self.host.is_ready() or self.host.is_following()
        status = {"status": "ok"} if well else {"status": "unavailable", "phase": self.host.phase}
        headers = [*_JSON, (WORKER_HEADER, self.id.encode())]
        await client.respond(request, 200 if well else 503, headers, json.dumps(status).encode())

    async def _send_heartbeat(self, request: Request, client: Client) -> None:
        """Do what a gateway asks for that knows of no worker yet, such as one that was started anew."""
        if request.method != b"POST":
            raise errors.method_not_allowed(request.method.decode("latin-1"), "/beat", "POST")
        if self.options.gateway_address is None:
            raise ApiError(
                409, "no_gateway", "This worker has no gateway: it was started without --gateway-address.", retry=False
            )
        self.changed()
        await client.respond(request, 200, _JSON, b'{"status": "ok"}')

    async def _list_models(self, request: Request, client: Client) -> None:
        """Answer `/v1/models` and `/v1/models/NAME`, the same for every engine."""
        models = {model.id: model for model in self._engine.models()}
        name = urllib.parse.unquote(request.path[len(b"/v1/models/") :].decode("latin-1"))
        if not name:
            body = models_body(models.values(), self._created, self._engine.name)
        elif name in models:
            body = model_body(models[name], self._created, self._engine.name)
        else:
            raise errors.model_not_found(name, models)
        await client.respond(request, 200, _JSON, body)

    def heartbeat(self) -> Heartbeat:
        """Give everything that is known of this worker; the reporter knows better at which host it is reached."""
        info = self.host.info
        names = info.model_names if info else self.options.served_model_name
        group = info.group if info else None
        interval = self.options.heartbeat_interval
        return Heartbeat(
            worker_id=self.id,
            model_name=names[0] if names else "",
            model_names=names,
            models=list(self._engine.models()) if self.host.is_ready() else [],
            group=group,
            host=self.options.advertise_host or self.options.host or "127.0.0.1",
            port=self.port,
            backend=self._engine.name,
            model_path=info.model_path if info else "",
            state=self.state(),
            phase=self.host.phase,
            failure=sentence(str(self.host.failure or "")),
            heartbeat_interval=min(interval, GROUP_BEAT_S) if group else interval,
            unix_socket=self.options.unix_socket is not None,
            max_in_flight=self.options.max_in_flight,
            pid=os.getpid(),
            start_id=self._start_id,
            args=info.args if info else {},
            changed_args=_bounded(info.changed_args) if info else None,
            versions={"ichat": __version__, **(info.versions if info else {})},
            progress=attrs.asdict(self._engine.progress()),
            machine=self._lookout.report.machine if self._lookout.report else None,
        )

    async def watch_machine_forever(self) -> None:
        """Look at the machine at intervals, so that beats tell of it.

        Not before the engine serves: until then it may start processes as copies of this one (fork), which must not
        happen in the middle of a call into a driver.
        """
        await self.host.ready.wait()
        await self._lookout.watch_forever(max(LOOK_S, self.options.heartbeat_interval), self.changed)


def _bounded(names: Sequence[str] | None) -> list[str] | None:
    """Return what a beat can hold: of too many names, none."""
    return None if names is None or len(names) > NAMES_MAX else list(names)


def metrics_of(host: EngineThread) -> bytes:
    """Give the worker's own metrics, to be put after the engine's, in Prometheus' text format.

    Not before the engine is ready: engines decide at their import how prometheus_client works in this process.
    """
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector

    class OurMetrics(Collector):
        def collect(self) -> "Iterable[Metric]":
            others = max(0, host.in_flight - 1)  # without the one that asks for this
            yield GaugeMetricFamily("ichat_worker_in_flight", "Requests that the engine is answering.", others)
            yield GaugeMetricFamily("ichat_worker_load_seconds", "From the start until it was ready.", host.load_s)
            yield CounterMetricFamily("ichat_engine_aborts", "Requests that their clients left.", host.aborts)

    registry = CollectorRegistry()
    registry.register(OurMetrics())
    return generate_latest(registry)


def explain_args(options: Options, engine_argv: Sequence[str]) -> str:
    """Give, as a text to print, what the engine would get for these arguments, and why. Raises Exit."""
    engine = find(options.backend)
    engine.check()
    return explain(engine.parse([*engine_argv, "--host", options.host, "--port", str(options.port)]).flag_outcomes)


class ShutdownDeadlines:
    """What the end of a worker waits for, and what cuts that short."""

    def __init__(self, door: FrontDoor[None]) -> None:
        self._door = door
        self.for_engine = trio.CancelScope()
        self.for_last_words = trio.CancelScope()
        self.alone = trio.Event()
        """Set when the launcher is gone."""

    async def hurry_when_told(self, signals: AsyncIterator[int]) -> None:
        """Wait for neither exchanges nor engine after the next signal."""
        await anext(signals)
        log.info("told again: not waiting any longer")
        self._door.hurry()
        self.for_engine.cancel()

    async def hurry_when_alone(self, pipe: int) -> None:
        """Wait for nothing very long after the launcher's end, which is that of this pipe."""
        await trio.lowlevel.wait_readable(pipe)
        self.alone.set()
        now = trio.current_time()
        hurries = (self._door.hurry, self.for_engine.cancel, self.for_last_words.cancel)
        for wait_s, hurry in zip(WITHOUT_LAUNCHER_S, hurries, strict=True):
            await trio.sleep_until(now + wait_s)
            hurry()


async def run(
    options: Options,
    engine_argv: Sequence[str],
    capture: Capture | None = None,
    token: str = "",
    *,
    task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a worker until it is told to stop; `started` with its port. Raises Exit where the engine fails.

    `capture` has the lines of this process, where they are kept; `token` is that of its gateway.
    """
    engine = find(options.backend)
    engine.check()
    listeners = await open_listeners(options.host, options.port)
    if options.unix_socket is not None:
        listeners.append(open_unix_listener(options.unix_socket))
    timeouts = Timeouts(drain_s=options.drain_s, client_stall_s=options.client_stall_s)
    limits = Limits(
        options.head_bytes_max,
        options.body_bytes_max,
        options.connections_max,
        connections_per_address_max=options.connections_max,  # all of them may be its gateway's
    )
    port = port_of(listeners)
    argv = [*engine_argv, "--host", options.host, "--port", str(port)]
    host = EngineThread(engine, argv, client_stall_s=timeouts.client_stall_s)
    worker = WorkerServer(options, engine, host, port, capture=capture, token=token)
    engine.adapter.settings = worker.adapter_settings()
    hub = Hub()
    door = FrontDoor(b"worker", worker.answer, worker.authenticate, hub, limits, timeouts)
    log.info("worker %s listens on %s:%d", worker.id, options.host, worker.port)
    if not token and not is_loopback(listeners[0].getsockname()[0]):
        log.warning("only this machine may ask this worker: others need a token in ICHAT_JOIN_TOKEN, the gateway too")
    task_status.started(worker.port)
    reporter = None
    if options.gateway_address is not None:
        reporter = HeartbeatSender(
            options.gateway_address,
            ca_file=options.gateway_ca,
            token=token,
            host=options.advertise_host or options.host,
            now=worker.heartbeat,
            lost=host.fail,
            orphan_after_s=options.orphan_after_s or math.inf,
        )
        worker.changed = reporter.changed
        worker.grouped = reporter.warn_of_loopback
    patience = ShutdownDeadlines(door)
    pipe = launcher_pipe()
    with trio.open_signal_receiver(*_ending_signals(options)) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hub.run_forever)
            nursery.start_soon(door.serve_forever, listeners)
            host.start()
            if reporter is not None:
                nursery.start_soon(reporter.send_forever)
                nursery.start_soon(worker.watch_machine_forever)
            if pipe is not None:
                nursery.start_soon(patience.hurry_when_alone, pipe)
            await _wait_for_the_end(worker, signals, patience.alone, reporter)
            nursery.start_soon(patience.hurry_when_told, signals)
            await _leave(worker, door, patience, reporter)
            nursery.cancel_scope.cancel()
    if host.failure is not None:
        raise host.failure


def _ending_signals(options: Options) -> list[signal.Signals]:
    """Give the signals that end this worker in order.

    SIGHUP does, as when a terminal goes, unless that is ignored already (nohup). One that a gateway started ignores
    it: that is a gateway's word for reading the configuration again.
    """
    if (options.gateway_address or "").startswith("unix:"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


def _tell_nobody() -> None:
    """Stand in for a gateway's reporter where there is no gateway."""


async def _leave(
    worker: WorkerServer, door: FrontDoor[None], patience: ShutdownDeadlines, reporter: HeartbeatSender | None
) -> None:
    """End in good order: exchanges, the engine, those that follow the log, and then the good-bye."""
    host = worker.host
    if host.failure is not None:
        log.error("%s", sentence(str(host.failure)))  # those that follow the log do not get the process' last words
    worker.draining = True
    worker.changed()
    await door.drain()
    with patience.for_engine:
        await host.stop(worker.options.stop_s)
    if not host.ended.is_set():
        log.warning("the engine did not end in time (%s); its processes are killed", host.phase)
        host.give_up()
    with patience.for_last_words:
        if worker.log is not None:
            await worker.log.finish(LAST_LINES_S)
        if reporter is not None:
            await reporter.say_goodbye()


async def _wait_for_the_end(
    worker: WorkerServer, signals: AsyncIterator[int], alone: trio.Event, reporter: HeartbeatSender | None
) -> None:
    """Return when a signal comes, or launcher, engine or gateway are gone; tell the gateway of changes meanwhile."""
    host = worker.host
    async with trio.open_nursery() as nursery:

        async def until(wait: Callable[[], Awaitable[object]], why: str) -> None:
            await wait()
            log.info("%s: shutting down", why)
            nursery.cancel_scope.cancel()

        nursery.start_soon(until, alone.wait, "the launcher is gone")
        if reporter is not None:
            why = f"the gateway has taken no beat for {worker.options.orphan_after_s:g} s"
            nursery.start_soon(until, reporter.orphaned.wait, why)
        nursery.start_soon(until, host.ended.wait, "the engine ended")
        nursery.start_soon(until, signals.__anext__, "told to stop")
        nursery.start_soon(host.watch_loading)
        await host.parsed.wait()
        if host.info is not None and host.info.group is not None:
            worker.grouped()
        worker.changed()
        await host.ready.wait()
        worker.changed()
        await host.unready.wait()
        worker.changed()
