"""The worker: one engine behind a front door, known to the gateway by its beats.

hub                                    sockets' events; ends last
└ front door └ connection └ exchange   requests go to the engine's thread
└ beats                                to the gateway, where there is one
└ watch                                a signal, the launcher's end or the engine's end begins the shutdown
"""

import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import attrs
import httpx
import trio

from ichat import errors
from ichat.beat import Beat, WorkerState, read_beat
from ichat.config import Limits, Timeouts
from ichat.engines import Engine, find
from ichat.engines.host import Host
from ichat.errors import EXIT_USAGE, Exit
from ichat.http.hub import Hub
from ichat.http.listeners import open_listeners, open_unix_listener, port_of
from ichat.http.request import Request
from ichat.http.server import Client, FrontDoor
from ichat.http.tls import client_context
from ichat.processes import LAUNCHER_FD
from ichat.usage import Usage

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger(__name__)

BEAT_TIMEOUT_S = 5.0
BEAT_RETRY_S = 1.0
GOODBYE_S = 2.0


@attrs.frozen
class Options:
    """The worker's own command line; everything else is the engine's."""

    backend: str
    gateway_address: str | None
    served_model_name: list[str]
    heartbeat_interval: float
    worker_id: str
    host: str
    port: int
    advertise_host: str | None
    unix_socket: str | None
    max_in_flight: int
    gateway_ca: str | None
    head_bytes_max: int
    body_bytes_max: int
    connections_max: int
    client_stall_s: float
    drain_s: float
    stop_s: float


def parser() -> Usage:
    """Make the parser of the worker's own flags."""
    usage = Usage(
        prog="ichat.pyz worker",
        description="Load one model with one engine, in this process, and serve the OpenAI routes.",
        epilog="Every other flag is the engine's own, for example --model. The engine lists its flags with --help=all.",
        allow_abbrev=False,
    )
    add = usage.add_argument
    limits = Limits()
    add("--backend", "-be", default="vllm", metavar="NAME", help="the engine (vllm)")
    add("--gateway-address", "-ga", metavar="URL", help="register with this gateway, for example http://gw:4000")
    add(
        "--served-model-name", "--model-name", "-n", nargs="+", default=[], metavar="NAME",
        help="the names that requests use; the model's path otherwise",
    )  # fmt: skip
    add("--heartbeat-interval", "--hi", type=float, default=30.0, metavar="S", help="seconds between beats (30)")
    add("--worker-id", default="", metavar="ID", help="made from host and process where it is not given")
    add("--host", default="127.0.0.1", metavar="HOST", help="where to listen (127.0.0.1; 0.0.0.0 for all interfaces)")
    add("--port", type=int, default=8000, metavar="PORT", help="where to listen (8000; 0 for any free port)")
    add("--advertise-host", metavar="HOST", help="how the gateway reaches this worker, where that is not clear")
    add("--unix-socket", metavar="PATH", help="listen there as well; a gateway uses it for workers that it started")
    add(
        "--max-in-flight", type=int, default=0, metavar="N",
        help="requests that the gateway may send at the same time (as its configuration says)",
    )  # fmt: skip
    add("--gateway-ca", metavar="FILE", help="authorities to trust for a gateway with https (those of the system)")
    for name, default, help_ in (
        ("--head-bytes-max", limits.head_bytes_max, "the largest head of a request"),
        ("--body-bytes-max", limits.body_bytes_max, "the largest body of a request"),
        ("--connections-max", limits.connections_max, "open connections"),
    ):
        add(name, type=int, default=default, metavar="N", help=f"{help_} ({default})")
    stall_s = Timeouts().client_stall_s
    add(
        "--client-stall-s", type=float, default=stall_s, metavar="S",
        help=f"how long a client may take no bytes before it counts as gone ({stall_s:g})",
    )  # fmt: skip
    add("--drain-s", type=float, default=30.0, metavar="S", help="how long exchanges may take to end at shutdown (30)")
    add("--stop-s", type=float, default=10.0, metavar="S", help="how long the engine may take to end after that (10)")
    return usage


def read_command_line(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """Split a command line into the worker's options and the engine's arguments.

    Flags are matched by their exact names, with `_` for `-` allowed, so nothing of the engine's is taken by mistake.
    The host, the port and the model's names are handed to the engine as well. Raises Exit 64.
    """
    usage = parser()
    actions = {option: action for action in usage._actions for option in action.option_strings}
    ours: list[str] = []
    theirs: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        action = actions.get(name)
        if action is None or (name in ("-h", "--help") and equals):
            theirs.append(word)
            continue
        ours.append(name + equals + value)
        if not equals and action.nargs != 0:
            while rest and not (rest[0].startswith("-") and len(rest[0]) > 1 and not rest[0][1].isdigit()):
                ours.append(rest.pop(0))
                if action.nargs is None:
                    break
    found = usage.parse_args(ours)
    options = Options(**vars(found))
    if not 0 <= options.port < 65536:
        raise Exit(EXIT_USAGE, f"{usage.prog}: --port must be from 0 to 65535, not {options.port}")
    _check_beat(options, usage.prog)
    if options.gateway_address is not None:
        url = urllib.parse.urlsplit(options.gateway_address)
        if (url.scheme not in ("http", "https") or not url.hostname) and not (url.scheme == "unix" and url.path):
            raise Exit(
                EXIT_USAGE,
                f"{usage.prog}: --gateway-address must be like http://gw:4000, not {options.gateway_address!r}",
            )
    if options.served_model_name:
        theirs += ["--served-model-name", *options.served_model_name]
    return options, [*theirs, "--host", options.host, "--port", str(options.port)]


def _check_beat(options: Options, prog: str) -> None:
    """Find now what the gateway would refuse in every beat. Raises Exit 64."""
    try:
        read_beat({
            "worker_id": options.worker_id or "w",
            "model_name": options.served_model_name[0] if options.served_model_name else "m",
            "model_names": options.served_model_name,
            "host": options.advertise_host or "h",
            "port": 1,
            "heartbeat_interval": options.heartbeat_interval,
            "max_in_flight": options.max_in_flight,
        })  # fmt: skip
    except errors.ApiError as error:
        raise Exit(EXIT_USAGE, f"{prog}: {error.message}") from error


class Worker:
    """The worker's parts, and how they answer."""

    def __init__(self, options: Options, host: Host, port: int) -> None:
        self.options = options
        self.host = host
        self.port = port
        self.id = options.worker_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        self.draining = False
        self._changed = trio.Event()
        self._beating = trio.CancelScope()
        self._own_address = "127.0.0.1"

    def __repr__(self) -> str:
        return f"<Worker {self.id}: {self.state()}, {self.host!r}>"

    def state(self) -> WorkerState:
        """Give the state as the gateway shall see it."""
        if self.draining or self.host.unready.is_set():
            return "draining"
        if self.host.is_ready():
            return "ready"
        return "loading" if self.host.parsed.is_set() else "starting"

    async def answer(self, request: Request, client: Client) -> None:
        """Answer one request: `/health` here, everything else by the engine."""
        if request.path == b"/health" and request.method in (b"GET", b"HEAD"):
            ready = self.host.is_ready()
            status = {"status": "ok"} if ready else {"status": "unavailable", "phase": self.host.phase}
            headers = [(b"content-type", b"application/json")]
            await client.respond(request, 200 if ready else 503, headers, json.dumps(status).encode())
        elif self.draining and not self.host.is_ready():
            raise errors.draining()
        else:
            await self.host.answer(request, client)

    def changed(self) -> None:
        """Beat now rather than at the next interval."""
        self._changed.set()

    async def beat_forever(self, engine: Engine, address: str) -> None:
        """Tell the gateway everything, at every change and interval; a gateway that is away is asked again soon."""
        reached = True
        with self._beating:
            async with self._gateway(address) as gateway:
                while True:
                    self._changed = trio.Event()
                    error = await self._beat(gateway, await self._beat_now(engine, address))
                    if error and reached:
                        log.warning("the gateway %s does not take beats: %s; trying again", address, error)
                    elif not error and not reached:
                        log.info("the gateway %s takes beats again", address)
                    reached = not error
                    with trio.move_on_after(self.options.heartbeat_interval if reached else BEAT_RETRY_S):
                        await self._changed.wait()

    async def say_goodbye(self, engine: Engine, address: str) -> None:
        """Tell the gateway that this worker is gone, if that can be done quickly; it beats no more."""
        self._beating.cancel()
        with trio.move_on_after(GOODBYE_S):
            async with self._gateway(address) as gateway:
                await self._beat(gateway, attrs.evolve(await self._beat_now(engine, address), state="gone"))

    def _gateway(self, address: str) -> httpx.AsyncClient:
        url = urllib.parse.urlsplit(address)
        if url.scheme == "unix":
            transport = httpx.AsyncHTTPTransport(uds=url.path)
            return httpx.AsyncClient(base_url="http://localhost", timeout=BEAT_TIMEOUT_S, transport=transport)
        context = client_context(self.options.gateway_ca) if url.scheme == "https" else False
        return httpx.AsyncClient(base_url=address, timeout=BEAT_TIMEOUT_S, trust_env=False, verify=context)

    async def _beat(self, gateway: httpx.AsyncClient, beat: Beat) -> str | None:
        """Send one beat; give what went wrong."""
        try:
            response = await gateway.post("/v1/workers/heartbeat", json=attrs.asdict(beat))
        except (httpx.HTTPError, ValueError) as error:
            return str(error) or type(error).__name__
        return None if response.is_success else f"{response.status_code} {response.text[:300]}"

    async def _beat_now(self, engine: Engine, address: str) -> Beat:
        info = self.host.info
        names = info.model_names if info else self.options.served_model_name
        return Beat(
            worker_id=self.id,
            model_name=names[0] if names else "",
            model_names=names,
            host=await self._reachable(address),
            port=self.port,
            backend=engine.name,
            model_path=info.model_path if info else "",
            state=self.state(),
            phase=self.host.phase,
            heartbeat_interval=self.options.heartbeat_interval,
            unix_socket=self.options.unix_socket is not None,
            max_in_flight=self.options.max_in_flight,
            pid=os.getpid(),
            args=info.args if info else {},
            versions=info.versions if info else {},
            progress=attrs.asdict(engine.progress()),
        )

    async def _reachable(self, address: str) -> str:
        """Give the address at which the gateway reaches this worker: the one from which it would be reached itself."""
        host = self.options.advertise_host or self.options.host
        if host not in ("", "0.0.0.0", "::"):
            return host
        url = urllib.parse.urlsplit(address)
        if url.scheme == "unix":
            return self._own_address
        with trio.move_on_after(BEAT_TIMEOUT_S), contextlib.suppress(OSError, UnicodeError):
            found = await trio.socket.getaddrinfo(url.hostname, url.port or 80, type=socket.SOCK_DGRAM)
            family, kind, _, _, there = found[0]
            with socket.socket(family, kind) as probe:
                probe.connect(there)
                self._own_address = probe.getsockname()[0]
        return self._own_address


def expose(host: Host) -> None:
    """Add the worker's own metrics to the registry that the engine's `/metrics` shows.

    Not before the engine is ready: engines decide at their import how prometheus_client works in this process.
    """
    from prometheus_client import REGISTRY
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector

    class OurMetrics(Collector):
        def collect(self) -> "Iterable[Metric]":
            yield GaugeMetricFamily("ichat_worker_in_flight", "Requests that the engine is answering.", host.in_flight)
            yield GaugeMetricFamily("ichat_worker_load_seconds", "From the start until it was ready.", host.load_s)
            yield CounterMetricFamily("ichat_engine_aborts", "Requests that their clients left.", host.aborts)

    REGISTRY.register(OurMetrics())


async def run(
    options: Options, engine_argv: Sequence[str], *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run a worker until it is told to stop; `started` with its port. Raises Exit where the engine fails."""
    engine = find(options.backend)
    engine.check()
    listeners = await open_listeners(options.host, options.port)
    if options.unix_socket is not None:
        listeners.append(open_unix_listener(options.unix_socket))
    timeouts = Timeouts(drain_s=options.drain_s, client_stall_s=options.client_stall_s)
    limits = Limits(options.head_bytes_max, options.body_bytes_max, options.connections_max)
    host = Host(engine, engine_argv, client_stall_s=timeouts.client_stall_s)
    worker = Worker(options, host, port_of(listeners))
    hub = Hub()
    door = FrontDoor(b"worker", worker.answer, hub, limits, timeouts)
    log.info("worker %s listens on %s:%d", worker.id, options.host, worker.port)
    task_status.started(worker.port)
    address = options.gateway_address
    patience = trio.CancelScope()
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hub.run_forever)
            nursery.start_soon(door.serve_forever, listeners)
            host.start()
            if address is not None:
                nursery.start_soon(worker.beat_forever, engine, address)
            await _wait_for_the_end(worker, signals)
            nursery.start_soon(_hurry_when_told, signals, door, patience)
            worker.draining = True
            worker.changed()
            await door.drain()
            with patience:
                await host.stop(options.stop_s)
            if not host.ended.is_set():
                log.warning("the engine did not end in time (%s); its processes are killed", host.phase)
                host.give_up()
            if address is not None:
                await worker.say_goodbye(engine, address)
            nursery.cancel_scope.cancel()
    if host.failure is not None:
        raise host.failure


async def _hurry_when_told(signals: AsyncIterator[int], door: FrontDoor, patience: trio.CancelScope) -> None:
    await anext(signals)
    log.info("told again: not waiting any longer")
    door.hurry()
    patience.cancel()


async def _wait_for_the_end(worker: Worker, signals: AsyncIterator[int]) -> None:
    """Return when a signal comes, the launcher ends, or the engine does; tell the gateway of changes meanwhile."""
    host = worker.host
    launcher = os.environ.get(LAUNCHER_FD)
    async with trio.open_nursery() as nursery:

        async def until(wait: Callable[[], Awaitable[object]], why: str) -> None:
            await wait()
            log.info("%s: shutting down", why)
            nursery.cancel_scope.cancel()

        async def launcher_gone() -> None:
            await trio.lowlevel.wait_readable(int(launcher or 0))

        if launcher is not None:
            os.set_inheritable(int(launcher), False)
            nursery.start_soon(until, launcher_gone, "the launcher is gone")
        nursery.start_soon(until, host.ended.wait, "the engine ended")
        nursery.start_soon(until, signals.__anext__, "told to stop")
        await host.parsed.wait()
        worker.changed()
        await host.ready.wait()
        expose(host)
        worker.changed()
        await host.unready.wait()
        worker.changed()
