"""How requests look that have ended: an answer of the gateway in, text out."""

import argparse

import pytest

from ichat.cli.client import JsonReply
from ichat.cli.requests import add_requests_flags, phases_of, run_requests
from ichat.cli.screen import Screen
from ichat.errors import Exit

DONE = {
    "id": "mine", "own_id": "req-1", "key": "team", "client": "1.2.3.4:5", "method": "POST", "path": "/v1/chat/completions",
    "route": "/v1/chat/completions", "model": "m", "alias": "name", "passed": [{"model": "big", "reason": "full"}],
    "worker": "m-0", "status": 200, "error": "", "phase": "", "started_at": 1.0, "ended_at": 11.0, "duration_s": 10.0,
    "phases": {"queued_s": 5.0, "overhead_s": 0.0005, "head_s": 0.9995, "first_s": 1.5, "body_s": 2.5},
    "tokens": {"input": 9, "output": 7, "cached": 4, "is_estimate": False}, "bytes_in": 2048, "bytes_out": 4096,
    "chunks": 7, "trace_id": "abc",
}  # fmt: skip
NOT_ASKED = {"queued_s": 0.5, "overhead_s": None, "head_s": None, "first_s": None, "body_s": None}


class Answers:
    """An API with these answers by path; `asked` has the parameters of each call."""

    def __init__(self, in_flight=(), finished=(), kept_max=500):
        self.values = {
            "/v1/admin/requests": {"requests": list(in_flight), "total": len(in_flight)},
            "/v1/admin/requests/finished": {"requests": list(finished), "since": 0.0, "kept_max": kept_max},
        }
        self.asked = []

    def get(self, path):
        return self.call("GET", path)

    def call(self, _method, path, params=None):
        self.asked.append((path, params))
        return JsonReply(self.values[path], "{}")


@pytest.fixture
def shown(capsys):
    def show(api, *words):
        usage = argparse.ArgumentParser()
        add_requests_flags(usage)
        usage.add_argument("--json", action="store_true")
        assert run_requests(api, Screen(), usage.parse_args(words)) == 0
        text = capsys.readouterr().out
        assert "\x1b" not in text
        return text

    return show


def test_a_timeline_has_the_phases_in_proportion(shown):
    """Each begins where the one before it ends, and a mark stands for a fortieth of the time."""
    text = shown(Answers(finished=[DONE]), "mine")
    assert "name -> m" in text
    assert "big: full" in text
    assert "9 in (4 cached), 7 out" in text
    bars = {line[:21].strip(): line[34:] for line in text.rpartition("\n\n")[2].splitlines()}
    assert bars == {
        "queue": "#" * 20, "gateway": " " * 20 + "#", "until the head": " " * 20 + "####",
        "until the first token": " " * 24 + "#" * 6, "until the end": " " * 30 + "#" * 10, "in all": "#" * 40,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("phases", "last"),
    [(NOT_ASKED, ("in the gateway", 9.5, 0.5)), ({**NOT_ASKED, "overhead_s": 0.5}, ("without an answer", 9.0, 1.0))],
)
def test_the_time_of_no_phase_is_shown(phases, last):
    """A request that was refused, or cut off before its answer, has no time that is not explained."""
    assert phases_of({**DONE, "phases": phases})[-1] == last


def test_lists_have_a_line_for_each_request_and_ask_for_the_filters(shown):
    """A filter means requests that have ended; without any, requests in flight are shown."""
    api = Answers([{"id": "now", "phase": "queued", "age_s": 2.0}], [DONE, {"id": "\x1b[2Jevil\u202e", "status": 499}])
    assert "now" in shown(api)
    head, first, second = shown(api, "--failed", "--model", "m", "--limit", "2").splitlines()
    assert head.split()[:2] == ["ENDED", "STATUS"]
    assert first.split()[-1] == "mine"
    assert second.split()[-1] == "evil"
    assert api.asked == [
        ("/v1/admin/requests", None), ("/v1/admin/requests/finished", {"model": "m", "failed": "1", "limit": "2"}),
    ]  # fmt: skip


@pytest.mark.parametrize(("kept_max", "words"), [(500, "the last 500"), (0, "finished_requests_max = 0")])
def test_an_unknown_id_names_the_access_log(shown, kept_max, words):
    """The sentence says since when requests are kept, and that the log may have more."""
    with pytest.raises(Exit) as refused:
        shown(Answers(kept_max=kept_max), "gone")
    assert refused.value.code == 1
    assert words in str(refused.value)
    assert "logs.access_log" in str(refused.value)
