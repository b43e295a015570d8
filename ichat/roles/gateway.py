"""The gateway: one front door before many workers.

registry, balancer, metrics            plain objects
└ access log                           written in the background
└ hub                                  sockets' events; ends last
└ pool                                 connections to upstreams
└ control plane                        hypercorn on a unix socket
└ logbook                              one follower for each registered worker
└ reloader                             looks at the file, and obeys SIGHUP
└ supervisor                           one task for each managed worker
└ front door └ connection └ exchange
"""

import contextlib
import logging
import pathlib
import secrets
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Mapping, Sequence

import trio

from ichat.admin.reload import ApplyConfig, ConfigFile, Reloader, fingerprint
from ichat.config import schema as configuration
from ichat.config.command_line import CommandLineParser
from ichat.config.schema import Config
from ichat.errors import Exit
from ichat.hardware.machines import LOOK_S, MachineMonitor
from ichat.http.front_door import FrontDoor
from ichat.http.hub import Hub
from ichat.http.listeners import open_listeners, port_of
from ichat.http.pool import Pool
from ichat.http.tls import server_context
from ichat.observability.access_log import AccessLog
from ichat.observability.logs.files import prune
from ichat.observability.logs.store import LogSource, LogStore
from ichat.observability.metrics import Metrics
from ichat.observability.scrape import Scraper
from ichat.observability.tracing import Tracing, open_tracing
from ichat.proxy.context import GatewayContext
from ichat.proxy.external_routes import external_endpoints
from ichat.proxy.handler import Gateway, is_control
from ichat.proxy.health_checks import HealthChecker
from ichat.routing.balancer import Balancer
from ichat.routing.endpoint import Endpoint
from ichat.routing.registry import Registry
from ichat.routing.waiting import retry_forever
from ichat.security.auth import Auth, Caller, address_in, is_loopback
from ichat.security.cors import cors_of
from ichat.supervisor.orphans import become_subreaper, reap_forever
from ichat.supervisor.state import StateDirectory, open_state
from ichat.supervisor.supervisor import Supervisor

log = logging.getLogger(__name__)

PRUNE_S = 24 * 3600.0
LOG_END_S = 2.0
"""How long those who follow a log may take to get its last lines, when the gateway ends."""


def read_command_line(argv: Sequence[str]) -> tuple[Config, ConfigFile]:
    """Read the gateway's flags and the configuration that they name; give it and its file. Raises Exit 64."""
    usage = CommandLineParser(
        prog="ichat.pyz gateway",
        description="Serve many models behind one OpenAI-compatible entry.",
        allow_abbrev=False,
    )
    usage.add_argument(
        "--config", "-c", required=True, metavar="FILE", help="TOML; ichat.toml.example explains every key"
    )
    usage.add_argument("--check", action="store_true", help="only say whether the configuration is right")
    args = usage.parse_args(list(argv))
    path = pathlib.Path(args.config)
    file = ConfigFile(path, fingerprint(path))
    config = configuration.load(path)
    if args.check:
        secure_parts(config)
        raise Exit(0, f"{args.config} is right.")
    return config, file


async def run(
    config: Config, file: ConfigFile | None = None, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run the gateway until it is told to stop; `started` with its port. Raises Exit where it cannot listen.

    `file` is where the configuration is from, and is read again when it changes.
    """
    with (
        open_state(config.server_settings, config.logs.directory) as state,
        contextlib.closing(open_tracing()) as tracing,
    ):
        await _run(config, file, state, tracing, task_status)


async def _run(
    config: Config,
    file: ConfigFile | None,
    state: StateDirectory,
    tracing: Tracing,
    task_status: trio.TaskStatus[int],
) -> None:
    from ichat.admin import app as control  # its frameworks are not needed to say that the configuration is wrong
    from ichat.admin.routes import AdminContext

    settings, timeouts = config.server_settings, config.timeouts
    tls, external, auth = secure_parts(config)
    access = AccessLog(config.logs.access_log, config.logs.access_lines_max)
    listeners = await open_listeners(settings.host, settings.port)
    port = port_of(listeners)
    registry = Registry(external, trio.current_time, config.routing.max_in_flight, timeouts.wedged_after_s)
    registry.reconfigure(config)
    balancer = Balancer(
        registry.availability, trio.current_time, policy=config.routing.policy, queue_max=config.routing.queue_max
    )
    registry.add_listener(balancer.dispatch_waiting)
    lookout = MachineMonitor(lambda: supervisor.pids)
    metrics = Metrics(registry, balancer, lambda: lookout.report)
    hub = Hub()
    pool = Pool(hub, connect_s=timeouts.connect_s, idle_s=timeouts.upstream_idle_s)
    means = GatewayContext(config, auth, registry=registry, balancer=balancer, pool=pool, gaps=metrics.gaps)
    logbook = LogStore(state.log_directory, config.logs)
    gateway = Gateway(
        means, metrics, access, tracing, control_socket=state.control_socket, followers_max=config.logs.followers_max
    )
    door = FrontDoor(
        b"gateway", gateway.answer, gateway.authenticate, hub, config.limits, timeouts, tls, gateway.refused,
        more_headers=gateway.more_headers, is_proxy=lambda peer: address_in(peer) in means.auth.proxies,
    )  # fmt: skip
    supervisor = Supervisor(config, registry, logbook, state)
    reloader = Reloader(config, file, supervisor, lambda new: _check(new, registry, gateway, logbook, door))
    prober = HealthChecker(registry, lambda: reloader.config.health, lambda: means.auth.proof)
    parts = AdminContext(
        registry, balancer, supervisor, logbook, reloader, lambda: means.auth,
        metrics=metrics, scraper=Scraper(registry, lambda: means.auth.proof),
        gateway_id=secrets.token_hex(8), started_at=time.time(),
    )  # fmt: skip
    app = control.make_app(parts)
    become_subreaper()
    async with trio.open_nursery() as base:
        base.start_soon(access.run_forever)
        base.start_soon(hub.run_forever)
        await base.start(pool.run_forever)
        await base.start(control.serve, app, state.control_socket)
        base.start_soon(logbook.follow_forever, lambda: _sources(registry, means.auth))
        base.start_soon(_prune_forever, state.log_directory, reloader)
        base.start_soon(reap_forever, lambda: supervisor.pids)
        base.start_soon(metrics.watch_loop_forever)
        base.start_soon(prober.probe_forever)
        base.start_soon(lookout.watch_forever, LOOK_S)
        base.start_soon(retry_forever, balancer)
        base.start_soon(reloader.watch_forever)
        base.start_soon(reloader.obey_signals_forever)
        try:
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async with trio.open_nursery() as doors:
                    async with trio.open_nursery() as workers:
                        await workers.start(supervisor.run)
                        doors.start_soon(door.serve_forever, listeners)
                        log.info("the gateway listens on %s:%d", settings.host, port)
                        _warn_of_strangers(settings.host, listeners, means.auth)
                        _warn_of_pages(settings.cors_origins, means.auth)
                        task_status.started(port)
                        await anext(signals)
                        log.info("told to stop: draining; a second signal hurries")
                        balancer.close()
                        doors.start_soon(_hurry_when_told, signals, door, supervisor)
                        await door.drain()
                        supervisor.stop()
                    logbook.close_streams()
                    await door.wait_until_left(LOG_END_S)
                    doors.cancel_scope.cancel()
        finally:
            pool.close_idle()
            logbook.close()
        base.cancel_scope.cancel()


async def _prune_forever(directory: str, reloader: Reloader) -> None:
    while True:
        await trio.to_thread.run_sync(prune, directory, reloader.config.logs.keep_days * PRUNE_S)
        await trio.sleep(PRUNE_S)


def _check(
    config: Config, registry: Registry, gateway: Gateway, logbook: LogStore, door: FrontDoor[Caller]
) -> ApplyConfig:
    """Make what a configuration needs, and give what puts it in force. Raises Exit 64."""
    tls, external, auth = secure_parts(config)

    def take(old: Config) -> None:
        settings, timeouts = config.server_settings, config.timeouts
        means = gateway.means
        balancer = means.balancer
        for name, endpoints in external.items():
            if _routes(old, name) == _routes(config, name):
                for kept, new in zip(registry.external[name], endpoints, strict=True):
                    kept.reconfigure(new)
        registry.external = {
            name: registry.external[name] if _routes(old, name) == _routes(config, name) else endpoints
            for name, endpoints in external.items()
        }
        registry.reconfigure(config)
        if auth.token != means.auth.token:
            registry.require_reauthentication()
        means.reconfigure(config, auth)
        gateway.cors = cors_of(settings.cors_origins, is_control)
        logbook.reconfigure(config)
        gateway.log_streams.in_flight_max = config.logs.followers_max
        door.timeouts = timeouts
        door.limits, door.tls = config.limits, tls
        logging.getLogger("ichat").setLevel(settings.log_level.upper())
        balancer.dispatch_waiting()

    return take


def _routes(config: Config, name: str) -> Sequence[object]:
    """Give all that makes the endpoints of an external model what they are; those that go on keep their counts."""
    routes = [route for route in config.external_routes if route.model_name == name]
    return [*routes, config.litellm_settings, config.routing.max_in_flight]


def _sources(registry: Registry, auth: Auth) -> Mapping[str, LogSource]:
    """Give the workers whose lines are to be fetched, with where they are reached."""
    found: dict[str, LogSource] = {}
    for worker in registry:
        if worker.heartbeat is not None and not worker.is_down and not worker.is_piped:
            host, port = worker.heartbeat.host, worker.heartbeat.port
            proof = b"" if worker.managed else auth.proof
            found[worker.id] = LogSource(worker.heartbeat.start_id, host, port, worker.unix_socket, proof)
    return found


def secure_parts(config: Config) -> tuple[ssl.SSLContext | None, Mapping[str, Sequence[Endpoint]], Auth]:
    """Make what needs certificates and keys: the front door's context, the external routes' endpoints, who may do what.

    Raises Exit 64 where one of them is missing or not usable.
    """
    settings = config.server_settings
    tls = None
    if settings.tls_certificate is not None and settings.tls_key is not None:
        tls = server_context(settings.tls_certificate, settings.tls_key)
    return tls, external_endpoints(config), Auth(config.security)


def _warn_of_strangers(host: str, listeners: list[socket.socket], auth: Auth) -> None:
    """Say what others than this machine may do with a gateway that they reach, if there are no keys."""
    if all(is_loopback(listener.getsockname()[0]) for listener in listeners) or (auth.has_keys and auth.has_admin_key):
        return
    if not auth.has_keys:
        log.warning(
            "no keys are configured: WHOEVER REACHES %s:%d MAY USE EVERY MODEL. Give each client one in"
            " [[security.keys]] (`./ichat.pyz key` makes it), or let server_settings.host be 127.0.0.1.",
            host,
            port_of(listeners),
        )
    if auth.is_bare:
        log.warning("whoever reaches %s may also read logs and states: see security.admin_key_env", host)
    if not auth.has_admin_key:
        log.info("only this machine may change anything: see security.admin_key_env")


def _warn_of_pages(origins: Sequence[str], auth: Auth) -> None:
    """Say what any page on the web may do where every origin is allowed and there are no keys."""
    if "*" in origins and not auth.has_keys:
        log.warning(
            'server_settings.cors_origins is "*" and no keys are configured: ANY PAGE that a browser opens that reaches'
            " this gateway MAY USE EVERY MODEL. Name the origins of your pages, or give clients keys."
        )


async def _hurry_when_told(signals: AsyncIterator[int], door: FrontDoor[Caller], supervisor: Supervisor) -> None:
    await anext(signals)
    log.info("told again: not waiting any longer")
    door.hurry()
    supervisor.hurry()
