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
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial

import attrs
import trio

from ichat.admin.reload import ConfigFile, Reloader, fingerprint
from ichat.config.command_line import CommandLineParser
from ichat.config.own_secret import announced, directory_for
from ichat.config.schema import Config
from ichat.errors import EXIT_USAGE, Exit
from ichat.fleet.waiting import retry_forever
from ichat.fleet.worker_table import WorkerTable
from ichat.hardware.machines import LOOK_S
from ichat.http.listeners import close_all, listening_at, port_of
from ichat.observability.logs.files import prune
from ichat.observability.logs.log_format import LOG_FORMATS
from ichat.observability.logs.store import LogSource
from ichat.observability.tracing import open_tracing
from ichat.observability.usage.earlier_use import restore_windows
from ichat.relays.earlier_outcomes import earlier_use
from ichat.relays.owner import KILL_S, Relays
from ichat.relays.values import TrioClock
from ichat.roles.gateway_after_takeover import end_connections, serve_old_process
from ichat.roles.gateway_components import Components, Control, begin_desks, build, secure_parts
from ichat.roles.gateway_start import announce, announce_emptiness, listen
from ichat.roles.gateway_stop import drain
from ichat.roles.gateway_takeover import GatewayGiver, HandedGateway, ask, handed_by
from ichat.security.auth import Auth
from ichat.security.key_file import load_keys
from ichat.security.made_keys import NO_KEYS, MadeKeys
from ichat.service_manager import Notifier, become_subreaper
from ichat.supervisor.orphans import KnownPids, reap_forever
from ichat.supervisor.state import DirectoryTaken, StateDirectory, handed_state, open_state
from ichat.takeover.giving import TakeoverServer

log = logging.getLogger(__name__)

CONFIG_FILE = "ichat.toml"
"""The configuration where none is named, if it is in the working directory."""
DAY_S = 24 * 3600.0
LOCK_LOOKS, LOCK_LOOK_S = 40, 0.05
"""How often a takeover looks whether a process that ends has left the lock of the state directory, and the pause."""
END_S = 30.0
"""The time for the rest of the end, after the drain and the end of the workers."""
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


def asks_for_takeover(argv: Sequence[str]) -> bool:
    """Return whether the gateway's flags ask the running gateway to hand over. Raises Exit 64."""
    return parser().parse_args(list(argv)).takeover


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
        "--takeover",
        action="store_true",
        help="have the running gateway with this state directory hand over to this process: no request is refused, and"
        " no stream breaks; without a running gateway, start as usual",
    )
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
    takes_over: bool = False,
    task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run the gateway until a signal stops it; `started` with its port. Raises Exit where it cannot listen.

    `file` has the configuration, and is read again when it changes. With `takes_over` the process that has the
    configured state directory hands its gateway over, if there is any. `notifier` has started this process.
    """
    notifier = notifier or Notifier()
    with contextlib.ExitStack() as stack:
        if takes_over:
            secure_parts(config, _kept_keys(config))
        takeover = await ask(config) if takes_over else None
        handed = handed_by(takeover, config)
        notifier = notifier if handed is None else handed.notifier_or(notifier)
        state = await state_of(config, handed, stack, waits=takes_over)
        tracing = stack.enter_context(contextlib.closing(open_tracing(has_usage=config.usage.in_spans)))
        components = build(config, file, state, tracing)
        relays = components.data.relays
        receiver, listeners = trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM), list[socket.socket]()
        if takeover is not None and handed is not None:
            receiver = contextlib.nullcontext(stack.enter_context(receiver))
            listeners = await handed.begin(components, takeover, receiver.enter_result, state.starts)
        if relays is not None:
            adopted = await relays.find()
            if listeners:
                close_all(adopted)  # the same sockets
            listeners = listeners or adopted
        listeners = await listen(config.server_settings, notifier, listeners)
        become_subreaper()
        stack.enter_context(announced(state.path, [listener.getsockname()[:2] for listener in listeners]))
        giver = GatewayGiver(components, state, listeners, notifier)
        old = None if takeover is None else partial(serve_old_process, giver, takeover, handed)
        try:
            await _run(giver, listeners, receiver, old, task_status)
        finally:
            await _end_relays_if_cut_off(relays)  # noqa: ASYNC102 it has a shield with a bound


async def _run(
    giver: GatewayGiver,
    listeners: list[socket.socket],
    receiver: contextlib.AbstractContextManager[AsyncIterator[int]],
    serve_old: Callable[[], Awaitable[None]] | None,
    task_status: trio.TaskStatus[int],
) -> None:
    """Run all tasks of a gateway to its end; see `_serve_until_told`."""
    components, state, notifier = giver.components, giver.state, giver.notifier
    async with trio.open_nursery() as background:
        await _start_background(background, components, notifier)
        async with trio.open_nursery() as deciding:
            server = TakeoverServer(state.path, giver, state.term)
            await _start_deciding(deciding, components, giver)
            await deciding.start(giver.run)
            await deciding.start(server.serve_forever)
            with listening_at("" if components.data.relays is None else state.inner_socket) as inner:
                running = _Running(components, listeners, inner, notifier, receiver, server, serve_old)
                try:
                    await _serve_until_told(running, task_status)
                finally:
                    close_all(listeners)
                    components.data.context.pool.close_idle()
                    components.control.log_store.close()
            deciding.cancel_scope.cancel()
        background.cancel_scope.cancel()


async def state_of(
    config: Config, handed: HandedGateway | None, stack: contextlib.ExitStack, *, waits: bool
) -> StateDirectory:
    """Return the state directory, until the stack closes; with `waits`, a process that has it may be about to end."""
    directory = directory_for(config.server_settings)
    if handed is not None and directory is not None:
        return stack.enter_context(handed_state(directory, config.logs.directory, handed.lock))
    for _ in range(LOCK_LOOKS if waits else 0):
        with contextlib.suppress(DirectoryTaken):
            return stack.enter_context(open_state(config.server_settings, config.logs.directory))
        await trio.sleep(LOCK_LOOK_S)
    return stack.enter_context(open_state(config.server_settings, config.logs.directory))


async def _report_life_forever(notifier: Notifier) -> None:
    """Let the service manager know that this loop still runs, twice in the time that it waits for that."""
    while notifier.watchdog_s:
        notifier.send("WATCHDOG=1")
        await trio.sleep(notifier.watchdog_s / 2)


async def _end_relays_if_cut_off(relays: Relays | None) -> None:
    """End the relays if this task is cancelled from outside: they outlive an error, and wait for the next start."""
    if relays is not None and trio.current_effective_deadline() == -math.inf:
        with trio.move_on_after(KILL_S, shield=True):
            await relays.kill_all()


async def _start_background(nursery: trio.Nursery, components: Components, notifier: Notifier) -> None:
    """Start the tasks that requests need to their end."""
    data = components.data
    nursery.start_soon(_report_life_forever, notifier)
    nursery.start_soon(data.access.run_forever)
    nursery.start_soon(data.hub.run_forever)
    await nursery.start(data.context.pool.run_forever)
    await nursery.start(data.context.shadows.run_forever)


async def _decide(
    components: Components, scope: trio.CancelScope, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve the control plane, and follow and check workers, until `scope` is cancelled: another process does so."""
    control = components.control
    with scope:
        async with trio.open_nursery() as nursery:
            await nursery.start(components.serve_control)
            nursery.start_soon(control.log_store.follow_forever, LogSources(control.fleet.table, control.auth))
            nursery.start_soon(components.checker.probe_forever)
            task_status.started()


async def _start_deciding(nursery: trio.Nursery, components: Components, giver: GatewayGiver) -> None:
    """Start the tasks that only the process with the gateway has."""
    control, data, reloader = components.control, components.data, components.reloader
    context, supervisor = data.context, control.supervisor
    await nursery.start(_decide, components, giver.deciding)
    await nursery.start(control.ledger.run)
    nursery.start_soon(_prune_forever, giver.state.log_directory, reloader)
    nursery.start_soon(reap_forever, supervisor if data.relays is None else KnownPids((supervisor, data.relays)))
    nursery.start_soon(data.metrics.watch_loop_forever)
    nursery.start_soon(control.monitor.watch_forever, LOOK_S)
    nursery.start_soon(components.history.sample_forever)
    nursery.start_soon(components.events.run_forever)
    nursery.start_soon(retry_forever, context.balancer)
    nursery.start_soon(reloader.watch_forever)
    nursery.start_soon(reloader.obey_signals_forever, giver.notifier.reloading)
    nursery.start_soon(components.key_store.expire_forever)


@attrs.frozen
class _Running:
    """The parts of a gateway after the start of its background tasks."""

    components: Components
    listeners: list[socket.socket]
    """For clients."""
    inner: list[socket.socket]
    """Those at the socket `inner`."""
    notifier: Notifier
    receiver: contextlib.AbstractContextManager[AsyncIterator[int]]
    """Of the signals that end this process."""
    server: TakeoverServer[GatewayGiver]
    serve_old: Callable[[], Awaitable[None]] | None
    """Answers the requests that an old process gets."""


async def _serve_until_told(running: _Running, task_status: trio.TaskStatus[int]) -> None:
    """Serve until a signal; then drain the front door, end the workers, and let the streams of logs end.

    With relays, those accept from the listeners, and the front door is for the requests that they forward to `inner`.
    If another process has the gateway then, the workers stay, and the connections end without haste.
    """
    components, listeners, inner = running.components, running.listeners, running.inner
    door, supervisor, relays = components.data.door, components.control.supervisor, components.data.relays
    with running.receiver as signals:
        async with trio.open_nursery() as doors:
            async with trio.open_nursery() as workers:
                if relays is not None:
                    begin_desks(doors, relays, components.data.handler, components.control.fleet.table)
                    await doors.start(relays.run, listeners)
                if running.serve_old is None:
                    await _restore_windows(components.control, relays)
                await workers.start(supervisor.run)
                doors.start_soon(door.serve_forever, listeners if relays is None else inner)
                if running.serve_old is not None:
                    doors.start_soon(running.serve_old)
                if relays is not None:
                    await relays.open()
                announce(components.data.context, listeners, components.reloader.path)
                announce_emptiness(components.reloader)
                running.server.giver.note_open()
                running.notifier.ready()
                task_status.started(port_of(listeners))
                if await running.server.wait_gone(partial(anext, signals)):
                    await end_connections(components, running.server, doors, signals)
                    return  # noqa: ASYNC121 both nurseries are cancelled
                timeouts = components.reloader.config.timeouts
                running.notifier.stopping(timeouts.drain_s + timeouts.stop_s + END_S)
                door_for_workers = await drain(components, listeners, signals, doors)
            components.control.log_store.close_streams()
            components.events.close()
            await door.wait_until_left(LOG_END_S)
            if door_for_workers is not None:
                await door_for_workers.drain()
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
                heartbeat, usual = worker.heartbeat, b"" if worker.managed else proof
                shown = self._table.proof_of(worker.id) or usual
                yield (
                    worker.id,
                    LogSource(heartbeat.start_id, heartbeat.host, heartbeat.port, worker.unix_socket, shown),
                )
