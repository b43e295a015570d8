"""The doctor's findings, as data."""

import os
from collections.abc import Sequence
from typing import Literal

import attrs

Level = Literal["ok", "warning", "error"]


@attrs.frozen
class Finding:
    """The result of a check."""

    level: Level
    name: str
    """The examined thing, in a word or two."""
    sentence: str
    """The fact; for a problem also the remedy."""
    command: str = ""
    """The command to type; empty if there is none."""


@attrs.frozen
class FindingGroup:
    """The findings about a part of a set-up."""

    title: str
    findings: Sequence[Finding]


def worst_of(groups: Sequence[FindingGroup]) -> Level:
    """Return the worst level among the findings."""
    levels = {finding.level for group in groups for finding in group.findings}
    return "error" if "error" in levels else "warning" if "warning" in levels else "ok"


def reason_of(error: OSError) -> str:
    """Return the message of a system error, without its number and its place."""
    known = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else ""
    return (known or error.strerror or str(error)).rstrip(".")
