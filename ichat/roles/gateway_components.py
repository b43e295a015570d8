"""The components of a gateway: how they are made, and how they change to another configuration."""

import functools
import logging
import secrets
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import attrs
import trio

from ichat.admin.calls import ControlCalls
from ichat.admin.config_state import ConfigInForce
from ichat.admin.events import EventStreams
from ichat.admin.key_store import KeyStore
from ichat.admin.overview import Overview
from ichat.admin.reload import ApplyConfig, ConfigFile, Reconfigurable, Reloader
from ichat.config.load import contradictions_of_all_limits
from ichat.config.schema import Config
from ichat.errors import EXIT_USAGE, Exit
from ichat.fleet.fleet import Fleet
from ichat.fleet.health_checks import HealthChecker
from ichat.fleet.heartbeats import HeartbeatReceiver
from ichat.fleet.order_file import load_orders
from ichat.fleet.order_store import OrderStore
from ichat.fleet.prefix_reports import PrefixReportReceiver
from ichat.fleet.ray_machines import ray_machines_of
from ichat.fleet.registered_servers import Server, read_servers
from ichat.fleet.worker_table import WorkerTable
from ichat.hardware.host import CpuMeter
from ichat.hardware.machines import MachineMonitor
from ichat.http.front_door import FrontDoor
from ichat.http.hub import Hub
from ichat.http.pool import Pool
from ichat.http.tls import server_context
from ichat.observability.access_log import AccessLog
from ichat.observability.history import History
from ichat.observability.logs.store import LogStore
from ichat.observability.metrics import Metrics
from ichat.observability.scrape import Scraper
from ichat.observability.tracing import Tracing
from ichat.observability.usage.ledger import Ledger, families_of
from ichat.observability.usage.store import UsageStore
from ichat.proxy.context import GatewayContext
from ichat.proxy.control_plane import ControlPlane
from ichat.proxy.external_routes import external_endpoints, with_kept_routes
from ichat.proxy.finished_requests import FinishedRequests
from ichat.proxy.handler import Gateway
from ichat.proxy.shadow import Shadows
from ichat.relays.earlier_requests import EarlierPlaces
from ichat.relays.figures import RelayFigures, families_of_all
from ichat.relays.owner import Relays
from ichat.relays.owner_desk import OwnerDesk
from ichat.relays.relay_notes import peer_of
from ichat.relays.timers import Timers
from ichat.relays.values import TrioClock
from ichat.routing.balancer import Balancer
from ichat.routing.endpoint import Endpoint
from ichat.security.auth import Auth, Caller
from ichat.security.key_file import load_keys
from ichat.security.keys import ray_token
from ichat.security.made_keys import NO_KEYS, MadeKeys
from ichat.security.origins import site_of
from ichat.security.rate_limits import Quotas
from ichat.supervisor.kept import KeptDescriptors
from ichat.supervisor.state import StateDirectory
from ichat.supervisor.supervisor import Supervisor
from ichat.takeover.under_way import RequestsOfOthers

log = logging.getLogger(__name__)


@attrs.frozen
class SecureParts:
    """Made of a configuration before it is applied: certificates, routes and keys."""

    tls: ssl.SSLContext | None
    external: Mapping[str, Sequence[Endpoint]]
    servers: Mapping[str, Server]
    auth: Auth


def secure_parts(config: Config, made: MadeKeys = NO_KEYS, secret: str = "") -> SecureParts:
    """Make the parts that need certificates and keys, beside the keys made over the API and the gateway's own secret.

    Raises Exit 64 where one of them is missing or not usable.
    """
    if problems := sorted(made.contradictions(config, time.time())):
        raise Exit(EXIT_USAGE, f"The configuration contradicts made keys: {'; '.join(problems)}.")
    settings = config.server_settings
    ray_token(config.ray)
    tls = None
    if settings.tls_certificate is not None and settings.tls_key is not None:
        tls = server_context(settings.tls_certificate, settings.tls_key)
    return SecureParts(
        tls, external_endpoints(config), read_servers(config), auth_of(config, made, time.time(), secret)
    )


def auth_of(config: Config, made: MadeKeys, now: float, secret: str) -> Auth:
    """Return the rules of access of a configuration beside made keys and the secret. Raises Exit 64."""
    site = site_of(config.server_settings)
    return Auth(config.security, made.active(now), needs_keys=made.is_used, secret=secret, site=site)


@attrs.frozen
class Control:
    """The parts that know and start workers, and keep data beyond a request; nothing runs yet."""

    auth: Auth
    fleet: Fleet
    balancer: Balancer
    """Its queues show which models to load."""
    quotas: Quotas
    ledger: Ledger
    log_store: LogStore
    heartbeats: HeartbeatReceiver
    orders: OrderStore
    """For workers on other machines."""
    supervisor: Supervisor
    monitor: MachineMonitor
    kept: KeptDescriptors
    """Of managed workers: relays have them too."""


@attrs.frozen
class DataPlane:
    """The parts that answer requests; nothing runs yet."""

    access: AccessLog
    hub: Hub
    context: GatewayContext
    metrics: Metrics
    prefix_reports: PrefixReportReceiver
    handler: Gateway
    door: FrontDoor[Caller]
    """For clients; with relays, for the requests that they forward."""
    relays: Relays | None
    """The processes that have the clients' connections; None: this process has them."""
    figures: list[RelayFigures]
    """Of these, or of the relays that an old process has left to end here."""


@attrs.frozen
class Components:
    """The objects of a gateway; nothing runs yet."""

    control: Control
    data: DataPlane
    reloader: Reloader
    key_store: KeyStore
    checker: HealthChecker
    history: History
    events: EventStreams
    reconfiguration: "Reconfiguration"
    others: RequestsOfOthers
    """The requests under way at processes that had this gateway before."""
    calls: ControlCalls
    """Those of the control plane that are under way."""
    serve_control: Callable[..., Awaitable[Any]]
    """Serves the control plane; not started yet."""


def import_parts() -> None:
    """Import the modules that `build` imports late."""
    from ichat.admin import app, open_routes, openapi
    from ichat.supervisor import engine_flags

    del app, open_routes, openapi, engine_flags


def build(config: Config, file: ConfigFile | None, state: StateDirectory, tracing: Tracing) -> Components:
    """Make every component of a gateway. Raises Exit 64 where a certificate or a key is missing or not usable."""
    made, left_out = load_keys(state.keys_file).at_start(config, time.time())
    for sentence in left_out:
        log.error("%s", sentence)
    parts = secure_parts(config, made, state.secret)
    control = build_control(config, made.merged_with(config), parts, state)
    data = build_data_plane(made.merged_with(config), control, parts.tls, state, tracing)
    return _build_operation(config, file, control, data, made=made, state=state)


def build_control(config: Config, with_made: Config, parts: SecureParts, state: StateDirectory) -> Control:
    """Make the parts that know and start workers; `with_made` has the keys, too, that were made over the API."""
    fleet = Fleet(parts.external, trio.current_time, config.routing.max_in_flight, config.timeouts.wedged_after_s)
    fleet.reconfigure(config)
    fleet.registry.use_servers(parts.servers)
    balancer = Balancer(fleet.directory.availability, trio.current_time, config.routing)
    fleet.table.changed.add(balancer.dispatch_waiting)
    quotas = Quotas(with_made.limits, with_made.security.keys, with_made.prices)
    ledger = Ledger(config.usage, UsageStore(state.path), fleet.directory.has, quotas)
    log_store = LogStore(state.log_directory, config.logs)
    gateway_id = secrets.token_hex(8)
    heartbeats = HeartbeatReceiver(fleet.registry, fleet.table, parts.auth, config.limits, gateway_id=gateway_id)
    heartbeats.moved.add(log_store.changed)
    orders = OrderStore(state.orders_file, load_orders(state.orders_file), fleet, config)
    fleet.table.use_proofs(orders.proof_of)
    parts.auth.use_worker_keys(orders)
    kept = KeptDescriptors(is_shared=bool(config.server_settings.relays))
    supervisor = Supervisor(config, fleet, balancer, log_store, state, kept=kept)
    monitor = MachineMonitor(supervisor, gpus=supervisor.gpus, others=ray_machines_of(config, fleet.table))
    return Control(
        parts.auth, fleet, balancer, quotas, ledger, log_store, heartbeats, orders, supervisor, monitor, kept,
    )  # fmt: skip


def build_data_plane(
    config: Config, control: Control, tls: ssl.SSLContext | None, state: StateDirectory, tracing: Tracing
) -> DataPlane:
    """Make the parts that answer requests: they read the fleet by its view, and report to the ledger."""
    from ichat.admin.open_routes import OpenRoutes  # its frameworks are not needed to report a wrong configuration
    from ichat.admin.openapi import document

    auth, fleet, balancer, timeouts = control.auth, control.fleet, control.balancer, config.timeouts
    access = AccessLog(config.logs.access_log, config.logs.access_lines_max, config.logs.format)
    hub = Hub()
    metrics = Metrics(fleet.table, fleet.directory, balancer, control.monitor, control.supervisor.loader.counts)
    pool = Pool(hub, connect_s=timeouts.connect_s, idle_s=timeouts.upstream_idle_s)
    context = GatewayContext(
        config, auth, control.quotas,
        directory=fleet.directory, table=fleet.table, balancer=balancer, gaps=metrics.gaps, pool=pool,
        shadows=Shadows(balancer, pool, metrics.shadows, config.routing.shadows_max),
    )  # fmt: skip
    prefix_reports = PrefixReportReceiver(control.heartbeats, fleet.table, balancer.prefixes)
    prefix_reports.evicted.add(metrics.prefixes_evicted)
    handler = Gateway(
        context, metrics, access, tracing, control.heartbeats, ledger=control.ledger, prefix_reports=prefix_reports,
        orders=control.orders,
        control=ControlPlane(context, state.control_socket, OpenRoutes(context, document), config),
        finished=FinishedRequests(config.logs.finished_requests_max),
    )  # fmt: skip
    relays = make_relays(config, control, handler, state) if config.server_settings.relays else None
    door = FrontDoor(
        b"gateway", handler.answer, handler.authenticate, hub, config.limits, timeouts, None if relays else tls,
        handler.refused, more_headers=handler.more_headers, peer_of=peer_of if relays else None,
        is_proxy=auth.is_proxy,
    )  # fmt: skip
    figures = [] if relays is None else [relays.figures]
    return DataPlane(access, hub, context, metrics, prefix_reports, handler, door, relays, figures)


def make_relays(config: Config, control: Control, handler: Gateway, state: StateDirectory) -> Relays:
    """Make the object for the relays of a gateway, which none has to have."""
    ledger = control.ledger
    relays = Relays(
        handler.context.pool.hub, state.path, config,
        log_format=config.logs.format, kept=control.kept, term=state.term,
        marks=ledger.marks if ledger.enabled else None,
    )  # fmt: skip
    ledger.follow(relays.newest_outcomes, relays.settle)
    return relays


def begin_desks(nursery: trio.Nursery, relays: Relays, handler: Gateway, table: WorkerTable) -> None:
    """Have the requests of relays answered as those of this process are."""
    timers, clock = Timers(), TrioClock.read(trio.current_time(), time.monotonic_ns())
    nursery.start_soon(timers.run_forever)
    places = EarlierPlaces(handler.context, table)
    relays.desk_of = functools.partial(
        OwnerDesk, handler=handler, timers=timers, clock=clock, places=places, decisions=relays.figures.decisions
    )


def inner_door(components: Components) -> FrontDoor[Caller]:
    """Return a door for the requests that other processes of this gateway forward."""
    handler, config = components.data.handler, components.reloader.config
    return FrontDoor(
        b"gateway", handler.answer, handler.authenticate, components.data.hub, config.limits, config.timeouts, None,
        handler.refused, more_headers=handler.more_headers, peer_of=peer_of,
    )  # fmt: skip


def _build_operation(
    config: Config, file: ConfigFile | None, control: Control, data: DataPlane, *, made: MadeKeys, state: StateDirectory
) -> Components:
    """Make the parts for operators, which change and show both: reloads, keys, the history, and their routes."""
    from ichat.admin.app import make_app, serve
    from ichat.supervisor.engine_flags import EngineFlags

    auth, fleet, balancer, ledger = control.auth, control.fleet, control.balancer, control.ledger
    context, metrics = data.context, data.metrics
    checker = HealthChecker(fleet.probes, config.health, auth)
    scraper = Scraper(fleet.table, config.limits.scraped_workers_max, auth)
    history = History(config.history, fleet.table, fleet.directory, balancer, traffic=metrics)
    in_force = ConfigInForce(config)
    put_in_force = functools.partial(
        put_keys_in_force, auth=auth, quotas=control.quotas, metrics=metrics, in_force=in_force
    )
    key_store = KeyStore(
        made, state.keys_file, in_force, put_in_force,
        is_kept=state.is_kept, keeps_usage=ledger.enabled,
    )  # fmt: skip
    # Every component with a part of the configuration belongs in this list, or a reload forgets it.
    reconfigured: Sequence[Reconfigurable] = [
        fleet, balancer, control.quotas, context.pool, context, context.shadows, data.handler, control.heartbeats,
        data.door, control.log_store, control.orders, checker, scraper, ledger, history,
        *([] if data.relays is None else [data.relays]),
    ]  # fmt: skip
    reconfiguration = Reconfiguration(
        auth, fleet, data.door, balancer, key_store, reconfigured, keeps_usage=ledger.enabled,
        has_relays=data.relays is not None,
    )  # fmt: skip
    prepare = None if data.relays is None else data.relays.settings.prepare
    reloader = Reloader(in_force, file, control.supervisor, reconfiguration.check, prepare=prepare)
    overview = Overview(
        fleet.table, fleet.directory, context, control.monitor, history,
        data.handler.in_flight, data.handler.lanes, control.heartbeats.gateway_id, time.time(),
        state.starts, data.figures,
    )  # fmt: skip
    events = EventStreams(overview, ledger, reloader)
    reloader.applied.add(events.send_reload)
    reloader.state_changed.add(functools.partial(events.send_to_all, "config"))
    key_store.listeners.add(ledger.wake)
    key_store.listeners.add(functools.partial(events.send_to_all, "keys", dict[str, str]()))
    metrics.others.extend((functools.partial(families_of, ledger), reloader.families, state.starts.families))
    scaler, learner = control.supervisor.scaler, control.supervisor.learner
    metrics.others.extend((functools.partial(families_of_all, data.figures), scaler.families, learner.families))
    calls = ControlCalls()
    shown = [
        calls, fleet.table, control.supervisor, control.log_store, reloader, auth, context.seal, control.quotas,
        key_store, metrics, scraper, control.heartbeats, control.orders, data.prefix_reports, ledger, overview, events,
        EngineFlags(), CpuMeter(), data.handler.finished,
    ]  # fmt: skip
    return Components(
        control, data, reloader, key_store, checker, history, events, reconfiguration,
        RequestsOfOthers(data.handler, fleet.table), calls,
        functools.partial(serve, make_app({type(one): one for one in shown}), state.control_socket),
    )  # fmt: skip


@attrs.frozen
class Reconfiguration:
    """Applies another configuration to every component that holds a part of it."""

    auth: Auth
    fleet: Fleet
    door: FrontDoor[Caller]
    balancer: Balancer
    key_store: KeyStore
    components: Sequence[Reconfigurable]
    keeps_usage: bool = True
    """Whether there is a ledger: only another start can change that."""
    has_relays: bool = False
    """Whether relays have the clients' connections, and so the certificate."""

    def check(self, config: Config) -> ApplyConfig:
        """Make the parts that another configuration needs, and return a function that applies it. Raises Exit 64."""
        if not self.keeps_usage:
            counted = attrs.evolve(config, usage=attrs.evolve(config.usage, enabled=False))
            if problems := sorted(contradictions_of_all_limits(counted)):
                raise Exit(
                    EXIT_USAGE, f"Start the gateway again for this, as it keeps no usage: {'; '.join(problems)}."
                )
        parts = secure_parts(config, self.key_store.made, self.auth.secret)
        for worker_id in parts.servers:
            if (known := self.fleet.table.get(worker_id)) is not None and known.managed:
                what = f"{worker_id!r} is the id of a worker that this gateway manages: name another"
                raise Exit(EXIT_USAGE, f"registered_servers: worker_id {what}.")
        return functools.partial(self._apply, config, parts)

    def _apply(self, config: Config, parts: SecureParts, old: Config) -> None:
        directory = self.fleet.directory
        directory.use_routes(with_kept_routes(parts.external, directory.external, old, config))
        self.fleet.registry.use_servers(parts.servers)
        if parts.auth.token != self.auth.token:
            self.fleet.table.require_reauthentication()
        self.auth.replace(parts.auth)
        if not self.has_relays:
            self.door.use_certificate(parts.tls)
        with_made = self.key_store.made.merged_with(config)
        for component in self.components:
            component.reconfigure(with_made)
        logging.getLogger("ichat").setLevel(config.server_settings.log_level.upper())
        self.balancer.dispatch_waiting()


def put_keys_in_force(
    made: MadeKeys, now: float, *, auth: Auth, quotas: Quotas, metrics: Metrics, in_force: ConfigInForce
) -> None:
    """Use other keys that were made over the API: those of them that are active at this time."""
    with_made = made.merged_with(in_force.config)
    auth.replace(auth_of(in_force.config, made, now, auth.secret))
    quotas.reconfigure(with_made)
    metrics.keep_keys([key.name for key in with_made.security.keys])
