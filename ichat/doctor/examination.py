"""The whole examination: every part at the same time, each bounded, and the findings in one order."""

import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar, TypeVarTuple, Unpack, cast

import attrs
import psutil
import trio

from ichat.cli.client import Api, add_flags, find_gateway
from ichat.cli.screen import Screen, prepare_streams
from ichat.config.command_line import CommandLineParser
from ichat.config.schema import Config
from ichat.doctor.engines import find_in_engines, read_engine_facts, read_processor_facts
from ichat.doctor.findings import Finding, FindingGroup, reason_of, worst_of
from ichat.doctor.gateway import GatewayFacts, WorkerReport, find_in_gateway, read_gateway_facts, read_report
from ichat.doctor.machine import find_gpus_and_holders, find_in_machine, read_machine_facts, read_memory
from ichat.doctor.network import find_in_network, read_routes, read_ways_to_workers
from ichat.doctor.report import show_report, to_json
from ichat.doctor.settings import find_in_settings, read_configuration
from ichat.doctor.workers import find_in_workers, read_worker_facts
from ichat.hardware.gpus import Gpu, find_gpus
from ichat.supervisor.processes import descendants, kill

EXAMINE_S = 8.0
"""How long the whole examination takes at most; what is not known by then is said."""
FIRST_S = 4.0
"""How long all parts wait for what several of them need: the processes here, and the GPUs."""
REPORT_S = 3.0
"""How long a running gateway may take to say what it knows of its workers."""
LAST_S = 0.5
"""What a part has, at its end, to say what it knows and what it does not."""
EXIT_PROBLEMS, EXIT_INTERRUPTED = 1, 130

Part = Callable[[], Awaitable[list[Finding]]]
_Args = TypeVarTuple("_Args")
_Found = TypeVar("_Found")


def parser() -> CommandLineParser:
    """Return the parser of the command."""
    usage = CommandLineParser(
        prog="ichat.pyz doctor",
        description="Examine this machine, a configuration and what it names, and say what to do.",
        allow_abbrev=False,
    )
    add_flags(usage)
    return usage


def run(argv: Sequence[str]) -> int:
    """Examine a set-up as the command line says, show what was found, and return the exit code: 1 with an error.

    Raises Exit 64 for a wrong command line.
    """
    import os

    args = parser().parse_args(argv)
    prepare_streams()
    key = args.api_key or os.environ.get("ICHAT_ADMIN_KEY") or os.environ.get("ICHAT_API_KEY")
    began = time.monotonic()
    asks = args.gateway is not None
    before, groups = descendants(os.getpid()), list[FindingGroup]()
    is_interrupted = False
    try:
        groups = trio.run(partial(examine, args.config, lambda: Api(find_gateway(args), key), asks_gateway=asks))
    except* KeyboardInterrupt:
        is_interrupted = True
    finally:
        kill(set(descendants(os.getpid())).difference(before))  # interpreters that have not answered
    if is_interrupted:
        return EXIT_INTERRUPTED
    seconds = time.monotonic() - began
    screen = Screen()
    if args.json:
        screen.line(to_json(groups, seconds))
    else:
        show_report(screen, groups, seconds, getattr(sys.stdout, "encoding", None) or "ascii")
    return EXIT_PROBLEMS if worst_of(groups) == "error" else 0


async def examine(
    path: str | None, make_api: Callable[[], Api], *, asks_gateway: bool = False, within_s: float = EXAMINE_S
) -> list[FindingGroup]:
    """Return everything that is found with this configuration; None: with the defaults.

    A gateway is asked for its workers where one has this state directory, and in any case if `asks_gateway`.
    """
    ends_at = trio.current_time() + within_s
    config, findings = None, [Finding("error", "file", f"{path} could not be read within {FIRST_S:g} s.")]
    with trio.move_on_after(FIRST_S):
        config, findings = await _in_thread(read_configuration, path)
    groups = {"Configuration": findings}
    if config is None:
        await _gather({"This machine": partial(_examine_machine, Config())}, groups, ends_at)
    else:
        first = _FirstFacts()
        parts: dict[str, Part] = {
            "Keys and files": partial(_examine_settings, path, config),
            "This machine": partial(_examine_machine, config),
            "GPUs": partial(_examine_gpus, config, first),
            "Engines": partial(_examine_engines, config, first, ends_at - LAST_S),
            "Managed workers": partial(_examine_workers, config, first, ends_at - LAST_S),
            "Gateway": partial(_examine_gateway, first, config, make_api, ends_at - LAST_S, asks_gateway=asks_gateway),
            "External routes": partial(_examine_routes, config, ends_at - LAST_S),
        }
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.read, config)
            await _gather(parts, groups, ends_at)
    return [FindingGroup(title, found) for title, found in groups.items() if found]


async def _gather(parts: Mapping[str, Part], groups: dict[str, list[Finding]], ends_at: float) -> None:
    """Carry out the parts at the same time; one that takes too long is a finding."""

    async def carry_out(title: str, part: Part) -> None:
        with trio.move_on_at(ends_at):
            try:
                groups[title] = await part()
            except* (OSError, ValueError, psutil.Error) as error:
                groups[title] = [Finding("warning", "part", f"This part could not be examined ({_leaf_of(error)}).")]

    async with trio.open_nursery() as nursery:
        for title, part in parts.items():
            sentence = f"This part took too long and was left out; all of it may take {EXAMINE_S:g} s."
            groups[title] = [Finding("warning", "time", sentence)]
            nursery.start_soon(carry_out, title, part)


def _leaf_of(error: Exception) -> str:
    """Return what the first of several errors says."""
    while isinstance(error, ExceptionGroup):
        error = cast("ExceptionGroup[Exception]", error).exceptions[0]
    return reason_of(error) if isinstance(error, OSError) else str(error).rstrip(".") or type(error).__name__


@attrs.define(eq=False)
class _FirstFacts:
    """What several parts need."""

    gateway: GatewayFacts | None = None
    """None: the processes of this machine could not be read in time."""
    gpus: Sequence[Gpu] | None = None
    is_driver_silent: bool = True
    """Whether NVIDIA's library has not answered in time."""
    has_gateway: trio.Event = attrs.field(factory=trio.Event)
    """Set when there is no more to wait for, for `gateway`."""
    known: trio.Event = attrs.field(factory=trio.Event)
    """Set when there is no more to wait for at all."""

    @property
    def workers_by_pid(self) -> Mapping[int, str]:
        """The ids of the workers by their processes."""
        return self.gateway.workers_by_pid if self.gateway else {}

    async def read(self, config: Config) -> None:
        """Read all of it, for FIRST_S at most."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read_gateway, config)
            nursery.start_soon(self._read_gpus)
        self.known.set()

    async def _read_gateway(self, config: Config) -> None:
        with trio.move_on_after(FIRST_S), contextlib.suppress(OSError, psutil.Error):
            self.gateway = await _in_thread(read_gateway_facts, config)
        self.has_gateway.set()

    async def _read_gpus(self) -> None:
        with trio.move_on_after(FIRST_S):
            self.gpus = await find_gpus()
            self.is_driver_silent = False


async def _examine_settings(path: str | None, config: Config) -> list[Finding]:
    return await _in_thread(find_in_settings, path, config)


async def _examine_machine(config: Config) -> list[Finding]:
    return find_in_machine(config, await _in_thread(read_machine_facts, config))


async def _examine_gpus(config: Config, first: _FirstFacts) -> list[Finding]:
    await first.known.wait()
    gpus, own = first.gpus, first.workers_by_pid
    return await _in_thread(partial(find_gpus_and_holders, config, gpus, own, is_silent=first.is_driver_silent))


async def _examine_engines(config: Config, first: _FirstFacts, ends_at: float) -> list[Finding]:
    engines = await read_engine_facts(config, ends_at)
    await first.known.wait()
    processor = await _in_thread(read_processor_facts, None if first.gpus is None else len(first.gpus))
    return find_in_engines(engines, processor)


async def _examine_workers(config: Config, first: _FirstFacts, ends_at: float) -> list[Finding]:
    workers = await read_worker_facts(config, ends_at)
    await first.known.wait()
    total, limit = await _in_thread(read_memory)
    running = set(first.workers_by_pid.values())
    return find_in_workers([one.beside(first.gpus, running) for one in workers], limit or total)


async def _examine_gateway(
    first: _FirstFacts, config: Config, make_api: Callable[[], Api], ends_at: float, *, asks_gateway: bool
) -> list[Finding]:
    await first.has_gateway.wait()
    if first.gateway is None:
        sentence = f"The processes of this machine could not be read within {FIRST_S:g} s: see what holds it up."
        return [Finding("warning", "gateway", sentence, "uptime")]
    report = None
    if asks_gateway or first.gateway.pid is not None:
        report = WorkerReport(refusal=f"it did not answer within {REPORT_S:g} s")
        with trio.move_on_after(REPORT_S):
            report = await _in_thread(read_report, make_api)
    ways = await read_ways_to_workers(report.workers, ends_at) if report else []
    return [*find_in_gateway(config, first.gateway, report), *find_in_network(ways)]


async def _examine_routes(config: Config, ends_at: float) -> list[Finding]:
    return find_in_network(await read_routes(config, ends_at))


async def _in_thread(ask: Callable[[Unpack[_Args]], _Found], *args: *_Args) -> _Found:
    """Call a function that waits for the system; the examination does not wait for it longer than for others."""
    return await trio.to_thread.run_sync(ask, *args, abandon_on_cancel=True)
