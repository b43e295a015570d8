"""The guard: fetches an order with its code, starts the order's worker on this machine, and ends with it.

It imports no engine. It examines the machine before the start, and kills all processes that the worker leaves. Then
it reports the end to the gateway, with the last lines of the output.

run        the order; the obstacles; the worker's process
└ watch    the worker's end, a signal, or the end of the program that has started the guard
└ reaper   of the worker's orphans, which become children of the guard
"""

import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, NoReturn, TextIO, cast

import attrs
import httpx
import trio

from ichat.config.engine_args import arguments_of, uses_ray
from ichat.config.load import read_worker
from ichat.config.schema import Config, Limits, ManagedWorkerConfig, Timeouts
from ichat.errors import EXIT_SOFTWARE, EXIT_UNAVAILABLE, EXIT_USAGE, ApiError, Exit
from ichat.fleet.worker_facts import WorkerEnd
from ichat.hardware.gpus import GpuReader, has_nvidia
from ichat.observability.logs.lines import LineBuffer, LineSplitter
from ichat.observability.logs.pipes import PipeReader, PipeSource, Tee, make_pipe
from ichat.preflight.facts import collect_facts
from ichat.preflight.obstacles import obstacles_of
from ichat.protocol.json_text import object_in, to_json
from ichat.protocol.messages import sentence
from ichat.protocol.orders import END_PATH, ORDER_PATH, LaunchEnd, WorkerOrder, parse_order, shown_line
from ichat.roles.heartbeat_sender import client_of
from ichat.roles.worker_options import Options
from ichat.roles.worker_options import read_command_line as read_worker_flags
from ichat.service_manager import become_subreaper
from ichat.supervisor.last_words import LINES_MAX
from ichat.supervisor.launch import command_at, devices_of, environment_of, python_of
from ichat.supervisor.launcher import Order
from ichat.supervisor.orphans import AdoptedProcess, reap_forever
from ichat.supervisor.run_progress import RunProgress, end_of
from ichat.supervisor.worker_process import ProcessPlace, SweepTimes, WorkerProcess

log = logging.getLogger(__name__)

FETCH_S = 50.0
"""How long the gateway is asked for the order; it gives the same answer again for somewhat longer."""
REPORT_S = 10.0
"""How long the report of the worker's end is sent."""
RETRY_S = 1.0
OUTPUT_S = 2.0
"""How long the rest of the worker's output is read, after its last process has ended."""
_ALLOWED = ("order", "gateway_address", "gateway_ca", "advertise_host", "log_format")
_JSON = {"content-type": "application/json"}


def main(argv: Sequence[str], prepare_log: Callable[[str, TextIO, str], None]) -> int:
    """Run the worker of an order to its end; return the exit code. Raises Exit if it cannot be started.

    `prepare_log` is called with the level, the place and the format of the log.
    """
    options = read_command_line(argv)
    prepare_log("info", sys.stderr, options.log_format)
    return trio.run(run, options)


def read_command_line(argv: Sequence[str]) -> Options:
    """Return the flags of `worker --order`. Raises Exit 64 for flags that the order brings."""
    options, engine_argv = read_worker_flags(argv)
    usual, _ = read_worker_flags([])
    given = [one.name for one in attrs.fields(Options) if getattr(options, one.name) != getattr(usual, one.name)]
    ours = [f"--{name.replace('_', '-')}" for name in given if name not in _ALLOWED]
    if ours or engine_argv:
        what = (ours or engine_argv)[0].partition("=")[0]
        raise Exit(EXIT_USAGE, f"ichat.pyz worker: the order brings {what}: leave it out.")
    if options.gateway_address is None:
        raise Exit(
            EXIT_USAGE, "ichat.pyz worker: --order needs --gateway-address, the gateway that has made the order."
        )
    return options


async def run(options: Options) -> int:
    """Run the worker of an order to its end; return the exit code. Raises Exit if it cannot be started."""
    parent = os.getppid()
    order = await fetch(options)
    guard = Guard(options, order, parent)
    with trio.open_signal_receiver(*_ending_signals()) as signals:
        return await guard.run(signals)


async def fetch(options: Options) -> WorkerOrder:
    """Return the order of a code. Raises Exit 64 where it is of no use to ask again, Exit 69 otherwise."""
    assert options.gateway_address is not None
    body = to_json({"code": options.order, "start_id": secrets.token_urlsafe(32)})
    why = told = "it does not answer"
    async with client_of(options.gateway_address, options.gateway_ca) as gateway:
        with trio.move_on_after(FETCH_S):
            while True:
                try:
                    response = await gateway.post(ORDER_PATH.decode(), content=body, headers=_JSON)
                except httpx.HTTPError as error:
                    why = str(error) or type(error).__name__
                else:
                    if response.status_code < 500:
                        return _order_in(response)
                    why = _message_in(response)
                if why != told:
                    log.warning("the gateway %s gives no order yet: %s; trying again", options.gateway_address, why)
                told = why
                await trio.sleep(RETRY_S)
    raise Exit(EXIT_UNAVAILABLE, f"The gateway {options.gateway_address} cannot be asked for the order: {why}")


def _order_in(response: httpx.Response) -> WorkerOrder:
    """Return the order in an answer. Raises Exit."""
    if response.is_success:
        try:
            return parse_order(object_in(response.content))
        except ApiError as error:
            raise Exit(EXIT_USAGE, f"The gateway's order cannot be read: {error.message}") from error
    code = EXIT_UNAVAILABLE if response.status_code == 429 else EXIT_USAGE
    raise Exit(code, f"The gateway gives no order ({response.status_code}): {_message_in(response)}")


def _message_in(response: httpx.Response) -> str:
    error = cast("dict[str, Any]", object_in(response.content).get("error") or {})
    return str(error.get("message") or response.text[:300])


class Guard:
    """Starts the worker of an order, and ends all its processes."""

    def __init__(self, options: Options, order: WorkerOrder, parent: int) -> None:
        """`parent` is the process that has started the guard. Raises Exit 64 for an order of an unknown version."""
        self._options = options
        self._order = order
        self._parent = parent
        try:
            self._config = Config(limits=Limits(**order.limits), timeouts=Timeouts(**order.timeouts))
            spec = read_worker(order.worker, self._config)
        except (ApiError, TypeError) as error:
            what = f"This program ({sys.argv[0]}) is not of the gateway's version: {error}"
            raise Exit(EXIT_USAGE, what) from error
        self._spec = attrs.evolve(spec, port=spec.port or 0, env={**addresses_for_engine(order.address), **spec.env})
        leave_ray(self._spec)
        self._gpus = GpuReader()
        self._buffer = LineBuffer()
        self._hurry = trio.Event()
        """Set when no process is waited for any more."""
        self.pids: Mapping[int, str] = {}
        """The worker's first process, with the worker's id."""

    def __repr__(self) -> str:
        return f"<Guard of {self._order.worker_id}, launch {self._order.launch}>"

    async def run(self, signals: AsyncIterator[int]) -> int:
        """Run the worker to its end, and return the exit code. Raises Exit if it cannot be started."""
        become_subreaper()
        await self._check_machine()
        progress, output = RunProgress(trio.current_time()), _Output(self._buffer)
        try:
            process = await self._start(output.writing)
        except (OSError, ValueError) as error:
            await self._refuse(EXIT_UNAVAILABLE, [f"Its process cannot be started: {error}."])
        finally:
            output.close_own_end()
        self.pids = {process.pid: self._order.worker_id}
        why = await self._wait_for_end(process, signals)
        progress.end()
        if why:
            log.info("worker %s: it is ended, since %s", self._order.worker_id, why)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._hurry_on_signal, signals)
            await process.end(self._config.timeouts.stop_s, self._hurry)
            nursery.cancel_scope.cancel()
        await output.finish()
        code, told = process.returncode, "was stopped on its machine" if why else ""
        process.close()
        lines = self._buffer.tail(LINES_MAX)
        end = end_of(code, told, progress, lines, told="", lines_max=self._config.logs.last_lines_max)
        await self._report(end, is_failure=not why and code != 0)
        return 0 if why else code if code is not None and code >= 0 else EXIT_SOFTWARE

    async def _check_machine(self) -> None:
        """Raise Exit if the worker cannot run here: 64 if that stays so, 69 if it may change."""
        spec = attrs.evolve(self._spec, host=self._spec.host or "0.0.0.0")
        python, environment = python_of(self._config, spec), environment_of(self._config, spec, "")
        devices = devices_of(self._config, spec)
        facts = await collect_facts(spec, python, environment, devices, reader=self._gpus)
        obstacles = [one.sentence for one in obstacles_of(spec, python, {}, facts)]
        if obstacles:
            lasting = obstacles_of(spec, python, {}, facts, is_later=True)
            await self._refuse(EXIT_USAGE if lasting else EXIT_UNAVAILABLE, obstacles)

    async def _refuse(self, code: int, sentences: Sequence[str]) -> NoReturn:
        """Report why the worker cannot be started, and raise Exit."""
        cause = sentence(" ".join(sentences))
        await self._report(WorkerEnd("cannot be started", 0.0, exit_code=code, cause=cause), is_failure=True)
        raise Exit(code, "\n".join(sentences))

    async def _start(self, output: int) -> WorkerProcess:
        """Start the worker's process. Raises OSError or ValueError."""
        order, spec, config = self._order, self._spec, self._config
        place = ProcessPlace(f"order:{secrets.token_hex(16)}")
        command = command_at(config, spec, order.worker_id, self._flags(spec), has_gpus=has_nvidia())
        launch = Order(order.worker_id, order.launch, spec, config)
        return await WorkerProcess.spawn(
            launch, place, command, token=order.key, output=output, gpus=self._gpus, times=SweepTimes()
        )

    def _flags(self, spec: ManagedWorkerConfig) -> list[str]:
        """Return the worker's flags for its gateway, and the addresses where it listens."""
        options, timeouts = self._options, self._config.timeouts
        host, shown = spec.host, options.advertise_host
        if host is None and self._order.address:
            host, shown = place_of(self._order.address, shown)
        more = {"host": host, "gateway_ca": options.gateway_ca, "advertise_host": shown}
        return [
            f"--gateway-address={options.gateway_address}",
            f"--ports={self._order.ports}" if self._order.ports else f"--port={spec.port}",
            f"--orphan-after-s={timeouts.orphan_after_s:g}",
            f"--log-format={options.log_format}",
            *(f"--{name.replace('_', '-')}={value}" for name, value in more.items() if value is not None),
        ]

    async def _wait_for_end(self, process: WorkerProcess, signals: AsyncIterator[int]) -> str:
        """Wait until the worker has ended, or must; return why it must, or "" if it has."""
        found = ""
        async with trio.open_nursery() as nursery:

            async def until(wait: Callable[[], Awaitable[object]], why: str) -> None:
                nonlocal found
                await wait()
                found = found or why
                nursery.cancel_scope.cancel()

            nursery.start_soon(reap_forever, self)
            nursery.start_soon(until, process.wait, "")
            nursery.start_soon(until, signals.__anext__, "a signal has asked for it")
            nursery.start_soon(until, self._wait_for_end_of_parent, "its parent process has ended")
        return "" if process.has_ended else found

    async def _wait_for_end_of_parent(self) -> None:
        """Wait until the guard has lost its parent; for ever if it may outlive it.

        It may if nohup has started it, or a service manager, unless the order says otherwise.
        """
        is_free = self._parent <= 1 or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        if is_free and not self._order.ends_with_parent:
            await trio.sleep_forever()
        if os.getppid() != self._parent:
            return
        try:
            process = AdoptedProcess(self._parent)
        except ProcessLookupError:
            return
        try:
            await process.wait()
        finally:
            process.close()

    async def _hurry_on_signal(self, signals: AsyncIterator[int]) -> None:
        await anext(signals)
        log.info("a second signal: not waiting any longer")
        self._hurry.set()

    async def _report(self, end: WorkerEnd, *, is_failure: bool) -> None:
        """Report the worker's end to the gateway, for REPORT_S at most."""
        options, order = self._options, self._order
        assert options.gateway_address is not None
        report = LaunchEnd(
            order.worker_id, order.launch, end.why, is_failure, end.exit_code, end.signal, end.oom_killed,
            sentence(end.cause), [shown_line(line) for line in end.last_lines],
        )  # fmt: skip
        body = to_json(attrs.asdict(report))
        with trio.move_on_after(REPORT_S, shield=True):
            async with client_of(options.gateway_address, options.gateway_ca, order.key) as gateway:
                while True:
                    with contextlib.suppress(httpx.HTTPError):
                        response = await gateway.post(END_PATH.decode(), content=body, headers=_JSON)
                        if response.status_code < 500:
                            return
                    await trio.sleep(RETRY_S)
        log.warning("the gateway %s has not got the report of the worker's end", options.gateway_address)


class _Output:
    """The worker's output, on its way to this program's own output and to a buffer."""

    def __init__(self, buffer: LineBuffer) -> None:
        reading, self.writing = make_pipe()
        self._tee = Tee(sys.stderr.fileno())
        self._reader = PipeReader([PipeSource(reading, LineSplitter(), self._tee)], buffer)

    def close_own_end(self) -> None:
        """Close the end of the pipe that the worker's process has."""
        os.close(self.writing)

    async def finish(self) -> None:
        """Read the rest, and pass it on, for OUTPUT_S at most."""

        def read_rest() -> None:
            self._reader.stop(OUTPUT_S)
            self._tee.close(OUTPUT_S)

        await trio.to_thread.run_sync(read_rest)


def leave_ray(worker: ManagedWorkerConfig) -> None:
    """Remove Ray's variables from this process's environment, unless the worker's engine uses Ray itself.

    Ray puts its own token and the whole job into the environment of each job. Variables of the worker's table stay.
    """
    if not uses_ray(arguments_of(worker)):
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]


def addresses_for_engine(address: str) -> dict[str, str]:
    """Return the variables by which engines know their machine's address; "": they find it themselves."""
    return dict.fromkeys(("VLLM_HOST_IP", "SGLANG_HOST_IP"), address) if address else {}


def place_of(host: str, shown: str | None) -> tuple[str, str | None]:
    """Return where a worker listens, and the address that it registers; None: the same.

    `host` is the wish for both. It may be no address of this machine, as in a container behind a NAT.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return "::" if family == socket.AF_INET6 else "0.0.0.0", shown or host
    return host, shown


def _ending_signals() -> list[signal.Signals]:
    """Return the signals at which the worker ends; SIGHUP, for a terminal that closes, unless it is ignored (nohup)."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]
