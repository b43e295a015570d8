"""How far a download is, in words and over the pipe."""

import pytest

from ichat.downloads.report import DownloadReport, Rate, read_report, span
from ichat.fleet.load_times import LoadTimes
from ichat.fleet.worker_load import ExpectedLoad, WorkerLoad
from ichat.protocol.load_story import DOWNLOADING, story_of

GB = 10**9


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (DownloadReport("downloading", "", 43 * GB, 100 * GB, 210e6), "43 %, 210 MB/s, about 5 min"),
        (DownloadReport("downloading", "by process 7", GB, 2 * GB, 0.0), "50 %, by process 7"),
        (DownloadReport("downloading", "", 999, 1000, 1.0), "99 %, 0.0 MB/s, about 1 s"),
        (DownloadReport("downloading", "", 0, 0, 0.0), ""),
        (DownloadReport("waiting", "waiting for process 7"), "waiting for process 7"),
    ],
)
def test_a_report_in_words(report, words):
    """Unknown parts are left out, and a report is the same after the pipe."""
    assert report.words() == words
    assert read_report(report.line()) == report


@pytest.mark.parametrize(
    "line",
    [
        "", "{", "[1]", "null", '{"state": "other"}', '{"state": "done", "rate": "fast"}', '{"why": "x"}', "[" * 9999,
        '{"state": "done", "directory": 1}', '{"state": "done", "rate": NaN}', '{"state": "done", "done_bytes": true}',
    ],
)  # fmt: skip
def test_other_lines_are_no_reports(line):
    """A library's own output on the pipe changes nothing."""
    assert read_report(line) is None


def test_the_rate_is_that_of_the_last_seconds():
    """A standstill is seen, and a long past is forgotten."""
    rate = Rate(10.0)
    for second in range(30):
        assert rate.add(second * 100, float(second)) == (0 if second == 0 else 100)
    for second in range(30, 45):
        last = rate.add(2900, float(second))
    assert last == 0
    assert rate.still_s(44.0) == 15


@pytest.mark.parametrize(("seconds", "words"), [(0.2, "1 s"), (59, "59 s"), (240, "4 min"), (7300, "2 h")])
def test_a_span_has_a_single_unit(seconds, words):
    assert span(seconds) == words


def test_a_download_does_not_count_for_later_loads():
    """It is a phase of this load, and its rest is that of the load without it."""
    load = WorkerLoad("start", expected=ExpectedLoad(20.0, {}))
    load.enter(DOWNLOADING, 0.0)
    load.own_detail = "43 %"
    assert story_of(load.story(300.0)) == "downloading 43 %, 300 s; about 20 s left"
    load.enter("checking", 300.0)
    assert [phase.detail for phase in load.story(305.0).phases] == ["", ""]
    assert load.story(305.0).rest_s == 15
    load.end(310.0)
    times = LoadTimes()
    times.add("m", "start", load.story(0.0))
    assert times.expected("m", "start") == 10
    assert times.expected_load("m", "start").phases == {"checking": 10}
