"""How the process of a download is started, and what its end means."""

import glob
import os
from collections.abc import Mapping, Sequence
from typing import BinaryIO

import attrs

from ichat.config.interpreters import find_interpreter
from ichat.downloads.place import ModelPlace
from ichat.downloads.report import DownloadReport
from ichat.program import own_command

PACKAGES = {"huggingface": "huggingface_hub", "modelscope": "modelscope"}
"""The library of each hub."""
SILENT_MORE_S = 60.0
"""Seconds after `stall_s` without a report after which a download's process counts as hung."""
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


def find_python(hub: str, engines: Mapping[str, str | None]) -> str | None:
    """Return the first interpreter that has a hub's library; None: none has. Only files are looked at.

    `engines` are the interpreters that the configuration names, by the engines' names.
    """
    for engine in dict.fromkeys((*engines, *_ENGINES)):
        python = engines.get(engine) or find_interpreter(engine)
        if python is not None and has_library(python, hub):
            return python
    return find_interpreter(PACKAGES[hub])


def has_library(python: str, hub: str) -> bool:
    """Return whether a hub's library is installed for an interpreter. Only files are looked at."""
    prefix = glob.escape(os.path.dirname(os.path.dirname(python)))
    return bool(glob.glob(f"{prefix}/lib*/python3*/*-packages/{PACKAGES[hub]}-*.dist-info"))


def failure_after(report: DownloadReport | None, returncode: int | None, errors: BinaryIO) -> str:
    """Return why a download has failed, in a sentence; "" if it has not.

    `report` is the last report of its process; `errors` has the process' standard error.
    """
    if report is not None and report.state == "done" and returncode == 0:
        return ""
    if report is not None and report.state == "failed":
        return report.why
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - _LAST_BYTES))
    lines = [line.strip() for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    why = f": {lines[-1][:300]}" if lines else ""
    return f"The download's process ended with {returncode}{why}; ask again: the download goes on then."
