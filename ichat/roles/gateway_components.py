"""The components of a gateway: how they are made, and how they go on with another configuration."""

import functools
import logging
import secrets
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import attrs
import trio

from ichat.admin.events import EventStreams
from ichat.admin.key_store import KeyStore
from ichat.admin.overview import Overview
from ichat.admin.reload import ApplyConfig, ConfigFile, Reconfigurable, Reloader
from ichat.config.load import contradictions_of_all_limits
from ichat.config.schema import Config
from ichat.errors import EXIT_USAGE, Exit
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
from ichat.observability.usage.ledger import Ledger
from ichat.proxy.context import GatewayContext
from ichat.proxy.external_routes import external_endpoints
from ichat.proxy.handler import Gateway
from ichat.proxy.health_checks import HealthChecker
from ichat.proxy.heartbeats import HeartbeatReceiver
from ichat.proxy.prefix_reports import PrefixReportReceiver
from ichat.proxy.shadow import Shadows
from ichat.routing.balancer import Balancer
from ichat.routing.endpoint import Endpoint
from ichat.routing.registry import Registry
from ichat.security.addresses import address_in
from ichat.security.auth import Auth, Caller
from ichat.security.key_file import load_keys
from ichat.security.made_keys import NO_KEYS, MadeKeys
from ichat.security.origins import site_of
from ichat.supervisor.state import StateDirectory
from ichat.supervisor.supervisor import Supervisor

log = logging.getLogger(__name__)


@attrs.frozen
class SecureParts:
    """What a configuration needs beside itself, made before anything is applied: certificates, routes and keys."""

    tls: ssl.SSLContext | None
    external: Mapping[str, Sequence[Endpoint]]
    auth: Auth


def secure_parts(config: Config, made: MadeKeys = NO_KEYS, secret: str = "") -> SecureParts:
    """Make what needs certificates and keys, beside those that were made over the API and the gateway's own secret.

    Raises Exit 64 where one of them is missing or not usable.
    """
    if problems := sorted(made.contradictions(config, time.time())):
        raise Exit(EXIT_USAGE, f"The configuration contradicts made keys: {'; '.join(problems)}.")
    settings = config.server_settings
    tls = None
    if settings.tls_certificate is not None and settings.tls_key is not None:
        tls = server_context(settings.tls_certificate, settings.tls_key)
    return SecureParts(tls, external_endpoints(config), auth_of(config, made, time.time(), secret))


def auth_of(config: Config, made: MadeKeys, now: float, secret: str) -> Auth:
    """Return the rules of access of a configuration beside made keys and the secret. Raises Exit 64."""
    site = site_of(config.server_settings)
    return Auth(config.security, made.active(now), needs_keys=made.is_used, secret=secret, site=site)


@attrs.frozen
class Components:
    """The objects of one gateway; nothing runs yet."""

    access: AccessLog
    hub: Hub
    context: GatewayContext
    metrics: Metrics
    monitor: MachineMonitor
    log_store: LogStore
    door: FrontDoor[Caller]
    supervisor: Supervisor
    reloader: Reloader
    ledger: Ledger
    key_store: KeyStore
    checker: HealthChecker
    serve_control: Callable[..., Awaitable[Any]]
    """Serves the control plane; to be started."""
    log_directory: str
    history: History
    events: EventStreams
    reconfigured: Sequence[Reconfigurable]
    """What goes on with another configuration at a reload."""


def build(config: Config, file: ConfigFile | None, state: StateDirectory, tracing: Tracing) -> Components:
    """Make every component of a gateway. Raises Exit 64 where a certificate or a key is missing or not usable."""
    from ichat.admin import app as control  # its frameworks are not needed to report a wrong configuration
    from ichat.admin.open_routes import OpenRoutes
    from ichat.admin.routes import AdminContext

    made, left_out = load_keys(state.keys_file).at_start(config, time.time())
    for sentence in left_out:
        log.error("%s", sentence)
    parts, timeouts = secure_parts(config, made, state.secret), config.timeouts
    access = AccessLog(config.logs.access_log, config.logs.access_lines_max)
    registry = Registry(parts.external, trio.current_time, config.routing.max_in_flight, timeouts.wedged_after_s)
    registry.reconfigure(config)
    balancer = Balancer(registry.availability, trio.current_time, config.routing)
    registry.add_listener(balancer.dispatch_waiting)
    hub = Hub()
    pool = Pool(hub, connect_s=timeouts.connect_s, idle_s=timeouts.upstream_idle_s)
    monitor = MachineMonitor(lambda: supervisor.pids)
    metrics = Metrics(registry, balancer, lambda: monitor.report, lambda: supervisor.loader.counts)
    history = History(config.history, registry, balancer, metrics.traffic, lambda: metrics.in_flight)
    shadows = Shadows(balancer, metrics.shadows, config.routing.shadows_max)
    context = GatewayContext(
        made.merged_with(config), parts.auth,
        registry=registry, balancer=balancer, pool=pool, gaps=metrics.gaps, shadows=shadows,
    )  # fmt: skip
    ledger = Ledger(config.usage, state.path, registry.has, context.quotas)
    metrics.others.append(ledger.families)
    log_store = LogStore(state.log_directory, config.logs)
    heartbeats = HeartbeatReceiver(
        registry, lambda: context.auth, config.limits, gateway_id=secrets.token_hex(8), moved=log_store.changed
    )
    prefix_reports = PrefixReportReceiver(heartbeats, registry, balancer.prefixes, evicted=metrics.prefixes_evicted)
    handler = Gateway(
        context, metrics, access, tracing, heartbeats, ledger=ledger, prefix_reports=prefix_reports,
        control_socket=state.control_socket, open_routes=OpenRoutes(lambda: context.settings), config=config,
    )  # fmt: skip
    door = FrontDoor(
        b"gateway", handler.answer, handler.authenticate, hub, config.limits, timeouts, parts.tls, handler.refused,
        more_headers=handler.more_headers, is_proxy=lambda peer: address_in(peer) in context.auth.proxies,
    )  # fmt: skip
    checker = HealthChecker(registry, config.health, lambda: context.auth.proof)
    supervisor = Supervisor(config, registry, balancer, log_store, state)
    scraper = Scraper(registry, config.limits.scraped_workers_max, lambda: context.auth.proof)
    # Whatever holds a part of the configuration belongs in this list, or a reload forgets it.
    reconfigured: Sequence[Reconfigurable] = [
        registry, balancer, context.quotas, pool, context, shadows, handler, heartbeats, door, log_store, checker,
        scraper, ledger, history,
    ]  # fmt: skip
    check_config = functools.partial(
        check, reconfigured, context, door, lambda: key_store.made, keeps_usage=ledger.enabled
    )
    reloader = Reloader(config, file, supervisor, check_config)
    put_in_force = functools.partial(put_keys_in_force, context, metrics, lambda: reloader.config)
    key_store = KeyStore(
        made, state.keys_file, reloader, put_in_force, is_kept=state.is_kept, keeps_usage=ledger.enabled
    )
    key_store.add_listener(ledger.wake)
    overview = Overview(
        registry, balancer, lambda: context.aliases, lambda: monitor.report, history,
        handler.in_flight, heartbeats.gateway_id, time.time(),
    )  # fmt: skip
    events = EventStreams(overview)
    events.usage_storage = lambda: ledger.storage
    reloader.when_applied = events.tell_reload
    key_store.add_listener(functools.partial(events.send_to_all, "keys", dict[str, str]()))
    admin = AdminContext(
        registry, balancer, supervisor, log_store, reloader, lambda: context.auth,
        quotas=context.quotas, key_store=key_store, metrics=metrics, scraper=scraper,
        heartbeats=heartbeats, prefix_reports=prefix_reports, aliases=lambda: context.aliases,
        prompt_lengths=context.prompt_lengths, ledger=ledger, overview=overview, events=events,
        started_at=overview.started_at,
    )  # fmt: skip
    return Components(
        access, hub, context, metrics, monitor, log_store, door, supervisor, reloader, ledger, key_store, checker,
        functools.partial(control.serve, control.make_app(admin), state.control_socket), state.log_directory,
        history, events, reconfigured,
    )  # fmt: skip


def check(
    reconfigured: Sequence[Reconfigurable],
    context: GatewayContext,
    door: FrontDoor[Caller],
    made: Callable[[], MadeKeys],
    config: Config,
    *,
    keeps_usage: bool = True,
) -> ApplyConfig:
    """Make what another configuration needs, and return what puts it in force. Raises Exit 64.

    `keeps_usage` says that there is a ledger: only another start can change that.
    """
    if not keeps_usage:
        counted = attrs.evolve(config, usage=attrs.evolve(config.usage, enabled=False))
        if problems := sorted(contradictions_of_all_limits(counted)):
            raise Exit(EXIT_USAGE, f"Start the gateway again for this, as it keeps no usage: {'; '.join(problems)}.")
    parts = secure_parts(config, made(), context.auth.secret)

    def apply(old: Config) -> None:
        registry = context.registry
        registry.external = _with_kept_routes(parts.external, registry.external, old, config)
        if parts.auth.token != context.auth.token:
            registry.require_reauthentication()
        context.auth, door.tls = parts.auth, parts.tls
        with_made = made().merged_with(config)
        for component in reconfigured:
            component.reconfigure(with_made)
        logging.getLogger("ichat").setLevel(config.server_settings.log_level.upper())
        context.balancer.dispatch_waiting()

    return apply


def put_keys_in_force(
    context: GatewayContext, metrics: Metrics, config: Callable[[], Config], made: MadeKeys, now: float
) -> None:
    """Go on with other keys that were made over the API: those of them that are active at this time."""
    with_made = made.merged_with(config())
    context.auth = auth_of(config(), made, now, context.auth.secret)
    context.quotas.reconfigure(with_made)
    metrics.keep_keys([key.name for key in with_made.security.keys])


def _with_kept_routes(
    new: Mapping[str, Sequence[Endpoint]], current: Mapping[str, Sequence[Endpoint]], before: Config, config: Config
) -> Mapping[str, Sequence[Endpoint]]:
    """Return the new endpoints of external routes, those whose settings have not changed with their counts."""

    def settings_of(config: Config, name: str) -> Sequence[object]:
        routes = [route for route in config.external_routes if route.model_name == name]
        defaults = config.litellm_settings
        return [
            *routes, defaults.drop_params, defaults.additional_drop_params, defaults.allowed_openai_params,
            config.routing.max_in_flight,
        ]  # fmt: skip

    kept = {name for name in new if settings_of(before, name) == settings_of(config, name)}
    for name in kept:
        for endpoint, changed in zip(current[name], new[name], strict=True):
            endpoint.reconfigure(changed)
    for name in current.keys() - kept:
        for endpoint in current[name]:
            endpoint.forget_prefixes()  # or the index of prefixes would keep it for good
    return {name: current[name] if name in kept else endpoints for name, endpoints in new.items()}
