"""The whole examination: parts run at the same time, each bounded, and become findings in their order."""

import pytest
import trio

from ichat.doctor.examination import FLAGS_S, _gather, parser
from ichat.doctor.findings import Finding
from ichat.errors import ApiError


def after(seconds, *findings, error=None):
    """Return a part that has these findings, or this error, after some seconds."""

    async def part():
        await trio.sleep(seconds)
        if error is not None:
            raise error
        return list(findings)

    return part


GOOD = Finding("ok", "a", "It is right.")


async def test_parts_run_at_the_same_time_in_a_fixed_order(autojump_clock):
    """The groups have the order of the parts, whichever ends first."""
    groups, began = {}, trio.current_time()
    await _gather({"A": after(5, GOOD), "B": after(1, GOOD, GOOD), "C": after(3)}, groups, began + 8)
    assert groups == {"A": [GOOD], "B": [GOOD, GOOD], "C": []}
    assert list(groups) == ["A", "B", "C"]
    assert trio.current_time() - began == 5


async def test_a_slow_part_is_a_warning_and_holds_up_no_other(autojump_clock):
    """Only the managed workers have longer, since an engine may have to be started for its flags."""
    groups, began = {}, trio.current_time()
    parts = {"A": after(9, GOOD), "Managed workers": after(FLAGS_S, GOOD), "B": after(1, GOOD)}
    await _gather(parts, groups, began + 8)
    [found] = groups["A"]
    assert (found.level, found.name) == ("warning", "time")
    assert groups["Managed workers"] == groups["B"] == [GOOD]


async def test_a_part_with_an_error_is_a_warning_that_has_the_reason(autojump_clock):
    """Errors of the system and of values are expected; the first of several is named."""
    several = ExceptionGroup("two", [OSError(116, "stale"), ValueError("x")])
    parts = {
        "A": after(0, error=OSError(116, "stale", "/secret")), "B": after(0, error=ValueError("No number.")),
        "C": after(0, error=several), "D": after(0, error=ValueError()), "E": after(0, GOOD),
    }  # fmt: skip
    groups = {}
    await _gather(parts, groups, trio.current_time() + 8)
    reasons = {title: found[0].sentence for title, found in groups.items() if found[0].level == "warning"}
    sentence = "This part could not be examined ({})."
    assert reasons == {
        "A": sentence.format("Stale file handle"), "B": sentence.format("No number"),
        "C": sentence.format("Stale file handle"), "D": sentence.format("ValueError"),
    }  # fmt: skip
    assert groups["E"] == [GOOD]


async def test_a_bug_in_a_part_is_no_finding(autojump_clock):
    """It ends the examination."""
    with pytest.raises(ExceptionGroup) as caught:
        await _gather({"A": after(0, error=ApiError(500, "x", "A bug."))}, {}, trio.current_time() + 8)
    assert caught.group_contains(ApiError)


def test_the_command_line_names_a_file_or_a_gateway():
    given = parser().parse_args(["-c", "x.toml", "--json"])
    assert (given.config, given.gateway, given.json) == ("x.toml", None, True)
    assert parser().parse_args(["-g", "gw"]).gateway == "gw"
