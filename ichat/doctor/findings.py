"""The doctor's findings: as data, as lines with a mark and a command, and as JSON."""

import json
import shutil
import textwrap
from collections.abc import Sequence
from typing import Literal

import attrs

from ichat.cli.screen import Screen, one_line
from ichat.program import as_typed_here

COLUMNS_MAX = 100
COLUMNS_MIN = 40
RIGHT_MAX = 20
"""A group with more `ok` findings than this shows only their number."""

_MARKS = {"ok": "✓", "warning": "!", "error": "✗"}
_PLAIN_MARKS = {"ok": "+", "warning": "!", "error": "x"}
_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}
_INDENT = "    "

Level = Literal["ok", "warning", "error"]


@attrs.frozen
class Finding:
    """The result of a check."""

    level: Level
    name: str
    """The examined thing, in a word or two."""
    sentence: str = attrs.field(converter=as_typed_here)
    """The fact; for a problem also the remedy."""
    command: str = attrs.field(default="", converter=as_typed_here)
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


def findings_by(*rows: tuple[object, Level, str, str, str]) -> list[Finding]:
    """Return a finding for each row with a true condition: condition, level, name, sentence, command."""
    return [Finding(level, name, sentence, command) for is_so, level, name, sentence, command in rows if is_so]


def show_report(screen: Screen, groups: Sequence[FindingGroup], seconds: float, encoding: str) -> None:
    """Write the findings for a reader, within the columns of the terminal."""
    columns = max(COLUMNS_MIN, min(shutil.get_terminal_size().columns, COLUMNS_MAX))
    try:
        "✓✗→".encode(encoding)
        marks, arrow = _MARKS, "→"
    except (UnicodeError, LookupError):
        marks, arrow = _PLAIN_MARKS, ">"
    for group in groups:
        screen.line(group.title, "bold")
        right = [finding for finding in group.findings if finding.level == "ok"]
        is_long = len(right) > RIGHT_MAX
        shown = [finding for finding in group.findings if not (is_long and finding.level == "ok")]
        for finding in shown:
            text = one_line(f"{finding.name}: {finding.sentence}")
            lines = textwrap.wrap(text, columns - len(_INDENT), break_long_words=False, break_on_hyphens=False)
            screen.write(f"  {marks[finding.level]} ", _STYLES[finding.level])
            screen.line(f"\n{_INDENT}".join(lines))
            if finding.command:
                screen.line(f"{_INDENT}{arrow} {one_line(finding.command)}", "cyan")
        if is_long:
            screen.write(f"  {marks['ok']} ", _STYLES["ok"])
            screen.line(f"{len(right)} findings say that nothing is wrong (--json has them).")
    levels = [finding.level for group in groups for finding in group.findings]
    errors, warnings = levels.count("error"), levels.count("warning")
    counts = f"{_counted(errors, 'error')}, {_counted(warnings, 'warning')}, {len(levels)} checks in {seconds:.1f} s."
    screen.line(counts, _STYLES[worst_of(groups)])


def to_json(groups: Sequence[FindingGroup], seconds: float) -> str:
    """Return the findings as JSON."""
    shown = [attrs.asdict(finding) | {"group": group.title} for group in groups for finding in group.findings]
    return json.dumps({"level": worst_of(groups), "seconds": round(seconds, 2), "findings": shown}, ensure_ascii=False)


def _counted(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
