"""Findings: the worst level, their order, and how they are shown in a terminal and as JSON."""

import json

import pytest

from ichat.cli.screen import Screen
from ichat.doctor.findings import Finding, FindingGroup, findings_by, show_report, to_json, worst_of

OK, WARNING, ERROR = (Finding(level, level, f"It is {level}.") for level in ("ok", "warning", "error"))


@pytest.mark.parametrize(
    ("levels", "worst"),
    [([], "ok"), ([OK], "ok"), ([WARNING, OK], "warning"), ([OK, ERROR, WARNING], "error")],
)
def test_the_worst_finding_decides(levels, worst):
    """Without findings all is well; the group of a finding does not matter."""
    assert worst_of([FindingGroup("A", levels[:1]), FindingGroup("B", levels[1:])]) == worst


def test_rows_with_a_true_condition_are_findings():
    """The order of the rows stays."""
    rows = [(True, "ok", "a", "A.", ""), ([], "error", "b", "B.", "b"), ([1], "warning", "c", "C.", "c")]
    assert findings_by(*rows) == [Finding("ok", "a", "A."), Finding("warning", "c", "C.", "c")]


def shown(capsys, monkeypatch, groups, *, columns="80", encoding="utf-8"):
    monkeypatch.setenv("COLUMNS", columns)
    show_report(Screen(), groups, 0.26, encoding)
    return capsys.readouterr().out.splitlines()


def test_a_report_counts_many_findings_that_are_ok(capsys, monkeypatch):
    """Problems are shown; more than 20 findings without a problem are only counted."""
    found = [Finding("ok", f"w{number}", "It is ready.") for number in range(1000)]
    groups = [FindingGroup("Gateway", [*found, Finding("error", "w", "It is gone.")])]
    assert shown(capsys, monkeypatch, groups) == [
        "Gateway",
        "  ✗ w: It is gone.",
        "  ✓ 1000 findings say that nothing is wrong (--json has them).",
        "1 error, no warnings, 1001 checks in 0.3 s.",
    ]


def test_a_report_fits_the_terminal_and_its_encoding(capsys, monkeypatch):
    """Long sentences are folded below their beginning, commands are not; ASCII has marks of its own."""
    groups = [FindingGroup("A", [Finding("warning", "a", "It is a long\x1b[2J sentence. " * 2, "run " + "x" * 60)])]
    assert shown(capsys, monkeypatch, groups, columns="40", encoding="ascii") == [
        "A",
        "  ! a: It is a long sentence. It is a",
        "    long sentence.",
        f"    > run {'x' * 60}",
        "no errors, 1 warning, 1 checks in 0.3 s.",
    ]


def test_findings_as_json_name_their_group():
    told = json.loads(to_json([FindingGroup("A", [OK]), FindingGroup("B", [WARNING])], 1.234))
    assert (told["level"], told["seconds"]) == ("warning", 1.23)
    assert told["findings"][1] == {
        "group": "B", "level": "warning", "name": "warning", "sentence": "It is warning.", "command": ""
    }  # fmt: skip
