"""The checks of the values in a heartbeat: each check raises ValueError that names the mistake."""

import json
import re
from collections.abc import Sized
from typing import Any, cast

from ichat.config.checks import MODEL_NAME_CHARACTERS_MAX
from ichat.config.strict import Check

NAMES_MAX = 256
MODELS_MAX = 2048
ARGS_BYTES_MAX = 256 * 1024
ARGS_DEPTH_MAX = 32
FAILURE_CHARACTERS_MAX = 2000
HEARTBEAT_INTERVAL_MAX_S = 3600.0
SHORT_CHARACTERS_MAX = 4096
"""The limit of a path, and of the description of a worker's present phase."""
MACHINE_NAME_CHARACTERS_MAX = 256
GPUS_MAX = 64
PHASES_MAX = 64
"""The most phases of a load."""
PHASE_CHARACTERS_MAX = 64
SECONDS_MAX = 1e9
PROGRESS_MAX = 64
PROGRESS_NAME_CHARACTERS_MAX = 64
TOKENS_MAX = 10**12
"""The longest context that a model may have."""
_PROGRESS_NAME = re.compile(rf"[A-Za-z0-9_.:-]{{1,{PROGRESS_NAME_CHARACTERS_MAX}}}")
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,253}")


def is_host(value: str) -> None:
    """Check a name or an address of a host."""
    labels = value.removesuffix(".").split(".")
    if not _HOST.fullmatch(value) or not all(0 < len(label) < 64 for label in labels):
        raise ValueError("must be a host name or an address")


def printable(characters_max: int) -> Check:
    """Return the check that a text is printable and not too long."""

    def check(value: str) -> None:
        if len(value) > characters_max or not value.isprintable():
            raise ValueError(f"must be at most {characters_max} printable characters")

    return check


is_name = printable(MODEL_NAME_CHARACTERS_MAX)
is_short = printable(SHORT_CHARACTERS_MAX)
is_text = printable(MACHINE_NAME_CHARACTERS_MAX)


def at_most(count: int, things: str) -> Check:
    """Return the check that there are not too many of something."""

    def check(values: Sized) -> None:
        if len(values) > count:
            raise ValueError(f"must be at most {count} {things}")

    return check


def are_versions(values: dict[str, str]) -> None:
    """Check the versions of packages by their names."""
    at_most(NAMES_MAX, "versions")(values)
    for name, version in values.items():
        is_name(name)
        is_name(version)


def are_names(values: list[str]) -> None:
    """Check a list of names."""
    at_most(NAMES_MAX, "names")(values)
    for value in values:
        is_name(value)


def _depth_of(value: object) -> int:
    """Return how deep lists and tables are nested; counting stops above the limit."""
    depth, level = 0, [value]
    while level and depth <= ARGS_DEPTH_MAX:
        inner = [list(cast("dict[str, object]", one).values()) if isinstance(one, dict) else one for one in level]
        level = [item for one in inner if isinstance(one, list) for item in cast("list[object]", one)]
        depth += bool(level)
    return depth


def are_args(value: dict[str, Any]) -> None:
    """Check an engine's arguments."""
    if _depth_of(value) > ARGS_DEPTH_MAX or len(json.dumps(value, allow_nan=False)) > ARGS_BYTES_MAX:
        raise ValueError(f"must be at most {ARGS_BYTES_MAX} bytes of JSON, and not nested too deep")


def is_progress(value: dict[str, float | None]) -> None:
    """Check an engine's own figures about its load."""
    if any(number is not None and not 0 <= number <= 1e15 for number in value.values()):
        raise ValueError("must be numbers from 0 to 1e15")
    if len(value) > PROGRESS_MAX or not all(map(_PROGRESS_NAME.fullmatch, value)):
        words = f"must be at most {PROGRESS_MAX} numbers"
        raise ValueError(f"{words}, with names of at most {PROGRESS_NAME_CHARACTERS_MAX} letters, digits or _ . : -")
