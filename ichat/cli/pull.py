"""`ichat.pyz pull MODEL`: a model is downloaded by a process of an engine's environment, with its progress."""

import os
import pathlib
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from ichat.cli.gateway_address import USUAL_FILE
from ichat.cli.screen import Screen, Spinner, note, prepare_streams, raise_interrupts
from ichat.config import load as configuration
from ichat.config.command_line import CommandLineParser
from ichat.config.hubs import HUBS, Hub, is_hub_name
from ichat.config.schema import Config
from ichat.downloads.place import USUAL, place_of, whole_version
from ichat.downloads.report import LINE_BYTES_MAX, DownloadReport, read_report
from ichat.downloads.starting import (
    PACKAGES,
    SILENT_MORE_S,
    DownloadOrder,
    failure_after,
    find_python,
    has_library,
)
from ichat.errors import EXIT_INTERRUPTED, EXIT_UNAVAILABLE, EXIT_USAGE, Exit

PLAIN_S = 5.0
"""Seconds between two lines of progress where the output is no terminal."""
END_S = 10.0


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


def _download(order: DownloadOrder) -> str:
    """Run the download's process, show its progress, and return the model's directory. Raises Exit 69."""
    with tempfile.TemporaryFile() as errors, Spinner() as progress:
        process = subprocess.Popen(
            order.command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            bufsize=0,
        )
        try:
            last = _follow(process, order, progress)
        finally:
            assert process.stdin is not None
            process.stdin.close()  # it ends by that
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        why = failure_after(last, process.returncode, errors)
    if last is None or why:
        raise Exit(EXIT_UNAVAILABLE, why)
    return last.directory


def _follow(process: "subprocess.Popen[bytes]", order: DownloadOrder, progress: Spinner) -> DownloadReport | None:
    """Show a download's reports until its process has ended, and return the last report. Raises Exit 69."""
    assert process.stdout is not None
    last, shown_at, seen = None, 0.0, ("", "")
    silent_s = order.stall_s + SILENT_MORE_S
    while True:
        if not select.select([process.stdout], [], [], silent_s)[0]:
            process.kill()
            raise Exit(EXIT_UNAVAILABLE, f"The download said nothing for {silent_s:g} s and was ended: ask again.")
        line = process.stdout.readline(LINE_BYTES_MAX)
        if not line:
            return last
        last = read_report(line) or last
        if last is None or last.state in ("done", "failed"):
            continue
        now, kind = time.monotonic(), (last.state, last.why)
        if sys.stderr.isatty() or kind != seen or now - shown_at >= PLAIN_S:
            progress.show(f"{order.place.name}: {last.words()}")
            shown_at, seen = now, kind
