"""How the findings are shown: a mark, a sentence and a command, in groups; or JSON."""

import json
import shutil
import textwrap
from collections.abc import Sequence

import attrs

from ichat.cli.screen import Screen, one_line
from ichat.doctor.findings import FindingGroup, worst_of

COLUMNS_MAX = 100
COLUMNS_MIN = 40
RIGHT_MAX = 20
"""A group with more `ok` findings than this shows only their number."""

_MARKS = {"ok": "✓", "warning": "!", "error": "✗"}
_PLAIN_MARKS = {"ok": "+", "warning": "!", "error": "x"}
_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}
_INDENT = "    "


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
        for finding in group.findings:
            if finding.level == "ok" and len(right) > RIGHT_MAX:
                continue
            text = one_line(f"{finding.name}: {finding.sentence}")
            lines = textwrap.wrap(text, columns - len(_INDENT), break_long_words=False, break_on_hyphens=False)
            screen.write(f"  {marks[finding.level]} ", _STYLES[finding.level])
            screen.line(f"\n{_INDENT}".join(lines))
            if finding.command:
                screen.line(f"{_INDENT}{arrow} {one_line(finding.command)}", "cyan")
        if len(right) > RIGHT_MAX:
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
