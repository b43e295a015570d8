"""What the doctor has found, as data."""

import os
from collections.abc import Sequence
from typing import Literal

import attrs

Level = Literal["ok", "warning", "error"]


@attrs.frozen
class Finding:
    """What one check has found."""

    level: Level
    name: str
    """What was examined, in a word or two."""
    sentence: str
    """What is so; a problem says what to do as well."""
    command: str = ""
    """What to type; empty where there is nothing to type."""


@attrs.frozen
class FindingGroup:
    """The findings about one part of a set-up."""

    title: str
    findings: Sequence[Finding]


def worst_of(groups: Sequence[FindingGroup]) -> Level:
    """Return the worst level among the findings."""
    levels = {finding.level for group in groups for finding in group.findings}
    return "error" if "error" in levels else "warning" if "warning" in levels else "ok"


def reason_of(error: OSError) -> str:
    """Return what an error of the system says, without its number and its place."""
    known = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else ""
    return (known or error.strerror or str(error)).rstrip(".")
