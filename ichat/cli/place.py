"""`ichat.pyz place --dry-run`: the GPUs that workers would get on this machine, or why there are none.

It asks the driver and reads the models' files, and starts nothing. The answer is as if no worker of a gateway ran.
Figures that a gateway has learnt from loads are read from its state directory, so it need not run.
"""

import argparse
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import trio

from ichat.cli.earlier_loads import read_earlier_loads
from ichat.cli.gateway_address import USUAL_FILE
from ichat.cli.launch import add_gpu_flag, engine_arguments, split
from ichat.cli.screen import Screen, prepare_streams
from ichat.config import load as configuration
from ichat.config.command_line import CommandLineParser
from ichat.config.copies import each_copy
from ichat.config.engine_args import TENSOR, USABLE, arguments_of, number_of
from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.errors import EXIT_USAGE, ApiError, Exit
from ichat.fleet.registered_servers import id_for
from ichat.placement.learnt import LearntMemories
from ichat.placement.place import NoPlace, PlaceableGpu, Wish
from ichat.preflight.facts import VISIBLE, gpus_for
from ichat.preflight.obstacles import gib
from ichat.preflight.placing import place_tables, read_wish, unbooked
from ichat.supervisor.launch import devices_of, environment_of, python_of

EXIT_NO_PLACE = 1

Places = Mapping[str, ManagedWorkerConfig | NoPlace]


def parser() -> CommandLineParser:
    """Return the parser of the command."""
    usage = CommandLineParser(
        prog="ichat.pyz place",
        description="Show the GPUs that workers with `gpus` would get on this machine if no worker ran. It starts"
        " nothing.",
        allow_abbrev=False,
    )
    usage.epilog = "Every other flag after MODEL_PATH is the engine's, as launch has it."
    usage.add_argument("model", metavar="MODEL_PATH", nargs="?", help="a directory, or a name in the hub's cache")
    usage.add_argument("--dry-run", action="store_true", help="start nothing; there is no other way to run this")
    usage.add_argument("--config", "-c", metavar="FILE", help=f"the workers of this file; default: {USUAL_FILE} here")
    usage.add_argument("--backend", "-be", metavar="NAME", default="vllm", help="the engine: vllm (default) or sglang")
    add_gpu_flag(usage)
    usage.add_argument("--json", action="store_true", help="print JSON")
    return usage


def run(argv: Sequence[str]) -> int:
    """Show the places, and return the exit code: 1 if a worker has none. Raises Exit 64 for a wrong command line."""
    usage = parser()
    has_help = bool({"-h", "--help"}.intersection(argv))
    ours, words = (list(argv), list[str]()) if has_help else split(usage, argv)
    args = usage.parse_args(ours)
    if not args.dry_run:
        raise Exit(EXIT_USAGE, f"{usage.prog} only shows places: give --dry-run.")
    config = _config_of(args, engine_arguments(words))
    prepare_streams()
    screen = Screen()
    tables, places, gpus = trio.run(_find, config, read_earlier_loads(args.config))
    rows = [_row(name, tables[name], found, gpus or ()) for name, found in places.items()]
    if args.json:
        screen.line(json.dumps({"workers": rows}, ensure_ascii=False))
    else:
        _show(screen, rows)
    return EXIT_NO_PLACE if any(row["why"] for row in rows) else 0


def _config_of(args: argparse.Namespace, arguments: Mapping[str, Any]) -> Config:
    """Return the configuration that the command line names, or that with a worker for its model. Raises Exit 64."""
    if args.model is not None and args.config is not None:
        raise Exit(EXIT_USAGE, "ichat.pyz place: give either -c FILE, or MODEL_PATH.")
    if args.model is None:
        return configuration.load(pathlib.Path(args.config or USUAL_FILE))
    given = {key: getattr(args, key) for key in ("gpus", "gpu_memory_gib", "gpu_ids", "backend")}
    table = {"gpus": "auto"} | {key: value for key, value in given.items() if value is not None}
    name = os.path.basename(args.model.rstrip("/")) or args.model
    table |= {"model_name": name, "model_path": args.model, "backend_args": dict(arguments)}
    try:
        return Config(managed_workers=[configuration.read_worker(table, Config())])
    except ApiError as error:
        raise Exit(EXIT_USAGE, f"ichat.pyz place: {error}") from error


async def _find(
    config: Config, memories: LearntMemories
) -> tuple[Mapping[str, ManagedWorkerConfig], Places, Sequence[PlaceableGpu] | None]:
    """Return the tables, the tables with `gpus` with their places, and the GPUs here."""
    tables: dict[str, ManagedWorkerConfig] = {}
    wishes: dict[str, Wish] = {}
    for table in each_copy(config.managed_workers):
        name = id_for(table.model_name, tables)
        tables[name] = table
        if table.gpus is not None:
            environment, python = environment_of(config, table, ""), python_of(config, table)
            wish = await trio.to_thread.run_sync(read_wish, table, environment, python)
            wishes[name] = attrs.evolve(wish, memories=memories)
    is_nvidia = all(devices_of(config, tables[name]) == VISIBLE for name in wishes)
    found = await gpus_for(VISIBLE) if is_nvidia else None
    gpus = await trio.to_thread.run_sync(unbooked, found)
    return tables, place_tables(tables, wishes, gpus), gpus


def _row(
    name: str, wish: ManagedWorkerConfig, found: ManagedWorkerConfig | NoPlace, gpus: Sequence[PlaceableGpu]
) -> dict[str, Any]:
    """Return the place of a worker as JSON has it."""
    row: dict[str, Any] = {"worker_id": name, "gpus": wish.gpus, "gpu_ids": None, "kind": None, "claim_bytes": None}
    if isinstance(found, NoPlace):
        return {**row, "tensor_parallel_size": None, "share": None, "why": found.sentence}
    mine = [gpu for gpu in gpus if gpu.number in (found.gpu_ids or ())]
    size, part = (mine[0].memory_bytes if mine else None), wish.gpus if isinstance(wish.gpus, float) else 1.0
    arguments = arguments_of(found)
    return {
        **row,
        "gpu_ids": found.gpu_ids,
        "kind": mine[0].kind if mine else None,
        "claim_bytes": None if size is None else int(USABLE * part * size),
        "tensor_parallel_size": int(number_of(arguments, *TENSOR, default=1)),
        "share": arguments.get("gpu_memory_utilization", arguments.get("mem_fraction_static")),
        "why": None,
    }


def _show(screen: Screen, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        screen.line("No worker has gpus: there is nothing to place.")
        return
    if places := [row for row in rows if not row["why"]]:
        columns = ("worker", "gpus", "place", "kind", "GiB on each", "tensor parallel", "engine's share")
        screen.table(columns, map(_cells, places))
    for row in rows:
        if row["why"]:
            screen.line(f"{row['worker_id']}: {row['why']}", "bold red")


def _cells(row: Mapping[str, Any]) -> tuple[object, ...]:
    place = f"GPU {', '.join(map(str, row['gpu_ids']))}" if row["gpu_ids"] else "the processor"
    size = "" if row["claim_bytes"] is None else gib(row["claim_bytes"])
    return (row["worker_id"], row["gpus"], place, row["kind"], size, row["tensor_parallel_size"], row["share"])
