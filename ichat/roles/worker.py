"""The worker: an engine behind a front door, known to the gateway by its heartbeats.

hub                                    sockets' events; ends last
└ front door └ connection └ exchange   requests go to the engine's thread
└ heartbeats                           to the gateway, if there is any; about the machine, once the engine serves
└ watch                                a signal, the launcher's end or the engine's end begins the shutdown
"""

import contextlib
import json
import logging
import math
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence

import attrs
import trio

from ichat.config.ray import ports_in
from ichat.config.schema import Limits, Timeouts
from ichat.engines.engine import Describer, Narrator, find
from ichat.engines.load_phases import LoadTracker, TimedText
from ichat.engines.thread import EngineThread
from ichat.engines.translation import explain
from ichat.errors import EXIT_UNAVAILABLE, EXIT_USAGE, Exit
from ichat.http.front_door import FrontDoor
from ichat.http.hub import Hub
from ichat.http.listeners import open_listeners, open_listeners_in, open_unix_listener, port_of, reserve_port
from ichat.observability.logs.capture import Capture
from ichat.observability.logs.lines import LINES_MAX, LineBuffer
from ichat.protocol.messages import sentence
from ichat.roles.heartbeat_sender import HeartbeatSender, local_address
from ichat.roles.worker_options import Options, check_command_line, parser, read_command_line
from ichat.roles.worker_reports import PrefixReporter
from ichat.roles.worker_server import WorkerServer
from ichat.security.addresses import is_loopback
from ichat.supervisor.processes import launcher_pipe

__all__ = ["explain_args", "list_flags", "read_command_line", "run"]

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
TEMPORARY_CHARACTERS_MAX = 60
"""The longest path for temporary files that is used: the path of a socket below it may have 107 characters."""
LAST_LINES_S = 2.0
"""The time in which clients that follow the log may read its end."""
WITHOUT_LAUNCHER_S = (2.0, 5.0, 6.0)
"""When, after the launcher's end, exchanges, the engine and the good-bye are cut short."""


def explain_args(options: Options, engine_argv: Sequence[str]) -> str:
    """Return a text with the engine's words for these arguments, and the reasons. Raises Exit."""
    engine = find(options.backend)
    engine.check()
    port = str(options.port or 0)
    return explain(engine.parse([*engine_argv, "--host", options.host or LOOPBACK, "--port", port]).flag_outcomes)


def list_flags(options: Options) -> str:
    """Return the engine's flags as a line of JSON, those that are the worker's own hidden. Raises Exit."""
    engine = find(options.backend)
    engine.check()
    if not isinstance(engine, Describer):
        raise Exit(EXIT_UNAVAILABLE, f"The engine {options.backend} has no list of its flags.")
    try:
        found = engine.flags()
    except ImportError as error:
        raise Exit(
            EXIT_UNAVAILABLE, f"{options.backend} under {sys.executable} cannot be imported: {error}."
        ) from error
    ours = {"--model", "--model-path", *(option for action in parser()._actions for option in action.option_strings)}
    ours = {name for name in ours if name.startswith("--")}
    marked = [attrs.evolve(one, is_hidden=True) if ours & {one.name, *one.aliases} else one for one in found]
    return json.dumps({"flags": [attrs.asdict(flag) for flag in marked]})


class ShutdownDeadlines:
    """The waits of a worker's shutdown, and the events that cut them short."""

    def __init__(self, door: FrontDoor[None]) -> None:
        self._door = door
        self.for_engine = trio.CancelScope()
        self.for_goodbye = trio.CancelScope()
        self.launcher_ended = trio.Event()
        """Set when the launcher has ended."""

    async def force_on_signal(self, signals: AsyncIterator[int]) -> None:
        """Wait for the next signal, then end exchanges and the engine at once."""
        await anext(signals)
        log.info("a second signal: not waiting any longer")
        self._door.hurry()
        self.for_engine.cancel()

    async def force_without_launcher(self, pipe: int) -> None:
        """Wait for the launcher's end, which closes this pipe, then cut every wait short in turn."""
        await trio.lowlevel.wait_readable(pipe)
        self.launcher_ended.set()
        now = trio.current_time()
        forces = (self._door.hurry, self.for_engine.cancel, self.for_goodbye.cancel)
        for wait_s, force in zip(WITHOUT_LAUNCHER_S, forces, strict=True):
            await trio.sleep_until(now + wait_s)
            force()


async def run(
    options: Options,
    engine_argv: Sequence[str],
    capture: Capture | None = None,
    token: str = "",
    *,
    task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a worker until a signal ends it; `started` with its port, 0 for none. Raises Exit if the engine fails.

    `capture` keeps the output of this process, if any does; `token` is that of its gateway.
    """
    engine = find(options.backend)
    engine.check()
    check_command_line(options.backend, engine_argv)
    options = attrs.evolve(options, host=await _host_for(options))
    assert options.host is not None
    listeners, port = await _open_sockets(options, options.host)
    timeouts = Timeouts(drain_s=options.drain_s, client_stall_s=options.client_stall_s)
    reserved = None if port else reserve_port()  # engines derive names and further ports from a number of their own
    number = port_of([reserved]) if reserved else port
    argv = [*engine_argv, "--host", options.host, "--port", str(number)]
    lines = _lines_of(capture.buffer) if capture is not None else None
    load = LoadTracker(engine.load_lines if isinstance(engine, Narrator) else engine.name, lines)
    thread = EngineThread(engine, argv, client_stall_s=timeouts.client_stall_s, load=load)
    worker = WorkerServer(options, engine, thread, port, capture=capture, token=token)
    hub = Hub()
    door = FrontDoor(b"worker", worker.answer, worker.authenticate, hub, _limits_of(options), timeouts)
    log.info("worker %s listens on %s", worker.id, f"{options.host}:{port}" if port else f"unix:{options.unix_socket}")
    if port and not token and not is_loopback(listeners[0].getsockname()[0]):
        log.warning(
            "this worker accepts local clients only: set ICHAT_JOIN_TOKEN here and on the gateway to admit others"
        )
    task_status.started(worker.port)
    sender = None
    if options.gateway_address is not None:
        sender = HeartbeatSender(
            options.gateway_address,
            ca_file=options.gateway_ca,
            token=token,
            host=options.advertise_host or options.host,
            now=worker.heartbeat,
            lost=thread.fail,
            accepted=worker.late_usages.forget,
            orphan_after_s=options.orphan_after_s or math.inf,
        )
        await _join(sender, options.gateway_address, token)
        worker.changed.add(sender.changed)
        if port:
            worker.grouped.add(sender.warn_of_loopback)
    deadlines = ShutdownDeadlines(door)
    pipe = launcher_pipe()
    with (
        trio.open_signal_receiver(*_ending_signals(options)) as signals,
        _events_directory(options) as directory,
        reserved or contextlib.nullcontext(),
    ):
        engine.adapter.settings = worker.adapter_settings(directory)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hub.run_forever)
            nursery.start_soon(door.serve_forever, listeners)
            thread.start()
            nursery.start_soon(worker.watch_load)
            nursery.start_soon(worker.watch_machine_forever)
            if sender is not None:
                nursery.start_soon(sender.send_forever)
                nursery.start_soon(_report_prefixes_forever, worker, sender)
            if pipe is not None:
                nursery.start_soon(deadlines.force_without_launcher, pipe)
            await _wait_for_end(worker, signals, deadlines.launcher_ended, sender)
            nursery.start_soon(deadlines.force_on_signal, signals)
            await _shut_down(worker, door, deadlines, sender)
            nursery.cancel_scope.cancel()
    if thread.failure is not None:
        raise thread.failure


async def _open_sockets(options: Options, host: str) -> tuple[list[socket.socket], int]:
    """Return the sockets at which the worker listens, and its port; 0 for none."""
    if options.ports:
        listeners = await open_listeners_in(host, *ports_in(options.ports))
    else:
        listeners = await open_listeners(host, options.port) if options.port is not None else []
    port = port_of(listeners) if listeners else 0
    if options.unix_socket is not None:
        listeners.append(open_unix_listener(options.unix_socket))
    return listeners, port


def _limits_of(options: Options) -> Limits:
    return Limits(
        options.head_bytes_max,
        options.body_bytes_max,
        options.connections_max,
        connections_per_address_max=options.connections_max,  # all of them may be its gateway's
    )


def _lines_of(buffer: LineBuffer) -> Callable[[], list[TimedText]]:
    """Return a function that returns the lines that a buffer got since its last call."""
    seq = 0

    def read() -> list[TimedText]:
        nonlocal seq
        lines, _ = buffer.after(seq, LINES_MAX)
        seq = lines[-1].seq if lines else seq
        return [(line.time, line.text) for line in lines]

    return read


async def _host_for(options: Options) -> str:
    """Return the address to listen on: its gateway can reach it, unless an address was given. Raises Exit 69."""
    if options.host is not None or options.gateway_address is None or options.port is None:
        return options.host or LOOPBACK
    found = await local_address(options.gateway_address)
    if not found:
        raise Exit(
            EXIT_UNAVAILABLE,
            f"There is no way from this machine to the gateway {options.gateway_address}: correct --gateway-address, or"
            " say by --host where the worker listens.",
        )
    return LOOPBACK if is_loopback(found) else found


async def _join(sender: HeartbeatSender, gateway_address: str, token: str) -> None:
    """Ask the gateway before the load whether this worker may join. Raises Exit 64 if it may not."""
    why = "" if gateway_address.startswith("unix:") else await sender.ask_to_join()
    if why:
        is_told = token or "join_token_env" in why
        hint = "" if is_told else " Set ICHAT_JOIN_TOKEN here to the gateway's token (its security.join_token_env)."
        raise Exit(EXIT_USAGE, why + hint)


@contextlib.contextmanager
def _events_directory(options: Options) -> Generator[str]:
    """Name a new directory for the socket of the engine's events; remove it if the engine made it and left it.

    It is "" if no events are wanted.
    """
    if options.gateway_address is None or options.prefix_reports == "false":
        yield ""
        return
    place = tempfile.gettempdir()
    if len(place) > TEMPORARY_CHARACTERS_MAX:
        place = "/tmp"  # noqa: S108
    directory = f"{place}/ichat-{secrets.token_hex(16)}"
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def _report_prefixes_forever(worker: WorkerServer, sender: HeartbeatSender) -> None:
    """Report which prefixes the engine's cache has lost, if anything is known of it."""
    await worker.thread.parsed.wait()
    held = worker.thread.info.held if worker.thread.info is not None else None
    if held is not None:
        await PrefixReporter(sender, held, worker.id, worker.start_id).report_forever()


def _ending_signals(options: Options) -> list[signal.Signals]:
    """Return the signals that begin this worker's shutdown.

    SIGHUP is among them, for a terminal that closes, unless it is ignored already (nohup). A managed worker ignores it,
    because a gateway reloads its configuration on SIGHUP.
    """
    if (options.gateway_address or "").startswith("unix:"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


async def _shut_down(
    worker: WorkerServer, door: FrontDoor[None], deadlines: ShutdownDeadlines, sender: HeartbeatSender | None
) -> None:
    """End in this order: exchanges, the engine, the clients that follow the log; then send the good-bye."""
    thread = worker.thread
    if thread.failure is not None:
        log.error(
            "%s", sentence(str(thread.failure))
        )  # clients that follow the log do not get the process' last output
    worker.draining = True
    worker.changed()
    thread.give_back_connections()
    await door.drain()
    with deadlines.for_engine:
        await thread.stop(worker.options.stop_s)
    if not thread.ended.is_set():
        log.warning("the engine did not end in time (%s); its processes are killed", thread.phase)
        thread.give_up()
    with deadlines.for_goodbye:
        if worker.log is not None:
            await worker.log.finish(LAST_LINES_S)
        if sender is not None:
            await sender.send_goodbye()


async def _wait_for_end(
    worker: WorkerServer, signals: AsyncIterator[int], launcher_ended: trio.Event, sender: HeartbeatSender | None
) -> None:
    """Return on a signal, or when launcher, engine or gateway have ended; report changes to the gateway meanwhile."""
    thread = worker.thread
    async with trio.open_nursery() as nursery:

        async def until(wait: Callable[[], Awaitable[object]], why: str) -> None:
            found = await wait()
            log.info("%s: shutting down", why or found)
            nursery.cancel_scope.cancel()

        nursery.start_soon(until, launcher_ended.wait, "the launcher is gone")
        nursery.start_soon(until, worker.asked_to_end.wait, "the gateway has asked this worker to end")
        if sender is not None:
            nursery.start_soon(until, sender.wait_for_end, "")
        nursery.start_soon(until, thread.ended.wait, "the engine ended")
        nursery.start_soon(until, signals.__anext__, "told to stop")
        nursery.start_soon(thread.watch_loading)
        await thread.parsed.wait()
        if thread.info is not None and thread.info.group is not None:
            worker.grouped()
        worker.changed()
        await thread.ready.wait()
        worker.changed()
        await thread.unready.wait()
        worker.changed()
