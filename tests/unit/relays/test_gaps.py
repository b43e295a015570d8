"""The gaps between the pieces of streams, from a relay to its owner."""

from collections import defaultdict

import pytest

from ichat.http.body_mover import empty_gap_histogram
from ichat.relays.gaps import GapsHere, add_gaps
from ichat.relays.values import TalkError


def test_each_gap_is_reported_once():
    """A stream goes on counting in the same histogram after a report, and the owner has the sums of all reports."""
    here, there = GapsHere(), defaultdict(empty_gap_histogram)
    counts = here.of("m")
    for number in range(1, 4):
        counts[5] += number
        counts[-1] += 0.25
        add_gaps(here.report(), there.__getitem__)
    assert here.report() == {}
    assert (there["m"][5], there["m"][-1], sum(there["m"])) == (6, 0.75, 6.75)


@pytest.mark.parametrize(
    "report",
    [None, [], {"m": 1}, {"m": [[0]]}, {"m": [[99, 1]]}, {"m": [[-1, 1]]}, {"m": [[0, -1]]}, {"m": [[0, "1"]]}],
)
def test_a_damaged_report_is_refused(report):
    """It ends its relay, and changes no other histogram."""
    with pytest.raises(TalkError):
        add_gaps(report, defaultdict(empty_gap_histogram).__getitem__)
