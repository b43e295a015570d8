"""How the gateway's answers look in a pipe: an answer in, text out."""

import csv
import io
import re
import time

import pytest

from ichat.cli.explain import sentence_of_scale, show_route
from ichat.cli.screen import Screen
from ichat.cli.usage import show as show_usage
from ichat.cli.views import (
    failure_of,
    progress_of,
    rest_of,
    show_models,
    show_plan,
    show_status,
    show_troubles,
    show_worker,
    show_workers,
)

READY = {
    "worker_id": "w1", "managed": True, "state": "ready", "phase": "ready", "model_names": ["org/m", "m"],
    "backend": "vllm", "host": "10.0.0.1", "port": 8001, "in_flight": 3, "heartbeat_age_s": 1.26, "restarts": 0,
    "progress": {"running": 2, "waiting": 1, "kv_use": 0.375, "prompt_tokens": 80, "cached_tokens": 70},
    "args": {"max_model_len": 8192, "seed": None, "dtype": "auto"}, "changed_args": ["max_model_len"],
}  # fmt: skip
FAILED = {**READY, "worker_id": "w2", "state": "failed", "failure": "ended with exit code 70", "cause": "No memory.",
          "ended_at": 1767225600.5, "last_lines": ["\x1b[31mbroken\x1b[0m\x1b]0;title\x07", "bye"]}  # fmt: skip


@pytest.fixture
def text_of(capsys):
    """Show an answer in a pipe, and return the text."""

    def show(function, answer, **more):
        function(Screen(), answer, **more)
        text = capsys.readouterr().out
        assert "\x1b" not in text
        return text

    return show


def cells_of(line, head):
    return dict(zip(head.split(), line.split(), strict=True))


def test_a_worker_is_one_line_with_a_word_for_each_column(text_of):
    """Also one of which nothing is known, or whose values are of another kind."""
    strange = {"worker_id": 7, "state": None, "progress": "x", "args": [], "heartbeat_age_s": float("inf")}
    head, ready, *others = text_of(show_workers, {"data": [READY, {"worker_id": "w3"}, strange]}).splitlines()
    found = cells_of(ready, head)
    assert (found["WORKER"], found["STATE"], found["MODEL"], found["ADDRESS"]) == (
        "w1", "ready", "org/m,m", "10.0.0.1:8001",
    )  # fmt: skip
    assert (found["RUNNING"], found["KV_USE"], found["HITS"], found["LAST_HEARTBEAT"]) == ("2", "38%", "88%", "1.3s")
    assert cells_of(others[0], head) == {name: "w3" if name == "WORKER" else "-" for name in head.split()}
    assert len(others[1].split()) == len(head.split())


def test_a_failed_workers_line_ends_with_event_and_cause(text_of):
    _, line = text_of(show_workers, {"data": [FAILED]}).splitlines()
    assert line.endswith("ended with exit code 70: No memory")
    assert failure_of({"state": "broken", "lost": [{"worker_id": "w9", "why": "is gone"}]}) == (
        "has lost worker w9, which is gone, of its group"
    )
    assert failure_of({"state": "wedged"}) == "is wedged"


def test_a_worker_is_shown_with_the_arguments_that_differ_from_defaults(text_of):
    shown = text_of(show_worker, READY)
    assert "arguments other than the engine's defaults (1 of 3; --all shows all)" in shown
    assert "max_model_len" in shown
    assert "dtype" not in shown
    assert "dtype" in text_of(show_worker, READY, all_args=True)


def test_a_cause_is_shown_only_while_its_end_is_the_last(text_of):
    """Last lines are shown without what they would do to a terminal."""
    shown = text_of(show_worker, FAILED)
    assert "last lines before it ended\n  broken\n  bye\n" in shown
    assert re.search(r"^cause +No memory", shown, re.MULTILINE)
    assert not re.search(r"^cause ", text_of(show_worker, {**FAILED, "state": "ready"}), re.MULTILINE)


@pytest.mark.parametrize(
    ("worker", "line"),
    [
        ({"state": "loading", "phase": "loading weights"}, "w: loading (loading weights)"),
        ({"state": "ready", "phase": "ready", "restarts": 1}, "w: ready after 1 restart"),
        (
            {"state": "restarting", "failure": "ended", "cause": "No memory.", "restarts": 2},
            "w: restarting since it ended: No memory after 2 restarts",
        ),
    ],
)
def test_progress_is_one_line_with_phase_and_restarts(worker, line):
    assert progress_of({"worker_id": "w", **worker}) == line


def test_models_show_length_and_whether_they_are_loaded(text_of):
    models = [{"id": "a", "owned_by": "vllm", "max_model_len": 8192, "loaded": False}, {"id": "b", "loaded": True}]
    head, *rows = text_of(show_models, {"data": models}).splitlines()
    assert [(cells_of(row, head)["LENGTH"], cells_of(row, head)["LOADED"]) for row in rows] == [
        ("8192", "no"), ("-", "yes"),
    ]  # fmt: skip


def test_the_status_has_machines_only_if_there_are_several(text_of):
    gpu = {"index": 0, "name": "H100", "memory_total_bytes": 80 * 2**30, "memory_used_bytes": 40 * 2**30, "use": 0.9}
    status = {
        "gateway": {"id": "gw", "uptime_s": 90061}, "workers": {"ready": 1, "failed": 2},
        "resources": {"cpu": {"count": 8, "use": 0.25}, "gpus": [gpu]},
        "models": [{"id": "m", "workers": 1, "in_flight": 3, "queued": 4, "waiting_s": 2}],
    }  # fmt: skip
    shown = text_of(show_status, status)
    assert "25% of 8" in shown
    assert "2 failed, 1 ready" in shown
    assert "MACHINE" not in shown
    assert "H100" in shown
    machines = [{"name": "here", "gpus": [gpu]}, {"name": "there"}]
    assert text_of(show_status, {**status, "machines": machines}).count("MACHINE") == 2
    assert "none" in text_of(show_status, {})


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        ({"gpus": 8.0, "gpus_free": 5.5, "kinds": ["H100"], "unanswered_since": None}, "5.5 of 8 H100 GPUs free"),
        ({"gpus": 8.0, "gpus_free": None, "kinds": []}, "- of 8 GPUs free"),
        ({"gpus": 0.0, "gpus_free": 0.0, "kinds": []}, "no GPUs"),
        (
            {"gpus": 1.0, "gpus_free": 1.0, "unanswered_since": time.time() - 5 * 86400 - 9},
            "1 of 1 GPUs free, no answer for 5d",
        ),
    ],
)
def test_the_status_has_the_share_of_ray(text_of, share, shown):
    """Also if the gateway's machine is the only one."""
    found = text_of(show_status, {"machines": [{"name": "here", "has_gateway": True, "ray": share}]})
    assert "RAY" in found
    assert shown in found
    assert "RAY" not in text_of(show_status, {"machines": [{"name": "here"}, {"name": "there", "ray": None}]})


def test_troubles_and_plans_are_lines(text_of):
    assert text_of(show_troubles, ["It is full."]) == "! It is full.\n\n"
    assert text_of(show_troubles, []) == ""
    plan = {"plan": [{"action": "restart", "what": "w1", "why": "dtype"}], "summary": "1 worker restarts."}
    assert text_of(show_plan, plan).splitlines()[1:] == ["restart  w1    dtype", "1 worker restarts."]


def test_a_route_names_the_chosen_worker_and_why(text_of):
    candidates = [
        {"worker_id": "w1", "state": "ready", "load": 1, "in_flight": 0, "in_flight_max": 8, "chosen": True},
        {"worker_id": "w2", "state": "draining", "in_flight": 2, "in_flight_max": 8, "why_not": "drains"},
    ]
    shown = text_of(show_route, {"rule": "round_robin", "chosen": "w1", "candidates": candidates})
    assert shown.startswith("→ w1 (its turn)\n")
    assert "yes" in shown.splitlines()[2]
    assert shown.splitlines()[3].endswith("drains")
    assert "It goes to w1: it is its turn" in shown
    refused = text_of(show_route, {"rule": "queue_full", "chosen": None, "reason": "all are full"})
    assert refused.startswith("→ no worker now: it is refused (429)\n")
    assert "It is refused (429): all are full." in refused


USED = {"by": ["model"], "rows": [{"model": "m,1", "requests": 2, "busy_s": 61}], "storage": "ok",
        "limits": [{"limit": "tokens_day", "allowed": 10, "used": 0.25, "left": 9.75}]}  # fmt: skip


def test_usage_has_no_needless_zeros_and_quotes_csv(text_of):
    """Money has no needless zeros, and a model's name with a comma stays one cell."""
    table = text_of(show_usage, USED, as_csv=False)
    assert "m,1" in table
    assert "1m1s" in table
    assert "9.75" in table
    head, row = csv.reader(io.StringIO(text_of(show_usage, USED, as_csv=True)))
    assert (row[0], row[head.index("requests")], row[head.index("busy_s")]) == ("m,1", "2", "61")


def test_a_broken_ledger_is_noted_beside_the_usage(capsys):
    show_usage(Screen(), {**USED, "storage": "the disk is full"}, as_csv=True)
    assert "This may not be all: the disk is full." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        ({}, ""),
        ({"ready_in_s": 40}, "about 40s left"),
        ({"ready_in_s": 0}, "it is slower than usual"),
        ({"load": {"phases": [{"detail": "3 of 8 shards", "seconds": 12.9, "expected_s": 14}]}},
         "3 of 8 shards, 12 s (last time 14s)"),
        ({"load": {"elapsed_s": 10, "expected_s": 50, "phases": []}, "ready_in_s": 7}, "about 40s left"),
        ({"load": "x"}, ""),
    ],
)  # fmt: skip
def test_the_rest_of_a_load_is_in_words(worker, words):
    """The newest phase with its last duration, and the remaining time as far as it is known."""
    assert rest_of(worker) == words


@pytest.mark.parametrize(
    ("fact", "line"),
    [
        ({"gpu_ids": None}, "gpus all"),
        ({"gpu_ids": []}, "gpus none"),
        ({"gpu_ids": [0, 1]}, "gpus 0, 1"),
        ({"origin": "api"}, "started by the gateway, by its API"),
        ({"managed": False}, "started by hand"),
        ({"host": "::1"}, "address [::1]:8001"),
        ({"group": {"id": "g", "rank": 0, "size": 2}}, "group rank 0 of 2 in g"),
        ({"versions": {"vllm": "0.32.0", "torch": "2.9"}}, "backend vllm 0.32.0 torch 2.9"),
        ({"lost": [{"worker_id": "w9", "why": "is gone"}]}, "lost worker w9, which is gone, of its group"),
        ({"retry_in_s": 61}, "starts in 1m1s"),
    ],
)
def test_each_fact_about_a_worker_is_a_line(text_of, fact, line):
    assert line in [" ".join(one.split()) for one in text_of(show_worker, {**READY, **fact}).splitlines()]


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        ({"exit_code": 70}, "exit code 70"),
        ({"signal": "SIGKILL", "exit_code": -9, "cause": "No memory"}, "SIGKILL, No memory"),
        ({}, ""),
    ],
)
def test_the_last_end_of_a_worker_that_runs_again_says_how(text_of, ended, words):
    """A time that no calendar has is left out."""
    shown = text_of(show_worker, {**READY, "ended_at": 1767225600.5, **ended})
    [line] = [one for one in shown.splitlines() if one.startswith("ended last")]
    assert line.partition("+")[2].partition(", ")[2] == words
    assert "ended last" not in text_of(show_worker, {**READY, "ended_at": 2.0**40, **ended})


def test_status_says_how_the_processes_before_have_ended(capsys):
    """Each fact is a line: the last takeover, crashes, and the process that still ends its connections."""
    gateway = {
        "id": "g", "term": 3, "retiring_pid": 7,
        "last_takeover": {"at": 1.0, "pid": 7, "version": "0.9", "waited_s": 0.25},
        "last_crash": {"pid": 5, "version": "0.9", "at": None, "waited_s": None},
        "last_relay_crash": {"number": 2, "pid": 9, "at": 1.0, "how": "has ended by signal SIGKILL"},
        "relays": [
            {"number": 1, "pid": 8, "state": "accepting", "connections": 4, "requests": 3, "cpu_s": 1.5,
             "rss_bytes": 2**20, "restarts": 0, "age_s": 61.0},
            {"number": 1, "pid": 6, "state": "retiring", "connections": 1, "requests": 1, "rss_bytes": 0},
        ],
    }  # fmt: skip
    show_status(Screen(), {"gateway": gateway})
    text = re.sub("  +", "  ", re.sub(r"\d{4}-\d\d-\d\d [^ ,]+", "TIME", capsys.readouterr().out))
    for line in (
        "term  3",
        "relays  1 accepting with 4 connections and 3 requests, 1 retiring with 1 connection and 1 request",
        "last takeover  TIME, from process 7 (0.9), requests waited 0.25 s",
        "retiring  process 7 ends its connections",
        "last crash  of process 5 (0.9), no relay was left",
        "relay crash  TIME, relay 2 (process 9) has ended by signal SIGKILL",
        "1  8  accepting  4  3  1.5s  1.0MiB  0  1m1s",
        "1  6  retiring  1  1  -  -  -  -",
    ):
        assert line in text.splitlines()


def test_copies_have_a_column_where_there_are_any(text_of):
    """Workers without copies, and models without them, look as before."""
    copy = {**READY, "copy": 2, "copies": 3}
    head, first, second = text_of(show_workers, {"data": [copy, READY]}).splitlines()
    assert (cells_of(first, head)["COPY"], cells_of(second, head)["COPY"]) == ("2/3", "-")
    assert "COPY" not in text_of(show_workers, {"data": [READY]})
    model = {"id": "m", "workers": 2, "in_flight": 0, "queued": 0}
    counts = {"copies": {"ready": 2, "starting": 1, "wanted": 3}}
    assert "ready 2, starting 1, wanted 3" in text_of(show_status, {"models": [{**model, **counts}]})
    assert "COPIES" not in text_of(show_status, {"models": [model]})


def test_places_have_a_column_where_the_gateway_chooses_any(text_of):
    """Workers of this machine without named GPUs look as before, and so do workers that were started elsewhere."""
    usual, elsewhere = {**READY, "managed": True, "where": "here"}, {**READY, "where": "fd00::7"}
    head, first, second = text_of(show_workers, {"data": [{**usual, "where": "ray:gpu-7:0"}, usual]}).splitlines()
    assert (cells_of(first, head)["WHERE"], cells_of(second, head)["WHERE"]) == ("ray:gpu-7:0", "here")
    assert "WHERE" not in text_of(show_workers, {"data": [usual, {**elsewhere, "managed": False}]})


def test_the_copies_of_a_model_are_explained():
    """Their number, the load, and how the number last changed; a load that is not known is said to be so."""
    scale = {"min": 1, "max": 4, "ready": 3, "starting": 1, "draining": 0, "load": 2.55, "reason": "steady", "busy_s": 4.0,
             "changed": "up", "changed_reason": "busy", "changed_s": 42.0}  # fmt: skip
    assert sentence_of_scale(scale) == (
        "Its copies: 3 ready, 1 starting, of 1 to 4; the load is 2.5 of 3 copies, busy for 4.0s (steady)."
        " It last went up 42s ago (busy)."
    )
    quiet = {**scale, "load": None, "busy_s": None, "changed": None, "reason": "unknown"}
    assert sentence_of_scale(quiet).endswith("the load is not known now (unknown).")
