"""What `top` shows: the state by its events, panes, sorting, filters, and sizes of terminals."""

import pytest

from ichat.cli import top_view
from ichat.cli.screen import Screen
from ichat.cli.top_state import TopState
from ichat.cli.top_view import Choice, cells_of, frame, hint_of, pane_of


def worker(worker_id, **more):
    return {"worker_id": worker_id, "model_name": "m", "state": "ready", "in_flight": 0, "kv_use": 0.5, **more}


STATE = {
    "gateway": {"version": "0.1.0", "uptime_s": 90_061.0},
    "workers": [worker("a", in_flight=3), worker("b", state="failed", failure="has ended", in_flight=9)],
    "models": [{"id": "m", "workers": 1, "in_flight": 3, "queued": 2, "waiting_s": 1.5, "loaded": None}],
    "machines": [{
        "id": "x", "name": "host", "cpus": 8, "cpu_use": 0.25, "memory_total_bytes": 2**35, "memory_available_bytes": 2**34,
        "workers": ["a"],
        "gpus": [{"index": 0, "name": "H200", "use": 0.9, "memory_used_bytes": 2**36, "memory_total_bytes": 2**37,
                  "held_by": [{"worker_id": "a", "memory_bytes": 1}]}],
    }],
    "history": {
        "sample_s": 5.0, "columns": {"at": [1, 2], "requests": [1, 50], "ttft_p50_ms": [None, 120], "kv_use": [0.1, 0.5]},
        "models": {"m": {"requests": [None, 50], "output_tokens": [None, 1000], "ttft_p50_ms": [None, 120]}},
    },
}  # fmt: skip
REQUEST = {"id": "r1", "phase": "streaming", "model": "m", "age_s": 12.0, "client": "1.2.3.4", "tokens_out_estimate": 7}


@pytest.fixture
def state():
    found = TopState()
    found.update("state", STATE)
    return found


def shown(state, choice, width=80, height=24):
    return [text for text, _ in frame(state, choice, width, height)]


def test_events_change_what_they_tell_of(state):
    """A state replaces everything, a change one thing; what is gone is no longer shown."""
    state.update("workers", {"changed": [worker("c")], "gone": ["a"]})
    state.update("models", {"models": [{"id": "n"}], "gone": ["m"]})
    state.update("requests", {"requests": [REQUEST], "total": 5})
    state.update("something new", {"changed": 7})
    assert (list(state.workers), list(state.models)) == (["b", "c"], ["n"])
    state.update("state", STATE)
    assert list(state.workers) == ["a", "b"]


def test_rates_are_by_the_newest_sample():
    """Without a sample, or with an interval that cannot be, nothing is known or 5 s are assumed."""
    state = TopState()
    assert (state.rate("requests"), state.ttft_ms("m")) == (None, None)
    state.update("state", {"history": {"sample_s": 0, "columns": {"at": [1], "requests": [10]}, "models": 7}})
    assert (state.rate("requests"), state.rate("requests", "m"), state.has_state) == (2.0, None, True)
    state.update("state", {**STATE, "history": {**STATE["history"], "sample_s": 10.0}})
    assert (state.rate("requests"), state.rate("output_tokens", "m"), state.ttft_ms("m")) == (5.0, 100.0, 120)
    state.update("sample", {"requests": 30, "models": {"m": {"ttft_p50_ms": 90}}})
    assert (state.rate("requests"), state.rate("output_tokens", "m"), state.ttft_ms("m")) == (3.0, None, 90)


def test_each_pane_shows_what_it_has(state):
    """Figures are rates by the newest sample."""
    state.update("requests", {"requests": [REQUEST], "total": 1})
    columns, rows = pane_of(state, "m")
    assert cells_of(columns, rows) == [["m", "1", "3", "2", "10.0", "200", "120ms", "1.5s", "-"]]
    columns, rows = pane_of(state, "g")
    assert [row[:4] for row in cells_of(columns, rows)] == [
        ["host", "-", "8 CPUs", "25%"],
        ["host", "0", "H200", "90%"],
    ]
    columns, rows = pane_of(state, "r")
    assert cells_of(columns, rows)[0][:3] == ["12s", "streaming", "m"]
    columns, rows = pane_of(state, "w")
    assert cells_of(columns, rows)[1][-1] == "has ended"


def test_keys_sort_invert_and_filter(state):
    """Every key does one thing; the filter takes all keys until Enter."""
    choice = Choice()

    def first():
        return [line.split()[0] for line in shown(state, choice)[5:7] if line]

    assert first() == ["a", "b"]
    choice.press("i")
    assert first() == ["b", "a"]
    for key in "isss":
        choice.press(key)
    assert shown(state, choice)[4].split()[3] == "flight▾"
    assert first() == ["a", "b"]
    for key in "/failq\x7f\r":
        choice.press(key)
    assert (choice.filter, choice.is_over, first()) == ("fail", False, ["b"])
    choice.press("\x1b")
    choice.press("?")
    assert any("quits" in line for line in shown(state, choice))
    choice.press("m")
    choice.press("q")
    assert (choice.pane, choice.is_over) == ("m", True)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (40, 10), (20, 6), (10, 2)])
@pytest.mark.parametrize("pane", list("mwgr"))
def test_the_view_fits_into_every_terminal(state, width, height, pane):
    """No line is wider than the terminal, and there are exactly as many as it has."""
    many = [worker(f"a-worker-with-quite-a-long-name-{number}", machine="host" * 9) for number in range(100)]
    state.update("workers", {"changed": many, "gone": []})
    for choice in (Choice(pane), Choice(pane, offset=90), Choice(pane, has_help=True), Choice(pane, filter="x" * 99)):
        lines = shown(state, choice, width, height)
        assert len(lines) == height
        assert max(map(len, lines)) <= width


def test_scrolling_ends_at_the_last_row(state):
    """The last page is full."""
    state.update("workers", {"changed": [worker(f"w{number:03}") for number in range(100)], "gone": ["a", "b"]})
    choice = Choice()
    for _ in range(50):
        choice.press(" ")
    rows = shown(state, choice)[5:-1]
    assert rows[-1].startswith("w099")
    assert len([row for row in rows if row]) == len(rows)
    assert shown(state, choice)[-1] == hint_of("w")[:79] + "…" if len(hint_of("w")) > 80 else hint_of("w")


def test_nothing_that_a_worker_says_reaches_the_terminal_as_a_command(state):
    """Escape sequences are taken out of every cell."""
    state.update(
        "workers", {"changed": [worker("a", failure="\x1b]0;title\x07bad\x1b[2J", machine="\x9bx")], "gone": []}
    )
    assert not any("\x1b" in line or "\x9b" in line for line in shown(state, Choice(), 200))


@pytest.mark.parametrize("pane", "mwgr")
@pytest.mark.parametrize(("width", "height"), [(1, 1), (5, 3), (20, 10), (80, 24), (200, 60)])
def test_every_size_is_kept(state, pane, width, height):
    """A name in Chinese takes two columns a character, and a combining mark none."""
    names = ["通义千问-七十二亿参数-指令微调", "e\u0301" * 40, "x" * 300]
    state.update("workers", {"changed": [worker(one, model_name=one, failure=one) for one in names]})
    state.update("models", {"models": [{"id": one} for one in names]})
    lines = shown(state, Choice(pane=pane), width, height)
    assert len(lines) == height
    for line in lines:
        assert sum(2 if "\u4e00" <= one <= "\u9fff" else one != "\u0301" for one in line) <= width


def test_columns_stand_below_each_other(state):
    """Whatever the names take."""
    state.update("state", {"workers": [worker("通义"), worker("abcdef")], "machines": [], "models": []})
    narrow, wide = shown(state, Choice())[5:7]
    assert wide.index(" m ") + 2 == narrow.index(" m ")


def test_names_do_nothing(state):
    """Sequences, line ends and what turns the order of letters around are taken out."""
    state.update("workers", {"changed": [worker("\x1b]0;title\x07a\u202eb\r\nc\x9b2J")]})
    lines = shown(state, Choice(), 80, 24)
    assert any(line.startswith("ab c") for line in lines)
    assert all(line.isprintable() for line in lines)


def test_only_what_is_shown_is_written(state, monkeypatch):
    """Of thousands of workers, a screenful costs what a screenful is."""
    written = []
    monkeypatch.setattr(
        top_view, "cells_of", lambda columns, rows: written.append(len(rows)) or cells_of(columns, rows)
    )
    state.update("workers", {"changed": [worker(f"w{number}") for number in range(1000)]})
    choice = Choice(offset=2000)
    assert shown(state, choice)[-2].split()[0] == "w999"
    assert written == [18]


def test_plain_columns_stand_below_each_other(capsys):
    """Chinese takes two columns of a terminal, also where a table is written without one."""
    Screen().table(("model", "state"), [("通义", "ready"), ("abcdef", "cold")])
    assert capsys.readouterr().out.splitlines() == ["MODEL   STATE", "通义    ready", "abcdef  cold"]


def test_a_refused_file_is_the_first_line(state):
    """Until the file is taken; the screen stays as large as it was."""
    refused = {"state": "refused", "path": "/i.toml", "since": 1e9, "in_force_since": 9e8, "errors": ["port: no", "x"]}
    before = shown(state, Choice())
    state.update("config", refused)
    (first, style), *_ = frame(state, Choice(), 300, 24)
    assert first.startswith("/i.toml is refused since 2001-09-0")
    assert first.endswith(" is in force: port: no; x")
    assert style == "red"
    assert len(shown(state, Choice())) == len(before)
    state.update("state", {**STATE, "config": refused})
    assert shown(state, Choice(), 300)[0] == first
    state.update("config", {**refused, "state": "changed", "errors": []})
    assert " and is not read yet; the configuration of " in shown(state, Choice(), 300)[0]
    state.update("config", {**refused, "state": "ok"})
    assert shown(state, Choice()) == before


def test_a_worker_that_is_down_shows_its_cause(state):
    """What ended it, and what is known of the reason."""
    failed = worker("a", state="failed", failure="ended with exit code 64", cause="unknown flag --modle")
    state.update("workers", {"changed": [failed], "gone": []})
    columns, rows = pane_of(state, "w")
    assert cells_of(columns, rows)[0][-1] == "ended with exit code 64: unknown flag --modle"


def test_a_loading_worker_shows_its_phase(state):
    """The phase with its seconds stands where the reason of a failure would; each kind of state has its colour."""
    phases = [{"name": "importing vllm", "seconds": 9.0}, {"name": "loading weights", "seconds": 3.4, "expected_s": 14}]
    story = {"elapsed_s": 12.4, "expected_s": 52.4, "phases": phases}
    more = [
        worker("c", state="loading", phase="loading weights", load=story),
        worker("d", state="cold"),
        worker("e", cause="was killed"),
        worker("f", state="draining", phase="ready"),
    ]
    state.update("workers", {"changed": more})
    styles = {text.split()[0]: style for text, style in frame(state, Choice(), 200, 24)[5:11]}
    assert styles == {"a": "", "b": "red", "c": "yellow", "d": "dim", "e": "", "f": "yellow"}
    lines = {line.split()[0]: line for line in shown(state, Choice(), 200)[5:11]}
    assert lines["c"].endswith("loading weights, 3 s (last time 14 s); about 40 s left")
    assert lines["e"].endswith("-")
    assert lines["f"].endswith("-")


def test_the_opening_has_the_models_and_marks_the_pane(state):
    """One sees what is served, which pane it is, and by what it is sorted, also where there is nothing but ASCII."""
    state.update("models", {"models": [{"id": "n", "workers": 0, "loaded": False}, {"id": "x", "workers": 0}]})
    lines = shown(state, Choice("m"), 200)
    assert lines[3] == "models: m (1 ready), n (cold), x (not ready)"
    assert lines[-1].startswith("[m models] w workers g GPUs r requests  s sort")
    assert lines[4].startswith("model▾ ")
    plain = shown(state, Choice("m", has_unicode=False, is_inverted=True), 200)
    assert plain[4].startswith("model ^ ")


def test_relays_are_in_the_head_and_follow_their_event(state):
    """Retiring relays are shown apart, with their remaining requests."""
    assert not any(line.startswith("relays") for line in shown(state, Choice()))
    relays = [
        {"number": number, "state": state_, "connections": 5, "requests": requests}
        for number, state_, requests in ((1, "accepting", 3), (1, "retiring", 2), (2, "accepting", 1))
    ]
    state.update("gateway", {"version": "1", "relays": relays})
    wanted = "relays: 2 accepting with 10 connections and 4 requests, 1 retiring with 5 connections and 2 requests"
    assert wanted in shown(state, Choice(), width=120)
