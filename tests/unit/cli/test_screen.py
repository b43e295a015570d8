"""Texts for a terminal: what is removed from them, how wide they are, and how values are written."""

import math

import pytest

from ichat.cli.json_values import list_of, object_of, objects_of, parse_object
from ichat.cli.screen import (
    NONE,
    Screen,
    clean,
    cut,
    duration,
    lines,
    log_line,
    one_line,
    percent,
    size,
    width_of,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07a\x1b]8;;http://x\x1b\\b", "ab"),
        ("\x1bPq#1\x1b\\a\x1b(Bb\x1bc", "ab"),
        ("a\x00\x07\x08\x7f\x9b2Jb", "a2Jb"),
        ("\ud83d", "\ufffd"),
    ],
)
def test_a_clean_text_does_nothing_to_the_terminal(text, shown):
    """Sequences and control characters are removed."""
    assert clean(text) == shown


@pytest.mark.parametrize(
    ("value", "line", "several"),
    [
        ("a\u202eb\r\n  c\td", "ab c d", "ab\n  c     d"),
        ("  a  \n", "a", "  a"),
        (7, "7", "7"),
        (None, "None", "None"),
        ("", "", ""),
    ],
)
def test_a_value_is_one_clean_line_or_several(value, line, several):
    """Characters that turn the order of letters around are removed; several lines keep their indents."""
    assert (one_line(value), lines(value)) == (line, several)


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("abc", 3, "abc"),
        ("abcd", 3, "ab…"),
        ("通义千问", 8, "通义千问"),
        ("通义千问", 7, "通义千…"),
        ("通义千问", 6, "通义…"),
        ("e\u0301e\u0301e\u0301", 3, "e\u0301e\u0301e\u0301"),
        ("abc", 1, "…"),
        ("abc", 0, ""),
    ],
)
def test_a_cut_line_fills_no_more_columns_than_allowed(text, width, shown):
    """A Chinese character fills two columns, a combining mark none."""
    assert cut(text, width) == shown
    assert width_of(cut(text, width)) <= width


def test_sizes_shares_and_times_have_units():
    """A value of another kind is an empty cell."""
    sizes = [
        (0, "0B"),
        (593, "593B"),
        (1536, "1.5KiB"),
        (2**20, "1.0MiB"),
        (3 * 2**39, "1.5TiB"),
        (5 * 2**30, "5.0GiB"),
        (None, NONE),
    ]
    assert [size(number) for number, _ in sizes] == [text for _, text in sizes]
    times = [(0, "0.0s"), (9.94, "9.9s"), (60, "1m0s"), (3661, "1h1m"), (90000, "1d1h"), (None, NONE), (math.inf, NONE)]
    assert [duration(seconds) for seconds, _ in times] == [text for _, text in times]
    assert [percent(share) for share in (0, 0.375, 1.0, "x")] == ["0%", "38%", "100%", NONE]


def test_a_log_line_keeps_only_wanted_colours_and_the_last_state():
    assert log_line("\x1b[1mb\x1b[H\x1b[0m", colours=True) == "\x1b[1mb\x1b[0m\x1b[0m"
    assert log_line("\x1b[1mb\x1b[0m", colours=False) == "b"
    assert log_line("10%\r20%\r\n", colours=True) == "20%"


def test_plain_tables_cut_long_cells_but_not_the_last(capsys):
    """A wide table cuts none; an empty cell is a column for `awk` as well."""
    rows = [("x" * 200, None, "y" * 200)]
    Screen().table(("a b", "c", "d"), rows)
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["A_B", "C", "D"]
    assert row.split() == [f"{'x' * 119}…", "-", "y" * 200]
    Screen(is_wide=True).table(("a", "c", "d"), rows)
    assert capsys.readouterr().out.splitlines()[1].split() == ["x" * 200, "-", "y" * 200]


def test_facts_without_a_value_are_left_out(capsys):
    """Zero is a value."""
    Screen().facts([("a", 0), ("none", None), ("empty", ""), ("long name", "x\ny")])
    assert capsys.readouterr().out.splitlines() == ["a          0", "long name  x y"]


@pytest.mark.parametrize("value", [None, 7, "x", {"a": 1}])
def test_a_value_of_another_kind_is_an_empty_list(value):
    """A gateway may be older or newer: objects are found where they should be, and nothing elsewhere."""
    assert (list_of(value), objects_of(value), objects_of([value])) == ([], [], [value] if value == {"a": 1} else [])
    assert object_of(value) == (value if value == {"a": 1} else {})
    assert object_of([]) == parse_object("[]") == parse_object("{") == {}
