"""The whole examination: every part at the same time, each bounded, and the findings in one order."""

import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar, TypeVarTuple, Unpack

import attrs
import trio

from ichat.cli.client import Api, add_flags, find_gateway
from ichat.cli.screen import Screen, prepare_streams
from ichat.config.command_line import CommandLineParser
from ichat.config.schema import Config
from ichat.doctor.engines import find_in_engines, read_engine_facts, read_processor_facts
from ichat.doctor.findings import Finding, FindingGroup, worst_of
from ichat.doctor.gateway import GatewayFacts, WorkerReport, find_in_gateway, read_gateway_facts, read_report
from ichat.doctor.machine import find_gpus_and_holders, find_in_machine, read_machine_facts
from ichat.doctor.network import find_in_network, read_routes, read_ways_to_workers
from ichat.doctor.report import show_report, to_json
from ichat.doctor.settings import find_in_settings, read_configuration
from ichat.doctor.workers import find_in_workers, read_worker_facts
from ichat.hardware.gpus import Gpu, find_gpus

EXAMINE_S = 8.0
"""How long the whole examination takes at most; what is not known by then is said."""
FIRST_S = 4.0
"""How long all parts wait for what several of them need: the processes here, and the GPUs."""
REPORT_S = 3.0
"""How long a running gateway may take to say what it knows of its workers."""
EXIT_PROBLEMS = 1

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
    groups = trio.run(partial(examine, args.config, lambda: Api(find_gateway(args), key), asks_gateway=asks))
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
    config, findings = await trio.to_thread.run_sync(read_configuration, path)
    groups = {"Configuration": findings}
    if config is None:
        await _gather({"This machine": partial(_examine_machine, Config())}, groups, ends_at)
    else:
        first = _FirstFacts()
        parts: dict[str, Part] = {
            "Keys and files": partial(_examine_settings, path, config),
            "This machine": partial(_examine_machine, config),
            "GPUs": partial(_examine_gpus, config, first),
            "Engines": partial(_examine_engines, config, first),
            "Managed workers": partial(_examine_workers, config, first),
            "Gateway": partial(_examine_gateway, config, first, make_api, asks_gateway=asks_gateway),
            "External routes": partial(_examine_routes, config),
        }
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.read, config)
            await _gather(parts, groups, ends_at)
    return [FindingGroup(title, found) for title, found in groups.items() if found]


async def _gather(parts: Mapping[str, Part], groups: dict[str, list[Finding]], ends_at: float) -> None:
    """Carry out the parts at the same time; one that takes too long is a finding."""

    async def carry_out(title: str, part: Part) -> None:
        with trio.move_on_at(ends_at):
            groups[title] = await part()

    async with trio.open_nursery() as nursery:
        for title, part in parts.items():
            sentence = f"This part took too long and was left out; all of it may take {EXAMINE_S:g} s."
            groups[title] = [Finding("warning", "time", sentence)]
            nursery.start_soon(carry_out, title, part)


@attrs.define(eq=False)
class _FirstFacts:
    """What several parts need."""

    gateway: GatewayFacts = GatewayFacts()
    gpus: Sequence[Gpu] | None = None
    known: trio.Event = attrs.field(factory=trio.Event)
    """Set when there is no more to wait for."""

    async def read(self, config: Config) -> None:
        """Read all of it, for FIRST_S at most."""
        with trio.move_on_after(FIRST_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_gateway, config)
                nursery.start_soon(self._read_gpus)
        self.known.set()

    async def _read_gateway(self, config: Config) -> None:
        self.gateway = await _in_thread(read_gateway_facts, config)

    async def _read_gpus(self) -> None:
        self.gpus = await find_gpus()


async def _examine_settings(path: str | None, config: Config) -> list[Finding]:
    return await _in_thread(find_in_settings, path, config)


async def _examine_machine(config: Config) -> list[Finding]:
    return find_in_machine(config, await _in_thread(read_machine_facts, config))


async def _examine_gpus(config: Config, first: _FirstFacts) -> list[Finding]:
    await first.known.wait()
    return await _in_thread(find_gpus_and_holders, config, first.gpus, first.gateway.workers_by_pid)


async def _examine_engines(config: Config, first: _FirstFacts) -> list[Finding]:
    engines = await read_engine_facts(config)
    await first.known.wait()
    processor = await _in_thread(read_processor_facts, None if first.gpus is None else len(first.gpus))
    return find_in_engines(engines, processor)


async def _examine_workers(config: Config, first: _FirstFacts) -> list[Finding]:
    machine = await _in_thread(read_machine_facts, config)
    await first.known.wait()
    memory = machine.memory_max_bytes or machine.memory_bytes
    return find_in_workers(await read_worker_facts(config, first.gateway.workers_by_pid), memory)


async def _examine_gateway(
    config: Config, first: _FirstFacts, make_api: Callable[[], Api], *, asks_gateway: bool
) -> list[Finding]:
    await first.known.wait()
    report = None
    if asks_gateway or first.gateway.pid is not None:
        report = WorkerReport(refusal=f"it did not answer within {REPORT_S:g} s")
        with trio.move_on_after(REPORT_S):
            report = await _in_thread(read_report, make_api)
    ways = await read_ways_to_workers(report.workers) if report else []
    return [*find_in_gateway(config, first.gateway, report), *find_in_network(ways)]


async def _examine_routes(config: Config) -> list[Finding]:
    return find_in_network(await read_routes(config))


async def _in_thread(ask: Callable[[Unpack[_Args]], _Found], *args: *_Args) -> _Found:
    """Call a function that waits for the system; the examination does not wait for it longer than for others."""
    return await trio.to_thread.run_sync(ask, *args, abandon_on_cancel=True)
