"""The whole examination: all parts run at the same time, each bounded, and their findings have a fixed order."""

import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import attrs
import psutil
import trio
from exceptiongroup import BaseExceptionGroup, catch
from typing_extensions import TypeVarTuple, Unpack

from ichat.cli.client import Api, open_api
from ichat.cli.gateway_address import USUAL_FILE, add_flags
from ichat.cli.screen import Screen, prepare_streams, raise_interrupts
from ichat.config.command_line import CommandLineParser
from ichat.config.own_secret import directory_for
from ichat.config.schema import Config
from ichat.doctor.engines import find_in_engines, read_engine_facts, read_processor_facts
from ichat.doctor.findings import Finding, FindingGroup, show_report, to_json, worst_of
from ichat.doctor.gateway import (
    GatewayFacts,
    WorkerReport,
    find_in_file,
    find_in_gateway,
    read_gateway_facts,
    read_report,
)
from ichat.doctor.machine import find_gpus_and_holders, find_in_machine, read_machine_facts, read_memory
from ichat.doctor.network import find_in_network, read_routes, read_ways_to_workers
from ichat.doctor.ray import find_in_ray, no_token, read_ray_facts
from ichat.doctor.settings import find_in_settings, read_configuration, read_place
from ichat.doctor.workers import ask_for_flags, find_in_workers, read_worker_facts
from ichat.errors import EXIT_INTERRUPTED, Exit
from ichat.fleet.registered_servers import server_ids
from ichat.hardware.gpus import Gpu
from ichat.preflight.facts import VISIBLE, gpus_for
from ichat.preflight.learnt_file import read_learnt
from ichat.supervisor.processes import descendants, kill
from ichat.texts import reason_of

EXAMINE_S = 8.0
"""The longest time of the whole examination, in seconds; the report names facts that are unknown by then."""
FIRST_S = 4.0
"""The longest wait of all parts for shared facts, in seconds: the processes here, and the GPUs."""
READ_S = 6.0
"""The time that the managed workers have after that, for the interpreters and the hub."""
REPORT_S = 3.0
"""The longest time in which a running gateway may report its workers, in seconds."""
FLAGS_S = 30.0
"""Additional time for the managed workers, in seconds, if an engine's flags are not known yet: it is asked once."""
LAST_S = 0.5
"""The time that a part has, at its end, to report known and unknown facts, in seconds."""
_WORKERS = "Managed workers"
EXIT_PROBLEMS = 1

Part = Callable[[], Awaitable[list[Finding]]]
_Args = TypeVarTuple("_Args")
_Found = TypeVar("_Found")


def parser() -> CommandLineParser:
    """Return the parser of the command."""
    usage = CommandLineParser(
        prog="ichat.pyz doctor",
        description="Examine this machine and a configuration with all its parts, and say what to do.",
        allow_abbrev=False,
    )
    add_flags(usage)
    return usage


def run(argv: Sequence[str]) -> int:
    """Examine a set-up as the command line says, show the findings, and return the exit code: 1 with an error.

    Raises Exit 64 for a wrong command line.
    """
    import os

    args = parser().parse_args(argv)
    if args.config is None and args.gateway is None and os.path.isfile(USUAL_FILE):
        args.config = USUAL_FILE
    prepare_streams()
    began = time.monotonic()
    asks = args.gateway is not None
    before, groups = descendants(os.getpid()), list[FindingGroup]()
    interrupts = list[BaseExceptionGroup[KeyboardInterrupt]]()
    try:
        with catch({KeyboardInterrupt: interrupts.append}):
            raise_interrupts()
            groups = trio.run(partial(examine, args.config, lambda: open_api(args), asks_gateway=asks))
    finally:
        kill(set(descendants(os.getpid())).difference(before))  # interpreters that have not answered
    if interrupts:
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
    """Return all findings for this configuration; None: for the defaults.

    If a gateway has this state directory, it is asked for its workers; with `asks_gateway` it is asked in any case.
    """
    ends_at = trio.current_time() + within_s
    config, findings = None, [Finding("error", "file", f"{path} could not be read within {FIRST_S:g} s.")]
    known = None
    """The settings that say where the gateway is, as far as they are known."""
    with trio.move_on_after(FIRST_S):
        config, findings = await _in_thread(read_configuration, path)
        known = config or await _in_thread(read_place, path)
    groups, first = {"Configuration": findings}, _FirstFacts()
    parts: dict[str, Part] = {"This machine": partial(_examine_machine, config or Config())}
    if config is not None:
        parts = {
            "Keys and files": partial(_examine_settings, path, config),
            **parts,
            "GPUs": partial(_examine_gpus, config, first),
            "Engines": partial(_examine_engines, config, first, ends_at - LAST_S),
            _WORKERS: partial(_examine_workers, config, first, ends_at - LAST_S),
            "Gateway": partial(_examine_gateway, first, config, make_api, ends_at - LAST_S, asks_gateway=asks_gateway),
            "Ray": partial(_examine_ray, config, ends_at - LAST_S),
            "External routes": partial(_examine_routes, config, ends_at - LAST_S),
        }
    elif known is not None:
        parts["Gateway"] = partial(_examine_gateway_of_refused, first, known, make_api, ends_at - LAST_S)
    async with trio.open_nursery() as nursery:
        if known is not None:
            nursery.start_soon(first.read, known)
        await _gather(parts, groups, ends_at)
    groups["Configuration"] = [*find_in_file(first.report, is_listed=config is None), *findings]
    return [FindingGroup(title, found) for title, found in groups.items() if found]


async def _gather(parts: Mapping[str, Part], groups: dict[str, list[Finding]], ends_at: float) -> None:
    """Run the parts at the same time; a part that exceeds its time becomes a finding."""

    async def carry_out(title: str, part: Part) -> None:
        def fail(error: BaseExceptionGroup[Any]) -> None:
            groups[title] = [Finding("warning", "part", f"This part could not be examined ({_leaf_of(error)}).")]

        ends = ends_at + (FLAGS_S + READ_S if title == _WORKERS else 0)
        with trio.move_on_at(ends), catch({(OSError, ValueError, psutil.Error): fail}):
            groups[title] = await part()

    async with trio.open_nursery() as nursery:
        for title, part in parts.items():
            sentence = (
                f"This part was too slow and was left out: the limit for the whole examination is {EXAMINE_S:g} s."
            )
            groups[title] = [Finding("warning", "time", sentence)]
            nursery.start_soon(carry_out, title, part)


def _leaf_of(error: BaseException) -> str:
    """Return the message of the first of several errors."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return reason_of(error) if isinstance(error, OSError) else str(error).rstrip(".") or type(error).__name__


@attrs.define(eq=False)
class _FirstFacts:
    """The facts that several parts need."""

    gateway: GatewayFacts | None = None
    """None: the processes of this machine could not be read in time."""
    gpus: Sequence[Gpu] | None = None
    """None: they are not known."""
    report: WorkerReport = attrs.field(factory=WorkerReport)
    """The gateway's report, if it was asked."""
    is_driver_silent: bool = True
    """Whether NVIDIA's library has not answered in time."""
    has_gateway: trio.Event = attrs.field(factory=trio.Event)
    """Set when `gateway` is known, or will stay unknown."""
    known: trio.Event = attrs.field(factory=trio.Event)
    """Set when all facts are known, or will stay unknown."""

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
            self.gpus = await gpus_for(VISIBLE)
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
    failed = dict[str, str]()
    with trio.move_on_after(FLAGS_S):
        failed = await ask_for_flags(config)
    workers = await read_worker_facts(config, max(ends_at, trio.current_time() + READ_S), failed)
    await first.known.wait()
    total, limit = await _in_thread(read_memory)
    learnt, _ = await _in_thread(read_learnt, directory_for(config.server_settings))
    running = set(first.workers_by_pid.values())
    return find_in_workers([one.beside(first.gpus, running, learnt) for one in workers], limit or total)


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
        first.report = report
    named = server_ids(config)  # these workers are asked with the external routes
    joined = [worker for worker in report.workers if worker.get("worker_id") not in named] if report else []
    ways = await read_ways_to_workers(joined, ends_at)
    return [*find_in_gateway(config, first.gateway, report), *find_in_network(ways)]


async def _examine_gateway_of_refused(
    first: _FirstFacts, config: Config, make_api: Callable[[], Api], ends_at: float
) -> list[Finding]:
    """Return the findings about a gateway that runs with an earlier version of a file; the file has mistakes now."""
    await first.has_gateway.wait()
    if first.gateway is None or first.gateway.pid is None:
        return []
    return await _examine_gateway(first, config, make_api, ends_at, asks_gateway=True)


async def _examine_ray(config: Config, ends_at: float) -> list[Finding]:
    if config.ray.address is None:
        return []
    try:
        return find_in_ray(config, await read_ray_facts(config, ends_at))
    except Exit as exit_:
        return [no_token(exit_, config.ray.token_env)]


async def _examine_routes(config: Config, ends_at: float) -> list[Finding]:
    return find_in_network(await read_routes(config, ends_at))


async def _in_thread(ask: Callable[[Unpack[_Args]], _Found], *args: Unpack[_Args]) -> _Found:
    """Call a function that waits for the system, in a thread that is abandoned when its part's time is over."""
    return await trio.to_thread.run_sync(ask, *args, abandon_on_cancel=True)
