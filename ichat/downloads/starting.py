"""How the process of a download is started and followed, and what its end means."""

import glob
import math
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

import attrs
import trio

from ichat.config.hubs import Hub
from ichat.config.interpreters import find_interpreter
from ichat.downloads.place import PACKAGES, ModelPlace
from ichat.downloads.report import LINE_BYTES_MAX, DownloadReport, read_report
from ichat.program import own_command

SILENT_MORE_S = 60.0
"""Seconds after `stall_s` without a report after which a download's process counts as hung."""
KILL_S = 5.0
"""Seconds that a download's process has to end, after the end of its standard input."""
_ENGINES = ("vllm", "sglang")
_LAST_BYTES = 4096


@attrs.frozen
class DownloadOrder:
    """A model that a process of an engine's environment will download."""

    python: str
    place: ModelPlace
    revision: str
    """Empty: the hub's usual revision."""
    stall_s: float
    wants_all: bool = False
    is_fresh: bool = False

    def command(self) -> Sequence[str]:
        """Return the command of the process."""
        place = self.place
        flags = {"--all-files": self.wants_all, "--fresh": self.is_fresh}
        return [
            *own_command(self.python), "download", place.name, f"--hub={place.hub}", f"--revision={self.revision}",
            f"--cache={place.cache}", f"--stall-s={self.stall_s:g}", *(flag for flag in flags if flags[flag]),
        ]  # fmt: skip


def find_python(hub: Hub, engines: Mapping[str, str | None]) -> str | None:
    """Return the first interpreter that has a hub's library; None: none has. Only files are looked at.

    `engines` are the interpreters that the configuration names, by the engines' names.
    """
    for engine in dict.fromkeys((*engines, *_ENGINES)):
        python = engines.get(engine) or find_interpreter(engine)
        if python is not None and has_library(python, hub):
            return python
    return find_interpreter(PACKAGES[hub])


def has_library(python: str, hub: Hub) -> bool:
    """Return whether a hub's library is installed for an interpreter. Only files are looked at."""
    prefix = glob.escape(os.path.dirname(os.path.dirname(python)))
    return bool(glob.glob(f"{prefix}/lib*/python3*/*-packages/{PACKAGES[hub]}-*.dist-info"))


async def run_download(
    order: DownloadOrder, environment: Mapping[str, str] | None, show: Callable[[DownloadReport], None]
) -> DownloadReport:
    """Run a download's process to its end, and return the last report: `done` or `failed`.

    `environment` is that of the process; None: that of this process. `show` gets the reports under way. The process
    ends with the caller's scope. Raises OSError if it cannot be started.
    """
    silent_s = order.stall_s + SILENT_MORE_S
    with tempfile.TemporaryFile() as errors:
        process = await trio.lowlevel.open_process(
            order.command(), env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
        try:
            last = await _follow(process, silent_s, show)
            with trio.fail_after(silent_s):
                await process.wait()
        except trio.TooSlowError:
            why = f"The download of {order.place.name} said nothing for {silent_s:g} s and was ended: ask again."
            return DownloadReport("failed", why)
        finally:
            with trio.CancelScope(shield=True):
                await _end(process)
        return _last_of(last, process.returncode, errors)


async def _follow(
    process: trio.Process, silent_s: float, show: Callable[[DownloadReport], None]
) -> DownloadReport | None:
    """Pass on a process' reports until it ends, and return the last. Raises TooSlowError after a long silence."""
    assert process.stdout is not None
    rest, last = b"", None
    while True:
        with trio.fail_after(silent_s):
            part = await process.stdout.receive_some(LINE_BYTES_MAX)
        if not part:
            return last
        *lines, rest = (rest + part).split(b"\n")
        rest = rest[:LINE_BYTES_MAX]
        for line in lines:
            if (report := read_report(line)) is not None:
                last = report
                if report.state not in ("done", "failed"):
                    show(report)


async def _end(process: trio.Process) -> None:
    """Have a process end, and wait for that."""
    assert process.stdin is not None
    assert process.stdout is not None
    await process.stdin.aclose()
    with trio.move_on_after(KILL_S if process.returncode is None else math.inf):
        await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
    await process.stdout.aclose()


def _last_of(report: DownloadReport | None, returncode: int | None, errors: BinaryIO) -> DownloadReport:
    """Return the last report of a process, or the failure of a process that ended without.

    `errors` has its standard error.
    """
    is_done = report is not None and report.state == "done" and returncode == 0
    if report is not None and (is_done or report.state == "failed"):
        return report
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - _LAST_BYTES))
    lines = [line.strip() for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    why = f": {lines[-1][:300]}" if lines else ""
    words = f"The download's process ended with {returncode}{why}; ask again: the download goes on then."
    return DownloadReport("failed", words)
