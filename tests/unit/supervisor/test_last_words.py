"""Which lines of a worker its end was about."""

import signal

import pytest

from ichat.observability.logs.lines import Line
from ichat.supervisor.failure_causes import cause_of
from ichat.supervisor.last_words import ERROR_S, LAST_S, are_errors, lines_of_end, plain
from ichat.supervisor.run_progress import RunProgress, end_of

LONG_CONTEXT = (
    "(APIServer pid=7) WARNING 11-21 21:05:02 [model.py:2024] User-specified max_model_len (65536) is greater than the"
    " derived max_model_len (max_position_embeddings=2048.0 or model_max_length=None in model's config.json)."
)
BROKEN = "(EngineCore pid=9) ERROR 11-21 21:05:02 [core.py:708] RuntimeError: the engine broke"
ENDED_AT = 10_000.0


def lines_at(*timed):
    return [Line(seq, at, text) for seq, (at, text) in enumerate(timed, 1)]


def test_a_warning_of_the_load_is_no_cause():
    """Neither of a worker that was killed after it was ready, nor of one that broke by an error while it loaded."""
    lines = lines_at((ENDED_AT - 60, LONG_CONTEXT), (ENDED_AT - 1, "INFO:     GET /health"))
    progress = RunProgress(0.0, up_at=ENDED_AT - 30, ended_at=ENDED_AT, ooms=None)
    end = end_of(-signal.SIGKILL, "", progress, lines, told="", lines_max=50)
    assert (end.why, end.cause) == ("was ended by signal SIGKILL", "it was killed from outside (SIGKILL)")
    assert end.last_lines == [line.text for line in lines]
    lines = lines_at((ENDED_AT - 60, LONG_CONTEXT), (ENDED_AT - 50, BROKEN), (ENDED_AT, "bye"))
    assert cause_of(lines_of_end(lines, ENDED_AT, None), 1, oom_killed=False) == "RuntimeError: the engine broke"


def test_a_worker_that_was_ready_has_no_cause_from_its_load():
    """Not even an error of it: the worker became ready after that."""
    lines = lines_at((ENDED_AT - 5, BROKEN), (ENDED_AT - 4, "ready"), (ENDED_AT, "bye"))
    assert lines_of_end(lines, ENDED_AT, ENDED_AT - 4) == ["bye"]
    assert lines_of_end(lines, ENDED_AT, None) == [BROKEN, "ready", "bye"]


@pytest.mark.parametrize("was_up", [False, True])
def test_errors_count_longer_than_other_lines(was_up):
    """While it loads, from its start on; afterwards an error of long ago was of a request."""
    up_at = 0.0 if was_up else None
    old, errors = ENDED_AT - ERROR_S - 1, [BROKEN, "Traceback (most recent call last):", "  File x", "ValueError: no"]
    lines = lines_at(
        *((old, text) for text in errors),
        *((ENDED_AT - LAST_S - 1, text) for text in errors),
        (ENDED_AT - LAST_S - 1, "said in passing"),
        (ENDED_AT - LAST_S, "last words"),
    )
    assert lines_of_end(lines, ENDED_AT, up_at) == [*errors * (1 if was_up else 2), "last words"]


@pytest.mark.parametrize(
    ("line", "is_error"),
    [
        (LONG_CONTEXT, False),
        (BROKEN, True),
        ("\x1b[0;36m(EngineCore pid=9)\x1b[0;0m ERROR 11-21 21:05:02 [core.py:708] no", True),
        ("2026-11-21 21:05:02,135 INFO    ichat.roles.worker: ValueError: told in passing", False),
        ("INFO:     127.0.0.1 - GET /v1/models", False),
        ("[2026-11-21 21:05:02 TP0] Scheduler hit an exception: Traceback (most recent call last):", True),
        ("[2026-11-21 21:05:02 TP0] Load weight end.", None),
        ("torch.OutOfMemoryError: CUDA out of memory.", True),
        ("MemoryError", True),
        ("[rank0]:[E1121 21:05:02.1 ProcessGroupNCCL.cpp:616] Watchdog caught collective operation timeout", True),
        ("terminate called after throwing an instance of 'std::bad_alloc'", True),
        ("an Error is not always one", None),
        ("", None),
    ],
)
def test_a_line_is_an_error_by_its_level_or_form(line, is_error):
    """Its level where it has one, otherwise its form."""
    assert are_errors([plain(line)]) == [is_error]


def test_a_traceback_is_one_error():
    """Its indented lines are of it; the next line of the log is not."""
    lines = [
        "x",
        "Traceback (most recent call last):",
        '  File "a.py", line 1',
        "    f()",
        "ValueError: no",
        "  more",
        "y",
    ]
    assert are_errors(lines) == [None, True, True, True, True, True, None]
