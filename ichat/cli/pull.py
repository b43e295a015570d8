"""`ichat.pyz pull MODEL`: a model is downloaded by a process of an engine's environment, with its progress."""

import os
import pathlib
import sys
import time
from collections.abc import Sequence

import trio

from ichat.cli.gateway_address import USUAL_FILE
from ichat.cli.screen import Screen, Spinner, note, prepare_streams, raise_interrupts
from ichat.config import load as configuration
from ichat.config.command_line import CommandLineParser
from ichat.config.hubs import HUBS, Hub, is_hub_name
from ichat.config.schema import Config
from ichat.downloads.place import PACKAGES, USUAL, place_of, whole_version
from ichat.downloads.report import DownloadReport
from ichat.downloads.starting import DownloadOrder, find_python, has_library, run_download
from ichat.errors import EXIT_INTERRUPTED, EXIT_UNAVAILABLE, EXIT_USAGE, Exit

PLAIN_S = 5.0
"""Seconds between two lines of progress where the output is no terminal."""


def parser() -> CommandLineParser:
    """Return the parser of the command."""
    usage = CommandLineParser(
        prog="ichat.pyz pull",
        description="Download a model from a hub into the cache that engines read. It goes on where it was cut off.",
        allow_abbrev=False,
    )
    usage.add_argument("model", metavar="MODEL", help="its name on the hub, like Qwen/Qwen3-0.6B")
    usage.add_argument("--hub", choices=HUBS, default=HUBS[0], help=f"the hub (default: {HUBS[0]}, or HF_ENDPOINT)")
    usage.add_argument("--revision", metavar="NAME", default="", help="a branch, a tag or a commit")
    usage.add_argument("--cache", metavar="DIRECTORY", help="the directory for models; else that of the hub's library")
    usage.add_argument("--all-files", action="store_true", help="also files that engines do not read")
    usage.add_argument("--fresh", action="store_true", help="ask the hub for a newer version, though the model is here")
    usage.add_argument("--python", metavar="FILE", help="the interpreter with the hub's library; else an engine's")
    usage.add_argument("--config", "-c", metavar="FILE", help=f"the configuration; else {USUAL_FILE} here, if any")
    return usage


def run(argv: Sequence[str]) -> int:
    """Download a model, print its directory, and return the exit code. Raises Exit 64 and 69."""
    usage = parser()
    args = usage.parse_args(list(argv))
    if not is_hub_name(args.model):
        raise Exit(EXIT_USAGE, f"{usage.prog}: MODEL is a name on a hub, like Qwen/Qwen3-0.6B, not {args.model!r}.")
    hub: Hub = args.hub
    prepare_streams()
    screen, place = Screen(), place_of(hub, args.model, os.environ, args.cache)
    directory = None if args.fresh else whole_version(place, args.revision or USUAL[hub])
    if directory is None:
        config = read_config(args.config)
        python = os.path.abspath(args.python) if args.python else _python_for(hub, config)
        if not has_library(python, hub):
            raise Exit(EXIT_UNAVAILABLE, f"{python} has no {PACKAGES[hub]}: {_remedy(hub)}")
        stall_s = config.downloads.stall_s
        order = DownloadOrder(python, place, args.revision, stall_s, args.all_files, args.fresh)
        raise_interrupts()
        try:
            directory = _download(order)
        except KeyboardInterrupt:
            note(f"The download was stopped; it goes on with `ichat.pyz pull {args.model}`.")
            return EXIT_INTERRUPTED
    screen.line(directory)
    return 0


def read_config(path: str | None) -> Config:
    """Return the configuration in a file, else in the usual file here, else the defaults. Raises Exit 64."""
    file = path or (USUAL_FILE if os.path.isfile(USUAL_FILE) else None)
    return Config() if file is None else configuration.load(pathlib.Path(file))


def _python_for(hub: Hub, config: Config) -> str:
    python = find_python(hub, {name: engine.python for name, engine in config.engines.items()})
    if python is None:
        raise Exit(EXIT_UNAVAILABLE, f"No interpreter here has {PACKAGES[hub]}: {_remedy(hub)}")
    return python


def _remedy(hub: Hub) -> str:
    if hub == "huggingface":
        return "`./build engine vllm` makes an environment with it, or --python names an interpreter that has it."
    return "install it (`uv pip install --python FILE modelscope`), or name an interpreter that has it (--python)."


class _Progress:
    """Shows a download's reports: each on a terminal, else when something is new, and every few seconds."""

    def __init__(self, name: str, line: Spinner) -> None:
        self._name = name
        self._line = line
        self._shown_at, self._seen = 0.0, ("", "")

    def __repr__(self) -> str:
        return f"<_Progress of {self._name}>"

    def show(self, report: DownloadReport) -> None:
        now, kind = time.monotonic(), (report.state, report.why)
        if sys.stderr.isatty() or kind != self._seen or now - self._shown_at >= PLAIN_S:
            self._line.show(f"{self._name}: {report.words()}")
            self._shown_at, self._seen = now, kind


def _download(order: DownloadOrder) -> str:
    """Run the download's process, show its progress, and return the model's directory. Raises Exit 69."""
    with Spinner() as line:
        last = trio.run(run_download, order, None, _Progress(order.place.name, line).show)
    if last.state != "done":
        raise Exit(EXIT_UNAVAILABLE, last.why)
    return last.directory
