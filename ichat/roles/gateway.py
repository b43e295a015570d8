"""The gateway: a front door before many workers. `gateway_components.build` makes it, `run` starts and stops it.

components                             plain objects: nothing runs yet
└ access log                           written in the background
└ hub                                  sockets' events; ends last
└ pool                                 connections to upstreams
└ shadows                              copies of requests; they end before the workers
└ control plane                        hypercorn on a unix socket
└ log store                            a follower for each registered worker
└ reloader                             watches the file, and obeys SIGHUP
└ key store                            refuses keys that expire
└ supervisor                           a task for each managed worker
└ front door └ connection └ exchange
"""

import contextlib
import logging
import math
import os
import pathlib
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from functools import partial

import trio

from ichat.admin.reload import ConfigFile, Reloader, fingerprint
from ichat.config.command_line import CommandLineParser
from ichat.config.own_secret import GATEWAY, announced, console_link, directory_for, local_url
from ichat.config.schema import Config, ServerSettings
from ichat.errors import EXIT_UNAVAILABLE, EXIT_USAGE, Exit
from ichat.fleet.waiting import retry_forever
from ichat.fleet.worker_table import WorkerTable
from ichat.hardware.machines import LOOK_S
from ichat.http.listeners import adopt_listeners, close_all, open_listeners, open_unix_listener, port_of
from ichat.observability.logs.files import prune
from ichat.observability.logs.log_format import LOG_FORMATS
from ichat.observability.logs.store import LogSource
from ichat.observability.tracing import open_tracing
from ichat.observability.usage.earlier_use import restore_windows
from ichat.preflight.facts import port_holders
from ichat.preflight.obstacles import problems_of_port
from ichat.proxy.context import GatewayContext
from ichat.relays.earlier_outcomes import earlier_use
from ichat.relays.earlier_requests import EarlierPlaces
from ichat.relays.owner import Relays
from ichat.relays.owner_desk import OwnerDesk
from ichat.relays.timers import Timers
from ichat.relays.values import TrioClock
from ichat.roles.gateway_components import Components, Control, build, secure_parts
from ichat.security.addresses import is_loopback
from ichat.security.auth import Auth
from ichat.security.key_file import load_keys
from ichat.security.made_keys import NO_KEYS, MadeKeys
from ichat.service_manager import Notifier, become_subreaper
from ichat.supervisor.orphans import KnownPids, reap_forever
from ichat.supervisor.state import StateDirectory, open_state

log = logging.getLogger(__name__)

CONFIG_FILE = "ichat.toml"
"""The configuration where none is named, if it is in the working directory."""
DAY_S = 24 * 3600.0
END_S = 30.0
"""The time for the rest of the end, after the drain and the end of the workers."""
KILL_S = 5.0
"""How long killed relays may need for their end."""
LOG_END_S = 2.0
"""How long clients that follow a log have to get its last lines when the gateway ends."""


def read_command_line(argv: Sequence[str]) -> tuple[Config, ConfigFile]:
    """Read the gateway's flags and the configuration that they name; return it and its file. Raises Exit 64."""
    args = parser().parse_args(list(argv))
    path = pathlib.Path(args.config or CONFIG_FILE)
    file = ConfigFile(path, fingerprint(path), args.log_format)
    is_there = args.config is not None or os.path.lexists(path)
    if args.check and not is_there:
        raise Exit(EXIT_USAGE, f"There is no {CONFIG_FILE} here to check; -c FILE names another file.")
    config = file.load() if is_there else file.with_flags(Config())
    if args.check:
        from ichat.roles.gateway_check import verdict_on

        secure_parts(config, _kept_keys(config))
        raise verdict_on(config, str(path))
    return config, file


def _kept_keys(config: Config) -> MadeKeys:
    """Return the made keys that a gateway with this configuration has, if this user may read them. Raises Exit 69."""
    directory = directory_for(config.server_settings)
    path = "" if directory is None else StateDirectory(directory, "").keys_file
    return load_keys(path) if os.access(path, os.R_OK) else NO_KEYS


def parser() -> CommandLineParser:
    """Return the parser of the gateway's flags."""
    usage = CommandLineParser(
        prog="ichat.pyz gateway",
        description="Serve many models behind a single OpenAI-compatible entry.",
        allow_abbrev=False,
    )
    usage.add_argument(
        "--config",
        "-c",
        metavar="FILE",
        help=f"TOML; ichat.toml.example explains every key. Left out: {CONFIG_FILE} here; without that the gateway"
        " begins empty, on 127.0.0.1:4000",
    )
    usage.add_argument("--check", action="store_true", help="check it and what its workers need here, and exit")
    usage.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        help="how the log's lines look, instead of logs.format: short text on a terminal (auto), text, or json",
    )
    return usage


async def run(
    config: Config,
    file: ConfigFile | None = None,
    *,
    notifier: Notifier | None = None,
    task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run the gateway until a signal stops it; `started` with its port. Raises Exit where it cannot listen.

    `file` has the configuration, and is read again when it changes. `notifier` has started this process.
    """
    notifier = notifier or Notifier()
    with (
        open_state(config.server_settings, config.logs.directory) as state,
        contextlib.closing(open_tracing()) as tracing,
    ):
        components = build(config, file, state, tracing)
        relays = components.data.relays
        adopted = [] if relays is None else await relays.find()
        listeners = await _open_listeners(config.server_settings, notifier, adopted)
        inner = [open_unix_listener(state.inner_socket)] if components.data.relays is not None else []
        become_subreaper()
        with announced(state.path, [listener.getsockname()[:2] for listener in listeners]):
            async with _ending_relays(relays), trio.open_nursery() as background:
                await _start_background(background, components, state.log_directory, notifier)
                try:
                    await _serve_until_told(components, listeners, inner, notifier, task_status)
                finally:
                    close_all(listeners)
                    components.data.context.pool.close_idle()
                    components.control.log_store.close()
                background.cancel_scope.cancel()


async def _open_listeners(
    settings: ServerSettings, notifier: Notifier, adopted: list[socket.socket]
) -> list[socket.socket]:
    """Listen as configured: with the listeners of relays, or the service manager's where they have these addresses."""
    handed = adopt_listeners(notifier.descriptors)
    if adopted:
        close_all(handed)  # the same sockets, if they have these addresses
        return adopted
    try:
        listeners = await open_listeners(settings.host, settings.port, handed)
    except Exit:
        holders = await trio.to_thread.run_sync(port_holders, settings.port)
        if any(one.relay_of for one in holders):
            [sentence] = problems_of_port(settings.host, settings.port, "taken", holders)
            raise Exit(EXIT_UNAVAILABLE, sentence) from None
        raise
    for sock in handed:
        if sock not in listeners:
            log.warning(
                "the service manager's socket %s is not used: it has no address of server_settings.host and port",
                sock.getsockname(),
            )
            sock.close()
    return listeners


async def _report_life_forever(notifier: Notifier) -> None:
    """Let the service manager know that this loop still runs, twice in the time that it waits for that."""
    while notifier.watchdog_s:
        notifier.send("WATCHDOG=1")
        await trio.sleep(notifier.watchdog_s / 2)


@contextlib.asynccontextmanager
async def _ending_relays(relays: Relays | None) -> AsyncGenerator[None]:
    """End the relays if this task is cancelled from outside: they outlive an error, and wait for the next start."""
    try:
        yield
    finally:
        if relays is not None and trio.current_effective_deadline() == -math.inf:
            with trio.move_on_after(KILL_S, shield=True):
                await relays.kill_all()


async def _start_background(nursery: trio.Nursery, components: Components, directory: str, notifier: Notifier) -> None:
    """Start the tasks that the front door and the workers need, and that end after them. `directory` has the logs."""
    control, data, reloader = components.control, components.data, components.reloader
    context, supervisor = data.context, control.supervisor
    nursery.start_soon(_report_life_forever, notifier)
    nursery.start_soon(data.access.run_forever)
    nursery.start_soon(data.hub.run_forever)
    await nursery.start(context.pool.run_forever)
    await nursery.start(context.shadows.run_forever)
    await nursery.start(components.serve_control)
    await nursery.start(control.ledger.run)
    nursery.start_soon(control.log_store.follow_forever, LogSources(control.fleet.table, control.auth))
    nursery.start_soon(_prune_forever, directory, reloader)
    nursery.start_soon(reap_forever, supervisor if data.relays is None else KnownPids((supervisor, data.relays)))
    nursery.start_soon(data.metrics.watch_loop_forever)
    nursery.start_soon(components.checker.probe_forever)
    nursery.start_soon(control.monitor.watch_forever, LOOK_S)
    nursery.start_soon(components.history.sample_forever)
    nursery.start_soon(components.events.run_forever)
    nursery.start_soon(retry_forever, context.balancer)
    nursery.start_soon(reloader.watch_forever)
    nursery.start_soon(reloader.obey_signals_forever, notifier.reloading)
    nursery.start_soon(components.key_store.expire_forever)


async def _serve_until_told(
    components: Components,
    listeners: list[socket.socket],
    inner: list[socket.socket],
    notifier: Notifier,
    task_status: trio.TaskStatus[int],
) -> None:
    """Serve until a signal; then drain the front door, end the workers, and let the streams of logs end.

    With relays, those accept from the listeners, and the front door is for the requests that they forward to `inner`.
    """
    door, supervisor, relays = components.data.door, components.control.supervisor, components.data.relays
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as doors:
            async with trio.open_nursery() as workers:
                if relays is not None:
                    timers = Timers()
                    doors.start_soon(timers.run_forever)
                    places = EarlierPlaces(components.data.context, components.control.fleet.table)
                    relays.desk_of = partial(
                        OwnerDesk, handler=components.data.handler, timers=timers, clock=_clock(), places=places
                    )
                    await doors.start(relays.run, listeners)
                await _restore_windows(components.control, relays)
                await workers.start(supervisor.run)
                doors.start_soon(door.serve_forever, listeners if relays is None else inner)
                if relays is not None:
                    await relays.open()
                _announce(components.data.context, listeners, components.reloader.path)
                _announce_emptiness(components.reloader)
                notifier.ready()
                task_status.started(port_of(listeners))
                await anext(signals)
                timeouts = components.reloader.config.timeouts
                notifier.stopping(timeouts.drain_s + timeouts.stop_s + END_S)
                log.info("stop signal: draining; a second signal stops at once")
                components.data.context.balancer.close()
                doors.start_soon(_hurry_when_told, signals, components)
                if relays is not None:
                    close_all(listeners)
                    await relays.drain()
                await door.drain()
                components.data.context.shadows.stop()
                supervisor.stop()
            components.control.log_store.close_streams()
            components.events.close()
            await door.wait_until_left(LOG_END_S)
            if relays is not None:
                await relays.end()
            doors.cancel_scope.cancel()


async def _restore_windows(control: Control, relays: Relays | None) -> None:
    """Have limits of a minute count earlier use: as relays have seen it, or else as the ledger has it."""
    windows = None if relays is None else relays.adopting.windows
    if windows is not None:
        control.quotas.restore_windows(earlier_use(windows, _clock()))
    elif control.ledger.enabled:
        await restore_windows(control.ledger.read, control.quotas)


def _clock() -> TrioClock:
    return TrioClock.read(trio.current_time(), time.monotonic_ns())


async def _hurry_when_told(signals: AsyncIterator[int], components: Components) -> None:
    await anext(signals)
    log.info("second signal: stopping now without waiting for requests")
    if components.data.relays is not None:
        components.data.relays.hurry()
    components.data.door.hurry()
    components.control.supervisor.hurry()


async def _prune_forever(directory: str, reloader: Reloader) -> None:
    while True:
        await trio.to_thread.run_sync(prune, directory, reloader.config.logs.keep_days * DAY_S)
        await trio.sleep(DAY_S)


class LogSources:
    """The workers with lines to fetch, and their addresses."""

    def __init__(self, table: WorkerTable, auth: Auth) -> None:
        self._table, self._auth = table, auth
        self._known: tuple[int, bytes] | None = None
        """The version of the table, and the proof, for which `_found` was read."""
        self._found: Mapping[str, LogSource] = {}

    def __call__(self) -> Mapping[str, LogSource]:
        """Return them by the workers' ids: the same mapping while nothing has changed."""
        known = (self._table.version, self._auth.proof)
        if known != self._known:
            self._known, self._found = known, dict(self._read(self._auth.proof))
        return self._found

    def _read(self, proof: bytes) -> Iterator[tuple[str, LogSource]]:
        for worker in self._table:
            has_source = worker.heartbeat is not None and worker.server is None and not worker.is_piped
            if worker.heartbeat is not None and has_source and not worker.is_down:
                heartbeat, shown = worker.heartbeat, b"" if worker.managed else proof
                yield (
                    worker.id,
                    LogSource(heartbeat.start_id, heartbeat.host, heartbeat.port, worker.unix_socket, shown),
                )


def _announce(context: GatewayContext, listeners: list[socket.socket], file: pathlib.Path | None) -> None:
    """Log where the gateway listens, and warn of open access where no keys are configured.

    `file` is the file of its configuration.
    """
    host, port, auth = context.settings.host, port_of(listeners), context.auth
    log.info("the gateway listens on %s:%d", host, port)
    if "*" in context.settings.cors_origins and not auth.has_keys:
        log.warning(
            'server_settings.cors_origins is "*" and no keys are configured: ANY PAGE that a browser opens that reaches'
            " this gateway MAY USE EVERY MODEL. Name the origins of your pages, or give clients keys."
        )
    if context.settings.console:
        address = listeners[0].getsockname()[0]
        _show_console(context, local_url(address, port, has_tls=context.settings.tls_certificate is not None), file)
    if all(is_loopback(listener.getsockname()[0]) for listener in listeners) or (auth.has_keys and auth.has_admin_key):
        return
    if not auth.has_keys:
        log.info(
            "clients need no key, so they may ask by an address or by %s alone: server_settings.hosts adds names",
            ", ".join(auth.site.names),
        )
        log.warning(
            "no keys are configured: EVERY CLIENT THAT REACHES %s:%d MAY USE EVERY MODEL. Give each client one in"
            " [[security.keys]] (`./ichat.pyz key` makes it), or let server_settings.host be 127.0.0.1.",
            host,
            port,
        )
    if auth.is_bare:
        log.warning("every client that reaches %s may also read logs and states: see security.admin_key_env", host)
    if not auth.has_admin_key:
        log.info("only this user of this machine may change anything: see security.admin_key_env")


def _announce_emptiness(reloader: Reloader) -> None:
    """Log what to do with a gateway that was started without a configuration."""
    if reloader.path is not None and not os.path.lexists(reloader.path):
        log.info(
            "no %s here: launch a model on the console or with `./ichat.pyz run MODEL`; the gateway loads the file"
            " as soon as it is there",
            reloader.path,
        )


def _show_console(context: GatewayContext, url: str, file: pathlib.Path | None) -> None:
    """Print the console's link, with its secret if any, to a terminal; others read a log too, so it gets none."""
    if not sys.stderr.isatty():
        place = "" if url == GATEWAY else f" -c {file}" if file and context.settings.port else f" --gateway {url}"
        log.info("`./ichat.pyz console%s` prints the console's link", place)
        return
    log.info("the console: %s", console_link(url, "" if context.auth.has_admin_key else context.auth.secret))
